"""The images and pods of deploy/ without a container engine: their commands in a sandbox of bubblewrap.

As in a container, the process has the image's variables, a user of its own without rights, a read-only root, an empty
``/tmp``, the models at ``/models``, and a network of its own, in which ports are free and nothing can be reached.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.paths import ROOT

BWRAP = shutil.which("bwrap")
DRIVER = ROOT / "tests/support/container_driver.py"
UID = "10001"


def can_sandbox() -> bool:
    """Tell whether this machine lets an unprivileged process have namespaces."""
    if BWRAP is None:
        return False
    command = [BWRAP, "--ro-bind", "/", "/", "--unshare-all", "true"]
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


def instructions(dockerfile: Path) -> dict[str, str]:
    """Return the last stage's instructions, by their names in capitals; repeated ones are joined by a line break."""
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if name == "FROM":
            found = {}
        if name.isupper():
            found[name] = f"{found[name]}\n{value.strip()}" if name in found else value.strip()
    return found


def image_environment(image: dict[str, str]) -> dict[str, str]:
    """Return the variables that an image sets, without PATH: this environment's programs stand in for its own."""
    return {name: value for name, value in re.findall(r"(\w+)=(\S+)", image["ENV"]) if name != "PATH"}


def health_command(image: dict[str, str]) -> list[str]:
    """Return the command of HEALTHCHECK."""
    command: list[str] = json.loads(image["HEALTHCHECK"].partition("CMD")[2])
    return command


def run_in_sandbox(plan: dict[str, Any], environment: dict[str, str], models: Path, timeout: float = 120) -> Any:
    """Run the driver in a sandbox, and return what it found.

    Args:
        plan: what the driver is to do.
        environment: variables of the process.
        models: folder that is mounted, read-only, at ``/models``.
        timeout: seconds.
    """
    assert BWRAP is not None
    programs = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    variables = {"PATH": programs, "PYTHONPATH": str(ROOT / "python"), "HOME": "/tmp", **environment}
    binds: list[str] = []
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            binds += ["--symlink", str(entry.readlink()), str(entry)]
        elif entry.name not in ("dev", "proc", "tmp", "models"):
            binds += ["--ro-bind", str(entry), str(entry)]
    for folder in (ROOT, Path(sys.prefix)):  # they may be below /tmp
        binds += ["--ro-bind", str(folder), str(folder)] if folder.is_relative_to("/tmp") else []
    command = [BWRAP, "--unshare-all", "--uid", UID, "--gid", UID, "--cap-drop", "ALL", "--die-with-parent"]
    command += ["--new-session", "--clearenv", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", *binds]
    command += ["--ro-bind", str(models), "/models", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in variables.items():
        command += ["--setenv", name, value]
    command += ["--", sys.executable, str(DRIVER), json.dumps(plan)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ)
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout)
