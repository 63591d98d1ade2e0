"""The sandbox: what a script may do, what stays of it, and what it costs the others."""

import asyncio
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from sao_jax.sandbox import PythonSandbox, ToolStatus
from sao_jax.sandbox import python as parent
from sao_jax.types import EpisodeFailure, FailureKind

MODES = pytest.mark.parametrize('isolation', ['bubblewrap', 'process'])


def make(isolation='auto', **changes):
  arguments = {'num_workers': 1, 'timeout_s': 5, 'memory_mb': 192, 'output_bytes': 4096}
  if isolation == 'bubblewrap' and shutil.which('bwrap') is None:
    pytest.skip('bubblewrap is not installed')
  return PythonSandbox(isolation=isolation, **arguments | changes)


def run(*codes, isolation='auto', **changes):
  """Results of one sandbox, call after call."""

  async def calls():
    sandbox = make(isolation, **changes)
    results = [await sandbox.run(code) for code in codes]
    await sandbox.close()
    return results

  return asyncio.run(calls())


EARLIER = set()  # processes below this one that are not of these tests


@pytest.fixture(scope='module', autouse=True)
def earlier():
  """Another file of this process may have a sandbox that lives on."""
  EARLIER.update(descendants(os.getpid()))


def descendants(root):
  """{pid: state} of the living and the zombies below `root`, but for EARLIER."""
  parents, states = {}, {}
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rpartition(')')[2].split()
    except (FileNotFoundError, ProcessLookupError):
      continue
    states[int(path.parent.name)], parents[int(path.parent.name)] = fields[0], int(fields[1])
  found, frontier = {}, [root]
  while frontier:
    above = frontier.pop()
    below = [pid for pid, ppid in parents.items() if ppid == above and pid not in EARLIER]
    found |= {pid: states[pid] for pid in below}
    frontier += below
  return found


async def until(condition, seconds=8.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'waited in vain'
    await asyncio.sleep(0.01)


def worker_pid():
  """The python below this process, or below its bubblewrap, that runs worker.py; the lowest if it has a child."""

  def is_worker(pid):
    return b'-P\0-S\0' in pathlib.Path(f'/proc/{pid}/cmdline').read_bytes().split(b'--\0')[-1]

  pids = [pid for pid in descendants(os.getpid()) if b'bwrap' not in _name(pid) and is_worker(pid)]
  return min(pids)


def _name(pid):
  return pathlib.Path(f'/proc/{pid}/comm').read_bytes()


class TestScripts:
  """What a well-meant script sees."""

  @MODES
  def test_output_and_error_line(self, isolation):
    results = run(
      'print(1); print("é", end="")',
      'print("a", end="")\n1/0',
      'raise ValueError("two\\nlines")',
      'def f(:',
      'import sys; sys.exit(3)',
      'import sys; sys.exit("bye")',
      'import sys; sys.exit()',
      '2 + 2',
      isolation=isolation,
    )
    ok, error = ToolStatus.OK, ToolStatus.ERROR
    assert [(r.status, r.output) for r in results] == [
      (ok, '1\né'),
      (error, 'a\nZeroDivisionError: division by zero\n'),
      (error, 'ValueError: two lines\n'),
      (error, 'SyntaxError: invalid syntax (<string>, line 1)\n'),
      (error, ''),
      (error, 'bye\n'),
      (ok, ''),
      (ok, ''),
    ]

  def test_awkward_code(self):
    recursion, digits, null, lone, empty, finalizer = run(
      'def f(): f()\nf()',
      'print(10**5000)',
      'print(1)\0',
      'print("\ud800")',
      '',
      'class E(Exception):\n  def __str__(self): raise self\nraise E',
    )
    assert recursion.output.startswith('RecursionError: maximum recursion depth')
    assert digits.output.startswith('ValueError: Exceeds the limit (4300')
    assert null.status == lone.status == finalizer.status == ToolStatus.ERROR
    assert 'null bytes' in null.output and 'UnicodeEncodeError' in lone.output
    assert (empty.status, empty.output) == (ToolStatus.OK, '')

  def test_standard_library(self):
    code = """
import asyncio, dataclasses, datetime, decimal, json, pickle, random, re, statistics, __main__
@dataclasses.dataclass
class Point:
  x: int
async def later():
  await asyncio.sleep(0.001)
  return pickle.loads(pickle.dumps(Point(3))).x
print(asyncio.run(later()), __name__, __main__.Point.__module__, input.__name__)
try:
  input()
except EOFError:
  print('no stdin')
"""
    (result,) = run(code)
    assert result.output == '3 __main__ __main__ input\nno stdin\n'

  @MODES
  def test_no_state_between_calls(self, isolation):
    soil = 'import math, builtins, os; math.pi = 3; builtins.x = 1; os.environ["x"] = "1"; y = 1'
    look = 'import math, os; print(math.pi == 3, "x" in dir(__builtins__), dict(os.environ), "y" in dir())'
    assert run(soil, look, isolation=isolation)[1].output == 'False False {} False\n'

  def test_hashes_do_not_depend_on_the_worker(self):
    assert run('print(hash("a"))')[0].output == run('print(hash("a"))')[0].output


class TestBounds:
  """Time, memory and output."""

  @MODES
  def test_timeout_keeps_what_was_printed(self, isolation):
    code = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
  signal.signal(number, signal.SIG_IGN)
print('before')
while True: pass
"""
    endless, after = run(code, 'print(2)', isolation=isolation, timeout_s=0.8)
    assert (endless.status, endless.output) == (ToolStatus.TIMEOUT, 'before\n')
    assert 0.8 <= endless.seconds < 3
    assert after.output == '2\n'

  def test_closed_stdout(self):
    codes = [
      'import sys; sys.stdout.close()',
      'import os; os.closerange(0, 99)\nimport time; time.sleep(99)',
      'import os; os.close(1); print(1)',
      'import os; print(1, flush=True); os._exit(0)',
      'import os; os._exit(7)',
      'import os, signal; os.kill(os.getpid(), signal.SIGSEGV)',
    ]
    closed, endless, unprintable, left, code, signaled = run(*codes, timeout_s=0.8)
    assert closed.status == left.status == ToolStatus.OK and left.output == '1\n'
    assert endless.status == ToolStatus.TIMEOUT
    assert unprintable.status == code.status == ToolStatus.ERROR
    assert signaled.status == ToolStatus.KILLED

  @MODES
  def test_memory(self, isolation):
    codes = ['bytearray(10**11)', 'a = []\nwhile True: a.append(bytearray(10**6))', 'print(1)']
    at_once, slowly, after = run(*codes, isolation=isolation)
    assert at_once.status == slowly.status == ToolStatus.KILLED
    assert at_once.output == slowly.output == 'MemoryError\n'
    assert after.output == '1\n'

  @MODES
  def test_output_is_cut(self, isolation):
    # 100 MB in one piece or in many, then 10 bytes with the newline, 11 bytes, and a cut in the middle of é.
    codes = [
      'print("x" * 10**8)',
      'for _ in range(10**5): print("x" * 999)',
      'print("x" * 9)',
      'print("x" * 10)',
      'print("x" * 9 + "é")',
    ]
    results = run(*codes, isolation=isolation, output_bytes=10, memory_mb=512)
    cut = ToolStatus.TRUNCATED
    assert [r.status for r in results] == [cut, cut, ToolStatus.OK, cut, cut]
    lines = ['x' * 10, 'x' * 10, 'x' * 9 + '\n', 'x' * 10, 'x' * 9 + '\ufffd']
    assert [r.output for r in results] == lines
    assert max(r.seconds for r in results) < 2


DENIED = """
import ctypes, errno, fcntl, os, resource, shutil, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def raw(*arguments):
  if libc.syscall(*arguments) < 0:
    raise OSError(ctypes.get_errno(), 'raw')
read, write = os.pipe()
victim = VICTIM
attempts = dict(
  fork=os.fork, forkpty=os.forkpty, spawn=lambda: os.posix_spawn('/bin/true', ['true'], {}),
  clone3=lambda: raw(435, ctypes.create_string_buffer(64), 64), x32=lambda: raw(0x40000039),
  execv=lambda: os.execv('/bin/true', ['true']),
  internet=socket.socket, unix=lambda: socket.socket(socket.AF_UNIX), netlink=lambda: socket.socket(16),
  kill_worker=lambda: os.kill(os.getppid(), 9), kill_all=lambda: os.kill(-1, 9), kill_group=lambda: os.kill(0, 9),
  kill_init=lambda: os.kill(1, 0), owner=lambda: fcntl.fcntl(read, fcntl.F_SETOWN, os.getppid()),
  limits=lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)),
  raise_limit=lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)),
  nice=lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
  pidfd=lambda: os.pidfd_open(os.getppid()), ptrace=lambda: raw(101, 16, os.getppid(), 0, 0),
  io_uring=lambda: raw(425, 1, ctypes.create_string_buffer(256)), memfd=lambda: os.memfd_create('x'),
  create=lambda: open('x', 'w'), append=lambda: open(victim, 'a'), update=lambda: open(victim, 'r+'),
  mkdir=lambda: os.mkdir('x'), fifo=lambda: os.mkfifo('x'), link=lambda: os.link(victim, 'x'),
  symlink=lambda: os.symlink(victim, 'x'), rename=lambda: os.rename(victim, victim + '2'),
  unlink=lambda: os.unlink(victim), rmdir=lambda: os.rmdir(os.path.dirname(victim)),
  truncate=lambda: os.truncate(victim, 0), chmod=lambda: os.chmod(victim, 0), utime=lambda: os.utime(victim, (1, 1)),
  chown=lambda: os.chown(victim, 1, 1), setxattr=lambda: os.setxattr(victim, 'user.x', b''),
  tmp=lambda: open('/tmp/x', 'w'),
)
for name, attempt in attempts.items():
  try:
    attempt()
  except (OSError, ValueError) as error:
    if isinstance(error, OSError) and error.errno not in (1, errno.EACCES, errno.ENOSYS, errno.EBADF):
      print(name, repr(error))
  else:
    print(name, 'was allowed')
for descriptor in set(range(3, 64)) - {read, write}:
  try:
    os.fstat(descriptor)
    print('open descriptor', descriptor)
  except OSError:
    pass
print('end')
"""


class TestIsolation:
  """What a hostile script reaches."""

  @MODES
  def test_denied(self, isolation, tmp_path):
    victim = tmp_path / 'victim'
    victim.write_text('untouched')
    names = ('st_mode', 'st_uid', 'st_gid', 'st_nlink', 'st_size', 'st_mtime_ns')
    before = [getattr(victim.stat(), name) for name in names]
    (result,) = run(DENIED.replace('VICTIM', repr(str(victim))), isolation=isolation)
    assert result.output == 'end\n'
    assert [getattr(victim.stat(), name) for name in names] == before
    assert victim.read_text() == 'untouched'
    assert list(tmp_path.iterdir()) == [victim]

  @MODES
  def test_nothing_survives(self, isolation):
    bomb = """
import os, sys
for _ in range(50):
  try:
    if os.fork() == 0:
      os.setsid()
      if os.fork() == 0:
        while True: pass
  except OSError as error:
    sys.exit(type(error).__name__)
"""

    async def check():
      sandbox = make(isolation, timeout_s=0.8)
      await sandbox.run('')
      before = descendants(os.getpid())
      results = [await sandbox.run(code) for code in (bomb, 'while True: pass', 'print(1 / 0)')]
      assert descendants(os.getpid()).keys() == before.keys()  # the same worker, and nothing else
      await sandbox.close()
      assert not descendants(os.getpid())
      return results

    assert asyncio.run(check())[0].output == 'PermissionError\n'

  @MODES
  def test_secrets(self, isolation, tmp_path, monkeypatch):
    monkeypatch.setenv('SAO_SECRET', 'open sesame')
    (tmp_path / 'secret').write_text('open sesame')
    code = f"""
import os
print(dict(os.environ), os.getcwd())
for path in ({str(tmp_path / 'secret')!r}, {__file__!r}, '/etc/passwd', '/proc/self/environ',
             f'/proc/{{os.getppid()}}/environ', f'/proc/{{os.getppid()}}/fd/0', '/proc/{os.getpid()}/environ'):
  try:
    print(path, open(path).read())
  except OSError:
    pass
"""

    async def check():
      sandbox = make(isolation)
      result = await sandbox.run(code)
      await sandbox.close()
      return sandbox.describe(), result

    description, result = asyncio.run(check())
    if isolation == 'process' and 'MISSING' in description:
      pytest.skip(description)
    directory = '/tmp' if isolation == 'bubblewrap' else '/'
    assert (result.status, result.output) == (ToolStatus.OK, f'{{}} {directory}\n')

  @MODES
  def test_network(self, isolation, tmp_path):
    code = """
import socket
try:
  socket.create_connection(('127.0.0.1', PORT), timeout=0.3)
  print('connected')
except OSError as error:
  print('refused')
left, right = socket.socketpair(type=socket.SOCK_DGRAM)
try:
  left.sendto(b'x', PATH)
  print('sent')
except OSError:
  print('refused')
"""
    path = str(tmp_path / 'socket')
    with (
      socket.create_server(('127.0.0.1', 0)) as server,
      socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local,
    ):
      server.settimeout(0.05)
      local.settimeout(0.05)
      local.bind(path)
      port = server.getsockname()[1]
      code = code.replace('PORT', str(port)).replace('PATH', repr(path))
      (result,) = run(code, isolation=isolation)
      with pytest.raises(TimeoutError):
        server.accept()
      with pytest.raises(TimeoutError):
        local.recv(1)
    assert result.output == 'refused\nrefused\n'

  def test_describe(self):
    async def check(isolation):
      sandbox = make(isolation)
      await sandbox.close()
      return sandbox.describe()

    process = asyncio.run(check('process'))
    assert process.startswith('no bubblewrap (as asked), seccomp (no') and '\n' not in process
    assert asyncio.run(check('bubblewrap')).startswith('bubblewrap (no network')

  def test_bubblewrap_that_does_not_work(self, tmp_path, monkeypatch):
    (tmp_path / 'bwrap').write_text('#!/bin/sh\necho no namespaces for you >&2\nexit 1\n')
    (tmp_path / 'bwrap').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    description = make('auto').describe()
    assert description.startswith('no bubblewrap (exit status 1: no namespaces for you), seccomp')
    with pytest.raises(ValueError, match=r"^isolation='bubblewrap' does not work here .*for you"):
      make('bubblewrap')


class TestPool:
  """Many calls, lost workers, cancellation, the end."""

  @MODES
  def test_concurrent_calls(self, isolation):
    async def check():
      sandbox = make(isolation, num_workers=2, timeout_s=20)
      numbers = range(200 if isolation == 'process' else 50)
      results = await asyncio.gather(*(sandbox.run(f'print({n}**2)') for n in numbers))
      assert [r.output for r in results] == [f'{n**2}\n' for n in numbers]
      order = []

      async def call(name):
        await sandbox.run(f'import time; time.sleep({0.1 if name < 2 else 0})')
        order.append(name)

      begun = time.monotonic()
      await asyncio.gather(*(call(name) for name in range(6)))
      assert order[0] in (0, 1)  # two at once, the others after one of them
      assert time.monotonic() - begun < 20
      await sandbox.close()

    asyncio.run(check())

  @MODES
  def test_lost_worker(self, isolation, monkeypatch):
    monkeypatch.setattr(parent, '_STOP_S', 0.2)

    async def check():
      sandbox = make(isolation, timeout_s=0.4, grace_s=0.2)
      await sandbox.run('')
      for number in (signal.SIGKILL, signal.SIGSTOP):  # an idle worker dies, or hangs
        os.kill(worker_pid(), number)
        assert (await sandbox.run('print(1)')).output == '1\n'
      call = asyncio.create_task(sandbox.run('import time; time.sleep(0.2); print(2)'))
      await asyncio.sleep(0.05)
      os.kill(worker_pid(), signal.SIGKILL)  # a busy one
      assert (await call).output == '2\n'
      await sandbox.close()

    asyncio.run(check())

  def test_broken_sandbox_is_a_failure_of_the_infrastructure(self):
    async def check():
      sandbox = make()
      sandbox._command = [shutil.which('false')]
      with pytest.raises(EpisodeFailure, match='broke twice') as caught:
        await sandbox.run('print(1)')
      assert caught.value.kind == FailureKind.INFRA
      await sandbox.close()
      assert not descendants(os.getpid())

    asyncio.run(check())

  @MODES
  def test_cancel(self, isolation):
    async def check():
      sandbox = make(isolation, timeout_s=30)
      await sandbox.run('')
      workers = len(descendants(os.getpid()))
      call = asyncio.create_task(sandbox.run('while True: pass'))
      waiting = asyncio.create_task(sandbox.run('print(2)'))
      await until(lambda: len(descendants(os.getpid())) > workers)
      call.cancel()
      with pytest.raises(asyncio.CancelledError):
        await call
      assert (await waiting).output == '2\n'
      assert len(descendants(os.getpid())) == workers
      await sandbox.close()

    asyncio.run(check())

  def test_close(self):
    async def check():
      sandbox = make(num_workers=2, timeout_s=30)
      calls = [asyncio.create_task(sandbox.run('while True: pass')) for _ in range(3)]
      await until(lambda: len(descendants(os.getpid())) >= 3)
      await asyncio.gather(sandbox.close(), sandbox.close())
      assert not descendants(os.getpid())
      for call in calls:
        with pytest.raises(RuntimeError, match='closed'):
          await call
      await sandbox.close()
      with pytest.raises(RuntimeError, match='closed'):
        await sandbox.run('print(1)')

    asyncio.run(check())

  def test_workers_die_with_the_process_that_owns_them(self):
    mark = (
      1000 + os.getpid()
    )  # a time-out that no other sandbox has: it is on the command line of each of its processes
    code = f"""
import asyncio
from sao_jax.sandbox import PythonSandbox
async def main():
  both = [
    PythonSandbox(num_workers=1, timeout_s={mark}, memory_mb=192, output_bytes=99, isolation=isolation)
    for isolation in ('process', 'auto')
  ]
  print(both[1].describe(), flush=True)
  await asyncio.gather(*(sandbox.run('while True: pass') for sandbox in both))
asyncio.run(main())
"""

    def alive():
      count = 0
      for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
          count += f'"timeout_s": {mark},'.encode() in path.read_bytes()
      return count

    owner = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)
    try:
      description = owner.stdout.readline()
      # A worker and its script; two more processes where there is bubblewrap.
      asyncio.run(until(lambda: alive() == (6 if description.startswith(b'bubblewrap') else 4)))
    finally:
      owner.kill()
      owner.communicate()
    asyncio.run(until(lambda: alive() == 0))


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('num_workers', 0),
    ('num_workers', 1.5),
    ('timeout_s', 0),
    ('timeout_s', float('nan')),
    ('timeout_s', float('inf')),
    ('grace_s', -1),
    ('memory_mb', 8),
    ('output_bytes', 0),
    ('isolation', 'chroot'),
  ],
)
def test_bad_arguments(field, value):
  with pytest.raises(ValueError, match=rf'^{field}={value!r}: .*pass'):
    make(**{field: value})
