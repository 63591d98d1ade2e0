"""What happens after a failure, and the deadlines that keep every wait finite."""

import dataclasses
import itertools
from collections.abc import Sequence

from sao_jax.types import FailureKind


class RunFailed(Exception):
  """The run cannot go on. The message is the last line that the user reads; the exit code is 3."""


RETRIED = frozenset({FailureKind.INFRA, FailureKind.ENV, FailureKind.GRADER})


def may_retry(kind: FailureKind, attempts: int, budget: int) -> bool:
  """Whether the prompt is issued again after its `attempts`-th episode failed."""
  return kind in RETRIED and attempts <= budget


def check_deadlines(deadlines: Sequence[tuple[str, float]]) -> None:
  """Deadlines are given from the inside out; each must end before the next gives up.

  Raises:
    ValueError: naming the two fields.
  """
  for (inner, short), (outer, long) in itertools.pairwise(deadlines):
    if not 0 < short < long:
      raise ValueError(
        f'{inner}={short} s must be above 0 and below {outer}={long} s: lower the first or raise the second'
      )


@dataclasses.dataclass
class Breaker:
  """Opens after too many failures in a row: then the fault is not in the episodes."""

  limit: int
  in_row: int = 0
  last: str = ''

  def success(self) -> None:
    self.in_row = 0

  def failure(self, message: str) -> None:
    """Counts one.

    Raises:
      RunFailed: at the limit, with the last failure.
    """
    self.in_row, self.last = self.in_row + 1, message
    if self.in_row >= self.limit:
      raise RunFailed(f'{self.in_row} episodes failed in a row; the last: {message}')
