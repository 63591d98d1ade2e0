"""What the commands share: flags, exit codes, and what a process sets before JAX starts."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

DONE, BAD_INPUT, FAILED, STOPPED = 0, 2, 3, 75
RUNS = Path('runs')


def parse(argv: Sequence[str], define: Callable[[flags.FlagValues], None]) -> flags.FlagValues:
  """Flags of one command; `--config` names a file, `:variant` and `--config.x.y=z` change it.

  Raises:
    ValueError: one line that names what is wrong: an unknown flag or key with the nearest name, a value of the
      wrong type, a config file that cannot be used.
  """
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config', None, 'Config file, e.g. configs/beyondaime.py:grpo', flag_values=values
  )
  define(values)
  flags.DEFINE_bool('help', False, 'Shows this.', short_name='h', flag_values=values)
  try:
    rest = values(list(argv))
    config = values.config
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    raise ValueError(_one_line(error)) from None
  if values.help:
    print(sys.modules['__main__'].__doc__)
    print(values.main_module_help() or values.get_help())
    raise SystemExit(DONE)
  if len(rest) > 1:
    raise ValueError(f'{rest[1]!r} is not a flag: flags are --name=value')
  if config is None:
    raise ValueError('--config is missing: for example --config=configs/beyondaime.py')
  if not isinstance(config, ConfigDict):
    name = next((a.partition('=')[2] for a in argv if a.startswith('--config=')), '')
    path = name.partition(':')[0]
    reason = 'no such file' if not Path(path).exists() else 'it has no usable get_config'
    raise ValueError(f'--config={name}: {reason}')
  return values


def run_name(argv: Sequence[str], config: ConfigDict) -> str:
  """The default name of a workdir: of the config file, and the variant."""
  path = next(a.partition('=')[2] for a in argv if a.startswith('--config=')).partition(':')[0]
  return f'{Path(path).stem}-{config.variant}'


def _one_line(error: Exception) -> str:
  text = str(error.args[0]) if error.args else str(error)
  return ' '.join(text.split()) or type(error).__name__


def prepare_jax() -> None:
  """A compilation cache that outlives the process, and no chatter. Called before JAX is imported."""
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str((RUNS / '.compilation_cache').resolve()))
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')


class BadInput(Exception):
  """Config, problem file or workdir cannot be used. One line; nothing has been written."""


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
  """Around everything that checks what the user gave: there a ValueError is the user's to mend."""
  try:
    yield
  except ValueError as error:
    raise BadInput(_one_line(error)) from error


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Calls `main(argv)` and exits: 0 done, 2 bad config or input, 3 failed, 75 stopped after a checkpoint.

  The last line of a run that did not end well is its reason.
  """
  prepare_jax()
  from sao_jax.checkpoint import CheckpointError
  from sao_jax.loop import Stopped
  from sao_jax.runtime.failures import RunFailed

  code, reason = DONE, None
  try:
    main(sys.argv)
  except (BadInput, CheckpointError) as error:
    code, reason = BAD_INPUT, f'error: {error}'
  except (Stopped, KeyboardInterrupt):
    code, reason = STOPPED, 'stopped; the same command goes on from here'
  except RunFailed as error:
    code, reason = FAILED, f'failed: {error}'
  except Exception as error:
    traceback.print_exc()
    code, reason = FAILED, f'failed: {type(error).__name__}: {_one_line(error)}'
  if reason:
    print(reason, file=sys.stderr)
  sys.exit(code)
