"""Splits are disjoint, complete, seeded, and refused in one line when somebody would be left with nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import classification
from splitfed.data import ClientData, Dataset, Federation, breast_cancer, digits, from_arrays, mnist5k


def toy(rows: int = 100, classes: int = 5) -> Dataset:
    """Return rows that say who they are: x is the row's number."""
    x = torch.arange(float(rows))[:, None]
    y = torch.arange(rows) % classes
    return Dataset("toy", x, y, classification(classes), domains=torch.arange(rows) % 4)


def parts(federation: Federation) -> dict[str, Dataset]:
    """Return every part under its name in `sources`."""
    found = {"auxiliary": federation.auxiliary, "victims": federation.victims}
    for client in federation.clients:
        for part in ("train", "validation", "test"):
            found[f"{client.name}/{part}"] = getattr(client, part)
    return found


RULES: list[dict[str, Any]] = [{}, {"dirichlet": 0.5}, {"classes_per_client": 2}, {"by_domain": True}]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_row_is_in_one_part(rule: dict[str, Any]) -> None:
    federation = toy().clients(4, victims=10, **rule)
    assert [client.name for client in federation.clients] == ["client0", "client1", "client2", "client3"]
    found = parts(federation)
    assert found.keys() == federation.sources.keys()
    assert sorted(row for part in found.values() for row in part.x.flatten().tolist()) == list(range(100))
    for name, part in found.items():
        assert part.x.flatten().tolist() == federation.sources[name].tolist()
        assert torch.equal(part.y, federation.sources[name] % 5)


@pytest.mark.parametrize("load", [digits, mnist5k, breast_cancer])
def test_disjoint_on_real_data(load: Any) -> None:
    data = load()
    federation = data.clients(3, dirichlet=0.5, seed=1)
    rows = torch.cat(list(federation.sources.values()))
    assert sorted(rows.tolist()) == list(range(len(data)))
    assert torch.equal(federation.victims.x, data.x[federation.sources["victims"]])


def test_sizes() -> None:
    federation = toy().clients(2, victims=10, auxiliary=0.1, validation=0.1, test=0.25)
    # 100 rows less 10 and 10 are 80, 40 a client: round(4.0) = 4, round(10.0) = 10, and 26 to train on.
    assert (len(federation.victims), len(federation.auxiliary), len(federation)) == (10, 10, 2)
    for client in federation.clients:
        assert (len(client.train), len(client.validation), len(client.test)) == (26, 4, 10)
    assert len(federation.test_union()) == 20
    assert federation.shape == (1,)
    assert repr(federation) == "Federation('toy', 2 clients, 10 auxiliary, 10 victims)"
    assert len(toy().clients(2, auxiliary=7, victims=0).auxiliary) == 7


def test_victims_and_auxiliary_follow_the_classes() -> None:
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    data = Dataset("skewed", torch.zeros(100, 1), y, classification(3))
    federation = data.clients(2, victims=10, auxiliary=20)
    assert federation.victims.y.bincount().tolist() == [6, 3, 1]
    assert federation.auxiliary.y.bincount().tolist() == [12, 6, 2]


def test_test_union_goes_client_by_client() -> None:
    federation = toy().clients(3, victims=10)
    expected = list(chain(*(client.test.x.flatten().tolist() for client in federation.clients)))
    assert federation.test_union().x.flatten().tolist() == expected
    assert len(toy().clients(3, victims=10, test=0.0).test_union()) == 0


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_seed_decides(rule: dict[str, Any]) -> None:
    torch.manual_seed(5)
    first = toy().clients(4, victims=10, seed=3, **rule).sources
    torch.manual_seed(6)
    again = toy().clients(4, victims=10, seed=3, **rule).sources
    other = toy().clients(4, victims=10, seed=4, **rule).sources
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["victims"], other["victims"])
    assert set(first["client0/train"].tolist()) != set(other["client0/train"].tolist())


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    toy().clients(4, victims=10, dirichlet=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_victims_do_not_depend_on_what_the_attacker_knows() -> None:
    few = toy().clients(2, victims=10, auxiliary=0.1).sources["victims"]
    many = toy().clients(2, victims=10, auxiliary=0.5).sources["victims"]
    assert torch.equal(few, many)


def test_rules_are_obeyed() -> None:
    for client in toy().clients(5, victims=10, classes_per_client=2, validation=0.0, test=0.0).clients:
        assert len(client.train.y.unique()) == 2
    for i, client in enumerate(toy().clients(4, victims=10, by_domain=True).clients):
        assert client.train.domains is not None
        assert client.train.domains.unique().tolist() == [i]


def test_no_two_parts_share_memory() -> None:
    data = toy()
    federation = data.clients(4, victims=10)
    tensors = [t for part in (data, *parts(federation).values()) for t in (part.x, part.y, part.domains)]
    places = [t.untyped_storage().data_ptr() for t in tensors if t is not None and t.numel()]
    assert len(set(places)) == len(places)


def test_thousand_clients_cost_one_data_set() -> None:
    data = toy(5000)
    federation = data.clients(1000)
    sizes = [part.x.untyped_storage().nbytes() for part in parts(federation).values()]
    assert sum(sizes) == data.x.untyped_storage().nbytes() == 20_000


BAD: list[tuple[dict[str, Any], str]] = [
    ({"count": 0}, "clients=0 is not allowed; expected a whole number of at least 1"),
    ({"victims": -1}, "victims=-1 is not allowed; expected a whole number of at least 0"),
    ({"auxiliary": 1.0}, "auxiliary=1.0 is not allowed; expected a number in [0, 1)"),
    ({"auxiliary": -1}, "auxiliary=-1 is not allowed; expected a whole number of at least 0"),
    ({"validation": -0.1}, "validation=-0.1 is not allowed; expected a number in [0, 1)"),
    ({"test": 1.0}, "test=1.0 is not allowed; expected a number in [0, 1)"),
    (
        {"validation": 0.5, "test": 0.5},
        "validation=0.5 and test=0.5 leave no training rows; expected a sum < 1",
    ),
    (
        {"victims": 64, "auxiliary": 0.35},
        "toy has 100 rows: victims=64 and auxiliary=0.35 (35 rows) leave 1 for 2 clients; "
        "expected at least one a client",
    ),
    (
        {"victims": 101},
        "toy has 100 rows: victims=101 and auxiliary=0.2 (20 rows) leave 0 for 2 clients; "
        "expected at least one a client",
    ),
    (
        {"dirichlet": 0.5, "classes_per_client": 2},
        "dirichlet and classes_per_client are two partitions; expected one",
    ),
    ({"minimum": -1}, "minimum=-1 is not allowed; expected a whole number of at least 0"),
    ({"seed": -1}, "seed=-1 is not allowed; expected a whole number of at least 0"),
    ({"dirichlet": 0.5, "by_domain": True}, "dirichlet and by_domain are two partitions; expected one"),
]


@pytest.mark.parametrize(("changes", "text"), BAD)
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        toy().clients(**({"count": 2} | changes))
    assert str(caught.value) == text


def test_a_client_without_training_rows() -> None:
    # Ten rows for ten clients: round(0.6 x 1) = 1 row to test, none to train on.
    with pytest.raises(InvalidInput) as caught:
        toy(10).clients(10, victims=0, auxiliary=0, test=0.6, validation=0.0)
    assert str(caught.value) == (
        "client0 has no training rows (0 validation, 1 test); take fewer clients or a less skewed partition"
    )


def test_labels_and_domains_are_needed() -> None:
    data = from_arrays(torch.rand(50, 1), torch.rand(50), name="real")
    for rule, name in (({"dirichlet": 0.5}, "dirichlet"), ({"classes_per_client": 1}, "classes_per_client")):
        with pytest.raises(InvalidInput, match=rf"^{name} needs class labels; real is a regression task$"):
            data.clients(2, victims=4, **rule)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^by_domain=True, but real has no domains$"):
        data.clients(2, victims=4, by_domain=True)
    assert len(data.clients(2, victims=4)) == 2


def test_overlap_is_found() -> None:
    federation = toy().clients(2, victims=10)
    only = {"auxiliary": torch.tensor([3]), "victims": torch.tensor([3])}
    with pytest.raises(InvalidInput, match=r"^row 3 is in auxiliary and in victims; expected disjoint parts$"):
        replace(federation, sources=only)
    with pytest.raises(InvalidInput, match=r"^toy: a federation needs at least one client$"):
        replace(federation, clients=())
    client = federation.clients[0]  # 35 rows: 3.5 to validate, rounded to the even 4, and 7 to test
    empty = ClientData("nobody", client.train.rows([]), client.validation, client.test)
    with pytest.raises(InvalidInput, match=r"^nobody has no training rows \(4 validation, 7 test\); take fewer"):
        replace(federation, clients=(empty,))
