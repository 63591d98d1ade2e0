"""The local engine recorded, redone bit for bit, and driven by an event loop whose time is logical."""

import asyncio
import functools
import json
import threading

import jax
import numpy as np
import pytest

from sao_jax import types
from sao_jax.engines import local
from sao_jax.runtime.clock import VirtualLoop
from sao_jax.types import FinishReason
from tests.test_engine import VOCAB, engine_of, long_seed, many, params, request

EPISODES = 60


def recorded(rows):
  """An engine whose journal is `rows`, each with the slots of its prefill calls: their grouping may decide bits, too."""
  prefilled = []

  def spy(prefill, *args):
    prefilled.append(args[2].slots.tolist())
    return prefill(*args)

  def journal(row):
    rows.append(dict(row, prefilled=prefilled.copy()))
    prefilled.clear()

  prefill = {bucket: functools.partial(spy, call) for bucket, call in many().prefill.items()}
  programs = many()._replace(prefill=prefill)
  return local.LocalEngine(programs, params(0), version=0, name='test', journal=journal)


async def play(engine, i, second, script):
  """1 to 4 turns that end in all ways; `script` gets (request, generation or None where nobody took it).

  second: what the loop's clock counts for a random time of at most 1.
  """
  rng = np.random.default_rng(i)
  tokens = rng.integers(1, VOCAB, rng.integers(1, 25)).astype(np.int32)
  await asyncio.sleep(second * rng.random())
  for turn in range(rng.integers(1, 5)):
    if len(tokens) + 12 > 48:  # the positions of a slot
      break
    one = request(i, tokens, int(rng.integers(1, 13)), rng.uniform(0.2, 1), seed=turn)
    task = asyncio.ensure_future(engine.generate(one))
    await asyncio.sleep(0)
    act = rng.choice(['wait', 'wait', 'wait', 'abort', 'release', 'cancel'])
    wait = rng.choice([0.05, 0.5]) * second * rng.random()
    if act in ('abort', 'release'):
      asyncio.get_running_loop().call_later(wait, getattr(engine, act), str(i))
    try:
      # Not answered within the time: cancelled, as an episode is that takes too long.
      generation = await asyncio.wait_for(task, wait if act == 'cancel' else 60 + 100 * second)
    except TimeoutError:
      script.append((one, None))
      break
    script.append((one, generation))
    tokens = np.concatenate([tokens, generation.tokens, rng.integers(1, VOCAB, 2)])
    await asyncio.sleep(second * rng.random() / 5)
  engine.release(str(i))


def record_in_threads(rows, scripts):
  engine = recorded(rows).start()

  async def half(first):
    await asyncio.gather(*(play(engine, i, 0.05, scripts[i]) for i in range(first, EPISODES, 2)))

  def swaps(stop):
    version = 0
    while not stop.wait(0.01):
      version += 1
      engine.load(params(version % 2), version)

  stop = threading.Event()
  threads = [threading.Thread(target=lambda i=i: asyncio.run(half(i))) for i in range(2)]
  threads.append(threading.Thread(target=swaps, args=(stop,)))
  try:
    for thread in threads:
      thread.start()
    for thread in threads[:2]:
      thread.join(120)
  finally:
    stop.set()
    threads[2].join(10)
    engine.close()
  return engine.health()


def record_by_drive(rows, scripts):
  engine = recorded(rows)

  async def swaps():
    for version in range(1, 1000):
      await asyncio.sleep(0.4)
      engine.load(params(version % 2), version)

  async def main():
    beside = [asyncio.create_task(engine.drive(0.1)), asyncio.create_task(swaps())]
    await asyncio.gather(*(play(engine, i, 3.0, scripts[i]) for i in range(EPISODES)))
    for task in beside:
      task.cancel()
    return dict(engine.health(), end_s=asyncio.get_running_loop().time())

  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    return runner.run(main())


def redo(rows, scripts):
  """All rounds on a fresh engine, with the requests of the scripts; what differs fails."""
  again = []
  engine = recorded(again)

  async def answered(script):
    for one, generation in script:
      if generation is not None and not len(generation.tokens):
        continue  # aborted before it had a slot: the engine never saw it
      found = await engine.generate(one)
      if generation is not None:
        assert found.finish_reason == generation.finish_reason
        assert found.version_spans == generation.version_spans
        np.testing.assert_array_equal(found.tokens, generation.tokens)
        assert found.behavior_logprobs.tobytes() == generation.behavior_logprobs.tobytes()

  async def main():
    tasks = [asyncio.create_task(answered(script)) for script in scripts]
    loaded = 0
    for row in rows:
      admitted = {operation[2] for operation in row['operations'] if operation[0] == 'admit'}
      for _ in range(10):
        await asyncio.sleep(0)
      assert admitted <= engine.waiting()
      if row['version'] != loaded:
        loaded = row['version']
        engine.load(params(loaded % 2), loaded)
      assert engine.redo(row['version'], row['operations']).items() <= row.items()
    for _ in range(10):
      await asyncio.sleep(0)
    for task, script in zip(tasks, scripts, strict=True):
      if not task.done():  # cancelled before it had a slot: nothing else may be left
        assert script[-1][1] is None
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [x for x in found if x and not isinstance(x, asyncio.CancelledError)] == []

  asyncio.run(main())
  assert again == rows


def test_rounds_of_threads_are_redone_bit_for_bit():
  rows, scripts = [], [[] for _ in range(EPISODES)]
  health = record_in_threads(rows, scripts)
  assert sum(row['sampled'] for row in rows) == health['tokens_sampled'] > EPISODES
  assert health['version'] > 0 and health['slots_in_use'] == 0
  redo(json.loads(json.dumps(rows)), scripts)


def test_a_driven_run_repeats_itself_and_is_redone_bit_for_bit():
  rows, scripts = [], [[] for _ in range(EPISODES)]
  health = record_by_drive(rows, scripts)
  redo(rows, scripts)
  # Everything has happened that a record must hold.
  kinds = {operation[0] for row in rows for operation in row['operations']}
  assert kinds == {'admit', 'rest', 'free'}
  ends = [generation for script in scripts for _, generation in script]
  aborted = [x for x in ends if x is not None and x.finish_reason == FinishReason.ABORTED]
  assert any(len(x.tokens) for x in aborted) and any(not len(x.tokens) for x in aborted)
  assert None in ends and any(x is not None and len(x.version_spans) > 1 for x in ends)
  assert health['evictions'] and health['tokens_on_older_cache'] and not health['broken_prefixes']
  assert health['busy_s'] == pytest.approx(0.1 * len(rows))

  again, more = [], [[] for _ in range(EPISODES)]
  assert record_by_drive(again, more) == health
  assert again == rows


def test_operations_by_hand():
  rows = []
  engine = recorded(rows)
  slow = functools.partial(request, new=30, temperature=0.5, seed=long_seed())

  async def main():
    tasks = {}

    async def ask(*names):
      for name in names:
        tasks[name] = asyncio.ensure_future(engine.generate(slow(name)))
      await asyncio.sleep(0)

    await ask('a', 'b')
    engine.step()
    engine.abort('a')
    engine.release('b')
    engine.step()  # nothing runs: its operations come with the next round
    assert engine.waiting() == frozenset()
    await ask('c', 'd', 'e', 'f', 'g')
    assert engine.waiting() == {'c', 'd', 'e', 'f', 'g'}
    engine.step()
    assert engine.waiting() == {'g'}
    tasks['d'].cancel()
    await asyncio.sleep(0)
    engine.step()  # d is away from slot 2, and g takes it
    tasks['c'].cancel()
    await asyncio.sleep(0)
    engine.step()  # nobody takes the slot of c, and it samples no more
    return {name: await tasks[name] for name in 'ab'}

  found = asyncio.run(main())
  assert [len(one.tokens) for one in found.values()] == [5, 5]
  assert [row['operations'] for row in rows] == [
    [['admit', 0, 'a'], ['admit', 1, 'b']],
    [
      *[['rest', 0], ['rest', 1], ['free', 1]],
      *[['admit', 1, 'c'], ['admit', 2, 'd'], ['admit', 3, 'e'], ['free', 0], ['admit', 0, 'f']],
    ],
    [['rest', 2], ['free', 2], ['admit', 2, 'g']],
    [['rest', 1]],
  ]
  # A round is 1 token of the prefill and 4 of the decode.
  assert [row['sampled'] for row in rows] == [10, 20, 3 * 4 + 5, 3 * 4]
  assert {row['version'] for row in rows} == {0}


def test_digest_knows_the_last_bit_of_a_log_probability():
  nudge = [0.0]

  def nudged(*args):
    state, (tokens, logprobs) = many().decode(*args)
    return state, (tokens, np.asarray(logprobs) + np.float32(nudge[0]))

  def row_of(episode='a', seed=1):
    rows = []
    programs = many()._replace(decode=nudged)
    engine = local.LocalEngine(programs, params(0), version=0, journal=rows.append)

    async def main():
      task = asyncio.ensure_future(engine.generate(request(episode, seed=seed)))
      await asyncio.sleep(0)
      engine.step()
      task.cancel()

    asyncio.run(main())
    return rows[0]

  first = row_of()
  assert row_of() == first and row_of(episode='b')['digest'] == first['digest']
  nudge[0] = 2e-7
  assert row_of()['digest'] != first['digest']


@pytest.mark.parametrize(
  ('version', 'operations', 'words'),
  (
    (0, [['admit', 2, 'x']], "slot 2 .*'x'.*no open request"),
    (0, [['admit', 1, 'a'], ['admit', 1, 'b']], "slot 1 .*'b'.* it has 'a'"),
    (0, [['admit', 0, 'a'], ['free', 0]], "slot 0 of episode 'a' cannot be freed"),
    (0, [['free', 3]], 'slot 3 of episode None cannot be freed'),
    (0, [['rest', 3]], 'slot 3 of episode None has no request'),
    (0, [['admit', 4, 'a']], 'slot 4 is none of 4'),
    (0, [['evict', 1]], 'evict'),
    (7, [['admit', 0, 'a']], 'version 7.*version 0 is loaded'),
  ),
)
def test_impossible_decisions_are_refused_and_nobody_waits_for_ever(version, operations, words):
  engine = engine_of(many())

  async def main():
    engine.load(params(1), 8)
    tasks = [asyncio.ensure_future(engine.generate(request(name))) for name in 'ab']
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match=words):
      engine.redo(version, operations)
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert all(isinstance(x, types.EpisodeFailure) for x in found)
    with pytest.raises(types.EpisodeFailure, match=words):
      engine.redo(0, [])

  asyncio.run(main())


def test_redo_answers_what_was_aborted_before_it_had_a_slot():
  engine = engine_of(many())

  async def main():
    tasks = [asyncio.ensure_future(engine.generate(request(name))) for name in 'ab']
    await asyncio.sleep(0)
    engine.abort('a')
    assert engine.waiting() == {'b'}
    engine.load(params(1), 8)
    assert engine.redo(8, [['admit', 3, 'b']])['sampled'] == 5
    return await asyncio.wait_for(tasks[0], 30)

  found = asyncio.run(main())
  assert found.finish_reason == FinishReason.ABORTED and len(found.tokens) == 0


def test_an_error_of_the_journal_breaks_the_engine_before_anybody_has_tokens():
  def full(_):
    raise OSError('no space left')

  engine = local.LocalEngine(many(), params(0), version=0, journal=full).start()
  with pytest.raises(types.EpisodeFailure, match='no space left'):
    asyncio.run(asyncio.wait_for(engine.generate(request('a', new=1)), 30))
  engine.close()


def test_a_round_takes_its_time_and_only_requests_make_rounds():
  engine = engine_of(many())
  slow = functools.partial(request, new=14, temperature=0.5, seed=long_seed())

  async def main():
    loop = asyncio.get_running_loop()
    driver = asyncio.create_task(engine.drive(0.5))
    await asyncio.sleep(1)
    engine.load(params(1), 1)
    engine.release('nobody')
    await asyncio.sleep(1)
    assert engine.health()['version'] == 0  # no round was made
    engine.load(params(0), 2)
    # Asked at 2 s: 5 tokens at 2.5, 9 at 3, 13 at 3.5, 14 at 4.
    first = asyncio.create_task(engine.generate(slow('a')))
    await asyncio.sleep(0.75)
    # b joins the round of 3 s: its 14 tokens are there at 4.5 s.
    second = asyncio.create_task(engine.generate(slow('b')))
    assert (await first).version_spans == ((2, 14),) and loop.time() == 4.0
    assert len((await second).tokens) == 14 and loop.time() == 4.5
    assert engine.health()['busy_s'] == 2.5
    # A cancelled request is swept by one round, which runs nothing.
    third = asyncio.create_task(engine.generate(slow('c')))
    await asyncio.sleep(0.25)
    third.cancel()
    await asyncio.sleep(10)
    assert engine.health()['busy_s'] == 2.5 and engine.health()['waiting'] == 0
    assert not driver.done()
    # No request is open: the loop has nothing to jump to, and says so.
    engine.load(params(1), 3)
    await asyncio.Event().wait()

  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    with pytest.raises(RuntimeError, match='nothing can ever happen'):
      runner.run(main())


def test_drive_ends_with_the_engine():
  bad = jax.tree.map(lambda x: x * np.float32(np.nan), params(0))

  async def main(end, words):
    engine = engine_of(many())
    driver = asyncio.create_task(engine.drive(1.0))
    await asyncio.sleep(1)
    waiting = end(engine)
    with pytest.raises(types.EpisodeFailure, match=words):
      await asyncio.wait_for(driver, 10)
    for task in waiting:
      with pytest.raises(types.EpisodeFailure, match=words):
        await task

  def broken(engine):
    engine.load(bad, 1)
    return [asyncio.create_task(engine.generate(request(i))) for i in range(6)]

  def closed(engine):
    engine.close()
    return []

  for end, words in ((broken, 'version 1'), (closed, 'closed')):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
      runner.run(main(end, words))
  engine = engine_of(many()).start()
  for rounds in (engine.drive(1.0), asyncio.to_thread(engine.redo, 0, [])):
    with pytest.raises(RuntimeError, match='has a thread'):
      asyncio.run(rounds)
  engine.close()
