"""Configs: what is refused before any long work, and that each option reaches the thing it names."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import batching, build
from sao_jax.build import assemble, methods
from sao_jax.runtime.failures import BackOff, RunFailed
from tests.test_batching import PACK, trajectory

PATH = Path(__file__).parents[1] / 'configs' / 'beyondaime.py'
SPEC = importlib.util.spec_from_file_location('beyondaime', PATH)
CONFIGS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CONFIGS)


def config(variant='sao', **changes):
  c = CONFIGS.get_config(variant)
  for field, value in changes.items():
    section, _, name = field.rpartition('__')
    (c[section] if section else c)[name] = value
  return c


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'train__num_steps': 0}, r'train\.num_steps=0 must be at least 1'),
    ({'train__micro_rows': 0}, r'train\.micro_rows=0'),
    ({'runtime__pipeline_depth': -1}, r'runtime\.pipeline_depth=-1 must be at least 0'),
    ({'runtime__max_staleness': -1}, r'runtime\.max_staleness=-1'),
    ({'seed': -1}, 'seed=-1'),
    ({'env__temperature': 0.0}, r'env\.temperature=0\.0 must be a finite number above 0'),
    ({'env__temperature': float('nan')}, r'env\.temperature=nan'),
    ({'sao__alpha': float('inf')}, r'sao\.alpha=inf'),
    ({'sao__discount': 1.5}, r'sao\.discount=1\.5 must be in \[0, 1\]'),
    ({'sao__critic_lambda': float('nan')}, r'sao\.critic_lambda=nan'),
    ({'sao__eps_low': 0.0}, r'sao\.eps_low=0\.0'),
    ({'sao__eps_high': -0.5}, r'sao\.eps_high=-0\.5'),
    ({'sao__clip_low': 1.5}, '1.5'),
    ({'runtime__mode': 'asynch'}, r"runtime\.mode='asynch' must be one of"),
    ({'runtime__consume': 'newest'}, r"runtime\.consume='newest' must be one of"),
    ({'runtime__late': 'keep'}, r"runtime\.late='keep' must be one of"),
    ({'runtime__back_off_s': 0.0}, r'runtime\.back_off_s=0\.0 must be a finite number above 0'),
    ({'runtime__max_back_off_s': 0.1}, r'runtime\.back_off_s=0\.2 s .* below runtime\.max_back_off_s=0\.1'),
    ({'runtime__breaker_cooldown_s': 60.0}, r'breaker_cooldown_s \* .*=380.*stall_timeout_s=300'),
    ({'runtime__grader_holds': 9}, r'grader_holds \+ 1\)=300.*episode_timeout_s=120'),
    ({'sandbox__latency_s': -1.0}, r'sandbox\.latency_s=-1\.0'),
    ({'sandbox__max_latency_s': 200.0}, r'sandbox\.max_latency_s=200.*episode_timeout_s'),
    ({'train__max_k3': 0.0}, r'train\.max_k3=0\.0 must be above 0'),
    ({'train__reward_fall': 1.5}, r'train\.reward_fall=1\.5 must be in \[0, 1\]'),
    ({'train__max_rollbacks': -1}, r'train\.max_rollbacks=-1'),
    ({'sao__objective': 'grpo'}, r"sao\.objective='grpo' must be one of dis"),
    ({'sao__advantages': 'mean'}, r"sao\.advantages='mean' must be one of"),
    ({'sao__advantage_values': 'during'}, r"sao\.advantage_values='during'"),
    ({'value__head': 'vector'}, r"value\.head='vector'"),
    ({'model__num_experts': 8}, r'model\.experts_per_token 0 must be from 1'),
    ({'train__group_size': 3}, r'train\.batch_size=64 must be a multiple of train\.group_size=3'),
    ({'sao__critic_updates': 0}, r'sao\.critic_updates=0: gae needs a critic'),
    ({'sao__advantages': 'running_mean'}, r"sao\.advantages='running_mean' with sao\.critic_updates=2"),
    ({'value__num_batches': 0}, r'value\.num_batches=0 with'),
    ({'sandbox__timeout_s': 200.0}, r'sandbox\.timeout_s=200\.0 s .* below runtime\.episode_timeout_s'),
    ({'policy__learning_rate': 0.0}, r'policy\.learning_rate=0\.0 must be a finite number above 0'),
    ({'sao__clip_low': 1.5}, r'sao\.clip_low=1\.5'),
    ({'policy__warmup_steps': -3}, r'policy\.warmup_steps=-3'),
    ({'policy__b1': 1.5}, r'policy\.b1=1\.5'),
    ({'engine__num_slots': 0}, r'engine\.num_slots=0'),
    ({'engine__prefill_buckets': ()}, r'engine\.prefill_buckets=\(\)'),
    ({'env__observation_bytes': -1}, r'env\.observation_bytes=-1'),
    ({'value__low': 2.0}, r'value\.low=2\.0 must be below value\.high'),
    ({'critic__clip_norm': -1.0}, r'critic\.clip_norm=-1\.0 must be above 0'),
  ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_name_and_the_remedy(changes, message):
  with pytest.raises(ValueError, match=message):
    build.parts(config(**changes))


def test_groups_need_a_second_member():
  with pytest.raises(ValueError, match=r'train\.group_size=1 must be at least 2'):
    build.parts(config('grpo', train__group_size=1))


@pytest.mark.parametrize('variant', [v for v in CONFIGS.VARIANTS if v != 'paper'])
def test_every_variant_builds(variant):
  parts = build.parts(CONFIGS.get_config(variant))
  assert len(parts.heldout) == 256
  has_critic = variant in ('sao', 'vapo')
  assert ('frozen' in parts.notes[0]) == has_critic
  assert (parts.init_critic({'w': jnp.ones(2)}, 0.25) != {}) == has_critic


def test_frozen_leaves_are_the_attention_projections_and_their_norms():
  # q, k, v, o and the two QK norms of scanned layers.
  words = build.parts(config()).notes[0]
  assert 'attention 6 arrays' in words and 'attention is frozen' in words
  words = build.parts(config(critic__frozen=())).notes[0]
  assert 'nothing of the critic is frozen' in words


def test_the_critic_starts_as_the_policy_under_the_mean_return():
  parts = build.parts(config())
  policy = {'w': jnp.ones(2)}
  critic = parts.init_critic(policy, 0.25)
  assert critic['backbone']['w'] is not policy['w']  # a copy: the learner donates both
  assert critic['head']['bias'] == 0.25 and not critic['head']['kernel'].any()


def test_every_number_of_an_update_comes_from_its_field():
  fields = {
    'env__temperature': 0.75,
    'sao__eps_low': 0.5,
    'sao__eps_high': 2.0,
    'sao__discount': 0.875,
    'sao__alpha': 3.0,
    'sao__critic_lambda': 0.625,
    'sao__critic_updates': 5,
    'sao__advantage_values': 'before',
    'sao__bootstrap_truncated': True,
    'sao__policy_freeze_steps': 7,
    'sao__policy_minibatches': 4,
    'train__micro_rows': 2,
    'train__logprob_chunk': 32,
    'model__num_experts': 8,
  }
  default, got = methods.numbers(config()), methods.numbers(config(**fields))
  assert got._asdict() == {field.split('__')[1]: value for field, value in fields.items()}
  assert all(a != b for a, b in zip(default, got, strict=True))


@pytest.mark.parametrize(
  ('objective', 'field', 'value'),
  [
    ('dis', 'sao__eps_low', 0.9),
    ('dis', 'sao__eps_high', 0.5),
    ('icepop', 'sao__eps_high', 0.5),
    ('decoupled_ppo', 'sao__eps_high', 0.25),
    ('cispo', 'sao__clip_high', 0.1),
    ('ppo', 'sao__clip_high', 0.1),
    ('ppo', 'sao__clip_low', 0.1),
    ('gspo', 'sao__clip_low', 0.1),
  ],
)
def test_bounds_reach_the_objective(objective, field, value):
  loss = lambda **changes: float(policy_loss(config(sao__objective=objective, **changes)))
  assert abs(loss() - loss(**{field: value})) > 1e-3


def policy_loss(c):
  """Ratios to the behavior policy 0.2, 2, 1.2; to the latest policy 0.7, 1.4, 1; advantages -1, 1, -1."""
  row = lambda *x: jnp.asarray([x], jnp.float32)
  logprobs = row(0, -1, -1, -1)
  behavior_logprobs = logprobs - jnp.log(row(1, 0.2, 2, 1.2))
  batch = batching.pack([trajectory('a', [0, 1, 1, 1], version=3)], **{**PACK, 'row_length': 4})
  batch = batch.replace(behavior_logprobs=behavior_logprobs)
  old = logprobs - jnp.log(row(1, 0.7, 1.4, 1))
  objective = methods.objective(c)
  assert objective.uses_old_logprobs == ('ppo' in c.sao.objective)
  return objective.loss(logprobs, old, batch, row(0, -1, 1, -1), 3.0).loss


def test_the_optimiser_clips_then_warms_up():
  # Adam's first step is the rate, whatever the gradient: 1e-3 / 6 of a warm-up of 5, then 2e-3 / 6, ... 1e-3.
  tx = methods.adamw('policy', config(policy__eps=1e-30, policy__learning_rate=1e-3).policy)
  params, grads = {'w': jnp.zeros(())}, {'w': jnp.asarray(100.0)}
  state, steps = tx.init(params), []
  for _ in range(8):
    updates, state = tx.update(grads, state, params)
    steps.append(-float(updates['w']))
  np.testing.assert_allclose(steps, 1e-3 / 6 * np.minimum(np.arange(1, 9), 6), rtol=1e-4)
  decay = methods.adamw(
    'policy',
    config(policy__weight_decay=0.5, policy__warmup_steps=0, policy__learning_rate=1e-3).policy,
  )
  params = {'w': jnp.asarray(2.0)}
  updates, _ = decay.update({'w': jnp.zeros(())}, decay.init(params), params)
  np.testing.assert_allclose(updates['w'], -1e-3 * 0.5 * 2, rtol=1e-5)


def rewarded(*rewards):
  return [trajectory(f'e{i}', [0, 1], reward=r) for i, r in enumerate(rewards)]


def test_group_baselines_by_hand():
  # Groups (1, 0) and (0, 0): deviations from the mean +-0.5 over the deviation 0.5, and nothing to compare.
  both = rewarded(1.0, 0.0, 0.0, 0.0)
  group = {'train__group_size': 2, 'train__batch_size': 4}
  values, memory = methods.baseline(config('grpo', sao__normalize_std=False, **group))(both, None)
  assert values == {'e0': 0.5, 'e1': -0.5, 'e2': 0.0, 'e3': 0.0} and memory is None
  c = config('grpo', sao__advantages='leave_one_out', **group)
  assert methods.baseline(c)(both, None)[0] == {'e0': 1.0, 'e1': -1.0, 'e2': 0.0, 'e3': 0.0}


def test_running_mean_remembers_across_batches_and_json():
  baseline = methods.baseline(config('running_mean', sao__baseline_window=2))
  values, memory = baseline(rewarded(1.0, 0.0), None)
  assert values == {'e0': 0.5, 'e1': -0.5}  # by the mean of the first batch
  values, _ = baseline(rewarded(1.0, 1.0), memory)
  assert values == {'e0': 0.5, 'e1': 0.5}  # the window holds 1 and 0


def test_gae_has_no_baseline_of_the_host():
  assert methods.baseline(config())(rewarded(1.0), 'memory') == (None, 'memory')


def test_limits_come_from_their_fields():
  changed = {
    'runtime__pipeline_depth': 3,
    'train__batch_size': 8,
    'runtime__back_off_s': 0.5,
    'runtime__max_back_off_s': 7.0,
    'runtime__consume': 'completion',
    'runtime__late': 'drop',
    'runtime__max_staleness': 6,
    'runtime__max_failures_in_row': 9,
    'runtime__breaker_cooldown_s': 3.0,
    'runtime__breaker_openings': 1,
  }
  c = config(**changed)
  c.runtime.retries.env = 4
  limits = assemble._limits(c)
  assert limits.capacity == 32
  assert limits.retries == {'infra': 2, 'env': 4, 'grader': 1}
  assert limits.back_off == BackOff(0.5, 7.0)
  assert (limits.consume, limits.late, limits.max_staleness) == ('completion', 'drop', 6)
  assert (limits.max_failures_in_row, limits.breaker_cooldown_s) == (9, 3.0)
  assert limits.breaker_openings == 1
  assert assemble._limits(config(runtime__mode='sync')).capacity == 64


def test_budgets_of_other_kinds_and_configs_of_other_versions_are_refused():
  c = config()
  c.runtime.retries.env = -1
  with pytest.raises(ValueError, match=r'runtime\.retries\.env=-1'):
    build.parts(c)
  c = config().unlock()
  c.runtime.retries.bug = 3
  with pytest.raises(ValueError, match=r'runtime\.retries\.bug=3: .* infra, env, grader only'):
    build.parts(c)
  c = config().unlock()
  del c.runtime.late
  with pytest.raises(ValueError, match='another version of sao_jax'):
    build.parts(c)


def test_the_model_has_the_width_of_the_config():
  assert build.parts(config(model__width=32)).state.policy['embed']['embedding'].shape[1] == 32


def test_a_categorical_critic_builds_and_refuses_returns_outside_its_support():
  parts = build.parts(config(value__head='categorical', value__low=-1.0))
  critic = parts.init_critic(parts.model.init(0), 0.25)
  assert critic['head']['kernel'].shape[1] == 51
  parts.baseline([trajectory('a', [0, 1], reward=1.0)], None)
  with pytest.raises(RunFailed, match=r'episode a has return 1.5, outside value.low=-1.0'):
    parts.baseline([trajectory('a', [0, 1], reward=1.5)], None)


@pytest.mark.parametrize('max_tokens', [10, 15])
def test_made_up_problems_must_fit_as_well(max_tokens):
  with pytest.raises(ValueError, match=rf'env\.max_tokens={max_tokens} leaves no room'):
    build.parts(config(env__max_tokens=max_tokens, engine__prefill_buckets=(8,)))


def test_demonstrations_that_do_not_fit_are_told():
  assert any('left out' in note for note in build.parts(config(env__max_tokens=60)).notes)
  assert not any('left out' in note for note in build.parts(config()).notes)
