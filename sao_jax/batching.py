"""Trajectories to a packed batch of fixed shape, on the host."""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.types import (
  Batch,
  EpisodeFailure,
  FailureKind,
  Outcome,
  StopReason,
  Trajectory,
  Turn,
)

_NUMBER = (int, float, np.integer, np.floating, np.bool_)


def check_answer(answer: Any, *, first: bool = False) -> Turn | Outcome:
  """What an environment answered, if it can be used. A missing or infinite reward passes: that is no verdict.

  Args:
    first: it is that of `reset`, which must be a turn.

  Raises:
    EpisodeFailure: ENV, it is neither a turn of some token ids nor an outcome with a number and a dict for JSON.
  """
  wrong = None
  if isinstance(answer, Turn):
    tokens = answer.tokens
    if not (isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in 'iu'):
      wrong = f'a turn of {type(tokens).__name__}, not a row of token ids'
    elif not len(tokens) or tokens.min() < 0:
      wrong = 'a turn without tokens or with one below 0'
  elif isinstance(answer, Outcome) and not first:
    if not (answer.reward is None or isinstance(answer.reward, _NUMBER)):
      wrong = f'the reward {answer.reward!r:.80}'
    elif not all(isinstance(x, bool | np.bool_) for x in (answer.terminated, answer.truncated)):
      wrong = f'terminated {answer.terminated!r:.40} and truncated {answer.truncated!r:.40}'
    elif not (isinstance(answer.stop_reason, StopReason) and isinstance(answer.info, dict)):
      wrong = f'an outcome with {answer.stop_reason!r:.80} and {type(answer.info).__name__}'
    elif not _is_plain(answer.info):
      wrong = 'info that JSON cannot hold'
  else:
    wrong = f'a {type(answer).__name__}'
  if wrong:
    raise EpisodeFailure(FailureKind.ENV, f'the environment answered {wrong}')
  return answer


def _is_plain(info: dict[str, Any]) -> bool:
  """Whether a checkpoint can hold it: keys must not turn into other keys."""
  try:
    return json.loads(json.dumps(info, default=np.generic.item)).keys() == info.keys()
  except (TypeError, ValueError):
    return False


def check_trajectory(trajectory: Trajectory) -> None:
  """Refuses what would poison an update, by trajectory id.

  Raises:
    ValueError: arrays of different lengths, no action token, a behaviour log-probability that is not finite
      or positive at an action token, an action without a version, a reward that is not finite or sits on a
      token that the policy did not sample.
  """
  name, mask = trajectory.episode, trajectory.mask
  lengths = {
    field: len(getattr(trajectory, field))
    for field in ('tokens', 'mask', 'behavior_logprobs', 'versions', 'rewards', 'turn_ids')
  }
  if len(set(lengths.values())) != 1:
    raise ValueError(f'trajectory {name}: arrays differ in length: {lengths}')
  if not mask.any():
    raise ValueError(f'trajectory {name}: no action token')
  if mask[0]:
    raise ValueError(f'trajectory {name}: its first token is an action, so nothing conditions it')
  logprobs = trajectory.behavior_logprobs[mask]
  if not (np.isfinite(logprobs).all() and (logprobs <= 0).all()):
    raise ValueError(f'trajectory {name}: a behaviour log-probability is not finite or above 0')
  if (trajectory.versions[mask] < 0).any():
    raise ValueError(f'trajectory {name}: an action token has no policy version')
  if not np.isfinite(trajectory.rewards).all():
    raise ValueError(f'trajectory {name}: a reward is not finite')
  if trajectory.rewards[~mask].any():
    raise ValueError(f'trajectory {name}: a reward sits on a token that is not an action')


def fingerprint(trajectory: Trajectory) -> int:
  """A 32-bit checksum of everything in a trajectory that an update depends on."""
  total = zlib.crc32(bytes([bool(trajectory.terminated), bool(trajectory.truncated)]))
  for name in ('tokens', 'mask', 'behavior_logprobs', 'versions', 'rewards', 'turn_ids'):
    total = zlib.crc32(np.ascontiguousarray(getattr(trajectory, name)).tobytes(), total)
  return total


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
  """First-fit decreasing: indices of the sequences of each row; deterministic."""
  rows, room = [], []
  for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    for row, free in enumerate(room):
      if lengths[i] <= free:
        rows[row].append(i)
        room[row] -= lengths[i]
        break
    else:
      rows.append([i])
      room.append(row_length - lengths[i])
  return rows


def pack(
  trajectories: Sequence[Trajectory],
  *,
  row_length: int,
  row_multiple: int,
  version: int,
  max_staleness: int,
  advantages: Mapping[str, float] | None = None,
) -> Batch:
  """Packs whole trajectories into rows.

  Positions and segments come from lengths, never from a mask. Tokens whose staleness is above the bound are
  actions that do not train: they stay in `action_mask`, GAE and the denominator, and leave `mask`.

  Args:
    trajectories: checked by `check_trajectory`.
    row_length: T, at least the longest trajectory.
    row_multiple: the number of rows is rounded up to a multiple of this, so that few shapes are compiled.
    version: the learner's version, from which staleness is counted.
    max_staleness: versions; older tokens are masked.
    advantages: of each episode, where the host computes them (group baselines); None puts 0.

  Returns:
    A Batch of numpy arrays [B, row_length].

  Raises:
    ValueError: a trajectory is longer than a row, or there is none.
  """
  if not trajectories:
    raise ValueError('cannot pack an empty batch: give at least one trajectory')
  for trajectory in trajectories:
    if len(trajectory.tokens) > row_length:
      raise ValueError(
        f'trajectory {trajectory.episode} has {len(trajectory.tokens)} tokens, more than a row of '
        f'{row_length}: raise the row length or lower the token budget of an episode'
      )
  rows = assign_rows([len(t.tokens) for t in trajectories], row_length)
  num_rows = -(-len(rows) // row_multiple) * row_multiple
  integer = {'tokens', 'segment_ids', 'positions'}
  arrays = {
    name: np.zeros((num_rows, row_length), np.int32 if name in integer else np.float32)
    for name in Batch.__dataclass_fields__
  }
  for row, members in enumerate(rows):
    start = 0
    for segment, index in enumerate(members, start=1):
      trajectory = trajectories[index]
      where = (row, slice(start, start + len(trajectory.tokens)))
      start += len(trajectory.tokens)
      mask = trajectory.mask
      staleness = np.where(mask, version - trajectory.versions, 0)
      arrays['tokens'][where] = trajectory.tokens
      arrays['segment_ids'][where] = segment
      arrays['positions'][where] = np.arange(len(trajectory.tokens))
      arrays['action_mask'][where] = mask
      arrays['mask'][where] = mask & (staleness <= max_staleness)
      arrays['behavior_logprobs'][where] = np.where(mask, trajectory.behavior_logprobs, 0)
      arrays['rewards'][where] = trajectory.rewards
      arrays['staleness'][where] = staleness
      arrays['num_actions'][where] = trajectory.num_actions
      if trajectory.truncated:
        arrays['truncated'][row, where[1].start + np.flatnonzero(mask)[-1]] = 1
      if advantages is not None:
        arrays['advantages'][where] = np.where(mask, advantages[trajectory.episode], 0)
  return Batch(**arrays)


def supervised_trajectory(name: str, tokens: np.ndarray, mask: np.ndarray) -> Trajectory:
  """A demonstration in the form that `pack` takes: what the agent said is the mask."""
  mask = np.asarray(mask, bool)
  return Trajectory(
    episode=name,
    prompt_id=name,
    group=name,
    tokens=np.asarray(tokens, np.int32),
    mask=mask,
    behavior_logprobs=np.zeros(len(mask), np.float32),
    versions=np.where(mask, 0, -1).astype(np.int32),
    rewards=np.zeros(len(mask), np.float32),
    turn_ids=np.where(mask, 0, -1).astype(np.int32),
    terminated=True,
    truncated=False,
    stop_reason=StopReason.ANSWERED,
  )
