"""Which device is taken, and what each can compute in."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.toy import ToyModel, drain, toy_engine
from torch import Tensor

from fastinfer import _C
from fastinfer.engine.config import EngineConfig
from fastinfer.errors import RequestError
from fastinfer.llm import LLM
from fastinfer.models.batch import Batch
from fastinfer.models.config import Precision
from fastinfer.models.kv_cache import KVCache
from fastinfer.sampling_params import SamplingParams
from fastinfer.utils import device
from fastinfer.utils.device import resolve_device


def machine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    archs: list[str],
    torch_cuda: str | None,
    gpu: bool,
    current: int = 0,
    capabilities: tuple[tuple[int, int], ...] = ((8, 0), (9, 0)),
) -> None:
    """A machine with two GPUs, of which the thread uses ``current``."""
    monkeypatch.setattr(device._C, "build_info", lambda: {**_BUILD, "cuda_archs": archs})
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])


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
    assert [resolve_device(name) for name in ("auto", "cuda", "cpu")] == ["cuda:0", "cuda:0", "cpu"]
    assert [resolve_device(f"cuda:{index}") for index in (0, 1)] == ["cuda:0", "cuda:1"]
    machine(monkeypatch, archs=["80"], torch_cuda="13.0", gpu=True, current=1)
    assert [resolve_device(name) for name in ("auto", "cuda", "cuda:0")] == ["cuda:1", "cuda:1", "cuda:0"]
    for number in (2, 9999):
        message = f"device must be one of the 2 GPUs, cuda:0 to cuda:1, got 'cuda:{number}'"
        with pytest.raises(RequestError, match=message):
            resolve_device(f"cuda:{number}")
        with pytest.raises(RequestError, match=message):
            LLM(device=f"cuda:{number}")


def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    capabilities = ((7, 5), (9, 0))
    machine(monkeypatch, archs=["90a"], torch_cuda="13.0", gpu=True, capabilities=capabilities)
    assert resolve_device("auto") == "cpu"
    needs = "needs kernels for sm_75, got 90a"
    assert caplog.messages == [f"this machine has a GPU, but the model runs on the CPU: the GPU {needs}"]
    for name in ("cuda", "cuda:0"):
        with pytest.raises(RequestError, match=f"^device '{name}' {needs}$"):
            resolve_device(name)
    assert resolve_device("cuda:1") == "cuda:1"
    machine(monkeypatch, archs=["90a"], torch_cuda="13.0", gpu=True, capabilities=capabilities, current=1)
    assert resolve_device("auto") == "cuda:1"


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "cuda: 1", "cpu:0", "CUDA", "", 1])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(RequestError, match=f"device must be auto, cpu, cuda or cuda:N, got {name!r}"):
        resolve_device(name)
    with pytest.raises(RequestError, match=f"device must be cpu, cuda or cuda:N, got {name!r}"):
        EngineConfig(device=name)


def test_the_configuration_takes_any_gpu() -> None:
    """Whether it exists is another matter; ``auto`` must have been resolved before."""
    assert EngineConfig(device="cuda:3").runs_ahead
    with pytest.raises(RequestError, match="device must be cpu, cuda or cuda:N, got 'auto'"):
        EngineConfig(device="auto")


@pytest.mark.parametrize(
    ("name", "limits"), [("cpu", (64, 512)), ("cuda", (256, 2048)), ("cuda:0", (256, 2048)), ("auto", (256, 2048))]
)
def test_defaults_depend_on_the_type_alone(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, name: str, limits: tuple[int, int]
) -> None:
    machine(monkeypatch, archs=["80"], torch_cuda="13.0", gpu=True, current=1)

    def seen(config: EngineConfig, *rest: object) -> EngineConfig:
        assert (config.max_num_seqs, config.max_num_batched_tokens) == limits
        assert config.device == {"cuda": "cuda:1", "auto": "cuda:1"}.get(name, name)
        raise KeyboardInterrupt

    monkeypatch.setattr("fastinfer.llm._choose_kv_cache_size", seen)
    with pytest.raises(KeyboardInterrupt):
        LLM(str(model_path), device=name)


def test_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to no tensor (streams, graphs, pinned memory) is made on the engine's GPU, in any thread."""
    current = [0]

    @contextmanager
    def on(name: str) -> Iterator[None]:
        before = current[0]
        current[0] = torch.device(name).index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    seen = []

    class Model(ToyModel):
        def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
            seen.append(current[0])
            return super().forward(batch, kv_cache)

    engine = toy_engine(model=Model())
    engine.config = replace(engine.config, device="cuda:1")  # what it has made already stays in host memory
    engine.add_request([1, 2], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    thread = threading.Thread(target=drain, args=(engine,))
    thread.start()
    thread.join()
    assert seen == [1, 1]
    assert current == [0]


def test_precision_on_cuda() -> None:
    assert Precision.of("auto", "cuda") == Precision(torch.bfloat16, 32, 32, torch.bfloat16)
    assert Precision.of("float16", "cuda") == Precision(torch.float16, 32, 32, torch.float16)
    with pytest.raises(RequestError, match="dtype must be auto, bfloat16 or float16 on device 'cuda', got 'float32'"):
        Precision.of("float32", "cuda")


def test_what_an_llm_refuses_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    machine(monkeypatch, archs=["80"], torch_cuda="13.0", gpu=True)
    monkeypatch.setattr("fastinfer.llm.load_model", None)
    with pytest.raises(RequestError, match="dtype must be auto, bfloat16 or float16 on device 'cuda:0', got 'float32'"):
        LLM(dtype="float32")
    with pytest.raises(RequestError, match=r"kv_cache_dtype must be auto, int8, fp8 or int4 .* got 'float16'"):
        LLM(kv_cache_dtype="float16")
