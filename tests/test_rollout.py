"""One episode on a scripted engine and a scripted environment."""

import asyncio
import dataclasses

import numpy as np
import pytest

from sao_jax import batching
from sao_jax.rollout import run_episode
from sao_jax.types import (
  EpisodeFailure,
  FailureKind,
  FinishReason,
  Generation,
  Outcome,
  StopReason,
  Task,
  Turn,
)

TASK = Task('p1', 'question', 'answer', {'level': 2})
SOLVED = Outcome(1.0, True, False, StopReason.ANSWERED, {'tool_calls': 2})


def turn(*tokens):
  return Turn(np.asarray(tokens, np.int32))


def said(tokens, spans, reason=FinishReason.STOP):
  """Log-probability -token / 10, so that a shift of one array against another shows."""
  tokens = np.asarray(tokens, np.int32)
  return Generation(tokens, (-tokens / 10).astype(np.float32), spans, reason)


@dataclasses.dataclass
class Engine:
  """Says what it was told to, raises what it was told to, and hangs when there is nothing left."""

  script: list
  requests: list = dataclasses.field(default_factory=list)
  released: list = dataclasses.field(default_factory=list)

  async def generate(self, request):
    self.requests.append(request)
    if not self.script:
      await asyncio.sleep(3600)
    answer = self.script.pop(0)
    if isinstance(answer, BaseException):
      raise answer
    return answer

  def release(self, episode):
    self.released.append(episode)


@dataclasses.dataclass
class Env:
  """The first of the script answers `reset`, the others `step`."""

  script: list
  actions: list = dataclasses.field(default_factory=list)
  task: Task | None = None
  closed: int = 0

  async def reset(self, task):
    self.task = task
    return await self._next()

  async def step(self, action):
    self.actions.append(action.tolist())
    return await self._next()

  async def _next(self):
    await asyncio.sleep(0)
    if not self.script:
      await asyncio.sleep(3600)
    answer = self.script.pop(0)
    if isinstance(answer, BaseException):
      raise answer
    return answer

  def cut(self):
    return Outcome(0.25, False, True, StopReason.TOKEN_LIMIT, {'tool_calls': len(self.actions)})

  async def close(self):
    await asyncio.sleep(0)
    self.closed += 1


LIMITS = {
  'temperature': 0.7,
  'max_turn_tokens': 8,
  'max_tokens': 100,
  'vocab_size': 100,
  'at': lambda what: None,
}


def play(env, engine, **changes):
  episode = run_episode(
    env, engine, TASK, episode='e1', group='g1', seed=5, **{**LIMITS, **changes}
  )
  return asyncio.run(asyncio.wait_for(episode, 10))


def test_two_tool_turns_token_by_token():
  # Prompt 1 2; action 11 12 over versions 3 and 4; observation 3 4 5; action 13; observation 6; action 14 15.
  engine = Engine([
    said([11, 12], ((3, 1), (4, 1))),
    said([13], ((4, 1),)),
    said([14, 15], ((5, 2),)),
  ])  # fmt: skip
  env = Env([turn(1, 2), turn(3, 4, 5), turn(6), SOLVED])
  got = play(env, engine)
  assert got.tokens.tolist() == [1, 2, 11, 12, 3, 4, 5, 13, 6, 14, 15]
  assert got.mask.tolist() == [False] * 2 + [True] * 2 + [False] * 3 + [True, False, True, True]
  np.testing.assert_array_equal(
    got.behavior_logprobs,
    np.float32([0, 0, -1.1, -1.2, 0, 0, 0, -1.3, 0, -1.4, -1.5]),
  )
  assert got.versions.tolist() == [-1, -1, 3, 4, -1, -1, -1, 4, -1, 5, 5]
  assert got.turn_ids.tolist() == [-1, -1, 0, 0, -1, -1, -1, 1, -1, 2, 2]
  assert got.rewards.tolist() == [0] * 10 + [1]
  dtypes = [
    x.dtype for x in (got.tokens, got.mask, got.behavior_logprobs, got.rewards, got.versions)
  ]
  assert dtypes == [np.int32, bool, np.float32, np.float32, np.int32]
  assert (got.episode, got.prompt_id, got.group) == ('e1', 'p1', 'g1')
  assert (got.terminated, got.truncated, got.stop_reason) == (True, False, StopReason.ANSWERED)
  assert got.info == {'level': 2, 'tool_calls': 2} and got.reward == 1.0 and got.num_actions == 5
  batching.check_trajectory(got)
  # The environment saw the sampled ids, the engine the whole prefix each time, under one seed.
  assert env.task is TASK and env.actions == [[11, 12], [13], [14, 15]]
  assert [r.tokens.tolist() for r in engine.requests] == [
    [1, 2],
    [1, 2, 11, 12, 3, 4, 5],
    [1, 2, 11, 12, 3, 4, 5, 13, 6],
  ]
  assert {(r.episode, r.temperature, r.seed) for r in engine.requests} == {('e1', 0.7, 5)}
  assert env.closed == 1 and engine.released == ['e1']


def test_the_token_budget_is_of_the_episode_and_no_turn_refreshes_it():
  # 12 tokens: prompt 2, 4 sampled, observation 2 leaves 4, 2 sampled, observation 1 leaves 1.
  engine = Engine([
    said([11, 12, 13, 14], ((0, 4),)),
    said([15, 16], ((0, 2),)),
    said([17], ((0, 1),), FinishReason.LENGTH),
  ])  # fmt: skip
  got = play(Env([turn(1, 2), turn(3, 4), turn(5)]), engine, max_turn_tokens=5, max_tokens=12)
  assert [r.max_new_tokens for r in engine.requests] == [5, 4, 1]
  assert len(got.tokens) == 12 and got.truncated


def test_a_turn_that_is_cut_is_truncated_with_its_reward_on_the_last_action():
  engine = Engine([
    said([11, 12], ((0, 2),)),
    said([13, 14], ((0, 2),), FinishReason.LENGTH),
  ])  # fmt: skip
  env = Env([turn(1), turn(2)])
  got = play(env, engine, max_turn_tokens=2)
  assert (got.terminated, got.truncated, got.stop_reason) == (False, True, StopReason.TOKEN_LIMIT)
  assert got.tokens.tolist() == [1, 11, 12, 2, 13, 14]
  assert got.rewards.tolist() == [0] * 5 + [0.25]  # what the environment says that it has earned
  assert got.info == {'level': 2, 'tool_calls': 1}
  assert env.actions == [[11, 12]]  # what was cut is no action of the agent
  batching.check_trajectory(got)


@pytest.mark.parametrize('observation', [[3, 4, 5], [3, 4, 5, 6]])
def test_an_observation_that_leaves_no_room_is_not_appended(observation):
  # Prompt 2 and action 2 of 7: an observation of 3 would leave no token for an answer.
  engine = Engine([said([11, 12], ((0, 2),))])
  got = play(Env([turn(1, 2), turn(*observation)]), engine, max_tokens=7)
  assert got.tokens.tolist() == [1, 2, 11, 12] and len(engine.requests) == 1
  assert got.truncated and got.stop_reason == StopReason.TOKEN_LIMIT
  assert got.rewards.tolist() == [0, 0, 0, 0.25]


def test_an_observation_that_leaves_room_for_one_token_is():
  engine = Engine([
    said([11, 12], ((0, 2),)),
    said([13], ((0, 1),)),
  ])  # fmt: skip
  got = play(Env([turn(1, 2), turn(3, 4), SOLVED]), engine, max_tokens=7)
  assert got.tokens.tolist() == [1, 2, 11, 12, 3, 4, 13] and got.terminated
  assert got.rewards.tolist() == [0] * 6 + [1]


@pytest.mark.parametrize('length', [4, 9])
def test_a_prompt_that_leaves_no_room_is_a_failure_of_the_data(length):
  env, engine = Env([turn(*range(length))]), Engine([])
  with pytest.raises(EpisodeFailure, match=f'p1 has {length} tokens') as caught:
    play(env, engine, max_tokens=4)
  assert caught.value.kind == FailureKind.DATA
  assert engine.requests == [] and (env.closed, engine.released) == (1, ['e1'])


@pytest.mark.parametrize('tokens', [[], [11]])
def test_an_aborted_generation_is_a_failure_of_the_machine(tokens):
  env = Env([turn(1)])
  with pytest.raises(EpisodeFailure, match='aborted') as caught:
    play(env, Engine([said(tokens, ((0, len(tokens)),), FinishReason.ABORTED)]))
  assert caught.value.kind == FailureKind.INFRA and env.actions == []


def test_a_reward_that_is_missing_or_not_finite_is_never_zero_and_never_trains():
  for reward in (None, float('nan'), float('inf')):
    outcome = Outcome(reward, True, False, StopReason.ANSWERED)
    got = play(Env([turn(1), outcome]), Engine([said([11, 12], ((0, 2),))]))
    assert not np.isfinite(got.reward) and got.rewards[1] == 0
    with pytest.raises(ValueError, match='trajectory e1: a reward is not finite'):
      batching.check_trajectory(got)


def test_a_fractional_reward_and_a_truncated_outcome_arrive():
  outcome = Outcome(0.25, False, True, StopReason.TURN_LIMIT)
  got = play(Env([turn(1), outcome]), Engine([said([11, 12], ((0, 2),))]))
  assert got.rewards.tolist() == [0, 0, 0.25] and (got.terminated, got.truncated) == (False, True)
  assert got.stop_reason == StopReason.TURN_LIMIT


BROKEN = EpisodeFailure(FailureKind.ENV, 'sandbox')


@pytest.mark.parametrize(
  ('env', 'engine'),
  [
    ([BROKEN], []),
    ([turn(1), KeyError('bug')], [said([11], ((0, 1),))]),
    ([turn(1)], [EpisodeFailure(FailureKind.INFRA, 'engine is closed')]),
  ],
  ids=['reset', 'step', 'generate'],
)
def test_an_error_travels_and_gives_back_slot_and_environment(env, engine):
  error = next(x for x in reversed([*engine, *env]) if isinstance(x, Exception))
  env, engine = Env(env), Engine(engine)
  with pytest.raises(type(error)) as caught:
    play(env, engine)
  assert caught.value is error
  assert (env.closed, engine.released) == (1, ['e1'])


@pytest.mark.parametrize(
  ('env', 'engine'),
  [([], []), ([turn(1)], []), ([turn(1)], [said([11], ((0, 1),))])],
  ids=['reset', 'generate', 'step'],
)
def test_cancellation_anywhere_gives_back_slot_and_environment(env, engine):
  env, engine = Env(env), Engine(engine)

  async def cancel():
    task = asyncio.create_task(
      run_episode(env, engine, TASK, episode='e1', group='g1', seed=5, **LIMITS)
    )
    for _ in range(10):  # runs until it hangs
      await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return task.cancelled()

  assert asyncio.run(asyncio.wait_for(cancel(), 10))
  assert (env.closed, engine.released) == (1, ['e1'])
