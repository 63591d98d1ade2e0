"""Scores a checkpoint on a file of problems, or on the held-out problems of its run.

  python experiments/evaluate.py --workdir=runs/NAME [--step=N] [--problems=FILE] [--samples=N]
      [--temperature=T] [--limit=N] [--output=FILE.jsonl]

Prints pass@1 with its standard error; --output writes every episode, one JSON object a line. A run over a mesh is scored on that mesh
where there are as many devices, and otherwise on one, which then holds the whole policy.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import commands
from absl import flags


def main(argv: Sequence[str]) -> None:
  from sao_jax import build, scoring
  from sao_jax import workdir as run_workdir
  from sao_jax.build import plan as planning
  from sao_jax.envs.prompts import load_problems

  with commands.input_errors():
    values = commands.parse(argv, _define)
    if not values.workdir:
      raise ValueError('--workdir is missing: for example --workdir=runs/beyondaime-sao')
    for name in ('samples', 'limit'):
      if values[name].value is not None and values[name].value < 1:
        raise ValueError(f'--{name}={values[name].value} must be at least 1')
    workdir = Path(values.workdir)
    config = run_workdir.to_score(run_workdir.saved_config(workdir))
    if values.problems:
      config.data.path = config.data.heldout_path = ''
    if values.samples:
      config.evaluation.samples = values.samples
    if values.temperature is not None:
      config.evaluation.temperature = values.temperature
    parts = build.parts(config)
    tasks = parts.heldout
    if values.problems:
      tasks = load_problems(values.problems)
    tasks = tasks[: values.limit]
    build.check_prompts(tasks, config, parts.model.chat)
    planning.check([planning.of_scoring(parts)], planning.device_memory())
    params, step = run_workdir.saved_policy(parts, workdir, values.step)
    sandbox = build.make_sandbox(config)
    output = open(values.output, 'w') if values.output else None

  async def score():
    async with scoring.serving(parts, params, sandbox) as services:
      samples = config.evaluation.samples
      return await scoring.score(parts, services, tasks, name='eval', samples=samples)

  result = asyncio.run(score())
  print(
    f'pass@1 {result.pass_at_1:.3f}, standard error {result.standard_error:.3f}: {len(tasks)} problems, '
    f'{len(result.trajectories)} episodes, {result.failed} without a verdict, update {step} of {workdir}'
  )
  if output:
    with output:
      for t in result.trajectories:
        row = {'prompt': t.prompt_id, 'reward': t.reward, 'stop_reason': t.stop_reason, **t.info}
        output.write(json.dumps({**row, 'episode': parts.model.chat.show(t.tokens)}) + '\n')


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('workdir', '', 'Folder of the run.', flag_values=values)
  flags.DEFINE_integer(
    'step', None, 'Update of the checkpoint; the last one if absent.', flag_values=values
  )
  flags.DEFINE_string(
    'problems', '', 'A .jsonl or .csv file; the held-out problems if absent.', flag_values=values
  )
  flags.DEFINE_integer(
    'samples', None, 'Episodes a problem; as in the config if absent.', flag_values=values
  )
  flags.DEFINE_float(
    'temperature', None, 'Of sampling; as in the config if absent.', flag_values=values
  )
  flags.DEFINE_integer('limit', None, 'Only the first N problems.', flag_values=values)
  flags.DEFINE_string('output', '', 'Where to write the episodes, JSON lines.', flag_values=values)


if __name__ == '__main__':
  commands.run(main, resumable=False)
