"""Signs of life between the processes of a run that share a folder.

A process that dies leaves the others in a collective for ever. Here each one writes a file that changes, and ends itself
when another one's does not. A process that is alive and stuck is not seen here: its own deadlines (see `watchdog`) end it,
and then it is missed.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sao_jax.runtime.watchdog import FAILED, end_process, exit_after


@dataclasses.dataclass
class _Peer:
  """What we know of another process. Its clock is never read: only changes count, by our own clock."""

  heard: float  # our monotonic seconds
  known: dict[str, Any] | None = None  # the last state; None before the first look
  done: bool = False

  def look(self, state: dict[str, Any] | None, now: float) -> None:
    """`state`: {} if there is no file, None if it cannot be read; after the first look both are no news.

    The first look is no news either: what lies in the folder when we start may be of an earlier run.
    """
    if self.known is None:
      self.known = state
    elif state and state != self.known:
      self.known, self.heard, self.done = state, now, state.get('done', False)


class Heartbeat:
  """One file a process, `rank-00003`: {"rank", "count", "pid"}, and "done" after `stop`.

  A peer that is not heard for `timeout_s` ends this process with code 3, from a thread; so does a folder whose file system
  hangs. A peer that stopped well is no longer waited for. Choose `timeout_s` well above the longest time that a process
  may hold Python's global lock, and that the file system takes to show a change to others.
  """

  def __init__(self, folder: Path, *, rank: int, world: int, interval_s: float, timeout_s: float):
    """`rank` counts from 0, of `world` processes.

    Raises:
      ValueError: if the rank is not one of the world's, or the interval is not shorter than the timeout.
    """
    if not 0 <= rank < world:
      raise ValueError(f'rank {rank} is not one of {world} processes, which count from 0')
    if not 0 < interval_s < timeout_s <= threading.TIMEOUT_MAX:
      raise ValueError(
        f'interval_s {interval_s} must be positive and less than timeout_s {timeout_s}: a few beats must fit'
      )
    self._folder, self._rank, self._world = Path(folder), rank, world
    self._interval_s, self._timeout_s = interval_s, timeout_s
    self._file = self._folder / f'rank-{rank:05d}'
    self._count, self._complained = 0, False
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True)

  def start(self) -> None:
    """Call it once, before the first collective: a peer that has ended before we start counts as missing.

    Raises:
      OSError: the folder cannot be made, cleaned or written.
    """
    with self._deadline():
      self._folder.mkdir(parents=True, exist_ok=True)
      self._file.unlink(missing_ok=True)
      now = time.monotonic()
      self._peers = {rank: _Peer(now) for rank in range(self._world) if rank != self._rank}
      self._look()
      self._write()  # after the first look: who sees our file may end well at once, and we know it
    self._thread.start()

  def stop(self) -> None:
    """Tells the peers that we ended well; the file stays, so that they can read it. Idempotent.

    A process that stops while others still need it in a collective leaves them there: call it at the end of the run only.
    """
    if self._stopped.is_set() or not self._thread.is_alive():
      return
    self._stopped.set()
    self._thread.join(self._timeout_s)
    with self._deadline():
      self._try_to_write(done=True)

  def _beat(self) -> None:
    try:
      while not self._stopped.wait(self._interval_s):
        with self._deadline():
          self._try_to_write()
          self._look()
        self._check()
    except Exception as error:  # e.g. no more threads: without this one we could wait for ever
      end_process(FAILED, f'failed: the heartbeat ended with {error!r}')

  def _check(self) -> None:
    now = time.monotonic()
    for rank, peer in self._peers.items():
      if not peer.done and now - peer.heard > self._timeout_s:
        name = f'process {rank} of {self._world}'
        end_process(FAILED, f'failed: {name} has not been heard for {self._timeout_s} s')

  @contextlib.contextmanager
  def _deadline(self):
    """A file system that hangs ends the process."""
    reason = f'failed: {self._folder} has not answered for {self._timeout_s} s'
    cancel = exit_after(self._timeout_s, FAILED, reason)
    try:
      yield
    finally:
      cancel()

  def _look(self) -> None:
    for rank, peer in self._peers.items():
      peer.look(_read(self._folder / f'rank-{rank:05d}'), time.monotonic())

  def _try_to_write(self, **state) -> None:
    """A full disk is told once, and is no end: the peers will notice if it lasts."""
    try:
      self._write(**state)
    except OSError as error:
      if not self._complained:
        self._complained = True
        with contextlib.suppress(OSError):
          print(f'no sign of life can be written: {error}', file=sys.stderr, flush=True)

  def _write(self, **state) -> None:
    self._count += 1
    state = {'rank': self._rank, 'count': self._count, 'pid': os.getpid(), **state}
    aside = self._file.with_suffix('.new')
    aside.write_text(json.dumps(state))
    aside.replace(self._file)


def _read(path: Path) -> dict[str, Any] | None:
  """The state in a file; {} if there is none, None if it cannot be read or is half written."""
  try:
    state = json.loads(path.read_text())
  except FileNotFoundError:
    return {}
  except (OSError, ValueError):
    return None
  return state if isinstance(state, dict) and 'count' in state else None
