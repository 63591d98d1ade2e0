"""The fake engine: closed forms for its tokens, hand-made timetables for everything that takes time."""

import asyncio
import time

import numpy as np
import pytest

from sao_jax.engines import fake
from sao_jax.runtime.clock import VirtualLoop
from sao_jax.types import EpisodeFailure, FailureKind, FinishReason, Request

STOP = 3
ODDS = np.log([1.0, 2.0, 3.0, 50.0])  # without the stop token: 1/6, 2/6, 3/6


def run(main):
  """The result of main(); an error that only a callback saw fails, too."""
  unseen = []

  async def watched():
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    return await main()

  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    result = runner.run(watched())
  assert not unseen
  return result


TEN = fake.constant(10)


def make(params=ODDS, length=TEN, **changes):
  sizes = dict(version=0, num_slots=8, stop_token=STOP, seconds_per_token=1.0, load_seconds=0.0)
  return fake.FakeEngine(params, length=length, **{**sizes, **changes})


def request(episode='a', *, seed=0, prefix=2, new=10**6, temperature=1.0):
  return Request(episode, np.ones(prefix, np.int32), new, temperature, seed)


def by_seed(seed, position):
  """A turn of `seed` tokens."""
  return seed


def now():
  return asyncio.get_running_loop().time()


async def timed(coroutine):
  result = await coroutine
  return now(), result


def same(one, other):
  np.testing.assert_array_equal(one.tokens, other.tokens)
  np.testing.assert_array_equal(one.behavior_logprobs, other.behavior_logprobs)
  return one.version_spans == other.version_spans and one.finish_reason == other.finish_reason


@pytest.mark.parametrize(('temperature', 'odds'), [(1.0, [1, 2, 3]), (0.5, [1, 4, 9])])
def test_tokens_and_logprobs_in_closed_form(temperature, odds):
  # Without the stop token: 1/6, 2/6, 3/6; at temperature 1/2 the squares of the odds.
  async def main():
    return await make(length=fake.constant(20001)).generate(request(temperature=temperature))

  generation = run(main)
  tokens, logprobs = generation.tokens, generation.behavior_logprobs
  assert tokens.dtype == np.int32 and logprobs.dtype == np.float32
  assert generation.finish_reason == FinishReason.STOP
  assert tokens[-1] == STOP and logprobs[-1] == 0.0 and STOP not in tokens[:-1]
  probabilities = np.asarray(odds) / sum(odds)
  np.testing.assert_allclose(logprobs[:-1], np.log(probabilities)[tokens[:-1]], rtol=1e-6)
  # One standard deviation is at most sqrt(1/4 / 20000) = 0.0035. Neighbours are independent: pairs have product shares.
  np.testing.assert_allclose(np.bincount(tokens[:-1]) / 20000, probabilities, atol=0.015)
  pairs = np.bincount(tokens[:-2] * 3 + tokens[1:-1], minlength=9) / 19999
  np.testing.assert_allclose(pairs, np.outer(probabilities, probabilities).ravel(), atol=0.015)


@pytest.mark.parametrize('stop', [0, 2, 3])
def test_any_token_can_be_the_stop(stop):
  async def main():
    return await make(np.zeros(4), fake.constant(2000), stop_token=stop).generate(request())

  tokens = run(main).tokens
  assert tokens[-1] == stop and set(tokens[:-1]) == {0, 1, 2, 3} - {stop}


def test_a_token_depends_on_seed_and_position_alone():
  async def alone():
    return await make(length=fake.constant(41)).generate(request(seed=7))

  async def crowded():
    # Two turns, cut after 15 tokens, on the one slot that 20 others want too.
    engine = make(length=lambda seed, position: 43 - position, num_slots=1)
    others = [engine.generate(request(str(i), seed=100 + i, new=5)) for i in range(20)]
    first, *rest = await asyncio.gather(engine.generate(request(seed=7, new=15)), *others)
    second = await engine.generate(request(seed=7, prefix=17))
    return first, second, rest

  whole, (first, second, rest) = run(alone), run(crowded)
  assert first.finish_reason == FinishReason.LENGTH and len(first.tokens) == 15
  np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens]), whole.tokens)
  logprobs = np.concatenate([first.behavior_logprobs, second.behavior_logprobs])
  np.testing.assert_array_equal(logprobs, whole.behavior_logprobs)
  assert len({tuple(g.tokens) for g in rest}) > 15  # of 3^5: seeds differ


def test_a_length_equal_to_the_limit_still_stops():
  async def main():
    engine = make(length=fake.constant(4))
    return [await engine.generate(request(new=new)) for new in (4, 3)]

  exact, short = run(main)
  assert exact.finish_reason == FinishReason.STOP and exact.tokens[-1] == STOP
  assert short.finish_reason == FinishReason.LENGTH and len(short.tokens) == 3
  assert STOP not in short.tokens


def test_versions_by_hand():
  # Tokens at 0.5, 1.0, .. 4.0. Loads at 1.25 and 1.5 are in place a second later, at 2.25 and 2.5: 4 tokens of
  # version 0 up to 2.0; one of version 1 at 2.5, for which version 2 comes too late; three of version 2.
  seen = {}

  async def main():
    engine = make(np.zeros(4), fake.constant(8), seconds_per_token=0.5, load_seconds=1.0)
    loop = asyncio.get_running_loop()
    loop.call_at(1.25, engine.load, ODDS, 1)
    loop.call_at(1.5, engine.load, 2 * ODDS, 2)
    for moment in (2.0, 2.25, 2.5):
      loop.call_at(moment, lambda at=moment: seen.update({at: engine.health()['version']}))
    return await timed(engine.generate(request(seed=5)))

  end, generation = run(main)
  assert end == 4.0
  assert generation.version_spans == ((0, 4), (1, 1), (2, 3))
  np.testing.assert_array_equal(generation.versions(), [0, 0, 0, 0, 1, 2, 2, 2])
  assert seen == {2.0: 0, 2.25: 1, 2.5: 2}
  tokens = generation.tokens
  expected = np.log([1 / 3] * 7)
  expected[4] = np.log([1 / 6, 2 / 6, 3 / 6])[tokens[4]]
  expected[5:] = np.log([1 / 14, 4 / 14, 9 / 14])[tokens[5:7]]
  np.testing.assert_allclose(generation.behavior_logprobs, [*expected, 0], rtol=1e-6)


def test_the_last_of_several_loads_at_once_counts_and_the_engine_keeps_a_copy():
  async def main():
    engine, params = make(), ODDS.copy()
    engine.load(np.zeros(4), 1)
    engine.load(params, 2)
    params[:] = 0
    return await engine.generate(request())

  generation = run(main)
  assert generation.version_spans == ((2, 10),)
  table = np.log([1 / 6, 2 / 6, 3 / 6])
  np.testing.assert_allclose(
    generation.behavior_logprobs[:-1], table[generation.tokens[:-1]], rtol=1e-6
  )


def test_versions_agree_with_a_loop_over_tokens():
  """Random loads and starts on a grid, where many things happen at one moment; old weights are forgotten on the way."""
  rng = np.random.default_rng(0)
  loads = np.sort(rng.integers(0, 400, 150)) / 4
  starts = rng.integers(0, 400, 300) / 4
  lengths = rng.integers(1, 30, 300)
  kept = []

  async def main():
    engine = make(length=by_seed, num_slots=300, seconds_per_token=0.25, load_seconds=1.5)

    async def publish():
      for version, at in enumerate(loads, 1):
        await asyncio.sleep(at - now())
        engine.load(ODDS, version)
        kept.append(len(engine._history))

    async def play(i):
      await asyncio.sleep(starts[i])
      return await engine.generate(request(str(i), seed=int(lengths[i])))

    _, *generations = await asyncio.gather(publish(), *map(play, range(300)))
    return generations

  for start, length, generation in zip(starts, lengths, run(main), strict=True):
    moments = start + 0.25 * np.arange(1, length + 1)
    expected = [sum(load + 1.5 < moment for load in loads) for moment in moments]
    np.testing.assert_array_equal(generation.versions(), expected)
  # A generation lasts at most 7.25 s and a load 1.5 s, in which 1.5 loads a second come.
  assert max(kept) < 40


def test_slots_are_first_come_first_served():
  # Two slots, a second a token. a: 0 to 4, b: 0 to 2, c: 2 to 3, d: 3 to 4. Slot-seconds 8, over 2 slots.
  seen = []

  async def main():
    engine = make(length=by_seed, num_slots=2)
    asyncio.get_running_loop().call_at(2.5, lambda: seen.append(engine.health()))
    lengths = {'a': 4, 'b': 2, 'c': 1, 'd': 1}
    ends = await asyncio.gather(
      *(timed(engine.generate(request(name, seed=n))) for name, n in lengths.items())
    )
    await asyncio.sleep(10)
    return [end for end, _ in ends], engine.health()

  ends, after = run(main)
  assert ends == [4.0, 2.0, 3.0, 4.0]
  state = dict(version=0, compiles=0)
  assert seen == [dict(state, tokens_sampled=2, busy_s=2.5, slots_in_use=2, waiting=1)]
  assert after == dict(state, tokens_sampled=8, busy_s=4.0, slots_in_use=0, waiting=0)


@pytest.mark.parametrize('end', ['abort', 'release'])
def test_abort_returns_what_is_sampled_and_frees_the_slot(end):
  async def whole():
    return await make(length=fake.constant(6)).generate(request(seed=1))

  async def main():
    engine = make(length=fake.constant(6), num_slots=1)
    for moment, episode in ((2.5, 'a'), (1.0, 'waiting'), (0.5, 'unknown')):
      asyncio.get_running_loop().call_at(moment, getattr(engine, end), episode)
    return await asyncio.gather(
      *(timed(engine.generate(request(name, seed=1))) for name in ('a', 'waiting', 'next'))
    )

  complete, (first, waiting, after) = run(whole), run(main)
  # Tokens at 1 and 2; 'next' has the slot from 2.5 to 8.5.
  assert [end for end, _ in (first, waiting, after)] == [2.5, 1.0, 8.5]
  aborted = first[1]
  assert aborted.finish_reason == FinishReason.ABORTED and aborted.version_spans == ((0, 2),)
  np.testing.assert_array_equal(aborted.tokens, complete.tokens[:2])
  np.testing.assert_array_equal(aborted.behavior_logprobs, complete.behavior_logprobs[:2])
  nothing = waiting[1]
  assert nothing.finish_reason == FinishReason.ABORTED and nothing.version_spans == ()
  assert len(nothing.tokens) == len(nothing.behavior_logprobs) == len(nothing.versions()) == 0
  assert same(after[1], complete)


def test_an_abort_at_a_tokens_moment_includes_it_and_at_the_last_changes_nothing():
  async def main():
    engine = make(length=fake.constant(3))
    # Set before the engine's own timers, so that the aborts come first.
    for moment, episode in ((2.0, 'a'), (3.0, 'b')):
      asyncio.get_running_loop().call_at(moment, engine.abort, episode)
    return await asyncio.gather(*(engine.generate(request(name)) for name in 'abc'))

  second, last, free = run(main)
  assert second.finish_reason == FinishReason.ABORTED and len(second.tokens) == 2
  assert last.finish_reason == FinishReason.STOP and same(last, free)


def test_cancelling_frees_the_slot():
  async def main():
    engine = make(length=by_seed, num_slots=1)
    running = asyncio.create_task(engine.generate(request('running', seed=100)))
    waiting = asyncio.create_task(engine.generate(request('waiting', seed=100)))
    after = asyncio.create_task(timed(engine.generate(request('after', seed=3))))
    asyncio.get_running_loop().call_at(1.0, waiting.cancel)
    asyncio.get_running_loop().call_at(2.5, running.cancel)
    results = await asyncio.gather(running, waiting, after, return_exceptions=True)
    again, _ = await timed(engine.generate(request('running', seed=2)))
    return results, again, engine.health()

  (running, waiting, after), again, health = run(main)
  assert isinstance(running, asyncio.CancelledError)
  assert isinstance(waiting, asyncio.CancelledError)
  assert after[0] == 5.5 and again == 7.5
  # Two tokens of the cancelled one were sampled; the slot was busy all the time.
  assert health['tokens_sampled'] == 2 + 3 + 2 and health['busy_s'] == 7.5
  assert health['slots_in_use'] == health['waiting'] == 0


def test_cancelling_at_the_moment_of_the_last_token():
  """The timer finds a request whose coroutine does not yet know that it is cancelled."""

  async def main():
    engine = make(length=fake.constant(2), num_slots=1)
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(engine.generate(request(name))) for name in ('a', 'b')]
    loop.call_at(2.0, tasks[0].cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return results, now(), engine.health()

  (cancelled, other), end, health = run(main)
  assert isinstance(cancelled, asyncio.CancelledError) and len(other.tokens) == 2
  assert end == 4.0 and health['slots_in_use'] == 0 and health['tokens_sampled'] == 4


def test_close_fails_who_waits_and_whoever_comes():
  async def main():
    engine = make(num_slots=1)
    asyncio.get_running_loop().call_at(2.5, engine.close)
    requests = [timed(engine.generate(request(name))) for name in 'ab']
    results = await asyncio.gather(*requests, return_exceptions=True)
    results += await asyncio.gather(engine.generate(request('c')), return_exceptions=True)
    engine.close()
    return results, now(), engine.health()

  results, end, health = run(main)
  assert len(results) == 3
  for error in results:
    assert isinstance(error, EpisodeFailure) and error.kind == FailureKind.INFRA
  assert end == 2.5 and health['slots_in_use'] == health['waiting'] == 0


def draws(law, count=4000):
  return np.asarray([law(seed, 5) for seed in range(count)])


def test_lengths_follow_their_laws():
  # 4000 draws: a share has a standard deviation of at most 0.008.
  assert set(draws(fake.constant(7), 10)) == {7}

  normal = draws(fake.log_normal(median=100, sigma=0.5, cap=200))
  # log 200 / 100 is 1.386 sigma: 8.3 % reach the cap. One sigma is 100 e^0.5 = 165: 15.9 % beyond.
  assert normal.max() == 200 and np.median(normal) == pytest.approx(100, abs=4)
  assert (normal == 200).mean() == pytest.approx(0.083, abs=0.03)
  assert (normal > 165).mean() == pytest.approx(0.159, abs=0.03)
  assert draws(fake.log_normal(median=0.1, sigma=0.1, cap=9), 50).max() == 1
  # Without a cap in reach the mean is median e^(sigma^2 / 2) = 113.3; its standard deviation is 1.
  free = draws(fake.log_normal(median=100, sigma=0.5, cap=10**6))
  assert free.mean() == pytest.approx(113.3, abs=4)

  tail = draws(fake.pareto(minimum=10, shape=1.0, cap=100))
  assert tail.min() == 10 and tail.max() == 100
  assert (tail >= 20).mean() == pytest.approx(10 / 20, abs=0.03)
  assert (tail == 100).mean() == pytest.approx(10 / 100, abs=0.03)
  assert draws(fake.pareto(minimum=2, shape=0.001, cap=50), 200).max() == 50

  modes = draws(fake.bimodal(short=3, long=90, share_long=0.2))
  assert set(modes) == {3, 90} and (modes == 90).mean() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
  'law',
  [
    fake.log_normal(median=100, sigma=1.0, cap=1000),
    fake.pareto(minimum=10, shape=1.0, cap=10000),
    fake.bimodal(short=1, long=2, share_long=0.5),
  ],
)
def test_a_length_is_a_function_of_seed_and_position(law):
  pairs = [(seed, position) for seed in range(20) for position in range(20)]
  table = np.asarray([law(*pair) for pair in pairs]).reshape(20, 20)
  again = {pair: law(*pair) for pair in reversed(pairs)}
  np.testing.assert_array_equal([again[pair] for pair in pairs], table.ravel())
  assert all(len(set(row)) > 1 for row in table) and all(len(set(row)) > 1 for row in table.T)


def test_lengths_say_nothing_of_tokens():
  async def main():
    engine = make(length=fake.bimodal(short=2, long=3, share_long=0.5))
    turns = [engine.generate(request(str(seed), seed=seed)) for seed in range(600)]
    return await asyncio.gather(*turns)

  pairs = np.asarray([(len(g.tokens), g.tokens[0]) for g in run(main)])
  for length in (2, 3):
    # Token 2 has probability 1/2; about 300 draws, a standard deviation of 0.03.
    assert (pairs[pairs[:, 0] == length, 1] == 2).mean() == pytest.approx(0.5, abs=0.12)


def test_twenty_thousand_generations_in_seconds():
  began = time.monotonic()

  async def main():
    engine = make(length=fake.log_normal(median=50, sigma=1.0, cap=1000), num_slots=256)

    async def publish():
      for version in range(1, 10**6):
        await asyncio.sleep(100)
        engine.load(ODDS, version)

    publishing = asyncio.create_task(publish())
    generations = await asyncio.gather(
      *(engine.generate(request(str(seed), seed=seed)) for seed in range(20000))
    )
    publishing.cancel()
    return generations, engine.health(), now()

  generations, health, end = run(main)
  total = sum(len(g.tokens) for g in generations)
  assert (
    health['tokens_sampled'] == total == sum(n for g in generations for _, n in g.version_spans)
  )
  assert health['busy_s'] == pytest.approx(total / 256)
  # All slots are busy but for the end, which the longest turn may take alone.
  assert total / 256 <= end <= total / 256 + 1000
  assert time.monotonic() - began < 30


@pytest.mark.parametrize(
  'changes',
  [
    {'num_slots': 0},
    {'seconds_per_token': 0.0},
    {'seconds_per_token': np.nan},
    {'load_seconds': -1.0},
    {'stop_token': 4},
    {'stop_token': -1},
    {'params': np.zeros((2, 2))},
    {'params': np.zeros(1), 'stop_token': 0},
    {'params': np.asarray([0.0, np.inf, 0.0, 0.0])},
  ],
)
def test_an_engine_that_cannot_be_is_refused(changes):
  with pytest.raises(ValueError, match='got'):
    make(**changes)


@pytest.mark.parametrize(
  'changes',
  [
    {'prefix': 0},
    {'new': 0},
    {'temperature': 0.0},
    {'temperature': np.nan},
    {'seed': -1},
    {'seed': 2**32},
  ],
)
def test_a_request_that_cannot_be_met_is_refused(changes):
  async def main():
    engine = make()
    with pytest.raises(ValueError, match='got'):
      await engine.generate(request(**changes))
    return await engine.generate(request())  # nothing is left behind

  assert len(run(main).tokens) == 10


def test_what_else_is_refused():
  async def main():
    engine = make(length=lambda seed, position: 0)
    with pytest.raises(ValueError, match='at least its stop token'):
      await engine.generate(request())
    with pytest.raises(ValueError, match='tokens must be'):
      await engine.generate(Request('a', np.asarray([4], np.int32), 1, 1.0, 0))
    with pytest.raises(ValueError, match='4 logits'):
      engine.load(np.zeros(5), 1)
    engine = make()
    running = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(1)
    with pytest.raises(ValueError, match='one at a time'):
      await engine.generate(request())
    await running
    return engine

  engine = run(main)
  with pytest.raises(RuntimeError, match='another event loop'):
    run(lambda: engine.generate(request()))


@pytest.mark.parametrize(
  'law',
  [
    lambda: fake.constant(0),
    lambda: fake.log_normal(median=0, sigma=1.0, cap=9),
    lambda: fake.log_normal(median=5, sigma=-1.0, cap=9),
    lambda: fake.log_normal(median=5, sigma=1.0, cap=0),
    lambda: fake.pareto(minimum=10, shape=1.0, cap=9),
    lambda: fake.pareto(minimum=0, shape=1.0, cap=9),
    lambda: fake.pareto(minimum=1, shape=0.0, cap=9),
    lambda: fake.bimodal(short=0, long=2, share_long=0.5),
    lambda: fake.bimodal(short=3, long=2, share_long=0.5),
    lambda: fake.bimodal(short=1, long=2, share_long=1.5),
  ],
)
def test_a_law_that_cannot_be_is_refused(law):
  with pytest.raises(ValueError, match='got'):
    law()
