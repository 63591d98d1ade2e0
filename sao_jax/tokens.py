"""Byte-level tokens and the chat format of a tool-using agent. Ids are the truth, text is a view of them.

An episode is one growing sequence of ids; nothing in it is ever rendered or tokenized again:

  [BOS] question [AGENT]  thinking [CALL] code [EOT]  [RESULT] output [AGENT]  [ANSWER] text [EOT]
  `----- prompt -------'  `---- the agent says ----'  `----- result ------'  `- the agent says -'

Ids 0 to 255 are the bytes of UTF-8. Special ids start at 256 and have no spelling, so no question, program output or
answer can contain one, whatever its text.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

PAD = 256
BOS = 257
AGENT = 258  # the agent speaks next
CALL = 259  # the agent starts a tool call
ANSWER = 260  # the agent starts its final answer
RESULT = 261  # a tool result starts
EOT = 262  # the agent's turn ends; the only stop token
VOCAB_SIZE = 264  # a multiple of 8; id 263 is unused

_NAMES = {
  PAD: '<pad>',
  BOS: '<bos>',
  AGENT: '<agent>',
  CALL: '<call>',
  ANSWER: '<answer>',
  RESULT: '<result>',
  EOT: '<eot>',
}


class ToolCall(NamedTuple):
  """The agent wants `code` to be run."""

  code: str


class Answer(NamedTuple):
  """The agent gives its final answer."""

  text: str


class NoAction(NamedTuple):
  """The turn is neither a tool call nor an answer."""


class ChatFormat(NamedTuple):
  """What an environment needs to know of a chat format: a bundle of pure functions."""

  prompt_tokens: Callable[[str], np.ndarray]  # question -> [n] int32
  result_tokens: Callable[[str], np.ndarray]  # observation -> [n] int32
  parse_action: Callable[[np.ndarray], ToolCall | Answer | NoAction]
  show: Callable[[np.ndarray], str]
  stop_token: int
  pad_token: int
  vocab_size: int


def encode(text: str) -> np.ndarray:
  """[n] int32, the UTF-8 bytes of `text`. A lone surrogate, which UTF-8 cannot hold, becomes `?`."""
  return np.frombuffer(text.encode('utf-8', errors='replace'), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
  """The text of byte tokens; bytes that are not UTF-8 become U+FFFD.

  Raises:
    ValueError: if a token is not a byte. Use `show` to look at whole episodes.
  """
  tokens = np.asarray(tokens, np.int64)
  if tokens.size and not (0 <= tokens.min() and tokens.max() < 256):
    raise ValueError(f'only byte tokens have a text, got {show(tokens)!r}')
  return tokens.astype(np.uint8).tobytes().decode('utf-8', errors='replace')


def show(tokens: np.ndarray) -> str:
  """A readable view of any tokens: `<bos>1+1=?<agent><call>print(1+1)<eot>`; unnamed ids are `<263>`."""
  parts, text = [], bytearray()
  for token in [*np.asarray(tokens).tolist(), None]:
    if token is not None and 0 <= token < 256:
      text.append(token)
      continue
    parts.append(text.decode('utf-8', errors='replace'))
    text.clear()
    if token is not None:
      parts.append(_NAMES.get(token, f'<{token}>'))
  return ''.join(parts)


def prompt_tokens(question: str) -> np.ndarray:
  """[n] int32, `[BOS] question [AGENT]`."""
  return _join(BOS, question, AGENT)


def call_tokens(code: str) -> np.ndarray:
  """[n] int32, `[CALL] code [EOT]`."""
  return _join(CALL, code, EOT)


def answer_tokens(text: str) -> np.ndarray:
  """[n] int32, `[ANSWER] text [EOT]`."""
  return _join(ANSWER, text, EOT)


def result_tokens(observation: str) -> np.ndarray:
  """[n] int32, `[RESULT] observation [AGENT]`."""
  return _join(RESULT, observation, AGENT)


def parse_action(tokens: np.ndarray) -> ToolCall | Answer | NoAction:
  """What the agent did in one turn. Defined for every sequence of integers.

  A turn is an action if and only if it is, from its first to its last token,

    byte* CALL byte* EOT     or     byte* ANSWER byte* EOT

  The bytes before the marker are thinking and are ignored; those after it are the code or the answer, in full, unstripped,
  perhaps empty. Bytes that are not UTF-8 become U+FFFD. Everything else is NoAction: no marker, two markers, any other
  special or unknown id anywhere, tokens after EOT, or a turn without EOT. The last because a cut turn must not act: half
  a program is another program, and `12` may be the start of `123`.

  Args:
    tokens: [n] integers, what the agent sampled in this turn, the stop token included.
  """
  tokens = np.asarray(tokens, np.int64)
  specials = np.flatnonzero((tokens < 0) | (tokens >= 256))
  if specials.size != 2 or specials[1] != tokens.size - 1 or tokens[-1] != EOT:
    return NoAction()
  marker = tokens[specials[0]]
  if marker not in (CALL, ANSWER):
    return NoAction()
  text = decode(tokens[specials[0] + 1 : -1])
  return ToolCall(text) if marker == CALL else Answer(text)


def observation_text(output: str, status: str, *, limit: int) -> str:
  """What the agent sees of one run of its code.

  `ok` and `truncated` show the stripped output. `error` shows only the type of the exception, `error: SyntaxError`, since
  its wording differs between versions of Python; `timeout` and `killed` show `error: timeout` and `error: killed`.

  Args:
    output: what the program printed; if it raised, the last line is `Type: message`.
    status: ok, error, timeout, killed or truncated.
    limit: bytes of UTF-8 that are kept; a character that would be split is dropped.
  """
  if status in ('ok', 'truncated'):
    text = output.strip()
  elif status == 'error':
    exception = re.match(r'[A-Za-z_][\w.]*', output.strip().rpartition('\n')[2])
    text = f'error: {exception.group() if exception else "exit"}'
  else:
    text = f'error: {status}'
  return text.encode('utf-8', errors='replace')[:limit].decode('utf-8', errors='ignore')


def _join(first: int, text: str, last: int) -> np.ndarray:
  return np.concatenate([[first], encode(text), [last]]).astype(np.int32)


BYTE_CHAT = ChatFormat(prompt_tokens, result_tokens, parse_action, show, EOT, PAD, VOCAB_SIZE)
