"""A sliding window with sinks in the whole decoder: the ring cache, and the engine's episodes, against packed rows."""

import asyncio
import functools

import jax
import numpy as np
import pytest

from sao_jax.engines import local, programs
from sao_jax.models import transformer
from tests import test_engine, test_models
from tests.models import PLAIN

WINDOW, SINKS, LENGTH, LAYERS = 5, 2, 48, 2
VOCAB, STOP, SLOTS, NEW, EPISODES = 17, 0, 3, 6, 8
APART = 5  # passes of the loop between the starts of two episodes
TEMPERATURES = (0.7, 1.0, 1.5)


def make(**changes):
  numbers = {'window': WINDOW, 'sinks': SINKS, 'qk_norm': False, **changes}
  return transformer.make(**{**test_models.TINY, **PLAIN, 'num_layers': LAYERS, **numbers})


@functools.cache
def apply(**changes):
  return jax.jit(make(**changes).apply)


@functools.cache
def params(layers=LAYERS):
  return test_models.params_of(qk_norm=False, num_layers=layers)


def rows_of(sequences):
  """The arguments of apply, [N, LENGTH] each, one sequence a row."""
  tokens = np.zeros((len(sequences), LENGTH), np.int32)
  for row, sequence in zip(tokens, sequences, strict=True):
    row[: len(sequence)] = sequence
  positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
  lengths = np.array([[len(sequence)] for sequence in sequences])
  return tokens, positions, (positions < lengths).astype(np.int32)


def test_one_layer_sees_the_sinks_and_the_window_and_nothing_else():
  # In one layer, full attention over what a token may see, at its positions, is the window.
  tokens = test_models.tokens_of((1, LENGTH))[0]
  args = rows_of([tokens])
  got = apply(num_layers=1)(params(1), *args)[0]
  full = apply(num_layers=1, window=0, sinks=0)
  for at in (0, 1, 4, 6, 7, 20, 47):
    seen = [p for p in range(at + 1) if p < SINKS or at - p < WINDOW]
    alone, positions, segments = (x.copy() for x in rows_of([tokens[seen]]))
    positions[0, : len(seen)] = seen
    want = full(params(1), alone, positions, segments)[0, len(seen) - 1]
    np.testing.assert_allclose(got[at], want, atol=1e-5)
  assert np.abs(got - full(params(1), *args)[0])[WINDOW + SINKS :].max(axis=-1).min() > 1e-3


# New tokens of the two rows, call by call. 9 and 7 are longer than the window, 0 is a row at rest.
PIECES = (
  [(1, 1)] * 4 + [(1, 0)] * 3 + [(1, 1)] * 16,
  [(9, 4), (9, 9), (0, 1), (1, 0), (1, 9), (4, 0), (1, 1)],
  [(2, 0), (0, 7), (7, 1), (1, 9), (9, 1), (3, 6), (1, 0), (1, 1)],
)


@pytest.mark.parametrize('pieces', PIECES)
def test_any_pieces_through_the_ring_equal_apply(pieces):
  model, extend = make(), ring()
  tokens = test_models.tokens_of((2, LENGTH), seed=1)
  whole = apply()(params(), *rows_of(tokens))
  empty = jax.eval_shape(lambda: model.init_cache(2, LENGTH))
  assert {leaf.shape[3] for leaf in empty} == {SINKS + WINDOW}
  cache = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), empty)
  done = np.zeros(2, np.int32)
  for counts in np.array(pieces, np.int32):
    size = 1 if max(counts) == 1 else 9
    start = np.where(counts, done, LENGTH).astype(np.int32)  # as the engine puts a slot at rest
    new = np.full((2, size), 3, np.int32)
    for row, count in enumerate(counts):
      new[row, :count] = tokens[row, done[row] : done[row] + count]
    hidden, cache = extend(params(), cache, new, start, counts)
    for row, count in enumerate(counts):
      want = whole[row, done[row] : done[row] + count]
      np.testing.assert_allclose(hidden[row, :count], want, atol=2e-5)
    done = done + counts
  assert min(done) > 2 * (WINDOW + SINKS)


@functools.cache
def ring():
  return jax.jit(make().extend)


def test_a_cache_shorter_than_sinks_and_window_has_a_slot_for_each_position():
  assert jax.eval_shape(lambda: make().init_cache(2, 4))[0].shape[3] == 4


# The engine.


@functools.cache
def compiled():
  """Prefixes of more than the widest bucket, which is wider than the window, come in pieces."""
  return programs.make_programs(
    make(),
    params(),
    num_slots=SLOTS,
    max_length=LENGTH,
    decode_steps=3,
    prefill_rows=2,
    prefill_buckets=(9, 4),
    stop_tokens=(STOP,),
  )


def engine():
  return local.LocalEngine(compiled(), params(), version=0, name='test')


@jax.jit
@jax.vmap
def noise_of(seed, position):
  return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (VOCAB,))


def check(played):
  """(prefix, generation, temperature, seed) of turns: tokens and log-probabilities are those of the final sequence."""
  sequences = [np.concatenate([prefix, one.tokens]) for prefix, one, _, _ in played]
  learner = apply(attention='chunked', attention_chunk=16)
  hidden = np.asarray(learner(params(), *rows_of(sequences)), np.float64)
  table = np.asarray(make().unembedding(params()), np.float64)
  for row, (prefix, one, temperature, seed) in zip(hidden, played, strict=True):
    at = len(prefix) + np.arange(len(one.tokens))
    logits = row[at - 1] @ table.T / temperature
    want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = want[np.arange(len(at)), one.tokens]
    np.testing.assert_allclose(one.behavior_logprobs, found, atol=1e-4)
    seeds = np.full(NEW, seed, np.uint32)
    noise = noise_of(seeds, len(prefix) + np.arange(NEW))[: len(at)]
    np.testing.assert_array_equal(np.argmax(want + noise, axis=-1), one.tokens)


async def play(engine, episode, played):
  """Three turns, with pauses in which others may take the slot."""
  rng = np.random.default_rng(episode)
  tokens = rng.integers(1, VOCAB, rng.integers(1, 22)).astype(np.int32)
  temperature = TEMPERATURES[episode % 3]
  for turn in range(3):
    for _ in range(rng.integers(1, 9) if turn else APART * episode):
      await asyncio.sleep(0)
    one = await engine.generate(
      test_engine.request(episode, tokens, new=NEW, temperature=temperature, seed=turn)
    )
    played.append((tokens, one, temperature, turn))
    tokens = np.concatenate([tokens, one.tokens, rng.integers(1, VOCAB, 2)]).astype(np.int32)
  engine.release(str(episode))


def test_turns_of_episodes_that_share_slots_equal_apply_of_the_final_sequence():
  serving, played = engine(), []
  cache = compiled().init_state().cache
  assert {leaf.shape for leaf in cache} == {(LAYERS, SLOTS, 2, SINKS + WINDOW, 6)}

  async def main():
    episodes = asyncio.gather(*(play(serving, i, played) for i in range(EPISODES)))
    await test_engine.stepped(serving, episodes)

  asyncio.run(main())
  health = serving.health()
  # Some were resumed, some lost their slot and were prefilled from the start.
  assert health['evictions'] > 0
  fresh = sum(len(prefix) for prefix, *_ in played)
  assert health['prefill_tokens'] < fresh
  assert max(len(prefix) for prefix, *_ in played) > 3 * WINDOW
  check(played)


def test_a_turn_that_is_asked_for_again():
  # The prefix is all that the cache holds: its last token is fed once more, one position back.
  serving, prefix = engine(), np.arange(1, 15, dtype=np.int32)
  first = test_engine.answer(serving, test_engine.request('a', prefix, new=NEW, seed=5))
  assert len(first.tokens) > 2
  again = np.concatenate([prefix, first.tokens[:-1]])
  second = test_engine.answer(serving, test_engine.request('a', again, new=NEW, seed=6))
  assert serving.health()['prefill_tokens'] == len(prefix) + 1
  check([(prefix, first, 1.0, 5), (again, second, 1.0, 6)])
