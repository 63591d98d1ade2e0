"""The method of a run: losses, heads, optimisers and baselines, bound to the numbers of a config."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from sao_jax import advantages, critics, learner, losses, sharding
from sao_jax.envs.problems import Demonstration, demonstration
from sao_jax.envs.prompts import PromptSource
from sao_jax.models import heads, transformer
from sao_jax.runtime import failures
from sao_jax.types import Batch, Trajectory

OBJECTIVES = ('dis', 'icepop', 'cispo', 'reinforce', 'gspo', 'ppo', 'decoupled_ppo')

Baseline = Callable[[list[Trajectory], Any], tuple[dict[str, float] | None, Any]]
# (trajectories of an update, memory) -> (advantage of each episode or None, memory); memory is JSON-able, None at first


def adamw(name: str, section: ConfigDict, schedule=None) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW under a linear warm-up to a constant rate."""
  rules = {
    'learning_rate': (lambda x: 0 < x < math.inf, 'a finite number above 0'),
    'clip_norm': (lambda x: x > 0, 'above 0; inf turns clipping off'),
    'eps': (lambda x: 0 < x < math.inf, 'a finite number above 0'),
    'b1': (lambda x: 0 <= x < 1, 'in [0, 1)'),
    'b2': (lambda x: 0 <= x < 1, 'in [0, 1)'),
    'weight_decay': (lambda x: 0 <= x < math.inf, 'a finite number, 0 or more'),
    'warmup_steps': (lambda x: x >= 0, '0 or more'),
  }
  for field, (holds, words) in rules.items():
    if not holds(section[field]):
      raise ValueError(f'{name}.{field}={section[field]} must be {words}')
  if schedule is None:
    schedule = optax.schedules.linear_schedule(
      section.learning_rate / (section.warmup_steps + 1),
      section.learning_rate,
      section.warmup_steps,
    )
  return optax.chain(
    optax.clip_by_global_norm(section.clip_norm),
    optax.adamw(
      schedule,
      b1=section.b1,
      b2=section.b2,
      eps=section.eps,
      weight_decay=section.weight_decay,
    ),
  )


def value_head(c: ConfigDict):
  """(init(width, mean_return) -> head, ValueHead)."""
  if c.value.head == 'scalar':

    def loss(head, hidden, targets, mask, denominator):
      values = heads.scalar_values(head, hidden)
      return critics.squared_value_loss(values, targets, mask, denominator=denominator).loss

    return heads.init_scalar_head, learner.ValueHead(heads.scalar_values, loss)
  support = {'low': c.value.low, 'high': c.value.high}
  bins = {**support, 'num_bins': c.value.num_bins}

  def values(head, hidden):
    return critics.expected_value(heads.categorical_logits(head, hidden), **support)

  def categorical_loss(head, hidden, targets, mask, denominator):
    target_probs = critics.hl_gauss(targets, **bins, sigma_ratio=c.value.sigma_ratio)
    logits = heads.categorical_logits(head, hidden)
    return critics.categorical_value_loss(logits, target_probs, mask, denominator=denominator).loss

  init = functools.partial(heads.init_categorical_head, **bins)
  return init, learner.ValueHead(values, categorical_loss)


def critic_labels(labels: Any, head: Any) -> Any:
  """Of a critic, from those of its backbone: the head is of the rest."""
  return {'backbone': labels, 'head': jax.tree.map(lambda _: 'rest', head)}


def grouped(
  name: str, section: ConfigDict, params: Any, labels: Any
) -> tuple[optax.GradientTransformation, Any, str]:
  """(AdamW that leaves the frozen groups alone and scales the steps of others, tree of bools: frozen, all in words).

  Args:
    name: of the section.
    params: shapes of what it trains.
    labels: their groups, see `transformer.partition`.

  Raises:
    ValueError: a group to freeze or to scale that the parameters do not have, or nothing left to train.
  """
  counts = transformer.partition_counts(params, labels)
  scales = {'router': section.router_scale, 'experts': section.experts_scale}
  for field, value, groups in (
    (f'{name}.frozen', tuple(section.frozen), section.frozen),
    *((f'{name}.{group}_scale', scale, (group,)) for group, scale in scales.items() if scale != 1),
  ):
    if unknown := [group for group in groups if group not in counts or group == 'rest']:
      raise ValueError(
        f'{field}={value}: this model has no group {unknown[0]!r}, only {", ".join(set(counts) - {"rest"})}'
      )
  for group, scale in scales.items():
    if not 0 < scale < math.inf:
      raise ValueError(
        f'{name}.{group}_scale={scale} must be a finite number above 0; {name}.frozen stops a group'
      )
  words = ', '.join(
    f'{label} {n} arrays of {size} parameters' for label, (n, size) in counts.items()
  )
  frozen = jax.tree.map(lambda label: label in section.frozen, labels)
  which = ' and '.join(section.frozen)
  if which:
    words = f'the {name} trains the rest, {which} is frozen ({words})'
  else:
    words = f'nothing of the {name} is frozen ({words})'
  tx = adamw(name, section)
  if which:
    tx = learner.freeze(tx, frozen)
  if any(scale != 1 for scale in scales.values()):
    # After AdamW, which divides the scale of a gradient out.
    steps = {label: optax.scale(scales.get(label, 1.0)) for label in counts}
    tx = optax.chain(tx, optax.multi_transform(steps, labels))
  return tx, frozen, words


def init_critic(
  c: ConfigDict, head_init, mesh: Mesh | None, policy: Any, mean_return: float
) -> Any:
  """The policy's own weights under a head whose value is the mean return (section 3.2 and the abstract)."""
  if not c.sao.critic_updates:
    return {}
  head = head_init(c.model.width, mean_return)
  if mesh is not None:
    head = sharding.put(head, sharding.tree_shardings(head, mesh))
  return {'backbone': jax.tree.map(jnp.copy, policy), 'head': head}


def objective(c: ConfigDict) -> learner.PolicyObjective:
  """The policy loss that `sao.objective` names, bound to its numbers."""
  interval = {'eps_low': c.sao.eps_low, 'eps_high': c.sao.eps_high}
  clip = {'eps_low': c.sao.clip_low, 'eps_high': c.sao.clip_high}

  def behavior(loss, **numbers):
    def bound(logprobs, old, batch: Batch, advantages, denominator):
      return loss(
        logprobs,
        batch.behavior_logprobs,
        advantages,
        batch.mask,
        **numbers,
        denominator=denominator,
      )

    return learner.PolicyObjective(bound, uses_old_logprobs=False)

  def ppo(logprobs, old, batch: Batch, advantages, denominator):
    return losses.ppo_policy_loss(
      logprobs, old, advantages, batch.mask, **clip, denominator=denominator
    )

  def decoupled(logprobs, old, batch: Batch, advantages, denominator):
    return losses.decoupled_ppo_policy_loss(
      logprobs,
      old,
      batch.behavior_logprobs,
      advantages,
      batch.mask,
      **clip,
      cap=1 + c.sao.eps_high,
      denominator=denominator,
    )

  def gspo(logprobs, old, batch: Batch, advantages, denominator):
    return losses.gspo_policy_loss(
      logprobs,
      batch.behavior_logprobs,
      advantages,
      batch.mask,
      **clip,
      segment_ids=batch.segment_ids,
      denominator=denominator,
    )

  objectives = {
    'dis': lambda: behavior(losses.sao_policy_loss, **interval),
    'icepop': lambda: behavior(losses.icepop_policy_loss, **interval),
    'cispo': lambda: behavior(losses.cispo_policy_loss, **clip),
    'reinforce': lambda: behavior(losses.reinforce_policy_loss),
    'gspo': lambda: learner.PolicyObjective(gspo, uses_old_logprobs=False),
    'ppo': lambda: learner.PolicyObjective(ppo, uses_old_logprobs=True),
    'decoupled_ppo': lambda: learner.PolicyObjective(decoupled, uses_old_logprobs=True),
  }
  return objectives[c.sao.objective]()


def numbers(c: ConfigDict) -> learner.Numbers:
  s = c.sao
  return learner.Numbers(
    temperature=c.env.temperature,
    eps_low=s.eps_low,
    eps_high=s.eps_high,
    discount=s.discount,
    alpha=s.alpha,
    critic_lambda=s.critic_lambda,
    critic_updates=s.critic_updates,
    advantage_values=s.advantage_values,
    bootstrap_truncated=s.bootstrap_truncated,
    policy_freeze_steps=s.policy_freeze_steps,
    policy_minibatches=s.policy_minibatches,
    micro_rows=c.train.micro_rows,
    logprob_chunk=c.train.logprob_chunk,
    num_experts=c.model.num_experts,
  )


def baseline(c: ConfigDict) -> Baseline:
  """Advantages that the host computes from the rewards of an update and what it remembers of earlier ones."""
  kind = c.sao.advantages
  if kind == 'gae':
    return functools.partial(_no_baseline, c)

  def running_mean(trajectories: list[Trajectory], memory):
    rewards = [t.reward for t in trajectories]
    by_prompt = c.sao.baseline_key == 'prompt'
    keys = [t.prompt_id if by_prompt else 'all' for t in trajectories]
    if memory is None:  # nothing is remembered yet: the first batch is judged by its own mean
      mean = sum(rewards) / len(rewards)
      state = advantages.RunningMean.create(window=c.sao.baseline_window, initial=mean)
    else:
      state = advantages.RunningMean.from_json(memory)
    values = {
      t.episode: float(t.reward - baseline)
      for t, baseline in zip(trajectories, state.baselines(keys), strict=True)
    }
    return values, state.update(keys, rewards).to_json()

  def grouped(trajectories: list[Trajectory], memory):
    rewards = jnp.asarray([t.reward for t in trajectories]).reshape(-1, c.train.group_size)
    if kind == 'group_relative':
      values = advantages.group_relative(rewards, normalize_std=c.sao.normalize_std)
    else:
      values = advantages.leave_one_out(rewards)
    return dict(
      zip([t.episode for t in trajectories], values.ravel().tolist(), strict=True)
    ), memory

  return running_mean if kind == 'running_mean' else grouped


def _no_baseline(c: ConfigDict, trajectories: list[Trajectory], memory):
  """The critic is the baseline. A categorical one cannot represent a return outside its support."""
  if c.value.head == 'categorical':
    for t in trajectories:
      if not c.value.low <= t.reward <= c.value.high:
        raise failures.RunFailed(
          f'episode {t.episode} has return {t.reward}, outside value.low={c.value.low} to value.high='
          f'{c.value.high}: widen the support of the categorical head'
        )
  return None, memory


def demonstrate(c: ConfigDict, practice: PromptSource, index: int) -> Demonstration:
  """The demonstration of the warm start at an index; a function of its arguments."""
  index %= c.supervised.num_demonstrations
  return demonstration(
    practice.task(index),
    # A stream of its own: the task's kind is drawn from [seed, index], and must not decide the tool.
    np.random.default_rng([c.seed, index, 1]),
    tool_share=c.supervised.tool_share,
    slip_share=c.supervised.slip_share,
    observation_bytes=c.env.observation_bytes,
  )
