"""From text to tokens: writes data/<name>/train.bin, val.bin and meta.json, which train.py reads.

    $ python prepare.py                               # Python's library: data/pystdlib_bpe4096
    $ python prepare.py shakespeare --tokenizer=char  # data/shakespeare_char
    $ python prepare.py my.txt --tokenizer=gpt2 --out=mydata
    $ python prepare.py 'notes/**/*.md'               # a quoted glob, or a folder: a document for each file
    $ python prepare.py tales.jsonl.gz --field=story  # a document for each record; .json, .csv, .parquet too
    $ python prepare.py model.py                      # text, as all .py files but those of a folder config
    $ zcat *.gz | python prepare.py -
    $ python prepare.py climbmix --tokenizer=gpt2     # text of the web, 10 files; fineweb_edu: tokens
    $ python prepare.py chats.jsonl                   # conversations: with target masks
    $ python prepare.py look data/chats               # shows a prepared folder

A .bin file is nothing but tokens, little-endian, uint16 if the vocabulary fits and else uint32.
"""
import ast
import atexit
import codecs
import collections
import contextlib
import csv
import dataclasses
import functools
import glob
import gzip
import hashlib
import io
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
from collections.abc import Callable

from configurator import configure, package, print0, reading, refuse_unused

# A name in SOURCES, a file (text or in FORMATS, perhaps .gz), a folder or glob, or - for standard input
source = 'pystdlib'
field = 'text'             # JSON, CSV, parquet: the field with a record's text or messages
errors = 'strict'          # bytes that are not UTF-8: strict refuses them, replace puts U+FFFD
# byte, char, bpe:4096 (trained here), tiktoken's (gpt2, o200k_base...), a folder with tokenizer.json, another
# dataset's or a run's; None: the source's, for conversations that of data/pystdlib_bpe4096, else byte
tokenizer: str | None = None
special_tokens = 'refuse'  # in a document: refuse, or learn them as text or as tokens
pattern: str | None = None  # of bpe:4096: the regular expression of words; None: GPT-4's
out: str | None = None     # a name, or a path with a slash; None: <source>_<tokenizer>
overwrite = False          # replaces data of another source in out
val_fraction = 0.1         # for validation, at most: each 10th document, or the last tenth of one text
block_size = 256           # of the slots that conversations are packed into; as train.py's
shards = 10                # files to take of a source that has many (fineweb, fineweb_edu: to train on)
procs: int | None = None   # processes that encode; None: one for each core
_, _, words, given, _ = configure(globals(), words=2, texts=True)

import numpy as np

from tokenizer import (
    EOT,
    SPLITS,
    TABLES,
    ProgressLine,
    in_groups,
    in_processes,
    make_tokenizer,
    pieces,
    tokenizer_from_state,
)

RETRY_WAITS = (0.5, 1, 2, 4)  # seconds between the tries of a download
print_once = functools.cache(print0)


# downloads --------------------------------------------------------------------------------------------------

def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(url, path):
    """Downloads url to path, unless it is there; returns path. Raises FileNotFoundError if the server has no
    such file, OSError if it cannot be reached."""
    if os.path.exists(path):
        return path
    import requests
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = path + '.part'
    for wait in (*RETRY_WAITS, None):
        try:
            response = requests.get(url, headers={'Accept-Encoding': 'identity'}, stream=True, timeout=60)
            if response.status_code == 404:
                raise FileNotFoundError(f'{url} is not there: check the address')
            response.raise_for_status()
            size = int(response.headers.get('Content-Length', 0))  # urllib3 checks that all of it comes
            progress = ProgressLine(f'download {os.path.basename(path)}', size)
            with open(part, 'wb') as f:
                for block in response.iter_content(1 << 16):
                    f.write(block)
                    progress.add(len(block))
            break
        except requests.RequestException as e:
            if wait is None:
                raise OSError(f'cannot download {url} ({e!r:.100}): go online, bring it by other means to '
                              f'{path}, or use a text file that you have: python prepare.py my.txt') from e
            time.sleep(wait)
    progress.close()
    os.replace(part, path)
    return path


# files as documents -----------------------------------------------------------------------------------------
# A document is an iterable of blocks of text, never in memory as a whole.

@contextlib.contextmanager
def open_bytes(path):
    """The file, unpacked. Raises ValueError that names it if it is damaged, or read as text but not UTF-8."""
    with reading(path), (gzip.open if path.lower().endswith('.gz') else open)(path, 'rb') as f:
        try:
            yield f
        except UnicodeDecodeError as e:
            around = e.object[max(0, e.start - 20):e.end + 20]
            raise ValueError(f'{path} is not UTF-8 text: {e.object[e.start]:#04x} in {around!r}: convert it, '
                             'leave it out, or have U+FFFD there by --errors=replace') from None


def ending(path):
    """'.jsonl' of a.jsonl and of a.jsonl.gz."""
    path = path.lower().removesuffix('.gz')
    return os.path.splitext(path)[1]


def read_text(path, errors='strict'):
    """The file's text in blocks, without a byte order mark."""
    with open_bytes(path) as f:
        yield from codecs.iterdecode(iter(functools.partial(f.read, 1 << 20), b''), 'utf-8-sig', errors)


def text_documents(path, errors):
    """A text file is one document; with <|endoftext|> in the first 16 MB, one for each part."""
    blocks = read_text(path, errors)
    head = list(itertools.islice(blocks, 16))
    blocks = itertools.chain(head, blocks)
    if EOT not in ''.join(head):
        yield blocks
        return
    text = ''
    for block in blocks:
        *ended, text = (text + block).split(EOT)
        yield from ([part.strip()] for part in ended)
    yield [text.strip()]


def json_records(path, field=None, errors='strict'):
    """Of JSON lines, or of one array, see FORMATS. Raises ValueError for what is not JSON, or no object."""
    with open_bytes(path) as f:
        is_array = f.read(999).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b'[')
        f.seek(0)
        for n, record in enumerate(json.load(f) if is_array else map(bytes.strip, f), 1):
            place = f'{path}, {"record" if is_array else "line"} {n}'
            if not is_array:
                if not record:
                    continue
                try:
                    record = json.loads(record.decode('utf-8-sig', errors))
                except ValueError as e:
                    raise ValueError(f'{place}: {e}: mend or remove the line') from None
            if not isinstance(record, dict):
                raise ValueError(f'{place}: {record!r:.80} is not an object like {{"text": "a tale"}}')
            yield place, record


def csv_records(path, field, errors):
    """Of comma-separated values below a line with the fields' names."""
    csv.field_size_limit(1 << 30)
    with open_bytes(path) as f:
        rows = csv.DictReader(io.TextIOWrapper(f, 'utf-8-sig', errors, newline=''), restkey='')
        yield from ((f'{path}, line {rows.line_num}', row) for row in rows)


def parquet_records(path, field, errors):
    """Of the column `field` alone, where there is one. Raises ValueError if the file is not parquet."""
    parquet = package('pyarrow.parquet', f'{path} needs', 'pyarrow')
    try:
        file = parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)  # not all of it
    except ValueError as e:  # pyarrow's
        raise ValueError(f'{path}: {e}') from None
    columns = [field] if field in file.schema_arrow.names else None
    batches = file.iter_batches(256, columns=columns, use_threads=False)  # encoding forks this process
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    yield from ((f'{path}, row {n}', record) for n, record in enumerate(rows, 1))


# By the end of a file's name. Functions of a path, the field that is needed (None: all are) and `errors`,
# which yield ('file, line n', {field: value}) of each record
FORMATS = {'.jsonl': json_records, '.ndjson': json_records, '.json': json_records, '.csv': csv_records,
           '.parquet': parquet_records}


def format_of(path):
    """The function of FORMATS that reads this file; None: it is text, as is .json that begins neither with an
    array of objects nor, like JSON lines, with an object's first field on the first line."""
    if ending(path) == '.json':
        with open_bytes(path) as f:
            if not re.match(rb'\s*(\[\s*{|{ *")', f.read(999).removeprefix(codecs.BOM_UTF8)):
                return None
    return FORMATS.get(ending(path))


def file_documents(paths, field='text', errors='strict'):
    """A document for each record's text in this field; of text files as in text_documents."""
    for path in paths:
        records = format_of(path)
        if not records:
            yield from text_documents(path, errors)
            continue
        for place, record in records(path, field, errors):
            if not isinstance(record.get(field), str):
                raise ValueError(f'{place}: no text in field {field!r}, its fields are '
                                 f'{", ".join(record):.200}: choose one by --field')
            yield [record[field]]


# conversations ----------------------------------------------------------------------------------------------

# place: named in errors; messages: [{'role': 'user', 'content': text}, ...]; tools: JSON schemas
Conversation = collections.namedtuple('Conversation', 'place messages tools', defaults=[None])
MESSAGES = ('messages', 'conversations')  # fields with a list of messages
PAIRS = (('prompt', 'response'), ('prompt', 'completion'), ('prompt', 'answer'), ('instruction', 'output'),
         ('instruction', 'response'), ('question', 'answer'), ('question', 'response'))
SPEAKERS = {'human': 'user', 'gpt': 'assistant'}  # in ShareGPT's messages, {'from': ..., 'value': ...}
ROLES = {'system': 's', 'user': 'u', 'assistant': 'a', 'tool': 't'}
ORDER = re.compile('s?(ua(t+a)*)+u?')  # of ROLES' letters


def find_messages(record, field):
    """A record's messages, by `field`, else MESSAGES, else PAIRS; or None."""
    for name in (field, *MESSAGES):
        messages = record.get(name)
        if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
            return [{'role': SPEAKERS.get(message['from'], message['from']), 'content': message.get('value')}
                    if 'from' in message else message for message in messages]
    for ask, answer in PAIRS:
        if record.keys() >= {ask, answer}:
            question, more = record[ask], record.get('input')
            if question and more:
                question = f'{question}\n\n{more}'
            return make_messages((question or more, record[answer]))
    return None


def make_messages(*turns):
    """(question, answer), ... as messages."""
    return [{'role': role, 'content': content} for turn in turns
            for role, content in zip(('user', 'assistant'), turn)]


def check_messages(messages, place):
    """Raises ValueError if they are no conversation to learn from."""
    for n, message in enumerate(messages, 1):
        content = message.get('content') or ''
        if (message.get('role') not in ROLES or not isinstance(content, str)
                or not (content.strip() or message.get('tool_calls'))):
            raise ValueError(f'{place}, message {n}: {message!r:.80} needs a role, one of '
                             f'{", ".join(ROLES)}, and text as its content')
    roles = [message['role'] for message in messages]
    if not ORDER.fullmatch(''.join(map(ROLES.get, roles))):
        raise ValueError(f'{place}: its roles are {", ".join(roles):.100}: user and assistant must take '
                         'turns, after a system message at most')


def from_json(value):
    """A text of JSON, as MiniMind writes tools and tool_calls -> its value; others stay."""
    with contextlib.suppress(TypeError, ValueError):
        return json.loads(value)
    return value


def conversations(paths, field='text', errors='strict'):
    """The Conversations of files in FORMATS. Raises ValueError that names file and line."""
    for path in paths:
        for place, record in (format_of(path) or json_records)(path, None, errors):
            messages = find_messages(record, field)
            if not messages:
                raise ValueError(f'{place}: no conversation, its fields are {", ".join(record):.200}; it '
                                 f'needs a list of objects in {" or ".join(MESSAGES)}, or a pair like prompt '
                                 'and response')
            check_messages(messages, place)
            for message in messages:
                if 'tool_calls' in message:
                    message['tool_calls'] = from_json(message['tool_calls'])
            tools = from_json(record.get('tools') or messages[0].get('tools')) or None
            yield Conversation(place, messages, tools)


def holds_conversations(paths, field, errors):
    """Whether the first record has messages rather than text in this field."""
    for path in paths:
        if records := format_of(path):
            for _, record in records(path, None, errors):
                if isinstance(record.get(field), str) or find_messages(record, field) is None:
                    return False
                if len(paths) > 1:
                    print0(f'{path} holds conversations: all files are read as such')
                return True
    return False


def contents(conversation):
    return [message.get('content') or '' for message in conversation.messages]


# sources ----------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Source:
    """Where text comes from.

    documents() -> an iterator over documents, iterables of blocks of text, or with chats over Conversations.
    Called anew for each pass, with the same result: def documents(): yield ['a text']; yield ['another']
    shards: addresses of files of tokens instead, the first for validation.
    tokenizer: if the settings name none; None: byte, for conversations that of FIRST_RUN.
    records: whether `field` has an effect.
    """
    name: str  # of the dataset
    label: str  # the source in meta.json
    documents: Callable | None = None
    chats: bool = False
    shards: list | None = None
    tokenizer: str | None = None
    records: bool = False


FIRST_RUN = os.path.join('data', 'pystdlib_bpe4096')  # what `python prepare.py` makes
HUB = 'https://huggingface.co/datasets'


def download(name, url, count=1, chats=False, tokenizer=None):
    """The Source of files, downloaded to data/<name>. url: with {} for the numbers of `count` files."""
    def documents():
        urls = map(url.format, range(count))
        paths = [fetch(url, os.path.join('data', name, os.path.basename(url))) for url in urls]
        return (conversations if chats else file_documents)(paths)
    return Source(name, name, documents, chats, tokenizer=tokenizer)


def library_files():
    """The .py files of Python's standard library, without tests and installed packages."""
    files, leave_out = [], {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    for folder, folders, names in os.walk(sysconfig.get_paths()['stdlib']):
        folders[:] = set(folders) - leave_out
        files += [os.path.join(folder, name) for name in names if name.endswith('.py')
                  and not name.startswith('_sysconfigdata')]  # this machine's compiler flags
    return sort_files(files)


def pystdlib():
    return Source('pystdlib', f'pystdlib {platform.python_version()}', tokenizer='bpe:4096',
                  documents=lambda: file_documents(library_files(), errors='replace'))


def fineweb(name, prefix, count):
    """FineWeb in GPT-2's tokens, by Keller Jordan: files of 100M, the first for val."""
    names = ['val_000000', *[f'train_{i:06d}' for i in range(1, count + 1)]]
    urls = [f'{HUB}/kjj0/{prefix}10B-gpt2/resolve/main/{prefix}_{part}.bin' for part in names]
    return Source(name, name, shards=urls, tokenizer='gpt2')


SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
MINIMIND = f'{HUB}/jingyaogong/minimind_dataset/resolve/main'
# Functions that give a Source; only documents() downloads.
SOURCES = {
    'pystdlib': pystdlib,
    'shakespeare': lambda: download('shakespeare', SHAKESPEARE),
    'tinystories': lambda: download(
        'tinystories', f'{HUB}/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt'),
    'openwebtext': lambda: download(  # nanoGPT's
        'openwebtext',
        f'{HUB}/Skylion007/openwebtext/resolve/main/plain_text/train-{{:05d}}-of-00080.parquet',
        min(shards, 80), tokenizer='gpt2'),
    'climbmix': lambda: download(  # nanochat's
        'climbmix', f'{HUB}/karpathy/climbmix-400b-shuffle/resolve/main/shard_{{:05d}}.parquet', shards),
    'fineweb_edu_text': lambda: download(
        'fineweb_edu_text',
        f'{HUB}/karpathy/fineweb-edu-100b-shuffle/resolve/main/shard_{{:05d}}.parquet', shards),
    'fineweb': lambda: fineweb('fineweb', 'fineweb', min(shards, 103)),
    'fineweb_edu': lambda: fineweb('fineweb_edu', 'finewebedu', min(shards, 99)),
    'minimind': lambda: download('minimind', f'{MINIMIND}/pretrain_t2t_mini.jsonl'),
    'minimind_sft': lambda: download('minimind_sft', f'{MINIMIND}/sft_t2t_mini.jsonl', chats=True),
    'smol_smoltalk': lambda: download(
        'smol_smoltalk',
        f'{HUB}/HuggingFaceTB/smol-smoltalk/resolve/main/data/train-{{:05d}}-of-00004.parquet',
        min(shards, 4), chats=True),
    'pydoc_chat': lambda: Source('pydoc_chat', f'pydoc_chat {platform.python_version()}', pydoc_chats, True),
}


def sort_files(files):
    return sorted(files, key=lambda path: path.split(os.sep))  # the same order on every system


def find_source(source, field='text', errors='strict'):
    """The Source of this name, file, folder (without hidden files), glob, or standard input."""
    if source in SOURCES:
        return SOURCES[source]()
    if source == '-':
        source, name, paths = 'standard input', 'stdin', [keep_standard_input()]
    elif os.path.isfile(source):
        name, paths = os.path.basename(source), [source]
        name = name.removesuffix('.gz').rpartition('.')[0] or name
    else:  # a folder, or a glob, named after what is before its wildcards
        folder = source if os.path.isdir(source) else re.split(r'[^/\\]*[*?[]', source)[0]
        name = os.path.basename(os.path.abspath(folder))
        pattern = os.path.join(glob.escape(source), '**', '*') if folder == source else source
        paths = sort_files(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if not paths:
        raise FileNotFoundError(f'{source}: no such file, folder or glob with files, and none of '
                                f'{", ".join(SOURCES)}: check the path')
    chats = holds_conversations(paths, field, errors)
    documents = functools.partial(conversations if chats else file_documents, paths, field, errors)
    records = any(map(format_of, paths))
    return Source(plain_name(name), source, documents, chats, records=records)


def keep_standard_input():
    """Copies standard input, read twice, to a file -> its path; .json may be text."""
    folder = tempfile.mkdtemp(prefix='flatgpt-')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, 'stdin.json')
    with open(path, 'wb') as f:
        shutil.copyfileobj(sys.stdin.buffer, f)
    return path


def plain_name(text):
    return re.sub(r'[^\w.-]+', '_', text).strip('._') or 'text'


def output_folder(out, source, tokenizer):
    """out if it has a slash, data/<out>, data/<source>_<tokenizer>, or for conversations data/<source>."""
    kind = dataset_name(tokenizer) if is_prepared(tokenizer) else tokenizer.removesuffix('tokenizer.json')
    usual = f'{source.name}_{plain_name(kind.replace("bpe:", "bpe"))}'
    if source.chats or usual in ('shakespeare_gpt2', 'openwebtext_gpt2'):  # nanoGPT's names
        usual = source.name
    return out if out and re.search(r'[/\\]', out) else os.path.join('data', out or usual)


def dataset_name(folder):
    """For train.py's --dataset: the folder's path below data/, else the whole path."""
    path, data = os.path.abspath(folder), os.path.abspath('data') + os.sep
    return (path[len(data):] if path.startswith(data) else path).replace(os.sep, '/')


# conversations about Python's library -----------------------------------------------------------------------

# Modules not found everywhere, or of no interest
NOT_ASKED = {'antigravity', 'distutils', 'encodings', 'ensurepip', 'idlelib', 'lib2to3', 'msilib', 'ntpath',
             'nturl2path', 'site', 'this', 'tkinter', 'turtle', 'turtledemo', 'venv'}
ANSWER = 120  # characters of the longest answer
WORDINGS = {  # by kind
    'function': ('What does {} do?', 'Explain {}.', 'What is {} for?'),
    'class': ('What is {}?', 'Explain {}.', 'What is {} for?'),
    'module': ('What is the module {} for?', 'Explain the module {}.', 'What is {}?'),
}


def library_docs():
    """(name, kind, docstring, arguments) of the library's modules, classes and functions."""
    root = sysconfig.get_paths()['stdlib']
    for path in library_files():
        parts = os.path.relpath(path, root)[:-3].removesuffix(f'{os.sep}__init__').split(os.sep)
        if not NOT_ASKED.intersection(parts):
            module = 'os.path' if parts == ['posixpath'] else '.'.join(parts)
            with open(path, 'rb') as f:
                tree = ast.parse(f.read())
            yield module, 'module', ast.get_docstring(tree), ''
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    yield f'{module}.{node.name}', 'class', ast.get_docstring(node), ''
                elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f'{module}.{node.name}', 'function', ast.get_docstring(node), ast.unparse(node.args)


def summary_of(doc):
    """The first sentence of a docstring; None unless it is short and has words."""
    for paragraph in re.split(r'\n\s*\n', doc or ''):
        text = ' '.join(paragraph.split())
        if not re.match(r'[\w.]+\(', text):  # not a signature
            text = re.split(r'(?<=[.!?])\s+(?=[A-Z])', text)[0].rstrip(':.') + '.'
            return text if text[0].isalpha() and ' ' in text and len(text) <= ANSWER else None
    return None


def pydoc_chats():
    """Conversations about one to three functions, classes or modules, each asked about in two wordings, so
    that most questions of val have their answer in train."""
    asked, order = [], random.Random(0)
    for n, (name, kind, doc, arguments) in enumerate(library_docs()):
        summary = summary_of(doc)
        if summary and not re.search(r'\b_|-', name):
            first, *others = [wording.format(name) for wording in WORDINGS[kind]]
            asked += [[(first, summary)], [(others[n % 2], summary)]]
            if 0 < len(arguments) < ANSWER // 2:
                takes = f'{name}({arguments})'
                asked[-2] += [('What arguments does it take?', takes)] * (n % 3 == 0)
                asked.append([(f'What arguments does {name} take?', takes)])
    order.shuffle(asked)
    asked = iter(asked)
    while turns := [turn for turns in itertools.islice(asked, order.randint(1, 3)) for turn in turns]:
        yield Conversation('pydoc_chat', make_messages(*turns))


# which text is for what -------------------------------------------------------------------------------------

def documents_of(source):
    """A source's documents without empty ones."""
    if source.chats:
        yield from source.documents()
        return
    for document in source.documents():
        blocks = filter(None, document)
        if first := next(blocks, None):
            yield itertools.chain([first], blocks)


def characters_to_train_on(source, fraction):
    """How many characters of each document, from its beginning, are for training, as an array; None:
    conversations, which stay whole.

    Of every n-th document, from the second on, n = 1 / fraction, none are, unless val would get more than
    its fraction of all; of a single text all but the end, as in nanoGPT.
    """
    if source.chats:
        return None
    lengths = np.fromiter((sum(map(len, document)) for document in documents_of(source)), np.int64)
    is_val = np.arange(len(lengths)) % round(1 / fraction) == min(1, len(lengths) - 1)
    most = lengths.sum() - int(lengths.sum() * (1 - fraction))
    return lengths - np.diff(np.minimum(np.cumsum(lengths * is_val), most), prepend=0)


def split_texts(source, fraction, n_train):
    """(split, document or a part of it, the document's number from 1 on; 0: it is the only text). n_train:
    of characters_to_train_on."""
    for n, document in enumerate(documents_of(source)):
        if source.chats:
            yield 'val' if n % round(1 / fraction) == 1 else 'train', document, n + 1
        else:
            for split, parts in itertools.groupby(cut_in_two(document, n_train[n]), lambda part: part[0]):
                yield split, (block for _, block in parts), n + 1 if len(n_train) > 1 else 0


def cut_in_two(blocks, n_train):
    for block in blocks:
        if n_train:
            yield 'train', block[:n_train]
        if len(block) > n_train:
            yield 'val', block[n_train:]
        n_train = max(n_train - len(block), 0)


# encoding ---------------------------------------------------------------------------------------------------

def refuse_special(text, special, place):
    """Raises ValueError if the pattern `special` is in the text."""
    if special and (mark := re.search(special, text)):
        around = text[max(0, mark.start() - 20):mark.end() + 20]
        raise ValueError(f'{place}: {mark[0]!r} in {around!r} is a special token of the tokenizer: remove '
                         'it, or learn it as one by --special_tokens=tokens, or, of documents but not of '
                         'conversations, as plain text by --special_tokens=text')


def text_items(texts, tok, special, counts):
    """((split, piece, whether it begins a text, whether it ends one of several), its characters)."""
    for split, document, number in texts:
        counts['documents'] = number
        if number and tok.eot is None:
            raise ValueError(f'the tokenizer {tok.name} has no end-of-text token to keep documents apart: '
                             'name another by --tokenizer')
        for n, (piece, last) in enumerate(pieces(document, tok)):
            refuse_special(piece, special, f'document {number:,}')
            yield (split, piece, n == 0, last and number > 0), len(piece)


def chat_items(texts, special, counts):
    """((split, Conversation), its characters)."""
    for split, conversation, counts['documents'] in texts:
        text = '\n'.join(contents(conversation))
        refuse_special(text, special, conversation.place)
        yield (split, conversation), len(text)


def encode_texts(tok, as_tokens, group):
    """[(split, text, begins, ends)] -> [(split, ids, None, bytes of text)], with bos and end of text.
    as_tokens: special tokens' texts become their ids, and count no bytes."""
    encoded, encode = [], tok.encode_chat if as_tokens else tok.encode_array
    for split, text, begins, ends in group:
        parts = tok.bos if begins else (), encode(text), (tok.eot,) if ends else ()
        ids = np.concatenate([np.asarray(part, dtype_of(tok.n_vocab)) for part in parts])
        plain = re.sub(tok.special_pattern, '', text) if as_tokens else text
        encoded.append((split, ids, None, len(plain.encode())))
    return encoded


def encode_chats(tok, group):
    """[(split, Conversation)] -> [(split, ids, mask, bytes that are learnt)]."""
    encoded = []
    for split, conversation in group:
        ids, mask = encode_conversation(tok, conversation)
        encoded.append((split, ids, mask, int(tok.sizes[ids[mask == 1]].sum())))
    return encoded


def encode_conversation(tok, conversation):
    """(ids, mask); the mask, uint8, is 1 for the assistant's answers and their end marks.

    An answer begins where the ids differ from the rendered prompt's, and ends with the first stop token.
    Raises ValueError if the template shows no such place.
    """
    place, messages, tools = conversation
    text = tok.render(messages, False, tools)
    ids = np.array(tok.encode_chat(text), dtype_of(tok.n_vocab))
    mask, end = np.zeros(len(ids), np.uint8), 0
    stops = np.flatnonzero(np.isin(ids, tok.stop_tokens))
    for n, message in enumerate(messages):
        if message['role'] == 'assistant':
            prompt = tok.render(messages[:n], True, tools)
            agrees = text.startswith(prompt)
            if not agrees:  # it may set up thinking otherwise than here
                prompt = os.path.commonprefix([prompt, text])
                agrees = prompt.startswith(tok.render(messages[:n], False, tools))
            prompt_ids = np.array(tok.encode_chat(prompt)[:len(ids)])
            begin = int(np.argmin(np.append(prompt_ids == ids[:len(prompt_ids)], False)))
            later = stops[stops >= max(begin, end)]
            if not (agrees and len(later)):
                raise ValueError(f'{place}, message {n + 1}: the chat template renders what is before this '
                                 'answer in another way when more follows, or ends the answer with none of '
                                 f'{[tok.decode([i]) for i in tok.stop_tokens]}')
            end = later[0] + 1
            mask[begin:end] = 1
    return ids, mask


def pack(encoded, block_size, eot, counts):
    """(split, ids, mask, n_bytes) of conversations -> the same in slots of block_size tokens.

    Each conversation begins with eot, which also fills slots; longer ones are cut. A split ends with one more
    token: a sequence's last target is the first token of the next slot.
    """
    used, room = dict.fromkeys(SPLITS, 0), block_size - 1
    for split, ids, mask, n_bytes in encoded:
        counts['cut'] += len(ids) > room
        for begin in range(0, len(ids), room):
            piece, learnt = ids[begin:begin + room], mask[begin:begin + room].copy()
            if begin:  # its first token has no context
                learnt[0] = 0
            fill = 0
            if used[split] + 1 + len(piece) > block_size:
                fill, used[split] = block_size - used[split], 0
            used[split] += 1 + len(piece)
            counts['filled'] += 1 + len(piece)
            yield (split, np.concatenate([np.repeat(eot, fill + 1), piece]),
                   np.concatenate([np.zeros(fill + 1, np.uint8), learnt]), 0 if begin else n_bytes)
    for split, n in used.items():
        yield split, np.repeat(eot, block_size - n + 1), np.zeros(block_size - n + 1, np.uint8), 0


def separator(tok):
    """The id between conversations: an end of text that ends no message, if there is one."""
    return next((tok.special[text] for text in (EOT, '<|end_of_text|>') if text in tok.special), tok.eot)


def dtype_of(n_vocab):
    return np.dtype('<u2' if n_vocab <= 1 << 16 else '<u4')


# writing ----------------------------------------------------------------------------------------------------

def write_dataset(folder, texts, tok, label, procs=None, block_size=None, special_tokens='refuse'):
    """Makes a prepared folder of split_texts, with block_size of conversations; returns its meta. A run
    that fails changes nothing."""
    counts, eot = collections.Counter(), tok.eot
    special = tok.special_pattern if special_tokens == 'refuse' else None
    if block_size is None:
        items = text_items(texts, tok, special, counts)
        encode, least = functools.partial(encode_texts, tok, special_tokens == 'tokens'), 16
    else:
        eot = separator(tok)
        if not tok.chat_template or eot is None:
            raise ValueError(f'the tokenizer {tok.name} has no chat template or no end-of-text token, which '
                             'conversations need: name another by --tokenizer')
        items = chat_items(texts, special, counts)
        encode, least = functools.partial(encode_chats, tok), 2  # rendered anew for each answer: slow
    groups = in_processes(1 if tok.anywhere else procs, encode, in_groups(items), least)
    encoded = itertools.chain.from_iterable(groups)
    if block_size is not None:
        encoded = pack(encoded, block_size, np.array(eot, dtype_of(tok.n_vocab)), counts)
    with new_files(folder) as temp, contextlib.closing(groups):
        checksum = write_bins(temp, encoded, f'{tok.name} encoding', counts)
        return write_meta(temp, tok, label, eot, {**counts, 'checksum': checksum, 'block_size': block_size})


def write_bins(folder, encoded, label, counts):
    """Writes (split, ids, mask or None, bytes) to .bin and .mask.bin, adds to counts -> {name: sha256}."""
    progress = ProgressLine(label)
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda name: stack.enter_context(open(os.path.join(folder, name), 'wb')))
        for split, ids, mask, n_bytes in encoded:
            opened(f'{split}.bin').write(ids)
            if mask is not None:
                opened(f'{split}.mask.bin').write(mask)
            counts[f'{split}_tokens'] += len(ids)
            counts[f'{split}_learnt'] += len(ids) if mask is None else int(mask.sum())
            counts[f'{split}_bytes'] += n_bytes  # of text that is learnt, not of end of text
            progress.add(n_bytes)
    progress.close()
    for split in SPLITS:
        if not counts[f'{split}_learnt']:
            raise ValueError(f'{split} has no token to learn: prepare more text (of conversations two or '
                             'more, or with a larger --block_size)')
    # val loss / ln 2 / this = bits per byte
    counts['bytes_per_token'] = counts['val_bytes'] / counts['val_learnt']
    return {name: sha256_of(os.path.join(folder, name)) for name in os.listdir(folder)}


FILES = [*[f'{split}{end}' for split in SPLITS for end in ('.bin', '.mask.bin')],
         *[name for table in TABLES.values() for name in table.values()], 'meta.json']  # of a prepared folder


def refuse_others(folder, label):
    """Raises ValueError if the folder has data of another source."""
    if any(os.path.exists(os.path.join(folder, name)) for name in FILES):
        there = read_meta(folder).get('source', 'unknown source')
        if there != label:
            raise ValueError(f'{folder} holds data of {there}, not of {label}: choose another --out, or '
                             'replace it by --overwrite=True')


@contextlib.contextmanager
def new_files(folder):
    """A temporary folder whose FILES replace those in `folder` if all goes well, meta.json last."""
    os.makedirs(folder, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix='.prepare-', dir=folder) as temp:
            yield temp
            for name in FILES:
                if os.path.exists(os.path.join(temp, name)):
                    os.replace(os.path.join(temp, name), os.path.join(folder, name))
                elif os.path.exists(os.path.join(folder, name)):
                    os.remove(os.path.join(folder, name))
    finally:
        if not os.listdir(folder):
            os.rmdir(folder)


def write_meta(folder, tok, label, eot, counts):
    """Writes meta.json and the tokenizer's table; returns the meta."""
    state = tok.state()
    texts = {name: state.pop(key) for key, name in TABLES.get(state['kind'], {}).items()}
    meta = {'source': label, 'vocab_size': tok.n_vocab, 'dtype': dtype_of(tok.n_vocab).name, 'eot': eot,
            **counts, 'tokenizer': state}
    for name, text in {**texts, 'meta.json': json.dumps(meta, indent=1)}.items():
        with open(os.path.join(folder, name), 'w', encoding='utf-8', newline='') as f:
            f.write(text)
    return meta


def fetch_shards(folder, source):
    """Downloads a source's shards, in GPT-2's tokens, to folder; returns its meta."""
    tok = make_tokenizer('gpt2')  # before the long wait, lest it be missing
    val, *train = (read_shard(fetch(url, os.path.join(folder, os.path.basename(url))), np.dtype('<u2'))
                   for url in source.shards)
    n_bytes = sum(int(tok.sizes[ids].sum()) for ids in parts_of(val))
    counts = {'train_tokens': sum(shard.n_tokens for shard in train), 'val_tokens': val.n_tokens,
              'bytes_per_token': n_bytes / val.n_tokens}
    with new_files(folder) as temp:
        return write_meta(temp, tok, source.label, tok.eot, counts)


# reading ----------------------------------------------------------------------------------------------------

class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and text, but no classes, by which alone a pickle could run code."""
    def find_class(self, module, name):
        raise ValueError(f'meta.pkl asks for {module}.{name}, but only plain data is read')


def read_meta(folder):
    """meta.json, nanoGPT's meta.pkl or an assumed dict with at least vocab_size, dtype, eot, bytes_per_token
    (None: unknown), tokenizer (its state, None: GPT-2's), block_size (of slots, or None)."""
    usual = {'dtype': 'uint16', **dict.fromkeys(('eot', 'bytes_per_token', 'tokenizer', 'block_size'))}
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        with open(path, encoding='utf-8') as f:
            return {**usual, **json.load(f)}
    path = os.path.join(folder, 'meta.pkl')
    if os.path.exists(path):
        with open(path, 'rb') as f:
            meta = PlainUnpickler(f).load()
        if 'itos' in meta:
            chars = [meta['itos'].get(i, '') for i in range(meta['vocab_size'])]
            usual['tokenizer'] = {'kind': 'char', 'chars': chars, 'eot': None}
        return {**usual, 'vocab_size': meta['vocab_size']}
    print_once(f'{folder} has no meta.json or meta.pkl: assuming the GPT-2 encoding')
    return {**usual, 'vocab_size': 50304, 'eot': 50256}  # nanoGPT's size, 50257 rounded up


def is_prepared(folder):
    """Whether prepare.py, or nanoGPT, has made this folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ('meta.json', 'meta.pkl'))


def data_folder(name):
    """data/<name>, or the path `name` if only that is a folder."""
    folder = os.path.join('data', name.removeprefix(f'data{os.sep}'))
    return name if os.path.isdir(name) and not os.path.isdir(folder) else folder


def is_run(path):
    """Whether this is a run of train.py, or one of its checkpoints."""
    return os.fspath(path).endswith('.pt') or os.path.exists(os.path.join(path, 'ckpt.pt'))


def load_tokenizer(folder):
    """The tokenizer of a prepared folder, or of a run."""
    if is_run(folder):
        from hub import checkpoint_path, read_checkpoint  # torch takes a second
        return tokenizer_from_state(read_checkpoint(checkpoint_path(folder))['tokenizer'])
    state = read_meta(folder)['tokenizer']
    if state is None:
        return make_tokenizer('gpt2')
    for key, name in TABLES.get(state['kind'], {}).items():
        with open(os.path.join(folder, name), encoding='utf-8', newline='') as f:
            state[key] = f.read()
    return tokenizer_from_state(state)


def prepare_command(folder):
    """The command that prepares this folder, guessed from its name."""
    name = 'shakespeare_gpt2' if dataset_name(folder) == 'shakespeare' else dataset_name(folder)
    names = [source for source in SOURCES if f'{name}_'.startswith(f'{source}_')]
    if not names:
        return shlex.join(['python', 'prepare.py', 'my.txt', f'--out={name}'])
    source = max(names, key=len)
    kind = re.sub(r'^bpe(?=\d+$)', 'bpe:', name[len(source) + 1:])
    flags = [f'--tokenizer={kind}'] * (kind not in ('', SOURCES[source]().tokenizer))
    return shlex.join(['python', 'prepare.py', *[source] * (source != 'pystdlib'), *flags])


HEADER_BYTES, HEADER_MAGIC = 1024, 20240520  # of foreign shards: int32 magic, version, tokens, zeros
Shard = collections.namedtuple('Shard', 'path dtype offset n_tokens')


def read_shard(path, dtype):
    """The Shard at path, with or without a header."""
    head = np.fromfile(path, '<i4', 3)
    if len(head) < 3 or head[0] != HEADER_MAGIC:
        return Shard(path, dtype, 0, os.path.getsize(path) // dtype.itemsize)
    return Shard(path, np.dtype('<u2'), HEADER_BYTES, int(head[2]))


def read_elements(shard, first, n):
    return np.fromfile(shard.path, shard.dtype, n, offset=shard.offset + first * shard.dtype.itemsize)


def parts_of(shard, size=1 << 22):
    """A shard's elements in parts."""
    for first in range(0, shard.n_tokens, size):
        yield read_elements(shard, first, size)


class Bins:
    """The tokens of one split: folder/<split>.bin, or else its shards *<split>*.bin, sorted.

    Sequence i of a shard is its block_size + 1 tokens from i * block_size on, so that each token but the
    first, and the tail, is a target once. Ids are checked as they are read once vocab_size is set. The mask
    beside x.bin is x.mask.bin, a byte for each token; `masks` is empty where there is none.
    """
    def __init__(self, folder, split):
        self.vocab_size, self.name = None, os.path.join(folder, f'{split}.bin')
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), f'*{split}*.bin')))
        if os.path.exists(self.name):
            paths = [self.name]
        paths = [path for path in paths if not path.endswith('.mask.bin')]
        if not paths:
            raise FileNotFoundError(f'{folder} is not prepared: no {split}.bin; run '
                                    f'`{prepare_command(folder)}`')
        dtype = np.dtype(read_meta(folder)['dtype']).newbyteorder('<')
        self.shards = [read_shard(path, dtype) for path in paths]
        self.n_tokens = self.n_targets = sum(shard.n_tokens for shard in self.shards)
        masks = [f'{shard.path.removesuffix(".bin")}.mask.bin' for shard in self.shards]
        self.masks = [read_shard(path, np.dtype(np.uint8)) for path in masks if os.path.exists(path)]
        if self.masks:
            if [mask.n_tokens for mask in self.masks] != [shard.n_tokens for shard in self.shards]:
                raise ValueError(f'{self.name}: its masks do not have a byte for each token: prepare again')
            self.n_targets = sum(np.count_nonzero(part) for mask in self.masks for part in parts_of(mask))

    def ends(self, block_size):
        """The numbers of sequences up to the end of each shard."""
        return np.cumsum([max(shard.n_tokens - 1, 0) // block_size for shard in self.shards])

    def n_sequences(self, block_size):
        """Raises ValueError if there is none."""
        n = int(self.ends(block_size)[-1])
        if not n:
            raise ValueError(f'{self.name} has {self.n_tokens:,} tokens, a sequence needs block_size+1 = '
                             f'{block_size + 1}: lower --block_size or prepare more text')
        return n

    def check_vocabulary(self, vocab_size, advice):
        """Reads every token. Raises ValueError if one is outside such a vocabulary."""
        for shard in self.shards:
            for part in parts_of(shard):
                check_ids(part, vocab_size, shard.path, advice)

    def batch(self, indices, block_size):
        """Inputs and targets, int64 (len(indices), block_size); targets that the mask leaves out are -1."""
        ids = self._sequences(self.shards, indices, block_size)
        if self.vocab_size:
            check_ids(ids, self.vocab_size, self.name, 'prepare it again, or raise --vocab_size')
        inputs, targets = ids[:, :-1], ids[:, 1:]
        if self.masks:
            targets = np.where(self._sequences(self.masks, indices, block_size)[:, 1:], targets, -1)
        return inputs, targets

    def _sequences(self, shards, indices, block_size):
        """int64 (len(indices), block_size + 1) of self.shards or self.masks."""
        self.n_sequences(block_size)  # an error, if there is none
        ends = self.ends(block_size)
        numbers = np.searchsorted(ends, indices, side='right')
        firsts = (np.asarray(indices) - np.append(0, ends)[numbers]) * block_size
        sequences = np.empty((len(indices), block_size + 1), np.int64)
        for row, (number, first) in enumerate(zip(numbers, firsts)):  # mapped, a file would fill up the RSS
            sequences[row] = read_elements(shards[number], first, block_size + 1)
        return sequences


def check_ids(ids, vocab_size, path, advice):
    """Raises ValueError if an id is outside such a vocabulary."""
    if ids.max(initial=0) >= vocab_size:
        raise ValueError(f'{path}: token {ids.max()} is outside the vocabulary of {vocab_size}: {advice}')


# looking ----------------------------------------------------------------------------------------------------

def look(folder):
    """Prints a prepared folder's counts, document lengths, commonest tokens and beginning."""
    folder = data_folder(folder)
    splits = [Bins(folder, split) for split in reversed(SPLITS)]
    meta, tok = read_meta(folder), load_tokenizer(folder)
    print(f'{folder}: {meta.get("source")}, tokenizer {tok.name}, vocabulary '
          f'{meta["vocab_size"]:,}, {meta["dtype"]}, {meta["bytes_per_token"] or np.nan:.2f} bytes a token')
    eot = tok.eot if meta['eot'] is None else meta['eot']
    for bins in splits:
        ids = next(parts_of(bins.shards[0]))
        mask = next(parts_of(bins.masks[0])) if bins.masks else None
        lengths = np.diff(np.flatnonzero(ids == eot), prepend=-1, append=len(ids)) - 1
        lengths = lengths[lengths > 0]
        print(f'{bins.name}: {bins.n_tokens:,} tokens, {bins.n_targets / bins.n_tokens:.1%} learnt; in the '
              f'first {len(ids):,} {len(lengths):,} documents of',
              *np.quantile(lengths, [0, 0.5, 1], method='lower'),
              'tokens (shortest, median, longest)')
    different, counts = np.unique(ids, return_counts=True)
    print('commonest:', ', '.join(f'{tok.decode([different[i]])!r} {counts[i] / len(ids):.1%}'
                                  for i in np.argsort(-counts, kind='stable')[:12]))
    n = meta['block_size'] or 256
    begin, end = ('\033[7m', '\033[0m') if sys.stdout.isatty() else ('[[', ']]')
    print(f'the first tokens{"" if mask is None else f", {begin}learnt{end}"}:')
    mask = np.zeros(n, bool) if mask is None else mask[:n]
    for learnt, run in itertools.groupby(zip(ids, mask), key=lambda pair: pair[1]):
        text = tok.decode([i for i, _ in run])
        print(f'{begin}{text}{end}' if learnt else text, end='')
    print()


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if words[:1] == ['look']:
        look(words[1] if words[1:] else FIRST_RUN)
        sys.exit()
    if words[1:]:
        raise ValueError(f'{words[1]!r} is one source too many: put files into a folder, or quote a glob')
    name = words[0] if words else source
    source = find_source(name, field, errors)
    unused = ['errors', 'field'] if name in SOURCES else ['shards', *['field'] * (not source.records)]
    refuse_unused(given, unused, f'on {source.label}')
    choices = ['refuse', 'tokens', *['text'] * (not source.chats)]  # conversations are rendered with tokens
    if special_tokens not in choices:
        raise ValueError(f'special_tokens={special_tokens!r}: must be {" or ".join(choices)}')
    tokenizer = tokenizer or source.tokenizer or (FIRST_RUN if source.chats else 'byte')
    folder = output_folder(out, source, tokenizer)
    if (out or name not in SOURCES) and not overwrite:
        refuse_others(folder, source.label)

    if source.shards:
        if tokenizer != 'gpt2':
            raise ValueError(f"tokenizer={tokenizer!r}: {source.name} has tokens already, gpt2's")
        meta = fetch_shards(folder, source)
    else:
        n_train = characters_to_train_on(source, val_fraction)
        texts = functools.partial(split_texts, source, val_fraction, n_train)
        if (is_prepared(tokenizer) or is_run(tokenizer)) and pattern is None:
            tok = load_tokenizer(tokenizer)
        elif tokenizer.startswith('data' + os.sep) and not os.path.exists(tokenizer):
            raise FileNotFoundError(f'tokenizer={tokenizer!r}: that folder is not prepared; '
                                    f'`{prepare_command(tokenizer)}` does it')
        else:
            blocks = contents if source.chats else iter
            tok = make_tokenizer(
                tokenizer, texts=(blocks(document) for _, document, _ in texts()),
                training=(blocks(document) for split, document, _ in texts() if split == 'train'),
                by_document=source.chats or len(n_train) > 1, procs=procs, pattern=pattern)
        meta = write_dataset(folder, texts(), tok, source.label, procs, block_size if source.chats else None,
                             special_tokens)
        many = f'{meta["documents"]:,} {"conversations" if source.chats else "documents"}'
        print(f'{source.label}:', many if meta['documents'] else 'one text, cut in two')

    print(f'{folder}: {meta["train_tokens"]:,} train and {meta["val_tokens"]:,} val tokens, '
          f'{meta["bytes_per_token"]:.2f} bytes a token, vocabulary {meta["vocab_size"]:,}')
    if (least := min(meta['train_tokens'], meta['val_tokens'])) <= block_size:
        print(f'warning: one split has {least:,} tokens, fewer than a context of {block_size} and its '
              'last target: prepare more text, or train with a smaller --block_size')
    if source.chats:
        filled = meta['filled'] / (meta['train_tokens'] + meta['val_tokens'])
        print(f'slots of {block_size} tokens, {filled:.0%} full; {meta["train_learnt"]:,} train tokens are '
              f'learnt; {meta["cut"]:,} longer ones are cut')
    config, usual = (['config/chat.py'], 'pydoc_chat') if source.chats else ([], dataset_name(FIRST_RUN))
    dataset = dataset_name(folder)
    flags = [f'--dataset={dataset}'] * (dataset != usual)
    if source.chats and tokenizer != FIRST_RUN:  # that of config/chat.py's base
        flags.append(f'--init_from={tokenizer if is_run(tokenizer) else "RUN-WITH-THIS-TOKENIZER"}')
    print('next:', shlex.join(['python', 'train.py', *config, *flags]))
