"""Ledger, admission, failures and dispatch, on stand-ins for engine and environment."""

import asyncio
import dataclasses
import json

import pytest

from sao_jax import loop
from sao_jax.runtime import admission, failures
from sao_jax.runtime.dispatch import Dispatcher, Limits
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.runtime.watchdog import Waits
from sao_jax.types import EpisodeFailure, FailureKind, Task
from tests.test_batching import trajectory

LIMITS = Limits(
  seed=0,
  group_size=1,
  capacity=8,
  consume='oldest_started',
  late='mask',
  max_staleness=8,
  retries={'infra': 1, 'env': 1, 'grader': 1},
  back_off=failures.BackOff(0.01, 1.0),
  max_failures_in_row=50,
  breaker_cooldown_s=1.0,
  breaker_openings=0,
  episode_timeout_s=5.0,
  stall_timeout_s=5.0,
)


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def open_ledger(tmp_path, **kwargs):
  return Ledger(tmp_path / 'events.jsonl', lambda: 1.5, **kwargs)


# Ledger


def test_ledger_writes_the_fields_of_the_design(tmp_path):
  ledger = open_ledger(tmp_path)
  ledger.record('e', 'pending', version=3, prompt='p')
  ledger.flush()
  assert rows(tmp_path / 'events.jsonl') == [
    {'t': 1.5, 'episode': 'e', 'prompt': 'p', 'event': 'pending', 'reason': None, 'version': 3}
  ]


@pytest.mark.parametrize(
  'events',
  [
    ['running'],
    ['pending', 'pending'],
    ['pending', 'finished'],
    ['pending', 'running', 'trained'],
    ['pending', 'running', 'finished', 'trained', 'trained'],
    ['pending', 'running', 'finished', 'failed'],
    ['pending', 'running', 'failed', 'finished'],
    ['pending', 'vanished'],
  ],
)
def test_impossible_transitions_end_the_run(tmp_path, events):
  ledger = open_ledger(tmp_path)
  for event in events[:-1]:
    ledger.record('e', event, version=0, prompt='p')
  with pytest.raises(LedgerError):
    ledger.record('e', events[-1], version=0, prompt='p')


def test_counts_derive_from_the_log_after_a_resume(tmp_path):
  ledger = open_ledger(tmp_path)
  for episode in 'ab':
    ledger.record(episode, 'pending', version=0, prompt=f'p{episode}')
    ledger.record(episode, 'running', version=0)
  ledger.record('a', 'finished', version=0)
  frontier = ledger.offset()
  ledger.record('a', 'trained', version=1)  # after the checkpoint: its effect is lost with it
  ledger.close()
  again = open_ledger(tmp_path, resume_at=frontier)
  assert again.states == {'a': 'finished', 'b': 'running'}
  assert again.counts['trained'] == 0
  again.record('a', 'trained', version=1)
  again.check()
  again.close()
  assert [r['event'] for r in rows(tmp_path / 'events.jsonl')].count('trained') == 1
  assert [r['event'] for r in rows(tmp_path / 'events.lost.jsonl')] == ['trained']


def test_a_log_is_never_continued_by_accident(tmp_path):
  ledger = open_ledger(tmp_path)
  ledger.record('e', 'pending', version=0, prompt='p')
  ledger.close()
  with pytest.raises(LedgerError, match='holds a run already'):
    open_ledger(tmp_path)


# Admission and deadlines


@pytest.mark.parametrize(
  ('mode', 'depth', 'staleness', 'expected'),
  [('async', 1, 8, 128), ('async', 0, 8, 64), ('async', 3, 1, 128), ('sync', 3, 8, 64)],
)
def test_capacity(mode, depth, staleness, expected):
  assert expected == admission.capacity(
    mode=mode, batch_size=64, pipeline_depth=depth, max_staleness=staleness
  )


def test_deadlines_nest():
  failures.check_deadlines([('a', 1.0), ('b', 2.0)])
  with pytest.raises(ValueError, match=r'a=3.0 s .* below b=2.0 s'):
    failures.check_deadlines([('a', 3.0), ('b', 2.0)])


# Dispatch


def dispatcher(tmp_path, play, *, needed=100, limits=LIMITS, **kwargs):
  ledger = kwargs.pop('ledger', None) or open_ledger(tmp_path)
  task_at = lambda index: Task(f'p{index}', 'q', 'a')
  return Dispatcher(
    play,
    task_at,
    ledger,
    limits,
    Waits(asyncio.get_running_loop().time),
    episodes_needed=needed,
    version=0,
    **kwargs,
  ), ledger


def player(seconds=lambda index: 0.0, failure=lambda episode: None):
  """A rollout that takes `seconds(prompt index)` and may fail."""

  async def play(task, *, episode, group, seed):
    await asyncio.sleep(seconds(int(group)))
    if error := failure(episode):
      raise error
    made = trajectory(episode, [0, 1])
    return dataclasses.replace(made, prompt_id=task.prompt_id, group=group)

  return play


def test_oldest_started_first_and_each_trained_once(tmp_path):
  async def main():
    # Prompt 0 is slow: it misses the first batch, and leads the next one it is ready for.
    d, ledger = dispatcher(tmp_path, player(lambda i: 0.05 if i == 0 else 0.0), needed=12)
    first = await d.take(4)
    assert [t.group for t in first] == ['1', '2', '3', '4']
    await asyncio.sleep(0.1)
    second = await d.take(4)
    assert second[0].group == '0'
    d.trained(first, version=1)
    d.trained(second, version=2)
    third = await d.take(4)
    d.trained(third, version=3)
    assert ledger.counts['started'] == ledger.counts['trained'] == 12
    assert ledger.in_system() == 0  # no more were started than are needed
    await d.close('run_ended')

  asyncio.run(main())


def test_in_order_waits_for_the_slow_ones_that_started_first(tmp_path):
  async def main():
    d, _ = dispatcher(tmp_path, player(lambda i: 0.05 if i == 0 else 0.0), needed=12)
    assert [t.group for t in await d.take(4, in_order=True)] == ['0', '1', '2', '3']
    await d.close('x')

  asyncio.run(main())


def test_capacity_counts_what_is_under_training(tmp_path):
  async def main():
    d, ledger = dispatcher(tmp_path, player())
    taken = await d.take(4)
    await asyncio.sleep(0.01)
    assert ledger.in_system() == LIMITS.capacity
    assert ledger.counts['started'] == 8
    d.trained(taken, version=1)
    assert ledger.counts['started'] == 12
    await d.close('x')

  asyncio.run(main())


def test_sync_is_a_barrier(tmp_path):
  async def main():
    limits = dataclasses.replace(LIMITS, capacity=4)
    d, ledger = dispatcher(tmp_path, player(), limits=limits)
    taken = await d.take(4)
    await asyncio.sleep(0.01)
    assert ledger.counts['started'] == 4  # nothing starts beside the update
    d.trained(taken, version=1)
    assert ledger.counts['started'] == 8
    await d.close('x')

  asyncio.run(main())


def test_infrastructure_failures_are_issued_again_under_a_new_id(tmp_path):
  fail = lambda e: EpisodeFailure(FailureKind.INFRA, 'x') if e == '000001-0-0' else None

  async def main():
    d, ledger = dispatcher(tmp_path, player(failure=fail), needed=4)
    taken = await d.take(4)
    assert sorted(t.episode for t in taken)[1] == '000001-0-1'
    d.trained(taken, version=1)
    assert ledger.reasons == {'failed:infra': 1}
    await d.close('x')
    ledger.flush()

  asyncio.run(main())
  events = [r for r in rows(tmp_path / 'events.jsonl') if r['prompt'] == 'p1']
  assert [r['event'] for r in events] == [
    'pending', 'running', 'failed', 'reissued', 'running', 'finished', 'trained',
  ]  # fmt: skip


@pytest.mark.parametrize('kind', [FailureKind.DATA, FailureKind.AGENT])
def test_a_failure_that_retrying_cannot_mend_gives_its_room_to_another_prompt(tmp_path, kind):
  fail = lambda e: EpisodeFailure(kind, 'x') if e.startswith('000000') else None

  async def main():
    d, ledger = dispatcher(tmp_path, player(failure=fail), needed=4)
    taken = await d.take(4)
    assert '0' not in [t.group for t in taken]
    d.trained(taken, version=1)
    ledger.check()
    await d.close('x')

  asyncio.run(main())


def test_a_missing_or_infinite_reward_is_a_failure_and_never_zero(tmp_path):
  async def play(task, *, episode, group, seed):
    reward = float('nan') if episode.endswith('-0-0') and group in '01' else 1.0
    return dataclasses.replace(trajectory(episode, [0, 1], reward=reward), group=group)

  async def main():
    d, ledger = dispatcher(tmp_path, play, needed=4)
    taken = await d.take(4)
    assert [t.reward for t in taken] == [1.0] * 4
    assert ledger.reasons == {'failed:grader': 2}
    await d.close('x')

  asyncio.run(main())


def test_groups_are_used_whole_and_dropped_whole(tmp_path):
  limits = dataclasses.replace(LIMITS, group_size=2)
  fail = lambda e: EpisodeFailure(FailureKind.DATA, 'x') if e == '000000-1-0' else None

  async def main():
    d, ledger = dispatcher(tmp_path, player(failure=fail), limits=limits, needed=8)
    taken = await d.take(4)
    assert [t.group for t in taken] == ['1', '1', '2', '2']
    assert ledger.reasons == {'failed:data': 1, 'dropped:group_incomplete': 1}
    d.trained(taken, version=1)
    await d.close('x')
    ledger.check()

  asyncio.run(main())


def test_a_hanging_episode_fails_at_its_deadline(tmp_path):
  limits = dataclasses.replace(LIMITS, episode_timeout_s=0.05, retries={})

  async def main():
    d, ledger = dispatcher(
      tmp_path, player(lambda i: 60.0 if i == 0 else 0.0), limits=limits, needed=8
    )
    d.trained(await d.take(4), version=1)
    d.trained(await d.take(4), version=2)
    assert ledger.reasons == {'failed:infra': 1}
    await d.close('x')

  asyncio.run(main())


def test_no_progress_ends_the_run_and_says_who_waits(tmp_path):
  limits = dataclasses.replace(LIMITS, stall_timeout_s=0.05)

  async def main():
    d, _ = dispatcher(tmp_path, player(lambda i: 60.0), limits=limits)
    with pytest.raises(RunFailed, match=r'nothing happened for 0\.05 s') as caught:
      await d.take(4)
    assert 'learner waits for 4 finished episodes' in caught.value.__notes__[0]
    await d.close('x')

  asyncio.run(main())


def test_too_many_failures_in_a_row_end_the_run(tmp_path):
  limits = dataclasses.replace(LIMITS, max_failures_in_row=5)
  fail = lambda e: EpisodeFailure(FailureKind.ENV, 'the sandbox is gone')

  async def main():
    d, ledger = dispatcher(tmp_path, player(failure=fail), limits=limits)
    with pytest.raises(RunFailed, match=r'5 episodes failed in a row; .*the sandbox is gone'):
      await d.take(4)
    await d.close('x')
    ledger.check()

  asyncio.run(main())


def test_a_bug_in_an_episode_reaches_the_learner(tmp_path):
  async def play(task, **_):
    raise ZeroDivisionError('ours')

  async def main():
    d, _ = dispatcher(tmp_path, play)
    with pytest.raises(ZeroDivisionError):
      await asyncio.wait_for(d.take(4), 5)
    await d.close('x')

  asyncio.run(main())


def test_close_leaves_no_task_and_no_open_episode(tmp_path):
  async def main():
    d, ledger = dispatcher(tmp_path, player(lambda i: 60.0 if i % 2 else 0.0))
    d.fill()
    await asyncio.sleep(0.01)
    await d.close('stopped')
    assert ledger.in_system() == 0
    assert len(asyncio.all_tasks()) == 1
    ledger.check()

  asyncio.run(main())


def test_a_snapshot_keeps_the_finished_and_issues_the_unfinished_again(tmp_path):
  async def before():
    d, ledger = dispatcher(tmp_path, player(lambda i: 60.0 if i == 2 else 0.0), needed=12)
    d.trained(await d.take(4), version=1)
    await asyncio.sleep(0.01)
    snapshot, finished = d.snapshot()
    frontier = ledger.offset()
    d.trained(await d.take(4), version=2)  # after the snapshot: lost with the crash
    await d.close('killed')
    ledger.close()
    return json.loads(json.dumps(snapshot)), finished, frontier

  async def after(snapshot, finished, frontier):
    ledger = open_ledger(tmp_path, resume_at=frontier)
    d, _ = dispatcher(tmp_path, player(), ledger=ledger, snapshot=snapshot, trajectories=finished)
    d.trained(await d.take(4), version=2)
    d.trained(await d.take(4), version=3)
    assert ledger.in_system() == 0
    await d.close('run_ended')
    ledger.close()

  asyncio.run(after(*asyncio.run(before())))
  events = rows(tmp_path / 'events.jsonl')
  trained = [r['prompt'] for r in events if r['event'] == 'trained']
  assert sorted(trained) == sorted(f'p{i}' for i in range(12))  # every prompt once, none lost
  ids = [r['episode'] for r in events if r['event'] == 'trained']
  assert len(set(ids)) == 12
  assert '000002-0-1' in ids  # the unfinished prompt under a new id


def test_a_stop_in_the_same_pass_as_a_finished_batch_loses_nothing(tmp_path):
  """asyncio.wait_for of Python 3.11 swallows such a cancellation; then a batch was popped and thrown away."""

  async def main(passes):
    folder = tmp_path / str(passes)
    folder.mkdir()
    gate = asyncio.Event()

    async def play(task, *, episode, group, seed):
      await gate.wait()
      return dataclasses.replace(trajectory(episode, [0, 1]), group=group)

    d, _ = dispatcher(folder, play)
    stop = asyncio.Event()
    taking = asyncio.create_task(loop.unless_stopped(stop, d.take(4)))
    await asyncio.sleep(0.01)
    gate.set()
    for _ in range(passes):
      await asyncio.sleep(0)
    stop.set()
    try:
      taken = await asyncio.wait_for(taking, 5)
    except loop.Stopped:
      taken = []
    _, kept = d.snapshot()
    finished = {episode for episode, state in d._ledger.states.items() if state == 'finished'}
    assert {t.episode for t in [*taken, *kept]} == finished
    await d.close('stopped')

  for passes in range(12):
    asyncio.run(main(passes))


def test_a_log_that_cannot_be_written_ends_the_run_with_its_reason(tmp_path, monkeypatch):
  async def main():
    d, ledger = dispatcher(tmp_path, player())
    record = ledger.record

    def full(episode, event, **kwargs):
      if event == 'finished':
        raise OSError(28, 'No space left on device')
      record(episode, event, **kwargs)

    monkeypatch.setattr(ledger, 'record', full)
    with pytest.raises(OSError, match='No space left'):
      await d.take(4)
    await d.close('x')

  asyncio.run(main())
