"""A small whole run on stand-ins, and faults put into it. See test_faults.py.

Real: loop.train and loop.save, Dispatcher, Ledger, MetricsWriter, Journal, checkpoint, run_episode, MathPython, FakeEngine.
Stand-ins: a learner in plain Python, a tool, a grader, a chat whose first turn is a tool call and whose second an answer.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import errno
import functools
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from sao_jax import checkpoint, learner, loop
from sao_jax.engines.fake import FakeEngine, constant
from sao_jax.envs.math_python import MathPython
from sao_jax.report.metrics import MetricsWriter
from sao_jax.rollout import run_episode
from sao_jax.runtime.closing import closing
from sao_jax.runtime.dispatch import Dispatcher, Limits
from sao_jax.runtime.divergence import Alarms
from sao_jax.runtime.failures import BackOff, RunFailed, holding
from sao_jax.runtime.journal import Journal, Recorded
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.watchdog import Waits
from sao_jax.sandbox import ToolStatus
from sao_jax.tokens import Answer, ToolCall, encode
from sao_jax.types import EpisodeFailure, FailureKind, FinishReason, Task

UPDATES, BATCH, SAVE_EVERY = 6, 4, 2
VOCAB, STOP = 16, 15
DEADLINE_S = 300.0  # of the learner's work, of a blocked event loop, and of a run without progress
# Logical seconds of one piece of work, and the number of the call that the fault strikes: in the middle of the run.
SECONDS = {'engine': 0.04, 'environment': 0.3, 'tool': 0.2, 'grader': 0.1, 'learner': 1.0}
SECONDS |= {'publication': 0.05, 'checkpoint': 0.5, 'metrics': 0.01, 'disk': 0.01, 'record': 0.01}
FIRST = {'engine': 21, 'environment': 11, 'tool': 11, 'grader': 11, 'learner': 4}
FIRST |= {'publication': 4, 'checkpoint': 1, 'metrics': 4, 'disk': 4, 'record': 2}
LIMITS = Limits(
  seed=0,
  group_size=1,
  capacity=2 * BATCH,
  consume='oldest_started',
  late='mask',
  max_staleness=8,
  retries={'infra': 2, 'env': 2, 'grader': 1},
  back_off=BackOff(0.2, 5.0),
  max_failures_in_row=6,
  breaker_cooldown_s=5.0,
  breaker_openings=1,
  episode_timeout_s=60.0,
  stall_timeout_s=DEADLINE_S,
)
GRADER_HOLDS = 3
FOREVER_S = 1e9
EPISODE = contextvars.ContextVar('EPISODE', default=None)
NO_SPACE = (errno.ENOSPC, 'No space left on device')


class Died(BaseException):
  """Our process is gone. Not an Exception, so that nothing of it acts on that."""


class Hangs(BaseException):
  """Work on the learner's thread that never returns."""


@dataclasses.dataclass(frozen=True)
class Fault:
  component: str
  kind: str  # exception, hang, slow, killed, bad, partial
  moment: str  # before, during, after; or the name of a special one
  times: int = 1  # calls in a row that it strikes


class Injection:
  """The fault of one life of a run: when it strikes, and whom."""

  def __init__(self, workdir: Path, fault: Fault, spoil: Callable[[Any], Any] | None):
    """`spoil`: gets the good answer of the component and gives a bad one."""
    self.workdir, self.fault, self.spoil = workdir, fault, spoil
    self.copy = workdir.with_name(workdir.name + '-copy')  # what is on disk where the process dies
    self.calls = self.struck = 0
    self.victims: set[str] = set()  # episodes that it struck
    self.component_dead = False
    self.died = asyncio.Event()
    self.last_line = ''  # of a process that its watchdog ended
    self.owed_s = 0.0  # by slow work on the learner's thread
    self.saves = 0

  def is_(self, component: str, *kinds: str) -> bool:
    return self.fault.component == component and self.fault.kind in kinds

  def is_after_death(self) -> bool:
    """The process dies after its second checkpoint, and the fault is in what it leaves on disk."""
    return self.is_('checkpoint', 'bad') or self.is_('disk', 'bad', 'partial')

  def due(self, component: str, moment: str | None = None, *, first: int | None = None) -> bool:
    """Whether the fault strikes this call; counts the calls of its component at its moment."""
    if self.fault.component != component or moment not in (None, self.fault.moment):
      return False
    self.calls += 1
    if self.calls < (first or FIRST[component]) or self.struck >= self.fault.times:
      return False
    self.struck += 1
    self.victims.add(EPISODE.get())
    return True

  def die(self, last_line: str = '') -> None:
    """kill -9: a restart finds what is on disk now."""
    if not self.died.is_set():
      shutil.copytree(self.workdir, self.copy)
      self.last_line = last_line
      self.died.set()
    raise Died

  def point(self, component: str, moment: str, error: Exception, *, blocks: bool) -> None:
    """A point in work that is not awaited; `blocks` says that it is done on the event loop."""
    if self.spoil is None and self.due(component, moment):
      self.strike(error, blocks=blocks)

  def strike(self, error: Exception, *, blocks: bool) -> None:
    kind, slow_s = self.fault.kind, 100 * SECONDS[self.fault.component]
    if kind == 'exception':
      raise error
    if kind == 'hang':
      if blocks:  # what runtime.watchdog.LoopGuard does
        self.die(f'failed: the event loop is blocked for more than {DEADLINE_S} s')
      raise Hangs
    if kind == 'slow' and blocks:
      now = asyncio.get_running_loop()
      now.jump(now.time() + slow_s)
    elif kind == 'slow':
      self.owed_s = slow_s
    else:
      self.die()

  async def around(self, component: str, error: Exception, work: Callable) -> Any:
    """`await work()`, and the fault around it."""
    if self.component_dead and self.fault.component == component:
      raise error
    if not self.due(component):
      return await work()
    kind, moment, seconds = self.fault.kind, self.fault.moment, SECONDS[component]
    if self.spoil is not None:
      return self.spoil(await work())
    if kind == 'slow':
      waits = [100 * seconds * (moment == 'before'), 100 * seconds * (moment == 'after')]
      await asyncio.sleep(waits[0])
      working = asyncio.create_task(work())
      await asyncio.sleep(100 * seconds * (moment == 'during'))
      answer = await working
      await asyncio.sleep(waits[1])
      return answer
    if moment == 'during':  # half of the work is done, for nothing
      half = asyncio.create_task(work())
      await asyncio.sleep(seconds / 2)
      half.cancel()
      await asyncio.wait({half})
    if moment == 'after':
      await work()
    if kind == 'hang':
      await asyncio.sleep(FOREVER_S)
    self.component_dead = kind == 'killed'
    raise error


class Engines:
  """Two fake engines behind one door, as in a fleet: an episode belongs to one of them."""

  def __init__(self, injection: Injection, params: np.ndarray, version: int):
    self._injection = injection
    numbers = {'num_slots': 4, 'stop_token': STOP, 'length': constant(4)}
    pace = {'seconds_per_token': SECONDS['engine'] / 4, 'load_seconds': SECONDS['publication']}
    self.both = [FakeEngine(params, version=version, **numbers, **pace) for _ in range(2)]

  async def generate(self, request):
    injection, engine = self._injection, self._of(request.episode)
    if injection.is_('engine', 'partial') and injection.due('engine'):
      asked = asyncio.create_task(engine.generate(request))  # none, half or all of the tokens
      share = {'before': 0.0, 'during': 0.5, 'after': 1.5}[injection.fault.moment]
      await asyncio.sleep(share * SECONDS['engine'])
      engine.abort(request.episode)
      return dataclasses.replace(await asked, finish_reason=FinishReason.ABORTED)
    gone = EpisodeFailure(FailureKind.INFRA, 'the engine is gone')
    return await injection.around('engine', gone, lambda: engine.generate(request))

  def _of(self, episode: str) -> FakeEngine:
    return self.both[int(episode.partition('-')[0]) % 2]

  def release(self, episode: str) -> None:
    self._of(episode).release(episode)

  def load(self, params, version: int) -> None:
    injection = self._injection
    if injection.spoil is not None and injection.due('publication'):
      injection.spoil((*self.both, params, version))
      return
    lost = RuntimeError('publication: the weights did not arrive')
    injection.point('publication', 'before', lost, blocks=True)
    self.both[0].load(params, version)
    injection.point('publication', 'during', lost, blocks=True)
    self.both[1].load(params, version)
    injection.point('publication', 'after', lost, blocks=True)

  def health(self) -> dict[str, float]:
    one, two = (engine.health() for engine in self.both)
    return {name: one[name] + two[name] for name in one}

  def close(self) -> None:
    for engine in self.both:
      engine.close()


class Chat:
  """A tool call and then an answer, whatever was sampled."""

  def __init__(self):
    self._actions = iter([ToolCall('print(1)'), Answer('right')])

  def prompt_tokens(self, text: str) -> np.ndarray:
    return encode(text) % STOP

  def result_tokens(self, text: str) -> np.ndarray:
    return encode(f'[{text}') % STOP

  def parse_action(self, tokens: np.ndarray):
    return next(self._actions)


class Services:
  """The tool and the grader, who start a fresh worker where one died, as sandbox and grader do."""

  def __init__(self, injection: Injection):
    self._injection = injection

  async def run(self, code: str):
    broken = EpisodeFailure(FailureKind.INFRA, 'the tool is broken')
    try:
      return await self._injection.around('tool', broken, self._run)
    except EpisodeFailure:
      if not self._injection.is_('tool', 'killed'):
        raise
    self._injection.component_dead = False
    return await self._injection.around('tool', broken, self._run)

  async def _run(self):
    await asyncio.sleep(SECONDS['tool'])
    return SimpleNamespace(output='some output', status=ToolStatus.OK)

  async def grade(self, answer: str, reference: str) -> bool:
    async def work():
      await asyncio.sleep(SECONDS['grader'])
      return answer == reference

    injection, lost = self._injection, EpisodeFailure(FailureKind.GRADER, 'no verdict')
    if injection.is_('grader', 'partial') and injection.victims - {EPISODE.get()}:
      return await work()  # it fails for one answer and for no other
    try:
      return await injection.around('grader', lost, work)
    finally:
      injection.component_dead &= not injection.is_('grader', 'killed')  # a fresh worker


class Environment:
  """MathPython with the fault around its first step; what is bad or partial is `reset`, the first step or the last."""

  def __init__(self, injection: Injection):
    services = Services(injection)
    held = holding(services.grade, FailureKind.GRADER, GRADER_HOLDS, LIMITS.back_off)
    parts = {'sandbox': services, 'grader': SimpleNamespace(grade=held)}
    self._env = MathPython(chat=Chat(), **parts, max_turns=4, observation_bytes=16)
    self._injection, self._gone = (
      injection,
      EpisodeFailure(FailureKind.ENV, 'the environment is gone'),
    )
    self._moments = iter(['during', 'after'])

  async def reset(self, task: Task):
    return await self._call('before', lambda: self._env.reset(task))

  async def step(self, action: np.ndarray):
    return await self._call(next(self._moments), lambda: self._env.step(action))

  def cut(self):
    return self._env.cut()

  async def close(self) -> None:
    await self._env.close()
    fault, victims = self._injection.fault, self._injection.victims
    if fault.moment == 'step and close' and EPISODE.get() in victims:
      await asyncio.sleep(FOREVER_S)
    if self._injection.is_('environment', 'partial') and fault.moment == 'after':
      if self._injection.due('environment'):
        raise self._gone  # the outcome is there, and is lost

  async def _call(self, moment: str, work: Callable):
    injection, fault = self._injection, self._injection.fault
    if injection.is_('environment', 'cancelled'):
      try:
        await asyncio.sleep(2 * SECONDS['learner'])  # so that it runs beside updates
        return await work()
      except asyncio.CancelledError:
        injection.struck += 1
        raise self._gone from None
    which = fault.moment.partition(':')[0] if fault.kind in ('bad', 'partial') else 'during'
    if which != moment or (fault.kind, moment) == ('partial', 'after'):
      return await work()
    return await injection.around('environment', self._gone, work)


class File(io.FileIO):
  """A file on a disk that fails: of what is written nothing, half or all arrives."""

  def __init__(self, path: Path, component: str, injection: Injection):
    super().__init__(path, 'ab')
    self._component, self._injection, self._full = component, injection, False

  def write(self, data) -> int:
    injection = self._injection
    kind, moment = injection.fault.kind, injection.fault.moment
    if self._full:
      self._full = False
      raise OSError(*NO_SPACE)
    if kind == 'bad' or (moment == 'after' and kind in ('exception', 'partial')):
      return super().write(data)
    if not injection.due(self._component):
      return super().write(data)
    part = {'before': int(kind == 'partial'), 'during': len(data) // 2, 'after': len(data)}[moment]
    if part:
      super().write(data[:part])
    if kind in ('exception', 'partial') and part:
      # write(2) tells of the part that it wrote, and fails at the next call.
      self._full = kind == 'exception'
      return part
    injection.strike(OSError(*NO_SPACE), blocks=True)
    return part + (super().write(data[part:]) if part < len(data) else 0)

  def fileno(self) -> int:
    """Asked for before fsync."""
    fault = self._injection.fault
    if (fault.kind, fault.moment) == ('exception', 'after'):
      if self._injection.due(self._component, first=2):
        raise OSError(errno.EIO, 'Input/output error')
    return super().fileno()

  def text(self) -> io.TextIOWrapper:
    """Buffered as `Path.open('a')` is."""
    return io.TextIOWrapper(io.BufferedWriter(self))


class Writer(MetricsWriter):
  """A MetricsWriter on such a disk, that is told nonsense."""

  def __init__(self, workdir: Path, injection: Injection, *, resume_at: int):
    super().__init__(workdir, resume_at=resume_at)
    self._file.close()
    self._file = File(workdir / 'metrics.jsonl', 'metrics', injection)
    self._injection = injection

  def write(self, step: int, metrics) -> None:
    injection = self._injection
    if injection.is_('metrics', 'bad') and injection.due('metrics'):
      metrics = injection.spoil(metrics)
    board = contextlib.nullcontext()
    if injection.fault == Fault('metrics', 'partial', 'after') and injection.due('metrics'):
      board = mock.patch.object(self._board, 'write', side_effect=OSError(*NO_SPACE))
    with board:
      super().write(step, metrics)


def make_learner(injection: Injection) -> learner.Learner:
  """Moves the logits by what the batch says, so that another batch gives other parameters."""
  error = RuntimeError('RESOURCE_EXHAUSTED: out of memory in the update')

  def point(moment: str) -> None:
    injection.point('learner', moment, error, blocks=False)

  def update(state, batch):
    assert np.isfinite(batch.behavior_logprobs).all() and np.isfinite(batch.rewards).all()
    if int(state.step) == 4 and injection.is_after_death():
      injection.die()
    if int(state.step) == 4 and injection.is_('environment', 'cancelled'):
      raise error  # so that episodes are open when the run ends
    point('before')
    gradient = np.bincount(batch.tokens[batch.mask > 0], batch.rewards[batch.mask > 0], VOCAB)
    point('during')
    new = state.replace(step=state.step + 1, policy=state.policy + np.float32(0.01 * gradient))
    metrics = {'updates/skipped_now': 0, 'mismatch/k3': 0.0, 'loss/policy': float(gradient.sum())}
    point('after')
    if injection.spoil is not None and injection.due('learner'):
      return injection.spoil((state, new, metrics))
    return new, metrics

  update._cache_size = lambda: 1
  return learner.Learner(update, update)


def make_work(injection: Injection):
  """The learner's thread: work is done at once and takes logical seconds, under a deadline."""
  takes = {loop.UPDATE: SECONDS['learner'], loop.CHECKPOINT: SECONDS['checkpoint']}

  async def work(what: str, function: Callable, *args):
    injection.owed_s = 0.0
    try:
      with saving(injection) if what == loop.CHECKPOINT else contextlib.nullcontext():
        result = function(*args)
    except Hangs:
      await asyncio.sleep(DEADLINE_S)
      raise RunFailed(f'{what} takes more than {DEADLINE_S} s') from None
    await asyncio.sleep(takes[what] + injection.owed_s)
    return result

  return work


@contextlib.contextmanager
def saving(injection: Injection):
  """The fault inside the second `checkpoint.save`: before it writes, between its files, or when all is done."""
  fault = injection.fault
  injection.saves += 1
  names = {'before': '_refuse_full_disk', 'during': '_digest', 'after': '_prune'}
  if fault.kind == 'partial':
    # Files aside; a folder in place without its marker; an older one that has lost its marker and not its files.
    names = {'before': '_sync', 'during': '_sync', 'after': '_remove'}
  name = names.get(fault.moment)
  if (
    fault.component != 'checkpoint'
    or fault.kind == 'bad'
    or injection.saves != (3 if name == '_remove' else 2)
  ):
    yield
    return
  original = getattr(checkpoint, name)

  def hooked(*args):
    if (name, fault.moment) == ('_sync', 'during') and args[0].name != 'rl':
      return original(*args)
    if name == '_remove':
      (args[0] / 'COMPLETE').unlink(missing_ok=True)
    injection.point('checkpoint', fault.moment, OSError(*NO_SPACE), blocks=False)
    return original(*args)

  with mock.patch.object(checkpoint, name, hooked):
    yield


async def live(injection: Injection) -> learner.TrainState:
  """One life of the process, put together as phases.py does: from the last checkpoint, or afresh."""
  workdir, now = injection.workdir, asyncio.get_running_loop()
  policy = np.linspace(0.0, 1.0, VOCAB, dtype=np.float32)
  state = learner.TrainState(np.int32(0), {}, policy, (), {}, (), {}, np.int32(0))
  host, kept, root = {}, (), workdir / 'checkpoints' / 'rl'
  if saved := checkpoint.steps(root):
    restored = checkpoint.restore(root, saved[-1], state, run_id='faults')
    state, host, kept = restored.state, restored.host, restored.trajectories
  now.jump(max(host.get('time_s', 0.0), now.time()))
  journal = Journal(workdir, resume_at=host.get('replay_bytes', 0))
  journal._file.close()
  journal._file = File(workdir / 'replay.jsonl', 'record', injection).text()
  engines = Engines(injection, state.policy, int(state.step))
  async with closing(journal.close, engines.close):
    ledger = Ledger(workdir / 'events.jsonl', now.time, resume_at=host.get('ledger_bytes', 0))
    ledger._file.close()
    ledger._file = File(workdir / 'events.jsonl', 'disk', injection).text()
    writer = Writer(workdir, injection, resume_at=host.get('metrics_bytes', 0))
    waits = Waits(now.time)

    async def play(task: Task, *, episode: str, **rest):
      EPISODE.set(episode)
      env = Recorded(Environment(injection), episode, journal)
      at = functools.partial(waits.begin, f'episode {episode}')
      numbers = {'temperature': 1.0, 'max_turn_tokens': 8, 'max_tokens': 64, 'vocab_size': VOCAB}
      return await run_episode(env, engines, task, episode=episode, at=at, **numbers, **rest)

    dispatcher = Dispatcher(
      play,
      lambda index: Task(f'p{index}', 'question', 'right'),
      ledger,
      LIMITS,
      waits,
      episodes_needed=UPDATES * BATCH,
      version=int(state.step),
      snapshot=host.get('dispatcher'),
      trajectories=kept,
      journal=journal,
    )
    learning = loop.Learning(
      learner=make_learner(injection),
      work=make_work(injection),
      engine=engines,
      export=lambda state: state.policy,
      place=lambda batch: batch,
      launch=contextlib.nullcontext(),
      journal=journal,
      baseline=lambda trajectories, memory: (None, memory),
      max_staleness=LIMITS.max_staleness,
      row_length=64,
      row_multiple=1,
    )
    run = loop.Run(
      workdir=workdir,
      run_id='faults',
      learning=learning,
      dispatcher=dispatcher,
      ledger=ledger,
      writer=writer,
      clock=now.time,
      stop=asyncio.Event(),
      evaluate=lambda params, step: None,
      evaluated=lambda: asyncio.sleep(0),
      show=lambda *args: None,
      alarms=Alarms(max_skipped_in_row=3, max_k3=1.0, reward_fall=0.9, reward_window=4),
      num_steps=UPDATES,
      batch_size=BATCH,
      evaluate_every=UPDATES,
      save_every=SAVE_EVERY,
      keep=2,
      quiet_saves=False,
      vigil=host.get('vigil'),
      since=host.get('since', {}),
    )
    async with closing(lambda: dispatcher.close(run.ending), ledger.close, writer.close):
      state = await loop.train(run, state)
      run.ending = 'run_ended'
      return state
