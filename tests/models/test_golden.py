"""The real model against transformers, in fp32 on the dequantised weights of the same file.

The text is the project's licence: English that the model has not been made to repeat, and long enough for four
stretches of 512 tokens.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.paths import DATA
from support.teacher_forcing import log_probabilities, mean_loss
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastinfer import LLM, BeamSearchParams
from fastinfer.models import load_model

pytestmark = pytest.mark.slow

TOKENS = 512
STRETCHES = 4


@pytest.fixture(scope="module")
def token_ids(model_path: Path) -> list[list[int]]:
    text = (DATA / "license.txt").read_text()
    _, tokenizer = load_model(model_path)
    ids = tokenizer.encode(text)
    return [ids[start : start + TOKENS] for start in range(0, STRETCHES * TOKENS, TOKENS)]


@pytest.fixture(scope="module")
def original(model_path: Path) -> Any:
    """transformers' model."""
    return AutoModelForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(original: Any, token_ids: list[list[int]]) -> list[Tensor]:
    """transformers' log-probabilities [512, vocab] of each stretch."""
    with torch.inference_mode():
        return [original(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in token_ids]


def test_weights_are_those_of_the_file(model_path: Path) -> None:
    """Bitwise what the gguf package dequantises, through packing, concatenation and reordering."""
    model, _ = load_model(model_path, "float32")
    reader = gguf.GGUFReader(model_path)
    file = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    config = model.config

    def halves(name: str, heads: int) -> Tensor:
        """Rows from neighbouring pairs back to halves, as the original checkpoint had them."""
        return file[name].view(heads, config.head_dim // 2, 2, -1).transpose(1, 2).reshape(-1, config.hidden_size)

    assert torch.equal(model.embedding.rows(None, torch.float32), file["token_embd.weight"])
    assert torch.equal(model.norm.weight, file["output_norm.weight"])
    assert len(model.layers) == config.num_layers
    for index, layer in enumerate(model.layers):
        q = halves(f"blk.{index}.attn_q.weight", config.num_heads)
        k = halves(f"blk.{index}.attn_k.weight", config.num_kv_heads)
        v = file[f"blk.{index}.attn_v.weight"]
        assert torch.equal(layer.attention.qkv.rows(None, torch.float32), torch.cat([q, k, v]))
        gate_up = layer.mlp.gate_up.rows(None, torch.float32).view(-1, 2, 16, config.hidden_size)
        assert torch.equal(gate_up[:, 0].flatten(0, 1), file[f"blk.{index}.ffn_gate.weight"])
        assert torch.equal(gate_up[:, 1].flatten(0, 1), file[f"blk.{index}.ffn_up.weight"])
        assert torch.equal(
            layer.attention.output.weight.rows(None, torch.float32), file[f"blk.{index}.attn_output.weight"]
        )
        assert torch.equal(layer.mlp.down.weight.rows(None, torch.float32), file[f"blk.{index}.ffn_down.weight"])
        assert torch.equal(layer.attention.norm.weight, file[f"blk.{index}.attn_norm.weight"])
        assert torch.equal(layer.mlp.norm.weight, file[f"blk.{index}.ffn_norm.weight"])


def test_fp32_log_probabilities_are_within_1e_3(
    model_path: Path, token_ids: list[list[int]], expected: list[Tensor]
) -> None:
    model, _ = load_model(model_path, "float32")
    for ids, reference in zip(token_ids, expected, strict=True):
        assert (log_probabilities(model, ids, "float32") - reference).abs().max() < 1e-3


def test_default_mode_agrees_with_fp32(model_path: Path, token_ids: list[list[int]], expected: list[Tensor]) -> None:
    """Integer products: the same most likely token at 97 % of the positions, and perplexity within 1 %."""
    model, _ = load_model(model_path)
    agreement, loss, reference_loss = [], [], []
    for ids, reference in zip(token_ids, expected, strict=True):
        log_probs = log_probabilities(model, ids, "auto")
        agreement.append((log_probs.argmax(-1) == reference.argmax(-1)).float().mean().item())
        loss.append(mean_loss(log_probs, ids))
        reference_loss.append(mean_loss(reference, ids))
    print(agreement, np.expm1(np.mean(loss) - np.mean(reference_loss)))
    assert np.mean(agreement) >= 0.97, agreement
    assert abs(np.expm1(np.mean(loss) - np.mean(reference_loss))) < 0.01, (loss, reference_loss)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(
    dtype: str, model_path: Path, token_ids: list[list[int]], expected: list[Tensor]
) -> None:
    model, _ = load_model(model_path, dtype)
    log_probs = log_probabilities(model, token_ids[0], dtype)
    assert abs(np.expm1(mean_loss(log_probs, token_ids[0]) - mean_loss(expected[0], token_ids[0]))) < 0.03


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_beam_search_finds_the_same_texts(model_path: Path, original: Any, length_penalty: float) -> None:
    width, max_tokens = 3, 12
    llm = LLM(str(model_path), dtype="float32", max_model_len=128, max_num_seqs=8)
    for prompt in (
        "The capital of France is",
        "Once upon a time",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ):
        ids = llm.tokenizer.encode(prompt)
        texts = original.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=length_penalty,
            do_sample=False,
            pad_token_id=0,
        )
        params = BeamSearchParams(width, max_tokens=max_tokens, length_penalty=length_penalty)
        [output] = llm.beam_search({"prompt_token_ids": ids}, params)
        found = [ids + completion.token_ids for completion in output.outputs]
        for text, tokens in zip(texts.tolist(), found, strict=True):
            assert text[: len(tokens)] == tokens
            assert set(text[len(tokens) :]) <= {tokens[-1]}  # padding
