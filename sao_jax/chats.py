"""Tokenizers and chat formats of real models. Ids are the truth: a chat format is a template of tokens, not of text.

An episode only ever grows. What was sampled stays as it was sampled, a result is appended, and nothing is rendered or
tokenized again. In a template, markers such as `<|im_start|>` are ids, and the text between two markers is encoded in one
piece, as a tokenizer does that meets the rendered text. Text never becomes a marker, whatever it spells:

  <|im_start|> 'user\\n' + question <|im_end|> '\\n' <|im_start|> 'assistant\\n'   the agent says ... <|im_end|>
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sao_jax.tokens import Answer, ChatFormat, NoAction, ToolCall

PYTHON_TOOL = {
  'type': 'function',
  'function': {
    'name': 'python',
    'description': 'Runs a Python program and returns what it printed.',
    'parameters': {
      'type': 'object',
      'properties': {'code': {'type': 'string', 'description': 'The program.'}},
      'required': ['code'],
    },
  },
}  # as Qwen3's system turn shows it; names in the order in which they are written

THINKING = ('free', 'open', 'off')

_FENCE = re.compile(r'^```python[ \t]*\n(.*?)^```', re.DOTALL | re.MULTILINE)
# A minus after a word or a bracket is a subtraction. Digits that continue a word, as in `x2`, are no number.
_NUMBER = re.compile(
  r'(?:(?<![\w)\]])[-−])?(?<![\w.])'
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?'
)


class Tokenizer(NamedTuple):
  """A byte-level BPE tokenizer as a bundle of pure functions."""

  encode: Callable[[str], np.ndarray]  # text -> [n] int32, text ids only, whatever the text spells
  decode: Callable[[np.ndarray], str]  # text ids -> text; ValueError at any other id
  show: Callable[[np.ndarray], str]  # any ids -> text, markers spelled out; unnamed: `<151700>`
  is_text: Callable[[np.ndarray], np.ndarray]  # [n] ids -> [n] bool: neither a marker nor unknown
  id_of: Callable[[str], int]  # the id of a marker, e.g. '<|im_end|>'
  vocab_size: int  # the model's: ids are below it


def load_tokenizer(folder: str | Path) -> Tokenizer:
  """The tokenizer of a Hugging Face model folder.

  Every added token of tokenizer.json is a marker, those that Hugging Face does not call special (`<think>`, `<tool_call>`)
  too: they are taken out of the vocabulary that text is encoded with, so no text can have their ids.

  `decode(encode(text))` is the text, with two exceptions. The tokenizer's own normalizer applies (NFC for Qwen). And a
  character that the vocabulary cannot spell becomes `?`, as does a lone surrogate; other software drops it in silence.
  SmolLM2 has no tokens for 21 of the 256 bytes: it lacks six control characters and eight unassigned planes of Unicode.

  Args:
    folder: has tokenizer.json; its config.json, if there is one, tells the model's vocab_size, which may be larger than
      the tokenizer's. Without it, vocab_size is the tokenizer's.

  Raises:
    ValueError: in one line, if the file is missing or damaged, if it is no byte-level BPE tokenizer that keeps text as it
      is, or if the model has fewer ids than the tokenizer. `id_of` raises it for a name that is no marker.
  """
  import tokenizers

  path = Path(folder) / 'tokenizer.json'
  if not path.is_file():
    raise ValueError(
      f'folder {folder} has no tokenizer.json: name the folder of a model with its tokenizer'
    )
  try:
    spec = json.loads(path.read_text(encoding='utf-8'))
    markers = {token['content']: token['id'] for token in spec['added_tokens']}
    vocab = {t: i for t, i in spec['model']['vocab'].items() if t not in markers}
    spec['model']['vocab'] = vocab
    plain = {'added_tokens': [], 'post_processor': None, 'truncation': None, 'padding': None}
    bpe = tokenizers.Tokenizer.from_str(json.dumps(spec | plain))
  except Exception as error:  # the library raises plain exceptions
    raise ValueError(f'{path} is no BPE tokenizer ({error!r:.200}): fetch it again') from error
  if '"ByteLevel"' not in json.dumps(spec['pre_tokenizer']):
    raise ValueError(f'{path} is not byte-level BPE: use the tokenizer of a model such as Qwen3')
  unspelled = {byte for byte, char in _byte_chars().items() if char not in vocab}
  num_ids = max([*vocab.values(), *markers.values()]) + 1
  tokenizer = _bundle(bpe, markers, unspelled, _vocab_size(path.with_name('config.json'), num_ids))
  if tokenizer.decode(tokenizer.encode('a')) != 'a':
    raise ValueError(
      f'{path} changes text: it adds a space or is lossy, so pieces of text cannot be joined'
    )
  return tokenizer


def smollm2(tokenizer: Tokenizer, *, system: str, prefill: str, tools: bool) -> ChatFormat:
  """ChatML as SmolLM2 was taught it; the agent speaks plain text.

    <|im_start|>system\\n SYSTEM <|im_end|>\\n<|im_start|>user\\n QUESTION <|im_end|>\\n<|im_start|>assistant\\n PREFILL

  A turn that ends in <|im_end|> and has no other marker is an action. With `tools`, its first closed block of

    ```python
    code
    ```

  is a tool call: SmolLM2 follows no protocol of tools, but writes such blocks. A result is a user turn. Otherwise the
  answer is the last number that the agent wrote, without commas between thousands: `5 + 3 = 8.` is `8`, `x is -4` is `-4`,
  `1,234 apples` is `1234`, `10-4` is `4`, `2.5` is `2.5` (and not an integer 5). Everything else is NoAction.

  Args:
    system: text of the system turn, which is always there. The model's own template has `You are a helpful AI assistant
      named SmolLM, trained by Hugging Face`.
    prefill: the prompt ends with it, and the agent goes on from there: `{question}` in it is the question, '' is none.
      It belongs to the prompt: it is neither trained nor read for an answer.
    tools: whether fenced blocks are run. Say so in `system`.
  """
  start, end = map(tokenizer.id_of, ('<|im_start|>', '<|im_end|>'))

  def prompt_tokens(question: str) -> np.ndarray:
    begun = 'assistant\n' + prefill.replace('{question}', question)
    user = (start, f'user\n{question}', end, '\n')
    return _join(tokenizer, start, f'system\n{system}', end, '\n', *user, start, begun)

  def result_tokens(observation: str) -> np.ndarray:
    return _join(tokenizer, '\n', start, f'user\n{observation}', end, '\n', start, 'assistant\n')

  def parse_action(tokens: np.ndarray) -> ToolCall | Answer | NoAction:
    said = _turn(tokens, end)
    if said is None or not tokenizer.is_text(said).all():
      return NoAction()
    text = tokenizer.decode(said)
    block = _FENCE.search(text) if tools else None
    if block:
      return ToolCall(block.group(1))
    numbers = _NUMBER.findall(text)
    return Answer(numbers[-1].replace(',', '').replace('−', '-')) if numbers else NoAction()

  return _format(tokenizer, prompt_tokens, result_tokens, parse_action, end)


def qwen3(tokenizer: Tokenizer, *, system: str, thinking: str, tools: bool) -> ChatFormat:
  """Qwen3's chat: thinking, and tool calls as JSON between markers.

    [system turn] <|im_start|>user\\n QUESTION <|im_end|>\\n<|im_start|>assistant\\n
      <think>\\n...\\n</think>\\n\\n<tool_call>\\n{"name": "python", "arguments": {"code": "..."}}\\n</tool_call><|im_end|>
    \\n<|im_start|>user\\n<tool_response>\\n OUTPUT \\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n
      <think>\\n...\\n</think>\\n\\nIt is \\boxed{8}.<|im_end|>

  A turn must end in <|im_end|>, its only one. What stands before the last </think> is thinking and is not looked at. Of
  the rest: one <tool_call> pair that holds a call of `python` with a text `code`, with nothing but white space after it,
  is a tool call; without any marker, the content of the last \\boxed{...} (braces balance; escaped ones do not count) is the
  answer. All else is NoAction, in particular two calls, a call that is not JSON or of an unknown tool, a call without
  `tools`, and thinking without an end. The agent gets no second try at a malformed call: the episode ends without reward.

  Prompts and results are what the model's own template renders, token by token, with one deliberate difference: that
  template takes the thinking out of earlier turns once the user speaks again, and leaves out empty thinking. Here history
  is never rewritten, since the agent's tokens would no longer be the ones that it sampled.

  Args:
    system: text of the system turn; '' for none (with `tools` there is one in any case, which describes the tool).
    thinking: of THINKING. 'free': the agent opens <think> itself, as Qwen3 does; 'open': its turns begin after <think>, as in the templates
      of the models that do nothing else (Thinking-2507); 'off': they begin after an empty pair, as Qwen3's template has it then.
    tools: whether PYTHON_TOOL is on offer.
  """
  start, end, call, end_call = map(
    tokenizer.id_of, ('<|im_start|>', '<|im_end|>', '<tool_call>', '</tool_call>')
  )
  think, end_think, response, end_response = map(
    tokenizer.id_of, ('<think>', '</think>', '<tool_response>', '</tool_response>')
  )
  begun = {'free': (), 'open': (think, '\n'), 'off': (think, '\n\n', end_think, '\n\n')}
  agent = (start, 'assistant\n', *begun[thinking])
  header = (start, f'system\n{system}', end, '\n') if system else ()
  if tools:
    before = f'system\n{system}\n\n' if system else 'system\n'
    header = (start, *_describe(before, call, end_call), end, '\n')

  def prompt_tokens(question: str) -> np.ndarray:
    return _join(tokenizer, *header, start, f'user\n{question}', end, '\n', *agent)

  def result_tokens(observation: str) -> np.ndarray:
    user = ('\n', start, 'user\n', response, f'\n{observation}\n', end_response, end, '\n')
    return _join(tokenizer, *user, *agent)

  def parse_action(tokens: np.ndarray) -> ToolCall | Answer | NoAction:
    turn = _turn(tokens, end)
    if turn is None:
      return NoAction()
    ends = np.flatnonzero(turn == end_think)
    if thinking == 'open' and not ends.size:
      return NoAction()
    said = turn[ends[-1] + 1 :] if ends.size else turn
    markers = np.flatnonzero(~tokenizer.is_text(said))
    if not markers.size:
      answer = _boxed(tokenizer.decode(said))
      return NoAction() if answer is None else Answer(answer)
    if not tools or said[markers].tolist() != [call, end_call]:
      return NoAction()
    first, last = markers
    if tokenizer.decode(said[last + 1 :]).strip():
      return NoAction()
    return _python_call(tokenizer.decode(said[first + 1 : last]))

  return _format(tokenizer, prompt_tokens, result_tokens, parse_action, end)


def _bundle(bpe, markers: dict[str, int], unspelled: set[int], vocab_size: int) -> Tokenizer:
  """The functions over a `tokenizers.Tokenizer` that knows no marker."""
  names = {token: name for name, token in markers.items()}
  text_ids = np.zeros(vocab_size, bool)
  text_ids[list(bpe.get_vocab().values())] = True

  def encode(text: str) -> np.ndarray:
    text = _utf8(text)
    if unspelled:
      text = ''.join('?' if unspelled.intersection(char.encode()) else char for char in text)
    return np.asarray(bpe.encode(text, add_special_tokens=False).ids, np.int32)

  def is_text(tokens: np.ndarray) -> np.ndarray:
    tokens = np.asarray(tokens, np.int64)
    known = (tokens >= 0) & (tokens < vocab_size)
    return known & text_ids[np.where(known, tokens, 0)]

  def decode(tokens: np.ndarray) -> str:
    if not is_text(tokens).all():
      raise ValueError(f'only text tokens have a text, got {show(tokens)!r:.200}; use show')
    return bpe.decode(np.asarray(tokens, np.int64).tolist(), skip_special_tokens=False)

  def show(tokens: np.ndarray) -> str:
    tokens = np.asarray(tokens, np.int64)
    parts, begin = [], 0
    for at in [*np.flatnonzero(~is_text(tokens)).tolist(), None]:
      parts.append(decode(tokens[begin:at]))
      if at is not None:
        token, begin = int(tokens[at]), at + 1
        parts.append(names.get(token, f'<{token}>'))
    return ''.join(parts)

  def id_of(name: str) -> int:
    if name not in markers:
      known = ' '.join(sorted(markers))
      raise ValueError(
        f"the tokenizer has no marker {name!r}, of {known:.400}: its chat is another one. 'smollm2' needs the markers of ChatML only, "
        "'qwen3' those of thinking and tools as well"
      )
    return markers[name]

  return Tokenizer(encode, decode, show, is_text, id_of, vocab_size)


def _format(tokenizer, prompt_tokens, result_tokens, parse_action, stop_token: int) -> ChatFormat:
  # Padding is not the stop token, so that neither can be taken for the other.
  pad_token = tokenizer.id_of('<|endoftext|>')
  functions = (prompt_tokens, result_tokens, parse_action, tokenizer.show)
  return ChatFormat(*functions, stop_token, pad_token, tokenizer.vocab_size)


def _join(tokenizer: Tokenizer, *pieces: str | int) -> np.ndarray:
  """[n] int32: markers by id, and each text encoded in one piece. No two texts are neighbours: they are one."""
  parts = [tokenizer.encode(piece) if isinstance(piece, str) else [piece] for piece in pieces]
  return np.concatenate(parts).astype(np.int32)


def _turn(tokens: np.ndarray, stop: int) -> np.ndarray | None:
  """[n - 1] int64, a turn without its stop token; None if that is not at the end and only there: a cut turn must not act."""
  tokens = np.asarray(tokens, np.int64)
  return tokens[:-1] if np.flatnonzero(tokens == stop).tolist() == [len(tokens) - 1] else None


def _describe(before: str, call: int, end_call: int) -> tuple[str | int, ...]:
  """`before`, then the tool in Qwen3's words."""
  tool = json.dumps(PYTHON_TOOL)
  return (
    f'{before}# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures '
    f'within <tools></tools> XML tags:\n<tools>\n{tool}\n</tools>\n\nFor each function call, return a json object with function '
    'name and arguments within ',
    *(call, end_call),
    ' XML tags:\n',
    *(call, '\n{"name": <function-name>, "arguments": <args-json-object>}\n', end_call),
  )


def _python_call(text: str) -> ToolCall | NoAction:
  try:
    call = json.loads(text)
  except (ValueError, RecursionError):  # RecursionError: thousands of open brackets
    return NoAction()
  match call:
    case {'name': 'python', 'arguments': {'code': str(code)}}:
      return ToolCall(_utf8(code))  # JSON can spell half a surrogate pair
  return NoAction()


def _boxed(text: str) -> str | None:
  """What the last \\boxed{...} holds; None without one, or if it does not close."""
  start, depth = text.rfind('\\boxed{'), 0
  if start < 0:
    return None
  content = text[start + len('\\boxed') :]
  for match in re.finditer(r'\\.|[{}]', content, re.DOTALL):
    depth += {'{': 1, '}': -1}.get(match.group(), 0)
    if depth == 0:
      return content[1 : match.start()]
  return None


def _utf8(text: str) -> str:
  return text.encode('utf-8', errors='replace').decode()


def _byte_chars() -> dict[int, str]:
  """How byte-level BPE writes each byte in its vocabulary (GPT-2's table)."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def _vocab_size(config: Path, num_ids: int) -> int:
  if not config.is_file():
    return num_ids
  size = json.loads(config.read_text(encoding='utf-8')).get('vocab_size')
  if not isinstance(size, int) or size < num_ids:
    raise ValueError(
      f'{config} has vocab_size {size}, but the tokenizer has {num_ids} ids: they are of two models'
    )
  return size
