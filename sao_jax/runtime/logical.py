"""Real work under a logical clock: the deterministic mode.

Tools, graders and updates really run, on threads, while the event loop's time is logical (`clock.VirtualLoop`). What takes
an unknown real time takes a fixed logical time: it is started at once, and at its logical end the loop waits for it. So
everything overlaps as in a real run, and the order of all events is a function of the config.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from sao_jax.runtime.failures import RunFailed

_JOIN_S = 10.0


class Outside:
  """A real event loop on a thread of its own, in which tools and graders live."""

  def __init__(self, patience_s: float):
    """`patience_s`: real seconds that anything may take beyond its logical end."""
    self._patience_s = patience_s
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name='outside', daemon=True)
    self._thread.start()

  def wrap(
    self, call: Callable[..., Awaitable[Any]], seconds: float
  ) -> Callable[..., Awaitable[Any]]:
    """`call`, run outside, whose answer comes `seconds` of the calling loop's time later. Errors pass through."""

    async def called(*args: Any) -> Any:
      future = asyncio.run_coroutine_threadsafe(call(*args), self._loop)
      try:
        await asyncio.sleep(seconds)
      except asyncio.CancelledError:
        future.cancel()
        raise
      return _wait(future, self._patience_s, 'a tool')

    return called

  def close(self) -> None:
    """Ends the loop and its thread. Idempotent."""
    if not self._loop.is_closed():
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join(_JOIN_S)
      if self._thread.is_alive():
        raise RuntimeError(f'the loop of the tools does not end within {_JOIN_S} s')
      self._loop.close()


class LogicalWork:
  """Runs pieces of the learner's work on a thread; each takes fixed logical seconds."""

  def __init__(self, seconds: dict[str, float], patience_s: float):
    """`seconds`: of each kind of work. `patience_s`: real seconds, compilation included."""
    self._seconds, self._patience_s = seconds, patience_s

  async def __call__(self, what: str, function: Callable, *args: Any) -> Any:
    future = concurrent.futures.Future()

    def work():
      try:
        future.set_result(function(*args))
      except BaseException as error:
        future.set_exception(error)

    # A daemon, unlike a pool's: work that hangs does not keep the process.
    threading.Thread(target=work, name=what, daemon=True).start()
    if self._seconds[what]:
      await asyncio.sleep(self._seconds[what])
    return _wait(future, self._patience_s, what)


def _wait(future: concurrent.futures.Future, seconds: float, what: str) -> Any:
  """Blocks the loop, and so its time, until the result is there."""
  done, _ = concurrent.futures.wait([future], timeout=seconds)
  if not done:
    raise RunFailed(f'{what} takes more than {seconds} s')
  return future.result()
