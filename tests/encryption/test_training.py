"""Training on ciphertexts: the steps of the plain run, a server that reads nothing, and keys that a run needs again."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.encryption.ciphertexts import load_ciphertexts
from splitfed.encryption.evaluating_party import EvaluatingParty
from splitfed.encryption.key_search import find_secret_key_files, find_secret_keys
from splitfed.encryption.keys import load_public_context
from splitfed.topologies import u_shaped
from tests.encryption.training_examples import (
    MIDDLES,
    PLAIN_STEP,
    SquareBehind,
    largest_difference,
    model,
    rows,
    settings,
    train,
    whole_state,
)
from tests.thinning import thin

STAMP = Stamp("train", 0, 0, 0)
# Weights move by rate x momentum x steps of order one; errors of ciphertexts are below 1e-4 a number, in float32.
CLOSE = 2e-5


@cache
def plain_run() -> sf.Run:
    return train(None)


@cache
def encrypted_run(middle: str) -> sf.Run:
    """A run of the default settings, all that the server gets kept."""
    return train(settings(), middle, logging=sf.Logging(record=sf.Recording(parties=("server",))))


@pytest.mark.parametrize("middle", thin(MIDDLES, 3))
def test_shares_train_as_the_undivided_layer(middle: str) -> None:
    plain, encrypted = train(None, middle), encrypted_run(middle)
    assert largest_difference(plain, encrypted) < CLOSE
    assert max(float(w.abs().max()) for w in _moved(plain, model(middle)).values()) > 100 * CLOSE
    assert encrypted.utility == pytest.approx(plain.utility)


def test_packed_rows_train_as_well() -> None:
    encrypted = train(settings(layout="rows", parameters="depth_1"))
    assert largest_difference(plain_run(), encrypted) < CLOSE


@pytest.mark.parametrize("protocol", ["plain_gradient", "constant_mask"])
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(PLAIN_STEP, marks=pytest.mark.exhaustive, id=""),
        pytest.param(sf.Optim("SGD", {"lr": 0.05, "momentum": 0.9}), id="momentum"),
    ],
)
def test_the_published_protocols_train_as_well(protocol: str, optimizer: sf.Optim) -> None:
    plain = train(None, optimizer=optimizer)
    # Behind a mask the gradient is the difference of two weights over the rate: errors of ciphertexts grow 20 times.
    encrypted = train(settings(protocol=protocol, accept_leak=True, parameters="depth_1"), optimizer=optimizer)
    assert largest_difference(plain, encrypted) < 10 * CLOSE


@pytest.mark.parametrize(
    ("schedule", "keys"),
    thin(
        [(schedule, keys) for schedule in ("sequential", "splitfed_v1", "alternate") for keys in ("own", "shared")], 3
    ),
)
def test_several_clients_train_shares_as_they_train_the_layer(schedule: str, keys: str) -> None:
    data = rows(clients=2, each=16)
    plain = train(None, data=data, schedule=schedule, optimizer=PLAIN_STEP)
    encrypted = train(settings(keys=keys), data=data, schedule=schedule, optimizer=PLAIN_STEP)
    assert largest_difference(plain, encrypted) < CLOSE
    contexts = [flow for flow in encrypted.engine.traffic.counters if flow[1] == "public context"]
    assert len(contexts) == (2 if keys == "own" else 1)
    pairs = [encrypted.engine.run_parties.maker.keys_of(name).fingerprint for name in ("client0", "client1")]
    sent = load_public_context(
        encrypted.engine.parties["client1"].public_context("server", "", STAMP).tensors["context"]
    )
    assert len(set(pairs)) == len(contexts)
    assert sent.fingerprint == pairs[1]


def test_frozen_server_layers_need_no_shares() -> None:
    frozen = model("square between")
    frozen.middle.requires_grad_(False)
    topology = u_shaped(frozen, ["features", "middle"], encryption=settings())
    run = sf.train(topology, rows(), rounds=1, batch_size=12)
    assert [s.name for s in run.engine.topology.segments] == ["bottom", "middle", "head"]
    assert whole_state(run).keys() == frozen.state_dict().keys()


def test_the_server_gets_ciphertexts_alone_and_its_weights_stay() -> None:
    run = encrypted_run("square between")
    view = run.engine.view("server")
    assert {m.kind for m in view.messages} == {"activation", "gradient", "public context"}
    assert {t.dtype for m in view.messages for t in m.tensors.values()} == {torch.uint8}
    server = run.engine.parties["server"]
    # "middle/stages.<number>.<name in the model>"
    own = {name.split(".", 2)[2]: value for name, value in server.state.contents().items()}
    before = {name: value for name, value in model("square between").state_dict().items() if name in own}
    assert len(own) == len(before) == 4
    assert all(torch.equal(own[name], value) for name, value in before.items())
    # What it holds are the very bytes that it can compute on, under the context that it was sent.
    (sent,) = (m for m in view.messages if m.kind == "public context")
    context = load_public_context(next(iter(sent.tensors.values())))
    first = next(m for m in view.messages if m.kind == "activation")
    assert all(load_ciphertexts(t, context).level == context.parameters.depth for t in first.tensors.values())
    # Headers cross in plain: the bound in them is the declared one, whatever the batch.
    encrypted = [t for m in view.messages if m.kind != "public context" for t in m.tensors.values()]
    assert {load_ciphertexts(t, context).bound for t in encrypted} == {settings().bound}


def test_no_secret_key_reaches_the_server(tmp_path: Path) -> None:
    folder, keys = tmp_path / "run", tmp_path / "keys"
    logging = sf.Logging(folder=folder, record=sf.Recording(parties=("server",)))
    run = train(settings(key_folder=keys), logging=logging)
    server = run.engine.parties["server"]
    view = run.engine.view("server")
    state = {name: part for name, part in run.engine.state().items() if name != "parties"}
    context = run.engine.run_parties.maker.keys_of("client0").public
    for what in (server, view, state, server.state.state_dict(), run.history):
        assert find_secret_keys(what, context) == []
    assert find_secret_key_files(folder, context) == []
    assert [path.name for path in keys.iterdir()] == ["client0.key"]
    assert (keys / "client0.key").stat().st_mode & 0o077 == 0
    # The search finds a key that was left in.
    client = run.engine.parties["client0"]
    assert find_secret_keys(client, context)
    assert isinstance(server, EvaluatingParty)
    server.left_in = {"client0": run.engine.run_parties.maker}  # type: ignore[attr-defined]
    assert find_secret_keys(server, context)
    (folder / "left in").write_bytes((keys / "client0.key").read_bytes())
    assert find_secret_key_files(folder, context)


@pytest.mark.exhaustive
def test_an_encrypted_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    whole = train(settings(key_folder=tmp_path / "other"), rounds=3)

    def go_on(folder: str | None, resume: bool = True, rounds: int = 3, key_folder: Path | None = keys) -> sf.Run:
        logging = sf.Logging(folder=folder and tmp_path / folder, resume=resume)
        return train(settings(key_folder=key_folder), rounds=rounds, logging=logging)

    stopped = StopAfter(1)
    with pytest.raises(KeyboardInterrupt):
        train(settings(key_folder=keys), rounds=3, logging=sf.Logging(folder=tmp_path / "run", progress=stopped))
    moved = keys.rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match=r"key file '.*client0.key' is missing: .* put the file back") as missing:
        go_on("run")
    assert "\n" not in str(missing.value)
    assert not keys.exists()
    sf.train(
        u_shaped(model(), ["features", "middle"], encryption=settings(key_folder=keys)),
        rows(),
        rounds=1,
        logging=sf.Logging(folder=tmp_path / "another"),
    )
    with pytest.raises(InvalidInput, match="holds other keys"):
        go_on("run")
    (keys / "client0.key").unlink()
    keys.rmdir()
    moved.rename(keys)
    resumed = go_on("run")
    assert largest_difference(whole, resumed) < CLOSE
    losses = ["round", "steps", "clients", "dropped", "messages"]
    assert [[h[name] for name in losses] for h in resumed.history] == [
        [h[name] for name in losses] for h in whole.history
    ]
    assert [h["loss"] for h in resumed.history] == pytest.approx([h["loss"] for h in whole.history], abs=1e-5)


def test_keys_that_were_not_kept_are_named(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(settings(), rounds=2, logging=sf.Logging(folder=tmp_path / "run", progress=StopAfter(1)))
    with pytest.raises(InvalidInput, match="were not saved; give key_folder before the first round"):
        train(settings(), rounds=2, logging=sf.Logging(folder=tmp_path / "run", resume=True))


def test_keys_are_kept_without_a_run_folder_too(tmp_path: Path) -> None:
    """Only checkpoints wrote them."""
    keys = tmp_path / "keys"
    first = train(settings(key_folder=keys), rounds=1)
    assert [path.name for path in keys.iterdir()] == ["client0.key"]
    again = train(settings(key_folder=keys), rounds=1)
    own = [run.engine.run_parties.maker.keys_of("client0").fingerprint for run in (first, again)]
    assert own[0] == own[1]


def test_keys_never_lie_in_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(InvalidInput, match="folder of a run or a study"):
        train(settings(key_folder=folder / "keys"), logging=sf.Logging(folder=folder))


def test_numbers_beyond_the_bound_are_named_and_nothing_is_lost(tmp_path: Path) -> None:
    wild = model()
    with torch.no_grad():
        for weight in wild.features.parameters():
            weight.mul_(0.1)
    wild.features[2] = nn.Identity()
    topology = u_shaped(wild, ["features", "middle"], encryption=settings(bound=1.0, key_folder=tmp_path / "keys"))
    with pytest.raises(
        InvalidInput, match=r"activation '.*' of 'client0' on edge 'bottom->middle': .* declared bound is 1"
    ):
        sf.train(
            topology,
            rows(),
            rounds=40,
            optimizer=sf.Optim("SGD", {"lr": 0.3}),
            batch_size=12,
            logging=sf.Logging(folder=tmp_path / "run"),
        )
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 1


class StopAfter:
    """Stops a training after so many rounds, as an interrupt from the keyboard does."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __call__(self, number: int, rounds: int, metrics: Any) -> None:
        if number == self.rounds:
            raise KeyboardInterrupt


class Branching(nn.Module):
    """A value passes by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + x


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nonlinear": ({}, {"middle": nn.Sequential(nn.Linear(6, 5), nn.ReLU())}, "Linear, ReLU is not linear"),
    "batch norm": ({}, {"middle": nn.BatchNorm1d(6), "width": 6}, "BatchNorm1d is not linear"),
    "dropout": ({}, {"middle": nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 5))}, "is not linear"),
    "passing by": ({}, {"middle": Branching(), "width": 6}, "a value bypasses one of its layers"),
    "three layers": (
        {},
        {"middle": nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5))},
        "has 3 trainable layers",
    ),
    "batch beyond slots": ({"parameters": "depth_1_coarse"}, {"batch_size": 3000}, "batches of 3000 rows do not fit"),
    "bound beyond the scale": ({"bound": 1e9}, {}, "is beyond the scale"),
    "too fine": ({"precision": 1e-12}, {}, "precision=1e-12 is too fine"),
    "too shallow": (
        {"parameters": "sums"},
        {},
        "middle take 1 multiplications in sequence, forward and back; preset 'sums' has 0",
    ),
    "too shallow for gradients": (
        {"parameters": "depth_2"},
        {"middle": SquareBehind()},
        "take 3 multiplications in sequence, forward and back; preset 'depth_2' has 2",
    ),
    "unknown preset": ({"parameters": "depth_9"}, {}, "unknown encryption preset 'depth_9'"),
    "unknown holder": ({"key_holder": "bank"}, {}, "unknown role that holds the keys: 'bank'"),
    "server holds keys": ({"key_holder": "server"}, {}, "expected a U-shape"),
    "clip_norm": (
        {},
        {"optimizer": sf.Optim("SGD", {"lr": 0.05}, clip_norm=1.0)},
        "clip_norm=1 of 'server' is not allowed beside encryption: no party knows the norm of the whole gradient",
    ),
    "groups": (
        {},
        {"optimizer": sf.Optim("SGD", {"lr": 0.05}, groups=[sf.ParameterGroup("*", {"lr": 0.1})])},
        "parameter groups of 'server' are not allowed beside encryption: a layer's share has one rate for all",
    ),
    "accumulate": (
        {},
        {"local": sf.LocalUpdate(accumulate=2)},
        "accumulate=2 is not allowed beside encryption: shares of weights are updated behind every batch",
    ),
    "Adam": ({}, {"optimizer": "Adam"}, "optimizer Adam of 'server' is not allowed beside encryption; expected SGD"),
    "weight decay": (
        {},
        {"optimizer": sf.Optim("SGD", {"lr": 0.1, "weight_decay": 0.1})},
        "weight_decay=0.1 of 'server' is not allowed",
    ),
    "other optimizers": (
        {},
        {"optimizer": {"client": sf.Optim("SGD", {"lr": 0.1}), "server": sf.Optim("SGD", {"lr": 0.2})}},
        "the optimizers of 'server' and 'client' differ",
    ),
    "noise": ({}, {"defenses": sf.defenses.Noise(0.5)}, "Noise acts on messages that are encrypted"),
    "method": ({}, {"method": "fedproto"}, "method FedProto reads weights and values of clients in plain"),
    "rows of two layers": (
        {"layout": "rows"},
        {"middle": nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5))},
        "layout='rows' holds one linear layer",
    ),
    "splitfed_v2": ({}, {"schedule": "splitfed_v2", "clients": 2}, "SplitFedV2 would not train the clients' shares"),
    "splitfed_v3": ({}, {"schedule": "splitfed_v3", "clients": 2}, "SplitFedV3 would not train the clients' shares"),
    "blind": ({}, {"schedule": "blind", "clients": 2}, "Blind takes steps of several clients together"),
    "relayed": (
        {},
        {"schedule": sf.schedules.Sequential(hand_over="server"), "clients": 2},
        "shows the server the clients' shares at successive times",
    ),
    "left alone": (
        {},
        {"schedule": sf.schedules.Sequential(hand_over="none"), "clients": 2},
        "would not train the clients' shares",
    ),
    "copies in plain": (
        {"protocol": "plain_gradient", "accept_leak": True},
        {"schedule": "splitfed_v1", "clients": 2},
        "SplitFedV1 trains copies of the server's layer",
    ),
    "two segments in plain": (
        {"protocol": "constant_mask", "accept_leak": True},
        {
            "cuts": ["features", "middle", "head.0", "head.1"],
            "head": nn.Sequential(nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 10)),
        },
        "has one server segment of one linear layer; 2 were given",
    ),
    "convolution in plain": (
        {"protocol": "constant_mask", "accept_leak": True},
        {"middle": nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 1, 2), nn.Flatten())},
        "the protocols that leak train one torch.nn.Linear",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_encrypted_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    changes, options, told = REFUSED[name]
    options = dict(options)
    whole = model()
    middle = options.pop("middle", None)
    if middle is not None:
        whole.middle = middle
        whole.head[1] = nn.Linear(options.pop("width", 5), 10)
    data = rows(clients=options.pop("clients", 1), each=12)
    folder = tmp_path / "run"
    whole.head = options.pop("head", whole.head)
    cuts = options.pop("cuts", ["features", "middle"])
    topology = u_shaped(whole, cuts, encryption=settings(**changes))
    with pytest.raises(InvalidInput) as error:
        sf.train(topology, data, rounds=1, logging=sf.Logging(folder=folder), **options)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"protocol": "plain_gradient"}, "leaks labels and activations: .* accept_leak=True"),
        ({"protocol": "constant_mask"}, "leaks labels and activations"),
        ({"protocol": "none"}, "unknown encryption protocol 'none'"),
        ({"precision": 0}, r"precision=0 is not allowed; expected a number in \(0, inf\)"),
        ({"bound": float("nan")}, "bound=nan is not allowed"),
        ({"layout": "columns"}, "unknown encryption layout 'columns'"),
        ({"keys": "public"}, "unknown kind of keys 'public'"),
        ({"key_folder": 3}, "key_folder=3 is not allowed"),
        ({"key_holder": None}, "expected a role, or several"),
        ({"key_holder": []}, "expected a role, or several"),
        ({"key_holder": ["bank", "shop"]}, "2 roles hold keys, .* keys='shared'"),
        ({"accept_leak": 1}, "accept_leak=1 is not allowed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        settings(**changes)


def test_a_message_that_was_spoilt_on_its_way_is_named() -> None:
    run = train(settings(), rounds=1)
    engine = run.engine
    for spoil, told in (
        (_flip, "corrupted or truncated"),
        (_cut, "corrupted or truncated"),
        (_foreign, "not ciphertexts"),
    ):
        engine.link.taps["client0"] = lambda message, spoil=spoil: message._replace(
            tensors={name: spoil(tensor) for name, tensor in message.tensors.items()}
        )
        with pytest.raises(InvalidInput, match=told):
            engine.predict(0, "test", "evaluate")
    engine.link.taps["client0"] = lambda message: message
    other = train(settings(), rounds=1).engine.parties["client0"]
    engine.link.taps["client0"] = lambda message: message._replace(
        tensors={name: other._encrypt(message, name, torch.zeros(3, 6)) for name in message.tensors}
    )
    with pytest.raises(InvalidInput, match="another key pair"):
        engine.predict(0, "test", "evaluate")


def test_all_else_works_without_tenseal() -> None:
    code = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tenseal", "_tenseal_cpp"):
            raise ImportError(name)

sys.meta_path.insert(0, Missing())
import splitfed as sf
from tests.encryption.training_examples import settings, train
run = train(None, rounds=1)
assert "tenseal" not in sys.modules
try:
    train(settings(parameters="depth_1"), rounds=1)
except sf.InvalidInput as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["encryption needs the package tenseal: pip install 'tenseal>=0.3.16'"]


def test_a_kept_run_says_how_it_was_encrypted(tmp_path: Path) -> None:
    train(settings(key_folder=tmp_path / "keys"), rounds=1, logging=sf.Logging(folder=tmp_path / "run"))
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "weight_shares" in json.dumps(told)
    assert str(tmp_path / "keys") not in json.dumps(told)


def _moved(run: sf.Run, before: nn.Module) -> dict[str, Tensor]:
    return {name: value - before.state_dict()[name] for name, value in whole_state(run).items()}


def _flip(content: Tensor) -> Tensor:
    spoilt = content.clone()
    spoilt[-100] ^= 1
    return spoilt


def _cut(content: Tensor) -> Tensor:
    return content[:-10].clone()


def _foreign(content: Tensor) -> Tensor:
    return torch.zeros_like(content)
