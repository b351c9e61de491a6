"""Drives CMake + Ninja to build libfastinfer.so and fastinfer._C; everything declarative stands in pyproject.toml.

Environment:
    FASTINFER_BUILD       auto (default), cpu or cuda
    FASTINFER_CUDA_ARCHS  CUDA architectures, for example "80;90a"
    FASTINFER_CPU_OBJECTS 1: a CUDA build links the CPU kernels of this tree's CPU build, where there is one
    MAX_JOBS              compile jobs at once (default: bounded by cores and memory)

CUDA is built when nvcc is found and either a GPU from sm_80 on is visible or FASTINFER_CUDA_ARCHS is set;
FASTINFER_BUILD=cuda demands it. torch is taken from the environment that is being installed into, also under pip's
build isolation: sysconfig still names that environment there, so no second torch is downloaded to build against. Only
where it has none, torch becomes a build requirement.
"""

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 11)
MINIMUM_NVCC = (12, 4)
MINIMUM_ARCH = 80  # cp.async and mma.sync of bf16
DEFAULT_CUDA_ARCHS = "80;86;89;90a"
JOB_MEMORY_GIB = 1.5  # the largest translation unit needs about 1 GiB


def find_torch() -> Path | None:
    """The folder of a torch that is new enough: of this interpreter, or of the environment around the isolation."""
    folders = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    if sys.prefix == sys.base_prefix:  # pip hides the user's own folder from an isolated build; virtual ones have none
        folders.append(site.getusersitepackages())
    candidates = [Path(folder) / "torch" for folder in folders]
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        candidates.append(Path(spec.origin).parent)
    for candidate in candidates:
        version_file = candidate / "version.py"
        if not version_file.is_file():
            continue
        match = re.search(r"__version__ = ['\"](\d+)\.(\d+)", version_file.read_text())
        if match and (int(match[1]), int(match[2])) >= MINIMUM_TORCH:
            return candidate
    return None


def visible_gpu_archs() -> list[int]:
    """Architectures of the GPUs that nvidia-smi sees."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return []
    result = subprocess.run(query, capture_output=True, text=True)
    capabilities = re.findall(r"^(\d+)\.(\d+)$", result.stdout, re.MULTILINE)
    return sorted({int(major + minor) for major, minor in capabilities})


def named_archs() -> str:
    """Architectures that FASTINFER_CUDA_ARCHS names, separated as CMake wants them; empty where it names none."""
    archs = [arch for arch in re.split("[;, ]", os.environ.get("FASTINFER_CUDA_ARCHS", "")) if arch]
    for arch in archs:
        match = re.fullmatch(r"(\d+)(a?)(-real|-virtual)?", arch)
        if match is None or int(match[1]) < (90 if match[2] else MINIMUM_ARCH):
            raise SystemExit(
                f'FASTINFER_CUDA_ARCHS must name architectures from {MINIMUM_ARCH} on, such as "80;90a", got {arch!r}'
            )
    return ";".join(archs)


def nvcc_version(nvcc: str) -> tuple[int, int]:
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that this machine's driver runs, None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    match = re.search(
        r"CUDA Version: *(\d+)\.(\d+)", subprocess.run("nvidia-smi", capture_output=True, text=True).stdout
    )
    return (int(match[1]), int(match[2])) if match else None


def torch_cuda_version(torch_dir: Path) -> str | None:
    """The CUDA that torch was built with, None for a CPU build."""
    match = re.search(r"^cuda[^=]*= ['\"]([\d.]+)", (torch_dir / "version.py").read_text(), re.MULTILINE)
    return match[1] if match else None


def remarks_on_torch(torch_dir: Path) -> str:
    """Return remarks on a CUDA build for this torch, with neither of whose CUDA libraries it is linked."""
    cuda = torch_cuda_version(torch_dir)
    if cuda is None:
        return "; its tensors cannot be on a GPU, as it is built without CUDA"
    major = nvcc_version(os.environ["CUDACXX"])[0]
    if major > int(cuda.split(".")[0]):
        return f"; the kernels need a driver for CUDA {major}, torch one for CUDA {cuda}"
    return f" with CUDA {cuda}"


def cuda_archs() -> str:
    """Architectures to build for, empty for a CPU build; prints the decision in one line."""
    mode = os.environ.get("FASTINFER_BUILD", "auto")
    if mode not in ("auto", "cpu", "cuda"):
        raise SystemExit(f"FASTINFER_BUILD must be auto, cpu or cuda, got {mode!r}")
    if mode == "cpu":
        print("fastinfer: CPU build (FASTINFER_BUILD=cpu)")
        return ""
    archs = named_archs()
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        if mode == "cuda" or archs:
            raise SystemExit(
                "fastinfer: CUDA was asked for, but there is no nvcc on the PATH or in /usr/local/cuda/bin"
            )
        print("fastinfer: CPU build (no nvcc found)")
        return ""
    version = nvcc_version(nvcc)
    if version < MINIMUM_NVCC:
        found = f"{nvcc} is {'.'.join(map(str, version))}, and {'.'.join(map(str, MINIMUM_NVCC))} is needed"
        if mode == "cuda" or archs:
            raise SystemExit(f"fastinfer: CUDA was asked for, but {found}")
        print(f"fastinfer: CPU build ({found} for CUDA)")
        return ""
    driver = driver_cuda_version()
    if (
        driver is not None and version[0] > driver[0]
    ):  # a runtime runs on drivers of its major version, and on newer ones
        found = f"{nvcc} is {version[0]}.{version[1]}, and this machine's driver runs CUDA {driver[0]}.{driver[1]}"
        if not archs and mode == "cuda":
            raise SystemExit(f"fastinfer: CUDA was asked for, but {found} at most")
        if not archs:
            print(f"fastinfer: CPU build ({found} at most)")
            return ""
        print(f"fastinfer: what is built does not run on this machine: {found} at most")
    gpus = [] if archs else visible_gpu_archs()
    usable = [gpu for gpu in gpus if gpu >= MINIMUM_ARCH]
    if gpus and not usable:
        found = f"this GPU is sm_{gpus[-1]}; {MINIMUM_ARCH} is needed"
        if mode == "cuda":
            raise SystemExit(f"fastinfer: CUDA was asked for, but {found}")
        print(f"fastinfer: CPU build ({found})")
        return ""
    archs = archs or ";".join("90a" if gpu == 90 else str(gpu) for gpu in usable)
    archs = archs or (DEFAULT_CUDA_ARCHS if mode == "cuda" else "")
    if not archs:
        print(
            'fastinfer: CPU build (nvcc is there, but no GPU: set FASTINFER_CUDA_ARCHS="80;90a" to build CUDA as well)'
        )
        return ""
    print(f"fastinfer: CUDA build for {archs} with {nvcc}")
    os.environ.setdefault("CUDACXX", nvcc)
    return archs


def compile_jobs() -> int:
    if jobs := os.environ.get("MAX_JOBS"):
        if not jobs.isdecimal() or int(jobs) == 0:
            raise SystemExit(f"MAX_JOBS must be a number of compile jobs, 1 or more, got {jobs!r}")
        return int(jobs)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib / JOB_MEMORY_GIB)))


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        torch_dir = find_torch()
        if torch_dir is None:
            raise SystemExit(f"fastinfer needs torch >= {'.'.join(map(str, MINIMUM_TORCH))} to build, and found none")
        missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
        if missing:
            raise SystemExit(f"fastinfer needs {' and '.join(missing)} on the PATH to build without isolation")
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        archs = cuda_archs()
        # CPU and CUDA builds have folders of their own, so that neither makes the other compile anything again.
        cpu_build = ROOT / "build" / f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        build = cpu_build.with_name(f"{cpu_build.name}-cuda") if archs else cpu_build
        build.mkdir(parents=True, exist_ok=True)
        reuse = archs and os.environ.get("FASTINFER_CPU_OBJECTS") == "1" and (cpu_build / "build.ninja").exists()
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            # Named anew each time: an isolated build's ninja is gone when the next one starts.
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DFASTINFER_TORCH_DIR={torch_dir}",
            f"-DFASTINFER_VERSION={self.distribution.get_version()}",
            f"-DFASTINFER_CUDA_ARCHS={archs}",
            f"-DFASTINFER_CPU_OBJECTS={cpu_build if reuse else ''}",
        ]  # fmt: skip
        print(f"fastinfer: building against {torch_dir}{remarks_on_torch(torch_dir) if archs else ''}", flush=True)
        compile_all = ["cmake", "--build", str(build), "--parallel", str(compile_jobs())]
        compile_kernels = ["cmake", "--build", str(cpu_build), "--target", "cpu_kernels", *compile_all[-2:]]
        for command in (*([compile_kernels] if reuse else []), configure, compile_all):
            if subprocess.run(command).returncode != 0:
                raise SystemExit("fastinfer: the build failed; the compiler's message stands above")

    def copy_extensions_to_source(self) -> None:
        """In place, the library, headers and CMake package go where the module goes."""
        super().copy_extensions_to_source()
        source = ROOT / self.get_finalized_command("build_py").get_package_dir("fastinfer")
        for folder in ("include", "lib"):
            shutil.rmtree(source / folder, ignore_errors=True)
            shutil.copytree(Path(self.build_lib) / "fastinfer" / folder, source / folder)


setup(
    ext_modules=[Extension("fastinfer._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=[] if find_torch() else [f"torch>={'.'.join(map(str, MINIMUM_TORCH))}"],
)
