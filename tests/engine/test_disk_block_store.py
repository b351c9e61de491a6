"""Blocks in files: what is read is what was written, whatever happens to the files."""

import errno
import fcntl
import io
import logging
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kv_files import damage, kv_files, restore, size_of, wait_for_files
from torch import Tensor

from fastinfer.engine import disk_block_store
from fastinfer.engine.disk_block_store import DiskBlockStore
from fastinfer.engine.prefix_hash import BlockContent, next_key, tokens_to_bytes
from fastinfer.engine.transfer import HostCopy
from fastinfer.errors import RequestError

BLOCK_BYTES = 201
NUM_DAMAGES = int(os.environ.get("FASTINFER_DAMAGES", "1000"))


def content(number: int) -> BlockContent:
    tokens = tokens_to_bytes([number, number + 1, 7])
    return BlockContent(next_key(b"chain", tokens), tokens)


def payload(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(256, (BLOCK_BYTES,), dtype=torch.uint8, generator=generator)


def make(folder: Path, max_bytes: int = 10**6, model: int = 1) -> DiskBlockStore:
    return DiskBlockStore(folder, bytes([model]) * 32, max_bytes)


def fill(store: DiskBlockStore, count: int) -> None:
    for number in range(count):
        store.put(content(number), HostCopy([payload(number)]))
        wait_for_files(store)


def check(store: DiskBlockStore, number: int) -> bool:
    """Whether the block is there; it must be the right one."""
    data = store.get(content(number), BLOCK_BYTES)
    assert data is None or torch.equal(data, payload(number))
    return data is not None


def test_blocks_are_found_by_a_later_store(tmp_path: Path) -> None:
    fill(make(tmp_path / "a/b"), 5)
    store = make(tmp_path / "a/b")
    assert [check(store, number) for number in range(7)] == [True] * 5 + [False] * 2
    assert (store.num_loaded, store.num_damaged, store.num_failed) == (5, 0, 0)
    assert store.touch(content(4))
    assert not store.touch(content(5))


def test_a_process_that_goes_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the folder in which the process was when the store was made."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    store = make(Path("kv"))
    monkeypatch.chdir(tmp_path / "second")
    fill(store, 1)
    assert check(store, 0)
    assert check(make(tmp_path / "first" / "kv"), 0)
    assert not list((tmp_path / "second").iterdir())


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    fill(make(tmp_path), 1)
    assert [oct(file.stat().st_mode & 0o777) for file in kv_files(tmp_path)] == ["0o600"]


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    fill(make(tmp_path), 5)
    other = make(tmp_path, model=2)
    assert not any(check(other, number) for number in range(5))
    assert other.num_damaged == 0


def test_equal_keys_with_other_tokens_are_a_miss(tmp_path: Path) -> None:
    """As if two texts had the same hash."""
    store = make(tmp_path)
    fill(store, 1)
    assert store.get(BlockContent(content(0).key, content(1).tokens), BLOCK_BYTES) is None


def test_no_damage_is_taken_for_a_block(tmp_path: Path) -> None:
    store = make(tmp_path / "own")
    fill(store, 4)
    contents = {path: path.read_bytes() for path in kv_files(tmp_path)}
    other = make(tmp_path / "foreign", model=2)
    fill(other, 4)
    foreign = [path.read_bytes() for path in kv_files(tmp_path / "foreign")]
    rng = random.Random(0)
    num_hits = 0
    for _ in range(NUM_DAMAGES):
        kind = damage(rng, contents, foreign)
        paths = [Path(store._path(content(number))) for number in range(4)]
        intact = [path.is_file() and path.read_bytes() == contents[path] for path in paths]
        assert [check(store, number) for number in range(4)] == intact, kind
        num_hits += sum(intact)
        restore(contents)
        assert all(check(store, number) for number in range(4))
    assert store.num_damaged > NUM_DAMAGES / 2
    assert 0 < num_hits < 3 * NUM_DAMAGES


def test_a_damaged_file_is_replaced_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make(tmp_path)
    fill(store, 2)
    for path in kv_files(tmp_path):
        path.write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        assert not check(store, 0)
        assert not check(store, 1)
    assert store.num_damaged == 2
    [record] = caplog.records
    assert "is damaged or not a file of this cache" in record.getMessage()
    assert not store.touch(content(0))
    fill(store, 2)
    assert check(store, 0)
    assert check(store, 1)


@pytest.mark.parametrize("num_stores", [1, 4, 16])
def test_stores_that_share_a_folder_keep_its_limit(
    num_stores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they look through it as often as one alone, which is once for each sixteenth of the limit."""
    limit = 20_000
    stores = [make(tmp_path, limit) for _ in range(num_stores)]
    scan, scans = DiskBlockStore._scan, []
    monkeypatch.setattr(DiskBlockStore, "_scan", lambda self: scans.append(self) or scan(self))
    sizes = []
    for number in range(300):
        store = stores[number % num_stores]
        store.put(content(number), HostCopy([payload(number)]))
        wait_for_files(store)
        sizes.append(size_of(tmp_path))
    assert 0.8 * limit < max(sizes) <= limit
    assert len(scans) <= num_stores + 300 // (limit // 16 // sizes[0])


def test_nobody_waits_for_a_process_that_makes_room_and_hangs(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    fill(first, 1)
    with open(tmp_path / "written-1000000", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fill(second, 3)
        assert (second.num_dropped, second.num_failed) == (3, 0)
        assert not second.touch(content(2))
    fill(second, 3)
    assert second.num_dropped == 3
    assert all(check(first, number) for number in range(3))


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    file_size = 16 + 32 + 32 + 24 + BLOCK_BYTES + 4
    store = make(tmp_path, 10 * file_size + 5)
    fill(store, 8)
    for number, path in enumerate(store._path(content(n)) for n in range(8)):
        os.utime(path, ns=(0, 10**9 * (1 + number)))  # clocks may be coarse
    assert store.touch(content(0))
    for number in range(8, 30):
        store.put(content(number), HostCopy([payload(number)]))
        wait_for_files(store)
        assert size_of(tmp_path) <= 10 * file_size + 5
        if number == 14:
            assert [check(store, n) for n in range(8)] == [True, *[False] * 5, True, True]
    assert store.num_failed == 0


def test_stores_of_several_models_share_the_limit(tmp_path: Path) -> None:
    one, two = make(tmp_path, 4000), make(tmp_path, 4000, model=2)
    for number in range(60):
        for store in (one, two):
            store.put(content(number), HostCopy([payload(number)]))
            wait_for_files(store)
        # Each store scans the folder after it has written a 16th of the limit, or a file if that is larger.
        assert size_of(tmp_path) <= 4000 + 309
    assert check(two, 59)


def test_foreign_files_in_the_folder_stay(tmp_path: Path) -> None:
    store = make(tmp_path, 400)
    block_name, temporary = f"{'0' * 64}.kv", f"{disk_block_store.TEMPORARY_PREFIX}mine"
    names = ["notes.txt", block_name, "models/a.gguf", f"models/{block_name}", f"models/{temporary}", temporary]
    keep = [store._folder / "readme.kv", *(tmp_path / name for name in names)]
    for path in keep:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 1000)
        os.utime(path, (0, 0))
    fill(store, 10)
    assert all(path.exists() for path in keep)
    assert len([path for path in store._folder.iterdir() if path not in keep]) == 1


def test_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    store = make(tmp_path)
    fill(store, 1)
    old, new = (store._folder / f"{disk_block_store.TEMPORARY_PREFIX}{name}" for name in ("old", "new"))
    for path, age in ((old, disk_block_store.ABANDONED_S + 60), (new, 0)):
        path.write_bytes(b"half a bl")
        os.utime(path, (time.time() - age,) * 2)
    fill(make(tmp_path), 1)
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("name", ["/proc/fastinfer", "a file", "a file/below"])
def test_a_folder_that_cannot_be_written_to(name: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(RequestError, match=f"kv_offloading_dir must be a folder that can be written to, got .*{name}"):
        make(tmp_path / name)


@pytest.mark.parametrize("function", ["write", "replace"])
def test_a_full_disk(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    store = make(tmp_path)
    fill(store, 1)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        fill(store, 3)
    assert store.num_failed == 3
    assert [record.getMessage().endswith("No space left on device (logged once)") for record in caplog.records] == [
        True
    ]
    assert len(list(store._folder.iterdir())) == 1, "what was half written stays"
    fill(store, 3)
    assert all(check(store, number) for number in range(3))


class FullDisk(io.FileIO):
    """A file to which nothing can be written before something has been removed."""

    def write(self, data: Any) -> int:
        if kv_files(Path(str(self.name)).parent):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_room_is_made_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(make(tmp_path), 5)
    store = make(tmp_path, 500)  # one file
    opened = open

    def open_file(file: Any, mode: str, buffering: int = -1) -> Any:
        return FullDisk(file, mode) if Path(str(file)).name.startswith("written-") else opened(file, mode, buffering)

    monkeypatch.setattr(disk_block_store, "open", open_file, raising=False)
    store.put(content(7), HostCopy([payload(7)]))
    wait_for_files(store)
    assert store.num_failed == 0
    assert [check(store, number) for number in (0, 4, 7)] == [False, False, True]


def test_a_child_that_was_forked_meanwhile_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(tmp_path), make(tmp_path)
    children = []

    def scan(store: DiskBlockStore) -> list[Any]:
        children.append(pid := os.fork())
        if not pid:
            signal.pause()
        return []

    with monkeypatch.context() as patch:
        patch.setattr(DiskBlockStore, "_scan", scan)
        fill(first, 1)
    try:
        fill(second, 2)
        assert second.num_dropped == 0
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_a_folder_that_disappears(tmp_path: Path) -> None:
    store = make(tmp_path / "a")
    fill(store, 1)
    shutil.rmtree(tmp_path / "a")
    assert not check(store, 0)
    fill(store, 1)
    assert check(store, 0)


def test_a_queue_that_is_full_drops_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(HostCopy):
        """A copy that takes until the test allows it to end."""

        def wait(self) -> list[Tensor]:
            assert may_end.wait(30)
            return super().wait()

    may_end = threading.Event()
    monkeypatch.setattr(disk_block_store, "MAX_QUEUED_BYTES", 3 * BLOCK_BYTES)
    store = make(tmp_path)
    for number in range(5):
        store.put(content(number), Slow([payload(number)]))
        assert store.touch(content(number)) == (number < 3)
    may_end.set()
    wait_for_files(store)
    assert store.num_dropped == 2
    assert [check(store, number) for number in range(5)] == [True] * 3 + [False] * 2
    may_end.clear()
    for number in range(5, 8):  # there is room again
        store.put(content(number), Slow([payload(number)]))
    may_end.set()
    wait_for_files(store)
    assert all(check(store, number) for number in range(5, 8))
    assert store.num_dropped == 2


def test_a_block_that_is_larger_than_the_queue_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_block_store, "MAX_QUEUED_BYTES", BLOCK_BYTES - 1)
    store = make(tmp_path)
    fill(store, 2)
    assert all(check(store, number) for number in range(2))
    assert store.num_dropped == 0


def test_a_block_that_waits_to_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a miss once it could not be written."""
    may_end = threading.Event()
    store = make(tmp_path)

    def write(*args: object) -> None:
        assert may_end.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", write)
    store.put(content(0), HostCopy([payload(0)]))
    assert store.touch(content(0))
    assert check(store, 0)
    assert store.get(BlockContent(content(0).key, content(1).tokens), BLOCK_BYTES) is None
    may_end.set()
    wait_for_files(store)
    assert not store.touch(content(0))
    assert not check(store, 0)
    assert (store.num_loaded, store.num_failed) == (1, 1)


def test_a_forked_process_writes_too(tmp_path: Path) -> None:
    store = make(tmp_path)
    fill(store, 1)
    child = os.fork()
    if not child:
        try:
            store.put(content(1), HostCopy([payload(1)]))
            wait_for_files(store)
            os._exit(0 if check(store, 1) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert check(store, 1)
    fill(store, 3)
    assert check(store, 2)
