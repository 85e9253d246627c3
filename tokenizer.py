"""Text to token ids and back: bytes, characters, tiktoken's encodings, tokenizer.json, byte-pair encoding
trained here, and chat templates."""
import base64
import collections
import concurrent.futures
import contextlib
import datetime
import functools
import heapq
import itertools
import json
import os
import re
import signal
import sys
import time

import numpy as np

from configurator import print0

EOT = '<|endoftext|>'         # the text of every tokenizer's end-of-text token
SPLITS = ('train', 'val')
CHUNK = 1 << 20               # characters that are encoded at a time


def code_points(text):
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), '<u4')


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


# many processes ---------------------------------------------------------------------------------------------

def gather(items):
    """(item, its characters), ... -> [item, ...], whenever there are CHUNK characters: one process's work."""
    group, size = [], 0
    for item, n in items:
        group.append(item)
        size += n
        if size >= CHUNK:
            yield group
            group, size = [], 0
    if group:
        yield group


def in_processes(procs, work, jobs, least=16):
    """work(job) of every job, in order, in `procs` processes (None: one for each core), which hold two jobs
    each; in this one, if there are fewer than `least` jobs, done sooner than others start. OSError: one died.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    procs = min(procs or cores, 61)  # Windows allows no more
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, least)) if procs > 1 else []
    jobs = itertools.chain(first, jobs)
    if procs == 1 or len(first) < least:
        yield from map(work, jobs)
        return
    pool = concurrent.futures.ProcessPoolExecutor(procs, initializer=start_worker, initargs=(work,))
    waiting = collections.deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(work_in_worker, job))
            if len(waiting) >= 2 * procs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except concurrent.futures.process.BrokenProcessPool as e:
        raise OSError(f'one of {procs} processes died, probably for lack of memory: try --procs=1') from e
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(work):
    global work_of_worker
    work_of_worker = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def work_in_worker(job):
    return work_of_worker(job)


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
    tok = tokenizers.Tokenizer.from_str(source)
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
    messages = [{key: value for key, value in one.items() if value is not None} for one in messages]
    compiled = compile_template(template)
    try:
        return compiled.render(messages=messages, tools=tools, documents=None,
                               add_generation_prompt=add_generation_prompt, **variables)
    except Exception as e:  # a template can fail in any way that an expression can
        raise ValueError(f'the chat template fails: {type(e).__name__}: {e}') from e


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
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters['tojson'] = lambda value, **form: json.dumps(value, **{'ensure_ascii': False, **form})
    env.globals |= {'raise_exception': raise_exception,
                    'strftime_now': lambda form: datetime.datetime.now().strftime(form)}
    return env.from_string(template)


# training a tokenizer ---------------------------------------------------------------------------------------

# How GPT-4 cuts text to words, which no token crosses: cl100k_base's pattern as it was first published, which
# tiktoken, regex and tokenizers read alike
WORD_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
BPE_SPECIAL = (EOT, '<|im_start|>', '<|im_end|>', *(f'<|reserved_{i}|>' for i in range(5)))
SAMPLE = 64                 # groups of CHUNK characters; of those that follow, every tenth counts tenfold
WORDS_BYTES = 1 << 24       # and of more different words, the commonest: what train_bpe holds in memory
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
          "'<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def bpe_tokenizer(size, training, procs, pattern, **_):
    """Byte-level BPE with a vocabulary of `size`, learnt from the texts for training.

    Ids: the 256 bytes, then the merges in the order learnt, then BPE_SPECIAL. A text with fewer merges in it
    gives a smaller vocabulary. ValueError: size or pattern are of no use.
    """
    least = 256 + len(BPE_SPECIAL)
    if not re.fullmatch('[0-9]{1,7}', size) or not least <= int(size) <= 1 << 20:
        raise ValueError(f"tokenizer='bpe:{size}': a vocabulary has {least} (256 bytes, {len(BPE_SPECIAL)} "
                         f'special tokens) to {1 << 20:,} tokens: choose a size like bpe:4096')
    n_merges = int(size) - least
    words = WordSplitter(pattern or WORD_PATTERN)
    counts, n_read = count_words(words, training, procs)
    learnt = train_bpe(counts, n_merges)
    fewer = f' ({n_merges:,} were wanted, but no other pair occurs twice)' if len(learnt) < n_merges else ''
    print0(f'bpe: learnt {len(learnt):,} merges{fewer} from {n_read / 1e6:,.2f} MB, with '
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
        self.pattern, self.words = pattern, regex.compile(pattern).findall

    def may_cut(self, text, n):
        left, right = text[max(0, n - AROUND):n], text[n:n + AROUND]
        return self.words(left) + self.words(right) == self.words(left + right)

    def count(self, group):
        """The words of [text, ...] -> (Counter, bytes). ValueError: some text is in no word."""
        counts, n_bytes = collections.Counter(), 0
        for text in group:
            words = self.words(text)
            if ''.join(words) != text or '' in words:
                raise ValueError(f'pattern={self.pattern!r} leaves out some text, or matches where there is '
                                 'none: every character must belong to one word')
            counts.update(words)
            n_bytes += len(text.encode())
        return counts, n_bytes


def count_words(splitter, texts, procs=None):
    """(Counter of the words in texts, the bytes counted). texts: an iterable of iterables of blocks of text.
    Of more than SAMPLE groups every tenth is counted, and stands for ten."""
    groups = gather((piece, len(piece)) for blocks in texts for piece, _ in pieces(blocks, splitter))
    sample = (group for n, group in enumerate(groups) if n < SAMPLE or n % 10 == 0)
    counts, progress = collections.Counter(), Progress('counting words')
    for n, (counted, n_bytes) in enumerate(in_processes(procs, splitter.count, sample, least=4)):
        for word, number in counted.items():
            counts[word] += number * (1 if n < SAMPLE else 10)
        progress.add(n_bytes)
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


def char_tokenizer(texts, by_document, **_):
    used = np.zeros(sys.maxunicode + 1, bool)
    for blocks in texts:
        for block in blocks:
            used[code_points(block)] = True
    chars = list(map(chr, np.flatnonzero(used)))
    return CharTokenizer(chars, len(chars) if by_document else None)


MAKERS = {'byte': byte_tokenizer, 'char': char_tokenizer, 'bpe:N': bpe_tokenizer}  # others: files, tiktoken's


def make_tokenizer(name, texts=(), by_document=False, training=None, procs=None, pattern=None):
    """A tokenizer for new data: by MAKERS, or one that there is already.

    Makers are called with all of this by keyword, and take what they use: texts, an iterable of texts, each
    an iterable of blocks, and training, those of them that are trained on, which are read only where they are
    used; by_document, whether an end-of-text token is needed; procs and pattern, as set; size, what stands
    for N in a name like bpe:N.
    """
    kind, colon, size = name.partition(':')
    maker = MAKERS.get(f'{kind}:N' if colon else name)
    if pattern is not None and maker is not bpe_tokenizer:
        raise ValueError(f'pattern={pattern!r} is for --tokenizer=bpe:4096: {name!r} has its own')
    if maker:
        return maker(size=size, texts=texts, training=training, by_document=by_document, procs=procs,
                     pattern=pattern)
    if os.path.isfile(name) or os.path.isfile(os.path.join(name, 'tokenizer.json')):
        return json_tokenizer(name)
    if re.search(r'[/\\]', name):
        raise FileNotFoundError(f'tokenizer={name!r}: no folder, prepared or with a tokenizer.json; '
                                f'`python hub.py {name}` fetches it from the hub')
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
        raise OSError(f'tokenizer={name!r} cannot be downloaded ({e}): go online once, set '
                      'TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer=byte') from e
    ranks = sorted(bpe._mergeable_ranks.items(), key=lambda item: item[1])
    ranks = ''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks)
    return TiktokenTokenizer(name, bpe._pat_str, dict(bpe._special_tokens), ranks)


def json_tokenizer(path):
    """The tokenizer of a tokenizer.json, or of a folder with one; tokenizer_config.json and
    chat_template.jinja beside it count."""
    folder, name = (path, 'tokenizer.json') if os.path.isdir(path) else os.path.split(path)
    config, beside = {}, {name: os.path.join(folder, name) for name in (
        name, 'tokenizer_config.json', 'chat_template.jinja')}
    if os.path.exists(beside['tokenizer_config.json']):
        found = json.loads(read_utf8(beside['tokenizer_config.json']))
        config = {key: found[key] for key in (*SPECIAL_TOKENS, 'chat_template') if found.get(key)}
    if os.path.exists(beside['chat_template.jinja']):
        config['chat_template'] = read_utf8(beside['chat_template.jinja'])
    return JsonTokenizer(read_utf8(beside[name]), config)


def read_utf8(path):
    """The text of a file, line ends as they are."""
    with open(path, encoding='utf-8', newline='') as f:
        return f.read()


def tokenizer_from_state(state):
    """The tokenizer whose state() this is, without files or network."""
    return KINDS[state['kind']](**{key: value for key, value in state.items() if key != 'kind'})


# progress ---------------------------------------------------------------------------------------------------

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
