"""What the host reports of an update, by hand."""

import collections
import dataclasses
import types

import numpy as np
import pytest

from sao_jax.evaluate import Evaluation
from sao_jax.report import summary
from tests.test_batching import trajectory


def tools(calls, errors, **kwargs):
  one = trajectory(**kwargs)
  return dataclasses.replace(one, info={'tool_calls': calls, 'tool_errors': errors})


def test_trajectories_by_hand():
  # Version 9. a: versions 9, 8, 4 of three actions; b: one action of version 9 without a word about tools.
  a = tools(3, 1, name='a', mask=[0, 1, 1, 0, 1], reward=1.0)
  a = dataclasses.replace(a, versions=np.asarray([-1, 9, 8, -1, 4], np.int32))
  b = trajectory('b', [0, 1], version=9, reward=0.5, truncated=True)
  got = summary.of_trajectories([a, b], version=9, max_staleness=4)
  # Staleness 0, 1, 5, 0: mean 1.5 over tokens, not 1 over trajectories.
  histogram = [2, 1, 0, 0, 0, 1] + [0] * 11
  assert got.pop('async/staleness_hist') == histogram and len(histogram) == summary.STALENESS_BINS
  assert got == {
    'reward/mean': 0.75,
    'length/trained': 2.0,
    'tokens/trained': 4,
    'async/staleness_mean': 1.5,
    'async/staleness_max': 5,
    'async/masked_stale': 0.25,
    'tool/calls_mean': 1.5,
    'tool/errors_mean': 0.5,
    'tool/used_share': 0.5,
    'episode/truncated_share': 0.5,
  }


@pytest.mark.parametrize(('bound', 'masked'), [(3, 1.0), (4, 0.0)])
def test_the_bound_is_the_last_staleness_that_trains(bound, masked):
  """As in `batching.pack`."""
  old = trajectory('a', [0, 1, 1], version=1)
  got = summary.of_trajectories([old], version=5, max_staleness=bound)
  assert got['async/masked_stale'] == masked


def test_the_last_bin_takes_the_rest_and_the_future_is_refused():
  got = summary.of_trajectories([trajectory('a', [0, 1])], version=400, max_staleness=8)
  assert got['async/staleness_hist'] == [0] * 16 + [1] and got['async/staleness_max'] == 400
  with pytest.raises(ValueError):  # a token of a version that the learner has not reached
    summary.of_trajectories([trajectory('a', [0, 1], version=3)], version=2, max_staleness=8)


def runtime(*, sampled=300, busy=6.0, episodes=4, waited=2.0):
  ledger = types.SimpleNamespace(
    in_system=lambda: 12, counts=collections.Counter(failed=3, dropped=2, trained=50)
  )
  return summary.of_runtime(
    {'tokens_sampled': sampled, 'busy_s': busy, 'time_s': 8.0, 'compiles': 5},
    waited=waited,
    totals=types.SimpleNamespace(episodes=episodes, reward=3.0, length=100.0),
    ledger=ledger,
  )


def test_runtime_by_hand():
  # 300 tokens and 6 of 8 s of engine work between two updates; four episodes finished in them.
  assert runtime() == {
    'tokens/sampled': 300,
    'tokens/per_second': 37.5,
    'idle/learner': 0.25,
    'idle/engine': 0.25,
    'reward/dispatched_mean': 0.75,
    'length/dispatched': 25.0,
    'async/in_system': 12,
    'episodes/failed': 3,
    'episodes/dropped': 2,
    'compiles': 5,
  }


def test_no_episode_finished_is_no_reward_of_zero():
  got = runtime(episodes=0)
  assert np.isnan(got['reward/dispatched_mean']) and np.isnan(got['length/dispatched'])


def test_an_engine_that_was_busy_all_the_time_is_not_less_than_idle():
  assert runtime(busy=8.5)['idle/engine'] == 0


def test_evaluation_by_hand():
  trajectories = (
    tools(2, 0, name='a', mask=[0, 1, 1, 1]),
    tools(0, 0, name='b', mask=[0, 1]),
    trajectory('c', [0, 1, 1]),
  )
  assert summary.of_evaluation(Evaluation(0.5, 0.1, 7, trajectories)) == {
    'eval/pass@1': 0.5,
    'eval/standard_error': 0.1,
    'eval/failed': 7,
    'eval/tool_used_share': pytest.approx(1 / 3),
    'eval/length': 2.0,
  }
