"""WORKDIR/replay.jsonl: what a run owes to chance. `runtime.replay` does the rest again.

start     an episode begins to play: its prompt's index, its group, its seed
answer    what the environment said: a turn, an outcome, the outcome of a cut, or a failure
round     what the engine decided in one round, under which version, and a checksum of what it sampled
finished  an episode ended with data, and a checksum of it
take      the episodes of an update, in their order
update    the learner's new version, and a digest of its parameters
restart   the run went on from a checkpoint here; what was under way is gone
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sao_jax.batching import check_answer
from sao_jax.report.metrics import cut_tail
from sao_jax.types import Env, EpisodeFailure, Outcome, Task, Turn

FILE = 'replay.jsonl'


class Journal:
  """The record under way. Engine, environments and dispatcher write, from their threads."""

  def __init__(self, workdir: Path, *, resume_at: int):
    """`resume_at`: bytes that the checkpoint counts on, 0 without one; later lines move to replay.lost.jsonl."""
    path = workdir / FILE
    cut_tail(path, resume_at, path.with_name('replay.lost.jsonl'))
    self._lock = threading.Lock()
    self._file = path.open('a')
    if resume_at:
      self({'kind': 'restart'})

  def __call__(self, line: dict[str, Any]) -> None:
    text = json.dumps(line, separators=(',', ':'), default=np.generic.item) + '\n'
    with self._lock:
      if not self._file.closed:  # an engine's last round may end after the run
        self._file.write(text)

  async def updated(self, version: int, digest: str) -> None:
    """The learner has made a version."""
    self({'kind': 'update', 'version': version, 'digest': digest})

  def offset(self) -> int:
    """Bytes that are safely on disk."""
    with self._lock:
      self._file.flush()
      os.fsync(self._file.fileno())
      return self._file.tell()

  def close(self) -> None:
    """Idempotent."""
    with self._lock:
      self._file.close()


class Recorded:
  """An environment whose answers are recorded."""

  def __init__(self, env: Env, episode: str, journal: Callable[[dict[str, Any]], None]):
    self._env, self._episode, self._journal = env, episode, journal

  async def reset(self, task: Task) -> Turn:
    return await self._answer(self._env.reset(task), first=True)

  async def step(self, action: np.ndarray) -> Turn | Outcome:
    return await self._answer(self._env.step(action))

  def cut(self) -> Outcome:
    outcome = check_answer(self._env.cut())
    self._journal(self._line(outcome))
    return outcome

  async def close(self) -> None:
    await self._env.close()

  async def _answer(self, asked, *, first: bool = False):
    try:
      answer = check_answer(await asked, first=first)
    except EpisodeFailure as failure:
      said = [failure.kind.value, str(failure).partition(': ')[2]]
      self._journal({'kind': 'answer', 'episode': self._episode, 'failure': said})
      raise
    self._journal(self._line(answer))
    return answer

  def _line(self, answer: Turn | Outcome) -> dict[str, Any]:
    line = {'kind': 'answer', 'episode': self._episode}
    if isinstance(answer, Turn):
      return {**line, 'turn': answer.tokens.tolist()}
    o = answer
    return {**line, 'outcome': [o.reward, o.terminated, o.truncated, o.stop_reason.value, o.info]}
