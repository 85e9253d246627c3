"""
Generates text from a checkpoint, which has model and tokenizer.

    python sample.py                                        # from out/
    python sample.py --out_dir=out-x --start='def ' --num_samples=3 --max_new_tokens=200
    python sample.py --start=FILE:prompt.txt --temperature=0  # greedy
    python sample.py --init_from=Qwen/Qwen3-0.6B --stop="['\\n\\n', 'def ']"  # a published model, or a file
    python sample.py --out_dir=out-chat --chat              # a conversation; /help lists its commands
    python sample.py --out_dir=out-chat --chat --start=LINES:questions.txt  # each on its own
    python sample.py --start=LINES:prompts.txt --num_samples=1 --output=answers.jsonl
    python sample.py --speculate=8                          # sooner where text repeats itself

Noise is a function of (seed, sample, position): a sample is the same text alone or among others.
"""
import codecs
import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import time
from pathlib import Path

from configurator import (
    ROOT,
    check_effects,
    check_values,
    configure,
    marked,
    reading,
    runtime,
)

# model
init_from = 'resume'        # resume (from out_dir), a checkpoint or its folder, or a published model
out_dir = 'out'             # train.py's; best.pt is read if it is there, else ckpt.pt
block_size: int | None = None  # another context; a larger one needs relative positions [>= 2]
rope_scaling: dict | None = None  # for a larger one: {'rope_type': 'linear', 'factor': 4.0}; see GPTConfig
# text
start = '\n'                # the prompt; FILE:name, LINES:name (one prompt a line), - (standard input)
num_samples = 3             # for each prompt; chat gives one answer [>= 1]
max_new_tokens = 500        # tokens in each sample [>= 1]
batch_size = 64             # samples made at once [>= 1]
output = ''                 # a new file for JSON lines [if not chat or start != '\n']
stop: str | tuple | list = ()  # end a sample at this text, or at any text of a list; \n and \t: line end, tab
# conversation
chat = False                # answer questions typed in, or those of start; a base model continues them
# further settings of conversations [if chat]
system = ''                 # the message that a conversation begins with
history: int | None = None  # earlier questions, with their answers, that are kept; None: all that fit
thinking = 'auto'           # thoughts: the template decides, or [in ('auto', 'on', 'off')]
# sampling
temperature = 0.8           # below 1 less random, above 1 more; 0: the likeliest token
# limits of sampling [if temperature]
top_k: int | None = 200     # only the k likeliest tokens; 0 or None: all
top_p = 1.0                 # only the likeliest tokens that together have this probability [> 0] [<= 1]
min_p = 0.0                 # only tokens at least this likely, relative to the likeliest [<= 1]
# others
repetition_penalty = 1.0    # divides positive logits of tokens seen before, multiplies negative ones [> 0]
seed = 1337                 # of sampling only
# speed; in float32 on a CPU speculate and compile do not change the text
quantize = ''               # int8: large weights in 8 bits [in ('', 'int8')]
speculate: int | None = None  # draft tokens at a time, where the text repeats itself
# system
device = 'auto'             # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'              # float32, bfloat16, float16; auto: fastest here, given compile and quantize
compile = False             # torch.compile the step, 1 to 2 minutes
settings = configure(globals())
config = settings.config
given = settings.given

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from model import GPT, GPTConfig, changed, num_params, round_up
from tokenizer import tokenizer_from_state

# checkpoints of ours ----------------------------------------------------------------------------------------

# A checkpoint is a dict, which train.py writes to ckpt.pt; best.pt lacks optimizer and scaler. nanoGPT's has
# config, model_args, model, optimizer, iter_num and best_val_loss. `load` adds the last two.
#
#     model              name -> tensor; with lora of the adapters alone
#     model_args         the fields of GPTConfig
#     config             train.py's settings
#     tokenizer          its state(), or None
#     masked             whether it was trained on conversations
#     data               meta.json of its dataset
#     lora               None, or rank, alpha, targets, base (the model that the adapters are for) and
#                        base_checksum
#     kept               the iterations of the run's ckpt-<iteration>.pt
#     family             the published family that an export is written as, or None
#     optimizer, scaler  parameter name -> the optimizer's state of it; state_dict() of the scaler
#     iter_num, ...      NUMBERS of train.py
#     path               the file or folder
#     no_tokenizer       why there is none


# fields of GPTConfig that a checkpoint may be read with otherwise
CHANGEABLE = marked(ROOT / 'model.py', 'changeable')


RENAMED = {'wiring': 'norm_placement', 'rope_local': 'local'}  # fields of GPTConfig in earlier versions


def read_checkpoint(path):
    """Reads a file of train.py or nanoGPT, with names as they are now; runs no code of the file. Raises
    FileNotFoundError, or ValueError for another kind of file."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"no checkpoint at {path}: train one with `python train.py`, or set "
                                "--out_dir or --init_from")
    with reading(path):
        # mapped: a rank of a sharded model holds its part; Windows could not replace a file that is mapped
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=os.name == 'posix')
        state = checkpoint['model']
        args = checkpoint['model_args']
    is_nanogpt = any('transformer.' in name for name in state)
    prefixes = re.compile(r'_orig_mod\.|module\.|transformer\.')  # of compiled models, of DDP, of nanoGPT
    state = {prefixes.sub('', name).replace('.balance_bias', '.expert_bias'): w for name, w in state.items()}
    args = {RENAMED.get(name, name): value for name, value in args.items()}
    if is_nanogpt:
        state.pop('lm_head.weight', None)  # the same as wte's
        for name in ('device', 'dtype', 'compile', 'backend'):  # of another machine
            checkpoint.get('config', {}).pop(name, None)
        args = dict(pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu', qk_norm=False) | args
    return checkpoint | {'model': state, 'model_args': args}


def checksum(path):
    """A sum over the bits of a checkpoint's weights; None for a published model."""
    if is_published(path):
        return None
    return sum(w.float().view(torch.int32).sum().item() for w in read_checkpoint(path)['model'].values())


def from_state(state, model_args, **changes):
    """Builds the model of a state dict and the fields of its config. changes: fields of CHANGEABLE. Raises
    ValueError as model.changed, RuntimeError for weights that are missing or of another shape."""
    config = changed(GPTConfig(**model_args), **changes)
    if 'wpe.weight' in state:
        state = state | {'wpe.weight': state['wpe.weight'][:config.block_size]}
    with torch.device('meta'):
        model = GPT(config)
    model = model.to_empty(device='cpu')
    model.load_state_dict(state)
    return model


def is_published(name):
    """Whether this is a folder with config.json or adapters of PEFT, a GGUF file, or looks like a hub id or
    nanoGPT's gpt2."""
    if os.path.exists(name):
        return str(name).endswith('.gguf') or any(
            os.path.exists(f'{name}/{one}') for one in ('config.json', 'adapter_config.json'))
    return re.fullmatch(r'(?!.*\.pt$)[\w-][\w.-]*/[\w-][\w.-]*|gpt2(-[a-z]+)?', name)


def load(init_from, out_dir='out', device='cpu', dtype=None, best=True, merge=True, int8=False, **changes):
    """Reads a model. Returns (model, tokenizer, rest); rest is the checkpoint's dict without 'model'.

    init_from: 'resume' (out_dir), a checkpoint of ours or nanoGPT's, the folder of a run, or a published
    model. dtype: None: as stored. best: of a folder reads best.pt, if it is there, else ckpt.pt. merge: adds
    a LoRA run's adapters to the weights. int8: stores large weights in 8 bits. changes: fields of GPTConfig.
    The tokenizer is None if there is none. Raises FileNotFoundError, or ValueError for any other file."""
    if init_from != 'resume' and is_published(init_from):
        from zoo.hub import load_published
        model, tokenizer, rest = load_published(init_from, device, dtype, int8, changes)
    else:
        path = out_dir if init_from == 'resume' else init_from
        if os.path.isdir(path):
            best = best and os.path.exists(os.path.join(path, 'best.pt'))
            path = os.path.join(path, 'best.pt' if best else 'ckpt.pt')
        rest = read_checkpoint(path) | {'path': path}
        state = rest.pop('model')
        if rest.get('lora'):
            from zoo.weights import adapted_model
            model = adapted_model(rest, state, merge, changes)
        else:
            try:
                model = from_state(state, rest['model_args'], **changes)
            except RuntimeError as error:
                raise ValueError(f"{path} does not fit its model_args: {error}") from error
        if int8:
            from zoo.weights import quantize_weights
            quantize_weights(model, dtype or torch.float32)
        model.to(device, dtype)
        try:
            tokenizer = find_tokenizer(rest)
        except (OSError, ImportError, ValueError) as error:  # it may still be trained, measured, exported
            tokenizer = None
            rest['no_tokenizer'] = str(error)
    return model, tokenizer, rest | {'model_args': dataclasses.asdict(model.config)}


def find_tokenizer(rest):
    """A checkpoint's, without a chat template if trained on text alone; nanoGPT's is in its dataset."""
    if not rest.get('tokenizer'):
        from prepare import load_tokenizer
        return load_tokenizer(f"data/{rest.get('config', {}).get('dataset')}")
    tokenizer = tokenizer_from_state(rest['tokenizer'])
    if not rest.get('masked', True):
        tokenizer.chat_template = None
    return tokenizer


# one token --------------------------------------------------------------------------------------------------

def uniforms(seed, sample, position, count):
    """Noise of a sample from `position` on: (count,) float32 in [0, 1), of 24 bits."""
    bits = np.random.PCG64((seed, sample)).advance(position)
    u = np.floor(np.random.Generator(bits).random(count) * 2**24) / 2**24
    return torch.from_numpy(u).float()


def sample_token(logits, u, temperature=0.8, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                 seen=None):
    """Inverts the distribution function in vocabulary order: logits (..., V), u (...) in [0, 1) -> (...)
    int64 on u's device, -1 where logits hold NaN. First CTRL's penalty (arXiv:1909.05858) on tokens seen,
    (..., V) bool; then temperature; exactly top_k; top_p (arXiv:1904.09751); min_p (arXiv:2407.01082)."""
    logits = logits.to(u.device)
    if repetition_penalty != 1:
        penalised = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if temperature == 0:
        highest, token = logits.max(dim=-1)
        return token.where(~highest.isnan(), -1)
    logits, n_vocab = logits.float() / temperature, logits.shape[-1]
    if top_k or top_p < 1:
        highest, ids = logits.topk(min(top_k or n_vocab, n_vocab), dim=-1)
        probs = highest.softmax(dim=-1)
        if top_p < 1:  # a token stays if those before it have not reached top_p
            probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
        ids, order = ids.sort(dim=-1)
        probs = probs.gather(-1, order)
    else:
        probs = logits.softmax(dim=-1)
        ids = None
    if min_p:
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    cdf = probs.double().cumsum(dim=-1)
    token = (cdf <= u[..., None].double() * cdf[..., -1:]).sum(dim=-1)
    if ids is not None:
        token = ids.gather(-1, token[..., None])[..., 0]
    return token.where(~cdf[..., -1].isnan(), -1)


# a step -----------------------------------------------------------------------------------------------------

def step(model, tokens, cache, u, seen, sampling):
    """Feeds tokens (B, T) to the cache; returns the token drawn after each, (B, T). u (B, T), seen (B, 1, V),
    sampling: arguments of sample_token."""
    return sample_token(model(tokens, cache=cache), u, seen=seen, **sampling)


def compile_step(model, cache):
    """Compiles `step` for a static cache: on CUDA as a CUDA graph, on a CPU with the weights as constants
    ("freezing"). Changed weights compile again, unless they were changed through `.data`, which torch does
    not count."""
    for tensor in cache.tensors():  # a CUDA graph replays on fixed addresses; another cache is recorded
        torch._dynamo.mark_static_address(tensor, guard=False)
    weights = *model.parameters(), *model.buffers()
    return compiled(model, tuple((w.data_ptr(), w._version) for w in weights))


@functools.lru_cache(maxsize=1)
def compiled(model, versions):
    """compile_step for weights of these versions."""
    from torch._inductor import config as inductor
    torch.compiler.reset()  # earlier steps hold other weights
    torch._dynamo.config.recompile_limit = 64  # shapes and lengths of the cache; 8 by default
    device = model.wte.weight.device
    # experts are in one graph only if one matmul computes them all, on Hopper and Blackwell; otherwise the
    # host waits for the number of tokens of each
    native = device.type != 'cuda' or torch.cuda.get_device_capability(device)[0] in (9, 10)
    whole = all(native and module.has_kernel(model.compute_dtype(), device.type)
                for module in model.modules() if hasattr(module, 'has_kernel'))
    # with the second option, products with one row become sums, which read eight bits directly
    run = torch.compile(step, dynamic=False, fullgraph=whole, options={
        'triton.cudagraphs': whole and device.type == 'cuda', 'coordinate_descent_tuning': True})
    return inductor.patch(FREEZING)(run) if whole and device.type == 'cpu' else run


FREEZING = {'freezing': True, 'max_autotune': True, 'max_autotune_gemm_backends': 'CPP,ATEN',  # torch's names
            'autotune_num_choices_displayed': 0,
            'fx_graph_cache': False}  # its key does not distinguish frozen weights (torch 2.13)


# many tokens ------------------------------------------------------------------------------------------------

PREFILL = 8192  # tokens, padding among them, that are fed at once


def prefill(model, prompts, cache, rows):
    """Feeds lists of ids to rows of a cache: to all, or by way of another cache. The first ids, which a row
    has already, are left out."""
    part = cache
    if len(rows) < len(cache.length):
        part = model.make_cache(len(rows), cache.max_len, cache.static, cache.rolling)
    device = cache.length.device
    width = max(1, PREFILL // len(prompts))
    new = [torch.tensor(prompt[n:], dtype=torch.long, device=device)
           for prompt, n in zip(prompts, part.length.tolist())]
    lengths = torch.tensor(list(map(len, new)), device=device)
    padded = pad_sequence(new, batch_first=True)
    for begin in range(0, padded.shape[1], width):
        piece = padded[:, begin:begin + width]
        own = (lengths - begin).clamp(0, piece.shape[1])  # tokens of each row in this piece
        model(piece, cache=part, keep=1, lengths=None if own.min() == piece.shape[1] else own)
    if part is not cache:
        cache.put(rows, part)


@dataclasses.dataclass
class Sample:
    """A text that is being made, in a row of a cache."""
    number: int          # the place of its prompt, which seeds its noise
    tokens: list         # the prompt's tokens, then those drawn
    n_left: int          # tokens still to be drawn; 0 ends it
    start: int           # its context is tokens[start:]
    noise: torch.Tensor  # of each token to be drawn

    def append(self, token, stop_tokens):
        """Takes a token; yields as generate does."""
        if token < 0:
            raise ValueError(f"the logits of sample {self.number} after {len(self.tokens)} tokens are NaN: "
                             "the weights are damaged, or too large for float16: --dtype=float32")
        self.n_left -= 1
        if token in stop_tokens:
            self.n_left = 0
        else:
            self.tokens.append(token)
            yield self, token
        if self.n_left == 0:
            yield self, None


@torch.no_grad()
def generate(model, prompts, max_new_tokens, seed=1337, stop_tokens=(), compile=False,  # noqa: C901
             cache=None, batch_size=None, drafter=None, **sampling):
    """Yields (Sample, token) for each token drawn, and (Sample, None) once a sample has ended.

    prompts: lists of token ids; a sample's number is its place among them. A sample ends before any of
    stop_tokens, after max_new_tokens, or when the caller sets n_left to 0. A long prompt is cropped to its
    end, a full context to its last half. cache: one row with the first tokens of the one prompt and room for
    all. batch_size: rows of the cache; a row whose sample has ended takes the next prompt (continuous
    batching, Orca, OSDI 2022). drafter: for speculative decoding (arXiv:2211.17192), one sample at a time: a
    draft is accepted as far as it equals the tokens drawn. sampling: options of sample_token. The model
    should be in eval mode. Raises ValueError for NaN, and for a rejected draft if a layer has a state."""
    device = model.wte.weight.device
    # MPS has returned ids out of range, CUDA has no deterministic cumsum
    drawn_on = 'cpu' if device.type == 'mps' or torch.are_deterministic_algorithms_enabled() else device
    n_draft = drafter.n_draft if drafter else 0
    count = 1 if drafter else len(prompts[:batch_size])
    is_new = cache is None
    if is_new:
        size = round_up(max(map(len, prompts)) + max_new_tokens + n_draft)
        cache = model.make_cache(count, min(size, model.config.block_size), compile, rolling=not drafter)
    size = cache.max_len
    run_step = compile_step(model, cache) if compile else step
    # by length, for little padding (half the time, if lengths differ), but about in order
    order = sorted(range(len(prompts)), key=lambda i: (i // (16 * count), len(prompts[i])))
    waiting = (Sample(i, [*prompts[i]], max_new_tokens, max(0, len(prompts[i]) - size),
                      uniforms(seed, i, len(prompts[i]), max_new_tokens + 1 + n_draft)) for i in order)
    samples = [Sample(-1, [], 0, 0, None)] * count  # of each row; these have ended
    seen = torch.zeros(count, 1, model.config.vocab_size, dtype=torch.bool, device=drawn_on)
    while True:
        fresh = []  # rows whose context is to be fed
        for row, sample in enumerate(samples):
            if sample.n_left and len(sample.tokens) - sample.start > size:  # its context is full
                sample.start = len(sample.tokens) - max(1, size // 2)
                fresh.append(row)
            elif not sample.n_left and (new := next(waiting, None)):
                samples[row] = new
                fresh.append(row)
        if fresh:
            if is_new and len(fresh) == len(samples):
                cache.reset()
            prefill(model, [samples[row].tokens[samples[row].start:-1] for row in fresh], cache, fresh)
            for row in fresh:
                seen[row] = False
                seen[row, :, samples[row].tokens] = True
        going = [row for row, sample in enumerate(samples) if sample.n_left]
        if not going:
            return
        if compile:  # rows that have ended stay, and write over their last slot
            cache.length.clamp_(max=size - 1)
        elif len(going) < len(samples):
            cache.select(going)
            samples = [samples[row] for row in going]
            seen = seen[going]
        draft = drafter.propose(samples[0].tokens[samples[0].start:], size) if drafter else []
        fed = torch.tensor([sample.tokens[-1:] + draft for sample in samples], device=device)
        noise = torch.stack([sample.noise[max_new_tokens - sample.n_left:][:fed.shape[1]]
                             for sample in samples])
        seen.scatter_(2, fed[:, None, :1].to(drawn_on), True)
        drawn = run_step(model, fed, cache, noise.to(drawn_on), seen, sampling).tolist()
        if draft:
            n_accepted = len(os.path.commonprefix([drawn[0], draft]))
            drawn[0] = drawn[0][:n_accepted + 1]
            cache.rewind(n_draft - n_accepted)
            drafter.n_drafted += n_draft
            drafter.n_accepted += n_accepted
        for sample, tokens in zip(samples, drawn):
            for token in tokens:
                if sample.n_left:
                    yield from sample.append(token, stop_tokens)


class Lookup:
    """Drafts the tokens that followed the text's last 3, else 2, else 1 at their latest earlier place, from
    the beginning again if too few (prompt lookup, arXiv:2304.04487). n_accepted of n_drafted were right."""

    n_drafted = n_accepted = 0

    def __init__(self, n_draft):
        self.n_draft = n_draft

    def propose(self, context, size):
        """context, token ids -> n_draft ids; none if it does not repeat itself or has no room for them."""
        ends = [i for i in range(1, len(context)) if context[i - 1] == context[-1]]
        if not ends or len(context) + self.n_draft > size:
            return []
        end = max(ends, key=lambda i: (context[i - 3:i] == context[-3:], context[i - 2:i] == context[-2:], i))
        return np.resize(context[end:], self.n_draft).tolist()


# text -------------------------------------------------------------------------------------------------------

class TextStream:
    """A sample's tokens and text. The text is shown as far as no later token can change it: unfinished
    characters and possible beginnings of a stop text are held back. A stop text ends it."""

    text = held = ''
    stopped = ended = False
    n_shown = 0

    def __init__(self, tokenizer, stop=()):
        self.tokenizer = tokenizer
        self.stop = stop
        self.tokens = []
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')

    def feed(self, token):
        """Takes a token, None at the end."""
        self.ended = token is None
        new = [] if self.ended else [token]
        self.tokens += new
        self.held += self.decoder.decode(self.tokenizer.decode_bytes(new), final=self.ended)
        cuts = [self.held.find(s) for s in self.stop if s in self.held]
        self.stopped = bool(cuts)
        if not (self.stopped or self.ended):  # hold back the beginning of a stop text
            cuts = [i for i in range(len(self.held)) for s in self.stop if s.startswith(self.held[i:])]
        cut = min(cuts, default=len(self.held))
        self.text += self.held[:cut]
        self.held = self.held[cut:]

    def show(self, text):
        """Prints the new part of a text that grows with this one."""
        print(text[self.n_shown:], end='\n' if self.ended else '', flush=True)
        self.n_shown = len(text)


def completions(model, tokenizer, prompts, max_new_tokens, stop=(), **options):
    """Continues prompts as generate does, and ends a sample before any text of `stop` too. Yields (its
    number, TextStream) in order, whenever a text may have grown and when it has ended."""
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    first = 0  # the first sample that has not ended
    for sample, token in generate(model, prompts, max_new_tokens, stop_tokens=tokenizer.stop_tokens,
                                  **options):
        stream = streams[sample.number]
        stream.feed(token)
        if stream.stopped:
            sample.n_left = 0
        if sample.number == first and not stream.ended:
            yield first, stream
        while first < len(prompts) and streams[first].ended:
            yield first, streams[first]
            first += 1


def complete(*args, **options):
    """The texts that completions makes, and the number of tokens in them."""
    streams = [stream for _, stream in completions(*args, **options) if stream.ended]
    return [stream.text for stream in streams], sum(len(stream.tokens) for stream in streams)


# conversations ----------------------------------------------------------------------------------------------

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C cuts an answer, /help prints this"


def chat_ids(model, tokenizer, messages, thinking):
    """messages -> (ids, '<think>\\n' if the template begins the answer with that, else ''). A model with a
    document_token reads it first. Without a template an answer follows its question directly and ends a
    line."""
    if not tokenizer.chat_template:
        text = ''.join(one['content'] + '\n' * (one['role'] != 'user') for one in messages)
        return tokenizer.encode(text), ''
    ids = tokenizer.chat(messages, thinking={'on': True, 'off': False}.get(thinking))
    first = model.config.document_token
    if first is not None and ids[:1] != [first]:
        ids.insert(0, first)
    return ids, '<think>\n' if tokenizer.decode(ids[-10:]).rstrip().endswith('<think>') else ''


class Chat:
    """A conversation, `messages`, and a cache of it. options: as in completions."""

    def __init__(self, model, tokenizer, system='', history=None, thinking='auto', max_new_tokens=500,
                 **options):
        self.model = model
        self.tokenizer = tokenizer
        self.system = system
        self.history = history
        self.thinking = thinking
        self.max_new_tokens = max_new_tokens
        self.options = options
        self.cache = None
        self.cached = []  # ids that it was fed; none during an answer
        self.reset()

    def reset(self):
        """Forgets all but the system message."""
        system = self.tokenizer.as_text(self.system)
        self.messages = [{'role': 'system', 'content': system}] if system else []

    def answer(self, question):
        """Prints the answer to a question, interruptible anywhere. Raises ValueError if it is too long."""
        messages, ids, begin = self.prompt(question)
        n_new = min(self.max_new_tokens, self.model.config.block_size - len(ids))
        self.keep_prefix(ids, n_new)
        answer = {'role': 'assistant', 'content': begin}
        self.messages = [*messages, answer]
        self.cached = []
        for _, stream in completions(self.model, self.tokenizer, [ids], n_new, cache=self.cache,
                                     **self.options):
            answer['content'] = begin + stream.text
            stream.show(answer['content'])
        self.cached = ids + stream.tokens
        if len(stream.tokens) == n_new:
            print(f"(cut after {n_new} tokens: --max_new_tokens={self.max_new_tokens})")

    def keep_prefix(self, ids, n_new):
        """Keeps in the cache the ids that it has, except the last; a new cache if n_new more do not fit."""
        if self.cache is None or len(ids) + n_new > self.cache.max_len:
            max_len = min(self.model.config.block_size, max(4096, 2 * (len(ids) + n_new)))
            self.cache = self.model.make_cache(1, max_len, self.options.get('compile'), rolling=False)
        length = int(self.cache.length)
        same = min(length, len(ids) - 1, len(os.path.commonprefix([self.cached, ids])))
        try:
            self.cache.rewind(length - same)
        except ValueError:  # a layer has a state
            same = 0
        if same == 0:
            self.cache.reset()

    def prompt(self, question):
        """(The messages with a question, *chat_ids). Forgets the oldest turns until there is room for an
        answer: max_new_tokens, at most half the context."""
        size = self.model.config.block_size
        messages = [*self.messages, {'role': 'user', 'content': self.tokenizer.as_text(question)}]
        room = min(self.max_new_tokens, size // 2)
        first = bool(self.system)
        if self.history is not None:
            del messages[first:-1 - 2 * self.history]
        while True:
            ids, begin = chat_ids(self.model, self.tokenizer, messages, self.thinking)
            if len(ids) + room <= size or len(messages) == first + 1:
                break
            print(f"(the context of {size} tokens is full: the oldest question and its answer are forgotten)")
            del messages[first:first + 2]
        if len(ids) >= size:
            raise ValueError(f"the question and its template take {len(ids)} tokens, the context has {size}: "
                             "ask a shorter one, or set a larger --block_size")
        return messages, ids, begin


def converse(chat):
    """Answers questions typed in, until /exit or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can then be edited, and come back)
    print(COMMANDS)
    while True:
        try:
            line = input('> ').rstrip()
            if line == '/exit':
                return
            elif line == '/reset':
                chat.reset()
                print('the conversation is forgotten')
            elif re.fullmatch('/[a-z]*', line):
                print(COMMANDS)
            elif line:
                chat.answer(line)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except ValueError as error:
            print(error)


# the script -------------------------------------------------------------------------------------------------

def read_prompts(start):
    """start -> list of prompts."""
    kind, _, path = start.partition(':')
    text = start
    if start == '-':
        text = sys.stdin.buffer.read().decode('utf-8-sig')
    elif kind in ('FILE', 'LINES'):
        text = Path(path).read_bytes().decode('utf-8-sig')
    prompts = [prompt for prompt in (re.split('\r?\n', text) if kind == 'LINES' else [text]) if prompt]
    if not prompts:
        raise ValueError(f"start={start!r} is empty: give at least one character")
    return prompts


if __name__ == '__main__':
    check_values(settings, config, globals())
    check_effects(settings, config, globals())
    prompts = [] if chat and start == '\n' else read_prompts(start)
    machine = runtime(device, dtype, seed, bound_by_memory=compile or quantize == 'int8')
    changes = {name: config[name] for name in ('block_size', 'rope_scaling') if config[name] is not None}
    model, tokenizer, rest = load(init_from, out_dir, machine.device, machine.dtype,
                                  int8=quantize == 'int8', **changes)
    if tokenizer is None:
        raise ValueError(rest['no_tokenizer'])
    model.eval()
    print(f"{rest['path']}: {num_params(model):,} parameters")
    if chat and not tokenizer.chat_template:
        print("it was not trained on conversations: it continues the text that is typed; config/chat.py "
              "trains one that answers")
    if compile:
        print("compiling the step: a minute or two")
    stop = [str(s).replace(r'\n', '\n').replace(r'\t', '\t')
            for s in ([stop] if isinstance(stop, str) else stop) if s != '']
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop,
                   repetition_penalty=repetition_penalty, compile=compile,
                   drafter=Lookup(speculate) if speculate else None)
    conversation = Chat(model, tokenizer, system, history, thinking, max_new_tokens, **options)
    if not prompts:
        converse(conversation)
        sys.exit()

    samples = [(prompt, number) for prompt in prompts for number in range(1 if chat else num_samples)]
    # each question begins a conversation of its own; begin: how its answer begins
    ids, begin = zip(*(conversation.prompt(prompt.strip())[1:] if chat else (tokenizer.encode(prompt), '')
                       for prompt, _ in samples))
    began = time.perf_counter()
    total = 0
    line = '-' * 15
    with open(output, 'x', encoding='utf-8') if output else contextlib.nullcontext() as f:
        if not output:
            print(line)
        for i, stream in completions(model, tokenizer, ids, max_new_tokens, batch_size=batch_size, **options):
            prompt, number = samples[i]
            text = begin[i] + stream.text
            if not output:
                stream.show(f"> {prompt}\n{text}" if chat else prompt + text)
            if stream.ended:
                n = len(stream.tokens)
                total += n
                record = {'prompt': prompt, 'sample': number, 'text': text, 'tokens': n}
                print(json.dumps(record, ensure_ascii=False) if output else line, file=f, flush=True)
    seconds = time.perf_counter() - began
    print(f"{total:,} tokens in {seconds:.2f} s, {total / seconds:,.1f} tok/s{', with compiling' * compile}",
          file=sys.stderr)
