"""Builds the emulated kernels: ``python tests/emulation/build.py plain|address|thread|traffic|avx512``."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
SANITIZERS = ("plain", "address", "thread")
BUILDS = (*SANITIZERS, "traffic")
LAUNCH_SOURCES = (CSRC / "common/cuda/device.cpp", CSRC / "common/dependent_launches.cpp")


def cuda_include() -> Path | None:
    """The folder of the toolkit's headers: of pip packages (the extra "test"), else of an installed toolkit."""
    package = importlib.util.find_spec("nvidia")
    candidates = (
        [Path(folder) / "cu13" / "include" for folder in package.submodule_search_locations or []] if package else []
    )
    if nvcc := shutil.which("nvcc"):
        candidates.append(Path(nvcc).resolve().parent.parent / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    # A torch with CUDA brings a part of the headers only.
    needed = ("cuda_fp16.h", "crt/host_defines.h")
    return next((folder for folder in candidates if all((folder / name).exists() for name in needed)), None)


def folder_of(sanitizer: str) -> Path:
    return HERE.parent.parent / "build" / "emulation" / sanitizer


def build(sanitizer: str, target: str = "all") -> Path:
    """Build what changed of all, or of one target; returns the folder of the results."""
    include = cuda_include()
    if include is None:
        raise FileNotFoundError("the CUDA toolkit's headers are needed: pip install 'fastinfer[test]'")
    options = [f"-DEMULATION_SANITIZER={sanitizer}", f"-DFASTINFER_CUDA_INCLUDE={include}"]
    if sanitizer in ("address", "thread"):
        options.append(f"-DEMULATION_BINDINGS={build('plain', 'bindings') / 'libbindings.a'}")
    return cmake(HERE, folder_of(sanitizer), options, target)


def build_layouts_by_nvcc(library: Path, arch: str) -> None:
    """Build layouts.cu for a GPU, "native" or such as "sm_90a", with what launches kernels in libfastinfer.so."""
    sources = [HERE / "layouts.cu", *LAUNCH_SOURCES]
    # A missing symbol is an error here, and not where the library is loaded.
    options = [f"-arch={arch}", "-std=c++20", f"-I{CSRC}", "-shared", "-Xcompiler=-fPIC", "-Xlinker=--no-undefined"]
    command = ["nvcc", *options, "-o", str(library), *map(str, sources)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")


def build_avx512(target: str = "all") -> Path:
    """Build what changed of all, or of fastinfer_avx512 or the libraries instructions_*; returns their folder."""
    return cmake(HERE / "avx512", folder_of("avx512"), [], target)


def cmake(source: Path, folder: Path, options: list[str], target: str) -> Path:
    torch_dir = f"-DFASTINFER_TORCH_DIR={Path(torch.__file__).parent}"
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder), torch_dir, *options]
    folder.mkdir(parents=True, exist_ok=True)
    # Under a preloaded ThreadSanitizer cmake may wait for ever for a process that has ended.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker of the tests builds, the others wait
        for command in (configure, ["cmake", "--build", str(folder), "--target", target]):
            run = subprocess.run(command, capture_output=True, text=True, env=environment)
            if run.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in (*BUILDS, "avx512"):
        sys.exit(f"usage: build.py {'|'.join(BUILDS)}|avx512")
    print(build_avx512() if sys.argv[1] == "avx512" else build(sys.argv[1]))
