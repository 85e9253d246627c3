"""Tests of tokenizer."""
import base64
import functools
import io
import itertools
import json
import os
import random
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from common import (
    CHAT_TEMPLATES,
    DEEPSEEK_SPLIT,
    PREP_WORDS,
    TOOLS,
    prep_awkward,
    prep_gpt2,
    prep_ids,
    prep_patterns,
    prep_run,
    prep_toy_bpe,
    tok_oracles,
    tok_texts,
)

import hub
import prepare
import tokenizer as flat_tokenizer
from test_model import tiny
from tokenizer import (
    BPE_SPECIAL,
    CHATML,
    EOT,
    WORD_PATTERN,
    ByteTokenizer,
    JsonTokenizer,
    TiktokenTokenizer,
    WordSplitter,
    count_words,
    json_tokenizer,
    make_tokenizer,
    pieces,
    tokenizer_from_state,
    train_bpe,
)

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# tokenizers -------------------------------------------------------------------------------------------------
def test_tokenizer_special_tokens_and_odd_text():
    for tok in make_tokenizer('byte'), make_tokenizer('char', 'abc é🙂', True), prep_toy_bpe():
        assert tok.encode(EOT) == [tok.eot] == [tok.special[EOT]] == [*tok.stop_tokens]
        assert tok.decode([tok.n_vocab + 5, *tok.encode('abc'), 10**6, tok.eot]) == f'abc{EOT}'
        if tok.name != 'char':
            assert tok.decode(tok.encode('a\ud800b')) == 'a\ufffdb'
            ids = tok.encode('🙂')
            assert tok.decode_bytes(ids) == '🙂'.encode() and tok.decode(ids[:2]) == '\ufffd'
        with pytest.raises(ValueError, match='no chat template: give a plain prompt'):
            tok.chat(CHATS[0])
    char = make_tokenizer('char', ' dehlorw')
    assert (char.eot, char.stop_tokens, char.n_vocab) == (None, (), 8)
    assert char.encode('hello') == [3, 2, 4, 4, 5]
    with pytest.raises(ValueError, match=r"prompt has '\?' \(not in this char vocabulary of"):
        char.encode('who?')


@pytest.mark.parametrize('name', ['byte', 'char', 'toy', 'gpt2', 'json'])
def test_decoded_is_what_was_encoded(name, monkeypatch):
    """Any text, whole and token by token, with the texts of special tokens as such or as plain text, before
    and after a checkpoint."""
    rng, marks = random.Random(0), [EOT, EOT[:5], '|>', ' ', '\n', 'ab']
    texts = [''.join(rng.choice([*marks, chr(rng.randrange(0xd800)), chr(rng.randrange(0xe000, 0x110000))])
                     for _ in range(rng.randrange(30))) for _ in range(200)]
    tok = {'byte': ByteTokenizer, 'toy': prep_toy_bpe, 'gpt2': lambda: prep_gpt2(monkeypatch),
           'char': lambda: make_tokenizer('char', [EOT, *texts], True),
           'json': lambda: JsonTokenizer(tok_oracles()['gpt2'].to_str())}[name]()
    file = io.BytesIO()
    torch.save({'tokenizer': tok.state()}, file)
    file.seek(0)
    again = tokenizer_from_state(torch.load(file, weights_only=True)['tokenizer'])
    assert again.state() == json.loads(json.dumps(tok.state())) == tok.state()
    for attribute in ('name', 'n_vocab', 'eot', 'special'):
        assert getattr(again, attribute) == getattr(tok, attribute)
    for text in texts:
        for allow in (True, False):
            ids = tok.encode(text, allow_special=allow)
            assert again.encode(text, allow) == ids and all(type(i) is int for i in ids)
            assert again.decode(ids) == text and max(ids, default=0) < tok.n_vocab
            assert b''.join(tok.decode_bytes([i]) for i in ids) == text.encode()
            assert ids.count(tok.eot) == text.count(EOT) * allow


def oracle(name):
    if name not in tok_oracles():
        pytest.skip('its file is not at hand')
    return tok_oracles()[name]


KINDS = ['gpt2', 'gpt2 prefix', 'qwen', 'llama2', 'mistral', 'added', 'minimind']


@pytest.mark.parametrize('name', KINDS)
def test_tokenizer_json_gives_the_ids_of_transformers(name):
    """As text comes, with special tokens in it, and with these as plain text; and back, token by token."""
    library, rng, mixed = oracle(name), random.Random(1), ''.join(tok_texts())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library)
    ours = tokenizer_from_state(JsonTokenizer(library.to_str()).state())
    assert ours.n_vocab == library.get_vocab_size() == len(theirs) and ours.to_json() == library.to_str()
    parts = [mixed[a:a + rng.randrange(1, 120)] for a in (rng.randrange(len(mixed)) for _ in range(100))]
    marks = [token.content for token in library.get_added_tokens_decoder().values()][:5]
    parts += [mark + part + marks[-1] + ' ' + mark for mark in marks for part in parts[:6]]
    parts += ['', ' ', '\n', 'a', ' a', '  a  ', 'hello  world <|x|> <|y|>  z word words', '<s> x </s>',
              mixed]
    for part in parts:
        assert ours.encode(part) == theirs(part)['input_ids'], repr(part[:80])
        plain = theirs(part, add_special_tokens=False, split_special_tokens=True)['input_ids']
        assert ours.encode_array(part).tolist() == plain, repr(part[:80])
    assert ours.encode('a\ud800b') == ours.encode('a\ufffdb')
    for part in parts[:50]:  # and back; a prefix that encoding puts in front is text
        ids = ours.encode(part)
        back = ours.decode(ids)
        assert b''.join(ours.decode_bytes([i]) for i in ids) == back.encode()
        back = back.removeprefix('<s>')
        same = part if name != 'qwen' else unicodedata.normalize('NFC', part)
        assert back in (same, ' ' + same) or name == 'added', (part, back)


def test_tokenizer_json_of_other_kinds():
    """Unigram models, gaps in the ids, truncation and padding that are set in the file, special names."""
    tk = pytest.importorskip('tokenizers')
    pieces = [('<unk>', 0.0), ('▁', -2.0), ('▁a', -1.0), ('b', -1.5), ('▁ab', -1.2), ('<0x0A>', -9.0)]
    library = tk.Tokenizer(tk.models.Unigram(pieces, 0, True))
    library.pre_tokenizer, library.decoder = tk.pre_tokenizers.Metaspace(), tk.decoders.Metaspace()
    ours = JsonTokenizer(library.to_str())
    for text in ('ab a b', 'a\nb', ' ab'):
        assert ours.encode(text) == library.encode(text).ids
    assert ours.decode(ours.encode('ab b')) == ' ab b' and ours.eot is None
    spec = json.loads(tok_oracles()['gpt2'].to_str())
    spec['added_tokens'] += [{**spec['added_tokens'][0], 'id': 1101, 'content': '<|last|>'}]
    spec['model']['vocab']['zzzz'] = 3000
    spec['truncation'] = {'direction': 'Right', 'max_length': 3, 'strategy': 'LongestFirst', 'stride': 0}
    spec['padding'] = {'strategy': {'Fixed': 9}, 'direction': 'Right', 'pad_to_multiple_of': None,
                       'pad_id': 0, 'pad_type_id': 0, 'pad_token': '!'}
    ours = JsonTokenizer(json.dumps(spec), {'eos_token': {'content': '<|last|>'}})
    assert ours.n_vocab == 3001 > len(ours.tokens) and ours.eot == ours.special['<|last|>']
    text = 'more than three tokens, no padding'
    assert ours.encode(text) == tok_oracles()['gpt2'].encode(text).ids
    assert JsonTokenizer(json.dumps(spec)).eot == ours.special[EOT]


@pytest.mark.parametrize('name', KINDS)
def test_tokenizer_json_in_pieces_is_as_in_one_piece(name, monkeypatch):
    """Documents are cut only where the ids stay those of the whole; where none such is found, not at all."""
    ours = JsonTokenizer(oracle(name).to_str())
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 500)
    for text in (tok_texts()[0][:9000], ' ' + tok_texts()[4][40_000:46_000], prep_awkward(900)):
        parts = [part for part, _ in pieces([text[:4000], text[4000:]], ours)]
        ids = np.concatenate([ours.encode_array(part) for part in parts])
        assert ''.join(parts) == text and ids.tolist() == ours.encode_array(text).tolist()
        assert len(parts) == 1 if name == 'llama2' else len(parts) > 3  # it puts a space before every text


@pytest.mark.parametrize('name', ['byte', 'char', 'gpt2', 'toy', 'bpe', 'cl100k_base', 'o200k_base'])
def test_exported_tokenizers_encode_the_same(name, monkeypatch):
    """cl100k_base and o200k_base: their patterns, with a few merges."""
    tk = pytest.importorskip('tokenizers')
    if name == 'gpt2':
        prep_gpt2(monkeypatch)
    rng, text = random.Random(1), tok_texts()[0][:30000] + tok_texts()[2][:500]
    parts = [text, text[5000:6000], '12' * 50, '', 'abc', 'a<|im_start|>b<|reserved_0|>\n']
    if name == 'bpe':
        ours = bpe_of(''.join(part[:20_000] for part in tok_texts()) + prep_awkward(3000), 1500)
        assert ours.n_vocab == 1500
        parts += [prep_awkward(40, seed) for seed in range(100)] + [part[:3000] for part in tok_texts()]
        parts += [''.join(chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x110000)]))
                          for _ in range(30)) for _ in range(100)]
    elif name.endswith('_base') or name == 'toy':
        ours = prep_toy_bpe(prep_patterns().get(name, PREP_WORDS))
    else:
        ours = make_tokenizer(name, [*parts, EOT], True)
    theirs = tk.Tokenizer.from_str(ours.to_json())
    for part in [*parts, f'a{EOT}b']:
        ids = ours.encode(part)
        assert theirs.encode(part).ids == ids and theirs.decode(ids, skip_special_tokens=False) == part
    again = JsonTokenizer(ours.to_json())
    assert (again.n_vocab, again.special, again.eot) == (ours.n_vocab, ours.special, ours.eot)
    if name == 'toy':  # a token that no merge of two makes, as some tables have
        ranks = ours.ranks + f'{base64.b64encode(b"xyz").decode()} {ours.n_vocab}\n'
        ours = TiktokenTokenizer('toy', ours.pattern, ours.special, ranks)
        assert ours.encode('xyz xyz') == [ours.n_vocab - 1, *b' xyz']
        assert tk.Tokenizer.from_str(ours.to_json()).encode('xyz xyz').ids == ours.encode('xyz xyz')


# the rules of published tokenizers --------------------------------------------------------------------------
def split_json(pattern, kind='Regex', behavior='Isolated'):
    return {'type': 'Split', 'pattern': {kind: pattern}, 'behavior': behavior, 'invert': False}


def level_json(use_regex=False):
    return {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': use_regex}


def cased_words(digits, endings=''):
    """The pattern of o200k_base and Tekken."""
    upper, lower = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
    first = r'[^\r\n\p{L}\p{N}]?'
    return (f'{first}{upper}*{lower}+{endings}|{first}{upper}+{lower}*{endings}|{digits}'
            r'| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+')


SPACES = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '▁'}
NFC, PREPEND = {'type': 'NFC'}, {'type': 'Prepend', 'prepend': '▁'}
RULES = {
    # name: (normalizers, pre-tokenizers, the token that is put before a text, end of text, further special
    # tokens, other tokens that are matched in any text, more of tokenizer_config.json)
    'gpt2': ([], [level_json(True)], '', EOT, [], [], {'bos_token': EOT}),
    'gpt-neox': ([NFC], [level_json(True)], '', EOT, ['<|padding|>'], [' ' * n for n in range(24, 1, -1)],
                 {'bos_token': EOT, 'add_bos_token': False}),
    'llama3': ([], [split_json(WORD_PATTERN), level_json()], '<|begin_of_text|>', '<|end_of_text|>',
               ['<|eot_id|>'], [], {'bos_token': '<|begin_of_text|>'}),
    'qwen3': ([NFC], [split_json(WORD_PATTERN.replace('{1,3}', '')), level_json()], '', EOT,
              ['<|im_start|>', '<|im_end|>'], ['<tool_call>', '</tool_call>', '<think>', '</think>'],
              {'add_bos_token': False, 'bos_token': None}),
    'gpt-oss': ([], [split_json(cased_words(r'\p{N}{1,3}', "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")), level_json()],
                '', '<|return|>', [EOT, '<|channel|>'], [], {'bos_token': '<|startoftext|>'}),
    'tekken': ([], [split_json(cased_words(r'\p{N}')), level_json()], '<s>', '</s>', ['[INST]', '[/INST]'],
               [], {'bos_token': '<s>'}),
    'deepseek-v3': ([], [split_json(r'\p{N}{1,3}'), split_json('[一-龥぀-ゟ゠-ヿ]+'),
                         split_json(DEEPSEEK_SPLIT), level_json()], '', '<｜end▁of▁sentence｜>',
                    ['<｜User｜>'], [],
                    {'bos_token': {'__type': 'AddedToken', 'content': '<｜begin▁of▁sentence｜>'},
                     'add_bos_token': True}),
    'falcon': ([], [{'type': 'Punctuation', 'behavior': 'Contiguous'}, level_json(True),
                    {'type': 'Digits', 'individual_digits': False}, split_json('[0-9][0-9][0-9]')], '', EOT,
               ['>>TITLE<<'], [], {}),
    'gemma': ([SPACES], [split_json(' ', 'String', 'MergedWithPrevious')], '<bos>', '<eos>',
              ['<start_of_turn>'], ['\n', '\n\n', '▁▁', '▁▁▁▁'],
              {'bos_token': '<bos>', 'add_bos_token': True}),
    'llama2': ([PREPEND, SPACES], [], '<s>', '</s>', [], [], {'bos_token': '<s>', 'add_bos_token': True}),
}
AWKWARD = [
    'Plain words, as they come.', '  two spaces, and more    at the end   ', ' ', '\n', '', '\n\n\n',
    '\t\tx\t', 'line\r\nline\r\rline\n \n\t\n  end\n', "It's WE'LL they'Ve I'D don't\u2019s",
    '1 12 123 1234 12345678 3.14', 'x1y22z333 v2.0 ½ ² ⅷ １２３ ٣٤',
    'héllo e\u0301a\u0308 \u1e9b\u0323 ﬁ ǅ',
    '中文文本，没有空格。日本語カタカナ 한국어', 'नमस्ते مرحبا שלום Привет',
    '🙂🙃 👩\u200d👩\u200d👧 🇩🇪 ✌🏽',
    'a\u00a0b\u3000c\u2028d\u200be\ufefff', 'nul\0 bell\a esc\x1b del\x7f\x80', '▁under▁▁score _x__y ▁',
    'if x:\n        return {"a": [1, 2]}  # done\n\n\n', '((())) !!! ?!... --- //// \\n <> >>',
    'ÀÉ CamelCase SHOUT iPhone ΣΑΣ', 'the <think>hm</think> of <tool_call>', 'a <0x0A> and <unk> and Ġ',
    'prepared unprepared prepared', 'x' * 70 + ' ' * 50 + 'y']


@functools.cache
def published(name):
    """(tokenizer.json, tokenizer_config.json) with a family's rules and a small vocabulary, as dicts. Merges
    are learnt across words, so that only the rules keep words apart; 'Ġprepared' is made by none."""
    normalizers, pre_tokenizers, start, end, special, others, config = RULES[name]
    pieces = not any(step['type'] == 'ByteLevel' for step in pre_tokenizers)
    spec = json.loads((tok_oracles()['llama2'] if pieces else merged_bytes()).to_str())
    vocab = spec['model']['vocab']
    if not pieces:
        vocab['Ġprepared'] = len(vocab)
    bos = config.get('bos_token') or EOT
    marks = [start, end, bos['content'] if isinstance(bos, dict) else bos, *special]
    for token in filter(None, dict.fromkeys([*marks, *others])):
        vocab.setdefault(token, len(vocab))
    flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
    spec['added_tokens'] = [
        {'id': i, 'content': token, **flags, 'special': token in marks, 'rstrip': token in special and pieces}
        for token, i in vocab.items() if token in (*marks, *others, *(['<unk>'] * pieces))]
    spec['normalizer'] = {'type': 'Sequence', 'normalizers': normalizers}
    spec['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': pre_tokenizers} if pre_tokenizers else None
    before = [{'SpecialToken': {'id': start, 'type_id': 0}}] * bool(start)
    text = [[{'Sequence': {'id': which, 'type_id': 0}}] for which in 'AB']
    spec['post_processor'] = {
        'type': 'TemplateProcessing', 'single': before + text[0], 'pair': before + text[0] + text[1],
        'special_tokens': {start: {'id': start, 'ids': [vocab[start]], 'tokens': [start]}} if start else {}}
    spec['model']['ignore_merges'] = name in ('llama3', 'gpt-oss', 'tekken')
    return spec, {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': end, **config}


@functools.cache
def merged_bytes():
    """A byte-level BPE that has learnt from lines, not from words."""
    tk = pytest.importorskip('tokenizers')
    library = tk.Tokenizer(tk.models.BPE())
    library.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tk.decoders.ByteLevel()
    library.train_from_iterator(
        [*AWKWARD * 20, *tok_texts()[0].splitlines()[:1500], *tok_texts()[3].split(' ', 300)],
        tk.trainers.BpeTrainer(vocab_size=1500, initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
                               show_progress=False))
    return library


@pytest.mark.parametrize('name', RULES)
def test_bins_have_what_a_published_tokenizer_makes_of_a_text(name, tmp_path, monkeypatch):
    """Whole documents and pieces of them, special tokens as text and as tokens, between what transformers
    puts before a text and the end of text; and back to the text, where the library itself finds back."""
    tk = pytest.importorskip('tokenizers')
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 200)
    spec, config = published(name)
    for file, content in ('tokenizer.json', spec), ('tokenizer_config.json', config):
        (tmp_path / file).write_text(json.dumps(content, ensure_ascii=False), encoding='utf-8')
    tok = make_tokenizer(str(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    library = tk.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    marks = [token['content'] for token in spec['added_tokens']]
    texts = [*AWKWARD, prep_awkward(300), ' '.join(AWKWARD), tok_texts()[0][:3000], *marks, *(
        f'{mark}  see{mark} {mark}\n{AWKWARD[n % 25]}{mark}' for n, mark in enumerate(marks))]
    for how in ('text', 'tokens'):
        source = prepare.Source('x', 'x', lambda: ([text] for text in texts))
        whole = [0 if n % 10 == 1 else 1 << 30 for n in range(len(texts))]
        meta = prepare.write_dataset(tmp_path / how, prepare.split_texts(source, 0.1, whole), tok, 'x', 1,
                                     special_tokens=how)
        wanted = [[*theirs(text, split_special_tokens=how == 'text')['input_ids'],
                   theirs.eos_token_id] for text in texts if text]
        for split in ('train', 'val'):
            ids = [ids for n, ids in enumerate(wanted) if (n % 10 == 1) == (split == 'val')]
            assert prep_ids(tmp_path / how, split).tolist() == [i for one in ids for i in one]
    assert meta['documents'] == len(wanted) and tok.eot == theirs.eos_token_id
    whole = len([*pieces([texts[len(AWKWARD)]], tok)]) == 1
    assert whole == (name == 'llama2')  # it puts a space before every text
    assert tok.decode(tok.bos) == RULES[name][2]  # not by add_bos_token, in transformers 5
    found = 0
    for text in texts:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tok.encode(text) == theirs(text)['input_ids'] and tok.encode_chat(text) == ids
        if library.decode(ids, skip_special_tokens=False) == text:
            found += 1
            assert tok.decode(ids) in (text, f' {text}')
    assert found > len(texts) // 2


CHAT_TEMPLATES |= {
    'deepseek':
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% for m in messages %}"
        "{{ '<' + m.role + '>' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' +"
        " ('<think>' if thinking else '</think>') }}{% endif %}",
    'everything':  # what transformers' environment has
        "{% for m in messages %}\n    {% if m.role == 'x' %}{% continue %}{% endif %}\n    {{ m | tojson }}"
        "{% generation %}\n{{ m.content | upper }}{% endgeneration %}\n{% endfor %}\n{{ bos_token }}"
        "{{ strftime_now('%Y') }}{{ tools | tojson(indent=2) }}{% set ns = namespace(n=1) %}"
        "{% set ns.n = 2 %}{{ ns.n }}{{ unknown }}{{ documents is none }}{{ dict(a=1) | tojson }}"
        "{% set named = namespace({'b': 2}, self=3) %}{{ named.b }}{{ named.self }}"
        "{{ dict.fromkeys('ab', 0) | tojson }}{{ dict([['a', 1]], b=2) | tojson }}"
        "{%- if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
}


CHATS = [[{'role': 'user', 'content': 'Hi, who are <you>?'}],
         [{'role': 'system', 'content': 'Be\nshort.'}, {'role': 'user', 'content': ' é🙂 '}],
         [{'role': 'user', 'content': 'Hi'},
          {'role': 'assistant', 'content': '<think>\nhm\n</think>\n\nA program.', 'tool_calls': None},
          {'role': 'user', 'content': 'And?'}]]


@pytest.mark.parametrize('name', [*CHAT_TEMPLATES, 'named', 'file', 'minimind'])
def test_chats_are_rendered_as_by_transformers(name, tmp_path):
    """The same text and ids, for templates in tokenizer_config.json, one of several there, or in a file."""
    library = oracle(name if name == 'minimind' else 'llama2')
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': '<s>', 'eos_token': {
        '__type': 'AddedToken', 'content': '</s>', 'lstrip': False, 'rstrip': False, 'normalized': False,
        'single_word': False, 'special': True}}
    if name == 'minimind':
        folder = Path(os.environ['FLATGPT_DATA']) / 'minimind_tokenizer'
        config |= json.loads((folder / 'tokenizer_config.json').read_text(encoding='utf-8'))
    elif name == 'named':
        config['chat_template'] = [{'name': 'default', 'template': CHAT_TEMPLATES['chatml']},
                                   {'name': 'tool_use', 'template': CHAT_TEMPLATES['everything']}]
    elif name == 'file':
        (tmp_path / 'chat_template.jinja').write_text(CHAT_TEMPLATES['qwen3'], encoding='utf-8')
    else:
        config['chat_template'] = CHAT_TEMPLATES[name]
    (tmp_path / 'tokenizer.json').write_text(library.to_str(), encoding='utf-8')
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config), encoding='utf-8')
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    ours = tokenizer_from_state(json_tokenizer(str(tmp_path)).state())
    switch = {'minimind': 'open_thinking', 'deepseek': 'thinking'}.get(name, 'enable_thinking')
    if name in ('minimind', 'deepseek', 'qwen3', 'everything'):
        assert ours.chat(CHATS[0], True) != ours.chat(CHATS[0], False)
    for messages, tools, thinking in itertools.product(CHATS, (None, TOOLS), (True, False, None)):
        options = {} if thinking is None else {switch: thinking}
        text, ids = (theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, tokenize=tokenize,
            **options) for tokenize in (False, True))
        assert ours.chat(messages, thinking, tools) == ids
        assert ours.render(messages, True, tools, **options) == text


def rendered(template):
    tok = ByteTokenizer()
    tok.chat_template = template
    return tok.render([{'role': 'user', 'content': 'hi'}])


@pytest.mark.parametrize('template', [
    '{{ 1 / 0 }}', "{{ raise_exception('it cannot be') }}", '{{ messages.append(1) }}',
    '{% for i in range(10**9) %}{% endfor %}', "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('pwned') }}",
    "{{ raise_exception.__globals__['os'].mkdir('pwned') }}", "{% include 'pwned' %}"])
def test_a_chat_template_that_fails_runs_no_code(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='chat template fails'):
        rendered(template)
    assert os.listdir() == []


@pytest.mark.parametrize('expression', [
    'messages.__class__', 'dict.__base__', 'strftime_now.__code__', "'{0.__class__}'.format(1)"])
def test_a_chat_template_sees_nothing_of_python(expression):
    assert rendered('{{ ' + expression + ' }}') == ''


# training a tokenizer ---------------------------------------------------------------------------------------
def naive_bpe(counts, n_merges):
    """(tokens, {word: its tokens}) of byte pair encoding by definition: count all pairs, merge one, again."""
    tokens, words = [bytes([b]) for b in range(256)], {word: list(word.encode()) for word in counts}
    for _ in range(n_merges):
        pairs = {}
        for word, ids in words.items():
            for pair in zip(ids, ids[1:]):
                pairs[pair] = pairs.get(pair, 0) + counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        for ids in words.values():
            i = 0
            while i < len(ids) - 1:
                if (ids[i], ids[i + 1]) == best:
                    ids[i:i + 2] = [len(tokens)]
                i += 1
        tokens.append(tokens[best[0]] + tokens[best[1]])
    return tokens[256:], words


def bpe_of(text, size, **more):
    """A bpe:N tokenizer of one text, all of it for training."""
    return make_tokenizer(f'bpe:{size}', training=[[text]], **more)


@pytest.mark.parametrize('alphabet', ['a', 'ab', 'abc é', 'é🙂\0中\u0301'])
def test_bpe_learns_what_a_naive_reference_learns(alphabet):
    """Few letters give many ties and pairs that overlap themselves; tiktoken then encodes as was trained."""
    for seed in range(60):
        rng = random.Random(seed)
        length, often, n = rng.choice([3, 12, 60]), rng.choice([1, 2, 9]), rng.randint(0, 40)
        counts = {''.join(rng.choices(alphabet, k=rng.randint(1, length))): rng.randint(1, often)
                  for _ in range(rng.randint(1, 12))}
        learnt, words = naive_bpe(counts, n)
        assert train_bpe(counts, n) == learnt
        ranks = {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *learnt])}
        theirs = tiktoken.Encoding('x', pat_str=r'(?s:.+)', mergeable_ranks=ranks, special_tokens={})
        assert {word: theirs.encode_ordinary(word) for word in counts} == words
    assert train_bpe({}, 5) == train_bpe({'a': 7, 'xy': 1}, 5) == []


def test_bpe_of_a_text_is_that_of_its_words(monkeypatch):
    """Cut as GPT-4's encoding cuts, in pieces and processes as in one; special tokens come last."""
    regex = pytest.importorskip('regex')
    text = tok_texts()[0][:20_000] + prep_awkward(2000) + 'end'  # space at the end is cut otherwise there
    words = regex.findall(prep_patterns()['cl100k_base'], text)
    assert regex.findall(WORD_PATTERN, text) == words
    learnt, _ = naive_bpe({word: words.count(word) for word in words}, 36)
    tok = bpe_of(text, 300)
    assert [tok.decode_bytes([i]) for i in range(256, 292)] == learnt
    assert tok.special == dict(zip(BPE_SPECIAL, range(292, 300))) and tok.n_vocab == 300
    assert tok.encode('<|im_end|>a') == [294, 97] and tok.encode_array('<|im_end|>').max() < 292
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 3000)
    for procs in (1, 2):
        assert bpe_of(text, 300, procs=procs).state() == tok.state()
    own = bpe_of(text, 300, pattern=r'\s+|\S+')
    words = regex.findall(own.pattern, text)
    assert own.encode_array(text).tolist() == [i for word in words for i in own.bpe.encode_ordinary(word)]


def test_bpe_is_prepared_and_named_again_by_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tok_texts()[0][:50_000]
    Path('my.txt').write_text(text, encoding='utf-8')
    prep_run(['my.txt', '--tokenizer=bpe:600'], capsys)
    tok = prepare.load_tokenizer('data/my_bpe600')
    assert ''.join(tok.decode(prep_ids('data/my_bpe600', split)) for split in ('train', 'val')) == text
    assert tok.ranks == bpe_of(text[:45_000], 600).ranks and tok.name == 'bpe:600'  # of train alone
    prep_run(['my.txt', '--tokenizer=data/my_bpe600'], capsys)
    assert prepare.load_tokenizer('data/my_my_bpe600').state() == tok.state()
    assert (prep_ids('data/my_my_bpe600', 'val') == prep_ids('data/my_bpe600', 'val')).all()


def test_bpe_of_a_small_text_has_a_smaller_vocabulary(tmp_path, monkeypatch, capsys):
    tok = bpe_of('abab ' * 9 + 'xyz', 5000)
    assert tok.n_vocab == 264 + len(train_bpe({'abab': 1, ' abab': 8}, 99))
    assert tok.name == f'bpe:{tok.n_vocab}'
    assert bpe_of('some text', 264).encode('some') == [*b'some']
    monkeypatch.chdir(tmp_path)
    Path('my.txt').write_text('some text\n' * 9)
    for flags, part in [(['--tokenizer=bpe:263'], '264 (256 bytes, 8 special tokens)'),
                        (['--tokenizer=bpe'], 'bpe:N'), (['--pattern=x'], 'is for --tokenizer=bpe:4096'),
                        *((['--tokenizer=bpe:300', f'--pattern={pattern}'], 'leaves out')
                          for pattern in ('(a)|.', r'\w+', 'a*'))]:
        assert part in prep_run(['my.txt', *flags], capsys)[1] and os.listdir() == ['my.txt']
    error = prep_run(['my.txt', '--tokenizer=bpe:300', '--pattern=('], capsys)[1]
    assert error.startswith("pattern='(': missing )")


def test_bpe_of_text_without_spaces_and_of_much_text_is_bounded(monkeypatch):
    rng = random.Random(0)
    word = ''.join(rng.choices('acgt', k=200_000))
    begin = time.process_time()
    tok = bpe_of(word + 'a' * 100_000, 1000)
    assert tok.n_vocab == 1000 and time.process_time() - begin < 20
    assert train_bpe({'a' * 5000: 1}, 99) == [b'a' * 2**i for i in range(1, 9)]  # 256 bytes at most
    monkeypatch.setattr(flat_tokenizer, 'WORDS_BYTES', 40)
    assert train_bpe({'gh' * 9: 5, 'ef' * 9: 4, 'cd' * 9: 3, 'ab' * 99: 2}, 2) == [b'gh', b'ghgh']
    monkeypatch.setattr(flat_tokenizer, 'SAMPLE', 5)
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 500)
    monkeypatch.setattr(flat_tokenizer, 'WORDS_BYTES', 1 << 20)
    splitter = WordSplitter(WORD_PATTERN)
    texts = [[''.join(f'{c}{i} ' for i in range(1000))] for c in 'abcdef']
    counts, n_read = count_words(splitter, texts)
    assert 4500 < n_read < 7000  # of six times as much: some of all, not all of the first
    assert len({word.strip() for word in counts if word.strip().isalpha()}) > 2
    n_words = sum(len(splitter.encode_array(text)) for text, in texts)
    assert 0.7 < sum(counts.values()) / n_words < 1.4  # a group of ten counts tenfold


def test_chats_of_a_trained_tokenizer_are_chatml(tmp_path):
    tok = bpe_of(tok_texts()[0][:5000], 300)
    for name, text in hub.tokenizer_files(tok, tiny()).items():
        (tmp_path / name).write_text(text, encoding='utf-8')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tok.chat_template == theirs.chat_template == CHATML
    for messages, prompt in itertools.product(CHATS, (True, False)):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert tok.chat(messages, add_generation_prompt=prompt) == expected
        assert tok.decode(expected) == ''.join(
            f'<|im_start|>{m["role"]}\n{m["content"]}<|im_end|>\n' for m in messages
        ) + '<|im_start|>assistant\n' * prompt
    assert tok.stop_tokens == (tok.eot, tok.special['<|im_end|>'])
    assert json_tokenizer(str(tmp_path)).stop_tokens == tok.stop_tokens
    hub.save_pretrained(tiny(vocab_size=300), tok, tmp_path / 'out')
    assert json.loads((tmp_path / 'out/config.json').read_text())['eos_token_id'] == [292, 294]


def test_stop_tokens_are_those_that_end_a_message_of_the_template():
    spec = json.loads(tok_oracles()['gpt2'].to_str())
    names = ['<|im_start|>', '<|im_end|>', '<|eot_id|>', '</s>']
    spec['added_tokens'] += [{**spec['added_tokens'][0], 'id': 1101 + i, 'content': name}
                             for i, name in enumerate(names)]
    for template, mark in [('chatml', '<|im_end|>'), ('qwen2.5', '<|im_end|>'), ('qwen3', '<|im_end|>'),
                           ('llama3', '<|eot_id|>'), ('llama2', '</s>'), ('everything', None)]:
        config = {'chat_template': CHAT_TEMPLATES[template], 'eos_token': '<|endoftext|>'}
        tok = JsonTokenizer(json.dumps(spec), config)
        ends = ['<|endoftext|>'] + [mark] * bool(mark)
        assert tok.stop_tokens == tuple(tok.special[end] for end in ends)
    config['chat_template'] = "{{ raise_exception('it cannot be') }}"
    assert JsonTokenizer(json.dumps(spec), config).stop_tokens == (tok.eot,)
