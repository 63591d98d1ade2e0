"""The real runtime on a fake engine in logical time: what became of every episode, and when."""

import array
import asyncio
import collections
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sao_jax.engines import fake
from sao_jax.rollout import run_episode
from sao_jax.runtime.clock import VirtualLoop
from sao_jax.runtime.dispatch import Dispatcher, Limits, Play
from sao_jax.runtime.failures import BackOff
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.watchdog import Waits
from sao_jax.types import Outcome, StopReason, Task, Trajectory, Turn

NEVER = -1  # in place of the number of an update
_LOGITS = np.zeros(4)
_STOP_TOKEN = 0

Publish = Callable[[int], None]  # (version)
Seen = Callable[[int, Sequence[Trajectory]], None]  # (version that is updated, its batch)


@dataclasses.dataclass(frozen=True)
class Simulation:
  """Arrays are [N], one entry an episode, in the order of starting. Update u turns version u into u + 1."""

  started: np.ndarray  # version of the policy when it started
  length: np.ndarray  # sampled tokens, whether it was trained or not
  reward: np.ndarray
  trained: np.ndarray  # the update that used it, or NEVER
  dropped: np.ndarray  # version of the policy when it was dropped, or NEVER
  staleness: (
    np.ndarray
  )  # mean over its tokens of update - version that sampled the token; NaN: not trained
  late_tokens: np.ndarray  # tokens with more than max_staleness; 0 if not trained
  seconds: np.ndarray  # [updates] logical seconds when each update took its batch
  counts: dict[str, int]  # of the ledger, by state, and `started`


class _Tool:
  """An environment whose every answer takes a while; the last one is the grader's."""

  def __init__(self, seed: int, turns: int, tool_s, reward):
    self._random, self._turns, self._length = random.Random(seed), turns, 0
    self._tool_s, self._reward = tool_s, reward

  async def reset(self, task: Task) -> Turn:
    return Turn(np.asarray([1], np.int32))

  async def step(self, action: np.ndarray) -> Turn | Outcome:
    self._turns, self._length = self._turns - 1, self._length + len(action)
    await asyncio.sleep(self._tool_s(self._random))
    if self._turns:
      return Turn(np.asarray([1], np.int32))
    return Outcome(self._reward(self._random, self._length), True, False, StopReason.ANSWERED)

  def cut(self) -> Outcome:
    raise AssertionError('no length law exceeds the budget of a turn')

  async def close(self) -> None:
    pass


def simulate(
  folder: Path,
  *,
  seed: int,
  updates: int,
  batch_size: int,
  capacity: int,
  consume: str,
  in_order: bool,
  late: str,
  max_staleness: int,
  update_s: float,
  length: fake.Length,
  cap: int,
  turns: int,
  tool_s: Callable[[random.Random], float],
  reward: Callable[[random.Random, int], float],
  seconds_per_token: float,
) -> Simulation:
  """Runs `updates` updates and lets the episodes that are then in flight end, so that all lengths are known.

  The engine has a slot for every episode, so an episode lasts as long as its own tokens and tools, whatever the load.

  Args:
    folder: an empty one, for the log.
    seed: of the run; an episode's length and reward depend on it and on the order of starting alone.
    capacity, consume, late, max_staleness: see `Limits`.
    in_order: see `Dispatcher.take`.
    update_s: logical seconds of an update, from taking a batch to the new weights.
    length: tokens of a turn, at most `cap`.
    tool_s: logical seconds of one answer of the environment, from its generator.
    reward: of an episode, from its generator and its sampled tokens in all.
  """
  used: dict[str, list] = {'index': [], 'staleness': [], 'late': [], 'seconds': []}

  def seen(version: int, batch: Sequence[Trajectory]) -> None:
    used['seconds'].append(asyncio.get_running_loop().time())
    for trajectory in batch:
      staleness = version - trajectory.versions[trajectory.mask]
      used['index'].append(int(trajectory.group))
      used['staleness'].append(staleness.mean())
      used['late'].append((staleness > max_staleness).sum())

  counts = drive(
    folder,
    lambda: on_fake_engine(
      length=length,
      cap=cap,
      turns=turns,
      tool_s=tool_s,
      reward=reward,
      seconds_per_token=seconds_per_token,
      num_slots=capacity,
    ),
    seen,
    seed=seed,
    updates=updates,
    batch_size=batch_size,
    capacity=capacity,
    consume=consume,
    in_order=in_order,
    late=late,
    max_staleness=max_staleness,
    update_s=update_s,
  )
  return _read(folder / 'events.jsonl', used, counts)


def on_fake_engine(
  *, length, cap, turns, tool_s, reward, seconds_per_token, num_slots
) -> tuple[Play, Publish]:
  """Episodes by `run_episode`, and where versions are published. For the arguments see `simulate`."""
  engine = fake.FakeEngine(
    _LOGITS,
    version=0,
    num_slots=num_slots,
    stop_token=_STOP_TOKEN,
    length=length,
    seconds_per_token=seconds_per_token,
    load_seconds=0.0,
  )

  async def play(task, *, episode, group, seed):
    return await run_episode(
      _Tool(seed, turns, tool_s, reward),
      engine,
      task,
      episode=episode,
      group=group,
      seed=seed,
      temperature=1.0,
      max_turn_tokens=cap,
      max_tokens=turns * (cap + 1) + 1,
      vocab_size=len(_LOGITS),
      at=lambda what: None,
    )

  return play, lambda version: engine.load(_LOGITS, version)


def drive(
  folder: Path,
  make: Callable[[], tuple[Play, Publish]],
  seen: Seen,
  *,
  seed: int,
  updates: int,
  batch_size: int,
  capacity: int,
  consume: str,
  in_order: bool,
  late: str,
  max_staleness: int,
  update_s: float,
) -> dict[str, int]:
  """The learner's side on a virtual loop. Returns the counts of the ledger.

  Args:
    make: called in the loop; gives how an episode is played and where a version is published.
    seen: told of every batch when it is taken.
  """
  limits = Limits(
    seed=seed,
    group_size=1,
    capacity=capacity,
    consume=consume,
    late=late,
    max_staleness=max_staleness,
    retries={},
    back_off=BackOff(1.0, 1.0),
    max_failures_in_row=1,
    breaker_cooldown_s=1.0,
    breaker_openings=0,
    episode_timeout_s=1e6,  # logical, as all seconds here
    stall_timeout_s=1e6,
  )

  async def main() -> dict[str, int]:
    clock = asyncio.get_running_loop().time
    play, publish = make()
    ledger = Ledger(folder / 'events.jsonl', clock)
    dispatcher = Dispatcher(
      play,
      lambda index: Task(f'p{index}', '', ''),
      ledger,
      limits,
      Waits(clock),
      episodes_needed=10**9,  # the end of the run is not announced: nothing starts less for it
      version=0,
    )
    for version in range(updates):
      batch = await dispatcher.take(batch_size, in_order=in_order)
      seen(version, batch)
      await asyncio.sleep(update_s)
      publish(version + 1)
      dispatcher.trained(batch, version=version + 1)
    await dispatcher.drain()
    await dispatcher.close('end')
    ledger.close()
    return {state: count for state, count in ledger.counts.items() if count}

  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    return runner.run(main())


def _read(log: Path, used: dict[str, list], counts: dict[str, int]) -> Simulation:
  """The log is the truth; `used` adds what it does not tell."""
  columns = collections.defaultdict(lambda: array.array('d'))
  with log.open() as lines:
    for row in map(json.loads, lines):
      index, event = int(row['episode'].partition('-')[0]), row['event']
      columns[event].extend((index, row['version']))
      if event == 'finished':
        columns['facts'].extend((row['tokens'], row['reward']))
  pairs = {name: np.asarray(column).reshape(-1, 2) for name, column in columns.items()}
  size = len(pairs['pending'])
  order = pairs['finished'][:, 0].astype(int)
  if sorted(order) != list(range(size)):
    raise AssertionError('an episode did not finish, or the order of starting has gaps')

  def scatter(where, values, missing):
    column = np.full(size, missing)
    column[np.asarray(where, int)] = values
    return column

  empty = np.zeros((0, 2))
  trained, dropped = pairs.get('trained', empty), pairs.get('dropped', empty)
  return Simulation(
    started=scatter(pairs['pending'][:, 0], pairs['pending'][:, 1], NEVER),
    length=scatter(order, pairs['facts'][:, 0], 0),
    reward=scatter(order, pairs['facts'][:, 1], 0.0),
    trained=scatter(trained[:, 0], trained[:, 1] - 1, NEVER),
    dropped=scatter(dropped[:, 0], dropped[:, 1], NEVER),
    staleness=scatter(used['index'], used['staleness'], np.nan),
    late_tokens=scatter(used['index'], used['late'], 0),
    seconds=np.asarray(used['seconds']),
    counts=counts,
  )
