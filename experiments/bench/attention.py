"""Does memory grow with a trajectory or with its square? Prints a Markdown table.

  python experiments/bench/attention.py

Temporary bytes that XLA plans for one row of T tokens, for the device at hand: programs are compiled and nothing runs, so that the sizes
may exceed the machine. Attention is forward and backward, float32; inputs and gradients are not counted.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from sao_jax import advantages
from sao_jax.models import attention

SIZES = (1024, 4096, 16_384, 65_536, 131_072)
HEADS, GROUPS, HEAD_DIM, CHUNK = 8, 2, 64, 512


def attend(backend: str, size: int) -> int:
  """Of attention and its gradients."""

  def loss(q, k, v, positions, segments):
    out = attention.packed(
      q, k, v, positions, segments, backend=backend, chunk=CHUNK, window=0, sinks=0, mesh=None
    )  # fmt: skip
    return jnp.square(out).sum()

  heads = [
    jax.ShapeDtypeStruct((1, size, number, HEAD_DIM), jnp.float32)
    for number in (HEADS, GROUPS, GROUPS)
  ]
  tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)
  return planned(jax.grad(loss, argnums=(0, 1, 2)), *heads, tokens, tokens)


def estimate(function: Callable, size: int) -> int:
  """Of an estimator of advantages; rewards, values, mask and bootstrap are [1, T]."""
  arguments = [jax.ShapeDtypeStruct((1, size), jnp.float32)] * 4
  return planned(functools.partial(function, discount=1.0, lam=0.95), *arguments)


def estimate_steps(size: int) -> int:
  floats = jax.ShapeDtypeStruct((1, size), jnp.float32)
  steps = jax.ShapeDtypeStruct((1, size), jnp.int32)
  function = functools.partial(advantages.step_level_gae, discount=1.0, lam=0.95, aggregate='mean')
  return planned(function, floats, floats, floats, steps, floats)


def planned(function: Callable, *arguments: jax.ShapeDtypeStruct) -> int:
  compiled = jax.jit(function).lower(*arguments).compile()
  return compiled.memory_analysis().temp_size_in_bytes


ROWS = {
  "attention 'xla'": functools.partial(attend, 'xla'),
  "attention 'chunked'": functools.partial(attend, 'chunked'),
  'skip_observation_gae': functools.partial(estimate, advantages.skip_observation_gae),
  'lambda_returns': functools.partial(estimate, advantages.lambda_returns),
  'step_level_gae': estimate_steps,
}


def table(found: dict[str, Sequence[int]]) -> str:
  """Markdown: bytes, and in brackets how many times those of the column before."""
  lines = [
    '| temporary bytes at T = | ' + ' | '.join(f'{size:,}' for size in SIZES) + ' |',
    '|---|' + '--:|' * len(SIZES),
    '| T grows by | | ' + ' | '.join(f'{b / a:.0f}' for a, b in itertools.pairwise(SIZES)) + ' |',
  ]  # fmt: skip
  for name, sizes in found.items():
    ratios = [''] + [f' ({b / a:.1f})' for a, b in itertools.pairwise(sizes)]
    cells = [f'{size:,}{ratio}' for size, ratio in zip(sizes, ratios, strict=True)]
    lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main(argv: Sequence[str]) -> None:
  import commands

  with commands.input_errors():
    commands.parse(argv, lambda values: None)
  found = {}
  for name, measure in ROWS.items():
    found[name] = [measure(size) for size in SIZES]
    print(f'{name}: {found[name]}', file=sys.stderr, flush=True)
  print(table(found))


if __name__ == '__main__':
  sys.path.append(str(Path(__file__).parents[1]))
  import commands

  commands.run(main)
