"""Loss, gradients, every metric and the whole new state are those of one device, however the work is cut."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.invariance import BASES, CASES, PATIENCE_S, errors

NEAR = {'bfloat16 sums, data 2': 2e-2, 'int8 sums, data 2, fsdp 2, tensor 2': 5e-2}


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def start(num_devices, *arguments):
  flags = f'--xla_force_host_platform_device_count={num_devices}'
  return subprocess.Popen(
    [sys.executable, '-m', 'tests.invariance', *map(str, arguments)],
    cwd=Path(__file__).parents[1],
    env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'},
    stdout=subprocess.PIPE,
  )


@pytest.fixture(scope='module')
def report(tmp_path_factory):
  folder, port = tmp_path_factory.mktemp('invariance'), free_port()
  children = [start(8, 'meshes', folder)]
  try:
    children += [start(4, 'process', folder, index, port) for index in range(2)]
    outputs = [child.communicate(timeout=PATIENCE_S)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
  finally:
    for child in children:
      child.kill()
      child.wait()
  alone, processes = (dict(np.load(folder / f'{name}.npz')) for name in ('alone', 'processes'))
  return {**json.loads(outputs[0]), '2 processes': errors(processes, alone)}


@pytest.mark.timeout(3 * PATIENCE_S)  # the first one waits for the report
@pytest.mark.parametrize('case', [*CASES, 'one trajectory a row', '2 processes'][len(BASES) :])
def test_an_update_does_not_depend_on_how_it_is_cut(report, case):
  found = report[case]
  assert {'1/loss/policy', '1/loss/critic', '1/dis/kept', '1/policy/grad_norm'} <= found.keys()
  assert any('/mu/' in name for name in found)  # 0.1 times the gradient
  allowed = NEAR.get(case, 2e-5)
  worst = max(found, key=found.get)
  assert found[worst] < allowed, f'{worst} is off by {found[worst]} of its largest value'
  moments = [error for name, error in found.items() if '/mu/' in name]
  if case in NEAR:
    assert max(moments) > 1e-4  # gradients were rounded
