"""Permissions of files that other libraries write for their user alone."""

import os
import stat
from pathlib import Path


def share_as_new(path: Path) -> None:
    """Give a file the permissions that a new file gets beside it, from the umask or the folder's default ACL.

    safetensors makes files that nobody else can read, and a model is often for a group or for a server's own user. The
    mode comes from a file made for it: asking for the umask would change it for a moment, in all threads.
    """
    sample = path.with_name(f".{path.name}.{os.getpid()}")
    sample.touch()
    try:
        path.chmod(stat.S_IMODE(sample.stat().st_mode))
    finally:
        sample.unlink()
