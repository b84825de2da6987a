"""Row independence: models that mix or keep rows in ways that few rows, zeros and ones, or attributes do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn

import splitfed as sf
from splitfed.core import row_independence
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.random import generator
from splitfed.core.row_independence import try_rows
from splitfed.core.tasks import classification
from splitfed.core.topology import Segment
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.trial_rows import COPIED, WALKS, RowPair, TrialRows, make_pairs
from splitfed.data.dataset import Dataset
from splitfed.planning.row_trial import trial_rows
from splitfed.planning.validation import prepare
from splitfed.schedules.base import RARE, Training
from splitfed.topologies import vanilla

WIDTH, LENGTH, WORDS = 6, 8, 1000
ALL: dict[str, Any] = {"auxiliary": 0, "victims": 0, "validation": 0, "test": 0}


class Floats(nn.Module):
    """Numbers as they are, by a function of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Groups(Floats):
    """Subtracts the mean of every eight rows; fewer rows are left alone."""

    def forward(self, x: Tensor) -> Tensor:
        full = len(x) // 8 * 8
        groups = x[:full].reshape(-1, 8, WIDTH)
        return torch.cat([(groups - groups.mean(1, keepdim=True)).reshape(full, WIDTH), x[full:]])


class Strided(Floats):
    """Subtracts the mean of every second row: even rows see even ones alone."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 2:
            return x
        groups = x.reshape(-1, 2, WIDTH)
        return (groups - groups.mean(0)).reshape(x.shape)


class LastRow(Floats):
    """Subtracts the last row from all."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x[-1]


class Experts(Floats):
    """Two experts that take a quarter of a batch more than their half; a row that comes too late is left out."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(2):
            chosen = ((x.mean(1) > 0.5).long() == expert).nonzero()[:, 0][: int(len(x) * 0.625)]
            y[chosen] = x[chosen] * (expert + 1)
        return y


class Limited(Floats):
    """An expert that takes `capacity` rows with a great first number, and leaves out those that come too late."""

    def __init__(self, capacity: int, evaluated: bool = False) -> None:
        super().__init__()
        self.capacity, self.evaluated = capacity, evaluated

    def forward(self, x: Tensor) -> Tensor:
        if self.evaluated and self.training:
            return x
        chosen = x[:, 0] > 0.5
        return torch.where((chosen & (chosen.cumsum(0) <= self.capacity))[:, None], 2 * x, x)


class Keeper:
    """Callable; keeps the last row that it was asked about."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        self.last = x[-1].detach().clone()
        return x


class CallsKeeper(Floats):
    """Keeps a row in what it calls, and does nothing with it yet."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()

    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = self.keeper(x)
        return called


class Listed(Floats):
    """Batch norm in a list, which neither `state_dict` nor `train` reaches; its outputs are not used."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used, self.norms = used, [nn.BatchNorm1d(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norms[0](x)
        return y if self.used else x


class InEvaluation(Floats):
    """Subtracts the mean of the batch in evaluation mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x - x.mean(0)


class Words(nn.Module):
    """Means of embeddings up to the `kind` of length: the row's own, or the longest of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(WORDS, WIDTH).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.embedding(tokens), (tokens != 0).unsqueeze(2)
        if self.kind == "longest":
            return x.sum(1) / mask.sum(1).max().clamp_min(1)
        mean: Tensor = (x * mask).sum(1) / mask.sum(1).clamp_min(1)
        if self.kind == "rare word" and bool((tokens == 777).any()):
            mean = mean - mean.mean(0)
        return mean


class Routed(Floats):
    """Two experts that take any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = torch.zeros_like(x)
        for expert in range(2):
            chosen = (x.mean(1) > 0.5).long() == expert
            y[chosen] = x[chosen] * (expert + 1)
        return y


MIXING: dict[str, Callable[[], nn.Module]] = {
    "means of eight rows": Groups,
    "means of every second row": Strided,
    "one row in all": LastRow,
    "experts with a capacity": Experts,
    "a callable that keeps a row": CallsKeeper,
    "batch norm in a list": lambda: Listed(True),
    "statistics in a list": lambda: Listed(False),
    "evaluation mode": InEvaluation,
    "the longest row": lambda: Words("longest"),
    "a rare word": lambda: Words("rare word"),
}
APART: dict[str, Callable[[], nn.Module]] = {
    "experts without a capacity": Routed,
    "dropout": lambda: nn.Dropout(0.5),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm that is fixed": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH).eval(), nn.Tanh()),
    "words of a row": lambda: Words("own"),
}


def prepared(front: nn.Module, batch: int, *defenses: sf.defenses.Defense, **given: Any) -> TopologyFacts:
    """What a run on rows of one client finds out about them, of floats in [0, 1) or of words with padding behind."""
    sampling, method = given.get("sampling", "shuffle"), given.get("method")
    random, rows = generator(1), 64
    x: Tensor = torch.rand(rows, WIDTH, generator=random)
    if isinstance(front, Words):
        x = torch.randint(1, WORDS, (rows, LENGTH), generator=random)
        x[torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (rows, 1), generator=random)] = 0
        # The word is of rows that are not in the trial.
        x[x == 777], x[-1, 0] = 778, WORDS - 1
    data = Dataset("rows", x, torch.randint(3, (rows,), generator=random), classification(3)).clients(1, **ALL)
    model = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, 3))
    topology = vanilla(model, "0", sent_inputs=("input",))
    bottom, top = topology.segments
    topology = replace(topology, segments=(replace(bottom, module=front), top))
    training = Training(batch, sampling=sampling)
    plan = {"schedule": "sequential" if method is None else sf.schedules.Sequential(hand_over="none"), "method": method}
    return prepare(topology, data, defenses=defenses, optimizer=None, training=training, **plan).facts[0]


@pytest.mark.parametrize("front", MIXING.values(), ids=list(MIXING))
def test_a_model_that_mixes_or_keeps_rows_is_found(front: Callable[[], nn.Module]) -> None:
    found = prepared(front(), 20, sf.defenses.GaussianRelease(noise_multiplier=1.0)).row_findings
    assert found
    assert "bottom" in {finding.segment for finding in found}


@pytest.mark.parametrize("name", ["means of eight rows", "experts with a capacity", "a callable that keeps a row"])
def test_dp_sgd_refuses_it(name: str) -> None:
    with pytest.raises(InvalidInput, match="dp_sgd cannot train beside segment 'bottom'"):
        prepared(MIXING[name](), 20, sf.defenses.DpSgd(noise_multiplier=1.0))


def test_batches_in_which_all_rows_go_to_one_expert_are_tried() -> None:
    """Of 20 rows about ten are great, and 15 of them fit."""
    found = prepared(Limited(15), 20, sf.defenses.GaussianRelease(noise_multiplier=1.0)).row_findings
    assert found is not None
    assert {one.kind for one in found if one.segment == "bottom"} == {"output", "evaluation"}


def test_the_largest_batches_that_chance_draws_are_tried() -> None:
    """Of 64 rows each is drawn with a chance of a third: 30 great ones among 20 are none, among 51 some."""
    private = sf.defenses.DpSgd(noise_multiplier=1.0)
    assert prepared(Limited(30), 20, private).row_findings == ()
    with pytest.raises(InvalidInput, match="dp_sgd cannot train beside segment 'bottom': it mixes the rows of a batch"):
        prepared(Limited(30), 20, private, sampling="poisson")


@pytest.mark.parametrize(("size", "rows"), [(1, 2), (20, 64), (64, 60000), (500, 1000), (999, 1000), (5, 10**7)])
def test_the_largest_batch_is_exceeded_hardly_ever(size: int, rows: int) -> None:
    largest = Training(size, sampling="poisson").largest_batch(rows)
    assert size < largest <= rows
    assert binom.sf(largest, rows, size / rows) < RARE
    assert Training(size).largest_batch(rows) == size
    assert Training(size, sampling="poisson").largest_batch(size) == size


def test_passes_in_evaluation_mode_are_tried_with_as_many_rows_as_they_have() -> None:
    """A batch has four rows, and class means are of 64; thirty great ones fit."""
    method = sf.federated.FedProto(private={"clip": 1.0, "noise_multiplier": 1.0}, embedding="_0")
    for front in (Limited(30), Limited(30, evaluated=True)):
        with pytest.raises(InvalidInput, match=r"fedproto private .* the model mixes the rows of a batch"):
            prepared(front, 4, method=method)
    assert prepared(Limited(64), 4, method=method).row_findings == ()
    released = sf.defenses.GaussianRelease(noise_multiplier=1.0)
    assert prepared(Limited(30), 4, released).row_findings == (
        ("bottom", "evaluation", "_0"),
        ("top", "evaluation", "_1"),
    )


@pytest.mark.parametrize("front", APART.values(), ids=list(APART))
@pytest.mark.parametrize("batch", [2, 20])
def test_a_model_that_does_neither_passes(front: Callable[[], nn.Module], batch: int) -> None:
    assert prepared(front(), batch, sf.defenses.DpSgd(noise_multiplier=1.0)).row_findings == ()


def test_what_is_found_tells_no_number_of_a_row() -> None:
    """A message that quotes what a model keeps would print data."""
    (finding,) = {
        one
        for one in prepared(CallsKeeper(), 20, sf.defenses.GaussianRelease(noise_multiplier=1.0)).row_findings or ()
        if one.segment == "bottom"
    }
    assert finding == ("bottom", "memory", "attribute 'last' of 'keeper'")


def test_rows_of_one_length_are_shortened() -> None:
    """A row of the run may be shorter than those of the trial, of which each is as long as the longest."""
    topology = vanilla(nn.Sequential(Words("longest"), nn.Linear(WIDTH, 3)), "0").with_task(classification(3))
    (name,) = topology.inputs
    x = torch.randint(1, WORDS, (40, LENGTH), generator=generator(1))
    facts = pass_example(topology, {name: x[:4]})
    found = try_rows(topology, facts, TrialRows({name: x}, {}, 20), {"bottom"})
    assert {finding.kind for finding in found} == {"output", "evaluation"}


def test_only_a_promise_about_rows_is_tried() -> None:
    assert prepared(Groups(), 20, sf.defenses.Noise(1.0)).row_findings is None
    assert prepared(Groups(), 20, sf.defenses.LabelDp(epsilon=1.0)).row_findings is None


def test_each_segment_runs_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve pairs of whole batches, nine of sixteen rows: 42 passes, however many rows there are."""
    sizes: list[int] = []
    run = row_independence._run

    def counting(segment: Segment, module: nn.Module, pair: RowPair, other: bool) -> tuple[Tensor, ...]:
        sizes.append(len(pair.changed))
        return run(segment, module, pair, other)

    monkeypatch.setattr(row_independence, "_run", counting)
    topology = vanilla(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 3)), "0").with_task(classification(3))
    (name,) = topology.inputs
    facts = pass_example(topology, {name: torch.rand(4, WIDTH)})
    assert try_rows(topology, facts, TrialRows({name: torch.rand(400, WIDTH)}, {}, 200), {"bottom"}) == ()
    assert (sizes.count(200), sizes.count(16), len(sizes)) == (24, 18, 42)


def test_a_trial_has_rows_of_all_clients_and_words_of_all_rows() -> None:
    """Of 9 rows each, batches of 6: twelve rows, four of each client; words go from -1 to the greatest of any."""
    x = torch.arange(27).reshape(27, 1).repeat(1, 4) - 1
    data = Dataset("rows", x, torch.zeros(27, dtype=torch.int64), classification(2))
    federation = data.clients(3, seed=0, **ALL)
    topology = vanilla(nn.Sequential(nn.Embedding(28, 2), nn.Flatten(), nn.Linear(8, 2)), "0").with_task(data.task)
    trial = trial_rows(topology, federation, range(3), Training(6))
    ((name, held),) = trial.inputs.items()
    assert (len(trial), trial.batch) == (12, 6)
    owners = [set(client.train.x[:, 0].tolist()) for client in federation.clients]
    assert [len(owned & set(held[:, 0].tolist())) for owned in owners] == [4, 4, 4]
    everywhere = torch.cat([client.train.x for client in federation.clients])
    assert trial.spans[name] == (int(everywhere.min()), int(everywhere.max()))
    walked = [pair for pair in make_pairs(trial) if pair.training][3 + COPIED :][: 1 + WALKS]
    seen = {int(token) for pair in walked for half in (pair.one, pair.other) for token in half[name].unique()}
    assert set(range(trial.spans[name][0], trial.spans[name][1] + 1)) <= seen
    # Words that stand in rows alone that are scored: what is released of these counts too.
    for seed in range(3):
        scored = data.clients(2, seed=seed, auxiliary=2, victims=2, validation=0.2)
        assert trial_rows(topology, scored, range(2), Training(4)).spans[name] == (-1, 25)
