"""Choice of the device that a model runs on."""

import torch

from fastinfer import _C
from fastinfer.errors import RequestError

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(name: str) -> str:
    """Turn a device name into ``"cpu"`` or ``"cuda"``; ``"auto"`` chooses CUDA if it is available.

    Raises:
        RequestError: the name is unknown, or CUDA is requested and not available.
    """
    if name not in DEVICES:
        raise RequestError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")
    missing = _missing_for_cuda()
    if name == "cuda" and missing is not None:
        raise RequestError(f"device 'cuda' needs {missing}")
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
