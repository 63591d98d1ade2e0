"""Record and replay: WORKDIR/replay.jsonl holds what a run owes to chance, and a replay does the rest again.

  start     an episode begins to play: its prompt's index, its group, its seed
  answer    what the environment said: a turn, an outcome, the outcome of a cut, or a failure
  round     what the engine decided in one round, under which version, and a checksum of what it sampled
  finished  an episode ended with data, and a checksum of it
  take      the episodes of an update, in their order
  update    the learner's new version, and a digest of its parameters
  restart   the run went on from a checkpoint here; what was under way is gone

Tools and time are not run again: their answers are in the record. Sampling, packing and learning are, with the same
programs, and every checksum is compared.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sao_jax.batching import fingerprint
from sao_jax.report.metrics import cut_tail
from sao_jax.runtime.failures import RunFailed
from sao_jax.types import (
  Env,
  EpisodeFailure,
  FailureKind,
  Generation,
  Outcome,
  Request,
  StopReason,
  Task,
  Trajectory,
  Turn,
)

FILE = 'replay.jsonl'
_PASSES = (
  1000  # of the event loop, in which an episode must ask for what it asked for in the record
)
_TIMEOUT_S = 600.0  # of an episode that has all answers


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
    text = json.dumps(line, separators=(',', ':')) + '\n'
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
    return await self._answer(self._env.reset(task))

  async def step(self, action: np.ndarray) -> Turn | Outcome:
    return await self._answer(self._env.step(action))

  def cut(self) -> Outcome:
    outcome = self._env.cut()
    self._journal(self._line(outcome))
    return outcome

  async def close(self) -> None:
    await self._env.close()

  async def _answer(self, asked):
    try:
      answer = await asked
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


class _Answers:
  """An environment that says again what the record says that it said."""

  def __init__(self):
    self.lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

  async def reset(self, task: Task) -> Turn:
    return _answer(await self.lines.get())

  async def step(self, action: np.ndarray) -> Turn | Outcome:
    return _answer(await self.lines.get())

  def cut(self) -> Outcome:
    return _answer(self.lines.get_nowait())

  async def close(self) -> None:
    pass


def _answer(line: dict[str, Any]) -> Turn | Outcome:
  if 'failure' in line:
    kind, message = line['failure']
    raise EpisodeFailure(FailureKind(kind), message)
  if 'turn' in line:
    return Turn(np.asarray(line['turn'], np.int32))
  reward, terminated, truncated, stop_reason, info = line['outcome']
  return Outcome(reward, terminated, truncated, StopReason(stop_reason), info)


class Diverged(RunFailed):
  """The replay does not do what the record says."""


class Ended(Exception):
  """The record ends here: the run was stopped, or went no further."""


def read(workdir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """The numbered lines of a record. A last line without its end, of a killed run, is left out.

  Raises:
    ValueError: the run was not recorded.
  """
  path = workdir / FILE
  if not path.exists() or not path.stat().st_size:
    raise ValueError(f'{path} is missing or empty: the run was not recorded (runtime.record)')
  with path.open() as lines:
    for number, line in enumerate(lines, start=1):
      if line.endswith('\n'):
        yield number, json.loads(line)


class Replayer:
  """Stands for engine and dispatcher of a run, and does again what the record says."""

  def __init__(
    self,
    lines: Iterator[tuple[int, dict[str, Any]]],
    play: Callable[..., Any],
    task_at: Callable[[int], Task],
    make_engine: Callable[[Any, int], Any],
  ):
    """Args:
    lines: see `read`.
    play: (env, engine, task, *, episode, group, seed) -> Trajectory.
    make_engine: (params, version) -> a LocalEngine that is not started.
    """
    self._lines, self._play, self._task_at = lines, play, task_at
    self._make_engine, self._engine = make_engine, None
    self._params: dict[int, Any] = {}  # versions that rounds may still use
    self._loaded = -1
    self._playing: dict[str, tuple[asyncio.Task, _Answers]] = {}
    self._finished: dict[str, Trajectory] = {}
    self._number = 0  # of the line at work
    self.rounds = self.updates = 0

  def load(self, params: Any, version: int) -> None:
    """As the loop loads an engine; ours gets the parameters when the record says so."""
    self._params[version] = params

  async def generate(self, request: Request) -> Generation:
    return await self._engine_now().generate(request)

  def release(self, episode: str) -> None:
    """The record frees the slots."""

  async def take(self, episodes: int, *, in_order: bool = False) -> list[Trajectory]:
    """Goes on in the record up to the next batch.

    Raises:
      Diverged: with the line and what differs there.
      Ended: there is no further batch.
    """
    for number, line in self._lines:
      self._number = number
      if line['kind'] == 'take':
        if missing := [e for e in line['episodes'] if e not in self._finished]:
          raise self._diverged(f'{missing[0]} is taken and has not finished')
        return [self._finished.pop(episode) for episode in line['episodes']]
      await self._do(line)
    raise Ended

  async def updated(self, version: int, digest: str) -> None:
    """Compares the learner's parameters with the record's at this version."""
    for number, line in self._lines:
      self._number = number
      if line['kind'] == 'update':
        if (line['version'], line['digest']) != (version, digest):
          raise self._diverged(f'update {version} gave {digest} and not {line["digest"]}')
        self.updates += 1
        return
      await self._do(line)
    raise Ended

  async def close(self) -> None:
    """Ends what still plays."""
    tasks = [task for task, _ in self._playing.values()]
    self._playing.clear()
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  async def _do(self, line: dict[str, Any]) -> None:
    kind, episode = line['kind'], line.get('episode')
    if kind == 'start':
      answers = _Answers()
      playing = self._play(
        answers,
        self,
        self._task_at(line['index']),
        episode=episode,
        group=line['group'],
        seed=line['seed'],
      )
      self._playing[episode] = asyncio.create_task(playing), answers
    elif kind == 'answer' and episode in self._playing:
      self._playing[episode][1].lines.put_nowait(line)
    elif kind == 'round':
      await self._round(line)
    elif kind == 'finished':
      await self._finish(episode, line['digest'])
    elif kind == 'restart':
      await self.close()
      self._engine = None

  def _engine_now(self):
    """The engine; after a restart a new one, on the newest parameters."""
    if self._engine is None:
      self._loaded = max(self._params)
      self._engine = self._make_engine(self._params[self._loaded], self._loaded)
    return self._engine

  async def _round(self, line: dict[str, Any]) -> None:
    engine, version = self._engine_now(), line['version']
    if version != self._loaded:
      if version not in self._params:
        raise self._diverged(f'a round under version {version}, which there is not')
      engine.load(self._params[version], version)
      self._loaded = version
      self._params = {v: params for v, params in self._params.items() if v >= version}
    admitted = {operation[2] for operation in line['operations'] if operation[0] == 'admit'}
    for _ in range(_PASSES):
      if admitted <= set(engine.waiting()):
        break
      await asyncio.sleep(0)
    else:
      missing = sorted(admitted - set(engine.waiting()))
      raise self._diverged(f'{missing[0]} asked the engine for a turn, and does not now')
    try:
      done = engine.redo(version, line['operations'])
    except ValueError as error:
      raise self._diverged(str(error)) from error
    self.rounds += 1
    for what in ('sampled', 'digest'):
      if done[what] != line[what]:
        raise self._diverged(
          f'the engine sampled other tokens or log-probabilities under version {version} '
          f'({what} {done[what]}, recorded {line[what]})'
        )

  async def _finish(self, episode: str, digest: int) -> None:
    task, _ = self._playing.pop(episode)
    await asyncio.wait({task}, timeout=_TIMEOUT_S)
    if not task.done() or task.exception() is not None:
      raise self._diverged(f'{episode} finished, and does not now: {task!r}')
    if fingerprint(task.result()) != digest:
      raise self._diverged(f'{episode} is another trajectory')
    self._finished[episode] = task.result()

  def _diverged(self, what: str) -> Diverged:
    return Diverged(f'the replay diverges at line {self._number} of {FILE}: {what}')
