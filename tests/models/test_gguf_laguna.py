"""Metadata of Laguna's GGUF files: what they say by layer, what they leave out, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.families import make_model, save_model
from support.gguf_model_file import write_gguf

from fastinfer.errors import FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder

HEADS, WINDOWS = "laguna.attention.head_count", "laguna.attention.sliding_window"


def written(folder: Path, family: str = "laguna-published") -> GGUFFile:
    write_gguf(folder / "model.gguf", make_model(family), matrices=gguf.GGMLQuantizationType.F16)
    return GGUFFile(folder / "model.gguf")


@pytest.mark.parametrize("family", ["laguna-published", "laguna-published-full"])
def test_the_same_configuration_as_the_folders(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    config, folder = read_gguf_config(written(tmp_path, family)), read_hf_config(tmp_path / "config.json")
    assert config.norm_eps == pytest.approx(folder.norm_eps)
    assert config.router.scale == pytest.approx(folder.router.scale)
    assert config.rope_scaling.attention_factor == pytest.approx(1.1)
    same = {"norm_eps": config.norm_eps, "router": config.router, "rope_scaling": config.rope_scaling}
    # The file of a model without windows does not say what they would have.
    local = {} if folder.windows else {"local_rope_theta": None, "local_rotary_dim": 0}
    assert config == replace(folder, architecture="laguna", **same, **local)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (0, 16, 16, 16, 0, 16)),
        ({f"{WINDOWS}_pattern": 3}, (0, 16, 16, 0, 16, 16)),
        ({f"{WINDOWS}_pattern": np.array([True, False] * 3)}, (16, 0, 16, 0, 16, 0)),
        ({WINDOWS: 0}, ()),
    ],
)
def test_windows(change: dict[str, Any], windows: tuple[int, ...], tmp_path: Path) -> None:
    file = written(tmp_path)
    file.metadata |= change
    assert read_gguf_config(file).windows == windows


def test_values_that_a_file_leaves_out(tmp_path: Path) -> None:
    file = written(tmp_path)
    for key in ("scaling.yarn_attn_factor", "freq_base_swa", "dimension_count_swa"):
        del file.metadata[f"laguna.rope.{key}"]
    file.metadata[HEADS] = 6
    config = read_gguf_config(file)
    assert (config.local_rope_theta, config.local_rotary_dim) == (config.rope_theta, 0)
    assert config.rope_scaling.attention_factor is None
    assert (config.num_heads, config.layer_heads) == (6, ())


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (HEADS, np.array([4, 6, 8, 4, 10, 5]), GGUFFormatError, "expected a multiple of 2 query heads in each layer"),
        (HEADS, np.array([4, 6]), GGUFFormatError, f"{HEADS}: expected 6 values, one for each layer, got 2"),
        (f"{HEADS}_kv", np.array([2] * 5 + [1]), UnsupportedModelError, f"{HEADS}_kv must be the same for all layers"),
        (f"{WINDOWS}_pattern", 0, GGUFFormatError, f"{WINDOWS}_pattern"),
        (f"{WINDOWS}_pattern", np.array([True]), GGUFFormatError, f"{WINDOWS}_pattern: expected 6 values"),
        ("laguna.rope.dimension_count_swa", 34, GGUFFormatError, "dimension_count_swa.* 1 to 32, got 34"),
        ("laguna.rope.dimension_count_swa", 3, GGUFFormatError, "dimension_count_swa: expected an even size, got 3"),
        ("laguna.rope.freq_base_swa", 1.0, GGUFFormatError, "laguna.rope.freq_base_swa"),
        ("laguna.rope.scaling.yarn_attn_factor", -1.0, GGUFFormatError, "scaling.yarn_attn_factor"),
    ],
)
def test_bad_metadata(key: str, value: Any, error: type[FastinferError], message: str, tmp_path: Path) -> None:
    file = written(tmp_path)
    file.metadata[key] = value
    with pytest.raises(error, match=message) as raised:
        read_gguf_config(file)
    assert "\n" not in str(raised.value)


def test_gates_of_both_kinds_are_refused(tmp_path: Path) -> None:
    """Those of the first layer are of heads, and those of another one of elements."""
    file = written(tmp_path)
    name, queries = "blk.3.attn_gate.weight", file.tensors["blk.3.attn_q.weight"]
    file.tensors[name] = replace(queries, name=name)
    with pytest.raises(GGUFFormatError, match=rf"tensor '{name}' must have the shape \(4, 64\), got \(128, 64\)"):
        load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)
