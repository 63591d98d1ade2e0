"""Low-rank adapters: one frozen backbone, and a small tree of its own for each of its users. Pure functions.

A kernel W [L, *in, *out] is used as W + alpha / r A B, with A [L, *in, r] and B [L, r, *out] beside it as `lora_a` and `lora_b`.
B starts at 0, so that an adapted model starts as its backbone. Source: LoRA, arXiv 2106.09685.
"""

from typing import Any

import jax
import jax.numpy as jnp

ADAPTERS = ('lora_a', 'lora_b')


def split(params: Any) -> tuple[Any, Any]:
  """(backbone, adapters): two nested dicts that `join` puts together again.

  Raises:
    ValueError: there is no adapter.
  """
  backbone, adapters = _split(params)
  if not adapters:
    raise ValueError('the parameters have no adapters: make the model with lora_rank of at least 1')
  return backbone, adapters


def _split(params):
  backbone, adapters = {}, {}
  for name, value in params.items():
    if isinstance(value, dict):
      below = _split(value)
      for side, part in zip((backbone, adapters), below, strict=True):
        if part:
          side[name] = part
    else:
      (adapters if name in ADAPTERS else backbone)[name] = value
  return backbone, adapters


def join(backbone: Any, adapters: Any) -> Any:
  """The parameters of the adapted model. Leaves are shared, not copied."""
  joined = dict(backbone)
  for name, value in adapters.items():
    joined[name] = join(backbone.get(name, {}), value) if isinstance(value, dict) else value
  return joined


def merge(params: Any, *, scale: float) -> Any:
  """Parameters of a plain model that computes the same: every kernel with its adapter added, in the kernel's dtype.

  Args:
    scale: alpha / r, as the model has it.
  """
  merged = {name: merge(x, scale=scale) if isinstance(x, dict) else x for name, x in params.items()}
  if 'lora_a' in merged:
    a, b, kernel = merged.pop('lora_a'), merged.pop('lora_b'), merged['kernel']
    layers, rank = b.shape[:2]
    product = jnp.matmul(
      a.reshape(layers, -1, rank), b.reshape(layers, rank, -1), precision=jax.lax.Precision.HIGHEST
    )
    merged['kernel'] = (kernel + scale * product.reshape(kernel.shape)).astype(kernel.dtype)
  return merged
