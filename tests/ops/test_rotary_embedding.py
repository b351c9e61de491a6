"""Rotary embedding against fp64, and its tables against transformers'."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, Guarded, assert_bitwise, assert_rounded, device_fixture, num_threads
from torch import Tensor

from fastinfer import ops
from fastinfer.ops import RopeScaling

device = device_fixture("cpu", "cuda", "emulated")

MAX_POSITION = 300


def random_case(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and positions in no order, with the table's last row among them."""
    q = torch.randn(tokens, q_heads, head_dim, device=device).to(dtype)
    k = torch.randn(tokens, kv_heads, head_dim, device=device).to(dtype)
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device)
    positions[-1:] = MAX_POSITION - 1
    return q, k, positions


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (0, 9, 3, 64, 64),
        (1, 9, 3, 64, 64),
        (2, 1, 1, 2, 2),
        (19, 4, 4, 80, 32),
        (19, 3, 1, 96, 96),
        (99, 9, 3, 64, 64),
        (5, 8, 2, 128, 126),
        (5, 4, 1, 256, 256),
        (7, 2, 2, 64, 10),
    ],
)
def test_rotary_embedding(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    interleaved: bool,
    device: str,
) -> None:
    q, k, positions = random_case(tokens, q_heads, kv_heads, head_dim, dtype, device)
    table = ops.cos_sin_cache(rotary_dim, MAX_POSITION).to(device)
    expected = [reference.rotary_embedding(t, positions, table, interleaved) for t in (q, k)]
    rest = q[..., rotary_dim:].clone()
    ops.rotary_embedding(q, k, positions, table, interleaved)
    assert_rounded(q, expected[0])
    assert_rounded(k, expected[1])
    assert_bitwise(q[..., rotary_dim:], rest)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views_of_a_fused_projection(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    q, k, positions = random_case(19, 9, 3, 64, dtype, device)
    table = ops.cos_sin_cache(64, MAX_POSITION).to(device)
    strided_q, strided_k = Guarded(q), Guarded(k)
    ops.rotary_embedding(strided_q.view, strided_k.view, positions, table, interleaved)
    ops.rotary_embedding(q, k, positions, table, interleaved)
    assert_bitwise(strided_q.view, q)
    assert_bitwise(strided_k.view, k)
    strided_q.assert_intact()
    strided_k.assert_intact()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(dtype: torch.dtype, device: str) -> None:
    q, k, positions = random_case(99, 9, 3, 64, dtype, device)
    table = ops.cos_sin_cache(64, MAX_POSITION).to(device)
    results = []
    for threads, size in [(1, 99), (2, 99), (2, 1)]:
        rotated_q, rotated_k = q.clone(), k.clone()
        with num_threads(threads):
            for chunk in zip(rotated_q.split(size), rotated_k.split(size), positions.split(size), strict=True):
                ops.rotary_embedding(*chunk, table)
        results.append((rotated_q, rotated_k))
    for rotated_q, rotated_k in results[1:]:
        assert_bitwise(rotated_q, results[0][0])
        assert_bitwise(rotated_k, results[0][1])


def test_reference_is_that_of_transformers() -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_interleaved
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

    torch.manual_seed(0)
    q, k, positions = random_case(19, 4, 2, 64, torch.float64, "cpu")
    table = ops.cos_sin_cache(64, MAX_POSITION).double()
    cos, sin = table[positions].chunk(2, -1)
    halves = rotate_halves(q[None], k[None], cos.repeat(1, 2)[None], sin.repeat(1, 2)[None], unsqueeze_dim=2)
    torch.testing.assert_close(reference.rotary_embedding(q, positions, table), halves[0][0])
    torch.testing.assert_close(reference.rotary_embedding(k, positions, table), halves[1][0])
    pairs = rotate_interleaved(q[None], sin[None], cos[None])[0]
    torch.testing.assert_close(reference.rotary_embedding(q, positions, table, interleaved=True), pairs)


# The keys of a model's config.json, and the scaling that fastinfer makes of them. Dynamic NTK of factor 4 at twice the
# trained length stretches by 4 * 2 - 3 = 5.
SCALINGS: dict[str, tuple[dict[str, Any], RopeScaling]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
    "ntk": ({"rope_type": "dynamic", "factor": 4.0}, RopeScaling("ntk", 5.0)),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
        RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        RopeScaling("yarn", 4.0, 4096),
    ),
    "yarn, own borders": (
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}
        | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5},
        RopeScaling("yarn", 16.0, 2048, beta_fast=8.0, beta_slow=2.0, attention_factor=1.5),
    ),
}


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_tables_are_those_of_transformers(name: str, head_dim: int, base: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters, scaling = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters=parameters | {"rope_theta": base},
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=8192)
    angles = torch.outer(torch.arange(1000.0).double(), frequencies.double())
    expected = torch.cat([angles.cos(), angles.sin()], -1) * magnitude
    table = ops.cos_sin_cache(head_dim, 1000, base, scaling)
    assert table.dtype == torch.float32
    # transformers' frequencies are fp32: 1e-7 of error times position 1000.
    torch.testing.assert_close(table.double(), expected, rtol=0, atol=3e-4)


def test_plain_table() -> None:
    table = ops.cos_sin_cache(8, 5, base=100.0)
    for position in range(5):
        angles = torch.tensor([position * 100.0 ** (-2 * i / 8) for i in range(4)]).double()
        torch.testing.assert_close(table[position], torch.cat([angles.cos(), angles.sin()]).float())


@pytest.mark.parametrize(
    ("rotary_dim", "scaling", "message"),
    [
        (7, None, "rotary_dim .* 7"),
        (0, None, "rotary_dim .* 0"),
        (64, RopeScaling("cubic"), "scaling.kind .*'cubic'"),
        (64, RopeScaling("yarn", 4.0), "original_max_position"),
        (64, RopeScaling("llama3", 4.0), "original_max_position"),
        (4, RopeScaling("longrope", 2.0, 1, short_factors=(1.0, 1.0)), "at least 2 as original_max_position, got 1"),
        (64, RopeScaling("linear", 0.0), "factor must be a positive, finite number, got 0.0"),
        (64, RopeScaling("ntk", -2.0), "factor must be a positive, finite number, got -2.0"),
        (64, RopeScaling("yarn", float("inf"), 8), "factor must be a positive, finite number, got inf"),
        (64, RopeScaling("llama3", float("nan"), 8), "factor must be a positive, finite number, got nan"),
    ],
)
def test_table_errors(rotary_dim: int, scaling: RopeScaling | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.cos_sin_cache(rotary_dim, 10, scaling=scaling)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4), ()])
def test_factors_of_frequencies_have_one_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"frequency_factors must have the shape \[4\], got \["):
        ops.cos_sin_cache(8, 3, frequency_factors=torch.ones(shape))


GOOD: dict[str, Any] = {
    "q": torch.zeros(3, 4, 64),
    "k": torch.zeros(3, 2, 64),
    "positions": torch.arange(3),
    "cos_sin_cache": torch.zeros(10, 64),
}
BAD: dict[str, tuple[str, Tensor]] = {
    "q dtype": ("q", torch.zeros(3, 4, 64).double()),
    "q 2-d": ("q", torch.zeros(3, 256)),
    "q heads strided": ("q", torch.zeros(3, 64, 4).transpose(1, 2)),
    "k dtype is not q's": ("k", torch.zeros(3, 2, 64).half()),
    "k tokens": ("k", torch.zeros(2, 2, 64)),
    "k head_dim": ("k", torch.zeros(3, 2, 32)),
    "positions int32": ("positions", torch.arange(3).int()),
    "positions length": ("positions", torch.arange(4)),
    "position past the table": ("positions", torch.tensor([0, 10, 1])),
    "position negative": ("positions", torch.tensor([0, -1, 1])),
    "table dtype": ("cos_sin_cache", torch.zeros(10, 64).half()),
    "table wider than the head": ("cos_sin_cache", torch.zeros(10, 66)),
    "table odd": ("cos_sin_cache", torch.zeros(10, 63)),
    "table strided": ("cos_sin_cache", torch.zeros(10, 128)[:, :64]),
}


@pytest.mark.parametrize("argument", ["q", "k"])
def test_overlapping_rows_are_refused(argument: str) -> None:
    """An expanded tensor would be rotated once per row, in the same place."""
    expanded = torch.ones(1, *GOOD[argument].shape[1:]).expand_as(GOOD[argument])
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b.*overlap"):
        ops.rotary_embedding(**(GOOD | {argument: expanded}))


def test_a_long_table_is_made_in_slices() -> None:
    table = ops.cos_sin_cache(8, 20_001, base=100.0)
    angles = torch.outer(torch.arange(20_001).double(), 100.0 ** (-torch.arange(4).double() / 4))
    torch.testing.assert_close(table, torch.cat([angles.cos(), angles.sin()], -1).float(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, value = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.rotary_embedding(**(GOOD | {argument: value}))


@pytest.mark.parametrize("interleaved", [False, True])
def test_unaligned_table(interleaved: bool, device: str) -> None:
    q, k, positions = random_case(7, 4, 2, 64, torch.bfloat16, device)
    table = ops.cos_sin_cache(64, MAX_POSITION).to(device)
    expected = [reference.rotary_embedding(t, positions, table, interleaved) for t in (q, k)]
    unaligned = torch.cat([table.new_full((1,), torch.nan), table.flatten()])[1:].view_as(table)
    ops.rotary_embedding(q, k, positions, unaligned, interleaved)
    for out, reference_out in zip((q, k), expected, strict=True):
        assert_rounded(out, reference_out)
