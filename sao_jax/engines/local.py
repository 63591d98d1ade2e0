"""An engine on one device: fixed slots, continuous batching, weights swapped in flight.

Time goes in rounds, all of them made by one thread: take new weights, sweep what was aborted, admit, prefill, decode a
few steps, fetch the sampled tokens once, resolve what is finished. Coroutines of any loop only leave requests and
marks under the lock, and are woken by `call_soon_threadsafe`. The lock is never held over device work.

What a round computes is a function of its version, of the decisions about slots and of the requests: `journal` gets the
first two, and `redo` makes the round again from them, bit for bit.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sao_jax import types
from sao_jax.engines import programs as programs_lib
from sao_jax.engines import rounds
from sao_jax.engines import slots as slots_lib

_JOIN_SECONDS = 60.0  # a round that takes longer is stuck


class LocalEngine:
  """Implements `types.Engine` on the programs of `make_programs`.

  Nothing is sampled before `start()`, which starts the thread that makes the rounds. Without it they are made on the
  caller's thread: one `step()` at a time, or by `drive()` in an event loop, or by `redo()` from a journal; then the same
  calls give the same tokens in the same order.

  More episodes than slots: requests wait first come, first served. An episode that is with its tool keeps its slot
  unless a request waits and no slot is free; then the one that is away longest loses it, and its next turn is
  prefilled from the start. Its tokens are the same either way, unless the weights changed since it began.

  A prefix that goes on from what the slot holds is prefilled from there. Any other prefix is prefilled from the start
  and counted as broken. After a weight swap an episode keeps the keys and values that older weights made; the tokens
  sampled on them are counted. A cache never passes from one episode to another.

  An error in a round breaks the engine for good: whoever waits gets EpisodeFailure(INFRA), and so does every later call.

  Args:
    programs: compiled for the shapes of `params`; several engines may share them.
    params: what to sample with. The engine keeps a reference when they are on its device already, so the caller hands
      over a copy of anything that it will donate.
    version: the policy version of `params`.
    name: of the thread, and in error messages.
    journal: called on the thread of the rounds after each that sampled, before anybody has its tokens, with {'kind':
      'round', 'version': of the weights, 'operations': decisions about slots since the last call (see `Slots`),
      'sampled': tokens, 'digest': of their bits and those of their log-probabilities}. Its error breaks the engine.
  """

  def __init__(
    self,
    programs: programs_lib.Programs,
    params: Any,
    *,
    version: int,
    name: str = 'engine',
    journal: Callable[[dict], None] | None = None,
  ):
    self._programs = programs
    self._name, self._journal = name, journal
    self._condition = threading.Condition()
    self._thread: threading.Thread | None = None
    self._params, self._version = self._place(params), version
    self._state = programs.init_state()
    self._asked = asyncio.Event()  # wakes `drive`; nobody waits for it where there is a thread
    # All below is read and written under the lock.
    self._pending: tuple[Any, int] | None = None
    self._open: dict[str, slots_lib.Open] = {}
    self._slots = slots_lib.Slots(programs.num_slots)
    self._failure: str | None = None
    self._counters = {
      'tokens_sampled': 0,
      'tokens_on_older_cache': 0,
      'prefill_tokens': 0,
      'busy_s': 0.0,
    }

  def start(self) -> 'LocalEngine':
    """Starts the thread."""
    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
    self._thread.start()
    return self

  async def generate(self, request: types.Request) -> types.Generation:
    """Continues request.tokens. Cancelling the coroutine frees the work.

    Raises:
      ValueError: if the request cannot be met, or its episode has an open one.
      EpisodeFailure: INFRA if the engine is closed or broken.
    """
    programs_lib.check_request(self._programs, request)
    request = dataclasses.replace(request, tokens=np.array(request.tokens, np.int32))
    loop = asyncio.get_running_loop()
    opened = slots_lib.Open(request, loop, loop.create_future())
    with self._condition:
      if self._failure is not None:
        raise types.EpisodeFailure(types.FailureKind.INFRA, self._failure)
      if request.episode in self._open:
        raise ValueError(f'episode {request.episode!r} has an open request: one at a time')
      self._open[request.episode] = opened
      self._slots.queue.append(opened)
      self._condition.notify()
      self._asked.set()
    try:
      return await opened.future
    finally:
      with self._condition:
        if self._open.get(request.episode) is opened:  # not answered: cancelled
          opened.dropped = True
          del self._open[request.episode]

  def release(self, episode: str) -> None:
    """Frees the slot of the episode. Its open request, if any, is aborted. Idempotent."""
    with self._condition:
      if episode in self._open:
        self._open[episode].aborted = True
      slot = self._slots.held.get(episode)
      if slot is not None and slot.opened is not None:
        slot.opened.released = True
      elif slot is not None:
        self._slots.free(slot)

  def load(self, params: Any, version: int) -> None:
    """Rounds that start from now on sample with `params`; of several loads before a round the last counts.

    Raises:
      ValueError: if shapes or dtypes differ from those the programs are compiled for.
    """
    params = self._place(params)
    with self._condition:
      self._pending = params, version
      self._condition.notify()

  def abort(self, episode: str) -> None:
    """The open request of the episode, if any, returns what it has with FinishReason.ABORTED."""
    with self._condition:
      if episode in self._open:
        self._open[episode].aborted = True

  def waiting(self) -> frozenset[str]:
    """Episodes whose open request has no slot yet."""
    with self._condition:
      return frozenset(x.request.episode for x in self._slots.queue if not x.over())

  def health(self) -> dict[str, float]:
    """Counters since the start. busy_s is the time of device work, from dispatch to fetch; see also `drive`.

    slots_in_use are those of episodes that were not released.
    """
    with self._condition:
      return dict(
        self._counters,
        version=self._version,
        compiles=1 + len(self._programs.prefill),
        slots_in_use=self._slots.in_use(),
        evictions=self._slots.evictions,
        broken_prefixes=self._slots.broken_prefixes,
        waiting=len(self._slots.queue),
      )

  def close(self) -> None:
    """Stops the thread. Requests that are open fail. Idempotent."""
    self._fail(f'engine {self._name} is closed')
    if self._thread is not None and self._thread is not threading.current_thread():
      self._thread.join(_JOIN_SECONDS)
      if self._thread.is_alive():
        raise RuntimeError(f'engine {self._name}: a round takes more than {_JOIN_SECONDS} s')
    self._state = self._params = self._pending = None

  def step(self, busy_s: float | None = None) -> bool:
    """One round on the calling thread, for an engine that was not started. False: there was nothing to do.

    Args:
      busy_s: what the round counts as in health; None: the time that it takes.

    Raises:
      EpisodeFailure: if the round broke the engine.
    """
    with self._condition:
      self._check_unstarted()
      if not self._has_work():
        return False
    self._guarded(self._round, busy_s)
    return True

  async def drive(self, round_s: float) -> None:
    """Makes the rounds in this event loop, for ever, for an engine that was not started and is used in this loop only.

    While a request is open a round is made every `round_s` seconds of the loop's time, and counts as that in busy_s. The
    first is made `round_s` after the request came; without any there is no timer, whatever is loaded or released. So
    the requests alone decide when rounds are made.

    Raises:
      EpisodeFailure: when the engine is broken or closed.
    """
    while True:
      self._check_unstarted()
      if self._slots.queue or self._slots.running():
        await asyncio.sleep(round_s)
        self.step(busy_s=round_s)
      else:
        self._asked.clear()
        await self._asked.wait()  # without a deadline: nobody is owed anything

  def redo(self, version: int, operations: Sequence[Sequence]) -> dict[str, Any]:
    """A journaled round once more on the calling thread, for an engine that was not started. Returns its journal entry.

    The requests must have come (`waiting`). A request that was stopped is answered ABORTED if somebody waits. The
    decisions of the round count and no others: `release` must not be called, and `abort` or a cancellation ends only a
    request that has no slot.

    Raises:
      ValueError: if a decision is impossible, with slot and episode, or the version is not there. The engine is
        broken then.
      EpisodeFailure: if the round broke the engine.
    """
    with self._condition:
      self._check_unstarted()
      if self._pending is not None and self._pending[1] == version:
        self._swap()
      try:
        if self._version != version:
          raise ValueError(f'a round of version {version}, and version {self._version} is loaded')
        pieces = self._begin(*self._slots.repeat(operations))
      except ValueError as error:
        self._fail(f'engine {self._name}: {error}')
        raise
    return self._guarded(self._compute, pieces, None)

  def _check_unstarted(self) -> None:
    if self._thread is not None:
      raise RuntimeError(f'engine {self._name} has a thread that makes its rounds')
    if self._failure is not None:
      raise types.EpisodeFailure(types.FailureKind.INFRA, self._failure)

  def _run(self) -> None:
    while True:
      with self._condition:
        self._condition.wait_for(lambda: self._failure is not None or self._has_work())
        if self._failure is not None:
          return
      try:
        self._guarded(self._round, None)
      except types.EpisodeFailure:
        return  # everybody who waits has it

  def _has_work(self) -> bool:
    return bool(self._pending or self._slots.queue or self._slots.running())

  def _guarded(self, work: Callable, *args) -> Any:
    try:
      return work(*args)
    except Exception as error:
      message = f'engine {self._name}: {type(error).__name__}: {error}'
      self._fail(message)
      raise types.EpisodeFailure(types.FailureKind.INFRA, message) from error

  def _round(self, busy_s: float | None) -> None:
    with self._condition:
      if self._pending is not None:
        self._swap()
      pieces = self._begin(*self._slots.decide())
      if not self._slots.running():
        return
    self._compute(pieces, busy_s)

  def _swap(self) -> None:
    (self._params, self._version), self._pending = self._pending, None

  def _begin(
    self, admitted: list[slots_lib.Slot], over: list[slots_lib.Open]
  ) -> list[tuple[slots_lib.Slot, int]]:
    """Answers the requests that are over. Returns the slots to prefill, and from where."""
    for opened in over:
      self._answer(opened, types.FinishReason.ABORTED)
    pieces = [(slot, self._slots.resume(slot, self._version)) for slot in admitted]
    for slot, start in pieces:
      self._counters['prefill_tokens'] += len(slot.opened.request.tokens) - start
    return pieces

  def _compute(
    self, pieces: list[tuple[slots_lib.Slot, int]], busy_s: float | None
  ) -> dict[str, Any]:
    """The device work of a round, and who is answered by it. busy_s: what it counts as; None: as it takes."""
    with self._condition:
      running, operations = self._slots.running(), self._slots.take_log()
    calls = rounds.plan(self._programs, pieces)
    keep = np.zeros(self._programs.num_slots, bool)
    keep[[slot.index for slot in running]] = True
    began = time.perf_counter()
    first = []
    with self._programs.launch:
      for call in calls:
        prefill = self._programs.prefill[call.bucket]
        self._state, sampled = prefill(self._params, self._state, call.rows)
        first.append(sampled)
      self._state, decoded = self._programs.decode(self._params, self._state, keep)
    tokens, logprobs = rounds.join(calls, *jax.device_get((first, decoded)))
    took = time.perf_counter() - began
    with self._condition:
      self._counters['busy_s'] += took if busy_s is None else busy_s
      for slot in running:
        sampled = tokens[:, slot.index] >= 0
        self._record(slot, tokens[sampled, slot.index], logprobs[sampled, slot.index])
    entry = {
      'kind': 'round',
      'version': self._version,
      'operations': operations,
      'sampled': int((tokens >= 0).sum()),
      'digest': rounds.digest(tokens, logprobs),
    }
    if self._journal is not None:
      self._journal(entry)  # before the answers: nobody acts on tokens that a replay would not know
    with self._condition:
      for slot in running:
        self._finish(slot)
    return entry

  def _record(self, slot: slots_lib.Slot, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    slot.opened.record(tokens, logprobs, self._version)
    self._counters['tokens_sampled'] += len(tokens)
    if slot.cached_version != self._version:
      self._counters['tokens_on_older_cache'] += len(tokens)

  def _finish(self, slot: slots_lib.Slot) -> None:
    """Answers the request of the slot if its last token ends it: the rule that the programs apply on device."""
    opened = slot.opened
    if opened.tokens[-1] in self._programs.stop_tokens:
      self._answer(opened, types.FinishReason.STOP)
    elif len(opened.tokens) == opened.request.max_new_tokens:
      self._answer(opened, types.FinishReason.LENGTH)
    else:
      return
    self._slots.rest(slot)

  def _answer(self, opened: slots_lib.Open, reason: types.FinishReason) -> None:
    if opened.dropped:
      return
    del self._open[opened.request.episode]
    generation = opened.generation(reason)
    opened.wake(lambda future: future.set_result(generation))

  def _fail(self, message: str) -> None:
    """Breaks the engine: every open request fails. The first reason stays."""
    with self._condition:
      if self._failure is None:
        self._failure = message
      for opened in self._open.values():
        error = types.EpisodeFailure(types.FailureKind.INFRA, self._failure)
        opened.dropped = True
        opened.wake(lambda future, error=error: future.set_exception(error))
      self._open = {}
      self._slots.queue = []
      self._condition.notify()
      self._asked.set()

  def _place(self, params: Any) -> Any:
    """Puts parameters on the engine's devices, refusing those that the programs do not fit."""
    seen = jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype)), params)
    want = jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype)), self._programs.params)
    if seen != want:
      raise ValueError(f'parameters {seen} do not fit programs compiled for {want}')
    return jax.device_put(params, jax.tree.map(lambda x: x.sharding, self._programs.params))
