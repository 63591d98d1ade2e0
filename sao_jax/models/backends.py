"""Ways to compute attention within packed rows, and what each of them can do.

Every back-end is a function `attend(q, k, v, queries, keys, offset, *, chunk, window, sinks)`:

  q [B, T, H, head_dim], k and v [B, C, K, head_dim], rotated; queries and keys are the Tokens of [B, T] and [B, C]; query i
  is at index offset + i of the row and key j at index j. Returns [B, T, H, head_dim] in the dtype of v.

A query sees a key that is `visible`. Scores and softmax are float32. `xla` and `chunked` run anywhere and are tested against a float64
loop. `cudnn` and `pallas` are thin calls of kernels that JAX brings. They are tested as far as a CPU can; no GPU or TPU ran them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOWEST = float(jnp.finfo(jnp.float32).min)  # finite: an empty block of scores gives no NaN
OUTSIDE = -1  # segment of what is added to fill a block
KERNEL_BLOCK = 128  # tokens: the kernels of `pallas` want whole blocks


class Tokens(NamedTuple):
  """Where tokens stand; both [B, T] int32."""

  positions: jax.Array  # in their segment, from 0
  segments: jax.Array  # 0 = padding


class Backend(NamedTuple):
  """What a back-end can do."""

  attend: Callable[..., jax.Array]
  platforms: tuple[str, ...]
  segments: bool  # keeps the segments of a packed row apart
  window: bool  # a window with sinks
  float32: bool
  context: bool  # queries of a part of the row: context parallel
  head_multiple: int  # head_dim must be a multiple
  head_limit: float  # and at most that
  note: str


def check(
  backend: str, *, platform: str, dtype: Any, head_dim: int, window: int, segments: bool
) -> None:
  """Refuses what a back-end cannot do.

  Args:
    backend: a name of BACKENDS.
    platform: 'cpu', 'gpu' or 'tpu', as `jax.default_backend()` says.
    dtype: of queries, keys and values.
    head_dim: of a head.
    window: 0 = full attention.
    segments: rows may hold more than one segment.

  Raises:
    ValueError: names the back-end, what it cannot do, and what to use instead.
  """
  if backend not in BACKENDS:
    raise ValueError(f'attention {backend!r} must be one of {", ".join(BACKENDS)}')
  can = BACKENDS[backend]
  refusals = (
    (platform not in can.platforms, f'run on {platform}, only on {" or ".join(can.platforms)}'),
    (segments and not can.segments, 'keep the segments of a packed row apart'),
    (window > 0 and not can.window, f'attend in a window ({window})'),
    (jnp.dtype(dtype) == jnp.float32 and not can.float32, 'compute in float32, only in bfloat16'),
    (head_dim % can.head_multiple != 0, f'take head_dim {head_dim}: no multiple of {can.head_multiple}'),
    (head_dim > can.head_limit, f'take head_dim {head_dim}: above {can.head_limit}'),
  )  # fmt: skip
  for refused, what in refusals:
    if refused:
      raise ValueError(f"attention '{backend}' cannot {what}: use 'chunked' or 'xla' ({can.note})")


def near(queries: jax.Array, keys: jax.Array, window: int, sinks: int) -> jax.Array:
  """[B, T, C] bool for positions [B, T] and [B, C]: less than `window` back, or one of the first `sinks` positions."""
  return (queries[:, :, None] - keys[:, None, :] < window) | (keys < sinks)[:, None, :]


def visible(
  queries: Tokens, keys: Tokens, offset: int | jax.Array, window: int, sinks: int
) -> jax.Array:
  """[B, T, C] bool: same segment, not later in the row, and near if there is a window.

  Padding (segment 0) sees the padding before it and itself, so that no row of the softmax is empty.
  """
  at = offset + jnp.arange(queries.segments.shape[1])
  causal = jnp.arange(keys.segments.shape[1]) <= at[:, None]
  mask = causal & (queries.segments[:, :, None] == keys.segments[:, None, :])
  return mask & near(queries.positions, keys.positions, window, sinks) if window else mask


def group(q: jax.Array, groups: int) -> jax.Array:
  """[B, T, H, head_dim] -> [B, K, H / K, T, head_dim]."""
  rows, size, heads, head_dim = q.shape
  return jnp.moveaxis(q.reshape(rows, size, groups, heads // groups, head_dim), 1, 3)


def ungroup(x: jax.Array) -> jax.Array:
  """[B, K, H / K, T, head_dim] -> [B, T, H, head_dim]."""
  x = jnp.moveaxis(x, 3, 1)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def scores(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
  """[B, K, H / K, T, C] float32 for grouped q, k [B, K, C, head_dim] and mask [B, T, C]."""
  products = jnp.einsum('bkgth,bkch->bkgtc', q, k, preferred_element_type=jnp.float32)
  return jnp.where(mask[:, None, None], products * q.shape[-1] ** -0.5, LOWEST)


def mix(weights: jax.Array, v: jax.Array) -> jax.Array:
  """Weighted sum of v [B, K, C, head_dim], as grouped queries."""
  return jnp.einsum('bkgtc,bkch->bkgth', weights, v)


def xla(q, k, v, queries, keys, offset, *, chunk, window, sinks):
  """The reference: all scores [B, H, T, C] at once."""
  del chunk
  mask = visible(queries, keys, offset, window, sinks)
  k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  weights = jax.nn.softmax(scores(group(q, k.shape[1]), k, mask), axis=-1).astype(v.dtype)
  return ungroup(mix(weights, v))


def chunked(q, k, v, queries, keys, offset, *, chunk, window, sinks):
  """Online softmax over blocks of `chunk` keys, for one block of `chunk` queries after the other.

  Memory is O(T + chunk^2) forward and backward: the backward pass computes the scores again, from the log of the softmax's denominator. A
  block without a visible pair costs its mask only: the future, other segments, what left the window.
  Source: FlashAttention, arXiv 2205.14135, algorithms 1 and 4.
  """
  if chunk < 1:
    raise ValueError(f'attention_chunk is {chunk}: must be at least 1 position')
  size = q.shape[1]
  chunk = min(chunk, k.shape[1])
  q, queries = _fill(q, chunk), _fill_tokens(queries, chunk)
  k, v, keys = _fill(k, chunk), _fill(v, chunk), _fill_tokens(keys, chunk)
  k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  q = group(q, k.shape[1])
  out = _chunked(q, k, v, queries, keys, jnp.asarray(offset), chunk, window, sinks)
  return ungroup(out)[:, :size]


def cudnn(q, k, v, queries, keys, offset, *, chunk, window, sinks):
  """cuDNN's flash attention. Segments and window are a mask [B, 1, T, T], which cuDNN reads as a bias."""
  del chunk
  size = q.shape[1]
  q, k, v = (_fill(x, 2) for x in (q, k, v))  # its gradient with a bias wants even sizes
  queries, keys = _fill_tokens(queries, 2), _fill_tokens(keys, 2)
  mask = visible(queries, keys, offset, window, sinks)[:, None]
  return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation='cudnn')[:, :size]


def pallas(q, k, v, queries, keys, offset, *, chunk, window, sinks):
  """The flash attention kernels of jax.experimental.pallas.ops, which know segments but no window."""
  del keys, offset, chunk, window, sinks
  kernel = _pallas_tpu if jax.default_backend() == 'tpu' else _pallas_gpu
  return kernel(q, k, v, queries.segments)


def _pallas_gpu(q, k, v, segments, interpret=False):
  from jax.experimental.pallas.ops.gpu import attention as kernels

  q, k, v, segments, size = _whole_blocks(q, k, v, segments)
  scale = q.shape[-1] ** -0.5
  return kernels.mha(q, k, v, segments, sm_scale=scale, causal=True, interpret=interpret)[:, :size]


def _pallas_tpu(q, k, v, segments):
  from jax.experimental.pallas.ops.tpu import flash_attention as kernels

  q, k, v, segments, size = _whole_blocks(q, k, v, segments)
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  both, scale = kernels.SegmentIds(segments, segments), q.shape[-1] ** -0.5
  out = kernels.flash_attention(q, k, v, segment_ids=both, causal=True, sm_scale=scale)
  return jnp.swapaxes(out, 1, 2)[:, :size]


def _whole_blocks(q, k, v, segments):
  """One key/value head a query head, whole blocks, and T before that."""
  size, repeats = q.shape[1], q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
  q, k, v = (_fill(x, KERNEL_BLOCK) for x in (q, k, v))
  return q, k, v, _fill(segments, KERNEL_BLOCK, OUTSIDE), size


def _fill(x, multiple, value=0):
  """Makes axis 1 a multiple."""
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, -x.shape[1] % multiple)
  return jnp.pad(x, widths, constant_values=value)


def _fill_tokens(tokens, multiple):
  return Tokens(_fill(tokens.positions, multiple), _fill(tokens.segments, multiple, OUTSIDE))


# The blocks of `chunked`. Queries are grouped and keys have heads first, all in whole blocks.


def _block(x, index, chunk, axis):
  return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis)


def _masks(queries, keys, offset, chunk, window, sinks):
  """(i, j) -> [B, chunk, chunk], and i -> number of key blocks that are not wholly in the future."""

  def mask(i, j):
    some, others = (
      Tokens(*(_block(x, index, chunk, 1) for x in tokens))
      for tokens, index in ((queries, i), (keys, j))
    )
    return visible(some, others, offset + (i - j) * chunk, window, sinks)

  def stop(i):
    last = offset + (i + 1) * chunk - 1
    return jnp.minimum(last // chunk + 1, keys.segments.shape[1] // chunk)

  return mask, stop


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _chunked(q, k, v, queries, keys, offset, chunk, window, sinks):
  return _forward(q, k, v, queries, keys, offset, chunk, window, sinks)[0]


def _forward(q, k, v, queries, keys, offset, chunk, window, sinks):
  mask_of, stop = _masks(queries, keys, offset, chunk, window, sinks)

  def attend(i):
    q_i = _block(q, i, chunk, 3)

    def step(j, carry):
      mask = mask_of(i, j)

      def update(carry):
        top, total, mixed = carry
        k_j, v_j = _block(k, j, chunk, 2), _block(v, j, chunk, 2)
        s = scores(q_i, k_j, mask)
        new_top = jnp.maximum(top, s.max(axis=-1))
        weights = jnp.where(mask[:, None, None], jnp.exp(s - new_top[..., None]), 0.0)
        fade = jnp.exp(top - new_top)
        mixed = mixed * fade[..., None] + _dot('bkgtc,bkch->bkgth', weights.astype(v.dtype), v_j)
        return new_top, total * fade + weights.sum(axis=-1), mixed

      return jax.lax.cond(mask.any(), update, lambda carry: carry, carry)

    empty = jnp.zeros(q_i.shape[:-1])
    carry = jnp.full_like(empty, LOWEST), empty, jnp.zeros(q_i.shape, jnp.float32)
    top, total, mixed = jax.lax.fori_loop(0, stop(i), step, carry)
    total = jnp.where(total > 0, total, 1.0)  # of a query that only fills a block
    return (mixed / total[..., None]).astype(v.dtype), top + jnp.log(total)

  out, normalizer = jax.lax.map(attend, jnp.arange(q.shape[3] // chunk))
  out, normalizer = _join(out), _join(normalizer)
  return out, (q, k, v, queries, keys, offset, out, normalizer)


def _backward(chunk, window, sinks, residuals, d_out):
  q, k, v, queries, keys, offset, out, normalizer = residuals
  mask_of, stop = _masks(queries, keys, offset, chunk, window, sinks)
  scale = q.shape[-1] ** -0.5

  def attend(carry, i):
    q_i, out_i, d_i, log_i = (_block(x, i, chunk, 3) for x in (q, out, d_out, normalizer))
    shared = jnp.sum(out_i.astype(jnp.float32) * d_i.astype(jnp.float32), axis=-1)

    def step(j, carry):
      mask = mask_of(i, j)
      k_j, v_j = _block(k, j, chunk, 2), _block(v, j, chunk, 2)

      def compute():
        s = scores(q_i, k_j, mask)
        weights = jnp.where(mask[:, None, None], jnp.exp(s - log_i[..., None]), 0.0)
        d_weights = _dot('bkgth,bkch->bkgtc', d_i, v_j)
        d_scores = (weights * (d_weights - shared[..., None]) * scale).astype(q.dtype)
        return (
          _dot('bkgtc,bkch->bkgth', d_scores, k_j),
          _dot('bkgtc,bkgth->bkch', d_scores, q_i),
          _dot('bkgtc,bkgth->bkch', weights.astype(v.dtype), d_i),
        )

      def nothing():
        return tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_i, k_j, v_j))

      # Blocks leave the branch, not the whole of d_k and d_v: those stay in place.
      more_q, more_k, more_v = jax.lax.cond(mask.any(), compute, nothing)
      d_q, d_k, d_v = carry
      return d_q + more_q, _add_block(d_k, more_k, j), _add_block(d_v, more_v, j)

    d_q = jnp.zeros(q_i.shape, jnp.float32)
    d_q, d_k, d_v = jax.lax.fori_loop(0, stop(i), step, (d_q, *carry))
    return (d_k, d_v), d_q.astype(q.dtype)

  zero = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  (d_k, d_v), d_q = jax.lax.scan(attend, zero, jnp.arange(q.shape[3] // chunk))
  return _join(d_q), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None


_chunked.defvjp(_forward, _backward)


def _join(x):
  """Blocks [N, B, K, H / K, chunk, ...] -> [B, K, H / K, N chunk, ...]."""
  x = jnp.moveaxis(x, 0, 3)
  return x.reshape(*x.shape[:3], -1, *x.shape[5:])


def _add_block(x, more, index):
  start = index * more.shape[2]
  more = more + jax.lax.dynamic_slice_in_dim(x, start, more.shape[2], 2)
  return jax.lax.dynamic_update_slice_in_dim(x, more, start, 2)


def _dot(equation, x, y):
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


ANYWHERE = ('cpu', 'gpu', 'tpu')
BACKENDS = {
  'xla': Backend(
    attend=xla, platforms=ANYWHERE, segments=True, window=True, float32=True, context=True,
    head_multiple=1, head_limit=math.inf, note='holds all scores: memory grows with T^2',
  ),
  'chunked': Backend(
    attend=chunked, platforms=ANYWHERE, segments=True, window=True, float32=True, context=True,
    head_multiple=1, head_limit=math.inf, note='memory grows with T',
  ),
  'cudnn': Backend(
    attend=cudnn, platforms=('gpu',), segments=True, window=True, float32=False, context=False,
    head_multiple=8, head_limit=256, note='needs a mask [B, 1, T, T]; head_dim above 128 from Hopper on; not run on the hardware',
  ),
  'pallas': Backend(
    attend=pallas, platforms=('gpu', 'tpu'), segments=True, window=False, float32=False, context=False,
    head_multiple=16, head_limit=128, note='repeats keys and values to H heads; not run on the hardware',
  ),
}  # fmt: skip
