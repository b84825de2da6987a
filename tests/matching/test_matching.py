"""Clients find their expert among four on real 8x8 images, or learn that none fits; only codes and errors cross.

Experts: handwritten digits, MNIST brought to the same size, digits inverted, digits turned. `python -m
tests.matching.test_matching` prints the table of all measures over three seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recorder
from splitfed.core.random import generator
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.core.traffic import Traffic
from splitfed.data import Dataset, digits, from_arrays, mnist5k
from splitfed.matching import MEASURES, Client, Matcher, Repository
from splitfed.matching.matcher import Rejection, fit_rejection
from splitfed.matching.measures import Reference
from splitfed.models import build
from splitfed.topologies import vanilla
from tests.thinning import thin

ON_CODES = [name for name, measure in MEASURES.items() if not measure.on_errors]
EXPERT_ROWS, CLIENT_ROWS = 700, 384


@dataclass(frozen=True)
class World:
    """A repository and, for each expert, rows of its kind that it never saw, with their labels."""

    repository: Repository
    clients: dict[str, tuple[Tensor, Tensor]]

    def sets(self, rows: int, count: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, (x, y) in self.clients.items():
            for i in range(count):
                part = slice(i * rows, (i + 1) * rows)
                yield name, x[part], y[part]


@cache
def _sources() -> dict[str, tuple[Tensor, Tensor]]:
    small, large = digits(), mnist5k()
    shrunk = functional.avg_pool2d(functional.pad(large.x, (2, 2, 2, 2)), 4)
    return {
        "digits": (small.x, small.y),
        "mnist": (shrunk, large.y),
        "inverted": (1 - small.x, small.y),
        "turned": (small.x.rot90(1, (2, 3)), small.y),
    }


def _dataset(name: str, x: Tensor, y: Tensor) -> Dataset:
    return from_arrays(x, y, task=classification(10), name=name)


@cache
def _world(seed: int = 0) -> World:
    repository, clients = Repository(), {}
    for name, (x, y) in _sources().items():
        order = torch.randperm(len(x), generator=generator(seed, name))
        first, second = order[:EXPERT_ROWS], order[EXPERT_ROWS : EXPERT_ROWS + CLIENT_ROWS]
        repository.add(name, _dataset(name, x[first], y[first]), epochs=25, seed=seed)
        clients[name] = (x[second], y[second])
    return World(repository, clients)


def _noise(rows: int = 32, seed: int = 0) -> Tensor:
    return torch.rand(rows, 1, 8, 8, generator=generator(seed, "noise"))


@dataclass(frozen=True)
class Row:
    """One line of the table: shares of client sets, of their rows, and of sets of noise."""

    coarse: float
    fine: float
    refused: float
    noise: float


def _experiment(measure: str, rows: int, seeds: tuple[int, ...], count: int = 8) -> Row:
    """Return how often sets of `rows` find their expert and class, are refused, and noise is taken for a match."""
    right, classes, refused, noise = [], [], [], []
    for seed in seeds:
        world = _world(seed)
        matcher = Matcher(world.repository, measure, seed=seed)
        for name, x, y in world.sets(rows, count):
            match = matcher.match(Client("client", x))
            right.append(match.expert.name == name)
            classes.append(float((match.classes == y).double().mean()))
            refused.append(not match.matched)
        noise += [matcher.match(Client("client", _noise(rows, i))).matched for i in range(count)]
    means = [sum(found) / len(found) for found in (right, classes, refused, noise)]
    return Row(*means)


@pytest.mark.exhaustive
@pytest.mark.parametrize("measure", thin(MEASURES, 3))
def test_clients_of_32_rows_find_their_expert_and_noise_finds_none(measure: str) -> None:
    # By chance a quarter would find their expert, and a tenth of the rows their class.
    row = _experiment(measure, 32, (0, 1, 2), count=4)
    assert row.coarse >= (0.75 if measure == "hsic" else 0.98)
    assert row.fine >= 0.75
    assert row.refused <= 0.15
    assert row.noise <= (0.25 if measure == "hsic" else 0)


@pytest.mark.parametrize("measure", ["reconstruction", "cosine"])
def test_a_single_row_finds_its_expert(measure: str) -> None:
    row = _experiment(measure, 1, (0, 1), count=24)
    assert row.coarse >= 0.9
    assert row.noise == 0


def test_pieces_of_a_photograph_match_no_expert() -> None:
    from sklearn.datasets import load_sample_image

    grey = torch.tensor(load_sample_image("china.jpg")).float().mean(2) / 255
    pieces = grey[:424, :640].unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 1, 8, 8)
    chosen = pieces[torch.randperm(len(pieces), generator=generator(0))[:32]]
    for measure in ("reconstruction", "cosine", "mmd"):
        assert not Matcher(_world().repository, measure).match(Client("photographer", chosen)).matched


def test_a_client_with_one_class_fits_by_rows_and_not_by_distribution() -> None:
    x, y = _world().clients["digits"]
    threes = Client("threes", x[y == 3][:32])
    found = {name: Matcher(_world().repository, name).match(threes) for name in ("reconstruction", "cosine", "mmd")}
    assert {match.expert.name for match in found.values()} == {"digits"}
    assert [found[name].matched for name in ("reconstruction", "cosine", "mmd")] == [True, True, False]


def test_nearly_black_images_deceive_the_reconstruction_error_and_not_the_cosine() -> None:
    black = Client("black", 0.01 * _noise())
    assert Matcher(_world().repository, "reconstruction").match(black).matched
    assert not Matcher(_world().repository, "cosine").match(black).matched


@pytest.mark.parametrize("measure", MEASURES)
def test_the_order_of_rows_means_nothing(measure: str) -> None:
    x, _ = _world().clients["mnist"]
    matcher = Matcher(_world().repository, measure)
    straight, turned = (matcher.match(Client("c", rows)) for rows in (x[:32], x[:32].flip(0)))
    assert straight.scores == pytest.approx(turned.scores, abs=1e-5)
    assert torch.equal(straight.classes, turned.classes.flip(0))


@pytest.mark.parametrize("measure", MEASURES)
def test_a_reference_fits_itself_best(measure: str) -> None:
    reference = _world().repository["digits"].reference
    if MEASURES[measure].on_errors:
        assert MEASURES[measure].score(torch.tensor([0.0, 2.0]), reference) == -1
        return
    own = MEASURES[measure].score(reference.codes, reference)
    shuffled = reference.codes[:, torch.randperm(reference.codes.shape[1], generator=generator(0))]
    assert own > MEASURES[measure].score(shuffled, reference)
    if measure in ("alignment", "distance_correlation"):
        assert own == pytest.approx(1, abs=1e-5)


def test_cosine_score_by_hand() -> None:
    means = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    reference = Reference(means, means, torch.tensor([4, 7]), 1.0)
    # Cosines with the nearest mean: 4/5 and 1.
    assert MEASURES["cosine"].score(torch.tensor([[3.0, 4.0], [5.0, 0.0]]), reference) == pytest.approx(0.9)


def test_more_rows_than_a_set_are_scored_set_by_set() -> None:
    x, _ = _world().clients["digits"]
    matcher = Matcher(_world().repository, "mmd", rows=16)
    whole = matcher.match(Client("c", x[:40])).scores
    halves = [matcher.match(Client("c", x[i : i + 16])).scores for i in (0, 16)]
    for name, score in whole.items():
        assert score == pytest.approx((halves[0][name] + halves[1][name]) / 2)


def test_codes_that_are_there_already_give_the_same_match() -> None:
    world = _world()
    x, _ = world.clients["inverted"]
    matcher = Matcher(world.repository, "alignment", evidence=["cosine", "mmd"])
    sent = matcher.match(Client("c", x[:32].double()))
    given = matcher.match_codes({name: e.codes(x[:32]).double() for name, e in world.repository.experts.items()})
    again = Matcher(world.repository, "alignment", evidence=["cosine", "mmd"]).match(Client("c", x[:32]))
    assert sent.scores == given.scores == again.scores
    assert sent.probability == given.probability == again.probability > 0.5
    assert torch.equal(sent.classes, given.classes)


def _watched(measure: str, rows: int = 32) -> tuple[Traffic, Recorder, Recorder, Tensor]:
    x, _ = _world().clients["digits"]
    traffic, server, client = Traffic(), Recorder("matcher"), Recorder("clinic")
    Matcher(_world().repository, measure).match(Client("clinic", x[:rows]), traffic=traffic, recorders=[server, client])
    return traffic, server, client, x[:rows]


def test_codes_cross_and_are_counted_to_the_byte() -> None:
    traffic, server, client, x = _watched("cosine")
    # Four encoders from 64 values to 32, with bias, and 32 rows of 32 numbers under each; four bytes a number.
    assert traffic.by_kind("match") == {"activation": 4 * 32 * 32 * 4, "weights": 4 * (64 * 32 + 32) * 4}
    view = server.view()
    assert [(m.sender, m.kind, m.edge) for m in view.messages] == [("clinic", "activation", "encoder->matcher")] * 4
    for name, codes in view.tensors().items():
        assert torch.equal(codes, _world().repository[name].codes(x))
    assert {m.edge for m in client.view().messages} == {"matcher->encoder"}
    assert len({m.stamp.step for m in [*server.messages(), *client.messages()]}) == 8


def test_errors_cross_before_the_codes_of_one_expert() -> None:
    traffic, server, _, x = _watched("reconstruction")
    # Encoder and decoder of each expert; an error a row and expert, then the codes for the chosen one.
    weights = 4 * (64 * 32 + 32 + 32 * 64 + 64) * 4
    assert traffic.by_kind("match") == {"activation": (4 * 32 + 32 * 32) * 4, "weights": weights}
    messages = server.view().messages
    assert [m.edge for m in messages] == ["decoder->matcher"] * 4 + ["encoder->matcher"]
    assert [list(m.tensors) for m in messages[-1:]] == [["digits"]]
    for name, errors in server.view().select(edge="decoder->matcher").tensors().items():
        assert torch.allclose(errors, _world().repository[name].errors(x))


def test_what_the_client_receives_shares_no_memory_with_the_server() -> None:
    _, _, client, _ = _watched("reconstruction")
    own = {p.data_ptr() for e in _world().repository.experts.values() for p in e.autoencoder.parameters()}
    assert not own & {t.data_ptr() for m in client.view().messages for t in m.tensors.values()}


def test_whoever_holds_the_decoder_reads_the_rows_from_the_codes() -> None:
    _, server, _, x = _watched("cosine")
    expert = _world().repository["digits"]
    with torch.no_grad():
        decoded = expert.autoencoder.decoder(server.view().tensors()["digits"])
    error = float((decoded - x.flatten(1)).square().mean())
    baseline = float((x.mean(0) - x).square().mean())
    assert 10 * math.log10(baseline / error) > 6


def test_rejection_is_a_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression

    random = generator(0)
    matches = torch.arange(300) % 3 == 0
    scores = torch.randn(300, 2, generator=random, dtype=torch.float64) + matches[:, None] * torch.tensor([2.0, 1.0])
    found = fit_rejection(scores, matches)
    # Nothing holds a weight at zero here, so the bounds change nothing.
    other = LogisticRegression(class_weight="balanced", tol=1e-10).fit(scores.asinh(), matches)
    assert found.weights == pytest.approx(other.coef_[0].tolist(), abs=1e-3)
    assert found.bias == pytest.approx(float(other.intercept_[0]), abs=1e-3)


def test_a_better_score_never_lowers_the_probability() -> None:
    random = generator(0)
    matches = torch.arange(200) % 2 == 0
    good = matches * 3.0 + torch.randn(200, generator=random)
    found = fit_rejection(torch.stack([good, -good], 1), matches)
    assert found.weights[0] > 0.5
    assert found.weights[1] == 0
    assert float(Rejection((1.0,), 0.0).probability(torch.tensor([0.0]))) == 0.5
    assert float(Rejection((1.0,), 0.0).probability(torch.tensor([math.sinh(2)]))) == pytest.approx(
        1 / (1 + math.exp(-2))
    )


def test_split_training_starts_from_the_chosen_expert() -> None:
    x, y = digits().x, digits().y
    order = torch.randperm(len(x), generator=generator(3))
    theirs, mine = order[:900], order[900:1300]
    model = build("mlp", (1, 8, 8), 10, seed=0, hidden=(32,))
    taught = splitfed.train(
        vanilla(model, "relu1"), _dataset("theirs", x[theirs], y[theirs]).clients(1, auxiliary=0), rounds=8, seed=0
    )
    whole = vanilla(build("mlp", (1, 8, 8), 10, seed=0, hidden=(32,)), "relu1")
    state = whole.state_dict(taught.engine.modules(0))
    model.load_state_dict(state)
    repository = Repository()
    repository.add("digits", _dataset("digits", x[theirs], y[theirs]), model, epochs=25)
    repository.add("inverted", _dataset("inverted", 1 - x[theirs], y[theirs]), epochs=25)
    match = Matcher(repository).match(Client("clinic", x[mine]))
    assert match.matched
    fitting = match.expert.topology(vanilla, "relu1")
    # On memory of its own: nothing trained there reaches the repository.
    assert torch.equal(fitting.state_dict()["fc1.weight"], state["fc1.weight"])
    assert match.expert.model is not None
    own = {p.data_ptr() for p in match.expert.model.parameters()}
    assert not own & {t.data_ptr() for t in fitting.state_dict().values()}
    fresh = vanilla(build("mlp", (1, 8, 8), 10, seed=1, hidden=(32,)), "relu1")
    data = _dataset("mine", x[mine], y[mine]).clients(1, auxiliary=0, victims=0, test=0.4)

    def tuned(topology: Topology) -> float:
        return splitfed.train(topology, data, rounds=1, seed=0).accuracy

    assert tuned(fitting) > max(0.8, tuned(fresh) + 0.2)
    with pytest.raises(InvalidInput, match=r"expert 'inverted' has no model; add it with model=\.\.\."):
        repository["inverted"].topology(vanilla, "relu1")


def _add(name: str, x: Tensor, y: Tensor, **options: int) -> None:
    Repository().add(name, from_arrays(x, y, name="rows"), **options)


def _codes(**changes: Tensor) -> dict[str, Tensor]:
    return {name: torch.zeros(4, 32) for name in _world().repository.experts} | changes


X, Y = torch.rand(20, 4, generator=generator(0)), torch.arange(20) % 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: _add("a/b", X, Y), "expert 'a/b' is not allowed; expected a name without '/' and '->'"),
        (lambda: _add("a", X[:19], Y[:19]), "rows has 19 rows; an expert needs at least 20"),
        (lambda: _add("a", X, X[:, 0]), "rows is a regression task; an expert needs class labels"),
        (lambda: _add("a", X, Y, code=4), "code=4 is not allowed for rows of 4 values; expected at most 3"),
        (lambda: _add("a", X, Y, code=1), "code=1 is not allowed; expected a whole number of at least 2"),
        (lambda: _world().repository["digit"], "unknown expert 'digit'; did you mean 'digits'?"),
        (lambda: Matcher(Repository()), "the repository has 0 experts; matching needs at least two"),
        (lambda: Matcher(_world().repository, "cosin"), "unknown measure 'cosin'; did you mean 'cosine'?"),
        (lambda: Matcher(_world().repository, evidence=[]), "evidence is empty; expected at least one measure"),
        (
            lambda: Matcher(_world().repository, evidence=["reconstruction"]),
            "evidence 'reconstruction' is not allowed with measure='cosine'; one reads errors, one codes",
        ),
        (lambda: Matcher(_world().repository, "mmd", rows=1), "rows=1 is not allowed"),
        (
            lambda: Matcher(_world().repository, "mmd").match(Client("c", _noise(1))),
            "the values for expert 'digits' have shape (1, 32); expected (rows, 32), at least 2 rows",
        ),
        (
            lambda: Matcher(_world().repository).match(Client("c", torch.zeros(3, 64))),
            "c has rows of (64,); the experts take (1, 8, 8)",
        ),
        (lambda: Matcher(_world().repository).match_codes({}), "the values for expert 'digits' have shape None"),
        (lambda: Matcher(_world().repository).match_codes({"nobody": X}), "unknown expert 'nobody'"),
        (
            lambda: Matcher(_world().repository).match_codes(_codes(mnist=torch.full((4, 32), math.inf))),
            "the values for expert 'mnist' are not finite",
        ),
        (
            lambda: Matcher(_world().repository).match_codes(_codes(mnist=torch.zeros(5, 32))),
            "rows by expert are {'digits': 4, 'mnist': 5, 'inverted': 4, 'turned': 4}",
        ),
        (
            lambda: Matcher(_world().repository, "reconstruction").match_codes(_codes()),
            "measure='reconstruction' needs errors beside codes; give the client to match()",
        ),
        (lambda: Client("c", torch.zeros(0, 4)), "c: x is torch.float32 of shape (0, 4); expected floats (rows, ...)"),
        (lambda: Client("c", torch.full((1, 4), math.nan)), "c: x holds a value that is not finite"),
        (lambda: fit_rejection(X, torch.ones(20, dtype=torch.bool)), "matches are all true or all false"),
    ],
)
def test_bad_input_is_one_line(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput) as error:
        call()
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_repository_takes_one_shape_and_one_expert_a_name() -> None:
    repository = Repository()
    repository.add("a", from_arrays(X, Y, name="rows"), epochs=1)
    with pytest.raises(InvalidInput, match="expert 'a' exists already; every expert needs a distinct name"):
        repository.add("a", from_arrays(X, Y, name="rows"))
    with pytest.raises(InvalidInput, match=r"wide has rows of \(6,\); the repository's experts take \(4,\)"):
        repository.add("b", from_arrays(torch.zeros(20, 6), Y, name="wide"))
    assert len(repository) == 1


if __name__ == "__main__":
    print("measure               rows  coarse  fine  own refused  noise taken   (3 seeds, 4 experts)")
    for chosen, kind in MEASURES.items():
        for size in (1, 4, 32):
            if size >= kind.least:
                line = _experiment(chosen, size, (0, 1, 2))
                print(
                    f"{chosen:<22}{size:>4}{line.coarse:>8.3f}{line.fine:>6.2f}{line.refused:>13.3f}{line.noise:>13.3f}"
                )
