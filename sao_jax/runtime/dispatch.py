"""Keeps episodes in flight and hands out the finished ones, oldest started first."""

import asyncio
import dataclasses
import heapq
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.batching import check_trajectory, fingerprint
from sao_jax.runtime.failures import BackOff, Breaker, RunFailed, may_retry, within
from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.runtime.watchdog import Waits
from sao_jax.types import EpisodeFailure, FailureKind, Task, Trajectory

Play = Callable[..., Awaitable[Trajectory]]  # (task, *, episode, group, seed) -> Trajectory
Journal = Callable[[dict[str, Any]], None]  # a line of what a replay needs

QUARANTINE_AFTER = 2  # visits of a prompt whose episodes all failed; at once if the task is broken
_MOST_SKIPPED = 100_000  # prompts in a row that are in quarantine
_MOST_LATE = 10  # times the capacity, in a row


@dataclasses.dataclass(frozen=True)
class Limits:
  """Numbers of the runtime; see configs/ for what they mean."""

  seed: int
  group_size: int
  capacity: int  # episodes in the system; see admission.capacity
  consume: str  # 'oldest_started', or 'completion' order, under which long episodes are staler
  late: str  # 'mask', or 'drop' an episode with a token beyond max_staleness, which prefers short ones too
  max_staleness: int
  retries: Mapping[str, int]  # kind of failure -> further episodes of a prompt after it
  back_off: BackOff
  max_failures_in_row: int  # of one environment, see Breaker
  breaker_cooldown_s: float
  breaker_openings: int
  episode_timeout_s: float
  stall_timeout_s: float  # no episode changes its state for so long: the run fails


@dataclasses.dataclass
class _Group:
  """The episodes of one prompt, which are used together."""

  index: int  # the cursor of the prompt: the order of starting
  task: Task
  finished: list[Trajectory] = dataclasses.field(default_factory=list)
  issued: dict[str, int] = dataclasses.field(default_factory=dict)  # member -> episodes so far
  failures: dict[str, int] = dataclasses.field(default_factory=dict)  # member -> failed ones
  dead: bool = False  # a member failed for good: the others are dropped
  running: int = 0
  ready: bool = False


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
    waits: Waits,
    *,
    episodes_needed: int,
    version: int,
    snapshot: dict[str, Any] | None = None,
    trajectories: Sequence[Trajectory] = (),
    journal: Journal | None = None,
    forsake_below: int | None = None,
  ):
    """Binds the parts; nothing starts before `fill` or `take`.

    Args:
      play: plays one episode.
      task_at: the prompt at an index.
      waits: where an episode tells what it waits for.
      episodes_needed: that the run will still train on; no more are started.
      version: of the policy, for the log.
      snapshot, trajectories: as `snapshot()` gave them: finished episodes are kept, unfinished prompts are issued again
        under new ids.
      journal: told of what a replay needs: starts and finished episodes.
      forsake_below: after a roll-back: nothing that the snapshot has in flight or finished is used, nor a prompt from before
        this index, since that is what the run diverged on.
    """
    self._play, self._task_at, self._ledger, self._limits = play, task_at, ledger, limits
    self._waits, self._journal = waits, journal
    self._needed, self.version = episodes_needed, version
    self._breakers: dict[str, Breaker] = {}
    self._strikes: dict[str, int] = {}  # prompt -> visits that failed for good
    self._groups: dict[int, _Group] = {}  # in the order of starting
    self._ready: list[tuple[int, int]] = []  # (order of consumption, index), a heap
    self._running: dict[str, asyncio.Task] = {}
    self._changed = asyncio.Event()
    self._error: Exception | None = None
    self._totals = _Totals()
    self._next = 0
    self._completions = self._late_in_row = 0
    self._paused = self._closed = False
    if snapshot is not None:
      if forsake_below is not None:
        snapshot = self._forsake(snapshot, trajectories, forsake_below)
        trajectories = ()
      self._restore(snapshot, trajectories)

  def fill(self) -> None:
    """Starts episodes until the system is full. Called again whenever room may have appeared."""
    size = self._limits.group_size
    if self._closed or self._paused or self._error is not None:
      return
    while self._ledger.in_system() + size <= min(self._limits.capacity, self._needed):
      group = _Group(*self._next_prompt())
      self._groups[group.index] = group
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
    self._paused = False
    self.fill()
    count = episodes // self._limits.group_size
    self._waits.begin('learner', f'{episodes} finished episodes')
    try:
      await self._until(lambda: self._enough(count, in_order))
    finally:
      self._waits.end('learner')
    if in_order:
      indices = list(itertools.islice(self._groups, count))
    else:
      indices = [heapq.heappop(self._ready)[1] for _ in range(count)]
    taken = [self._groups.pop(index) for index in indices]
    if in_order:
      self._forget_ready()
    trajectories = [trajectory for group in taken for trajectory in group.finished]
    if self._journal is not None:
      self._journal({'kind': 'take', 'episodes': [t.episode for t in trajectories]})
    return trajectories

  async def drain(self) -> None:
    """Waits until nothing runs; nothing starts until the next `take`. Raises as `take` does."""
    self._paused = True
    await self._until(lambda: not self._running)

  async def _until(self, holds: Callable[[], bool]) -> None:
    while self._error is None and not holds():
      self._changed.clear()
      try:
        # Not wait_for: on Python 3.11 it swallows a cancellation that comes with the event.
        async with asyncio.timeout(self._limits.stall_timeout_s):
          await self._changed.wait()
      except TimeoutError:
        error = RunFailed(f'nothing happened for {self._limits.stall_timeout_s} s')
        error.add_note(self._waits.report())
        raise error from None
    if self._error is not None:
      raise self._error

  def _enough(self, count: int, in_order: bool) -> bool:
    if in_order:
      first = list(itertools.islice(self._groups.values(), count))
      return len(first) == count and all(group.ready for group in first)
    return len(self._ready) >= count

  def trained(
    self, trajectories: Sequence[Trajectory], *, version: int, reason: str | None = None
  ) -> None:
    """The update that used them is published as `version`: their room is free.

    Raises:
      LedgerError: counts that do not add up; an episode that runs without being in the log, or the reverse.
    """
    self.version = version
    for trajectory in trajectories:
      self._ledger.record(trajectory.episode, 'trained', version=self.version, reason=reason)
    self._needed -= len(trajectories)
    counts = self._ledger.counts
    if len(self._running) != counts['pending'] + counts['running']:
      raise LedgerError(f'{len(self._running)} episodes run, and the log says {dict(counts)}')
    self._ledger.flush()
    self._drop_late(*(index for _, index in self._ready))  # they were in time for the last version
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
    now = asyncio.get_running_loop().time()
    # Copies: a checkpoint is written beside episodes that go on.
    groups = [
      {'index': g.index, 'issued': {**g.issued}, 'failures': {**g.failures}, 'dead': g.dead}
      for g in self._groups.values()
    ]
    return {
      'next': self._next,
      'needed': self._needed,
      'groups': groups,
      'ready': [list(item) for item in self._ready],
      'completions': self._completions,
      'late_in_row': self._late_in_row,
      'totals': dataclasses.asdict(self._totals),
      'breakers': {name: b.saved(now) for name, b in self._breakers.items()},
      'strikes': {**self._strikes},
    }, [t for g in self._groups.values() for t in g.finished]

  async def close(self, reason: str) -> None:
    """Cancels what runs, waits until it is gone, and ends every open episode in the log."""
    self._closed = True
    running = list(self._running.values())
    for task in running:
      task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for episode in list(self._ledger.states):
      self._ledger.record(episode, 'cancelled', version=self.version, reason=reason)

  @property
  def next_index(self) -> int:
    """Of the prompt that would start next."""
    return self._next

  def _forsake(self, snapshot, trajectories, below: int) -> dict[str, Any]:
    """Ends what is open in the log, and gives the snapshot without it."""
    finished = {t.episode for t in trajectories}
    for episode in list(self._ledger.states):
      event = 'dropped' if episode in finished else 'cancelled'
      self._ledger.record(episode, event, version=self.version, reason='rollback')
    return {**snapshot, 'groups': [], 'ready': [], 'next': max(snapshot['next'], below)}

  def _restore(self, snapshot, trajectories) -> None:
    self._next, self._needed = snapshot['next'], snapshot['needed']
    self._totals = _Totals(**snapshot['totals'])
    self._ready = [tuple(item) for item in snapshot['ready']]
    self._completions, self._strikes = snapshot['completions'], {**snapshot['strikes']}
    self._late_in_row = snapshot['late_in_row']
    now = asyncio.get_running_loop().time()
    self._breakers = {
      name: Breaker.restored(fields, now) for name, fields in snapshot['breakers'].items()
    }
    for saved in snapshot['groups']:
      self._groups[saved['index']] = _Group(task=self._task_at(saved['index']), **saved)
    for trajectory in trajectories:
      self._groups[int(trajectory.group)].finished.append(trajectory)
    for _, index in self._ready:
      self._groups[index].ready = True
    done = {t.episode for t in trajectories}
    for episode in [e for e in self._ledger.states if e not in done]:
      self._ledger.record(episode, 'cancelled', version=self.version, reason='restart')
      index, member, _ = episode.split('-')
      if int(index) not in self._groups:
        raise LedgerError(f'episode {episode} is open in the log and unknown to the checkpoint')
      if not self._groups[int(index)].dead:
        self._start(self._groups[int(index)], member, 'reissued', 'restart')
    self._groups = {index: group for index, group in self._groups.items() if not group.dead}

  def _next_prompt(self) -> tuple[int, Task]:
    """The next index whose prompt is not in quarantine."""
    for _ in range(_MOST_SKIPPED):
      index, self._next = self._next, self._next + 1
      task = self._task_at(index)
      if self._strikes.get(task.prompt_id, 0) < QUARANTINE_AFTER:
        return index, task
    raise RunFailed(f'{_MOST_SKIPPED} prompts in a row are in quarantine: see `failed` in the log')

  def _start(self, group: _Group, member: str, event: str, reason: str | None) -> None:
    """Issues one episode of a prompt: `pending` the first time, `reissued` after a failure or a restart."""
    number = group.issued.get(member, 0)
    group.issued[member] = number + 1
    group.running += 1
    episode = f'{group.index:06d}-{member}-{number}'
    prompt = group.task.prompt_id
    self._ledger.record(episode, event, version=self.version, prompt=prompt, reason=reason)
    coroutine = self._guarded(group, member, episode)
    self._running[episode] = asyncio.create_task(coroutine, name=episode)

  async def _guarded(self, group: _Group, member: str, episode: str) -> None:
    """Whatever goes wrong in running or recording an episode ends the run."""
    try:
      failure = await self._run(group, member, episode)
      if failure is not None:
        self._failed(group, member, episode, failure)
    except Exception as error:  # e.g. a full disk under the log
      self.fail(error)
    finally:
      self._waits.end(_who(episode))
      del self._running[episode]
      group.running -= 1
    try:
      self._settle(group)
    except Exception as error:
      self.fail(error)
    self._changed.set()

  async def _run(self, group: _Group, member: str, episode: str) -> EpisodeFailure | None:
    """Plays one episode; the failure, if it has no data."""
    failures = group.failures.get(member, 0)
    entropy = [self._limits.seed, group.index, int(member), failures]
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
    limit = self._limits.episode_timeout_s
    try:
      await self._admit(group.task, episode, failures, seed)
      self._ledger.record(episode, 'running', version=self.version)
      start = {'index': group.index, 'group': str(group.index), 'seed': seed}
      if self._journal is not None:
        self._journal({'kind': 'start', 'episode': episode, **start})
      trajectory = await within(
        limit, self._play(group.task, episode=episode, group=str(group.index), seed=seed)
      )
      if not np.isfinite(trajectory.reward):
        raise EpisodeFailure(FailureKind.GRADER, f'reward {trajectory.reward} is not finite')
      check_trajectory(trajectory)
      if (newest := trajectory.versions.max()) > self.version:
        message = f'the engine answered with version {newest}, and {self.version} is the newest'
        raise EpisodeFailure(FailureKind.INFRA, message)
    except TimeoutError:
      return EpisodeFailure(FailureKind.INFRA, f'no end within {limit} s')
    except EpisodeFailure as failure:
      return failure
    except Exception as error:
      self.fail(error)
      return EpisodeFailure(FailureKind.BUG, repr(error))
    self._ledger.record(
      episode,
      'finished',
      version=self.version,
      tokens=trajectory.num_actions,
      reward=trajectory.reward,
      seconds={
        what.removeprefix('the '): round(seconds, 4)
        for what, seconds in self._waits.end(_who(episode)).items()
      },
    )
    if self._journal is not None:
      self._journal({'kind': 'finished', 'episode': episode, 'digest': fingerprint(trajectory)})
    self._breaker(group.task).success()
    self._totals.episodes += 1
    self._totals.reward += trajectory.reward
    self._totals.length += trajectory.num_actions
    group.finished.append(trajectory)
    return None

  async def _admit(self, task: Task, episode: str, failures: int, seed: int) -> None:
    """Waits for the back-off after failures, and while the environment's breaker is open."""
    if failures:
      self._waits.begin(_who(episode), 'its back-off')
      await asyncio.sleep(self._limits.back_off.seconds(failures, seed))
    while seconds := self._breaker(task).wait(asyncio.get_running_loop().time(), episode):
      self._waits.begin(_who(episode), f'the breaker of environment {task.environment}')
      await asyncio.sleep(seconds)

  def _breaker(self, task: Task) -> Breaker:
    limits = self._limits
    return self._breakers.setdefault(
      task.environment,
      Breaker(limits.max_failures_in_row, limits.breaker_cooldown_s, limits.breaker_openings),
    )

  def _failed(self, group, member: str, episode: str, failure: EpisodeFailure) -> None:
    """Ends the episode without data, and issues its prompt again where that can help."""
    kind, prompt = failure.kind, group.task.prompt_id
    group.failures[member] = group.failures.get(member, 0) + 1
    again = not group.dead and may_retry(kind, group.failures[member], self._limits.retries)
    blamed = kind not in (FailureKind.AGENT, FailureKind.INFRA)  # which are not the task's fault
    if blamed and not again and not group.dead:
      strikes = QUARANTINE_AFTER if kind is FailureKind.DATA else 1
      self._strikes[prompt] = self._strikes.get(prompt, 0) + strikes
    quarantined = self._strikes.get(prompt, 0) >= QUARANTINE_AFTER
    self._ledger.record(
      episode,
      'failed',
      version=self.version,
      reason=kind.value,
      message=str(failure),
      **({'quarantine': True} if quarantined else {}),
    )
    if again:
      self._start(group, member, 'reissued', kind.value)
    else:
      group.dead = True
    try:
      now = asyncio.get_running_loop().time()
      self._breaker(group.task).failure(now, episode, str(failure))
    except RunFailed as error:
      self.fail(error)

  def _settle(self, group: _Group) -> None:
    """A complete group becomes ready; what is left of a dead one is dropped, and its room used again."""
    if group.dead:
      self._drop_finished(group, 'group_incomplete')
      if not group.running:
        self._groups.pop(group.index, None)
      self.fill()
    elif len(group.finished) == self._limits.group_size and not group.ready:
      group.finished.sort(key=lambda t: t.episode)
      group.ready = True
      self._strikes.pop(group.task.prompt_id, None)
      self._completions += 1
      by_age = self._limits.consume == 'oldest_started'
      order = group.index if by_age else self._completions
      heapq.heappush(self._ready, (order, group.index))
      self._drop_late(group.index)

  def _drop_late(self, *indices: int) -> None:
    """Where late is 'drop': finished groups with a token that is too old by now give their room to others."""
    if self._limits.late != 'drop':
      return
    oldest, dropped = self.version - self._limits.max_staleness, 0
    for index in indices:
      finished = self._groups[index].finished
      if any(t.versions[t.mask].min() < oldest for t in finished):
        self._drop_finished(self._groups.pop(index), FailureKind.STALE.value)
        dropped += 1
    if not dropped:
      self._late_in_row = 0
      return
    self._late_in_row += dropped * self._limits.group_size
    if self._late_in_row > _MOST_LATE * self._limits.capacity:
      raise RunFailed(
        f'{self._late_in_row} episodes in a row were late: raise runtime.max_staleness'
      )
    self._forget_ready()
    self.fill()

  def _forget_ready(self) -> None:
    """Takes groups that are gone out of the heap."""
    self._ready = [item for item in self._ready if item[1] in self._groups]
    heapq.heapify(self._ready)

  def _drop_finished(self, group: _Group, reason: str) -> None:
    for trajectory in group.finished:
      self._ledger.record(trajectory.episode, 'dropped', version=self.version, reason=reason)
    group.finished.clear()


def _who(episode: str) -> str:
  """As `Waits` names it."""
  return f'episode {episode}'
