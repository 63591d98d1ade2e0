"""The host side of the local engine's slots: who holds which, what its cache holds, what is sampled so far.

Nothing here knows of a device or a thread; the engine calls it under its lock.
"""

import asyncio
import dataclasses
from collections.abc import Callable

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
  """All slots of an engine, and the counters of what happened to them."""

  def __init__(self, size: int):
    self.all = [Slot(index) for index in range(size)]
    self.held: dict[str, Slot] = {}
    self.evictions = 0
    self.broken_prefixes = 0

  def running(self) -> list[Slot]:
    return [slot for slot in self.all if slot.opened is not None]

  def admit(self, queue: list[Open]) -> tuple[list[Slot], list[Open]]:
    """Gives slots to requests, first those of episodes that hold one, then in order. Returns who still waits, too."""
    admitted, others, waiting = [], [], []
    for opened in queue:
      slot = self.held.get(opened.request.episode)
      if slot is None:
        others.append(opened)
      else:
        slot.opened = opened
        admitted.append(slot)
    for opened in others:
      slot = self._vacant()
      if slot is None:
        waiting.append(opened)
        continue
      slot.episode, slot.opened = opened.request.episode, opened
      self.held[slot.episode] = slot
      admitted.append(slot)
    return admitted, waiting

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

  def rest(self, slot: Slot, round_number: int) -> None:
    """The request is over; the episode keeps the slot, unless it was released."""
    opened, slot.opened = slot.opened, None
    # The last token was sampled and never fed: its keys and values are not there.
    known = [opened.request.tokens, np.asarray(opened.tokens[:-1], np.int32)]
    slot.cached = np.concatenate(known)
    slot.away_since = round_number
    if opened.released:
      self.free(slot)

  def free(self, slot: Slot) -> None:
    del self.held[slot.episode]
    slot.episode = slot.cached = None

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
