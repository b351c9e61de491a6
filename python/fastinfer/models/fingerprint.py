"""Identity of loaded models: what decides the keys and values that they compute for a token."""

import hashlib
from collections.abc import Sequence as List
from pathlib import Path

from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision

# Of a large file this many pieces of this many bytes are read, evenly spaced. Size and time of modification count too.
NUM_SAMPLES = 256
SAMPLE_BYTES = 4096


def fingerprint(
    checkpoints: List[Checkpoint], precision: Precision, max_model_len: int | None, files: List[Path] = ()
) -> str:
    """Return the identity of models that are loaded from these checkpoints.

    Models with equal fingerprints compute the same. A checkpoint that was written anew has a new fingerprint even if
    its weights are the same.

    Args:
        checkpoints: checkpoints of the model and of the draft model, if there is one.
        precision: precision in which they are loaded.
        max_model_len: longest sequence in tokens, on which the factors of some rotary tables depend.
        files: further files, of which no checkpoint knows.
    """
    digest = hashlib.sha256(repr(precision).encode())
    for checkpoint in checkpoints:
        config = checkpoint.config
        factors = config.rope_scaling.factors(config.table_length(max_model_len))
        digest.update(repr((config, factors)).encode())
        for file in checkpoint.files:
            digest.update(_identity(file))
    for file in files:
        digest.update(_identity(file))
    return digest.hexdigest()


def _identity(path: Path) -> bytes:
    """Return a hash of a file's name, size, time of modification, and samples of its content."""
    status = path.stat()
    digest = hashlib.sha256(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    with open(path, "rb") as file:
        for offset in sample_offsets(status.st_size):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def sample_offsets(size: int) -> list[int]:
    """Return where the pieces of a file begin that are read: at its start, at its end and evenly in between."""
    last = max(size - SAMPLE_BYTES, 0)
    count = min(NUM_SAMPLES, last // SAMPLE_BYTES + 2)
    return [last * index // (count - 1) for index in range(count)]
