"""Adapters: trees, the function that they compute, and whole updates that move nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import batching, build, pretraining
from sao_jax.models import lora
from tests.test_batching import PACK, trajectory
from tests.test_build import config
from tests.test_models import compiled, make, params_of, tokens_of

SCALE = 2.5  # alpha 5 over rank 2
RANK = {'lora_rank': 2, 'lora_alpha': 5.0}
ATTENTION = [f'attention/{name}' for name in 'qkvo']
MLP = [f'mlp/{name}' for name in ('gate', 'up', 'down')]
SMALL = {
  'model__width': 16,
  'model__num_layers': 2,
  'model__num_heads': 2,
  'model__num_kv_heads': 1,
  'model__head_dim': 8,
  'model__mlp_width': 24,
}


def paths(tree):
  return {jax.tree_util.keystr(keys, simple=True, separator='/') for keys, _ in jax.tree.leaves_with_path(tree)}  # fmt: skip


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def logits(params, tokens, **changes):
  apply, _ = compiled(**changes)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  hidden = apply(params, tokens, positions, np.ones_like(tokens))
  return np.asarray(hidden) @ np.asarray(make(**changes).unembedding(params)).T


def test_split_and_join_are_inverse_and_share_leaves():
  params = params_of(**RANK)
  backbone, adapters = lora.split(params)
  names = {f'layers/{kernel}' for kernel in ATTENTION + MLP}
  assert paths(adapters) == {f'{name}/lora_{side}' for name in names for side in 'ab'}
  assert paths(backbone) == paths(params_of())
  joined = lora.join(backbone, adapters)
  assert jax.tree.structure(joined) == jax.tree.structure(params)
  same = jax.tree.map(lambda a, b: a is b, joined, params)
  assert all(jax.tree.leaves(same))
  assert lora.join({}, params).keys() == params.keys()  # whole models have no backbone
  with pytest.raises(ValueError, match='lora_rank of at least 1'):
    lora.split(params_of())


@pytest.mark.parametrize('changes', [{}, {'qkv_bias': True, 'tied': False}])
def test_merged_parameters_compute_the_same(changes):
  params, tokens = params_of(**changes, **RANK), tokens_of((2, 7))
  adapted = logits(params, tokens, **changes, **RANK)
  merged = lora.merge(params, scale=SCALE)
  plain = logits(merged, tokens, **changes)
  assert paths(merged) == paths(params_of(**changes))
  size = np.abs(adapted).max()
  np.testing.assert_allclose(plain, adapted, atol=1e-5 * size)
  # The adapters matter, and so does their scale.
  for other in (0.0, 1.0):
    there = logits(lora.merge(params, scale=other), tokens, **changes)
    assert np.abs(there - adapted).max() > 0.05 * size


def test_merge_by_hand_and_in_the_dtype_of_the_kernel():
  # One layer, two inputs, two heads of one: W + 3 A B with A = (1, 2), B = (4, 5).
  kernel = jnp.ones((1, 2, 2, 1), jnp.bfloat16)
  leaf = {
    'kernel': kernel,
    'lora_a': jnp.asarray([[[1.0], [2.0]]]),
    'lora_b': jnp.asarray([[[[4.0], [5.0]]]]),
  }
  merged = lora.merge({'q': leaf, 'norm': {'scale': kernel}}, scale=3.0)
  assert merged['q'].keys() == {'kernel'} and merged['norm']['scale'] is kernel
  assert merged['q']['kernel'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(merged['q']['kernel'][0, ..., 0], [[13, 16], [25, 31]])


def test_a_fresh_adapted_model_is_its_backbone():
  fresh = jax.jit(make(**RANK).init)(jax.random.key(0))
  backbone, adapters = lora.split(fresh)
  for name in paths(adapters):
    leaf = functools.reduce(lambda tree, key: tree[key], name.split('/'), adapters)
    assert leaf.any() == name.endswith('lora_a')
  tokens = tokens_of((2, 7))
  # XLA may fuse around the zeros that are added, which rounds otherwise; merged parameters are the same to the bit.
  np.testing.assert_allclose(logits(fresh, tokens, **RANK), logits(backbone, tokens), atol=1e-6)
  assert_same(lora.merge(fresh, scale=SCALE), backbone)


@pytest.fixture(scope='module')
def update():
  """(parts, state before, state after, metrics) of one update of a tiny run with adapters."""
  parts = build.parts(
    config(
      **SMALL,
      model__lora_rank=2,
      model__lora_alpha=5.0,
      supervised__num_steps=0,
      sao__policy_freeze_steps=0,
      sao__critic_updates=1,
      sao__eps_low=1.0,  # the trajectories below are not this policy's: keep them whatever their ratio
      policy__warmup_steps=0,
      policy__learning_rate=1e-2,
      train__micro_rows=1,
      evaluation__num_problems=2,
    )
  )
  rng = np.random.default_rng(1)
  noise = lambda x: jnp.asarray(x + 0.1 * rng.normal(size=x.shape), jnp.float32)
  # Off the start, where B is 0 and A has no gradient; and a head with a slope, without which the backbone has none.
  base, adapters = lora.split(parts.model.init(0))
  state = pretraining.fresh_state(parts, lora.join(base, jax.tree.map(noise, adapters)))
  state = state.replace(critic=jax.tree.map(noise, state.critic))
  before = jax.tree.map(np.asarray, jax.tree.map(jnp.copy, state))  # the state is donated
  a = trajectory('a', [0, 1, 0, 1, 1], version=3)
  b = trajectory('bb', [0, 0, 1], version=3, reward=0.25)
  batch = batching.pack([a, b], **PACK)
  after, metrics = parts.learner.update(state, batch)
  return parts, before, after, metrics


def moved(before, after):
  """Paths of the leaves that are not the same."""
  changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
  leaves = jax.tree.leaves_with_path(changed)
  return {jax.tree_util.keystr(keys, simple=True, separator='/') for keys, x in leaves if x}


def test_an_update_moves_adapters_and_nothing_else(update):
  _, before, after, metrics = update
  assert metrics['updates/skipped'] == 0
  assert_same(before.base, after.base)
  assert paths(after.base) == paths(params_of())  # the one backbone of policy and critic
  names = {f'layers/{kernel}/lora_{side}' for kernel in ATTENTION + MLP for side in 'ab'}
  assert paths(after.policy) == names == moved(before.policy, after.policy)
  # Section 3.2: the critic's attention is frozen.
  free = {f'backbone/layers/{kernel}/lora_{side}' for kernel in MLP for side in 'ab'}
  head = {'head/kernel', 'head/bias'}
  assert paths(after.critic) == {f'backbone/{name}' for name in names} | head
  assert moved(before.critic, after.critic) == free | head


def test_optimisers_hold_moments_of_what_they_train_only(update):
  _, _, after, _ = update
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if x.ndim)
  assert size(after.policy_opt) == 2 * size(after.policy)
  mlp, head = after.critic['backbone']['layers']['mlp'], after.critic['head']
  assert size(after.critic_opt) == 2 * (size(mlp) + size(head))
  assert size(after.base) > 4 * size(after.policy)


def test_engines_get_a_copy_with_the_adapters_as_they_are(update):
  parts, before, after, _ = update
  exported = parts.model.export(after)
  assert_same(exported, lora.join(after.base, after.policy))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), exported) == jax.tree.map(
    lambda x: (x.shape, x.dtype), parts.model.exported
  )
  start, merged = (
    lora.merge(lora.join(state.base, state.policy), scale=SCALE) for state in (before, after)
  )
  assert paths(merged) == paths(after.base)
  kernels = {f'layers/{kernel}/kernel' for kernel in ATTENTION + MLP}
  assert moved(start, merged) == kernels
