"""What a run's log of events says, read in one pass: for the doctor."""

import array
import collections
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ENDS = ('trained', 'dropped', 'failed', 'cancelled')
_BEFORE = {'running': 'pending', 'finished': 'running', 'trained': 'finished'}
RESUMED = ('restart', 'rollback')  # reasons that are no failure of the episode
_COLUMNS = ('tokens', 'reward', 'finished_s', 'failed_s', 'ready_s', 'version', 'batch', 'used')


@dataclasses.dataclass
class Loss:
  """Events of one kind and reason. Times in seconds of the log."""

  first: float
  last: float = 0.0
  count: int = 0
  detail: str = ''  # the last one told
  prompts: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass
class Open:
  """An episode that has not ended."""

  row: int  # its place in the order of starting
  state: str
  since: float
  held: bool  # issued again after a failure


class History:
  """What a log says. Columns are [N], the started episodes in their order; NaN is unknown, or did not happen.

  tokens, reward; finished_s, failed_s: seconds from running to that end; ready_s: from finished to trained; version: of
  the policy at the start; batch: the update that used it (none for value pretraining); used: its place in the order of use.
  """

  def __init__(self):
    self.columns: dict[str, Any] = {name: array.array('d') for name in _COLUMNS}
    self.counts = collections.Counter()  # of events
    self.open: dict[str, Open] = {}
    self.seconds = collections.Counter()  # of episodes before they finished, by what they went into
    self.losses: dict[tuple[str, str], Loss] = {}  # (event, reason) ->
    self.set_aside = collections.Counter()  # events in the lines that resumes set aside
    self.restarts = 0  # those that left a trace
    self.trained_twice = 0
    self.quarantined = 0  # failures that put their prompt in quarantine
    self.impossible: list[str] = []  # transitions; the first few
    self.learning_since = 0.0  # the first event, or the end of value pretraining


def read_history(workdir: Path) -> History:
  """Reads events.jsonl and events.lost.jsonl line by line. A last line without its end is left out.

  Raises:
    ValueError: any other line of events.jsonl that is no event, by number.
  """
  history, trained, before = History(), array.array('q'), None
  for row in _events(Path(workdir) / 'events.jsonl'):
    if before is None:
      history.learning_since = row['t']
    _apply(history, row)
    if row['event'] == 'trained':
      trained.append(hash(row['episode']))  # 8 bytes an episode tell whether one comes again
    history.restarts += row['reason'] in RESUMED and before not in RESUMED
    before = row['reason'] or ''
  path, before = Path(workdir) / 'events.lost.jsonl', ''
  for row in _events(path, torn=True) if path.exists() else ():
    history.set_aside[row['event']] += 1
    history.restarts += row['reason'] in RESUMED and before not in RESUMED
    before = row['reason']
  history.trained_twice = len(trained) - len(set(trained))
  history.columns = {name: np.asarray(values) for name, values in history.columns.items()}
  return history


def _events(path: Path, torn: bool = False) -> Iterator[dict[str, Any]]:
  """The events of a log. `torn`: any line may be the half that a killed run left, an event of its own then."""
  with path.open('rb') as lines:
    for number, line in enumerate(lines, start=1):
      if not line.endswith(b'\n'):
        return
      try:
        row = json.loads(line)
        whole = row.keys() >= {'t', 'episode', 'prompt', 'event', 'reason', 'version'}
      except (ValueError, AttributeError):
        whole = False
      if not whole and not torn:
        raise ValueError(f'{path}, line {number} is no event of a run: {line[:60]!r}')
      yield row if whole else {'event': 'torn', 'reason': None}


def _apply(h: History, row: dict[str, Any]) -> None:
  """Books one event."""
  event, episode, t = row['event'], row['episode'], row['t']
  reason, _, detail = (row['reason'] or 'no reason').partition(':')
  h.counts[event] += 1
  if event == 'reissued' or event in ENDS[1:]:
    loss = h.losses.setdefault((event, reason), Loss(first=t))
    loss.last, loss.count = t, loss.count + 1
    loss.detail = detail.strip() or row.get('message') or loss.detail
    h.quarantined += bool(row.get('quarantine'))
    if event != 'cancelled':
      loss.prompts[row['prompt']] += 1
  now, starts = h.open.get(episode), event in ('pending', 'reissued')
  state = now.state if now else 'nothing'
  if starts == (now is not None) or state != _BEFORE.get(event, state):
    h.impossible += [f'{episode} {event} after {state}'] * (len(h.impossible) < 3)
  if starts:
    for values in h.columns.values():
      values.append(math.nan)
    held = event == 'reissued' and reason not in RESUMED
    h.open[episode] = Open(len(h.columns['used']) - 1, 'pending', t, held)
  elif now:
    for name, value in _settled(h, now, row, t - now.since).items():
      h.columns[name][now.row] = value
    now.state, now.since = event, t
    if event in ENDS:
      del h.open[episode]


def _settled(h: History, now: Open, row: dict[str, Any], spent: float) -> dict[str, float]:
  """Books the `spent` seconds of the state that an episode leaves, and gives the columns that are known now."""
  event = row['event']
  if now.state == 'pending':
    h.seconds['back-off' if now.held else 'pending'] += spent
    return {'version': row['version']} if event == 'running' else {}
  if event == 'finished':
    told = dict(row.get('seconds', {}))
    # What it waited for before it ran is in the pending time, under one name for all that failures cost.
    early = sum(told.pop(name) for name in list(told) if 'back-off' in name or 'breaker' in name)
    if early and not now.held:
      h.seconds.update({'pending': -early, 'back-off': early})
    h.seconds.update(told)
    h.seconds['other' if told else 'running'] += max(0.0, spent - sum(told.values()))
    return {'finished_s': spent, **{name: number(row.get(name)) for name in ('tokens', 'reward')}}
  if now.state == 'running':
    h.seconds['lost'] += spent
    return {'failed_s': spent} if event == 'failed' else {}
  if event != 'trained':
    return {}
  used = {'ready_s': spent, 'used': h.counts['trained']}
  if row['reason'] != 'value_pretraining':
    return {**used, 'batch': row['version']}
  h.learning_since = row['t']
  return used


def number(value: Any) -> float:
  """NaN for what is not known."""
  return math.nan if value is None else float(value)
