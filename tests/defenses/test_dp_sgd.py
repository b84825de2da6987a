"""DP-SGD in split models: what reaches the optimizer, by hand and against Opacus on the uncut model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.defense import Defense
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, stream, wide_generator
from splitfed.core.tasks import Task, classification
from splitfed.core.topology import Topology, member
from splitfed.defenses import DpSgd
from splitfed.defenses.private_noise import gaussian
from splitfed.engines.local import LocalEngine
from splitfed.topologies import multi_hop, u_shaped, vanilla, vertical
from tests.examples import InPlaceAfterCut, Whole, columns, engine_of, images, placed

FREE = Optim("SGD", {"lr": 1.0})


class Mixed(nn.Module):
    """Layers with a formula of ours, layers of Opacus' and layers of neither, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.relu1 = nn.ReLU(inplace=True)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 2, 2, 2)
        self.flat = nn.Flatten()
        self.fc1 = nn.Linear(2 * 16 * 16, 10)
        self.drop = nn.Dropout(0.3)
        self.fc2 = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(self.flat(self.up(self.norm(self.relu1(self.conv1(x))))))
        return self.fc2(torch.tanh(self.fc2(torch.tanh(self.drop(h)))))


class Begun(nn.Module):
    """A weight of its own before the tokens of every row, as of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 6))
        self.drop = nn.Dropout(0.0)

    def forward(self, h: Tensor) -> Tensor:
        return self.drop(torch.cat([self.first.expand(len(h), -1, -1), h], 1))


class Embedded(nn.Module):
    """One row of positions for all rows, an embedding with padding, and a layer of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(16, 6)
        self.position = nn.Embedding(4, 6)
        self.word = nn.Embedding(3, 6, padding_idx=0)
        self.begun = Begun()
        self.pair = nn.Bilinear(6, 6, 5)
        self.top = nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x.reshape(-1, 4, 16)) + self.position(torch.arange(4).unsqueeze(0))
        h = self.begun(h + self.word((x.flatten(1)[:, :4] * 3).abs().long() % 3))
        return self.top(self.pair(torch.tanh(h[:, 0] + h[:, 1]), h.mean(1)))


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    with stream(derive(0, "model")):
        return factory()


def noise_of(engine: LocalEngine, topology: Topology, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    """The noise of the defense at position 0, by the whole model's names: what the documentation says is drawn."""
    found = {}
    for role in topology.roles:
        party = engine.party(0, role)
        stamp = engine.run_parties.replicas[0].stamp("train", 0, step)
        drawn = wide_generator(0, "dp_sgd", member(role, 0) if role in topology.data_roles else role, role, 0, *stamp)
        for segment in topology.segments_of(role):
            for name, weight in party.state.modules[segment.name].named_parameters():
                found[segment.full(name)] = gaussian(weight.shape, drawn) * scale
    return found


def opacus_steps(
    model: nn.Module,
    optim: Optim,
    batches: Sequence[Tensor],
    expected: float,
    loss: Callable[[nn.Module, Tensor], Tensor],
    noises: Sequence[dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    max_norm: float,
    multiplier: float,
) -> None:
    """Train the uncut `model` with Opacus as it comes, but for the noise, which is given: by name, one a step."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer, optimizer

    wrapped = GradSampleModule(model, strict=False)
    inner, _ = optim.build(model.parameters())
    private = DPOptimizer(
        inner, noise_multiplier=multiplier, max_grad_norm=max_norm, expected_batch_size=expected, loss_reduction="mean"
    )
    for rows, noise in zip(batches, noises, strict=True):
        given = iter([noise[name] for name, _ in model.named_parameters()])
        monkeypatch.setattr(optimizer, "_generate_noise", lambda std, given=given, **_: std * next(given))
        private.zero_grad()
        loss(wrapped, rows).backward()
        private.step()


ROUNDED = 1e-7
"""Noise is rounded to 2^-30 of its scale, and made larger by 2^-30 times the root of the number of weights."""

BUILDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Topology]]] = {
    "vanilla": (InPlaceAfterCut, lambda m: vanilla(m, "pool")),
    "u_shaped": (InPlaceAfterCut, lambda m: u_shaped(m, ("pool", "fc1"))),
    "multi_hop": (InPlaceAfterCut, lambda m: multi_hop(m, ("pool", "fc1"))),
}
OPTIMS = {
    "momentum": Optim("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
    "adam": Optim("Adam", {"lr": 0.01}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optim", OPTIMS.values(), ids=OPTIMS)
@pytest.mark.parametrize("poisson", [False, True])
@pytest.mark.parametrize("name", BUILDS)
def test_joint_clipping_equals_opacus_on_the_uncut_model(
    name: str, poisson: bool, optim: Optim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same noise, same rows, ten steps in double precision; with Poisson sampling batches have sizes of their own."""
    factory, build = BUILDS[name]
    model = made(factory).double()
    uncut, topology, (x, y) = copy.deepcopy(model), build(model), images(64)
    x = x.double()
    defense = DpSgd(max_norm=0.7, noise_multiplier=0.8, clip="joint")
    expected = 8.0
    sizes = [3, 8, 1, 12, 5, 9, 4, 7, 10, 5] if poisson else [8] * 8
    batches = list(torch.randperm(64, generator=torch.Generator().manual_seed(3)).split(sizes))
    engine = engine_of(topology, x, y, optim=optim, defenses=[defense], expected=[expected] if poisson else None)
    engine.train(0, 0, batches)
    # Opacus' hooks allow for no operation in place after a layer; ours do.
    uncut.train().relu.inplace = False
    opacus_steps(
        uncut,
        optim,
        batches,
        expected,
        lambda m, rows: functional.cross_entropy(m(x[rows]), y[rows]),
        [noise_of(engine, topology, step) for step in range(len(batches))],
        monkeypatch,
        0.7,
        0.8,
    )
    for weight, value in topology.state_dict(engine.modules(0)).items():
        assert torch.allclose(value, uncut.state_dict()[weight], rtol=ROUNDED, atol=ROUNDED), weight


@pytest.mark.filterwarnings("ignore")
def test_joint_clipping_equals_opacus_on_a_vertical_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels are at one of the parties that hold columns; three parties clip by their joint norm."""
    x, y = columns({"bank": 5, "shop": 3}, rows=40)
    x = {role: t.double() for role, t in x.items()}
    with stream(derive(0, "model")):
        bottoms = {"bank": nn.Linear(5, 4), "shop": nn.Sequential(nn.Linear(3, 4), nn.Tanh())}
        top = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 10)).double()
    bottoms = {role: module.double() for role, module in bottoms.items()}
    topology = vertical(bottoms, top, labels="bank", task=classification(10))
    whole = Whole(copy.deepcopy(bottoms), copy.deepcopy(topology.segment("fusion").module), top=copy.deepcopy(top))
    batches = list(torch.arange(40).split(10))
    engine = placed(
        topology, x, {"top_out": y}, optim=FREE, defenses=[DpSgd(max_norm=0.5, noise_multiplier=1.1, clip="joint")]
    )
    engine.train(0, 0, batches)
    noises = [noise_of(engine, topology, step) for step in range(4)]
    opacus_steps(
        whole,
        FREE,
        batches,
        10,
        lambda m, rows: functional.cross_entropy(m({role: t[rows] for role, t in x.items()}), y[rows]),
        noises,
        monkeypatch,
        0.5,
        1.1,
    )
    for name, value in topology.state_dict(engine.modules(0)).items():
        assert torch.allclose(value, whole.state_dict()[name], rtol=ROUNDED, atol=ROUNDED), name


def steps_of(topology: Topology, x: Tensor, y: Tensor, rows: Tensor, *defenses: Defense) -> dict[str, Tensor]:
    """What one step of SGD at rate one takes away from every weight: the gradient that the optimizer saw."""
    before = {n: t.clone() for n, t in topology.state_dict().items()}
    engine = engine_of(topology, x, y, optim=FREE, defenses=defenses)
    engine.train(0, 0, [rows])
    return {n: before[n] - t for n, t in topology.state_dict(engine.modules(0)).items()}


def rows_gradients(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor) -> list[dict[str, Tensor]]:
    """Every row's own gradient, a row at a time and by autograd."""
    found = []
    for row in rows.tolist():
        model.zero_grad()
        functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("guarded", [("client",), ("server",), ("client", "server")])
@pytest.mark.parametrize("name", ["vanilla", "u_shaped", "multi_hop", "mixed", "embedded"])
def test_each_party_clips_its_own_part(name: str, guarded: tuple[str, ...]) -> None:
    """Without noise the optimizer sees the mean of rows clipped to the party's norm; elsewhere the plain mean."""
    others = {
        "mixed": (Mixed, lambda m: u_shaped(m, ("norm", "fc1"))),
        "embedded": (Embedded, lambda m: vanilla(m, "begun", example=images(4)[0].double())),
    }
    factory, build = (BUILDS | others)[name]
    model = made(factory).double()
    if name == "mixed":
        model.drop = nn.Identity()
    topology, (x, y) = build(copy.deepcopy(model)), images(20)
    x, rows = x.double(), torch.arange(3, 15)
    norms = {"client": 0.01, "server": 0.05}
    defense = DpSgd(max_norm={r: norms[r] for r in guarded}, noise_multiplier=0.0, roles=guarded)
    seen = steps_of(topology, x, y, rows, defense)
    alone = rows_gradients(model, x, y, rows)
    clipped = 0
    for role in topology.roles:
        names = [s.full(n) for s in topology.segments_of(role) for n, _ in s.module.named_parameters()]
        total = {n: torch.zeros_like(alone[0][n]) for n in names}
        for row in alone:
            length = math.sqrt(sum(float(row[n].square().sum()) for n in names))
            factor = min(1.0, norms[role] / length) if role in guarded else 1.0
            clipped += factor < 1
            for n in names:
                total[n] += factor * row[n]
        for n in names:
            assert torch.allclose(seen[n], total[n] / len(rows), rtol=2e-5, atol=1e-9), n
    assert clipped > 0


def squared() -> Task:
    """Half the squared error, so that a linear model's gradient is (w x - y) x."""
    return Task("regression", lambda o, y: (o.flatten() - y).square().mean() / 2, lambda o, y: 0.0, "none", 1)


def test_a_linear_model_by_hand() -> None:
    """Two weights of one, c at the client and s at the server, of which s sees a release c x; y = 0.

    x = 3: output 3, gradients c: 9, s: 9, clipped to 1 and 2. x = 0.5: .25 and .25, not clipped. With x = 0 in a batch
    of three: the means are 1.25 / 3 and 2.25 / 3.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
    topology = vanilla(model, "0").with_task(squared())
    x = torch.tensor([[3.0], [0.5], [0.0]], dtype=torch.float64)
    engine = placed(
        topology,
        {next(iter(topology.inputs)): x},
        {topology.heads[0].value: torch.zeros(3, dtype=torch.float64)},
        optim=FREE,
        defenses=[DpSgd(max_norm={"client": 1.0, "server": 2.0}, noise_multiplier=0.0)],
    )
    engine.train(0, 0, [torch.arange(3)])
    found = topology.state_dict(engine.modules(0))
    assert 1 - float(found["0.weight"]) == pytest.approx(1.25 / 3, abs=1e-5)
    assert 1 - float(found["1.weight"]) == pytest.approx(2.25 / 3, abs=1e-5)


@pytest.mark.parametrize("clip", ["party", "joint"])
def test_the_sensitivity_is_what_is_claimed(clip: str) -> None:
    """One row more or less, chosen to be as loud as can be, moves the sum by sqrt(sum C_p²), or by C, and no more."""
    model, (x, y) = made(InPlaceAfterCut).double(), images(12)
    x = x.double()
    x[0] = 1000.0
    norm = {"client": 0.3, "server": 0.4} if clip == "party" else 0.5
    moved = []
    for loud in range(3):
        sums = []
        for rows in (torch.arange(loud, 12), torch.arange(loud + 1, 12)):
            defense = DpSgd(max_norm=norm, noise_multiplier=0.0, clip=clip)
            step = steps_of(vanilla(copy.deepcopy(model), "pool"), x, y, rows, defense)
            sums.append(torch.cat([t.flatten() for t in step.values()]) * len(rows))
        moved.append(float((sums[0] - sums[1]).norm()))
    assert max(moved) <= 0.5 * (1 + 1e-9)
    assert moved[0] > 0.5 * 0.999


def test_noise_is_sigma_times_the_norm_fresh_and_the_same_again() -> None:
    """Zero weights rows: an empty batch of expected size 4 moves every weight by noise of sigma C / 4."""
    topology = vanilla(nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.Linear(100, 10)), "1")
    (x, y), defense = images(8), DpSgd(max_norm={"client": 2.0, "server": 5.0}, noise_multiplier=3.0)

    def moves(seed: int = 0) -> list[dict[str, Tensor]]:
        engine = engine_of(topology, x, y, optim=FREE, defenses=[defense], expected=[4.0], seed=seed)
        found, last = [], {n: t.clone() for n, t in topology.state_dict().items()}
        for step in range(2):
            assert engine.train(0, 0, [torch.empty(0, dtype=torch.int64)], first=step) == []
            now = {n: t.clone() for n, t in topology.state_dict(engine.modules(0)).items()}
            found.append({n: last[n] - now[n] for n in now})
            last = now
        assert engine.traffic.messages("train") == 0
        counts = engine.run_parties.participation[0]
        assert (counts.steps, counts.most) == (2, 0)
        return found

    first, second = moves()
    for name, norm in (("1.weight", 2.0), ("2.weight", 5.0)):
        drawn = first[name].flatten() / (3.0 * norm / 4)
        n = len(drawn)
        assert abs(float(drawn.std()) - 1) < 4 / math.sqrt(2 * n)
        assert abs(float(drawn.mean())) < 4 / math.sqrt(n)
        assert abs(float(torch.corrcoef(torch.stack([drawn, second[name].flatten()]))[0, 1])) < 4 / math.sqrt(n)
    again, other = moves(), moves(seed=1)
    assert torch.allclose(again[0]["1.weight"], first["1.weight"], atol=1e-6)
    assert not torch.allclose(other[0]["1.weight"], first["1.weight"], atol=1e-2)


def test_an_empty_batch_moves_no_unguarded_weight() -> None:
    topology, (x, y) = vanilla(made(InPlaceAfterCut), "pool"), images(8)
    defense = DpSgd(noise_multiplier=1.0, roles=("server",))
    engine = engine_of(topology, x, y, defenses=[defense], expected=[4.0])
    engine.train(0, 0, [torch.empty(0, dtype=torch.int64)])
    before, after = topology.state_dict(), topology.state_dict(engine.modules(0))
    assert torch.equal(before["conv.weight"], after["conv.weight"])
    assert not torch.equal(before["fc1.weight"], after["fc1.weight"])


def test_removed_it_trains_otherwise_and_a_wide_norm_without_noise_changes_nothing() -> None:
    topology, (x, y), rows = vanilla(made(InPlaceAfterCut).double(), "pool"), images(12), torch.arange(12)
    x = x.double()
    plain = steps_of(topology, x, y, rows)
    wide = steps_of(topology, x, y, rows, DpSgd(max_norm=1e6, noise_multiplier=0.0))
    tight = steps_of(topology, x, y, rows, DpSgd(max_norm=1e-3, noise_multiplier=0.0))
    noisy = steps_of(topology, x, y, rows, DpSgd(max_norm=1e6, noise_multiplier=1e-6))
    for name, value in plain.items():
        assert torch.allclose(value, wide[name], rtol=1e-9, atol=1e-12), name
        assert not torch.allclose(value, tight[name], rtol=1e-2, atol=1e-9), name
        assert not torch.allclose(value, noisy[name], rtol=1e-2, atol=1e-9), name


def test_dropout_is_drawn_as_without_the_defense() -> None:
    """The same masks on both ways, so without clipping and noise the step is the undefended one."""
    topology, (x, y), rows = u_shaped(made(Mixed).double(), ("norm", "fc1")), images(12), torch.arange(12)
    plain = steps_of(topology, x.double(), y, rows)
    wide = steps_of(topology, x.double(), y, rows, DpSgd(max_norm=1e6, noise_multiplier=0.0))
    for name, value in plain.items():
        assert torch.allclose(value, wide[name], rtol=1e-8, atol=1e-12), name


def test_frozen_weights_stay_and_cost_nothing() -> None:
    """Batch norm that its owner has put in evaluation mode is a plain scale; its frozen weights are left alone."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))
    model[1].requires_grad_(False)
    model[2].eval()
    topology, (x, y) = vanilla(model, "1"), images(12)
    defense = DpSgd(noise_multiplier=1.0)
    assert defense.guards(topology) == ("server",)
    step = steps_of(topology, x, y, torch.arange(12), defense)
    assert float(step["1.weight"].abs().sum()) == 0
    assert float(step["2.weight"].abs().min()) > 0


def test_nothing_stays_behind_on_the_modules() -> None:
    """Views and attackers get copies of modules: no hook and no gradient may go along."""
    topology, (x, y) = vanilla(made(InPlaceAfterCut), "pool"), images(12)
    engine = engine_of(topology, x, y, defenses=[DpSgd(noise_multiplier=1.0, clip="joint")])
    engine.train(0, 0, [torch.arange(12)])
    for party in engine.parties.values():
        for module in (inner for m in party.state.modules.values() for inner in m.modules()):
            assert not module._forward_hooks
            assert not module._backward_hooks
        assert all(p.grad is None for m in party.state.modules.values() for p in m.parameters())


def test_norms_cross_as_messages_that_are_counted_and_recorded() -> None:
    topology, (x, y) = u_shaped(made(InPlaceAfterCut), ("pool", "fc1")), images(12)
    engine = engine_of(topology, x, y, defenses=[DpSgd(noise_multiplier=1.0, clip="joint")])
    with engine.record_party("server") as recorder:
        engine.train(0, 0, [torch.arange(12)])
        engine.rehearse(0, "train", 0)
    heard = recorder.view().select(kind="norm").messages
    assert [(m.sender, m.edge, m.tensors["squared norm"].shape, m.stamp.phase) for m in heard] == [
        ("client0", "norms->server", (12,), "train")
    ]
    assert engine.traffic.by_kind()["norm"] == 2 * 12 * 4
