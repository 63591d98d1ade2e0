"""pass@1 on scripted episodes."""

import asyncio

import numpy as np
import pytest

from sao_jax.evaluate import evaluate
from sao_jax.runtime.failures import BackOff, RunFailed
from sao_jax.types import EpisodeFailure, FailureKind, Task
from tests.test_batching import trajectory

TASKS = [Task(f'p{index}', 'q', 'a') for index in range(3)]
INFRA = EpisodeFailure(FailureKind.INFRA, 'engine is closed')


class Player:
  """Plays by a script: (index, sample, attempt) -> reward or error; 0.0 for what is not in it."""

  def __init__(self, script=()):
    self.script = dict(script)
    self.seeds = {}
    self.now = self.most = 0

  async def __call__(self, task, *, episode, group, seed):
    index, sample, attempt = (int(x) for x in episode.split('-')[1:])
    assert task is TASKS[index] and episode.startswith('eval-') and group == str(index)
    self.seeds[index, sample, attempt] = seed
    self.now += 1
    self.most = max(self.most, self.now)
    try:
      await asyncio.sleep(0.001)
    finally:
      self.now -= 1
    answer = self.script.get((index, sample, attempt), 0.0)
    if isinstance(answer, BaseException):
      raise answer
    if answer == 'hang':
      await asyncio.sleep(3600)
    return trajectory(episode, [0, 1, 1], reward=answer)


def score(player, **changes):
  kwargs = {
    'name': 'eval', 'samples': 2, 'seed': 0, 'concurrency': 4, 'timeout_s': 5.0, 'retries': {'infra': 1, 'env': 1, 'grader': 1}, 'back_off': BackOff(0.01, 0.1), **changes
  }  # fmt: skip
  return asyncio.run(asyncio.wait_for(evaluate(player, TASKS, **kwargs), 10))


def test_the_score_is_the_mean_over_problems_by_hand():
  # Problem means 1, 0.5, 0: mean 0.5, sample deviation 0.5, standard error 0.5 / sqrt 3.
  got = score(Player({(0, 0, 0): 1.0, (0, 1, 0): 1.0, (1, 1, 0): 1.0}))
  assert got.pass_at_1 == 0.5 and got.failed == 0
  np.testing.assert_allclose(got.standard_error, 0.5 / 3**0.5)
  assert len(got.trajectories) == 6 and sum(t.reward for t in got.trajectories) == 3


def test_one_problem_has_no_standard_error():
  got = asyncio.run(
    evaluate(
      Player({(0, 0, 0): 1.0}), TASKS[:1], name='eval', samples=1, seed=0, concurrency=1, timeout_s=5.0, retries={}, back_off=BackOff(0.01, 0.1)
    )
  )  # fmt: skip
  assert got.pass_at_1 == 1 and np.isnan(got.standard_error)


@pytest.mark.parametrize('failure', [INFRA, TimeoutError(), float('nan')])
def test_a_failure_is_played_again_and_then_counts(failure):
  player = Player({(0, 0, 0): failure, (0, 0, 1): 1.0, (0, 1, 0): 1.0})
  got = score(player)
  assert (got.pass_at_1, got.failed) == (pytest.approx(1 / 3), 0)
  # Another try: what the first seed said may be what cannot be judged.
  assert player.seeds[0, 0, 0] != player.seeds[0, 0, 1]
  assert len(player.seeds) == 7


@pytest.mark.parametrize('failure', [INFRA, float('nan'), float('inf')])
def test_what_keeps_failing_is_left_out_and_counted_never_zero(failure):
  # Problem 0: one success and one failure make 1, not 1/2. The mean over problems is 1/3.
  player = Player({(0, 0, 0): 1.0, (0, 1, 0): failure, (0, 1, 1): failure})
  got = score(player)
  assert (got.pass_at_1, got.failed) == (pytest.approx(1 / 3), 1)
  assert len(got.trajectories) == 5 and (0, 1, 2) not in player.seeds


@pytest.mark.parametrize('kind', [FailureKind.DATA, FailureKind.AGENT])
def test_what_playing_again_cannot_mend_is_played_once(kind):
  player = Player({(0, 0, 0): EpisodeFailure(kind, 'broken'), (0, 1, 0): 1.0})
  got = score(player, retries={'infra': 3, 'env': 3, 'grader': 3})
  assert (got.pass_at_1, got.failed) == (pytest.approx(1 / 3), 1) and len(player.seeds) == 6


def test_an_episode_that_hangs_is_a_failure():
  player = Player({(0, 0, 0): 'hang', (0, 1, 0): 1.0})
  got = score(player, timeout_s=0.05, retries={})
  assert (got.pass_at_1, got.failed) == (pytest.approx(1 / 3), 1)


def test_a_problem_without_a_verdict_ends_the_run():
  player = Player({(1, 0, 0): INFRA, (1, 1, 0): INFRA, (0, 0, 0): 1.0})
  with pytest.raises(RunFailed, match=r'no episode of p1 has a verdict; .*engine is closed'):
    score(player, retries={})


def test_a_bug_travels_and_cancels_the_others():
  player = Player({(1, 0, 0): KeyError('bug'), (0, 0, 0): 'hang'})
  with pytest.raises(KeyError, match='bug'):
    score(player)
  assert player.now == 0 and len(player.seeds) <= 6


@pytest.mark.parametrize('concurrency', [1, 2, 100])
def test_no_more_episodes_at_once_than_there_is_room(concurrency):
  player = Player()
  score(player, concurrency=concurrency)
  assert player.most == min(concurrency, 6)


def test_samples_have_seeds_of_their_own_that_each_evaluation_repeats():
  first, second, other = Player(), Player(), Player()
  score(first, name='eval', concurrency=1)
  score(second, name='eval', concurrency=6)
  score(other, seed=1)
  assert first.seeds == second.seeds
  assert len({*first.seeds.values(), *other.seeds.values()}) == 12
  assert all(0 <= seed < 2**31 for seed in first.seeds.values())


def test_trajectories_come_back_in_order():
  got = score(Player())
  assert [t.episode for t in got.trajectories] == [
    f'eval-{index}-{sample}-0' for index in range(3) for sample in range(2)
  ]
