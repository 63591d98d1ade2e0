"""The environment: what each turn does, what failures do, and that cancelling an episode leaves nothing."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest

from sao_jax import tokens as tk
from sao_jax.envs.grading import Grader
from sao_jax.envs.math_python import EnvCheckError, MathPython, check
from sao_jax.envs.problems import KINDS, demonstration, make_task, predict
from sao_jax.sandbox import PythonSandbox
from sao_jax.types import EpisodeFailure, FailureKind, Outcome, StopReason, Task, Turn

TASK = Task('p', '6*7=?', '42', {'code': 'print(6*7)'})
NO_ACTION = np.array([tk.EOT], np.int32)


@dataclasses.dataclass
class Result:
  output: str
  status: str


class FakeSandbox:
  """Answers from a table, else by `predict`; waits twice as a real one would."""

  def __init__(self, **results):
    self.results = results
    self.codes = []

  async def run(self, code):
    self.codes.append(code)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    result = self.results.get(code) or Result(*predict(code))
    if isinstance(result, Exception):
      raise result
    return result


class FakeGrader:
  async def grade(self, answer, reference):
    await asyncio.sleep(0)
    if answer == 'unjudgeable':
      raise EpisodeFailure(FailureKind.GRADER, 'no verdict')
    return answer == reference


def make_env(sandbox=None, *, max_turns=4, observation_bytes=16):
  return MathPython(
    chat=tk.BYTE_CHAT,
    sandbox=sandbox or FakeSandbox(),
    grader=FakeGrader(),
    max_turns=max_turns,
    observation_bytes=observation_bytes,
  )


def play(env, *actions, task=TASK):
  """What reset and every step gave."""

  async def run():
    return [await env.reset(task), *[await env.step(action) for action in actions]]

  return asyncio.run(run())


def test_tool_then_right_answer():
  question, result, outcome = play(make_env(), tk.call_tokens('print(6*7)'), tk.answer_tokens('42'))
  assert tk.show(question.tokens) == '<bos>6*7=?<agent>'
  assert tk.show(result.tokens) == '<result>42<agent>'
  info = {'tool_calls': 1, 'tool_errors': 0, 'turns': 2, 'answer': '42', 'correct': True}
  assert outcome == Outcome(1.0, True, False, StopReason.ANSWERED, info)


def test_wrong_answer():
  _, outcome = play(make_env(), tk.answer_tokens('43'))
  info = {'tool_calls': 0, 'tool_errors': 0, 'turns': 1, 'answer': '43', 'correct': False}
  assert outcome == Outcome(0.0, True, False, StopReason.ANSWERED, info)


def test_no_action_ends_the_episode():
  _, outcome = play(make_env(), NO_ACTION)
  info = {'tool_calls': 0, 'tool_errors': 0, 'turns': 1, 'answer': None, 'correct': False}
  assert outcome == Outcome(0.0, True, False, StopReason.NO_ANSWER, info)


def test_turn_limit_is_truncation_and_runs_no_program():
  sandbox = FakeSandbox()
  call = tk.call_tokens('print(1)')
  *_, outcome = play(make_env(sandbox, max_turns=3), call, call, call)
  info = {'tool_calls': 3, 'tool_errors': 0, 'turns': 3, 'answer': None, 'correct': False}
  assert outcome == Outcome(0.0, False, True, StopReason.TURN_LIMIT, info)
  assert sandbox.codes == ['print(1)'] * 2


def test_answer_on_the_last_turn_counts():
  *_, outcome = play(make_env(max_turns=1), tk.answer_tokens('42'))
  assert outcome.reward == 1.0 and outcome.terminated


def test_tool_errors_are_counted_and_shown_by_type():
  sandbox = FakeSandbox(
    a=Result('half\nKeyError: 3', 'error'),
    b=Result('', 'timeout'),
    c=Result('', 'killed'),
    d=Result('9' * 50, 'truncated'),
    e=Result('<eot>', 'ok'),
  )
  _, *turns, outcome = play(
    make_env(sandbox, max_turns=9), *map(tk.call_tokens, 'abcde'), tk.answer_tokens('')
  )
  assert [tk.decode(turn.tokens[1:-1]) for turn in turns] == [
    'error: KeyError',
    'error: timeout',
    'error: killed',
    '9' * 16,
    '<eot>',
  ]
  assert outcome.info['tool_errors'] == 3 and outcome.info['tool_calls'] == 5


@pytest.mark.parametrize('last', [tk.answer_tokens('42'), NO_ACTION])
def test_step_after_the_end(last):
  with pytest.raises(RuntimeError, match='reset first'):
    play(make_env(), last, tk.answer_tokens('42'))


def test_step_before_reset_after_close_and_second_reset():
  async def run():
    env = make_env()
    with pytest.raises(RuntimeError, match='reset first'):
      await env.step(NO_ACTION)
    await env.reset(TASK)
    with pytest.raises(RuntimeError, match='make a new one'):
      await env.reset(TASK)
    await env.close()
    await env.close()
    with pytest.raises(RuntimeError, match='reset first'):
      await env.step(NO_ACTION)

  asyncio.run(run())


def test_failures_pass_and_end_the_episode():
  async def run():
    failure = EpisodeFailure(FailureKind.INFRA, 'no worker')
    for action, kind in (
      (tk.call_tokens('x'), FailureKind.INFRA),
      (tk.answer_tokens('unjudgeable'), FailureKind.GRADER),
    ):
      env = make_env(FakeSandbox(x=failure))
      await env.reset(TASK)
      with pytest.raises(EpisodeFailure) as caught:
        await env.step(action)
      assert caught.value.kind == kind
      with pytest.raises(RuntimeError):
        await env.step(tk.answer_tokens('42'))

  asyncio.run(run())


def test_bad_limits():
  with pytest.raises(ValueError, match='max_turns'):
    make_env(max_turns=0)
  with pytest.raises(ValueError, match='observation_bytes'):
    make_env(observation_bytes=0)


def test_check_passes_and_tries_every_await():
  tasks = [make_task(seed, kind, 1) for seed in range(2) for kind in KINDS]
  report = asyncio.run(check(make_env, tasks))
  # The sandbox waits twice and the grader once.
  assert report == {'tasks': len(tasks), 'cancellations': 3}


def broken(method, replacement):
  """An environment with one method replaced."""

  def make():
    env = make_env()
    original = getattr(env, method)

    async def replaced(*args):
      return await replacement(original, *args)

    setattr(env, method, replaced)
    return env

  return make


async def pays_everybody(step, action):
  turn = await step(action)
  return dataclasses.replace(turn, reward=1.0) if isinstance(turn, Outcome) else turn


async def pays_nobody(step, action):
  turn = await step(action)
  return dataclasses.replace(turn, reward=0.0) if isinstance(turn, Outcome) else turn


COUNTER = itertools.count()


async def never_the_same(reset, task):
  turn = await reset(task)
  return Turn(np.append(turn.tokens, next(COUNTER) % 256).astype(np.int32))


async def leaves_a_task(step, action):
  stray = asyncio.create_task(asyncio.sleep(30))
  turn = await step(action)
  stray.cancel()
  await asyncio.sleep(0)
  return turn


async def waits_for_ever(step, action):
  await asyncio.Event().wait()


@pytest.mark.parametrize(
  'method, replacement, error, match',
  [
    ('step', pays_everybody, EnvCheckError, 'does nothing got reward 1'),
    ('step', pays_nobody, EnvCheckError, 'oracle got reward 0'),
    ('reset', never_the_same, EnvCheckError, 'different tokens'),
    ('step', leaves_a_task, EnvCheckError, 'left a task'),
    ('step', waits_for_ever, TimeoutError, None),
  ],
)
def test_check_finds_what_is_broken(method, replacement, error, match):
  with pytest.raises(error, match=match):
    asyncio.run(check(broken(method, replacement), [TASK], timeout_s=0.3))


def test_demonstrations_equal_real_episodes():
  """The integration: real sandbox, real grader, the self-check, and demonstrations replayed token by token."""

  async def run():
    sandbox = PythonSandbox(num_workers=1, timeout_s=10.0, memory_mb=256, output_bytes=1000)
    grader = Grader(timeout_s=5.0, num_workers=1)

    def make():
      return MathPython(
        chat=tk.BYTE_CHAT, sandbox=sandbox, grader=grader, max_turns=4, observation_bytes=32
      )

    try:
      await check(make, [make_task(0, kind, 1) for kind in KINDS])
      rng = np.random.default_rng(0)
      for seed in range(60):
        task = make_task(seed, KINDS[seed % 3], 2)
        demo = demonstration(task, rng, tool_share=0.95, slip_share=0.8, observation_bytes=32)
        await replay(make(), task, demo)
    finally:
      await sandbox.close()
      await grader.close()

  asyncio.run(run())


async def replay(env, task, demo):
  """Feeds what the agent said to the environment and compares all that it answers."""
  question, *turns = np.split(demo.tokens, np.flatnonzero(np.diff(demo.mask)) + 1)
  np.testing.assert_array_equal((await env.reset(task)).tokens, question)
  for said, heard in zip(turns[:-1:2], turns[1::2], strict=True):
    turn = await env.step(said)
    assert tk.show(turn.tokens) == tk.show(heard)
  outcome = await env.step(turns[-1])
  answer = tk.parse_action(turns[-1]).text
  assert outcome.reward == float(answer == task.answer)
  await env.close()
