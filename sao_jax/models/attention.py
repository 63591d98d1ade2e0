"""Rotary positions and grouped-query attention, over a packed row or over a cache. Arrays in, arrays out.

Scores and softmax are float32 whatever the compute dtype. Group g of the query heads shares key/value head g, as in
the checkpoints of Llama and Qwen3: query head h reads key/value head h // (H / K).

With window > 0 a token sees the `window` last positions, itself included, and the first `sinks` positions of its segment (attention sinks,
arXiv 2309.17453; positions are those of the text, not of the cache). window 0 is full attention.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from sao_jax import sharding
from sao_jax.models import backends

SCALING = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position')


def rotation(
  positions: jax.Array, *, head_dim: int, theta: float, scaling: Mapping[str, float] | None
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines of RoPE, [B, T, head_dim / 2] float32, for positions [B, T].

  Frequency i is f = theta^(-2 i / head_dim). With scaling it is (1 - s) f / factor + s f, where with n = original_max_position f / (2 pi)
  turns in the original context s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor), clipped to [0, 1].

  Args:
    positions: [B, T] int.
    head_dim: even.
    theta: base.
    scaling: None, or Llama 3's numbers: the keys of SCALING.

  Raises:
    ValueError: if scaling has other keys, or high_freq_factor is not above low_freq_factor.

  Source: RoFormer, arXiv 2104.09864; the scaling is that of the Llama 3.1 models.
  """
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = theta**-exponents
  if scaling is not None:
    frequencies = _scaled(frequencies, scaling)
  angles = positions.astype(jnp.float32)[..., None] * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def _scaled(frequencies, scaling):
  if set(scaling) != set(SCALING):
    raise ValueError(f'rope_scaling has {sorted(scaling)}: must have exactly {", ".join(SCALING)}')
  factor, low, high, length = (scaling[key] for key in SCALING)
  if not (high > low and factor > 0 and length > 0):
    raise ValueError(f'rope_scaling {dict(scaling)}: high_freq_factor must be above low_freq_factor, and factor and length > 0')  # fmt: skip
  turns = length * frequencies / (2 * math.pi)
  kept = jnp.clip((turns - low) / (high - low), 0, 1)
  return (1 - kept) * frequencies / factor + kept * frequencies


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates [B, T, heads, head_dim]: coordinate i pairs with i + head_dim / 2 (half-split, not interleaved)."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None], sin[:, :, None]
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


def packed(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  backend: str,
  chunk: int,
  window: int,
  sinks: int,
  mesh: Mesh | None,
) -> jax.Array:
  """Attention within packed rows: a token sees its own segment up to itself, and of that the window and the sinks.

  On a mesh each device attends with its own rows, heads and queries (shard_map); keys and values are gathered along 'sequence' (context
  parallel), whose last device has the most to see. Only 'xla' without 'sequence' is left to the partitioner.

  Args:
    q: [B, T, H, head_dim], rotated.
    k: [B, T, K, head_dim], rotated.
    v: [B, T, K, head_dim].
    positions: [B, T] int, from 0 in each segment. Only a window reads them.
    segment_ids: [B, T] int, 0 = padding, whose values must be finite.
    backend: a name of `backends.BACKENDS`.
    chunk: positions of a block; T needs not be a multiple. Read by 'chunked'.
    window: 0 = full attention.
    sinks: read with a window.
    mesh: axes 'data', 'fsdp', 'tensor', 'expert' and 'sequence', or None.

  Returns:
    [B, T, H, head_dim] in the dtype of v.

  Raises:
    ValueError: if the back-end cannot do this here, or the arrays do not divide by the mesh. Nothing falls back in silence.
  """
  backends.check(
    backend,
    platform=jax.default_backend(),
    dtype=q.dtype,
    head_dim=q.shape[-1],
    window=window,
    segments=True,
  )
  attend = functools.partial(
    backends.BACKENDS[backend].attend, chunk=chunk, window=window, sinks=sinks
  )
  tokens = backends.Tokens(positions, segment_ids)
  if mesh is None or mesh.size == 1 or (backend == 'xla' and mesh.shape['sequence'] == 1):
    return attend(q, k, v, tokens, tokens, 0)
  _check_mesh(mesh, backend, k)
  return _on_mesh(attend, mesh)(q, k, v, tokens)


def _check_mesh(mesh, backend, k):
  if mesh.shape['sequence'] > 1 and not backends.BACKENDS[backend].context:
    raise ValueError(
      f"attention '{backend}' cannot cut a row over mesh axis 'sequence': use 'chunked' or 'xla'"
    )
  for what, number, axes in (
    ('rows of the batch', k.shape[0], sharding.BATCH),
    ('token positions of a row', k.shape[1], ('sequence',)),
    ('num_kv_heads', k.shape[2], ('tensor',)),
  ):
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if number % parts:
      raise ValueError(
        f'{number} {what} do not divide by the {parts} devices of mesh axes {axes}: change one'
      )


def _on_mesh(attend, mesh):
  def local(q, k, v, tokens):
    offset, keys = 0, tokens
    if mesh.shape['sequence'] > 1:
      gather = functools.partial(jax.lax.all_gather, axis_name='sequence', axis=1, tiled=True)
      offset = jax.lax.axis_index('sequence') * q.shape[1]
      k, v, keys = jax.tree.map(gather, (k, v, tokens))
    return attend(q, k, v, tokens, keys, offset)

  heads = PartitionSpec(sharding.BATCH, 'sequence', 'tensor')
  specs = (heads, heads, heads, PartitionSpec(sharding.BATCH, 'sequence'))
  return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)


def cache_length(num_positions: int, *, window: int, sinks: int) -> int:
  """C, the cache positions of a slot that reaches num_positions: all of them, or the sinks and a ring of the window."""
  return min(num_positions, sinks + window) if window else num_positions


def cache_slots(
  start: jax.Array,
  size: int,
  *,
  length: int,
  window: int,
  sinks: int,
  counts: jax.Array | None = None,
) -> jax.Array:
  """Where the keys and values of new tokens go.

  Position p lives at slot p, or with a window, from `sinks` on, at slot sinks + (p - sinks) % window. Of tokens that share a slot the last
  is written. What is not written has slots from `length` on, so that no two tokens of a row have the same one.

  Args:
    start: [B] int32, position of the first token.
    size: T, new tokens of a row.
    length: C of `cache_length`.
    window: 0 = a slot for each position; those from C on are not written.
    sinks: read with a window.
    counts: [B] int32, the tokens of a row that are real, 0 for a row at rest: the rest of the T is not written. A ring needs them: it
      would lose old tokens to padding. None: all are.

  Returns:
    [B, T] int32.

  Raises:
    ValueError: if there is a window and no counts.
  """
  if window and counts is None:
    raise ValueError('counts is None: a ring of keys must know which of the new tokens are real')
  index = jnp.arange(size, dtype=jnp.int32)
  slots = positions = start[:, None] + index
  if window:
    slots = jnp.where(positions < sinks, positions, sinks + (positions - sinks) % window)
  written = slots < length
  if counts is not None:
    end = (start + counts)[:, None]
    written &= positions < end
    if window:
      written &= (positions < sinks) | (positions + window >= end)
  return jnp.where(written, slots, length + index)


def cached(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  cache: tuple[jax.Array, jax.Array],
  start: jax.Array,
  *,
  window: int,
  sinks: int,
) -> jax.Array:
  """Attention of T new tokens to the cache and to themselves, T more than the window included.

  Only positions before `start` are read: the rest is stale or garbage, NaN included, and changes nothing. A ring has
  forgotten what its newest tokens replaced: there `start` may go back by one position, not by more.

  Args:
    q: [B, T, H, head_dim], rotated; token j of row b is at position start[b] + j.
    k: [B, T, K, head_dim] of the new tokens, rotated.
    v: [B, T, K, head_dim] of the new tokens.
    cache: keys and values, each [B, K, C, head_dim]: heads first, so that no step transposes the cache. With a window, position p
      is where `cache_slots` puts it.
    start: [B] int32.
    window: 0 = full attention.
    sinks: read with a window.

  Returns:
    [B, T, H, head_dim] in the dtype of v.
  """
  old_k, old_v = cache
  k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  size, length = k.shape[2], old_k.shape[2]
  slots = jnp.arange(length)
  causal = jnp.tril(jnp.ones((size, size), bool))[None]
  if window:
    last = start[:, None] - 1
    # The latest position before `start` that lives there; below its slot's own number if there is none.
    held = jnp.where(slots < sinks, slots, last - (last - slots) % window)
    known = (held >= slots) & (held <= last)  # [B, C]
    positions = start[:, None] + jnp.arange(size)
    seen = known[:, None] & backends.near(positions, held, window, sinks)
    causal = causal & backends.near(positions, positions, window, sinks)
  else:
    known = slots < start[:, None]  # [B, C]
    seen = known[:, None]
  q = backends.group(q, k.shape[1])
  scores = [backends.scores(q, old_k, seen), backends.scores(q, k, causal)]
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(v.dtype)
  old_v = jnp.where(known[:, None, :, None], old_v, 0)  # a weight of 0 would not silence a NaN
  old, new = weights[..., :length], weights[..., length:]
  return backends.ungroup(backends.mix(old, old_v) + backends.mix(new, v))
