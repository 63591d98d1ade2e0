"""Sums over a slow mesh axis that send fewer bytes: bfloat16 or int8, with error feedback. Pure functions under `jax.shard_map`.

What rounding loses of a gradient is added to the next one, so that over many steps nothing is lost. Source: error feedback
(1-bit SGD, Seide et al. 2014; EF-SGD, arXiv 1901.09847).
"""

from typing import Any

import jax
import jax.numpy as jnp

KINDS = ('none', 'bfloat16', 'int8')
MOST = {
  'bfloat16': 4,
  'int8': 8,
}  # devices of the axis, from which on it sends no less than float32


def all_reduce(grads: Any, errors: Any, *, axis: str, kind: str) -> tuple[Any, Any]:
  """(sums over the axis, what this device's rounding lost).

  Every device sends its rounded gradient and its scales to all others, and adds up all of them in float32, so that the sums are
  equal bit for bit everywhere. Of M float32 bytes on n devices each receives (n - 1) M / 2 for bfloat16 and about (n - 1) M / 4 for
  int8, where an all-reduce of float32 takes 2 (n - 1) M / n: it saves for n below MOST, and is for an axis of a few slow links.

  Args:
    grads: tree of float32 arrays, this device's share.
    errors: the second result of the last call, zeros at first.
    axis: a manual axis of the enclosing `jax.shard_map`.
    kind: 'bfloat16', or 'int8' with one scale for each row of the last axis.
  """

  def one(grad, error):
    wanted = jnp.atleast_1d(grad + error)
    code, scale = encode(wanted, kind)
    lost = wanted - decode(code, scale)
    total = decode(*(jax.lax.all_gather(x, axis) for x in (code, scale))).sum(axis=0)
    return total.reshape(grad.shape), lost.reshape(grad.shape)

  return jax.tree.transpose(
    jax.tree.structure(grads), jax.tree.structure((0, 0)), jax.tree.map(one, grads, errors)
  )


def encode(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
  """(code, scale) of float32 [..., n], the scale [..., 1]. A gradient that is not finite stays so: its scale is not.

  Raises:
    ValueError: on an unknown kind.
  """
  if kind == 'bfloat16':
    return x.astype(jnp.bfloat16), jnp.ones((1,) * x.ndim, jnp.float32)
  if kind != 'int8':
    raise ValueError(f'kind {kind!r} must be one of {", ".join(KINDS[1:])}')
  scale = jnp.abs(x).max(axis=-1, keepdims=True) / 127
  code = jnp.round(jnp.where(scale > 0, x / scale, 0)).astype(jnp.int8)
  return code, scale


def decode(code: jax.Array, scale: jax.Array) -> jax.Array:
  """Float32 again."""
  return code.astype(jnp.float32) * scale
