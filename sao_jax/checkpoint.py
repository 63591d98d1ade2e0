"""Checkpoints: one folder a step, complete or ignored.

  ROOT/00000120/            state/ (Orbax)  host.json  trajectories.npz  COMPLETE
  ROOT/.aside-00000120/     a save at work, or the remains of a dead one

A save writes aside, syncs every file, renames the folder, and writes the marker COMPLETE last: it holds the run, the
dtype and shape of each leaf, and a checksum of each file. A folder without a marker does not count, and the next save
removes it. Only then are older checkpoints pruned, so that a process killed at any moment, or a full disk, leaves the
last good one alone.

One run writes to a folder, one save at a time. Its processes share the folder. All of them call `save` and `restore` with the
same arguments; each writes and reads its own shards, and process 0 does the rest. A leaf that is cut over devices is never
gathered. What fails in one process fails in all, or they stop waiting for it after a deadline.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from sao_jax import types
from sao_jax.runtime import archive
from sao_jax.runtime.peers import PeerFailed, Peers

PyTree = Any

_FORMAT = 1
_PATIENCE_S = 900.0  # for another process: above the 300 s after which Orbax gives up a barrier
_MARKER = 'COMPLETE'
_ASIDE = '.aside-'


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
    state: pytree of arrays, in any memory. Nobody may donate or change a leaf until this returns.
    host: JSON-able, with string keys only; tuples come back as lists.
    trajectories: episodes that are finished and not yet trained; their `info` is JSON-able too.
    run_id: who writes. A folder that holds checkpoints of another run is refused.
    keep: how many checkpoints to leave, >= 1, this one included.

  Returns:
    The folder of this checkpoint.

  Raises:
    CheckpointError: disk full or not writable, another run's folder, another process that failed or is silent. Earlier
      checkpoints are as they were.
    ValueError: bad arguments, a leaf that is no array, host data that JSON cannot hold.
  """
  if keep < 1 or step < 0:
    raise ValueError(f'save needs keep >= 1 and step >= 0, got keep={keep} and step={step}')
  arrays = _leaves(state)
  files = {
    'host.json': archive.to_json(host, 'host'),
    'trajectories.npz': archive.pack(trajectories),
  }
  root = Path(root).resolve()
  aside = root / f'{_ASIDE}{step:08d}'
  peers = Peers(_PATIENCE_S)
  try:
    peers.first(lambda: _prepare(root, aside, arrays, files, run_id))
    peers.each(lambda: _write_state(aside, arrays, peers))
    return root / peers.first(lambda: _finish(aside, root, step, arrays, files, run_id, keep))
  except CheckpointError:
    raise
  except Exception as error:
    if peers.index == 0:
      shutil.rmtree(aside, ignore_errors=True)
    if isinstance(error, OSError | PeerFailed) or 'No space left' in str(error):
      raise _write_error(root, step, error) from error
    raise


def steps(root: Path) -> list[int]:
  """The steps that have a complete checkpoint, ascending. Checksums are left to `restore`."""
  return sorted(_complete(Path(root)))


def restore(root: Path, step: int, like: PyTree, *, run_id: str, partial: bool = False) -> Restored:
  """Reads one checkpoint and checks all of it.

  Args:
    root: as for `save`.
    step: one of `steps(root)`.
    like: pytree with the structure, dtypes and shapes to expect. Where a leaf is a ShapeDtypeStruct or a committed jax.Array,
      a jax.Array comes back with its sharding, which may be another one than that of the leaf that was saved: every
      process reads what its devices need. Elsewhere the leaf is read whole: a jax.Array where it was one, or numpy.
    run_id: the run that must have written it.
    partial: `like` may lack leaves; they stay on disk.

  Returns:
    What was saved, bit for bit.

  Raises:
    CheckpointError: absent, incomplete, damaged, of another run, or not of the structure of `like`.
  """
  root = Path(root).resolve()
  peers = Peers(_PATIENCE_S)
  expected = _leaves(like)
  try:
    path = root / peers.first(lambda: _check(root, step, expected, run_id, partial))
    values = peers.each(lambda: _read_state(path, expected, peers))
  except PeerFailed as error:
    raise CheckpointError(root, f'step {step} not restored, {error}', 'see that process') from error
  leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
  placed = [_place(values.get(jax.tree_util.keystr(key)), leaf) for key, leaf in leaves]
  return Restored(
    state=treedef.unflatten(placed),
    host=json.loads((path / 'host.json').read_bytes()),
    trajectories=archive.unpack((path / 'trajectories.npz').read_bytes()),
  )


def _check(root: Path, step: int, like: dict[str, Any], run_id: str, partial: bool) -> str:
  """The name of the folder of a checkpoint that is whole and fits."""
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
  saved = marker['leaves']
  if partial:
    saved = {name: kind for name, kind in saved.items() if name in like}
  _check_leaves(path, saved, like)
  return path.name


# Arrays.


def _leaves(tree: PyTree) -> dict[str, Any]:
  """{path of the leaf: as it is if it is a shape or on devices, else numpy}."""
  leaves = {}
  for key, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(key)
    leaves[name] = leaf if _is_shape(leaf) or _is_global(leaf) else np.asarray(leaf)
    dtype = leaves[name].dtype
    if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.kind in 'US':
      raise ValueError(
        f'state{name} is {type(leaf).__name__}, not an array of numbers; put it in `host`'
      )
  return leaves


def _is_shape(leaf: Any) -> bool:
  return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_global(leaf: Any) -> bool:
  """Not a copy that each process has of its own."""
  alone = jax.process_count() == 1
  return isinstance(leaf, jax.Array) and (alone or not leaf.is_fully_addressable)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
  """Where a leaf must lie; None: anywhere, whole."""
  if _is_shape(leaf) or (_is_global(leaf) and leaf.committed):
    return leaf.sharding
  return None


def _kind(leaf: Any) -> str:
  return f'{leaf.dtype}{list(leaf.shape)}'


def _check_leaves(path: Path, saved: dict[str, str], like: dict[str, Any]) -> None:
  for name in sorted(saved.keys() | like.keys()):
    there, expected = saved.get(name, 'absent'), _kind(like[name]) if name in like else 'absent'
    if there != expected:
      wrong = f'state{name} is {there}, expected {expected}'
      raise CheckpointError(path, wrong, 'restore with the config that the run was started with')


def _place(value: Any, like: Any) -> Any:
  """The restored leaf where `like` was. None stands for an array without elements, which Orbax cannot store."""
  if value is None:
    value = np.zeros(like.shape, like.dtype)
  if isinstance(value, jax.Array) or not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
    return value
  sharding = like.sharding if _is_shape(like) or like.committed else None
  return jax.device_put(value, sharding, may_alias=False)


def _orbax(peers: Peers) -> ocp.Checkpointer:
  """Barriers of several processes go through the coordination service, under names of their own."""
  options = {}
  if peers.count > 1:
    everyone = set(range(peers.count))
    options['multiprocessing_options'] = ocp.options.MultiprocessingOptions(
      active_processes=everyone, barrier_sync_key_prefix=peers.prefix
    )
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, **options)
  return ocp.Checkpointer(handler, **options)


def _write_state(aside: Path, arrays: dict[str, Any], peers: Peers) -> None:
  if stored := {name: x for name, x in arrays.items() if x.size}:
    with _quiet(), _orbax(peers) as checkpointer:
      checkpointer.save(aside / 'state', stored)


def _read_state(path: Path, like: dict[str, Any], peers: Peers) -> dict[str, Any]:
  """Leaves by path: on their devices where `like` says on which, else numpy."""

  def how(leaf):
    if (sharding := _sharding(leaf)) is None:
      return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape)

  stored = {name: x for name, x in like.items() if x.size}
  if not stored:
    return {}
  args = ocp.args.PyTreeRestore(
    item=stored, restore_args={name: how(x) for name, x in stored.items()}, partial_restore=True
  )
  with _quiet(), _orbax(peers) as checkpointer:
    return checkpointer.restore(path / 'state', args=args)


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


# Folders.


def _prepare(root: Path, aside: Path, arrays: dict, files: dict, run_id: str) -> None:
  root.mkdir(parents=True, exist_ok=True)
  _refuse_foreign(root, run_id)
  _remove_unfinished(root)
  _refuse_full_disk(root, arrays, files)
  aside.mkdir()


def _finish(
  aside: Path, root: Path, step: int, arrays: dict, files: dict, run_id: str, keep: int
) -> str:
  """Synced, renamed, marked, pruned. A step that exists already stays until its successor is marked."""
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
  _prune(root, path, keep)
  return path.name


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
  remedy = 'make the folder writable and resume'
  if full:
    remedy = 'free space and resume'
  elif isinstance(error, PeerFailed):
    remedy = 'see what that process says and resume'
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
