"""Prompt sources: files with one-line errors, and cursors that are one integer."""

import json

import pytest

from sao_jax.envs.problems import split_of
from sao_jax.envs.prompts import (
  FixedPrompts,
  ProblemFileError,
  ProblemFileWarning,
  ProceduralPrompts,
  load_problems,
  split,
)


def write(tmp_path, name, content):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return path


def rows(tasks):
  return [(task.prompt_id, task.question, task.answer) for task in tasks]


def test_jsonl(tmp_path):
  lines = [
    {'Question': '', 'question': ' a? ', 'Answer': '70', 'solution': 'prose'},
    {'question': 'b\n?\u2028', 'answer': 70.0},
    {'question': 'c?', 'answer': 0},
    {'question': 'd?', 'answer': 'x = \\frac{1}{2}'},
    {'question': 'e?', 'answer': 0.5},
    {'question': 'f?', 'answer': '-7.00'},
  ]
  text = '\n\n'.join(json.dumps(line, ensure_ascii=False) for line in lines)
  assert rows(load_problems(write(tmp_path, 'p.jsonl', '\ufeff' + text))) == [
    ('p.jsonl:1', 'a?', '70'),
    ('p.jsonl:3', 'b\n?', '70'),
    ('p.jsonl:5', 'c?', '0'),
    ('p.jsonl:7', 'd?', 'x = \\frac{1}{2}'),
    ('p.jsonl:9', 'e?', '0.5'),
    ('p.jsonl:11', 'f?', '-7'),
  ]


def test_csv(tmp_path):
  text = (
    '\ufeffID,Problem ,Short Answer,Solution\r\n'
    '1,"one,\r\ntwo ""quoted""",3,prose\r\n'
    '\r\n'
    '2,plain,"1,234",\r\n'
  )
  assert rows(load_problems(write(tmp_path, 'p.CSV', text))) == [
    ('p.CSV:2', 'one,\r\ntwo "quoted"', '3'),
    ('p.CSV:5', 'plain', '1,234'),
  ]


@pytest.mark.parametrize('question', ['question', 'PROBLEM', 'Prompt', 'input'])
@pytest.mark.parametrize('answer', ['Answer', 'short answer', 'FINAL_ANSWER', 'solution'])
def test_usual_names(tmp_path, question, answer):
  path = write(tmp_path, 'p.csv', f'{question},{answer}\nq,5\n')
  assert rows(load_problems(path)) == [('p.csv:2', 'q', '5')]


def test_preference_among_names(tmp_path):
  path = write(tmp_path, 'p.csv', 'solution,input,problem,final_answer\nprose,i,q,5\n')
  assert rows(load_problems(path)) == [('p.csv:2', 'q', '5')]


def test_csv_row_with_a_lost_quote_is_left_out_and_named(tmp_path):
  # The quote that should end the question is lost, so the field swallows the comma and the answer.
  path = write(tmp_path, 'p.csv', 'question,answer,topic\n"a\n,"5",x\nb,6,y\n')
  with pytest.warns(ProblemFileWarning, match=r'line 2: 2 fields, but the header has 3'):
    assert rows(load_problems(path)) == [('p.csv:4', 'b', '6')]


ERRORS = {
  'text.txt': ('q', 'unknown kind of file'),
  'empty.jsonl': ('', 'no problems'),
  'blank.csv': ('\n\n', 'no problems'),
  'header.csv': ('question,answer\n', 'no problems'),
  'broken.jsonl': ('{"question": "a", "answer": "1"}\n\n{"question": \n', 'line 3: malformed JSON'),
  'array.jsonl': ('[1]\n', 'line 1: a list, not an object'),
  'huge.jsonl': ('{"question": "a", "answer": ' + '9' * 5000 + '}', 'line 1: malformed JSON'),
  'deep.jsonl': ('[' * 100_000, 'line 1: malformed JSON'),
  'noanswer.jsonl': ('{"question": "a", "answer": 1}\n{"question": "b"}\n', 'line 2: no answer'),
  'noquestion.csv': ('question,answer\na,1\n ,2\n', 'line 3: no question'),
  'short.csv': ('question,answer\na,1\nb\n', 'line 3: no answer'),
  'null.jsonl': ('{"question": "a", "answer": 1}\n{"question": "b", "answer": null}', 'line 2: no answer'),
  'list.jsonl': ('{"question": ["a"], "answer": 1}', "line 1: question 'question' is a list"),
  'bool.jsonl': ('{"question": "a", "answer": true}', "line 1: answer 'answer' is a bool"),
  'nan.jsonl': ('{"question": "a", "answer": NaN}', "line 1: answer 'answer' is a float"),
  'none.jsonl': ('{"question": "a", "level": 1}', r'no answer in any row \(fields found: level, question\)'),
  'open.csv': ('question,answer\na,1\nb,"2\nc,3\n', 'line 3: a quote that is never closed'),
  'shifted.csv': ('question,answer\na,b,1\n', 'line 2: 3 fields, but the header has 2'),
  'latin.csv': ('question,answer\na,é\n'.encode('latin-1'), 'line 2: not UTF-8'),
}  # fmt: skip


@pytest.mark.parametrize('name', ERRORS)
@pytest.mark.filterwarnings('ignore::sao_jax.envs.prompts.ProblemFileWarning')
def test_errors_are_one_line_with_file_and_place(tmp_path, name):
  content, match = ERRORS[name]
  with pytest.raises(ProblemFileError, match=match) as caught:
    load_problems(write(tmp_path, name, content))
  assert str(caught.value).startswith(str(tmp_path / name))
  assert '\n' not in str(caught.value)


def test_missing_file_and_directory(tmp_path):
  with pytest.raises(ProblemFileError, match='no such file'):
    load_problems(tmp_path / 'absent.jsonl')
  with pytest.raises(ProblemFileError, match='is a directory'):
    load_problems(tmp_path)


def test_file_order_is_a_permutation_of_each_epoch(tmp_path):
  path = write(tmp_path, 'p.csv', 'question,answer\n' + ''.join(f'q{i},{i}\n' for i in range(20)))
  source = FixedPrompts(load_problems(path), seed=3)
  assert len(source) == 20
  order = [int(source.task(index).answer) for index in range(60)]
  epochs = [order[:20], order[20:40], order[40:]]
  assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(20))
  # A cursor is an integer: a new source asked in any order gives the same.
  again = FixedPrompts(load_problems(path), seed=3)
  assert [int(again.task(index).answer) for index in reversed(range(60))] == order[::-1]
  other = FixedPrompts(load_problems(path), seed=4)
  assert [int(other.task(index).answer) for index in range(20)] != epochs[0]


def test_a_file_is_split_by_its_questions(tmp_path):
  rows = ''.join(f'what is {i % 190}?,{i}\n' for i in range(200))  # ten questions stand twice
  tasks = load_problems(write(tmp_path, 'p.csv', 'question,answer\n' + rows))
  train, heldout = split(tasks)
  assert len(train) + len(heldout) == 200 and 5 < len(heldout) < 40
  assert not {t.question for t in train} & {t.question for t in heldout}
  assert split(tasks[::-1])[1] == heldout[::-1]


def procedural(seed=0, kinds=None, levels=None):
  return ProceduralPrompts(
    seed=seed,
    kinds=kinds or {'arithmetic': 2, 'modular': 1, 'counting': 1},
    levels=levels or {1: 1, 2: 3},
  )


def test_procedural_is_pure_in_seed_and_index():
  first, again, other = procedural(), procedural(), procedural(seed=1)
  tasks = [first.task(index) for index in range(40)]
  assert [again.task(index) for index in reversed(range(40))] == tasks[::-1]
  assert [other.task(index) for index in range(40)] != tasks
  assert len({task.prompt_id for task in tasks}) == 40


def test_procedural_mix_and_splits():
  source = procedural()
  tasks = [source.task(index) for index in range(800)]
  assert {split_of(task.question) for task in tasks} == {'train'}
  # Expected 400 arithmetic and 600 of level 2; standard deviations 14 and 12.
  assert abs(sum(task.info['kind'] == 'arithmetic' for task in tasks) - 400) < 60
  assert abs(sum(task.info['level'] == 2 for task in tasks) - 600) < 50
  assert not any(task.info['level'] > 2 for task in tasks)


def test_heldout_is_fixed_distinct_and_for_every_seed_the_same():
  heldout = procedural().heldout(40)
  assert heldout == procedural(seed=9).heldout(40)
  assert heldout[:10] == procedural().heldout(10)
  assert len({task.question for task in heldout}) == 40
  assert {split_of(task.question) for task in heldout} == {'heldout'}
  assert procedural().heldout(0) == []


@pytest.mark.parametrize(
  'arguments, match',
  [
    ({'kinds': {'geometry': 1}}, 'kinds.*geometry'),
    ({'levels': {5: 1}}, 'levels.*5'),
    ({'levels': {1: -1, 2: 1}}, 'levels'),
    ({'kinds': {'modular': 0}}, 'kinds'),
    ({'kinds': {'modular': float('nan')}}, 'kinds'),
  ],
)
def test_bad_mix(arguments, match):
  with pytest.raises(ValueError, match=match):
    procedural(**arguments)
