"""The side of a run that has processes and threads."""

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from sao_jax import tokens
from sao_jax.build.assemble import Parts
from sao_jax.engines.local import LocalEngine
from sao_jax.engines.programs import make_programs
from sao_jax.envs.grading import Grader
from sao_jax.envs.math_python import MathPython
from sao_jax.rollout import run_episode
from sao_jax.sandbox import PythonSandbox
from sao_jax.types import Engine, Task, Trajectory


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


class Services:
  """Engines and grader, and how an episode is played on them and on a sandbox."""

  def __init__(self, parts: Parts, params: Any, sandbox: PythonSandbox):
    """Starts the engines, which hold copies of `params` as version 0. The sandbox stays the caller's."""
    c = parts.config
    self._sandbox = sandbox
    self._grader = Grader(timeout_s=c.env.grader_timeout_s, num_workers=1)
    programs = make_programs(
      parts.model,
      params,
      num_slots=c.engine.num_slots,
      max_length=c.env.max_tokens,
      decode_steps=c.engine.decode_steps,
      prefill_rows=c.engine.prefill_rows,
      prefill_buckets=c.engine.prefill_buckets,
      stop_tokens=(tokens.EOT,),
    )
    self.engine = LocalEngine(programs, jax.tree.map(jnp.copy, params), version=0).start()
    self.evaluation_engine = LocalEngine(
      programs, jax.tree.map(jnp.copy, params), version=0
    ).start()
    self.evaluation_slots = c.engine.num_slots
    self.play = self._player(c, self.engine, c.env.temperature)
    self.evaluation_play = self._player(c, self.evaluation_engine, c.evaluation.temperature)

  def _player(self, c: ConfigDict, engine: Engine, temperature: float):
    async def play(task: Task, *, episode: str, group: str, seed: int) -> Trajectory:
      env = MathPython(
        chat=tokens.BYTE_CHAT,
        sandbox=self._sandbox,
        grader=self._grader,
        max_turns=c.env.max_turns,
        observation_bytes=c.env.observation_bytes,
      )
      return await run_episode(
        env,
        engine,
        task,
        episode=episode,
        group=group,
        seed=seed,
        temperature=temperature,
        max_turn_tokens=c.env.max_turn_tokens,
        max_tokens=c.env.max_tokens,
      )

    return play

  async def close(self) -> None:
    """Ends the engines' threads and the grader's processes."""
    await self._grader.close()
    closing = [asyncio.to_thread(e.close) for e in (self.engine, self.evaluation_engine)]
    for result in await asyncio.gather(*closing, return_exceptions=True):
      if isinstance(result, BaseException):
        raise result
