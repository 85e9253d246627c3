"""From text to tokens: writes data/<name>/train.bin, val.bin and meta.json, which train.py reads.

    $ python prepare.py                                  # Python's own library, as bytes: data/pystdlib_byte
    $ python prepare.py shakespeare --tokenizer=char     # data/shakespeare_char
    $ python prepare.py shakespeare --tokenizer=gpt2     # data/shakespeare
    $ python prepare.py my.txt --tokenizer=gpt2 --out=mydata
    $ python prepare.py 'notes/**/*.md'                  # a quoted glob, or a folder: each file is a document
    $ python prepare.py tales.jsonl --field=story        # JSON lines: each record is a document

A .bin file is nothing but tokens, little-endian, uint16 if the vocabulary fits and else uint32.
"""
import array
import base64
import codecs
import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import errno
import functools
import glob
import hashlib
import itertools
import json
import os
import pickle
import platform
import re
import shlex
import signal
import sys
import sysconfig
import tempfile
import time
import urllib.parse
from collections.abc import Callable

from configurator import configure, print0

source = 'pystdlib'        # pystdlib, shakespeare, or a file (text, .jsonl), folder or glob of your own
field = 'text'             # JSON lines: the field of a record that has its text
tokenizer = 'byte'         # byte, char, tiktoken's (gpt2, o200k_base...), or a folder with tokenizer.json
out: str | None = None     # the dataset's name, or a path with a slash; None: <source>_<tokenizer>
val_fraction = 0.1         # the share of the text that is kept for validation
procs: int | None = None   # processes that encode; None: one for each core
_, _, words = configure(globals(), words=1)

import numpy as np

EOT = '<|endoftext|>'         # the text of every tokenizer's end-of-text token
SPLITS = ('train', 'val')
CHUNK = 1 << 20               # characters that are encoded at a time
POOL_BYTES = 16 << 20         # less text than this is encoded sooner than a pool of processes has started
RETRY_WAITS = (0.5, 1, 2, 4)  # seconds between the tries of a download


@functools.cache
def print_once(text):
    print0(text)


class Progress:
    """How far and how fast, in bytes: a line rewritten on a terminal, else one every 10 seconds."""
    def __init__(self, label, total=None, done=0):
        """total: the bytes to come, if known; done: those that an earlier run has done."""
        self.label, self.total, self.first, self.done = label, total, done, done
        self.begin, self.shown, self.tty = time.time(), None, sys.stdout.isatty()

    def add(self, n_bytes):
        self.done += n_bytes
        now = time.time()
        if now - (self.shown or self.begin) > (0.2 if self.tty else 10):
            self.shown = now
            self.show(f' of {self.total / 1e6:,.1f}' if self.total else '', end='' if self.tty else '\n')

    def close(self):
        """Show what it came to."""
        self.show('', end='\n')

    def show(self, of, end):
        seconds = time.time() - self.begin
        speed = (self.done - self.first) / 1e6 / max(seconds, 1e-3)
        line = f'{self.label}: {self.done / 1e6:,.1f}{of} MB in {seconds:.1f} s, {speed:.1f} MB/s'
        print(f'\r{line:<79}' if self.tty else line, end=end, flush=True)


# downloads --------------------------------------------------------------------------------------------------

def mismatch(path, size, sha256):
    """What is wrong with a file, as text; None if size and sha256, each where given, are right."""
    have, digest = os.path.getsize(path), hashlib.sha256()
    if size is not None and have != size:
        return f'{have:,} bytes where {size:,} are expected'
    if sha256 is not None:
        with open(path, 'rb') as f:
            while block := f.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != sha256:
            return f'sha256 {digest.hexdigest()[:12]}... where {sha256[:12]}... is expected'
    return None


def fetch(url, path, size=None, sha256=None, instead=''):
    """Download url to path, unless a file with the right size and sha256 (where given) is there; return path.

    What has arrived waits in path + '.part', from where an interrupted download is resumed, in this run or
    the next. OSError: the server cannot be reached or refuses; `instead` ends its message, it says what else
    can be done. ValueError: it sends something else than expected.
    """
    if os.path.exists(path) and not mismatch(path, size, sha256):
        return path
    import requests
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    part, host = path + '.part', urllib.parse.urlsplit(url).netloc
    for wait in (*RETRY_WAITS, None):
        try:
            fetch_rest(url, part, size)
            break
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as e:
            if wait is None:
                why = str(e) if len(str(e)) < 60 else type(e).__name__
                have = os.path.getsize(part) if os.path.exists(part) else 0
                what = (f'{host} broke off after {have:,} bytes ({why}): run this again to resume'
                        if have else f'cannot reach {host} ({why}): go online')
                raise OSError(f'{what}, or download {url} by other means to {path}{instead}') from e
            time.sleep(wait)
    if problem := mismatch(part, size, sha256):
        os.remove(part)
        raise ValueError(f'{url} sent {problem}: run this again; if it persists, the file there has changed')
    os.replace(part, path)
    return path


def fetch_rest(url, part, size):
    """Try once to append to `part` what is missing. requests' ConnectionError: another try may help."""
    import requests
    have = os.path.getsize(part) if os.path.exists(part) else 0
    if size is not None and have >= size:
        return  # complete or too long, which the caller checks
    headers = {'Accept-Encoding': 'identity', **({'Range': f'bytes={have}-'} if have else {})}
    with requests.get(url, headers=headers, stream=True, timeout=(10, 60)) as r:
        resumes = r.headers.get('Content-Range', '').startswith(f'bytes {have}-')
        if have and (r.status_code == 416 or r.status_code == 206 and not resumes):
            os.remove(part)  # the file there is not what it was: all over again
            raise requests.ConnectionError('it cannot resume')
        if r.status_code in (408, 429) or r.status_code >= 500:
            raise requests.ConnectionError(f'it answers {r.status_code} {r.reason}')
        if r.status_code not in (200, 206):
            raise OSError(f'cannot download {url}: {r.status_code} {r.reason}: check the address')
        have = have if r.status_code == 206 else 0  # 200: the server ignores Range and sends all of it
        length = None if r.headers.get('Content-Encoding') else r.headers.get('Content-Length')
        total = have + int(length) if length else None
        if None not in (size, total) and total != size:
            raise ValueError(f'{url} has {total:,} bytes where {size:,} are expected: it has changed there')
        progress = Progress(f'download {os.path.basename(part)[:-5]}', total or size, have)
        with open(part, 'ab' if have else 'wb') as f:
            for block in r.iter_content(1 << 16):
                f.write(block)
                progress.add(len(block))
    if total is not None and progress.done < total:
        raise requests.ConnectionError('connection closed')
    progress.close()


# files as documents -----------------------------------------------------------------------------------------
# A document is an iterable of blocks of text, so that one of many gigabytes is never in memory as a whole.

def read_text(path):
    """The file's text, a block at a time. Where it is not UTF-8, ValueError says at which byte."""
    decoder, n_read, data = codecs.getincrementaldecoder('utf-8')(), 0, b' '
    with open(path, 'rb') as f:
        while data:
            data = f.read(1 << 20)
            n_read += len(data)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as e:
                raise ValueError(f'{path} is not UTF-8 text: byte {e.object[e.start]:#04x} at offset '
                                 f'{n_read - len(e.object) + e.start}: convert it, or leave it out') from None
            if text:
                yield text


def text_documents(path, field):
    """A text file is one document."""
    yield read_text(path)


def json_documents(path, field):
    """JSON lines: a document for each record, the text in this field. ValueError names file and line."""
    with open(path, 'rb') as f:
        for n, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode('utf-8-sig'))
            except (ValueError, RecursionError) as e:
                raise ValueError(f'{path}, line {n}: not JSON ({e})') from None
            is_object = isinstance(record, dict)
            if not is_object or not isinstance(record.get(field), str):
                what = f'its fields are {", ".join(record)}' if is_object else 'it is no object'
                raise ValueError(f'{path}, line {n}: no text in field {field!r}, {what:.200}: '
                                 'choose one by --field')
            try:
                record[field].encode()
            except UnicodeEncodeError as e:
                raise ValueError(f'{path}, line {n}: half a character, {e.object[e.start]!r}') from None
            yield [record[field]]


FORMATS = {'.jsonl': json_documents}  # by the end of a file's name; all others are text


def file_documents(paths, field='text'):
    for path in paths:
        read = FORMATS.get(os.path.splitext(path)[1].lower(), text_documents)
        yield from read(path, field)


# sources ----------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Source:
    """Where text comes from.

    documents() -> an iterator over documents, each an iterable of blocks of text. It is called twice, to
    count and to encode, and gives the same both times: def documents(): yield ['a text']; yield ['another'].
    separate: True, documents that stay whole and end with an end-of-text token; False, one text that may be
    cut anywhere, in two for train and val.
    """
    name: str  # of the dataset
    label: str  # what meta.json says about where it is from
    documents: Callable
    separate: bool = True


SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'


def shakespeare():
    path = fetch(SHAKESPEARE, os.path.join('data', 'shakespeare', 'input.txt'), size=1115394,
                 sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
                 instead=', or use a text file that you have: python prepare.py my.txt')
    return Source('shakespeare', 'shakespeare', functools.partial(file_documents, [path]), separate=False)


def pystdlib():
    """The standard library of the running Python, without tests and installed packages."""
    root, files = sysconfig.get_paths()['stdlib'], []
    leave_out = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - leave_out
        files += [os.path.join(folder, name) for name in names if name.endswith('.py')
                  and not name.startswith('_sysconfigdata')]  # that is this machine's compiler flags
    files = sort_files(path for path in files if is_utf8(path))
    if not files:
        raise FileNotFoundError(f'pystdlib: no .py files in {root}: use a text: python prepare.py my.txt')
    return Source('pystdlib', f'pystdlib {platform.python_version()}',
                  functools.partial(file_documents, files))


SOURCES = {'pystdlib': pystdlib, 'shakespeare': shakespeare}


def sort_files(files):
    return sorted(files, key=lambda path: path.split(os.sep))  # the same order on every system


def is_utf8(path):
    try:
        collections.deque(read_text(path), maxlen=0)
        return True
    except ValueError:
        return False


def find_source(source, field='text'):
    """The Source of this name, or of this file, folder (without hidden files) or glob."""
    if source in SOURCES:
        return SOURCES[source]()
    if os.path.isfile(source):
        name, end = os.path.splitext(os.path.basename(source))
        documents = functools.partial(file_documents, [source], field)
        return Source(plain_name(name), source, documents, separate=end.lower() in FORMATS)
    pattern, where = source, re.split(r'[^/\\]*[*?[]', source)[0]  # where: the folder before a wildcard
    if os.path.isdir(source):
        pattern, where = os.path.join(glob.escape(source), '**', '*'), source
    files = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not files:
        raise FileNotFoundError(f'{source}: no such file, folder or glob with files, and none of '
                                f'{", ".join(SOURCES)}: check the path')
    name = os.path.basename(os.path.abspath(where))
    return Source(plain_name(name), source, functools.partial(file_documents, sort_files(files), field))


def plain_name(text):
    return re.sub(r'[^\w.-]+', '_', text).strip('._') or 'text'


def output_folder(out, source_name, tokenizer):
    """data/<out>, or out itself if it has a slash; without out, data/<source>_<tokenizer>."""
    usual = f'{source_name}_{plain_name(tokenizer.removesuffix("tokenizer.json"))}'
    usual = 'shakespeare' if usual == 'shakespeare_gpt2' else usual  # nanoGPT's name
    return out if out and re.search(r'[/\\]', out) else os.path.join('data', out or usual)


def dataset_name(folder):
    """What train.py's --dataset calls this folder: its path below data/, else the whole path."""
    path, data = os.path.abspath(folder), os.path.abspath('data') + os.sep
    return (path[len(data):] if path.startswith(data) else path).replace(os.sep, '/')


# which text is for what -------------------------------------------------------------------------------------

def code_points(text):
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), '<u4')


@dataclasses.dataclass
class Scan:
    """What there is in a source, known before anything is written."""
    sizes: array.array  # of each document, in bytes; 0: empty, left out
    n_characters: int
    characters: str  # all that occur, each once, sorted

    @property
    def n_documents(self):
        return len(self.sizes) - self.sizes.count(0)

    @property
    def n_bytes(self):
        return sum(self.sizes)


def scan(source):
    """Read the source once -> Scan. ValueError: what cannot be read."""
    sizes, n_characters, used = array.array('q'), 0, np.zeros(sys.maxunicode + 1, bool)
    progress = Progress('reading')
    for document in source.documents():
        sizes.append(0)
        for block in document:
            size = len(block.encode())
            sizes[-1] += size
            n_characters += len(block)
            used[code_points(block)] = True
            progress.add(size)
    if progress.shown:
        progress.close()
    return Scan(sizes, n_characters, ''.join(map(chr, np.flatnonzero(used))))


def split_documents(sizes, fraction):
    """'train', 'val', or None for an empty one, for each of several documents of these sizes in bytes.

    One that is no larger than val's share goes to val whenever val has no more than its share of the bytes so
    far: this spreads val evenly, misses the share by less than a document, and favours no length. If all are
    larger, as with two, the smallest goes to val.
    """
    plan, largest, val, total = [], fraction * sum(sizes), 0, 0
    for size in sizes:
        to_val = size <= largest and val <= fraction * total
        val, total = val + size * to_val, total + size
        plan.append(None if not size else 'val' if to_val else 'train')
    if not val:
        plan[sizes.index(min(size for size in sizes if size))] = 'val'
    return plan


def plan_splits(source, scanned, fraction):
    """What each document is for: 'train', 'val', None (left out), or as many characters of it for training.

    A single text is cut after int(n * (1 - fraction)) characters, as in nanoGPT.
    """
    if not 0 < fraction < 1:
        raise ValueError(f'val_fraction={fraction}: must lie between 0 and 1, like 0.1')
    if not scanned.n_documents:
        raise ValueError(f'{source.label} is empty: there is no text to prepare')
    if source.separate and scanned.n_documents > 1:
        return split_documents(scanned.sizes, fraction)
    n, n_train = scanned.n_characters, int(scanned.n_characters * (1 - fraction))
    if not 0 < n_train < n:
        raise ValueError(f'{source.label} has {n} characters: too few for a train and a val part')
    return [n_train if size else None for size in scanned.sizes]


def cut_in_two(document, n_train):
    """(split, block): the first n_train characters of a document are for training, the rest is for val."""
    left = n_train
    for block in document:
        if left:
            yield 'train', block[:left]
        if len(block) > left:
            yield 'val', block[left:]
        left = max(left - len(block), 0)


def planned_texts(source, plan):
    """(split, blocks of a text, whether it is a document, which ends with an end-of-text token), in order."""
    for document, what in zip(source.documents(), plan):
        if isinstance(what, int):
            for split, parts in itertools.groupby(cut_in_two(document, what), key=lambda part: part[0]):
                yield split, (block for _, block in parts), False
        elif what:
            yield what, document, True


# text, cut to pieces ----------------------------------------------------------------------------------------

# A letter or digit, then a space, a line end or a CJK stop: no alternative of tiktoken's patterns matches
# across this, and none that looks ahead can stand before it, so both sides alone give the same tokens.
CUT = re.compile(r'[^\W_](?=[ \n\u3001\u3002\uff0c])')  # [^\W_] is exactly \p{L} and \p{N}
AROUND = 256  # characters on each side of a cut that a tokenizer may look at


def last_cut(text, end, tok):
    """The last place before `end` where text can be cut for this tokenizer; 0 if none is found."""
    if tok.anywhere:
        return end
    for begin in (max(0, end - 4096), 0):
        found = [match.end() for match in CUT.finditer(text, begin, end)]
        if found:
            break
    return next((n for n in reversed(found[-20:]) if tok.may_cut(text, n)), 0)


def pieces(blocks, tok):
    """(piece, is it the last): a text in pieces of about CHUNK characters that have the ids of the whole."""
    text, limit = '', CHUNK
    for block in blocks:
        text += block
        while len(text) > limit + AROUND:
            n = last_cut(text, limit, tok)
            limit = CHUNK if n else 2 * limit  # one very long word: look further
            if n:
                yield text[:n], False
                text = text[n:]
    if text:
        yield text, True


def groups(texts, tok):
    """Pieces gathered until a split has CHUNK characters: (split, [(piece, a document ends with it)]).

    Each is one process's work. texts: as planned_texts gives them.
    """
    waiting, sizes = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    for split, blocks, is_document in texts:
        for piece, last in pieces(blocks, tok):
            waiting[split].append((piece, last and is_document))
            sizes[split] += len(piece)
            if sizes[split] >= CHUNK:
                yield split, waiting[split]
                waiting[split], sizes[split] = [], 0
    yield from ((split, group) for split, group in waiting.items() if group)


# tokenizers -------------------------------------------------------------------------------------------------

class Tokenizer:
    """name; n_vocab; eot, the id of the end-of-text token or None; special, {text: id}.

    A kind adds encode_array (text -> ids, special tokens being text like any other), state (plain Python that
    rebuilds it) and to_json (a tokenizer.json, as text).
    """
    anywhere = False  # True: a token depends on one character alone, so text can be cut anywhere

    def __init__(self, name, tokens, special, n_vocab):
        self.name, self.special, self.n_vocab, self.eot = name, special, n_vocab, special.get(EOT)
        self.tokens = {**tokens, **{i: text.encode() for text, i in special.items()}}  # {id: bytes}

    def may_cut(self, text, n):
        """Whether text[:n] and text[n:] alone give the ids of the whole, at a place that CUT matches."""
        return True

    def encode(self, text, allow_special=True):
        """text -> list of ids. With allow_special, special tokens' texts become their ids."""
        text = without_surrogates(text)
        by_length = sorted(self.special, key=len, reverse=True) if allow_special else []
        parts = re.split(f'({"|".join(map(re.escape, by_length))})', text) if by_length else [text]
        return [i for n, part in enumerate(parts)  # every second part is a special token
                for i in ([self.special[part]] if n % 2 else self.encode_array(part).tolist())]

    def decode_bytes(self, ids):
        """Special tokens give their text; ids that are no token, in a padded vocabulary, give nothing."""
        return b''.join(self.tokens.get(int(i), b'') for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', 'replace')


def without_surrogates(text):
    """Halves of characters, which have no UTF-8, become U+FFFD; two that belong together one character."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and end of text."""
    anywhere = True

    def __init__(self):
        super().__init__('byte', {i: bytes([i]) for i in range(256)}, {EOT: 256}, 257)

    def encode_array(self, text):
        return np.frombuffer(text.encode(), np.uint8)

    def state(self):
        return {'kind': 'byte'}

    def to_json(self):
        return bpe_json({char: b for b, char in byte_chars().items()}, [], None, self.special)


class CharTokenizer(Tokenizer):
    """chars[id] is a character, or '' where there is none; eot is an id too, if documents need one."""
    anywhere = True

    def __init__(self, chars, eot=None):
        self.chars, self.ids = list(chars), np.full(sys.maxunicode + 1, -1, np.int32)  # code point -> id
        for i, char in enumerate(self.chars):
            if len(char) == 1:
                self.ids[ord(char)] = i
        tokens = {i: char.encode('utf-8', 'replace') for i, char in enumerate(self.chars)}
        super().__init__('char', tokens, {} if eot is None else {EOT: eot}, len(tokens) + (eot is not None))

    def encode_array(self, text):
        ids = self.ids[code_points(text)]
        if lacking := sorted({text[i] for i in np.flatnonzero(ids < 0)}):
            raise ValueError(f'prompt has {", ".join(map(repr, lacking[:9]))} (not in this char vocabulary '
                             f'of {self.n_vocab}): leave it out, or prepare text that has it')
        return ids

    def state(self):
        return {'kind': 'char', 'chars': self.chars, 'eot': self.eot}

    def to_json(self):
        vocab = {char: i for i, char in enumerate(self.chars) if char}
        return bpe_json(vocab, [], None, self.special, byte_level=False)


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by tiktoken. ranks is its table as text, one `base64 rank` a line."""
    def __init__(self, name, pattern, special, ranks):
        import tiktoken
        self.pattern, self.ranks = pattern, ranks
        table = {base64.b64decode(token): int(rank) for token, rank in map(str.split, ranks.splitlines())}
        self.bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=table, special_tokens=special)
        tokens = {i: token for token, i in table.items()}
        super().__init__(name, tokens, special, self.bpe.max_token_value + 1)

    def encode_array(self, text):
        return np.array(self.bpe.encode_ordinary(text), np.uint32)

    def state(self):
        return {'kind': 'tiktoken', 'name': self.name, 'pattern': self.pattern, 'special': dict(self.special),
                'ranks': self.ranks}

    def to_json(self):
        """Its merges are not stored: a token's are the two parts that the ranks below its own leave of it."""
        ranks, chars = self.bpe._mergeable_ranks, byte_chars()

        def text(token):
            return ''.join(chars[b] for b in token)
        pairs = [two_parts(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
        merges = [[text(pair[0]), text(pair[1])] for pair in pairs if pair]
        return bpe_json({text(token): i for token, i in ranks.items()}, merges, self.pattern, self.special)


def two_parts(token, ranks):
    """What is left of a token's bytes when all pairs of lower rank are merged; None unless that is a pair."""
    parts, limit, never = [token[i:i + 1] for i in range(len(token))], ranks[token], 1 << 60
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], never))
        if ranks.get(parts[best] + parts[best + 1], never) >= limit:
            return None
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return tuple(parts)


def bpe_json(vocab, merges, pattern, special, byte_level=True):
    """A tokenizer.json, as text."""
    split = [{'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}]
    level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False}
    steps = split * bool(pattern) + [level] * byte_level
    return json.dumps({
        'version': '1.0', 'truncation': None, 'padding': None, 'normalizer': None, 'post_processor': None,
        'added_tokens': [{'id': i, 'content': text, 'single_word': False, 'lstrip': False, 'rstrip': False,
                          'normalized': False, 'special': True} for text, i in special.items()],
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': steps} if steps else None,
        'decoder': level if byte_level else {'type': 'Fuse'},
        'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                  'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False,
                  'ignore_merges': byte_level and bool(merges), 'vocab': vocab, 'merges': merges},
    }, ensure_ascii=False)


def byte_chars():
    """{byte: the character that stands for it in byte-level vocabularies}, GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


SPECIAL_TOKENS = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, by the tokenizers library that it is made for.

    source: the file's text; config: what is used of tokenizer_config.json, {name: text}: SPECIAL_TOKENS and
    chat_template. ValueError: the file is damaged, or its tokens do not stand for bytes of text.
    """
    def __init__(self, source, config=None):
        self.source, self.config = source, config or {}
        self.library = library_tokenizer(source)
        vocab = self.library.get_vocab(with_added_tokens=False)
        added = self.library.get_added_tokens_decoder()  # {id: AddedToken}
        if not vocab:
            raise ValueError('it has an empty vocabulary')
        tokens = {**token_bytes(vocab, json.loads(source)),
                  **{i: token.content.encode() for i, token in added.items()}}
        special = {token.content: i for i, token in added.items() if token.special}
        super().__init__('json', tokens, special, max(tokens) + 1)
        added = {token.content: i for i, token in added.items()}
        ends = [self.special_text('eos_token'), EOT, '<|end_of_text|>', '</s>', '<|im_end|>']
        self.eot = next((added[end] for end in ends if end in added), None)

    def special_text(self, name):
        """The text of config's bos_token and so on, which may stand there as an object; None: it has none."""
        token = self.config.get(name)
        return token.get('content') if isinstance(token, dict) else token

    def encode(self, text, allow_special=True):
        """text -> list of ids, with those the file puts around every text: transformers' tokenizer(text)."""
        self.library.encode_special_tokens = not allow_special  # the library's name for 'as plain text'
        return self.library.encode(without_surrogates(text)).ids

    def encode_array(self, text):
        self.library.encode_special_tokens = True
        # _fast: half the time, by not counting where in the text each token is
        encoding, = self.library.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)

    def may_cut(self, text, n):
        """Tried on the text around: with some files, tokens reach across spaces, or each text gets a prefix.

        Where no cut holds (Llama 2 puts a space in front of every text), documents are encoded in one piece.
        """
        left, right = text[max(0, n - AROUND):n], text[n:n + AROUND]
        parts = [self.encode_array(left), self.encode_array(right)]
        return np.array_equal(np.concatenate(parts), self.encode_array(left + right))

    def chat(self, messages, thinking=True, tools=None):
        """[{'role': 'user', 'content': text}, ...] -> ids, to where the answer begins.

        thinking: what templates know as enable_thinking; None: the template's default. tools: JSON schemas.
        """
        special = {name: self.special_text(name) for name in SPECIAL_TOKENS if self.special_text(name)}
        if thinking is not None:
            special['enable_thinking'] = thinking
        text = render_chat(self.config.get('chat_template'), messages, tools, **special)
        self.library.encode_special_tokens = False
        return self.library.encode(without_surrogates(text), add_special_tokens=False).ids

    def state(self):
        return {'kind': 'json', 'source': self.source, 'config': self.config}

    def to_json(self):
        return self.source


def library_tokenizer(source):
    """A tokenizers.Tokenizer of a tokenizer.json's text. ValueError: it cannot be read, or is unsupported."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError('a tokenizer.json is read by a library that is not here: pip install '
                          'tokenizers') from None
    try:
        tok = tokenizers.Tokenizer.from_str(source)
    except Exception as e:  # the library raises nothing more specific
        raise ValueError(f'tokenizers {tokenizers.__version__} cannot read it '
                         f'({" ".join(str(e).split()):.300})') from None
    kind = type(tok.model).__name__
    unsupported = [name for name in ('dropout', 'continuing_subword_prefix', 'end_of_word_suffix')
                   if getattr(tok.model, name, None)]
    if kind not in ('BPE', 'Unigram') or unsupported:
        raise ValueError(f'unsupported model {" with ".join([kind, *unsupported])}; BPE and '
                         'Unigram are supported, without dropout, prefix and suffix')
    tok.no_truncation()
    tok.no_padding()
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # its threads and our processes do not mix
    return tok


def token_bytes(vocab, spec):
    """{id: the bytes that a token of a tokenizer.json's vocabulary stands for}, so that text can be streamed.

    Byte-level vocabularies write a character for each byte; others have U+2581 for a space and may have
    <0x0A> and so on for bytes that no other token has.
    """
    byte_level = '"ByteLevel"' in json.dumps([spec.get('pre_tokenizer'), spec.get('decoder')])
    fallback = spec['model'].get('byte_fallback')
    back = {char: b for b, char in byte_chars().items()}
    tokens = {}
    for text, i in vocab.items():
        if byte_level and all(char in back for char in text):
            tokens[i] = bytes(back[char] for char in text)
        elif fallback and re.fullmatch('<0x[0-9A-F]{2}>', text):
            tokens[i] = bytes([int(text[3:5], 16)])
        else:
            tokens[i] = (text if byte_level else text.replace('\u2581', ' ')).encode('utf-8', 'replace')
    return tokens


# chat templates ---------------------------------------------------------------------------------------------

def render_chat(template, messages, tools=None, add_generation_prompt=True, **variables):
    """The text of a conversation, as transformers' apply_chat_template renders it.

    template: jinja, or [{'name', 'template'}, ...], of which 'default' is used (with tools 'tool_use', if it
    is there). messages: [{'role', 'content', ...}]. variables: what else it may ask for, like bos_token.
    It runs in jinja's sandbox and sees only what is given here. ValueError: there is none, or it fails.
    """
    if isinstance(template, list):
        named = {entry['name']: entry['template'] for entry in template}
        template = named.get('tool_use' if tools and 'tool_use' in named else 'default')
    if not template:
        raise ValueError('this tokenizer has no chat template: give a plain prompt')
    try:
        messages = [{key: value for key, value in one.items() if value is not None} for one in messages]
        return compile_template(template).render(messages=messages, tools=tools, documents=None,
                                                 add_generation_prompt=add_generation_prompt, **variables)
    except ImportError:
        raise
    except Exception as e:  # a template can fail in any way that an expression can
        raise ValueError(f'the chat template fails: {type(e).__name__}: {" ".join(str(e).split())}') from None


@functools.lru_cache(maxsize=8)
def compile_template(template):
    """A jinja2 Template in the environment that transformers gives to chat templates."""
    import jinja2.ext
    import jinja2.sandbox
    if tuple(map(int, re.findall(r'\d+', jinja2.__version__)[:3])) < (3, 1, 6):
        raise ImportError(f'jinja2 {jinja2.__version__} has known ways out of its sandbox: '
                          'pip install -U jinja2')

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %} marks what the assistant writes: the same text."""
        tags = {'generation'}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    class Dict:
        """dict as a function alone: the class itself would be a way out to Python."""
        __call__, fromkeys = staticmethod(dict), staticmethod(dict.fromkeys)

    class Namespace(jinja2.utils.Namespace):
        """jinja's, without names that begin with an underscore."""
        def __init__(*args, **kwargs):  # self may be the name of an attribute
            self, *args = args
            jinja2.utils.Namespace.__init__(self)
            for name, value in dict(*args, **kwargs).items():
                self[name] = value

        def __setitem__(self, name, value):
            if str(name).startswith('_'):
                raise jinja2.exceptions.SecurityError(f'a namespace takes no {name!r}: rename it')
            super().__setitem__(name, value)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters['tojson'] = tojson
    env.globals |= {'raise_exception': raise_exception, 'strftime_now': strftime_now, 'dict': Dict(),
                    'namespace': Namespace}
    return env.from_string(template)


# tokenizers by name, and as they are stored -----------------------------------------------------------------

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'tiktoken': TiktokenTokenizer, 'json': JsonTokenizer}
# kind: (the part of its state that has a file of its own beside the .bin, that file's name)
TABLES = {'tiktoken': ('ranks', 'tokenizer.tiktoken'), 'json': ('source', 'tokenizer.json')}


def byte_tokenizer(characters, by_document):
    return ByteTokenizer()


def char_tokenizer(characters, by_document):
    return CharTokenizer(characters, len(characters) if by_document else None)


MAKERS = {'byte': byte_tokenizer, 'char': char_tokenizer}  # other names are files or tiktoken's


def make_tokenizer(name, characters='', by_document=False):
    """A tokenizer for new data; char takes the characters, and an end-of-text id if there are documents."""
    if name in MAKERS:
        return MAKERS[name](characters, by_document)
    if os.path.isfile(name) or os.path.isfile(os.path.join(name, 'tokenizer.json')):
        return json_tokenizer(name)
    if re.search(r'[/\\]', name):
        command = shlex.join(['python', 'hub.py', name])
        raise FileNotFoundError(f'tokenizer={name!r}: no folder with a tokenizer.json; if it is on the hub, '
                                f'`{command}` fetches it and prints the folder to name here')
    return tiktoken_tokenizer(name)


def tiktoken_tokenizer(name):
    """The tiktoken encoding of this name, whose table is downloaded once."""
    import requests
    import tiktoken
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f'tokenizer={name!r} is none of {", ".join([*MAKERS, *known])}, and no folder with '
                         'a tokenizer.json')
    try:
        bpe = tiktoken.get_encoding(name)
    except requests.RequestException as e:
        url = e.request.url if e.request else 'its table'
        raise OSError(f'tokenizer={name!r}: cannot download {url}: go online once, set TIKTOKEN_CACHE_DIR to '
                      'a folder that has it, or use --tokenizer=byte') from e
    ranks = sorted(bpe._mergeable_ranks.items(), key=lambda item: item[1])
    ranks = ''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks)
    return TiktokenTokenizer(name, bpe._pat_str, dict(bpe._special_tokens), ranks)


def json_tokenizer(path):
    """The tokenizer of a tokenizer.json, or of a folder with one; tokenizer_config.json beside it counts."""
    path = os.path.join(path, 'tokenizer.json') if os.path.isdir(path) else path
    config_path = os.path.join(os.path.dirname(path), 'tokenizer_config.json')
    template_path = os.path.join(os.path.dirname(path), 'chat_template.jinja')
    source, config, at = read_utf8(path), {}, config_path
    texts = [read_utf8(one) if os.path.exists(one) else None for one in (config_path, template_path)]
    try:
        if texts[0] is not None:
            read = json.loads(texts[0])
            config = {key: read[key] for key in (*SPECIAL_TOKENS, 'chat_template') if read.get(key)}
        if texts[1] is not None:
            config['chat_template'] = texts[1]
        at = path
        return JsonTokenizer(source, config)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f'{at} makes no tokenizer: {e}') from e


def read_utf8(path):
    """The text of a file, line ends as they are. OSError, ValueError: it is missing, or not UTF-8."""
    try:
        with open(path, encoding='utf-8', newline='') as f:
            return f.read()
    except FileNotFoundError:
        raise FileNotFoundError(f'{path} is missing: without it there are no tokens') from None
    except UnicodeDecodeError as e:
        raise ValueError(f'{path} is not UTF-8 text ({e})') from None


def tokenizer_from_state(state):
    """The tokenizer whose state() this is, without files or network. ValueError: it is no such state."""
    try:
        return KINDS[state['kind']](**{key: value for key, value in state.items() if key != 'kind'})
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise ValueError(f'what is stored makes no tokenizer of the kinds {", ".join(KINDS)} '
                         f'({" ".join(str(e).split())}): it is damaged, or from a newer version') from e


def find_tokenizer(rest, path):
    """The tokenizer of a checkpoint, given what it holds beside the weights: its own, or for nanoGPT's files
    that of the dataset they name. FileNotFoundError: that is not here. ValueError: there is none, it is
    damaged, or it has more tokens than the model."""
    if rest.get('tokenizer'):
        try:
            return tokenizer_from_state(rest['tokenizer'])
        except ValueError as e:
            raise ValueError(f'{path}: {e}') from e
    dataset = rest.get('config', {}).get('dataset')
    if not isinstance(dataset, str):
        raise ValueError(f"{path} names no tokenizer and no dataset: nothing can turn its tokens into text")
    folder, n_vocab = os.path.join('data', dataset), rest['model_args']['vocab_size']
    if not os.path.isdir(folder):
        raise FileNotFoundError(f'{folder} is not there, whose tokenizer {path} needs: prepare it here')
    tok = load_tokenizer(folder)
    if tok.n_vocab > -(-n_vocab // 64) * 64:  # padded, as GPT-2's 50257 tokens to 50304
        raise ValueError(f'{folder} has a tokenizer of {tok.n_vocab:,} tokens, but {path} has '
                         f'vocab_size={n_vocab}: prepare the dataset that it was trained on here')
    return tok


def load_tokenizer(folder):
    """The tokenizer of a prepared folder: from meta.json, from nanoGPT's meta.pkl, or else GPT-2's."""
    state = read_meta(folder)['tokenizer']
    if state is None:
        return make_tokenizer('gpt2')
    if state.get('kind') in TABLES:
        key, name = TABLES[state['kind']]
        state = {**state, key: read_utf8(os.path.join(folder, name))}
    try:
        return tokenizer_from_state(state)
    except ValueError as e:
        raise ValueError(f'{folder}: {e}') from e


# writing ----------------------------------------------------------------------------------------------------

def encode_group(tok, group):
    """[(text, ends)] -> (ids, bytes of text), with the end-of-text token where a document ends."""
    arrays, dtype = [], dtype_of(tok.n_vocab)
    for text, ends in group:
        arrays.append(tok.encode_array(text).astype(dtype))
        if ends and tok.eot is not None:
            arrays.append(np.array([tok.eot], dtype))
    return np.concatenate(arrays), sum(len(text.encode()) for text, _ in group)


def dtype_of(n_vocab):
    return np.dtype('<u2' if n_vocab <= 1 << 16 else '<u4')


def start_worker(state):
    global worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    worker_tokenizer = tokenizer_from_state(state)


def encode_in_worker(group):
    return encode_group(worker_tokenizer, group)


def usable_procs(procs, tok, n_bytes):
    """How many processes are worth starting for this much text."""
    if procs is not None and procs < 1:
        raise ValueError(f'procs={procs}: must be 1 or more')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return 1 if tok.anywhere or n_bytes < POOL_BYTES else min(procs or cores, 61)  # Windows allows no more


def encode_groups(tok, groups, procs):
    """(split, ids, bytes) of every group, in order; no more than two groups a process are in memory."""
    if procs == 1:
        yield from ((split, *encode_group(tok, group)) for split, group in groups)
        return
    pool = concurrent.futures.ProcessPoolExecutor(procs, initializer=start_worker, initargs=(tok.state(),))
    waiting = collections.deque()
    try:
        for split, group in groups:
            waiting.append((split, pool.submit(encode_in_worker, group)))
            if len(waiting) >= 2 * procs:
                split, result = waiting.popleft()
                yield split, *result.result()
        yield from ((split, *result.result()) for split, result in waiting)
    except concurrent.futures.process.BrokenProcessPool as e:
        raise OSError(f'one of {procs} processes died, probably for lack of memory: try --procs=1') from e
    finally:
        pool.shutdown(cancel_futures=True)


def write_bins(folder, texts, tok, procs=1, n_bytes=None):
    """Encode texts into folder/train.bin and val.bin; return their counts and checksums.

    texts: (split, blocks, is a document), as planned_texts gives them; n_bytes: how many there are, if known.
    texts -> pieces -> groups -> ids are generators, so memory does not grow with the text.
    """
    progress = Progress(f'{tok.name} encoding, {procs} process{"es" * (procs > 1)}', n_bytes)
    tokens, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    sums = {split: hashlib.sha256() for split in SPLITS}
    with (open(os.path.join(folder, 'train.bin'), 'wb') as train,
          open(os.path.join(folder, 'val.bin'), 'wb') as val,
          contextlib.closing(encode_groups(tok, groups(texts, tok), procs)) as encoded):
        for split, ids, size in encoded:
            (train if split == 'train' else val).write(ids)
            sums[split].update(ids)
            tokens[split] += len(ids)
            sizes[split] += size
            progress.add(size)
    progress.close()
    if n_bytes not in (None, progress.done):
        raise ValueError(f'the text changed while it was read, from {n_bytes:,} to {progress.done:,} bytes: '
                         'run this again')
    return {**{f'{split}_tokens': tokens[split] for split in SPLITS},
            **{f'{split}_bytes': sizes[split] for split in SPLITS},  # of text, without end-of-text tokens
            'bytes_per_token': sizes['val'] / tokens['val'],         # val loss / ln 2 / this = bits per byte
            'checksum': {f'{split}.bin': sums[split].hexdigest() for split in SPLITS}}


def write_dataset(folder, texts, tok, label, procs=1, n_bytes=None):
    """Make a prepared folder of texts, as for write_bins; return what its meta.json says.

    Everything is written to a temporary folder inside and renamed at the end, meta.json last: a run that
    fails changes nothing.
    """
    made = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    state, dtype = tok.state(), dtype_of(tok.n_vocab).name
    files = {'train.mask.bin': None}  # {name: text}; None: remove what an earlier run left
    files |= {name: state.pop(key, None) for key, name in TABLES.values()}
    try:
        with tempfile.TemporaryDirectory(prefix='.prepare-', dir=folder) as temp:
            meta = {'source': label, 'vocab_size': tok.n_vocab, 'dtype': dtype, 'eot': tok.eot,
                    **write_bins(temp, texts, tok, procs, n_bytes), 'tokenizer': state}
            files['meta.json'] = json.dumps(meta, indent=1)
            for name, text in files.items():
                if text is not None:
                    with open(os.path.join(temp, name), 'w', encoding='utf-8', newline='') as f:
                        f.write(text)
            for name in ('train.bin', 'val.bin', *files):
                if os.path.exists(os.path.join(temp, name)):
                    os.replace(os.path.join(temp, name), os.path.join(folder, name))
                elif os.path.exists(os.path.join(folder, name)):
                    os.remove(os.path.join(folder, name))
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(f'{folder} cannot be written ({e.strerror}): free some space, or choose another folder '
                      'by --out') from None
    finally:
        if made and not os.listdir(folder):
            os.rmdir(folder)
    return meta


# reading ----------------------------------------------------------------------------------------------------

class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers, text. A pickle runs code only through classes, and here it gets none."""
    def find_class(self, module, name):
        raise ValueError(f'it asks for {module}.{name}, but only plain data is read')


META_TYPES = {'vocab_size': (int,), 'dtype': (str,), 'eot': (int, type(None)),
              'tokenizer': (dict, type(None)), 'bytes_per_token': (int, float, type(None))}


def read_json_meta(path):
    """meta.json as a dict. ValueError: something that is used is not what it should be."""
    meta = json.loads(read_utf8(path))
    wrong = [name for name, types in META_TYPES.items() if type(meta.get(name)) not in types]
    if not wrong and meta['dtype'] not in ('uint16', 'uint32'):
        wrong.append('dtype')
    if not wrong and meta.get('bytes_per_token') is not None and not meta['bytes_per_token'] > 0:
        wrong.append('bytes_per_token')
    if not wrong and meta.get('tokenizer') and type(meta['tokenizer'].get('kind')) is not str:
        wrong.append('tokenizer')
    if wrong:
        raise ValueError(', '.join(f'{name} is {meta.get(name)!r:.60}' for name in wrong))
    return meta


def read_pickled_meta(path):
    """nanoGPT's meta.pkl in the terms of meta.json."""
    with open(path, 'rb') as f:
        meta = PlainUnpickler(f).load()
    chars = [meta['itos'].get(i, '') for i in range(meta['vocab_size'])] if 'itos' in meta else None
    if chars and not all(isinstance(char, str) for char in chars):
        raise ValueError('itos is not a table of texts')
    return {'vocab_size': int(meta['vocab_size']),
            'tokenizer': chars and {'kind': 'char', 'chars': chars, 'eot': None}}


def read_meta(folder):
    """A dict with at least vocab_size, dtype, eot, bytes_per_token (None: unknown) and tokenizer.

    tokenizer is its state without what stands in a file of its own (None: GPT-2's). From meta.json, nanoGPT's
    meta.pkl, or by assumption, which is printed once. ValueError: it is damaged.
    """
    usual = {'dtype': 'uint16', 'eot': None, 'bytes_per_token': None, 'tokenizer': None}
    for name, read in {'meta.json': read_json_meta, 'meta.pkl': read_pickled_meta}.items():
        path = os.path.join(folder, name)
        if os.path.exists(path):
            try:
                return {**usual, **read(path)}
            except Exception as e:  # a damaged pickle can raise anything
                raise ValueError(f'{path} cannot be read ({e!r}): prepare the dataset again') from e
    print_once(f'{folder} has no meta.json or meta.pkl: assuming the GPT-2 encoding')
    return {**usual, 'vocab_size': 50304, 'eot': 50256}  # nanoGPT's size, 50257 rounded up


def prepare_command(folder):
    """The command that most likely prepares this folder, judged by its name."""
    name = 'shakespeare_gpt2' if dataset_name(folder) == 'shakespeare' else dataset_name(folder)
    source, _, kind = name.partition('_')
    if source not in SOURCES or not kind:
        return shlex.join(['python', 'prepare.py', 'my.txt', f'--out={name}'])
    flags = [source] * (source != 'pystdlib') + [f'--tokenizer={kind}'] * (kind != 'byte')
    return shlex.join(['python', 'prepare.py', *flags])


HEADER_BYTES, HEADER_MAGIC = 1024, 20240520  # of foreign shards: 256 int32 that begin magic, version, tokens
Shard = collections.namedtuple('Shard', 'path dtype offset n_tokens')


def read_shard(path, dtype):
    """The Shard at path, with or without a header. ValueError: its size is not what it should be."""
    size, head = os.path.getsize(path), np.fromfile(path, '<i4', 3)
    if len(head) == 3 and head[0] == HEADER_MAGIC:
        if head[1] != 1 or size != HEADER_BYTES + 2 * int(head[2]):
            raise ValueError(f'{path}: {size:,} bytes, but its header says version {head[1]}, {head[2]:,} '
                             'tokens of 2 bytes: download it again')
        return Shard(path, np.dtype('<u2'), HEADER_BYTES, int(head[2]))
    if size % dtype.itemsize:
        raise ValueError(f'{path}: {size:,} bytes are no whole number of {dtype.name}: prepare it again')
    return Shard(path, dtype, 0, size // dtype.itemsize)


class Bins:
    """The tokens of one split: folder/<split>.bin, or else its shards *<split>*.bin, sorted.

    Window i is the block_size + 1 tokens from i * block_size of a shard, so x = w[:, :-1] and y = w[:, 1:]
    take every token but a shard's first, and its tail, once as a target. With vocab_size, ids are checked as
    they are read.
    """
    def __init__(self, folder, split, dtype=None, vocab_size=None):
        self.vocab_size, self.name = vocab_size, os.path.join(folder, f'{split}.bin')
        found = sorted(glob.glob(os.path.join(glob.escape(folder), f'*{split}*.bin')))
        masks = [path for path in found if path.endswith('.mask.bin')]
        if masks:
            raise ValueError(f'{masks[0]}: masks are not supported, so its targets would all be learnt: '
                             'remove it if that is what you want')
        if os.path.exists(self.name):
            found = [self.name]
        if not found:
            command = prepare_command(folder)
            raise FileNotFoundError(f'{folder} is not prepared: no {split}.bin; run `{command}`')
        if found != [self.name]:
            self.name = os.path.join(folder, f'*{split}*.bin')
        dtype = np.dtype(dtype or read_meta(folder)['dtype']).newbyteorder('<')
        self.shards = [read_shard(path, dtype) for path in found]
        self.n_tokens = sum(shard.n_tokens for shard in self.shards)

    def ends(self, block_size):
        """How many windows there are up to the end of each shard."""
        return np.cumsum([max(shard.n_tokens - 1, 0) // block_size for shard in self.shards])

    def n_windows(self, block_size):
        """How many windows there are. ValueError: none."""
        n = int(self.ends(block_size)[-1])
        if not n:
            raise ValueError(f'{self.name} has {self.n_tokens:,} tokens, a window needs block_size+1 = '
                             f'{block_size + 1}: lower --block_size or prepare more text')
        return n

    def read(self, indices, block_size):
        """The windows with these indices: int64 (len(indices), block_size + 1)."""
        indices, ends, n = np.asarray(indices), self.ends(block_size), self.n_windows(block_size)
        if indices.size and not 0 <= indices.min() <= indices.max() < n:
            raise IndexError(f'windows {indices.min()}-{indices.max()} of {self.name}, which has {n}')
        shards = np.searchsorted(ends, indices, side='right')
        firsts = (indices - np.append(0, ends)[shards]) * block_size
        windows = np.empty((len(indices), block_size + 1), np.int64)
        for n in np.unique(shards):  # plain reads: a memory map of a large file would fill up the RSS
            path, dtype, offset, _ = self.shards[n]
            window = np.empty(block_size + 1, dtype)
            with open(path, 'rb', buffering=0) as f:
                for row in np.flatnonzero(shards == n):
                    f.seek(offset + int(firsts[row]) * dtype.itemsize)
                    if f.readinto(window) != window.nbytes:
                        raise ValueError(f'{path} became shorter while it was read: prepare it again')
                    windows[row] = window
        if self.vocab_size is not None and windows.max(initial=0) >= self.vocab_size:
            row, at = np.argwhere(windows >= self.vocab_size)[0]
            raise ValueError(f'{self.shards[shards[row]].path}: token {windows[row, at]} at position '
                             f'{firsts[row] + at} is outside the vocabulary of {self.vocab_size}: '
                             'prepare it again, or raise --vocab_size')
        return windows


if __name__ == '__main__':
    found = find_source(words[0] if words else source, field)
    folder = output_folder(out, found.name, tokenizer)

    scanned = scan(found)
    plan = plan_splits(found, scanned, val_fraction)
    n, n_empty = scanned.n_documents, scanned.sizes.count(0)
    print(f'{found.label}: {n:,} document{"s" * (n > 1)}, {scanned.n_bytes / 1e6:,.2f} MB, '
          f'{len(scanned.characters):,} different characters'
          + (f', {n_empty:,} left out (empty)' if n_empty else ''))

    tok = make_tokenizer(tokenizer, scanned.characters, by_document=found.separate and n > 1)
    procs = usable_procs(procs, tok, scanned.n_bytes)
    meta = write_dataset(folder, planned_texts(found, plan), tok, found.label, procs, scanned.n_bytes)

    print(f'{folder}: {meta["train_tokens"]:,} train and {meta["val_tokens"]:,} val tokens, '
          f'{meta["bytes_per_token"]:.2f} bytes a token, vocabulary {meta["vocab_size"]:,}')
    name = dataset_name(folder)
    print('next:', shlex.join(['python', 'train.py', *[f'--dataset={name}'] * (name != 'pystdlib_byte')]))
