"""Says in words how a run is doing: why the learner waited, what was lost and why, whether lengths are biased, how stale weights were.

  python experiments/doctor.py runs/NAME

Reads the folder only; a run may be under way in it.
"""

from collections.abc import Sequence
from pathlib import Path

import commands
from absl import flags


def main(argv: Sequence[str]) -> None:
  from sao_jax.report.doctor import diagnose

  with commands.input_errors():
    # A bare argument is the folder.
    flagged = [a if a.startswith('-') else f'--workdir={a}' for a in argv[1:]]
    values = commands.parse([argv[0], *flagged], _define)
    if not values.workdir:
      raise ValueError(
        'name the folder of a run: for example experiments/doctor.py runs/beyondaime-sao'
      )
    print(diagnose(Path(values.workdir)))


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('workdir', '', 'Folder of the run.', flag_values=values)


if __name__ == '__main__':
  commands.run(main, resumable=False)
