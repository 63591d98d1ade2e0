"""The processes of a run: process 0 leads, the others follow.

The leader has everything that must exist once: engines, environments, ledger, metrics. A follower has devices of the learner's mesh,
and does the leader's steps with arrays that lie over all of them, in the leader's order. It hears of each step through the
coordination service of `jax.distributed` and not through its devices, since it may wait for minutes while episodes are played.

No wait here needs a follower's own deadline on the leader: a leader that dies is missed by the heartbeat, and one that is stuck
ends itself (see `watchdog`). One process is the trivial crew: nothing is told.
"""

import functools
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.peers import Peers

END = 'end'
JOIN_S = 300  # that the processes may start one after the other
PIECE = 1_000_000  # bytes of one message; the service takes less than 4 MB
SLICE_S = 1.0  # of a wait, between looks at what else there is
_LAST_S = (
  3600  # until JAX itself ends processes of which one is silent: `runtime.heartbeat` comes first
)
_EXIT_S = 60  # that a process which ends waits for the others
_ROOT = 'sao_jax/crew'


class Command(NamedTuple):
  """One thing that the leader does with arrays of all processes."""

  what: str
  numbers: tuple[Any, ...]  # JSON-able
  arrays: dict[str, np.ndarray]  # of the host; mostly none


class Crew:
  """How leader and followers speak. One thread of a process at a time."""

  def __init__(self, store: Any, index: int, count: int, patience_s: float):
    """`store`: the client of the coordination service; `patience_s`: how long a follower may take for one command."""
    self.index, self.count = index, count
    self._store, self._patience_s = store, patience_s
    self._told = 0  # commands so far, of which the last one may still lie in the store

  def tell(self, what: str, *numbers: Any, arrays: dict[str, np.ndarray] | None = None) -> None:
    """The followers do this next. The leader says it right before it does it; in a follower, and alone, nothing happens.

    Returns when all have read the command before, so that at most two lie in the store.

    Raises:
      RunFailed: a follower failed, or has not read the command before for `patience_s`.
    """
    if self.index or self.count == 1:
      return
    if self._told:
      self._collect(self._patience_s)
    data = encode(Command(what, numbers, arrays or {}))
    pieces = range(0, len(data), PIECE)
    for i, start in enumerate(pieces):
      more = b'+' if i + 1 < len(pieces) else b'.'
      self._store.key_value_set_bytes(
        f'{_ROOT}/{self._told}/{i}', more + data[start : start + PIECE]
      )
    self._told += 1

  def commands(self) -> Iterator[Command]:
    """What a follower is told, until the end, which is the last one.

    Raises:
      RunFailed: the service is gone, and the leader with it.
    """
    while True:
      data, more = b'', True
      for i in range(2**31):
        piece = self._hear(f'{_ROOT}/{self._told}/{i}')
        data, more = data + piece[1:], piece[:1] == b'+'
        if not more:
          break
      self._store.key_value_set(f'{_ROOT}/{self._told}/read/{self.index}', '')
      self._told += 1
      command = decode(data)
      yield command
      if command.what == END:
        return

  def end(self, code: int, reason: str, seconds: float) -> None:
    """The last command of the leader: all end with this exit code. Returns when all know it.

    Raises:
      RunFailed: as `tell`; or one does not hear it for `seconds`.
    """
    self.tell(END, code, reason)
    if self.count > 1:
      self._collect(seconds)

  def fail(self, reason: str) -> None:
    """A follower says why it ends. The leader finds it where it waits for it."""
    self._store.key_value_set(f'{_ROOT}/failed/{self.index}', reason, allow_overwrite=True)

  def ask_to_stop(self) -> None:
    """A follower that got a signal asks for the end that a signal of the leader brings."""
    self._store.key_value_set(f'{_ROOT}/stop/{self.index}', '', allow_overwrite=True)

  def asked_to_stop(self) -> bool:
    """Whether a follower has asked the leader."""
    return self.count > 1 and bool(self._store.key_value_dir_get(f'{_ROOT}/stop'))

  def raise_failed(self, seconds: float = 0.0) -> None:
    """Looks for `seconds` whether a follower said why it ends. Raises RunFailed with its reason, if one did."""
    deadline = time.monotonic() + seconds
    while self.count > 1:
      for key, reason in self._store.key_value_dir_get(f'{_ROOT}/failed'):
        raise RunFailed(f'process {key.rpartition("/")[2]} of {self.count}: {reason}')
      if time.monotonic() >= deadline:
        return
      time.sleep(min(SLICE_S, seconds))

  def compiled(self, function: Callable, *args: Any) -> None:
    """Compiles a jitted function in all processes before one of them runs it.

    Collectives of some back-ends wait for half a minute only, and a busy machine compiles for longer.
    """
    if self.count > 1:
      Peers(self._patience_s).each(lambda: function.lower(*args).compile())

  def _collect(self, seconds: float) -> None:
    """Waits until all have read the last command, and removes it."""
    last, deadline = f'{_ROOT}/{self._told - 1}', time.monotonic() + seconds
    for index in range(1, self.count):
      while self._get(f'{last}/read/{index}') is None:
        self.raise_failed()
        if time.monotonic() > deadline:
          raise RunFailed(f'process {index} of {self.count} has not read a command for {seconds} s')
    self._store.key_value_delete(last)

  def _hear(self, key: str) -> bytes:
    while (piece := self._get(key)) is None:
      pass
    return piece

  def _get(self, key: str) -> bytes | None:
    """The value, as soon as it is there; None after a slice of time without it."""
    try:
      return self._store.blocking_key_value_get_bytes(key, int(1000 * SLICE_S))
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' in str(error):
        return None
      raise RunFailed(
        f'the coordination service does not answer: {error}'.splitlines()[0]
      ) from error


ALONE = Crew(None, 0, 1, 0.0)


def join(address: str, count: int, index: int, patience_s: float) -> Crew:
  """Makes this process one of `count`. Before anything else of JAX.

  The service is a thread of process 0: when that one is killed, JAX aborts the others at once (SIGABRT). When a follower is,
  `runtime.heartbeat` ends the others with a reason, long before JAX's own heartbeat would.

  Args:
    address: HOST:PORT of process 0, where the service will be.
    patience_s: see `Crew`.

  Raises:
    RuntimeError: the others are not there within JOIN_S, or the port is taken.
  """
  jax.config.update('jax_enable_preemption_service', False)  # it takes SIGTERM from us
  jax.distributed.initialize(
    address,
    count,
    index,
    initialization_timeout=JOIN_S,
    heartbeat_timeout_seconds=_LAST_S,
    shutdown_timeout_seconds=_EXIT_S,
  )
  from jax._src import distributed  # the service has no public client

  return Crew(distributed.global_state.client, index, count, patience_s)


def gathered(leaf: jax.Array, launch: AbstractContextManager) -> jax.Array:
  """The whole of an array that is cut over the devices of several processes, on one device of ours. All processes call it.

  While it is used each device of the mesh holds a copy: let it go before the next one.
  """
  with launch:
    copy = _copy(leaf.sharding.mesh)(leaf)
  return jax.block_until_ready(copy).addressable_data(0)


@functools.cache
def _copy(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def encode(command: Command) -> bytes:
  """A compressed npz archive, without pickle."""
  text = json.dumps([command.what, *command.numbers]).encode()
  buffer = io.BytesIO()
  np.savez_compressed(
    buffer, allow_pickle=False, command=np.frombuffer(text, np.uint8), **command.arrays
  )
  return buffer.getvalue()


def decode(data: bytes) -> Command:
  """The inverse of `encode`."""
  with np.load(io.BytesIO(data), allow_pickle=False) as archive:
    arrays = dict(archive)
  what, *numbers = json.loads(arrays.pop('command').tobytes())
  return Command(what, tuple(numbers), arrays)
