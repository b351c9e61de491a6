"""Models that are split into several GGUF files, as the gguf package writes them."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from fastinfer.errors import GGUFFormatError, ModelNotFoundError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.formats.gguf_shards import open_gguf
from fastinfer.utils.gguf_names import shard_names

NUM_TENSORS = 5


def write(path: Path, per_file: int) -> Path:
    """Write a model of five tensors; returns the first of its files."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=per_file)
    writer.add_uint32("llama.block_count", 2)
    for index in range(NUM_TENSORS):
        writer.add_tensor(f"blk.{index}.weight", np.full((3, 32 + index), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", 2)


def test_it_equals_the_model_in_one_file(first: Path, tmp_path: Path) -> None:
    whole = open_gguf(write(tmp_path / "whole.gguf", 0))
    split = open_gguf(first)
    assert [file.name for file in split.files] == shard_names(first.name)
    assert whole.files == [tmp_path / "whole.gguf"]
    assert split.tensors.keys() == whole.tensors.keys()
    for name, tensor in split.tensors.items():
        assert np.array_equal(tensor.data, whole.tensors[name].data)
    assert split.get("llama.block_count", int) == 2
    split.release()
    assert (split.tensors["blk.4.weight"].data.view(np.float32) == 4).all()


def test_any_file_that_was_cut_is_noticed(first: Path) -> None:
    model = open_gguf(first)
    last = model.files[-1]
    with open(last, "r+b") as file:
        file.truncate(last.stat().st_size - 32)
    with pytest.raises(GGUFFormatError, match=r"model-00003-of-00003\.gguf: the file was cut"):
        model.check_size()


def test_another_file_than_the_first_is_refused(first: Path) -> None:
    second = first.with_name("model-00002-of-00003.gguf")
    with pytest.raises(GGUFFormatError, match=r"expected the first of the 3 files of this model, model-00001-of-00003"):
        open_gguf(second)


def test_a_missing_file(first: Path) -> None:
    first.with_name("model-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match=r"cannot open .*model-00003-of-00003\.gguf"):
        open_gguf(first)


@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00004.gguf", "model-00002-of-00003.gguf"])
def test_a_name_that_says_something_else(name: str, first: Path) -> None:
    renamed = first.rename(first.with_name(name))
    with pytest.raises(GGUFFormatError, match=r"expected a name that ends in -00001-of-00003\.gguf, because the file"):
        open_gguf(renamed)


def test_files_of_another_model(first: Path, tmp_path: Path) -> None:
    third = first.with_name("model-00003-of-00003.gguf")
    shutil.copy(first.with_name("model-00002-of-00003.gguf"), third)
    with pytest.raises(GGUFFormatError, match=r"expected split\.no 2 and split\.count 3, got 1 and 3"):
        open_gguf(first)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other/model.gguf", 3)
    shutil.copy(tmp_path / "other/model-00002-of-00002.gguf", third)
    with pytest.raises(GGUFFormatError, match=r"expected split\.no 2 and split\.count 3, got 1 and 2"):
        open_gguf(first)


def test_a_tensor_that_is_in_two_files(first: Path) -> None:
    model = GGUFFile(first)
    with pytest.raises(GGUFFormatError, match=r"tensor 'blk\.0\.weight' is in another file of the model, too"):
        model.join(GGUFFile(first))


def test_too_few_tensors(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GGUFFile, "join", lambda self, other: None)
    with pytest.raises(GGUFFormatError, match="expected 5 tensors in 3 files, got 2"):
        open_gguf(first)


def test_names() -> None:
    assert shard_names("a-b-00002-of-00003.gguf") == [f"a-b-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for alone in ("a.gguf", "a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-1-of-3.gguf"):
        assert shard_names(alone) == [alone]
