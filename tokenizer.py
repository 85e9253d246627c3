"""Text to token ids and back: bytes, characters, tiktoken, tokenizer.json, BPE trained here; chats."""
import base64
import collections
import concurrent.futures
import contextlib
import functools
import heapq
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import threading
import time

import numpy as np

from configurator import package, print0, reading

EOT = '<|endoftext|>'         # the text of every tokenizer's end-of-text token
SPLITS = 'train', 'val'
CHUNK = 1 << 20               # characters that are encoded at a time

# A letter or digit, then a space, a line end or a CJK stop: no pattern of tiktoken's matches across this
CUT = re.compile(r'[^\W_](?=[ \n\u3001\u3002\uff0c])')  # [^\W_] is \p{L} and \p{N}
AROUND = 256  # characters on each side of a cut that are looked at


def may_cut(text, n, tok):
    """Whether text[:n] and text[n:] alone give the ids of the whole, tried on the text around n: tokens may
    reach across spaces, and Llama 2 puts a prefix before each text."""
    if any(mark in text[max(0, n - len(mark) + 1):n + len(mark) - 1] for mark in tok.special):
        return False
    left = text[max(0, n - AROUND):n]
    right = text[n:n + AROUND]
    return [*tok.encode_array(left), *tok.encode_array(right)] == [*tok.encode_array(left + right)]


def last_cut(text, end, tok):
    """The last place before `end` where text can be cut, or 0."""
    places = (n for n in range(end - 1, 0, -1) if tok.anywhere or CUT.match(text, n - 1))
    return next((n for n in itertools.islice(places, 20) if may_cut(text, n, tok)), 0)


def pieces(blocks, tok):
    """(piece, whether it is the last), of about CHUNK characters, which together have the text's ids."""
    text = ''
    limit = CHUNK
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


# many processes ---------------------------------------------------------------------------------------------

def in_groups(items):
    """(item, its characters), ... -> lists of items, of about CHUNK characters each."""
    group = []
    size = 0
    for item, n in items:
        group.append(item)
        size += n
        if size >= CHUNK:
            yield group
            group = []
            size = 0
    if group:
        yield group


def in_processes(procs, work, jobs):
    """work(job) of every job, in order, in `procs` processes (None: one for each core); a lone job runs in
    this one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    procs = min(procs or cores, 61)  # Windows allows no more
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, 2 * procs))
    if procs == 1 or len(first) < 2:
        yield from map(work, itertools.chain(first, jobs))
        return
    with concurrent.futures.ProcessPoolExecutor(procs, initializer=start_worker, initargs=(work,)) as pool:
        waiting = collections.deque(pool.submit(work_in_worker, job) for job in first)
        while waiting:
            done = waiting.popleft()
            if error := done.exception():
                raise error  # here, so that it counts as ours: see on_purpose
            yield done.result()
            waiting.extend(pool.submit(work_in_worker, job) for job in itertools.islice(jobs, 1))


def start_worker(work):
    """Gives a new process its function. It ends with its parent, even if that is killed."""
    global work_of_worker
    work_of_worker = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    """Ends this process as soon as the one that started it has ended."""
    multiprocessing.parent_process().join()
    os._exit(1)


def work_in_worker(job):
    """The function's result for a job."""
    return work_of_worker(job)


# tokenizers -------------------------------------------------------------------------------------------------

# The switch for thinking in chat templates: of Qwen3 and most, of MiniMind, of DeepSeek V3.1
THINKING = 'enable_thinking', 'open_thinking', 'thinking'
THOUGHTS = 'reasoning_content', 'reasoning', 'thinking'  # the names of a message's thoughts in templates
MARK = '\U0010ffff'  # Unicode's last noncharacter, which no text has: see as_text


class Tokenizer:
    """A kind adds encode_array (text -> ids, special tokens as plain text), state (plain Python that rebuilds
    it) and to_json (a tokenizer.json, as text). eot: the id of end of text, or None; special: {text: id}."""
    anywhere = False  # True: a token depends on one character alone, so text can be cut anywhere
    bos = ()  # the ids that documents and prompts begin with
    chat_template = None
    chat_variables = {}  # of the template, like bos_token: {name: text}
    eos_tokens = ()  # ids of further tokens that end a text, as published files list them

    def __init__(self, name, tokens, special):
        self.name = name
        self.special = special
        self.eot = special.get(EOT)
        self.tokens = tokens | {i: text.encode() for text, i in special.items()}  # {id: bytes}
        self.n_vocab = max(self.tokens, default=-1) + 1
        self.special_pattern = '|'.join(map(re.escape, sorted(special, key=len, reverse=True))) or '(?!)'

    def encode(self, text, allow_special=True):
        """text -> list of ids. allow_special: special tokens' texts become their ids."""
        text = without_surrogates(text)
        parts = re.split(f'({self.special_pattern})', text) if allow_special else [text]
        return [i for n, part in enumerate(parts)  # every second part is a special token
                for i in ([self.special[part]] if n % 2 else
                          self.encode_array(part.replace(MARK, '')).tolist())]

    def as_text(self, value):
        """A JSON value with a MARK inside each special token in its texts: encode then encodes these as
        ordinary text, unlike the special tokens that a chat template adds."""
        first = re.compile(f'(?={self.special_pattern})(.)', re.DOTALL)
        return json_value(value, lambda one, _: first.sub(rf'\1{MARK}', one) if isinstance(one, str) else one)

    def decode_bytes(self, ids):
        """Special tokens give their text, the ids that pad a vocabulary nothing."""
        return b''.join(self.tokens.get(int(i), b'') for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    @functools.cached_property
    def sizes(self):
        """The bytes of text that each id stands for: 0 for special tokens and padding."""
        special = {*self.special.values(), self.eot}
        return np.array([0 if i in special else len(self.tokens.get(i, b'')) for i in range(self.n_vocab)])

    def render(self, messages, add_generation_prompt=True, tools=None, thinking=None):
        """The text of [{'role', 'content', ...}, ...], as transformers' apply_chat_template renders it.
        tools: JSON schemas. thinking: whether the answer begins with thoughts; None: the template decides. A
        template is jinja, or [{'name', 'template'}, ...] with a 'default' and perhaps a 'tool_use'. Raises
        ValueError if there is none, or if the template fails or rejects these messages."""
        import jinja2  # only chats need it
        template = self.chat_template
        if not template:
            raise ValueError(f'tokenizer {self.name!r} has no chat template: give a plain prompt, or use one '
                             'that has, like --tokenizer=bpe:4096 of prepare.py')
        if isinstance(template, list):
            named = {entry['name']: entry['template'] for entry in template}
            template = named.get('tool_use' if tools and 'tool_use' in named else 'default')
        messages = json_value(messages)
        for one in messages:  # a template reads one of these names
            if thoughts := next(filter(None, map(one.get, THOUGHTS)), None):
                one.update(dict.fromkeys(THOUGHTS, thoughts))
        switch = {} if thinking is None else dict.fromkeys(THINKING, thinking)
        try:
            return compile_template(template).render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                **self.chat_variables, **switch)
        except (jinja2.TemplateError, TypeError) as e:  # of its syntax, or a field that it does not find
            raise ValueError(f'the chat template fails: {e!r:.200}') from e

    def chat(self, *args, **options):
        """Conversations -> ids; see render."""
        return self.encode_chat(self.render(*args, **options))

    def encode_chat(self, text):
        """The text of render -> ids, with nothing put around it."""
        return self.encode(text)

    @functools.cached_property
    def stop_tokens(self):
        """eot, the special token that the chat template puts behind an answer, and eos_tokens."""
        ends = [] if self.eot is None else [self.eot]
        answer = 'the answer'
        if self.chat_template:
            messages = [{'role': 'user', 'content': 'a question'}, {'role': 'assistant', 'content': answer}]
            with contextlib.suppress(Exception):  # chat() raises it
                after = self.render(messages, False).rpartition(answer)[2]
                ends += [self.special[mark] for mark in re.findall(self.special_pattern, after)[:1]]
        return tuple(dict.fromkeys([*ends, *self.eos_tokens]))


def json_value(value, change=lambda value, key: value, key=None):
    """A JSON value with each part changed, change(part, the key of its field), and without the nulls with
    which parquet pads objects."""
    value = change(value, key)
    if isinstance(value, dict):
        return {change(key, None): json_value(one, change, key)
                for key, one in value.items() if one is not None}
    return [json_value(one, change, key) for one in value] if isinstance(value, list) else value


def without_surrogates(text):
    """Lone surrogates, which have no UTF-8, become U+FFFD, pairs of them one character."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and end of text."""
    anywhere = True

    def __init__(self):
        super().__init__('byte', {i: bytes([i]) for i in range(256)}, {EOT: 256})

    def encode_array(self, text):
        return np.frombuffer(text.encode(), np.uint8)

    def state(self):
        return {'kind': 'byte'}

    def to_json(self):
        return bpe_json(byte_chars(), [], [], self.special)


class CharTokenizer(Tokenizer):
    """chars[id] is a character."""
    anywhere = True

    def __init__(self, chars, eot=None):
        self.chars = list(chars)
        self.ids = np.full(sys.maxunicode + 1, -1, np.int32)  # code point -> id
        self.ids[[*map(ord, self.chars)]] = range(len(self.chars))
        tokens = {i: char.encode() for i, char in enumerate(self.chars)}
        super().__init__('char', tokens, {} if eot is None else {EOT: eot})

    def encode_array(self, text):
        ids = self.ids[np.frombuffer(text.encode('utf-32-le'), '<u4')]
        if lacking := sorted({text[i] for i in np.flatnonzero(ids < 0)}):
            raise ValueError(f'prompt has {", ".join(map(repr, lacking[:9]))} (not in this char vocabulary '
                             f'of {self.n_vocab}): leave it out, or prepare text that has it')
        return ids

    def state(self):
        return {'kind': 'char', 'chars': self.chars, 'eot': self.eot}

    def to_json(self):
        vocab = {char: i for i, char in enumerate(self.chars)}
        return bpe_json(vocab, [], [], self.special, byte_level=False)


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by tiktoken. ranks: `base64 rank` lines."""
    def __init__(self, name, pattern, special, ranks, chat_template=None):
        import tiktoken
        self.pattern = pattern
        self.ranks = ranks
        self.chat_template = chat_template
        table = {base64.b64decode(token): int(rank) for token, rank in map(str.split, ranks.splitlines())}
        self.bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=table, special_tokens=special)
        super().__init__(name, {i: token for token, i in table.items()}, special)

    def encode_array(self, text):
        return np.array(self.bpe.encode_ordinary(text), np.uint32)

    def state(self):
        chat = {'chat_template': self.chat_template} if self.chat_template else {}
        return {'kind': 'tiktoken', 'name': self.name, 'pattern': self.pattern, 'special': dict(self.special),
                'ranks': self.ranks, **chat}

    def to_json(self):
        """Any two tokens that make a third are a merge, of its rank: tiktoken asks for no more."""
        ranks = self.bpe._mergeable_ranks
        chars = {b: char for char, b in byte_chars().items()}

        def text(token):
            return ''.join(chars[b] for b in token)
        merges = [[text(token[:i]), text(token[i:])] for token in sorted(ranks, key=ranks.get)
                  for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        # tokenizers' regular expressions know possessive ++, *+ and ?+, but read {1,3}+ as any number of them
        pattern = re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', self.pattern)
        return bpe_json({text(token): i for token, i in ranks.items()}, merges, [pattern], self.special)


def rank_table(ranks):
    """{token: rank} -> `base64 rank` lines, by rank."""
    return ''.join(f'{base64.b64encode(token).decode()} {ranks[token]}\n'
                   for token in sorted(ranks, key=ranks.get))


def bpe_json(vocab, merges, patterns, special, byte_level=True):
    """A tokenizer.json, as text. patterns: each splits the pieces of the one before."""
    steps = [{'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
             for pattern in patterns]
    level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False}
    steps += [level] * byte_level
    return json.dumps({
        'version': '1.0', 'truncation': None, 'padding': None, 'normalizer': None, 'post_processor': None,
        'added_tokens': [{'id': i, 'content': text, 'single_word': False, 'lstrip': False, 'rstrip': False,
                          'normalized': False, 'special': True} for text, i in special.items()],
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': steps} if steps else None,
        'decoder': level if byte_level else {'type': 'Fuse'},
        'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                  'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False,
                  'ignore_merges': byte_level, 'vocab': vocab, 'merges': merges},
    }, ensure_ascii=False)


def byte_chars():
    """{character in byte-level vocabularies: its byte}, GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


SPECIAL_TOKENS = 'bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token'


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, by the tokenizers library. source: its text; config: SPECIAL_TOKENS and chat_template
    of tokenizer_config.json, and eos_token_id, a list of all that end a text."""
    def __init__(self, source, config=None):
        self.source = source
        self.config = config or {}
        self.library = library_tokenizer(source)
        vocab = self.library.get_vocab()
        added = self.library.get_added_tokens_decoder()  # {id: AddedToken}
        special = {token.content: i for i, token in added.items() if token.special}
        super().__init__('json', token_bytes(vocab, json.loads(source)), special)
        self.chat_variables = {name: token['content'] if isinstance(token, dict) else token
                               for name in SPECIAL_TOKENS if (token := self.config.get(name))}
        self.chat_template = self.config.get('chat_template')
        self.eos_tokens = self.config.get('eos_token_id', ())
        ends = [self.chat_variables.get('eos_token'), EOT, '<|end_of_text|>', '</s>', '<|im_end|>']
        self.eot = next((vocab[end] for end in ends if end in vocab), None)
        some = self.library.encode('a')  # its post-processor, if any, puts a bos in front
        self.bos = some.ids[:[*some.special_tokens_mask, 0].index(0)]

    def encode(self, text, allow_special=True, whole=True):
        """As transformers' tokenizer(text). whole: with bos in front, unless the text begins with it, but
        without an end of text, since a prompt continues."""
        library = self.unmarking if allow_special and MARK in text else self.library
        library.encode_special_tokens = not allow_special  # the library's name for 'as plain text'
        # _fast: half the time, by not counting where in the text each token is
        encoding, = library.encode_batch_fast([without_surrogates(text)], add_special_tokens=False)
        ids = encoding.ids
        return ids if not whole or ids[:len(self.bos)] == self.bos else self.bos + ids

    @functools.cached_property
    def unmarking(self):
        """The library's tokenizer with a first step that removes MARKs, after it has found special tokens."""
        spec = json.loads(self.source)
        steps = [{'type': 'Replace', 'pattern': {'String': MARK}, 'content': ''}, spec.get('normalizer')]
        spec['normalizer'] = {'type': 'Sequence', 'normalizers': [*filter(None, steps)]}
        for token in spec['added_tokens']:
            token['normalized'] &= not token['special']
        return library_tokenizer(json.dumps(spec))

    def encode_array(self, text):
        return np.array(self.encode(text, allow_special=False, whole=False), np.uint32)

    def encode_chat(self, text):
        return self.encode(text, whole=False)

    def state(self):
        return {'kind': 'json', 'source': self.source, 'config': self.config}

    def to_json(self):
        return self.source


def library_tokenizer(source):
    """A Tokenizer of the package tokenizers, from a file's text. Raises ValueError for a WordPiece one."""
    tok = package('tokenizers', 'a tokenizer.json needs', 'tokenizers').Tokenizer.from_str(source)
    if (kind := type(tok.model).__name__) not in ('BPE', 'Unigram'):
        raise ValueError(f'unsupported model {kind}: BPE and Unigram are supported')
    tok.no_truncation()
    tok.no_padding()
    if kind == 'BPE':
        tok.model.dropout = None  # else the same text has other ids each time
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # its threads and our processes do not mix
    return tok


def token_bytes(vocab, spec):
    """{id: its bytes} of a tokenizer.json's vocabulary. Byte-level vocabularies write a character for each
    byte, except in added tokens; others U+2581 for a space, and perhaps <0x0A> for a byte without a token.
    """
    byte_level = '"ByteLevel"' in json.dumps([spec.get('pre_tokenizer'), spec.get('decoder')])
    fallback = spec['model'].get('byte_fallback')
    back = byte_chars()
    added = {token['content'] for token in spec.get('added_tokens', [])}
    tokens = {}
    for text, i in vocab.items():
        if byte_level and text not in added and all(char in back for char in text):
            tokens[i] = bytes(back[char] for char in text)
        elif fallback and re.fullmatch('<0x[0-9A-F]{2}>', text):
            tokens[i] = bytes([int(text[3:5], 16)])
        else:
            space = spec['model'].get('end_of_word_suffix') or '\u2581'
            tokens[i] = (text if byte_level else text.replace(space, ' ')).encode()
    return tokens


# chat templates ---------------------------------------------------------------------------------------------

@functools.cache
def compile_template(template):
    """A jinja2 Template in the environment that transformers gives to chat templates."""
    import jinja2.sandbox
    # {% generation %} ... {% endgeneration %} marks the assistant's words: a block with the same text
    template = re.sub(r'({%[-+]?\s*(end)?)generation\b', r'\1with', template)

    def raise_exception(message):
        raise ValueError(f'the chat template says: {message}')
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols'])
    env.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
    env.globals |= {'raise_exception': raise_exception, 'strftime_now': time.strftime}
    return env.from_string(template)


# training a tokenizer ---------------------------------------------------------------------------------------

# GPT-4's words: cl100k_base's pattern as first published, which tiktoken, regex and tokenizers read alike
WORD_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
BPE_SPECIAL = EOT, '<|im_start|>', '<|im_end|>', *(f'<|reserved_{i}|>' for i in range(5))
SAMPLE = 64                 # groups of CHUNK characters read in full; after them every tenth, counted tenfold
LONGEST = 256               # bytes of a token
WORDS_BYTES = 1 << 24       # of different words, the commonest, that train_bpe holds in memory
CHATML = ("{% if tools %}"
          "{{ '<|im_start|>system\n<tools>' + tools | tojson + '</tools><|im_end|>\n' }}{% endif %}"
          "{% for message in messages %}"
          "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['reasoning_content'] %}"
          "{{ '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
          "{{ message['content'] or '' }}"
          "{% for call in message['tool_calls'] or [] %}"
          "{{ '<tool_call>' + (call['function'] or call) | tojson + '</tool_call>' }}{% endfor %}"
          "{{ '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def bpe_tokenizer(size, training, procs, **_):
    """Byte-level BPE with a vocabulary of `size`, or less if the texts have fewer merges: the 256 bytes, the
    merges in the order learnt, BPE_SPECIAL. Raises ValueError for an unusable size."""
    least = 256 + len(BPE_SPECIAL)
    if not size.isdecimal() or not least <= int(size) <= 1 << 20:
        raise ValueError(f"tokenizer='bpe:{size}': a vocabulary has {least} (256 bytes, {len(BPE_SPECIAL)} "
                         f'special tokens) to {1 << 20:,} tokens: choose a size like bpe:4096')
    n_merges = int(size) - least
    counts, n_read = count_words(WordSplitter(), training, procs)
    tokens = train_bpe(counts, n_merges)
    print0(f'bpe: learnt {len(tokens) - 256:,} of {n_merges:,} merges from {n_read / 1e6:,.2f} MB, with '
           f'{len(counts):,} different words')
    special = {text: len(tokens) + i for i, text in enumerate(BPE_SPECIAL)}
    return TiktokenTokenizer(f'bpe:{len(tokens) + len(special)}', WORD_PATTERN, special,
                             rank_table({token: i for i, token in enumerate(tokens)}), CHATML)


class WordSplitter:
    """Cuts text into words by WORD_PATTERN; to `pieces` a tokenizer whose ids are words."""
    anywhere = False
    special = ()

    def __init__(self):
        import regex
        self.encode_array = regex.compile(WORD_PATTERN).findall

    def count(self, group):
        """[text, ...] -> (Counter of words, bytes)."""
        counts = collections.Counter()
        for text in group:
            counts.update(self.encode_array(text))
        return counts, len(''.join(group).encode())


def count_words(splitter, texts, procs=None):
    """(Counter of the words in texts, the bytes counted). texts: iterables of blocks of text."""
    groups = in_groups((piece, len(piece)) for blocks in texts for piece, _ in pieces(blocks, splitter))
    sample = (group for n, group in enumerate(groups) if n < SAMPLE or n % 10 == 0)
    counts = collections.Counter()
    progress = ProgressLine('counting words')
    for n, (counted, n_bytes) in enumerate(in_processes(procs, splitter.count, sample)):
        for word, number in counted.items():
            counts[word] += number * (1 if n < SAMPLE else 10)
        progress.add(n_bytes)
    progress.show()
    return counts, progress.done


def train_bpe(counts, n_merges):
    """{word: how often} -> the 256 bytes and the tokens that byte pair encoding (arXiv:1508.07909) adds.

    Up to n_merges times the commonest pair of neighbours within words becomes a token, from left to right; of
    equally common pairs that of the lowest ids. Ends early if no pair that fits into a token occurs twice.

    Once the younger of its tokens is made everywhere, a pair can only get rarer. So its places are found
    then, and counted again whenever its old number brings it to the top of the heap.
    """
    ids, weight = bytes_of_words(counts)  # ids: a token's where it begins, else (on its other bytes) -1
    begins = np.arange(len(ids), dtype=np.int32)  # where a token ends, the place where it begins
    tokens = [bytes([b]) for b in range(256)]
    sizes = np.ones(1 << 20, np.int32)

    def pairs_at(places):
        """[(-number, pair, its places)] of the pairs that begin at these places and occur twice. A pair of
        tokens is one number, first << 20 | second."""
        first = ids[places]
        pairs = first.astype(np.int64) << 20 | ids[places + sizes[first]]
        order = np.argsort(pairs, kind='stable')  # the places of one pair remain sorted
        pairs = pairs[order]
        places = places[order]
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        numbers = np.add.reduceat(weight[places], starts)
        return [(-number, pair, its_places) for number, pair, its_places in zip(
            numbers.tolist(), pairs[starts].tolist(), np.split(places, starts[1:])) if number > 1]

    heap = pairs_at(np.flatnonzero((ids[:-1] >= 0) & (ids[1:] >= 0)).astype(np.int32))
    heapq.heapify(heap)
    while heap and heap[0][0] <= -2 and len(tokens) < 256 + n_merges:
        old, pair, places = heapq.heappop(heap)
        first = pair >> 20
        second = pair & (1 << 20) - 1
        width = len(tokens[first])
        token = tokens[first] + tokens[second]
        new = len(tokens)
        places = places[(ids[places] == first) & (ids[places + width] == second)]
        number = int(weight[places].sum())
        if number != -old:
            heapq.heappush(heap, (-number, pair, places))
            continue
        if len(token) > LONGEST:
            continue
        if first == second:  # places overlap, as in aaa: from the left, keep places that do not
            kept = []
            end = 0
            for place in places.tolist():
                if place >= end:
                    kept.append(place)
                    end = place + len(token)
            places = np.array(kept)
        tokens.append(token)
        sizes[new] = len(token)
        before = begins[places - 1]
        after = places + len(token)
        ids[places] = new
        ids[places + width] = -1
        begins[after - 1] = places
        # A left neighbour that was merged too has -1 there: their pair is found at its own place.
        for entry in pairs_at(np.concatenate([before[ids[before] >= 0], places[ids[after] >= 0]])):
            heapq.heappush(heap, entry)
    return tokens


def bytes_of_words(counts):
    """The bytes of all words, -1 before each and at the end; and of each byte how often its word occurs."""
    text = bytearray(1)
    ends = [0]
    weight = [0]
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        text += word.encode() + b'\0'
        del text[WORDS_BYTES + 2:]
        ends.append(len(text) - 1)
        weight.append(counts[word])
        if len(text) > WORDS_BYTES:
            print0(f'bpe: learning from the {len(ends) - 1:,} commonest of {len(counts):,} different words')
            break
    ids = np.array(text, np.int32)
    ids[ends] = -1
    return ids, np.repeat(weight, np.diff(ends, prepend=-1))


# tokenizers by name, and as they are stored -----------------------------------------------------------------

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'tiktoken': TiktokenTokenizer, 'json': JsonTokenizer}
# kind: (the part of its state that has a file of its own in a prepared folder, that file's name)
TABLES = {'tiktoken': ('ranks', 'tokenizer.tiktoken'), 'json': ('source', 'tokenizer.json')}


def byte_tokenizer(**_):
    """A ByteTokenizer, whatever the texts."""
    return ByteTokenizer()


def char_tokenizer(texts, by_document, **_):
    """A CharTokenizer of the characters in texts."""
    chars = sorted({char for blocks in texts for block in blocks for char in set(block)})
    return CharTokenizer(chars, len(chars) if by_document else None)


MAKERS = {'byte': byte_tokenizer, 'char': char_tokenizer, 'bpe:N': bpe_tokenizer}  # others: files, tiktoken's


def make_tokenizer(name, texts=(), by_document=False, training=None, procs=None):
    """A tokenizer for new data: by MAKERS, or one that exists already. Makers get all of this by keyword, and
    size, the N of bpe:N. texts: iterables of blocks; training: the texts to train on; by_document:
    whether an end-of-text token is needed."""
    kind, colon, size = name.partition(':')
    maker = MAKERS.get(f'{kind}:N' if colon else name)
    if maker:
        return maker(size=size, texts=texts, training=training, by_document=by_document, procs=procs)
    if os.path.exists(name):
        return json_tokenizer(name)
    return tiktoken_tokenizer(name)


def tiktoken_tokenizer(name):
    """The tiktoken encoding of this name, whose table is downloaded once."""
    import requests
    import tiktoken
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f'tokenizer={name!r} is none of {", ".join([*MAKERS, *known])}, and no folder, '
                         'prepared or with a tokenizer.json: `python zoo/hub.py OWNER/NAME` fetches one')
    try:
        bpe = tiktoken.get_encoding(name)
    except requests.RequestException as e:
        raise OSError(f'tokenizer={name!r} cannot be downloaded ({e}): go online once, set '
                      'TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer=byte') from e
    return TiktokenTokenizer(name, bpe._pat_str, dict(bpe._special_tokens), rank_table(bpe._mergeable_ranks))


def json_tokenizer(path):
    """A JsonTokenizer of a tokenizer.json, or a folder with one, and of the files that stand beside it."""
    path = pathlib.Path(path)
    if path.is_dir():
        path /= 'tokenizer.json'

    def beside(name):
        """The content of a JSON file in the same folder, {} if there is none."""
        file = path.with_name(name)
        with reading(file):
            return json.loads(file.read_bytes()) if file.exists() else {}
    config = beside('tokenizer_config.json')
    config = {key: config[key] for key in (*SPECIAL_TOKENS, 'chat_template') if config.get(key)}
    template = path.with_name('chat_template.jinja')
    if template.exists():
        config['chat_template'] = template.read_bytes().decode()
    config['eos_token_id'] = [  # which is a number, a list or null
        i for name in ('generation_config.json', 'config.json')
        for i in np.ravel(beside(name).get('eos_token_id')).tolist() if i is not None]
    with reading(path):
        return JsonTokenizer(path.read_bytes().decode(), config)  # as bytes: line ends stay as they are


def tokenizer_from_state(state):
    """The tokenizer whose state() this is, without files or network."""
    state = dict(state)
    return KINDS[state.pop('kind')](**state)


# progress ---------------------------------------------------------------------------------------------------

class ProgressLine:
    """How far and how fast, in bytes: a line every 10 seconds, and one at the end."""
    def __init__(self, label, total=None):
        self.label = label
        self.done = 0
        self.of = f' of {total / 1e6:,.1f}' if total else ''
        self.begin = self.shown = time.time()

    def add(self, n_bytes):
        self.done += n_bytes
        if time.time() - self.shown > 10:
            self.shown = time.time()
            self.show(self.of)

    def show(self, of=''):
        seconds = time.time() - self.begin
        size = self.done / 1e6
        print0(f'{self.label}: {size:,.1f}{of} MB in {seconds:.1f} s, {size / max(seconds, 1e-3):.1f} MB/s')
