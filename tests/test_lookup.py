"""The embedding on a mesh: each device looks up the part of the table that it has, for the tokens of all."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sao_jax import sharding
from sao_jax.models.decoder import _lookup
from tests.devices import on_eight

MESHES = (
  {'fsdp': 8},
  {'tensor': 4, 'data': 2},
  {'data': 2, 'fsdp': 2, 'tensor': 2},
  {'fsdp': 2, 'tensor': 2, 'sequence': 2},
  {'expert': 2, 'fsdp': 4},
)
V, D, SHAPE = 24, 8, (8, 6)


def arrays():
  """(table, tokens with one outside of the vocabulary on either side, cotangent)."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, V, SHAPE).astype(np.int32)
  tokens[0, 0], tokens[-1, -1] = V, -V - 1
  table, weights = (rng.normal(size=size).astype(np.float32) for size in ((V, D), (*SHAPE, D)))
  return table, tokens, weights


def outcome(look, table, tokens, weights):
  """(what is looked up, gradient of its weighted sum)."""

  def total(table):
    x = look(table, tokens)
    return jnp.where(jnp.isnan(x), 0, x * weights).sum(), x

  grad, x = jax.jit(jax.grad(total, has_aux=True))(table)
  return np.asarray(x), np.asarray(grad)


def over_data(mesh, table, tokens):
  """As compressed sums have it: 'data' is taken already, and its devices add up by themselves."""
  local = functools.partial(_lookup, mesh=mesh, dtype=jnp.float32)
  rows = PartitionSpec('data')
  specs = {'in_specs': (PartitionSpec(), rows), 'out_specs': rows, 'check_vma': False}
  return jax.shard_map(local, mesh=mesh, axis_names={'data'}, **specs)(table, tokens)


def on_devices():
  found = []
  for sizes in MESHES:
    mesh = sharding.make_mesh(sizes)
    ways = [lambda table, tokens, mesh=mesh: _lookup(table, tokens, mesh, jnp.float32)]
    if sizes.get('data'):
      ways.append(functools.partial(over_data, mesh))
    for look in ways:
      table, *rest = arrays()
      where = sharding.tree_shardings({'embed': {'embedding': table}}, mesh)['embed']['embedding']
      found.append([x.tolist() for x in outcome(look, jax.device_put(table, where), *rest)])
  print(json.dumps(found))


def test_on_meshes_it_is_what_one_device_looks_up():
  table, tokens, weights = arrays()
  known = (tokens >= 0) & (tokens < V)
  want = np.where(known[..., None], table[np.where(known, tokens, 0)], np.nan)
  gradient = np.zeros((V, D))
  np.add.at(gradient, tokens[known], np.float64(weights[known]))
  alone = outcome(lambda *args: _lookup(*args, None, jnp.float32), table, tokens, weights)
  found = on_eight('from tests import test_lookup; test_lookup.on_devices()')
  assert len(found) == len(MESHES) + 2
  for x, grad in (alone, *found):
    np.testing.assert_array_equal(np.float32(x), want)
    np.testing.assert_allclose(grad, gradient, atol=1e-5)
