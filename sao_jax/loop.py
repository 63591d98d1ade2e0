"""The loop: take, update, publish, record, save."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sao_jax import batching, checkpoint
from sao_jax.learner import Learner, TrainState
from sao_jax.report import summary
from sao_jax.report.metrics import MetricsWriter
from sao_jax.runtime import watchdog
from sao_jax.runtime.clock import Clock
from sao_jax.runtime.dispatch import Dispatcher
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.ledger import Ledger
from sao_jax.types import Batch, Engine, Trajectory


class Stopped(Exception):
  """A signal asked the run to stop; the last checkpoint has what is needed to go on. The exit code is 75."""


@dataclasses.dataclass
class Run:
  """What the loop drives. All state of a run that is not the TrainState hangs here."""

  workdir: Path
  run_id: str
  learner: Learner  # jitted
  engine: Engine
  dispatcher: Dispatcher
  ledger: Ledger
  writer: MetricsWriter
  clock: Clock
  stop: asyncio.Event
  evaluate: Callable[[Any, int], None]  # (params, step): starts scoring a copy beside the run
  evaluated: Callable[[], Awaitable[None]]  # waits for it
  baseline: Callable[[list[Trajectory], Any], tuple[dict[str, float] | None, Any]]
  show: Callable[[str, int, int, dict[str, Any]], None]  # (phase, step, total, metrics)
  num_steps: int
  batch_size: int
  max_staleness: int
  row_length: int
  row_multiple: int
  evaluate_every: int
  save_every: int
  keep: int
  max_skipped_in_row: int
  thread_timeout_s: float  # of one update or one checkpoint, compilation included
  memory: Any = None  # of the baseline
  skipped_in_row: int = 0
  ending: str = 'run_failed'  # why open episodes end with the run

  async def bounded(self, what: str, function: Callable, *args: Any) -> Any:
    """`function(*args)` on a thread, under the deadline."""
    return await watchdog.bounded(what, self.thread_timeout_s, function, *args)


async def train(run: Run, state: TrainState) -> TrainState:
  """Trains from `state.step` to `num_steps`.

  Raises:
    Stopped: after a checkpoint, when `run.stop` is set.
    RunFailed: the runtime is stuck, or too many updates in a row were not finite.
  """
  busy_before, last = run.engine.health(), run.clock()
  while (version := int(state.step)) < run.num_steps:
    began = run.clock()
    try:
      trajectories = await take(run)
    except Stopped:
      await save(run, state)
      raise
    waited = run.clock() - began
    batch, run.memory = prepare(run, trajectories, version)
    state, measured = await run.bounded('an update', update_once, run.learner.update, state, batch)
    publish(run.engine, state)
    run.dispatcher.trained(trajectories, version=version + 1)
    check_finite(run, measured)

    now, health, totals = run.clock(), run.engine.health(), run.dispatcher.totals()
    metrics = {
      **summary.of_trajectories(trajectories, version=version, max_staleness=run.max_staleness),
      **summary.of_runtime(
        health, busy_before, elapsed=now - last, waited=waited, totals=totals, ledger=run.ledger
      ),
      'compiles': health['compiles'] + run.learner.update._cache_size(),
      **measured,
      'time_s': now,
    }
    busy_before, last = health, now
    run.writer.write(version + 1, metrics)
    run.show('rl', version + 1, run.num_steps, metrics)
    if (version + 1) % run.save_every == 0 or version + 1 == run.num_steps:
      await save(run, state)
    if (version + 1) % run.evaluate_every == 0 and version + 1 < run.num_steps:
      run.evaluate(state.policy, version + 1)
  return state


async def take(run: Run, *, in_order: bool = False) -> list[Trajectory]:
  """The next batch of trajectories, see `Dispatcher.take`. Raises `Stopped` on a signal, with nothing taken."""
  return await unless_stopped(run.stop, run.dispatcher.take(run.batch_size, in_order=in_order))


async def unless_stopped(stop: asyncio.Event, work: Coroutine) -> Any:
  """The result of `work`; or `Stopped`, with the work cancelled, if `stop` is set before it is done."""
  working = asyncio.create_task(work)
  stopping = asyncio.create_task(stop.wait())
  if not stop.is_set():
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
  stopping.cancel()
  working.cancel()  # without effect if it is done
  await asyncio.wait({working})
  if working.cancelled():
    raise Stopped
  return working.result()


def prepare(run: Run, trajectories: list[Trajectory], version: int) -> tuple[Batch, Any]:
  """The packed batch, and the baseline's new memory."""
  advantages, memory = run.baseline(trajectories, run.memory)
  batch = batching.pack(
    trajectories,
    row_length=run.row_length,
    row_multiple=run.row_multiple,
    version=version,
    max_staleness=run.max_staleness,
    advantages=advantages,
  )
  return batch, memory


def publish(engine: Engine, state: TrainState) -> None:
  """Hands the engine a copy of the policy: the learner donates its own buffers at the next update."""
  engine.load(jax.tree.map(jnp.copy, state.policy), int(state.step))


async def save(run: Run, state: TrainState) -> None:
  """One atomic unit of everything that is needed to go on from here.

  An evaluation that still runs is waited for: a checkpoint of a later update could not repeat it. It was started after
  the last checkpoint, so that in a usual run it is done by now.
  """
  await run.evaluated()
  progress, finished = run.dispatcher.snapshot()
  host = {
    'time_s': run.clock(),
    'ledger_bytes': run.ledger.offset(),
    'metrics_bytes': run.writer.offset(),
    'dispatcher': progress,
    'memory': run.memory,
  }
  root = run.workdir / 'checkpoints' / 'rl'
  await run.bounded(
    'writing a checkpoint',
    save_checkpoint,
    root,
    int(state.step),
    state,
    host,
    finished,
    run.run_id,
    run.keep,
  )


def save_checkpoint(
  root: Path, step: int, state, host, trajectories, run_id: str, keep: int
) -> None:
  """`checkpoint.save`, whose failure (a full disk; the last good one is still there) is the run's."""
  try:
    checkpoint.save(root, step, state, host, trajectories, run_id=run_id, keep=keep)
  except checkpoint.CheckpointError as error:
    raise RunFailed(str(error)) from error


def update_once(update, state: TrainState, batch: Batch):
  """On the learner's thread: one update, waited for, its metrics on the host."""
  state, metrics = update(state, batch)
  return state, {name: float(value) for name, value in jax.device_get(metrics).items()}


def check_finite(run: Run, measured: dict[str, float]) -> None:
  """Raises RunFailed after too many updates in a row that were not finite."""
  skipped = measured['updates/skipped_now']
  run.skipped_in_row = run.skipped_in_row + 1 if skipped else 0
  if run.skipped_in_row >= run.max_skipped_in_row:
    raise RunFailed(
      f'{run.skipped_in_row} updates in a row were not finite and were skipped: lower policy.learning_rate '
      'or critic.learning_rate'
    )
