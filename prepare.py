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
import collections
import contextlib
import csv
import functools
import glob
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import random
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import typing
from pathlib import Path

from configurator import check_effects, check_values, configure, print0, reading

# A name in SOURCES, a file (perhaps .gz), a folder or glob, or - for standard input
source = 'pystdlib'
# the field of JSON, CSV, parquet with a record's text or messages
field = 'text'             # [if source not in SOURCES]
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
# files of a source that has many (fineweb, fineweb_edu: to train on)
shards = 10                # [>= 1] [if source in SOURCES]
procs: int | None = None   # processes that encode; None: one for each core [>= 1]
settings = configure(globals(), words=2, texts=True)

import numpy as np

from tokenizer import (
    EOT,
    THOUGHTS,
    in_processes,
    json_value,
    make_tokenizer,
    pieces,
    tiktoken_tokenizer,
    tokenizer_from_state,
    without_surrogates,
)

SPLITS = 'train', 'val'
FIRST_RUN = 'data/pystdlib_bpe4096'  # what `python prepare.py` makes
# about the 200 batches of 12 x 1,024 tokens that nanoGPT's evaluation reads
VAL_CHARACTERS = 10_000_000
VAL_CHATS = 10_000
print_once = functools.cache(print0)
cleanup = contextlib.ExitStack()  # removes temporary files
MAIN = os.getpid()  # the process that may do so


# files as documents -----------------------------------------------------------------------------------------
# A document is an iterable of blocks of text, or a Conversation.

def unpacked(path):
    """'a.jsonl' for a.jsonl and for a.jsonl.gz"""
    return path[:-3] if path.lower().endswith('.gz') else path


def ending(path):
    """'.jsonl' of a.jsonl and of a.jsonl.gz."""
    return Path(unpacked(path)).suffix.lower()


@contextlib.contextmanager
def open_text(path, errors):
    """The file's text, unpacked. Raises ValueError if it is not UTF-8."""
    opened = open if path == unpacked(path) else gzip.open
    with opened(path, 'rt', encoding='utf-8-sig', errors=errors, newline='') as f:
        try:
            yield f
        except UnicodeDecodeError as e:
            raise ValueError(f'{path} is not UTF-8 text: convert it, leave it out, or use --errors=replace, '
                             'which writes U+FFFD there') from e


def read_text(path, errors):
    """The file's text in blocks."""
    with open_text(path, errors) as f:
        yield from iter(functools.partial(f.read, 1 << 20), '')


def text_documents(path, errors):
    """A text file is one document; with <|endoftext|> in its first 16 MB, one for each part."""
    blocks = read_text(path, errors)
    head = [*itertools.islice(blocks, 16)]
    blocks = itertools.chain(head, blocks)
    if EOT not in ''.join(head):
        if head:
            yield blocks
        return
    text = ''
    for block in itertools.chain(blocks, [EOT]):
        *ended, text = (text + block).split(EOT)
        yield from ([part.strip()] for part in ended if part.strip())


def json_records(path, errors):
    """The records of JSON lines, or of an array in a .json file."""
    with open_text(path, errors) as f:
        is_array = ending(path) == '.json' and f.read(99).lstrip().startswith('[')
        f.seek(0)
        if is_array:
            yield from json.load(f)
            return
        for n, line in enumerate(f, 1):
            if line.strip():
                with reading(f'{path}, line {n}'):
                    record = json.loads(line)
                yield record


def csv_records(path, errors, delimiter=','):
    """The records of comma-separated values below a line with the fields' names."""
    csv.field_size_limit(1 << 30)
    with open_text(path, errors) as f:
        yield from csv.DictReader(f, delimiter=delimiter, strict=True)


def parquet_records(path, errors):
    """The records of a parquet file."""
    import pyarrow.parquet
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256):
        yield from batch.to_pylist()


# By ending: functions of a path and errors, which yield records, {field: value}
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
    """A document for each record's text in this field, or a Conversation; text_documents of others. Empty
    ones are left out."""
    for path in paths:
        records = format_of(path)
        if not records:
            yield from text_documents(path, errors)
            continue
        for n, record in enumerate(records(path, errors), 1):
            document = read_record(f'{path}, record {n}', record, field)
            if document != ['']:
                yield document


# conversations ----------------------------------------------------------------------------------------------

# messages: [{'role': 'user', 'content': text, perhaps more}, ...]; tools: JSON schemas
Conversation = collections.namedtuple('Conversation', 'place messages tools', defaults=[None])
NAMES = {  # a dataset's name of a field -> read_record's name
    'conversations': 'messages', 'prompt': 'question', 'instruction': 'question', 'input': 'more',
    'context': 'more', 'output': 'answer', 'response': 'answer', 'completion': 'answer',
    'system_prompt': 'system', 'from': 'role', 'value': 'content'}
USED = {'messages', 'question', 'more', 'answer', 'system', 'tools', 'history', 'text'}
SPEAKERS = {'human': 'user', 'gpt': 'assistant', 'chatgpt': 'assistant', 'developer': 'system'}
ROLES = 'system', 'user', 'assistant', 'tool'
LEARNED = 'weight', 'loss_mask', 'loss', 'train', 'trainable', 'train_on_turn'  # 0 or false: no target


def read_record(place, record, field='text'):
    """A record's document: [its text], or a Conversation if it has messages, or a question and an answer.
    Raises ValueError if it has neither."""
    if isinstance(record, list):  # nanochat's
        record = {'messages': record}
    asked = record.get(field)
    if isinstance(asked, str) and field not in ('messages', 'conversations'):
        return [without_surrogates(asked)]
    read = renamed({field: asked} | record, NAMES | {field: 'messages'})
    messages = from_json(read.get('messages'))
    if not messages and 'answer' in read:
        question = '\n\n'.join(filter(None, [read.get('question'), read.get('more')]))
        messages = make_messages(*(read.get('history') or []), (question, read['answer']))
    if not isinstance(messages, list) or not messages or asked is None and field != 'text':
        raise ValueError(f'{place}: no text in field {field!r} and no messages in {record!r:.200}: correct '
                         'the record, or choose another field by --field')
    if read.get('system'):
        messages = [{'role': 'system', 'content': read['system']}, *messages]
    messages = [read_message(place, message) for message in messages]
    tools = from_json(read.get('tools') or messages[0].pop('tools', None))  # MiniMind's are in a message
    if unused := [name for name in read.keys() - USED if isinstance(read[name], (str, list, dict))]:
        print_once(f"warning: fields of conversations that are not used: {', '.join(sorted(unused))}")
    return Conversation(place, messages, tools or None)


def read_message(place, message):
    """A message as chat templates read it, 'learn' False if it is not to be learned. Raises ValueError if it
    lacks role or content."""
    read = renamed(message, NAMES)
    role = read.get('role')
    read['role'] = SPEAKERS.get(role, role)
    calls = from_json(read.get('tool_calls', []))
    for call in calls:
        function = call.get('function', call)
        function['arguments'] = from_json(function.get('arguments'))
    if calls:
        read['tool_calls'] = calls
    if calls or read.keys() & {*THOUGHTS}:
        read.setdefault('content', '')
    if read['role'] not in ROLES or not isinstance(read.get('content'), str):
        raise ValueError(f'{place}: {message!r:.80} needs a role, one of {", ".join(ROLES)}, and text as its '
                         'content')
    if any(name in read and not read[name] for name in LEARNED):
        read['learn'] = False
    return json_value(read)


def renamed(record, names):
    """The record without nulls and with its fields renamed; the first counts if several get the same name."""
    read = {}
    for key, value in record.items():
        if value is not None:
            read.setdefault(names.get(key, key), value)
    return read


def from_json(value):
    """A value without nulls, decoded if it is a JSON text."""
    return json_value(json.loads(value) if value and isinstance(value, str) else value)


def make_messages(*turns):
    """(question, answer), ... as messages."""
    return [{'role': role, 'content': content} for turn in turns
            for role, content in zip(('user', 'assistant'), turn)]


def contents(conversation):
    """The texts of a conversation's messages."""
    return [without_surrogates(message['content']) for message in conversation.messages]


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
    ast.AsyncFunctionDef: ('What does {} do?', 'Explain {}.', 'What is {} for?'),
}


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
    An empty one counts when every n-th is held out for validation, so leave it out.
    chats: they are Conversations. shards: addresses of files of tokens instead, the first for validation.
    tokenizer: the default; None: byte, for conversations FIRST_RUN's.
    """
    name: str  # of the dataset
    label: str  # the source in meta.json
    documents: typing.Callable | None = None
    chats: bool = False
    shards: list | None = None
    tokenizer: str | None = None


def fetch(url, folder):
    """Downloads a file to the folder, unless it is there -> its path. Raises OSError if it cannot."""
    path = f'{folder}/{Path(url).name}'
    if os.path.exists(path):
        return path
    import requests
    os.makedirs(folder, exist_ok=True)
    print(f'downloading {url}')
    try:
        with requests.get(url, stream=True, timeout=60) as response, open(f'{path}.part', 'wb') as f:
            response.raise_for_status()
            f.writelines(response.iter_content(1 << 20))
    except requests.RequestException as e:
        raise OSError(f'cannot download {url} ({e!r:.100}): go online, put the file into {folder}, or use '
                      'your own text: python prepare.py my.txt') from e
    os.replace(f'{path}.part', path)
    return path


HUB = 'https://huggingface.co/datasets'
MINIMIND = f'{HUB}/jingyaogong/minimind_dataset/resolve/main'


def download(name, url, most=1, **options):
    """The Source of files, downloaded to data/<name>. url: {}: the numbers of `most` files."""
    def documents():
        urls = map(url.format, range(min(shards, most)))
        return file_documents([fetch(url, f'data/{name}') for url in urls], errors=errors)
    return Source(name, name, documents, **options)


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


def find_source(source):
    """The Source of this name, file, folder (without hidden files), glob, or standard input."""
    if source in SOURCES:
        return SOURCES[source]
    path = os.path.expanduser(source)  # of a quoted glob
    if source == '-':  # read twice, so copied to a file; .json may be text
        path = os.path.join(cleanup.enter_context(tempfile.TemporaryDirectory()), 'stdin.json')
        with open(path, 'wb') as f:
            shutil.copyfileobj(sys.stdin.buffer, f)
    if os.path.isfile(path):
        name = Path(unpacked(path)).stem
        paths = [path]
    else:  # a folder or glob, named after its last folder without wildcards
        pattern = os.path.join(glob.escape(path), '**', '*') if os.path.isdir(path) else path
        name = Path(os.path.abspath(re.split(r'[^/\\]*[*?[]', pattern)[0])).name
        found = filter(os.path.isfile, glob.glob(pattern, recursive=True))
        paths = sort_files({*map(os.path.realpath, found)})  # a link may lead to its own folder
    if not paths:
        raise FileNotFoundError(f'{source}: no such file, folder or glob with files, and none of '
                                f'{", ".join(SOURCES)}: check the path')
    documents = functools.partial(file_documents, paths, field, errors)
    chats = any(map(format_of, paths)) and isinstance(next(documents(), None), Conversation)
    return Source(name, source, documents, chats)


# names and folders ------------------------------------------------------------------------------------------

def data_folder(name):
    """The path `name` if it has a slash, else data/<name>."""
    return name if os.path.dirname(name) else f'data/{name}'


def output_folder(out, source, tokenizer):
    """out if it has a slash, data/<out>, data/<source>_<tokenizer>, or for conversations data/<source>."""
    kind = Path(tokenizer.removesuffix('tokenizer.json')).name.replace(':', '')
    name = out or re.sub(r'[^\w.-]+', '_', f'{source.name}_{kind}').strip('._')
    if not out and (source.chats or name in ('shakespeare_gpt2', 'openwebtext_gpt2')):  # nanoGPT's names
        name = source.name
    return data_folder(name)


# which text is for what -------------------------------------------------------------------------------------

def characters_to_train_on(source, fraction):
    """How many of each document's first characters are for training; None: conversations.

    Every n-th document, n = 1 / fraction, is for val until val has its fraction of all; of a single text the
    end, as in nanoGPT. The fraction is lowered until val has at most VAL_CHARACTERS.
    """
    if source.chats:
        return None
    lengths = [sum(map(len, document)) for document in source.documents()]
    fraction = min(fraction, VAL_CHARACTERS / max(1, sum(lengths)))
    room = sum(lengths) - int(sum(lengths) * (1 - fraction))  # for val
    first = min(1, len(lengths) - 1)
    n_train = lengths.copy()
    for n in range(first, len(lengths), round(1 / fraction)):
        n_val = min(lengths[n], room)
        n_train[n] -= n_val
        room -= n_val
    return n_train


def split_texts(source, fraction, n_train):
    """(split, document or a part of it, whether it is one of several)."""
    for n, document in enumerate(source.documents()):
        if source.chats:
            is_val = n % round(1 / fraction) == 1 and n * fraction < VAL_CHATS
            yield 'val' if is_val else 'train', document, True
        else:
            for split, parts in itertools.groupby(cut_in_two(document, n_train[n]), lambda part: part[0]):
                yield split, (block for _, block in parts), len(n_train) > 1


def cut_in_two(blocks, n_train):
    """(split, block): the first n_train characters are train's."""
    for block in blocks:
        if n_train:
            yield 'train', block[:n_train]
        if len(block) > n_train:
            yield 'val', block[n_train:]
        n_train = max(n_train - len(block), 0)


# encoding ---------------------------------------------------------------------------------------------------

def items_to_encode(texts, can_cut):
    """(split, piece of a text or Conversation, whether it begins a text, whether it ends one of several)."""
    for split, document, several in texts:
        if isinstance(document, Conversation):
            yield split, document, True, True
            continue
        for n, (text, last) in enumerate(pieces(document, can_cut)):
            yield split, text, n == 0, last and several


def encode(tok, special_tokens, errors, item):
    """(split, text or Conversation, begins, ends) -> (split, ids, mask or None, bytes that are learned).
    special_tokens: their texts become ids, and count no bytes, if 'tokens'. errors: if 'ignore', a
    conversation that the chat template rejects gives None."""
    split, document, begins, ends = item
    as_tokens = special_tokens == 'tokens'
    if special_tokens == 'refuse' and (found := re.search(tok.special_pattern, str(document))):
        raise ValueError(f"{found[0]!r} in {str(document)[:80]!r} is a special token: remove it, or use "
                         '--special_tokens=text or --special_tokens=tokens')
    if isinstance(document, Conversation):
        try:
            ids, mask = encode_conversation(
                tok, document if as_tokens else Conversation(*tok.as_text([*document])))
        except ValueError as e:
            if errors == 'ignore':
                return None
            raise ValueError(f'{document.place}, {e}: correct the conversation, or leave out all such by '
                             '--errors=ignore') from None
        return split, ids, mask, int(tok.sizes[ids[mask == 1]].sum())
    ids = (tok.encode_chat if as_tokens else tok.encode_array)(document)
    # the text may have them already, as MiniMind 2's has
    begins = begins and not {*ids[:1]} & {*tok.bos}
    ends = ends and tok.eot not in ids[-1:]
    parts = tok.bos if begins else (), ids, (tok.eot,) if ends else ()
    ids = np.concatenate([np.asarray(part, dtype_of(tok.n_vocab)) for part in parts])
    return split, ids, None, int(tok.sizes[ids].sum())


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
            shared = os.path.commonprefix([prompt, text])
            # the prompt may set up thinking otherwise than the text
            agrees = shared == prompt or shared.startswith(tok.render(messages[:n], False, tools))
            begin = len(os.path.commonprefix([tok.encode_chat(shared), ids]))
            later = stops[stops >= max(begin, end)]
            if not (agrees and len(later)):
                raise ValueError(f'message {n + 1}: the chat template renders earlier turns differently once '
                                 'this answer is added, or ends the answer without a stop token')
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
        mask[room::room] = 0  # after a cut the first token has no context
        for begin in range(0, len(ids), room):
            piece = ids[begin:begin + room]
            n_eot = 1
            if len(piece) >= left[split]:
                n_eot += left[split]
                left[split] = block_size
            left[split] -= 1 + len(piece)
            learned = np.concatenate([np.zeros(n_eot, np.uint8), mask[begin:begin + room]])
            yield split, np.concatenate([np.repeat(eot, n_eot), piece]), learned, 0 if begin else n_bytes
    for split, n in left.items():
        yield split, np.repeat(eot, n + 1), np.zeros(n + 1, np.uint8), 0


def dtype_of(n_vocab):
    """The dtype of a .bin file."""
    return np.dtype('<u2' if n_vocab <= 1 << 16 else '<u4')


# writing ----------------------------------------------------------------------------------------------------

# kind of tokenizer: the part of its state that has a file of its own, tokenizer.<kind>
TABLES = {'tiktoken': 'ranks', 'json': 'source'}


def write_dataset(folder, texts, tok, label, procs=None, block_size=None, special_tokens='text',
                  errors='strict'):
    """Prepares a folder -> its meta. block_size: of conversations, else None."""
    counts = collections.Counter()
    eot = tok.eot
    work = functools.partial(encode, tok, special_tokens, errors)
    encoded = filter(None, in_processes(procs, work, items_to_encode(texts, tok.can_cut)))
    if block_size:  # an end of text that ends no message, if there is one
        eot = next((tok.special[text] for text in (EOT, '<|end_of_text|>') if text in tok.special), eot)
        encoded = pack(encoded, block_size, np.array(eot, dtype_of(tok.n_vocab)), counts)
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with cleanup:
        temp = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix='.prepare-', dir=folder.parent)))
        write_bins(temp, encoded, counts)
        meta = write_meta(temp, tok, label, eot, {**counts, 'block_size': block_size})
        folder.mkdir(exist_ok=True)
        for name in 'train.mask.bin', 'val.mask.bin', 'tokenizer.tiktoken':
            (folder / name).unlink(missing_ok=True)
        for path in temp.iterdir():  # a training that reads the old files keeps them
            path.replace(folder / path.name)
    return meta


def write_bins(folder, encoded, counts):
    """Writes what `encode` yields to .bin and .mask.bin, and adds to counts."""
    shown = time.time()
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda name: stack.enter_context(open(f'{folder}/{name}', 'wb')))
        for split, ids, mask, n_bytes in encoded:
            opened(f'{split}.bin').write(ids)
            if mask is not None:
                opened(f'{split}.mask.bin').write(mask)
            counts[f'{split}_tokens'] += len(ids)
            counts[f'{split}_learnt'] += len(ids) if mask is None else int(mask.sum())
            counts[f'{split}_bytes'] += n_bytes  # of learned text, without end of text
            if time.time() > shown + 10:
                shown = time.time()
                print(f"encoded: {counts['train_bytes'] / 1e6:,.0f} MB", flush=True)
    for split in SPLITS:
        if not counts[f'{split}_learnt']:
            raise ValueError(f'{split} has no token to learn: it needs more text, or at least two '
                             'conversations with messages of the role assistant that fit into --block_size')
    # val loss / ln 2 / this = bits per byte
    counts['bytes_per_token'] = counts['val_bytes'] / counts['val_learnt']


def write_meta(folder, tok, label, eot, counts):
    """Writes meta.json and the tokenizer's table; returns the meta."""
    state = tok.state()
    if key := TABLES.get(state['kind']):
        Path(folder, f'tokenizer.{state["kind"]}').write_bytes(state.pop(key).encode())
    meta = {'source': label, 'vocab_size': tok.n_vocab, 'dtype': dtype_of(tok.n_vocab).name, 'eot': eot,
            **counts, 'tokenizer': state}
    Path(folder, 'meta.json').write_text(json.dumps(meta, indent=1))
    return meta


def fetch_shards(folder, source):
    """Downloads a source's shards, GPT-2's tokens -> the folder's meta."""
    tok = tiktoken_tokenizer('gpt2')  # before the long wait
    val, *train = (read_shard(fetch(url, folder), '<u2') for url in source.shards)
    n_bytes = sum(int(tok.sizes[ids].sum()) for ids in np.array_split(val, 100))
    counts = {'train_tokens': sum(map(len, train)), 'val_tokens': len(val),
              'bytes_per_token': n_bytes / len(val)}
    return write_meta(folder, tok, source.label, tok.eot, counts)


# reading ----------------------------------------------------------------------------------------------------

class PlainUnpickler(pickle.Unpickler):
    """Reads plain data and refuses classes, by which a pickle could run code."""
    def find_class(self, module, name):
        raise ValueError(f'meta.pkl asks for {module}.{name}, but only plain data is read')


def read_meta(folder):
    """meta.json, nanoGPT's meta.pkl or an assumed dict: vocab_size, dtype, eot, bytes_per_token (or None),
    tokenizer (its state, None: GPT-2's), block_size (of slots, or None)..."""
    meta = {'dtype': 'uint16', 'eot': None, 'bytes_per_token': None, 'tokenizer': None, 'block_size': None}
    path = Path(folder, 'meta.json')
    if path.exists():
        return meta | json.loads(path.read_bytes())
    path = path.with_suffix('.pkl')
    if path.exists():
        with open(path, 'rb') as f:
            found = PlainUnpickler(f).load()
        if 'itos' in found:
            chars = [found['itos'][i] for i in range(found['vocab_size'])]
            meta['tokenizer'] = {'kind': 'char', 'chars': chars, 'eot': None}
        return meta | {'vocab_size': found['vocab_size']}
    print_once(f'{folder} has no meta.json or meta.pkl: assuming the GPT-2 encoding')
    return meta | {'vocab_size': 50304, 'eot': 50256}  # nanoGPT's size, 50257 rounded up


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
    """The tokenizer of a prepared folder, run, checkpoint or GGUF file."""
    if Path(folder).suffix == '.gguf':
        from zoo.hub import published_tokenizer
        return published_tokenizer(folder)
    if path := checkpoint_in(folder):
        import torch  # takes a second
        return tokenizer_from_state(torch.load(path, 'cpu', weights_only=True, mmap=True)['tokenizer'])
    state = read_meta(folder)['tokenizer']
    if state is None:
        return tiktoken_tokenizer('gpt2')
    if key := TABLES.get(state['kind']):
        state[key] = Path(folder, f'tokenizer.{state["kind"]}').read_bytes().decode()
    return tokenizer_from_state(state)


HEADER_BYTES = 1024  # of foreign shards: int32 magic, version, tokens, zeros
HEADER_MAGIC = 20240520


def read_shard(path, dtype):
    """The tokens at path, with or without a header, as a mapped array. It keeps the file open."""
    head = np.fromfile(path, '<i4', 3)
    if len(head) == 3 and head[0] == HEADER_MAGIC:
        return np.memmap(path, '<u2', 'r', HEADER_BYTES, int(head[2]))
    return np.memmap(path, dtype, 'r')


class Bins:
    """The tokens of one split: folder/<split>.bin, or else its shards *<split>*.bin, sorted.

    Sequence i of a shard is its block_size + 1 tokens from i * block_size on: each token but the first and
    the tail is a target once. Ids are checked once vocab_size is set. The mask of x.bin is x.mask.bin, a
    byte for each token.
    """
    def __init__(self, folder, split):
        self.vocab_size = None
        self.name = Path(folder, f'{split}.bin')
        paths = [self.name] if self.name.exists() else sorted(
            path for path in Path(folder).glob(f'*{split}*.bin') if '.mask' not in path.suffixes)
        if not paths:
            command = 'python prepare.py' + ' SOURCE' * (folder != FIRST_RUN)
            raise FileNotFoundError(f'{folder} is not prepared: no {split}.bin; run `{command}`')
        self.meta = read_meta(folder)
        dtype = np.dtype(self.meta['dtype']).newbyteorder('<')
        self.shards = [read_shard(path, dtype) for path in paths]
        self.n_tokens = sum(map(len, self.shards))
        masks = [path.with_suffix('.mask.bin') for path in paths]
        self.masks = [read_shard(path, np.uint8) for path in masks if path.exists()]
        n_masks = sum(map(len, self.masks))
        if (n_masks != self.n_tokens * bool(n_masks or self.meta['block_size'])
                or paths == [self.name] and self.meta.get(f'{split}_tokens', self.n_tokens) != self.n_tokens):
            raise ValueError(f'{self.name} has {self.n_tokens:,} tokens, but not as many as its mask or as '
                             'meta.json says: a file was cut or removed; prepare the folder again')

    def ends(self, block_size):
        """The numbers of sequences up to the end of each shard."""
        return np.cumsum([max(len(shard) - 1, 0) // block_size for shard in self.shards])

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
            self._check(shard)

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
        return np.stack([shards[number][first:first + block_size + 1]
                         for number, first in zip(numbers, firsts)]).astype(np.int64)


# looking ----------------------------------------------------------------------------------------------------

def look(folder):
    """Prints what meta.json says of a prepared folder, and the beginning of train.bin."""
    folder = data_folder(folder)
    bins = Bins(folder, 'train')
    tok = load_tokenizer(folder)
    print(*(f'{name}: {value}' for name, value in bins.meta.items() if name != 'tokenizer'), sep='\n')
    print(f'the first tokens by tokenizer {tok.name}, [[learned]] in double brackets:')
    inputs, targets = bins.batch([0], bins.meta['block_size'] or 256)
    for learned, run in itertools.groupby(zip(inputs[0, 1:], targets[0] >= 0), lambda pair: pair[1]):
        text = tok.decode([i for i, _ in run])
        print(f'[[{text}]]' if learned else text, end='')
    print()


def stop(number, _):
    """Removes temporary files, then ends the workers and the program. An exception here could leave
    the library waiting for its workers forever."""
    for other in signal.SIGINT, signal.SIGTERM:
        signal.signal(other, signal.SIG_IGN)
    if os.getpid() == MAIN:  # not a worker that has just begun
        cleanup.close()
        for worker in multiprocessing.active_children():
            worker.kill()  # before it prints that nobody reads its results
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


if __name__ == '__main__':
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    name, *more = settings.words or [source]
    values = settings.config | {'source': name}
    check_values(settings, values, globals())
    check_effects(settings, values, globals())
    if name == 'look':
        look(*more or [FIRST_RUN])
        sys.exit()
    if more:
        raise ValueError(f'{more[0]!r} is one source too many: put files into a folder, or quote a glob')
    source = find_source(name)
    tokenizer = tokenizer or source.tokenizer or (FIRST_RUN if source.chats else 'byte')
    folder = output_folder(out, source, tokenizer)
    if not overwrite and is_prepared(folder) and read_meta(folder).get('source') != source.label:
        raise ValueError(f'{folder} holds other data than {source.label}: choose another --out, or replace '
                         'it by --overwrite=True')

    if source.shards:
        if tokenizer != 'gpt2':
            raise ValueError(f'tokenizer={tokenizer!r} cannot be used: {source.name} has only tokens of gpt2')
        meta = fetch_shards(folder, source)
    else:
        n_train = characters_to_train_on(source, val_fraction)
        texts = functools.partial(split_texts, source, val_fraction, n_train)
        if tokenizer.endswith('.gguf') or is_prepared(tokenizer) or checkpoint_in(tokenizer):
            tok = load_tokenizer(tokenizer)
        else:
            blocks = contents if source.chats else iter
            tok = make_tokenizer(
                tokenizer, texts=(blocks(document) for _, document, _ in texts()),
                training=(blocks(document) for split, document, _ in texts() if split == 'train'),
                by_document=source.chats or len(n_train) > 1, procs=procs)
        meta = write_dataset(folder, texts(), tok, source.label, procs, block_size if source.chats else None,
                             special_tokens, errors)

    print(f'{folder}: {meta["train_tokens"]:,} train and {meta["val_tokens"]:,} val tokens, '
          f'{meta["bytes_per_token"]:.2f} bytes per token, vocabulary {meta["vocab_size"]:,}')
    config = ''
    if source.chats:
        config = ' config/chat.py'
        print(f'{meta["train_learnt"]:,} train tokens are learned; {meta["cut"]:,} conversations are longer '
              f'than {block_size} tokens and cut')
    print(f'next: python train.py{config} --dataset={folder}')
