"""Trains an agent: warm start, value pretraining, RL, evaluation. Start it again to go on.

python experiments/run.py --config=configs/beyondaime.py[:variant] [--config.section.field=value ...]
    [--workdir=runs/NAME]
python experiments/run.py --replay=runs/NAME     does that run again from its record, and compares
"""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import commands
from absl import flags


def main(argv: Sequence[str]) -> None:
  from sao_jax import build, phases
  from sao_jax import workdir as run_workdir
  from sao_jax.report.panel import Panel
  from sao_jax.report.plot import plot_run
  from sao_jax.runtime.watchdog import exit_after

  if any(argument.startswith('--replay') for argument in argv):
    return _replay(argv)
  with commands.input_errors():
    values, config = commands.parse_config(argv, _define)
    parts = build.parts(config)
    workdir = Path(
      values.workdir or commands.RUNS / f'{commands.config_path(values).stem}-{config.variant}'
    )
    run_workdir.check_warm_start(workdir, config)
    lock = run_workdir.claim(workdir, config)
  started = time.monotonic()
  with Panel(config.train.num_steps, title=str(workdir)) as panel:

    async def until_signal():
      stop = asyncio.Event()

      def on_signal(number):
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        seconds = config.runtime.stop_timeout_s
        late = f'stopped, after {seconds} s in vain; {commands.GOES_ON}'
        timers.append(exit_after(seconds, commands.STOPPED, late))

      for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
      try:
        return await phases.execute(parts, workdir, stop=stop, screen=panel)
      finally:
        left = f'failed: tasks that cannot be cancelled kept the process for {phases.CLOSE_S} s'
        timers.append(exit_after(phases.CLOSE_S, commands.FAILED, left))

    timers = []
    try:
      with lock, asyncio.Runner(loop_factory=phases.event_loop(parts)) as runner:
        result = runner.run(until_signal())
    finally:
      for cancel in timers:
        cancel()
  first = run_workdir.first_evaluation(workdir)
  print(f'curves: {plot_run(workdir)}')
  print(
    f'held-out pass@1 {first:.3f} before RL, {result["eval/pass@1"]:.3f} after {config.train.num_steps} '
    f'updates ({time.monotonic() - started:.0f} s since this start); everything is in {workdir}'
  )


def _replay(argv: Sequence[str]) -> None:
  from sao_jax import build, phases
  from sao_jax import replay as replaying
  from sao_jax import workdir as run_workdir
  from sao_jax.report.panel import Panel

  with commands.input_errors():
    values = commands.parse(argv, _define_replay)
    workdir = Path(values.replay)
    config = run_workdir.saved_config(workdir)
    parts = build.parts(config)
    replaying.check(parts, workdir)
  with (
    Panel(config.train.num_steps, title=f'replay of {workdir}') as panel,
    asyncio.Runner(loop_factory=phases.event_loop(parts)) as runner,
  ):
    done = runner.run(replaying.replay(parts, workdir, screen=panel))
  ending = '' if done.complete else '; the record goes no further'
  print(
    f'the same parameters {done.digest} after {done.updates} batches and {done.rounds} rounds of the engine{ending}'
  )


def _define_replay(values: flags.FlagValues) -> None:
  flags.DEFINE_string('replay', '', 'Folder of a recorded run.', flag_values=values)


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'workdir', '', 'Folder of the run; runs/CONFIG-VARIANT by default.', flag_values=values
  )


if __name__ == '__main__':
  commands.run(main, resumable=not any(a.startswith('--replay') for a in sys.argv))
