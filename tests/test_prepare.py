"""Tests of prepare.py: sources, splits, conversations, files on disk and reading them."""
import collections
import concurrent.futures
import csv
import errno
import gzip
import http.server
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from common import (
    CHAT_ENDS,
    PREP_DATA,
    ROOT,
    TOOLS,
    chat_tokenizer,
    prep_awkward,
    prep_gpt2,
    prep_ids,
    prep_patterns,
    prep_run,
    prep_source,
    prep_toy_bpe,
)

import bench
import prepare
import tokenizer as flat_tokenizer
from tokenizer import EOT, CharTokenizer, JsonTokenizer, make_tokenizer

SHAKESPEARE = os.path.join(PREP_DATA, 'tinyshakespeare.txt')


@pytest.fixture
def prep(tmp_path, monkeypatch, capsys):
    """prepare.py, in an empty folder: a function of its command line -> (what it prints, its error)."""
    monkeypatch.chdir(tmp_path)
    return lambda line: prep_run(line.split(), capsys)


def of_split(split, documents):
    """The documents that go into the split with a val_fraction of 0.1."""
    return [one for n, one in enumerate(documents) if (n % 10 == 1) == (split == 'val')]


def prep_texts(source, fraction=0.1):
    """(split, document, whether it is whole) as prepare.py makes them of a source."""
    return prepare.split_texts(source, fraction, prepare.characters_to_train_on(source, fraction))


def source_of_chats(chats):
    return prepare.Source('x', 'x', lambda: [prepare.Conversation(f'chat {i}', messages)
                                             for i, messages in enumerate(chats)], chats=True)


def files_of(folder):
    return {name: Path(folder, name).read_bytes() for name in os.listdir(folder)}


def write_jsonl(path, records):
    Path(path).write_text('\n'.join(map(json.dumps, records)), encoding='utf-8')


def write_parquet(path, records, **options):
    """A field that a record lacks is null."""
    pa = pytest.importorskip('pyarrow')
    names = dict.fromkeys(name for record in records for name in record)
    table = pa.table({name: [record.get(name) for record in records] for name in names})
    pytest.importorskip('pyarrow.parquet').write_table(table, path, **options)


def save_tokenizer(tok, folder):
    os.makedirs(folder)
    Path(folder, 'tokenizer.json').write_text(tok.source, encoding='utf-8')
    Path(folder, 'tokenizer_config.json').write_text(json.dumps(tok.config), encoding='utf-8')


# whole runs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('tokenizer, n_train, n_val, vocab, name', [
    ('char', 1_003_854, 111_540, 65, 'shakespeare_char'), ('gpt2', 301_966, 36_059, 50257, 'shakespeare')])
def test_shakespeare_as_nanogpt(tokenizer, n_train, n_val, vocab, name, monkeypatch, prep):
    if not os.path.exists(SHAKESPEARE):
        pytest.skip(f'no {SHAKESPEARE}: set FLATGPT_DATA to the folder with tinyshakespeare.txt')
    gpt2 = prep_gpt2(monkeypatch) if tokenizer == 'gpt2' else None
    data = Path(SHAKESPEARE).read_bytes()
    os.makedirs('data/shakespeare')
    Path('data/shakespeare/input.txt').write_bytes(data)
    prep(f'shakespeare --tokenizer={tokenizer}')
    folder, text = f'data/{name}', data.decode()
    meta, cut = prepare.read_meta(folder), int(len(text) * 0.9)
    assert (meta['train_tokens'], meta['val_tokens'], meta['vocab_size']) == (n_train, n_val, vocab)
    chars = sorted(set(text))  # nanoGPT's ids
    encode = gpt2.bpe.encode_ordinary if gpt2 else lambda text: list(map(chars.index, text))
    for split, part in ('train', text[:cut]), ('val', text[cut:]):
        assert prep_ids(folder, split).tolist() == encode(part)


def test_default_is_the_standard_library(prep):
    default = (ROOT / 'config/default.py').read_text()
    assert f"dataset = '{prepare.dataset_name(prepare.FIRST_RUN)}'" in default
    prep('--tokenizer=byte')
    paths = prepare.library_files()
    assert not [path for path in paths if re.search(r'site-packages|[/\\\\]tests?[/\\\\]', path)]
    paths = [path for path in paths if os.path.getsize(path)]
    for split in ('train', 'val'):
        texts = [Path(path).read_bytes() + b'\0' for path in of_split(split, paths)]
        ids = prep_ids('data/pystdlib_byte', split)
        assert ids.max() == 256 and ids.astype(np.uint8).tobytes() == b''.join(texts)  # 256 is end of text


def test_the_same_documents_from_every_kind_of_source(monkeypatch, prep):
    """Files, JSON lines, text with marks, compressed or through a pipe: whole documents, a tenth for val."""
    texts = [f'tale {i:02d} goes "on"\u2028' + 'and é🙂 \\ \r\n' * (i % 7 + 1) + 'on' for i in range(60)]
    os.makedirs('files/deep')
    for i, text in enumerate(texts):
        Path(f'files/deep/{i:02d}.md').write_text(text, encoding='utf-8', newline='')
    Path('files/deep/05 empty.md').touch()
    marked = ('\ufeff' + '\r\n<|endoftext|>\n\n'.join(texts)).encode() + b'<|endoftext|>\n'
    lines = [json.dumps({'id': i, 'story': text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    lines[5:5] = ['', '  ', json.dumps({'story': '', 'id': None})]
    lines = '\ufeff'.encode() + '\r\n'.join(lines).encode()
    array = json.dumps([{'story': text} for text in texts], indent=1).encode('utf-8-sig')
    with open('table.csv', 'w', encoding='utf-8-sig', newline='') as f:
        csv.writer(f).writerows([['id', 'story'], *enumerate(texts)])
    Path('array.json').write_bytes(array)
    Path('lines.ndjson').write_bytes(lines)
    Path('lines2.json').write_bytes(lines)
    Path('marks.txt').write_bytes(marked)
    Path('marks.txt.gz').write_bytes(gzip.compress(marked))
    Path('tales.JSONL').write_bytes(lines)
    Path('lines.jsonl.gz').write_bytes(gzip.compress(lines[:999]) + gzip.compress(lines[999:]))  # as of `cat`
    made = {}
    for source, name in {'files': 'files', 'files/**/*.md': 'files', 'marks.txt': 'marks', '-': 'stdin',
                         'marks.txt.gz': 'marks', 'tales.JSONL': 'tales', 'lines.jsonl.gz': 'lines',
                         'array.json': 'array', 'lines.ndjson': 'lines', 'lines2.json': 'lines2',
                         'table.csv': 'table', '- ': 'stdin', '-  ': 'stdin'}.items():
        piped = {'-': marked, '- ': array, '-  ': lines}.get(source, b'')
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(piped)))
        is_text = name in ('files', 'marks') or source == '-'
        prep(f'{source} --tokenizer=char --overwrite=True' + ' --field=story' * (not is_text))
        folder = f'data/{name}_char'
        made[source] = [prep_ids(folder, split).tolist() for split in ('train', 'val')]
    chars = sorted(set(''.join(texts)))
    wanted = [[i for text in of_split(split, texts) for i in [*map(chars.index, text), len(chars)]]
              for split in ('train', 'val')]
    assert all(ids == wanted for ids in made.values())
    meta = prepare.read_meta(folder)
    assert meta['val_bytes'] == sum(len(text.encode()) for text in texts[1::10]) and meta['eot'] == len(chars)


@pytest.mark.parametrize('name', ['one.jsonl', 'one.txt', '-'])
def test_a_single_text_is_cut_by_its_characters(name, monkeypatch, prep):
    text = 'é🙂 the only document '
    data = (text if name == 'one.txt' else json.dumps({'text': text})).encode()
    Path(name).write_bytes(data)
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(data)))
    prep(f'{name} --out=d --val_fraction=0.3')
    cut, ids = int(len(text) * 0.7), [bytes(prep_ids('data/d', split).tolist()) for split in ('train', 'val')]
    assert ids == [text[:cut].encode(), text[cut:].encode()]


@pytest.mark.parametrize('lengths', [(30, 3000), (3000, 30), (50, 50), (9,) * 25, (1, 90, *[5] * 20, 800, 4)])
def test_val_has_no_more_than_its_share(lengths, tmp_path):
    """Each tenth document as far as there is room; character by character, each is in one split, in order."""
    texts, n, room = [chr(97 + i) * length for i, length in enumerate(lengths)], 0, sum(lengths) / 10
    prepare.write_dataset(tmp_path, prep_texts(prep_source(*texts)), make_tokenizer('byte'), 'x')
    train, val = (bytes(ids[ids < 256].tolist()).decode() for ids in (
        prep_ids(tmp_path, 'train'), prep_ids(tmp_path, 'val')))
    wanted = {'train': '', 'val': ''}
    for i, text in enumerate(texts):
        n = min(len(text), math.ceil(room) - len(wanted['val'])) if i % 10 == 1 else 0
        wanted['val'] += text[len(text) - n:]
        wanted['train'] += text[:len(text) - n]
    assert (train, val) == (wanted['train'], wanted['val']) and 0 < len(val) < room + 1
    ends = np.flatnonzero(prep_ids(tmp_path, 'train') == 256)  # no two documents without an end between them
    assert len(ends) == len(set(train)) and ends[-1] == len(train) + len(ends) - 1


def test_a_py_file_is_text_but_in_a_folder_config(prep):
    code = 'raise SystemExit("learnt, not run")\n' * 20
    os.makedirs('config')
    for name, data in ('model.py', code), ('mine.py', 'x = 1\nout = "d"\n' + code), (
            'config/mine.py', "source = 'model.py'\nout = 'd'"):
        Path(name).write_text(data)
    for line in 'model.py --out=d', '--source=model.py --out=d', 'config/mine.py':
        assert prep(f'{line} --overwrite=True')[1] == ''
        ids = [prep_ids('data/d', split).tolist() for split in ('train', 'val')]
        assert bytes(sum(ids, [])).decode() == code
    assert 'mine.py sets out: is it settings or text?' in prep('mine.py')[1] and os.listdir('data') == ['d']


def test_text_that_is_not_utf8_is_replaced_when_asked(prep):
    Path('latin.txt').write_bytes(b'caf\xe9 au lait, ' * 9)
    prep('latin.txt --errors=replace')
    assert bytes(prep_ids('data/latin_byte', 'train').tolist()).startswith('caf\ufffd'.encode())


def shard_bytes(tokens):
    return np.array([20240520, 1, len(tokens), *[0] * 253], '<i4').tobytes() + tokens.astype('<u2').tobytes()


def test_shards_are_downloaded_and_read_in_place(tmp_path, monkeypatch):
    gpt2, text = prep_gpt2(monkeypatch), 'A few words. ' * 9
    ids = [np.array([50256, *gpt2.encode(text * (i + 1))]) for i in range(3)]

    def fetch(url, path):
        shard = re.fullmatch('.*/kjj0/finewebedu10B-gpt2/resolve/main/finewebedu_[a-z]+_(.*).bin', url)[1]
        Path(path).write_bytes(shard_bytes(ids[int(shard)]))
        return path
    monkeypatch.setattr(prepare, 'fetch', fetch)
    monkeypatch.setattr(prepare, 'shards', 2)
    meta = prepare.fetch_shards(tmp_path, prepare.find_source('fineweb_edu'))
    train, val = (prepare.Bins(tmp_path, split) for split in ('train', 'val'))
    assert train.n_tokens == meta['train_tokens'] == sum(map(len, ids[1:])) and val.n_tokens == len(ids[0])
    assert meta['bytes_per_token'] == len(text) / len(ids[0])
    assert prepare.load_tokenizer(tmp_path).decode(ids[0][1:]) == text


@pytest.mark.parametrize('name', ['big.txt', 'big.parquet'])
def test_much_text_needs_little_memory(name, tmp_path):
    if not os.path.exists('/proc/self/status'):
        pytest.skip('the most memory used is read from /proc: ru_maxrss is at first that of the parent')
    if name == 'big.txt':  # 58 MB
        (tmp_path / name).write_bytes(b'many words in a line, and many lines\n' * (1 << 15) * 48)
        (tmp_path / f'a {name}').write_text('small')
    else:  # 100 MB in one row group, as large on disk
        letters = np.random.default_rng(0).integers(97, 123, size=(5000, 20_000), dtype=np.uint8)
        write_parquet(tmp_path / name, [{'text': row.tobytes().decode()} for row in letters],
                      use_dictionary=False, compression='none')
        write_parquet(tmp_path / f'a {name}', [{'text': 'small'}])
    code = ("import sys; sys.argv = ['prepare.py']; import prepare\n"
            f"next(prepare.find_source('a {name}').documents())\n"
            "used = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
            f"tok, before, source = prepare.make_tokenizer('byte'), used(), prepare.find_source({name!r})\n"
            "n = prepare.characters_to_train_on(source, 0.1)\n"
            "prepare.write_dataset('d', prepare.split_texts(source, 0.1, n), tok, 'x')\n"
            "print(used() - before)")
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True,
                          cwd=tmp_path)
    assert int(done.stdout.split()[-1]) < 100 << 10 and os.path.getsize(tmp_path / 'd/train.bin') > 100e6


def test_a_new_source_and_tokenizer_are_one_entry_each(tmp_path, monkeypatch):
    monkeypatch.setitem(prepare.SOURCES, 'tales', lambda: prepare.Source(
        'tales', 'tales 1.0', lambda: ([f'tale {i} ', 'goes on'] for i in range(20))))
    monkeypatch.setitem(flat_tokenizer.MAKERS, 'reversed', lambda texts, **_: CharTokenizer(
        sorted({char for blocks in texts for block in blocks for char in block})[::-1], 99))
    source = prepare.find_source('tales')
    tok = make_tokenizer('reversed', (document for _, document, _ in prep_texts(source)))
    prepare.write_dataset(tmp_path, prep_texts(source), tok, 'x')
    text = prepare.load_tokenizer(tmp_path).decode(prep_ids(tmp_path, 'train'))
    assert text.startswith(f'tale 0 goes on{EOT}tale 2') and tok.chars[0] == 't'


def test_bad_input_is_one_line_and_leaves_what_was_there(prep):
    for name, data in (('short.txt', b'x'), ('cut.txt', 'abc🙂'.encode()[:-1]),
                       ('good.txt', b'some good text, enough for two parts'), ('other.txt', b'another text'),
                       ('broken.jsonl', b'{"text": "a"}\n\n{"text": "b"\n'),
                       ('number.jsonl', b'{"text": 3}'), ('list.jsonl', b'{"text": "a"}\n[1, 2]'),
                       ('array.json', b'[{"text": "a"}, 3]'), ('table.csv', b'id,story\n1,"a\nb"\n'),
                       ('cut.txt.gz', gzip.compress(b'some text')[:-9]), ('not.gz', b'text'),
                       ('bits.jsonl.gz', gzip.compress(b'some text')[:10] + b'\xff' * 20)):
        Path(name).write_bytes(data)
    assert not prep('good.txt --out=d')[1] and not prep('good.txt')[1]
    os.makedirs('deep')
    shutil.copy('other.txt', 'deep/good.txt')
    assert 'data/good_byte holds data of good.txt, not of deep/good.txt' in prep('deep/good.txt')[1]
    shutil.rmtree('data/good_byte')
    before = files_of('data/d')
    table = [('good.txt --field=x', '--field has no effect on good.txt'),
             ('good.txt --shards=2', '--shards has no effect on good.txt'),
             ('pydoc_chat --errors=replace', '--errors has no effect on pydoc_chat'),
             ('cut.txt', 'cut.txt is not UTF-8 text: 0xf0 .*--errors=replace'),
             ('good.txt --tokenizer=data/x', 'python prepare.py my.txt --out=x'),
             ('short.txt', 'train has no token to learn'), ('*.none', 'no such .*, pydoc_chat'),
             ('broken.jsonl', 'broken.jsonl, line 3'),
             ('number.jsonl', "number.jsonl, line 1: no text in field 'text'.* --field"),
             ('list.jsonl', r'list.jsonl, line 2: \[1, 2\] is not an object'),
             ('array.json', 'array.json, record 2: 3 is not an object'),
             ('table.csv', 'table.csv, line 3: no text .* its fields are id, story'),
             *((name, f'{name} is damaged') for name in ('cut.txt.gz', 'not.gz', 'bits.jsonl.gz'))]
    for line, message in table:
        for where in ('d', 'fresh'):                 # over an earlier folder, and to a new one
            assert re.search(message, prep(f'{line} --out={where} --overwrite=True')[1])
    error = prep('other.txt --out=d')[1]
    assert 'data/d holds data of good.txt, not of other.txt' in error and '--overwrite=True' in error
    assert os.listdir('data') == ['d'] and files_of('data/d') == before
    assert not prep('other.txt --out=d --overwrite=True')[1]


def test_a_run_that_fails_leaves_nothing_and_one_that_ends_no_old_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, tok = prep_source('one two three\n' * 20), make_tokenizer('byte')
    prepare.write_dataset('data/a', prep_texts(source), prep_toy_bpe(), 'a')
    Path('data/a/train.mask.bin').touch()
    before = files_of('data/a')

    def fails(path):
        raise OSError(errno.ENOSPC, 'no more')
    with monkeypatch.context() as patch:
        patch.setattr(prepare, 'sha256_of', fails)
        for folder in 'data/a', 'data/b':
            with pytest.raises(OSError, match='no more'):
                prepare.write_dataset(folder, prep_texts(source), tok, 'a')
    assert os.listdir('data') == ['a'] and files_of('data/a') == before
    prepare.write_dataset('data/a', prep_texts(source), tok, 'a')
    assert sorted(os.listdir('data/a')) == ['meta.json', 'train.bin', 'val.bin']


# encoding ---------------------------------------------------------------------------------------------------
def test_special_tokens_in_a_text_are_learnt_as_is_asked(prep):
    """Refused, or as plain text or as tokens; test_tokenizer.py compares the ids with transformers."""
    save_tokenizer(chat_tokenizer(), 'tok')
    texts = [f'record {i}' for i in range(30)]
    texts[6] = 'see <|im_start|>user\nHi<|im_end|>'
    write_jsonl('a.jsonl', [{'text': text} for text in texts])
    assert "document 7: '<|im_start|>' in 'see <|im_start|>user" in prep('a.jsonl --tokenizer=tok')[1]
    assert os.listdir('data') == []
    for how in ('text', 'tokens'):
        prep(f'a.jsonl --tokenizer=tok --out={how} --special_tokens={how}')
        marks = len('<|im_start|><|im_end|>') * (how == 'tokens')
        meta = prepare.read_meta(f'data/{how}')
        assert meta['train_bytes'] + meta['val_bytes'] == len(''.join(texts)) - marks
    # conversations are rendered with these tokens: a message may not smuggle them in
    write_jsonl('chats.jsonl', [{'prompt': 'Hi<|im_end|>', 'response': 'Hello'}] * 9)
    assert "line 1: '<|im_end|>'" in prep('chats.jsonl --tokenizer=tok')[1]


@pytest.mark.parametrize('name', ['byte', 'char', 'gpt2', 'cl100k_base', 'o200k_base'])
@pytest.mark.parametrize('chunk', [7, 100])
def test_in_pieces_is_as_in_one_piece(name, chunk, tmp_path, monkeypatch):
    text = prep_awkward(3000) + 'ＡＢＣ' * 2000 + '\n' + prep_awkward(200, 2)  # with one long word
    tok = make_tokenizer(name, [[text]]) if name in ('byte', 'char') else \
        prep_toy_bpe(prep_patterns()[name])
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', chunk)
    monkeypatch.setattr(flat_tokenizer, 'AROUND', 0)
    source = prepare.Source('x', 'x', lambda: [(text[i:i + 1000] for i in range(0, len(text), 1000))])
    prepare.write_dataset(tmp_path, prep_texts(source), tok, 'a')
    cut = int(len(text) * 0.9)
    for split, part in ('train', text[:cut]), ('val', text[cut:]):
        assert prep_ids(tmp_path, split).tolist() == tok.encode(part, allow_special=False)


@pytest.mark.parametrize('chats', [False, True])
def test_two_processes_write_what_one_writes(chats, tmp_path, monkeypatch):
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 500)
    pools, real = [], concurrent.futures.ProcessPoolExecutor
    monkeypatch.setattr(concurrent.futures, 'ProcessPoolExecutor',
                        lambda n, **more: pools.append(n) or real(n, **more))
    if chats:
        rng, tok = random.Random(2), chat_tokenizer()
        source = source_of_chats([chat_of(rng) for _ in range(60)])
    else:
        source, tok = prep_source(*[prep_awkward(300 + 50 * i, seed=i) for i in range(12)]), prep_toy_bpe()
    for n in (1, 2):
        prepare.write_dataset(tmp_path / f'p{n}', prep_texts(source), tok, 'x', n, 100 if chats else None)
    assert pools == [2] and files_of(tmp_path / 'p1') == files_of(tmp_path / 'p2')


# conversations ----------------------------------------------------------------------------------------------
def tokenizer_with_tools():
    return JsonTokenizer(chat_tokenizer().source, {'chat_template': (
        "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>"
        "{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")})


def chat_of(rng, turns=2, system=False):
    def words():
        some = ['a', 'word', 'é🙂', 'def x():\n', '\n']
        return ' '.join([rng.choice(some) for _ in range(rng.randrange(9))] + ['end']).strip()
    messages = [{'role': 'system', 'content': words()}] if system else []
    return messages + prepare.make_messages(*[(words(), words()) for _ in range(turns)])


@pytest.mark.parametrize('template', ['chatml', 'qwen3', 'smollm', 'llama3', 'llama2'])
def test_the_mask_is_what_the_assistant_writes(template):
    """And its end mark; what stands before an answer is exactly what a model is prompted with."""
    tok, rng = chat_tokenizer(template), random.Random(0)
    end = CHAT_ENDS.get(template, '<|im_end|>')
    for turns in (1, 2, 3):
        first, messages = 1 + (turns == 2), chat_of(rng, turns, system=turns == 2)
        ids, mask = prepare.encode_conversation(tok, prepare.Conversation('here', messages))
        assert ids.tolist() == tok.encode_chat(tok.render(messages, add_generation_prompt=False))
        answers = [tok.decode([i for i, _ in run]) for learnt, run in
                   itertools.groupby(zip(ids, mask), key=lambda pair: pair[1]) if learnt]
        wanted = [message['content'] for message in messages[first::2]]
        assert [answer.removesuffix(end).strip() for answer in answers] == wanted
        assert all(answer.endswith(end) for answer in answers)
        assert ids[:np.flatnonzero(mask)[0]].tolist() == tok.chat(messages[:first], thinking=None)


@pytest.mark.parametrize('template', [
    '{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}',
    '{% for m in messages %}{{ m.content }}{% endfor %}'])
def test_a_template_that_hides_the_answers_is_refused(template):
    tok = JsonTokenizer(chat_tokenizer().source, {'chat_template': template})
    messages = prepare.make_messages(('Hi', 'Hello'))
    with pytest.raises(ValueError, match='there, message 2: .*another way'):
        prepare.encode_conversation(tok, prepare.Conversation('there', messages))


def test_a_slot_is_filled_and_a_longer_conversation_is_cut():
    chats = [('train', np.array(ids, '<u2'), np.ones(len(ids), np.uint8), len(ids))
             for ids in ([11], [21, 22, 23], [31, 32, 33, 34], range(41, 51))]
    counts = collections.Counter()
    _, ids, mask, sizes = zip(*(part for part in prepare.pack(chats, 5, np.array(9, '<u2'), counts)
                                if part[0] == 'train'))
    ids, mask = np.concatenate(ids), np.concatenate(mask)
    assert ids.tolist() == [
        9, 11, 9, 9, 9,  9, 21, 22, 23, 9,  9, 31, 32, 33, 34,
        9, 41, 42, 43, 44,  9, 45, 46, 47, 48,  9, 49, 50, 9, 9,  9]
    unknown = {45, 49}  # after a cut there is nothing before them that they could follow from
    assert mask.tolist() == [int(i != 9 and i not in unknown) for i in ids] and sum(sizes) == 18
    assert counts == {'cut': 1, 'filled': len(ids) - np.count_nonzero(ids == 9) + 6}


def test_all_shapes_of_records_are_the_same_conversations(prep):
    """Packed in order; the answers are what is learnt."""
    tok = chat_tokenizer()
    save_tokenizer(tok, 'tok')
    pairs = [(f'What is {i}?\n\nAs a word', f'It is {i}.') for i in range(50)]
    shapes = {
        'messages': [{'messages': prepare.make_messages(pair)} for pair in pairs],
        'talk': [{'talk': prepare.make_messages(pair), 'text': 'x'} for pair in pairs],
        'question': [{'question': a, 'answer': b, 'id': 3} for a, b in pairs],
        'sharegpt': [{'id': 'x', 'conversations': [{'from': 'human', 'value': a},
                                                   {'from': 'gpt', 'value': b}]} for a, b in pairs],
        'alpaca': [dict(zip(('instruction', 'input'), a.split('\n\n')), output=b) for a, b in pairs],
        'empty': [{'instruction': a, 'input': '', 'output': b} for a, b in pairs]}
    made = set()
    for name, records in shapes.items():
        write_jsonl(f'{name}.jsonl', records)
        prep(f'{name}.jsonl --tokenizer=tok --field={"talk" if name == "talk" else "text"}')
        made.add(tuple(data for file, data in sorted(files_of(f'data/{name}').items()) if '.bin' in file))
    assert len(made) == 1 and prepare.load_tokenizer('data/talk').chat_template == tok.chat_template
    for split in ('train', 'val'):
        wanted = [prepare.encode_conversation(tok, prepare.Conversation('x', prepare.make_messages(pair)))
                  for pair in of_split(split, pairs)]
        ids, mask = prep_ids('data/talk', split), prep_ids('data/talk', f'{split}.mask', np.uint8)
        for found, parts in zip((ids, mask), zip(*wanted)):
            assert np.array_equal(found[ids != 256], np.concatenate(parts))
    meta = prepare.read_meta('data/talk')
    assert (ids[::meta['block_size']] == 256).all() and len(ids) % meta['block_size'] == 1
    assert meta['train_bytes'] + meta['val_bytes'] == sum(len(answer) for _, answer in pairs)
    prep('talk.jsonl --out=talk')  # text: its masks are gone
    assert sorted(os.listdir('data/talk')) == ['meta.json', 'train.bin', 'val.bin']


@pytest.mark.parametrize('kind', ['texts', 'messages'])
def test_parquet_is_prepared_as_the_same_json_lines(kind, monkeypatch, prep):
    """Texts, and conversations with calls and tools, in one process or two: byte for byte."""
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 300)
    save_tokenizer(tokenizer_with_tools(), 'tok')
    rng = random.Random(0)
    pairs = [(prep_awkward(rng.randrange(80), i) + '?', prep_awkward(90, i) + '!') for i in range(50)]
    calls = [{'function': {'name': 'now', 'arguments': '{"zone": "é"}'}}]
    said = [[{'role': 'user', 'content': a}, *[{'role': 'assistant', 'content': '', 'tool_calls': calls},
                                               {'role': 'tool', 'content': '12:00'}] * (i % 3 == 1),
             {'role': 'assistant', 'content': b}] for i, (a, b) in enumerate(pairs)]
    records = {
        'texts': [{'id': i, 'tale': a * (i % 5 > 0), 'more': [{'a': i / 3}]}
                  for i, (a, _) in enumerate(pairs)],
        'messages': [{'messages': messages, **({'tools': json.dumps(TOOLS)} if i % 2 else {'n': i})}
                     for i, messages in enumerate(said)]}[kind]
    write_jsonl('a.jsonl', records)
    write_parquet('a.parquet', records, row_group_size=3)
    made = []
    for name, n in ('jsonl', 1), ('parquet', 1), ('parquet', 2):
        prep(f'a.{name} --tokenizer=tok --out={name}{n} --procs={n} --field=tale')
        files = files_of(f'data/{name}{n}')
        made.append({**files, 'meta.json': {**json.loads(files['meta.json']), 'source': ''}})
    assert made[0] == made[1] == made[2] and ('train.mask.bin' in files) == (kind == 'messages')
    assert prepare.read_meta('data/parquet2')['source'] == 'a.parquet'


def test_bench_reads_parquet_as_json_lines(tmp_path):
    records = [{'text': prep_awkward(9 + i, i)} for i in range(9)]
    write_jsonl(tmp_path / 'a.jsonl', records)
    write_parquet(tmp_path / 'a.parquet', records)
    lines, rows = (bench.text_tokens(str(tmp_path / f'a.{name}'), make_tokenizer('byte'))[0]
                   for name in ('jsonl', 'parquet'))
    assert len(lines) == len(rows) == 9
    assert all(np.array_equal(a, b) for line, row in zip(lines, rows) for a, b in zip(line, row))


def test_bad_parquet_is_one_line(prep, monkeypatch):
    write_parquet('a.parquet', [{'story': 'a', 'id': 1}, {'story': 'b', 'id': 2}])
    write_parquet('null.parquet', [{'text': 'a'}, {'text': None}])
    Path('cut.parquet').write_bytes(Path('a.parquet').read_bytes()[:-9])
    for name, message in [('a', "row 1: no text in field 'text', its fields are story, id"),
                          ('null', 'row 2: no text'), ('cut', 'Parquet magic bytes')]:
        error = prep(f'{name}.parquet')[1]
        assert error.startswith(f'{name}.parquet') and message in error and not os.path.exists('data')
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    with pytest.raises(ImportError, match='^a.parquet needs pyarrow.parquet: pip install pyarrow'):
        prepare.find_source('a.parquet')


def test_bad_conversations_are_named_by_file_and_line(prep):
    save_tokenizer(chat_tokenizer(), 'tok')
    good = prepare.make_messages(('Hi', 'Hello'))
    user, answer = good
    table = [({'messages': [answer, user]}, 'take turns'), ({'text': 'a'}, 'its fields are text'),
             ({'messages': 'Hi'}, 'its fields are messages'), ({'messages': [1]}, 'needs a list of objects'),
             ([user], 'is not an object'), ({'prompt': [user], 'response': 'x'}, 'message 1: '),
             ({'messages': [user, {'role': 'assistant', 'content': ' '}]}, 'message 2: '),
             ({'messages': [{'from': 'human', 'value': 'x'}, {'from': 'bing', 'value': 'x'}]}, "'bing'")]
    for record, part in table:
        write_jsonl('chats.jsonl', [{'messages': good}, record])
        error = prep('chats.jsonl --tokenizer=tok')[1]
        assert 'chats.jsonl, line 2' in error and part in error and os.listdir('data') == []
    write_jsonl('chats.jsonl', [{'messages': good}])
    os.makedirs('more')
    shutil.move('chats.jsonl', 'more/1.jsonl')
    Path('more/2.txt').write_text('some text')
    out, error = prep('more --tokenizer=tok')
    assert 'more/1.jsonl holds conversations: all files are read as such' in out and '2.txt, line 1' in error


def test_calls_are_learnt_and_tools_are_not(tmp_path, monkeypatch):
    """As MiniMind has them: tools in the system's message, these and calls as JSON in JSON."""
    called, system = '[{"function": {"name": "now"}}]', 'Be brief'
    path = tmp_path / 'sft.jsonl'
    write_jsonl(path, [{'conversations': [
        {'role': 'system', 'content': system, 'tools': json.dumps(TOOLS)},
        {'role': 'user', 'content': 'When?'}, {'role': 'assistant', 'content': '', 'tool_calls': called},
        {'role': 'tool', 'content': '12:00'}, {'role': 'assistant', 'content': 'Noon.', 'tool_calls': ''}]}])
    monkeypatch.setattr(prepare, 'fetch', lambda *_: str(path))
    found, = prepare.find_source('minimind_sft').documents()
    tok = tokenizer_with_tools()
    ids, mask = prepare.encode_conversation(tok, found)
    assert tok.decode(ids).startswith(f'<tools>{json.dumps(TOOLS)}\n<|im_start|>system\n{system}<|im_end|>')
    runs = itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])
    assert [tok.decode([i for i, _ in run]) for learnt, run in runs if learnt] == [
        f'{called}<|im_end|>', 'Noon.<|im_end|>']


def test_pydoc_chat_is_short_and_the_same_each_time():
    chats = list(prepare.pydoc_chats())
    assert 2000 < len(chats) < 9000 and chats == list(prepare.pydoc_chats())
    texts = [message['content'] for _, messages, _ in chats for message in messages]
    assert max(map(len, texts)) < 200
    said = dict(zip(texts[::2], texts[1::2]))
    assert said['What does os.path.join do?'].startswith('Join two or more pathname components')
    assert said['What arguments does os.path.join take?'] == 'os.path.join(a, *p)'


def test_look_shows_what_a_folder_has(prep):
    rng, tok = random.Random(3), chat_tokenizer()
    source = source_of_chats([chat_of(rng) for _ in range(30)])
    prepare.write_dataset('data/chats', prep_texts(source), tok, 'x', 1, 300)
    out, _ = prep('look chats')
    ids, mask = prep_ids('data/chats', 'train'), prep_ids('data/chats', 'train.mask', np.uint8)
    assert f'train.bin: {len(ids):,} tokens, {mask.mean():.1%} learnt' in out
    shown = out.partition('[[learnt]]:\n')[2]
    assert shown.replace('[[', '').replace(']]', '') == tok.decode(ids[:300]) + '\n'
    assert ''.join(re.findall(r'\[\[(.*?)\]\]', shown, re.DOTALL)) == tok.decode(ids[:300][mask[:300] == 1])


# reading ----------------------------------------------------------------------------------------------------
def test_meta_pkl_is_read_but_runs_no_code(tmp_path):
    meta = {'vocab_size': 3, 'itos': dict(enumerate('\nab')), 'stoi': {'\n': 0, 'a': 1, 'b': 2}}
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps(meta))
    tok = prepare.load_tokenizer(tmp_path)
    assert tok.n_vocab == 3 and tok.encode('ab\n') == [1, 2, 0] and tok.decode([1, 2, 0]) == 'ab\n'

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'pwned'),)
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({**meta, 'x': Evil()}))
    with pytest.raises(ValueError, match='only plain data is read'):
        prepare.read_meta(tmp_path)
    assert not (tmp_path / 'pwned').exists()


def test_without_meta_gpt2_is_assumed(tmp_path):
    meta = prepare.read_meta(tmp_path)
    assert (meta['vocab_size'], meta['dtype'], meta['tokenizer']) == (50304, 'uint16', None)


@pytest.mark.parametrize('n_vocab, dtype', [(65536, 'uint16'), (65537, 'uint32')])
def test_bins_dtype_follows_the_vocabulary(n_vocab, dtype, tmp_path):
    text = ''.join(chr(0x10000 + i) for i in range(n_vocab))
    tok = make_tokenizer('char', text)
    meta = prepare.write_dataset(tmp_path, prep_texts(prep_source(text)), tok, 'a')
    assert meta['dtype'] == dtype and tok.n_vocab == n_vocab
    bins = prepare.Bins(tmp_path, 'val')
    assert [ids.item() for ids in bins.batch([bins.n_sequences(1) - 1], 1)] == [n_vocab - 2, n_vocab - 1]


@pytest.mark.parametrize('name, command', [
    ('shakespeare_char', 'python prepare.py shakespeare --tokenizer=char'),
    ('shakespeare', 'python prepare.py shakespeare --tokenizer=gpt2'),
    ('openwebtext', 'python prepare.py openwebtext'),
    ('fineweb_edu_text_bpe4096', 'python prepare.py fineweb_edu_text --tokenizer=bpe:4096'),
    ('pystdlib_bpe4096', 'python prepare.py'),
    ('minimind_bpe6400', 'python prepare.py minimind --tokenizer=bpe:6400'),
    ('mydata', 'python prepare.py my.txt --out=mydata')])
def test_missing_data_names_the_command_that_prepares_it(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as e:
        prepare.Bins(os.path.join('data', name), 'train')
    assert f'is not prepared: no train.bin; run `{command}`' in str(e.value)


def test_too_few_tokens_and_ids_outside_the_vocabulary(tmp_path):
    ids = np.zeros(300, np.uint16)
    ids[222] = 777
    ids.tofile(tmp_path / 'val.bin')
    bins = prepare.Bins(tmp_path, 'val')
    bins.vocab_size = 700
    assert bins.n_sequences(299) == 1 and bins.batch([0, 1], 99)[1].shape == (2, 99)
    with pytest.raises(ValueError, match=r'val.bin has 300 tokens, .* = 301: lower --block_size'):
        bins.batch([0], 300)
    with pytest.raises(ValueError, match=r'val.bin: token 777 is outside .* of 700'):
        bins.batch([0, 1, 2], 99)
    (tmp_path / 'val.mask.bin').write_bytes(b'\1' * 98)
    with pytest.raises(ValueError, match='val.bin: .* mask'):
        prepare.Bins(tmp_path, 'val')


@pytest.mark.parametrize('masked', [True, False])
def test_batches_of_shards_against_plain_indexing(masked, tmp_path):
    """One shard with the header of others, each with a mask or none."""
    rng, expected = np.random.default_rng(0), []
    for i, n in enumerate((45, 7, 71)):
        ids, mask = rng.integers(1000, size=n, dtype=np.uint16), rng.integers(not masked, 2, size=n)
        (tmp_path / f'train_{i}.bin').write_bytes(ids.tobytes() if i else shard_bytes(ids))
        if masked:
            mask.astype(np.uint8).tofile(tmp_path / f'train_{i}.mask.bin')
        for at in range(0, n - 10, 10):  # a sequence of 11 tokens ends before n
            learnt = [int(ids[j]) if mask[j] else -1 for j in range(at + 1, at + 11)]
            expected.append((ids[at:at + 10].tolist(), learnt))
    bins = prepare.Bins(tmp_path, 'train')
    order = rng.permutation(len(expected))
    inputs, targets = bins.batch(order, 10)
    assert bins.n_sequences(10) == len(expected) and inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs, [expected[i][0] for i in order])
    assert np.array_equal(targets, [expected[i][1] for i in order]) and bool(bins.masks) == masked
    masks = [path.read_bytes() for path in tmp_path.glob('*.mask.bin')]
    assert not masked or bins.n_targets == sum(map(sum, masks))


# downloads --------------------------------------------------------------------------------------------------
BODY = bytes(random.Random(3).randrange(256) for _ in range(200_000))


class Handler(http.server.BaseHTTPRequestHandler):
    """/ok; /500x2 fails twice; /lie sends half; /404 and /503; a path of `files` sends that file"""
    seen, files = [], {}

    def do_GET(self):
        self.seen.append(self.path)
        status = {'/404': 404, '/503': 503, '/500x2': 500 if len(self.seen) < 3 else 200}.get(self.path, 200)
        body = self.files.get(self.path, BODY) if status == 200 else b'sorry'
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body[:len(body) // (2 if self.path == '/lie' else 1)])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(prepare, 'RETRY_WAITS', (0, 0, 0))
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    Handler.seen = []
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


@pytest.mark.parametrize('path, n_requests', [('/ok', 1), ('/500x2', 3)])
def test_fetch_brings_the_file(path, n_requests, server, tmp_path):
    for _ in range(2):  # the second time it is there already
        prepare.fetch(server + path, str(tmp_path / 'deep' / 'file'))
        assert files_of(tmp_path / 'deep') == {'file': BODY} and len(Handler.seen) == n_requests


@pytest.mark.parametrize('path, message', [
    ('/404', '/404 is not there'), ('/503', '503.*: go online'), ('/lie', '/lie')])
def test_fetch_says_what_is_wrong(path, message, server, tmp_path):
    with pytest.raises(OSError, match=message):
        prepare.fetch(server + path, str(tmp_path / 'file'))
    assert not (tmp_path / 'file').exists()


@pytest.mark.parametrize('name, n, path', [
    ('openwebtext', 2, 'Skylion007/openwebtext/resolve/main/plain_text/train-{:05d}-of-00080.parquet'),
    ('fineweb_edu_text', 1, 'karpathy/fineweb-edu-100b-shuffle/resolve/main/shard_{:05d}.parquet'),
    ('smol_smoltalk', 4, 'HuggingFaceTB/smol-smoltalk/resolve/main/data/train-{:05d}-of-00004.parquet'),
    ('tinystories', 1, 'roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt')])
def test_sources_are_downloaded_in_order_and_once(name, n, path, server, tmp_path, monkeypatch):
    """As many files as --shards says; smol_smoltalk has four."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, 'HUB', f'{server}/hub')
    monkeypatch.setattr(prepare, 'shards', 9 if n == 4 else n)
    paths, texts = [f'/hub/{path}'.format(i) for i in range(n)], []
    for i, one in enumerate(paths):
        texts += [f'{i} is here'] * 2
        if path.endswith('.txt'):
            Path('file').write_text('<|endoftext|>'.join(texts[-2:]))
        elif name == 'smol_smoltalk':
            write_parquet('file', [{'messages': prepare.make_messages(('Hi', texts[-1])), 'source': 'x'}] * 2)
        else:
            write_parquet('file', [{'text': texts[-1]}] * 2)
        monkeypatch.setitem(Handler.files, one, Path('file').read_bytes())
    found = prepare.find_source(name)
    for _ in range(2):
        made = [prepare.contents(document)[1] if found.chats else ''.join(document)
                for document in found.documents()]
        assert made == texts and Handler.seen == paths
    assert prepare.output_folder(None, found, 'gpt2') == os.path.join('data', {
        'openwebtext': name, 'smol_smoltalk': name}.get(name, f'{name}_gpt2'))
