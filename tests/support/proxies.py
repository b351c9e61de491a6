"""nginx and HAProxy with the files of deploy/, as processes in front of servers of this process."""

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

DEPLOY = ROOT / "deploy"
# Debian puts them where only root's PATH looks.
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
PROXIES = ("nginx", "haproxy")


def find_program(name: str) -> str | None:
    return shutil.which(name, path=PATH)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def proxy(name: str, addresses: list[str], folder: Path) -> Iterator[str]:
    """Run a proxy and yield its address.

    Args:
        name: a name of ``PROXIES``.
        addresses: addresses of the two servers; they may be the same.
        folder: an empty folder for its files.
    """
    port = free_port()
    make_certificate(folder)
    file = DEPLOY / {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}[name]
    text = file.read_text()
    changes = {
        "127.0.0.1:8000": addresses[0].removeprefix("http://"),
        "127.0.0.1:8001": addresses[1].removeprefix("http://"),
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "bind :443 ssl": f"bind 127.0.0.1:{port} ssl",
        "/etc/nginx/tls": str(folder),
        "/etc/haproxy": str(folder),
    }
    for old, new in changes.items():
        text = text.replace(old, new)
    config = folder / file.name
    config.write_text(text)
    process = subprocess.Popen(command(name, config, folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_for_port(port, process)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=20)


def command(name: str, config: Path, folder: Path) -> list[str]:
    program = find_program(name)
    assert program is not None
    if name == "haproxy":
        return [program, "-db", "-f", str(config)]
    # What a package's own configuration sets outside of the http block; the folders for bodies are compiled in.
    where = f"daemon off; pid {folder}/nginx.pid; error_log stderr;" + (" user root;" if os.geteuid() == 0 else "")
    temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in temporary)
    config.write_text(config.read_text().replace("http {", f"http {{ access_log off; {paths}", 1))
    return [program, "-c", str(config), "-g", where, "-e", "stderr"]


def make_certificate(folder: Path) -> None:
    """Write a certificate of its own, in the files that both proxies expect."""
    crt, key = folder / "fastinfer.crt", folder / "fastinfer.key"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(crt)]
    subprocess.run(["openssl", "req", *kind, *names, *files], check=True, capture_output=True, timeout=60)
    (folder / "fastinfer.pem").write_text(crt.read_text() + key.read_text())


def trusting(folder: Path) -> ssl.SSLContext:
    """Return a context that trusts the certificate alone."""
    return ssl.create_default_context(cafile=str(folder / "fastinfer.crt"))


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return
