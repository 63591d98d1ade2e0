"""Time as an argument."""

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds since the run first started, over all its restarts


def real_clock(already: float = 0.0) -> Clock:
  """A monotonic clock that starts at `already` seconds."""
  start = time.monotonic() - already
  return lambda: time.monotonic() - start
