"""What asynchrony buys when tools are slow: the same code in `sync` and in `async` mode, on the real clock.

  python experiments/bench/speed.py --config=configs/beyondaime.py --warm_starts=runs/seed0,runs/seed1,runs/seed2 [--updates=60]
      [--latency_s=0.1] [--target=0.75] [--workdir=runs/speed]

Each tool call takes latency_s * Pareto(1.5) seconds longer, the same for the same program in both modes. One run a mode and
seed, one after the other; leave the machine alone meanwhile. Held-out scores are taken from the checkpoints afterwards, so that
they cost neither mode anything. Start it again to go on. Writes WORKDIR/table.md.
"""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'experiments'))
import commands  # noqa: E402

MODES = ('sync', 'async')
SAVE_EVERY = 5  # updates between the checkpoints that are scored


class Speed(NamedTuple):
  """One run."""

  seconds: float  # from the first update to the last
  to_target: (
    float  # from the first update to the checkpoint that reaches the target; NaN: none does
  )
  idle_learner: float  # means over updates
  idle_engine: float
  staleness: float
  scores: dict[int, float]  # held-out pass@1 of the checkpoints that were scored


def main(argv: Sequence[str]) -> None:
  from sao_jax.runtime.failures import RunFailed

  with commands.input_errors():
    values, _ = commands.parse_config(argv, _define)
    if not values.warm_starts:
      raise ValueError('--warm_starts must name one run a seed')
  results: dict[str, list[Speed]] = {mode: [] for mode in MODES}
  for seed, warm in enumerate(values.warm_starts):
    for mode in MODES:
      workdir = Path(values.workdir) / f'{mode}-{seed}'
      command = [
        sys.executable,
        str(ROOT / 'experiments' / 'run.py'),
        f'--config={commands.config_path(values)}',
        f'--workdir={workdir}',
        f'--config.seed={seed}',
        f'--config.supervised.workdir={warm}',
        f'--config.sandbox.latency_s={values.latency_s}',
        '--config.sandbox.num_workers=2',
        f'--config.runtime.mode={mode}',
        '--config.runtime.pipeline_depth=2',
        f'--config.train.num_steps={values.updates}',
        f'--config.train.save_every={SAVE_EVERY}',
        '--config.train.keep=1000',
        '--config.evaluation.every=1000000',
      ]
      print(f'{mode}, seed {seed}: {workdir}', flush=True)
      if subprocess.run(command, check=False).returncode:
        raise RunFailed(f'{" ".join(command)} failed')
      results[mode].append(measure(workdir, values.target))
      print(results[mode][-1], flush=True)
  text = table(results, values.target, values.updates)
  (Path(values.workdir) / 'table.md').write_text(text)
  print(text)


def measure(workdir: Path, target: float) -> Speed:
  """Times from metrics.jsonl; scores from the checkpoints, in order, up to the first that reaches the target."""
  from sao_jax.report.metrics import read_metrics

  rows = [row for row in read_metrics(workdir / 'metrics.jsonl') if 'loss/policy' in row]
  times = {row['step']: row['time_s'] - rows[0]['time_s'] for row in rows}
  scores = score(workdir, target)
  reached = [step for step, value in scores.items() if value >= target]
  return Speed(
    seconds=times[rows[-1]['step']],
    to_target=times[reached[0]] if reached else float('nan'),
    idle_learner=float(np.mean([row['idle/learner'] for row in rows[1:]])),
    idle_engine=float(np.mean([row['idle/engine'] for row in rows[1:]])),
    staleness=float(np.mean([row['async/staleness_mean'] for row in rows])),
    scores=scores,
  )


def score(workdir: Path, target: float) -> dict[int, float]:
  """Held-out pass@1 by update, without the tools' latency."""
  from sao_jax import build, checkpoint, scoring
  from sao_jax import workdir as run_workdir

  config = run_workdir.saved_config(workdir)
  config.sandbox.latency_s = 0.0
  parts = build.parts(config)
  steps = [step for step in checkpoint.steps(workdir / 'checkpoints' / 'rl') if step]

  async def all_of_them() -> dict[int, float]:
    params, _ = run_workdir.saved_policy(parts, workdir, steps[0])
    scores = {}
    async with scoring.serving(parts, params, build.make_sandbox(config)) as services:
      for step in steps:
        params, _ = run_workdir.saved_policy(parts, workdir, step)
        services.evaluation_engine.load(params, step)
        name = f'eval-{step}'
        result = await scoring.score(parts, services, parts.heldout, name=name, samples=1)
        scores[step] = result.pass_at_1
        if result.pass_at_1 >= target:
          break
    return scores

  return asyncio.run(all_of_them())


def table(results: dict[str, list[Speed]], target: float, updates: int) -> str:
  """Markdown: one number a seed."""
  show = lambda form, numbers: ' '.join(form.format(x) for x in numbers)
  lines = [
    f'| mode | s to {updates} updates | s to held-out pass@1 {target} | learner idle | engine idle | staleness |',
    '|---|---|---|---|---|---|',
  ]
  for mode, runs in results.items():
    columns = zip(*(run[:5] for run in runs), strict=True)
    forms = ('{:.0f}', '{:.0f}', '{:.0%}', '{:.0%}', '{:.1f}')
    cells = [show(form, numbers) for form, numbers in zip(forms, columns, strict=True)]
    lines.append(f'| `{mode}` | ' + ' | '.join(cells) + ' |')
  sync, fast = (results[mode] for mode in MODES)
  same_updates = [a.seconds / b.seconds for a, b in zip(sync, fast, strict=True)]
  same_score = [a.to_target / b.to_target for a, b in zip(sync, fast, strict=True)]
  lines.append(
    f'| sync / async | {show("{:.2f}", same_updates)} (mean {np.mean(same_updates):.2f}) '
    f'| {show("{:.2f}", same_score)} (mean {np.mean(same_score):.2f}) | | | |'
  )
  return '\n'.join(lines) + '\n'


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_list('warm_starts', [], 'Workdirs of runs, one a seed.', flag_values=values)
  flags.DEFINE_integer('updates', 60, 'Of each run.', flag_values=values)
  flags.DEFINE_float('latency_s', 0.1, 'Scale of the tools latency.', flag_values=values)
  flags.DEFINE_float('target', 0.75, 'Held-out pass@1 to reach.', flag_values=values)
  flags.DEFINE_string(
    'workdir', str(commands.RUNS / 'speed'), 'Folder of the runs.', flag_values=values
  )


if __name__ == '__main__':
  commands.run(main)
