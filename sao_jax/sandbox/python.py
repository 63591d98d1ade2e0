"""The caller's side of the sandbox: a pool of worker processes, see worker.py."""

import asyncio
import contextlib
import dataclasses
import enum
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading

from sao_jax.types import EpisodeFailure, FailureKind

_WORKER = os.path.join(os.path.dirname(os.path.realpath(__file__)), 'worker.py')
_ENVIRONMENT = {'PYTHONHASHSEED': '0'}  # sets have one order in all workers; scripts see none of it
_START_S = 20.0  # to start a worker, on a loaded machine
_STOP_S = 2.0  # for a worker to end by itself when its stdin ends, before it is killed


class ToolStatus(enum.StrEnum):
  """How a call ended."""

  OK = 'ok'  # the script ran to its end
  ERROR = 'error'  # an uncaught exception, or an exit status that is not 0
  TIMEOUT = 'timeout'  # it ran longer than timeout_s
  KILLED = 'killed'  # out of memory, or by a signal
  TRUNCATED = 'truncated'  # it wrote more than output_bytes, and was stopped there


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """What a call gives back."""

  output: str  # stdout, then the last line of an error; at most output_bytes, bad UTF-8 replaced
  status: ToolStatus
  seconds: float  # wall time of the script, without the wait for a worker


class _Worker:
  """One worker process, and frames to and from it."""

  def __init__(self, process: asyncio.subprocess.Process):
    self.process = process
    self._stopping: asyncio.Task | None = None

  async def send(self, body: bytes) -> None:
    self.process.stdin.write(struct.pack('>Q', len(body)) + body)
    await self.process.stdin.drain()

  async def receive(self) -> bytes:
    (size,) = struct.unpack('>Q', await self.process.stdout.readexactly(8))
    return await self.process.stdout.readexactly(size)

  async def stop(self) -> None:
    """Ends the worker and its call. Goes on to the end even when the caller is cancelled."""
    if self._stopping is None:
      self._stopping = asyncio.create_task(self._stop())
    await asyncio.shield(self._stopping)

  async def _stop(self) -> None:
    self.process.stdin.close()
    try:
      async with asyncio.timeout(_STOP_S):
        await self.process.wait()
    except TimeoutError:
      with contextlib.suppress(ProcessLookupError):
        self.process.kill()
      async with asyncio.timeout(_STOP_S):
        await self.process.wait()


class PythonSandbox:
  """Runs untrusted Python scripts, each in a fresh process that is dead when its result is there.

  A script sees the standard library and nothing else: no network, no environment, no files of the host, none that it
  can write, no threads and no processes. Calls share no state. Numpy and the like are not installed for it. The
  constructor takes a moment: it starts a worker to see that the isolation works.

  Args:
    num_workers: calls that run at once; further ones wait in order of arrival.
    timeout_s: wall time of one script, seconds.
    memory_mb: address space of one script, MiB; the interpreter itself takes about 30 of it.
    output_bytes: the longest output; a script that writes more is stopped.
    isolation: 'bubblewrap' (namespaces, and what 'process' has), 'process' (seccomp filter, Landlock, limits), or
      'auto', which is bubblewrap where it works.
    grace_s: a worker that is silent for timeout_s + grace_s is replaced, seconds.

  Raises:
    ValueError: an argument is out of range, or the isolation does not work on this machine.
  """

  def __init__(
    self,
    *,
    num_workers: int,
    timeout_s: float,
    memory_mb: int,
    output_bytes: int,
    isolation: str = 'auto',
    grace_s: float = 5.0,
  ):
    for name, value, least, remedy in (
      ('num_workers', num_workers, 1, 'pass the number of calls to run at once, at least 1'),
      ('memory_mb', memory_mb, 64, 'the interpreter needs some itself: pass at least 64'),
      ('output_bytes', output_bytes, 1, 'pass the longest output to keep, at least 1'),
    ):
      if not isinstance(value, int) or value < least:
        raise ValueError(f'{name}={value!r}: {remedy}')
    for name, value in (('timeout_s', timeout_s), ('grace_s', grace_s)):
      if not 0 < value < math.inf:
        raise ValueError(f'{name}={value!r}: pass seconds, more than 0 and finite')
    if isolation not in ('auto', 'bubblewrap', 'process'):
      raise ValueError(f"isolation={isolation!r}: pass 'auto', 'bubblewrap' or 'process'")
    self._deadline_s = timeout_s + grace_s
    self._settings = {
      'timeout_s': timeout_s,
      'memory_mb': memory_mb,
      'output_bytes': output_bytes,
      'readable': _readable(),
    }
    self._command, self._description = self._choose(isolation)
    self._slots = asyncio.Semaphore(num_workers)
    self._num_workers = num_workers
    self._workers: set[_Worker] = set()
    self._idle: list[_Worker] = []
    self._closed = False
    self._closing = asyncio.Lock()

  def describe(self) -> str:
    """One line: the isolation in force, and what is missing."""
    return self._description

  async def run(self, code: str) -> ToolResult:
    """Runs `code` as a script. What the code does never raises; it is told by the status.

    Raises:
      EpisodeFailure: INFRA, the sandbox itself broke, and broke again with a fresh worker.
      RuntimeError: the sandbox is closed.
    """
    body = code.encode('utf-8', 'surrogatepass')
    async with self._slots:
      try:
        return await self._attempt(body, fresh=False)
      except (OSError, EOFError):
        try:
          return await self._attempt(body, fresh=True)
        except (OSError, EOFError) as error:
          message = f'the sandbox broke twice in a row: {error!r}'
          raise EpisodeFailure(FailureKind.INFRA, message) from error

  async def close(self) -> None:
    """Ends all calls and workers. Idempotent."""
    self._closed = True
    async with self._closing, contextlib.AsyncExitStack() as stack:
      await asyncio.gather(*(self._stop(worker) for worker in tuple(self._workers)))
      for _ in range(self._num_workers):  # a call that was starting a worker stops it itself
        await stack.enter_async_context(self._slots)

  async def _attempt(self, body: bytes, *, fresh: bool) -> ToolResult:
    """One try; a worker that it does not bring to an answer is stopped."""
    if self._closed:
      raise RuntimeError('the sandbox is closed')
    worker = self._idle.pop() if self._idle and not fresh else await self._start()
    try:
      async with asyncio.timeout(self._deadline_s):
        await worker.send(body)
        reply = await worker.receive()
      head, _, output = reply.partition(b'\n')
      status, seconds = head.decode().split()
      if status == 'broken':
        raise OSError(f'a child did not lock itself: {output.decode(errors="replace")}')
    except BaseException as error:
      await self._stop(worker)
      if self._closed and isinstance(error, (OSError, EOFError)):
        raise RuntimeError('the sandbox is closed') from None
      raise
    self._idle.append(worker)
    return ToolResult(output.decode(errors='replace'), ToolStatus(status), float(seconds))

  async def _start(self) -> _Worker:
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    worker = _Worker(
      await asyncio.create_subprocess_exec(
        *self._command,
        stdin=pipe,
        stdout=pipe,
        stderr=null,
        env=_ENVIRONMENT,
        cwd='/',
        start_new_session=True,
      )
    )
    self._workers.add(worker)
    try:
      if self._closed:
        raise RuntimeError('the sandbox is closed')
      async with asyncio.timeout(_START_S):
        await worker.receive()
    except BaseException:
      await self._stop(worker)
      raise
    return worker

  async def _stop(self, worker: _Worker) -> None:
    await worker.stop()
    self._workers.discard(worker)

  def _choose(self, isolation: str) -> tuple[list[str], str]:
    """The command of a worker that was seen to work, and its description."""
    interpreter = os.path.realpath(getattr(sys, '_base_executable', None) or sys.executable)
    settings = json.dumps(self._settings)
    reason = 'as asked'
    if isolation != 'process':
      try:
        jail = _bubblewrap(interpreter, self._settings['readable'])
        command = jail + _python(interpreter, '/worker.py', settings)
        locks = _probe(command)
        return command, f'bubblewrap (no network, minimal read-only root, own pids), {locks}'
      except OSError as error:
        reason = str(error)
    if isolation != 'bubblewrap':
      try:
        command = _python(interpreter, _WORKER, settings)
        return command, f'no bubblewrap ({reason}), {_probe(command)}'
      except OSError as error:
        reason += f'; without it: {error}'
    remedy = 'use Linux on x86_64 or aarch64 where user namespaces or seccomp filters are permitted'
    raise ValueError(f'isolation={isolation!r} does not work here ({reason}): {remedy}')


def _readable() -> list[str]:
  """What scripts may read: the standard library, and what it is linked against."""
  prefix = os.path.realpath(sys.base_prefix)
  libraries = [f'{root}/{lib}' for root in (prefix, '/usr', '') for lib in ('lib', 'lib64')]
  others = ['/usr/share/zoneinfo', '/etc/ld.so.cache', '/dev/null', '/dev/urandom']
  return [path for path in dict.fromkeys(libraries + others) if os.path.exists(path)]


def _python(interpreter: str, worker: str, settings: str) -> list[str]:
  return [interpreter, '-s', '-P', '-S', '-B', '-X', 'utf8', worker, settings]


def _bubblewrap(interpreter: str, readable: list[str]) -> list[str]:
  """A root that has only `readable`, all of it read-only; the current directory is empty."""
  program = shutil.which('bwrap')
  if program is None:
    raise FileNotFoundError('no bwrap on PATH')
  command = [program, '--unshare-all', '--die-with-parent', '--new-session', '--cap-drop', 'ALL']
  for path in [*readable, interpreter]:
    command += ['--dev-bind' if path.startswith('/dev/') else '--ro-bind', path, path]
  command += ['--ro-bind', _WORKER, '/worker.py', '--dir', '/tmp', '--remount-ro', '/']
  return [*command, '--hostname', 'sandbox', '--chdir', '/tmp', '--']


def _probe(command: list[str]) -> str:
  """Runs a script in a worker of its own. Returns the locks in force; OSError where it does not work."""
  code = b'import os\ntry:\n  os.fork()\nexcept PermissionError:\n  print(1)'
  pipe = subprocess.PIPE
  process = subprocess.Popen(
    command, stdin=pipe, stdout=pipe, stderr=pipe, env=_ENVIRONMENT, cwd='/', start_new_session=True
  )
  timer = threading.Timer(_START_S, process.kill)
  timer.daemon = True
  timer.start()
  with process:
    with contextlib.suppress(BrokenPipeError):  # it has died; what it said tells why
      process.stdin.write(struct.pack('>Q', len(code)) + code)
      process.stdin.flush()
    hello, reply = (
      process.stdout.read(int.from_bytes(process.stdout.read(8), 'big')) for _ in range(2)
    )
    with contextlib.suppress(BrokenPipeError):
      process.stdin.close()
    said = process.stderr.read().decode(errors='replace').strip() or repr(reply)
  timer.cancel()
  if not (reply.startswith(b'ok ') and reply.endswith(b'\n1\n')):
    raise OSError(f'exit status {process.returncode}: {said.splitlines()[-1]}')
  locks = 'seccomp (no processes, threads, sockets, writes, signals), limits, no capabilities'
  files = 'Landlock' if hello else 'MISSING: Landlock, which hides the files of the host'
  return f'{locks}, {files}'
