"""The devices of a run: the mesh of the learner, and that of the engine."""

import math

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from sao_jax import compression, sharding
from sao_jax.models import backends


def meshes(c: ConfigDict) -> tuple[Mesh | None, Mesh | None]:
  """(of the learner, of the engine); no meshes where one device does everything.

  Raises:
    ValueError: too few devices, or numbers of the config that cannot be cut that way.
  """
  sizes = c.mesh.to_dict()
  engine = {'tensor': c.engine.tensor, 'expert': c.engine.expert}
  alone = jax.process_count() == 1 and {*sizes.values(), *engine.values()} == {1}
  _check_compression(c)
  if alone and not c.engine.apart and c.train.optimizer_memory == 'device':
    return None, None
  mesh = sharding.make_mesh(sizes, _learners(math.prod(sizes.values())))
  sharding.check_rows(mesh, num_rows=c.train.micro_rows, length=c.env.max_tokens)
  if c.mesh.sequence > 1 and not backends.BACKENDS[c.model.attention].context:
    raise ValueError(
      f"model.attention={c.model.attention!r} cannot cut a row over mesh.sequence={c.mesh.sequence}: use 'chunked' or 'xla'"
    )
  for name in ('num_slots', 'prefill_rows'):
    if c.engine[name] % c.engine.expert:
      raise ValueError(
        f'engine.{name}={c.engine[name]} must be a multiple of engine.expert={c.engine.expert}'
      )
  taken = {device.id for device in mesh.devices.flat} if c.engine.apart else set()
  free = [device for device in jax.local_devices() if device.id not in taken]
  try:
    return mesh, sharding.make_mesh(engine, free)
  except ValueError as error:
    raise ValueError(
      f'engine.tensor={c.engine.tensor}, engine.expert={c.engine.expert}, engine.apart={c.engine.apart}: {error}'
    ) from error


def _check_compression(c: ConfigDict) -> None:
  kind = c.train.compression
  if kind == 'none':
    return
  if not 1 < c.mesh.data < compression.MOST[kind]:
    raise ValueError(
      f'train.compression={kind!r} with mesh.data={c.mesh.data}: it sends less than float32 from 2 to '
      f"{compression.MOST[kind] - 1} only; set it to 'none'"
    )
  if c.mesh.expert * c.mesh.sequence > 1 or c.model.num_experts or c.model.attention != 'xla':
    raise ValueError(
      f"train.compression={kind!r} needs a dense model, model.attention='xla', mesh.expert=1 and mesh.sequence=1: their programs "
      "name mesh.data as well; set it to 'none'"
    )


def _learners(size: int) -> list[jax.Device]:
  """As many devices of each process, its first ones, so that none idles while it waits for the others.

  Raises:
    ValueError: the processes cannot share the mesh evenly.
  """
  count = jax.process_count()
  each = size // count
  devices = [[d for d in jax.devices() if d.process_index == i] for i in range(count)]
  if count > 1 and (size % count or each > min(map(len, devices))):
    raise ValueError(
      f'mesh: the product of its sizes is {size}, and {count} processes have {[*map(len, devices)]} devices: choose sizes '
      'that take as many from each'
    )
  return [d for mine in devices for d in (mine[:each] if count > 1 else mine)]
