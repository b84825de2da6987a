"""The link of bytes: a message is read back to the same bits, or refused in a line; every run can go over it."""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import splitfed as sf
from splitfed.core.messages import Message, Recorder, Stamp
from splitfed.core.random import stream
from splitfed.core.tasks import classification
from splitfed.data.dataset import Federation
from splitfed.engines import wire_format
from splitfed.engines.wire_format import ByteLink, from_bytes, to_bytes
from splitfed.registry import TABLES, load
from splitfed.schedules import SplitFedV1
from splitfed.secure_sum.masked_sum import SecureSum
from splitfed.training.entry_point import LINKS
from tests.core.replayed_nets import REPLAYED, replayed_topology
from tests.core.test_isolation import assert_own
from tests.defenses.test_every_defense import BACKWARDS, DEFENSES
from tests.examples import assert_same
from tests.test_every_combination import REFUSED, TOPOLOGIES
from tests.thinning import thin

STAMP = Stamp("train", 2, 3, 4)
TENSORS: dict[str, Tensor] = {
    **{f"zeros and ones of {name}": torch.eye(3).to(dtype) for name, dtype in wire_format._DTYPES.items()},
    "no rows": torch.empty(0, 4),
    "a number": torch.tensor(0.1, dtype=torch.float64),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "extremes": torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45]),
    "a view": torch.randn(8, 7, 5)[:, 1],
    "expanded": torch.randn(4, 1, 5).expand(-1, 7, -1),
    "windows": torch.randn(4, 9).unfold(1, 3, 1),
}


def message(tensors: Mapping[str, Tensor], **changes: Any) -> Message:
    return Message("client0", "server", "activation", "bottom->top", tensors, STAMP)._replace(**changes)


@pytest.mark.parametrize("name", TENSORS)
def test_a_message_is_read_back_to_the_same_bits(name: str) -> None:
    given = message({"é/z": TENSORS[name], "other": torch.arange(3)}, packed=7)
    found = from_bytes(to_bytes(given))
    assert_same({n: _bits(t) for n, t in found.tensors.items()}, {n: _bits(t) for n, t in given.tensors.items()})
    assert found._replace(tensors={}, layouts=None) == given._replace(tensors={})
    owned = given.in_own_memory()
    assert found.layouts == owned.layouts
    assert [t.stride() for t in found.tensors.values()] == [t.stride() for t in owned.tensors.values()]
    assert_own(found)


def _bits(tensor: Tensor) -> Tensor:
    return (
        torch.view_as_real(tensor).contiguous() if tensor.is_complex() else tensor.contiguous().view(-1).nan_to_num(7)
    )


def test_the_payload_is_as_long_as_the_message_is_counted() -> None:
    given = message({"z": torch.randn(5, 3), "y": torch.arange(4), "b": torch.ones(9, dtype=torch.bool)})
    sent = to_bytes(given)
    (length,) = struct.unpack_from("<I", sent, 6)
    assert sent[:4] == b"SFMS"
    assert len(sent) == 14 + length + given.nbytes
    assert given.nbytes == 4 * 15 + 8 * 4 + 9
    numbers = b"".join(t.numpy().tobytes() for t in given.tensors.values())
    assert sent[14 + length :] == numbers


def test_a_type_that_no_header_names_is_refused() -> None:
    with pytest.raises(
        sf.InvalidInput, match="'z' on 'bottom->top' is of type float8_e4m3fn; expected one of float64, "
    ):
        to_bytes(message({"z": torch.ones(2).to(torch.float8_e4m3fn)}))


def _rewritten(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a message of a tensor "z" (2, 3) with its header changed, and the header's checksum with it."""
    sent = to_bytes(message({"z": torch.arange(6.0).view(2, 3)}))
    (length,) = struct.unpack_from("<I", sent, 6)
    header = json.loads(sent[14 : 14 + length])
    found = change(header)
    text = json.dumps(header if found is None else found).encode()
    return sent[:6] + struct.pack("<II", len(text), zlib.crc32(text)) + text + sent[14 + length :]


def _entry(**changes: Any) -> bytes:
    return _rewritten(lambda header: header["tensors"][0].update(changes))


WHOLE = to_bytes(message({"z": torch.arange(6.0).view(2, 3)}))
FLIPPED = WHOLE[:-1] + bytes([WHOLE[-1] ^ 1])
DEEP = b"[" * 100_000
OTHER = {"little": "big", "big": "little"}[sys.byteorder]
BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "message: 0 bytes are too short; expected at least 14"),
    "another file": (b"\x80\x04" + WHOLE, r"message: it begins with b'\x80\x04SF'; expected b'SFMS'"),
    "a later version": (WHOLE[:4] + b"\x02\x00" + WHOLE[6:], "message: version 2 is not known; expected 1"),
    "half a header": (WHOLE[:40], "message: the header ends after 26 of "),
    "a changed header": (WHOLE.replace(b'"z"', b'"a"'), "message: the header does not match its checksum; it was "),
    "a changed number": (FLIPPED, "message: the bytes of 'z' do not match their checksum; they were changed"),
    "half a payload": (WHOLE[:-5], "message: 'z' ends after 19 of 24 bytes; it was cut off"),
    "more than a payload": (WHOLE + b"12", "message: 2 bytes follow the last tensor; expected none"),
    "brackets": (
        WHOLE[:6] + struct.pack("<II", len(DEEP), zlib.crc32(DEEP)) + DEEP,
        "message: in the header, it cannot be read: Invalid JSON: recursion limit",
    ),
    "a list": (_rewritten(lambda header: [1]), "message: in the header, it cannot be read: Input should be an object"),
    "no kind": (
        _rewritten(lambda h: h.update(kind=3)),
        "message: in the header, kind='3' is not allowed: Input should be a valid string",
    ),
    "packed": (
        _rewritten(lambda h: h.update(packed=-1)),
        "message: in the header, packed='-1' is not allowed: Input should be greater than or equal to 0",
    ),
    "byte order": (
        _rewritten(lambda h: h.update(order=OTHER)),
        f"message: in the header, order={OTHER!r} is not allowed: Input should be {sys.byteorder!r}",
    ),
    "stamp": (
        _rewritten(lambda h: h.update(stamp=["train", 0, 0, 1.5, ""])),
        "message: in the header, stamp.3='1.5' is not allowed: Input should be a valid integer",
    ),
    "no name": (
        _entry(name=None),
        "message: in the header, tensors.0.name='None' is not allowed: Input should be a valid string",
    ),
    "dtype": (
        _entry(dtype="object"),
        "message: in the header, tensors.0.dtype='object' is not allowed: Input should be 'float64', 'float32'",
    ),
    "a list as dtype": (
        _entry(dtype=[]),
        "message: in the header, tensors.0.dtype='[]' is not allowed: Input should be 'float64', 'float32'",
    ),
    "shape": (
        _entry(shape=[2, -3]),
        "message: in the header, tensors.0.shape.1='-3' is not allowed: Input should be greater",
    ),
    "true": (
        _entry(shape=[2, True]),
        "message: in the header, tensors.0.shape.1='True' is not allowed: Input should be a valid integer",
    ),
    "bytes": (_entry(bytes=20), "message: 'z' has 20 bytes; torch.float32 of shape (2, 3) takes 24"),
    "a bomb": (
        _entry(shape=[2**40, 3], bytes=3 * 2**42),
        "message: in the header, tensors.0.bytes='13194139533312' is not allowed: Input should be less than or",
    ),
    "strides with gaps": (_entry(strides=[6, 1]), "message: strides [6, 1] leave gaps in shape (2, 3), or overlap"),
    "strides that overlap": (_entry(strides=[1, 1]), "message: strides [1, 1] leave gaps in shape (2, 3), or overlap"),
    "layout": (
        _entry(layout=[3]),
        "message: in the header, tensors.0.layout.0='3' is not allowed: Input should be a valid array",
    ),
    "another layout": (_entry(layout=[[3], 0]), "message: layout=[[3], 0] does not fit 'z' of shape (2, 3)"),
    "a layout as a bomb": (_entry(layout=[[2**40, 1], 0]), "message: layout=[[1099511627776, 1], 0] does not fit 'z'"),
    "a layout as a smaller bomb": (_entry(layout=[[2**33, 1], 0]), "message: layout=[[8589934592, 1], 0] does not fit"),
    "just too wide": (_entry(layout=[[6 * 4096 - 2, 1], 0]), "message: layout=[[24574, 1], 0] does not fit 'z' of sh"),
    "a layout of nothing": (
        _entry(shape=[0, 4], strides=[4, 1], bytes=0, crc32=0, layout=[[2**33, 1], 0]),
        "message: layout=[[8589934592, 1], 0] does not fit 'z' of shape (0, 4)",
    ),
    "no checksum": (
        _rewritten(lambda h: h["tensors"][0].pop("crc32") and None),
        "message: in the header, tensors.0.crc32=",
    ),
    "a text as checksum": (
        _entry(crc32="1"),
        "message: in the header, tensors.0.crc32='1' is not allowed: Input should be a valid integer",
    ),
    "twice": (
        _rewritten(lambda h: h["tensors"].append(h["tensors"][0])),
        "message: tensor 'z' appears twice; expected ",
    ),
}


def test_numbers_that_lie_far_apart_are_sent_up_to_a_limit() -> None:
    """One feature of a wide table; its receiver lays it out alike, so what a header may ask for is bounded."""
    narrow, wide = torch.zeros(4, 4096)[:, :1], torch.zeros(4, 8192)[:, :1]
    given = message({"z": narrow}).in_own_memory()
    assert from_bytes(to_bytes(given)).layouts == given.layouts
    with pytest.raises(
        sf.InvalidInput, match=r"'z' on 'bottom->top' occupies over 4096 times the memory of its numbers"
    ):
        to_bytes(message({"z": wide}))


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_refused_in_a_line(name: str) -> None:
    data, text = BROKEN[name]
    with pytest.raises(sf.InvalidInput, match="^" + re.escape(text)) as error:
        from_bytes(data)
    assert "\n" not in str(error.value)


def test_no_changed_byte_goes_unnoticed() -> None:
    for place in range(len(WHOLE)):
        for flip in (1, 128):
            with pytest.raises(sf.InvalidInput):
                from_bytes(WHOLE[:place] + bytes([WHOLE[place] ^ flip]) + WHOLE[place + 1 :])
    for length in range(len(WHOLE)):
        with pytest.raises(sf.InvalidInput):
            from_bytes(WHOLE[:length])


class Inspected(ByteLink):
    """Looks at every message before and after it was bytes, and as a recorder keeps it."""

    def carry(self, message: Message) -> Message:
        recorder = Recorder(message.receiver)
        recorder.receive(message._replace(stamp=STAMP._replace(step=0)))
        arrived = super().carry(message)
        for one in (message, arrived, *recorder.messages()):
            assert_own(one)
        here, there, kept = (
            {t.untyped_storage().data_ptr() for t in one.tensors.values() if t.numel()}
            for one in (message, arrived, *recorder.messages())
        )
        assert not (here | there) & kept
        assert not here & there
        unpacked = sum(t.nbytes for t in message.tensors.values())
        assert message.nbytes == (unpacked if message.packed is None else message.packed)
        return arrived


@cache
def digits(clients: int) -> Federation:
    data = sf.data.digits().rows(range(24 * clients + 16))
    parts = data.halves().with_target("parity", data.y % 2, classification(2))
    return parts.clients(clients, auxiliary=6, victims=2, validation=0.0, test=0.2, public=0.3)


def both(monkeypatch: pytest.MonkeyPatch, make: Callable[[], sf.Topology], clients: int = 2, **settings: Any) -> sf.Run:
    """Train by memory and by bytes, compare everything, and return the run by bytes."""
    monkeypatch.setitem(LINKS, "bytes", Inspected)  # type: ignore[arg-type]
    runs = {}
    for link in ("memory", "bytes"):
        with stream(7):
            topology = make()
        runs[link] = sf.train(
            topology, digits(clients), logging=sf.Logging(link=link), rounds=1, batch_size=8, **settings
        )
    assert_same(runs["bytes"].state(), runs["memory"].state())
    assert runs["bytes"].engine.traffic.flows == runs["memory"].engine.traffic.flows
    told = [{k: v for k, v in run.history[-1].items() if k != "seconds"} for run in runs.values()]
    assert told[0] == told[1]
    x = digits(clients).victims.x
    assert torch.equal(runs["bytes"].predict(x), runs["memory"].predict(x))
    return runs["bytes"]


PAIRS = [(name, schedule) for name in TOPOLOGIES for schedule in TABLES["schedules"] if (name, schedule) not in REFUSED]


@pytest.mark.parametrize(("name", "schedule"), thin(PAIRS, 9))
def test_every_topology_and_schedule_trains_to_the_same_bits_as_bytes(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = both(monkeypatch, TOPOLOGIES[name], 1 if schedule == "joint" else 2, schedule=load("schedules", schedule)())
    assert isinstance(run.engine.link, ByteLink)
    assert (run.engine.link.headers > 0) is (run.engine.traffic.messages(None) > 0)


@pytest.mark.parametrize("defense", thin([name for name in DEFENSES if name != "marvell"], 5))  # for two classes alone
def test_every_defense_goes_as_bytes(defense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = TOPOLOGIES["u_shaped" if defense in BACKWARDS else "vanilla"]
    assert both(monkeypatch, topology, defenses=(DEFENSES[defense],)).bytes > 0


@pytest.mark.parametrize("method", thin(TABLES["methods"], 5))
def test_every_method_goes_as_bytes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = both(monkeypatch, TOPOLOGIES["local"], 2, method=load("methods", method)(), schedule="independent")
    assert (run.bytes > 0) is (method != "standalone")


def test_a_secure_sum_goes_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = both(monkeypatch, TOPOLOGIES["vanilla"], 3, schedule=SplitFedV1(secure=SecureSum()))
    assert {flow.kind for flow in run.engine.traffic.flows} >= {"shares", "masked", "unmasking"}


def test_an_unknown_link_is_refused() -> None:
    with pytest.raises(sf.InvalidInput, match=r"unknown link 'wire' \(allowed: bytes, memory\)"):
        sf.train(TOPOLOGIES["vanilla"](), digits(2), logging=sf.Logging(link="wire"))


FAST = ("vanilla", "u_shaped", "relayed", "local")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.exhaustive) for name in REPLAYED]
)
def test_replayed_segments_train_to_the_same_bits_as_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = "independent" if name == "local" else "sequential"
    run = both(monkeypatch, lambda: replayed_topology(name), schedule=schedule)
    assert (run.engine.link.headers > 0) is (name != "local")
