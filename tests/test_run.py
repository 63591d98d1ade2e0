"""The commands as a user runs them: a whole tiny run, kill and resume, signals, bad input."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from sao_jax import checkpoint

ROOT = Path(__file__).parents[1]
TINY = {
  'model.width': 16,
  'model.num_heads': 2,
  'model.num_kv_heads': 1,
  'model.head_dim': 8,
  'model.mlp_width': 32,
  'model.num_layers': 1,
  'engine.num_slots': 8,
  'engine.prefill_rows': 4,
  'engine.prefill_buckets': '(24,)',
  'supervised.num_steps': 20,
  'supervised.batch_size': 16,
  'value.num_batches': 2,
  'value.updates_per_batch': 1,
  'train.num_steps': 8,
  'train.batch_size': 8,
  'train.micro_rows': 2,
  'train.save_every': 2,
  'evaluation.every': 4,
  'evaluation.num_problems': 8,
  'sandbox.num_workers': 1,
}


@pytest.fixture(scope='session')
def cache(tmp_path_factory):
  """Compiled programs are shared by the runs of this file."""
  return str(tmp_path_factory.mktemp('compilation_cache'))


def command(script: str, *flags: str) -> list[str]:
  return [sys.executable, str(ROOT / 'experiments' / script), *flags]


def run_flags(workdir, variant: str = 'sao', **overrides) -> list[str]:
  values = {**TINY, **{k.replace('__', '.'): v for k, v in overrides.items()}}
  config = ROOT / 'configs' / 'beyondaime.py'
  return [
    f'--config={config}:{variant}',
    f'--workdir={workdir}',
    *(f'--config.{key}={value}' for key, value in values.items()),
  ]


def call(cache, argv, cwd=ROOT, timeout=600) -> subprocess.CompletedProcess:
  env = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': cache}
  return subprocess.run(
    argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
  )


def lines(path) -> list[dict]:
  return [json.loads(line) for line in Path(path).read_text().splitlines()]


def check_ledger(workdir, *, steps: int, batch: int = 8, value_batches: int = 2) -> None:
  """Every episode is accounted for, and trained once."""
  history = {}
  for row in lines(workdir / 'events.jsonl'):
    history.setdefault(row['episode'], []).append(row)
  ends = Counter(rows[-1]['event'] for rows in history.values())
  assert set(ends) <= {'trained', 'dropped', 'failed', 'cancelled'}, ends
  trained = [r for rows in history.values() for r in rows if r['event'] == 'trained']
  assert len(trained) == len({r['episode'] for r in trained}) == batch * (steps + value_batches)
  prompts = Counter(r['prompt'] for r in trained)
  assert max(prompts.values()) == 1  # a prompt that was issued again is trained on once
  for rows in history.values():
    assert rows[0]['event'] in ('pending', 'reissued')


def check_metrics(workdir, *, steps: int) -> None:
  rows = lines(workdir / 'metrics.jsonl')
  updates = [r for r in rows if 'loss/policy' in r]
  assert [r['step'] for r in updates] == list(range(1, steps + 1))
  times = [r['time_s'] for r in updates]
  assert times == sorted(times)
  evaluations = [r['step'] for r in rows if 'eval/pass@1' in r]
  assert evaluations == [*range(0, steps, 4), steps]  # none is lost with a killed process
  for name in (
    'reward/mean reward/dispatched_mean length/trained length/dispatched loss/policy loss/critic dis/kept '
    'dis/dropped_low dis/dropped_high dis/ess critic/explained_variance critic/grad_norm policy/grad_norm '
    'policy/entropy mismatch/k3 async/staleness_mean async/staleness_max async/staleness_hist '
    'async/in_system idle/learner idle/engine tokens/sampled tokens/trained compiles time_s'
  ).split():
    assert name in updates[0], name
  assert (
    updates[-1]['compiles'] <= updates[0]['compiles'] + 2
  )  # new row counts of a batch, nothing else


@pytest.fixture(scope='session')
def finished(tmp_path_factory, cache):
  """One whole run, and what it printed."""
  workdir = tmp_path_factory.mktemp('runs') / 'whole'
  done = call(cache, command('run.py', *run_flags(workdir)))
  assert done.returncode == 0, done.stderr[-3000:]
  return workdir, done.stdout


def test_a_whole_run(finished):
  workdir, printed = finished
  check_ledger(workdir, steps=8)
  check_metrics(workdir, steps=8)
  assert 'explained variance' in printed
  assert 'held-out pass@1' in printed.splitlines()[-1]
  assert (workdir / 'curves.png').stat().st_size > 10_000
  assert list((workdir / 'tensorboard').iterdir())
  assert json.loads((workdir / 'config.json').read_text())['sao']['eps_high'] == 5.0
  assert checkpoint.steps(workdir / 'checkpoints' / 'rl')[-1] == 8


def test_a_finished_run_skips_every_phase(finished, cache):
  workdir, _ = finished
  before = (workdir / 'events.jsonl').read_bytes()
  again = call(cache, command('run.py', *run_flags(workdir)))
  assert again.returncode == 0, again.stderr[-3000:]
  assert 'resumed at update 8 of 8' in again.stdout
  assert (workdir / 'events.jsonl').read_bytes() == before
  check_metrics(workdir, steps=8)


def test_evaluate_scores_a_problem_file(finished, cache, tmp_path):
  workdir, _ = finished
  problems = tmp_path / 'p.csv'
  problems.write_text('Question,Answer\n1+1=?,2\n2*3=?,6\n')
  out = tmp_path / 'episodes.jsonl'
  done = call(
    cache,
    command(
      'evaluate.py',
      f'--workdir={workdir}',
      f'--problems={problems}',
      '--samples=3',
      f'--output={out}',
    ),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert '2 problems, 6 episodes, 0 without a verdict, update 8' in done.stdout
  assert [r['prompt'] for r in lines(out)] == ['p.csv:2'] * 3 + ['p.csv:3'] * 3


@pytest.mark.parametrize('variant', ['grpo', 'running_mean'])
def test_baselines_ride_through_the_same_loop(cache, tmp_path, variant):
  flags = run_flags(tmp_path / 'w', variant, train__num_steps=2, value__num_batches=0)
  done = call(cache, command('run.py', *flags))
  assert done.returncode == 0, done.stderr[-3000:]
  rows = [r for r in lines(tmp_path / 'w' / 'metrics.jsonl') if 'loss/policy' in r]
  assert len(rows) == 2 and 'loss/critic' not in rows[0]
  groups = Counter(
    r['prompt'] for r in lines(tmp_path / 'w' / 'events.jsonl') if r['event'] == 'trained'
  )
  assert set(groups.values()) == {8 if variant == 'grpo' else 1}


def test_sync_mode_is_on_policy(cache, tmp_path):
  flags = run_flags(tmp_path / 'w', runtime__mode='sync', train__num_steps=3)
  done = call(cache, command('run.py', *flags))
  assert done.returncode == 0, done.stderr[-3000:]
  rows = [r for r in lines(tmp_path / 'w' / 'metrics.jsonl') if 'loss/policy' in r]
  assert [r['async/staleness_max'] for r in rows] == [0, 0, 0]
  assert all(abs(r['dis/ratio_mean'] - 1) < 1e-4 and r['dis/kept'] == 1 for r in rows)


LONGER = {'train__num_steps': 40}  # so that a signal finds it at work


def start(cache, workdir):
  env = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': cache}
  return subprocess.Popen(
    command('run.py', *run_flags(workdir, **LONGER)),
    cwd=ROOT,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def wait_for_update(process, workdir, step: int) -> None:
  """Until metrics.jsonl has that update."""
  deadline = time.monotonic() + 240
  path = workdir / 'metrics.jsonl'
  while time.monotonic() < deadline and process.poll() is None:
    if path.exists() and any(
      json.loads(line)['step'] >= step
      for line in path.read_text().splitlines(keepends=True)
      if line.endswith('\n')
    ):
      return
    time.sleep(0.02)
  process.kill()
  raise AssertionError(f'update {step} did not come: {process.communicate()[1][-2000:]}')


def descendants(pid: int) -> set[int]:
  """Processes below one, as far down as they go."""
  parents = {}
  for path in Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      parents[int(path.parent.name)] = int(path.read_text().rpartition(')')[2].split()[1])
  found, new = set(), {pid}
  while new:
    new = {child for child, parent in parents.items() if parent in new} - found
    found |= new
  return found


def alive(pid: int) -> bool:
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except OSError:
    return False


def check_log_so_far(workdir) -> int:
  """Of a run that was killed: whole lines are sound, nothing is trained twice. The number of whole lines."""
  path = workdir / 'events.jsonl'
  text = path.read_text() if path.exists() else ''
  events = [json.loads(line) for line in text.split('\n')[:-1]]
  trained = [row['episode'] for row in events if row['event'] == 'trained']
  assert len(trained) == len(set(trained))
  return len(events)


@pytest.mark.timeout(900)
def test_kill_9_at_20_random_times_resumed_each_time(finished, cache, tmp_path):
  """Half of the kills come at any time of a process, start-up included; half soon after new lines of the log."""
  workdir, chance = tmp_path / 'killed', random.Random(0)
  finished_early = 0
  for kill in range(20):
    process = start(cache, workdir)
    if kill % 2:
      time.sleep(chance.uniform(0.0, 8.0))
    else:
      deadline, before = time.monotonic() + 60, check_log_so_far(workdir)
      while time.monotonic() < deadline and process.poll() is None:
        if check_log_so_far(workdir) not in (0, before):
          break
        time.sleep(0.02)
      time.sleep(chance.uniform(0.0, 0.5))
    children = descendants(process.pid)
    finished_early += process.poll() is not None
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors[-3000:]
    deadline = time.monotonic() + 10
    while any(map(alive, children)):
      assert time.monotonic() < deadline, f'left behind: {children}'
      time.sleep(0.05)
    check_log_so_far(workdir)
  assert finished_early <= 10  # most of the kills struck
  done = call(cache, command('run.py', *run_flags(workdir, **LONGER)))
  assert done.returncode == 0, done.stderr[-3000:]
  check_ledger(workdir, steps=40)
  check_metrics(workdir, steps=40)


def test_sigterm_saves_and_exits_75_then_resumes(finished, cache, tmp_path):
  workdir = tmp_path / 'stopped'
  process = start(cache, workdir)
  wait_for_update(process, workdir, 3)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=120)
  assert process.returncode == 75, errors
  assert 'the same command goes on' in errors.splitlines()[-1]
  done = call(cache, command('run.py', *run_flags(workdir, **LONGER)))
  assert done.returncode == 0, done.stderr[-3000:]
  check_ledger(workdir, steps=40)
  check_metrics(workdir, steps=40)


# Bad input: exit 2, one clear line, nothing written over


def refused(cache, flags, script='run.py') -> str:
  done = call(cache, command(script, *flags), timeout=120)
  assert done.returncode == 2, (done.returncode, done.stderr)
  last = done.stderr.strip().splitlines()[-1]
  assert last.startswith('error: ')
  assert 'Traceback' not in done.stderr
  return last


@pytest.mark.parametrize(
  ('override', 'words'),
  [
    ({'sao__eps_lwo': 1}, ['eps_lwo', 'eps_low']),
    ({'sao__eps_low': 'abc'}, ['eps_low', 'abc']),
    ({'sao__eps_low': 1.5}, ['sao.eps_low=1.5', '(0, 1]']),
    ({'sao__eps_high': 0}, ['sao.eps_high=0']),
    ({'sao__objective': 'ddis'}, ['sao.objective', 'ddis', 'dis']),
    ({'train__batch_size': 0}, ['train.batch_size=0', 'at least 1']),
    ({'runtime__mode': 'turbo'}, ['runtime.mode', 'turbo', 'async']),
    ({'sandbox__timeout_s': 500.0}, ['sandbox.timeout_s=500.0', 'runtime.episode_timeout_s=120.0']),
    ({'data__path': 'missing.jsonl'}, ['missing.jsonl', 'no such file']),
  ],
)
def test_bad_config(cache, tmp_path, override, words):
  message = refused(cache, run_flags(tmp_path / 'w', **override))
  assert all(word in message for word in words), message
  assert not (tmp_path / 'w').exists()


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('', ['no problems']),
    ('{"question": "1+1", "answer": 2}\n{"question": ', ['line 2', 'malformed']),
    ('{"question": "1+1", "comment": 2}\n', ['no answer', 'comment']),
    ('{"question": "1+1", "answer": 2}\n{"question": "1+2"}\n', ['line 2', 'no answer']),
  ],
)
def test_bad_problem_file(cache, tmp_path, text, words):
  path = tmp_path / 'p.jsonl'
  path.write_text(text)
  message = refused(cache, run_flags(tmp_path / 'w', data__path=path))
  assert all(word in message for word in [str(path), *words]), message
  assert not (tmp_path / 'w').exists()


def test_unknown_variant_flag_and_missing_config(cache, tmp_path):
  flags = run_flags(tmp_path / 'w', 'saoo')
  assert 'saoo' in refused(cache, flags)
  assert 'workdir' in refused(cache, [*run_flags(tmp_path / 'w'), '--wokdir=x'])
  assert '--config is missing' in refused(cache, [])


def test_workdir_of_another_config_is_left_alone(finished, cache):
  workdir, _ = finished
  before = {p: p.read_bytes() for p in workdir.rglob('*') if p.is_file()}
  message = refused(cache, run_flags(workdir, sao__eps_high=4.0))
  assert 'sao.eps_high is 5.0 there and 4.0 here' in message
  assert {p: p.read_bytes() for p in workdir.rglob('*') if p.is_file()} == before


def test_corrupt_checkpoint_is_named_and_left_alone(finished, cache, tmp_path):
  workdir = tmp_path / 'copy'
  shutil.copytree(finished[0], workdir)
  victim = next((workdir / 'checkpoints' / 'rl').glob('00000008*/host.json'))
  victim.write_bytes(victim.read_bytes()[:-10])
  events = (workdir / 'events.jsonl').read_bytes()
  message = refused(cache, run_flags(workdir))
  assert '00000008' in message
  assert (workdir / 'events.jsonl').read_bytes() == events


def test_evaluate_refuses_a_folder_without_a_run(cache, tmp_path):
  assert 'holds no run' in refused(cache, [f'--workdir={tmp_path}'], 'evaluate.py')
