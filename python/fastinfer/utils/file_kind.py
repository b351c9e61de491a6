"""Kind of a file by its first bytes, for errors about files of another kind than expected."""

HEAD_BYTES = 512

_BEGINNINGS = {
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG\r\n": "a PNG image",
    b"GIF8": "a GIF image",
    b"%PDF-": "a PDF document",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x7fELF": "a program",
    b"version https://git-lfs.": "a Git LFS pointer instead of the file itself, which 'git lfs pull' fetches",
    # Formats of llama.cpp before GGUF, whose magic numbers are stored in little endian.
    b"lmgg": "an old GGML file, which must be converted to GGUF",
    b"fmgg": "an old GGML file, which must be converted to GGUF",
    b"tjgg": "an old GGML file, which must be converted to GGUF",
    **{bytes([0x80, version]): "a pickle" for version in range(2, 6)},
}


def kind_of_file(head: bytes) -> str:
    """Describe a file by its first ``HEAD_BYTES`` bytes, with an article: ``"a JPEG image"``."""
    if not head:
        return "an empty file"
    for beginning, kind in _BEGINNINGS.items():
        if head.startswith(beginning):
            return kind
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return "a safetensors file"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if b"\0" not in head and _is_utf8(head):
        return "JSON text" if text.startswith((b"{", b"[")) else "text"
    return f"a file of an unknown kind, which begins with {head[:4]!r}"


def _is_utf8(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"  # the head ends within a character
    return True
