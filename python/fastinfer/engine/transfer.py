"""Host memory to the model's device and back, without waiting more than once."""

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """The values as a tensor: on the CPU in their own memory.

    A copy to a GPU is queued on the current stream. It goes through pinned memory, which torch keeps until the copy is
    done: ``values`` may change as soon as this returns. (From pageable memory the host would wait for the stream.)
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors in host memory, after one wait for the GPU that they are on."""
    if not tensors or not tensors[0].is_cuda:
        return tensors
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
