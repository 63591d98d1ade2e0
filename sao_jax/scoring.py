"""Held-out scores, of a run beside its training or of a policy by itself."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from sao_jax import build
from sao_jax.evaluate import Evaluation, evaluate
from sao_jax.learner import TrainState
from sao_jax.report import summary
from sao_jax.report.metrics import MetricsWriter
from sao_jax.report.screen import Screen
from sao_jax.runtime import watchdog
from sao_jax.runtime.closing import closing
from sao_jax.types import Task


@contextlib.asynccontextmanager
async def serving(parts: build.Parts, params: Any, sandbox: Any) -> AsyncIterator[build.Services]:
  """Engines and grader outside of a run, on a real clock, with exported params; the sandbox is closed with them."""
  waits = watchdog.Waits(asyncio.get_running_loop().time)
  services = build.Services(parts, build.programs_of(parts), params, sandbox, waits=waits)
  async with closing(services.close, sandbox.close):
    yield services


async def score(
  parts: build.Parts, services: build.Services, tasks: Sequence[Task], *, name: str, samples: int
) -> Evaluation:
  """`evaluate` with the numbers of the config, on what the evaluation engine holds."""
  return await evaluate(
    services.evaluation_play,
    tasks,
    name=name,
    samples=samples,
    seed=parts.config.seed,
    concurrency=services.evaluation_slots,
    timeout_s=parts.limits.episode_timeout_s,
    retries=parts.limits.retries,
    back_off=parts.limits.back_off,
  )


@dataclasses.dataclass
class Evaluations:
  """Held-out scores, one at a time beside the training, on an engine of their own."""

  parts: build.Parts
  services: build.Services
  writer: MetricsWriter
  screen: Screen
  fail: Callable[[Exception], None]  # tells the run of an evaluation that went wrong beside it
  export: Callable[[TrainState], Any]  # a copy of the policy as engines take it
  running: asyncio.Task | None = None

  def start(self, state: TrainState, step: int) -> None:
    """Evaluates a copy of the policy in the background, after the evaluation that may still run."""
    # Copied now: the next update donates the original before the evaluation may begin.
    params = self.export(state)
    self.running = asyncio.create_task(self._after(self.running, params, step))

  async def _after(self, earlier: asyncio.Task | None, params: Any, step: int) -> None:
    if earlier is not None:
      await earlier
    try:
      await self._score(params, step)
    except Exception as error:
      self.fail(error)
      raise

  async def now(self, state: TrainState, step: int) -> dict[str, float]:
    """Evaluates a copy of the policy, records and returns the metrics."""
    return await self._score(self.export(state), step)

  async def _score(self, params: Any, step: int) -> dict[str, float]:
    """Evaluates params that the engine may keep."""
    c = self.parts.config.evaluation
    self.services.evaluation_engine.load(params, step)
    result = await score(
      self.parts, self.services, self.parts.heldout, name=f'eval-{step}', samples=c.samples
    )
    metrics = summary.of_evaluation(result)
    self.writer.write(step, metrics)
    self.screen.score(metrics)
    self.screen.note(
      f'held-out pass@1 after {step} updates: {result.pass_at_1:.3f} '
      f'(standard error {result.standard_error:.3f}, {len(result.trajectories)} episodes)'
    )
    return metrics

  async def finish(self) -> None:
    """Waits for what was started."""
    if self.running is not None:
      await self.running

  async def cancel(self) -> None:
    """Ends what still runs; its score is not recorded."""
    if self.running is not None:
      self.running.cancel()
      await asyncio.gather(self.running, return_exceptions=True)
