"""A link that serialises every message to bytes and parses it back, as a network would, with checksums, without pickle.

    magic "SFMS" | version, uint16 | length of the header, uint32 | CRC-32 of the header, uint32 | header | payload

The three numbers are little-endian; the header is JSON in UTF-8. It contains sender, receiver, kind, edge, stamp and
byte order, and for every tensor its name, type, shape, strides, number of bytes and CRC-32. The payload is the tensors'
numbers in memory order, one tensor after another; its length is the counted size of the message. Messages that a
defense packs are the exception: this link sends the unpacked tensors, and the header gives the packed size.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
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
_FIELDS = {"sender": str, "receiver": str, "kind": str, "edge": str, "stamp": list, "tensors": list}
_LARGEST = 2**36
"""Largest size of a tensor in bytes, gaps included; a larger one in a header is refused."""
_SPREAD = 4096
"""Largest ratio of memory to numbers of a layout, which the receiver allocates with gaps; larger ones are refused."""


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
            {
                "name": name,
                "dtype": dtype,
                "shape": list(tensor.shape),
                "strides": list(tensor.stride()),
                "bytes": len(raw),
                "crc32": zlib.crc32(raw),
                "layout": None if layout is None else [list(layout.strides), layout.lead],
            }
        )
        payload.append(raw)
    header = json.dumps(
        {
            **{name: getattr(message, name) for name in ("sender", "receiver", "kind", "edge", "packed")},
            "stamp": list(message.stamp),
            "dataless": sorted(message.dataless),
            "order": sys.byteorder,
            "tensors": entries,
        }
    ).encode()
    return b"".join([_FIXED.pack(MAGIC, VERSION, len(header), zlib.crc32(header)), header, *payload])


def from_bytes(data: bytes) -> Message:
    """Return the message that `to_bytes` wrote; raise `InvalidInput`, in one line, for anything else.

    The header is checked against the length of `data` before any tensor is read, and nothing is unpickled.
    """
    header, start = _parse_header(data)
    tensors, layouts = {}, {}
    for entry in header["tensors"]:
        name, dtype, shape, strides, nbytes, layout = _parse_tensor_entry(entry)
        if name in tensors:
            raise InvalidInput(f"message: tensor {name!r} appears twice; expected every name once")
        if start + nbytes > len(data):
            raise InvalidInput(f"message: {name!r} ends after {len(data) - start} of {nbytes} bytes; it was cut off")
        raw = data[start : start + nbytes]
        if zlib.crc32(raw) != entry["crc32"]:
            raise InvalidInput(f"message: the bytes of {name!r} do not match their checksum; they were changed")
        # Cloned for torch's memory alignment, on which the rounding of kernels depends.
        flat = torch.frombuffer(bytearray(raw), dtype=dtype).clone() if nbytes else torch.empty(0, dtype=dtype)
        tensors[name] = _restore_strides(flat, shape, strides)
        if layout is not None:
            layouts[name] = layout
        start += nbytes
    if start != len(data):
        raise InvalidInput(f"message: {len(data) - start} bytes follow the last tensor; expected none")
    return Message(
        header["sender"],
        header["receiver"],
        header["kind"],
        header["edge"],
        tensors,
        Stamp(*header["stamp"]),
        header["packed"],
        layouts or None,
        header["dataless"],
    )


def _parse_header(data: bytes) -> tuple[dict[str, Any], int]:
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
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput("message: the header is not JSON") from None
    if not isinstance(header, dict):
        raise InvalidInput("message: the header is not a JSON object")
    for name, kind in _FIELDS.items():
        if not isinstance(header.get(name), kind):
            raise InvalidInput(f"message: {name}={header.get(name)!r} is not allowed; expected a {kind.__name__}")
    if header.get("order") != sys.byteorder:
        raise InvalidInput(
            f"message: byte order {header.get('order')!r} is not that of this machine, {sys.byteorder!r}"
        )
    packed, stamp = header.get("packed"), header["stamp"]
    if packed is not None and not _is_count(packed):
        raise InvalidInput(f"message: packed={packed!r} is not allowed; expected a number of bytes, or nothing")
    if [type(item) for item in stamp] != [str, int, int, int, str]:
        raise InvalidInput(f"message: stamp={stamp!r} is not allowed; expected phase, replica, epoch, step and part")
    dataless = header.get("dataless", [])
    if not isinstance(dataless, list) or not all(isinstance(name, str) for name in dataless):
        raise InvalidInput(f"message: dataless={dataless!r} is not allowed; expected names of tensors")
    return {**header, "packed": packed, "dataless": frozenset(dataless)}, _FIXED.size + length


def _parse_tensor_entry(entry: object) -> tuple[str, torch.dtype, list[int], list[int], int, Layout | None]:
    """Return the header's fields of one tensor; raise `InvalidInput` for impossible ones."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise InvalidInput(f"message: a tensor without a name is not allowed; the header has {str(entry)[:60]!r}")
    name, fields = entry["name"], cast("Mapping[str, Any]", entry)
    dtype = _DTYPES.get(fields["dtype"]) if isinstance(fields.get("dtype"), str) else None
    if dtype is None:
        raise InvalidInput(
            f"message: dtype={fields.get('dtype')!r} of {name!r} is not allowed; expected float32 or such"
        )
    shape, strides, nbytes = fields.get("shape"), fields.get("strides"), fields.get("bytes")
    if not (_are_counts(shape) and _are_counts(strides) and len(shape) == len(strides) <= 64):
        raise InvalidInput(f"message: {name!r} of shape {shape!r} with strides {strides!r} is not allowed")
    expected_bytes = math.prod(shape) * dtype.itemsize
    if not _is_count(nbytes) or nbytes != expected_bytes or nbytes > _LARGEST:
        raise InvalidInput(
            f"message: {name!r} has {nbytes!r} bytes; {dtype} of shape {tuple(shape)} takes {expected_bytes}"
        )
    if not _is_count(fields.get("crc32")):
        raise InvalidInput(f"message: crc32={fields.get('crc32')!r} of {name!r} is not allowed; expected a number")
    layout = fields.get("layout")
    if layout is None:
        return name, dtype, shape, strides, nbytes, None
    if not (isinstance(layout, list) and len(layout) == 2 and _are_counts(layout[0]) and _is_count(layout[1])):
        raise InvalidInput(f"message: layout={layout!r} of {name!r} is not allowed; expected strides and a lead")
    parsed_layout = Layout(tuple(layout[0]), layout[1])
    fits = len(parsed_layout.strides) == len(shape) and parsed_layout.lead < 64 and nbytes > 0
    if not fits or _too_wide(shape, parsed_layout) or parsed_layout.reach(shape) * dtype.itemsize > _LARGEST:
        raise InvalidInput(f"message: layout={layout!r} does not fit {name!r} of shape {tuple(shape)}")
    return name, dtype, shape, strides, nbytes, parsed_layout


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


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**48


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(_is_count(item) for item in value)
