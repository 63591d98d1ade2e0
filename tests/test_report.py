import errno
import io
import json
import math
import struct
import types

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from sao_jax.report import metrics, plot
from sao_jax.report.panel import Panel


def lines(path):
  return path.read_text().splitlines()


def events(workdir):
  """All TensorBoard events, file by file; the record format is length, crc, data, crc."""
  found = []
  for path in sorted((workdir / 'tensorboard').iterdir()):
    data = path.read_bytes()
    while data:
      (n,) = struct.unpack('<Q', data[:8])
      found.append(Event.FromString(data[12 : 12 + n]))
      data = data[16 + n :]
  return found


# Metrics.


def test_a_line_is_plain_json_with_readable_numbers(tmp_path):
  writer = metrics.MetricsWriter(tmp_path)
  row = {
    'time_s': np.float64(1234.56789),
    'reward/mean': np.float32(1 / 3),
    'critic/explained_variance': jnp.nan,
    'loss/policy': -math.inf,
    'policy/entropy': jnp.bfloat16(0.5),
    'tokens/sampled': np.int64(123456789),
    'compiles': 7,
    'eval/pass@1': None,
    'async/staleness_hist': np.array([3, 0, 1]),
    'shares': (0.25, math.nan),
  }
  writer.write(3, row)
  # Written at once, before any close.
  assert lines(tmp_path / 'metrics.jsonl') == [
    '{"step": 3, "time_s": 1234.57, "reward/mean": 0.333333, "critic/explained_variance": null, "loss/policy": null, '
    '"policy/entropy": 0.5, "tokens/sampled": 123456789, "compiles": 7, "eval/pass@1": null, '
    '"async/staleness_hist": [3, 0, 1], "shares": [0.25, null]}'
  ]
  writer.close()
  writer.close()
  (got,) = [e for e in events(tmp_path) if e.step == 3]
  scalars = {v.tag: v.simple_value for v in got.summary.value if not v.HasField('histo')}
  assert scalars.keys() == {'time_s', 'reward/mean', 'policy/entropy', 'tokens/sampled', 'compiles'}
  assert scalars['reward/mean'] == pytest.approx(1 / 3, abs=1e-6)
  (hist,) = [v.histo for v in got.summary.value if v.HasField('histo')]
  # Three tokens of staleness 0 and one of 2: sum 2, sum of squares 4.
  assert (hist.num, hist.sum, hist.sum_squares, list(hist.bucket)) == (4, 2, 4, [3, 0, 1])


def test_what_is_no_number_is_refused_by_name(tmp_path):
  writer = metrics.MetricsWriter(tmp_path)
  for bad in ('text', {'a': 1}, [1, 'b']):
    with pytest.raises(TypeError, match='reward/mean'):
      writer.write(1, {'reward/mean': bad})
  with pytest.raises(ValueError, match='step 2 written as those of step 1'):
    writer.write(1, {'step': 2})
  assert lines(tmp_path / 'metrics.jsonl') == []


def test_resume_cuts_what_came_after_the_checkpoint_and_keeps_it(tmp_path):
  writer = metrics.MetricsWriter(tmp_path)
  for step in (1, 2):
    writer.write(step, {'x': step})
  offset = writer.offset()
  assert offset == (tmp_path / 'metrics.jsonl').stat().st_size
  for step in (3, 4):
    writer.write(step, {'x': step})
  writer.close()
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 5, "x"')  # killed here

  with pytest.raises(FileExistsError, match='resume it or choose another workdir'):
    metrics.MetricsWriter(tmp_path)
  writer = metrics.MetricsWriter(tmp_path, resume_at=offset)
  writer.write(3, {'x': 30})
  writer.close()
  assert [r['x'] for r in metrics.read_metrics(tmp_path / 'metrics.jsonl')] == [1, 2, 30]
  lost = lines(tmp_path / 'metrics.lost.jsonl')
  assert lost == ['{"step": 3, "x": 3}', '{"step": 4, "x": 4}', '{"step": 5, "x"']
  # TensorBoard drops what it had from step 3 on when it meets the mark, and then reads the new step 3.
  seen = [(e.step, e.session_log.status) for e in events(tmp_path) if e.step]
  assert seen == [(1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (3, 0)]


def test_resume_without_a_checkpoint_starts_over(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, resume_at=0)
  writer.write(1, {})
  writer.close()
  metrics.MetricsWriter(tmp_path, resume_at=0).close()
  assert lines(tmp_path / 'metrics.jsonl') == []
  assert lines(tmp_path / 'metrics.lost.jsonl') == ['{"step": 1}']


def test_cut_tail_refuses_a_file_that_is_not_the_one_of_the_checkpoint(tmp_path):
  path, lost = tmp_path / 'log', tmp_path / 'lost'
  path.write_bytes(b'ab\ncd\n')
  for offset, message in ((7, 'has 6 bytes'), (4, 'inside a line'), (2, 'inside a line')):
    with pytest.raises(ValueError, match=message):
      metrics.cut_tail(path, offset, lost)
    assert path.read_bytes() == b'ab\ncd\n' and not lost.exists()
  assert metrics.cut_tail(path, 6, lost) == 0 and not lost.exists()
  assert metrics.cut_tail(path, 3, lost) == 3
  assert (path.read_bytes(), lost.read_bytes()) == (b'ab\n', b'cd\n')
  with pytest.raises(ValueError, match='has 0 bytes'):
    metrics.cut_tail(tmp_path / 'gone', 3, lost)
  assert metrics.cut_tail(tmp_path / 'gone', 0, lost) == 0 and (tmp_path / 'gone').exists()


class FullDisk:
  """Takes half of a line, then has no space."""

  def __init__(self, file):
    self._file, self._room = file, 10

  def __getattr__(self, name):
    return getattr(self._file, name)

  def write(self, data):
    if not self._room:
      raise OSError(errno.ENOSPC, 'No space left on device')
    n, self._room = self._file.write(data[: self._room]), 0
    return n


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path, monkeypatch):
  writer = metrics.MetricsWriter(tmp_path)
  writer.write(1, {'x': 1})
  with monkeypatch.context() as patch:
    patch.setattr(writer, '_file', FullDisk(writer._file))
    with pytest.raises(OSError, match=r'metrics of step 2 not written: No space.*metrics\.jsonl'):
      writer.write(2, {'x': 2})
  assert lines(tmp_path / 'metrics.jsonl') == ['{"step": 1, "x": 1}']
  writer.write(2, {'x': 2})
  assert len(metrics.read_metrics(tmp_path / 'metrics.jsonl')) == 2


def test_reading_forgives_the_last_line_only(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2, "x"')
  assert metrics.read_metrics(path) == [{'step': 1}]
  path.write_text('{"step": 1}\n{"step": 2, "x"\n{"step": 3}\n')
  with pytest.raises(ValueError, match='line 2 is not JSON'):
    metrics.read_metrics(path)
  path.write_text('[1]\n')
  with pytest.raises(ValueError, match='line 1 is not the metrics'):
    metrics.read_metrics(path)
  path.write_text('')
  assert metrics.read_metrics(path) == []


# Panel.


def make_panel(*, terminal, width=100):
  now = types.SimpleNamespace(s=0.0)
  out = io.StringIO()
  console = Console(file=out, force_terminal=terminal, width=width, highlight=False)
  return Panel(120, 'tools [x]', console=console, interval_s=5, clock=lambda: now.s), now, out


METRICS = {
  'reward/mean': 0.612,
  'eval/pass@1': 0.55,
  'async/staleness_mean': 1.44,
  'async/staleness_max': 4,
  'dis/kept': 0.9931,
  'idle/learner': 0.12,
  'idle/engine': 0.3,
  'tokens/sampled': 500,
}


def test_plain_lines_come_now_and_then_and_at_both_ends_of_a_phase():
  panel, now, out = make_panel(terminal=False)
  with panel:
    for step in range(1, 9):
      panel.update('rl', step, 120, METRICS if step == 1 else {'tokens/sampled': 500})
      now.s += 2
    panel.note('saved [1] ' + 'x' * 120)
    panel.update('evaluation', 1, 1, {})
  got = out.getvalue().splitlines()
  # Updates at 0, 2, ... 14 s: the first, those at 6 and 12 s (>= 5 s apart), and the last when the phase changes.
  assert [x.split('  ')[0] for x in got] == [
    'rl 1/120',
    'rl 4/120',
    'rl 7/120',
    'saved [1] ' + 'x' * 120,
    'rl 8/120',
    'evaluation 1/1',
  ]
  # 2 s an update: 119 left take 238 s when 1 is done, but one update alone has no pace. 500 tokens in 2 s.
  assert got[0] == (
    'rl 1/120  reward 0.61  heldout 0.55  staleness 1.4  kept 99.3%  idle learner 12%  idle engine 30%'
  )
  assert got[1].endswith('tokens/s 250  eta 3m52s')  # 116 left


def test_what_is_unknown_is_left_out_of_a_line_and_nothing_crashes():
  panel, _, out = make_panel(terminal=False)
  with panel:
    panel.update('rl', 1, 1, {'reward/mean': math.nan, 'dis/kept': None})
    panel.score({'eval/pass@1': 0.5})
    panel.update('evaluation', 1, 1, {'loss/supervised': 0.25})
    panel.update('next phase', 1, 1, {})
  assert out.getvalue().splitlines() == [
    'rl 1/1',
    'evaluation 1/1  loss 0.250  heldout 0.50',
    'next phase 1/1  heldout 0.50',  # of an earlier phase only the score still holds
  ]
  for terminal in (True, False):
    with make_panel(terminal=terminal)[0] as panel:
      panel.note('nothing happened')


@pytest.mark.parametrize('width', [80, 100, 30])
def test_live_panel_shows_all_and_notes_stay_above(width):
  panel, now, out = make_panel(terminal=True, width=width)
  with panel:
    for step in range(37):
      panel.update('rl', step + 1, 120, METRICS | {'reward/mean': step / 36})
      now.s += 3600 / 83
    panel.note('saved checkpoint [37]')
  text = out.getvalue()
  assert 'saved checkpoint [37]' in text
  if width >= 80:
    for part in (
      'tools [x]',
      '37/120',
      'eta 1h00m',
      '1.00  ',
      '▁',
      '█',
      '0.55 pass@1',
      '99.3%',
      '4 max',
      '30% engine',
    ):
      assert part in text, part


# Plots.


def write_run(folder, updates, seed=0, **constant):
  folder.mkdir()
  rng = np.random.default_rng(seed)
  rows = [{'step': 0, 'eval/pass@1': 0.3}] if updates else []
  for step in range(1, updates + 1):
    row = {
      'step': step,
      'time_s': 2.0 * step,
      'reward/mean': rng.random(),
      'dis/kept': 0.99,
      'dis/dropped_low': 0.01,
    }
    rows.append(
      row
      | {'dis/dropped_high': 0.0, 'critic/explained_variance': None, 'async/staleness_mean': 1}
      | constant
    )
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return folder


@pytest.mark.parametrize('updates', [0, 1, 2, 70])
def test_a_run_of_any_length_can_be_drawn(tmp_path, updates):
  path = plot.plot_run(write_run(tmp_path / 'run', updates))
  assert path == tmp_path / 'run' / 'curves.png'
  image = imread(path)
  assert image.shape[1] == 1200
  assert (image[..., :3].min(-1) < 0.5).any()


def test_summary_says_what_happened():
  rows = [
    {'step': 0, 'eval/pass@1': 0.25},
    {'step': 1, 'reward/mean': 1, 'time_s': 3725.0},
    {'step': 1, 'eval/pass@1': 0.5},
  ]
  expected = (
    '1 update in 1 h 2 min;  held-out pass@1 from 25.0% to 50.0%;  lines are moving averages'
  )
  assert plot._summary(rows) == expected


def test_moving_average_by_hand():
  # 60 points: 5 wide, 3 at the first point. A spike of 15 at index 2 is 15/3 at 0, 15/4 at 1, 15/5 from 2 to 4.
  values = np.zeros(60)
  values[2] = 15
  np.testing.assert_allclose(plot._smooth(values)[:6], [5, 3.75, 3, 3, 3, 0])
  np.testing.assert_array_equal(plot._smooth(np.arange(29.0)), np.arange(29.0))  # too few to smooth


def test_comparison_stops_where_the_first_run_stops(tmp_path):
  runs = [[{'step': s, 'a': v, 'b': 1} for s in range(1, n + 1)] for n, v in ((3, 1.0), (2, 4.0))]
  steps, low, mean, high = plot._band(runs, ('a', 'b'))
  np.testing.assert_array_equal([steps, low, mean, high], [[1, 2], [2, 2], [3.5, 3.5], [5, 5]])
  assert plot._band([[], [{'step': 1}]], ('a',))[0].size == 0
  named = {
    'sao': [write_run(tmp_path / f's{i}', 40, seed=i) for i in range(2)],
    'grpo': [write_run(tmp_path / 'g', 1) / 'metrics.jsonl'],
    'none': [],
  }
  path = plot.plot_comparison(named, tmp_path / 'all.png')
  assert imread(path).shape[1] == 1200
