"""Download of a model from the Hugging Face hub, into the hub's own cache.

The hub's library takes 0.3 s to import, so that is done where it is needed.
"""

import glob
import re
from functools import cache
from pathlib import Path

from fastinfer.errors import ModelNotFoundError
from fastinfer.hub.failures import all_class_names, why_unreachable
from fastinfer.hub.suggestions import did_you_mean
from fastinfer.utils.checks import show_path
from fastinfer.utils.gguf_names import shard_names
from fastinfer.utils.text import first_line

# org/repo, org/repo/file.gguf or org/repo:file.gguf; the file may be in a subfolder of the repository.
NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:[/:](.+\.gguf))?")

# Files to fetch: no pickles, no code, and no second copy of the weights in another layout.
_WANTED = [
    "*.safetensors",
    "*.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer.gguf",
]
_UNWANTED = ["*/*.safetensors", "*/*.json", "consolidated*", "adapter_*"]


def pull(repository: str, file: str | None, progress: bool = True) -> Path:
    """Download a GGUF file of a repository, or the repository if ``file`` is None. A process asks the hub once.

    If the file is one of several of a model that is split, all of them are downloaded.

    Raises:
        ModelNotFoundError: the download failed, or the repository does not have the file, or config.json.
    """
    if progress:
        return _pull(repository, file)
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    are_hidden = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return _pull(repository, file)
    finally:
        if not are_hidden:
            enable_progress_bars()


@cache  # a command looks its model up before torch is imported, and again when it is loaded
def _pull(repository: str, file: str | None) -> Path:
    import huggingface_hub

    name = repository if file is None else f"{repository}/{file}"
    try:
        if file is None:
            folder = Path(
                huggingface_hub.snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
            )
        else:
            # hf_hub_download would retry for half a minute without a network.
            folder = Path(huggingface_hub.snapshot_download(repository, allow_patterns=_files(file)))
    # The library's error classes share no base across the versions that pyproject.toml allows, and errors of its HTTP
    # library pass through it unchanged.
    except Exception as error:
        folders = Path(huggingface_hub.constants.HF_HUB_CACHE).glob("models--*")
        meant = did_you_mean(repository, ["/".join(folder.name.split("--")[1:]) for folder in folders])
        raise ModelNotFoundError(f"model {show_path(name)}: {_reason(error, repository)}{meant}") from error
    if file is not None:
        if not (folder / file).is_file():
            raise ModelNotFoundError(f"model {show_path(name)}: the repository has no such file")
        return folder / file
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"model {repository!r}: the repository has no config.json; to use a GGUF file, name it: "
            f"{repository}/file.gguf"
        )
    return folder


def _files(file: str) -> list[str]:
    """Return patterns of a GGUF file and, if its model is split, of the other files of the model."""
    folder, slash, name = file.rpartition("/")
    return [glob.escape(folder + slash + shard) for shard in shard_names(name)]


def _reason(error: Exception, repository: str) -> str:
    names = all_class_names(error)
    if "OfflineModeIsEnabled" in names:
        return "not downloaded yet, and HF_HUB_OFFLINE is set"
    if "GatedRepoError" in names:
        return f"its licence must be accepted at https://huggingface.co/{repository}, and HF_TOKEN be set"
    if "RepositoryNotFoundError" in names:
        return "no such repository on the Hugging Face hub, or a private one that needs HF_TOKEN"
    if why := why_unreachable(error):
        return f"no network: huggingface.co cannot be reached ({why})"
    return f"could not be downloaded from the Hugging Face hub: {first_line(error)}"
