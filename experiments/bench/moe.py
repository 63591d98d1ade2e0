"""Which backend of a mixture of experts is faster on this device? Forward and backward of one layer.

  python experiments/bench/moe.py [--output=docs/moe.md] [--size=small|large] [--dtype=float32|bfloat16] [--repeats=7]

`small` takes some minutes on two CPU cores; `large` is for an accelerator.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'experiments'))
import commands  # noqa: E402


class Case(NamedTuple):
  """Sizes of one layer."""

  tokens: int
  experts: int
  per_token: int
  width: int
  hidden: int


CASES = {
  'small': (
    Case(512, 4, 1, 64, 128),
    Case(512, 4, 2, 64, 128),
    Case(2048, 8, 2, 128, 128),
    Case(4096, 8, 2, 256, 256),
    Case(1024, 32, 4, 128, 64),
    Case(512, 64, 8, 128, 64),
    Case(64, 32, 4, 128, 64),
    Case(8, 8, 2, 128, 128),
  ),
  'large': (
    Case(8192, 8, 2, 2048, 4096),
    Case(8192, 32, 4, 2048, 1024),
    Case(8192, 128, 8, 2048, 768),
  ),
}
FLOOR = 'floor'


class Cost(NamedTuple):
  """Of one backend; NaN where it does not fit in memory."""

  seconds: float
  temporaries_mb: float


def measure(case: Case, dtype: str, repeats: int) -> dict[str, Cost]:
  """Backend, or FLOOR -> Cost."""
  import jax

  from sao_jax.models import moe

  compiled, found = {}, {}
  for name in (*moe.BACKENDS, FLOOR):
    step, inputs = _program(case, dtype, name)
    try:
      program = jax.jit(step).lower(*inputs).compile()
      jax.block_until_ready(program(*inputs))
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      found[name] = Cost(float('nan'), float('nan'))
    else:
      compiled[name] = program, inputs
  seconds = {name: [] for name in compiled}
  for _ in range(repeats):
    for name, (program, inputs) in compiled.items():
      start = time.perf_counter()
      jax.block_until_ready(program(*inputs))
      seconds[name].append(time.perf_counter() - start)
  for name, (program, _) in compiled.items():
    temporaries = program.memory_analysis().temp_size_in_bytes / 1e6
    found[name] = Cost(float(np.median(seconds[name])), temporaries)
  return found


def _program(case: Case, dtype: str, name: str) -> tuple[Callable, list]:
  """Gradients of the mean square of a layer in every input, and the inputs."""
  import jax
  import jax.numpy as jnp

  from sao_jax.models import moe

  n, e, k, d, f = case
  shapes = ((n, d), (d, e), (e, d, f), (e, d, f), (e, f, d))
  if name == FLOOR:
    shapes = ((n * k, d), (d, f), (d, f), (f, d))
  keys = jax.random.split(jax.random.key(0), len(shapes))
  inputs = [
    jax.random.normal(key, shape) * (1 if i == 0 else shape[-2] ** -0.5)
    for i, (key, shape) in enumerate(zip(keys, shapes, strict=True))
  ]
  inputs[0] = inputs[0].astype(dtype)

  def experts(x, *kernels):
    valid = jnp.ones(len(x), bool)
    options = {'experts_per_token': k, 'normalize': True, 'backend': name}
    return moe.mlp(x, *kernels, valid=valid, **options)[0]

  def dense(x, *kernels):
    gate, up, down = (kernel.astype(x.dtype) for kernel in kernels)
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down

  layer = dense if name == FLOOR else experts
  loss = lambda *inputs: jnp.mean(jnp.square(layer(*inputs).astype(jnp.float32)))
  return jax.grad(loss, argnums=tuple(range(len(inputs)))), inputs


def make_table(results: dict[Case, dict[str, Cost]]) -> str:
  """Markdown: times in floors, and temporaries."""
  names = sorted(next(iter(results.values())).keys() - {FLOOR})
  head = ['N', 'E', 'k', 'D', 'F', 'floor, ms', *(f'{name}, floors' for name in names)]
  head += [f'{name}, MB' for name in (*names, FLOOR)]
  lines = ['| ' + ' | '.join(head) + ' |', '|' + '--:|' * len(head)]
  for case, costs in results.items():
    floor = costs[FLOOR].seconds
    numbers = [f'{1e3 * floor:.2f}', *(f'{costs[name].seconds / floor:.1f}' for name in names)]
    numbers += [f'{costs[name].temporaries_mb:.1f}' for name in (*names, FLOOR)]
    lines.append('| ' + ' | '.join([*map(str, case), *numbers]) + ' |')
  return '\n'.join(lines)


def make_report(results: dict[Case, dict[str, Cost]], command: str, where: str) -> str:
  """The page of the documentation."""
  return f"""# What a mixture of experts costs

    {command}

{where}. Forward and backward of one layer with N tokens, E experts of which a token uses k, width D, and experts of width F.
The router is random, so that the load is nearly even.

*Floor* is a dense MLP on N k rows: what a perfect grouped product would take. Times are medians over repeats that take turns,
in floors of the same row. MB are the temporaries that the compiler plans.

{make_table(results)}

- `blocked` sorts tokens by expert and walks over blocks of rows. It does the work of the floor, a quarter more in blocks
  that are not full, and computes gate and up again backward. Where an expert has a few rows only, the walk itself and the
  routing are what takes the time. It holds N k rows of width D, and never one of width F.
- `dense` runs every expert on every token: E / k floors. It holds N rows, so that with many experts a token it needs the
  least memory.
- `ragged` is `jax.lax.ragged_dot`. Where it takes E floors or more, and E times the memory, as on CPU, it is lowered to a
  masked dense product. JAX has kernels for it on other devices, behind flags that change by version: measure there.

The configs should say `blocked` unless this table, made on your device, says otherwise. Nobody ran it on an accelerator: there
each block is a small product of its own, started one after the other, and `ragged` may win.
"""


def main(argv: Sequence[str]) -> None:
  import jax

  with commands.input_errors():
    values = commands.parse(argv, _define)
  device = jax.devices()[0]
  results = {}
  for case in CASES[values.size]:
    results[case] = measure(case, values.dtype, values.repeats)
    print(case, file=sys.stderr, flush=True)
  changed = [f'--{name}={values[name].value}' for name in ('size', 'dtype', 'repeats') if values[name].present]  # fmt: skip
  command = ' '.join(['python experiments/bench/moe.py', *changed, '--output=docs/moe.md'])
  report = make_report(results, command, f'{device.device_kind}, {values.dtype}, JAX {jax.__version__}')  # fmt: skip
  if values.output:
    Path(values.output).write_text(report, encoding='utf-8')
  else:
    print(report)


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('output', '', 'File that is written; empty: prints it.', flag_values=values)
  flags.DEFINE_enum('size', 'small', list(CASES), 'Which layers.', flag_values=values)
  flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.', flag_values=values
  )
  flags.DEFINE_integer('repeats', 7, 'Of each measurement.', lower_bound=1, flag_values=values)


if __name__ == '__main__':
  commands.run(main)
