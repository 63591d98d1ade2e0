"""Where tasks come from: problem files and procedural problems, both addressed by an index.

A source is a pure function `task(index)`: the cursor of a run is one integer, so a checkpoint stores that integer, and a
resumed run asks for exactly the tasks that an uninterrupted one would have asked for.
"""

import csv
import io
import itertools
import json
import math
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sao_jax.envs.problems import KINDS, LEVELS, make_task, split_of
from sao_jax.types import Task

# Names of fields, in order of preference; case and outer spaces do not matter.
QUESTION_FIELDS = ('question', 'problem', 'prompt', 'input')
ANSWER_FIELDS = (
  'answer',
  'short answer',
  'short_answer',
  'final_answer',
  'final answer',
  'solution',
)

_END = '\x1f'  # a last row of our own: if a quote is still open, it is swallowed
_HELDOUT_SEED = 2**63  # above every training seed
_WHOLE = re.compile(r'\A([+-]?[0-9]+)\.0+\Z')


class ProblemFileError(ValueError):
  """A problem file cannot be used; one line that names the file, the line and the remedy."""


class ProblemFileWarning(UserWarning):
  """A row of a problem file was left out."""


class PromptSource(Protocol):
  """Tasks by index, for ever."""

  def task(self, index: int) -> Task: ...  # pure in (constructor arguments, index), index >= 0


class FixedPrompts:
  """Given problems, each once an epoch, in an order that (seed, epoch) decides."""

  def __init__(self, tasks: Sequence[Task], *, seed: int):
    self._tasks = tuple(tasks)
    self._seed = seed

  def __len__(self) -> int:
    return len(self._tasks)

  def task(self, index: int) -> Task:
    epoch, position = divmod(index, len(self))
    order = np.random.default_rng([self._seed, epoch]).permutation(len(self))
    return self._tasks[order[position]]


def split(tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
  """(training, held-out) problems of one file, about one in ten held out by a hash of the question: the same for every
  order and every seed, and a question that stands twice is on one side."""
  sides = {'train': [], 'heldout': []}
  for task in tasks:
    sides[split_of(task.question)].append(task)
  return sides['train'], sides['heldout']


class ProceduralPrompts:
  """Procedural problems whose question is in the train split, kinds and levels mixed by weight."""

  def __init__(self, *, seed: int, kinds: Mapping[str, float], levels: Mapping[int, float]):
    """Args: seed: of the sequence, in [0, 2**63). kinds, levels: weight of each, need not add up to 1."""
    self._seed = seed
    self._kinds = _shares('kinds', kinds, KINDS)
    self._levels = _shares('levels', levels, LEVELS)

  def task(self, index: int) -> Task:
    return self._draw(self._seed, index, 'train')

  def heldout(self, n: int) -> list[Task]:
    """n tasks with different questions, none of which is ever a training question; a prefix of those for a larger n."""
    tasks = {}
    for index in range(100 * n):
      task = self._draw(_HELDOUT_SEED, index, 'heldout')
      tasks.setdefault(task.question, task)
      if len(tasks) >= n:
        break
    if len(tasks) < n:
      raise ValueError(
        f'this mix has fewer than {n} held-out questions: ask for fewer or add levels'
      )
    return list(tasks.values())

  def _draw(self, seed: int, index: int, split: str) -> Task:
    """Kind and level first, then problems until one is in the split, so that the split does not bend the mix."""
    rng = np.random.default_rng([seed, index])
    kind = KINDS[rng.choice(len(KINDS), p=self._kinds)]
    level = LEVELS[rng.choice(len(LEVELS), p=self._levels)]
    while True:
      task = make_task(int(rng.integers(2**63)), kind, level)
      if split_of(task.question) == split:
        return task


def load_problems(path: str | pathlib.Path) -> list[Task]:
  """The problems of a `.jsonl` or `.csv` file (UTF-8, with or without a byte order mark).

  The field of the question is the first of QUESTION_FIELDS that the file has, that of the answer the first of ANSWER_FIELDS
  (`solution` last, since in many files it is prose). Answers may be text or numbers; `70` and `70.0` are both '70'. The
  prompt_id is `name:line`, the line where the problem starts.

  Published CSV files have rows with a lost quote, whose fields are shifted: such a row, known by its number of fields, is left
  out with a ProblemFileWarning. Nothing else is skipped but blank lines.

  Raises:
    ProblemFileError: if anything else in the file cannot be used.
  """
  path = pathlib.Path(path)
  text = _read(path)
  readers = {'.jsonl': _jsonl_rows, '.csv': _csv_rows}
  if path.suffix.lower() not in readers:
    raise ProblemFileError(f'{path}: unknown kind of file {path.suffix!r}; use .jsonl or .csv')
  rows = list(readers[path.suffix.lower()](path, text))
  if not rows:
    raise ProblemFileError(f'{path}: the file has no problems; add at least one')
  question_field = _find_field(path, rows, 'question', QUESTION_FIELDS)
  answer_field = _find_field(path, rows, 'answer', ANSWER_FIELDS)
  tasks = []
  for row in rows:
    question = _field(path, row, 'question', question_field)
    answer = _WHOLE.sub(r'\1', _field(path, row, 'answer', answer_field))
    if row.defect:
      message = f'{path}: line {row.line}: {row.defect}; the row is left out'
      warnings.warn(message, ProblemFileWarning, stacklevel=2)
    else:
      tasks.append(Task(f'{path.name}:{row.line}', question, answer))
  if not tasks:
    raise ProblemFileError(f'{path}: line {rows[0].line}: {rows[0].defect}, as all rows')
  return tasks


class _Row(NamedTuple):
  line: int  # where it starts, from 1
  fields: dict[str, Any]  # by lower-case name
  defect: str = ''  # why its fields cannot be trusted


def _read(path: pathlib.Path) -> str:
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    raise ProblemFileError(f'{path}: no such file; check data.path') from None
  except IsADirectoryError:
    raise ProblemFileError(f'{path}: is a directory; name one .jsonl or .csv file in it') from None
  except OSError as error:
    raise ProblemFileError(f'{path}: cannot be read ({error.strerror}); check data.path') from error
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    line = data[: error.start].count(b'\n') + 1
    raise ProblemFileError(f'{path}: line {line}: not UTF-8; convert the file to UTF-8') from None


def _jsonl_rows(path: pathlib.Path, text: str) -> Iterator[_Row]:
  """The rows; of names that differ only by case the first that has a value counts."""
  for number, line in enumerate(text.split('\n'), 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      reason = getattr(error, 'msg', 'nested too deeply or a number too long')
      raise ProblemFileError(
        f'{path}: line {number}: malformed JSON ({reason}); write one object a line'
      ) from None
    if not isinstance(row, dict):
      raise ProblemFileError(
        f'{path}: line {number}: a {type(row).__name__}, not an object; write one object a line'
      )
    yield _Row(number, _lower(row))


def _csv_rows(path: pathlib.Path, text: str) -> Iterator[_Row]:
  """The rows under the header; quoted fields may hold line breaks."""
  reader = csv.reader([*io.StringIO(text, newline=''), _END])
  header, start = None, 1
  while True:
    try:
      cells = next(reader)
    except csv.Error as error:
      raise ProblemFileError(
        f'{path}: line {start}: malformed CSV ({error}); check the quotes from here on'
      ) from None
    line, start = start, reader.line_num + 1
    if cells == [_END]:
      return
    if cells[-1:] and cells[-1].endswith(_END):
      raise ProblemFileError(f'{path}: line {line}: a quote that is never closed; close it')
    if not any(cell.strip() for cell in cells):
      continue
    if header is None:
      header = cells
      continue
    fields = _lower(dict(zip(header, cells, strict=False)))
    fits = len(cells) == len(header)
    defect = f'{len(cells)} fields, but the header has {len(header)}: look at its quotes and commas'
    yield _Row(line, fields, '' if fits else defect)


def _lower(row: dict[str, Any]) -> dict[str, Any]:
  fields = {}
  for name, value in row.items():
    name = name.strip().lower()
    if _as_text(fields.get(name)) == '':
      fields[name] = value
  return fields


def _find_field(path: pathlib.Path, rows: list[_Row], what: str, names: tuple[str, ...]) -> str:
  """The first of `names` that any row fills."""
  for name in names:
    if any(_as_text(row.fields.get(name)) != '' for row in rows):
      return name
  found = ', '.join(sorted(set(itertools.chain.from_iterable(row.fields for row in rows))))
  raise ProblemFileError(
    f'{path}: no {what} in any row (fields found: {found}); name the field one of: {", ".join(names)}'
  )


def _field(path: pathlib.Path, row: _Row, what: str, name: str) -> str:
  value = row.fields.get(name)
  text = _as_text(value)
  if text is None:
    raise ProblemFileError(
      f'{path}: line {row.line}: {what} {name!r} is a {type(value).__name__}; make it text or a number'
    )
  if not text:
    raise ProblemFileError(f'{path}: line {row.line}: no {what}; fill {name!r} or remove the row')
  return text


def _as_text(value: Any) -> str | None:
  """Stripped text of a field, '' if there is none, None if it is neither text nor a finite number."""
  if value is None:
    return ''
  if isinstance(value, bool) or not isinstance(value, str | int | float):
    return None
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return str(value).strip()


def _shares(name: str, weights: Mapping[Any, float], known: tuple) -> np.ndarray:
  """Weights as probabilities in the order of `known`."""
  unknown = [key for key in weights if key not in known]
  shares = np.array([weights.get(key, 0.0) for key in known], float)
  if unknown or not np.isfinite(shares).all() or (shares < 0).any() or not shares.sum() > 0:
    raise ValueError(
      f'{name} must give weights >= 0, not all 0, to some of {known}, got {dict(weights)}'
    )
  return shares / shares.sum()
