"""The name that a mistyped name of a model may mean."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from fastinfer.hub import registry


def did_you_mean(name: str, others: Iterable[str] = ()) -> str:
    """Return ``"; did you mean ...?"``, or nothing if no name is similar.

    Args:
        name: name or path that was not found.
        others: further names beside the registered models and the models in the folder of the path.
    """
    known = {other.lower(): other for other in (*others, *_neighbours(name), *registry.REGISTRY)}
    wanted = name.lower()
    similar = difflib.get_close_matches(wanted, known, 1, 0.7)
    similar = similar or [other for other in known if len(wanted) > 3 and other.startswith(wanted)]
    return f"; did you mean {known[similar[0]]!r}?" if similar else ""


def _neighbours(name: str) -> list[str]:
    """Return the models in the folder that the name would lie in if it were a path, written like the name."""
    folder, _ = os.path.split(name)
    try:
        entries = sorted(Path(os.path.expanduser(folder) or ".").iterdir())
        return [
            os.path.join(folder, entry.name)
            for entry in entries
            if entry.suffix == ".gguf" or (entry / "config.json").is_file()
        ]
    except (OSError, ValueError):  # there is no such folder, or the name is none
        return []
