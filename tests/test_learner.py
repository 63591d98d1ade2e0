"""One whole update against an oracle that works on trajectories in float64 (tests/learner_oracle.py), and properties."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sao_jax import batching, learner, losses
from tests.learner_oracle import (
  ADAM,
  CRITIC,
  HEAD,
  NUMBERS,
  POLICY,
  SGD,
  SKEW_FROZEN,
  TABLE,
  apply_nan_padding,
  assert_close,
  assert_same,
  dis,
  episode,
  episodes,
  float64,
  make,
  oracle_advantages,
  oracle_chain,
  oracle_critic_step,
  oracle_distribution,
  oracle_policy_grads,
  oracle_policy_step,
  oracle_update,
  oracle_value,
  pack,
  quick,
  table,
)

OTHER = NUMBERS._replace(
  temperature=1.0,
  eps_low=0.8,
  eps_high=3.0,
  discount=1.0,
  alpha=0.5,
  critic_lambda=1.0,
  critic_updates=3,
)
BEFORE = NUMBERS._replace(advantage_values='before', bootstrap_truncated=False)
DIS = dis(NUMBERS)


# One whole update


# Of ten ratios 0.6 is below 0.7 and 7 above 6; the others add up to 12.4. Between 0.2 and 4 there are all but 5 and 7,
# which add up to 8.
@pytest.mark.parametrize(
  ('n', 'interval'),
  [
    (NUMBERS, [0.8, 0.1, 0.1, 1.55]),
    (BEFORE, [0.8, 0.1, 0.1, 1.55]),
    (OTHER, [0.8, 0, 0.2, 1]),
  ],
  ids=['after', 'before', 'other'],
)
def test_a_whole_update_is_the_oracles(n, interval):
  trajectories = episodes(temperature=n.temperature)
  made, state = make(n)
  state, metrics = made.update(state, pack(trajectories))
  policy, critic, expected = oracle_update(trajectories, n)
  assert_close(metrics, expected)
  keys = ('kept', 'dropped_low', 'dropped_high', 'ratio_mean')
  np.testing.assert_allclose([metrics[f'dis/{key}'] for key in keys], interval, rtol=1e-5)
  assert_close(state.policy, policy)
  assert_close(state.critic, critic)
  assert (state.step, state.skipped) == (1, 0)


@pytest.mark.parametrize(
  'name',
  ['temperature', 'eps_low', 'eps_high', 'discount', 'alpha', 'critic_lambda', 'critic_updates']
  + ['advantage_values', 'bootstrap_truncated'],
)
def test_every_number_matters_in_the_updates_above(name):
  """Pitfall 28: each has two values there, and the right policy or metrics depend on which."""
  other = next(n for n in (BEFORE, OTHER) if getattr(n, name) != getattr(NUMBERS, name))
  got, expected = (
    oracle_update(episodes(), n)
    for n in (NUMBERS._replace(**{name: getattr(other, name)}), NUMBERS)
  )
  differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), got, expected)
  assert max(jax.tree.leaves(differences[0])) > 1e-3


NONE_SKIPPED = {'updates/skipped': 0.0, 'updates/skipped_now': 0.0}


def test_bootstrap_reaches_the_truncated_trajectory_only():
  # Under lambda 0 the target of the last token, V + delta, is r + discount V_end where b was cut; a ended for good.
  end = oracle_value(float64(CRITIC), episodes()[1].tokens, 7)
  for on, last_of_b in ((True, 0.25 + 0.9 * end), (False, 0.25)):
    n = NUMBERS._replace(bootstrap_truncated=on, critic_lambda=0.0)
    made, start = make(n)
    for one, expected in zip(episodes()[:2], (1.0, last_of_b), strict=True):
      *_, (_, value, delta) = oracle_chain(float64(CRITIC), one, n, 0.0)
      np.testing.assert_allclose(value + delta, expected)
      _, metrics = made.update_critic(start, pack([one]))
      assert_close(metrics, oracle_critic_step(float64(CRITIC), [one], n)[1] | NONE_SKIPPED)


def test_update_critic_leaves_the_policy_and_the_version():
  made, start = make()
  state, metrics = made.update_critic(start, pack())
  critic, expected = oracle_critic_step(float64(CRITIC), episodes(), NUMBERS)
  critic, _ = oracle_critic_step(critic, episodes(), NUMBERS)
  assert_close(state.critic, critic)
  assert_close(metrics, expected | NONE_SKIPPED)
  assert_same(
    (state.policy, state.policy_opt, state.step), (start.policy, start.policy_opt, start.step)
  )
  poisoned = pack().replace(rewards=pack().rewards * np.nan)
  state, _ = made.update_critic(start, poisoned)
  assert_same(state, start.replace(skipped=start.skipped + 1))


def test_sequential_minibatches_are_sequential_steps():
  # Rows b; d and c; a; and a row of padding: the first step has rows 0 and 2, the second 1 and 3.
  a, b, c, d = episodes()
  batch = pack(row_length=7, row_multiple=2)
  firsts = [int(row[0]) for row in batch.tokens]
  assert firsts == [b.tokens[0], a.tokens[0], d.tokens[0], 0]
  n = NUMBERS._replace(policy_minibatches=2)
  made, start = make(n, txs=(optax.sgd(lambda _: 0.5), SGD[1]))
  state, metrics = made.update(start, batch)
  assert optax.tree.get(state.policy_opt, 'count') == 2
  _, critic, _ = oracle_update([a, b, c, d], n)
  advantages = oracle_advantages(critic, [a, b, c, d], n)
  policy, first = oracle_policy_step(float64(POLICY), [b, d, c], advantages, n)
  policy, second = oracle_policy_step(policy, [a], advantages, n)
  assert_close(state.policy, policy)
  for name in ('loss/policy', 'policy/grad_norm'):
    assert_close(metrics[name], (first[name] + second[name]) / 2)
  # Seven action tokens in the first step, three in the second.
  kept = (7 * first['dis/kept'] + 3 * second['dis/kept']) / 10
  np.testing.assert_allclose(metrics['dis/kept'], kept, rtol=1e-5)


def test_host_advantages_without_a_critic():
  n = NUMBERS._replace(critic_updates=0)
  given = {'a': 0.5, 'b': -1.0, 'c': 2.0, 'd': 0.25}
  made, start = make(n)
  state, metrics = made.update(start, pack(advantages=given))
  advantages = {(t.episode, i): given[t.episode] for t in episodes() for i in range(8)}
  policy, expected = oracle_policy_step(float64(POLICY), episodes(), advantages, n)
  assert_close(state.policy, policy)
  assert_close(metrics, {**expected, 'updates/skipped': 0, 'updates/skipped_now': 0})
  assert state.critic == {} and state.critic_opt == ()


def test_supervised_update_by_hand():
  # Three words of the agent; the loss is the mean of -log pi over them, at temperature 1, stale or not.
  tokens, mask = [1, 2, 3, 4, 2], [0, 1, 1, 0, 1]
  batch = pack([batching.supervised_trajectory('s', tokens, mask)])
  tx = optax.sgd(0.5)
  update = jax.jit(
    learner.make_supervised_update(TABLE, tx, chunk=2, mesh=None), compiler_options=quick()
  )
  params, _, loss = update(POLICY, tx.init(POLICY), batch)
  terms = [(np.asarray(tokens), t, -1 / 3) for t in (1, 2, 4)]
  expected = [-oracle_distribution(POLICY, tokens, t, 1.0)[0] for t in (1, 2, 4)]
  np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-5)
  grads = oracle_policy_grads(float64(POLICY), terms, 1.0)
  assert_close(params, jax.tree.map(lambda p, g: p - 0.5 * g, float64(POLICY), grads))


# However the batch is cut


@pytest.mark.parametrize(
  ('row_length', 'row_multiple', 'micro_rows'), [(8, 1, 3), (7, 4, 2), (20, 1, 1)]
)
def test_packing_and_micro_batches_do_not_matter(row_length, row_multiple, micro_rows):
  """One count of action tokens, positions from lengths: pitfalls 11, 18 and 54."""
  made, start = make()
  expected = made.update(start, pack())
  made, start = make(NUMBERS._replace(micro_rows=micro_rows, logprob_chunk=5))
  got = made.update(start, pack(episodes()[::-1], row_length=row_length, row_multiple=row_multiple))
  assert_close(got, expected, rtol=2e-5, atol=1e-6)


def test_rows_that_micro_batches_do_not_divide_are_refused():
  made, start = make(NUMBERS._replace(micro_rows=2))
  with pytest.raises(TypeError, match='reshape'):
    made.update(start, pack())


def test_steps_are_counted_per_optimiser_step_not_per_micro_batch():
  # The rate is 0 from the second step on, so that K = 3 over three micro-batches moves as K = 1 does.
  once = lambda rate: optax.sgd(lambda count: rate * (count == 0))
  txs = once(0.5), once(0.1)
  made, start = make(NUMBERS._replace(critic_updates=3), txs=txs)
  state, _ = made.update(start, pack())
  policy, critic, _ = oracle_update(episodes(), NUMBERS._replace(critic_updates=1))
  assert_close((state.policy, state.critic), (policy, critic))
  count = lambda opt: int(optax.tree.get(opt, 'count'))
  assert (count(state.policy_opt), count(state.critic_opt)) == (1, 3)
  again, _ = made.update(state, pack())
  assert_same((again.policy, again.critic), (state.policy, state.critic))
  assert (count(again.policy_opt), count(again.critic_opt), int(again.step)) == (2, 6, 2)


# What moves


def test_frozen_leaves_stay_bit_for_bit_without_optimiser_state_or_decay():
  critic_tx = learner.freeze(optax.adamw(1e-2, weight_decay=0.5), SKEW_FROZEN)
  made, start = make(txs=(ADAM[0], critic_tx), freeze_skew=True)
  state, metrics = made.update(made.update(start, pack())[0], pack())
  flags = jax.tree.leaves(SKEW_FROZEN)
  assert moved(state.critic, start.critic) == [not frozen for frozen in flags]
  # Adam has two moments for each of the three other leaves, and counts. `skew` is the only leaf of shape [3].
  shapes = [x.shape for x in jax.tree.leaves(state.critic_opt)]
  assert (3,) not in shapes and sum(shape != () for shape in shapes) == 6
  expected = oracle_critic_step(float64(CRITIC), episodes(), NUMBERS, frozen=('skew',))[1]
  _, first = made.update(start, pack())
  np.testing.assert_allclose(first['critic/grad_norm'], expected['critic/grad_norm'], rtol=1e-4)
  assert metrics['updates/skipped'] == 0


@pytest.mark.parametrize(('flag', 'message'), [(False, '0 of 4'), (True, '4 of 4')])
def test_a_partition_of_nothing_or_all_is_refused(flag, message):
  with pytest.raises(ValueError, match=message):
    learner.freeze(ADAM[1], jax.tree.map(lambda _: flag, CRITIC))


def test_the_policy_stands_still_while_the_critic_warms_up():
  made, start = make(NUMBERS._replace(policy_freeze_steps=1), txs=ADAM)
  first, _ = made.update(start, pack())
  assert_same((first.policy, first.policy_opt), (start.policy, start.policy_opt))
  assert all(moved(first.critic, start.critic)) and first.step == 1
  second, _ = made.update(first, pack())
  assert all(moved(second.policy, first.policy))


def test_each_network_has_its_own_optimiser_and_clip():
  clips = [
    optax.chain(optax.clip_by_global_norm(clip), tx)
    for clip, tx in zip((1e-3, 1e-2), SGD, strict=True)
  ]
  made, start = make(NUMBERS._replace(critic_updates=1), txs=tuple(clips))
  state, _ = made.update(start, pack())
  distance = lambda a, b: optax.tree.norm(jax.tree.map(jnp.subtract, a, b))
  # Rate times clip: 0.5 * 1e-3 and 0.1 * 1e-2.
  np.testing.assert_allclose(distance(state.policy, start.policy), 5e-4, rtol=1e-3)
  np.testing.assert_allclose(distance(state.critic, start.critic), 1e-3, rtol=1e-3)


def moved(a, b):
  return [not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]


# What is not finite, and what does not count


def rough(x):
  """0 with a gradient that is not finite."""
  return jnp.sqrt(0 * x.sum())


def rough_policy(logprobs, *rest):
  out = DIS.loss(logprobs, *rest)
  return out._replace(loss=out.loss + rough(logprobs))


def rough_critic(head, *rest):
  return HEAD.loss(head, *rest) + rough(head['kernel'])


POISON = {
  'reward': (lambda b: b.replace(rewards=b.rewards * np.nan), {}),
  'large reward': (lambda b: b.replace(rewards=b.rewards * 1e30), {}),
  'logprob': (lambda b: b.replace(behavior_logprobs=b.behavior_logprobs * np.nan), {}),
  'policy gradient': (lambda b: b, {'objective': DIS._replace(loss=rough_policy)}),
  'critic gradient': (lambda b: b, {'head': HEAD._replace(loss=rough_critic)}),
}


@pytest.mark.parametrize('poison', POISON)
def test_an_update_that_is_not_finite_moves_nothing_and_is_counted(poison):
  spoil, parts = POISON[poison]
  made, start = make(txs=ADAM, **parts)
  state, metrics = made.update(start, spoil(pack()))
  assert_same(state, start.replace(step=start.step + 1, skipped=start.skipped + 1))
  assert (metrics['updates/skipped'], metrics['updates/skipped_now']) == (1, 1)
  if not parts:
    state, metrics = made.update(state, pack())
    assert (metrics['updates/skipped'], metrics['updates/skipped_now']) == (1, 0)
    assert all(moved((state.policy, state.critic), (start.policy, start.critic)))


def test_stale_tokens_count_but_do_not_push_the_policy():
  made, start = make()
  expected, _ = made.update(start, pack())

  def run(ratio, reward):
    a, b, _, d = episodes()
    c = episode('c', [2, 1, 0], [0, 1, 0], [ratio], [1], reward)
    return made.update(start, pack([a, b, c, d]))[0]

  assert_same(run(1.1, -0.5), expected)
  assert_same(run(2.0, -0.5), expected)  # the policy does not learn from it, at any ratio
  assert all(moved(run(1.1, 3.0).critic, expected.critic))  # the critic does
  # As does the denominator: without c the same gradient is a mean over 9 tokens and not 10.
  made, start = make(NUMBERS._replace(critic_updates=0))
  given = dict.fromkeys('abcd', 1.0)
  with_c, _ = made.update(start, pack(advantages=given))
  without, _ = made.update(
    start, pack([t for t in episodes() if t.episode != 'c'], row_multiple=3, advantages=given)
  )
  step = lambda state: jax.tree.map(jnp.subtract, state.policy, start.policy)
  assert_close(step(with_c), jax.tree.map(lambda x: 0.9 * x, step(without)))


def test_what_stands_off_the_actions_changes_no_bit():
  batch = pack(advantages=dict.fromkeys('abcd', 1.0))
  off = np.asarray(batch.action_mask) == 0
  names = ('rewards', 'behavior_logprobs', 'advantages', 'num_actions', 'truncated', 'staleness')
  garbage = {name: np.where(off, np.nan, getattr(batch, name)) for name in names}
  for critic_updates in (2, 0):
    made, start = make(NUMBERS._replace(critic_updates=critic_updates))
    assert_same(made.update(start, batch.replace(**garbage)), made.update(start, batch))


def test_padding_may_be_nan_inside_the_model():
  made, start = make(model=table(apply_nan_padding))
  state, metrics = made.update(start, pack())
  assert metrics['updates/skipped'] == 0
  assert_close((state, metrics), make()[0].update(start, pack()), rtol=1e-6, atol=0)


def test_a_batch_without_a_token_to_train_on_is_a_finite_step():
  made, start = make()
  stale, metrics = made.update(start, pack(max_staleness=-1))
  assert_same(stale.policy, start.policy)
  assert all(moved(stale.critic, start.critic))
  zero = ('loss/policy', 'policy/grad_norm', 'updates/skipped')
  assert all(metrics[name] == 0 for name in zero)
  empty, metrics = made.update(start, jax.tree.map(np.zeros_like, pack()))
  assert_same((empty.policy, empty.critic), (start.policy, start.critic))
  assert empty.step == 1 and np.isnan(metrics.pop('critic/explained_variance'))
  assert all(np.isfinite(value) for value in metrics.values()) and metrics['dis/kept'] == 0


@pytest.mark.parametrize('reward', [1.0, 0.0])
def test_explained_variance_of_a_constant_return_is_undefined_and_stops_nothing(reward):
  one = episode('a', [1, 2, 3, 4, 2], [0, 1, 1, 0, 1], [1, 1, 1], [7] * 3, reward)
  made, start = make(OTHER)
  state, metrics = made.update(start, pack([one], row_multiple=3))
  assert np.isnan(metrics['critic/explained_variance']) and metrics['updates/skipped'] == 0
  assert state.critic['head']['bias'] != start.critic['head']['bias']


# Importance ratios


@pytest.mark.parametrize('n', [NUMBERS, OTHER], ids=['0.7', '1.0'])
def test_the_ratio_is_one_at_the_temperature_of_sampling(n):
  ones = {'a': [1] * 3, 'b': [1] * 3, 'c': [1], 'd': [1] * 3}
  made, start = make(n)
  state, metrics = made.update(start, pack(episodes(ones, temperature=n.temperature)))
  np.testing.assert_allclose(metrics['dis/ratio_mean'], 1, atol=1e-5)
  assert metrics['dis/kept'] == 1 and abs(metrics['mismatch/k3']) < 1e-9
  # Sampled at the other temperature, it is not; and the critic knows of none of this.
  other, metrics = made.update(start, pack(episodes(ones, temperature=1.7 - n.temperature)))
  assert metrics['mismatch/k3'] > 1e-3
  assert_same(other.critic, state.critic)
  assert_close(state.critic, oracle_update(episodes(), n)[1])


def ppo(logprobs, old, batch, advantages, denominator):
  out = losses.ppo_policy_loss(
    logprobs, old, advantages, batch.mask, eps_low=0.2, eps_high=0.28, denominator=denominator
  )
  drift = jnp.abs(jnp.where(batch.mask > 0, logprobs - old, 0)).max()
  return out._replace(metrics={'drift': drift, 'old': (old * batch.action_mask).sum()})


PPO = learner.PolicyObjective(ppo, uses_old_logprobs=True)


def test_old_log_probabilities_are_those_before_the_first_minibatch():
  old = sum(
    oracle_distribution(POLICY, t.tokens, i, NUMBERS.temperature)[0]
    for t in episodes()
    for i in np.flatnonzero(t.mask)
  )
  for minibatches in (1, 3):
    made, start = make(NUMBERS._replace(policy_minibatches=minibatches), objective=PPO)
    state, metrics = made.update(start, pack())
    np.testing.assert_allclose(metrics['policy/old'], old, rtol=1e-5)
    if minibatches == 1:  # the ratio is exactly 1
      assert metrics['policy/drift'] == 0
      continue
    assert metrics['policy/drift'] > 1e-2
    assert all(moved(state.policy, start.policy))
