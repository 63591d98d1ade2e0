"""Policy losses: one contract over all of them, then each by hand and against slow float64 loops."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax import losses

B, T = 4, 6
INTERVAL = {'eps_low': 0.3, 'eps_high': 1.0}


def decoupled(logprobs, behavior, *args, proximal=None, **kw):
  """Decoupled PPO under the signature of the others; the proximal policy is the behavior unless given."""
  proximal = behavior if proximal is None else proximal
  return losses.decoupled_ppo_policy_loss(logprobs, proximal, behavior, *args, **kw)


def calibrated(calibrate):
  return functools.partial(losses.calibrated_policy_loss, calibrate=calibrate)


LOSSES = {
  'sao': functools.partial(losses.sao_policy_loss, **INTERVAL),
  'dis': calibrated(losses.dis(**INTERVAL)),
  'truncate': calibrated(losses.truncate(1.5)),
  'clip': calibrated(losses.clip(0.5, 2.0)),
  'unweighted': calibrated(losses.unweighted()),
  'reinforce': losses.reinforce_policy_loss,
  'ppo': functools.partial(losses.ppo_policy_loss, **INTERVAL),
  'decoupled_ppo': functools.partial(decoupled, **INTERVAL, cap=1.5),
  'icepop': functools.partial(losses.icepop_policy_loss, **INTERVAL),
  'cispo': functools.partial(losses.cispo_policy_loss, **INTERVAL),
  'gspo': functools.partial(losses.gspo_policy_loss, **INTERVAL),
}
WEIGHTED = {'weight_mean', 'zeroed', 'ess'}
METRICS = {
  'sao': {'kept', 'dropped_low', 'dropped_high', 'ratio_mean', 'ess'},
  **{name: WEIGHTED for name in ('dis', 'truncate', 'clip', 'unweighted')},
  'reinforce': {'log_ratio_mean', 'ess'},
  **{name: {'clipped_low', 'clipped_high', 'ratio_mean'} for name in ('ppo', 'cispo', 'gspo')},
  'decoupled_ppo': {'clipped_low', 'clipped_high', 'ratio_mean', 'capped', 'weight_mean'},
  'icepop': {'dropped_low', 'dropped_high', 'ratio_mean'},
}
over_losses = pytest.mark.parametrize('name', LOSSES)


@functools.cache
def compiled(name):
  """(logprobs, behavior, advantages, mask, denominator) -> (LossOutput, gradient of logprobs), jitted."""

  def run(logprobs, behavior, advantages, mask, denominator):
    def loss(x):
      out = LOSSES[name](x, behavior, advantages, mask, denominator=denominator)
      return out.loss + sum(
        out.metrics.values()
      ), out  # metrics have no gradient: every test relies on it

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
    return out, gradient

  return jax.jit(run)


def data(seed, spread=1.0):
  rng = np.random.default_rng(seed)
  logprobs = -rng.exponential(1.0, (B, T)).astype(np.float32)
  behavior = logprobs + spread * rng.standard_normal((B, T)).astype(np.float32)
  advantages = rng.standard_normal((B, T)).astype(np.float32)
  mask = (rng.random((B, T)) < 0.6).astype(np.float32)
  mask[0, 1] = 1
  return logprobs, behavior, advantages, mask


def numbers(out, gradient):
  """Everything that a loss returns, as arrays."""
  return [np.asarray(x) for x in (out.loss, *out.metrics.values(), gradient)]


# The contract


@over_losses
def test_on_policy_gradient_is_reinforce(name):
  logprobs, _, advantages, mask = data(0)
  out, gradient = compiled(name)(logprobs, logprobs, advantages, mask, mask.sum())
  np.testing.assert_allclose(gradient, -mask * advantages / mask.sum(), rtol=1e-6, atol=1e-8)
  # The same array as both arguments, under one tracer: the behavior policy must be a constant.
  same = jax.jit(jax.grad(lambda x: LOSSES[name](x, x, advantages, mask).loss))(logprobs)
  np.testing.assert_allclose(same, gradient, rtol=1e-6, atol=1e-8)
  assert set(out.metrics) == METRICS[name]
  for key, one in (
    ('kept', 1),
    ('ratio_mean', 1),
    ('weight_mean', 1),
    ('ess', 1),
    ('clipped_low', 0),
  ):
    if key in out.metrics:
      np.testing.assert_allclose(out.metrics[key], one, rtol=1e-6)


@over_losses
@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 3e38])
def test_masked_positions_do_nothing(name, garbage):
  *arrays, mask = data(1)
  clean = [np.where(mask, x, 0) for x in arrays]
  dirty = [np.where(mask, x, np.float32(garbage)) for x in arrays]
  want = numbers(*compiled(name)(*clean, mask, mask.sum()))
  for got, expected in zip(numbers(*compiled(name)(*dirty, mask, mask.sum())), want, strict=True):
    np.testing.assert_array_equal(got, expected)
  out = LOSSES[name](*dirty, mask)  # eager
  np.testing.assert_allclose(out.loss, want[0], rtol=1e-5)
  assert all(np.isfinite(x) for x in out.metrics.values())


@over_losses
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**16), st.lists(st.integers(0, 2), min_size=B, max_size=B))
def test_any_split_adds_up(name, seed, part_of_row):
  logprobs, behavior, advantages, mask = data(seed)
  n = mask.sum()
  whole = compiled(name)(logprobs, behavior, advantages, mask, n)
  parts = []
  for part in range(3):
    rows = (np.asarray(part_of_row) == part)[:, None]
    parts.append(compiled(name)(logprobs, behavior, advantages, mask * rows, n))
  out, gradient = jax.tree.map(lambda *x: sum(x), *parts)
  np.testing.assert_allclose(gradient, whole[1], rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(out.loss, whole[0].loss, rtol=1e-5, atol=1e-6)
  for key in set(out.metrics) - {'ratio_mean', 'ess'}:
    np.testing.assert_allclose(out.metrics[key], whole[0].metrics[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', sorted(set(LOSSES) - {'gspo'}))
def test_tokens_of_a_row_split_too(name):
  logprobs, behavior, advantages, mask = data(2)
  half = np.zeros_like(mask)
  half[:, ::2] = 1
  whole = compiled(name)(logprobs, behavior, advantages, mask, mask.sum())
  a = compiled(name)(logprobs, behavior, advantages, mask * half, mask.sum())
  b = compiled(name)(logprobs, behavior, advantages, mask * (1 - half), mask.sum())
  np.testing.assert_allclose(a[1] + b[1], whole[1], rtol=1e-6, atol=1e-8)
  np.testing.assert_allclose(a[0].loss + b[0].loss, whole[0].loss, rtol=1e-5)


@over_losses
def test_empty_mask_is_zero(name):
  logprobs, behavior, advantages, mask = data(3)
  for fill in (logprobs, np.full_like(logprobs, np.nan)):
    for x in numbers(*compiled(name)(fill, behavior, advantages, 0 * mask, np.float32(0))):
      np.testing.assert_array_equal(x, np.zeros_like(x))
    out = LOSSES[name](fill, behavior, advantages, 0 * mask)
    assert all(x == 0 for x in (out.loss, *out.metrics.values()))


@over_losses
@pytest.mark.parametrize('wrong', range(4))
@pytest.mark.parametrize('shape', [(B, 1), (B,), (1, T)])
def test_wrong_shape_raises(name, wrong, shape):
  arrays = list(data(4))
  arrays[wrong] = np.ones(shape, np.float32)
  with pytest.raises((AssertionError, ValueError)):
    LOSSES[name](*arrays)


@over_losses
def test_denominator_must_be_a_scalar(name):
  with pytest.raises(AssertionError):
    LOSSES[name](*data(4), denominator=jnp.ones((B, 1)))


@over_losses
def test_eager_equals_jit(name):
  arrays = data(5)
  out, _ = compiled(name)(*arrays, arrays[-1].sum())
  eager = LOSSES[name](*arrays)
  np.testing.assert_allclose(eager.loss, out.loss, rtol=1e-5)
  for key, value in eager.metrics.items():
    assert value.dtype == jnp.float32 and value.shape == ()
    np.testing.assert_allclose(value, out.metrics[key], rtol=1e-5, atol=1e-7)


@over_losses
def test_other_types_are_computed_in_float32(name):
  logprobs, behavior, _, mask = data(7)
  short = [jnp.asarray(x, jnp.bfloat16) for x in (logprobs, behavior)]
  whole = np.arange(B * T).reshape(B, T) - 7
  want = numbers(*compiled(name)(*map(np.float32, (*short, whole, mask)), mask.sum()))
  scaled = numbers(*compiled(name)(*map(np.float32, (*short, whole, 7 * mask)), mask.sum()))
  *got, gradient = numbers(*compiled(name)(*short, whole, mask.astype(bool), mask.sum()))
  for x, y, z in zip(want, (*got, want[-1]), scaled, strict=True):
    np.testing.assert_array_equal(x, z)  # a mask is non-zero or not, and no weight
    np.testing.assert_allclose(x, y, rtol=1e-6)
  np.testing.assert_allclose(np.float32(gradient), want[-1], rtol=0.01)  # itself in bfloat16


@over_losses
def test_only_logprobs_have_a_gradient(name):
  *arrays, mask = data(8)
  rest = jax.jit(jax.grad(lambda *x: LOSSES[name](*x, mask).loss, argnums=(1, 2)))(*arrays)
  for gradient in rest:
    np.testing.assert_array_equal(gradient, np.zeros((B, T)))


@over_losses
@pytest.mark.parametrize('token', ['overflow', 'underflow', 'impossible'])
def test_a_rejected_token_leaves_no_trace(name, token):
  # Token 0 is ordinary. Token 1 has log r = 99 (e^99 overflows float32), -99 or -inf, with the sign of A that PPO clips.
  first = {'overflow': -1.0, 'underflow': -100.0, 'impossible': -np.inf}[token]
  second = {'overflow': -100.0, 'underflow': -1.0, 'impossible': -1.0}[token]
  if token == 'impossible' and name in ('unweighted', 'reinforce', 'cispo', 'clip', 'gspo'):
    pytest.skip('keeps log pi of every token, which is -inf here')
  logprobs, behavior = np.full((B, T), -1.0), np.full((B, T), -1.0)
  logprobs[0, 1], behavior[0, 1] = first, second
  advantages = np.full((B, T), 2.0)
  advantages[0, 1] = 3.0 if token == 'overflow' else -3.0
  mask = np.zeros((B, T))
  mask[0, :2] = 1
  for x in numbers(*compiled(name)(logprobs, behavior, advantages, mask, mask.sum())):
    assert np.isfinite(x).all()
  _, gradient = compiled(name)(logprobs, behavior, advantages, mask, mask.sum())
  if name in ('sao', 'dis', 'icepop', 'ppo', 'decoupled_ppo'):
    # -2 / 2 at the ordinary token, exactly nothing at the rejected one.
    np.testing.assert_array_equal(gradient[0, :2], [-1.0, 0.0])


@over_losses
def test_nan_at_an_action_token_is_seen(name):
  logprobs, behavior, advantages, mask = data(9)
  logprobs[0, 1] = np.nan
  assert np.isnan(LOSSES[name](logprobs, behavior, advantages, mask).loss)


# Oracles: (r, A, log pi) of one token -> (value, d value / d log pi), in Python floats.


def within(r, low, high):
  return min(max(r, low), high)


def weighted(weight):
  return lambda r, a, lp: (weight(r) * a * lp, weight(r) * a)


def surrogate(r, a, lp):
  clipped = within(r, 0.7, 2.0)
  return min(r * a, clipped * a), (r * a if r * a <= clipped * a else 0.0)


ORACLES = {
  'sao': weighted(lambda r: r if 0.7 < r < 2.0 else 0.0),
  'dis': weighted(lambda r: r if 0.7 < r < 2.0 else 0.0),
  'icepop': weighted(lambda r: r if 0.7 <= r <= 2.0 else 0.0),
  'truncate': weighted(lambda r: min(r, 1.5)),
  'clip': weighted(lambda r: within(r, 0.5, 2.0)),
  'cispo': weighted(lambda r: within(r, 0.7, 2.0)),
  'unweighted': weighted(lambda r: 1.0),
  'reinforce': weighted(lambda r: 1.0),
  'ppo': surrogate,
  'decoupled_ppo': surrogate,
}


@pytest.mark.parametrize('name', ORACLES)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**16))
def test_against_a_loop(name, seed):
  logprobs, behavior, advantages, mask = data(seed)
  loss, gradient, n = 0.0, np.zeros((B, T)), mask.sum()
  for b in range(B):
    for t in range(T):
      if mask[b, t]:
        lp, a = float(logprobs[b, t]), float(advantages[b, t])
        value, slope = ORACLES[name](math.exp(lp - float(behavior[b, t])), a, lp)
        loss -= value / n
        gradient[b, t] = -slope / n
  out, got = compiled(name)(logprobs, behavior, advantages, mask, mask.sum())
  np.testing.assert_allclose(out.loss, loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-7)


# Each loss by hand. Ratios 1, 1.5, 8, 0.25 and an observation whose inputs are garbage.

RATIOS = np.array([[1.0, 1.5, 8.0, 0.25, np.nan]])
LOGPROBS = np.log([[0.5, 0.6, 0.8, 0.1, np.nan]])
BEHAVIOR = LOGPROBS - np.log(RATIOS)
ADVANTAGES = np.array([[2.0, -1.0, 1.0, -4.0, np.inf]])
MASK = np.array([[1, 1, 1, 1, 0]])


def value_and_gradient(loss, **kw):
  def run(x):
    out = loss(x, BEHAVIOR, ADVANTAGES, MASK, **kw)
    return out.loss, out.metrics

  (value, metrics), gradient = jax.value_and_grad(run, has_aux=True)(
    jnp.asarray(LOGPROBS, jnp.float32)
  )
  return value, gradient, metrics


def test_sao_by_hand():
  value, gradient, metrics = value_and_gradient(losses.sao_policy_loss, eps_low=0.3, eps_high=5.0)
  # Kept: 1 * 2 * log .5 and 1.5 * -1 * log .6, over 4 action tokens; d/dlogp = -r A / 4 there and 0 elsewhere.
  np.testing.assert_allclose(value, -(2 * np.log(0.5) - 1.5 * np.log(0.6)) / 4, rtol=1e-6)
  np.testing.assert_allclose(gradient, [[-0.5, 0.375, 0, 0, 0]], rtol=1e-6)
  want = {'kept': 0.5, 'dropped_low': 0.25, 'dropped_high': 0.25}
  # Of the kept: mean ratio 1.25. Weights 1, 1.5, 0, 0: (2.5)^2 / (4 * 3.25).
  want |= {'ratio_mean': 1.25, 'ess': 6.25 / 13}
  for key, number in want.items():
    np.testing.assert_allclose(metrics[key], number, rtol=1e-6, err_msg=key)


def test_sao_weight_is_detached():
  # At probability 0.3 an attached ratio would have gradient r A (1 + log 0.3) = -0.2 r A: the wrong sign.
  logprobs = jnp.full((1, 1), math.log(0.3))
  ones = jnp.ones((1, 1))
  gradient = jax.grad(
    lambda x: losses.sao_policy_loss(x, logprobs, ones, ones, eps_low=0.3, eps_high=5.0).loss
  )(logprobs)
  np.testing.assert_allclose(gradient, [[-1.0]], rtol=1e-6)


def test_sao_interval_is_open_and_icepop_closed():
  # r = 0.5 and r = 2 exactly on the ends.
  behavior = jnp.log(jnp.array([[2.0, 0.5]]))
  zeros, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
  numbers = {'eps_low': 0.5, 'eps_high': 1.0}

  def grad(loss):
    return jax.grad(lambda x: loss(x, behavior, ones, ones, **numbers).loss)(zeros)

  np.testing.assert_array_equal(grad(losses.sao_policy_loss), [[0, 0]])
  np.testing.assert_allclose(grad(losses.icepop_policy_loss), [[-0.25, -1.0]], rtol=1e-6)


def test_sao_drops_whatever_the_sign_of_the_advantage():
  behavior = jnp.array([[-10.0, -10.0, 2.0, 2.0]])
  advantages = jnp.array([[1.0, -1.0, 1.0, -1.0]])
  ones = jnp.ones((1, 4))
  out, gradient = jax.value_and_grad(
    lambda x: losses.sao_policy_loss(x, behavior, advantages, ones, eps_low=0.3, eps_high=5.0).loss
  )(-ones)
  np.testing.assert_array_equal(gradient, jnp.zeros((1, 4)))
  assert out == 0


def test_sao_sides_can_be_disabled():
  out = losses.sao_policy_loss(LOGPROBS, BEHAVIOR, ADVANTAGES, MASK, eps_low=1.0, eps_high=math.inf)
  assert out.metrics['kept'] == 1


def test_sao_equals_calibrated_by_dis():
  arrays = data(10)
  a, b = (compiled(name)(*arrays, arrays[-1].sum()) for name in ('sao', 'dis'))
  np.testing.assert_array_equal(a[0].loss, b[0].loss)
  np.testing.assert_array_equal(a[1], b[1])
  np.testing.assert_array_equal(a[0].metrics['ess'], b[0].metrics['ess'])


def test_calibrations_by_hand():
  log_ratio = jnp.log(jnp.array([0.0, 0.25, 1.0, 1.5, 8.0]))
  for calibrate, want in (
    (losses.dis(0.3, 5.0), [0, 0, 1, 1.5, 0]),
    (losses.truncate(2.0), [0, 0.25, 1, 1.5, 2]),
    (losses.clip(0.5, 4.0), [0.5, 0.5, 1, 1.5, 4]),
    (losses.unweighted(), [1, 1, 1, 1, 1]),
  ):
    np.testing.assert_allclose(calibrate(log_ratio), want, rtol=1e-6)
    slope = jax.grad(lambda x, f=calibrate: f(x).sum())(log_ratio)
    np.testing.assert_array_equal(slope, np.zeros(5))


def test_a_calibration_of_ones_own_is_detached():
  value, gradient, _ = value_and_gradient(losses.calibrated_policy_loss, calibrate=jnp.exp)
  np.testing.assert_allclose(gradient, [[-0.5, 0.375, -2, 0.25, 0]], rtol=1e-5)  # -r A / 4
  assert np.isfinite(value)


def test_ppo_by_hand():
  value, gradient, metrics = value_and_gradient(losses.ppo_policy_loss, eps_low=0.3, eps_high=2.0)
  # min(rA, clip(r)A): 2; -1.5; 8 clipped to 3; .25 * -4 = -1 against .7 * -4 = -2.8, the smaller, which is flat.
  np.testing.assert_allclose(value, -(2 - 1.5 + 3 - 2.8) / 4, rtol=1e-6)
  np.testing.assert_allclose(gradient, [[-0.5, 0.375, 0, 0, 0]], rtol=1e-6)
  np.testing.assert_allclose([metrics['clipped_low'], metrics['clipped_high']], [0.25, 0.25])
  np.testing.assert_allclose(metrics['ratio_mean'], 1.25, rtol=1e-6)  # of 1 and 1.5


def test_ppo_is_one_sided():
  # The pessimistic side is never clipped: A < 0 with r = 8 keeps its gradient, -r A.
  behavior, ones = jnp.full((1, 1), -math.log(8)), jnp.ones((1, 1))
  gradient = jax.grad(
    lambda x: losses.ppo_policy_loss(x, behavior, -ones, ones, eps_low=0.3, eps_high=2.0).loss
  )(jnp.zeros((1, 1)))
  np.testing.assert_allclose(gradient, [[8.0]], rtol=1e-6)


def test_decoupled_ppo_by_hand():
  # u = pi / prox is 1 and 1.5; w = prox / mu is 0.5 and 8, capped at 5.
  proximal = jnp.log(jnp.array([[0.5, 0.4]]))
  logprobs = jnp.log(jnp.array([[0.5, 0.6]]))
  behavior = proximal - jnp.log(jnp.array([[0.5, 8.0]]))
  advantages, ones = jnp.array([[2.0, -1.0]]), jnp.ones((1, 2))

  def run(x):
    return losses.decoupled_ppo_policy_loss(
      x, proximal, behavior, advantages, ones, eps_low=0.3, eps_high=2.0, cap=5.0
    )

  out = run(logprobs)
  np.testing.assert_allclose(out.loss, -(0.5 * 2 - 5 * 1.5) / 2, rtol=1e-6)
  gradient = jax.grad(lambda x: run(x).loss)(logprobs)
  np.testing.assert_allclose(gradient, [[-0.5, 3.75]], rtol=1e-6)  # -w u A / 2
  np.testing.assert_allclose(out.metrics['capped'], 0.5)
  np.testing.assert_allclose(out.metrics['weight_mean'], 2.75, rtol=1e-6)


def test_icepop_applies_the_ratio_once():
  _, gradient, _ = value_and_gradient(losses.icepop_policy_loss, eps_low=0.3, eps_high=5.0)
  np.testing.assert_allclose(
    gradient, [[-0.5, 0.375, 0, 0, 0]], rtol=1e-6
  )  # r A / 4, not r^2 A / 4


def test_cispo_by_hand():
  _, gradient, metrics = value_and_gradient(losses.cispo_policy_loss, eps_low=0.3, eps_high=2.0)
  np.testing.assert_allclose(gradient, [[-0.5, 0.375, -0.75, 0.7, 0]], rtol=1e-6)  # -clip(r) A / 4
  np.testing.assert_allclose([metrics['clipped_low'], metrics['clipped_high']], [0.25, 0.25])


def test_gspo_by_hand():
  # Two sequences in one row. Log-ratios log 2, log 0.5 | observation | log 1.5, log 6: s = 1 and 3.
  ratios = np.array([[2.0, 0.5, 1.0, 1.5, 6.0, 1.0]])
  segment_ids = jnp.array([[1, 1, 1, 2, 2, 0]])
  mask = np.array([[1, 1, 0, 1, 1, 0]])
  advantages = np.array([[1.0, 3.0, np.nan, -1.0, 2.0, np.nan]])
  logprobs = jnp.full((1, 6), -1.0)

  def run(x, ids):
    return losses.gspo_policy_loss(
      x, -1.0 - np.log(ratios), advantages, mask, eps_low=0.3, eps_high=1.0, segment_ids=ids
    )

  out = run(logprobs, segment_ids)
  # min(sA, clip(s, .7, 2)A): 1, 3 | -3, 2 * 2.
  np.testing.assert_allclose(out.loss, -(1 + 3 - 3 + 4) / 4, rtol=1e-6)
  gradient = jax.grad(lambda x: run(x, segment_ids).loss)(logprobs)
  np.testing.assert_allclose(gradient, [[-0.25, -0.75, 0, 0.75, 0, 0]], rtol=1e-6)
  np.testing.assert_allclose(out.metrics['clipped_high'], 0.25)
  # As one sequence s = (2 * .5 * 1.5 * 6)^(1/4) = 9^(1/4).
  np.testing.assert_allclose(run(logprobs, None).loss, -math.sqrt(3) * 3 / 4 - 2 * math.sqrt(3) / 4)


def test_kl_by_hand():
  # d = log pi - log ref = log 2 and -log 2, then a tool token that must not count.
  logprobs = jnp.array([[0.0, 0.0, jnp.nan]])
  reference = jnp.array([[-math.log(2), math.log(2), 5.0]])
  mask = jnp.array([[1, 1, 0]])
  log2 = math.log(2)
  for kind, want, slope in (
    ('k1', 0.0, [0.5, 0.5, 0]),
    ('k2', log2**2 / 2, [log2 / 2, -log2 / 2, 0]),
    ('k3', (0.5 - 1 + log2 + 2 - 1 - log2) / 2, [0.25, -0.5, 0]),  # 1 - e^-d: 1/2 and -1, over 2
  ):
    run = functools.partial(losses.kl_penalty, mask=mask, kind=kind)
    out = run(logprobs, reference)
    np.testing.assert_allclose([out.loss, out.metrics['kl']], [want, want], atol=1e-7)
    gradient = jax.grad(lambda x, f=run: f(x, reference).loss)(logprobs)
    np.testing.assert_allclose(gradient, [slope], rtol=1e-6)
    assert losses.kl_penalty(logprobs, reference, 0 * mask, kind=kind).loss == 0
    half = losses.kl_penalty(logprobs, reference, mask, kind=kind, denominator=4.0)
    np.testing.assert_allclose(half.loss, want / 2, atol=1e-7)


# Hyper-parameters


@pytest.mark.parametrize(
  ('loss', 'numbers', 'change'),
  [
    (losses.sao_policy_loss, INTERVAL, {'eps_low': 0.9}),
    (losses.sao_policy_loss, INTERVAL, {'eps_high': 9.0}),
    (losses.ppo_policy_loss, INTERVAL, {'eps_low': 0.9}),
    (losses.ppo_policy_loss, INTERVAL, {'eps_high': 9.0}),
    (losses.icepop_policy_loss, INTERVAL, {'eps_low': 0.9}),
    (losses.icepop_policy_loss, INTERVAL, {'eps_high': 9.0}),
    (losses.cispo_policy_loss, INTERVAL, {'eps_low': 0.9}),
    (losses.cispo_policy_loss, INTERVAL, {'eps_high': 9.0}),
    (losses.gspo_policy_loss, {'eps_low': 0.01, 'eps_high': 0.01}, {'eps_low': 0.9}),
    (losses.gspo_policy_loss, {'eps_low': 0.01, 'eps_high': 0.01}, {'eps_high': 9.0}),
    (losses.gspo_policy_loss, INTERVAL, {'segment_ids': np.tile([1, 1, 1, 2, 2, 2], (B, 1))}),
    (decoupled, INTERVAL | {'cap': 1.5}, {'eps_low': 0.9}),
    (decoupled, INTERVAL | {'cap': 1.5}, {'eps_high': 9.0}),
    (losses.kl_penalty, {'kind': 'k1'}, {'kind': 'k2'}),
    (losses.kl_penalty, {'kind': 'k2'}, {'kind': 'k3'}),
    (losses.sao_policy_loss, INTERVAL, {'denominator': 100.0}),
  ],
)
def test_every_number_matters(loss, numbers, change):
  arrays = data(11)
  if loss is losses.kl_penalty:
    arrays = arrays[:2] + arrays[3:]
  assert loss(*arrays, **numbers).loss != loss(*arrays, **(numbers | change)).loss


def test_the_bounds_of_calibrations_matter():
  arrays = data(11)

  def run(calibrate):
    return losses.calibrated_policy_loss(*arrays, calibrate=calibrate).loss

  assert run(losses.truncate(1.5)) != run(losses.truncate(2.5))
  assert run(losses.clip(0.5, 2.0)) != run(losses.clip(0.1, 2.0))
  assert run(losses.clip(0.5, 2.0)) != run(losses.clip(0.5, 3.0))
  capped = [decoupled(*arrays, **INTERVAL, cap=c, proximal=arrays[0]).loss for c in (1.5, 2.5)]
  assert capped[0] != capped[1]


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: losses.dis(0.0, 1.0), 'eps_low is 0.0'),
    (lambda: losses.dis(1.5, 1.0), 'eps_low is 1.5'),
    (lambda: losses.dis(math.nan, 1.0), 'eps_low is nan'),
    (lambda: losses.dis(0.3, 0.0), 'eps_high is 0.0'),
    (lambda: losses.dis(0.3, -0.5), 'eps_high is -0.5'),
    (lambda: losses.truncate(0.5), 'cap is 0.5'),
    (lambda: losses.clip(1.2, 2.0), 'low is 1.2'),
    (lambda: losses.clip(-0.1, 2.0), 'low is -0.1'),
    (lambda: losses.clip(0.5, 0.9), 'high is 0.9'),
    (lambda: losses.kl_penalty(*data(0)[:2], data(0)[3], kind='k4'), "kind is 'k4'"),
    (lambda: decoupled(*data(0), **INTERVAL, cap=0.0), 'cap is 0.0'),
  ],
)
def test_bad_numbers_are_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


@pytest.mark.parametrize('name', ['sao', 'ppo', 'icepop', 'cispo', 'gspo', 'decoupled_ppo'])
def test_every_interval_is_checked(name):
  for bad in ({'eps_low': -0.1}, {'eps_low': 2.0}, {'eps_high': 0.0}, {'eps_high': math.nan}):
    with pytest.raises(ValueError, match=next(iter(bad))):
      LOSSES[name](*data(0), **bad)
