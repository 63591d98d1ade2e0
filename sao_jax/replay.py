"""Does a recorded run again and compares: the same parameters, or the event at which it diverges."""

import asyncio
import functools
from pathlib import Path
from typing import NamedTuple

from sao_jax import build, checkpoint, loop, pretraining
from sao_jax import workdir as run_workdir
from sao_jax.engines.local import LocalEngine
from sao_jax.engines.programs import Programs
from sao_jax.learner import TrainState
from sao_jax.report.screen import Screen
from sao_jax.runtime import replay as record
from sao_jax.runtime.divergence import RollBack
from sao_jax.runtime.watchdog import Waits
from sao_jax.warm_start import warm_start


class Replayed(NamedTuple):
  """What was done again; every checksum of it is that of the record."""

  updates: int  # batches that were learned from, those of value pretraining included
  rounds: int  # of the engine
  digest: str  # of policy and critic at the end
  complete: bool  # the recorded run came to its end


def check(parts: build.Parts, workdir: Path) -> None:
  """Raises ValueError if the folder does not hold what a replay needs."""
  config = parts.config
  moves = workdir / run_workdir.MOVES
  if moves.exists():
    raise ValueError(
      f'{workdir} went on in another way ({moves.read_text().splitlines()[0]}): its parts have other roundings, and no replay has both'
    )
  next(iter(record.read(workdir)), None)
  source = Path(config.supervised.workdir or workdir)
  needed = run_workdir.saved_config(source).supervised.num_steps
  saved = checkpoint.steps(source / 'checkpoints' / 'supervised')
  if needed and (not saved or saved[-1] < needed):
    raise ValueError(f'{source} does not hold the whole warm start that the run began with')


async def replay(parts: build.Parts, workdir: Path, *, screen: Screen) -> Replayed:
  """Replays the run in the workdir, which is only read. Tools are not run: their answers are in the record.

  Raises:
    runtime.replay.Diverged: names the line of the record at which this run differs, and how.
  """
  work = pretraining.make_work(parts, Waits(asyncio.get_running_loop().time))
  warm = await warm_start(
    parts, workdir, work=work, stop=asyncio.Event(), show=screen.update, note=screen.note
  )
  state, programs = pretraining.fresh_state(parts, warm), build.programs_of(parts)
  return await repeat(parts, workdir, state, programs, work=work, show=screen.update)


async def repeat(
  parts: build.Parts, workdir: Path, state: TrainState, programs: Programs, *, work, show
) -> Replayed:
  """As `replay`, from the state of version 0 on. work: see `pretraining.make_work`; show: (phase, step, total, metrics)."""
  c = parts.config

  def make_engine(params, version):
    return LocalEngine(programs, params, version=version, name='replay')

  play = functools.partial(build.play_on, c, programs.vocab_size)
  replayer = record.Replayer(record.read(workdir), play, parts.source.task, make_engine)
  learning = pretraining.make_learning(parts, work, replayer, replayer, None)
  complete = False
  replayer.load(learning.export(state), int(state.step))
  try:
    for index in range(c.value.num_batches):
      trajectories = await replayer.take(c.train.batch_size)
      state, metrics = await pretraining.learn_values(learning, parts, state, trajectories, index)
      show('value pretraining', index + 1, c.value.num_batches, metrics)
    while int(state.step) < c.train.num_steps:
      trajectories = await replayer.take(c.train.batch_size)
      state, metrics = await loop.learn(learning, state, trajectories)
      show('replay', int(state.step), c.train.num_steps, metrics)
    complete = True
  except record.Ended:
    pass
  except RollBack as alarm:  # what ended the recorded run, if its record ends here too
    replayer.end(str(alarm))
  finally:
    await replayer.close()
  return Replayed(replayer.updates, replayer.rounds, loop.digest_of(state), complete)
