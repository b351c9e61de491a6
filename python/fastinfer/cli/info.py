"""``fastinfer info``: versions, CPU and GPUs, launch plans, or the memory of a model.

Benchmarks store the same facts as the description of their machine.
"""

import argparse
import json
from typing import Any

from fastinfer.cli import launch_plans
from fastinfer.utils.machine import machine_facts

NO_CUDA = 'not built: needs nvcc, and a GPU or FASTINFER_CUDA_ARCHS (for example "80;90a") when installing'


def run(args: argparse.Namespace) -> int:
    """Print the requested facts; the exit code is 1 if the compiled extension does not load."""
    if args.plan:
        plan = launch_plans.describe(args.plan, args.group, launch_plans.choose_gpu(args.arch))
        print(json.dumps(plan, indent=2) if args.json else launch_plans.table(plan))
        return 0
    if args.memory:
        # Imported here, because it needs the compiled extension, without which the table below still works.
        from fastinfer.cli import memory_description, memory_report

        described = memory_description.describe(
            args.memory,
            args.context,
            args.batch or 1,
            device=args.device,
            draft_model=args.draft_model,
            num_drafts=args.speculate or 1,
        )
        print(json.dumps(described, indent=2) if args.json else memory_report.report(described))
        return 0
    found = machine_facts()
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
