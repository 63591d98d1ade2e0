"""Chunked log-probabilities against the naive form in value, gradient and memory; value heads by hand."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import critics
from sao_jax.models import heads

N, D, V = 10, 8, 33


def data(seed=0, dtype=jnp.float32):
  a, b, c = jax.random.split(jax.random.key(seed), 3)
  hidden = jax.random.normal(a, (N, D)).astype(dtype)
  unembedding = jax.random.normal(b, (V, D)).astype(dtype)
  return hidden, unembedding, jax.random.randint(c, (N,), 0, V)


def naive(hidden, unembedding, tokens, temperature):
  """(log-probabilities, entropy) with the whole [N, V], in float32."""
  logits = hidden.astype(jnp.float32) @ unembedding.astype(jnp.float32).T / temperature
  logprobs = jax.nn.log_softmax(logits)
  return logprobs[jnp.arange(N), tokens], -(jnp.exp(logprobs) * logprobs).sum(-1)


def weighted(function, tokens):
  """A scalar that gives each row its own cotangents."""
  weights = jnp.linspace(-1, 2, N)

  def loss(hidden, unembedding, temperature):
    logprobs, entropy = function(hidden, unembedding, tokens, temperature)
    return (weights * logprobs).sum() + (weights[::-1] * entropy).sum()

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@functools.cache
def chunked(chunk):
  def function(hidden, unembedding, tokens, temperature):
    return heads.token_logprobs(
      hidden, unembedding, tokens, temperature=temperature, chunk=chunk, entropy=True
    )

  return jax.jit(function)


@pytest.mark.parametrize('chunk', [1, 3, 5, 64])
def test_value_and_gradient_equal_the_naive_form(chunk):
  hidden, unembedding, tokens = data()
  slow, fast = weighted(naive, tokens), weighted(chunked(chunk), tokens)
  for temperature in (0.7, 1.0):
    want = slow(hidden, unembedding, temperature)
    got = fast(hidden, unembedding, temperature)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, want)
    a = chunked(chunk)(hidden, unembedding, tokens, temperature)
    b = naive(hidden, unembedding, tokens, temperature)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)


def test_float64_oracle_and_plain_logprobs():
  hidden, unembedding, tokens = data(1)
  h, u = np.float64(hidden), np.float64(unembedding)
  got = heads.token_logprobs(hidden, unembedding, tokens, temperature=0.7, chunk=4)
  for n in range(N):
    logits = [float(h[n] @ u[v]) / 0.7 for v in range(V)]
    normaliser = np.log(np.sum(np.exp(logits)))
    np.testing.assert_allclose(got[n], logits[tokens[n]] - normaliser, atol=1e-5)
  assert got.shape == (N,) and got.dtype == jnp.float32


def test_gradient_without_entropy_by_hand():
  # V = 2, D = 1, logits (h, 0) / T at h = 0: d log p_0 / dh = (1 - 1/2) / T; d / dU = (onehot - p) h / T = 0.
  hidden, unembedding = jnp.zeros((1, 1)), jnp.array([[1.0], [0.0]])

  def loss(h, u):
    return 3 * heads.token_logprobs(h, u, jnp.array([0]), temperature=0.5, chunk=8).sum()

  a, b = jax.grad(loss, argnums=(0, 1))(hidden, unembedding)
  np.testing.assert_allclose(a, [[3.0]])
  np.testing.assert_array_equal(b, [[0], [0]])


def test_bfloat16_is_accumulated_in_float32():
  hidden, unembedding, tokens = data(2, jnp.bfloat16)
  got = heads.token_logprobs(hidden, unembedding, tokens, temperature=1.0, chunk=3)
  want, _ = naive(hidden, unembedding, tokens, 1.0)
  np.testing.assert_allclose(got, want, atol=1e-5)  # a bfloat16 softmax would be off by 0.1
  _, grads = weighted(chunked(3), tokens)(hidden, unembedding, 1.0)
  _, want = weighted(naive, tokens)(hidden, unembedding, 1.0)
  assert grads[0].dtype == grads[1].dtype == jnp.bfloat16
  for x, y in zip(grads[:2], want[:2], strict=True):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    np.testing.assert_allclose(x, y, rtol=0.05, atol=0.05)
  mixed = heads.token_logprobs(
    hidden, unembedding.astype(jnp.float32), tokens, temperature=1.0, chunk=3
  )
  np.testing.assert_allclose(mixed, got, atol=1e-5)


def test_same_weights_give_ratio_one_at_any_temperature():
  # One row at a time, as an engine decodes, against all at once, as the learner trains.
  hidden, unembedding, tokens = data(3)
  for temperature in (0.7, 1.0):
    one = [
      chunked(1)(hidden[i : i + 1], unembedding, tokens[i : i + 1], temperature)[0][0]
      for i in range(N)
    ]
    at_once, _ = chunked(64)(hidden, unembedding, tokens, temperature)
    np.testing.assert_allclose(np.exp(at_once - jnp.stack(one)), 1, atol=1e-5)
  cold, _ = chunked(64)(hidden, unembedding, tokens, 0.7)
  assert not np.allclose(cold, at_once, atol=1e-2)


def test_padding_rows_may_hold_anything():
  hidden, unembedding, tokens = data(4)
  mask = jnp.arange(N) % 3 > 0

  def grads(hidden):
    def loss(hidden, unembedding):
      logprobs, entropy = chunked(4)(hidden, unembedding, tokens, 1.0)
      return jnp.where(mask, logprobs, 0).sum() + jnp.where(mask, entropy, 0).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, unembedding)

  want = grads(jnp.where(mask[:, None], hidden, 0))
  for garbage in (jnp.nan, jnp.inf):
    got = grads(jnp.where(mask[:, None], hidden, garbage))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_extreme_logits_are_finite():
  hidden, unembedding, tokens = data(5)
  value, grads = weighted(chunked(4), tokens)(1e4 * hidden, unembedding, 1.0)
  assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)


def test_never_holds_all_logits():
  rows, width, vocabulary, chunk = 512, 16, 151936, 16
  logits = rows * vocabulary * 4
  shapes = (
    jax.ShapeDtypeStruct((rows, width), jnp.float32),
    jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
    jax.ShapeDtypeStruct((rows,), jnp.int32),
  )

  def loss(hidden, unembedding, tokens):
    logprobs, entropy = heads.token_logprobs(
      hidden, unembedding, tokens, temperature=0.7, chunk=chunk, entropy=True
    )
    return (logprobs + entropy).sum()

  for function in (loss, jax.value_and_grad(loss, argnums=(0, 1))):
    memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
    # A few [chunk, V] at a time (each 1/32 of [N, V]) and a gradient of the unembedding.
    assert memory.temp_size_in_bytes < logits / 4


def test_arguments_are_checked():
  hidden, unembedding, tokens = data()
  for bad in ({'chunk': 0}, {'temperature': 0.0}, {'temperature': -1.0}):
    with pytest.raises(ValueError, match=next(iter(bad))):
      heads.token_logprobs(hidden, unembedding, tokens, **({'temperature': 1.0, 'chunk': 4} | bad))
  for args in (
    (hidden[:, :4], unembedding, tokens),
    (hidden[:4], unembedding, tokens),
    (hidden, unembedding, tokens[:, None]),
    (hidden[0], unembedding, tokens),
  ):
    with pytest.raises(AssertionError):
      heads.token_logprobs(*args, temperature=1.0, chunk=4)
  wild = tokens.at[0].set(-1).at[1].set(V)
  got = heads.token_logprobs(hidden, unembedding, wild, temperature=1.0, chunk=4)
  np.testing.assert_array_equal(np.isnan(got), np.arange(N) < 2)
  empty = heads.token_logprobs(hidden[:0], unembedding, tokens[:0], temperature=1.0, chunk=4)
  assert empty.shape == (0,)


# Of a mask: rows that are empty, full, and between.

B, T = 4, 11
MASK = np.asarray(np.arange(T) < np.asarray([[0], [11], [3], [7]]), np.float32)
MASK[2:] = MASK[2:, ::-1]  # the actions of the last two rows are at their ends
EMPTY, FULL = np.zeros((B, T), np.float32), np.ones((B, T), np.float32)


def rows_data(seed=0, dtype=jnp.float32):
  a, b, c = jax.random.split(jax.random.key(seed), 3)
  hidden = jax.random.normal(a, (B, T, D)).astype(dtype)
  unembedding = jax.random.normal(b, (V, D)).astype(dtype)
  return hidden, unembedding, jax.random.randint(c, (B, T), 0, V)


def slow(hidden, unembedding, tokens, mask, weights, temperature):
  """float64 loops: (log-probabilities, entropies, gradients of (weights * both).sum() in hidden, unembedding, temperature)."""
  hidden, unembedding = np.float64(hidden), np.float64(unembedding)
  logprobs, entropies = np.zeros((2, B, T))
  grads = np.zeros_like(hidden), np.zeros_like(unembedding), np.zeros(())
  for b, t in np.argwhere(mask > 0):
    logits = unembedding @ hidden[b, t] / temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    word, (on_logprob, on_entropy) = tokens[b, t], weights[:, b, t]
    logprobs[b, t], entropies[b, t] = np.log(probs[word]), -(probs * np.log(probs)).sum()
    slope = on_logprob * ((np.arange(V) == word) - probs)
    slope -= on_entropy * probs * (np.log(probs) + entropies[b, t])
    grads[0][b, t] += slope @ unembedding / temperature
    grads[1][...] += slope[:, None] * hidden[b, t] / temperature
    grads[2][...] -= slope @ logits / temperature
  return (logprobs, entropies), grads


WEIGHTS = np.random.default_rng(0).normal(size=(2, B, T))


@functools.cache
def of_actions(chunk, parts):
  """Jitted: (hidden, unembedding, temperature, tokens, mask) -> (both, gradients in the first three)."""

  def loss(hidden, unembedding, temperature, tokens, mask):
    both = heads.action_logprobs(
      hidden, unembedding, tokens, mask, temperature=temperature, chunk=chunk, parts=parts
    )
    return (jnp.asarray(WEIGHTS, jnp.float32) * jnp.stack(both)).sum(), both

  def function(*args):
    (_, both), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*args)
    return both, grads

  return jax.jit(function)


@pytest.mark.parametrize('chunk', [1, 6, 13, 1000])
def test_actions_equal_a_float64_loop(chunk):
  hidden, unembedding, tokens = rows_data()
  for mask in (MASK, FULL, EMPTY):
    got = of_actions(chunk, 1)(hidden, unembedding, 0.7, tokens, mask)
    want = slow(hidden, unembedding, tokens, mask, WEIGHTS, 0.7)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, want)
    assert got[0][0].dtype == got[0][1].dtype == jnp.float32
    assert not np.asarray(got[0])[:, mask == 0].any()


def test_parts_of_a_row_do_not_matter():
  hidden, unembedding, tokens = (x[:, :10] if x.ndim > 2 or len(x) == B else x for x in rows_data())

  def both(parts, chunk):
    function = functools.partial(heads.action_logprobs, temperature=0.7, chunk=chunk, parts=parts)
    return jax.jit(function)(hidden, unembedding, tokens, MASK[:, :10])

  whole = both(1, 8)
  for parts, chunk in ((2, 3), (5, 64)):
    for got, want in zip(both(parts, chunk), whole, strict=True):
      np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize('garbage', [np.nan, np.inf])
def test_what_stands_off_the_mask_changes_no_bit(garbage):
  hidden, unembedding, tokens = rows_data(1)
  off = MASK == 0
  function = of_actions(6, 1)
  want = function(hidden, unembedding, 1.0, tokens, MASK)
  hidden = jnp.where(off[..., None], garbage, hidden)
  for word in (-1, V):
    got = function(hidden, unembedding, 1.0, jnp.where(off, word, tokens), MASK)
    jax.tree.map(np.testing.assert_array_equal, got, want)
  wild = function(hidden, unembedding, 1.0, tokens.at[1, 4].set(V), MASK)
  np.testing.assert_array_equal(np.isnan(wild[0][0]), np.arange(B * T).reshape(B, T) == T + 4)


def test_the_cost_is_that_of_the_fullest_row():
  # 4 rows and chunks of 8 tokens are blocks of 2 columns: 6 for all 11, 1 for two actions a row.
  hidden, unembedding, tokens = rows_data()
  trips = []
  inner = heads._log_softmax

  def counted(*args):
    jax.debug.callback(lambda: trips.append(1))
    return inner(*args)

  with mock.patch.object(heads, '_log_softmax', counted):
    function = of_actions.__wrapped__(8, 1)
    two = np.asarray(np.arange(T) % 7 == 3, np.float32) * FULL
    for mask, blocks in ((FULL, 6), (MASK, 6), (two, 1), (EMPTY, 0), (np.eye(B, T), 1)):
      trips.clear()
      jax.block_until_ready(function(hidden, unembedding, 1.0, tokens, mask))
      jax.effects_barrier()
      assert len(trips) == 2 * blocks  # forward and backward


def test_actions_in_bfloat16_are_summed_in_float32():
  hidden, unembedding, tokens = rows_data(2, jnp.bfloat16)
  both, grads = of_actions(6, 1)(hidden, unembedding, 1.0, tokens, MASK)
  rounded = hidden.astype(jnp.float32), unembedding.astype(jnp.float32)
  want, slopes = slow(*rounded, tokens, MASK, WEIGHTS, 1.0)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), both, want)
  assert grads[0].dtype == grads[1].dtype == jnp.bfloat16
  for got, right in zip(grads[:2], slopes[:2], strict=True):
    # Slopes of logits are rounded once, and so is their sum: 2^-8 each.
    assert np.abs(np.float64(got) - right).max() < 0.02 * np.abs(right).max()


# Value heads


def test_scalar_head_starts_at_the_mean_return():
  head = heads.init_scalar_head(D, 0.3)
  assert head['kernel'].shape == (D, 1) and head['bias'].shape == (1,)
  hidden = jax.random.normal(jax.random.key(0), (2, 3, D), jnp.bfloat16)
  values = heads.scalar_values(head, hidden)
  assert values.dtype == jnp.float32
  np.testing.assert_array_equal(values, np.full((2, 3), np.float32(0.3)))
  moved = {'kernel': jnp.ones((D, 1)), 'bias': jnp.array([1.0])}
  np.testing.assert_allclose(
    heads.scalar_values(moved, hidden), hidden.astype(jnp.float32).sum(-1) + 1, rtol=1e-4
  )


@pytest.mark.parametrize('mean', [-1.0, -0.9, 0.3, 0.5, 1.99, 2.0])
@pytest.mark.parametrize('bins', [2, 7, 51])
def test_categorical_head_starts_at_the_mean_return(mean, bins):
  head = heads.init_categorical_head(D, mean, low=-1.0, high=2.0, num_bins=bins)
  logits = heads.categorical_logits(head, jnp.ones((2, 3, D)))
  assert logits.shape == (2, 3, bins) and np.isfinite(logits).all()
  np.testing.assert_allclose(critics.expected_value(logits, low=-1.0, high=2.0), mean, atol=5e-5)


def test_categorical_head_is_flat_in_the_middle_and_checked():
  head = heads.init_categorical_head(D, 0.5, low=-1.0, high=2.0, num_bins=7)
  np.testing.assert_allclose(head['bias'], np.zeros(7), atol=1e-5)
  with pytest.raises(ValueError, match='mean_return is 3'):
    heads.init_categorical_head(D, 3.0, low=-1.0, high=2.0, num_bins=7)
