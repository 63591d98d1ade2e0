"""Advantages against float64 loops that walk the action tokens one by one, and by hand."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax import advantages

B, T = 3, 12
gae = jax.jit(advantages.skip_observation_gae, static_argnames=('discount',))
returns = jax.jit(advantages.lambda_returns, static_argnames=('discount',))
by_step = jax.jit(advantages.step_level_gae, static_argnames=('discount', 'aggregate'))


def chain(rewards, values, bootstrap, discount, lam):
  """GAE over K action tokens, float64. lam [K]; bootstrap after the last."""
  result, following = np.zeros(len(rewards)), 0.0
  for k in reversed(range(len(rewards))):
    after = values[k + 1] if k + 1 < len(rewards) else bootstrap
    following = rewards[k] + discount * after - values[k] + discount * lam[k] * following
    result[k] = following
  return result


def loop(rewards, values, mask, bootstrap, segment_ids, discount, lam):
  """The same for packed rows: gathers each trajectory's action tokens and scatters the result."""
  result = np.zeros(mask.shape)
  for b in range(len(mask)):
    for segment in set(segment_ids[b]) - {0}:
      at = [t for t in range(mask.shape[1]) if mask[b, t] and segment_ids[b, t] == segment]
      if at:
        result[b, at] = chain(
          rewards[b, at], values[b, at], bootstrap[b, at[-1]], discount, lam[b, at]
        )
  return result


def data(seed, length=T):
  """Rows of up to three trajectories, between and around them padding; a random action mask."""
  rng = np.random.default_rng(seed)
  arrays = [rng.standard_normal((B, length)) for _ in range(3)]
  cuts = np.sort(rng.integers(0, length + 1, (B, 4)), axis=1)
  index = np.arange(length)
  segment_ids = sum((index >= cuts[:, i, None]).astype(int) for i in range(3))
  segment_ids = np.where(index >= cuts[:, 3, None], 0, segment_ids)
  mask = rng.random((B, length)) < 0.5
  lam = rng.random((B, length))
  return (*arrays, mask, segment_ids, lam)


def single(x):
  return np.asarray([x], np.float32)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([np.nan, np.inf, 7.0]))
def test_packed_rows_against_a_loop(seed, garbage):
  rewards, values, bootstrap, mask, segment_ids, lam = data(seed)
  want = loop(rewards, values, mask, bootstrap, segment_ids, 0.9, lam)
  action = mask & (segment_ids > 0)
  last = np.zeros_like(action)  # the only places where bootstrap is read
  for b in range(B):
    for segment in {1, 2, 3}:
      at = np.flatnonzero(action[b] & (segment_ids[b] == segment))
      last[b, at[-1:]] = True
  dirty = [np.where(action, x, garbage) for x in (rewards, values, lam)]
  dirty_rewards, dirty_values, dirty_lam = dirty
  got = gae(
    dirty_rewards,
    dirty_values,
    mask,
    np.where(last, bootstrap, garbage),
    discount=0.9,
    lam=dirty_lam,
    segment_ids=segment_ids,
  )
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  clean = gae(rewards, values, mask, bootstrap, discount=0.9, lam=lam, segment_ids=segment_ids)
  np.testing.assert_array_equal(got, clean)  # no bit may change
  target = returns(
    dirty_rewards, dirty_values, mask, bootstrap, discount=0.9, lam=lam, segment_ids=segment_ids
  )
  np.testing.assert_allclose(target, np.where(action, want + values, 0), rtol=1e-4, atol=1e-5)


def test_packing_changes_nothing():
  rewards, values, bootstrap, mask, *_ = data(1)
  alone = gae(rewards, values, mask, bootstrap, discount=0.9, lam=0.8)
  row = lambda x: x.reshape(1, -1)
  packed = gae(
    row(rewards),
    row(values),
    row(mask),
    row(bootstrap),
    discount=0.9,
    lam=0.8,
    segment_ids=np.repeat(np.arange(B) + 1, T)[None],
  )
  np.testing.assert_allclose(packed, row(alone), rtol=1e-5, atol=1e-6)


def test_two_turns_by_hand():
  # o a a o o a o: actions at 1, 2, 5 with V = 1, 2, 4 and r = 0, 0, 10. discount = lam = 1/2, bootstrap 8 after the end.
  nan = np.nan
  rewards = single([nan, 0, 0, nan, nan, 10, nan])
  values = single([nan, 1, 2, nan, nan, 4, nan])
  bootstrap = single([nan, nan, nan, nan, nan, 8, nan])
  mask = single([0, 1, 1, 0, 0, 1, 0])
  # delta: 10 + .5*8 - 4 = 10; 0 + .5*4 - 2 = 0; 0 + .5*2 - 1 = 0. A: 10; 0 + .25*10 = 2.5; 0 + .25*2.5 = .625.
  got = gae(rewards, values, mask, bootstrap, discount=0.5, lam=0.5)
  np.testing.assert_allclose(got, [[0, 0.625, 2.5, 0, 0, 10, 0]])
  # Terminated: delta at the end is 10 - 4 = 6.
  got = gae(rewards, values, mask, 0 * values, discount=0.5, lam=0.5)
  np.testing.assert_allclose(got, [[0, 0.375, 1.5, 0, 0, 6, 0]])
  # The critic with lam = 1: discounted return 10/4, 10/2, 10.
  got = returns(rewards, values, mask, 0 * values, discount=0.5, lam=1.0)
  np.testing.assert_allclose(got, [[0, 2.5, 5, 0, 0, 10, 0]])


@pytest.mark.parametrize(
  'mask',
  [
    [0, 0, 1, 1, 0, 1],
    [1, 1, 0, 0, 1, 1],
    [1, 0, 0, 1, 0, 0],
    [0, 0, 0, 0, 0, 1],
    [1, 0, 0, 0, 0, 0],
  ],
)
def test_reward_reaches_every_action_wherever_observations_are(mask):
  # Observations and padding first, in the middle, last. With lam = discount = 1 and V = 0 each action gets the reward.
  mask = np.asarray([mask])
  last = np.flatnonzero(mask[0])[-1]
  rewards = np.zeros((1, 6))
  rewards[0, last] = 3
  got = gae(rewards, np.zeros((1, 6)), mask, np.zeros((1, 6)), discount=1.0, lam=1.0)
  np.testing.assert_array_equal(got, 3.0 * mask)


def test_long_trajectory_against_a_loop():
  length = 131072
  rng = np.random.default_rng(0)
  mask = rng.random((1, length)) < 0.7
  rewards = np.where(rng.random((1, length)) < 0.001, rng.standard_normal((1, length)), 0.0)
  values = rng.random((1, length))
  bootstrap = np.full((1, length), 0.5)
  lam = np.full((1, length), 1 - 1 / (1.5 * mask.sum()))
  for decay in (lam, np.ones_like(lam)):
    args = np.float32(rewards), np.float32(values), mask, np.float32(bootstrap)
    want = loop(rewards, values, mask, bootstrap, np.ones((1, length), int), 1.0, np.float32(decay))
    got = gae(*args, discount=1.0, lam=np.float32(decay))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_depth_is_logarithmic():
  # No loop over time: neither scan nor while in the program.
  x = jnp.zeros((1, 64))
  text = str(
    jax.make_jaxpr(lambda *a: advantages.skip_observation_gae(*a, discount=1.0, lam=1.0))(
      x, x, x, x
    )
  )
  assert 'while' not in text and 'scan' not in text


def test_no_gradient_and_short_types():
  rewards, values, bootstrap, mask, *_ = data(2)
  for function in (advantages.skip_observation_gae, advantages.lambda_returns):
    gradient = jax.jit(
      jax.grad(lambda v, f=function: f(rewards, v, mask, bootstrap, discount=1.0, lam=0.9).sum())
    )(jnp.asarray(values, jnp.float32))
    np.testing.assert_array_equal(gradient, np.zeros((B, T)))
  short = [jnp.asarray(x, jnp.bfloat16) for x in (rewards, values, bootstrap)]
  long = [x.astype(jnp.float32) for x in short]
  a = gae(*short[:2], mask, short[2], discount=0.99, lam=0.9)
  b = gae(*long[:2], mask, long[2], discount=0.99, lam=0.9)
  np.testing.assert_array_equal(a, b)


def test_integer_rewards_keep_half_rewards_of_values():
  mask = np.ones((1, 2), int)
  got = gae(
    np.array([[0, 1]]), np.array([[0.5, 0.5]]), mask, np.zeros((1, 2)), discount=1.0, lam=1.0
  )
  np.testing.assert_allclose(got, [[0.5, 0.5]])


def test_every_number_matters_and_is_checked():
  rewards, values, bootstrap, mask, segment_ids, lam = data(3)
  args = rewards, values, mask, bootstrap

  def total(**kw):
    return float(abs(gae(*args, **kw)).sum())

  base = total(discount=0.9, lam=0.8)
  assert base != total(discount=0.8, lam=0.8)
  assert base != total(discount=0.9, lam=0.7)
  assert base != total(discount=0.9, lam=lam)
  assert base != total(discount=0.9, lam=0.8, segment_ids=segment_ids)
  for bad in ({'discount': 1.1, 'lam': 1.0}, {'discount': 1.0, 'lam': -0.1}):
    with pytest.raises(ValueError, match='must be in'):
      advantages.skip_observation_gae(*args, **bad)
  for bad in (np.ones((B, 1)), np.ones(B), np.ones((1, T))):
    with pytest.raises(AssertionError):
      total(discount=1.0, lam=bad)
    for i in range(4):
      with pytest.raises(AssertionError):
        wrong = (*args[:i], bad, *args[i + 1 :])
        advantages.skip_observation_gae(*wrong, discount=1.0, lam=1.0)
    with pytest.raises(AssertionError):
      total(discount=1.0, lam=1.0, segment_ids=bad.astype(int))


def test_length_adaptive_lambda():
  # alpha l = 0, .5 * 1, 1.5, 3, 150, 196608.
  got = advantages.length_adaptive_lambda(jnp.array([0, 1, 2, 100, 131072]), alpha=1.5)
  np.testing.assert_allclose(got, [0, 1 / 3, 2 / 3, 149 / 150, 1 - 1 / 196608], rtol=1e-6)
  np.testing.assert_array_equal(advantages.length_adaptive_lambda(1.0, alpha=0.5), 0)  # clipped
  short = advantages.length_adaptive_lambda(jnp.array([1024], jnp.bfloat16), alpha=1.5)
  assert short.dtype == jnp.float32 and 0.999 < short[0] < 1  # 1 exactly in bfloat16
  with pytest.raises(ValueError, match='alpha is 0'):
    advantages.length_adaptive_lambda(3, alpha=0)


def step_loop(rewards, values, mask, step_ids, bootstrap, discount, lam, aggregate):
  result = np.zeros(mask.shape)
  for b in range(len(mask)):
    ids = sorted(set(step_ids[b][mask[b]]))
    if not ids:
      continue
    at = [[t for t in range(mask.shape[1]) if mask[b, t] and step_ids[b, t] == i] for i in ids]
    value = [np.mean(values[b, a]) if aggregate == 'mean' else values[b, a[-1]] for a in at]
    reward = [np.sum(rewards[b, a]) for a in at]
    decay = [lam[b, a[-1]] for a in at]
    for a, x in zip(
      at, chain(reward, value, bootstrap[b, at[-1][-1]], discount, decay), strict=True
    ):
      result[b, a] = x
  return result


@pytest.mark.parametrize('aggregate', ['mean', 'last'])
def test_step_level_against_a_loop(aggregate):
  run = functools.partial(by_step, discount=0.9, aggregate=aggregate)
  for seed in range(5):
    rewards, values, bootstrap, mask, _, lam = data(seed)
    steps = np.cumsum(np.random.default_rng(seed).random((B, T)) < 0.4, axis=1).clip(0, T - 1)
    want = step_loop(rewards, values, mask, steps, bootstrap, 0.9, lam, aggregate)
    dirty = [np.where(mask, x, np.nan) for x in (rewards, values, bootstrap)]
    steps = np.where(mask, steps, -1)  # -1 on observations, as in a trajectory
    got = run(dirty[0], dirty[1], mask, steps, dirty[2], lam=lam)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    scalar = run(dirty[0], dirty[1], mask, steps, dirty[2], lam=0.7)
    want = step_loop(rewards, values, mask, steps, bootstrap, 0.9, np.full((B, T), 0.7), aggregate)
    np.testing.assert_allclose(scalar, want, rtol=1e-4, atol=1e-5)


def test_step_level_by_hand():
  # Two steps: tokens 0, 1 (V 1, 3) and 3, 4 (V 4, 6); rewards 1 and 10; discount 1, lam .5, terminated.
  args = (
    single([0, 1, np.nan, 0, 10]),
    single([1, 3, np.nan, 4, 6]),
    single([1, 1, 0, 1, 1]),
    np.array([[0, 0, -1, 1, 1]]),
    single([0, 0, 0, 0, 0]),
  )
  # mean: values 2, 5: deltas 1 + 5 - 2 = 4 and 10 - 5 = 5: A = 6.5 and 5. last: 3, 6: deltas 4 and 4: A = 6 and 4.
  for aggregate, want in (('mean', [6.5, 6.5, 0, 5, 5]), ('last', [6, 6, 0, 4, 4])):
    got = by_step(*args, discount=1.0, lam=0.5, aggregate=aggregate)
    np.testing.assert_allclose(got, [want])
  with pytest.raises(ValueError, match="aggregate is 'max'"):
    advantages.step_level_gae(*args, discount=1.0, lam=0.5, aggregate='max')
  with pytest.raises(AssertionError):
    advantages.step_level_gae(
      *args[:3], args[3][:, :1], args[4], discount=1.0, lam=0.5, aggregate='mean'
    )


def test_group_relative():
  rewards = jnp.array([[1, 0, 0, 1], [1, 1, 1, 5]])  # integers
  # Means .5 and 2; population deviations .5 and sqrt(3).
  np.testing.assert_allclose(
    advantages.group_relative(rewards, normalize_std=False),
    [[0.5, -0.5, -0.5, 0.5], [-1, -1, -1, 3]],
  )
  np.testing.assert_allclose(
    advantages.group_relative(rewards, normalize_std=True),
    [[1, -1, -1, 1], np.array([-1, -1, -1, 3]) / np.sqrt(3)],
    rtol=1e-6,
  )


@pytest.mark.parametrize('size', [1, 2, 3, 7])
def test_a_constant_group_is_exactly_zero(size):
  rewards = jnp.full((2, size), 0.1)  # the float32 mean of three 0.1 need not be 0.1
  for normalize_std in (True, False):
    got = advantages.group_relative(rewards, normalize_std=normalize_std)
    np.testing.assert_array_equal(got, np.zeros((2, size)))
  if size > 1:
    np.testing.assert_array_equal(advantages.leave_one_out(rewards), np.zeros((2, size)))


def test_leave_one_out():
  rewards = np.random.default_rng(0).random((3, 4))
  want = [[r - np.delete(row, i).mean() for i, r in enumerate(row)] for row in rewards]
  np.testing.assert_allclose(advantages.leave_one_out(rewards), want, rtol=1e-5, atol=1e-6)
  with pytest.raises(ValueError, match='needs 2 or more'):
    advantages.leave_one_out(jnp.ones((3, 1)))
  with pytest.raises(AssertionError):
    advantages.leave_one_out(jnp.ones(3))


def test_running_mean_of_a_prompt():
  empty = advantages.RunningMean.create(window=2, initial=0.25)
  state = empty.update(['a', 'b', 'a'], [1.0, 0.0, 0.0])
  np.testing.assert_array_equal(state.baselines(['a', 'b', 'new']), [0.5, 0.0, 0.25])
  later = state.update(['a'], [1.0])  # the window of 'a' is now 0, 1
  np.testing.assert_array_equal(later.update(['a'], [1.0]).baselines(['a']), [1.0])
  np.testing.assert_array_equal(later.baselines(['a']), [0.5])
  np.testing.assert_array_equal(state.baselines(['a']), [0.5])  # states do not change
  np.testing.assert_array_equal(empty.baselines(['a']), [0.25])


def test_running_mean_with_one_window_for_all():
  state = advantages.RunningMean.create(window=128, initial=0.0)
  rewards = np.random.default_rng(0).random(300)
  for part in np.split(rewards, 3):
    state = state.update(['all'] * 100, part)
  np.testing.assert_allclose(state.baselines(['all']), [rewards[-128:].mean()], rtol=1e-6)


def test_running_mean_survives_a_checkpoint():
  state = advantages.RunningMean.create(window=8, initial=0.5).update(
    ['p', 'q'], [1, np.float32(0.1)]
  )
  again = advantages.RunningMean.from_json(json.loads(json.dumps(state.to_json())))
  assert again == state
  assert again.update(['p'], [0.0]) == state.update(['p'], [0.0])


def test_running_mean_refuses():
  with pytest.raises(ValueError, match='window is 0'):
    advantages.RunningMean.create(window=0, initial=0.0)
  state = advantages.RunningMean.create(window=2, initial=0.0)
  with pytest.raises(ValueError, match="reward of 'a' is nan"):
    state.update(['a'], [float('nan')])
  with pytest.raises(ValueError):
    state.update(['a', 'b'], [1.0])
