"""
From text to tokens: writes data/<name>/train.bin, val.bin and meta.json, which train.py reads.
    $ python prepare.py                                  # Python's own library, as bytes: data/pystdlib_byte
    $ python prepare.py shakespeare --tokenizer=char     # data/shakespeare_char
    $ python prepare.py shakespeare --tokenizer=gpt2     # data/shakespeare
    $ python prepare.py my.txt --tokenizer=gpt2 --out=mydata
    $ python prepare.py 'notes/**/*.md'                  # a quoted glob, or a folder: each file is a document
A .bin file is nothing but tokens, little-endian, uint16 if the vocabulary fits and else uint32.
"""
import base64
import codecs
import collections
import concurrent.futures
import contextlib
import functools
import glob
import hashlib
import heapq
import json
import os
import pickle
import platform
import re
import signal
import sys
import sysconfig
import tempfile
import time
import unicodedata
import urllib.parse

import numpy as np

from configurator import configure

source = 'pystdlib'        # pystdlib, shakespeare, or a text file, folder or glob of your own
tokenizer = 'byte'         # byte, char, tiktoken's (gpt2, o200k_base...), or a folder with tokenizer.json
out: str | None = None     # the dataset's name, or a path with a slash; None: <source>_<tokenizer>
val_fraction = 0.1         # the share of the text that is kept for validation
procs: int | None = None   # processes that encode; None: one a core
_, _, words = configure(globals(), words=1)

EOT = '<|endoftext|>'         # the text of every tokenizer's end-of-text token
SPLITS = ('train', 'val')
CHUNK = 1 << 20               # characters that are encoded at a time
POOL_BYTES = 16 << 20         # less text than this is encoded sooner than a pool of processes has started
RETRY_WAITS = (0.5, 1, 2, 4)  # seconds between the tries of a download

@functools.lru_cache(maxsize=None)
def say_once(text):
    if os.environ.get('RANK', '0') == '0': # under torchrun, one process speaks
        print(text)

class Progress:
    """How far and how fast, in bytes: a line rewritten on a terminal, else one every 10 s and at the end."""
    def __init__(self, label, total=None, done=0):
        self.label, self.total, self.first, self.done = label, total, done, done
        self.begin, self.shown, self.tty = time.time(), time.time(), sys.stdout.isatty()

    def add(self, n_bytes, last=False):
        self.done, now = self.done + n_bytes, time.time()
        if last or now - self.shown > (0.2 if self.tty else 10):
            self.shown = now
            of, seconds = f' of {self.total / 1e6:,.1f}' if self.total and not last else '', now - self.begin
            speed = (self.done - self.first) / 1e6 / max(seconds, 1e-3)
            line = f'{self.label}: {self.done / 1e6:,.1f}{of} MB in {seconds:.1f} s, {speed:.1f} MB/s'
            print(f'\r{line:<79}' if self.tty else line, end='\n' if last or not self.tty else '', flush=True)

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

def fetch(url, path, size=None, sha256=None, headers=None, instead=''):
    """
    Downloads url to path, unless a file with the right size and sha256 (where given) is there; returns path.
    What has arrived waits in path + '.part', from where a broken download goes on, in this run or the next.
    OSError: the server cannot be reached or refuses; `instead` ends its message, it says what else can be
    done. ValueError: it sends something else than expected.
    """
    if os.path.exists(path) and not mismatch(path, size, sha256):
        return path
    import requests
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    part, host = path + '.part', urllib.parse.urlsplit(url).netloc
    for wait in (*RETRY_WAITS, None):
        try:
            fetch_rest(url, part, size, headers or {})
            break
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as e:
            if wait is None:
                why = str(e) if len(str(e)) < 60 else type(e).__name__
                have = os.path.getsize(part) if os.path.exists(part) else 0
                what = (f'{host} broke off after {have:,} bytes ({why}): run this again to go on from there'
                        if have else f'cannot reach {host} ({why}): go online')
                raise OSError(f'{what}, or download {url} by other means to {path}{instead}') from e
            time.sleep(wait)
    if problem := mismatch(part, size, sha256):
        os.remove(part)
        raise ValueError(f'{url} sent {problem}: run this again; if it stays so, the file there has changed')
    os.replace(part, path)
    return path

def fetch_rest(url, part, size, headers):
    """One try to append to `part` what is missing. ConnectionError: worth another try."""
    import requests
    have = os.path.getsize(part) if os.path.exists(part) else 0
    if size is not None and have >= size:
        return # complete or too long, which the caller checks
    headers = {'Accept-Encoding': 'identity', **headers, **({'Range': f'bytes={have}-'} if have else {})}
    with requests.get(url, headers=headers, stream=True, timeout=(10, 60)) as r:
        goes_on = r.headers.get('Content-Range', '').startswith(f'bytes {have}-')
        if have and (r.status_code == 416 or r.status_code == 206 and not goes_on):
            os.remove(part) # no such place in the file as it is now: all over again
            raise requests.ConnectionError('it cannot resume')
        if r.status_code in (408, 429) or r.status_code >= 500:
            raise requests.ConnectionError(f'it says {r.status_code} {r.reason}')
        if r.status_code not in (200, 206):
            hint = 'set HF_TOKEN, if that is the hub' if r.status_code in (401, 403) else 'check the address'
            raise OSError(f'cannot download {url}: it says {r.status_code} {r.reason}: {hint}')
        have = have if r.status_code == 206 else 0 # 200: the server ignores Range and sends all of it
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
    progress.add(0, last=True)

# checkpoints of others --------------------------------------------------------------------------------------

GPT2_IDS = {name: f'openai-community/{name}' for name in ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')}
WEIGHTS = r'model(-\d+-of-\d+)?\.safetensors(\.index\.json)?'

def foreign(name):
    """Whether init_from or tokenizer names a folder of transformers' files, or an id on the hub."""
    if os.path.exists(name):
        return os.path.basename(name) == 'tokenizer.json' or any(
            os.path.isfile(os.path.join(name, part)) for part in ('config.json', 'tokenizer.json'))
    id_like = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name) and not name.endswith('.pt')
    return name in GPT2_IDS or bool(id_like)

def find_checkpoint(name, weights=True):
    """
    The folder of a checkpoint: name itself, or for an id on the hub data/hub/<id>, downloaded if it is not
    there: config.json, which is checked first, tokenizer files, safetensors. HF_TOKEN and HF_ENDPOINT count.
    """
    if os.path.exists(name):
        return name
    repo, host = GPT2_IDS.get(name, name), os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')
    folder = os.path.join('data', 'hub', repo.replace('/', '--'))
    done = os.path.join(folder, 'complete' if weights else 'complete-tokenizer')
    have = os.listdir(folder) if os.path.isdir(folder) else []
    if os.path.exists(done) or {'config.json', 'tokenizer.json'} <= {*have} and (not weights or any(
            re.fullmatch(WEIGHTS, file) for file in have)) and not any(f.endswith('.part') for f in have) \
            and 'files.json' not in have: # put there by hand
        return folder
    token = os.environ.get('HF_TOKEN')
    headers = {'Authorization': f'Bearer {token}'} if token else {}
    instead = f', or name a folder that has the config.json, tokenizer.json and safetensors of {repo}'
    listing = os.path.join(folder, 'files.json')
    if os.path.exists(listing):
        os.remove(listing)
    try:
        fetch(f'{host}/api/models/{repo}/tree/main', listing, headers=headers)
    except OSError as e:
        why = re.search(r'it says \d+ [\w ]+|(?<=\()\w+', str(e))
        raise OSError(f'{name} is no folder, and {host} gives no {repo} ({why[0] if why else e}): check the '
                      f'id, go online, set HF_TOKEN if it is gated{instead}') from e
    try:
        with open(listing, encoding='utf-8') as f:
            files = {entry['path']: entry for entry in json.load(f)}
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f'{host} sent no list of files for {repo}: is HF_ENDPOINT right?') from e
    wanted = [file for file in ('config.json', 'tokenizer.json', 'tokenizer_config.json',
                                'chat_template.jinja') if file in files]
    wanted += sorted(file for file in files if weights and re.fullmatch(WEIGHTS, file))
    lacking = ({'config.json', 'safetensors'} if weights else {'tokenizer.json'}) - {
        file if file in ('config.json', 'tokenizer.json') else 'safetensors' for file in wanted}
    if lacking:
        raise ValueError(f'{repo} has no {" and no ".join(sorted(lacking))}: it cannot be read here')
    for file in wanted:
        entry = files[file]
        fetch(f'{host}/{repo}/resolve/main/{file}', os.path.join(folder, file), entry.get('size'),
              (entry.get('lfs') or {}).get('oid'), headers, instead)
        if file == 'config.json' and weights:
            from model import config_from_hf
            with open(os.path.join(folder, file), encoding='utf-8') as f:
                try:
                    config_from_hf(json.load(f)) # refused before anything large comes
                except ValueError as e:
                    raise ValueError(f'{repo}: {e}') from None
    with open(done, 'w', encoding='utf-8') as f:
        f.write('all files of this folder have been downloaded\n')
    return folder

# sources ----------------------------------------------------------------------------------------------------

def sort_files(files):
    return sorted(files, key=lambda path: path.split(os.sep)) # the same order on every system

# files: paths, in order; documents: each is one of several; skip_bad: leave out files that are not UTF-8
Source = collections.namedtuple('Source', 'name label files documents skip_bad')
SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'

def shakespeare():
    path = fetch(SHAKESPEARE, os.path.join('data', 'shakespeare', 'input.txt'), size=1115394,
                 sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
                 instead=', or use a text file that you have: python prepare.py my.txt')
    return Source('shakespeare', 'shakespeare', [path], False, False)

def pystdlib():
    """The standard library of the running Python, without tests and installed packages."""
    root, files = sysconfig.get_paths()['stdlib'], []
    leave_out = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - leave_out
        files += [os.path.join(folder, name) for name in names if name.endswith('.py')
                  and not name.startswith('_sysconfigdata')] # that is this machine's compiler flags
    if not files:
        raise FileNotFoundError(f'pystdlib: no .py files in {root}: use a text: python prepare.py my.txt')
    return Source('pystdlib', f'pystdlib {platform.python_version()}', sort_files(files), True, True)

SOURCES = {'pystdlib': pystdlib, 'shakespeare': shakespeare}

def find_source(source):
    """The Source of this name, or of this file, folder (without hidden files) or glob."""
    if source in SOURCES:
        return SOURCES[source]()
    if os.path.isfile(source):
        name = os.path.splitext(os.path.basename(source))[0]
        return Source(plain_name(name), source, [source], False, False)
    pattern, where = source, re.split(r'[^/\\]*[*?[]', source)[0] # where: the folder before a wildcard
    if os.path.isdir(source):
        pattern, where = os.path.join(glob.escape(source), '**', '*'), source
    files = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not files:
        raise FileNotFoundError(f'{source}: no such text file, folder or glob with files, and none of '
                                f'{", ".join(SOURCES)}: check the path')
    name = os.path.basename(os.path.abspath(where))
    return Source(plain_name(name), source, sort_files(files), True, False)

def plain_name(text):
    return re.sub(r'[^\w.-]+', '_', text).strip('._') or 'text'

def output_folder(out, source_name, tokenizer):
    """data/<out>, or out itself if it has a slash; without out, data/<source>_<tokenizer>."""
    usual = f'{source_name}_{plain_name(tokenizer.removesuffix("tokenizer.json"))}'
    usual = 'shakespeare' if usual == 'shakespeare_gpt2' else usual # nanoGPT's name
    return out if out and re.search(r'[/\\]', out) else os.path.join('data', out or usual)

def dataset_name(folder):
    """What train.py's --dataset calls this folder: its path below data/, else the whole path."""
    path, data = os.path.abspath(folder), os.path.abspath('data') + os.sep
    return (path[len(data):] if path.startswith(data) else path).replace(os.sep, '/')

# text, cut to pieces ----------------------------------------------------------------------------------------

def read_text(path):
    """The file's text, a block at a time. Where it is not UTF-8, ValueError names the place."""
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

def code_points(text):
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), '<u4')

def scan(files, skip_bad=False):
    """
    Reads every file once, before anything is written: [(path, characters, bytes)] of those with text, the
    sorted characters they use, as one text, and {'empty': files left out, 'not UTF-8': files left out}.
    """
    documents, left_out, used = [], {'empty': 0, 'not UTF-8': 0}, np.zeros(sys.maxunicode + 1, bool)
    for path in files:
        n, here = 0, set()
        try:
            for text in read_text(path):
                n += len(text)
                here.update(np.flatnonzero(np.bincount(code_points(text))).tolist())
        except ValueError:
            if not skip_bad:
                raise
            left_out['not UTF-8'] += 1
            continue
        used[list(here)] = True
        left_out['empty'] += not n
        documents += [(path, n, os.path.getsize(path))] if n else []
    return documents, ''.join(map(chr, np.flatnonzero(used))), left_out

def split_documents(documents, fraction, by_document):
    """
    The plan [(path, [(split, characters), ...])]. A single file is cut after int(n * (1 - fraction))
    characters, as in nanoGPT. Of several documents, one that is no larger than val's share goes to val
    whenever val has no more than its share of the bytes so far: this spreads val evenly, misses the share by
    less than a document, and favours no length. If all are larger, as with two, the smallest goes to val.
    """
    if not 0 < fraction < 1:
        raise ValueError(f'val_fraction={fraction}: must lie between 0 and 1, like 0.1')
    if not by_document:
        path, n, _ = documents[0]
        n_train = int(n * (1 - fraction))
        if not 0 < n_train < n:
            raise ValueError(f'{path} has {n} characters: too few for a train and a val part')
        return [(path, [('train', n_train), ('val', n - n_train)])]
    sizes, val, total, splits = [size for *_, size in documents], 0, 0, []
    largest = fraction * sum(sizes)
    for size in sizes:
        to_val = size <= largest and val <= fraction * total
        val, total = val + size * to_val, total + size
        splits.append('val' if to_val else 'train')
    if not val:
        splits[sizes.index(min(sizes))] = 'val'
    return [(path, [(split, n)]) for (path, n, _), split in zip(documents, splits)]

# A letter or digit, then a space, a line end or a CJK stop: no alternative of tiktoken's patterns matches
# across this, and none that looks ahead can stand before it, so both sides alone give the same tokens.
CUT = re.compile(r'[^\W_](?=[ \n\u3001\u3002\uff0c])') # [^\W_] is exactly \p{L} and \p{N}

def last_cut(text, end):
    """The last place before `end` where text can be cut; 0 if there is none."""
    for begin in (max(0, end - 4096), 0):
        found = [match.end() for match in CUT.finditer(text, begin, end)]
        if found:
            return found[-1]
    return 0

def pieces(plan, by_document, anywhere):
    """All the plan's text, at most about CHUNK characters at a time: (split, text, a document ends here)."""
    for path, parts in plan:
        blocks, text = read_text(path), ''
        for split, left in parts:
            limit = CHUNK
            while left:
                n = min(left, limit)
                while len(text) < n:
                    if not (block := next(blocks, '')):
                        raise ValueError(f'{path} became shorter while it was read: run this again')
                    text += block
                if n < left and not anywhere:
                    n = last_cut(text, n)
                limit = CHUNK if n else 2 * limit # one very long word: look further
                if n:
                    yield split, text[:n], by_document and n == left
                    text, left = text[n:], left - n

def groups(pieces):
    """Pieces gathered until a split has CHUNK characters: (split, [(text, ends)]), one process's work."""
    waiting, sizes = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    for split, text, ends in pieces:
        waiting[split].append((text, ends))
        sizes[split] += len(text)
        if sizes[split] >= CHUNK:
            yield split, waiting[split]
            waiting[split], sizes[split] = [], 0
    yield from ((split, group) for split, group in waiting.items() if group)

# tokenizers -------------------------------------------------------------------------------------------------

class Tokenizer:
    """
    name; n_vocab; eot, the id of the end-of-text token or None; special, {text: id}. A kind adds encode_array
    (text -> ids, special tokens being text like any other) and state (plain Python that rebuilds it).
    """
    anywhere = False # True: a token depends on one character alone, so text can be cut anywhere

    def __init__(self, name, tokens, special, n_vocab):
        self.name, self.special, self.n_vocab, self.eot = name, special, n_vocab, special.get(EOT)
        self.tokens = {**tokens, **{i: text.encode() for text, i in special.items()}} # {id: bytes}

    def encode(self, text, allow_special=True):
        """text -> list of ids. With allow_special, special tokens' texts become their ids."""
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace') # lone surrogates: U+FFFD
        by_length = sorted(self.special, key=len, reverse=True) if allow_special else []
        parts = re.split(f'({"|".join(map(re.escape, by_length))})', text) if by_length else [text]
        return [i for n, part in enumerate(parts) # every second part is a special token
                for i in ([self.special[part]] if n % 2 else self.encode_array(part).tolist())]

    def decode_bytes(self, ids):
        """Special tokens give their text; ids that are no token, in a padded vocabulary, give nothing."""
        return b''.join(self.tokens.get(int(i), b'') for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', 'replace')

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
        self.chars, self.ids = list(chars), np.full(sys.maxunicode + 1, -1, np.int32) # ids: code point -> id
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
        text = lambda token: ''.join(chars[b] for b in token)
        pairs = [two_parts(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
        merges = [[text(a), text(b)] for a, b in filter(None, pairs)]
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

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

def byte_chars():
    """{byte: the character that stands for it in byte-level vocabularies}, GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}

def merge(parts, ranks):
    """
    Byte-pair encoding of one piece: list of ids -> list of ids. ranks: {(left, right): (rank, id)}. The pair
    of the lowest rank is merged first, the leftmost of equals; a heap over a linked list, so n log n.
    """
    ids, before, after = list(parts), list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
    heap = [(ranks[pair][0], i, ranks[pair][1], pair) for i, pair in enumerate(zip(ids, ids[1:]))
            if pair in ranks] # (rank, place, merged id, pair)
    heapq.heapify(heap)
    while heap:
        _, i, new, pair = heapq.heappop(heap)
        j = after[i] if ids[i] is not None else len(ids)
        if j >= len(ids) or (ids[i], ids[j]) != pair:
            continue # one of them has been merged since
        ids[i], ids[j], after[i] = new, None, after[j]
        if after[i] < len(ids):
            before[after[i]] = i
        for left, right in ((before[i], i), (i, after[i])):
            if left >= 0 and right < len(ids) and (ids[left], ids[right]) in ranks:
                rank, made = ranks[ids[left], ids[right]]
                heapq.heappush(heap, (rank, left, made, (ids[left], ids[right])))
    return [i for i in ids if i is not None]

def cut(pieces, pattern, behavior):
    """Splits every piece at the matches of a pattern, as tokenizers' Split does."""
    for piece in pieces:
        spans, at = [], 0 # (text, is it a match)
        for m in pattern.finditer(piece):
            spans += [(piece[at:m.start()], False)] * (m.start() > at) + [(m[0], True)] * bool(m[0])
            at = max(at, m.end())
        spans += [(piece[at:], False)] * (at < len(piece))
        if behavior == 'Removed':
            yield from (text for text, found in spans if not found)
        elif behavior == 'Isolated':
            yield from (text for text, _ in spans)
        else:
            held = ''
            for n, (text, found) in enumerate(spans):
                if behavior == 'Contiguous':
                    joins = n and spans[n - 1][1] == found
                elif behavior == 'MergedWithPrevious':
                    joins = n and found and not spans[n - 1][1]
                else: # MergedWithNext
                    joins = n and spans[n - 1][1] and not found
                if held and not joins:
                    yield held
                    held = ''
                held += text
            if held:
                yield held

class JsonTokenizer(Tokenizer):
    """
    A tokenizer.json of Hugging Face tokenizers with a BPE model, byte-level or with byte fallback: the same
    ids as that library's. source: the file's text; config: what of tokenizer_config.json is used. ValueError
    names the parts that are not supported.
    """
    def __init__(self, source, config=None):
        import regex
        spec = json.loads(source)
        self.source, self.config, self.regex = source, config or {}, regex
        model = spec.get('model') or {}
        if model.get('type', 'BPE') != 'BPE' or any(model.get(key) for key in (
                'dropout', 'continuing_subword_prefix', 'end_of_word_suffix')):
            raise ValueError(f"tokenizer.json: model {model.get('type')!r} or its options are not supported: "
                             'BPE without dropout, prefix and suffix is')
        self.vocab = model['vocab']
        added = sorted(spec.get('added_tokens') or [], key=lambda t: t['id'])
        merges = [tuple(m.split(' ', 1)) if isinstance(m, str) else tuple(m) for m in model['merges']]
        self.ranks = {(self.vocab[a], self.vocab[b]): (rank, self.vocab[a + b])
                      for rank, (a, b) in enumerate(merges)}
        self.whole = model.get('ignore_merges', False)
        self.normalize = [self.normalizer(part) for part in flat(spec.get('normalizer'), 'normalizers')]
        self.cuts, self.byte_level, self.mapped = [], False, False
        self.chars = byte_chars()
        self.bytes = {char: b for b, char in self.chars.items()}
        for part in flat(spec.get('pre_tokenizer'), 'pretokenizers'):
            if self.byte_level and not self.mapped: # what follows ByteLevel sees a character for each byte
                self.cuts.append(lambda pieces: (''.join(self.chars[b] for b in p.encode()) for p in pieces))
                self.mapped = True
            self.cuts += self.pre_tokenizer(part)
        decoders = {part['type'] for part in flat(spec.get('decoder'), 'decoders')}
        self.byte_level |= 'ByteLevel' in decoders
        self.fallback = model.get('byte_fallback', False)
        self.unk, self.fuse = self.vocab.get(model.get('unk_token')), model.get('fuse_unk', False)
        tokens, back = {}, self.bytes
        for text, i in self.vocab.items():
            if self.byte_level and all(char in back for char in text):
                tokens[i] = bytes(back[char] for char in text)
            elif self.fallback and re.fullmatch('<0x[0-9A-F]{2}>', text):
                tokens[i] = bytes([int(text[3:5], 16)])
            else:
                text = text if self.byte_level else text.replace('\u2581', ' ')
                tokens[i] = text.encode('utf-8', 'replace')
        tokens |= {t['id']: t['content'].encode() for t in added}
        self.added = {t['content']: t['id'] for t in added}
        self.finders = [self.finder([t for t in added if t.get('normalized', False) is late], late)
                        for late in (False, True)] # in the text as it comes, in normalised text
        super().__init__('json', tokens, {t['content']: t['id'] for t in added if t['special']},
                         max([*self.vocab.values(), *self.added.values()]) + 1)
        self.before, self.after = self.template(spec.get('post_processor'))
        ends = [self.config.get('eos_token'), EOT, '<|end_of_text|>', '</s>', '<|im_end|>']
        ends = [end['content'] if isinstance(end, dict) else end for end in ends]
        self.eot = next((self.added[end] for end in ends if end in self.added), None)
        self.known = {}
        self.bpe = self.tiktoken(merges) if self.byte_level else None

    def normalizer(self, part):
        kind = part['type']
        if kind in ('NFC', 'NFD', 'NFKC', 'NFKD'):
            return functools.partial(unicodedata.normalize, kind)
        if kind == 'Prepend':
            return lambda text: part['prepend'] + text if text and not self.inside else text
        if kind == 'Replace' and 'String' in part['pattern']:
            return lambda text: text.replace(part['pattern']['String'], part['content'])
        if kind == 'Replace':
            pattern = self.regex.compile(part['pattern']['Regex'])
            return lambda text: pattern.sub(lambda m: part['content'], text)
        if kind == 'Lowercase':
            return lambda text: ''.join(map(str.lower, text)) # character by character, as Rust does
        raise ValueError(f'tokenizer.json: normalizer {kind} is not supported')

    def pre_tokenizer(self, part):
        """-> functions from pieces to pieces."""
        kind, compiled = part['type'], self.regex.compile
        if kind == 'ByteLevel':
            self.byte_level = True
            prefix = [lambda pieces: (p if p.startswith(' ') or self.inside else ' ' + p for p in pieces)]
            split = [lambda pieces, pattern=compiled(GPT2_SPLIT): cut(pieces, pattern, 'Isolated')]
            return prefix * part.get('add_prefix_space', True) + split * part.get('use_regex', True)
        if kind == 'Split' and not part.get('invert'):
            text = part['pattern'].get('Regex') or re.escape(part['pattern']['String'])
            return [lambda pieces, pattern=compiled(text): cut(pieces, pattern, part['behavior'])]
        if kind == 'Digits':
            pattern = compiled(r'\p{N}' if part.get('individual_digits') else r'\p{N}+')
            return [lambda pieces: cut(pieces, pattern, 'Isolated')]
        if kind == 'Punctuation':
            pattern = compiled(r'[\p{P}!-/:-@\[-`{-~]')
            return [lambda pieces: cut(pieces, pattern, part.get('behavior', 'Isolated'))]
        if kind == 'Metaspace' and part.get('replacement', '\u2581') == '\u2581':
            scheme, cuts = part.get('prepend_scheme', 'always'), part.get('split', True)
            def metaspace(pieces):
                for n, piece in enumerate(pieces):
                    piece = piece.replace(' ', '\u2581')
                    wanted = scheme == 'always' or scheme == 'first' and self.first and n == 0
                    piece = '\u2581' * (wanted and not piece.startswith('\u2581')) + piece
                    yield from cut([piece], compiled('\u2581'), 'MergedWithNext') if cuts else [piece]
            return [metaspace]
        raise ValueError(f'tokenizer.json: pre_tokenizer {kind} is not supported')

    def finder(self, tokens, late):
        """-> a function from text and whether special tokens count to (id or None, text) parts, in order."""
        by_text = {t['content']: t for t in tokens}
        if late: # in normalised text a token's own text is normalised too
            by_text = {functools.reduce(lambda text, f: f(text), self.normalize, key): t
                       for key, t in by_text.items()}
        pattern = re.compile('|'.join(map(re.escape, sorted(by_text, key=len, reverse=True))) or '(?!)')

        def find(text, special):
            at = 0
            for m in pattern.finditer(text):
                t, start, end = by_text[m[0]], m.start(), m.end()
                beside = text[start - 1:start] + text[end:end + 1]
                if t['special'] and not special or t.get('single_word') and re.search(r'\w', beside):
                    continue
                if t.get('lstrip'):
                    start = max(at, len(text[:start].rstrip()))
                if t.get('rstrip'):
                    end = len(text) - len(text[end:].lstrip())
                yield from [(None, text[at:start])] * (start > at) + [(t['id'], m[0])]
                at = end
            yield from [(None, text[at:])] * (at < len(text))
        return find

    def template(self, part):
        """The ids that are put before and after every text."""
        for one in flat(part, 'processors'):
            if one['type'] == 'TemplateProcessing':
                around, names = ([], []), [piece.get('SpecialToken', {}).get('id') for piece in one['single']]
                for n, name in enumerate(names):
                    if name is not None:
                        around[n > names.index(None)].extend(one['special_tokens'][name]['ids'])
                return around
            if one['type'] != 'ByteLevel':
                raise ValueError(f'tokenizer.json: post_processor {one["type"]} is not supported')
        return [], []

    def tiktoken(self, merges):
        """
        tiktoken merges any neighbours whose concatenation is a token, tokenizers listed pairs only. They
        agree if every token, encoded by the merges that rank below its own, comes out as its listed pair:
        then a token's bytes pass through one state of two parts only. Checked here; None if it does not hold.
        """
        import tiktoken
        table = {self.tokens[i]: None for text, i in self.vocab.items() if text not in self.added}
        order = [bytes([b]) for b in range(256)]
        if not all(one in table for one in order):
            return None
        ids = {self.tokens[i]: i for text, i in self.vocab.items() if text not in self.added}
        seen, byte_rank = set(order), {}
        for rank, (a, b) in enumerate(merges):
            left, right = self.tokens[self.vocab[a]], self.tokens[self.vocab[b]]
            if left + right in seen or left not in seen or right not in seen:
                return None
            seen.add(left + right)
            order.append(left + right)
            byte_rank[left + right] = 256 + rank
        for (a, b), token in zip(merges, order[256:]):
            if two_parts(token, byte_rank) != (self.tokens[self.vocab[a]], self.tokens[self.vocab[b]]):
                return None
        if any(token not in ids for token in order):
            return None
        self.ids_of = np.array([ids[token] for token in order], np.uint32)
        return tiktoken.Encoding('json', pat_str=r'[\s\S]+', special_tokens={}, mergeable_ranks={
            token: rank for rank, token in enumerate(order)})

    def encode_piece(self, piece):
        if (found := self.known.get(piece)) is not None:
            return found
        raw = bytes(self.bytes[char] for char in piece) if self.mapped else piece.encode()
        if self.whole and (i := self.vocab.get(''.join(self.chars[b] for b in raw))) is not None:
            found = [i]
        elif self.bpe:
            found = self.ids_of[self.bpe._core_bpe.encode_single_piece(raw)].tolist()
        else:
            found = self.encode_slowly(''.join(self.chars[b] for b in raw) if self.byte_level else piece)
        if len(self.known) < 1 << 18 and len(piece) < 64:
            self.known[piece] = found
        return found

    def encode_slowly(self, text):
        if self.whole and text in self.vocab:
            return [self.vocab[text]]
        ids = []
        for char in text:
            each = [f'<0x{b:02X}>' for b in char.encode()]
            if char in self.vocab:
                ids.append(self.vocab[char])
            elif self.fallback and all(one in self.vocab for one in each):
                ids += [self.vocab[one] for one in each]
            elif self.unk is not None and not (self.fuse and ids and ids[-1] == self.unk):
                ids.append(self.unk)
        return merge(ids, self.ranks)

    def encode_parts(self, text, special, inside=False):
        self.inside, self.first = inside, not inside
        for i, part in self.finders[0](text, special):
            if i is not None:
                yield i
            else:
                for normalize in self.normalize:
                    part = normalize(part)
                for i, part in self.finders[1](part, special):
                    if i is not None:
                        yield i
                        self.first = False
                        continue
                    pieces = [part]
                    for one in self.cuts:
                        pieces = one(pieces)
                    for piece in pieces:
                        yield from self.encode_piece(piece)
                    self.first = False
            self.inside = self.first = False

    def encode(self, text, allow_special=True):
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace') # lone surrogates: U+FFFD
        return [*self.before, *self.encode_parts(text, allow_special), *self.after]

    def encode_array(self, text):
        # long documents come in pieces, the later ones from a space on: they are no beginnings
        return np.fromiter(self.encode_parts(text, False, inside=text[:1].isspace()), np.uint32)

    def chat(self, messages, thinking=True):
        """[{'role': 'system', 'user' or 'assistant', 'content': text}] -> ids, to where the answer begins."""
        return [*self.encode_parts(chat_text(self.config.get('chat_template'), messages, thinking), True)]

    def state(self):
        return {'kind': 'json', 'source': self.source, 'config': self.config}

    def to_json(self):
        return self.source

CHATS = { # name: (its mark in a chat_template, what comes first, a turn, what the answer follows)
    'llama3': ('<|start_header_id|>', '<|begin_of_text|>',
               '<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>',
               '<|start_header_id|>assistant<|end_header_id|>\n\n'),
    'chatml': ('<|im_start|>', '', '<|im_start|>{role}\n{content}<|im_end|>\n', '<|im_start|>assistant\n'),
    'llama2': ('[INST]', '', {'user': '<s>[INST] {content} [/INST]', 'assistant': ' {content} </s>'}, ''),
}

def chat_text(template, messages, thinking=True):
    """
    Messages as text in the format of a chat template, which is recognised, not run: ChatML, with its
    template's system prompt if it has one, Llama 2's and 3's. Without a template, the contents alone.
    thinking=False closes the thoughts of models that have them before they begin.
    """
    template = template or ''
    kind = next((name for name, (mark, *_) in CHATS.items() if mark in template), None)
    if kind is None:
        if template:
            raise ValueError('the chat_template is none of ' + ', '.join(CHATS) + ': give a plain prompt')
        return '\n'.join(message['content'] for message in messages)
    _, text, turn, answer = CHATS[kind]
    system = messages[0]['role'] == 'system'
    usual = re.search(r"<\|im_start\|>system\\n([^'{<]+)<\|im_end\|>", template)
    if kind == 'chatml' and usual and not system:
        messages = [{'role': 'system', 'content': usual[1].replace('\\n', '\n')}, *messages]
    if kind == 'llama2' and system:
        first = f'<<SYS>>\n{messages[0]["content"]}\n<</SYS>>\n\n{messages[1]["content"]}'
        messages = [{'role': 'user', 'content': first}, *messages[2:]]
    for message in messages:
        content = message['content'].split('</think>')[-1].lstrip('\n') if message['role'] == 'assistant' \
            else message['content']
        content = content if kind == 'chatml' else content.strip()
        shape = turn if isinstance(turn, str) else turn[message['role']]
        text += shape.replace('{role}', message['role']).replace('{content}', content)
    return text + answer + '<think>\n\n</think>\n\n' * ('<think>' in template and not thinking)

def flat(part, key):
    """A part of tokenizer.json, or the parts of a Sequence, as a list."""
    if part is None:
        return []
    return [one for inner in part[key] for one in flat(inner, key)] if part['type'] == 'Sequence' else [part]

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'tiktoken': TiktokenTokenizer, 'json': JsonTokenizer}
MAKERS = { # name: from (characters, by_document); other names are tiktoken's
    'byte': lambda chars, by_document: ByteTokenizer(),
    'char': lambda chars, by_document: CharTokenizer(chars, len(chars) if by_document else None),
}

def json_tokenizer(path):
    """The tokenizer of a tokenizer.json, or of a folder with one; tokenizer_config.json beside it counts."""
    path = os.path.join(path, 'tokenizer.json') if os.path.isdir(path) else path
    beside = os.path.join(os.path.dirname(path), 'tokenizer_config.json')
    try:
        with open(path, encoding='utf-8') as f:
            source = f.read()
        with open(beside, encoding='utf-8') if os.path.exists(beside) else contextlib.nullcontext() as f:
            config = json.load(f) if f else {}
        template = os.path.join(os.path.dirname(path), 'chat_template.jinja')
        if os.path.exists(template):
            with open(template, encoding='utf-8') as f:
                config['chat_template'] = f.read()
        used = {key: config[key] for key in ('eos_token', 'chat_template') if key in config}
        return JsonTokenizer(source, used)
    except FileNotFoundError:
        raise FileNotFoundError(f'{path} is missing: without it there are no tokens') from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f'{path} cannot be read as a tokenizer ({e!r}): is it complete?') from e

def make_tokenizer(name, characters='', by_document=False):
    """A tokenizer for new data; char takes the characters, and an end-of-text id if there are documents."""
    if name in MAKERS:
        return MAKERS[name](characters, by_document)
    if foreign(name) and name not in GPT2_IDS: # tiktoken has gpt2
        return json_tokenizer(find_checkpoint(name, weights=False))
    return tiktoken_tokenizer(name)

def tiktoken_tokenizer(name):
    import requests
    import tiktoken
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f'tokenizer={name!r} is none of {", ".join([*MAKERS, *known])}')
    try:
        bpe = tiktoken.get_encoding(name)
    except requests.RequestException as e:
        url = e.request.url if e.request else 'its table'
        raise OSError(f'tokenizer={name!r}: cannot download {url}: go online once, set TIKTOKEN_CACHE_DIR to '
                      'a folder that has it, or use --tokenizer=byte') from e
    ranks = sorted(bpe._mergeable_ranks.items(), key=lambda item: item[1])
    ranks = ''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks)
    return TiktokenTokenizer(name, bpe._pat_str, dict(bpe._special_tokens), ranks)

TABLES = {'tiktoken': ('ranks', 'tokenizer.tiktoken'), 'json': ('source', 'tokenizer.json')} # beside the .bin

def tokenizer_from_state(state):
    """The tokenizer whose state() this is, without files or network. ValueError: it is no such state."""
    try:
        return KINDS[state['kind']](**{key: value for key, value in state.items() if key != 'kind'})
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f'what is stored makes no tokenizer of the kinds {", ".join(KINDS)} ({e!r}): was it '
                         'written by a newer version?') from e

def load_tokenizer(folder):
    """The tokenizer of a prepared folder: from meta.json, from nanoGPT's meta.pkl, or else GPT-2's."""
    state = read_meta(folder)['tokenizer']
    if state is None:
        return make_tokenizer('gpt2')
    if state.get('kind') in TABLES:
        key, name = TABLES[state['kind']]
        with open(os.path.join(folder, name), encoding='utf-8', newline='') as f:
            state = {**state, key: f.read()}
    return tokenizer_from_state(state)

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
    signal.signal(signal.SIGINT, signal.SIG_IGN) # Ctrl-C is the parent's business
    worker_tokenizer = tokenizer_from_state(state)

def encode_in_worker(group):
    return encode_group(worker_tokenizer, group)

def usable_procs(procs, tok, n_bytes):
    """How many processes are worth starting for this much text."""
    if procs is not None and procs < 1:
        raise ValueError(f'procs={procs}: must be 1 or more')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return 1 if tok.anywhere or n_bytes < POOL_BYTES else min(procs or cores, 61) # Windows waits for no more

def encode_groups(tok, groups, procs):
    """(split, ids, bytes) of every group, in order; two groups a process are in memory, whatever there is."""
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
        raise OSError(f'one of {procs} processes died, perhaps for lack of memory: try --procs=1') from e
    finally:
        pool.shutdown(cancel_futures=True)

def write_bins(folder, plan, tok, by_document=False, procs=1, n_bytes=None):
    """
    Encodes the plan of split_documents into folder/train.bin and val.bin; returns their counts and checksums.
    plan -> pieces -> groups -> ids are generators, so memory does not grow with the text.
    """
    progress = Progress(f'{tok.name} encoding, {procs} process{"es" * (procs > 1)}', n_bytes)
    tokens, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    sums = {split: hashlib.sha256() for split in SPLITS}
    work = groups(pieces(plan, by_document, tok.anywhere))
    with (open(os.path.join(folder, 'train.bin'), 'wb') as train,
          open(os.path.join(folder, 'val.bin'), 'wb') as val,
          contextlib.closing(encode_groups(tok, work, procs)) as encoded):
        for split, ids, size in encoded:
            (train if split == 'train' else val).write(ids)
            sums[split].update(ids)
            tokens[split] += len(ids)
            sizes[split] += size
            progress.add(size)
    progress.add(0, last=True)
    return {**{f'{split}_tokens': tokens[split] for split in SPLITS},
            **{f'{split}_bytes': sizes[split] for split in SPLITS}, # of text, without end-of-text tokens
            'bytes_per_token': sizes['val'] / tokens['val'],        # val loss / ln 2 / this = bits per byte
            'checksum': {f'{split}.bin': sums[split].hexdigest() for split in SPLITS}}

def write_dataset(folder, plan, tok, label, by_document=False, procs=1, n_bytes=None):
    """
    Makes a prepared folder; returns what its meta.json says. Everything is written to a temporary folder
    inside and renamed at the end, meta.json last: a run that fails changes nothing.
    """
    made = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    state, dtype = tok.state(), dtype_of(tok.n_vocab).name
    texts = {'train.mask.bin': None} # None: remove
    texts |= {name: state.pop(key, None) for key, name in TABLES.values()}
    try:
        with tempfile.TemporaryDirectory(prefix='.prepare-', dir=folder) as temp:
            meta = {'source': label, 'vocab_size': tok.n_vocab, 'dtype': dtype, 'eot': tok.eot,
                    **write_bins(temp, plan, tok, by_document, procs, n_bytes), 'tokenizer': state}
            texts['meta.json'] = json.dumps(meta, indent=1)
            for name, text in texts.items():
                if text is not None:
                    with open(os.path.join(temp, name), 'w', encoding='utf-8', newline='') as f:
                        f.write(text)
            for name in ('train.bin', 'val.bin', *texts):
                if texts.get(name, '') is not None:
                    os.replace(os.path.join(temp, name), os.path.join(folder, name))
                elif os.path.exists(os.path.join(folder, name)):
                    os.remove(os.path.join(folder, name))
    finally:
        if made and not os.listdir(folder):
            os.rmdir(folder)
    return meta

# reading ----------------------------------------------------------------------------------------------------

class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers, text. A pickle runs code only through classes, and here it gets none."""
    def find_class(self, module, name):
        raise ValueError(f'it asks for {module}.{name}, but only plain data is read')

def read_json(path):
    with open(path, encoding='utf-8', newline='') as f:
        meta = json.load(f)
    if type(meta['vocab_size']) is not int or meta['dtype'] not in ('uint16', 'uint32'):
        raise ValueError(f'vocab_size {meta["vocab_size"]!r}, dtype {meta["dtype"]!r}')
    return meta

def read_pickle(path):
    with open(path, 'rb') as f:
        meta = PlainUnpickler(f).load()
    chars = [meta['itos'].get(i, '') for i in range(meta['vocab_size'])] if 'itos' in meta else None
    if chars and not all(isinstance(char, str) for char in chars):
        raise ValueError('itos is not a table of texts')
    return {'vocab_size': int(meta['vocab_size']),
            'tokenizer': chars and {'kind': 'char', 'chars': chars, 'eot': None}}

def read_meta(folder):
    """
    A dict with at least vocab_size, dtype, eot, bytes_per_token (None: unknown) and tokenizer (its state
    without ranks, None: GPT-2's). From meta.json, nanoGPT's meta.pkl, or by assumption, which is said once.
    """
    usual = {'dtype': 'uint16', 'eot': None, 'bytes_per_token': None, 'tokenizer': None}
    for name, read in {'meta.json': read_json, 'meta.pkl': read_pickle}.items():
        path = os.path.join(folder, name)
        if os.path.exists(path):
            try:
                return {**usual, **read(path)}
            except Exception as e: # a damaged pickle can raise anything
                raise ValueError(f'{path} cannot be read ({e!r}): prepare the dataset again') from e
    say_once(f'{folder} has no meta.json or meta.pkl: assuming the GPT-2 encoding')
    return {**usual, 'vocab_size': 50304, 'eot': 50256} # nanoGPT's size, 50257 rounded up

def prepare_command(folder):
    """The command that most likely prepares this folder, judged by its name."""
    name = 'shakespeare_gpt2' if dataset_name(folder) == 'shakespeare' else dataset_name(folder)
    source, _, kind = name.partition('_')
    if source not in SOURCES or not kind:
        return f'python prepare.py my.txt --out={name}'
    flags = f' {source}' * (source != 'pystdlib') + f' --tokenizer={kind}' * (kind != 'byte')
    return f'python prepare.py{flags}'

HEADER_BYTES, HEADER_MAGIC = 1024, 20240520 # of foreign shards: 256 int32, which begin magic, version, tokens
Shard = collections.namedtuple('Shard', 'path dtype offset n_tokens')

def look_at(path, dtype):
    """The Shard at path, with or without a header."""
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
    """
    The tokens of one split: folder/<split>.bin, or else its shards *<split>*.bin, sorted. Window i is the
    block_size + 1 tokens from i * block_size of a shard, so x = w[:, :-1] and y = w[:, 1:] take every token
    but a shard's first, and its tail, once as a target. With vocab_size, ids are checked as they are read.
    """
    def __init__(self, folder, split, dtype=None, vocab_size=None):
        self.vocab_size, self.name = vocab_size, os.path.join(folder, f'{split}.bin')
        paths = [self.name]
        if not os.path.exists(self.name):
            self.name = os.path.join(folder, f'*{split}*.bin')
            paths = [path for path in sorted(glob.glob(os.path.join(glob.escape(folder), f'*{split}*.bin')))
                     if not path.endswith('.mask.bin')]
        if not paths:
            command = prepare_command(folder)
            raise FileNotFoundError(f'{folder} is not prepared: no {split}.bin; run `{command}`')
        dtype = np.dtype(dtype or read_meta(folder)['dtype']).newbyteorder('<')
        self.shards = [look_at(path, dtype) for path in paths]
        self.n_tokens = sum(shard.n_tokens for shard in self.shards)

    def ends(self, block_size):
        """How many windows there are up to the end of each shard."""
        return np.cumsum([max(shard.n_tokens - 1, 0) // block_size for shard in self.shards])

    def n_windows(self, block_size):
        """How many windows there are. Raises ValueError if there is none."""
        n = int(self.ends(block_size)[-1])
        if not n:
            raise ValueError(f'{self.name} has {self.n_tokens:,} tokens, a window needs block_size+1 = '
                             f'{block_size + 1}: lower --block_size or prepare more text')
        return n

    def read(self, indices, block_size):
        """The windows with these indices: int64 (len(indices), block_size + 1)."""
        indices, ends = np.asarray(indices), self.ends(block_size)
        if indices.size and not 0 <= indices.min() <= indices.max() < ends[-1]:
            raise IndexError(f'windows {indices.min()}-{indices.max()} of {self.name}, which has {ends[-1]}')
        shards = np.searchsorted(ends, indices, side='right')
        firsts = (indices - np.append(0, ends)[shards]) * block_size
        windows = np.empty((len(indices), block_size + 1), np.int64)
        for n in np.unique(shards): # plain reads: a memory map of a large file would fill up the RSS
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
    found = find_source(words[0] if words else source)
    folder = output_folder(out, found.name, tokenizer)

    documents, characters, left_out = scan(found.files, found.skip_bad)
    if not documents:
        raise ValueError(f'{found.label} is empty: there is no text to prepare')
    n_bytes = sum(size for *_, size in documents)
    print(f'{found.label}: {len(documents):,} file{"s" * (len(documents) > 1)}, {n_bytes / 1e6:,.2f} MB',
          f'{len(characters):,} different characters',
          *(f'{n} left out ({what})' for what, n in left_out.items() if n), sep=', ')

    by_document = found.documents and len(documents) > 1
    tok = make_tokenizer(tokenizer, characters, by_document)
    plan = split_documents(documents, val_fraction, by_document)
    procs = usable_procs(procs, tok, n_bytes)
    meta = write_dataset(folder, plan, tok, found.label, by_document, procs, n_bytes)

    print(f'{folder}: {meta["train_tokens"]:,} train and {meta["val_tokens"]:,} val tokens, '
          f'{meta["bytes_per_token"]:.2f} bytes a token, vocabulary {meta["vocab_size"]:,}')
    name = dataset_name(folder)
    print('next: python train.py' + f' --dataset={name}' * (name != 'pystdlib_byte'))
