"""Where every leaf of every architecture lies, by a table written by hand; and gradients that are summed with fewer bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from sao_jax import build, compression, sharding
from sao_jax.models import lora, transformer
from tests.models import PLAIN
from tests.test_build import config

SHAPE = {
  **PLAIN,
  'vocab_size': 16,
  'width': 8,
  'num_layers': 2,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 2,
  'mlp_width': 12,
  'rope_theta': 1e4,
  'norm_eps': 1e-6,
  'qk_norm': False,
  'tied': True,
  'dtype': 'float32',
  'remat': 'none',
}
COMMON = {
  'embed/embedding': ('tensor', 'fsdp'),
  'final_norm/scale': (),
  'layers/attention/q/kernel': (None, 'fsdp', 'tensor', None),
  'layers/attention/k/kernel': (None, 'fsdp', 'tensor', None),
  'layers/attention/v/kernel': (None, 'fsdp', 'tensor', None),
  'layers/attention/o/kernel': (None, 'tensor', None, 'fsdp'),
  'layers/attention_norm/scale': (),
  'layers/mlp_norm/scale': (),
}
MLP = {
  'layers/mlp/gate/kernel': (None, 'fsdp', 'tensor'),
  'layers/mlp/up/kernel': (None, 'fsdp', 'tensor'),
  'layers/mlp/down/kernel': (None, 'tensor', 'fsdp'),
}
ADAPTED = [
  'attention/q',
  'attention/k',
  'attention/v',
  'attention/o',
  'mlp/gate',
  'mlp/up',
  'mlp/down',
]
ARCHITECTURES = {
  'plain': ({}, MLP),
  'norms, untied': (
    {'qk_norm': True, 'tied': False},
    {
      **MLP,
      'unembed/kernel': ('tensor', 'fsdp'),
      'layers/attention/q_norm/scale': (),
      'layers/attention/k_norm/scale': (),
    },
  ),
  'biases': (
    {'qkv_bias': True},
    {**MLP, **{f'layers/attention/{name}/bias': (None, 'tensor', None) for name in 'qkv'}},
  ),
  'experts': (
    {'num_experts': 4, 'experts_per_token': 2},
    {
      'layers/moe/router/kernel': (),
      'layers/moe/gate/kernel': (None, 'expert', 'fsdp', 'tensor'),
      'layers/moe/up/kernel': (None, 'expert', 'fsdp', 'tensor'),
      'layers/moe/down/kernel': (None, 'expert', 'tensor', 'fsdp'),
    },
  ),
  'adapters': (
    {'lora_rank': 2, 'lora_alpha': 4.0},
    {**MLP, **{f'layers/{name}/lora_{side}': () for name in ADAPTED for side in 'ab'}},
  ),
}  # fmt: skip


def abstract(**sizes):
  shape = tuple(sizes.get(axis, 1) for axis in sharding.AXES)
  return AbstractMesh(shape, sharding.AXES, axis_types=(AxisType.Auto,) * len(shape))


MESH = abstract(data=2, fsdp=4, tensor=2, expert=4, sequence=2)


def specs(tree):
  """{path: axes}."""
  leaves = jax.tree.leaves_with_path(sharding.tree_shardings(tree, MESH))
  return {sharding.path_of(keys): tuple(leaf.spec) for keys, leaf in leaves}


def init(**changes):
  return jax.eval_shape(transformer.make(**SHAPE | changes).init, jax.random.key(0))


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_every_leaf_of_every_architecture(name):
  changes, more = ARCHITECTURES[name]
  assert specs(init(**changes)) == COMMON | more


@pytest.mark.parametrize('frozen', [(), ('attention',)])
def test_optimiser_states_lie_as_their_parameters_and_frozen_leaves_have_none(frozen):
  parts = build.parts(config(critic__frozen=frozen, model__width=32))
  policy = specs(parts.state.policy)
  assert policy['layers/attention/q/kernel'] == (None, 'fsdp', 'tensor', None)
  critic = specs(parts.state.critic)
  critic_opt = specs(parts.state.critic_opt)
  assert {path: axes for path, axes in critic.items() if path.startswith('backbone/')} == {
    f'backbone/{path}': axes for path, axes in policy.items()
  }
  assert critic['head/kernel'] == critic['head/bias'] == ()
  for tree, opt in ((policy, specs(parts.state.policy_opt)), (critic, critic_opt)):
    for path, axes in opt.items():
      owner = [name for name in tree if path.endswith(f'/{name}')]
      counter = path.endswith('count')
      assert counter or len(owner) == 1, path
      assert axes == (() if counter else tree[owner[0]]), path
  moments = [path for path in critic_opt if '/mu/' in path]
  held = sum('attention/' in path for path in critic)  # q, k, v, o and two norms
  assert held == 6 and len(moments) == len(critic) - (held if frozen else 0)


def test_adapters_have_a_state_and_the_backbone_has_none():
  parts = build.parts(config(model__lora_rank=2, critic__frozen=(), supervised__num_steps=0))
  assert all(axes == () for axes in specs(parts.state.policy).values())
  base, adapters = lora.split(init(lora_rank=2))
  assert specs(base) == COMMON | MLP
  assert all(axes == () for axes in specs(adapters).values())
  assert not any('kernel' in path for path in specs(parts.state.policy_opt))


def test_moments_wait_on_the_host_and_scalars_do_not():
  tree = {'mu': init(), 'count': jax.ShapeDtypeStruct((), jnp.int32)}
  got = sharding.tree_shardings(tree, MESH, memory_kind='pinned_host')
  assert got['count'].memory_kind != 'pinned_host'
  assert {leaf.memory_kind for leaf in jax.tree.leaves(got['mu'])} == {'pinned_host'}


@pytest.mark.parametrize(
  ('pattern', 'path', 'found'),
  [
    ('mlp/up/kernel', 'layers/mlp/up/kernel', True),
    ('mlp/up/kernel', 'mlp/up/kernel', True),
    ('mlp/up/kernel', '0/mu/layers/mlp/up/kernel', True),
    ('mlp/up/kernel', 'layers/other_mlp/up/kernel', False),
    ('mlp/up/kernel', 'layers/mlp/up/kernel/scale', False),
    ('mlp/up/kernel', 'layers/mlp/up/kernels', False),
    ('embed/embedding', 'unembed/embedding', False),
    ('mlp/(gate|up)/kernel', 'layers/mlp/down/kernel', False),
    ('a|b', 'x/b', True),
    ('a|b', 'x/ab', False),
  ],
)  # fmt: skip
def test_a_pattern_matches_whole_names_at_the_end(pattern, path, found):
  assert sharding.matches(pattern, path) == found


def test_what_does_not_fit_is_refused_by_name():
  one = jax.devices()[:1]
  with pytest.raises(
    ValueError, match=r'mesh\.model=2: .* for data, fsdp, tensor, expert, sequence only'
  ):
    sharding.make_mesh({'model': 2}, one)
  with pytest.raises(ValueError, match=r'mesh\.fsdp=0: sizes of at least 1'):
    sharding.make_mesh({'fsdp': 0}, one)
  with pytest.raises(ValueError, match=r"'data': 2, 'fsdp': 1.* needs 2 devices and there are 1"):
    sharding.make_mesh({'data': 2}, one)
  with pytest.raises(
    ValueError,
    match=r"mlp/up/kernel of shape \(2, 6, 12\): 6 is no multiple of the 4 devices of mesh axis 'fsdp'",
  ):
    sharding.spec_of('layers/mlp/up/kernel', (2, 6, 12), MESH)
  with pytest.raises(ValueError, match=r'does not fit layers/mlp/up/kernel of shape \(8, 12\)'):
    sharding.spec_of('layers/mlp/up/kernel', (8, 12), MESH)
  with pytest.raises(ValueError, match=r'train\.micro_rows=16 must be a multiple of .* = 32'):
    sharding.check_rows(MESH, num_rows=16, length=8)
  with pytest.raises(ValueError, match=r'env\.max_tokens=9 must be a multiple of mesh\.sequence=2'):
    sharding.check_rows(MESH, num_rows=32, length=9)
  sharding.check_rows(MESH, num_rows=32, length=8)


def test_rows_lie_over_what_does_not_cut_inside_a_row():
  assert sharding.rows(MESH, 3).spec == PartitionSpec(('data', 'fsdp', 'expert'), 'sequence', None)
  assert sharding.everywhere(MESH).spec == PartitionSpec()
  assert sharding.make_mesh({}, jax.devices()).shape == dict.fromkeys(sharding.AXES, 1)


# Sums with fewer bytes: the axis is one of vmap, which psum and all_gather do not tell from devices.


@functools.partial(jax.jit, static_argnums=2)
def all_reduce(grads, errors, kind):
  one = lambda g, e: compression.all_reduce(g, e, axis='data', kind=kind)
  return jax.vmap(one, axis_name='data')(grads, errors)


@pytest.mark.parametrize(('kind', 'step'), [('bfloat16', 2**-8), ('int8', 0.5 / 127)])
def test_rounded_sums_are_near_and_over_many_steps_nothing_is_lost(kind, step):
  rng = np.random.default_rng(0)
  grads = {
    'w': rng.normal(size=(50, 2, 3, 4)).astype(np.float32),  # 50 steps, 2 devices
    'b': rng.normal(size=(50, 2)).astype(np.float32),
  }
  errors = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), grads)
  total = jax.tree.map(lambda x: np.zeros(x.shape[2:]), grads)
  for i in range(50):
    now = jax.tree.map(lambda x: x[i], grads)  # noqa: B023
    sums, errors = all_reduce(now, errors, kind)
    for name in grads:
      got, exact = np.asarray(sums[name]), now[name].sum(axis=0)
      np.testing.assert_array_equal(got[0], got[1])  # bit for bit the same everywhere
      bound = (
        2 * 2 * step * 2 * np.abs(now[name]).max()
      )  # of this rounding and of what the last one owed
      np.testing.assert_allclose(got[0], exact, atol=bound, rtol=0)
      total[name] += got[0]
  for name, x in grads.items():
    exact = np.float64(x).sum(axis=(0, 1))
    owed = np.float64(errors[name]).sum(axis=0)
    np.testing.assert_allclose(total[name] + owed, exact, rtol=1e-5, atol=1e-5)
    # What is owed at the end is one rounding, not 50.
    assert np.abs(total[name] - exact).max() < 2 * 2 * step * np.abs(x).max()
  assert np.abs(total['w'] - np.float64(grads['w']).sum(axis=(0, 1))).max() > 0


def test_int8_by_hand():
  # Scale 2.54 / 127 = 0.02: 1.27 / 0.02 = 63.5 rounds to 64 (to even), 0.009 / 0.02 to 0, -2.54 / 0.02 to -127.
  code, scale = compression.encode(jnp.asarray([[-2.54, 1.275, 0.009], [0, 0, 0]]), 'int8')
  np.testing.assert_array_equal(code, [[-127, 64, 0], [0, 0, 0]])
  np.testing.assert_allclose(scale, [[0.02], [0]], rtol=1e-6)
  np.testing.assert_allclose(compression.decode(code, scale)[0], [-2.54, 1.28, 0], rtol=1e-6)


@pytest.mark.parametrize('kind', ['bfloat16', 'int8'])
@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_stays_so(kind, bad):
  grads = jnp.asarray([[1.0, bad], [1.0, 2.0]])
  sums, _ = all_reduce(grads, jnp.zeros((2, 2)), kind)
  assert not np.isfinite(sums).all(axis=1).any()


def test_an_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="kind 'fp4' must be one of bfloat16, int8"):
    compression.encode(jnp.ones(2), 'fp4')
