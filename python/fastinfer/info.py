"""``fastinfer info``: what runs here, and why. Benchmarks store the same facts as the description of their machine."""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import fastinfer
from fastinfer import launch_plan

NO_CUDA = 'not built: needs nvcc, and a GPU or FASTINFER_CUDA_ARCHS (for example "80;90a") when installing'


def facts() -> dict[str, Any]:
    """Versions, CPU and GPUs of this machine, ready for JSON. Sizes are in bytes.

    ``"extension"`` describes the compiled library, or holds only ``"error"`` where it does not load.
    """
    cpu: dict[str, Any] = {
        "name": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
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


def run(args: argparse.Namespace) -> int:
    if args.plan:
        plan = launch_plan.describe(args.plan, args.group, launch_plan.choose_gpu(args.arch))
        print(json.dumps(plan, indent=2) if args.json else launch_plan.table(plan))
        return 0
    if args.memory:
        from fastinfer import memory  # needs the extension, without which the table below still works

        described = memory.describe(args.memory, args.context, args.batch)
        print(json.dumps(described, indent=2) if args.json else memory.report(described))
        return 0
    found = facts()
    print(json.dumps(found, indent=2) if args.json else _table(found))
    return 1 if "error" in found["extension"] else 0


def _table(found: dict[str, Any]) -> str:
    extension, cpu = found["extension"], found["cpu"]
    rows = {
        "fastinfer": found["fastinfer"],
        "torch": f"{found['torch']}, {'CUDA ' + found['torch_cuda'] if found['torch_cuda'] else 'without CUDA'}",
        "python": f"{found['python']}, {found['platform']}",
        "cpu": f"{cpu['name']}, {cpu['cores']} cores, {cpu['memory'] / 2**30:.1f} GiB",
    }
    if "error" in extension:
        rows["extension"] = f"does not load: {extension['error']}"
    else:
        archs = ", ".join(extension["cuda_archs"])
        rows |= {
            "features": " ".join(cpu["features"]) or "none that the kernels use",
            "kernels": f"{cpu['isa']}: {cpu['isa_reason']} (built: {', '.join(cpu['isas_built'])})",
            "threads": cpu["num_threads"],
            "extension": f"{extension['compiler']}, for torch {extension['torch_target']} and newer",
            "cuda": f"{extension['cuda_version']}, built for {archs}" if archs else NO_CUDA,
        }
    gpus = [f"{gpu['name']} (sm_{gpu['arch']}, {gpu['memory'] / 2**30:.0f} GiB)" for gpu in found["gpus"]]
    rows["gpus"] = "; ".join(gpus) or "none seen"
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items())


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    # Arm kernels give no model name.
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
