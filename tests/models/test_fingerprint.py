"""The identity of loaded models: equal for the same files, another one for any others."""

import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.families import save_model
from support.tiny_decoder import CONFIG

from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.fingerprint import NUM_SAMPLES, SAMPLE_BYTES, fingerprint, sample_offsets
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.ops import RopeScaling

PRECISION = Precision.of("auto")


def of(
    *paths: Path,
    config: ModelConfig = CONFIG,
    precision: Precision = PRECISION,
    length: int | None = None,
    files: tuple[Path, ...] = (),
) -> str:
    checkpoints: list[Any] = [SimpleNamespace(files=files_of(path), config=config) for path in paths]
    return fingerprint(checkpoints, precision, length, files)


def files_of(path: Path) -> list[Path]:
    return HFCheckpoint(path).files if path.is_dir() else [path]


def write(path: Path, content: bytes, time: int = 10**9) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time, time))
    return path


def test_the_same_files_are_the_same_model(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(3 * NUM_SAMPLES * SAMPLE_BYTES + 7)
    file = write(tmp_path / "model.gguf", content)
    known = of(file)
    assert of(file) == known
    assert of(write(tmp_path / "elsewhere" / "model.gguf", content)) == known
    for position in (0, 5, len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 1
        assert of(write(file, bytes(changed))) != known, position
    assert of(write(file, content[:-1])) != known
    assert of(write(file, content, time=10**9 + 1)) != known
    assert of(write(file, content)) == known
    assert of(write(tmp_path / "other.gguf", content)) != known
    assert of(file, file) != known


def test_everything_that_changes_the_numbers_counts(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", b"x" * 9)
    known = of(file)
    assert of(file, precision=Precision.of("float32")) != known
    assert of(file, config=replace(CONFIG, norm_eps=1e-6)) != known
    assert of(file, length=100) == known
    assert of(file, files=(write(tmp_path / "mmproj.gguf", b"x" * 9),)) != known


def test_of_the_length_only_the_factors_of_the_rotations_count(tmp_path: Path) -> None:
    """Without an option the length follows from the memory that is free, so a restart has another one."""
    file = write(tmp_path / "model.gguf", b"x" * 9)
    scaling = RopeScaling("longrope", original_max_position=100, short_factors=(1.0,), long_factors=(4.0,))
    scaled = replace(CONFIG, rope_scaling=scaling, max_position=400)
    short, long = of(file, config=scaled, length=100), of(file, config=scaled, length=101)
    assert short != long
    assert of(file, config=scaled, length=50) == short
    assert of(file, config=scaled, length=300) == of(file, config=scaled) == long
    trained = replace(scaled, max_position=100)
    assert of(file, config=trained, length=400) == of(file, config=trained, length=50)
    head = replace(trained, has_features=True)
    assert of(file, config=head, length=400) != of(file, config=head, length=50)


def test_a_folder_s_weights_and_configuration_count(tmp_path: Path) -> None:
    """Other files do not, such as a second copy of the weights."""
    save_model(tmp_path, "llama2", max_shard_size="200KB")
    others = {"README.md", "consolidated.safetensors"}
    for name in others:
        write(tmp_path / name, b"x" * 9)
    known, names = of(tmp_path), {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors.index.json", "model-00002-of-00004.safetensors"} < names
    for name in names:
        time = (tmp_path / name).stat().st_mtime_ns
        os.utime(tmp_path / name, ns=(time, time + 1))
        assert (of(tmp_path) == known) == (name in others), name
        os.utime(tmp_path / name, ns=(time, time))
    assert of(tmp_path) == known


def test_samples_reach_from_start_to_end() -> None:
    for size in (0, 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 7 * SAMPLE_BYTES + 3):
        covered = {p for offset in sample_offsets(size) for p in range(offset, min(offset + SAMPLE_BYTES, size))}
        assert covered == set(range(size))
    offsets = sample_offsets(10**12)
    assert (offsets[0], offsets[-1], len(offsets)) == (0, 10**12 - SAMPLE_BYTES, NUM_SAMPLES)
