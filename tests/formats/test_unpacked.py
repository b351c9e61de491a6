"""Rows of unpacked weights picked, reordered and concatenated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastinfer.formats.gguf_rows import IQ4_NL_TABLE
from fastinfer.formats.mxfp4 import MXFP4_TABLE
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked, concatenate, in_one_form
from fastinfer.quantize.rounding import NF4_TABLE
from fastinfer.utils.huge_pages import HugePages
from fastinfer.weights.pack import make_weight
from fastinfer.weights.weight import ConcatenatedWeight, DenseWeight, LutWeight

ROWS, COLUMNS, GROUPS = 6, 64, 2


def weights() -> dict[str, Unpacked]:
    torch.manual_seed(0)
    q = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8)
    scales, mins = torch.rand(ROWS, GROUPS).half(), torch.randn(ROWS, GROUPS).half()
    signed = torch.randint(-128, 128, (ROWS, COLUMNS)).to(torch.int8)
    return {
        "dense": Dense(torch.randn(ROWS, COLUMNS).bfloat16()),
        "int4": Int4(q, scales),
        "int4 mins": Int4(q, scales, mins),
        "int4 permuted": Int4(q, scales, mins, torch.randperm(COLUMNS)),
        "int8": Int8(signed, scales),
        "int8 mins": Int8(signed, scales, mins),
        "w8a8": Int8(signed, scales[:, :1], int8_activations=True),
        "table": Lut(q, scales, table=torch.randn(16)),
    }


@pytest.mark.parametrize("name", weights())
def test_rows_and_their_concatenation(name: str) -> None:
    weight = weights()[name]
    assert weight.shape == (ROWS, COLUMNS)
    whole = weight.dequantize()
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(weight.rows(order).dequantize(), whole[order])
    assert torch.equal(weight.rows(slice(1, 3)).dequantize(), whole[1:3])
    joined = concatenate([weight.rows(slice(4, 6)), weight.rows(slice(0, 4))])
    assert type(joined) is type(weight)
    assert torch.equal(joined.dequantize(), torch.cat([whole[4:], whole[:4]]))


@pytest.mark.parametrize("name", sorted(weights().keys() - {"int4 permuted"}))
def test_columns(name: str) -> None:
    weight = weights()[name]
    for index in (torch.arange(32, 64), torch.cat([torch.arange(32, 64), torch.arange(32)])):
        part = weight.columns(index)
        assert type(part) is type(weight)
        assert torch.equal(part.dequantize(), weight.dequantize()[:, index])


def test_columns_of_one_group_are_selected_in_any_order() -> None:
    weight, index = weights()["w8a8"], torch.randperm(COLUMNS)[:32]
    assert torch.equal(weight.columns(index).dequantize(), weight.dequantize()[:, index])


def test_a_group_that_is_cut_becomes_smaller_groups() -> None:
    weight = Int4(torch.randint(0, 16, (ROWS, 384), dtype=torch.uint8), torch.rand(ROWS, 3).half())
    for columns, groups in [(range(128, 384), 2), (range(64, 384), 5), (range(32, 256), 7)]:
        part = weight.columns(torch.tensor(columns))
        assert part.scales.shape == (ROWS, groups)
        assert torch.equal(part.dequantize(), weight.dequantize()[:, columns.start : columns.stop])


@pytest.mark.parametrize("name", ["int4", "int4 permuted"])
def test_columns_that_cannot_be_selected(name: str) -> None:
    for columns in [range(16, 48)] if name == "int4" else [range(32), range(16, 48)]:
        with pytest.raises(ValueError, match=r"in runs of 32 neighbours, and must not be permuted .*got 32 of 64"):
            weights()[name].columns(torch.tensor(columns))


def test_permuted_columns() -> None:
    """Column j of the integers is the model's input ``permutation[j]``."""
    q = torch.arange(32, dtype=torch.int8)[None]
    order = torch.randperm(32)
    weight = Int8(q, torch.ones(1, 1).half(), permutation=order).dequantize()
    assert torch.equal(weight[0, order], q[0].float())


def test_products_with_permuted_columns() -> None:
    """A fused norm has its weights in the order of the inputs."""
    weight = weights()["int4 permuted"]
    assert isinstance(weight, Int4)
    expected, packed = weight.dequantize(), make_weight(weight, 32)
    assert torch.equal(packed.rows(None, torch.float32), expected)
    ids = torch.tensor([4, 1])
    assert torch.equal(packed.rows(ids, torch.float32), expected[ids])
    x, norm_weight = torch.randn(3, COLUMNS), torch.rand(COLUMNS)
    torch.testing.assert_close(packed.linear(x), x @ expected.T)
    normed = torch.nn.functional.rms_norm(x, (COLUMNS,), norm_weight, 1e-6)
    torch.testing.assert_close(packed.linear(x, norm_weight=norm_weight, eps=1e-6), normed @ expected.T)


def test_products_of_int8_inputs_have_an_activation_and_a_residual() -> None:
    q, scales = torch.randint(-128, 128, (32, COLUMNS)).to(torch.int8), torch.rand(32, 1).half() / 100
    packed = make_weight(Int8(q, scales, int8_activations=True), 8)
    x, residual = torch.randn(3, COLUMNS), torch.randn(3, 32)
    plain = packed.linear(x)
    torch.testing.assert_close(packed.linear(x, residual=residual), plain + residual)
    gated = torch.nn.functional.silu(plain[:, :16]) * plain[:, 16:]
    torch.testing.assert_close(packed.linear(x, activation="silu"), gated, rtol=1e-4, atol=1e-4)


def test_concatenated_weights() -> None:
    parts = [make_weight(weights()[name], 32) for name in ("int4", "dense")]
    weight, x = ConcatenatedWeight(tuple(parts)), torch.randn(3, COLUMNS).bfloat16()
    expected = [part.linear(x) for part in parts]
    assert torch.equal(weight.linear(x), torch.cat(expected, dim=1))
    assert all(map(torch.equal, weight.split_linear(x, [ROWS, ROWS]), expected))
    with pytest.raises(ValueError, match=r"sizes must be those of the parts, \[6, 6\], got \[5, 7\]"):
        weight.split_linear(x, [5, 7])
    with pytest.raises(ValueError, match="supports neither activation nor residual, got residual"):
        weight.linear(x, residual=torch.zeros(3, 2 * ROWS).bfloat16())


def test_only_equal_forms_fit() -> None:
    forms = weights()
    for name, weight in forms.items():
        assert [other for other in forms if weight.fits(forms[other])] == [name]
    for name, changes in {
        "int4": {"scales": torch.ones(ROWS, GROUPS)},
        "int8": {"scales": torch.ones(ROWS, 1).half()},
        "table": {"table": torch.zeros(16)},
        "int4 permuted": {"permutation": torch.arange(COLUMNS)},
        "dense": {"values": torch.ones(ROWS, COLUMNS)},
    }.items():
        assert not forms[name].fits(replace(forms[name], **changes))
    with pytest.raises(ValueError, match=r"parts must have one form, got \['Int4', 'Int8'\]"):
        concatenate([forms["int4"], forms["int8"]])


def test_forms_that_become_one() -> None:
    """8-bit integers in the smaller groups, with minimums if one has them; no number is rounded."""
    forms = weights() | {"integers": Lut(weights()["int4"].q, torch.rand(ROWS, 1), table=torch.arange(-8.0, 8) * 5)}
    for names in (("int4", "int8"), ("integers", "int4 mins"), ("int8 mins", "int8", "integers")):
        parts = [forms[name] for name in names]
        found = in_one_form(parts)
        assert found is not None
        assert all(found[0].fits(part) for part in found)
        assert (found[0].mins is not None) == any(name.endswith("mins") for name in names)
        for part, weight in zip(parts, found, strict=True):
            assert torch.equal(weight.dequantize(), part.dequantize())
    for name in ("dense", "int4 permuted", "w8a8", "table"):
        assert in_one_form([forms["int4"], forms[name]]) is None


def test_values_of_a_mapped_file_are_copied(tmp_path: Path) -> None:
    """If the file was cut later, reading them would end the process."""
    (tmp_path / "values").write_bytes(bytes(4 * ROWS * COLUMNS))
    values = torch.from_file(str(tmp_path / "values"), shared=True, size=ROWS * COLUMNS).view(ROWS, COLUMNS)
    weight = make_weight(Dense(values), 32)
    assert isinstance(weight, DenseWeight)
    values.fill_(1.0)
    assert not weight.values.any()


def test_inputs_are_rounded_where_the_table_is_int8() -> None:
    q, x = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8), torch.randn(3, COLUMNS)
    for table, bits in {MXFP4_TABLE: 8, IQ4_NL_TABLE: 8, NF4_TABLE: 32, torch.full((16,), 128.0): 32}.items():
        unpacked = Lut(q, torch.ones(ROWS, GROUPS), table=table)
        weight = make_weight(unpacked, 8)
        assert isinstance(weight, LutWeight)
        assert weight.activation_bits == bits
        expected = x.double() @ unpacked.dequantize().double().T
        assert (weight.linear(x) - expected).norm() < (0.01 if bits == 8 else 1e-6) * expected.norm()


@pytest.mark.parametrize("form", ["dense", "dense in parts", "int4 mins"])
def test_all_weights_are_where_the_allocator_puts_them(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also matrices that were joined in torch's memory, in whose small pages they would be read a third slower."""
    if form == "dense in parts":
        parts: list[Unpacked] = [Dense(torch.randn(16, COLUMNS)), Dense(torch.randn(5, COLUMNS))]
    else:
        parts = [weights()[form]]
    memory = HugePages()
    places = []

    def empty(*args: Any) -> torch.Tensor:
        places.append(HugePages.empty(memory, *args))
        return places[-1]

    monkeypatch.setattr(memory, "empty", empty)
    weight = make_weight(iter(parts), 8, memory=memory, out_features=sum(part.shape[0] for part in parts))
    tensors = [value for value in vars(weight).values() if isinstance(value, torch.Tensor)]
    assert [tensor.data_ptr() for tensor in tensors] == [place.data_ptr() for place in places]
    if isinstance(weight, DenseWeight):
        assert torch.equal(weight.values.float(), torch.cat([part.dequantize() for part in parts]))
