"""Counts tokens of code, without comments and docstrings: what a reader takes in, whatever the layout.
`python .ci/size.py` prints a line a file, and ends with 1 if one is above its limit in .ci/size."""
import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENCODING, tokenize.ENDMARKER}
NOT_READ = {'config', 'data', 'examples'}  # settings, what runs write (also out*), worked examples


def tokens(source):
    """The tokens of code in a source."""
    docstrings = set()  # their lines
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(token.type not in LAYOUT and token.start[0] not in docstrings
               for token in tokenize.generate_tokens(io.StringIO(source).readline))


if __name__ == '__main__':
    limits = dict(line.split() for line in (ROOT / '.ci/size').read_text().splitlines())
    counts = {'product': 0, 'tests': 0}
    for path in sorted(ROOT.rglob('*.py')):
        name = path.relative_to(ROOT)
        if name.parts[0] not in NOT_READ and not name.parts[0].startswith(('.', 'out')):
            counts[str(name)] = tokens(path.read_text('utf-8'))
            counts['tests' if 'test' in name.parts[0] else 'product'] += counts[str(name)]
    over = []
    for name, count in counts.items():
        limit = limits.get(name) or (None if 'test' in name else limits['others'])
        print(f"{name:28} {count:7,}{f' of {int(limit):7,}' if limit else ''}")
        over += [name] if limit and count > int(limit) else []
    sys.exit(f"above its limit: {', '.join(over)}; take out, or raise .ci/size and say why" if over else 0)
