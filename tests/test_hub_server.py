"""Tests of downloads: the scripts and huggingface_hub with a local server that answers as the hub does."""
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import ROOT, chat_tokenizer, save_tokenizer
from hub_server import TOKEN, hub

from prepare import Bins
from sample import load
from test_model import near

pytest.importorskip('huggingface_hub')
transformers = pytest.importorskip('transformers')


def publish(repo, **options):
    """Writes a small random model with a chat tokenizer."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=True)).eval()
    folder = Path('hub', repo)
    model.save_pretrained(folder, **options)
    save_tokenizer(chat_tokenizer(), folder)
    for name in 'pytorch_model.bin', 'special_tokens_map.json':
        (folder / name).write_text('{}')
    return model


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with hub('hub') as server:
        yield server


def script(server, command, **more):
    """Runs a command as users type it. Returns the finished process."""
    name, *args = shlex.split(command.removeprefix('python '))
    env = {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HOME': os.path.abspath('cache'),
           'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    return subprocess.run([sys.executable, name if name == '-c' else str(ROOT / name), *args], text=True,
                          env={**os.environ, **env, **more}, capture_output=True, input='Hello?\n')


def downloaded():
    return {path.name for path in Path('cache').rglob('snapshots/*/*')}


@torch.no_grad()
def test_the_printed_commands_lead_to_a_conversation(server):
    """Each command, with flags that shorten it, from the hub or without a network from the cache. The model
    has several files, and needs a token."""
    theirs = publish('us/tiny', max_shard_size='20KB')
    server.gated = {'us/tiny'}
    chat = [{'role': 'user', 'content': 'Hello?'}, {'role': 'assistant', 'content': 'Hello.'}]
    Path('chats.jsonl').write_text('\n'.join([json.dumps({'messages': chat})] * 20))
    described = script(server, 'zoo/hub.py us/tiny', HF_TOKEN=TOKEN).stdout
    ours, tokenizer, _ = load(re.search('^folder: (.*)', described, re.M)[1])
    idx = torch.arange(40).view(2, 20)
    near(ours(idx), theirs(idx).logits)
    assert downloaded() == {*os.listdir('hub/us/tiny')} - {'pytorch_model.bin'}
    commands = [line.strip() for line in described.partition('next:\n')[2].splitlines()]
    assert [line.split()[1] for line in commands] == ['sample.py', 'prepare.py', 'train.py', 'sample.py']
    short = {'sample.py': '--max_new_tokens=9 --device=cpu', 'prepare.py': '--procs=1',
             'train.py': '--device=cpu --max_iters=2 --eval_iters=1 --batch_size=2 --compile=False'}
    for n, command in enumerate(commands):
        done = script(server, f'{command} {short[command.split()[1]]}', HF_TOKEN=TOKEN,
                      HF_HUB_OFFLINE=str(n // 2))
        assert done.returncode == 0, f'{command}\n{done.stderr}'
    bins = Bins('data/mine', 'train')
    learned = tokenizer.decode(bins.shards[0][bins.columns['.mask'][0] > 0])
    assert bins.meta['packed'] == 64 and {*learned.split('<|im_end|>')} == {'Hello.', ''}
    tuned, tokenizer, checkpoint = load('out-mine')
    assert checkpoint['iter_num'] == 2 and checkpoint['family'] == 'llama' and tokenizer.chat_template
    assert 0 < (tuned.wte.weight - ours.wte.weight).abs().max() < 1


def test_a_tokenizer_is_downloaded_without_its_model(server):
    """The model may be unsupported."""
    publish('us/words')
    Path('hub/us/words/config.json').write_text('{"model_type": "rwkv"}')
    Path('my.txt').write_text('abc ' * 200)
    done = script(server, 'prepare.py my.txt --tokenizer=us/words --procs=1')
    assert done.returncode == 0, done.stderr
    assert bytes(Bins('data/my_words', 'train').shards[0][:8].astype('u1')) == b'abc abc '
    assert downloaded() == {*os.listdir('hub/us/words')} - {'pytorch_model.bin', 'model.safetensors'}


FETCH = """import os, sys
from configurator import UserError
from zoo.hub import from_pretrained
for case in sys.argv[1:]:
    name, _, os.environ['HF_TOKEN'] = case.partition('=')
    try:
        from_pretrained(name)
    except Exception as error:
        print(isinstance(error, (UserError, OSError, ImportError)), ' '.join(str(error).splitlines()))
"""


def test_failing_downloads_are_reported_in_one_line(server):
    for repo in 'us/gated', 'us/lacks', 'us/pickle', 'openai-community/gpt2':
        publish(repo, max_shard_size='20KB')
    Path('hub/us/lacks/model-00002-of-00005.safetensors').unlink()
    Path('hub/us/pickle/config.json').unlink()
    Path('hub/openai-community/gpt2/config.json').write_text('{"model_type": "rwkv"}')
    server.gated = {'us/gated'}
    missing = 'us/none is not a path here, and downloading it failed: correct the name, or set HF_TOKEN'
    gated = 'us/gated is not .* accept its licence on its page at huggingface.co, and set HF_TOKEN'
    cases = {'us/none=': missing, 'us/gated=': gated, 'us/gated=x': gated,
             '../us/tiny=': "../us/tiny is not .* 'namespace/repo_name'",
             'us/lacks=': '.*/model-00002-of-00005.safetensors is missing: a model needs .* all its safeten',
             'us/pickle=': '.*/config.json is missing: a model needs config.json, .*; convert other formats',
             'gpt2=': "model_type='rwkv' is unsupported"}
    done = script(server, shlex.join(['-c', FETCH, *cases]))
    for line, expected in zip(done.stdout.splitlines(), cases.values(), strict=True):
        assert re.match(f'True {expected}', line)  # scripts print one line without a traceback
    assert not [*Path('cache/hub/models--openai-community--gpt2').rglob('*.safetensors')]
