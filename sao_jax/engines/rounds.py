"""What a round sends to the device, and what comes back: plain arrays, a function of the decisions alone."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sao_jax.engines import programs as programs_lib
from sao_jax.engines import slots as slots_lib


class Prefill(NamedTuple):
  """One prefill call."""

  bucket: int
  rows: programs_lib.Rows
  completed: dict[int, int]  # row -> index of the slot whose prefix it completes


def plan(
  programs: programs_lib.Programs, pieces: Sequence[tuple[slots_lib.Slot, int]]
) -> list[Prefill]:
  """The calls, in order, that prefill the requests of slots from a position on.

  Each piece goes to the narrowest bucket that holds it, or through the widest one again and again. The order of
  `pieces` decides which of them share a call.
  """
  calls = []
  while pieces:
    groups = {}
    for slot, start in pieces:
      left = len(slot.opened.request.tokens) - start
      fitting = [bucket for bucket in programs.prefill if bucket >= left]
      bucket = min(fitting, default=max(programs.prefill))
      groups.setdefault(bucket, []).append((slot, start))
    pieces = []
    for bucket, group in groups.items():
      for first in range(0, len(group), programs.prefill_rows):
        part = group[first : first + programs.prefill_rows]
        rows = _rows(programs, part, bucket)
        completed = {row: part[row][0].index for row in np.flatnonzero(rows.last).tolist()}
        calls.append(Prefill(bucket, rows, completed))
        pieces += [
          (slot, start + bucket) for row, (slot, start) in enumerate(part) if not rows.last[row]
        ]
  return calls


def _rows(programs, part, bucket: int) -> programs_lib.Rows:
  rows = programs_lib.empty_rows(programs.num_slots, programs.prefill_rows, bucket)
  for row, (slot, start) in enumerate(part):
    request = slot.opened.request
    piece = request.tokens[start : start + bucket]
    rows.slots[row] = slot.index
    rows.tokens[row, : len(piece)] = piece
    rows.starts[row] = start
    rows.counts[row] = len(piece)
    rows.last[row] = start + len(piece) == len(request.tokens)
    rows.remaining[row] = request.max_new_tokens
    rows.temperature[row] = request.temperature
    rows.seeds[row] = request.seed
  return rows


def join(calls: Sequence[Prefill], first: Sequence, decoded: tuple) -> tuple[np.ndarray, ...]:
  """Tokens and log-probabilities of a round, both [1 + steps, S]; a token is -1 where none was sampled.

  Args:
    calls: the prefills.
    first: what each of them sampled, a pair of [R].
    decoded: what the decode sampled, a pair of [steps, S].
  """
  tokens, logprobs = (np.concatenate([np.zeros_like(x[:1]), x]) for x in decoded)
  tokens[0] = -1
  for call, (call_tokens, call_logprobs) in zip(calls, first, strict=True):
    for row, slot in call.completed.items():
      tokens[0, slot], logprobs[0, slot] = call_tokens[row], call_logprobs[row]
  return tokens, logprobs


def digest(tokens: np.ndarray, logprobs: np.ndarray) -> int:
  """CRC-32 of the bits that `join` gave where a token was sampled, slot by slot."""
  sampled = (tokens >= 0).T
  return zlib.crc32(logprobs.T[sampled].tobytes(), zlib.crc32(tokens.T[sampled].tobytes()))
