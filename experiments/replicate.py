"""Runs variants x seeds of one config, one after the other, and compares them. Start it again to go on.

  python experiments/replicate.py --config=configs/beyondaime.py --variants=sao,grpo_dis,grpo --seeds=0,1,2
      [--warm_starts=RUN0,RUN1,RUN2] [--workdir=runs/replicate] [--config.section.field=value ...]

All variants of a seed share one warm start: that of the run that --warm_starts names for it, or of its first variant. Writes WORKDIR/table.md and WORKDIR/comparison.png.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import commands
import numpy as np
from absl import flags

LAST = 0.25  # of the updates, over which the table averages


def main(argv: Sequence[str]) -> None:
  from sao_jax.loop import Stopped
  from sao_jax.report.metrics import read_metrics
  from sao_jax.report.plot import plot_comparison
  from sao_jax.runtime.failures import RunFailed

  with commands.input_errors():
    values, _ = commands.parse_config(argv, _define)
    overrides = [a for a in argv if a.startswith('--config.')]
    for override in overrides:
      if '=' not in override:
        raise ValueError(f'{override}: write it as {override}=VALUE')
      if override.startswith(('--config.seed=', '--config.supervised.workdir=')):
        raise ValueError(f'{override}: seeds are --seeds, and the warm start is shared already')
    variants = [name for name in values.variants if name]
    seeds = [commands.number(text, '--seeds') for text in values.seeds]
    if not variants or not seeds:
      raise ValueError('--variants and --seeds must each name at least one')
    if values.warm_starts and len(values.warm_starts) != len(seeds):
      raise ValueError(f'--warm_starts names {len(values.warm_starts)} runs for {len(seeds)} seeds')
  root = Path(values.workdir)
  path = commands.config_path(values)
  named: dict[str, list[Path]] = {variant: [] for variant in variants}
  for index, seed in enumerate(seeds):
    warm = values.warm_starts[index] if values.warm_starts else None
    for variant in variants:
      workdir = root / f'{variant}-{seed}'
      command = [
        sys.executable,
        str(Path(__file__).with_name('run.py')),
        f'--config={path}:{variant}',
        f'--workdir={workdir}',
        f'--config.seed={seed}',
        *([f'--config.supervised.workdir={warm}'] if warm else []),
        *overrides,
      ]
      print(f'{variant}, seed {seed}: {workdir}', flush=True)
      code = _run(command)
      if code == commands.STOPPED:
        raise Stopped
      if code:
        raise RunFailed(f'{" ".join(command)} ended with exit code {code}')
      named[variant].append(workdir)
      warm = warm or workdir
  table = make_table(
    {name: [read_metrics(p / 'metrics.jsonl') for p in paths] for name, paths in named.items()}
  )
  (root / 'table.md').write_text(table)
  plot_comparison(named, root / 'comparison.png')
  print(table)
  print(f'{root / "table.md"}, {root / "comparison.png"}')


def _run(command: list[str]) -> int:
  """Exit code of a run, which gets our signals and the time to save."""
  process = subprocess.Popen(command, start_new_session=True)
  before = {
    number: signal.signal(number, lambda number, _: process.send_signal(number))
    for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    return process.wait()
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def make_table(runs: dict[str, list[list[dict]]]) -> str:
  """Markdown: for each variant the values of its seeds, averaged over the last quarter of the updates."""
  columns = {
    'training reward': ('reward/mean', '{:.3f}'),
    'staleness per token': ('async/staleness_mean', '{:.1f}'),
    'outside the interval': (('dis/dropped_low', 'dis/dropped_high'), '{:.2%}'),
    'entropy': ('policy/entropy', '{:.3f}'),
  }
  lines = [
    f'Mean over the last {LAST:.0%} of the updates; one number a seed, then the mean of the seeds.\n',
    '| variant | held-out pass@1, end | ' + ' | '.join(columns) + ' |',
    '|---|---|' + '---|' * len(columns),
  ]
  for variant, seeds in runs.items():
    final = [
      [r for r in rows if r.get('eval/pass@1') is not None][-1]['eval/pass@1'] for rows in seeds
    ]
    cells = [_cell(final, '{:.3f}')]
    for names, form in columns.values():
      names = (names,) if isinstance(names, str) else names
      cells.append(_cell([_late_mean(rows, names) for rows in seeds], form))
    lines.append(f'| {variant} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines) + '\n'


def _late_mean(rows: list[dict], names: tuple[str, ...]) -> float:
  updates = [row for row in rows if 'loss/policy' in row]
  late = updates[-max(1, round(LAST * len(updates))) :]
  return float(np.mean([sum(row[name] for name in names) for row in late]))


def _cell(values: Sequence[float], form: str) -> str:
  return ' '.join(form.format(v) for v in values) + f' (mean {form.format(np.mean(values))})'


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_list(
    'variants', ['sao', 'grpo_dis', 'grpo'], 'Of the config file.', flag_values=values
  )
  flags.DEFINE_list('seeds', ['0', '1', '2'], 'Whole numbers.', flag_values=values)
  flags.DEFINE_list('warm_starts', [], 'Workdirs of runs, one a seed.', flag_values=values)
  flags.DEFINE_string(
    'workdir', str(commands.RUNS / 'replicate'), 'Folder of the runs.', flag_values=values
  )


if __name__ == '__main__':
  commands.run(main)
