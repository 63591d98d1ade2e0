"""The flax.linen modules of the decoder in `transformer`, over packed rows or over a cache."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from sao_jax import sharding
from sao_jax.models import attention, moe

EMBEDDING_STDDEV = 0.02  # small, so that a fresh model's loss is near log V, tied or not


@dataclasses.dataclass(frozen=True)
class Shape:
  """The numbers of one decoder; the fields are the arguments of `transformer.make`."""

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float
  rope_scaling: tuple[tuple[str, float], ...] | None  # items of the dict
  norm_eps: float
  qk_norm: bool
  qkv_bias: bool
  tied: bool
  num_experts: int
  experts_per_token: int
  normalize_topk: bool
  expert_backend: str
  attention: str
  attention_chunk: int
  window: int
  sinks: int
  lora_rank: int
  lora_alpha: float
  dtype: Any
  head_dtype: Any
  remat: str
  mesh: Mesh | None


def attend_packed(shape, q, k, v, rows, cache):
  """Keeps nothing, and there is no cache. `rows`: (positions, segment_ids)."""
  del cache
  mixed = attention.packed(
    q,
    k,
    v,
    *rows,
    backend=shape.attention,
    chunk=shape.attention_chunk,
    window=shape.window,
    sinks=shape.sinks,
    mesh=shape.mesh,
  )
  return mixed, ()


def attend_cached(shape, q, k, v, start, cache):
  """Keeps the new keys and values."""
  mixed = attention.cached(q, k, v, cache, start, window=shape.window, sinks=shape.sinks)
  return mixed, (k, v)


class _Norm(nn.Module):
  shape: Shape

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],), jnp.float32)
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(mean_square + self.shape.norm_eps) * scale
    return x.astype(self.shape.dtype)


class _Linear(nn.Module):
  """Contracts the last `in_dims` axes; `shrink` scales the initial kernel, whose stddev is shrink / sqrt(fan in)."""

  shape: Shape
  out_shape: tuple[int, ...]
  in_dims: int
  shrink: float
  bias: bool

  @nn.compact
  def __call__(self, x):
    in_shape, rank = x.shape[-self.in_dims :], self.shape.lora_rank
    stddev = math.prod(in_shape) ** -0.5
    normal, zeros = nn.initializers.normal, nn.initializers.zeros

    def matrix(name, initializer, *sizes):
      return self.param(name, initializer, sizes, jnp.float32).astype(self.shape.dtype)

    def times(x, matrix, dims):
      axes = tuple(range(x.ndim - dims, x.ndim)), tuple(range(dims))
      return jax.lax.dot_general(x, matrix, (axes, ((), ())))

    kernel = matrix('kernel', normal(self.shrink * stddev), *in_shape, *self.out_shape)
    out = times(x, kernel, self.in_dims)
    if rank:
      a = matrix('lora_a', normal(stddev), *in_shape, rank)
      b = matrix('lora_b', zeros, rank, *self.out_shape)
      out = out + times(times(x, a, self.in_dims), b, 1) * (self.shape.lora_alpha / rank)
    if self.bias:
      out = out + matrix('bias', zeros, *self.out_shape)
    return out


class _Attention(nn.Module):
  shape: Shape
  attend: Callable

  @nn.compact
  def __call__(self, x, rotation, shared, cache):
    shape = self.shape

    def heads(name, number):
      return _Linear(shape, (number, shape.head_dim), 1, 1.0, shape.qkv_bias, name=name)(x)

    q, k = heads('q', shape.num_heads), heads('k', shape.num_kv_heads)
    v = heads('v', shape.num_kv_heads)
    if shape.qk_norm:
      q, k = _Norm(shape, name='q_norm')(q), _Norm(shape, name='k_norm')(k)
    q, k = attention.rotate(q, *rotation), attention.rotate(k, *rotation)
    mixed, kept = self.attend(shape, q, k, v, shared, cache)
    return _residual(shape, 2, 'o')(mixed), kept


class _Mlp(nn.Module):
  shape: Shape

  @nn.compact
  def __call__(self, x):
    shape = self.shape
    gate = _Linear(shape, (shape.mlp_width,), 1, 1.0, False, name='gate')(x)
    up = _Linear(shape, (shape.mlp_width,), 1, 1.0, False, name='up')(x)
    return _residual(shape, 1, 'down')(jax.nn.silu(gate) * up)


def _residual(shape, in_dims, name):
  """A projection whose output is added to the residual stream, 2 L times in all."""
  return _Linear(shape, (shape.width,), in_dims, _shrink(shape), False, name=name)


def _shrink(shape):
  return (2 * shape.num_layers) ** -0.5


class _Experts(nn.Module):
  """The parameters of a mixture of experts; `moe` computes with them."""

  shape: Shape

  @nn.compact
  def __call__(self, x, valid):
    shape = self.shape

    def kernel(name, shrink, *sizes):
      initializer = nn.initializers.normal(shrink * sizes[-2] ** -0.5)
      return _Table(sizes, initializer, 'kernel', name=name)()

    experts, width, mlp_width = shape.num_experts, shape.width, shape.mlp_width
    kernels = (
      kernel('router', 1.0, width, experts),
      kernel('gate', 1.0, experts, width, mlp_width),
      kernel('up', 1.0, experts, width, mlp_width),
      kernel('down', _shrink(shape), experts, mlp_width, width),
    )
    how = {
      'experts_per_token': shape.experts_per_token,
      'normalize': shape.normalize_topk,
      'backend': shape.expert_backend,
    }
    if shape.mesh is not None:
      return moe.expert_parallel(shape.mesh, x, *kernels, **how, valid=valid)
    out, load = moe.mlp(x.reshape(-1, width), *kernels, **how, valid=valid.reshape(-1))
    return out.reshape(x.shape), load


class _Layer(nn.Module):
  shape: Shape
  attend: Callable

  @nn.compact
  def __call__(self, x, rotation, shared, valid, cache):
    shape = self.shape
    attend = _Attention(shape, self.attend, name='attention')
    mixed, kept = attend(_Norm(shape, name='attention_norm')(x), rotation, shared, cache)
    x = x + mixed
    normed = _Norm(shape, name='mlp_norm')(x)
    if shape.num_experts:
      mixed, load = _Experts(shape, name='moe')(normed, valid)
    else:
      mixed, load = _Mlp(shape, name='mlp')(normed), jnp.zeros(0)
    return sharding.constrain(x + mixed, shape.mesh), (kept, load)


class _Table(nn.Module):
  """One named matrix."""

  sizes: tuple[int, ...]
  initializer: Callable
  leaf: str

  @nn.compact
  def __call__(self):
    return self.param(self.leaf, self.initializer, self.sizes, jnp.float32)


def _lookup(table, tokens, mesh, dtype):
  """[B, T, D] of [V, D]. On a mesh a device looks up what it has, rows of 'tensor' and columns of 'fsdp', for the tokens of all, and
  hands on what is not its own. No table moves. The partitioner would move it, or end the process inside a shard_map over 'data'
  (jaxlib 0.10).
  """
  if mesh is None or mesh.size == 1:
    return jnp.take(table, tokens, axis=0, mode='fill').astype(dtype)
  mesh, axes = sharding.remaining(mesh)
  size = len(table)

  def local(table, tokens):
    wanted = jax.lax.all_gather(tokens, 'fsdp', axis=0, tiled=True)
    index = wanted - jax.lax.axis_index('tensor') * len(table)
    mine = (index >= 0) & (index < len(table))
    x = jnp.take(table, jnp.where(mine, index, 0), axis=0).astype(dtype)
    x = jnp.where(mine[..., None], x, 0)
    x = jax.lax.all_to_all(x, 'fsdp', split_axis=0, concat_axis=2, tiled=True)
    x = jax.lax.psum(x, 'tensor')
    return jnp.where(((tokens >= 0) & (tokens < size))[..., None], x, jnp.nan)

  rows = sharding.tokens_spec(axes)
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(PartitionSpec('tensor', 'fsdp'), rows),
    out_specs=rows,
    axis_names=axes,
    check_vma=False,
  )(table, tokens)


class Decoder(nn.Module):
  """`attend(shape, q, k, v, shared, cache) -> (mixed, kept)`: shared by all layers, cache sliced and kept stacked by layer.

  Returns (hidden, kept, load): load [L, E] counts the valid tokens that each expert got, [L, 0] without experts.
  """

  shape: Shape
  attend: Callable

  @nn.compact
  def __call__(self, tokens, positions, shared, valid, cache):
    shape = self.shape
    embed = nn.initializers.normal(EMBEDDING_STDDEV)
    table = _Table((shape.vocab_size, shape.width), embed, 'embedding', name='embed')()
    x = _lookup(table, tokens, shape.mesh, shape.dtype)
    x = sharding.constrain(x, shape.mesh)
    if not shape.tied:
      _Table((shape.vocab_size, shape.width), embed, 'kernel', name='unembed')()
    scaling = None if shape.rope_scaling is None else dict(shape.rope_scaling)
    rotation = attention.rotation(
      positions, head_dim=shape.head_dim, theta=shape.rope_theta, scaling=scaling
    )
    layer = _Layer
    if shape.remat != 'none':
      policy = getattr(jax.checkpoint_policies, shape.remat)
      layer = nn.remat(layer, policy=policy, prevent_cse=False)
    layers = nn.scan(
      layer,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
      length=shape.num_layers,
    )
    stack = layers(shape, self.attend, name='layers')
    x, (kept, load) = stack(x, rotation, shared, valid, cache)
    return _Norm(shape, name='final_norm')(x), kept, load
