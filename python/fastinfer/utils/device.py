"""Choice of the device that a model runs on."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from fastinfer import _C
from fastinfer.errors import RequestError
from fastinfer.utils.checks import show
from fastinfer.utils.cuda_archs import have_kernels_for
from fastinfer.utils.device_name import DEVICE_NAMES, is_device_name
from fastinfer.utils.places import Place, is_list_of_places, parse_places

LOG = logging.getLogger("fastinfer")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def resolve_device(name: str) -> str:
    """Turn a device name into ``"cpu"`` or ``"cuda:N"``.

    ``"cuda"`` is the calling thread's current GPU, which other threads need not share; ``"auto"`` is the same if CUDA
    is available and kernels for this GPU are compiled, and the CPU if not. If the machine has a GPU that ``"auto"``
    cannot use, a warning says why.

    Raises:
        RequestError: the name is unknown, CUDA is requested and not available, there is no GPU of this number, or no
            kernels are compiled for it.
    """
    if not is_device_name(name):
        raise RequestError(f"device must be {DEVICE_NAMES}, got {show(name)}")
    if name == "cpu":
        return name
    missing = _missing_for_cuda()
    if missing is None:
        index = _gpu_index(name)
        missing = _missing_for_gpu(index)
        if missing is None:
            return f"cuda:{index}"
    if name != "auto":
        raise RequestError(f"device {name!r} needs {missing}")
    if NVIDIA_DRIVER.exists() or torch.cuda.is_available():
        LOG.warning(f"this machine has a GPU, but the model runs on the CPU: the GPU needs {missing}")
    return "cpu"


def resolve_places(name: str) -> tuple[Place, ...]:
    """Turn a device name or a list of places into places whose devices are ``"cpu"`` and ``"cuda:N"``.

    Raises:
        RequestError: as for :func:`resolve_device` and :func:`fastinfer.utils.places.parse_places`.
    """
    if not is_list_of_places(name):
        return (Place(resolve_device(name)),)
    return tuple(
        replace(
            place,
            device=resolve_device(place.device),
            experts=None if place.experts is None else resolve_device(place.experts),
        )
        for place in parse_places(name)
    )


def use_device(device: str) -> AbstractContextManager[None]:
    """Return a context in which a GPU is the thread's current one; on a CPU it does nothing.

    Operators run on the GPU of their tensors. New streams, graphs and pinned memory belong to the current one.
    """
    return nullcontext() if device == "cpu" else torch.cuda.device(device)


def _gpu_index(name: str) -> int:
    index, count = torch.device("cuda" if name == "auto" else name).index, torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        raise RequestError(f"device must be one of the {count} GPUs, cuda:0 to cuda:{count - 1}, got {name!r}")
    return index


def _missing_for_gpu(index: int) -> str | None:
    """Return what a GPU needs of the build, for an error message; None if its kernels are compiled."""
    capability, archs = torch.cuda.get_device_capability(index), _C.build_info()["cuda_archs"]
    if have_kernels_for(capability, archs):
        return None
    return f"kernels for sm_{capability[0]}{capability[1]}, got {', '.join(archs)}"


def _missing_for_cuda() -> str | None:
    """Return the first missing requirement of CUDA, for an error message; None if CUDA is available."""
    if not _C.build_info()["cuda_archs"]:
        return "a fastinfer that is built with its CUDA kernels (FASTINFER_BUILD=cuda), got one without"
    if torch.version.cuda is None:
        return f"a torch that is built with CUDA, got torch {torch.__version__}"
    if not torch.cuda.is_available():
        return "a GPU, and torch.cuda.is_available() is False"
    return None
