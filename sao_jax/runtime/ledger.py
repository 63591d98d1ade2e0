"""The ledger: one append-only log of what became of every episode. All counts derive from it.

  pending -> running -> finished -> trained | dropped(reason)
  pending or running -> failed(reason) | cancelled(reason);  finished -> cancelled(reason)

A reissue is a new episode of the same prompt: the old one has ended, the new one starts with `reissued`
instead of `pending`.
"""

import collections
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sao_jax.report.metrics import cut_tail

OPEN = ('pending', 'running', 'finished')
ENDED = ('trained', 'dropped', 'failed', 'cancelled')
_FROM = {  # event -> the states in which it may happen; None is an episode that the ledger has not seen
  'pending': (None,),
  'reissued': (None,),
  'running': ('pending',),
  'finished': ('running',),
  'trained': ('finished',),
  'dropped': ('finished',),
  'failed': ('pending', 'running'),
  'cancelled': OPEN,
}


class LedgerError(Exception):
  """An impossible transition or a broken count: a bug of ours that must end the run."""


class Ledger:
  """Episodes by state, and the log of how they got there."""

  def __init__(self, path: Path, clock: Callable[[], float], *, resume_at: int | None = None):
    """Opens the log. With `resume_at` (bytes, from a checkpoint) the log up to there is replayed and its
    later lines are set aside in events.lost.jsonl: their effect on the parameters is lost as well."""
    self._clock = clock
    self.states: dict[str, str] = {}  # of episodes that have not ended
    self.prompts: dict[str, str] = {}  # prompt of each of them
    self.counts = collections.Counter()  # episodes by state, and `started`
    self.reasons = collections.Counter()  # 'failed:infra' and the like
    if resume_at is None:
      if path.exists() and path.stat().st_size:
        raise LedgerError(f'{path} holds a run already: resume it or choose another workdir')
    else:
      cut_tail(path, resume_at, path.with_name('events.lost.jsonl'))
      with path.open() as lines:
        for number, line in enumerate(lines, start=1):
          try:
            row = json.loads(line)
            self._apply(row['episode'], row['prompt'], row['event'], row['reason'])
          except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(
              f'{path}, line {number} is damaged: restore the file, or remove the checkpoints that count on it'
            ) from error
    self._file = path.open('a')

  def record(
    self,
    episode: str,
    event: str,
    *,
    version: int,
    prompt: str | None = None,
    reason: str | None = None,
    **facts: Any,
  ) -> None:
    """Appends one transition. `prompt` is needed for the first event of an episode only.

    Args:
      facts: more that the line tells, JSON-able: tokens, reward and seconds of a finished episode, the message of a failed one.

    Raises:
      LedgerError: if the episode is not in a state in which this can happen.
    """
    prompt = self.prompts[episode] if prompt is None and episode in self.prompts else prompt
    if prompt is None:
      raise LedgerError(f'episode {episode}: {event} without a start, or after its end')
    self._apply(episode, prompt, event, reason)
    row = {'t': round(self._clock(), 4), 'episode': episode, 'prompt': prompt, 'event': event}
    self._file.write(json.dumps({**row, 'reason': reason, 'version': version, **facts}) + '\n')

  def _apply(self, episode: str, prompt: str, event: str, reason: str | None) -> None:
    state = self.states.get(episode)
    if event not in _FROM or state not in _FROM[event]:
      raise LedgerError(f'episode {episode}: {event} is impossible from {state or "nothing"}')
    if state is None:
      self.counts['started'] += 1
    else:
      self.counts[state] -= 1
    if event in ENDED:
      self.counts[event] += 1
      del self.states[episode], self.prompts[episode]
      if reason:
        self.reasons[f'{event}:{reason}'] += 1
    else:
      event = 'pending' if event == 'reissued' else event
      self.counts[event] += 1
      self.states[episode], self.prompts[episode] = event, prompt
    self.check()

  def in_system(self) -> int:
    """Episodes that have started and not ended; those under training included."""
    return len(self.states)

  def check(self) -> None:
    """Conservation, after every event: started = pending + running + finished + trained + dropped + failed + cancelled.

    Raises:
      LedgerError: with the counts.
    """
    open_now = sum(self.counts[state] for state in OPEN)
    ended = sum(self.counts[state] for state in ENDED)
    if self.counts['started'] != open_now + ended or open_now != len(self.states):
      raise LedgerError(f'episodes do not add up: {dict(self.counts)}, {len(self.states)} open')

  def offset(self) -> int:
    """Bytes of the log that are safely on disk: the frontier that a checkpoint names."""
    self._file.flush()
    os.fsync(self._file.fileno())
    return self._file.tell()

  def flush(self) -> None:
    """Hands buffered lines to the system."""
    self._file.flush()

  def close(self) -> None:
    """Idempotent."""
    if not self._file.closed:
      self._file.close()
