"""Turns text into tokens: writes data/<name>/train.bin, val.bin and meta.json, which train.py reads.

    $ python prepare.py                               # Python's library: data/pystdlib_bpe4096
    $ python prepare.py shakespeare --tokenizer=char  # data/shakespeare_char
    $ python prepare.py my.txt --tokenizer=gpt2 --out=mydata
    $ python prepare.py 'notes/**/*.md'               # a folder or quoted glob: one document per file
    $ python prepare.py tales.jsonl.gz --field=story  # one document per record; also .json, .csv, .parquet
    $ python prepare.py chats.jsonl                   # conversations
"""
import collections
import contextlib
import csv
import functools
import glob
import hashlib
import importlib
import io
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
from pathlib import Path

from configurator import (
    UserError,
    check_effects,
    check_values,
    configure,
    package,
    print0,
    reading,
    use_parts,
)

# A name in SOURCES, a file (perhaps compressed), a folder or glob
source = 'pystdlib'
# field with a record's text or messages
field = 'text'             # [if records]
# Invalid UTF-8: strict raises an error, replace writes U+FFFD, ignore omits it. ignore also omits
# records without text or messages, and conversations that the chat template rejects
errors = 'strict'          # [in ('strict', 'replace', 'ignore')]
# byte, char, bpe:4096 (trained here), a tiktoken encoding (gpt2, o200k_base...), a run, prepared
# data, or a published model (hub id, .gguf file, folder with tokenizer.json). None: the source's
# default; without a default, data/pystdlib_bpe4096 for conversations and byte for text
tokenizer: str | None = None
# encode special tokens inside records as plain text, or as tokens
special_tokens = 'text'    # [in ('text', 'tokens')]
out: str | None = None     # a name in data/, or a path with a slash; None: <source>_<tokenizer>
overwrite = False          # replace data of another source in `out`
# share of text for validation, at most 10M characters or 10,000 conversations
val_fraction = 0.1         # [> 0] [<= 0.5]
block_size = 256           # tokens per packed sequence; must be equal in train.py [>= 2] [if conversations]
# files to download
shards = 10                # [>= 1] [if source in SOURCES]
procs: int | None = None   # processes that encode; None: one per core [>= 1]
settings = configure(globals(), words=sys.maxsize, texts=True)

import numpy as np

from tokenizer import (
    EOT,
    MARK,
    THOUGHTS,
    TiktokenTokenizer,
    in_processes,
    json_value,
    kind_of,
    make_tokenizer,
    pieces,
    tokenizer_from_state,
    without_surrogates,
)

SPLITS = 'train', 'val'
FIRST_RUN = 'data/pystdlib_bpe4096'
VAL_CHARACTERS = 10_000_000
VAL_CHATS = 10_000
print_once = functools.cache(print0)


# files as documents -----------------------------------------------------------------------------------------
# document: blocks of text, or a Conversation

FOREIGN = {  # first bytes of a file -> what it is, and what to do
    rb'version https://git-lfs': 'a pointer of git-lfs: run `git lfs pull`',
    rb'PAR1': 'a parquet file: let its name end in .parquet',
    rb'ARROW1|FEA1|\xff{4}': 'an Arrow file: convert it to parquet',
    rb'\(\xb5/\xfd': 'compressed by zstd: run `zstd -d`',
    rb'.{257}ustar|7z\xbc\xaf|PK\x03\x04|Rar!': 'a tar, zip or other archive: unpack it',
    rb'%PDF|{\\rtf|\xd0\xcf\x11\xe0': 'a PDF, RTF or Office document: convert it to text',
    rb'\xff\xfe|\xfe\xff': 'UTF-16: convert it to UTF-8',
    rb'.*\0|(?=.*[\x01-\x08\x0e-\x1a]).*[\xc0\xc1\xf5-\xff]':
        'binary data: remove it, or choose the files by a quoted glob'}


OPENERS = {  # ending -> first bytes, module that opens such a file
    '.gz': (rb'\x1f\x8b', 'gzip'), '.bz2': (rb'BZh\d1AY', 'bz2'), '.xz': (rb'\xfd7zXZ', 'lzma')}


def unpacked(path):
    """'a.jsonl' for a.jsonl.gz"""
    stem, end = os.path.splitext(path)
    return stem if end.lower() in OPENERS else path


def ending(path):
    """'.jsonl' for a.jsonl.gz"""
    return Path(unpacked(path)).suffix.lower()


def open_file(path, known=None):
    """Opens a plain or compressed file as bytes. known: a key of FOREIGN to accept."""
    f = open(path, 'rb')  # noqa: SIM115
    head = f.peek(8000)
    for magic, module in OPENERS.values():
        if re.match(magic, head):
            f = importlib.import_module(module).open(f)
            head = f.peek(8000)
    key = next((key for key in FOREIGN if re.match(key, head, re.DOTALL)), known)
    if key != known:
        raise UserError(f'{path} is {FOREIGN[key]}')
    return f


@contextlib.contextmanager
def open_text(path, errors):
    """Opens a plain or compressed text file."""
    with reading(path), io.TextIOWrapper(open_file(path), 'utf-8-sig', errors, newline='') as f:
        try:
            yield f
        except UnicodeDecodeError as e:
            raise UserError(f'{path} is not UTF-8 text: convert it, remove it, or use --errors=replace, '
                            'which writes U+FFFD for invalid bytes') from e


def read_text(path, errors):
    """A file's blocks of text."""
    with open_text(path, errors) as f:
        while block := f.read(1 << 20):
            yield block


def text_documents(path, errors):
    """Yields a file's text, split at <|endoftext|> if the first 16M characters contain it."""
    blocks = read_text(path, errors)
    head = [*itertools.islice(blocks, 16)]
    blocks = itertools.chain(head, blocks)
    if EOT in ''.join(head):
        text = ''
        for block in itertools.chain(blocks, [EOT]):
            *ended, text = (text + block).split(EOT)
            yield from ([part.strip()] for part in ended if part.strip())
    elif head:
        yield blocks


def json_records(path, errors):
    """Reads JSON values, which may span lines. If an array is not a conversation, yields its items. Yields a
    ValueError for a damaged value, and continues on the next line."""
    decode = json.JSONDecoder().raw_decode
    with open_text(path, errors) as f:
        for line in f:
            text = line.strip()
            while text:
                try:
                    value, end = decode(text)
                except (ValueError, RecursionError) as e:
                    if getattr(e, 'pos', 0) == len(text) and (more := f.read(len(text)) + f.readline()):
                        text = f'{text}\n{more}'.rstrip()
                        continue
                    if text.count('\n') > 9999:  # stop at a damaged long array
                        raise
                    value = ValueError(f'{text[:60]!r} is not JSON')
                    end = re.match('.*', text).end()
                text = text[end:].lstrip()
                yield from value if isinstance(value, list) and not is_conversation(value) else [value]


def csv_records(path, errors, **dialect):
    """Reads CSV."""
    csv.field_size_limit(1 << 30)
    with open_text(path, errors) as f:
        rows = csv.DictReader(f, strict=True, **dialect)
        try:
            for row in rows:
                if None in row:
                    raise UserError(f'{path}, line {rows.line_num} has more cells than the first line: '
                                    'quote cells that contain the separator')
                yield row
        except csv.Error as e:
            raise UserError(f'{path}, line {rows.line_num + 1}: {e}: correct the quotation marks') from e


def parquet_records(path, errors):
    """Reads parquet."""
    parquet = package('pyarrow.parquet', 'parquet files need', 'pyarrow')
    with reading(path):
        for batch in parquet.ParquetFile(open_file(path, rb'PAR1')).iter_batches(256):
            yield from batch.to_pylist()


# ending -> function of (path, errors) that yields records: {field: value}, other JSON values, or ValueErrors
FORMATS = {'.jsonl': json_records, '.ndjson': json_records, '.json': json_records, '.csv': csv_records,
           '.tsv': functools.partial(csv_records, delimiter='\t', quoting=csv.QUOTE_NONE),
           '.parquet': parquet_records}


def file_documents(paths, field='text', errors='strict', chats=None):
    """Yields the nonempty documents of files. chats: accept conversations (True), texts (False)
    or both (None)."""
    for path in paths:
        if ending(path) not in FORMATS:
            yield from text_documents(path, errors)
            continue
        wrong = []
        for n, record in enumerate(FORMATS[ending(path)](path, errors), 1):
            try:
                document = read_record(f'{path}, record {n}', record, field, chats)
                if document != ['']:
                    yield document
            except ValueError as e:
                if errors != 'ignore':
                    raise
                wrong.append(str(e))
        if wrong:
            print_once(f'{path}: left out {len(wrong):,} of {n:,} records: {wrong[0]}')


# conversations ----------------------------------------------------------------------------------------------

# messages: [{'role': 'user', 'content': text, perhaps more}, ...]; tools: JSON schemas
Conversation = collections.namedtuple('Conversation', 'place messages tools', defaults=[None])
NAMES = {  # a dataset's field -> our name
    'conversations': 'messages', 'prompt': 'question', 'instruction': 'question', 'input': 'more',
    'context': 'more', 'output': 'answer', 'response': 'answer', 'completion': 'answer',
    'system_prompt': 'system', 'from': 'role', 'value': 'content',
    'user': 'question', 'human': 'question', 'assistant': 'answer', 'gpt': 'answer'}
SPEAKERS = {'human': 'user', 'gpt': 'assistant', 'chatgpt': 'assistant', 'developer': 'system'}
ROLES = 'system', 'user', 'assistant', 'tool'
# if one of these fields is false, the message is not learned
LEARNED = 'learn', 'weight', 'loss_mask', 'loss', 'train', 'trainable', 'train_on_turn'


def read_record(place, record, field='text', chats=None):
    """Returns [text] or a Conversation. Raises UserError if the record is neither."""
    try:
        if isinstance(record, Exception):
            raise record
        if isinstance(record, (str, list)):
            record = {'text' if isinstance(record, str) else 'messages': record}
        if isinstance(record.get(field), str) and field not in ('messages', 'conversations'):
            document = [without_surrogates(record[field])]
        else:
            if field != 'text':
                record = record | {'messages': [from_json(record[field])]}
            messages = [*map(read_message, to_messages(record))]
            # MiniMind stores tools in a message
            tools = from_json(record.get('tools') or messages[0].pop('tools', []))
            document = Conversation(place, messages, tools + [] or None)
        if chats in (None, isinstance(document, Conversation)):
            return document
        raise UserError('texts and conversations must be prepared separately')
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as e:
        reason = e if e is record else (
            f'no text in field {field!r} and no messages in {record!r:.200} ({e!r:.200})')
        raise UserError(f'{place}: {reason}: correct the record, choose another --field, or omit such '
                        'records by --errors=ignore') from None


def is_conversation(value):
    """Whether a list begins with a message."""
    return any(isinstance(one, dict) and {'role', 'content'} <= renamed(one).keys() for one in value[:1])


def to_messages(value, role=None):
    """Converts a message, record, text or list to messages. A list contains such values; its texts form
    question-answer pairs. If `role` is given, a text is content, otherwise JSON of such a value."""
    if isinstance(value, str):
        return [{'role': role, 'content': value}] if role else to_messages(json.loads(value))
    if isinstance(value, list):
        if str in map(type, value) and (len(value) % 2 or value[0] in (*ROLES, *SPEAKERS)):
            raise UserError(f'{value!r:.80} is not pairs of question and answer')
        return [message for one, role in zip(value, itertools.cycle(ROLES[1:3]))
                for message in to_messages(one, role)]
    named = renamed(value)
    if role and 'role' in named:
        return [named]
    turns = named.get('messages')
    if not turns:
        question = named.get('question', '')
        if named.get('more'):
            question = '\n\n'.join(filter(None, [question, named['more']]))
        turns = [from_json(named.get('history')) or [], [question, named['answer']]]
    return [*to_messages(named.get('system') or [], 'system'), *to_messages(turns)]


def read_message(message):
    """Normalises a message for chat templates."""
    message['role'] = SPEAKERS.get(message['role'], message['role'])
    if isinstance(message.get('content'), list):  # OpenAI's parts, {'type': 'text', 'text': text}
        message['content'] = ''.join(part['text'] for part in message['content'])
    if calls := from_json(message.get('tool_calls')):
        for call in calls:
            function = call.get('function', call)
            function |= {'name': function['name'], 'arguments': from_json(function.get('arguments')) or {}}
        message['tool_calls'] = calls
    if calls or message.keys() & {*THOUGHTS}:
        message.setdefault('content', '')
    if message['role'] not in ROLES or not isinstance(message.get('content'), str):
        raise UserError(f'{message!r:.80} needs a role, one of {", ".join(ROLES)}, and text as its content')
    if any(name in message and not message[name] for name in LEARNED):
        message['learn'] = False
    return json_value(message)


def renamed(record):
    """Omits nulls, then renames fields in the order of NAMES. Omits a field if its new name exists."""
    result = {key: value for key, value in record.items() if value is not None}
    for key, name in NAMES.items():
        if key in result:
            result.setdefault(name, result.pop(key))
    return result


def from_json(value):
    """Parses JSON if the value is text, and omits nulls."""
    return json_value(json.loads(value) if value and isinstance(value, str) else value)


def contents(conversation):
    """The texts of a conversation's messages."""
    return [without_surrogates(message['content']) for message in conversation.messages]


# sources ----------------------------------------------------------------------------------------------------

# documents: a function that yields nonempty documents
# chats: whether documents are Conversations
# shards: URLs of token files instead of documents; the first is for validation
# tokenizer: the default
# records: whether a file has records
Source = collections.namedtuple('Source', 'name label documents chats shards tokenizer records',
                                defaults=[None, False, None, None, False])
LEFT_OUT = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages'}


def library_files():
    """The standard library's files, except tests and installed packages."""
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path('stdlib')):
        folders[:] = set(folders) - LEFT_OUT
        files += [f'{folder}/{name}' for name in names if name.endswith('.py')
                  and not name.startswith('_sysconfigdata')]  # specific to this machine
    return sorted(files, key=Path)  # the same order everywhere


def fetch(url, folder):
    """Downloads a missing file, continuing its .part file."""
    path = f'{folder}/{Path(url).name}'
    if os.path.exists(path):
        return path
    import requests
    os.makedirs(folder, exist_ok=True)
    print(f'downloading {url}')
    wait = 1.5
    with open(f'{path}.part', 'ab') as f:
        while True:
            begin = max(f.seek(0, 2) - 1, 0)  # repeats a byte, because servers reject empty ranges
            try:
                with requests.get(url, stream=True, timeout=60, headers={
                        'Accept-Encoding': 'identity', 'Range': f'bytes={begin}-'}) as response:
                    response.raise_for_status()
                    f.truncate(begin if response.status_code == 206 else 0)
                    f.writelines(response.iter_content(1 << 16))
                break
            except requests.RequestException as e:
                wait = 3 if f.seek(0, 2) > begin + 1 else wait * 2  # 3 if bytes arrived
                if wait > 48 or 429 != getattr(e.response, 'status_code', 500) < 500:
                    raise OSError(f'cannot download {url} ({e}): go online, put the file into {folder}, or '
                                  'use your own text: python prepare.py my.txt') from e
                print(f'{path}: trying again in {wait} s ({e})')
                time.sleep(wait)
    os.replace(f.name, path)
    return path


HUB = 'https://huggingface.co/datasets'
MINIMIND = f'{HUB}/jingyaogong/minimind_dataset/resolve/main'


def download(name, url, most=1, **options):
    """A Source of up to `most` files. {} in url stands for a file's number."""
    return Source(name, name, lambda: file_documents(
        [fetch(url.format(n), f'data/{name}') for n in range(min(shards, most))], errors=errors), **options)


SOURCES = {source.name: source for source in (
    Source('pystdlib', f'pystdlib {platform.python_version()}',
           lambda: file_documents(library_files(), errors='replace'), tokenizer='bpe:4096'),
    download('shakespeare',
             'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'),
    download('tinystories', f'{HUB}/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt'),
    download('openwebtext',  # nanoGPT's dataset
             f'{HUB}/Skylion007/openwebtext/resolve/main/plain_text/train-{{:05d}}-of-00080.parquet', 80,
             tokenizer='gpt2'),
    download('climbmix',  # nanochat's dataset
             f'{HUB}/karpathy/climbmix-400b-shuffle/resolve/main/shard_{{:05d}}.parquet', shards),
    Source('fineweb_edu', 'fineweb_edu', tokenizer='gpt2', shards=[
        f'{HUB}/kjj0/finewebedu10B-gpt2/resolve/main/finewebedu_{part}.bin'
        for part in ('val_000000', *[f'train_{n:06d}' for n in range(1, min(shards, 99) + 1)])]),
    download('minimind', f'{MINIMIND}/pretrain_t2t_mini.jsonl'),
    download('minimind_sft', f'{MINIMIND}/sft_t2t_mini.jsonl', chats=True),
    download('smol_smoltalk',
             f'{HUB}/HuggingFaceTB/smol-smoltalk/resolve/main/data/train-{{:05d}}-of-00004.parquet', 4,
             chats=True),
)}


def find_source(source):
    """The Source of a name, file, folder or glob."""
    if source in SOURCES:
        return SOURCES[source]
    path = os.path.expanduser(source)
    name = Path(os.path.abspath(re.split(r'[^/\\]*[*?[]', path)[0])).name
    if os.path.isfile(path):
        name = Path(unpacked(path)).stem
        found = [path]
    elif os.path.isdir(path):  # glob.glob would follow links, which may form loops
        if is_prepared(path) or checkpoint_in(path):
            raise UserError(f'{path} contains tokens or a checkpoint: name a file or folder of text')
        found = [str(one) for one in Path(path).rglob('*')
                 if not any(part[0] == '.' for part in one.relative_to(path).parts)]
    else:
        found = glob.glob(path, recursive=True)
    paths = [one for one in sorted(found, key=Path)
             if os.path.isfile(one) and not one.endswith(('.part', '.crdownload'))]
    if not paths:
        raise FileNotFoundError(f'{source}: no such file, folder or glob with files, and none of '
                                f'{", ".join(SOURCES)}: check the path')
    records = [path for path in paths if ending(path) in FORMATS]
    chats = isinstance(next(file_documents(records, field, errors), None), Conversation)
    if chats and records != paths:
        print('left out, because other files have conversations:', *sorted({*paths} - {*records}))
        paths = records
    documents = functools.partial(file_documents, paths, field, errors, chats)
    return Source(name, source, documents, chats, records=bool(records))


def data_folder(name):
    """`name` if it has a slash, else data/<name>."""
    return name if os.path.dirname(name) else f'data/{name}'


def output_folder(out, source, tokenizer):
    """The folder to write."""
    kind = Path(tokenizer.removesuffix('tokenizer.json')).name.replace(':', '')
    name = out or re.sub(r'[^\w.-]+', '_', f'{source.name}_{kind}').strip('._')
    if not out and (source.chats or name in ('shakespeare_gpt2', 'openwebtext_gpt2')):  # nanoGPT omits _gpt2
        name = source.name
    return data_folder(name)


# splits and ids --------------------------------------------------------------------------------------------

def characters_to_train_on(source, fraction):
    """How many characters per document to train on; None for conversations. Validation gets every n-th
    document, n = round(1 / fraction), up to a limit: `fraction` of all text, at most VAL_CHARACTERS. If these
    documents have less than half of the limit, the end of the longest document is added."""
    if source.chats:
        return None
    n_train = [sum(map(len, document)) for document in source.documents()]
    total = sum(n_train)
    fraction = min(fraction, VAL_CHARACTERS / max(1, total))
    room = total - int(total * (1 - fraction))
    places = [*range(1, len(n_train), round(1 / fraction))]
    if sum(n_train[n] for n in places) < room / 2:
        places.append(n_train.index(max(n_train)))
    for n in places:
        n_val = min(n_train[n], room)
        n_train[n] -= n_val
        room -= n_val
    return n_train


def split_texts(source, fraction, n_train):
    """Yields (split, document or part, whether there are several documents)."""
    for n, document in enumerate(source.documents()):
        if source.chats:
            is_val = n % round(1 / fraction) == 1 and n * fraction < VAL_CHATS
            yield 'val' if is_val else 'train', document, True
        else:
            for split, parts in itertools.groupby(cut_in_two(document, n_train[n]), lambda part: part[0]):
                yield split, (block for _, block in parts), len(n_train) > 1


def cut_in_two(blocks, n_train):
    """Yields (split, block)."""
    for block in blocks:
        if n_train:
            yield 'train', block[:n_train]
        if len(block) > n_train:
            yield 'val', block[n_train:]
        n_train = max(n_train - len(block), 0)


def pieces_of_texts(texts, can_cut):
    """Yields (split, piece, whether it needs a bos, whether it needs an eot)."""
    for split, blocks, several in texts:
        for n, (text, last) in enumerate(pieces(blocks, can_cut)):
            yield split, text, n == 0, last and several


def encode_piece(tok, special_tokens, piece):
    """An item of pieces_of_texts -> (split, {'': ids}, number of text bytes)."""
    split, text, begins, ends = piece
    ids = (tok.encode_chat if special_tokens == 'tokens' else tok.encode_array)(text)
    parts = [ids]  # MiniMind 2's text already contains bos and eot
    if begins and not {*ids[:1]} & {*tok.bos}:
        parts.insert(0, tok.bos)
    if ends and tok.eot not in (None, *ids[-1:]):
        parts.append([tok.eot])
    ids = np.concatenate(parts, dtype=dtype_of(tok.n_vocab), casting='unsafe')
    return split, {'': ids}, int(tok.sizes[ids].sum())


def encode_chat(tok, special_tokens, errors, item):
    """An item of split_texts -> (split, columns, number of learned bytes, length of
    encode_conversation's `opened`)."""
    split, chat, _ = item
    opened = []
    try:
        ids, mask = encode_conversation(
            tok, chat if special_tokens == 'tokens' else Conversation(*tok.as_text([*chat])), opened)
        if tok.document_token in ids[1:-1]:
            raise UserError(f'{tok.decode([tok.document_token])} would end the conversation early')
    except (ValueError, RecursionError) as e:
        if errors == 'ignore':
            return None
        raise UserError(f'{chat.place}, {e}: correct the conversation, or omit all conversations that fail '
                        'by --errors=ignore') from None
    return split, {'': ids, '.mask': mask}, int(mask @ tok.sizes[ids]), len(opened)


def encode_conversation(tok, conversation, opened=()):
    """(ids, uint8 mask). The mask is 1 for each learned answer, beginning at the first id that differs from
    the prompt, and ending with the first stop token between the answer's content and the next message's
    content. If there is none, the last answer gets a stop token; others are learned without one. opened:
    collects prompts that begin a thought which the answer lacks."""
    _, messages, tools = conversation
    render = functools.partial(tok.render, tools=tools)
    text = render(messages, False)
    ids = tok.encode_chat(text)
    mask = np.zeros(len(ids) + 1, np.uint8)
    marks = '|'.join(re.escape(tok.decode([i])) for i in tok.stop_tokens)
    stops = [*zip((match.start() for match in re.finditer(marks, text)),  # (place in text, index in ids)
                  np.flatnonzero(np.isin(ids, tok.stop_tokens)))]
    for n, message in enumerate(messages):
        if message['role'] != 'assistant':
            continue
        calls = message.get('tool_calls')
        start = start_of_answer(render, messages, n, text, opened)
        said = end_of_content(render, messages, n, text, start)
        stop, end = next((stop for stop in stops if stop[0] >= said), (len(text), 0))
        if stop < next_content(render, messages, n, text, start, stop):
            end += 1
        elif n + 1 == len(messages) and tok.stop_tokens:
            ids.append(tok.stop_tokens[0] if calls else tok.end_of_answer)
            end = len(ids)
        else:
            own = (render(messages[:n + 1], False) if calls else
                   text[:first_change(render, messages, n, text, content=message['content'] + MARK)])
            if n + 1 == len(messages) or common(own, text) < said:
                raise UserError(f'message {n + 1}: the chat template ends this answer without a known stop '
                                'token')
            end = common(tok.encode_chat(own), ids)
        mask[common(tok.encode_chat(text[:start]), ids):end] = message.get('learn') is not False
    return np.array(ids, dtype_of(tok.n_vocab)), mask[:len(ids)]


# The next functions find places in `text`, the rendered messages. Message n is an answer. render: (messages,
# add_generation_prompt) -> text.

def start_of_answer(render, messages, n, text, opened):
    """The end of the answer's prompt."""
    prompt = render(messages[:n], True)
    start = common(prompt, text)
    if start < len(prompt):
        asked, before, rendered = (''.join(one.split()) for one in (
            prompt, render(messages[:n], False), text))
        same = common(asked, rendered)
        if not rendered.startswith(before):
            raise UserError(f'message {n + 1}: the chat template renders earlier turns differently once '
                            'this answer is added')
        opened += (prompt,) * (same < len(asked))
        start = max(start, [0, *(match.end() for match in re.finditer(r'\S', text))][same])
    return start


def end_of_content(render, messages, n, text, start):
    """The place of the answer's first tool call, or else the end of its content."""
    content = messages[n]['content'].strip()
    calls = messages[n].get('tool_calls')
    said = -1 if calls else text.find(content, start)
    if said < 0:  # find the place by changing the message
        content = ''
        change = {'tool_calls': [call | {'function': {'name': MARK, 'arguments': {}}} for call in calls]
                  } if calls else {'content': MARK}
        said = first_change(render, messages, n, text, **change)
        if said == len(text):
            raise UserError(f'message {n + 1}: the chat template does not render its {"".join(change)}')
    return max(said + len(content), start)


def next_content(render, messages, n, text, start, stop):
    """The place of the next message's content, or len(text)."""
    if n + 1 == len(messages):
        return len(text)
    following = messages[n + 1]['content']
    place = text.find(following.strip() or MARK, start)
    # else `following` is missing, or occurs in this answer too
    return place if place > stop else first_change(render, messages, n + 1, text, content=MARK + following)


def first_change(render, messages, n, text, **change):
    """The place where a change of message n first shows."""
    return common(text, render([*messages[:n], messages[n] | change, *messages[n + 1:]], False))


def common(a, b):
    """The length of the common prefix of two texts or lists."""
    return len(os.path.commonprefix([a, b]))


def pack(encoded, block_size, first, counts):
    """Packs results of encode_chat into sequences of block_size tokens.

    The id `first` begins each conversation, follows each cut, and pads sequences; other columns are 0 there.
    Each split ends with one more token, its last target.
    """
    left = dict.fromkeys(SPLITS, block_size)
    room = block_size - 1
    columns = {'': np.array([], first.dtype), '.mask': np.zeros(0, np.uint8)}
    for split, columns, n_bytes, n_opened in encoded:
        start = int(columns[''][0] == first)
        end = len(columns[''])
        counts['cut'] += end - start > room
        counts['opened'] += n_opened
        columns['.mask'][start + room::room] = 0  # the first token after a cut has no context
        for begin in range(start, end, room):
            size = min(room, end - begin)
            n_first = 1
            if size >= left[split]:
                n_first += left[split]
                left[split] = block_size
            left[split] -= 1 + size
            yield (split, {name: np.pad(values[begin:begin + size], (n_first, 0),
                                        constant_values=0 if name else first)
                           for name, values in columns.items()}, 0 if begin > start else n_bytes)
    for split, n in left.items():
        yield split, {name: np.full(n + 1, 0 if name else first, values.dtype)
                      for name, values in columns.items()}, 0


def dtype_of(n_vocab):
    """The dtype of a .bin file."""
    return np.dtype('<u2' if n_vocab <= 1 << 16 else '<u4')


# writing ----------------------------------------------------------------------------------------------------

def write_dataset(folder, texts, tok, label, procs=None, block_size=None, special_tokens='text',
                  errors='strict'):
    """Writes a folder. texts: from split_texts; block_size: only for conversations."""
    counts = collections.Counter()
    eot = tok.eot
    if block_size:
        work = functools.partial(encode_chat, tok, special_tokens, errors)
        encoded = filter(lambda item: item or counts.update(left_out=1), in_processes(procs, work, texts))
        eot = tok.document_token
        first = [*tok.stop_tokens, 0][0] if eot is None else eot
        encoded = pack(encoded, block_size, np.array(first, dtype_of(tok.n_vocab)), counts)
    else:
        work = functools.partial(encode_piece, tok, special_tokens)
        encoded = in_processes(procs, work, pieces_of_texts(texts, tok.can_cut))
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.prepare-', dir=folder.parent) as temp:
        write_bins(temp, encoded, counts)
        meta = write_meta(temp, tok, label, eot, {**counts, 'packed': block_size, 'chats': bool(block_size)})
        folder.mkdir(exist_ok=True)
        columns = {'.mask'}  # older data may have this column
        if (folder / 'meta.json').exists():
            with contextlib.suppress(UserError):  # a damaged meta.json
                columns |= read_meta(folder)['columns'].keys()
        for split, name in itertools.product(SPLITS, columns):
            (folder / f'{split}{name}.bin').unlink(missing_ok=True)
        for path in Path(temp).iterdir():  # running jobs keep the old files
            path.replace(folder / path.name)
    return meta


def write_bins(folder, encoded, counts):
    """Writes train.bin, train.<column>.bin and so on. Adds to counts."""
    shown = time.time()
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda name: stack.enter_context(open(f'{folder}/{name}', 'wb')))
        for split, columns, n_bytes in encoded:
            dtypes = counts.setdefault('columns', {})
            for name, values in columns.items():
                opened(f'{split}{name}.bin').write(values)
                digest.update(values)
                if name:
                    dtypes[name] = values.dtype.name
            counts[f'{split}_tokens'] += len(columns[''])
            mask = columns.get('.mask')
            counts[f'{split}_learnt'] += len(columns['']) if mask is None else int(mask.sum())
            counts[f'{split}_bytes'] += n_bytes  # bytes of learned text
            if time.time() > shown + 10:
                shown = time.time()
                print(f"encoded: {counts['train_bytes'] / 1e6:,.0f} MB", flush=True)
    for split in SPLITS:
        if not counts[f'{split}_learnt']:
            raise UserError(f'{split} has no token to learn: add text, or conversations in which a message '
                            'of the role assistant fits into --block_size')
    counts['bytes_per_token'] = counts['val_bytes'] / counts['val_learnt']
    counts['digest'] = digest.hexdigest()


def write_meta(folder, tok, label, eot, counts):
    """Writes meta.json and the tokenizer's table."""
    state = tok.state()
    if tok.table:
        Path(folder, f'tokenizer.{tok.kind}').write_bytes(state.pop(tok.table).encode())
    meta = {'source': label, 'vocab_size': tok.n_vocab, 'dtype': dtype_of(tok.n_vocab).name, 'eot': eot,
            **counts, 'tokenizer': state}
    Path(folder, 'meta.json').write_text(json.dumps(meta, indent=1))
    return meta


def fetch_shards(folder, source):
    """Downloads shards of GPT-2 tokens."""
    tok = TiktokenTokenizer.from_name('gpt2')
    val, *train = (read_shard(fetch(url, folder), 'uint16') for url in source.shards)
    n_bytes = sum(count_bytes(ids, tok) for ids in np.array_split(val, 100))
    return write_meta(folder, tok, source.label, tok.eot, {
        'train_tokens': sum(map(len, train)), 'val_tokens': len(val), 'bytes_per_token': n_bytes / len(val)})


# reading ----------------------------------------------------------------------------------------------------

class PlainUnpickler(pickle.Unpickler):
    """Rejects classes, which could run code."""
    def find_class(self, module, name):
        raise UserError(f'meta.pkl contains {module}.{name}, but only plain data is supported')


# field of meta.json -> pattern of its JSON text
FIELDS = {
    'vocab_size': r'[1-9]\d{,8}',
    'dtype': '"uint(8|16|32)"',
    'eot': r'\d{1,9}|null',
    'bytes_per_token': r'\d[\d.e-]*|null',
    'tokenizer': '{.*}|null',         # the tokenizer's state(); null: GPT-2
    'packed': r'[1-9]\d{,8}|null',    # tokens per packed sequence; null: not packed
    'chats': 'true|false',
    'columns': r'{("\.\w+": "u?(int|float)\d+"(, )?)*}',  # column (.mask for train.mask.bin) -> dtype
    'digest': '.*',                   # SHA-256 of tokens and `columns`, in writing order
}
# magic number -> fields of meta.json. llm.c's files begin with 1,024 bytes of int32: magic number,
# version, number of tokens, zeros
LLM_C = {
    # nanoGPT's vocab_size
    20240520: {'source': 'GPT-2', 'vocab_size': 50304, 'dtype': 'uint16', 'eot': 50256},
    20240801: {'source': 'Llama 3', 'vocab_size': 128256, 'dtype': 'uint32',
               'tokenizer': {'kind': 'json'}},  # reads tokenizer.json in the folder
}


SPLIT_WORD = re.compile(r'(?<![^\W\d_])(train|val)(?:ing|id|idation)?(?![^\W\d_])')  # not next to letters


def column_of(path):
    """'.mask' for train.mask.bin; '' for tokens, as in train.bin and fineweb.train.000001.bin."""
    name = Path(path.stem).suffix
    return name if name[1:].isidentifier() and not SPLIT_WORD.search(name) else ''


def read_meta(folder):
    """Reads meta.json or nanoGPT's meta.pkl. Without either, assumes the encoding of llm.c's header, or
    else GPT-2. Returns a dict with FIELDS. Raises UserError if a value does not match FIELDS."""
    bins = sorted(Path(folder).glob('*.bin'))
    path = Path(folder, 'meta.json')
    if path.exists():
        with reading(path):
            found = {**json.loads(path.read_bytes())}
    elif (path := path.with_suffix('.pkl')).exists():
        with reading(path), open(path, 'rb') as f:
            nanogpt = PlainUnpickler(f).load()
            itos = nanogpt['itos']  # {id: character} in any order, or a list
            found = {'vocab_size': nanogpt['vocab_size'], 'tokenizer': {
                'kind': 'char', 'chars': [itos[i] for i in range(len(itos))], 'eot': None}}
    else:
        found = next(filter(None, map(llm_c_meta, bins)), LLM_C[20240520])
        print_once(f'{folder} has no meta.json or meta.pkl: assuming the {found["source"]} encoding')
    # older versions packed only conversations, and stored block_size instead of `packed`, `columns`, `chats`
    size = found.get('block_size')
    meta = dict.fromkeys(FIELDS) | {
        'dtype': 'uint16', 'packed': size, 'columns': {'.mask': 'uint8'} if size else {},
        'chats': '.mask' in map(column_of, bins) or bool(size)} | found
    for name, pattern in FIELDS.items():
        if not re.fullmatch(pattern, json.dumps(meta[name], default=str)):
            raise UserError(f'{path}: {name}={meta[name]!r:.80} is not possible: prepare the folder again '
                            'with --overwrite=True')
    others = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in bins
              if not meta['digest'] or column_of(path) in {'.mask'} - meta['columns'].keys()]
    if others:
        meta['digest'] = [*filter(None, [meta['digest']]), *others]
    return meta


# fields of meta.json that do not identify the data
LABELS = {'source', 'block_size', 'cut', 'opened', 'left_out',
          *(f'{split}_{unit}' for split in SPLITS for unit in ('tokens', 'learnt', 'bytes'))}


def identity(meta):
    """The fields that identify the data."""
    return {name: meta[name] for name in meta if name not in LABELS}


def is_prepared(folder):
    """Whether a folder has prepared data."""
    return any(any(Path(folder).glob(name)) for name in ('meta.json', 'meta.pkl', '*.bin'))


def checkpoint_in(folder):
    """folder/ckpt.pt, or `folder` if it is a .pt file; None if missing."""
    path = Path(folder)
    if path.suffix != '.pt':
        path /= 'ckpt.pt'
    return path if path.exists() else None


def load_tokenizer(folder):
    """The tokenizer of a prepared folder, run or checkpoint. Raises OSError for missing files,
    ImportError for missing packages, ValueError for damaged files."""
    if path := checkpoint_in(folder):
        import torch
        with reading(path):
            state = torch.load(path, 'cpu', weights_only=True, mmap=True).get('tokenizer')
            if not state:
                raise UserError(f'{path} stores no tokenizer: give the folder of its data')
            return tokenizer_from_state(state)
    meta = read_meta(folder)
    state = meta['tokenizer']
    if state is None:
        tok = TiktokenTokenizer.from_name('gpt2')
    else:
        with reading(f'the tokenizer of {folder}'):
            if table := kind_of(state).table:
                state[table] = Path(folder, f'tokenizer.{state["kind"]}').read_bytes().decode()
            tok = tokenizer_from_state(state)
    if tok.n_vocab > meta['vocab_size']:
        raise FileNotFoundError(f'{folder} has no tokenizer of {meta["vocab_size"]} tokens')
    return tok


def llm_c_meta(path):
    """The entry of LLM_C for a file's header; {} without a header."""
    return LLM_C.get(sum(np.fromfile(path, '<i4', 1)), {})


def read_shard(path, dtype):
    """A file's memory-mapped tokens, after any llm.c header."""
    with reading(path):
        meta = llm_c_meta(path)
        if meta.get('dtype', dtype) != dtype:
            raise UserError(f'{path} has tokens of {meta["source"]}, but its folder has {dtype}')
        tokens = np.memmap(path, np.dtype(dtype).newbyteorder('<'), 'r', 1024 if meta else 0)
        if meta and not 0 < len(tokens) == np.fromfile(path, '<i4', 3)[2]:
            raise UserError(f'{path} has {len(tokens)} tokens, which is 0 or differs from its header')
        return tokens


def count_bytes(targets, tokenizer):
    """The number of text bytes in targets; masked targets and the vocabulary's padding have none."""
    return int(tokenizer.sizes[targets[(targets >= 0) & (targets < tokenizer.n_vocab)]].sum())


class Bins:
    """The tokens of one split: folder/<split>.bin, or else the sorted shards whose names mention this
    split last (train_2_val_000001.bin is for validation).

    Sequence i of a shard has the block_size + 1 tokens from i * block_size on, so each token is a
    target at most once. `columns` maps each column to its shards ('': tokens).
    """
    def __init__(self, folder, split):
        self.vocab_size = None
        self.name = Path(folder, f'{split}.bin')
        paths = [self.name] if self.name.exists() else [
            path for path in sorted(Path(folder).glob('*.bin'))
            if not column_of(path) and SPLIT_WORD.findall(path.stem)[-1:] == [split]]
        if not paths:
            known = [f'{name}{kind and " --tokenizer="}{kind}' for name, source in SOURCES.items()
                     for kind in ('', 'byte', 'char', 'bpe:6400')
                     if output_folder('', source, kind or source.tokenizer or 'byte') == folder]
            raise FileNotFoundError(f'{folder} is not prepared (no {split}.bin): run `python prepare.py '
                                    f'{[*known, "SOURCE"][0]}`')
        self.meta = read_meta(folder)
        masked = any(path.with_suffix('.mask.bin').exists() for path in paths)
        types = {'.mask': 'uint8'} if masked else {}
        types |= self.meta['columns'] | {'': self.meta['dtype']}
        self.columns = {name: [read_shard(path.with_suffix(f'{name}.bin'), types[name]) for path in paths]
                        for name in types}
        self.shards = self.columns['']
        sizes = [*map(len, self.shards)]
        self.n_tokens = sum(sizes)
        for name, shards in self.columns.items():
            if [*map(len, shards)] != sizes:
                raise UserError(f'{self.name} and its column {name} have different sizes: prepare the '
                                'folder again')
        count = self.meta.get(f'{split}_tokens', self.n_tokens)
        if paths == [self.name] and count != self.n_tokens:
            raise UserError(f'{self.name} has {self.n_tokens} tokens, but meta.json counts {count}: copy '
                            'the folder again, or prepare it again')

    def ends(self, block_size):
        """The number of sequences up to each shard's end."""
        return np.cumsum([(len(shard) - 1) // block_size for shard in self.shards])

    def n_sequences(self, block_size):
        n = int(self.ends(block_size)[-1])
        if not n:
            raise UserError(f'{self.name} has {self.n_tokens:,} tokens, but a sequence needs block_size+1 = '
                            f'{block_size + 1}: lower --block_size or prepare more text')
        return n

    def check_vocabulary(self, *arrays):
        """Raises UserError if `arrays` (default: the shards) have ids outside the vocabulary."""
        for ids in arrays or self.shards:
            if self.vocab_size and ids.max(initial=0) >= self.vocab_size:
                raise UserError(f'{self.name}: token {ids.max()} is outside the vocabulary of '
                                f'{self.vocab_size}: prepare the text with the tokenizer of the model, or '
                                'raise --vocab_size')

    def read(self, indices, block_size):
        """{column: (len(indices), block_size + 1)}"""
        ends = self.ends(block_size)
        numbers = np.searchsorted(ends, indices, side='right')
        begins = (indices - np.append(0, ends)[numbers]) * block_size
        return {name: np.stack([shards[number][begin:begin + block_size + 1]
                                for number, begin in zip(numbers, begins)])
                for name, shards in self.columns.items()}

    def batch(self, indices, block_size):
        """Inputs and targets, int64 (len(indices), block_size); masked targets are -1."""
        found = self.read(indices, block_size)
        ids = found[''].astype(np.int64)
        self.check_vocabulary(ids)
        targets = ids[:, 1:]
        if '.mask' in found:
            targets = np.where(found['.mask'][:, 1:], targets, -1)
        return ids[:, :-1], targets


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exiting removes temporary files
    name, *more = settings.words or [source]
    use_parts(settings, globals())
    import prepare  # config files import this copy
    vars(prepare).update(settings.config)
    values = settings.config | {'source': name}
    check_values(settings, values, globals())
    if more:
        raise UserError(f'cannot use {more[-1]!r} too: put files into a folder, or quote a glob')
    source = find_source(name)
    check_effects(settings, values | {'conversations': source.chats, 'records': source.records}, globals())
    tokenizer = tokenizer or source.tokenizer or (FIRST_RUN if source.chats else 'byte')
    if tokenizer == FIRST_RUN and not is_prepared(FIRST_RUN):
        raise FileNotFoundError(f'the default tokenizer of conversations, {FIRST_RUN}, is missing: run '
                                '`python prepare.py` first, or choose another, like --tokenizer=bpe:4096')
    folder = output_folder(out, source, tokenizer)
    if not overwrite and is_prepared(folder) and read_meta(folder).get('source') != source.label:
        raise UserError(f'{folder} contains data of a source other than {source.label}: choose another '
                        '--out, or replace the data by --overwrite=True')

    options = ' config/chat.py' if source.chats else ''
    if source.shards:
        if tokenizer != 'gpt2':
            raise UserError(f'{source.name} has only tokens of gpt2: omit --tokenizer={tokenizer}')
        meta = fetch_shards(folder, source)
    else:
        n_train = characters_to_train_on(source, val_fraction)
        texts = functools.partial(split_texts, source, val_fraction, n_train)
        several = source.chats or len(n_train) > 1
        if is_prepared(tokenizer) or checkpoint_in(tokenizer):
            tok = load_tokenizer(tokenizer)
        else:
            blocks = contents if source.chats else iter
            tok = make_tokenizer(
                tokenizer, texts=(blocks(document) for _, document, _ in texts()),
                training=(blocks(document) for split, document, _ in texts() if split == 'train'),
                by_document=several, procs=procs)
            if tok.path and (tok.path.endswith('.gguf') or os.path.exists(f'{tok.path}/config.json')):
                options = f' --init_from={shlex.quote(tokenizer)}'
        if several and None is (tok.document_token if source.chats else tok.eot):
            kind = 'conversation' if source.chats else 'document'
            print(f'{tokenizer} has no special token that can separate {kind}s, so tokens of one {kind} can '
                  f'attend to another {kind}')
        meta = write_dataset(folder, texts(), tok, source.label, procs, block_size if source.chats else None,
                             special_tokens, errors)

    print(f'{folder}: {meta["train_tokens"]:,} train and {meta["val_tokens"]:,} val tokens, '
          f'{meta["bytes_per_token"]:.2f} bytes per token, vocabulary {meta["vocab_size"]:,}')
    for count, fact in {
            'train_learnt': 'train tokens are learned',
            'cut': f'conversations are longer than {block_size} tokens and cut',
            'left_out': 'conversations are left out, because the chat template rejects them',
            'opened': 'answers lack the thought that the prompt of the chat template opens: add '
                      'reasoning_content to the data, or use another template'}.items():
        if source.chats and meta.get(count):
            print(f'{meta[count]:,} {fact}')
    print(f'next: python train.py{options} --dataset={shlex.quote(folder)}')
