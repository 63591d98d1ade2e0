"""What the commands share: flags, exit codes, and what a process sets before JAX starts."""

import ast
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

DONE, BAD_INPUT, FAILED, STOPPED = 0, 2, 3, 75
GOES_ON = 'the same command goes on from the last checkpoint'
RUNS = Path('runs')


def parse(argv: Sequence[str], define: Callable[[flags.FlagValues], None]) -> flags.FlagValues:
  """Flags of one command, from `define`. Raises ValueError: an unknown flag with the nearest name, a bad value."""
  values = flags.FlagValues()
  define(values)
  flags.DEFINE_bool('help', False, 'Shows this.', short_name='h', flag_values=values)
  try:
    rest = values(list(argv))
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    raise ValueError(_one_line(error)) from None
  if values.help:
    print(sys.modules['__main__'].__doc__)
    print(values.get_help())
    raise SystemExit(DONE)
  if len(rest) > 1:
    raise ValueError(f'{rest[1]!r} is not a flag: flags are --name=value')
  return values


def parse_config(
  argv: Sequence[str], define: Callable[[flags.FlagValues], None]
) -> tuple[flags.FlagValues, ConfigDict]:
  """As `parse`, with `--config=FILE[:variant]` and the overrides `--config.x.y=z`, which are checked by type.

  Raises:
    ValueError: one line that names what is wrong, with the nearest name of an unknown key.
  """

  def with_config(values):
    config_flags.DEFINE_config_file('config', None, 'Config file.', flag_values=values)
    define(values)

  values = parse(argv, with_config)
  path = config_path(values)
  if isinstance(values.config, ConfigDict):
    return values, values.config
  if path is None:
    raise ValueError('--config is missing: for example --config=configs/beyondaime.py')
  if not path.exists():
    raise ValueError(f'--config={path}: there is no such file')
  raise ValueError(f'--config={path}: {_one_line(_config_error(path))}')


def config_path(values: flags.FlagValues) -> Path | None:
  """The file that `--config` names, without the variant."""
  given = config_flags.get_config_filename(values['config']) if values['config'].present else None
  return Path(given.partition(':')[0]) if given else None


def _config_error(path: Path) -> Exception:
  """Why the file gave no config: ml_collections keeps that to itself until a field is read."""
  try:
    runpy.run_path(str(path))['get_config']()
  except Exception as error:
    return error
  return ValueError('get_config returned no ConfigDict')


def number(text: str, flag: str) -> int:
  """A whole number of a list flag."""
  try:
    return int(text)
  except ValueError:
    raise ValueError(f'{flag}: {text!r} is no whole number') from None


def _one_line(error: Exception) -> str:
  """The message on one line; of an error that carries a traceback as text, the line that matters."""
  text = str(error.args[0]) if error.args and not isinstance(error, OSError) else str(error)
  if (
    text[:1] == text[-1:] == "'" and 'Did you mean' in text
  ):  # how ml_collections tells of an unknown key
    text = f'config key {ast.literal_eval(text)}'
  if 'Traceback' in text:
    text = text.strip().splitlines()[-1]
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
  except (ValueError, OSError) as error:
    raise BadInput(_one_line(error)) from error


class Ended(Exception):
  """Process 0 ends the run, with an exit code other than 0."""

  def __init__(self, code: int, reason: str):
    super().__init__(reason)
    self.code, self.reason = code, reason


def verdict(error: BaseException, *, resumable: bool = True) -> tuple[int, str]:
  """The exit code that an error means, and its reason, whose last line says all."""
  from sao_jax.checkpoint import CheckpointError
  from sao_jax.loop import Stopped
  from sao_jax.runtime.failures import RunFailed

  match error:
    case Ended():
      return error.code, error.reason
    case BadInput() | CheckpointError():
      return BAD_INPUT, f'error: {error}'
    case Stopped() | KeyboardInterrupt():
      return STOPPED, f'stopped; {GOES_ON}' if resumable else 'stopped'
    case RunFailed():
      return FAILED, '\n'.join([*getattr(error, '__notes__', []), f'failed: {error}'])
  return FAILED, f'failed: {type(error).__name__}: {_one_line(error)}'


def run(main: Callable[[Sequence[str]], None], *, resumable: bool = True) -> None:
  """Calls `main(argv)` and exits: 0 done, 2 bad config or input, 3 failed, 75 stopped after a checkpoint.

  The last line of a run that did not end well is its reason.
  """
  prepare_jax()
  from sao_jax.runtime.failures import RunFailed

  code = DONE
  try:
    main(sys.argv)
  except (Exception, KeyboardInterrupt) as error:
    code, reason = verdict(error, resumable=resumable)
    if code == FAILED and not isinstance(error, RunFailed | Ended):
      traceback.print_exc()
    print(reason, file=sys.stderr)
  sys.exit(code)
