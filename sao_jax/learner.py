"""The update: K critic steps, advantages, the policy step. Pure functions of (state, batch)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sao_jax import advantages as adv
from sao_jax import compression, diagnostics, losses, sharding
from sao_jax.losses import LossOutput
from sao_jax.models import heads, lora, moe
from sao_jax.types import Batch, Model

Metrics = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
  """Everything that an update changes. `step` is the policy version and the number of its checkpoint."""

  step: jax.Array  # [] int32
  base: Any  # the frozen backbone that policy and critic adapt, one copy for both; {} where they are whole (no LoRA)
  policy: Any  # params of the decoder, or its adapters
  policy_opt: Any
  critic: Any  # {'backbone': params or adapters, 'head': params}; an empty dict without a critic
  critic_opt: Any
  errors: Any  # what compressed sums owe, {'policy': ..., 'critic': ...} of [mesh.data, ...], None where nothing trains; {} without compression
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
  num_experts: int  # of a mixture; 0: none, and no metrics of its load


class Learner(NamedTuple):
  """Jittable functions."""

  update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
  update_critic: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Spread(NamedTuple):
  """How the work lies over devices."""

  mesh: Mesh | None  # None: one device
  compression: str  # of gradients that are summed over mesh.data, see `compression`


def init_errors(policy, critic, frozen, spread: Spread) -> Any:
  """Nothing is owed yet. Arguments as of `make_learner`."""
  if spread.compression == 'none':
    return {}
  copies = spread.mesh.shape['data']
  zeros = lambda x: jnp.zeros((copies, *x.shape), jnp.float32)
  trained = _part(policy, frozen[0])[0], _part(critic, frozen[1])[0]
  return dict(zip(('policy', 'critic'), jax.tree.map(zeros, trained), strict=True))


def init_state(base, policy, critic, policy_tx, critic_tx, errors) -> TrainState:
  """State at version 0. `base` is {} without adapters, `critic` {} for methods without one; `errors` as of `init_errors`."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    base=base,
    policy=policy,
    policy_opt=policy_tx.init(policy),
    critic=critic,
    critic_opt=critic_tx.init(critic) if critic else (),
    errors=errors,
    skipped=jnp.zeros((), jnp.int32),
  )


def previous(x: jax.Array) -> jax.Array:
  """[B, T, ...] moved one position to the right: what the prefix before token t ends with."""
  return jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))[:, :-1]


def _flat(tree):
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _finite(*trees) -> jax.Array:
  leaves = [jnp.isfinite(x).all() for tree in trees for x in jax.tree.leaves(tree)]
  return jnp.stack(leaves).all()


def _part(tree, frozen):
  """(trained, held): the tree twice, with None where the leaf is in the other one.

  What is frozen is no argument of a gradient: XLA would fold sums over its constant zeros, leaf by leaf, for minutes.
  """
  pick = lambda which: jax.tree.map(lambda x, f: x if f == which else None, tree, frozen)
  return pick(False), pick(True)


def _whole(trained, held):
  """The inverse of `_part`."""
  pick = lambda a, b: b if a is None else a
  return jax.tree.map(pick, trained, held, is_leaf=lambda x: x is None)


def _select(condition, new, old):
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def policy_logprobs(
  model: Model, params, batch: Batch, *, temperature, chunk: int, mesh: Mesh | None
):
  """Log-probability and entropy, each [B, T], of the action tokens, 0 elsewhere; and the experts' load [L, E]."""
  hidden, load = model.observe(params, batch.tokens, batch.positions, batch.segment_ids)
  logprobs, entropy = heads.action_logprobs(
    previous(hidden),
    model.unembedding(params),
    batch.tokens,
    batch.action_mask,
    temperature=temperature,
    chunk=chunk,
    parts=1 if mesh is None else mesh.shape['sequence'],
  )
  return logprobs, entropy, load


def make_gradient(spread: Spread) -> Callable:
  """(loss, params, fixed, micro-batches, errors) -> (value, aux of each micro-batch, gradient, errors).

  `loss(params, fixed, micro) -> (value, (aux [rows, T] ..., load))`; `fixed` is what it reads besides. Micro-batches are a tree of
  [n, rows, T]; values, gradients and loads are summed over them, all other aux stacked.
  """

  def local(loss, params, fixed, micros):
    def one(carry, micro):
      (value, (aux, load)), grads = jax.value_and_grad(loss, has_aux=True)(params, fixed, micro)
      return jax.tree.map(jnp.add, carry, (value, load, grads)), aux

    first = jax.tree.map(lambda x: x[0], micros)
    _, (_, load) = jax.eval_shape(loss, params, fixed, first)
    zero = jnp.zeros(()), jnp.zeros(load.shape, load.dtype), jax.tree.map(jnp.zeros_like, params)
    (value, load, grads), aux = jax.lax.scan(one, zero, micros)
    return value, (aux, load), grads

  def gradient(loss, params, fixed, micros, errors):
    if spread.compression == 'none':
      return *local(loss, params, fixed, micros), errors

    def shard(params, fixed, micros, errors):
      value, (aux, load), grads = local(loss, params, fixed, micros)
      owed = jax.tree.map(lambda x: x[0], errors)
      grads, owed = compression.all_reduce(grads, owed, axis='data', kind=spread.compression)
      value, load = jax.lax.psum((value, load), 'data')
      return value, (aux, load), grads, jax.tree.map(lambda x: x[None], owed)

    whole, cut = PartitionSpec(), PartitionSpec('data')
    rows = PartitionSpec(None, 'data')
    return jax.shard_map(
      shard,
      mesh=spread.mesh,
      in_specs=(whole, whole, rows, cut),
      out_specs=(whole, (rows, whole), whole, cut),
      axis_names={'data'},
      check_vma=False,
    )(params, fixed, micros, errors)

  return gradient


def make_learner(
  model: Model,
  value_head: ValueHead,
  objective: PolicyObjective,
  policy_tx: optax.GradientTransformation,
  critic_tx: optax.GradientTransformation,
  frozen: tuple[Any, Any],
  numbers: Numbers,
  spread: Spread,
) -> Learner:
  """Binds everything that does not change during a run.

  Args:
    frozen: trees of bools like policy and critic: leaves that never move. They get no gradient; their optimiser must
      hold no state for them (see `freeze`).
  """
  n, gradient = numbers, make_gradient(spread)

  def cut(tree):
    """[B, T] leaves as micro-batches [B / micro_rows, micro_rows, T]."""
    rows = lambda x: x.reshape(-1, n.micro_rows, *x.shape[1:])
    return jax.tree.map(lambda x: sharding.constrain(rows(x), spread.mesh, leading=1), tree)

  def evaluate_critic(state, batch):
    """Values [B, T] of the prefix before each token, and bootstrap [B, T], over micro-batches."""
    backbone = lora.join(state.base, state.critic['backbone'])

    def one(_, micro):
      hidden = model.apply(backbone, micro.tokens, micro.positions, micro.segment_ids)
      after = value_head.values(state.critic['head'], hidden)
      return None, (previous(after), after * micro.truncated * n.bootstrap_truncated)

    return _flat(jax.lax.scan(one, None, cut(batch))[1])

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

  def descend(name, loss, state, fixed, micros, tx, still):
    """One optimiser step of one network: (state, value, aux, gradient of what is not frozen)."""
    params, opt = getattr(state, name), getattr(state, f'{name}_opt')
    trained, held = _part(params, still)
    base, denominator = fixed
    owed = state.errors.get(name, {})
    value, aux, grads, owed = gradient(loss, trained, (base, held, denominator), micros, owed)
    updates, opt = tx.update(_whole(grads, jax.tree.map(jnp.zeros_like, held)), opt, params)
    errors = {**state.errors, name: owed} if state.errors else {}
    new = {name: optax.apply_updates(params, updates), f'{name}_opt': opt, 'errors': errors}
    return state.replace(**new), value, aux, grads

  def critic_loss(critic, fixed, xs):
    base, held, denominator = fixed
    micro, targets = xs
    critic = _whole(critic, held)
    backbone = lora.join(base, critic['backbone'])
    hidden = model.apply(backbone, micro.tokens, micro.positions, micro.segment_ids)
    # Padding may be NaN, and the head's gradient multiplies it by 0.
    hidden = jnp.where(micro.action_mask[..., None] > 0, previous(hidden), 0)
    value = value_head.loss(critic['head'], hidden, targets, micro.action_mask, denominator)
    return value, ((), jnp.zeros(()))

  def critic_step(state, batch):
    """One optimiser step on the squared (or categorical) error to the lambda-return."""
    values, bootstrap = evaluate_critic(state, batch)
    targets = gae(adv.lambda_returns, batch, values, bootstrap, n.critic_lambda)
    fixed = state.base, batch.action_mask.sum()
    new, value, _, grads = descend(
      'critic', critic_loss, state, fixed, cut((batch, targets)), critic_tx, frozen[1]
    )
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

  def policy_loss(params, fixed, xs):
    base, held, denominator = fixed
    micro, advantages, old = xs
    logprobs, entropy, load = policy_logprobs(
      model,
      lora.join(base, _whole(params, held)),
      micro,
      temperature=n.temperature,
      chunk=n.logprob_chunk,
      mesh=spread.mesh,
    )
    out = objective.loss(logprobs, old, micro, advantages, denominator)
    return out.loss, ((logprobs, entropy), load)

  def policy_step(state, part):
    """One optimiser step on one minibatch of rows: part = (batch, advantages, old log-probabilities)."""
    fixed = state.base, part[0].action_mask.sum()
    new, value, (aux, load), grads = descend(
      'policy', policy_loss, state, fixed, cut(part), policy_tx, frozen[0]
    )
    logprobs, entropy = _flat(aux)
    return new, (value, optax.tree.norm(grads), logprobs, entropy, load, _finite(value, grads))

  def latest_logprobs(state, batch):
    params = lora.join(state.base, state.policy)

    def one(_, micro):
      out = policy_logprobs(
        model, params, micro, temperature=n.temperature, chunk=n.logprob_chunk, mesh=spread.mesh
      )
      return None, out[0]

    return _flat(jax.lax.scan(one, None, cut(batch))[1])

  def policy_phase(state, batch, advantages):
    """`policy_minibatches` policy steps; the first sees every r as the engine left it."""
    parts = n.policy_minibatches
    old = jnp.zeros_like(batch.behavior_logprobs)
    if objective.uses_old_logprobs:
      old = latest_logprobs(state, batch)
    # Rows are packed long first, so minibatch j takes rows j, j + parts, ...
    deal = lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
    parted = jax.tree.map(deal, (batch, advantages, old))
    moved, (loss, norm, logprobs, entropy, load, finite) = jax.lax.scan(policy_step, state, parted)
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
    if n.num_experts:
      metrics |= moe.load_metrics(load.sum(axis=0))
    return moved, metrics, finite.all()

  def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    before, metrics, ok = state, {}, jnp.array(True)
    advantages = batch.advantages
    if n.critic_updates:
      state, metrics, ok = critic_phase(state, batch)
      judge = state if n.advantage_values == 'after' else before
      values, bootstrap = evaluate_critic(judge, batch)
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


def make_supervised_update(
  model: Model, tx: optax.GradientTransformation, *, chunk: int, mesh: Mesh | None
):
  """(params, opt, batch) -> (params, opt, mean negative log-likelihood of the agent's tokens, nats)."""

  def loss(params, batch):
    logprobs, *_ = policy_logprobs(model, params, batch, temperature=1.0, chunk=chunk, mesh=mesh)
    return -_mean(logprobs, batch.action_mask)

  def update(params, opt, batch: Batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, value

  return update
