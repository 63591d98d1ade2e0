"""pass@1 on a fixed list of problems."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sao_jax.runtime.failures import BackOff, RunFailed, may_retry, within
from sao_jax.types import EpisodeFailure, FailureKind, Task, Trajectory

MAX_UNJUDGED = 0.05  # share of problems that may be left out of a score


class Evaluation(NamedTuple):
  """The score, and every episode that it is made of."""

  pass_at_1: float  # mean over problems with a verdict of the mean reward of their episodes
  standard_error: float  # over problems; NaN for fewer than two
  failed: int  # episodes without a verdict; they are in no mean
  trajectories: tuple[Trajectory, ...]


async def evaluate(
  play: Callable[..., Awaitable[Trajectory]],
  tasks: Sequence[Task],
  *,
  name: str,
  samples: int,
  seed: int,
  concurrency: int,
  timeout_s: float,
  retries: Mapping[str, int],
  back_off: BackOff,
) -> Evaluation:
  """Plays `samples` episodes of every task.

  An episode that fails is played again, after a wait, as often as `retries` says for its kind of failure; after that it is counted in
  `failed` and left out, never scored 0.

  Args:
    play: (task, *, episode, group, seed) -> Trajectory.
    name: prefix of the episode ids, unique among what the engine plays.
    concurrency: episodes at once.
    timeout_s: of one episode.

  Raises:
    RunFailed: if more than MAX_UNJUDGED of the problems have no episode with a verdict: the mean of the others would be
      another measure.
    Exception: a bug in an episode, as it was raised there.
  """
  room = asyncio.Semaphore(concurrency)

  async def one(index: int, sample: int) -> Trajectory | EpisodeFailure:
    for attempt in itertools.count():
      entropy = [seed, index, sample, *([attempt] if attempt else [])]
      async with room:
        try:
          coroutine = play(
            tasks[index],
            episode=f'{name}-{index}-{sample}-{attempt}',
            group=str(index),
            seed=int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1),
          )
          trajectory = await within(timeout_s, coroutine)
          if np.isfinite(trajectory.reward):
            return trajectory
          failure = EpisodeFailure(FailureKind.GRADER, f'reward {trajectory.reward}')
        except TimeoutError:
          failure = EpisodeFailure(FailureKind.INFRA, f'no end within {timeout_s} s')
        except EpisodeFailure as error:
          failure = error
      if not may_retry(failure.kind, attempt + 1, retries):
        return failure
      await asyncio.sleep(back_off.seconds(attempt + 1, index))

  try:
    async with asyncio.TaskGroup() as group:
      futures = {
        (index, sample): group.create_task(one(index, sample))
        for index in range(len(tasks))
        for sample in range(samples)
      }
  except ExceptionGroup as bugs:  # the first one cancelled the other episodes
    raise bugs.exceptions[0] from None
  results = {key: future.result() for key, future in futures.items()}
  finished = {key: t for key, t in results.items() if isinstance(t, Trajectory)}
  scores, unjudged = [], 0
  for index, task in enumerate(tasks):
    rewards = [t.reward for (i, _), t in finished.items() if i == index]
    if rewards:
      scores.append(np.mean(rewards))
      continue
    unjudged += 1
    if unjudged > MAX_UNJUDGED * len(tasks):
      reason = next(r for (i, _), r in results.items() if i == index)
      raise RunFailed(
        f'evaluation: no episode of {task.prompt_id} has a verdict; the last: {reason!r}'
      )
  n = len(scores)
  error = float(np.std(scores, ddof=1) / np.sqrt(n)) if n > 1 else float('nan')
  return Evaluation(
    float(np.mean(scores)), error, len(results) - len(finished), tuple(finished.values())
  )
