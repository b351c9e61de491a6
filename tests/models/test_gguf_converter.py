"""Files of llama.cpp's own converter, from the same models as the files of test_gguf_families.py.

`make converter` fetches the converter and runs these tests; without it they are skipped.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.families import YARN, expected, make_model, some_tokens
from support.gguf_families import GGUF_FAMILIES
from support.published import publish
from support.teacher_forcing import log_probabilities

from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.loader import load_decoder

conversion = pytest.importorskip("conversion", reason="llama.cpp's converter; run make converter")
gguf = pytest.importorskip("gguf")

# What the converter takes for granted of the published models.
SIZES: dict[str, dict[str, Any]] = {
    "cohere2": {"head_dim": 16},
    "phi": {"num_key_value_heads": 4, "intermediate_size": 256},
    "deepseek-v2": {"n_group": 1, "topk_group": 1},
    "ernie4.5-moe": {"intermediate_size": 192},  # twice the width of the shared experts, in its computation
    "granite-hybrid-dense": {"shared_intermediate_size": 96},
    "granite-hybrid-attention-dense": {"shared_intermediate_size": 96},
    "glm-plain": {"rms_norm_eps": 1e-5},
    "hunyuan": {"max_position_embeddings": 32768},
    "mistral4-mscale": {  # it does not write the growth of queries
        "rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 1.3, "llama_4_scaling_beta": 0.0}
    },
    "phimoe-published": {"head_dim": 16},
}
# It refuses other sizes than the published ones; it cannot say that the last layers are no whole group.
REFUSED = ("hunyuan-moe", "bailing-hybrid")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def subclasses(kind: type) -> Iterator[type]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from subclasses(subclass)


def convert(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert the folder to the file model.gguf in it, without a tokenizer."""
    is_published = publish(folder, family)
    fields = json.loads((folder / "config.json").read_text())
    vocab_size = fields.get("text_config", fields)["vocab_size"]
    # The converter counts the tokens of some models.
    vocab = {f"<{token}>": token for token in range(vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    loaded = conversion.ModelBase.load_hparams(folder, False)
    name = conversion.get_model_architecture(fields if is_published else loaded, conversion.ModelType.TEXT)
    kind = conversion.get_model_class(name)

    def set_vocab(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(vocab_size)

    for subclass in subclasses(conversion.TextModel):
        monkeypatch.setattr(subclass, "set_vocab", set_vocab)
    monkeypatch.setattr(kind, "no_mtp", True)
    options = {"hparams": fields} if is_published else {}
    kind(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf", eager=True, **options).write()


@pytest.mark.parametrize("family", [family for family in GGUF_FAMILIES if family not in REFUSED])
def test_log_probabilities(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family, **SIZES.get(family, {}))
    model.save_pretrained(tmp_path)
    convert(tmp_path, family, monkeypatch)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    decoder = load_decoder(checkpoint, Precision.of("float32"), 256)
    got, reference = log_probabilities(decoder, some_tokens(), "float32"), expected(model, some_tokens())
    assert (got - reference).abs().max() < 1e-3 * max(1.0, float(reference.std()))
