"""Tests of tokenizer."""
import base64
import io
import itertools
import json
import os
import random
import sys
from pathlib import Path

import pytest
import tiktoken
import torch
from common import (
    CHAT_TEMPLATES,
    PREP_DATA,
    PREP_WORDS,
    TOOLS,
    of_split,
    prep_awkward,
    prep_gpt2,
    prep_ids,
    prep_patterns,
    prep_toy_bpe,
    save_tokenizer,
    tok_oracles,
    tok_texts,
)

import prepare
import tokenizer as flat_tokenizer
from test_model import tiny
from tokenizer import (
    BPE_SPECIAL,
    CHATML,
    EOT,
    THOUGHTS,
    WORD_PATTERN,
    ByteTokenizer,
    TiktokenTokenizer,
    count_words,
    make_tokenizer,
    pieces,
    tokenizer_from_state,
    train_bpe,
)
from zoo import hub
from zoo.tokenizer_json import JsonTokenizer, json_tokenizer, library_tokenizer, to_json

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# tokenizers -------------------------------------------------------------------------------------------------
def test_odd_text_and_ids():
    tok = prep_toy_bpe()
    assert tok.decode([tok.n_vocab + 5, 97, 10**6, tok.eot]) == f'a{EOT}'
    assert tok.decode(tok.encode('a\ud800b')) == 'a\ufffdb' and tok.decode(tok.encode('🙂')[:2]) == '\ufffd'
    char = make_tokenizer('char', texts=' dehlorw')
    assert (char.eot, char.stop_tokens, char.encode('hello')) == (None, (), [3, 2, 4, 4, 5])
    with pytest.raises(ValueError, match=r"the vocabulary of characters lacks \['\?'\]"):
        char.encode('who?')
    with pytest.raises(FileNotFoundError, match='no chat template: give a plain prompt'):
        char.chat(CHATS[0])
    tok = TiktokenTokenizer('x', tok.pattern, {'<|e|>': 265, '<|e|>!': 266}, tok.ranks)
    assert tok.encode('<|e|>!') == [266]  # the longest
    assert tok.decode(tok.encode_array('a' + ' ' * 899_999)) == 'a' + ' ' * 899_999
    with pytest.raises(ValueError, match='900,000 white-space characters in a row'):
        tok.encode_array('a' + ' ' * 900_001)
    with pytest.raises(ValueError, match="tokenizer='gpt5' is not supported: choose byte"):
        make_tokenizer('gpt5')


@pytest.mark.parametrize('name', ['byte', 'char', 'gpt2', 'toy', 'bpe:1500', 'cl100k_base', 'o200k_base'])
def test_our_tokenizers_after_export_after_a_checkpoint_and_in_pieces(name, tmp_path, monkeypatch):
    """The tokenizers package encodes the same. cl100k_base and o200k_base: their patterns, with a few
    merges."""
    tk = pytest.importorskip('tokenizers')
    rng = random.Random(0)
    text = ''.join(part[:9000] for part in tok_texts()) + prep_awkward(3000) + '12' * 50 + 'ＡＢＣ' * 2000
    parts = [*AWKWARD, text, f'a{EOT}b{EOT[:5]}|>', 'a<|im_start|>b<|reserved_0|>\n', ''.join(
        chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x10ffff)])) for _ in range(3000))]
    if name.endswith('_base') or name == 'toy':
        tok = prep_toy_bpe(prep_patterns().get(name, PREP_WORDS))
    else:
        tok = prep_gpt2(monkeypatch) if name == 'gpt2' else make_tokenizer(
            name, texts=[[*parts, EOT]], training=[[text]], by_document=True)
    file = io.BytesIO()
    torch.save({'tokenizer': tok.state()}, file)
    file.seek(0)
    again = tokenizer_from_state(torch.load(file, weights_only=True)['tokenizer'])
    assert again.state() == json.loads(json.dumps(tok.state())) == tok.state()
    theirs = tk.Tokenizer.from_str(to_json(tok))
    for part in parts:
        ids, plain = again.encode(part), tok.encode_array(part).tolist()
        assert theirs.encode(part).ids == ids and max(ids, default=0) < again.n_vocab == tok.n_vocab
        assert part == again.decode(ids) == tok.decode(plain)
        assert part == theirs.decode(ids, skip_special_tokens=False)
        assert b''.join(again.decode_bytes([i]) for i in ids) == part.encode()
        assert ids.count(again.eot) == part.count(EOT) and tok.eot not in plain
        assert {*plain}.isdisjoint(tok.special.values()) and tok.encode(tok.as_text(part)) == plain
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 7)
    source = prepare.Source('x', 'x', lambda: [(text[i:i + 1000] for i in range(0, len(text), 1000))])
    n_train = prepare.characters_to_train_on(source, 0.1)
    prepare.write_dataset(tmp_path, prepare.split_texts(source, 0.1, n_train), tok, 'a')
    for split, part in ('train', text[:n_train[0]]), ('val', text[n_train[0]:]):
        assert prep_ids(tmp_path, split).tolist() == tok.encode_array(part).tolist()


def test_tables_that_were_not_learned_are_exported():
    """No merge gives qrs, and xy comes after xyz."""
    tk, toy = pytest.importorskip('tokenizers'), prep_toy_bpe()
    n, text = toy.n_vocab, 'qrs axyz qrs'
    ranks = toy.ranks + ''.join(f'{base64.b64encode(token).decode()} {n + i}\n'
                                for i, token in enumerate([b'qrs', b'xyz', b'xy']))
    tok = TiktokenTokenizer('toy', toy.pattern, toy.special, ranks)
    assert tok.encode(text) == [n, *tok.encode(' a'), n + 1, *b' qrs']
    assert tk.Tokenizer.from_str(to_json(tok)).encode(text).ids == tok.encode(text)
    tok = TiktokenTokenizer('x', toy.pattern, {'<a>': 265, 'a>b': 266}, toy.ranks)
    assert max(tok.encode(tok.as_text('<a>b'))) < 256  # also special tokens that overlap


def test_a_kind_that_lacks_a_part_is_named(monkeypatch):
    monkeypatch.setattr(flat_tokenizer, 'KINDS', {**flat_tokenizer.KINDS})
    with pytest.raises(TypeError, match='class NoKind needs a `kind`'):
        class NoKind(ByteTokenizer):
            pass

    class Shifted(ByteTokenizer):
        kind = 'shifted'

        def __init__(self, by=1):
            super().__init__()
            self.shift = by

        def encode_array(self, text):
            return (super().encode_array(text) + self.shift).astype('u1')
    tok = make_tokenizer('shifted')
    with pytest.raises(AttributeError, match="'Shifted' object has no attribute 'by'"):
        tok.state()
    tok.by = 1
    assert tokenizer_from_state(tok.state()).encode('ab') == [98, 99]
    with pytest.raises(ValueError, match="kind 'shifted' cannot be exported"):
        to_json(tok)


def oracle(name):
    if name not in tok_oracles():
        pytest.skip('its file is not at hand')
    return tok_oracles()[name]


AWKWARD = [
    'Plain words, as they come.', '  two spaces, and more    at the end   ', ' ', '\n', '', '\n\n\n',
    '\t\tx\t', 'line\r\nline\r\rline\n \n\t\n  end\n', "It's WE'LL they'Ve I'D don't\u2019s",
    '1 12 123 1234 12345678 3.14', 'x1y22z333 v2.0 ½ ² ⅷ １２３ ٣٤',
    'héllo e\u0301a\u0308 \u1e9b\u0323 ﬁ ǅ',
    '中文文本，没有空格。日本語カタカナ 한국어',
    'नमस्ते مرحبا שלום Привет',
    '🙂🙃 👩\u200d👩\u200d👧 🇩🇪 ✌🏽',
    'a\u00a0b\u3000c\u2028d\u200be\ufefff', 'nul\0 bell\a esc\x1b del\x7f\x80',
    '▁under▁▁score _x__y ▁',
    'if x:\n        return {"a": [1, 2]}  # done\n\n\n', '((())) !!! ?!... --- //// \\n <> >>',
    'ÀÉ CamelCase SHOUT iPhone ΣΑΣ', 'the <think>hm</think> of <tool_call>', 'a <0x0A> and <unk> and Ġ',
    'prepared unprepared prepared', 'x' * 70 + ' ' * 50 + 'y']


@pytest.mark.parametrize('name', ['gpt2', 'gpt2 prefix', 'qwen', 'deepseek', 'tekken', 'falcon', 'llama2',
                                  'mistral', 'added', 'minimind'])
def test_bins_have_what_a_published_tokenizer_makes_of_a_text(name, tmp_path, monkeypatch):
    """Whole documents and pieces, special tokens as text and as tokens, with what transformers puts
    around a text. Decodes token by token if the library's own ids decode to the text."""
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 200)
    library = oracle(name)
    end = '</s>' if library.token_to_id('</s>') else EOT
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': end}
    save_tokenizer(JsonTokenizer(library.to_str(), config), tmp_path)
    tok = tokenizer_from_state(make_tokenizer(str(tmp_path)).state())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    marks = [token.content for token in library.get_added_tokens_decoder().values()][:5]
    texts = [*AWKWARD, prep_awkward(300), tok_texts()[0][:3000], *marks, *(
        f'{mark}  see{mark} {mark}\n{AWKWARD[n % 25]}{mark}' for n, mark in enumerate(marks))]
    for how in ('text', 'tokens'):
        source = prepare.Source('x', 'x', lambda: ([text] for text in texts if text))
        whole = [0 if n % 10 == 1 else 1 << 30 for n in range(len(texts))]
        prepare.write_dataset(tmp_path / how, prepare.split_texts(source, 0.1, whole), tok, 'x', 1,
                              special_tokens=how)
        wanted = [theirs(text, split_special_tokens=how == 'text')['input_ids'] for text in texts if text]
        for one in wanted:  # the text may begin and end with these tokens itself
            del one[:len(tok.bos) * (one[1:2] == list(tok.bos))]
            one += [theirs.eos_token_id][one[-1:] == [theirs.eos_token_id]:]
        for split in ('train', 'val'):
            assert prep_ids(tmp_path / how, split).tolist() == sum(of_split(split, wanted), [])
    assert tok.eot == theirs.eos_token_id
    # Llama 2 and Mistral put a space before every text, GPT-2 before one that begins with a line end
    assert tok.can_cut == (name not in ('llama2', 'mistral', 'gpt2 prefix'))
    assert tok.n_vocab == library.get_vocab_size() and to_json(tok) == library.to_str()
    n_back = 0
    for text in texts:
        ids = library.encode(text, add_special_tokens=False).ids
        both = theirs(text)['input_ids']
        assert tok.encode(text) == both[both[:1] * 2 == both[:2] == [*tok.bos] * 2:]
        assert tok.encode_chat(text) == ids
        if library.decode(ids, skip_special_tokens=False) == text:
            n_back += 1
            back = b''.join(tok.decode_bytes([i]) for i in ids).decode()
            assert back == tok.decode(ids) and back in (text, f' {text}')
    assert n_back > 3
    assert tok.encode('a\ud800b') == tok.encode('a\ufffdb')


@pytest.mark.parametrize('name', ['gpt2', 'gpt2 normalized', 'gpt2 prefix', 'qwen', 'deepseek', 'falcon',
                                  'llama2', 'mistral', 'added', 'minimind'])
def test_special_tokens_in_a_message_are_text_and_those_of_its_template_are_not(name):
    """The oracle renames the special tokens, so that only the template can contain them."""
    spec = json.loads(oracle(name.partition(' norm')[0]).to_str())
    specials = [token for token in spec['added_tokens'] if token['special']]
    for token in specials:
        token['normalized'] = 'normalized' in name
    tok = JsonTokenizer(json.dumps(spec))
    marks = [token['content'] for token in specials][:3]
    for n, token in enumerate(specials):
        there = spec['model']['vocab'].pop(token['content'], None)
        token['content'] = f'\ue000{n}\ue001'
        if there is not None:
            spec['model']['vocab'][token['content']] = there
    theirs = library_tokenizer(json.dumps(dict(spec, post_processor=None)))
    names = [token['content'] for token in specials][:3]
    template, other = ('{0}user\n{{}}{1} \n{{}} {2}  {0}{{}}'.format(*(each * 3)[:3])
                       for each in (marks, names))
    for text, mark in itertools.product(AWKWARD[:9], marks):
        texts = [f'{mark}{text}', f'{text}  {mark} {marks[0]}', mark]
        ids = tok.encode_chat(template.format(*tok.as_text(texts)))
        assert ids == theirs.encode(other.format(*texts)).ids
        assert ids != tok.encode_chat(template.format(*texts))


def test_tokenizer_json_of_other_kinds():
    """Unigram models, gaps in the ids, truncation and padding set in the file, other special names."""
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
    library = tk.Tokenizer.from_str(json.dumps(spec))
    library.enable_truncation(3)
    library.enable_padding(length=9)
    ours = JsonTokenizer(library.to_str(), {'eos_token': {'content': '<|last|>'}})
    assert ours.n_vocab == 3001 > len(ours.tokens) and ours.eot == ours.special['<|last|>']
    text = 'more than three tokens, no padding'
    assert ours.encode(text) == tok_oracles()['gpt2'].encode(text).ids
    assert JsonTokenizer(json.dumps(spec)).eot == ours.special[EOT]


def test_text_is_not_cut_where_a_token_reaches_across():
    spec = json.loads(tok_oracles()['gpt2'].to_str())
    assert JsonTokenizer(json.dumps(spec)).can_cut
    spec['added_tokens'].append(dict(spec['added_tokens'][0], id=1101, content='a b', special=False))
    tok = JsonTokenizer(json.dumps(spec))
    assert not tok.can_cut and [*pieces(['a b' * 99] * 1000, tok.can_cut)] == [('a b' * 99_000, True)]


# chat templates ---------------------------------------------------------------------------------------------
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
    """The template is in tokenizer_config.json, one of several there, or in a file."""
    library = oracle(name if name == 'minimind' else 'llama2')
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': '<s>', 'eos_token': {
        '__type': 'AddedToken', 'content': '</s>', 'lstrip': False, 'rstrip': False, 'normalized': False,
        'single_word': False, 'special': True}}
    if name == 'minimind':
        path = Path(PREP_DATA, 'minimind_tokenizer/tokenizer_config.json')
        config |= json.loads(path.read_text(encoding='utf-8'))
    elif name == 'named':
        config['chat_template'] = [{'name': 'default', 'template': CHAT_TEMPLATES['chatml']},
                                   {'name': 'tool_use', 'template': CHAT_TEMPLATES['everything']}]
    elif name == 'file':
        (tmp_path / 'chat_template.jinja').write_text(CHAT_TEMPLATES['qwen3'], encoding='utf-8')
    else:
        config['chat_template'] = CHAT_TEMPLATES[name]
    save_tokenizer(JsonTokenizer(library.to_str(), config), tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    ours = tokenizer_from_state(json_tokenizer(str(tmp_path)).state())
    switch = {'minimind': 'open_thinking', 'deepseek': 'thinking'}.get(name, 'enable_thinking')
    for messages, tools, thinking in itertools.product(CHATS, (None, TOOLS), (True, False, None)):
        options = {} if thinking is None else {switch: thinking}
        text, ids = (theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, tokenize=tokenize,
            **options) for tokenize in (False, True))
        assert ours.chat(messages, True, tools, thinking) == ids
        assert ours.render(messages, True, tools, thinking) == text


@pytest.mark.parametrize('older', [True, False])
def test_special_tokens_in_other_files_count_as_in_transformers(older, tmp_path):
    """special_tokens_map.json counts only next to a tokenizer_config.json of the older format. The newer
    format may have tokens that tokenizer.json lacks."""
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '</s>',
              'chat_template': '{{ bos_token }}|{{ eos_token }}'}
    if not older:
        config['added_tokens_decoder'] = {'9999': {'content': '<|new|>', 'special': True}}
    save_tokenizer(JsonTokenizer(oracle('llama2').to_str(), config), tmp_path)
    (tmp_path / 'special_tokens_map.json').write_text(json.dumps(
        {'bos_token': {'content': '<s>', 'lstrip': False}, 'eos_token': '<unk>'}))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    ours = json_tokenizer(str(tmp_path))
    assert ours.render(CHATS[0]) == theirs.apply_chat_template(CHATS[0], tokenize=False)
    assert ours.eot == theirs.eos_token_id
    assert tokenizer_from_state(ours.state()).encode('a <|new|> b') == theirs.encode('a <|new|> b')


def with_template(template):
    tok = ByteTokenizer()
    tok.chat_template = template
    return tok


@pytest.mark.parametrize('given', THOUGHTS)
@pytest.mark.parametrize('read', THOUGHTS)
def test_thoughts_have_the_name_that_the_template_reads(given, read):
    messages = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', given: 'hm', 'content': 'Ho'}]
    tok = with_template('{% for m in messages %}{{ m.' + read + ' }}|{{ m.content }}{% endfor %}')
    assert tok.render(messages, False) == '|Hihm|Ho'


@pytest.mark.parametrize('template, message', [
    ("{{ raise_exception('it cannot be') }}", 'the chat template rejects this: it cannot be'),
    ('{{ messages.append(1) }}', 'unsafe'), ('{% for i in range(10**9) %}{% endfor %}', 'Range too big'),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 'unsafe'),
    ("{{ cycler.__init__.__globals__.os.mkdir('pwned') }}", 'unsafe'),
    ("{{ raise_exception.__globals__['os'].mkdir('pwned') }}", 'unsafe'),
    ("{% include 'pwned' %}", 'no loader')])
def test_a_chat_template_that_fails_runs_no_code(template, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tok = with_template(template)
    with pytest.raises(Exception, match=message):
        tok.render(CHATS[0])
    assert tok.stop_tokens == (tok.eot,)  # the tokenizer works without the template
    assert os.listdir() == []


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
    """Few letters give many ties and overlapping pairs. tiktoken then encodes the same way."""
    for seed in range(60):
        rng = random.Random(seed)
        length, often, n = rng.choice([3, 12, 60]), rng.choice([1, 2, 9]), rng.randint(0, 40)
        counts = {''.join(rng.choices(alphabet, k=rng.randint(1, length))): rng.randint(1, often)
                  for _ in range(rng.randint(1, 12))}
        learnt, words = naive_bpe(counts, n)
        assert train_bpe(counts, n)[256:] == learnt
        ranks = {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *learnt])}
        theirs = tiktoken.Encoding('x', pat_str=r'(?s:.+)', mergeable_ranks=ranks, special_tokens={})
        assert {word: theirs.encode_ordinary(word) for word in counts} == words
    assert len(train_bpe({}, 5)) == len(train_bpe({'a': 7, 'xy': 1}, 5)) == 256
    assert bpe_of('abab ' * 9 + 'xyz', 5000).n_vocab == 8 + len(train_bpe({'abab': 1, ' abab': 8}, 99))


def test_bpe_of_a_text_is_that_of_its_words(monkeypatch):
    """Words are those of cl100k_base, in any number of pieces and processes; special tokens come last."""
    regex = pytest.importorskip('regex')
    text = tok_texts()[0][:20_000] + prep_awkward(2000) + 'end'  # spaces at the end differ
    words = regex.findall(prep_patterns()['cl100k_base'], text)
    assert regex.findall(WORD_PATTERN, text) == words
    learnt, _ = naive_bpe({word: words.count(word) for word in words}, 36)
    tok = bpe_of(text, 300)
    assert [tok.decode_bytes([i]) for i in range(256, 292)] == learnt
    assert tok.special == dict(zip(BPE_SPECIAL, range(292, 300))) and tok.n_vocab == 300
    assert tok.encode('<|im_end|>a') == [294, 97] and tok.encode_array('<|im_end|>').max() < 292
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 100)  # more than two groups
    for procs in (1, 2):
        assert bpe_of(text, 300, procs=procs).state() == tok.state()


def test_bpe_of_text_without_spaces_and_of_much_text_is_bounded(monkeypatch):
    word = ''.join(random.Random(0).choices('acgt', k=200_000))
    assert bpe_of(word + 'a' * 100_000, 1000).n_vocab == 1000  # takes seconds, not hours
    assert train_bpe({'a' * 5000: 1}, 99)[256:] == [b'a' * 2**i for i in range(1, 9)]  # 256 bytes at most
    monkeypatch.setattr(flat_tokenizer, 'WORDS_BYTES', 40)
    assert train_bpe({'gh' * 9: 5, 'ef' * 9: 4, 'cd' * 9: 3, 'ab' * 99: 2}, 2)[256:] == [b'gh', b'ghgh']
    monkeypatch.setattr(flat_tokenizer, 'TRAINING_WORDS', 20)
    texts = [['one two ' * 9], ['three four ' * 9], ['five']]
    assert {*count_words(texts)} == {'one', ' two', ' one', ' ', 'three', ' four', ' three'}


def test_chats_of_a_trained_tokenizer_are_chatml(tmp_path):
    tok = bpe_of(tok_texts()[0][:5000], 300)
    for name, text in hub.tokenizer_files(tok, tiny()).items():
        (tmp_path / name).write_text(text, encoding='utf-8')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert theirs.chat_template == CHATML
    for messages, prompt in itertools.product(CHATS, (True, False)):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert tok.chat(messages, prompt) == expected
    assert tok.decode(tok.chat(CHATS[0])) == (
        f"<|im_start|>user\n{CHATS[0][0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert json_tokenizer(str(tmp_path)).stop_tokens == (tok.eot, tok.special['<|im_end|>'])


def test_the_missing_package_of_published_tokenizers_is_one_line(tmp_path, monkeypatch):
    ours = JsonTokenizer(to_json(ByteTokenizer()))
    save_tokenizer(ours, tmp_path)
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    for function, given in (json_tokenizer, tmp_path), (tokenizer_from_state, ours.state()):
        with pytest.raises(ImportError, match='^published models need tokenizers: pip install') as error:
            function(given)
        assert not error.value.name  # if an error has it, one_line_errors prints the traceback
