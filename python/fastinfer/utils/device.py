"""Choice of the device that a model runs on."""

import logging
from pathlib import Path

import torch

from fastinfer import _C
from fastinfer.errors import RequestError
from fastinfer.utils.checks import check_choice

LOG = logging.getLogger("fastinfer")
DEVICES = ("auto", "cpu", "cuda")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def resolve_device(name: str) -> str:
    """Turn a device name into ``"cpu"`` or ``"cuda"``; ``"auto"`` chooses CUDA if it is available.

    If the machine has a GPU that ``"auto"`` cannot use, a warning says why.

    Raises:
        RequestError: the name is unknown, or CUDA is requested and not available.
    """
    check_choice("device", name, DEVICES)
    missing = _missing_for_cuda()
    if name == "cuda" and missing is not None:
        raise RequestError(f"device 'cuda' needs {missing}")
    if name == "auto" and missing is not None and (NVIDIA_DRIVER.exists() or torch.cuda.is_available()):
        LOG.warning(f"this machine has a GPU, but the model runs on the CPU: the GPU needs {missing}")
    return "cpu" if name == "cpu" or missing is not None else "cuda"


def _missing_for_cuda() -> str | None:
    """Return the first missing requirement of CUDA, for an error message; None if CUDA is available."""
    if not _C.build_info()["cuda_archs"]:
        return "a fastinfer that is built with its CUDA kernels (FASTINFER_BUILD=cuda), got one without"
    if torch.version.cuda is None:
        return f"a torch that is built with CUDA, got torch {torch.__version__}"
    if not torch.cuda.is_available():
        return "a GPU, and torch.cuda.is_available() is False"
    return None
