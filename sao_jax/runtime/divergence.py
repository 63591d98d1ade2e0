"""When a run has diverged. Pure: numbers in, a reason out."""

import dataclasses
from collections.abc import Mapping
from typing import Any

_IN_ROW = 3  # updates beyond max_k3; one alone may be an outlier


class RollBack(Exception):
  """The run goes back to its last checkpoint. The message says why."""


@dataclasses.dataclass(frozen=True)
class Alarms:
  """What counts as divergence; see configs/ for what the numbers mean."""

  max_skipped_in_row: int
  max_k3: float  # nats a token between the policy that sampled and the one that learns
  reward_fall: (
    float  # share of (the size of) its best that the mean reward of a window may lose; 1: off
  )
  reward_window: int  # updates


def watch(
  memory: Mapping[str, Any] | None, metrics: Mapping[str, float], alarms: Alarms
) -> tuple[dict[str, Any], str | None]:
  """Takes in one update.

  Args:
    memory: what the last call returned, JSON-able; None at first.
    metrics: of the update.

  Returns:
    The new memory, and the reason if the run has diverged.
  """
  memory = memory or {'skipped': 0, 'k3': 0, 'rewards': [], 'best': None}
  skipped = memory['skipped'] + 1 if metrics['updates/skipped_now'] else 0
  k3 = memory['k3'] + 1 if metrics['mismatch/k3'] > alarms.max_k3 else 0
  rewards = [*memory['rewards'], float(metrics['reward/mean'])][-alarms.reward_window :]
  mean, best, reason = sum(rewards) / len(rewards), memory['best'], None
  if len(rewards) == alarms.reward_window:
    best = mean if best is None else max(best, mean)
    if alarms.reward_fall < 1 and mean < best - alarms.reward_fall * abs(best):
      reason = (
        f'the mean reward of {alarms.reward_window} updates fell from {best:.3g} to {mean:.3g}'
      )
  if k3 >= _IN_ROW:
    reason = f'the policy is {metrics["mismatch/k3"]:.3g} nats a token from the one that samples'
  if skipped >= alarms.max_skipped_in_row:
    reason = f'{skipped} updates in a row were not finite and were skipped'
  return {'skipped': skipped, 'k3': k3, 'rewards': rewards, 'best': best}, reason
