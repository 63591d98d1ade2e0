"""The policy before RL: supervised training on scripted demonstrations."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sao_jax import batching, build, checkpoint, loop
from sao_jax import workdir as run_workdir
from sao_jax.runtime.failures import RunFailed


async def warm_start(
  parts: build.Parts,
  workdir: Path,
  *,
  work: Callable[..., Awaitable[Any]],
  stop: asyncio.Event,
  show: Callable[[str, int, int, dict[str, Any]], None],
  note: Callable[[str], None],
) -> Any:
  """Policy params after the warm start, from the workdir if it is there.

  Raises:
    loop.Stopped: when `stop` is set, after a checkpoint.
    RunFailed: the loss is not finite.
  """
  c = parts.config
  root, identity = workdir / 'checkpoints' / 'supervised', run_workdir.run_id(c)
  if c.supervised.workdir:
    root = Path(c.supervised.workdir) / 'checkpoints' / 'supervised'
    identity = run_workdir.run_id(run_workdir.saved_config(Path(c.supervised.workdir)))
  params = parts.model.init(c.seed)
  if not (c.supervised.num_steps or c.supervised.workdir):
    return params
  state = {'params': params, 'opt': parts.supervised_tx.init(params)}
  done = 0
  if saved := checkpoint.steps(root):
    done = saved[-1]
    state = checkpoint.restore(root, done, state, run_id=identity).state
  if c.supervised.workdir:
    note(f'the warm start of {c.supervised.workdir}, after {done} steps')
    return state['params']

  async def save(step):
    await work(loop.CHECKPOINT, loop.save_checkpoint, root, step, state, {}, (), identity, 1)

  update = jax.jit(parts.supervised_update, donate_argnums=(0, 1))
  batch = _demonstrations(parts, done) if done < c.supervised.num_steps else None
  for step in range(done, c.supervised.num_steps):
    if stop.is_set():
      await save(step)
      raise loop.Stopped
    last = step + 1 == c.supervised.num_steps
    following = None if last else asyncio.to_thread(_demonstrations, parts, step + 1)
    (state, loss), batch = await asyncio.gather(
      work(loop.SUPERVISED_STEP, _supervised_step, update, state, parts.model.place(batch)),
      following or asyncio.sleep(0),
    )
    if not np.isfinite(loss):
      raise RunFailed(
        f'the loss of warm-start step {step} is {loss}: lower supervised.learning_rate'
      )
    show('warm start', step + 1, c.supervised.num_steps, {'loss/supervised': loss})
  if done < c.supervised.num_steps:
    await save(c.supervised.num_steps)
  elif done:
    note('the warm start is in the workdir already')
  return state['params']


def _supervised_step(update, state: dict[str, Any], batch) -> tuple[dict[str, Any], float]:
  params, opt, loss = update(state['params'], state['opt'], batch)
  return {'params': params, 'opt': opt}, float(loss)


def _demonstrations(parts: build.Parts, step: int):
  """The packed demonstrations of one supervised step; a function of (config, step)."""
  c = parts.config
  size = c.supervised.batch_size
  rows = []
  for index in range(step * size, (step + 1) * size):
    shown = build.demonstrate(c, parts.practice, index)
    if len(shown.tokens) <= parts.demonstration_tokens:  # `build.parts` tells of those that are not
      rows.append(batching.supervised_trajectory(str(index), shown.tokens, shown.mask))
  return batching.pack(
    rows,
    row_length=parts.demonstration_tokens,
    row_multiple=c.train.micro_rows,
    version=0,
    max_staleness=0,
  )
