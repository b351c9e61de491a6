"""Folders of quantised checkpoints: whole or not there, with what belongs to the model and nothing that runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.families import SIZES
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, QuantizationError, RequestError
from fastinfer.formats.quantized_checkpoint import read_linear
from fastinfer.formats.safetensors_folder import SafetensorsFolder
from fastinfer.formats.unpacked import Dense, Unpacked
from fastinfer.quantize.layout import WriterSettings
from fastinfer.quantize.rounding import round_rows, round_to_nearest, round_to_nf4
from fastinfer.quantize.writer import CheckpointWriter
from fastinfer.utils.safetensors_file import write_tensors

INT4 = WriterSettings(4, 64)
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    torch.manual_seed(0)
    shapes = {f"{UP}.weight": (96, 64), f"{UP}.bias": (96,), f"{DOWN}.weight": (64, 192), "model.norm.weight": (64,)}
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"] = torch.randn(32, 64).half()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def tensor(source: Path, name: str) -> Tensor:
    return load_file(source / "model.safetensors")[name]


def rounded(source: Path, module: str) -> Unpacked:
    return round_to_nearest(tensor(source, f"{module}.weight").float(), 4, 64)


def test_folder(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    up, down = rounded(source, UP), rounded(source, DOWN)
    norm = tensor(source, "model.norm.weight").float() + 1
    with CheckpointWriter(out, source, "compressed-tensors", INT4) as writer:
        writer.add_linear(UP, up, tensor(source, f"{UP}.bias").float())
        writer.add_linear(DOWN, Dense(tensor(source, f"{DOWN}.weight").float()))
        writer.add("model.norm.weight", norm)
        writer.add("new.weight", torch.ones(3, dtype=torch.float64))
        assert not out.exists()
        writer.close()
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == {key: value for key, value in CONFIG.items() if key != "auto_map"}
    assert quantization["ignore"] == ["lm_head", DOWN]
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(read_linear(tensors, UP, quantization).dequantize(), up.dequantize())
    assert torch.equal(read_linear(tensors, DOWN, quantization).dequantize(), tensor(source, f"{DOWN}.weight").float())
    assert f"{UP}.weight" not in tensors
    assert torch.equal(tensors[f"{UP}.bias"], tensor(source, f"{UP}.bias"))
    assert torch.equal(tensors["model.norm.weight"], norm.bfloat16())  # the source's dtype
    assert tensors["new.weight"].dtype == torch.float64
    assert down.shape == (64, 192)


def test_rest_of_another_checkpoint(source: Path, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", source, "gptq", INT4)
    writer.add_linear(UP, rounded(source, UP))
    writer.add("model.norm.weight", torch.zeros(64))
    writer.close(SafetensorsFolder(source))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    rest = {f"{UP}.bias", f"{DOWN}.weight", "model.embed_tokens.weight"}
    assert after.keys() == rest | {"model.norm.weight"} | {
        f"{UP}.{p}" for p in ("qweight", "qzeros", "scales", "g_idx")
    }
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in rest)
    assert not after["model.norm.weight"].any()


def test_shards(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    names = ["model.norm.weight", f"{UP}.weight", f"{UP}.bias"]
    with CheckpointWriter(out, source, "compressed-tensors", INT4, shard_bytes=6000) as writer:
        for name in ("a", "b", "c"):
            writer.add(name, torch.full((700,), float(ord(name))))  # 2800 bytes: two to a file
        writer.add_linear(UP, Dense(tensor(source, f"{UP}.weight")))  # 12288 bytes: alone in one
        writer.add("model.norm.weight", tensor(source, "model.norm.weight"))
        writer.close()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 2800 + 12288 + 128
    files = {name: int(file[6:11]) for name, file in index["weight_map"].items()}
    assert files == {"a": 1, "b": 1, "c": 2, f"{UP}.weight": 3, "model.norm.weight": 4}
    assert all(file.endswith("-of-00004.safetensors") for file in index["weight_map"].values())
    assert len(list(out.iterdir())) == 4 + 2
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # whoever may read one may read all
    folder = SafetensorsFolder(out)
    assert torch.equal(folder.get("b"), torch.full((700,), float(ord("b"))))
    assert torch.equal(folder.get(names[1]), tensor(source, names[1]))


def test_what_is_copied(source: Path, tmp_path: Path) -> None:
    copied = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "vocab.json"]
    copied += ["merges.txt", "generation_config.json", "chat_template.jinja", "added_tokens.json"]
    copied += ["additional_chat_templates/tool_use.jinja"]
    (source / "additional_chat_templates").mkdir()
    left = ["tokenizer.py", "tokenizer.pkl", "modeling.py", "pytorch_model.bin", "README.md", "vocab.bin", "model.gguf"]
    for name in copied + left:
        (source / name).write_text(name)
    (source / "tokenizer.d").mkdir()
    (source / "tokenizer.json").unlink()
    (tmp_path / "blob").write_text("tokenizer.json")
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    CheckpointWriter(tmp_path / "out", source, "gptq", INT4).close(SafetensorsFolder(source))
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {*copied, "config.json", "model.safetensors"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


def test_an_error_leaves_nothing(source: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with CheckpointWriter(tmp_path / "out", source, "gptq", INT4, shard_bytes=100) as writer:
        writer.add_linear(UP, rounded(source, UP))
        assert sorted(tmp_path.iterdir()) != before
        with pytest.raises(QuantizationError, match=r"^layer 'a\.b': gptq cannot hold a weight of the form Dense"):
            writer.add_linear("a.b", Dense(torch.zeros(32, 64)))
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("fastinfer.utils.safetensors_file.save_file", fail)
    before = sorted(tmp_path.iterdir())
    with (
        CheckpointWriter(tmp_path / "out", source, "gptq", INT4) as writer,
        pytest.raises(RequestError, match=r"shard-0: the file cannot be written: .*No space left on device"),
    ):
        writer.close()
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(RequestError, match="cannot be written"):
        write_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", [".", "../link", "../here"])
def test_an_empty_folder_stays_the_same_folder(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "target"):
        (tmp_path / folder).mkdir(mode=0o710)
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path / "here")
    names, out = sorted(tmp_path.iterdir()), Path(name)
    before = out.stat()
    with CheckpointWriter(out, source, "gptq", INT4, shard_bytes=6000) as writer:
        writer.close(SafetensorsFolder(source))
    after = out.stat()
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert {"config.json", "model.safetensors.index.json"} < {path.name for path in out.iterdir()}
    assert SafetensorsFolder(out).names
    assert sorted(tmp_path.iterdir()) == names


def test_wrong_tensors(source: Path, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", source, "gptq", INT4) as writer:
        writer.add_linear(UP, rounded(source, UP))
        with pytest.raises(QuantizationError, match="is there already"):
            writer.add_linear(UP, rounded(source, UP))
        with pytest.raises(
            QuantizationError, match=r"'model\.embed_tokens\.weight' has numbers that float16 cannot hold"
        ):
            writer.add("model.embed_tokens.weight", torch.full((32, 64), 1e5))


def test_wrong_folders(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for out in (source, file):
        with pytest.raises(RequestError, match="out: expected a new or empty folder"):
            CheckpointWriter(out, source, "gptq", INT4)
    with pytest.raises(QuantizationError, match=r"expected one of gptq, .*, got 'awq'"):
        CheckpointWriter(tmp_path / "out", source, "awq", INT4)
    (source / "config.json").unlink()
    with pytest.raises(CheckpointFormatError, match=r"config\.json"):
        CheckpointWriter(tmp_path / "out", source, "gptq", INT4)
    with pytest.raises(CheckpointFormatError):
        CheckpointWriter(tmp_path / "out", tmp_path, "gptq", INT4)
    assert not (tmp_path / "out").exists()


CASES = {
    "compressed-tensors W4A16": ("compressed-tensors", INT4),
    "compressed-tensors W4A16 symmetric": ("compressed-tensors", WriterSettings(4, 64, symmetric=True)),
    "compressed-tensors W8A16": ("compressed-tensors", WriterSettings(8, -1)),
    "compressed-tensors W8A8": ("compressed-tensors", WriterSettings(8, int8_activations=True)),
    "bitsandbytes": ("bitsandbytes", INT4),
    "gptq": ("gptq", INT4),
    "gptq symmetric": ("gptq", WriterSettings(4, 64, symmetric=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_it(case: str, tmp_path: Path) -> None:
    """Its logits are those of a dense model with the rounded weights."""
    transformers: Any = pytest.importorskip("transformers")
    fmt, settings = CASES[case]
    pytest.importorskip({"compressed-tensors": "compressed_tensors", "gptq": "gptqmodel"}.get(fmt, fmt))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 192, "attention_bias": True})
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "source")
    with torch.no_grad(), CheckpointWriter(tmp_path / "out", tmp_path / "source", fmt, settings, 50000) as writer:
        for name, values in model.state_dict().items():
            module = name.removesuffix(".weight")
            if not module.endswith("_proj"):
                writer.add(name, values)
                continue
            if fmt == "bitsandbytes":
                weight: Unpacked = round_to_nf4(values)
            elif settings.int8_activations:
                weight = round_rows(values)
            else:
                size = values.shape[1] if settings.group_size == -1 else settings.group_size
                weight = round_to_nearest(values, settings.bits, size, settings.symmetric)
            writer.add_linear(module, weight)
            values.copy_(weight.dequantize())
        writer.close()
    options: dict[str, Any] = {}
    if fmt == "compressed-tensors":
        options["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
    if fmt == "gptq":
        options["quantization_config"] = transformers.GPTQConfig(bits=4, backend="gptq_torch")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **options)
    ids = torch.arange(40)[None] * 7 % 320
    with torch.no_grad():
        got, expected = loaded(ids).logits, model(ids).logits
    # compressed-tensors and GPTQModel compute weights in fp16, the scales' dtype; rounding itself changes 5 to 70 %.
    assert (got - expected).norm() < 5e-3 * expected.norm()
