"""Engines with a head that drafts blocks, and comparison of their drafts with the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fastinfer import LLM, SamplingParams
from fastinfer.engine.chunk import Chunk
from fastinfer.structured_output import StructuredOutputsParams
from support.dflash_heads import chosen_drafts, drafted_logits
from support.drafts import GREEDY, OPTIONS, recorded_drafts
from support.tiny_folder import write_tiny_folder
from support.toy import always_speculate

LAYERS = [0, 2, 3]  # whose outputs the heads read
SLIDING, FULL = "sliding_attention", "full_attention"
# Parameters and options of an engine, which change no text.
OPTION_CASES: list[tuple[SamplingParams, dict[str, Any]]] = [
    (replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[^a]{30,}")), {}),
    (replace(GREEDY, temperature=1.5, seed=1, repetition_penalty=1.2, logprobs=2), {"dtype": "auto"}),
    (replace(GREEDY, temperature=0.7, seed=2, prompt_logprobs=1), {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
    (GREEDY, {"enforce_eager": True, "enable_prefix_caching": False, "sparse_attention": 0.6, "block_size": 2}),
    (GREEDY, {"tensor_parallel_size": 2}),
    (GREEDY, {"device": "cpu=2,cpu=3"}),
]
# For each block the text, the logits of its places, and the drafts that are made of them.
Blocks = list[tuple[list[int], Tensor, list[int]]]


def with_head(model: Path, head: Path, **options: Any) -> LLM:
    llm = LLM(str(model), **OPTIONS | {"draft_model": str(head), "num_speculative_tokens": 3} | options)
    always_speculate(llm.engine)
    return llm


def write_flat_folder(path: Path) -> Path:
    """Write a model whose logits are all equal, and return its folder."""
    folder = write_tiny_folder(path, sizes={"num_hidden_layers": 5})
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        weights.lm_head.weight.zero_()
    weights.save_pretrained(folder)
    return folder


def recorded_blocks(llm: LLM) -> Blocks:
    """Return the head's blocks from now on."""
    rows = recorded_drafts(llm)
    speculator = llm.engine.speculator
    assert speculator is not None
    propose, blocks = speculator.propose, []

    def record(chunks: list[Chunk]) -> None:
        rows.clear()
        propose(chunks)
        found = iter(rows)
        for chunk in chunks:
            if chunk.num_drafts and chunk.num_tokens == 1:
                own = [next(found) for _ in range(chunk.num_drafts)]
                blocks.append((own[0][0], torch.stack([logits for _, _, logits in own]), list(chunk.drafts)))

    speculator.propose = record  # type: ignore[method-assign]
    return blocks


def check_blocks(blocks: Blocks, model: Path, head: dict[str, Tensor], every: int = 3, **settings: Any) -> None:
    """Compare every nth block with the reference, whose ``settings`` are those of the head."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert {len(drafts) for _, _, drafts in blocks} >= {1, 3}
    for tokens, logits, drafts in blocks[::every]:
        with torch.no_grad():
            found = whole(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            outputs = [found[layer + 1][0] for layer in LAYERS]
            embedding, lm_head = whole.model.embed_tokens.weight, whole.lm_head.weight
            expected, hidden = drafted_logits(head, outputs, embedding, lm_head, tokens[-1], len(logits), **settings)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
        assert drafts == chosen_drafts(head, expected, hidden, tokens[-1])
