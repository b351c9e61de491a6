"""The disassembler of the CUDA toolkit, and readable names of kernels."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Patterns to drop or abbreviate in a demangled name, in this order.
ABBREVIATIONS = [
    (r"\(anonymous namespace\)::|fastinfer::|cuda::|^void ", ""),
    (r"\(\w[\w ]*\)(?=-?\d)", ""),  # the type of a template argument: (int)8
    (r"\((?:[^()]|\([^()]*\))*\)$", ""),  # parameters
    ("__nv_bfloat16", "bf16"),
    ("__half", "fp16"),
    ("> >", ">>"),
]


@dataclass(frozen=True)
class Disassembler:
    """cuobjdump, and the nvdisasm that it calls."""

    cuobjdump: str
    nvdisasm: str

    def listing(self, obj: Path) -> str:
        """Return the machine code of all kernels in an object file or cubin, for all architectures in it."""
        path = os.pathsep.join([str(Path(self.nvdisasm).parent), os.environ["PATH"]])
        command = [self.cuobjdump, "-sass", str(obj)]
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
        if run.returncode:
            sys.exit(f"cuobjdump {obj}: {run.stderr.strip()}")
        return run.stdout


def find_disassembler() -> Disassembler:
    tools = find_tool("cuobjdump"), find_tool("nvdisasm")
    if tools[0] is None or tools[1] is None:
        sys.exit("cuobjdump and nvdisasm are needed: pip install 'fastinfer[cuda]'")
    return Disassembler(tools[0], tools[1])


def find_tool(name: str) -> str | None:
    """Find a tool on the PATH, in the toolkit or in a pip package."""
    package = importlib.util.find_spec("nvidia")
    folders = [Path(folder) / "cu13" / "bin" for folder in package.submodule_search_locations or []] if package else []
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *map(str, folders)]
    return shutil.which(name, path=os.pathsep.join(places))


def short_names(symbols: list[str]) -> list[str]:
    """Return names without namespaces and parameters, as ``rms_norm_kernel<float, fp16, 8>``."""
    names = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    for pattern, short in ABBREVIATIONS:
        names = re.sub(pattern, short, names, flags=re.MULTILINE)
    return names.splitlines()
