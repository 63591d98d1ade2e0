"""A run of several processes: how they hear of each command, and whole tiny runs of two, stopped, killed, resumed.

python -m tests.test_crew FLAGS     experiments/run.py, with rewards that a policy this small would not earn
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from sao_jax import build
from sao_jax.runtime import crew as crews
from sao_jax.runtime.crew import ALONE, END, Command, Crew
from sao_jax.runtime.failures import RunFailed
from tests.test_build import config
from tests.test_run import ROOT, check_ledger, lines, run_flags, wait_for_update

PATIENCE_S = 480  # a twentieth of it does on two idle cores


class Store:
  """The key-value store of the coordination service."""

  def __init__(self):
    self.values, self.changed = {}, threading.Condition()

  def key_value_set_bytes(self, key, value, allow_overwrite=False):
    with self.changed:
      assert allow_overwrite or key not in self.values
      self.values[key] = value
      self.changed.notify_all()

  key_value_set = key_value_set_bytes

  def blocking_key_value_get_bytes(self, key, timeout_ms):
    with self.changed:
      if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
        raise jax.errors.JaxRuntimeError(f'DEADLINE_EXCEEDED: {key}')
      return self.values[key]

  def key_value_dir_get(self, prefix):
    return [(key, value) for key, value in self.values.items() if key.startswith(prefix + '/')]

  def key_value_delete(self, prefix):
    with self.changed:
      for key in [key for key in self.values if key == prefix or key.startswith(prefix + '/')]:
        del self.values[key]


@pytest.fixture
def three(monkeypatch):
  """(store, leader, two followers)."""
  monkeypatch.setattr(crews, 'SLICE_S', 0.02)
  store = Store()
  return store, Crew(store, 0, 3, 0.2), Crew(store, 1, 3, 0.2), Crew(store, 2, 3, 0.2)


def listen(follower, heard):
  thread = threading.Thread(target=lambda: heard.extend(follower.commands()), daemon=True)
  thread.start()
  return thread


def test_all_hear_every_command_in_order_and_nothing_is_left(three):
  store, leader, *followers = three
  heard = [[], []]
  threads = [listen(*pair) for pair in zip(followers, heard, strict=True)]
  rng = np.random.default_rng(0)
  arrays = {  # does not compress: several pieces
    'tokens': rng.integers(0, 2**31 - 1, (8, 100_000), np.int32),
    'mask': rng.random((8, 7), np.float32),
  }
  leader.tell('fresh')
  leader.tell('value head', 0.1 + 0.2)
  leader.tell('update', arrays=arrays)
  assert max(map(len, store.values.values())) <= crews.PIECE + 1
  leader.end(3, 'because', 1.0)
  for thread in threads:
    thread.join(5.0)
  for commands in heard:
    assert [(c.what, c.numbers) for c in commands] == [
      ('fresh', ()),
      ('value head', (0.1 + 0.2,)),
      ('update', ()),
      (END, (3, 'because')),
    ]
    for name, array in commands[2].arrays.items():
      np.testing.assert_array_equal(array, arrays[name])
      assert array.dtype == arrays[name].dtype
    assert len(commands[2].arrays) == 2
  assert store.values == {}


def test_the_leader_is_at_most_one_command_ahead(three):
  store, leader, first, second = three
  leader.tell('one')
  assert next(first.commands()).what == 'one'
  with pytest.raises(RunFailed, match=r'process 2 of 3 has not read a command for 0\.2 s'):
    leader.tell('two')
  assert next(second.commands()).what == 'one'
  leader.tell('two')
  assert not [key for key in store.values if key.startswith('sao_jax/crew/0/')]


def test_a_follower_that_fails_is_named_with_its_reason(three):
  _, leader, first, second = three
  leader.tell('one')
  next(first.commands())
  leader.raise_failed()
  second.fail('failed: no memory')
  with pytest.raises(RunFailed, match='process 2 of 3: failed: no memory'):
    leader.tell('two')
  with pytest.raises(RunFailed, match='no memory'):
    leader.raise_failed(60.0)


def test_a_follower_asks_to_stop(three):
  _, leader, first, _ = three
  assert not leader.asked_to_stop()
  first.ask_to_stop()
  first.ask_to_stop()
  assert leader.asked_to_stop()


def test_a_service_that_is_gone_ends_the_wait(three):
  store, _, first, _ = three

  def gone(key, timeout_ms):
    raise jax.errors.JaxRuntimeError('UNAVAILABLE: failed to connect\nmore')

  store.blocking_key_value_get_bytes = gone
  with pytest.raises(RunFailed, match=r'does not answer: UNAVAILABLE: failed to connect$'):
    next(first.commands())


def test_alone_nothing_is_told():
  ALONE.tell('update', arrays={'x': np.ones(3)})  # there is no store
  ALONE.raise_failed(10.0)
  ALONE.end(0, '', 1.0)
  ALONE.compiled(None)
  assert not ALONE.asked_to_stop()


def test_no_pickle():
  with pytest.raises(ValueError, match=r'[Oo]bject arrays'):
    crews.encode(Command('update', (), {'x': np.array([object()])}))


# Whole runs.

SETTINGS = {
  'model__num_kv_heads': 2,
  'supervised__num_steps': 0,
  'runtime__mode': 'sync',
  'runtime__heartbeat_s': 12.0,
  'value__num_batches': 1,
  'train__num_steps': 5,
  'train__save_every': 2,
  'train__micro_rows': 8,
  'sao__policy_freeze_steps': 0,
  'mesh__fsdp': 4,
  'evaluation__every': 4,
  'evaluation__num_problems': 4,
}


# Clocks, and how many episodes are still to come.
OTHERS = {'time_s', 'idle/learner', 'idle/engine', 'tokens/per_second', 'async/in_system'}


class Processes:
  """The processes of one run. They end with the test."""

  def __init__(self, folder, workdir, count, changes=({}, {})):
    from tests.test_invariance import free_port

    flags = (
      f'--xla_force_host_platform_device_count={4 // count} --xla_backend_optimization_level=0 '
      '--xla_llvm_disable_expensive_passes=true'
    )
    env = os.environ | {
      'XLA_FLAGS': flags,
      'JAX_PLATFORMS': 'cpu',
      'JAX_COMPILATION_CACHE_DIR': str(folder / 'cache'),
      'TF_CPP_MIN_LOG_LEVEL': '2',
    }
    address, self.outputs, self.children = f'127.0.0.1:{free_port()}', [], []
    for index in range(count):
      argv = run_flags(workdir, **SETTINGS | changes[index])
      if count > 1:
        argv += [f'--coordinator={address}', f'--num_processes={count}', f'--process_id={index}']
      self.outputs.append(folder / f'{time.monotonic_ns()}-{index}')
      with self.outputs[-1].open('w') as output:
        self.children.append(
          subprocess.Popen(
            [sys.executable, '-m', 'tests.test_crew', *argv],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
          )
        )

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    for child in self.children:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
      child.wait()

  def codes(self, *expected):
    """Waits for the ends. Returns the last line of each."""
    deadline = time.monotonic() + PATIENCE_S
    for child in self.children:
      child.wait(max(deadline - time.monotonic(), 0.1))
    texts = [output.read_text() for output in self.outputs]
    assert tuple(child.returncode for child in self.children) == expected, [
      text[-2000:] for text in texts
    ]
    return [text.strip().splitlines()[-1] for text in texts]


def updates(workdir):
  return [row for row in lines(workdir / 'metrics.jsonl') if 'loss/policy' in row]


@pytest.mark.timeout(4 * PATIENCE_S)
def test_two_processes_die_stop_resume_and_learn_what_one_learns(tmp_path):
  two, one = tmp_path / 'two', tmp_path / 'one'
  with Processes(tmp_path, two, 2) as run:
    wait_for_update(
      run.children[0], two, 0
    )  # the first score: episodes are played, and the learner is not compiled yet
    run.children[1].kill()
    killed = time.monotonic()
    last = run.codes(3, -signal.SIGKILL)
    assert last[0] == 'failed: process 1 of 2 has not been heard for 12.0 s'
    assert time.monotonic() - killed < 3 * 12.0

  with Processes(tmp_path, two, 2) as run:
    wait_for_update(run.children[0], two, 1)
    run.children[0].send_signal(signal.SIGTERM)
    last = run.codes(75, 75)
    assert all('the same command goes on' in line for line in last), last

  with (
    Processes(tmp_path, two, 2) as run,
    Processes(tmp_path, one, 1, [{'train__num_steps': 1}]) as alone,
  ):
    alone.codes(0)
    run.codes(0, 0)
  check_ledger(two, steps=5, value_batches=1)
  rows = updates(two)
  assert [row['step'] for row in rows] == [1, 2, 3, 4, 5]
  scored = [row['step'] for row in lines(two / 'metrics.jsonl') if 'eval/pass@1' in row]
  assert scored == [0, 4, 5]
  # The first update, whose episodes are the same: later a token that a rounding decides makes runs differ.
  first = updates(one)[0]
  for name in first.keys() - OTHERS:
    np.testing.assert_allclose(rows[0][name], first[name], rtol=1e-4, atol=1e-5, err_msg=name)
  assert first['policy/grad_norm'] > 1e-3 and first['critic/return_mean'] > 0.1


def test_processes_with_different_configs_are_refused(tmp_path):
  changes = {}, {'sao__eps_high': 4.0}
  with Processes(tmp_path, tmp_path / 'w', 2, changes) as run:
    leader, follower = run.codes(2, 2)
  assert follower.startswith(
    'error: process 0 has another config (sao.eps_high is 5.0 there and 4.0'
  )
  assert leader.startswith('error: process 1 of 2 failed: ValueError: process 0 has another config')
  assert not (tmp_path / 'w').exists()


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'supervised__num_steps': 5}, r'supervised\.num_steps=5 with 2 processes'),
    ({'mesh__fsdp': 1}, r'the product of its sizes is 1, and 2 processes have \[1, 0\] devices'),
  ],
)
def test_what_two_processes_cannot_do(changes, words):
  changes = {'supervised__num_steps': 0, **changes}
  with (
    mock.patch.object(jax, 'process_count', return_value=2),
    pytest.raises(ValueError, match=words),
  ):
    build.parts(config(**changes))


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (('', 2, 0), 'without --coordinator: give HOST:PORT'),
    (('host:1', 1, 0), 'at least 2 processes'),
    (('host:1', 2, 2), 'count from 0'),
    (('here', 2, 0), 'must be HOST:PORT'),
  ],
)
def test_bad_flags(monkeypatch, flags, words):
  monkeypatch.syspath_prepend(ROOT / 'experiments')
  join = runpy.run_path(str(ROOT / 'experiments' / 'run.py'))['_join']
  names = ('coordinator', 'num_processes', 'process_id')
  with pytest.raises(ValueError, match=words):
    join(types.SimpleNamespace(**dict(zip(names, flags, strict=True))), config())


if __name__ == '__main__':
  from tests import tiny

  sys.path.insert(0, str(Path(ROOT) / 'experiments'))
  with tiny.rewarded():
    runpy.run_path(str(ROOT / 'experiments' / 'run.py'), run_name='__main__')
