"""The words of a threat model: what an attack predicts, when the victims' rows pass, and what it must be granted."""

from __future__ import annotations

from enum import StrEnum

STEPS = ("activation", "gradient", "label", "norm")
"""The kinds of messages that cross in a training step; all others are sent between them."""


class Phase(StrEnum):
    """When the victims' rows pass the adversary: at inference, in a training step, or long ago, in training itself."""

    INFERENCE = "inference"
    STEP = "a training step"
    TRAINING = "a round of training that was recorded"


class Target(StrEnum):
    """What an attack predicts: the victims' inputs, (victims, *shape), or their labels, as scores (victims, classes).

    For two classes the scores of labels may also be (victims,): the greater, the more likely class 1. MEMBERS: which of
    the candidates were trained on, (candidates,), the greater, the more likely. REPRESENTATIVES: a row for each
    class, (classes, *shape). TOKENS: the victims' inputs where these are token ids, (victims, *shape) int64; INPUTS and
    REPRESENTATIVES are real numbers. SHARES: how much of a client's training rows is of each class, (classes,).
    RELEASES: what the victims' party sent encrypted, in plain, (victims, numbers).
    """

    INPUTS = "inputs"
    TOKENS = "token ids"
    LABELS = "labels"
    MEMBERS = "members"
    REPRESENTATIVES = "a row that stands for each class"
    SHARES = "the share of each class"
    RELEASES = "releases that were sent encrypted"


class DefenseEffect(StrEnum):
    """What a defense changes; an attack states which of these it takes into account (`Attack.adapts_to`).

    PENALTY and LAYER_PENALTY: the loss of the party that sends a release, the latter by a term that reads layers in its
    segments, so that only who has these can imitate it. RECEIVER_PENALTY: the loss of the party that reads it.
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
"""What shapes a release: the step from a row to what crosses, and what the sender is trained for with it."""

BACKWARD = frozenset(
    {DefenseEffect.GRADIENT, DefenseEffect.RECEIVER_PENALTY, DefenseEffect.LABELS, DefenseEffect.TASK_WEIGHT}
)
"""What shapes the gradient that comes back: the step from a label to what arrives."""

IN_TRAINING = FORWARD | BACKWARD | {DefenseEffect.WEIGHTS}
"""What shapes the weights that training leaves."""


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
    IMITATION = "architecture and way of training"
    ARCHITECTURE = "architecture of the upstream segments"
    DOWNSTREAM = "segments of its own from what arrives to a loss on the main labels"
    OWN_INPUTS = "inputs of its own"
    HEAD = "architecture of the head"
    UPLOADS = "what the clients of a federated method send"
    ENCRYPTED_LAYER = "a layer of its own that computes on ciphertexts"
    EXTRACTOR = "weights of a client's segments before what it sends class means of"
    EXCHANGED_MODEL = "a model that a client exchanges with the aggregation server, computed from raw rows"
    PUBLIC_SCORES = "a client's scores of public rows"
    FRESH_MODEL = "architecture of the whole model"
    TRAINING_ATTACK = "an attack in the training, train(..., adversaries=Adversaries({party: ...}))"


OF_COMPUTATIONS = frozenset({Needs.ENCRYPTED_LAYER})
"""What is there only where the parties' computation is secured."""

WEIGHTS = frozenset({Needs.UPSTREAM, Needs.MODEL, Needs.EXTRACTOR, Needs.UPDATES, Needs.EXCHANGED_MODEL})
"""What holds weights that the client has trained."""
BLACK_BOX, WHITE_BOX = "black_box", "white_box"
"""The threat models by name: without what is in `WEIGHTS`, and with it."""
