"""Numbers that tell whether training is healthy, and the masked sums that every loss is made of.

Masks are non-zero on action tokens. What stands elsewhere touches nothing, NaN included. Nothing here has a gradient
except `masked` and `masked_mean`. What a batch is split into (rows, micro-batches, devices) must not change a number:
`masked_mean` under a global denominator, `VarianceStats` and histograms add up over the parts.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


def masked(values: jax.Array, mask: jax.Array) -> jax.Array:
  """`values` in float32 where `mask` is non-zero, and 0 elsewhere, whatever stood there. Same shape."""
  values, mask = jnp.asarray(values), jnp.asarray(mask)
  chex.assert_equal_shape([values, mask])
  return jnp.where(mask != 0, values.astype(jnp.float32), 0.0)


def masked_mean(
  values: jax.Array, mask: jax.Array, denominator: jax.Array | None = None
) -> jax.Array:
  """sum_t m_t x_t / n.

  Args:
    values: any shape, cast to float32.
    mask: same shape, non-zero where it counts.
    denominator: scalar n, over all parts of a split batch, whose results then add up; None: the set bits of `mask`.

  Returns:
    Scalar, float32; 0 when n is 0.
  """
  total = masked(values, mask).sum()
  if denominator is None:
    denominator = (jnp.asarray(mask) != 0).sum()
  denominator = jnp.asarray(denominator, jnp.float32)
  chex.assert_shape(denominator, ())
  return total / jnp.where(denominator > 0, denominator, 1.0)


class VarianceStats(NamedTuple):
  """Sufficient statistics of explained variance. Add them up, leaf by leaf, over micro-batches and devices."""

  count: jax.Array  # action tokens
  returns: jax.Array  # sum of R
  returns_squared: jax.Array  # sum of R^2
  errors: jax.Array  # sum of R - V
  errors_squared: jax.Array  # sum of (R - V)^2


def variance_stats(returns: jax.Array, values: jax.Array, mask: jax.Array) -> VarianceStats:
  """The sums from which `explained_variance_from` computes. All arguments [B, T]; scalars, 0 for an empty mask."""
  returns, values = (jax.lax.stop_gradient(masked(x, mask)) for x in (returns, values))
  errors = returns - values
  return VarianceStats(
    count=(jnp.asarray(mask) != 0).sum().astype(jnp.float32),
    returns=returns.sum(),
    returns_squared=jnp.square(returns).sum(),
    errors=errors.sum(),
    errors_squared=jnp.square(errors).sum(),
  )


def explained_variance_from(stats: VarianceStats) -> jax.Array:
  """1 - Var(R - V) / Var(R), as `explained_variance`, from sums that were added up.

  Sums of squares in float32 cannot tell a variance under a millionth of the mean square from 0, so that is the bound
  below which the result is undefined.

  Args:
    stats: of the whole batch.

  Returns:
    Scalar, at most 1. NaN when undefined: no token, one token, or returns that are constant to the bound above.
  """
  n = jnp.where(stats.count > 0, stats.count, 1.0)
  mean_square = stats.returns_squared / n
  variance = mean_square - jnp.square(stats.returns / n)
  error_variance = jnp.maximum(
    stats.errors_squared / n - jnp.square(stats.errors / n), 0.0
  )  # a variance: below 0 only by rounding
  defined = (stats.count > 1) & (variance > 1e-6 * mean_square)
  return jnp.where(defined, 1.0 - error_variance / jnp.where(defined, variance, 1.0), jnp.nan)


def explained_variance(returns: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
  """1 - Var(R - V) / Var(R) over action tokens.

  1 for a perfect critic, 0 for one that knows only the mean, negative for a worse one. Blind to a constant offset of V.

  Args:
    returns: [B, T] R, what the critic should have said.
    values: [B, T] V, what it said.
    mask: [B, T], non-zero on action tokens.

  Returns:
    Scalar. NaN when undefined: no token, one token, or a constant return.

  Source: SAO, arXiv 2607.07508, section 4.
  """
  returns, values = (jax.lax.stop_gradient(masked(x, mask)) for x in (returns, values))
  action = jnp.asarray(mask) != 0
  # Equality of the extremes, because the mean of equal numbers need not equal them in float32.
  highest = jnp.where(action, returns, -jnp.inf).max(initial=-jnp.inf)
  lowest = jnp.where(action, returns, jnp.inf).min(initial=jnp.inf)

  def variance(x):
    return masked_mean(jnp.square(x - masked_mean(x, action)), action)

  total = variance(returns)
  defined = (highest != lowest) & (total != 0) & action.any()
  ratio = variance(returns - values) / jnp.where(defined, total, 1.0)
  return jnp.where(defined, 1.0 - ratio, jnp.nan)


def effective_sample_size(log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
  """(sum w)^2 / (n sum w^2) with w = exp(log_ratio): the share of tokens that the importance weights leave in use.

  Computed relative to the largest weight, so that nothing overflows.

  Args:
    log_ratio: [B, T] log weights, nats; -inf is a weight of 0 and counts in n.
    mask: [B, T], non-zero on action tokens.

  Returns:
    Scalar in (0, 1]: 1 for equal weights, 1/n when one weight dominates. 0 for an empty mask or if every weight is 0.
  """
  log_ratio = jax.lax.stop_gradient(masked(log_ratio, mask))
  action = jnp.asarray(mask) != 0
  largest = jnp.where(action, log_ratio, -jnp.inf).max(initial=-jnp.inf)
  shift = jnp.where(largest == -jnp.inf, 0.0, largest)
  weights = jnp.where(action, jnp.exp(log_ratio - shift), 0.0)
  squares = action.sum() * jnp.square(weights).sum()
  return jnp.square(weights.sum()) / jnp.where(squares == 0, 1.0, squares)


def mismatch_k3(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  mask: jax.Array,
  denominator: jax.Array | None = None,
) -> jax.Array:
  """Estimate of KL(mu || pi) from tokens that mu sampled: the mean of r - 1 - log r, r = pi / mu.

  Non-negative token by token and 0 only where learner and engine agree. A ratio over e^88 makes it infinite, as it is.

  Args:
    logprobs: [B, T] log pi, nats.
    behavior_logprobs: [B, T] log mu as the engine recorded it, nats.
    mask: [B, T], non-zero on action tokens.
    denominator: as in `masked_mean`.

  Returns:
    Scalar, nats a token; 0 for an empty mask.

  Source: J. Schulman, "Approximating KL divergence", 2020.
  """
  log_ratio = jax.lax.stop_gradient(masked(logprobs, mask) - masked(behavior_logprobs, mask))
  return masked_mean(jnp.expm1(log_ratio) - log_ratio, mask, denominator)


def staleness_histogram(staleness: jax.Array, mask: jax.Array, *, num_bins: int) -> jax.Array:
  """Action tokens by staleness: learner version minus the version that sampled the token.

  Args:
    staleness: [B, T], whole numbers.
    mask: [B, T], non-zero on action tokens.
    num_bins: >= 2; bin k counts staleness k, the last one num_bins - 1 and more. A negative staleness (a bug
      elsewhere) is in no bin, so that the counts fall short of the tokens.

  Returns:
    [num_bins] float32 counts, which add up over parts of a batch.

  Raises:
    ValueError: if num_bins is below 2.
  """
  if num_bins < 2:
    raise ValueError(f'num_bins is {num_bins}: a histogram needs at least 2 bins')
  staleness = masked(staleness, mask)
  action = jnp.asarray(mask) != 0
  bins = [staleness == k for k in range(num_bins - 1)] + [staleness >= num_bins - 1]
  return jnp.stack([(action & b).sum().astype(jnp.float32) for b in bins])
