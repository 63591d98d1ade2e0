"""Chunked log-probabilities against the naive form in value, gradient and memory; value heads by hand."""

import functools

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
