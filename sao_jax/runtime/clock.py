"""Time as an argument."""

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds of learning, the warm start left out, over all restarts


def real_clock(already: float = 0.0) -> Clock:
  """A monotonic clock that starts at `already` seconds."""
  start = time.monotonic() - already
  return lambda: time.monotonic() - start
