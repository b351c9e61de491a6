"""Which GPUs the compiled CUDA kernels run on."""

from collections.abc import Sequence


def have_kernels_for(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Tell whether a GPU of this compute capability can run a build for ``archs``, as FASTINFER_CUDA_ARCHS names them.

    Machine code runs on GPUs of its major version with the same minor version or a higher one, PTX on every newer GPU,
    and what is compiled for an architecture with an ``a`` on that one alone (CUDA programming guide, section "Compute
    capabilities"; CMakeLists.txt: the last architecture without a suffix is compiled to PTX, too).
    """
    portable = [arch for arch in archs if arch.isdecimal()]
    for arch in [*archs, *(f"{arch}-virtual" for arch in portable[-1:])]:
        number, _, kind = arch.partition("-")
        compiled = divmod(int(number.removesuffix("a")), 10)
        if number.endswith("a"):
            runs = capability == compiled
        else:
            runs = capability >= compiled and (kind == "virtual" or capability[0] == compiled[0])
        if runs:
            return True
    return False
