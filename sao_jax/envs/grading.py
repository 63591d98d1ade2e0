"""Judges answers against references: integers here and exactly, everything else by math-verify in processes that can be killed."""

import asyncio
import inspect
import json
import re
import sys

from sao_jax.types import EpisodeFailure, FailureKind

MAX_ANSWER_CHARS = 2000  # a longer answer is wrong: no reference needs as many
MAX_DIGITS = 400
START_SECONDS = 60.0  # a worker imports sympy first

_INTEGER = re.compile(r'[+-]?([0-9]+|[0-9]{1,3}(,[0-9]{3})+)')
_UNESCAPED_DOLLAR = re.compile(r'(?<!\\)\$')


def parse_integer(text: str) -> int | None:
  """The integer that `text` spells, or None.

  Accepted after stripping white space: an optional sign, then ASCII digits (leading zeros as in `025` are fine) or digits in
  well-formed groups of three, `1,234`. Nothing else is: no `5.0`, `1_000`, `2+3`, `$5$`, `5.`, nor other scripts' digits.
  Longer than 400 characters is None, in constant time.
  """
  if len(text) > MAX_DIGITS:
    return None
  match = _INTEGER.fullmatch(text.strip())
  return int(match.group().replace(',', '')) if match else None


def grade_integer(answer: str, reference: str) -> bool:
  """Whether `answer` spells the same integer as `reference`, by the rules of `parse_integer`.

  Raises:
    ValueError: if the reference is not an integer.
  """
  expected = parse_integer(reference)
  if expected is None:
    raise ValueError(f'the reference {reference[:80]!r} is not an integer; use Grader')
  return parse_integer(answer) == expected


class Grader:
  """Judges any answer. Workers start when the first symbolic reference needs them.

  An integer reference is judged by `grade_integer`, in place. For any other, the same text (white space at the ends aside)
  is right, more than 2000 characters are wrong, and the rest is decided by math-verify (LaTeX only: its parser of plain
  expressions would evaluate the agent's text) in a worker process with a deadline and a memory limit. Of a reference that
  mixes prose and formulas, `$4k+3$ for odd $k$`, only the formulas count, and a right answer may be judged wrong.

  False means judged wrong (an answer that is not LaTeX is), never "could not be judged". A worker that crashes or misses its
  deadline is killed, and the question is put once more to a fresh one. If that fails too the episode fails as GRADER, also
  when it is the agent's text that keeps math-verify busy: a huge but correct form is possible, so such an answer has no
  verdict and no reward.
  """

  def __init__(self, *, timeout_s: float, num_workers: int):
    """Args: timeout_s: seconds for one judgement. num_workers: judgements at a time; further ones wait in order."""
    if not timeout_s > 0:
      raise ValueError(f'timeout_s must be positive, got {timeout_s}')
    if num_workers < 1:
      raise ValueError(f'num_workers must be at least 1, got {num_workers}')
    self._timeout_s = timeout_s
    self._slots = asyncio.Semaphore(num_workers)
    self._workers: set[_Worker] = set()
    self._idle: list[_Worker] = []
    self._closed = False

  async def grade(self, answer: str, reference: str) -> bool:
    """Whether `answer` is right.

    Raises:
      EpisodeFailure: DATA if math-verify cannot read the reference, GRADER if there was no verdict.
      RuntimeError: after `close`.
    """
    if self._closed:
      raise RuntimeError('the grader is closed')
    if parse_integer(reference) is not None:
      return grade_integer(answer, reference)
    if len(answer) > MAX_ANSWER_CHARS:
      return False
    if answer.strip() == reference.strip():
      return True
    verdict = await self._judge(answer, reference)
    if verdict == 'unreadable':
      raise EpisodeFailure(FailureKind.DATA, f'math-verify cannot read the reference {reference!r}')
    return verdict == 'right'

  async def close(self) -> None:
    """Kills and reaps every worker, busy ones too. Idempotent."""
    self._closed = True
    await asyncio.gather(*(self._discard(worker) for worker in list(self._workers)))

  async def _judge(self, answer: str, reference: str) -> str:
    """'right', 'wrong' or 'unreadable', by at most two workers."""
    request = {'reference': _as_latex(reference), 'answer': _as_latex(answer)}
    reason = ''
    async with self._slots:
      for _ in range(2):
        worker = self._idle.pop() if self._idle else await self._start()
        try:
          reply = await asyncio.wait_for(worker.ask(request), self._timeout_s)
        except TimeoutError:
          reason = f'no verdict within {self._timeout_s} s'
        except (OSError, ValueError) as error:  # the pipe broke, or the reply is not one
          reason = f'the worker broke: {error!r}'
        else:
          if 'verdict' in reply:
            self._idle.append(worker)
            return reply['verdict']
          reason = reply['error']
        finally:
          if worker not in self._idle:  # it failed, or this coroutine was cancelled
            await self._discard(worker)
    raise EpisodeFailure(FailureKind.GRADER, f'{reason}, twice; answer {answer[:80]!r}')

  async def _start(self) -> '_Worker':
    process = await asyncio.create_subprocess_exec(
      *_command(self._timeout_s),
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.DEVNULL,
      start_new_session=True,
    )
    worker = _Worker(process)
    self._workers.add(worker)
    try:
      if self._closed:
        raise ConnectionError('the grader was closed')
      await asyncio.wait_for(worker.receive(), START_SECONDS)
    except BaseException as error:
      await self._discard(worker)
      if isinstance(error, TimeoutError | OSError | ValueError):
        raise EpisodeFailure(FailureKind.GRADER, f'a worker did not start: {error!r}') from error
      raise
    return worker

  async def _discard(self, worker: '_Worker') -> None:
    if worker in self._idle:
      self._idle.remove(worker)
    self._workers.discard(worker)
    await worker.kill()


class _Worker:
  """One process that answers one line of JSON with another."""

  def __init__(self, process: asyncio.subprocess.Process):
    self.process = process

  async def ask(self, request: dict[str, str]) -> dict[str, str]:
    self.process.stdin.write(json.dumps(request).encode() + b'\n')
    await self.process.stdin.drain()
    return await self.receive()

  async def receive(self) -> dict[str, str]:
    line = await self.process.stdout.readline()
    if not line:
      raise ConnectionError('the worker ended')
    return json.loads(line)

  async def kill(self) -> None:
    if self.process.returncode is None:
      try:
        self.process.kill()
      except ProcessLookupError:
        pass
    await self.process.wait()
    self.process.stdin.close()


def _as_latex(text: str) -> str:
  """`text` as math-verify expects it: within dollars, unless it brings its own."""
  text = text.strip()
  return text if _UNESCAPED_DOLLAR.search(text) or r'\boxed' in text else f'${text}$'


def _command(timeout_s: float) -> list[str]:
  """The worker is sent as source: it stands alone, importing neither this package nor the caller's main module."""
  program = f'{inspect.getsource(_serve)}\n_serve({int(timeout_s) + 2})'
  return [sys.executable, '-P', '-c', program]


def _serve(seconds):
  """The worker: from stdin to stdout, one judgement a line. Ends with its parent, or by SIGALRM if it got stuck."""
  import json
  import logging
  import os
  import resource
  import signal
  import sys

  import math_verify

  resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # huge powers eat memory first
  logging.disable(logging.CRITICAL)
  replies = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # nothing but replies goes to the parent
  latex = [math_verify.LatexExtractionConfig()]

  def judge(reference, answer):
    expected = math_verify.parse(reference, latex, parsing_timeout=None, raise_on_error=True)
    if all(isinstance(part, str) for part in expected):
      return 'unreadable'
    given = math_verify.parse(answer, latex, parsing_timeout=None, raise_on_error=True)
    equal = math_verify.verify(expected, given, timeout_seconds=None, raise_on_error=True)
    return 'right' if equal else 'wrong'

  print(json.dumps({'ready': True}), file=replies, flush=True)
  for line in sys.stdin:
    signal.alarm(seconds)
    try:
      reply = {'verdict': judge(**json.loads(line))}
    except Exception as error:
      reply = {'error': f'math-verify raised {type(error).__name__}'}
    signal.alarm(0)
    print(json.dumps(reply), file=replies, flush=True)
