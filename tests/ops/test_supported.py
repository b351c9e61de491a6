"""``fastinfer.ops.supported`` says what the operators do: each is called with every dtype, head size and width.

The README's columns of devices and the table of the pages are made from the same data.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.helpers import device_fixture
from support.op_calls import int32, op_calls, parallel_calls
from support.paths import ROOT
from support.peers import lone_rank
from support.placement import EmulatedDevice, host_operators
from torch import Tensor

from fastinfer import ops
from fastinfer.ops import _library, support

Call = dict[str, Any]

pytestmark = pytest.mark.repeats
device = device_fixture("cpu", "cuda", "emulated")

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.int32,
    torch.int64,
]
HEAD_DIMS = [1, 2, 7, 16, 63, 64, 65, 80, 96, 100, 128, 192, 256, 257, 320, 512]
HEADS_OPS = [op for op, takes in support.TABLE.items() if takes["cpu"].head_dim]
OTHER_OPS = [op for op in support.TABLE if op not in HEADS_OPS]
LINEAR_OPS = [op for op in OTHER_OPS if "gemm" in op and op != "w8a8_gemm"]
# Their groups are of CPUs or of GPUs.
EXCHANGES = ["all_gather", "all_gather_rows", "all_reduce", "all_reduce_add_rms_norm"]
ON_CPU_ALONE = [op for op in support.TABLE if not support.TABLE[op]["cuda"].dtype]

# Of each operator the tensors that are its weight; the default holds for the rest.
WEIGHTS = {
    "layer_norm": ["weight", "bias"],
    "add_lora": ["a", "b"],
    "norm_rotary_store": ["q_norm_weight", "k_norm_weight"],
    "latent_rotary_store": ["norm_weight"],
    "embedding": [],
    "causal_conv1d": ["weight", "bias"],
    "gated_delta_rule": ["norm_weight"],
    "mamba2_scan": ["norm_weight"],
}
# Tensors that must have the dtype of the operator's first one. An embedding's residual need not.
FOLLOWERS = {
    "embedding": [],
    "merge_attention_states": ["b"],
    "add_lora": ["x"],
    "latent_rotary_store": ["q_rope", "kv"],
    "w8a8_gemm": [],
    "sample": [],
    "sigmoid_gate": ["gate"],
    "softplus_gate": ["gate"],
    "causal_conv1d": ["conv_state", "gates"],
    "gated_delta_rule": ["z", "a", "b"],
    "mamba2_scan": ["z", "dt"],
}
KEYWORDS = ("dtype", "weight_dtype", "cache_dtype", "head_dim", "in_features", "activation_bits")


@pytest.fixture
def column(request: pytest.FixtureRequest, device: str) -> str:
    """The device whose kernels run, which on the emulator are CUDA's."""
    return "cpu" if request.node.callspec.params["device"] == "cpu" else "cuda"


def overload(op: str) -> Any:
    return getattr(_library.ops, op).default  # the emulator's, where that is the device


def calls_of(op: str) -> Iterator[Call]:
    """Operator calls by argument names."""
    with host_operators():  # which pack the weights; they are moved later
        calls = list(parallel_calls() if op in EXCHANGES else op_calls(cpu_alone=op in ON_CPU_ALONE))
    for name, args in calls:
        if name == op:
            names = [argument.name for argument in overload(op)._schema.arguments]
            yield dict(zip(names, args, strict=False))


def retyped(call: Call, names: list[str], dtype: torch.dtype) -> Call:
    return call | {name: call[name].to(dtype) for name in names if call.get(name) is not None}


def weights_of(op: str) -> list[str]:
    return WEIGHTS.get(op, ["weight", "qweight"])


def typed(op: str, call: Call, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Call:
    first = next(iter(call))
    if weight_dtype is not None:
        call = retyped(call, weights_of(op), weight_dtype)
    return retyped(call, [first, *FOLLOWERS.get(op, ["residual", "k", "v"])], dtype)


def accepts(op: str, call: Call, device: str) -> bool:
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}
    group = lone_rank(device) if op in EXCHANGES and (device == "cuda" or isinstance(device, EmulatedDevice)) else None
    if group is not None:
        moved["group"] = group.memory
    try:
        overload(op)(**moved)
    except RuntimeError as error:
        if not re.match(r"\w+: (on CUDA )?\w+ must ", str(error)):
            raise  # not a check of the arguments
        return False
    return True


def disagreements(op: str, column: str, device: str, calls: Iterator[tuple[Call, Call]]) -> list[str]:
    """Questions and calls on which ``supported`` and the operator differ; both answers must occur."""
    if op in ON_CPU_ALONE and column == "cuda":
        pytest.skip("no kernel")
    wrong, answers = [], set()
    for question, call in calls:
        answer = ops.supported(op, device=column, **question)
        answers.add(answer)
        if accepts(op, call, device) != answer:
            wrong.append(f"{op} on {column} with {question}: supported says {answer}")
    assert answers == {True, False}
    return wrong


# ---- operators without heads: the calls of op_calls.py ----


@pytest.mark.parametrize("op", OTHER_OPS)
def test_dtypes(op: str, column: str, device: str) -> None:
    weighted = support.TABLE[op][column].weight_dtype is not None

    def calls() -> Iterator[tuple[Call, Call]]:
        for call in calls_of(op):
            if not weighted:
                yield from (({"dtype": dtype}, typed(op, call, dtype, None)) for dtype in DTYPES)
                continue
            call.pop("activation_bits", None)
            for dtype, weight in itertools.product(DTYPES, DTYPES):
                fitting = {"activation_bits": 32} if support.TABLE[op][column].activation_bits else {}
                question = {"dtype": dtype, "weight_dtype": weight}
                yield question, typed(op, call | fitting, dtype, weight)

    assert not disagreements(op, column, device, calls())


@pytest.mark.parametrize("op", LINEAR_OPS)
def test_widths_and_activation_bits(op: str, column: str, device: str) -> None:
    def calls() -> Iterator[tuple[Call, Call]]:
        for call in calls_of(op):
            if "table" in call:
                call["table"] = call["table"].round()  # any number of bits takes integers
            widths = [1, 32, 200, 224, 256] if "int6" in op else [1, 8, 12, 31, 32, 40, 63, 64]
            for dtype, width in itertools.product(DTYPES[:4], widths):
                question = {"dtype": dtype, "in_features": width}
                fitting = retyped(call, ["weight"], dtype)
                for bits in (4, 8, 16, 32) if "activation_bits" in call else [None]:
                    if bits is None:
                        yield question, narrowed(typed(op, fitting, dtype, None), width)
                    elif width % 32 == 0:
                        asked = question | {"activation_bits": bits}
                        yield asked, narrowed(typed(op, fitting | {"activation_bits": bits}, dtype, None), width)

    assert not disagreements(op, column, device, calls())


def narrowed(call: Call, width: int) -> Call:
    """The call with so many inputs; a quantised weight of a width that cannot be packed keeps its own."""
    changed = {"x": call["x"][:, :width].contiguous()}
    if call.get("norm_weight") is not None:
        changed["norm_weight"] = call["norm_weight"][:width]
    if "weight" in call:
        changed["weight"] = call["weight"][..., :width].contiguous()
    elif width % 32 == 0:
        blocks = width // 32
        stack = call["qweight"].dim() - 5
        changed |= {
            name: call[name].narrow(stack + 1, 0, blocks).contiguous()
            for name in ("qweight", "scales", "mins")
            if call.get(name) is not None and call[name].shape[stack + 1] >= blocks
        }
    return call | changed


@pytest.mark.parametrize("op", ["int4_pack", "int5_pack", "int6_pack", "int8_pack"])
def test_widths_that_can_be_packed(op: str, column: str, device: str) -> None:
    dtype = torch.uint8 if op in ("int4_pack", "int5_pack") else torch.int8
    widths = [1, 16, 31, 32, 33, 64, 80, 96]
    calls = (({"in_features": width}, {"q": torch.zeros(3, width, dtype=dtype)}) for width in widths)
    assert not disagreements(op, column, device, calls)


def test_widest_w8a8_gemm(column: str, device: str) -> None:
    def calls() -> Iterator[tuple[Call, Call]]:
        for width in (131_040, 131_072):
            qweight = torch.zeros(1, width // 32, 8, 16, 4, dtype=torch.int8)
            x, scales = torch.zeros(1, width, dtype=torch.int8), torch.ones(1, 1, 16)
            call = [x, torch.ones(1), qweight, scales, 16, None, None, None, torch.float32]
            names = [argument.name for argument in overload("w8a8_gemm")._schema.arguments]
            yield {"in_features": width}, dict(zip(names, call, strict=False))

    assert not disagreements("w8a8_gemm", column, device, calls())


# ---- operators with heads ----


def heads_call(op: str, dtype: torch.dtype, cache: torch.dtype, weight: torch.dtype, head_dim: int) -> Call:
    q, k, v = (torch.zeros(3, heads, head_dim).to(dtype) for heads in (4, 2, 2))
    positions, slots = torch.arange(3), torch.tensor([5, -1, 17])
    ragged = {"seq_lens": int32(20), "query_start": int32(0, 3)}
    table = torch.zeros(4, 2 * (head_dim // 2))
    rotary = {"positions": positions, "cos_sin_cache": table, "interleaved": False}
    if op == "rotary_embedding":
        return {"q": q, "k": k, **rotary}
    if op == "select_pages":
        codes = torch.zeros(2, 2, head_dim // 8 + 1, 16).int()
        pages = {"block_size": 16, "share": 0.5, "num_dense_pages": 0, "scale": 1.0}
        return {"q": q, "codes": codes, "block_table": int32(0, 1)[None], **ragged, **pages}
    if op == "select_tokens":
        index = {"weights": torch.zeros(3, 4).to(dtype), "keys": torch.zeros(2, 16, 1, head_dim).to(cache)}
        return {"q": q, **index, "block_table": int32(0, 1)[None], **ragged, "top_k": 4}
    if op == "merge_attention_states":
        return {"a": q, "a_lse": torch.zeros(3, 4), "b": q.clone(), "b_lse": torch.zeros(3, 4)}
    if op == "paged_attention_plan":
        plan = {name: lengths.to(dtype) for name, lengths in ragged.items()}
        return plan | {"q_heads": 4, "kv_heads": 2, "head_dim": head_dim, "window": 0}
    columns = head_dim // 2 if cache == torch.uint8 else head_dim
    caches = {name: torch.zeros(2, 16, 2, columns).to(cache) for name in ("k_cache", "v_cache")}
    if cache == torch.uint8:
        groups = {"k_scale": -(-head_dim // 16), "v_scale": -(-head_dim // 64)}
        scales = {name: torch.zeros(2, 16, 2, count, 2).half() for name, count in groups.items()}
    elif cache in support.QUANTIZED_CACHES:
        scales = {name: torch.zeros(2, 16, 2) for name in ("k_scale", "v_scale")}
    else:
        scales = {"k_scale": None, "v_scale": None}
    if op == "store_key_codes":
        codes = torch.zeros(2, 2, head_dim // 8 + 1, 16).to(dtype)
        return {"codes": codes, "k_cache": caches["k_cache"], "k_scale": scales["k_scale"], "slot_mapping": slots}
    if op == "store_value_codes":
        codes = torch.zeros(2, 2, head_dim // 8 + 1, 16).to(dtype)
        return {"codes": codes, "v_cache": caches["v_cache"], "v_scale": scales["v_scale"], "slot_mapping": slots}
    if op == "store_kv_cache":
        return {"k": k, "v": v, **caches, "slot_mapping": slots, **scales}
    if op == "norm_rotary_store":
        norms = {name: torch.ones(head_dim).to(weight) for name in ("q_norm_weight", "k_norm_weight")}
        return {"q": q, "k": k, "v": v, **norms, "eps": 1e-6, **rotary, **caches, **scales, "slot_mapping": slots}
    assert op == "paged_attention"
    options = {"scale": 1.0, "window": 0, "softcap": 0.0, "sinks": None, "lse": None}
    return {"q": q, **caches, "block_table": int32(0, 1)[None], **ragged, **options, **scales}


@pytest.mark.parametrize("op", HEADS_OPS)
def test_dtypes_of_heads_caches_and_weights(op: str, column: str, device: str) -> None:
    takes = support.TABLE[op][column]
    caches = DTYPES if takes.cache_dtype else [None]
    weights = DTYPES if takes.weight_dtype else [None]

    def calls() -> Iterator[tuple[Call, Call]]:
        for dtype, cache, weight in itertools.product(DTYPES, caches, weights):
            yield (
                {"dtype": dtype, "cache_dtype": cache, "weight_dtype": weight},
                heads_call(op, dtype, cache, weight, 64),
            )

    assert not disagreements(op, column, device, calls())


@pytest.mark.parametrize("op", HEADS_OPS)
def test_head_sizes(op: str, column: str, device: str) -> None:
    takes = support.TABLE[op][column]
    caches = [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8] if takes.cache_dtype else [None]
    dtype = torch.int32 if op in ("paged_attention_plan", "store_key_codes", "store_value_codes") else torch.bfloat16

    def calls() -> Iterator[tuple[Call, Call]]:
        yield {"dtype": torch.float64}, heads_call(op, torch.float64, dtype, dtype, 64)
        for head_dim, cache in itertools.product(HEAD_DIMS, caches):
            yield (
                {"dtype": dtype, "cache_dtype": cache, "head_dim": head_dim},
                heads_call(op, dtype, cache, dtype, head_dim),
            )

    assert not disagreements(op, column, device, calls())


# ---- the question itself ----


def test_every_operator_has_an_answer() -> None:
    assert set(support.TABLE) == {name for name, _ in op_calls()}
    assert all(set(by_device) == set(support.DEVICES) for by_device in support.TABLE.values())


@pytest.mark.parametrize("device_type", list(support.DEVICES))
@pytest.mark.parametrize("op", list(support.TABLE))
def test_what_is_left_out_may_be_anything(op: str, device_type: str) -> None:
    takes = support.TABLE[op][device_type]
    choices = {
        "dtype": DTYPES,
        "weight_dtype": DTYPES if takes.weight_dtype else [None],
        "cache_dtype": DTYPES if takes.cache_dtype else [None],
        "head_dim": HEAD_DIMS if takes.head_dim else [None],
    }
    answers = {
        values: ops.supported(op, device=device_type, **dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    }
    for position, (name, values) in enumerate(choices.items()):
        for value in values:
            expected = any(answer for asked, answer in answers.items() if asked[position] == value)
            assert ops.supported(op, device=device_type, **{name: value}) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "rmsnorm", "device": "cpu"}, r"op must be one of add_lora, .*, xielu, got 'rmsnorm'"),
        ({"op": "rms_norm", "device": "meta"}, r"device must be one of cpu, cuda, got 'meta'"),
        ({"op": "rms_norm", "device": "cpu", "head_dim": 64}, r"rms_norm has no head_dim, only dtype, weight_dtype"),
        ({"op": "sample", "device": "cpu", "in_features": 8, "head_dim": 8}, r"sample has no head_dim, in_features,"),
    ],
)
def test_questions_without_an_answer(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.supported(**arguments)


def test_operators_of_the_cpu_alone() -> None:
    assert set(ON_CPU_ALONE) == {
        name.format(bits)
        for name in ("int{}_gemm", "grouped_int{}_gemm", "int{}_pack", "int{}_dequantize")
        for bits in (5, 6)
    } | {"store_value_codes"}
    for op in ON_CPU_ALONE:
        assert not ops.supported(op, device="cuda")
        assert support.devices(op) == "CPU"
        assert support.cell(op, "cuda") == "no"


def test_a_device_may_have_an_index() -> None:
    assert ops.supported("rms_norm", device=torch.device("cuda", 1), dtype=torch.float16)


# ---- tables made from it ----


def test_columns_of_the_readme() -> None:
    found: list[str] = []
    for line in (ROOT / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`(\w+)`", cells[0])
        if not line.startswith("| `") or not set(names) <= set(support.TABLE):
            continue
        found += names
        for device_type, cell in zip(support.DEVICES, cells[2:], strict=True):
            assert cell == ", ".join(dict.fromkeys(support.cell(name, device_type) for name in names)), names
    assert sorted(found) == sorted(support.TABLE)


def test_table_of_the_pages() -> None:
    """Mend it with ``python -c 'from fastinfer.ops import support; print(support.markdown())'``."""
    assert support.markdown() in (ROOT / "docs/ops/index.md").read_text()
