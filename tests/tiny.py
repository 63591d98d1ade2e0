"""A run small enough to be repeated hundreds of times in one process: programs are compiled once."""

import asyncio
import dataclasses
import itertools
import json
import types
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from sao_jax import build, phases, pretraining
from sao_jax.envs.math_python import MathPython
from sao_jax.runtime import watchdog
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.logical import Outside
from sao_jax.warm_start import _demonstrations
from tests.test_build import config

SETTINGS = {
  'model__width': 32,
  'model__num_heads': 2,
  'model__num_kv_heads': 1,
  'model__head_dim': 16,
  'model__mlp_width': 64,
  'model__num_layers': 1,
  'engine__num_slots': 8,
  'engine__prefill_rows': 4,
  'engine__prefill_buckets': (24,),
  'supervised__num_steps': 0,  # `make` does it once for all
  'supervised__batch_size': 32,
  'value__num_batches': 1,
  'value__updates_per_batch': 1,
  'train__num_steps': 12,
  'train__batch_size': 4,
  'train__micro_rows': 4,  # one shape of a batch: `compiles` is the same in every process
  'train__save_every': 6,
  'train__keep': 1,
  'sao__policy_freeze_steps': 1,
  'policy__learning_rate': 3e-3,
  'evaluation__every': 5,
  'evaluation__num_problems': 2,
  'sandbox__num_workers': 1,
  'runtime__mode': 'deterministic',
}
PRACTICE = 50  # warm-start steps: then some episodes call the tool


@dataclasses.dataclass(frozen=True)
class World:
  """What runs share."""

  warm: Any  # policy params
  programs: Any
  outside: Outside  # where the sandbox of logical runs lives
  sandbox: Any

  def close(self) -> None:
    asyncio.run(self.outside.wrap(self.sandbox.close, 0.0)())
    self.outside.close()


def make() -> World:
  parts = build.parts(config(**SETTINGS))
  params = parts.model.init(0)
  opt = parts.supervised_tx.init(params)
  update = jax.jit(parts.supervised_update)
  for step in range(PRACTICE):
    params, opt, _ = update(params, opt, _demonstrations(parts, step))
  programs, sandbox = build.programs_of(parts), build.make_sandbox(parts.config)
  return World(params, programs, Outside(120.0), sandbox)


_LEARNER = []  # compiled once for all parts: their configs differ in the runtime only


def parts_of(**changes) -> build.Parts:
  parts = build.parts(config(**{**SETTINGS, **changes}))
  _LEARNER[:] = _LEARNER or [parts.learner]
  return dataclasses.replace(parts, learner=_LEARNER[0])


def fresh_state(world: World, parts: build.Parts):
  """At version 0, from a copy of the warm start: the learner donates its state."""
  return pretraining.fresh_state(parts, jax.tree.map(jnp.copy, world.warm))


def rewarded():
  """Rewards from how an episode ended: a policy this small earns none, and would learn nothing."""
  end = MathPython._end

  def judged(env, _, reason):
    return end(env, zlib.crc32(repr(env._info).encode()) % 5 / 4, reason)

  return mock.patch.object(MathPython, '_end', judged)


def run(world: World, parts: build.Parts, workdir: Path, stop_at: int | None = None) -> None:
  """Value pretraining and RL as the command does them; a signal comes with the `stop_at`-th event of the ledger."""
  workdir.mkdir(exist_ok=True)
  nothing = lambda *_: None
  screen = types.SimpleNamespace(update=nothing, score=nothing, note=nothing)

  async def main():
    stop = asyncio.Event()
    logical = parts.config.runtime.mode == 'deterministic'
    sandbox = world.sandbox if logical else build.make_sandbox(parts.config)
    waits = watchdog.Waits(asyncio.get_running_loop().time)
    place = phases.Place(
      parts=parts,
      workdir=workdir,
      programs=world.programs,
      sandbox=sandbox,
      outside=world.outside if logical else None,
      waits=waits,
      work=pretraining.make_work(parts, waits),
      stop=stop,
      screen=screen,
    )
    events = itertools.count(1)
    record = Ledger.record

    def counted(*args, **kwargs):
      record(*args, **kwargs)
      if next(events) == stop_at:
        stop.set()

    try:
      with rewarded(), mock.patch.object(Ledger, 'record', counted):
        await phases.learn(place, fresh_state(world, parts))
    finally:
      if not logical:
        await sandbox.close()

  with asyncio.Runner(loop_factory=phases.event_loop(parts)) as runner:
    runner.run(main())


def rows(path: Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def digests_of(text: str) -> list[str]:
  """Of the parameters after each update, as the text of a record has them."""
  lines = [json.loads(line) for line in text.split('\n')[:-1]]
  return [line['digest'] for line in lines if line['kind'] == 'update']


def digests(workdir: Path) -> list[str]:
  return digests_of((workdir / 'replay.jsonl').read_text())
