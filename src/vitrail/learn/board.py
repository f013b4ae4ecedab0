"""Metrics for TensorBoard: its event files, written without it.

A file is a row of records, each a length and bytes with a checksum after both; the bytes are a protocol
buffer, of which scalars need four kinds of field. Importing TensorBoard's own writer takes longer than many
a short run's first epoch, and brings ten packages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = "events.out.tfevents.vitrail"  # TensorBoard looks for the middle part
POLYNOMIAL = 0x82F63B78  # CRC-32C
ABOUT = ("step", "epoch", "part", "time")  # what a line of metrics says besides figures


def write_board(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Adds the figures of lines of metrics to the folder's event file, as part/figure at a step."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("ab") as file:
        if not file.tell():
            file.write(_record(_double(1, 0.0) + _bytes(3, b"brain.Event:2")))
        for line in lines:
            values = b"".join(
                _bytes(1, _bytes(1, f"{line['part']}/{name}".encode()) + _float(2, value))
                for name, value in line.items()
                if name not in ABOUT
            )
            file.write(_record(_double(1, line["time"]) + _integer(2, line["step"]) + _bytes(5, values)))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


TABLE = _table()


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted as the format asks, so that a checksum of checksums is sound."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# Fields of a protocol buffer: number and kind, then the value.


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
