"""A run from its config to its result: warm start, value pretraining, RL, evaluation.

Each phase leaves a checkpoint in the workdir and is skipped when it is there.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from sao_jax import build, checkpoint, loop
from sao_jax import workdir as run_workdir
from sao_jax.evaluate import Evaluation, evaluate
from sao_jax.learner import TrainState
from sao_jax.models import lora
from sao_jax.report import summary
from sao_jax.report.metrics import MetricsWriter, read_metrics
from sao_jax.runtime import watchdog
from sao_jax.runtime.clock import Clock, VirtualLoop, real_clock
from sao_jax.runtime.crew import ALONE, Crew
from sao_jax.runtime.dispatch import Dispatcher
from sao_jax.runtime.divergence import RollBack
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.heartbeat import Heartbeat
from sao_jax.runtime.journal import Journal
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.logical import LogicalWork, Outside
from sao_jax.types import Task, Trajectory
from sao_jax.warm_start import STEP, warm_start

CLOSE_S = 120.0


class Screen(Protocol):
  """Where a run tells how it goes; `report.panel.Panel` is one."""

  def update(self, phase: str, step: int, total: int, metrics: dict[str, Any]) -> None: ...

  def score(self, metrics: dict[str, Any]) -> None: ...

  def note(self, text: str) -> None: ...


class _GoBack(Exception):
  """To the last checkpoint, and from there to prompts that were not drawn yet."""

  def __init__(self, rollbacks: int, next_index: int):
    self.numbers = rollbacks, next_index


def event_loop(parts: build.Parts) -> Callable[[], asyncio.AbstractEventLoop]:
  """Makes the event loop that `execute` of these parts runs in."""
  config = parts.config
  if config.runtime.mode == 'deterministic':
    return functools.partial(VirtualLoop, patience_s=2 * config.runtime.stall_timeout_s)
  return asyncio.new_event_loop


async def execute(
  parts: build.Parts, workdir: Path, *, stop: asyncio.Event, screen: Screen, crew: Crew = ALONE
) -> dict[str, float]:
  """Runs what is left to do in the workdir and returns the metrics of the last evaluation.

  In deterministic mode the running loop must be of `event_loop`. Of several processes the first one calls it, and the others
  `follow.follow`; the end is the caller's to tell, how ever it comes.

  Raises:
    loop.Stopped: when `stop` is set, after a checkpoint; the first evaluation and value pretraining, which have none, are
      done again by the next start.
    RunFailed, CheckpointError, LedgerError: with the reason.
  """
  c = parts.config
  seconds, waits = c.runtime.stall_timeout_s, watchdog.Waits(asyncio.get_running_loop().time)
  for line in parts.notes:
    screen.note(line)
  try:
    sandbox = build.make_sandbox(c)
  except ValueError as error:
    raise RunFailed(str(error)) from error
  screen.note(f'tools run in: {sandbox.describe()}')
  # Deterministic mode waits for real work in the loop itself, and for so long that its own deadline comes first.
  logical = c.runtime.mode == 'deterministic'
  guard = watchdog.LoopGuard(2 * seconds if logical else seconds, waits)
  guard.start()
  heart = start_heart(parts, workdir, crew)
  outside = Outside(seconds) if logical else None
  close_sandbox = outside.wrap(sandbox.close, 0.0) if outside else sandbox.close
  async with closing(close_sandbox, *([outside.close] if outside else []), guard.stop):
    work = make_work(parts, waits)
    state = None
    if not checkpoint.steps(workdir / 'checkpoints' / 'rl'):  # which have everything
      crew.tell('fresh')
      state = fresh_state(
        parts,
        await warm_start(
          parts, workdir, work=work, stop=stop, show=screen.update, note=screen.note
        ),
      )
    programs = await asyncio.to_thread(build.programs_of, parts)
    place = Place(parts, workdir, programs, sandbox, outside, waits, work, stop, screen, crew)
    result = await learn(place, state)
    if heart is not None:
      heart.stop()  # only of a run that ended well: the others must not wait for one that failed
    return result


def start_heart(parts: build.Parts, workdir: Path, crew: Crew) -> Heartbeat | None:
  """The signs of life of one process among several."""
  if crew.count == 1:
    return None
  silence = parts.config.runtime.heartbeat_s
  heart = Heartbeat(
    workdir / 'heartbeats',
    rank=crew.index,
    world=crew.count,
    interval_s=silence / 6,
    timeout_s=silence,
  )
  heart.start()
  return heart


@dataclasses.dataclass(frozen=True)
class Place:
  """What stays the same over the roll-backs of a run."""

  parts: build.Parts
  workdir: Path
  programs: Any
  sandbox: Any
  outside: Outside | None
  waits: watchdog.Waits
  work: Callable[..., Awaitable[Any]]
  stop: asyncio.Event
  screen: Screen
  crew: Crew = ALONE


def make_work(parts: build.Parts, waits: watchdog.Waits) -> Callable[..., Awaitable[Any]]:
  """How the learner's work is done beside the event loop: (what, function, *args) -> its result."""
  c = parts.config
  seconds = c.runtime.stall_timeout_s
  if c.runtime.mode == 'deterministic':
    update = c.runtime.logical.update_s
    takes = {loop.UPDATE: update, loop.CRITIC_UPDATE: update, loop.CHECKPOINT: 0.0, STEP: 0.0}
    return LogicalWork(takes, seconds)

  async def work(what: str, function: Callable, *args: Any) -> Any:
    waits.begin('learner', what)
    try:
      return await watchdog.bounded(what, seconds, function, *args, waits=waits)
    finally:
      waits.end('learner')

  return work


@contextlib.asynccontextmanager
async def closing(*closers: Callable[[], Any]) -> AsyncIterator[None]:
  """Calls every closer at the end, whatever the others do. An error of closing never hides the error of the run.

  Closers that take more than CLOSE_S in all end the process.
  """
  failure = None
  try:
    yield
  except BaseException as error:
    failure = error
  in_time = watchdog.exit_after(
    CLOSE_S, watchdog.FAILED, f'failed: closing takes more than {CLOSE_S} s; before: {failure!r}'
  )
  for close in closers:
    try:
      result = close()
      if inspect.isawaitable(result):
        await result
    except BaseException as error:
      if failure is None:
        failure = error
      else:
        failure.add_note(f'and while closing: {error!r}')
  in_time()
  if failure is not None:
    raise failure


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


def fresh_state(parts: build.Parts, params: Any) -> TrainState:
  """At version 0, from the whole parameters, which are the learner's to donate from now on. Value pretraining gives the critic its head."""
  c = parts.config
  base, policy = lora.split(params) if c.model.lora_rank else ({}, params)
  critic = parts.init_critic(policy, (c.value.low + c.value.high) / 2)
  return parts.placed(parts.init_state(base, policy, critic))


def with_value_head(parts: build.Parts, state: TrainState, mean_return: float) -> TrainState:
  """The critic anew, with a head whose value is the mean return. The one before is deleted: there may be room for one."""
  jax.tree.map(lambda x: x.delete(), (state.critic, state.critic_opt))
  critic = parts.init_critic(state.policy, mean_return)
  return parts.placed(state.replace(critic=critic, critic_opt=parts.critic_tx.init(critic)))


def export(parts: build.Parts, crew: Crew, state: TrainState) -> Any:
  """A copy of the policy as engines take it; None in a follower."""
  crew.tell('export')
  return parts.model.export(state)


def make_learning(
  parts: build.Parts, work, engine, journal, memory: Any, crew: Crew = ALONE
) -> loop.Learning:
  c = parts.config
  return loop.Learning(
    learner=parts.learner,
    work=work,
    engine=engine,
    export=functools.partial(export, parts, crew),
    place=parts.model.place,
    launch=parts.model.launch,
    journal=journal,
    baseline=parts.baseline,
    max_staleness=c.runtime.max_staleness,
    row_length=c.env.max_tokens,
    row_multiple=c.train.micro_rows * c.sao.policy_minibatches,
    memory=memory,
    crew=crew,
  )


async def learn(place: Place, state: TrainState | None) -> dict[str, float]:
  """Value pretraining and RL from `state` on, or from the last checkpoint if there is one; back to it when the run diverges."""
  back = None
  while True:
    try:
      return await _attempt(place, state, back)
    except _GoBack as alarm:
      back, state = alarm.numbers, None
    gc.collect()  # the alarm's frames hold the state that diverged, and there may be room for one


async def _attempt(
  place: Place, state: TrainState | None, back: tuple[int, int] | None
) -> dict[str, float]:
  """`back`: see `_GoBack`."""
  parts, workdir, waits, crew = place.parts, place.workdir, place.waits, place.crew
  c, root, identity = parts.config, workdir / 'checkpoints' / 'rl', run_workdir.run_id(parts.config)
  host, trajectories = {}, ()
  if saved := checkpoint.steps(root):
    crew.tell('restore', saved[-1])
    restored = await asyncio.to_thread(
      checkpoint.restore, root, saved[-1], parts.state, run_id=identity
    )
    state, host, trajectories = restored.state, restored.host, restored.trajectories
  time_s, event_loop = host.get('time_s', 0.0), asyncio.get_running_loop()
  if place.outside is None:
    clock = real_clock(time_s)
  else:
    clock = event_loop.time
    event_loop.jump(max(time_s, event_loop.time()))
  journal = None
  if c.runtime.record:
    journal = Journal(workdir, resume_at=host.get('replay_bytes', 0))
  async with closing(*([journal.close] if journal else [])):
    exported = export(parts, crew, state)
    services = build.Services(
      parts,
      place.programs,
      exported,
      place.sandbox,
      waits=waits,
      journal=journal,
      outside=place.outside,
    )
    async with closing(services.close):
      services.engine.load(exported, int(state.step))
      del exported
      ledger = Ledger(workdir / 'events.jsonl', clock, resume_at=host.get('ledger_bytes', 0))
      writer = MetricsWriter(workdir, resume_at=host.get('metrics_bytes', 0))
      dispatcher = Dispatcher(
        services.play,
        parts.source.task,
        ledger,
        parts.limits,
        waits,
        episodes_needed=c.train.batch_size * (c.value.num_batches + c.train.num_steps),
        version=int(state.step),
        snapshot=host.get('dispatcher'),
        trajectories=trajectories,
        journal=journal,
        forsake_below=None if back is None else back[1],
      )
      memory = host.get('memory')
      learning = make_learning(parts, place.work, services.engine, journal, memory, crew)
      evaluations = Evaluations(
        parts, services, writer, place.screen, dispatcher.fail, learning.export
      )
      run = _run(place, host, learning, dispatcher, ledger, writer, evaluations, clock)
      end = lambda: dispatcher.close(run.ending)
      async with closing(evaluations.cancel, end, ledger.close, writer.close):
        if back is not None:
          run.rollbacks = back[0]
          await loop.save(run, state)  # a restart must count the roll-back too
        return await _improve(run, parts, state, evaluations, place.screen, resumed=bool(saved))


def _run(
  place: Place,
  host: dict[str, Any],
  learning: loop.Learning,
  dispatcher: Dispatcher,
  ledger: Ledger,
  writer: MetricsWriter,
  evaluations: 'Evaluations',
  clock: Clock,
) -> loop.Run:
  """A run that goes on from what a checkpoint holds for the host, {} for a new one."""
  c = place.parts.config
  return loop.Run(
    workdir=place.workdir,
    run_id=run_workdir.run_id(c),
    learning=learning,
    dispatcher=dispatcher,
    ledger=ledger,
    writer=writer,
    clock=clock,
    stop=place.stop,
    evaluate=evaluations.start,
    evaluated=evaluations.finish,
    show=place.screen.update,
    alarms=place.parts.alarms,
    num_steps=c.train.num_steps,
    batch_size=c.train.batch_size,
    evaluate_every=c.evaluation.every,
    save_every=c.train.save_every,
    keep=c.train.keep,
    quiet_saves=place.outside is not None,
    vigil=host.get('vigil'),
    rollbacks=host.get('rollbacks', 0),
    since=host.get('since', {}),
  )


async def _improve(
  run: loop.Run,
  parts: build.Parts,
  state: TrainState,
  evaluations,
  screen: Screen,
  *,
  resumed: bool,
) -> dict[str, float]:
  """First score, value pretraining, RL, last score: what is left of it."""
  done = {
    row['step']: row for row in read_metrics(run.workdir / 'metrics.jsonl') if 'eval/pass@1' in row
  }
  try:
    if resumed:
      step = int(state.step)
      screen.note(f'resumed at update {step} of {run.num_steps}')
      if 0 < step < run.num_steps and step % run.evaluate_every == 0 and step not in done:
        # It was lost with the process.
        evaluations.start(state, step)
    else:
      await loop.unless_stopped(run.stop, evaluations.now(state, 0))
      state = await pretrain_values(run, parts, state, screen)
      loop.count(run)  # what came before is no update's
      await loop.save(run, state)
    state = await loop.train(run, state)
    await loop.unless_stopped(run.stop, evaluations.finish())
    if run.num_steps not in done:
      done[run.num_steps] = await loop.unless_stopped(
        run.stop, evaluations.now(state, run.num_steps)
      )
      await loop.save(run, state)  # with the last score
    run.ending = 'run_ended'
    learning = run.learning
    digest = await asyncio.to_thread(loop.digest_of, state, learning.launch, learning.crew)
    screen.note(f'parameters {digest} after {run.num_steps} updates')
    return done[run.num_steps]
  except loop.Stopped:
    run.ending = 'stopped'
    raise
  except RollBack as alarm:
    run.ending = 'rollback'
    limit = parts.config.train.max_rollbacks
    if not checkpoint.steps(run.workdir / 'checkpoints' / 'rl'):
      raise RunFailed(f'{alarm}, in value pretraining: lower critic.learning_rate') from alarm
    if run.rollbacks >= limit:
      raise RunFailed(
        f'{alarm}, after {run.rollbacks} roll-backs (train.max_rollbacks={limit}): lower policy.learning_rate or '
        'critic.learning_rate'
      ) from alarm
    screen.note(f'WARNING: rolling back to the last checkpoint: {alarm}')
    raise _GoBack(run.rollbacks + 1, run.dispatcher.next_index) from alarm


async def pretrain_values(
  run: loop.Run, parts: build.Parts, state: TrainState, screen: Screen
) -> TrainState:
  """Trains the critic alone on rollouts of the warm start, and reports the explained variance that it has on
  each batch before learning from it."""
  c, unseen = parts.config, []
  for index in range(c.value.num_batches):
    trajectories = await loop.take(run, in_order=True)
    state, metrics = await learn_values(run.learning, parts, state, trajectories, index)
    unseen.append(metrics['critic/explained_variance'])
    run.dispatcher.trained(trajectories, version=0, reason='value_pretraining')
    reward = float(np.mean([t.reward for t in trajectories]))
    run.show(
      'value pretraining', index + 1, c.value.num_batches, {**metrics, 'reward/mean': reward}
    )
  run.dispatcher.totals()  # these episodes are no update's
  if unseen:
    run.writer.write(0, {'value/explained_variance': unseen})
    screen.note(
      'value pretraining: explained variance of each batch, before the critic learned from it: '
      + ' '.join(f'{value:.2f}' for value in unseen)
    )
  return state


async def learn_values(
  learning: loop.Learning,
  parts: build.Parts,
  state: TrainState,
  trajectories: list[Trajectory],
  index: int,
) -> tuple[TrainState, dict[str, float]]:
  """The critic's updates on one batch; the metrics are those before them. The first batch gives the head its bias.

  Raises:
    RunFailed: an update was not finite.
  """
  first = None
  if index == 0:
    mean_return = float(np.mean([t.reward for t in trajectories]))
    learning.crew.tell('value head', mean_return)
    state = with_value_head(parts, state, mean_return)
  batch = loop.prepare(learning, trajectories, 0)
  for _ in range(parts.config.value.updates_per_batch):
    state, metrics, digest = await learning.work(
      loop.CRITIC_UPDATE, loop.update_once, learning, 'update_critic', state, batch
    )
    if metrics['updates/skipped_now']:
      raise RunFailed('value pretraining: an update was not finite; lower critic.learning_rate')
    first = first or metrics
  if digest:
    await learning.journal.updated(0, digest)
  return state, first


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
