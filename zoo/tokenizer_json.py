"""Published tokenizers: tokenizer.json, read by the package tokenizers and written for our own."""
import functools
import json
import os
import re
from pathlib import Path

import numpy as np

from tokenizer import CUT, EOT, MARK, Tokenizer, without_surrogates

SPECIAL_TOKENS = 'bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token'


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, by the tokenizers library. source: its text; config: SPECIAL_TOKENS and chat_template
    of tokenizer_config.json, and eos_token_id, a list of all that end a text."""
    def __init__(self, source, config=None):
        self.source = source
        self.config = config or {}
        self.library = library_tokenizer(source)
        vocab = self.library.get_vocab()
        added = self.library.get_added_tokens_decoder()  # {id: AddedToken}
        special = {token.content: i for i, token in added.items() if token.special}
        super().__init__('json', token_bytes(vocab, json.loads(source)), special)
        self.chat_variables = {name: token['content'] if isinstance(token, dict) else token
                               for name in SPECIAL_TOKENS if (token := self.config.get(name))}
        self.chat_template = self.config.get('chat_template')
        self.eos_tokens = self.config.get('eos_token_id', ())
        ends = [self.chat_variables.get('eos_token'), EOT, '<|end_of_text|>', '</s>', '<|im_end|>']
        self.eot = next((vocab[end] for end in ends if end in vocab), None)
        some = self.library.encode('a')  # its post-processor, if any, puts a bos in front
        self.bos = some.ids[:[*some.special_tokens_mask, 0].index(0)]

    def encode(self, text, allow_special=True, whole=True):
        """As transformers' tokenizer(text). whole: with bos in front, unless the text begins with it, but
        without an end of text, since a prompt continues."""
        library = self.unmarking if allow_special and MARK in text else self.library
        library.encode_special_tokens = not allow_special  # the library's name for 'as plain text'
        # _fast: half the time, by not counting where in the text each token is
        encoding, = library.encode_batch_fast([without_surrogates(text)], add_special_tokens=False)
        ids = encoding.ids
        return ids if not whole or ids[:len(self.bos)] == self.bos else self.bos + ids

    @functools.cached_property
    def unmarking(self):
        """The library's tokenizer with a first step that removes MARKs, after it has found special tokens."""
        spec = json.loads(self.source)
        steps = [{'type': 'Replace', 'pattern': {'String': MARK}, 'content': ''}, spec.get('normalizer')]
        spec['normalizer'] = {'type': 'Sequence', 'normalizers': [*filter(None, steps)]}
        for token in spec['added_tokens']:
            token['normalized'] &= not token['special']
        return library_tokenizer(json.dumps(spec))

    def encode_array(self, text):
        return np.array(self.encode(text, allow_special=False, whole=False), np.uint32)

    def encode_chat(self, text):
        return self.encode(text, whole=False)

    @functools.cached_property
    def can_cut(self):
        """Whether no token reaches across a CUT, and nothing is put before each text, as by Llama 2."""
        parts = 'a', ' b', '\nc'
        return (not any(CUT.search(token.decode(errors='ignore')) for token in self.tokens.values())
                and self.encode_chat(''.join(parts)) == [i for part in parts for i in self.encode_chat(part)])

    def state(self):
        return {'kind': 'json', 'source': self.source, 'config': self.config}


def library_tokenizer(source):
    """A Tokenizer of the package tokenizers, from a file's text. Raises ValueError for a WordPiece one."""
    import tokenizers  # only these need it
    tok = tokenizers.Tokenizer.from_str(source)
    if (kind := type(tok.model).__name__) not in ('BPE', 'Unigram'):
        raise ValueError(f'unsupported model {kind}: BPE and Unigram are supported')
    tok.no_truncation()
    tok.no_padding()
    if kind == 'BPE':
        tok.model.dropout = None  # else the same text has other ids each time
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # its threads and our processes do not mix
    return tok


def token_bytes(vocab, spec):
    """{id: its bytes} of a tokenizer.json's vocabulary. Byte-level vocabularies write a character for each
    byte, except in added tokens; others U+2581 for a space, and perhaps <0x0A> for a byte without a token.
    """
    byte_level = '"ByteLevel"' in json.dumps([spec.get('pre_tokenizer'), spec.get('decoder')])
    fallback = spec['model'].get('byte_fallback')
    back = byte_chars()
    added = {token['content'] for token in spec.get('added_tokens', [])}
    tokens = {}
    for text, i in vocab.items():
        if byte_level and text not in added and all(char in back for char in text):
            tokens[i] = bytes(back[char] for char in text)
        elif fallback and re.fullmatch('<0x[0-9A-F]{2}>', text):
            tokens[i] = bytes([int(text[3:5], 16)])
        else:
            space = spec['model'].get('end_of_word_suffix') or '\u2581'
            tokens[i] = (text if byte_level else text.replace(space, ' ')).encode()
    return tokens


def json_tokenizer(path):
    """A JsonTokenizer of a tokenizer.json, or a folder with one, and of the other files in its folder."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent

    def read(name):
        """The content of a JSON file in the folder, {} if there is none."""
        file = folder / name
        return json.loads(file.read_bytes()) if file.exists() else {}
    config = read('tokenizer_config.json')
    config = {key: config[key] for key in (*SPECIAL_TOKENS, 'chat_template') if config.get(key)}
    template = folder / 'chat_template.jinja'
    if template.exists():
        config['chat_template'] = template.read_bytes().decode()
    config['eos_token_id'] = [  # which is a number, a list or null
        i for name in ('generation_config.json', 'config.json')
        for i in np.ravel(read(name).get('eos_token_id')).tolist() if i is not None]
    file = folder / 'tokenizer.json' if path.is_dir() else path
    return JsonTokenizer(file.read_bytes().decode(), config)  # as bytes: line ends stay as they are


def bpe_json(vocab, merges, patterns, special, byte_level=True):
    """A tokenizer.json, as text. patterns: each splits the pieces of the one before."""
    steps = [{'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
             for pattern in patterns]
    level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False}
    steps += [level] * byte_level
    return json.dumps({
        'version': '1.0', 'truncation': None, 'padding': None, 'normalizer': None, 'post_processor': None,
        'added_tokens': [{'id': i, 'content': text, 'single_word': False, 'lstrip': False, 'rstrip': False,
                          'normalized': False, 'special': True} for text, i in special.items()],
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': steps} if steps else None,
        'decoder': level if byte_level else {'type': 'Fuse'},
        'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                  'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False,
                  'ignore_merges': byte_level, 'vocab': vocab, 'merges': merges},
    }, ensure_ascii=False)


def byte_chars():
    """{character in byte-level vocabularies: its byte}, GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def to_json(tok):
    """A tokenizer of ours as a tokenizer.json, a text. Any two tokens that make a third are a merge of its
    rank, because tiktoken needs no more."""
    if tok.name == 'json':
        return tok.source
    if tok.name == 'byte':
        return bpe_json(byte_chars(), [], [], tok.special)
    if tok.name == 'char':
        return bpe_json(tok.ids, [], [], tok.special, byte_level=False)
    ranks = tok.bpe._mergeable_ranks
    chars = {b: char for char, b in byte_chars().items()}

    def text(token):
        return ''.join(chars[b] for b in token)
    merges = [[text(token[:i]), text(token[i:])] for token in sorted(ranks, key=ranks.get)
              for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    # tokenizers' regular expressions know possessive ++, *+ and ?+, but read {1,3}+ as any number of them
    pattern = re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', tok.pattern)
    return bpe_json({text(token): i for token, i in ranks.items()}, merges, [pattern], tok.special)
