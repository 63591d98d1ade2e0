"""What the host knows of an update, as a flat dict of scalars with the fixed names of a run."""

from collections.abc import Sequence

import numpy as np

from sao_jax.types import Trajectory

STALENESS_BINS = 17  # 0, 1, ... 15, 16 and more


def of_trajectories(
  trajectories: Sequence[Trajectory], *, version: int, max_staleness: int
) -> dict[str, float | list[int]]:
  """Reward, length, tool use and staleness of the episodes that one update uses.

  Staleness is per action token: `version`, the learner's at the update, minus the version that sampled it.
  """
  rewards = np.asarray([t.reward for t in trajectories])
  lengths = np.asarray([t.num_actions for t in trajectories])
  staleness = version - np.concatenate([t.versions[t.mask] for t in trajectories])
  calls = np.asarray([t.info.get('tool_calls', 0) for t in trajectories])
  errors = np.asarray([t.info.get('tool_errors', 0) for t in trajectories])
  histogram = np.bincount(np.minimum(staleness, STALENESS_BINS - 1), minlength=STALENESS_BINS)
  return {
    'reward/mean': rewards.mean(),
    'length/trained': lengths.mean(),
    'tokens/trained': int(lengths.sum()),
    'async/staleness_mean': staleness.mean(),
    'async/staleness_max': int(staleness.max()),
    'async/staleness_hist': histogram.tolist(),
    'async/masked_stale': (staleness > max_staleness).mean(),
    'tool/calls_mean': calls.mean(),
    'tool/errors_mean': errors.mean(),
    'tool/used_share': (calls > 0).mean(),
    'episode/truncated_share': np.mean([t.truncated for t in trajectories]),
  }


def of_runtime(passed: dict[str, float], *, waited: float, totals, ledger) -> dict[str, float]:
  """Throughput and idle shares since the last update.

  Args:
    passed: since then: tokens_sampled, busy_s of the engine, time_s; and compiles so far.
    waited: seconds of them in which the learner had no batch.
    totals: sums over the episodes that finished in between (episodes, reward, length), used or not.
    ledger: for the counts of episodes.
  """
  elapsed = max(passed['time_s'], 1e-9)  # logical time may stand still
  finished = totals.episodes or float('nan')
  return {
    'tokens/sampled': passed['tokens_sampled'],
    'tokens/per_second': passed['tokens_sampled'] / elapsed,
    'idle/learner': waited / elapsed,
    'idle/engine': max(0.0, 1 - passed['busy_s'] / elapsed),
    'reward/dispatched_mean': totals.reward / finished,
    'length/dispatched': totals.length / finished,
    'async/in_system': ledger.in_system(),
    'episodes/failed': ledger.counts['failed'],
    'episodes/dropped': ledger.counts['dropped'],
    'compiles': passed['compiles'],
  }


def of_evaluation(evaluation) -> dict[str, float]:
  """The score of an evaluate.Evaluation and how the agent came by it."""
  trajectories = evaluation.trajectories
  return {
    'eval/pass@1': evaluation.pass_at_1,
    'eval/standard_error': evaluation.standard_error,
    'eval/failed': evaluation.failed,
    'eval/tool_used_share': np.mean([t.info.get('tool_calls', 0) > 0 for t in trajectories]),
    'eval/length': np.mean([t.num_actions for t in trajectories]),
  }
