"""How benchmarks on a GPU call other projects' kernels: with stand-ins that compute what the real ones document."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import bench_int4_gemm
import bench_paged_attention
import pytest
import torch
from harness import Setting
from peers import gpu_attention, gpu_gemm
from torch import Tensor
from torch.nn import functional as F

HEADS = 4, 2, 64
LENGTHS = [20, 1, 48, 33]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the attention of one sequence; q is [heads, d], k and v are [tokens, kv_heads, d]."""
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return F.scaled_dot_product_attention(q[None, :, None], k, v, enable_gqa=True)[0, :, 0]


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, causal: bool
) -> Tensor:
    assert q.shape[1] == 1
    assert causal
    rows = []
    for row, length in enumerate(cache_seqlens.tolist()):
        k, v = (cache[page_table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        rows.append(attend(q[row, 0], k, v)[None])
    return torch.stack(rows)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace: Tensor, kv_layout: str, *, use_tensor_cores: bool) -> None:
        assert kv_layout == "NHD"

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, q_data_type: Any, kv_data_type: Any
    ) -> None:
        assert {indptr.dtype, indices.dtype, last_page_len.dtype} == {torch.int32}
        assert sizes == (*HEADS, 16)
        self.indptr, self.indices, self.last = indptr.tolist(), indices, last_page_len.tolist()

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        rows = []
        for row, last in enumerate(self.last):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            length = (len(pages) - 1) * 16 + last
            rows.append(attend(q[row], *(cache[pages].flatten(0, 1)[:length] for cache in caches)))
        return torch.stack(rows)


class GemLiteLinear(torch.nn.Module):
    def __init__(self, bits: int, *, group_size: int, in_features: int, out_features: int, **types: str) -> None:
        super().__init__()
        assert (bits, types) == (4, {"input_dtype": "bf16", "output_dtype": "bf16"})
        self.shape = out_features, in_features // group_size, group_size

    def pack(self, q: Tensor, scales: Tensor, zeros: int) -> None:
        assert scales.shape == self.shape[:2]
        self.register_buffer("weight", ((q.view(self.shape).float() - zeros) * scales[..., None]).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


class HummingLayer(torch.nn.Module):
    def __init__(self, *, shape_n: int, shape_k: int, weight_config: dict[str, Any], torch_dtype: torch.dtype) -> None:
        super().__init__()
        assert weight_config["dtype"] == "int4"
        assert torch_dtype == torch.bfloat16
        self.group = weight_config["group_size"]
        self.register_buffer("weight", torch.empty(shape_n, shape_k, dtype=torch_dtype))

    def load_from_unquantized(self, weight: Tensor) -> None:
        self.load_state_dict({"weight": weight})

    def transform(self) -> None:
        groups = self.weight.float().view(len(self.weight), -1, self.group)
        scales = groups.abs().amax(2, keepdim=True) / 8
        self.weight = ((groups / scales).round() * scales).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, member in {
        "flash_attn_interface": flash_attn_with_kvcache,
        "flashinfer": BatchDecodeWithPagedKVCacheWrapper,
        "gemlite": GemLiteLinear,
        "humming.layer": HummingLayer,
        "humming": HummingLayer,
    }.items():
        module = ModuleType(name)
        module.DType = SimpleNamespace(BF16="bf16")  # type: ignore[attr-defined]
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)


def make_batch() -> bench_paged_attention.Batch:
    return bench_paged_attention.make_batch([1] * len(LENGTHS), LENGTHS, HEADS, 16, Setting("cpu", 1))


@pytest.mark.parametrize("name", gpu_attention.PEERS)
def test_peers_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    batches = [make_batch(), make_batch()]
    peer = gpu_attention.decode_peers(batches)[name]
    for batch in batches:
        torch.testing.assert_close(peer(batch).view_as(batch.q), batch.attend(), atol=0.02, rtol=0.02)


def test_a_peer_that_fails_says_so_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchDecodeWithPagedKVCacheWrapper, "plan", lambda *args, **names: 1 / 0)
    batch = make_batch()
    peers = gpu_attention.decode_peers([batch])
    with pytest.raises(ZeroDivisionError):
        peers["FlashInfer"](batch)
    peers["FlashAttention 3"](batch)


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.setattr(gpu_attention, "find_spec", lambda name: None if name == "flashinfer" else name)
    assert list(gpu_attention.decode_peers([make_batch()])) == ["FlashAttention 3"]


@pytest.mark.parametrize("name", gpu_gemm.PEERS)
def test_products_with_4_bit_weights(name: str) -> None:
    torch.manual_seed(0)
    q, scales, x = torch.randint(0, 16, (48, 256)).byte(), torch.rand(48, 2) / 64, torch.randn(3, 256).bfloat16()
    q[:, ::128] = 0  # the largest magnitude is in every group, so that Humming's scales are these, too
    weight = ((q.view(48, 2, 128).float() - 8) * scales[..., None]).flatten(1)
    torch.testing.assert_close(
        gpu_gemm.int4_peers()[name](q, scales)(x), F.linear(x.float(), weight), atol=0.05, rtol=0.02
    )


def test_a_peer_that_cannot_make_its_layer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_int4_gemm, "CUDA_WEIGHTS", [(64, 256)])
    monkeypatch.setattr(bench_int4_gemm, "CUDA_TOKENS", [2])
    monkeypatch.setattr(bench_int4_gemm, "FORMS", {})
    monkeypatch.setattr(GemLiteLinear, "pack", lambda *args: 1 / 0)
    setting = Setting("cpu", 1, rehearsal=True)
    bench_int4_gemm.run_cuda(setting)
    (timings,) = setting.cases.values()
    gemlite, humming = timings
    assert (gemlite.name, gemlite.error) == ("GemLite", "ZeroDivisionError: division by zero")
    assert (humming.name, humming.error) == ("Humming", None)
    assert humming.bytes_moved == 64 * 256 * 4 + 2 * 2 * (64 + 256)
