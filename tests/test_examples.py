"""Runs every file of examples/ as its users do, and compares each idea's formula with a naive loop."""
import contextlib
import re
import shutil
import sys

import common
import pytest
import torch

EXAMPLES = {path.stem: str(path) for path in sorted((common.ROOT / 'examples').glob('*.py'))}
SMALL = [*common.TOY, '--n_layer=4', '--n_head=4', '--max_iters=10', '--eval_interval=5']
OURS = {'zoo', 'lab', 'formulas', *(path.stem for path in common.ROOT.glob('*.py'))}


@contextlib.contextmanager
def fresh_modules():
    """Our modules are imported again, because an example changes them."""
    def take():
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition('.')[0] in OURS}
    kept = take()
    try:
        yield
    finally:
        take()
        sys.modules.update(kept)


def run(script, name, *args):
    with fresh_modules():
        return common.run(script, EXAMPLES[name], *args)


def train(name, *args):
    run('train.py', name, *SMALL, *args)
    return torch.load('out/ckpt.pt', weights_only=True)


@contextlib.contextmanager
def imported(name):
    """Yields the example's names and its fields of GPTConfig, with our modules changed by it."""
    with fresh_modules():
        import configurator
        found = configurator.run_file(EXAMPLES[name], {})
        yield found


@pytest.mark.parametrize('name', EXAMPLES)
def test_an_example_is_short(name):
    with open(EXAMPLES[name], encoding='utf-8') as f:
        assert len(f.readlines()) <= 80


@pytest.mark.parametrize('name', EXAMPLES)
def test_an_example_trains_resumes_and_recomputes(name, folder):
    """A resumed run and one that recomputes its blocks have the numbers of an unbroken run."""
    whole = train(name, '--dropout=0.1')
    losses = [row['loss'] for row in common.log_rows('out')]
    assert float(losses[-1]) < 3.2
    shutil.rmtree('out')
    train(name, '--dropout=0.1', '--max_iters=5', '--lr_decay_iters=10')
    resumed = train(name, '--init_from=resume', '--max_iters=10')
    assert [row['loss'] for row in common.log_rows('out')] == losses
    assert common.same_weights(resumed['model'], whole['model'])
    assert str(resumed['optimizer']) == str(whole['optimizer'])
    train(name, '--dropout=0.1', '--checkpoint_activations=True')
    assert [row['loss'] for row in common.log_rows('out')] == losses


@pytest.mark.parametrize('name', EXAMPLES)
def test_an_example_passes_the_checks(name, folder, capsys):
    """lab/check.py: caches, ragged rows, documents, gradients, dropout, updates, one compiled graph."""
    with pytest.raises(SystemExit) as end:
        run('lab/check.py', name)
    printed = capsys.readouterr().out
    assert not end.value.code, printed
    assert 'check_cache' in printed


@pytest.mark.parametrize('name', EXAMPLES)
def test_an_examples_samples_do_not_depend_on_the_cache(name, folder):
    train(name)
    with imported(name):
        import sample
        model, _, _ = sample.load('out')
        model.eval()
        prompt = [1, 5, 9]
        drawn = [token for _, token in sample.generate(model, [prompt], 12, temperature=0)][:-1]
        for i, token in enumerate(drawn):
            logits = model(torch.tensor([prompt + drawn[:i]]))[0, -1]
            assert logits[token] > logits.max() - 1e-4


@pytest.mark.parametrize('name', EXAMPLES)
def test_an_examples_flops_are_counted(name, folder):
    """Next to torch's count of matrix products, 3 times the forward pass."""
    from torch.utils.flop_counter import FlopCounterMode
    train(name, '--max_iters=0')
    with imported(name):
        import model as flat
        import sample
        model, _, _ = sample.load('out')
        length = model.config.block_size
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            model(torch.zeros(1, length, dtype=torch.long))
        assert flat.num_params(model) == sum(w.numel() for w in model.parameters())
        ours = flat.flops_per_token(model) * length
        assert 3 * counter.get_total_flops() == pytest.approx(ours, rel=0.1)


STANDARD = {'label_smoothing'}  # the trained model is a usual one


@pytest.mark.parametrize('name', EXAMPLES)
def test_an_example_is_not_exported_as_something_else(name, folder):
    train(name, '--max_iters=1', '--eval_interval=1')
    with pytest.raises(ValueError) if name not in STANDARD else contextlib.nullcontext() as error:
        run('zoo/hub.py', name, 'export', 'out', 'mymodel')
    assert not error or re.search('mixer_pattern|mlp=|has no|parameter|tensor', str(error.value))
    if error:  # without the example, the checkpoint does not load
        with fresh_modules(), pytest.raises(ValueError):
            import sample
            sample.load('out')
