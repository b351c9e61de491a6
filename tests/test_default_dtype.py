"""Results do not depend on torch's default dtype, which programs set to build a model in bf16 or fp64."""

import runpy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.families import make_model, some_tokens
from support.helpers import assert_bitwise, default_dtype
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastinfer import ops
from fastinfer.engine.draft_model import spread
from fastinfer.formats.gguf_rows import GGUFRows
from fastinfer.formats.gguf_types import GGUFType
from fastinfer.integrations.transformers import replace
from fastinfer.nn.dense_cache import dense_cache_attention
from fastinfer.quantize import rounding
from fastinfer.quantize.awq import search_clipping, search_scales
from fastinfer.quantize.gptq import quantize_gptq
from fastinfer.quantize.statistics import InputStatistics


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))


def attention_with_sinks() -> Tensor:
    return dense_cache_attention(random(1, 3, 2, 16), *random(2, 1, 2, 3, 16), sinks=random(2))


def quantized(search: Callable[..., Any], weight: Tensor) -> Any:
    found = search(weight, InputStatistics.of(random(64, 128)), 4, 32)
    return found if isinstance(found, Tensor) else list(vars(found).values())


def read_dense_rows() -> Tensor:
    data = np.arange(210, dtype=np.uint8).reshape(1, 210) % 60  # one block of Q6_K
    rows = GGUFRows.of(data, GGUFType.Q6_K, exact=True)
    return rows.unpack().dequantize()


def replaced_model() -> Tensor:
    """Its tables of rotary embeddings are computed while its modules are replaced."""
    with default_dtype(torch.float32):
        model = make_model("llama2")
    replace(model)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([some_tokens()])).logits
    return logits


CASES: dict[str, Callable[[], Any]] = {
    "cos_sin_cache": lambda: ops.cos_sin_cache(8, 700),
    "sinks": attention_with_sinks,
    "nf4": lambda: runpy.run_path(rounding.__file__)["NF4_TABLE"],
    "gptq": lambda: quantized(quantize_gptq, random(48, 128)),
    "awq scales": lambda: quantized(search_scales, random(48, 128)),
    "awq clipping": lambda: quantized(search_clipping, random(48, 128)),
    "gguf": read_dense_rows,
    "draft vocabulary": lambda: spread(random(3, 5), torch.tensor([4, 0, 9, 2, 3]), 12),
    "transformers": replaced_model,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_default_dtype(case: str, dtype: torch.dtype) -> None:
    expected = tree_leaves(CASES[case]())
    with default_dtype(dtype):
        results = tree_leaves(CASES[case]())
    for result, value in zip(results, expected, strict=True):
        assert_bitwise(result, value) if isinstance(value, Tensor) else None
        assert type(result) is type(value)
