"""An accountant of its own: what a run has released is seen where noise is drawn, and composed by privacy losses.

Paper: Koskela, Jälkö, Honkela, "Computing tight differential privacy guarantees using FFT", AISTATS 2020; Sommer,
Meiser, Mohammadi, "Privacy loss classes", PoPETs 2019.

It takes nothing from the ledger, the counts of parties or their accountants. Rows are known by their numbers, whoever
has them; whether something learns, and whether weights travel, by what has changed and crossed. A loss lies between
two points of the grid and is shared between them so that its mean stays, which leaves the epsilon of thousands of uses
right to better than 1e-3.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.fft import irfft, rfft
from scipy.special import ndtr

from splitfed.core import party_state
from splitfed.core.messages import LocalLink, Message, Stamp
from splitfed.core.party import Party
from splitfed.core.step_state import Batch
from splitfed.defenses import GaussianRelease, LabelDp, LaplaceRelease
from splitfed.defenses.private_class_sums import PrivateClassSums
from splitfed.defenses.private_step import PrivateStep
from splitfed.federated import fedproto
from splitfed.training.run import Run

Floats = npt.NDArray[np.float64]

POINTS = 1 << 20
_CELLS, _WIDTH = 200_000, 13.0
REPLACED, ADDED = "one replaced by another", "one added or taken away"
SAME_CLASS = f"{REPLACED} of its class"
COUNTED = ("train", "consult", "evaluate")


class Use(NamedTuple):
    """One use: noise of so many deviations or scales for what a row changes (pure: its epsilon), drawn at a `rate`."""

    kind: str
    noise: float
    rate: float = 1.0


Uses = Mapping[Use, int]


def spent(uses: Uses, delta: float) -> float:
    """Return the epsilon at `delta` of `uses`: the larger one of a row that comes and of one that goes."""
    return max(_spent(tuple(sorted(uses.items())), delta, going) for going in (True, False)) if uses else 0.0


@lru_cache(maxsize=256)
def _spent(uses: tuple[tuple[Use, int], ...], delta: float, going: bool) -> float:
    parts = [(*_losses(use, going), times) for use, times in uses]
    mean = sum(n * float(p @ loss) for loss, p, n in parts)
    spread = math.sqrt(sum(n * float(p @ loss**2) for loss, p, n in parts))
    most = max(float(np.abs(loss).max()) for loss, _, _ in parts)
    # Losses beyond it have no chance that counts beside delta.
    top = min(abs(mean) + 14 * spread + most, sum(n * float(np.abs(loss).max()) for loss, _, n in parts) + 1e-3)
    step = 2 * top / (POINTS - 2)
    spectrum: npt.NDArray[np.complex128] | None = None
    for loss, p, times in parts:
        place = np.clip(loss, -top, top) / step
        low = np.floor(place).astype(np.int64)
        grid = np.bincount(low % POINTS, p * (low + 1 - place), POINTS)
        grid += np.bincount((low + 1) % POINTS, p * (place - low), POINTS)
        power = rfft(grid) ** times
        spectrum = power if spectrum is None else spectrum * power
    chances = np.clip(irfft(spectrum, POINTS), 0.0, None)[: POINTS // 2]
    losses = step * np.arange(POINTS // 2)
    above = np.cumsum(chances[::-1])[::-1]
    shrunk = np.cumsum((chances * np.exp(-losses))[::-1])[::-1]
    left = above - np.exp(losses) * shrunk
    first = int(np.argmax(left <= delta))
    if first == 0:
        return 0.0
    share = (left[first - 1] - delta) / (left[first - 1] - left[first])
    return float(losses[first - 1] + share * step)


@lru_cache(maxsize=256)
def _losses(use: Use, going: bool) -> tuple[Floats, Floats]:
    """Return losses and their chances where the row is there (`going`), or is not."""
    kind, noise, rate = use
    if kind == "pure":
        keep = 1 / (1 + math.exp(-noise))
        return np.array([noise, -noise]), np.array([keep, 1 - keep])
    if kind == "laplace":
        assert rate == 1
        edges = np.linspace(0.0, 1.0, _CELLS + 1)
        inside = 0.5 * np.exp(-edges / noise)
        middles = (edges[1:] + edges[:-1]) / 2
        # The row moves the mean from 1 to 0.
        return (
            np.concatenate([[1 / noise], (1 - 2 * middles) / noise, [-1 / noise]]),
            np.concatenate([[0.5], -np.diff(inside), [inside[-1]]]),
        )
    edges = np.linspace(-_WIDTH * noise, 1 + _WIDTH * noise, _CELLS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    without, with_row = np.diff(ndtr(edges / noise)), np.diff(ndtr((edges - 1) / noise))
    # log(1 - q + q exp((2x - 1) / 2σ²)), so that a large exponent does not overflow.
    exponent = (2 * middles - 1) / (2 * noise**2)
    loss = exponent if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)
    return (loss, (1 - rate) * without + rate * with_row) if going else (-loss, without)


@dataclass
class Seen:
    """What was seen of a run.

    `rows`: of the step at a stamp, by what is in them; `released`: (client, place, use) -> row -> times; `steps`:
    (client, epoch, step, part) -> (multiplier, whether the norm is joint) of each guarded party; `trained`: client ->
    the rows that it has released in training steps; `labels`: use -> (client or party, row) -> times; `messages`:
    (client, place, use) -> times; `sums`: client -> use -> times, of class sums; `travels`: whether weights have left a
    client. `sender` and `made`: of class sums that are yet to be delivered.
    """

    rows: dict[Stamp, list[bytes]] = field(default_factory=dict)
    released: dict[tuple[int, str, Use], Counter[bytes]] = field(default_factory=lambda: defaultdict(Counter))
    steps: dict[tuple[int, int, int, str], list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    trained: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    step_rows: dict[tuple[int, int, int, str], list[bytes]] = field(default_factory=dict)
    labels: dict[Use, Counter[Any]] = field(default_factory=lambda: defaultdict(Counter))
    messages: Counter[tuple[int, str, Use]] = field(default_factory=Counter)
    sums: dict[int, Counter[Use]] = field(default_factory=lambda: defaultdict(Counter))
    travels: bool = False
    sender: int = -1
    made: Use | None = None


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Note into `seen` what parties release inside the block."""
    with pytest.MonkeyPatch.context() as patch:

        def wrap(owner: Any, name: str, note: Callable[..., None], after: bool = False) -> None:
            original = getattr(owner, name)

            def noted(*given: Any, **more: Any) -> Any:
                if not after:
                    note(*given, **more)
                result = original(*given, **more)
                if after:
                    note(*given, **more)
                return result

            patch.setattr(owner, name, noted)

        wrap(Party, "begin", lambda party, batch, stamp, scale=1.0: _begin(seen, party, batch, stamp), after=True)
        wrap(GaussianRelease, "release", lambda d, name, z, context: _release(seen, "gaussian", d, z, context))
        wrap(LaplaceRelease, "release", lambda d, name, z, context: _release(seen, "laplace", d, z, context))
        wrap(PrivateStep, "finish", lambda step: _finish(seen, step))
        wrap(party_state, "relabel_for_training", lambda *given: _relabel(seen, *given))
        wrap(fedproto, "message_noise", lambda seed, replica, number: setattr(seen, "sender", replica))
        wrap(PrivateClassSums, "release", lambda d, *_: _sums(seen, d))
        wrap(LocalLink, "deliver", lambda link, message: _deliver(seen, message))
        yield


def _begin(seen: Seen, party: Party, batch: Batch, stamp: Stamp) -> None:
    if stamp.phase == "train" and batch.task:
        _targets(seen, party, batch, stamp)
    for x in list(party._step_states[stamp.replica].inputs.values())[:1]:
        seen.rows[stamp] = [row.numpy().tobytes() for row in x.detach().contiguous()]


def _release(seen: Seen, kind: str, defense: Any, z: torch.Tensor, context: Any) -> None:
    if not context.party:
        return  # tried out on made-up rows
    stamp, use = context.stamp, Use(kind, defense.multiplier if kind == "gaussian" else 1 / defense.epsilon)
    if context.edge.endswith("->fed_server"):
        seen.messages[stamp.replica, context.edge, use] += len(z)
    elif stamp.phase in COUNTED:
        assert len(seen.rows[stamp]) == len(z)
        seen.released[stamp.replica, context.edge, use].update(seen.rows[stamp])
        if stamp.phase == "train":
            seen.trained[stamp.replica].update(seen.rows[stamp])


def _finish(seen: Seen, step: PrivateStep) -> None:
    if step._step is not None and step._noise_multiplier > 0:
        _, client, *when = step._step.stamp
        key = (client, *when)
        seen.steps[key].append((step._noise_multiplier, bool(step.tells)))
        seen.step_rows[key] = seen.rows.get(step._step.stamp, []) if step._step.rows else []


def _targets(seen: Seen, party: Party, batch: Batch, stamp: Stamp) -> None:
    for _, guards in party.state.relabelled.values():
        for guard in guards:
            if isinstance(guard.defense, LabelDp) and guard.defense.mode == "gradient":
                use = Use("laplace", 1 / guard.defense.epsilon)
                seen.labels[use].update((party.name, stamp.part, int(row)) for row in batch.rows)


def _relabel(seen: Seen, labels: Any, relabelling: Any, seed: int, party: str, part: str) -> None:
    for name, (_, guards) in relabelling.items():
        for guard in guards if name in labels else ():
            if isinstance(guard.defense, LabelDp) and guard.defense.mode == "labels":
                # Asked again it answers the same.
                once = {(party, part, row): 1 for row in range(len(labels[name]))}
                seen.labels[Use("pure", guard.defense.epsilon)] |= Counter(once)


def _sums(seen: Seen, mechanism: PrivateClassSums) -> None:
    seen.made = Use("gaussian", mechanism.multiplier)


def _deliver(seen: Seen, message: Message) -> None:
    if message.kind == "prototype" and seen.made is not None:
        # What a plan only tries out is never delivered.
        seen.sums[seen.sender][seen.made] += 1
        seen.made = None
    seen.travels |= message.kind == "weights" and message.sender.startswith("client")


def client_costs(run: Run, seen: Seen, delta: float) -> dict[tuple[str, str], dict[int, float]]:
    """Return what was seen of `run` as epsilon at `delta`: (what is protected, neighbours) -> client -> epsilon."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    training = run.training
    poisson = training.sampling == "poisson"
    learning = {client: _learns(run, client) for client in range(run.engine.replicas)}
    for client in learning:
        if steps := _steps(run, seen, client):
            found["weights", ADDED if poisson else REPLACED][client] = spent(steps, delta)
        if releases := _releases(run, seen, client, learning, {} if poisson else steps):
            found["all releases at the cut", REPLACED][client] = max(spent(uses, delta) for uses in releases)
        if messages := _messages(seen, client):
            found["what clients send to the fed server", SAME_CLASS][client] = spent(messages, delta)
        if sums := seen.sums.get(client):
            found["what clients send to the fed server", ADDED][client] = spent(sums, delta)
    for use, rows in seen.labels.items():
        found["labels", REPLACED][0] = max(
            found["labels", REPLACED].get(0, 0.0), spent({use: max(rows.values())}, delta)
        )
    return found


def owned(run: Run, client: int) -> set[bytes]:
    """Return all rows of `client` that a run may release, by what is in them."""
    parts = (getattr(run.data.clients[client], part) for part in ("train", "validation", "test"))
    return {row.numpy().tobytes() for rows in parts for row in rows.rows(range(len(rows))).x.contiguous()}


def _learns(run: Run, client: int) -> bool:
    """Whether segments before a cut have changed, and no private step has changed them."""
    topology = run.engine.topologies[client]
    role = topology.data_roles[0]
    party = run.engine.party(client, role)
    first = topology.segments_of(role)[0]
    before, after = first.module.state_dict(), party.state.modules[first.name].state_dict()
    return party.state.privatizer is None and any(not torch.equal(t, after[n].cpu()) for n, t in before.items())


def _steps(run: Run, seen: Seen, client: int) -> Counter[Use]:
    """Return the private steps that a row of the client may show in."""
    training = run.training
    poisson, rows = training.sampling == "poisson", len(run.data.clients[client].train)
    rate = min(1.0, training.of_client(client).batch_size / rows) if poisson else 1.0
    of_row: dict[bytes, Counter[Use]] = defaultdict(Counter)
    for key, guards in seen.steps.items():
        if key[0] != run.engine.run_parties.replicas[client].pseudonym:
            continue
        multiplier = guards[0][0] if guards[0][1] else sum(m**-2 for m, _ in guards) ** -0.5
        # One row in place of another moves a sum by twice the norm.
        use = Use("gaussian", multiplier if poisson else multiplier / 2, rate)
        for row in [b"any"] if poisson else seen.step_rows[key]:
            of_row[row][use] += 1
    return max(of_row.values(), key=lambda uses: sum(uses.values()), default=Counter())


def _releases(run: Run, seen: Seen, client: int, learning: Mapping[int, bool], guarded: Uses) -> list[Counter[Use]]:
    """Return the uses that the rows of the client may show in, a different list each."""
    pseudonym = {replica.pseudonym: replica.index for replica in run.engine.run_parties.replicas}
    mine = owned(run, client)
    reached = {c for c, rows in seen.trained.items() if rows & mine or (seen.travels and learning[pseudonym[c]])}
    wide: Counter[Use] = Counter()
    of_row: dict[bytes, Counter[Use]] = defaultdict(Counter)
    for (c, _, use), rows in seen.released.items():
        if c in reached and learning[pseudonym[c]]:
            wide[use] += sum(rows.values())
        else:
            for row in rows.keys() & mine:
                of_row[row][use] += rows[row]
    if not learning[client] and (of_row or wide) and _changed(run, client):
        wide.update(guarded)
    kinds = {tuple(sorted((uses + wide).items())) for uses in of_row.values()} or {tuple(sorted(wide.items()))}
    return [Counter(dict(kind)) for kind in kinds if kind]


def _changed(run: Run, client: int) -> bool:
    topology = run.engine.topologies[client]
    first = topology.segments_of(topology.data_roles[0])[0]
    return any(p.requires_grad for p in first.module.parameters())


def _messages(seen: Seen, client: int) -> Counter[Use]:
    found: Counter[Use] = Counter()
    for (sender, _, use), times in seen.messages.items():
        if sender == client or seen.travels:
            found[use] += times
    return found


def uses_by_place(seen: Seen) -> dict[str, int]:
    """Return place -> uses of the row that was used most there: what a ledger's line must at least say."""
    found: Counter[str] = Counter()
    for (_, place, _), rows in seen.released.items():
        found[place] = max(found[place], max(rows.values()))
    for (_, place, _), times in seen.messages.items():
        found[place] = max(found[place], times)
    return dict(found)
