"""Packing: positions and segments from lengths, masks and staleness from versions."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax import batching
from sao_jax.types import StopReason, Trajectory


def trajectory(name: str, mask, *, version: int = 0, reward: float = 1.0, truncated: bool = False):
  mask = np.asarray(mask, bool)
  n = len(mask)
  rewards = np.zeros(n, np.float32)
  rewards[np.flatnonzero(mask)[-1]] = reward
  return Trajectory(
    episode=name,
    prompt_id=name,
    group=name,
    tokens=np.arange(1, n + 1, dtype=np.int32) + 10 * len(name),
    mask=mask,
    behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
    versions=np.where(mask, version, -1).astype(np.int32),
    rewards=rewards,
    turn_ids=np.where(mask, 0, -1).astype(np.int32),
    terminated=not truncated,
    truncated=truncated,
    stop_reason=StopReason.ANSWERED,
  )


PACK = {'row_length': 8, 'row_multiple': 1, 'version': 3, 'max_staleness': 2}


def test_two_trajectories_in_one_row_by_hand():
  # a: prompt, action, observation, action (sampled at version 3); b: prompt, action (version 0, too old).
  a = trajectory('a', [0, 1, 0, 1], version=3)
  b = trajectory('b', [0, 1], version=0, reward=0.25, truncated=True)
  batch = batching.pack([b, a], **PACK)
  assert batch.tokens.shape == (1, 8)
  np.testing.assert_array_equal(batch.segment_ids[0], [1, 1, 1, 1, 2, 2, 0, 0])
  np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 0, 1, 0, 0])
  np.testing.assert_array_equal(batch.action_mask[0], [0, 1, 0, 1, 0, 1, 0, 0])
  np.testing.assert_array_equal(batch.mask[0], [0, 1, 0, 1, 0, 0, 0, 0])
  np.testing.assert_array_equal(batch.staleness[0], [0, 0, 0, 0, 0, 3, 0, 0])
  np.testing.assert_array_equal(batch.rewards[0], [0, 0, 0, 1, 0, 0.25, 0, 0])
  np.testing.assert_array_equal(batch.truncated[0], [0, 0, 0, 0, 0, 1, 0, 0])
  np.testing.assert_array_equal(batch.num_actions[0], [2, 2, 2, 2, 1, 1, 0, 0])


def test_truncation_marks_the_last_action_not_the_last_token():
  batch = batching.pack([trajectory('a', [0, 1, 0], version=3, truncated=True)], **PACK)
  np.testing.assert_array_equal(batch.truncated[0], [0, 1, 0, 0, 0, 0, 0, 0])


def test_host_advantages_sit_on_actions():
  batch = batching.pack([trajectory('a', [0, 1, 0, 1])], **PACK, advantages={'a': -0.5})
  np.testing.assert_array_equal(batch.advantages[0], [0, -0.5, 0, -0.5, 0, 0, 0, 0])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=12), st.integers(1, 4))
def test_every_token_is_packed_once(lengths, multiple):
  trajectories = [trajectory(str(i), [False] + [True] * (n - 1)) for i, n in enumerate(lengths)]
  batch = batching.pack(trajectories, **{**PACK, 'row_length': 16, 'row_multiple': multiple})
  assert batch.tokens.shape[0] % multiple == 0
  found = []
  for row, ids in enumerate(batch.segment_ids):
    for segment in range(1, ids.max() + 1):
      found.append(tuple(batch.tokens[row][ids == segment]))
  assert sorted(found) == sorted(tuple(t.tokens) for t in trajectories)
  assert batch.action_mask.sum() == sum(lengths) - len(lengths)


def test_too_long_and_empty_are_refused_by_name():
  with pytest.raises(ValueError, match='trajectory long has 9 tokens'):
    batching.pack([trajectory('long', [0] + [1] * 8)], **PACK)
  with pytest.raises(ValueError, match='empty batch'):
    batching.pack([], **PACK)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('behavior_logprobs', [0, np.nan, 0, -1], 'log-probability'),
    ('behavior_logprobs', [0, -np.inf, 0, -1], 'log-probability'),
    ('behavior_logprobs', [0, 0.5, 0, -1], 'log-probability'),
    ('versions', [-1, -1, -1, 0], 'no policy version'),
    ('rewards', [0, 0, 0, np.inf], 'not finite'),
    ('rewards', [0, 0, 1, 0], 'not an action'),
    ('mask', [False] * 4, 'no action token'),
    ('mask', [True, True, False, True], 'first token'),
    ('tokens', [1, 2, 3], 'differ in length'),
  ],
)
def test_the_door_refuses_poison_by_trajectory(field, value, message):
  good = trajectory('t7', [0, 1, 0, 1])
  batching.check_trajectory(good)
  bad = dataclasses.replace(good, **{field: np.asarray(value)})
  with pytest.raises(ValueError, match=f'trajectory t7: .*{message}'):
    batching.check_trajectory(bad)


def test_garbage_behind_the_mask_passes_the_door():
  good = trajectory('a', [0, 1, 0, 1])
  logprobs = np.asarray([np.nan, -1, np.inf, -1], np.float32)
  batching.check_trajectory(dataclasses.replace(good, behavior_logprobs=logprobs))
  batch = batching.pack([dataclasses.replace(good, behavior_logprobs=logprobs)], **PACK)
  assert np.isfinite(batch.behavior_logprobs).all()
