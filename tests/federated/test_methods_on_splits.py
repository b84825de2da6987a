"""Methods of whole models on split replicas, beside bare loops: what the client holds, and a server that all share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import splitfed as sf
from splitfed.attacks.gradients.inverting_gradients import InvertingGradients
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, generator, stream
from splitfed.core.topology import Topology
from splitfed.federated import MAFML, Apfl, Ditto, FedDistill, FedGen, FedKD, FedMD, FedSgd, Ifca, Method, PFedMe
from splitfed.federated.apfl import Mixture
from splitfed.federated.feddistill import class_means
from splitfed.federated.generator import Generator, diversity
from splitfed.federated.low_rank import compress_update, decompress_update
from splitfed.schedules import Sequential
from splitfed.schedules.base import Training
from splitfed.topologies import local, multi_hop
from tests.federated.methods import (
    BUILDERS,
    assert_nothing_held_twice,
    assert_plan_is_counted,
    assert_resumes,
    built,
    data,
    go,
    net,
    weights,
)

ALONE = Sequential(hand_over="none")
RATE, ROUNDS = 0.05, 3
SPLITS = [shape for shape in BUILDERS if shape != "local"]
Pieces = dict[str, nn.Module]


class Loop:
    """Clients of plain PyTorch around one server: client after client, an epoch a round, SGD without momentum."""

    def __init__(self, topology: Topology, rows: Any) -> None:
        self.topology, self.rows, self.training = topology, rows, Training(16)
        pieces = {s.name: s.module for s in self.topology.segments}
        self.clients = [copy.deepcopy(self._held(pieces, True)) for _ in rows.clients]
        self.server = copy.deepcopy(self._held(pieces, False))
        self.value = self.topology.heads[0].value
        self.drawn: dict[str, Tensor] = {}

    def _held(self, pieces: Pieces, client: bool) -> Pieces:
        names = {s.name for s in self.topology.segments if (s.role in self.topology.data_roles) == client}
        return {name: module for name, module in pieces.items() if name in names}

    def scores(self, client: Pieces, x: Tensor) -> Tensor:
        return self.values(client, x)[self.value]

    def values(self, client: Pieces, x: Tensor) -> dict[str, Tensor]:
        made, modules = dict.fromkeys(self.topology.inputs, x), {**client, **self.server}
        for s in self.topology.segments:
            made[s.outputs[0]] = modules[s.name](*(made[v] for v in s.inputs))
        return made

    def batches(self, replica: int, number: int) -> list[tuple[Tensor, Tensor]]:
        train = self.rows.clients[replica].train
        return [(train.x[rows], train.y[rows]) for rows in self.training.batches(len(train), number, replica)]

    def gradients(self, loss: Tensor, *parts: Pieces) -> list[dict[str, Tensor]]:
        """Return the gradient of `loss` by the name of the weight, of each of these parts."""
        named = [{f"{s}/{n}": p for s, m in part.items() for n, p in m.named_parameters()} for part in parts]
        slopes = iter(torch.autograd.grad(loss, [p for one in named for p in one.values()], materialize_grads=True))
        return [{name: next(slopes) for name in one} for one in named]

    def mean(self, tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the mean over the clients, weighted by their training rows."""
        sizes = torch.tensor([float(len(client.train)) for client in self.rows.clients])
        return {n: sum(t[n] * s for t, s in zip(tensors, sizes / sizes.sum(), strict=True)) for n in tensors[0]}

    def assert_as(self, run: sf.Run) -> None:
        for replica, client in enumerate(self.clients):
            # The own segments of apfl stand inside of a mixture.
            found = {name.replace("/own.", "/"): tensor for name, tensor in weights(run, replica).items()}
            for name, tensor in {**state(client), **state(self.server)}.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def state(pieces: Pieces) -> dict[str, Tensor]:
    return {f"{s}/{n}": p.detach().clone() for s, m in pieces.items() for n, p in m.named_parameters()}


def put(pieces: Pieces, tensors: dict[str, Tensor]) -> None:
    for s, module in pieces.items():
        for n, p in module.named_parameters():
            p.data.copy_(tensors[f"{s}/{n}"])


def move(pieces: Pieces, slope: dict[str, Tensor], rate: float = RATE) -> None:
    for s, module in pieces.items():
        for n, p in module.named_parameters():
            p.data.sub_(slope[f"{s}/{n}"], alpha=rate)


def pfedme(loop: Loop, method: Any) -> dict[str, Tensor]:
    """Theta takes `steps` steps on a batch, the server one with each of them; then w follows."""
    average = state(loop.clients[0])
    for number in range(ROUNDS):
        sent = []
        for replica, theta in enumerate(loop.clients):
            put(theta, average)
            w = {name: tensor.clone() for name, tensor in average.items()}
            for x, y in loop.batches(replica, number):
                for _ in range(method.steps):
                    slope, other = loop.gradients(
                        functional.cross_entropy(loop.scores(theta, x), y), theta, loop.server
                    )
                    now = state(theta)
                    move(theta, {n: g + method.weight * (now[n] - w[n]) for n, g in slope.items()})
                    move(loop.server, other)
                now = state(theta)
                w = {n: t - method.rate * method.weight * (t - now[n]) for n, t in w.items()}
            sent.append(w)
        average = loop.mean(sent)
    return average


def ditto(loop: Loop, method: Any) -> dict[str, Tensor]:
    """The averaged and the own segments of a client go through one server, which learns from both losses."""
    average = state(loop.clients[0])
    shared = [copy.deepcopy(client) for client in loop.clients]
    for number in range(ROUNDS):
        for replica, own in enumerate(loop.clients):
            put(shared[replica], average)
            for x, y in loop.batches(replica, number):
                losses = [functional.cross_entropy(loop.scores(one, x), y) for one in (own, shared[replica])]
                mine, theirs, server = loop.gradients(losses[0] + losses[1], own, shared[replica], loop.server)
                now = state(own)
                move(own, {n: g + method.weight * (now[n] - average[n]) for n, g in mine.items()})
                move(shared[replica], theirs)
                move(loop.server, server)
        average = loop.mean([state(one) for one in shared])
    return average


def apfl(loop: Loop, method: Any) -> dict[str, Tensor]:
    """A mixture of own and averaged segments, and the averaged ones, before one server; alpha steps once a round."""
    average = state(loop.clients[0])
    shared = [copy.deepcopy(client) for client in loop.clients]
    alphas = [torch.tensor(method.alpha, requires_grad=True) for _ in loop.clients]
    for number in range(ROUNDS):
        for replica, own in enumerate(loop.clients):
            put(shared[replica], average)
            for step, (x, y) in enumerate(loop.batches(replica, number)):
                alpha, other = alphas[replica], shared[replica]
                mixture: Any = {s: partial(mixed, own[s], other[s], alpha) for s in own}
                losses = [functional.cross_entropy(loop.scores(one, x), y) for one in (mixture, other)]
                (slope,) = torch.autograd.grad(losses[0], alpha, retain_graph=True)
                mine, theirs, server = loop.gradients(losses[0] + losses[1], own, other, loop.server)
                if step == 0:
                    alphas[replica] = (alpha - RATE * slope).clamp(0.0, 1.0).detach().requires_grad_()
                move(own, mine)
                move(other, theirs)
                move(loop.server, server)
        average = loop.mean([state(one) for one in shared])
    return {**average, **{f"alpha{replica}": alpha.detach() for replica, alpha in enumerate(alphas)}}


def mixed(own: nn.Module, other: nn.Module, alpha: Tensor, x: Tensor) -> Any:
    """What a module says with weights alpha v + (1 - alpha) w, where nothing reaches w."""
    pairs = zip(own.named_parameters(), other.parameters(), strict=True)
    return functional_call(own, {n: alpha * v + (1 - alpha) * w.detach() for (n, v), w in pairs}, (x,))


def fedsgd(loop: Loop, method: Any) -> dict[str, Tensor]:
    """Clients stand still in a round and send the mean gradient of their rows; the server steps on every batch."""
    average = state(loop.clients[0])
    for number in range(ROUNDS):
        sent = []
        for replica, client in enumerate(loop.clients):
            put(client, average)
            sums = {name: torch.zeros_like(tensor) for name, tensor in average.items()}
            rows = 0
            for x, y in loop.batches(replica, number):
                slope, other = loop.gradients(functional.cross_entropy(loop.scores(client, x), y), client, loop.server)
                move(loop.server, other)
                sums, rows = {n: t + len(x) * slope[n] for n, t in sums.items()}, rows + len(x)
            sent.append({n: t / rows for n, t in sums.items()})
        slope = loop.mean(sent)
        average = {n: t - RATE * slope[n] for n, t in average.items()}
    return average


def feddistill(loop: Loop, method: Any) -> dict[str, Tensor]:
    """The others' mean scores of a class are a second target, wherever the scores are made."""
    known: list[dict[str, Tensor]] = [{} for _ in loop.clients]
    for number in range(ROUNDS):
        before = list(known)
        for replica, client in enumerate(loop.clients):
            others = [means for other, means in enumerate(before) if other != replica]
            for x, y in loop.batches(replica, number):
                scores = loop.scores(client, x)
                loss = functional.cross_entropy(scores, y)
                for row, label in zip(scores, y.tolist(), strict=True):
                    goals = [means[str(label)] for means in others if str(label) in means]
                    if goals:
                        goal = torch.stack(goals).mean(0).log_softmax(0)
                        pull = functional.kl_div(row.log_softmax(0), goal, reduction="sum", log_target=True)
                        loss = loss + method.weight * pull / len(y)
                slope, other = loop.gradients(loss, client, loop.server)
                move(client, slope)
                move(loop.server, other)
        for replica, client in enumerate(loop.clients):
            train = loop.rows.clients[replica].train
            with torch.no_grad():
                known[replica] = class_means(loop.scores(client, train.x), train.y)
    return {}


def fedkd(loop: Loop, method: Any) -> dict[str, Tensor]:
    """The split model is the mentee, whose client segments are sent compressed; a whole mentor stands at the client."""
    (mentee, mentor), first = (head.value for head in loop.topology.heads), loop.topology.segments[0].outputs[0]
    shared = {n: t for n, t in state(loop.clients[0]).items() if not n.startswith(("mentor", "projection"))}
    for number in range(ROUNDS):
        sent = []
        for replica, client in enumerate(loop.clients):
            put(client, {**state(client), **shared})
            for x, y in loop.batches(replica, number):
                made = loop.values(client, x)
                a, b = made[mentor], made[mentee]
                losses = functional.cross_entropy(a, y), functional.cross_entropy(b, y)
                p, q = a.softmax(1), b.softmax(1)
                pulls = (q.detach() * (q.detach() / p).log()).sum(1).mean()
                pulls = pulls + (p.detach() * (p.detach() / q).log()).sum(1).mean()
                apart = (made[f"mentor_{first}"].flatten(1) - made["projection"]).square().mean()
                loss = losses[0] + losses[1] + (pulls + apart) / (losses[0] + losses[1]).detach()
                slope, other = loop.gradients(loss, client, loop.server)
                move(client, slope)
                move(loop.server, other)
            change = {n: state(client)[n] - t for n, t in shared.items()}
            sent.append(decompress_update(compress_update(change, 1.0, method.rank), shared))
        mean = decompress_update(compress_update(loop.mean(sent), 1.0, method.rank), shared)
        shared = {n: t + mean[n] for n, t in shared.items()}
    return shared


def ifca(loop: Loop, method: Any) -> dict[str, Tensor]:
    """Two models of the client's segments before one server; a client trains the one of lower loss on its rows."""
    models = [state(loop.clients[0]), dict(loop.drawn)]
    for number in range(ROUNDS):
        chosen = []
        for replica, client in enumerate(loop.clients):
            train, losses = loop.rows.clients[replica].train, []
            for tensors in models:
                put(client, tensors)
                with torch.no_grad():
                    losses.append(float(functional.cross_entropy(loop.scores(client, train.x), train.y)))
            chosen.append(losses.index(min(losses)))
        for replica, client in enumerate(loop.clients):
            put(client, models[chosen[replica]])
            for x, y in loop.batches(replica, number):
                slope, other = loop.gradients(functional.cross_entropy(loop.scores(client, x), y), client, loop.server)
                move(client, slope)
                move(loop.server, other)
        sizes = [len(client.train) for client in loop.rows.clients]
        for cluster in set(chosen):
            members = [r for r, one in enumerate(chosen) if one == cluster]
            total = sum(sizes[r] for r in members)
            models[cluster] = {n: sum(state(loop.clients[r])[n] * sizes[r] for r in members) / total for n in models[0]}  # type: ignore[misc]
    return {f"{i}/{n}": t for i, tensors in enumerate(models) for n, t in tensors.items()}


def fedgen(loop: Loop, method: Any) -> dict[str, Tensor]:
    """One server holds the head and trains the generator, or clients do in a U-shape and send it heads and counts."""
    head = loop.topology.heads[0]
    mine = head.role == "client"
    last, value = loop.topology.segments[-1].name, loop.topology.segments[-1].inputs[0]
    average, known = state(loop.clients[0]), torch.zeros(10, dtype=torch.bool)
    width = loop.values(loop.clients[0], loop.rows.clients[0].train.x)[value].shape[1:]
    with stream(derive(0, "fedgen")):
        made = Generator(method.noise, 10, method.hidden, width)
    adam = torch.optim.Adam(made.parameters(), lr=method.rate)
    steps = [0] * len(loop.clients)
    for number in range(ROUNDS):
        held = [client if mine else loop.server for client in loop.clients]
        counts = [torch.zeros(10, dtype=torch.int64) for _ in loop.clients]
        made.eval()
        for replica, client in enumerate(loop.clients):
            put(client, average)
            seed = derive(0, "tutor", f"client{replica}" if mine else "server")
            for step, (x, y) in enumerate(loop.batches(replica, number)):
                scores = loop.scores(client, x)
                loss = functional.cross_entropy(scores, y)
                counts[replica] += torch.bincount(y, minlength=10)
                top = held[replica][last]
                if number:
                    random = generator(seed, "same label", number, step, replica)
                    with torch.no_grad():
                        goal = top(made(torch.randn(len(y), method.noise, generator=random), y)).softmax(1)
                    pulls = (goal * (goal.log() - scores.log_softmax(1))).sum(1).mean()
                    loss = loss + method.distillation * pulls
                slope, other = loop.gradients(loss, client, loop.server)
                if number:
                    who = replica if mine else 0
                    steps[who] += 1
                    random = generator(seed, "practice", steps[who])
                    drawn = known.nonzero().view(-1)
                    again = drawn[torch.randint(len(drawn), (method.rows,), generator=random)]
                    z = made(torch.randn(method.rows, method.noise, generator=random), again).detach()
                    (more,) = loop.gradients(method.weight * functional.cross_entropy(top(z), again), {last: top})
                    mended = slope if mine else other
                    mended |= {n: mended[n] + g for n, g in more.items()}
                move(client, slope)
                move(loop.server, other)
        average = loop.mean([state(client) for client in loop.clients])
        tops, told = [one[last] for one in (held if mine else held[:1])], torch.stack(counts)
        told = told if mine else told.sum(0, keepdim=True)
        random, classes = generator(0, "fedgen", number), (told.sum(0) > 0).nonzero().view(-1)
        made.train()
        for _ in range(method.steps):
            y = classes[torch.randint(len(classes), (method.batch,), generator=random)]
            noise = torch.randn(method.batch, method.noise, generator=random)
            z = made(noise, y)
            parts = [t[y] / told.sum(0)[y] for t in told]
            losses = [
                (functional.cross_entropy(top(z), y, reduction="none") * p).mean()
                for top, p in zip(tops, parts, strict=True)
            ]
            loss = sum(losses) + method.diversity * diversity(noise, z)
            for weight, slope in zip(
                made.parameters(), torch.autograd.grad(loss, list(made.parameters())), strict=True
            ):
                weight.grad = slope
            adam.step()
        known = known | (told.sum(0) > 0)
    return average


HAND: dict[str, tuple[Method, Callable[[Loop, Any], dict[str, Tensor]]]] = {
    "pfedme": (PFedMe(weight=2.0, steps=2, rate=0.1), pfedme),
    "ditto": (Ditto(weight=0.5), ditto),
    "fedsgd": (FedSgd(), fedsgd),
    "feddistill": (FedDistill(weight=0.5), feddistill),
    "fedkd": (FedKD(rank=2), fedkd),
    "ifca": (Ifca(), ifca),
    "apfl": (Apfl(alpha=0.3), apfl),
    "fedgen": (FedGen(weight=0.5, distillation=0.7, noise=4, hidden=8, steps=3, rows=8, batch=8), fedgen),
}


@pytest.mark.parametrize("shape", SPLITS)
@pytest.mark.parametrize("name", HAND)
def test_rounds_beside_a_bare_loop(name: str, shape: str) -> None:
    method, by_hand = HAND[name]
    rows = data()
    run = go(shape, method, ROUNDS, data=rows, schedule=ALONE, optimizer=Optim("SGD", {"lr": RATE}))
    loop = Loop(run.engine.topology if name == "fedkd" else built(shape), rows)
    if isinstance(method, Ifca):
        loop.drawn = method._draw_weights(built(shape), 1, 0)
    average = by_hand(loop, method)
    if name != "fedsgd":  # whose clients hold what they were sent last, of which the server has taken a step
        loop.assert_as(run)
    for key, tensor in average.items():
        torch.testing.assert_close(averaged(run, name)[key], tensor, rtol=1e-5, atol=1e-6)
    assert name != "ifca" or len(set(run.method_state["chosen"].values())) == 2, "both models must have been chosen"


def averaged(run: sf.Run, name: str) -> dict[str, Tensor]:
    """What the aggregation server has averaged, by the names of the bare loops."""
    kept = run.method_state
    if name == "ifca":
        return {f"{i}/{n}": t for i, tensors in enumerate(kept["clusters"]) for n, t in tensors.items()}
    found = {n.removeprefix("shared_"): t for n, t in kept["mentee" if name == "fedkd" else "weights"].items()}
    if name == "apfl":
        found |= {f"alpha{r}": weights(run, r)[f"{run.engine.topology.segments[0].name}/alpha"] for r in range(3)}
    return found


SMALL = FedGen(noise=4, hidden=8, steps=3, rows=8, batch=8, distillation=1.0)
RUNS = [PFedMe(weight=1.0), FedSgd(), Ditto(), Apfl(), FedDistill(), FedKD(rank=2), Ifca(), SMALL]


@pytest.mark.parametrize("shape", SPLITS)
@pytest.mark.parametrize("method", RUNS, ids=lambda method: type(method).__name__)
def test_plans_are_counted_and_runs_resumed_to_the_bit(method: Method, shape: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"schedule": ALONE, "optimizer": Optim("SGD", {"lr": RATE})}
    assert_nothing_held_twice(go(shape, method, 1, **changes))
    assert_plan_is_counted(shape, method, schedule=ALONE)
    assert_resumes(shape, method, tmp_path, **changes)


@pytest.mark.parametrize("method", [MAFML(batch=12), FedMD(batch=12)], ids=lambda method: type(method).__name__)
def test_clients_that_share_public_rows_learn_before_averaged_servers(method: Method) -> None:
    rows = sf.data.digits().rows(range(400)).clients(2, auxiliary=4, victims=4, public=0.2)
    assert go("vanilla", method, 8, data=rows, schedule="splitfed_v3").accuracy > 0.3, "chance is .1"


def test_scores_that_the_server_makes_go_through_no_secure_sum_of_clients() -> None:
    with pytest.raises(
        InvalidInput, match=r"feddistill secure sums what clients send; .* role 'server' makes the scores"
    ):
        go("vanilla", FedDistill(secure=True), 1, schedule=ALONE)


def test_alpha_is_found_behind_the_layers_of_a_defense() -> None:
    run = go("u_shaped", Apfl(), 2, schedule=ALONE, defenses=sf.defenses.ChannelPruning())
    assert run.history[-1]["loss"] is not None


def test_the_mixture_of_a_split_client_predicts_between_its_two_models() -> None:
    """With alpha fixed at one the run predicts as the own segments do; at zero, as the averaged ones."""
    rows = data()
    for alpha in (0.0, 1.0):
        run = go("vanilla", Apfl(alpha=alpha, learns="never"), 2, data=rows, schedule=ALONE)
        modules = run.engine.modules(0, run.newest(0))
        first = built("vanilla").segments[0].name
        mixture = modules[first]
        assert isinstance(mixture, Mixture)
        x = rows.clients[0].test.x
        own = mixture.own if alpha else modules[f"shared_{first}"]
        with torch.no_grad():
            torch.testing.assert_close(mixture.eval()(x), own.eval()(x))


def test_fedkd_takes_the_second_model_that_the_form_lacks() -> None:
    mentor = local(net(3, (20, 12)), ("relu2",))
    run = go("vanilla", FedKD(mentor=mentor), 1, schedule=ALONE)
    assert set(run.history[-1]["test"]["method"]) == {"mentor"}
    assert [head.role for head in run.engine.topology.heads] == ["server", "client"]
    with pytest.raises(InvalidInput, match="fedkd takes no mentor= on whole models: the topology's own model is that"):
        go("local", FedKD(mentor=mentor), 1, topology=local(net(), ("relu1",)))
    with pytest.raises(InvalidInput, match="fedkd takes no mentee= on split models: the topology's own model is that"):
        go("vanilla", FedKD(mentee=mentor), 1, schedule=ALONE)


def test_the_mentor_of_a_split_client_never_leaves_it() -> None:
    """Averaged server copies, client segments by the method: the mentee alone is sent."""
    run = go("u_shaped", FedKD(rank=2), 2, schedule="splitfed_v3")
    sent = {name.partition("/")[0] for name in run.method_state["mentee"]}
    held = {s.name for s in built("u_shaped").segments_of("client")}
    assert sent == held
    assert run.history[-1]["averaged"]


def test_feddistill_follows_the_same_means_behind_several_hops() -> None:
    """Parties beyond the client's neighbours know it by another number: the targets are those of the same client."""
    found = []
    for topology in (built("vanilla"), multi_hop(net(), ("relu1", "relu2"))):
        run = go("vanilla", FedDistill(weight=5.0), 3, topology=topology, schedule="splitfed_v3")
        found.append(run.state_dict(client=0))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("method", [Ditto(), Apfl()], ids=lambda method: type(method).__name__)
def test_a_gradient_of_the_averaged_segments_of_a_split_client_is_inverted(method: Method) -> None:
    seen = sf.Logging(record=sf.Recording(("fed_server",)))
    changes: dict[str, Any] = {"schedule": "splitfed_v3", "batch_size": 1000, "logging": seen}
    run = go("vanilla", method, 1, optimizer=Optim("SGD", {"lr": RATE}), **changes)
    result = run.attack(InvertingGradients(iterations=2, restarts=1), adversary="fed_server", floors=False)[0]
    assert len(result.prediction) == len(data().clients[0].train)
