"""The processes of a run do something together and tell each other how it went, so that none is left waiting.

What they tell goes through the coordination service of `jax.distributed`, not through the devices: a worker thread may call this
while another thread has a collective at work. One process is the trivial case: nothing is told.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

_calls = (
  itertools.count()
)  # of this process; the same in all, as all make the same calls in the same order


class PeerFailed(RuntimeError):
  """Another process failed or did not answer. One line: which one, and what it said."""


class Peers:
  """Made anew by all processes for each thing that they do together, one at a time."""

  def __init__(self, timeout_s: float):
    """`timeout_s`: how long one may be waited for. Longer than the longest step, since all start each step at once."""
    from jax._src import distributed  # the service has no public client

    self.index, self.count = jax.process_index(), jax.process_count()
    self._client, self._timeout_ms = distributed.global_state.client, int(1000 * timeout_s)
    self._call, self._stages = next(_calls), itertools.count()

  @property
  def prefix(self) -> str:
    """Of names that belong to this call alone, the same in every process."""
    return f'sao_jax/peers/{self._call}'

  def first(self, work: Callable[[], Any]) -> Any:
    """Process 0 works; all return what it returned, which must be JSON-able.

    Raises:
      PeerFailed: in the others, if process 0 failed. There its own exception goes on.
    """
    return self._together(work if self.index == 0 else None, [0])

  def each(self, work: Callable[[], Any]) -> Any:
    """Every process works and returns its own result, once all are done.

    Raises:
      PeerFailed: another process failed. Where `work` failed, its own exception goes on.
    """
    result = []
    self._together(lambda: result.append(work()), range(self.count))
    return result[0]

  def _together(self, work, speakers) -> Any:
    if self.count == 1:
      return work()
    stage = f'{self.prefix}/{next(self._stages)}'
    try:
      said = {'result': work()} if work else None
    except BaseException as error:
      self._client.key_value_set(f'{stage}/{self.index}', json.dumps({'error': _line(error)}))
      raise
    if said is not None:
      self._client.key_value_set(f'{stage}/{self.index}', json.dumps(said))
    for speaker in speakers:
      said = self._hear(stage, speaker)
      if 'error' in said:
        raise PeerFailed(f'process {speaker} of {self.count} failed: {said["error"]}')
    return said['result']

  def _hear(self, stage, speaker) -> dict[str, Any]:
    try:
      return json.loads(self._client.blocking_key_value_get(f'{stage}/{speaker}', self._timeout_ms))
    except jax.errors.JaxRuntimeError as error:
      raise PeerFailed(
        f'process {speaker} of {self.count} has not answered for {self._timeout_ms / 1000} s: {_line(error)}'
      ) from error


def _line(error: BaseException) -> str:
  return f'{type(error).__name__}: {error}'.splitlines()[0]
