"""What an episode costs the runtime, from 64 to 16,384 in flight. Prints a Markdown table.

  python experiments/bench/scale.py

Logical time: nothing sleeps, so the seconds are those of the code alone. Each run has a process of its own.
"""

import asyncio
import concurrent.futures
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simulate

from sao_jax.engines import fake
from sao_jax.types import StopReason, Trajectory

BATCH = 64
TOKENS, TOOL_S = (
  32,
  4.0,
)  # mean tokens of an episode, which take 1 s each; mean seconds of the environment
EPISODES = {64: 10_000, 256: 10_000, 1024: 10_000, 4096: 100_000, 16_384: 32_768}  # by in flight


class Cost(NamedTuple):
  """Of one run. RSS is what the process has in memory."""

  real_us: float  # an episode
  cpu_us: float  # an episode; on a busy machine the better number
  early_mb: float  # RSS when a tenth of the episodes is trained
  late_mb: float  # RSS at the last update
  events: int  # lines of the log
  log_mb: float


def on_fake_engine(in_flight: int) -> tuple[simulate.Play, simulate.Publish]:
  """Whole episodes: turns, tools, a token at a time in the record."""
  return simulate.on_fake_engine(
    length=fake.log_normal(median=25, sigma=0.7, cap=256),
    cap=256,
    turns=1,
    tool_s=lambda random: random.expovariate(1 / TOOL_S),
    reward=lambda random, tokens: float(random.random() < 0.5),
    seconds_per_token=1.0,
    num_slots=in_flight,
  )


def on_nothing(in_flight: int) -> tuple[simulate.Play, simulate.Publish]:
  """The cheapest episode: one sleep, and a trajectory whose arrays are ready-made. What is left is the runtime."""
  size = TOKENS
  mask = np.arange(size) > 0
  ready = {
    'tokens': np.zeros(size, np.int32),
    'mask': mask,
    'behavior_logprobs': np.zeros(size, np.float32),
    'versions': np.where(mask, 0, -1).astype(np.int32),
    'rewards': np.zeros(size, np.float32),
    'turn_ids': np.where(mask, 0, -1).astype(np.int32),
    'terminated': True,
    'truncated': False,
    'stop_reason': StopReason.ANSWERED,
  }

  async def play(task, *, episode, group, seed):
    await asyncio.sleep(size * (0.5 + seed % 1024 / 1024))
    return Trajectory(episode=episode, prompt_id=task.prompt_id, group=group, **ready)

  return play, lambda version: None


def cost(make, in_flight: int, episodes: int) -> Cost:
  """One run, whose engine is the bottleneck: `in_flight` episodes run at any moment."""
  updates = episodes // BATCH
  resident = {}

  def seen(version, batch):
    if version in (updates // 10, updates - 1):
      resident[version] = _resident_mb()

  with tempfile.TemporaryDirectory() as folder:
    real, cpu = time.perf_counter(), time.process_time()
    counts = simulate.drive(
      Path(folder),
      lambda: make(in_flight),
      seen,
      seed=0,
      updates=updates,
      batch_size=BATCH,
      capacity=in_flight + BATCH,
      consume='oldest_started',
      in_order=False,
      late='mask',
      max_staleness=updates,
      update_s=0.5 * TOKENS * BATCH / in_flight,
    )
    real, cpu = time.perf_counter() - real, time.process_time() - cpu
    log = Path(folder) / 'events.jsonl'
    with log.open() as lines:
      events = sum(1 for _ in lines)
    log_mb = log.stat().st_size / 1e6
  started = counts['started']
  early, late = resident[updates // 10], resident[updates - 1]
  return Cost(1e6 * real / started, 1e6 * cpu / started, early, late, events, log_mb)


def _resident_mb() -> float:
  """Raises OSError where there is no /proc."""
  fields = dict(line.split(':', 1) for line in Path('/proc/self/status').read_text().splitlines())
  return int(fields['VmRSS'].split()[0]) / 1024


def make_table(costs: Sequence[tuple[str, int, int, Cost]]) -> str:
  lines = [
    '| what runs | in flight | episodes | real µs an episode | CPU µs an episode | RSS at 10 %, MB | RSS at 100 %, MB | events | log, MB |',
    '|---|--:|--:|--:|--:|--:|--:|--:|--:|',
  ]
  for what, in_flight, episodes, c in costs:
    lines.append(
      f'| {what} | {in_flight:,} | {episodes:,} | {c.real_us:.0f} | {c.cpu_us:.0f} '
      f'| {c.early_mb:.0f} | {c.late_mb:.0f} | {c.events:,} | {c.log_mb:.1f} |'
    )
  return '\n'.join(lines)


def main(argv: Sequence[str]) -> None:
  import commands

  with commands.input_errors():
    commands.parse(argv, lambda values: None)
  context = multiprocessing.get_context('spawn')
  costs = []
  for what, make in (('runtime alone', on_nothing), ('whole simulation', on_fake_engine)):
    for in_flight, episodes in EPISODES.items():
      with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        found = pool.submit(cost, make, in_flight, episodes).result()
      costs.append((what, in_flight, episodes, found))
      print(f'{what}, {in_flight} in flight: {found.cpu_us:.0f} µs', file=sys.stderr, flush=True)
  print(make_table(costs))


if __name__ == '__main__':
  sys.path.append(str(Path(__file__).parents[1]))
  import commands

  commands.run(main)
