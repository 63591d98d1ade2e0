"""Trains an agent: warm start, value pretraining, RL, evaluation. Start it again to go on.

python experiments/run.py --config=configs/beyondaime.py[:variant] [--config.section.field=value ...]
    [--workdir=runs/NAME] [--coordinator=HOST:PORT --num_processes=N --process_id=I]
python experiments/run.py --replay=runs/NAME     does that run again from its record, and compares

Over several hosts the same command is started on each, with another --process_id, and a --workdir that they share. HOST is that
of process 0, which has engines, environments and the record of the run; mesh.* takes as many devices of each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import commands
from absl import flags
from ml_collections import ConfigDict

if TYPE_CHECKING:
  from sao_jax import build
  from sao_jax.runtime.crew import Crew


def main(argv: Sequence[str]) -> None:
  if any(argument.startswith('--replay') for argument in argv):
    return _replay(argv)
  with commands.input_errors():
    values, config = commands.parse_config(argv, _define)
    workdir = Path(
      values.workdir or commands.RUNS / f'{commands.config_path(values).stem}-{config.variant}'
    )
    crew = _join(values, config)
    parts, lock = _enter(config, workdir, crew)
  if crew.index:
    _follow(parts, workdir, crew)
  else:
    _lead(parts, workdir, lock, crew)


def _join(values: flags.FlagValues, config: ConfigDict) -> Crew:
  """The processes that the flags tell of; this one alone without them."""
  from sao_jax.runtime import crew

  address, count, index = values.coordinator, values.num_processes, values.process_id
  if not address:
    if (count, index) != (1, 0):
      raise ValueError(
        f'--num_processes={count} --process_id={index} without --coordinator: give HOST:PORT of process 0'
      )
    return crew.ALONE
  if count < 2 or not 0 <= index < count:
    raise ValueError(
      f'--num_processes={count} --process_id={index}: at least 2 processes, which count from 0'
    )
  host, _, port = address.rpartition(':')
  if not (host and port.isdigit()):
    raise ValueError(f'--coordinator={address} must be HOST:PORT of process 0')
  try:
    return crew.join(address, count, index, config.runtime.stall_timeout_s)
  except RuntimeError as error:
    raise ValueError(f'--coordinator={address}: {error}') from error


def _enter(
  config: ConfigDict, workdir: Path, crew: Crew
) -> tuple[build.Parts, AbstractContextManager]:
  """All that is checked before a run, in all its processes, which agree on it. Process 0 alone claims the workdir."""
  from sao_jax import build
  from sao_jax import workdir as run_workdir
  from sao_jax.build import plan as planning
  from sao_jax.runtime.peers import PeerFailed, Peers

  lock = contextlib.nullcontext()

  def claim():
    nonlocal lock
    run_workdir.check_warm_start(workdir, config)
    lock = run_workdir.claim(workdir, config)

  peers = Peers(config.runtime.stall_timeout_s)
  try:
    theirs = peers.first(lambda: json.loads(config.to_json()))
    peers.each(lambda: run_workdir.check_same(theirs, config))
    parts = peers.each(lambda: build.parts(config))
    peers.each(lambda: planning.check(planning.of_parts(parts), planning.device_memory()))
    peers.first(claim)
    peers.each(lambda: run_workdir.check_shared(workdir, config))
  except PeerFailed as error:
    raise ValueError(str(error)) from error
  return parts, lock


def _follow(parts: build.Parts, workdir: Path, crew: Crew) -> None:
  """Another process than the first, to the end that the first one tells."""
  from sao_jax.follow import follow
  from sao_jax.runtime.watchdog import end_process

  def on_signal(number, frame):
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    crew.ask_to_stop()

  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal)
  print(f'process {crew.index} of {crew.count} follows process 0', flush=True)
  try:
    code, reason = follow(parts, workdir, crew)
  except BaseException as error:
    code, reason = commands.verdict(error)
    with contextlib.suppress(Exception):
      crew.fail(reason.splitlines()[-1])
    # At a usual exit JAX waits for the others, which wait for us.
    end_process(code, reason, stack=traceback.format_exc())
  if code:
    raise commands.Ended(code, reason)


def _lead(parts: build.Parts, workdir: Path, lock: AbstractContextManager, crew: Crew) -> None:
  """The run, in its first process or its only one."""
  from sao_jax import phases
  from sao_jax import workdir as run_workdir
  from sao_jax.report.panel import Panel
  from sao_jax.report.plot import plot_run
  from sao_jax.runtime.closing import CLOSE_S
  from sao_jax.runtime.watchdog import exit_after

  config, started = parts.config, time.monotonic()
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
        return await phases.execute(parts, workdir, stop=stop, screen=panel, crew=crew)
      finally:
        left = f'failed: tasks that cannot be cancelled kept the process for {CLOSE_S} s'
        timers.append(exit_after(CLOSE_S, commands.FAILED, left))

    timers = []
    try:
      with (
        lock,
        _ending(crew, config.runtime.heartbeat_s),
        asyncio.Runner(loop_factory=phases.event_loop(parts)) as runner,
      ):
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


@contextlib.contextmanager
def _ending(crew: Crew, heartbeat_s: float) -> Iterator[None]:
  """However process 0 ends, the others are told. One that cannot be told ends this process at once."""
  import jax

  from sao_jax.runtime.failures import RunFailed
  from sao_jax.runtime.watchdog import end_process

  failure, code, reason = None, commands.DONE, ''
  try:
    yield
  except BaseException as error:
    failure = error
    code, reason = commands.verdict(error)
  try:
    if isinstance(failure, jax.errors.JaxRuntimeError):
      # Of a collective, perhaps, which does not know whom it misses; the heartbeat will.
      crew.raise_failed(1.5 * heartbeat_s)
    crew.end(code, reason, heartbeat_s)
  except RunFailed as error:
    end_process(code or commands.FAILED, f'{reason}; {error}' if reason else f'failed: {error}')
  if failure is not None:
    raise failure


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
  flags.DEFINE_string(
    'coordinator', '', 'HOST:PORT of process 0, for a run of several.', flag_values=values
  )
  flags.DEFINE_integer('num_processes', 1, 'How many make the run.', flag_values=values)
  flags.DEFINE_integer('process_id', 0, 'Which of them this is, from 0.', flag_values=values)


if __name__ == '__main__':
  commands.run(main, resumable=not any(a.startswith('--replay') for a in sys.argv))
