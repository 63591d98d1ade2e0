"""The fault matrix: every component fails in every way at every moment, and the run goes on or ends, as said here.

9 components x 6 kinds of faults x 3 moments, and faults that last or are special. Each cell is a whole run (faults.py) and,
unless it went on by itself, the runs that take it up again until it is complete.
"""

import asyncio
import collections
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import re
import shutil
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from sao_jax import loop
from sao_jax.checkpoint import CheckpointError
from sao_jax.runtime.clock import VirtualLoop
from sao_jax.runtime.failures import Breaker, RunFailed
from sao_jax.sandbox import ToolStatus
from sao_jax.types import Turn
from tests.faults import BATCH, GRADER_HOLDS, UPDATES, VOCAB, Died, Fault, Injection, live

BOUND_S = 2000.0  # logical, of one life
CELL_S = 30  # real; a cell takes a fraction of a second
MOMENTS = ('before', 'during', 'after')
KINDS = ('exception', 'hang', 'slow', 'killed', 'bad', 'partial')
NONE = Fault('', '', '')
change = dataclasses.replace


class Expected(NamedTuple):
  outcome: str  # 'went on', 'ended' (with a reason) or 'resumed' (after a kill)
  why: str
  failed: dict[str, int] = {}  # noqa: RUF012  failed episodes by kind; of a run that went on
  last: str = ''  # pattern of the last line of a run that ended


def went(why: str, **failed: int) -> Expected:
  return Expected('went on', why, failed)


def ended(why: str, last: str) -> Expected:
  return Expected('ended', why, last=last)


def resumed(why: str) -> Expected:
  return Expected('resumed', why)


BLOCKED = ended('the loop guard ends the process', r'^failed: the event loop is blocked for more')
FULL = r'^failed: OSError: \[Errno 28\] No space left on device'
UNSYNCED = r'^failed: OSError: \[Errno 5\] Input/output error'
UNWRITTEN = r'^failed: OSError: \[Errno 28\] metrics of step 4 not written: No space'
UNSAVED = r'^failed: checkpoint .*: step 4 not saved, the disk is full, the last good one is step'
BREAKER = r'^failed: \d+ episodes failed in a row; the last: '
EXPECTED: dict[tuple[str, str], Expected | tuple[Expected, Expected, Expected]] = {
  ('engine', 'exception'): went('the prompt is issued again', infra=1),
  ('engine', 'hang'): went('the deadline of the episode', infra=1),
  ('engine', 'slow'): went('slow is no failure'),
  ('engine', 'killed'): ended('no episode can succeed', BREAKER + 'infra: the engine is gone'),
  ('engine', 'bad'): went('refused where the answer comes in', infra=1),
  ('engine', 'partial'): went('an aborted generation is no data', infra=1),
  ('environment', 'exception'): went('the prompt is issued again', env=1),
  ('environment', 'hang'): went('the deadline of the episode', infra=1),
  ('environment', 'slow'): went('slow is no failure'),
  ('environment', 'killed'): ended('no episode can succeed', BREAKER + 'env: the environment is'),
  ('environment', 'bad'): went('refused where the answer comes in', env=1),
  ('environment', 'partial'): went('half an episode is no data', env=1),
  ('tool', 'exception'): went('a broken sandbox is no reason to judge the agent', infra=1),
  ('tool', 'hang'): went('the deadline of the episode', infra=1),
  ('tool', 'slow'): went('slow is no failure'),
  ('tool', 'killed'): went('a fresh worker answers'),
  ('tool', 'bad'): (
    went('output that is no text', env=1),
    went('huge output is cut'),
    went('output that is no text', env=1),
  ),
  ('tool', 'partial'): went('what a stopped program printed is an observation'),
  ('grader', 'exception'): went('the answer is held and judged again'),
  ('grader', 'hang'): went('the deadline of the episode', infra=1),
  ('grader', 'slow'): went('slow is no failure'),
  ('grader', 'killed'): went('the answer is held and judged by a fresh worker'),
  ('grader', 'bad'): went('what is no verdict is never a reward', grader=1),
  ('grader', 'partial'): went('one answer is never judged; its prompt plays again', grader=1),
  ('learner', 'exception'): ended(
    'an update that fails would fail again', r'^failed: .*RESOURCE_E'
  ),
  ('learner', 'hang'): ended('the deadline of the work', r'^failed: an update takes more than 300'),
  ('learner', 'slow'): went('slow is no failure'),
  ('learner', 'killed'): resumed('from the last checkpoint'),
  ('learner', 'bad'): (
    went('a metric that is not finite is null'),
    ended('parameters that are not finite are not published', 'finite'),
    ended('a version that did not move', '^failed: .*(version|step)'),
  ),
  ('learner', 'partial'): (
    went('an update that was skipped is counted'),
    went('an update that was skipped is counted'),
    ended('the device is lost', r'^failed: RuntimeError: the device is lost'),
  ),
  ('publication', 'exception'): ended(
    'the engine would stay behind', '^failed: .*publication: the'
  ),
  ('publication', 'hang'): BLOCKED,
  ('publication', 'slow'): went('tokens are older, within the bound'),
  ('publication', 'killed'): resumed('from the last checkpoint'),
  ('publication', 'bad'): (
    ended('the engine refuses another shape', r'^failed: ValueError: 16 logits expected, got 15'),
    went('tokens pass for older than they are'),
    ended('the engine refuses NaN', '^failed: ValueError: logits must be finite'),
  ),
  ('publication', 'partial'): went('each token has the version that sampled it'),
  ('checkpoint', 'exception'): ended('the disk is full', UNSAVED),
  ('checkpoint', 'hang'): ended('the deadline of the work', '^failed: writing a checkpoint takes'),
  ('checkpoint', 'slow'): went('slow is no failure'),
  ('checkpoint', 'killed'): resumed('from the last complete checkpoint'),
  ('checkpoint', 'bad'): (
    ended('a checksum', r'^error: checkpoint .*00000004: host.json is damaged .* remove this fo'),
    ended('a checksum', r'^error: checkpoint .*00000004: state/.* is damaged .* remove this fol'),
    ended('the marker', r'^error: checkpoint .*00000004: its COMPLETE file is damaged; remove t'),
  ),
  ('checkpoint', 'partial'): resumed('what has no marker is no checkpoint'),
  ('metrics', 'exception'): (
    ended('the disk is full', UNWRITTEN),
    ended('the disk is full', UNWRITTEN),
    ended('what a checkpoint counts on is not on disk', UNSYNCED),
  ),
  ('metrics', 'hang'): BLOCKED,
  ('metrics', 'slow'): went('slow is no failure'),
  ('metrics', 'killed'): resumed('half a line is set aside'),
  ('metrics', 'bad'): (
    went('NaN is null'),
    ended('a metric that is no number is our bug', r"^failed: TypeError: metric 'x' is 'many'"),
    went('infinity in a list is null'),
  ),
  ('metrics', 'partial'): (
    went('a short write goes on'),
    went('a short write goes on'),
    ended('the disk is full for TensorBoard', UNWRITTEN),
  ),
  ('disk', 'exception'): (ended('full', FULL), ended('full', FULL), ended('no sync', UNSYNCED)),
  ('disk', 'hang'): BLOCKED,
  ('disk', 'slow'): went('slow is no failure'),
  ('disk', 'killed'): resumed('lines after the last checkpoint are set aside'),
  ('disk', 'bad'): (
    ended('a line that is no line', r'events\.jsonl.*line \d+'),
    ended('a log that is too short', r'events\.jsonl has \d+ bytes and the checkpoint counts on'),
    resumed('garbage after the frontier is set aside'),
  ),
  ('disk', 'partial'): resumed('half a line is set aside'),
}
LASTING = {  # and what is special
  Fault('engine', 'exception', 'before', 10**9): ended('no engine', BREAKER + 'infra: the engine'),
  Fault('engine', 'bad', 'during', 10**9): ended('no good answer', BREAKER + 'infra: .*not finite'),
  Fault('engine', 'exception', 'before', 6): went('the breaker closes again', infra=6),
  Fault('engine', 'hang', 'during', 10**9): ended(
    'only deadlines', BREAKER + r'infra: no end with'
  ),
  Fault('environment', 'exception', 'after', 10**9): ended(
    'none', BREAKER + 'env: the environment'
  ),
  Fault('environment', 'hang', 'step and close'): went('cleaning up has a deadline too', infra=1),
  Fault('environment', 'cancelled', '', 10**9): ended('nothing starts while it closes', 'RESOURCE'),
  Fault('tool', 'hang', 'before', 10**9): ended('only deadlines', BREAKER + 'infra: no end within'),
  Fault('tool', 'killed', 'before', 2): went('the fresh worker dies too', infra=1),
  Fault('grader', 'exception', 'after', 10**9): ended(
    'no verdicts', BREAKER + 'grader: no verdict'
  ),
  Fault('learner', 'partial', 'before', 10**9): ended(
    'rolls back', 'updates in a row were not fin'
  ),
  Fault('learner', 'bad', 'two steps'): ended('a version left out', '^failed: .*(version|step)'),
  Fault('disk', 'exception', 'before', 10**9): ended('full for good', FULL),
  Fault('metrics', 'exception', 'during', 10**9): ended('full for good', UNWRITTEN),
  Fault('record', 'exception', 'during'): ended('full', FULL),
  Fault('record', 'killed', 'during'): resumed('half a line is set aside'),
  **{
    Fault('engine', 'bad', name): went('refused where the answer comes in', infra=1)
    for name in ('no version', 'above 0', 'negative token', 'unknown token', 'nothing', 'empty')
  },
  **{
    Fault('environment', 'bad', f'after: {name}'): went('no verdict', grader=1)
    for name in ('NaN', 'inf', 'None')
  },
  Fault('environment', 'bad', 'after: numpy'): went('a number of numpy is a number'),
  Fault('environment', 'bad', 'after: info'): went('what JSON cannot hold', env=1),
}


class Lost:
  def __float__(self):
    raise RuntimeError('the device is lost')


def with_logprob(generation, value: float):
  logprobs = generation.behavior_logprobs.copy()
  logprobs[1] = value
  return change(generation, behavior_logprobs=logprobs)


def with_token(generation, value: int):
  return change(generation, tokens=np.full_like(generation.tokens, value))


def skipped(good):
  state, new, metrics = good
  return state.replace(step=new.step), {**metrics, 'updates/skipped_now': 1}


def load_each(good, *loads):
  """(engine, back): the engine gets the weights as a version that many back."""
  *engines, params, version = good
  for engine, back in loads:
    engines[engine].load(params, version - back)


def flip(path: pathlib.Path, where: float = 0.5) -> None:
  data = bytearray(path.read_bytes())
  data[int(len(data) * where)] ^= 1
  path.write_bytes(data)


def folder(workdir) -> pathlib.Path:
  return workdir / 'checkpoints' / 'rl' / '00000004'


def frontier(workdir) -> int:
  return json.loads((folder(workdir) / 'host.json').read_text())['ledger_bytes']


def scribble(workdir) -> None:
  """Over the last line that the checkpoint counts on."""
  path = workdir / 'events.jsonl'
  data = bytearray(path.read_bytes())
  data[frontier(workdir) - 20 : frontier(workdir) - 1] = b'#' * 19
  path.write_bytes(data)


def append(*names: str):
  def half_a_line(workdir) -> None:
    for name in names:
      with (workdir / name).open('a') as file:
        file.write('{"t": 7.5, "epis')

  return half_a_line


BAD: dict[tuple[str, str], Any] = {
  ('engine', 'before'): lambda g: change(g, behavior_logprobs=g.behavior_logprobs[:-1]),
  ('engine', 'during'): lambda g: with_logprob(g, np.nan),
  ('engine', 'after'): lambda g: change(g, version_spans=((99, len(g.tokens)),)),
  ('engine', 'no version'): lambda g: change(g, version_spans=((-1, len(g.tokens)),)),
  ('engine', 'above 0'): lambda g: with_logprob(g, 0.5),
  ('engine', 'negative token'): lambda g: with_token(g, -3),
  ('engine', 'unknown token'): lambda g: with_token(g, VOCAB + 3),
  ('engine', 'nothing'): lambda g: None,
  ('engine', 'empty'): lambda g: change(
    g, tokens=g.tokens[:0], behavior_logprobs=g.behavior_logprobs[:0], version_spans=()
  ),
  ('environment', 'before'): lambda turn: Turn(turn.tokens[:0]),
  ('environment', 'during'): lambda turn: {'observation': 'text'},
  ('environment', 'after'): lambda outcome: change(outcome, reward='1'),
  ('environment', 'after: NaN'): lambda outcome: change(outcome, reward=float('nan')),
  ('environment', 'after: inf'): lambda outcome: change(outcome, reward=float('inf')),
  ('environment', 'after: None'): lambda outcome: change(outcome, reward=None),
  ('environment', 'after: numpy'): lambda outcome: change(outcome, reward=np.float32(1)),
  ('environment', 'after: info'): lambda outcome: change(outcome, info={'x': object()}),
  ('tool', 'before'): lambda result: setattr(result, 'output', None) or result,
  ('tool', 'during'): lambda result: setattr(result, 'output', 'x' * 10**6) or result,
  ('tool', 'after'): lambda result: setattr(result, 'output', b'bytes') or result,
  ('grader', 'before'): lambda verdict: None,
  ('grader', 'during'): lambda verdict: '0',
  ('grader', 'after'): lambda verdict: float('nan'),
  ('learner', 'before'): lambda good: (good[1], {**good[2], 'loss/policy': np.float32(np.nan)}),
  ('learner', 'during'): lambda good: (good[1].replace(policy=good[1].policy * np.nan), good[2]),
  ('learner', 'after'): lambda good: (good[1].replace(step=good[0].step), good[2]),
  ('learner', 'two steps'): lambda good: (good[1].replace(step=good[1].step + 1), good[2]),
  ('publication', 'before'): lambda good: good[0].load(good[2][:-1], good[3]),
  ('publication', 'during'): lambda good: load_each(good, (0, 2), (1, 2)),
  ('publication', 'after'): lambda good: good[0].load(good[2] * np.nan, good[3]),
  ('metrics', 'before'): lambda metrics: {**metrics, 'x': float('nan')},
  ('metrics', 'during'): lambda metrics: {**metrics, 'x': 'many'},
  ('metrics', 'after'): lambda metrics: {**metrics, 'x': [1.0, float('inf')]},
  ('checkpoint', 'before'): lambda workdir: flip(folder(workdir) / 'host.json'),
  ('checkpoint', 'during'): lambda workdir: flip(max(folder(workdir).glob('state/d/*'))),
  ('checkpoint', 'after'): lambda workdir: flip(folder(workdir) / 'COMPLETE', 0.0),
  ('disk', 'before'): scribble,
  ('disk', 'during'): lambda workdir: os.truncate(workdir / 'events.jsonl', frontier(workdir) - 1),
  ('disk', 'after'): lambda workdir: (workdir / 'events.jsonl').open('ab').write(b'\0\xff{\n7\n'),
}
PARTIAL: dict[tuple[str, str], Any] = {
  ('learner', 'before'): skipped,
  ('learner', 'during'): lambda good: (good[1], {**good[2], 'updates/skipped_now': 1}),
  ('learner', 'after'): lambda good: (good[1], {**good[2], 'loss/policy': Lost()}),
  ('publication', 'before'): load_each,
  ('publication', 'during'): lambda good: load_each(good, (0, 0)),
  ('publication', 'after'): lambda good: load_each(good, (0, 0), (1, 0), (1, 1)),
  ('disk', 'before'): append('events.jsonl'),
  ('disk', 'during'): append('replay.jsonl'),
  ('disk', 'after'): append('events.jsonl', 'replay.jsonl', 'metrics.jsonl'),
}


def tool_says(output: str, status: str):
  return lambda result: SimpleNamespace(output=output, status=ToolStatus(status))


PARTIAL |= {
  ('tool', 'before'): tool_says('', 'truncated'),
  ('tool', 'during'): tool_says('some out', 'truncated'),
  ('tool', 'after'): tool_says('some output', 'killed'),
}
TIMES = {('grader', 'exception'): 2, ('grader', 'partial'): GRADER_HOLDS + 1}
COMPONENTS = tuple(dict.fromkeys(component for component, _ in EXPECTED))
CELLS = {
  Fault(component, kind, moment, TIMES.get((component, kind), 1)): (
    expected[i]
    if isinstance(expected := EXPECTED[component, kind], tuple) and not hasattr(expected, 'why')
    else expected
  )
  for component, kind in itertools.product(COMPONENTS, KINDS)
  for i, moment in enumerate(MOMENTS)
} | LASTING


class Life(NamedTuple):
  error: BaseException | None
  last_line: str
  unheard: list[str]  # what the event loop was told and nobody was
  struck: Injection


def relive(workdir: pathlib.Path, fault: Fault = NONE) -> Life:
  """One life, to its end, in an event loop of its own; nothing of it is left."""
  unheard, box = [], []

  async def main():
    spoils = {'bad': BAD, 'partial': PARTIAL}.get(fault.kind, {})
    injection = Injection(workdir, fault, spoils.get((fault.component, fault.moment)))
    box.append(injection)
    asyncio.get_running_loop().set_exception_handler(lambda _, c: unheard.append(c['message']))
    began = asyncio.get_running_loop().time()
    try:
      await loop.unless_stopped(injection.died, live(injection))
      return None
    except (Exception, Died, loop.Stopped) as error:
      return error
    finally:
      assert asyncio.get_running_loop().time() - began < BOUND_S
      gc.collect()  # tasks whose errors nobody took tell of it now
      assert asyncio.all_tasks() == {asyncio.current_task()}

  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    error = runner.run(main())
  injection = box[0]
  if injection.died.is_set():
    return Life(error, injection.last_line, [], injection)
  return Life(error, error and last_line(error), unheard, injection)


def last_line(error: BaseException) -> str:
  """As experiments/commands.py prints it."""
  if isinstance(error, CheckpointError | RunFailed):
    return ('error' if isinstance(error, CheckpointError) else 'failed') + f': {error}'
  return f'failed: {type(error).__name__}: {" ".join(str(error).split())}'


def count(path: pathlib.Path) -> tuple[dict[str, str], collections.Counter]:
  """The end of each episode and how many there are of each, from the log on disk; all that a ledger must never show is an error."""
  lines: dict[str, list[dict]] = collections.defaultdict(list)
  for line in path.read_text().split('\n')[:-1]:
    row = json.loads(line)
    lines[row['episode']].append(row)
  ends, counts = {}, collections.Counter()
  for episode, rows in lines.items():
    events = [row['event'] for row in rows]
    assert events[0] in ('pending', 'reissued'), (episode, events)
    over = [e for e in events if e in ('trained', 'dropped', 'failed', 'cancelled')]
    assert len(over) == 1 and events[-1] == over[0], (episode, events)
    if 'trained' in events:
      finished = rows[events.index('finished')]
      assert np.isfinite(finished['reward']) and 0 <= finished['reward'] <= 1, rows
    if 'failed' in events:
      assert 'finished' not in events and not any('reward' in row for row in rows), rows
    ends[episode] = over[0]
    counts[over[0] + (f':{rows[-1]["reason"]}' if over[0] == 'failed' else '')] += 1
  return ends, counts


def check_complete(workdir: pathlib.Path) -> tuple[dict[str, str], collections.Counter]:
  ends, counts = count(workdir / 'events.jsonl')
  assert counts['trained'] == UPDATES * BATCH
  prompts = collections.Counter(e.partition('-')[0] for e, end in ends.items() if end == 'trained')
  assert max(prompts.values()) == 1
  steps = [json.loads(line)['step'] for line in (workdir / 'metrics.jsonl').open()]
  assert steps == list(range(1, UPDATES + 1))
  return ends, counts


def children() -> set[str]:
  path = pathlib.Path(f'/proc/self/task/{threading.get_native_id()}/children')
  return set(path.read_text().split())


def play(fault: Fault, workdir: pathlib.Path) -> tuple[str, Life]:
  """The outcome, after everything that holds for every cell has been checked; the run is complete."""
  first = relive(workdir, fault)
  injection = first.struck
  assert injection.struck or injection.died.is_set(), 'the fault never struck'
  outcome, workdir = 'went on', workdir
  if injection.died.is_set():
    workdir, outcome = injection.copy, 'ended' if first.last_line else 'resumed'
  elif first.error is not None:
    outcome = 'ended'
    if fault.component != 'disk' or fault.times == 1:
      count(workdir / 'events.jsonl')
  victims = injection.victims
  if injection.is_after_death():
    injection.spoil(workdir)
    again = relive(workdir)
    if again.error is not None:
      outcome, first = 'ended', again
      shutil.rmtree(folder(workdir))
  if outcome != 'went on':
    last = relive(workdir)
    assert last.error is None, last.error
  ends, _ = check_complete(workdir)
  if fault.kind == 'bad' and fault.component in ('engine', 'environment', 'grader'):
    if fault.moment != 'after: numpy':
      assert not [e for e in victims if ends.get(e) == 'trained']
  assert first.unheard == []
  return outcome, first


def parameters():
  for fault in CELLS:
    name = ' '.join(str(x) for x in dataclasses.astuple(fault)).removesuffix(' 1')
    yield pytest.param(fault, id=name)


@pytest.fixture(scope='module', autouse=True)
def quick():
  """A killed process loses nothing that it has written, synced or not; and the garbage of imports is not looked through."""
  gc.collect()
  gc.freeze()
  with mock.patch.object(os, 'fsync', lambda descriptor: None):
    yield
  gc.unfreeze()


@pytest.mark.timeout(CELL_S)
@pytest.mark.parametrize('fault', list(parameters()))
def test_cell(fault, tmp_path, record_property):
  expected = CELLS[fault]
  before, workdir = (children(), threading.active_count()), tmp_path / 'run'
  workdir.mkdir()
  outcome, life = play(fault, workdir)
  assert (outcome, expected.why) == (expected.outcome, expected.why), life
  if outcome == 'ended':
    assert re.search(expected.last, life.last_line), life.last_line
    assert '\n' not in life.last_line
  if outcome == 'went on':
    _, counts = count(workdir / 'events.jsonl')
    failed = {k.partition(':')[2]: n for k, n in counts.items() if k.startswith('failed')}
    assert failed == expected.failed
  assert (children(), threading.active_count()) == before
  record_property('cell', f'{"special, " * (fault in LASTING)}{outcome}')  # conftest.py counts them


def test_a_breaker_that_is_open_at_a_checkpoint_lets_the_next_process_go_on():
  # It opened at 1000 for 5 s. At 1006 an episode tries, and is lost with the process, whose successor's time starts at 0.
  breaker = Breaker(limit=1, cooldown_s=5.0, max_openings=1)
  breaker.failure(1000.0, 'a', 'x')
  half = json.loads(json.dumps(breaker.saved(1003.0)))
  assert breaker.wait(1006.0, 'b') == 0.0
  tried = json.loads(json.dumps(breaker.saved(1006.0)))
  assert Breaker.restored(tried, 0.0).wait(0.0, 'c') == 0.0
  assert Breaker.restored(half, 0.0).wait(0.0, 'c') > 0.0
  assert Breaker.restored(half, 0.0).wait(2.0, 'c') == 0.0


def test_the_matrix_is_complete():
  cells = [f for f in CELLS if f not in LASTING]
  assert len(cells) == 9 * 6 * 3
