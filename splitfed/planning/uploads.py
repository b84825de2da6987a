"""Kinds of messages that a method's clients upload, determined by counting, and checks of defenses on them."""

from __future__ import annotations

from splitfed.core.defense import UPLOAD, Codec, privacy_event
from splitfed.core.errors import InvalidInput, unknown
from splitfed.engines.base import FED
from splitfed.planning.counting import CountingTrainer
from splitfed.planning.simulation import count_rounds
from splitfed.planning.validation import Prepared

ROUNDS = 2
"""Number of simulated rounds; messages first sent in later rounds are unknown before training."""


def sent_kinds(prepared: Prepared) -> frozenset[str]:
    """Return the kinds of messages that clients send to the aggregation server in the first rounds of `prepared`."""
    return _kinds(count_rounds(prepared, ROUNDS))


def _kinds(counting: CountingTrainer) -> frozenset[str]:
    return frozenset(flow.kind for flow in counting.traffic.flows if flow.receiver == FED)


def check_uploads(prepared: Prepared) -> None:
    """Raise `InvalidInput` for a defense on a message that no client sends, or that it cannot defend or account for."""
    if not (guarding := [defense for defense in prepared.defenses if defense.uploads]):
        return
    counting = None if prepared.method is None else count_rounds(prepared, ROUNDS)
    for defense in guarding:
        name = type(defense).__name__
        for kind in defense.uploads:
            if prepared.method is None or counting is None:
                raise InvalidInput(
                    f"{name} has nothing to protect at {kind + UPLOAD!r}: the run has no federated method"
                )
            if kind not in (kinds := _kinds(counting)):
                raise unknown(f"message for {name}:", kind + UPLOAD, [found + UPLOAD for found in kinds])
            if kind == "weights" and not isinstance(defense, Codec):
                raise InvalidInput(
                    f"{name} cannot protect {kind + UPLOAD!r}: trained weights are made private by dp_sgd alone, in "
                    "the steps that lead to them; a secure sum hides whose they are, quantization or top_k shorten them"
                )
            if kind not in counting.defended:
                raise InvalidInput(
                    f"{name} has nothing to act on at {kind + UPLOAD!r}: whole and single numbers are sent unchanged"
                )
            varying = prepared.method.traits(prepared.topology).varying_shapes
            if privacy_event(defense) is not None and kind in varying:
                raise InvalidInput(
                    f"{name} cannot promise anything for {kind + UPLOAD!r}: how many numbers method "
                    f"{type(prepared.method).__name__} sends depends on its training"
                )
        if getattr(defense, "freeze", False) and len(defense.uploads) == len(defense.on):
            raise InvalidInput(f"{name} freeze=True is not allowed here: it freezes the segments before an edge")
