"""Decides whether an attack adapts to a defense, from the effects of the defense and those the attack declares.

`effects` derives what a defense changes from its capabilities. `path` selects the effects that lie between the target
of an attack and the evidence it reads: from a row to its release, from a label to the returned gradient, from a member
to the trained weights. Given the trained weights, the evidence does not depend on any other effect.

An attack adapts to an effect if the quantity it compares the evidence with has the effect too. That holds if the attack
queries the defended parties and learns from the answers; differentiates through the trained segments with defenses at
their mean; trains a copy or a substitute of the client with the run's defenses; optimizes the unknown quantity as a
free variable; estimates the class distributions from the defended evidence without assumptions on the undefended one;
or reads a quantity that the effect leaves unchanged. An attack that learns nothing, models parties without the defense,
or compares rows by a fixed measure chosen without the defense does not adapt. An estimate relies on the true labels of
the known victims, which do not have the effect of labels that were changed in training.

The capabilities in `WITHOUT_EFFECT` have no effect of their own: layers that a defense adds belong to the segments
which attacks query, hold or replace; learned state, codes and promises act only through the other effects.

`mark` returns "not needed" if no effect lies on the path, "adapted" if the attack declares all effects that do
(`Attack.adapts_to`), and "not yet" otherwise, also for an attack without a declaration. An attack that chooses among
several declares the effects that all of them adapt to; its result is marked by the attack that made the prediction, if
recorded (`Outcome.member`).

Random defenses are taken at their mean or drawn afresh in every query; no attack knows the draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from splitfed.attacks.base import BACKWARD, FORWARD, IN_TRAINING, Attack, DefenseEffect, Needs, Phase, Target
from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.core import defense as capability
from splitfed.core.defense import UPLOAD, Defense
from splitfed.registry import name_of

WITHOUT_EFFECT: tuple[type[Defense], ...] = (
    capability.LayerDefense,
    capability.LearnedDefense,
    capability.Codec,
    capability.Accounted,
    capability.Calibrated,
)
"""Capabilities without an effect of their own; see the head of this module."""

_EFFECTS: tuple[tuple[type[Defense], DefenseEffect], ...] = (
    (capability.GradientDefense, DefenseEffect.GRADIENT),
    (capability.ReceiverPenaltyDefense, DefenseEffect.RECEIVER_PENALTY),
    (capability.LabelDefense, DefenseEffect.LABELS),
    (capability.WeightDefense, DefenseEffect.WEIGHTS),
)
"""Capabilities whose effect is the same on every edge."""


class Mark(StrEnum):
    """Whether an attack adapts to a defense."""

    ADAPTED = "adapted"
    NOT_NEEDED = "not needed"
    NOT_YET = "not yet"


def effects(defense: Defense) -> frozenset[DefenseEffect]:
    """Return the effects of `defense`, given its parameters and the edges it acts on."""
    changed = {effect for capability, effect in _EFFECTS if isinstance(defense, capability)}
    if isinstance(defense, capability.ReleaseDefense):
        if defense.uploads:
            changed.add(DefenseEffect.UPLOAD)
        if not defense.on or any(not name.endswith(UPLOAD) for name in defense.on):
            changed.add(DefenseEffect.RELEASE)
    if isinstance(defense, capability.PenaltyDefense):
        changed.add(DefenseEffect.LAYER_PENALTY if defense.penalty_reads_layers else DefenseEffect.PENALTY)
    if isinstance(defense, capability.TaskWeightDefense) and defense.weighs_task:
        changed.add(DefenseEffect.TASK_WEIGHT)
    return frozenset(changed)


def path(attack: Attack) -> frozenset[DefenseEffect]:
    """Return the effects that lie between the target of `attack` and the evidence it reads.

    Rows that pass at inference are read from releases; labels in a training step from gradients, and from releases as
    well if the attack recomputes its own releases from its own inputs. Weight updates, uploads of a federated method,
    and targets that only training exposes (members, class representatives, labels of rows that the attacker holds) are
    read after all effects of training.
    """
    if attack.reads:
        return IN_TRAINING | {DefenseEffect.UPLOAD}
    if attack.phase is Phase.TRAINING or attack.target in (Target.MEMBERS, Target.REPRESENTATIVES, Target.SHARES):
        return IN_TRAINING
    if attack.phase is Phase.STEP:
        if attack.target is Target.RELEASES:
            # Solved from an identity of the layer that computes on ciphertexts; what would change its sides is refused.
            return frozenset({DefenseEffect.GRADIENT, DefenseEffect.WEIGHTS})
        if attack.target is not Target.LABELS:
            return IN_TRAINING
        return BACKWARD | {DefenseEffect.RELEASE} if Needs.OWN_INPUTS in attack.requires else BACKWARD
    if Needs.TRAINING_ATTACK in attack.requires:
        # What it has seen in training: the labels that arrived there too, where it uses labels.
        learnt_from = attack.requires | (attack.learns_from if isinstance(attack, TrainingAttack) else frozenset())
        return FORWARD | {DefenseEffect.LABELS} if Needs.AUXILIARY_LABELS in learnt_from else FORWARD
    labels_of_own = attack.target is Target.LABELS and Needs.OWN_INPUTS in attack.requires
    return IN_TRAINING if labels_of_own else FORWARD


def mark(attack: Attack, changed: Iterable[DefenseEffect]) -> Mark:
    """Return whether `attack` adapts to a defense that has the effects `changed`."""
    if attack.adapts_to is None:
        return Mark.NOT_YET
    met = path(attack).intersection(changed)
    if not met:
        return Mark.NOT_NEEDED
    return Mark.ADAPTED if met <= attack.adapts_to else Mark.NOT_YET


def unadapted(attack: Attack, defenses: Iterable[Defense], omitted: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the distinct registry names of the `defenses` that `attack` does not adapt to, in order.

    `omitted`: class names of defenses that the attack could not imitate where it was installed; they count as not
    adapted.
    """
    left_out = set(omitted)
    unmet = [d for d in defenses if mark(attack, effects(d)) is Mark.NOT_YET or type(d).__name__ in left_out]
    return tuple(dict.fromkeys(name_of("defenses", type(defense)) for defense in unmet))
