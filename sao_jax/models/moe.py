"""A mixture of SwiGLU experts: routing, three ways to compute it, experts spread over devices, and a dense warm start.

  N  tokens    E  experts    k  experts a token    D  width of the model    F  width of an expert

Every function is exact: no expert has a capacity, so no token is ever dropped. Products have the dtype of x; softmax, the
weighted sum over experts, and the gradient of x summed over experts are float32.
"""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from sao_jax import sharding
from sao_jax.models import grouped

BACKENDS = ('blocked', 'ragged', 'dense')


def route(
  x: jax.Array, router: jax.Array, *, experts_per_token: int, normalize: bool
) -> tuple[jax.Array, jax.Array]:
  """The k most probable experts of each token, in float32 whatever the dtypes.

  Probabilities are a softmax over all E experts. Of equal ones the expert with the lower index wins.

  Args:
    x: [N, D].
    router: [D, E].
    experts_per_token: k, in [1, E].
    normalize: divide the k probabilities by their sum (`norm_topk_prob` of Qwen3-MoE). With k = 1 the weight is then 1
      and the router has no gradient.

  Returns:
    Weights [N, k] float32, falling, and experts [N, k] int32. The gradient flows through the weights.

  Raises:
    ValueError: if k is not in [1, E].
  """
  num_experts = router.shape[1]
  if not 1 <= experts_per_token <= num_experts:
    raise ValueError(
      f'experts_per_token is {experts_per_token}: must be from 1 to num_experts = {num_experts}'
    )
  logits = jnp.dot(
    x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
  )
  weights, experts = jax.lax.top_k(jax.nn.softmax(logits), experts_per_token)
  if normalize:
    weights = weights / jnp.sum(weights, axis=1, keepdims=True)
  return weights, experts.astype(jnp.int32)


def mlp(
  x: jax.Array,
  router: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  experts_per_token: int,
  normalize: bool,
  backend: str,
  valid: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """out_n = sum over the k experts e of token n of weight_ne * down_e(silu(gate_e(x_n)) * up_e(x_n)).

  Backends compute the same:
    'blocked': tokens sorted by expert, then expert after expert in blocks of rows, as many as its tokens need. N k rows
      of work and about a quarter more, [N k, D] memory; the backward pass keeps nothing and computes gate and up again.
    'ragged': tokens sorted by expert, then `jax.lax.ragged_dot`. N k rows of work where it is lowered to a grouped
      product. Elsewhere, as on CPU, XLA masks the rows once an expert: E N k rows of work and as much memory.
      experiments/bench/moe.py tells which it is.
    'dense': every expert on every token, one expert at a time: N E rows of work, [N, F] memory, and the backward pass
      computes each expert again.

  Args:
    x: [N, D], float32 or bfloat16: the compute dtype, to which kernels are cast.
    router: [D, E].
    gate: [E, D, F].
    up: [E, D, F].
    down: [E, F, D].
    experts_per_token: k, see `route`.
    normalize: see `route`.
    backend: one of BACKENDS.
    valid: [N] bool. Where it is False (padding) x may be anything, NaN included, and so may the cotangent of out: no
      expert gets the token, out is 0, and nothing else changes.

  Returns:
    out [N, D] in the dtype of x, and load [E] float32: how many valid tokens each expert got; it sums to k times them.

  Raises:
    ValueError: on an unknown backend, or k not in [1, E].
  """
  _check_arguments(x, router, (gate, up, down), backend)
  chex.assert_shape(valid, x.shape[:1])
  sent = _send(x, router, valid, experts_per_token, normalize)
  out = _run_experts(*sent, (gate, up, down), backend, len(gate))
  load = grouped.count(sent[2], len(gate)).astype(jnp.float32)
  return jnp.where(valid[:, None], out, 0).astype(x.dtype), load


def expert_parallel(
  mesh: Mesh,
  x: jax.Array,
  router: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  experts_per_token: int,
  normalize: bool,
  backend: str,
  valid: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """`mlp` of [B, T, D] with each device computing its own experts; differentiable, exact, works on any sizes of axes.

  Rows are spread over sharding.BATCH, positions over 'sequence', experts over 'expert' and their F over 'tensor'. Each device
  gathers the tokens of its 'expert' group, computes its E / expert experts for them, and the sums go back to where the
  tokens came from. Kernels that are spread over 'fsdp' are gathered first, in the dtype they have.

  What it costs a device, with n = N / (devices but those of 'tensor') tokens of its own and p = the size of 'expert':
  it receives (p - 1) n D values in the dtype of x, and as many float32 ones to sum; with 'tensor' > 1 also an all-reduce
  of [n, D] float32; backward the same in reverse. Because any token may choose any expert, the buffers have room for
  all p n k rows ('blocked', 'ragged') or p n rows ('dense'), although a device gets n k of them when the load is even. The
  others take no work in 'blocked', where the busiest device of the group sets the pace. All-to-all would move k / p of
  that, but needs a capacity, and drops what exceeds it. In bfloat16, the backward sums over 'expert' and 'tensor' of the
  gradient of x are bfloat16; those of kernels over devices have the dtype of the kernels.

  Args:
    mesh: has the axes 'data', 'fsdp', 'tensor', 'expert' and 'sequence'.
    x: [B, T, D].
    valid: [B, T] bool.
    (the others as in `mlp`, global shapes)

  Returns:
    out [B, T, D], spread as x, and load [E] float32 over all tokens, on every device.

  Raises:
    ValueError: as `mlp`, and where an axis of the mesh does not divide B, T, E or F.
  """
  _check_arguments(x, router, (gate, up, down), backend)
  chex.assert_shape(valid, x.shape[:2])
  _check_divides(mesh, sharding.BATCH, 'rows B', x.shape[0])
  _check_divides(mesh, ('sequence',), 'positions T', x.shape[1])
  _check_divides(mesh, ('expert',), 'num_experts', gate.shape[0])
  _check_divides(mesh, ('tensor',), 'the width F of an expert', gate.shape[2])

  num_experts = len(gate)

  def on_device(x, valid, router, *kernels):
    tokens, kept = x.reshape(-1, x.shape[-1]), valid.reshape(-1)
    tokens, weights, experts = _send(tokens, router, kept, experts_per_token, normalize)
    load = jax.lax.psum(grouped.count(experts, num_experts), (*sharding.BATCH, 'sequence'))
    # Every device adds to the gradients below: of its part of F, and of its tokens.
    sent = jax.lax.pcast((tokens, weights, experts), 'tensor', to='varying')
    kernels = jax.lax.pcast(kernels, ('data', 'fsdp', 'sequence'), to='varying')
    gathered = [jax.lax.all_gather(a, 'expert', tiled=True) for a in sent]
    num_local = len(kernels[0])
    mine = gathered[2] - jax.lax.axis_index('expert') * num_local
    mine = jnp.where((mine >= 0) & (mine < num_local), mine, num_local)
    out = _run_experts(gathered[0], gathered[1], mine, kernels, backend, num_experts)
    out = jax.lax.psum_scatter(out, 'expert', tiled=True)
    out = jax.lax.psum(out, 'tensor')
    out = jnp.where(kept[:, None], out, 0).astype(x.dtype)
    return out.reshape(x.shape), load.astype(jnp.float32)

  tokens = PartitionSpec(sharding.BATCH, 'sequence')
  in_out = PartitionSpec('expert', None, 'tensor'), PartitionSpec('expert', 'tensor')
  specs = (tokens, tokens, PartitionSpec(), in_out[0], in_out[0], in_out[1])
  spread = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(tokens, PartitionSpec()))
  return spread(x, valid, router, gate, up, down)


def load_metrics(load: jax.Array) -> dict[str, jax.Array]:
  """How evenly the experts are used, from load [L, E]: tokens of each layer and expert, summed over what was processed.

  Returns:
    float32 scalars; all 0 if no token was processed.
    'moe/load_max': the largest share of an expert times E, of the worst layer: 1 if even, E if one gets all.
    'moe/load_entropy': mean over layers of the entropy of the shares / log E: 1 if even, 0 if one gets all.
    'moe/dead_experts': the share of experts, over all layers, that got no token.
  """
  chex.assert_rank(load, 2)
  num_experts = load.shape[1]
  total = jnp.sum(load, axis=1, keepdims=True)
  share = load / jnp.maximum(total, 1)
  entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=1)
  evenness = entropy / math.log(num_experts) if num_experts > 1 else jnp.ones_like(entropy)
  some = jnp.any(total > 0)
  metrics = {
    'moe/load_max': jnp.max(share) * num_experts,
    'moe/load_entropy': jnp.mean(evenness),
    'moe/dead_experts': jnp.mean(load == 0),
  }
  return {name: jnp.where(some, value, 0).astype(jnp.float32) for name, value in metrics.items()}


def upcycle(
  params: dict[str, Any], *, num_experts: int, key: jax.Array, router_stddev: float
) -> dict[str, Any]:
  """A dense model as a mixture of experts: every expert is a copy of the dense MLP, the router is random.

  With `normalize` in `route` the weights add up to 1, so the model computes the same function for any k. Without it each
  MLP's output is scaled by the sum of its k probabilities.

  Args:
    params: tree with layers/mlp/{gate,up,down}/kernel, see models.transformer; other entries stay as they are.
    num_experts: E, at least 1.
    key: of the router.
    router_stddev: > 0: with equal router columns the experts with the lowest indices would get every token.

  Returns:
    The tree with layers/moe in place of layers/mlp, in its dtypes. Other leaves are shared with params, not copied.

  Raises:
    ValueError: if the tree is a mixture already, has no dense MLP or has LoRA adapters on it, or a number is bad.

  Source: sparse upcycling, arXiv 2212.05055.
  """
  if num_experts < 1:
    raise ValueError(f'num_experts is {num_experts}: must be at least 1')
  if not router_stddev > 0:
    raise ValueError(f'router_stddev is {router_stddev}: must be > 0, for example 0.02')
  layers = dict(params['layers'])
  if 'moe' in layers:
    raise ValueError('params has layers/moe: it is a mixture of experts already')
  if 'mlp' not in layers:
    raise ValueError(f'params has no layers/mlp to copy, only layers/{sorted(layers)}')
  dense = layers.pop('mlp')
  extra = {f'{name}/{leaf}' for name in dense for leaf in dense[name]} - {
    f'{name}/kernel' for name in ('gate', 'up', 'down')
  }
  if extra:
    raise ValueError(f'layers/mlp has {sorted(extra)}: merge adapters into the kernels first')
  num_layers, width, _ = dense['gate']['kernel'].shape
  dtype = dense['gate']['kernel'].dtype
  router = router_stddev * jax.random.normal(key, (num_layers, width, num_experts))
  copies = jax.tree.map(lambda kernel: jnp.repeat(kernel[:, None], num_experts, axis=1), dense)
  layers['moe'] = {'router': {'kernel': router.astype(dtype)}, **copies}
  return {**params, 'layers': layers}


def _check_arguments(x, router, kernels, backend):
  """Shapes (chex) and the backend."""
  if backend not in BACKENDS:
    raise ValueError(f'expert_backend {backend!r} must be one of {BACKENDS}')
  width, num_experts = router.shape
  hidden = kernels[0].shape[-1]
  chex.assert_axis_dimension(x, -1, width)
  chex.assert_shape(kernels[:2], (num_experts, width, hidden))
  chex.assert_shape(kernels[2], (num_experts, hidden, width))


def _check_divides(mesh, axes, name, size):
  parts = math.prod(mesh.shape[axis] for axis in axes)
  if size % parts:
    raise ValueError(
      f'{name} is {size}: must be a multiple of {parts}, the size of {axes} in the mesh'
    )


def _send(x, router, valid, experts_per_token, normalize):
  """x with 0 at invalid tokens, weights [N, k], and experts [N, k], which are E (nobody) at invalid tokens."""
  x = jnp.where(valid[:, None], x, 0)
  weights, experts = route(x, router, experts_per_token=experts_per_token, normalize=normalize)
  return x, weights, jnp.where(valid[:, None], experts, router.shape[1])


def _run_experts(x, weights, experts, kernels: grouped.Kernels, backend, num_experts):
  """[N, D] float32, of the kernels here, which may be some of all `num_experts`."""
  if backend == 'blocked':
    block = grouped.block_size(experts.size / num_experts)
    return grouped.blocked(x, weights, experts, kernels, block)
  return (grouped.ragged if backend == 'ragged' else grouped.dense)(x, weights, experts, kernels)
