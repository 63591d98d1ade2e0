"""One episode: environment and engine in, trajectory out."""

from collections.abc import Callable

import numpy as np

from sao_jax.types import (
  Engine,
  Env,
  EpisodeFailure,
  FailureKind,
  FinishReason,
  Outcome,
  Request,
  Task,
  Trajectory,
)


class _Recorder:
  """Token-aligned lists that grow together."""

  def __init__(self):
    self.tokens, self.mask, self.logprobs, self.versions, self.turn_ids = [], [], [], [], []

  def observe(self, tokens: np.ndarray) -> None:
    n = len(tokens)
    self.tokens.extend(int(token) for token in tokens)
    self.mask.extend([False] * n)
    self.logprobs.extend([0.0] * n)
    self.versions.extend([-1] * n)
    self.turn_ids.extend([-1] * n)

  def act(self, generation, turn: int) -> None:
    n = len(generation.tokens)
    self.tokens.extend(int(token) for token in generation.tokens)
    self.mask.extend([True] * n)
    self.logprobs.extend(float(x) for x in generation.behavior_logprobs)
    self.versions.extend(int(v) for v in generation.versions())
    self.turn_ids.extend([turn] * n)


async def run_episode(
  env: Env,
  engine: Engine,
  task: Task,
  *,
  episode: str,
  group: str,
  seed: int,
  temperature: float,
  max_turn_tokens: int,
  max_tokens: int,
  at: Callable[[str], None],
) -> Trajectory:
  """Plays one episode to its end and returns it token by token.

  A turn that is cut by a budget before the agent ended it ends the episode as truncated, with the reward
  that it has earned (`Env.cut`): the policy caused it, so it is data. The
  observation that would not leave room for an answer is not appended.

  Args:
    seed: of the episode; with the position it decides every sampled token.
    temperature: of sampling, > 0.
    max_turn_tokens: sampled tokens a turn.
    max_tokens: tokens of the whole episode, prompt and observations included.
    at: told what the episode waits for from now on: 'the environment' or 'the engine'.

  Raises:
    EpisodeFailure: from the environment or the engine. No reward and no data then.
  """
  record = _Recorder()
  turn_index = 0
  try:
    at('the environment')
    turn = await env.reset(task)
    while True:
      if len(record.tokens) + len(turn.tokens) >= max_tokens:
        if turn_index == 0:
          raise EpisodeFailure(
            FailureKind.DATA,
            f'the prompt of {task.prompt_id} has {len(turn.tokens)} tokens, and an episode {max_tokens}',
          )
        outcome = env.cut()
        break
      record.observe(turn.tokens)
      at('the engine')
      generation = await engine.generate(
        Request(
          episode=episode,
          tokens=np.asarray(record.tokens, np.int32),
          max_new_tokens=min(max_turn_tokens, max_tokens - len(record.tokens)),
          temperature=temperature,
          seed=seed,
        )
      )
      if generation.finish_reason is FinishReason.ABORTED:
        raise EpisodeFailure(FailureKind.INFRA, 'the engine aborted the generation')
      record.act(generation, turn_index)
      if generation.finish_reason is not FinishReason.STOP:
        outcome = env.cut()
        break
      at('the environment')
      result = await env.step(generation.tokens)
      if isinstance(result, Outcome):
        outcome = result
        break
      turn, turn_index = result, turn_index + 1
  finally:
    engine.release(episode)
    await env.close()
  return _finish(record, outcome, task, episode, group)


def _finish(record, outcome: Outcome, task: Task, episode: str, group: str) -> Trajectory:
  mask = np.asarray(record.mask, bool)
  rewards = np.zeros(len(mask), np.float32)
  # A missing reward becomes NaN here and is refused by `check_trajectory`; it is never 0.
  rewards[np.flatnonzero(mask)[-1]] = np.nan if outcome.reward is None else outcome.reward
  return Trajectory(
    episode=episode,
    prompt_id=task.prompt_id,
    group=group,
    tokens=np.asarray(record.tokens, np.int32),
    mask=mask,
    behavior_logprobs=np.asarray(record.logprobs, np.float32),
    versions=np.asarray(record.versions, np.int32),
    rewards=rewards,
    turn_ids=np.asarray(record.turn_ids, np.int32),
    terminated=outcome.terminated,
    truncated=outcome.truncated,
    stop_reason=outcome.stop_reason,
    info={**task.info, **outcome.info},
  )
