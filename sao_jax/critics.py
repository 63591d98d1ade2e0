"""Value losses and categorical value targets.

Masks are [B, T], non-zero on action tokens; what stands elsewhere touches nothing, NaN included. Targets are constant.
`denominator` is the number of action tokens of the whole update over micro-batches and devices (None: those of `mask`);
losses and metrics are shares of it, so that parts of a split batch add up. An empty mask gives 0.

Categorical values live on atoms linspace(low, high, num_bins), each the centre of a bin; the outer bins reach half a bin
width beyond low and high. The host chooses low and high so that every return is inside (`check_targets`); a target
beyond the outer bins has a distribution of NaN, so that it cannot train anything unseen.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sao_jax import diagnostics
from sao_jax.losses import LossOutput


def squared_value_loss(
  values: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  *,
  weights: jax.Array | None = None,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """L = sum_t m_t w_t (V_t - R_t)^2 / n. There is no factor 1/2.

  Args:
    values: [B, T] V, the only argument with a gradient.
    targets: [B, T] R, constant, e.g. `advantages.lambda_returns`.
    mask: [B, T].
    weights: [B, T] w >= 0, constant; None: 1. They do not enter n.
    denominator: n.

  Returns:
    The loss, and the means over action tokens: value_mean, target_mean, error_abs.

  Source: SAO, arXiv 2607.07508, section 2.
  """
  values, targets, weights = _inputs(values, targets, mask, weights)
  errors = values - targets
  loss = diagnostics.masked_mean(weights * jnp.square(errors), mask, denominator)
  return LossOutput(loss, _metrics(values, targets, mask, denominator))


def clipped_value_loss(
  values: jax.Array,
  old_values: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  *,
  clip: float,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """L = sum_t m_t max((V - R)^2, (old + clip(V - old, -c, c) - R)^2) / n: PPO's clip of the value.

  It has a dead zone: a value that has moved by more than c towards its target gets no gradient. With several critic
  updates on one batch and fixed old values the later ones may do nothing.

  Args:
    values: [B, T] V.
    old_values: [B, T] V before the update, constant.
    targets: [B, T] R, constant.
    mask: [B, T].
    clip: c > 0, in units of the return.
    denominator: n.

  Returns:
    The loss, and: value_mean, target_mean, error_abs, clipped (share of action tokens in the dead zone).

  Raises:
    ValueError: if clip is not positive.

  Source: PPO2 in OpenAI Baselines; Engstrom et al., arXiv 2005.12729.
  """
  if not clip > 0:
    raise ValueError(f'clip is {clip}: must be > 0, or no value could move')
  values, targets, old = _inputs(values, targets, mask, old_values)
  near = old + jnp.clip(values - old, -clip, clip)
  plain, clipped = jnp.square(values - targets), jnp.square(near - targets)
  dead = (clipped > plain) & (near != values)
  metrics = _metrics(values, targets, mask, denominator) | {
    'clipped': diagnostics.masked_mean(dead, mask, denominator)
  }
  loss = diagnostics.masked_mean(jnp.maximum(plain, clipped), mask, denominator)
  return LossOutput(loss, metrics)


def atoms(low: float, high: float, num_bins: int) -> jax.Array:
  """[num_bins] float32, the values that the bins stand for.

  Raises:
    ValueError: if the support is empty or not finite, or has fewer than 2 bins.
  """
  if not (np.isfinite(low) and np.isfinite(high) and low < high):
    raise ValueError(
      f'low is {low} and high is {high}: choose finite low < high around every return'
    )
  if num_bins < 2:
    raise ValueError(f'num_bins is {num_bins}: a distribution needs at least 2 bins')
  return jnp.linspace(low, high, num_bins, dtype=jnp.float32)


def check_targets(targets: np.ndarray, mask: np.ndarray, *, low: float, high: float) -> None:
  """Refuses returns outside [low, high] at action tokens. For the host: before data goes to the device.

  Raises:
    ValueError: naming the outermost return, also for one that is not finite.
  """
  inside = np.asarray(targets, np.float64)[np.asarray(mask) != 0]
  outside = inside[~((inside >= low) & (inside <= high))]
  if outside.size:
    raise ValueError(
      f'{outside.size} returns such as {outside[0]} are outside the support [{low}, {high}]: widen low and high'
    )


def two_hot(targets: jax.Array, *, low: float, high: float, num_bins: int) -> jax.Array:
  """The distribution on the two atoms next to the target that has the target as its mean.

  Args:
    targets: [...], in [low, high].
    low: the lowest atom, in units of the return.
    high: the highest.
    num_bins: number of atoms.

  Returns:
    [..., num_bins] float32, sums to 1. Up to half a bin beyond the atoms (rounding of a return) the outer atom has it
    all; further out, NaN.

  Source: MuZero, arXiv 1911.08265, appendix F.
  """
  position, _ = _position(targets, low, high, num_bins)
  distance = jnp.abs(jnp.clip(position, 0, num_bins - 1)[..., None] - jnp.arange(num_bins))
  return jnp.where(jnp.isnan(position)[..., None], jnp.nan, jnp.clip(1 - distance, 0.0))


def hl_gauss(
  targets: jax.Array, *, low: float, high: float, num_bins: int, sigma_ratio: float
) -> jax.Array:
  """The mass that a normal distribution around the target has in each bin, renormalised to the support.

  Its mean is the target in the middle of the support, and is drawn inwards within about 2 sigma of an end.

  Args:
    targets: [...], in [low, high].
    low: the lowest atom, in units of the return.
    high: the highest.
    num_bins: number of atoms.
    sigma_ratio: > 0, sigma over the bin width; 0.75 in the paper.

  Returns:
    [..., num_bins] float32, sums to 1; NaN for a target more than half a bin beyond the atoms.

  Raises:
    ValueError: if sigma_ratio is not positive.

  Source: Farebrother et al., arXiv 2403.03950.
  """
  if not sigma_ratio > 0:
    raise ValueError(f'sigma_ratio is {sigma_ratio}: must be > 0; for a spike use two_hot')
  position, edges = _position(targets, low, high, num_bins)
  below = jax.scipy.stats.norm.cdf((edges - position[..., None]) / sigma_ratio)
  mass = below[..., 1:] - below[..., :-1]
  return mass / mass.sum(axis=-1, keepdims=True)


def categorical_value_loss(
  logits: jax.Array,
  target_probs: jax.Array,
  mask: jax.Array,
  *,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """Cross-entropy L = -sum_t m_t sum_j p_tj log softmax(logits_t)_j / n.

  Args:
    logits: [B, T, num_bins].
    target_probs: [B, T, num_bins], constant, e.g. `two_hot` or `hl_gauss`.
    mask: [B, T].
    denominator: n.

  Returns:
    The loss, and its parts: target_entropy, which no critic can go below, and kl, the rest.
  """
  logits, target_probs, mask = (jnp.asarray(x) for x in (logits, target_probs, mask))
  chex.assert_rank([logits, mask], [3, 2])
  chex.assert_equal_shape([logits, target_probs])
  chex.assert_equal_shape_prefix([logits, mask], 2)
  every = jnp.broadcast_to(mask[..., None], logits.shape)
  logits = diagnostics.masked(logits, every)
  target_probs = jax.lax.stop_gradient(diagnostics.masked(target_probs, every))
  terms = target_probs * jax.nn.log_softmax(logits)
  cross_entropy = -jnp.where(target_probs != 0, terms, 0.0).sum(axis=-1)  # 0 log 0 = 0
  loss = diagnostics.masked_mean(cross_entropy, mask, denominator)
  entropy = diagnostics.masked_mean(jax.scipy.special.entr(target_probs).sum(-1), mask, denominator)
  metrics = {'target_entropy': entropy, 'kl': jax.lax.stop_gradient(loss) - entropy}
  return LossOutput(loss, metrics)


def expected_value(logits: jax.Array, *, low: float, high: float) -> jax.Array:
  """The value that a categorical critic means: the mean of its distribution. [..., num_bins] -> [...], float32."""
  logits = jnp.asarray(logits).astype(jnp.float32)
  return jax.nn.softmax(logits) @ atoms(low, high, logits.shape[-1])


def _inputs(values, targets, mask, other):
  """(values, targets, other or ones): [B, T], float32, 0 outside the mask; only values keeps its gradient."""
  arrays = [jnp.asarray(x) for x in (values, targets, mask)]
  chex.assert_rank(arrays, 2)
  chex.assert_equal_shape(arrays)
  other = jnp.ones_like(arrays[0]) if other is None else other
  values, *constants = (diagnostics.masked(x, mask) for x in (values, targets, other))
  return values, *(jax.lax.stop_gradient(x) for x in constants)


def _metrics(values, targets, mask, denominator):
  """What every scalar value loss reports."""
  values = jax.lax.stop_gradient(values)
  return {
    'value_mean': diagnostics.masked_mean(values, mask, denominator),
    'target_mean': diagnostics.masked_mean(targets, mask, denominator),
    'error_abs': diagnostics.masked_mean(jnp.abs(values - targets), mask, denominator),
  }


def _position(targets, low, high, num_bins):
  """(targets in bin widths from the lowest atom, NaN beyond the outer bins; edges [num_bins + 1] likewise)."""
  support = atoms(low, high, num_bins)
  width = (high - low) / (num_bins - 1)
  position = (jnp.asarray(targets).astype(jnp.float32) - support[0]) / width
  inside = (position >= -0.5) & (position <= num_bins - 0.5)
  edges = jnp.arange(num_bins + 1) - 0.5
  return jnp.where(inside, position, jnp.nan), edges
