"""Download of a model from the Hugging Face hub, into the hub's own cache."""

import re
from pathlib import Path

from fastinfer.errors import ModelNotFoundError
from fastinfer.hub.registry import known_names
from fastinfer.utils.text import first_line

# org/repo, org/repo/file.gguf or org/repo:file.gguf; the file may be in a subfolder of the repository.
NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:[/:](.+\.gguf))?")

# Files to fetch: no pickles, no code, and no second copy of the weights in another layout.
_WANTED = ["*.safetensors", "*.json", "chat_template.jinja"]
_UNWANTED = ["*/*", "consolidated*", "adapter_*"]


def pull(repository: str, file: str | None) -> Path:
    """Download a GGUF file of a repository, or the repository if ``file`` is None.

    Raises:
        ModelNotFoundError: the download failed, or the repository has no config.json.
    """
    # Imported here because it takes 0.3 s. It is always installed, because tokenizers depends on it.
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if file is not None:
            return Path(hf_hub_download(repository, file))
        folder = Path(snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    # The library's error classes share no base across the versions that tokenizers allows, and errors of its HTTP
    # library pass through it unchanged.
    except Exception as error:
        name = repository if file is None else f"{repository}/{file}"
        known = f"; registered models: {known_names()}" if file is None else ""
        raise ModelNotFoundError(
            f"model {name!r}: neither here nor on the Hugging Face hub: {first_line(error)}{known}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"model {repository!r}: the repository has no config.json; to use a GGUF file, name it: "
            f"{repository}/file.gguf"
        )
    return folder
