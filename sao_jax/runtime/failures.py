"""What happens after a failure, and the deadlines that keep every wait finite.

kind    who is at fault                            reaction
infra   engine, process, machine, a deadline       the prompt is issued again, after a back-off
env     the environment or its sandbox             the same
grader  the answer could not be judged             the answer is held and judged again; then as env
data    the task itself is broken                  no retry; the prompt goes to quarantine
agent   what the environment cannot represent      no retry
stale   older than the bound, where late is drop   dropped
bug     ours, an exception of another type         ends the run

Many in a row of any kind, in one environment, open its breaker.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.types import EpisodeFailure, FailureKind

CLEAN_UP_S = 10.0  # after each of two cancellations; what still runs then is left behind


class RunFailed(Exception):
  """The run cannot go on. The message is the last line that the user reads; the exit code is 3."""


def may_retry(kind: FailureKind, attempts: int, budgets: Mapping[str, int]) -> bool:
  """Whether the prompt is issued again after its `attempts`-th episode failed; never for a kind without a budget."""
  return attempts <= budgets.get(kind.value, 0)


@dataclasses.dataclass(frozen=True)
class BackOff:
  """Waits that double from `base_s` up to `cap_s`, each shortened by up to a half so that retries spread."""

  base_s: float
  cap_s: float

  def seconds(self, failures: int, seed: int) -> float:
    """The wait after `failures` >= 1 attempts; a function of its arguments."""
    share = np.random.default_rng([seed, failures]).uniform(0.5, 1.0)
    return float(share * min(self.base_s * 2.0 ** (failures - 1), self.cap_s))


def holding(
  call: Callable[..., Awaitable[Any]], kind: FailureKind, retries: int, back_off: BackOff
) -> Callable[..., Awaitable[Any]]:
  """`call`, made again after a failure of this kind: an outage of the grader holds an episode and does not lose it."""

  async def held(*args: Any) -> Any:
    for attempt in itertools.count(1):
      try:
        return await call(*args)
      except EpisodeFailure as failure:
        if failure.kind is not kind or attempt > retries:
          raise
      await asyncio.sleep(back_off.seconds(attempt, seed=0))

  return held


async def within(seconds: float, work: Coroutine) -> Any:
  """The result of `work`, cancelled if it does not end in time. Unlike asyncio.wait_for it also ends if the cleaning up hangs.

  Raises:
    TimeoutError: it took longer, whatever it made of its cancellation.
    EpisodeFailure: ENV, it was cancelled from within.
  """
  task = asyncio.create_task(work)
  try:
    await asyncio.wait({task}, timeout=seconds)
    if task.cancelled():  # not by us: an await in it was
      raise EpisodeFailure(FailureKind.ENV, 'it was cancelled from within')
    if task.done():
      return task.result()
  finally:
    for _ in range(2):  # the second ends a clean-up that hangs
      if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CLEAN_UP_S)
    if task.done() and not task.cancelled():
      task.exception()  # seen; the caller is told of the time
  raise TimeoutError


def check_deadlines(deadlines: Sequence[tuple[str, float]]) -> None:
  """Deadlines are given from the inside out; each must end before the next gives up.

  Raises:
    ValueError: naming the two fields.
  """
  for (inner, short), (outer, long) in itertools.pairwise(deadlines):
    if not 0 < short < long:
      raise ValueError(
        f'{inner}={short} s must be above 0 and below {outer}={long} s: lower the first or raise the second'
      )


@dataclasses.dataclass
class Breaker:
  """Of one environment. After too many failures in a row the fault is not in the episodes: the breaker opens.

  Open, it holds new episodes for `cooldown_s`, then lets a single one try. Success closes it; a failure opens it again for
  twice as long. The opening after `max_openings` ends the run.
  """

  limit: int  # failures in a row that open it
  cooldown_s: float
  max_openings: int
  in_row: int = 0
  openings: int = 0
  open_until: float | None = None  # of the loop's time; None: it lets everything through
  trying: str | None = None  # the episode that is let through

  def wait(self, now: float, episode: str) -> float:
    """Seconds that an episode must wait before it asks again; 0: it may start."""
    if self.open_until is None:
      return 0.0
    if now >= self.open_until and self.trying is None:
      self.trying = episode
      return 0.0
    return max(self.open_until - now, self.cooldown_s)

  def saved(self, now: float) -> dict[str, Any]:
    """For a checkpoint. Another process has another time, and the episode that tries is lost with this one."""
    left = None if self.open_until is None else max(self.open_until - now, 0.0)
    return {**dataclasses.asdict(self), 'open_until': left, 'trying': None}

  @classmethod
  def restored(cls, saved: Mapping[str, Any], now: float) -> 'Breaker':
    left = saved['open_until']
    return cls(**{**saved, 'open_until': None if left is None else now + left})

  def success(self) -> None:
    self.in_row, self.openings, self.open_until, self.trying = 0, 0, None, None

  def failure(self, now: float, episode: str, message: str) -> None:
    """Counts one. While the breaker is open only the episode that tries matters: others may be from before it opened.

    Raises:
      RunFailed: it opened too often, with the last failure.
    """
    self.in_row += 1
    if self.in_row < self.limit or (self.open_until is not None and self.trying != episode):
      return
    self.openings, self.trying = self.openings + 1, None
    if self.openings > self.max_openings:
      raise RunFailed(f'{self.in_row} episodes failed in a row; the last: {message}')
    self.open_until = now + self.cooldown_s * 2.0 ** (self.openings - 1)
