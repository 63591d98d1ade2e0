"""The weighted sum over experts, three ways. See `moe.mlp` for what each costs.

  N  tokens    k  experts a token    E  experts    D  width of the model    F  width of an expert

All take x [N, D], weights [N, k] float32, experts [N, k] int32 and kernels (gate and up [E, D, F], down [E, F, D]), and
return float32 [N, D]: sum over k of weight * down(silu(gate(x)) * up(x)). Expert E means nobody, and adds 0. No token may
name an expert twice. Products have the dtype of x, to which kernels are cast; sums over experts are float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

Kernels = tuple[jax.Array, jax.Array, jax.Array]

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 512  # rows


def count(experts: jax.Array, num_experts: int) -> jax.Array:
  """[E] int32: how many entries are 0, 1, ... A comparison, as a scatter would add in no fixed order."""
  return jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)


def dense(x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: Kernels) -> jax.Array:
  """Every expert on every token, one expert after the other."""
  wide = x.astype(jnp.float32)  # so that its gradient is summed over experts in float32

  @jax.checkpoint  # or the scan would keep [E, N, F]
  def contribution(expert, wide, weights, experts, kernels):
    chosen = experts == expert
    mine = jnp.where(jnp.any(chosen, axis=1, keepdims=True), wide, 0).astype(x.dtype)
    weight = jnp.sum(jnp.where(chosen, weights, 0), axis=1, keepdims=True)
    return weight * _down(_hidden(mine, kernels, jnp.dot), kernels, jnp.dot).astype(jnp.float32)

  def add(total, expert):
    return total + contribution(expert[0], wide, weights, experts, expert[1:]), None

  experts_of_scan = (jnp.arange(len(kernels[0])), *kernels)
  return jax.lax.scan(add, jnp.zeros_like(wide), experts_of_scan)[0]


def ragged(x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: Kernels) -> jax.Array:
  """Tokens sorted by expert, then `jax.lax.ragged_dot`."""
  order, inverse = _sort(experts)
  sizes = count(experts, len(kernels[0]))
  # Rows of nobody come last, in no group. A kernel may leave them unwritten, forward and backward.
  taken = (jnp.arange(len(order)) < jnp.sum(sizes))[:, None]
  rows = _permute(jnp.repeat(x, experts.shape[1], axis=0), order, inverse)
  rows = jnp.where(taken, rows, 0)
  dot = lambda a, b: jax.lax.ragged_dot(a, b, sizes)
  rows = _down(_hidden(rows, kernels, dot), kernels, dot)
  rows = _permute(jnp.where(taken, rows, 0), inverse, order).reshape(*experts.shape, -1)
  return jnp.sum(rows.astype(jnp.float32) * weights[..., None], axis=1)


def block_size(rows_an_expert: float) -> int:
  """Rows of a block: a power of two at most half of the rows that an expert gets on average, within limits.

  The last block of an expert is half empty on average, so this wastes about a quarter of the work; a smaller block
  wastes less, and makes each product less efficient.
  """
  size = SMALLEST_BLOCK
  while 4 * size <= rows_an_expert and size < LARGEST_BLOCK:
    size *= 2
  return size


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blocked(
  x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: Kernels, block: int
) -> jax.Array:
  """Tokens sorted by expert, then expert after expert in blocks of `block` rows: as many as its tokens need.

  Holds one buffer of [N k + block, D] and the [block, F] of one block. The backward pass computes gate and up again, and
  keeps nothing but the arguments. Kernels get their gradient one by one: float32 over blocks, then their dtype.
  """
  plan = _plan(experts, weights, len(kernels[0]), block)

  def run(rows, expert):
    ends, kernels = expert

    def visit(start, rows):
      tokens, mine, weight = _block(plan, start, ends[1], block)
      out = _weighted(jnp.where(mine, x[tokens], 0), weight, kernels)
      return _put(rows, out, start)

    return _visit_blocks(ends, block, visit, rows), None

  rows, _ = jax.lax.scan(run, _buffer(x, plan), (plan.ends, kernels))
  return _sum_experts(rows, plan)


def _keep_arguments(x, weights, experts, kernels, block):
  return blocked(x, weights, experts, kernels, block), (x, weights, experts, kernels)


def _blocked_backward(block, arguments, cotangent):
  x, weights, experts, kernels = arguments
  plan = _plan(experts, weights, len(kernels[0]), block)

  def run(rows, expert):
    ends, kernels = expert

    def visit(start, carry):
      d_rows, d_weights, d_kernels = carry
      tokens, mine, weight = _block(plan, start, ends[1], block)
      _, pull = jax.vjp(_weighted, jnp.where(mine, x[tokens], 0), weight, kernels)
      d_x, d_weight, more = pull(jnp.where(mine, cotangent[tokens], 0).astype(x.dtype))
      d_kernels = jax.tree.map(jnp.add, d_kernels, more)
      return _put(d_rows, d_x, start), _put(d_weights, d_weight, start), d_kernels

    zeros = jax.tree.map(lambda kernel: jnp.zeros_like(kernel, jnp.float32), kernels)
    *rows, d_kernels = _visit_blocks(ends, block, visit, (*rows, zeros))
    return tuple(rows), jax.tree.map(lambda d, kernel: d.astype(kernel.dtype), d_kernels, kernels)

  rows = _buffer(x, plan), _buffer(weights[:, :1], plan)
  (d_rows, d_weights), d_kernels = jax.lax.scan(run, rows, (plan.ends, kernels))
  d_x = _sum_experts(d_rows, plan).astype(x.dtype)
  return d_x, d_weights[plan.inverse, 0], None, d_kernels


blocked.defvjp(_keep_arguments, _blocked_backward)


class _Plan(NamedTuple):
  """Rows are the N k pairs of a token and its expert, sorted by expert, and `block` more that are never used."""

  tokens: jax.Array  # [rows] int32, whose row it is
  weights: jax.Array  # [rows, 1] float32
  ends: jax.Array  # [E, 2] int32, first row of the expert and first row behind its last
  inverse: jax.Array  # [N, k] int32, the row of each pair


def _plan(experts, weights, num_experts, block):
  order, inverse = _sort(experts)
  stops = jnp.cumsum(count(experts, num_experts))
  starts = jnp.concatenate([jnp.zeros_like(stops[:1]), stops[:-1]])
  return _Plan(
    tokens=jnp.pad(order // experts.shape[1], (0, block)),
    weights=jnp.pad(weights.reshape(-1, 1)[order], ((0, block), (0, 0))),
    ends=jnp.stack([starts, stops], axis=1),
    inverse=inverse.reshape(experts.shape),
  )


def _visit_blocks(ends, block, visit, carry):
  """carry = visit(start, carry) for the first row of each block of an expert. As many as needed: nothing for no rows."""
  number = (ends[1] - ends[0] + block - 1) // block
  return jax.lax.fori_loop(0, number, lambda i, carry: visit(ends[0] + i * block, carry), carry)


def _block(plan, start, stop, block):
  """Tokens [block], which of the rows are the expert's [block, 1], and weights [block, 1], 0 at the others."""
  tokens = jax.lax.dynamic_slice_in_dim(plan.tokens, start, block)
  mine = (start + jnp.arange(block) < stop)[:, None]
  weight = jax.lax.dynamic_slice_in_dim(plan.weights, start, block)
  return tokens, mine, jnp.where(mine, weight, 0)


def _buffer(x, plan):
  return jnp.zeros_like(x, shape=(len(plan.tokens), x.shape[1]))


def _put(rows, some, start):
  """Rows behind those of the expert are overwritten too: with 0, and the next expert comes later."""
  return jax.lax.dynamic_update_slice_in_dim(rows, some, start, 0)


def _sum_experts(rows, plan):
  return jnp.sum(rows[plan.inverse].astype(jnp.float32), axis=1)


def _weighted(x, weight, kernels):
  """Weighted before the last product: its output is then not needed for the gradient of the weight."""
  hidden = weight * _hidden(x, kernels, jnp.dot).astype(jnp.float32)
  return _down(hidden.astype(x.dtype), kernels, jnp.dot)


def _hidden(x, kernels, dot):
  gate, up = (kernel.astype(x.dtype) for kernel in kernels[:2])
  return jax.nn.silu(dot(x, gate)) * dot(x, up)


def _down(hidden, kernels, dot):
  return dot(hidden, kernels[2].astype(hidden.dtype))


def _sort(experts):
  """Order of the N k entries by expert, stable, and its inverse."""
  order = jnp.argsort(experts.reshape(-1), stable=True)
  return order, jnp.argsort(order)


@jax.custom_vjp
def _permute(x, order, inverse):
  """x[order]. Backward is a gather too: a scatter is slower, and may add in no fixed order."""
  del inverse
  return x[order]


_permute.defvjp(
  lambda x, order, inverse: (x[order], inverse),
  lambda inverse, cotangent: (cotangent[inverse], None, None),
)
