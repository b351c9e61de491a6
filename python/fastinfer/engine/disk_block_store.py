"""Store of computed blocks in a folder, which outlives the process.

``<folder>/<fingerprint>/<key>.kv`` holds one block: a header, the block's bytes and a CRC-32 of both. The header has
the version of the format, the fingerprint of the model and of everything else on which the bytes depend, the block's
key and its tokens. A reader knows the header and the size that a file must have, so it parses nothing: a file that
differs in any way is no hit. Files are written under another name and renamed when they are complete. They are not
synced: what a power failure leaves incomplete has a wrong checksum.

Any number of processes may share a folder. The size of the folder is limited; the files whose time of modification,
which every use renews, is oldest are removed first, whichever model they belong to. ``<folder>/written-<limit>`` counts
what the processes with this limit have written since one of them looked through the folder, by its length, as appending
is atomic. Who looks through the folder locks that file. The others do not wait, since the one that has the lock could
hang: a block that they would write meanwhile is dropped.
"""

import contextlib
import fcntl
import logging
import os
import re
import stat
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastinfer.engine.block_store import BlockStore
from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.transfer import HostCopy
from fastinfer.errors import RequestError
from fastinfer.utils.forks import renew_in_children

LOG = logging.getLogger("fastinfer")

MAGIC = b"fastinfer KV 1\0\0"
# Blocks that wait to be written are copies in memory; further ones are dropped.
MAX_QUEUED_BYTES = 256 << 20
# The folder is scanned again after this share of its limit has been written.
SCAN_SHARE = 16
COUNT = 2**16  # length in bytes of the file that counts when that is the case
TEMPORARY_PREFIX = "tmp-"
ABANDONED_S = 3600.0  # age in seconds at which a temporary file belongs to no living writer
_MODEL_FOLDER = re.compile(r"[0-9a-f]{64}")
_BLOCK_FILE = re.compile(r"[0-9a-f]{64}\.kv")


class _Queued(NamedTuple):
    """A block that waits to be written."""

    content: BlockContent
    data: HostCopy


class _File(NamedTuple):
    """A file of the folder; files sort by the time of their last use."""

    used_ns: int
    size: int
    path: str


def prepare_folder(folder: Path) -> None:
    """Create the folder if it does not exist, and check that it can be written to.

    Raises:
        RequestError: it cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=TEMPORARY_PREFIX, dir=folder):
            pass
    except OSError as error:
        raise RequestError(
            f"kv_offloading_dir must be a folder that can be written to, got {folder}: {error.strerror or error}"
        ) from None


class DiskBlockStore(BlockStore):
    """Blocks in files, and those that wait to be written, for which a process waits at its end.

    Nothing that happens to the files is an error: a block that cannot be read is a miss.

    Args:
        folder: folder of the files of all models; it is created if it does not exist.
        fingerprint: 32 bytes that stand for everything on which a block's bytes depend beside its content.
        max_bytes: largest size of all files in bytes, beside the block that each other process is just writing.

    Attributes:
        num_damaged: files that were not what their name says, since the start.
        num_dropped: blocks that were not written because too many waited already, or another process was making room.
        num_failed: blocks that could not be read or written.

    Raises:
        RequestError: the folder cannot be created or written to.
    """

    def __init__(self, folder: Path, fingerprint: bytes, max_bytes: int) -> None:
        super().__init__()
        self._root = folder.absolute()  # files are written later, when the process may be in another folder
        self._folder = self._root / fingerprint.hex()
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._has_scanned = False
        self._record = torch.empty(0, dtype=torch.uint8)  # the file that was read last
        self._reported: set[str] = set()
        self.num_damaged = 0
        self.num_dropped = 0
        self.num_failed = 0
        prepare_folder(folder)
        self.renew_after_fork()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """Begin with an empty queue and no thread, as in a forked process, which has none of its parent's threads."""
        self._queued: dict[bytes, _Queued] = {}
        self._queued_bytes = 0
        self._queue_lock = threading.Lock()  # blocks leave the queue in the writer's thread
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fastinfer-kv-writer")

    def touch(self, content: BlockContent) -> bool:
        if content.key in self._queued:
            return True
        try:
            os.utime(self._path(content))
        except OSError:
            return False
        return True

    def put(self, content: BlockContent, data: HostCopy) -> None:
        num_bytes = data.num_bytes
        with self._queue_lock:
            if self._queued and self._queued_bytes + num_bytes > MAX_QUEUED_BYTES:
                self.num_dropped += 1
                return
            self._queued_bytes += num_bytes
            self._writer.submit(self._write_queued, content, data)
            self._queued[content.key] = _Queued(content, data)

    def get(self, content: BlockContent, num_bytes: int) -> Tensor | None:
        queued = self._queued.get(content.key)
        if queued is not None and queued.content == content:
            [data] = queued.data.wait()
            self.num_loaded += 1
            return data
        path = self._path(content)
        header = self._header(content)
        size = len(header) + num_bytes + 4
        if len(self._record) != size:
            self._record = torch.empty(size, dtype=torch.uint8)  # reused: new memory costs as much time as the reading
        record = self._record
        try:
            is_complete = _read(path, record)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report_failure("read", path, error)
            return None
        if not is_complete or not _is_intact(record, header):
            self.num_damaged += 1
            self._warn("damaged", f"{path} is damaged or not a file of this cache: its block is computed again")
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        self.num_loaded += 1
        return record[len(header) : -4]

    def _path(self, content: BlockContent) -> str:
        return f"{self._folder}/{content.key.hex()}.kv"

    def _header(self, content: BlockContent) -> bytes:
        return MAGIC + self._fingerprint + content.key + content.tokens

    def _write_queued(self, content: BlockContent, data: HostCopy) -> None:
        """Write a block's file, and take the block out of the queue, in the writer's thread."""
        try:
            self._write(content, data)
        finally:
            with self._queue_lock:
                self._queued.pop(content.key, None)
                self._queued_bytes -= data.num_bytes

    def _write(self, content: BlockContent, data: HostCopy) -> None:
        path = self._path(content)
        try:
            [tensor] = data.wait()
            header, payload = self._header(content), tensor.numpy().data
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._make_room(len(header) + len(payload) + 4):
                with self._queue_lock:
                    self.num_dropped += 1
                return
            descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=self._folder)
            try:
                with open(descriptor, "wb", buffering=0) as file:
                    for part in (header, payload, _checksum(header, payload)):
                        _write_all(file.fileno(), part)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except Exception as error:  # no request depends on it
            self._report_failure("written", path, error)

    def _make_room(self, size: int) -> bool:
        """Count a file that is about to be written, and return whether it may be.

        If that is too much without looking through the folder, the files that were not used for longest are removed.
        """
        step = max(self._max_bytes // SCAN_SHARE, size)
        count = bytes(-(-size * COUNT // step))
        with open(self._root / f"written-{self._max_bytes}", "ab", buffering=0) as file:
            with contextlib.suppress(OSError):  # the disk is full
                file.write(count)
                if self._has_scanned and file.tell() <= COUNT:
                    return True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            try:
                with contextlib.suppress(OSError):
                    file.write(bytes(COUNT))  # so that nobody writes meanwhile
                self._remove_beyond(self._max_bytes - step)
                file.truncate(0)
                file.write(count)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file, too
        self._has_scanned = True
        return True

    def _remove_beyond(self, max_bytes: int) -> None:
        files = sorted(self._scan())
        total = sum(file.size for file in files)
        for file in files:
            if total <= max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
            total -= file.size

    def _scan(self) -> list[_File]:
        """Return all files of blocks, and remove what killed processes left."""
        files = []
        for folder in _entries(self._root):
            if not _MODEL_FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if _BLOCK_FILE.fullmatch(entry.name):
                        files.append(_File(status.st_mtime_ns, status.st_size, entry.path))
                    elif entry.name.startswith(TEMPORARY_PREFIX) and time.time() - status.st_mtime > ABANDONED_S:
                        os.unlink(entry.path)
        return files

    def _report_failure(self, action: str, path: str, error: Exception) -> None:
        self.num_failed += 1
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        self._warn(action, f"{path} cannot be {action}: {reason}")

    def _warn(self, kind: str, message: str) -> None:
        """Log the first message of a kind; the statistics count the others."""
        if kind not in self._reported:
            self._reported.add(kind)
            LOG.warning("KV cache on disk: %s (logged once)", message)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:  # removed by somebody else
        return []


def _read(path: str, record: Tensor) -> bool:
    """Read a whole file, and return whether it is a regular file of exactly this size."""
    # Without O_NONBLOCK, opening a named pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(record):
            return False
        rest = record.numpy().data
        while rest:
            count = os.readv(descriptor, [rest])
            if not count:
                return False
            rest = rest[count:]
        return True
    finally:
        os.close(descriptor)


def _is_intact(record: Tensor, header: bytes) -> bool:
    """Return whether a record has this header and its own checksum."""
    view = record.numpy().data
    return view[: len(header)] == header and view[-4:] == _checksum(view[:-4])


def _checksum(*parts: bytes | memoryview) -> bytes:
    """Return the CRC-32 of the parts, one after the other."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value.to_bytes(4, "little")


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
