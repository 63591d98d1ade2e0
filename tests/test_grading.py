"""Grading: integers exactly and in place, symbols in processes that can die, and no verdict is never False."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from sao_jax.envs import grading
from sao_jax.envs.grading import Grader, grade_integer, parse_integer
from sao_jax.types import EpisodeFailure, FailureKind

SLOW = '10^{10^{10}}'  # keeps sympy busy for ever


@pytest.mark.parametrize(
  'text, value',
  [
    ('5', 5),
    (' 5\n', 5),
    ('+5', 5),
    ('-5', -5),
    ('-0', 0),
    ('025', 25),
    ('1,234', 1234),
    ('-12,345,678', -12345678),
    ('9' * 400, 10**400 - 1),
  ],
)
def test_integers(text, value):
  assert parse_integer(text) == value


@pytest.mark.parametrize(
  'text',
  '|-|--5|+ 5|5.0|5.|1_000|0x10|1e3|2+3|$5$|five|٥|５|1,23|1,2345|,123|1234,567|5\x00|5 6|10**9'.split(
    '|'
  ),
)
def test_no_integers(text):
  assert parse_integer(text) is None
  assert not grade_integer(text, '5')


def test_long_answers_are_refused_at_once():
  start = time.perf_counter()
  assert not grade_integer('9' * 10_000_000, '9')
  assert not grade_integer('0' * 400 + '9', '9')
  assert time.perf_counter() - start < 0.1


def test_integer_grade():
  assert grade_integer('1,234', ' 1234')
  assert not grade_integer('1235', '1234')
  with pytest.raises(ValueError, match='pi'):
    grade_integer('3', '\\pi')


def test_bad_arguments():
  with pytest.raises(ValueError, match='timeout_s'):
    Grader(timeout_s=0, num_workers=1)
  with pytest.raises(ValueError, match='num_workers'):
    Grader(timeout_s=1, num_workers=0)


def graded(body, *, timeout_s=5.0, num_workers=1):
  """Runs `body(grader)` and closes the grader."""

  async def run():
    grader = Grader(timeout_s=timeout_s, num_workers=num_workers)
    try:
      return await body(grader)
    finally:
      await grader.close()
      await grader.close()
      assert not grader._workers

  return asyncio.run(run())


def alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def test_easy_cases_start_no_process():
  async def body(grader):
    assert await grader.grade(' 7', '7')
    assert not await grader.grade('\\frac{14}{2}', '7')
    assert await grader.grade('\\text{Evelyn} ', '\\text{Evelyn}')
    assert not await grader.grade('x' * 3000, '\\pi')
    assert not grader._workers
    await grader.close()
    with pytest.raises(RuntimeError, match='closed'):
      await grader.grade('7', '7')

  graded(body)


def test_symbolic_answers():
  async def body(grader):
    right = [
      ('14/3', '\\frac{14}{3}'),
      ('$\\frac{28}{6}$', '\\frac{14}{3}'),
      ('\\boxed{p-q}', 'p - q'),
      ('-q+p', '$p - q$'),
      ('6-5i', '6 - 5i'),
      ('(3, \\pi/2)', '\\left( 3, \\frac{\\pi}{2} \\right)'),
      ('36', '\\$36'),
    ]
    wrong = [
      ('14/5', '\\frac{14}{3}'),
      ('', '\\pi'),
      ('\\frac{', '\\pi'),
      ('}{$$\\', '\\pi'),
      ('\x00\ud800\ufffd', '\\pi'),
      ('__import__("os").system("exit")', 'p - q'),
    ]
    for answer, reference in right:
      assert await grader.grade(answer, reference) is True, (answer, reference)
    for answer, reference in wrong:
      assert await grader.grade(answer, reference) is False, (answer, reference)
    assert len(grader._workers) == 1  # the same one all the time
    with pytest.raises(EpisodeFailure) as caught:
      await grader.grade('2', 'all \u4e00 of them')
    assert caught.value.kind == FailureKind.DATA

  graded(body)


def test_slow_answer_is_a_grader_failure_and_the_grader_lives_on():
  async def body(grader):
    assert await grader.grade('\\frac{1}{2}', '0.5')
    (worker,) = grader._workers
    start = time.perf_counter()
    with pytest.raises(EpisodeFailure) as caught:
      await grader.grade(SLOW, '\\pi')
    assert caught.value.kind == FailureKind.GRADER
    assert 'twice' in str(caught.value)
    assert time.perf_counter() - start < 20
    assert not alive(worker.process.pid)
    assert not grader._workers
    assert await grader.grade('3\\pi - 2\\pi', '\\pi')

  graded(body, timeout_s=1.0)


def test_dead_worker_is_replaced():
  async def body(grader):
    assert await grader.grade('2/4', '\\frac{1}{2}')
    (worker,) = grader._workers
    os.kill(worker.process.pid, signal.SIGKILL)
    assert await grader.grade('3/6', '\\frac{1}{2}')

  graded(body)


def test_cancelled_judgement_kills_its_worker():
  async def body(grader):
    assert await grader.grade('2/4', '\\frac{1}{2}')
    (worker,) = grader._workers
    judgement = asyncio.create_task(grader.grade(SLOW, '\\pi'))
    await asyncio.sleep(0.1)
    judgement.cancel()
    with pytest.raises(asyncio.CancelledError):
      await judgement
    assert not alive(worker.process.pid)
    assert not grader._workers

  graded(body)


def test_close_ends_a_judgement_that_is_under_way():
  async def body(grader):
    assert await grader.grade('2/4', '\\frac{1}{2}')
    judgement = asyncio.create_task(grader.grade(SLOW, '\\pi'))
    await asyncio.sleep(0.1)
    await grader.close()
    with pytest.raises(EpisodeFailure) as caught:
      await asyncio.wait_for(judgement, 5)
    assert caught.value.kind == FailureKind.GRADER

  graded(body, timeout_s=30.0)


def test_worker_that_cannot_start(monkeypatch):
  monkeypatch.setattr(grading, '_command', lambda timeout_s: ['/bin/false'])

  async def body(grader):
    with pytest.raises(EpisodeFailure) as caught:
      await grader.grade('2', '\\pi')
    assert caught.value.kind == FailureKind.GRADER
    assert 'did not start' in str(caught.value)

  graded(body)


def test_worker_ends_with_its_parent():
  program = """
import asyncio
from sao_jax.envs.grading import Grader
async def main():
  grader = Grader(timeout_s=5.0, num_workers=1)
  await grader.grade('2/4', '0.5')
  print(next(iter(grader._workers)).process.pid, flush=True)
  await asyncio.sleep(60)
asyncio.run(main())
"""
  with subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE) as parent:
    worker = int(parent.stdout.readline())
    parent.kill()
  deadline = time.monotonic() + 10
  while alive(worker) and not is_zombie(worker) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not alive(worker) or is_zombie(worker)


def is_zombie(pid):
  """Orphans are reaped by whoever is process 1 here, perhaps never."""
  with open(f'/proc/{pid}/stat') as stat:
    return stat.read().rpartition(')')[2].split()[0] == 'Z'
