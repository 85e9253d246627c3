"""From text to tokens: writes data/<name>/train.bin, val.bin and meta.json, which train.py reads.

    $ python prepare.py                               # Python's library: data/pystdlib_bpe4096
    $ python prepare.py shakespeare --tokenizer=char  # data/shakespeare_char
    $ python prepare.py my.txt --tokenizer=gpt2 --out=mydata
    $ python prepare.py 'notes/**/*.md'               # a quoted glob, or a folder: a document for each file
    $ python prepare.py tales.jsonl.gz --field=story  # a document for each record; .json, .csv, .parquet too
    $ zcat *.gz | python prepare.py -
    $ python prepare.py climbmix --tokenizer=gpt2     # text of the web, 10 files; fineweb_edu: tokens
    $ python prepare.py chats.jsonl                   # conversations: with target masks
    $ python prepare.py look data/chats               # shows a prepared folder

A .bin file is nothing but tokens, little-endian, uint16 if the vocabulary fits, else uint32.
"""
import ast
import atexit
import collections
import contextlib
import csv
import functools
import glob
import gzip
import hashlib
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
import typing
from pathlib import Path

from configurator import check_values, configure, package, print0, reading, refuse_unused

# A name in SOURCES, a file (perhaps .gz), a folder or glob, or - for standard input
source = 'pystdlib'
field = 'text'             # JSON, CSV, parquet: the field with a record's text or messages
# Bytes that are not UTF-8: strict stops there, replace puts U+FFFD, ignore leaves them out. ignore also
# leaves out conversations that the chat template rejects.
errors = 'strict'          # [in ('strict', 'replace', 'ignore')]
# byte, char, bpe:4096 (trained here), tiktoken's (gpt2, o200k_base...), a folder with tokenizer.json, another
# dataset's or a run's; None: the source's, for conversations that of data/pystdlib_bpe4096, else byte
tokenizer: str | None = None
special_tokens = 'text'    # what those inside records become [in ('text', 'tokens', 'refuse')]
out: str | None = None     # a name, or a path with a slash; None: <source>_<tokenizer>
overwrite = False          # replaces data of another source in out
# for validation: each 10th document, or the end of one text; at most 10M characters or 10,000 conversations
val_fraction = 0.1         # [> 0] [<= 0.5]
block_size = 256           # of the slots that conversations are packed into; as train.py's [>= 2]
shards = 10                # files of a source that has many (fineweb, fineweb_edu: to train on) [>= 1]
procs: int | None = None   # processes that encode; None: one for each core [>= 1]
settings = configure(globals(), words=2, texts=True)
words = settings.words
given = settings.given

import numpy as np

from tokenizer import (
    EOT,
    SPLITS,
    TABLES,
    THOUGHTS,
    ProgressLine,
    in_groups,
    in_processes,
    json_value,
    make_tokenizer,
    pieces,
    tiktoken_tokenizer,
    tokenizer_from_state,
    without_surrogates,
)

# about the 200 batches of 12 x 1,024 tokens that nanoGPT's evaluation reads
VAL_CHARACTERS = 10_000_000
VAL_CHATS = 10_000
RETRY_WAITS = 0.5, 1, 2, 4  # seconds between the tries of a download
print_once = functools.cache(print0)
cleanup = contextlib.ExitStack()  # removes temporary files
atexit.register(cleanup.close)


# files as documents -----------------------------------------------------------------------------------------
# A document is an iterable of blocks of text, or a Conversation.

@contextlib.contextmanager
def open_text(path, errors):
    """The file's text, unpacked. Raises ValueError if it is damaged or not UTF-8."""
    opened = gzip.open if path.lower().endswith('.gz') else open
    with reading(path), opened(path, 'rt', encoding='utf-8-sig', errors=errors, newline='') as f:
        try:
            if '\0' in f.read(999):
                raise ValueError(f'{path} is not text: unpack or convert it, or leave it out')
            f.seek(0)
            yield f
        except UnicodeDecodeError as e:
            raise ValueError(f'{path} is not UTF-8 text at {e.object[e.start:e.start + 20]!r}: convert it, '
                             'leave it out, or have U+FFFD there by prepare.py --errors=replace') from None


def ending(path):
    """'.jsonl' of a.jsonl and of a.jsonl.gz."""
    return Path(path.lower().removesuffix('.gz')).suffix


def read_text(path, errors):
    """The file's text in blocks."""
    with open_text(path, errors) as f:
        yield from iter(functools.partial(f.read, 1 << 20), '')


def text_documents(path, errors):
    """A text file is one document; with <|endoftext|> in its first 16 MB, one for each part."""
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


def json_records(path, errors='strict'):
    """The records of JSON lines, or of one array. Raises ValueError for a line that is not JSON."""
    with open_text(path, errors) as f:
        # nanochat's lines are arrays of messages
        is_array = re.match(r'\s*\[(?!\s*{\s*"(role|from)".*]\s*$)', next(filter(str.strip, f), ''))
        f.seek(0)
        for n, record in enumerate(json.load(f) if is_array else map(str.strip, f), 1):
            place = f'{path}, {"record" if is_array else "line"} {n}'
            if is_array:
                yield place, record
            elif record:
                try:
                    yield place, json.loads(record)
                except ValueError as e:
                    raise ValueError(f'{place}: {e}: put each record on one line, or all into one array, or '
                                     'remove the line') from None


def csv_records(path, errors, delimiter=','):
    """The records of comma-separated values below a line with the fields' names."""
    csv.field_size_limit(1 << 30)
    with open_text(path, errors) as f:
        rows = csv.DictReader(f, delimiter=delimiter, strict=True)
        place = path
        try:
            for row in rows:
                place = f'{path}, line {rows.line_num}'
                if None in row:
                    raise ValueError(f'{place}: more values than fields: quote commas')
                yield place, row
        except csv.Error as e:
            raise ValueError(f'{place}: {e} below: close the quote, or double a quote in a value') from None


def parquet_records(path, errors):
    """The records of a parquet file."""
    parquet = package('pyarrow.parquet', f'{path} needs', 'pyarrow')
    with reading(path):
        file = parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)  # in parts
        batches = file.iter_batches(256, use_threads=False)  # encoding forks this process
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f'{path}, row {n}', record) for n, record in enumerate(rows, 1))


# By ending: functions of a path and errors, which yield ('file, line n', {field: value})
FORMATS = {'.jsonl': json_records, '.ndjson': json_records, '.json': json_records, '.csv': csv_records,
           '.tsv': functools.partial(csv_records, delimiter='\t'),
           '.parquet': parquet_records}


def format_of(path):
    """The function of FORMATS that reads this file; None for text, also for .json that begins like neither an
    array of objects nor JSON lines."""
    if ending(path) == '.json':
        with open_text(path, 'replace') as f:
            if not re.match(r'\s*(\[\s*(\[\s*)?{|{\s*")', f.read(999)):
                return None
    return FORMATS.get(ending(path))


def file_documents(paths, field='text', errors='strict'):
    """A document for each record's text in this field, or a Conversation; text_documents of others."""
    for path in paths:
        records = format_of(path)
        if not records:
            yield from text_documents(path, errors)
            continue
        for place, record in records(path, errors):
            yield read_record(place, record, field)


# conversations ----------------------------------------------------------------------------------------------

# messages: [{'role': 'user', 'content': text, perhaps more}, ...]; tools: JSON schemas
Conversation = collections.namedtuple('Conversation', 'place messages tools', defaults=[None])
NAMES = {  # a dataset's name of a field -> read_record's name
    'conversations': 'messages', 'prompt': 'question', 'instruction': 'question', 'input': 'more',
    'context': 'more', 'output': 'answer', 'response': 'answer', 'completion': 'answer',
    'system_prompt': 'system', 'from': 'role', 'value': 'content'}
SPEAKERS = {'human': 'user', 'gpt': 'assistant', 'chatgpt': 'assistant', 'developer': 'system'}
ROLES = 'system', 'user', 'assistant', 'tool'
JSON_TEXTS = 'messages', 'conversations', 'history', 'tools', 'tool_calls', 'arguments'  # perhaps JSON text
LEARNED = 'weight', 'loss_mask', 'loss', 'train', 'trainable', 'train_on_turn'  # 0 or false: no target


def read_record(place, record, field='text'):
    """A record's document: [its text], or a Conversation if it has messages, or a question and an answer.
    Prints which fields of text or lists are not used. Raises ValueError if it has neither."""
    if isinstance(record, list):  # nanochat's
        record = {'messages': record}
    if not isinstance(record, dict):
        raise ValueError(f'{place}: {record!r:.80} is not an object like {{"text": "a tale"}}')
    if isinstance(record.get(field), str) and field not in JSON_TEXTS:
        return [record[field]]
    asked = {field: record[field]} if field in record else {}  # before other fields
    rest = json_value(asked | record, from_json) if asked or field == 'text' else {}
    rest = renamed(rest, NAMES | {field: 'messages'})
    messages = rest.pop('messages', None)
    if messages is None and rest.get('answer'):
        question = rest.pop('question', None)
        if isinstance(rest.get('more'), str):
            more = rest.pop('more')
            question = f'{question}\n\n{more}' if question and more else question or more
        answer = rest.pop('answer')
        if isinstance(question, list) and isinstance(answer, list):  # TRL's, which learns the answer only
            messages = [dict(one, learn=False) for one in question] + answer
        else:
            messages = make_messages([question, answer])
        history = rest.get('history')  # LLaMA-Factory's earlier turns
        if isinstance(history, list) and {*map(type, history)} <= {list}:
            messages = make_messages(*rest.pop('history')) + messages
    if not messages or not isinstance(messages, list):
        raise ValueError(f'{place}: no text in field {field!r} and no messages in {record!r:.200}: mend the '
                         'record, or choose another field by --field')
    messages = [read_message(f'{place}, message {n}', message) for n, message in enumerate(messages, 1)]
    if messages[0]['role'] != 'system' and (system := rest.pop('system', None)):
        messages.insert(0, read_message(f'{place}, system', {'role': 'system', 'content': system}))
    tools = rest.pop('tools', None) or messages[0].pop('tools', None)  # MiniMind's
    if unused := [name for name, value in record.items() if value and isinstance(value, (str, list, dict))
                  and rest.keys() & {name, NAMES.get(name)}]:
        print_once(f'warning: fields beside conversations that are not used: {", ".join(unused)}')
    return Conversation(place, messages, tools or None)


def read_message(place, message):
    """A message as chat templates read it, 'learn' False if it is not to be learned. Raises ValueError if it
    lacks role or content."""
    read = renamed(message, NAMES) if isinstance(message, dict) else {}
    role = read.get('role')
    read['role'] = SPEAKERS.get(role, role)
    calls = read.get('tool_calls') or []
    if isinstance(parts := read.get('content'), list) and all(
            isinstance(one, dict) and isinstance(one.get('text'), str) for one in parts):  # OpenAI's
        read['content'] = ''.join(one['text'] for one in parts)
    if calls or read.keys() & {*THOUGHTS}:
        read.setdefault('content', '')
    if (read['role'] not in ROLES or not isinstance(read.get('content'), str)
            or not {*map(type, calls)} <= {dict}):
        raise ValueError(f'{place}: {message!r:.80} needs a role, one of {", ".join(ROLES)}, and text as its '
                         'content')
    if {'0', '0.0', 'false'} & {str(read.get(name)).lower() for name in LEARNED}:
        read['learn'] = False
    return read


def renamed(record, names):
    """The record with its fields renamed; of several that get the same name only the first."""
    found = {}
    for key, value in record.items():
        name = names.get(key, key)
        found.setdefault(key if name in found else name, value)
    return found


def from_json(value, key):
    """The value of a JSON text if its field is one of JSON_TEXTS; other values stay."""
    if key in JSON_TEXTS:
        with contextlib.suppress(TypeError, ValueError):
            return json.loads(value)
    return value


def make_messages(*turns):
    """(question, answer), ... as messages."""
    return [{'role': role, 'content': content} for turn in turns
            for role, content in zip(('user', 'assistant'), turn)]


def contents(conversation):
    """The texts of a conversation's messages."""
    return [without_surrogates(message.get('content') or '') for message in conversation.messages]


# conversations about Python's library -----------------------------------------------------------------------

LEFT_OUT = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
# Modules that are not everywhere, or of no interest
NOT_ASKED = {'antigravity', 'distutils', 'encodings', 'ensurepip', 'idlelib', 'lib2to3', 'msilib', 'ntpath',
             'nturl2path', 'site', 'this', 'tkinter', 'turtle', 'turtledemo', 'venv'}
ANSWER = 120  # characters of the longest answer
WORDINGS = {
    ast.Module: ('What is the module {} for?', 'Explain the module {}.', 'What is {}?'),
    ast.ClassDef: ('What is {}?', 'Explain {}.', 'What is {} for?'),
    ast.FunctionDef: ('What does {} do?', 'Explain {}.', 'What is {} for?'),
}
WORDINGS[ast.AsyncFunctionDef] = WORDINGS[ast.FunctionDef]


def library_files():
    """The files of Python's standard library, without tests and installed packages."""
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path('stdlib')):
        folders[:] = set(folders) - LEFT_OUT
        files += [os.path.join(folder, name) for name in names if name.endswith('.py')
                  and not name.startswith('_sysconfigdata')]  # this machine's compiler flags
    return sort_files(files)


def sort_files(files):
    """Files in an order that is the same on every system."""
    return sorted(files, key=lambda path: path.split(os.sep))


def library_docs():
    """(name, WORDINGS, docstring, arguments) of the library's modules, classes and functions."""
    for path in map(Path, library_files()):
        parts = path.with_suffix('').relative_to(sysconfig.get_path('stdlib')).parts
        if not NOT_ASKED.intersection(parts):
            module = '.'.join(parts).removesuffix('.__init__').replace('posixpath', 'os.path')
            tree = ast.parse(path.read_bytes())
            for node in tree, *tree.body:
                if wordings := WORDINGS.get(type(node)):
                    name = module if node is tree else f'{module}.{node.name}'
                    arguments = ast.unparse(node.args) if hasattr(node, 'args') else ''
                    yield name, wordings, ast.get_docstring(node), arguments


def summary_of(doc):
    """A docstring's first sentence; None unless it is short and has words."""
    for paragraph in re.split(r'\n\s*\n', doc or ''):
        text = ' '.join(paragraph.split())
        if not re.match(r'[\w.]+\(', text):  # not a signature
            text = re.split(r'(?<=[.!?])\s+(?=[A-Z])', text)[0].rstrip(':.') + '.'
            return text if text[0].isalpha() and ' ' in text and len(text) <= ANSWER else None
    return None


def pydoc_chats():
    """Conversations about one to three functions, classes or modules, each asked about in two wordings, so
    that train has the answers to most questions of val."""
    asked = []
    order = random.Random(0)
    for n, (name, wordings, doc, arguments) in enumerate(library_docs()):
        summary = summary_of(doc)
        if summary and not re.search(r'\b_|-', name):
            first, *others = [wording.format(name) for wording in wordings]
            asked += [[(first, summary)], [(others[n % 2], summary)]]
            if 0 < len(arguments) < ANSWER // 2:
                takes = f'{name}({arguments})'
                asked[-2] += [('What arguments does it take?', takes)] * (n % 3 == 0)
                asked.append([(f'What arguments does {name} take?', takes)])
    order.shuffle(asked)
    asked = iter(asked)
    while turns := [turn for turns in itertools.islice(asked, order.randint(1, 3)) for turn in turns]:
        yield Conversation('pydoc_chat', make_messages(*turns))


# sources ----------------------------------------------------------------------------------------------------

class Source(typing.NamedTuple):
    """Where text comes from.

    documents() -> the documents, anew for each pass: def documents(): yield ['a text']; yield ['another']
    chats: they are Conversations. shards: addresses of files of tokens instead, the first for validation.
    tokenizer: the default; None: byte, for conversations FIRST_RUN's.
    """
    name: str  # of the dataset
    label: str  # the source in meta.json
    documents: typing.Callable | None = None
    chats: bool = False
    shards: list | None = None
    tokenizer: str | None = None
    unused: tuple = ('errors', 'field')  # settings without effect


def fetch(url, folder):
    """Downloads a file to the folder, unless it is there -> its path. Raises OSError if it cannot."""
    path = f'{folder}/{Path(url).name}'
    if os.path.exists(path):
        return path
    import requests
    os.makedirs(folder, exist_ok=True)
    for wait in *RETRY_WAITS, None:
        try:
            response = requests.get(url, stream=True, timeout=60)
            response.raise_for_status()
            size = int(response.headers.get('Content-Length', 0))  # urllib3 checks that all of it comes
            progress = ProgressLine(f'download {Path(url).name}', size)
            with open(f'{path}.part', 'wb') as f:
                for block in response.iter_content(1 << 16):
                    f.write(block)
                    progress.add(len(block))
            progress.show()
            os.replace(f'{path}.part', path)
            return path
        except requests.RequestException as e:
            if wait is None:
                raise OSError(f'cannot download {url} ({e!r:.100}): go online, bring it by other means to '
                              f'{path}, or use a text file that you have: python prepare.py my.txt') from e
            time.sleep(wait)


FIRST_RUN = 'data/pystdlib_bpe4096'  # what `python prepare.py` makes
HUB = 'https://huggingface.co/datasets'
MINIMIND = f'{HUB}/jingyaogong/minimind_dataset/resolve/main'


def download(name, url, most=1, **options):
    """The Source of files, downloaded to data/<name>. url: {}: the numbers of `most` files."""
    def documents():
        urls = map(url.format, range(min(shards, most)))
        return file_documents([fetch(url, f'data/{name}') for url in urls], errors=errors)
    return Source(name, name, documents, unused=('field',), **options)


def fineweb(name, prefix, most):
    """FineWeb in GPT-2's tokens, by Keller Jordan: files of 100M, the first for val."""
    names = ['val_000000', *[f'train_{i + 1:06d}' for i in range(min(shards, most))]]
    urls = [f'{HUB}/kjj0/{prefix}10B-gpt2/resolve/main/{prefix}_{part}.bin' for part in names]
    return Source(name, name, shards=urls, tokenizer='gpt2')


SOURCES = {source.name: source for source in (  # only documents() and fetch_shards download
    Source('pystdlib', f'pystdlib {platform.python_version()}',
           lambda: file_documents(library_files(), errors='replace'), tokenizer='bpe:4096'),
    download('shakespeare',
             'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'),
    download('tinystories', f'{HUB}/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt'),
    download('openwebtext',  # nanoGPT's
             f'{HUB}/Skylion007/openwebtext/resolve/main/plain_text/train-{{:05d}}-of-00080.parquet', 80,
             tokenizer='gpt2'),
    download('climbmix',  # nanochat's
             f'{HUB}/karpathy/climbmix-400b-shuffle/resolve/main/shard_{{:05d}}.parquet', shards),
    download('fineweb_edu_text',
             f'{HUB}/karpathy/fineweb-edu-100b-shuffle/resolve/main/shard_{{:05d}}.parquet', shards),
    fineweb('fineweb', 'fineweb', 103),
    fineweb('fineweb_edu', 'finewebedu', 99),
    download('minimind', f'{MINIMIND}/pretrain_t2t_mini.jsonl'),
    download('minimind_sft', f'{MINIMIND}/sft_t2t_mini.jsonl', chats=True),
    download('smol_smoltalk',
             f'{HUB}/HuggingFaceTB/smol-smoltalk/resolve/main/data/train-{{:05d}}-of-00004.parquet', 4,
             chats=True),
    Source('pydoc_chat', f'pydoc_chat {platform.python_version()}', pydoc_chats, chats=True),
)}


class StandardInput(str):
    """The path of a copy of standard input, which messages name so."""
    def __format__(self, _):
        return 'standard input'


def find_source(source, field='text', errors='strict'):
    """The Source of this name, file, folder (without hidden files), glob, or standard input."""
    if source in SOURCES:
        return SOURCES[source]
    if source != '-':
        source = os.path.normpath(os.path.expanduser(source))  # of a quoted glob
    if source == '-':  # read twice, so copied to a file; .json may be text
        with tempfile.NamedTemporaryFile(suffix='.json', delete=False) as copy:
            cleanup.callback(os.remove, copy.name)
            shutil.copyfileobj(sys.stdin.buffer, copy)
        source = 'standard input'
        name = 'stdin'
        paths = [StandardInput(copy.name)]
    elif os.path.isfile(source):
        name = Path(source.removesuffix('.gz')).stem
        paths = [source]
    else:  # a folder or glob, named after its last folder without wildcards
        pattern = os.path.join(glob.escape(source), '**', '*') if os.path.isdir(source) else source
        name = Path(os.path.abspath(re.split(r'[^/\\]*[*?[]', pattern)[0])).name
        found = filter(os.path.isfile, glob.glob(pattern, recursive=True))
        paths = sort_files({*map(os.path.realpath, found)})  # a link may lead to its own folder
    if not paths:
        raise FileNotFoundError(f'{source}: no such file, folder or glob with files, and none of '
                                f'{", ".join(SOURCES)}: check the path')
    documents = functools.partial(file_documents, paths, field, errors)
    records = any(map(format_of, paths))
    chats = records and isinstance(next(documents(), None), Conversation)
    unused = ('shards',) if records else ('shards', 'field')
    return Source(name, source, documents, chats, unused=unused)


# names and folders ------------------------------------------------------------------------------------------

def dataset_name(folder):
    """For train.py's --dataset: x of data/x, or the path of another folder."""
    parent, name = os.path.split(os.path.normpath(folder))
    return name if parent == 'data' else folder


def data_folder(name):
    """The path `name` if it has a slash or only it is a folder, else data/<name>."""
    folder = f'data/{name}'
    return name if os.path.dirname(name) or os.path.isdir(name) and not os.path.isdir(folder) else folder


def output_folder(out, source, tokenizer):
    """out if it has a slash, data/<out>, data/<source>_<tokenizer>, or for conversations data/<source>."""
    kind = os.path.normpath(dataset_name(tokenizer)).removesuffix('tokenizer.json').replace('bpe:', 'bpe')
    usual = f'{source.name} {kind}'
    if source.chats or usual in ('shakespeare gpt2', 'openwebtext gpt2'):  # nanoGPT's names
        usual = source.name
    name = out or re.sub(r'[^\w.-]+', '_', usual).strip('._') or 'text'
    return name if os.path.dirname(name) else f'data/{name}'


def prepare_command(folder):
    """The command that prepares this folder, guessed from its name."""
    if folder == FIRST_RUN:
        return 'python prepare.py'
    name = dataset_name(folder)
    known = [source for source in SOURCES if f'{name}_'.startswith(f'{source}_')]
    if not known:
        return f'python prepare.py my.txt --out={shlex.quote(name)}'
    source = max(known, key=len)
    kind = 'gpt2' if name == 'shakespeare' else name[len(source) + 1:].replace('bpe', 'bpe:')
    return f'python prepare.py {source}' + f' --tokenizer={kind}' * bool(kind)


# which text is for what -------------------------------------------------------------------------------------

def documents_of(source):
    """A source's documents without empty ones. Raises ValueError for texts among conversations."""
    for n, document in enumerate(source.documents(), 1):
        if isinstance(document, str):
            raise TypeError(f'{source.label}, document {n} is a str: yield a list of its blocks, [text]')
        if isinstance(document, Conversation) != source.chats:
            raise ValueError(f'{source.label}, document {n}: text and conversations are mixed, the first is '
                             f'{"a conversation" if source.chats else "text"}: prepare them apart')
        if not source.chats:
            blocks = map(without_surrogates, filter(None, document))
            first = next(blocks, None)
            document = first and itertools.chain([first], blocks)
        if document:
            yield document


def characters_to_train_on(source, fraction):
    """How many of each document's first characters are for training, an array; None: conversations.

    None of every n-th document, n = 1 / fraction, until val has its fraction of all; of a single text all but
    the end, as in nanoGPT. The fraction is lowered until it has at most VAL_CHARACTERS.
    """
    if source.chats:
        return None
    lengths = np.fromiter((sum(map(len, document)) for document in documents_of(source)), np.int64)
    fraction = min(fraction, VAL_CHARACTERS / max(1, lengths.sum()))
    is_val = np.arange(len(lengths)) % round(1 / fraction) == min(1, len(lengths) - 1)
    most = lengths.sum() - int(lengths.sum() * (1 - fraction))
    return lengths - np.diff(np.minimum(np.cumsum(lengths * is_val), most), prepend=0)


def split_texts(source, fraction, n_train):
    """(split, document or a part of it, its number from 1 on; 0: the only text)."""
    for n, document in enumerate(documents_of(source)):
        if source.chats:
            is_val = n % round(1 / fraction) == 1 and n * fraction < VAL_CHATS
            yield 'val' if is_val else 'train', document, n + 1
        else:
            for split, parts in itertools.groupby(cut_in_two(document, n_train[n]), lambda part: part[0]):
                yield split, (block for _, block in parts), n + 1 if len(n_train) > 1 else 0


def cut_in_two(blocks, n_train):
    """(split, tokens): the first n_train tokens are train's."""
    for block in blocks:
        if n_train:
            yield 'train', block[:n_train]
        if len(block) > n_train:
            yield 'val', block[n_train:]
        n_train = max(n_train - len(block), 0)


# encoding ---------------------------------------------------------------------------------------------------

def items_to_encode(texts, tok, special_tokens, counts):
    """((split, piece of a text or Conversation, whether it begins a text, whether it ends one of several),
    its length). Counts special tokens. Raises ValueError for one if special_tokens is 'refuse', and for an
    unfit tokenizer."""
    for split, document, number in texts:
        counts['documents'] = number
        is_chat = isinstance(document, Conversation)
        if number and tok.eot is None or is_chat and not tok.chat_template:
            raise ValueError(f'the tokenizer {tok.name} has no end-of-text token to keep documents apart, or '
                             'no chat template for conversations: name another by --tokenizer')
        parts = pieces(document, tok)
        if is_chat:
            parts = [(json.dumps(document[1:], ensure_ascii=False, default=str), True)]
        for n, (text, last) in enumerate(parts):
            if found := re.findall(tok.special_pattern, text):
                if special_tokens == 'refuse':
                    place = document.place if is_chat else f'document {number:,}'
                    raise ValueError(f'{place}: {found[0]!r} is a special token of the tokenizer: remove it, '
                                     'or use --special_tokens=text or --special_tokens=tokens')
                counts['special_texts'] += len(found)
            yield (split, document if is_chat else text, n == 0, last and number > 0), len(text)


def encode(tok, as_tokens, errors, group):
    """[(split, text or Conversation, begins, ends)] -> [(split, ids, mask or None, bytes that are learnt)].
    as_tokens: special tokens' texts become their ids, and count no bytes. errors: if 'ignore', a conversation
    that the chat template rejects has no ids."""
    encoded = []
    for split, item, begins, ends in group:
        if isinstance(item, Conversation):
            try:
                ids, mask = encode_conversation(
                    tok, item if as_tokens else Conversation(*tok.as_text([*item])))
            except ValueError as e:
                if errors != 'ignore':
                    raise ValueError(f'{item.place}, {e}: mend the conversation, or leave out all such by '
                                     '--errors=ignore') from None
                ids, mask = np.zeros((2, 0), np.uint8)
        else:
            ids = (tok.encode_chat if as_tokens else tok.encode_array)(item)
            mask = None
            # the text may have them already, as MiniMind 2's has
            begins = begins and not {*ids[:1]} & {*tok.bos}
            ends = ends and tok.eot not in ids[-1:]
            parts = tok.bos if begins else (), ids, (tok.eot,) if ends else ()
            ids = np.concatenate([np.asarray(part, dtype_of(tok.n_vocab)) for part in parts])
        n_bytes = int(tok.sizes[ids if mask is None else ids[mask == 1]].sum())
        encoded.append((split, ids, mask, n_bytes))
    return encoded


def encode_conversation(tok, conversation):
    """(ids, mask), uint8, 1 for answers: from where the ids differ from the rendered prompt's to the first
    stop token. Raises ValueError if the template shows no such place.
    """
    _, messages, tools = conversation
    text = tok.render(messages, False, tools)
    ids = tok.encode_chat(text)
    mask = np.zeros(len(ids), np.uint8)
    end = 0
    stops = np.flatnonzero(np.isin(ids, tok.stop_tokens))
    for n, message in enumerate(messages):
        if message['role'] == 'assistant':
            prompt = tok.render(messages[:n], True, tools)
            agrees = text.startswith(prompt)
            if not agrees:  # it may set up thinking otherwise than here
                prompt = os.path.commonprefix([prompt, text])
                agrees = prompt.startswith(tok.render(messages[:n], False, tools))
            prompt_ids = tok.encode_chat(prompt)
            begin = len(prompt_ids)
            while prompt_ids[:begin] != ids[:begin]:
                begin -= 1
            later = stops[stops >= max(begin, end)]
            if not (agrees and len(later)):
                raise ValueError(f'message {n + 1}: the chat template renders earlier turns differently once '
                                 'this answer is added, or ends the answer with none of '
                                 f'{[tok.decode([i]) for i in tok.stop_tokens]}')
            end = later[0] + 1
            mask[begin:end] = message.get('learn', True)
    return np.array(ids, dtype_of(tok.n_vocab)), mask


def pack(encoded, block_size, eot, counts):
    """(split, ids, mask, n_bytes) of conversations -> the same in slots of block_size tokens.

    Each begins with eot, which also fills slots; longer ones are cut. A split ends with one more token, since
    a sequence's last target is the first token of the next slot.
    """
    left = dict.fromkeys(SPLITS, block_size)
    room = block_size - 1
    for split, ids, mask, n_bytes in encoded:
        counts['cut'] += len(ids) > room
        counts['left_out'] += not ids.size
        mask[room::room] = 0  # after a cut the first token has no context
        for begin in range(0, len(ids), room):
            piece = ids[begin:begin + room]
            n_eot = 1
            size = 1 + len(piece)
            if size > left[split]:
                n_eot = left[split] + 1
                left[split] = block_size
            left[split] -= size
            counts['filled'] += size
            learnt = np.concatenate([np.zeros(n_eot, np.uint8), mask[begin:begin + room]])
            yield split, np.concatenate([np.repeat(eot, n_eot), piece]), learnt, 0 if begin else n_bytes
    for split, n in left.items():
        yield split, np.repeat(eot, n + 1), np.zeros(n + 1, np.uint8), 0


def dtype_of(n_vocab):
    """The dtype of a .bin file."""
    return np.dtype('<u2' if n_vocab <= 1 << 16 else '<u4')


# writing ----------------------------------------------------------------------------------------------------

def write_dataset(folder, texts, tok, label, procs=None, block_size=None, special_tokens='text',
                  errors='strict'):
    """Prepares a folder -> its meta. block_size: of conversations, else None."""
    counts = collections.Counter()
    eot = tok.eot
    items = items_to_encode(texts, tok, special_tokens, counts)
    work = functools.partial(encode, tok, special_tokens == 'tokens', errors)
    groups = in_processes(1 if tok.anywhere else procs, work, in_groups(items))
    encoded = itertools.chain.from_iterable(groups)
    if block_size:  # an end of text that ends no message, if there is one
        eot = next((tok.special[text] for text in (EOT, '<|end_of_text|>') if text in tok.special), eot)
        encoded = pack(encoded, block_size, np.array(eot, dtype_of(tok.n_vocab)), counts)
    with new_files(folder) as temp, contextlib.closing(groups):
        checksum = write_bins(temp, encoded, f'{tok.name} encoding', counts)
        return write_meta(temp, tok, label, eot, {**counts, 'checksum': checksum, 'block_size': block_size})


def write_bins(folder, encoded, label, counts):
    """Writes what `encode` yields to .bin and .mask.bin, adds to counts -> {name: sha256}, by which a resumed
    run sees that its data has changed."""
    progress = ProgressLine(label)
    digests = collections.defaultdict(hashlib.sha256)
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda name: stack.enter_context(open(f'{folder}/{name}', 'wb')))
        for split, ids, mask, n_bytes in encoded:
            for name, part in (f'{split}.bin', ids), (f'{split}.mask.bin', mask):
                if part is not None:
                    opened(name).write(part)
                    digests[name].update(part)
            counts[f'{split}_tokens'] += len(ids)
            counts[f'{split}_learnt'] += len(ids) if mask is None else int(mask.sum())
            counts[f'{split}_bytes'] += n_bytes  # of learnt text, without end of text
            progress.add(n_bytes)
    progress.show()
    for split in SPLITS:
        if not counts[f'{split}_learnt']:
            raise ValueError(f'{split} has no token to learn: it needs more text, or at least two '
                             'conversations with messages of the role assistant that fit into --block_size')
    # val loss / ln 2 / this = bits per byte
    counts['bytes_per_token'] = counts['val_bytes'] / counts['val_learnt']
    return {name: digest.hexdigest() for name, digest in digests.items()}


FILES = ('train.bin', 'train.mask.bin', 'val.bin', 'val.mask.bin', 'tokenizer.tiktoken', 'tokenizer.json',
         'meta.json')  # of a prepared folder


@contextlib.contextmanager
def new_files(folder):
    """A temporary folder whose FILES replace those in `folder` if all goes well, meta.json last. Meanwhile
    meta.json is empty, so that nobody reads a mix. A reader keeps the old files that it has open."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with cleanup:
        cleanup.callback(lambda: any(folder.iterdir()) or folder.rmdir())
        temp = cleanup.enter_context(tempfile.TemporaryDirectory(prefix='.prepare-', dir=folder))
        yield temp
        meta = folder / 'meta.json'
        ours = meta.exists() and b'"kind": "json"' in meta.read_bytes()
        meta.write_text('')
        for name in FILES:
            if Path(temp, name).exists():
                Path(temp, name).replace(folder / name)
            elif ours or name != 'tokenizer.json':  # another tokenizer.json belongs to a model
                (folder / name).unlink(missing_ok=True)


def write_meta(folder, tok, label, eot, counts):
    """Writes meta.json and the tokenizer's table; returns the meta."""
    state = tok.state()
    if state['kind'] in TABLES:
        key, name = TABLES[state['kind']]
        Path(folder, name).write_bytes(state.pop(key).encode())
    meta = {'source': label, 'vocab_size': tok.n_vocab, 'dtype': dtype_of(tok.n_vocab).name, 'eot': eot,
            **counts, 'tokenizer': state}
    Path(folder, 'meta.json').write_text(json.dumps(meta, indent=1))
    return meta


def fetch_shards(folder, source):
    """Downloads a source's shards, GPT-2's tokens -> the folder's meta."""
    tok = tiktoken_tokenizer('gpt2')  # before the long wait
    val, *train = (read_shard(fetch(url, folder), np.dtype('<u2')) for url in source.shards)
    n_bytes = sum(int(tok.sizes[ids].sum()) for ids in parts_of(val))
    counts = {'train_tokens': sum(shard.n_tokens for shard in train), 'val_tokens': val.n_tokens,
              'bytes_per_token': n_bytes / val.n_tokens}
    with new_files(folder) as temp:
        return write_meta(temp, tok, source.label, tok.eot, counts)


# reading ----------------------------------------------------------------------------------------------------

class PlainUnpickler(pickle.Unpickler):
    """Reads plain data and refuses classes, by which a pickle could run code."""
    def find_class(self, module, name):
        raise ValueError(f'meta.pkl asks for {module}.{name}, but only plain data is read')


def read_meta(folder):
    """meta.json, nanoGPT's meta.pkl or an assumed dict: vocab_size, dtype, eot, bytes_per_token (or None),
    tokenizer (its state, None: GPT-2's), block_size (of slots, or None)... Raises ValueError if meta.json is
    damaged."""
    usual = {'dtype': 'uint16', 'eot': None, 'bytes_per_token': None, 'tokenizer': None, 'block_size': None}
    path = Path(folder, 'meta.json')
    if path.exists():
        with reading(f'{path} (wait, or prepare the folder again with --overwrite=True)'):
            meta = usual | json.loads(path.read_bytes())
            return meta | {'vocab_size': meta['vocab_size']}
    path = path.with_suffix('.pkl')
    if path.exists():
        with open(path, 'rb') as f:
            meta = PlainUnpickler(f).load()
        if 'itos' in meta:
            chars = [meta['itos'][i] for i in range(meta['vocab_size'])]
            usual['tokenizer'] = {'kind': 'char', 'chars': chars, 'eot': None}
        return usual | {'vocab_size': meta['vocab_size']}
    print_once(f'{folder} has no meta.json or meta.pkl: assuming the GPT-2 encoding')
    return usual | {'vocab_size': 50304, 'eot': 50256}  # nanoGPT's size, 50257 rounded up


def is_prepared(folder):
    """Whether prepare.py, or nanoGPT, has made this folder."""
    return any(Path(folder, name).exists() for name in ('meta.json', 'meta.pkl', 'train.bin'))


def checkpoint_in(folder):
    """The path of the checkpoint in a folder, or of this .pt file; None if there is none."""
    path = Path(folder)
    if path.suffix != '.pt':
        path /= 'ckpt.pt'
    return path if path.exists() else None


def load_tokenizer(folder):
    """The tokenizer of a prepared folder, run or checkpoint."""
    if path := checkpoint_in(folder):
        import torch  # takes a second
        with reading(path):
            return tokenizer_from_state(torch.load(path, 'cpu', weights_only=True, mmap=True)['tokenizer'])
    state = read_meta(folder)['tokenizer']
    if state is None:
        return tiktoken_tokenizer('gpt2')
    if state['kind'] in TABLES:
        key, name = TABLES[state['kind']]
        state[key] = Path(folder, name).read_bytes().decode()
    return tokenizer_from_state(state)


HEADER_BYTES = 1024  # of foreign shards: int32 magic, version, tokens, zeros
HEADER_MAGIC = 20240520
Shard = collections.namedtuple('Shard', 'file dtype offset n_tokens')


def read_shard(path, dtype):
    """The Shard at path, with or without a header. Its file stays open: path may get other data."""
    file = open(path, 'rb')  # noqa: SIM115
    head = np.fromfile(file, '<i4', 3)
    if len(head) < 3 or head[0] != HEADER_MAGIC:
        return Shard(file, dtype, 0, os.path.getsize(file.fileno()) // dtype.itemsize)
    return Shard(file, np.dtype('<u2'), HEADER_BYTES, int(head[2]))


def read_elements(shard, first, n):
    """n elements of a shard, from the one at `first`."""
    shard.file.seek(shard.offset + first * shard.dtype.itemsize)
    return np.fromfile(shard.file, shard.dtype, n)


def parts_of(shard, size=1 << 22):
    """A shard's elements in parts."""
    for first in range(0, shard.n_tokens, size):
        yield read_elements(shard, first, size)


class Bins:
    """The tokens of one split: folder/<split>.bin, or else its shards *<split>*.bin, sorted.

    Sequence i of a shard is its block_size + 1 tokens from i * block_size on: each token but the first and
    the tail is a target once. Ids are checked once vocab_size is set. The mask of x.bin is x.mask.bin, a
    byte for each token.
    """
    def __init__(self, folder, split):
        self.vocab_size = None
        self.name = Path(folder, f'{split}.bin')
        paths = sorted(path for path in Path(folder).glob(f'*{split}*.bin') if '.mask' not in path.suffixes)
        if self.name in paths:
            paths = [self.name]
        if not paths:
            raise FileNotFoundError(f'{folder} is not prepared: no {split}.bin; run '
                                    f'`{prepare_command(folder)}`')
        self.meta = read_meta(folder)
        dtype = np.dtype(self.meta['dtype']).newbyteorder('<')
        self.shards = [read_shard(path, dtype) for path in paths]
        self.n_tokens = sum(shard.n_tokens for shard in self.shards)
        masks = [path.with_suffix('.mask.bin') for path in paths]
        self.masks = [read_shard(path, np.dtype(np.uint8)) for path in masks if path.exists()]
        sizes = {self.n_tokens}
        if self.name in paths:  # of shards there may be more than prepare.py has counted
            sizes.add(self.meta.get(f'{split}_tokens', self.n_tokens))
        if self.masks or self.meta['block_size']:
            sizes.add(sum(mask.n_tokens for mask in self.masks))
        if len(sizes) > 1:
            raise ValueError(f'{self.name} has {self.n_tokens:,} tokens, but not as many as its mask or as '
                             'meta.json says: a file was cut or removed; prepare the folder again')

    def check_unchanged(self):
        """Raises ValueError if the folder was prepared again since: its other files are new."""
        if read_meta(self.name.parent) != self.meta:
            raise ValueError(f'{self.name.parent} was prepared again just now: start once more')

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

    def check_vocabulary(self):
        """Reads every token. Raises ValueError if one is outside the vocabulary."""
        for shard in self.shards:
            for part in parts_of(shard):
                self._check(part)

    def _check(self, ids):
        if self.vocab_size and ids.max(initial=0) >= self.vocab_size:
            raise ValueError(f'{self.name}: token {ids.max()} is outside the vocabulary of '
                             f'{self.vocab_size}: prepare it with the tokenizer of the model, or raise '
                             '--vocab_size')

    def batch(self, indices, block_size):
        """Inputs and targets, int64 (len(indices), block_size); targets that the mask leaves out are -1."""
        ids = self._sequences(self.shards, indices, block_size)
        self._check(ids)
        targets = ids[:, 1:]
        if self.masks:
            targets = np.where(self._sequences(self.masks, indices, block_size)[:, 1:], targets, -1)
        return ids[:, :-1], targets

    def _sequences(self, shards, indices, block_size):
        """int64 (len(indices), block_size + 1) of self.shards or self.masks."""
        ends = self.ends(block_size)
        numbers = np.searchsorted(ends, indices, side='right')
        firsts = (np.asarray(indices) - np.append(0, ends)[numbers]) * block_size
        return np.stack([  # a mapped file would count as resident memory
            read_elements(shards[number], first, block_size + 1) for number, first in zip(numbers, firsts)
        ]).astype(np.int64)


# looking ----------------------------------------------------------------------------------------------------

def look(folder):
    """Prints a prepared folder's counts, lengths and beginning."""
    folder = data_folder(folder)
    splits = [Bins(folder, split) for split in reversed(SPLITS)]
    meta = splits[0].meta
    tok = load_tokenizer(folder)
    splits[0].check_unchanged()
    print(f'{folder}: {meta.get("source")}, tokenizer {tok.name}, vocabulary '
          f'{meta["vocab_size"]:,}, {meta["dtype"]}, {meta["bytes_per_token"] or np.nan:.2f} bytes a token')
    for bins in splits:
        ids = next(parts_of(bins.shards[0]))
        lengths = np.diff(np.flatnonzero(ids == meta['eot']), prepend=-1, append=len(ids)) - 1
        lengths = lengths[lengths > 0]
        n_learnt = meta.get(f'{bins.name.stem}_learnt', bins.n_tokens)
        print(f'{bins.name}: {bins.n_tokens:,} tokens, {n_learnt / bins.n_tokens:.1%} learnt; in the '
              f'first {len(ids):,} {len(lengths):,} documents of',
              *np.quantile(lengths, [0, 0.5, 1], method='lower'),
              'tokens (shortest, median, longest)')
    n = meta['block_size'] or 256
    mask = read_elements(bins.masks[0], 0, n) if bins.masks else np.zeros(n)
    print('the first tokens, [[learnt]]:' if bins.masks else 'the first tokens:')
    for learnt, run in itertools.groupby(zip(ids, mask), lambda pair: pair[1]):
        text = tok.decode([i for i, _ in run])
        print(f'[[{text}]]' if learnt else text, end='')
    print()


def stop(number, _):
    """Cleans up, then ends the program and with it its workers. KeyboardInterrupt, raised while the library
    starts or stops workers, could leave it waiting for them forever."""
    for other in signal.SIGINT, signal.SIGTERM:
        signal.signal(other, signal.SIG_IGN)
    try:
        cleanup.close()
    finally:  # a worker that has just begun cleans up as well
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


if __name__ == '__main__':
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    check_values(settings, settings.config, globals())
    name, *more = words or [source]
    if name == 'look':
        look(*more or [FIRST_RUN])
        sys.exit()
    if more:
        raise ValueError(f'{more[0]!r} is one source too many: put files into a folder, or quote a glob')
    source = find_source(name, field, errors)
    refuse_unused(given, source.unused, f'on {source.label}')
    tokenizer = tokenizer or source.tokenizer or (FIRST_RUN if source.chats else 'byte')
    folder = output_folder(out, source, tokenizer)
    if not overwrite and (is_prepared(folder) or os.path.exists(f'{folder}/tokenizer.json')):
        there = read_meta(folder).get('source')
        if there != source.label:
            raise ValueError(f'{folder} holds data of {there or "another program"}, not of {source.label}: '
                             'choose another --out, or replace it by --overwrite=True')

    if source.shards:
        if tokenizer != 'gpt2':
            raise ValueError(f"tokenizer={tokenizer!r}: {source.name} has tokens already, gpt2's")
        meta = fetch_shards(folder, source)
    else:
        n_train = characters_to_train_on(source, val_fraction)
        texts = functools.partial(split_texts, source, val_fraction, n_train)
        if tokenizer.endswith('.gguf'):
            from zoo.hub import published_tokenizer  # torch takes a second
            tok = published_tokenizer(tokenizer)
        elif is_prepared(tokenizer) or checkpoint_in(tokenizer):
            tok = load_tokenizer(tokenizer)
        elif tokenizer.startswith('data/') and not os.path.exists(tokenizer):
            raise FileNotFoundError(f'tokenizer={tokenizer!r}: that folder is not prepared; '
                                    f'`{prepare_command(tokenizer)}` does it')
        else:
            blocks = contents if source.chats else iter
            tok = make_tokenizer(
                tokenizer, texts=(blocks(document) for _, document, _ in texts()),
                training=(blocks(document) for split, document, _ in texts() if split == 'train'),
                by_document=source.chats or len(n_train) > 1, procs=procs)
        meta = write_dataset(folder, texts(), tok, source.label, procs, block_size if source.chats else None,
                             special_tokens, errors)
        print(f'{source.label}: {meta["documents"] or 1:,} documents')
        if n := meta.get('special_texts'):
            print(f'{n:,} special tokens inside documents are learned as {special_tokens} (--special_tokens)')
        if n := meta.get('left_out'):
            print(f'{n:,} conversations that the chat template rejects are left out')

    print(f'{folder}: {meta["train_tokens"]:,} train and {meta["val_tokens"]:,} val tokens, '
          f'{meta["bytes_per_token"]:.2f} bytes a token, vocabulary {meta["vocab_size"]:,}')
    command = 'python train.py'
    if source.chats:
        filled = meta['filled'] / (meta['train_tokens'] + meta['val_tokens'])
        print(f'slots of {block_size} tokens, {filled:.0%} full; {meta["train_learnt"]:,} train tokens are '
              f'learned; {meta["cut"]:,} longer ones are cut, so that answers may lack their questions')
        command += ' config/chat.py'
        if tokenizer != FIRST_RUN:  # that of config/chat.py's base
            run = shlex.quote(tokenizer) if checkpoint_in(tokenizer) else 'RUN-WITH-THIS-TOKENIZER'
            command += f' --init_from={run}'
    print(f'next: {command} --dataset={shlex.quote(dataset_name(folder))}')
