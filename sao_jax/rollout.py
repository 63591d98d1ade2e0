"""One episode: environment and engine in, trajectory out."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.batching import check_answer
from sao_jax.types import (
  Engine,
  Env,
  EpisodeFailure,
  FailureKind,
  FinishReason,
  Generation,
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
  vocab_size: int,
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
    vocab_size: token ids are below it.
    at: told what the episode waits for from now on: 'the environment' or 'the engine'.

  Raises:
    EpisodeFailure: from the environment or the engine; INFRA and ENV for answers that are none. No reward and no data then.
  """
  record = _Recorder()
  turn_index = 0
  try:
    at('the environment')
    turn = check_answer(await env.reset(task), first=True)
    while True:
      if len(record.tokens) + len(turn.tokens) >= max_tokens:
        if turn_index == 0:
          raise EpisodeFailure(
            FailureKind.DATA,
            f'the prompt of {task.prompt_id} has {len(turn.tokens)} tokens, and an episode {max_tokens}',
          )
        outcome = check_answer(env.cut())
        break
      if turn.tokens.max() >= vocab_size:
        message = f'the environment answered token {turn.tokens.max()}, of {vocab_size}'
        raise EpisodeFailure(FailureKind.ENV, message)
      record.observe(turn.tokens)
      at('the engine')
      request = Request(
        episode=episode,
        tokens=np.asarray(record.tokens, np.int32),
        max_new_tokens=min(max_turn_tokens, max_tokens - len(record.tokens)),
        temperature=temperature,
        seed=seed,
      )
      generation = _check_generation(await engine.generate(request), request, vocab_size)
      record.act(generation, turn_index)
      if generation.finish_reason is not FinishReason.STOP:
        outcome = check_answer(env.cut())
        break
      at('the environment')
      result = check_answer(await env.step(generation.tokens))
      if isinstance(result, Outcome):
        outcome = result
        break
      turn, turn_index = result, turn_index + 1
  finally:
    engine.release(episode)
    await env.close()
  return _finish(record, outcome, task, episode, group)


def _check_generation(answer: Any, request: Request, vocab_size: int) -> Generation:
  """The answer of an engine, which may be far away. Raises EpisodeFailure INFRA if it cannot be used."""
  wrong = None
  if not isinstance(answer, Generation):
    wrong = f'with a {type(answer).__name__}'
  elif answer.finish_reason is FinishReason.ABORTED:
    raise EpisodeFailure(FailureKind.INFRA, 'the engine aborted the generation')
  else:
    tokens, logprobs = np.asarray(answer.tokens), np.asarray(answer.behavior_logprobs)
    count = sum(n for _, n in answer.version_spans)
    if not (tokens.shape == logprobs.shape == (count,)):
      wrong = f'with {tokens.shape} tokens, {logprobs.shape} log-probabilities, {count} versions'
    elif not 1 <= count <= request.max_new_tokens:
      wrong = f'with {count} tokens, of {request.max_new_tokens} at most'
    elif tokens.dtype.kind not in 'iu' or not 0 <= tokens.min() <= tokens.max() < vocab_size:
      wrong = f'with a token that is no id below {vocab_size}'
    elif not (np.isfinite(logprobs) & (logprobs <= 0)).all():
      wrong = 'with a log-probability that is not finite or above 0'
    elif min(version for version, _ in answer.version_spans) < 0:
      wrong = 'with a token of no version'
  if wrong:
    raise EpisodeFailure(FailureKind.INFRA, f'the engine answered {wrong}')
  return answer


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
