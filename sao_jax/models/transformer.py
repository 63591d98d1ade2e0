"""A decoder of the Llama / Qwen3 family: flax.linen inside, pure functions outside.

Parameters are float32, stacked over layers on the leading axis, without biases:

  embed/embedding [V, D]    final_norm/scale [D]    unembed/kernel [V, D] (only when untied)
  layers/attention/{q,k,v}/kernel [L, D, heads, head_dim]    layers/attention/o/kernel [L, H, head_dim, D]
  layers/attention/{q_norm,k_norm}/scale [L, head_dim] (only with qk_norm)
  layers/{attention_norm,mlp_norm}/scale [L, D]
  layers/mlp/{gate,up}/kernel [L, D, F]    layers/mlp/down/kernel [L, F, D]
"""

from typing import Any

import jax
import jax.numpy as jnp

from sao_jax import types
from sao_jax.models import attention, decoder

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
  norm_eps: float,
  qk_norm: bool,
  tied: bool,
  dtype: str,
  remat: str,
) -> types.Model:
  """A decoder-only transformer as pure functions.

  RMSNorm before each half of a layer, RoPE, grouped-query attention, SwiGLU. Norms and softmax are float32, the rest
  is in the compute dtype.

    apply(params, tokens, positions, segment_ids) -> hidden: [B, T] each to [B, T, D]. Token i sees the tokens of its
      own segment up to itself. Whatever the tokens of padding (segment 0) are, they change nothing and give finite
      hidden states. A token outside the vocabulary gives NaN.
    init_cache(num_rows, num_positions) -> (keys, values), each zeros [L, num_rows, K, num_positions, head_dim].
    extend(params, cache, tokens, start) -> (hidden, cache): token j of row b is at position start[b] + j, sees cache
      positions before start[b] and the tokens up to itself. Its keys and values are written at its position, or
      nowhere if that is C or more. What the cache holds from start[b] on is never read. Layers only read the cache
      and one scatter at the end writes it, so that a donated cache is updated in place.

  Args:
    vocab_size: V.
    width: D.
    num_layers: L.
    num_heads: H, a multiple of num_kv_heads.
    num_kv_heads: K.
    head_dim: even, independent of D.
    mlp_width: F.
    rope_theta: base of the rotary frequencies.
    norm_eps: added to the mean square.
    qk_norm: RMSNorm of queries and keys over head_dim before rotation, as in Qwen3.
    tied: the unembedding is the embedding.
    dtype: compute dtype, 'float32' or 'bfloat16'.
    remat: 'none', or what the backward pass of a layer may keep: a name of `jax.checkpoint_policies`, see
      REMAT_POLICIES.

  Raises:
    ValueError: on sizes that do not fit together, an unknown dtype or remat policy.
  """
  if num_heads % num_kv_heads:
    raise ValueError(f'num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}')
  if head_dim % 2:
    raise ValueError(f'head_dim {head_dim} must be even: RoPE rotates pairs')
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype {dtype!r} must be 'float32' or 'bfloat16'")
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
    norm_eps=norm_eps,
    qk_norm=qk_norm,
    tied=tied,
    dtype=jnp.dtype(dtype),
    remat=remat,
  )
  return _pure_functions(shape)


def _pure_functions(shape: decoder.Shape) -> types.Model:
  over_rows = decoder.Decoder(shape, decoder.attend_packed)
  over_cache = decoder.Decoder(shape, decoder.attend_cached)

  def init(key):
    tokens = jnp.zeros((1, 1), jnp.int32)
    mask = jnp.ones((1, 1, 1), bool)
    return over_rows.init(key, tokens, tokens, mask, ())['params']

  def apply(params, tokens, positions, segment_ids):
    tokens = jnp.where(segment_ids > 0, tokens, 0)
    mask = attention.segment_mask(segment_ids)
    return over_rows.apply({'params': params}, tokens, positions, mask, ())[0]

  def init_cache(num_rows, num_positions):
    sizes = (shape.num_layers, num_rows, shape.num_kv_heads, num_positions, shape.head_dim)
    return jnp.zeros(sizes, shape.dtype), jnp.zeros(sizes, shape.dtype)

  def extend(params, cache, tokens, start):
    rows = jnp.arange(tokens.shape[0])[:, None]
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    hidden, new = over_cache.apply({'params': params}, tokens, positions, start, cache)

    def write(old, new):  # [L, B, K, C, head_dim], [L, B, T, K, head_dim]
      to = old.at[:, rows, :, positions]  # the two index arrays put [B, T] in front
      return to.set(jnp.moveaxis(new, 0, 2), mode='drop', unique_indices=True)

    return hidden, jax.tree.map(write, cache, new)

  def unembedding(params):
    return params['embed']['embedding'] if shape.tied else params['unembed']['kernel']

  return types.Model(init, apply, init_cache, extend, unembedding, shape.vocab_size)


def partition(params: Any) -> Any:
  """Labels every leaf 'attention' or 'rest', by exact path.

  Attention is the q, k, v and o projections, and the QK norms where there are any: they scale the attention scores, so
  that freezing the projections alone would leave the attention pattern free to move. The norms of the block, the
  embeddings, the MLP and the unembedding are the rest, as is anything that was added to the tree, such as a value head.

  Args:
    params: what `Model.init` returned, possibly with more entries.

  Returns:
    A pytree of str, shaped as params.

  Raises:
    ValueError: if a projection is not where it should be, or if nothing but attention is left.
  """
  base = ('layers', 'attention')
  projections = {(*base, name, 'kernel') for name in 'qkvo'}
  norms = {(*base, name, 'scale') for name in ('q_norm', 'k_norm')}

  def path_of(keys):
    return tuple(str(getattr(key, 'key', key)) for key in keys)

  paths = {path_of(keys) for keys, _ in jax.tree.leaves_with_path(params)}
  missing = projections - paths
  if missing:
    raise ValueError(f'no parameter at {sorted("/".join(path) for path in missing)}')
  if not paths - projections - norms:
    raise ValueError('every parameter is attention: pass the whole tree of the model')

  def label(keys, _):
    return 'attention' if path_of(keys) in projections | norms else 'rest'

  return jax.tree.map_with_path(label, params)


def partition_counts(params: Any, labels: Any) -> dict[str, tuple[int, int]]:
  """Leaves and parameters of each label: label -> (leaves, parameters)."""
  counts = {}
  for leaf, label in zip(jax.tree.leaves(params), jax.tree.leaves(labels), strict=True):
    leaves, parameters = counts.get(label, (0, 0))
    counts[label] = leaves + 1, parameters + leaf.size
  return counts
