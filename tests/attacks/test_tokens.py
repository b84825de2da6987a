"""Attacks on token ids: which are refused, which work, and how reconstructed tokens are scored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import splitfed
from splitfed.attacks.base import Knowledge, Target
from splitfed.attacks.labels.direct_label import DirectLabel
from splitfed.attacks.labels.direction import Direction
from splitfed.attacks.labels.model_completion import ModelCompletion, _Completed
from splitfed.attacks.labels.spectral import Spectral
from splitfed.attacks.membership.membership_releases import MembershipReleases
from splitfed.attacks.membership.membership_threshold import MembershipThreshold
from splitfed.attacks.networks.tokens import TokenReader, Vocabulary, frequent_tokens, unpadded_positions
from splitfed.attacks.reconstruction.token_decoder import TokenDecoder
from splitfed.attacks.scoring.token_metrics import score_tokens
from splitfed.attacks.training_time.fsha import Fsha
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator
from splitfed.defenses import ChannelPruning, DistanceCorrelation
from splitfed.poisoning.backdoor import Backdoor
from splitfed.registry import TABLES, load
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.attacks.examples import digits, lenet_run
from tests.attacks.token_examples import Encoder, embedded, padded, two_bags
from tests.examples import refusal

FAST = TokenDecoder(epochs=15, width=48, queries=2)
REAL = "reconstructs real numbers, and rows of markov_tokens are whole ones, such as token ids: take token_decoder"


def test_every_attack_that_reconstructs_real_numbers_is_refused_before_it_begins() -> None:
    found = embedded().evaluator.applicable()
    wrong = {n for n in TABLES["attacks"] if load("attacks", n).target in (Target.INPUTS, Target.REPRESENTATIVES)}
    assert len(wrong) > 10
    for name in wrong:
        assert found[name] == f"{load('attacks', name).__name__} {REAL}"
    able = {name for name, why in found.items() if why is None}
    membership = {"membership_threshold", "membership_shadow", "membership_releases", "lira", "strongest_membership"}
    assert able == {"token_decoder", *membership}
    assert refusal(embedded().attack, "rmle") == f"Rmle {REAL}"
    assert refusal(lenet_run().attack, "token_decoder") == (
        "TokenDecoder reconstructs token ids, and rows of digits are real numbers: take inverse_network"
    )


def test_training_attacks_and_decoders_of_defenses_refuse_tokens() -> None:
    topology = vanilla(Encoder(), "embedding")
    hijack = splitfed.Adversaries({"server": Fsha()})
    assert refusal(splitfed.train, topology, padded(), rounds=1, adversaries=hijack) == f"Fsha {REAL}"
    assert refusal(splitfed.train, topology, padded(), rounds=1, defenses=ChannelPruning()) == (
        "channel_pruning trains a decoder of real numbers, and input 'input_ids' of 'client' has whole ones, such as "
        "token ids: use distance_correlation"
    )
    assert splitfed.train(topology, padded(), rounds=1, defenses=DistanceCorrelation(0.5)).history


def test_a_trigger_must_be_a_token() -> None:
    assert refusal(Backdoor(value=0.5).check, padded()) == (
        "backdoor value=0.5 is not allowed; markov_tokens has ids, whole numbers from 0 to 16"
    )
    assert refusal(Backdoor(value=17).check, padded()).startswith("backdoor value=17 is not allowed")
    Backdoor(value=16).check(padded())
    Backdoor(value=0.5).check(digits())


def token_accuracy(run: Run) -> float:
    (found,) = run.attack(FAST)
    assert found.prediction.dtype == found.truth.dtype == torch.int64
    return found.scores["attack"]["token_accuracy"].mean


def test_the_deeper_the_cut_the_fewer_tokens_are_read() -> None:
    shallow, deep = (token_accuracy(embedded(cut=cut)) for cut in ("embedding", "pooled"))
    assert shallow > 0.99
    # Twelve numbers a row, a mean over pairs of neighbors.
    assert deep < 0.5


def test_a_party_with_tokens_of_its_own_reads_those_of_others_alone() -> None:
    (found,) = two_bags().attack(FAST, adversary="server0")
    floors = {name: scores["token_accuracy"].mean for name, scores in found.scores.items()}
    # Bags know no order: what they tell is the class, so which half of the vocabulary the left tokens are of.
    assert 0.1 < floors["frequent_token"] + 0.03 < floors["attack"] < 0.4


def test_labels_of_token_rows_are_inferred_like_others() -> None:
    run = two_bags()
    for attack in (Direction(), Spectral(), ModelCompletion(iterations=60, decay=0.9, labelled=10)):
        (found,) = run.attack(attack, adversary="left0")
        auc = found.scores["attack"]["auc"].mean
        assert max(auc, 1 - auc) > 0.9, type(attack)
    (found,) = two_bags(2, "sum").attack(DirectLabel(), adversary="left0")
    assert found.scores["attack"]["accuracy"].mean == 1.0


def test_membership_of_token_rows_is_asked_like_that_of_others() -> None:
    for attack in (MembershipThreshold(), MembershipReleases(epochs=3, queries=1)):
        (found,) = embedded().attack(attack)
        # Two rounds of training: nobody is known by heart, and 40 rows have a standard deviation of .065.
        assert 0.25 < found.scores["attack"]["auc"].mean < 0.8


def decode(x: torch.Tensor, released: torch.Tensor, places: dict[str, torch.Tensor], epochs: int = 30) -> torch.Tensor:
    """Let the attack decode `released`, which is of the rows x, from those very rows and their releases."""
    view = View("s", (Message("c", "s", "activation", "e", {"z": released}, Stamp("predict", 0, 0, 0, "victims")),), {})
    known = Knowledge(
        tuple(x.shape[1:]), auxiliary=x, query=lambda rows: {"z": released}, places=places, origins={"z": tuple(places)}
    )
    return replace(FAST, epochs=epochs, queries=1)(view, known, generator(0)).prediction


def test_releases_of_any_shape_are_read() -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(100, 110, (120, 2, 4), generator=drawn)
    table = torch.randn(200, 6, generator=drawn)
    whole = {"x": torch.arange(8)}
    # A place for every token, for every token of one of two parts, and one place for all.
    for released in (table[x].flatten(1, 2), table[x].transpose(1, 2).flatten(2), table[x].flatten(1)):
        assert (decode(x, released, whole) == x).double().mean() > 0.98
    # Only the second part is told of; of the first its most frequent tokens are predicted.
    found = decode(x, table[x[:, 1]], {"b": torch.arange(4, 8)})
    assert torch.equal(found[:, 1], x[:, 1])
    assert torch.equal(found[:, 0], frequent_tokens(x)[0].expand(120, -1))


def test_where_releases_tell_nothing_positions_keep_their_most_frequent_tokens() -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(100, 110, (120, 4), generator=drawn)
    x = torch.where(torch.rand(120, 4, generator=drawn) < 0.6, torch.arange(100, 104), x)
    # One perceptron reads all four places, and finds the same in each.
    found = decode(x, torch.ones(120, 4, 3), {"x": torch.arange(4)}, epochs=1)
    assert torch.equal(found, torch.arange(100, 104).expand(120, 4))


def test_hidden_values_are_mixed_where_tokens_cannot_be() -> None:
    bottom = nn.Sequential(nn.Embedding(9, 2), nn.Flatten())
    model = _Completed(bottom, 6, 2, tune=True).eval()
    x, order = torch.arange(9).view(3, 3), torch.tensor([2, 0, 1])
    mixed = 0.75 * bottom(x) + 0.25 * bottom(x[order])
    assert torch.allclose(model(x, order, 0.75), model.head(mixed))
    assert torch.allclose(model(x), model.head(bottom(x)))


def test_scores_by_hand() -> None:
    truth = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
    prediction = torch.tensor([[1, 2, 0, 0], [5, 6, 7, 0], [0, 0, 0, 9]])
    auxiliary = torch.tensor([[1, 6, 9, 0], [1, 6, 9, 1], [2, 3, 4, 1]])
    scores = score_tokens(truth, prediction, auxiliary, generator(0))
    assert scores["attack"]["token_accuracy"].mean == pytest.approx((0.5 + 0.75 + 0.25) / 3)
    # 1, 6, 9, 1: right once in every row.
    assert scores["frequent_token"]["token_accuracy"].mean == pytest.approx(0.25)
    assert scores["random_pairing"]["token_accuracy"].mean == 0.0
    # Only the first two positions of the first row, one of the second, and none of the last.
    counted = torch.tensor([[True, True, False, False], [False, False, False, True], [False] * 4])
    scores = score_tokens(truth, prediction, auxiliary, generator(0), counted)
    assert scores["attack"]["token_accuracy"].mean == pytest.approx((1.0 + 0.0) / 2)
    with pytest.raises(InvalidInput, match=r"^every position of every victim is padding; expected one that is not$"):
        score_tokens(truth, prediction, auxiliary, generator(0), torch.zeros(3, 4, dtype=torch.bool))
    with pytest.raises(InvalidInput, match=r"^truth has shape \(3, 4\) of torch.float32"):
        score_tokens(truth.float(), prediction, auxiliary, generator(0))


def test_padding_does_not_count() -> None:
    x = torch.tensor([[[5, 6, 0], [1, 1, 0]], [[7, 0, 0], [1, 0, 0]]])
    places = {"input_ids": torch.arange(3), "attention_mask": torch.arange(3, 6)}
    counted = unpadded_positions(x, places)
    assert counted.tolist() == [[True, True, False, *[False] * 3], [True, False, False, *[False] * 3]]
    assert bool(unpadded_positions(x, {"input_ids": torch.arange(3)}).all())
    # Of the second position one id is no padding, of the third none.
    assert frequent_tokens(x, counted)[0].tolist()[1:] == [6, 0]
    run = embedded()
    (found,) = run.attack(FAST)
    ids, mask = (run.data.features[name].select(found.truth) for name in ("input_ids", "attention_mask"))
    right = (run.data.features["input_ids"].select(found.prediction) == ids) & (mask > 0)
    shares = right.sum(1) / mask.sum(1)
    assert found.scores["attack"]["token_accuracy"].mean == pytest.approx(float(shares.double().mean()))


def test_vocabulary_knows_which_ids_it_has_seen() -> None:
    vocabulary = Vocabulary(torch.tensor([[7, 2**40], [-1, 7]]))
    assert len(vocabulary) == 3
    assert vocabulary.encode(torch.tensor([-1, 7, 2**40, 8, 2**41, -5])).tolist() == [1, 2, 3, 0, 0, 0]
    assert vocabulary.decode(torch.tensor([0, 1, 2])).tolist() == [-1, 7, 2**40]
    assert TokenReader(torch.zeros(2, 3, 4, dtype=torch.int64), 5)(torch.ones(6, 3, 4).long()).shape == (6, 5)


def test_a_classifier_scores_tokens_too_and_tuning_goes_by_them() -> None:
    run = embedded()
    (found,) = run.attack(FAST, classifier=True)
    assert {"attack", "truth", "frequent_token"} <= {n for n, scores in found.scores.items() if "accuracy" in scores}
    assert found.scores["attack"]["accuracy"].mean == pytest.approx(found.scores["truth"]["accuracy"].mean, abs=0.15)
    tuned = run.tune(replace(FAST, epochs=1, queries=1), trials=1)
    assert (tuned.metric, tuned.score >= tuned.given) == ("token_accuracy", True)
