"""From text to tokens: writes data/<name>/train.bin, val.bin and meta.json, which train.py reads.

    $ python prepare.py                                  # Python's own library: data/pystdlib_bpe4096
    $ python prepare.py shakespeare --tokenizer=char     # data/shakespeare_char
    $ python prepare.py shakespeare --tokenizer=gpt2     # data/shakespeare
    $ python prepare.py shakespeare --tokenizer=bpe:4096 # a vocabulary of 4,096, learnt from the text
    $ python prepare.py my.txt --tokenizer=gpt2 --out=mydata
    $ python prepare.py 'notes/**/*.md'                  # a quoted glob, or a folder: each file is a document
    $ python prepare.py tales.jsonl.gz --field=story     # JSON lines: each record is a document
    $ zcat *.gz | python prepare.py -                    # standard input
    $ python prepare.py fineweb_edu --shards=10          # tokens that others prepared: data/fineweb_edu_gpt2
    $ python prepare.py chats.jsonl                      # records with messages: data/chats, with masks
    $ python prepare.py look data/chats                  # what is in a prepared folder

A .bin file is nothing but tokens, little-endian, uint16 if the vocabulary fits and else uint32.
"""
import array
import ast
import atexit
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
import gzip
import hashlib
import heapq
import importlib
import inspect
import itertools
import json
import os
import pickle
import platform
import random
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import urllib.parse
import zlib
from collections.abc import Callable

from configurator import configure, print0

# pystdlib, shakespeare, tinystories, fineweb, fineweb_edu, minimind, minimind_sft, pydoc_chat, or your own:
# a file (text, .jsonl, .gz of these), a folder or a glob of them, or - for standard input
source = 'pystdlib'
field = 'text'             # JSON lines: the field of a record that has its text, or else its messages
errors = 'strict'          # text that is not UTF-8: strict refuses it, replace puts U+FFFD in place of bytes
# byte, char, bpe:4096 (trained here), tiktoken's (gpt2, o200k_base...), a folder with tokenizer.json, or
# another dataset's folder; None: byte, for pystdlib bpe:4096, for conversations that of pystdlib's folder
tokenizer: str | None = None
special_tokens = 'refuse'  # their texts in a document: refuse, or learn them as plain text or as the tokens
pattern: str | None = None  # of bpe:4096: the regular expression that cuts text to words; None: GPT-4's
out: str | None = None     # the dataset's name, or a path with a slash; None: <source>_<tokenizer>
overwrite = False          # whether data of another source may be replaced in out
val_fraction = 0.1         # the share of the text that is kept for validation
block_size = 256           # conversations: the windows they are packed into, those of the training to come
shards = 10                # fineweb, fineweb_edu: how many files of 100M tokens are downloaded to train on
procs: int | None = None   # processes that encode; None: one for each core
_, _, words = configure(globals(), words=2)

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


@contextlib.contextmanager
def named_when_full(path, advice):
    """OSError: the disk is full. It names path, and what can be done."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(f'{path} cannot be written ({e.strerror}): free some space{advice}') from None


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


def fetch(url, path, size=None, sha256=None, instead='', check=mismatch):
    """Download url to path, unless a file with the right size and sha256 (where given) is there; return path.

    check(path, size, sha256) says what is wrong with a file, None if nothing. What has arrived waits in
    path + '.part', from where an interrupted download is resumed, in this run or the next. OSError: the
    server cannot be reached or refuses; `instead` ends its message, it says what else can be done.
    ValueError: it sends something else than expected.
    """
    if os.path.exists(path) and not check(path, size, sha256):
        return path
    import requests
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    part, host = path + '.part', urllib.parse.urlsplit(url).netloc
    for wait in (*RETRY_WAITS, None):
        try:
            with named_when_full(part, ', then run this again to resume'):
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
    if problem := check(part, size, sha256):
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
            error = FileNotFoundError if r.status_code == 404 else OSError
            raise error(f'cannot download {url}: {r.status_code} {r.reason}: check the address')
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

KEPT = {}  # the name of standard input in messages: the file that it is kept in


@contextlib.contextmanager
def open_bytes(path):
    """A file's bytes, of a .gz what is compressed in it. ValueError: that is damaged."""
    with (gzip.open if path.lower().endswith('.gz') else open)(KEPT.get(path, path), 'rb') as f:
        try:
            yield f
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise ValueError(f'{path} is damaged, or no gzip file ({e}): download or compress it '
                             'again') from None


def ending(path):
    """'.jsonl' of a.jsonl and of a.jsonl.gz."""
    path = path.lower().removesuffix('.gz')
    return os.path.splitext(path)[1]


NOT_UTF8 = 'convert it, leave it out, or have U+FFFD there by --errors=replace'


def read_text(path, errors='strict'):
    """The file's text, a block at a time. Where it is not UTF-8, ValueError says at which byte."""
    decoder, n_read, data = codecs.getincrementaldecoder('utf-8')(errors), 0, b' '
    with open_bytes(path) as f:
        while data:
            data = f.read(1 << 20)
            n_read += len(data)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as e:
                raise ValueError(f'{path} is not UTF-8 text: byte {e.object[e.start]:#04x} at offset '
                                 f'{n_read - len(e.object) + e.start}: {NOT_UTF8}') from None
            if text:
                yield text


def split_at_marks(blocks, path):
    """The documents of a text: its parts between <|endoftext|> marks, without the white space around these
    and without empty parts; a text without marks as it is, even an empty one."""
    def parts():  # (number, a block of the document with this number)
        n, fresh, text = 0, False, ''  # fresh: nothing but white space since a mark
        for block in blocks:
            *ended, text = (text + block).split(EOT)
            for part in ended:
                part = part.lstrip() if fresh else part
                if part.strip():
                    yield n, part.rstrip()
                n, fresh = n + 1, True
            text = text.lstrip() if fresh else text
            ready = text[:-len(EOT)].rstrip()  # the rest may belong to a mark to come
            if ready:
                yield n, ready
                text, fresh = text[len(ready):], False
        if not n or text.strip():
            yield n, text.rstrip() if n else text
        if n:
            print_once(f'{path}: split at {n:,} {EOT} mark{"s" * (n > 1)}')
    for _, part in itertools.groupby(parts(), key=lambda part: part[0]):
        yield (text for _, text in part)


def text_documents(path, field, errors):
    """A text file is one document, or those between its <|endoftext|> marks."""
    yield from split_at_marks(read_text(path, errors), path)


def json_records(path, errors):
    """(place, record) of JSON lines; place names file and line. ValueError: one is no JSON object."""
    with open_bytes(path) as f:
        for n, line in enumerate(f, 1):
            if not line.strip():
                continue
            place = f'{path}, line {n}'
            try:
                record = json.loads(line.decode('utf-8-sig', errors))
            except UnicodeDecodeError as e:
                raise ValueError(f'{place}: not UTF-8 text: byte {e.object[e.start]:#04x} at its offset '
                                 f'{e.start}: {NOT_UTF8}') from None
            except (ValueError, RecursionError) as e:
                raise ValueError(f'{place}: not JSON ({e}): mend or remove the line') from None
            if not isinstance(record, dict):
                raise ValueError(f'{place}: a {type(record).__name__} where an object with fields is needed, '
                                 'like {"text": "..."}')
            yield place, record


def json_documents(path, field, errors):
    """JSON lines: a document for each record, the text in this field. ValueError names file and line."""
    for place, record in json_records(path, errors):
        if not isinstance(record.get(field), str):
            raise ValueError(f'{place}: no text in field {field!r}, its fields are '
                             f'{", ".join(record):.200}: choose one by --field')
        yield [whole_characters(record[field], place)]


def whole_characters(text, place):
    """The text. ValueError: it has halves of characters, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f'{place}: half a character, {e.object[e.start]!r}: remove it') from None
    return text


FORMATS = {'.jsonl': json_documents}  # by the end of a file's name; all others are text


def file_documents(paths, field='text', errors='strict'):
    for path in paths:
        yield from FORMATS.get(ending(path), text_documents)(path, field, errors)


# conversations ----------------------------------------------------------------------------------------------

# place: what an error names; messages: [{'role': 'user', 'content': text}, ...]; tools: their JSON schemas
Conversation = collections.namedtuple('Conversation', 'place messages tools', defaults=[None])
MESSAGES = ('messages', 'conversations')  # the fields that may have a list of messages
PAIRS = {'prompt': ('response', 'completion', 'answer'), 'instruction': ('output', 'response'),
         'question': ('answer', 'response')}  # {field of a question: fields that may have its answer}
SPEAKERS = {'human': 'user', 'gpt': 'assistant'}  # in ShareGPT's messages, {'from': ..., 'value': ...}
ROLES = {'system': 's', 'user': 'u', 'assistant': 'a', 'tool': 't'}
ORDER = re.compile('s?(ua(t+a)*)+u?')  # of roles


def find_messages(record, field):
    """The messages of a record, or None: `field` comes first, then MESSAGES and PAIRS."""
    for name in (field, *MESSAGES):
        if isinstance(record.get(name), list):
            return [with_role(message) for message in record[name]]
    for ask, answers in PAIRS.items():
        for answer in answers:
            if isinstance(record.get(ask), str) and isinstance(record.get(answer), str):
                more = record.get('input')
                question = record[ask] + (f'\n\n{more}' if isinstance(more, str) and more else '')
                return make_messages((question, record[answer]))
    return None


def with_role(message):
    """One of ShareGPT's messages with role and content, any other as it is."""
    if isinstance(message, dict) and isinstance(message.get('from'), str) and 'role' not in message:
        return {'role': SPEAKERS.get(message['from'], message['from']), 'content': message.get('value')}
    return message


def make_messages(*turns):
    """(question, answer), ... as messages."""
    return [{'role': role, 'content': content} for turn in turns
            for role, content in zip(('user', 'assistant'), turn)]


def check_messages(messages, place):
    """ValueError: they are no conversation that can be learnt from."""
    for n, message in enumerate(messages, 1):
        where = f'{place}, message {n}'
        if not isinstance(message, dict) or message.get('role') not in list(ROLES):
            raise ValueError(f'{where}: {message!r:.60} needs a role, one of {", ".join(ROLES)}, and content')
        content = message.get('content') or ''
        if not isinstance(content, str):
            raise ValueError(f'{where}: its content is no text: {content!r:.60}')
        if not (content.strip() or message.get('tool_calls')):
            raise ValueError(f'{where}: its content is empty: leave the conversation out')
        whole_characters(content, where)
    roles = [message['role'] for message in messages]
    if 'assistant' not in roles:
        raise ValueError(f'{place}: no message of the assistant, so there is nothing to learn')
    if not ORDER.fullmatch(''.join(ROLES[role] for role in roles)):
        raise ValueError(f'{place}: its roles are {", ".join(roles):.100}: user and assistant must take '
                         'turns, after a system message at most')


def from_json(value):
    """A text of JSON, as MiniMind writes tools and tool_calls -> its value; any other value as it is."""
    with contextlib.suppress(TypeError, ValueError):
        return json.loads(value)
    return value


def conversations(paths, field='text', errors='strict'):
    """The Conversations of files of JSON lines. ValueError names file and line."""
    for path in paths:
        if FORMATS.get(ending(path)) is not json_documents:
            raise ValueError(f'{path} is no .jsonl like the conversations it stands among: leave it out')
        for place, record in json_records(path, errors):
            messages = find_messages(record, field)
            if not messages:
                raise ValueError(f'{place}: no conversation, its fields are {", ".join(record):.200}; it '
                                 f'needs {" or ".join(MESSAGES)}, or a pair like prompt and response')
            check_messages(messages, place)
            for message in messages:
                if 'tool_calls' in message:
                    message['tool_calls'] = from_json(message['tool_calls'])
            tools = from_json(record.get('tools') or messages[0].get('tools')) or None
            if tools and not isinstance(tools, list):
                raise ValueError(f'{place}: tools must be a list of JSON schemas, not {tools!r:.60}')
            yield Conversation(place, messages, tools)


def holds_conversations(paths, field, errors):
    """Whether the first record of JSON lines has messages rather than text in this field."""
    for path in paths:
        if FORMATS.get(ending(path)) is json_documents:
            for _, record in json_records(path, errors):
                return not isinstance(record.get(field), str) and find_messages(record, field) is not None
    return False


# sources ----------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Source:
    """Where text comes from.

    documents() -> an iterator over documents, each an iterable of blocks of text. It is called twice, to
    count and to encode, and gives the same both times: def documents(): yield ['a text']; yield ['another'].
    Documents stay whole and end with an end-of-text token; a single one is cut in two, for train and val.
    chats: True, documents are Conversations.
    shards: instead of documents, the addresses of files of tokens, the first of which is for validation.
    tokenizer: the one that is used where the settings name none.
    """
    name: str  # of the dataset
    label: str  # what meta.json says about where it is from
    documents: Callable | None = None
    chats: bool = False
    shards: list | None = None
    tokenizer: str = 'byte'


FIRST_RUN = os.path.join('data', 'pystdlib_bpe4096')  # what `python prepare.py` makes
HUB = 'https://huggingface.co/datasets'


def download(name, url, size=None, sha256=None, chats=False, older=None):
    """The Source of one file, text or JSON lines, that is downloaded to data/<name>. older: the address of
    another, where there is none at url."""
    def get(url):
        return fetch(url, os.path.join('data', name, url.rpartition('/')[2]), size, sha256,
                     instead=', or use a text file that you have: python prepare.py my.txt')

    def documents():
        try:
            path = get(url)
        except FileNotFoundError:
            if older is None:
                raise
            print(f'there is nothing at {url} any more: taking {older}')
            path = get(older)
        return (conversations if chats else file_documents)([path])
    return chat_source(name, name, documents) if chats else Source(name, name, documents)


def chat_source(name, label, documents):
    return Source(name, label, documents, chats=True, tokenizer=FIRST_RUN)


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
                  functools.partial(file_documents, files), tokenizer='bpe:4096')


def fineweb(name, prefix, count):
    """FineWeb in GPT-2's tokens, by Keller Jordan: the addresses of 100M tokens each, and as many for val."""
    names = [f'{prefix}_val_000000.bin', *[f'{prefix}_train_{i:06d}.bin' for i in range(1, count + 1)]]
    urls = [f'{HUB}/kjj0/{prefix}10B-gpt2/resolve/main/{file}' for file in names]
    return Source(name, name, shards=urls, tokenizer='gpt2')


SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHAKESPEARE_SUM = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
TINYSTORIES = f'{HUB}/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt'
MINIMIND = f'{HUB}/jingyaogong/minimind_dataset/resolve/main'
# A name, and a function without arguments that gives its Source; only documents() downloads.
SOURCES = {
    'pystdlib': pystdlib,
    'shakespeare': lambda: download('shakespeare', SHAKESPEARE, 1115394, SHAKESPEARE_SUM),
    'tinystories': lambda: download('tinystories', TINYSTORIES),
    'fineweb': lambda: fineweb('fineweb', 'fineweb', 103),
    'fineweb_edu': lambda: fineweb('fineweb_edu', 'finewebedu', 99),
    'minimind': lambda: download('minimind', f'{MINIMIND}/pretrain_t2t_mini.jsonl',
                                 older=f'{MINIMIND}/pretrain_hq.jsonl'),
    'minimind_sft': lambda: download('minimind_sft', f'{MINIMIND}/sft_t2t_mini.jsonl', chats=True,
                                     older=f'{MINIMIND}/sft_mini_512.jsonl'),
    'pydoc_chat': lambda: chat_source('pydoc_chat', f'pydoc_chat {platform.python_version()}', pydoc_chats),
}


def sort_files(files):
    return sorted(files, key=lambda path: path.split(os.sep))  # the same order on every system


def is_utf8(path):
    try:
        collections.deque(read_text(path), maxlen=0)
        return True
    except ValueError:
        return False


def find_source(source, field='text', errors='strict'):
    """The Source of this name, or of this file, folder (without hidden files) or glob, or standard input."""
    if errors not in ('strict', 'replace'):
        raise ValueError(f'errors={errors!r}: must be strict or replace')
    if source in SOURCES:
        return SOURCES[source]()
    if source == '-':
        return file_source([keep_standard_input()], 'stdin', 'standard input', field, errors)
    if os.path.isfile(source):
        name = os.path.basename(source)
        name = name[:-3] if name.lower().endswith('.gz') else name
        return file_source([source], plain_name(os.path.splitext(name)[0]), source, field, errors)
    pattern, where = source, re.split(r'[^/\\]*[*?[]', source)[0]  # where: the folder before a wildcard
    if os.path.isdir(source):
        pattern, where = os.path.join(glob.escape(source), '**', '*'), source
    files = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not files:
        raise FileNotFoundError(f'{source}: no such file, folder or glob with files, and none of '
                                f'{", ".join(SOURCES)}: check the path')
    name = os.path.basename(os.path.abspath(where))
    return file_source(sort_files(files), plain_name(name), source, field, errors)


def file_source(paths, name, label, field, errors):
    """The Source of these files: conversations, if their first record has some, else text."""
    if holds_conversations(paths, field, errors):
        return chat_source(name, label, functools.partial(conversations, paths, field, errors))
    return Source(name, label, functools.partial(file_documents, paths, field, errors))


def keep_standard_input():
    """Keep standard input in a file, for it is read twice -> its name in KEPT, which ends in .jsonl if it
    begins with a JSON object, else it is text."""
    if sys.stdin is None:
        raise ValueError('standard input is closed: pipe a text into it, or name a file')
    folder = tempfile.mkdtemp(prefix='flatgpt-')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    first = sys.stdin.buffer.readline()
    try:
        is_json = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        is_json = False
    path = os.path.join(folder, 'stdin.jsonl' if is_json else 'stdin.txt')
    with named_when_full(path, ', or set TMPDIR to a folder elsewhere'), open(path, 'wb') as f:
        f.write(first)
        shutil.copyfileobj(sys.stdin.buffer, f)
    name = 'standard input' + '.jsonl' * is_json
    KEPT[name] = path
    return name


def plain_name(text):
    return re.sub(r'[^\w.-]+', '_', text).strip('._') or 'text'


def output_folder(out, found, tokenizer):
    """data/<out>, or out itself if it has a slash; without out, data/<source>_<tokenizer>, for conversations
    data/<source>."""
    kind = dataset_name(tokenizer) if is_prepared(tokenizer) else tokenizer.removesuffix('tokenizer.json')
    usual = f'{found.name}_{plain_name(kind.replace("bpe:", "bpe"))}'
    if found.chats or usual == 'shakespeare_gpt2':  # the latter is data/shakespeare in nanoGPT
        usual = found.name
    return out if out and re.search(r'[/\\]', out) else os.path.join('data', out or usual)


def dataset_name(folder):
    """What train.py's --dataset calls this folder: its path below data/, else the whole path."""
    path, data = os.path.abspath(folder), os.path.abspath('data') + os.sep
    return (path[len(data):] if path.startswith(data) else path).replace(os.sep, '/')


# conversations about Python's library -----------------------------------------------------------------------

# Modules in C, whose docstrings no source has: those that are the same on every system.
IN_C = ('builtins', 'cmath', 'itertools', 'math')
# What some distributions leave out, is for one system alone, or of no interest.
NOT_ASKED = {'antigravity', 'distutils', 'encodings', 'ensurepip', 'idlelib', 'lib2to3', 'msilib', 'ntpath',
             'nturl2path', 'site', 'test', 'this', 'tkinter', 'turtle', 'turtledemo', 'venv'}
PUBLIC_NAMES = {'posixpath': 'os.path'}
ANSWER = 120  # characters of the longest answer: a small model is to learn them
Thing = collections.namedtuple('Thing', 'module name kind summary arguments')  # kind: function, class, module


# How things are asked about, by kind
WORDINGS = {
    'function': ('What does {} do?', 'Explain {}.', 'What is {} for?'),
    'class': ('What is {}?', 'Explain {}.', 'What is {} for?'),
    'module': ('What is the module {} for?', 'Explain the module {}.', 'What is {}?'),
}


def pydoc_chats():
    """Conversations about the functions and classes of Python's own library: what they do, what they take.

    Each thing is asked about in two wordings, so most questions that are kept for validation have an answer
    in what is trained on. One to three things are asked about in a conversation, in a random order that is
    always the same: an answer is to be about the last question, not about those before.
    """
    things, asked = library_things(), []
    said = collections.Counter((thing.module, thing.kind, thing.summary) for thing in things)
    for n, thing in enumerate(things):
        name = thing.name if thing.module in ('', 'builtins') else f'{thing.module}.{thing.name}'
        takes = f'{name}({thing.arguments})'
        more = [('What arguments does it take?', takes)] if thing.arguments else []
        first, *others = [wording.format(name) for wording in WORDINGS[thing.kind]]
        asked.append([(first, thing.summary), *(more if n % 3 == 0 else [])])
        asked.append([(others[n % 2], thing.summary)])
        if thing.arguments:
            asked.append([(f'What arguments does {name} take?', takes)])
        if thing.kind == 'function' and said[thing.module, thing.kind, thing.summary] == 1:
            ask = f'Which function of {thing.module} does this: {thing.summary}'
            asked.append([(ask, name), *(more if n % 3 == 1 else [])])
    order = random.Random(0)
    order.shuffle(asked)
    asked = iter(asked)
    while turns := [turn for turns in itertools.islice(asked, order.randint(1, 3)) for turn in turns]:
        yield Conversation('pydoc_chat', make_messages(*turns))


@functools.cache
def library_things():
    """The public Things of Python's library that have a summary, in a fixed order. No source is run."""
    root = sysconfig.get_paths()['stdlib']
    paths = [os.path.relpath(path, root) for path in glob.glob(os.path.join(glob.escape(root), '**', '*.py'),
                                                               recursive=True)]
    modules = {}
    for path in paths:
        parts = path[:-3].split(os.sep)
        parts = parts[:-1] if parts[-1] == '__init__' else parts
        if parts and not any(part.startswith('_') or part in NOT_ASKED or '-' in part for part in parts):
            modules['.'.join(parts)] = os.path.join(root, path)
    things = []
    for module in sorted({*modules, *IN_C}):
        things += things_in_c(module) if module in IN_C else things_of_source(module, modules[module])
    return [thing for thing in things if thing.summary]


def things_of_source(module, path):
    with open(path, 'rb') as f:
        body = ast.parse(f.read())
    module = PUBLIC_NAMES.get(module, module)
    yield Thing('', module, 'module', summary_of(ast.get_docstring(body)), None)
    for node in body.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith('_'):
            arguments = ast.unparse(node.args)
            yield Thing(module, node.name, 'function', summary_of(ast.get_docstring(node)),
                        arguments if len(arguments) < ANSWER // 2 else None)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
            yield Thing(module, node.name, 'class', summary_of(ast.get_docstring(node)), None)


def things_in_c(module):
    """Functions and classes of a module in C and, of builtins, the methods of its types."""
    found = importlib.import_module(module)
    for name, thing in sorted(vars(found).items()):
        if name.startswith('_') or name == 'WindowsError' or type(thing).__module__ != 'builtins':
            continue
        if inspect.isclass(thing):
            yield Thing(module, name, 'class', summary_of(thing.__doc__), None)
            if module == 'builtins' and not issubclass(thing, BaseException):
                for method, function in sorted(vars(thing).items()):
                    if not method.startswith('_') and callable(function):
                        yield Thing(name, method, 'function', summary_of(function.__doc__), None)
        elif callable(thing):
            yield Thing(module, name, 'function', summary_of(thing.__doc__), signature_of(thing))


def signature_of(function):
    try:
        return str(inspect.signature(function))[1:-1]
    except (ValueError, TypeError):  # some in C have none
        return None


def summary_of(doc):
    """The first sentence of a docstring in one line; None unless it is short and has words."""
    for paragraph in re.split(r'\n\s*\n', inspect.cleandoc(doc or '')):
        if re.match(r'[\w.]+\(', paragraph):
            continue  # a signature
        text = ' '.join(paragraph.split())
        text = re.split(r'(?<=[.!?])\s+(?=[A-Z])', text)[0].rstrip(':.') + '.'
        return text if text[0].isalpha() and ' ' in text and len(text) <= ANSWER else None
    return None


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


def contents(conversation):
    """The texts of its messages."""
    return [message.get('content') or '' for message in conversation.messages]


def scan(source):
    """Read the source once -> Scan. ValueError: what cannot be read."""
    sizes, n_characters, used = array.array('q'), 0, np.zeros(sys.maxunicode + 1, bool)
    progress = Progress('reading')
    for document in source.documents():
        sizes.append(0)
        for block in contents(document) if source.chats else document:
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

    A single document is cut after int(n * (1 - fraction)) characters, as in nanoGPT.
    """
    if not 0 < fraction < 1:
        raise ValueError(f'val_fraction={fraction}: must lie between 0 and 1, like 0.1')
    if not scanned.n_documents:
        raise ValueError(f'{source.label} is empty: there is no text to prepare')
    if scanned.n_documents > 1:
        return split_documents(scanned.sizes, fraction)
    if source.chats:
        raise ValueError(f'{source.label} has one conversation: train and val need one each')
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
    """(split, blocks of a text, whether it is a document, which ends with an end-of-text token), in order; of
    conversations (split, Conversation, True)."""
    for document, what in zip(source.documents(), plan):
        if isinstance(what, int):
            for split, parts in itertools.groupby(cut_in_two(document, what), key=lambda part: part[0]):
                yield split, (block for _, block in parts), False
        elif what:
            yield what, document, True


def planned_contents(source, plan):
    """planned_texts of conversations as texts, for a tokenizer to be trained on."""
    for split, conversation, _ in planned_texts(source, plan):
        yield split, contents(conversation), True


def refusing(source, special):
    """A source with the same documents, which raise ValueError at the text of a special token; special has
    these texts as keys."""
    if not special:
        return source
    pattern, longest = re.compile('|'.join(map(re.escape, special))), max(map(len, special))

    def checked(blocks, place):
        text = ''
        for block in blocks:
            text = text[-longest:] + block  # it may have begun in the block before
            if found := pattern.search(text):
                around = text[max(0, found.start() - 20):found.end() + 20]
                raise ValueError(f'{place}: {found[0]!r} in {around!r} is a special token of the tokenizer: '
                                 'remove it, or learn it by --special_tokens=tokens as that'
                                 + ', by --special_tokens=text as plain text' * (not source.chats))
            yield block

    def documents():
        for n, document in enumerate(source.documents(), 1):
            if source.chats:
                collections.deque(checked(['\n'.join(contents(document))], document.place), maxlen=0)
            yield document if source.chats else checked(document, f'{source.label}, document {n:,}')
    return dataclasses.replace(source, documents=documents)


# text, cut to pieces ----------------------------------------------------------------------------------------

# A letter or digit, then a space, a line end or a CJK stop: no alternative of tiktoken's patterns matches
# across this, and none that looks ahead can stand before it, so both sides alone give the same tokens.
CUT = re.compile(r'[^\W_](?=[ \n\u3001\u3002\uff0c])')  # [^\W_] is exactly \p{L} and \p{N}
AROUND = 256  # characters on each side of a cut that a tokenizer may look at


def last_cut(text, end, tok):
    """The last place before `end` where text can be cut for this tokenizer; 0 if none is found."""
    if tok.anywhere:
        return next((n for n in range(end, 0, -1) if not tok.splits_special(text, n)), 0)
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
    """Pieces gathered until a split has CHUNK characters: (split, [(piece, whether a text begins with it,
    whether a document ends with it)]).

    Each is one process's work. texts: as planned_texts gives them.
    """
    return gather((split, (piece, n == 0, last and is_document), len(piece)) for split, blocks, is_document
                  in texts for n, (piece, last) in enumerate(pieces(blocks, tok)))


def chat_groups(texts):
    """(split, [Conversation]) in groups of about CHUNK characters. texts: as planned_texts gives them."""
    return gather((split, conversation, sum(map(len, contents(conversation))))
                  for split, conversation, _ in texts)


def gather(items):
    """(split, item, its characters), ... -> (split, [item, ...]), whenever a split has CHUNK characters."""
    waiting, sizes = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    for split, item, size in items:
        waiting[split].append(item)
        sizes[split] += size
        if sizes[split] >= CHUNK:
            yield split, waiting[split]
            waiting[split], sizes[split] = [], 0
    yield from ((split, group) for split, group in waiting.items() if group)


# many processes ---------------------------------------------------------------------------------------------

def usable_procs(procs, tok, n_bytes):
    """How many processes are worth starting for this much text."""
    if procs is not None and procs < 1:
        raise ValueError(f'procs={procs}: must be 1 or more')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return 1 if tok.anywhere or n_bytes < POOL_BYTES else min(procs or cores, 61)  # Windows allows no more


def in_processes(procs, work, jobs, start=None, *args):
    """work(job) of every job, in order; no more than two jobs a process are in memory.

    start(*args) is called once in each process. OSError: one of them died.
    """
    pool = concurrent.futures.ProcessPoolExecutor(procs, initializer=start_worker, initargs=(start, *args))
    waiting = collections.deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) >= 2 * procs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except concurrent.futures.process.BrokenProcessPool as e:
        raise OSError(f'one of {procs} processes died, probably for lack of memory: try --procs=1') from e
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(start, *args):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if start:
        start(*args)


# tokenizers -------------------------------------------------------------------------------------------------

# What chat templates call the switch for thinking: those of Qwen3 and most, of MiniMind, of DeepSeek V3.1
THINKING = ('enable_thinking', 'open_thinking', 'thinking')


class Tokenizer:
    """name; n_vocab; eot, the id of the end-of-text token or None; special, {text: id}; bos, the ids that
    documents and prompts begin with.

    A kind adds encode_array (text -> ids, special tokens being text like any other), state (plain Python that
    rebuilds it) and to_json (a tokenizer.json, as text).
    """
    anywhere = False  # True: a token depends on one character alone, so text can be cut anywhere
    bos = ()
    chat_template = None  # see render_chat
    chat_variables = {}  # what a chat template may ask for, like bos_token: {name: text}

    def __init__(self, name, tokens, special, n_vocab):
        self.name, self.special, self.n_vocab, self.eot = name, special, n_vocab, special.get(EOT)
        self.tokens = {**tokens, **{i: text.encode() for text, i in special.items()}}  # {id: bytes}

    def may_cut(self, text, n):
        """Whether text[:n] and text[n:] alone give the ids of the whole, at a place that CUT matches.

        Tried on the text around: with some, tokens reach across spaces, or each text gets a prefix. Where no
        cut holds (Llama 2 puts a space in front of every text), documents are encoded in one piece.
        """
        left, right = text[max(0, n - AROUND):n], text[n:n + AROUND]
        parts = [self.encode_array(left), self.encode_array(right)]
        return (not self.splits_special(text, n)
                and np.array_equal(np.concatenate(parts), self.encode_array(left + right)))

    def splits_special(self, text, n):
        """Whether text[:n] and text[n:] have a part each of a special token's text."""
        return any(mark in text[max(0, n - len(mark) + 1):n + len(mark) - 1] for mark in self.special)

    def encode(self, text, allow_special=True):
        """text -> list of ids. With allow_special, special tokens' texts become their ids."""
        text = without_surrogates(text)
        parts = re.split(f'({self.special_pattern})', text) if allow_special and self.special else [text]
        return [i for n, part in enumerate(parts)  # every second part is a special token
                for i in ([self.special[part]] if n % 2 else self.encode_array(part).tolist())]

    def decode_bytes(self, ids):
        """Special tokens give their text; ids that are no token, in a padded vocabulary, give nothing."""
        return b''.join(self.tokens.get(int(i), b'') for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    @functools.cached_property
    def sizes(self):
        """Of each id, how many bytes of text it stands for: none, if it is special or no token."""
        special = set(self.special.values())
        return np.array([0 if i in special else len(self.tokens.get(i, b'')) for i in range(self.n_vocab)])

    @functools.cached_property
    def special_pattern(self):
        """A regular expression that matches the special tokens, the longest first."""
        return '|'.join(map(re.escape, sorted(self.special, key=len, reverse=True)))

    def render(self, messages, add_generation_prompt=True, tools=None, **variables):
        """The text of a conversation by the chat template, as for render_chat. ValueError: there is none."""
        if not self.chat_template:
            raise ValueError(f'tokenizer {self.name!r} has no chat template: give a plain prompt, or use one '
                             'that has, like --tokenizer=bpe:4096 of prepare.py')
        return render_chat(self.chat_template, messages, tools, add_generation_prompt,
                           **{**self.chat_variables, **variables})

    def chat(self, messages, thinking=None, tools=None, add_generation_prompt=True, **variables):
        """[{'role': 'user', 'content': text}, ...] -> ids, to where the answer begins.

        thinking: whether it begins with thoughts, under all names in THINKING; None: the template's default.
        tools: JSON schemas. Without add_generation_prompt, to the end of what is said. ValueError: there is
        no template.
        """
        if thinking is not None:
            variables = {**dict.fromkeys(THINKING, thinking), **variables}
        return self.encode_chat(self.render(messages, add_generation_prompt, tools, **variables))

    def encode_chat(self, text):
        """What render gives -> ids: the special tokens are in it, and nothing is put around it."""
        return self.encode(text)

    @functools.cached_property
    def stop_tokens(self):
        """The ids that end a text or an answer: eot, and what the chat template puts behind an answer."""
        ends, answer = [] if self.eot is None else [self.eot], 'the answer'
        if self.chat_template and self.special:
            messages = [{'role': 'user', 'content': 'a question'}, {'role': 'assistant', 'content': answer}]
            with contextlib.suppress(ValueError, ImportError):  # then there is no chat, which chat() says
                after = self.render(messages, add_generation_prompt=False).rpartition(answer)[2]
                ends += [self.special[mark] for mark in re.findall(self.special_pattern, after)[:1]]
        return tuple(dict.fromkeys(ends))


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
    def __init__(self, name, pattern, special, ranks, chat_template=None):
        import tiktoken
        self.pattern, self.ranks, self.chat_template = pattern, ranks, chat_template
        table = {base64.b64decode(token): int(rank) for token, rank in map(str.split, ranks.splitlines())}
        self.bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=table, special_tokens=special)
        tokens = {i: token for token, i in table.items()}
        super().__init__(name, tokens, special, self.bpe.max_token_value + 1)
        self.chat_variables = {'eos_token': EOT} if EOT in special else {}

    def encode_array(self, text):
        return np.array(self.bpe.encode_ordinary(text), np.uint32)

    def state(self):
        chat = {'chat_template': self.chat_template} if self.chat_template else {}
        return {'kind': 'tiktoken', 'name': self.name, 'pattern': self.pattern, 'special': dict(self.special),
                'ranks': self.ranks, **chat}

    def to_json(self):
        """Its merges are not stored: a token's are the two parts that the ranks below its own leave of it."""
        ranks, chars = self.bpe._mergeable_ranks, byte_chars()

        def text(token):
            return ''.join(chars[b] for b in token)
        pairs = [two_parts(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
        merges = [[text(pair[0]), text(pair[1])] for pair in pairs if pair]
        # tokenizers' regular expressions know possessive ++, *+ and ?+, but read {1,3}+ as any number of them
        pattern = re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', self.pattern)
        return bpe_json({text(token): i for token, i in ranks.items()}, merges, pattern, self.special)


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
        some = self.library.encode('a')  # its post-processor, if any, is what puts a bos in front
        self.bos = some.ids[:[*some.special_tokens_mask, 0].index(0)]
        self.chat_template = self.config.get('chat_template')
        texts = {name: self.special_text(name) for name in SPECIAL_TOKENS}
        self.chat_variables = {name: text for name, text in texts.items() if text}

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

    def encode_chat(self, text):
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


# training a tokenizer ---------------------------------------------------------------------------------------

# How GPT-4 cuts text to words, which no token crosses: cl100k_base's pattern as it was first published, which
# tiktoken, regex and tokenizers read alike
WORD_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
BPE_SPECIAL = (EOT, '<|im_start|>', '<|im_end|>', *(f'<|reserved_{i}|>' for i in range(5)))
SAMPLE_BYTES = 100_000_000  # of more text than this, a sample is learnt from
WORDS_BYTES = 1 << 24       # and of more different words, the commonest: what train_bpe holds in memory
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
          "'<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def bpe_tokenizer(size, texts, n_bytes, procs, pattern, **_):
    """Byte-level BPE with a vocabulary of `size`, learnt from those texts that are for training.

    Ids: the 256 bytes, then the merges in the order learnt, then BPE_SPECIAL. A text with fewer merges in it
    gives a smaller vocabulary. ValueError: size or pattern are of no use.
    """
    least = 256 + len(BPE_SPECIAL)
    if not re.fullmatch('[0-9]{1,7}', size) or not least <= int(size) <= 1 << 20:
        raise ValueError(f"tokenizer='bpe:{size}': a vocabulary has {least} (256 bytes, {len(BPE_SPECIAL)} "
                         f'special tokens) to {1 << 20:,} tokens: choose a size like bpe:4096')
    if texts is None:
        raise ValueError(f"tokenizer='bpe:{size}' needs a text to learn from: prepare one with it, then name "
                         'its folder')
    n_merges = int(size) - least
    words = WordSplitter(pattern or WORD_PATTERN)
    counts, n_read = count_words(words, texts(), n_bytes, usable_procs(procs, words, 4 * n_bytes))
    learnt = train_bpe(counts, n_merges)
    sample = f', a sample of {n_bytes / 1e6:,.0f} MB' if n_bytes > SAMPLE_BYTES else ''
    fewer = f' ({n_merges:,} were wanted, but no other pair occurs twice)' if len(learnt) < n_merges else ''
    print0(f'bpe: learnt {len(learnt):,} merges{fewer} from {n_read / 1e6:,.2f} MB{sample}, with '
           f'{len(counts):,} different words')
    tokens = [bytes([b]) for b in range(256)] + learnt
    ranks = ''.join(f'{base64.b64encode(token).decode()} {i}\n' for i, token in enumerate(tokens))
    special = {text: len(tokens) + i for i, text in enumerate(BPE_SPECIAL)}
    return TiktokenTokenizer(f'bpe:{len(tokens) + len(special)}', words.pattern, special, ranks, CHATML)


class WordSplitter:
    """Cuts text to words by a pattern; `pieces` takes it for a tokenizer whose tokens are words.

    ValueError: it is no regular expression that tiktoken and regex read.
    """
    anywhere = False

    def __init__(self, pattern):
        import regex
        import tiktoken
        self.pattern = pattern
        try:
            compiled = regex.compile(pattern)
            tiktoken.Encoding('words', pat_str=pattern, mergeable_ranks={b'a': 0}, special_tokens={})
        except (regex.error, ValueError) as e:
            raise ValueError(f'pattern={pattern!r}: {" ".join(str(e).split())}') from None
        if compiled.groups:
            raise ValueError(f'pattern={pattern!r} has groups: write (?:...) instead of (...)')
        self.words = compiled.findall

    def may_cut(self, text, n):
        left, right = text[max(0, n - AROUND):n], text[n:n + AROUND]
        return self.words(left) + self.words(right) == self.words(left + right)

    def count(self, group):
        """The words of a group, as `groups` gives it -> Counter. ValueError: some text is in no word."""
        counts = collections.Counter()
        for text, *_ in group:
            words = self.words(text)
            if ''.join(words) != text or '' in words:
                raise ValueError(f'pattern={self.pattern!r} leaves out some text, or matches where there is '
                                 'none: every character must belong to one word')
            counts.update(words)
        return counts


def count_words(splitter, texts, n_bytes, procs=1):
    """(Counter of the words in the texts for training, the bytes counted): of all, or of a sample as an even
    spread of groups. texts: as planned_texts gives them, with n_bytes in all."""
    progress = Progress(f'counting words, {procs} process{"es" * (procs > 1)}', min(n_bytes, SAMPLE_BYTES))
    share, seen = min(SAMPLE_BYTES / max(n_bytes, 1), 1), 0

    def sample():
        nonlocal seen
        for split, group in groups(texts, splitter):
            size = sum(len(text.encode()) for text, *_ in group)
            if split == 'train' and (share == 1 or progress.done <= share * seen):
                progress.add(size)
                yield group
            seen += size
    counts = collections.Counter()
    counted = map(splitter.count, sample()) if procs == 1 else in_processes(procs, splitter.count, sample())
    with contextlib.closing(counted) if procs > 1 else contextlib.nullcontext():
        for one in counted:
            counts.update(one)
    progress.close()
    return counts, progress.done


def train_bpe(counts, n_merges):
    """{word: how often} -> the tokens that byte pair encoding (arXiv:1508.07909) adds to the 256 bytes.

    Up to n_merges times: of all pairs of neighbours within words, the commonest becomes a token, from left to
    right in every word; of equally common ones that with the lowest first id, then with the lowest second,
    where ids are those of the bytes, then of tokens in the order made. Ends early if no pair is there twice.

    Once the younger of its tokens is made everywhere, a pair can only get rarer. So it is counted then, and
    once more whenever that old number brings it to the top of the heap.
    """
    words = TokenizedWords(counts)
    heap = words.index_pairs(words.all_places())
    heapq.heapify(heap)
    while heap and heap[0][0] <= -2 and len(words.tokens) < 256 + n_merges:
        old, pair = heapq.heappop(heap)
        number, places = words.count_again(pair)
        if number != -old:
            heapq.heappush(heap, (-number, pair))
            continue
        for entry in words.merge(pair, places):
            heapq.heappush(heap, entry)
    return words.tokens[256:]


class TokenizedWords:
    """Words as the tokens of now, in one array. A pair of tokens is one number, first << 20 | second.

    ids: where a token begins its id, else, on its other bytes and between words, -1. begins: where a token
    ends, the place where it begins. weight: how often the word there is in the text.
    """
    def __init__(self, counts):
        words, lengths, room = [], [], WORDS_BYTES
        by_count = sorted(counts, key=lambda word: (-counts[word], word))
        for word in by_count:
            words.append(word.encode()[:room])
            room -= len(words[-1]) + 1
            if room <= 0:
                print0(f'bpe: learning from the {len(words):,} commonest of {len(counts):,} different words')
                break
        lengths = np.array([len(word) + 1 for word in words], np.int64)
        self.ids = np.frombuffer(b'\0' + b'\0'.join([*words, b'']), np.uint8).astype(np.int32)
        self.ids[np.append(0, np.cumsum(lengths))] = -1
        self.weight = np.append(0, np.repeat([counts[word] for word in by_count[:len(words)]], lengths))
        self.begins = np.arange(len(self.ids), dtype=np.int32)
        self.tokens, self.sizes = [bytes([b]) for b in range(256)], np.ones(1 << 20, np.int32)
        self.index = []  # of the pairs of bytes, then of those with each new token: see index_pairs

    def all_places(self):
        """Where a pair begins, before the first merge."""
        return np.flatnonzero((self.ids[:-1] >= 0) & (self.ids[1:] >= 0)).astype(np.int32)

    def index_pairs(self, places):
        """Note where the pairs are that begin at these places -> [(-number, pair)], without those there once.

        What is noted, all sorted by pair: the pairs, where the places of each start and end, the places.
        """
        first = self.ids[places]
        pairs = first.astype(np.int64) << 20 | self.ids[places + self.sizes[first]]
        order = np.argsort(pairs, kind='stable')  # the places of one pair remain sorted
        pairs, places = pairs[order], places[order]
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        lengths = np.diff(starts, append=len(pairs))
        numbers = np.add.reduceat(self.weight[places], starts) if len(starts) else starts
        kept = numbers > 1
        places, pairs, lengths = places[np.repeat(kept, lengths)], pairs[starts[kept]], lengths[kept]
        ends = np.cumsum(lengths)
        self.index.append((pairs, ends - lengths, ends, places))
        return list(zip((-numbers[kept]).tolist(), pairs.tolist()))

    def count_again(self, pair):
        """How often a pair is in the text by now, and its places, sorted."""
        first, second = pair >> 20, pair & (1 << 20) - 1
        pairs, starts, ends, places = self.index[max(first, second, 255) - 255]
        i = np.searchsorted(pairs, pair)
        found = places[starts[i]:ends[i]]
        found = found[(self.ids[found] == first) & (self.ids[found + len(self.tokens[first])] == second)]
        ends[i] = starts[i] + len(found)
        places[starts[i]:ends[i]] = found
        return int(self.weight[found].sum()), found

    def merge(self, pair, places):
        """Make a pair one token at the places that count_again gives; return index_pairs of its own pairs."""
        first, second = pair >> 20, pair & (1 << 20) - 1
        width = len(self.tokens[first])
        if first == second:  # of those that overlap, as in aaa, every second one from the left
            n = np.arange(len(places))
            begin_of_run = np.maximum.accumulate(np.where(np.diff(places, prepend=-1) == width, 0, n))
            places = places[(n - begin_of_run) % 2 == 0]
        token, new = self.tokens[first] + self.tokens[second], len(self.tokens)
        self.tokens.append(token)
        self.sizes[new] = len(token)
        before, after = self.begins[places - 1], places + len(token)
        self.ids[places] = new
        self.ids[places + width] = -1
        self.begins[after - 1] = places
        # A neighbour before that was merged itself has -1 there: its pair is the one that begins with it.
        return self.index_pairs(np.concatenate([before[self.ids[before] >= 0], places[self.ids[after] >= 0]]))


# tokenizers by name, and as they are stored -----------------------------------------------------------------

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'tiktoken': TiktokenTokenizer, 'json': JsonTokenizer}
# kind: (the part of its state that has a file of its own beside the .bin, that file's name)
TABLES = {'tiktoken': ('ranks', 'tokenizer.tiktoken'), 'json': ('source', 'tokenizer.json')}


def byte_tokenizer(**_):
    return ByteTokenizer()


def char_tokenizer(characters, by_document, **_):
    return CharTokenizer(characters, len(characters) if by_document else None)


MAKERS = {'byte': byte_tokenizer, 'char': char_tokenizer, 'bpe:N': bpe_tokenizer}  # others: files, tiktoken's


def make_tokenizer(name, characters='', by_document=False, texts=None, n_bytes=0, procs=1, pattern=None):
    """A tokenizer for new data: by MAKERS, or one that there is already.

    Makers are called with all of this by keyword, and take what they use: characters, all that occur;
    by_document, whether an end-of-text token is needed; texts() -> what planned_texts gives, n_bytes in all;
    procs and pattern, as set; size, what stands for N in a name like bpe:N.
    """
    kind, colon, size = name.partition(':')
    maker = MAKERS.get(f'{kind}:N' if colon else name)
    if pattern is not None and maker is not bpe_tokenizer:
        raise ValueError(f'pattern={pattern!r} is for --tokenizer=bpe:4096: {name!r} has its own')
    if maker:
        return maker(size=size, characters=characters, by_document=by_document, texts=texts,
                     n_bytes=n_bytes, procs=procs, pattern=pattern)
    if is_prepared(name):
        return load_tokenizer(name)
    if os.path.isfile(name) or os.path.isfile(os.path.join(name, 'tokenizer.json')):
        return json_tokenizer(name)
    if name.startswith('data' + os.sep):
        raise FileNotFoundError(f'tokenizer={name!r}: that folder is not prepared; `{prepare_command(name)}` '
                                'does it')
    if re.search(r'[/\\]', name):
        command = shlex.join(['python', 'hub.py', name])
        raise FileNotFoundError(f'tokenizer={name!r}: no folder, prepared or with a tokenizer.json; if it '
                                f'is on the hub, `{command}` fetches it and prints the folder to name here')
    return tiktoken_tokenizer(name)


def tiktoken_tokenizer(name):
    """The tiktoken encoding of this name, whose table is downloaded once."""
    import requests
    import tiktoken
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f'tokenizer={name!r} is none of {", ".join([*MAKERS, *known])}, and no folder, '
                         'prepared or with a tokenizer.json')
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


def is_prepared(folder):
    """Whether this is a folder that prepare.py, or nanoGPT, has made."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ('meta.json', 'meta.pkl'))


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
    meta = read_meta(folder)
    state = meta['tokenizer']
    if state is None:
        return make_tokenizer('gpt2')
    if state.get('kind') in TABLES:
        key, name = TABLES[state['kind']]
        text, path = read_utf8(os.path.join(folder, name)), os.path.join(folder, name)
        if meta.get('tokenizer_checksum') not in (None, checksum_of(text)):
            raise ValueError(f'{path} is not what the data was prepared with: restore it, or prepare again')
        state = {**state, key: text}
    try:
        return tokenizer_from_state(state)
    except ValueError as e:
        raise ValueError(f'{folder}: {e}') from e


# writing ----------------------------------------------------------------------------------------------------

def encode_group(tok, group, as_tokens=False):
    """[(text, begins, ends)] -> (ids, no mask, bytes of text, those without special tokens), with the
    tokenizer's bos where a text begins, its end-of-text token where a document ends. as_tokens: the texts of
    special tokens become their ids, else they are text like any other."""
    arrays, dtype = [], dtype_of(tok.n_vocab)
    encode = tok.encode_chat if as_tokens else tok.encode_array
    for text, begins, ends in group:
        if begins:
            arrays.append(np.array(tok.bos, dtype))
        arrays.append(np.asarray(encode(text), dtype))
        if ends and tok.eot is None:
            raise ValueError(f'the tokenizer {tok.name} has no end-of-text token to keep documents apart: '
                             'name another by --tokenizer')
        if ends:
            arrays.append(np.array([tok.eot], dtype))
    size = learnt = sum(len(text.encode()) for text, *_ in group)
    if as_tokens:
        learnt -= sum(len(mark.encode()) for text, *_ in group
                      for mark in re.findall(tok.special_pattern, text))
    return np.concatenate(arrays), None, size, learnt


def encode_chats(tok, group):
    """[Conversation] -> ([(ids, mask)], bytes of text, bytes of what is learnt, without special tokens)."""
    size = sum(len(text.encode()) for conversation in group for text in contents(conversation))
    encoded = [encode_conversation(tok, conversation) for conversation in group]
    return encoded, size, sum(int(tok.sizes[ids[mask == 1]].sum()) for ids, mask in encoded)


def encode_conversation(tok, conversation):
    """(ids, mask) of a Conversation; the mask, uint8, is 1 for what the assistant writes and its end mark.

    An answer begins where the ids agree no longer with those of the rendered prompt, to which a model would
    have answered, and ends with the first stop token. ValueError names the conversation: its template renders
    an earlier message otherwise once there are more, so no answer could be told from its prompt.
    """
    place, messages, tools = conversation
    try:
        text = tok.render(messages, False, tools)
        ids = np.array(tok.encode_chat(text), dtype_of(tok.n_vocab))
        mask, end = np.zeros(len(ids), np.uint8), 0
        stops = np.flatnonzero(np.isin(ids, tok.stop_tokens))
        for n, message in enumerate(messages):
            if message['role'] != 'assistant':
                continue
            prompt = tok.render(messages[:n], True, tools)
            if not text.startswith(prompt):  # it may think, or not, otherwise than this conversation
                before = tok.render(messages[:n], False, tools)
                prompt = os.path.commonprefix([prompt, text])
                if not prompt.startswith(before):
                    raise ValueError(f'message {n + 1}: the chat template renders what is before this answer '
                                     'in another way when more follows')
            begin = common_length(tok.encode_chat(prompt), ids)
            later = stops[stops >= max(begin, end)]
            if not len(later):
                raise ValueError(f'message {n + 1}: the chat template ends this answer with none of '
                                 f'{[tok.decode([i]) for i in tok.stop_tokens]}')
            end = later[0] + 1
            mask[begin:end] = 1
    except ValueError as e:
        raise ValueError(f'{place}: {e}') from None
    return ids, mask


def common_length(a, b):
    """How many ids two lists have in common at their beginning."""
    n = min(len(a), len(b))
    return int(np.argmin(np.append(np.asarray(a[:n]) == np.asarray(b[:n]), False)))


class Slots:
    """Packs conversations into slots of block_size tokens. Each begins with the id `first`; what is left of a
    slot is filled with it. None crosses a slot: one longer than a slot is cut into several."""
    def __init__(self, block_size, first, dtype):
        self.block_size, self.first, self.dtype = block_size, first, dtype
        self.used = self.n_tokens = self.n_cut = 0

    def add(self, ids, mask):
        """The next (ids, mask) of the file."""
        room = self.block_size - 1
        self.n_cut += len(ids) > room
        for begin in range(0, len(ids), room):
            piece, learnt = ids[begin:begin + room], mask[begin:begin + room]
            if self.used + 1 + len(piece) > self.block_size:
                yield self.fill(self.block_size - self.used)
                self.used = 0
            yield self.fill(1)
            if begin:  # from nothing before it, the first token after a cut cannot be known
                learnt = np.append(np.uint8(0), learnt[1:])
            yield piece, learnt
            self.used += 1 + len(piece)
            self.n_tokens += 1 + len(piece)

    def fill(self, n):
        return np.full(n, self.first, self.dtype), np.zeros(n, np.uint8)

    def close(self):
        """Fill the last slot, and one token more: a window's last target is the next slot's first token."""
        yield self.fill(self.block_size - self.used + 1)


def separator(tok):
    """The id between conversations: end of text, where a tokenizer has one that ends no message."""
    found = [tok.special[text] for text in (EOT, '<|end_of_text|>') if text in tok.special]
    return found[0] if found else tok.eot


def pack(encoded, slots):
    """(split, [(ids, mask)], sizes) -> (split, ids, mask, sizes). slots: {split: Slots}."""
    def joined(arrays):
        return [np.concatenate(parts) for parts in zip(*arrays)]
    with contextlib.closing(encoded):
        for split, chats, *sizes in encoded:
            parts = [part for ids, mask in chats for part in slots[split].add(ids, mask)]
            yield split, *joined(parts), *sizes
    for split in SPLITS:
        yield split, *joined(slots[split].close()), 0, 0


def dtype_of(n_vocab):
    return np.dtype('<u2' if n_vocab <= 1 << 16 else '<u4')


def start_encoder(state):
    global worker_tokenizer
    worker_tokenizer = tokenizer_from_state(state)


def encode_in_worker(encode, job):
    split, group = job
    return split, *encode(worker_tokenizer, group)


def encode_groups(tok, groups, procs, encode=encode_group):
    """(split, *encode(tok, group)) of every group, in order."""
    if procs == 1:
        return ((split, *encode(tok, group)) for split, group in groups)
    work = functools.partial(encode_in_worker, encode)
    return in_processes(procs, work, groups, start_encoder, tok.state())


def write_bins(folder, encoded, masked, label, n_bytes=None):
    """Write folder/train.bin and val.bin, if masked also the .mask.bin of each; return counts and checksums.

    encoded: (split, ids, mask, bytes of text, bytes of what is learnt), a generator, so that memory does not
    grow with the text; n_bytes: how many there are, if known.
    """
    progress = Progress(label, n_bytes)
    tokens, learnt, sizes = (dict.fromkeys(SPLITS, 0) for _ in range(3))
    names = [f'{split}{end}' for end in ('.bin', '.mask.bin')[:1 + masked] for split in SPLITS]
    sums = {name: hashlib.sha256() for name in names}
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(os.path.join(folder, name), 'wb')) for name in names}
        for split, ids, mask, size, learnt_size in encoded:
            for name, part in {f'{split}.bin': ids, f'{split}.mask.bin': mask}.items():
                if part is not None:
                    files[name].write(part)
                    sums[name].update(part)
            tokens[split] += len(ids)
            learnt[split] += len(ids) if mask is None else int(mask.sum())
            sizes[split] += learnt_size
            progress.add(size)
    progress.close()
    for split in SPLITS:
        if not learnt[split]:
            advice = 'raise --block_size, or ' if masked else ''
            raise ValueError(f'{split} has no token to learn: {advice}prepare more text')
    if n_bytes not in (None, progress.done):
        raise ValueError(f'the text changed while it was read, from {n_bytes:,} to {progress.done:,} bytes: '
                         'run this again')
    return {**{f'{split}_tokens': tokens[split] for split in SPLITS},
            **({f'{split}_learnt': learnt[split] for split in SPLITS} if masked else {}),
            **{f'{split}_bytes': sizes[split] for split in SPLITS},  # of text that is learnt, not end of text
            'bytes_per_token': sizes['val'] / learnt['val'],         # val loss / ln 2 / this = bits per byte
            'checksum': {name: sums[name].hexdigest() for name in names}}


def write_dataset(folder, texts, tok, label, procs=1, n_bytes=None, block_size=None, as_tokens=False):
    """Make a prepared folder of texts, as planned_texts gives them; return what its meta.json says.

    With block_size they are conversations, and written with masks. as_tokens: see encode_group. A run that
    fails changes nothing.
    """
    title = f'{tok.name} encoding, {procs} process{"es" * (procs > 1)}'
    slots, eot = None, tok.eot
    if block_size is None:
        encode = functools.partial(encode_group, as_tokens=as_tokens)
        encoded = encode_groups(tok, groups(texts, tok), procs, encode)
    else:
        if block_size < 2:
            raise ValueError(f'block_size={block_size}: must be 2 or more')
        if not tok.chat_template:
            raise ValueError(f'the tokenizer {tok.name} has no chat template, which conversations need: name '
                             'another by --tokenizer, like a folder with a tokenizer.json that has one')
        eot = separator(tok)
        if eot is None:
            raise ValueError(f'the tokenizer {tok.name} has no end-of-text token to keep conversations apart')
        slots = {split: Slots(block_size, eot, dtype_of(tok.n_vocab)) for split in SPLITS}
        encoded = pack(encode_groups(tok, chat_groups(texts), procs, encode_chats), slots)
    with new_files(folder) as temp, contextlib.closing(encoded):
        counts = write_bins(temp, encoded, slots is not None, title, n_bytes)
        if slots:
            n_tokens = sum(counts[f'{split}_tokens'] for split in SPLITS)
            counts |= {'block_size': block_size, 'cut': sum(slot.n_cut for slot in slots.values()),
                       'filled': sum(slot.n_tokens for slot in slots.values()) / n_tokens}
        return write_meta(temp, tok, label, counts, eot)


FILES = [*[f'{split}{end}' for split in SPLITS for end in ('.bin', '.mask.bin')],
         *[name for _, name in TABLES.values()], 'meta.json']  # of a prepared folder


def refuse_others(folder, label):
    """ValueError: there is data of another source in the folder."""
    if any(os.path.exists(os.path.join(folder, name)) for name in FILES):
        source = 'unknown source'
        with contextlib.suppress(OSError, ValueError):
            source = read_json_meta(os.path.join(folder, 'meta.json')).get('source', source)
        if source != label:
            raise ValueError(f'{folder} holds data of {source}, not of {label}: choose another --out, or '
                             'replace it by --overwrite=True')


@contextlib.contextmanager
def new_files(folder):
    """A temporary folder, whose files of these names take the place of those in `folder` if all goes well,
    meta.json last. What an earlier run left there and this one has not is removed."""
    made = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        with (named_when_full(folder, ', or choose another folder by --out'),
              tempfile.TemporaryDirectory(prefix='.prepare-', dir=folder) as temp):
            yield temp
            for name in FILES:
                if os.path.exists(os.path.join(temp, name)):
                    os.replace(os.path.join(temp, name), os.path.join(folder, name))
                elif os.path.exists(os.path.join(folder, name)):
                    os.remove(os.path.join(folder, name))
    finally:
        if made and not os.listdir(folder):
            os.rmdir(folder)


def checksum_of(*texts):
    return hashlib.sha256(''.join(texts).encode()).hexdigest()


def write_meta(folder, tok, label, counts, eot):
    """Write meta.json and the tokenizer's table; return what meta.json says."""
    state = tok.state()
    texts = {name: state.pop(key, None) for key, name in TABLES.values()}
    meta = {'source': label, 'vocab_size': tok.n_vocab, 'dtype': dtype_of(tok.n_vocab).name, 'eot': eot,
            **counts, 'tokenizer': state, 'tokenizer_checksum': checksum_of(*filter(None, texts.values()))}
    for name, text in {**texts, 'meta.json': json.dumps(meta, indent=1)}.items():
        if text is not None:
            with open(os.path.join(folder, name), 'w', encoding='utf-8', newline='') as f:
                f.write(text)
    return meta


def fetch_shards(folder, found, n_train):
    """Download the first shards of a source, in GPT-2's tokens, to folder; return what its meta.json says."""
    if not 1 <= n_train < len(found.shards):
        raise ValueError(f'shards={n_train}: {found.name} has 1 to {len(found.shards) - 1}')
    tok = make_tokenizer('gpt2')  # before the wait, lest it is missing after that
    paths = [fetch(url, os.path.join(folder, url.rpartition('/')[2]), check=shard_problem,
                   instead=', or prepare a text of your own') for url in found.shards[:1 + n_train]]
    others = set(glob.glob(os.path.join(glob.escape(folder), '*.bin'))) - set(paths)
    if others := sorted(os.path.basename(path) for path in others if os.path.basename(path) not in FILES):
        print(f'{len(others)} more in {folder}, which train.py reads as well: {", ".join(others):.60}')
    shards = [read_shard(path, np.dtype('<u2')) for path in paths]
    val = np.fromfile(shards[0].path, shards[0].dtype, offset=shards[0].offset)
    n_bytes = int(np.bincount(val, minlength=tok.n_vocab)[:tok.n_vocab] @ tok.sizes)
    counts = {'train_tokens': sum(shard.n_tokens for shard in shards[1:]), 'val_tokens': len(val),
              'bytes_per_token': n_bytes / len(val)}
    with new_files(folder) as temp:
        return write_meta(temp, tok, found.label, counts, tok.eot)


# reading ----------------------------------------------------------------------------------------------------

class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers, text. A pickle runs code only through classes, and here it gets none."""
    def find_class(self, module, name):
        raise ValueError(f'it asks for {module}.{name}, but only plain data is read')


META_TYPES = {'vocab_size': (int,), 'dtype': (str,), 'eot': (int, type(None)),
              'tokenizer': (dict, type(None)), 'bytes_per_token': (int, float, type(None)),
              'block_size': (int, type(None))}


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
    """A dict with at least vocab_size, dtype, eot, bytes_per_token (None: unknown), tokenizer, and block_size
    (None, or that of the windows which conversations were packed into).

    tokenizer is its state without what stands in a file of its own (None: GPT-2's). From meta.json, nanoGPT's
    meta.pkl, or by assumption, which is printed once. ValueError: it is damaged.
    """
    usual = {'dtype': 'uint16', 'eot': None, 'bytes_per_token': None, 'tokenizer': None, 'block_size': None}
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
    starts = [source for source in SOURCES if name == source or name.startswith(f'{source}_')]
    if not starts:
        return shlex.join(['python', 'prepare.py', 'my.txt', f'--out={name}'])
    source = max(starts, key=len)
    kind, found = re.sub(r'^bpe(?=\d+$)', 'bpe:', name[len(source) + 1:]), SOURCES[source]()
    flags = [source] * (source != 'pystdlib')
    if dataset_name(output_folder(None, found, found.tokenizer)) != name:
        flags.append(f'--tokenizer={kind}' if kind else f'--out={name}')
    return shlex.join(['python', 'prepare.py', *flags])


HEADER_BYTES, HEADER_MAGIC = 1024, 20240520  # of foreign shards: 256 int32 that begin magic, version, tokens
Shard = collections.namedtuple('Shard', 'path dtype offset n_tokens')


def shard_problem(path, size=None, sha256=None):
    """What is wrong with a foreign shard, as text; None: nothing."""
    n, head = os.path.getsize(path), np.fromfile(path, '<i4', 3)
    if len(head) < 3 or head[0] != HEADER_MAGIC:
        return f'{n:,} bytes that begin with {head[:1].tolist()} where a shard of tokens has {HEADER_MAGIC}'
    if head[1] != 1 or n != HEADER_BYTES + 2 * int(head[2]):
        return f'{n:,} bytes, but its header says version {head[1]}, {head[2]:,} tokens of 2 bytes'
    return None


def read_shard(path, dtype):
    """The Shard at path, with or without a header. ValueError: its size is not what it should be."""
    size, head = os.path.getsize(path), np.fromfile(path, '<i4', 3)
    like = len(head) == 3 and head[1] == 1 and size == HEADER_BYTES + 2 * int(head[2])
    if like or len(head) == 3 and head[0] == HEADER_MAGIC:
        if problem := shard_problem(path):
            raise ValueError(f'{path}: {problem}: download it again')
        return Shard(path, np.dtype('<u2'), HEADER_BYTES, int(head[2]))
    if size % dtype.itemsize:
        raise ValueError(f'{path}: {size:,} bytes are no whole number of {dtype.name}: prepare it again')
    return Shard(path, dtype, 0, size // dtype.itemsize)


def mask_of(path):
    """The file beside x.bin that says which tokens are to be learnt: x.mask.bin."""
    return path.removesuffix('.bin') + '.mask.bin'


def read_masks(shards, masks):
    """The masks of shards, as Shards of a byte a token; none if no shard has one. masks: all the mask files
    that were found. ValueError: one is missing, of another length, or without tokens."""
    alone = [mask for mask in masks if not os.path.exists(mask.removesuffix('.mask.bin') + '.bin')]
    if alone:
        raise ValueError(f'{alone[0]} is the mask of tokens that are not there: remove it, or prepare again')
    found = [mask_of(shard.path) for shard in shards if os.path.exists(mask_of(shard.path))]
    if not found:
        return []
    for shard in shards:
        mask = mask_of(shard.path)
        size = os.path.getsize(mask) if os.path.exists(mask) else 0
        if size != shard.n_tokens:
            raise ValueError(f'{mask} has {size:,} bytes, one for each of {shard.n_tokens:,} tokens are '
                             'needed: prepare it again')
    return [Shard(mask, np.dtype(np.uint8), 0, shard.n_tokens) for mask, shard in zip(found, shards)]


class Bins:
    """The tokens of one split: folder/<split>.bin, or else its shards *<split>*.bin, sorted.

    Window i is the block_size + 1 tokens from i * block_size of a shard, so x = w[:, :-1] and y = w[:, 1:]
    take every token but a shard's first, and its tail, once as a target. With vocab_size, ids are checked as
    they are read. x.mask.bin beside x.bin says which tokens are targets, a byte for each; `masks` is empty
    where there is none. n_tokens and n_targets count both.
    """
    def __init__(self, folder, split, dtype=None, vocab_size=None):
        self.vocab_size, self.name = vocab_size, os.path.join(folder, f'{split}.bin')
        found = sorted(glob.glob(os.path.join(glob.escape(folder), f'*{split}*.bin')))
        masks = [path for path in found if path.endswith('.mask.bin')]
        found = [path for path in found if path not in masks]
        if os.path.exists(self.name):
            found = [self.name]
        if not found:
            command = prepare_command(folder)
            raise FileNotFoundError(f'{folder} is not prepared: no {split}.bin; run `{command}`')
        if found != [self.name]:
            self.name = os.path.join(folder, f'*{split}*.bin')
        meta = read_meta(folder)
        dtype = np.dtype(dtype or meta['dtype']).newbyteorder('<')
        self.shards = [read_shard(path, dtype) for path in found]
        self.masks = read_masks(self.shards, masks)
        self.n_tokens = self.n_targets = sum(shard.n_tokens for shard in self.shards)
        if self.n_tokens < meta.get(f'{split}_tokens', 0):
            raise ValueError(f'{self.name} has {self.n_tokens:,} tokens of the {meta[f"{split}_tokens"]:,} '
                             'that were prepared: prepare it again')
        if self.masks:
            self.n_targets = sum(np.count_nonzero(part) for mask in self.masks for _, part in parts_of(mask))

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

    def check_vocabulary(self, vocab_size, advice):
        """Reads every token. ValueError: one is no id of such a vocabulary."""
        for shard in self.shards:
            for first, part in parts_of(shard):
                if part.max(initial=0) >= vocab_size:
                    at = int(np.argmax(part >= vocab_size))
                    raise ValueError(f'{shard.path}: token {part[at]} at position {first + at} is outside '
                                     f'the vocabulary of {vocab_size}: {advice}')

    def read(self, indices, block_size):
        """The windows with these indices: int64 (len(indices), block_size + 1)."""
        windows, shards, firsts = self._windows(self.shards, indices, block_size)
        if self.vocab_size is not None and windows.max(initial=0) >= self.vocab_size:
            row, at = np.argwhere(windows >= self.vocab_size)[0]
            raise ValueError(f'{self.shards[shards[row]].path}: token {windows[row, at]} at position '
                             f'{firsts[row] + at} is outside the vocabulary of {self.vocab_size}: '
                             'prepare it again, or raise --vocab_size')
        return windows

    def batch(self, indices, block_size):
        """The windows with these indices as inputs and targets: int64 (len(indices), block_size) each, -1 for
        a target that the mask leaves out."""
        windows = self.read(indices, block_size)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        if self.masks:
            learnt, _, _ = self._windows(self.masks, indices, block_size)
            targets = np.where(learnt[:, 1:], targets, -1)
        return inputs, targets

    def _windows(self, files, indices, block_size):
        """The windows in files, the shards or their masks: int64 (n, block_size + 1), and of each its shard
        and its first token there."""
        indices, ends, n = np.asarray(indices), self.ends(block_size), self.n_windows(block_size)
        if indices.size and not 0 <= indices.min() <= indices.max() < n:
            raise IndexError(f'windows {indices.min()}-{indices.max()} of {self.name}, which has {n}')
        shards = np.searchsorted(ends, indices, side='right')
        firsts = (indices - np.append(0, ends)[shards]) * block_size
        windows = np.empty((len(indices), block_size + 1), np.int64)
        for shard in np.unique(shards):  # plain reads: a memory map of a large file would fill up the RSS
            path, dtype, offset, _ = files[shard]
            window = np.empty(block_size + 1, dtype)
            with open(path, 'rb', buffering=0) as f:
                for row in np.flatnonzero(shards == shard):
                    f.seek(offset + int(firsts[row]) * dtype.itemsize)
                    if f.readinto(window) != window.nbytes:
                        raise ValueError(f'{path} became shorter while it was read: prepare it again')
                    windows[row] = window
        return windows, shards, firsts


def parts_of(shard, size=1 << 22):
    """Yields a shard in parts: (position of its first element, elements)."""
    for first in range(0, shard.n_tokens, size):
        yield first, np.fromfile(shard.path, shard.dtype, min(size, shard.n_tokens - first),
                                 offset=shard.offset + first * shard.dtype.itemsize)


# looking ----------------------------------------------------------------------------------------------------

LOOK = 10_000_000  # tokens of a split that are counted


def look(folder):
    """Print what is in a prepared folder: counts, documents by length, commonest tokens, a window of text."""
    folder = folder if os.path.isdir(folder) else os.path.join('data', folder)
    splits = {split: Bins(folder, split) for split in reversed(SPLITS)}
    meta, tok = read_meta(folder), load_tokenizer(folder)
    print(f'{folder}: {meta.get("source", "of unknown source")}, tokenizer {tok.name}, vocabulary '
          f'{meta["vocab_size"]:,}, {meta["dtype"]}')
    eot = tok.eot if meta['eot'] is None else meta['eot']
    for split, bins in splits.items():
        ids, mask = first_tokens(bins)
        counted = f' (of the first {len(ids):,})' if len(ids) < bins.n_tokens else ''
        ends = np.flatnonzero(ids == eot)
        lengths = np.diff(np.concatenate([[-1], ends, [len(ids)]])) - 1
        lengths = lengths[lengths > 0]
        text = len(tok.decode_bytes(ids[ids != eot]))
        line = [f'{bins.n_tokens:,} tokens', f'{len(lengths):,} document{"s" * (len(lengths) > 1)}',
                f'{text / max(len(ids) - len(ends), 1):.2f} bytes a token']
        if mask is not None:
            line.append(f'{mask.mean():.1%} of them learnt')
        print(f'{split}: {", ".join(line)}{counted}')
    print('\ndocuments by tokens')
    for power, n in sorted(collections.Counter(np.log2(lengths).astype(int).tolist()).items()):
        print(f'{f"{1 << power:,}-{(2 << power) - 1:,}":>17} {n:9,} {"#" * round(50 * n / len(lengths))}')
    different, counts = np.unique(ids, return_counts=True)
    print('\ncommonest tokens')
    for i in np.argsort(-counts, kind='stable')[:12]:
        print(f'{repr(tok.decode([different[i]])):>17} {counts[i]:9,} {counts[i] / len(ids):6.2%}')
    n = meta['block_size'] or 256
    n = int(np.flatnonzero(ids[:n] != eot).max(initial=0)) + 1  # without what fills a slot
    print(f'\nthe first {n:,} tokens{", what is learnt marked" if mask is not None else ""}')
    print(marked(tok, ids[:n], None if mask is None else mask[:n]))


def first_tokens(bins):
    """(ids, mask) of the first shard, up to LOOK of them; the mask is None if it has none."""
    shard = bins.shards[0]
    n = min(shard.n_tokens, LOOK)
    if not n:
        raise ValueError(f'{shard.path} is empty: prepare it again')
    return (np.fromfile(shard.path, shard.dtype, n, offset=shard.offset),
            np.fromfile(bins.masks[0].path, np.uint8, n) if bins.masks else None)


def marked(tok, ids, mask):
    """The text of ids, in which what a mask has learnt is inverse on a terminal, else in [[ ]]."""
    begin, end = ('\033[7m', '\033[0m') if sys.stdout.isatty() else ('[[', ']]')
    parts = []
    for learnt, run in itertools.groupby(range(len(ids)), key=lambda i: mask is not None and bool(mask[i])):
        text = tok.decode([ids[i] for i in run])
        parts.append(f'{begin}{text}{end}' if learnt else text)
    return ''.join(parts)


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leaves nothing behind
    if words[:1] == ['look']:
        look(words[1] if words[1:] else FIRST_RUN)
        raise SystemExit(0)
    if words[1:]:
        raise ValueError(f'{words[1]!r} is one source too many: put files into a folder, or quote a glob')
    found = find_source(words[0] if words else source, field, errors)
    choices = ['refuse', 'tokens', *['text'] * (not found.chats)]  # conversations are rendered with tokens
    if special_tokens not in choices:
        raise ValueError(f'special_tokens={special_tokens!r}: must be {" or ".join(choices)}')
    tokenizer = tokenizer or found.tokenizer
    folder = output_folder(out, found, tokenizer)
    if out and not overwrite:
        refuse_others(folder, found.label)

    if found.shards:
        if tokenizer != 'gpt2':
            raise ValueError(f"tokenizer={tokenizer!r}: {found.name} has tokens already, gpt2's")
        meta = fetch_shards(folder, found, shards)
    else:
        scanned = scan(found)
        plan = plan_splits(found, scanned, val_fraction)
        n, n_empty = scanned.n_documents, scanned.sizes.count(0)
        kind = 'conversation' if found.chats else 'document'
        print(f'{found.label}: {n:,} {kind}{"s" * (n > 1)}, {scanned.n_bytes / 1e6:,.2f} MB, '
              f'{len(scanned.characters):,} different characters'
              + (f', {n_empty:,} left out (empty)' if n_empty else ''))
        refused = refusing(found, BPE_SPECIAL) if special_tokens == 'refuse' else found
        texts = functools.partial(planned_contents if found.chats else planned_texts, refused, plan)
        tok = make_tokenizer(tokenizer, scanned.characters, by_document=n > 1, texts=texts,
                             n_bytes=scanned.n_bytes, procs=procs, pattern=pattern)
        work = scanned.n_bytes * (20 if found.chats else 1)  # a conversation is rendered once for each answer
        procs = usable_procs(procs, tok, work)
        refused = refusing(found, tok.special) if special_tokens == 'refuse' else found
        meta = write_dataset(folder, planned_texts(refused, plan), tok, found.label, procs, scanned.n_bytes,
                             block_size if found.chats else None, special_tokens == 'tokens')

    print(f'{folder}: {meta["train_tokens"]:,} train and {meta["val_tokens"]:,} val tokens, '
          f'{meta["bytes_per_token"]:.2f} bytes a token, vocabulary {meta["vocab_size"]:,}')
    if found.chats:
        print(f'slots of {block_size} tokens, {meta["filled"]:.0%} full; {meta["train_learnt"]:,} train '
              'tokens are learnt' + (f'; {meta["cut"]:,} longer ones are cut' if meta['cut'] else ''))
    config, usual = (['config/chat.py'], 'pydoc_chat') if found.chats else ([], dataset_name(FIRST_RUN))
    name = dataset_name(folder)
    print('next:', shlex.join(['python', 'train.py', *config, *[f'--dataset={name}'] * (name != usual)]))
