"""Does a rule of consumption or a discard of late episodes change what is trained? Writes bias.md and bias.png.

  python experiments/bench/bias.py [--output=docs] [--seeds=5]

All on the real runtime with a fake engine, in logical time; about 3.5 CPU minutes, on all cores.
The prose of bias.md is written by hand; only its tables are replaced.
"""

import concurrent.futures
import functools
import itertools
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simulate
from absl import flags
from matplotlib.figure import Figure

from sao_jax.engines import fake

LAWS = {  # of the tokens of an episode
  'log-normal': (fake.log_normal, {'median': 16, 'sigma': 1.0, 'cap': 200}),
  'Pareto 1.5': (fake.pareto, {'minimum': 8, 'shape': 1.5, 'cap': 200}),
  'bimodal': (fake.bimodal, {'short': 10, 'long': 100, 'share_long': 0.1}),
}
CAP = 200
POLICIES = {
  'oldest started first': {'consume': 'oldest_started', 'in_order': False, 'late': 'mask'},
  'completion order': {'consume': 'completion', 'in_order': False, 'late': 'mask'},
  'discard when late': {'consume': 'oldest_started', 'in_order': False, 'late': 'drop'},
  'strict order of starting': {'consume': 'oldest_started', 'in_order': True, 'late': 'mask'},
}
OLDEST, COMPLETION, DISCARD, STRICT = POLICIES
DEPTHS = (1, 4, 8)
DEPTH = 4  # at which all laws and policies are played; at the others the first law without the slow policy
BATCH = 24  # episodes an update
WARM_UP, WINDOW, STRICT_WINDOW = 6, 16, 8  # times depth + 1: updates before the window, and in it
TOOL_S = 4.0  # mean, exponential; a token takes 1 s
LOAD = 1.5  # an update takes so many times what the engine would need for a batch: the learner is the bottleneck
MIDDLE, SLOPE = 16.0, 1.5  # P(reward 1) = 1 / (1 + (MIDDLE / tokens)^SLOPE)

T_95 = (
  12.71,
  4.30,
  3.18,
  2.78,
  2.57,
  2.45,
  2.36,
  2.31,
  2.26,
)  # for 2, 3, ... seeds; above 10 the last
GROUPS = ('Q1', 'Q2', 'Q3', 'Q4', 'top 10 %')
BEGIN, END = '<!-- tables: bias.py -->', '<!-- end of tables -->'
COLORS = ('#0072B2', '#E69F00', '#D55E00', '#009E73')
RIGHT_OF = {'textcoords': 'offset points', 'fontsize': 7.5, 'color': '#555555'}


class Case(NamedTuple):
  """One run."""

  law: str
  depth: int
  policy: str
  seed: int
  batch: int
  first: int  # the window of updates
  last: int


class Measure(NamedTuple):
  """Of one run, in its window of updates. The groups are the four quarters by length and the longest tenth."""

  length: float  # trained mean / dispatched mean - 1
  reward: float
  coin: float  # the same for a reward that is independent of length: what chance alone does
  spread: float  # standard deviation of the batches' mean length / that of batches drawn from all that were dispatched
  staleness: np.ndarray  # [5] mean versions, of trained tokens
  dropped: np.ndarray  # [5] share of the episodes that ended
  wasted: float  # share of sampled tokens that were in dropped episodes
  masked: float  # share of trained episodes' tokens beyond the bound
  pace: float  # logical seconds between updates / seconds of an update
  batches: np.ndarray  # [updates] mean length of each / mean length of all started


@functools.cache
def usual_s(law: str) -> float:
  """Mean logical seconds of an episode."""
  make, numbers = LAWS[law]
  length = make(**numbers)
  return TOOL_S + float(np.mean([length(seed, 1) for seed in range(20_000)]))


def play(case: Case) -> Measure:
  make, numbers = LAWS[case.law]
  update_s = LOAD * usual_s(case.law) / case.depth
  with tempfile.TemporaryDirectory() as folder:
    run = simulate.simulate(
      Path(folder),
      seed=case.seed,
      updates=case.last,
      batch_size=case.batch,
      capacity=case.batch * (case.depth + 1),
      max_staleness=2 * case.depth,
      update_s=update_s,
      length=make(**numbers),
      cap=CAP,
      turns=1,
      tool_s=lambda random: random.expovariate(1 / TOOL_S),
      reward=lambda random, n: float(random.random() < 1 / (1 + (MIDDLE / n) ** SLOPE)),
      seconds_per_token=1.0,
      **POLICIES[case.policy],
    )
  return measure(run, first=case.first, last=case.last, update_s=update_s, seed=case.seed)


def measure(
  run: simulate.Simulation, *, first: int, last: int, update_s: float, seed: int
) -> Measure:
  """Dispatched: all that start while the version is in [first, last). Trained: used by updates in [first, last)."""
  inside = lambda versions: (versions >= first) & (versions < last)
  started, trained, dropped = inside(run.started), inside(run.trained), inside(run.dropped)
  coin = np.random.default_rng(seed).random(len(run.length)) < run.reward.mean()
  bias = lambda values: values[trained].mean() / values[started].mean() - 1
  updates = len(run.seconds)
  used = run.trained >= 0
  sums = np.bincount(run.trained[used], run.length[used], updates)
  means = sums / np.bincount(run.trained[used], minlength=updates)
  batch_size = trained.sum() / (last - first)
  ended = np.flatnonzero(trained | dropped)
  by_length = ended[np.argsort(run.length[ended], kind='stable')]
  edges = (0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1), (0.9, 1)
  groups = [by_length[round(a * len(ended)) : round(b * len(ended))] for a, b in edges]
  tokens, lost = run.length[trained].sum(), run.length[dropped].sum()
  return Measure(
    length=bias(run.length),
    reward=bias(run.reward),
    coin=bias(coin),
    spread=means[first:last].std() / (run.length[started].std() / math.sqrt(batch_size)),
    staleness=np.asarray([_weighted(run, group[trained[group]]) for group in groups]),
    dropped=np.asarray([dropped[group].mean() for group in groups]),
    wasted=lost / (lost + tokens),
    masked=run.late_tokens[trained].sum() / tokens,
    pace=np.diff(run.seconds)[first - 1 :].mean() / update_s,
    batches=means / run.length.mean(),
  )


def _weighted(run: simulate.Simulation, group: np.ndarray) -> float:
  """Mean staleness of the tokens of these episodes; NaN if there are none."""
  tokens = run.length[group].sum()
  return (run.staleness[group] * run.length[group]).sum() / tokens if tokens else math.nan


def play_all(cases: Sequence[Case]) -> dict[Case, Measure]:
  """On all cores."""
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
    return dict(zip(cases, pool.map(play, cases), strict=True))


def cases_of(seeds: int) -> list[Case]:
  cases = []
  for depth, law, policy in itertools.product(DEPTHS, LAWS, POLICIES):
    if depth == DEPTH or (law == next(iter(LAWS)) and policy != STRICT):
      first = WARM_UP * (depth + 1)
      last = first + (STRICT_WINDOW if policy == STRICT else WINDOW) * (depth + 1)
      cases += [Case(law, depth, policy, seed, BATCH, first, last) for seed in range(seeds)]
  return cases


# What is written.


def by_cell(results: dict[Case, Measure]) -> dict[tuple, Measure]:
  """(law, depth, policy) -> fields with the seeds as a first axis."""
  cells = {}
  for case, found in results.items():
    cells.setdefault((case.law, case.depth, case.policy), []).append(found)
  return {cell: Measure(*map(np.asarray, zip(*runs, strict=True))) for cell, runs in cells.items()}


def interval(values: np.ndarray) -> tuple[float, float]:
  """Mean over the seeds and the half-width of its 95 % interval, by Student's t."""
  n = len(values)
  return values.mean(), T_95[min(n - 2, len(T_95) - 1)] * values.std(ddof=1) / math.sqrt(n)


def transient(batches: np.ndarray) -> tuple[float, int, float]:
  """Of the mean over seeds: the first batch, the batch from which five reach 90 % on average, and batches that are missing."""
  mean = batches.mean(0)
  reached = np.convolve(mean, np.ones(5) / 5, 'valid') >= 0.9
  return mean[0], int(np.argmax(reached)) if reached.any() else len(mean), (1 - mean).sum()


def make_tables(results: dict[Case, Measure]) -> str:
  """Markdown."""
  share = lambda values: '{:+.1f} ± {:.1f} %'.format(*(100 * x for x in interval(values)))
  row = lambda *cells: '| ' + ' | '.join(cells) + ' |'
  steady = [
    row('law', 'depth', 'policy', 'length', 'reward', 'coin', 'spread', 'wasted', 'late', 'pace'),
    row('---', '--:', '---', *['--:'] * 7),
  ]
  start = [
    row('law', 'depth', 'policy', 'first batch', 'batches to 90 %', 'batches missing'),
    row('---', '--:', '---', *['--:'] * 3),
  ]
  ages = [row('law', 'depth', 'policy', *GROUPS), row('---', '--:', '---', *['--:'] * len(GROUPS))]
  for (law, depth, policy), found in by_cell(results).items():
    name = (law, str(depth), policy)
    wasted, late = (f'{100 * x.mean():.0f} %' for x in (found.wasted, found.masked))
    numbers = (f'{found.spread.mean():.2f}', wasted, late, f'{found.pace.mean():.2f}')
    steady.append(row(*name, *map(share, (found.length, found.reward, found.coin)), *numbers))
    if policy != DISCARD:  # its deficit has no end
      first, reached, missing = transient(found.batches[:, : WARM_UP * (depth + 1)])
      start.append(row(*name, f'{100 * first:.0f} %', str(reached), f'{missing:.1f}'))
    pairs = zip(found.staleness.mean(0), 100 * found.dropped.mean(0), strict=True)
    ages.append(row(*name, *(_age(*pair) for pair in pairs)))
  return '\n\n'.join('\n'.join(table) for table in (steady, start, ages))


def _age(staleness: float, dropped: float) -> str:
  age = '–' if math.isnan(staleness) else f'{staleness:.1f}'
  return f'{age} ({dropped:.0f} % lost)' if dropped else age


def replace_block(path: Path, tables: str) -> None:
  """Puts the tables between the marks of the file, whose prose stays; a file without marks is left with tables only."""
  old = path.read_text() if path.exists() else ''
  before, begin, rest = old.partition(BEGIN)
  after = rest.partition(END)[2] if begin else '\n'
  path.write_text(f'{before if begin else ""}{BEGIN}\n\n{tables}\n\n{END}{after}')


def draw(results: dict[Case, Measure], path: Path) -> None:
  """Three panels, at one depth."""
  figure = Figure(figsize=(8, 6.4), dpi=150, facecolor='white', layout='constrained')
  grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1), height_ratios=(1, 1.1))
  top, left, right = (figure.add_subplot(cell) for cell in (grid[0, :], grid[1, 0], grid[1, 1]))
  cells = by_cell(results)
  law = next(iter(LAWS))
  for i, (policy, color) in enumerate(zip(POLICIES, COLORS, strict=True)):
    found = cells[law, DEPTH, policy]
    smooth = np.convolve(found.batches.mean(0), np.ones(5) / 5, 'valid')
    top.plot(np.arange(len(smooth)) + 2, smooth, color=color, linewidth=1.6, label=policy)
    for field, marker, fill in (('length', 'o', color), ('reward', 's', 'white')):
      for j, name in enumerate(LAWS):
        middle, half = interval(getattr(cells[name, DEPTH, policy], field))
        at = j + 0.19 * (i - 1.5) + (0.06 if field == 'reward' else 0)
        style = {'marker': marker, 'color': color, 'markerfacecolor': fill, 'markersize': 5}
        left.errorbar(at, 100 * middle, 100 * half, elinewidth=1.2, **style)
    right.plot(GROUPS, found.staleness.mean(0), 'o-', color=color, markersize=4, linewidth=1.6)
  end = WARM_UP * (DEPTH + 1)
  top.axvspan(0, end, color='#EEEEEE', zorder=0)
  top.annotate('start-up, left out', (end, 0.06), xytext=(-4, 0), **RIGHT_OF, ha='right')
  top.set(xlim=(0, None), ylim=(0, 1.3), xlabel='update (moving mean of 5, mean over seeds)')
  top.legend(fontsize=7.5, ncols=4, loc='upper right', frameon=False)
  left.set_xticks(range(len(LAWS)), LAWS)
  bound = 2 * DEPTH
  right.axhline(bound, color='#7A7A7A', linewidth=1, linestyle=(0, (5, 4)))
  right.annotate('bound', (0, bound), xytext=(0, 3), **RIGHT_OF)
  right.set(ylim=(0, 1.15 * bound), xlabel='episodes by length')
  for ax, title in (
    (top, f'Mean length of a batch / of all that started ({law})'),
    (left, 'Trained against dispatched, % (● length, □ reward)'),
    (right, f'Staleness of trained tokens, versions ({law})'),
  ):
    ax.set_title(title, loc='left', fontsize=8.5)
    ax.axhline({top: 1, left: 0}.get(ax, 0), color='#7A7A7A', linewidth=0.8, zorder=1)
    ax.spines[['top', 'right']].set_visible(False)
    ax.tick_params(labelsize=7.5)
    ax.xaxis.label.set_size(7.5)
    ax.grid(axis='y', color='#E6E6E6', linewidth=0.7)
  figure.suptitle(
    f'What a rule of consumption trains on (depth {DEPTH})', fontsize=11, fontweight='bold'
  )
  figure.savefig(path)


def main(argv: Sequence[str]) -> None:
  import commands

  with commands.input_errors():
    values = commands.parse(argv, _define)
    output = Path(values.output)
    if not output.is_dir():
      raise ValueError(f'--output={output}: there is no such folder')
  results = play_all(cases_of(values.seeds))
  text, figure = output / 'bias.md', output / 'bias.png'
  replace_block(text, make_tables(results))
  draw(results, figure)
  print(f'{text}, {figure}')


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('output', 'docs', 'Folder of both files.', flag_values=values)
  flags.DEFINE_integer('seeds', 5, 'Runs a case.', lower_bound=2, flag_values=values)


if __name__ == '__main__':
  sys.path.append(str(Path(__file__).parents[1]))
  import commands

  commands.run(main)
