"""The folder of a run: whose it is, and what is in it."""

import fcntl
import hashlib
import json
import math
from pathlib import Path
from typing import IO, Any

import jax
from ml_collections import ConfigDict

from sao_jax import build, checkpoint
from sao_jax.learner import TrainState
from sao_jax.report.metrics import read_metrics

# Where and in which pieces a run computes, and not what: a run may go on with others. What compressed sums owe is owed by each of
# the mesh.data devices: with them that axis stays.
PLACEMENT = (
  'mesh',
  'engine.tensor',
  'engine.expert',
  'engine.apart',
  'model.attention',
  'model.attention_chunk',
  'model.expert_backend',
  'model.remat',
  'train.optimizer_memory',
  'train.micro_rows',
  'train.logprob_chunk',
)
MOVES = 'moves.txt'  # of a run that went on with another PLACEMENT, a line each
# Of the model, what a warm start does not depend on.
_NOT_ARCHITECTURE = (
  'attention',
  'attention_chunk',
  'expert_backend',
  'remat',
  'dtype',
  'head_dtype',
)


def _without_placement(config: dict[str, Any]) -> dict[str, Any]:
  """A config as JSON has it, without PLACEMENT."""
  kept = {name: dict(x) if isinstance(x, dict) else x for name, x in config.items()}
  if kept['train']['compression'] != 'none':
    kept['debtors'] = kept['mesh']['data']
  for field in PLACEMENT:
    section, _, name = field.partition('.')
    (kept[section] if name else kept).pop(name or section, None)
  return kept


def run_id(config: ConfigDict) -> str:
  """Of a workdir: configs that are equal but for PLACEMENT have equal ids, and a checkpoint of another id is refused."""
  essence = _without_placement(json.loads(config.to_json()))
  return hashlib.sha256(json.dumps(essence, sort_keys=True).encode()).hexdigest()[:12]


def to_score(config: ConfigDict) -> ConfigDict:
  """The same run, to use its policy: over the devices that it was trained on where there are as many, or else on one."""
  needed = math.prod(config.mesh.values())
  if config.engine.apart:
    needed += config.engine.tensor * config.engine.expert
  if jax.device_count() < needed:
    return on_one_device(config)
  c = config.copy_and_resolve_references().unlock()
  c.model.attention = 'xla'  # of the learner
  return c.lock()


def on_one_device(config: ConfigDict) -> ConfigDict:
  """The same run where there is one device, to use its policy."""
  c = config.copy_and_resolve_references().unlock()
  c.model.attention = 'xla'
  c.mesh.update(dict.fromkeys(c.mesh, 1))
  c.engine.update({'tensor': 1, 'expert': 1, 'apart': False})
  c.train.update({'optimizer_memory': 'device', 'compression': 'none'})
  return c.lock()


def check_warm_start(workdir: Path, config: ConfigDict) -> None:
  """Raises ValueError if `supervised.workdir` names no run with a whole warm start of the same model."""
  path = config.supervised.workdir
  if not path or checkpoint.steps(workdir / 'checkpoints' / 'rl'):
    return
  theirs = saved_config(Path(path))
  steps = checkpoint.steps(Path(path) / 'checkpoints' / 'supervised')
  if not steps or steps[-1] != theirs.supervised.num_steps:
    raise ValueError(f'supervised.workdir={path}: the warm start of that run is not complete')
  models = [
    {name: value for name, value in c.model.to_dict().items() if name not in _NOT_ARCHITECTURE}
    for c in (theirs, config)
  ]
  if models[0] != models[1]:
    raise ValueError(f'supervised.workdir={path}: that run has another model; use the same model.*')


def claim(workdir: Path, config: ConfigDict) -> IO[str]:
  """Makes the workdir this config's and this process's, as long as the returned file is open.

  A run may go on with another PLACEMENT, which config.json has from then on; MOVES lists what changed.

  Raises:
    ValueError: if it belongs to another config, or another process is at work in it; nothing is written then.
  """
  path = workdir / 'config.json'
  ours = json.loads(config.to_json())
  if path.exists():
    theirs = json.loads(path.read_text())
    there, here = _without_placement(theirs), _without_placement(ours)
    if there != here:
      raise ValueError(
        f'{workdir} holds a run with another config ({_difference(there, here)}): choose another --workdir'
      )
    lock = _lock(workdir)
    if theirs != ours:
      with (workdir / MOVES).open('a') as moves:
        moves.write(_difference(theirs, ours) + '\n')
      _write(path, ours)
    return lock
  if workdir.exists() and any(workdir.iterdir()):
    raise ValueError(f'{workdir} is not empty and holds no run: choose another --workdir')
  workdir.mkdir(parents=True, exist_ok=True)
  _write(path, ours)
  return _lock(workdir)


def _write(path: Path, config: dict[str, Any]) -> None:
  """Whole or not at all."""
  aside = path.with_suffix('.partial')
  aside.write_text(json.dumps(config, indent=2, sort_keys=True) + '\n')
  aside.rename(path)


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


def saved_state(parts: build.Parts, workdir: Path, step: int | None) -> tuple[TrainState, int]:
  """A checkpoint of a run, the last one for None, and its update: the policy alone, without optimiser and critic.

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
  like = parts.state.replace(policy_opt=(), critic=(), critic_opt=(), errors={})
  return checkpoint.restore(root, chosen, like, run_id=identity, partial=True).state, chosen


def saved_policy(parts: build.Parts, workdir: Path, step: int | None) -> tuple[Any, int]:
  """The policy of `saved_state` as engines take it, and its update."""
  state, step = saved_state(parts, workdir, step)
  return parts.model.export(state), step
