"""Alignment without raw keys: the same records as in the clear, what crosses counted, and what is refused."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.data import Alignment, Table, align, keyed_hash, new_secret, private_intersection
from splitfed.data.alignment.keyed_hash import hashes, join
from splitfed.data.alignment.keys import AlignmentMessage

SECRET = bytes(range(32))


def tables(reverse: bool = False) -> dict[str, Table]:
    """People 0 to 7 at the bank, 4 to 9 at the clinic, and the odd ones in the registry, which holds labels."""
    step = -1 if reverse else 1
    people = {"bank": range(8), "clinic": range(4, 10), "registry": range(1, 10, 2)}
    names = {party: [f"person{k}" for k in mine][::step] for party, mine in people.items()}
    numbers = {party: torch.tensor([float(k) for k in mine][::step]) for party, mine in people.items()}
    held = {party: Table(names[party], numbers[party]) for party in ("bank", "clinic")}
    return held | {"registry": Table(names["registry"], y=numbers["registry"])}


def records(found: Alignment) -> dict[Any, list[float]]:
    return dict(zip(found.keys, torch.cat([found.dataset.x, found.dataset.y[:, None]], 1).tolist(), strict=True))


# Persons 5 and 7 are known to all three.
EXPECTED = {"person5": [5.0, 5.0, 5.0], "person7": [7.0, 7.0, 7.0]}


def test_hash_is_hmac_sha256() -> None:
    # The definition: H(key ^ opad, H(key ^ ipad, text)), the key padded with noughts to a block of 64 bytes.
    block = SECRET + bytes(32)
    inner, outer = (bytes(byte ^ pad for byte in block) for pad in (0x36, 0x5C))
    text = "sMüller".encode()
    assert hashes(SECRET, ["Müller"]) == hashlib.sha256(outer + hashlib.sha256(inner + text).digest()).digest()
    assert hashes(SECRET, [12]) != hashes(SECRET, ["12"])


def test_what_a_party_sends_holds_no_key() -> None:
    names = [f"person{k}" for k in range(50)]
    sent = hashes(SECRET, names)
    assert len(sent) == 50 * 32
    assert not any(name.encode() in sent for name in names)
    # Neither a hash that anybody can make, nor one under another secret.
    assert not any(hashlib.sha256(name.encode()).digest() in sent for name in names)
    assert all(hashes(bytes(32), [name]) not in sent for name in names)
    assert all(hashes(SECRET, [name]) in sent for name in names)


def test_the_joiner_works_on_hashes_alone() -> None:
    a, b, c = (bytes([value]) * 32 for value in (1, 2, 3))
    assert join({"x": c + a + b, "y": b + c}) == {"x": [2, 0], "y": [0, 1]}


def test_keyed_hash() -> None:
    found = align(tables(), "registry", intersect=keyed_hash(SECRET))
    assert records(found) == EXPECTED
    # 8, 6 and 5 keys of 32 bytes; two positions of 8 bytes to each.
    assert found.report.crossings == (
        AlignmentMessage("bank", "joiner", "hashes", 256),
        AlignmentMessage("clinic", "joiner", "hashes", 192),
        AlignmentMessage("registry", "joiner", "hashes", 160),
        *(AlignmentMessage("joiner", party, "rows", 16) for party in ("bank", "clinic", "registry")),
    )
    assert (found.report.messages, found.report.bytes) == (6, 656)


def test_keyed_hash_orders_by_hash_whatever_the_tables_order() -> None:
    for secret in (SECRET, bytes(16), new_secret()):
        by_hash = tuple(sorted(EXPECTED, key=lambda name: hashes(secret, [name])))
        for reverse in (False, True):
            found = align(tables(reverse), "registry", intersect=keyed_hash(secret))
            assert found.keys == by_hash
            assert records(found) == EXPECTED


def test_secrets() -> None:
    assert len(new_secret()) == 32
    assert new_secret() != new_secret()
    for secret, given in ((b"short", "5 bytes"), ("x" * 32, "a str"), (bytes(15), "15 bytes")):
        with pytest.raises(InvalidInput) as caught:
            keyed_hash(secret)  # type: ignore[arg-type]
        assert str(caught.value) == f"secret is {given}; expected at least 16 bytes, as of new_secret()"
    with pytest.raises(InvalidInput, match=r"^joiner 'bank' is a party with data; expected one that does not know"):
        align(tables(), "registry", intersect=keyed_hash(SECRET, joiner="bank"))


def test_private_intersection() -> None:
    pytest.importorskip("private_set_intersection.python", reason="openmined.psi is not installed")
    for reverse in (False, True):
        found = align(tables(reverse), "registry", intersect=private_intersection)
        assert found.keys == ("person5", "person7")
        assert records(found) == EXPECTED
        # A key is a point of 33 bytes behind a tag and a length; the registry asks with 5 keys and is answered with
        # 5. The lists end in one flag (2 bytes, request) or stand in an outer field (3 bytes, setup).
        assert found.report.crossings == (
            AlignmentMessage("registry", "bank", "request", 5 * 35 + 2),
            AlignmentMessage("bank", "registry", "setup", 8 * 35 + 3),
            AlignmentMessage("bank", "registry", "response", 5 * 35),
            AlignmentMessage("registry", "clinic", "request", 5 * 35 + 2),
            AlignmentMessage("clinic", "registry", "setup", 6 * 35 + 3),
            AlignmentMessage("clinic", "registry", "response", 5 * 35),
            # Two keys of 4 + 1 + 7 bytes.
            AlignmentMessage("registry", "bank", "common keys", 24),
            AlignmentMessage("registry", "clinic", "common keys", 24),
        )


def test_private_intersection_of_whole_numbers_and_of_nothing() -> None:
    pytest.importorskip("private_set_intersection.python", reason="openmined.psi is not installed")
    held = {"a": Table([10, 9, 8], torch.tensor([0.0, 1.0, 2.0])), "b": Table([9, 10, 11], y=torch.tensor([1, 0, 1]))}
    found = align(held, "b", intersect=private_intersection)
    assert (found.keys, found.dataset.x.tolist(), found.dataset.y.tolist()) == ((9, 10), [[1], [0]], [1, 0])
    strangers = held | {"b": Table([1, 2], y=torch.tensor([1, 0]))}
    with pytest.raises(InvalidInput, match=r"^at most 0 keys are common to 'a' \(with 3\), 'b' \(with 2\);"):
        align(strangers, "b", intersect=private_intersection)


def test_private_intersection_says_what_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "private_set_intersection.python", None)
    monkeypatch.setitem(sys.modules, "private_set_intersection", None)
    with pytest.raises(InvalidInput) as caught:
        align(tables(), "registry", intersect=private_intersection)
    assert str(caught.value) == "private_intersection needs the package openmined.psi: install splitfed[psi]"


@pytest.mark.parametrize("way", [keyed_hash(SECRET), private_intersection], ids=["keyed_hash", "private_intersection"])
def test_agrees_with_alignment_in_the_clear(way: Callable[..., Any]) -> None:
    if way is private_intersection:
        pytest.importorskip("private_set_intersection.python", reason="openmined.psi is not installed")
    clear, private = align(tables(), "registry"), align(tables(), "registry", intersect=way)
    assert records(private) == records(clear)
    assert private.report.parties == clear.report.parties
