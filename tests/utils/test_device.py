"""Which device is taken, and what each can compute in."""

import pytest
import torch

from fastinfer import _C
from fastinfer.errors import RequestError
from fastinfer.llm import LLM
from fastinfer.models.config import Precision
from fastinfer.utils import device
from fastinfer.utils.device import resolve_device


def machine(monkeypatch: pytest.MonkeyPatch, *, archs: list[str], torch_cuda: str | None, gpu: bool) -> None:
    monkeypatch.setattr(device._C, "build_info", lambda: {**_BUILD, "cuda_archs": archs})
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)


_BUILD = _C.build_info()
WITHOUT = [
    ([], "13.0", True, "device 'cuda' needs a fastinfer that is built with its CUDA kernels .*, got one without"),
    (["80"], None, False, "device 'cuda' needs a torch that is built with CUDA, got torch "),
    (["80"], "13.0", False, r"device 'cuda' needs a GPU, and torch.cuda.is_available\(\) is False"),
]


@pytest.mark.parametrize(("archs", "torch_cuda", "gpu", "message"), WITHOUT)
def test_without_cuda(
    monkeypatch: pytest.MonkeyPatch, archs: list[str], torch_cuda: str | None, gpu: bool, message: str
) -> None:
    machine(monkeypatch, archs=archs, torch_cuda=torch_cuda, gpu=gpu)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(RequestError, match=message):
        resolve_device("cuda")
    with pytest.raises(RequestError, match=message):
        LLM(device="cuda")


def test_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, archs=["80"], torch_cuda="13.0", gpu=True)
    assert [resolve_device(name) for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    with pytest.raises(RequestError, match="device must be one of auto, cpu, cuda, got 'tpu'"):
        resolve_device("tpu")


def test_precision_on_cuda() -> None:
    assert Precision.of("auto", "cuda") == Precision(torch.bfloat16, 32, 32, torch.bfloat16)
    assert Precision.of("float16", "cuda") == Precision(torch.float16, 32, 32, torch.float16)
    with pytest.raises(RequestError, match="dtype must be auto, bfloat16 or float16 on device 'cuda', got 'float32'"):
        Precision.of("float32", "cuda")


def test_what_an_llm_refuses_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    machine(monkeypatch, archs=["80"], torch_cuda="13.0", gpu=True)
    monkeypatch.setattr("fastinfer.llm.load_model", None)
    with pytest.raises(RequestError, match="dtype must be auto, bfloat16 or float16 on device 'cuda', got 'float32'"):
        LLM(dtype="float32")
    with pytest.raises(RequestError, match=r"kv_cache_dtype must be auto, int8, fp8 or int4 .* got 'float16'"):
        LLM(kv_cache_dtype="float16")
