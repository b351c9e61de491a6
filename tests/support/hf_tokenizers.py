"""Small tokenizers of every kind that Hugging Face folders have, trained on the spot."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

TEXT = [
    "The quick brown fox jumps over the lazy dog, 1234 times.",
    "  def f(x):\n    return x**2  # naïve\n",
    "日本語 と 中文字符, Ελληνικά, Привет 😀👍🏽",
    "the the the then there these those with within without <s> </s>",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def byte_level() -> Backend:
    """As Llama 3's: a template that adds the beginning-of-text token."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 3, trainer)
    return backend


def byte_fallback() -> Backend:
    """As Llama 2's: every text begins with a space, and characters that are no token become bytes."""
    backend = Backend(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, limit_alphabet=40, show_progress=False)
    backend.train_from_iterator([text.replace(" ", "▁") for text in TEXT * 3], trainer)
    # The bytes are tokens of the model, not added ones.
    values = json.loads(backend.to_str())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] in SPECIAL]
    return Backend.from_str(json.dumps(values))


def gemma_like() -> Backend:
    """The same without the space, and as its normalizer has it."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def unigram() -> Backend:
    """As T5's and XGLM's: Metaspace before and after."""
    backend = Backend(Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXT * 3, trainer)
    return backend


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def save(folder: Path, backend: Backend, **config: Any) -> Path:
    """A folder with this tokenizer, an added token that is text, and the given keys of tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    backend.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": eos, **config})
    return folder
