"""The progress of a run in the terminal: a live panel, or a plain line now and then where there is no terminal."""

import collections
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BARS = '▁▂▃▄▅▆▇█'
_SPARKS = 20  # characters of the sparkline
_WINDOW = 50  # updates over which the speed is measured


class Panel:
  """Shows where a run is. Use it as a context manager.

  In a terminal the panel is redrawn in place by rich; elsewhere one line is printed at the first and the last update
  of a phase and at most every `interval_s` between. A metric that is not known yet is shown as '-'.
  """

  def __init__(
    self,
    total_steps: int,
    title: str,
    *,
    console: Console | None = None,
    interval_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Args:
    total_steps: updates of the whole run, for the frame.
    title: what runs, for the frame.
    console: where to; None: standard output.
    interval_s: seconds between plain lines.
    clock: seconds; for the estimate of the time that is left, and for tokens per second.
    """
    self._console = console or Console(highlight=False)
    self._title = f'{title}  {total_steps} updates'
    self._interval_s, self._clock = interval_s, clock
    self._live = None
    self._phase, self._step, self._total = '', 0, 0
    self._metrics, self._rewards = {}, collections.deque(maxlen=_SPARKS)
    self._times = collections.deque(
      maxlen=_WINDOW
    )  # (time, step, tokens sampled since the one before)
    self._printed_at, self._unprinted = -math.inf, False

  def __enter__(self) -> 'Panel':
    if self._console.is_terminal:
      self._live = Live(self._render(), console=self._console, refresh_per_second=4)
      self._live.start()
    return self

  def __exit__(self, *unused: Any) -> None:
    self._print_last()
    if self._live:
      self._live.stop()
      self._live = None

  def update(self, phase: str, step: int, total: int, metrics: Mapping[str, Any]) -> None:
    """Step `step` of `total` of a phase is done. `metrics` may hold any part of those of a run."""
    if phase != self._phase:
      self._print_last()
      self._phase, self._printed_at = phase, -math.inf
      self._metrics = {k: v for k, v in self._metrics.items() if k.startswith('eval/')}
      self._rewards.clear()
      self._times.clear()
    self._step, self._total = step, total
    self._metrics.update(metrics)
    if _known(reward := metrics.get('reward/mean')):
      self._rewards.append(float(reward))
    now, tokens = self._clock(), metrics.get('tokens/sampled')
    self._times.append((now, step, float(tokens) if _known(tokens) else None))
    self._unprinted = True
    if self._live:  # drawn here, since rich's thread must not read what this one changes
      self._live.update(self._render())
    if step >= total or now - self._printed_at >= self._interval_s:
      self._print_last()

  def score(self, metrics: Mapping[str, Any]) -> None:
    """Metrics of an evaluation, which runs beside the phase; shown from now on."""
    self._metrics.update(metrics)

  def note(self, text: str) -> None:
    """One line that stays: a checkpoint, an evaluation, a warning."""
    self._console.print(Text(text), soft_wrap=True)

  def _print_last(self) -> None:
    """The newest state as a plain line, once."""
    if self._unprinted and not self._live:
      self._console.print(Text(self._line()), soft_wrap=True)
      self._printed_at = self._clock()
    self._unprinted = False

  def _line(self) -> str:
    """What is known, in one line."""
    show = self._show
    told = {
      'loss': show('loss/supervised', '{:.3f}'),
      'reward': show('reward/mean', '{:.2f}'),
      'explained variance': show('critic/explained_variance', '{:.2f}'),
      'heldout': show('eval/pass@1', '{:.2f}'),
      'tool use': show('tool/used_share', '{:.0%}'),
      'staleness': show('async/staleness_mean', '{:.1f}'),
      'kept': show('dis/kept', '{:.1%}'),
      'idle learner': show('idle/learner', '{:.0%}'),
      'idle engine': show('idle/engine', '{:.0%}'),
      'tokens/s': _or_dash(self._speed(), '{:.0f}'),
      'eta': self._eta(),
    }
    known = [f'{name} {value}' for name, value in told.items() if value != '-']
    return '  '.join([f'{self._phase} {self._step}/{self._total}', *known])

  def _render(self) -> Frame:
    """The live panel."""
    show = self._show
    progress = Table.grid(padding=(0, 2), expand=True)
    progress.add_column(no_wrap=True)
    progress.add_column(ratio=1)
    progress.add_column(no_wrap=True, justify='right')
    progress.add_row(
      Text(self._phase or 'starting', style='bold'),
      ProgressBar(total=max(self._total, 1), completed=self._step, complete_style='cyan'),
      f'{self._step}/{self._total}  eta {self._eta()}',
    )
    mean, top = show('async/staleness_mean', '{:.1f}'), show('async/staleness_max', '{:.0f}')
    learner, engine = show('idle/learner', '{:.0%}'), show('idle/engine', '{:.0%}')
    reward = f'{show("reward/mean", "{:.2f}")}  {_sparkline(self._rewards)}'
    quality = ('reward', reward)
    if 'loss/supervised' in self._metrics:
      quality = ('loss', show('loss/supervised', '{:.3f}'))
    rows = [
      (*quality, 'staleness', f'{mean} mean  {top} max'),
      ('held-out', show('eval/pass@1', '{:.2f} pass@1'), 'tokens kept', show('dis/kept', '{:.1%}')),
      (
        'tokens/s',
        _or_dash(self._speed(), '{:,.0f}'),
        'idle',
        f'{learner} learner  {engine} engine',
      ),
    ]
    numbers = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 5, None, 4):
      numbers.add_column(ratio=ratio, no_wrap=True)
    for left, a, right, b in rows:
      numbers.add_row(Text(left, style='dim'), Text(a), Text(right, style='dim'), Text(b))
    return Frame(
      Group(progress, Text(), numbers),
      title=Text(self._title),
      box=box.ROUNDED,
      width=min(self._console.width, 100),
    )

  def _show(self, name: str, form: str) -> str:
    return _or_dash(self._metrics.get(name), form)

  def _eta(self) -> str:
    """Time left at the pace of the last updates; the first update of a phase has no pace."""
    if not self._times or self._times[-1][1] <= self._times[0][1]:
      return '-'
    (start, first, _), (end, last, _) = self._times[0], self._times[-1]
    seconds = math.ceil((end - start) / (last - first) * max(self._total - last, 0))
    minutes, hours = seconds // 60, seconds // 3600
    if hours:
      return f'{hours}h{minutes % 60:02d}m'
    return f'{minutes}m{seconds % 60:02d}s' if minutes else f'{seconds}s'

  def _speed(self) -> float | None:
    """Tokens sampled a second; None before there are two updates that tell."""
    told = [(time, tokens) for time, _, tokens in self._times if tokens is not None]
    if len(told) < 2 or told[-1][0] <= told[0][0]:
      return None
    return sum(tokens for _, tokens in told[1:]) / (told[-1][0] - told[0][0])


def _known(value: Any) -> bool:
  return value is not None and math.isfinite(value)


def _or_dash(value: Any, form: str) -> str:
  return form.format(float(value)) if _known(value) else '-'


def _sparkline(values: collections.deque) -> str:
  """The values as bars between their least and their greatest."""
  if len(values) < 2:
    return ''
  low, high = min(values), max(values)
  scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
  return ''.join(_BARS[round((x - low) * scale)] for x in values)
