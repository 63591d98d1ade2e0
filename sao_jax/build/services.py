"""The side of a run that has processes and threads."""

import asyncio
import functools
import zlib
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from sao_jax.build.assemble import Parts
from sao_jax.engines.local import LocalEngine
from sao_jax.engines.programs import Programs, make_programs
from sao_jax.envs.grading import Grader
from sao_jax.envs.math_python import MathPython
from sao_jax.rollout import run_episode
from sao_jax.runtime.failures import holding
from sao_jax.runtime.journal import Recorded
from sao_jax.runtime.logical import Outside
from sao_jax.runtime.watchdog import Waits
from sao_jax.sandbox import PythonSandbox
from sao_jax.types import Engine, Env, FailureKind, Task, Trajectory


def make_sandbox(config: ConfigDict) -> PythonSandbox:
  """Starts the sandbox and proves that it isolates.

  Raises:
    ValueError: this machine offers no isolation that it knows.
  """
  section = config.sandbox
  return PythonSandbox(
    num_workers=section.num_workers,
    timeout_s=section.timeout_s,
    memory_mb=section.memory_mb,
    output_bytes=section.output_bytes,
  )


def programs_of(parts: Parts) -> Programs:
  """The engine's programs, compiled for what `parts.model.export` gives."""
  c, chat = parts.config, parts.model.chat
  stops = {chat.stop_token}
  if c.chat.format != 'bytes':
    stops.add(
      chat.pad_token
    )  # <|endoftext|>, with which base models end: nothing of worth comes after it
  return make_programs(
    parts.model.engine_model,
    parts.model.exported,
    num_slots=c.engine.num_slots,
    max_length=c.env.max_tokens,
    decode_steps=c.engine.decode_steps,
    prefill_rows=c.engine.prefill_rows,
    prefill_buckets=c.engine.prefill_buckets,
    stop_tokens=tuple(stops),
    mesh=parts.model.engine_mesh,
    launch=parts.model.launch,
  )


async def play_on(
  c: ConfigDict,
  vocab_size: int,
  env: Env,
  engine: Engine,
  task: Task,
  *,
  episode: str,
  group: str,
  seed: int,
  at: Callable[[str], None] = lambda what: None,
) -> Trajectory:
  """One training episode with the budgets of the config."""
  return await run_episode(
    env,
    engine,
    task,
    episode=episode,
    group=group,
    seed=seed,
    temperature=c.env.temperature,
    max_turn_tokens=c.env.max_turn_tokens,
    max_tokens=c.env.max_tokens,
    vocab_size=vocab_size,
    at=at,
  )


def delayed(
  run: Callable[[str], Awaitable[Any]], scale_s: float, cap_s: float, seed: int
) -> Callable[[str], Awaitable[Any]]:
  """`run` after scale_s * Pareto(1.5) seconds, at most cap_s: a function of the code and the seed, equal in all modes."""

  async def slow(code: str) -> Any:
    words = [seed, zlib.crc32(code.encode('utf-8', 'surrogatepass'))]
    latency = scale_s * (1 + np.random.default_rng(words).pareto(1.5))
    await asyncio.sleep(min(latency, cap_s))
    return await run(code)

  return slow


class Services:
  """Engines and grader, and how an episode is played on them and on a sandbox."""

  def __init__(
    self,
    parts: Parts,
    programs: Programs,
    params: Any,
    sandbox: PythonSandbox,
    *,
    waits: Waits,
    journal: Callable[[dict[str, Any]], None] | None = None,
    outside: Outside | None = None,
  ):
    """Starts the engines, which both hold `params` as version 0. The sandbox stays the caller's.

    Args:
      params: of `parts.model.export`. Nobody may donate them.
      waits: where episodes tell what they wait for.
      journal: of a replay; None: nothing is recorded.
      outside: where sandbox and grader live in deterministic mode; then the engines make their rounds in the running event
        loop. None: a real clock, and threads.
    """
    c = parts.config
    self._waits, self._journal = waits, journal
    self._chat, self._vocab_size = parts.model.chat, programs.vocab_size
    grader = Grader(timeout_s=c.env.grader_timeout_s, num_workers=1)
    run, grade, self._close_grader = sandbox.run, grader.grade, grader.close
    if outside is not None:
      run = outside.wrap(run, c.runtime.logical.tool_s)
      grade = outside.wrap(grade, c.runtime.logical.grade_s)
      self._close_grader = outside.wrap(grader.close, 0.0)
    if c.sandbox.latency_s:
      run = delayed(run, c.sandbox.latency_s, c.sandbox.max_latency_s, c.seed)
    held = holding(grade, FailureKind.GRADER, c.runtime.grader_holds, parts.limits.back_off)
    self._sandbox, self._grader = SimpleNamespace(run=run), SimpleNamespace(grade=held)
    self._drivers: list[asyncio.Task] = []
    self.engine = self._engine(programs, params, outside is not None, journal, c)
    self.evaluation_engine = self._engine(programs, params, outside is not None, None, c)
    self.evaluation_slots = c.engine.num_slots
    self.play = functools.partial(self._play, c)
    scored = c.copy_and_resolve_references()
    scored.env.temperature = c.evaluation.temperature
    self.evaluation_play = functools.partial(self._play_scored, scored)

  def _engine(self, programs, params, logical: bool, journal, c: ConfigDict) -> LocalEngine:
    engine = LocalEngine(programs, params, version=0, journal=journal)
    if not logical:
      return engine.start()
    self._drivers.append(asyncio.create_task(engine.drive(c.runtime.logical.round_s)))
    return engine

  def _env(self, c: ConfigDict) -> MathPython:
    return MathPython(
      chat=self._chat,
      sandbox=self._sandbox,
      grader=self._grader,
      max_turns=c.env.max_turns,
      observation_bytes=c.env.observation_bytes,
    )

  async def _play(self, c: ConfigDict, task: Task, *, episode: str, **rest) -> Trajectory:
    env = self._env(c)
    if self._journal is not None:
      env = Recorded(env, episode, self._journal)
    at = functools.partial(self._waits.begin, f'episode {episode}')  # the dispatcher ends it
    return await play_on(
      c, self._vocab_size, env, self.engine, task, episode=episode, at=at, **rest
    )

  async def _play_scored(self, c: ConfigDict, task: Task, *, episode: str, **rest) -> Trajectory:
    who = f'evaluation {episode}'
    at = functools.partial(self._waits.begin, who)
    try:
      env, engine = self._env(c), self.evaluation_engine
      return await play_on(c, self._vocab_size, env, engine, task, episode=episode, at=at, **rest)
    finally:
      self._waits.end(who)

  async def close(self) -> None:
    """Ends the engines' threads and the grader's processes."""
    for driver in self._drivers:
      driver.cancel()
    await asyncio.gather(*self._drivers, return_exceptions=True)
    engines = [asyncio.to_thread(e.close) for e in (self.engine, self.evaluation_engine)]
    for result in await asyncio.gather(self._close_grader(), *engines, return_exceptions=True):
      if isinstance(result, BaseException):
        raise result
