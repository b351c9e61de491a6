"""The modules alone: what they compute, and that their states are those of transformers' modules."""

from typing import Any

import pytest
import torch
from support.families import make_model
from torch import nn
from transformers import DynamicCache

from fastinfer import ops
from fastinfer.nn import Attention, FusedMLP, RMSNorm, RotaryEmbedding
from fastinfer.nn.rotary import rotary_table

KINDS = [None, "int4", "int8", "nf4"]


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


def make_mlp(quantize: str | None = None, bias: bool = True) -> FusedMLP:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias), nn.Linear(96, 64, bias)
    return FusedMLP(*layers, activation="gelu_tanh", quantize=quantize, activation_bits=32)


def make_attention(quantize: str | None = None, norms: bool = False, **options: Any) -> Attention:
    torch.manual_seed(0)
    layers = [nn.Linear(64, rows, bias=False) for rows in (128, 64, 64)] + [nn.Linear(128, 64, bias=False)]
    named = {name: RMSNorm(32, unit_offset=True) for name in ("q_norm", "k_norm")} if norms else {}
    return Attention(*layers, head_dim=32, layer_idx=0, quantize=quantize, activation_bits=32, **named, **options)


def test_rms_norm() -> None:
    x, norm = torch.randn(2, 3, 64), RMSNorm(64, eps=1e-5)
    nn.init.normal_(norm.weight)
    close(norm(x), nn.functional.rms_norm(x, (64,), norm.weight, 1e-5))
    close(norm(x.transpose(0, 1)), norm(x).transpose(0, 1))


def test_unit_offset_follows_the_weight() -> None:
    norm = RMSNorm(64, unit_offset=True)
    x = torch.randn(3, 64)
    norm.load_state_dict({"weight": torch.full((64,), 0.5)})
    assert list(norm.state_dict()) == ["weight"]
    close(norm(x), nn.functional.rms_norm(x, (64,), torch.full((64,), 1.5), 1e-6))


def test_unit_offset_is_added_in_fp32_after_a_cast() -> None:
    norm = RMSNorm(64, unit_offset=True)
    nn.init.constant_(norm.weight, 2**-10)  # which 1 would swallow in bf16
    scale = norm.to(torch.bfloat16).as_options()["norm_weight"]
    assert (scale.dtype, norm.weight.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(scale, torch.full((64,), 1 + 2**-10))


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_state(quantize: str | None, bias: bool) -> None:
    """Three layers, each as if it stood alone; also from dense weights."""
    mlp = make_mlp(quantize, bias)
    state = mlp.state_dict()
    kinds = {None: {"weight"}, "int4": {"qweight", "scales", "mins"}}.get(quantize, {"qweight", "scales"})
    kinds |= {"bias"} if bias else set()
    assert set(state) == {f"{name}.{kind}" for name in ("gate_proj", "up_proj", "down_proj") for kind in kinds}
    torch.manual_seed(1)
    other = FusedMLP(
        *(nn.Linear(i, o, bias) for i, o in ((64, 96), (64, 96), (96, 64))),
        activation="gelu_tanh",
        quantize=quantize,
        activation_bits=32,
    )
    x = torch.randn(2, 5, 64)
    assert not torch.equal(other(x), mlp(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), mlp(x))
    other.load_state_dict(make_mlp(None, bias).state_dict())
    assert torch.equal(other(x), mlp(x))


@pytest.mark.parametrize("quantize", KINDS)
def test_attention_state(quantize: str | None) -> None:
    attention = make_attention(quantize, norms=True)
    names = {name.partition(".")[0] for name in attention.state_dict()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    other = make_attention(quantize, norms=True)
    nn.init.zeros_(other.o_proj.weight) if quantize is None else other.o_proj.scales.zero_()
    x = torch.randn(2, 5, 64)
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(x)[0], attention(x)[0])
    other.load_state_dict(make_attention(None, norms=True).state_dict())
    assert torch.equal(other(x)[0], attention(x)[0])


@pytest.mark.parametrize("quantize", ["int4", "nf4"])
def test_dense_states_assigned_to_meta(quantize: str) -> None:
    x = torch.randn(2, 5, 64)
    for make in (make_mlp, make_attention):
        with torch.device("meta"):
            empty = make(quantize)
        empty.load_state_dict(make().state_dict(), assign=True)
        ours, expected = (torch.utils._pytree.tree_leaves(module(x))[0] for module in (empty, make(quantize)))
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("family", ["llama2", "llama-biases", "qwen2", "qwen3", "gemma2", "gemma3", "mistral"])
def test_states_of_transformers(family: str) -> None:
    """A replaced model's state is the original's, name by name and bit by bit."""
    from fastinfer.integrations.transformers import replace

    model = make_model(family)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    replace(model)
    after = model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.load_state_dict(before)


def test_rotary_forms_agree() -> None:
    """The table, and transformers' cosines and sines of the same positions."""
    table = ops.cos_sin_cache(32, 50)
    positions = torch.tensor([[3, 4, 5], [7, 8, 9]])
    rotary = RotaryEmbedding(table)
    x = torch.randn(2, 3, 64)
    cos, sin = (half.repeat(1, 1, 2) for half in table[positions].chunk(2, -1))
    attention = make_attention()
    ours = attention(x, rotary(x, positions))[0]
    theirs = attention(x, (cos, sin))[0]
    assert torch.equal(ours, theirs)
    one = rotary_table((cos[:1], sin[:1]), 2, 3)  # one row of positions for all
    assert torch.equal(one[1], torch.tensor([0, 1, 2, 0, 1, 2]))
    assert rotary.bfloat16()(x, positions)[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_has_two_names(name: str) -> None:
    """That of transformers 5.24, and the one before."""
    attention, x = make_attention(), torch.randn(1, 5, 64)
    cache = DynamicCache()
    parts = [attention(part, **{name: cache})[0] for part in x.split([3, 2], 1)]
    close(torch.cat(parts, 1), attention(x)[0])


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("norms", [True, False])
def test_no_tokens(batch: int, length: int, norms: bool) -> None:
    attention, cache = make_attention(norms=norms), DynamicCache()
    rotary = RotaryEmbedding(ops.cos_sin_cache(32, 50))
    x, positions = torch.zeros(batch, length, 64), torch.zeros(batch, length, dtype=torch.int64)
    cos, sin = torch.ones(2, batch, length, 32)
    visible = torch.zeros(batch, 1, 1, 2, dtype=torch.int32)
    for embedding in (None, rotary(x, positions), (cos, sin)):
        for mask in (None, visible):
            assert attention(x, embedding, mask, DynamicCache())[0].shape == (batch, length, 64)
    if batch:
        attention(torch.randn(batch, 3, 64), cache=cache)
        assert attention(x, cache=cache)[0].shape == (batch, length, 64)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_one_norm_alone(name: str) -> None:
    attention, norm = make_attention(), RMSNorm(32)
    nn.init.normal_(norm.weight)
    setattr(attention, name, norm)
    x = torch.randn(1, 5, 64)
    heads = dict(
        zip(("q_norm", "k_norm", "v"), attention.qkv_proj(x).view(1, 5, 8, 32).split([4, 2, 2], 2), strict=True)
    )
    heads[name] = norm(heads[name])
    q, k, v = (t.transpose(1, 2) for t in heads.values())
    attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    close(attention(x)[0], attention.o_proj(attended.transpose(1, 2).flatten(2)))


def test_errors() -> None:
    linear = nn.Linear(64, 96)
    with pytest.raises(ValueError, match="activation must be silu, gelu_tanh or gelu, got 'relu'"):
        FusedMLP(linear, linear, nn.Linear(96, 64), activation="relu")
    with pytest.raises(ValueError, match=r"multiple of 16 rows, got \[100, 100\]"):
        FusedMLP(nn.Linear(64, 100), nn.Linear(64, 100), nn.Linear(100, 64))
    with pytest.raises(ValueError, match=r"one number of inputs, got \[64, 32\]"):
        FusedMLP(linear, nn.Linear(32, 96), nn.Linear(96, 64))
    with pytest.raises(ValueError, match="a bias, or none"):
        FusedMLP(linear, nn.Linear(64, 96, bias=False), nn.Linear(96, 64))
    with pytest.raises(ValueError, match="whole heads of 40"):
        Attention(*[nn.Linear(64, 64)] * 4, head_dim=40, layer_idx=0)
    for sizes in ((96, 64, 64), (64, 32, 64)):  # 3 heads of q for 2 of k; 1 of k for 2 of v
        with pytest.raises(ValueError, match="as many of k as of v, got"):
            Attention(*[nn.Linear(64, size) for size in sizes], nn.Linear(sizes[0], 64), head_dim=32, layer_idx=0)
