"""Retry budgets, back-off, breaker, quarantine, held verdicts, alarms: in logical time."""

import asyncio
import dataclasses

import pytest

from sao_jax.runtime import divergence, failures
from sao_jax.runtime.clock import VirtualLoop
from sao_jax.runtime.failures import BackOff, Breaker, RunFailed
from sao_jax.types import EpisodeFailure, FailureKind, Task
from tests.test_batching import trajectory
from tests.test_runtime import LIMITS, dispatcher, player, rows


def virtual(coroutine):
  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    return runner.run(coroutine)


def fails(kind, *episodes):
  return lambda e: EpisodeFailure(kind, 'broken') if e in episodes else None


# Back-off and budgets


def test_back_off_doubles_to_its_cap_and_spreads():
  back_off = BackOff(1.0, 5.0)
  for failed, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (9, 5.0)):
    waits = {back_off.seconds(failed, seed) for seed in range(50)}
    assert len(waits) == 50 and longest / 2 <= min(waits) < max(waits) <= longest
  assert back_off.seconds(2, 7) == back_off.seconds(2, 7)


def test_each_kind_has_its_own_budget(tmp_path):
  limits = dataclasses.replace(LIMITS, retries={'infra': 2, 'env': 0})
  kinds = {'0': FailureKind.INFRA, '1': FailureKind.ENV, '2': FailureKind.GRADER}
  fail = lambda e: EpisodeFailure(kinds[e[5]], 'x') if e[5] in kinds else None

  async def main():
    d, ledger = dispatcher(tmp_path, player(failure=fail), limits=limits, needed=4)
    d.trained(await d.take(4), version=1)
    await d.close('run_ended')
    assert ledger.reasons == {'failed:infra': 3, 'failed:env': 1, 'failed:grader': 1}

  virtual(main())


def test_a_retry_waits_for_its_back_off(tmp_path):
  limits = dataclasses.replace(LIMITS, back_off=BackOff(10.0, 100.0))

  async def main():
    fail = fails(FailureKind.INFRA, '000000-0-0')
    d, _ = dispatcher(tmp_path, player(failure=fail), limits=limits, needed=4)
    d.fill()
    await asyncio.sleep(4.9)
    assert len(d.snapshot()[1]) == 3
    await asyncio.sleep(5.2)
    assert len(d.snapshot()[1]) == 4
    await d.close('run_ended')

  virtual(main())


def test_a_failed_episode_tells_why_and_has_no_reward(tmp_path):
  async def main():
    d, ledger = dispatcher(tmp_path, player(failure=fails(FailureKind.ENV, '000001-0-0')), needed=4)
    d.trained(await d.take(4), version=1)
    await d.close('run_ended')
    ledger.flush()

  virtual(main())
  events = rows(tmp_path / 'events.jsonl')
  failed = next(row for row in events if row['event'] == 'failed')
  assert failed['reason'] == 'env' and failed['message'] == 'env: broken' and 'reward' not in failed
  finished = [row for row in events if row['event'] == 'finished']
  assert all(row['reward'] == 1.0 and row['tokens'] == 1 for row in finished)


# Quarantine


def test_a_broken_task_is_not_drawn_again_and_others_are(tmp_path):
  """Three prompts that come round; the second is broken, the third fails for good at every visit."""
  task_at = lambda index: Task(f'p{index % 3}', 'q', 'a')
  seen = []

  async def play(task, *, episode, group, seed):
    seen.append(task.prompt_id)
    if task.prompt_id == 'p1':
      raise EpisodeFailure(FailureKind.DATA, 'no question')
    if task.prompt_id == 'p2':
      raise EpisodeFailure(FailureKind.ENV, 'no sandbox')
    return await player()(task, episode=episode, group=group, seed=seed)

  async def main():
    limits = dataclasses.replace(LIMITS, retries={}, capacity=1)
    d, ledger = dispatcher(tmp_path, play, limits=limits, needed=6)
    d._task_at = task_at
    for version in range(6):
      d.trained(await d.take(1), version=version + 1)
    await d.close('run_ended')
    ledger.flush()
    return d.snapshot()[0]['strikes']

  assert virtual(main()) == {'p1': 2, 'p2': 2}
  assert seen.count('p1') == 1 and seen.count('p2') == 2 and seen.count('p0') == 6
  marked = [r['prompt'] for r in rows(tmp_path / 'events.jsonl') if r.get('quarantine')]
  assert marked == ['p1', 'p2']


def test_when_every_prompt_is_in_quarantine_the_run_ends(tmp_path, monkeypatch):
  monkeypatch.setattr('sao_jax.runtime.dispatch._MOST_SKIPPED', 50)

  async def main():
    fail = lambda e: EpisodeFailure(FailureKind.DATA, 'x')
    d, _ = dispatcher(tmp_path, player(failure=fail))
    d._task_at = lambda index: Task(f'p{index % 3}', 'q', 'a')
    with pytest.raises(RunFailed, match='50 prompts in a row are in quarantine'):
      await d.take(4)
    await d.close('run_failed')

  virtual(main())


# Breaker


def test_breaker_by_hand():
  b = Breaker(limit=2, cooldown_s=10.0, max_openings=2)
  b.failure(0.0, 'a', 'x')
  assert b.wait(0.0, 'e') == 0
  b.failure(1.0, 'b', 'x')  # opens until 11
  assert b.wait(1.0, 'e') == 10.0
  b.failure(2.0, 'c', 'x')  # one that was under way: no second opening
  assert b.openings == 1
  assert b.wait(11.0, 'e') == 0  # one may try
  assert b.wait(11.0, 'f') > 0  # and no other
  b.failure(11.5, 'd', 'x')  # another that was under way is not the one that tries
  assert b.openings == 1 and b.trying == 'e'
  b.failure(12.0, 'e', 'x')  # opens for twice as long
  assert b.open_until == 32.0
  assert b.wait(32.0, 'f') == 0
  with pytest.raises(RunFailed, match='6 episodes failed in a row; the last: y'):
    b.failure(33.0, 'f', 'y')
  b.success()
  assert b.wait(33.0, 'g') == 0 and b.in_row == b.openings == 0


def test_an_outage_of_one_environment_holds_its_episodes_and_not_those_of_the_other(tmp_path):
  up_again = 200.0
  limits = dataclasses.replace(
    LIMITS,
    max_failures_in_row=3,
    breaker_cooldown_s=50.0,
    breaker_openings=3,
    retries={'env': 9},
    stall_timeout_s=500.0,
    episode_timeout_s=100.0,
  )
  tried = []

  async def play(task, *, episode, group, seed):
    now = asyncio.get_running_loop().time()
    if task.environment == 'shaky':
      tried.append(now)
      if now < up_again:
        raise EpisodeFailure(FailureKind.ENV, 'out')
    await asyncio.sleep(10.0)
    return await player()(task, episode=episode, group=group, seed=seed)

  async def main():
    d, ledger = dispatcher(tmp_path, play, limits=limits, needed=40)
    d._task_at = lambda index: Task(
      f'p{index}', 'q', 'a', environment='shaky' if index % 4 == 0 else 'good'
    )
    first = await d.take(4)
    assert all(int(t.group) % 4 for t in first)
    d.trained(first, version=1)
    for version in range(2, 11):
      d.trained(await d.take(4), version=version)
    await d.close('run_ended')
    assert ledger.counts['trained'] == 40 and ledger.counts['failed'] < 10

  virtual(main())
  assert sum(t < up_again for t in tried) < 10 and any(t >= up_again for t in tried)


# Held verdicts


def test_a_grader_outage_holds_the_answer_and_loses_nothing():
  calls = []

  async def grade(answer, reference):
    calls.append(asyncio.get_running_loop().time())
    if len(calls) < 3:
      raise EpisodeFailure(FailureKind.GRADER, 'out')
    return answer == reference

  held = failures.holding(grade, FailureKind.GRADER, 3, BackOff(1.0, 8.0))
  assert virtual(held('4', '4')) is True
  assert len(calls) == 3 and 0.5 <= calls[1] <= 1 and calls[2] > calls[1]


def test_an_outage_that_lasts_is_a_failure_and_other_kinds_are_not_held():
  calls = []

  async def grade(kind):
    calls.append(kind)
    raise EpisodeFailure(kind, 'out')

  held = failures.holding(grade, FailureKind.GRADER, 2, BackOff(1.0, 8.0))
  with pytest.raises(EpisodeFailure, match='grader: out'):
    virtual(held(FailureKind.GRADER))
  assert len(calls) == 3
  with pytest.raises(EpisodeFailure, match='env: out'):
    virtual(held(FailureKind.ENV))
  assert len(calls) == 4


# Order of consumption


def test_completion_order_is_on_request_only(tmp_path):
  async def main(consume):
    limits = dataclasses.replace(LIMITS, consume=consume, episode_timeout_s=100.0)
    slow_first = player(lambda i: 10.0 - i)
    folder = tmp_path / consume
    folder.mkdir()
    d, _ = dispatcher(folder, slow_first, limits=limits, needed=8)
    d.fill()
    await asyncio.sleep(20.0)
    taken = [t.group for t in await d.take(4)]
    await d.close('run_ended')
    return taken

  assert virtual(main('oldest_started')) == ['0', '1', '2', '3']
  assert virtual(main('completion')) == ['7', '6', '5', '4']


def aging(tmp_path, late, seconds, bound):
  """A dispatcher of episodes that take `seconds(index)`, sampled under the version at their start."""
  versions = {}

  async def play(task, *, episode, group, seed):
    version = versions['d'].version
    await asyncio.sleep(seconds(int(group)))
    return dataclasses.replace(trajectory(episode, [0, 1], version=version), group=group)

  limits = dataclasses.replace(LIMITS, late=late, max_staleness=bound, episode_timeout_s=100.0)
  versions['d'], ledger = dispatcher(tmp_path, play, limits=limits, needed=40)
  return versions['d'], ledger


@pytest.mark.parametrize('late', ['mask', 'drop'])
def test_late_episodes_are_dropped_where_that_is_asked_for(tmp_path, late):
  """Bound 1: at version 2 what began under version 0 is late, whether it waits by then or finishes later."""

  async def main():
    d, ledger = aging(tmp_path, late, lambda i: {0: 50.0, 1: 2.0}.get(i, 1.0), 1)
    for version in (1, 2):
      d.trained(await d.take(3), version=version)
    await asyncio.sleep(60.0)
    taken = [t.group for t in await d.take(4)]
    await d.close('run_ended')
    ledger.flush()
    return taken

  taken = virtual(main())
  dropped = [
    (r['episode'], r['reason']) for r in rows(tmp_path / 'events.jsonl') if r['event'] == 'dropped'
  ]
  # 2, 3, 4 make the first batch; 1 is older than the rest of the second and leads it; 0 takes 50 s.
  if late == 'mask':
    assert taken[0] == '0' and dropped == []
  else:
    assert '0' not in taken and ('000000-0-0', 'stale') in dropped


def test_a_run_in_which_every_episode_is_late_ends(tmp_path):
  async def main():
    d, _ = dispatcher(
      tmp_path, player(), limits=dataclasses.replace(LIMITS, late='drop'), needed=40
    )
    d.version = 100  # and the stand-in's episodes are all of version 0
    with pytest.raises(RunFailed, match=r'81 episodes in a row were late: raise runtime\.max_stal'):
      await d.take(4)
    await d.close('run_failed')

  virtual(main())


# Alarms

ALARMS = divergence.Alarms(max_skipped_in_row=3, max_k3=1.0, reward_fall=0.5, reward_window=2)


def reasons(rows):
  memory, out = None, []
  for skipped, k3, reward in rows:
    metrics = {'updates/skipped_now': skipped, 'mismatch/k3': k3, 'reward/mean': reward}
    memory, reason = divergence.watch(memory, metrics, ALARMS)
    out.append(reason)
  return out


def test_three_updates_in_a_row_that_were_not_finite():
  got = reasons([(1, 0, 1), (1, 0, 1), (0, 0, 1), (1, 0, 1), (1, 0, 1), (1, 0, 1)])
  assert got[:5] == [None] * 5 and '3 updates in a row were not finite' in got[5]


def test_three_updates_in_a_row_far_from_the_policy_that_samples():
  nan = float('nan')
  got = reasons(
    [(0, 2, 1), (0, 2, 1), (0, 0, 1), (0, 2, 1), (0, nan, 1), (0, 2, 1), (0, 2, 1), (0, 3, 1)]
  )
  assert got[:7] == [None] * 7 and '3 nats a token' in got[7]


def test_a_reward_that_falls_below_half_of_its_best_window():
  # Windows of 2: .5 .7 .8 | .55 .4 (= half of .8: not yet) .3
  got = reasons([(0, 0, r) for r in (0.4, 0.6, 0.8, 0.8, 0.3, 0.5, 0.1)])
  assert got[:6] == [None] * 6 and 'fell from 0.8 to 0.3' in got[6]


def test_the_alarm_of_the_reward_is_off_at_1_also_for_negative_rewards():
  off, memory = dataclasses.replace(ALARMS, reward_fall=1.0), None
  for reward in (-0.5, -0.5, -2.0, -9.0):
    metrics = {'updates/skipped_now': 0, 'mismatch/k3': 0.0, 'reward/mean': reward}
    memory, reason = divergence.watch(memory, metrics, off)
    assert reason is None
  # On, it may lose half of the size of its best: from -1 to -1.5, and no further.
  got = reasons([(0, 0, r) for r in (-1.0, -1.0, -2.0, -2.0)])
  assert got[:3] == [None] * 3 and 'fell from -1 to -2' in got[3]
