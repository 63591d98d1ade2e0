"""Time as an argument, and an event loop whose time is logical."""

import asyncio
import selectors
import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds of learning, the warm start left out, over all restarts


def real_clock(already: float = 0.0) -> Clock:
  """A monotonic clock that starts at `already` seconds."""
  start = time.monotonic() - already
  return lambda: time.monotonic() - start


class VirtualLoop(asyncio.SelectorEventLoop):
  """An event loop that never sleeps: when nothing is ready its time jumps to the next timer.

  The order of everything that happens is a function of the program alone, so that a run repeats, and simulated hours
  pass in seconds. While work is out on an executor's thread time stands still, and the loop really waits for it.

  Use it as `asyncio.Runner(loop_factory=VirtualLoop)`.
  """

  def __init__(self, *, patience_s: float = 3600.0):
    """`patience_s`: real seconds that the loop waits for work on a thread before it raises TimeoutError."""
    self._now = 0.0
    self._outside = 0  # calls that are out on an executor
    self._out_since = 0.0  # real time
    super().__init__(_Jumps(self, patience_s))
    # A nanosecond by default, which is lost in rounding after some months: then no timer would ever be due.
    self._clock_resolution = 1e-6

  def time(self) -> float:
    """Logical seconds."""
    return self._now

  def jump(self, to: float) -> None:
    """Sets the time of a run that goes on from a checkpoint. Only forward, since timers do not move."""
    if to < self._now:
      raise ValueError(f'the loop is at {self._now} s, after {to} s')
    self._now = to

  def run_in_executor(self, executor, function, *args):
    future = super().run_in_executor(executor, function, *args)
    self._goes_out()
    future.add_done_callback(lambda _: self._comes_back())
    return future

  async def shutdown_default_executor(self, *args) -> None:
    self._goes_out()
    try:
      await super().shutdown_default_executor(*args)
    finally:
      self._comes_back()

  def _goes_out(self) -> None:
    if not self._outside:
      self._out_since = time.monotonic()
    self._outside += 1

  def _comes_back(self) -> None:
    self._outside -= 1


class _Jumps(selectors.DefaultSelector):
  """Moves the loop's time where another selector would sleep."""

  def __init__(self, loop: VirtualLoop, patience_s: float):
    super().__init__()
    self._loop, self._patience_s = loop, patience_s

  def select(self, timeout: float | None = None) -> list:
    loop = self._loop
    if loop._outside and timeout != 0:
      left = loop._out_since + self._patience_s - time.monotonic()
      events = super().select(max(left, 0.0))
      if not events:
        raise TimeoutError(f'work on a thread takes more than {self._patience_s} s')
      return events
    events = super().select(0)  # signals
    if events or timeout == 0:
      return events
    if timeout is None:
      raise RuntimeError('every task waits for another one: nothing can ever happen again')
    loop._now += timeout
    return events
