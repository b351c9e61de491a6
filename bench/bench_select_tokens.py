"""Latent attention to tokens that an indexer chooses, beside attention to all, on the CPU; sizes of DeepSeek-V3.2.

A generated token after a context, in one layer, without the projections of the indexer.
"""

import torch
from harness import Cases, Setting, compare, main
from torch import Tensor

from fastinfer import ops

HEADS, RANK, ROW, INDEX_HEADS, INDEX_DIM, TOP_K, BLOCK_SIZE = 128, 512, 576, 64, 128, 2048, 16
CONTEXTS = [4096, 16384, 65536]
START = torch.tensor([0, 1], dtype=torch.int32)


def dense(q: Tensor, rows: Tensor, table: Tensor, lens: Tensor, *_: Tensor) -> Tensor:
    return ops.paged_attention(q, rows, rows[..., :RANK], table, lens, START)


def choice(_q: Tensor, _rows: Tensor, table: Tensor, lens: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
    return ops.select_tokens(*index, table, lens, START, TOP_K)


def sparse(q: Tensor, rows: Tensor, *others: Tensor) -> Tensor:
    slots = rows.flatten(0, 1)[:, None]
    return ops.paged_attention(q, slots, slots[..., :RANK], *choice(q, rows, *others), START)


def torch_choice(_q: Tensor, _rows: Tensor, table: Tensor, _lens: Tensor, *index: Tensor) -> Tensor:
    q, weights, keys = index
    products = q[0] @ keys[table[0].long()].flatten(0, 2).float().T
    return (weights @ products.relu()).topk(TOP_K).indices


def run(setting: Setting) -> Cases:
    cases = setting.cases
    for context in CONTEXTS:
        blocks = context // BLOCK_SIZE
        rows, keys = (torch.randn(blocks, BLOCK_SIZE, 1, size).half() for size in (ROW, INDEX_DIM))
        ragged = torch.randperm(blocks).int()[None], torch.tensor([context], dtype=torch.int32)
        index = torch.randn(1, INDEX_HEADS, INDEX_DIM), torch.randn(1, INDEX_HEADS), keys
        cases[f"{context} tokens before"] = compare(
            {
                "attention to all": dense,
                "choice and attention to 2048": sparse,
                "choice alone": choice,
                "choice alone, torch": torch_choice,
            },
            [(torch.randn(1, HEADS, ROW), rows, *ragged, *index)],
            repeats=setting.repeats,
        )
    return cases


if __name__ == "__main__":
    main("select_tokens", cpu=run)
