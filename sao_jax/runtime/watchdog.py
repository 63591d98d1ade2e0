"""An end for work that cannot be interrupted."""

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

FAILED = 3


async def bounded(what: str, seconds: float, function: Callable, *args: Any) -> Any:
  """`function(*args)` on a thread. If it does not end in time, the process does.

  A thread that hangs in a device or a file system can be neither cancelled nor joined, so a clean shutdown would
  wait for it. The last line says what hangs; sandbox workers die with their parent; the last checkpoint is whole.
  """
  work = asyncio.create_task(asyncio.to_thread(function, *args))
  await asyncio.wait({work}, timeout=seconds)
  if not work.done():
    print(f'failed: {what} takes more than {seconds} s', file=sys.stderr, flush=True)
    os._exit(FAILED)
  return work.result()
