"""A run from its config to its result: warm start, value pretraining, RL, evaluation.

Each phase leaves a checkpoint in the workdir and is skipped when it is there.
"""

import asyncio
import dataclasses
import functools
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sao_jax import build, checkpoint, loop, pretraining
from sao_jax import workdir as run_workdir
from sao_jax.learner import TrainState
from sao_jax.report.metrics import MetricsWriter, read_metrics
from sao_jax.report.screen import Screen
from sao_jax.runtime import watchdog
from sao_jax.runtime.clock import Clock, VirtualLoop, real_clock
from sao_jax.runtime.closing import closing
from sao_jax.runtime.crew import ALONE, Crew
from sao_jax.runtime.dispatch import Dispatcher
from sao_jax.runtime.divergence import RollBack
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.heartbeat import Heartbeat
from sao_jax.runtime.journal import Journal
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.logical import Outside
from sao_jax.scoring import Evaluations
from sao_jax.warm_start import warm_start


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
    work = pretraining.make_work(parts, waits)
    state = None
    if not checkpoint.steps(workdir / 'checkpoints' / 'rl'):  # which have everything
      crew.tell('fresh')
      state = pretraining.fresh_state(
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
    exported = pretraining.export(parts, crew, state)
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
      learning = pretraining.make_learning(
        parts, place.work, services.engine, journal, memory, crew
      )
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
  evaluations: Evaluations,
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
  evaluations: Evaluations,
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
      state = await pretraining.pretrain_values(run, parts, state, screen)
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
