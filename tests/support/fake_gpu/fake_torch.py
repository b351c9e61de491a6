"""A GPU for torch on a machine without one: tensors "on the GPU" lie in host memory and are marked.

What a GPU would refuse is refused: operands on two devices, NumPy arrays of its tensors, and waiting for it while a
graph is captured. fastinfer's operators run on the emulator of its CUDA kernels (tests/emulation), whose library
FASTINFER_FAKE_GPU names. A process uses one GPU, and FASTINFER_FAKE_GPUS says how many there are, 1 by default: tensors
do not tell them apart. Processes may share their memory. Times mean nothing.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
MARK = "_is_on_fake_gpu"
# Their results are on the CPU whatever their arguments; torch waits for the GPU.
WAITING = {
    "item",
    "tolist",
    "cpu",
    "nonzero",
    "unique",
    "__bool__",
    "__int__",
    "__float__",
    "argwhere",
    "masked_select",
}
# Tensors of both devices may meet here.
MIXED = {"copy_", "to", "cpu", "cuda", "__setitem__", "__getitem__", "set_", "type", "is_set_to", "__get__", "__set__"}

state = SimpleNamespace(capture=None, checks_waiting=False)


def is_on_gpu(tensor: Tensor) -> bool:
    return getattr(tensor, MARK, False)


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def marked(result: Any, on_gpu: bool) -> Any:
    for tensor in tensors_in(result):
        setattr(tensor, MARK, on_gpu)
    return result


def device_of(value: Any) -> str | None:
    """The type of the device that an argument names."""
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu"):
        return value.split(":")[0]
    return None


def refuse_waiting(name: str) -> None:
    if state.capture is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")
    if state.checks_waiting:
        raise RuntimeError(f"called a synchronizing CUDA operation ({name})")


class FakeGPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in PROPERTIES and args:
            return PROPERTIES[name](args[0])
        if name == "__get__" and (answer := ATTRIBUTES.get(func)):
            return answer(args[0])
        operands = list(tensors_in([args, kwargs]))
        on_gpu = any(map(is_on_gpu, operands))
        if name in ("to", "cpu", "cuda"):
            return self.move(func, name, args, kwargs)
        if on_gpu and (name in WAITING or (name in ("__getitem__", "__setitem__") and has_mask(args[1]))):
            refuse_waiting(name)
        if name not in MIXED and not name.startswith("is_"):
            self.check(name, operands, on_gpu)
        if name == "__getitem__" and not is_on_gpu(args[0]) and on_gpu:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        kwargs.pop("pin_memory", None)
        named = kwargs.get("device")
        if named is not None:
            on_gpu = device_of(named) == "cuda"
            kwargs["device"] = CPU
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "fastinfer":
            twin = getattr(getattr(emulated(), func._opname), func._overloadname)
            if on_gpu:
                func = twin
            elif not operands:  # a setting, which the emulated library has, too
                twin(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in ("item", "tolist"):
            return result
        on_result = is_on_gpu(args[0]) if name in ("copy_", "__getitem__") else on_gpu
        return marked(result, on_result)

    def check(self, name: str, operands: list[Tensor], on_gpu: bool) -> None:
        elsewhere = [tensor for tensor in operands if not is_on_gpu(tensor)]
        if name.startswith("all_"):  # an exchange, whose table of addresses is the host's
            elsewhere = [tensor for tensor in elsewhere if tensor.dtype != torch.uint8]
        if on_gpu and any(tensor.dim() for tensor in elsewhere):
            raise RuntimeError(f"Expected all tensors to be on the same device, but got cuda:0 and cpu in {name}")

    def move(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        source = args[0]
        target = {"cpu": "cpu", "cuda": "cuda"}.get(name) or device_of(kwargs.get("device"))
        rest = []
        for value in args[1:]:
            if (found := device_of(value)) is not None:
                target = found
            elif isinstance(value, Tensor):
                target = "cuda" if is_on_gpu(value) else "cpu"
                rest.append(value)
            else:
                rest.append(value)
        kwargs.pop("device", None)
        here = "cuda" if is_on_gpu(source) else "cpu"
        target = target or here
        moves = target != here
        if moves and target == "cpu" and not kwargs.get("non_blocking"):
            refuse_waiting(name)
        if name in ("cpu", "cuda"):
            result = source.clone() if moves else source
        else:
            result = func(source, *rest, **kwargs) if rest or kwargs else source
            if moves and result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                result = result.clone()
        return marked(result, target == "cuda") if result is not source else result


def has_mask(index: Any) -> bool:
    return any(tensor.dtype == torch.bool for tensor in tensors_in(index))


@functools.cache
def emulated() -> Any:
    torch.ops.load_library(os.environ["FASTINFER_FAKE_GPU"])
    return torch.ops.fastinfer_emulated


def numpy_of(tensor: Tensor) -> Any:
    if is_on_gpu(tensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
    with torch._C.DisableTorchFunction():
        return tensor.numpy()


def pinned(tensor: Tensor) -> Tensor:
    if is_on_gpu(tensor):
        raise RuntimeError("cannot pin 'torch.cuda.Tensor', only dense CPU tensors can be pinned")
    return marked(tensor.clone(), False)


PROPERTIES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": numpy_of,
    "pin_memory": pinned,
    "get_device": lambda tensor: 0 if is_on_gpu(tensor) else -1,
}
ATTRIBUTES = {
    Tensor.is_cuda.__get__: is_on_gpu,
    Tensor.is_cpu.__get__: lambda tensor: not is_on_gpu(tensor),
    Tensor.device.__get__: lambda tensor: GPU if is_on_gpu(tensor) else CPU,
}


# ---- memory that processes share ----


def share_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """A GPU's memory for another process: moved to a file, which the other opens while this process lives."""
    descriptor, size = storage._share_fd_cpu_()
    return 0, os.getpid(), descriptor, size


def open_storage(device: int, pid: int, descriptor: int, size: int) -> torch.UntypedStorage:
    return torch.UntypedStorage._new_shared_fd_cpu(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR), size)


# ---- torch.cuda ----


class Recorder(TorchDispatchMode):
    """Notes the calls that are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, result))
        return result


class CUDAGraph:
    """Repeats the calls and writes their results where the captured ones are."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def replay(self) -> None:
        assert self.recorder is not None, "replayed before it was captured"
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for func, args, kwargs, result in self.recorder.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
                    if old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def pool(self) -> tuple[int, int]:
        return 0, 1


@contextlib.contextmanager
def graph(graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    state.capture = graph
    recorder = Recorder()
    try:
        with recorder:
            yield
        graph.recorder = recorder
    finally:
        state.capture = None


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        refuse_waiting("synchronize")

    def elapsed_time(self, end: "Event") -> float:
        return (end.time - self.time) * 1e3


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def synchronize(self) -> None:
        refuse_waiting("synchronize")

    def record_event(self) -> Event:
        return Event()


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="Fake GPU",
        major=9,
        minor=0,
        total_memory=1 << 32,
        multi_processor_count=6,
        shared_memory_per_block_optin=163 << 10,
    )


# Memory of the host that is pinned in place, by its addresses.
registered: set[int] = set()


def register(address: int, num_bytes: int, flags: int) -> int:
    assert (num_bytes > 0, flags) == (True, 0)
    assert address not in registered, "pinned already"
    registered.add(address)
    return 0


def set_sync_debug_mode(mode: str) -> None:
    state.checks_waiting = mode == "error"


def install() -> None:
    """Change this process's torch, for the calling thread."""
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: int(os.environ.get("FASTINFER_FAKE_GPUS", "1")),
        "can_device_access_peer": lambda device, peer: True,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.remove),
        "init": lambda: None,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "Fake GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "mem_get_info": lambda device=None: (1 << 31, 1 << 32),
        "memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: refuse_waiting("synchronize"),
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "set_sync_debug_mode": set_sync_debug_mode,
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }
    for name, value in functions.items():
        setattr(torch.cuda, name, value)
    torch.UntypedStorage._share_cuda_ = share_storage  # type: ignore[method-assign]
    torch.UntypedStorage._new_shared_cuda = staticmethod(open_storage)  # type: ignore[method-assign]
    torch.version.cuda = "13.0"
    with contextlib.suppress(ImportError):  # where fastinfer is still to be built
        from fastinfer import _C

        facts = _C.build_info() | {"cuda_version": "13.0", "cuda_archs": ["90a"]}
        _C.build_info = lambda: facts  # type: ignore[method-assign]
    FakeGPU().__enter__()
