"""Keeps episodes in flight and hands out the finished ones, oldest started first."""

import asyncio
import dataclasses
import heapq
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from sao_jax.batching import check_trajectory
from sao_jax.runtime.failures import Breaker, RunFailed, may_retry
from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.types import EpisodeFailure, FailureKind, Task, Trajectory

Play = Callable[..., Awaitable[Trajectory]]  # (task, *, episode, group, seed) -> Trajectory


@dataclasses.dataclass(frozen=True)
class Limits:
  """Numbers of the runtime; see configs/ for what they mean."""

  seed: int
  group_size: int
  capacity: int  # episodes in the system; see admission.capacity
  retries: int  # further episodes of a prompt after a failure that is not the agent's
  max_failures_in_row: int
  episode_timeout_s: float
  stall_timeout_s: float  # no episode changes its state for so long: the run fails


@dataclasses.dataclass
class _Group:
  """The episodes of one prompt, which are used together."""

  index: int  # the cursor of the prompt: the order of starting
  finished: list[Trajectory] = dataclasses.field(default_factory=list)
  issued: dict[str, int] = dataclasses.field(default_factory=dict)  # member -> episodes so far
  failures: dict[str, int] = dataclasses.field(default_factory=dict)  # member -> failed ones
  dead: bool = False  # a member failed for good: the others are dropped


@dataclasses.dataclass
class _Totals:
  """Sums over the episodes that finished since the last read."""

  episodes: int = 0
  reward: float = 0.0
  length: float = 0.0


class Dispatcher:
  """Starts episodes as far as admission allows; a finished group waits until it is taken.

  All methods run in one asyncio loop; nothing here blocks it.
  """

  def __init__(
    self,
    play: Play,
    task_at: Callable[[int], Task],
    ledger: Ledger,
    limits: Limits,
    *,
    episodes_needed: int,
    version: int,
    snapshot: dict[str, Any] | None = None,
    trajectories: Sequence[Trajectory] = (),
  ):
    """`episodes_needed`: that the run will still train on; no more are started. `version`: of
    the policy, for the log. `snapshot` and `trajectories` as `snapshot()` gave them: finished episodes are kept, unfinished
    prompts are issued again under new ids."""
    self._play, self._task_at, self._ledger, self._limits = play, task_at, ledger, limits
    self._needed, self.version = episodes_needed, version
    self._breaker = Breaker(limits.max_failures_in_row)
    self._groups: dict[int, _Group] = {}
    self._ready: list[int] = []
    self._running: dict[str, asyncio.Task] = {}
    self._changed = asyncio.Event()
    self._error: Exception | None = None
    self._totals = _Totals()
    self._next = 0
    self._closed = False
    if snapshot is not None:
      self._restore(snapshot, trajectories)

  def fill(self) -> None:
    """Starts episodes until the system is full. Called again whenever room may have appeared."""
    size = self._limits.group_size
    if self._closed or self._error is not None:
      return
    while self._ledger.in_system() + size <= min(self._limits.capacity, self._needed):
      group = _Group(self._next)
      self._groups[self._next] = group
      self._next += 1
      for member in range(size):
        self._start(group, str(member), 'pending', None)

  async def take(self, episodes: int, *, in_order: bool = False) -> list[Trajectory]:
    """Waits for that many finished episodes and removes those that started first.

    Args:
      episodes: a multiple of the group size.
      in_order: wait for those that started first of all, finished or not. Slower, and free of the bias to
        short episodes that the first batches otherwise have, when nothing long has finished yet.

    Raises:
      RunFailed: nothing happened for `stall_timeout_s`, or too many episodes failed in a row.
      Exception: a bug in an episode, as it was raised there.
    """
    self.fill()
    count = episodes // self._limits.group_size
    while self._error is None and not self._enough(count, in_order):
      self._changed.clear()
      try:
        # Not wait_for: on Python 3.11 it swallows a cancellation that comes with the event.
        async with asyncio.timeout(self._limits.stall_timeout_s):
          await self._changed.wait()
      except TimeoutError:
        raise RunFailed(self._stalled(episodes)) from None
    if self._error is not None:
      raise self._error
    taken = [self._groups.pop(heapq.heappop(self._ready)) for _ in range(count)]
    return [trajectory for group in taken for trajectory in group.finished]

  def _enough(self, count: int, in_order: bool) -> bool:
    wanted = sorted(self._groups)[:count] if in_order else self._ready
    return len(wanted) >= count and set(wanted) <= set(self._ready)

  def trained(
    self, trajectories: Sequence[Trajectory], *, version: int, reason: str | None = None
  ) -> None:
    """The update that used them is published as `version`: their room is free."""
    self.version = version
    for trajectory in trajectories:
      self._ledger.record(trajectory.episode, 'trained', version=self.version, reason=reason)
    self._needed -= len(trajectories)
    self._ledger.check()
    self._ledger.flush()
    self.fill()

  def totals(self) -> _Totals:
    """Sums over episodes that finished since the last call, whether used or not."""
    totals, self._totals = self._totals, _Totals()
    return totals

  def fail(self, error: Exception) -> None:
    """Ends the run: `take` raises the first error that it is told, here or by an episode."""
    self._error = self._error or error
    self._changed.set()

  def snapshot(self) -> tuple[dict[str, Any], list[Trajectory]]:
    """What a checkpoint needs to go on from here, and the finished episodes that no update has used."""
    # Copies: a checkpoint is written beside episodes that go on.
    groups = [
      {'index': g.index, 'issued': {**g.issued}, 'failures': {**g.failures}, 'dead': g.dead}
      for g in self._groups.values()
    ]
    finished = [t for g in self._groups.values() for t in g.finished]
    totals = dataclasses.asdict(self._totals)
    return {
      'next': self._next,
      'needed': self._needed,
      'groups': groups,
      'totals': totals,
    }, finished

  async def close(self, reason: str) -> None:
    """Cancels what runs, waits until it is gone, and ends every open episode in the log."""
    self._closed = True
    running = list(self._running.values())
    for task in running:
      task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for episode in list(self._ledger.states):
      self._ledger.record(episode, 'cancelled', version=self.version, reason=reason)
    self._ledger.check()

  def _restore(self, snapshot, trajectories) -> None:
    self._next, self._needed = snapshot['next'], snapshot['needed']
    self._totals = _Totals(**snapshot['totals'])
    for saved in snapshot['groups']:
      self._groups[saved['index']] = _Group(**{**saved, 'finished': []})
    for trajectory in trajectories:
      self._groups[int(trajectory.group)].finished.append(trajectory)
    done = {t.episode for t in trajectories}
    for episode in [e for e in self._ledger.states if e not in done]:
      self._ledger.record(episode, 'cancelled', version=self.version, reason='restart')
      index, member, _ = episode.split('-')
      if int(index) not in self._groups:
        raise LedgerError(f'episode {episode} is open in the log and unknown to the checkpoint')
      if not self._groups[int(index)].dead:
        self._start(self._groups[int(index)], member, 'reissued', 'restart')
    for group in list(self._groups.values()):
      self._settle(group)

  def _start(self, group: _Group, member: str, event: str, reason: str | None) -> None:
    """Issues one episode of a prompt: `pending` the first time, `reissued` after a failure or a restart."""
    number = group.issued.get(member, 0)
    group.issued[member] = number + 1
    episode = f'{group.index:06d}-{member}-{number}'
    task = self._task_at(group.index)
    self._ledger.record(episode, event, version=self.version, prompt=task.prompt_id, reason=reason)
    coroutine = self._guarded(group, member, episode, task)
    self._running[episode] = asyncio.create_task(coroutine, name=episode)

  async def _guarded(self, *episode) -> None:
    """Whatever goes wrong in running or recording an episode ends the run."""
    try:
      await self._run(*episode)
    except Exception as error:  # e.g. a full disk under the log
      self.fail(error)

  async def _run(self, group: _Group, member: str, episode: str, task: Task) -> None:
    failures = group.failures.get(member, 0)
    entropy = [self._limits.seed, group.index, int(member), failures]
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
    try:
      if failures:
        await asyncio.sleep(min(0.1 * 2**failures, 5.0))
      self._ledger.record(episode, 'running', version=self.version)
      trajectory = await asyncio.wait_for(
        self._play(task, episode=episode, group=str(group.index), seed=seed),
        self._limits.episode_timeout_s,
      )
      if not np.isfinite(trajectory.reward):
        raise EpisodeFailure(
          FailureKind.GRADER, f'reward {trajectory.reward} is not a finite number'
        )
      check_trajectory(trajectory)
      self._ledger.record(episode, 'finished', version=self.version)
      self._breaker.success()
      self._totals.episodes += 1
      self._totals.reward += trajectory.reward
      self._totals.length += trajectory.num_actions
      group.finished.append(trajectory)
    except TimeoutError:
      message = f'no end within {self._limits.episode_timeout_s} s'
      self._failed(group, member, episode, EpisodeFailure(FailureKind.INFRA, message))
    except EpisodeFailure as failure:
      self._failed(group, member, episode, failure)
    except Exception as error:
      self.fail(error)
      self._failed(group, member, episode, EpisodeFailure(FailureKind.BUG, repr(error)))
    finally:
      self._running.pop(episode, None)
      self._settle(group)
      self._changed.set()

  def _failed(self, group, member: str, episode: str, failure: EpisodeFailure) -> None:
    """Ends the episode without data, and issues its prompt again where that can help."""
    self._ledger.record(episode, 'failed', version=self.version, reason=str(failure.kind))
    group.failures[member] = group.failures.get(member, 0) + 1
    if may_retry(failure.kind, group.failures[member], self._limits.retries):
      self._start(group, member, 'reissued', str(failure.kind))
    else:
      group.dead = True
    try:
      self._breaker.failure(str(failure))
    except RunFailed as error:
      self.fail(error)

  def _settle(self, group: _Group) -> None:
    """A complete group becomes ready; what is left of a dead one is dropped, and its room used again."""
    if group.dead:
      for trajectory in group.finished:
        self._ledger.record(
          trajectory.episode, 'dropped', version=self.version, reason='group_incomplete'
        )
      group.finished.clear()
      if not any(int(e.split('-')[0]) == group.index for e in self._running):
        self._groups.pop(group.index, None)
      self.fill()
    elif len(group.finished) == self._limits.group_size and group.index not in self._ready:
      group.finished.sort(key=lambda t: t.episode)
      heapq.heappush(self._ready, group.index)

  def _stalled(self, episodes: int) -> str:
    ready = len(self._ready) * self._limits.group_size
    oldest = min(self._running, default='none')
    return (
      f'nothing happened for {self._limits.stall_timeout_s} s: the learner waits for {episodes} episodes '
      f'and has {ready}; {len(self._running)} are running, the oldest is {oldest}'
    )
