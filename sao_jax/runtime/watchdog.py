"""Who waits for what, and an end for what cannot be interrupted.

The deadlines here are real seconds on threads of their own: they hold while the event loop is blocked, and on a loop
whose time is logical. One thing stops them too: a call into C that keeps Python's global lock.
"""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from sao_jax.runtime.clock import Clock

FAILED = 3
MAX_LINES = 20  # of a report
MAX_FRAMES = 6  # of the stack of a blocked loop
PRINT_S = 5.0  # a last line that nobody reads must not keep the process alive


class _Wait(NamedTuple):
  what: str
  since: float
  before: dict[str, float]  # seconds of earlier waits, by what; never changed in place


class Waits:
  """The wait-for graph: who waits for what (or works on it), since when, and how long it did so before.

  Names are free text and are printed as they are. `who` is a name such as 'learner', or a kind and a name such as
  'episode 000012-0-0'; the report groups those of one kind. A `what` that is also a `who` continues the chain.

  One thread writes; a report may be read on any thread.
  """

  def __init__(self, clock: Clock):
    self._clock = clock
    self._open: dict[str, _Wait] = {}

  def begin(self, who: str, what: str) -> None:
    """`who` now waits for `what`. What it did before ends, and its seconds are kept."""
    now = self._clock()
    self._open[who] = _Wait(what, now, self._seconds(who, now))

  def end(self, who: str) -> dict[str, float]:
    """Forgets `who`; returns its seconds by what, which add up to those since its first `begin`. {} if unknown."""
    seconds = self._seconds(who, self._clock())
    self._open.pop(who, None)
    return seconds

  def report(self) -> str:
    """One line a wait or a group of waits, the oldest first, at most MAX_LINES. The seconds are durations."""
    now = self._clock()
    groups: dict[tuple[str, str], list[tuple[str, _Wait]]] = {}
    waits = dict(self._open)  # a copy: another thread may write meanwhile
    for who, wait in sorted(waits.items(), key=lambda item: (item[1].since, item[0])):
      groups.setdefault((who.partition(' ')[0], wait.what), []).append((who, wait))
    lines = [_line(group, now) for group in groups.values()]
    if len(lines) > MAX_LINES:
      lines[MAX_LINES - 1 :] = [f'and {len(lines) - MAX_LINES + 1} more lines']
    return '\n'.join(lines) or 'nobody waits'

  def _seconds(self, who: str, now: float) -> dict[str, float]:
    if who not in self._open:
      return {}
    what, since, before = self._open[who]
    return {**before, what: before.get(what, 0.0) + now - since}


def _line(group: list[tuple[str, _Wait]], now: float) -> str:
  who, wait = group[0]
  seconds = now - wait.since
  if len(group) > 1:
    kind, _, name = who.partition(' ')
    return f'{len(group)} {kind}s wait for {wait.what}: the oldest, {name}, {seconds:.1f} s'
  line = f'{who} waits for {wait.what}: {seconds:.1f} s'
  if wait.what in wait.before:
    line += f' ({seconds + wait.before[wait.what]:.1f} s in all)'
  return line


def end_process(code: int, reason: str, *, waits: Waits | None = None, stack: str = '') -> NoReturn:
  """Prints the stack, the wait-for graph and, as the last line, the reason; then ends the process from any thread.

  Nothing is cleaned up, since that could wait for what hangs: sandbox workers die with their parent, and the last
  checkpoint is whole. Also ends the process if nothing can be printed.
  """
  try:
    text = '\n'.join(filter(None, [stack, waits and waits.report(), reason]))
    # On a thread: the main one may hang in a full pipe with the lock of stderr in its hands.
    printing = threading.Thread(
      target=lambda: print(text, file=sys.stderr, flush=True), daemon=True
    )
    printing.start()
    printing.join(PRINT_S)
  finally:
    os._exit(code)


def exit_after(
  seconds: float, code: int, reason: str, *, waits: Waits | None = None
) -> Callable[[], None]:
  """Ends the process with that code and last line after `seconds`, unless the returned function is called before.

  Raises:
    ValueError: if `seconds` is not positive, or more than a timer can wait.
  """
  if not 0 < seconds <= threading.TIMEOUT_MAX:
    raise ValueError(f'a deadline of {seconds} s: give a positive, finite number')
  timer = threading.Timer(seconds, end_process, (code, reason), {'waits': waits})
  timer.daemon = True
  timer.start()

  def cancel() -> None:
    timer.cancel()
    if threading.current_thread() is not timer:
      timer.join(PRINT_S)  # it ends at once

  return cancel


async def bounded(
  what: str, seconds: float, function: Callable, *args: Any, waits: Waits | None = None
) -> Any:
  """`function(*args)` on a thread. If it does not end in time, the process does, with the wait-for graph.

  A thread that hangs in a device or a file system can be neither cancelled nor joined, so a clean shutdown would
  wait for it. The last line says what hangs. If the caller is cancelled, the function goes on without a deadline.
  """
  reason = f'failed: {what} takes more than {seconds} s'
  cancel = exit_after(seconds, FAILED, reason, waits=waits)
  try:
    return await asyncio.to_thread(function, *args)
  finally:
    cancel()


class LoopGuard:
  """Ends the process when its event loop is blocked, e.g. by a call inside a coroutine that should be on a thread.

  A thread asks the loop for an answer, four times in `seconds`. It counts its own rounds instead of reading a clock, so
  that a process that was suspended as a whole is not blamed; so the end comes up to a quarter later.
  """

  def __init__(self, seconds: float, waits: Waits):
    if not 0 < seconds <= threading.TIMEOUT_MAX:
      raise ValueError(f'a deadline of {seconds} s: give a positive, finite number')
    self._seconds, self._waits = seconds, waits
    self._stopped, self._answered = threading.Event(), threading.Event()
    self._thread: threading.Thread | None = None

  def start(self) -> None:
    """Guards the running loop, until `stop` or until the loop is closed. Raises RuntimeError where none runs."""
    loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
    self._thread = threading.Thread(target=self._watch, args=(loop, thread_id), daemon=True)
    self._thread.start()

  def stop(self) -> None:
    """Idempotent."""
    self._stopped.set()
    if self._thread is not None:
      self._thread.join(PRINT_S)

  def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
    self._answered.set()
    silent = 0
    while not self._stopped.wait(self._seconds / 4):
      silent = 0 if self._answered.is_set() else silent + 1
      if silent == 4:
        reason = f'failed: the event loop is blocked for more than {self._seconds} s'
        stack = _stack(thread_id)
        end_process(FAILED, reason, waits=self._waits, stack=stack)
      if silent == 0:
        self._answered.clear()
        try:
          loop.call_soon_threadsafe(self._answered.set)
        except RuntimeError:  # the loop is closed
          return


def _stack(thread_id: int) -> str:
  """The innermost frames of a thread, the last call last."""
  frame = sys._current_frames().get(thread_id)
  return ''.join(traceback.format_stack(frame)[-MAX_FRAMES:]).rstrip() if frame else ''
