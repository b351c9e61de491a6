"""The server that clients are tested against; `make clients` installs them, and a missing one skips."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served import Served, serve_default_model

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm fetches prices when it is imported


@pytest.fixture(scope="session")
def served(model_path: Path) -> Iterator[Served]:
    """A server with the default model."""
    with serve_default_model() as served:
        yield served
