"""
Conversations about Python's library: questions about its modules, classes and functions, answered by their
docstrings. config/chat.py fine-tunes on them.

    python prepare.py examples/pydoc_chat.py  # writes data/pydoc_chat

The data are an entry of SOURCES.
"""
import ast
import itertools
import platform
import random
import re
import sysconfig
from pathlib import Path

from prepare import Conversation, Source, library_files, to_messages

source = 'pydoc_chat'

NOT_ASKED = {'antigravity', 'distutils', 'encodings', 'ensurepip', 'idlelib', 'lib2to3', 'msilib', 'ntpath',
             'nturl2path', 'site', 'this', 'tkinter', 'turtle', 'turtledemo', 'venv'}
ANSWER = 120  # characters at most
FUNCTION = 'What does {} do?', 'Explain {}.', 'What is {} for?'
WORDINGS = {ast.Module: ('What is the module {} for?', 'Explain the module {}.', 'What is {}?'),
            ast.ClassDef: ('What is {}?', 'Explain {}.', 'What is {} for?'),
            ast.FunctionDef: FUNCTION, ast.AsyncFunctionDef: FUNCTION}


def library_docs():
    """(name, wordings, docstring, arguments) of modules, classes and functions."""
    stdlib = sysconfig.get_path('stdlib')
    for path in map(Path, library_files()):
        parts = path.with_suffix('').relative_to(stdlib).parts
        if not NOT_ASKED.intersection(parts):
            module = '.'.join(parts).removesuffix('.__init__').replace('posixpath', 'os.path')
            tree = ast.parse(path.read_bytes())
            for node in tree, *tree.body:
                if wordings := WORDINGS.get(type(node)):
                    name = module if node is tree else f'{module}.{node.name}'
                    arguments = ast.unparse(node.args) if hasattr(node, 'args') else ''
                    yield name, wordings, ast.get_docstring(node), arguments


def summary_of(doc):
    """A docstring's first sentence, or None if it is too long."""
    for paragraph in re.split(r'\n\s*\n', doc or ''):
        text = ' '.join(paragraph.split())
        if not re.match(r'[\w.]+\(', text):  # not a signature
            text = re.split(r'(?<=[.!?])\s+(?=[A-Z])', text)[0].rstrip(':.') + '.'
            return text if text[0].isalpha() and ' ' in text and len(text) <= ANSWER else None
    return None


def pydoc_chats():
    """Conversations about one to three names. Each name is in at least two questions, so most answers in
    validation also occur in training."""
    talks = []
    order = random.Random(0)
    for n, (name, wordings, doc, arguments) in enumerate(library_docs()):
        summary = summary_of(doc)
        if summary and not re.search(r'\b_|-', name):
            first, *others = [wording.format(name) for wording in wordings]
            talks += [[[first, summary]], [[others[n % 2], summary]]]
            if 0 < len(arguments) < ANSWER // 2:
                call = f'{name}({arguments})'
                talks[-2] += [['What arguments does it take?', call]] * (n % 3 == 0)
                talks.append([[f'What arguments does {name} take?', call]])
    order.shuffle(talks)
    talks = iter(talks)
    while group := [*itertools.islice(talks, order.randint(1, 3))]:
        yield Conversation('pydoc_chat', to_messages([*itertools.chain(*group)]))


SOURCES = {source: Source(source, f'{source} {platform.python_version()}', pydoc_chats, chats=True)}
