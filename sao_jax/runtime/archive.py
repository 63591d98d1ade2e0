"""What a checkpoint holds besides arrays of the state, as bytes: JSON and npz, no pickle."""

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from sao_jax import types

_ARRAYS = {  # of a types.Trajectory, end to end in trajectories.npz
  'tokens': np.int32,
  'mask': np.bool_,
  'behavior_logprobs': np.float32,
  'versions': np.int32,
  'rewards': np.float32,
  'turn_ids': np.int32,
}


def to_json(value: Any, name: str) -> bytes:
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


def pack(trajectories: Sequence[types.Trajectory]) -> bytes:
  """An npz archive: each kind of array end to end, the other fields as JSON. No pickle."""
  rest, columns = [], {}
  for trajectory in trajectories:
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    for name, dtype in _ARRAYS.items():
      array = fields.pop(name)
      if (array.dtype, array.shape) != (dtype, trajectory.tokens.shape):
        raise ValueError(
          f'trajectory {trajectory.episode}: {name} is {array.dtype}{list(array.shape)}, not {dtype}'
        )
      columns.setdefault(name, []).append(array)
    rest.append(fields | {'length': len(trajectory.tokens)})
  columns = {name: np.concatenate(arrays) for name, arrays in columns.items()}
  text = np.frombuffer(to_json(rest, 'info of a trajectory'), np.uint8)
  buffer = io.BytesIO()
  np.savez(buffer, allow_pickle=False, rest=text, **columns)
  return buffer.getvalue()


def unpack(data: bytes) -> tuple[types.Trajectory, ...]:
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
