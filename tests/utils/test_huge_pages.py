"""HugePages: tensors side by side, that stay apart and outlive it."""

import gc

import torch
from support.helpers import assert_bitwise

from fastinfer.utils.huge_pages import BLOCK, HugePages

DTYPES = (torch.uint8, torch.int8, torch.float16, torch.float32)


def copied(memory: HugePages, tensor: torch.Tensor) -> torch.Tensor:
    return memory.empty(tensor.shape, tensor.dtype).copy_(tensor)


def test_copies_stay_apart_and_outlive_their_memory() -> None:
    torch.manual_seed(0)
    sizes = (0, 1, 63, 64, 65, 100_000, BLOCK // 4 - 1, BLOCK // 4 + 1)  # the last has a mapping of its own
    originals = [
        torch.randint(0, 100, (size // dtype.itemsize // 3, 3)).to(dtype)
        for size in sizes
        for dtype in DTYPES
        if size < BLOCK // 8 or dtype == torch.uint8
    ]
    memory = HugePages()
    copies = [copied(memory, tensor) for tensor in originals]
    del memory
    gc.collect()
    for copy, original in zip(copies, originals, strict=True):
        assert copy.data_ptr() % 64 == 0 or not copy.numel()
        assert copy.is_contiguous()
        assert_bitwise(copy, original)


def test_more_than_one_mapping() -> None:
    memory = HugePages()
    copies = [copied(memory, torch.full((BLOCK // 8,), value, dtype=torch.uint8)) for value in range(20)]
    for value, copy in enumerate(copies):
        assert (copy == value).all()
