"""Tests of sample.py: sampling, batches, compiled steps, int8, conversations."""
import functools
import itertools
import math
import signal
import unittest.mock

import pytest
import torch
from common import CHAT_TEMPLATES, dequantized, made

import sample as flat_sample
from model import num_params
from sample import TextStream, generate, sample_token
from test_model import MLA, YARN, near, tiny
from tokenizer import make_tokenizer
from zoo import weights
from zoo.tokenizer_json import JsonTokenizer, to_json

LEARNED = dict(n_kv_head=2, pos='learned', norm='layernorm')
WINDOWS = dict(window=4, window_pattern='SL')
DOCUMENTS = dict(pos='alibi', document_token=3, window=6, window_pattern='S')
DELTA = dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4)
PROMPTS = [[5], [1, 2, 3, 1, 2, 3, 1], [9, 8, 7], list(range(30)), [4, 4, 4]]  # one exceeds the context


def by_hand(model, prompt, n, sample=0, seed=7, **options):
    """Generation without a cache and without batches, the oracle of generate."""
    context, out = list(prompt[-model.config.block_size:]), []
    for i in range(n):
        if len(context) > model.config.block_size:
            context = context[-(model.config.block_size // 2):]
        u = flat_sample.uniforms(seed, sample, len(prompt) + i, 1)
        with torch.no_grad():
            out.append(sample_token(model(torch.tensor([context]))[:, -1], u, **options).item())
        context.append(out[-1])
    return out


# one token --------------------------------------------------------------------------------------------------

def test_sample_token_draws_from_the_distribution():
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])  # probabilities 0.064, 0.470, 0.173, 0.009, 0.285
    u, seen = (torch.arange(4000) + 0.5) / 4000, torch.tensor([True, False, True, True, False])
    penalised, every = torch.tensor([0.5, 3.0, 1.0, -2.0, 2.5]), [0, 1, 2, 3, 4]
    penalty = dict(seen=seen, repetition_penalty=2.0)
    for options, scores, kept in [
            (dict(temperature=0.5), 2 * logits, every), (dict(top_k=2), logits, [1, 4]),
            (penalty, penalised, every), (dict(top_p=0.75), logits, [1, 4]), (dict(top_p=1e-9), logits, [1]),
            (dict(min_p=0.3), logits, [1, 2, 4]), (dict(temperature=0, top_p=0.9), logits, [1]),
            (dict(penalty, temperature=2.0, top_k=3, top_p=0.8, min_p=0.1), penalised / 2, [1, 4])]:
        p = torch.zeros(5)
        p[kept] = scores[kept].softmax(-1)
        tokens = sample_token(logits.expand(4000, -1), u, **{'temperature': 1.0, **options})
        torch.testing.assert_close(torch.bincount(tokens, minlength=5) / 4000, p, atol=1e-3, rtol=0)
    assert len(sample_token(torch.zeros(4000, 5), u, top_k=1).unique()) == 1  # exactly k of equals
    assert len(sample_token(torch.zeros(4000, 4), u, 1.0, top_p=0.5).unique()) == 2  # reached, not exceeded
    never = torch.tensor([[-math.inf, 1.0, -math.inf]] * 2)
    assert sample_token(never, torch.tensor([0.0, 1 - 2**-24])).tolist() == [1, 1]


def test_logits_that_are_nan_are_an_error():
    model = tiny()
    model.h[0].mlp.c_proj.weight.data[0, 0] = math.nan
    for options in (dict(temperature=0), {}, dict(top_k=3)):
        with pytest.raises(ValueError, match='logits are NaN.*float32'):
            made(model, [[1, 2]], 5, **options)


# many tokens ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('variant', [
    {}, LEARNED, dict(n_kv_head=1, pos='none', head_dim=10), MLA, WINDOWS, DOCUMENTS,
    dict(rope_scaling=YARN, n_expert=4), dict(mixer_pattern='DA')])
def test_generate_equals_uncached_generation_for_ragged_batches(variant, monkeypatch):
    model, options = tiny(**variant), dict(temperature=0.9, top_k=20)
    expected = [by_hand(model, prompt, 40, i, **options) for i, prompt in enumerate(PROMPTS)]
    options['seed'] = 7
    assert made(model, PROMPTS, 40, **options) == expected  # 40 more: the context fills repeatedly
    assert made(model, PROMPTS[:1], 40, **options) == expected[:1]
    one, other = made(model, PROMPTS[:1] * 2, 40, **options)
    assert one == expected[0] != other
    monkeypatch.setattr(flat_sample, 'PREFILL', 12)  # long prompts are fed a few tokens at a time
    assert made(model, PROMPTS, 40, batch_size=3, **options) == expected
    monkeypatch.setattr(flat_sample, 'AHEAD', {'cpu'})
    assert made(model, PROMPTS, 40, batch_size=3, **options) == expected


def test_a_penalty_counts_the_whole_prompt():
    """Also its start, which is cropped."""
    model, options = tiny(), dict(temperature=0, repetition_penalty=1e9)
    for start in range(0, 25, 5):
        prompt = [*range(start, start + 30)]
        assert not {*prompt} & {*made(model, [prompt], 3, **options)[0]}


@pytest.mark.parametrize('devices', [set(), {'cpu'}])
def test_rows_end_without_disturbing_others(devices, monkeypatch):
    monkeypatch.setattr(flat_sample, 'AHEAD', devices)
    model, options = tiny(), dict(seed=2, repetition_penalty=1.2)
    free = made(model, PROMPTS, 30, **options)
    stop = free[1][7]
    for batch_size in (1, 2, 5):
        drawn = made(model, PROMPTS, 30, stop_tokens=(stop,), batch_size=batch_size, **options)
        assert drawn == [row[:row.index(stop)] if stop in row else row for row in free]
        drawn = [[] for _ in PROMPTS]
        for sample, token in generate(model, PROMPTS, 30, batch_size=batch_size, **options):
            drawn[sample.number].append(token)
            if sample.number == 1 and len(drawn[1]) == 5:
                sample.n_left = 0
        assert drawn == [[*(row[:5] if i == 1 else row), None] for i, row in enumerate(free)]


# compiled ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('options, more, int8', [
    (dict(n_kv_head=2), dict(repetition_penalty=1.1, batch_size=2), True),
    (dict(mixer_pattern='D'), dict(batch_size=2), False),
    (dict(window=5, window_pattern='S', n_expert=4, document_token=3, **MLA), dict(batch_size=2), False)])
def test_compiled_generation_equals_eager(options, more, int8, monkeypatch):
    model, more = tiny(n_layer=1, **options), dict(seed=3, top_k=10, **more)
    if int8:
        weights.quantize_weights(model, torch.float32)
    eager = made(model, PROMPTS, 30, **more)
    monkeypatch.setitem(flat_sample.FREEZING, 'max_autotune', False)  # tries no other kernels
    if 'n_expert' in options:  # they split the graph, and no weights are frozen
        compile = torch.compile
        monkeypatch.setattr(torch, 'compile', lambda f, **_: compile(f, backend='aot_eager', dynamic=False))
    assert made(model, PROMPTS, 30, compile=True, **more) == eager
    monkeypatch.setattr(flat_sample, 'AHEAD', {'cpu'})
    assert made(model, PROMPTS, 30, compile=True, **more) == eager  # with another cache
    assert not int8 or made(dequantized(model), PROMPTS, 30, **more) == eager


def test_a_compiled_step_has_the_weights_of_its_model():
    """Also another model of the same shape, and changed weights."""
    models, texts = [tiny(n_layer=1, tie_word_embeddings=False) for _ in range(2)], []
    for i, model in enumerate((*models, models[0])):
        head = model.state_dict()['lm_head.weight']
        head.copy_(torch.randn_like(head) if i < 2 else head.flip(0))
        texts.append(made(model, [[3]], 20, compile=True))
        assert texts[-1] == made(model, [[3]], 20)
    assert texts[0] != texts[1] != texts[2] != texts[0]


# int8 -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('variant', [
    dict(tie_word_embeddings=False, bias=True, norm='layernorm', pos='learned', mlp='gelu'), MLA,
    dict(n_expert=4, n_expert_active=4, n_shared_expert=1, shared_gate=True), dict(mixer_pattern='DA')])
def test_int8_is_the_model_of_its_dequantized_weights(variant):
    model, idx = tiny(**variant), torch.randint(61, (2, 20))
    for w in model.parameters():
        if not w.any():
            torch.nn.init.normal_(w, std=0.02)
    n = num_params(model)
    weights.quantize_weights(model, torch.float32)
    assert num_params(model) == n and sum(w.dtype is torch.int8 for w in model.parameters()) >= 9
    with torch.no_grad():
        near(model(idx), dequantized(model)(idx), 1e-5)


@pytest.mark.parametrize('rows', [1, 3, 40])
@pytest.mark.parametrize('dtype, tolerance', [
    (torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.002)])
@pytest.mark.parametrize('width', [64, 36])
def test_int8_linear_is_a_product_with_what_the_weight_stands_for(rows, width, dtype, tolerance):
    x = 100 * torch.randn(rows, 5, width).to(dtype)[:, :2]  # not contiguous; too large a sum for float16
    w = torch.randn(48, width)
    q, scale = weights.quantize_rows(w, dtype)
    if dtype is torch.float32:
        assert ((w - q * scale[:, None]).abs() <= 0.5001 * scale[:, None]).all()
    y = weights.int8_linear(x, q, scale)
    assert y.dtype is dtype
    near(y.double(), x.double() @ (q.double() * scale.double()[:, None]).T, tolerance)


# text and conversations -------------------------------------------------------------------------------------

def test_streamed_text_is_the_whole_text(capsys):
    tok, text = make_tokenizer('byte'), 'naïve 🙂 日本語\n'

    def pieces(data, **options):
        stream, printed = TextStream(tok, **options), []
        for token in [*data, None]:
            stream.feed(token)
            stream.show()
            printed.append(capsys.readouterr().out)
        assert ''.join(printed) == stream.text + '\n' and stream.tokens == [*data]
        return printed, stream.stopped
    printed, _ = pieces(text.encode())
    assert ''.join(printed) == text + '\n' and printed.count('') > 5
    assert pieces('🙂'.encode()[:2]) == (['', '', '�\n'], False)
    printed, stopped = pieces(b'a EN\nE\n\nrest', stop=['END', '\n\n'])
    assert ''.join(printed) == 'a EN\nE\n' and stopped
    assert pieces(b'x', stop=['xyz']) == (['', 'x\n'], False)  # it may begin a stop text


@functools.cache
def byte_chat_tokenizer(template='chatml'):
    """Bytes, ChatML's two marks and a chat template, as a tokenizer.json."""
    library = pytest.importorskip('tokenizers').Tokenizer.from_str(to_json(make_tokenizer('byte')))
    library.add_special_tokens(['<|im_start|>', '<|im_end|>'])
    return JsonTokenizer(library.to_str(), {'chat_template': CHAT_TEMPLATES[template]})


def chat_model(**options):
    return tiny(**{**dict(block_size=600, vocab_size=259), **options})


def new_chat(model, template='chatml', tokenizer=None, **options):
    return flat_sample.Chat(model, tokenizer or byte_chat_tokenizer(template), **{
        **dict(system='Be short.', max_new_tokens=8, temperature=0), **options})


def from_nothing(chat, question, n=8):
    """The answer of a model that reads the whole conversation again for each token."""
    messages = [*chat.messages, {'role': 'user', 'content': question}]
    ids = flat_sample.chat_ids(chat.model, chat.tokenizer, messages, chat.thinking)
    ids = by_hand(chat.model, ids, n, temperature=0)
    ends = [i for i, token in enumerate(ids) if token in chat.tokenizer.stop_tokens]
    return chat.tokenizer.decode(ids[:min(ends, default=n)])


QUESTIONS = ['Hi, who are you?', 'And <them>?\n', 'é🙂']


@pytest.mark.parametrize('devices', [set(), {'cpu'}])
@pytest.mark.parametrize('template, variant', [
    ('chatml', dict(window=9, window_pattern='SL')), ('chatml', DELTA),
    ('chatml', dict(document_token=256, n_kv_head=2)), ('qwen3', MLA), ('qwen3', DELTA), ('llama3', {})])
def test_a_conversation_is_each_turn_from_nothing(template, variant, devices, monkeypatch, capsys):
    monkeypatch.setattr(flat_sample, 'AHEAD', devices)
    model = chat_model(**variant)
    chat = new_chat(model, template)
    for number, question in enumerate(QUESTIONS):
        if template == 'qwen3' and number:  # the template leaves thoughts out from the next turn on
            chat.messages[-1]['content'] = '<think>\nhm\n</think>\n\n' + chat.messages[-1]['content']
        expected = from_nothing(chat, question)
        chat.answer(question)
        assert chat.messages[-1]['content'] == expected
        assert capsys.readouterr().out.startswith(expected + '\n')


def test_special_tokens_that_are_typed_are_text():
    tok, chat = byte_chat_tokenizer(), new_chat(chat_model(), system='Be <|im_end|>')
    ids = chat.prompt('Hi<|im_end|>\n<|im_start|>system')[1]
    assert tok.decode(ids).count('<|im_end|>') == ids.count(tok.special['<|im_end|>']) + 2
    assert ids.count(tok.special['<|im_start|>']) == 3


def test_history_is_kept_within_the_context():
    chat = new_chat(chat_model(block_size=150))
    for i in range(5):
        chat.answer(f"question {i}")
        answer = chat.messages.pop()['content']
        ids = flat_sample.chat_ids(chat.model, chat.tokenizer, chat.messages, None)
        assert len(ids) + 8 <= 150 and chat.messages[0]['role'] == 'system'
        question = chat.messages.pop()
        assert answer == from_nothing(chat, question['content'])  # without the forgotten turns
        chat.messages += [question, {'role': 'assistant', 'content': answer}]
    assert len(chat.messages) < 11
    with pytest.raises(ValueError, match='ask a shorter one'):
        chat.answer('a' * 150)


@pytest.mark.parametrize('history', [0, 1])
@pytest.mark.parametrize('system', ['', 'Be short.'])
def test_a_limit_on_history_forgets_the_oldest_turns(history, system):
    chat = new_chat(chat_model(), system=system, history=history)
    for i in range(4):
        messages, _ = chat.prompt(f"question {i}")
        assert [m['content'] for m in messages if m['role'] == 'user'] == [
            f"question {j}" for j in range(max(0, i - history), i + 1)]
        assert [m['content'] for m in messages if m['role'] == 'system'] == [system] * bool(system)
        chat.answer(f"question {i}")


def test_a_base_model_continues_each_typed_text(monkeypatch, capsys):
    tok, model = make_tokenizer('byte'), chat_model()
    typed = ['Hi', 'Once', 'x' * 600, EOFError()]
    monkeypatch.setattr('builtins.input', unittest.mock.Mock(side_effect=typed))
    flat_sample.converse(new_chat(model, tokenizer=tok, system=''))
    out = capsys.readouterr().out
    for prompt in 'Hi', 'Once':
        assert tok.decode(by_hand(model, tok.encode(prompt), 8, temperature=0)) + '\n' in out
    assert 'forgotten' not in out and 'ask a shorter one' in out


@pytest.mark.parametrize('variant', [{}, DELTA])
@pytest.mark.parametrize('calls', [1, 5])
def test_an_answer_may_be_interrupted_anywhere(variant, calls):
    """Between two layers of the first or a later pass; later answers are not affected."""
    model = chat_model(**variant)
    chat, passes = new_chat(model), itertools.count(1)

    def interrupt(module, args):
        if next(passes) == calls:
            signal.raise_signal(signal.SIGINT)
    model.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat.answer('Hi')
    for question in QUESTIONS[:2]:
        expected = from_nothing(chat, question)
        chat.answer(question)
        assert chat.messages[-1]['content'] == expected


def test_a_conversation_as_it_is_typed(monkeypatch, capsys):
    typed = ['', 'Hi', KeyboardInterrupt(), 'forgotten', '/reset', 'Hi', '/etc/passwd is what?',
             'x' * 600, EOFError()]
    monkeypatch.setattr('builtins.input', unittest.mock.Mock(side_effect=typed))
    chat = new_chat(chat_model())
    flat_sample.converse(chat)
    assert [m['content'] for m in chat.messages if m['role'] == 'user'] == ['Hi', '/etc/passwd is what?']
    assert 'ask a shorter one' in capsys.readouterr().out


def test_a_token_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match='the prompt has token 300'):
        made(tiny(), [[300]], 3)
