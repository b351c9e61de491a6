"""Permissions of files that safetensors writes."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastinfer.utils.file_mode import share_as_new


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_decides(tmp_path: Path, umask: int) -> None:
    file = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        save_file({"a": torch.ones(1)}, file)
        share_as_new(file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    assert list(tmp_path.iterdir()) == [file]
