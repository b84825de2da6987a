"""Domains: turned images, pictures by domain, LEAF's users, Synthetic's devices; whole and broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import classification
from splitfed.data import Dataset, Federation, domain_folder, from_arrays, leaf, mnist5k, rotated_mnist, synthetic


def dot() -> Dataset:
    """One image of 3 x 3 pixels, black but for the middle of its top row."""
    x = torch.zeros(2, 1, 3, 3)
    x[0, 0, 0, 1] = 1
    return Dataset("dot", x, torch.tensor([1, 0]), classification(2), (0.0, 1.0))


def test_quarter_turns_are_exact_and_clockwise() -> None:
    data = dot().rotated([0, 90, 180, 270])
    places = [image.flatten().argmax().item() for image in data.x[::2]]
    assert places == [1, 5, 7, 3]  # top, right, bottom, left
    assert data.domains is not None
    assert (data.domains.tolist(), data.y.tolist()) == ([0, 0, 1, 1, 2, 2, 3, 3], [1, 0] * 4)
    torch.testing.assert_close(data.x.sum((1, 2, 3))[::2], torch.ones(4))


def test_an_eighth_turn_is_bilinear() -> None:
    # The pixel at the right edge, turned by 45 degrees clockwise, is looked up half-way up on the top right diagonal:
    # at (x, y) = (s, -s) from the middle for s = 1 / sqrt 2, so that the top pixel weighs (1 - s) s.
    s = 0.5**0.5
    (_, turned) = dot().rotated([0, 45]).x[::2, 0]
    assert float(turned[1, 2]) == pytest.approx((1 - s) * s, rel=1e-5)
    assert float(turned.max()) <= 1.0


def test_turned_images_keep_targets_and_features_and_are_split_by_domain() -> None:
    data = mnist5k().rows(range(0, 5000, 50)).halves()
    data = data.with_target("odd", data.y % 2, classification(2)).rotated()
    assert (len(data), set(data.features), len(data.label("odd"))) == (400, {"left", "right"}, 400)
    clients = data.clients(4, by_domain=True, victims=0, auxiliary=0, validation=0.1, test=0.15).clients
    assert [(len(c.train), len(c.validation), len(c.test)) for c in clients] == [(75, 10, 15)] * 4


def test_base_that_is_not_zero_comes_in_from_outside() -> None:
    data = Dataset("one", torch.full((1, 1, 4, 4), -1.0), torch.tensor([0]), classification(2), (-1.0, 1.0))
    assert torch.equal(data.rotated([30]).x, data.x)


@pytest.mark.parametrize(
    ("angles", "text"),
    [
        ([], r"^angles=\[\] is not allowed; expected one or more angles in degrees$"),
        ([10, 370], r"^angles=\[10, 370\] has the same rotation twice; expected different domains$"),
        ([float("nan")], r"^angle=nan is not allowed; expected a number in"),
    ],
)
def test_impossible_angles(angles: list[float], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        dot().rotated(angles)


def test_only_images_turn() -> None:
    with pytest.raises(InvalidInput, match=r"^rows has rows of shape \(3,\); only images"):
        from_arrays(torch.rand(2, 3), torch.tensor([0, 1]), name="rows").rotated()


def test_rotated_mnist() -> None:
    data = rotated_mnist(per_class=3)
    assert (len(data), data.shape, data.value_range, data.name) == (120, (1, 28, 28), (0.0, 1.0), "rotated_mnist")
    assert data.domains is not None
    assert data.domains.bincount().tolist() == [30] * 4
    assert data.y[:30].bincount().tolist() == [3] * 10
    known = {tuple(row.tolist()) for row in (mnist5k().x.flatten(1) * 255).round()}
    assert all(tuple(row.tolist()) in known for row in (data.x[:30].flatten(1) * 255).round())
    assert torch.equal(rotated_mnist([0], 3).x, data.x[:30])
    assert not torch.equal(rotated_mnist([0], 3, seed=1).x, data.x[:30])
    with pytest.raises(InvalidInput, match=r"^per_class=501 is not allowed; there are 500 images of some digit$"):
        rotated_mnist(per_class=501)


def divided(data: Dataset, federation: Federation, client: int) -> dict[str, set[int]]:
    """Which images a client has in each part."""
    assert data.groups is not None
    parts = ("train", "validation", "test")
    return {part: set(data.groups[federation.sources[f"client{client}/{part}"]].tolist()) for part in parts}


def test_images_at_several_angles_are_divided_once() -> None:
    """No image is tested on, at any angle, that somebody trains on at another; each client's parts are as large."""
    data = rotated_mnist(per_class=4)
    assert data.groups is not None
    assert data.groups.tolist() == list(range(40)) * 4
    federation = data.clients(4, by_domain=True, victims=0, auxiliary=0, validation=0.1, test=0.15, seed=3)
    held = [divided(data, federation, i) for i in range(4)]
    assert [{part: len(found) for part, found in one.items()} for one in held] == [
        {"train": 30, "validation": 4, "test": 6}
    ] * 4
    assert held == held[:1] * 4
    assert [held[0][a] & held[0][b] for a, b in (("train", "test"), ("train", "validation"))] == [set(), set()]
    assert divided(data, data.clients(4, by_domain=True, victims=0, auxiliary=0, seed=4), 0)["test"] != held[0]["test"]
    # Any other partition of the same rows, too.
    mixed = data.clients(3, victims=8, auxiliary=8, test=0.3, seed=1)
    trained = torch.cat([mixed.sources[f"client{i}/train"] for i in range(3)])
    tested = torch.cat([mixed.sources[f"client{i}/test"] for i in range(3)])
    assert set(data.groups[trained].tolist()) & set(data.groups[tested].tolist()) == set()


def test_groups_of_one_row_change_nothing() -> None:
    data = mnist5k().rows(range(0, 5000, 25))
    alone = replace(data, groups=torch.arange(len(data)))
    for one, other in zip(data.clients(3).clients, alone.clients(3).clients, strict=True):
        assert torch.equal(one.test.x, other.test.x)
    with pytest.raises(InvalidInput, match=r"groups have shape \(2,\) and type int64; expected \(200,\) and int64"):
        replace(data, groups=torch.arange(2))


def picture(path: Path, color: int, side: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (side, side), color).save(path)


def test_domain_folder(tmp_path: Path) -> None:
    root = tmp_path / "pacs"
    for i, domain in enumerate(("sketch", "photo")):
        for j, name in enumerate(("dog", "cat", "fish")):
            for number in range(i + 1):
                picture(root / domain / name / f"{number}.png", 100 * i + 10 * j)
    data = domain_folder(root, grayscale=True)
    assert (data.name, data.shape, len(data), data.task.outputs) == ("pacs", (1, 4, 4), 9, 3)
    assert data.domains is not None
    # photo comes before sketch, cat before dog before fish.
    assert data.domains.tolist() == [0] * 6 + [1] * 3
    assert data.y.tolist() == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert (data.x[:, 0, 0, 0] * 255).round().tolist() == [110, 110, 100, 100, 120, 120, 10, 0, 20]
    assert domain_folder(root, size=2).shape == (3, 2, 2)
    picture(root / "photo" / "bird" / "0.png", 0)
    with pytest.raises(InvalidInput, match=r"pacs has class 'bird' in domain 'photo', not in all; expected the same"):
        domain_folder(root)
    (root / "photo" / "bird" / "0.png").unlink()
    picture(root / "sketch" / "bird" / "0.png", 0)
    with pytest.raises(InvalidInput, match=r"bird has no pictures; expected files such as"):
        domain_folder(root)
    with pytest.raises(InvalidInput, match=r"^.* has 0 sub-folders; expected one a domain, at least two$"):
        domain_folder(root / "photo" / "cat")


PIXELS = {"f1": {"x": [[0, 0.25, 0.5, 1], [1, 1, 1, 1]], "y": [3, 0]}, "f0": {"x": [[0, 0, 0, 0.5]], "y": [1]}}


def users(**changes: Any) -> dict[str, Any]:
    """A file of two writers of images of 2 x 2 pixels."""
    return {"users": ["f1", "f0"], "num_samples": [2, 1], "user_data": PIXELS, **changes}


def write(path: Path, known: Any) -> Path:
    path.write_text(json.dumps(known))
    return path


def test_leaf_users_are_domains(tmp_path: Path) -> None:
    write(tmp_path / "all_data_0.json", users())
    more = {"f7": {"x": [[0, 0, 0, 0]] * 3, "y": [4, 4, 4]}}
    write(tmp_path / "all_data_1.json", users(users=["f7"], num_samples=[3], user_data=more))
    data = leaf(tmp_path, shape=[1, 2, 2])
    assert (data.shape, data.value_range, data.task.outputs) == ((1, 2, 2), (0.0, 1.0), 5)
    assert data.domains is not None
    assert (data.domains.tolist(), data.y.tolist()) == ([0, 0, 1, 2, 2, 2], [3, 0, 1, 4, 4, 4])
    assert data.x[0].flatten().tolist() == [0, 0.25, 0.5, 1]
    few = leaf(tmp_path, classes=62, least=2)
    assert (len(few), few.shape, few.task.outputs, few.value_range) == (5, (4,), 62, None)
    assert leaf(tmp_path / "all_data_0.json", users=1).y.tolist() == [3, 0]
    federation = data.clients(3, by_domain=True, victims=0, auxiliary=0, test=0.0, validation=0.0)
    assert [len(client.train) for client in federation.clients] == [2, 1, 3]


BROKEN: list[tuple[Any, str]] = [
    ([], "has no list of users; expected users, num_samples and user_data"),
    (users(num_samples=[2]), "has no user_data, or not a number in num_samples for each of its users"),
    (users(user_data={}), "user 'f1' has no x and y in user_data"),
    (users(num_samples=[3, 1]), r"user 'f1' has x of shape \(2, 4\), y of shape \(2,\) and num_samples 3"),
    (users(user_data={"f1": {"x": [[1], [1, 2]], "y": [0, 0]}}), "user 'f1' has rows of different lengths in x"),
    (
        users(user_data={"f1": {"x": [["a"], ["b"]], "y": [0, 0]}}),
        "user 'f1' has values other than finite numbers in x",
    ),
    (users(user_data={"f1": {"x": [[1], [float("nan")]], "y": [0, 0]}}), "values other than finite numbers in x"),
    (users(user_data={"f1": {"x": [[1], [2]], "y": [0, 0.5]}}), "user 'f1' has a label that is no class"),
    (
        users(user_data={**PIXELS, "f0": {"x": [[1, 2]], "y": [0]}}),
        "user 'f0' has rows of 2 numbers, not 4",
    ),
    (
        users(users=["f1", "f1"], num_samples=[2, 2], user_data={"f1": PIXELS["f1"]}),
        "has user 'f1' twice, or again after an earlier file",
    ),
    (users(users=["f1"], num_samples=[2]), "has rows of user 'f0', who is not in its list of users"),
]


@pytest.mark.parametrize(("known", "text"), BROKEN)
def test_leaf_refuses_broken_files(tmp_path: Path, known: Any, text: str) -> None:
    path = write(tmp_path / "all_data_0.json", known)
    with pytest.raises(InvalidInput, match=text) as caught:
        leaf(tmp_path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_leaf_refuses_what_is_no_json_and_what_is_asked_in_vain(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has no .json file; expected files such as all_data_0.json$"):
        leaf(tmp_path)
    (tmp_path / "a.json").write_text('{"users": [')
    with pytest.raises(InvalidInput, match=r"a.json is no JSON: Expecting value"):
        leaf(tmp_path)
    path = write(tmp_path / "a.json", users())
    with pytest.raises(InvalidInput, match=r"has 1 users with at least 2 rows; expected 2 or more$"):
        leaf(path, users=2, least=2)
    with pytest.raises(InvalidInput, match=r"^shape=\(3,\) is not allowed; .* has rows of 4 numbers$"):
        leaf(path, shape=[3])
    with pytest.raises(InvalidInput, match=r"label 3"):
        leaf(path, classes=3)


def test_synthetic_follows_its_definition() -> None:
    data = synthetic(devices=200, seed=1)
    assert (data.shape, data.task.outputs, data.name) == ((60,), 10, "synthetic(1, 1)")
    assert data.domains is not None
    counts = data.domains.bincount()
    assert int(counts.min()) >= 50
    # 50 + lognormal(4, 2): the logarithm of the excess has mean 4 and deviation 2, but for the rounding of small ones.
    excess = (counts - 50.0 + 0.5).log()
    assert float(excess.mean()) == pytest.approx(4, abs=4 * 2 / 200**0.5)
    assert float(excess.std()) == pytest.approx(2, rel=0.2)
    big = data.x[data.domains == int(counts.argmax())]
    torch.testing.assert_close(big.var(0), torch.arange(1, 61) ** -1.2, rtol=0.15, atol=0.0)
    again = synthetic(devices=200, seed=1)
    assert torch.equal(data.x, again.x)


def test_iid_devices_share_one_model_and_others_do_not() -> None:
    def agreement(data: Dataset) -> float:
        """Fit a linear model on all devices but the first three; return its accuracy on those."""
        assert data.domains is not None
        new = data.domains < 3
        goal = torch.nn.functional.one_hot(data.y, 10).double()
        x = torch.cat([data.x, torch.ones(len(data), 1)], 1).double()
        found = torch.linalg.lstsq(x[~new], goal[~new]).solution
        return float(((x[new] @ found).argmax(1) == data.y[new]).double().mean())

    assert agreement(synthetic(iid=True)) > 0.6
    assert agreement(synthetic(1.0, 1.0)) < 0.5


def test_alpha_and_beta_are_how_far_devices_differ() -> None:
    def spread(beta: float) -> float:
        data = synthetic(0.0, beta, devices=100)
        assert data.domains is not None
        means = torch.stack([data.x[data.domains == k].mean() for k in range(100)])
        return float(means.std())

    # The mean of 60 numbers of v_k is B_k ~ N(0, beta), and the mean of 60 draws of deviation 1.
    assert spread(0.0) == pytest.approx(60**-0.5, rel=0.3)
    assert spread(2.0) == pytest.approx(2, rel=0.3)


@pytest.mark.parametrize("changes", [{"alpha": -1.0}, {"beta": -0.5}, {"devices": 0}])
def test_synthetic_refuses(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(changes))):
        synthetic(**changes)
