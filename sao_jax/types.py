"""Records that cross a border, and the legend of dimensions that the whole package uses.

  B  rows of a batch             T  token positions            V  vocabulary
  D  width of the model          L  layers                     H  query heads
  K  key/value heads             S  engine slots               C  cache positions of a slot

Token-aligned arrays: index t speaks of token t. `logprobs[t] = log pi(token_t | tokens_<t)`,
`values[t] = V(tokens_<t)`, `mask[t]` says that the policy sampled token t (it is an action), `versions[t]`
is the policy version that sampled it (-1 elsewhere), `rewards[t]` sits on action tokens only.
"""

import dataclasses
import enum
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import numpy as np


class StopReason(enum.StrEnum):
  """Why an episode ended without a failure."""

  ANSWERED = 'answered'  # the agent gave a final answer, right or wrong
  NO_ANSWER = 'no_answer'  # the agent ended its turn with neither an answer nor a tool call
  TURN_LIMIT = 'turn_limit'  # the turn budget ran out
  TOKEN_LIMIT = 'token_limit'  # the token budget of the episode ran out


class FinishReason(enum.StrEnum):
  """Why one generation ended."""

  STOP = 'stop'  # a stop token was sampled; it is the last token
  LENGTH = 'length'  # max_new_tokens were sampled
  ABORTED = 'aborted'  # the request was aborted; the tokens so far are returned


class FailureKind(enum.StrEnum):
  """Who is at fault when an episode fails. A failed episode never trains and has no reward."""

  INFRA = 'infra'  # engine, process or machine: retry
  ENV = 'env'  # environment or its sandbox: retry
  DATA = 'data'  # the task itself is broken: no retry
  GRADER = 'grader'  # the answer could not be judged: retry
  AGENT = 'agent'  # the agent did what the environment cannot represent: no retry
  STALE = 'stale'  # it has a token beyond the staleness bound, where such episodes are dropped
  BUG = 'bug'  # our own fault: ends the run


class EpisodeFailure(Exception):
  """An episode ends without data. Carries the kind, which decides what happens next."""

  def __init__(self, kind: FailureKind, message: str):
    super().__init__(f'{kind}: {message}')
    self.kind = kind


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem: what the agent is asked, and what the grader knows."""

  prompt_id: str  # unique in its data set, stable across runs
  question: str
  answer: str  # the reference answer; never shown to the agent
  info: dict[str, Any] = dataclasses.field(
    default_factory=dict
  )  # e.g. kind and level of the problem
  environment: str = 'default'  # who plays it: failures are counted for each environment


@dataclasses.dataclass(frozen=True)
class Turn:
  """Tokens that the environment appends to the episode; the agent acts next."""

  tokens: np.ndarray  # [n] int32


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The end of an episode."""

  reward: float | None  # None: it could not be judged, which is a failure and never 0
  terminated: bool  # the task is over: nothing to bootstrap from
  truncated: bool  # a budget cut it: the critic may bootstrap
  stop_reason: StopReason
  info: dict[str, Any] = dataclasses.field(default_factory=dict)  # e.g. tool_calls, tool_errors


class Env(Protocol):
  """One object is one episode."""

  async def reset(self, task: Task) -> Turn: ...

  async def step(self, action: np.ndarray) -> Turn | Outcome: ...

  def cut(self) -> Outcome:
    """The outcome where the token budget ends the episode: truncated, with the reward that it has earned."""

  async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Request:
  """Ask an engine to continue `tokens`. One episode has at most one request open at a time."""

  episode: str  # turns of one episode share a slot, so that only new tokens are prefilled
  tokens: np.ndarray  # [n] int32, the whole prefix: ids are the truth
  max_new_tokens: int
  temperature: float  # > 0
  seed: int  # the key of the token at position t is fold_in(key(seed), t)


@dataclasses.dataclass(frozen=True)
class Generation:
  """What an engine sampled. All arrays have one entry a sampled token."""

  tokens: np.ndarray  # [n] int32, the stop token included
  behavior_logprobs: (
    np.ndarray
  )  # [n] float32, nats, under the weights and temperature that sampled it
  version_spans: tuple[
    tuple[int, int], ...
  ]  # (version, number of tokens) in order; the numbers add up to n
  finish_reason: FinishReason

  def versions(self) -> np.ndarray:
    """[n] int32, the version of each token."""
    return np.repeat(
      np.asarray([v for v, _ in self.version_spans], np.int32), [n for _, n in self.version_spans]
    )


class Engine(Protocol):
  """Samples tokens. `generate` may be called from many coroutines at once."""

  async def generate(self, request: Request) -> Generation: ...

  def release(self, episode: str) -> None:
    """The episode is over: its slot may be reused. Idempotent."""

  def load(self, params: Any, version: int) -> None:
    """Tokens sampled from some moment after this call on use `params`. Nothing drains."""

  def abort(self, episode: str) -> None:
    """The open request of the episode, if any, returns early with FinishReason.ABORTED."""

  def health(self) -> dict[str, float]:
    """Counters, e.g. tokens sampled, busy seconds, compiles."""

  def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One finished episode, token by token. All arrays are [T]."""

  episode: str
  prompt_id: str
  group: str  # episodes of one group share a prompt; a group of one under SAO
  tokens: np.ndarray  # int32
  mask: np.ndarray  # bool, True where the policy sampled
  behavior_logprobs: np.ndarray  # float32, 0 where mask is False
  versions: np.ndarray  # int32, -1 where mask is False
  rewards: np.ndarray  # float32, 0 where mask is False
  turn_ids: np.ndarray  # int32, number of the turn, from 0; -1 where mask is False
  terminated: bool
  truncated: bool
  stop_reason: StopReason
  info: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def reward(self) -> float:
    """The sum of rewards: the undiscounted return of the episode."""
    return float(self.rewards.sum())

  @property
  def num_actions(self) -> int:
    """Tokens that the policy sampled."""
    return int(self.mask.sum())


@flax.struct.dataclass
class Batch:
  """Trajectories packed in rows of fixed shape. Leaves are [B, T]; padding has segment 0 and mask 0."""

  tokens: jax.Array  # int32
  segment_ids: jax.Array  # int32, 1.. in each row, 0 = padding
  positions: jax.Array  # int32, from 0 in each segment: from lengths, never from the mask
  mask: jax.Array  # float32, 1 on action tokens that train (tokens over the staleness bound have 0)
  action_mask: jax.Array  # float32, 1 on every action token: GAE and critic see all of them
  behavior_logprobs: jax.Array  # float32
  rewards: jax.Array  # float32
  truncated: jax.Array  # float32, 1 on the last action token of a truncated trajectory, else 0
  num_actions: (
    jax.Array
  )  # float32, the action tokens of the token's trajectory, l of the adaptive lambda
  advantages: jax.Array  # float32, those that the host knows (group baselines), else 0
  staleness: (
    jax.Array
  )  # float32, learner version minus the version that sampled the token, 0 elsewhere


class Model(NamedTuple):
  """A decoder as pure functions. `params` is a plain dict of float32 leaves."""

  init: Any  # (key) -> params
  apply: Any  # (params, tokens [B,T], positions [B,T], segment_ids [B,T]) -> hidden [B,T,D] after the last norm
  observe: (
    Any  # as apply -> (hidden, load [L, E]: tokens that each expert got; [L, 0] without experts)
  )
  init_cache: Any  # (num_rows, num_positions) -> cache, a pytree of arrays with rows on axis 1
  extend: Any  # (params, cache, tokens [B,T], start [B], counts [B]) -> (hidden [B,T,D], cache); see models.transformer
  unembedding: (
    Any  # (params) -> [V, D]: logits = hidden @ unembedding.T; the embedding table itself when tied
  )
  vocab_size: int
