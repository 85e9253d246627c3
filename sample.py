"""
Generates text from a checkpoint.

    python sample.py                                        # the model in out/
    python sample.py --out_dir=out-x --start='def ' --num_samples=3 --max_new_tokens=200
    python sample.py --init_from=Qwen/Qwen3-0.6B            # a published model
    python sample.py --out_dir=out-chat --chat              # a conversation
    python sample.py --start=LINES:prompts.txt --num_samples=1 --output=answers.jsonl

A sample depends on its index and the seed, but not on batch_size.
"""
import codecs
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import sys
import zipfile
from pathlib import Path

from configurator import (
    ROOT,
    UserError,
    check_effects,
    check_values,
    checked,
    configure,
    declared,
    marked,
    naming,
    reading,
    runtime,
    use_parts,
)

# model
init_from = 'resume'        # resume (out_dir), a checkpoint, or a published model
out_dir = 'out'             # a run's folder; uses best.pt, or else ckpt.pt
block_size: int | None = None  # another context length [>= 2]
rope_scaling: dict | None = None  # such as {'rope_type': 'linear', 'factor': 4.0} [if pos == 'rope']
# text
start = '\n'                # a prompt, FILE:name or LINES:name (one prompt per line)
num_samples = 3             # samples per prompt [>= 1] [<= 1000000] [if not chat]
max_new_tokens = 500        # tokens per sample [>= 1] [<= 1000000]
batch_size = 64             # samples at once [>= 1] [<= 1000000] [if not chat or start != '\n']
output = ''                 # a new file, with one JSON line per sample [if not chat or start != '\n']
stop: str | list[str] | None = None  # texts that end a sample
# conversation
chat = False                # answer typed questions, or those in start; a base model continues typed texts
# conversations [if chat and chat_template]
system = ''                 # the system message
history: int | None = None  # earlier questions that the model sees; None: all that fit the context [>= 0]
                            # [if start == '\n']
thinking: bool | None = None  # None: the chat template decides
# sampling: arguments of sample_token
temperature = 0.8           # 0: always the most likely token [== 0 or temperature >= 1e-20]
# limits of sampling [if temperature]
top_k: int | None = 200     # only the k most likely tokens; None: all
top_p = 1.0                 # only the most likely tokens up to this total probability [> 0] [<= 1]
min_p = 0.0                 # tokens with at least this fraction of the highest probability [<= 1]
# others
repetition_penalty = 1.0    # lowers logits of earlier tokens [> 0]
seed = 1337                 # seed of sampling [< 2**64]
# system
quantize = ''               # int8 weights [in ('', 'int8')]
device = 'auto'             # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'              # auto, float32, bfloat16, float16
compile = False             # needs 1 to 3 minutes; later starts need less
settings = configure(globals())
config = settings.config

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from model import GPT, GPTConfig, changed, num_params, round_up
from tokenizer import tokenizer_from_state

# checkpoints ------------------------------------------------------------------------------------------------

# A checkpoint's keys -> types. best.pt may lack optimizer and scaler. Keys in comments may have any value.
KEYS = {
    'model': dict,             # name -> tensor; with LoRA, only the adapters
    'model_args': dict,        # the fields of GPTConfig
    'config': dict,            # train.py's settings
    'parts': list,             # names of code that config files changed
    'tokenizer': dict | None,  # the tokenizer's state()
    # chats                    # whether the model was trained on conversations
    # data                     # meta.json of the dataset
    'lora': dict | None,       # rank, alpha, targets, folder, base, checksum
    'kept': list,              # iterations of ckpt-<iteration>.pt
    # family                   # the published model's family, or None
    'optimizer': dict,         # parameter name -> state
    # scaler                   # the scaler's state_dict()
    'iter_num': int,           # and other NUMBERS of train.py
}                              # `load` adds 'path', and 'no_tokenizer': why the tokenizer is missing
FIELDS = declared(ROOT / 'model.py')
CHANGEABLE = marked(ROOT / 'model.py', 'changeable')
# names in checkpoints of older versions or other programs -> fields
RENAMED = {'wiring': 'norm_placement', 'rope_local': 'local', 'tied_lm_head': 'tie_word_embeddings'}
# tensors without effect: masks, tables, and parts that GPT leaves out
IGNORED = re.compile(r'.*(vision|visual|audio|projector|mtp|\.indexer\.).*|.*inv_freq|rope_freqs\.weight|.*\.'
                     r'(attn\.bias|attention\.bias|masked_bias|causal_mask|'
                     r'activation_scale|act_fn\.(beta|eps))')


def read_checkpoint(path):
    """Reads a checkpoint of train.py or nanoGPT. Raises FileNotFoundError or UserError."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"no checkpoint at {path}: train one with `python train.py`, or set "
                                "--init_from to another file or folder")
    with reading(path):
        # Windows cannot replace memory-mapped files
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=os.name == 'posix')
        with zipfile.ZipFile(path) as file:  # torch.load checks no CRC; in older checkpoints every CRC is 0
            if any(entry.CRC for entry in file.infolist()) and (name := file.testzip()):
                raise UserError(f"{path} is damaged: {name} differs from its checksum")
        for name, value in checkpoint.items():
            if not isinstance(value, KEYS.get(name, object)):
                raise UserError(f"{path} is damaged or has another format: {name} is {value!r:.50}")
        checkpoint.setdefault('chats', checkpoint.get('masked', True))  # older versions
        checkpoint['kept'] = [*map(int, checkpoint.get('kept', []))]  # only ints may become parts of paths
        if any('transformer.' in name for name in checkpoint['model']):
            convert_nanogpt(checkpoint)
        checkpoint['model'] = {name.replace('.balance_bias', '.expert_bias'): w.detach()
                               for name, w in checkpoint['model'].items()}
        args = {RENAMED.get(name, name): value for name, value in checkpoint['model_args'].items()}
    checkpoint['model_args'] = {name: checked(path, name, value, FIELDS) for name, value in args.items()
                                # drop unknown options that are None, and window_global
                                if name in FIELDS or value is not None and name != 'window_global'}
    return checkpoint


def convert_nanogpt(checkpoint):
    """Renames a nanoGPT checkpoint's tensors, and adds the GPTConfig fields that its model implies."""
    prefixes = re.compile(r'_orig_mod\.|module\.|transformer\.')
    state = checkpoint['model'] = {prefixes.sub('', name): w for name, w in checkpoint['model'].items()}
    tied = torch.equal(state.setdefault('lm_head.weight', state['wte.weight']), state['wte.weight'])
    if tied:
        del state['lm_head.weight']
    for name in ('device', 'dtype', 'compile', 'backend'):
        checkpoint.get('config', {}).pop(name, None)
    checkpoint['model_args'] = dict(
        pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu', qk_norm=False, bias='ln_f.bias' in state,
    ) | checkpoint['model_args'] | {'tie_word_embeddings': tied}


def build(checkpoint, changes):
    """Makes a checkpoint's model, with changed fields."""
    state = checkpoint.pop('model')
    with torch.device('meta'), naming(changes):
        model = GPT(changed(GPTConfig(**checkpoint['model_args']), **changes))
    wanted = model.state_dict()
    state = {name: w.clone() for name, w in state.items() if name in wanted or not IGNORED.fullmatch(name)}
    if 'wpe.weight' in state:
        state['wpe.weight'] = state['wpe.weight'][:model.config.block_size]
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(f"{checkpoint['path']} does not fit its model_args (if a file of examples/ trained "
                        f"it, name that file): {error}") from error
    return model


def is_published(name):
    """Whether `name` is a published model's folder, is a GGUF file, or looks like a hub id."""
    if os.path.exists(name):
        is_folder = os.path.exists(f'{name}/config.json')
        if is_folder and os.path.exists(f'{name}/ckpt.pt'):
            raise UserError(f"{name} has a published model and ckpt.pt: give the path of ckpt.pt, or move "
                            "it to another folder")
        return is_folder or str(name).endswith('.gguf')
    return re.fullmatch(r'(?!.*\.pt$)[\w-][\w.-]*/[\w-][\w.-]*|gpt2(-[a-z]+)?', name)


def find_tokenizer(checkpoint):
    """The checkpoint's or published model's tokenizer."""
    if is_published(checkpoint['path']):
        from zoo.hub import published_tokenizer
        return published_tokenizer(checkpoint['path'])
    if 'tokenizer' not in checkpoint:  # nanoGPT uses meta.pkl, or else GPT-2's tokenizer
        from prepare import data_folder, load_tokenizer
        tokenizer = load_tokenizer(data_folder(checkpoint.get('config', {}).get('dataset', '')))
        if tokenizer.n_vocab <= checkpoint['model_args']['vocab_size']:
            return tokenizer
    if not checkpoint.get('tokenizer'):
        raise UserError(f"{checkpoint['path']} stores no tokenizer, and for nanoGPT's checkpoints, the data "
                        "folder of the training is missing: copy that folder here")
    tokenizer = tokenizer_from_state(checkpoint['tokenizer'])
    if not checkpoint['chats']:
        tokenizer.chat_template = None
    return tokenizer


def load(init_from, out_dir='out', device='cpu', dtype=None, best=True, merge=True, int8=False, **changes):
    """Returns (model, tokenizer or None, the checkpoint's dict without 'model').

    init_from: 'resume' (reads out_dir), a checkpoint of train.py or nanoGPT, a run's folder, or a published
    model. dtype: None keeps the stored dtype. best: prefers best.pt. merge: adds LoRA adapters to
    the weights. int8: stores large weights in 8 bits. changes: fields of GPTConfig. Raises
    FileNotFoundError or UserError."""
    if init_from != 'resume' and is_published(init_from):
        from zoo.hub import fetch, from_pretrained
        path = fetch(init_from)
        model = from_pretrained(path, dtype, device, int8, **changes)
        checkpoint = {'path': path, 'family': model.family}
    else:
        path = out_dir if init_from == 'resume' else init_from
        if os.path.isdir(path):
            best = best and os.path.exists(f'{path}/best.pt')
            path = os.path.join(path, 'best.pt' if best else 'ckpt.pt')
        checkpoint = read_checkpoint(path) | {'path': path}
        if checkpoint.get('lora'):
            from zoo.weights import adapted_model
            model = adapted_model(checkpoint, checkpoint.pop('model'), merge, changes)
        else:
            model = build(checkpoint, changes)
        if int8:
            from zoo.weights import quantize_weights
            quantize_weights(model, dtype or torch.float32)
        model.to(device, dtype)
    try:
        tokenizer = find_tokenizer(checkpoint)
    except (OSError, ImportError, ValueError) as error:
        tokenizer = None
        checkpoint['no_tokenizer'] = str(error)
    return model, tokenizer, checkpoint | {'model_args': dataclasses.asdict(model.config)}


# one token --------------------------------------------------------------------------------------------------

def uniforms(seed, sample, position, count):
    """A sample's noise from `position` on: (count,) float32 in [0, 1)."""
    bits = np.random.PCG64((seed, sample)).advance(position)
    u = np.floor(np.random.Generator(bits).random(count) * 2**24) / 2**24
    return torch.from_numpy(u).float()


def sample_token(logits, u, temperature=0.8, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                 seen=None):
    """Draws a token from logits (..., V) by inverting their distribution function at u (...) in [0, 1).
    Returns (...) int64 on u's device, -1 for NaN. seen: (..., V) bool, the tokens to penalise. Applies in
    this order: repetition penalty (CTRL, arXiv:1909.05858), temperature, top_k, top_p (arXiv:1904.09751),
    min_p (arXiv:2407.01082)."""
    logits = logits.to(u.device)
    if repetition_penalty != 1:
        penalised = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if temperature == 0:
        highest, token = logits.max(dim=-1)
        return token.where(~highest.isnan(), -1)
    logits, n_vocab = logits.float() / temperature, logits.shape[-1]
    if top_k or top_p < 1:
        highest, ids = logits.topk(min(top_k or n_vocab, n_vocab), dim=-1, sorted=top_p < 1)
        probs = highest.softmax(dim=-1)
        if top_p < 1:  # keep tokens until top_p is reached
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


SAMPLING = inspect.signature(sample_token).parameters  # a replacement of sample_token gets these arguments


# a step -----------------------------------------------------------------------------------------------------

def step(model, tokens, cache, u, seen, sampling):
    """Appends tokens (B, T) to the cache, and draws each token's successor: (B, T). u: (B, T);
    seen: (B, 1, V)."""
    return sample_token(model(tokens, cache=cache), u, seen=seen, **sampling)


def compile_step(model, cache):
    """Compiles `step` for a static cache. On a CPU, int8 weights must not change afterwards."""
    for tensor in cache.tensors() if cache.length.is_cuda else ():  # CUDA graphs need fixed addresses
        torch._dynamo.mark_static_address(tensor, guard=False)
    return compiled(model)


@functools.lru_cache(maxsize=1)
def compiled(model):
    """Compiles `step`."""
    from torch._inductor import config as inductor
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64
    device = model.wte.weight.device
    # CUDA graphs need a single matmul for all experts, which only Hopper and Blackwell have
    native = device.type != 'cuda' or torch.cuda.get_device_capability(device)[0] in (9, 10)
    whole = all(native and module.has_kernel(model.compute_dtype(), device.type)
                for module in model.modules() if hasattr(module, 'has_kernel'))
    # with coordinate_descent_tuning, matmuls of one row read int8 weights directly
    run = torch.compile(step, dynamic=False, fullgraph=whole, options={
        'triton.cudagraphs': whole and device.type == 'cuda', 'coordinate_descent_tuning': True})
    is_int8 = model.wte.weight.dtype is torch.int8
    return inductor.patch(FREEZING)(run) if is_int8 and whole and device.type == 'cpu' else run


FREEZING = {'freezing': True, 'max_autotune': True, 'max_autotune_gemm_backends': 'CPP,ATEN',
            'autotune_num_choices_displayed': 0, 'max_autotune_report_choices_stats': False,
            'fx_graph_cache': False}  # the cache key ignores frozen weights


# many tokens ------------------------------------------------------------------------------------------------

PREFILL = 8192  # tokens per forward pass, including padding


def prefill(model, contexts, cache, rows):
    """Feeds lists of ids to cache rows, which may already hold the first ids."""
    part = cache
    if len(rows) < len(cache.length):
        part = cache.like(len(rows))
    device = cache.length.device
    width = max(1, PREFILL // len(rows))
    new = [torch.tensor(context[n:], dtype=torch.long) for context, n in zip(contexts, part.length.tolist())]
    lengths = torch.tensor([len(ids) for ids in new])
    padded = pad_sequence(new, batch_first=True)
    for piece in padded.to(device).split(width, dim=1) if padded.numel() else ():  # one transfer for all rows
        n_real = lengths.clamp(0, piece.shape[1])
        model(piece, cache=part, keep=1,
              lengths=None if n_real.min() == piece.shape[1] else n_real.to(device))
        lengths -= piece.shape[1]
    if part is not cache:
        cache.put(rows, part)


@dataclasses.dataclass
class Sample:
    """A text that grows in a row of a cache."""
    number: int          # index of the prompt
    tokens: list         # prompt and drawn tokens
    n_left: int          # tokens to draw
    first: int           # the context is tokens[first:]
    noise: torch.Tensor  # numbers from `uniforms`


def rows_to_fill(samples, waiting, size):
    """Refills ended rows, and crops contexts above `size` tokens. Returns the rows to feed."""
    rows = []
    for row, sample in enumerate(samples):
        if sample.n_left == 0:
            samples[row] = next(waiting, sample)
        elif len(sample.tokens) - sample.first > size:
            sample.first = len(sample.tokens) - max(1, size // 2)
        else:
            continue
        if samples[row].n_left:
            rows.append(row)
    return rows


AHEAD = {'cuda'}  # devices that start a step before the host reads the previous tokens


@torch.no_grad()
def generate(model, prompts, max_new_tokens, seed=1337, stop_tokens=(), compile=False,  # noqa: C901
             cache=None, batch_size=None, **sampling):
    """Yields (Sample, token) for each token drawn, and (Sample, None) at a sample's end.

    prompts: lists of token ids. A sample ends before any of stop_tokens, after max_new_tokens, or when
    the caller sets its n_left to 0. Only the end of a long prompt counts; a full context keeps its last
    half. cache: one row with the first tokens of a single prompt; on a GPU, generate may leave one extra
    token in it. batch_size: rows of the cache; when a sample ends, the next prompt gets the row (Orca, OSDI
    2022). sampling: options of sample_token. The model must be in eval mode. Raises UserError for NaN or a
    token outside the vocabulary."""
    device = model.wte.weight.device
    sampling_device = 'cpu' if device.type == 'mps' else device  # MPS has returned ids out of range
    if (highest := max(map(max, filter(None, prompts)), default=0)) >= model.config.vocab_size:
        raise UserError(f"the prompt has token {highest}, which is outside the model's vocabulary of "
                        f"{model.config.vocab_size}: leave out the text of this token")
    n_rows = len(prompts[:batch_size])
    is_new = cache is None
    if is_new:
        # each cache size needs a compilation; coarse sizes waste little memory if rows are few
        step_size = 512 if compile and n_rows <= 4 else 64
        size = round_up(max(map(len, prompts)) + max_new_tokens, step_size)
        cache = model.make_cache(n_rows, min(size, model.config.block_size), compile)
    size = cache.max_len
    run_step = compile_step(model, cache) if compile else step
    # sorting by length avoids padding
    order = sorted(range(len(prompts)), key=lambda i: (i // (16 * n_rows), len(prompts[i])))
    waiting = (Sample(i, [*prompts[i]], max_new_tokens, max(0, len(prompts[i]) - size), uniforms(
        seed, i, len(prompts[i]), max_new_tokens + 1).to(sampling_device)) for i in order)
    samples = [Sample(-1, [], 0, 0, None)] * n_rows  # all have ended
    seen = torch.zeros(n_rows, 1, model.config.vocab_size, dtype=torch.bool, device=sampling_device)

    def draw(fed, n_unread=0):
        noise = torch.stack([sample.noise[max_new_tokens - sample.n_left + n_unread] for sample in samples])
        seen.scatter_(2, fed[:, None].to(sampling_device), True)
        return run_step(model, fed, cache, noise[:, None], seen, sampling)

    ahead = None  # the next tokens (B, 1), drawn before the host reads the previous tokens
    while True:
        drawn = ahead
        if ahead is None:
            # 1. Feed new contexts except the last token.
            if rows := rows_to_fill(samples, waiting, size):
                if is_new and len(rows) == len(samples):
                    cache.reset()
                prefill(model, [samples[row].tokens[samples[row].first:-1] for row in rows], cache, rows)
                marks = torch.zeros(len(rows), *seen.shape[1:], dtype=torch.bool)
                for mark, row in zip(marks, rows):
                    mark[0, samples[row].tokens[:-1]] = True
                seen[rows] = marks.to(sampling_device)  # one transfer for all rows
            # 2. Drop ended rows. A compiled step keeps ended rows, which overwrite their last slot.
            active = [row for row, sample in enumerate(samples) if sample.n_left]
            if not active:
                return
            if compile:
                cache.length.clamp_(max=size - 1)
            elif len(active) < len(samples):
                cache.select(active)
                samples = [samples[row] for row in active]
                seen = seen[active]
            # 3. Feed last tokens; draw the next tokens.
            drawn = draw(torch.tensor([sample.tokens[-1:] for sample in samples], device=device))
        # 4. Read the drawn tokens. A GPU meanwhile draws more, unless a given cache has states, which
        # cannot be rewound.
        tokens = drawn.to('cpu', non_blocking=True)
        copied = torch.get_device_module(sampling_device).current_stream(device).record_event()
        ahead = None
        if device.type in AHEAD and (is_new or not any(cache.states)) and all(
                sample.n_left > 1 and len(sample.tokens) - sample.first < size for sample in samples):
            ahead = draw(drawn.clamp(min=0), 1).clone()  # a CUDA graph overwrites its output
        if copied:  # not on CPUs
            copied.synchronize()
        # 5. Append the tokens.
        for sample, token in zip(samples, tokens.flatten().tolist()):
            if not sample.n_left:
                continue
            if token < 0:
                raise UserError("the logits are NaN: the weights are damaged, or float16 overflows: "
                                "--dtype=float32")
            if token in stop_tokens:
                sample.n_left = 0
            else:
                sample.n_left -= 1
                sample.tokens.append(token)
                yield sample, token
            if not sample.n_left:
                yield sample, None


# text -------------------------------------------------------------------------------------------------------

class TextStream:
    """A sample's tokens and text. Holds back unfinished characters and possible stop texts."""

    text = held = ''
    stopped = ended = False
    n_shown = 0

    def __init__(self, tokenizer, stop=()):
        self.tokenizer = tokenizer
        self.stop = stop
        self.tokens = []
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')

    def feed(self, token):
        """Adds a token. None ends the text."""
        self.ended = token is None
        new = [] if self.ended else [token]
        self.tokens += new
        self.held += self.decoder.decode(self.tokenizer.decode_bytes(new), final=self.ended)
        cuts = [self.held.find(s) for s in self.stop if s in self.held]
        self.stopped = bool(cuts)
        if not (self.stopped or self.ended):
            cuts = [i for i in range(len(self.held)) for s in self.stop if s.startswith(self.held[i:])]
        cut = min(cuts, default=len(self.held))
        self.text += self.held[:cut]
        self.held = self.held[cut:]

    def show(self, before=''):
        text = before + self.text
        print(text[self.n_shown:], end='\n' if self.ended else '', flush=True)
        self.n_shown = len(text)


def completions(model, tokenizer, prompts, max_new_tokens, stop=(), **options):
    """Continues prompts by `generate`, up to a text in `stop`. Yields (index, TextStream) in prompt
    order, whenever a text may have changed."""
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    current = 0
    for sample, token in generate(model, prompts, max_new_tokens, stop_tokens=tokenizer.stop_tokens,
                                  **options):
        stream = streams[sample.number]
        stream.feed(token)
        if stream.stopped:
            sample.n_left = 0
        if sample.number == current and not stream.ended:
            yield current, stream
        while current < len(prompts) and streams[current].ended:
            yield current, streams[current]
            current += 1


def complete(*args, **options):
    """Texts of `completions`, and their total number of tokens."""
    streams = [stream for _, stream in completions(*args, **options) if stream.ended]
    return [stream.text for stream in streams], sum(len(stream.tokens) for stream in streams)


# conversations ----------------------------------------------------------------------------------------------

def chat_ids(model, tokenizer, messages, thinking):
    """The model's document_token (if any) and the messages' ids. Without a chat template, only the
    last message's ids."""
    if not tokenizer.chat_template:
        return tokenizer.encode(messages[-1]['content'])
    ids = tokenizer.chat(messages, thinking=thinking)
    first = model.config.document_token
    if first is not None and ids[:1] != [first]:
        ids.insert(0, first)
    return ids


class Chat:
    """A conversation and its KV cache. options: for `completions`."""

    cache = None  # None during an answer

    def __init__(self, model, tokenizer, system='', thinking=None, max_new_tokens=500, history=None,
                 **options):
        self.model = model
        self.tokenizer = tokenizer
        self.system = system
        self.history = history if tokenizer.chat_template else 0
        self.thinking = thinking
        self.max_new_tokens = max_new_tokens
        self.options = options
        self.reset()

    def reset(self):
        system = self.tokenizer.as_text(self.system)
        self.messages = [{'role': 'system', 'content': system}] if system else []

    def answer(self, question):
        messages, ids = self.prompt(question)
        n_new = min(self.max_new_tokens, self.model.config.block_size - len(ids))
        cache = self.prefix_cache(ids, n_new)
        answer = {'role': 'assistant', 'content': ''}
        self.messages = [*messages, answer]
        self.cache = None
        for _, stream in completions(self.model, self.tokenizer, [ids], n_new, cache=cache, **self.options):
            answer['content'] = stream.text
            stream.show()
        self.cache = cache
        self.cached = ids + stream.tokens
        if len(stream.tokens) == n_new and self.tokenizer.chat_template:
            print(f"(cut after {n_new} tokens: --max_new_tokens={self.max_new_tokens})")

    def prefix_cache(self, ids, n_new):
        """The cache, rewound to its common prefix with ids; a new cache if ids and n_new tokens exceed it."""
        cache = self.cache
        if cache is None or len(ids) + n_new > cache.max_len:
            max_len = min(self.model.config.block_size, max(4096, 2 * (len(ids) + n_new)))
            return self.model.make_cache(1, max_len, self.options.get('compile'), rolling=False)
        length = int(cache.length)
        n_shared = min(length, len(ids) - 1, len(os.path.commonprefix([self.cached, ids])))
        try:
            cache.rewind(length - n_shared)
        except ValueError:
            cache.reset()
        return cache

    def prompt(self, question):
        """Returns (messages, ids), including a question."""
        size = self.model.config.block_size
        messages = [*self.messages, {'role': 'user', 'content': self.tokenizer.as_text(question)}]
        room = min(self.max_new_tokens, size // 2)
        first = bool(self.system)
        if self.history is not None:
            del messages[first:-1 - 2 * self.history]
        while (len(ids := chat_ids(self.model, self.tokenizer, messages, self.thinking)) + room > size
               and len(messages) > first + 1):
            print(f"(the context of {size} tokens is full: the oldest question and its answer are forgotten)")
            del messages[first:first + 2]
        if len(ids) >= size:
            raise UserError(f"the question has {len(ids)} tokens, but the context only {size}: ask a shorter "
                            "one, or set a larger --block_size")
        return messages, ids


def converse(chat):
    """Answers typed questions."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input can then be edited)
    print("/reset starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C cuts an answer")
    while True:
        try:
            line = input('> ').rstrip()
            if line == '/exit':
                return
            if line == '/reset':
                chat.reset()
            elif line:
                chat.answer(line)
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
        except ValueError as error:
            print(error)


# the script -------------------------------------------------------------------------------------------------

def read_prompts(start):
    """The prompts in the setting `start`."""
    kind, _, path = start.partition(':')
    text = start
    if kind in ('FILE', 'LINES'):
        with reading(path):
            text = Path(path).read_text(encoding='utf-8-sig')
    prompts = [prompt for prompt in (text.split('\n') if kind == 'LINES' else [text]) if prompt]
    if not prompts:
        raise UserError(f"start={start!r} is empty: give at least one character")
    return prompts


if __name__ == '__main__':
    use_parts(settings, globals())
    check_values(settings, config, globals())
    stop = [stop.replace(r'\n', '\n')] if isinstance(stop, str) else stop or []
    if not all(stop):
        raise UserError("stop must have texts of at least one character, such as ['END', 'Q:']")
    prompts = [] if chat and start == '\n' else read_prompts(start)
    machine = runtime(device, dtype, seed, bound_by_memory=compile or quantize == 'int8')
    changes = {name: config[name] for name in ('block_size', 'rope_scaling') if config[name] is not None}
    model, tokenizer, checkpoint = load(init_from, out_dir, machine.device, machine.dtype,
                                        int8=quantize == 'int8', **changes)
    if tokenizer is None:
        raise UserError(checkpoint['no_tokenizer'])
    template = {'chat_template': tokenizer.chat_template}
    check_effects(settings, config | vars(model.config) | template, globals())
    if chat and not tokenizer.chat_template:
        print("the model was not trained on conversations, so it continues each text")
    if prompts == ['\n'] and start not in getattr(tokenizer, 'chars', start):
        prompts = tokenizer.chars[:1]
    model.eval()
    print(f"{checkpoint['path']}: {num_params(model):,} parameters")
    if compile:
        print("compiling: this takes a minute or more, and less in later starts")
    options = {name: config[name] for name in (*SAMPLING, *inspect.signature(generate).parameters)
               if name in config} | {'stop': stop}
    conversation = Chat(model, tokenizer, system, thinking, history=history, **options)
    if not prompts:
        converse(conversation)
        sys.exit()

    samples = [(prompt, number) for prompt in prompts for number in range(1 if chat else num_samples)]
    ids = [conversation.prompt(prompt.strip())[1] if chat and tokenizer.chat_template
           else tokenizer.encode(prompt)
           for prompt, _ in samples]
    line = '-' * 15
    with open(output, 'x', encoding='utf-8') if output else contextlib.nullcontext() as file:
        if not output:
            print(line)
        for i, stream in completions(model, tokenizer, ids, **options):
            prompt, number = samples[i]
            if not output:
                stream.show(f"> {prompt}\n" if chat else prompt)
            if stream.ended:
                n = len(stream.tokens)
                record = {'prompt': prompt, 'sample': number, 'text': stream.text, 'tokens': n}
                print(json.dumps(record, ensure_ascii=False) if output else line, file=file, flush=True)
