"""Advantages and baselines. Everything returned is constant: no gradient flows through it.

Token-aligned arrays are [B, T]; index t speaks of token t and only action tokens (non-zero mask) have rewards, values and
advantages. What stands elsewhere touches nothing, NaN included, and results are 0 there.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sao_jax import diagnostics


def skip_observation_gae(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  bootstrap: jax.Array,
  *,
  discount: float,
  lam: float | jax.Array,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  """Generalised advantage estimation along the chain of action tokens; observations are not steps.

  With k = 0..K-1 indexing the action tokens of one trajectory over all its turns, V_K = bootstrap of token K-1:

    delta_k = r_k + discount V_{k+1} - V_k,   A_k = delta_k + discount lam_k A_{k+1},   A_K = 0

  The last token of a turn is linked to the first of the next, whose value has seen the observation between. Computed by
  associative scans, in O(log T) depth.

  Args:
    rewards: [B, T], cast to float32. A reward on an observation is not seen: move it to the action before.
    values: [B, T] V(tokens_<t).
    mask: [B, T], non-zero on action tokens.
    bootstrap: [B, T], at t the value of the state after token t; read only at the last action token of a trajectory. 0
      where the episode terminated.
    discount: in [0, 1].
    lam: in [0, 1], scalar or [B, T].
    segment_ids: [B, T] int, contiguous, 0 = padding (no action there): several trajectories in a row. None: a row is a
      trajectory.

  Returns:
    [B, T] float32, 0 outside action tokens.

  Raises:
    ValueError: if discount or a scalar lam is outside [0, 1].

  Source: SAO, arXiv 2607.07508, Eq. 4-5; GAE, arXiv 1506.02438, Eq. 16.
  """
  for name, number in (('discount', discount), ('lam', lam)):
    if isinstance(number, (int, float)) and not 0 <= number <= 1:
      raise ValueError(f'{name} is {number}: must be in [0, 1]')
  mask = jnp.asarray(mask)
  chex.assert_rank(mask, 2)
  if segment_ids is None:
    segment_ids = jnp.ones(mask.shape, jnp.int32)
  segment_ids = jnp.asarray(segment_ids)
  chex.assert_equal_shape([mask, segment_ids])
  action = (mask != 0) & (segment_ids != 0)
  lam = jnp.asarray(lam)
  chex.assert_rank(lam, {0, 2})
  lam = jnp.full(mask.shape, lam) if lam.ndim == 0 else lam
  rewards, values, bootstrap, lam = (
    diagnostics.masked(x, action) for x in (rewards, values, bootstrap, lam)
  )

  following = _next_action(action)
  length = mask.shape[1]
  index = jnp.minimum(following, length - 1)
  linked = (following < length) & (_take(segment_ids, index) == segment_ids)
  next_values = jnp.where(linked, _take(values, index), bootstrap)
  deltas = jnp.where(action, rewards + discount * next_values - values, 0.0)
  # A_t = a_t A_{t+1} + b_t: an observation passes A on, the last action of a trajectory starts anew.
  decays = jnp.where(action, discount * lam * linked, 1.0)

  def compose(right, left):
    return left[0] * right[0], left[0] * right[1] + left[1]

  _, result = jax.lax.associative_scan(compose, (decays, deltas), reverse=True, axis=1)
  return jax.lax.stop_gradient(jnp.where(action, result, 0.0))


def lambda_returns(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  bootstrap: jax.Array,
  *,
  discount: float,
  lam: float | jax.Array,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  """Targets of the critic: V + GAE, with the critic's lam; lam = 1 gives the discounted return.

  Arguments as `skip_observation_gae`. Returns [B, T] float32, 0 outside action tokens.

  Source: SAO, arXiv 2607.07508, section 3.2.
  """
  advantages = skip_observation_gae(
    rewards, values, mask, bootstrap, discount=discount, lam=lam, segment_ids=segment_ids
  )
  action = jnp.asarray(mask) != 0
  if segment_ids is not None:
    action &= jnp.asarray(segment_ids) != 0
  return jax.lax.stop_gradient(advantages + diagnostics.masked(values, action))


def length_adaptive_lambda(num_actions: jax.Array, *, alpha: float) -> jax.Array:
  """lam = 1 - 1 / (alpha l), clipped to [0, 1]: the longer the trajectory, the further the reward reaches.

  Args:
    num_actions: any shape, l: action tokens of the trajectory. Give l in int32 or float32: bfloat16 has no 1001.
    alpha: > 0; 1.5 in the paper.

  Returns:
    Same shape, float32; 0 where alpha l <= 1, l = 0 included.

  Raises:
    ValueError: if alpha is not positive.

  Source: VAPO, arXiv 2504.05118; SAO, arXiv 2607.07508, section 3.2. The clip is unstated.
  """
  if not alpha > 0:
    raise ValueError(f'alpha is {alpha}: must be > 0')
  scaled = alpha * jnp.asarray(num_actions).astype(jnp.float32)
  return jnp.where(scaled > 1, 1 - 1 / jnp.where(scaled > 1, scaled, 1.0), 0.0)


def step_level_gae(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  step_ids: jax.Array,
  bootstrap: jax.Array,
  *,
  discount: float,
  lam: float | jax.Array,
  aggregate: str,
) -> jax.Array:
  """GAE over steps (turns) instead of tokens: one value, one reward and one advantage for all tokens of a step.

  Args:
    rewards: [B, T]; those of a step are added up.
    values: [B, T].
    mask: [B, T], non-zero on action tokens. One trajectory a row.
    step_ids: [B, T] int in [0, T), not decreasing over the action tokens of a row; read only there.
    bootstrap: [B, T], read only at the last action token of the row.
    discount: in [0, 1], per step.
    lam: in [0, 1], scalar or [B, T]; of a step, that at its last token.
    aggregate: the value of a step: 'mean' of its tokens' values, or that of its 'last' token.

  Returns:
    [B, T] float32, equal over the action tokens of a step, 0 elsewhere.

  Raises:
    ValueError: if discount or a scalar lam is outside [0, 1], or for another aggregate.

  Source: SAO, arXiv 2607.07508, appendix A.1.
  """
  if aggregate not in ('mean', 'last'):
    raise ValueError(f"aggregate is {aggregate!r}: choose 'mean' or 'last'")
  mask, step_ids, lam = jnp.asarray(mask), jnp.asarray(step_ids), jnp.asarray(lam)
  chex.assert_rank(mask, 2)
  chex.assert_equal_shape([mask, step_ids])
  action = mask != 0
  rewards, values, bootstrap = (diagnostics.masked(x, action) for x in (rewards, values, bootstrap))
  length = mask.shape[1]
  steps = jnp.where(action, step_ids, length)  # the segment beyond the last takes the rest

  def per_step(reduce, x):
    return jax.vmap(lambda x, ids: reduce(x, ids, length + 1)[:length])(x, steps)

  counts = per_step(jax.ops.segment_sum, action.astype(jnp.float32))
  positions = jnp.broadcast_to(jnp.arange(length), mask.shape)
  last = jnp.clip(
    per_step(jax.ops.segment_max, positions), 0
  )  # an empty step has a negative maximum
  if aggregate == 'mean':
    step_values = per_step(jax.ops.segment_sum, values) / jnp.maximum(counts, 1.0)
  else:
    step_values = _take(values, last)
  result = skip_observation_gae(
    per_step(jax.ops.segment_sum, rewards),
    step_values,
    counts,
    _take(bootstrap, last),
    discount=discount,
    lam=lam if lam.ndim == 0 else _take(lam, last),
  )
  return jnp.where(action, _take(result, jnp.minimum(steps, length - 1)), 0.0)


def group_relative(rewards: jax.Array, *, normalize_std: bool) -> jax.Array:
  """Reward minus the mean of its group, over the group's standard deviation (population) if `normalize_std`: GRPO.

  Args:
    rewards: [G, N], N rollouts of each of G prompts.
    normalize_std: False is Dr. GRPO's form.

  Returns:
    [G, N] float32. Exactly 0 for a group whose rewards are all equal, so always for N = 1.

  Source: GRPO, arXiv 2402.03300; without the division: arXiv 2503.20783.
  """
  rewards, centered, constant = _center(rewards)
  if normalize_std:
    deviation = jnp.sqrt(jnp.square(centered).mean(axis=1, keepdims=True))
    centered = centered / jnp.where(deviation > 0, deviation, 1.0)
  return jax.lax.stop_gradient(jnp.where(constant, 0.0, centered))


def leave_one_out(rewards: jax.Array) -> jax.Array:
  """Reward minus the mean of the others of its group: RLOO.

  Args:
    rewards: [G, N], N >= 2 rollouts of each of G prompts.

  Returns:
    [G, N] float32, exactly 0 for a group whose rewards are all equal.

  Raises:
    ValueError: if N is 1: nobody is left.

  Source: Ahmadian et al., arXiv 2402.14740.
  """
  rewards, centered, constant = _center(rewards)
  size = rewards.shape[1]
  if size < 2:
    raise ValueError(
      f'groups have {size} rollout: leave-one-out needs 2 or more; use RunningMean or a critic'
    )
  return jax.lax.stop_gradient(jnp.where(constant, 0.0, centered * (size / (size - 1))))


class RunningMean(NamedTuple):
  """Baseline of the most recent rewards of a key, on the host. Immutable: `update` returns a new one.

  The key is the prompt for one window a prompt (the paper's baseline: the last 8), or the same for all episodes for one
  global window (its online simulation: the last 128). Ask for the baselines of a batch before adding its rewards, or an
  episode is judged by its own reward.
  """

  window: int  # rewards remembered by key
  initial: float  # the baseline of a key without rewards
  recent: dict[str, tuple[float, ...]]  # newest last

  @classmethod
  def create(cls, *, window: int, initial: float) -> 'RunningMean':
    """An empty state."""
    if window < 1:
      raise ValueError(f'window is {window}: must be at least 1 reward')
    return cls(window, float(initial), {})

  def baselines(self, keys: Sequence[str]) -> np.ndarray:
    """[N] float32: the mean of the remembered rewards of each key, or `initial`."""
    means = {key: np.mean(self.recent[key]) for key in set(keys) if key in self.recent}
    return np.asarray([means.get(key, self.initial) for key in keys], np.float32)

  def update(self, keys: Sequence[str], rewards: Sequence[float]) -> 'RunningMean':
    """The state after `rewards`, in their order. Raises ValueError for a reward that is not finite."""
    recent = dict(self.recent)
    for key, reward in zip(keys, rewards, strict=True):
      reward = float(reward)
      if not math.isfinite(reward):
        raise ValueError(
          f'reward of {key!r} is {reward}: a failed episode has no reward; leave it out'
        )
      recent[key] = (*recent.get(key, ()), reward)[-self.window :]
    return self._replace(recent=recent)

  def to_json(self) -> dict[str, Any]:
    """Plain dicts, lists and numbers, for a checkpoint."""
    return self._asdict() | {'recent': {key: list(r) for key, r in self.recent.items()}}

  @classmethod
  def from_json(cls, data: dict[str, Any]) -> 'RunningMean':
    """The inverse of `to_json`."""
    recent = {key: tuple(rewards) for key, rewards in data['recent'].items()}
    return cls(data['window'], data['initial'], recent)


def _next_action(action):
  """[B, T] index of the first action token after t, T if there is none."""
  length = action.shape[1]
  index = jnp.where(action, jnp.arange(length), length)
  from_here = jax.lax.associative_scan(jnp.minimum, index, reverse=True, axis=1)
  return jnp.pad(from_here[:, 1:], ((0, 0), (0, 1)), constant_values=length)


def _take(x, index):
  """x[b, index[b, t]]."""
  return jnp.take_along_axis(x, index, axis=1)


def _center(rewards):
  """(float32 rewards, rewards minus the group's mean, whether all of the group are equal)."""
  rewards = jnp.asarray(rewards).astype(jnp.float32)
  chex.assert_rank(rewards, 2)
  constant = (rewards == rewards[:, :1]).all(axis=1, keepdims=True)
  return rewards, rewards - rewards.mean(axis=1, keepdims=True), constant
