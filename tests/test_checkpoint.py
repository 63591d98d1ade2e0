import dataclasses
import errno
import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from sao_jax import checkpoint, types


@flax.struct.dataclass
class State:
  step: Any
  params: Any
  moments: Any


def make_state(seed):
  rng = np.random.default_rng(seed)
  return State(
    step=jnp.int32(seed),
    params={
      'w': jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
      'low': jnp.asarray(rng.normal(size=5), jnp.bfloat16),
      'a/b.c': (np.arange(seed, seed + 3, dtype=np.uint16), np.float64(seed)),
    },
    moments=[None, np.zeros((0, 7), np.int8), np.array([True, seed > 1]), jnp.full(2, jnp.nan)],
  )


def make_trajectory(n, reward=1.0):
  return types.Trajectory(
    episode=f'e{n}',
    prompt_id='p',
    group='g',
    tokens=np.arange(n, dtype=np.int32),
    mask=np.arange(n) % 2 == 0,
    behavior_logprobs=np.linspace(-3, 0, n).astype(np.float32),
    versions=np.full(n, 7, np.int32),
    rewards=np.full(n, reward, np.float32),
    turn_ids=np.zeros(n, np.int32),
    terminated=False,
    truncated=True,
    stop_reason=types.StopReason.TOKEN_LIMIT,
    info={'tool_calls': 2, 'answer': 'zwölf'},
  )


HOST = {'rng': 2**70, 'ledger': {'offset': 123}, 'rewards': [0.1, float('inf')], 'none': None}


def save(root, step, keep=3, run_id='run', state=None, host=HOST, trajectories=()):
  state = make_state(step) if state is None else state
  return checkpoint.save(root, step, state, host, trajectories, run_id=run_id, keep=keep)


def restore(root, step, like=None, run_id='run', **options):
  like = make_state(0) if like is None else like
  return checkpoint.restore(root, step, like, run_id=run_id, **options)


def assert_same_bits(a, b):
  a, b = jax.tree.flatten(a), jax.tree.flatten(b)
  assert a[1] == b[1]
  for x, y in zip(a[0], b[0], strict=True):
    assert isinstance(x, jax.Array) == isinstance(y, jax.Array)
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def names(root):
  return sorted(p.name for p in root.iterdir())


def test_everything_comes_back_bit_for_bit(tmp_path):
  trajectories = [make_trajectory(5), make_trajectory(0), make_trajectory(3, reward=-0.5)]
  path = save(tmp_path, 12, trajectories=trajectories)
  assert path == tmp_path / '00000012'
  assert checkpoint.steps(tmp_path) == [12]
  got = restore(tmp_path, 12)
  assert_same_bits(got.state, make_state(12))
  assert got.host == HOST
  for a, b in zip(got.trajectories, trajectories, strict=True):
    for field in dataclasses.fields(a):
      x, y = getattr(a, field.name), getattr(b, field.name)
      assert type(x) is type(y)
      if isinstance(x, np.ndarray):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
      else:
        assert x == y


def test_restores_on_the_sharding_of_like_or_from_shapes_alone(tmp_path):
  device = jax.devices()[-1]  # an array put there on purpose must come back committed to it
  x = jax.device_put(jnp.arange(4.0), device)
  save(tmp_path, 1, state={'x': x, 'y': jnp.ones(2)})
  got = restore(tmp_path, 1, like={'x': x, 'y': jnp.zeros(2)}).state
  assert got['x'].sharding == x.sharding and got['x'].committed and not got['y'].committed
  shapes = {
    'x': jax.ShapeDtypeStruct((4,), np.float32),
    'y': jax.ShapeDtypeStruct((2,), np.float32),
  }
  got = restore(tmp_path, 1, like=shapes).state
  np.testing.assert_array_equal(got['x'], [0, 1, 2, 3])
  assert isinstance(got['y'], jax.Array)


def test_a_part_is_read_alone_where_that_is_asked_for(tmp_path):
  save(tmp_path, 7)
  like = make_state(0).replace(moments=())
  with pytest.raises(checkpoint.CheckpointError, match='expected absent'):
    restore(tmp_path, 7, like=like)
  got = restore(tmp_path, 7, like=like, partial=True)
  assert_same_bits(got.state, make_state(7).replace(moments=()))
  assert got.host == HOST
  more = like.replace(params=like.params | {'new': jnp.zeros(1)})
  with pytest.raises(checkpoint.CheckpointError, match=r'new.* is absent'):
    restore(tmp_path, 7, like=more, partial=True)


def test_restored_leaves_can_be_donated(tmp_path):
  save(tmp_path, 1, state={'x': jnp.arange(1024.0)})
  state = restore(tmp_path, 1, like={'x': jnp.zeros(1024)}).state
  got = jax.jit(lambda s: {'x': s['x'] + 1}, donate_argnums=0)(state)
  np.testing.assert_array_equal(got['x'], np.arange(1024) + 1)


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda s: s.replace(step=jnp.float32(0)), 'state.step is int32[], expected float32[]'),
    (
      lambda s: s.replace(params=s.params | {'w': jnp.zeros((4, 3))}),
      "state.params['w'] is float32[3, 4]",
    ),
    (lambda s: s.replace(params=s.params | {'new': jnp.zeros(1)}), "state.params['new'] is absent"),
    (lambda s: s.replace(moments=s.moments[:3]), 'state.moments[3] is float32[2], expected absent'),
    (lambda s: s.replace(moments=[None, np.zeros((0, 6), np.int8), *s.moments[2:]]), 'int8[0, 7]'),
  ],
)
def test_another_structure_is_refused_by_the_leaf(tmp_path, change, message):
  save(tmp_path, 1)
  with pytest.raises(checkpoint.CheckpointError) as error:
    restore(tmp_path, 1, like=change(make_state(0)))
  assert message in str(error.value) and '\n' not in str(error.value)


def test_prunes_to_the_newest_and_forgets_an_abandoned_future(tmp_path):
  for step in (1, 2, 3, 4):
    save(tmp_path, step, keep=2)
  assert names(tmp_path) == ['00000003', '00000004']
  # Back to 3, then on: 4 belongs to the future that was abandoned.
  save(tmp_path, 3, keep=2, host={'again': True})
  assert checkpoint.steps(tmp_path) == [3]
  assert restore(tmp_path, 3).host == {'again': True}
  save(tmp_path, 3, keep=1, host={'again': 2})
  assert restore(tmp_path, 3).host == {'again': 2}
  save(tmp_path, 5, keep=1)
  assert names(tmp_path) == ['00000005']


def test_half_written_ones_are_ignored_and_removed_by_the_next_save(tmp_path):
  save(tmp_path, 1)
  shutil.copytree(tmp_path / '00000001', tmp_path / '00000002')
  (tmp_path / '00000002' / 'COMPLETE').unlink()
  shutil.copytree(tmp_path / '00000001', tmp_path / '.aside-00000003-dead')
  (tmp_path / 'notes.txt').write_text('mine')
  assert checkpoint.steps(tmp_path) == [1]
  with pytest.raises(checkpoint.CheckpointError, match=r'no complete checkpoint of step 2.*\[1\]'):
    restore(tmp_path, 2)
  save(tmp_path, 4)
  assert names(tmp_path) == ['00000001', '00000004', 'notes.txt']


def test_any_damaged_file_is_noticed(tmp_path):
  path = save(tmp_path, 1, trajectories=[make_trajectory(3)])
  files = [p for p in path.rglob('*') if p.is_file()]
  assert {'COMPLETE', 'host.json', 'trajectories.npz'} < {p.name for p in files} and len(files) > 5
  for file in files:
    good = file.read_bytes()
    for bad in (good[:-1], bytes([good[0] ^ 1]) + good[1:], None):
      file.unlink() if bad is None else file.write_bytes(bad)
      with pytest.raises(checkpoint.CheckpointError) as error:
        restore(tmp_path, 1)
      assert str(path) in str(error.value) or (bad is None and file.name == 'COMPLETE')
      file.write_bytes(good)
  restore(tmp_path, 1)


def test_another_run_is_refused(tmp_path):
  save(tmp_path, 9, run_id='old')
  with pytest.raises(checkpoint.CheckpointError, match="by run 'old', not 'run'; use the folder"):
    restore(tmp_path, 9)
  with pytest.raises(checkpoint.CheckpointError, match=r"belongs to run 'old'.*new folder"):
    save(tmp_path, 1, keep=1)
  assert names(tmp_path) == ['00000009']


@pytest.mark.parametrize(
  'arguments, message',
  [
    ({'keep': 0}, 'keep=0'),
    ({'host': {'counts': {3: 1}}}, 'key 3'),
    ({'host': {'x': {1, 2}}}, 'host is not JSON-able'),
    ({'state': {'x': 'text'}}, "state['x'] is str"),
    (
      {'trajectories': [dataclasses.replace(make_trajectory(3), mask=np.ones(2, bool))]},
      'trajectory e3: mask',
    ),
  ],
)
def test_bad_arguments_are_refused_before_anything_is_written(tmp_path, arguments, message):
  with pytest.raises(ValueError) as error:
    save(tmp_path, 1, **arguments)
  assert message in str(error.value)
  assert names(tmp_path) == []


def raise_full(*args, **kwargs):
  raise OSError(errno.ENOSPC, 'No space left on device')


def raise_tensorstore(*args, **kwargs):
  raise ValueError('RESOURCE_EXHAUSTED: Failed to write 8 bytes: No space left on device')


@pytest.mark.parametrize(
  'where, what, fault',
  [
    (ocp.Checkpointer, 'save', raise_tensorstore),
    (Path, 'write_bytes', raise_full),
    (Path, 'write_text', raise_full),  # after the rename
    (os, 'fsync', raise_full),
    (os, 'rename', raise_full),
    (shutil, 'disk_usage', lambda path: SimpleNamespace(free=0)),
  ],
)
def test_a_full_disk_leaves_the_last_good_one(tmp_path, monkeypatch, where, what, fault):
  save(tmp_path, 1)
  with monkeypatch.context() as patch:
    patch.setattr(where, what, fault)
    with pytest.raises(
      checkpoint.CheckpointError, match=r'step 2 not saved, the disk is full, .* step 1; free space'
    ):
      save(tmp_path, 2, keep=1)
  assert names(tmp_path) == ['00000001']
  assert_same_bits(restore(tmp_path, 1).state, make_state(1))
  save(tmp_path, 2, keep=1)
  assert names(tmp_path) == ['00000002']


def test_at_every_point_where_it_may_die_the_last_good_one_is_there(tmp_path, monkeypatch):
  root, copies = tmp_path / 'root', []
  save(root, 1, keep=1)

  def snapshot_first(function):
    def wrapped(*args, **kwargs):
      copies.append(shutil.copytree(root, tmp_path / f'{len(copies)}'))
      return function(*args, **kwargs)

    return wrapped

  with monkeypatch.context() as patch:
    for where, what in (
      (os, 'fsync'),
      (os, 'rename'),
      (Path, 'unlink'),
      (shutil, 'rmtree'),
      (Path, 'write_text'),
    ):
      patch.setattr(where, what, snapshot_first(getattr(where, what)))
    save(root, 2, keep=1)
  seen = [checkpoint.steps(copy) for copy in copies]
  # Only the old one, then both (the new one has its marker), then the new one alone.
  assert seen == sorted(seen, key=[[1], [1, 2], [2]].index)
  assert seen[0] == [1] and [1, 2] in seen and seen[-1] == [2]
  for copy, steps in zip(copies[::4] + copies[-3:], seen[::4] + seen[-3:], strict=True):
    for step in steps:
      assert_same_bits(restore(copy, step).state, make_state(step))


KILLED = """
import sys, numpy as np
from sao_jax import checkpoint
root, step = sys.argv[1], 0
while True:
  step += 1
  state = {'x': np.full((64, 64), step, np.float32)}
  checkpoint.save(root, step, state, {'step': step}, (), run_id='run', keep=2)
  print(step, flush=True)
"""


def test_kill_9_leaves_complete_or_ignored_ones(tmp_path):
  rng = random.Random(0)
  roots = [tmp_path / str(i) for i in range(4)]
  children = [
    subprocess.Popen(
      [sys.executable, '-c', KILLED, root],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      bufsize=0,  # or readline takes lines that communicate then misses
    )
    for root in roots
  ]
  for root, child in zip(roots, children, strict=True):
    child.stdout.readline()
    time.sleep(rng.uniform(0.05, 0.4))
    child.kill()
    out, err = child.communicate(timeout=30)
    assert err == b''  # quiet, also about itself
    said = [1] + [int(x) for x in out.split()]
    good = checkpoint.steps(root)
    # Whatever was said to be saved is, unless pruned; one more may have been completed but not said.
    assert good[-1] in (said[-1], said[-1] + 1)
    for step in good:
      got = restore(root, step, like={'x': np.zeros((64, 64), np.float32)})
      assert got.host == {'step': step} and (got.state['x'] == step).all()
    save(root, good[-1] + 1, keep=1)
    assert len(names(root)) == 1


def test_from_a_worker_thread_and_quietly(tmp_path, capfd):
  logging.getLogger('absl').setLevel(logging.INFO)
  try:
    thread = threading.Thread(target=save, args=(tmp_path, 1))
    thread.start()
    thread.join(30)
    restore(tmp_path, 1)
  finally:
    logging.getLogger('absl').setLevel(logging.WARNING)
  assert capfd.readouterr() == ('', '')
  assert not logging.getLogger('absl').filters


SHARDED = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from sao_jax import checkpoint, sharding

what, root, index, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if what == 'write':
  jax.distributed.initialize('127.0.0.1:' + port, 2, index, initialization_timeout=300)

rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
PARAMS = {'layers': {'mlp': {'up': {'kernel': draw(2, 8, 12)}, 'down': {'kernel': draw(2, 12, 8)}}}}
VALUES = {
  'step': np.int32(7),
  'policy': {**PARAMS, 'low': np.asarray(jnp.asarray(draw(5), jnp.bfloat16))},
  'opt': {'mu': jax.tree.map(lambda x: -x, PARAMS), 'empty': np.zeros((0, 3), np.int8)},
}

def shardings(mesh, kind):
  placed = sharding.tree_shardings(VALUES, mesh)
  return {**placed, 'opt': sharding.tree_shardings(VALUES['opt'], mesh, memory_kind=kind)}

def save(root, state, run_id='run'):
  checkpoint.save(root, 7, {**state, 'host': np.arange(3)}, {'x': 1}, (), run_id=run_id, keep=1)

def failure(*arguments):
  try:
    save(*arguments)
  except Exception as error:
    return type(error).__name__ + ': ' + str(error)

def same(got, placed):
  for x, value, where in zip(*map(jax.tree.leaves, (got, VALUES, placed)), strict=True):
    assert isinstance(x, jax.Array) and x.sharding == where and x.dtype == value.dtype, (x.sharding, where)
    assert np.asarray(x).tobytes() == value.tobytes()

mesh = sharding.make_mesh({'fsdp': 4, 'tensor': 2})
if what == 'write':
  state = sharding.put(VALUES, shardings(mesh, None))
  save(root / 'two', state)
  said = [failure(root / 'two', state, 'another')]  # noticed by process 0 alone
  orbax = checkpoint.ocp.Checkpointer.save
  def fail(*args, **kwargs):
    raise OSError(28, 'No space left on device')
  checkpoint.ocp.Checkpointer.save = fail if index else lambda *args, **kwargs: None
  said.append(failure(root / 'two', state))
  checkpoint.ocp.Checkpointer.save = orbax
  said.append(failure(root / 'two', state))
  got = checkpoint.restore(root / 'two', 7, {**state, 'host': np.zeros(3, int)}, run_id='run').state
  assert (got.pop('host') == np.arange(3)).all()
  for x, y in zip(*map(jax.tree.leaves, (got, state)), strict=True):
    assert x.sharding == y.sharding
    for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
      assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
  print(json.dumps(said))
else:
  gathered = []
  value_of = type(jnp.ones(2)).__array__
  def spy(x, *args, **kwargs):
    gathered.append(not x.is_fully_replicated)
    return value_of(x, *args, **kwargs)
  state = jax.device_put(VALUES, shardings(mesh, 'pinned_host'))
  type(jnp.ones(2)).__array__ = spy
  save(root / 'one', state)
  type(jnp.ones(2)).__array__ = value_of
  assert not any(gathered)
  for name in ('one', 'two'):
    for sizes, kind in (({'fsdp': 2, 'tensor': 4}, 'pinned_host'), ({'fsdp': 4, 'tensor': 2}, None), ({'data': 8}, None)):
      placed = shardings(sharding.make_mesh(sizes), kind)
      like = {**sharding.with_shardings(VALUES, placed), 'host': np.zeros(3, int)}
      got = checkpoint.restore(root / name, 7, like, run_id='run').state
      assert (got.pop('host') == np.arange(3)).all()
      same(got, placed)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), VALUES)
    got = checkpoint.restore(root / name, 7, {**like, 'host': np.zeros(3, int)}, run_id='run').state
    del got['host']
    same(got, jax.tree.map(lambda x: jax.sharding.SingleDeviceSharding(jax.devices()[0]), VALUES))
"""


def sharded(num_devices, *arguments):
  flags = f'--xla_force_host_platform_device_count={num_devices}'
  return subprocess.Popen(
    [sys.executable, '-c', SHARDED, *map(str, arguments)],
    env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'},
    stdout=subprocess.PIPE,
  )


def outputs(*children):
  try:
    got = [child.communicate(timeout=600)[0] for child in children]
    assert not any(child.returncode for child in children)
    return got
  finally:
    for child in children:
      child.kill()
      child.wait()


def test_shards_of_processes_and_meshes_come_back_on_other_meshes_bit_for_bit(tmp_path):
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    port = listener.getsockname()[1]
  told = outputs(*(sharded(4, 'write', tmp_path, index, port) for index in range(2)))
  foreign, full, good = zip(*map(json.loads, told), strict=True)
  assert all("belongs to run 'run', not 'another'" in said for said in foreign)
  assert 'process 0 of 2 failed: CheckpointError' in foreign[1]
  assert all('the disk is full' in said for said in full)
  assert all(said.startswith('CheckpointError') for said in (*foreign, *full))
  assert good == (None, None)
  outputs(sharded(8, 'read', tmp_path, 0, port))
