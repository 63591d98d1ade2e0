"""A decoder of the Llama / Qwen2.5 / Qwen3 / Qwen3-MoE family: flax.linen inside, pure functions outside.

Parameters are float32, stacked over layers on the leading axis:

  embed/embedding [V, D]    final_norm/scale [D]    unembed/kernel [V, D] (only when untied)
  layers/attention/{q,k,v}/kernel [L, D, heads, head_dim]    layers/attention/{q,k,v}/bias [L, heads, head_dim] (only with qkv_bias)
  layers/attention/o/kernel [L, H, head_dim, D]
  layers/attention/{q_norm,k_norm}/scale [L, head_dim] (only with qk_norm)
  layers/{attention_norm,mlp_norm}/scale [L, D]
  layers/mlp/{gate,up}/kernel [L, D, F]    layers/mlp/down/kernel [L, F, D] (without experts)
  layers/moe/router/kernel [L, D, E]    layers/moe/{gate,up}/kernel [L, E, D, F]    layers/moe/down/kernel [L, E, F, D] (with experts)
  beside a kernel of attention or mlp: lora_a [L, *in, r]    lora_b [L, r, *out] (only with lora_rank)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sao_jax import sharding, types
from sao_jax.models import attention as kernels
from sao_jax.models import decoder

REMAT_POLICIES = (
  'nothing_saveable',
  'dots_saveable',
  'dots_with_no_batch_dims_saveable',
)


def make(
  *,
  vocab_size: int,
  width: int,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  mlp_width: int,
  rope_theta: float,
  rope_scaling: Mapping[str, float] | None,
  norm_eps: float,
  qk_norm: bool,
  qkv_bias: bool,
  tied: bool,
  num_experts: int,
  experts_per_token: int,
  normalize_topk: bool,
  expert_backend: str,
  attention: str,
  attention_chunk: int,
  window: int,
  sinks: int,
  lora_rank: int,
  lora_alpha: float,
  dtype: str,
  head_dtype: str,
  remat: str,
  mesh: Mesh | None,
) -> types.Model:
  """A decoder-only transformer as pure functions.

  RMSNorm before each half of a layer, RoPE, grouped-query attention, SwiGLU, perhaps of experts. Norms, softmax and router are
  float32, the rest is in the compute dtype.

    apply(params, tokens, positions, segment_ids) -> hidden: [B, T] each to [B, T, D]. Token i sees the tokens of its
      own segment up to itself. Whatever the tokens of padding (segment 0) are, they change nothing and give finite
      hidden states. A token outside the vocabulary gives NaN.
    observe(params, tokens, positions, segment_ids) -> (hidden, load): load [L, E] float32, tokens that are no padding sent to each
      expert; [L, 0] without experts.
    init_cache(num_rows, num_positions) -> (keys, values), each zeros [L, num_rows, K, C, head_dim]. C is num_positions, or
      sinks + window if that is less: then it is a ring, and extend overwrites what left the window.
    extend(params, cache, tokens, start, counts) -> (hidden, cache): token j of row b is at position start[b] + j, sees cache
      positions before start[b] and the tokens up to itself. Keys and values of the first counts[b] tokens of a row are written, below
      num_positions; the tokens after them are padding. What the cache holds from start[b] on is never read. Layers only read the cache
      and one scatter at the end writes it, so that a donated cache is updated in place.

  Args:
    vocab_size: V.
    width: D.
    num_layers: L.
    num_heads: H, a multiple of num_kv_heads.
    num_kv_heads: K.
    head_dim: even, independent of D.
    mlp_width: F, of one expert if there are some.
    rope_theta: base of the rotary frequencies.
    rope_scaling: None, or Llama 3's numbers, see `attention.rotation`.
    norm_eps: added to the mean square.
    qk_norm: RMSNorm of queries and keys over head_dim before rotation, as in Qwen3.
    qkv_bias: as in Qwen2.5.
    tied: the unembedding is the embedding.
    num_experts: E; 0: a dense decoder.
    experts_per_token: of E.
    normalize_topk: the weights of the chosen experts add up to 1.
    expert_backend: see `moe`.
    attention: a back-end, see `backends`.
    attention_chunk: positions of a block, of back-ends that have blocks.
    window: positions that a token sees back, itself included; 0: all.
    sinks: first positions of a segment that every token sees, with a window.
    lora_rank: r of the adapters beside the projections of attention and mlp, see `lora`; 0: none.
    lora_alpha: their scale is lora_alpha / r.
    dtype: compute dtype, 'float32' or 'bfloat16'.
    head_dtype: of the operands of the logits, which accumulate in float32; 'bfloat16' only where dtype is. `unembedding` returns it.
    remat: 'none', or what the backward pass of a layer may keep: a name of `jax.checkpoint_policies`, see
      REMAT_POLICIES.
    mesh: of `sharding.make_mesh`, where apply and extend run; None: one device, or wherever the parameters lie.

  Raises:
    ValueError: on sizes that do not fit together, an unknown dtype or remat policy.
  """
  if num_heads % num_kv_heads:
    raise ValueError(f'num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}')
  if head_dim % 2:
    raise ValueError(f'head_dim {head_dim} must be even: RoPE rotates pairs')
  if num_experts and not 1 <= experts_per_token <= num_experts:
    raise ValueError(
      f'experts_per_token {experts_per_token} must be from 1 to num_experts {num_experts}'
    )
  if window < 0 or sinks < 0 or lora_rank < 0 or (sinks and not window):
    raise ValueError(
      f'window {window}, sinks {sinks} and lora_rank {lora_rank} must be 0 or more, and sinks need a window'
    )
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype {dtype!r} must be 'float32' or 'bfloat16'")
  if head_dtype not in ('float32', dtype):
    raise ValueError(f"head_dtype {head_dtype!r} must be 'float32', or the dtype {dtype!r}")
  if remat != 'none' and remat not in REMAT_POLICIES:
    raise ValueError(f"remat {remat!r} must be 'none' or one of {REMAT_POLICIES}")
  shape = decoder.Shape(
    vocab_size=vocab_size,
    width=width,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_width=mlp_width,
    rope_theta=rope_theta,
    rope_scaling=tuple(sorted(rope_scaling.items())) if rope_scaling else None,
    norm_eps=norm_eps,
    qk_norm=qk_norm,
    qkv_bias=qkv_bias,
    tied=tied,
    num_experts=num_experts,
    experts_per_token=experts_per_token,
    normalize_topk=normalize_topk,
    expert_backend=expert_backend,
    attention=attention,
    attention_chunk=attention_chunk,
    window=window,
    sinks=sinks,
    lora_rank=lora_rank,
    lora_alpha=lora_alpha,
    dtype=jnp.dtype(dtype),
    head_dtype=jnp.dtype(head_dtype),
    remat=remat,
    mesh=mesh,
  )
  return _pure_functions(shape)


def _pure_functions(shape: decoder.Shape) -> types.Model:
  over_rows = decoder.Decoder(shape, decoder.attend_packed)
  over_cache = decoder.Decoder(shape, decoder.attend_cached)
  ring = {'window': shape.window, 'sinks': shape.sinks}

  def init(key):
    plain = dataclasses.replace(shape, mesh=None, attention='xla')  # one token fits no mesh
    one = jnp.zeros((1, 1), jnp.int32)
    module = decoder.Decoder(plain, decoder.attend_packed)
    return module.init(key, one, one, (one, one), one > 0, ())['params']

  def observe(params, tokens, positions, segment_ids):
    valid = segment_ids > 0
    tokens = jnp.where(valid, tokens, 0)
    rows = positions, segment_ids
    hidden, _, load = over_rows.apply({'params': params}, tokens, positions, rows, valid, ())
    return hidden, load

  def init_cache(num_rows, num_positions):
    length = kernels.cache_length(num_positions, **ring)
    sizes = (shape.num_layers, num_rows, shape.num_kv_heads, length, shape.head_dim)
    return jnp.zeros(sizes, shape.dtype), jnp.zeros(sizes, shape.dtype)

  def extend(params, cache, tokens, start, counts):
    rows, size = jnp.arange(tokens.shape[0])[:, None], tokens.shape[1]
    positions = start[:, None] + jnp.arange(size)
    valid = jnp.arange(size) < counts[:, None]
    hidden, new, _ = over_cache.apply({'params': params}, tokens, positions, start, valid, cache)
    slots = kernels.cache_slots(start, size, length=cache[0].shape[3], counts=counts, **ring)

    def write(old, new):  # [L, B, K, C, head_dim], [L, B, T, K, head_dim]
      to = old.at[:, rows, :, slots]  # the two index arrays put [B, T] in front
      return to.set(jnp.moveaxis(new, 0, 2), mode='drop', unique_indices=True)

    return hidden, jax.tree.map(write, cache, new)

  def unembedding(params):
    table = params['embed']['embedding'] if shape.tied else params['unembed']['kernel']
    return table.astype(shape.head_dtype)

  return types.Model(
    init=init,
    apply=lambda *args: observe(*args)[0],
    observe=observe,
    init_cache=init_cache,
    extend=extend,
    unembedding=unembedding,
    vocab_size=shape.vocab_size,
  )


GROUPS = ('attention', 'router', 'experts', 'rest')


def partition(params: Any) -> Any:
  """Labels every leaf with one of GROUPS, by exact path.

  Attention is the q, k, v and o projections with their biases and adapters, and the QK norms where there are any: they scale the
  attention scores, so that freezing the projections alone would leave the attention pattern free to move. Router and experts are
  those of a mixture. The norms of the block, the embeddings, the MLP and the unembedding are the rest, as is anything that was
  added to the tree, such as a value head.

  Args:
    params: what `Model.init` returned, or its adapters, possibly with more entries.

  Returns:
    A pytree of str, shaped as params.

  Raises:
    ValueError: if a projection is not where it should be.
  """
  labels = jax.tree.map_with_path(lambda keys, _: _group_of(sharding.path_of(keys)), params)
  there = params.get('layers', {}).get('attention', {})
  missing = [f'layers/attention/{name}' for name in 'qkvo' if not there.get(name)]
  if missing:
    raise ValueError(f'no parameter at {missing}')
  return labels


def _group_of(path: str) -> str:
  match path.split('/'):
    case ['layers', 'attention', 'q' | 'k' | 'v' | 'o', 'kernel' | 'bias' | 'lora_a' | 'lora_b']:
      return 'attention'
    case ['layers', 'attention', 'q_norm' | 'k_norm', 'scale']:
      return 'attention'
    case ['layers', 'moe', 'router', 'kernel']:
      return 'router'
    case ['layers', 'moe', 'gate' | 'up' | 'down', 'kernel']:
      return 'experts'
  return 'rest'


def partition_counts(params: Any, labels: Any) -> dict[str, tuple[int, int]]:
  """Leaves and parameters of each label: label -> (leaves, parameters)."""
  counts = {}
  for leaf, label in zip(jax.tree.leaves(params), jax.tree.leaves(labels), strict=True):
    leaves, parameters = counts.get(label, (0, 0))
    counts[label] = leaves + 1, parameters + leaf.size
  return counts
