"""
Runs the commands of documents as printed, and compares their output with the output that the documents print.

    python .ci/documents.py FOLDER README.md docs/benchmarks.md

Runs the commands in code blocks, not those in sentences and tables. Works in FOLDER/flatgpt, a new clone of
the last commit, with the packages of .ci/run and without a network. FOLDER/inputs has the files that a user
brings or downloads; the script copies them into the clone. A local server offers FOLDER/hub/<owner>/<name>/
instead of huggingface.co. Commands and printed lines get a sign:

    =  The command succeeded. The line is in the output of its block, or of the block before it.
    ~  The line is in the output, but with other digits; the line of the output follows.
    !  The command failed, or the line is not in the output.
    -  The command was not run; the reason follows.
"""
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tests'))
from hub_server import hub

SKIPPED = {
    r'git clone https': 'needs a network; copy the repository to FOLDER/nanoGPT',
    r'git clone|python3 -m venv|pip install|bash \.ci/run': 'the continuous integration installs as printed',
    r'torchrun|fineweb_edu|srun|#!|--rdzv|train.py config/small': 'needs GPUs',
    r'\S+ ?\S* config/minimind|pydoc_chat --tokenizer=minimind': 'needs an hour',
}


def run(commands, folder, env):
    """Runs commands in one shell, up to the first failure. Returns their output and whether all succeeded."""
    start = time.time()
    done = subprocess.run(['bash', '-euc', '\n'.join(commands)], cwd=folder, env=env, text=True, input='Hi\n',
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print('!' if done.returncode else '=', f'{time.time() - start:6.1f} s', '\n            '.join(commands))
    print(done.stdout[-2000:] if done.returncode else '', end='', flush=True)
    return done.stdout, done.returncode == 0


def compare(line, output):
    """Prints a printed line with its sign and, if digits differ, the line of the output. Returns the sign."""
    exact = '.*'.join(re.escape(' '.join(part.split())) for part in line.split('...'))
    lines = [' '.join(one.split()) for one in output.splitlines()]
    like = [one for one in lines if re.search(re.sub(r'\d+', r'\\d+', exact), one)]
    mark = '=' if any(re.search(exact, one) for one in like) else '~' if like else '!'
    print(mark, '         ', line, *(['\n           ', like[0]] if mark == '~' else []), flush=True)
    return mark


def document(text, folder, env):
    """Runs the blocks of a document. Returns whether all commands succeeded and all lines were found."""
    good, output = True, ''
    for language, block in re.findall(r'^ *```(\w*)\n(.*?)^ *```', text, re.M | re.S):
        lines = re.sub(r' *\\\n *', ' ', block).splitlines()
        console = any(line.startswith('$ ') for line in lines)
        commands = [line.strip().removeprefix('$ ') for line in lines if line.startswith('$ ') or not console]
        commands = [one for one in commands if language == 'sh' or console]
        if language == 'python' and block.startswith('import'):
            commands = [f'python - <<END\n{block}END']
        why = {one: [SKIPPED[key] for key in SKIPPED if re.search(key, one)] for one in commands}
        for one in filter(why.get, commands):
            print('-', one, f'({why[one][0]})')
        if commands := [one for one in commands if not why[one]]:
            output, success = run(commands, folder, env)
            good &= success
        for line in lines if not language and output else ():
            if line.strip() and not line.startswith('$ '):
                good &= compare(line, output) != '!'
    return good


def main(folder, *documents):
    folder = Path(folder).resolve()
    clone = folder / 'flatgpt'
    subprocess.run(['git', 'clone', '-q', ROOT, clone], check=True)
    subprocess.run(['cp', '-rT', folder / 'inputs', clone], check=True)
    with hub(folder / 'hub') as server:
        env = {**os.environ, 'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}',
               'HF_HOME': str(folder / 'cache'), 'TORCHINDUCTOR_CACHE_DIR': str(folder / 'inductor')}
        return sum(not document((clone / one).read_text('utf-8'), clone, env) for one in documents)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
