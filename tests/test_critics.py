"""Value losses and categorical targets: by hand, against float64 loops, and what must not matter."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax import critics

B, T, K = 3, 5, 7
SUPPORT = {'low': -1.0, 'high': 2.0, 'num_bins': K}


def data(seed=0):
  rng = np.random.default_rng(seed)
  values, old, targets = (rng.standard_normal((B, T)).astype(np.float32) for _ in range(3))
  mask = (rng.random((B, T)) < 0.6).astype(np.float32)
  mask[0, 0] = 1
  return values, old, targets, mask


def categorical(values, old, targets, mask, **kw):
  """The categorical loss under the signature of the others: logits that depend on values, garbage included."""
  logits = jnp.asarray(values)[..., None] * jnp.arange(K)
  probs = critics.two_hot(jnp.tanh(jnp.asarray(targets)), **SUPPORT)
  return critics.categorical_value_loss(logits, probs, mask, **kw)


LOSSES = {
  'squared': lambda v, o, r, m, **kw: critics.squared_value_loss(v, r, m, **kw),
  'weighted': lambda v, o, r, m, **kw: critics.squared_value_loss(v, r, m, weights=o, **kw),
  'clipped': lambda v, o, r, m, **kw: critics.clipped_value_loss(v, o, r, m, clip=0.2, **kw),
  'categorical': categorical,
}
STATIC = ('low', 'high', 'num_bins', 'sigma_ratio')
gauss = jax.jit(critics.hl_gauss, static_argnames=STATIC)
hot = jax.jit(critics.two_hot, static_argnames=STATIC[:3])
METRICS = {'value_mean', 'target_mean', 'error_abs'}
over_losses = pytest.mark.parametrize('name', LOSSES)


def run(name, *arrays, denominator=None):
  def loss(values):
    out = LOSSES[name](values, *arrays[1:], denominator=denominator)
    return out.loss, out.metrics

  (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
    jnp.asarray(arrays[0], jnp.float32)
  )
  return [np.asarray(x) for x in (value, *metrics.values(), gradient)]


@over_losses
def test_masked_positions_do_nothing(name):
  *arrays, mask = data()
  want = run(name, *arrays, mask)
  for garbage in (np.nan, np.inf, -np.inf):
    got = run(name, *(np.where(mask, x, garbage) for x in arrays), mask)
    for x, y in zip(got, want, strict=True):
      np.testing.assert_array_equal(x, y)


@over_losses
def test_parts_add_up_and_empty_is_zero(name):
  *arrays, mask = data(1)
  whole = run(name, *arrays, mask, denominator=mask.sum())
  parts = []
  for start in range(2):
    half = np.zeros_like(mask)
    half[:, start::2] = 1
    parts.append(run(name, *arrays, mask * half, denominator=mask.sum()))
  for x, a, b in zip(whole, *parts, strict=True):
    np.testing.assert_allclose(a + b, x, rtol=1e-5, atol=1e-6)
  for x, y in zip(run(name, *arrays, mask), whole, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6)
  for x in run(name, *arrays, 0 * mask):
    np.testing.assert_array_equal(x, np.zeros_like(x))


@pytest.mark.parametrize('shape', [(B, 1), (B,), (1, T)])
def test_shapes_are_checked(shape):
  bad, good = np.ones(shape, np.float32), np.ones((B, T), np.float32)
  logits = np.ones((B, T, K), np.float32)
  for function in (
    lambda: critics.squared_value_loss(bad, good, good),
    lambda: critics.squared_value_loss(good, bad, good),
    lambda: critics.squared_value_loss(good, good, bad),
    lambda: critics.squared_value_loss(good, good, good, weights=bad),
    lambda: critics.clipped_value_loss(good, bad, good, good, clip=1.0),
    lambda: critics.categorical_value_loss(logits, logits, bad),
    lambda: critics.categorical_value_loss(logits, logits[..., :1], good),
    lambda: critics.categorical_value_loss(logits[:, :, 0], logits[:, :, 0], good),
  ):
    with pytest.raises(AssertionError):
      function()


def test_squared_by_hand():
  values, targets = jnp.array([[1.0, 2.0, jnp.nan]]), jnp.array([[0.0, 5.0, jnp.nan]])
  mask, weights = jnp.array([[1, 1, 0]]), jnp.array([[4.0, 1.0, jnp.nan]])
  out = critics.squared_value_loss(values, targets, mask)
  np.testing.assert_allclose(out.loss, (1 + 9) / 2)
  assert set(out.metrics) == METRICS
  np.testing.assert_allclose(
    [out.metrics[k] for k in ('value_mean', 'target_mean', 'error_abs')], [1.5, 2.5, 2.0]
  )
  gradient = jax.grad(lambda v: critics.squared_value_loss(v, targets, mask).loss)(values)
  np.testing.assert_allclose(gradient, [[1, -3, 0]])  # 2 (V - R) / 2
  weighted = critics.squared_value_loss(values, targets, mask, weights=weights)
  np.testing.assert_allclose(weighted.loss, (4 + 9) / 2)
  whole = critics.squared_value_loss(values.astype(jnp.bfloat16), jnp.array([[0, 5, 0]]), mask)
  np.testing.assert_allclose(whole.loss, 5.0)


def test_targets_are_constant():
  values, _, targets, mask = data()
  gradient = jax.grad(lambda r: critics.squared_value_loss(values, r, mask).loss)(
    jnp.asarray(targets)
  )
  np.testing.assert_array_equal(gradient, np.zeros((B, T)))


def test_clipped_has_a_dead_zone():
  # Old 0, target 1, clip .2. At V = .1: (1-.1)^2, slope -1.8. At V = .5 the clipped error (1-.2)^2 rules: slope 0.
  # At V = -.5, moved away: plain error 1.5^2 > 1.2^2, slope -3.
  values = jnp.array([[0.1, 0.5, -0.5]])
  zeros, ones = jnp.zeros((1, 3)), jnp.ones((1, 3))

  def loss(v):
    return critics.clipped_value_loss(v, zeros, ones, ones, clip=0.2)

  np.testing.assert_allclose(loss(values).loss, (0.81 + 0.64 + 2.25) / 3, rtol=1e-6)
  gradient = jax.grad(lambda v: loss(v).loss)(values)
  np.testing.assert_allclose(gradient, [[-0.6, 0, -1]], rtol=1e-5)
  np.testing.assert_allclose(loss(values).metrics['clipped'], 1 / 3, rtol=1e-6)
  wide = critics.clipped_value_loss(values, zeros, ones, ones, clip=10.0)
  np.testing.assert_allclose(wide.loss, critics.squared_value_loss(values, ones, ones).loss)
  with pytest.raises(ValueError, match='clip is 0'):
    critics.clipped_value_loss(values, zeros, ones, ones, clip=0)


def gauss_loop(target, low, high, num_bins, sigma_ratio):
  width = (high - low) / (num_bins - 1)
  cdf = lambda x: 0.5 * (1 + math.erf((x - target) / (sigma_ratio * width * math.sqrt(2))))
  mass = [cdf(low + (j + 0.5) * width) - cdf(low + (j - 0.5) * width) for j in range(num_bins)]
  return np.array(mass) / sum(mass)


@settings(max_examples=20, deadline=None)
@given(st.floats(-1, 2), st.sampled_from([0.1, 0.75, 2.0]))
def test_targets_against_a_loop(target, sigma_ratio):
  got = gauss(jnp.array([target]), **SUPPORT, sigma_ratio=sigma_ratio)
  want = gauss_loop(float(np.float32(target)), -1.0, 2.0, K, sigma_ratio)
  np.testing.assert_allclose(got[0], want, atol=2e-6)
  two = hot(jnp.array([[target]]), **SUPPORT)
  assert two.shape == (1, 1, K) and (two > 0).sum() <= 2
  np.testing.assert_allclose(two.sum(), 1, rtol=1e-6)
  np.testing.assert_allclose(two[0, 0] @ critics.atoms(-1, 2, K), target, atol=1e-6)


def test_two_hot_by_hand():
  # Atoms -1, -.5, 0, .5, 1, 1.5, 2: 0.4 is 4/5 of the way from 0 to .5; the last is rounding over the end.
  got = critics.two_hot(jnp.array([0.4, -1.0, 2.0, 2.0000002]), **SUPPORT)
  np.testing.assert_allclose(got[0], [0, 0, 0.2, 0.8, 0, 0, 0], atol=1e-6)
  np.testing.assert_array_equal(got[1], np.eye(K)[0])
  np.testing.assert_array_equal(got[2:], np.eye(K)[[-1, -1]])


def test_targets_outside_cannot_train():
  for target in (-1.3, 2.3, np.nan, np.inf):
    assert np.isnan(critics.two_hot(jnp.array(target), **SUPPORT)).all()
    assert np.isnan(critics.hl_gauss(jnp.array(target), **SUPPORT, sigma_ratio=0.75)).all()
  mask = np.array([[1, 1, 0]])
  critics.check_targets(np.array([[-1.0, 2.0, 99.0]]), mask, low=-1.0, high=2.0)
  for bad in (2.1, np.nan):
    with pytest.raises(ValueError, match='1 returns such as'):
      critics.check_targets(np.array([[0.0, bad, 0.0]]), mask, low=-1.0, high=2.0)


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'low': 2.0}, 'low is 2.0'),
    ({'high': math.inf}, 'high is inf'),
    ({'num_bins': 1}, 'num_bins is 1'),
    ({'sigma_ratio': 0.0}, 'sigma_ratio is 0.0'),
  ],
)
def test_bad_supports_are_refused(change, words):
  with pytest.raises(ValueError, match=words):
    critics.hl_gauss(jnp.zeros(1), **(SUPPORT | {'sigma_ratio': 0.75} | change))


def test_every_number_of_a_support_matters():
  base = SUPPORT | {'sigma_ratio': 0.75}
  want = critics.hl_gauss(jnp.array([0.3]), **base)
  for change in ({'low': -2.0}, {'high': 3.0}, {'sigma_ratio': 1.0}):
    assert not np.allclose(critics.hl_gauss(jnp.array([0.3]), **(base | change)), want)


def test_categorical_by_hand():
  # softmax of log(1, 1, 2) = .25, .25, .5 against (.5, 0, .5); -inf at a bin without mass costs nothing.
  logits = jnp.log(jnp.array([[[1.0, 1.0, 2.0], [1.0, 0.0, 1.0]]]))
  probs = jnp.array([[[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]])
  ones = jnp.ones((1, 2))
  out = critics.categorical_value_loss(logits, probs, ones)
  want = (0.5 * math.log(4) + 0.5 * math.log(2) + math.log(2)) / 2
  np.testing.assert_allclose(out.loss, want, rtol=1e-6)
  np.testing.assert_allclose(out.metrics['target_entropy'], math.log(2) / 2, rtol=1e-6)
  np.testing.assert_allclose(out.metrics['kl'], want - math.log(2) / 2, rtol=1e-5)
  gradient = jax.grad(lambda x: critics.categorical_value_loss(x, probs, ones).loss)(logits)
  # (softmax - p) / 2
  want = [[[-0.125, 0.125, 0], [-0.25, 0, 0.25]]]
  np.testing.assert_allclose(gradient, want, atol=1e-6)


def test_expected_value_by_hand():
  logits = jnp.log(jnp.array([[1.0, 1.0, 2.0]]))  # .25 * -1 + .25 * 1 + .5 * 3
  np.testing.assert_allclose(critics.expected_value(logits, low=-1, high=3), [1.5], rtol=1e-6)
  probs = critics.two_hot(jnp.array([0.37]), **SUPPORT)
  got = critics.expected_value(jnp.log(probs), low=-1.0, high=2.0)
  np.testing.assert_allclose(got, [0.37], rtol=1e-5)
