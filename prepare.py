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
import codecs
import collections
import contextlib
import dataclasses
import errno
import functools
import glob
import gzip
import hashlib
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
words = configure(globals(), words=2).words

import numpy as np

from tokenizer import (
    BPE_SPECIAL,
    EOT,
    SPLITS,
    TABLES,
    Progress,
    code_points,
    gather,
    groups,
    in_processes,
    make_tokenizer,
    read_utf8,
    tokenizer_from_state,
    usable_procs,
)

RETRY_WAITS = (0.5, 1, 2, 4)  # seconds between the tries of a download


@functools.cache
def print_once(text):
    print0(text)


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

def chat_groups(texts):
    """(split, [Conversation]) in groups of about CHUNK characters. texts: as planned_texts gives them."""
    return gather((split, conversation, sum(map(len, contents(conversation))))
                  for split, conversation, _ in texts)


def is_prepared(folder):
    """Whether this is a folder that prepare.py, or nanoGPT, has made."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ('meta.json', 'meta.pkl'))


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


def choose_tokenizer(name, **options):
    """The tokenizer of another dataset's folder, or one that make_tokenizer makes with these options."""
    if is_prepared(name):
        if options['pattern'] is not None:
            raise ValueError(f"pattern={options['pattern']!r} is for --tokenizer=bpe:4096 alone")
        return load_tokenizer(name)
    if name.startswith('data' + os.sep) and not os.path.exists(name):
        raise FileNotFoundError(f"tokenizer={name!r}: that folder is not prepared; "
                                f"`{prepare_command(name)}` does it")
    return make_tokenizer(name, **options)


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

    def n_sequences(self, block_size):
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
        indices, ends, n = np.asarray(indices), self.ends(block_size), self.n_sequences(block_size)
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
        tok = choose_tokenizer(tokenizer, characters=scanned.characters, by_document=n > 1, texts=texts,
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
