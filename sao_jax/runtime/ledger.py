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
    self.counts = collections.Counter()  # ended episodes by state, and `started`
    self.reasons = collections.Counter()  # 'failed:infra' and the like
    if resume_at is None:
      if path.exists() and path.stat().st_size:
        raise LedgerError(f'{path} holds a run already: resume it or choose another workdir')
    else:
      cut_tail(path, resume_at, path.with_name('events.lost.jsonl'))
      for line in path.read_text().splitlines():
        row = json.loads(line)
        self._apply(row['episode'], row['prompt'], row['event'], row['reason'])
    self._file = path.open('a')

  def record(
    self,
    episode: str,
    event: str,
    *,
    version: int,
    prompt: str | None = None,
    reason: str | None = None,
  ) -> None:
    """Appends one transition. `prompt` is needed for the first event of an episode only.

    Raises:
      LedgerError: if the episode is not in a state in which this can happen.
    """
    prompt = self.prompts[episode] if prompt is None and episode in self.prompts else prompt
    if prompt is None:
      raise LedgerError(f'episode {episode}: {event} without a start, or after its end')
    self._apply(episode, prompt, event, reason)
    row = {'t': round(self._clock(), 4), 'episode': episode, 'prompt': prompt, 'event': event}
    self._file.write(json.dumps({**row, 'reason': reason, 'version': version}) + '\n')

  def _apply(self, episode: str, prompt: str, event: str, reason: str | None) -> None:
    state = self.states.get(episode)
    if event not in _FROM or state not in _FROM[event]:
      raise LedgerError(f'episode {episode}: {event} is impossible from {state or "nothing"}')
    if event in ENDED:
      del self.states[episode], self.prompts[episode]
      self.counts[event] += 1
      if reason:
        self.reasons[f'{event}:{reason}'] += 1
      return
    self.counts['started'] += state is None
    self.states[episode] = 'pending' if event == 'reissued' else event
    self.prompts[episode] = prompt

  def in_system(self) -> int:
    """Episodes that have started and not ended; those under training included."""
    return len(self.states)

  def check(self) -> None:
    """Conservation: started = open + trained + dropped + failed + cancelled.

    Raises:
      LedgerError: with the counts.
    """
    ended = sum(self.counts[state] for state in ENDED)
    if self.counts['started'] != len(self.states) + ended:
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
