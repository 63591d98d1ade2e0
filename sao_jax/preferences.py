"""Preference losses on pairs of answers: arrays of one number an answer, [N]; no model.

Log-probabilities are float32 nats, of the answer's action tokens only: `sequence_logprobs` sums them for DPO, and ORPO
takes the mean. `denominator` is the number of pairs of the whole update (None: N), so that losses and metrics of the parts
of a split batch add up. No pairs give 0.
"""

import chex
import jax
import jax.numpy as jnp

from sao_jax import diagnostics
from sao_jax.losses import LossOutput


def sequence_logprobs(logprobs: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(sum, mean) of the log-probabilities of each row's action tokens.

  Args:
    logprobs: [N, T] nats.
    mask: [N, T], non-zero on action tokens; what stands elsewhere touches nothing.

  Returns:
    Two [N] arrays, float32; 0 for a row without action tokens.
  """
  chex.assert_rank([logprobs, mask], 2)
  total = diagnostics.masked(logprobs, mask).sum(axis=1)
  count = (jnp.asarray(mask) != 0).sum(axis=1)
  return total, total / jnp.maximum(count, 1)


def dpo_loss(
  chosen_logprobs: jax.Array,
  rejected_logprobs: jax.Array,
  reference_chosen_logprobs: jax.Array,
  reference_rejected_logprobs: jax.Array,
  *,
  beta: float,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """Direct preference optimisation.

    L = -sum_i log sigmoid(beta ((chosen - reference_chosen) - (rejected - reference_rejected))) / n

  Args:
    chosen_logprobs: [N] log-probability of the whole preferred answer under the policy: a sum over tokens.
    rejected_logprobs: [N], of the other answer.
    reference_chosen_logprobs: [N], under the reference; constant.
    reference_rejected_logprobs: [N], constant.
    beta: > 0, strength of the pull to the reference.
    denominator: n.

  Returns:
    The loss, and: chosen_reward, rejected_reward (beta times the log-ratio), margin (their difference), accuracy (share
    of pairs with a positive margin).

  Raises:
    ValueError: if beta is not positive.

  Source: DPO, arXiv 2305.18290, Eq. 7.
  """
  if not beta > 0:
    raise ValueError(f'beta is {beta}: must be > 0')
  chosen, rejected = _inputs(chosen_logprobs, rejected_logprobs)
  references = _inputs(reference_chosen_logprobs, reference_rejected_logprobs)
  reference_chosen, reference_rejected = jax.lax.stop_gradient(references)
  chex.assert_equal_shape([chosen, reference_chosen])
  chosen_reward = beta * (chosen - reference_chosen)
  rejected_reward = beta * (rejected - reference_rejected)
  margin = chosen_reward - rejected_reward
  metrics = {
    'chosen_reward': _mean(chosen_reward, denominator),
    'rejected_reward': _mean(rejected_reward, denominator),
    'margin': _mean(margin, denominator),
    'accuracy': _mean(margin > 0, denominator),
  }
  return LossOutput(-_mean(jax.nn.log_sigmoid(margin), denominator), jax.lax.stop_gradient(metrics))


def orpo_loss(
  chosen_logprobs: jax.Array,
  rejected_logprobs: jax.Array,
  *,
  odds_weight: float,
  denominator: jax.Array | None = None,
) -> LossOutput:
  """Odds-ratio preference optimisation: likelihood of the preferred answer and an odds ratio, without a reference.

    L = sum_i (-chosen - odds_weight log sigmoid(logit(chosen) - logit(rejected))) / n,  logit(x) = log(p / (1 - p)), p = e^x

  Args:
    chosen_logprobs: [N] mean log-probability of a token of the preferred answer, <= 0.
    rejected_logprobs: [N], of the other answer.
    odds_weight: > 0, lambda in the paper.
    denominator: n.

  Returns:
    The loss, and: nll (its first term), log_odds_ratio, accuracy (share of pairs with a positive one). A probability
    within 1e-6 of 1, where odds are infinite in float32, counts as 1 - 1e-6 and has no gradient through the odds.

  Raises:
    ValueError: if odds_weight is not positive.

  Source: ORPO, arXiv 2403.07691, Eq. 6-7.
  """
  if not odds_weight > 0:
    raise ValueError(
      f'odds_weight is {odds_weight}: must be > 0; without it this is supervised training'
    )
  chosen, rejected = _inputs(chosen_logprobs, rejected_logprobs)
  log_odds_ratio = _logit(chosen) - _logit(rejected)
  nll = -_mean(chosen, denominator)
  loss = nll - odds_weight * _mean(jax.nn.log_sigmoid(log_odds_ratio), denominator)
  metrics = {
    'nll': nll,
    'log_odds_ratio': _mean(log_odds_ratio, denominator),
    'accuracy': _mean(log_odds_ratio > 0, denominator),
  }
  return LossOutput(loss, jax.lax.stop_gradient(metrics))


def _inputs(chosen, rejected):
  """Both [N], float32."""
  chosen, rejected = jnp.asarray(chosen), jnp.asarray(rejected)
  chex.assert_rank([chosen, rejected], 1)
  chex.assert_equal_shape([chosen, rejected])
  return chosen.astype(jnp.float32), rejected.astype(jnp.float32)


def _mean(x, denominator):
  """sum x / n, 0 without pairs."""
  return diagnostics.masked_mean(x, jnp.ones(x.shape), denominator)


def _logit(logprobs):
  """log(p / (1 - p)) of log p; each branch of log(1 - p) is used where it is exact."""
  logprobs = jnp.minimum(logprobs, -1e-6)
  near_one = logprobs > -0.693
  small = jnp.log(-jnp.expm1(jnp.where(near_one, logprobs, -1.0)))
  large = jnp.log1p(-jnp.exp(jnp.where(near_one, -1.0, logprobs)))
  return logprobs - jnp.where(near_one, small, large)
