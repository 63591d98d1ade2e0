"""A hostile tool call costs its agent one failed or empty observation, and nobody anything else."""

import asyncio
import os

import numpy as np
import pytest

from sao_jax import tokens
from sao_jax.envs.grading import Grader
from sao_jax.envs.math_python import MathPython
from sao_jax.rollout import run_episode
from sao_jax.sandbox import PythonSandbox
from sao_jax.types import FinishReason, Generation, StopReason, Task

TASK = Task('p', '6*7=?', '42')
TARGET = '/tmp/sao_jax_hostile_write'
HOSTILE = {
  'loops for ever': 'while True: pass',
  'forks': 'import os\nwhile True: os.fork()',
  'eats memory': 'x = []\nwhile True: x.append(bytearray(10**7))',
  'prints 100 MB': "import sys\nfor _ in range(100): sys.stdout.write('x' * 10**6)",
  'writes outside': f"open('{TARGET}', 'w').write('mine')",
  'kills its parent': 'import os\nos.kill(os.getppid(), 9)',
  'closes its output': 'import os\nos.close(1)',
  'calls the network': "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
}


class Scripted:
  """An engine that calls the tool with given code, then answers."""

  def __init__(self, code: str):
    self._turns = [tokens.call_tokens(code), tokens.answer_tokens('42')]

  async def generate(self, request):
    said = self._turns.pop(0)
    logprobs = np.full(len(said), -0.5, np.float32)
    return Generation(said, logprobs, ((0, len(said)),), FinishReason.STOP)

  def release(self, episode):
    pass


@pytest.mark.parametrize('name', HOSTILE)
def test_the_episode_goes_on_and_the_next_one_is_intact(name):
  async def episode(sandbox, grader, code):
    env = MathPython(
      chat=tokens.BYTE_CHAT, sandbox=sandbox, grader=grader, max_turns=3, observation_bytes=24
    )
    return await run_episode(
      env,
      Scripted(code),
      TASK,
      episode='e',
      group='0',
      seed=0,
      temperature=1.0,
      max_turn_tokens=400,
      max_tokens=1000,
      vocab_size=tokens.VOCAB_SIZE,
      at=lambda what: None,
    )

  async def main():
    sandbox = PythonSandbox(num_workers=1, timeout_s=1.0, memory_mb=128, output_bytes=1000)
    grader = Grader(timeout_s=5.0, num_workers=1)
    try:
      hostile = await episode(sandbox, grader, HOSTILE[name])
      after = await episode(sandbox, grader, 'print(6*7)')
    finally:
      await sandbox.close()
      await grader.close()
    return hostile, after

  hostile, after = asyncio.run(asyncio.wait_for(main(), 60))
  assert hostile.reward == 1.0 and hostile.stop_reason is StopReason.ANSWERED
  observation = tokens.show(hostile.tokens).split('<result>')[1].split('<agent>')[0]
  assert observation == '' or observation.startswith('error: ') or set(observation) == {'x'}
  assert len(observation) <= 24
  assert '<result>42<agent>' in tokens.show(after.tokens)
  assert not os.path.exists(TARGET)
