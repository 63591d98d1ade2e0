"""An engine without a model, for tests and simulations: tokens from fixed logits, time from the running loop.

A token depends on the request's seed, its position and the logits in place; how long a turn lasts depends on the seed
and the position where it starts. Neither depends on other episodes, on slots or on when things happen. One timer
serves a whole generation, so that a hundred thousand episodes are cheap under `runtime.clock.VirtualLoop`.
"""

import asyncio
import bisect
import collections
import dataclasses
import math
import statistics
from collections.abc import Callable

import numpy as np

from sao_jax import types

Length = Callable[[int, int], int]  # (seed, first position of the turn) -> tokens, stop included

_TOKENS, _LENGTHS = 1, 2  # streams of random numbers that share seeds and positions
_GOLDEN, _64_BITS = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF


class FakeEngine:
  """Implements `types.Engine` on a vector of logits.

  A turn is `length(seed, position) - 1` tokens from softmax over all tokens but `stop_token`, and then `stop_token`,
  which is certain there: log-probability 0. A turn longer than max_new_tokens is cut to them, without a stop.

  A generation waits for a slot, first come, first served, and has it until it ends; between turns an episode has none.
  With n tokens it takes n * seconds_per_token; token i is sampled (i + 1) * seconds_per_token after its start, under
  the newest version that is in place before that moment. What happens at one and the same moment may happen in any
  order: weights that come when a token is sampled are too late for it, and an abort then returns it.

  All calls come from the thread of one event loop, and `load` while it runs. There is no background work.

  Args:
    params: [V] logits, copied.
    version: the policy version of `params`.
    num_slots: generations at a time.
    stop_token: the id that ends a turn.
    length: tokens of a turn, at least 1: `constant`, `log_normal`, `pareto`, `bimodal` or any other pure function.
    seconds_per_token: > 0, whatever the load.
    load_seconds: from `load` until its weights are in place.

  Raises:
    ValueError: on a number out of its range, or logits that are not finite.
  """

  def __init__(
    self,
    params: np.ndarray,
    *,
    version: int,
    num_slots: int,
    stop_token: int,
    length: Length,
    seconds_per_token: float,
    load_seconds: float,
  ):
    _check(num_slots >= 1, 'num_slots must be >= 1', num_slots)
    pace = seconds_per_token
    _check(0 < pace < math.inf, 'seconds_per_token must be finite and > 0', pace)
    _check(0 <= load_seconds < math.inf, 'load_seconds must be finite and >= 0', load_seconds)
    first = _Weights(-math.inf, version, _logits(params))
    self._vocab_size = len(first.logits)
    in_range = 0 <= stop_token < self._vocab_size >= 2
    _check(in_range, f'stop_token must be one of {self._vocab_size} >= 2 tokens', stop_token)
    self._num_slots, self._stop_token, self._length = num_slots, stop_token, length
    self._seconds_per_token, self._load_seconds = pace, load_seconds
    self._history = [first]  # by time; as far back as a running generation needs
    self._open: dict[str, _Open] = {}
    # Ordered by arrival and by start. Taking the first is O(1), which it is not in a dict that loses its first keys.
    self._waiting: collections.OrderedDict[str, _Open] = collections.OrderedDict()
    self._running: collections.OrderedDict[str, _Open] = collections.OrderedDict()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._closed = False
    self._tokens_sampled = 0
    self._slot_seconds, self._counted_until = 0.0, 0.0

  async def generate(self, request: types.Request) -> types.Generation:
    """Continues request.tokens. Cancelling the coroutine frees the slot.

    Raises:
      ValueError: if the request cannot be met, or its episode has an open one.
      EpisodeFailure: INFRA if the engine is closed, before or meanwhile.
    """
    _check_request(request, self._vocab_size)
    loop = self._enter_loop()
    if self._closed:
      raise _closed()
    if request.episode in self._open:
      raise ValueError(f'episode {request.episode!r} has an open request: one at a time')
    length = self._length(request.seed, len(request.tokens))
    _check(length >= 1, 'a turn has at least its stop token', length)
    limit = request.max_new_tokens
    opened = _Open(request, min(length, limit), length <= limit, loop.create_future())
    self._open[request.episode] = self._waiting[request.episode] = opened
    self._admit()
    try:
      return await opened.future
    finally:
      if self._open.get(request.episode) is opened:  # not answered: cancelled
        self._leave(opened, self._sampled_by_now(opened))

  def release(self, episode: str) -> None:
    """Aborts the open request of the episode, if any. There is no other slot to free."""
    self.abort(episode)

  def load(self, params: np.ndarray, version: int) -> None:
    """Tokens sampled later than `load_seconds` from now use `params`. Loads take effect in the order of the calls.

    Raises:
      ValueError: if the shape differs or a logit is not finite.
    """
    logits = _logits(params)
    _check(len(logits) == self._vocab_size, f'{self._vocab_size} logits expected', len(logits))
    now = self._enter_loop().time()
    oldest = next(iter(self._running.values())).start if self._running else now
    # Tokens to come are sampled after `oldest`: what something newer had replaced by then is of no use.
    del self._history[: bisect.bisect_right(self._history, oldest, key=_since) - 1]
    self._history.append(_Weights(now + self._load_seconds, version, logits))

  def abort(self, episode: str) -> None:
    """The open request of the episode, if any, returns what is sampled by now, with FinishReason.ABORTED.

    If that is the whole generation, its own reason stays. A request that waits for a slot returns no tokens.
    """
    opened = self._open.get(episode)
    if opened is not None:
      self._answer(opened, self._sampled_by_now(opened))

  def health(self) -> dict[str, float]:
    """Counters since the start, and the state of this moment.

    tokens_sampled grows when a generation ends, however it ends. busy_s is slot-seconds over num_slots: one second
    with half of the slots in use is half a second.
    """
    now = self._count_slot_seconds()
    return {
      'tokens_sampled': self._tokens_sampled,
      'busy_s': self._slot_seconds / self._num_slots,
      'version': self._history[bisect.bisect_right(self._history, now, key=_since) - 1].version,
      'compiles': 0,
      'slots_in_use': len(self._running),
      'waiting': len(self._waiting),
    }

  def close(self) -> None:
    """Requests that are open fail. Idempotent."""
    self._closed = True
    for opened in list(self._open.values()):
      self._leave(opened, self._sampled_by_now(opened))
      if not opened.future.done():
        opened.future.set_exception(_closed())

  def _enter_loop(self) -> asyncio.AbstractEventLoop:
    loop = asyncio.get_running_loop()
    if self._loop not in (None, loop):
      raise RuntimeError('the engine lives in another event loop, whose time is another')
    self._loop = loop
    return loop

  def _count_slot_seconds(self) -> float:
    """Brings the sum up to now, before the slots in use change. Returns now."""
    now = 0.0 if self._loop is None else self._loop.time()
    self._slot_seconds += len(self._running) * (now - self._counted_until)
    self._counted_until = now
    return now

  def _admit(self) -> None:
    now = self._count_slot_seconds()
    while self._waiting and len(self._running) < self._num_slots:
      episode, opened = self._waiting.popitem(last=False)
      opened.start = now
      end = now + opened.count * self._seconds_per_token
      opened.timer = self._loop.call_at(end, self._answer, opened, opened.count)
      self._running[episode] = opened

  def _answer(self, opened: '_Open', count: int) -> None:
    """Resolves the request with its first `count` tokens."""
    generation = self._generation(opened, count)
    self._leave(opened, count)
    if not opened.future.done():  # cancelled, and its coroutine not yet told
      opened.future.set_result(generation)

  def _leave(self, opened: '_Open', count: int) -> None:
    """Removes the request, of which `count` tokens were sampled, and gives its slot to the next."""
    self._count_slot_seconds()
    episode = opened.request.episode
    del self._open[episode]
    self._waiting.pop(episode, None)
    if self._running.pop(episode, None) is not None:
      opened.timer.cancel()
    self._tokens_sampled += count
    self._admit()

  def _moments(self, opened: '_Open') -> np.ndarray:
    """[count] when each token is sampled."""
    return opened.start + self._seconds_per_token * np.arange(1, opened.count + 1)

  def _sampled_by_now(self, opened: '_Open') -> int:
    if opened.start is None:
      return 0
    return int(np.searchsorted(self._moments(opened), self._loop.time(), side='right'))

  def _generation(self, opened: '_Open', count: int) -> types.Generation:
    """The first `count` tokens of the request, each under the weights of its moment."""
    request, first = opened.request, len(opened.request.tokens)
    uniforms = _uniform(request.seed, np.arange(first, first + count, dtype=np.uint64), _TOKENS)
    tokens, logprobs, spans = np.zeros(count, np.int32), np.zeros(count, np.float32), []
    for weights, part in self._parts(opened, count):
      cumulative, table = weights.tables(request.temperature, self._stop_token)
      tokens[part] = np.searchsorted(cumulative, uniforms[part], side='right')
      logprobs[part] = table[tokens[part]]
      spans.append((weights.version, part.stop - part.start))
    reason = types.FinishReason.ABORTED
    if count == opened.count:
      reason = types.FinishReason.LENGTH
      if opened.stops:
        reason = types.FinishReason.STOP
        tokens[-1], logprobs[-1] = self._stop_token, 0.0
    return types.Generation(tokens, logprobs, tuple(spans), reason)

  def _parts(self, opened: '_Open', count: int) -> list[tuple['_Weights', slice]]:
    """The weights in order, and the tokens that each sampled. Only weights that the generation met are looked at."""
    if count == 0:
      return []
    moments = self._moments(opened)[:count]
    begin = bisect.bisect_left(self._history, moments[0], key=_since) - 1
    end = bisect.bisect_left(self._history, moments[-1], key=_since)
    met = self._history[begin:end]
    cuts = [0, *np.searchsorted(moments, [w.since for w in met[1:]], side='right').tolist(), count]
    return [(w, slice(a, b)) for w, a, b in zip(met, cuts[:-1], cuts[1:], strict=True) if a < b]


@dataclasses.dataclass(eq=False, slots=True)
class _Open:
  """A request that is not answered yet."""

  request: types.Request
  count: int  # tokens, if nothing ends it before
  stops: bool  # the last of them is the stop token
  future: asyncio.Future
  start: float | None = None  # None: it waits for a slot
  timer: asyncio.TimerHandle | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Weights:
  """What `load` brought, and when it is in place."""

  since: float
  version: int
  logits: np.ndarray  # [V] float64
  by_temperature: dict[float, tuple] = dataclasses.field(default_factory=dict)

  def tables(self, temperature: float, stop_token: int) -> tuple[np.ndarray, np.ndarray]:
    """Cumulative probabilities [V] float64 and log-probabilities [V] float32, over all tokens but the stop token."""
    if temperature not in self.by_temperature:
      logits = self.logits / temperature
      logits[stop_token] = -math.inf
      logits -= logits.max()
      logprobs = logits - math.log(np.exp(logits).sum())
      cumulative = np.cumsum(np.exp(logprobs))
      # Exactly 1 from the last possible token on, so that a number below 1 never finds another one.
      self.by_temperature[temperature] = cumulative / cumulative[-1], logprobs.astype(np.float32)
    return self.by_temperature[temperature]


def constant(count: int) -> Length:
  """Every turn has `count` tokens."""
  _check(count >= 1, 'count must be >= 1', count)
  return lambda seed, position: count


def log_normal(*, median: float, sigma: float, cap: int) -> Length:
  """exp(N(log median, sigma^2)), rounded, from 1 to `cap` tokens."""
  _check(0 < median < math.inf, 'median must be finite and > 0', median)
  _check(0 <= sigma < math.inf, 'sigma must be finite and >= 0', sigma)
  _check(cap >= 1, 'cap must be >= 1', cap)
  inverse = statistics.NormalDist().inv_cdf

  def length(seed: int, position: int) -> int:
    return max(
      1, round(min(cap, median * math.exp(sigma * inverse(_uniform(seed, position, _LENGTHS)))))
    )

  return length


def pareto(*, minimum: int, shape: float, cap: int) -> Length:
  """P(length >= k) = (minimum / k)^shape for k from `minimum` to `cap` tokens: a heavy tail for small shapes."""
  _check(1 <= minimum <= cap, f'minimum must be from 1 to cap={cap}', minimum)
  _check(0 < shape < math.inf, 'shape must be finite and > 0', shape)

  def length(seed: int, position: int) -> int:
    uniform = _uniform(seed, position, _LENGTHS)
    if uniform <= (minimum / cap) ** shape:  # also where the power below overflows
      return cap
    return int(minimum * uniform ** (-1 / shape))

  return length


def bimodal(*, short: int, long: int, share_long: float) -> Length:
  """`long` tokens with probability `share_long`, else `short`."""
  _check(1 <= short <= long, f'short must be from 1 to long={long}', short)
  _check(0 <= share_long <= 1, 'share_long must be in [0, 1]', share_long)
  return lambda seed, position: long if _uniform(seed, position, _LENGTHS) < share_long else short


def _uniform(seed: int, position: int | np.ndarray, stream: int) -> float | np.ndarray:
  """In the open interval (0, 1), a function of its arguments: a counter-based generator. Positions [n] uint64 give [n]."""
  key = _mix((stream << 32 | int(seed)) * _GOLDEN & _64_BITS)
  bits = _mix(position * _GOLDEN + key & _64_BITS)
  return ((bits >> 12) + 0.5) * 2.0**-52


def _mix(x: int | np.ndarray) -> int | np.ndarray:
  """The output function of SplitMix64."""
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _64_BITS
  return x ^ (x >> 31)


def _since(weights: _Weights) -> float:
  return weights.since


def _closed() -> types.EpisodeFailure:
  return types.EpisodeFailure(types.FailureKind.INFRA, 'the fake engine is closed')


def _logits(params: np.ndarray) -> np.ndarray:
  logits = np.array(params, np.float64)
  _check(logits.ndim == 1, 'params must be a vector of logits', logits.shape)
  _check(bool(np.isfinite(logits).all()), 'logits must be finite', logits)
  return logits


def _check_request(request: types.Request, vocab_size: int) -> None:
  tokens, seed = np.asarray(request.tokens), request.seed
  is_row = tokens.ndim == 1 and tokens.size > 0 and tokens.dtype.kind in 'iu'
  _check(is_row, 'tokens must be a non-empty row of ids', f'{tokens.dtype}{tokens.shape}')
  _check(0 <= tokens.min() <= tokens.max() < vocab_size, f'tokens must be < {vocab_size}', tokens)
  _check(request.max_new_tokens >= 1, 'max_new_tokens must be >= 1', request.max_new_tokens)
  warm = 0 < request.temperature < math.inf
  _check(warm, 'temperature must be finite and > 0', request.temperature)
  _check(0 <= seed < 2**32, 'seed must be in [0, 2^32)', seed)


def _check(holds: bool, requirement: str, value: object) -> None:
  if not holds:
    raise ValueError(f'{requirement}, got {value}')
