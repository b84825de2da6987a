"""The knowledge of an adversary beside its view: a table of fields, each with what a threat model must grant for it.

The metadata of a field state the grant. From them follow the fields an attack is shown (`Knowledge.only`), its missing
requirements (`Knowledge.missing`), the tensors that are copied (`Knowledge.copy`), and the fields that end a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from splitfed.attacks.encrypted_layer import EncryptedLayer
from splitfed.attacks.gradients.local_training import LocalTraining
from splitfed.attacks.local_models import Clone, Imitate, Releases, TrainedAttack
from splitfed.attacks.threat_model import STEPS, Needs
from splitfed.attacks.uploads.exchanged_model import ExchangedModel, PublicScores
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.payload import copy_nested

_Value = TypeVar("_Value")

IN_VIEW: Mapping[Needs, Callable[[View], bool]] = {
    Needs.RELEASES: lambda view: bool(view.select(kind="activation").messages),
    Needs.GRADIENTS: lambda view: bool(view.select(kind="gradient").messages),
    Needs.UPDATES: lambda view: bool(view.select(kind="weights").messages),
    Needs.UPLOADS: lambda view: any(m.receiver == view.party and m.kind not in STEPS for m in view.messages),
}
"""Needs that are met by the view, and a check of each."""


@dataclass(frozen=True)
class Access:
    """Access rule of a field of `Knowledge`.

    `needs`: what must be granted for it, all of them; empty: the field is public. `present(value)`: whether the value
    meets the needs; None if another field with the same needs decides that. `copy(value)`: the value with tensors of
    its own; None if it holds no tensor. `computes`: whether the field is a function that takes time.
    """

    needs: frozenset[Needs] = frozenset()
    present: Callable[[Any], bool] | None = None
    copy: Callable[[Any], Any] | None = None
    computes: bool = False


def is_given(value: Any) -> bool:
    """Return whether the value of a field is not None."""
    return value is not None


def has_rows(value: Any) -> bool:
    """Return whether the value of a field has at least one entry."""
    return value is not None and len(value) > 0


def unwrap(value: _Value | None) -> _Value:
    """Return `value` with None excluded from its type; for fields that the base class has checked."""
    assert value is not None
    return value


def check_classes(attack: str, classes: int | None) -> int:
    """Return the number of classes of the labels; raise `InvalidInput`, naming the `attack`, for labels without any."""
    if classes is None:
        raise InvalidInput(f"{attack} needs labels with classes; those of this run have none")
    return classes


def _copy_object(value: Any) -> Any:
    return None if value is None else value.copy()


def public(copy: Callable[[Any], Any] | None = None) -> dict[str, Access]:
    """Return the metadata of a field that every attack is shown; see `Access`."""
    return {"access": Access(copy=copy)}


def granted(
    *needs: Needs,
    present: Callable[[Any], bool] | None = is_given,
    copy: Callable[[Any], Any] | None = None,
    computes: bool = False,
) -> dict[str, Access]:
    """Return the metadata of a field that is shown only to attacks that require all of `needs`; see `Access`."""
    return {"access": Access(frozenset(needs), present, copy, computes)}


def access_table(kind: type[Knowledge]) -> dict[str, Access]:
    """Return field name -> access rule for `kind`; raise `TypeError` for a field without one."""
    bare = [f.name for f in fields(kind) if "access" not in f.metadata]
    if bare:
        raise TypeError(f"{kind.__name__}.{bare[0]} has no access rule; give it the metadata public() or granted()")
    return {f.name: f.metadata["access"] for f in fields(kind)}


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The adversary's knowledge beside its view; a field is None where the threat model does not grant it.

    Compared by identity.

    `shape`, `value_range`: of one row of the data; `classes`: how many there are, None for regression (both public).
    `auxiliary`: (rows, *shape), no victim among them, with `auxiliary_labels` (rows,). All tensors are on `device`; a
    prediction may be. `query(x)`: what the adversary receives when the victims' own parties process x, defenses
    included. `upstream(x)`: the same as a differentiable function, from the upstream weights, with every defense at its
    mean; `sample(x)`: with defenses that draw afresh, on the adversary's own machine; both come with the weights.
    `architecture(seed)`: the upstream function with weights drawn from the seed, without any trained weight. `loss(x,
    releases, y)`: the mean loss of the adversary's own frozen segments on `releases` for labels y (rows,); x is the
    rows that the releases came from, for segments that read data of the adversary's own. `training_attack`: the state
    of the adversary's training attack. `attributes`: label set -> (labels of the auxiliary rows, how many classes or
    None), the main one left out. `candidates`: rows that were or were not trained on, (n, *shape), in the order of the
    view, `candidate_labels` (n,). `predict(x)`: the first head's output through the victims' own parties, (rows,
    outputs); black box. `model(x)`: the same as a differentiable function, from all weights, with every defense at its
    mean. `local`: how the client trains between the weights it is sent and those it sends back. `own`: the adversary's
    own inputs of the victims' rows, input -> (victims, ...); empty if it has no raw data. `own_auxiliary`: its inputs
    of the auxiliary rows, input -> (rows, ...). `places`: input of the topology -> (k,) the positions in a flattened
    row that it reads (public). `origins`: value that may arrive -> the inputs that it is computed from (public).
    `head()`: a module from what the adversary sends to the loss's logits, with fresh weights in every call. `hints`:
    class -> positions of victims (count,) that are known to belong to it. `extractor(x)`: kind of message -> the
    features of rows x (n, *shape) whose class means such messages hold, (n, ...); differentiable, with the client's
    weights after training, in evaluation mode. `exchanged`: the model that the client and the aggregation server
    exchange, as sent down and returned. `public_scores`: scores of public rows by the client, and by the others on
    average. `fresh_model(seed)`: the client's whole model, from rows to the first head's output, with weights drawn
    anew. `imitate`: trains a copy from fresh weights as the run did: topology, defenses and optimizers.
    `encrypted_layer`: how the adversary's own layer computes on ciphertexts, and learns.
    """

    shape: tuple[int, ...] = field(metadata=public())
    value_range: tuple[float, float] | None = field(default=None, metadata=public())
    auxiliary: Tensor | None = field(
        default=None, metadata=granted(Needs.AUXILIARY, present=has_rows, copy=copy_nested)
    )
    query: Callable[[Tensor], Releases] | None = field(default=None, metadata=granted(Needs.QUERIES, computes=True))
    upstream: Callable[[Tensor], Releases] | None = field(default=None, metadata=granted(Needs.UPSTREAM, computes=True))
    sample: Callable[[Tensor], Releases] | None = field(
        default=None, metadata=granted(Needs.UPSTREAM, present=None, computes=True)
    )
    device: torch.device = field(default=torch.device("cpu"), metadata=public())
    classes: int | None = field(default=None, metadata=public())
    auxiliary_labels: Tensor | None = field(
        default=None, metadata=granted(Needs.AUXILIARY_LABELS, present=has_rows, copy=copy_nested)
    )
    training_attack: TrainedAttack | None = field(
        default=None, metadata=granted(Needs.TRAINING_ATTACK, copy=_copy_object, computes=True)
    )
    attributes: Mapping[str, tuple[Tensor, int | None]] = field(
        default_factory=dict, metadata=granted(Needs.ATTRIBUTES, present=has_rows, copy=copy_nested)
    )
    candidates: Tensor | None = field(default=None, metadata=granted(Needs.CANDIDATES, copy=copy_nested))
    candidate_labels: Tensor | None = field(
        default=None, metadata=granted(Needs.CANDIDATES, present=None, copy=copy_nested)
    )
    predict: Callable[[Tensor], Tensor] | None = field(default=None, metadata=granted(Needs.PREDICTIONS, computes=True))
    model: Callable[[Tensor], Tensor] | None = field(default=None, metadata=granted(Needs.MODEL, computes=True))
    imitate: Imitate | None = field(default=None, metadata=granted(Needs.IMITATION, computes=True))
    extractor: Callable[[Tensor], Releases] | None = field(
        default=None, metadata=granted(Needs.EXTRACTOR, computes=True)
    )
    architecture: Callable[[int], Clone] | None = field(
        default=None, metadata=granted(Needs.ARCHITECTURE, computes=True)
    )
    loss: Callable[[Tensor, Releases, Tensor], Tensor] | None = field(
        default=None, metadata=granted(Needs.DOWNSTREAM, computes=True)
    )
    local: LocalTraining | None = field(default=None, metadata=granted(Needs.UPDATES, copy=_copy_object))
    own: Mapping[str, Tensor] | None = field(default=None, metadata=granted(Needs.OWN_INPUTS, copy=copy_nested))
    head: Callable[[], nn.Module] | None = field(default=None, metadata=granted(Needs.HEAD))
    hints: Mapping[int, Tensor] = field(default_factory=dict, metadata=public(copy=copy_nested))
    own_auxiliary: Mapping[str, Tensor] | None = field(
        default=None, metadata=granted(Needs.OWN_INPUTS, Needs.AUXILIARY_LABELS, present=None, copy=copy_nested)
    )
    places: Mapping[str, Tensor] = field(default_factory=dict, metadata=public(copy=copy_nested))
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict, metadata=public(copy=copy_nested))
    encrypted_layer: EncryptedLayer | None = field(default=None, metadata=granted(Needs.ENCRYPTED_LAYER))
    exchanged: ExchangedModel | None = field(default=None, metadata=granted(Needs.EXCHANGED_MODEL, copy=_copy_object))
    public_scores: PublicScores | None = field(default=None, metadata=granted(Needs.PUBLIC_SCORES, copy=_copy_object))
    fresh_model: Callable[[int], nn.Module] | None = field(
        default=None, metadata=granted(Needs.FRESH_MODEL, computes=True)
    )

    def only(self, needs: frozenset[Needs]) -> Knowledge:
        """Return this knowledge without the fields that `needs` does not grant."""
        hidden = {name for name, access in access_table(type(self)).items() if not access.needs <= needs}
        nothing = type(self)(self.shape)
        return replace(self, **{name: getattr(nothing, name) for name in hidden})

    def copy(self) -> Knowledge:
        """Return this knowledge with copies of its tensors and modules, which an attack may change."""
        copiers = {name: access.copy for name, access in access_table(type(self)).items()}
        return replace(self, **{name: copy(getattr(self, name)) for name, copy in copiers.items() if copy is not None})

    def missing(self, needs: frozenset[Needs], view: View) -> list[str]:
        """Return the names of those `needs` that neither this knowledge nor `view` meets."""
        absent = {need for need, is_there in IN_VIEW.items() if not is_there(view)}
        for name, access in access_table(type(self)).items():
            if access.present is not None and not access.present(getattr(self, name)):
                absent |= access.needs
        return [str(need) for need in Needs if need in needs & absent]


access_table(Knowledge)
