"""Logical time: a run repeats bit for bit, a resume from any event is exact, staleness 0 is the synchronous trainer."""

import asyncio
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import batching, build, loop, tokens
from sao_jax.engines.local import LocalEngine
from sao_jax.envs.grading import Grader
from sao_jax.envs.math_python import MathPython
from tests import tiny


@pytest.fixture(scope='module')
def parts():
  return tiny.parts_of()


@pytest.fixture(scope='module')
def whole(world, parts, tmp_path_factory):
  """The uninterrupted run."""
  folder = tmp_path_factory.mktemp('whole')
  tiny.run(world, parts, folder / 'first')  # compiles
  tiny.run(world, parts, folder / 'second')
  return folder


def test_a_run_repeats_bit_for_bit(whole):
  first, second = whole / 'first', whole / 'second'
  assert len(tiny.digests(first)) == 1 + 12 and tiny.digests(first) == tiny.digests(second)
  assert (first / 'events.jsonl').read_bytes() == (second / 'events.jsonl').read_bytes()
  assert (first / 'metrics.jsonl').read_bytes() == (second / 'metrics.jsonl').read_bytes()


def test_it_is_asynchronous_and_uses_its_tool(whole):
  updates = [row for row in tiny.rows(whole / 'second' / 'metrics.jsonl') if 'loss/policy' in row]
  assert max(row['async/staleness_max'] for row in updates) == 1
  assert sum(row['tool/calls_mean'] for row in updates) > 0
  assert len(set(tiny.digests(whole / 'second'))) == 13
  events = tiny.rows(whole / 'second' / 'events.jsonl')
  # Updates take logical time, in which episodes go on.
  times = [row['t'] for row in events if row['event'] == 'finished']
  assert times == sorted(times) and len(set(times)) > 13


@pytest.mark.timeout(1200)
def test_stopped_at_every_event_and_resumed_it_is_the_same_run(whole, world, parts, tmp_path):
  expected = whole / 'second'
  events = (expected / 'events.jsonl').read_bytes()
  metrics = (expected / 'metrics.jsonl').read_bytes()
  count = events.count(b'\n')
  assert count == 4 * (12 + 1) * 4  # each episode has four events
  stopped = 0
  for k in range(1, count + 1):
    workdir = tmp_path / f'stopped-{k}'
    try:
      tiny.run(world, parts, workdir, stop_at=k)
    except loop.Stopped:
      stopped += 1
      tiny.run(world, parts, workdir)
    assert tiny.digests(workdir)[-1] == tiny.digests(expected)[-1], f'stopped at event {k}'
    assert (workdir / 'events.jsonl').read_bytes() == events, f'stopped at event {k}'
    assert (workdir / 'metrics.jsonl').read_bytes() == metrics, f'stopped at event {k}'
    shutil.rmtree(workdir)
  assert stopped >= count - 8  # after the last update's events there is little left to stop


def test_staleness_0_is_the_synchronous_trainer(world, tmp_path):
  expected = synchronous(world, tiny.parts_of())
  for name, changes in {
    'depth': {'runtime__pipeline_depth': 0},
    'staleness': {'runtime__max_staleness': 0},
  }.items():
    tiny.run(world, tiny.parts_of(**changes), tmp_path / name)
    assert tiny.digests(tmp_path / name) == expected
  for mode in ('sync', 'async'):  # threads and a real clock
    changes = {'runtime__mode': mode, 'runtime__pipeline_depth': 0}
    tiny.run(world, tiny.parts_of(**changes), tmp_path / mode)
    assert tiny.digests(tmp_path / mode) == expected


def synchronous(world, parts) -> list[str]:
  """A trainer without a runtime: plays a batch, learns from it, plays the next one. Digests after each update."""
  c, size = parts.config, parts.config.train.batch_size
  state, digests = tiny.fresh_state(world, parts), []

  async def play(index: int, engine, sandbox, grader):
    seed = np.random.SeedSequence([c.seed, index, 0, 0]).generate_state(1)[0] >> 1
    env = MathPython(
      chat=tokens.BYTE_CHAT,
      sandbox=sandbox,
      grader=grader,
      max_turns=c.env.max_turns,
      observation_bytes=c.env.observation_bytes,
    )
    name = {'episode': f'{index:06d}-0-0', 'group': str(index)}
    task = parts.source.task(index)
    return await build.play_on(c, tokens.VOCAB_SIZE, env, engine, task, seed=int(seed), **name)

  async def batch(number: int, *tools):
    policy = jax.tree.map(jnp.copy, state.policy)
    engine = LocalEngine(world.programs, policy, version=int(state.step))
    indices = range(number * size, (number + 1) * size)
    playing = [asyncio.create_task(play(index, engine, *tools)) for index in indices]
    while not all(task.done() for task in playing):
      await asyncio.sleep(0.001)
      engine.step()
    engine.close()
    return [task.result() for task in playing]

  def pack(trajectories):
    shape = {'row_length': c.env.max_tokens, 'row_multiple': c.train.micro_rows}
    return batching.pack(trajectories, version=int(state.step), max_staleness=0, **shape)

  async def main():
    nonlocal state
    tools = build.make_sandbox(c), Grader(timeout_s=5.0, num_workers=1)
    first = await batch(0, *tools)
    critic = parts.init_critic(state.policy, float(np.mean([t.reward for t in first])))
    state = state.replace(critic=critic, critic_opt=parts.critic_tx.init(critic))
    state, _ = parts.learner.update_critic(state, pack(first))
    digests.append(loop.digest_of(state))
    for number in range(1, c.train.num_steps + 1):
      state, _ = parts.learner.update(state, pack(await batch(number, *tools)))
      digests.append(loop.digest_of(state))
    for tool in tools:
      await tool.close()

  with tiny.rewarded():
    asyncio.run(main())
  return digests
