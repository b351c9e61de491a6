"""Transfers between host memory and the model's device with as few waits as possible."""

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


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors in host memory, after a single wait for their GPU."""
    if not tensors or not tensors[0].is_cuda:
        return tensors
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
