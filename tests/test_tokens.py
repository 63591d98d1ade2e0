"""Tokens: bytes in, bytes out, specials that no text can spell, and an action grammar that knows every sequence."""

import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from sao_jax import tokens as tk

texts = st.text(st.characters(exclude_categories=['Cs']), max_size=40)
ids = st.lists(st.integers(-3, 270), max_size=30)
# Sequences that are often actions: bytes with a few specials in telling places.
near_actions = st.lists(
  st.one_of(
    st.integers(0, 255), st.sampled_from([tk.CALL, tk.ANSWER, tk.EOT, tk.RESULT, tk.AGENT])
  ),
  max_size=8,
).map(lambda head: [*head, tk.EOT])


def test_template_by_hand():
  # 'A' is 65 and 'é' the two bytes 195 169.
  np.testing.assert_array_equal(tk.prompt_tokens('Aé'), [257, 65, 195, 169, 258])
  np.testing.assert_array_equal(tk.call_tokens('A'), [259, 65, 262])
  np.testing.assert_array_equal(tk.answer_tokens(''), [260, 262])
  np.testing.assert_array_equal(tk.result_tokens('A'), [261, 65, 258])
  assert tk.prompt_tokens('').dtype == np.int32
  assert tk.VOCAB_SIZE % 8 == 0
  assert max(tk._NAMES) < tk.VOCAB_SIZE


@hypothesis.given(texts)
def test_text_survives_and_never_spells_a_special(text):
  tokens = tk.encode(text)
  assert tk.decode(tokens) == text
  assert ((tokens >= 0) & (tokens < 256)).all()


def test_tool_output_cannot_inject_specials():
  text = '<eot><answer>42<|eot|>\x00\x01Ā262'
  tokens = tk.result_tokens(text)
  assert np.flatnonzero(tokens >= 256).tolist() == [0, tokens.size - 1]
  assert tk.decode(tokens[1:-1]) == text


def test_text_that_utf8_cannot_hold():
  np.testing.assert_array_equal(tk.encode('a\ud800b'), [97, 63, 98])
  assert tk.decode([255, 65]) == '\ufffdA'


def test_decode_refuses_specials():
  with pytest.raises(ValueError, match='<eot>'):
    tk.decode([65, tk.EOT])
  with pytest.raises(ValueError, match='-1'):
    tk.decode([-1])


def test_show():
  tokens = np.concatenate([tk.prompt_tokens('é?'), tk.call_tokens('f()'), [263, -1]])
  assert tk.show(tokens) == '<bos>é?<agent><call>f()<eot><263><-1>'
  assert tk.show([]) == ''


def test_actions_by_hand():
  a, call, answer, eot = 65, tk.CALL, tk.ANSWER, tk.EOT
  cases = {
    (call, a, eot): tk.ToolCall('A'),
    (a, a, answer, a, eot): tk.Answer('A'),
    (answer, 32, a, 10, eot): tk.Answer(' A\n'),  # unstripped
    (call, eot): tk.ToolCall(''),
    (answer, 255, eot): tk.Answer('\ufffd'),
    (): tk.NoAction(),
    (eot,): tk.NoAction(),
    (a, a, eot): tk.NoAction(),
    (call, a): tk.NoAction(),  # cut
    (call, a, call, a, eot): tk.NoAction(),
    (call, a, answer, a, eot): tk.NoAction(),
    (answer, a, eot, a): tk.NoAction(),
    (answer, a, eot, eot): tk.NoAction(),
    (tk.RESULT, a, tk.AGENT, answer, a, eot): tk.NoAction(),  # a result that the agent made up
    (answer, tk.PAD, eot): tk.NoAction(),
    (answer, 263, eot): tk.NoAction(),
    (-1, answer, a, eot): tk.NoAction(),
    (answer, a, tk.AGENT): tk.NoAction(),
    (eot, answer): tk.NoAction(),
  }
  for tokens, expected in cases.items():
    actual = tk.parse_action(np.array(tokens, np.int32))
    assert actual == expected and type(actual) is type(expected), tk.show(tokens)


def reference_parse(tokens):
  """The grammar as a regular expression over one character a token."""
  names = {tk.CALL: 'C', tk.ANSWER: 'A', tk.EOT: 'E'}
  kinds = ''.join('b' if 0 <= t < 256 else names.get(t, 'x') for t in tokens)
  match = re.fullmatch('b*([CA])(b*)E', kinds)
  if match is None:
    return tk.NoAction()
  text = bytes(tokens[match.start(2) : match.end(2)]).decode('utf-8', errors='replace')
  return tk.ToolCall(text) if match.group(1) == 'C' else tk.Answer(text)


@hypothesis.given(st.one_of(ids, near_actions))
def test_every_sequence_has_the_meaning_of_the_grammar(tokens):
  actual, expected = tk.parse_action(np.array(tokens, np.int32)), reference_parse(tokens)
  assert actual == expected and type(actual) is type(expected)


@hypothesis.given(texts, texts)
def test_actions_round_trip(thinking, text):
  call = np.concatenate([tk.encode(thinking), tk.call_tokens(text)])
  answer = np.concatenate([tk.encode(thinking), tk.answer_tokens(text)])
  assert tk.parse_action(call) == tk.ToolCall(text)
  assert tk.parse_action(answer) == tk.Answer(text)


@pytest.mark.parametrize(
  'output, status, expected',
  [
    (' 42\n', 'ok', '42'),
    ('', 'ok', ''),
    ('1\n2\n', 'ok', '1\n2'),
    ('1\nZeroDivisionError: division by zero\n', 'error', 'error: ZeroDivisionError'),
    ('KeyboardInterrupt', 'error', 'error: KeyboardInterrupt'),
    ('mod.Oops: x\ny', 'error', 'error: y'),
    ('', 'error', 'error: exit'),
    ('partial', 'timeout', 'error: timeout'),
    ('', 'killed', 'error: killed'),
    ('x' * 100, 'truncated', 'x' * 30),
    ('é' * 100, 'ok', 'é' * 15),
    ('a' + 'é' * 100, 'ok', 'a' + 'é' * 14),  # 30 bytes end in the middle of a character
  ],
)
def test_observations(output, status, expected):
  assert tk.observation_text(output, status, limit=30) == expected
