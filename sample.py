"""
Generates text: weights -> text. Model and tokenizer come from the checkpoint alone.

    python sample.py                                        # from out/
    python sample.py --out_dir=out-x --start='def ' --num_samples=3 --max_new_tokens=200
    python sample.py --start=FILE:prompt.txt --temperature=0  # greedy; LINES:file: a prompt a line, -: stdin
    python sample.py --init_from=Qwen/Qwen3-0.6B --start=Once  # or a folder with config.json and safetensors
    python sample.py --export=folder                        # for transformers and vLLM, instead of text
    python sample.py --init_from=path/to/best.pt --stop="['\\n\\n', 'def ']"

Noise is a function of (seed, sample, position): sample 3 is the same text alone or among a hundred others.
"""
import codecs
import json
import os
import sys
import time

import numpy as np
import torch

from configurator import configure, runtime
from model import GPT
from prepare import find_checkpoint, foreign, json_tokenizer, load_tokenizer, tokenizer_from_state

# model
init_from = 'resume'        # resume (from out_dir), a checkpoint, a folder (transformers' too), or a hub id
out_dir = 'out'             # where train.py wrote; best.pt is read if it is there, else ckpt.pt
export = ''                 # a folder to write the model to, as transformers reads it, instead of text
# text
start = '\n'                # the prompt; FILE:name, LINES:name (one prompt a line), - (standard input)
num_samples = 10            # for each prompt, drawn as one batch
max_new_tokens = 500        # tokens in each sample
stop: str | tuple | list = ()  # end a sample at this text, or any of these
# sampling
temperature = 0.8           # below 1 less random, above 1 more; 0: always the likeliest token
top_k: int | None = 200     # only the k likeliest tokens; 0 or None: all
top_p = 1.0                 # only the likeliest tokens that together have this probability
min_p = 0.0                 # only tokens at least this likely, relative to the likeliest
repetition_penalty = 1.0    # divides positive logits of tokens seen before, multiplies negative ones
seed = 1337                 # of the noise; affects nothing else
# system
device = 'auto'             # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'              # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = False  # torch.compile the step: half a minute first, then faster (auto: False)
configure(globals())


# one token --------------------------------------------------------------------------------------------------

def uniforms(seed, sample, position, count):
    """Numbers in [0, 1) for `count` positions of one sample from `position` on: (count,) float64, 24 bits."""
    bits = np.random.PCG64((seed, sample)).advance(position)
    return np.floor(np.random.Generator(bits).random(count) * 2**24) / 2**24


def pick(logits, u, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """Draws a token a row: logits (B, V), u (B,) uniform in [0, 1) -> (B,) int64, by inverting the
    distribution function in vocabulary order. temperature 0 is the argmax, whatever the rest says. Then, in
    this order: temperature, top_k (exactly k, ties or not), top_p (arXiv:1904.09751), min_p
    (arXiv:2407.01082)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k or top_p < 1:
        values, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
        probs = values.softmax(dim=-1)
        if top_p < 1:  # a token stays if those before it have not reached top_p: one always does
            probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
        probs = torch.zeros_like(logits).scatter(-1, ids, probs)
    else:
        probs = logits.softmax(dim=-1)
    if min_p:
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    cdf = probs.double().cumsum(dim=-1)
    return (cdf <= u[:, None].double() * cdf[:, -1:]).sum(dim=-1)


def penalise(logits, seen, penalty):
    """The repetition penalty of CTRL (arXiv:1909.05858): logits (B, V), seen (B, V) bool."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


# many tokens ------------------------------------------------------------------------------------------------

def prefill(model, contexts, cache):
    """Feeds each row's tokens to the empty cache; logits after the last one, (B, V). Rows may differ in
    length: all but the last token of each go in padded on the right, the padding is taken back, then each
    row's last goes in."""
    lengths, device = [len(c) for c in contexts], cache.length.device
    if min(lengths) == max(lengths):
        return model(torch.tensor(contexts, device=device), cache=cache, keep=1)[:, -1]
    longest = max(lengths)
    padded = torch.tensor([c[:-1] + [0] * (longest - len(c)) for c in contexts], device=device)
    model(padded, cache=cache, keep=0)
    cache.rewind(longest - torch.tensor(lengths, device=device))
    return model(torch.tensor([c[-1:] for c in contexts], device=device), cache=cache, keep=1)[:, -1]


@torch.no_grad()
def generate(model, prompts, max_new_tokens, temperature=0.8, top_k=None, top_p=1.0, min_p=0.0,
             repetition_penalty=1.0, seed=1337, stop_tokens=(), compile=False):
    """Yields, step by step, a list with the next token of each prompt, None once a prompt has ended.

    prompts: lists of token ids, of any lengths; the row is the sample number that keys its noise. A prompt
    ends at any of stop_tokens, which is not yielded. A prompt longer than block_size is cropped to its end; a
    row whose context is full goes on from its last half. compile: one compiled step over a static cache.
    The model should be in eval mode. Raises ValueError for an empty prompt or an id not in the vocabulary."""
    vocab_size, block_size, device = model.config.vocab_size, model.config.block_size, model.wte.weight.device
    for prompt in prompts:
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError("a prompt needs at least one token, all of them below "
                             f"vocab_size={vocab_size}; got {list(prompt)[:8]}")
    if not prompts or max_new_tokens < 1:
        return
    # sampling on MPS has returned ids out of range, and CUDA has no deterministic cumsum
    where = 'cpu' if device.type == 'mps' or torch.are_deterministic_algorithms_enabled() else device
    noise = np.stack([uniforms(seed, row, len(p), max_new_tokens) for row, p in enumerate(prompts)], axis=1)
    noise = torch.tensor(noise, dtype=torch.float32, device=where)  # (max_new_tokens, B); 24 bits fit exactly
    seen = None
    if repetition_penalty != 1:
        seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=where)
        for row, prompt in enumerate(prompts):
            seen[row, prompt] = True

    def draw(logits, u):
        logits = logits.to(where)
        if seen is not None:
            logits = penalise(logits, seen, repetition_penalty)
        token = pick(logits, u, temperature, top_k, top_p, min_p)
        if seen is not None:
            seen.scatter_(1, token[:, None], True)
        return token

    def step(token, cache, u):
        return draw(model(token, cache=cache, keep=1)[:, -1], u)

    contexts = [list(p[-block_size:]) for p in prompts]
    max_len = min(block_size, max(map(len, contexts)) + max_new_tokens)
    if compile:
        step = torch.compile(step, dynamic=False, mode='reduce-overhead' if device.type == 'cuda' else None)
    cache, token, ended = None, None, [False] * len(prompts)
    for u in noise:
        if token is None or max(map(len, contexts)) > block_size:
            contexts = [c if len(c) <= block_size else c[-max(1, block_size // 2):] for c in contexts]
            lengths = [len(c) for c in contexts]
            spread = max(lengths) - min(lengths)  # what prefill takes back
            if cache is None or spread > cache.max_rewind:
                cache = model.make_cache(len(prompts), max_len, static=compile, max_rewind=spread)
                if compile and device.type == 'cuda':  # CUDA graphs replay on fixed addresses
                    for buffer in cache.tensors():
                        torch._dynamo.mark_static_address(buffer)
            cache.rewind(cache.length.clone())
            token = draw(prefill(model, contexts, cache), u)
        else:
            token = step(token[:, None].to(device), cache, u)
        new = token.tolist()
        for context, t in zip(contexts, new):  # rows that have ended run on unseen, to keep the batch's shape
            context.append(t)
        ended = [end or t in stop_tokens for end, t in zip(ended, new)]
        if all(ended):
            return
        yield [None if end else t for end, t in zip(ended, new)]


class TextStream:
    """Tokens -> text as it becomes certain: whole characters only, and nothing that may begin a stop text."""

    def __init__(self, tokenizer, stop=()):
        self.tokenizer, self.stop, self.held, self.ended = tokenizer, tuple(filter(None, stop)), '', False
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


def complete(model, tokenizer, prompts, max_new_tokens, stop=(), on_text=None, **sampling):
    """Continues prompts, token ids each; sampling as in generate. Returns (texts, tokens made). A text ends
    before the end-of-text token or a stop text. on_text(row, text) is told of each piece as soon as it is
    certain."""
    streams, texts, count = [TextStream(tokenizer, stop) for _ in prompts], [''] * len(prompts), 0

    def add(row, text):
        texts[row] += text
        if on_text and text:
            on_text(row, text)

    stop_tokens = () if tokenizer.eot is None else (tokenizer.eot,)
    for column in generate(model, prompts, max_new_tokens, stop_tokens=stop_tokens, **sampling):
        for row, (token, stream) in enumerate(zip(column, streams)):
            if token is not None and not stream.ended:
                count += 1
                add(row, stream.feed(token))
        if all(stream.ended or token is None for token, stream in zip(column, streams)):
            break
    for row, stream in enumerate(streams):
        add(row, stream.finish())
    return texts, count


# the story --------------------------------------------------------------------------------------------------

def checkpoint_path(init_from, out_dir):
    """The file that init_from means."""
    folder = out_dir if init_from == 'resume' else init_from
    if init_from != 'resume' and not os.path.isdir(folder):
        return folder
    best = os.path.join(folder, 'best.pt')
    return best if os.path.exists(best) else os.path.join(folder, 'ckpt.pt')


def write_pretrained(model, tokenizer, folder):
    """Model and tokenizer, as AutoModelForCausalLM and AutoTokenizer read them."""
    source = tokenizer.to_json()
    eot = tokenizer.decode([tokenizer.eot]) if tokenizer.eot is not None else None
    model.save_pretrained(folder, eos_token_id=tokenizer.eot)
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': eot,
              'clean_up_tokenization_spaces': False, 'model_max_length': model.config.block_size}
    config |= getattr(tokenizer, 'config', {})  # what came with it: its own end of text, its chat template
    for name, text in {'tokenizer.json': source,
                       'tokenizer_config.json': json.dumps(config)}.items():
        with open(os.path.join(folder, name), 'w', encoding='utf-8', newline='') as f:
            f.write(text)


def find_tokenizer(rest, path):
    """The tokenizer of a checkpoint: its own, or for nanoGPT's files that of the dataset it names."""
    if rest.get('tokenizer'):
        return tokenizer_from_state(rest['tokenizer'])
    dataset = rest.get('config', {}).get('dataset')
    if dataset is None:
        raise ValueError(f"{path} names no tokenizer and no dataset: nothing can turn its tokens into text")
    return load_tokenizer(os.path.join('data', dataset))


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
    for name, value, wrong in [('temperature', temperature, temperature < 0),
                               ('top_k', top_k, (top_k or 0) < 0),
                               ('top_p', top_p, not 0 < top_p <= 1), ('min_p', min_p, not 0 <= min_p <= 1),
                               ('repetition_penalty', repetition_penalty, repetition_penalty <= 0),
                               ('num_samples', num_samples, num_samples < 1), ('seed', seed, seed < 0),
                               ('max_new_tokens', max_new_tokens, max_new_tokens < 1)]:
        if wrong:
            raise ValueError(f"{name}={value} is out of range: temperature >= 0, top_k >= 0, 0 < top_p <= 1, "
                             "0 <= min_p <= 1, repetition_penalty > 0, num_samples, max_new_tokens >= 1, "
                             "seed >= 0")
    machine = runtime(device, dtype, seed)
    if init_from != 'resume' and foreign(init_from):
        path, rest = find_checkpoint(init_from), {}
        model, tokenizer = GPT.from_pretrained(path), json_tokenizer(path)
    else:
        path = checkpoint_path(init_from, out_dir)
        model, rest = GPT.from_checkpoint(path)
        tokenizer = find_tokenizer(rest, path)
    if export:
        write_pretrained(model, tokenizer, export)
        print(f"{path} is in {export} for transformers: {', '.join(sorted(os.listdir(export)))}")
        raise SystemExit
    model.to(machine.device, machine.dtype).eval()
    at = (f", iteration {rest.get('iter_num', 0):,}, "
          f"val loss {float(rest.get('best_val_loss', float('nan'))):.4f} at best")
    print(f"{path}: {model.num_params():,} parameters{at if rest else ''}")
    prompts = read_prompts(start)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    if max(map(len, ids)) > model.config.block_size:
        print(f"a prompt of {max(map(len, ids))} tokens is cropped to its last {model.config.block_size}")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    rows = [(prompt, i) for prompt, i in zip(prompts, ids) for _ in range(num_samples)]
    live = sys.stdout.isatty()  # a person sees the first sample grow, the others follow when all are done

    def show(row, text):
        if live and row == 0:
            print(text, end='', flush=True)

    print('---------------')
    show(0, prompts[0])
    begun = time.perf_counter()
    texts, count = complete(model, tokenizer, [i for _, i in rows], max_new_tokens, stops, show,
                            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
                            repetition_penalty=repetition_penalty, compile=compile is True)
    seconds = time.perf_counter() - begun
    for row, ((prompt, _), text) in enumerate(zip(rows, texts)):
        print('\n---------------' if live and row == 0 else f"{prompt}{text}\n---------------")
    print(f"{count:,} tokens in {seconds:.2f} s, {count / seconds:,.1f} tok/s", file=sys.stderr)
