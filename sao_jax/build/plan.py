"""What a run holds in the memory of a device, from shapes alone. Nothing is allocated and nothing is compiled.

What lies there between updates is exact. What an update needs beside it is a model: the arrays that the backward pass is given are those
that JAX would save, found by tracing; what stands at once in a layer, in the head and in the engine is counted by formulas. docs/plan.md
has the sums beside measured ones. Not planned: the warm start, which only small models have, and what the host holds.
"""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from sao_jax import sharding
from sao_jax.build import model as model_lib
from sao_jax.build.assemble import Parts, parts
from sao_jax.learner import TrainState
from sao_jax.models import backends, transformer

GIB = 2**30
ARRAYS = 30  # [B, T] of a batch and of what an update derives from it
LOGITS = 4  # float32 arrays of a chunk's logits in the backward pass of the head
LAYER = 1.4  # what stands in the backward pass of a layer, relative to what JAX saves of the layer; its own saved arrays included
PIECES = 2.5  # copies of the rows of the cache that a prefill fills
SLICES = 3  # copies of a layer's cache in a decode
SAMPLING = 4  # float32 arrays of logits in the engine
SCORES = 2  # float32 arrays of attention scores in the engine

REMEDIES = {
  'frozen backbone': 'raise mesh.fsdp, mesh.tensor or mesh.expert',
  'policy parameters': 'raise mesh.fsdp or set model.lora_rank',
  'policy optimiser': "raise mesh.fsdp, set model.lora_rank or policy.frozen, or train.optimizer_memory='pinned_host'",
  'critic parameters': 'raise mesh.fsdp or set model.lora_rank',
  'critic optimiser': "raise mesh.fsdp, set model.lora_rank or critic.frozen, or train.optimizer_memory='pinned_host'",
  'errors of compressed sums': "raise mesh.fsdp or set train.compression='none'",
  'batch': 'lower train.batch_size or env.max_tokens',
  'state before the update': 'raise mesh.fsdp or set model.lora_rank',
  'gradients': 'raise mesh.fsdp or set model.lora_rank',
  'experts in another layout': 'raise mesh.expert in place of mesh.fsdp',
  'activations': "set model.remat='nothing_saveable', lower train.micro_rows, or raise mesh.sequence or mesh.fsdp",
  'one layer': "set model.attention='chunked', lower train.micro_rows, or raise mesh.tensor or mesh.sequence",
  'logits': 'lower train.logprob_chunk or raise mesh.tensor',
  'engine weights': "raise engine.tensor or engine.expert, or set engine.apart=True or model.dtype='bfloat16'",
  'KV caches': 'lower engine.num_slots or env.max_tokens, raise engine.tensor or engine.expert, or set engine.apart=True',
  'work of the engines': 'lower engine.prefill_rows or engine.prefill_buckets, or raise engine.tensor',
  'new engine weights': "raise engine.tensor or engine.expert, or set model.dtype='bfloat16'",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes of one device, part by part."""

  held: dict[str, int]  # all the time
  update: dict[str, int]  # beside that, in an update
  publish: dict[str, int]  # beside that, when the engines get a new policy; never in an update

  @property
  def peak(self) -> dict[str, int]:
    """The parts of the fullest moment."""
    return {**self.held, **max(self.update, self.publish, key=lambda x: sum(x.values()))}

  @property
  def total(self) -> int:
    return sum(self.peak.values())


def without_files(config: ConfigDict) -> ConfigDict:
  """A config of the same shapes that needs no weights, tokenizer or problems, and no attention of an accelerator.

  Raises:
    ValueError: its vocabulary is that of a tokenizer that is not there.
  """
  c = config.copy_and_resolve_references().unlock()
  if not c.model.vocab_size:
    try:
      c.model.vocab_size = model_lib.chat_format(c).vocab_size
    except ValueError as error:
      raise ValueError(
        f'model.vocab_size=0 leaves it to the tokenizer: {error}; or give model.vocab_size'
      ) from error
  c.chat.update({'format': 'bytes', 'system': '', 'prefill': '', 'thinking': 'free', 'tools': True})
  c.model.weights, c.model.upcycle = '', False
  c.data.path = c.data.heldout_path = ''
  c.evaluation.num_problems, c.supervised.num_steps = 1, 0  # made up and looked at for nothing
  c.supervised.workdir = ''
  if 'cpu' not in backends.BACKENDS[c.model.attention].platforms:
    c.model.attention = 'chunked'
  return c.lock()


def of_config(config: ConfigDict) -> list[Plan]:
  """`of_parts` without the files of the config. Its devices must be there; virtual ones do.

  Raises:
    ValueError: as `parts`.
  """
  return of_parts(parts(without_files(config)))


def of_parts(made: Parts) -> list[Plan]:
  """Of the fullest device; with `engine.apart`, of the fullest of the learner and of the fullest of the engine."""
  learner, engine = of_learner(made), of_engine(made)
  return [learner, engine] if made.config.engine.apart else [together(learner, engine)]


def together(*plans: Plan) -> Plan:
  """Of a device that does all of it."""
  merged = {name: {} for name in ('held', 'update', 'publish')}
  for plan in plans:
    for name, part in merged.items():
      part.update(getattr(plan, name))
  return Plan(**merged)


def device_memory() -> int:
  """Bytes that one device of this process may use; devices of a CPU share the machine's."""
  devices = jax.local_devices()
  stats = [device.memory_stats() or {} for device in devices]
  if all('bytes_limit' in x for x in stats):
    return min(x['bytes_limit'] for x in stats)
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // len(devices)


def check(plans: list[Plan], memory: int) -> None:
  """Refuses a run that does not fit a device of `memory` bytes.

  Raises:
    ValueError: says by how much, what is largest, and which fields would help.
  """
  plan = max(plans, key=lambda plan: plan.total)
  if plan.total <= memory:
    return
  name, size = max(plan.peak.items(), key=lambda item: item[1])
  raise ValueError(
    f'this needs {plan.total / GIB:.2f} GiB of a device, {(plan.total - memory) / GIB:.2f} GiB more than its '
    f'{memory / GIB:.2f} GiB; the largest part is {name}, {size / GIB:.2f} GiB: {REMEDIES[name]}'
  )


def of_learner(made: Parts) -> Plan:
  """Of the fullest device of the learner."""
  c, state = made.config, made.state
  tokens = batch_rows(c) * c.env.max_tokens // _cut(c, *sharding.BATCH, 'sequence')
  held = {
    'frozen backbone': _bytes(state.base),
    'policy parameters': _bytes(state.policy),
    'policy optimiser': _bytes(state.policy_opt, visitors=False),
    'critic parameters': _bytes(state.critic),
    'critic optimiser': _bytes(state.critic_opt, visitors=False),
    'errors of compressed sums': _bytes(state.errors),
    'batch': ARRAYS * 4 * tokens,
  }
  opts = state.policy_opt, state.critic_opt
  # It comes back if something is not finite. The policy's single step is decided before it is made.
  before = _bytes((state.critic, state.critic_opt, state.errors))
  if c.sao.policy_minibatches > 1:
    before += _bytes((state.policy, state.policy_opt))
  saved, layer = activations(c, made.model.model.vocab_size)
  tops = {'one layer': layer + _gathered(c, state), 'logits': _head(made)}
  update = {
    'state before the update': before + _bytes(opts) - _bytes(opts, visitors=False),
    # Of a micro-batch, and their sum; as much as AdamW's two moments, which frozen leaves do not have.
    'gradients': max(map(_bytes, opts)),
    'experts in another layout': _turned(c, state),
    'activations': saved,
    max(tops, key=tops.get): max(tops.values()),
  }
  return Plan(held, update, {'new engine weights': _bytes(_still_here(made))})


def of_engine(made: Parts) -> Plan:
  """Of a device of the engines: one samples for training, one for evaluation. A new policy arrives while the old one still samples."""
  c, model = made.config, made.model.engine_model
  weights = _bytes(made.model.exported)
  slots, rows = c.engine.num_slots, c.engine.prefill_rows
  cache = jax.eval_shape(lambda: model.init_cache(slots, c.env.max_tokens))
  cached, length = _bytes(cache) // (c.engine.tensor * c.engine.expert), cache[0].shape[3]

  def work(rows, size, copies):
    scores = c.model.num_heads // c.engine.tensor * size * (length + size)
    return round(copies * cached + 4 * rows * (SAMPLING * model.vocab_size + SCORES * scores))

  decode = work(slots, 1, SLICES / c.model.num_layers)
  prefill = work(rows, max(c.engine.prefill_buckets), PIECES * rows / slots)
  held = {
    'engine weights': 3 * weights,
    'KV caches': 2 * cached,
    'work of the engines': max(decode, prefill),  # programs of one device take turns
  }
  return Plan(held, {}, {'new engine weights': weights + _bytes(_still_here(made))})


def of_scoring(made: Parts) -> Plan:
  """Of a device that scores a checkpoint: the policy as it was saved, one copy of it for both engines, and those."""
  saved, engine = of_learner(made).held, of_engine(made).held
  policy = {name: saved[name] for name in ('frozen backbone', 'policy parameters')}
  return Plan({**policy, **engine, 'engine weights': engine['engine weights'] // 3}, {}, {})


def batch_rows(c: ConfigDict) -> int:
  """Rows of an update at most: an episode has at most one of its own."""
  multiple = c.train.micro_rows * c.sao.policy_minibatches
  return -(-c.train.batch_size // multiple) * multiple


def activations(c: ConfigDict, vocab_size: int) -> tuple[int, int]:
  """For a micro-batch, on one device: (bytes saved for the backward pass, bytes that stand in one layer of it)."""
  shape, axes = model_lib.shape_of(c, vocab_size), c.mesh
  rows = c.train.micro_rows // _cut(c, *sharding.BATCH)
  # Keys are gathered along 'sequence', so that 'xla' has scores for all of them: taken as if it had all queries, too.
  length = c.env.max_tokens // (1 if c.model.attention == 'xla' else axes.sequence)
  shape |= {name: shape[name] // axes.tensor for name in ('num_heads', 'num_kv_heads', 'mlp_width')}
  experts = shape['num_experts']
  if experts:
    shape['num_experts'] = max(experts // axes.expert, shape['experts_per_token'])
  thin = {**shape, 'num_experts': 0, 'mlp_width': 1}

  def saved(**changes):
    if not experts or axes.expert == 1:
      return _saved({**shape, **changes}, rows, length)
    group = rows * axes.expert  # whose tokens the experts of a device see
    of_experts = _saved({**shape, **changes}, group, length) - _saved(
      {**thin, **changes}, group, length
    )
    return _saved({**thin, **changes}, rows, length) + of_experts

  keys = 0
  if axes.sequence > 1:  # and values of the whole row, and their gradients in float32
    numbers = rows * c.env.max_tokens * shape['num_kv_heads'] * shape['head_dim']
    keys = 2 * numbers * (jnp.dtype(c.model.dtype).itemsize + 4)
  whole, layer = saved(), saved(remat='none', num_layers=1)
  if c.model.remat == 'none':  # its own saved arrays are among those of all layers
    return whole + keys * (c.model.num_layers - 1), round((LAYER - 1) * layer) + keys
  return whole, round(LAYER * layer) + keys


def _saved(shape: dict[str, Any], rows: int, length: int) -> int:
  """Bytes that JAX saves for the backward pass of a decoder on one device over [rows, length] tokens."""
  decoder = transformer.make(**shape, mesh=None)
  ints = jax.ShapeDtypeStruct((rows, length), jnp.int32)

  def residuals(params, *tokens):
    _, backward = jax.vjp(lambda params: decoder.apply(params, *tokens), params)
    given = {id(x) for x in jax.tree.leaves((params, tokens))}
    return [x for x in jax.tree.leaves(backward) if id(x) not in given]

  params = jax.eval_shape(decoder.init, jax.random.key(0))
  return _bytes(jax.eval_shape(residuals, params, ints, ints, ints))


def _gathered(c: ConfigDict, state: TrainState) -> int:
  """Kernels of one layer, gathered over 'fsdp' in float32; of those that learn also in the layout of a gather, and their gradients."""
  if c.mesh.fsdp == 1:
    return 0
  layers = [tree.get('layers', {}) for tree in (state.base, *3 * [state.policy])]
  return c.mesh.fsdp * _bytes(layers) // c.model.num_layers


def _turned(c: ConfigDict, state: TrainState) -> int:
  """Kernels of all experts of one network, which XLA copies so that what 'fsdp' cut comes first."""
  if c.mesh.fsdp == 1:
    return 0
  return _bytes([tree.get('layers', {}).get('moe', {}) for tree in (state.base, state.policy)])


def _head(made: Parts) -> int:
  """A chunk of the head: its logits, the hidden states in float32, and tables: the unembedding's gradient; with 'fsdp' the gathered
  unembedding, and the gradient summed over devices; in bfloat16 a copy of it."""
  c, axes = made.config, made.config.mesh
  rows, length = c.train.micro_rows * axes.sequence, c.env.max_tokens // axes.sequence
  columns = min(length, max(1, c.train.logprob_chunk // rows))  # as in heads.action_logprobs
  rows //= _cut(c, *sharding.BATCH, 'sequence')
  words, width = made.model.model.vocab_size // axes.tensor, c.model.width
  learned, gathered = c.model.lora_rank == 0, axes.fsdp > 1
  tables = learned + (learned and gathered)
  size = jnp.dtype(c.model.head_dtype).itemsize
  copies = size if gathered or size < 4 else 0
  tables = (4 * tables + copies) * words * width
  return 4 * (LOGITS * rows * columns * words + 3 * rows * length * width) + tables


def _still_here(made: Parts) -> Any:
  """A new policy for the engines while it still lies on the learner's mesh."""
  mesh, exported = made.model.mesh, made.model.exported
  if mesh is None:
    return ()
  return sharding.with_shardings(exported, sharding.tree_shardings(exported, mesh))


def _bytes(tree: Any, *, visitors: bool = True) -> int:
  """On one device; with or without what lives on the host and visits the device in an update."""

  def one(x):
    where = getattr(x, 'sharding', None)
    if not visitors and where is not None and where.memory_kind == 'pinned_host':
      return 0
    shape = x.shape if where is None else where.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def _cut(c: ConfigDict, *axes: str) -> int:
  """Devices along these axes of the learner's mesh."""
  return math.prod(c.mesh[axis] for axis in axes)
