"""Runs on token ids: a model of two arguments is trained, scored, asked, recorded and resumed like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitfed
from splitfed.attacks.reconstruction.token_decoder import TokenDecoder
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.topologies import local, multi_hop, u_shaped, vanilla
from splitfed.training.run import Run
from tests.attacks.token_examples import Encoder, padded
from tests.examples import assert_same, refusal

ADAM = Optim("Adam", {"lr": 1e-2})


class Stop(Exception):
    """Stands for a crash."""


def model() -> Encoder:
    with stream(0):
        return Encoder()


def go(folder: Path | None = None, stop: int | None = None, **logging: Any) -> Run:
    def progress(done: int, rounds: int, metrics: Any) -> None:
        if done == stop:
            raise Stop

    rows = padded(2).clients[0].train
    example = {name: part.select(rows.x[:4]) for name, part in rows.features.items()}
    return splitfed.train(
        vanilla(model(), "embedding", example=example),
        padded(2),
        rounds=3,
        optimizer=ADAM,
        logging=splitfed.Logging(folder=folder, progress=progress, record=Recording(("server",)), **logging),
    )


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole = go()
    with pytest.raises(Stop):
        go(tmp_path / "run", 2)
    again = go(tmp_path / "run", resume=True)
    one, two = whole.state(), again.state()
    for name in one:
        if name.startswith("party-"):
            assert_same(one[name], two[name], name)
    assert whole.history[-1]["test"] == again.history[-1]["test"]
    (first,), (second,) = (run.attack(TokenDecoder(epochs=2)) for run in (whole, again))
    assert torch.equal(first.prediction, second.prediction)


def test_segments_train_as_the_whole_model_does() -> None:
    data = padded().clients[0].train
    together = model()
    run = splitfed.train(vanilla(model(), "embedding"), padded(), rounds=1, batch_size=len(data), optimizer=ADAM)
    ids, mask = (data.features[name].select(data.x) for name in ("input_ids", "attention_mask"))
    optimizer = torch.optim.Adam(together.parameters(), lr=1e-2)
    nn.functional.cross_entropy(together(ids, mask), data.y).backward()
    optimizer.step()
    with torch.no_grad():
        expected = together.eval()(ids, mask)
    # One step of Adam moves every weight by the rate; what is left is rounding.
    assert torch.allclose(run.predict(data.x), expected, atol=1e-4)


def test_what_the_server_records_is_what_crossed_and_no_token() -> None:
    run = go()
    train = run.engine.view("server").select(phase="train", kind="activation")
    kinds = {(name, tuple(t.shape[1:]), t.dtype) for m in train.messages for name, t in m.tensors.items()}
    assert kinds == {("embedding", (10, 12), torch.float32), ("to", (1, 10), torch.float32)}


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (lambda m: u_shaped(m, ("embedding", "act")), None),
        (lambda m: multi_hop(m, ("act", "pooled")), None),
        (lambda m: local(m), "fedavg"),
        (lambda m: local(m, ("pooled",)), "fedproto"),
    ],
)
def test_other_topologies_take_two_arguments(make: Any, method: str | None) -> None:
    topology = make(model())
    assert topology.inputs == {"input_ids": "client", "attention_mask": "client"}
    options = {} if method is None else {"schedule": "independent", "method": method}
    run = splitfed.train(topology, padded(2), rounds=1, optimizer=ADAM, **options)
    assert 0 <= run.history[-1]["test"]["union"] <= 1


def test_rows_of_another_type_are_refused() -> None:
    run = splitfed.train(vanilla(model(), "embedding"), padded(), rounds=1)
    x = padded().victims.x
    assert run.predict(x).shape == (len(x), 4)
    assert refusal(run.predict, x.float()) == (
        "x has rows of torch.float32; this run was trained on whole numbers (int64)"
    )


def test_a_model_of_two_arguments_is_not_fed_one_tensor_twice() -> None:
    data = splitfed.data.markov_tokens(200, length=10).clients(1)
    found = refusal(splitfed.train, vanilla(model(), "embedding"), data, rounds=1)
    assert found.startswith("inputs 'input_ids', 'attention_mask' of client: the data has no features of these names")
