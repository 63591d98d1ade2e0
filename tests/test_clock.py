"""The event loop whose time is logical, and real work under it."""

import asyncio
import threading
import time

import pytest

from sao_jax.runtime.clock import VirtualLoop
from sao_jax.runtime.failures import RunFailed
from sao_jax.runtime.logical import LogicalWork, Outside


def virtual(coroutine, **kwargs):
  with asyncio.Runner(loop_factory=lambda: VirtualLoop(**kwargs)) as runner:
    return runner.run(coroutine)


def now() -> float:
  return asyncio.get_running_loop().time()


def test_a_year_passes_at_once_and_in_order():
  async def main():
    seen = []

    async def sleeper(days):
      await asyncio.sleep(86400.0 * days)
      seen.append((days, now()))

    await asyncio.gather(*(sleeper(days) for days in (365, 1, 30)))
    return seen

  began = time.monotonic()
  assert virtual(main()) == [(d, 86400.0 * d) for d in (1, 30, 365)]
  assert time.monotonic() - began < 20


def test_thousands_of_sleepers_a_second():
  async def main():
    async def sleeper(i):
      for _ in range(10):
        await asyncio.sleep(i % 7 + 0.5)

    await asyncio.gather(*(sleeper(i) for i in range(2000)))
    return now()

  assert virtual(main()) == 65.0


def test_deadlines_are_of_logical_time():
  async def main():
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(1000.0):
        await asyncio.sleep(5000.0)
    return now()

  assert virtual(main()) == 1000.0


def test_tasks_that_wait_for_each_other_end_with_an_error_instead_of_waiting():
  async def main():
    await asyncio.get_running_loop().create_future()

  with pytest.raises(RuntimeError, match='nothing can ever happen again'):
    virtual(main())


def test_time_stands_still_while_work_is_on_a_thread():
  async def main():
    ticks = []

    async def ticker():
      while True:
        await asyncio.sleep(1.0)
        ticks.append(now())

    ticking = asyncio.create_task(ticker())
    answer = await asyncio.to_thread(lambda: time.sleep(0.2) or 42)
    assert (answer, ticks) == (42, [])
    await asyncio.sleep(2.5)
    ticking.cancel()
    return ticks

  assert virtual(main()) == [1.0, 2.0]


def test_work_on_a_thread_that_never_ends_is_given_up():
  gate = threading.Event()

  async def main():
    await asyncio.to_thread(gate.wait)

  loop = VirtualLoop(patience_s=0.2)
  with pytest.raises(TimeoutError, match=r'takes more than 0\.2 s'):
    loop.run_until_complete(main())
  gate.set()


def test_jump_goes_forward_only():
  async def main():
    loop = asyncio.get_running_loop()
    loop.jump(100.25)
    await asyncio.sleep(1.0)
    assert now() == 101.25
    with pytest.raises(ValueError, match=r'101\.25'):
      loop.jump(3.0)

  virtual(main())


# Real work under logical time


@pytest.fixture
def outside():
  outside = Outside(patience_s=5.0)
  yield outside
  outside.close()
  outside.close()  # idempotent


def test_a_tool_takes_its_logical_time_however_long_it_really_takes(outside):
  async def main(real):
    order = []

    async def tool(name):
      await asyncio.sleep(real[name])
      return name

    call = outside.wrap(tool, 1.0)

    async def use(name, start):
      await asyncio.sleep(start)
      order.append((await call(name), now()))

    await asyncio.gather(use('a', 0.0), use('b', 0.5), use('c', 0.25))
    return order

  expected = [('a', 1.0), ('c', 1.25), ('b', 1.5)]
  assert virtual(main({'a': 0.2, 'b': 0.0, 'c': 0.1})) == expected
  assert virtual(main({'a': 0.0, 'b': 0.2, 'c': 0.0})) == expected


def test_errors_and_cancellations_pass_through(outside):
  cancelled = threading.Event()

  async def broken():
    raise KeyError('tool')

  async def slow():
    try:
      await asyncio.sleep(60)
    finally:
      cancelled.set()

  async def main():
    with pytest.raises(KeyError, match='tool'):
      await outside.wrap(broken, 0.0)()
    task = asyncio.create_task(outside.wrap(slow, 10.0)())
    await asyncio.sleep(1.0)
    time.sleep(0.1)  # it has begun
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert cancelled.wait(5)

  virtual(main())


def test_work_overlaps_in_logical_time_and_is_waited_for_at_its_end():
  work = LogicalWork({'an update': 2.0, 'writing a checkpoint': 0.0}, patience_s=5.0)

  async def main():
    seen = []

    async def other():
      await asyncio.sleep(1.0)
      seen.append('meanwhile')

    task = asyncio.create_task(other())
    seen.append(await work('an update', lambda: time.sleep(0.1) or 'update'))
    assert now() == 2.0
    seen.append(await work('writing a checkpoint', lambda: 'saved'))
    assert now() == 2.0
    await task
    return seen

  assert virtual(main()) == ['meanwhile', 'update', 'saved']


def test_work_that_hangs_ends_the_run():
  gate = threading.Event()
  work = LogicalWork({'an update': 1.0}, patience_s=0.2)

  async def main():
    with pytest.raises(RunFailed, match=r'an update takes more than 0\.2 s'):
      await work('an update', gate.wait)
    with pytest.raises(ZeroDivisionError):
      await work('an update', lambda: 1 / 0)

  virtual(main())
  gate.set()
