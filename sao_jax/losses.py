"""Policy losses. Arrays in, `LossOutput` out; no model, no config, no sampling.

Shared by every loss below, and not repeated there:

  logprobs           [B, T] log pi of the sampled tokens, nats, at the sampling temperature. The only argument with a
                     gradient.
  behavior_logprobs  [B, T] log mu as the engine recorded it when it sampled the token, nats; constant.
  advantages         [B, T], constant; integers are cast to float32.
  mask               [B, T], non-zero where the policy sampled the token. Elsewhere the inputs may be anything, NaN
                     included: neither the loss, nor a gradient, nor a metric feels them.
  denominator        scalar n, the action tokens of the whole update over micro-batches and devices; None: those of
                     `mask`. The loss and every metric are then shares of n, so that those of the parts of a split batch
                     add up: to the same loss and shares, and to the mean by tokens of `ratio_mean` and `ess`.

  Returns LossOutput. Loss and metrics are 0 for an empty mask. `ratio_mean` is the mean of r over the tokens inside the
  interval, so that one outlier does not hide the others; `ess` is described at `diagnostics.effective_sample_size`.

  A bad hyper-parameter raises ValueError (eps_low outside (0, 1], eps_high not positive, ...), arguments of different
  shapes AssertionError. A NaN at an action token is
  nobody's rejected token: it reaches the loss, where the learner sees it.

With r = pi / mu: intervals are tested on log r, and r is computed only where it is used, so that an overflowing ratio
that a loss rejects leaves no trace in value or gradient. Where logprobs == behavior_logprobs every policy loss has the
gradient of REINFORCE, -A / n.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from sao_jax import diagnostics

sg = jax.lax.stop_gradient


class LossOutput(NamedTuple):
  """What a loss returns."""

  loss: jax.Array  # scalar float32, to be minimised
  metrics: dict[str, jax.Array]  # scalars float32, fixed keys, without gradient


Calibration = Callable[[jax.Array], jax.Array]  # log_ratio -> detached weight, same shape


# Losses


def sao_policy_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """Policy gradient with direct double-sided importance sampling (DIS).

  With r_t = pi(a_t | s_t) / mu(a_t | s_t), mu being the policy that sampled the token, and sg = stop_gradient:

    L = -sum_t m_t sg(f(r_t) A_t) log pi(a_t | s_t) / n,   f(r) = r if 1 - eps_low < r < 1 + eps_high else 0

  Tokens outside the interval have no gradient whatever the sign of their advantage, and still count in n.

  Args:
    logprobs: see the top of the module, as for all that is not listed here.
    eps_low: in (0, 1]; 1 disables the lower side.
    eps_high: > 0; inf disables the upper side, and then a ratio may overflow.

  Returns:
    The loss, and: kept, dropped_low, dropped_high (shares of action tokens), ratio_mean (of kept tokens) and ess (of
    the weights f(r), so at most `kept`).

  Raises:
    ValueError: if the interval is empty or inverted.

  Source: SAO, arXiv 2607.07508, Eq. 1-3. That f(r) is a coefficient (detached) is our reading; it is unstated.
  """
  weigh = dis(eps_low, eps_high)
  action, logprobs, behavior, advantages = _inputs(logprobs, mask, behavior_logprobs, advantages)
  log_ratio = sg(logprobs - behavior)
  weight = weigh(log_ratio)
  low, high = _outside(log_ratio, eps_low, eps_high)
  metrics = {
    'kept': diagnostics.masked_mean(~low & ~high, action, denominator),
    **_interval_metrics('dropped', low, high, log_ratio, action, denominator),
    'ess': _ess(jnp.log(weight), action, denominator),
  }
  return LossOutput(_likelihood(weight, advantages, logprobs, action, denominator), metrics)


def calibrated_policy_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  calibrate: Calibration,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """Policy gradient under any weight of the importance ratio: L = -sum_t m_t sg(w(log r_t) A_t) log pi_t / n.

  Args:
    calibrate: w, e.g. `dis`, `truncate`, `clip` or `unweighted` of this module. Its result is detached here as well.

  Returns:
    The loss, and: weight_mean, zeroed (share of action tokens with weight 0) and ess (of the weights).
  """
  action, logprobs, behavior, advantages = _inputs(logprobs, mask, behavior_logprobs, advantages)
  weight = sg(calibrate(sg(logprobs - behavior)))
  chex.assert_equal_shape([weight, logprobs])
  metrics = {
    'weight_mean': diagnostics.masked_mean(weight, action, denominator),
    'zeroed': diagnostics.masked_mean(weight == 0, action, denominator),
    'ess': _ess(jnp.log(weight), action, denominator),
  }
  return LossOutput(_likelihood(weight, advantages, logprobs, action, denominator), metrics)


def reinforce_policy_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """L = -sum_t m_t sg(A_t) log pi_t / n: no correction for the policy that sampled.

  Returns:
    The loss, and what the correction would have seen: log_ratio_mean and ess (of the uncorrected ratios).

  Source: R. Williams, 1992.
  """
  action, logprobs, behavior, advantages = _inputs(logprobs, mask, behavior_logprobs, advantages)
  log_ratio = sg(logprobs - behavior)
  metrics = {
    'log_ratio_mean': diagnostics.masked_mean(log_ratio, action, denominator),
    'ess': _ess(log_ratio, action, denominator),
  }
  weight = jnp.ones_like(log_ratio)
  return LossOutput(_likelihood(weight, advantages, logprobs, action, denominator), metrics)


def ppo_policy_loss(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """L = -sum_t m_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t) / n, with r = pi / old.

  eps_high > eps_low is "clip-higher". One-sided: a bad token (A < 0) has no bound above, so that a ratio over e^88 there
  makes the loss infinite, as PPO's is; the learner refuses such an update.

  Args:
    old_logprobs: [B, T] log-probabilities before the update, or those of the behavior policy; constant.
    eps_low: in (0, 1].
    eps_high: > 0.

  Returns:
    The loss, and: clipped_low, clipped_high (shares that the clip leaves without gradient), ratio_mean.

  Source: PPO, arXiv 1707.06347, Eq. 7; clip-higher: DAPO, arXiv 2503.14476.
  """
  action, logprobs, old, advantages = _inputs(logprobs, mask, old_logprobs, advantages)
  surrogate, metrics = _clipped(logprobs - old, advantages, action, eps_low, eps_high, denominator)
  return LossOutput(-diagnostics.masked_mean(surrogate, action, denominator), metrics)


def decoupled_ppo_policy_loss(
  logprobs: jax.Array,
  proximal_logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
  cap: float,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """L = -sum_t m_t min(prox_t / mu_t, cap) min(u_t A_t, clip(u_t, 1 - eps_low, 1 + eps_high) A_t) / n, u = pi / prox.

  The trust region is around a recent policy `prox`; staleness is corrected by a weight of its own, so that an old token
  is not clipped for being old. The paper has no cap; AReaL's code drops tokens over it, and this truncates.

  Args:
    proximal_logprobs: [B, T] log prox, e.g. of the learner before the update; constant.
    eps_low: in (0, 1].
    eps_high: > 0.
    cap: >= 1, of the weight prox / mu.

  Returns:
    The loss, and: clipped_low, clipped_high, ratio_mean (of u), capped (share of action tokens), weight_mean.

  Source: AReaL, arXiv 2505.24298, Eq. 5; decoupled objective: Hilton et al., arXiv 2110.00641.
  """
  weigh = truncate(cap)
  action, logprobs, proximal, behavior, advantages = _inputs(
    logprobs, mask, proximal_logprobs, behavior_logprobs, advantages
  )
  surrogate, metrics = _clipped(
    logprobs - proximal, advantages, action, eps_low, eps_high, denominator
  )
  log_weight = proximal - behavior
  weight = weigh(log_weight)
  metrics |= {
    'capped': diagnostics.masked_mean(log_weight > math.log(cap), action, denominator),
    'weight_mean': diagnostics.masked_mean(weight, action, denominator),
  }
  return LossOutput(-diagnostics.masked_mean(weight * surrogate, action, denominator), metrics)


def icepop_policy_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """L = -sum_t m_t sg(M(r_t) A_t) log pi_t / n,   M(r) = r if 1 - eps_low <= r <= 1 + eps_high else 0.

  The form that IcePop takes when each batch is used for one update: the policy before the update is the policy, so that
  its PPO ratio is 1 and its weight M is the only ratio. (A PPO ratio to mu on top would make the gradient r^2 A.) It
  differs from DIS only in its closed ends. The paper's alpha and beta are 1 - eps_low and 1 + eps_high.

  Returns:
    The loss, and: dropped_low, dropped_high (shares of action tokens), ratio_mean.

  Source: IcePop, in Ring-1T, arXiv 2510.18855.
  """
  low_bound, high_bound = _log_bounds(eps_low, eps_high)
  action, logprobs, behavior, advantages = _inputs(logprobs, mask, behavior_logprobs, advantages)
  log_ratio = sg(logprobs - behavior)
  low, high = log_ratio < low_bound, log_ratio > high_bound
  weight = _ratio_unless(low | high, log_ratio)
  metrics = _interval_metrics('dropped', low, high, log_ratio, action, denominator)
  return LossOutput(_likelihood(weight, advantages, logprobs, action, denominator), metrics)


def cispo_policy_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """L = -sum_t m_t sg(clip(r_t, 1 - eps_low, 1 + eps_high) A_t) log pi_t / n: every token keeps a gradient.

  eps_low = 1 leaves the lower side open, as the paper does.

  Returns:
    The loss, and: clipped_low, clipped_high (shares of action tokens), ratio_mean.

  Source: MiniMax-M1, arXiv 2506.13585, Eq. 4-5.
  """
  low_bound, high_bound = _log_bounds(eps_low, eps_high)
  action, logprobs, behavior, advantages = _inputs(logprobs, mask, behavior_logprobs, advantages)
  log_ratio = sg(logprobs - behavior)
  weight = jnp.exp(jnp.clip(log_ratio, low_bound, high_bound))
  low, high = log_ratio < low_bound, log_ratio > high_bound
  metrics = _interval_metrics('clipped', low, high, log_ratio, action, denominator)
  return LossOutput(_likelihood(weight, advantages, logprobs, action, denominator), metrics)


def gspo_policy_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
  segment_ids: jax.Array | None = None,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """PPO's clip on one ratio for a whole sequence: the geometric mean of its tokens' ratios.

    s = exp(mean over the sequence of log r_t),   s_t = sg(s) pi_t / sg(pi_t)
    L = -sum_t m_t min(s_t A_t, clip(s_t, 1 - eps_low, 1 + eps_high) A_t) / n

  This is GSPO-token: advantages may differ inside a sequence, and each token weighs 1 / n, where the paper's mean over
  sequences gives each sequence the same weight. A sequence must not be split over micro-batches.

  Args:
    eps_low: in (0, 1], a few 1e-4 in the paper.
    eps_high: > 0.
    segment_ids: [B, T] int, from 1, at most T, 0 = padding: several sequences in a row. None: a row is a sequence.

  Returns:
    The loss, and: clipped_low, clipped_high (shares of action tokens), ratio_mean (of s).

  Source: GSPO, arXiv 2507.18071, Eq. 13-14.
  """
  action, logprobs, behavior, advantages = _inputs(logprobs, mask, behavior_logprobs, advantages)
  if segment_ids is None:
    segment_ids = jnp.ones(action.shape, jnp.int32)
  chex.assert_equal_shape([action, segment_ids])
  mean = _segment_mean(sg(logprobs - behavior), action, jnp.asarray(segment_ids))
  log_ratio = mean + (logprobs - sg(logprobs))
  surrogate, metrics = _clipped(log_ratio, advantages, action, eps_low, eps_high, denominator)
  return LossOutput(-diagnostics.masked_mean(surrogate, action, denominator), metrics)


def kl_penalty(
  logprobs: jax.Array,
  reference_logprobs: jax.Array,
  mask: jax.Array,
  *,
  kind: str,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """Distance of the policy from a reference, from tokens that the policy sampled; d = log pi - log ref.

    k1: d             unbiased KL(pi || ref); as a loss its gradient is zero on average, so it is a metric
    k2: d^2 / 2       biased value, unbiased gradient of KL(pi || ref)
    k3: e^-d - 1 + d  unbiased KL(pi || ref), never negative; its gradient is that of KL(ref || pi)

  On tokens that an older policy sampled all of this holds only approximately. Without a coefficient: multiply.

  Returns:
    The mean over action tokens, nats, and as a metric: kl (the same number).

  Source: J. Schulman, "Approximating KL divergence", 2020.
  """
  kinds = {
    'k1': lambda d: d,
    'k2': lambda d: jnp.square(d) / 2,
    'k3': lambda d: jnp.expm1(-d) + d,
  }
  if kind not in kinds:
    raise ValueError(f'kind is {kind!r}: choose one of {", ".join(kinds)}')
  action, logprobs, reference = _inputs(logprobs, mask, reference_logprobs)
  loss = diagnostics.masked_mean(kinds[kind](logprobs - reference), action, denominator)
  return LossOutput(loss, {'kl': sg(loss)})


# Calibrations


def dis(eps_low: float, eps_high: float) -> Calibration:
  """r strictly inside (1 - eps_low, 1 + eps_high), else 0. Bounds as in `sao_policy_loss`."""
  _log_bounds(eps_low, eps_high)

  def weigh(log_ratio):
    low, high = _outside(log_ratio, eps_low, eps_high)
    return sg(_ratio_unless(low | high, log_ratio))

  return weigh


def truncate(cap: float) -> Calibration:
  """min(r, cap), cap >= 1: truncated importance sampling."""
  if not cap >= 1:
    raise ValueError(
      f'cap is {cap}: must be at least 1, or it would scale down tokens that are on policy'
    )
  return lambda log_ratio: sg(jnp.exp(jnp.minimum(log_ratio, math.log(cap))))


def clip(low: float, high: float) -> Calibration:
  """r clipped to [low, high], 0 <= low <= 1 <= high."""
  if not 0 <= low <= 1 <= high:
    raise ValueError(
      f'low is {low} and high is {high}: 0 <= low <= 1 <= high, so that a ratio of 1 stays'
    )
  bounds = math.log(low) if low else -math.inf, math.log(high)
  return lambda log_ratio: sg(jnp.exp(jnp.clip(log_ratio, *bounds)))


def unweighted() -> Calibration:
  """1: no correction."""
  return jnp.ones_like


# Parts


def _inputs(logprobs, mask, *constants):
  """(bool mask, logprobs, *constants): [B, T], float32, 0 outside the mask; only logprobs keeps its gradient."""
  arrays = [jnp.asarray(x) for x in (mask, logprobs, *constants)]
  chex.assert_rank(arrays, 2)
  chex.assert_equal_shape(arrays)
  action, *arrays = arrays
  logprobs, *constants = (diagnostics.masked(x, action) for x in arrays)
  return action != 0, logprobs, *(sg(x) for x in constants)


def _log_bounds(eps_low, eps_high):
  """(log(1 - eps_low), log(1 + eps_high)), validated."""
  if not 0 < eps_low <= 1:
    raise ValueError(
      f'eps_low is {eps_low}: must be in (0, 1]; the lower bound of the ratio is 1 - eps_low'
    )
  if not eps_high > 0:
    raise ValueError(
      f'eps_high is {eps_high}: must be > 0; the upper bound of the ratio is 1 + eps_high'
    )
  return (math.log1p(-eps_low) if eps_low < 1 else -math.inf), math.log1p(eps_high)


def _outside(log_ratio, eps_low, eps_high):
  """Which ratios DIS drops at each end. A NaN is neither, so that it stays visible."""
  low, high = _log_bounds(eps_low, eps_high)
  return log_ratio <= low, log_ratio >= high


def _ratio_unless(dropped, log_ratio):
  """exp(log_ratio), and 0 where dropped; the exponential never sees what is dropped."""
  return jnp.where(dropped, 0.0, jnp.exp(jnp.where(dropped, 0.0, log_ratio)))


def _likelihood(weight, advantages, logprobs, action, denominator):
  """-sum sg(w A) log pi / n. A token of weight 0 adds exactly 0, even at log pi = -inf."""
  if denominator is None:
    denominator = action.sum()
  used = action & (weight != 0)
  logprobs = jnp.where(used, logprobs, 0.0)
  return -diagnostics.masked_mean(sg(weight * advantages) * logprobs, used, denominator)


def _clipped(log_ratio, advantages, action, eps_low, eps_high, denominator):
  """min(r A, clip(r) A) token by token, with r computed only where it is the minimum, and PPO's metrics."""
  low_bound, high_bound = _log_bounds(eps_low, eps_high)
  low, high = log_ratio < low_bound, log_ratio > high_bound
  clipped_low, clipped_high = low & (advantages < 0), high & (advantages > 0)
  flat = clipped_low | clipped_high | (advantages == 0)
  bound = jnp.where(clipped_low, 1 - eps_low, jnp.where(clipped_high, 1 + eps_high, 1.0))
  ratio = jnp.where(flat, bound, jnp.exp(jnp.where(flat, 0.0, log_ratio)))
  metrics = _interval_metrics('clipped', low, high, sg(log_ratio), action, denominator) | {
    'clipped_low': diagnostics.masked_mean(clipped_low, action, denominator),
    'clipped_high': diagnostics.masked_mean(clipped_high, action, denominator),
  }
  return ratio * advantages, metrics


def _segment_mean(x, action, segment_ids):
  """[B, T] mean of x over the action tokens of each token's segment."""

  def row(x, action, ids):
    sums = jax.ops.segment_sum(x, ids, len(ids) + 1)
    counts = jax.ops.segment_sum(action.astype(jnp.float32), ids, len(ids) + 1)
    return (sums / jnp.maximum(counts, 1.0))[ids]

  return jax.vmap(row)(x, action, segment_ids)


def _interval_metrics(verb, low, high, log_ratio, action, denominator):
  """Shares of tokens under and over an interval, and the mean ratio between."""
  inside = action & ~low & ~high
  ratio = jnp.exp(jnp.where(inside, log_ratio, 0.0))
  share = diagnostics.masked_mean(jnp.ones_like(ratio), action, denominator)
  return {
    f'{verb}_low': diagnostics.masked_mean(low, action, denominator),
    f'{verb}_high': diagnostics.masked_mean(high, action, denominator),
    'ratio_mean': share * diagnostics.masked_mean(ratio, inside),
  }


def _ess(log_weight, action, denominator):
  """Effective sample size of the weights, times this call's share of n."""
  share = diagnostics.masked_mean(jnp.ones_like(log_weight), action, denominator)
  return share * diagnostics.effective_sample_size(log_weight, action)
