"""The comparison table of experiments/replicate.py, by hand."""

import importlib
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1] / 'experiments'


def test_table_by_hand(monkeypatch):
  monkeypatch.syspath_prepend(str(EXPERIMENTS))
  replicate = importlib.import_module('replicate')
  monkeypatch.delitem(sys.modules, 'replicate')

  def run(reward, score):
    update = {
      'loss/policy': 0.0,
      'async/staleness_mean': 2.0,
      'dis/dropped_low': 0.01,
      'dis/dropped_high': 0.02,
      'policy/entropy': 0.5,
    }
    # Eight updates: the last quarter is the last two, 0 and `reward` * 2, whose mean is `reward`.
    rewards = [9.0] * 6 + [0.0, 2 * reward]
    rows = [{**update, 'reward/mean': r} for r in rewards]
    return [{'eval/pass@1': 0.1}, *rows, {'eval/pass@1': score}, {'step': 8, 'value/other': 1}]

  table = replicate.make_table({'sao': [run(0.5, 0.8), run(0.75, 0.9)]})
  assert table.splitlines()[-1] == (
    '| sao | 0.800 0.900 (mean 0.850) | 0.500 0.750 (mean 0.625) | 2.0 2.0 (mean 2.0) '
    '| 3.00% 3.00% (mean 3.00%) | 0.500 0.500 (mean 0.500) |'
  )
