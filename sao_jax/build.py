"""Config to objects: the only reader of configs. Everything is checked here, before any long work starts."""

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from sao_jax import advantages, critics, learner, losses, tokens
from sao_jax.engines.local import LocalEngine
from sao_jax.engines.programs import make_programs
from sao_jax.envs.grading import Grader
from sao_jax.envs.math_python import MathPython
from sao_jax.envs.prompts import FilePrompts, ProceduralPrompts, PromptSource
from sao_jax.models import heads, transformer
from sao_jax.rollout import run_episode
from sao_jax.runtime import admission, dispatch, failures
from sao_jax.sandbox import PythonSandbox
from sao_jax.types import Batch, Engine, Model, Task, Trajectory

Baseline = Callable[[list[Trajectory], Any], tuple[dict[str, float] | None, Any]]
# (trajectories of an update, memory) -> (advantage of each episode or None, memory); memory is JSON-able, None at first


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a run is made of, without anything that runs."""

  config: ConfigDict
  model: Model
  learner: learner.Learner
  supervised_update: Callable
  init_policy: Callable[[jax.Array], Any]  # key -> params
  init_critic: Callable[
    [Any, float], Any
  ]  # (policy params, mean return) -> critic params, {} without a critic
  policy_tx: optax.GradientTransformation
  critic_tx: optax.GradientTransformation
  supervised_tx: optax.GradientTransformation
  baseline: Baseline
  source: PromptSource
  practice: PromptSource  # problems with scripted demonstrations, for the warm start
  heldout: list[Task]
  limits: dispatch.Limits
  frozen_counts: str  # what of the critic is frozen, in words


def parts(config: ConfigDict) -> Parts:
  """Checks the whole config and builds everything that has no side effect.

  Raises:
    ValueError: naming the field, its value and the remedy. Problem files raise ProblemFileError, which is one.
  """
  _check(config)
  model = _model(config)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  policy_tx, critic_tx = _adamw('policy', config.policy), _adamw('critic', config.critic)
  head_init, value_head = _value_head(config)
  frozen, counts = {}, 'no critic'
  if config.sao.critic_updates:
    frozen, counts = _frozen(config, shapes, head_init)
    if config.sao.freeze_attention:
      critic_tx = learner.freeze(critic_tx, frozen)
  supervised = config.supervised
  supervised_tx = _adamw(
    'supervised',
    ConfigDict(
      {
        **config.policy,
        'learning_rate': supervised.learning_rate,
        'warmup_steps': supervised.warmup_steps,
      }
    ),
    optax.warmup_cosine_decay_schedule(
      0.0,
      supervised.learning_rate,
      supervised.warmup_steps,
      max(supervised.num_steps, supervised.warmup_steps + 1),
      0.1 * supervised.learning_rate,
    ),
  )
  procedural = ProceduralPrompts(
    seed=config.seed,
    kinds=dict.fromkeys(config.data.kinds, 1.0),
    levels=dict.fromkeys(config.data.levels, 1.0),
  )
  source = FilePrompts(config.data.path, seed=config.seed) if config.data.path else procedural
  heldout = source
  if config.data.heldout_path:
    heldout = FilePrompts(config.data.heldout_path, seed=config.seed)
  heldout = heldout.heldout(config.evaluation.num_problems)
  check_prompts(heldout, config)
  if config.data.path:
    check_prompts(source.heldout(len(source)), config)
  return Parts(
    config=config,
    model=model,
    learner=learner.make_learner(
      model, value_head, _objective(config), policy_tx, critic_tx, frozen, _numbers(config)
    ),
    supervised_update=learner.make_supervised_update(
      model, supervised_tx, chunk=config.train.logprob_chunk
    ),
    init_policy=model.init,
    init_critic=functools.partial(_init_critic, config, head_init),
    policy_tx=policy_tx,
    critic_tx=critic_tx,
    supervised_tx=supervised_tx,
    baseline=_baseline(config),
    source=source,
    practice=procedural,
    heldout=heldout,
    limits=_limits(config),
    frozen_counts=counts,
  )


class Services:
  """The running side: engines, sandbox and grader, and how an episode is played on them."""

  def __init__(self, parts: Parts, params: Any):
    """Starts everything; engines hold copies of `params` as version 0."""
    c = parts.config
    self._sandbox = PythonSandbox(
      num_workers=c.sandbox.num_workers,
      timeout_s=c.sandbox.timeout_s,
      memory_mb=c.sandbox.memory_mb,
      output_bytes=c.sandbox.output_bytes,
    )
    self._grader = Grader(timeout_s=c.sandbox.timeout_s, num_workers=1)
    self.description = self._sandbox.describe()
    programs = make_programs(
      parts.model,
      params,
      num_slots=c.engine.num_slots,
      max_length=c.env.max_tokens,
      decode_steps=c.engine.decode_steps,
      prefill_rows=c.engine.prefill_rows,
      prefill_buckets=c.engine.prefill_buckets,
      stop_tokens=(tokens.EOT,),
    )
    self.engine = LocalEngine(programs, jax.tree.map(jnp.copy, params), version=0).start()
    self.evaluation_engine = LocalEngine(
      programs, jax.tree.map(jnp.copy, params), version=0
    ).start()
    self.evaluation_slots = c.engine.num_slots
    self.play = self._player(c, self.engine, c.env.temperature)
    self.evaluation_play = self._player(c, self.evaluation_engine, c.evaluation.temperature)

  def _player(self, c: ConfigDict, engine: Engine, temperature: float):
    async def play(task: Task, *, episode: str, group: str, seed: int) -> Trajectory:
      env = MathPython(
        chat=tokens.BYTE_CHAT,
        sandbox=self._sandbox,
        grader=self._grader,
        max_turns=c.env.max_turns,
        observation_bytes=c.env.observation_bytes,
      )
      return await run_episode(
        env,
        engine,
        task,
        episode=episode,
        group=group,
        seed=seed,
        temperature=temperature,
        max_turn_tokens=c.env.max_turn_tokens,
        max_tokens=c.env.max_tokens,
      )

    return play

  async def close(self) -> None:
    """Ends every process and thread of it."""
    for engine in (self.engine, self.evaluation_engine):
      await asyncio.to_thread(engine.close)
    await self._sandbox.close()
    await self._grader.close()


def check_prompts(tasks: Iterable[Task], config: ConfigDict) -> None:
  """Every question must leave room for an answer.

  Raises:
    ValueError: naming the longest question and what it needs.
  """
  longest = max(tasks, key=lambda task: len(tokens.prompt_tokens(task.question)))
  size = len(tokens.prompt_tokens(longest.question))
  if size + config.env.max_turn_tokens > config.env.max_tokens:
    raise ValueError(
      f'problem {longest.prompt_id} has {size} tokens, and with env.max_turn_tokens='
      f'{config.env.max_turn_tokens} it does not fit env.max_tokens={config.env.max_tokens}: raise the '
      f'latter to at least {size + config.env.max_turn_tokens}, or leave out long problems'
    )


def row_length(config: ConfigDict) -> int:
  """Tokens of a packed row: the longest episode."""
  return config.env.max_tokens


def _check(c: ConfigDict) -> None:
  """Rules that hold between fields; each function below checks its own numbers."""
  minimum = {
    'train.num_steps': 1,
    'train.batch_size': 1,
    'train.group_size': 1,
    'train.micro_rows': 1,
    'train.logprob_chunk': 1,
    'train.save_every': 1,
    'train.keep': 1,
    'train.max_skipped_in_row': 1,
    'env.max_turns': 1,
    'env.max_turn_tokens': 1,
    'env.max_tokens': 2,
    'evaluation.every': 1,
    'evaluation.num_problems': 1,
    'evaluation.samples': 1,
    'runtime.pipeline_depth': 0,
    'runtime.max_staleness': 0,
    'runtime.retries': 0,
    'runtime.max_failures_in_row': 1,
    'sao.critic_updates': 0,
    'sao.policy_freeze_steps': 0,
    'sao.policy_minibatches': 1,
    'sao.baseline_window': 1,
    'supervised.num_steps': 0,
    'supervised.batch_size': 1,
    'value.num_batches': 0,
    'value.updates_per_batch': 1,
    'value.num_bins': 2,
    'engine.num_slots': 1,
    'engine.decode_steps': 1,
    'engine.prefill_rows': 1,
    'sandbox.num_workers': 1,
    'sandbox.memory_mb': 64,
    'sandbox.output_bytes': 1,
    'env.observation_bytes': 1,
    'supervised.num_demonstrations': 1,
    'seed': 0,
  }
  for field, least in minimum.items():
    section, _, name = field.rpartition('.')
    value = (c[section] if section else c)[name]
    if value < least:
      raise ValueError(f'{field}={value} must be at least {least}')
  positive = ('env.temperature', 'evaluation.temperature', 'sao.alpha')
  for field in positive:
    section, name = field.split('.')
    if not 0 < c[section][name] < float('inf'):
      raise ValueError(f'{field}={c[section][name]} must be a finite number above 0')
  for field in (
    'sao.discount',
    'sao.critic_lambda',
    'supervised.tool_share',
    'supervised.slip_share',
  ):
    section, name = field.split('.')
    if not 0 <= c[section][name] <= 1:
      raise ValueError(f'{field}={c[section][name]} must be in [0, 1]')
  _one_of(c, 'runtime.mode', ('async', 'sync'))
  _one_of(c, 'sao.advantages', ('gae', 'group_relative', 'leave_one_out', 'running_mean'))
  _one_of(c, 'sao.baseline_key', ('prompt', 'global'))
  _one_of(c, 'sao.advantage_values', ('after', 'before'))
  _one_of(c, 'value.head', ('scalar', 'categorical'))
  losses.dis(c.sao.eps_low, c.sao.eps_high)
  if not (0 < c.sao.clip_low <= 1 and c.sao.clip_high > 0):
    raise ValueError(
      f'sao.clip_low={c.sao.clip_low} must be in (0, 1] and sao.clip_high={c.sao.clip_high} above 0'
    )
  if not (c.value.low < c.value.high and c.value.sigma_ratio > 0):
    raise ValueError(
      f'value.low={c.value.low} must be below value.high={c.value.high}, and value.sigma_ratio='
      f'{c.value.sigma_ratio} above 0'
    )
  buckets = c.engine.prefill_buckets
  if not buckets or not all(1 <= bucket <= c.env.max_tokens for bucket in buckets):
    raise ValueError(
      f'engine.prefill_buckets={tuple(buckets)} must be lengths from 1 to env.max_tokens={c.env.max_tokens}'
    )
  if c.model.num_experts:
    raise ValueError(
      f'model.num_experts={c.model.num_experts}: this version trains dense decoders only; set it to 0'
    )
  if c.train.batch_size % c.train.group_size:
    raise ValueError(
      f'train.batch_size={c.train.batch_size} must be a multiple of train.group_size={c.train.group_size}'
    )
  uses_groups = c.sao.advantages in ('group_relative', 'leave_one_out')
  if uses_groups and c.train.group_size < 2:
    raise ValueError(
      f'sao.advantages={c.sao.advantages!r} compares episodes of one prompt: train.group_size='
      f'{c.train.group_size} must be at least 2'
    )
  if (c.sao.advantages == 'gae') != bool(c.sao.critic_updates):
    raise ValueError(
      f'sao.advantages={c.sao.advantages!r} with sao.critic_updates={c.sao.critic_updates}: gae needs a '
      'critic (at least 1), the others have none (0)'
    )
  if bool(c.sao.critic_updates) != bool(c.value.num_batches):
    raise ValueError(
      f'value.num_batches={c.value.num_batches} with sao.critic_updates={c.sao.critic_updates}: with a critic it '
      'must be at least 1, since the value head starts from the mean return of the first batch; without one, 0'
    )
  failures.check_deadlines(
    [
      ('sandbox.timeout_s', c.sandbox.timeout_s),
      ('runtime.episode_timeout_s', c.runtime.episode_timeout_s),
      ('runtime.stall_timeout_s', c.runtime.stall_timeout_s),
    ]
  )


def _one_of(c: ConfigDict, field: str, choices: tuple[str, ...]) -> None:
  section, name = field.split('.')
  if c[section][name] not in choices:
    raise ValueError(f'{field}={c[section][name]!r} must be one of {", ".join(choices)}')


def _model(c: ConfigDict) -> Model:
  shape = {key: value for key, value in c.model.items() if key != 'num_experts'}
  return transformer.make(vocab_size=tokens.VOCAB_SIZE, **shape)


def _adamw(name: str, section: ConfigDict, schedule=None) -> optax.GradientTransformation:
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


def _value_head(c: ConfigDict):
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


def _frozen(c: ConfigDict, policy_shapes: Any, head_init) -> tuple[Any, str]:
  """Tree of bools like the critic, True on frozen leaves, and the counts in words."""
  labels = transformer.partition(policy_shapes)
  is_frozen = jax.tree.map(lambda x: c.sao.freeze_attention and x == 'attention', labels)
  head = head_init(c.model.width, (c.value.low + c.value.high) / 2)
  counts = transformer.partition_counts(policy_shapes, labels)
  words = ', '.join(
    f'{label} {n} arrays of {size} parameters' for label, (n, size) in counts.items()
  )
  if not c.sao.freeze_attention:
    words = f'nothing of the critic is frozen ({words})'
  else:
    words = f'the critic trains the rest, attention is frozen ({words})'
  return {'backbone': is_frozen, 'head': jax.tree.map(lambda _: False, head)}, words


def _init_critic(c: ConfigDict, head_init, policy: Any, mean_return: float) -> Any:
  """The policy's own weights under a head whose value is the mean return (section 3.2 and the abstract)."""
  if not c.sao.critic_updates:
    return {}
  return {
    'backbone': jax.tree.map(jnp.copy, policy),
    'head': head_init(c.model.width, mean_return),
  }


def _objective(c: ConfigDict) -> learner.PolicyObjective:
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
  _one_of(c, 'sao.objective', tuple(objectives))
  return objectives[c.sao.objective]()


def _numbers(c: ConfigDict) -> learner.Numbers:
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
  )


def _baseline(c: ConfigDict) -> Baseline:
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


def _limits(c: ConfigDict) -> dispatch.Limits:
  return dispatch.Limits(
    seed=c.seed,
    batch_size=c.train.batch_size,
    group_size=c.train.group_size,
    capacity=admission.capacity(
      mode=c.runtime.mode,
      batch_size=c.train.batch_size,
      pipeline_depth=c.runtime.pipeline_depth,
      max_staleness=c.runtime.max_staleness,
    ),
    retries=c.runtime.retries,
    max_failures_in_row=c.runtime.max_failures_in_row,
    episode_timeout_s=c.runtime.episode_timeout_s,
    stall_timeout_s=c.runtime.stall_timeout_s,
  )
