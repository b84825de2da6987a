"""Buffers and weights that `forward` changes, also where torch counts no change: held by one party, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.aggregation.running_mean import RunningMean
from splitfed.core.cutting import cut
from splitfed.core.equivalence import check_topology
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Segment, Topology
from splitfed.data import from_arrays
from splitfed.topologies import vanilla
from tests.core.cut_idioms import Net
from tests.core.idioms import Idiom, build, check_training, rows
from tests.thinning import thin


def mean(h: Tensor) -> Tensor:
    return h.detach().mean(0)


def without_counting(m: Any, h: Tensor) -> None:
    with torch.no_grad():
        m.n.resize_(8).copy_(mean(h))


def by_numpy(m: Any, h: Tensor) -> None:
    m.n.numpy()[:] = mean(h).numpy()


def replaced(m: Any, h: Tensor) -> None:
    m.n.data = mean(h)


def counted(m: Any, h: Tensor) -> None:
    m.n.data.add_(h.detach().abs().max() > 0)


def seldom(m: Any, h: Tensor) -> None:
    m.n.data.copy_(torch.where(h.detach().abs().max() > 1e6, m.n + 1, m.n))


def part(m: Any, h: Tensor) -> None:
    m.n.data[:4] = mean(h)[:4]


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "data": lambda m, h: m.n.data.mul_(0.9).add_(mean(h) * 0.1),
    "copy": lambda m, h: m.n.data.copy_(mean(h)),
    "detach": lambda m, h: m.n.detach().copy_(mean(h)),
    "part": part,
    "replaced": replaced,
    "no_grad": without_counting,
    "counted": counted,
    "seldom": seldom,
    "set": lambda m, h: m.n.set_(mean(h)),
    "numpy": by_numpy,
}
SEEN = "changes 'n' by what is no operation on tensors (set_, NumPy)"


def late(n: Tensor) -> Tensor:
    """Return a factor that no comparison meets before the ninth batch."""
    return torch.where(n.max() > 8, 2.0, 1.0)


def crossing(
    write: Callable[[Any, Tensor], Any], persistent: bool, read_first: bool = False
) -> Callable[[], nn.Module]:
    """Return a model that writes its buffer in front of the cut behind "b", and reads it behind; or the other way."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.a(x * 1.0 if m.training else x))
        if read_first:
            h = m.b(h * late(m.n))
            write(m, h)
            return m.c(h)
        write(m, h)
        return m.c(m.b(h) * late(m.n))

    def make() -> nn.Module:
        model = Net(forward)
        model.register_buffer("n", torch.zeros(8), persistent=persistent)
        return model

    return make


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", thin(WRITES, 3))
@pytest.mark.parametrize("read_first", [False, True])
def test_a_buffer_that_one_party_changes_and_another_reads_is_refused_by_name(
    name: str, persistent: bool, read_first: bool
) -> None:
    idiom = Idiom(crossing(WRITES[name], persistent, read_first), at=("b",))
    with pytest.raises(InvalidInput, match=r"'n'") as caught:
        vanilla(build(idiom), "b", example=rows(idiom, 8))
    wanted = ["'n' would be shared by roles", "'n' changes and is read on two sides of a cut", SEEN]
    wanted.append("is another after the step")
    assert any(text in str(caught.value) for text in wanted)
    assert "\n" not in str(caught.value)


def test_a_weight_that_one_party_writes_and_another_reads_is_refused_by_name() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.a(x))
        m.scale.data.copy_(mean(h))
        return m.c(m.b(h) * m.scale)

    with pytest.raises(InvalidInput, match=r"parameter 'scale' would be shared by roles"):
        vanilla(Net(forward, scale=nn.Parameter(torch.ones(8))), "b", example=torch.randn(8, 8))


def counting(m: Any, x: Tensor) -> Tensor:
    """Count batches in front of the cut, and read the count behind it: whoever holds it can count."""
    h = torch.relu(m.a(x * 1.0 if m.training else x))
    m.n.data.add_(1)
    return m.c(m.b(h) * late(m.n))


def clipping(m: Any, x: Tensor) -> Tensor:
    m.scale.data.clamp_(-0.02, 0.02)
    return m.c(m.b(torch.relu(m.a(x))) * m.scale)


class Codebook(nn.Module):
    """Quantises to the nearest of sixteen vectors, which follow what they stand for, written as their authors do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(16, 8))
        self.register_buffer("sizes", torch.zeros(16), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        nearest = torch.cdist(h, self.codes).argmin(1)
        chosen = nn.functional.one_hot(nearest, 16).type_as(h)
        if self.training:
            self.sizes.data.mul_(0.9).add_(0.1 * chosen.sum(0))
            self.codes.data.mul_(0.9).add_(0.1 * (chosen.t() @ h.detach()) / (self.sizes.unsqueeze(1) + 1e-3))
        return h + (self.codes[nearest] - h).detach()


def buffered(forward: Callable[[Any, Tensor], Any], persistent: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net(forward)
        model.register_buffer("n", torch.zeros(8), persistent=persistent)
        return model

    return make


EXACT = {
    "counter_in_front": Idiom(buffered(counting, True), at=("b",), replayed=True),
    "counter_in_front_not_saved": Idiom(buffered(counting, False), at=("b",), replayed=True),
    "clipped_weight": Idiom(lambda: Net(clipping, scale=nn.Parameter(torch.ones(8))), at=("b",), replayed=True),
    "codebook_in_front": Idiom(lambda: Net(lambda m, x: m.c(m.b(m.v(m.a(x)))), v=Codebook()), at=("b",), replayed=True),
    "codebook_behind": Idiom(lambda: Net(lambda m, x: m.c(m.v(m.b(m.a(x)))), v=Codebook()), at=("b",), replayed=True),
}


@pytest.mark.parametrize("name", thin(EXACT, 2))
def test_what_its_holder_changes_by_itself_trains_as_in_the_uncut_model(name: str) -> None:
    check_training(EXACT[name])


def test_a_counter_behind_the_party_that_reads_it_is_refused() -> None:
    """The reader has run its last operation before the counter is changed."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.b(torch.relu(m.a(x * 1.0 if m.training else x)) * late(m.n))
        m.n.data.add_(1)
        return m.c(h)

    with pytest.raises(InvalidInput, match=r"'n' changes and is read on two sides of a cut"):
        cut(buffered(forward, persistent=False)(), "b", torch.randn(8, 8))


class Stale(nn.Module):
    """Changes a buffer that it shares with nobody once it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros(8), persistent=False)

    def __deepcopy__(self, memo: Any) -> Stale:
        made = Stale()
        made.load_state_dict(self.state_dict())
        made.n += 1
        return made

    def forward(self, x: Tensor) -> Tensor:
        self.n.data.add_(1)
        found: Tensor = self.fc(x) * late(self.n)
        return found


def test_buffers_are_compared_that_are_no_part_of_the_state() -> None:
    segments = (
        Segment("bottom", "client", Stale(), ("x",), ("h",)),
        Segment("top", "server", nn.Linear(8, 4), ("h",), ("out",)),
    )
    topology = Topology("by hand", segments, {"x": "client"}, (Head("out", "server", "client"),))
    with pytest.raises(InvalidInput, match=re.escape("in training buffer 'n' in 'bottom' is another after the step")):
        check_topology(topology, {"x": torch.randn(8, 8)})


class History(nn.Module):
    """Keeps the means of the batches so far, one more with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("means", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.means = torch.cat([self.means, x.detach().mean().view(1)])
        return self.b(torch.tanh(self.a(x - self.means.sum())))  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["sequential", "splitfed_v1"])
def test_a_buffer_that_grows_is_handed_on_and_has_no_mean_over_clients(schedule: str) -> None:
    """The next client had one of another shape, which was an error of torch in the middle of training."""
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    data = from_arrays(x, torch.arange(60) % 3).clients(2, auxiliary=4, victims=4)
    few = replace(data.clients[1], train=data.clients[1].train.rows(torch.arange(8)))
    data = replace(data, clients=(data.clients[0], few))
    topology = vanilla(History(), "a", example=x[:8])

    def go() -> splitfed.Run:
        return splitfed.train(topology, data, schedule=schedule, rounds=1, batch_size=8)

    if schedule == "splitfed_v1":
        with pytest.raises(InvalidInput, match="buffer 'means' of segment 'bottom' changes its shape in training"):
            go()
        return
    batches = sum(-(-len(client.train) // 8) for client in data.clients)
    assert go().state_dict(0)["means"].shape == (batches,)


def test_tensors_of_two_shapes_have_no_mean() -> None:
    """A buffer may begin to grow in the middle of training, which no trial before it sees."""
    mean = RunningMean()
    mean.add({"bottom/means": torch.zeros(3)}, 0.5)
    with pytest.raises(InvalidInput, match=r"'bottom/means' has the shapes \(3,\) and \(2,\) at two clients"):
        mean.add({"bottom/means": torch.zeros(2)}, 0.5)
