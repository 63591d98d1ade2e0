"""Mathematics with a Python tool: the agent may run programs, then gives one final answer."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from sao_jax.envs.problems import noop_action, oracle_action
from sao_jax.tokens import Answer, ChatFormat, NoAction, observation_text
from sao_jax.types import Env, EpisodeFailure, FailureKind, Outcome, StopReason, Task, Turn

_TOOL_ERRORS = ('error', 'timeout', 'killed')


class MathPython:
  """One episode of the Env protocol. Reward 1 for a right final answer, else 0.

    tool call -> the observation, or on the last turn TURN_LIMIT (truncated, reward 0; the program is not run)
    answer    -> ANSWERED (terminated)
    neither   -> NO_ANSWER (terminated, reward 0)

  The outcome's info has tool_calls (asked for), tool_errors (exceptions, time-outs and kills among them), turns, answer (its
  text or None) and correct. Failures of sandbox and grader pass through as EpisodeFailure; after one, or after a cancelled
  `step`, the episode is over. Sandbox and grader are shared between episodes and stay open at `close`.
  """

  deterministic = True  # the same actions give the same turns and reward
  needs_sandbox = True
  concurrency = None  # any number of episodes at a time; the sandbox queues their calls

  def __init__(
    self, *, chat: ChatFormat, sandbox: Any, grader: Any, max_turns: int, observation_bytes: int
  ):
    """Binds the parts of one episode.

    Args:
      chat: the format of tokens, e.g. `tokens.BYTE_CHAT`.
      sandbox: has `async run(code) -> ToolResult`, with output and status.
      grader: has `async grade(answer, reference) -> bool`.
      max_turns: turns of the agent, the answer included.
      observation_bytes: what the agent sees of a program's output, at most.
    """
    if max_turns < 1 or observation_bytes < 1:
      raise ValueError(
        f'max_turns and observation_bytes must be at least 1, got {max_turns} and {observation_bytes}'
      )
    self._chat = chat
    self._sandbox = sandbox
    self._grader = grader
    self._max_turns = max_turns
    self._observation_bytes = observation_bytes
    self._task: Task | None = None
    self._acting = False  # the agent speaks next
    self._info = {'tool_calls': 0, 'tool_errors': 0, 'turns': 0, 'answer': None, 'correct': False}

  async def reset(self, task: Task) -> Turn:
    """The question. Once per object."""
    if self._task is not None:
      raise RuntimeError('an environment object is one episode: make a new one')
    self._task = task
    self._acting = True
    return Turn(self._chat.prompt_tokens(task.question))

  async def step(self, action: np.ndarray) -> Turn | Outcome:
    """Does what the agent's turn says.

    Args:
      action: [n] int32, every token that was sampled in this turn.

    Raises:
      EpisodeFailure: from sandbox or grader.
      RuntimeError: before `reset`, after the end, after a failure and after `close`.
    """
    if not self._acting:
      raise RuntimeError('step needs a running episode: reset first, and stop at the outcome')
    self._acting = False  # until this turn went well
    self._info['turns'] += 1
    parsed = self._chat.parse_action(action)
    if isinstance(parsed, NoAction):
      return self._end(0.0, StopReason.NO_ANSWER)
    if isinstance(parsed, Answer):
      correct = await self._grader.grade(parsed.text, self._task.answer)
      if not isinstance(correct, bool):
        raise EpisodeFailure(FailureKind.GRADER, f'the grader answered {correct!r:.80}')
      self._info |= {'answer': parsed.text, 'correct': correct}
      return self._end(float(correct), StopReason.ANSWERED)
    self._info['tool_calls'] += 1
    if self._info['turns'] == self._max_turns:
      return self._end(0.0, StopReason.TURN_LIMIT)
    result = await self._sandbox.run(parsed.code)
    if not isinstance(result.output, str):
      raise EpisodeFailure(FailureKind.ENV, f'the tool answered {type(result.output).__name__}')
    self._info['tool_errors'] += result.status in _TOOL_ERRORS
    observation = observation_text(result.output, result.status, limit=self._observation_bytes)
    self._acting = True
    return Turn(self._chat.result_tokens(observation))

  def cut(self) -> Outcome:
    """No token is left for an answer: truncated, reward 0."""
    self._acting = False
    return self._end(0.0, StopReason.TOKEN_LIMIT)

  async def close(self) -> None:
    """Ends the episode. Idempotent."""
    self._acting = False

  def _end(self, reward: float, reason: StopReason) -> Outcome:
    truncated = reason in (StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT)
    return Outcome(reward, not truncated, truncated, reason, dict(self._info))


class EnvCheckError(Exception):
  """An environment broke its contract."""


Agent = Callable[
  [Task, np.ndarray], np.ndarray
]  # (task, the episode so far) -> the tokens of a turn


async def check(
  make_env: Callable[[], Env],
  tasks: Sequence[Task],
  *,
  oracle: Agent = oracle_action,
  timeout_s: float = 60.0,
) -> dict[str, int]:
  """Proves on `tasks` what training relies on.

  The oracle gets reward 1, an agent that does nothing gets 0, two episodes with the same actions have the same tokens, and an
  episode that is cancelled at any of its awaits leaves no task behind and the next one intact.

  Args:
    make_env: makes one episode's environment.
    tasks: some tasks; cancellation is tried on the first.
    oracle: an agent that solves them. timeout_s: for each episode.

  Returns:
    Counts: tasks, and cancellations tried.

  Raises:
    EnvCheckError: names the task and what went wrong.
  """

  async def play(agent: Agent, task: Task) -> tuple[float | None, list[int]]:
    async with asyncio.timeout(timeout_s):
      return await _play(make_env(), agent, task)

  for task in tasks:
    reward, tokens = await play(oracle, task)
    if reward != 1.0:
      raise EnvCheckError(f'{task.prompt_id}: the oracle got reward {reward}, not 1')
    if (await play(oracle, task))[1] != tokens:
      raise EnvCheckError(f'{task.prompt_id}: the same actions gave different tokens')
    reward, _ = await play(noop_action, task)
    if reward != 0.0:
      raise EnvCheckError(
        f'{task.prompt_id}: an agent that does nothing got reward {reward}, not 0'
      )
  running = len(asyncio.all_tasks())
  cancellations = 0
  while await _cancelled(play(oracle, tasks[0]), at=cancellations):
    cancellations += 1
    await _settle(running, f'{tasks[0].prompt_id}: cancelled at await {cancellations}')
    if (await play(oracle, tasks[0]))[0] != 1.0:
      raise EnvCheckError(f'{tasks[0].prompt_id}: cancelling one episode broke the next')
  return {'tasks': len(tasks), 'cancellations': cancellations}


async def _play(env: Env, agent: Agent, task: Task) -> tuple[float | None, list[int]]:
  """The reward and all tokens of one episode."""
  try:
    turn = await env.reset(task)
    tokens = turn.tokens
    while isinstance(turn, Turn):
      action = agent(task, tokens)
      turn = await env.step(action)
      tokens = np.concatenate([tokens, action, *([turn.tokens] if isinstance(turn, Turn) else [])])
    return turn.reward, tokens.tolist()
  finally:
    await env.close()
    await env.close()  # idempotent


async def _cancelled(episode: Coroutine, *, at: int) -> bool:
  """Runs an episode as a task that is cancelled when it waits for the `at`-th time; False if it ended before."""

  async def run() -> None:
    await _cancel_at_wait(episode, at)

  task = asyncio.create_task(run())
  await asyncio.wait([task])
  if not task.cancelled() and task.exception() is not None:
    raise task.exception()
  return task.cancelled()


@types.coroutine
def _cancel_at_wait(episode: Coroutine, at: int):
  """`await episode`, in a task that cancels itself as the episode waits for the `at`-th time."""
  waits = 0
  resume, value = episode.send, None
  while True:
    try:
      future = resume(value)
    except StopIteration as stop:
      return stop.value
    if waits == at:
      asyncio.current_task().cancel()
    waits += 1
    try:
      value = yield future
      resume = episode.send
    except BaseException as error:
      resume, value = episode.throw, error


async def _settle(running: int, what: str) -> None:
  """Waits up to two seconds for stray tasks to end."""
  for _ in range(200):
    if len(asyncio.all_tasks()) <= running:
      return
    await asyncio.sleep(0.01)
  raise EnvCheckError(f'{what}, it left a task behind')
