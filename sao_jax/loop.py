"""The loop: take, update, publish, record, save."""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax import batching, checkpoint
from sao_jax.learner import Learner, TrainState
from sao_jax.report import summary
from sao_jax.report.metrics import MetricsWriter
from sao_jax.runtime.clock import Clock
from sao_jax.runtime.crew import ALONE, Crew, gathered
from sao_jax.runtime.dispatch import Dispatcher
from sao_jax.runtime.divergence import Alarms, RollBack, watch
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.journal import Journal
from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.runtime.replay import Replayer
from sao_jax.types import Batch, Engine, Trajectory

UPDATE, CRITIC_UPDATE, SUPERVISED_STEP = 'an update', 'a critic update', 'a warm-start step'
CHECKPOINT, PUBLICATION = 'writing a checkpoint', 'gathering a policy'


class Stopped(Exception):
  """A signal asked the run to stop; the last checkpoint has what is needed to go on. The exit code is 75."""


@dataclasses.dataclass
class Learning:
  """What turns trajectories into the next version; a replay has one too, and a follower, without engine and journal."""

  learner: Learner  # jitted
  work: Callable[
    ..., Awaitable[Any]
  ]  # (what, function, *args): beside the event loop, under a deadline
  engine: Engine | Replayer | None  # where versions are published
  export: Callable[[TrainState], Any]  # a copy of the policy as engines take it
  place: Callable[[Batch], Batch]  # from the host to where the learner takes it
  launch: AbstractContextManager  # around the launch of the learner's programs
  journal: (
    Journal | Replayer | None
  )  # what becomes of each version's digest; None: the run is not recorded
  baseline: Callable[[list[Trajectory], Any], tuple[dict[str, float] | None, Any]]
  max_staleness: int
  row_length: int
  row_multiple: int
  memory: Any = None  # of the baseline
  crew: Crew = ALONE  # whom the leader tells what it does with arrays of all processes


@dataclasses.dataclass
class Run:
  """What the loop drives. All state of a run that is not the TrainState hangs here."""

  workdir: Path
  run_id: str
  learning: Learning
  dispatcher: Dispatcher
  ledger: Ledger
  writer: MetricsWriter
  clock: Clock
  stop: asyncio.Event
  evaluate: Callable[[TrainState, int], None]  # (state, step): starts scoring a copy beside the run
  evaluated: Callable[[], Awaitable[None]]  # waits for it
  show: Callable[[str, int, int, dict[str, Any]], None]  # (phase, step, total, metrics)
  alarms: Alarms
  num_steps: int
  batch_size: int
  evaluate_every: int
  save_every: int
  keep: int
  quiet_saves: bool  # a checkpoint waits for what is in flight: then a resume repeats the run
  vigil: Any = None  # memory of the alarms
  rollbacks: int = 0
  since: dict[str, float] = dataclasses.field(default_factory=dict)  # see `count`
  ending: str = 'run_failed'  # why open episodes end with the run


async def train(run: Run, state: TrainState) -> TrainState:
  """Trains from `state.step` to `num_steps`.

  Raises:
    Stopped: after a checkpoint, when `run.stop` is set.
    RollBack: an alarm.
    RunFailed: the runtime is stuck.
  """
  while (version := int(state.step)) < run.num_steps:
    began = run.clock()
    try:
      trajectories = await take(run)
    except Stopped:
      if not run.quiet_saves:  # else the last checkpoint is the one that repeats the run
        await save(run, state)
      raise
    waited = run.clock() - began
    state, measured = await learn(run.learning, state, trajectories)
    run.dispatcher.trained(trajectories, version=version + 1)

    bound = run.learning.max_staleness
    metrics = {
      **summary.of_trajectories(trajectories, version=version, max_staleness=bound),
      **summary.of_runtime(
        count(run), waited=waited, totals=run.dispatcher.totals(), ledger=run.ledger
      ),
      **measured,
      'rollbacks': run.rollbacks,
      'time_s': run.clock(),
    }
    run.writer.write(version + 1, metrics)
    run.show('rl', version + 1, run.num_steps, metrics)
    run.vigil, diverged = watch(run.vigil, metrics, run.alarms)
    if diverged:
      raise RollBack(diverged)
    if (version + 1) % run.save_every == 0 or version + 1 == run.num_steps:
      await save(run, state)
    if (version + 1) % run.evaluate_every == 0 and version + 1 < run.num_steps:
      run.evaluate(state, version + 1)
  return state


async def learn(
  learning: Learning, state: TrainState, trajectories: list[Trajectory]
) -> tuple[TrainState, dict[str, float]]:
  """One update, published. The record has its digest before anything samples with it."""
  version = int(state.step)  # read before the update, which takes the state
  batch = prepare(learning, trajectories, version)
  state, measured, digest = await learning.work(
    UPDATE, update_once, learning, 'update', state, batch
  )
  if int(state.step) != version + 1:
    raise LedgerError(f'the update of version {version} gave version {int(state.step)}')
  if digest:
    await learning.journal.updated(int(state.step), digest)
  if learning.crew.count == 1:
    params = learning.export(state)  # is only launched
  else:  # gathers it from all processes, and waits for each leaf
    params = await learning.work(PUBLICATION, learning.export, state)
  learning.engine.load(params, int(state.step))
  return state, measured


async def take(run: Run, *, in_order: bool = False) -> list[Trajectory]:
  """The next batch of trajectories, see `Dispatcher.take`. Raises `Stopped` on a signal, with nothing taken.

  A signal of a follower counts from the next call on.
  """
  if run.learning.crew.asked_to_stop():
    run.stop.set()
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


def prepare(learning: Learning, trajectories: list[Trajectory], version: int) -> Batch:
  """The packed batch, on the host. The baseline learns from it.

  Raises:
    LedgerError: a token beyond the staleness bound would train.
  """
  advantages, learning.memory = learning.baseline(trajectories, learning.memory)
  bound = learning.max_staleness
  batch = batching.pack(
    trajectories,
    row_length=learning.row_length,
    row_multiple=learning.row_multiple,
    version=version,
    max_staleness=bound,
    advantages=advantages,
  )
  lag = (batch.staleness * batch.mask).max()
  if lag > bound:
    raise LedgerError(f'a token {lag} versions old would train, and the bound is {bound}')
  return batch


def count(run: Run) -> dict[str, float]:
  """What the engine did, and the seconds that passed, since the last call.

  A checkpoint keeps the counts up to itself (`run.since`), so that a resume goes on counting.

  Raises:
    LedgerError: more slots are in use than episodes run: one was not freed.
  """
  health = run.learning.engine.health()
  if health['slots_in_use'] > run.ledger.counts['running']:
    raise LedgerError(
      f'{health["slots_in_use"]} slots are in use and {run.ledger.counts["running"]} episodes run'
    )
  now = _counters(run, health)
  passed = {name: value - run.since.get(name, 0.0) for name, value in now.items()}
  run.since = now
  compiles = health['compiles'] + run.learning.learner.update._cache_size()
  return {**passed, 'compiles': compiles}


def _counters(run: Run, health: dict[str, float]) -> dict[str, float]:
  return {**{name: health[name] for name in ('tokens_sampled', 'busy_s')}, 'time_s': run.clock()}


async def save(run: Run, state: TrainState) -> None:
  """One atomic unit of everything that is needed to go on from here.

  An evaluation that still runs is waited for: a checkpoint of a later update could not repeat it. It was started after
  the last checkpoint, so that in a usual run it is done by now.
  """
  await run.evaluated()
  if run.quiet_saves:
    await run.dispatcher.drain()
  progress, finished = run.dispatcher.snapshot()
  now, journal = _counters(run, run.learning.engine.health()), run.learning.journal
  host = {
    'time_s': now['time_s'],
    # The engine of a resumed run counts from 0, and time goes on.
    'since': {name: run.since[name] - (now[name] if name != 'time_s' else 0.0) for name in now},
    'ledger_bytes': run.ledger.offset(),
    'metrics_bytes': run.writer.offset(),
    'replay_bytes': journal.offset() if journal else 0,
    'dispatcher': progress,
    'memory': run.learning.memory,
    'vigil': run.vigil,
    'rollbacks': run.rollbacks,
  }
  root = run.workdir / 'checkpoints' / 'rl'
  arguments = (root, int(state.step), state, host, finished, run.run_id, run.keep)
  run.learning.crew.tell('save', int(state.step))
  await run.learning.work(CHECKPOINT, save_checkpoint, *arguments)


def save_checkpoint(
  root: Path, step: int, state, host, trajectories, run_id: str, keep: int
) -> None:
  """`checkpoint.save`, whose failure (a full disk; the last good one is still there) is the run's."""
  try:
    checkpoint.save(root, step, state, host, trajectories, run_id=run_id, keep=keep)
  except checkpoint.CheckpointError as error:
    raise RunFailed(str(error)) from error


def update_once(
  learning: Learning, what: str, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, float], str | None]:
  """On the learner's thread: one update, waited for; its metrics on the host, and the digest if the run is recorded.

  Args:
    what: the field of the learner.
    batch: on the host.

  Raises:
    RollBack: a parameter is not finite: nobody may sample with it, and no checkpoint hold it.
  """
  update, crew = getattr(learning.learner, what), learning.crew
  crew.tell(what, arrays=vars(batch))
  batch = learning.place(batch)
  crew.compiled(update, state, batch)
  with learning.launch:
    state, metrics = update(state, batch)
    finite = _all_finite((state.policy, state.critic))
  measured = {name: float(value) for name, value in jax.device_get(metrics).items()}
  if not finite:
    raise RollBack('a parameter is not finite')
  recorded = learning.journal is not None
  return state, measured, digest_of(state, learning.launch, crew) if recorded else None


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def digest_of(
  state: TrainState,
  launch: AbstractContextManager = contextlib.nullcontext(),  # noqa: B008 it has no state
  crew: Crew = ALONE,
) -> str:
  """Of every bit of policy and critic: equal digests are equal parameters.

  Over several processes each parameter comes to every device once, leaf by leaf: without `runtime.record` it is done at
  the end only.
  """
  crew.tell('digest')
  total, leaves = hashlib.sha256(), jax.tree.leaves((state.policy, state.critic))
  if crew.count == 1:
    leaves = jax.device_get(leaves)
  for leaf in leaves:
    whole = leaf if crew.count == 1 else gathered(leaf, launch)
    total.update(np.ascontiguousarray(whole).tobytes())
  return total.hexdigest()[:16]
