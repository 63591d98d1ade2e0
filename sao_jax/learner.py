"""The update: K critic steps, advantages, the policy step. Pure functions of (state, batch)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from sao_jax import advantages as adv
from sao_jax import diagnostics, losses
from sao_jax.losses import LossOutput
from sao_jax.models import heads
from sao_jax.types import Batch, Model

Metrics = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
  """Everything that an update changes. `step` is the policy version and the number of its checkpoint."""

  step: jax.Array  # [] int32
  policy: Any  # params of the decoder
  policy_opt: Any
  critic: Any  # {'backbone': params, 'head': params}; an empty dict without a critic
  critic_opt: Any
  skipped: jax.Array  # [] int32, updates skipped because something was not finite


class PolicyObjective(NamedTuple):
  """A policy loss bound to its numbers."""

  loss: Callable[[jax.Array, jax.Array, Batch, jax.Array, jax.Array], LossOutput]
  # (logprobs, old_logprobs, batch, advantages, denominator); arrays [B, T]
  uses_old_logprobs: bool  # whether the latest policy is evaluated before the update (PPO, GRPO)


class ValueHead(NamedTuple):
  """A value head bound to its numbers."""

  values: Callable[[Any, jax.Array], jax.Array]  # (head, hidden [..., D]) -> [...]
  loss: Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
  # (head, hidden [B,T,D], targets [B,T], mask [B,T], denominator) -> []


class Numbers(NamedTuple):
  """The hyper-parameters of an update; see configs/ for their sources."""

  temperature: float  # of sampling; training log-probabilities use the same
  eps_low: (
    float  # the trust interval 1 - eps_low < r < 1 + eps_high: the `dis/` metrics of every method
  )
  eps_high: float
  discount: float
  alpha: float  # of the length-adaptive lambda
  critic_lambda: float
  critic_updates: int  # K; 0: no critic, and the batch brings its advantages
  advantage_values: str  # 'after' the K critic updates, as the paper says, or 'before'
  bootstrap_truncated: bool
  policy_freeze_steps: int  # updates during which only the critic learns
  policy_minibatches: int  # sequential policy steps on disjoint parts of the batch
  micro_rows: int  # rows of a micro-batch
  logprob_chunk: int  # tokens whose logits are alive at once


class Learner(NamedTuple):
  """Jittable functions."""

  update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
  update_critic: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def init_state(policy, critic, policy_tx, critic_tx) -> TrainState:
  """State at version 0. `critic` is {} for methods without one."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    policy=policy,
    policy_opt=policy_tx.init(policy),
    critic=critic,
    critic_opt=critic_tx.init(critic) if critic else (),
    skipped=jnp.zeros((), jnp.int32),
  )


def previous(x: jax.Array) -> jax.Array:
  """[B, T, ...] moved one position to the right: what the prefix before token t ends with."""
  return jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))[:, :-1]


def _micro(batch: Batch, rows: int) -> Batch:
  """[B, T] leaves as [B / rows, rows, T]."""
  return jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), batch)


def _flat(tree):
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _finite(*trees) -> jax.Array:
  leaves = [jnp.isfinite(x).all() for tree in trees for x in jax.tree.leaves(tree)]
  return jnp.stack(leaves).all()


def _select(condition, new, old):
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def policy_logprobs(model: Model, params, batch: Batch, *, temperature, chunk: int):
  """Log-probability [B, T] of each token after the first of its segment, and the entropy [B, T] there."""
  hidden = model.apply(params, batch.tokens, batch.positions, batch.segment_ids)
  rows, length, width = hidden.shape
  logprobs, entropy = heads.token_logprobs(
    previous(hidden).reshape(-1, width),
    model.unembedding(params),
    batch.tokens.reshape(-1),
    temperature=temperature,
    chunk=chunk,
    entropy=True,
  )
  return logprobs.reshape(rows, length), entropy.reshape(rows, length)


def make_learner(
  model: Model,
  value_head: ValueHead,
  objective: PolicyObjective,
  policy_tx: optax.GradientTransformation,
  critic_tx: optax.GradientTransformation,
  frozen: Any,
  numbers: Numbers,
) -> Learner:
  """Binds everything that does not change during a run.

  Args:
    frozen: tree of bools like the critic: leaves that never move. They get no gradient; `critic_tx` must
      hold no state for them (see `freeze`).
  """
  n = numbers

  def evaluate_critic(critic, batch):
    """Values [B, T] of the prefix before each token, and bootstrap [B, T], over micro-batches."""

    def one(_, micro):
      hidden = model.apply(critic['backbone'], micro.tokens, micro.positions, micro.segment_ids)
      after = value_head.values(critic['head'], hidden)
      return None, (previous(after), after * micro.truncated * n.bootstrap_truncated)

    return _flat(jax.lax.scan(one, None, _micro(batch, n.micro_rows))[1])

  def gae(function, batch, values, bootstrap, lam):
    return function(
      batch.rewards,
      values,
      batch.action_mask,
      bootstrap,
      discount=n.discount,
      lam=lam,
      segment_ids=batch.segment_ids,
    )

  def critic_step(state, batch):
    """One optimiser step on the squared (or categorical) error to the lambda-return."""
    values, bootstrap = evaluate_critic(state.critic, batch)
    targets = gae(adv.lambda_returns, batch, values, bootstrap, n.critic_lambda)
    denominator = batch.action_mask.sum()

    def loss(critic, micro, micro_targets):
      critic = jax.tree.map(lambda p, f: jax.lax.stop_gradient(p) if f else p, critic, frozen)
      hidden = model.apply(critic['backbone'], micro.tokens, micro.positions, micro.segment_ids)
      # Padding may be NaN, and the head's gradient multiplies it by 0.
      hidden = jnp.where(micro.action_mask[..., None] > 0, previous(hidden), 0)
      return value_head.loss(critic['head'], hidden, micro_targets, micro.action_mask, denominator)

    def accumulate(carry, xs):
      return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(state.critic, *xs)), None

    micro = _micro(batch, n.micro_rows), targets.reshape(-1, n.micro_rows, targets.shape[1])
    zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.critic)
    (value, grads), _ = jax.lax.scan(accumulate, zero, micro)
    updates, opt = critic_tx.update(grads, state.critic_opt, state.critic)
    new = state.replace(critic=optax.apply_updates(state.critic, updates), critic_opt=opt)
    metrics = {
      'loss/critic': value,
      'critic/grad_norm': optax.tree.norm(grads),
      'critic/explained_variance': _explained_variance(targets, values, batch.action_mask),
      'critic/value_mean': _mean(values, batch.action_mask),
      'critic/return_mean': _mean(targets, batch.action_mask),
    }
    return new, metrics, _finite(value, grads)

  def critic_phase(state, batch):
    """K critic steps. The metrics are the first step's, before the critic has seen this batch's returns."""

    def one(state, _):
      state, metrics, finite = critic_step(state, batch)
      return state, (metrics, finite)

    state, (metrics, finite) = jax.lax.scan(one, state, length=n.critic_updates)
    return state, jax.tree.map(lambda x: x[0], metrics), finite.all()

  def policy_step(carry, batch_and_advantages):
    """One optimiser step on one minibatch of rows."""
    params, opt = carry
    batch, advantages, old = batch_and_advantages
    denominator = batch.action_mask.sum()
    shape = (-1, n.micro_rows, batch.tokens.shape[1])

    def loss(params, micro, micro_advantages, micro_old):
      logprobs, entropy = policy_logprobs(
        model, params, micro, temperature=n.temperature, chunk=n.logprob_chunk
      )
      out = objective.loss(logprobs, micro_old, micro, micro_advantages, denominator)
      return out.loss, (logprobs, entropy)

    def accumulate(grads, xs):
      (value, aux), more = jax.value_and_grad(loss, has_aux=True)(params, *xs)
      return jax.tree.map(jnp.add, grads, more), (value, aux)

    zero = jax.tree.map(jnp.zeros_like, params)
    xs = _micro(batch, n.micro_rows), advantages.reshape(shape), old.reshape(shape)
    grads, (values, (logprobs, entropy)) = jax.lax.scan(accumulate, zero, xs)
    updates, opt = policy_tx.update(grads, opt, params)
    new = optax.apply_updates(params, updates)
    finite = _finite(values, grads)
    return (new, opt), (values.sum(), optax.tree.norm(grads), *_flat((logprobs, entropy)), finite)

  def policy_phase(state, batch, advantages):
    """`policy_minibatches` policy steps; the first sees every r as the engine left it."""
    parts = n.policy_minibatches
    old = jnp.zeros_like(batch.behavior_logprobs)
    if objective.uses_old_logprobs:
      old = _flat(
        jax.lax.scan(
          lambda _, micro: (
            None,
            policy_logprobs(
              model, state.policy, micro, temperature=n.temperature, chunk=n.logprob_chunk
            )[0],
          ),
          None,
          _micro(batch, n.micro_rows),
        )[1]
      )
    # Rows are packed long first, so minibatch j takes rows j, j + parts, ...
    deal = lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
    parted = jax.tree.map(deal, (batch, advantages, old))
    carry = state.policy, state.policy_opt
    carry, (loss, norm, logprobs, entropy, finite) = jax.lax.scan(policy_step, carry, parted)
    moved = state.replace(policy=carry[0], policy_opt=carry[1])
    flat = _flat(parted)
    logprobs, entropy = _flat((logprobs, entropy))
    out = objective.loss(logprobs, flat[2], flat[0], flat[1], batch.action_mask.sum())
    mask = flat[0].action_mask
    interval = losses.sao_policy_loss(
      logprobs,
      flat[0].behavior_logprobs,
      flat[1],
      mask,
      eps_low=n.eps_low,
      eps_high=n.eps_high,
    ).metrics
    metrics = {
      **{f'policy/{key}': value for key, value in out.metrics.items() if key not in interval},
      **{f'dis/{key}': value for key, value in interval.items()},
      'loss/policy': loss.mean(),
      'policy/grad_norm': norm.mean(),
      'policy/entropy': _mean(entropy, mask),
      'mismatch/k3': diagnostics.mismatch_k3(logprobs, flat[0].behavior_logprobs, mask),
    }
    return moved, metrics, finite.all()

  def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    before, metrics, ok = state, {}, jnp.array(True)
    advantages = batch.advantages
    if n.critic_updates:
      state, metrics, ok = critic_phase(state, batch)
      critic = state.critic if n.advantage_values == 'after' else before.critic
      values, bootstrap = evaluate_critic(critic, batch)
      lam = adv.length_adaptive_lambda(batch.num_actions, alpha=n.alpha)
      advantages = gae(adv.skip_observation_gae, batch, values, bootstrap, lam)
      centered = advantages - _mean(advantages, batch.action_mask)
      metrics['advantage/std'] = jnp.sqrt(_mean(centered**2, batch.action_mask))
    moved, policy_metrics, finite = policy_phase(state, batch, advantages)
    ok = ok & finite
    frozen_policy = before.step < n.policy_freeze_steps
    state = _select(frozen_policy, state, moved)
    state = _select(ok, state, before)
    state = state.replace(step=before.step + 1, skipped=before.skipped + ~ok)
    counts = {'updates/skipped': state.skipped, 'updates/skipped_now': 1 - ok}
    return state, {**metrics, **policy_metrics, **counts}

  def update_critic(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    new, metrics, ok = critic_phase(state, batch)
    state = _select(ok, new, state.replace(skipped=state.skipped + 1))
    return state, {**metrics, 'updates/skipped': state.skipped, 'updates/skipped_now': 1 - ok}

  return Learner(update, update_critic)


def _mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Mean over action tokens; garbage elsewhere does not matter; 0 for an empty mask."""
  return jnp.where(mask > 0, x, 0).sum() / jnp.maximum(mask.sum(), 1)


def _explained_variance(targets: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
  """NaN for a constant return: as V + A it is constant to rounding only, relative to V as well as to R."""
  scale = _mean(targets**2 + values**2, mask)
  defined = _mean((targets - _mean(targets, mask)) ** 2, mask) > 1e-10 * scale
  return jnp.where(defined, diagnostics.explained_variance(targets, values, mask), jnp.nan)


def freeze(tx: optax.GradientTransformation, frozen: Any) -> optax.GradientTransformation:
  """`tx` on the leaves that are not frozen. Frozen leaves have no optimiser state and get no decay.

  Raises:
    ValueError: if nothing or everything is frozen, which is what a wrong path looks like.
  """
  flags = jax.tree.leaves(frozen)
  if not any(flags) or all(flags):
    raise ValueError(
      f'{sum(flags)} of {len(flags)} parameter arrays are frozen: the partition matches nothing that it '
      'should; check the parameter paths'
    )
  labels = jax.tree.map(lambda f: 'frozen' if f else 'trained', frozen)
  return optax.multi_transform({'trained': tx, 'frozen': optax.set_to_zero()}, labels)


def make_supervised_update(model: Model, tx: optax.GradientTransformation, *, chunk: int):
  """(params, opt, batch) -> (params, opt, mean negative log-likelihood of the agent's tokens, nats)."""

  def loss(params, batch):
    logprobs, _ = policy_logprobs(model, params, batch, temperature=1.0, chunk=chunk)
    return -_mean(logprobs, batch.action_mask)

  def update(params, opt, batch: Batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, value

  return update
