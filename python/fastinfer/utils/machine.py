"""Facts about this machine and installation, for ``fastinfer info`` and for the results of benchmarks."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

import fastinfer
from fastinfer.utils.host_memory import host_memory


def has_bf16() -> bool:
    """Return whether the CPU has instructions for torch's products in bf16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def machine_facts() -> dict[str, Any]:
    """Collect versions, CPU and GPUs of this machine as JSON values; sizes are in bytes.

    ``"extension"`` describes the compiled library, or holds only ``"error"`` if the library does not load.
    """
    cpu: dict[str, Any] = {
        "name": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": host_memory().total,
    }
    extension: dict[str, Any] = {}
    try:
        import fastinfer._C as _C
    except ImportError as error:
        extension["error"] = str(error)
    else:
        extension |= _C.build_info()
        cpu |= _C.cpu_info()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "fastinfer": fastinfer.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "extension": extension,
        "cpu": cpu,
        "gpus": [{"name": d.name, "arch": f"{d.major}{d.minor}", "memory": d.total_memory} for d in devices],
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    # Linux on Arm gives no model name.
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
