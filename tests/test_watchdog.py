"""Waits and deadlines: who waits for what, and processes that end instead of hanging."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import sao_jax
from sao_jax.runtime import heartbeat, watchdog
from sao_jax.runtime.clock import VirtualLoop
from sao_jax.runtime.heartbeat import Heartbeat

LIMIT_S = 60  # generous: of a child that should need a second or two


# Without the door of the library, which imports JAX: a child starts in no time.
IMPORTS = f"""
import asyncio, os, sys, time, types
sys.modules['sao_jax'] = types.ModuleType('sao_jax')
sys.modules['sao_jax'].__path__ = {list(sao_jax.__path__)!r}
from sao_jax.runtime import heartbeat, watchdog
"""


def start(code: str, *arguments) -> subprocess.Popen:
  command = [sys.executable, '-c', IMPORTS + code, *map(str, arguments)]
  return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def ended(child: subprocess.Popen) -> tuple[int, list[str]]:
  """The exit code and the lines of stderr."""
  try:
    _, said = child.communicate(timeout=LIMIT_S)
  finally:
    child.kill()
  return child.returncode, said.splitlines()


class TestWaits:
  def make(self):
    self.now = 0.0
    return watchdog.Waits(lambda: self.now)

  def test_seconds_add_up_by_what(self):
    waits = self.make()
    waits.begin('episode a', 'engine')
    self.now = 2.0
    waits.begin('episode a', 'environment')
    self.now = 5.0
    waits.begin('episode a', 'engine')
    self.now = 9.0
    # engine 0-2 and 5-9, environment 2-5; together the 9 s since the first begin.
    assert waits.end('episode a') == {'engine': 6.0, 'environment': 3.0}
    assert waits.end('episode a') == {}
    assert waits.report() == 'nobody waits'

  def test_report_groups_and_puts_the_oldest_first(self):
    waits = self.make()
    waits.begin('episode 3', 'the environment')
    self.now = 100.0
    waits.begin('episode 3', 'the engine')
    self.now = 101.5
    waits.begin('learner', '64 finished episodes')
    self.now = 110.0
    waits.begin('episode 3', 'the environment')
    waits.begin('episode 2', 'the engine')
    self.now = 111.0
    waits.begin('episode 1', 'the engine')
    self.now = 120.0
    assert waits.report().splitlines() == [
      'learner waits for 64 finished episodes: 18.5 s',
      '2 episodes wait for the engine: the oldest, 2, 10.0 s',
      'episode 3 waits for the environment: 10.0 s (110.0 s in all)',
    ]

  def test_report_is_short(self):
    waits = self.make()
    for i in range(25):
      waits.begin(f'host{i:02d}', 'a lock')
    lines = waits.report().splitlines()
    assert len(lines) == 20
    assert lines[18:] == ['host18 waits for a lock: 0.0 s', 'and 6 more lines']


class TestDeadlines:
  def test_work_that_hangs_on_a_thread_ends_the_process_and_says_who_waits(self):
    code = (
      'waits = watchdog.Waits(time.monotonic)\n'
      'waits.begin("learner", "an update")\n'
      'asyncio.run(watchdog.bounded("an update", 0.2, time.sleep, 600, waits=waits))'
    )
    status, said = ended(start(code))
    assert status == 3
    assert said[-2].startswith('learner waits for an update: ')
    assert said[-1] == 'failed: an update takes more than 0.2 s'

  def test_bounded_gives_the_result_and_raises_the_error(self):
    async def main():
      assert await watchdog.bounded('a sum', 60, sum, [1, 2]) == 3
      with pytest.raises(ZeroDivisionError):
        await watchdog.bounded('a division', 60, divmod, 1, 0)

    asyncio.run(main())

  def test_a_deadline_that_is_not_called_off_gives_its_code_and_last_line(self):
    # The first one is called off, else its code would be seen.
    code = (
      'watchdog.exit_after(0.1, 9, "too early")()\n'
      'watchdog.exit_after(0.3, 75, "stopped: no checkpoint")\n'
      'time.sleep(600)'
    )
    assert ended(start(code)) == (75, ['stopped: no checkpoint'])

  def test_a_full_pipe_does_not_keep_the_process_alive(self):
    # The main thread hangs in a write to stderr, whose lock it keeps, and nobody reads.
    code = (
      'watchdog.PRINT_S = 0.2\n'
      'watchdog.exit_after(0.2, 3, "nobody reads this")\n'
      'sys.stderr.write("x" * 10_000_000)'
    )
    child = start(code)
    try:
      assert child.wait(LIMIT_S) == 3
    finally:
      child.kill()
      child.stderr.close()

  @pytest.mark.parametrize('seconds', [0, -1.0, float('inf'), float('nan')])
  def test_a_deadline_that_no_timer_can_keep_is_refused(self, seconds):
    with pytest.raises(ValueError, match='a deadline of'):
      watchdog.exit_after(seconds, 3, 'x')
    with pytest.raises(ValueError, match='a deadline of'):
      watchdog.LoopGuard(seconds, watchdog.Waits(time.monotonic))


class TestLoopGuard:
  def test_a_blocked_loop_ends_the_process_and_says_where(self):
    code = (
      'async def main():\n'
      '  waits = watchdog.Waits(time.monotonic)\n'
      '  waits.begin("learner", "a batch")\n'
      '  watchdog.LoopGuard(0.4, waits).start()\n'
      '  await asyncio.sleep(1.0)\n'  # waits for longer than the limit, and blocks nothing
      '  print("alive", file=sys.stderr, flush=True)\n'
      '  an_innocent_name()\n'
      'def an_innocent_name():\n'
      '  time.sleep(600)\n'
      'asyncio.run(main())'
    )
    status, said = ended(start(code))
    assert status == 3
    assert said[0] == 'alive'
    assert any('an_innocent_name' in line for line in said)
    assert said[-2].startswith('learner waits for a batch: ')
    assert said[-1] == 'failed: the event loop is blocked for more than 0.4 s'

  def test_work_on_a_thread_of_a_logical_loop_is_no_block(self):
    # If the guard took it for one, it would end the test process.
    async def main():
      guard = watchdog.LoopGuard(0.4, watchdog.Waits(time.monotonic))
      guard.start()
      await asyncio.to_thread(time.sleep, 0.8)
      guard.stop()
      guard.stop()
      time.sleep(0.8)  # blocks the loop, and nobody watches

    loop = VirtualLoop()
    loop.run_until_complete(main())
    loop.close()


BEATS = """
folder, rank, other = sys.argv[1], int(sys.argv[2]), sys.argv[1] + '/rank-0000' + str(1 - int(sys.argv[2]))
heart = heartbeat.Heartbeat(folder, rank=rank, world=2, interval_s=0.1, timeout_s=2)
heart.start()
"""


class TestHeartbeat:
  def test_a_killed_peer_is_missed(self, tmp_path):
    first, second = (start(BEATS + 'time.sleep(600)', tmp_path, rank) for rank in (0, 1))
    deadline = time.monotonic() + LIMIT_S
    while len(list(tmp_path.glob('rank-0000?'))) < 2 and time.monotonic() < deadline:
      time.sleep(0.02)
    time.sleep(2.5)  # for longer than the timeout they hear each other
    assert (first.poll(), second.poll()) == (None, None)
    second.send_signal(signal.SIGKILL)
    assert ended(second)[0] == -signal.SIGKILL
    assert ended(first) == (3, ['failed: process 1 of 2 has not been heard for 2 s'])

  def test_a_peer_that_ended_well_is_not_missed(self, tmp_path):
    # The first stops as soon as it sees the other, which goes on for longer than the timeout after that.
    hasty = 'while not os.path.exists(other): time.sleep(0.001)\nheart.stop()'
    patient = (
      'while "done" not in open(other).read(): time.sleep(0.01)\n'
      'time.sleep(2.5)\n'
      'heart.stop()\n'
      'heart.stop()'
    )
    first = start(BEATS + hasty, tmp_path, 0)
    while not (tmp_path / 'rank-00000').exists() and first.poll() is None:
      time.sleep(0.02)
    second = start(BEATS + patient, tmp_path, 1)
    assert ended(first) == (0, [])
    assert ended(second) == (0, [])
    assert json.loads((tmp_path / 'rank-00001').read_text())['done'] is True

  @pytest.mark.parametrize('left', ['{"rank": 1, "count": 7, "pid": 4, "done": true}', '{"ra', ''])
  def test_what_an_earlier_run_left_is_no_sign_of_life(self, tmp_path, left, monkeypatch):
    (tmp_path / 'rank-00001').write_text(left)
    self.assert_missed(tmp_path, monkeypatch)

  def test_a_peer_that_never_comes_is_missed(self, tmp_path, monkeypatch):
    self.assert_missed(tmp_path / 'new', monkeypatch)

  def assert_missed(self, folder, monkeypatch):
    reasons = []

    def end(code, reason):
      reasons.append((code, reason))
      heart._stopped.set()  # ends the thread in place of the process

    monkeypatch.setattr(heartbeat, 'end_process', end)
    heart = Heartbeat(folder, rank=0, world=2, interval_s=0.02, timeout_s=0.3)
    heart.start()
    heart._thread.join(LIMIT_S)
    assert reasons == [(3, 'failed: process 1 of 2 has not been heard for 0.3 s')]

  def test_only_changes_count(self):
    peer = heartbeat._Peer(heard=0.0)
    old = {'rank': 1, 'count': 9, 'pid': 4, 'done': True}
    for now, state in enumerate([None, old, old, {}, None, old], start=1):
      peer.look(state, float(now))
    assert (peer.heard, peer.done) == (0.0, False)
    peer.look({'rank': 1, 'count': 1, 'pid': 5}, 7.0)  # it starts, and counts from 1 again
    assert (peer.heard, peer.done) == (7.0, False)
    peer.look({'rank': 1, 'count': 2, 'pid': 5, 'done': True}, 8.0)
    assert (peer.heard, peer.done) == (8.0, True)

  def test_a_full_disk_is_told_once_and_is_no_end(self, tmp_path, monkeypatch, capfd):
    heart = Heartbeat(tmp_path, rank=0, world=1, interval_s=0.02, timeout_s=30)
    (tmp_path / 'rank-00000').write_text('{"left": "by another run"}')
    heart.start()
    assert json.loads((tmp_path / 'rank-00000').read_text()) == {
      'rank': 0, 'count': 1, 'pid': os.getpid(),
    }  # fmt: skip
    full = []

    def write(self, **state):
      full.append(state)
      raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
      patch.setattr(Heartbeat, '_write', write)
      deadline = time.monotonic() + LIMIT_S
      while len(full) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    heart.stop()
    assert capfd.readouterr().err.count('No space left') == 1
    assert json.loads((tmp_path / 'rank-00000').read_text())['done'] is True

  def test_deadlines_and_ranks_are_checked(self, tmp_path):
    with pytest.raises(ValueError, match=r'interval_s 30 .* timeout_s 30'):
      Heartbeat(tmp_path, rank=0, world=2, interval_s=30, timeout_s=30)
    with pytest.raises(ValueError, match='rank 2'):
      Heartbeat(tmp_path, rank=2, world=2, interval_s=1, timeout_s=30)
