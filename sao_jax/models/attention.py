"""Rotary positions and grouped-query attention, over a packed row or over a cache. Arrays in, arrays out.

Scores and softmax are float32 whatever the compute dtype. Group g of the query heads shares key/value head g, as in
the checkpoints of Llama and Qwen3: query head h reads key/value head h // (H / K).
"""

import jax
import jax.numpy as jnp


def rotation(positions: jax.Array, *, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines of RoPE, [B, T, head_dim / 2] float32, for positions [B, T].

  Frequency i is theta^(-2 i / head_dim). Source: RoFormer, arXiv 2104.09864.
  """
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  angles = positions.astype(jnp.float32)[..., None] * theta**-exponents
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates [B, T, heads, head_dim]: coordinate i pairs with i + head_dim / 2 (half-split, not interleaved)."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None], sin[:, :, None]
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


def segment_mask(segment_ids: jax.Array) -> jax.Array:
  """[B, T] -> [B, T, T] bool: query i sees key j <= i of its own segment.

  Padding (segment 0) sees the padding before it and itself, so that no row of the softmax is empty.
  """
  size = segment_ids.shape[1]
  causal = jnp.tril(jnp.ones((size, size), bool))
  return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def packed(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """Attention within packed rows.

  Args:
    q: [B, T, H, head_dim], rotated.
    k: [B, T, K, head_dim], rotated.
    v: [B, T, K, head_dim].
    mask: [B, T, T] bool, see `segment_mask`.

  Returns:
    [B, T, H, head_dim] in the dtype of v.
  """
  k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  weights = jax.nn.softmax(_scores(_group(q, k), k, mask), axis=-1).astype(v.dtype)
  return _ungroup(_mix(weights, v))


def cached(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  cache: tuple[jax.Array, jax.Array],
  start: jax.Array,
) -> jax.Array:
  """Attention of T new tokens to the cache and to themselves.

  Only cache positions before `start` are read: the rest is stale or garbage, NaN included, and changes nothing.

  Args:
    q: [B, T, H, head_dim], rotated; token j of row b is at position start[b] + j.
    k: [B, T, K, head_dim] of the new tokens, rotated.
    v: [B, T, K, head_dim] of the new tokens.
    cache: keys and values, each [B, K, C, head_dim]: heads first, so that no step transposes the cache.
    start: [B] int32.

  Returns:
    [B, T, H, head_dim] in the dtype of v.
  """
  old_k, old_v = cache
  k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  size, length = k.shape[2], old_k.shape[2]
  known = jnp.arange(length) < start[:, None]  # [B, C]
  causal = jnp.tril(jnp.ones((size, size), bool))
  q = _group(q, k)
  scores = [_scores(q, old_k, known[:, None]), _scores(q, k, causal[None])]
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(v.dtype)
  old_v = jnp.where(known[:, None, :, None], old_v, 0)  # a weight of 0 would not silence a NaN
  return _ungroup(_mix(weights[..., :length], old_v) + _mix(weights[..., length:], v))


def _group(q, k):
  """[B, T, H, head_dim] -> [B, K, H / K, T, head_dim] for k [B, K, keys, head_dim]."""
  rows, size, heads, head_dim = q.shape
  groups = k.shape[1]
  return jnp.moveaxis(q.reshape(rows, size, groups, heads // groups, head_dim), 1, 3)


def _ungroup(x):
  """[B, K, H / K, T, head_dim] -> [B, T, H, head_dim]."""
  x = jnp.moveaxis(x, 3, 1)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(q, k, mask):
  """[B, K, H / K, T, keys] float32 for grouped q, k [B, K, keys, head_dim] and mask [B, T, keys]."""
  scores = jnp.einsum('bkgth,bkch->bkgtc', q, k, preferred_element_type=jnp.float32)
  lowest = jnp.finfo(jnp.float32).min
  return jnp.where(mask[:, None, None], scores * q.shape[-1] ** -0.5, lowest)


def _mix(weights, v):
  """Weighted sum of v [B, K, keys, head_dim], as grouped queries."""
  return jnp.einsum('bkgtc,bkch->bkgth', weights, v)
