"""Problems: pure, short, exact, split by their text; demonstrations whose observations are the interpreter's."""

import contextlib
import io
import re
import warnings

import numpy as np
import pytest

from sao_jax import tokens as tk
from sao_jax.envs import problems
from sao_jax.envs.problems import KINDS, LEVELS, demonstration, make_task, predict, split_of

FROZEN = [
  '75*41=?',
  '2*(8-9)-85=?',
  '(53+30)*(72+6)+32*96=?',
  '((23-71)*4+913)*(451-87*60)-292=?',
  '23*6 mod 42=?',
  '53^59 mod 49=?',
  '686^27 mod 2820=?',
  '(701^682+939^183) mod 2830=?',
  '#n<72: n%6!=1',
  '#n<28: n%8<n%3',
  '#n<262: n%6==1 and n%3==n%11',
  '#n<126: n*n%7==1 or n%7==n%12 and n%6!=3',
  '5 + 0',
  '39 + 81',
  '475 + 107',
  '7178 + 4481',
]
GRID = [(kind, level) for kind in KINDS for level in LEVELS]


def interpret(code):
  """(stripped output, status) of the real interpreter, for programs that this project generated."""
  out = io.StringIO()
  with contextlib.redirect_stdout(out), warnings.catch_warnings():
    warnings.simplefilter('ignore')
    try:
      exec(compile(code, '<test>', 'exec'), {})
    except Exception as error:
      return type(error).__name__, 'error'
  return out.getvalue().strip(), 'ok'


def test_frozen_problems():
  """If this fails, the meaning of (seed, kind, level) changed: held-out scores are not comparable with earlier ones."""
  questions = [make_task(7, kind, level).question for kind, level in GRID]
  assert questions == FROZEN, questions


@pytest.mark.parametrize('kind, level', GRID)
def test_problem_is_pure_and_exact(kind, level):
  for seed in range(25):
    task = make_task(seed, kind, level)
    assert task == make_task(seed, kind, level)
    assert (task.answer, 'ok') == interpret(task.info['code'])
    assert task.answer == str(solve(task.question))
  assert len({make_task(seed, kind, level).prompt_id for seed in range(25)}) == 25


def solve(question):
  """The answer from the text of the question alone, by an algorithm that shares nothing with the package."""
  if question.startswith('#'):
    limit, condition = re.fullmatch(r'#n<(\d+): (.*)', question).groups()
    return len([n for n in range(int(limit)) if eval(condition, {'n': n})])
  if ' + ' in question:
    return sum(map(int, question.split(' + ')))
  left, modulus = re.fullmatch(r'(.*?)(?: mod (\d+))?=\?', question).groups()
  value = eval(left.replace('^', '**'))
  return value % int(modulus) if modulus else value


@pytest.mark.parametrize('kind', KINDS)
def test_levels_one_and_two_are_short(kind):
  tasks = [make_task(seed, kind, level) for seed in range(300) for level in (1, 2)]
  assert max(len(task.question.encode()) for task in tasks) <= 22
  assert max(len(task.answer) for task in tasks) <= 5
  assert max(len(task.info['code']) for task in tasks) <= 42


def test_seed_kind_and_level_all_matter():
  tasks = [make_task(seed, kind, level) for seed in range(5) for kind, level in GRID]
  assert len({task.prompt_id for task in tasks}) == len(tasks)
  assert len({task.question for task in tasks}) > 0.95 * len(tasks)
  assert make_task(2**64 - 1, 'modular', 1).question != make_task(0, 'modular', 1).question


def test_unknown_arguments():
  with pytest.raises(ValueError, match='geometry'):
    make_task(0, 'geometry', 1)
  with pytest.raises(ValueError, match='5'):
    make_task(0, 'modular', 5)


def test_no_question_is_on_both_sides():
  sides = {'train': set(), 'heldout': set()}
  for seed in range(20_000):
    question = make_task(seed, KINDS[seed % 2], 1 + seed // 2 % 2).question
    sides[split_of(question)].add(question)
  assert not sides['train'] & sides['heldout']
  share = len(sides['heldout']) / sum(map(len, sides.values()))
  assert 0.08 < share < 0.12
  assert split_of('1+1=?') == split_of('1+1=?')


@pytest.mark.parametrize(
  'code, expected',
  [
    ('print(12*(7-3)+5)', ('53', 'ok')),
    ('print(12*(7-3)+5', ('SyntaxError', 'error')),
    ('print(pow(17,23,19))', ('6', 'ok')),  # 17 = -2 and 2^18 = 1 mod 19, so -2^23 = -2^5 = -32 = 6
    ('print(pow(17,23,0))', ('ValueError', 'error')),
    ('print(sum(n%3==0 and n%4==1 for n in range(25)))', ('2', 'ok')),  # 9 and 21
    ('print(sum(n%0==0 for n in range(25)))', ('ZeroDivisionError', 'error')),
    ('print(sum(n%0==0 for n in range(0)))', ('0', 'ok')),  # never evaluated
    ('print(sum(n%3==0 for n in rang(25)))', ('NameError', 'error')),
    ('print(po(1/0))', ('NameError', 'error')),  # the function is looked up first
    ('print(sum(25))', ('TypeError', 'error')),
    ('print(1<2>3)', ('False', 'ok')),
    ('print(0 or 7)', ('7', 'ok')),
    ('print(9**9**9**9)', None),
    ('print(sum(n%3==0 for n in range(10**9)))', None),
    ('print(open)', None),
    ('print("x")', None),
    ('import os', None),
    ('print(1,2)', None),
    ('print(sum(n==3for n in range(9)))', None),
  ],
)
def test_predictions_by_hand(code, expected):
  actual = predict(code)
  assert (actual and (actual[0].split(':')[0], actual[1])) == expected


def test_predictions_equal_the_interpreter_on_slips():
  rng = np.random.default_rng(0)
  seen = set()
  for seed in range(1200):
    task = make_task(seed, KINDS[seed % 3], 1 + seed // 3 % 3)
    code = problems._slip(task, rng)
    output, status = interpret(code)
    predicted = predict(code)
    assert (predicted[0].split(':')[0], predicted[1]) == (output, status), code
    assert (output, status) != (task.answer, 'ok')
    seen.add(output if status == 'error' else status)
  assert {'ok', 'SyntaxError', 'NameError'} <= seen


def replay(task, demo):
  """Splits a demonstration in turns by its mask and checks every observation with the real interpreter."""
  edges = np.flatnonzero(np.diff(demo.mask)) + 1
  turns = np.split(demo.tokens, edges)
  np.testing.assert_array_equal(turns[0], tk.prompt_tokens(task.question))
  assert not demo.mask[0] and demo.mask[-1]
  actions = [tk.parse_action(turn) for turn in turns[1::2]]
  for action, result in zip(actions[:-1], turns[2::2], strict=True):
    expected = tk.observation_text(*interpret(action.code), limit=32)
    np.testing.assert_array_equal(result, tk.result_tokens(expected))
  return actions


def test_demonstrations_are_real_episodes():
  rng = np.random.default_rng(1)
  kinds = {'guess': 0, 'clean': 0, 'retried': 0, 'trusted': 0}
  for seed in range(600):
    task = make_task(seed, KINDS[seed % 3], 1 + seed // 3 % 2)
    demo = demonstration(task, rng, tool_share=0.75, slip_share=0.4, observation_bytes=32)
    assert demo.tokens.dtype == np.int32 and demo.mask.dtype == bool
    *calls, answer = replay(task, demo)
    assert isinstance(answer, tk.Answer)
    right = answer.text == task.answer
    if not calls:
      kinds['guess'] += 1
      assert right == (task.info['level'] == 1)
    elif calls[-1].code == task.info['code']:
      assert right
      kinds['clean' if len(calls) == 1 else 'retried'] += 1
    else:
      assert len(calls) == 1 and not right
      kinds['trusted'] += 1
  # Of 600: 150 guesses and 450 with the tool, 270 of them clean; standard deviations about 11 and 12.
  assert abs(kinds['guess'] - 150) < 45 and abs(kinds['clean'] - 270) < 50, kinds
  assert kinds['retried'] > 30 and kinds['trusted'] > 30, kinds


def test_demonstration_shares_at_their_ends():
  task = make_task(3, 'arithmetic', 2)
  rng = np.random.default_rng(0)
  clean = demonstration(task, rng, tool_share=1.0, slip_share=0.0, observation_bytes=32)
  code, answer = task.info['code'], task.answer
  assert tk.show(clean.tokens) == (
    f'<bos>{task.question}<agent><call>{code}<eot><result>{answer}<agent><answer>{answer}<eot>'
  )
  assert clean.mask.sum() == len(code) + 2 + len(answer) + 2
  guess = demonstration(task, rng, tool_share=0.0, slip_share=1.0, observation_bytes=32)
  assert tk.CALL not in guess.tokens


def test_guesses_are_wrong_near_and_of_plausible_sign():
  rng = np.random.default_rng(0)
  for seed in range(300):
    task = make_task(seed, KINDS[seed % 3], 2 + seed % 3)
    guess, value = int(problems._guess(task, rng)), int(task.answer)
    assert 0 < abs(guess - value) <= max(3, abs(value) // 10)
    assert guess >= 0 or value < 0


def test_same_generator_same_demonstration():
  task = make_task(3, 'modular', 2)
  first, second = (
    demonstration(
      task, np.random.default_rng(5), tool_share=0.5, slip_share=0.5, observation_bytes=9
    )
    for _ in range(2)
  )
  np.testing.assert_array_equal(first.tokens, second.tokens)


def test_scripted_agents():
  task = make_task(0, 'modular', 2)
  start = tk.prompt_tokens(task.question)
  assert tk.parse_action(problems.oracle_action(task, start)) == tk.ToolCall(task.info['code'])
  later = np.concatenate([start, tk.call_tokens('x'), tk.result_tokens('123')])
  assert tk.parse_action(problems.oracle_action(task, later)) == tk.Answer('123')
  assert tk.parse_action(problems.noop_action(task, start)) == tk.NoAction()
