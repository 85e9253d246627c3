"""Small models, data and runs that several test files use."""
import base64
import collections
import csv
import functools
import json
import os
import random
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import model as flat
import prepare
import tokenizer as flat_tokenizer
from model import GPT
from sample import generate
from zoo import weights
from zoo.tokenizer_json import JsonTokenizer, to_json

ROOT = Path(flat.__file__).resolve().parent


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def made(model, prompts, n, **options):
    """The tokens that generate yields for each prompt, whose end is None."""
    found = [[] for _ in prompts]
    for sample, token in generate(model, prompts, n, **options):
        found[sample.number].append(token)
    assert all(tokens.index(None) == len(tokens) - 1 for tokens in found if tokens)
    return [tokens[:-1] if tokens else None for tokens in found]


# text and its tokens ----------------------------------------------------------------------------------------
PREP_DATA = os.environ.get('FLATGPT_DATA', '')


PREP_AWKWARD = ["  two  spaces ", "\n\n\n", "\r\n", "\t", " ", "12345678901", "it's", "IT'S", "don't", "x1y2",
                "...", "中文文本，没有空格。", "日本語\n", "한국어", "🙂🙃",
                "e\u0301", "नमस्ते", "\u00a0", "\u3000", "word",
                "Word", "WORD", "a\n", "9\n", "9 ", "z \n", "if x:\n        return y\n", "'", "'s",
                "/", "/\n", ")\n"]


def prep_awkward(n, seed=0):
    rng = random.Random(seed)
    return ''.join(rng.choice(PREP_AWKWARD) for _ in range(n))


def prep_gpt2(monkeypatch):
    pytest.importorskip('tiktoken')
    cache = os.path.join(PREP_DATA, 'tiktoken_cache')
    if 'TIKTOKEN_CACHE_DIR' not in os.environ and os.path.isdir(cache):
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', os.path.abspath(cache))
    try:
        return flat_tokenizer.make_tokenizer('gpt2')
    except OSError as e:
        pytest.skip(f"GPT-2's table is not here: {e}")


PREP_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def prep_toy_bpe(pattern=PREP_WORDS):
    """A BPE with a few merges, without a download."""
    pytest.importorskip('tiktoken')
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b' a', b'th', b'the', b' the', b'\n ', b'\n  ', b'12', b'  ', b'\n\n']
    ranks = ''.join(f'{base64.b64encode(token).decode()} {i}\n' for i, token in enumerate(tokens))
    return flat_tokenizer.TiktokenTokenizer('toy', pattern, {'<|endoftext|>': len(tokens)}, ranks)


def prep_ids(folder, split, dtype='<u2'):
    return np.fromfile(os.path.join(folder, f'{split}.bin'), dtype)


def of_split(split, documents):
    """The documents of a split if val_fraction is 0.1."""
    return [document for n, document in enumerate(documents) if (n % 10 == 1) == (split == 'val')]


def save_tokenizer(tok, folder='tok'):
    """Writes a JsonTokenizer's files as they are published."""
    os.makedirs(folder, exist_ok=True)
    Path(folder, 'tokenizer.json').write_text(tok.source, 'utf-8')
    Path(folder, 'tokenizer_config.json').write_text(json.dumps(tok.config), 'utf-8')


def prep_source(*texts):
    """A Source of these documents. A single document ends with the validation text."""
    return prepare.Source('x', 'x', lambda: ([text] for text in texts))


# pieces and processes ---------------------------------------------------------------------------------------
def prep_patterns():
    openai_public = pytest.importorskip('tiktoken_ext.openai_public')
    with pytest.MonkeyPatch.context() as monkey:         # the package has the patterns, not the tables
        monkey.setattr(openai_public, 'load_tiktoken_bpe', lambda *a, **k: {})
        monkey.setattr(openai_public, 'data_gym_to_mergeable_bpe_ranks', lambda *a, **k: {})
        return {name: openai_public.ENCODING_CONSTRUCTORS[name]()['pat_str']
                for name in ('gpt2', 'cl100k_base', 'o200k_base')}


DEEPSEEK_SPLIT = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                  r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
UPPER, LOWER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
CASED_SPLIT = (rf'[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}'
               r'| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+')


@functools.lru_cache(maxsize=1)
def tok_texts():
    """400 KB of code, Chinese, emoji, digits, spaces and rare characters."""
    rng = random.Random(0)
    code = ''.join((ROOT / name).read_text(encoding='utf-8')
                   for name in ('train.py', 'sample.py', 'bench.py'))
    chinese = '，'.join(''.join(chr(rng.randrange(0x4e00, 0x4f50)) for _ in range(7)) for _ in range(400))
    odd = ('\U0001f600👩\u200d👩\u200d👧🇩🇪 e\u0301 é ﬁ ½ ǅ \u200d \ufeff \u00a0\u3000 '
           '１２３ ⅷ ' * 40
           + "It's WE'LL they'Ve don't\u2019s " * 20 + '\n\n \n\t\t  \r\n' * 60)
    digits = ' '.join(str(rng.randrange(10**rng.randrange(1, 12))) for _ in range(2000))
    return [code, chinese, odd, digits, code.upper() + chinese + code.replace('\n', '\n\n') + odd + digits]


@functools.cache
def tok_oracles():
    """name -> a tokenizer of the tokenizers library. The kinds are those of published models."""
    tk = pytest.importorskip('tokenizers')
    pre, norm, dec = tk.pre_tokenizers, tk.normalizers, tk.decoders

    def level(prefix=False, regex=True):
        return pre.ByteLevel(add_prefix_space=prefix, use_regex=regex)

    def split(pattern):
        return pre.Split(tk.Regex(pattern), 'isolated')

    def trained(pretok, normalizer=None, decoder=None, size=1100, special=('<|endoftext|>',)):
        t = tk.Tokenizer(tk.models.BPE())
        if pretok:
            t.pre_tokenizer = pretok
        if normalizer:
            t.normalizer = normalizer
        t.decoder = decoder or dec.ByteLevel()
        texts = [line for text in tok_texts()[:4]
                 for line in (text.splitlines() if pretok is None else [text])]
        alphabet = pre.ByteLevel.alphabet() if decoder is None else []
        t.train_from_iterator(texts, tk.trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False))
        return t

    found = {
        'gpt2': trained(level()), 'gpt2 prefix': trained(level(prefix=True)),
        'qwen': trained(pre.Sequence([split(flat_tokenizer.WORD_PATTERN), level(regex=False)]), norm.NFC()),
        'deepseek': trained(pre.Sequence([split(r'\p{N}{1,3}'), split('[一-龥぀-ゟ゠-ヿ]+'),
                                          split(DEEPSEEK_SPLIT), level(regex=False)])),
        'tekken': trained(pre.Sequence([split(CASED_SPLIT), level(regex=False)])),
        'falcon': trained(pre.Sequence([pre.Punctuation('contiguous'), level(), pre.Digits(False),
                                        split('[0-9][0-9][0-9]')]))}
    pieces = dec.Sequence([dec.Replace('▁', ' '), dec.ByteFallback(), dec.Fuse(), dec.Strip(' ', 1, 0)])
    llama2 = json.loads(trained(
        None, norm.Sequence([norm.Prepend('▁'), norm.Replace(' ', '▁')]), pieces, 1300,
        ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256))]).to_str())
    llama2['model'].update(byte_fallback=True, unk_token='<unk>', fuse_unk=True)
    llama2['added_tokens'] = [t for t in llama2['added_tokens'] if not t['content'].startswith('<0x')]
    found['llama2'] = tk.Tokenizer.from_str(json.dumps(llama2))
    found['llama2'].post_processor = tk.processors.TemplateProcessing('<s> $A', '<s> $A <s> $B', [('<s>', 1)])
    found['mistral'] = tk.Tokenizer.from_str(json.dumps({
        **json.loads(found['llama2'].to_str()), 'normalizer': None, 'pre_tokenizer': {
            'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'first', 'split': False}}))
    added = tk.Tokenizer.from_str(found['gpt2'].to_str())
    added.add_tokens([tk.AddedToken('hello', normalized=True), tk.AddedToken('  ', normalized=False),
                      tk.AddedToken('word', single_word=True)])
    added.add_special_tokens([tk.AddedToken('<|x|>', lstrip=True), tk.AddedToken('<|y|>', rstrip=True)])
    found['added'] = added
    path = Path(PREP_DATA, 'minimind_tokenizer/tokenizer.json')
    if path.exists():
        found['minimind'] = tk.Tokenizer.from_file(str(path))
    return found


CHAT_TEMPLATES = {
    'chatml':
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' +"
        " '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    'qwen2.5':
        "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] +"
        " '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'"
        " }}{%- endif %}{%- for m in messages %}{%- if m.role != 'system' %}{{- '<|im_start|>' + m.role +"
        " '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{-"
        " '<|im_start|>assistant\n' }}{%- endif %}",
    'qwen3':
        "{%- for m in messages %}{%- set content = m.content %}{%- if m.role == 'assistant' and"
        " '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%-"
        " endif %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}{%- if"
        " add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and"
        " enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}",
    'smollm':  # adds a system message if there is none
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are a helpful AI assistant named"
        " SmolLM, trained by Hugging Face<|im_end|>\n' }}{%- endif %}{%- for m in messages %}{{-"
        " '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}{%- if"
        " add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
    'llama3':
        "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] +"
        " '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set"
        " content = '<|begin_of_text|>' + content %}{% endif %}{{ content }}{% endfor %}{% if"
        " add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    'llama2':
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system ="
        " messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system = false %}{%"
        " endif %}{% for m in loop_messages %}{% if loop.index0 == 0 and system %}{% set content ="
        " '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}{% else %}{% set content ="
        " m['content'] %}{% endif %}{% if m['role'] == 'user' %}{{ '<s>' + '[INST] ' + content.strip() +"
        " ' [/INST]' }}{% else %}{{ ' ' + content.strip() + ' ' + '</s>' }}{% endif %}{% endfor %}",
}


TOOLS = [{'type': 'function', 'function': {'name': 'now', 'description': 'the time', 'parameters': {
    'type': 'object', 'properties': {}, 'required': []}}}]


# conversations ----------------------------------------------------------------------------------------------
CHAT_ENDS = {'llama2': '</s>', 'llama3': '<|eot_id|>'}  # others: <|im_end|>


def chat_tokenizer(template='chatml'):
    """A JsonTokenizer of bytes and special tokens, whose end of text is <|im_end|>, as in MiniMind."""
    pytest.importorskip('tokenizers')
    byte = flat_tokenizer.ByteTokenizer()
    byte.special = {text: 256 + i for i, text in enumerate([
        flat_tokenizer.EOT, '<|im_start|>', '<|im_end|>', '<s>', '</s>', '<|eot_id|>', '<|begin_of_text|>',
        '<|start_header_id|>', '<|end_header_id|>'])}
    return JsonTokenizer(to_json(byte), {
        'chat_template': CHAT_TEMPLATES[template], 'bos_token': '<s>',
        'eos_token': CHAT_ENDS.get(template, '<|im_end|>')})


# training ---------------------------------------------------------------------------------------------------
def synthetic(n, vocab_size=23, seed=0):
    """Tokens with something to learn: each determines the next, except for noise."""
    rng, out = np.random.default_rng(seed), [1]
    noise, other = rng.random(n) < 0.15, rng.integers(vocab_size, size=n)
    for i in range(n - 1):
        out.append(int(other[i]) if noise[i] else (5 * out[-1] + 3) % vocab_size)
    return np.array(out)


def write_toy(path, n=3001, dtype='uint16', vocab_size=23):
    path.mkdir(parents=True)
    synthetic(n).astype('<u2').tofile(path / 'train.bin')
    synthetic(801, seed=1).astype('<u2').tofile(path / 'val.bin')
    meta = {'vocab_size': vocab_size, 'dtype': dtype, 'eot': None, 'bytes_per_token': 2.0,
            'tokenizer': {'kind': 'char', 'chars': [chr(97 + i) for i in range(vocab_size)], 'eot': None}}
    (path / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')


TOY = ['--dataset=toy', '--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=16', '--batch_size=4',
       '--gradient_accumulation_steps=3', '--max_iters=20', '--warmup_iters=3', '--learning_rate=5e-3',
       '--eval_interval=10', '--eval_iters=5', '--device=cpu', '--dtype=float32', '--compile=False']


def run(script, *args):
    """Runs a script in this process; returns its globals."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [script, *args])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        try:
            return runpy.run_path(str(ROOT / script), run_name='__main__')
        finally:
            torch.use_deterministic_algorithms(False)
            for n, handler in handlers.items():
                signal.signal(n, handler)


def train(*args):
    return run('train.py', str(ROOT / 'config' / 'gpt2.py'), '--vocab_size=23', '--pos=rope', *TOY, *args)


def log_rows(out_dir):
    with open(os.path.join(out_dir, 'log.csv'), encoding='utf-8', newline='') as f:
        return list(csv.DictReader(f))


def torchrun(count, *command, fails=False):
    """Runs a script on `count` ranks; returns its output, or with fails the finished process."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={count}',
               *command]
    for last in (False, False, True):  # gloo sometimes aborts a rank (exit code -6)
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200,
                              env={**os.environ, 'OMP_NUM_THREADS': '1'})
        if last or 'exitcode: -6' not in done.stderr:
            break
    assert (done.returncode == 0) != fails, done.stderr[-3000:]
    return done if fails else done.stdout


def write_masks(path='data/toy', seed=0):
    """Writes masks with which some windows are all targets and some have none. Returns the mask of train."""
    masks = {}
    for split in ('val', 'train'):
        n, rng = os.path.getsize(f'{path}/{split}.bin') // 2, np.random.default_rng(seed)
        share = np.repeat(rng.choice([0, 0, 0.1, 0.5, 1], size=n // 16 + 1), 16)[:n]
        masks[split] = (rng.random(n) < share).astype(np.uint8)
        masks[split].tofile(f'{path}/{split}.mask.bin')
    return masks['train']


def write_packed(eot=22, block=16):
    """Packs conversations into data/toy, as prepare.py does. Returns [(ids, mask)]."""
    talks = [np.random.default_rng(n).integers(22, size=n) for n in (5, 8, 12, 3, 4, 2, 15, 7)]
    learnt = [(np.arange(1, 1 + len(talk)) % 7 > 2).astype(np.uint8) for talk in talks]
    for split in 'train', 'val':
        encoded = [(split, {'': ids.astype('<u2'), '.mask': mask}, 0, 0) for ids, mask in zip(talks, learnt)]
        packed = [columns for name, columns, _ in prepare.pack(
            encoded, block, np.array(eot, '<u2'), collections.Counter()) if name == split]
        for end in packed[0]:
            np.concatenate([columns[end] for columns in packed]).tofile(f'data/toy/{split}{end}.bin')
    meta = json.loads(Path('data/toy/meta.json').read_text(encoding='utf-8'))
    Path('data/toy/meta.json').write_text(json.dumps({**meta, 'eot': eot, 'block_size': block}), 'utf-8')
    return [([eot, *talk], [0, *mask]) for talk, mask in zip(talks, learnt)]


def dequantized(model):
    """The float32 model with the weights that an int8 model represents."""
    plain, state = GPT(model.config), dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, weights.Int8Linear):
            state[f'{name}.weight'] = state[f'{name}.weight'] * module.scale.float()[..., None]
    plain.load_state_dict(state)
    return plain.eval()


def bench(capsys, *args):
    """Runs bench.py; returns its output and its numbers."""
    capsys.readouterr()
    torch.set_num_threads(1)  # when tests share the machine, a second thread mostly waits
    run('bench.py', *args, '--json=True')
    *lines, last = capsys.readouterr().out.splitlines()
    return '\n'.join(lines), json.loads(last)


EVAL = ['--device=cpu', '--dtype=float32']
