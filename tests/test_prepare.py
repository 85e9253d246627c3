"""Tests of prepare."""
import errno
import functools
import gzip
import hashlib
import http.server
import io
import itertools
import json
import os
import pickle
import random
import re
import runpy
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from common import (
    CHAT_TEMPLATES,
    PREP_DATA,
    PREP_DIR,
    TOOLS,
    chat_tokenizer,
    prep_awkward,
    prep_files,
    prep_gpt2,
    prep_ids,
    prep_patterns,
    prep_run,
    prep_source,
    prep_toy_bpe,
    tok_oracles,
)

import bench as flat_bench
import prepare
import tokenizer as flat_tokenizer

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


PREP_TEXT = os.path.join(PREP_DATA, 'tinyshakespeare.txt')


def prep_texts(source, fraction=0.1):
    """(split, blocks, is a document) as prepare.py makes them of a source."""
    return prepare.planned_texts(source, prepare.plan_splits(source, prepare.scan(source), fraction))


# whole runs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('tokenizer, n_train, n_val, vocab, name', [
    ('char', 1_003_854, 111_540, 65, 'shakespeare_char'), ('gpt2', 301_966, 36_059, 50257, 'shakespeare')])
def test_prepare_shakespeare_as_nanogpt(tokenizer, n_train, n_val, vocab, name, tmp_path, monkeypatch,
                                        capsys):
    if not os.path.exists(PREP_TEXT):
        pytest.skip(f'no {PREP_TEXT}: set FLATGPT_DATA to the folder with tinyshakespeare.txt')
    if tokenizer == 'gpt2':
        prep_gpt2(monkeypatch)
    with open(PREP_TEXT, encoding='utf-8', newline='') as f:
        text = f.read()
    monkeypatch.chdir(tmp_path)
    os.makedirs('data/shakespeare')
    with open('data/shakespeare/input.txt', 'w', encoding='utf-8', newline='') as f:
        f.write(text)
    code, stdout, _ = prep_run(['shakespeare', f'--tokenizer={tokenizer}'], monkeypatch, capsys)
    folder = f'data/{name}'
    meta = prepare.read_meta(folder)
    assert code == 0
    assert (meta['train_tokens'], meta['val_tokens'], meta['vocab_size']) == (n_train, n_val, vocab)
    assert stdout.rstrip().endswith(f'python train.py --dataset={name}') and f'{n_train:,}' in stdout
    cut = int(len(text) * 0.9)
    if tokenizer == 'char':                                      # nanoGPT's ids: characters in sorted order
        ids = {char: i for i, char in enumerate(sorted(set(text)))}
        assert prep_ids(folder, 'train').tolist() == [ids[c] for c in text[:cut]]
        assert prep_ids(folder, 'val').tolist() == [ids[c] for c in text[cut:]]
    else:
        import tiktoken
        assert prep_ids(folder, 'val').tolist() == tiktoken.get_encoding('gpt2').encode_ordinary(text[cut:])
    assert prepare.load_tokenizer(folder).decode(prep_ids(folder, 'val')) == text[cut:]
    for name, digest in meta['checksum'].items():
        with open(os.path.join(folder, name), 'rb') as f:
            assert hashlib.sha256(f.read()).hexdigest() == digest


def test_prepare_default_is_the_standard_library(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = prepare.find_source(prepare.source)
    assert prepare.output_folder(None, found, found.tokenizer) == prepare.FIRST_RUN
    default = runpy.run_path(os.path.join(PREP_DIR, 'config', 'default.py'))
    assert prepare.dataset_name(prepare.FIRST_RUN) == default['dataset']
    code, stdout, _ = prep_run(['--tokenizer=byte'], monkeypatch, capsys)  # quicker than bpe:4096
    meta = prepare.read_meta('data/pystdlib_byte')
    assert code == 0 and stdout.rstrip().endswith('next: python train.py --dataset=pystdlib_byte')
    assert 5e6 < meta['train_bytes'] < 3e7 and 0.1 < meta['val_bytes'] / meta['train_bytes'] < 0.13
    ids = np.concatenate([prep_ids('data/pystdlib_byte', split) for split in ('train', 'val')])
    read, root = [], sysconfig.get_paths()['stdlib']
    monkeypatch.setattr(prepare, 'read_text', lambda path, errors=None: read.append(path) or [])
    prepare.collections.deque(prepare.find_source('pystdlib').documents(), maxlen=0)
    read = read[len(read) // 2:]  # each is read before, to see whether it is UTF-8
    parts = [os.path.relpath(path, root).split(os.sep) for path in read]
    assert parts == sorted(parts) and len(set(map(tuple, parts))) == len(parts)
    assert not {'test', 'tests', 'idle_test', 'site-packages'} & {name for path in parts for name in path}
    full = [path for path in read if os.path.getsize(path)]
    assert ids.max() == 256 and (ids == 256).sum() == len(full)  # one end of text a document
    with open(os.path.join(root, 'dataclasses.py'), 'rb') as f:
        whole = f.read()
    both = [prep_ids('data/pystdlib_byte', split).astype(np.uint8).tobytes() for split in ('train', 'val')]
    assert sum(part.count(whole + b'\0') for part in both) == 1        # 256, end of text, as a byte


def test_prepare_folder_glob_and_split_by_document(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.makedirs('notes/deep')
    rng, texts = random.Random(1), {}
    for i in range(40):
        path = f'notes/deep/{i:02d}.md' if i % 2 else f'notes/{i:02d}.txt'
        texts[path] = f'note {i}: ' + 'é🙂 text\n' * rng.randrange(1, 60)
    texts['notes/empty.txt'] = ''
    for path, text in texts.items():
        with open(path, 'w', encoding='utf-8', newline='') as f:
            f.write(text)
    code, stdout, _ = prep_run(['notes', '--tokenizer=char'], monkeypatch, capsys)
    assert code == 0 and '40 documents' in stdout and '1 left out' in stdout
    tok = prepare.load_tokenizer('data/notes_char')
    chars = sorted(set(''.join(texts.values())))
    assert tok.n_vocab == len(chars) + 1 and tok.eot == len(chars)
    documents = {}
    for split in ('train', 'val'):
        parts = tok.decode(prep_ids('data/notes_char', split)).split('<|endoftext|>')
        assert parts[-1] == ''
        documents[split] = parts[:-1]
    order = [texts[path] for path in sorted(texts, key=lambda path: path.split('/')) if texts[path]]
    assert sorted(documents['train'] + documents['val']) == sorted(order)     # each exactly once, whole
    assert all(part == [text for text in order if text in part] for part in documents.values())  # in order
    sizes = {split: len(''.join(part).encode()) for split, part in documents.items()}
    assert abs(sizes['val'] / sum(sizes.values()) - 0.1) < 0.05
    meta = prepare.read_meta('data/notes_char')
    assert (meta['train_bytes'], meta['val_bytes']) == (sizes['train'], sizes['val'])
    code, stdout, _ = prep_run(['notes/**/*.md', '--out=md'], monkeypatch, capsys)
    assert code == 0 and '20 documents' in stdout and '--dataset=md' in stdout
    found = prepare.find_source('notes/**/*.md')
    assert prepare.output_folder(None, found, 'byte') == os.path.join('data', 'notes_byte')


@pytest.mark.parametrize('sizes', [
    [1, 1], [700, 35000], [35000, 700], [5] * 5, [1] * 1000, [10_000] + [10] * 99])
def test_prepare_split_never_starves_a_side(sizes):
    plan = prepare.split_documents(sizes, 0.1)
    val = sum(size for size, split in zip(sizes, plan) if split == 'val')
    assert 0 < val < sum(sizes) and len(plan) == len(sizes)
    assert plan == [split for split in prepare.split_documents([0, *sizes, 0], 0.1) if split]  # empty: None
    if max(sizes) <= 0.1 * sum(sizes):
        assert abs(val - 0.1 * sum(sizes)) <= max(sizes)
    else:
        assert val <= max(0.2 * sum(sizes), min(sizes))


def test_prepare_json_lines_are_documents(tmp_path, monkeypatch, capsys):
    """A record, a document: as if each was a file, whatever the field, mixed with text files or not."""
    monkeypatch.chdir(tmp_path)
    texts = [f'tale {i}\u2028 "é🙂" \\ \r\n' * (i % 7 + 1) for i in range(300)]
    os.makedirs('files')
    os.makedirs('both')
    for i, text in enumerate(texts):
        Path(f'files/{i:03d}.txt').write_text(text, encoding='utf-8', newline='')
    lines = [json.dumps({'id': i, 'story': text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    lines[5:5] = ['', '  ', json.dumps({'story': '', 'id': None})]
    Path('tales.jsonl').write_bytes('\ufeff'.encode() + '\r\n'.join(lines).encode())
    Path('both/0.JSONL').write_text('\n'.join(lines[:100]), encoding='utf-8')
    Path('both/1.txt').write_text('not json', encoding='utf-8')
    out = prep_run(['tales.jsonl', '--field=story', '--tokenizer=char'], monkeypatch, capsys)[1]
    assert '300 documents' in out and '1 left out' in out
    prep_run(['files', '--tokenizer=char'], monkeypatch, capsys)
    for split in ('train', 'val'):
        assert np.array_equal(prep_ids('data/tales_char', split), prep_ids('data/files_char', split))
    assert '98 documents' in prep_run(['both', '--field=story'], monkeypatch, capsys)[1]
    Path('one.jsonl').write_text('{"text": "the only document is cut"}')
    assert prep_run(['one.jsonl'], monkeypatch, capsys)[0] == 0
    whole = [*prep_ids('data/one_byte', 'train'), *prep_ids('data/one_byte', 'val')]
    assert bytes(whole) == b'the only document is cut'


def test_prepare_splits_text_at_marks_whatever_the_blocks():
    rng = random.Random(0)
    words = ['<|endoftext|>', '<|endoftext', '|>', ' ', '\n', '\n\n', 'a', 'tale', '<', 'é🙂', ' \u3000']
    for n in range(400):
        text = ''.join(rng.choice(words[n % 2:]) for _ in range(rng.randrange(40)))
        parts = re.split(r'\s*<\|endoftext\|>\s*', text)
        wanted = [text] if len(parts) == 1 else [part.rstrip() if i else part for i, part in enumerate(parts)
                                                 if part.strip()]
        if len(parts) > 1 and parts[-1].strip():
            assert wanted[-1] == parts[-1].rstrip()
        for size in (1, 3, 100):
            blocks = [text[i:i + size] for i in range(0, len(text), size)]
            assert [''.join(found) for found in prepare.split_at_marks(blocks, 'x')] == wanted, text


def test_prepare_marks_gz_and_standard_input(tmp_path, monkeypatch, capsys):
    """Marks, files of their own, JSON lines, each of these compressed, or through a pipe: the same tokens."""
    monkeypatch.chdir(tmp_path)
    texts = [f'tale {i} goes ' + 'on and é🙂 on ' * (i % 9 + 1) for i in range(60)]
    texts = [text.strip() for text in texts]
    marked = '\n<|endoftext|>\n\n'.join(texts) + '<|endoftext|>\n'
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
    os.makedirs('files')
    for i, text in enumerate(texts):
        Path(f'files/{i:02d}.txt').write_text(text, encoding='utf-8')
    Path('marks.txt').write_text(marked, encoding='utf-8', newline='')
    Path('marks.txt.gz').write_bytes(gzip.compress(marked.encode()))
    two = gzip.compress(lines[:999].encode()) + gzip.compress(lines[999:].encode())  # as `cat a.gz b.gz`
    Path('lines.jsonl.gz').write_bytes(two)
    made = {}
    for name, source, data in (('files', 'files', None), ('marks', 'marks.txt', None),
                               ('gz', 'marks.txt.gz', None), ('lines', 'lines.jsonl.gz', None),
                               ('pipe', '-', marked), ('json', '-', lines)):
        if data is not None:
            monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(data.encode())))
        code, stdout, _ = prep_run([source, f'--out={name}', '--tokenizer=char'], monkeypatch, capsys)
        assert code == 0 and '60 documents' in stdout
        assert stdout.count('split at 60 <|endoftext|> marks') == (name in ('marks', 'gz', 'pipe'))
        assert 'standard input: split' in stdout or name != 'pipe'  # and not the file that it is kept in
        made[name] = [prep_ids(f'data/{name}', split).tolist() for split in ('train', 'val')]
    assert len(set(map(str, made.values()))) == 1 and made['gz'][0].count(max(made['gz'][0])) > 50
    found = prepare.find_source('lines.jsonl.gz')
    assert prepare.output_folder(None, found, 'byte') == os.path.join('data', 'lines_byte')


def test_prepare_replaces_what_is_no_text_only_when_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path('latin.txt').write_bytes(b'caf\xe9 au lait, ' * 100 + b'\xf0\x9f')
    Path('latin.jsonl').write_bytes(b'{"text": "caf\xe9"}\n' * 3)
    for name in ('latin.txt', 'latin.jsonl'):
        assert 'latin' in prep_run([name], monkeypatch, capsys)[2]
        assert prep_run([name, '--errors=replace'], monkeypatch, capsys)[0] == 0
        ids = [*prep_ids('data/latin_byte', 'train'), *prep_ids('data/latin_byte', 'val')]
        assert flat_tokenizer.ByteTokenizer().decode(ids).startswith('caf\ufffd')


def test_prepare_shards_are_downloaded_checked_and_read_in_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gpt2 = prep_gpt2(monkeypatch)
    ids = [np.array([50256, *gpt2.encode(f'Shard number {i}. ' * 9)], '<u2') for i in range(4)]
    asked, broken = [], {}

    def shard(tokens, magic=20240520, version=1, n=None):
        head = np.zeros(256, '<i4')
        head[:3] = magic, version, len(tokens) if n is None else n
        return head.tobytes() + tokens.tobytes()

    def fetch_rest(url, part, size):
        asked.append(url)
        i = int(url[-10:-4])
        Path(part).write_bytes(broken.get(i, shard(ids[i])))
    monkeypatch.setattr(prepare, 'fetch_rest', fetch_rest)
    folder = os.path.join('data', 'fineweb_edu_gpt2')
    found = prepare.find_source('fineweb_edu')
    assert prepare.output_folder(None, found, found.tokenizer) == folder
    for bad, message in ((shard(ids[2], magic=20240801), '20240520'), (shard(ids[2], version=2), 'version 2'),
                         (shard(ids[2], n=10**8), 'bytes'), (b'<html>', 'shard'), (b'', 'shard')):
        broken[2] = bad
        with pytest.raises(ValueError, match=message) as e:
            prepare.fetch_shards(folder, found, 3)
        assert '000002.bin sent' in str(e.value) and '\n' not in str(e.value)
        assert sorted(os.listdir(folder)) == ['finewebedu_train_000001.bin', 'finewebedu_val_000000.bin']
    broken.clear()
    asked.clear()
    Path(folder, 'train.bin').write_bytes(b'xx')  # of an earlier run
    meta = prepare.fetch_shards(folder, found, 3)
    assert [url.rpartition('/')[2] for url in asked] == [f'finewebedu_train_00000{i}.bin' for i in (2, 3)]
    assert asked[0].startswith('https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/')
    train, val = (prepare.Bins(folder, split, vocab_size=50257) for split in ('train', 'val'))
    assert train.n_tokens == meta['train_tokens'] == sum(map(len, ids[1:])) and val.n_tokens == len(ids[0])
    assert np.array_equal(train.read([0], 8)[0], ids[1][:9])
    assert meta['bytes_per_token'] == len('Shard number 0. ' * 9) / len(ids[0])
    assert prepare.load_tokenizer(folder).decode(ids[0][1:]) == 'Shard number 0. ' * 9
    Path(folder, 'finewebedu_train_000003.bin').write_bytes(shard(ids[3], magic=1))
    with pytest.raises(ValueError, match='000003.bin.*20240520'):
        prepare.Bins(folder, 'train')
    prepare.fetch_shards(folder, found, 3)
    assert prepare.Bins(folder, 'train').n_tokens == train.n_tokens
    assert '1 more in' not in capsys.readouterr().out
    prepare.fetch_shards(folder, found, 2)
    assert '1 more in' in capsys.readouterr().out


def test_prepare_many_documents_in_bounded_memory_and_time(tmp_path):
    """100,000 records of JSON lines: their sizes are all that is kept."""
    pytest.importorskip('resource')
    with open(tmp_path / 'a.jsonl', 'w', encoding='utf-8') as f:
        for i in range(100_000):
            f.write(f'{{"text": "record {i}, and some text of its own"}}\n')
    code = ("import resource, sys; sys.argv = ['prepare.py']; import prepare\n"
            "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "source = prepare.find_source('a.jsonl'); before = used()\n"
            "plan = prepare.plan_splits(source, prepare.scan(source), 0.1)\n"
            "texts = prepare.planned_texts(source, plan)\n"
            "meta = prepare.write_dataset('d', texts, flat_tokenizer.make_tokenizer('byte'), 'x')\n"
            "print(used() - before, meta['train_tokens'] + meta['val_tokens'] - meta['train_bytes']"
            " - meta['val_bytes'])")
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([PREP_DIR, os.environ.get('PYTHONPATH', '')])}
    done = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True,
                          cwd=tmp_path)
    grown, ends = map(int, done.stdout.split()[-2:])
    assert grown * (1 if sys.platform == 'darwin' else 1024) < 60 << 20 and ends == 100_000


def test_prepare_a_new_source_and_tokenizer_are_one_entry_each(tmp_path, monkeypatch, capsys):
    def tales():
        def documents():
            for i in range(20):
                yield [f'tale {i} ', 'goes on']
        return prepare.Source('tales', 'tales 1.0', documents)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(prepare.SOURCES, 'tales', tales)
    monkeypatch.setitem(flat_tokenizer.MAKERS, 'reversed', lambda characters, **_:
                        flat_tokenizer.CharTokenizer(characters[::-1], len(characters)))
    source = prepare.find_source('tales')
    seen = prepare.scan(source)
    assert seen.n_documents == 20 and seen.characters[:2] == ' 0' and seen.n_bytes == seen.n_characters
    tok = flat_tokenizer.make_tokenizer('reversed', seen.characters, True)
    prepare.write_dataset('data/t', prep_texts(source), tok, source.label)
    text = prepare.load_tokenizer('data/t').decode(prep_ids('data/t', 'train'))
    assert text.startswith('tale 1 goes on' + flat_tokenizer.EOT)
    assert prepare.read_meta('data/t')['source'] == 'tales 1.0'
    assert 'tales' in str(pytest.raises(OSError, prepare.find_source, 'none').value)


def test_prepare_shows_progress_while_it_scans_and_encodes(monkeypatch, capsys):
    clock = itertools.count(0, 6)
    monkeypatch.setattr(prepare.time, 'time', lambda: next(clock))
    source = prepare.Source('x', 'x', lambda: [['a' * 10**6] * 9])
    prepare.scan(source)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3 and '2.0 MB' in lines[0] and '9.0 MB' in lines[-1]
    prepare.scan(prep_source('quick'))
    assert capsys.readouterr().out == ''
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    progress = flat_tokenizer.Progress('work', total=10**7)
    for _ in range(10):
        progress.add(10**6)
    progress.close()
    out = capsys.readouterr().out
    assert out.count('\n') == 1 and out.count('\r') == 11 and ' 10.0 of 10.0 MB' in out


def test_prepare_bad_input_is_one_line_and_leaves_what_was_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'nothing'))
    with open('latin.txt', 'wb') as f:
        f.write(b'x' * (1 << 20) + b'caf\xe9 au lait')
    for name, data in (('empty.txt', b''), ('short.txt', b'x'), ('cut.txt', 'abc🙂'.encode()[:-1]),
                       ('good.txt', b'some good text, enough for two parts'),
                       ('broken.jsonl', b'{"text": "a"}\n\n{"text": "b"\n'),
                       ('list.jsonl', b'{"text": "a"}\n["text"]\n'), ('deep.jsonl', b'[' * 200_000),
                       ('cut.txt.gz', gzip.compress(b'text' * 99)[:-9]), ('plain.txt.gz', b'text'),
                       ('latin.jsonl', b'{"text": "caf\xe9"}'), ('number.jsonl', b'{"text": 3}'),
                       ('half.jsonl', b'{"text": "a"}\n{"text": "\\ud800"}\n')):
        with open(name, 'wb') as f:
            f.write(data)
    os.mkdir('nofiles')
    assert prep_run(['good.txt', '--out=d'], monkeypatch, capsys)[0] == 0
    before = {name: Path('data/d', name).read_bytes() for name in prep_files('data/d')}
    table = [(['latin.txt'], ['latin.txt', '0xe9', f'offset {(1 << 20) + 3}']),
             (['cut.txt'], ['cut.txt', 'offset 3']),
             (['cut.txt.gz'], ['cut.txt.gz is damaged']), (['plain.txt.gz'], ['plain.txt.gz is damaged']),
             (['good.txt', 'cut.txt'], ["'cut.txt' is one source too many"]),
             (['good.txt', '--errors=ignore'], ["errors='ignore'", 'strict or replace']),
             (['good.txt', '--tokenizer=data/x'], ['python prepare.py my.txt --out=x']),
             (['fineweb', '--shards=104'], ['shards=104: fineweb has 1 to 103']),
             (['fineweb', '--tokenizer=byte'], ["tokenizer='byte'", "gpt2's"]),
             (['empty.txt'], ['empty.txt', 'empty']), (['short.txt'], ['short.txt', 'too few']),
             (['nofiles'], ['nofiles', 'no such']), (['none.txt'], ['none.txt', *prepare.SOURCES]),
             (['broken.jsonl'], ['broken.jsonl, line 3']), (['list.jsonl'], ['list.jsonl, line 2']),
             (['deep.jsonl'], ['deep.jsonl, line 1']),
             (['latin.jsonl'], ['latin.jsonl, line 1', '0xe9 at its offset 13', '--errors=replace']),
             (['number.jsonl'], ['number.jsonl, line 1']), (['half.jsonl'], ['half.jsonl, line 2']),
             (['broken.jsonl', '--field=story'], ["broken.jsonl, line 1", "'story'", '--field']),
             (['*.none'], ['*.none']), (['good.txt', '--procs=0'], ['procs=0']),
             (['good.txt', '--val_fraction=1.0'], ['val_fraction=1.0', 'between 0 and 1']),
             (['good.txt', '--tokenizer=gpt3'], ["'gpt3'", 'cl100k_base']),
             (['good.txt', '--tokenizer=no/such'], ['python hub.py no/such'])]
    for argv, parts in table:
        for where in ('d', 'fresh'):                 # over an earlier folder, and to a new one
            code, _, stderr = prep_run([*argv, f'--out={where}', '--overwrite=True'], monkeypatch, capsys)
            assert code == 1 and len(stderr.strip().splitlines()) == 1, (argv, code, stderr)
            assert all(part in stderr for part in parts), stderr
    Path('other.txt').write_text('another text, of two parts too')
    stderr = prep_run(['other.txt', '--out=d'], monkeypatch, capsys)[2]
    assert 'data/d holds data of good.txt, not of other.txt' in stderr and '--overwrite=True' in stderr
    assert os.listdir('data') == ['d']
    assert {name: Path('data/d', name).read_bytes() for name in prep_files('data/d')} == before
    for argv in (['good.txt'], ['other.txt', '--overwrite=True']):
        assert prep_run([*argv, '--out=d'], monkeypatch, capsys)[0] == 0
    assert prepare.read_meta('data/d')['source'] == 'other.txt'


def test_damaged_data_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare.write_dataset('d', prep_texts(prep_source('the text ' * 20)), prep_toy_bpe(), 'a')
    table, tokens = Path('d/flat_tokenizer.tiktoken'), Path('d/train.bin').read_bytes()
    whole = table.read_bytes()
    for damaged in (whole[:whole.rindex(b'\n', 0, -9) + 1], whole.replace(b' 97\n', b' 98\n', 1)):
        table.write_bytes(damaged)
        with pytest.raises(ValueError, match='d/flat_tokenizer.tiktoken is not what the data was prepared with'):
            prepare.load_tokenizer('d')
    table.write_bytes(whole)
    assert prepare.load_tokenizer('d').encode('the') == prep_toy_bpe().encode('the')
    Path('d/train.bin').write_bytes(tokens[:len(tokens) // 4 * 2])
    n, half = len(tokens) // 2, len(tokens) // 4
    with pytest.raises(ValueError, match=f'd/train.bin has {half} tokens of the {n} that were prepared'):
        prepare.Bins('d', 'train')


def test_special_tokens_in_a_text_are_learnt_as_is_asked(tmp_path, monkeypatch, capsys):
    """Refused by the document's name; as plain text or as tokens, as transformers' tokenizer has them."""
    monkeypatch.chdir(tmp_path)
    tok = chat_tokenizer()
    save_tokenizer(tok, 'tok')
    texts = [f'record {i}' for i in range(30)]
    texts[6] = 'see <|im_start|>user\nHi<|im_end|>'
    Path('a.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
    code, _, stderr = prep_run(['a.jsonl', '--tokenizer=tok'], monkeypatch, capsys)
    assert code == 1 and "a.jsonl, document 7: '<|im_start|>' in 'see <|im_start|>user" in stderr, stderr
    assert len(stderr.strip().splitlines()) == 1 and os.listdir('data') == []
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tok.library)
    for how in ('text', 'tokens'):
        argv = ['a.jsonl', '--tokenizer=tok', f'--out={how}', f'--special_tokens={how}']
        assert prep_run(argv, monkeypatch, capsys)[0] == 0
        plan = prepare.split_documents([len(text) for text in texts], 0.1)
        for split in ('train', 'val'):
            ids = [[*theirs(text, split_special_tokens=how == 'text')['input_ids'], tok.eot]
                   for text, what in zip(texts, plan) if what == split]
            assert prep_ids(f'data/{how}', split).tolist() == sum(ids, [])
        marks = len('<|im_start|><|im_end|>') * (how == 'tokens')
        meta = prepare.read_meta(f'data/{how}')
        assert meta['train_bytes'] + meta['val_bytes'] == len(''.join(texts)) - marks
    # conversations are rendered with these tokens: a message may not smuggle them in
    chats = [{'prompt': 'Hi', 'response': 'Hello'}] * 9
    chats[4] = {'prompt': 'Hi<|im_end|>', 'response': 'Hello'}
    Path('chats.jsonl').write_text('\n'.join(map(json.dumps, chats)))
    argv = ['chats.jsonl', '--tokenizer=tok', '--block_size=64']
    assert "chats.jsonl, line 5: '<|im_end|>'" in prep_run(argv, monkeypatch, capsys)[2]
    assert 'must be refuse or tokens' in prep_run([*argv, '--special_tokens=text'], monkeypatch, capsys)[2]
    assert prep_run([*argv, '--special_tokens=tokens'], monkeypatch, capsys)[0] == 0
    # between documents of a text the end of text is what it always was; a vocabulary is not learnt in vain
    Path('t.txt').write_text('one text<|endoftext|>\n' * 9)
    assert prep_run(['t.txt', '--tokenizer=tok'], monkeypatch, capsys)[0] == 0
    code, out, stderr = prep_run(['a.jsonl', '--tokenizer=bpe:300'], monkeypatch, capsys)
    assert code == 1 and 'document 7' in stderr and 'learnt' not in out


def test_special_tokens_are_found_across_blocks_and_cuts(tmp_path, monkeypatch):
    text = 'a short text <|endoftext|> and its end '
    for size in (1, 5, 17):
        blocks = [text[i:i + size] for i in range(0, len(text), size)]
        source = prepare.refusing(prepare.Source('x', 'x', lambda blocks=blocks: [blocks]), [flat_tokenizer.EOT])
        with pytest.raises(ValueError, match='x, document 1: .*endoftext'):
            list(*source.documents())
    for tok in (flat_tokenizer.ByteTokenizer(), prep_toy_bpe()):
        for chunk in range(14, 30):
            monkeypatch.setattr(flat_tokenizer, 'CHUNK', chunk)
            texts = [(split, [text * 9], True) for split in ('train', 'val')]
            prepare.write_dataset(str(tmp_path / 'd'), texts, tok, 'x', as_tokens=True)
            assert prep_ids(tmp_path / 'd', 'val').tolist() == [*tok.encode(text * 9), tok.eot]


def test_documents_and_prompts_begin_with_the_bos_of_a_tokenizer(tmp_path, monkeypatch):
    """As transformers' tokenizer has texts, and chats, whose template writes a bos itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 40)
    texts = [f'document {i} has a few words, ' * 4 for i in range(20)]
    for name, bos in (('mistral', [1]), ('gpt2', [])):
        library = tok_oracles()[name]
        tok = flat_tokenizer.JsonTokenizer(library.to_str())
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library)
        prepare.write_dataset('d', prep_texts(prep_source(*texts)), tok, 'x')
        plan = prepare.split_documents([len(text) for text in texts], 0.1)
        tok = prepare.load_tokenizer('d')
        for split in ('train', 'val'):
            ids = [[*theirs(text)['input_ids'], tok.eot] for text, what in zip(texts, plan) if what == split]
            assert all(one[:len(bos)] == bos for one in ids)
            assert prep_ids('d', split).tolist() == sum(ids, [])
        again = flat_tokenizer.tokenizer_from_state(tok.state())  # a checkpoint's, so its prompts are the same
        assert again.encode(texts[0]) == theirs(texts[0])['input_ids']
        Path('a.txt').write_text(texts[0])
        inputs, targets = flat_bench.text_tokens('a.txt', tok)[0][0]
        assert [inputs[0], *targets] == [tok.eot, *theirs(texts[0])['input_ids']]
    tok = flat_tokenizer.JsonTokenizer(tok_oracles()['mistral'].to_str(), {
        'chat_template': CHAT_TEMPLATES['llama2'], 'bos_token': '<s>', 'eos_token': '</s>'})
    messages = prepare.make_messages(('Hi', 'Hello'))
    ids, _ = prepare.encode_conversation(tok, prepare.Conversation('x', messages))
    assert ids.tolist().count(1) == 1 == tok.chat(messages[:1]).count(1)


def test_prepare_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 10)
    source = prep_source('one two three\n' * 20)
    tok = flat_tokenizer.make_tokenizer('byte')
    monkeypatch.setattr(flat_tokenizer, 'AROUND', 0)
    meta = prepare.write_dataset('data/a', prep_texts(source), tok, 'a')
    before = {name: Path('data/a', name).read_bytes() for name in os.listdir('data/a')}
    real, calls = tok.encode_array, []

    def full_disk(text):
        calls.append(text)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(text)
    tok.encode_array = full_disk
    for folder in ('data/a', 'data/b'):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            prepare.write_dataset(folder, prep_texts(source), tok, 'a')
    tok.encode_array = real
    with pytest.raises(ValueError, match='changed'):
        prepare.write_dataset('data/b', prep_texts(source), tok, 'a', n_bytes=281)
    assert os.listdir('data') == ['a'] and meta['train_tokens'] == 252
    assert {name: Path('data/a', name).read_bytes() for name in os.listdir('data/a')} == before


def test_prepare_again_removes_what_belonged_to_earlier_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = prep_source('the text ' * 20)
    prepare.write_dataset('data/a', prep_texts(source), prep_toy_bpe(), 'a')
    open('data/a/train.mask.bin', 'wb').close()
    assert 'flat_tokenizer.tiktoken' in os.listdir('data/a')
    assert prepare.load_tokenizer('data/a').decode(prep_ids('data/a', 'train')) == ('the text ' * 20)[:162]
    prepare.write_dataset('data/a', prep_texts(source), flat_tokenizer.make_tokenizer('byte'), 'a')
    assert sorted(os.listdir('data/a')) == ['meta.json', 'train.bin', 'val.bin']


def test_prepare_in_the_c_locale(tmp_path):
    text = 'Zoë 中文 🙂\r\n' * 30
    with open(tmp_path / 'ü.txt', 'w', encoding='utf-8', newline='') as f:
        f.write(text)
    env = {**os.environ, 'PYTHONUTF8': '0', 'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0'}
    command = [sys.executable, os.path.join(PREP_DIR, 'prepare.py'), '*.txt', '--tokenizer=char', '--out=c']
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    folder = str(tmp_path / 'data' / 'c')
    tok = prepare.load_tokenizer(folder)
    assert tok.decode([*prep_ids(folder, 'train'), *prep_ids(folder, 'val')]) == text


@pytest.mark.parametrize('name', ['gpt2', 'cl100k_base', 'o200k_base'])
def test_prepare_cuts_where_every_pattern_cuts(name):
    regex = pytest.importorskip('regex')
    words = regex.compile(prep_patterns()[name])
    for seed in range(20):
        text = prep_awkward(60, seed)
        cuts = [match.end() for match in flat_tokenizer.CUT.finditer(text)]
        starts = {match.start() for match in words.finditer(text)}
        assert cuts and set(cuts) <= starts
        for cut in cuts:
            assert words.findall(text[:cut]) + words.findall(text[cut:]) == words.findall(text)


@pytest.mark.parametrize('name', ['byte', 'char', 'gpt2', 'cl100k_base', 'o200k_base'])
@pytest.mark.parametrize('chunk', [7, 100])
def test_prepare_in_pieces_is_as_in_one_piece(name, chunk, tmp_path, monkeypatch):
    text = prep_awkward(3000) + 'ＡＢＣ' * 2000 + '\n' + prep_awkward(200, 2)  # with one long word
    tok = flat_tokenizer.make_tokenizer(name, ''.join(sorted(set(text)))) if name in ('byte', 'char') else \
        prep_toy_bpe(prep_patterns()[name])
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', chunk)
    monkeypatch.setattr(flat_tokenizer, 'AROUND', 0)
    blocks = [text[i:i + 1000] for i in range(0, len(text), 1000)]
    parts, last = zip(*flat_tokenizer.pieces(blocks, tok))
    assert ''.join(parts) == text and last == (*[False] * (len(last) - 1), True)
    assert len(parts) > len(text) / chunk / 60 and (max(map(len, parts)) == chunk or not tok.anywhere)
    source = prepare.Source('x', 'x', lambda: [iter(blocks)])
    prepare.write_dataset(str(tmp_path / 'd'), prep_texts(source), tok, 'a')
    cut = int(len(text) * 0.9)
    for split, part in (('train', text[:cut]), ('val', text[cut:])):
        assert prep_ids(tmp_path / 'd', split).tolist() == tok.encode(part, allow_special=False)


def test_prepare_two_processes_write_what_one_writes(tmp_path, monkeypatch):
    tok = prep_toy_bpe()
    source = prep_source(*[prep_awkward(300 + 50 * i, seed=i) + '<|endoftext|> the end'  # which is text here
                           for i in range(12)])
    plan = prepare.plan_splits(source, prepare.scan(source), 0.2)
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 500)
    metas = [prepare.write_dataset(str(tmp_path / f'p{n}'), prep_texts(source, 0.2), tok, 'x', procs=n)
             for n in (1, 2)]
    assert metas[0] == metas[1] and metas[0]['train_tokens'] > 5000
    for split in ('train', 'val'):
        ids = prep_ids(tmp_path / 'p1', split)
        assert ids.tobytes() == prep_ids(tmp_path / 'p2', split).tobytes()
        assert (ids == tok.eot).sum() == plan.count(split)


def test_prepare_uses_processes_only_where_they_pay():
    byte, bpe = flat_tokenizer.make_tokenizer('byte'), prep_toy_bpe()
    assert flat_tokenizer.usable_procs(8, byte, 1 << 40) == 1 == flat_tokenizer.usable_procs(8, bpe, 1000)
    assert flat_tokenizer.usable_procs(8, bpe, 1 << 40) == 8
    assert 1 <= flat_tokenizer.usable_procs(None, bpe, 1 << 40) <= 61


def test_prepare_encodes_in_bounded_memory(tmp_path):
    path = str(tmp_path / 'big.txt')
    with open(path, 'wb') as f:
        for _ in range(48):
            f.write(b'many words in a line, and many lines\n' * (1 << 15))       # 58 MB in all
    code = (f"import resource, prepare\nused = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            f"tok = flat_tokenizer.make_tokenizer('byte'); before = used()\n"
            f"source = prepare.find_source({path!r}); seen = prepare.scan(source)\n"
            f"texts = prepare.planned_texts(source, prepare.plan_splits(source, seen, 0.1))\n"
            f"prepare.write_dataset({str(tmp_path / 'd')!r}, texts, tok, 'x', n_bytes=seen.n_bytes)\n"
            f"print(used() - before)")
    pytest.importorskip('resource')
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([PREP_DIR, os.environ.get('PYTHONPATH', '')])}
    done = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True)
    grown = int(done.stdout.split()[-1]) * (1 if sys.platform == 'darwin' else 1024)
    assert grown < 40 << 20 and os.path.getsize(tmp_path / 'd' / 'train.bin') > 100e6


def test_prepare_on_a_full_disk_names_the_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, 'write_bins', full)
    with pytest.raises(OSError, match='data/b cannot be written .*free some space.*--out'):
        prepare.write_dataset('data/b', [], flat_tokenizer.make_tokenizer('byte'), 'a')
    assert os.listdir('data') == []
    monkeypatch.setattr(prepare, 'fetch_rest', full)
    with pytest.raises(OSError, match='data/x/y.part cannot be written .*: free some space, then run this'):
        prepare.fetch('http://host/y', 'data/x/y')
    monkeypatch.setattr(prepare.shutil, 'copyfileobj', full)
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'some text')))
    with pytest.raises(OSError, match='stdin.txt cannot be written .*: free some space, or set TMPDIR'):
        prepare.find_source('-')
    monkeypatch.setattr(sys, 'stdin', None)
    with pytest.raises(ValueError, match='standard input is closed'):
        prepare.find_source('-')


def test_prepare_that_is_terminated_removes_what_it_made(tmp_path):
    command = [sys.executable, os.path.join(PREP_DIR, 'prepare.py'), '-']
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, 'TMPDIR': str(tmp_path)},
                          stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdin.write('more is to come\n')
        process.stdin.flush()
        while not list(tmp_path.glob('*/stdin.txt')):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.stderr.read() == 'prepare.py: interrupted\n' and process.wait() != 0
    assert os.listdir(tmp_path) == []


def test_prepare_keeps_documents_apart_or_says_that_it_cannot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, tok = prep_source(*['ab' * 9] * 9), flat_tokenizer.make_tokenizer('char', 'ab')
    with pytest.raises(ValueError, match='tokenizer char has no end-of-text token to keep documents apart'):
        prepare.write_dataset('data/a', prep_texts(source), tok, 'a')
    assert os.listdir('data') == []
    meta = prepare.write_dataset('data/a', prep_texts(prep_source('ab' * 9)), tok, 'a')  # one that is cut
    assert meta['train_tokens'] == 16 and meta['eot'] is None


def save_tokenizer(tok, folder):
    os.makedirs(folder)
    Path(folder, 'tokenizer.json').write_text(tok.source, encoding='utf-8')
    Path(folder, 'tokenizer_config.json').write_text(json.dumps(tok.config), encoding='utf-8')


def chat_of(rng, turns=2, system=False):
    def words():
        some = ['a', 'word', 'é🙂', 'def x():\n', '\n']
        return ' '.join([rng.choice(some) for _ in range(rng.randrange(9))] + ['end'])
    messages = [{'role': 'system', 'content': words()}] if system else []
    for _ in range(turns):
        messages += prepare.make_messages((words().strip(), words().strip()))
    return messages


def chat_prepare(chats, tok, block_size, folder):
    source = prepare.Source('x', 'x', lambda: [prepare.Conversation(f'chat {i}', messages)
                                               for i, messages in enumerate(chats)], chats=True)
    seen = prepare.scan(source)
    texts = prepare.planned_texts(source, prepare.plan_splits(source, seen, 0.1))
    return prepare.write_dataset(str(folder), texts, tok, 'x', 1, seen.n_bytes, block_size)


def chat_slots(folder, block_size):
    """[(ids, mask)] of the slots of both splits."""
    found = []
    for split in ('train', 'val'):
        ids, mask = prep_ids(folder, split), prep_ids(folder, f'{split}.mask', np.uint8)
        assert len(ids) == len(mask) and len(ids) % block_size == 1 and (ids[-1], mask[-1]) == (256, 0)
        found += zip(ids[:-1].reshape(-1, block_size), mask[:-1].reshape(-1, block_size))
    return found


@pytest.mark.parametrize('template', ['chatml', 'qwen3', 'smollm', 'llama3', 'llama2', 'minimind'])
def test_the_mask_is_what_the_assistant_writes(template, monkeypatch):
    """And its end mark; what stands before an answer is exactly what a model is prompted with."""
    if template == 'minimind':
        path = Path(os.environ.get('FLATGPT_DATA', ''), 'minimind_tokenizer', 'tokenizer_config.json')
        if not path.exists():
            pytest.skip('its file is not at hand')
        monkeypatch.setitem(CHAT_TEMPLATES, 'minimind', json.loads(path.read_text('utf-8'))['chat_template'])
    tok, rng = chat_tokenizer(template), random.Random(0)
    end = {'llama2': '</s>', 'llama3': '<|eot_id|>'}.get(template, '<|im_end|>')
    for turns in (1, 2, 3):
        messages = chat_of(rng, turns, system=turns == 2)
        ids, mask = prepare.encode_conversation(tok, prepare.Conversation('here', messages))
        assert ids.tolist() == tok.encode_chat(tok.render(messages, add_generation_prompt=False))
        runs = [(learnt, tok.decode([i for i, _ in run]))
                for learnt, run in itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])]
        answers = [text for learnt, text in runs if learnt]
        wanted = [message['content'] for message in messages if message['role'] == 'assistant']
        assert len(answers) == turns
        for answer, content in zip(answers, wanted):
            assert answer.removesuffix(end).strip() == content and answer.endswith(end)
        first = 1 + (turns == 2)
        assert ids[:np.flatnonzero(mask)[0]].tolist() == tok.chat(messages[:first], thinking=None)


def test_an_answer_that_thinks_is_learnt_with_its_thoughts():
    tok = chat_tokenizer()
    messages = prepare.make_messages(('Hi', '<think>\nhm\n</think>\n\nHello.'))
    ids, mask = prepare.encode_conversation(tok, prepare.Conversation('here', messages))
    assert tok.decode(ids[mask == 1]) == '<think>\nhm\n</think>\n\nHello.<|im_end|>'
    plain = '{% for m in messages %}{{ m.content }}{% endfor %}'
    for template, part in (('{{ messages | length }}' + plain, 'another way'), (plain, 'ends this answer'),
                           ("{{ raise_exception('no') }}", 'template fails')):
        tok = flat_tokenizer.JsonTokenizer(tok.source, {'chat_template': template})
        with pytest.raises(ValueError, match=f'^there: .*{part}') as e:
            prepare.encode_conversation(tok, prepare.Conversation('there', messages))
        assert '\n' not in str(e.value)


def test_a_slot_is_filled_and_what_is_longer_is_cut():
    slots = prepare.Slots(5, 9, np.dtype('<u2'))
    parts = [part for ids in ([11], [21, 22, 23], [31, 32, 33, 34], range(41, 51))
             for part in slots.add(np.array(ids, '<u2'), np.ones(len(ids), np.uint8))]
    ids, mask = map(np.concatenate, zip(*parts, *slots.close()))
    assert ids.tolist() == [
        9, 11, 9, 9, 9,  9, 21, 22, 23, 9,  9, 31, 32, 33, 34,
        9, 41, 42, 43, 44,  9, 45, 46, 47, 48,  9, 49, 50, 9, 9,  9]
    unknown = {45, 49}  # after a cut there is nothing before them that they could follow from
    assert mask.tolist() == [int(i != 9 and i not in unknown) for i in ids]
    assert (slots.n_cut, slots.n_tokens) == (1, len(ids) - np.count_nonzero(ids == 9) + 6)


@pytest.mark.parametrize('block_size', [64, 200, 1000])
def test_conversations_are_packed_whole_into_slots(block_size, tmp_path):
    tok, rng = chat_tokenizer(), random.Random(1)
    chats = [chat_of(rng, rng.choice([1, 1, 2])) for _ in range(100)]
    meta = chat_prepare(chats, tok, block_size, tmp_path / 'd')
    encoded = [prepare.encode_conversation(tok, prepare.Conversation('x', messages)) for messages in chats]
    long = [ids.tolist() for ids, _ in encoded if len(ids) >= block_size]
    found, learnt, pieces = [], 0, []
    for ids, mask in chat_slots(tmp_path / 'd', block_size):
        assert (ids[0], mask[0]) == (256, 0)
        starts = [*np.flatnonzero(ids == 256), block_size]
        for begin, end in zip(starts, starts[1:]):
            part = (ids[begin + 1:end].tolist(), mask[begin + 1:end].tolist())
            if part[0]:
                (found if any(part[0] == whole.tolist() for whole, _ in encoded) else pieces).append(part)
            learnt += sum(part[1])
        if not pieces:
            used = np.flatnonzero(ids != 256)[-1] + 1
            assert not mask[used:].any()
    wanted = sorted((ids.tolist(), mask.tolist()) for ids, mask in encoded if len(ids) < block_size)
    assert sorted(found) == wanted and meta['cut'] == len(long) and bool(pieces) == bool(long)
    assert [i for part, _ in pieces for i in part] == [i for ids in long for i in ids] or meta['cut'] > 1
    assert sum(len(part) for part, _ in pieces) == sum(map(len, long))
    assert learnt == meta['train_learnt'] + meta['val_learnt']
    assert meta['block_size'] == block_size and meta['eot'] == 256 and 0.3 < meta['filled'] <= 1
    answers = [m['content'] for messages in chats for m in messages if m['role'] == 'assistant']
    assert meta['train_bytes'] + meta['val_bytes'] == len(''.join(answers).encode())
    assert meta['checksum']['val.mask.bin']


def test_all_shapes_of_records_are_the_same_conversations(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tok = chat_tokenizer()
    save_tokenizer(tok, 'tok')
    pairs = [(f'What is {i}?\n\nAs a word', f'It is {i}.') for i in range(50)]
    shapes = {
        'messages': [{'messages': prepare.make_messages(pair)} for pair in pairs],
        'conversations': [{'conversations': prepare.make_messages(pair), 'text': None} for pair in pairs],
        'talk': [{'talk': prepare.make_messages(pair), 'text': 'x'} for pair in pairs],
        'prompt': [{'prompt': a, 'response': b} for a, b in pairs],
        'question': [{'question': a, 'answer': b, 'id': 3} for a, b in pairs],
        'sharegpt': [{'id': 'x', 'conversations': [{'from': 'human', 'value': a},
                                                   {'from': 'gpt', 'value': b}]} for a, b in pairs],
        'alpaca': [dict(zip(('instruction', 'input'), a.split('\n\n')), output=b) for a, b in pairs],
        'empty': [{'instruction': a, 'input': '', 'output': b} for a, b in pairs]}
    made = set()
    for name, records in shapes.items():
        Path(f'{name}.jsonl').write_text('\n'.join(map(json.dumps, records)), encoding='utf-8')
        argv = [f'{name}.jsonl', '--tokenizer=tok', f'--field={"talk" if name == "talk" else "text"}']
        code, stdout, stderr = prep_run(argv, monkeypatch, capsys)
        assert code == 0 and '50 conversations' in stdout and f'--dataset={name}' in stdout, stderr
        folder = os.path.join('data', name)
        assert sorted(os.listdir(folder)) == ['meta.json', 'tokenizer.json', 'train.bin', 'train.mask.bin',
                                              'val.bin', 'val.mask.bin']
        made.add(tuple(Path(folder, file).read_bytes() for file in sorted(os.listdir(folder))
                       if file.endswith('.bin')))
    assert len(made) == 1
    again = prep_run(['prompt.jsonl', '--tokenizer=data/talk', '--out=again'], monkeypatch, capsys)
    assert again[0] == 0 and Path('data/again/val.bin').read_bytes() == Path('data/talk/val.bin').read_bytes()
    assert prepare.load_tokenizer('data/again').chat_template == tok.chat_template
    assert prep_run(['talk.jsonl', '--out=talk'], monkeypatch, capsys)[0] == 0  # text: its masks are gone
    assert sorted(os.listdir('data/talk')) == ['meta.json', 'train.bin', 'val.bin']


def test_bad_conversations_are_named_by_file_and_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tok = chat_tokenizer()
    save_tokenizer(tok, 'tok')
    good = prepare.make_messages(('Hi', 'Hello'))
    user, answer = good
    table = [({'messages': [answer, user]}, 'take turns'),
             ({'messages': [user, answer, answer]}, 'take turns'),
             ({'messages': [user, {'role': 'system', 'content': 'x'}, answer]}, 'take turns'),
             ({'messages': [user]}, 'no message of the assistant'), ({'messages': []}, 'no conversation'),
             ({'messages': [user, {'role': 'assistant', 'content': ' '}]}, 'message 2: its content is'),
             ({'messages': [user, {'role': 'assistant', 'content': ''}]}, 'message 2: its content is empty'),
             ({'messages': [user, {'role': 'assistant'}]}, 'message 2: its content is empty'),
             ({'messages': [user, {**answer, 'content': [1]}]}, 'message 2: its content is no text: [1]'),
             ({'messages': [user, {**answer, 'content': [1], 'tool_calls': [1]}]}, 'content is no text: [1]'),
             ({'messages': [user, {'role': 'bot', 'content': 'x'}]}, "message 2: {'role': 'bot', 'content'"),
             ({'messages': [user, {'role': ['user'], 'content': 'x'}]}, 'needs a role, one of system, user'),
             ({'messages': [user, 'Hello']}, "message 2: 'Hello' needs a role"),
             ({'messages': [{'from': 'human', 'value': 'x'}, {'from': 'bing', 'value': 'x'}]}, "'bing'"),
             ({'messages': [{'from': 'human'}, answer]}, 'message 1: its content is empty'),
             ({'messages': good, 'tools': '[}'}, "tools must be a list of JSON schemas, not '[}'"),
             ({'prompt': 'a', 'response': '\ud800'}, 'half a character'),
             ({'text': 'a'}, 'no conversation, its fields are text')]
    for record, part in table:
        lines = [json.dumps({'messages': good}), '', json.dumps(record)]
        Path('chats.jsonl').write_text('\n'.join(lines), encoding='utf-8')
        code, _, stderr = prep_run(['chats.jsonl', '--tokenizer=tok'], monkeypatch, capsys)
        assert code == 1 and 'chats.jsonl, line 3' in stderr and part in stderr, stderr
        assert len(stderr.strip().splitlines()) == 1 and not os.path.exists('data')
    Path('chats.jsonl').write_text(lines[0] + '\n', encoding='utf-8')
    assert 'one conversation' in prep_run(['chats.jsonl', '--tokenizer=tok'], monkeypatch, capsys)[2]
    Path('chats.jsonl').write_text(f'{lines[0]}\n' * 9, encoding='utf-8')
    for flags, part in ((['--tokenizer=byte'], 'no chat template'), (['--block_size=1'], 'block_size=1'),
                        (['--block_size=2'], 'train has no token to learn: raise --block_size'),
                        ([], '`python prepare.py` does it'), (['--tokenizer=none'], 'none')):
        argv = ['chats.jsonl', *(['--tokenizer=tok'] if 'block_size' in str(flags) else []), *flags]
        code, _, stderr = prep_run(argv, monkeypatch, capsys)
        assert code == 1 and part in stderr and len(stderr.strip().splitlines()) == 1, stderr


def test_conversations_as_minimind_has_them(tmp_path, monkeypatch):
    """Tools stand in the system's message, and they and calls are JSON in JSON. And the file, by its name of
    today or, where there is none, by that of before."""
    monkeypatch.chdir(tmp_path)
    tools, calls = [{'name': 'translate'}], [{'name': 'translate', 'arguments': {'text': 'x'}}]
    record = {'conversations': [
        {'role': 'system', 'content': '# Tools', 'tools': json.dumps(tools)},
        {'role': 'user', 'content': 'Do'},
        {'role': 'assistant', 'content': '', 'tool_calls': json.dumps(calls)},
        {'role': 'tool', 'content': '{"text": "y"}'},
        {'role': 'assistant', 'content': 'y', 'tool_calls': ''}]}
    there = ['sft_mini_512.jsonl', 'sft_t2t_mini.jsonl']

    def fetch_rest(url, part, size):
        if url.rpartition('/')[2] not in there:
            raise FileNotFoundError(url)
        Path(part).write_text(json.dumps(record))
    monkeypatch.setattr(prepare, 'fetch_rest', fetch_rest)
    while there:
        found, = prepare.find_source('minimind_sft').documents()
        assert found.tools == tools and found.messages[2]['tool_calls'] == calls
        assert os.listdir('data/minimind_sft') == [there[-1]]
        os.remove(f'data/minimind_sft/{there.pop()}')
    with pytest.raises(FileNotFoundError, match='sft_mini_512'):
        prepare.find_source('minimind_sft').documents()


def test_calls_of_tools_are_learnt_and_tools_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    template = ("{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>"
                "{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>\n"
                "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    tok = flat_tokenizer.JsonTokenizer(chat_tokenizer().source, {'chat_template': template})
    called = '[{"function": {"name": "now"}}]'
    call = {'role': 'assistant', 'content': None, 'tool_calls': json.loads(called)}
    user = {'role': 'user', 'content': 'When?'}
    messages = [user, call, {'role': 'tool', 'content': '12:00'}, {'role': 'assistant', 'content': 'Noon.'}]
    ids, mask = prepare.encode_conversation(tok, prepare.Conversation('here', messages, TOOLS))
    assert ids.tolist() == tok.chat(messages, tools=TOOLS, add_generation_prompt=False)
    assert tok.decode(ids).startswith(f'<tools>{json.dumps(TOOLS)}\n<|im_start|>user\nWhen?')
    runs = itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])
    assert [tok.decode([i for i, _ in run]) for learnt, run in runs if learnt] == [
        f'{called}<|im_end|>', 'Noon.<|im_end|>']
    os.makedirs('tok')
    Path('tok/tokenizer.json').write_text(tok.source, encoding='utf-8')
    Path('tok/chat_template.jinja').write_text(template, encoding='utf-8')
    Path('calls.jsonl').write_text((json.dumps({'messages': [user, call], 'tools': TOOLS}) + '\n') * 9)
    code, out, err = prep_run(['calls.jsonl', '--tokenizer=tok'], monkeypatch, capsys)
    assert code == 0 and 'function' in prepare.load_tokenizer('data/calls').decode(
        prep_ids('data/calls', 'val')), err
    assert prepare.read_meta('data/calls')['bytes_per_token'] == len(called) / (len(called) + 1)


def test_two_processes_write_the_conversations_of_one(tmp_path, monkeypatch):
    rng, tok = random.Random(2), chat_tokenizer()
    chats = [prepare.Conversation('x', chat_of(rng)) for _ in range(60)]
    source = prepare.Source('x', 'x', lambda: chats, chats=True)
    monkeypatch.setattr(flat_tokenizer, 'CHUNK', 500)
    metas = [prepare.write_dataset(str(tmp_path / f'p{n}'), prep_texts(source), tok, 'x', n, block_size=100)
             for n in (1, 2)]
    assert metas[0] == metas[1]
    for name in metas[0]['checksum']:
        assert (tmp_path / 'p1' / name).read_bytes() == (tmp_path / 'p2' / name).read_bytes()


def test_pydoc_chat_is_short_and_imports_nothing():
    chats = list(prepare.pydoc_chats())
    assert 3000 < len(chats) < 9000 and chats == list(prepare.pydoc_chats())
    said = {}
    for place, messages, _ in chats:
        prepare.check_messages(messages, place)
        asked = messages[::2], messages[1::2]
        said |= {question['content']: answer['content'] for question, answer in zip(*asked)}
        assert all(len(message['content']) < 200 and '\n' not in message['content'] for message in messages)
    assert said['What does os.path.join do?'].startswith('Join two or more pathname components')
    assert said['What arguments does os.path.join take?'] == 'os.path.join(a, *p)'
    assert said['Explain os.path.join.'] == said['What does os.path.join do?']
    assert {2, 4, 6} < {len(messages) for _, messages, _ in chats}
    assert any(question.startswith('Which function of itertools') for question in said)
    code = ("import sys; sys.argv = ['prepare.py']; import prepare; before = set(sys.modules)\n"
            "print(len(list(prepare.pydoc_chats())), sorted(set(sys.modules) - before))")
    done = subprocess.run([sys.executable, '-c', code], cwd=PREP_DIR, check=True, capture_output=True,
                          text=True)
    assert done.stdout.split(maxsplit=1)[0] == str(len(chats))
    assert set(re.findall(r"'(\w+)'", done.stdout)) <= set(prepare.IN_C)


def test_look_shows_what_a_folder_has(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(3)
    chat_prepare([chat_of(rng) for _ in range(30)], chat_tokenizer(), 300, 'data/chats')
    assert prep_run(['look', 'data/chats'], monkeypatch, capsys)[0] == 0
    prepare.look('chats')
    out = capsys.readouterr().out
    ids, mask = prep_ids('data/chats', 'train'), prep_ids('data/chats', 'train.mask', np.uint8)
    assert f'train: {len(ids):,} tokens' in out and f'{mask.mean():.1%} of them learnt' in out
    assert f'val: {len(prep_ids("data/chats", "val")):,} tokens' in out
    shown = out.split('learnt marked\n')[1]
    n = int(np.flatnonzero(ids[:300] != 256)[-1]) + 1
    text, learnt = map(chat_tokenizer().decode, (ids[:n], ids[:n][mask[:n] == 1]))
    assert shown.replace('[[', '').replace(']]', '') == text + '\n'
    assert ''.join(re.findall(r'\[\[(.*?)\]\]', shown, re.DOTALL)) == learnt
    np.arange(50, dtype=np.uint16).tofile('data/train.bin')
    source = prep_source(*[f'document {i} ' * (i + 1) for i in range(40)])
    prepare.write_dataset('data/d', prep_texts(source), flat_tokenizer.make_tokenizer('byte'), 'some text')
    monkeypatch.setattr(prepare, 'LOOK', 100)
    prepare.look('data/d')
    out = capsys.readouterr().out
    assert 'some text' in out and '(of the first 100)' in out and '[[' not in out and "' '" in out
    monkeypatch.setattr(flat_tokenizer, 'make_tokenizer', None)  # no table is read, or downloaded, in vain
    with pytest.raises(OSError, match='nothing is not prepared: no val.bin'):
        prepare.look('nothing')
    assert capsys.readouterr().out == ''
    open('data/d/val.bin', 'wb').close()
    with pytest.raises(ValueError, match='val.bin has 0 tokens of the 1,260 that were prepared'):
        prepare.look('d')


def test_look_at_folders_that_others_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.makedirs('data/c')
    np.array([0, 1, 2, 1] * 30, np.uint16).tofile('data/c/train.bin')
    np.array([1, 0], np.uint16).tofile('data/c/val.bin')
    with open('data/c/meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': 3, 'itos': {0: 'a', 1: 'b', 2: '\n'}, 'stoi': {}}, f)
    prepare.look('data/c')
    out = capsys.readouterr().out
    assert 'val: 2 tokens, 1 document, 1.00 bytes a token\ntrain: 120 tokens, 1 document, ' in out
    assert "'b'        60 50.00%" in out and out.endswith('ab\nb' * 30 + '\n')
    os.remove('data/c/meta.pkl')
    monkeypatch.setattr(flat_tokenizer, 'make_tokenizer', lambda name: prep_toy_bpe())
    for ids, part in (([50256] * 300, '0 document, 0.00 bytes a token'), ([60000] * 3, '3 tokens')):
        np.array(ids, np.uint16).tofile('data/c/train.bin')  # nothing but ends of text, ids of no token
        prepare.look('c')
        assert part in capsys.readouterr().out


# folders that others prepared -------------------------------------------------------------------------------
def test_meta_pkl_is_read_but_runs_no_code(tmp_path):
    chars = sorted(set('hello world\n'))
    stoi = {char: i for i, char in enumerate(chars)}
    meta = {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': stoi}
    with open(tmp_path / 'meta.pkl', 'wb') as f:
        pickle.dump(meta, f)
    tok = prepare.load_tokenizer(str(tmp_path))
    assert prepare.read_meta(str(tmp_path))['vocab_size'] == tok.n_vocab == len(chars)
    assert tok.encode('hello') == [stoi[c] for c in 'hello'] and tok.decode(tok.encode('hello')) == 'hello'

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'pwned'),)
    for bad in (pickle.dumps({**meta, 'x': Evil()}), pickle.dumps(meta)[:-9], b'', pickle.dumps([1]),
                pickle.dumps({'vocab_size': np.int64(3)})):
        with open(tmp_path / 'meta.pkl', 'wb') as f:
            f.write(bad)
        with pytest.raises(ValueError, match='meta.pkl cannot be read'):
            prepare.read_meta(str(tmp_path))
    assert not (tmp_path / 'pwned').exists()
    with open(tmp_path / 'meta.json', 'w', encoding='utf-8', newline='') as f:
        f.write('{"vocab_size": 3')
    with pytest.raises(ValueError, match='meta.json cannot be read'):
        prepare.read_meta(str(tmp_path))
    good = {'vocab_size': 3, 'dtype': 'uint16', 'eot': None, 'bytes_per_token': 1.5,
            'tokenizer': {'kind': 'char', 'chars': ['a', 'b', 'c'], 'eot': None}}
    for change in ({}, {'vocab_size': '3'}, {'vocab_size': True}, {'dtype': 'int8'}, {'dtype': ['uint16']},
                   {'eot': 'a'}, {'bytes_per_token': '1'}, {'bytes_per_token': 0}, {'bytes_per_token': []},
                   {'tokenizer': 'char'}, {'tokenizer': ['char']}, {'tokenizer': {'kind': ['char']}},
                   {'tokenizer': {'chars': 'abc'}}, {'tokenizer': {**good['tokenizer'], 'chars': 3}}):
        (tmp_path / 'meta.json').write_text(json.dumps({**good, **change}))
        if not change:
            assert prepare.load_tokenizer(str(tmp_path)).encode('cab') == [2, 0, 1]
            continue
        with pytest.raises(ValueError) as e:
            prepare.load_tokenizer(str(tmp_path))
        assert str(tmp_path) in str(e.value) and '\n' not in str(e.value)
    for text in ('[]', '3', '[' * 200_000):
        (tmp_path / 'meta.json').write_text(text)
        with pytest.raises(ValueError, match='meta.json cannot be read'):
            prepare.read_meta(str(tmp_path))


def test_without_meta_gpt2_is_assumed_and_said_once(tmp_path, capsys):
    np.arange(50, dtype=np.uint16).tofile(tmp_path / 'train.bin')
    bins = prepare.Bins(str(tmp_path), 'train')
    meta = prepare.read_meta(str(tmp_path))
    assert (meta['vocab_size'], meta['dtype'], meta['tokenizer']) == (50304, 'uint16', None)
    assert bins.n_tokens == 50
    assert capsys.readouterr().out.count('GPT-2') == 1


def test_bins_reads_foreign_shards(tmp_path):
    rng, shards = np.random.default_rng(0), []
    for i, n in enumerate((101, 57, 3)):
        tokens = rng.integers(0, 50257, n, dtype=np.uint16)
        head = np.zeros(256, np.int32)
        head[:3] = 20240520, 1, n
        (tmp_path / f'fine_train_{i:06d}.bin').write_bytes(head.tobytes() + tokens.tobytes())
        shards.append(tokens)
    bins = prepare.Bins(str(tmp_path), 'train', vocab_size=50257)
    assert bins.n_tokens == 161 and bins.n_sequences(10) == 10 + 5 + 0
    expected = [t[i * 10:i * 10 + 11] for t in shards for i in range((len(t) - 1) // 10)]
    assert np.array_equal(bins.read(range(15), 10), np.array(expected))
    with open(tmp_path / 'fine_train_000001.bin', 'r+b') as f:
        f.truncate(1024 + 100)
    with pytest.raises(ValueError, match='fine_train_000001.bin.*download it again'):
        prepare.Bins(str(tmp_path), 'train')


# reading tokens ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize('n_vocab, dtype', [(65536, 'uint16'), (65537, 'uint32'), (70000, 'uint32')])
def test_bins_dtype_follows_the_vocabulary(n_vocab, dtype, tmp_path):
    text = ''.join(chr(0x10000 + i) for i in range(n_vocab))
    tok = flat_tokenizer.make_tokenizer('char', text)
    meta = prepare.write_dataset(str(tmp_path / 'd'), prep_texts(prep_source(text)), tok, 'a')
    assert meta['dtype'] == dtype and tok.n_vocab == n_vocab
    assert os.path.getsize(tmp_path / 'd' / 'val.bin') == meta['val_tokens'] * np.dtype(dtype).itemsize
    bins = prepare.Bins(str(tmp_path / 'd'), 'val', vocab_size=n_vocab)
    last = bins.read([bins.n_sequences(1) - 1], 1)
    assert last.tolist() == [[n_vocab - 2, n_vocab - 1]] and last.dtype == np.int64


@pytest.mark.parametrize('n, block', [(11, 10), (20, 10), (21, 10), (22, 10), (2, 1), (1000, 7)])
def test_bins_windows_cover_the_file_once(n, block, tmp_path):
    tokens = np.arange(n, dtype=np.uint16)
    tokens.tofile(tmp_path / 'train.bin')
    bins = prepare.Bins(str(tmp_path), 'train', 'uint16')
    w = bins.read(np.arange(bins.n_sequences(block)), block)
    x, y = w[:, :-1], w[:, 1:]
    assert np.array_equal(y, x + 1)                                  # shifted by one, here the ids say so
    assert np.array_equal(y.ravel(), tokens[1:1 + len(w) * block]) and n - 1 - y.size < block
    with pytest.raises(IndexError):
        bins.read([len(w)], block)


def test_bins_one_line_for_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, command in {'shakespeare_char': 'python prepare.py shakespeare --tokenizer=char',
                          'shakespeare': 'python prepare.py shakespeare --tokenizer=gpt2',
                          'pystdlib_bpe4096': 'python prepare.py',
                          'pystdlib_byte': 'python prepare.py --tokenizer=byte',
                          'pystdlib_cl100k_base': 'python prepare.py --tokenizer=cl100k_base',
                          'fineweb_edu_gpt2': 'python prepare.py fineweb_edu',
                          'fineweb_gpt2': 'python prepare.py fineweb',
                          'minimind_gpt2': 'python prepare.py minimind --tokenizer=gpt2',
                          'minimind_sft': 'python prepare.py minimind_sft',
                          'pydoc_chat': 'python prepare.py pydoc_chat',
                          'mydata': 'python prepare.py my.txt --out=mydata'}.items():
        with pytest.raises(FileNotFoundError) as e:
            prepare.Bins(os.path.join('data', name), 'train')
        assert f'is not prepared: no train.bin; run `{command}`' in str(e.value)
    os.makedirs('data/x')
    ids = np.zeros(300, np.uint16)
    ids[222] = 777
    ids.tofile('data/x/val.bin')
    bins = prepare.Bins('data/x', 'val', 'uint16', vocab_size=700)
    with pytest.raises(ValueError, match=r'has 300 tokens, .* block_size\+1 = 1025: lower --block_size'):
        bins.n_sequences(1024)
    with pytest.raises(ValueError, match=r'val.bin has 300 tokens.*= 301'):
        bins.n_sequences(300)
    assert bins.n_sequences(299) == 1
    with pytest.raises(ValueError, match=r'val.bin: token 777 at position 222 is outside .* of 700'):
        bins.read([0, 1, 2], 99)
    assert bins.read([0, 1], 99).shape == (2, 100)
    with open('data/x/val.bin', 'ab') as f:
        f.write(b'x')
    with pytest.raises(ValueError, match='601 bytes are no whole number of uint16'):
        prepare.Bins('data/x', 'val', 'uint16')
    for n in (0, 1, 99):  # a split without a window, whether its windows are counted or read
        np.zeros(n, np.uint16).tofile('data/x/val.bin')
        bins = prepare.Bins('data/x', 'val', 'uint16')
        for use in (bins.n_sequences, functools.partial(bins.read, [0]), functools.partial(bins.read, [])):
            with pytest.raises(ValueError, match=f'val.bin has {n} tokens.* block_size.1 = 100'):
                use(99)
    for name, message in {'val.mask.bin': 'val.mask.bin has 98 bytes, one for each of 99 tokens',
                          'fine_val_01.mask.bin': 'the mask of tokens that are not there'}.items():
        Path('data/x', name).write_bytes(b'\1' * 98)
        with pytest.raises(ValueError, match=message):
            prepare.Bins('data/x', 'val', 'uint16')
        os.remove(f'data/x/{name}')


def test_bins_targets_follow_the_mask(tmp_path):
    """Shards, each with its mask, against plain indexing."""
    rng = np.random.default_rng(0)
    sizes, expected = (45, 7, 71), []
    for i, n in enumerate(sizes):
        ids, mask = rng.integers(1000, size=n, dtype=np.uint16), rng.integers(2, size=n, dtype=np.uint8)
        ids.tofile(tmp_path / f'train_{i}.bin')
        mask.tofile(tmp_path / f'train_{i}.mask.bin')
        for at in range(0, n - 10, 10):  # a window of 11 tokens ends before n
            learnt = [int(ids[j]) if mask[j] else -1 for j in range(at + 1, at + 11)]
            expected.append((ids[at:at + 10].tolist(), learnt))
    bins = prepare.Bins(str(tmp_path), 'train', 'uint16')
    order = rng.permutation(len(expected))
    inputs, targets = bins.batch(order, 10)
    assert bins.n_sequences(10) == len(expected) and inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs, [expected[i][0] for i in order])
    assert np.array_equal(targets, [expected[i][1] for i in order])
    assert bins.n_targets == sum(np.fromfile(path, np.uint8).sum() for path in tmp_path.glob('*.mask.bin'))
    with pytest.raises(ValueError, match=r'train_\d.bin: token \d+ at position \d+ is .* of 500: mend it'):
        bins.check_vocabulary(500, 'mend it')
    os.remove(tmp_path / 'train_1.mask.bin')
    with pytest.raises(ValueError, match='train_1.mask.bin has 0 bytes, one for each of 7 tokens'):
        prepare.Bins(str(tmp_path), 'train', 'uint16')
    for path in tmp_path.glob('*.mask.bin'):
        os.remove(path)
    bins = prepare.Bins(str(tmp_path), 'train', 'uint16')
    windows = bins.read(order, 10)
    assert all(map(np.array_equal, bins.batch(order, 10), (windows[:, :-1], windows[:, 1:])))


def prep_rss():
    try:
        with open('/proc/self/statm', encoding='utf-8', newline='') as f:
            return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    except OSError:
        pytest.skip('this system has no /proc to read the memory in use from')


def test_bins_memory_stays_bounded(tmp_path):
    with open(tmp_path / 'train.bin', 'wb') as f:                             # 200 MB
        for i in range(13):
            f.write(np.full(8 << 20, i, np.uint16))
    bins = prepare.Bins(str(tmp_path), 'train', 'uint16')
    order = np.random.default_rng(0).permutation(bins.n_sequences(1024))[:48 * 2000].reshape(2000, 48)
    bins.read(order[0], 1024)
    before, peak = prep_rss(), 0
    for batch in order:
        got = bins.read(batch, 1024)
        assert got[0, 0] == batch[0] * 1024 // (8 << 20)
        peak = max(peak, prep_rss())
    assert peak - before < 100 << 20


# downloads --------------------------------------------------------------------------------------------------
PREP_BODY = bytes(random.Random(3).randrange(256) for _ in range(200_000))


class PrepHandler(http.server.BaseHTTPRequestHandler):
    """/ok with ranges, /noranges without; /500x2 fails twice; /cut sends half, once; /lie always does"""
    seen = []

    def do_GET(self):
        start, path = self.headers.get('Range'), self.path
        self.seen.append((path, start))
        count = sum(p == path for p, _ in self.seen)
        status = {'/404': 404, '/always500': 503, '/429': 429 if count == 1 else 200}.get(path, 200)
        status = 500 if path == '/500x2' and count < 3 else status
        body, begin = PREP_BODY, 0
        if status == 200 and start and path != '/noranges':
            begin = int(start[6:-1])
            status = 206 if begin < len(body) else 416
        body = body[begin:] if status in (200, 206) else b'sorry'
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        if status in (206, 416):
            place = f'{begin}-{len(PREP_BODY) - 1}' if status == 206 else '*'
            self.send_header('Content-Range', f'bytes {place}/{len(PREP_BODY)}')
        self.end_headers()
        half = path == '/cut' and count == 1 or path == '/lie'
        self.wfile.write(body[:len(body) // 2] if half else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def prep_server(monkeypatch):
    pytest.importorskip('requests')
    monkeypatch.setattr(prepare, 'RETRY_WAITS', (0, 0, 0))
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    PrepHandler.seen = []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), PrepHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f'http://127.0.0.1:{server.server_address[1]}'
    server.shutdown()
    server.server_close()


PREP_SUM = hashlib.sha256(PREP_BODY).hexdigest()


@pytest.mark.parametrize('path, have, requests_made', [
    ('/ok', 0, 1), ('/ok', 1000, 1), ('/noranges', 1000, 1), ('/500x2', 0, 3), ('/429', 0, 2), ('/cut', 0, 2),
    ('/ok', len(PREP_BODY), 2)])
@pytest.mark.parametrize('known', [True, False])
def test_fetch_brings_the_file(path, have, requests_made, known, prep_server, tmp_path, capsys):
    target = str(tmp_path / 'deep' / 'file')
    os.makedirs(os.path.dirname(target))
    with open(target + '.part', 'wb') as f:
        f.write(PREP_BODY[:have])
    checks = {'size': len(PREP_BODY), 'sha256': PREP_SUM} if known else {}
    assert prepare.fetch(prep_server + path, target, **checks) == target
    with open(target, 'rb') as f:
        assert f.read() == PREP_BODY
    assert os.listdir(os.path.dirname(target)) == ['file']
    made = requests_made if not (known and have == len(PREP_BODY)) else 0    # complete, only not renamed yet
    assert len(PrepHandler.seen) == made
    if have:
        assert all(start == f'bytes={have}-' for _, start in PrepHandler.seen[:1])
    prepare.fetch(prep_server + path, target, **checks)                          # it is there already
    assert len(PrepHandler.seen) == made


def test_fetch_says_what_is_wrong_in_one_line(prep_server, tmp_path):
    target = str(tmp_path / 'file')
    table = [('/404', {}, FileNotFoundError, ['404', 'check the address']),
             ('/always500', {}, OSError, ['503', target, 'or fly']),
             ('/lie', {}, OSError, ['broke off after', 'run this again', '/lie', target]),
             ('/ok', {'size': 5}, ValueError, ['200,000', '5 are expected']),
             ('/ok', {'sha256': '0' * 64}, ValueError, [PREP_SUM[:12], '000000000000'])]
    for path, checks, kind, parts in table:
        with pytest.raises(kind) as e:
            prepare.fetch(prep_server + path, target, instead=', or fly', **checks)
        assert all(part in str(e.value) for part in parts) and '\n' not in str(e.value), e.value
        assert not os.path.exists(target)
        if path != '/lie':
            assert not os.path.exists(target + '.part')
        else:                                                # what came is kept, and whole in front
            with open(target + '.part', 'rb') as f:
                assert PREP_BODY.startswith(f.read())
            os.remove(target + '.part')


def test_fetch_offline_names_the_way_out(tmp_path, monkeypatch, capsys):
    requests = pytest.importorskip('requests')
    monkeypatch.chdir(tmp_path)

    def offline(*_, **__):
        raise requests.ConnectionError('Failed to resolve host ' * 10)
    monkeypatch.setattr(requests, 'get', offline)
    monkeypatch.setattr('time.sleep', lambda _: None)
    code, _, stderr = prep_run(['shakespeare', '--tokenizer=char'], monkeypatch, capsys)
    assert code == 1 and len(stderr.strip().splitlines()) == 1
    assert 'cannot reach raw.githubusercontent.com' in stderr and 'python prepare.py my.txt' in stderr
    assert os.path.join('data', 'shakespeare', 'input.txt') in stderr and prep_files(tmp_path) == []
