"""One representative call of every operator, for the tests that hold for all of them.

The tensors of a call depend on the seed, its group and its place there: a new call at the end of a group changes no
other one.
"""

import copy
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.parallel.group import Group
from support.helpers import gemm_options
from support.quantized_gemm import random_weight


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gemm_calls(cpu_alone: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Dense, int8, int6, int5, int4 and table: plain and fused, without and with quantised activations."""
    x = torch.randn(5, 64).bfloat16()
    names = ["bias", "norm_weight", "eps", "activation", "residual"]
    for fusion in ("plain", "norm+bias+residual", "norm+silu"):
        options = {"eps": 1e-6} | gemm_options(fusion, x, 96, torch.float32)
        fused = [options.get(name) for name in names]
        yield "gemm", (x, torch.randn(96, 64).bfloat16() / 8, *fused)
        for bits in (8, 4):
            weight = random_weight(bits, 96, 64).packed.values()
            yield f"int{bits}_gemm", (x, *weight, *fused, 32)
            yield f"int{bits}_gemm", (x, *weight, *fused, 16)
            yield f"int{bits}_gemm", (x, *weight, *fused, 8)
        if cpu_alone:
            wide = torch.randn(5, 256).bfloat16()
            options = {"eps": 1e-6} | gemm_options(fusion, wide, 96, torch.float32)
            weight = random_weight(6, 96, 256).packed.values()
            for activation_bits in (32, 16, 8):
                yield "int6_gemm", (wide, *weight, *(options.get(name) for name in names), activation_bits)
                yield "int5_gemm", (x, *random_weight(5, 96, 64).packed.values(), *fused, activation_bits)
        weight = random_weight(4, 96, 64, mins=False).packed
        yield "lut_gemm", (x, weight["qweight"], weight["scales"], torch.randn(16), 96, *fused, 32)
        for activation_bits in (16, 8):
            for most in (16, 127):
                table = torch.randint(-most, most + 1, (16,)).float()
                yield "lut_gemm", (x, weight["qweight"], weight["scales"], table, 96, *fused, activation_bits)


def w8a8_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    weight = ops.int8_pack(torch.randint(-127, 128, (96, 64)).to(torch.int8)), ops.pack_scales(torch.rand(96, 1))
    call = (torch.randint(-127, 128, (5, 64)).to(torch.int8), torch.rand(5), *weight, 96)
    yield "w8a8_gemm", (*call, None, "silu", None, torch.bfloat16)
    yield "w8a8_gemm", (*call, torch.randn(96), None, torch.randn(5, 96), torch.float32)


def lora_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    x, ids = torch.randn(5, 48), int32(1, -1, 0, 1, 1)
    matrices = torch.randn(2, 8, 48), torch.randn(2, 8, 96)
    yield "add_lora", (torch.randn(5, 96), x, *matrices, ids, None, None, None, 0.0)
    half = [t.bfloat16() for t in matrices]
    runs = torch.randn(5, 6, 2, 16).bfloat16()[:, :, 1]
    yield (
        "add_lora",
        (runs, x.bfloat16(), half[0], torch.randn(2, 8, 96).bfloat16(), ids, None, int32(3, 8), torch.ones(48), 1e-6),
    )
    experts = torch.randn(2, 3, 8, 48), torch.randn(2, 3, 8, 96), ids, int32(0, 2, 1, 0, 2, 2, 1, 1, 0, 1).view(5, 2)
    yield "add_lora", (torch.randn(10, 96), x, *experts, int32(3, 8, 0, 1, 2, 5).view(2, 3), None, 0.0)


def expert_calls(cpu_alone: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    x, ids = torch.randn(5, 64).bfloat16(), torch.rand(5, 6).argsort(-1)[:, :2]
    yield "route_experts", (torch.randn(5, 6).half(), 2, True)
    yield "head_rows", (torch.arange(5), 3)
    routing = ids.flatten().argsort(stable=True).int(), ids.flatten().bincount(minlength=6).cumsum(0).int()
    routing = routing[0], torch.cat([int32(0), routing[1]])
    yield "grouped_gemm", (x, torch.randn(6, 96, 64) / 8, *routing, None, "silu")
    yield "grouped_gemm", (x, torch.randn(6, 96, 64).bfloat16() / 8, *routing, torch.randn(6, 96), "silu")
    for bits in (8, 4):
        weights = [random_weight(bits, 96, 64).packed for _ in range(6)]
        stack = [torch.stack([weight[name] for weight in weights]) for name in ("qweight", "scales", "mins")]
        yield f"grouped_int{bits}_gemm", (x, *stack, 96, *routing, None, None, 32)
        yield f"grouped_int{bits}_gemm", (x, *stack, 96, *routing, torch.randn(6, 96), "gelu", 8)
    if cpu_alone:
        weights = [random_weight(5, 96, 64).packed for _ in range(6)]
        five = [torch.stack([weight[name] for weight in weights]) for name in ("qweight", "scales", "mins")]
        weights = [random_weight(6, 96, 256).packed for _ in range(6)]
        wide = [torch.stack([weight[name] for weight in weights]) for name in ("qweight", "scales")]
        yield "grouped_int5_gemm", (x, *five, 96, *routing, torch.randn(6, 96), "gelu", 8)
        yield "grouped_int6_gemm", (torch.randn(5, 256).bfloat16(), *wide, 96, *routing, torch.randn(6, 96), "gelu", 8)
    yield "grouped_lut_gemm", (x, *stack[:2], torch.randn(16), 96, *routing, torch.randn(6, 96), "clamped_swiglu", 32)
    for most in (16, 127):
        table = torch.randint(-most, most + 1, (16,)).float()
        yield "grouped_lut_gemm", (x, *stack[:2], table, 96, *routing, None, None, 8)
    yield "combine_experts", (torch.randn(10, 64).bfloat16(), torch.rand(5, 2), x.clone())
    ids = torch.randint(0, 4, (5, 2), dtype=torch.int32)
    yield "combine_experts", (torch.randn(10, 64).bfloat16(), torch.rand(5, 2), None, ids, 1, 3)


def pack_calls(cpu_alone: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    yield "permute_columns", (torch.randn(5, 96).bfloat16()[:, 32:], torch.randperm(64))
    for bits in (8, 6, 5, 4) if cpu_alone else (8, 4):
        weight = random_weight(bits, 17, 256 if bits == 6 else 64)
        yield f"int{bits}_pack", (weight.q,)
        yield f"int{bits}_dequantize", (*weight.packed.values(), None, torch.float32)
        yield f"int{bits}_dequantize", (*weight.packed.values(), torch.tensor([3, 16, 3]), torch.bfloat16)


def attention_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    q, k, v = torch.randn(4, 8, 64).bfloat16().split([4, 2, 2], 1)
    caches = [torch.randn(7, 16, 2, 64).bfloat16() for _ in range(2)]
    yield "rotary_embedding", (q.clone(), k.clone(), torch.tensor([3, 0, 9, 9]), ops.cos_sin_cache(64, 10), False)
    yield "rotary_embedding", (q.clone(), k.clone(), torch.tensor([3, 0, 9, 9]), ops.cos_sin_cache(32, 10), True)
    yield "store_kv_cache", (k.clone(), v.clone(), *(c.clone() for c in caches), torch.tensor([5, -1, 111, 16]))
    integers, scales = torch.zeros(2, 7, 16, 2, 64, dtype=torch.int8).unbind(), torch.zeros(2, 7, 16, 2).unbind()
    slots = torch.tensor([5, -1, 111, 16])
    yield "store_kv_cache", (k.clone(), v.clone(), *(c.clone() for c in integers), slots, *(s.clone() for s in scales))
    rotary = (1e-6, torch.tensor([3, 0, 9, 9]), ops.cos_sin_cache(64, 10))
    floats = (*(c.clone() for c in caches), None, None)
    yield "norm_rotary_store", (q.clone(), k, v, None, None, *rotary, True, *floats, slots)
    norms = torch.ones(64), torch.ones(64)
    yield "norm_rotary_store", (q.clone(), k, v, *norms, *rotary, False, *integers, *scales, slots)
    ragged = (int32(0, 1, 2, 3, 4, 5).view(2, 3), int32(40, 20), int32(0, 3, 4))
    yield "paged_attention", (q, *caches, *ragged, 0.125, 0, 0.0, None, None, None, None, None)
    yield "paged_attention", (q, *caches, *ragged, 0.125, 9, 5.0, torch.zeros(4), torch.zeros(4, 4), None, None, None)
    yield "paged_attention", (q, *caches, *ragged, 0.125, 9, 0.0, None, None, None, None, None, True)
    yield "paged_attention", (q, *integers, *ragged, 0.125, 0, 0.0, None, None, *scales, None)
    codes = torch.zeros(2, 7, 16, 2, 32, dtype=torch.uint8).unbind()
    groups = [torch.zeros(7, 16, 2, count, 2).half() for count in (4, 1)]
    yield "store_kv_cache", (k.clone(), v.clone(), *(c.clone() for c in codes), slots, *(g.clone() for g in groups))
    options = False, torch.rand(10)
    yield "norm_rotary_store", (q.clone(), k, v, *norms, *rotary, False, *codes, *groups, slots, *options)
    yield "paged_attention", (q, *codes, *ragged, 0.125, 0, 0.0, None, None, *groups, None)
    yield "paged_attention_plan", (*ragged[1:], 4, 2, 64, 0)
    yield "paged_attention_plan", (*ragged[1:], 4, 2, 64, 9, True)
    latent = torch.randn(4, 3, 48).bfloat16(), torch.randn(4, 3, 40).bfloat16()[..., 24:], torch.randn(4, 64).bfloat16()
    joint, rotary = torch.randn(7, 16, 1, 64), (1e-6, torch.tensor([3, 0, 9, 9]), ops.cos_sin_cache(16, 10))
    yield (
        "latent_rotary_store",
        (*latent, torch.ones(48), *rotary, True, None, joint, None, slots),
    )
    bytes_ = torch.zeros(7, 16, 1, 64, dtype=torch.int8), torch.zeros(7, 16, 1)
    yield "latent_rotary_store", (*latent, torch.ones(48), *rotary, False, torch.rand(10), *bytes_, slots)
    yield "merge_attention_states", (q.contiguous(), torch.randn(4, 4), torch.randn_like(q), torch.randn(4, 4))


def linear_attention_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Two sequences; the second one continues a state and stores two."""
    slots = int32(0, 3, 5), int32(-1, 1), int32(-1, -1, 0, 2, 1)
    x = torch.randn(5, 160).bfloat16()
    yield "causal_conv1d", (x[:, 32:], torch.randn(128, 4), torch.randn(128), torch.randn(3, 3, 128).bfloat16(), *slots)
    yield "causal_conv1d", (x, torch.randn(160, 2).bfloat16(), None, torch.randn(3, 1, 160).bfloat16(), *slots)
    z, gates, states = torch.randn(5, 64), torch.randn(5, 4), torch.randn(3, 2, 48, 32)
    rest = torch.randn(2), torch.randn(2), torch.ones(32), 1e-6, states, *slots
    yield "gated_delta_rule", (x, z.bfloat16(), gates[:, :2], gates[:, 2:], *rest)
    yield "gated_delta_rule", (x.float(), z, *gates.split(2, 1), *copy.deepcopy(rest), 2.0)
    channels = torch.randn(5, 100)[:, 4:].bfloat16(), gates[:, 2:], torch.randn(2), torch.randn(96)
    yield "gated_delta_rule", (x, z.bfloat16(), *channels, *copy.deepcopy(rest[2:]), 1.0, True, -5.0)
    conv = torch.randn(48, 3), None, torch.randn(3, 2, 48).bfloat16(), *slots
    yield "causal_conv1d", (x[:, 96:144], *conv, x[:, :96])
    heads, states = torch.randn(3, 2).unbind(), torch.randn(3, 2, 48, 32)
    scan = *heads, torch.randn(64), 1e-6, 0.0, 9.0, states, *slots
    yield "mamba2_scan", (x, z.bfloat16(), gates[:, 2:], *scan)


def elementwise_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    x = torch.randn(5, 64)
    yield "rms_norm", (x.bfloat16(), torch.ones(64), 1e-6)
    yield "rms_norm", (x.clone(), torch.ones(64), 1e-6, x.clone())
    yield "add_rms_norm", (x.clone(), x.clone(), torch.ones(64), 1e-6)
    yield "rms_norm_quantize", (x.bfloat16(), None, torch.ones(64), 1e-6)
    yield "rms_norm_quantize", (x.clone(), x.clone(), torch.ones(64), 1e-6)
    yield "layer_norm", (x.bfloat16(), torch.ones(64), torch.ones(64), 1e-5)
    yield "quantize_int8", (x.half(),)
    yield "embedding", (x.clone(), torch.tensor([4, 0, 4]))
    yield "embedding", (x.clone(), torch.tensor([4, 0, 4]), x[:3].bfloat16())
    yield "embedding", (x.clone(), torch.tensor([4, 0, 4]), None, torch.bfloat16)
    yield "local_ids", (torch.tensor([3, 0, 9, 9, 4]), 3, 9)
    yield "silu_and_mul", (x,)
    yield "silu_and_mul", (x, 0.5)
    yield "gelu_and_mul", (x, "none")
    yield "gelu", (x.half(), "tanh")
    yield "relu2", (x.half(),)
    yield "xielu", (x.bfloat16(), 0.8, 1.3, 0.5, -1e-6)
    yield "softcap", (x.bfloat16(), 30.0)
    yield "clamped_swiglu", (x.bfloat16(),)
    yield "sigmoid_gate", (x.bfloat16(), torch.randn(5, 96).bfloat16()[:, 32:])
    yield "sigmoid_gate", (x.bfloat16(), torch.randn(5, 12).bfloat16()[:, :4])
    yield "softplus_gate", (x, torch.randn(5, 96)[:, 32:])
    yield "softplus_gate", (x.bfloat16(), torch.randn(5, 12).bfloat16()[:, :4])


def sample_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    x = torch.randn(5, 64)
    parameters = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0]), int32(0, 3, 0, 5, 0), torch.full((5,), 0.9), torch.zeros(5)
    plain, words = (x.clone(), *parameters, torch.arange(5), torch.arange(5)), torch.full((5, 2), 0x12345678).int()
    yield "sample", (*plain, *[None] * 7, 0)
    yield "sample", (*plain, *[None] * 7, None)
    biases = int32(0, 2, 2, 2, 3, 3), int32(7, 0, 63), torch.tensor([-50.0, 2.0, -1.0])
    yield "sample", (*plain, torch.full((5, 3), 1.5), x.gt(1).int(), words, words, *biases, 3)


def sparse_attention_calls(cpu_alone: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A sequence with seven pages, of which each token reads four."""
    q, k_cache, v_cache = torch.randn(3, 4, 64).bfloat16(), *torch.randn(2, 7, 16, 2, 64).bfloat16()
    key_codes, slots = torch.zeros(7, 2, 9, 16).int(), torch.tensor([15, -1, 16, 111])
    yield "store_key_codes", (key_codes.clone(), k_cache, None, slots)
    integers = torch.randint(-127, 128, (7, 16, 2, 64)).to(torch.int8), torch.rand(7, 16, 2)
    yield "store_key_codes", (key_codes.clone(), *integers, slots)
    codes = torch.randint(0, 256, (7, 16, 2, 32)).to(torch.uint8), torch.rand(7, 16, 2, 4, 2).half()
    yield "store_key_codes", (key_codes.clone(), *codes, slots)
    key_codes = torch.randint(-(2**31), 2**31, (7, 2, 9, 16)).int()
    key_codes[:, :, -1] = torch.rand(7, 2, 16).view(torch.int32)  # scales
    ragged = int32(4, 6, 0, 3, 5, 1, 2)[None], int32(105), int32(0, 3)
    if cpu_alone:
        for v, v_scale in ((v_cache, None), (integers[0], integers[1])):
            yield "store_value_codes", (torch.zeros(7, 2, 9, 16).int(), v, v_scale, slots)
    # Each token reads all pages: what is behind those that are chosen is undefined.
    yield "select_pages", (q, key_codes, *ragged, 16, 1.0, 0, 0.125, None)
    yield "select_pages", (q.float(), key_codes, *ragged, 16, 0.5, 9, 0.125, None)
    if cpu_alone:
        yield "select_pages", (q, key_codes, *ragged, 16, 0.5, 9, 0.125, int32(0, 1, 3))
    index, weights = k_cache[:, :, :1].contiguous(), torch.randn(3, 6)[:, 1:5]
    yield "select_tokens", (q, weights.bfloat16(), index, *ragged, 9)
    if cpu_alone:
        yield "select_tokens", (q.float(), weights, index, *ragged, 103)  # the first token reads all
    lens = int32(32, 17, 5, 16, 20, 31).view(3, 2)
    pages = int32(0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4).view(3, 2, 2), lens, int32(0, 1, 2, 3)
    yield "paged_attention", (q, k_cache, v_cache, *pages, 0.125, 0, 0.0, None, None, None, None, None)


def parallel_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """In groups of one rank on the CPU, in which nobody waits; a GPU's are in tests/ops/test_peer_exchange.py."""
    ids = torch.tensor([3, 0, 9, 9, 4])
    yield "all_gather", (torch.randn(5, 48).bfloat16(), Group.create(1).memory, 0, [48])
    yield "all_gather_rows", (torch.randn(5, 48), ids, Group.create(1).memory, 0, 0, 10)
    yield "all_reduce", (torch.randn(5, 48).half(), Group.create(1).memory, 0)
    x = torch.randn(5, 48)
    yield "all_reduce_add_rms_norm", (x, x.clone(), torch.ones(48), 1e-6, Group.create(1).memory, 0)


def seeded(calls: Iterator[tuple[str, tuple[Any, ...]]], seed: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The calls, each made from random numbers of its own; torch's generator stays as it is."""
    for index in itertools.count():
        with torch.random.fork_rng(devices=[]):
            # The CPU's generator alone: torch.manual_seed notes a stack for each device that is not there, 0.5 ms.
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {index}".encode()))
            call = next(calls, None)
        if call is None:
            return
        yield call


def op_calls(cpu_alone: bool = True, seed: int = 0) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names and complete positional arguments; every call has fresh tensors of its own.

    Args:
        cpu_alone: whether calls are among them that only a CPU can take.
        seed: seed of the tensors.
    """
    groups = {
        "elementwise": elementwise_calls(),
        "attention": attention_calls(),
        "gemm": gemm_calls(cpu_alone),
        "w8a8": w8a8_calls(),
        "lora": lora_calls(),
        "pack": pack_calls(cpu_alone),
        "experts": expert_calls(cpu_alone),
        "sample": sample_calls(),
        "linear attention": linear_attention_calls(),
        "sparse attention": sparse_attention_calls(cpu_alone),
        "parallel": parallel_calls() if cpu_alone else iter(()),
    }
    for name, calls in groups.items():
        yield from seeded(calls, f"{seed} {name}")


def poison(tensor: Tensor) -> float:
    """What no test's result is full of."""
    return torch.nan if tensor.is_floating_point() else 77


def out_calls() -> Iterator[tuple[str, tuple[Any, ...], Tensor]]:
    """The calls of operators with an overload ``.out``, each with a tensor for its result, full of poison."""
    for name, args in op_calls():
        packet = getattr(torch.ops.fastinfer, name)
        if "out" in packet.overloads():
            result = packet.default(*copy.deepcopy(args))
            yield name, args, torch.full_like(result, poison(result))


def overload_calls() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Calls of the other overloads, with the names of the operator and the overload."""
    q, key_codes = torch.randn(3, 4, 64).bfloat16(), torch.randint(-(2**31), 2**31, (7, 2, 9, 16)).int()
    key_codes[:, :, -1] = torch.rand(7, 2, 16).view(torch.int32)  # scales
    value_codes = key_codes.clone()
    value_codes.flatten(2)[:, :, -16:] = torch.rand(7, 2, 16).view(torch.int32)
    ragged = int32(4, 6, 0, 3, 5, 1, 2)[None], int32(105), int32(0, 3)
    rest = value_codes, torch.zeros_like(q), torch.zeros(3, 4)
    # Each token reads all pages: what is behind those that are chosen is undefined.
    yield "select_pages", "rest", (q, key_codes, *ragged, 16, 1.0, 0, 0.125, *rest)
    yield "merge_attention_states", "inplace", (q, torch.randn(3, 4), torch.randn_like(q), torch.randn(3, 4))


def named(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """A call's arguments as those of the function in ``fastinfer.ops``."""
    names = [argument.name for argument in getattr(torch.ops.fastinfer, name).default._schema.arguments]
    return dict(zip(names, args, strict=False))
