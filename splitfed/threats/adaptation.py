"""What it means that an attack adapts to a defense: the one definition, by what a defense changes and what it states.

A defense changes what its capabilities say (`effects`). Of these only some lie between what an attack is after and
what it reads of that (`path`): from a row to what crosses, from a label to the gradient that comes back, from a member
to the trained weights. Given the same trained weights, nothing that it reads depends on the others.

An attack adapts to an effect if what it holds the evidence against has the effect too: it asks the defended parties and
learns from the answers, differentiates through the trained segments with defenses at their mean, trains a copy or a
substitute of the client with the run's defenses, searches what it does not know as a free variable, estimates from the
defended evidence itself how it is distributed in each class, assuming nothing of what it was before, or reads something
that the effect leaves as it is. An attack that learns nothing, or models parties without the defense, does not adapt;
nor does one that compares rows with known ones by a measure that was fixed without the defense. An estimate is tied to
what victims are known by: their true labels, which do not have the effect of labels that were changed in training.
Layers that a defense puts into segments, what it learns on the side, its codes and its promises are no effects of their
own: layers are part of the segments that everybody asks, holds or replaces, and the others reach nobody but through
the effects.

Of an attack and a defense that is: "not needed" where no effect lies on the path, "adapted" where the attack states all
that do (`Attack.adapts_to`), else "not yet", as of every attack that states nothing.

An attack that chooses among several states what all of them take into account; a result of it is marked by the one that
made the prediction, where it says which (`Outcome.member`).

Random defenses are taken at their mean, or drawn afresh in every query; no attack knows what was drawn.
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
"""Capabilities that change nothing but through the others; see above."""

_EFFECTS: tuple[tuple[type[Defense], DefenseEffect], ...] = (
    (capability.GradientDefense, DefenseEffect.GRADIENT),
    (capability.ReceiverPenaltyDefense, DefenseEffect.RECEIVER_PENALTY),
    (capability.LabelDefense, DefenseEffect.LABELS),
    (capability.WeightDefense, DefenseEffect.WEIGHTS),
)
"""The capabilities that have one effect wherever they stand."""


class Mark(StrEnum):
    """Whether an attack adapts to a defense."""

    ADAPTED = "adapted"
    NOT_NEEDED = "not needed"
    NOT_YET = "not yet"


def effects(defense: Defense) -> frozenset[DefenseEffect]:
    """Return what `defense`, with its parameters and where it stands, changes."""
    found = {effect for capability, effect in _EFFECTS if isinstance(defense, capability)}
    if isinstance(defense, capability.ReleaseDefense):
        if defense.uploads:
            found.add(DefenseEffect.UPLOAD)
        if not defense.on or any(not name.endswith(UPLOAD) for name in defense.on):
            found.add(DefenseEffect.RELEASE)
    if isinstance(defense, capability.PenaltyDefense):
        found.add(DefenseEffect.LAYER_PENALTY if defense.penalty_reads_layers else DefenseEffect.PENALTY)
    if isinstance(defense, capability.TaskWeightDefense) and defense.weighs_task:
        found.add(DefenseEffect.TASK_WEIGHT)
    return frozenset(found)


def path(attack: Attack) -> frozenset[DefenseEffect]:
    """Return the effects that lie between what `attack` is after and what it reads of it.

    Rows that pass at inference are read behind the releases' path; labels in a training step behind the gradients', and
    behind the releases as well where the attack computes from inputs of its own what it had sent. An update, what
    clients send for a method, and all that only training has seen (members, class representatives, the labels of rows
    that the attacker holds itself) are read behind all of training.
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
    """Return whether `attack` adapts to a defense with the effects `changed`."""
    if attack.adapts_to is None:
        return Mark.NOT_YET
    met = path(attack).intersection(changed)
    if not met:
        return Mark.NOT_NEEDED
    return Mark.ADAPTED if met <= attack.adapts_to else Mark.NOT_YET


def unadapted(attack: Attack, defenses: Iterable[Defense], omitted: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of those `defenses` that `attack` does not adapt to, each once.

    `omitted`: names of classes of defenses that it had to leave out where it was installed.
    """
    left_out = set(omitted)
    found = [d for d in defenses if mark(attack, effects(d)) is Mark.NOT_YET or type(d).__name__ in left_out]
    return tuple(dict.fromkeys(name_of("defenses", type(defense)) for defense in found))
