"""Checkpoints: one folder a step, complete or ignored.

  ROOT/00000120/            state/ (Orbax)  host.json  trajectories.npz  COMPLETE
  ROOT/.aside-00000120-ID/  a save at work, or the remains of a dead one

A save writes aside, syncs every file, renames the folder, and writes the marker COMPLETE last: it holds the run, the
dtype and shape of each leaf, and a checksum of each file. A folder without a marker does not count, and the next save
removes it. Only then are older checkpoints pruned, so that a process killed at any moment, or a full disk, leaves the
last good one alone.

One process writes to a folder, one save at a time. State of one host: leaves are gathered to numpy.
"""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from sao_jax import types

PyTree = Any

_FORMAT = 1
_MARKER = 'COMPLETE'
_ASIDE = '.aside-'
_ARRAYS = {  # of a types.Trajectory, end to end in trajectories.npz
  'tokens': np.int32,
  'mask': np.bool_,
  'behavior_logprobs': np.float32,
  'versions': np.int32,
  'rewards': np.float32,
  'turn_ids': np.int32,
}


class CheckpointError(ValueError):
  """A checkpoint cannot be written or used. One line: the path, what is wrong, what to do."""

  def __init__(self, path: Path, wrong: str, remedy: str):
    super().__init__(f'checkpoint {path}: {wrong}; {remedy}')


@dataclasses.dataclass(frozen=True)
class Restored:
  """What `save` was given."""

  state: PyTree
  host: dict[str, Any]
  trajectories: tuple[types.Trajectory, ...]


def save(
  root: Path,
  step: int,
  state: PyTree,
  host: dict[str, Any],
  trajectories: Sequence[types.Trajectory],
  *,
  run_id: str,
  keep: int,
) -> Path:
  """Writes one checkpoint, then prunes. May be called from a worker thread.

  Checkpoints of later steps are removed too: after going back to an earlier step they belong to a run that was
  abandoned, and `steps(root)[-1]` is always the last one written.

  Args:
    root: folder of the checkpoints, made if absent.
    step: >= 0; saving a step again replaces it.
    state: pytree of arrays. Nobody may donate or change a leaf until this returns.
    host: JSON-able, with string keys only; tuples come back as lists.
    trajectories: episodes that are finished and not yet trained; their `info` is JSON-able too.
    run_id: who writes. A folder that holds checkpoints of another run is refused.
    keep: how many checkpoints to leave, >= 1, this one included.

  Returns:
    The folder of this checkpoint.

  Raises:
    CheckpointError: disk full or not writable, another run's folder. Earlier checkpoints are as they were.
    ValueError: bad arguments, a leaf that is no array, host data that JSON cannot hold.
  """
  if keep < 1 or step < 0:
    raise ValueError(f'save needs keep >= 1 and step >= 0, got keep={keep} and step={step}')
  arrays = _leaves(state)
  files = {'host.json': _to_json(host, 'host'), 'trajectories.npz': _pack(trajectories)}
  root = Path(root).resolve()
  aside = root / f'{_ASIDE}{step:08d}-{uuid.uuid4().hex[:12]}'
  try:
    root.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(root, run_id)
    _remove_unfinished(root)
    _refuse_full_disk(root, arrays, files)
    path = _write(aside, root, step, arrays, files, run_id)
    _prune(root, path, keep)
  except CheckpointError:
    raise
  except Exception as error:
    shutil.rmtree(aside, ignore_errors=True)
    if isinstance(error, OSError) or 'No space left' in str(error):
      raise _write_error(root, step, error) from error
    raise
  return path


def steps(root: Path) -> list[int]:
  """The steps that have a complete checkpoint, ascending. Checksums are left to `restore`."""
  return sorted(_complete(Path(root)))


def restore(root: Path, step: int, like: PyTree, *, run_id: str) -> Restored:
  """Reads one checkpoint and checks all of it.

  Args:
    root: as for `save`.
    step: one of `steps(root)`.
    like: pytree with the structure, dtypes and shapes to expect. Where a leaf is a jax.Array (or a ShapeDtypeStruct)
      a jax.Array comes back, with the sharding of the leaf if that is committed; elsewhere a numpy array.
    run_id: the run that must have written it.

  Returns:
    What was saved, bit for bit.

  Raises:
    CheckpointError: absent, incomplete, damaged, of another run, or not of the structure of `like`.
  """
  root = Path(root).resolve()
  path = _complete(root).get(step)
  if path is None:
    raise CheckpointError(
      root, f'no complete checkpoint of step {step}', f'complete ones: {steps(root) or "none"}'
    )
  marker = _read_marker(path)
  if marker['run_id'] != run_id:
    wrong = f'written by run {marker["run_id"]!r}, not {run_id!r}'
    raise CheckpointError(path, wrong, 'use the folder of your own run, or start in a new one')
  _verify(path, marker['files'])
  expected = _leaves(like)
  _check_leaves(path, marker['leaves'], expected)
  values = {}
  if any(x.size for x in expected.values()):
    with _quiet(), ocp.Checkpointer(_handler()) as checkpointer:
      values = checkpointer.restore(path / 'state')
  leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
  placed = [_place(values.get(jax.tree_util.keystr(key)), leaf) for key, leaf in leaves]
  return Restored(
    state=treedef.unflatten(placed),
    host=json.loads((path / 'host.json').read_bytes()),
    trajectories=_unpack((path / 'trajectories.npz').read_bytes()),
  )


# Arrays.


def _leaves(tree: PyTree) -> dict[str, Any]:
  """{path of the leaf: numpy array}, or the ShapeDtypeStruct as it is."""
  leaves = {}
  for key, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(key)
    leaves[name] = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)
    if leaves[name].dtype.hasobject or leaves[name].dtype.kind in 'US':
      raise ValueError(
        f'state{name} is {type(leaf).__name__}, not an array of numbers; put it in `host`'
      )
  return leaves


def _kind(leaf: Any) -> str:
  return f'{leaf.dtype}{list(leaf.shape)}'


def _check_leaves(path: Path, saved: dict[str, str], like: dict[str, Any]) -> None:
  for name in sorted(saved.keys() | like.keys()):
    there, expected = saved.get(name, 'absent'), _kind(like[name]) if name in like else 'absent'
    if there != expected:
      wrong = f'state{name} is {there}, expected {expected}'
      raise CheckpointError(path, wrong, 'restore with the config that the run was started with')


def _place(value: np.ndarray | None, like: Any) -> Any:
  """The restored leaf where `like` was. None stands for an array without elements, which Orbax cannot store."""
  if value is None:
    value = np.zeros(like.shape, like.dtype)
  if isinstance(like, jax.ShapeDtypeStruct):
    return jax.device_put(value, like.sharding, may_alias=False)
  if isinstance(like, jax.Array):
    return jax.device_put(value, like.sharding if like.committed else None, may_alias=False)
  return value


def _handler() -> ocp.PyTreeCheckpointHandler:
  return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Drops the log lines of Orbax, also its tracebacks: an error travels as an exception."""

  def not_orbax(record: logging.LogRecord) -> bool:
    return f'{os.sep}orbax{os.sep}' not in record.pathname

  logger = logging.getLogger('absl')
  logger.addFilter(not_orbax)
  try:
    yield
  finally:
    logger.removeFilter(not_orbax)


# Host data.


def _to_json(value: Any, name: str) -> bytes:
  """JSON bytes; refuses keys that JSON would turn into other keys."""
  todo = [value]
  while todo:
    x = todo.pop()
    if isinstance(x, dict):
      if bad := [k for k in x if not isinstance(k, str)]:
        raise ValueError(f'{name} has the key {bad[0]!r}: JSON keeps only strings as keys')
      todo.extend(x.values())
    elif isinstance(x, list | tuple):
      todo.extend(x)
  try:
    return json.dumps(value, default=np.generic.item).encode()
  except TypeError as error:
    raise ValueError(f'{name} is not JSON-able: {error}') from error


def _pack(trajectories: Sequence[types.Trajectory]) -> bytes:
  """An npz archive: each kind of array end to end, the other fields as JSON. No pickle."""
  rest, columns = [], {}
  for trajectory in trajectories:
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    for name, dtype in _ARRAYS.items():
      array = fields.pop(name)
      if (array.dtype, array.shape) != (dtype, trajectory.tokens.shape):
        raise ValueError(f'trajectory {trajectory.episode}: {name} is {_kind(array)}, not {dtype}')
      columns.setdefault(name, []).append(array)
    rest.append(fields | {'length': len(trajectory.tokens)})
  columns = {name: np.concatenate(arrays) for name, arrays in columns.items()}
  text = np.frombuffer(_to_json(rest, 'info of a trajectory'), np.uint8)
  buffer = io.BytesIO()
  np.savez(buffer, allow_pickle=False, rest=text, **columns)
  return buffer.getvalue()


def _unpack(data: bytes) -> tuple[types.Trajectory, ...]:
  with np.load(io.BytesIO(data), allow_pickle=False) as archive:
    columns = dict(archive)
  trajectories, start = [], 0
  for fields in json.loads(columns['rest'].tobytes()):
    end = start + fields.pop('length')
    fields |= {name: columns[name][start:end].copy() for name in _ARRAYS}
    fields['stop_reason'] = types.StopReason(fields['stop_reason'])
    trajectories.append(types.Trajectory(**fields))
    start = end
  return tuple(trajectories)


# Folders.


def _write(aside: Path, root: Path, step: int, arrays: dict, files: dict, run_id: str) -> Path:
  """Aside, synced, renamed, marked. A step that exists already stays until its successor is marked."""
  aside.mkdir()
  stored = {name: x for name, x in arrays.items() if x.size}
  if stored:
    with _quiet(), ocp.Checkpointer(_handler()) as checkpointer:
      checkpointer.save(aside / 'state', stored)
  for name, data in files.items():
    (aside / name).write_bytes(data)
  marker = {
    'format': _FORMAT,
    'run_id': run_id,
    'step': step,
    'leaves': {name: _kind(x) for name, x in arrays.items()},
    'files': {str(p.relative_to(aside)): _digest(p) for p in aside.rglob('*') if p.is_file()},
  }
  for folder, _, names in os.walk(aside, topdown=False):
    for name in names:
      _sync(Path(folder) / name)
    _sync(Path(folder))
  earlier = [_key(p) for p in _folders(root) if _key(p)[0] == step]
  path = root / (f'{step:08d}.{earlier[-1][1] + 1}' if earlier else f'{step:08d}')
  os.rename(aside, path)
  try:
    _sync(root)
    (path / 'marker').write_text(json.dumps(marker))
    _sync(path / 'marker')
    os.rename(path / 'marker', path / _MARKER)
    _sync(path)
  except OSError:
    _remove(path)
    raise
  return path


def _key(path: Path) -> tuple[int, int]:
  """(step, attempt): 00000120 is (120, 0), and 00000120.1, which replaces it, (120, 1)."""
  step, _, attempt = path.name.partition('.')
  return int(step), int(attempt or 0)


def _folders(root: Path) -> list[Path]:
  """Folders of steps in order, complete or not."""
  if not root.is_dir():
    return []
  return sorted((p for p in root.iterdir() if re.fullmatch(r'\d+(\.\d+)?', p.name)), key=_key)


def _complete(root: Path) -> dict[int, Path]:
  return {_key(p)[0]: p for p in _folders(root) if (p / _MARKER).is_file()}


def _refuse_foreign(root: Path, run_id: str) -> None:
  for path in _complete(root).values():
    if (other := _read_marker(path)['run_id']) != run_id:
      raise CheckpointError(
        root, f'{path.name} belongs to run {other!r}, not {run_id!r}', 'save into a new folder'
      )


def _remove_unfinished(root: Path) -> None:
  """What dead attempts left, and attempts that a later one of the same step replaced."""
  complete = set(_complete(root).values())
  for path in [*root.glob(f'{_ASIDE}*'), *_folders(root)]:
    if path not in complete:
      _remove(path)


def _prune(root: Path, newest: Path, keep: int) -> None:
  """Leaves `newest` and the keep - 1 before it."""
  earlier = [p for p in _folders(root) if _key(p)[0] < _key(newest)[0]]
  kept = {newest, *earlier[::-1][: keep - 1]}
  for path in _folders(root)[::-1]:  # an abandoned future goes first, lest a resume take it
    if path not in kept:
      _remove(path)


def _remove(path: Path) -> None:
  """The marker first: a folder half removed must not pass for a checkpoint."""
  (path / _MARKER).unlink(missing_ok=True)
  shutil.rmtree(path, ignore_errors=True)


def _refuse_full_disk(root: Path, arrays: dict[str, np.ndarray], files: dict[str, bytes]) -> None:
  """Known beforehand in most cases, so that Orbax does not run into it."""
  need = sum(x.nbytes for x in arrays.values()) + sum(len(x) for x in files.values())
  if (free := shutil.disk_usage(root).free) < need:
    raise OSError(errno.ENOSPC, f'No space left on device: {need} bytes needed, {free} free')


def _write_error(root: Path, step: int, error: Exception) -> CheckpointError:
  full = getattr(error, 'errno', None) == errno.ENOSPC or 'No space left' in str(error)
  cause = 'the disk is full' if full else f'{type(error).__name__}: {error}'.splitlines()[0]
  good = steps(root)
  last = f'the last good one is step {good[-1]}' if good else 'there is no earlier one'
  remedy = 'free space and resume' if full else 'make the folder writable and resume'
  return CheckpointError(root, f'step {step} not saved, {cause}, {last}', remedy)


# Files.


def _digest(path: Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _sync(path: Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _read_marker(path: Path) -> dict[str, Any]:
  try:
    marker = json.loads((path / _MARKER).read_bytes())
    if marker['format'] == _FORMAT and {'run_id', 'leaves', 'files'} <= marker.keys():
      return marker
  except (OSError, ValueError, KeyError, TypeError):
    pass
  raise CheckpointError(path, f'its {_MARKER} file is damaged', 'remove this folder')


def _verify(path: Path, files: dict[str, str]) -> None:
  remedy = 'remove this folder and resume from an earlier step'
  for name, digest in files.items():
    if not (path / name).is_file():
      raise CheckpointError(path, f'{name} is missing', remedy)
    if _digest(path / name) != digest:
      raise CheckpointError(path, f'{name} is damaged (checksum differs)', remedy)
