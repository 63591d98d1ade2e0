"""A process of a run that does not lead: it mirrors what the leader does with arrays of all processes."""

import asyncio
from pathlib import Path
from typing import Any

from sao_jax import build, checkpoint, loop, phases, pretraining
from sao_jax import workdir as run_workdir
from sao_jax.runtime.crew import END, Crew
from sao_jax.runtime.divergence import RollBack
from sao_jax.types import Batch
from sao_jax.warm_start import warm_start


def follow(parts: build.Parts, workdir: Path, crew: Crew) -> tuple[int, str]:
  """All that a process does which does not lead: what the leader does with arrays of all processes, as told.

  Returns:
    The exit code and the reason that the leader ends with.
  """
  c, root, identity = parts.config, workdir / 'checkpoints' / 'rl', run_workdir.run_id(parts.config)
  learning = pretraining.make_learning(parts, None, None, None, None, crew)
  heart, state = phases.start_heart(parts, workdir, crew), None
  for what, numbers, arrays in crew.commands():
    match what:
      case 'fresh':
        state = pretraining.fresh_state(parts, asyncio.run(_same_warm_start(parts, workdir)))
      case 'restore':
        state = None  # there is room for one
        state = checkpoint.restore(root, *numbers, parts.state, run_id=identity).state
      case 'value head':
        state = pretraining.with_value_head(parts, state, *numbers)
      case 'export':
        parts.model.export(state)
      case 'digest':
        loop.digest_of(state, learning.launch, crew)
      case 'save':
        loop.save_checkpoint(root, *numbers, state, {}, (), identity, c.train.keep)
      case 'update' | 'update_critic':
        try:
          state, _, _ = loop.update_once(learning, what, state, Batch(**arrays))
        except RollBack:  # the leader finds the same, and decides
          state = None
  assert what == END
  if numbers[0] == 0:
    heart.stop()
  return numbers


async def _same_warm_start(parts: build.Parts, workdir: Path) -> Any:
  """A follower's: it takes no step, see `build.checks`."""
  nothing = lambda *_: None
  return await warm_start(
    parts, workdir, work=nothing, stop=asyncio.Event(), show=nothing, note=nothing
  )
