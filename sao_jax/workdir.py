"""The folder of a run: whose it is, and what is in it."""

import fcntl
import hashlib
import json
from pathlib import Path
from typing import IO, Any

from ml_collections import ConfigDict

from sao_jax import build, checkpoint
from sao_jax.report.metrics import read_metrics


def run_id(config: ConfigDict) -> str:
  """Of a workdir: equal configs have equal ids, and a checkpoint of another id is refused."""
  return hashlib.sha256(config.to_json(sort_keys=True).encode()).hexdigest()[:12]


def check_warm_start(workdir: Path, config: ConfigDict) -> None:
  """Raises ValueError if `supervised.workdir` names no run with a whole warm start of the same model."""
  path = config.supervised.workdir
  if not path or checkpoint.steps(workdir / 'checkpoints' / 'rl'):
    return
  theirs = saved_config(Path(path))
  steps = checkpoint.steps(Path(path) / 'checkpoints' / 'supervised')
  if not steps or steps[-1] != theirs.supervised.num_steps:
    raise ValueError(f'supervised.workdir={path}: the warm start of that run is not complete')
  if theirs.model.to_dict() != config.model.to_dict():
    raise ValueError(f'supervised.workdir={path}: that run has another model; use the same model.*')


def claim(workdir: Path, config: ConfigDict) -> IO[str]:
  """Makes the workdir this config's and this process's, as long as the returned file is open.

  Raises:
    ValueError: if it belongs to another config, or another process is at work in it; nothing is written then.
  """
  path = workdir / 'config.json'
  ours = json.loads(config.to_json())
  if path.exists():
    theirs = json.loads(path.read_text())
    if theirs != ours:
      raise ValueError(
        f'{workdir} holds a run with another config ({_difference(theirs, ours)}): choose another --workdir'
      )
    return _lock(workdir)
  if workdir.exists() and any(workdir.iterdir()):
    raise ValueError(f'{workdir} is not empty and holds no run: choose another --workdir')
  workdir.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(ours, indent=2, sort_keys=True) + '\n')
  return _lock(workdir)


def check_shared(workdir: Path, config: ConfigDict) -> None:
  """Of a process that follows, after process 0 has claimed the workdir: raises ValueError if it is not here, or another config's."""
  path = workdir / 'config.json'
  if not path.exists():
    raise ValueError(
      f'--workdir={workdir} has no config.json here, and process 0 has written it: it must be one folder for all processes'
    )
  check_same(json.loads(path.read_text()), config)


def check_same(theirs: Any, config: ConfigDict) -> None:
  """Raises ValueError, with the first field that differs, if `theirs` is not this config as JSON."""
  ours = json.loads(config.to_json())
  if theirs != ours:
    raise ValueError(
      f'process 0 has another config ({_difference(theirs, ours)}): give all processes the same flags'
    )


def _lock(workdir: Path) -> IO[str]:
  file = (workdir / '.lock').open('w')
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    file.close()
    raise ValueError(
      f'another process is at work in {workdir}: wait for it, or choose another --workdir'
    ) from None
  return file


def _difference(theirs: Any, ours: Any, prefix: str = '') -> str:
  """The first field that differs, with both values."""
  if isinstance(theirs, dict) and isinstance(ours, dict):
    for key in sorted({*theirs, *ours}):
      if theirs.get(key) != ours.get(key):
        return _difference(theirs.get(key), ours.get(key), f'{prefix}.{key}' if prefix else key)
  return f'{prefix} is {theirs!r} there and {ours!r} here'


def first_evaluation(workdir: Path) -> float:
  """The held-out score before RL, as metrics.jsonl has it."""
  rows = read_metrics(workdir / 'metrics.jsonl')
  return next(row['eval/pass@1'] for row in rows if 'eval/pass@1' in row)


def saved_config(workdir: Path) -> ConfigDict:
  """The config of the run in a workdir.

  Raises:
    ValueError: if there is none.
  """
  path = workdir / 'config.json'
  if not path.exists():
    raise ValueError(f'{workdir} holds no run: there is no config.json in it')
  return ConfigDict(json.loads(path.read_text()), convert_dict=True)


def saved_policy(parts: build.Parts, workdir: Path, step: int | None) -> tuple[Any, int]:
  """The policy of a checkpoint of a run as engines take it, the last one for None, and its update.

  Raises:
    ValueError: if there is no such checkpoint.
  """
  root = workdir / 'checkpoints' / 'rl'
  steps = checkpoint.steps(root)
  if not steps or step not in (None, *steps):
    raise ValueError(
      f'{root} has checkpoints of the updates {steps}: step {step} is not among them'
    )
  chosen = steps[-1] if step is None else step
  # The id of the run as it was trained: evaluation settings may differ here.
  identity = run_id(saved_config(workdir))
  state = checkpoint.restore(root, chosen, parts.state, run_id=identity).state
  return parts.model.export(state), chosen
