"""Procedural problems with integer answers, scripted agents that solve them, and demonstrations for a supervised start.

Four kinds, four levels. The questions are short and the tool call is close to a copy of the question, so that a model of
100k parameters can learn to use the tool; from level 2 on it cannot learn to do without.

  arithmetic   12*(7-3)+5=?          print(12*(7-3)+5)
  modular      17^23 mod 19=?        print(pow(17,23,19))
  counting     #n<60: n%7<n%5        print(sum(n%7<n%5 for n in range(60)))        n counts from 0
  sums         7 + 5                 print(7 + 5)            one digit a level: what a small real model knows in part
"""

import ast
import builtins
import dataclasses
import functools
import hashlib
import operator
import re

import numpy as np

from sao_jax import tokens as tk
from sao_jax.types import Task

KINDS = ('arithmetic', 'modular', 'counting', 'sums')
LEVELS = (1, 2, 3, 4)
HELDOUT_SHARE = 10  # one question in ten is held out

_SLIP_CHARS = '0123456789+-*%()'
_MAX_SLIP_OUTPUT = 12  # a slip that prints more is drawn again: an absurd number teaches nothing

_MAX_BITS = 4000  # of a predicted integer
_MAX_ROUNDS = 10_000  # of a predicted loop
_FUNCTIONS = {'pow': pow, 'sum': sum, 'range': range}
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
  ast.Eq: operator.eq,
  ast.NotEq: operator.ne,
  ast.Lt: operator.lt,
  ast.LtE: operator.le,
  ast.Gt: operator.gt,
  ast.GtE: operator.ge,
}


def make_task(seed: int, kind: str, level: int) -> Task:
  """The problem of these arguments, always the same.

  Two seeds may ask the same question: at level 1 there are only some thousands of them.

  Args:
    seed: in [0, 2**64).
    kind: one of KINDS.
    level: one of LEVELS. Levels 1 and 2 have at most 22 bytes of question and 5 of answer.

  Returns:
    The task; info has kind, level, and `code`, the program that prints the answer.

  Raises:
    ValueError: if the kind or the level is unknown.
  """
  if kind not in KINDS or level not in LEVELS:
    raise ValueError(
      f'kind must be one of {KINDS} and level of {LEVELS}, got {kind!r} and {level!r}'
    )
  key = np.array([seed, KINDS.index(kind) * len(LEVELS) + level], np.uint64)
  rng = np.random.Generator(np.random.Philox(key=key))
  question, expression = {
    'arithmetic': _arithmetic,
    'modular': _modular,
    'counting': _counting,
    'sums': _sums,
  }[kind](rng, level)
  code = f'print({expression})'
  answer, status = predict(code)
  assert status == 'ok', code
  info = {'kind': kind, 'level': level, 'code': code}
  return Task(f'{kind}-{level}-{seed}', question, answer, info)


def split_of(question: str) -> str:
  """'train' or 'heldout', by a hash of the text, so that a question is on one side whatever task asks it."""
  digest = hashlib.sha256(question.encode()).digest()
  return 'heldout' if int.from_bytes(digest[:8], 'big') % HELDOUT_SHARE == 0 else 'train'


def _arithmetic(rng: np.random.Generator, level: int) -> tuple[str, str]:
  def num(low: int, high: int) -> int:
    return int(rng.integers(low, high))

  def op() -> str:
    return '+-'[num(0, 2)]

  if level == 1:
    expression = f'{num(2, 100)}{"+-*"[num(0, 3)]}{num(2, 100)}'
  elif level == 2:
    expression = f'{num(2, 100)}*({num(2, 20)}{op()}{num(2, 20)}){op()}{num(2, 100)}'
  elif level == 3:
    expression = (
      f'({num(2, 100)}{op()}{num(2, 100)})*({num(2, 100)}{op()}{num(2, 100)})'
      f'{op()}{num(2, 100)}*{num(2, 100)}'
    )
  else:
    expression = (
      f'(({num(2, 100)}{op()}{num(2, 100)})*{num(2, 100)}{op()}{num(2, 1000)})'
      f'*({num(2, 1000)}{op()}{num(2, 100)}*{num(2, 100)}){op()}{num(2, 1000)}'
    )
  return f'{expression}=?', expression


def _modular(rng: np.random.Generator, level: int) -> tuple[str, str]:
  def num(low: int, high: int) -> int:
    return int(rng.integers(low, high))

  if level == 1:
    product, modulus = f'{num(2, 100)}*{num(2, 100)}', num(3, 100)
    return f'{product} mod {modulus}=?', f'{product}%{modulus}'
  if level in (2, 3):
    top, top_modulus = (100, 100) if level == 2 else (1000, 10000)
    base, power, modulus = num(2, top), num(3, top), num(3, top_modulus)
    return f'{base}^{power} mod {modulus}=?', f'pow({base},{power},{modulus})'
  (a, b), (c, d), modulus = (
    (num(2, 1000), num(3, 1000)),
    (num(2, 1000), num(3, 1000)),
    num(3, 10000),
  )
  return (
    f'({a}^{b}+{c}^{d}) mod {modulus}=?',
    f'(pow({a},{b},{modulus})+pow({c},{d},{modulus}))%{modulus}',
  )


def _counting(rng: np.random.Generator, level: int) -> tuple[str, str]:
  def num(low: int, high: int) -> int:
    return int(rng.integers(low, high))

  def rest(
    symbol: str = '',
  ) -> str:  # a condition on one remainder, neither always true nor always false
    modulus = num(3, 14)
    symbol = symbol or ('==', '!=', '<')[num(0, 3)]
    return f'n%{modulus}{symbol}{num(1, modulus)}'

  def pair() -> str:
    first, second = rng.choice(np.arange(3, 14), 2, replace=False)
    return f'n%{first}{("==", "<")[num(0, 2)]}n%{second}'

  limit = num(20, 100) if level < 3 else num(100, 1000)
  condition = (
    rest,
    pair,
    lambda: f'{rest()} and {pair()}',
    lambda: f'n*{rest("==")} or {pair()} and {rest("!=")}',
  )[level - 1]()
  return f'#n<{limit}: {condition}', f'sum({condition} for n in range({limit}))'


def _sums(rng: np.random.Generator, level: int) -> tuple[str, str]:
  first, second = (
    int(rng.integers(10 ** (level - 1) if level > 1 else 0, 10**level)) for _ in 'ab'
  )
  expression = f'{first} + {second}'
  return expression, expression


def oracle_action(task: Task, tokens: np.ndarray) -> np.ndarray:
  """A scripted agent that is always right: it runs the task's program, then answers what the tool said.

  Args:
    task: without a program in its info, the reference is answered at once.
    tokens: the episode so far.
  """
  code = task.info.get('code')
  if code is None:
    return tk.answer_tokens(task.answer)
  results = np.flatnonzero(np.asarray(tokens) == tk.RESULT)
  if not results.size:
    return tk.call_tokens(code)
  return tk.answer_tokens(tk.decode(tokens[results[-1] + 1 : -1]))


def noop_action(task: Task, tokens: np.ndarray) -> np.ndarray:
  """A scripted agent that ends its turn at once."""
  return np.array([tk.EOT], np.int32)


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """A whole episode of a scripted agent."""

  tokens: np.ndarray  # [n] int32
  mask: np.ndarray  # [n] bool, True on what the agent said


def demonstration(
  task: Task,
  rng: np.random.Generator,
  *,
  tool_share: float,
  slip_share: float,
  observation_bytes: int,
) -> Demonstration:
  """An episode to imitate, as good as the shares say.

  With probability `tool_share` the agent calls the tool and answers what it says. Else it answers from the head: right at
  level 1, a wrong number near the right one above, as an agent without a tool would. With probability `slip_share` a tool
  episode starts with a call in which one character is dropped or changed. The agent sees the real consequence, and calls
  again if it is an error, or trusts it and answers wrongly if it is a number.

  Observations equal, byte for byte, what `MathPython` shows of a real run: `predict` gives the output and status that the
  interpreter would give and `tokens.observation_text` words both.

  Args:
    task: of `make_task`.
    rng: the only source of chance.
    tool_share, slip_share: in [0, 1].
    observation_bytes: the limit that the environment has.
  """

  def observe(code: str) -> str:
    return tk.observation_text(*predict(code), limit=observation_bytes)

  if rng.random() >= tool_share:
    return _episode(task, [tk.answer_tokens(_guess(task, rng))])
  code = task.info['code']
  said = [tk.call_tokens(code), tk.result_tokens(observe(code))]
  answer = task.answer
  if rng.random() < slip_share:
    slip = _slip(task, rng)
    first = [tk.call_tokens(slip), tk.result_tokens(observe(slip))]
    if predict(slip)[1] == 'error':
      said = first + said
    else:
      said, answer = first, observe(slip)
  return _episode(task, [*said, tk.answer_tokens(answer)])


def _episode(task: Task, parts: list[np.ndarray]) -> Demonstration:
  """Prompt, then what the agent said and what the tool said by turns."""
  parts = [tk.prompt_tokens(task.question), *parts]
  mask = np.concatenate([np.full(part.size, i % 2 == 1) for i, part in enumerate(parts)])
  return Demonstration(np.concatenate(parts), mask)


def _guess(task: Task, rng: np.random.Generator) -> str:
  """An answer from the head."""
  if task.info['level'] == 1:
    return task.answer
  value = int(task.answer)
  spread = max(3, abs(value) // 10)
  offset = int(rng.integers(1, spread + 1)) * (-1 if rng.random() < 0.5 else 1)
  near = value + offset
  return str(
    near if value < 0 or near >= 0 else value - offset
  )  # as plausible: no sign that is out of place


def _slip(task: Task, rng: np.random.Generator) -> str:
  """The task's program with one character dropped or changed, whose consequence is known and is not the right answer."""
  code = task.info['code']
  for _ in range(100):
    at = int(rng.integers(len('print'), len(code)))
    changed = '' if rng.random() < 0.5 else _SLIP_CHARS[int(rng.integers(len(_SLIP_CHARS)))]
    slip = code[:at] + changed + code[at + 1 :]
    known = predict(slip)
    if known is None or known == (task.answer, 'ok'):
      continue
    if known[1] == 'error' or len(known[0]) <= _MAX_SLIP_OUTPUT:
      return slip
  return code[:-1]  # the bracket that everybody forgets


class _UnknownError(Exception):
  """The program is outside what `predict` knows."""


@functools.lru_cache(maxsize=4096)
def predict(code: str) -> tuple[str, str] | None:
  """What the interpreter would say of `code`, which is never executed: (output, 'ok') or ('Type: message', 'error').

  Knows programs that do not parse, and `print(expression)` with one expression of integers, + - * % **, comparisons, and, or,
  pow, range, and sum over a generator. None for all others, for very large numbers and for long loops.
  """
  if re.search(r'[0-9][A-Za-z_]', code):  # `3for` parses with a warning that depends on the version
    return None
  try:
    tree = ast.parse(code)
  except SyntaxError as error:
    return f'{type(error).__name__}: {error.msg}', 'error'
  match tree.body:
    case [ast.Expr(ast.Call(ast.Name('print'), [argument], []))]:
      pass
    case _:
      return None
  try:
    value = _evaluate(argument, _FUNCTIONS)
  except _UnknownError:
    return None
  except (NameError, TypeError, ValueError, ZeroDivisionError) as error:
    return f'{type(error).__name__}: {error}', 'error'
  return (str(value), 'ok') if isinstance(value, int) else None


def _evaluate(node: ast.expr, names: dict[str, object]) -> object:
  """The value of an expression, in the interpreter's order of evaluation and with its exceptions."""
  match node:
    case ast.Constant(int(value)):
      return value
    case ast.Name(name):
      if name in names:
        return names[name]
      raise _UnknownError if hasattr(builtins, name) else NameError(f'name {name!r} is not defined')
    case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
      return _OPERATORS[type(op)](_evaluate(operand, names))
    case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
      left, right = _evaluate(left, names), _evaluate(right, names)
      return _bounded(_OPERATORS[type(op)], left, right)
    case ast.Compare(left, ops, comparators) if all(type(op) in _OPERATORS for op in ops):
      left = _evaluate(left, names)
      for op, comparator in zip(ops, comparators, strict=True):
        right = _evaluate(comparator, names)
        holds = _OPERATORS[type(op)](left, right)
        if not holds:
          break
        left = right
      return holds
    case ast.BoolOp(op, values):
      for value in values:
        result = _evaluate(value, names)
        if bool(result) != isinstance(op, ast.And):
          break
      return result
    case ast.Call(ast.Name() as function, arguments, []):
      function = _evaluate(function, names)
      return _bounded(function, *[_evaluate(argument, names) for argument in arguments])
    case ast.GeneratorExp(element, [ast.comprehension(ast.Name(name), source, [], 0)]):
      source = _evaluate(source, names)
      if isinstance(source, range) and len(source) > _MAX_ROUNDS:
        raise _UnknownError
      return (_evaluate(element, {**names, name: value}) for value in iter(source))
  raise _UnknownError


def _bounded(function, *arguments: object) -> object:
  """Calls it, unless the result would be large or no integer."""
  if function in (pow, operator.pow) and len(arguments) == 2:
    if all(isinstance(a, int) for a in arguments):
      base, exponent = arguments
      if exponent < 0 or base.bit_length() * exponent > _MAX_BITS:
        raise _UnknownError
  result = function(*arguments)
  if isinstance(result, int) and result.bit_length() > _MAX_BITS:
    raise _UnknownError
  return result
