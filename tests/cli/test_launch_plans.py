"""Launch policies for many sizes and GPUs: what would be launched must be possible, and no more than is worth it."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fastinfer import _C
from fastinfer.cli.launch_plans import GPUS, Gpu, launch_plan
from fastinfer.cli.main import main

Captured = pytest.CaptureFixture[str]

ROWS = [1, 8, 9, 16, 17, 64, 65, 128, 129, 1000, 8192]
WEIGHTS = [(16, 32), (100, 64), (576, 576), (3072, 576), (6144, 4096), (28672, 4096), (128256, 4096)]
SMALL = Gpu(80, 1, 99 * 1024)


def cases() -> Iterator[tuple[str, dict[str, int]]]:
    """Operators and sizes; a new policy without sizes here fails test_every_policy_is_tested."""
    for m, (n, k) in itertools.product(ROWS, WEIGHTS):
        yield "gemm", {"m": m, "n": n, "k": k}
        yield "w8a8_gemm", {"m": m, "n": n, "k": k}
        for op in ("int4_gemm", "int8_gemm", "lut_gemm"):
            yield from ((op, {"m": m, "n": n, "k": k, "group": group}) for group in (32, 128, k) if k % group == 0)
    for seqs, head_dim in itertools.product((1, 7, 256), (64, 80, 96, 128, 256, 320, 512, 576)):
        yield "paged_attention", {"seqs": seqs, "head_dim": head_dim}
    for tokens, heads, max_blocks in itertools.product((1, 77, 256), (1, 8), (1, 512, 8192)):
        sizes = {"tokens": tokens, "q_heads": 4 * heads, "kv_heads": heads, "max_blocks": max_blocks}
        yield from (("select_pages", sizes | {"head_dim": head_dim, "block_size": 16}) for head_dim in (64, 128, 512))
    for tokens, heads, positions in itertools.product((1, 77, 8192), (1, 33, 64), (1, 2048, 8192, 163840)):
        index = {"tokens": tokens, "heads": heads, "head_dim": 128, "positions": positions}
        yield "select_tokens", index | {"top_k": 2048}
    for tokens, heads, head_dim in itertools.product((1, 77, 8192), (1, 8, 64), (64, 80, 128, 256)):
        cache = {"tokens": tokens, "kv_heads": heads, "head_dim": head_dim}
        yield "store_kv_cache", cache
        yield "norm_rotary_store", cache | {"q_heads": 4 * heads}
    for rows, hidden in itertools.product((1, 77, 8192), (8, 576, 4096, 8192, 16384, 65536)):
        yield "rms_norm", {"rows": rows, "hidden": hidden}
    for tokens, out, max_rank in itertools.product((1, 77, 8192), (1, 576, 28672), (1, 16, 64)):
        yield "add_lora", {"tokens": tokens, "out": out, "max_rank": max_rank}
    choices = (1, 7, 256), (1, 32), (16, 128, 256), (48, 128, 256), (0, 1)
    for seqs, heads, key_dim, value_dim, channels in itertools.product(*choices):
        rule = {"seqs": seqs, "value_heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        rule["channel_decay"] = channels
        yield from (("gated_delta_rule", rule | {"tokens": tokens}) for tokens in (seqs, 8192))
    for seqs, heads, state_dim, head_dim in itertools.product((1, 7, 256), (1, 128), (16, 128, 256), (48, 64, 256)):
        scan = {"seqs": seqs, "heads": heads, "groups": 1, "state_dim": state_dim, "head_dim": head_dim}
        yield from (("mamba2_scan", scan | {"tokens": tokens}) for tokens in (seqs, 8192))
    for rows, vocab, modified in itertools.product((1, 3, 512), (1, 33, 1000, 50257, 128256, 262144), (0, 1)):
        yield "sample", {"rows": rows, "vocab": vocab, "modified": modified}


CASES = list(cases())


def plans(gpu: Gpu) -> Iterator[tuple[str, dict[str, int], dict[str, Any]]]:
    for op, sizes in CASES:
        yield op, sizes, launch_plan(op, sizes, gpu)


def test_every_policy_is_tested() -> None:
    assert {op for op, _ in CASES} == _C.launch_plan_sizes().keys()


@pytest.mark.parametrize("gpu", [*GPUS.values(), SMALL], ids=lambda gpu: f"{gpu.arch}-{gpu.multiprocessors}")
def test_launches_are_possible(gpu: Gpu) -> None:
    for op, sizes, plan in plans(gpu):
        assert plan["launches"], (op, sizes)
        for launch in plan["launches"]:
            said = f"{op} {sizes} on sm_{gpu.arch}: {launch}"
            assert 0 < launch["blocks"] < 2**31, said
            assert launch["threads"] % 32 == 0, said
            assert 32 <= launch["threads"] <= 1024, said
            assert 0 <= launch["shared_bytes"] <= gpu.shared_bytes, said
        assert 0 <= plan["workspace_bytes"] < 2**31, (op, sizes)


@pytest.mark.parametrize("gpu", [*GPUS.values(), SMALL], ids=lambda gpu: f"{gpu.arch}-{gpu.multiprocessors}")
def test_products_cover_their_weight_and_are_not_cut_too_fine(gpu: Gpu) -> None:
    for op, sizes, plan in plans(gpu):
        if "units" not in plan:
            continue
        said = f"{op} {sizes} on sm_{gpu.arch}: {plan}"
        m, n, k = (sizes[name] for name in "mnk")
        assert plan["token_tiles"] * plan["tile_tokens"] >= m, said
        assert plan["units"] * plan["tile_rows"] >= n * plan["token_tiles"], said
        assert plan["chunks_per_unit"] * plan["chunk_inputs"] >= k, said
        assert plan["stages"] >= 2, said
        blocks = plan["launches"][0]["blocks"]
        if "splits" in plan:  # of every unit, none of them empty, with room for the sums
            splits, pieces = plan["splits"], plan["chunks_per_split"]
            assert (splits - 1) * pieces < plan["chunks_per_unit"] <= splits * pieces, said
            assert splits <= 16, said
            assert blocks == plan["units"] * splits, said
            sums = blocks * plan["tile_tokens"] * plan["tile_rows"] * 4
            assert plan["workspace_bytes"] == (sums if splits > 1 else 0), said
            continue
        assert plan["workers"] == blocks <= 2 * gpu.multiprocessors, said
        pieces = plan["chunks_per_worker"]
        if pieces:  # stream-K: an equal piece each, all of the work, and room for the partial sums
            total = (plan["units"] - plan["whole_units"]) * plan["chunks_per_unit"]
            assert 0 < total <= plan["workers"] * pieces, said
            assert plan["whole_units"] % plan["workers"] == 0, said
            assert plan["whole_units"] or (plan["workers"] - 1) * pieces < total, said
            assert plan["chunks_per_unit"] <= 16 * pieces, said
            assert plan["workspace_bytes"] >= plan["workers"] * plan["tile_tokens"] * plan["tile_rows"] * 4, said
        else:
            assert plan["workspace_bytes"] == 0, said
            assert plan["whole_units"] == plan["units"], said


def test_a_decode_product_occupies_every_multiprocessor() -> None:
    for op in ("gemm", "int4_gemm", "int8_gemm"):
        plan = launch_plan(op, {"m": 1, "n": 4096, "k": 4096}, GPUS[90])
        assert plan["workers"] >= 132, op


def test_no_rows_launch_nothing() -> None:
    sizes = {"m": 0, "n": 4096, "k": 4096}
    assert launch_plan("int4_gemm", sizes, GPUS[90])["launches"][0]["blocks"] == 0
    assert launch_plan("sample", {"rows": 0, "vocab": 1000}, GPUS[90])["launches"][0]["blocks"] == 0


@pytest.mark.parametrize(
    ("op", "sizes", "named"),
    [
        ("nonsense", {}, "nonsense"),
        ("gemm", {"m": 1, "n": 2}, "k"),
        ("gemm", {"m": 1, "n": 2, "k": 3, "group": 4}, "group"),
        ("gemm", {"m": -1, "n": 2, "k": 3}, "m"),
        ("int4_gemm", {"m": 1, "n": 2, "k": 64, "group": 48}, "group"),
        ("sample", {"rows": 1, "vocab": 2**40}, "vocab"),
    ],
)
def test_mistakes_are_named(op: str, sizes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        launch_plan(op, sizes, GPUS[90])


def test_info_prints_a_plan(capsys: Captured) -> None:
    arguments = ["info", "--plan", "int4_gemm", "1", "8192", "8192", "--group", "64", "--arch", "80"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["int4_gemm", "m", "1,", "n", "8192,", "k", "8192,", "group", "64"]
    assert "sm_80, 108 multiprocessors, 163.0 KiB" in lines[1]
    assert any("blocks of" in line and "KiB shared" in line for line in lines)
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == {"m": 1, "n": 8192, "k": 8192, "group": 64}
    assert found["plan"] == launch_plan("int4_gemm", found["sizes"], GPUS[80])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("nonsense 1", "nonsense"),
        ("int4_gemm 1 2", "M N K [GROUP]"),
        ("int4_gemm 1 2 64 32 5", "M N K [GROUP]"),
        ("gemm 1 2 many", "K"),
        ("gemm 1 2 -3", "-3"),
        ("gemm 1 2 ²", "K"),
        ("gemm 1 2 64 --group 64", "group"),
        ("int4_gemm 1 2 64 --group 48", "group"),
        ("gemm 1 2 64 --arch 81", "--arch"),
        ("paged_attention 1 77", "head_dim"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments: str, named: str, capsys: Captured) -> None:
    assert main(["info", "--plan", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("fastinfer: error: ")
    assert named in captured.err
