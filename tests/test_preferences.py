"""Preference losses by hand and at their extremes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import preferences


def test_sequence_logprobs():
  logprobs = jnp.array([[-1.0, -2.0, jnp.nan], [-5.0, jnp.inf, -1.0], [jnp.nan] * 3])
  mask = jnp.array([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
  total, mean = preferences.sequence_logprobs(logprobs, mask)
  np.testing.assert_array_equal(total, [-3, -6, 0])
  np.testing.assert_array_equal(mean, [-1.5, -3, 0])
  gradient = jax.grad(lambda x: preferences.sequence_logprobs(x, mask)[0].sum())(logprobs)
  np.testing.assert_array_equal(gradient, mask)


def test_dpo_by_hand():
  # beta = .5. Pair 0: .5 * ((-1 + 3) - (-2 + 2)) = 1. Pair 1: all as the reference: 0, hence log 2.
  chosen, rejected = jnp.array([-1.0, -4.0]), jnp.array([-2.0, -5.0])
  references = jnp.array([-3.0, -4.0]), jnp.array([-2.0, -5.0])

  def run(x, y, **kw):
    return preferences.dpo_loss(x, y, *references, beta=0.5, **kw)

  out = run(chosen, rejected)
  np.testing.assert_allclose(out.loss, (math.log1p(math.exp(-1)) + math.log(2)) / 2, rtol=1e-6)
  want = {'chosen_reward': 0.5, 'rejected_reward': 0.0, 'margin': 0.5, 'accuracy': 0.5}
  assert out.metrics.keys() == want.keys()
  for key, number in want.items():
    np.testing.assert_allclose(out.metrics[key], number, err_msg=key)
  # d/dchosen = -beta sigmoid(-margin) / 2, and the opposite for rejected.
  slopes = -0.5 / (1 + np.exp([1.0, 0.0])) / 2
  a, b = jax.grad(lambda x, y: run(x, y).loss, argnums=(0, 1))(chosen, rejected)
  np.testing.assert_allclose(a, slopes, rtol=1e-6)
  np.testing.assert_allclose(b, -slopes, rtol=1e-6)
  np.testing.assert_allclose(run(chosen, rejected, denominator=4).loss, out.loss / 2, rtol=1e-6)
  other = preferences.dpo_loss(chosen, rejected, *references, beta=0.1)
  assert other.loss != out.loss


def test_dpo_extremes_are_finite():
  far = jnp.array([-1e4, 0.0])
  loss = lambda x: preferences.dpo_loss(x, -x, 0 * x, 0 * x, beta=10.0).loss
  value, gradient = jax.value_and_grad(loss)(far)
  assert np.isfinite(value) and np.isfinite(gradient).all()


def test_dpo_reference_is_constant():
  x = jnp.array([-1.0, -2.0])
  gradient = jax.grad(lambda r: preferences.dpo_loss(x, 2 * x, r, r - 1, beta=1.0).loss)(x)
  np.testing.assert_array_equal(gradient, [0, 0])


def test_orpo_by_hand():
  # p = .8 and .5: odds 4 and 1; log-odds ratio log 4; sigmoid(log 4) = 4/5.
  chosen, rejected = jnp.log(jnp.array([0.8])), jnp.log(jnp.array([0.5]))

  def run(x, y, odds_weight=2.0):
    return preferences.orpo_loss(x, y, odds_weight=odds_weight)

  out = run(chosen, rejected)
  np.testing.assert_allclose(out.loss, -math.log(0.8) - 2 * math.log(0.8), rtol=1e-5)
  np.testing.assert_allclose(out.metrics['nll'], -math.log(0.8), rtol=1e-6)
  np.testing.assert_allclose(out.metrics['log_odds_ratio'], math.log(4), rtol=1e-5)
  assert out.metrics['accuracy'] == 1
  # d logit / d log p = 1 / (1 - p): -1 - 2 * (1 - .8) / .2 = -3 and 2 * .2 / .5 = .8.
  a, b = jax.grad(lambda x, y: run(x, y).loss, argnums=(0, 1))(chosen, rejected)
  np.testing.assert_allclose([a[0], b[0]], [-3.0, 0.8], rtol=1e-5)
  assert run(chosen, rejected, 1.0).loss != out.loss


@pytest.mark.parametrize('chosen', [0.0, -1e-9, -1e-4, -0.692, -0.694, -50.0, -1e4])
def test_orpo_against_float64_and_finite(chosen):
  rejected = -2.0

  def loss(x):
    return preferences.orpo_loss(x[None], jnp.array([rejected]), odds_weight=1.0).loss

  value, gradient = jax.value_and_grad(loss)(jnp.float32(chosen))
  x = min(float(np.float32(chosen)), -1e-6)
  odds = (x - math.log(-math.expm1(x))) - (rejected - math.log(-math.expm1(rejected)))
  log_sigmoid = -math.log1p(math.exp(-odds)) if odds > -500 else odds
  np.testing.assert_allclose(value, -float(np.float32(chosen)) - log_sigmoid, rtol=1e-4, atol=1e-6)
  assert np.isfinite(gradient)


def test_no_pairs_give_zero_and_shapes_are_checked():
  none, two = jnp.zeros(0), jnp.zeros(2)
  assert preferences.dpo_loss(none, none, none, none, beta=1.0).loss == 0
  assert preferences.orpo_loss(none, none, odds_weight=1.0).loss == 0
  for bad in (jnp.zeros((2, 1)), jnp.zeros(1), jnp.zeros(())):
    with pytest.raises(AssertionError):
      preferences.orpo_loss(two, bad, odds_weight=1.0)
    for i in range(4):
      args = [two] * 4
      args[i] = bad
      with pytest.raises(AssertionError):
        preferences.dpo_loss(*args, beta=1.0)
  with pytest.raises(AssertionError):
    preferences.dpo_loss(two, two, none, none, beta=1.0)
  with pytest.raises(ValueError, match='beta is 0'):
    preferences.dpo_loss(two, two, two, two, beta=0)
  with pytest.raises(ValueError, match='odds_weight is -1'):
    preferences.orpo_loss(two, two, odds_weight=-1)


def test_parts_add_up_jitted_and_bfloat16():
  x, y = jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -0.25, -3.0])
  run = jax.jit(lambda x, y: preferences.orpo_loss(x, y, odds_weight=0.5, denominator=3))
  parts = jax.tree.map(jnp.add, run(x[:1], y[:1]), run(x[1:], y[1:]))
  eager = preferences.orpo_loss(x, y, odds_weight=0.5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), parts, eager)
  short = preferences.orpo_loss(x.astype(jnp.bfloat16), y, odds_weight=0.5)
  np.testing.assert_allclose(short.loss, eager.loss, rtol=1e-6)  # these are exact in bfloat16
