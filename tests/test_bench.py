"""The benchmarks of the runtime, in small."""

import dataclasses
import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from sao_jax.engines import fake

BENCH = Path(__file__).parents[1] / 'experiments' / 'bench'


@pytest.fixture
def bench(monkeypatch):
  """The files of the folder, as their own scripts import them."""
  monkeypatch.syspath_prepend(str(BENCH))
  modules = {name: importlib.import_module(name) for name in ('simulate', 'bias', 'scale')}
  for name in modules:
    monkeypatch.delitem(sys.modules, name)
  return modules


def small(bench, folder, **changes):
  numbers = {
    'seed': 0,
    'updates': 3,
    'batch_size': 2,
    'capacity': 4,
    'consume': 'oldest_started',
    'in_order': False,
    'late': 'mask',
    'max_staleness': 2,
    'update_s': 10.0,
    'length': fake.constant(4),
    'cap': 4,
    'turns': 2,
    'tool_s': lambda random: 1.0,
    'reward': lambda random, tokens: tokens / 8,
    'seconds_per_token': 0.5,
  }
  folder.mkdir()
  return bench['simulate'].simulate(folder, **{**numbers, **changes})


def test_simulation_by_hand(bench, tmp_path):
  # An episode: two turns of 4 tokens at half a second and a tool of 1 s each, so 6 s; it ends during the 10 s of an
  # update. Episodes 0 to 3 start at 0; at 6 the first update takes 0 and 1, at 16 the second takes 2 and 3.
  run = small(bench, tmp_path / 'a')
  np.testing.assert_array_equal(run.started, [0, 0, 0, 0, 1, 1, 2, 2, 3, 3])
  np.testing.assert_array_equal(run.trained, [0, 0, 1, 1, 2, 2, -1, -1, -1, -1])
  np.testing.assert_array_equal(run.length, [8] * 10)
  np.testing.assert_array_equal(run.reward, [1] * 10)
  np.testing.assert_array_equal(run.seconds, [6, 16, 26])
  # 4 and 5 start at 16, under the new version 1, and update 2 takes them.
  np.testing.assert_array_equal(run.staleness[:6], [0, 0, 1, 1, 1, 1])
  assert np.isnan(run.staleness[6:]).all()
  assert run.counts == {'started': 10, 'trained': 6, 'cancelled': 4}


def test_same_seed_same_run_and_length_whatever_the_policy(bench, tmp_path):
  law = fake.log_normal(median=8, sigma=1.0, cap=64)
  runs = [
    small(bench, tmp_path / name, length=law, cap=64, updates=8, consume=consume, seed=seed)
    for name, consume, seed in (
      ('a', 'completion', 1),
      ('b', 'completion', 1),
      ('c', 'oldest_started', 1),
      ('d', 'completion', 2),
    )
  ]
  first, again, other, reseeded = map(dataclasses.asdict, runs)
  for name in ('started', 'length', 'reward', 'trained', 'staleness', 'seconds'):
    np.testing.assert_array_equal(first[name], again[name])
  np.testing.assert_array_equal(first['length'], other['length'])
  assert (first['length'] != reseeded['length']).any()


def test_measures_by_hand(bench):
  # Updates 1 and 2 are the window: they train 1, 2, 3, 4 (lengths 1 3 2 2, mean 2). In it start 2 to 6, of lengths
  # 3 2 2 10 3, mean 4; 5 is dropped.
  nan = math.nan
  run = bench['simulate'].Simulation(
    started=np.asarray([0, 0, 1, 1, 2, 2, 2]),
    length=np.asarray([1, 1, 3, 2, 2, 10, 3]),
    reward=np.asarray([0, 1, 1, 0, 0, 1, 0.5]),
    trained=np.asarray([0, 1, 1, 2, 2, -1, -1]),
    dropped=np.asarray([-1, -1, -1, -1, -1, 2, -1]),
    staleness=np.asarray([0, 1, 0, 1, 2, nan, nan]),
    late_tokens=np.asarray([0, 0, 0, 0, 2, 0, 0]),
    seconds=np.asarray([0.0, 3.0, 6.0]),
    counts={},
  )
  found = bench['bias'].measure(run, first=1, last=3, update_s=2.0, seed=0)
  assert found.length == pytest.approx(2 / 4 - 1)
  assert found.reward == pytest.approx(0.5 / 0.5 - 1)
  assert found.wasted == pytest.approx(10 / 18)
  assert found.masked == pytest.approx(2 / 8)
  assert found.pace == pytest.approx(1.5)
  # Of the five that ended, by length: 1 | 2 | 2 3 | 10, cut at 1.25, 2.5 and 3.75; the longest tenth is the last.
  np.testing.assert_allclose(found.dropped, [0, 0, 0, 1, 1])
  np.testing.assert_allclose(found.staleness[:3], [1, 1, (2 * 2 + 0 * 3) / 5])
  np.testing.assert_allclose(found.batches * run.length.mean(), [1, 2, 2])


def test_oldest_first_is_unbiased_and_a_discard_is_not(bench):
  bias = bench['bias']
  case = lambda policy: bias.play(bias.Case('bimodal', 4, policy, 0, 8, 30, 90))
  oldest, discard = case(bias.OLDEST), case(bias.DISCARD)
  assert abs(oldest.length) < 0.1
  assert oldest.wasted == 0 and oldest.masked > 0
  assert discard.length < -0.3 and discard.reward < -0.05 and discard.wasted > 0.3
  assert discard.dropped[4] > 0.8 and discard.dropped[0] == 0


def test_the_tables_replace_only_themselves(bench, tmp_path):
  bias, path = bench['bias'], tmp_path / 'bias.md'
  path.write_text(f'why\n{bias.BEGIN}\nold\n{bias.END}\nwhat for\n')
  bias.replace_block(path, 'new')
  assert path.read_text() == f'why\n{bias.BEGIN}\n\nnew\n\n{bias.END}\nwhat for\n'


def test_cost_counts_every_event(bench):
  found = bench['scale'].cost(bench['scale'].on_nothing, 32, 640)
  # 640 episodes are trained, and the 32 + 64 that the system holds then are cancelled, after three events each.
  assert found.events == 4 * (640 + 32 + 64)
  assert 0 < found.cpu_us < 1e5
  assert found.late_mb < found.early_mb + 50
