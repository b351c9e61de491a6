"""Memory of tensors that are mapped from a file: it is given back, and what was in it is read again."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastinfer.utils.mapped_files import MappedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
COUNT = 1 << 20


def mapped(path: Path) -> Tensor:
    """A tensor whose pages have all been read from a file."""
    with path.open("wb") as file:
        file.write(bytes(range(256)) * (COUNT // 256))
        file.flush()
        os.fsync(file.fileno())  # pages that are not written yet could not be given back
    tensor = torch.from_file(str(path), size=COUNT, dtype=torch.uint8)
    assert int(tensor.long().sum()) == COUNT // 256 * (255 * 128)
    return tensor


def resident_bytes(path: Path) -> int:
    """Memory that the mapping of a file takes."""
    sections = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = [re.search(r"^Rss: +(\d+) kB", part, re.MULTILINE) for part in sections if str(path) in part]
    return sum(int(size[1]) << 10 for size in sizes if size)


def test_pages_are_given_back_and_read_again(tmp_path: Path) -> None:
    tensor = mapped(tmp_path / "file")
    if resident_bytes(tmp_path / "file") < COUNT:
        pytest.skip("the file system maps no pages of files")
    before = tensor.clone()
    MappedFiles().release(tensor[1:-1])
    assert resident_bytes(tmp_path / "file") <= 4 * 4096  # the ends share pages with others
    assert torch.equal(tensor, before)


def test_changes_are_not_lost(tmp_path: Path) -> None:
    """A private copy of a page is not in the file."""
    tensor = mapped(tmp_path / "file")
    tensor += 1
    expected = tensor.clone()
    MappedFiles().release(tensor)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("shape", [(0,), (3,), (1 << 20,)])
def test_other_memory_stays(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(shape[0])
    MappedFiles().release(tensor)
    assert torch.equal(tensor, torch.arange(shape[0]))
