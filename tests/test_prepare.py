"""Tests of prepare.py: sources, splits, conversations, files on disk and reading them."""
import bz2
import collections
import contextlib
import csv
import glob
import gzip
import http.server
import itertools
import json
import lzma
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from common import (
    CHAT_ENDS,
    PREP_DATA,
    ROOT,
    TOOLS,
    chat_tokenizer,
    of_split,
    prep_awkward,
    prep_gpt2,
    prep_ids,
    prep_source,
    run,
    save_tokenizer,
)

import prepare
from tokenizer import make_tokenizer
from zoo.tokenizer_json import JsonTokenizer, bpe_json, byte_chars

SHAKESPEARE = Path(PREP_DATA, 'tinyshakespeare.txt')
SPLITS = ('train', 'val')


@pytest.fixture
def prep(tmp_path, monkeypatch, capsys):
    """prepare.py in an empty folder: a function of its command line -> (output, error)."""
    monkeypatch.chdir(tmp_path)

    def prep(line):
        error = ''
        try:
            with contextlib.suppress(SystemExit):
                run('prepare.py', *line.split())
        except (ValueError, OSError) as e:
            error = str(e)
        return capsys.readouterr().out, error
    return prep


def prep_texts(source):
    """split_texts of a source, as in prepare.py."""
    return prepare.split_texts(source, 0.1, prepare.characters_to_train_on(source, 0.1))


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_jsonl(path, records):
    Path(path).write_text('\n'.join(map(json.dumps, records)), 'utf-8')


def write_parquet(path, records, **options):
    pa = pytest.importorskip('pyarrow')
    pytest.importorskip('pyarrow.parquet').write_table(pa.Table.from_pylist(records), path, **options)


# whole runs -------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f'no {SHAKESPEARE}: set FLATGPT_DATA to its folder')
@pytest.mark.parametrize('tokenizer, n_train, n_val, vocab, folder', [
    ('char', 1_003_854, 111_540, 65, 'data/shakespeare_char'),
    ('gpt2', 301_966, 36_059, 50257, 'data/shakespeare')])
def test_shakespeare_as_nanogpt(tokenizer, n_train, n_val, vocab, folder, monkeypatch, prep):
    text = SHAKESPEARE.read_text('utf-8')
    chars, cut = sorted(set(text)), int(len(text) * 0.9)
    encode = (prep_gpt2(monkeypatch).bpe.encode_ordinary if tokenizer == 'gpt2' else
              lambda text: list(map(chars.index, text)))
    os.makedirs('data/shakespeare')
    shutil.copy(SHAKESPEARE, 'data/shakespeare/input.txt')
    prep(f'shakespeare --tokenizer={tokenizer}')
    meta = prepare.read_meta(folder)
    assert (meta['train_tokens'], meta['val_tokens'], meta['vocab_size']) == (n_train, n_val, vocab)
    for split, part in zip(SPLITS, (text[:cut], text[cut:])):
        assert prep_ids(folder, split).tolist() == encode(part)


def test_default_is_the_standard_library(prep):
    assert f"dataset = '{Path(prepare.FIRST_RUN).name}'" in (ROOT / 'config/default.py').read_text()
    prep('--tokenizer=byte')
    paths = [path for path in prepare.library_files() if os.path.getsize(path)]
    assert not re.search(r'site-packages|[/\\]tests?[/\\]', ' '.join(paths))
    for split in SPLITS:
        texts = [Path(path).read_bytes() + b'\0' for path in of_split(split, paths)]
        ids = prep_ids('data/pystdlib_byte', split)
        assert ids.max() == 256 and ids.astype(np.uint8).tobytes() == b''.join(texts)  # 256 is end of text


def test_the_same_documents_from_every_kind_of_source(prep):
    """Files, records, text with marks, also compressed."""
    texts = [f'tale {i:02d} goes "on"\u2028' + 'and é🙂 \\ \r\n' * (i % 7 + 1) + 'on' for i in range(60)]
    records = [{'story': text, 'id': i} for i, text in enumerate(texts)]
    marks = ('\ufeff' + '\r\n<|endoftext|>\n\n'.join(texts)).encode() + b'<|endoftext|>\n'
    lines = [json.dumps(record, ensure_ascii=i % 2 == 0) for i, record in enumerate(records)]
    lines = ('\ufeff' + '\r\n'.join(['', '  ', json.dumps({'story': ''}), *lines])).encode()
    os.makedirs('files/deep')
    for i, text in enumerate(texts):
        Path(f'files/deep/{i:02d}.md').write_bytes(text.encode())
    for name in 'files/deep/05 empty.md', 'files/.hidden.md', 'files/more.md.part':
        Path(name).write_text('' if 'empty' in name else 'something else')
    with open('table.csv', 'w', encoding='utf-8-sig', newline='') as f:
        csv.writer(f).writerows([['story', 'id'], *(record.values() for record in records)])
    write_parquet('rows.parquet', records)
    for name, data in {'array.json': json.dumps(records, indent=1).encode('utf-8-sig'), 'lines.json': lines,
                       'tales.JSONL': lines, 'marks.txt': marks, 'packed.txt.bz2': bz2.compress(marks),
                       'small.txt.xz': lzma.compress(marks),  # the next one: concatenated .gz files
                       'zip.jsonl.gz': gzip.compress(lines[:999]) + gzip.compress(lines[999:])}.items():
        Path(name).write_bytes(data)
    chars = sorted(set(''.join(texts)))
    wanted = [[i for text in of_split(split, texts) for i in [*map(chars.index, text), len(chars)]]
              for split in SPLITS]
    for source in ['files', 'files/**/*.md', 'marks.txt', 'packed.txt.bz2', 'small.txt.xz', *(
            f'{name} --field=story' for name in ('array.json', 'lines.json', 'tales.JSONL', 'zip.jsonl.gz',
                                                 'table.csv', 'rows.parquet'))]:
        assert prep(f'{source} --tokenizer=char --overwrite=True')[1] == ''
        folder = f"data/{re.match(r'[a-z]*', source)[0]}_char"
        assert [prep_ids(folder, split).tolist() for split in SPLITS] == wanted
    meta = prepare.read_meta(folder)
    assert meta['val_bytes'] == sum(len(text.encode()) for text in texts[1::10]) and meta['eot'] == len(chars)


@pytest.mark.parametrize('most, lengths, val', [
    (10**7, [400], {0: 40}), (10**7, [30, 3000], {1: 303}), (10**7, [3000, 30], {0: 273, 1: 30}),
    (10**7, [9] * 25, {1: 9, 11: 9, 21: 5}), (20, [400], {0: 20}), (20, [9] * 25, {1: 9, 12: 9, 23: 2}),
    (10**7, [1, 90, *[5] * 20, 800, 4], {1: 90, 11: 5, 21: 5})])
def test_val_has_no_more_than_its_share(most, lengths, val, tmp_path, monkeypatch):
    """Every tenth document while there is room, and also the longest if these are few."""
    monkeypatch.setattr(prepare, 'VAL_CHARACTERS', most)
    texts = [chr(97 + i) * length for i, length in enumerate(lengths)]
    prepare.write_dataset(tmp_path, prep_texts(prep_source(*texts)), make_tokenizer('byte'), 'x')
    ids = [prep_ids(tmp_path, split) for split in SPLITS]
    counts = np.array([[np.count_nonzero(part == 97 + i) for i in range(len(texts))] for part in ids])
    assert counts.sum(0).tolist() == lengths and {n: c for n, c in enumerate(counts[1]) if c} == val
    if len(texts) > 1:  # an end between any two documents
        ends = np.flatnonzero(ids[0] == 256)
        assert len(ends) == np.count_nonzero(counts[0]) and ends[-1] == counts[0].sum() + len(ends) - 1


def test_val_has_each_tenth_conversation_as_many_as_an_evaluation_can_use(monkeypatch):
    monkeypatch.setattr(prepare, 'VAL_CHATS', 3)
    chats = prepare.Source('x', 'x', lambda: [prepare.Conversation('x', [])] * 100, chats=True)
    assert [split == 'val' for split, *_ in prep_texts(chats)] == [n in (1, 11, 21) for n in range(100)]


def test_a_path_with_a_slash_is_a_path(prep):
    """Also in the printed command for training."""
    Path('my.txt').write_text('some text that is long enough\n' * 9)
    for out, folder in ('x', 'data/x'), ('./x', './x'), ('sub/x', 'sub/x'), ('data/sub/x', 'data/sub/x'):
        printed, error = prep(f'my.txt --out={out}')
        name = re.search('--dataset=(.*)', printed)[1]
        assert not error and prepare.data_folder(name) == folder and os.path.isfile(f'{folder}/meta.json')
    with pytest.raises(FileNotFoundError, match='is not prepared .*run `python prepare.py'):
        prepare.Bins('data/none', 'train')


def shard_bytes(tokens, magic=20240520, dtype='<u2'):
    return np.array([magic, 1, len(tokens), *[0] * 253], '<i4').tobytes() + tokens.astype(dtype).tobytes()


def test_shards_are_read_in_place(tmp_path, monkeypatch):
    gpt2, text, source = prep_gpt2(monkeypatch), 'A few words. ' * 9, prepare.find_source('fineweb_edu')
    for n, url in enumerate(source.shards, 1):
        (tmp_path / Path(url).name).write_bytes(shard_bytes(np.array([50256, *gpt2.encode(text * n)])))
    meta = prepare.fetch_shards(tmp_path, source)
    assert '_val_000000.' in source.shards[0] and '_train_000010.' in url
    train, val = (prepare.Bins(tmp_path, split) for split in SPLITS)
    assert train.n_tokens == meta['train_tokens'] and len(train.shards) == 10
    assert meta['bytes_per_token'] == len(text) / val.n_tokens
    ids = val.batch([0], val.n_tokens - 1)[1][0]
    assert prepare.load_tokenizer(tmp_path).decode(ids) == text


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason="ru_maxrss begins as the parent's")
def test_much_text_needs_little_memory(tmp_path):
    (tmp_path / 'big.txt').write_bytes(b'many words in a line, and many lines\n' * (2 << 20))
    (tmp_path / 'small.txt').write_text('small')
    code = ("import sys; sys.argv = ['prepare.py']; import prepare\n"
            "prepare.find_source('small.txt')\n"
            "used = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
            "tok, before, source = prepare.make_tokenizer('byte'), used(), prepare.find_source('big.txt')\n"
            "n = prepare.characters_to_train_on(source, 0.1)\n"
            "prepare.write_dataset('d', prepare.split_texts(source, 0.1, n), tok, 'x')\n"
            "print(used() - before)")
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, cwd=tmp_path)
    assert int(done.stdout.split()[-1]) < 70 << 10 and os.path.getsize(tmp_path / 'd/train.bin') > 60e6


POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n'


def test_bad_input_is_one_line_and_leaves_what_was_there(prep):
    write_parquet('rows.parquet', [{'text': 'a'}])
    for name, data in {
            'short.txt': b'x', 'good.txt': b'some good text, enough for two', 'other.txt': b'another text',
            'latin.txt': b'caf\xe9 au lait', 'cut.gz': gzip.compress(b'some text')[:-9],
            'b.txt': Path('rows.parquet').read_bytes(), 'quote.csv': b'text,id\n"a"b,1\n',
            'p.parquet': POINTER, 'p.jsonl.gz': POINTER, 'u.txt': 'text'.encode('utf-16'),
            'a.tgz': gzip.compress(bytes(257) + b'ustar'), 'a.zst': b'(\xb5/\xfd',
            'cells.csv': b'text\na\nb, c\n', 'cut.json': b'[{"text": "a"},',
            'mix.jsonl': b'"a"\n["b", "c"]\n{"prompt": "a", "output": "b"}',
            'chats.jsonl': b'{"prompt": "a", "response": "b"}\n' * 9}.items():
        Path(name).write_bytes(data)
    assert not prep('good.txt --out=d')[1]
    before = files_of('data/d')
    for line, message in {
            'latin.txt': 'latin.txt is not UTF-8 text: .*--errors=replace',
            'short.txt': 'train has no token to learn', '*.none': 'no such .*, smol_smoltalk',
            'chats.jsonl --field=respone': "record 1: no text in field 'respone' .*--field",
            'cut.gz': 'cannot read cut.gz', 'quote.csv': 'quote.csv, line 2: .*quotation marks',
            'cut.json': 'cut.json, record 1: .* is not JSON: correct .*--errors=ignore',
            'p.jsonl.gz': 'is a pointer of git-lfs: run `git lfs pull`',
            'p.parquet': 'p.parquet is a pointer', 'b.txt': 'its name end in .parquet', 'u.txt': 'is UTF-16',
            'cells.csv': 'cells.csv, line 3 has more cells', 'data/d': 'data/d contains tokens',
            'data/d/train.bin': 'is binary data', 'a.tgz --errors=replace': 'a.tgz is a tar',
            'a.zst': 'a.zst is compressed by zstd',
            'mix.jsonl': 'record 4: .*texts and conversations must be prepared separately',
            'chats.jsonl --tokenizer=byte --errors=ignore': "tokenizer 'byte' has no chat template",
            'good.txt --block_size=64': 'it needs conversations', 'good.txt --field=x': 'it needs records',
            'a b c d': "'d' too: .*quote a glob", 'chats.jsonl': 'run `python prepare.py` first',
            'fineweb_edu --tokenizer=byte': 'only tokens of gpt2'}.items():
        assert re.search(message, prep(f'{line} --out=d --overwrite=True')[1])
    assert 'data/d contains data of a source other than other.txt' in prep('other.txt --out=d')[1]
    assert os.listdir('data') == ['d'] and files_of('data/d') == before
    assert not prep('other.txt --out=d --overwrite=True')[1]
    for errors, text in ('replace', 'caf\ufffd'), ('ignore', 'caf au'):
        assert not prep(f'latin.txt --errors={errors}')[1]
        assert bytes(prep_ids('data/latin_byte', 'train').tolist()).startswith(text.encode())


def processes(session):
    """The running processes of a session."""
    found = []
    for path in Path('/proc').glob('[0-9]*/stat'):
        with contextlib.suppress(OSError):
            state, _, group, *_ = path.read_text().rpartition(')')[2].split()
            found += [path.parent.name] * (int(group) == session and state != 'Z')
    return found


@pytest.mark.skipif(not os.path.exists('/proc/self/stat'), reason='processes are found in /proc')
@pytest.mark.parametrize('signals, status', [
    ([signal.SIGINT, signal.SIGINT], -signal.SIGINT), ([signal.SIGTERM], 143)])
def test_workers_end_with_the_program(signals, status, tmp_path, monkeypatch):
    """After Ctrl-C, pressed twice, and after SIGTERM."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(chat_tokenizer())
    Path('big.txt').write_text(''.join(f'{i} is another number\n' for i in range(1 << 18)))
    process = subprocess.Popen(
        [sys.executable, ROOT / 'prepare.py', 'big.txt', '--tokenizer=tok', '--procs=2', '--out=d'],
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(processes(process.pid)) < 3 or not glob.glob('data/.prepare-*'):
        time.sleep(0.05)
        assert process.poll() is None
    for number in signals:
        os.killpg(process.pid, number)
        time.sleep(0.1)
    assert process.wait(timeout=30) == status
    end = time.time() + 30
    while processes(process.pid):
        assert time.time() < end
        time.sleep(0.05)
    assert os.listdir('data') == [] and 'Traceback' not in process.stdout.read()


# conversations ----------------------------------------------------------------------------------------------
def make_messages(*pairs):
    return prepare.to_messages([*map(list, pairs)])


def chat_of(seed, turns=2):
    return make_messages(*[(f'a{prep_awkward(9, seed + turn)}?', f'b{prep_awkward(9, turn)}!')
                           for turn in range(turns)])


def answers_in(tok, ids, mask):
    """The texts that are learned."""
    runs = itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])
    return [tok.decode([i for i, _ in run]) for learned, run in runs if learned]


@pytest.mark.parametrize('template', ['chatml', 'qwen3', 'smollm', 'llama3', 'llama2'])
def test_the_mask_is_what_the_assistant_writes(template):
    """With its end mark. The ids before an answer are exactly the prompt in sampling."""
    tok = chat_tokenizer(template)
    end = CHAT_ENDS.get(template, '<|im_end|>')
    for first, turns in (1, 1), (2, 2), (1, 3):
        messages = [{'role': 'system', 'content': 'Be brief'}] * (first - 1) + chat_of(first, turns)
        ids, mask = prepare.encode_conversation(tok, prepare.Conversation('here', messages))
        assert ids.tolist() == tok.encode_chat(tok.render(messages, add_generation_prompt=False))
        answers = answers_in(tok, ids, mask)
        assert [answer.removesuffix(end).strip() for answer in answers] == [
            message['content'] for message in messages[first::2]]
        assert all(answer.endswith(end) for answer in answers)
        assert ids[:np.flatnonzero(mask)[0]].tolist() == tok.chat(messages[:first])


def test_a_slot_is_filled_and_a_longer_conversation_is_cut():
    """Any column is packed like the mask."""
    chats = [('train', {'': np.array(ids, '<u2'), '.mask': np.ones(len(ids), np.uint8),
                        '.weight': np.array(ids, '<f4') / 2}, len(ids), 0)
             for ids in ([11], [9, 21, 22, 23], [31, 32], range(41, 47))]  # one begins with the token itself
    counts = collections.Counter()
    packed = [*prepare.pack(chats, 5, np.array(9, '<u2'), counts)]
    ids, mask, weights = (np.concatenate([columns[name] for split, columns, _ in packed if split == 'train'])
                          for name in ('', '.mask', '.weight'))
    assert ids.tolist() == [9, 11, 9, 9, 9, 9, 21, 22, 23, 9, 9, 31, 32, 9, 9, 9, 41, 42, 43, 44, 9, 45, 46,
                            9, 9, 9]
    assert mask.tolist() == [int(i not in (9, 45)) for i in ids]  # 45 has no context
    assert weights.tolist() == [i / 2 * (i != 9) for i in ids] and weights.dtype == np.float32
    assert sum(n_bytes for *_, n_bytes in packed) == 13 and counts == {'cut': 1, 'opened': 0}


def test_conversations_are_packed_in_order(prep):
    """JSON Lines, parquet and more processes give the same files; only answers are learned."""
    tok, made = chat_tokenizer(), []
    save_tokenizer(tok)
    pairs = [(f'What is {i}?', f'It is {i}.') for i in range(70)]  # more than one group
    messages = list(map(make_messages, pairs))
    records = [{'messages': [QUESTION, ANSWER], 'talk': turns} for turns in messages]
    write_jsonl('chats.jsonl', records)
    write_parquet('chats.parquet', records)
    for name, procs in ('jsonl', 1), ('parquet', 1), ('parquet', 2):
        assert not prep(f'chats.{name} --field=talk --tokenizer=tok --procs={procs} --overwrite=True')[1]
        made.append(files_of('data/chats') | {'meta.json': None})  # names the source
    assert all(files == made[0] for files in made)
    meta = prepare.read_meta('data/chats')
    for split in SPLITS:
        wanted = [prepare.encode_conversation(tok, prepare.Conversation('x', turns))
                  for turns in of_split(split, messages)]
        ids, mask = prep_ids('data/chats', split), prep_ids('data/chats', f'{split}.mask', np.uint8)
        for written, parts in zip((ids, mask), zip(*wanted)):
            assert np.array_equal(written[ids != meta['eot']], np.concatenate(parts))
        assert (ids[::meta['packed']] == meta['eot']).all() and len(ids) % meta['packed'] == 1
    assert meta['train_bytes'] + meta['val_bytes'] == sum(len(answer) for _, answer in pairs)
    write_jsonl('chats.jsonl', [{'text': 'a' * 99}])
    meta['columns'] |= {'.weight': 'int16'}
    Path('data/chats/meta.json').write_text(json.dumps(meta))
    for name in 'val.weight.bin', 'train.backup.bin':
        Path('data/chats', name).write_bytes(b'old')
    prep('chats.jsonl --out=chats --overwrite=True')  # text: the columns are gone
    assert [*prepare.Bins('data/chats', 'train').columns] == ['']
    assert {path.name for path in Path('data/chats').glob('*.bin')} == {
        'train.bin', 'val.bin', 'train.backup.bin'}


QUESTION, ANSWER = {'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}
CALL = {'type': 'function', 'function': {'name': 'now', 'arguments': {'zone': 'utc', 'at': {'h': 1}}}}
OPENAI_CALL = {'type': 'function', 'function': {'name': 'now', 'arguments': json.dumps(
    CALL['function']['arguments'])}}
PADDED_CALL = {'id': None, 'type': 'function', 'function': {'name': 'now', 'arguments': {
    'zone': 'utc', 'at': {'h': 1, 'm': None}, 'city': None}}}


@pytest.mark.parametrize('record, messages', [
    ([QUESTION, ANSWER], [QUESTION, ANSWER]),  # nanochat's lines
    ({'messages': json.dumps([QUESTION, ANSWER])}, [QUESTION, ANSWER]),
    ({'system': 'Be', 'conversations': [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Ho'}]},
     [{'role': 'system', 'content': 'Be'}, QUESTION, ANSWER]),
    ({'instruction': 'And?', 'output': 'Yes', 'history': [['Who?', 'Ho']]},  # LLaMA-Factory's
     [{'role': 'user', 'content': 'Who?'}, {'role': 'assistant', 'content': 'Ho'},
      {'role': 'user', 'content': 'And?'}, {'role': 'assistant', 'content': 'Yes'}]),
    ({'instruction': 'Who?', 'context': 'A tale', 'response': 'Ho', 'category': ''},  # Dolly's
     [{'role': 'user', 'content': 'Who?\n\nA tale'}, ANSWER]),
    ({'system_prompt': 'Be brief', 'question': 'Hi', 'response': 'Ho'},  # OpenOrca's
     [{'role': 'system', 'content': 'Be brief'}, QUESTION, ANSWER]),
    ({'instruction': 'Hi', 'input': None, 'output': 'Ho'}, [QUESTION, ANSWER]),
    ({'prompt': [QUESTION], 'completion': [ANSWER]}, [QUESTION, ANSWER]),  # TRL's
    ({'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': one} for one in 'Hi']}, ANSWER]},
     [QUESTION, ANSWER]),  # OpenAI's
    ({'prompt': 'Hi', 'user': 'ID 7', 'completion': 'Ho', 'history': '[["Hi", "Ho"]]'},
     [QUESTION, ANSWER] * 2),
    *(({'messages': [QUESTION, {'role': 'assistant', 'content': None, 'tool_calls': calls}]},
       [QUESTION, {'role': 'assistant', 'content': '', 'tool_calls': [CALL]}])
      for calls in ([PADDED_CALL], json.dumps([OPENAI_CALL]))),  # the last is MiniMind's
    ({'messages': [QUESTION, {'role': 'assistant', 'content': None, 'reasoning': 'hm'}]},
     [QUESTION, {'role': 'assistant', 'content': '', 'reasoning': 'hm'}]),
    ({'messages': [QUESTION, ANSWER | {'weight': 0}]}, [QUESTION, ANSWER | {'weight': 0, 'learn': False}])])
def test_every_record_becomes_plain_messages(record, messages):
    assert prepare.read_record('x', record).messages == messages


NAMES = [*prepare.NAMES, 'text', 'messages', 'history', 'tools', 'tool_calls', 'function',
         'arguments', 'role', 'content', 'learn']


def odd(rng, depth=3):
    """A random JSON value, with fields of datasets."""
    kind = rng.randrange(4 if depth else 1)
    if kind < 2:
        return [odd(rng, depth - 1) for _ in range(rng.randrange(4))] if kind else rng.choice(
            [None, 0, True, 1e9, '', 'user', 'none', '[1', '[["a", "b"]]', '{"role": "user"}', '\ud800'])
    return {name: odd(rng, depth - 1) for name in rng.choices(NAMES, k=5)}


@pytest.mark.parametrize('lines, indent', [(True, None), (True, 1), (False, 1)])
def test_any_json_value_is_read_or_left_out(lines, indent, tmp_path, capsys):
    """On one line or several, or in an array. Well-formed conversations are found among wrong records."""
    rng, values, wrong, tok = random.Random(0), [], [], make_tokenizer('bpe:300', training=['ab'])
    for value in (odd(rng) for _ in range(600)):
        try:
            read = prepare.read_record('f, record 5', value)
            if read[0] == 'f, record 5':
                prepare.encode_chat(tok, 'text', 'ignore', ('train', read, True))
        except ValueError as e:
            assert re.match('f, record 5: .*: correct the record, .*--errors=ignore$', str(e))
            wrong += [value] * isinstance(value, dict)
    assert 100 < len(wrong) < 500
    pairs = [[f'Q{{{n}', f'"{n}]'] for n in range(99)]
    for pair in pairs:
        turns = [{'role': 'user', 'content': pair[0]}, {'role': 'assistant', 'content': pair[1]}]
        values += rng.sample(wrong, 2) + [rng.choice([
            turns, {'messages': turns}, {'conversations': json.dumps(turns)}, {'messages': [pair]},
            {'prompt': pair[0], 'output': pair[1]}, {'prompt': turns[:1], 'completion': turns[1:]}])]
    texts = [json.dumps(value, indent=indent) for value in values]
    (tmp_path / 'a.json').write_text('\n'.join(['{"prompt": "', 'x', *texts, '{"prompt":']) if lines else
                                     json.dumps(values, indent=indent))
    documents = [*prepare.file_documents([str(tmp_path / 'a.json')], errors='ignore', chats=True)]
    assert [[message['content'] for message in chat.messages] for chat in documents] == pairs
    assert f'left out {198 + 3 * lines} of {297 + 3 * lines} records: ' in capsys.readouterr().out


def test_each_file_is_judged_by_itself(tmp_path, monkeypatch, capsys):
    """TSV has no quotation marks."""
    monkeypatch.chdir(tmp_path)
    os.mkdir('it')
    Path('it/README.md').write_text('a card')
    Path('it/q.tsv').write_text('id\ttext\n1\t"Where\n2\tI "am"\n3\there."\n')
    texts = [[*document] for document in prepare.find_source('it').documents()]
    assert texts == [['a card'], ['"Where'], ['I "am"'], ['here."']]
    os.remove('it/q.tsv')
    write_jsonl('it/a.jsonl', [{'prompt': 'Hi', 'completion': 'Ho'}] * 2)
    os.symlink('..', 'it/loop')
    assert [chat.place for chat in prepare.find_source('it').documents()] == [
        f'it/a.jsonl, record {n}' for n in (1, 2)]
    assert 'left out, because other files have conversations: it/README.md' in capsys.readouterr().out


def published(special, message, prompt="'<|assistant|>'", bos='<s>', eos='</s>', ends='', begin=''):
    """A tokenizer of bytes and special tokens. Its chat template begins with `begin`, renders each message by
    the expression `message`, and asks for an answer by `prompt`. ends: in generation_config.json."""
    special = {text: 256 + i for i, text in enumerate(special.split())}
    template = (begin + "{% for m in messages %}{% set answer = m.role == 'assistant' %}{{ " + message
                + ' }}{% endfor %}{% if add_generation_prompt %}{{ ' + prompt + ' }}{% endif %}')
    return JsonTokenizer(bpe_json(byte_chars(), [], [], special), {
        'chat_template': template, 'eos_token': eos, 'bos_token': bos,
        'eos_token_id': [special[end] for end in ends.split()]})


ROLE = "'<|' + m.role + '|>' + m.content"
CALL_NAME = 'm.tool_calls[0].function.name'
KINDS = {  # the structure of published templates -> the token that keeps conversations apart
    'Zephyr': (published('<unk> <s> </s>', ROLE + ' + eos_token'), '<s>'),
    'Llama 2': (published('<unk> <s> </s>', "m.content + eos_token if answer else bos_token + '[' + "
                          "m.content + ']'", "''"), '<unk>'),
    'gpt-oss': (published('<|return|> <|endoftext|> <|end|> <|call|>', f"{ROLE} + ({CALL_NAME} + '<|call|>' "
                          "if m.tool_calls else '<|return|>' if answer and loop.last and "
                          "not add_generation_prompt else '<|end|>')", eos='<|return|>'), '<|endoftext|>'),
    'GLM': (published('<|endoftext|> <|user|> <|assistant|> <|tool|>',
                      f"{ROLE} + ({CALL_NAME} if m.tool_calls else '')", eos='<|endoftext|>',
                      ends='<|user|> <|tool|>'), '<|endoftext|>'),
    'Cohere': (published('</s> <s> <|done|>', ROLE + " + ('<|done|>' if answer else '') + eos_token",
                         begin='{{ bos_token }}'), '<s>'),
    'one special': (published('</s>', ROLE + ' + eos_token'), None),
    'R1': (published('<s> </s>', ROLE + ' + eos_token', "'<|assistant|><think>'"), '<s>'),
    'spaced': (published('<s> </s>', ROLE + " + ('' if loop.last else '\n') + eos_token"), '<s>'),
}
CALLED = {'role': 'assistant', 'content': '', 'tool_calls': [CALL]}
TOLD = {'role': 'tool', 'content': '12:00'}
TALK = make_messages(('Hi', 'Ho'), ('o', 'Oh'))  # the second question is part of the first answer


@pytest.mark.parametrize('kind, messages, learned', [
    ('Zephyr', TALK, ['Ho</s>', 'Oh</s>']), ('Llama 2', TALK[:3], ['Ho</s>']),
    ('gpt-oss', TALK, ['Ho', 'Oh<|return|>']),
    ('gpt-oss', [TALK[0], CALLED, TOLD, TALK[1]], ['now<|call|>', 'Ho<|return|>']),  # no published end
    ('GLM', TALK, ['Ho<|user|>', 'Oh<|user|>']), ('GLM', TALK[:3], ['Ho<|user|>']),
    ('GLM', [TALK[0], CALLED, TOLD, TALK[1]], ['now<|tool|>', 'Ho<|user|>']),
    ('GLM', [TALK[0], CALLED], ['now<|endoftext|>']),
    ('Cohere', TALK, ['Ho<|done|></s>', 'Oh<|done|></s>']), ('R1', TALK, ['Ho</s>', 'Oh</s>']),
    ('spaced', TALK, ['Ho\n</s>', 'Oh</s>'])])
def test_an_answer_ends_in_its_own_message(kind, messages, learned):
    tok, opened = KINDS[kind][0], []
    ids, mask = prepare.encode_conversation(tok, prepare.Conversation('x', messages), opened)
    text = tok.render(messages, False)
    assert answers_in(tok, ids, mask) == learned and len(opened) == 2 * (kind == 'R1')
    assert tok.decode(ids) in (text, f'{text}<|user|>', f'{text}<|endoftext|>')


def test_an_answer_that_the_template_omits_is_named():
    for tok, answer, key in ((KINDS['Zephyr'][0], CALLED | {'content': 'what is now?'}, 'tool_calls'),
                             (published('</s>', "m.role + (m.content[0].text or '')"), TALK[1], 'content')):
        with pytest.raises(ValueError, match=f'message 2: the chat template does not render its {key}'):
            prepare.encode_conversation(tok, prepare.Conversation('x', [TALK[0], answer]))


@pytest.mark.parametrize('kind', KINDS)
def test_the_token_between_conversations_is_never_inside(kind, prep):
    tok, token = KINDS[kind]
    save_tokenizer(tok)
    write_jsonl('chats.jsonl', [{'messages': TALK}] * 30)
    out, error = prep('chats.jsonl --tokenizer=tok --block_size=120')
    assert not error and ('no special token that can separate conversations' in out) == (token is None)
    assert ('60 answers lack the thought' in out) == (kind == 'R1')
    assert prepare.read_meta('data/chats')['eot'] == tok.special.get(token)
    if token:
        texts = [*filter(None, tok.decode(prep_ids('data/chats', 'train')).split(token))]
        text, = {text.removesuffix('<|user|>') for text in texts}
        assert text == tok.render(TALK, False).removeprefix(token) and len(texts) == 27
        write_jsonl('chats.jsonl', [{'messages': make_messages((f'a{token}b', 'Ho'))}] * 30)
        line = 'chats.jsonl --tokenizer=tok --special_tokens='  # a message may contain the token
        assert f'record 1, {token} would end the conversation early' in prep(f'{line}tokens')[1]
        assert not prep(f'{line}text')[1]


def test_a_conversation_that_the_template_rejects_is_named_or_left_out(prep):
    tok = JsonTokenizer(chat_tokenizer().source, {'eos_token': '<|im_end|>', 'chat_template': chat_tokenizer()
                        .chat_template + "{% if 'bad' in messages[0].content %}"
                        "{{ raise_exception('roles must alternate') }}{% endif %}"})
    save_tokenizer(tok)
    good = [{'prompt': f'{n}', 'response': f'{n}.'} for n in range(30)]
    bad = [{'prompt': 'bad', 'response': 'x'}]
    for n in (1, 2):
        write_jsonl('chats.jsonl', good[:5] + bad + good[5:])
        message = prep(f'chats.jsonl --tokenizer=tok --procs={n}')[1]
        assert 'chats.jsonl, record 6, the chat template rejects this: roles must alternate: ' in message
        out, error = prep(f'chats.jsonl --tokenizer=tok --procs={n} --errors=ignore')
        assert not error and '1 conversations are left out' in out
    text = ''.join(tok.decode(prep_ids('data/chats', split)) for split in SPLITS)
    assert text.count('<|im_start|>user') == 30 and 'bad' not in text


def test_messages_that_are_not_to_be_learned_are_only_read():
    tok = chat_tokenizer()
    record = {'messages': [QUESTION, dict(ANSWER, content='wrong', weight=0), QUESTION, ANSWER]}
    ids, mask = prepare.encode_conversation(tok, prepare.read_record('x', record))
    assert answers_in(tok, ids, mask) == ['Ho<|im_end|>'] and 'wrong' in tok.decode(ids)


def test_tool_data_under_our_own_template(prep):
    write_jsonl('chats.jsonl', [{'tools': TOOLS, 'messages': [
        QUESTION, {'role': 'assistant', 'content': None, 'tool_calls': [OPENAI_CALL]},
        {'role': 'tool', 'content': '12:00'}, ANSWER]}] * 20)
    assert not prep('chats.jsonl --tokenizer=bpe:300 --block_size=999')[1]
    tok = prepare.load_tokenizer('data/chats')
    ids, mask = prep_ids('data/chats', 'train'), prep_ids('data/chats', 'train.mask', np.uint8)
    assert f'<tools>{json.dumps(TOOLS)}</tools>' in tok.decode(ids)
    assert answers_in(tok, ids, mask)[:2] == [
        f'<tool_call>{json.dumps(CALL["function"])}</tool_call><|im_end|>', 'Ho<|im_end|>']


def test_a_tokenizer_without_an_end_of_text(prep):
    save_tokenizer(tok := published('<x>', ROLE))
    write_jsonl('tales.jsonl', [{'text': 'ab'}] * 20)
    assert 'tok has no special token that can separate documents' in prep('tales.jsonl --tokenizer=tok')[0]
    assert prep_ids('data/tales_tok', 'train').tolist() == tok.encode('ab' * 18)
    write_jsonl('chats.jsonl', [{'messages': TALK}] * 20)
    assert 'message 2: the chat template ends this answer without a known stop token' in prep(
        'chats.jsonl --tokenizer=tok')[1].replace('message 4', 'message 2')


def test_a_config_file_adds_a_source(prep):
    save_tokenizer(chat_tokenizer())
    assert not prep(f'{ROOT}/examples/pydoc_chat.py --tokenizer=tok')[1]
    tok = prepare.load_tokenizer('data/pydoc_chat')
    text = ''.join(tok.decode(prep_ids('data/pydoc_chat', split)) for split in SPLITS)
    said = dict(re.findall(r'user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n(.*?)<\|im_end\|>', text))
    assert said['What does os.path.join do?'].startswith('Join two or more pathname components')
    assert said['What arguments does os.path.join take?'] == 'os.path.join(a, *p)'
    assert 2000 < len(said) < 9000 and max(map(len, said.values())) < 200


# reading ----------------------------------------------------------------------------------------------------
def test_meta_pkl_is_read_but_runs_no_code(tmp_path):
    def dump(itos, **more):
        (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 3, 'itos': itos, **more}))
    for itos in {2: 'b', 0: '\n', 1: 'a'}, ['\n', 'a', 'b']:
        dump(itos)
        assert prepare.load_tokenizer(tmp_path).encode('ab\n') == [1, 2, 0]
    dump({1: 'a', 2: 'b', 3: 'c'})
    with pytest.raises(ValueError, match='^cannot read '):
        prepare.load_tokenizer(tmp_path)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'pwned'),)
    dump([], x=Evil())
    with pytest.raises(ValueError, match='only plain data is supported'):
        prepare.read_meta(tmp_path)
    assert not (tmp_path / 'pwned').exists()


def test_bins_dtype_follows_the_vocabulary(tmp_path):
    text = ''.join(chr(0x10000 + i) for i in range(65537))
    tok = make_tokenizer('char', texts=text)
    meta = prepare.write_dataset(tmp_path, prep_texts(prep_source(text)), tok, 'a')
    assert meta['dtype'] == 'uint32' and prepare.dtype_of(65536) == np.uint16
    bins = prepare.Bins(tmp_path, 'val')
    assert [ids.item() for ids in bins.batch([bins.n_sequences(1) - 1], 1)] == [65535, 65536]


def test_a_folder_that_is_prepared_again_keeps_its_old_readers(prep):
    old = []
    for tokenizer, text in ('char', 'abcd'), ('char', 'bcde'), ('char', 'cbed'), ('byte', 'efgh'):
        Path('my.txt').write_text(text * 300)
        assert not prep(f'my.txt --tokenizer={tokenizer} --out=d')[1]
        old.append((prepare.Bins('data/d', 'train'), prep_ids('data/d', 'train')))
        for bins, ids in old:
            assert bins.batch([0], 99)[0][0].tolist() == ids[:99].tolist()
    assert len({bins.meta['digest'] for bins, _ in old}) == 3  # abcd and bcde have the same ids


def test_too_few_tokens_and_ids_outside_the_vocabulary(tmp_path):
    ids = np.zeros(300, np.uint16)
    ids[222] = 777
    ids.tofile(tmp_path / 'val.bin')
    bins = prepare.Bins(tmp_path, 'val')
    assert prepare.read_meta(tmp_path)['vocab_size'] == 50304  # nanoGPT's
    bins.vocab_size = 700
    assert bins.n_sequences(299) == 1 and bins.batch([0, 1], 99)[1].shape == (2, 99)
    with pytest.raises(ValueError, match=r'val.bin has 300 tokens, .* = 301: lower --block_size'):
        bins.n_sequences(300)
    for read in (bins.check_vocabulary, lambda: bins.batch([0, 1, 2], 99)):
        with pytest.raises(ValueError, match=r'val.bin: token 777 is outside .* of 700'):
            read()


@pytest.mark.parametrize('masked', [True, False])
def test_batches_of_shards_against_plain_indexing(masked, tmp_path):
    """One of the shards has a header; all have columns, or none."""
    rng, expected, more = np.random.default_rng(0), [], []
    for i, n in enumerate((45, 7, 71)):
        ids, mask = rng.integers(1000, size=n, dtype=np.uint16), rng.integers(not masked, 2, size=n)
        (tmp_path / f'train_{i}.bin').write_bytes(ids.tobytes() if i else shard_bytes(ids))
        if masked:
            mask.astype(np.uint8).tofile(tmp_path / f'train_{i}.mask.bin')
            (mask - 7).astype(np.int16).tofile(tmp_path / f'train_{i}.page.bin')
            (tmp_path / f'train_{i}.old.bin').write_text('a copy, not a column')
        learned = [int(token) if shown else -1 for token, shown in zip(ids, mask)]
        expected += [(ids[at:at + 10].tolist(), learned[at + 1:at + 11])
                     for at in range(0, n - 10, 10)]  # a sequence of 11 tokens ends before n
        more += [(mask[at:at + 11] - 7).tolist() for at in range(0, n - 10, 10)]
    if masked:
        (tmp_path / 'meta.json').write_text('{"vocab_size": 1000, "columns": {".page": "int16"}}')
    bins, order = prepare.Bins(tmp_path, 'train'), rng.permutation(len(expected))
    inputs, targets = bins.batch(order, 10)
    assert bins.n_sequences(10) == len(expected) and inputs.dtype == targets.dtype == np.int64
    assert list(zip(inputs.tolist(), targets.tolist())) == [expected[i] for i in order]
    assert ('.mask' in bins.columns) == bins.meta['chats'] == masked
    if masked:
        assert bins.read(order, 10)['.page'].tolist() == [more[i] for i in order]
        np.zeros(8, np.int16).tofile(tmp_path / 'train_1.page.bin')
        with pytest.raises(ValueError, match=r'its column \.page have different sizes'):
            prepare.Bins(tmp_path, 'train')
        os.remove(tmp_path / 'train_0.mask.bin')
        with pytest.raises(FileNotFoundError, match=r'train_0\.mask\.bin'):
            prepare.Bins(tmp_path, 'train')


def test_a_digest_covers_every_column_and_masked_targets_have_no_bytes(tmp_path):
    digests = set()
    for mask in b'\0\1', b'\1\0':
        columns = {'': np.array([1, 2], '<u2'), '.mask': np.frombuffer(mask, np.uint8)}
        counts = collections.Counter()
        prepare.write_bins(tmp_path, [(split, columns, 1) for split in prepare.SPLITS], counts)
        digests.add(counts['digest'])
    assert len(digests) == 2
    assert prepare.count_bytes(np.array([-1, 5, 400]), make_tokenizer('byte')) == 1


def test_any_change_of_a_file_changes_the_identity(tmp_path):
    """Without a digest, or if the digest does not cover a mask; also a fact that a fork adds."""
    folders = tmp_path / 'plain', tmp_path / 'prepared'
    os.mkdir(folders[0])
    np.arange(99, dtype=np.uint16).tofile(folders[0] / 'train.bin')
    prepare.write_dataset(folders[1], prep_texts(prep_source('abcd' * 99)), make_tokenizer('byte'), 'x')
    for folder in folders:
        found = [prepare.identity(prepare.read_meta(folder))]
        for data in b'ab', b'abc':
            (folder / 'train.mask.bin').write_bytes(data)
            found.append(prepare.identity(prepare.read_meta(folder)))
        assert found[0] != found[1] != found[2] and found[2] == prepare.identity(prepare.read_meta(folder))
    meta = prepare.read_meta(folder)
    assert prepare.identity(meta | {'fact': 1}) != found[2] == prepare.identity(meta | {'source': 'y'})


@pytest.mark.parametrize('stored, packed, chats', [
    ({}, None, False), ({'block_size': 16}, 16, True), ({'packed': 16, 'chats': False}, 16, False)])
def test_packed_and_chats_are_two_facts(stored, packed, chats, folder):
    """Folders of older versions have only block_size."""
    meta = prepare.read_meta('data/toy')
    old = {name: meta[name] for name in ('vocab_size', 'dtype', 'eot', 'bytes_per_token', 'tokenizer')}
    Path('data/toy/meta.json').write_text(json.dumps(old | stored))
    meta = prepare.read_meta('data/toy')
    assert (meta['packed'], meta['chats']) == (packed, chats)
    if chats:
        with pytest.raises(FileNotFoundError, match=r'train\.mask\.bin'):
            prepare.Bins('data/toy', 'train')
    else:
        assert prepare.Bins('data/toy', 'train').n_tokens == 3001


# downloads --------------------------------------------------------------------------------------------------

BODY = bytes(range(256)) * 1600


@pytest.mark.parametrize('statuses, part, waits', [
    ([206], BODY, []), ([206] * 4, b'', [3, 3, 3]), ([200, 200], BODY[:9], [3]),
    ([503, 429, 206, 206], BODY[:9], [3, 6, 3]), ([503] * 6, b'half', [3, 6, 12, 24, 48]),
    ([404], b'half', [])])
def test_fetch_continues_a_file(statuses, part, waits, tmp_path, monkeypatch):
    """A local server sends BODY with these statuses. All bodies except the last are cut off."""
    left, slept = [*statuses], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            code = left.pop(0)
            body = BODY[int(self.headers['Range'][6:-1]) if code == 206 else 0:]
            self.send_response(code)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body[:100_000 if left else None])
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setattr(time, 'sleep', slept.append)
    (tmp_path / 'a.part').write_bytes(part)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with contextlib.suppress(OSError):
            prepare.fetch(f'http://127.0.0.1:{server.server_port}/a', tmp_path)
        server.shutdown()
    assert files_of(tmp_path) == ({'a.part': part} if part == b'half' else {'a': BODY})
    assert slept == waits and not left


# what a stranger's folder says ------------------------------------------------------------------------------

@pytest.mark.parametrize('field, values', [
    ('dtype', ('object', 'float32', '|V0', 2, None)), ('vocab_size', ('23', -1, 0, 2.5, True, 10**12, [])),
    ('eot', ('x', -1)), ('packed', (-3,)), ('block_size', (-3,)), ('chats', ('yes',)),
    ('columns', ({'.mask': 'object'}, {'../x': 'uint8'})), ('bytes_per_token', ('2', math.nan)),
    ('tokenizer', (
        5, {}, {'kind': 'x'}, {'kind': []}, *({'kind': 'char', 'chars': chars, 'eot': eot} for chars, eot in (
            ([1], None), (None, None), ('ab', 'c'), ('ab', 10**12)))))])
def test_meta_json_is_checked(field, values, folder):
    path = Path('data/toy/meta.json')
    meta = json.loads(path.read_text('utf-8'))
    for value in values:
        path.write_text(json.dumps({**meta, field: value}), 'utf-8')
        with pytest.raises((ValueError, FileNotFoundError), match='data/toy'):
            prepare.Bins('data/toy', 'train')
            prepare.load_tokenizer('data/toy')


def test_shards_of_llama_3(tmp_path):
    ids = np.arange(125000, 128256)
    (tmp_path / 'TinyStories_val.bin').write_bytes(shard_bytes(ids, 20240801, '<u4'))
    bins = prepare.Bins(tmp_path, 'val')
    assert bins.meta['vocab_size'] == 128256 and np.array_equal(bins.shards, [ids])
    with pytest.raises(FileNotFoundError, match=r'tokenizer\.json'):  # the user may add it
        prepare.load_tokenizer(tmp_path)
    (tmp_path / 'other_val.bin').write_bytes(shard_bytes(ids))
    with pytest.raises(ValueError, match='other_val.bin has tokens of GPT-2, but its folder has uint32'):
        prepare.Bins(tmp_path, 'val')


@pytest.mark.parametrize('header', [None, (20240520, '<u2')])
@pytest.mark.parametrize('end', [-8, -1, 1023, 0])
def test_a_cut_file_is_named(end, header, tmp_path):
    prepare.write_dataset(tmp_path, prep_texts(prep_source('abcd' * 999)), make_tokenizer('byte'), 'x')
    path = tmp_path / 'train.bin'
    data = shard_bytes(np.arange(3597), *header) if header else path.read_bytes()
    path.write_bytes(data[:end])
    with pytest.raises(ValueError, match=r'train\.bin'):
        prepare.Bins(tmp_path, 'train')


def test_the_split_is_a_word_in_the_names_of_shards(tmp_path):
    names = {'train': 'fineweb_train_01 train00 my.training-2 medieval_train',
             'val': 'edu_val_7 pretrain_val validation_0 train_2_val_1', 'none': 'retrain trainer intervals'}
    for split in names:
        for stem in names[split].split():
            np.full(9, len(split), np.uint16).tofile(tmp_path / f'{stem}.bin')
    for split in SPLITS:
        assert np.unique(prepare.Bins(tmp_path, split).shards, return_counts=True) == (len(split), 36)
