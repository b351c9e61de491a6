"""Files of a KV cache on disk, and random damage to them."""

import os
import random
import shutil
from pathlib import Path

from fastinfer.engine.disk_block_store import DiskBlockStore

GIB = 2**30
KINDS = ["flip", "flip", "flip", "cut", "extend", "zeros", "hole", "random", "swap", "foreign", "header", "empty"]
KINDS += ["folder", "pipe", "dangling link", "link to itself", "link to another", "gone"]


def kv_files(folder: Path) -> list[Path]:
    """The files of all blocks, in a fixed order."""
    return sorted(folder.rglob("*.kv"))


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in kv_files(folder))


def wait_for_files(store: DiskBlockStore) -> None:
    """Wait until all queued blocks are written: one thread writes them in their order."""
    store._writer.submit(int).result()


def restore(contents: dict[Path, bytes]) -> None:
    """Give all files their content back, whatever has become of them."""
    for path, content in contents.items():
        remove(path)
        path.write_bytes(content)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damage(rng: random.Random, contents: dict[Path, bytes], foreign: list[bytes]) -> str:
    """Damage some of the files.

    Args:
        rng: source of the kind and the place of the damage.
        contents: what the files contain.
        foreign: contents of files of other caches.

    Returns:
        The kind of damage, for messages.
    """
    kind = rng.choice(KINDS)
    paths = list(contents)
    for path in rng.sample(paths, rng.randint(1, len(paths))):
        old = contents[path]
        new = bytearray(old)
        if kind == "flip":
            for _ in range(rng.randint(1, 8)):
                new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del new[rng.randrange(len(new)) :]
        elif kind == "extend":
            new += rng.randbytes(rng.randint(1, 99))
        elif kind == "zeros":
            new = bytearray(len(new))
        elif kind == "hole":
            start = rng.randrange(len(new))
            new[start : start + 64] = bytes(len(new[start : start + 64]))
        elif kind == "random":
            new = bytearray(rng.randbytes(len(new)))
        elif kind == "swap":
            new = bytearray(contents[rng.choice(paths)])
        elif kind == "foreign":
            new = bytearray(rng.choice(foreign))
        elif kind == "header":
            other = rng.choice(foreign)
            new[:80] = other[:80]
        elif kind == "empty":
            new.clear()
        remove(path)
        if kind == "folder":
            path.mkdir()
            (path / "file").write_bytes(old)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "dangling link":
            path.symlink_to(path.with_suffix(".nowhere"))
        elif kind == "link to itself":
            path.symlink_to(path)
        elif kind == "link to another":
            path.symlink_to(rng.choice(paths))
        elif kind != "gone":
            path.write_bytes(new)
    return kind
