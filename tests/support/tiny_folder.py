"""A Hugging Face folder of a random model of 320 tokens, with the tokenizer of single bytes."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from support.families import make_model


def write_tiny_folder(
    folder: Path, family: str = "llama3", sizes: dict[str, Any] | None = None, **options: Any
) -> Path:
    """Write config.json, model.safetensors, generation_config.json, tokenizer.json and tokenizer_config.json.

    Args:
        folder: folder to create.
        family: one of ``support.families.FAMILIES``.
        sizes: fields of the configuration to change.
        options: arguments of transformers' ``save_pretrained``.
    """
    make_model(family, **(sizes or {})).save_pretrained(folder, **options)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
