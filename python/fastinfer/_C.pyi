"""Types of the compiled extension."""

from typing import Any, TypedDict

from numpy.typing import NDArray
from typing_extensions import Buffer

class BuildInfo(TypedDict):
    """How the extension was built."""

    version: str
    compiler: str
    torch_target: str
    cuda_version: str | None
    cuda_archs: list[str]

class CpuInfo(TypedDict):
    """The CPU's instruction sets, and the one that the kernels use."""

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
def skip_strings(buffer: Buffer | NDArray[Any], position: int, count: int) -> tuple[int, int]: ...
def read_strings(buffer: Buffer | NDArray[Any], position: int, count: int) -> tuple[list[str], int]: ...
def unpack_rows(
    file: NDArray[Any],
    offsets: NDArray[Any],
    types: NDArray[Any],
    columns: int,
    packed: bool,
    q: NDArray[Any],
    scales: NDArray[Any],
    mins: NDArray[Any] | None,
) -> bool: ...
def pack_two_level_rows(
    file: NDArray[Any],
    offsets: NDArray[Any],
    types: NDArray[Any],
    columns: int,
    q: NDArray[Any],
    scales: NDArray[Any],
    mins: NDArray[Any] | None,
) -> None: ...
def dequantize_rows(
    file: NDArray[Any], offsets: NDArray[Any], types: NDArray[Any], columns: int, values: NDArray[Any]
) -> None: ...
def roofline(ceiling: str, memory: Buffer, passes: int) -> tuple[float, float]: ...
def launch_plan(
    op: str, sizes: dict[str, int], arch: int, multiprocessors: int, shared_bytes: int
) -> dict[str, Any]: ...
def launch_plan_sizes() -> dict[str, dict[str, int | None]]: ...

class GraphMemory:
    """Memory of a graph's intermediate results."""

    def owns(self, data: int) -> bool: ...

class LaunchGraph:
    """A recorded list of kernel launches."""

    def __init__(self, memory: GraphMemory) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def clear(self) -> None: ...
    def replay(self) -> None: ...
    def __len__(self) -> int: ...
