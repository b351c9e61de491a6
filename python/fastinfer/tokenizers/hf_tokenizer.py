"""Reader of the tokenizer in a Hugging Face folder: ``tokenizer.json``, and JSON files that define special tokens.

No code of the folder is run: ``auto_map`` and Python files are ignored. The tokenizers library reads tokenizer.json
(https://huggingface.co/docs/tokenizers).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.formats.text_fields import text_fields
from fastinfer.tokenizers import library
from fastinfer.tokenizers.tokenizer_json import checked_tokenizer_json
from fastinfer.tokenizers.vocabulary import (
    MARKER,
    SPACE,
    Vocabulary,
    byte_level_bytes,
    end_tokens,
    metaspace_bytes,
    sentencepiece_bytes,
)
from fastinfer.utils.forks import RenewedLock
from fastinfer.utils.regular_file import read_regular
from fastinfer.utils.text import is_text

# Sixteen times the largest vocabulary in use; ids without a token take about 100 bytes each.
MAX_VOCAB_SIZE = 1 << 22

_ADDED_TOKENS = re.compile(r'(?<!\\)"added_tokens"\s*:\s*(?=\[)')


def read_tokenizer(folder: Path) -> tuple[Vocabulary, Callable[[str, bool], list[int]]]:
    """Read the vocabulary, and make the function from a text and ``parse_special`` to token ids.

    Raises:
        CheckpointFormatError: a file is missing or malformed.
        UnsupportedModelError: the decoder of tokenizer.json is not implemented.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        only = "tokenizer.model alone is not read" if (folder / "tokenizer.model").exists() else "it is missing"
        raise CheckpointFormatError(
            f"{folder}: expected a tokenizer.json, but {only}; "
            "transformers writes one: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    settings = _TokenizerSettings(folder)
    backend = _read_backend(path)
    _add_special_tokens(backend, settings, path)
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = _tokens_by_id(vocab, settings.vocab_size, path)
    _check_unknown(backend, vocab, path)
    added = backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    to_bytes, adds_space = _decoder(backend, path)

    bos_id = vocab.get(settings.bos or "", settings.bos_id)
    eos_ids = {*settings.eos_ids, *(vocab[name] for name in (settings.eos,) if name)}
    eos_ids |= {vocab[name] for name in end_tokens({added[i].content for i in special})}
    if bad := [i for i in {bos_id, *eos_ids} if i is not None and i >= len(tokens)]:
        raise CheckpointFormatError(
            f"{folder}: expected token ids below {len(tokens)} for the special tokens, got {bad[0]}"
        )
    prefix, suffix = _affixes(backend, path)
    if bad := [i for i in (*prefix, *suffix) if i >= len(tokens)]:
        raise CheckpointFormatError(f"{path}: post_processor: expected token ids below {len(tokens)}, got {bad[0]}")
    if bos_id is not None and settings.add_bos is not None and (prefix[:1] == (bos_id,)) != settings.add_bos:
        prefix = (bos_id, *prefix) if settings.add_bos else prefix[1:]
    vocabulary = Vocabulary(
        tokens=tokens,
        control=frozenset(special | {i for i, token in enumerate(tokens) if token is None}),
        literal=frozenset(added.keys() - special) if to_bytes is byte_level_bytes else frozenset(),
        to_bytes=to_bytes,
        bos_id=bos_id,
        eos_id=vocab.get(settings.eos or "", min(settings.eos_ids, default=None)),
        eos_ids=frozenset(eos_ids),
        prefix=prefix,
        suffix=suffix,
        adds_space=adds_space,
        chat_template=settings.chat_template,
        response_template=settings.response_template,
    )
    lock = RenewedLock()

    def encode(text: str, parse_special: bool) -> list[int]:
        with lock.current:
            backend.encode_special_tokens = not parse_special  # True encodes their spelling as text
            return library.encode(backend, text)

    return vocabulary, encode


class _TokenizerSettings:
    """Settings of the JSON files next to tokenizer.json.

    Attributes:
        bos, eos: spellings of the tokens, ``None`` if no file names them.
        bos_id, eos_ids: ids of the tokens in config.json and generation_config.json.
        add_bos: whether to begin a text with bos; ``None`` to do what tokenizer.json does.
        vocab_size: number of token ids of the model, 0 if config.json does not have it.
        chat_template: Jinja source, or ``None``.
        response_template: how answers are divided, or ``None``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tokenizer_config = self._read("tokenizer_config.json")
        special_tokens_map = self._read("special_tokens_map.json")
        config, generation = self._read("config.json"), self._read("generation_config.json")
        text_config = text_fields(config) or config
        self.bos, self.eos = (
            next((_spelling(f, name) for f in (tokenizer_config, special_tokens_map) if name in f.values), None)
            for name in ("bos_token", "eos_token")
        )
        self.eos_ids = {i for f in (generation, config, text_config) for i in _ids(f, "eos_token_id")}
        # A bos_token of null in tokenizer_config.json means none, even if config.json has an id (as for Qwen2).
        named = "bos_token" in tokenizer_config.values
        self.bos_id = None if named else next((i for f in (config, text_config) for i in _ids(f, "bos_token_id")), None)
        self.add_bos = tokenizer_config.get("add_bos_token", bool, None)
        self.vocab_size = text_config.get("vocab_size", int, 0, minimum=0, maximum=MAX_VOCAB_SIZE)
        self.chat_template = self._template(tokenizer_config)
        self.response_template = tokenizer_config.values.get("response_template")

    def _read(self, name: str) -> JsonFields:
        path = self._folder / name
        if path.exists():
            return JsonFields.read(path, CheckpointFormatError)
        return JsonFields(path, {}, CheckpointFormatError)

    def _template(self, tokenizer_config: JsonFields) -> str | None:
        """Read the chat template, joined with that for conversations with tools if there is another one for these."""
        named = self._named_templates(tokenizer_config)
        default, with_tools = named.get("default"), named.get("tool_use")
        return default if default is None or with_tools is None else _with_tool_template(default, with_tools)

    def _named_templates(self, tokenizer_config: JsonFields) -> dict[str, str]:
        """Read the templates by their names from files of their own, or from tokenizer_config.json."""
        path = self._folder / "chat_template.jinja"
        if path.exists():
            others = self._folder.glob("additional_chat_templates/*.jinja")
            return {"default": _read_text(path)} | {other.stem: _read_text(other) for other in others}
        text = self._read("chat_template.json").get("chat_template", str, None)
        if text is None and isinstance(tokenizer_config.values.get("chat_template"), list):
            templates = tokenizer_config.objects("chat_template")
            return {template.get("name", str): template.get("template", str) for template in templates}
        text = text or tokenizer_config.get("chat_template", str, None)
        return {} if text is None else {"default": text}


def _with_tool_template(default: str, with_tools: str) -> str:
    """Join two chat templates: with tools the result is the second one, and otherwise the first.

    Jinja leaves out a line break behind a block and one at the end of a template, and spaces before a block that begins
    a line. So each template has a line break of ours before it, loses one at its end, and has an expression behind it.
    """
    with_tools, default = (template.removesuffix("\n") for template in (with_tools, default))
    return f"{{% if tools is not none %}}\n{with_tools}{{{{ '' }}}}{{% else %}}\n{default}{{{{ '' }}}}{{% endif %}}"


def _add_special_tokens(backend: Backend, settings: _TokenizerSettings, path: Path) -> None:
    """Make the named special tokens, and all markers of conversations, special tokens of the backend."""
    names = [name for name in (settings.bos, settings.eos) if name]
    if unknown := [name for name in names if backend.token_to_id(name) is None]:
        raise CheckpointFormatError(f"{path}: the special token {unknown[0]!r:.80} is missing")
    # Some files have these only as tokens of the model, not as added tokens; their spelling still means the token.
    tokens = [AddedToken(name, normalized=False) for name in names]
    for token in backend.get_added_tokens_decoder().values():
        if MARKER.fullmatch(token.content):
            token.special = True
            tokens.append(token)
    backend.add_special_tokens(tokens)


def _tokens_by_id(vocab: dict[str, int], vocab_size: int, path: Path) -> list[str | None]:
    """Return the spelling of each id, at least ``vocab_size`` of them; ``None`` for ids without a token."""
    size = max([vocab_size, *(i + 1 for i in vocab.values())])
    if size > MAX_VOCAB_SIZE:
        raise CheckpointFormatError(f"{path}: expected token ids below {MAX_VOCAB_SIZE}, got {size - 1}")
    tokens: list[str | None] = [None] * size
    for name, token_id in vocab.items():
        if tokens[token_id] is not None:
            raise CheckpointFormatError(
                f"{path}: {tokens[token_id]!r:.80} and {name!r:.80} have the same id {token_id}"
            )
        tokens[token_id] = name
    return tokens


def _spelling(fields: JsonFields, name: str) -> str | None:
    """Read a token's spelling: a string, or an object with a "content"."""
    value = fields.values[name]
    if isinstance(value, dict):
        spelling: str | None = JsonFields(fields.path, value, fields.error, f"{name}.").get("content", str)
    else:
        spelling = fields.get(name, str, None)
    if spelling and not is_text(spelling):
        raise fields.error(f"{fields.path}: {name}: expected text, got {spelling!r:.80} with a lone surrogate")
    return spelling


def _ids(fields: JsonFields, name: str) -> list[int]:
    """Read one token id or a list of them."""
    value = fields.values.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if bad := [v for v in values if type(v) is not int or v < 0]:
        raise fields.error(f"{fields.path}: {name}: expected token ids, got {bad[0]!r:.80}")
    return values


def _read_backend(path: Path) -> Backend:
    text = checked_tokenizer_json(_read_text(path), path)
    with library.as_our_error(lambda message: CheckpointFormatError(f"{path}: not a valid tokenizer.json: {message}")):
        backend = Backend.from_str(text)
        match = _ADDED_TOKENS.search(text)
        added = json.JSONDecoder().raw_decode(text, match.end())[0] if match else []
        # If the ids of the added tokens have gaps, the library silently gives them other ids.
        if _moved(backend, added):
            backend = Backend.from_str(_with_ids_of_added_tokens(text))
        moved = _moved(backend, added)
    if moved:
        raise CheckpointFormatError(
            f"{path}: the added token {moved[0]['content']!r:.80} cannot have the id {moved[0]['id']}"
        )
    backend.no_padding()
    backend.no_truncation()
    return backend


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except OSError as error:
        raise CheckpointFormatError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointFormatError(f"{path}: not UTF-8: {error}") from None


def _moved(backend: Backend, added: list[Any]) -> list[Any]:
    """Return the added tokens whose ids in the library differ from those in the file."""
    return [token for token in added if backend.token_to_id(token["content"]) != token["id"]]


def _with_ids_of_added_tokens(text: str) -> str:
    """Move the added tokens of tokenizer.json into the model's vocabulary, where ids may have gaps."""
    values = json.loads(text)
    vocab = values["model"]["vocab"]
    for token in values["added_tokens"] if isinstance(vocab, dict) else ():
        vocab.setdefault(token["content"], token["id"])
    return json.dumps(values)


def _check_unknown(backend: Backend, vocab: dict[str, int], path: Path) -> None:
    """Check that the model encodes a character that it does not know."""
    unknown = next(char for char in map(chr, range(0x10FFFF, 0, -1)) if char not in vocab)
    with library.as_our_error(
        lambda message: CheckpointFormatError(f"{path}: model: expected an unknown token in the vocabulary: {message}")
    ):
        backend.model.tokenize(unknown)


def _affixes(backend: Backend, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor puts before and after a text."""
    with library.as_our_error(lambda message: CheckpointFormatError(f"{path}: not a valid tokenizer.json: {message}")):
        around = backend.encode("a", add_special_tokens=True)
    mask = around.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return tuple(around.ids[:first]), tuple(around.ids[last:])


def _decoder(backend: Backend, path: Path) -> tuple[Callable[[str], bytes], bool]:
    """Find the function from a token's spelling to bytes, and whether a space is added in front of a text."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    kinds = steps.keys() - {"Fuse"}
    if kinds == {"ByteLevel"}:
        return byte_level_bytes, False
    metaspace, replace, strip = (steps.get(name) for name in ("Metaspace", "Replace", "Strip"))
    is_known = (
        kinds <= {"Metaspace", "Replace", "ByteFallback", "Strip"}
        and (metaspace is None) != (replace is None)
        and (metaspace is None or metaspace["replacement"] == SPACE)
        and (replace is None or (replace["pattern"], replace["content"]) == ({"String": SPACE}, " "))
        and (strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0))
    )
    if not is_known:
        raise UnsupportedModelError(
            f"{path}: decoder {' + '.join(map(str, steps))} is not supported; known are ByteLevel, Metaspace, and "
            f"Replace of {SPACE!r} by a space, with ByteFallback, Fuse and Strip of one space at the start"
        )
    adds_space = strip is not None or (metaspace is not None and metaspace["prepend_scheme"] != "never")
    return sentencepiece_bytes if "ByteFallback" in kinds else metaspace_bytes, adds_space
