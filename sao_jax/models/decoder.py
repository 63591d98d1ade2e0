"""The flax.linen modules of the decoder in `transformer`, over packed rows or over a cache."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from sao_jax.models import attention

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
  norm_eps: float
  qk_norm: bool
  tied: bool
  dtype: Any
  remat: str


def attend_packed(q, k, v, mask, cache):
  """Keeps nothing, and there is no cache."""
  del cache
  return attention.packed(q, k, v, mask), ()


def attend_cached(q, k, v, start, cache):
  """Keeps the new keys and values."""
  return attention.cached(q, k, v, cache, start), (k, v)


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

  out_shape: tuple[int, ...]
  in_dims: int
  shrink: float
  dtype: Any

  @nn.compact
  def __call__(self, x):
    in_shape = x.shape[-self.in_dims :]
    stddev = self.shrink * math.prod(in_shape) ** -0.5
    kernel = self.param(
      'kernel', nn.initializers.normal(stddev), (*in_shape, *self.out_shape), jnp.float32
    )
    axes = tuple(range(x.ndim - self.in_dims, x.ndim)), tuple(range(self.in_dims))
    return jax.lax.dot_general(x, kernel.astype(self.dtype), (axes, ((), ())))


class _Attention(nn.Module):
  shape: Shape
  attend: Callable

  @nn.compact
  def __call__(self, x, rotation, shared, cache):
    shape = self.shape

    def heads(name, number):
      return _Linear((number, shape.head_dim), 1, 1.0, shape.dtype, name=name)(x)

    q, k = heads('q', shape.num_heads), heads('k', shape.num_kv_heads)
    v = heads('v', shape.num_kv_heads)
    if shape.qk_norm:
      q, k = _Norm(shape, name='q_norm')(q), _Norm(shape, name='k_norm')(k)
    q, k = attention.rotate(q, *rotation), attention.rotate(k, *rotation)
    mixed, kept = self.attend(q, k, v, shared, cache)
    return _residual(shape, 2, 'o')(mixed), kept


class _Mlp(nn.Module):
  shape: Shape

  @nn.compact
  def __call__(self, x):
    shape = self.shape
    gate = _Linear((shape.mlp_width,), 1, 1.0, shape.dtype, name='gate')(x)
    up = _Linear((shape.mlp_width,), 1, 1.0, shape.dtype, name='up')(x)
    return _residual(shape, 1, 'down')(jax.nn.silu(gate) * up)


def _residual(shape, in_dims, name):
  """A projection whose output is added to the residual stream, 2 L times in all."""
  return _Linear((shape.width,), in_dims, (2 * shape.num_layers) ** -0.5, shape.dtype, name=name)


class _Layer(nn.Module):
  shape: Shape
  attend: Callable

  @nn.compact
  def __call__(self, x, rotation, shared, cache):
    attend = _Attention(self.shape, self.attend, name='attention')
    mixed, kept = attend(_Norm(self.shape, name='attention_norm')(x), rotation, shared, cache)
    x = x + mixed
    x = x + _Mlp(self.shape, name='mlp')(_Norm(self.shape, name='mlp_norm')(x))
    return x, kept


class _Table(nn.Module):
  """One named matrix."""

  sizes: tuple[int, ...]
  initializer: Callable
  leaf: str

  @nn.compact
  def __call__(self):
    return self.param(self.leaf, self.initializer, self.sizes, jnp.float32)


class Decoder(nn.Module):
  """`attend(q, k, v, shared, cache) -> (mixed, kept)`: shared by all layers, cache sliced and kept stacked by layer."""

  shape: Shape
  attend: Callable

  @nn.compact
  def __call__(self, tokens, positions, shared, cache):
    shape = self.shape
    embed = nn.initializers.normal(EMBEDDING_STDDEV)
    table = _Table((shape.vocab_size, shape.width), embed, 'embedding', name='embed')()
    x = jnp.take(table, tokens, axis=0, mode='fill').astype(shape.dtype)
    if not shape.tied:
      _Table((shape.vocab_size, shape.width), embed, 'kernel', name='unembed')()
    rotation = attention.rotation(positions, head_dim=shape.head_dim, theta=shape.rope_theta)
    layer = _Layer
    if shape.remat != 'none':
      policy = getattr(jax.checkpoint_policies, shape.remat)
      layer = nn.remat(layer, policy=policy, prevent_cse=False)
    layers = nn.scan(
      layer,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=(nn.broadcast, nn.broadcast, 0),
      length=shape.num_layers,
    )
    x, kept = layers(shape, self.attend, name='layers')(x, rotation, shared, cache)
    return _Norm(shape, name='final_norm')(x), kept
