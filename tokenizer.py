"""Tokenizers, BPE training and chat templates."""
import base64
import collections
import contextlib
import functools
import heapq
import inspect
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

import numpy as np

from configurator import UserError

EOT = '<|endoftext|>'
CHUNK = 1 << 16        # characters per piece
SPACES = 900_000       # most consecutive white-space characters that tiktoken can encode
GROUP = 32             # items that a worker receives at a time

# Long texts are cut after a letter or digit ([^\W_]), if a space, line end or CJK punctuation follows.
# Neither tiktoken's patterns nor WORD_PATTERN match across such a place.
CUT = re.compile(r'[^\W_](?=[ \n\u3001\u3002\uff0c])')


def pieces(blocks, can_cut=True):
    """Cuts a text that is given in blocks. Yields (piece, whether it is the last)."""
    text = ''
    start = CHUNK
    for block in blocks:
        text += block
        begin = 0
        while can_cut and (cut := CUT.search(text, start)):
            yield text[begin:cut.end()], False
            begin = cut.end()
            start = begin + CHUNK
        text = text[begin:]
        start = max(CHUNK, len(text) - 1)
    if text:
        yield text, True


# many processes ---------------------------------------------------------------------------------------------

def in_processes(procs, work, items):
    """Yields work(item) for each item, in order."""
    if procs is None:
        procs = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    items = iter(items)
    groups = iter(lambda: [*itertools.islice(items, GROUP)], [])
    first = next(groups, [])
    if procs == 1 or len(first) < GROUP:
        yield from map(work, itertools.chain(first, items))
        return
    busy = collections.deque()
    with ProcessPoolExecutor(procs, initializer=start_worker, initargs=[work]) as pool:
        try:
            for group in itertools.chain([first], groups):
                results = busy.popleft().result() if len(busy) == procs else []
                busy.append(pool.submit(work_on, group))
                yield from results
            for future in busy:
                yield from future.result()
        except BaseException as error:
            for worker in multiprocessing.active_children():  # waiting for them may hang after Ctrl-C
                worker.terminate()
            if isinstance(error, BrokenProcessPool):
                raise OSError('a worker was killed, perhaps because memory ran out: lower --procs') from error
            raise


def work_on(group):
    """Returns the results of a group; runs in a worker."""
    return [*map(work_on.work, group)]


def start_worker(work):
    """Prepares a worker. Only the parent handles Ctrl-C."""
    work_on.work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


# tokenizers -------------------------------------------------------------------------------------------------

# template variables that control thinking: Qwen3's, MiniMind's and DeepSeek V3.1's
THINKING = 'enable_thinking', 'open_thinking', 'thinking'
THOUGHTS = 'reasoning_content', 'reasoning', 'thinking'
MARK = '\U0010ffff'  # a noncharacter; see as_text

# messages to test chat templates; U+0378 may encode as <unk>, which document_token then excludes
QUESTION = {'role': 'user', 'content': 'a question \u0378'}
ANSWER = {'role': 'assistant', 'content': 'the answer'}


KINDS = {}  # kind -> class; zoo/tokenizer_json.py adds json


class Tokenizer:
    """A subclass has a `kind`, and a method encode_array (text -> ids, with special tokens as plain
    text). For state(), __init__ stores each argument, which must be a plain value, as the
    attribute of the same name. eot: the end-of-text id, or None; special: {text: id}."""
    kind = None  # name in meta.json, checkpoints and --tokenizer
    table = None  # name of a long argument, which prepare.py writes to tokenizer.<kind>
    source = None  # the text of a tokenizer.json
    path = None  # a published model's path
    pattern = None  # splits a text into words
    byte_level = True  # whether every byte can be encoded
    can_cut = True  # whether a text can be encoded in pieces
    bos = ()  # ids that begin documents; a subclass must add them in `encode`
    chat_template = None
    chat_variables = {}  # for chat_template, such as {'bos_token': '<s>'}
    eos_tokens = ()  # further ids that end a text

    def __init_subclass__(cls):
        if 'kind' not in vars(cls):
            raise TypeError(f'class {cls.__name__} needs a `kind`: a name that identifies it in data and '
                            'checkpoints')
        KINDS[cls.kind] = cls

    def __init__(self, name, tokens, special):
        self.name = name
        self.special = special
        self.eot = special.get(EOT)
        self.tokens = tokens | {i: text.encode() for text, i in special.items()}
        self.n_vocab = max(self.tokens, default=-1) + 1
        self.special_pattern = '|'.join(map(re.escape, sorted(special, key=len, reverse=True))) or '(?!)'

    @classmethod
    def from_name(cls, name, **texts):
        """The tokenizer for a value of --tokenizer, or None if the value is for another class."""
        return cls() if name == cls.kind else None

    def state(self):
        return {'kind': self.kind} | {
            name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def encode(self, text):
        """text -> list of ids, including special tokens."""
        parts = re.split(f'({self.special_pattern})', without_surrogates(text))
        return [i for n, part in enumerate(parts)
                for i in ([self.special[part]] if n % 2 else
                          self.encode_array(part.replace(MARK, '')).tolist())]

    def as_text(self, value):
        """Inserts MARK into special tokens in a JSON value's texts, so that encode treats them as plain
        text."""
        first = re.compile(f'(?={self.special_pattern})(.)', re.DOTALL)
        return json_value(value, lambda text: first.sub(rf'\1{MARK}', text))

    def decode_bytes(self, ids):
        """ids -> bytes. Special tokens become their text, and padding becomes nothing."""
        return b''.join(self.tokens.get(int(i), b'') for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    @functools.cached_property
    def sizes(self):
        """(n_vocab,): bytes per id; 0 for special tokens and padding."""
        special = {*self.special.values(), self.eot}
        return np.array([0 if i in special else len(self.tokens.get(i, b'')) for i in range(self.n_vocab)])

    def render(self, messages, add_generation_prompt=True, tools=None, thinking=None):
        """Renders messages [{'role', 'content', ...}, ...] like transformers' apply_chat_template. tools:
        JSON schemas. thinking: whether to think; None: the template decides. Raises FileNotFoundError
        without a template, ValueError if it fails or rejects the messages."""
        import jinja2
        if not self.chat_template:
            raise FileNotFoundError(f'tokenizer {self.name!r} has no chat template: give a plain prompt, or '
                                    'prepare the data with another tokenizer, like --tokenizer=bpe:4096')
        messages = json_value(messages)
        for one in messages:
            if thoughts := next(filter(None, map(one.get, THOUGHTS)), None):
                one.update(dict.fromkeys(THOUGHTS, thoughts))
        switch = {} if thinking is None else dict.fromkeys(THINKING, thinking)
        try:
            return compile_template(self.template_for(tools)).render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                **self.chat_variables, **switch)
        except (jinja2.TemplateError, TypeError) as e:  # bad syntax, or a missing field
            raise UserError(f'the chat template fails: {e!r:.200}') from e

    def template_for(self, tools):
        """The chat template, or None. Published files may list several, such as one for tools."""
        if not isinstance(self.chat_template, list):
            return self.chat_template
        named = {one['name']: one['template'] for one in self.chat_template}
        return named.get('tool_use' if tools and 'tool_use' in named else 'default')

    def chat(self, *args, **options):
        return self.encode_chat(self.render(*args, **options))

    def encode_chat(self, text):
        """A rendered text -> ids; adds no bos."""
        return self.encode(text)

    @functools.cached_property
    def stop_tokens(self):
        ends = self.eot, self.end_of_answer, *self.eos_tokens
        return tuple(dict.fromkeys(i for i in ends if i is not None))

    @functools.cached_property
    def end_of_answer(self):
        """The special token that ends an answer in the chat template, or eot. It can be an eos token
        that begins the next message, as in GLM."""
        published = {self.eot, *self.eos_tokens}
        ids = []
        with contextlib.suppress(Exception):  # chat() will raise the error
            last, earlier = (self.special_tokens_in(self.render(messages, False).rpartition('the answer')[2])
                             for messages in ([QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION]))
            both = os.path.commonprefix([last, earlier])
            ids = [i for i in both + earlier[:1] if i in published] or last
        return [*ids, self.eot][0]

    @functools.cached_property
    def document_token(self):
        """A special token that a conversation can have only at the beginning: bos if the chat template
        renders it only there, or a token that the template never renders; otherwise None."""
        inside = self.special_tokens_in(str(self.chat_template))
        for first in [], [{'role': 'system', 'content': 'Be brief.'}]:
            with contextlib.suppress(Exception):  # a template may reject system messages
                inside += self.chat([*first, QUESTION, ANSWER, QUESTION, ANSWER], False)[1:]
        names = self.chat_variables.get('bos_token'), EOT, *sorted(self.special, key=self.special.get)
        return next((i for i in map(self.special.get, names) if i not in (None, *inside)), None)

    def special_tokens_in(self, text):
        return [self.special[mark] for mark in re.findall(self.special_pattern, text)]


def json_value(value, change=str):
    """Applies `change` to a JSON value's texts, and omits nulls, which parquet adds."""
    if isinstance(value, dict):
        return {change(key): json_value(one, change) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [json_value(one, change) for one in value]
    return change(value) if isinstance(value, str) else value


def without_surrogates(text):
    """Joins surrogate pairs, and replaces lone surrogates by U+FFFD."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


class ByteTokenizer(Tokenizer):
    """One id per byte, and an end-of-text id."""
    kind = 'byte'

    def __init__(self):
        super().__init__('byte', {i: bytes([i]) for i in range(256)}, {EOT: 256})

    def encode_array(self, text):
        return np.frombuffer(text.encode(), np.uint8)


class CharTokenizer(Tokenizer):
    """One id per character; chars[id] is the character."""
    kind = 'char'
    byte_level = False

    def __init__(self, chars, eot=None):
        self.chars = list(chars)
        self.ids = {char: i for i, char in enumerate(self.chars)}
        tokens = {i: char.encode() for i, char in enumerate(self.chars)}
        super().__init__('char', tokens, {} if eot is None else {EOT: eot})

    @classmethod
    def from_name(cls, name, texts=(), by_document=False, **_):
        if name == cls.kind:
            chars = sorted({char for blocks in texts for block in blocks for char in {*block}})
            return cls(chars, len(chars) if by_document else None)

    def encode_array(self, text):
        if lacking := {*text} - self.ids.keys():
            raise UserError(f'the vocabulary of characters lacks {sorted(lacking)[:9]}: leave them out, or '
                            'prepare text that has them')
        return np.array([self.ids[char] for char in text], np.uint32)


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by tiktoken. ranks: per line, a base64 token and its rank."""
    kind = 'tiktoken'
    table = 'ranks'

    def __init__(self, name, pattern, special, ranks, chat_template=None):
        import tiktoken
        self.pattern = pattern
        self.ranks = ranks
        self.chat_template = chat_template
        table = {base64.b64decode(token): int(rank) for token, rank in map(str.split, ranks.splitlines())}
        self.bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=table, special_tokens=special)
        super().__init__(name, {i: token for token, i in table.items()}, special)

    @classmethod
    def from_name(cls, name, training=(), procs=None, **_):
        import requests
        import tiktoken
        if name.startswith('bpe:'):
            return bpe_tokenizer(name.removeprefix('bpe:'), training, procs)
        if name not in tiktoken.list_encoding_names():
            return None
        try:
            bpe = tiktoken.get_encoding(name)
        except requests.RequestException as e:
            raise FileNotFoundError(f'tokenizer={name!r} cannot be downloaded ({e}): go online once, set '
                          'TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer=byte') from e
        return cls(name, bpe._pat_str, bpe._special_tokens, rank_table(bpe._mergeable_ranks))

    def encode_array(self, text):
        if re.search(rf'(?<!\s)\s{{{SPACES}}}', text):
            raise UserError(f'more than {SPACES:,} white-space characters in a row overflow the stack of '
                            'tiktoken: shorten them')
        return np.array(self.bpe.encode_ordinary(text), np.uint32)


def rank_table(ranks):
    """{token: rank} -> `ranks` of TiktokenTokenizer."""
    return ''.join(f'{base64.b64encode(token).decode()} {ranks[token]}\n'
                   for token in sorted(ranks, key=ranks.get))


# chat templates ---------------------------------------------------------------------------------------------

@functools.cache
def compile_template(template):
    """A jinja2 Template in transformers' environment."""
    import jinja2.sandbox
    # {% generation %} only marks text, so {% with %} renders the same
    template = re.sub(r'({%[-+]?\s*(end)?)generation\b', r'\1with', template)

    def raise_exception(message):
        raise UserError(f'the chat template rejects this: {message}')
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols'])
    env.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
    env.globals |= {'raise_exception': raise_exception, 'strftime_now': time.strftime}
    return env.from_string(template)


# training a tokenizer ---------------------------------------------------------------------------------------

# cl100k_base's original pattern, which the packages tiktoken, regex and tokenizers support
WORD_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
BPE_SPECIAL = EOT, '<|im_start|>', '<|im_end|>', *(f'<|reserved_{i}|>' for i in range(5))
TRAINING_WORDS = 50_000_000
LONGEST = 256               # bytes per token
WORDS_BYTES = 1 << 24       # bytes of the commonest words that train_bpe uses
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


def bpe_tokenizer(size, texts, procs):
    """Trains a byte-level BPE tokenizer with `size` ids: 256 bytes, merges, BPE_SPECIAL. Short texts give
    fewer merges."""
    least = 256 + len(BPE_SPECIAL)
    if not size.isdecimal() or not least <= int(size) <= 1 << 20:
        raise UserError(f"tokenizer='bpe:{size}' is not supported: choose a vocabulary from {least} to "
                        f'{1 << 20:,} tokens, like bpe:4096')
    counts = count_words(texts, procs)
    tokens = train_bpe(counts, int(size) - least)
    print(f'bpe: learned {len(tokens) - 256:,} merges from {len(counts):,} different words')
    special = {text: len(tokens) + i for i, text in enumerate(BPE_SPECIAL)}
    return TiktokenTokenizer(f'bpe:{len(tokens) + len(special)}', WORD_PATTERN, special,
                             rank_table({token: i for i, token in enumerate(tokens)}), CHATML)


def count_words(texts, procs=None):
    """{word: count} of the first TRAINING_WORDS words. texts: iterables of blocks."""
    counts = collections.Counter()
    n_words = 0
    texts = (piece for blocks in texts for piece, _ in pieces(blocks))
    for counted in in_processes(procs, words_of, texts):
        counts.update(counted)
        n_words += counted.total()
        if n_words > TRAINING_WORDS:
            break
    return counts


def words_of(text):
    """Counts words."""
    import regex
    return collections.Counter(regex.findall(WORD_PATTERN, text))


def train_bpe(counts, n_merges):
    """{word: count} -> the 256 bytes and the tokens that byte pair encoding (arXiv:1508.07909) adds.

    Merges the commonest repeated pair of neighbours within words, up to n_merges times.
    Among equally common pairs, the pair with the lowest ids comes first. Tokens have at most LONGEST bytes.

    Once both tokens of a pair exist, the pair can only become rarer, so the code finds the pair's
    places once, and recounts them when the pair reaches the top of the heap.
    """
    ids = [-1]    # a token's id at its first byte; otherwise -1
    weight = [0]  # per byte: the count of its word
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        ids += [*word.encode()[:WORDS_BYTES], -1]
        weight += [counts[word]] * (len(ids) - len(weight))
        if len(ids) > WORDS_BYTES:
            break
    ids = np.array(ids, np.int32)
    weight = np.array(weight)
    begins = np.arange(len(ids), dtype=np.int32)  # at a token's last byte: the place of its first byte
    tokens = [bytes([b]) for b in range(256)]
    sizes = np.ones(1 << 20, np.int32)

    def pairs_at(places):
        """[(-count, first << 20 | second, places of the pair)] of pairs that begin at `places` and occur
        more than once."""
        first = ids[places]
        pairs = first.astype(np.int64) << 20 | ids[places + sizes[first]]
        order = np.argsort(pairs, kind='stable')  # keeps places sorted
        pairs = pairs[order]
        places = places[order]
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        totals = np.add.reduceat(weight[places], starts)
        return [(-count, pair, its_places) for count, pair, its_places in zip(
            totals.tolist(), pairs[starts].tolist(), np.split(places, starts[1:])) if count > 1]

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
        count = int(weight[places].sum())
        if count != -old:
            heapq.heappush(heap, (-count, pair, places))
            continue
        if len(token) > LONGEST:
            continue
        if first == second:  # in aaa, two places overlap: keep the left
            separate = []
            end = 0
            for place in places.tolist():
                if place >= end:
                    separate.append(place)
                    end = place + len(token)
            places = np.array(separate)
        tokens.append(token)
        sizes[new] = len(token)
        before = begins[places - 1]
        after = places + len(token)
        ids[places] = new
        ids[places + width] = -1
        begins[after - 1] = places
        # ids[before] is -1 if the left neighbour was merged too; then their pair begins in `places`
        for entry in pairs_at(np.concatenate([before[ids[before] >= 0], places[ids[after] >= 0]])):
            heapq.heappush(heap, entry)
    return tokens


# tokenizers by name and by state ----------------------------------------------------------------------------

def make_tokenizer(name, **texts):
    """The tokenizer for a value of --tokenizer. char uses the arguments `texts` (iterables of blocks)
    and `by_document` (whether to add an end-of-text token); bpe:N uses `training` (like `texts`) and
    `procs`."""
    if '/' in name or name.endswith(('.gguf', '.json')) or os.path.exists(f'{name}/tokenizer.json'):
        from zoo.hub import fetch, published_tokenizer
        path = fetch(name, weights=False)
        tok = published_tokenizer(path)
        tok.path = path
        return tok
    for kind in KINDS.values():
        if tok := kind.from_name(name, **texts):
            return tok
    raise UserError(f'tokenizer={name!r} is not supported: choose byte, char, bpe:4096, an encoding of '
                    'tiktoken like gpt2, a prepared folder, or a published model')


def kind_of(state):
    """The tokenizer class of a state()."""
    if state['kind'] == 'json':
        import zoo.tokenizer_json  # noqa: F401
    return KINDS[state['kind']]


def tokenizer_from_state(state):
    """Rebuilds a tokenizer from its state()."""
    return kind_of(state)(**{name: state[name] for name in state if name != 'kind'})
