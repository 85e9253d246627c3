"""Reads published tokenizers, and writes our own as tokenizer.json."""
import functools
import json
import os
import re
from pathlib import Path

import numpy as np

from configurator import UserError, package, reading
from tokenizer import CUT, EOT, MARK, Tokenizer, without_surrogates

SPECIAL_TOKENS = 'bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token'


class JsonTokenizer(Tokenizer):
    """A tokenizer.json. source: its text; config: SPECIAL_TOKENS, chat_template and eos_token_id (a list)."""
    kind = 'json'
    table = 'source'

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
        if self.n_vocab > 10**7:  # tables would fill the memory
            raise UserError(f"tokenizer.json has token id {self.n_vocab - 1}: ids must be below 10,000,000")
        self.eos_tokens = [i for i in self.config.get('eos_token_id', ()) if i in self.tokens]
        ends = [self.chat_variables.get('eos_token'), EOT, '<|end_of_text|>', '</s>', '<|im_end|>']
        self.eot = next((vocab[end] for end in ends if end in vocab), *self.eos_tokens[:1] or [None])
        some = self.library.encode('a')  # a post-processor may add a bos
        self.bos = some.ids[:[*some.special_tokens_mask, 0].index(0)]

    def encode(self, text, allow_special=True, whole=True):
        """The ids of transformers' tokenizer(text), without an end of text. whole: adds bos."""
        library = self.unmarking if allow_special and MARK in text else self.library
        library.encode_special_tokens = not allow_special  # True encodes them as ordinary text
        # encode_batch_fast computes no positions, which halves the time
        encoding, = library.encode_batch_fast([without_surrogates(text)], add_special_tokens=False)
        ids = encoding.ids
        return ids if not whole or ids[:len(self.bos)] == self.bos else self.bos + ids

    @functools.cached_property
    def unmarking(self):
        """Like self.library, but removes MARKs after finding special tokens."""
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
        """Whether a text can be encoded in pieces: not if each text gets a space, as in Llama 2."""
        parts = 'a', ' b', '\nc'
        return (not any(CUT.search(token.decode(errors='ignore')) for token in self.tokens.values())
                and self.encode_chat(''.join(parts)) == [i for part in parts for i in self.encode_chat(part)])


def library_tokenizer(source):
    """The text of a tokenizer.json -> tokenizers.Tokenizer."""
    tok = package('tokenizers').Tokenizer.from_str(source)
    if (kind := type(tok.model).__name__) not in ('BPE', 'Unigram'):
        raise UserError(f'unsupported model {kind}: BPE and Unigram are supported')
    tok.no_truncation()
    tok.no_padding()
    if kind == 'BPE':
        tok.model.dropout = None  # dropout makes ids random
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # its threads conflict with our processes
    return tok


def token_bytes(vocab, spec):
    """{id: bytes} of a vocabulary. Byte-level vocabularies write one character per byte, except in added
    tokens. Other vocabularies write U+2581 for a space, and <0x0A> for byte 10."""
    byte_level = '"ByteLevel"' in json.dumps([spec.get('pre_tokenizer'), spec.get('decoder')])
    fallback = spec['model'].get('byte_fallback')
    back = byte_chars()
    added = {token['content'] for token in spec['added_tokens']}
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


# all files of a published tokenizer
FILES = ['tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja',
         'generation_config.json', 'config.json']


def json_object(path):
    """The object in a JSON file, {} if the file is missing."""
    with reading(path):
        return {**json.loads(path.read_bytes())} if path.exists() else {}  # non-objects raise TypeError


def json_tokenizer(path):
    """The JsonTokenizer of a tokenizer.json or its folder, with the settings in the folder's other FILES."""
    path = Path(path)
    files = {name: (path if path.is_dir() else path.parent) / name for name in FILES}
    if path.is_file():
        files['tokenizer.json'] = path
    config = json_object(files['tokenizer_config.json'])
    more = config.get('added_tokens_decoder')
    if more is None:  # an older format
        config |= json_object(files['special_tokens_map.json'])
    config = {key: config[key] for key in (*SPECIAL_TOKENS, 'chat_template') if config.get(key)}
    if files['chat_template.jinja'].exists():
        config['chat_template'] = files['chat_template.jinja'].read_bytes().decode()
    config['eos_token_id'] = [  # a number, a list or null
        i for name in ('generation_config.json', 'config.json')
        for i in np.ravel(json_object(files[name]).get('eos_token_id')).tolist()]
    with reading(files['tokenizer.json']):
        source = files['tokenizer.json'].read_bytes().decode()  # read_text would change line ends
        library = library_tokenizer(source)
        if more and library.add_tokens([
                package('tokenizers').AddedToken(**token) for token in more.values()]):
            source = library.to_str()  # tokenizer.json lacked some tokens
        return JsonTokenizer(source, config)


def bpe_json(vocab, merges, patterns, special, byte_level=True):
    """The text of a tokenizer.json. Each pattern splits the pieces of the previous pattern."""
    steps = [{'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
             for pattern in patterns]
    level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False}
    steps += [level] * byte_level
    return json.dumps({
        'version': '1.0',
        'added_tokens': [{'id': i, 'content': text, 'single_word': False, 'lstrip': False, 'rstrip': False,
                          'normalized': False, 'special': True} for text, i in special.items()],
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': steps} if steps else None,
        'decoder': level if byte_level else {'type': 'Fuse'},
        'model': {'type': 'BPE', 'ignore_merges': byte_level, 'vocab': vocab, 'merges': merges},
    }, ensure_ascii=False)


def byte_chars():
    """GPT-2's table {character in byte-level vocabularies: byte}."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def to_json(tok):
    """The text of a tokenizer.json for any tokenizer. Our tables have no list of merges, so each pair of
    tokens that forms a token becomes a merge with that token's rank."""
    if tok.source:
        return tok.source
    special = {*tok.special.values()}
    ranks = {token: i for i, token in sorted(tok.tokens.items()) if i not in special}
    chars = {b: char for char, b in byte_chars().items()}

    def text(token):
        return ''.join(chars[b] for b in token) if tok.byte_level else token.decode()
    merges = [[text(token[:i]), text(token[i:])] for token in ranks
              for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    # the tokenizers package supports ++, *+ and ?+, but misreads {1,3}+ as a repetition
    patterns = [re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', tok.pattern)] if tok.pattern else []
    source = bpe_json({text(token): i for token, i in ranks.items()}, merges, patterns, tok.special,
                      tok.byte_level)
    shown = tok.decode([*ranks.values()][:1000])
    if library_tokenizer(source).encode(shown).ids != tok.encode_array(shown).tolist():
        raise UserError(f'a tokenizer of kind {tok.kind!r} cannot be exported: give its class the `source` '
                        'of a tokenizer.json that encodes the same')
    return source
