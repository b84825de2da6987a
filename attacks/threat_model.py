"""Vocabulary of a threat model: what an attack predicts, when the victims' rows pass, and what must be granted."""

from __future__ import annotations

from enum import StrEnum

STEPS = ("activation", "gradient", "label", "norm")
"""Kinds of messages sent within a training step; all others are sent between steps."""


class Phase(StrEnum):
    """When the victims' rows pass the adversary: at inference, in a training step, or in recorded training."""

    INFERENCE = "inference"
    STEP = "a training step"
    TRAINING = "a recorded round of training"


class Target(StrEnum):
    """What an attack predicts: the victims' inputs, (victims, *shape), or their labels, as scores (victims, classes).

    For two classes the scores of labels may also be (victims,), greater for class 1. MEMBERS: membership scores of the
    candidates, (candidates,), greater for members. REPRESENTATIVES: one row for each class, (classes, *shape). TOKENS:
    the victims' inputs if these are token ids, (victims, *shape) int64; INPUTS and REPRESENTATIVES are real numbers.
    SHARES: the share of each class among a client's training rows, (classes,). RELEASES: plain values of the victims'
    encrypted releases, (victims, numbers).
    """

    INPUTS = "inputs"
    TOKENS = "token ids"
    LABELS = "labels"
    MEMBERS = "members"
    REPRESENTATIVES = "a representative row of each class"
    SHARES = "the share of each class"
    RELEASES = "releases that were sent encrypted"


class DefenseEffect(StrEnum):
    """What a defense changes; an attack declares which effects it adapts to (`Attack.adapts_to`).

    PENALTY and LAYER_PENALTY change the loss of the party that sends a release, the latter by a term that reads layers
    in its segments, so that only a party that has these can imitate it. RECEIVER_PENALTY changes the loss of the party
    that receives the release.
    """

    RELEASE = "what crosses"
    PENALTY = "the sender's loss"
    LAYER_PENALTY = "the sender's loss, by layers in its segments"
    TASK_WEIGHT = "the weight of the task's loss"
    GRADIENT = "gradients that go back"
    RECEIVER_PENALTY = "the receiver's loss"
    LABELS = "labels in training"
    WEIGHTS = "the gradients of weights"
    UPLOAD = "what clients send for a federated method"


FORWARD = frozenset(
    {DefenseEffect.RELEASE, DefenseEffect.PENALTY, DefenseEffect.LAYER_PENALTY, DefenseEffect.TASK_WEIGHT}
)
"""Effects on a release: changes of the release itself, and of the loss that its sender is trained by."""

BACKWARD = frozenset(
    {DefenseEffect.GRADIENT, DefenseEffect.RECEIVER_PENALTY, DefenseEffect.LABELS, DefenseEffect.TASK_WEIGHT}
)
"""Effects on the returned gradient, between a label and the gradient that arrives."""

IN_TRAINING = FORWARD | BACKWARD | {DefenseEffect.WEIGHTS}
"""Effects on the trained weights."""


class Needs(StrEnum):
    """What an attack may require of the run, beyond the view itself."""

    RELEASES = "releases"
    GRADIENTS = "gradients at the cut"
    QUERIES = "queries"
    UPSTREAM = "upstream weights"
    AUXILIARY = "auxiliary data"
    AUXILIARY_LABELS = "labels of the auxiliary data"
    UPDATES = "weights before and after local training"
    ATTRIBUTES = "private attributes of the auxiliary data"
    CANDIDATES = "candidates with their labels"
    PREDICTIONS = "predictions of the whole model"
    MODEL = "weights of the whole model"
    IMITATION = "architecture and training procedure"
    ARCHITECTURE = "architecture of the upstream segments"
    DOWNSTREAM = "own segments from the releases to a loss on the main labels"
    OWN_INPUTS = "inputs of its own"
    HEAD = "architecture of the head"
    UPLOADS = "what the clients of a federated method send"
    ENCRYPTED_LAYER = "a layer of its own that computes on ciphertexts"
    EXTRACTOR = "weights of the client's segments up to the features whose class means it sends"
    EXCHANGED_MODEL = "a model from raw rows that the client exchanges with the aggregation server"
    PUBLIC_SCORES = "a client's scores of public rows"
    FRESH_MODEL = "architecture of the whole model"
    TRAINING_ATTACK = "a training attack, train(..., adversaries=Adversaries({party: ...}))"


OF_COMPUTATIONS = frozenset({Needs.ENCRYPTED_LAYER})
"""Needs that exist only if the parties compute on ciphertexts or secret shares."""

WEIGHTS = frozenset({Needs.UPSTREAM, Needs.MODEL, Needs.EXTRACTOR, Needs.UPDATES, Needs.EXCHANGED_MODEL})
"""Needs that include weights trained by the client."""
BLACK_BOX, WHITE_BOX = "black_box", "white_box"
"""Names of the threat models: without the needs in `WEIGHTS`, and with them."""
