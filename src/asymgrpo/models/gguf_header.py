"""The scalar values in the header of a GGUF file (versions 2 and 3, little-endian).

The gguf package parses every array of the header into objects, which takes seconds for a
vocabulary; here arrays are skipped.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from asymgrpo.errors import UserError

Value = int | float | bool | str

_FORMATS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d")
"""Indexed by the file's type number; 8 is a string, 9 an array."""
_STRING, _LIST = 8, 9


def read_gguf_values(file: Path) -> dict[str, Value]:
    """The header's keys and values, without arrays."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise UserError(f"{file} is no GGUF file")
            version, _tensors, count = struct.unpack("<IQQ", stream.read(20))
            if version not in (2, 3):
                raise UserError(f"{file} has GGUF version {version}; convert it to version 3")
            values = {}
            for _ in range(count):
                key = _read_string(stream)
                value = _read_value(stream, int(_read_number(stream, "<I")))
                if value is not None:
                    values[key] = value
            return values
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is damaged: its header cannot be read") from error


def _read_value(stream: BinaryIO, kind: int) -> Value | None:
    if kind == _STRING:
        return _read_string(stream)
    if kind == _LIST:
        _skip_list(stream)
        return None
    return _read_number(stream, _FORMATS[kind])


def _skip_list(stream: BinaryIO) -> None:
    kind, count = struct.unpack("<IQ", stream.read(12))
    if kind == _STRING:
        for _ in range(count):
            stream.seek(int(_read_number(stream, "<Q")), 1)
    elif kind == _LIST:
        for _ in range(count):
            _skip_list(stream)
    else:
        stream.seek(count * struct.calcsize(str(_FORMATS[kind])), 1)


def _read_number(stream: BinaryIO, layout: str | None) -> int | float | bool:
    number: int | float | bool = struct.unpack(
        str(layout), stream.read(struct.calcsize(str(layout)))
    )[0]
    return number


def _read_string(stream: BinaryIO) -> str:
    return stream.read(int(_read_number(stream, "<Q"))).decode()
