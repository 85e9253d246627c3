"""Runs the scripts on a pretended GPU: see tests/fake_gpu.py."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import ROOT, TOY, log_rows, run, same_weights, torchrun, train

if torch.version.cuda or sys.platform != 'linux' or not shutil.which('g++'):
    pytest.skip('needs g++ and a CPU build of torch', allow_module_level=True)

FAKE = str(ROOT / 'tests' / 'fake_gpu.py')
RUN = [str(ROOT / 'config' / 'gpt2.py'), '--vocab_size=23', '--pos=rope', *TOY, '--device=auto',
       '--max_iters=6', '--eval_interval=6', '--log_interval=1', '--sample_tokens=3']
STATES = ['--n_layer=4', '--mixer_pattern=DBKC', '--linear_n_key_head=2', '--linear_n_value_head=2',
          '--linear_key_head_dim=16', '--linear_value_head_dim=16',
          '--pos=none']
VARIANTS = {  # name: (flags, largest relative difference of losses from the CPU in float32)
    'adamw': ([], 1e-5),
    'dropout': (['--dropout=0.1', '--checkpoint_activations=True', '--device=cuda'], 1e-5),
    'muon': (['--optimizer=muon', '--compile=True', '--device=cuda:1'], 1e-2),  # some CPUs lack bfloat16
    'bfloat16': (['--dtype=bfloat16', '--n_kv_head=1'], 5e-2),
    'float16': (['--dtype=float16', '--optimizer=muon'], 5e-2),
    'experts': (['--n_expert=4', '--d_expert=16', '--balance_bias=True'], 1e-5),
    'windows': (['--window=4', '--window_pattern=SLC', '--n_layer=4', '--document_token=3', '--n_kv_head=1'],
                1e-5),
    'latent': (['--kv_lora_rank=16', '--qk_nope_head_dim=8', '--qk_rope_head_dim=8', '--v_head_dim=16'],
               1e-5),
    'states': (STATES, 1e-4),
    'sinks': (['--attn_sink=True', '--attn_softcap=9', '--pos=alibi'], 1e-3),
}


def on_fake_gpu(*commands):
    """Runs commands, lists of words, in one process. Returns each output, and its waits for the GPU."""
    words = [word for command in commands for word in ['+', str(ROOT / command[0]), *command[1:]]][1:]
    done = subprocess.run([sys.executable, FAKE, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    *texts, _ = re.split(r'^waits (\d+)\n', done.stdout, flags=re.M)
    waits = [0, *map(int, texts[1::2])]
    return [(text, after - before) for text, before, after in zip(texts[::2], waits, waits[1:])]


def losses(out_dir):
    return [float(row[name]) for row in log_rows(out_dir) for name in ('loss', 'grad_norm')]


@pytest.fixture(scope='module', autouse=True)
def built():
    on_fake_gpu(['train.py', '--help'])


def test_runs_equal_the_cpus(folder):
    texts = on_fake_gpu(*(['train.py', *RUN, *flags, f'--out_dir={name}']
                          for name, (flags, _) in VARIANTS.items()))
    for (flags, _), (text, _) in zip(VARIANTS.values(), texts):
        assert f"device cuda:{int('--device=cuda:1' in flags)} (NVIDIA H100 80GB HBM3), dtype" in text
    for name, (flags, error) in VARIANTS.items():
        train(f'--out_dir={name}-cpu', '--max_iters=6', '--eval_interval=6', '--log_interval=1',
              *[flag for flag in flags if not re.match('--(dtype|compile|device)=', flag)])
        assert losses(name) == pytest.approx(losses(f'{name}-cpu'), rel=error), name


def test_a_run_is_resumed_sampled_measured_and_exported(folder):
    Path('prompts.txt').write_text('a\nabcabc\nde\n')
    sampling = ['sample.py', '--out_dir=whole', '--max_new_tokens=9', '--num_samples=1', '--dtype=float32']
    speed = ['--rounds=1', '--json=numbers.jsonl']
    on_fake_gpu(
        ['train.py', *RUN, '--out_dir=whole'],
        ['train.py', *RUN, '--out_dir=parts', '--max_iters=3', '--lr_decay_iters=6'],
        ['train.py', '--out_dir=parts', '--init_from=resume', '--max_iters=6'],
        ['train.py', *RUN, '--init_from=whole', '--lora_rank=2', '--out_dir=lora'],
        [*sampling, '--start=LINES:prompts.txt', '--batch_size=2', '--output=gpu.jsonl'],
        ['sample.py', str(ROOT / 'examples/speculation.py'), *sampling[1:], '--start=a'],
        [*sampling, '--start=a', '--quantize=int8', '--compile=True'],
        [*sampling, '--start=a', '--quantize=int8', '--dtype=float16'],
        ['bench.py', 'train', '--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=16',
         '--vocab_size=23', '--window=None', '--window_pattern=None', '--batch_size=2', '--steps=1',
         '--compile=False', '--dtype=float32', *speed],  # large products in bfloat16 are slow on some CPUs
        ['bench.py', 'decode', '--init_from=whole', '--max_new_tokens=4', '--prompt_len=3', *speed],
        ['lab/check.py', str(ROOT / 'config' / 'gpt2.py')],
        ['zoo/hub.py', 'export', 'whole', 'export'],
        [*sampling, '--init_from=export', '--start=a', '--output=export.jsonl'])
    assert losses('parts') == losses('whole')
    weights = [torch.load(f'{out}/ckpt.pt', map_location='cpu')['model'] for out in ('whole', 'parts')]
    assert same_weights(*weights)
    run('sample.py', *sampling[1:], '--start=LINES:prompts.txt', '--output=cpu.jsonl', '--device=cpu')
    assert Path('gpu.jsonl').read_text() == Path('cpu.jsonl').read_text()
    exported, own = (json.loads(Path(name).read_text().splitlines()[0])['text']
                     for name in ('export.jsonl', 'gpu.jsonl'))
    assert exported == own
    Path('export/chat_template.jinja').write_text('{% for m in messages %}{{ m.content }}{% endfor %}')
    chat = [word for word in sampling if word != '--num_samples=1']
    (text, _), = on_fake_gpu([*chat, '--init_from=export', '--start=a', '--chat'])
    assert f'> a\n{own}' in text
    speeds = [json.loads(line) for line in Path('numbers.jsonl').read_text().splitlines()]
    assert [numbers['device'] for numbers in speeds] == ['cuda:0'] * 2


def test_two_sharded_ranks_equal_one(folder):
    run = [*RUN, '--n_expert=4', '--n_expert_active=4', '--d_expert=16']
    train('--out_dir=one', *run[3 + len(TOY):], '--device=cpu')
    text = torchrun(2, FAKE, str(ROOT / 'train.py'), *run, '--backend=gloo', '--out_dir=two', '--shard=True')
    assert 'device cuda:0' in text and losses('two') == pytest.approx(losses('one'), rel=1e-4)


def test_an_iteration_and_a_token_do_not_wait(folder):
    """A logged iteration waits for skipped updates, the shared loss and two numbers of its row. A token waits
    for an event. Filling rows waits as often for six rows as for two."""
    Path('prompts.txt').write_text('a\nabc\nab\nb\nbc\nbcd\n')
    rows = ['sample.py', '--start=LINES:prompts.txt', '--max_new_tokens=2']
    run = ['train.py', *RUN, '--sample_tokens=0', '--eval_interval=99', '--out_dir=out']
    sampling = ['sample.py', '--start=a', '--num_samples=1']
    waits = [n for _, n in on_fake_gpu(
        [*run, '--log_interval=99', '--max_iters=6'], [*run, '--log_interval=99', '--max_iters=9'],
        [*run, '--log_interval=1', '--max_iters=9'], [*sampling, '--max_new_tokens=4'],
        [*sampling, '--max_new_tokens=12'], [*rows, '--num_samples=1'], [*rows, '--num_samples=3'])]
    assert waits[0] == waits[1] and waits[3] == waits[4] and waits[6] - waits[5] <= 12  # of uniforms
    assert waits[2] - waits[1] == 4 * 6  # iterations 1, 4 and 9 are logged in any case
