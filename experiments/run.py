"""Trains an agent: warm start, value pretraining, RL, evaluation. Start it again to go on.

python experiments/run.py --config=configs/beyondaime.py[:variant] [--config.section.field=value ...]
    [--workdir=runs/NAME]
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import commands
from absl import flags


def main(argv: Sequence[str]) -> int:
  values = commands.parse(argv, _define)
  config = values.config
  from sao_jax.report.plot import plot_run

  from sao_jax import build, phases
  from sao_jax.report.panel import Panel

  parts = build.parts(config)
  workdir = Path(
    values.workdir or commands.RUNS / f'{Path(_config_name(argv)).stem}-{config.variant}'
  )
  phases.claim(workdir, config)
  started = time.monotonic()
  with Panel(title=f'{workdir}: {config.variant}, {config.runtime.mode}') as panel:
    panel.note(parts.frozen_counts)

    async def supervised_by_signals():
      stop = asyncio.Event()
      for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
      return await phases.execute(parts, workdir, stop=stop, show=panel.update, note=panel.note)

    result = asyncio.run(supervised_by_signals())
  first = phases.first_evaluation(workdir)
  print(f'curves: {plot_run(workdir)}')
  print(
    f'held-out pass@1 {first:.3f} before RL, {result["eval/pass@1"]:.3f} after {config.train.num_steps} '
    f'updates, in {time.monotonic() - started:.0f} s; everything is in {workdir}'
  )
  return commands.DONE


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'workdir', '', 'Folder of the run; runs/CONFIG-VARIANT by default.', flag_values=values
  )


def _config_name(argv: Sequence[str]) -> str:
  return next(a.partition('=')[2] for a in argv if a.startswith('--config=')).partition(':')[0]


if __name__ == '__main__':
  commands.run(main)
