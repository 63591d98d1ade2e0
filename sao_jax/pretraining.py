"""The learner of a run: how its work is done, its first state, and value pretraining."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import numpy as np

from sao_jax import build, loop
from sao_jax.learner import TrainState
from sao_jax.models import lora
from sao_jax.report.screen import Screen
from sao_jax.runtime import watchdog
from sao_jax.runtime.crew import ALONE, Crew
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.logical import LogicalWork
from sao_jax.types import Trajectory


def make_work(parts: build.Parts, waits: watchdog.Waits) -> Callable[..., Awaitable[Any]]:
  """How the learner's work is done beside the event loop: (what, function, *args) -> its result."""
  c = parts.config
  seconds = c.runtime.stall_timeout_s
  if c.runtime.mode == 'deterministic':
    update = c.runtime.logical.update_s
    quick = (loop.CHECKPOINT, loop.SUPERVISED_STEP, loop.PUBLICATION)
    takes = {loop.UPDATE: update, loop.CRITIC_UPDATE: update, **dict.fromkeys(quick, 0.0)}
    return LogicalWork(takes, seconds)

  async def work(what: str, function: Callable, *args: Any) -> Any:
    waits.begin('learner', what)
    try:
      return await watchdog.bounded(what, seconds, function, *args, waits=waits)
    finally:
      waits.end('learner')

  return work


def fresh_state(parts: build.Parts, params: Any) -> TrainState:
  """At version 0, from the whole parameters, which are the learner's to donate from now on. Value pretraining gives the critic its head."""
  c = parts.config
  base, policy = lora.split(params) if c.model.lora_rank else ({}, params)
  critic = parts.init_critic(policy, (c.value.low + c.value.high) / 2)
  return parts.placed(parts.init_state(base, policy, critic))


def with_value_head(parts: build.Parts, state: TrainState, mean_return: float) -> TrainState:
  """The critic anew, with a head whose value is the mean return. The one before is deleted: there may be room for one."""
  jax.tree.map(lambda x: x.delete(), (state.critic, state.critic_opt))
  critic = parts.init_critic(state.policy, mean_return)
  return parts.placed(state.replace(critic=critic, critic_opt=parts.critic_tx.init(critic)))


def export(parts: build.Parts, crew: Crew, state: TrainState) -> Any:
  """A copy of the policy as engines take it; None in a follower."""
  crew.tell('export')
  return parts.model.export(state)


def make_learning(
  parts: build.Parts, work, engine, journal, memory: Any, crew: Crew = ALONE
) -> loop.Learning:
  c = parts.config
  return loop.Learning(
    learner=parts.learner,
    work=work,
    engine=engine,
    export=functools.partial(export, parts, crew),
    place=parts.model.place,
    launch=parts.model.launch,
    journal=journal,
    baseline=parts.baseline,
    max_staleness=c.runtime.max_staleness,
    row_length=c.env.max_tokens,
    row_multiple=c.train.micro_rows * c.sao.policy_minibatches,
    memory=memory,
    crew=crew,
  )


async def pretrain_values(
  run: loop.Run, parts: build.Parts, state: TrainState, screen: Screen
) -> TrainState:
  """Trains the critic alone on rollouts of the warm start, and reports the explained variance that it has on
  each batch before learning from it."""
  c, unseen = parts.config, []
  for index in range(c.value.num_batches):
    trajectories = await loop.take(run, in_order=True)
    state, metrics = await learn_values(run.learning, parts, state, trajectories, index)
    unseen.append(metrics['critic/explained_variance'])
    run.dispatcher.trained(trajectories, version=0, reason='value_pretraining')
    reward = float(np.mean([t.reward for t in trajectories]))
    run.show(
      'value pretraining', index + 1, c.value.num_batches, {**metrics, 'reward/mean': reward}
    )
  run.dispatcher.totals()  # these episodes are no update's
  if unseen:
    run.writer.write(0, {'value/explained_variance': unseen})
    screen.note(
      'value pretraining: explained variance of each batch, before the critic learned from it: '
      + ' '.join(f'{value:.2f}' for value in unseen)
    )
  return state


async def learn_values(
  learning: loop.Learning,
  parts: build.Parts,
  state: TrainState,
  trajectories: list[Trajectory],
  index: int,
) -> tuple[TrainState, dict[str, float]]:
  """The critic's updates on one batch; the metrics are those before them. The first batch gives the head its bias.

  Raises:
    RunFailed: an update was not finite.
  """
  first = None
  if index == 0:
    mean_return = float(np.mean([t.reward for t in trajectories]))
    learning.crew.tell('value head', mean_return)
    state = with_value_head(parts, state, mean_return)
  batch = loop.prepare(learning, trajectories, 0)
  for _ in range(parts.config.value.updates_per_batch):
    state, metrics, digest = await learning.work(
      loop.CRITIC_UPDATE, loop.update_once, learning, 'update_critic', state, batch
    )
    if metrics['updates/skipped_now']:
      raise RunFailed('value pretraining: an update was not finite; lower critic.learning_rate')
    first = first or metrics
  if digest:
    await learning.journal.updated(0, digest)
  return state, first
