"""The host side of the local engine's slots: who holds which, what its cache holds, what is sampled so far.

Nothing here knows of a device or a thread; the engine calls it under its lock.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sao_jax import types


@dataclasses.dataclass(eq=False)
class Open:
  """A request that is not answered yet."""

  request: types.Request
  loop: asyncio.AbstractEventLoop
  future: asyncio.Future
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  aborted: bool = False  # answer with what there is
  dropped: bool = False  # nobody waits any more
  released: bool = False  # its slot goes with it

  def over(self) -> bool:
    """No more tokens are wanted."""
    return self.aborted or self.dropped

  def record(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
    """Appends tokens [n >= 1] sampled under one version."""
    if not np.isfinite(logprobs).all():
      raise FloatingPointError(f'log-probabilities {logprobs} under version {version}')
    self.tokens.extend(tokens.tolist())
    self.logprobs.extend(logprobs.tolist())
    before = 0
    if self.spans and self.spans[-1][0] == version:
      before = self.spans.pop()[1]
    self.spans.append((version, before + len(tokens)))

  def generation(self, reason: types.FinishReason) -> types.Generation:
    return types.Generation(
      tokens=np.asarray(self.tokens, np.int32),
      behavior_logprobs=np.asarray(self.logprobs, np.float32),
      version_spans=tuple(self.spans),
      finish_reason=reason,
    )

  def wake(self, act: Callable[[asyncio.Future], None]) -> None:
    """Resolves the future, from any thread. A loop that is closed has nobody waiting."""

    def resolve():
      if not self.future.done():
        act(self.future)

    try:
      self.loop.call_soon_threadsafe(resolve)
    except RuntimeError:
      if not self.loop.is_closed():
        raise


@dataclasses.dataclass(eq=False)
class Slot:
  """One row of the cache. It stays with its episode between turns."""

  index: int
  episode: str | None = None
  opened: Open | None = None  # None: free, or the episode is away, with a tool
  cached: np.ndarray | None = None  # [n] int32, tokens whose keys and values are in the cache
  cached_version: int = -1  # the oldest version that made them
  away_since: int = 0  # number of the round


class Slots:
  """All slots of an engine, the queue before them, and the counters of what happened to them.

  Decisions about slots are logged in their order, as lists that JSON can hold: ['admit', slot, episode], ['rest', slot]
  where a request was stopped, ['free', slot]. A request that rests because its last token ends it is not logged: its
  tokens say so. An impossible decision, which only a replay can ask for, raises ValueError.
  """

  def __init__(self, size: int):
    self.all = [Slot(index) for index in range(size)]
    self.held: dict[str, Slot] = {}
    self.queue: list[Open] = []
    self.evictions = 0
    self.broken_prefixes = 0
    self._round_number = 0
    self._log: list[list] = []

  def take_log(self) -> list[list]:
    """What was logged since the last call."""
    log, self._log = self._log, []
    return log

  def running(self) -> list[Slot]:
    return [slot for slot in self.all if slot.opened is not None]

  def in_use(self) -> int:
    """Slots whose episode was not released."""
    return sum(not (slot.opened and slot.opened.released) for slot in self.held.values())

  def decide(self) -> tuple[list[Slot], list[Open]]:
    """Begins a round: stops what is over, and gives slots to requests, first those of episodes that hold one, then in order.

    Returns the slots that took a request, in order, and the requests that are over.
    """
    self._round_number += 1
    over = self._sweep()
    over += [self._stop(slot) for slot in self.running() if slot.opened.over()]
    self.queue.sort(key=lambda opened: opened.request.episode not in self.held)
    admitted, queue, self.queue = [], self.queue, []
    for opened in queue:
      slot = self.held.get(opened.request.episode) or self._vacant()
      if slot is None:
        self.queue.append(opened)
      else:
        admitted.append(self._place(slot, opened))
    return admitted, over

  def repeat(self, operations: Sequence[Sequence]) -> tuple[list[Slot], list[Open]]:
    """As `decide`, by the log of another run."""
    self._round_number += 1
    admitted, over = [], self._sweep()
    for operation in operations:
      match operation:
        case ['free', index]:
          self.free(self._at(index))
        case ['rest', index]:
          over.append(self._stop(self._at(index)))
        case ['admit', index, episode]:
          admitted.append(self._place(self._at(index), self._take_queued(index, episode)))
        case _:
          raise ValueError(f'{operation} is no operation on slots')
    return admitted, over

  def resume(self, slot: Slot, version: int) -> int:
    """The position where prefill starts: after what the slot holds, if the prefix goes on from it, else 0."""
    prefix, cached, start = slot.opened.request.tokens, slot.cached, 0
    if cached is not None:
      if len(cached) <= len(prefix) and np.array_equal(cached, prefix[: len(cached)]):
        start = min(len(cached), len(prefix) - 1)  # the last token's hidden state is needed
      else:
        self.broken_prefixes += 1
    if start == 0:
      slot.cached_version = version
    return start

  def rest(self, slot: Slot) -> None:
    """The request is over; the episode keeps the slot, unless it was released."""
    opened, slot.opened = slot.opened, None
    # The last token was sampled and never fed: its keys and values are not there.
    known = [opened.request.tokens, np.asarray(opened.tokens[:-1], np.int32)]
    slot.cached = np.concatenate(known)
    slot.away_since = self._round_number
    if opened.released:
      self.free(slot)

  def free(self, slot: Slot) -> None:
    """Takes the slot from its episode, which is away."""
    if slot.episode is None or slot.opened is not None:
      raise ValueError(f'slot {slot.index} of episode {slot.episode!r} cannot be freed')
    self._log.append(['free', slot.index])
    del self.held[slot.episode]
    slot.episode = slot.cached = None

  def _sweep(self) -> list[Open]:
    """Takes those out of the queue that are over before they had a slot."""
    over = [opened for opened in self.queue if opened.over()]
    self.queue = [opened for opened in self.queue if not opened.over()]
    return over

  def _stop(self, slot: Slot) -> Open:
    """The request that the slot worked on, and does no more."""
    opened = slot.opened
    if opened is None:
      raise ValueError(f'slot {slot.index} of episode {slot.episode!r} has no request to stop')
    self._log.append(['rest', slot.index])
    self.rest(slot)
    return opened

  def _place(self, slot: Slot, opened: Open) -> Slot:
    """The slot, which is free or held by the episode, works on the request from now on."""
    episode = opened.request.episode
    vacant = slot.episode is None and episode not in self.held
    away = slot.episode == episode and slot.opened is None
    if not (vacant or away):
      held = self.held[episode].index if episode in self.held else None
      raise ValueError(
        f'slot {slot.index} cannot take episode {episode!r}: it has {slot.episode!r}, the episode has slot {held}'
      )
    self._log.append(['admit', slot.index, episode])
    slot.episode, slot.opened = episode, opened
    self.held[episode] = slot
    return slot

  def _at(self, index: int) -> Slot:
    if not 0 <= index < len(self.all):
      raise ValueError(f'slot {index} is none of {len(self.all)}')
    return self.all[index]

  def _take_queued(self, index: int, episode: str) -> Open:
    for opened in self.queue:
      if opened.request.episode == episode:
        self.queue.remove(opened)
        return opened
    raise ValueError(f'slot {index} cannot take episode {episode!r}: no open request of it waits')

  def _vacant(self) -> Slot | None:
    """A free slot, or else that of the episode that is away longest, or None."""
    for slot in self.all:
      if slot.episode is None:
        return slot
    away = [slot for slot in self.all if slot.opened is None]
    if not away:
      return None
    slot = min(away, key=lambda slot: slot.away_since)
    self.free(slot)
    self.evictions += 1
    return slot
