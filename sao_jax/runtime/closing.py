"""The end of what must be closed, whatever happens."""

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from sao_jax.runtime import watchdog

CLOSE_S = 120.0


@contextlib.asynccontextmanager
async def closing(*closers: Callable[[], Any]) -> AsyncIterator[None]:
  """Calls every closer at the end, whatever the others do. An error of closing never hides the error of the run.

  Closers that take more than CLOSE_S in all end the process.
  """
  failure = None
  try:
    yield
  except BaseException as error:
    failure = error
  in_time = watchdog.exit_after(
    CLOSE_S, watchdog.FAILED, f'failed: closing takes more than {CLOSE_S} s; before: {failure!r}'
  )
  for close in closers:
    try:
      result = close()
      if inspect.isawaitable(result):
        await result
    except BaseException as error:
      if failure is None:
        failure = error
      else:
        failure.add_note(f'and while closing: {error!r}')
  in_time()
  if failure is not None:
    raise failure
