"""The local engine: tokens that depend on nothing but their request, honest log-probabilities, and no way to hang."""

import asyncio
import functools
import threading

import jax
import numpy as np
import pytest

from sao_jax import types
from sao_jax.engines import local, programs
from sao_jax.models import heads, transformer
from sao_jax.types import FinishReason
from tests.models import PLAIN

VOCAB, LENGTH, STOP = 17, 48, 0


@functools.cache
def model():
  return transformer.make(
    **PLAIN,
    vocab_size=VOCAB,
    width=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=24,
    rope_theta=100.0,
    norm_eps=1e-6,
    qk_norm=True,
    tied=True,
    dtype='float32',
    remat='none',
  )


@functools.cache
def params(version):
  rng = np.random.default_rng(version)
  leaf = lambda x: (0.4 * rng.standard_normal(x.shape)).astype(np.float32)
  return jax.tree.map(leaf, jax.eval_shape(model().init, jax.random.key(0)))


@functools.cache
def many():
  """4 slots, 4 steps a call, prefixes of 12 and more in pieces."""
  return make(num_slots=4, decode_steps=4, prefill_rows=2, prefill_buckets=(12, 4))


@functools.cache
def single():
  """1 slot, 1 step a call."""
  return make(num_slots=1, decode_steps=1, prefill_rows=1, prefill_buckets=(8,))


def make(**sizes):
  return programs.make_programs(model(), params(0), max_length=LENGTH, stop_tokens=(STOP,), **sizes)


def engine_of(compiled, version=0):
  return local.LocalEngine(compiled, params(version), version=version, name='test')


def request(episode, tokens=(1, 2, 3), new=8, temperature=1.0, seed=0):
  return types.Request(str(episode), np.asarray(tokens, np.int32), new, temperature, seed)


def random_requests(count, seed):
  rng = np.random.default_rng(seed)
  return [
    request(
      i,
      rng.integers(1, VOCAB, rng.integers(1, 31)),
      int(rng.integers(1, 18)),
      float(rng.choice([0.5, 1.0, 1.7])),
      int(rng.integers(2**32)),
    )
    for i in range(count)
  ]


async def stepped(engine, awaitable):
  """Awaits while making the rounds on this thread."""
  task = asyncio.ensure_future(awaitable)
  await asyncio.sleep(0)
  for _ in range(2000):
    if task.done():
      return await task
    engine.step()
    await asyncio.sleep(0)
  raise AssertionError('no answer after 2000 rounds')


def answers(engine, requests):
  async def main():
    return await stepped(engine, asyncio.gather(*(engine.generate(r) for r in requests)))

  return asyncio.run(main())


def answer(engine, one):
  return answers(engine, [one])[0]


@functools.cache
def feed():
  return jax.jit(model().extend)


def replay(tokens, versions, temperature):
  """Log-probabilities [T, V] of what follows each token, if token t was fed under the weights of versions[t]."""
  cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model().init_cache(1, LENGTH))
  rows = []
  for t, (token, version) in enumerate(zip(tokens, versions, strict=True)):
    piece = np.asarray([[token]], np.int32)
    hidden, cache = feed()(
      params(version), cache, piece, np.asarray([t], np.int32), np.ones(1, np.int32)
    )
    table = model().unembedding(params(version)).astype(np.float64)
    logits = table @ np.asarray(hidden, np.float64)[0, 0] / temperature
    rows.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
  return np.array(rows)


def learner_logprobs(tokens, version, temperature):
  """[T - 1] log-probabilities of tokens[1:] as the learner computes them."""
  row = np.zeros((1, LENGTH), np.int32)
  row[0, : len(tokens)] = tokens
  segments = (np.arange(LENGTH) < len(tokens)).astype(np.int32)[None]
  positions = np.arange(LENGTH, dtype=np.int32)[None]
  hidden = learner_hidden()(params(version), row, positions, segments)[0, : len(tokens) - 1]
  table = model().unembedding(params(version))
  return np.asarray(
    heads.token_logprobs(hidden, table, tokens[1:], temperature=temperature, chunk=64)
  )


@functools.cache
def learner_hidden():
  return jax.jit(model().apply)


def check_replayed(prefix, generation, fed, temperature, seed):
  """Tokens and log-probabilities of one generation after `prefix`, whose tokens were fed under `fed`."""
  versions = generation.versions()
  tokens = np.concatenate([prefix, generation.tokens])
  # The step that samples a token feeds the one before it.
  fed = np.concatenate([fed[: len(prefix) - 1], versions])
  table = replay(tokens[:-1], fed, temperature)
  for i, token in enumerate(generation.tokens):
    at = len(prefix) + i
    assert abs(table[at - 1, token] - generation.behavior_logprobs[i]) < 1e-4
    noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), at), (VOCAB,))
    assert np.argmax(table[at - 1] + np.asarray(noise)) == token
  return tokens, fed


def test_tokens_do_not_depend_on_neighbors_slots_or_steps():
  requests = random_requests(12, seed=0)
  crowd = answers(engine_of(many()), requests)
  reversed_crowd = answers(engine_of(many()), requests[::-1])[::-1]
  lonely = engine_of(single())
  for one, a, b in zip(requests, crowd, reversed_crowd, strict=True):
    alone = answer(lonely, one)
    for other in (a, b):
      np.testing.assert_array_equal(other.tokens, alone.tokens)
      np.testing.assert_allclose(other.behavior_logprobs, alone.behavior_logprobs, atol=1e-5)
      assert other.finish_reason == alone.finish_reason
    assert sum(n for _, n in alone.version_spans) == len(alone.tokens) <= one.max_new_tokens
    stopped = STOP in alone.tokens
    assert (alone.finish_reason == FinishReason.STOP) == stopped
    assert STOP not in alone.tokens[:-1]
    assert stopped or len(alone.tokens) == one.max_new_tokens
  assert {a.finish_reason for a in crowd} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize('temperature', [0.7, 1.0])
def test_engine_and_learner_agree_over_turns(temperature):
  engine = engine_of(many())
  tokens = np.array([3, 1, 4], np.int32)
  for turn in range(3):
    generation = answer(engine, request('a', tokens, 7, temperature, seed=turn))
    begin, tokens = len(tokens), np.concatenate([tokens, generation.tokens])
    learner = learner_logprobs(tokens, 0, temperature)[begin - 1 :]
    np.testing.assert_allclose(generation.behavior_logprobs, learner, atol=1e-4)
    tokens = np.concatenate([tokens, [5, 6]]).astype(np.int32)
  assert engine.health()['tokens_on_older_cache'] == 0


@pytest.mark.parametrize('temperature', [0.7, 1.0])
def test_swap_in_flight_replayed_token_by_token(temperature):
  engine = engine_of(many())
  trial = [request(s, new=14, temperature=temperature, seed=s) for s in range(40)]
  found = answers(engine_of(many()), trial)
  seed = next(s for s, one in enumerate(found) if len(one.tokens) == 14)
  first = request('a', new=14, temperature=temperature, seed=seed)

  async def with_swap():
    task = asyncio.ensure_future(engine.generate(first))
    await asyncio.sleep(0)
    engine.step()  # prefill samples 1 token and decode 4, all under version 0
    engine.load(params(2), 2)  # never used: a newer one comes before the next round
    engine.load(params(1), 1)
    return await stepped(engine, task)

  generation = asyncio.run(with_swap())
  count = len(generation.tokens)
  assert generation.version_spans == ((0, 5), (1, count - 5)) and count > 5
  np.testing.assert_array_equal(generation.versions(), [0] * 5 + [1] * (count - 5))
  tokens, fed = check_replayed(first.tokens, generation, [0] * 3, temperature, seed)
  # Before the swap it is what a learner with the same weights says; after it the old cache shows.
  learner = learner_logprobs(tokens, 0, temperature)[2:7]
  np.testing.assert_allclose(generation.behavior_logprobs[:5], learner, atol=1e-4)
  newer = learner_logprobs(tokens, 1, temperature)[7:]
  assert np.abs(generation.behavior_logprobs[5:] - newer).max() > 1e-3
  assert engine.health()['tokens_on_older_cache'] == count - 5

  # The next turn goes on from that cache: its tail is fed under version 1.
  prefix = np.concatenate([tokens, [7, 8]]).astype(np.int32)
  turn = answer(engine, request('a', prefix, 6, temperature, seed + 1))
  check_replayed(prefix, turn, [*fed, 1, 1, 1], temperature, seed + 1)
  # Another episode sees nothing of version 0.
  other = answer(engine, request('b', prefix, 6, temperature, seed + 1))
  tokens = np.concatenate([prefix, other.tokens])
  learner = learner_logprobs(tokens, 1, temperature)[len(prefix) - 1 :]
  np.testing.assert_allclose(other.behavior_logprobs, learner, atol=1e-4)
  assert other.version_spans == ((1, len(other.tokens)),)


def test_one_token_and_stops_at_the_edges():
  # For each place of the stop token: exactly that budget, one less, one more.
  engine = engine_of(single())
  places = {}
  for seed in range(60):
    generation = answer(engine, request(seed, new=6, seed=seed, temperature=1.7))
    if generation.finish_reason == FinishReason.STOP:
      places.setdefault(len(generation.tokens), (seed, generation.tokens))
  assert 1 in places and len(places) >= 3
  for compiled in (single(), many()):
    for count, (seed, tokens) in places.items():
      for new in {max(count - 1, 1), count, count + 1}:
        engine = engine_of(compiled)
        generation = answer(engine, request('x', new=new, seed=seed, temperature=1.7))
        np.testing.assert_array_equal(generation.tokens, tokens[:new])
        reason = FinishReason.STOP if new >= count else FinishReason.LENGTH
        assert generation.finish_reason == reason


def test_the_last_position_of_a_slot_is_usable():
  prefix = np.arange(LENGTH - 1) % (VOCAB - 1) + 1
  generation = answer(engine_of(many()), request('a', prefix, 1))
  check_replayed(prefix, generation, [0] * len(prefix), 1.0, 0)


@pytest.mark.parametrize(
  ('changes', 'words'),
  (
    ({'tokens': ()}, 'non-empty'),
    ({'tokens': (1.5,)}, None),
    ({'tokens': (1, VOCAB)}, 'must be in'),
    ({'tokens': (-1,)}, 'must be in'),
    ({'new': 0}, 'max_new_tokens'),
    ({'tokens': (1,) * (LENGTH - 7)}, 'positions of a slot'),
    ({'temperature': 0.0}, 'temperature'),
    ({'temperature': float('nan')}, 'temperature'),
    ({'seed': -1}, 'seed'),
  ),
)
def test_bad_requests_start_nothing(changes, words):
  if words is None:
    bad = types.Request('a', np.array([1.5]), 8, 1.0, 0)
    words = 'row of ids'
  else:
    bad = request('a', **changes)
  engine = engine_of(many())
  with pytest.raises(ValueError, match=words):
    asyncio.run(engine.generate(bad))
  assert not engine.step() and engine.health()['waiting'] == 0


def test_only_the_new_tail_is_prefilled():
  engine = engine_of(many())
  generation = answer(engine, request('a', [1, 2, 3], 5, seed=3))
  assert engine.health()['prefill_tokens'] == 3
  # In the cache: the prefix and all sampled tokens but the last. Fed now: that one and the observation.
  prefix = np.concatenate([[1, 2, 3], generation.tokens, [4, 5]])
  again = answer(engine, request('a', prefix, 5, seed=4))
  assert engine.health()['prefill_tokens'] == 3 + 3
  # A rewritten history is prefilled from the start, and gives what a fresh engine gives.
  broken = np.concatenate([[9], prefix[1:], again.tokens])
  rewritten = answer(engine, request('a', broken, 5, seed=5))
  assert engine.health()['prefill_tokens'] == 6 + len(broken)
  assert engine.health()['broken_prefixes'] == 1
  fresh = answer(engine_of(many()), request('z', broken, 5, seed=5))
  np.testing.assert_array_equal(rewritten.tokens, fresh.tokens)
  np.testing.assert_allclose(rewritten.behavior_logprobs, fresh.behavior_logprobs, atol=1e-5)


def test_slots_are_taken_from_the_episode_away_longest_only_when_needed():
  engine = engine_of(many())
  first = {name: answer(engine, request(name, seed=i)) for i, name in enumerate('abcd')}
  engine.release('d')
  engine.release('d')
  engine.release('never seen')
  answer(engine, request('e'))  # takes the slot of d
  health = engine.health()
  assert (health['evictions'], health['slots_in_use']) == (0, 4)
  answer(engine, request('f'))  # takes that of a
  assert engine.health()['evictions'] == 1
  prefill = engine.health()['prefill_tokens']
  prefix = np.concatenate([[1, 2, 3], first['b'].tokens, [4]])
  answer(engine, request('b', prefix))
  assert engine.health()['prefill_tokens'] == prefill + 2
  # a comes back: prefilled from the start, same tokens as with a slot of its own.
  prefix = np.concatenate([[1, 2, 3], first['a'].tokens, [4]])
  back = answer(engine, request('a', prefix, seed=11))
  assert engine.health()['prefill_tokens'] == prefill + 2 + len(prefix)
  fresh = answer(engine_of(many()), request('a', prefix, seed=11))
  np.testing.assert_array_equal(back.tokens, fresh.tokens)


def long_seed():
  """A seed whose generation after (1, 2, 3) has 30 tokens."""
  requests = [request(seed, new=30, seed=seed, temperature=0.5) for seed in range(60)]
  found = answers(engine_of(many()), requests)
  return next(seed for seed, one in enumerate(found) if len(one.tokens) == 30)


def test_abort_release_and_cancel_free_the_work():
  slow = functools.partial(request, new=30, temperature=0.5, seed=long_seed())
  whole = answer(engine_of(single()), slow('x')).tokens
  engine = engine_of(single())

  async def main():
    tasks = {name: asyncio.ensure_future(engine.generate(slow(name))) for name in 'abcd'}
    await asyncio.sleep(0)
    engine.step()  # a runs, b c d wait
    assert engine.health()['waiting'] == 3
    with pytest.raises(ValueError, match='one at a time'):
      await engine.generate(slow('a'))
    engine.abort('nobody')
    engine.abort('a')
    engine.abort('b')
    engine.step()
    a, b = await tasks['a'], await tasks['b']
    assert a.finish_reason == b.finish_reason == FinishReason.ABORTED
    np.testing.assert_array_equal(a.tokens, whole[:2])  # one of prefill, one of decode
    assert len(b.tokens) == 0 and b.version_spans == ()
    # c took the slot. Cancelled, its episode may ask again, and d gets the slot once c is away.
    tasks['c'].cancel()
    await asyncio.sleep(0)
    again = asyncio.ensure_future(engine.generate(slow('c')))
    for task in (again, tasks['d']):
      np.testing.assert_array_equal((await stepped(engine, task)).tokens, whole)
    # Released with a request open, in the slot or in the queue.
    released = [asyncio.ensure_future(engine.generate(slow(name))) for name in 'ef']
    await asyncio.sleep(0)
    engine.step()
    engine.release('e')
    engine.release('f')
    for generation in await stepped(engine, asyncio.gather(*released)):
      assert generation.finish_reason == FinishReason.ABORTED
    assert engine.health()['slots_in_use'] == 0
    # Cancelled while running, then released: nothing is left, and nothing runs.
    gone = asyncio.ensure_future(engine.generate(slow('g')))
    await asyncio.sleep(0)
    engine.step()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    engine.release('g')
    engine.step()
    sampled = engine.health()['tokens_sampled']
    assert not engine.step()
    assert engine.health()['tokens_sampled'] == sampled
    assert engine.health()['slots_in_use'] == 0

  asyncio.run(main())


def test_an_aborted_episode_goes_on_where_it_was():
  seed = long_seed()
  whole = answer(engine_of(many()), request('a', new=30, temperature=0.5, seed=seed))
  engine = engine_of(many())

  async def main():
    task = asyncio.ensure_future(engine.generate(request('a', new=30, temperature=0.5, seed=seed)))
    await asyncio.sleep(0)
    engine.step()
    engine.abort('a')
    return await stepped(engine, task)

  part = asyncio.run(main())
  prefix = np.concatenate([[1, 2, 3], part.tokens])
  rest = answer(engine, request('a', prefix, 30 - len(part.tokens), 0.5, seed))
  assert engine.health()['prefill_tokens'] == 3 + 1
  np.testing.assert_array_equal(np.concatenate([part.tokens, rest.tokens]), whole.tokens)


def test_a_broken_round_fails_everybody_and_every_later_call():
  def explode(*_):
    raise RuntimeError('out of memory')

  engine = engine_of(many()._replace(decode=explode)).start()

  async def main():
    waiting = [engine.generate(request(i)) for i in range(6)]
    found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    with pytest.raises(types.EpisodeFailure, match='out of memory'):
      await engine.generate(request('late'))
    return found

  for error in asyncio.run(main()):
    assert isinstance(error, types.EpisodeFailure) and error.kind == types.FailureKind.INFRA
  engine.close()


def test_weights_that_are_not_finite_break_the_engine():
  engine = engine_of(many())
  engine.load(jax.tree.map(lambda x: x * np.float32(np.nan), params(0)), 1)
  with pytest.raises(types.EpisodeFailure, match='version 1'):
    answer(engine, request('a'))


def test_close_answers_those_who_wait():
  for start in (False, True):
    engine = engine_of(single())
    if start:
      engine.start()

    async def main(engine=engine):
      tasks = [asyncio.ensure_future(engine.generate(request(i, new=40))) for i in range(5)]
      await asyncio.sleep(0)
      engine.close()
      found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
      assert sum(isinstance(x, types.EpisodeFailure) for x in found) >= 4
      with pytest.raises(types.EpisodeFailure, match='closed'):
        await engine.generate(request('late'))

    asyncio.run(main())
    engine.close()


def test_load_refuses_other_shapes_and_dtypes():
  engine = engine_of(many())
  half = jax.tree.map(lambda x: x.astype(np.float16), params(0))
  with pytest.raises(ValueError, match='do not fit'):
    engine.load(half, 1)
  with pytest.raises(ValueError, match='do not fit'):
    engine.load({'embed': params(0)['embed']}, 1)


def test_random_episodes_from_two_loops_compile_nothing_and_lose_nothing():
  # 200 episodes of 1 to 3 turns on 4 slots, with weights swapped while they run.
  engine = engine_of(many()).start()
  compiles, done = [], []
  answered = asyncio.run(asyncio.wait_for(engine.generate(request('warm')), 30))
  assert len(answered.tokens)
  listen = lambda name, *_, **__: compiles.append(name) if 'backend_compile' in name else None
  jax.monitoring.register_event_duration_secs_listener(listen)

  async def episode(i):
    rng = np.random.default_rng(i)
    tokens = rng.integers(1, VOCAB, rng.integers(1, 16)).astype(np.int32)
    for turn in range(rng.integers(1, 4)):
      await asyncio.sleep(rng.random() / 100)
      new = int(rng.integers(1, 9))
      one = request(i, tokens, new, rng.uniform(0.3, 2), seed=turn)
      generation = await asyncio.wait_for(engine.generate(one), 60)
      versions = generation.versions()
      assert 1 <= len(generation.tokens) == len(versions) <= new and (np.diff(versions) >= 0).all()
      tokens = np.concatenate([tokens, generation.tokens, rng.integers(1, VOCAB, 2)])
    engine.release(str(i))
    done.append(i)

  async def half(first):
    await asyncio.gather(*(episode(i) for i in range(first, 200, 2)))

  def swaps(stop):
    version = 0
    while not stop.wait(0.02):
      version += 1
      engine.load(params(version % 2), version)

  stop = threading.Event()
  threads = [threading.Thread(target=lambda i=i: asyncio.run(half(i))) for i in range(2)]
  swapper = threading.Thread(target=swaps, args=(stop,))
  try:
    for thread in (*threads, swapper):
      thread.start()
    for thread in threads:
      thread.join(120)
  finally:
    stop.set()
    swapper.join(10)
    jax.monitoring.unregister_event_duration_listener(listen)
  assert sorted(done) == list(range(200))
  assert compiles == []
  health = engine.health()
  assert health['compiles'] == 3 and health['version'] > 0
  assert health['slots_in_use'] == health['waiting'] == 0
  engine.close()


def test_only_sampled_tokens_come_to_the_host_and_the_state_stays_in_place():
  compiled = many()
  slots, steps = 4, 4
  for program, shape in ((compiled.decode, (steps, slots)), (compiled.prefill[4], (2,))):
    _, sampled = program.out_info
    assert [leaf.shape for leaf in sampled] == [shape, shape]
    memory = program.memory_analysis()
    cache = (
      2 * 2 * slots * LENGTH * 8 * 4
    )  # keys and values, layers, slots, positions, head_dim, bytes
    assert memory.alias_size_in_bytes >= cache
