"""GGUF files that are quantised: the folder that is made of one is the model's own, and so is the result."""

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from support.families import load, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder
from fastinfer.quantize.checkpoint import quantize_checkpoint
from fastinfer.quantize.gguf_folder import folder_of_gguf
from fastinfer.quantize.methods import Method

# With permuted rows, factors of frequencies, fused matrices, offset and shared norms, experts, and states.
FAMILIES = (
    "llama2",
    "llama-yarn",
    "llama-biases",
    "ministral3",
    "qwen2-plain",
    "qwen3",
    "gemma2-plain",
    "gemma3-plain",
    "smollm3",
    "apertus-plain",
    "arcee-plain",
    "seed-oss-plain",
    "ernie4.5",
    "glm4",
    "glm4-biases",
    "starcoder2-full",
    "starcoder2-plain",
    "stablelm",
    "hunyuan",
    "hunyuan-moe",
    "nemotron",
    "jais2",
    "phi",
    "gemma",
    "olmoe",
    "olmo2",
    "olmo3",
    "exaone4",
    "exaone4-full",
    "cohere",
    "cohere2",
    "phi3",
    "granite",
    "granite-plain",
    "mixtral",
    "qwen2-moe-plain",
    "qwen3-moe-renormalized",
    "lfm2",
    "qwen3.5",
)

SOURCES = ("saved", "model.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_is_that_of_the_model(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "saved")
    write_gguf(tmp_path / "model.gguf", model)
    with folder_of_gguf(GGUFFile(tmp_path / "model.gguf"), tmp_path / "out", 10**5) as folder:
        made = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        saved = load_file(tmp_path / "saved/model.safetensors")
        assert made.keys() == saved.keys()
        for name, tensor in saved.items():  # the file has norms with their offset, and exp(A_log)
            limit = 1e-7 if "norm" in name or "A_log" in name else 0
            torch.testing.assert_close(made[name], tensor, atol=limit, rtol=limit)
        expected, got = (
            log_probabilities(load(path), some_tokens(), "float32") for path in (tmp_path / "saved", folder)
        )
        assert (got - expected).abs().max() < 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "saved"]


def test_errors_name_the_file_and_not_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, make_model("llama2"))

    def damage(name: str, text: str) -> None:
        with folder_of_gguf(GGUFFile(file), tmp_path / "out", 10**9) as folder:
            (folder / name).write_text(text)
            HFCheckpoint(folder)

    for name, text, message in (
        ("config.json", "[]", "expected a JSON object"),
        ("model.safetensors", "", "not a valid safetensors file"),
    ):
        with pytest.raises(CheckpointFormatError) as caught:
            damage(name, text)
        assert str(caught.value).startswith(f"{file}: {message}")


def test_factors_of_frequencies_go_along(tmp_path: Path) -> None:
    """Files have Llama 3's scaling as factors."""
    factors = torch.linspace(1, 8, 8)
    model = make_model("llama2")
    write_gguf(tmp_path / "model.gguf", model)
    file = GGUFFile(tmp_path / "model.gguf")
    writer = gguf.GGUFWriter(tmp_path / "factors.gguf", "llama")
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.join(GGUFFile(tmp_path / "factors.gguf"))
    reference = load_decoder(GGUFCheckpoint(file, exact=True), Precision.of("float32"), None)
    with folder_of_gguf(file, tmp_path / "out", 10**9) as folder:
        expected, got = (log_probabilities(model, some_tokens(), "float32") for model in (reference, load(folder)))
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_the_result_is_that_of_the_folder(kind: str, tmp_path: Path) -> None:
    """The same weights from a folder become the same tensors; those in Q8_0 differ by their rounding."""
    model = make_model("qwen3")
    if kind != "Q8_0":
        dtype = torch.float16 if kind == "F16" else torch.bfloat16
        model.to(dtype).float()
    write_gguf(tmp_path / "model.gguf", model, matrices=gguf.GGMLQuantizationType[kind], tokens=["a", "b", "ab"])
    model.save_pretrained(tmp_path / "saved")
    method = Method("rtn", 8, 32)
    reports = [quantize_checkpoint(tmp_path / name, tmp_path / f"of {name}", method, []) for name in SOURCES]
    if kind != "Q8_0":
        of_folder, of_file = (load_file(tmp_path / f"of {name}/model.safetensors") for name in SOURCES)
        assert of_folder.keys() == of_file.keys()
        for name, tensor in of_folder.items():
            assert torch.equal(tensor.float(), of_file[name].float())
    expected, got = (log_probabilities(load(tmp_path / f"of {name}"), some_tokens(), "float32") for name in SOURCES)
    assert (got - expected).abs().mean() < (0.05 * expected.std() if kind == "Q8_0" else 1e-5)
    assert max(reports[1].errors.values()) < 0.03


def test_what_config_json_cannot_say_is_refused(tmp_path: Path) -> None:
    model = make_model("llama-biases")
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias = None
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(UnsupportedModelError, match=r"config\.json cannot say its output_bias"):
        quantize_checkpoint(tmp_path / "model.gguf", tmp_path / "out", Method("rtn", 8, 32), [])
    write_gguf(tmp_path / "other.gguf", make_model("glm4-moe"))
    with pytest.raises(UnsupportedModelError, match="a GGUF file of glm4moe cannot be quantised; known are llama"):
        quantize_checkpoint(tmp_path / "other.gguf", tmp_path / "out", Method("rtn", 8, 32), [])
