"""Reader of GGUF files: it checks the header to the last byte; tensor data stays on disk until it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).

The counts and lengths in a header tell how much data follows, so a malformed file can claim terabytes. The reader
therefore first walks the whole header and compares each claim with the size of the file before it acts on it. Only then
does it turn the strings, which are nearly all of a header (100,000 of them in a small model), into Python objects.
"""

import itertools
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import numpy as np
import torch  # noqa: F401  (before the extension, which needs its symbols)

from fastinfer import _C
from fastinfer.errors import GGUFFormatError, ModelNotFoundError
from fastinfer.formats.gguf_types import GGUFTensor, GGUFType
from fastinfer.utils.regular_file import open_regular

__all__ = ["GGUFFile", "GGUFTensor", "GGUFType"]

T = TypeVar("T")
D = TypeVar("D")

DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
# Smallest sizes of an entry. Metadata: length of an empty name, type, one byte. Tensor: length of an empty name, number
# of dimensions, one dimension, type, offset.
MIN_KEY_VALUE_BYTES = 8 + 4 + 1
MIN_TENSOR_INFO_BYTES = 8 + 4 + 8 + 4 + 8

STRING, ARRAY, BOOL = 8, 9, 7
NUMBER_DTYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

_REQUIRED: Any = object()


@dataclass(frozen=True)
class _Strings:
    """Place of the strings of a metadata value, which are decoded after the whole header has been checked."""

    key: str
    offset: int
    count: int
    is_array: bool


class GGUFFile:
    """An open GGUF file.

    Args:
        path: path of the file.

    Attributes:
        path: path of the file.
        files: paths of all files of the model: this one, and those that :meth:`join` has added.
        metadata: all keys with their values: int, float, bool or str, a list of str, or a numpy array of numbers.
        tensors: all tensors by name, in the file's order. Their data is mapped, not read.

    Raises:
        ModelNotFoundError: the file cannot be opened.
        GGUFFormatError: the file is malformed; the message names the key or tensor, the offset and the size of the
            file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                # Copy-on-write, because torch wraps only writable memory without a copy. Nothing is ever written back
                # to the file.
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else None
        except OSError as error:
            raise ModelNotFoundError(f"cannot open {self.path}: {error.strerror or error}") from None
        if buffer is None:
            raise GGUFFormatError(f"{self.path}: expected a GGUF file, got an empty file")
        self._buffers = {self.path: buffer}
        header = _Header(self.path, buffer)
        self.metadata, self.tensors = header.read()
        self._metadata_end = header.metadata_end

    @property
    def files(self) -> list[Path]:
        return list(self._buffers)

    def join(self, other: "GGUFFile") -> None:
        """Add the tensors of another file of the same model.

        Raises:
            GGUFFormatError: a tensor is in both files.
        """
        for name in other.tensors:
            if name in self.tensors:
                raise GGUFFormatError(f"{other.path}: tensor {_short(name)} is in another file of the model, too")
        self.tensors |= other.tensors
        self._buffers |= other._buffers

    def write_metadata(self, path: Path) -> None:
        """Write a file that has all keys of this one and no tensors."""
        header = self._buffers[self.path]
        # Magic, version, number of tensors, number of keys, keys.
        path.write_bytes(header[:8] + bytes(8) + header[16 : self._metadata_end])

    def check_size(self) -> None:
        """Refuse a file that was cut after it was opened: reading mapped memory behind its end ends the process.

        Raises:
            GGUFFormatError: the file is smaller than when it was opened.
        """
        for path, buffer in self._buffers.items():
            size, mapped = buffer.size(), len(buffer)
            if size < mapped:
                raise GGUFFormatError(f"{path}: the file was cut from {mapped} to {size} bytes while it was read")

    def release(self) -> None:
        """Free the memory of pages that were read; they are read again when a tensor is used again."""
        for buffer in self._buffers.values():
            buffer.madvise(mmap.MADV_DONTNEED)

    @overload
    def get(self, key: str, kind: type[T], *, minimum: float | None = None, maximum: float | None = None) -> T: ...

    @overload
    def get(
        self, key: str, kind: type[T], default: D, *, minimum: float | None = None, maximum: float | None = None
    ) -> T | D: ...

    def get(
        self,
        key: str,
        kind: type[Any],
        default: Any = _REQUIRED,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> Any:
        """Get a metadata value of a known type and range.

        Args:
            key: name of the value.
            kind: int, float (also accepts an int), bool, str, list (of str) or np.ndarray (of numbers).
            default: result if the key is missing; without a default a missing key is an error.
            minimum, maximum: inclusive limits of a number.

        Raises:
            GGUFFormatError: the key is missing, or its value has another type, is not finite or is out of range.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise GGUFFormatError(f"{self.path}: metadata key {key!r} is missing")
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise GGUFFormatError(f"{self.path}: metadata key {key!r}: expected {kind.__name__}, got {_short(value)}")
        too_small = minimum is not None and value < minimum
        too_large = maximum is not None and value > maximum
        if too_small or too_large or (kind is float and not math.isfinite(value)):
            limits = f"{'-inf' if minimum is None else minimum} to {'inf' if maximum is None else maximum}"
            raise GGUFFormatError(f"{self.path}: metadata key {key!r}: expected {limits}, got {value}")
        return value


class _Header:
    """Reader of the header, from front to back."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.bytes = np.frombuffer(buffer, np.uint8)
        self.size = len(buffer)
        self.position = 0
        self.metadata_end = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Read and check the whole header: metadata and tensors."""
        if self._take(4, "magic") != b"GGUF":
            self._fail("expected the magic bytes b'GGUF'", 0)
        version = self._integer(4, "version")
        if version not in (2, 3):
            hint = " (a big-endian file)" if version and version % 65536 == 0 else ""
            self._fail(f"expected GGUF version 2 or 3, got {version}{hint}", 4)
        tensor_count = self._integer(8, "number of tensors")
        key_count = self._integer(8, "number of metadata keys")
        self._need(key_count * MIN_KEY_VALUE_BYTES, f"{key_count} metadata keys")
        self._need(tensor_count * MIN_TENSOR_INFO_BYTES, f"{tensor_count} tensors")

        values = self._metadata(key_count)
        self.metadata_end = self.position
        tensors = self._tensors(tensor_count, self._alignment(values))
        return {key: self._decode(v) if isinstance(v, _Strings) else v for key, v in values.items()}, tensors

    def _metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            start = self.position
            key = self._string(f"metadata key {index}", MAX_KEY_BYTES)
            if key in values:
                self._fail(f"metadata key {_short(key)} occurs twice", start)
            values[key] = self._value(key)
        return values

    def _value(self, key: str) -> Any:
        """Read a number or an array of numbers, or step over strings."""
        start = self.position
        what = f"metadata key {_short(key)}"
        kind = self._integer(4, what)
        is_array = kind == ARRAY
        count = 1
        if is_array:
            kind = self._integer(4, what)
            count = self._integer(8, what)
            if kind == ARRAY:
                self._fail(f"{what}: arrays of arrays are not allowed", start)
        if kind == STRING:
            return self._strings(key, count, is_array)
        dtype = NUMBER_DTYPES.get(kind)
        if dtype is None:
            self._fail(f"{what}: unknown value type {kind}", start)
        begin = self.position
        self._skip(count * dtype.itemsize, f"{what}: {count} values of {dtype.itemsize} bytes")
        numbers = self.bytes[begin : self.position].view(dtype)
        if kind == BOOL:
            if (numbers > 1).any():
                self._fail(f"{what}: expected 0 or 1 for a boolean, got {numbers.max()}", begin)
            numbers = numbers.view(np.bool_)
        return numbers.copy() if is_array else numbers[0].item()

    def _strings(self, key: str, count: int, is_array: bool) -> _Strings:
        """Step over strings, each of which is a length in 8 bytes followed by that many bytes of UTF-8."""
        what = f"metadata key {_short(key)}"
        begin = self.position
        self._need(8 * count, f"{what}: {count} strings")
        skipped, self.position = _C.skip_strings(self.buffer, begin, count)
        if skipped < count:
            self._string(f"{what}: string {skipped} of {count}")
        return _Strings(key, begin, count, is_array)

    def _decode(self, strings: _Strings) -> str | list[str]:
        texts, end = _C.read_strings(self.buffer, strings.offset, strings.count)
        if len(texts) < strings.count:
            self.position = end  # behind the last valid string; reading the next one raises the error
            self._string(f"metadata key {_short(strings.key)}: string {len(texts)} of {strings.count}")
        return texts if strings.is_array else texts[0]

    def _alignment(self, values: dict[str, Any]) -> int:
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        # The format requires at least 8, which also aligns every view of a tensor as 2-byte or 4-byte numbers.
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            got = "a string or an array" if type(alignment) not in (int, float, bool) else alignment
            self._fail(f"metadata key 'general.alignment': expected a power of two, 8 or more, got {got}")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        infos = list(self._tensor_infos(count, alignment))
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        extents = []
        for name, shape, kind, offset in infos:
            if name in tensors:
                self._fail(f"tensor {_short(name)} occurs twice")
            rows, row_bytes = math.prod(shape[:-1]), shape[-1] // kind.block_size * kind.block_bytes
            begin = data_start + offset
            end = begin + rows * row_bytes
            if end > self.size:
                self._fail(f"tensor {_short(name)} of {rows * row_bytes} bytes ends past the end of the file", begin)
            extents.append((begin, end, name))
            tensors[name] = GGUFTensor(name, shape, kind, self.bytes[begin:end].reshape(rows, row_bytes))
        extents.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(extents):
            if begin < end:
                self._fail(f"tensors {_short(name)} and {_short(other)} overlap", begin)
        return tensors

    def _tensor_infos(self, count: int, alignment: int) -> Iterator[tuple[str, tuple[int, ...], GGUFType, int]]:
        for index in range(count):
            start = self.position
            name = self._string(f"name of tensor {index}", MAX_KEY_BYTES)
            what = f"tensor {_short(name)}"
            dims = self._integer(4, what)
            if not 1 <= dims <= MAX_DIMS:
                self._fail(f"{what}: expected 1 to {MAX_DIMS} dimensions, got {dims}", start)
            shape = tuple(self._integer(8, what) for _ in range(dims))[::-1]
            if 0 in shape:
                self._fail(f"{what}: a dimension is zero in {list(shape)}", start)
            type_id = self._integer(4, what)
            try:
                kind = GGUFType(type_id)
            except ValueError:
                self._fail(f"{what}: unknown tensor type {type_id}", start)
            if shape[-1] % kind.block_size:
                expected = f"{kind.name} rows must be a multiple of {kind.block_size} values"
                self._fail(f"{what}: {expected}, got {shape[-1]}", start)
            offset = self._integer(8, what)
            if offset % alignment:
                self._fail(f"{what}: expected a data offset that is a multiple of {alignment}, got {offset}", start)
            yield name, shape, kind, offset

    def _string(self, what: str, limit: float = math.inf) -> str:
        start = self.position
        length = self._integer(8, what)
        if length > limit:
            self._fail(f"{what}: expected at most {limit} bytes, got {length}", start)
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8 ({error.reason})", start)

    def _integer(self, width: int, what: str) -> int:
        return int.from_bytes(self._take(width, what), "little")

    def _take(self, length: int, what: str) -> bytes:
        start = self.position
        self._skip(length, what)
        return self.buffer[start : self.position]

    def _skip(self, length: int, what: str) -> None:
        self._need(length, what)
        self.position += length

    def _need(self, length: int, what: str) -> None:
        if length > self.size - self.position:
            self._fail(f"{what}: needs {length} bytes, {self.size - self.position} are left")

    def _fail(self, problem: str, offset: int | None = None) -> NoReturn:
        at = self.position if offset is None else offset
        raise GGUFFormatError(f"{self.path}: {problem} (offset {at}, file size {self.size})") from None


def _short(value: Any) -> str:
    """Print a value for an error message, in one line of at most 100 characters."""
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)} values"
    return repr(value[:90] if isinstance(value, str) else value)
