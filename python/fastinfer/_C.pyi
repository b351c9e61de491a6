from typing import Any, TypedDict

class BuildInfo(TypedDict):
    version: str
    compiler: str
    torch_target: str
    cuda_version: str | None
    cuda_archs: list[str]

class CpuInfo(TypedDict):
    features: list[str]
    isa: str
    isa_reason: str
    isas_built: list[str]
    isas_usable: list[str]
    num_threads: int

def build_info() -> BuildInfo: ...
def cpu_info() -> CpuInfo: ...
def get_num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def launch_plan(
    op: str, sizes: dict[str, int], arch: int, multiprocessors: int, shared_bytes: int
) -> dict[str, Any]: ...
def launch_plan_sizes() -> dict[str, dict[str, int | None]]: ...
