"""An engine on one device: fixed slots, continuous batching, weights swapped in flight.

Time goes in rounds, all of them made by one thread: take new weights, sweep what was aborted, admit, prefill, decode a
few steps, fetch the sampled tokens once, resolve what is finished. Coroutines of any loop only leave requests and
marks under the lock, and are woken by `call_soon_threadsafe`. The lock is never held over device work.
"""

import asyncio
import dataclasses
import threading
import time
from typing import Any

import jax
import numpy as np

from sao_jax import types
from sao_jax.engines import programs as programs_lib
from sao_jax.engines import slots as slots_lib

_JOIN_SECONDS = 60.0  # a round that takes longer is stuck


class LocalEngine:
  """Implements `types.Engine` on the programs of `make_programs`.

  Nothing is sampled before `start()`, which starts the thread that makes the rounds. Without it the caller makes them,
  one `step()` at a time on its own thread, and the same calls give the same tokens in the same order.

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
  """

  def __init__(
    self, programs: programs_lib.Programs, params: Any, *, version: int, name: str = 'engine'
  ):
    self._programs = programs
    self._name = name
    self._condition = threading.Condition()
    self._thread: threading.Thread | None = None
    self._params, self._version = self._place(params), version
    self._state = programs.init_state()
    # All below is read and written under the lock.
    self._pending: tuple[Any, int] | None = None
    self._queue: list[slots_lib.Open] = []
    self._open: dict[str, slots_lib.Open] = {}
    self._slots = slots_lib.Slots(programs.num_slots)
    self._failure: str | None = None
    self._round_number = 0
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
      self._queue.append(opened)
      self._condition.notify()
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

  def health(self) -> dict[str, float]:
    """Counters since the start. busy_s is the time of device work, from dispatch to fetch."""
    with self._condition:
      return dict(
        self._counters,
        version=self._version,
        compiles=1 + len(self._programs.prefill),
        slots_in_use=len(self._slots.held),
        evictions=self._slots.evictions,
        broken_prefixes=self._slots.broken_prefixes,
        waiting=len(self._queue),
      )

  def close(self) -> None:
    """Stops the thread. Requests that are open fail. Idempotent."""
    self._fail(f'engine {self._name} is closed')
    if self._thread is not None and self._thread is not threading.current_thread():
      self._thread.join(_JOIN_SECONDS)
      if self._thread.is_alive():
        raise RuntimeError(f'engine {self._name}: a round takes more than {_JOIN_SECONDS} s')
    self._state = self._params = self._pending = None

  def step(self) -> bool:
    """One round on the calling thread, for an engine that was not started. False: there was nothing to do.

    Raises:
      EpisodeFailure: if the round broke the engine.
    """
    if self._thread is not None:
      raise RuntimeError(f'engine {self._name} has a thread that makes its rounds')
    with self._condition:
      if self._failure is not None:
        raise types.EpisodeFailure(types.FailureKind.INFRA, self._failure)
      if not self._has_work():
        return False
    self._guarded_round()
    return True

  def _run(self) -> None:
    while True:
      with self._condition:
        self._condition.wait_for(lambda: self._failure is not None or self._has_work())
        if self._failure is not None:
          return
      try:
        self._guarded_round()
      except types.EpisodeFailure:
        return  # everybody who waits has it

  def _has_work(self) -> bool:
    return bool(self._pending or self._queue or self._slots.running())

  def _guarded_round(self) -> None:
    try:
      self._round()
    except Exception as error:
      message = f'engine {self._name}: {type(error).__name__}: {error}'
      self._fail(message)
      raise types.EpisodeFailure(types.FailureKind.INFRA, message) from error

  def _round(self) -> None:
    with self._condition:
      self._round_number += 1
      if self._pending is not None:
        (self._params, self._version), self._pending = self._pending, None
      self._sweep()
      admitted, self._queue = self._slots.admit(self._queue)
      pieces = [(slot, self._slots.resume(slot, self._version)) for slot in admitted]
      for slot, start in pieces:
        self._counters['prefill_tokens'] += len(slot.opened.request.tokens) - start
      running = self._slots.running()
    if not running:
      return
    began = time.perf_counter()
    prefilled = self._prefill(pieces)
    keep = np.zeros(self._programs.num_slots, bool)
    keep[[slot.index for slot in running]] = True
    self._state, decoded = self._programs.decode(self._params, self._state, keep)
    sampled = jax.device_get(([sampled for _, sampled in prefilled], decoded))
    with self._condition:
      self._counters['busy_s'] += time.perf_counter() - began
      self._take([slots for slots, _ in prefilled], *sampled)
      for slot in running:
        self._finish(slot)

  def _sweep(self) -> None:
    """Answers what was aborted and frees what was dropped."""
    for opened in self._queue:
      if opened.over():
        self._answer(opened, types.FinishReason.ABORTED)
    self._queue = [opened for opened in self._queue if not opened.over()]
    for slot in self._slots.running():
      if slot.opened.over():
        self._answer(slot.opened, types.FinishReason.ABORTED)
        self._slots.rest(slot, self._round_number)

  def _prefill(self, pieces: list[tuple[slots_lib.Slot, int]]) -> list[tuple[dict, Any]]:
    """Dispatches the prefills of prefixes from a position on.

    Returns, for each call, the prefixes that it completes, row -> slot, and what it sampled, on device.
    """
    programs, calls = self._programs, []
    while pieces:
      groups = {}
      for slot, start in pieces:
        left = len(slot.opened.request.tokens) - start
        fitting = [bucket for bucket in programs.prefill if bucket >= left]
        bucket = min(fitting, default=max(programs.prefill))
        groups.setdefault(bucket, []).append((slot, start))
      pieces = []
      for bucket, group in groups.items():
        for first in range(0, len(group), programs.prefill_rows):
          part = group[first : first + programs.prefill_rows]
          rows = self._rows(part, bucket)
          self._state, sampled = programs.prefill[bucket](self._params, self._state, rows)
          calls.append(({row: part[row][0] for row in np.flatnonzero(rows.last)}, sampled))
          pieces += [
            (slot, start + bucket) for row, (slot, start) in enumerate(part) if not rows.last[row]
          ]
    return calls

  def _rows(self, part: list[tuple[slots_lib.Slot, int]], bucket: int) -> programs_lib.Rows:
    rows = programs_lib.empty_rows(self._programs.num_slots, self._programs.prefill_rows, bucket)
    for row, (slot, start) in enumerate(part):
      request = slot.opened.request
      piece = request.tokens[start : start + bucket]
      rows.slots[row] = slot.index
      rows.tokens[row, : len(piece)] = piece
      rows.starts[row] = start
      rows.counts[row] = len(piece)
      rows.last[row] = start + len(piece) == len(request.tokens)
      rows.remaining[row] = request.max_new_tokens
      rows.temperature[row] = request.temperature
      rows.seeds[row] = request.seed
    return rows

  def _take(self, completed: list[dict[int, slots_lib.Slot]], first: list, decoded: tuple) -> None:
    """Records the tokens of a round: first those of the prefills, then those of the decode."""
    for slots, (tokens, logprobs) in zip(completed, first, strict=True):
      for row, slot in slots.items():
        self._record(slot, tokens[row : row + 1], logprobs[row : row + 1])
    tokens, logprobs = decoded
    counts = (tokens >= 0).sum(axis=0)  # -1 from the step on that found the slot at rest
    for slot in self._slots.running():
      count = counts[slot.index]
      if count:
        self._record(slot, tokens[:count, slot.index], logprobs[:count, slot.index])

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
    self._slots.rest(slot, self._round_number)

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
      self._queue = []
      self._condition.notify()

  def _place(self, params: Any) -> Any:
    """Puts parameters on the engine's device, refusing those that the programs do not fit."""
    seen = jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype)), params)
    want = jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype)), self._programs.params)
    if seen != want:
      raise ValueError(f'parameters {seen} do not fit programs compiled for {want}')
    return jax.device_put(params, self._programs.device)
