"""Does a recorded run again, from its journal.

Tools and time are not run again: their answers are in the record. Sampling, packing and learning are, with the same
programs, and every checksum is compared.
"""

import asyncio
import collections
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sao_jax.batching import fingerprint
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.journal import FILE
from sao_jax.types import (
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

_PASSES = (
  1000  # of the event loop, in which an episode must ask for what it asked for in the record
)
_TIMEOUT_S = 600.0  # of an episode that has all answers


class _Answers:
  """An environment that says again what the record says that it said."""

  def __init__(self, ahead: Callable[[], dict[str, Any]]):
    """`ahead`: the next answer to this episode in the lines of the record that were not read yet."""
    self.lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    self._ahead = ahead

  async def reset(self, task: Task) -> Turn:
    return _answer(await self.lines.get())

  async def step(self, action: np.ndarray) -> Turn | Outcome:
    return _answer(await self.lines.get())

  def cut(self) -> Outcome:
    # It was asked for as the engine answered, and stands behind that in the record.
    return _answer(self._ahead() if self.lines.empty() else self.lines.get_nowait())

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
    self._ahead: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
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

  async def take(self, episodes: int) -> list[Trajectory]:
    """Goes on in the record up to the next batch.

    Raises:
      Diverged: with the line and what differs there.
      Ended: there is no further batch.
    """
    for line in self._following():
      if line['kind'] == 'take':
        if missing := [e for e in line['episodes'] if e not in self._finished]:
          raise self._diverged(f'{missing[0]} is taken and has not finished')
        return [self._finished.pop(episode) for episode in line['episodes']]
      await self._do(line)
    raise Ended

  async def updated(self, version: int, digest: str) -> None:
    """Compares the learner's parameters with the record's at this version."""
    for line in self._following():
      if line['kind'] == 'update':
        if (line['version'], line['digest']) != (version, digest):
          raise self._diverged(f'update {version} gave {digest} and not {line["digest"]}')
        self.updates += 1
        return
      await self._do(line)
    raise Ended

  def end(self, why: str) -> None:
    """Raises Diverged if the record has another update."""
    if any(line['kind'] == 'update' for line in self._following()):
      raise self._diverged(why)

  async def close(self) -> None:
    """Ends what still plays, and the engine."""
    if self._engine is not None:
      self._engine.close()
      self._engine = None
    tasks = [task for task, _ in self._playing.values()]
    self._playing.clear()
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  def _following(self) -> Iterator[dict[str, Any]]:
    while self._ahead or (read := next(self._lines, None)):
      self._number, line = self._ahead.popleft() if self._ahead else read
      yield line

  def _answer_ahead(self, episode: str) -> dict[str, Any]:
    """Takes the next answer to the episode out of what was not read yet."""
    wanted = lambda line: line['kind'] == 'answer' and line['episode'] == episode
    for place, (_, line) in enumerate(self._ahead):
      if wanted(line):
        del self._ahead[place]
        return line
    for number, line in self._lines:
      if wanted(line):
        return line
      self._ahead.append((number, line))
    raise Ended

  async def _do(self, line: dict[str, Any]) -> None:
    kind, episode = line['kind'], line.get('episode')
    if kind == 'start':
      answers = _Answers(functools.partial(self._answer_ahead, episode))
      playing = self._play(
        answers,
        self,
        self._task_at(line['index']),
        episode=episode,
        group=line['group'],
        seed=line['seed'],
      )
      task = asyncio.create_task(playing)
      task.add_done_callback(
        lambda task: task.cancelled() or task.exception()
      )  # some failed then, too
      self._playing[episode] = task, answers
    elif kind == 'answer' and episode in self._playing:
      self._playing[episode][1].lines.put_nowait(line)
    elif kind == 'round':
      await self._round(line)
    elif kind == 'finished':
      await self._finish(episode, line['digest'])
    elif kind == 'restart':
      await self.close()

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
