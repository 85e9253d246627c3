"""
Generates text: weights -> text. Model and tokenizer come from the checkpoint alone.

    python sample.py                                        # from out/
    python sample.py --out_dir=out-x --start='def ' --num_samples=3 --max_new_tokens=200
    python sample.py --start=FILE:prompt.txt --temperature=0  # greedy; LINES:file: a prompt a line, -: stdin
    python sample.py --init_from=Qwen/Qwen3-0.6B --start=Once  # a published model: an id, or its folder
    python sample.py --init_from=path/to/best.pt --stop="['\\n\\n', 'def ']"
    python sample.py --out_dir=out-chat --chat              # a conversation; /help lists its commands
    python sample.py --out_dir=out-chat --chat --start=LINES:questions.txt  # each question alone
    python sample.py --start=LINES:prompts.txt --num_samples=1 --output=answers.jsonl  # run it again to go on
    python sample.py --start=FILE:article.txt --score       # log-probabilities of this text, token by token
    python sample.py --speculate=8                          # sooner where text repeats itself

Noise is a function of (seed, sample, position): sample 3 is the same text alone or among a hundred others.
"""
import codecs
import collections
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import sys
import time
import typing
import weakref

from configurator import can_compile, choose_device, configure, runtime

# model
init_from = 'resume'        # resume (from out_dir), a checkpoint or its folder, or a published model
out_dir = 'out'             # where train.py wrote; best.pt is read if it is there, else ckpt.pt
block_size: int | None = None  # another context than the model's; a larger one needs relative positions
rope_scaling: dict | None = None  # for a larger one: {'rope_type': 'linear', 'factor': 4.0}; README has all
# text
start = '\n'                # the prompt; FILE:name, LINES:name (one prompt a line), - (standard input)
num_samples = 3             # for each prompt; chat gives one answer
max_new_tokens = 500        # tokens in each sample
batch_size = 64             # samples made at once; where one has ended, the next takes its place
output = ''                 # JSON lines are written here, in order; what was interrupted goes on
score = False               # log-probabilities of the tokens of start, instead of a text that follows
stop: str | tuple | list = ()  # end a sample at this text, or any of these
# conversation
chat = False                # answer by the model's chat template: questions typed in, or those of start
system = ''                 # the message that a conversation begins with
thinking = 'show'           # show or hide what the template asks for; on, off: ask for it, or for none
# sampling
temperature = 0.8           # below 1 less random, above 1 more; 0: always the likeliest token
top_k: int | None = 200     # only the k likeliest tokens; 0 or None: all
top_p = 1.0                 # only the likeliest tokens that together have this probability
min_p = 0.0                 # only tokens at least this likely, relative to the likeliest
repetition_penalty = 1.0    # divides positive logits of tokens seen before, multiplies negative ones
seed = 1337                 # of sampling only
# speed; in float32 on a CPU the text does not depend on speculate, draft and compile
quantize = ''               # int8: large weights in 8 bits, a scale for each row; half the memory of bfloat16
speculate: int | None = None  # tokens guessed at a time, from where the text repeats itself, or by draft
draft = ''                  # a smaller model of the same tokenizer, as init_from, guesses; speculate None: 4
# system
device = 'auto'             # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'              # float32, bfloat16, float16; auto: what is fast here, compiled and in 8 bits
compile: bool | str = 'auto'  # torch.compile the step: one to two minutes; auto: from 4,000 steps on
config = configure(globals()).config

import numpy as np
import torch

from hub import load
from model import (
    GroupedLinear,
    Int8,
    Int8Experts,
    round_up,
)

# one token --------------------------------------------------------------------------------------------------

def uniforms(seed, sample, position, count):
    """Numbers in [0, 1) for `count` positions of one sample from `position` on: (count,) float64, 24 bits."""
    bits = np.random.PCG64((seed, sample)).advance(position)
    return np.floor(np.random.Generator(bits).random(count) * 2**24) / 2**24


def sample_token(logits, u, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """Draws a token for each row: logits (..., V), u (...) uniform in [0, 1) -> (...) int64, by inverting the
    distribution function in vocabulary order; -1 where logits hold NaN. temperature 0 is the argmax, whatever
    the rest says. Then, in this order: temperature, top_k (exactly k, ties or not), top_p (arXiv:1904.09751),
    min_p (arXiv:2407.01082)."""
    if temperature == 0:
        highest, token = logits.max(dim=-1)
        return token.where(~highest.isnan(), -1)
    logits, ids = logits.float() / temperature, None
    if top_k or top_p < 1:
        logits, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    probs = logits.softmax(dim=-1)
    if top_p < 1:  # a token stays if those before it have not reached top_p: one always does
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    if min_p:
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    if ids is not None:
        ids, order = ids.sort(dim=-1)
        probs = probs.gather(-1, order)
    cdf = probs.double().cumsum(dim=-1)
    token = (cdf <= u[..., None].double() * cdf[..., -1:]).sum(dim=-1)
    is_nan = cdf[..., -1].isnan()
    if ids is not None:
        token = ids.gather(-1, token[..., None].clamp(max=ids.shape[-1] - 1))[..., 0]
    return token.where(~is_nan, -1)


def penalise(logits, seen, penalty):
    """The repetition penalty of CTRL (arXiv:1909.05858): logits (..., V), seen (..., V) bool."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def drawing_device(device):
    """Where tokens are drawn: sampling on MPS has returned ids out of range, and CUDA has no deterministic
    cumsum."""
    elsewhere = device.type == 'mps' or torch.are_deterministic_algorithms_enabled()
    return torch.device('cpu') if elsewhere else device


class Sampling(typing.NamedTuple):
    """How tokens are drawn from logits; see sample_token and penalise."""
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def draw(self, logits, tokens, u, seen):
        """Draws what follows each of tokens (B, T): logits (B, T, V), u (B, T) -> (B, T). seen: (B, V) bool,
        what the penalty counts up to the first of them; None: no penalty."""
        if seen is not None:
            seen = seen[:, None]
            if logits.shape[1] > 1:  # the tokens that are fed come to it one by one
                fed = torch.zeros_like(logits, dtype=torch.bool).scatter(
                    2, tokens[..., None].to(logits.device), True)
                seen = seen | (fed.cumsum(dim=1, dtype=torch.uint8) > 0)
            logits = penalise(logits, seen, self.repetition_penalty)
        return sample_token(logits, u, *self[:4])


# many tokens ------------------------------------------------------------------------------------------------

def prefill(model, prompts, cache, width=None):
    """Feeds prompts, lists of token ids of any lengths, to a cache, `width` tokens of each at once; None:
    all. Returns the logits after the last token of each, (B, V)."""
    lengths, device, found = torch.tensor(list(map(len, prompts))), cache.length.device, None
    for start in range(0, int(lengths.max()), width or int(lengths.max())):
        pieces = [prompt[start:][:width] for prompt in prompts]
        own = torch.tensor(list(map(len, pieces)))
        padded = [piece + [0] * (int(own.max()) - len(piece)) for piece in pieces]
        logits = model(torch.tensor(padded, device=device), cache=cache, keep=1,
                       lengths=own.to(device) if own.min() < own.max() else None)[:, -1]
        ended = (lengths <= start).to(device)
        found = logits if start == 0 else torch.where(ended[:, None], found, logits)
    return found


def new_cache(model, batch_size, max_len, static, max_rewind=0):
    """An empty cache; static: for a compiled step."""
    cache = model.make_cache(batch_size, max_len, static=static, max_rewind=max_rewind)
    if static and cache.length.device.type not in FROZEN:
        # CUDA graphs replay on fixed addresses, and are left out for a step that changes anything else. No
        # guard: other tensors are recorded anew, where a guard would compile anew.
        for tensor in cache.tensors():
            torch._dynamo.mark_static_address(tensor, guard=False)
    return cache


def is_one_graph(model, device):
    """Whether a step can be compiled as a whole: with experts only if all of them are one matmul, for which
    torch has a kernel on the data center GPUs of Hopper and Blackwell. Elsewhere each expert waits for the
    number of its tokens."""
    experts = [module for module in model.modules() if isinstance(module, (GroupedLinear, Int8Experts))]
    native = device.type != 'cuda' or torch.cuda.get_device_capability(device)[0] in (9, 10)
    return all(native and module.has_kernel(model.compute_dtype(), device.type) for module in experts)


def resolve_compile(compile, device, steps):
    """compile='auto' -> bool: with fewer steps than EARNS_COMPILING[device] compiling takes longer than it
    saves."""
    if compile != 'auto':
        return compile
    return steps >= EARNS_COMPILING.get(device.partition(':')[0], math.inf) and can_compile(device)


EARNS_COMPILING = {'cpu': 4000, 'cuda': 10_000}  # steps; with more layers both sides grow alike


@dataclasses.dataclass
class Sample:
    """A text that is being made, in a row of the cache."""
    number: int         # among all samples; it keys the noise
    context: list       # token ids that it attends to, so far as they have been read
    noise: np.ndarray   # float32 in [0, 1): what each token is drawn by, and more, for guesses
    most: int           # tokens to be drawn
    held: int = 0       # tokens of the context that the cache holds
    made: int = 0       # tokens drawn
    read: int = 0       # tokens of these that have been read
    ended: bool = False  # by a stop token, or since the caller has enough

    def is_done(self):
        return self.ended or self.made >= self.most

    def next_noise(self, n):
        """What the next n tokens are drawn by, (n,)."""
        start = min(self.made, self.most)  # compiled, a row goes on after its end
        return self.noise[start:start + n]


def step(model, tokens, cache, u, seen, sampling):
    """Feeds tokens (B, T) to the cache and draws what follows each of them, (B, T)."""
    return sampling.draw(model(tokens, cache=cache).to(u.device), tokens, u, seen)


def compile_step(model, device):
    """`step`, compiled for a static cache: on CUDA as a CUDA graph; on a CPU with the weights as constants
    ("freezing"), which torch lays out once more in memory, as its kernels read them, and with the kernels
    that are fastest here. What is made for one token is kept on disk for the next run.

    Weights that were changed are compiled anew, unless through `.data`, of which nobody hears; what was
    compiled for the earlier ones stays in memory."""
    torch._dynamo.config.recompile_limit = 64  # after which torch runs eagerly and says nothing; it has 8
    whole, weights = is_one_graph(model, device), [*model.parameters(), *model.buffers()]
    frozen = whole and device.type in FROZEN
    version = hash((NUMBERS.setdefault(model, next(COUNT)), repr(model.config), model.training,
                    *((w.data_ptr(), w._version if frozen else 0) for w in weights)))
    # torch would look at each module and weight before each step, for longer than a layer takes
    # fullgraph: of a graph in pieces each piece could be reused with the weights of an earlier model
    compiled = functools.partial(torch.compile(versioned_step, dynamic=False, fullgraph=whole, options={
        'guard_filter_fn': lambda guards: ["L['args'][0]" not in guard.name for guard in guards],
        'triton.cudagraphs': whole and device.type == 'cuda',
        # so that for one row the cast of eight bits becomes a part of the product
        'coordinate_descent_tuning': any(isinstance(m, Int8) for m in model.modules())}), version)
    if not frozen:
        return compiled
    from torch._inductor import config as inductor  # which takes a second
    size, shapes = sum(w.nbytes for w in weights), set()

    def run(model, tokens, *args):
        if tokens.shape in shapes:
            return compiled(model, tokens, *args)
        shapes.add(tokens.shape)
        # oneDNN's kernels are faster for several tokens, not for one, and nothing of theirs can be kept
        kept = tokens.numel() == 1 and size <= KEPT_BYTES
        with (contextlib.redirect_stderr(io.StringIO()),  # else torch prints what it tried
              inductor.patch({**FREEZING, 'fx_graph_cache': kept}),
              torch.compiler.config.patch(cache_key_tag=fingerprint(model) if kept else ''),
              torch.backends.mkldnn.flags(enabled=tokens.numel() > 1)):
            return compiled(model, tokens, *args)
    return run


def versioned_step(version, *args):
    """step; the version stands for what is not looked at of the model, args[0]."""
    assert abs(version) >= 0  # torch.compile looks at arguments that are used
    return step(*args)


def fingerprint(model):
    """A text that tells a model with these weights from others; torch's cache does not (seen in 2.13)."""
    digest = hashlib.sha256(repr(model.config).encode())
    for w in [*model.parameters(), *model.buffers()]:
        digest.update(w.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def compiling_seconds():
    """How long this process has compiled so far."""
    return torch._dynamo.utils.calculate_time_spent()['total_wall_time']


NUMBERS, COUNT = weakref.WeakKeyDictionary(), itertools.count()  # of models: addresses are used again
FROZEN = ('cpu',)  # types of devices on which a compiled step holds the weights
FREEZING = {'freezing': True, 'max_autotune': True, 'max_autotune_gemm_backends': 'CPP,ATEN'}  # torch's names
KEPT_BYTES = 2**30  # of weights; a compiled step of more is not kept on disk, where it would hold them all
LAG = 4  # steps that a GPU may be ahead of what is read of it
PREFILL = 8192  # tokens, padding among them, that are fed at once; a longer prompt is fed alone


class Batch:
    """Samples that are made at once: `rows`, each in its row of a cache. See generate for the arguments.

    A token that is drawn is fed again unread. On a GPU it is read some steps later, which spares it the wait
    for the host; what a sample draws after its stop token is dropped."""

    def __init__(self, model, prompts, first, count, max_new_tokens, sampling, seed, stop_tokens, compile,
                 cache, guesses):
        self.model, self.prompts, self.waiting = model, prompts, iter(range(first, len(prompts)))
        self.max_new_tokens, self.stop_tokens = max_new_tokens, stop_tokens
        self.sampling, self.seed, self.guesses = sampling, seed, guesses
        self.own, self.compile, self.step, device = cache is None, compile, step, model.wte.weight.device
        if cache is None:
            size = max(map(len, prompts)) + max_new_tokens + guesses
            size = round_up(size) if compile else size  # so that what is compiled serves others too
            size = min(model.config.block_size, size)
            cache = new_cache(model, count, size, static=compile, max_rewind=guesses)
        self.cache, self.size = cache, cache.max_len
        if compile:
            self.step = compile_step(model, device)
        self.drawn_on = drawing_device(device)
        self.token = torch.zeros(count, dtype=torch.long, device=device)  # the last one of each row
        self.seen = None  # tokens that the penalty is for
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(count, model.config.vocab_size, dtype=torch.bool, device=self.drawn_on)
        self.rows, self.unread = [None] * count, collections.deque()
        for i in range(count):
            self.place(i, next(self.waiting))
        if any(len(prompts[row.number]) > self.size for row in self.rows):  # it begins elsewhere
            cache.reset()
        for row, held in zip(self.rows, cache.length.tolist()):
            row.held = held
        self.fresh = list(range(count))  # rows that are to be fed more than the token drawn last

    def place(self, i, number):
        """Puts a sample into row i."""
        prompt = list(self.prompts[number])
        noise = uniforms(self.seed, number, len(prompt), self.max_new_tokens + self.guesses + 1)
        self.rows[i] = Sample(number, prompt[-self.size:], noise.astype(np.float32),  # 24 bits fit
                              self.max_new_tokens)
        if self.seen is not None:
            self.seen[i] = False
            self.seen[i, prompt] = True

    def noise(self, rows, n=1):
        """What the next n tokens of these rows are drawn by, (rows, n)."""
        u = np.stack([row.next_noise(n) for row in rows])
        return torch.from_numpy(u).to(self.drawn_on, non_blocking=True)

    def feed(self):
        """Feeds the fresh rows what the cache does not hold of their contexts, so many at once that padding
        remains small, and draws a token for each."""
        by_length = sorted(self.fresh, key=lambda i: self.rows[i].held - len(self.rows[i].context))
        direct = len(self.fresh) == len(self.rows) and (any(row.held for row in self.rows) or not self.compile
                                                        and self.padded(by_length) <= PREFILL)
        while by_length:
            count = len(by_length)
            while not direct and count > 1 and self.padded(by_length[:count]) > PREFILL:
                count = (count + 1) // 2
            numbers, by_length = sorted(by_length[:count]), by_length[count:]
            rows, cache = [self.rows[i] for i in numbers], self.cache
            if not direct:  # the cache holds nothing of them
                cache = new_cache(self.model, count, self.size, static=False, max_rewind=cache.max_rewind)
            logits = prefill(self.model, [row.context[row.held:] for row in rows], cache)
            if not direct:
                self.cache.put(numbers, cache)
            for row in rows:
                row.held = len(row.context)
            seen = None if self.seen is None else self.seen[numbers]
            drawn = self.sampling.draw(logits[:, None].to(self.drawn_on), None, self.noise(rows), seen)
            self.take(numbers, drawn[:, 0])

    def padded(self, numbers):
        """Tokens to be fed to these rows at once, of which the first has most."""
        row = self.rows[numbers[0]]
        return len(numbers) * (len(row.context) - row.held)

    def advance(self):
        """Draws a token for each row."""
        # a copy, for a CUDA graph writes over what it returned last
        tokens = self.token[:, None].clamp(min=0)
        drawn = self.step(self.model, tokens, self.cache, self.noise(self.rows), self.seen, self.sampling)
        for row in self.rows:
            row.held += 1
        self.take(slice(None), drawn[:, 0])

    def take(self, numbers, drawn):
        """Takes one token for each of some rows, drawn (rows,): to be fed, to be seen, to be read."""
        self.token[numbers] = drawn.to(self.token.device)
        if self.seen is not None:
            row = torch.arange(len(self.rows), device=drawn.device)[numbers]
            self.seen[row, drawn.clamp(min=0)] = True
        rows = [self.rows[i] for i in numbers] if isinstance(numbers, list) else list(self.rows)
        on_host, copied = drawn.to('cpu', non_blocking=True), None
        if drawn.device.type == 'cuda':
            copied = torch.cuda.current_stream(drawn.device).record_event()
        for row in rows:
            row.made += 1
        self.unread.append((rows, on_host[:, None], copied))

    def advance_by(self, proposals):
        """Feeds each row its last token and what is proposed to follow it, and takes of what is drawn after
        each all that agrees with the proposals, and one token more: the tokens that advance would draw.
        Returns how many proposals were right."""
        longest = self.guesses if self.compile else max(map(len, proposals))
        padded = torch.tensor([proposal + [0] * (longest - len(proposal)) for proposal in proposals])
        tokens = torch.cat((self.token[:, None], padded.to(self.token.device)), dim=1)
        u = self.noise(self.rows, longest + 1)
        drawn = self.step(self.model, tokens, self.cache, u, self.seen, self.sampling).tolist()
        drawn = [new[:alike(new, proposal) + 1] for new, proposal in zip(drawn, proposals)]
        self.cache.rewind(torch.tensor([longest + 1 - len(new) for new in drawn], device=self.token.device))
        for i, (row, new) in enumerate(zip(self.rows, drawn)):
            row.held, row.made = row.held + len(new), row.made + len(new)
            if self.seen is not None:
                self.seen[i, [max(0, token) for token in new]] = True
        self.token.copy_(torch.tensor([max(0, new[-1]) for new in drawn]))
        self.unread.append((list(self.rows), drawn, None))
        return sum(map(len, drawn)) - len(drawn)

    def has_room(self):
        """Whether each row can be fed its last token and all guesses."""
        return all(row.held + 1 + self.guesses <= self.size for row in self.rows)

    def is_full(self):
        return any(row.held >= self.size for row in self.rows)

    def read(self, lag, enough):
        """Yields (sample, token), (sample, None) at its end, of all steps but the last `lag`."""
        while len(self.unread) > lag:
            rows, drawn, copied = self.unread.popleft()
            if copied:
                copied.synchronize()
            for row, tokens in zip(rows, drawn if isinstance(drawn, list) else drawn.tolist()):
                for token in tokens:
                    if row.ended or row.read == row.most:
                        break
                    if token < 0:
                        raise ValueError(
                            f"the logits of token {row.read + 1} of sample {row.number} are NaN: the weights "
                            "are damaged, or too large for float16: --dtype=float32")
                    row.ended = token in self.stop_tokens or row.number in enough
                    if not row.ended:
                        row.context.append(token)
                        row.read += 1
                        yield row.number, token
                        row.ended = row.number in enough
                    if row.ended or row.read == row.most:
                        yield row.number, None

    def refill(self):
        """Gives rows of samples that are done to the next ones, or drops them; where a context is full, its
        last half goes on, for which all that was drawn must have been read."""
        for i, row in enumerate(self.rows):
            number = next(self.waiting, None) if row.is_done() else None
            if number is not None:
                self.place(i, number)
            elif row.held >= self.size:
                row.context, row.held = row.context[-max(1, self.size // 2):], 0
        going = [i for i, row in enumerate(self.rows) if not row.is_done()]
        if not going:
            self.rows = []
        elif len(going) < len(self.rows) and self.own and not self.compile:
            self.cache.select(going)
            self.rows, self.token = [self.rows[i] for i in going], self.token[going]
            self.seen = None if self.seen is None else self.seen[going]
        self.fresh = [i for i, row in enumerate(self.rows) if row.held == 0]
        if self.rows and len(self.fresh) == len(self.rows):
            self.cache.reset()


def alike(a, b):
    """How many elements two lists have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def check_rewinds(model, what):
    """Raises ValueError if a layer of the model cannot take tokens back."""
    for block in model.h:
        if block.attn.states:
            raise ValueError(f"speculation takes tokens back, but layer {block.attn.layer} of the {what}, a "
                             f"{type(block.attn).__name__}, keeps a state that cannot: leave out --speculate "
                             "and --draft")


class Lookup:
    """Proposes what followed a text's last tokens where these stood before: at the latest such place, of the
    longest such run, of 3 tokens to 1 (prompt lookup, arXiv:2304.04487). What comes to the text's end so goes
    on from that place again.

    Of `count` tokens at most at a time `fed` were proposed in all, and `kept` of these were right."""

    def __init__(self, count):
        self.count, self.fed, self.kept = count, 0, 0
        self.known = {}  # sample -> its context, run of tokens -> where it last ended, tokens looked at

    def propose(self, rows, size, sampling):
        """rows: Samples, size: most tokens of a context -> a list of tokens for each."""
        numbers = {row.number for row in rows}
        self.known = {number: known for number, known in self.known.items() if number in numbers}
        return [[] if row.is_done() else self.look_up(row) for row in rows]

    def look_up(self, row):
        context, ends, looked_at = self.known.get(row.number, (None, {}, 0))
        if context is not row.context:  # it is new, or goes on from its last half
            context, ends, looked_at = row.context, {}, 0
        for end in range(looked_at + 1, len(context)):
            for n in range(1, min(3, end) + 1):
                ends[tuple(context[end - n:end])] = end
        self.known[row.number] = context, ends, max(0, len(context) - 1)
        for n in range(min(3, len(context)), 0, -1):
            end = ends.get(tuple(context[-n:]))
            if end is not None:
                return [context[end + i % (len(context) - end)] for i in range(self.count)]
        return []


class Draft:
    """Proposes the `count` tokens that a smaller model of the same vocabulary draws with the same noise; fed
    and kept as in Lookup."""

    def __init__(self, model, count, vocab_size=None):
        """vocab_size: of the model that it guesses for, None: the same; what differs are ids of no token."""
        check_rewinds(model, 'draft')
        self.model, self.count, self.fed, self.kept = model, count, 0, 0
        self.most = min(model.config.vocab_size, vocab_size or model.config.vocab_size) - 1
        self.cache, self.numbers, self.held = None, [], []  # of each of its rows the sample and tokens

    def propose(self, rows, size, sampling):
        """rows: Samples, size: most tokens of a context -> a list of tokens for each."""
        held = self.held_of(rows, size)
        self.numbers = []  # what is interrupted begins anew
        same = [min(alike(old, row.context), len(row.context) - 1) for old, row in zip(held, rows)]
        # of another sample, or one that goes on from half its context, nothing is kept: windows forget
        same = [n if len(old) - n <= self.count else 0 for old, n in zip(held, same)]
        device = self.cache.length.device
        self.cache.rewind(torch.tensor([len(old) - n for old, n in zip(held, same)], device=device))
        u = torch.from_numpy(np.stack([row.next_noise(self.count) for row in rows]))
        u = u.to(drawing_device(device))
        new = [[min(token, self.most) for token in row.context[n:]] for row, n in zip(rows, same)]
        logits, drawn = prefill(self.model, new, self.cache, max(1, PREFILL // len(rows))), []
        for i in range(self.count):
            if drawn:
                logits = self.model(drawn[-1].to(device), cache=self.cache)[:, -1]
            drawn.append(sampling.draw(logits[:, None].to(u.device), None, u[:, i:i + 1], None)
                         .clamp(0, self.most))
        tokens = torch.cat(drawn, dim=1).tolist()
        self.held = [row.context + new[:-1] for row, new in zip(rows, tokens)]
        self.numbers = [row.number for row in rows]
        return [[] if row.is_done() else new for row, new in zip(rows, tokens)]

    def held_of(self, rows, size):
        """The tokens that the cache holds of these rows, having been made, or put into their order."""
        numbers, size = [row.number for row in rows], min(self.model.config.block_size, size + self.count)
        if len(self.numbers) < len(rows) or self.cache.max_len < size:
            self.cache = new_cache(self.model, len(rows), size, static=False, max_rewind=self.count)
            return [[] for _ in rows]
        if numbers == self.numbers:
            return self.held
        others = iter([i for i, number in enumerate(self.numbers) if number not in numbers])
        order = [self.numbers.index(number) if number in self.numbers else next(others) for number in numbers]
        self.cache.select(order)
        return [self.held[i] for i in order]


def check_prompts(prompts, vocab_size):
    """Raises ValueError for one that is empty, or has an id that is not in the vocabulary."""
    for prompt in prompts:
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError("a prompt needs at least one token, all of them below "
                             f"vocab_size={vocab_size}; got {list(prompt[:8])}")


@torch.no_grad()
def generate(model, prompts, max_new_tokens, temperature=0.8, top_k=None, top_p=1.0, min_p=0.0,
             repetition_penalty=1.0, seed=1337, stop_tokens=(), compile=False, cache=None, batch_size=None,
             proposer=None, enough=(), first=0):
    """Yields (sample, token) for each token drawn, and (sample, None) once a sample has ended.

    prompts: lists of token ids, of any lengths; a sample's number is its place among them, and keys its
    noise. first: the samples before it are left out. A sample ends before any of stop_tokens, after
    max_new_tokens, or when its number is in `enough`, a set to which the caller may add meanwhile. A prompt
    longer than block_size is cropped to its end; a sample whose context is full continues from the last half
    of it. compile: one compiled step over a static cache. cache: one that holds the first tokens of each
    prompt already, so that only the others are fed; its max_len is then the context. Until that is full, it
    is left with all tokens but the last one drawn, and with guesses that were right. batch_size: how many
    samples are made at once, None: all; the next takes the place of one that has ended. proposer: a Lookup or
    Draft. What it proposes is fed at once, and kept as far as it is what would have been drawn, so that the
    text is the same without (speculative decoding, arXiv:2211.17192, with noise in common). The model should
    be in eval mode. Raises ValueError for an empty prompt, an id not in the vocabulary, logits that are NaN,
    and for a proposer with layers that cannot take tokens back."""
    check_prompts(prompts, model.config.vocab_size)
    if len(prompts) <= first or max_new_tokens < 1:
        return
    if compile not in (True, False):
        raise ValueError(f"compile={compile!r} must be True or False: resolve_compile turns auto into that")
    if proposer:
        check_rewinds(model, 'model')
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    count, guesses = len(prompts) - first, proposer.count if proposer else 0
    batch = Batch(model, prompts, first, min(batch_size or count, count), max_new_tokens, sampling, seed,
                  stop_tokens, compile, cache, guesses)
    on_gpu = model.wte.weight.device.type == 'cuda'
    lag = LAG if on_gpu and proposer is None and cache is None else 0  # a cache of the caller is not ahead
    while batch.rows:
        proposals = []
        if proposer and not batch.fresh and batch.has_room():
            proposals = proposer.propose(batch.rows, batch.size, sampling)
        if batch.fresh:
            batch.feed()
        elif any(proposals):
            proposer.fed += sum(map(len, proposals))
            proposer.kept += batch.advance_by(proposals)
        else:
            batch.advance()
        yield from batch.read(0 if batch.is_full() else lag, enough)
        batch.refill()
    yield from batch.read(0, enough)


class TextStream:
    """Tokens -> text as it becomes certain: whole characters only, and nothing that may begin a stop text."""

    def __init__(self, tokenizer, stop=()):
        self.tokenizer, self.stop = tokenizer, tuple(filter(None, stop))
        self.held, self.ended = '', False
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')

    def feed(self, token):
        """The text that this token makes certain. `ended`: a stop text has come; it is not part of it."""
        return self._release(self.decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self):
        """What was still held back."""
        text = self._release(self.decoder.decode(b'', final=True)) + self.held
        self.held = ''
        return text

    def _release(self, text):
        if self.ended:
            return ''
        self.held += text
        found = [self.held.find(s) for s in self.stop if s in self.held]
        if found:
            text, self.held, self.ended = self.held[:min(found)], '', True
            return text
        hold = max((n for s in self.stop for n in range(len(s)) if self.held.endswith(s[:n])), default=0)
        text, self.held = self.held[:len(self.held) - hold], self.held[len(self.held) - hold:]
        return text


def completions(model, tokenizer, prompts, max_new_tokens, stop=(), on_text=None, **sampling):
    """Continues prompts, token ids each; sampling as in generate. Yields (row, text, number of tokens) as the
    texts end: before one of the tokenizer's stop_tokens or a stop text, or after max_new_tokens.
    on_text(row, text) is called with each piece as soon as it is certain."""
    streams, texts, counts, enough = {}, {}, {}, set()

    def add(row, text):
        texts[row] += text
        if on_text and text:
            on_text(row, text)

    for row, token in generate(model, prompts, max_new_tokens, stop_tokens=tokenizer.stop_tokens,
                               enough=enough, **sampling):
        if row not in streams:
            streams[row], texts[row], counts[row] = TextStream(tokenizer, stop), '', 0
        if token is None:
            add(row, streams.pop(row).finish())
            yield row, texts.pop(row), counts.pop(row)
            continue
        counts[row] += 1
        add(row, streams[row].feed(token))
        if streams[row].ended:
            enough.add(row)


@torch.no_grad()
def score_tokens(model, ids, piece=256):
    """The log-probability of each token but the first, after those before it: ids -> (len(ids) - 1,) float64.
    In a text longer than the context these are at least half a context, or all. Raises ValueError for an id
    that is not in the vocabulary, and logits that are NaN."""
    check_prompts([ids], model.config.vocab_size)
    size, found, start = model.config.block_size, [], 0
    while len(found) < len(ids) - 1:
        window, new = torch.tensor(ids[start:start + size + 1]), []
        cache = model.make_cache(1, min(size, len(window)))
        for tokens, targets in zip(window[:-1].split(piece), window[1:].split(piece)):  # logits are large
            logits = model(tokens[None].to(cache.length.device), cache=cache)[0].cpu().double()
            new += (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=-1)).tolist()
        found += new[len(found) - start:]
        start += (size + 1) // 2
    if np.isnan(found).any():
        raise ValueError(f"the logits after token {int(np.isnan(found).argmax()) + 1} are NaN: the weights "
                         "are damaged, or too large for float16: --dtype=float32")
    return np.array(found)


def in_order(results, following=0):
    """Yields results, tuples that begin with numbers from `following` on in any order, in that order."""
    early = {}
    for result in results:
        early[result[0]] = result
        while following in early:
            yield early.pop(following)
            following += 1


def complete(model, tokenizer, prompts, max_new_tokens, stop=(), on_text=None, **sampling):
    """What completions yields, all of it: (texts, tokens made)."""
    found = list(in_order(completions(model, tokenizer, prompts, max_new_tokens, stop, on_text, **sampling)))
    return [text for _, text, _ in found], sum(count for _, _, count in found)


# conversations ----------------------------------------------------------------------------------------------

COMMANDS = """/reset forgets the conversation; /set temperature 0.5 changes a setting, /set lists them
/exit or Ctrl-D leaves; Ctrl-C stops an answer; /help prints this"""
SAMPLING = (*Sampling._fields, 'seed')
CHAT_SETTINGS = (*SAMPLING, 'max_new_tokens', 'thinking')  # what /set takes


def chat_ids(model, tokenizer, messages, thinking):
    """messages -> (ids, up to where the answer begins; how the text of the answer begins: '<think>\\n' if the
    template ends with that, else ''). To a model that knows documents a conversation is one."""
    ids = list(tokenizer.chat(messages, thinking={'on': True, 'off': False}.get(thinking)))
    first = model.config.document_token
    if first is not None and ids[:1] != [first]:
        ids.insert(0, first)
    return ids, '<think>\n' if tokenizer.decode(ids[-10:]).rstrip().endswith('<think>') else ''


def without_thinking(answer, complete=True):
    """An answer without the thinking that it may begin with; if not complete, what is certain of it."""
    start = answer.lstrip()
    if start.startswith('<think>'):
        return start.partition('</think>')[2].lstrip()
    return '' if not complete and '<think>'.startswith(start) else answer


class Display:
    """Prints an answer as it comes, a function of each new piece."""

    def __init__(self, hide_thinking=False):
        self.hide_thinking, self.text, self.printed = hide_thinking, '', 0

    def __call__(self, text, complete=False):
        self.text += text
        visible = without_thinking(self.text, complete) if self.hide_thinking else self.text
        print(visible[self.printed:], end='\n' if complete else '', flush=True)
        self.printed = len(visible)


class Chat:
    """A conversation, `messages`, and a cache of what the model has seen of it: a turn costs its own tokens.

    settings: this file's, {name: value}; they may change between turns. `cached`: the ids that the cache
    holds; none while an answer is being made, so that it may be interrupted anywhere."""

    def __init__(self, model, tokenizer, settings, proposer=None):
        self.model, self.tokenizer, self.settings, self.proposer = model, tokenizer, settings, proposer
        self.cache, self.cached = None, []
        self.reset()

    def reset(self):
        """Forgets everything but the system message."""
        system = self.settings['system']
        self.messages = [{'role': 'system', 'content': system}] if system else []
        self.full = False  # whether turns had to be dropped

    def answer(self, question, on_text):
        """Answers a question; on_text(text) is told of each piece as soon as it is certain. Returns None, or
        in one line why the answer was cut. ValueError, and the question is forgotten, as in prompt."""
        s, block_size = self.settings, self.model.config.block_size
        messages, ids, begin = self.prompt(question)
        room = min(s['max_new_tokens'], block_size - len(ids))
        self.prepare_cache(ids, room)
        answer = {'role': 'assistant', 'content': ''}
        self.messages, self.cached = [*messages, answer], []

        def add(text):
            answer['content'] += text
            on_text(text)

        add(begin)
        stream, made = TextStream(self.tokenizer, stop_texts(s['stop'])), []
        for _, token in generate(self.model, [ids], room, stop_tokens=self.tokenizer.stop_tokens,
                                 cache=self.cache, compile=s['compile'], proposer=self.proposer,
                                 **{name: s[name] for name in SAMPLING}):
            if token is None:
                break
            made.append(token)
            add(stream.feed(token))
            if stream.ended:
                break
        add(stream.finish())
        held = int(self.cache.length)
        if held > len(ids) + len(made):  # guesses that were right, but come after the end
            self.cache.rewind(held - len(ids) - len(made))
        self.cached = (ids + made)[:held]
        if stream.ended or len(made) < room:
            return None
        if room < s['max_new_tokens']:
            return f"(cut: the context of {block_size} tokens is full)"
        return f"(cut at max_new_tokens={room}: /set max_new_tokens {2 * room} allows more)"

    def prompt(self, question):
        """Returns the messages that go on with a question, and what chat_ids gives for them: (messages, ids,
        begin). The oldest turns are dropped until there is room for an answer: max_new_tokens, at most half
        the context. Raises ValueError if the question alone is too long, or the template refuses it."""
        size, thinking = self.model.config.block_size, self.settings['thinking']
        messages = [*self.messages, {'role': 'user', 'content': question}]
        room, first = min(self.settings['max_new_tokens'], size // 2), int(messages[0]['role'] == 'system')
        ids, begin = chat_ids(self.model, self.tokenizer, messages, thinking)
        while len(ids) + room > size and len(messages) > first + 1:
            if not self.full:
                print(f"(the context of {size} tokens is full: the oldest turns are forgotten)")
            self.full = True
            messages = messages[:first] + messages[first + 2:]  # a question and its answer
            ids, begin = chat_ids(self.model, self.tokenizer, messages, thinking)
        if len(ids) >= size:
            raise ValueError(f"the question and its template take {len(ids)} tokens, the context has {size}: "
                             "ask a shorter one, or set a larger --block_size")
        return messages, ids, begin

    def prepare_cache(self, ids, room):
        """Leaves in the cache what it holds of the prompt ids; it has slots for them and room tokens more.
        Earlier answers may be other ids by now: a template leaves out their thinking, and tokens that were
        sampled need not be those of their text."""
        if self.cache is None or len(ids) + room > self.cache.max_len:
            max_len = min(self.model.config.block_size, max(4096, 2 * (len(ids) + room)))
            guesses = self.proposer.count if self.proposer else 0
            self.cache = new_cache(self.model, 1, max_len, static=self.settings['compile'],
                                   max_rewind=self.settings['max_new_tokens'] + guesses)
            self.cached = []
        same, most = 0, min(len(self.cached), len(ids) - 1)  # at least one is fed, for its logits
        while same < most and ids[same] == self.cached[same]:
            same += 1
        try:
            self.cache.rewind(len(self.cached) - same)
        except ValueError:  # a layer has a state, or a window that has left these tokens behind
            same = 0
        if same == 0:
            self.cache.reset()


def set_command(name, value, settings):
    """Changes a setting between turns; prints why not in one line, or without a name what they are."""
    if not name:
        print(', '.join(f"{name} = {settings[name]!r}" for name in CHAT_SETTINGS))
    elif name not in CHAT_SETTINGS or not value:
        print(f"/set NAME VALUE takes {', '.join(CHAT_SETTINGS)}")
    else:
        with contextlib.suppress(SystemExit):  # configure has printed why
            script = {**settings, '__file__': __file__, '__name__': ''}
            changed = configure(script, argv=[f"--{name}={value}"]).config
            check_settings(changed)
            settings.update(changed)


def converse(chat):
    """Answers what is typed in, until /exit or the end of standard input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can then be edited, and come back)
    print(COMMANDS)
    while True:
        try:
            line = input('> ').strip()
            command, _, rest = line.partition(' ')
            if command == '/exit':
                return
            elif command == '/reset':
                chat.reset()
                print('the conversation is forgotten')
            elif command == '/set':
                name, _, value = rest.strip().partition(' ')
                set_command(name, value.strip(), chat.settings)
            elif re.fullmatch('/[a-z]*', command):
                print(COMMANDS if command in ('/', '/help') else f"there is no command {command}\n{COMMANDS}")
            elif line:
                display = Display(chat.settings['thinking'] == 'hide')
                cut = chat.answer(line, display)
                display('', complete=True)
                if cut:
                    print(cut)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except ValueError as error:
            print(error)


# the story --------------------------------------------------------------------------------------------------

def check_settings(s):
    """Raises ValueError for the first setting that is out of range. s: this file's settings, a dict."""
    for name, fine, wanted in [
            ('temperature', s['temperature'] >= 0, 'at least 0'),
            ('top_k', (s['top_k'] or 0) >= 0, 'at least 0, or None'),
            ('top_p', 0 < s['top_p'] <= 1, 'above 0 and at most 1'),
            ('min_p', 0 <= s['min_p'] <= 1, 'between 0 and 1'),
            ('repetition_penalty', s['repetition_penalty'] > 0, 'above 0'),
            ('num_samples', 1 <= s['num_samples'] <= 10_000,
             'between 1 and 10,000; for more, use --start=LINES:FILE'),
            ('max_new_tokens', s['max_new_tokens'] >= 1, 'at least 1'),
            ('batch_size', s['batch_size'] >= 1, 'at least 1'),
            ('speculate', s['speculate'] is None or 0 <= s['speculate'] <= 64, 'between 0 and 64, or None'),
            ('speculate', s['speculate'] != 0 or not s['draft'], 'at least 1, or None, with a draft'),
            ('quantize', s['quantize'] in ('', 'int8'), "int8 or ''"),
            ('score', not (s['score'] and s['chat']), 'False in a chat'),
            ('score', not (s['score'] and (s['speculate'] or s['draft'])), 'False: guesses are of new text'),
            ('start', not s['score'] or s['start'] != '\n', 'the text to score'),
            ('output', not (s['output'] and s['chat'] and s['start'] == '\n'), "'' for typed questions"),
            ('seed', 0 <= s['seed'] < 2**63, 'at least 0 and below 2**63'),
            ('compile', s['compile'] in (True, False, 'auto'), 'True, False or auto'),
            ('thinking', s['thinking'] in ('show', 'hide', 'on', 'off'), 'show, hide, on or off'),
            ('stop', all(isinstance(text, str) for text in s['stop']), 'text, or a list of texts')]:
        if not fine:
            raise ValueError(f"{name}={s[name]!r} must be {wanted}")


def stop_texts(stop):
    """The setting `stop`, one text or several, as a tuple."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def right_guesses(proposer):
    """What to print of them; '' where nothing guesses."""
    return f"{proposer.kept:,} of {proposer.fed:,} guesses right" if proposer else ''


def make_proposer(s, model, tokenizer, machine):
    """What the settings speculate and draft name, None for neither. Raises ValueError for a model from which
    no token can be taken back, and for a draft that cannot guess for it."""
    if not (s['draft'] or s['speculate']):
        return None
    check_rewinds(model, 'model')
    if not s['draft']:
        return Lookup(s['speculate'])
    draft, other, _ = load(s['draft'], s['out_dir'], machine.device, machine.dtype)
    if other is None or other.tokens != tokenizer.tokens:
        raise ValueError(f"draft={s['draft']!r} has another tokenizer: name a smaller model of the same "
                         "family, or leave it out")
    if draft.config.block_size < model.config.block_size:
        raise ValueError(f"draft={s['draft']!r} has a context of {draft.config.block_size:,}, the model has "
                         f"{model.config.block_size:,}: give --block_size={draft.config.block_size}")
    return Draft(draft.eval(), s['speculate'] or 4, model.config.vocab_size)


SHAPES_TEXT = (*SAMPLING, 'max_new_tokens', 'stop', 'chat', 'system', 'thinking', 'block_size',
               'rope_scaling', 'quantize')  # settings on which answers depend, besides the model


def answers_in(path, rows, settings):
    """How many of the rows, (prompt, which of its samples), have a line in the file at path, where answers
    with these settings (a short hash) stand; a line that was cut short is removed. Raises ValueError if the
    file holds anything else, which stays as it is."""
    if not os.path.exists(path):
        return 0
    with open(path, 'rb') as f:
        content = f.read()
    *lines, rest = content.split(b'\n')
    for i, line in enumerate(lines):
        try:
            record = json.loads(line)
            found = (record['prompt'], record['sample']), record['settings']
        except (ValueError, KeyError, TypeError):
            found = None, None
        if i >= len(rows) or found != (rows[i], settings):
            what = ('an answer made with other settings, or by another model' if found[0] in rows[i:i + 1]
                    else 'no answer to these prompts, in this order')
            raise ValueError(f"{path} line {i + 1} is {what}: name another --output, or remove the file")
    begin = b''
    if len(lines) < len(rows):
        prompt, place = rows[len(lines)]
        begin = json.dumps({'prompt': prompt, 'sample': place}, ensure_ascii=False)[:-1].encode(errors=ESCAPE)
    if rest and not (begin and rest[:len(begin)] == begin[:len(rest)]):
        raise ValueError(f"{path} ends in what is no answer: name another --output, or remove the file")
    os.truncate(path, len(content) - len(rest))
    return len(lines)


ESCAPE = 'backslashreplace'  # bytes of a prompt that are no UTF-8 become \udcff, which JSON knows


def score_prompts(model, tokenizer, prompts, ids, output):
    """Prints the tokens of each prompt and their log-probabilities, or writes them as JSON lines. Raises
    ValueError if the file exists, and for a prompt of one token."""
    for prompt, tokens in zip(prompts, ids):
        if len(tokens) < 2:
            raise ValueError(f"start={prompt!r} is one token, and the first one has no probability: give a "
                             "longer text")
    if output and os.path.exists(output):
        raise ValueError(f"{output} exists: name another --output, or remove it")
    scores = ((prompt, tokens, score_tokens(model, tokens)) for prompt, tokens in zip(prompts, ids))
    if output:
        with open(f"{output}.tmp", 'w', encoding='utf-8', errors=ESCAPE) as f:
            for prompt, tokens, each in scores:
                record = {'prompt': prompt, 'ids': list(tokens), 'logprobs': [None, *each]}
                print(json.dumps(record, ensure_ascii=False), file=f)
        os.replace(f"{output}.tmp", output)
        return
    for _, tokens, each in scores:
        for token, logprob in zip(tokens[1:], each):
            print(f"{logprob:10.4f}  {tokenizer.decode([token])!r}")
        print(f"{len(each):,} tokens, log-probability {each.sum():,.4f}, perplexity "
              f"{np.exp(-each.mean()):,.3f}")


def read_prompts(start):
    """start -> list of prompts."""
    for mark, split in ('FILE:', False), ('LINES:', True):
        if start.startswith(mark):
            try:
                with open(start.removeprefix(mark), encoding='utf-8', newline='') as f:
                    text = f.read()
            except UnicodeDecodeError as error:
                raise ValueError(f"{start.removeprefix(mark)} is not UTF-8 at byte {error.start}: "
                                 "convert it") from None
            prompts = [line for line in text.splitlines() if line] if split else [text]
            break
    else:
        prompts = [sys.stdin.read() if start == '-' else start]
    if not any(prompts):
        raise ValueError(f"start={start!r} gives an empty prompt: give at least one character")
    return prompts


if __name__ == '__main__':
    check_settings(config)
    prompts = [] if chat and start == '\n' else read_prompts(start)
    steps = max_new_tokens * max(1, math.ceil(len(prompts) * (1 if chat else num_samples) / batch_size))
    config['compile'] = not score and resolve_compile(compile, choose_device(device)[0], steps)
    machine = runtime(device, dtype, seed, bound_by_memory=config['compile'] or quantize == 'int8')
    changes = {name: config[name] for name in ('block_size', 'rope_scaling') if config[name] is not None}
    model, tokenizer, rest = load(init_from, out_dir, machine.device, machine.dtype,
                                  int8=quantize == 'int8', **changes)
    if tokenizer is None:
        raise ValueError(rest['no_tokenizer'])
    if chat and not tokenizer.chat_template:
        raise ValueError(f"{rest['path']} has no chat template, it only continues text: leave out --chat, or "
                         "train it on conversations: python prepare.py pydoc_chat, then config/chat.py")
    if chat and rest.get('masked') is False:  # a template is no sign: tokenizers trained here have one
        print(f"warning: {rest['path']} was trained on text, not on conversations, and will hardly answer; "
              "to train it on some: python prepare.py pydoc_chat && python train.py config/chat.py")
    model.eval()
    trained = ''
    if 'iter_num' in rest and 'best_val_loss' in rest:
        trained = f", iteration {rest['iter_num']:,}, val loss {float(rest['best_val_loss']):.4f} at best"
    print(f"{rest['path']}: {model.num_params():,} parameters{trained}")
    proposer = make_proposer(config, model, tokenizer, machine)
    if config['compile']:
        print("compiling the step: a minute or two, unless it is kept from an earlier run")
    if not prompts:
        converse(Chat(model, tokenizer, config, proposer))
        if proposer:
            print(right_guesses(proposer), file=sys.stderr)
        sys.exit()

    if chat:  # each question begins a conversation of its own; begin: how its answer does
        new_chat = Chat(model, tokenizer, config, proposer)
        shown, num_samples = [f"> {prompt}\n" for prompt in prompts], 1
        ids, begin = zip(*(new_chat.prompt(prompt.strip())[1:] for prompt in prompts))
    else:
        shown, ids, begin = prompts, [tokenizer.encode(prompt) for prompt in prompts], [''] * len(prompts)
    hide, sampling = chat and thinking == 'hide', {name: config[name] for name in SAMPLING}
    if score:
        score_prompts(model, tokenizer, prompts, ids, output)
        sys.exit()
    longest = max(map(len, ids))
    if longest > model.config.block_size:
        print(f"a prompt of {longest} tokens is cropped to its last {model.config.block_size}")
    rows = [(prompt, place) for prompt in prompts for place in range(num_samples)]
    made_by = [rest['path'], rest.get('iter_num'), str(rest.get('best_val_loss')), str(machine.dtype),
               *(config[name] for name in SHAPES_TEXT)]
    settings = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:8]
    first = answers_in(output, rows, settings) if output else 0
    if first:
        print(f"{output}: {first:,} of {len(rows):,} answers are there")
    ids, shown, begin = ([one for one in each for _ in range(num_samples)] for each in (ids, shown, begin))
    display = Display(hide)
    live = sys.stdout.isatty() and not output  # a person sees the first sample grow, the others when done

    def show(row, text):
        if live and row == 0:
            display(text)

    if not output:
        print('---------------')
    if live:
        print(shown[0], end='', flush=True)
        show(0, begin[0])
    started, total = time.perf_counter(), 0
    made = completions(model, tokenizer, ids, max_new_tokens, stop_texts(stop), show, batch_size=batch_size,
                       first=first, compile=config['compile'], proposer=proposer, **sampling)
    with open(output, 'a', encoding='utf-8', errors=ESCAPE) if output else contextlib.nullcontext() as f:
        for row, text, count in in_order(made, first):
            total += count
            text = without_thinking(begin[row] + text) if hide else begin[row] + text
            if f:
                prompt, place = rows[row]
                record = {'prompt': prompt, 'sample': place, 'text': text, 'tokens': count,
                          'settings': settings}
                print(json.dumps(record, ensure_ascii=False), file=f, flush=True)
                continue
            if live and row == 0:
                display('', complete=True)
            else:
                print(f"{shown[row]}{text}")
            print('---------------', flush=True)
    seconds, compiling = time.perf_counter() - started, ''
    if config['compile']:
        seconds, compiling = seconds - compiling_seconds(), f"after {compiling_seconds():.0f} s of compiling"
    speed = f"{total:,} tokens in {seconds:.2f} s, {total / seconds:,.1f} tok/s"
    print(', '.join(filter(None, (speed, compiling, right_guesses(proposer)))), file=sys.stderr)
