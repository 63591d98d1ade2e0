"""The decoder against a float64 loop, its cache, its packing, and the partition of its parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import transformer
from tests.models import PLAIN

TINY = {
  **PLAIN,
  'vocab_size': 17,
  'width': 12,
  'num_layers': 2,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 6,
  'mlp_width': 20,
  'rope_theta': 100.0,
  'norm_eps': 1e-5,
  'qk_norm': True,
  'tied': True,
  'dtype': 'float32',
  'remat': 'none',
}
VARIANTS = (
  {},
  {'num_kv_heads': 4, 'qk_norm': False, 'tied': False},
  {'num_kv_heads': 1, 'qk_norm': False},
)


def make(**changes):
  return transformer.make(**{**TINY, **changes})


@functools.cache
def params_of(**changes):
  """Large random parameters: norms away from 1 and hidden states that tell positions apart."""
  rng = np.random.default_rng(0)

  def leaf(keys, like):
    offset = 1 if keys[-1].key == 'scale' else 0
    return (offset + 0.4 * rng.standard_normal(like.shape)).astype(like.dtype)

  return jax.tree.map_with_path(leaf, jax.eval_shape(make(**changes).init, jax.random.key(0)))


@functools.cache
def compiled(**changes):
  model = make(**changes)
  return jax.jit(model.apply), jax.jit(model.extend)


def tokens_of(shape, seed=0):
  return np.random.default_rng(seed).integers(0, TINY['vocab_size'], shape).astype(np.int32)


def plain(apply, params, tokens):
  """Hidden states of rows without packing or padding."""
  positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
  return apply(params, tokens, positions, np.ones(tokens.shape, np.int32))


# The oracle: one sequence, float64, one token, head and coordinate after the other.


def loop_norm(x, scale, eps):
  return x / math.sqrt(sum(v * v for v in x) / len(x) + eps) * scale


def loop_rotate(x, position, theta):
  half, out = len(x) // 2, np.zeros_like(x)
  for i in range(half):
    angle = position / theta ** (2 * i / len(x))
    out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
    out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
  return out


def loop_attention(h, p, layer, c):
  queries, keys, values = [], [], []
  for t, x in enumerate(h):
    rows = {}
    for name in 'qk':
      rows[name] = []
      for head in x @ p[name]['kernel'][layer].transpose(1, 0, 2):
        if c['qk_norm']:
          head = loop_norm(head, p[f'{name}_norm']['scale'][layer], c['norm_eps'])
        rows[name].append(loop_rotate(head, t, c['rope_theta']))
    queries.append(rows['q'])
    keys.append(rows['k'])
    values.append([x @ p['v']['kernel'][layer][:, i] for i in range(c['num_kv_heads'])])
  out = []
  for t in range(len(h)):
    mixed = np.zeros(c['width'])
    for head in range(c['num_heads']):
      group = head // (c['num_heads'] // c['num_kv_heads'])
      scores = [queries[t][head] @ keys[s][group] / math.sqrt(c['head_dim']) for s in range(t + 1)]
      weights = np.exp(np.array(scores) - max(scores))
      weights /= weights.sum()
      read = sum(w * values[s][group] for s, w in enumerate(weights))
      mixed = mixed + read @ p['o']['kernel'][layer][head]
    out.append(mixed)
  return out


def loop_decoder(params, tokens, **changes):
  c = {**TINY, **changes}
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = [p['embed']['embedding'][token] for token in tokens]
  layers = p['layers']
  for i in range(c['num_layers']):
    norm = lambda v, name, i=i: loop_norm(v, layers[name]['scale'][i], c['norm_eps'])
    mixed = loop_attention([norm(v, 'attention_norm') for v in x], layers['attention'], i, c)
    x = [a + b for a, b in zip(x, mixed, strict=True)]
    for t, v in enumerate(x):
      v = norm(v, 'mlp_norm')
      gate = v @ layers['mlp']['gate']['kernel'][i]
      wide = gate / (1 + np.exp(-gate)) * (v @ layers['mlp']['up']['kernel'][i])
      x[t] = x[t] + wide @ layers['mlp']['down']['kernel'][i]
  return np.array([loop_norm(v, p['final_norm']['scale'], c['norm_eps']) for v in x])


@pytest.mark.parametrize('changes', VARIANTS)
def test_decoder_equals_a_float64_loop(changes):
  params, tokens = params_of(**changes), tokens_of((2, 10))
  hidden = plain(compiled(**changes)[0], params, tokens)
  for row in range(2):
    want = loop_decoder(params, tokens[row], **changes)
    np.testing.assert_allclose(hidden[row], want, atol=5e-5)


def test_unembedding_is_the_embedding_only_when_tied():
  tied, untied = params_of(), params_of(tied=False)
  np.testing.assert_array_equal(make().unembedding(tied), tied['embed']['embedding'])
  assert 'unembed' not in tied
  np.testing.assert_array_equal(make(tied=False).unembedding(untied), untied['unembed']['kernel'])
  assert make().vocab_size == 17


def test_packed_rows_equal_separate_rows_and_padding_does_nothing():
  # Segments of 3, 4 and 1 tokens and 2 of padding in the first row, nothing but padding in the second.
  (apply, _), params = compiled(), params_of()
  tokens = tokens_of((2, 10))
  segments = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [0] * 10], np.int32)
  positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 0, 0], [0] * 10], np.int32)
  hidden = apply(params, tokens, positions, segments)
  for begin, end in ((0, 3), (3, 7), (7, 8)):
    # The same tokens at the front of a row of their own; what follows cannot be seen.
    alone = plain(apply, params, np.roll(tokens, -begin, axis=1))
    np.testing.assert_allclose(hidden[0, begin:end], alone[0, : end - begin], atol=1e-5)
  for garbage in (-1, 10**6):
    padded = np.where(segments == 0, garbage, tokens).astype(np.int32)
    again = apply(params, padded, np.where(segments == 0, 9, positions).astype(np.int32), segments)
    np.testing.assert_array_equal(again[0, :8], hidden[0, :8])
    assert np.isfinite(again).all()


def test_a_token_outside_the_vocabulary_is_loud():
  tokens = tokens_of((2, 10))
  tokens[0, 4] = 17
  hidden = plain(compiled()[0], params_of(), tokens)
  assert np.isnan(hidden[0, 4:]).all() and np.isfinite(hidden[1]).all()


@pytest.mark.parametrize('changes', VARIANTS)
def test_extend_in_any_chunks_equals_apply(changes):
  # Two rows of one cache that are 0 and 2 tokens ahead; NaN everywhere beyond what they wrote.
  (apply, extend), params = compiled(**changes), params_of(**changes)
  tokens = tokens_of((2, 10))
  whole = plain(apply, params, tokens)
  for chunks in ((1,) * 8, (4, 4), (1, 4, 1, 1, 1)):
    cache = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), init_cache(changes))
    for at in range(2):  # row 0 sits beyond the cache meanwhile
      _, cache = extend(
        params, cache, tokens[:, at : at + 1], np.array([12, at], np.int32), every(1)
      )
    start = np.array([0, 2], np.int32)
    for size in chunks:
      piece = np.stack([tokens[row, at : at + size] for row, at in enumerate(start)])
      hidden, cache = extend(params, cache, piece, start, every(size))
      for row, at in enumerate(start):
        np.testing.assert_allclose(hidden[row], whole[row, at : at + size], atol=1e-5)
      start = start + np.int32(size)
    written = np.isfinite(cache[0]).all(axis=(0, 2, 4))  # [rows, C]
    np.testing.assert_array_equal(written, np.arange(12) < np.array([[8], [10]]))


def every(size):
  """Both rows have `size` new tokens."""
  return np.full(2, size, np.int32)


def test_tokens_after_the_count_are_not_written():
  extend, params = compiled()[1], params_of()
  cache = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), init_cache({}))
  start, counts = np.array([3, 5], np.int32), np.array([2, 0], np.int32)
  _, after = extend(params, cache, tokens_of((2, 4)), start, counts)
  for old, new in zip(cache, after, strict=True):
    changed = (old != new).any(axis=(0, 2, 4))
    np.testing.assert_array_equal(
      changed, np.isin(np.arange(12), (3, 4)) & np.array([[True], [False]])
    )


def init_cache(changes):
  return jax.eval_shape(lambda: make(**changes).init_cache(2, 12))


def test_positions_beyond_the_cache_are_dropped():
  extend, params = compiled()[1], params_of()
  cache = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), init_cache({}))
  # Row 0 writes positions 10 and 11 and drops two; row 1 drops all.
  _, after = extend(
    params, cache, tokens_of((2, 4), seed=1), np.array([10, 12], np.int32), every(4)
  )
  for old, new in zip(cache, after, strict=True):
    np.testing.assert_array_equal(old[:, 1], new[:, 1])
    np.testing.assert_array_equal(old[:, 0, :, :10], new[:, 0, :, :10])
    assert (old[:, 0, :, 10:] != new[:, 0, :, 10:]).all()


def test_a_donated_cache_is_updated_in_place():
  model, params = make(), params_of()
  cache = jax.eval_shape(lambda: model.init_cache(64, 256))
  tokens, start = np.zeros((64, 1), np.int32), np.zeros(64, np.int32)
  extend = jax.jit(model.extend, donate_argnums=1)
  compiled = extend.lower(params, cache, tokens, start, start).compile()
  memory = compiled.memory_analysis()
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in cache)
  assert memory.alias_size_in_bytes >= size
  # One layer of keys and values and the scores, and no second cache (L = 2).
  assert memory.temp_size_in_bytes < size


def test_bfloat16_computes_in_bfloat16_on_float32_parameters():
  model, params, tokens = make(dtype='bfloat16'), params_of(), tokens_of((2, 10))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.float32.dtype}
  hidden = plain(jax.jit(model.apply), params, tokens)
  assert hidden.dtype == jnp.bfloat16
  exact = np.asarray(plain(compiled()[0], params, tokens))
  error = np.abs(np.asarray(hidden, np.float32) - exact).mean() / np.abs(exact).mean()
  assert 1e-4 < error < 0.03
  start = np.zeros(2, np.int32)
  hidden, cache = jax.eval_shape(
    model.extend, params, model.init_cache(2, 12), tokens, start, every(10)
  )
  assert hidden.dtype == cache[0].dtype == jnp.bfloat16


def test_remat_gives_equal_gradients_and_padding_finite_ones():
  params, tokens = params_of(), tokens_of((2, 6))
  segments = np.array([[1, 1, 1, 2, 2, 0], [0] * 6], np.int32)

  def gradient(remat):
    loss = lambda p: jnp.square(make(remat=remat).apply(p, tokens, segments, segments)[..., 0])
    return jax.jit(jax.grad(lambda p: loss(p).sum()))

  want = jax.tree.leaves(gradient('none')(params))
  assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in want)
  again = jax.tree.leaves(gradient('nothing_saveable')(params))
  for a, b in zip(want, again, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  for remat in transformer.REMAT_POLICIES:
    jax.eval_shape(gradient(remat), params)


def test_initial_scales():
  # Kernels have stddev 1 / sqrt(fan in); those that write to the residual stream 1 / sqrt(2 L) of that.
  init = jax.jit(make(width=64, num_layers=8, mlp_width=96).init)
  params = init(jax.random.key(0))
  layers = params['layers']
  for kernel, stddev in (
    (layers['attention']['q']['kernel'], 64**-0.5),
    (layers['attention']['o']['kernel'], 24**-0.5 / 4),
    (layers['mlp']['up']['kernel'], 64**-0.5),
    (layers['mlp']['down']['kernel'], 96**-0.5 / 4),
    (params['embed']['embedding'], 0.02),
  ):
    assert np.std(kernel) == pytest.approx(stddev, rel=0.1)
  # Layers differ: each has a key of its own.
  assert np.abs(np.diff(layers['mlp']['up']['kernel'], axis=0)).min(axis=(1, 2)).max() > 0


def test_partition_by_exact_path():
  params = {**params_of(tied=False), 'value_head': {'kernel': jnp.zeros((12, 1))}}
  labels = transformer.partition(params)
  attention = {
    '/'.join(key.key for key in keys)
    for keys, label in jax.tree.leaves_with_path(labels)
    if label == 'attention'
  }
  assert attention == {
    *(f'layers/attention/{name}/kernel' for name in 'qkvo'),
    'layers/attention/q_norm/scale',
    'layers/attention/k_norm/scale',
  }
  rest = {'embed', 'final_norm', 'unembed', 'value_head'}
  assert all(set(jax.tree.leaves(labels[name])) == {'rest'} for name in rest)
  # q and o: 2 layers of 12 * 4 * 6; k and v: 2 * 12 * 2 * 6; QK norms: 2 * 6.
  counts = transformer.partition_counts(params, labels)
  assert counts['attention'] == (6, 2 * 576 + 2 * 288 + 2 * 12)
  # Two norms of [2, 12], MLP of 3 * 2 * 12 * 20, embeddings 2 * 17 * 12, final norm 12, value head 12.
  assert counts['rest'] == (9, 2 * 24 + 1440 + 408 + 12 + 12)


def test_partition_refuses_trees_it_does_not_know():
  params = params_of()
  layers = params['layers']
  renamed = {**layers['attention'], 'query': layers['attention']['q']}
  del renamed['q']
  with pytest.raises(ValueError, match='layers/attention/q'):
    transformer.partition({**params, 'layers': {**layers, 'attention': renamed}})
  with pytest.raises(ValueError, match='layers/attention'):
    transformer.partition({'backbone': params})


@pytest.mark.parametrize(
  'changes',
  (
    {'num_kv_heads': 3},
    {'head_dim': 5},
    {'dtype': 'float16'},
    {'head_dtype': 'bfloat16'},
    {'remat': 'everything'},
  ),
)
def test_make_refuses(changes):
  with pytest.raises(ValueError, match=str(next(iter(changes.values())))):
    make(**changes)
