"""Whole tiny runs on eight virtual devices: learner and engine on meshes of their own, experts, adapters, and what a run of one device says."""

import os

import numpy as np
import pytest

from tests.test_run import call as call_command
from tests.test_run import check_ledger, command, lines, run_flags

DEVICES = (
  '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 '
  '--xla_llvm_disable_expensive_passes=true'
)
FOUR_HEADS = {'model__num_heads': 4, 'model__num_kv_heads': 2, 'model__head_dim': 8}
QUICK = {
  **FOUR_HEADS,
  'runtime__mode': 'deterministic',
  'supervised__num_steps': 0,
  'train__num_steps': 2,
  'train__micro_rows': 4,
  'evaluation__every': 2,
  'evaluation__num_problems': 2,
}
EXPERTS = {'model__num_experts': 4, 'model__experts_per_token': 2}


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  return str(tmp_path_factory.mktemp('compilation_cache'))


def spread(cache, argv):
  """A command on eight virtual devices."""
  flags = os.environ.get('XLA_FLAGS', '')
  os.environ['XLA_FLAGS'] = f'{flags} {DEVICES}'
  try:
    return call_command(cache, argv, timeout=800)
  finally:
    os.environ['XLA_FLAGS'] = flags


@pytest.fixture(scope='module')
def call(cache):
  """Runs a tiny config; its metrics by update, without clocks."""

  def run(workdir, **changes):
    done = spread(cache, command('run.py', *run_flags(workdir, **{**QUICK, **changes})))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = changes.get('train__num_steps', QUICK['train__num_steps'])
    check_ledger(workdir, steps=steps)
    return [row for row in lines(workdir / 'metrics.jsonl') if 'loss/policy' in row]

  return run


def close(first, second):
  assert first.keys() == second.keys()
  for name, value in first.items():
    if name in ('time_s', 'idle/learner', 'idle/engine', 'compiles'):
      continue
    if value is None:  # what this update could not measure
      assert second[name] is None, name
    else:
      np.testing.assert_allclose(value, second[name], rtol=2e-3, atol=2e-4, err_msg=name)


def test_a_run_on_meshes_is_the_run_on_one_device(call, cache, tmp_path):
  """The first update, before a token that a rounding decides can make them differ. The engine has devices of its own."""
  mesh = {'mesh__tensor': 2, 'mesh__expert': 2, 'engine__tensor': 2, 'engine__expert': 2}
  alone = call(tmp_path / 'alone', **EXPERTS)
  cut = call(tmp_path / 'cut', **EXPERTS, **mesh, engine__apart=True)
  close(alone[0], cut[0])
  assert cut[0]['moe/load_max'] >= 1
  argv = command('evaluate.py', f'--workdir={tmp_path / "cut"}', '--samples=1')
  done = spread(cache, argv)  # over the devices that it was trained on
  assert '2 problems, 2 episodes, 0 without a verdict, update 2' in done.stdout, done.stderr


def test_threads_on_the_same_devices_with_adapters_and_compression(call, cache, tmp_path):
  """Learner, engine and evaluation launch programs of several devices at once: none may wait for another for ever."""
  mesh = {'mesh__data': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, 'engine__tensor': 2}
  options = {'model__lora_rank': 4, 'train__optimizer_memory': 'pinned_host'}
  options |= {'train__compression': 'bfloat16', 'runtime__mode': 'async', 'evaluation__every': 1}
  rows = call(tmp_path / 'run', **mesh, **options, train__num_steps=6)
  assert all(np.isfinite(row['loss/policy']) for row in rows)
  argv = command('evaluate.py', f'--workdir={tmp_path / "run"}', '--samples=1', '--limit=1')
  done = call_command(cache, argv, timeout=800)  # where there is one device
  assert '1 problems, 1 episodes, 0 without a verdict, update 6' in done.stdout, done.stderr
