"""Everything that a run is made of, from its config."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from sao_jax import learner, sharding
from sao_jax.build import checks, methods
from sao_jax.build.model import ModelParts, model_parts, not_exportable, state_shardings
from sao_jax.envs.prompts import (
  FixedPrompts,
  ProceduralPrompts,
  PromptSource,
  load_problems,
  split,
)
from sao_jax.learner import TrainState
from sao_jax.models import lora, transformer
from sao_jax.runtime import admission, dispatch, divergence, failures
from sao_jax.tokens import ChatFormat
from sao_jax.types import Task

LONGEST_DEMONSTRATION = 256  # tokens; longer rows would be mostly padding


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a run is made of, without anything that runs."""

  config: ConfigDict
  model: ModelParts
  learner: learner.Learner  # jitted; the state that goes in is donated
  supervised_update: Callable
  init_state: Callable[[Any, Any, Any], TrainState]  # (base, policy, critic) -> version 0
  init_critic: Callable[
    [Any, float], Any
  ]  # (policy or its adapters, mean return) -> critic params, {} without a critic
  state: TrainState  # shapes, dtypes and, on a mesh, shardings of what an update changes
  critic_tx: optax.GradientTransformation
  supervised_tx: optax.GradientTransformation
  baseline: methods.Baseline
  source: PromptSource
  practice: PromptSource  # problems with scripted demonstrations, for the warm start
  demonstration_tokens: int  # the longest that the warm start uses
  heldout: list[Task]
  limits: dispatch.Limits
  alarms: divergence.Alarms
  notes: tuple[str, ...]  # what a user should know before the run: what is frozen, what is held out

  def placed(self, state: TrainState) -> TrainState:
    """The state where the learner wants it."""
    if self.model.mesh is None:
      return state
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, self.state))


def parts(config: ConfigDict) -> Parts:
  """Checks the whole config and builds everything that has no side effect.

  Raises:
    ValueError: naming the field, its value and the remedy. Problem files raise ProblemFileError, which is one.
  """
  checks.check(config)
  model = model_parts(config)
  whole = jax.eval_shape(model.model.init, jax.random.key(0))
  base, policy = lora.split(whole) if config.model.lora_rank else ({}, whole)
  head_init, value_head = methods.value_head(config)
  init_critic = functools.partial(methods.init_critic, config, head_init, model.mesh)
  mean_return = (config.value.low + config.value.high) / 2
  critic = {}
  if config.sao.critic_updates:
    critic = {'backbone': policy, 'head': head_init(config.model.width, mean_return)}
  labels = transformer.partition(policy)
  policy_tx, held, words = methods.grouped('policy', config.policy, policy, labels)
  critic_tx, frozen, counts = optax.identity(), {}, 'no critic'
  if critic:
    labels = methods.critic_labels(labels, critic['head'])
    critic_tx, frozen, counts = methods.grouped('critic', config.critic, critic, labels)
  if config.policy.frozen:
    counts = f'{counts}; {words}'
  spread = learner.Spread(mesh=model.mesh, compression=config.train.compression)

  supervised_tx = _supervised_tx(config)
  practice, source, heldout, notes = _prompts(config, model.chat)
  if config.model.lora_rank and config.model.num_experts:
    notes = [*notes, 'WARNING: adapters are on the attention; experts and router do not train']
  reason = not_exportable(config, model.chat.vocab_size)
  if config.model.weights and reason:
    notes = [*notes, f'WARNING: experiments/export.py will not write this model: {reason}']
  limit = min(config.env.max_tokens, LONGEST_DEMONSTRATION)
  if model.mesh is not None:
    limit -= limit % model.mesh.shape['sequence']
  notes += _left_out(config, practice, limit)
  learns = learner.make_learner(
    model.model,
    value_head,
    methods.objective(config),
    policy_tx,
    critic_tx,
    (held, frozen),
    methods.numbers(config),
    spread,
  )
  init_errors = functools.partial(learner.init_errors, policy, critic, (held, frozen), spread)
  errors = jax.eval_shape(init_errors)
  fresh = functools.partial(learner.init_state, policy_tx=policy_tx, critic_tx=critic_tx)
  state = jax.eval_shape(fresh, base, policy, critic, errors=errors)
  if model.mesh is not None:
    state = sharding.with_shardings(state, state_shardings(config, state, model.mesh))

  def init_state(base, policy, critic):
    where = jax.tree.map(lambda x: x.sharding, state.errors)  # whole they would fit on no device
    return fresh(base, policy, critic, errors=jax.jit(init_errors, out_shardings=where)())

  return Parts(
    config=config,
    model=model,
    learner=learner.Learner(*(_jitted(function, state, model.mesh) for function in learns)),
    supervised_update=learner.make_supervised_update(
      model.model, supervised_tx, chunk=config.train.logprob_chunk, mesh=model.mesh
    ),
    init_state=init_state,
    init_critic=init_critic,
    state=state,
    critic_tx=critic_tx,
    supervised_tx=supervised_tx,
    baseline=methods.baseline(config),
    source=source,
    practice=practice,
    demonstration_tokens=limit,
    heldout=heldout,
    limits=_limits(config),
    alarms=divergence.Alarms(
      max_skipped_in_row=config.train.max_skipped_in_row,
      max_k3=config.train.max_k3,
      reward_fall=config.train.reward_fall,
      reward_window=config.train.reward_window,
    ),
    notes=(counts, *notes),
  )


def _supervised_tx(c: ConfigDict) -> optax.GradientTransformation:
  """The policy's AdamW at the warm start's rate, which falls to a tenth along a cosine."""
  rate, warmup = c.supervised.learning_rate, c.supervised.warmup_steps
  section = ConfigDict({**c.policy, 'learning_rate': rate, 'warmup_steps': warmup})
  steps = max(c.supervised.num_steps, warmup + 1)
  schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, steps, 0.1 * rate)
  return methods.adamw('supervised', section, schedule)


def _jitted(update: Callable, state: TrainState, mesh: Mesh | None) -> Callable:
  """The state that goes in is donated. On a mesh it comes back where it was; optimisers on the host visit the device."""
  if mesh is None:
    return jax.jit(update, donate_argnums=0)
  kept = jax.tree.map(lambda x: x.sharding, state)
  at_work = jax.tree.map(lambda s: s.with_memory_kind(None), kept)
  rows = sharding.rows(mesh, 2)

  def visit(state, batch):
    return update(jax.device_put(state, at_work), batch)

  return jax.jit(
    visit,
    donate_argnums=0,
    in_shardings=(kept, rows),
    out_shardings=(kept, sharding.everywhere(mesh)),
  )


def _prompts(
  c: ConfigDict, chat: ChatFormat
) -> tuple[PromptSource, PromptSource, list[Task], list[str]]:
  """(problems with demonstrations, problems of RL, held-out problems, notes)."""
  procedural = ProceduralPrompts(
    seed=c.seed,
    kinds=dict.fromkeys(c.data.kinds, 1.0),
    levels=dict.fromkeys(c.data.levels, 1.0),
  )
  n = c.evaluation.num_problems
  if not (c.data.path or c.data.heldout_path):
    heldout = procedural.heldout(n)
    checks.check_prompts(heldout, c, chat)
    return procedural, procedural, heldout, []
  notes, source, heldout = [], procedural, []
  if c.data.heldout_path:
    heldout = load_problems(c.data.heldout_path)
  if c.data.path:
    trained = load_problems(c.data.path)
    if not c.data.heldout_path:
      trained, heldout = split(trained)
      if not (trained and heldout):
        raise ValueError(
          f'data.path={c.data.path} has too few problems to hold some out: name others in data.heldout_path'
        )
      notes.append(f'{len(heldout)} of the problems of {c.data.path} are held out from training')
    both = {t.question for t in trained} & {t.question for t in heldout}
    if both:
      notes.append(
        f'WARNING: {len(both)} of the {len(heldout)} held-out questions are trained on as well'
      )
    checks.check_prompts(trained, c, chat)
    source = FixedPrompts(trained, seed=c.seed)
  checks.check_prompts(heldout, c, chat)
  return procedural, source, heldout[:n], notes


def _left_out(c: ConfigDict, practice: PromptSource, limit: int) -> list[str]:
  """A note if some demonstrations are too long for the warm start."""
  if not c.supervised.num_steps or c.supervised.workdir:
    return []
  sample = range(200)
  long = sum(len(methods.demonstrate(c, practice, index).tokens) > limit for index in sample)
  if not long:
    return []
  return [
    f'WARNING: about {long / len(sample):.1%} of the demonstrations have over {limit} tokens and are left out'
  ]


def _limits(c: ConfigDict) -> dispatch.Limits:
  return dispatch.Limits(
    seed=c.seed,
    group_size=c.train.group_size,
    capacity=admission.capacity(
      mode=c.runtime.mode,
      batch_size=c.train.batch_size,
      pipeline_depth=c.runtime.pipeline_depth,
      max_staleness=c.runtime.max_staleness,
    ),
    consume=c.runtime.consume,
    late=c.runtime.late,
    max_staleness=c.runtime.max_staleness,
    retries=c.runtime.retries.to_dict(),
    back_off=failures.BackOff(c.runtime.back_off_s, c.runtime.max_back_off_s),
    max_failures_in_row=c.runtime.max_failures_in_row,
    breaker_cooldown_s=c.runtime.breaker_cooldown_s,
    breaker_openings=c.runtime.breaker_openings,
    episode_timeout_s=c.runtime.episode_timeout_s,
    stall_timeout_s=c.runtime.stall_timeout_s,
  )
