"""Text to token ids and back: bytes, characters, tiktoken, tokenizer.json, BPE trained here; chats."""
import base64
import collections
import contextlib
import functools
import heapq
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time

import numpy as np

EOT = '<|endoftext|>'  # the text of every tokenizer's end-of-text token
CHUNK = 1 << 16        # characters that are encoded at a time

# Where a long text is cut: behind a letter or digit, before a space, a line end or a CJK stop. No pattern of
# tiktoken's matches across such a place, nor does WORD_PATTERN. [^\W_] is \p{L} and \p{N}.
CUT = re.compile(r'[^\W_](?=[ \n\u3001\u3002\uff0c])')


def pieces(blocks, can_cut=True):
    """A text's blocks -> (piece, whether it is the last), of about CHUNK characters, or the whole text."""
    text = ''
    start = CHUNK
    for block in blocks:
        text += block
        while can_cut and (cut := CUT.search(text, start)):
            yield text[:cut.end()], False
            text = text[cut.end():]
            start = CHUNK
        start = max(CHUNK, len(text) - 1)
    if text:
        yield text, True


# many processes ---------------------------------------------------------------------------------------------

def in_processes(procs, work, items):
    """work(item) of every item, in order, in `procs` processes (None: one per core), or in this process if
    there is only one item."""
    if procs is None:
        procs = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    items = iter(items)
    first = [*itertools.islice(items, 2)]
    items = itertools.chain(first, items)
    if procs == 1 or len(first) < 2:
        yield from map(work, items)
        return
    with multiprocessing.Pool(procs, start_worker, [work]) as pool:
        try:
            yield from pool.imap(work_in_worker, items, chunksize=16)
        except Exception as error:
            raise error.with_traceback(None)  # noqa: B904 - raised here, it counts as our own


def start_worker(work):
    """Gives a new process its function, once. The process ends with the one that started it."""
    global work_of_worker
    work_of_worker = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    """Ends this process, which may wait for a lock, when the one that started it has ended."""
    multiprocessing.parent_process().join()
    os._exit(1)


def work_in_worker(item):
    """The function's result for an item."""
    return work_of_worker(item)


# tokenizers -------------------------------------------------------------------------------------------------

# The switch for thinking in chat templates: of Qwen3 and most, of MiniMind, of DeepSeek V3.1
THINKING = 'enable_thinking', 'open_thinking', 'thinking'
THOUGHTS = 'reasoning_content', 'reasoning', 'thinking'  # the names of a message's thoughts in templates
MARK = '\U0010ffff'  # Unicode's last noncharacter, which no text has: see as_text


class Tokenizer:
    """A kind adds encode_array (text -> ids, special tokens as plain text) and state (plain Python that
    rebuilds it). eot: the id of end of text, or None; special: {text: id}."""
    can_cut = True  # whether the pieces of a long text, which `pieces` cuts, have its ids
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

    def encode(self, text):
        """text -> list of ids. Special tokens' texts become their ids."""
        parts = re.split(f'({self.special_pattern})', without_surrogates(text))
        return [i for n, part in enumerate(parts)  # every second part is a special token
                for i in ([self.special[part]] if n % 2 else
                          self.encode_array(part.replace(MARK, '')).tolist())]

    def as_text(self, value):
        """A JSON value with a MARK inside each special token in its texts: encode then encodes these as
        ordinary text, unlike the special tokens that a chat template adds."""
        first = re.compile(f'(?={self.special_pattern})(.)', re.DOTALL)
        return json_value(value, lambda text: first.sub(rf'\1{MARK}', text))

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
            raise ValueError(f'tokenizer {self.name!r} has no chat template: give a plain prompt, or prepare '
                             'the data with another tokenizer, like --tokenizer=bpe:4096')
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

    def to_json(self):
        """A tokenizer.json, as text."""
        from zoo.tokenizer_json import to_json
        return to_json(self)

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


def json_value(value, change=str):
    """A JSON value with its texts changed by a function, and without the nulls with which parquet pads
    objects."""
    if isinstance(value, dict):
        return {change(key): json_value(one, change) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [json_value(one, change) for one in value]
    return change(value) if isinstance(value, str) else value


def without_surrogates(text):
    """Lone surrogates, which have no UTF-8, become U+FFFD, pairs of them one character."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and end of text."""
    def __init__(self):
        super().__init__('byte', {i: bytes([i]) for i in range(256)}, {EOT: 256})

    def encode_array(self, text):
        return np.frombuffer(text.encode(), np.uint8)

    def state(self):
        return {'kind': 'byte'}


class CharTokenizer(Tokenizer):
    """chars[id] is a character."""
    def __init__(self, chars, eot=None):
        self.chars = list(chars)
        self.ids = {char: i for i, char in enumerate(self.chars)}
        tokens = {i: char.encode() for i, char in enumerate(self.chars)}
        super().__init__('char', tokens, {} if eot is None else {EOT: eot})

    def encode_array(self, text):
        if lacking := {*text} - self.ids.keys():
            raise ValueError(f'the vocabulary of characters lacks {sorted(lacking)[:9]}: leave them out, or '
                             'prepare text that has them')
        return np.array([self.ids[char] for char in text], np.uint32)

    def state(self):
        return {'kind': 'char', 'chars': self.chars, 'eot': self.eot}


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


def rank_table(ranks):
    """{token: rank} -> `base64 rank` lines, by rank."""
    return ''.join(f'{base64.b64encode(token).decode()} {ranks[token]}\n'
                   for token in sorted(ranks, key=ranks.get))


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
TRAINING_WORDS = 50_000_000  # from the beginning, that bpe:N learns from: about 250 MB
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


def bpe_tokenizer(size, texts, procs=None):
    """Byte-level BPE with a vocabulary of `size`, or less if the texts have fewer merges: the 256 bytes, the
    merges in the order learned, BPE_SPECIAL. texts: iterables of blocks. Raises ValueError for an unusable
    size."""
    least = 256 + len(BPE_SPECIAL)
    if not size.isdecimal() or not least <= int(size) <= 1 << 20:
        raise ValueError(f"tokenizer='bpe:{size}' is not supported: choose a vocabulary of {least} (256 "
                         f'bytes, {len(BPE_SPECIAL)} special tokens) to {1 << 20:,} tokens, like bpe:4096')
    counts = count_words(texts, procs)
    tokens = train_bpe(counts, int(size) - least)
    print(f'bpe: learned {len(tokens) - 256:,} merges from {len(counts):,} different words')
    special = {text: len(tokens) + i for i, text in enumerate(BPE_SPECIAL)}
    return TiktokenTokenizer(f'bpe:{len(tokens) + len(special)}', WORD_PATTERN, special,
                             rank_table({token: i for i, token in enumerate(tokens)}), CHATML)


def count_words(texts, procs=None):
    """{word: how often it occurs} in texts, iterables of blocks, up to TRAINING_WORDS."""
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
    """{word: how often it occurs} in a text."""
    import regex  # tiktoken needs it too
    return collections.Counter(regex.findall(WORD_PATTERN, text))


def train_bpe(counts, n_merges):
    """{word: how often} -> the 256 bytes and the tokens that byte pair encoding (arXiv:1508.07909) adds.

    Up to n_merges times the commonest pair of neighbours within words becomes a token, from left to right; of
    equally common pairs that of the lowest ids. Ends early if no pair that fits into a token occurs twice.

    Once the younger of its tokens is made everywhere, a pair can only get rarer. So its places are found
    then, and counted again whenever its old number brings it to the top of the heap.
    """
    ids = [-1]     # where a token begins, its id; -1 on its other bytes, and between words
    weight = [0]  # of each byte: how often its word occurs
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        ids += [*word.encode()[:WORDS_BYTES], -1]
        weight += [counts[word]] * (len(ids) - len(weight))
        if len(ids) > WORDS_BYTES:
            break
    ids = np.array(ids, np.int32)
    weight = np.array(weight)
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


# tokenizers by name, and as they are stored -----------------------------------------------------------------

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'tiktoken': TiktokenTokenizer}  # and json, in zoo/


def make_tokenizer(name, texts=(), by_document=False, training=(), procs=None):
    """A tokenizer for new data, from texts, iterables of blocks, or one that exists already. training: the
    texts that bpe:N learns from. by_document: whether char needs an end-of-text token."""
    if name == 'byte':
        return ByteTokenizer()
    if name == 'char':
        chars = sorted({char for blocks in texts for block in blocks for char in {*block}})
        return CharTokenizer(chars, len(chars) if by_document else None)
    if name.startswith('bpe:'):
        return bpe_tokenizer(name.removeprefix('bpe:'), training, procs)
    if os.path.exists(name):
        from zoo.tokenizer_json import json_tokenizer
        return json_tokenizer(name)
    return tiktoken_tokenizer(name)


def tiktoken_tokenizer(name):
    """The tiktoken encoding of this name. tiktoken downloads its table once."""
    import requests
    import tiktoken
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise ValueError(f"tokenizer={name!r} is not supported: choose byte, char, bpe:4096, "
                         f'{", ".join(names)}, or a folder that is prepared or has a tokenizer.json')
    try:
        bpe = tiktoken.get_encoding(name)
    except requests.RequestException as e:
        raise OSError(f'tokenizer={name!r} cannot be downloaded ({e}): go online once, set '
                      'TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer=byte') from e
    return TiktokenTokenizer(name, bpe._pat_str, dict(bpe._special_tokens), rank_table(bpe._mergeable_ranks))


def tokenizer_from_state(state):
    """The tokenizer whose state() this is, without files or network."""
    state = dict(state)
    kind = state.pop('kind')
    if kind == 'json':
        from zoo.tokenizer_json import JsonTokenizer
        return JsonTokenizer(**state)
    return KINDS[kind](**state)
