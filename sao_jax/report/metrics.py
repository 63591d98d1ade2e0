"""Metrics on disk: one JSON object a line in metrics.jsonl, and the same numbers for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

_FLUSH_TENSORBOARD_S = 5.0


class MetricsWriter:
  """Appends the metrics of a run to WORKDIR/metrics.jsonl and WORKDIR/tensorboard.

  Lines are handed to the system one by one, as they come. TensorBoard's events are written on the calling thread
  (tensorboardX's own thread would die in silence on a full disk, and block its caller once its queue is full).
  """

  def __init__(self, workdir: Path, *, resume_at: int | None = None):
    """Opens the files.

    Args:
      workdir: the folder of the run, made if absent.
      resume_at: None for a new run. Otherwise what `offset` said when the checkpoint was made (0 without one): later
        lines describe updates that are lost. They move to metrics.lost.jsonl, and TensorBoard hides them.

    Raises:
      FileExistsError: a new run where there is one already.
      ValueError: metrics.jsonl does not reach to `resume_at`, or has no line end there.
    """
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._path = workdir / 'metrics.jsonl'
    purge_from = None
    if resume_at is not None:
      cut_tail(self._path, resume_at, workdir / 'metrics.lost.jsonl')
      purge_from = 1 + max((row['step'] for row in read_metrics(self._path)), default=-1)
    elif self._path.exists() and self._path.stat().st_size:
      raise FileExistsError(
        f'{self._path} holds a run already: resume it or choose another workdir'
      )
    self._file = open(self._path, 'ab', buffering=0)
    self._board = _Board(workdir / 'tensorboard', purge_from)

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Appends one line: the step, then the metrics in their order.

    Scalars of numpy and jax become numbers with 6 significant digits, NaN and infinity become null. Lists go to the
    line only, except that TensorBoard shows those named *_hist as histograms of 0, 1, 2, ...

    Raises:
      OSError: e.g. for want of disk space. No part of a line remains in the file.
      TypeError: a value that is no number and no list of numbers.
    """
    row = {'step': int(step)} | {name: _plain(name, value) for name, value in metrics.items()}
    if row['step'] != step:
      raise ValueError(f'metrics of step {row["step"]} written as those of step {step}')
    start = self._file.seek(0, os.SEEK_END)
    line = memoryview(json.dumps(row, allow_nan=False).encode() + b'\n')
    try:
      while line:
        line = line[self._file.write(line) :]
      self._board.write(step, row)
    except OSError as error:
      if line:
        os.ftruncate(self._file.fileno(), start)
      raise OSError(
        error.errno, f'metrics of step {step} not written: {error.strerror}', str(self._path)
      ) from error

  def offset(self) -> int:
    """Bytes of metrics.jsonl that are safely on disk: what a checkpoint remembers for `resume_at`."""
    os.fsync(self._file.fileno())
    return self._file.seek(0, os.SEEK_END)

  def close(self) -> None:
    """Idempotent."""
    self._file.close()
    self._board.close()


def cut_tail(path: Path, offset: int, lost_path: Path) -> int:
  """Cuts a file of lines at `offset` bytes; what follows is appended to `lost_path`, never thrown away.

  Args:
    path: the file. Absent and `offset` 0: an empty one is made.
    offset: the end of a line, or 0.
    lost_path: where the tail goes. It reaches the disk before the file is cut.

  Returns:
    The number of bytes moved.

  Raises:
    ValueError: the file is shorter than `offset`, or `offset` is inside a line. The file is as it was.
  """
  size = path.stat().st_size if path.exists() else 0
  if offset > size:
    raise ValueError(
      f'{path} has {size} bytes and the checkpoint counts on {offset}: it was shortened or replaced; restore the file '
      'or resume from an earlier checkpoint'
    )
  with open(path, 'a+b') as file:
    file.seek(max(offset - 1, 0))
    before, tail = file.read(min(offset, 1)), file.read()
    if before not in (b'', b'\n'):
      raise ValueError(
        f'{path}: byte {offset} is inside a line, so this is not the file of the checkpoint'
      )
    if tail:
      with open(lost_path, 'ab') as lost:
        lost.write(tail if tail.endswith(b'\n') else tail + b'\n')
        lost.flush()
        os.fsync(lost.fileno())
      file.truncate(offset)
      os.fsync(file.fileno())
  return len(tail)


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """The lines of a metrics.jsonl. A last line without its end (a run that was killed, or is writing) is left out.

  Raises:
    ValueError: any other line that is no JSON object, by number.
  """
  lines = Path(path).read_text().split('\n')
  rows = []
  for number, line in enumerate(lines[:-1], start=1):
    try:
      row = json.loads(line)
    except ValueError as error:
      raise ValueError(f'{path}, line {number} is not JSON: {line[:60]!r}') from error
    if not isinstance(row, dict) or 'step' not in row:
      raise ValueError(f'{path}, line {number} is not the metrics of a step: {line[:60]!r}')
    rows.append(row)
  return rows


def _plain(name: str, value: Any) -> Any:
  """What JSON can hold and people can read."""
  if isinstance(value, list | tuple) or (hasattr(value, 'tolist') and np.ndim(value)):
    return [_plain(name, x) for x in (value if isinstance(value, list | tuple) else value.tolist())]
  if hasattr(value, 'item'):
    value = value.item()
  if isinstance(value, bool | int | None):
    return value
  if not isinstance(value, float):
    raise TypeError(f'metric {name!r} is {value!r}: not a number, not a list of numbers')
  return float(f'{value:.6g}') if math.isfinite(value) else None


class _Board:
  """TensorBoard events, one a step, written on the calling thread."""

  def __init__(self, folder: Path, purge_from: int | None):
    folder.mkdir(parents=True, exist_ok=True)
    # The file name has whole seconds only: without the suffix a quick restart would overwrite its predecessor.
    self._writer = EventsWriter(str(folder / 'events'), f'.{time.time_ns()}')
    self._flushed_at, self._closed = -math.inf, False
    if purge_from is not None:
      start = SessionLog(status=SessionLog.START)
      self._writer.write_event(Event(wall_time=time.time(), step=purge_from, session_log=start))

  def write(self, step: int, row: dict[str, Any]) -> None:
    values = []
    for name, value in row.items():
      if isinstance(value, list) and name.endswith('_hist') and value:
        values.extend(_histogram(name, value).value)
      elif isinstance(value, int | float) and name != 'step':
        values.append(Summary.Value(tag=name, simple_value=value))
    event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
    self._writer.write_event(event)
    if time.monotonic() - self._flushed_at > _FLUSH_TENSORBOARD_S:
      self._writer.flush()
      self._flushed_at = time.monotonic()

  def close(self) -> None:
    if not self._closed:
      self._closed = True
      self._writer.close()


def _histogram(name: str, counts: list[float]) -> Summary:
  """counts[i] observations of the value i."""
  values, counts = np.arange(len(counts)), np.asarray(counts, np.float64)
  return summary.histogram_raw(
    name,
    min=0,
    max=len(counts) - 1,
    num=counts.sum(),
    sum=counts @ values,
    sum_squares=counts @ values**2,
    bucket_limits=(values + 0.5).tolist(),
    bucket_counts=counts.tolist(),
  )
