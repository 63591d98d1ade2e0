"""What the folder of a run tells in words: why the learner waited, what was lost, length bias, staleness.

Each section is a pure function that gives its lines, the verdict first.
"""

import collections
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sao_jax.report.history import ENDS, RESUMED, History, number, read_history
from sao_jax.report.metrics import read_metrics

Rows = Sequence[Mapping[str, Any]]
_FEW = 8  # episodes or updates under which a mean says nothing
_CONFIG = (
  'runtime.mode runtime.max_staleness runtime.pipeline_depth runtime.retries train.batch_size'
)
_DEEPER = 'more episodes out at a time (runtime.pipeline_depth, up to runtime.max_staleness)'
_SPENT = {  # what an episode spends its time on: how to say it, and what to do if it is most of the time
  'engine': ('with the engine', 'more episodes that decode together (engine.num_slots)'),
  'environment': ('with their tools', f'more calls at once (sandbox.num_workers), or {_DEEPER}'),
  'pending': ('waiting to start', 'more room in the engine (engine.num_slots)'),
  'back-off': ('held back after a failure', 'the failures, which are listed below'),
  'lost': ('on the way to an end without data', 'the losses, which are listed below'),
  'other': ('elsewhere', _DEEPER),
  'running': ('running (what they spent it on is not recorded)', _DEEPER),
}
_MEND = {  # why an episode is lost: where to look
  'infra': 'the engine, runtime.episode_timeout_s, and runtime.retries to ride through an outage',
  'env': 'sandbox.timeout_s, sandbox.memory_mb, sandbox.num_workers; then runtime.retries',
  'grader': 'env.grader_timeout_s; then runtime.retries',
  'data': 'the prompts named here: mend them or take them out of data.path',
  'agent': 'env.max_turn_tokens and env.max_tokens, if a budget cuts these episodes',
  'stale': 'a lower runtime.pipeline_depth or a higher runtime.max_staleness',
  'bug': 'the traceback of the run, which is an error of the program',
  'group_incomplete': 'runtime.retries, and what failed in the same groups',
}


class _Apart(NamedTuple):
  """The difference of two means, and its standard error."""

  mean: float
  error: float

  @property
  def clear(self) -> bool:
    """Beyond three standard errors, as several comparisons are made."""
    return abs(self.mean) > 3 * self.error

  def __str__(self) -> str:
    if math.isnan(self.mean):
      return 'too few, or too much alike, to tell'
    return f'{self.mean:+.3g} (standard error {self.error:.2g})'


_UNKNOWN = _Apart(math.nan, math.nan)


def conservation(h: History) -> list[str]:
  """Whether the log accounts for every episode."""
  started = h.counts['pending'] + h.counts['reissued']
  total = sum(h.counts[end] for end in ENDS) + len(h.open)
  bugs = [f'{text} is impossible' for text in h.impossible]
  if started != total:
    bugs.append(f'{started:,} started, and {total:,} ended or are open')
  if h.trained_twice:
    bugs.append(f'{h.trained_twice:,} episodes were trained on twice')
  figures = ' + '.join(f'{h.counts[end]:,} {end}' for end in ENDS)
  states = collections.Counter(episode.state for episode in h.open.values())
  return [
    f'BUG: {"; ".join(bugs)}. Please report it with events.jsonl.'
    if bugs
    else 'Every episode is accounted for, and none was trained on twice.',
    f'{started:,} started = {figures} + {len(h.open):,} open.',
    *[f'Open now: {", ".join(f"{n:,} {state}" for state, n in states.items())}.'] * bool(states),
  ]


def waiting(h: History, metrics: Rows, config: Mapping[str, Any]) -> list[str]:
  """Why the learner waited, and which side is the bottleneck."""
  rows = [row for row in metrics if row.get('idle/learner') is not None and 'time_s' in row]
  if not rows:
    return ['Whether the learner waited cannot be told: there is no update yet.', *_flight(h)]
  ends = _column(rows, 'time_s')
  spans = np.maximum(np.diff(ends, prepend=min(h.learning_since, ends[0])), 1e-9)
  waits = _column(rows, 'idle/learner')
  idle, engine_idle = _mean(waits, spans), _mean(_column(rows, 'idle/engine'), spans)
  cause = max(h.seconds, key=h.seconds.get, default='other')
  where, remedy = _SPENT.get(cause, (f'in {cause}', f'less time in {cause}'))
  synchronous = config['runtime']['mode'] == 'sync'
  if idle < 0.1:
    why = 'it is the bottleneck'
    remedy = 'nothing here: the update itself is what takes time'
    if config['runtime']['pipeline_depth'] > 1 and not synchronous:
      remedy = 'a lower runtime.pipeline_depth, for fresher weights, while this share stays low'
  elif synchronous:
    why = 'each time for the slowest of a whole batch (sync mode)'
    remedy = "runtime.mode='async': episodes then go on while the learner works"
  else:
    why = f'mostly for episodes that were {where}'
    if cause == 'engine' and engine_idle > 0.5:
      remedy = f'{_DEEPER}: the engine has room'
  lines = [
    f'The learner waited {_pct(idle)} of the time: {why}.',
    f'The engine was idle {_pct(engine_idle)} of the time; {_busier(idle, engine_idle)}.',
    _worst(rows, waits, spans),
    *_flight(h),
  ]
  return [*lines, *[_slowest(h)] * synchronous, f'Try: {remedy}.']


def _busier(idle: float, engine_idle: float) -> str:
  if math.isnan(engine_idle):
    return 'which side is the bottleneck cannot be told'
  if min(idle, engine_idle) > 0.5:
    return 'neither side is the bottleneck, episodes spend their time elsewhere'
  return f'the {"learner" if idle < engine_idle else "engine"} is the busier side'


def _worst(rows: Rows, waits: np.ndarray, spans: np.ndarray) -> str:
  """The stretch of a tenth of the updates in which the learner waited most."""
  width = max(1, len(rows) // 10)
  waited, passed = (np.cumsum([0, *values]) for values in (waits * spans, spans))
  shares = (waited[width:] - waited[:-width]) / (passed[width:] - passed[:-width])
  first = int(shares.argmax())
  steps = f'{rows[first]["step"]} to {rows[first + width - 1]["step"]}'
  return f'Worst stretch: updates {steps}, {_pct(shares[first])} of the time.'


def _flight(h: History) -> list[str]:
  """What episodes spent their time on, and how long they took."""
  total, took = sum(h.seconds.values()), _known(h.columns['finished_s'])
  if not total or not len(took):
    return ['What episodes spend their time on cannot be told: none has finished.']
  shares = [
    f'{_pct(s / total)} {_SPENT[name][0] if name in _SPENT else name}'
    for name, s in h.seconds.most_common()
    if s / total > 0.0005
  ]
  p50, p95 = np.quantile(took, (0.5, 0.95))
  lines = [
    f'The time of episodes until they finished: {", ".join(shares)}.',
    f'They ran {p50:.3g} s (median), {p95:.3g} s (95 %), {took.max():.3g} s (longest).',
  ]
  if len(ready := _known(h.columns['ready_s'])):
    lines.append(f'Then they waited for the learner, its update included: {ready.mean():.3g} s.')
  return lines


def _slowest(h: History) -> str:
  """In sync mode: how long a batch waits for its slowest episode."""
  order = np.argsort(h.columns['batch'])[: len(_known(h.columns['batch']))]
  took, batch = h.columns['finished_s'][order], h.columns['batch'][order]
  if not len(order):
    return 'How long a batch waits for its slowest episode cannot be told: none is complete.'
  batches = np.split(took, np.flatnonzero(np.diff(batch)) + 1)
  ratio = np.mean([times.max() / max(times.mean(), 1e-9) for times in batches])
  return f'The slowest episode of a batch ran {ratio:.2f} times as long as the mean of its batch.'


def losses(h: History, metrics: Rows, config: Mapping[str, Any]) -> list[str]:
  """What was dropped, failed, cancelled and issued again, and why."""
  started = max(1, h.counts['pending'] + h.counts['reissued'])
  table = sorted(h.losses.items(), key=lambda item: -item[1].count)
  bad = [(reason, loss.count) for (event, reason), loss in table if event in ('failed', 'dropped')]
  lines = ['Nothing failed and nothing was dropped.']
  if bad:
    amount = sum(count for _, count in bad)
    lines = [
      f'{amount:,} of {started:,} episodes ({_pct(amount / started)}) failed or were dropped, '
      f'most for {bad[0][0]} ({bad[0][1]:,}).'
    ]
  for (event, reason), loss in table:
    worst = ', '.join(f'{prompt} ({n})' for prompt, n in loss.prompts.most_common(2))
    span = f'{loss.count:>8,}  from {loss.first:,.1f} to {loss.last:,.1f} s'
    more = f'; most: {worst}' * bool(worst) + f'; last: {loss.detail[:80]}' * bool(loss.detail)
    lines.append(f'  {event:<10}{reason:<17}{span}{more}')
  if h.counts['failed']:
    again = sum(
      loss.count for (event, reason), loss in table if event == 'reissued' and reason not in RESUMED
    )
    budget = config['runtime']['retries']
    if isinstance(budget, Mapping):
      budget = ', '.join(f'{kind} {number}' for kind, number in budget.items())
    lines.append(
      f'Failures tried again: {again:,} of {h.counts["failed"]:,} (runtime.retries: {budget}); '
      f'{h.quarantined:,} put their prompt in quarantine.'
    )
  undone = h.set_aside['trained']
  lines.append(
    f'Restarts that left a trace: {h.restarts}. Lines that they set aside: {h.set_aside.total():,}'
    + f', among them {undone:,} of episodes whose training is undone.' * bool(undone)
  )
  return lines + [f'Try: {_MEND.get(reason, "what the log says")}.' for reason, _ in bad[:1]]


def bias(h: History, metrics: Rows, config: Mapping[str, Any]) -> list[str]:
  """Whether long episodes are trained on less, or later, than short ones."""
  tokens, reward = h.columns['tokens'], h.columns['reward']
  known, used = ~np.isnan(tokens), ~np.isnan(h.columns['used'])
  if not h.counts['finished']:
    return ['Whether lengths are biased cannot be told: no episode has finished.']
  if not known.any():
    return ['Whether lengths are biased cannot be told: an older log, without lengths.'] + [
      _by_update(metrics, 'length/trained', 'length/dispatched'),
      _by_update(metrics, 'reward/mean', 'reward/dispatched_mean'),
    ]
  found, lines = [], []
  for name, values in (('length', tokens), ('reward', reward)):
    apart = _apart(values[known & used], values[known & ~used])
    found += [f'trained and unused episodes differ in {name}'] * apart.clear
    lines.append(
      f'Mean {name}: {_average(values[known & used])} of trained, {_average(values[known])} of all '
      f'finished episodes; trained minus finished but unused: {apart}.'
    )
  ran, failed = (_known(h.columns[name]) for name in ('finished_s', 'failed_s'))
  longer = _apart(failed, ran)
  found += ['episodes that fail run longer than those that finish'] * (
    longer.clear and longer.mean > 0
  )
  lines.append(
    f'Of {len(tokens):,} started episodes {int((~known).sum()):,} have no known length. Seconds run by those that '
    f'failed minus those that finished: {longer}.'
  )
  late = _lateness(tokens, h.columns['used'], known & ~np.isnan(h.columns['batch']))
  depth, batch = config['runtime']['pipeline_depth'] + 1, h.columns['batch']
  size = config['train']['batch_size']
  # Less than a batch on average changes no version: it can be clear in a long log, and is no matter.
  found += ['long episodes are used later than short ones'] * (late.clear and late.mean > size)
  start_up = _apart(tokens[known & (batch <= depth)], tokens[known & (batch > depth)])
  lines += [
    f'Places that the longest quarter is used later than the shortest: {late}; a batch has {size}.',
    f'Length in the first {depth} batches minus the rest (learning changes it too): {start_up}.',
    f'Correlation of length and reward: {_correlation(tokens[known], reward[known])}.',
  ]
  if found:
    verdict = f'Lengths are biased: {"; ".join(found)}.'
    order = "runtime.consume='oldest_started'; " * (
      config['runtime'].get('consume') == 'completion'
    )
    lines.append(
      f'Try: {order}a runtime.pipeline_depth at which the longest episodes are done when their turn comes (weights '
      "are staler then), or runtime.mode='sync'; a longer runtime.episode_timeout_s if it is what ends them."
    )
  elif int((known & used).sum()) >= 4 * _FEW:
    verdict = 'No bias of lengths is seen beyond chance (three standard errors).'
  else:
    verdict = 'Too few episodes were trained on to tell whether lengths are biased.'
  return [verdict, *lines]


def _by_update(metrics: Rows, trained: str, finished: str) -> str:
  """The difference of two metrics over the updates, for logs that do not tell of single episodes."""
  apart = _known(_column(metrics, trained) - _column(metrics, finished))
  told = (
    _Apart(apart.mean(), apart.std(ddof=1) / len(apart) ** 0.5) if len(apart) >= _FEW else _UNKNOWN
  )
  return f'{trained} minus {finished}, mean over {len(apart)} updates: {told}.'


def _lateness(tokens: np.ndarray, used: np.ndarray, learned: np.ndarray) -> _Apart:
  """Order of use minus order of starting: the longest quarter of episodes minus the shortest."""
  tokens, used = tokens[learned], used[learned]
  later = used.argsort().argsort() - np.arange(len(used))
  low, high = np.quantile(tokens, (0.25, 0.75)) if len(tokens) else (0, 0)
  return _apart(later[tokens >= high], later[tokens <= low]) if low < high else _UNKNOWN


def _correlation(x: np.ndarray, y: np.ndarray) -> str:
  if len(x) < _FEW or not x.std() or not y.std():
    return 'undefined (too few episodes, or one of the two is constant)'
  r = np.corrcoef(x, y)[0, 1]
  return f'{r:+.2f} (standard error {(1 - r * r) / math.sqrt(len(x)):.2f})'


def staleness(h: History, metrics: Rows, config: Mapping[str, Any]) -> list[str]:
  """How old the weights were that sampled what was trained on, and what that cost."""
  rows = [row for row in metrics if row.get('async/staleness_mean') is not None]
  if not rows:
    return ['Whether weights were stale cannot be told: there is no update yet.']
  bound = config['runtime']['max_staleness']
  tokens = np.asarray([row.get('tokens/trained') or 1 for row in rows], float)
  age, masks = _column(rows, 'async/staleness_mean'), _column(rows, 'async/masked_stale')
  low, high = _column(rows, 'dis/dropped_low'), _column(rows, 'dis/dropped_high')
  mean, masked, dropped = (_mean(values, tokens) for values in (age, masks, low + high))
  lines = [
    f'Tokens were {mean:.2f} versions old on average, {np.max(_column(rows, "async/staleness_max")):.0f} at most; '
    f'{_pct(masked)} were masked as over runtime.max_staleness={bound}.',
    f'Tokens by age in versions: {_ages(rows)}.',
    f'Outside the trust interval: {_pct(dropped)} of action tokens ({_pct(_mean(low, tokens))} below, '
    f'{_pct(_mean(high, tokens))} above).',
  ]
  # The update that makes version n runs on version n - 1.
  if len(lag := _known(h.columns['batch'] - 1 - h.columns['version'])):
    p95 = np.quantile(lag, 0.95)
    lines.append(
      f'Versions from the start of an episode to its use: {lag.mean():.2f} on average, {p95:.0f} (95 %), '
      f'{lag.max():.0f} at most.'
    )
  troubles = [f'{_pct(masked)} of the tokens were too old to train on'] * (masked > 0.01)
  troubles += [f'{_pct(dropped)} were outside the trust interval'] * (dropped > 0.05)
  quarter = slice(len(rows) // 4), slice(-(len(rows) // 4), None)
  for name, values, least in (('the age', age, 0.5), ('the share outside', low + high, 0.01)):
    if len(rows) < _FEW:
      lines.append(f'Trend of {name}: too few updates.')
      continue
    first, last = (_mean(values[part], tokens[part]) for part in quarter)
    troubles += [f'{name} grew'] * (last > 1.5 * first and last - first > least)
    lines.append(f'Trend of {name}, first to last quarter of updates: {first:.3g} to {last:.3g}.')
  if not troubles:
    return [f'Weights were fresh enough: {mean:.2f} versions old, bound {bound}.', *lines]
  remedy = 'a lower runtime.pipeline_depth, or a lower policy.learning_rate: versions differ less'
  if masked > 0.01:
    remedy = 'a lower runtime.pipeline_depth, or a higher runtime.max_staleness to train on them'
  elif dropped > 0.05 and mean < 0.5:
    remedy = 'a look at mismatch/k3: engine and learner disagree on tokens as fresh as these'
  return [f'Weights were stale: {"; ".join(troubles)}.', *lines, f'Try: {remedy}.']


def _ages(rows: Rows) -> str:
  """Shares of the histograms, summed over the updates; the last bin holds everything older."""
  counts = [row['async/staleness_hist'] for row in rows if row.get('async/staleness_hist')]
  if not counts:
    return 'not recorded'
  width = max(map(len, counts))
  total = np.sum([np.pad(c, (0, width - len(c))) for c in counts], axis=0)
  return ', '.join(f'{age}: {_pct(n / total.sum())}' for age, n in enumerate(total) if n)


def diagnose(workdir: Path) -> str:
  """The report on the run in a folder, under way or over.

  Raises:
    ValueError: the folder holds no run, or a file in it is damaged.
  """
  workdir = Path(workdir)
  file = workdir / 'config.json'
  if not file.exists():
    raise ValueError(f'{workdir} holds no run: there is no config.json in it')
  config = json.loads(file.read_text())
  for section, name in (field.split('.') for field in _CONFIG.split()):
    if name not in config.get(section, {}):
      raise ValueError(f'{file} has no {section}.{name}: it is not the config of a run')
  if not (workdir / 'events.jsonl').exists():
    return f'No episode has started in {workdir} yet: there is nothing to tell.'
  history, file = read_history(workdir), workdir / 'metrics.jsonl'
  metrics = read_metrics(file) if file.exists() else []
  sections = {
    'Episodes': conservation(history),
    'Why the learner waited': waiting(history, metrics, config),
    'What was lost': losses(history, metrics, config),
    'Length bias': bias(history, metrics, config),
    'Staleness': staleness(history, metrics, config),
  }
  # The lines of a table are indented, and stay as they are.
  fill = lambda line: line if line.startswith('  ') else textwrap.fill(line, 100)
  texts = ('\n'.join([f'## {title}', *map(fill, lines)]) for title, lines in sections.items())
  return '\n\n'.join(texts)


def _apart(a: np.ndarray, b: np.ndarray) -> _Apart:
  if min(len(a), len(b)) < _FEW:
    return _UNKNOWN
  variance = a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)
  return _Apart(float(a.mean() - b.mean()), math.sqrt(variance))


def _known(values: np.ndarray) -> np.ndarray:
  return values[~np.isnan(values)]


def _column(rows: Rows, name: str) -> np.ndarray:
  """One metric of all rows; NaN where a row has none."""
  return np.asarray([number(row.get(name)) for row in rows], float)


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
  """Weighted mean of what is known; NaN if nothing is."""
  known = ~np.isnan(values)
  return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan


def _average(values: np.ndarray) -> str:
  return f'{values.mean():.4g}' if len(values) else 'none'


def _pct(share: float) -> str:
  if math.isnan(share):
    return 'an unknown share'
  return f'{100 * share:.0f} %' if share >= 0.0995 or not share else f'{100 * share:.1f} %'
