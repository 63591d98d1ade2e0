"""The mixture of experts against a float64 loop over tokens, alone and over 8 virtual devices."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import grouped, moe, transformer
from tests.devices import on_eight

N, E, D, F = 7, 4, 5, 3
NAMES = ('x', 'router', 'gate', 'up', 'down')


def arrays(seed=0, scale=1.0):
  """x [N, D], router [D, E], gate and up [E, D, F], down [E, F, D], float64."""
  rng = np.random.default_rng(seed)
  shapes = ((N, D), (D, E), (E, D, F), (E, D, F), (E, F, D))
  return [scale * rng.standard_normal(shape) for shape in shapes]


def loop(x, router, gate, up, down, *, experts_per_token, normalize, valid):
  """Token by token, in float64."""
  out, load = np.zeros_like(x), np.zeros(len(gate))
  for n in np.flatnonzero(valid):
    logits = x[n] @ router
    p = np.exp(logits - logits.max())
    p /= p.sum()
    chosen = sorted(range(len(gate)), key=lambda e: (-p[e], e))[:experts_per_token]
    total = sum(p[e] for e in chosen) if normalize else 1
    for e in chosen:
      g = x[n] @ gate[e]
      out[n] += p[e] / total * ((g / (1 + np.exp(-g)) * (x[n] @ up[e])) @ down[e])
      load[e] += 1
  return out, load


def slopes(inputs, cotangent, **kwargs):
  """Central differences of sum(cotangent * loop) in every input."""
  value = lambda: np.sum(cotangent * loop(*inputs, **kwargs)[0])
  result = []
  for array in inputs:
    slope = np.zeros_like(array)
    for i in np.ndindex(array.shape):
      kept = array[i]
      ends = []
      for step in (1e-5, -1e-5):
        array[i] = kept + step
        ends.append(value())
      array[i] = kept
      slope[i] = (ends[0] - ends[1]) / 2e-5
    result.append(slope)
  return result


VALID = np.arange(N) != 2
COTANGENT = np.random.default_rng(1).standard_normal((N, D))


@functools.cache
def expected(experts_per_token, normalize, dtype):
  """Inputs with x rounded to the dtype, and out, load and gradients of the loop. A slow one: once for all backends."""
  inputs = arrays()
  inputs[0] = np.asarray(jnp.asarray(inputs[0], dtype), np.float64)
  kwargs = {'experts_per_token': experts_per_token, 'normalize': normalize, 'valid': VALID}
  return inputs, *loop(*inputs, **kwargs), slopes(inputs, COTANGENT, **kwargs)


@functools.partial(jax.jit, static_argnames=('experts_per_token', 'normalize', 'backend'))
def compute(inputs, cotangent, valid, **kwargs):
  """(out, load, gradients of the inputs)."""
  out, pull, load = jax.vjp(lambda *a: moe.mlp(*a, valid=valid, **kwargs), *inputs, has_aux=True)
  return out, load, pull(cotangent.astype(out.dtype))


def as_jax(inputs, dtype=jnp.float32):
  return [jnp.asarray(a, dtype if i == 0 else jnp.float32) for i, a in enumerate(inputs)]


@pytest.mark.parametrize('backend', moe.BACKENDS)
@pytest.mark.parametrize(
  ('experts_per_token', 'normalize'), [(1, True), (2, False), (2, True), (E, True)]
)
def test_value_and_gradient_against_a_loop(backend, experts_per_token, normalize):
  inputs, out, load, gradients = expected(experts_per_token, normalize, 'float32')
  kwargs = {'experts_per_token': experts_per_token, 'normalize': normalize, 'backend': backend}
  got, got_load, found = compute(as_jax(inputs), jnp.asarray(COTANGENT), VALID, **kwargs)
  np.testing.assert_allclose(got, out, rtol=2e-5, atol=2e-5)
  np.testing.assert_array_equal(got_load, load)
  assert load.sum() == experts_per_token * VALID.sum()
  for name, a, b in zip(NAMES, found, gradients, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)
  if experts_per_token == 1 and normalize:  # a weight of 1 whatever the router says
    np.testing.assert_allclose(found[1], 0, atol=1e-6)


@pytest.mark.parametrize('backend', moe.BACKENDS)
def test_all_tokens_to_one_expert(backend):
  # The router looks at x[0] = 1 only: expert 2 has the highest logit for every token, the others get none.
  inputs = arrays()
  inputs[0][:, 0], inputs[1][:] = 1, 0
  inputs[1][0] = 0, 1, 9, 2
  kwargs = {'experts_per_token': 1, 'normalize': False}
  valid, cotangent = np.ones(N, bool), np.ones((N, D))
  out, load, found = compute(
    as_jax(inputs), jnp.asarray(cotangent), valid, backend=backend, **kwargs
  )
  np.testing.assert_array_equal(load, [0, 0, N, 0])
  np.testing.assert_allclose(out, loop(*inputs, valid=valid, **kwargs)[0], rtol=1e-5, atol=1e-5)
  for name, gradient in zip(NAMES[2:], found[2:], strict=True):
    assert np.any(gradient, axis=(1, 2)).tolist() == [False, False, True, False], name


@pytest.mark.parametrize('backend', moe.BACKENDS)
def test_padding_changes_nothing(backend):
  kwargs = {'experts_per_token': 2, 'normalize': True, 'backend': backend}
  valid = np.asarray([True, False, True, True, False, True, True])
  cotangent = np.random.default_rng(1).standard_normal((N, D))
  inputs = arrays()
  few = [inputs[0][valid], *inputs[1:]]
  out, load, gradients = compute(
    as_jax(few), jnp.asarray(cotangent[valid]), np.ones(valid.sum(), bool), **kwargs
  )
  inputs[0][~valid] = [[np.nan] * D, [np.inf] * D]
  cotangent[~valid] = np.nan
  all_out, all_load, all_gradients = compute(
    as_jax(inputs), jnp.asarray(cotangent), valid, **kwargs
  )
  np.testing.assert_array_equal(all_out[~valid], 0)
  np.testing.assert_array_equal(all_gradients[0][~valid], 0)
  np.testing.assert_array_equal(all_load, load)
  np.testing.assert_allclose(all_out[valid], out, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(all_gradients[0][valid], gradients[0], rtol=1e-5, atol=1e-6)
  for name, a, b in zip(NAMES[1:], all_gradients[1:], gradients[1:], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('backend', moe.BACKENDS)
def test_bfloat16_is_close(backend):
  # x is rounded before both; routing is float32, so the same experts are chosen.
  inputs, out, load, gradients = expected(2, True, 'bfloat16')
  kwargs = {'experts_per_token': 2, 'normalize': True, 'backend': backend}
  got, got_load, found = compute(
    as_jax(inputs, jnp.bfloat16), jnp.asarray(COTANGENT), VALID, **kwargs
  )
  assert got.dtype == jnp.bfloat16 and found[0].dtype == jnp.bfloat16
  assert all(a.dtype == jnp.float32 for a in found[1:])
  np.testing.assert_array_equal(got_load, load)
  for a, b in zip((got, *found), (out, *gradients), strict=True):
    error = np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()
    assert error < 0.02, error  # bfloat16 has 8 bits: 0.4 % each rounding


def test_route_by_hand():
  # Logits log 4, log 1, log 4, log 1: probabilities .4 .1 .4 .1. Ties go to the lower index.
  x = jnp.ones((1, 1), jnp.bfloat16)
  router = jnp.log(jnp.asarray([[4.0, 1.0, 4.0, 1.0]]))
  weights, experts = moe.route(x, router, experts_per_token=3, normalize=False)
  np.testing.assert_array_equal(experts, [[0, 2, 1]])
  np.testing.assert_allclose(weights, [[0.4, 0.4, 0.1]], rtol=1e-6)
  assert weights.dtype == jnp.float32 and experts.dtype == jnp.int32
  weights, _ = moe.route(x, router, experts_per_token=3, normalize=True)
  np.testing.assert_allclose(weights, [[4 / 9, 4 / 9, 1 / 9]], rtol=1e-6)


def test_bad_arguments_are_named():
  inputs = as_jax(arrays())
  kwargs = {'experts_per_token': 2, 'normalize': True, 'valid': np.ones(N, bool)}
  with pytest.raises(ValueError, match=r'expert_backend .sparse. must be'):
    moe.mlp(*inputs, backend='sparse', **kwargs)
  for k in (0, E + 1):
    with pytest.raises(ValueError, match=f'experts_per_token is {k}'):
      moe.mlp(*inputs, backend='dense', **{**kwargs, 'experts_per_token': k})
  with pytest.raises(AssertionError):
    moe.mlp(inputs[0], inputs[1], *inputs[2:4], inputs[3], backend='dense', **kwargs)


def test_load_metrics_by_hand():
  # Layer 0 even; layer 1 has all 8 tokens on one expert, so 3 of the 8 experts are dead and entropies are 1 and 0.
  load_metrics = jax.jit(moe.load_metrics)
  metrics = load_metrics(jnp.asarray([[2.0, 2, 2, 2], [0, 8, 0, 0]]))
  expected = {'moe/load_max': 4.0, 'moe/load_entropy': 0.5, 'moe/dead_experts': 3 / 8}
  assert metrics.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
  # Shares 1/2 1/4 1/4 0: 1.5 of 2 bits.
  metrics = load_metrics(jnp.asarray([[2.0, 1, 1, 0]]))
  np.testing.assert_allclose(metrics['moe/load_entropy'], 0.75, rtol=1e-6)
  np.testing.assert_allclose(metrics['moe/load_max'], 2)
  assert not any(load_metrics(jnp.zeros((2, 4))).values())
  assert load_metrics(jnp.ones((2, 1)))['moe/load_entropy'] == 1


def dense_tree(dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = {'gate': (2, D, F), 'up': (2, D, F), 'down': (2, F, D)}
  mlp = {name: {'kernel': jnp.asarray(rng.standard_normal(s), dtype)} for name, s in shapes.items()}
  return {
    'embed': {'embedding': jnp.ones((3, D))},
    'layers': {'mlp': mlp, 'mlp_norm': {'scale': jnp.ones((2, D))}},
  }


@pytest.mark.parametrize('experts_per_token', [1, 2, E])
def test_upcycled_layer_is_the_dense_layer(experts_per_token):
  dense = dense_tree()
  tree = moe.upcycle(dense, num_experts=E, key=jax.random.key(0), router_stddev=0.5)
  assert set(tree['layers']) == {'moe', 'mlp_norm'} and set(dense['layers']) == {'mlp', 'mlp_norm'}
  assert tree['embed'] is dense['embed']
  inputs = as_jax(arrays())
  valid = jnp.ones(N, bool)
  kwargs = {'experts_per_token': experts_per_token, 'normalize': True, 'backend': 'dense'}
  loads = []
  for layer in range(2):
    gate, up, down = (dense['layers']['mlp'][name]['kernel'][layer] for name in NAMES[2:])
    expected = (jax.nn.silu(inputs[0] @ gate) * (inputs[0] @ up)) @ down
    kernels = [tree['layers']['moe'][name]['kernel'][layer] for name in NAMES[1:]]
    out, load, _ = compute([inputs[0], *kernels], inputs[0], valid, **kwargs)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    loads.append(np.asarray(load))
  if experts_per_token == 1:
    assert not np.array_equal(*loads)  # each layer has a router of its own


def test_upcycle_refuses_and_keeps_dtypes():
  upcycle = functools.partial(moe.upcycle, num_experts=E, key=jax.random.key(0), router_stddev=0.02)
  tree = upcycle(dense_tree(jnp.bfloat16))
  assert {a.dtype for a in jax.tree.leaves(tree['layers']['moe'])} == {jnp.dtype('bfloat16')}
  with pytest.raises(ValueError, match='already'):
    upcycle(tree)
  with pytest.raises(ValueError, match='router_stddev is 0'):
    upcycle(dense_tree(), router_stddev=0)
  with pytest.raises(ValueError, match='num_experts is 0'):
    upcycle(dense_tree(), num_experts=0)
  adapted = dense_tree()
  adapted['layers']['mlp']['up']['lora_a'] = jnp.ones((2, D, 1))
  with pytest.raises(ValueError, match='up/lora_a'):
    upcycle(adapted)


def test_labels_of_the_experts():
  dense = dense_tree()
  dense['layers']['attention'] = {name: {'kernel': jnp.ones(1)} for name in 'qkvo'}
  tree = moe.upcycle(dense, num_experts=E, key=jax.random.key(0), router_stddev=0.02)
  labels = transformer.partition(tree)
  assert labels['layers']['moe'] == {
    'router': {'kernel': 'router'},
    **{name: {'kernel': 'experts'} for name in NAMES[2:]},
  }
  assert labels['layers']['mlp_norm'] == {'scale': 'rest'}


LOADS = {  # expert of each token, of one column; E is nobody
  'uneven': [0, 0, 0, 0, 0, 2, 2, 3, 0, 2, 0, E, 0],
  'nobody last': [3, E, 1, E, E, 1, 3, E, 0, E, E, E, 2],
  'one': [1] * 13,
  'nobody': [E] * 13,
}


@functools.partial(jax.jit, static_argnames='block')
def layer_of(x, weights, experts, kernels, cotangent, block):
  """Value and gradients of a rematerialised layer in a scan, as the decoder runs it. Block None: every expert."""
  call = functools.partial(grouped.blocked, block=block) if block else grouped.dense
  layer = jax.checkpoint(lambda x, weights, kernels: call(x, weights, experts, kernels))

  def scan(x, weights, kernels):
    add = lambda total, kernels: (total + layer(x, weights, kernels), None)
    stacked = jax.tree.map(lambda kernel: kernel[None], kernels)
    return jax.lax.scan(add, jnp.zeros_like(x), stacked)[0]

  out, pull = jax.vjp(scan, x, weights, kernels)
  return out, *pull(cotangent)


@pytest.mark.parametrize('name', LOADS)
def test_many_blocks_are_every_expert(name):
  # Blocks of 2 rows: several an expert, half full ones, and none. What nobody takes is not even read: it is NaN.
  first = np.asarray(LOADS[name])
  experts = jnp.asarray(np.stack([first, np.where(first == E, E, (first + 1) % E)], axis=1))
  rng = np.random.default_rng(0)
  x, cotangent, weights = (rng.standard_normal((len(first), n), 'f') for n in (D, D, 2))
  kernels = tuple(as_jax(arrays())[2:])
  expected = layer_of(x, weights, experts, kernels, cotangent, None)
  x, cotangent, weights = (
    np.where(first[:, None] == E, np.nan, a) for a in (x, cotangent, weights)
  )
  found = layer_of(x, weights, experts, kernels, cotangent, 2)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_gradient_of_a_kernel_is_summed_in_float32():
  # x and kernels are 1, so each of 256 blocks of 2 rows adds 2 silu(1) = 1.46 to d_down: bfloat16 sums above 128 are whole.
  ones = lambda *shape: jnp.ones(shape, jnp.bfloat16)
  weights, experts = jnp.ones((512, 1)), jnp.zeros((512, 1), jnp.int32)
  total = lambda *kernels: jnp.sum(grouped.blocked(ones(512, 1), weights, experts, kernels, 2))
  d_down = jax.jit(jax.grad(total, argnums=2))(*[ones(1, 1, 1)] * 3)
  assert d_down.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float64(d_down), 512 * 0.73106, rtol=0.01)


@pytest.mark.parametrize(('rows', 'block'), [(0.5, 8), (31, 8), (32, 16), (512, 256), (1e6, 512)])
def test_block_size(rows, block):
  assert grouped.block_size(rows) == block


# Over 8 virtual devices: one process, started once, computes all cases and prints their errors.

MESHES = ({'data': 2, 'expert': 4}, {'fsdp': 2, 'tensor': 2, 'expert': 2}, {'expert': 8}, {'sequence': 2, 'tensor': 4})  # fmt: skip
AXES = ('data', 'fsdp', 'tensor', 'expert', 'sequence')
CASES = [(1, 'dense', 'float32'), (2, 'ragged', 'float32'), (0, 'blocked', 'float32'), (1, 'blocked', 'float32'), (3, 'blocked', 'float32'), (1, 'blocked', 'bfloat16')]  # fmt: skip


def mesh_of(sizes):
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  return jax.make_mesh(shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def errors_over_devices():
  """Prints {case: {what: largest error relative to the largest value}} of expert_parallel against mlp."""
  rows, size, experts, width, hidden = 8, 4, 8, 6, 4
  rng = np.random.default_rng(0)
  shapes = ((rows, size, width), (width, experts), (experts, width, hidden), (experts, width, hidden), (experts, hidden, width))  # fmt: skip
  inputs = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
  cotangent = jnp.asarray(rng.standard_normal(shapes[0]), jnp.float32)
  valid = np.arange(rows * size).reshape(rows, size) % 5 != 0
  inputs[0], cotangent = (jnp.where(valid[..., None], a, jnp.nan) for a in (inputs[0], cotangent))
  kwargs = {'experts_per_token': 2, 'normalize': True}

  @functools.partial(jax.jit, static_argnames=('backend', 'mesh'))
  def run(inputs, backend, mesh):
    def single(x, *kernels):
      flat = x.reshape(-1, width)
      out, load = moe.mlp(flat, *kernels, backend=backend, valid=valid.reshape(-1), **kwargs)
      return out.reshape(x.shape), load

    spread = functools.partial(moe.expert_parallel, mesh, backend=backend, valid=valid, **kwargs)
    out, pull, load = jax.vjp(spread if mesh else single, *inputs, has_aux=True)
    return {'out': out, 'load': load, **dict(zip(NAMES, pull(cotangent.astype(out.dtype)), strict=True))}  # fmt: skip

  result = {}
  for index, backend, dtype in CASES:
    mesh = mesh_of(MESHES[index])
    cast = [inputs[0].astype(dtype), *inputs[1:]]
    alone = run(cast, 'dense', None)
    pairs = jax.tree.map(lambda a, b: np.float32((a, b)), run(cast, backend, mesh), alone)
    result[f'{index} {backend} {dtype}'] = {
      name: float(np.abs(a - b).max() / np.abs(b).max()) for name, (a, b) in pairs.items()
    }
  print(json.dumps(result))


@pytest.fixture(scope='module')
def over_devices():
  return on_eight('from tests import test_moe; test_moe.errors_over_devices()')


@pytest.mark.parametrize('case', CASES, ids=lambda case: ' '.join(map(str, case)))
def test_expert_parallel_is_the_single_device_result(over_devices, case):
  errors = over_devices[' '.join(map(str, case))]
  assert errors.keys() == {'out', 'load', *NAMES}
  tolerance = 1e-5 if case[2] == 'float32' else 0.02
  assert errors.pop('load') == 0
  assert all(error < tolerance for error in errors.values()), errors  # NaN fails too


@pytest.mark.parametrize(
  ('axis', 'message'),
  [
    ('expert', 'rows B is 3: must be a multiple of 2'),
    ('sequence', 'positions T is 5: must be a multiple of 2'),
    ('tensor', 'width F of an expert is 3: must be a multiple of 2'),
  ],
)
def test_expert_parallel_names_a_size_that_does_not_fit(axis, message):
  mesh = jax.sharding.AbstractMesh(tuple(2 if a == axis else 1 for a in AXES), AXES)
  kernels, x = as_jax(arrays())[1:], jnp.ones((3, 5, D))
  kwargs = {'experts_per_token': 2, 'normalize': True, 'backend': 'dense'}
  with pytest.raises(ValueError, match=message):
    moe.expert_parallel(mesh, x, *kernels, valid=np.ones((3, 5), bool), **kwargs)
