"""Diagnostics against float64 numpy, where they are undefined, and adding them up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax import diagnostics

B, T = 3, 8


def data(seed):
  rng = np.random.default_rng(seed)
  mask = rng.random((B, T)) < 0.6
  mask[0, :3] = True
  return rng.standard_normal((B, T)), rng.standard_normal((B, T)), mask


def dirty(x, mask, garbage=np.nan):
  return np.where(mask, x, garbage).astype(np.float32)


def test_masked_mean():
  x = jnp.array([[1.0, 3.0, jnp.nan]])
  mask = jnp.array([[2, -1, 0]])
  np.testing.assert_allclose(diagnostics.masked_mean(x, mask), 2)
  np.testing.assert_allclose(diagnostics.masked_mean(x, mask, 8), 0.5)
  np.testing.assert_array_equal(diagnostics.masked_mean(x, 0 * mask), 0)
  np.testing.assert_array_equal(diagnostics.masked_mean(x, 0 * mask, 0), 0)
  gradient = jax.grad(lambda x: diagnostics.masked_mean(x, mask))(x)
  np.testing.assert_array_equal(gradient, [[0.5, 0.5, 0]])
  with pytest.raises(AssertionError):
    diagnostics.masked_mean(x, mask[:, :1])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from([0.0, 3.0, 1000.0]))
def test_explained_variance_against_numpy(seed, offset):
  returns, values, mask = data(seed)
  returns = np.float32(returns + offset)
  got = diagnostics.explained_variance(dirty(returns, mask), dirty(values, mask, np.inf), mask)
  r, v = np.float64(returns[mask]), np.float64(np.float32(values[mask]))
  np.testing.assert_allclose(got, 1 - np.var(r - v) / np.var(r), rtol=1e-3, atol=1e-3)


def test_explained_variance_by_hand():
  returns, ones = jnp.array([[0.0, 1.0, 0.0, 1.0]]), jnp.ones((1, 4))
  for values, want in (
    (returns, 1.0),
    (returns + 5, 1.0),  # blind to an offset
    (ones, 0.0),
    (returns / 2, 0.75),  # Var(R / 2) = Var(R) / 4
    (-returns, -3.0),
  ):
    np.testing.assert_allclose(
      diagnostics.explained_variance(returns, values, ones), want, atol=1e-6
    )


@pytest.mark.parametrize('constant', [0.0, 0.1, 1 / 3, 1e6])
@pytest.mark.parametrize('count', [0, 1, 2, 3, 24])
def test_explained_variance_is_undefined(constant, count):
  mask = (np.arange(B * T) < count).reshape(B, T)
  returns, (values, *_) = np.full((B, T), constant), data(0)
  assert np.isnan(diagnostics.explained_variance(returns, values, mask))
  stats = diagnostics.variance_stats(returns, values, mask)
  assert np.isnan(diagnostics.explained_variance_from(stats))


def test_variance_stats_add_up():
  returns, values, mask = data(1)
  returns, values = dirty(returns, mask), dirty(values, mask)
  parts = [diagnostics.variance_stats(returns[i], values[i], mask[i]) for i in range(B)]
  total = jax.tree.map(lambda *x: sum(x), *parts)
  np.testing.assert_allclose(
    diagnostics.explained_variance_from(total),
    diagnostics.explained_variance(returns, values, mask),
    rtol=1e-5,
  )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from([-500.0, 0.0, 500.0]))
def test_effective_sample_size_against_numpy(seed, shift):
  # A common factor of e^500, far beyond float32, changes nothing.
  log_ratio, _, mask = data(seed)
  w = np.exp(log_ratio[mask])
  want = w.sum() ** 2 / (len(w) * (w**2).sum())
  got = diagnostics.effective_sample_size(dirty(log_ratio + shift, mask, np.inf), mask)
  np.testing.assert_allclose(got, want, rtol=2e-4)


def test_effective_sample_size_by_hand():
  ones = jnp.ones((1, 4))
  for log_ratio, want in (
    ([0.0, 0.0, 0.0, 0.0], 1.0),
    ([200.0, 0.0, 0.0, 0.0], 0.25),  # one dominates
    ([0.0, 0.0, -np.inf, -np.inf], 0.5),
    ([-np.inf] * 4, 0.0),
    ([np.log(3.0), 0.0, 0.0, 0.0], 36 / 48),  # (3 + 1 + 1 + 1)^2 / (4 (9 + 3))
  ):
    got = diagnostics.effective_sample_size(jnp.array([log_ratio]), ones)
    np.testing.assert_allclose(got, want, rtol=1e-6)
  assert diagnostics.effective_sample_size(jnp.full((1, 4), jnp.nan), 0 * ones) == 0


def test_mismatch_by_hand():
  # r = 1, 2, 1/2: 0, 1 - log 2, -1/2 + log 2; and a tool token.
  behavior = jnp.array([[-1.0, -1.0, -1.0, jnp.nan]])
  logprobs = behavior + jnp.log(jnp.array([[1.0, 2.0, 0.5, 1.0]]))
  mask = jnp.array([[1, 1, 1, 0]])
  np.testing.assert_allclose(diagnostics.mismatch_k3(logprobs, behavior, mask), 0.5 / 3, rtol=1e-5)
  np.testing.assert_allclose(
    diagnostics.mismatch_k3(logprobs, behavior, mask, 6), 0.5 / 6, rtol=1e-5
  )
  assert diagnostics.mismatch_k3(logprobs, behavior, 0 * mask) == 0
  # Small differences survive: d^2 / 2, where e^d - 1 - d in float32 would be noise.
  close = diagnostics.mismatch_k3(jnp.full((1, 1), 1e-3), jnp.zeros((1, 1)), jnp.ones((1, 1)))
  np.testing.assert_allclose(close, 5e-7, rtol=0.1)


def test_staleness_histogram():
  staleness = jnp.array([[0, 1, 1, 5, 9, -1, 3]])
  mask = jnp.array([[1, 1, 1, 1, 1, 1, 0]])
  got = diagnostics.staleness_histogram(staleness, mask, num_bins=4)
  np.testing.assert_array_equal(got, [1, 2, 0, 2])  # one in no bin: negative
  parts = [
    diagnostics.staleness_histogram(staleness[:, s], mask[:, s], num_bins=4)
    for s in (slice(0, 3), slice(3, 7))
  ]
  np.testing.assert_array_equal(sum(parts), got)
  with pytest.raises(ValueError, match='num_bins is 1'):
    diagnostics.staleness_histogram(staleness, mask, num_bins=1)


def test_no_gradient_and_jit():
  returns, values, mask = data(2)
  for function in (
    diagnostics.explained_variance,
    diagnostics.mismatch_k3,
    lambda a, b, m: diagnostics.effective_sample_size(a - b, m),
  ):
    value, gradient = jax.jit(jax.value_and_grad(function))(
      np.float32(returns), np.float32(values), mask
    )
    np.testing.assert_allclose(value, function(returns, values, mask), rtol=1e-4)
    np.testing.assert_array_equal(gradient, np.zeros((B, T)))


def test_shapes_are_checked():
  x, mask = jnp.zeros((B, T)), jnp.ones((B, T))
  for bad in (jnp.ones((B, 1)), jnp.ones(B)):
    for function in (
      diagnostics.explained_variance,
      diagnostics.mismatch_k3,
      diagnostics.variance_stats,
    ):
      for args in ((bad, x, mask), (x, bad, mask), (x, x, bad)):
        with pytest.raises(AssertionError):
          function(*args)
    with pytest.raises(AssertionError):
      diagnostics.effective_sample_size(x, bad)
