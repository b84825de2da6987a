"""A link that serialises every message to bytes and parses it back, as a network would, with checksums, without pickle.

    magic "SFMS" | version, uint16 | length of the header, uint32 | CRC-32 of the header, uint32 | header | payload

The three numbers are little-endian; the header is JSON in UTF-8. It contains sender, receiver, kind, edge, stamp and
byte order, and for every tensor its name, type, shape, strides, number of bytes and CRC-32. The payload is the tensors'
numbers in memory order, one tensor after another; its length is the counted size of the message. Messages that a
defense packs are the exception: this link sends the unpacked tensors, and the header gives the packed size.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import LocalLink, Message, Stamp
from splitfed.core.payload import Layout, extent

MAGIC, VERSION = b"SFMS", 1
_FIXED = struct.Struct("<4sHII")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_LARGEST = 2**36
"""Largest size of a tensor in bytes, gaps included; a larger one in a header is refused."""
_SPREAD = 4096
"""Largest ratio of memory to numbers of a layout, which the receiver allocates with gaps; larger ones are refused."""

Count = Annotated[int, Field(ge=0, lt=2**48)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Entry(_Fields):
    """A tensor in a header: its own `bytes` follow the header; `layout`: strides and lead at the sender, if kept."""

    name: str
    dtype: Literal[tuple(_DTYPES)]  # type: ignore[valid-type]
    shape: Annotated[list[Count], Field(max_length=64)]
    strides: list[Count]
    bytes: Annotated[int, Field(ge=0, le=_LARGEST)]
    crc32: Count
    layout: tuple[list[Count], Annotated[int, Field(ge=0, lt=64)]] | None


class _Header(_Fields):
    """The header of a message; `order`: byte order of the machine that wrote it."""

    sender: str
    receiver: str
    kind: str
    edge: str
    stamp: tuple[str, int, int, int, str]
    tensors: list[_Entry]
    packed: Count | None
    dataless: list[str]
    order: Literal[sys.byteorder]  # type: ignore[valid-type]


class ByteLink(LocalLink):
    """Link that sends every message as bytes; `headers` counts the bytes of headers, which are not traffic."""

    headers = 0

    def carry(self, message: Message) -> Message:
        """Return the received message, parsed from bytes, with tensors on their original devices."""
        sent = to_bytes(message)
        self.headers += len(sent) - sum(t.nbytes for t in message.tensors.values())
        arrived = from_bytes(sent)
        tensors = {name: t.to(message.tensors[name].device) for name, t in arrived.tensors.items()}
        return arrived._replace(tensors=tensors)


def to_bytes(message: Message) -> bytes:
    """Return `message` as bytes: a header, and the numbers of its tensors; `from_bytes` parses them.

    Raises `InvalidInput` for a tensor of an unsupported type, and for one with large gaps in memory.
    """
    message = message.in_own_memory()
    entries, payload = [], []
    for name, tensor in message.tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise InvalidInput(f"{name!r} on {message.edge!r} is of type {dtype}; expected one of {', '.join(_DTYPES)}")
        raw = _raw(tensor)
        layout = None if message.layouts is None else message.layouts.get(name)
        if layout is not None and _too_wide(tensor.shape, layout):
            raise InvalidInput(
                f"{name!r} on {message.edge!r} occupies over {_SPREAD} times the memory of its numbers, which this "
                "link does not send; call .contiguous() first"
            )
        entries.append(
            _Entry(
                name=name,
                dtype=dtype,
                shape=list(tensor.shape),
                strides=list(tensor.stride()),
                bytes=len(raw),
                crc32=zlib.crc32(raw),
                layout=None if layout is None else (list(layout.strides), layout.lead),
            )
        )
        payload.append(raw)
    header = _Header(
        sender=message.sender,
        receiver=message.receiver,
        kind=message.kind,
        edge=message.edge,
        stamp=message.stamp,
        tensors=entries,
        packed=message.packed,
        dataless=sorted(message.dataless),
        order=sys.byteorder,
    )
    text = header.model_dump_json().encode()
    return b"".join([_FIXED.pack(MAGIC, VERSION, len(text), zlib.crc32(text)), text, *payload])


def from_bytes(data: bytes) -> Message:
    """Return the message that `to_bytes` wrote; raise `InvalidInput`, in one line, for anything else.

    The header is checked against the length of `data` before any tensor is read, and nothing is unpickled.
    """
    header, start = _parse_header(data)
    tensors, layouts = {}, {}
    for entry in header.tensors:
        name, raw = entry.name, data[start : start + entry.bytes]
        if name in tensors:
            raise InvalidInput(f"message: tensor {name!r} appears twice; expected every name once")
        layout = _check_entry(entry)
        if len(raw) < entry.bytes:
            raise InvalidInput(f"message: {name!r} ends after {len(raw)} of {entry.bytes} bytes; it was cut off")
        if zlib.crc32(raw) != entry.crc32:
            raise InvalidInput(f"message: the bytes of {name!r} do not match their checksum; they were changed")
        dtype = _DTYPES[entry.dtype]
        # Cloned for torch's memory alignment, on which the rounding of kernels depends.
        flat = torch.frombuffer(bytearray(raw), dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
        tensors[name] = _restore_strides(flat, entry.shape, entry.strides)
        if layout is not None:
            layouts[name] = layout
        start += entry.bytes
    if start != len(data):
        raise InvalidInput(f"message: {len(data) - start} bytes follow the last tensor; expected none")
    return Message(
        header.sender,
        header.receiver,
        header.kind,
        header.edge,
        tensors,
        Stamp(*header.stamp),
        header.packed,
        layouts or None,
        frozenset(header.dataless),
    )


def _parse_header(data: bytes) -> tuple[_Header, int]:
    """Return the header and the position of the payload."""
    if len(data) < _FIXED.size:
        raise InvalidInput(f"message: {len(data)} bytes are too short; expected at least {_FIXED.size}")
    magic, version, length, checksum = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise InvalidInput(f"message: it begins with {magic!r}; expected {MAGIC!r}")
    if version != VERSION:
        raise InvalidInput(f"message: version {version} is not known; expected {VERSION}")
    text = data[_FIXED.size : _FIXED.size + length]
    if len(text) < length:
        raise InvalidInput(f"message: the header ends after {len(text)} of {length} bytes; it was cut off")
    if zlib.crc32(text) != checksum:
        raise InvalidInput("message: the header does not match its checksum; it was changed")
    try:
        return _Header.model_validate_json(text), _FIXED.size + length
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(map(str, wrong["loc"]))
        told = f"{where}={str(wrong['input'])[:60]!r} is not allowed" if where else "it cannot be read"
        raise InvalidInput(f"message: in the header, {told}: {wrong['msg']}") from None


def _check_entry(entry: _Entry) -> Layout | None:
    """Return the layout of a tensor in memory, if it has one; raise `InvalidInput` for fields that do not agree."""
    name, shape, dtype = entry.name, entry.shape, _DTYPES[entry.dtype]
    if len(entry.strides) != len(shape):
        raise InvalidInput(f"message: {name!r} of shape {shape} with strides {entry.strides} is not allowed")
    if entry.bytes != (expected := math.prod(shape) * dtype.itemsize):
        raise InvalidInput(
            f"message: {name!r} has {entry.bytes} bytes; {dtype} of shape {tuple(shape)} takes {expected}"
        )
    if entry.layout is None:
        return None
    layout = Layout(tuple(entry.layout[0]), entry.layout[1])
    fits = len(layout.strides) == len(shape) and entry.bytes > 0
    if not fits or _too_wide(shape, layout) or layout.reach(shape) * dtype.itemsize > _LARGEST:
        raise InvalidInput(f"message: layout={list(entry.layout)} does not fit {name!r} of shape {tuple(shape)}")
    return layout


def _too_wide(shape: Sequence[int], layout: Layout) -> bool:
    """Return whether the numbers of `shape` are too far apart in memory; a tensor without numbers has no layout."""
    return layout.reach(shape) - layout.lead > _SPREAD * math.prod(shape)


def _restore_strides(flat: Tensor, shape: list[int], strides: list[int]) -> Tensor:
    """Return `flat`, (numbers,), as a tensor with `strides` without gaps; raise `InvalidInput` for other strides."""
    if flat.numel() and extent(shape, strides) != flat.numel():
        raise InvalidInput(f"message: strides {strides} leave gaps in shape {tuple(shape)}, or overlap")
    return flat.as_strided(shape, strides).detach()


def _raw(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor that fills its storage, in memory order."""
    flat = tensor.resolve_conj().resolve_neg().as_strided((tensor.numel(),), (1,)).cpu()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
