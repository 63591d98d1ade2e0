"""A table model, a few trajectories, and what one update does to them by slow float64 loops, for test_learner.

Hidden states of the table model: embed[token] + 0.1 position skew. It looks at no other token, so values and
log-probabilities are known in closed form, and it notices wrong positions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sao_jax import batching, critics, learner, losses
from sao_jax.models import heads
from sao_jax.types import Batch, Model, StopReason, Trajectory

V, D, VERSION = 5, 3, 7
RNG = np.random.default_rng(0)
POLICY = {
  name: RNG.normal(size=shape).astype(np.float32)
  for name, shape in (('embed', (V, D)), ('skew', (D,)), ('unembed', (V, D)))
}
CRITIC = {
  'backbone': {
    name: RNG.normal(size=shape).astype(np.float32)
    for name, shape in (('embed', (V, D)), ('skew', (D,)))
  },
  'head': {'kernel': RNG.normal(size=(D, 1)).astype(np.float32), 'bias': np.ones(1, np.float32)},
}
NUMBERS = learner.Numbers(
  temperature=0.7,
  eps_low=0.3,
  eps_high=5.0,
  discount=0.9,
  alpha=1.5,
  critic_lambda=0.8,
  critic_updates=2,
  advantage_values='after',
  bootstrap_truncated=True,
  policy_freeze_steps=0,
  policy_minibatches=1,
  micro_rows=1,
  logprob_chunk=4,
  num_experts=0,
)
RATE = {'policy': 0.5, 'critic': 0.1}


# The table model and the learner under test


def apply(params, tokens, positions, segment_ids):
  return params['embed'][tokens] + 0.1 * positions[..., None] * params['skew']


def apply_nan_padding(params, tokens, positions, segment_ids):
  hidden = apply(params, tokens, positions, segment_ids)
  return jnp.where(segment_ids[..., None] > 0, hidden, jnp.nan)


def table(apply):
  """A model of one function."""
  observe = lambda *args: (apply(*args), jnp.zeros((1, 0)))
  return Model(None, apply, observe, None, None, lambda params: params['unembed'], V)


def squared(head, hidden, targets, mask, denominator):
  values = heads.scalar_values(head, hidden)
  return critics.squared_value_loss(values, targets, mask, denominator=denominator).loss


def dis(numbers):
  """The objective of SAO."""

  def loss(logprobs, old, batch, advantages, denominator):
    return losses.sao_policy_loss(
      logprobs,
      batch.behavior_logprobs,
      advantages,
      batch.mask,
      eps_low=numbers.eps_low,
      eps_high=numbers.eps_high,
      denominator=denominator,
    )

  return learner.PolicyObjective(loss, uses_old_logprobs=False)


TABLE = table(apply)
ALONE = learner.Spread(mesh=None, compression='none')
HEAD = learner.ValueHead(heads.scalar_values, squared)
SGD = optax.sgd(RATE['policy']), optax.sgd(RATE['critic'])
ADAM = optax.adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)
SKEW_FROZEN = {
  'backbone': {'embed': False, 'skew': True},
  'head': {'kernel': False, 'bias': False},
}


@functools.cache
def quick():
  """Compiler options for functions that run once: compiling is what takes the time here."""
  options = {
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
    'xla_cpu_use_fusion_emitters': False,
  }
  try:
    jax.jit(lambda: 0, compiler_options=options)()
  except jax.errors.JaxRuntimeError:  # a version of XLA that does not know them
    return {}
  return options


@functools.cache
def make(numbers=NUMBERS, *, model=TABLE, head=HEAD, objective=None, txs=SGD, freeze_skew=False):
  """(jitted learner, state at version 0), compiled once for equal arguments."""
  frozen = SKEW_FROZEN if freeze_skew else jax.tree.map(lambda _: False, CRITIC)
  frozen = jax.tree.map(lambda _: False, POLICY), frozen
  made = learner.make_learner(model, head, objective or dis(numbers), *txs, frozen, numbers, ALONE)
  critic = CRITIC if numbers.critic_updates else {}
  state = learner.init_state({}, *jax.tree.map(jnp.asarray, (POLICY, critic)), *txs, errors={})
  return learner.Learner(*(jax.jit(f, compiler_options=quick()) for f in made)), state


# Trajectories, whose importance ratios are given


def episode(name, tokens, mask, ratios, versions, reward, *, truncated=False, temperature=0.7):
  tokens, mask = np.asarray(tokens, np.int32), np.asarray(mask, bool)
  n, last = len(tokens), np.flatnonzero(mask)[-1]
  logprobs = np.asarray(
    [0.0, *(oracle_distribution(POLICY, tokens, t, temperature)[0] for t in range(1, n))]
  )
  rewards, behavior, version = np.zeros(n), np.zeros(n), np.full(n, -1)
  rewards[last] = reward
  behavior[mask] = logprobs[mask] - np.log(ratios)
  version[mask] = versions
  return Trajectory(
    episode=name,
    prompt_id=name,
    group=name,
    tokens=tokens,
    mask=mask,
    behavior_logprobs=behavior.astype(np.float32),
    versions=version.astype(np.int32),
    rewards=rewards.astype(np.float32),
    turn_ids=np.where(mask, 0, -1).astype(np.int32),
    terminated=not truncated,
    truncated=truncated,
    stop_reason=StopReason.ANSWERED,
  )


def episodes(ratios=None, **kwargs):
  """Ten action tokens; under the bound of 2 versions one of `a` and that of `c` are too old to train."""
  r = ratios or {'a': [1, 1.2, 0.8], 'b': [0.6, 1, 1.4], 'c': [1.1], 'd': [7, 5, 0.9]}
  mask_b = [0, 0, 1, 0, 0, 1, 1]
  return [
    episode('a', [1, 2, 3, 4, 2], [0, 1, 1, 0, 1], r['a'], [1, 6, 7], 1.0, **kwargs),
    episode('b', [4, 0, 1, 2, 3, 3, 1], mask_b, r['b'], [6, 7, 7], 0.25, truncated=True, **kwargs),
    episode('c', [2, 1, 0], [0, 1, 0], r['c'], [1], -0.5, **kwargs),
    episode('d', [3, 1, 4, 4], [0, 1, 1, 1], r['d'], [5, 5, 6], 0.0, **kwargs),
  ]


def pack(trajectories=None, *, row_length=8, row_multiple=1, max_staleness=2, **kwargs) -> Batch:
  """Rows of 8: b; a and c; d."""
  return batching.pack(
    episodes() if trajectories is None else trajectories,
    row_length=row_length,
    row_multiple=row_multiple,
    version=VERSION,
    max_staleness=max_staleness,
    **kwargs,
  )


# The oracle: float64 loops over single tokens


def float64(tree):
  return jax.tree.map(lambda x: np.array(x, np.float64), tree)


def oracle_hidden(params, tokens, t):
  return np.float64(params['embed'][tokens[t]]) + 0.1 * t * np.float64(params['skew'])


def oracle_distribution(policy, tokens, t, temperature):
  """(log-probability of token t, all probabilities) given the tokens before it."""
  logits = np.float64(policy['unembed']) @ oracle_hidden(policy, tokens, t - 1) / temperature
  logprobs = logits - logits.max()
  logprobs -= np.log(np.exp(logprobs).sum())
  return logprobs[tokens[t]], np.exp(logprobs)


def oracle_value(critic, tokens, t):
  """Of the prefix that ends before token t."""
  head = critic['head']
  return oracle_hidden(critic['backbone'], tokens, t - 1) @ head['kernel'][:, 0] + head['bias'][0]


def oracle_chain(critic, trajectory, n, lam):
  """[(position, value, advantage)] of the action tokens."""
  where = np.flatnonzero(trajectory.mask)
  values = [oracle_value(critic, trajectory.tokens, t) for t in where]
  cut = trajectory.truncated and n.bootstrap_truncated
  values.append(oracle_value(critic, trajectory.tokens, where[-1] + 1) if cut else 0.0)
  out, advantage = [], 0.0
  for k in reversed(range(len(where))):
    delta = trajectory.rewards[where[k]] + n.discount * values[k + 1] - values[k]
    advantage = delta + n.discount * lam * advantage
    out.append((where[k], values[k], advantage))
  return out[::-1]


def oracle_norm(grads):
  return np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))


def oracle_critic_step(critic, trajectories, n, *, frozen=()):
  grads, values, targets = jax.tree.map(np.zeros_like, critic), [], []
  count = sum(t.mask.sum() for t in trajectories)
  loss = 0.0
  for trajectory in trajectories:
    for t, value, advantage in oracle_chain(critic, trajectory, n, n.critic_lambda):
      loss += advantage**2 / count  # target - value is the advantage
      d = -2 * advantage / count
      values.append(value)
      targets.append(value + advantage)
      grads['head']['bias'] += d
      grads['head']['kernel'][:, 0] += d * oracle_hidden(
        critic['backbone'], trajectory.tokens, t - 1
      )
      grads['backbone']['embed'][trajectory.tokens[t - 1]] += d * critic['head']['kernel'][:, 0]
      grads['backbone']['skew'] += d * 0.1 * (t - 1) * critic['head']['kernel'][:, 0]
  for name in frozen:
    grads['backbone'][name][:] = 0
  metrics = {
    'loss/critic': loss,
    'critic/grad_norm': oracle_norm(grads),
    'critic/explained_variance': 1 - np.var(np.subtract(targets, values)) / np.var(targets),
    'critic/value_mean': np.mean(values),
    'critic/return_mean': np.mean(targets),
  }
  return jax.tree.map(lambda p, g: p - RATE['critic'] * g, critic, grads), metrics


def oracle_policy_grads(policy, terms, temperature):
  """Gradient of sum coefficient * log pi over terms (tokens, t, coefficient)."""
  grads = jax.tree.map(np.zeros_like, policy)
  for tokens, t, coefficient in terms:
    _, probs = oracle_distribution(policy, tokens, t, temperature)
    d_logits = coefficient * (np.eye(V)[tokens[t]] - probs) / temperature
    d_hidden = d_logits @ policy['unembed']
    grads['unembed'] += np.outer(d_logits, oracle_hidden(policy, tokens, t - 1))
    grads['embed'][tokens[t - 1]] += d_hidden
    grads['skew'] += 0.1 * (t - 1) * d_hidden
  return grads


def oracle_policy_step(policy, trajectories, advantages, n):
  """`advantages`: {(episode, position): A}. Stale tokens count in the mean and have no gradient."""
  count = sum(t.mask.sum() for t in trajectories)
  loss, terms, ratios, entropies = 0.0, [], [], []
  for trajectory in trajectories:
    for t in np.flatnonzero(trajectory.mask):
      logprob, probs = oracle_distribution(policy, trajectory.tokens, t, n.temperature)
      ratio = np.exp(logprob - np.float64(trajectory.behavior_logprobs[t]))
      ratios.append(ratio)
      entropies.append(-(probs * np.log(probs)).sum())
      fresh = VERSION - trajectory.versions[t] <= 2
      if fresh and 1 - n.eps_low < ratio < 1 + n.eps_high:
        weight = ratio * advantages[trajectory.episode, t] / count
        loss -= weight * logprob
        terms.append((trajectory.tokens, t, -weight))
  grads = oracle_policy_grads(policy, terms, n.temperature)
  ratios = np.asarray(ratios)
  low, high = ratios <= 1 - n.eps_low, ratios >= 1 + n.eps_high
  kept = np.where(low | high, 0, ratios)
  metrics = {
    'loss/policy': loss,
    'policy/grad_norm': oracle_norm(grads),
    'policy/entropy': np.mean(entropies),
    'mismatch/k3': np.mean(ratios - 1 - np.log(ratios)),
    'dis/kept': np.mean(kept > 0),
    'dis/dropped_low': low.mean(),
    'dis/dropped_high': high.mean(),
    'dis/ratio_mean': kept[kept > 0].mean(),
    'dis/ess': kept.sum() ** 2 / (count * (kept**2).sum()),
  }
  return jax.tree.map(lambda p, g: p - RATE['policy'] * g, policy, grads), metrics


def oracle_advantages(critic, trajectories, n):
  return {
    (trajectory.episode, t): advantage
    for trajectory in trajectories
    for t, _, advantage in oracle_chain(
      critic, trajectory, n, max(0.0, 1 - 1 / (n.alpha * trajectory.mask.sum()))
    )
  }


def oracle_update(trajectories, n, *, frozen=()):
  policy, before = float64((POLICY, CRITIC))
  critic, metrics = oracle_critic_step(before, trajectories, n, frozen=frozen)
  for _ in range(n.critic_updates - 1):
    critic, _ = oracle_critic_step(critic, trajectories, n, frozen=frozen)
  judge = critic if n.advantage_values == 'after' else before
  advantages = oracle_advantages(judge, trajectories, n)
  policy, more = oracle_policy_step(policy, trajectories, advantages, n)
  spread = np.std(list(advantages.values()))
  counts = {'advantage/std': spread, 'updates/skipped': 0, 'updates/skipped_now': 0}
  return policy, critic, {**metrics, **more, **counts}


def assert_close(got, expected, rtol=2e-4, atol=2e-6):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, expected)


def assert_same(got, expected):
  """Bit for bit; NaN equals NaN."""
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def moved(a, b):
  return [not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
