"""A few cells of the fault matrix with real processes: tools and grader die or hang under a Dispatcher."""

import asyncio
import json
import os
import pathlib
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from sao_jax.envs.grading import Grader
from sao_jax.envs.math_python import MathPython
from sao_jax.rollout import run_episode
from sao_jax.runtime.dispatch import Dispatcher
from sao_jax.runtime.failures import holding
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.watchdog import Waits
from sao_jax.sandbox import PythonSandbox
from sao_jax.tokens import BYTE_CHAT, VOCAB_SIZE, answer_tokens, call_tokens
from sao_jax.types import FailureKind, FinishReason, Generation, Task
from tests.faults import LIMITS

ANSWER, REFERENCE = (
  r'\frac{2}{4}',
  r'\frac{1}{2}',
)  # right, and not by text: math-verify's worker has to say it


class Scripted:
  """Says a tool call, then the answer."""

  def __init__(self, code: str):
    self._code, self.calls = code, asyncio.Event()

  async def generate(self, request) -> Generation:
    first = len(request.tokens) == len(BYTE_CHAT.prompt_tokens('question'))
    said = call_tokens(self._code) if first else answer_tokens(ANSWER)
    if first:
      self.calls.set()
    return Generation(said, np.zeros(len(said), np.float32), ((0, len(said)),), FinishReason.STOP)

  def release(self, episode: str) -> None:
    pass


def descendants() -> set[int]:
  """Processes below this one, zombies too."""
  parents = {}
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      parents[int(path.parent.name)] = int(path.read_text().rpartition(')')[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
      continue
  found, new = set(), {os.getpid()}
  while new:
    new = {pid for pid, parent in parents.items() if parent in new}
    found |= new
  return found


async def until(condition, seconds: float = 10.0):
  deadline = time.monotonic() + seconds
  while not (value := condition()):
    assert time.monotonic() < deadline, 'it did not happen in time'
    await asyncio.sleep(0.02)
  return value


def kill(workers) -> None:
  for worker in list(workers):
    os.kill(worker.process.pid, signal.SIGKILL)


async def killed_in_a_call(sandbox, grader, engine):
  await engine.calls.wait()
  await until(lambda: sandbox._workers and not sandbox._idle)
  await asyncio.sleep(0.1)  # into the call
  kill(sandbox._workers)


async def killed_between_calls(sandbox, grader, engine):
  await until(lambda: sandbox._idle)
  kill(sandbox._workers)


async def grader_killed(sandbox, grader, engine):
  await until(lambda: grader._workers)
  kill(grader._workers)


async def nobody(sandbox, grader, engine):
  pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
  ('strike', 'code', 'tool_errors'),
  [
    (killed_in_a_call, 'import time; time.sleep(0.5); print(1)', 0),
    (killed_between_calls, 'print(1)', 0),
    (grader_killed, 'print(1)', 0),
    (nobody, 'while True: pass', 1),  # what hangs is stopped, and its agent told so
  ],
  ids=lambda x: getattr(x, '__name__', None),
)
def test_the_episodes_are_judged_and_no_process_is_left(strike, code, tool_errors, tmp_path):
  before = descendants()

  async def main():
    sandbox = PythonSandbox(num_workers=1, timeout_s=1.0, memory_mb=192, output_bytes=4096)
    grader, engine = Grader(timeout_s=20.0, num_workers=1), Scripted(code)
    held = holding(grader.grade, FailureKind.GRADER, 1, LIMITS.back_off)
    ledger = Ledger(tmp_path / 'events.jsonl', time.monotonic)

    async def play(task, **rest):
      env = MathPython(
        chat=BYTE_CHAT,
        sandbox=sandbox,
        grader=SimpleNamespace(grade=held),
        max_turns=3,
        observation_bytes=32,
      )
      numbers = {
        'temperature': 1.0,
        'max_turn_tokens': 64,
        'max_tokens': 256,
        'vocab_size': VOCAB_SIZE,
      }
      return await run_episode(env, engine, task, at=lambda what: None, **numbers, **rest)

    dispatcher = Dispatcher(
      play,
      lambda index: Task(f'p{index}', 'question', REFERENCE),
      ledger,
      LIMITS,
      Waits(time.monotonic),
      episodes_needed=2,
      version=0,
    )
    striking = asyncio.create_task(strike(sandbox, grader, engine))
    trajectories = await asyncio.wait_for(dispatcher.take(2), 30)
    await asyncio.wait_for(striking, 10)
    dispatcher.trained(trajectories, version=1)
    await dispatcher.close('run_ended')
    ledger.close()
    await asyncio.gather(sandbox.close(), grader.close())
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return trajectories

  trajectories = asyncio.run(main())
  assert [t.reward for t in trajectories] == [1.0, 1.0]
  assert [t.info['tool_errors'] for t in trajectories] == [tool_errors] * 2
  events = [json.loads(line)['event'] for line in (tmp_path / 'events.jsonl').open()]
  assert sorted(events) == sorted(['pending', 'running', 'finished', 'trained'] * 2)
  assert descendants() <= before
