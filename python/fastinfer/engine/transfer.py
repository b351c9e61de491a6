"""Transfers between host memory and the model's device with as few waits as possible."""

from array import array

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return the values as a tensor on the device; on the CPU it shares their memory.

    A copy to a GPU is queued on the current stream and goes through pinned memory, which torch keeps until the copy is
    done. ``values`` may therefore change as soon as this function returns. (A copy from pageable memory would make the
    host wait for the stream.)
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pinned_bytes(num_bytes: int) -> int:
    """Return how much memory torch pins for a tensor of so many bytes: it rounds up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


class HostCopy:
    """A copy of tensors to host memory, which their GPU makes once it has computed them.

    Args:
        tensors: tensors of one device; those of the CPU are not copied.

    Attributes:
        num_bytes: size of the host memory that they take.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._copies, self._done = tensors, None
        sizes = [tensor.nbytes for tensor in tensors]
        self.num_bytes = sum(sizes)
        if tensors and tensors[0].is_cuda:
            self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # to pinned memory
            self._done = torch.cuda.current_stream(tensors[0].device).record_event()
            self.num_bytes = sum(map(pinned_bytes, sizes))

    def wait(self) -> list[Tensor]:
        """Return the tensors in host memory."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies


def write_list(view: memoryview, values: list[int]) -> None:
    """Write integers to the beginning of an array, given as a memoryview: NumPy takes three times as long."""
    view[: len(values)] = array(view.format, values)
