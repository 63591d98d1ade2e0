"""Curves of a run, and of several runs side by side, as PNG files."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sao_jax.report.metrics import read_metrics

_BLUE, _ORANGE, _GREY, _INK = '#0072B2', '#D55E00', '#7A7A7A', '#222222'
_CYCLE = (_BLUE, _ORANGE, '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')  # Okabe and Ito
_DPI = 150  # 8 inches wide are 1200 pixels
_CHARACTER = 0.065  # inches of a label's character


def plot_run(workdir: Path) -> Path:
  """Draws WORKDIR/metrics.jsonl and returns the path of WORKDIR/curves.png.

  A metric that the run lacks leaves out its line; a panel without lines says that there is nothing yet.
  """
  workdir = Path(workdir)
  rows = read_metrics(workdir / 'metrics.jsonl')
  figure, grid = _figure(
    f'Training curves of {workdir.resolve().name}', _summary(rows), (1.7, 1, 1)
  )
  _plot_reward(figure.add_subplot(grid[0, :]), rows)
  kept = _series(rows, 'dis/kept')[1]
  dropped = 'Tokens dropped' + (f' (kept: {kept.mean():.2%})' if kept.size else '')
  panels = (
    (
      'Staleness of tokens, versions',
      {'async/staleness_max': 'max', 'async/staleness_mean': 'mean'},
    ),
    (dropped, {'dis/dropped_high': 'too high', 'dis/dropped_low': 'too low'}),
    ("Critic's explained variance", {'critic/explained_variance': ''}),
    ('Policy entropy, nats a token', {'policy/entropy': ''}),
    ('Tool calls an episode', {'tool/calls_mean': 'calls', 'tool/errors_mean': 'errors'}),
    ('Idle time', {'idle/engine': 'engine', 'idle/learner': 'learner'}),
  )
  for i, (title, named) in enumerate(panels):
    ax = figure.add_subplot(grid[1 + i // 3, 2 * (i % 3) : 2 * (i % 3) + 2])
    colors = (_ORANGE, _BLUE) if len(named) > 1 else (_BLUE,)
    lines = []
    for (key, label), color in zip(named.items(), colors, strict=True):
      steps, values = _series(rows, key)
      ax.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
      lines.append((label, color, steps, _smooth(values)))
    _draw(ax, title, lines, percent=title.startswith(('Tokens dropped', 'Idle')))
  return _write(figure, workdir / 'curves.png')


def plot_comparison(named: Mapping[str, Sequence[Path]], path: Path) -> Path:
  """Draws several variants, each the mean over its runs within the band from least to greatest.

  Args:
    named: name of the variant -> folders of its runs (one a seed), or their metrics.jsonl.
    path: the PNG file to write.

  Returns:
    `path`.
  """
  runs = {name: [read_metrics(_file(p)) for p in paths] for name, paths in named.items()}
  counts = {len(paths) for paths in named.values()}
  runs_each = f'{counts.pop()} runs each' if len(counts) == 1 else _counts(named)
  subtitle = f'moving averages; line: mean over runs; band: from least to greatest; {runs_each}'
  figure, grid = _figure('Variants compared', subtitle, (1.6, 1))
  panels = (
    (grid[0, :], 'Reward in training', ('reward/mean',)),
    (grid[1, :3], 'Tokens outside the trust interval', ('dis/dropped_low', 'dis/dropped_high')),
    (grid[1, 3:], 'Mean staleness of tokens, versions', ('async/staleness_mean',)),
  )
  for cell, title, keys in panels:
    ax = figure.add_subplot(cell)
    lines = []
    for i, (name, rows) in enumerate(runs.items()):
      steps, low, mean, high = _band(rows, keys)
      color = _CYCLE[i % len(_CYCLE)]
      ax.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
      lines.append((name, color, steps, mean))
    _draw(ax, title, lines, percent=title.startswith('Tokens'))
  return _write(figure, Path(path))


# Data.


def _file(path: Path) -> Path:
  path = Path(path)
  return path / 'metrics.jsonl' if path.is_dir() else path


def _series(rows: Sequence[Mapping[str, Any]], *keys: str) -> tuple[np.ndarray, np.ndarray]:
  """(steps, sum of the metrics) of the rows that have them all, in the order of steps."""
  points = [
    (row['step'], sum(row[k] for k in keys))
    for row in rows
    if all(row.get(k) is not None for k in keys)
  ]
  return tuple(np.asarray(sorted(points), np.float64).reshape(-1, 2).T)


def _smooth(values: np.ndarray) -> np.ndarray:
  """Centred moving average over a fifteenth of the points, shorter at the ends."""
  window = np.ones(2 * (len(values) // 30) + 1)
  if len(window) == 1:
    return values
  return np.convolve(values, window, 'same') / np.convolve(np.ones(len(values)), window, 'same')


def _counts(named: Mapping[str, Sequence[Path]]) -> str:
  return 'runs: ' + ', '.join(f'{len(paths)} of {name}' for name, paths in named.items())


def _band(
  runs: Sequence[Sequence[Mapping[str, Any]]], keys: Sequence[str]
) -> tuple[np.ndarray, ...]:
  """(steps, least, mean, greatest) of the smoothed runs, up to the last step that all of them reach."""
  series = [pair for rows in runs if (pair := _series(rows, *keys))[0].size]
  end = min((steps[-1] for steps, _ in series), default=0)
  at = {}
  for steps, values in series:
    for step, value in zip(steps, _smooth(values), strict=True):
      at.setdefault(step, []).append(value)
  steps = sorted(step for step in at if step <= end)
  return np.asarray(steps), *(np.asarray([f(at[s]) for s in steps]) for f in (min, np.mean, max))


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
  """One line: how many updates, how long, and what held-out evaluation said."""
  updates = len(_series(rows, 'reward/mean')[0])
  parts = [f'{updates} update{"s" * (updates != 1)}']
  seconds = _series(rows, 'time_s')[1]
  if seconds.size:
    parts[0] += f' in {_duration(seconds.max())}'
  scores = _series(rows, 'eval/pass@1')[1]
  if scores.size > 1:
    parts.append(f'held-out pass@1 from {scores[0]:.1%} to {scores[-1]:.1%}')
  return ';  '.join([*parts, 'lines are moving averages'])


def _duration(seconds: float) -> str:
  minutes, hours = int(seconds // 60), int(seconds // 3600)
  if hours:
    return f'{hours} h {minutes % 60} min'
  return f'{minutes} min {int(seconds % 60)} s' if minutes else f'{seconds:.0f} s'


# Drawing.


def _figure(title: str, subtitle: str, heights: Sequence[float]) -> tuple[Figure, GridSpec]:
  """A figure with a heading over a grid of 6 columns."""
  height = 1 + 2.15 * sum(heights)
  figure = Figure(figsize=(8, height), dpi=_DPI, facecolor='white')
  figure.text(
    0.065, 1 - 0.24 / height, title, fontsize=12.5, fontweight='bold', color=_INK, va='top'
  )
  figure.text(
    0.065, 1 - 0.5 / height, textwrap.fill(subtitle, 112), fontsize=8.5, color='#555555', va='top'
  )
  grid = figure.add_gridspec(
    len(heights),
    6,
    height_ratios=heights,
    left=0.065,
    right=0.98,
    top=1 - 1.05 / height,
    bottom=0.45 / height,
    hspace=0.42,
    wspace=1.0,
  )
  return figure, grid


def _plot_reward(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
  steps, rewards = _series(rows, 'reward/mean')
  at, scores = _series(rows, 'eval/pass@1')
  ax.plot(steps, rewards, color=_BLUE, alpha=0.25, linewidth=0.8)
  ax.plot(at, scores, 'o', color=_ORANGE, markersize=4.5, markeredgecolor='white', zorder=4)
  lines = [('training', _BLUE, steps, _smooth(rewards))]
  if scores.size > 1:
    lines.append(('held-out', _ORANGE, at, scores))
  if scores.size:
    ax.axhline(scores[0], color=_GREY, linewidth=1, linestyle=(0, (5, 4)), zorder=1)
    where = {
      'xycoords': ('axes fraction', 'data'),
      'textcoords': 'offset points',
      'xytext': (0, -3),
    }
    text = f'held-out before RL: {scores[0]:.2f}'
    ax.annotate(text, (0.995, scores[0]), **where, ha='right', va='top', color=_GREY, fontsize=7.5)
  _draw(ax, 'Reward in training, and pass@1 on held-out problems (points)', lines)


def _draw(ax: Axes, title: str, lines: Sequence[tuple], *, percent: bool = False) -> None:
  """Lines of (label, color, x, y) over updates, each labelled at its end in its own color."""
  ax.set_title(title, loc='left', fontsize=8.5, color=_INK, pad=9)
  ax.spines[['top', 'right', 'left']].set_visible(False)
  ax.spines['bottom'].set_color('#BBBBBB')
  ax.tick_params(length=0, labelsize=7.5, labelcolor='#555555')
  ax.set_xlabel('update', color='#555555', fontsize=7.5)
  lines = [line for line in lines if line[2].size]
  if not lines:
    ax.text(0.5, 0.5, 'nothing yet', transform=ax.transAxes, ha='center', color=_GREY, fontsize=8)
    ax.set_xticks([])
    ax.set_yticks([])
    return
  ax.grid(axis='y', color='#E6E6E6', linewidth=0.7)
  ax.set_axisbelow(True)
  ax.yaxis.set_major_locator(MaxNLocator(5))
  if percent:
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f'{100 * y:.3g}%'))
  for _, color, x, y in lines:
    ax.plot(x, y, color=color, linewidth=1.6, marker='o' if len(x) == 1 else None, markersize=4)
  _limits(ax, lines)
  _label(ax, lines)


def _limits(ax: Axes, lines: Sequence[tuple]) -> None:
  """Room for labels at the right; shares and counts start at 0, and a hopeless critic is cut at -1."""
  start, end = min(x[0] for _, _, x, _ in lines), max(x[-1] for _, _, x, _ in lines)
  inches = ax.get_position().width * ax.figure.get_figwidth()
  room = max(len(label) for label, *_ in lines) * _CHARACTER / inches
  span = max(end - start, 1) / (0.98 - room)
  ax.set_xlim(start - 0.01 * span, end + (room + 0.01) * span)
  ticks = MaxNLocator(2 + round(inches), integer=True).tick_values(start, max(end, start + 1))
  ax.set_xticks([tick for tick in ticks if start <= tick <= end])
  low, high = ax.get_ylim()
  if min(y.min() for *_, y in lines) >= 0:
    low = 0
  elif high > -1:
    low = max(low, -1)
  ax.set_ylim(low, high + 0.04 * (high - low))


def _label(ax: Axes, lines: Sequence[tuple]) -> None:
  """Labels beside the ends of the lines, pushed apart where they would overlap."""
  low, high = ax.get_ylim()
  inches = ax.get_position().height * ax.figure.get_figheight()
  gap = (high - low) * 0.14 / inches
  lines = sorted(lines, key=lambda line: line[3][-1])
  places = np.clip([y[-1] for *_, y in lines], low + gap / 2, high)
  for i in range(1, len(places)):
    places[i] = max(places[i], places[i - 1] + gap)
  places[-1] = min(places[-1], high)
  for i in range(len(places) - 1, 0, -1):
    places[i - 1] = min(places[i - 1], places[i] - gap)
  for (label, color, x, _), place in zip(lines, places, strict=True):
    offset = {'xytext': (4, 0), 'textcoords': 'offset points'}
    ax.annotate(label, (x[-1], place), **offset, va='center', color=color, fontsize=7.5)


def _write(figure: Figure, path: Path) -> Path:
  figure.savefig(path)
  return path
