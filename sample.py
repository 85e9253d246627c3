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
    python sample.py --speculate=8                          # sooner where text repeats itself

The noise is a function of (seed, sample, position): a sample is the same text alone or among others.
"""
import codecs
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
import weakref

from configurator import can_compile, choose_device, configure, runtime

# model
init_from = 'resume'        # resume (from out_dir), a checkpoint or its folder, or a published model
out_dir = 'out'             # where train.py wrote; best.pt is read if it is there, else ckpt.pt
block_size: int | None = None  # another context than the model's; a larger one needs relative positions
rope_scaling: dict | None = None  # for a larger one: {'rope_type': 'linear', 'factor': 4.0}; see GPTConfig
# text
start = '\n'                # the prompt; FILE:name, LINES:name (one prompt a line), - (standard input)
num_samples = 3             # for each prompt; chat gives one answer
max_new_tokens = 500        # tokens in each sample
batch_size = 64             # samples made at once
output = ''                 # JSON lines are written here, in order, after those that it holds already
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
# speed; in float32 on a CPU speculate, draft and compile do not change the text
quantize = ''               # int8: large weights in 8 bits, a scale for each row; half the memory of bfloat16
speculate: int | None = None  # draft tokens at a time, from where the text repeats itself, or by draft
draft = ''                  # a smaller model of the same tokenizer, as init_from, drafts; speculate None: 4
# system
device = 'auto'             # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'              # float32, bfloat16, float16; auto: what is fast here, compiled and in 8 bits
compile: bool | str = 'auto'  # torch.compile the step: one to two minutes; auto: from 4,000 steps on
config = configure(globals()).config

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hub import load
from model import round_up

# one token --------------------------------------------------------------------------------------------------

def uniforms(seed, sample, position, count):
    """Numbers in [0, 1) for `count` positions of one sample from `position` on: (count,) float32, 24 bits."""
    bits = np.random.PCG64((seed, sample)).advance(position)
    return (np.floor(np.random.Generator(bits).random(count) * 2**24) / 2**24).astype(np.float32)


def sample_token(logits, u, temperature=0.8, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                 seen=None):
    """Draws a token for each row: logits (..., V), u (...) uniform in [0, 1) -> (...) int64 on u's device, by
    inverting the distribution function in vocabulary order; -1 where logits hold NaN. seen (..., V) bool: the
    tokens to penalise. In this order: penalty, temperature (0: the argmax), top_k (exactly k, ties or not),
    top_p (arXiv:1904.09751), min_p (arXiv:2407.01082)."""
    logits = logits.to(u.device)
    if seen is not None:
        logits = penalise(logits, seen, repetition_penalty)
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


def tokens_seen(texts, vocab_size, device, repetition_penalty=1.0, **_):
    """(B, V) bool, the tokens of B texts; None without a penalty."""
    if repetition_penalty == 1:
        return None
    seen = torch.zeros(len(texts), vocab_size, dtype=torch.bool, device=device)
    for row, tokens in zip(seen, texts):
        row[tokens] = True
    return seen


def drawing_device(device):
    """Where tokens are drawn: sampling on MPS has returned ids out of range, and CUDA has no deterministic
    cumsum."""
    elsewhere = device.type == 'mps' or torch.are_deterministic_algorithms_enabled()
    return torch.device('cpu') if elsewhere else device


# a step -----------------------------------------------------------------------------------------------------

def step(model, tokens, cache, u=None, seen=None, sampling=None):
    """Feeds tokens (B, T) to the cache -> the logits after each, (B, T, V), or with sampling, options of
    sample_token, a token for each row, (B,)."""
    logits = model(tokens, cache=cache)
    return logits if sampling is None else sample_token(logits[:, -1], u, seen=seen, **sampling)


def versioned_step(version, *args):
    """step; the version stands for the model, args[0], which torch.compile is told not to look at."""
    assert abs(version) >= 0  # only arguments that are used are looked at
    return step(*args)


def compile_step(model, device):
    """`step`, compiled for a static cache: on CUDA as a CUDA graph; on a CPU with the weights as constants
    ("freezing"), laid out once more in memory as the fastest kernels read them. The step for one token is
    kept on disk for the next run. Weights that were changed are compiled anew, unless through `.data`, of
    which nobody hears."""
    torch._dynamo.config.recompile_limit = 64  # after which torch runs eagerly and says nothing; it has 8
    whole, weights = is_one_graph(model, device), [*model.parameters(), *model.buffers()]
    frozen = whole and device.type in FROZEN
    state = repr(model.config), model.training, [(w.data_ptr(), w._version if frozen else 0) for w in weights]
    if model not in VERSIONS or VERSIONS[model][0] != state:
        kept = frozen and sum(w.nbytes for w in weights) <= KEPT_BYTES
        VERSIONS[model] = state, next(COUNT), fingerprint(weights) if kept else ''
    _, version, tag = VERSIONS[model]
    # guards of modules and weights would take longer than a layer, before each step
    # fullgraph: a piece of a graph could be reused with the weights of an earlier model
    compiled = torch.compile(versioned_step, dynamic=False, fullgraph=whole, options={
        'guard_filter_fn': lambda guards: ["L['args'][0]" not in guard.name for guard in guards],
        'triton.cudagraphs': whole and device.type == 'cuda',
        # so that for one row the cast of eight bits becomes a part of the product
        'coordinate_descent_tuning': model.wte.scale is not None})
    shapes = set() if frozen else None  # of tokens that it was called with

    def run(model, tokens, *args):
        if not frozen or tokens.shape in shapes:
            return compiled(version, model, tokens, *args)
        from torch._inductor import config as inductor  # which takes a second
        shapes.add(tokens.shape)
        one = tokens.numel() == 1
        # oneDNN's kernels are faster for several tokens, not for one, and nothing of theirs can be kept
        with (inductor.patch({**FREEZING, 'fx_graph_cache': one and bool(tag)}),
              torch.compiler.config.patch(cache_key_tag=tag),
              torch.backends.mkldnn.flags(enabled=not one)):
            return compiled(version, model, tokens, *args)
    return run


def is_one_graph(model, device):
    """Whether a step can be compiled as a whole: with experts only if all of them are one matmul, on GPUs
    those of Hopper and Blackwell. Elsewhere each expert waits for the number of its tokens."""
    experts = [module for module in model.modules() if hasattr(module, 'has_kernel')]
    native = device.type != 'cuda' or torch.cuda.get_device_capability(device)[0] in (9, 10)
    return all(native and module.has_kernel(model.compute_dtype(), device.type) for module in experts)


def fingerprint(weights):
    """A text that tells these weights from others; the key of torch's cache does not (seen in 2.13)."""
    digest = hashlib.sha256()
    for w in weights:
        digest.update(w.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def resolve_compile(compile, device, steps):
    """compile='auto' -> bool: few steps save less time than compiling takes."""
    if compile != 'auto':
        return compile
    return steps >= EARNS_COMPILING.get(device.partition(':')[0], math.inf) and can_compile(device)


VERSIONS, COUNT = weakref.WeakKeyDictionary(), itertools.count()  # model -> state, version, fingerprint
FROZEN = ('cpu',)  # types of devices on which a compiled step holds the weights
FREEZING = {'freezing': True, 'max_autotune': True, 'max_autotune_gemm_backends': 'CPP,ATEN',  # torch's names
            'autotune_num_choices_displayed': 0}
KEPT_BYTES = 2**30  # of weights; a step on disk holds them all, one of more is not kept
EARNS_COMPILING = {'cpu': 4000, 'cuda': 10_000}  # steps


# many tokens ------------------------------------------------------------------------------------------------

PREFILL = 8192     # tokens, padding among them, that are fed at once
LAG = {'cuda': 4}  # steps that a device may be ahead of the tokens that are read: it waits for no host


def context_size(model, prompts, n_new, compile):
    """Slots for prompts and n_new tokens after each, at most the model's context; a compiled step serves
    other prompts too."""
    size = max(map(len, prompts)) + n_new
    return min(model.config.block_size, round_up(size) if compile else size)


def new_cache(model, batch_size, max_len, static=False, rolling=True):
    """An empty cache; static: for a compiled step; not rolling: every attention layer can rewind."""
    cache = model.make_cache(batch_size, max_len, static=static, rolling=rolling)
    if static and cache.length.device.type not in FROZEN:
        # CUDA graphs replay on fixed addresses; no guard: for other tensors they are recorded, not compiled
        for tensor in cache.tensors():
            torch._dynamo.mark_static_address(tensor, guard=False)
    return cache


def prefill(model, prompts, cache):
    """Feeds prompts, lists of token ids, to the rows of a cache -> logits after the last of each, (B, V)."""
    device, width = cache.length.device, max(1, PREFILL // len(prompts))
    padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device)
    lengths, last = torch.tensor(list(map(len, prompts)), device=device), None
    for i, piece in enumerate(padded.split(width, dim=1)):
        own = (lengths - i * width).clamp(0, piece.shape[1])  # tokens of each row in this piece
        ragged = bool((own < piece.shape[1]).any())
        logits = model(piece, cache=cache, keep=1, lengths=own if ragged else None)[:, -1]
        last = logits if last is None else torch.where(own[:, None] > 0, logits, last)
    return last


@dataclasses.dataclass
class Row:
    """A sample that is being made, in a row of a cache."""
    sample: int       # its number, which keys the noise
    tokens: list      # ids of its prompt, and of all that was drawn and read
    n_left: int       # tokens still to be drawn; 0 once it has ended
    start: int = 0    # its context is tokens[start:]
    n_draws: int = 0  # tokens that are drawn before it ends or its context is full

    def append(self, token, stop_tokens, enough):
        """Takes a token that was drawn; yields what generate does."""
        if self.n_left == 0:  # steps may go on after its end
            return
        if token < 0:
            raise ValueError(f"the logits of sample {self.sample} after {len(self.tokens)} tokens are NaN: "
                             "the weights are damaged, or too large for float16: --dtype=float32")
        self.n_left -= 1
        if token in stop_tokens:
            self.n_left = 0
        else:
            self.tokens.append(token)
            yield self.sample, token
            if self.sample in enough:
                self.n_left = 0
        if self.n_left == 0:
            yield self.sample, None


NOBODY = Row(0, [0], n_left=0)


def read(unread, lag, stop_tokens, enough):
    """Yields the tokens of all steps but the last `lag`; unread: (rows, tokens, event or None) each."""
    while len(unread) > lag:
        rows, tokens, copied = unread.popleft()
        if copied:
            copied.synchronize()
        for row, token in zip(rows, tokens.tolist()):
            yield from row.append(token, stop_tokens, enough)


@torch.no_grad()
def generate(model, prompts, max_new_tokens, seed=1337, stop_tokens=(), compile=False, cache=None,
             batch_size=None, first=0, enough=(), **sampling):
    """Yields (sample, token) for each token drawn, and (sample, None) once a sample has ended.

    prompts: lists of token ids; a sample's number is its place among them, and keys its noise. A sample ends
    before any of stop_tokens, after max_new_tokens, or when its number is in `enough`, a set to which the
    caller may add. A prompt longer than the context is cropped to its end; a full context goes on from its
    last half. compile: one compiled step over a static cache. cache: of one row, holding the first tokens of
    the one prompt; its max_len is the context, and all tokens but the last one are left in it. batch_size:
    samples made at once, None: all. first: samples before it are left out. sampling: options of sample_token.
    The model should be in eval mode. Raises ValueError for an empty prompt, and logits that are NaN."""
    if not all(prompts):
        raise ValueError('a prompt needs at least one token')
    if len(prompts) <= first:
        return
    device, own = model.wte.weight.device, cache is None
    drawn_on, run_step = drawing_device(device), compile_step(model, device) if compile else step
    count = min(batch_size or len(prompts), len(prompts) - first)
    size = context_size(model, prompts, max_new_tokens, compile) if own else cache.max_len
    if compile and own:
        cache = new_cache(model, count, size, static=True)
    lag = LAG.get(device.type, 0) if own else 0  # a cache of the caller is not ahead
    waiting = [Row(i, list(prompts[i]), max_new_tokens, max(0, len(prompts[i]) - size))
               for i in range(first, len(prompts))]
    # prompts of like length need little padding; not sorted among all, for texts are wanted in order
    waiting.sort(key=lambda row: ((row.sample - first) // (16 * count), len(row.tokens)))
    while waiting:
        batch, waiting = waiting[:count], waiting[count:]
        rows = batch + [NOBODY] * (count - len(batch) if compile else 0)
        if own and not compile:
            cache = new_cache(model, len(rows), size)
        elif own or rows[0].start:
            cache.reset()
        for row in batch:
            row.n_draws = min(row.n_left, size + 1 - len(row.tokens[row.start:]))
        n_draws = max(row.n_draws for row in rows)
        noise = [uniforms(seed, row.sample, len(row.tokens), n_draws) for row in rows]
        noise = torch.from_numpy(np.stack(noise, axis=1)).to(drawn_on)  # (draws, B)
        texts = [row.tokens for row in rows]
        seen = tokens_seen(texts, model.config.vocab_size, drawn_on, **sampling)
        new = [row.tokens[row.start + n:] for row, n in zip(rows, cache.length.tolist())]
        token = sample_token(prefill(model, new, cache), noise[0], seen=seen, **sampling)  # (B,)
        unread = collections.deque()
        for n in itertools.count(1):  # tokens that each row has drawn
            copied = token.to('cpu', non_blocking=token.is_cuda)
            event = torch.cuda.current_stream(device).record_event() if token.is_cuda else None
            unread.append((rows, copied, event))
            yield from read(unread, lag, stop_tokens, enough)
            going = [i for i, row in enumerate(rows) if row.n_left and n < row.n_draws]
            if not going:
                break
            token = token.clamp(min=0)  # a copy too, for a CUDA graph writes over what it returned last
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            if compile:  # rows that have left stay, and write over their last slot
                rows = [row if i in going else NOBODY for i, row in enumerate(rows)]
                cache.length.clamp_(max=size - 1)
            elif len(going) < len(rows):
                cache.select(going)
                rows, token, noise = [rows[i] for i in going], token[going], noise[:, going]
                seen = None if seen is None else seen[going]
            token = run_step(model, token[:, None].to(device), cache, noise[n], seen, sampling)
        yield from read(unread, 0, stop_tokens, enough)
        for row in batch:  # those that have not ended have filled their context
            row.start = len(row.tokens) - max(1, size // 2)
        waiting = [row for row in batch if row.n_left] + waiting


# speculation ------------------------------------------------------------------------------------------------

def check_rewinds(model):
    """Raises ValueError if a layer cannot take tokens back."""
    for block in model.h:
        if block.attn.states:
            raise ValueError(f"speculation takes tokens back, but layer {block.attn.layer}, a "
                             f"{type(block.attn).__name__}, keeps a state that cannot: leave out --speculate "
                             "and --draft, or name another draft")


def cache_for(model, cache, cached, ids, n_new, static=False):
    """A cache of one row, with room for ids and n_new more, that holds as many of the ids as it can but not
    the last: `cache`, which was fed the tokens `cached`, or a new one if it is None or too small."""
    if cache is None or len(ids) + n_new > cache.max_len:
        max_len = min(model.config.block_size, max(4096, 2 * (len(ids) + n_new)))
        return new_cache(model, 1, max_len, static, rolling=False)
    length, same = int(cache.length), 0
    while same < min(length, len(cached), len(ids) - 1) and cached[same] == ids[same]:
        same += 1
    try:
        cache.rewind(length - same)
    except ValueError:  # a layer has a state
        same = 0
    if same == 0:
        cache.reset()
    return cache


class Lookup:
    """Drafts the tokens that followed a text's last 3, 2 or 1 where these stood before, at the latest such
    place (prompt lookup, arXiv:2304.04487); at the text's end the draft goes on from there again. Of
    n_drafted tokens, n_draft at a time, n_accepted were right."""

    def __init__(self, n_draft):
        self.n_draft, self.n_drafted, self.n_accepted = n_draft, 0, 0

    def propose(self, context, u, sampling):
        """context: token ids -> n_draft of them, or none."""
        ids = np.array(context)
        for n in range(min(3, len(ids) - 1), 0, -1):
            runs = np.lib.stride_tricks.sliding_window_view(ids[:-1], n)
            found = np.flatnonzero((runs == ids[-n:]).all(axis=1))
            if len(found):
                return np.resize(ids[found[-1] + n:], self.n_draft).tolist()
        return []


class Draft:
    """Drafts the tokens that a smaller model of the same vocabulary draws with the same noise."""

    def __init__(self, model, n_draft, vocab_size=None):
        """vocab_size: of the model that it drafts for, None: the same; ids beyond the smaller are padding."""
        check_rewinds(model)
        self.model, self.n_draft, self.n_drafted, self.n_accepted = model, n_draft, 0, 0
        self.last_id = min(model.config.vocab_size, vocab_size or model.config.vocab_size) - 1
        self.cache, self.cached = None, []

    def propose(self, context, u, sampling):
        """context: token ids, u: noise of the tokens after them -> n_draft ids."""
        self.cache = cache_for(self.model, self.cache, self.cached, context, self.n_draft)
        new = [min(token, self.last_id) for token in context[int(self.cache.length):]]
        self.cached, draft = [], []  # nothing is known of a cache whose use is interrupted
        for i in range(self.n_draft):
            drawn = sample_token(prefill(self.model, [new], self.cache), u[i:i + 1], **sampling)
            new = drawn.clamp(0, self.last_id).tolist()
            draft += new
        self.cached = context + draft
        return draft


@torch.no_grad()
def speculate(model, prompt, max_new_tokens, drafter, seed=1337, stop_tokens=(), compile=False,  # noqa: F811
              cache=None, sample=0, enough=(), **sampling):
    """Yields the same as generate for one prompt, whose number is `sample`: speculative decoding
    (arXiv:2211.17192) with noise in common. A draft is fed at once, and accepted as far as it equals the
    tokens drawn. drafter: Lookup or Draft; cache: as in generate, not rolling. Raises ValueError as generate
    does, and for a layer that cannot take tokens back."""
    check_rewinds(model)
    device = model.wte.weight.device
    drawn_on, run_step = drawing_device(device), compile_step(model, device) if compile else step
    n_new = max_new_tokens + drafter.n_draft
    if cache is None:
        cache = new_cache(model, 1, context_size(model, [prompt], n_new, compile), compile, rolling=False)
    size, noise = cache.max_len, torch.from_numpy(uniforms(seed, sample, len(prompt), n_new)).to(drawn_on)
    seen = tokens_seen([prompt], model.config.vocab_size, drawn_on, **sampling)  # (1, V)
    row = Row(sample, list(prompt), max_new_tokens, max(0, len(prompt) - size))
    if row.start:
        cache.reset()
    while row.n_left:
        context, u, draft = row.tokens[row.start:], noise[len(row.tokens) - len(prompt):], []
        if len(context) > size:  # it goes on from the last half
            context = context[-max(1, size // 2):]
            row.start = len(row.tokens) - len(context)
            cache.reset()
        new = context[int(cache.length):]
        if len(new) > 1:
            logits = prefill(model, [new], cache)
        else:
            if len(context) + drafter.n_draft <= size:
                draft = drafter.propose(context, u, sampling)
            logits = run_step(model, torch.tensor([new + draft], device=device), cache)[0]  # (1 + draft, V)
        drawn = []
        for i, guess in enumerate([*draft, None]):
            drawn.append(int(sample_token(logits[i:i + 1], u[i:i + 1], seen=seen, **sampling)))
            if seen is not None:
                seen[0, drawn[-1]] = True
            if drawn[-1] != guess:
                break
        drafter.n_drafted += len(draft)
        drafter.n_accepted += len(drawn) - 1
        cache.rewind(len(draft) + 1 - len(drawn))
        for token in drawn:
            yield from row.append(token, stop_tokens, enough)


# text -------------------------------------------------------------------------------------------------------

class TextStream:
    """Tokens -> text as it becomes certain: whole characters only, and nothing that may begin a stop text.
    tokens, text: all so far; stopped: a stop text has come, which is left out; ended: by finish()."""

    def __init__(self, tokenizer, stop=()):
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self.tokens, self.text, self.held, self.stopped, self.ended = [], '', '', False, False

    def feed(self, token):
        """The text that this token makes certain."""
        self.tokens.append(token)
        return self._release(self.decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self):
        """The text that was still held back."""
        self.ended = True
        return self._release(self.decoder.decode(b'', final=True))

    def _release(self, text):
        if self.stopped:
            return ''
        self.held += text
        cuts = [self.held.find(s) for s in self.stop if s in self.held]
        if cuts:
            self.stopped = True
        elif not self.ended:  # what may begin a stop text is held back
            cuts = [i for i in range(len(self.held)) for s in self.stop if s.startswith(self.held[i:])]
        cut = min(cuts, default=len(self.held))
        text, self.held = self.held[:cut], self.held[cut:]
        self.text += text
        return text


def completions(model, tokenizer, prompts, max_new_tokens, stop=(), on_text=None, drafter=None,
                batch_size=None, first=0, **options):
    """Continues prompts, token ids each, from the `first` on. Yields (text, its token ids) in their order: a
    text ends before a stop token or stop text, or after max_new_tokens. on_text(row, text) gets each piece as
    soon as it is certain. drafter: makes texts one by one. options: as in generate."""
    streams, enough = [TextStream(tokenizer, stop) for _ in prompts], set()
    options |= dict(first=first, stop_tokens=tokenizer.stop_tokens, enough=enough)
    if drafter:
        events = speculate_each(model, prompts, max_new_tokens, drafter, **options)
    else:
        events = generate(model, prompts, max_new_tokens, batch_size=batch_size, **options)
    for row, token in events:
        text = streams[row].finish() if token is None else streams[row].feed(token)
        if text and on_text:
            on_text(row, text)
        if streams[row].stopped:
            enough.add(row)
        while first < len(prompts) and streams[first].ended:
            yield streams[first].text, streams[first].tokens
            first += 1


def speculate_each(model, prompts, max_new_tokens, drafter, first=0, compile=False, cache=None, **options):
    """Yields what speculate yields for each prompt, all in one cache, so that a step is compiled once."""
    size = context_size(model, prompts, max_new_tokens + drafter.n_draft, compile)
    cache = cache or new_cache(model, 1, size, compile, rolling=False)
    for sample in range(first, len(prompts)):
        yield from speculate(model, prompts[sample], max_new_tokens, drafter, compile=compile, cache=cache,
                             sample=sample, **options)
        if sample + 1 < len(prompts):
            cache.reset()


def complete(model, tokenizer, prompts, max_new_tokens, stop=(), **options):
    """All that completions yields: (texts, number of tokens in them)."""
    found = list(completions(model, tokenizer, prompts, max_new_tokens, stop, **options))
    return [text for text, _ in found], sum(len(tokens) for _, tokens in found)


# conversations ----------------------------------------------------------------------------------------------

COMMANDS = "/reset forgets the dialogue, /exit or Ctrl-D leaves, Ctrl-C stops an answer, /help prints this"


def chat_ids(model, tokenizer, messages, thinking):
    """messages -> (ids, how the answer begins: '<think>\\n' if the template ends with that, else ''). To a
    model that knows documents a conversation is one."""
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
        self.hide_thinking, self.text, self.n_printed = hide_thinking, '', 0

    def __call__(self, text, complete=False):
        self.text += text
        visible = without_thinking(self.text, complete) if self.hide_thinking else self.text
        print(visible[self.n_printed:], end='\n' if complete else '', flush=True)
        self.n_printed = len(visible)


class Chat:
    """A conversation, `messages`, and a cache of it, so that a turn costs its own tokens. options: those of
    completions."""

    def __init__(self, model, tokenizer, system='', thinking='show', max_new_tokens=500, compile=False,
                 **options):
        self.model, self.tokenizer, self.system, self.thinking = model, tokenizer, system, thinking
        self.max_new_tokens, self.compile, self.options = max_new_tokens, compile, options
        self.cache, self.cached = None, []  # ids that it was fed; none while an answer is being made
        self.reset()

    def reset(self):
        """Forgets everything but the system message."""
        self.messages = [{'role': 'system', 'content': self.system}] if self.system else []
        self.full = False  # whether turns had to be dropped

    def answer(self, question, on_text):
        """Answers a question, on_text(text) gets each piece; may be interrupted anywhere. Returns why the
        answer was cut, or None. Raises ValueError as prompt does."""
        block_size = self.model.config.block_size
        messages, ids, begin = self.prompt(question)
        n_new = min(self.max_new_tokens, block_size - len(ids))
        self.cache = cache_for(self.model, self.cache, self.cached, ids, n_new, static=self.compile)
        answer = {'role': 'assistant', 'content': ''}
        self.messages, self.cached = [*messages, answer], []

        def add(row, text):
            answer['content'] += text
            on_text(text)

        add(0, begin)
        [(_, tokens)] = completions(self.model, self.tokenizer, [ids], n_new, on_text=add, cache=self.cache,
                                    compile=self.compile, **self.options)
        self.cached = ids + tokens
        if len(tokens) == n_new:
            return (f"(cut at --max_new_tokens={n_new})" if n_new == self.max_new_tokens else
                    f"(cut: the context of {block_size} tokens is full)")

    def prompt(self, question):
        """The messages with a question, and chat_ids of them: (messages, ids, begin). The oldest turns are
        dropped until there is room for an answer: max_new_tokens, at most half the context. Raises ValueError
        if the question alone is too long."""
        size, messages = self.model.config.block_size, [*self.messages, {'role': 'user', 'content': question}]
        room, first = min(self.max_new_tokens, size // 2), int(messages[0]['role'] == 'system')
        ids, begin = chat_ids(self.model, self.tokenizer, messages, self.thinking)
        while len(ids) + room > size and len(messages) > first + 1:
            if not self.full:
                print(f"(the context of {size} tokens is full: the oldest turns are forgotten)")
            self.full = True
            del messages[first:first + 2]  # a question and its answer
            ids, begin = chat_ids(self.model, self.tokenizer, messages, self.thinking)
        if len(ids) >= size:
            raise ValueError(f"the question and its template take {len(ids)} tokens, the context has {size}: "
                             "ask a shorter one, or set a larger --block_size")
        return messages, ids, begin


def converse(chat):
    """Answers what is typed in, until /exit or the end of standard input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can then be edited, and come back)
    print(COMMANDS)
    while True:
        try:
            line = input('> ').strip()
            if line == '/exit':
                return
            elif line == '/reset':
                chat.reset()
                print('the conversation is forgotten')
            elif re.fullmatch('/[a-z]*', line):
                print(COMMANDS)
            elif line:
                display = Display(chat.thinking == 'hide')
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
    """Raises ValueError for a setting that is out of range."""
    least = {'temperature': 0, 'top_k': 0, 'top_p': 0, 'min_p': 0, 'repetition_penalty': 0, 'num_samples': 1,
             'max_new_tokens': 1, 'batch_size': 1, 'speculate': 0}
    known = {'quantize': ('', 'int8'), 'compile': (True, False, 'auto'),
             'thinking': ('show', 'hide', 'on', 'off')}
    for name, value in least.items():
        if s[name] is not None and s[name] < value:
            raise ValueError(f"{name}={s[name]} must be at least {value}")
    for name, values in known.items():
        if s[name] not in values:
            raise ValueError(f"{name}={s[name]!r} is none of {values}")


def make_drafter(s, model, tokenizer, machine):
    """The drafter that the settings name, or None. Raises ValueError for a draft that does not fit."""
    if not s['draft']:
        return Lookup(s['speculate']) if s['speculate'] else None
    draft, other, _ = load(s['draft'], s['out_dir'], machine.device, machine.dtype)
    if other is None or other.tokens != tokenizer.tokens or draft.config.block_size < model.config.block_size:
        raise ValueError(f"draft={s['draft']!r} needs the model's tokenizer and at least its context of "
                         f"{model.config.block_size:,} tokens: name a smaller model of the same family, or "
                         f"give --block_size={draft.config.block_size}")
    return Draft(draft.eval(), s['speculate'] or 4, model.config.vocab_size)


def json_line(prompt, sample, **rest):
    """bytes; those of a prompt that are no UTF-8 become \\udcff, which JSON knows."""
    line = json.dumps({'prompt': prompt, 'sample': sample, **rest}, ensure_ascii=False)
    return line.encode(errors='backslashreplace')


def lines_in(path, rows):
    """How many of the rows, (prompt, sample), have a line in the file at path; a line cut short is removed.
    Raises ValueError if the file holds anything else, which stays as it is."""
    if not os.path.exists(path):
        return 0
    with open(path, 'r+b') as f:
        *lines, cut = f.read().split(b'\n')
        for i, line in enumerate([*lines, cut]):
            begin = json_line(*rows[i])[:-1] if i < len(rows) else b''
            if line[:len(begin)] != begin[:len(line)] or line and not begin:
                raise ValueError(f"{path} line {i + 1} is no answer to these prompts, in this order: name "
                                 "another --output, or remove the file")
        f.truncate(f.tell() - len(cut))
    return len(lines)


def read_prompts(start):
    """start -> list of prompts."""
    kind, _, path = start.partition(':')
    if kind in ('FILE', 'LINES'):
        with open(path, encoding='utf-8', newline='') as f:
            text = f.read()
    else:
        text = sys.stdin.read() if start == '-' else start
    prompts = [prompt for prompt in (text.splitlines() if kind == 'LINES' else [text]) if prompt]
    if not prompts:
        raise ValueError(f"start={start!r} gives an empty prompt: give at least one character")
    return prompts


if __name__ == '__main__':
    check_settings(config)
    prompts = [] if chat and start == '\n' else read_prompts(start)
    num_samples = 1 if chat else num_samples
    steps = max_new_tokens * max(1, math.ceil(len(prompts) * num_samples / batch_size))
    compile = resolve_compile(compile, choose_device(device)[0], steps)
    machine = runtime(device, dtype, seed, bound_by_memory=compile or quantize == 'int8')
    changes = {name: config[name] for name in ('block_size', 'rope_scaling') if config[name] is not None}
    model, tokenizer, rest = load(init_from, out_dir, machine.device, machine.dtype,
                                  int8=quantize == 'int8', **changes)
    if tokenizer is None:
        raise ValueError(rest['no_tokenizer'])
    if chat and not tokenizer.chat_template:
        raise ValueError(f"{rest['path']} has no chat template, it only continues text: leave out --chat, or "
                         "train it on conversations: python prepare.py pydoc_chat, then config/chat.py")
    trained = f", iteration {rest['iter_num']:,}" if 'iter_num' in rest else ''
    print(f"{rest['path']}: {model.eval().num_params():,} parameters{trained}")
    drafter = make_drafter(config, model, tokenizer, machine)
    if compile:
        print("compiling the step: a minute or two, unless it is kept from an earlier run")
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
                   repetition_penalty=repetition_penalty, compile=compile, drafter=drafter,
                   stop=[stop] if isinstance(stop, str) else stop)
    conversation = Chat(model, tokenizer, system, thinking, max_new_tokens, **options)
    if not prompts:
        converse(conversation)
        sys.exit()

    rows = [(prompt, sample) for prompt in prompts for sample in range(num_samples)]
    if chat:  # each question begins a conversation of its own; begin: how its answer does
        shown = [f"> {prompt}\n" for prompt in prompts]
        ids, begin = zip(*(conversation.prompt(prompt.strip())[1:] for prompt in prompts))
    else:
        shown, begin = [prompt for prompt, _ in rows], [''] * len(rows)
        ids = [tokenizer.encode(prompt) for prompt in shown]
    longest = max(map(len, ids))
    if longest > model.config.block_size:
        print(f"a prompt of {longest} tokens is cropped to its last {model.config.block_size}")
    first = lines_in(output, rows) if output else 0
    if first:
        print(f"{output}: {first:,} of {len(rows):,} answers are there")
    hide, began, total = chat and thinking == 'hide', time.perf_counter(), 0
    display = Display(hide)

    def on_text(row, text):  # one sees the first sample grow, the others when they are done
        if row == 0 and not output:
            display(text)

    if not output:
        print(f"---------------\n{shown[0]}", end='')
        display(begin[0])
    texts = completions(model, tokenizer, ids, max_new_tokens, on_text=on_text, batch_size=batch_size,
                        first=first, **options)
    with open(output, 'ab') if output else contextlib.nullcontext() as f:
        for row, (text, tokens) in enumerate(texts, first):
            total += len(tokens)
            if output:
                text = without_thinking(begin[row] + text) if hide else begin[row] + text
                f.write(json_line(*rows[row], text=text, tokens=len(tokens)) + b'\n')
                f.flush()
                continue
            if row > 0:
                display = Display(hide)
                print(shown[row], end='')
                display(begin[row] + text)
            display('', complete=True)
            print('---------------', flush=True)
    seconds, compiling = time.perf_counter() - began, ''
    if compile:
        spent = torch._dynamo.utils.calculate_time_spent()['total_wall_time']
        seconds, compiling = seconds - spent, f", after {spent:.0f} s of compiling"
    accepted = f", {drafter.n_accepted:,} of {drafter.n_drafted:,} draft tokens accepted" if drafter else ''
    print(f"{total:,} tokens in {seconds:.2f} s, {total / seconds:,.1f} tok/s{compiling}{accepted}",
          file=sys.stderr)
