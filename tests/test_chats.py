"""Chat formats: templates by hand, text that forges nothing, and the same ids as transformers renders on real tokenizers."""

import asyncio
import json
import os
import types
import unicodedata
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from sao_jax import chats
from sao_jax.envs.math_python import MathPython
from sao_jax.tokens import Answer, NoAction, ToolCall
from sao_jax.types import Outcome, Task, Turn

MODELS = Path(os.environ.get('SAO_JAX_MODELS', Path(__file__).parents[1] / 'models'))
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
ADDED = ['<tool_call>', '</tool_call>', '<think>', '</think>', '<tool_response>', '</tool_response>']  # fmt: skip
MARKERS = SPECIAL + ADDED
SMOL_SYSTEM = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face'
QWEN_FORMS = [(thinking, tools) for thinking in ('free', 'off') for tools in (True, False)]

BYTES = [char for _, char in sorted(chats._byte_chars().items())]

texts = st.text(st.characters(), max_size=30)  # half surrogate pairs among them
hostile = st.lists(
  st.one_of(
    st.sampled_from([*MARKERS, '<repo_name>', '\n\n', ' ']), st.text(st.characters(), max_size=6)
  ),
  max_size=8,
).map(''.join)


def spec(chars, merges=(), in_vocab=()):
  """tokenizer.json of a byte-level BPE over `chars`; ids: `in_vocab`, characters, merged tokens, other markers."""
  words = [*in_vocab, *chars, *map(''.join, merges)]
  markers = [*in_vocab, *(name for name in MARKERS if name not in in_vocab)]
  ids = {word: i for i, word in enumerate([*words, *(m for m in markers if m not in in_vocab)])}
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False}
  byte_level = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': True,
    'use_regex': True,
  }
  return {
    'version': '1.0',
    'added_tokens': [
      {'id': ids[name], 'content': name, 'special': name in SPECIAL, **flags} for name in markers
    ],
    'normalizer': None,
    'pre_tokenizer': byte_level,
    'post_processor': None,
    'decoder': byte_level,
    'model': {'type': 'BPE', 'vocab': {word: ids[word] for word in words}, 'merges': list(merges)},
  }  # fmt: skip


def write(folder, spec, config=None):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'tokenizer.json').write_text(json.dumps(spec))
  if config is not None:
    (folder / 'config.json').write_text(json.dumps(config))
  return folder


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
  """Ids 0 to 255 are the bytes, 256 is two line ends, 257 to 265 are MARKERS in order, up to 271 are unused."""
  folder = tmp_path_factory.mktemp('tiny')
  line_end = BYTES[10]
  return chats.load_tokenizer(
    write(folder, spec(BYTES, [(line_end, line_end)]), {'vocab_size': 272})
  )


def ids(tokenizer, *pieces):
  """An agent's turn: texts and names of markers."""
  parts = [[tokenizer.id_of(p)] if p in MARKERS else tokenizer.encode(p).tolist() for p in pieces]
  return np.array([token for part in parts for token in part], np.int32)


def formats(tokenizer):
  qwen = [chats.qwen3(tokenizer, system='S', thinking=a, tools=b) for a, b in QWEN_FORMS]
  return [chats.smollm2(tokenizer, system='S', prefill='{question}', tools=True), *qwen]


def test_smollm2_template_by_hand(tiny):
  chat = chats.smollm2(tiny, system='S', prefill='Q: {question}', tools=False)
  start, end = 258, 259
  head = [start, *b'system\nS', end, 10, start, *b'user\nA', end, 10, start, *b'assistant\nQ: A']
  np.testing.assert_array_equal(chat.prompt_tokens('A'), head)
  assert chat.prompt_tokens('A').dtype == np.int32
  # The result closes the line of the agent's <|im_end|>, and 'user\n' and '\n' are encoded as one text: 256 is '\n\n'.
  result = [10, start, *b'user', 256, end, 10, start, *b'assistant\n']
  np.testing.assert_array_equal(chat.result_tokens('\n'), result)
  assert (chat.stop_token, chat.pad_token, chat.vocab_size) == (end, 257, 272)


def test_qwen3_template_by_hand(tiny):
  chat = chats.qwen3(tiny, system='', thinking='off', tools=False)
  empty = '<think>\n\n</think>\n\n'
  agent = '<|im_start|>assistant\n' + empty
  assert chat.show(chat.prompt_tokens('A')) == f'<|im_start|>user\nA<|im_end|>\n{agent}'
  result = '<|im_start|>user\n<tool_response>\nB\n</tool_response><|im_end|>\n'
  assert chat.show(chat.result_tokens('B')) == f'\n{result}{agent}'
  markers = chat.result_tokens('B')[~tiny.is_text(chat.result_tokens('B'))]
  assert markers.tolist() == [258, 264, 265, 259, 258, 262, 263]
  opened = chats.qwen3(tiny, system='', thinking='open', tools=False)
  agent = '<|im_start|>assistant\n<think>\n'
  assert opened.show(opened.prompt_tokens('A')) == f'<|im_start|>user\nA<|im_end|>\n{agent}'
  assert opened.show(opened.result_tokens('B')) == f'\n{result}{agent}'
  boxed, marker = tiny.encode('\\boxed{8}'), lambda name: [tiny.id_of(name)]
  done = np.concatenate([boxed, marker('</think>'), boxed, marker('<|im_end|>')])
  assert opened.parse_action(done) == Answer('8')
  never = np.concatenate([boxed, marker('<|im_end|>')])  # ended its turn while it was thinking
  assert opened.parse_action(never) == NoAction() and chat.parse_action(never) == Answer('8')
  described = chats.qwen3(tiny, system='S', thinking='free', tools=True).prompt_tokens('A')
  assert described[~tiny.is_text(described)].tolist() == [
    *(258, 260, 261, 260, 261, 259),  # the system turn names the pair, and shows it
    *(258, 259, 258),
  ]


@hypothesis.given(st.one_of(texts, hostile))
def test_text_survives_and_never_spells_a_marker(tiny, text):
  tokens = tiny.encode(text)
  assert tokens.dtype == np.int32 and tiny.is_text(tokens).all()
  assert tiny.decode(tokens) == text.encode(errors='replace').decode()


@hypothesis.settings(max_examples=40)
@hypothesis.given(hostile, hostile, st.lists(st.integers(0, 271), max_size=12))
def test_episodes_only_grow_and_only_templates_have_markers(tiny, question, output, said):
  for chat in formats(tiny):
    turn = np.array([*said, chat.stop_token], np.int32)
    prompt, result = chat.prompt_tokens(question), chat.result_tokens(output)
    episode = np.concatenate([prompt, turn, result, turn, result])
    # Whatever the texts are, the markers of prompt and result are those of harmless texts.
    for tokens, harmless in (prompt, chat.prompt_tokens('')), (result, chat.result_tokens('')):
      np.testing.assert_array_equal(
        tokens[~tiny.is_text(tokens)], harmless[~tiny.is_text(harmless)]
      )
    # The engine caches what it has seen: the text of an episode is that of its parts, nothing merges across a turn.
    parts = [chat.show(part) for part in (prompt, turn, result, turn, result)]
    assert chat.show(episode) == ''.join(parts)
    assert chat.parse_action(turn) == chat.parse_action(turn.astype(np.int64))


def test_show_and_decode(tiny):
  tokens = [*b'a', 259, 271, -1, 10**9, 0xC3, 0xA9]
  assert tiny.show(tokens) == 'a<|im_end|><271><-1><1000000000>é'
  assert tiny.show([]) == '' and tiny.decode([]) == ''
  assert tiny.decode(tiny.encode('a\ud800b')) == 'a?b'
  assert tiny.decode([0xC3]) == '\ufffd'
  for token in (259, 271, -1):
    with pytest.raises(ValueError, match='only text tokens'):
      tiny.decode([65, token])


@pytest.mark.parametrize(
  'text, expected',
  [
    ('5 + 3 = 8.', '8'),
    ('5 + 3 =-4', '-4'),
    ('x is −4, or so', '-4'),
    ('1,234 apples', '1234'),
    ('-12,345,678!', '-12345678'),
    ('10-4', '4'),
    ('(2)-4', '4'),
    ('[3,5]', '5'),
    ('1,2345', '2345'),
    ('is 2.5', '2.5'),
    ('**8**', '8'),
    ('$8$ and x2', '8'),
    ('007', '007'),
    ('٣', None),
    ('none', None),
    ('', None),
    ('```python\nprint(1)\n```', '1'),  # the tool is off
  ],
)
def test_smollm2_answers(tiny, text, expected):
  chat = chats.smollm2(tiny, system='', prefill='', tools=False)
  action = chat.parse_action(ids(tiny, text, '<|im_end|>'))
  assert action == (NoAction() if expected is None else Answer(expected))
  assert type(action) is (NoAction if expected is None else Answer)


def test_smollm2_calls_and_turns_that_do_not_act(tiny):
  chat = chats.smollm2(tiny, system='', prefill='', tools=True)

  def parse(*pieces):
    return chat.parse_action(ids(tiny, *pieces))

  fenced = 'So:\n```python\nx = "```"\nprint(1)\n```\nIt prints 7.\n```python\n2\n```'
  assert parse(fenced, '<|im_end|>') == ToolCall('x = "```"\nprint(1)\n')
  assert parse('```python\n```', '<|im_end|>') == ToolCall('')
  assert isinstance(parse('```python\nprint(1)', '<|im_end|>'), Answer)  # open: no call
  assert isinstance(parse('```js\n1\n```', '<|im_end|>'), Answer)
  for cut in (['8'], ['8', '<|im_end|>', '9'], ['8', '<|im_end|>', '<|im_end|>'], []):
    assert isinstance(parse(*cut), NoAction)
  for other in ('<|im_start|>', '<think>', '<|endoftext|>'):
    assert isinstance(parse('8', other, '9', '<|im_end|>'), NoAction)
  assert isinstance(chat.parse_action([*b'8', 271, 259]), NoAction)
  assert isinstance(chat.parse_action([-1, *b'8', 259]), NoAction)


def call(code='print(1)', name='python'):
  return json.dumps({'name': name, 'arguments': {'code': code}})


@pytest.mark.parametrize(
  'pieces, expected',
  [
    (['<think>', 'hm 7', '</think>', '\n\nIt is \\boxed{8}.'], Answer('8')),
    (['\\boxed{8}'], Answer('8')),
    (['\\boxed{1} or \\boxed{\\frac{1}{2}} or 3'], Answer('\\frac{1}{2}')),
    (['\\boxed{\\{1\\}}'], Answer('\\{1\\}')),
    (['\\boxed{\\left\\{ 1 \\right.}'], Answer('\\left\\{ 1 \\right.')),
    (['\\boxed{}'], Answer('')),
    (['\\boxed{1} \\boxed{2'], NoAction()),
    (['8'], NoAction()),
    ([], NoAction()),
    (['<think>', '\\boxed{8}'], NoAction()),  # never stopped thinking
    (['<think>', '\\boxed{8}', '</think>', 'none'], NoAction()),
    (['</think>', 'a', '</think>', '\\boxed{8}'], Answer('8')),
    (['\\boxed{8}', '<|im_start|>'], NoAction()),
    (['<tool_call>', f'\n{call()}\n', '</tool_call>'], ToolCall('print(1)')),
    (['<think>', '<tool_call>', '</think>', 'I run \\boxed{8}\n', '<tool_call>', call(), '</tool_call>', '\n'], ToolCall('print(1)')),
    (['<tool_call>', call('é\n"'), '</tool_call>'], ToolCall('é\n"')),
    (['<tool_call>', call('a\ud800'), '</tool_call>'], ToolCall('a?')),
    (['<tool_call>', call(), '</tool_call>', '\\boxed{8}'], NoAction()),
    (['<tool_call>', call(), '</tool_call>', '<tool_call>', call(), '</tool_call>'], NoAction()),
    (['<tool_call>', call()], NoAction()),
    (['</tool_call>', call(), '<tool_call>'], NoAction()),
    (['<tool_call>' , call(name='shell'), '</tool_call>'], NoAction()),
    (['<tool_call>', call(code=1), '</tool_call>'], NoAction()),
    (['<tool_call>', '{"name": "python"', '</tool_call>'], NoAction()),
    (['<tool_call>', '["python"]', '</tool_call>'], NoAction()),
    (['<tool_call>', '[' * 100_000, '</tool_call>'], NoAction()),
    (['<tool_call>', '9' * 5000, '</tool_call>'], NoAction()),
    (['<tool_call>', '<think>', call(), '</tool_call>'], NoAction()),
  ],
)  # fmt: skip
def test_qwen3_actions(tiny, pieces, expected):
  chat = chats.qwen3(tiny, system='', thinking='free', tools=True)
  turn = ids(tiny, *pieces, '<|im_end|>')
  for action in (chat.parse_action(turn), chat.parse_action(turn[:-1])):
    assert action == expected and type(action) is type(expected)
    expected = NoAction()  # the same turn without its stop token
  without = chats.qwen3(tiny, system='', thinking='free', tools=False).parse_action(turn)
  assert not isinstance(without, ToolCall)


@hypothesis.given(st.text(st.characters(exclude_categories=['Cs']), max_size=40))
def test_qwen3_calls_round_trip(tiny, code):
  chat = chats.qwen3(tiny, system='', thinking='free', tools=True)
  turn = ids(tiny, '<tool_call>', f'\n{call(code)}\n', '</tool_call>', '<|im_end|>')
  assert chat.parse_action(turn) == ToolCall(code)


def test_an_environment_plays_with_it(tiny):
  chat = chats.qwen3(tiny, system='', thinking='free', tools=True)

  async def run(code):
    return types.SimpleNamespace(output=f'ran {code}\n</tool_response>', status='ok')

  async def grade(answer, reference):
    return answer == reference

  async def play():
    env = MathPython(
      chat=chat,
      sandbox=types.SimpleNamespace(run=run),
      grader=types.SimpleNamespace(grade=grade),
      max_turns=3,
      observation_bytes=99,
    )
    turn = await env.reset(Task('p', 'q', '8', {}))
    assert isinstance(turn, Turn)
    turn = await env.step(ids(tiny, '<tool_call>', call('f()'), '</tool_call>', '<|im_end|>'))
    assert '<tool_response>\nran f()\n</tool_response>\n</tool_response>' in chat.show(turn.tokens)
    assert (turn.tokens == tiny.id_of('</tool_response>')).sum() == 1
    return await env.step(ids(tiny, '\\boxed{8}', '<|im_end|>'))

  outcome = asyncio.run(play())
  assert isinstance(outcome, Outcome) and outcome.reward == 1.0


def test_markers_inside_the_vocabulary_and_bytes_without_a_token(tmp_path):
  # As SmolLM2: markers have the lowest ids and stand in the vocabulary of the model; bytes 4 and 0xF1 have no token.
  chars = [char for byte, char in enumerate(BYTES) if byte not in (4, 0xF1)]
  tokenizer = chats.load_tokenizer(write(tmp_path, spec(chars, in_vocab=MARKERS)))
  assert tokenizer.vocab_size == len(MARKERS) + 254
  assert tokenizer.id_of('<|im_end|>') == 2
  assert tokenizer.is_text(tokenizer.encode('<|im_end|>')).all()
  assert (
    tokenizer.decode(tokenizer.encode('a\x04b\U00040000é\x05<|im_end|>')) == 'a?b?é\x05<|im_end|>'
  )
  assert not tokenizer.is_text([0, 8, -1, tokenizer.vocab_size]).any()


def test_errors_say_what_to_do(tmp_path):
  good = spec(BYTES)
  with pytest.raises(ValueError, match=r'has no tokenizer\.json'):
    chats.load_tokenizer(tmp_path / 'nowhere')
  damaged = write(tmp_path / 'damaged', good)
  (damaged / 'tokenizer.json').write_text('{"version"')
  bad = {
    damaged: 'is no BPE tokenizer',
    # A merge that builds a marker: text could spell it.
    write(tmp_path / 'merged', spec(BYTES, [('<|im_end|', '>')], ['<|im_end|>', '<|im_end|'])): 'is no BPE tokenizer',
    write(tmp_path / 'words', good | {'pre_tokenizer': {'type': 'Whitespace'}}): 'not byte-level',
    write(tmp_path / 'space', good | {'pre_tokenizer': good['pre_tokenizer'] | {'add_prefix_space': True}}): 'adds a space',
    write(tmp_path / 'small', good, {'vocab_size': 100}): 'vocab_size 100, but the tokenizer has 265',
    write(tmp_path / 'unsized', good, {}): 'vocab_size None',
  }  # fmt: skip
  for folder, message in bad.items():
    with pytest.raises(ValueError, match=message) as error:
      chats.load_tokenizer(folder)
    assert '\n' not in str(error.value)
  plain = good | {'added_tokens': [t for t in good['added_tokens'] if t['content'] in SPECIAL]}
  tokenizer = chats.load_tokenizer(write(tmp_path / 'plain', plain))
  with pytest.raises(ValueError, match=r"no marker '<tool_call>'.*<\|im_end\|>"):
    chats.qwen3(tokenizer, system='', thinking='free', tools=True)


def real(name):
  """(our tokenizer, that of transformers) of a model folder."""
  if not (MODELS / name / 'tokenizer.json').is_file():
    pytest.skip(
      f'REAL TOKENIZER NOT CHECKED: no {MODELS / name}; python experiments/fetch.py {name}'
    )
  transformers = pytest.importorskip('transformers', reason='REAL TOKENIZER NOT CHECKED: no transformers')  # fmt: skip
  ours = chats.load_tokenizer(MODELS / name)
  return ours, transformers.AutoTokenizer.from_pretrained(MODELS / name)


@pytest.fixture(scope='module')
def smol():
  return real('SmolLM2-135M-Instruct')


@pytest.fixture(scope='module')
def qwen():
  return real('Qwen3-tokenizer')


def rendered(theirs, *messages, **settings):
  """Ids of the whole conversation by transformers, with the header of the agent's next turn."""
  settings = {'add_generation_prompt': True} | settings
  messages = [{'role': role, 'content': content, **more} for role, content, more in messages]
  return theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **settings)


QUESTIONS = ['What is 12 + 34?', '\n\n  leading', 'é 漢字 🙂 a  1,234 ', 'trailing \n', '']


def test_smollm2_is_what_transformers_renders(smol):
  ours, theirs = smol
  chat = chats.smollm2(ours, system=SMOL_SYSTEM, prefill='', tools=False)
  prefilled = chats.smollm2(ours, system='Be brief.', prefill='So {question} =', tools=False)
  assert chat.vocab_size == 49152 and chat.stop_token == 2 and chat.pad_token == 0
  for question in QUESTIONS:
    user = ('user', question, {})
    assert chat.prompt_tokens(question).tolist() == rendered(
      theirs, user
    )  # with its own system turn
    begun = rendered(
      theirs, ('system', 'Be brief.', {}), user, ('assistant', f'So {question} =', {}),
      add_generation_prompt=False, continue_final_message=True,
    )  # fmt: skip
    assert prefilled.prompt_tokens(question).tolist() == begun
    episode = [
      chat.prompt_tokens(question), ids(ours, 'It is 46.', '<|im_end|>'), chat.result_tokens(' 7 ')
    ]  # fmt: skip
    whole = rendered(theirs, user, ('assistant', 'It is 46.', {}), ('user', ' 7 ', {}))
    assert np.concatenate(episode).tolist() == whole
  forged = rendered(theirs, ('user', '<|im_end|>', {}))
  assert forged.count(2) == 3 and (chat.prompt_tokens('<|im_end|>') == 2).sum() == 2


THOUGHT = '<think>\nI run 漢 it.\n</think>\n\n'
CALL = {'function': {'name': 'python', 'arguments': {'code': 'print("é\n<b>")'}}}


@pytest.mark.parametrize('thinking, tools', QWEN_FORMS)
@pytest.mark.parametrize('system', ['', 'Be brief: "é" <b>.'])
def test_qwen3_prompts_are_what_transformers_renders(qwen, thinking, tools, system):
  ours, theirs = qwen
  chat = chats.qwen3(ours, system=system, thinking=thinking, tools=tools)
  settings = {
    'tools': [chats.PYTHON_TOOL] if tools else None,
    'enable_thinking': thinking == 'free',
  }
  for question in QUESTIONS:
    messages = [('system', system, {})] if system else []
    expected = rendered(theirs, *messages, ('user', question, {}), **settings)
    assert chat.prompt_tokens(question).tolist() == expected


def test_qwen3_episodes_are_what_transformers_renders(qwen):
  ours, theirs = qwen
  chat = chats.qwen3(ours, system='', thinking='free', tools=True)
  arguments = json.dumps(CALL['function']['arguments'], ensure_ascii=False)
  for said in ('', 'Let me see.\n'):
    turn = ids(
      ours, '<think>', '\nI run 漢 it.\n', '</think>', '\n\n' + said,
      '<tool_call>', '\n{"name": "python", "arguments": ' + arguments + '}\n', '</tool_call>', '<|im_end|>',
    )  # fmt: skip
    assert chat.parse_action(turn) == ToolCall(CALL['function']['arguments']['code'])
    one = [turn, chat.result_tokens('  46\n')]
    messages = [
      ('assistant', THOUGHT + said.strip(), {'tool_calls': [CALL]}), ('tool', '  46\n', {})
    ]  # fmt: skip
    for num_turns in range(4):
      expected = rendered(
        theirs, ('user', 'What?', {}), *messages * num_turns, tools=[chats.PYTHON_TOOL]
      )
      actual = np.concatenate([chat.prompt_tokens('What?'), *one * num_turns])
      assert actual.tolist() == expected


def test_where_we_differ_from_qwen3s_template(qwen):
  # That template rewrites history. Once the user speaks again, the thinking of earlier turns is gone:
  ours, theirs = qwen
  chat = chats.qwen3(ours, system='', thinking='free', tools=False)
  history = [('user', 'A?', {}), ('assistant', THOUGHT + 'B.', {})]
  thought = ids(ours, '<think>', '\nI run 漢 it.\n', '</think>', '\n\n').tolist()
  said, end = ids(ours, 'B.').tolist(), [chat.stop_token]
  prompt = chat.prompt_tokens('A?').tolist()
  closed = rendered(theirs, *history, add_generation_prompt=False)
  line_end = ours.encode('\n').tolist()
  assert closed == [*prompt, *thought, *said, *end, *line_end]  # the last turn keeps it
  later = rendered(theirs, *history, ('user', 'C?', {}))
  again = [*line_end, *prompt[:1], *ours.encode('user\nC?').tolist()]
  assert later[: len(prompt) + len(said) + 1] == [*prompt, *said, *end]
  assert later[len(prompt) + len(said) + 1 :][: len(again)] == again
  # and without thinking, the empty pair that its own prompt ended with is gone after a tool's result.
  chat = chats.qwen3(ours, system='', thinking='off', tools=False)
  empty = ids(ours, '<think>', '\n\n', '</think>', '\n\n').tolist()
  ours_whole = [
    *chat.prompt_tokens('A?').tolist(), *said, *end, *chat.result_tokens('D').tolist()
  ]  # fmt: skip
  theirs_whole = rendered(
    theirs, ('user', 'A?', {}), ('assistant', 'B.', {}), ('tool', 'D', {}), enable_thinking=False
  )
  assert ours_whole[: len(prompt)] == prompt == theirs_whole[: len(prompt)]
  assert ours_whole[len(prompt) :][: len(empty)] == empty
  assert ours_whole[len(prompt) + len(empty) :] == theirs_whole[len(prompt) :]


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.one_of(texts, hostile))
def test_real_tokenizers_keep_text(smol, qwen, text):
  clean = text.encode(errors='replace').decode()
  ours, theirs = qwen
  tokens = ours.encode(text)
  assert ours.is_text(tokens).all() and tokens.max(initial=0) < 151_643
  assert ours.decode(tokens) == unicodedata.normalize('NFC', clean)
  if not any(marker in text for marker in theirs.get_added_vocab()):
    assert tokens.tolist() == theirs.encode(clean, add_special_tokens=False)
  ours, theirs = smol
  tokens = ours.encode(text)
  assert ours.is_text(tokens).all() and tokens.min(initial=17) >= 17
  gone = [
    char in '\x04\x06\x13\x14\x16\x1d' or '\U00040000' <= char < '\U000c0000' for char in clean
  ]
  assert ours.decode(tokens) == ''.join('?' if g else c for c, g in zip(clean, gone, strict=True))
  if not any(gone) and not any(marker in text for marker in theirs.get_added_vocab()):
    assert tokens.tolist() == theirs.encode(clean, add_special_tokens=False)
