"""The mesh, and where each array lies on it: rules of (pattern of the path, axes), outside of the models.

Axes, always all five: 'data' copies the parameters, 'fsdp' cuts them beside the batch, 'tensor' cuts heads and widths, 'expert'
the experts, 'sequence' the tokens of a row. Rows of a batch lie over BATCH, which is every axis that does not cut inside a row.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ('data', 'fsdp', 'tensor', 'expert', 'sequence')
BATCH = ('data', 'fsdp', 'expert')

Rules = Sequence[tuple[str, tuple]]

# The first pattern that a path ends with decides; what none matches (norms, router, value head, adapters, counters) is on every device.
# Optimiser states hold trees like the parameters, so that their paths end alike.
RULES: Rules = (
  ('embed/embedding', ('tensor', 'fsdp')),
  ('unembed/kernel', ('tensor', 'fsdp')),
  ('attention/[qkv]/kernel', (None, 'fsdp', 'tensor', None)),
  ('attention/[qkv]/bias', (None, 'tensor', None)),
  ('attention/o/kernel', (None, 'tensor', None, 'fsdp')),
  ('mlp/(gate|up)/kernel', (None, 'fsdp', 'tensor')),
  ('mlp/down/kernel', (None, 'tensor', 'fsdp')),
  ('moe/(gate|up)/kernel', (None, 'expert', 'fsdp', 'tensor')),
  ('moe/down/kernel', (None, 'expert', 'tensor', 'fsdp')),
)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with all AXES over the first devices.

  Args:
    sizes: devices along each axis; 1 where an axis is left out.
    devices: None: all of them, of all processes.

  Raises:
    ValueError: an unknown axis, a size below 1, or too few devices.
  """
  for axis, size in sizes.items():
    if axis not in AXES or size < 1:
      raise ValueError(f'mesh.{axis}={size}: sizes of at least 1, for {", ".join(AXES)} only')
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  devices = list(jax.devices() if devices is None else devices)
  need = math.prod(shape)
  if need > len(devices):
    raise ValueError(
      f'mesh: {dict(zip(AXES, shape, strict=True))} needs {need} devices and there are {len(devices)}: lower its sizes'
    )
  grid = np.array(devices[:need]).reshape(shape)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def path_of(keys: Sequence[Any]) -> str:
  """'layers/mlp/up/kernel', of a path of jax.tree_util."""
  names = (getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key))) for key in keys)
  return '/'.join(str(name) for name in names)


def matches(pattern: str, path: str) -> bool:
  """Whether a path ends with the pattern, at the border of a name."""
  return re.search(f'(^|/)({pattern})$', path) is not None


def spec_of(path: str, shape: Sequence[int], mesh: Mesh, rules: Rules = RULES) -> PartitionSpec:
  """Where one leaf lies.

  Raises:
    ValueError: a dimension that its axis does not divide, or a rule of another rank.
  """
  axes = next((axes for pattern, axes in rules if matches(pattern, path)), ())
  if axes and len(axes) != len(shape):
    raise ValueError(f'the rule {axes} does not fit {path} of shape {tuple(shape)}')
  for axis, size in zip(axes, shape, strict=False):
    if axis and size % mesh.shape[axis]:
      raise ValueError(
        f"{path} of shape {tuple(shape)}: {size} is no multiple of the {mesh.shape[axis]} devices of mesh axis '{axis}': choose another "
        'size of it'
      )
  return PartitionSpec(*axes)


def tree_shardings(
  tree: Any, mesh: Mesh, rules: Rules = RULES, *, memory_kind: str | None = None
) -> Any:
  """A NamedSharding for each leaf of a tree of arrays or shapes.

  Args:
    memory_kind: 'pinned_host' for leaves that wait on the host; None: on the device. Scalars stay on the device.
  """

  def of(keys, leaf):
    kind = memory_kind if leaf.ndim else None
    return NamedSharding(mesh, spec_of(path_of(keys), leaf.shape, mesh, rules), memory_kind=kind)

  return jax.tree.map_with_path(of, tree)


def with_shardings(shapes: Any, shardings: Any) -> Any:
  """ShapeDtypeStructs that say where they lie."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )


def rows(mesh: Mesh, ndim: int) -> NamedSharding:
  """Of [B, T, ...]: rows over BATCH, positions over 'sequence'."""
  return NamedSharding(mesh, PartitionSpec(BATCH, 'sequence', *(None,) * (ndim - 2)))


def everywhere(mesh: Mesh) -> NamedSharding:
  """A copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, mesh: Mesh | None, *, leading: int = 0) -> jax.Array:
  """[..., B, T, ...] as `rows` says, after `leading` axes that are not cut. Nothing without a mesh.

  Inside a shard_map over some of the axes the others are meant.
  """
  if mesh is None:
    return x
  mesh, axes = remaining(mesh)
  spec = PartitionSpec(*(None,) * leading, *tokens_spec(axes))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def remaining(mesh: Mesh) -> tuple[Mesh, frozenset[str]]:
  """The mesh to name here, and its axes that no enclosing shard_map has taken."""
  inside = jax.sharding.get_abstract_mesh()
  manual = () if inside.empty else inside.manual_axes
  return inside if manual else mesh, frozenset(AXES) - frozenset(manual)


def tokens_spec(axes: Collection[str] = AXES) -> PartitionSpec:
  """Of [B, T, ...]: rows over BATCH, positions over 'sequence', as far as these axes go."""
  batch = tuple(axis for axis in BATCH if axis in axes)
  return PartitionSpec(batch, 'sequence' if 'sequence' in axes else None)


def put(tree: Any, shardings: Any) -> Any:
  """Host arrays, the same in every process, as global arrays."""

  def one(x, sharding):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(one, tree, shardings)


def check_rows(mesh: Mesh, *, num_rows: int, length: int) -> None:
  """Raises ValueError if rows of a micro-batch or the positions of a row cannot be cut evenly."""
  parts = math.prod(mesh.shape[axis] for axis in BATCH)
  if num_rows % parts:
    raise ValueError(
      f'train.micro_rows={num_rows} must be a multiple of mesh.data * mesh.fsdp * mesh.expert = {parts}'
    )
  if length % mesh.shape['sequence']:
    raise ValueError(
      f'env.max_tokens={length} must be a multiple of mesh.sequence={mesh.shape["sequence"]}'
    )
