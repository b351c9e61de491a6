"""A loaded model does not read its files any more: they may be cut or overwritten."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.families import make_model, save_model
from support.gguf_model_file import write_gguf
from support.peft_adapter import write_adapter
from support.teacher_forcing import log_probabilities
from support.tiny_decoder import CONFIG
from support.tiny_folder import write_tiny_folder

from fastinfer.errors import CheckpointFormatError, GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.formats.peft import read_adapter
from fastinfer.formats.safetensors_folder import SINGLE, SafetensorsFolder
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder
from fastinfer.quantize.checkpoint import quantize_checkpoint
from fastinfer.quantize.methods import SYMMETRIC, Method

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def mapped_files(folder: Path) -> set[str]:
    """Files of a folder that are mapped into this process."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {path for line in lines if (path := line.partition("/")[1] + line.partition("/")[2]).startswith(str(folder))}


def load(path: Path, dtype: str) -> Decoder:
    checkpoint = HFCheckpoint(path) if path.is_dir() else GGUFCheckpoint(GGUFFile(path))
    return load_decoder(checkpoint, Precision.of(dtype), None)


def check_independent(path: Path, dtype: str) -> None:
    """Load a model, empty its files and compute with it: what is mapped would end the process with SIGBUS."""
    ids = list(range(3, 40))
    expected = log_probabilities(load(path, dtype), ids, dtype)
    decoder = load(path, dtype)
    folder = path if path.is_dir() else path.parent
    assert mapped_files(folder) == set()
    for file in folder.iterdir():
        file.write_bytes(b"")
    assert torch.equal(log_probabilities(decoder, ids, dtype), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama2", "llama3", "llama-biases", "gemma3", "phi3", "gpt2", "qwen3-moe"])
def test_dense_safetensors(family: str, dtype: str, tmp_path: Path) -> None:
    make_model(family).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    check_independent(tmp_path, dtype)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "int8", "w8a8", "nf4"])
def test_quantised_safetensors(method: str, tmp_path: Path) -> None:
    make_model("llama2", intermediate_size=128).save_pretrained(tmp_path / "dense")
    texts = [list(range(3 + i, 99 + i)) for i in range(4)]
    bits, group = 8 if "8" in method else 4, 64 if method == "nf4" else 32
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", Method(method, bits, group, method in SYMMETRIC), texts)
    check_independent(tmp_path / "out", "float32")


@pytest.mark.parametrize("family", ["llama3", "gpt2", "qwen3-moe"])
def test_dense_gguf(family: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model(family))
    check_independent(tmp_path / "model.gguf", "float32")


def test_quantised_gguf(model_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(model_path.read_bytes())
    check_independent(copy, "float32")


def test_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path, CONFIG)
    adapter = read_adapter(tmp_path)
    assert mapped_files(tmp_path) == set()
    assert adapter.weights


SHRINK = """
import sys
from pathlib import Path
from fastinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=32, device="cpu")
for file in Path(sys.argv[1]).iterdir():
    file.write_bytes(b"")
[output] = llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
assert len(output.outputs[0].token_ids) == 5
"""


def test_a_whole_engine(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path)
    done = subprocess.run([sys.executable, "-c", SHRINK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    """Later reads are refused instead of ending the process."""
    save_model(tmp_path, "llama2")
    tensors, file = SafetensorsFolder(tmp_path), tmp_path / SINGLE
    name = tensors.names[-1]
    assert tensors.get(name) is not None
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    with pytest.raises(CheckpointFormatError, match=f"was cut from {size} to {size - 1} bytes"):
        tensors.get(name)
    with pytest.raises(CheckpointFormatError, match="not a valid safetensors file"):
        tensors.release()


def test_a_gguf_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama2"))
    checkpoint = GGUFCheckpoint(GGUFFile(path))
    checkpoint.vector("norm", 64)
    size = path.stat().st_size
    with path.open("r+b") as opened:
        opened.truncate(size // 2)
    for read in (lambda: checkpoint.vector("norm", 64), lambda: checkpoint.linear("embedding", 320, 64)):
        with pytest.raises(GGUFFormatError, match=f"was cut from {size} to {size // 2} bytes"):
            read()


def test_a_file_that_is_too_short_is_refused_before_it_is_read(tmp_path: Path) -> None:
    save_model(tmp_path, "llama2")
    whole = (tmp_path / SINGLE).read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / SINGLE).write_bytes(whole[:size])
        with pytest.raises(CheckpointFormatError, match="not a valid safetensors file"):
            SafetensorsFolder(tmp_path)
    (tmp_path / SINGLE).write_bytes(whole)
    assert set(SafetensorsFolder(tmp_path).names) == load_file(tmp_path / SINGLE).keys()
