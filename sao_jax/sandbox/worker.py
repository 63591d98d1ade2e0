"""The process that runs untrusted Python: one forked and locked child for each call.

It stands alone (`python worker.py SETTINGS`), and speaks frames over stdin and stdout: 8 bytes of length, then the
body. It opens with a hello that names its optional locks; a request is source code, a reply `status seconds` and, from
the next line on, the output. The end of stdin, also in the middle of a call, ends the call and the worker.

The worker drops its rights once: no_new_privs, no capabilities, not dumpable (its memory and descriptors are closed to
the child), and by Landlock no files but the standard library's. The child adds limits and a seccomp filter that only
lets through what it lists. So there is no fork, thread, exec, socket, signal to others, or change of any file, and
nothing to clean up but the one child.
"""

import collections  # noqa: F401, as three below: not for the worker, but so that scripts start warm
import ctypes
import fractions  # noqa: F401
import functools  # noqa: F401
import gc
import io
import itertools  # noqa: F401
import json
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
import types

LOCKED = (
  b'\x06'  # the child's first byte: what follows comes from the script, not from the worker's code
)

# Every system call that the child may make, `name:x86_64:aarch64`, the common ones first; - where there is none.
SYSCALLS = """
read:0:63 write:1:64 mmap:9:222 munmap:11:215 brk:12:214 futex:202:98 close:3:57 fstat:5:80 lseek:8:62 mprotect:10:226
mremap:25:216 madvise:28:233 stat:4:- lstat:6:- newfstatat:262:79 statx:332:291 open:2:- openat:257:56 getdents64:217:61
readlink:89:- readlinkat:267:78 access:21:- faccessat:269:48 faccessat2:439:439 getcwd:79:17 chdir:80:49 fchdir:81:50
pread64:17:67 readv:19:65 writev:20:66 ioctl:16:29 fcntl:72:25 dup:32:23 dup2:33:- dup3:292:24 close_range:436:436
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 sigaltstack:131:132 pause:34:- alarm:37:- getitimer:36:102 setitimer:38:103 kill:62:129
tgkill:234:131 restart_syscall:219:128 exit:60:93 exit_group:231:94 clock_gettime:228:113 clock_getres:229:114
gettimeofday:96:169 time:201:- times:100:153 nanosleep:35:101 clock_nanosleep:230:115 sched_yield:24:124 getpid:39:172
getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 uname:63:160 umask:95:166
getrlimit:97:163 prlimit64:302:261 getrusage:98:165 sysinfo:99:179 sched_getaffinity:204:123 getrandom:318:278
rseq:334:293 set_robust_list:273:99 pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 socketpair:53:199 getsockname:51:204
sendto:44:206 recvfrom:45:207 shutdown:48:210
"""
OWN_PID = 0xFFFFFFF1  # in a filter: stands for the child's own pid, which is known after the fork
WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
NO_BITS = {'open': (1, WRITES), 'openat': (2, WRITES)}  # argument, bits that must not be set
ONE_OF = {  # argument, values that it may have
  'kill': (0, (OWN_PID,)),
  'tgkill': (0, (OWN_PID,)),
  'prlimit64': (0, (0,)),
  'socketpair': (0, (1,)),  # AF_UNIX: asyncio wants one
  'sendto': (5, (0,)),  # without an address
  'fcntl': (1, (0, 1, 2, 3, 4, 1030)),  # dup and flags; F_SETOWN and F_SETSIG would signal others
  'ioctl': (
    1,
    (0x5401, 0x5421, 0x541B, 0x5450, 0x5451),
  ),  # TCGETS FIONBIO FIONREAD FIONCLEX FIOCLEX
}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def checked(result: int, what: str) -> int:
  if result < 0:
    raise OSError(ctypes.get_errno(), f'{what}: {os.strerror(ctypes.get_errno())}')
  return result


def prctl(option: int, *values: int) -> None:
  words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0)[:4]]
  checked(libc.prctl(option, *words), f'prctl {option}')


def seccomp_filter() -> bytes:
  """BPF that allows SYSCALLS; else EPERM, or ENOSYS for calls so new that libc tries an older one next."""
  column, arch = {'x86_64': (1, 0xC000003E), 'aarch64': (2, 0xC00000B7)}[platform.machine()]
  load, equal, at_least, any_bit, ret = 0x20, 0x15, 0x35, 0x45, 0x06
  allow, kill, errno = 0x7FFF0000, 0x80000000, 0x00050000
  program = [(load, 0, 0, 4), (equal, 1, 0, arch), (ret, 0, 0, kill), (load, 0, 0, 0)]
  for entry in SYSCALLS.split():
    fields = entry.split(':')
    name, number = fields[0], fields[column]
    if number == '-':
      continue
    body = [(ret, 0, 0, allow)]
    if name in NO_BITS:
      argument, bits = NO_BITS[name]
      body = [(load, 0, 0, 16 + 8 * argument), (any_bit, 1, 0, bits), *body, (ret, 0, 0, errno | 1)]
    elif name in ONE_OF:
      argument, allowed = ONE_OF[name]
      tests = [line for value in allowed for line in ((equal, 0, 1, value), (ret, 0, 0, allow))]
      body = [(load, 0, 0, 16 + 8 * argument), *tests, (ret, 0, 0, errno | 1)]
    program += [(equal, 0, len(body), int(number)), *body]
  program += [(at_least, 0, 1, 424), (ret, 0, 0, errno | 38), (ret, 0, 0, errno | 1)]
  return b''.join(struct.pack('HBBI', *line) for line in program)


def landlock(readable: list[str]) -> None:
  """Allows reading files beneath `readable` and denies every other access that Landlock 1 knows."""
  attributes = struct.pack('Q', (1 << 13) - 1)
  ruleset = checked(libc.syscall(444, attributes, ctypes.c_size_t(8), ctypes.c_uint(0)), 'landlock')
  for path in filter(os.path.exists, readable):
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    access = 1 << 2 | (1 << 3 if os.path.isdir(path) else 0)  # READ_FILE, READ_DIR
    rule = struct.pack('=Qi', access, file)
    checked(libc.syscall(445, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0)), f'landlock {path}')
    os.close(file)
  checked(libc.syscall(446, ruleset, ctypes.c_uint(0)), 'landlock')
  os.close(ruleset)


def lock_worker(readable: list[str]) -> bytes:
  """Drops rights for good. Returns the names of the optional locks that the kernel granted."""
  prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
  header, none = struct.pack('Ii', 0x20080522, 0), bytes(24)
  checked(libc.capset(header, none), 'capset')
  try:
    landlock(readable)
    granted = b'Landlock'
  except OSError:  # an older kernel; the hello says so
    granted = b''
  prctl(4, 0)  # PR_SET_DUMPABLE
  prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
  return granted


def lock_child(parent: int, settings: dict, program: bytes) -> None:
  """Leaves the child its descriptors 0, 1 and 2, its limits, and the system calls of the filter."""
  prctl(1, signal.SIGKILL)
  if os.getppid() != parent:
    os._exit(1)
  os.setsid()
  cpu, memory = math.ceil(settings['timeout_s']) + 1, settings['memory_mb'] << 20
  limits = {'AS': memory, 'CPU': cpu, 'FSIZE': 0, 'NOFILE': 64, 'CORE': 0, 'MEMLOCK': 0}
  for name, value in limits.items():
    limit = getattr(resource, f'RLIMIT_{name}')
    host = resource.getrlimit(limit)[1]
    value = value if host == resource.RLIM_INFINITY else min(value, host)
    resource.setrlimit(limit, (value, value))
  program = program.replace(struct.pack('I', OWN_PID), struct.pack('I', os.getpid()))
  buffer = ctypes.create_string_buffer(program, len(program))
  head = ctypes.create_string_buffer(struct.pack('HP', len(program) // 8, ctypes.addressof(buffer)))
  prctl(22, 2, ctypes.addressof(head))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


class Stdout(io.FileIO):
  """Remembers the last byte, so that an error starts on a line of its own."""

  last = b'\n'

  def write(self, data) -> int:
    self.last = bytes(data[-1:]) or self.last
    return super().write(data)


def run_script(code: bytes) -> int:
  """Runs `code` as __main__. Returns the exit status; the last line of an error goes to stdout."""
  raw = Stdout(1, 'w', closefd=False)
  stdout = io.TextIOWrapper(
    io.BufferedWriter(raw), 'utf-8', 'backslashreplace', line_buffering=True
  )
  sys.stdout = sys.__stdout__ = stdout
  sys.argv = ['']
  main = sys.modules['__main__'] = types.ModuleType('__main__')
  status, line = 1, ''
  try:
    exec(compile(code.decode('utf-8', 'surrogatepass'), '<string>', 'exec'), main.__dict__)
    status = 0
  except SystemExit as error:
    if error.code is None or isinstance(error.code, int):
      status = (error.code or 0) & 0xFF
    else:
      line = str(error.code)
  except MemoryError:
    status, line = -signal.SIGKILL, 'MemoryError'
  except BaseException as error:
    line = ': '.join(filter(None, (type(error).__name__, ' '.join(str(error).split('\n')))))
  if not stdout.closed:
    stdout.flush()
  if line:
    text = line.encode('utf-8', 'backslashreplace')
    os.write(1, (b'' if raw.last == b'\n' else b'\n') + text + b'\n')
  return status


def child(code: bytes, parent: int, settings: dict, program: bytes) -> None:
  """The whole life of a child; it does not return, whatever the script does."""
  status = 1
  try:
    lock_child(parent, settings, program)
    os.write(1, LOCKED)
    status = run_script(code)
  except (
    OSError
  ) as error:  # before LOCKED: for the parent to read. After: the script has closed stdout
    os.write(1, str(error).encode())
  finally:
    if status < 0:
      os.kill(os.getpid(), -status)
    os._exit(status)


def supervise(pid: int, reader: int, settings: dict) -> tuple[str, bytes]:
  """Reads the output until the child ends or breaks a bound; the child is dead and reaped at the end."""
  deadline = time.monotonic() + settings['timeout_s']
  exited = os.pidfd_open(pid)
  poller, waiting = select.poll(), {reader, exited}
  for file in (0, reader, exited):
    poller.register(file, select.POLLIN)
  output, status = bytearray(), ''
  while waiting and not status:
    left = deadline - time.monotonic()
    events = [file for file, _ in poller.poll(max(left, 0) * 1000)]
    chunk = os.read(reader, 1 << 16) if reader in events else b''
    output += chunk
    if len(output) > len(LOCKED) + settings['output_bytes']:
      status = 'truncated'
    elif 0 in events:
      status = 'aborted'
    elif left <= 0:
      status = 'timeout'
    for file in waiting.intersection(events):
      if file == exited or not chunk:
        poller.unregister(file)
        waiting.remove(file)
  os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is its own
  _, result = os.waitpid(pid, 0)
  os.close(reader)
  os.close(exited)
  if not output.startswith(LOCKED):
    return status if status == 'aborted' else 'broken', bytes(output)
  ended = 'killed' if os.WIFSIGNALED(result) else 'error' if result else 'ok'
  return status or ended, bytes(output[len(LOCKED) :][: settings['output_bytes']])


def read_exactly(size: int) -> bytes:
  data = bytearray()
  while len(data) < size:
    chunk = os.read(0, min(size - len(data), 1 << 20))
    if not chunk:
      sys.exit(0)
    data += chunk
  return bytes(data)


def write_frame(body: bytes) -> None:
  data = memoryview(struct.pack('>Q', len(body)) + body)
  while data:
    data = data[os.write(1, data) :]


def main() -> None:
  settings = json.loads(sys.argv[1])
  os.environ.clear()
  null = os.open(os.devnull, os.O_RDWR)
  program = seccomp_filter()
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  write_frame(lock_worker(settings['readable']))
  worker = os.getpid()
  gc.collect()
  gc.freeze()
  while True:
    code = read_exactly(struct.unpack('>Q', read_exactly(8))[0])
    started = time.monotonic()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
      signal.signal(signal.SIGINT, signal.default_int_handler)
      for source, target in ((null, 0), (writer, 1), (null, 2)):
        os.dup2(source, target)
      os.closerange(3, 256)
      child(code, worker, settings, program)
    os.close(writer)
    status, output = supervise(pid, reader, settings)
    if status == 'aborted':
      sys.exit(0)
    write_frame(f'{status} {time.monotonic() - started:.6f}\n'.encode() + output)


if __name__ == '__main__':
  main()
