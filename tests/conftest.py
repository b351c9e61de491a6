"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from fastinfer import hub

pytest.register_assert_rewrite("helpers", "quantized_gemm")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, downloaded on first use."""
    return hub.resolve(hub.DEFAULT_MODEL)
