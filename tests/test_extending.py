"""Applies each diff of docs/extending.md to a copy of the repository, and runs the commands below it."""
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import common
import pytest
import torch
from test_examples import fresh_modules

TEXT = (common.ROOT / 'docs/extending.md').read_text('utf-8')
RECIPES = {text.partition('\n')[0]: text for text in TEXT.split('\n## ')[1:]}
PROOFS = {  # what holds after the commands; for all other recipes the loss is not the usual one
    'A parameter': "saved['model']['h.1.mlp.gain'].ne(1).any()",
    'A column of the log': "float(rows[-1]['weight_norm']) > 1",
    'A number that a run keeps': "saved['improvements'] > 0",
    'A reason to stop': "rows[-1]['iter'] == '10'",
    'A sampling option':  # only the most likely token is left
        "len({json.loads(line)['text'] for line in Path('answers.jsonl').read_text().splitlines()}) == 1",
    'A source of text': "b'9 times 9 is 81.' in Path('data/squares_byte/train.bin').read_bytes()[::2]",
    'A file format': "Path('data/notes_byte/train.bin').read_bytes()[::2].startswith(b'one cell')",
    'A tokenizer': "prepare.load_tokenizer('data/squares_lower').encode('ABC') == [97, 98, 99]",
    'A published family': "common.same_weights(sample.load('mymodel')[0].state_dict(), saved['model'])",
}


@pytest.fixture(scope='module')
def usual_loss(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp('usual'))
        common.write_toy(Path('data/toy'))
        common.run('train.py', *common.TOY)
        return common.log_rows('out')[-1]['loss']


@pytest.fixture
def copy(folder, monkeypatch):
    """Replaces the repository, also its imported modules, by a copy in the working directory."""
    ignored = shutil.ignore_patterns('.*', 'data', 'out*', 'docs', 'tests', '__pycache__')
    shutil.copytree(common.ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    monkeypatch.setattr(common, 'ROOT', folder)
    monkeypatch.syspath_prepend(folder)
    with fresh_modules():
        yield


@pytest.mark.parametrize('title', RECIPES)
def test_a_recipe_works(title, copy, usual_loss):
    for diff in re.findall('```diff\n(.*?)```', RECIPES[title], re.S):
        subprocess.run(['git', 'apply', '--recount', '--unidiff-zero'], input=diff.encode(), check=True)
    Path('squares.txt').write_text('Nine times nine is EIGHTY-ONE.\n' * 400)
    Path('notes.ipynb').write_text(json.dumps({'cells': [{'source': ['one ', 'cell\n'] * 900}]}))
    for command in re.findall('^python (.*)', RECIPES[title], re.M):
        script, *args = shlex.split(command)
        common.run(script, *args, *(common.TOY if script == 'train.py' else []))
    import prepare
    import sample
    rows = common.log_rows('out') if Path('out').exists() else []
    saved = torch.load('out/ckpt.pt', weights_only=True) if rows else {}
    names = dict(json=json, common=common, prepare=prepare, sample=sample, rows=rows, saved=saved, Path=Path)
    assert eval(PROOFS[title], names) if title in PROOFS else rows[-1]['loss'] != usual_loss
