"""What is refused before any long work starts."""

import math
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from sao_jax import chats, compression, sharding
from sao_jax.build.methods import OBJECTIVES
from sao_jax.models import backends, moe
from sao_jax.runtime import failures
from sao_jax.tokens import ChatFormat
from sao_jax.types import Task

RETRIED = ('infra', 'env', 'grader')  # kinds of failures that another try can mend


def check(c: ConfigDict) -> None:
  """Everything about a config that can be known from it alone.

  Raises:
    ValueError: one line that names the field, its value and the remedy.
  """
  try:
    _check_ranges(c)
    _check_choices(c)
    _check_relations(c)
  except (KeyError, AttributeError) as error:
    raise ValueError(f'{error.args[0]}: a config of another version of sao_jax') from error


def _check_ranges(c: ConfigDict) -> None:
  """Each number by itself."""
  minimum = {
    'train.num_steps': 1,
    'train.batch_size': 1,
    'train.group_size': 1,
    'train.micro_rows': 1,
    'train.logprob_chunk': 1,
    'train.save_every': 1,
    'train.keep': 1,
    'train.max_skipped_in_row': 1,
    'env.max_turns': 1,
    'env.max_turn_tokens': 1,
    'env.max_tokens': 2,
    'evaluation.every': 1,
    'evaluation.num_problems': 1,
    'evaluation.samples': 1,
    'runtime.pipeline_depth': 0,
    'runtime.max_staleness': 0,
    'runtime.grader_holds': 0,
    'runtime.max_failures_in_row': 1,
    'runtime.breaker_openings': 0,
    'train.reward_window': 1,
    'train.max_rollbacks': 0,
    'sao.critic_updates': 0,
    'sao.policy_freeze_steps': 0,
    'sao.policy_minibatches': 1,
    'sao.baseline_window': 1,
    'supervised.num_steps': 0,
    'supervised.batch_size': 1,
    'value.num_batches': 0,
    'value.updates_per_batch': 1,
    'value.num_bins': 2,
    'engine.num_slots': 1,
    'engine.tensor': 1,
    'engine.expert': 1,
    **{f'mesh.{axis}': 1 for axis in sharding.AXES},
    'model.vocab_size': 0,
    'model.width': 1,
    'model.num_layers': 1,
    'model.num_heads': 1,
    'model.num_kv_heads': 1,
    'model.head_dim': 2,
    'model.mlp_width': 1,
    'model.attention_chunk': 1,
    'model.num_experts': 0,
    'engine.decode_steps': 1,
    'engine.prefill_rows': 1,
    'sandbox.num_workers': 1,
    'sandbox.memory_mb': 64,
    'sandbox.output_bytes': 1,
    'env.observation_bytes': 1,
    'supervised.num_demonstrations': 1,
    'seed': 0,
  }
  for field, least in minimum.items():
    section, _, name = field.rpartition('.')
    value = (c[section] if section else c)[name]
    if value < least:
      raise ValueError(f'{field}={value} must be at least {least}')
  for kind, budget in c.runtime.retries.items():
    if kind not in RETRIED or budget < 0:
      raise ValueError(
        f'runtime.retries.{kind}={budget}: budgets of at least 0, for {", ".join(RETRIED)} only'
      )
  positive = (
    'env.temperature',
    'evaluation.temperature',
    'sao.alpha',
    'model.rope_theta',
    'model.norm_eps',
    'runtime.back_off_s',
    'runtime.breaker_cooldown_s',
    'runtime.stop_timeout_s',
    'runtime.heartbeat_s',
  )
  for field in positive:
    section, name = field.split('.')
    if not 0 < c[section][name] < math.inf:
      raise ValueError(f'{field}={c[section][name]} must be a finite number above 0')
  if not 0 <= c.sandbox.latency_s < math.inf:
    raise ValueError(f'sandbox.latency_s={c.sandbox.latency_s} must be a finite number, 0 or more')
  for field in (
    'sao.discount',
    'sao.critic_lambda',
    'supervised.tool_share',
    'supervised.slip_share',
    'train.reward_fall',
  ):
    section, name = field.split('.')
    if not 0 <= c[section][name] <= 1:
      raise ValueError(f'{field}={c[section][name]} must be in [0, 1]')
  if not 0 < c.sao.eps_low <= 1:
    raise ValueError(
      f'sao.eps_low={c.sao.eps_low} must be in (0, 1]: the ratio is kept above 1 - eps_low'
    )
  if not c.sao.eps_high > 0:
    raise ValueError(
      f'sao.eps_high={c.sao.eps_high} must be above 0: the ratio is kept below 1 + eps_high'
    )
  if not (0 < c.sao.clip_low <= 1 and c.sao.clip_high > 0):
    raise ValueError(
      f'sao.clip_low={c.sao.clip_low} must be in (0, 1] and sao.clip_high={c.sao.clip_high} above 0'
    )
  if not c.train.max_k3 > 0:
    raise ValueError(f'train.max_k3={c.train.max_k3} must be above 0; inf turns the alarm off')
  for name, seconds in c.runtime.logical.items():
    if not 0 < seconds < math.inf:
      raise ValueError(f'runtime.logical.{name}={seconds} must be a finite number above 0')
  if not (c.value.low < c.value.high and c.value.sigma_ratio > 0):
    raise ValueError(
      f'value.low={c.value.low} must be below value.high={c.value.high}, and value.sigma_ratio='
      f'{c.value.sigma_ratio} above 0'
    )
  buckets = c.engine.prefill_buckets
  if not buckets or not all(1 <= bucket <= c.env.max_tokens for bucket in buckets):
    raise ValueError(
      f'engine.prefill_buckets={tuple(buckets)} must be lengths from 1 to env.max_tokens={c.env.max_tokens}'
    )


def _check_choices(c: ConfigDict) -> None:
  """Names of things."""
  _one_of(c, 'sao.objective', OBJECTIVES)
  _one_of(c, 'chat.format', ('bytes', 'smollm2', 'qwen3'))
  _one_of(c, 'chat.thinking', chats.THINKING)
  _one_of(c, 'model.attention', tuple(backends.BACKENDS))
  _one_of(c, 'model.expert_backend', moe.BACKENDS)
  _one_of(c, 'train.optimizer_memory', ('device', 'pinned_host'))
  _one_of(c, 'train.compression', compression.KINDS)
  _one_of(c, 'runtime.mode', ('async', 'sync', 'deterministic'))
  _one_of(c, 'runtime.consume', ('oldest_started', 'completion'))
  _one_of(c, 'runtime.late', ('mask', 'drop'))
  _one_of(c, 'sao.advantages', ('gae', 'group_relative', 'leave_one_out', 'running_mean'))
  _one_of(c, 'sao.baseline_key', ('prompt', 'global'))
  _one_of(c, 'sao.advantage_values', ('after', 'before'))
  _one_of(c, 'value.head', ('scalar', 'categorical'))


def _check_relations(c: ConfigDict) -> None:
  """Numbers that must fit each other."""
  if c.train.batch_size % c.train.group_size:
    raise ValueError(
      f'train.batch_size={c.train.batch_size} must be a multiple of train.group_size={c.train.group_size}'
    )
  uses_groups = c.sao.advantages in ('group_relative', 'leave_one_out')
  if uses_groups and c.train.group_size < 2:
    raise ValueError(
      f'sao.advantages={c.sao.advantages!r} compares episodes of one prompt: train.group_size='
      f'{c.train.group_size} must be at least 2'
    )
  if (c.sao.advantages == 'gae') != bool(c.sao.critic_updates):
    raise ValueError(
      f'sao.advantages={c.sao.advantages!r} with sao.critic_updates={c.sao.critic_updates}: gae needs a '
      'critic (at least 1), the others have none (0)'
    )
  if bool(c.sao.critic_updates) != bool(c.value.num_batches):
    raise ValueError(
      f'value.num_batches={c.value.num_batches} with sao.critic_updates={c.sao.critic_updates}: with a critic it '
      'must be at least 1, since the value head starts from the mean return of the first batch; without one, 0'
    )
  _check_model(c)
  if jax.process_count() > 1 and c.supervised.num_steps and not c.supervised.workdir:
    raise ValueError(
      f'supervised.num_steps={c.supervised.num_steps} with {jax.process_count()} processes: the warm start is of one process; '
      'make it in a run of its own and name that in supervised.workdir, or set it to 0'
    )
  episode = ('runtime.episode_timeout_s', c.runtime.episode_timeout_s)
  stall = ('runtime.stall_timeout_s', c.runtime.stall_timeout_s)
  failures.check_deadlines([('sandbox.timeout_s', c.sandbox.timeout_s), episode, stall])
  failures.check_deadlines([('sandbox.max_latency_s', c.sandbox.max_latency_s), episode])
  judging = 2 * c.env.grader_timeout_s * (c.runtime.grader_holds + 1)  # a grader tries twice
  name = '2 * env.grader_timeout_s * (runtime.grader_holds + 1)'
  failures.check_deadlines([(name, judging), episode])
  back_off = ('runtime.back_off_s', c.runtime.back_off_s)
  longest = ('runtime.max_back_off_s', c.runtime.max_back_off_s)
  failures.check_deadlines([back_off, longest, stall])
  quiet = c.runtime.breaker_cooldown_s * 2.0**c.runtime.breaker_openings
  quiet += c.runtime.episode_timeout_s + 2 * failures.CLEAN_UP_S
  name = 'runtime.breaker_cooldown_s * 2^runtime.breaker_openings + runtime.episode_timeout_s and clean-up'
  failures.check_deadlines([(name, quiet), stall])


def _check_model(c: ConfigDict) -> None:
  """Weights, chat format, back-ends and adapters."""
  backends.check(
    c.model.attention,
    platform=jax.default_backend(),
    dtype=jnp.dtype(c.model.dtype),
    head_dim=c.model.head_dim,
    window=c.model.window,
    segments=True,
  )
  if c.chat.format != 'bytes' and not (c.chat.tokenizer or c.model.weights):
    raise ValueError(
      f'chat.format={c.chat.format!r} needs a tokenizer: name its folder in chat.tokenizer or model.weights'
    )
  if c.chat.prefill and c.chat.format != 'smollm2':
    raise ValueError(
      f"chat.prefill={c.chat.prefill!r} is for chat.format='smollm2', not {c.chat.format!r}: set it to ''"
    )
  if c.chat.format == 'bytes' and (c.chat.system or not c.chat.tools):
    raise ValueError(
      f"chat.system={c.chat.system!r}, chat.tools={c.chat.tools} with chat.format='bytes', which has no system turn and always the "
      "tool: set them to '' and True"
    )
  if c.chat.thinking != 'free' and c.chat.format != 'qwen3':
    raise ValueError(
      f"chat.thinking={c.chat.thinking!r} is for chat.format='qwen3', not {c.chat.format!r}: set it to 'free'"
    )
  if (
    c.chat.format == 'bytes'
    and c.model.weights
    and Path(c.model.weights, 'tokenizer.json').exists()
  ):
    raise ValueError(
      f"chat.format='bytes' with model.weights={c.model.weights}, a model that reads the ids of its tokenizer.json: set chat.format to "
      'its format'
    )
  if c.chat.format != 'bytes' and (c.supervised.num_steps or c.supervised.workdir):
    raise ValueError(
      f'supervised.num_steps={c.supervised.num_steps}, supervised.workdir={c.supervised.workdir!r} with chat.format='
      f"{c.chat.format!r}: demonstrations are written in bytes; set them to 0 and ''"
    )
  if c.model.lora_rank and (c.supervised.num_steps or c.supervised.workdir):
    raise ValueError(
      f'supervised.num_steps={c.supervised.num_steps}, supervised.workdir={c.supervised.workdir!r} with model.lora_rank='
      f"{c.model.lora_rank}: the warm start trains whole models; set them to 0 and '', and export that run to model.weights"
    )
  if c.model.upcycle and c.model.router_stddev <= 0:
    raise ValueError(f'model.router_stddev={c.model.router_stddev} must be above 0')
  if c.model.upcycle and not (c.model.weights and c.model.num_experts and c.model.normalize_topk):
    raise ValueError(
      'model.upcycle=True makes experts of a dense model: it needs model.weights, model.num_experts and '
      'model.normalize_topk=True'
    )


def _one_of(c: ConfigDict, field: str, choices: tuple[str, ...]) -> None:
  section, name = field.split('.')
  if c[section][name] not in choices:
    raise ValueError(f'{field}={c[section][name]!r} must be one of {", ".join(choices)}')


def check_prompts(tasks: Iterable[Task], config: ConfigDict, chat: ChatFormat) -> None:
  """Every question must leave room for a turn.

  Raises:
    ValueError: naming the longest question and what it needs.
  """
  longest = max(tasks, key=lambda task: len(chat.prompt_tokens(task.question)))
  size = len(chat.prompt_tokens(longest.question))
  if size >= config.env.max_tokens:
    raise ValueError(
      f'problem {longest.prompt_id} has {size} tokens and env.max_tokens={config.env.max_tokens} leaves no room for '
      f'an answer: raise it (to {size + config.env.max_turn_tokens} for a whole turn), or leave out long problems'
    )
