"""A run from its config to its result: warm start, value pretraining, RL, evaluation.

Each phase leaves a checkpoint in the workdir and is skipped when it is there.
"""

import asyncio
import contextlib
import dataclasses
import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax import batching, build, checkpoint, learner, loop
from sao_jax import workdir as run_workdir
from sao_jax.evaluate import Evaluation, evaluate
from sao_jax.learner import TrainState
from sao_jax.report import summary
from sao_jax.report.metrics import MetricsWriter, read_metrics
from sao_jax.runtime import watchdog
from sao_jax.runtime.clock import real_clock
from sao_jax.runtime.dispatch import Dispatcher
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.ledger import Ledger


class Screen(Protocol):
  """Where a run tells how it goes; `report.panel.Panel` is one."""

  def update(self, phase: str, step: int, total: int, metrics: dict[str, Any]) -> None: ...

  def score(self, metrics: dict[str, Any]) -> None: ...

  def note(self, text: str) -> None: ...


async def execute(
  parts: build.Parts, workdir: Path, *, stop: asyncio.Event, screen: Screen
) -> dict[str, float]:
  """Runs what is left to do in the workdir and returns the metrics of the last evaluation.

  Raises:
    loop.Stopped: when `stop` is set, after a checkpoint; the first evaluation and value pretraining, which have none, are
      done again by the next start.
    RunFailed, CheckpointError, LedgerError: with the reason.
  """
  identity = run_workdir.run_id(parts.config)
  for line in parts.notes:
    screen.note(line)
  try:
    sandbox = build.make_sandbox(parts.config)
  except ValueError as error:
    raise RunFailed(str(error)) from error
  screen.note(f'tools run in: {sandbox.describe()}')
  async with _closing(sandbox.close):
    warm = await warm_start(parts, workdir, identity, stop=stop, screen=screen)
    services = build.Services(parts, warm, sandbox)
    async with _closing(services.close):
      return await _learn(parts, workdir, identity, warm, services, stop=stop, screen=screen)


async def warm_start(
  parts: build.Parts, workdir: Path, identity: str, *, stop: asyncio.Event, screen: Screen
) -> Any:
  """Policy params after supervised training on scripted demonstrations."""
  c = parts.config
  root = workdir / 'checkpoints' / 'supervised'
  if c.supervised.workdir:
    root = Path(c.supervised.workdir) / 'checkpoints' / 'supervised'
    identity = run_workdir.run_id(run_workdir.saved_config(Path(c.supervised.workdir)))
  params = jax.jit(parts.init_policy)(jax.random.key(c.seed))
  state = {'params': params, 'opt': parts.supervised_tx.init(params)}
  done = 0
  if checkpoint.steps(workdir / 'checkpoints' / 'rl'):
    return params  # RL is under way, and its checkpoint has everything
  if saved := checkpoint.steps(root):
    done = saved[-1]
    state = checkpoint.restore(root, done, state, run_id=identity).state
  if c.supervised.workdir:
    screen.note(f'the warm start of {c.supervised.workdir}, after {done} steps')
    return state['params']

  async def save(step):
    deadline = c.runtime.stall_timeout_s
    arguments = (root, step, state, {}, (), identity, 1)
    await watchdog.bounded('writing a checkpoint', deadline, loop.save_checkpoint, *arguments)

  update = jax.jit(parts.supervised_update, donate_argnums=(0, 1))
  batch = _demonstrations(parts, done)
  for step in range(done, c.supervised.num_steps):
    if stop.is_set():
      await save(step)
      raise loop.Stopped
    (state, loss), batch = await asyncio.gather(
      watchdog.bounded(
        'a warm-start step', c.runtime.stall_timeout_s, _supervised_step, update, state, batch
      ),
      asyncio.to_thread(_demonstrations, parts, step + 1),  # the next batch, meanwhile
    )
    if not np.isfinite(loss):
      raise RunFailed(
        f'the loss of warm-start step {step} is {loss}: lower supervised.learning_rate'
      )
    screen.update('warm start', step + 1, c.supervised.num_steps, {'loss/supervised': loss})
  if done < c.supervised.num_steps:
    await save(c.supervised.num_steps)
  elif done:
    screen.note('the warm start is in the workdir already')
  return state['params']


def _supervised_step(update, state: dict[str, Any], batch) -> tuple[dict[str, Any], float]:
  params, opt, loss = update(state['params'], state['opt'], batch)
  return {'params': params, 'opt': opt}, float(loss)


def _demonstrations(parts: build.Parts, step: int):
  """The packed demonstrations of one supervised step; a function of (config, step)."""
  c = parts.config
  size = c.supervised.batch_size
  rows = []
  for index in range(step * size, (step + 1) * size):
    shown = build.demonstrate(c, parts.practice, index)
    if len(shown.tokens) <= parts.demonstration_tokens:  # `build.parts` tells of those that are not
      rows.append(batching.supervised_trajectory(str(index), shown.tokens, shown.mask))
  return batching.pack(
    rows,
    row_length=parts.demonstration_tokens,
    row_multiple=c.train.micro_rows,
    version=0,
    max_staleness=0,
  )


@contextlib.asynccontextmanager
async def _closing(*closers: Callable[[], Any]) -> AsyncIterator[None]:
  """Calls every closer at the end, whatever the others do. An error of closing never hides the error of the run."""
  failure = None
  try:
    yield
  except BaseException as error:
    failure = error
  for close in closers:
    try:
      result = close()
      if inspect.isawaitable(result):
        await result
    except Exception as error:
      if failure is None:
        failure = error
      else:
        failure.add_note(f'and while closing: {error!r}')
  if failure is not None:
    raise failure


async def _learn(parts, workdir, identity, warm, services, *, stop, screen) -> dict[str, float]:
  """Value pretraining and RL on running services."""
  c = parts.config
  root = workdir / 'checkpoints' / 'rl'

  def fresh() -> TrainState:
    policy = jax.tree.map(jnp.copy, warm)
    critic = parts.init_critic(policy, (c.value.low + c.value.high) / 2)
    return learner.init_state(policy, critic, parts.policy_tx, parts.critic_tx)

  saved, restored = checkpoint.steps(root), None
  if saved:
    restored = checkpoint.restore(root, saved[-1], fresh(), run_id=identity)
  state = restored.state if restored else fresh()
  host = restored.host if restored else {}
  loop.publish(services.engine, state)
  clock = real_clock(host.get('time_s', 0.0))
  ledger = Ledger(workdir / 'events.jsonl', clock, resume_at=host.get('ledger_bytes', 0))
  writer = MetricsWriter(workdir, resume_at=host.get('metrics_bytes', 0))
  dispatcher = Dispatcher(
    services.play,
    parts.source.task,
    ledger,
    parts.limits,
    episodes_needed=c.train.batch_size * (c.value.num_batches + c.train.num_steps),
    version=int(state.step),
    snapshot=host.get('dispatcher'),
    trajectories=restored.trajectories if restored else (),
  )
  evaluations = Evaluations(parts, services, writer, screen, dispatcher.fail)
  run = loop.Run(
    workdir=workdir,
    run_id=identity,
    learner=learner.Learner(
      update=jax.jit(parts.learner.update, donate_argnums=0),
      update_critic=jax.jit(parts.learner.update_critic, donate_argnums=0),
    ),
    engine=services.engine,
    dispatcher=dispatcher,
    ledger=ledger,
    writer=writer,
    clock=clock,
    stop=stop,
    evaluate=evaluations.start,
    evaluated=evaluations.finish,
    baseline=parts.baseline,
    show=screen.update,
    num_steps=c.train.num_steps,
    batch_size=c.train.batch_size,
    max_staleness=c.runtime.max_staleness,
    row_length=c.env.max_tokens,
    row_multiple=c.train.micro_rows * c.sao.policy_minibatches,
    evaluate_every=c.evaluation.every,
    save_every=c.train.save_every,
    keep=c.train.keep,
    max_skipped_in_row=c.train.max_skipped_in_row,
    thread_timeout_s=c.runtime.stall_timeout_s,
    memory=host.get('memory'),
  )
  end = lambda: dispatcher.close(run.ending)
  async with _closing(evaluations.cancel, end, ledger.close, writer.close):
    return await _improve(run, parts, state, evaluations, screen, resumed=restored is not None)


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
        evaluations.start(state.policy, step)
    else:
      await loop.unless_stopped(run.stop, evaluations.now(state.policy, 0))
      state = await pretrain_values(run, parts, state, screen)
      await loop.save(run, state)
    state = await loop.train(run, state)
    await loop.unless_stopped(run.stop, evaluations.finish())
    if run.num_steps not in done:
      done[run.num_steps] = await loop.unless_stopped(
        run.stop, evaluations.now(state.policy, run.num_steps)
      )
      await loop.save(run, state)  # with the last score
    run.ending = 'run_ended'
    return done[run.num_steps]
  except loop.Stopped:
    run.ending = 'stopped'
    raise


async def pretrain_values(
  run: loop.Run, parts: build.Parts, state: TrainState, screen: Screen
) -> TrainState:
  """Trains the critic alone on rollouts of the warm start, and reports the explained variance that it has on
  each batch before learning from it."""
  c, unseen = parts.config, []
  for index in range(c.value.num_batches):
    trajectories = await loop.take(run, in_order=True)
    if index == 0:
      mean_return = float(np.mean([t.reward for t in trajectories]))
      critic = parts.init_critic(state.policy, mean_return)
      state = state.replace(critic=critic, critic_opt=parts.critic_tx.init(critic))
    batch, _ = loop.prepare(run, trajectories, 0)
    measured = []
    for _ in range(c.value.updates_per_batch):
      state, metrics = await run.bounded(
        'a critic update', loop.update_once, run.learner.update_critic, state, batch
      )
      loop.check_finite(run, metrics)
      measured.append(metrics)
    unseen.append(measured[0]['critic/explained_variance'])
    run.dispatcher.trained(trajectories, version=0, reason='value_pretraining')
    reward = float(np.mean([t.reward for t in trajectories]))
    run.show(
      'value pretraining', index + 1, c.value.num_batches, {**measured[0], 'reward/mean': reward}
    )
  run.dispatcher.totals()  # these episodes are no update's
  if unseen:
    run.writer.write(0, {'value/explained_variance': unseen})
    screen.note(
      'value pretraining: explained variance of each batch, before the critic learned from it: '
      + ' '.join(f'{value:.2f}' for value in unseen)
    )
  return state


@dataclasses.dataclass
class Evaluations:
  """Held-out scores, one at a time beside the training, on an engine of their own."""

  parts: build.Parts
  services: build.Services
  writer: MetricsWriter
  screen: Screen
  fail: Callable[[Exception], None]  # tells the run of an evaluation that went wrong beside it
  running: asyncio.Task | None = None

  def start(self, params: Any, step: int) -> None:
    """Evaluates a copy of the params in the background, after the evaluation that may still run."""
    # Copied now: the next update donates the original before the evaluation may begin.
    copy = jax.tree.map(jnp.copy, params)
    self.running = asyncio.create_task(self._after(self.running, copy, step))

  async def _after(self, earlier: asyncio.Task | None, params: Any, step: int) -> None:
    if earlier is not None:
      await earlier
    try:
      await self._score(params, step)
    except Exception as error:
      self.fail(error)
      raise

  async def now(self, params: Any, step: int) -> dict[str, float]:
    """Evaluates a copy of the params, records and returns the metrics."""
    return await self._score(jax.tree.map(jnp.copy, params), step)

  async def _score(self, params: Any, step: int) -> dict[str, float]:
    """Evaluates params that the engine may keep."""
    c = self.parts.config.evaluation
    self.services.evaluation_engine.load(params, step)
    result: Evaluation = await evaluate(
      self.services.evaluation_play,
      self.parts.heldout,
      name=f'eval-{step}',
      samples=c.samples,
      seed=self.parts.config.seed,
      concurrency=self.services.evaluation_slots,
      timeout_s=self.parts.limits.episode_timeout_s,
      retries=self.parts.limits.retries,
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
