"""What a segment keeps beside its weights comes back from a checkpoint as it was, or is refused before it is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.equivalence import check_topology
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Segment, Topology
from splitfed.core.unsaved_state import state_digests
from splitfed.topologies import vanilla
from tests.core.kinds_of_state import STATES
from tests.core.test_unsaved_state import Keeping, WithKeeping, by_hand
from tests.examples import engine_of, read_back
from tests.thinning import thin

ROWS = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
STEPS = list(torch.arange(24).split(4))


def layer(name: str) -> nn.Module:
    make, keep, _ = STATES[name]
    return Keeping(lambda m: setattr(m, "state", make()), lambda m, h: torch.tanh(keep(m, h)))


def made(make: Callable[[], Topology]) -> Topology:
    """Return what `make` does, from the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make()


def cut_behind(name: str, at: str) -> Topology:
    return vanilla(WithKeeping(layer(name)), at, example=ROWS[:8])


def resumes(make: Callable[[], Topology]) -> bool:
    """Hold that a run that goes on from round two is the unbroken one; return False where it is refused before that."""
    unbroken, broken, resumed = (engine_of(made(make), ROWS, torch.arange(24) % 4) for _ in range(3))
    for engine in (unbroken, broken):
        for round_ in range(2):
            engine.train(0, round_, STEPS)
    try:
        state = read_back(broken.state())
    except InvalidInput as error:
        return "no checkpoint can hold it" not in str(error)
    resumed.load_state(state)
    for round_ in range(2, 4):
        for engine in (unbroken, resumed):
            engine.train(0, round_, STEPS)
    for segment, module in unbroken.modules(0).items():
        other = resumed.modules(0)[segment]
        for key, value in module.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key
        assert state_digests(other) == state_digests(module)
    return True


@pytest.mark.parametrize("name", STATES)
def test_a_segment_made_by_hand_resumes_to_the_bit_or_is_refused(name: str) -> None:
    _, _, exact = STATES[name]
    assert resumes(lambda: by_hand(layer(name))) is exact


@pytest.mark.parametrize("name", thin(STATES, 5))
def test_what_a_checkpoint_lacks_is_refused_before_training(name: str) -> None:
    """What hangs on tensors alone, and the order of a set that grows, shows at the first checkpoint."""
    _, _, exact = STATES[name]
    if exact:
        check_topology(by_hand(layer(name)), {"x": ROWS[:8]})
    elif name not in ("sparse_tensor", "set_in_an_order_of_its_own"):
        with pytest.raises(InvalidInput, match=r"attribute|state") as caught:
            check_topology(by_hand(layer(name)), {"x": ROWS[:8]})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at", ["a", "inner"])
@pytest.mark.parametrize("name", thin(STATES, 9))
def test_a_cut_model_resumes_to_the_bit_or_is_refused(name: str, at: str) -> None:
    """A value that the first batch replaces for good is replaced before the cut, and may be of any class."""
    try:
        made(lambda: cut_behind(name, at))
    except InvalidInput as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    resumes(lambda: cut_behind(name, at))


class Sharing(nn.Module):
    """A layer that changes what another one holds, too."""

    def __init__(self, shared: list[Tensor], writes: bool) -> None:
        super().__init__()
        self.fc, self.shared, self.writes = nn.Linear(8, 8), shared, writes

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc(x))
        if self.writes:
            self.shared.append(h.detach().mean(0))
        return h + self.shared[-1]


@pytest.mark.parametrize("role", ["client", "server"])
def test_a_list_that_two_modules_share_is_one_list_again(role: str) -> None:
    def make() -> Topology:
        shared = [torch.zeros(8)]
        layers = Sharing(shared, True), Sharing(shared, False), nn.Linear(8, 4)
        segments = (
            Segment("first", "client", layers[0], ("x",), ("h",)),
            Segment("second", "client", layers[1], ("h",), ("z",)),
            Segment("top", "server", layers[2], ("z",), ("out",)),
        )
        if role == "server":
            segments = (
                Segment("bottom", "client", nn.Sequential(*layers[:2]), ("x",), ("z",)),
                segments[2],
            )
        return Topology("by hand", segments, {"x": "client"}, (Head("out", "server", "client"),))

    assert resumes(make)


class Noting(nn.Module):
    """A model that notes a value of the first layer, and one of the second under the same name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.kind, self.last, self.notes, self.queue = kind, None, {}, deque(maxlen=3)

    def note(self, h: Tensor) -> None:
        mean = h.detach().mean(0)
        if self.kind == "attribute":
            self.last = mean
        elif self.kind == "entry":
            self.notes["last"] = mean
        else:
            self.queue.append(mean)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.a(x))
        self.note(h)
        z = torch.relu(self.b(h))
        self.note(z)
        return {"logits": self.c(z)}


@pytest.mark.parametrize("kind", ["attribute", "entry", "queue"])
@pytest.mark.parametrize("at", ["a", "b"])
def test_what_another_party_holds_of_a_cut_model_is_no_obstacle(kind: str, at: str) -> None:
    assert resumes(lambda: vanilla(Noting(kind), at, example=ROWS[:8]))
