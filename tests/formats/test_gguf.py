"""The GGUF reader: sound files against the gguf package, and many ways in which a file can be broken."""

import contextlib
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastinfer import _C
from fastinfer.errors import GGUFFormatError, ModelNotFoundError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFType
from fastinfer.formats.gguf_unpack import unpack

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
HUGE = [2**20, 2**32, 2**40, 2**63, 2**64 - 1]
# What opening a file of a few hundred bytes takes anyway: the objects of the reader, a path, an error message.
FIXED_BYTES = 32 * 1024


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: bytes) -> bytes:
    return u64(len(text)) + text


def key(name: bytes, kind: int, payload: bytes) -> bytes:
    return string(name) + u32(kind) + payload


def tensor(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


ARCHITECTURE = key(b"general.architecture", STRING, string(b"llama"))


def build(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    data: bytes = bytes(256),
) -> bytes:
    """A file with every part under control, sound by default."""
    keys = [ARCHITECTURE] if keys is None else keys
    tensors = [tensor(b"weight", [32, 2], GGUFType.F32, 0)] if tensors is None else tensors
    counts = u64(len(tensors) if tensor_count is None else tensor_count)
    counts += u64(len(keys) if key_count is None else key_count)
    header = magic + u32(version) + counts + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def write_sound_file(path: Path) -> Path:
    """A small file with all kinds of values and tensors, written by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("llama.block_count", 2)
    writer.add_int32("i32", -5)
    writer.add_float32("f32", 0.5)
    writer.add_bool("yes", True)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float64("f64", 1e300)
    writer.add_string("text", "naïve 😀\x00\n")
    writer.add_array("tokens", ["a", "", "Ġb", "日本"])
    writer.add_array("types", [1, -1, 3])
    writer.add_array("floats", [0.25, -1.5])
    writer.add_array("bools", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("norm", rng.standard_normal(7, dtype=np.float32))
    writer.add_tensor("half", rng.standard_normal((3, 5)).astype(np.float16))
    dense = rng.standard_normal((4, 96), dtype=np.float32)
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0):
        writer.add_tensor(kind.name, gguf.quants.quantize(dense, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sound_file(tmp_path_factory.mktemp("gguf") / "sound.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["fastinfer.formats.gguf", "fastinfer.tokenizers.tokenizer", "fastinfer.cli.memory_bounds"]
)
def test_may_be_imported_first(module: str) -> None:
    """Before torch, whose symbols the extension needs."""
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_metadata(sound_file: Path) -> None:
    metadata = GGUFFile(sound_file).metadata
    scalars = {k: v for k, v in metadata.items() if not isinstance(v, np.ndarray)}
    assert scalars == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -30000,
        "llama.block_count": 2,
        "i32": -5,
        "f32": 0.5,
        "yes": True,
        "u64": 2**63,
        "i64": -(2**62),
        "f64": 1e300,
        "text": "naïve 😀\x00\n",
        "tokens": ["a", "", "Ġb", "日本"],
    }
    assert type(metadata["yes"]) is bool
    arrays = {k: v.tolist() for k, v in metadata.items() if isinstance(v, np.ndarray)}
    assert arrays == {"types": [1, -1, 3], "floats": [0.25, -1.5], "bools": [True, False]}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["small", "real"])
def test_equals_the_gguf_package(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue("sound_file" if which == "small" else "model_path")
    file, expected = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in expected.fields.items() if not name.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for name, field in fields.items():
        value = file.metadata[name]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert list(file.tensors) == [t.name for t in expected.tensors]
    for ours, theirs in zip(file.tensors.values(), expected.tensors, strict=True):
        assert ours.shape == tuple(theirs.shape.tolist()[::-1])
        assert ours.type == theirs.tensor_type
        assert ours.data.shape[0] == np.prod(ours.shape[:-1])
        np.testing.assert_array_equal(ours.data.reshape(-1), theirs.data.view(np.uint8).reshape(-1))


def test_type_table_equals_the_gguf_package() -> None:
    known = {t.name: (t.value, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    ours = {t.name: (t.value, t.block_size, t.block_bytes) for t in GGUFType}
    # The package does not know all of llama.cpp's types yet.
    assert {name: sizes for name, sizes in ours.items() if name in known}.items() <= known.items()
    assert ours.keys() - known.keys() <= {"Q2_0"}


def test_sound_variants_open(tmp_path: Path) -> None:
    assert GGUFFile(save(tmp_path / "v2", build(version=2))).tensors["weight"].shape == (2, 32)
    assert GGUFFile(save(tmp_path / "empty", build([], []))).metadata == {}
    aligned = build([key(b"general.alignment", U32, u32(64))], [tensor(b"w", [8], GGUFType.F32, 64)])
    assert GGUFFile(save(tmp_path / "aligned", aligned)).tensors["w"].shape == (8,)
    four_dims = build(tensors=[tensor(b"w", [4, 3, 2, 1], GGUFType.F16, 0)])
    assert GGUFFile(save(tmp_path / "dims", four_dims)).tensors["w"].data.shape == (6, 8)
    empty_arrays = [key(b"a", ARRAY, u32(STRING) + u64(0)), key(b"b", ARRAY, u32(F32) + u64(0))]
    metadata = GGUFFile(save(tmp_path / "arrays", build(empty_arrays))).metadata
    assert metadata["a"] == []
    assert metadata["b"].shape == (0,)


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    content = build()
    path = save(tmp_path / "file", content)
    GGUFFile(path).tensors["weight"].data[:] = 7
    assert path.read_bytes() == content


def test_strings_from_cpp() -> None:
    def stored(*texts: bytes) -> bytes:
        return b"".join(len(text).to_bytes(8, "little") + text for text in texts)

    sound = b"xyz" + stored(b"", "naïve 😀\0".encode(), b"a") + b"the rest"
    assert _C.read_strings(sound, 3, 3) == (["", "naïve 😀\0", "a"], len(sound) - 8)
    assert _C.skip_strings(sound, 3, 3) == (3, len(sound) - 8)
    assert _C.read_strings(sound, 3, 1) == ([""], 11)
    assert _C.read_strings(sound, len(sound), 0) == ([], len(sound))
    # As far as they go: a length without end, of less than 8 bytes, past the end by one; and what is not UTF-8.
    for end in (b"\xff" * 8, b"\xff" * 7, b"\x02" + bytes(7) + b"a"):
        broken = stored(b"ab") + end
        assert _C.skip_strings(broken, 0, 2) == (1, 10)
        assert _C.read_strings(broken, 0, 2) == (["ab"], 10)
    other = stored(b"ab", b"\xff", b"c")
    assert _C.skip_strings(other, 0, 3) == (3, len(other))
    assert _C.read_strings(other, 0, 3) == (["ab"], 10)
    for position in (-1, len(sound) + 1):
        with pytest.raises(ValueError, match=rf"position must be in 0\.\.{len(sound)}, got {position}"):
            _C.skip_strings(sound, position, 1)


def corrupted() -> Iterator[tuple[str, bytes, str]]:
    """Name, content, and a part of the message that it must cause."""
    sound = build()
    yield "empty", b"", "an empty file"
    for length in (1, 3, 4, 7, 8, 15, 16, 23, 24, 31, 32, 40, 51, 52, 56, 60, 64, 68, 70, 76, 80, 84, 92, 95):
        yield f"cut at {length}", sound[:length], "left" if length < 24 else ""
    for length in range(100, len(sound), 40):
        yield f"cut at {length}", sound[:length], "'weight'" if length > 128 else ""
    for magic in (b"GGML", b"FUGG", b"PK\x03\x04", bytes(4)):
        yield f"magic {magic!r}", build(magic=magic), "magic"
    for version in (0, 1, 4, 2**32 - 1):
        yield f"version {version}", build(version=version), f"got {version}"
    yield "big endian", build(version=3 << 24), "big-endian"

    for count in HUGE:
        yield f"{count} tensors", build(tensor_count=count), f"{count} tensors"
        yield f"{count} keys", build(key_count=count), f"{count} metadata keys"
        yield f"key of {count} bytes", build([u64(count) + bytes(32)]), "metadata key 0"
        yield f"tensor name of {count} bytes", build(tensors=[u64(count) + bytes(40)]), "tensor 0"
        yield f"string of {count} bytes", build([key(b"k", STRING, u64(count))]), "'k'"
        strings = key(b"k", ARRAY, u32(STRING) + u64(2) + string(b"x") + u64(count))
        yield f"string of {count} bytes in an array", build([strings]), "'k': string 1 of 2"
        for kind in (*range(STRING), STRING, U64, I64, F64):
            array = key(b"k", ARRAY, u32(kind) + u64(count))
            yield f"array of {count} values of type {kind}", build([array]), f"'k': {count}"
        yield f"dimension {count}", build(tensors=[tensor(b"w", [count], 0, 0)]), "'w'"
        yield f"dimensions {count} x {count}", build(tensors=[tensor(b"w", [count, count], 0, 0)]), "'w'"
        yield f"offset {count // 32 * 32}", build(tensors=[tensor(b"w", [8], 0, count // 32 * 32)]), "'w'"
    yield "one key too many", build(key_count=2), ""
    yield "one tensor too many", build(tensor_count=2), ""
    yield "one key too few", build([ARCHITECTURE, key(b"k", U32, u32(1))], key_count=1), ""

    for name in (b"\xff", b"a\xc3", b"\xed\xa0\x80"):
        yield f"key {name!r}", build([key(name, U32, u32(1))]), "UTF-8"
        yield f"tensor name {name!r}", build(tensors=[tensor(name, [8], 0, 0)]), "UTF-8"
        yield f"text {name!r}", build([key(b"k", STRING, string(name))]), "'k'"
        yield f"text {name!r} in an array", build([key(b"k", ARRAY, u32(STRING) + u64(1) + string(name))]), "'k'"
    yield "key twice", build([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' occurs twice"
    for kind in (13, 99, 2**32 - 1):
        yield f"value of type {kind}", build([key(b"k", kind, bytes(16))]), f"'k': unknown value type {kind}"
        array = key(b"k", ARRAY, u32(kind) + u64(1) + bytes(16))
        yield f"array of type {kind}", build([array]), f"'k': unknown value type {kind}"
    for count in (0, 1, 2**40):
        nested = key(b"k", ARRAY, u32(ARRAY) + u64(count) + u32(U8) + u64(1) + b"x")
        yield f"{count} nested arrays", build([nested]), "'k': arrays of arrays"
    yield "boolean 2", build([key(b"k", BOOL, b"\x02")]), "got 2"
    yield "boolean 255 in an array", build([key(b"k", ARRAY, u32(BOOL) + u64(2) + b"\x01\xff")]), "got 255"

    for alignment in (0, 1, 3, 4, 24, 33, 2**32 - 1):
        yield f"alignment {alignment}", build([key(b"general.alignment", U32, u32(alignment))]), f"got {alignment}"
    yield "alignment -32", build([key(b"general.alignment", I32, struct.pack("<i", -32))]), "got -32"
    yield "alignment 32.0", build([key(b"general.alignment", F32, struct.pack("<f", 32))]), "got 32.0"
    yield "alignment text", build([key(b"general.alignment", STRING, string(b"32"))]), "got a string"
    yield "alignment array", build([key(b"general.alignment", ARRAY, u32(U32) + u64(1) + u32(32))]), "array"
    yield "alignment true", build([key(b"general.alignment", BOOL, b"\x01")]), "got True"

    for dims in ([], [1, 1, 1, 1, 1]):
        yield f"{len(dims)} dimensions", build(tensors=[tensor(b"w", dims, 0, 0)]), f"got {len(dims)}"
    yield "2^32 - 1 dimensions", build(tensors=[string(b"w") + u32(2**32 - 1) + bytes(40)]), "'w'"
    for dims in ([0], [0, 8], [8, 0], [2**63, 0, 8]):
        yield f"dimensions {dims}", build(tensors=[tensor(b"w", dims, 0, 0)]), "'w': a dimension is zero"
    for dims in ([2**32, 2**32], [2**16] * 4, [2**63, 2], [2**62, 4], [8, 2**61], [2**64 - 32, 3]):
        yield f"product of {dims}", build(tensors=[tensor(b"w", dims, 0, 0)]), "'w'"
    for kind, columns in ((GGUFType.Q4_0, 33), (GGUFType.Q4_1, 31), (GGUFType.Q8_0, 1), (GGUFType.Q4_K, 32)):
        yield f"{kind.name} row of {columns}", build(tensors=[tensor(b"w", [columns], kind, 0)]), "'w'"
    for kind in (4, 5, 31, 36, 38, 43, 255, 2**31, 2**32 - 1):
        yield f"tensor type {kind}", build(tensors=[tensor(b"w", [8], kind, 0)]), f"'w': unknown tensor type {kind}"
    for offset in (1, 4, 31, 33):
        yield f"offset {offset}", build(tensors=[tensor(b"w", [8], 0, offset)]), f"got {offset}"
    yield "one value too many", build(tensors=[tensor(b"w", [65], 0, 0)]), "'w'"
    yield "starts at the end", build(tensors=[tensor(b"w", [1], 0, 256)]), "'w'"
    two = [tensor(b"a", [16], 0, 0), tensor(b"b", [8], 0, 32)]
    yield "overlap", build(tensors=two), "'a' and 'b' overlap"
    yield "overlap, other order", build(tensors=two[::-1]), "'a' and 'b' overlap"
    yield "same place", build(tensors=[tensor(b"a", [8], 0, 0), tensor(b"b", [8], 0, 0)]), "overlap"
    yield "tensor twice", build(tensors=[tensor(b"w", [8], 0, 0), tensor(b"w", [8], 0, 32)]), "'w' occurs twice"
    yield "line feed in a name", build(tensors=[tensor(b"a\nb" * 999, [0], 0, 0)]), r"a\nb"


CORRUPTED = list(corrupted())


def test_there_are_enough_corrupted_files() -> None:
    assert len({content for _, content, _ in CORRUPTED}) >= 100


def assert_refused(path: Path, part: str = "") -> None:
    """One line of error, without allocating more than the file's size."""
    with pytest.raises(GGUFFormatError) as error:
        GGUFFile(path)
    size = path.stat().st_size
    message = str(error.value)
    assert part in message
    assert "\n" not in message
    assert len(message) < 1000
    assert size == 0 or f"file size {size}" in message
    del error
    tracemalloc.start()
    try:
        with pytest.raises(GGUFFormatError):
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= size + FIXED_BYTES


@pytest.mark.parametrize(("content", "part"), [c[1:] for c in CORRUPTED], ids=[c[0] for c in CORRUPTED])
def test_corrupted_file_is_refused(content: bytes, part: str, tmp_path: Path) -> None:
    assert_refused(save(tmp_path / "corrupted.gguf", content), part)


@pytest.mark.parametrize("share", [0.0001, 0.004, 0.01, 0.0168, 0.02])
def test_real_file_cut_short_is_refused(share: float, model_path: Path, tmp_path: Path) -> None:
    """Cut in the vocabulary (up to 1.7 % of the file), or in the tensors' data."""
    size = int(model_path.stat().st_size * share)
    with open(model_path, "rb") as file:
        path = save(tmp_path / "cut.gguf", file.read(size))
    assert_refused(path)


edits = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 4000), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), st.integers(0, 4000), st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("delete"), st.integers(0, 4000), st.integers(1, 40).map(bytes)),
    st.tuples(st.just("truncate"), st.integers(0, 4000), st.just(b"")),
)


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(edits, min_size=1, max_size=4))
def test_fuzzed_file_opens_or_is_refused(
    changes: list[tuple[str, int, bytes]], tmp_path_factory: pytest.TempPathFactory, sound_file: Path
) -> None:
    content = bytearray(sound_file.read_bytes())
    for what, position, piece in changes:
        if what == "set":
            content[position : position + len(piece)] = piece
        elif what == "insert":
            content[position:position] = piece
        elif what == "delete":
            del content[position : position + len(piece)]
        else:
            del content[position:]
    path = save(tmp_path_factory.getbasetemp() / "fuzzed.gguf", bytes(content))
    try:
        file = GGUFFile(path)
    except GGUFFormatError:
        return
    for stored in file.tensors.values():
        with contextlib.suppress(UnsupportedModelError):
            unpack(stored)


@pytest.mark.parametrize("name", ["missing.gguf", "."])
def test_unreadable_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="cannot open"):
        GGUFFile(tmp_path / name)


def open_with(value: bytes, tmp_path: Path) -> GGUFFile:
    return GGUFFile(save(tmp_path / "file.gguf", build([value])))


HEADS = b"llama.attention.head_count"


@pytest.mark.parametrize(
    ("kind", "payload", "part"),
    [
        (STRING, string(b"abc"), "expected int, got 'abc'"),
        (I32, struct.pack("<i", -1), "expected 1 to 4096, got -1"),
        (U32, u32(0), "expected 1 to 4096, got 0"),
        (U32, u32(2**31), "expected 1 to 4096, got 2147483648"),
        (BOOL, b"\x01", "expected int, got True"),
        (F32, struct.pack("<f", 9.0), "expected int, got 9.0"),
        (ARRAY, u32(U32) + u64(3) + u32(9) * 3, "expected int, got an array of 3 values"),
    ],
)
def test_get_refuses_a_bad_number(kind: int, payload: bytes, part: str, tmp_path: Path) -> None:
    file = open_with(key(HEADS, kind, payload), tmp_path)
    with pytest.raises(GGUFFormatError) as error:
        file.get(HEADS.decode(), int, minimum=1, maximum=4096)
    assert part in str(error.value)
    assert HEADS.decode() in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_get_refuses_a_float_that_is_not_finite(value: float, tmp_path: Path) -> None:
    file = open_with(key(b"eps", F32, struct.pack("<f", value)), tmp_path)
    with pytest.raises(GGUFFormatError, match="'eps'"):
        file.get("eps", float)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("llama.block_count", int, 2),
        ("llama.block_count", float, 2.0),
        ("f32", float, 0.5),
        ("yes", bool, True),
        ("tokens", list, ["a", "", "Ġb", "日本"]),
    ],
)
def test_get(name: str, kind: type[Any], expected: Any, sound_file: Path) -> None:
    value = GGUFFile(sound_file).get(name, kind)
    assert value == expected
    assert type(value) is kind


def test_get_of_a_missing_key(sound_file: Path) -> None:
    file = GGUFFile(sound_file)
    assert file.get("no.such", int, 7, minimum=8) == 7
    assert file.get("no.such", str, None) is None
    with pytest.raises(GGUFFormatError, match=r"'no\.such' is missing"):
        file.get("no.such", int)


def test_released_pages_leave_memory_and_can_be_read_again(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"  # which nothing else in this process has mapped
    shutil.copyfile(model_path, path)

    def resident() -> int:
        pages = Path("/proc/self/smaps").read_text().split(str(path.resolve()))[1:]
        return sum(int(mapping.split("Rss:")[1].split()[0]) for mapping in pages)

    file = GGUFFile(path)
    data = file.tensors["token_embd.weight"].data
    total = int(data.sum(dtype=np.int64))
    assert resident() > data.nbytes / 1024 / 2
    file.release()
    assert resident() < 1024
    assert int(data.sum(dtype=np.int64)) == total
