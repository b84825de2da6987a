"""What federated methods cost: a round of FedAvg, FedProx, FedProto and FML against a bare PyTorch loop of the same.

MNIST-5k as PFLlib prepares it, 20 clients by Dirichlet .1, the CNN of FedAvg, batches of 10, one local epoch, 16 rounds
with an evaluation each, one thread. Every round of ours is followed by the same round of the bare loop, in one process;
the ratio is the median over rounds. Then the time and the memory of a client where there are 20, 100 and 500 of them.
`accuracy NAME SEED` trains one method on one split alone.
"""

from __future__ import annotations

import copy
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from experiments.benchmarks.mnist_as_pfllib import federation as as_pfllib
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.data.dataset import Federation
from splitfed.federated import FML, FedAvg, FedProto, FedProx, Standalone
from splitfed.federated.base import Method
from splitfed.models.fedavg_cnn import fedavg_cnn
from splitfed.schedules.base import Training
from splitfed.topologies import local
from splitfed.training.run import Run

ROUNDS, BATCH, RATE, MU = 16, 10, 0.05, 0.01
BARE: dict[str, Callable[[], Method]] = {"fedavg": FedAvg, "fedprox": FedProx, "fedproto": FedProto, "fml": FML}
METHODS = {**BARE, "standalone": Standalone}
CUTS = {"fedproto": ("relu3",)}


def network(seed: int = 0) -> nn.Module:
    """Return the CNN of FedAvg."""
    with stream(seed):
        return fedavg_cnn((1, 28, 28), 10, seed=None)


class Bare:
    """The loop as anybody would write it: every client has its models, the server an average of the shared ones."""

    def __init__(self, method: str, federation: Federation) -> None:
        self.method = method
        self.federation = federation
        first = network()
        self.shared = {k: v.clone() for k, v in first.state_dict().items()}
        self.models: list[Any] = [copy.deepcopy(first) for _ in federation.clients]
        self.memes = [network(1) for _ in federation.clients] if method == "fml" else []
        if self.memes:
            self.shared = {k: v.clone() for k, v in self.memes[0].state_dict().items()}
        self.optimizers = [
            torch.optim.SGD([*m.parameters(), *(self.memes[i].parameters() if self.memes else ())], lr=RATE)
            for i, m in enumerate(self.models)
        ]
        self.prototypes: dict[int, Tensor] = {}
        self.near = 0.0
        self.training = Training(BATCH)
        self.accuracy = 0.0

    def round(self, number: int) -> None:
        """Train every client from the average, average, and score everybody."""
        if self.method == "fedproto":
            self._prototype_round(number)
            return
        total = sum(len(c.train) for c in self.federation.clients)
        sums: dict[str, Tensor] = {}
        for replica, client in enumerate(self.federation.clients):
            taught = (self.memes or self.models)[replica]
            taught.load_state_dict(self.shared)
            self._train(replica, client.train.x, client.train.y, number)
            for name, tensor in taught.state_dict().items():
                part = tensor * (len(client.train) / total)
                sums[name] = sums[name] + part if name in sums else part
        self.shared = sums
        right = rows = 0
        with torch.no_grad():
            for replica, client in enumerate(self.federation.clients):
                if self.method != "fml":
                    self.models[replica].load_state_dict(self.shared)
                for model in (self.models[replica], *([self._meme(replica)] if self.memes else [])):
                    model.eval()
                    found = [model(x).argmax(1) for x in client.test.x.split(256)]
                    model.train()
                    if model is self.models[replica] and found:
                        right += int((torch.cat(found) == client.test.y).sum())
                        rows += len(client.test)
        self.accuracy = right / rows

    def _prototype_round(self, number: int) -> None:
        """Train every client towards the prototypes, average those, and score head and prototypes in one pass."""
        sums: dict[int, Tensor] = {}
        counts: dict[int, int] = {}
        for replica, client in enumerate(self.federation.clients):
            self._train(replica, client.train.x, client.train.y, number)
            z = self._seen(replica, client.train.x)[0]
            for label in client.train.y.unique().tolist():
                rows = z[client.train.y == label]
                sums[label] = sums.get(label, 0) + rows.sum(0)
                counts[label] = counts.get(label, 0) + len(rows)
        self.prototypes = {label: total / counts[label] for label, total in sums.items()}
        names = torch.tensor(list(self.prototypes))
        goals = torch.stack(list(self.prototypes.values()))
        right = rows = near = own = 0
        for replica, client in enumerate(self.federation.clients):
            if len(client.test):
                z, scores = self._seen(replica, client.test.x)
                mine = torch.isin(names, client.train.y.unique())
                far = torch.cdist(z, goals)
                near += int((names[far.argmin(1)] == client.test.y).sum())
                own += int((names[far.masked_fill(~mine, torch.inf).argmin(1)] == client.test.y).sum())
                right += int((scores.argmax(1) == client.test.y).sum())
                rows += len(client.test)
        self.accuracy, self.near = right / rows, near / rows

    def _seen(self, replica: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and scores of rows, in evaluation mode."""
        model = self.models[replica].eval()
        with torch.no_grad():
            found = [(z := model[:-1](few), model[-1](z)) for few in x.split(256)]
        model.train()
        return torch.cat([z for z, _ in found]), torch.cat([scores for _, scores in found])

    def _meme(self, replica: int) -> nn.Module:
        self.memes[replica].load_state_dict(self.shared)
        return self.memes[replica]

    def _train(self, replica: int, x: Tensor, y: Tensor, number: int) -> None:
        model, optimizer = self.models[replica], self.optimizers[replica]
        for batch in self.training.batches(len(x), number, replica):
            if self.prototypes:
                z = model[:-1](x[batch])
                goal = torch.stack([self.prototypes[label] for label in y[batch].tolist()])
                loss = functional.cross_entropy(model[-1](z), y[batch]) + functional.mse_loss(z, goal)
            else:
                scores = model(x[batch])
                loss = functional.cross_entropy(scores, y[batch])
            if self.memes:
                other = self.memes[replica](x[batch])
                mine, theirs = functional.log_softmax(scores, 1), functional.log_softmax(other, 1)
                divergences = [
                    functional.kl_div(a, b.detach(), reduction="batchmean", log_target=True)
                    for a, b in ((mine, theirs), (theirs, mine))
                ]
                loss = 0.5 * (loss + functional.cross_entropy(other, y[batch]) + divergences[0] + divergences[1])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if self.method == "fedprox":
                for name, weight in model.named_parameters():
                    assert weight.grad is not None
                    weight.grad.add_(weight.detach() - self.shared[name], alpha=MU)
            optimizer.step()
            loss.item()


def ratio(name: str) -> dict[str, float]:
    """Return what a round of method `name` takes over one of the bare loop, the seconds of both, and accuracies."""
    federation = as_pfllib(20)
    bare = Bare(name, federation)
    ours: list[float] = []
    theirs: list[float] = []
    begun = time.perf_counter()

    def follow(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
        nonlocal begun
        now = time.perf_counter()
        ours.append(now - begun)
        bare.round(done - 1)
        begun = time.perf_counter()
        theirs.append(begun - now)

    run = trained(name, federation, logging=sf.Logging(progress=follow))
    # The first round has the preparation in it.
    pairs = [a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]
    return {
        "ratio": statistics.median(pairs),
        "ours": statistics.median(ours[1:]),
        "bare": statistics.median(theirs[1:]),
        "accuracy": run.accuracy,
        "bare accuracy": bare.accuracy,
    }


def trained(name: str, federation: Federation, seed: int = 0, **options: Any) -> Run:
    """Return the run of the workload with the method called `name`."""
    return sf.train(
        local(network(seed), cuts=CUTS.get(name, ())),
        federation,
        schedule="independent",
        method=METHODS[name](),
        rounds=ROUNDS,
        batch_size=BATCH,
        optimizer=Optim("SGD", {"lr": RATE}),
        seed=seed,
        **options,
    )


def scaled(clients: int) -> dict[str, float]:
    """Return milliseconds a client and round, and megabytes a client, of FedAvg with `clients` of 9 rows each."""
    before = _resident()
    federation = (
        sf.data.mnist5k().rows(range(10 * clients)).clients(clients, auxiliary=0, victims=0, validation=0.0, test=0.1)
    )
    spent: list[float] = []
    begun = time.perf_counter()

    def follow(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
        nonlocal begun
        now = time.perf_counter()
        spent.append(now - begun)
        begun = now

    sf.train(
        local(network()),
        federation,
        schedule="independent",
        method=FedAvg(),
        rounds=6,
        batch_size=BATCH,
        optimizer=Optim("SGD", {"lr": RATE}),
        logging=sf.Logging(progress=follow),
    )
    return {
        "milliseconds": 1000 * statistics.median(spent[1:]) / clients,
        "megabytes": (_resident() - before) / clients,
    }


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(names: list[str]) -> None:
    """Print every ratio with the bound it is held to, and what a client costs among few and many."""
    torch.set_num_threads(1)
    if names and names[0] == "scaled":
        found = scaled(int(names[1]))
        print(f"  {names[1]:>4} clients: {found['milliseconds']:.1f} ms and {found['megabytes']:.1f} MB a client")
        return
    if names and names[0] == "accuracy":
        accuracy = trained(names[1], as_pfllib(20, seed=int(names[2])), int(names[2])).accuracy
        print(f"{names[1]}, seed {names[2]}: accuracy {accuracy:.4f}", flush=True)
        return
    for name in names:
        if name not in BARE:
            raise SystemExit(f"no bare loop of {name!r}; there are {', '.join(BARE)}")
    for name in names or BARE:
        found = ratio(name)
        print(
            f"{name}: {found['ratio']:.3f} x the bare loop (bound 1.05); {found['ours']:.2f} s a round against "
            f"{found['bare']:.2f} s; accuracy {found['accuracy']:.4f}, bare loop {found['bare accuracy']:.4f}",
            flush=True,
        )
    if not names:
        print("a client and round of FedAvg, 9 rows, by the number of clients")
        for clients in (20, 100, 500):
            # In a process of its own, whose greatest memory is then that of this many clients.
            command = [sys.executable, "-m", "experiments.benchmarks.federated", "scaled", str(clients)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main(sys.argv[1:])
