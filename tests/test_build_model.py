"""The model of a config: weights of a folder, upcycling, adapters, groups, exports, and what is refused before any work."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import build, tokens
from sao_jax.build import methods
from sao_jax.build.model import _NOT_OURS, model_parts
from sao_jax.models import heads, lora, transformer, weights
from tests.test_build import config
from tests.test_lora import SMALL, assert_same, paths

EXPERTS = {'model__num_experts': 3, 'model__experts_per_token': 2}
SIZE = tokens.BYTE_CHAT.vocab_size


def small(**changes):
  return config(**{**SMALL, **changes})


def saved(folder, **changes):
  """(the folder as a string, with the weights of seed 5; those weights)."""
  c = small(**changes)
  params = model_parts(c).init(5)
  shape = {name: value for name, value in c.model.items() if name not in _NOT_OURS}
  shape |= {'vocab_size': SIZE, 'rope_scaling': None}
  weights.save(folder / 'm', params, shape, dtype='float32', max_shard_bytes=10**9, carried={})
  return str(folder / 'm'), params


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model__upcycle': True}, r'model\.upcycle=True .* needs model\.weights, model\.num_experts and'),
    ({'model__vocab_size': 7}, rf'model\.vocab_size=7 must be at least the {SIZE} of the tokenizer'),
    ({'model__attention': 'flash'}, r"model\.attention='flash' must be one of xla"),
    ({'model__expert_backend': 'fast'}, r"model\.expert_backend='fast' must be one of .*ragged, dense"),
    ({'model__dtype': 'float16'}, r"model\.dtype 'float16' must be 'float32' or 'bfloat16'"),
    ({'model__head_dtype': 'bfloat16'}, r"model\.head_dtype 'bfloat16' must be 'float32', or the dtype 'float32'"),
    ({'model__remat': 'all'}, r"model\.remat 'all' must be 'none' or one of"),
    ({'model__sinks': 2}, r'model\.window 0, sinks 2 .* sinks need a window'),
    ({'model__lora_rank': 2}, r'supervised\.num_steps=900.* with model\.lora_rank=2: .* set them to 0'),
    ({'chat__format': 'llama'}, r"chat\.format='llama' must be one of bytes, smollm2, qwen3"),
    ({'chat__format': 'qwen3'}, r"chat\.format='qwen3' needs a tokenizer: name its folder in chat\.tok"),
    ({'chat__format': 'smollm2', 'chat__tokenizer': 'x'}, r'supervised\.num_steps=900, .* with chat\.format'),
    ({'train__compression': 'int4'}, r"train\.compression='int4' must be one of"),
    ({'train__compression': 'int8'}, r"train\.compression='int8' with mesh\.data=1: .* from 2 to 7 only"),
    ({'train__compression': 'bfloat16', 'mesh__data': 4}, r'mesh\.data=4: .* from 2 to 3 only'),
    ({'train__compression': 'int8', 'mesh__data': 2, 'model__attention': 'chunked'}, r"needs a dense model, model\.att"),
    ({'chat__system': 'x'}, r"chat\.system='x', chat\.tools=True with chat\.format='bytes'"),
    ({'chat__tools': False}, r"chat\.tools=False with chat\.format='bytes'"),
    ({'chat__thinking': 'off'}, r"chat\.thinking='off' is for chat\.format='qwen3', not 'bytes'"),
    ({'chat__thinking': 'deep'}, r"chat\.thinking='deep' must be one of free, open, off"),
    ({'chat__format': 'smollm2', 'chat__tokenizer': 'x', 'supervised__num_steps': 0, 'supervised__workdir': 'y'}, r"supervised\.workdir='y'"),
    ({'model__head_dim': 0}, r'model\.head_dim=0 must be at least 2'),
    ({'model__rope_theta': 0.0}, r'model\.rope_theta=0\.0 must be a finite number above 0'),
    ({'model__norm_eps': -1.0}, r'model\.norm_eps=-1\.0 must be a finite number above 0'),
    ({'chat__prefill': 'x'}, r"chat\.prefill='x' is for chat\.format='smollm2', not 'bytes'"),
    ({'engine__expert': 0}, r'engine\.expert=0 must be at least 1'),
    ({'model__attention_chunk': 0}, r'model\.attention_chunk=0 must be at least 1'),
    ({'train__optimizer_memory': 'disk'}, r"train\.optimizer_memory='disk' must be one of device"),
    ({'mesh__data': 0}, r'mesh\.data=0 must be at least 1'),
    ({'mesh__fsdp': 1024}, r"mesh: .*'fsdp': 1024.* needs 1024 devices and there are .*: lower its sizes"),
    ({'engine__tensor': 1024}, r'engine\.tensor=1024, .* needs 1024 devices'),
    ({'engine__expert': 2, 'engine__num_slots': 7}, r'engine\.num_slots=7 must be a multiple of engine\.expert=2'),
    ({'engine__expert': 2, 'engine__prefill_rows': 5}, r'engine\.prefill_rows=5 must be a multiple'),
    ({'policy__frozen': ('norms',)}, r"policy\.frozen=\('norms',\): this model has no group 'norms', only attention"),
    ({'policy__frozen': ('rest',)}, r"policy\.frozen=\('rest',\)"),
    ({'critic__frozen': ('router',)}, r"critic\.frozen=\('router',\): .* no group 'router'"),
    ({'policy__router_scale': 0.5}, r"policy\.router_scale=0\.5: this model has no group 'router'"),
  ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_name_and_the_remedy(changes, message):
  with pytest.raises(ValueError, match=message):
    build.parts(small(**changes))


@pytest.mark.parametrize('scale', [0.0, -1.0, float('inf'), float('nan')])
def test_a_scale_must_move_its_group(scale):
  with pytest.raises(ValueError, match=rf'policy\.experts_scale={scale} .* policy\.frozen stops'):
    groups(policy__experts_scale=scale)


def test_one_device_has_no_mesh_and_the_vocabulary_may_be_larger():
  parts = model_parts(small(model__vocab_size=SIZE + 9))
  assert parts.mesh is None and parts.engine_mesh is None
  assert parts.exported['embed']['embedding'].shape == (SIZE + 9, 16)
  assert model_parts(small()).exported['embed']['embedding'].shape == (SIZE, 16)


def test_bytes_are_no_ids_of_a_tokenizer(tmp_path):
  folder, _ = saved(tmp_path)
  build.parts(small(model__weights=folder, supervised__num_steps=0))
  (tmp_path / 'm' / 'tokenizer.json').write_text('{}')
  with pytest.raises(
    ValueError, match=r"chat\.format='bytes' with model\.weights=.* tokenizer\.json"
  ):
    build.parts(small(model__weights=folder, supervised__num_steps=0))


def test_a_model_that_cannot_be_exported_is_told_before_it_is_trained(tmp_path):
  folder, _ = saved(tmp_path)
  plain = build.parts(small(model__weights=folder))
  window = build.parts(small(model__weights=folder, model__window=8))
  told = [' '.join(parts.notes) for parts in (plain, window)]
  assert 'export.py' not in told[0] and 'export.py will not write this model: window 8' in told[1]


def test_weights_of_a_folder_are_loaded_bit_for_bit(tmp_path):
  folder, params = saved(tmp_path)
  parts = model_parts(small(model__weights=folder))
  assert_same(parts.init(0), params)
  assert_same(parts.init(1), params)  # whatever the seed


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model__width': 32}, r'model\.width=32 and the model of model\.weights=.* has 16: use that'),
    ({'model__qk_norm': False}, r'model\.qk_norm=False and .* has True'),
    ({'model__rope_theta': 5e5}, r'model\.rope_theta=500000\.0 and .* has 10000\.0'),
    ({'model__vocab_size': SIZE + 9}, rf'model\.vocab_size={SIZE + 9} and .* has {SIZE}'),
    ({'model__rope_scaling': {'factor': 8.0}}, r'model\.rope_scaling=.*8\.0.* has None'),
    (EXPERTS, r'model\.num_experts=3 and .* has 0'),
  ],
)  # fmt: skip
def test_an_architecture_other_than_the_weights_is_named(folder, changes, message):
  changes = dict(changes)
  c = small(model__weights=folder)
  c.model.rope_scaling.update(changes.pop('model__rope_scaling', {}))
  for field, value in changes.items():
    c.model[field.removeprefix('model__')] = value
  with pytest.raises(ValueError, match=message):
    model_parts(c)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return saved(tmp_path_factory.mktemp('weights'))[0]


def test_a_folder_without_weights_is_named(tmp_path):
  with pytest.raises(ValueError, match=r'config\.json cannot be read'):
    model_parts(small(model__weights=str(tmp_path)))


TOKENS = np.random.default_rng(0).integers(0, SIZE, (2, 9)).astype(np.int32)


def logprobs(model, params, hidden=None):
  """[2, 9] of TOKENS[:, 1:], and of one more."""
  if hidden is None:
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), TOKENS.shape)
    hidden = jax.jit(model.apply)(params, TOKENS, positions, np.ones_like(TOKENS))
  table, nexts = model.unembedding(params), np.roll(TOKENS, -1, axis=1)
  out = heads.token_logprobs(
    hidden.reshape(18, -1), table, nexts.reshape(18), temperature=1.0, chunk=18
  )
  return np.asarray(out).reshape(2, 9)


@pytest.mark.parametrize('tied', [True, False])
def test_a_head_in_bfloat16_rounds_the_table_once_for_learner_and_engine(tied):
  precise, rough = (
    model_parts(small(model__dtype='bfloat16', model__head_dtype=dtype, model__tied=tied))
    for dtype in ('float32', 'bfloat16')
  )
  params = precise.init(0)
  state = types.SimpleNamespace(base={}, policy=params)
  for parts, dtype in ((precise, jnp.float32), (rough, jnp.bfloat16)):
    taken = parts.export(state)
    assert taken['embed']['embedding'].dtype == parts.exported['embed']['embedding'].dtype == dtype
    learned, sampled = parts.model.unembedding(params), parts.engine_model.unembedding(taken)
    assert learned.dtype == sampled.dtype == dtype
    np.testing.assert_array_equal(np.float32(learned), np.float32(sampled))
  exact, rounded = (logprobs(parts.model, params) for parts in (precise, rough))
  assert 0 < np.abs(exact - rounded).max() < 0.02


def test_upcycled_weights_compute_the_same(folder):
  dense = model_parts(small(model__weights=folder))
  mixture = model_parts(small(model__weights=folder, model__upcycle=True, **EXPERTS))
  params, before = mixture.init(0), dense.init(0)
  assert paths(params) == paths(mixture.exported)
  up, old = params['layers']['moe']['up']['kernel'], before['layers']['mlp']['up']['kernel']
  assert up.shape == (2, 3, 16, 24)
  np.testing.assert_array_equal(up[:, 2], old)
  np.testing.assert_allclose(
    logprobs(mixture.model, params), logprobs(dense.model, before), atol=1e-5
  )
  other = mixture.init(1)['layers']['moe']['router']['kernel']
  assert not np.array_equal(other, params['layers']['moe']['router']['kernel'])  # its only chance


def test_adapters_stand_on_the_weights_of_a_folder(folder):
  whole = model_parts(small(model__weights=folder)).init(0)
  parts = model_parts(small(model__weights=folder, model__lora_rank=2, supervised__num_steps=0))
  base, adapters = lora.split(parts.init(3))
  assert_same(base, whole)
  assert not adapters['layers']['mlp']['up']['lora_b'].any()
  assert adapters['layers']['mlp']['up']['lora_a'].all()
  exported = parts.export(types.SimpleNamespace(base=base, policy=adapters))
  assert_same(lora.split(exported)[0], whole)
  assert paths(parts.exported) == paths(exported)


def test_engines_see_adapters_that_bfloat16_kernels_would_not(folder):
  rough = {'model__dtype': 'bfloat16', 'model__lora_rank': 2, 'supervised__num_steps': 0}
  parts = model_parts(small(model__weights=folder, **rough))
  base, adapters = lora.split(parts.init(3))
  base = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), base)
  moved = jax.tree.map(lambda x: x + 2e-5, adapters)  # a step of AdamW
  outputs = []
  for policy in (adapters, moved):
    taken = parts.export(types.SimpleNamespace(base=base, policy=policy))
    sampled = logprobs(parts.engine_model, taken)
    np.testing.assert_array_equal(sampled, logprobs(parts.model, lora.join(base, policy)))
    outputs.append(sampled)
  assert np.abs(outputs[1] - outputs[0]).max() > 0
  merged = lora.merge(lora.join(base, moved), scale=8.0)['layers']['mlp']['up']['kernel']
  lost = jnp.bfloat16(merged) == jnp.bfloat16(base['layers']['mlp']['up']['kernel'])
  assert lost.mean() > 0.5


# Groups


@functools.cache
def mixture():
  return model_parts(small(**EXPERTS)).init(0)


def groups(**changes):
  """(frozen, words, steps): of one optimiser step on gradients that are a fixed noise."""
  params = mixture()
  rng = np.random.default_rng(0)
  grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
  labels = transformer.partition(params)
  c = small(**EXPERTS, policy__warmup_steps=0, policy__clip_norm=float('inf'), **changes)
  tx, frozen, words = methods.grouped('policy', c.policy, params, labels)
  state = tx.init(params)
  return frozen, words, jax.jit(tx.update)(grads, state, params)[0], state


def of(tree, group):
  labels = transformer.partition(mixture())
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(labels), strict=True)
  return [leaf for leaf, label in pairs if label == group]


def test_scales_multiply_the_steps_of_their_group_alone():
  # By powers of two, so that the product is exact.
  *_, plain, _ = groups()
  *_, scaled, _ = groups(policy__router_scale=0.25, policy__experts_scale=2.0)
  scales = {'router': 0.25, 'experts': 2.0, 'attention': 1, 'rest': 1}
  for group, scale in scales.items():
    assert of(plain, group)
    for a, b in zip(of(plain, group), of(scaled, group), strict=True):
      assert np.asarray(a).any()
      np.testing.assert_array_equal(b, scale * a)


@pytest.mark.parametrize('group', ['attention', 'router', 'experts'])
def test_a_frozen_group_stands_still_and_has_no_moments(group):
  frozen, words, steps, state = groups(policy__frozen=(group,))
  assert f'{group} is frozen' in words
  size = lambda leaves: sum(x.size for x in leaves)
  trained = 0
  for other in transformer.GROUPS:
    assert {bool(flag) for flag in of(frozen, other)} == {other == group}
    assert all(np.asarray(step).any() != (other == group) for step in of(steps, other))
    trained += size(of(steps, other)) * (other != group)
  moments = size(x for x in jax.tree.leaves(state) if x.ndim)
  assert moments == 2 * trained


# Exports


def dtypes(exported):
  """(of the kernels of attention and MLP, of everything else)."""
  layers = exported['layers']
  kernels = [layers['attention'][name]['kernel'] for name in 'qkvo']
  mlp = layers['moe' if 'moe' in layers else 'mlp']
  kernels += [mlp[name]['kernel'] for name in ('gate', 'up', 'down')]
  rest = [x for x in jax.tree.leaves(exported) if not any(x is kernel for kernel in kernels)]
  # Table, norms of block, heads and end, router.
  assert len(rest) == 6 + ('moe' in layers)
  return {str(x.dtype) for x in kernels}, {str(x.dtype) for x in rest}


@pytest.mark.parametrize('changes', [{}, EXPERTS], ids=['dense', 'experts'])
def test_kernels_are_exported_in_the_compute_dtype(changes):
  for dtype in ('bfloat16', 'float32'):
    exported = model_parts(small(model__dtype=dtype, **changes)).exported
    assert dtypes(exported) == ({dtype}, {'float32'})


def test_bfloat16_engines_agree_with_the_learner():
  parts = model_parts(small(model__dtype='bfloat16', **EXPERTS))
  params = jax.tree.map(lambda x: 3 * x, parts.init(0))  # far from uniform: by e^2
  exported = parts.export(types.SimpleNamespace(base={}, policy=params))
  assert dtypes(exported) == ({'bfloat16'}, {'float32'})
  engine = parts.engine_model
  learned = logprobs(parts.model, params)
  np.testing.assert_array_equal(logprobs(engine, exported), learned)  # the cast loses nothing
  # An engine decodes from a cache, where sums have another order. Each activation may round otherwise, by 2^-8.
  cache, zero = engine.init_cache(2, 16), np.zeros(2, np.int32)
  extend = jax.jit(engine.extend)
  first, cache = extend(exported, cache, TOKENS[:, :4], zero, zero + 4)
  second, _ = extend(exported, cache, TOKENS[:, 4:], zero + 4, zero + 5)
  sampled = logprobs(engine, exported, jnp.concatenate([first, second], axis=1))
  assert np.ptp(learned) > 2
  np.testing.assert_allclose(sampled, learned, atol=0.05)
