"""FedKD: both models' steps by hand, the compression by hand, who is sent what, bounds and exact plans, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.federated import FedKD
from splitfed.federated.low_rank import compress_update, decompress_update, rank_for_energy
from splitfed.models.mlp import mlp
from splitfed.topologies import local, vanilla
from tests.federated.examples import traits
from tests.federated.methods import (
    ByHand,
    assert_plan_is_counted,
    assert_resumes,
    counted,
    data,
    go,
    net,
    plan_of,
    planned,
    weights,
)


def test_energy_says_how_many_singular_values() -> None:
    # Squares 9, 4, 1, 0 of 14: shares .643, .929, 1.
    values = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert [rank_for_energy(values, share) for share in (0.1, 9 / 14, 0.65, 13 / 14, 0.95, 1.0)] == [1, 1, 2, 2, 3, 3]
    assert rank_for_energy(torch.zeros(3), 0.95) == 1


def test_compression_keeps_what_it_says() -> None:
    turn = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)))[0]
    matrix = turn[:, :3] @ torch.diag(torch.tensor([4.0, 2.0, 0.1])) @ turn[:3]
    update = {"a": matrix, "kernel": matrix.reshape(12, 3, 2, 2), "bias": torch.ones(5), "count": torch.tensor(3)}
    sent = compress_update(update, energy=0.95)
    factors = {"#u": (12, 2), "#s": (2,), "#v": (2, 12)}
    shapes = {f"{name}{mark}": shape for name in ("a", "kernel") for mark, shape in factors.items()}
    assert {name: tuple(t.shape) for name, t in sent.items()} == {**shapes, "bias": (5,), "count": ()}
    back = decompress_update(sent, update)
    assert back["kernel"].shape == (12, 3, 2, 2)
    assert float((back["a"] - matrix).norm()) == pytest.approx(0.1, rel=1e-4)
    torch.testing.assert_close(back["kernel"].reshape(12, 12), back["a"])
    assert torch.equal(back["bias"], update["bias"])
    # 144 numbers in 25 times the rank: from rank 6 on, factors take more than the matrix itself.
    assert "a#u" in compress_update(update, rank=5)
    assert "a" in compress_update(update, rank=6)
    assert {n: t.shape for n, t in compress_update(update, rank=5).items()} == {
        n: t.shape for n, t in compress_update({n: t.to("meta") for n, t in update.items()}, rank=5).items()
    }
    assert set(compress_update({n: t.to("meta") for n, t in update.items()}, energy=0.5)) == set(update)


def test_a_round_by_hand() -> None:
    rows = data(2, rows=160)
    run = go("local", FedKD(rank=2), 2, data=rows, batch_size=512)
    graph = run.engine.topology
    bare, base = [ByHand(graph) for _ in rows.clients], None
    for _ in range(2):
        changes: list[dict[str, Tensor]] = []
        for one, client in zip(bare, rows.clients, strict=True):
            mentee = [m for n, m in one.modules.items() if n.startswith("mentee")]
            if base is not None:
                for module, tensors in zip(mentee, base, strict=True):
                    module.load_state_dict(tensors)
            start = [{k: t.clone() for k, t in m.state_dict().items()} for m in mentee]
            made, y = one(client.train.x), client.train.y
            ce = functional.cross_entropy(made["out"], y), functional.cross_entropy(made["mentee_out"], y)
            below = (ce[0] + ce[1]).detach()
            p, q = functional.softmax(made["out"], 1), functional.softmax(made["mentee_out"], 1)
            to_mentor = (q.detach() * (q.detach() / p).log()).sum(1).mean()
            to_mentee = (p.detach() * (p.detach() / q).log()).sum(1).mean()
            apart = ((made["relu1"].flatten(1) - made["projection"]) ** 2).mean()
            one.step(ce[0] + ce[1] + (to_mentor + to_mentee + apart) / below)
            changes += [{k: t - s[k] for k, t in m.state_dict().items()} for m, s in zip(mentee, start, strict=True)]
            base = start
        sizes, half = [len(c.train) for c in rows.clients], len(changes) // 2
        for number, tensors in enumerate(base or ()):
            for key, old in tensors.items():
                mean = sum(
                    n * squeezed(changes[replica * half + number][key]) for replica, n in enumerate(sizes)
                ) / sum(sizes)
                tensors[key] = old + squeezed(mean)
    for replica in range(2):
        bare[replica].assert_as(run, replica)
    names = [n for n in bare[0].modules if n.startswith("mentee")]
    for name, tensors in zip(names, base or (), strict=True):
        for key, tensor in tensors.items():
            torch.testing.assert_close(run.method_state["mentee"][f"{name}/{key}"], tensor, rtol=1e-5, atol=1e-6)


def squeezed(tensor: Tensor) -> Tensor:
    """Return the best approximation of rank 2, where two factors take less than the matrix."""
    if tensor.dim() < 2 or 2 * (sum(tensor.shape) + 1) >= tensor.numel():
        return tensor
    u, s, v = torch.linalg.svd(tensor, full_matrices=False)
    return (u[:, :2] * s[:2]) @ v[:2]


def test_a_client_holds_the_mentee_that_the_server_had() -> None:
    rows = data(4)
    run = go("local", FedKD(), 6, data=rows, schedule=plan_of("local", clients_per_round=2))
    newest = run.method_state["version"]
    assert newest == 6
    seen = run.method_state["seen"]
    bases = {replica: next(iter(run.learners[replica].objectives.values())).base for replica in range(4)}  # type: ignore[attr-defined]
    known = [replica for replica in range(4) if seen.get(str(replica)) == newest - 1]
    assert len(known) == 2
    one, other = (bases[replica] for replica in known)
    # One was sent updates and the other may have been sent it whole: the same bits.
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_who_missed_an_update_is_sent_the_whole_mentee() -> None:
    class One:
        """A client that notes what it is sent; there is no tutor, as in a plan."""

        topology = local(net(), ("relu1",))

        def __init__(self, replica: int) -> None:
            self.replica, self.objectives = replica, dict[str, Any]()

        def receive(self, kind: str, tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
            told[self.replica] = kind
            return tensors

    told: dict[int, str] = {}
    mentee = {"mentee/w": torch.zeros(2)}
    state = {"mentee": mentee, "update": mentee, "version": 3, "seen": {"0": 3, "1": 2, "2": 1}}
    FedKD().query([One(replica) for replica in range(4)], 3, state)  # type: ignore[misc]
    assert told == {1: "update", 2: "weights", 3: "weights"}
    assert state["seen"] == {"0": 3, "1": 3, "2": 3, "3": 3}


def test_a_plan_by_energy_is_an_upper_bound_and_by_rank_exact() -> None:
    method = FedKD(energy=0.5, last_energy=0.5)
    wide = {"topology": local(net(0, (24, 16)), ("relu1",)), "schedule": plan_of("local", clients_per_round=2)}
    run, found = go("local", method, 4, **wide), planned("local", method, 4, **wide)
    assert found.at_most == "fedkd: as if every matrix of an update were sent whole"
    sent = counted(run)
    assert found.flows.keys() == sent.keys()
    assert all(found.flows[flow][0] == sent[flow][0] for flow in sent)
    assert all(found.flows[flow][1] >= sent[flow][1] for flow in sent)
    assert found.bytes > run.bytes
    exact = FedKD(rank=2)
    assert traits(exact).at_most is None
    assert_plan_is_counted("local", exact, 4, **wide)
    assert set(run.engine.traffic.by_kind()) == {"weights", "update"}


@pytest.mark.parametrize("rounds", [2, 3])
def test_the_energy_rises_with_the_rounds_of_the_run(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def heard(update: Any, energy: float | None = None, rank: int | None = None) -> Any:
        asked.append(energy)
        return compress_update(update, energy, rank)

    monkeypatch.setattr("splitfed.federated.fedkd.compress_update", heard)
    run = go("local", FedKD(), rounds, data=data(2))
    shares = list(dict.fromkeys(asked))
    assert shares == pytest.approx([0.95 + 0.03 * (t + 1) / rounds for t in range(rounds)])
    assert shares[-1] == pytest.approx(0.98)
    assert isinstance(run.method, FedKD)
    assert run.method.over == rounds
    asked.clear()
    go("local", FedKD(over=1), rounds, data=data(2))
    assert asked == pytest.approx([0.98] * len(asked))


def test_mentors_stay_and_mentees_are_shared() -> None:
    run = go("local", FedKD(), 2)
    assert {name.split("/")[0] for name in run.method_state["mentee"]} == {"mentee_body", "mentee_head"}
    assert not torch.equal(weights(run, 0)["head/fc3.weight"], weights(run, 1)["head/fc3.weight"])
    assert set(run.history[-1]["test"]["method"]) == {"mentee"}


def test_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    assert_resumes("local", FedKD(), tmp_path, schedule=plan_of("local", clients_per_round=2, drop_out=0.2))


def test_a_small_mentee_for_mentors_of_any_make_learns() -> None:
    rows = sf.data.digits().clients(2, auxiliary=0, victims=0)
    one, other = local(net(1, (32, 16)), ("relu1",)), local(net(2, (24,)), ("relu1",))
    small = local(net(3, (8,)), ("relu1",))
    run = go("local", FedKD(mentee=small), 6, topology=[one, other], data=rows)
    assert min(*run.history[-1]["test"]["method"]["mentee"], run.accuracy) > 0.5, "chance is .1"
    assert weights(run, 0)["projection/linear.weight"].shape == (32, 8)
    assert weights(run, 1)["projection/linear.weight"].shape == (24, 8)
    with pytest.raises(
        InvalidInput, match="fedkd averages every client's mentee; that of client 1 has another architecture"
    ):
        go("local", FedKD(), topology=[one, other], data=rows)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"energy": 0.0}, "fedkd energy=0"),
        ({"last_energy": 1.1}, "fedkd last_energy=1.1"),
        ({"over": 0}, "fedkd over=0"),
        ({"rank": 0}, "fedkd rank=0"),
        ({"mentee": torch.nn.Linear(2, 2)}, "fedkd mentee=Linear is not allowed"),
    ],
)
def test_parameters_out_of_range_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        FedKD(**arguments)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="fedkd averages the mentees itself, and the schedule averages client"):
        go("vanilla", FedKD())
    with pytest.raises(InvalidInput, match="fedkd mentee trains whole models"):
        go("local", FedKD(mentee=vanilla(net(), "relu1")))
    with pytest.raises(InvalidInput, match="fedkd averages the mentees itself, and the schedule averages client"):
        go("local", FedKD(), schedule="splitfed_v1")
    with pytest.raises(InvalidInput, match="topology 'local' has no embedding for fedkd"):
        go("local", FedKD(), topology=local(net()))
    other = mlp((1, 8, 8), 7, (8,))
    with pytest.raises(
        InvalidInput, match=r"the model returns \(7,\) a row at 'mentee_out'; classification here needs"
    ):
        go("local", FedKD(mentee=local(other, ("relu1",))))
