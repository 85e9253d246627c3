"""Tests of zoo/weights.py: adapters and int8 weights."""
import functools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from common import chat_tokenizer, log_rows, run, same_weights, save_tokenizer, train

import model as flat
from sample import load
from test_model import MLA, feed, near, tiny, tokens
from train import sequence_indices
from zoo import weights


@pytest.mark.parametrize('options, targets', [
    ({**MLA, 'q_lora_rank': 8}, ['attn.c_attn', 'c_q', 'c_kv', 'attn.c_proj']),  # c_kv is read, never called
    (dict(n_expert=4, n_shared_expert=1, d_expert=8), ['router', 'shared.c_fc', 'c_attn']),
    (dict(mixer_pattern='DA'), ['c_attn', '1.attn.c_proj', 'c_proj'])], ids=str)
def test_adapters_start_as_nothing_and_merge_into_the_weights(options, targets):
    model = tiny(**options)
    idx = tokens(model, 2, 16)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    logits = model(idx).detach()
    with pytest.raises(ValueError, match="'q_proj' is not the name of linear layers.* attn.c_attn"):
        weights.add_lora(model, 3, 6.0, [*targets, 'q_proj'])
    weights.add_lora(model, 3, 6.0, targets)
    assert torch.equal(model(idx), logits)
    adapters = {name: w for name, w in model.state_dict().items() if '.lora_' in name}
    assert {name for name, w in model.named_parameters() if w.requires_grad} == set(adapters)
    for name, w in adapters.items():  # as PEFT: A has this deviation, B is zero
        assert w.std().item() == pytest.approx((3 * w.shape[1]) ** -0.5 * name.endswith('a'), rel=0.6)
        w += torch.randn_like(w) * 0.1
    model(idx, idx)[0].backward()
    assert all((w.grad is not None and bool(w.grad.any())) == w.requires_grad for w in model.parameters())
    expected = model(idx).detach()
    near(feed(model, idx, [9, 1, 6], model.make_cache(2, 16)).detach(), expected, 2e-5)
    for name, a in adapters.items():
        if name.endswith('lora_a'):  # W + alpha / rank * B A
            before[name.removesuffix('lora_a') + 'weight'] += 6 / 3 * adapters[name[:-1] + 'b'] @ a
    weights.merge_lora(model)
    torch.testing.assert_close(dict(model.state_dict()), before, atol=1e-6, rtol=1e-5)
    assert (expected - logits).abs().max() > 0.01
    near(model(idx), expected, 2e-5)


# fine-tuning ------------------------------------------------------------------------------------------------

TUNE = """
dataset = 'mine'
batch_size = 2
gradient_accumulation_steps = 3
max_iters = 10
learning_rate = 3e-3
beta2 = 0.98
weight_decay = 0.2
grad_clip = 0.5
warmup_iters = 0
decay_lr = False
eval_interval = 10
eval_iters = 1
device = 'cpu'
dtype = 'float32'
compile = False
lora_alpha = 8.0
"""
SHARED = {  # our linear layer -> theirs, which share lora_a
    'attn.c_attn': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'],
    'attn.c_proj': ['self_attn.o_proj'], 'mlp.c_fc': ['mlp.gate_proj', 'mlp.up_proj'],
    'mlp.c_proj': ['mlp.down_proj']}


def add_peft(model, adapters, scale):
    """Freezes a model of transformers and adds adapters as PEFT does: y + scale * B(A(x)), B = 0. adapters:
    ours. Returns the trained tensors."""
    model.requires_grad_(False)
    params = []
    for name, a in adapters.items():
        if name.endswith('lora_a'):
            a = torch.nn.Parameter(a.clone())
            params.append(a)
            _, layer, part = name.removesuffix('.lora_a').split('.', 2)
            for their in SHARED[part]:
                module = model.get_submodule(f'model.layers.{layer}.{their}')
                b = torch.nn.Parameter(torch.zeros(module.out_features, len(a)))
                module.register_forward_hook(functools.partial(lambda module, args, y, a, b: (
                    y + scale * (args[0] @ a.T @ b.T)), a=a, b=b))
                params.append(b)
    return params


@pytest.mark.parametrize('rank', [0, 4])
def test_fine_tuning_equals_a_loop_with_transformers(rank, tmp_path, monkeypatch):
    """Conversations of different lengths give micro-batches with different numbers of targets. The loop has
    one batch per step, labels of -100, the mean over all others as loss, and a mask for conversations."""
    transformers = pytest.importorskip('transformers')
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128)).bfloat16()
    theirs.save_pretrained('theirs')
    theirs.float()
    save_tokenizer(chat_tokenizer(), 'theirs')
    draw = random.Random(0)
    chats = [[{'role': role, 'content': ''.join(draw.choices('abc ', k=draw.randrange(1, 40)))}
              for role in ('user', 'assistant') * draw.randrange(1, 3)] for _ in range(60)]
    Path('chats.jsonl').write_text('\n'.join(json.dumps({'messages': chat}) for chat in chats))
    run('prepare.py', 'chats.jsonl', '--tokenizer=./theirs', '--out=mine', '--block_size=64', '--procs=1')
    Path('tune.py').write_text(TUNE)
    args = ['train.py', 'tune.py', '--init_from=theirs', '--block_size=64', f'--lora_rank={rank}']
    params = [*theirs.train().parameters()]
    if rank:
        run(*args, '--out_dir=start', '--max_iters=1', '--learning_rate=0')
        params = add_peft(theirs, torch.load('start/ckpt.pt')['model'], 8 / rank)
    opt = torch.optim.AdamW([{'params': [w for w in params if w.ndim > 1], 'weight_decay': 0.2},
                             {'params': [w for w in params if w.ndim < 2], 'weight_decay': 0}],
                            lr=3e-3, betas=(0.9, 0.98))
    ours = run(*args, '--out_dir=out')['model'].eval()
    ids, mask = (torch.from_numpy(np.fromfile(f'data/mine/train{end}', dtype).astype(np.int64))
                 for end, dtype in (('.bin', '<u2'), ('.mask.bin', 'u1')))
    first, expected = ours.config.document_token, []
    for it in range(10):
        places = torch.from_numpy(sequence_indices(6 * it, 6, (len(ids) - 1) // 64, 1337))
        places = places[:, None] * 64 + torch.arange(65)
        idx, labels = ids[places], ids[places].where(mask[places] > 0, -100)
        document = (idx == first).cumsum(1)
        visible = (document[:, None, :, None] == document[:, None, None]) & torch.ones(65, 65).tril().bool()
        loss = theirs(input_ids=idx, labels=labels,
                      attention_mask=torch.zeros(visible.shape).masked_fill(~visible, -1e9)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        opt.zero_grad()
        expected.append(loss.item())
    assert [float(row['loss']) for row in log_rows('out')] == pytest.approx(expected, abs=1e-5)
    assert expected[0] - expected[-1] > 0.05
    run('zoo/hub.py', 'export', 'out', 'copy')
    merged = transformers.AutoModelForCausalLM.from_pretrained('copy')
    with torch.no_grad():
        near(merged(idx).logits, theirs.eval()(idx).logits)
    if rank:
        other = transformers.LlamaForCausalLM.from_pretrained('theirs')
        other.model.embed_tokens.weight.data[3] *= 2  # the blocks are the same
        other.save_pretrained('theirs')
        with pytest.raises(ValueError, match='trained on other weights than those in'):
            load('out')
        checkpoint = torch.load('out/ckpt.pt')
        lora = checkpoint['lora']
        lora['base_checksum'] = lora.pop('checksum')  # an older version summed only the blocks
        torch.save(checkpoint, 'out/ckpt.pt')
        load('out')


def test_adapters_find_a_base_that_has_moved(folder):
    train('--out_dir=old/base', '--max_iters=2')
    ended = train('--out_dir=old/lora', '--init_from=old/base', '--lora_rank=2', '--max_iters=2')
    os.rename('old', 'new')

    def check():
        assert same_weights(load('new/lora', merge=False)[0].state_dict(), ended['model'].state_dict())
    check()
    os.rename('new/base', 'base')
    place = 'put the base model, or a link to it, at new/lora/base'
    missing = r'new/lora/ckpt.pt has adapters for .*/old/base/ckpt.pt, .* missing \(no checkpoint at .*: '
    with pytest.raises(FileNotFoundError, match=missing + place):
        load('new/lora')
    os.rename('base', 'new/lora/base')
    check()
    run('train.py', '--out_dir=new/lora', '--init_from=resume', '--max_iters=3')
    older = torch.load('new/lora/ckpt.pt')
    del older['lora']['folder']
    older['lora']['base_checksum'] = older['lora'].pop('checksum')
    os.mkdir('new/older')
    os.symlink('../lora/base', 'new/older/base')
    torch.save(older, 'new/older/ckpt.pt')
    load('new/older')
    train('--out_dir=new/lora/base', '--max_iters=2', '--seed=2')
    for adapters in 'new/lora', 'new/older':
        with pytest.raises(ValueError, match='trained on other weights than those in .*/base/ckpt.pt'):
            load(adapters)
    del older['lora']['base_checksum']  # the oldest
    torch.save(older, 'new/older/ckpt.pt')
    load('new/older')


class Outward(flat.Attention):
    def forward(self, x, context):  # reads a weight
        return super().forward(x, context) + x @ self.c_proj.weight.type_as(x)


def test_a_mixer_that_reads_a_weight_fails_in_8_bits(monkeypatch):
    monkeypatch.setitem(flat.MIXERS, 'O', Outward)
    model = tiny(mixer_pattern='O')
    idx = tokens(model, 2, 12)
    model(idx)
    weights.quantize_weights(model, torch.float32)
    with pytest.raises(TypeError, match='int8: call its layer'):
        model(idx)
