"""The commands of an exact run: deterministic over processes, replay, doctor, a stop that takes too long."""

import os
import signal
import subprocess

import pytest

from sao_jax import checkpoint
from tests.test_run import cache, call, check_ledger, command, lines, run_flags, wait_for_update

STEPS = {'train__num_steps': 12, 'train__save_every': 3}
__all__ = ['cache']  # the fixture


def flags(workdir, **overrides):
  return command('run.py', *run_flags(workdir, **{**STEPS, **overrides}))


def start(cache, workdir, hash_seed='random', **overrides):
  env = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': cache, 'PYTHONHASHSEED': hash_seed}
  return subprocess.Popen(
    flags(workdir, **overrides),
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def parameters(printed: str) -> str:
  """The digest that a run prints at its end."""
  return next(line for line in printed.splitlines() if line.startswith('parameters ')).split()[1]


@pytest.fixture(scope='module')
def exact(cache, tmp_path_factory):
  """A deterministic run, and the digest of its parameters."""
  workdir = tmp_path_factory.mktemp('runs') / 'exact'
  process = start(cache, workdir, '1', runtime__mode='deterministic')
  printed, errors = process.communicate(timeout=280)
  assert process.returncode == 0, errors[-3000:]
  return workdir, parameters(printed)


def test_another_process_that_was_stopped_on_the_way_makes_the_same_run(exact, cache, tmp_path):
  workdir, changes = tmp_path / 'again', {'runtime__mode': 'deterministic'}
  process = start(cache, workdir, '2', **changes)
  wait_for_update(process, workdir, 4)
  process.send_signal(signal.SIGTERM)
  printed, errors = process.communicate(timeout=120)
  if process.returncode == 75:  # else it was quicker than the signal
    process = start(cache, workdir, '3', **changes)
    printed, errors = process.communicate(timeout=280)
  assert process.returncode == 0, errors[-3000:]
  expected, digest = exact
  assert parameters(printed) == digest
  for name in ('events.jsonl', 'metrics.jsonl'):
    assert (workdir / name).read_bytes() == (expected / name).read_bytes()
  check_ledger(workdir, steps=12)


def test_an_asynchronous_run_replays_and_the_doctor_reads_it(cache, tmp_path):
  workdir = tmp_path / 'w'
  done = call(cache, flags(workdir))
  assert done.returncode == 0, done.stderr[-3000:]
  again = call(cache, command('run.py', f'--replay={workdir}'))
  assert again.returncode == 0, again.stderr[-3000:]
  assert f'the same parameters {parameters(done.stdout)}' in again.stdout.splitlines()[-1]
  told = call(cache, command('doctor.py', str(workdir)))
  assert told.returncode == 0, told.stderr
  assert 'Every episode is accounted for' in told.stdout
  # A record that was tampered with.
  text = (workdir / 'replay.jsonl').read_text().splitlines()
  place = [i for i, line in enumerate(text) if '"kind":"update"' in line][6]
  text[place] = text[place].replace('"digest":"', '"digest":"f')
  (workdir / 'replay.jsonl').write_text('\n'.join(text) + '\n')
  wrong = call(cache, command('run.py', f'--replay={workdir}'))
  assert wrong.returncode == 3 and 'Traceback' not in wrong.stderr
  assert f'diverges at line {place + 1} of replay.jsonl' in wrong.stderr.splitlines()[-1]


def test_replay_refuses_a_folder_without_a_record(cache, tmp_path):
  done = call(cache, command('run.py', f'--replay={tmp_path}'))
  assert done.returncode == 2 and 'holds no run' in done.stderr.splitlines()[-1]


def test_a_stop_that_takes_too_long_leaves_the_last_checkpoint(cache, tmp_path):
  workdir = tmp_path / 'w'
  # No time at all: the process ends before it can save.
  process = start(cache, workdir, train__num_steps=200, runtime__stop_timeout_s=0.0001)
  wait_for_update(process, workdir, 5)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 75, errors[-3000:]
  assert 'stopped, after 0.0001 s in vain' in errors.splitlines()[-1]
  root = workdir / 'checkpoints' / 'rl'
  assert checkpoint.steps(root)[-1] >= 3
  assert all(row['episode'] for row in lines(workdir / 'events.jsonl')[:-1])
