"""Back to the last checkpoint when a run diverges: counted, bounded, and on with other prompts."""

import dataclasses
from unittest import mock

import jax
import pytest

from sao_jax import loop
from sao_jax.runtime.failures import RunFailed
from tests import tiny


def alarm_at(*calls):
  """`watch` that finds a divergence at these calls of it."""
  watch, count = loop.watch, iter(range(10**9))

  def alarmed(memory, metrics, alarms):
    memory, reason = watch(memory, metrics, alarms)
    return memory, 'an alarm' if next(count) in calls else reason

  return mock.patch.object(loop, 'watch', alarmed)


def check(workdir, *, rollbacks):
  rows = [row for row in tiny.rows(workdir / 'metrics.jsonl') if 'loss/policy' in row]
  assert [row['step'] for row in rows] == list(range(1, 13))
  assert rows[-1]['rollbacks'] == rollbacks
  events = tiny.rows(workdir / 'events.jsonl')
  trained = [row for row in events if row['event'] == 'trained']
  assert len(trained) == len({row['prompt'] for row in trained}) == 4 * 13
  started = sum(row['event'] in ('pending', 'reissued') for row in events)
  assert started == sum(
    row['event'] in ('trained', 'dropped', 'failed', 'cancelled') for row in events
  )
  return trained


@pytest.mark.parametrize('mode', ['deterministic', 'async'])
def test_a_run_goes_back_and_on_with_other_prompts(world, tmp_path, mode):
  parts = tiny.parts_of(runtime__mode=mode)
  with alarm_at(8):  # update 9; the checkpoint is of update 6
    tiny.run(world, parts, tmp_path / 'w')
  trained = check(tmp_path / 'w', rollbacks=1)
  lost = tiny.rows(tmp_path / 'w' / 'events.lost.jsonl')
  forsaken = {row['prompt'] for row in lost if row['event'] == 'trained'}
  kept = {row['prompt'] for row in trained}
  assert len(forsaken) == 12 and not forsaken & kept  # what it diverged on does not come again
  assert any(row['reason'] == 'rollback' for row in lost)
  metrics = tiny.rows(tmp_path / 'w' / 'metrics.lost.jsonl')
  assert [row['step'] for row in metrics] == [7, 8, 9]


def test_after_max_rollbacks_the_run_ends_and_says_why(world, tmp_path):
  parts = tiny.parts_of(train__max_rollbacks=2)
  with alarm_at(*range(7, 100)), pytest.raises(RunFailed, match=r'an alarm, after 2 roll-backs'):
    tiny.run(world, parts, tmp_path / 'w')
  # And so does the next start: the count is in the checkpoint.
  with alarm_at(*range(100)), pytest.raises(RunFailed, match=r'after 2 roll-backs'):
    tiny.run(world, parts, tmp_path / 'w')
  tiny.run(world, parts, tmp_path / 'w')
  check(tmp_path / 'w', rollbacks=2)


def test_parameters_that_are_not_finite_are_neither_published_nor_saved(world, tmp_path):
  parts, update = tiny.parts_of(), tiny.parts_of().learner.update
  calls = iter(range(10**9))

  class Poisoned:
    _cache_size = staticmethod(update._cache_size)

    def __call__(self, state, batch):
      state, metrics = update(state, batch)
      if next(calls) == 8:
        state = state.replace(policy=jax.tree.map(lambda x: x * float('nan'), state.policy))
      return state, metrics

  learner = parts.learner._replace(update=Poisoned())
  parts = dataclasses.replace(parts, learner=learner)
  tiny.run(world, parts, tmp_path / 'w')
  check(tmp_path / 'w', rollbacks=1)


def test_a_run_with_a_rollback_repeats_in_deterministic_mode(world, tmp_path):
  for name in 'ab':
    with alarm_at(8):
      tiny.run(world, tiny.parts_of(), tmp_path / name)
  assert tiny.digests(tmp_path / 'a') == tiny.digests(tmp_path / 'b')
  a, b = (tmp_path / name / 'events.jsonl' for name in 'ab')
  assert a.read_bytes() == b.read_bytes()
