"""Does a run fit? Tells before anything is downloaded or allocated what the fullest device holds.

  python experiments/plan.py --config=configs/FILE.py[:variant] [--config.section.field=value ...] --devices=64x80GiB [--compile]

--devices: how many, and the memory of each, which may be all of it or what XLA may take (three quarters by default).
--compile: also compiles the programs for as many virtual CPU devices, minutes for a large model, and tells what that compiler plans.

docs/plan.md tells how the numbers are made and how near they were. Exit codes: 0 it fits, 2 it does not or the config is wrong.
"""

import re
from collections.abc import Sequence

import commands
from absl import flags

UNITS = {'GiB': 2**30, 'GB': 10**9}
IN_UPDATE, IN_PUBLICATION = 'in an update', 'when the engines get a new policy'


def parse_devices(text: str) -> tuple[int, int]:
  """(number, bytes of each) from '8x80GiB'."""
  found = re.fullmatch(r'(\d+)x(\d+(?:\.\d+)?)(GiB|GB)', text)
  if not found or int(found[1]) < 1:
    raise ValueError(f'--devices={text!r}: write number and memory, for example 8x80GiB')
  return int(found[1]), int(float(found[2]) * UNITS[found[3]])


def table(plan, memory: int) -> str:
  """One line a part; what is not there at the fullest moment is in parentheses."""
  gib = lambda size: f'{size / UNITS["GiB"]:10.3f} GiB'
  lines = [f'  {name:<28}{gib(size)}' for name, size in plan.held.items() if size]
  for when, parts in ((IN_UPDATE, plan.update), (IN_PUBLICATION, plan.publish)):
    if not any(parts.values()):
      continue
    there = parts.items() <= plan.peak.items()
    lines.append(f'  {when}:' if there else f'  {when} (less, so not in the sum):')
    lines += [f'    {name:<26}{gib(size)}' for name, size in parts.items() if size]
  lines.append(f'  {"sum":<28}{gib(plan.total)} of {memory / UNITS["GiB"]:.2f} GiB')
  return '\n'.join(lines)


def compiled(parts) -> str:
  """Temporaries of the programs as the CPU compiler plans them, on one device."""
  import jax
  import numpy as np

  from sao_jax import build
  from sao_jax.build import plan
  from sao_jax.types import Batch

  shape = plan.batch_rows(parts.config), parts.config.env.max_tokens
  integer = {'tokens', 'segment_ids', 'positions'}
  batch = Batch(
    **{
      name: jax.ShapeDtypeStruct(shape, np.int32 if name in integer else np.float32)
      for name in Batch.__dataclass_fields__
    }
  )
  programs = build.programs_of(parts)
  all_programs = {
    # Less optimised code is there sooner and needs the same memory.
    'an update': parts.learner.update.lower(parts.state, batch).compile(
      {'xla_backend_optimization_level': 0}
    ),
    'a decode': programs.decode,
    **{f'a prefill of {bucket}': program for bucket, program in programs.prefill.items()},
  }
  lines = ['\ntemporaries, as the compiler for CPUs plans them:']
  for name, program in all_programs.items():
    size = program.memory_analysis().temp_size_in_bytes / UNITS['GiB']
    lines.append(f'  {name:<28}{size:10.3f} GiB')
  return '\n'.join(lines)


def main(argv: Sequence[str]) -> None:
  import jax

  with commands.input_errors():
    values, config = commands.parse_config(argv, _define)
    number, memory = parse_devices(values.devices)
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', number)
    from sao_jax import build
    from sao_jax.build import plan as planning

    parts = build.parts(planning.without_files(config))
    plans = planning.of_parts(parts)
  mesh = parts.model.mesh
  used = 1 if mesh is None else mesh.size
  print(f'{config.variant}: the learner has {used} of {number} devices')
  whose = ('the learner', 'the engines') if len(plans) > 1 else ('learner and engines',)
  for who, plan in zip(whose, plans, strict=True):
    print(f'\nthe fullest device of {who}\n{table(plan, memory)}')
  if values.compile:
    print(compiled(parts))
  with commands.input_errors():
    planning.check(plans, memory)
  spare = memory - max(plan.total for plan in plans)
  print(f'\nit fits, with {spare / UNITS["GiB"]:.2f} GiB ({spare / memory:.0%}) to spare')


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('devices', '', 'NUMBERxMEMORY, for example 8x80GiB.', flag_values=values)
  flags.DEFINE_bool('compile', False, 'Asks the compiler, too.', flag_values=values)


if __name__ == '__main__':
  commands.run(main, resumable=False)
