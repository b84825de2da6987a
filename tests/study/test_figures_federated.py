"""The picture of embeddings and prototypes: what it shows, that it is drawn the same twice, and what it refuses."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.federated import FedProto
from splitfed.study.report.figures.federated import PrototypeEmbeddings, compute_embeddings, lay_out, plot_prototypes
from tests.federated.methods import data, go

pytestmark = pytest.mark.drawn


def groups() -> PrototypeEmbeddings:
    """Three far groups of 20 rows, each around its prototype."""
    random = torch.Generator().manual_seed(0)
    centres = 20.0 * torch.eye(3, 8)
    y = torch.arange(60) % 3
    z = centres[y] + torch.randn(60, 8, generator=random)
    return PrototypeEmbeddings(z, y, {str(label): centre for label, centre in enumerate(centres)})


def test_prototypes_lie_among_their_rows() -> None:
    flat = lay_out(groups())
    for label, place in flat.prototypes.items():
        distance = (flat.z - place).norm(dim=1)
        assert set(flat.y[distance.topk(10, largest=False).indices].tolist()) == {int(label)}


def test_fewer_rows_when_asked() -> None:
    flat = lay_out(groups(), rows=12)
    assert flat.z.shape == (12, 2)
    assert len(flat.prototypes) == 3
    assert flat.y.tolist() != lay_out(groups(), seed=1, rows=12).y.tolist()


def test_the_picture_has_every_class_and_is_the_same_twice() -> None:
    text = plot_prototypes(groups(), "figure")
    assert text == plot_prototypes(groups(), "figure")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for label in range(3):
        assert f"class {label}" in text


@pytest.mark.parametrize("shape", ["local", "vanilla"])
def test_a_run_shows_what_its_clients_make(shape: str) -> None:
    rows = data()
    run = go(shape, FedProto(), 1, data=rows)
    found = compute_embeddings(run)
    assert len(found.z) == len(found.y) == sum(len(client.test) for client in rows.clients)
    assert found.z.shape[1] == 10
    assert set(found.prototypes) == {str(y) for client in rows.clients for y in client.train.y.tolist()}
    assert "<svg" in plot_prototypes(found, "figure")


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the run has no prototypes to show: train it with method 'fedproto'"):
        compute_embeddings(go("local", None, 1))
    whole = sf.data.digits().rows(range(60)).clients(1, auxiliary=0, victims=0, validation=0.0)
    untested = go("local", FedProto(), 1, data=whole)
    with pytest.raises(InvalidInput, match="no client has rows in 'validation'"):
        compute_embeddings(untested, "validation")
    few = PrototypeEmbeddings(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), {"0": torch.zeros(3)})
    with pytest.raises(InvalidInput, match="3 points are too few to be laid out"):
        lay_out(few)
