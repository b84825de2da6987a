"""Methods on groups of parties: the parties of one role, one a group, form a federation of their own.

A group is one replica of a topology in which several parties own data, such as a vertical one: several hospitals, each
with its laboratory. A method that says so (`MethodTraits.role_federations`) is called once for each role, with learners
that stand for that role's parties alone and a state of its own: hospitals average with hospitals, laboratories with
laboratories, and no party's message holds another's weights. All other methods are called once, for whole clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from splitfed.core.topology import Topology
    from splitfed.federated.base import Method, State
    from splitfed.federated.learner import Learner

T = TypeVar("T")


def start_state(method: Method, topology: Topology, clients: int) -> State:
    """Return what the aggregation server keeps before the first round: of a federation a role, by role."""
    roles = method.traits(topology).role_federations
    return {role: method.start(clients) for role in roles} if roles else method.start(clients)


def federations(method: Method, learners: Sequence[Learner], state: State) -> Iterator[tuple[Sequence[Learner], State]]:
    """Yield the learners of every federation that `method` is called for, and its state."""
    roles = method.traits(learners[0].topology).role_federations if learners else ()
    for role in roles:
        yield [learner.at(role) for learner in learners], state[role]
    if not roles:
        yield learners, state


def newest(method: Method, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
    """Return the weights that the client would use now, of all its parties; None: its own."""
    return _merged(method, learner, state, method.newest)


def scores(method: Method, learner: Learner, part: str, state: State) -> Mapping[str, float]:
    """Return further scores of the client on `part`, from an inference of the method's own; see `Method.scores`."""
    return _merged(method, learner, state, lambda one, known: method.scores(one, part, known)) or {}


def _merged(
    method: Method, learner: Learner, state: State, ask: Callable[[Learner, State], Mapping[str, T] | None]
) -> Mapping[str, T] | None:
    """Return what `ask` returns of the client's federations; as it is where there is one."""
    found = [ask(one, known) for (one,), known in federations(method, [learner], state)]
    if len(found) == 1:
        return found[0]
    merged = {name: value for answer in found for name, value in (answer or {}).items()}
    return merged or None
