"""Leakage of releases without an attack, by Fisher information, mutual information and closed forms.

Four measures, none of which trains an attack:

- the lower bound on reconstruction error (`splitfed.stats.fisher_information`), if noise of a known density is added to
  all that arrives. No attack has a smaller mean error, whatever its budget, if rows follow the assumed distribution. By
  default that is a Gaussian, which images do not follow: then an attack may beat the bound. With `smoothing` it is
  proven;
- mutual information between row and release, between two estimates (`splitfed.stats.mutual_information`);
- usable information, after Xu, Zhao, Song, Stewart, Ermon, "A theory of usable information under computational
  constraints", ICLR 2020, for the family of Gaussians around an affine prediction: log(V / E) / 2 nats a number, with V
  the mean squared error of the mean row and E that of `linear_inverse`; negative if the fit is worse than the mean row;
- invertibility, this project's own: 1 - E / V, the share of the variance that the best floor recovers, with E the least
  error of `linear_inverse` and the nearest rows.

The last two are lower estimates of the leakage; the first is an upper one for rows of the assumed distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import Releases
from splitfed.attacks.scoring.reconstruction_metrics import mean_image, mse
from splitfed.core.defense import ReleaseDefense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.per_client_defenses import of_client
from splitfed.core.random import generator
from splitfed.registry import load
from splitfed.stats.fisher_information import ReconstructionBound, fisher_information, prior_of, reconstruction_bound
from splitfed.stats.intervals import Interval, metric_interval
from splitfed.stats.mutual_information import MutualInformation, mutual_information
from splitfed.threats.attack_requests import Observation
from splitfed.threats.evaluator import Evaluator
from splitfed.threats.floors import FLOORS
from splitfed.threats.knowledge import check_client

MOST_OTHERS = 1000
"""Number of auxiliary rows that a release is compared with for mutual information."""


class _Noise(NamedTuple):
    """Noise that a defense adds to a release: its `kind` and its `size` (standard deviation, or Laplace scale).

    `relative`: the ratio of the size to the standard deviation of the batch's release, for noise that is scaled by it;
    the victims then count as one batch.
    """

    kind: str
    size: float
    relative: float | None = None


@dataclass(frozen=True)
class ReleaseInformation:
    """Information that the releases received by `adversary` hold about the victims' rows.

    `bound`: lower bound on the mean squared error of every attack, for rows of the distribution `bound.assumed`;
    `mutual`: mutual information in nats. Both are None if no noise of a known density is added; `why` states the
    reason. `usable`: usable information in nats a number, and `invertibility`, a share of the variance: each with its
    interval over victims, None if no closed form could be computed. All measures refer to the `releases` of each row
    together.
    """

    adversary: str
    bound: ReconstructionBound | None
    mutual: MutualInformation | None
    why: str
    usable: Interval | None
    invertibility: Interval | None
    releases: int = 1


def measure_release(evaluator: Evaluator, asked: Observation, smoothing: float | None = None) -> ReleaseInformation:
    """Return the information measures of what a party receives when the client's parties process the victims.

    `smoothing`: standard deviation of Gaussian noise that the victims' rows themselves contain, which makes the bound
    proven for the rows with that noise; None: a Gaussian distribution of rows is assumed. Each of several releases has
    its own noise: the Fisher information is multiplied by their number, and closed forms use their mean. Raises
    `InvalidInput` if rows are token ids, if the party holds a part of them, or if it computes on ciphertexts.
    """
    party, victims, client, seed = asked.party, asked.victims, asked.client, asked.seed
    _check_measurable(evaluator, party, client)
    view, releases = evaluator.observe(asked), asked.releases
    arrived = view.select(kind="activation")
    if not arrived.messages:
        raise InvalidInput(f"no release arrives at party {party!r}: there is nothing to measure")
    if not all(bool(torch.isfinite(z).all()) for z in arrived.tensors().values()):
        raise InvalidInput(f"what arrives at party {party!r} is not finite; expected finite numbers")
    usable, invertibility = _closed_forms(evaluator, view, asked)
    upstream: Callable[[Tensor], Releases] = evaluator.grants.trained_segments(
        client, evaluator.engine.parties[party].role
    )
    # Many victims come in several messages of the same value.
    names = list(arrived.tensors())
    x, auxiliary = (rows.x.to(evaluator.engine.device) for rows in (victims, evaluator.data.auxiliary))
    with torch.no_grad():
        clean = upstream(x)
    try:
        noise = {name: _noise_of(evaluator, party, client, name, clean[name]) for name in names}
        if len(auxiliary) < 2:
            raise InvalidInput("there are no auxiliary rows to estimate the distribution of rows from")
    except InvalidInput as error:
        return ReleaseInformation(party, None, None, str(error), usable, invertibility, releases)

    def scaled(rows: Tensor) -> Tensor:
        released = upstream(rows)
        return torch.cat([released[name].flatten(1) / noise[name].size for name in names], 1)

    prior = prior_of(auxiliary, smoothing)
    found = fisher_information(
        scaled,
        x,
        prior.directions,
        generator(seed, "information", "probes"),
        known=_size_cotangents(noise, clean) if any(one.relative for one in noise.values()) else None,
    ).repeated(releases)
    kinds = {one.kind for one in noise.values()}
    mutual = None
    if len(kinds) == 1 and len(victims) > 1:
        with torch.no_grad():
            # Several releases stand side by side: one of that many times the numbers.
            own, others = (scaled(rows).repeat(1, releases) for rows in (x, auxiliary[:MOST_OTHERS]))
        mutual = mutual_information(own, others, kinds.pop(), generator(seed, "information", "noise"))
    bound = reconstruction_bound(found, prior)
    return ReleaseInformation(party, bound, mutual, "", usable, invertibility, releases)


def _check_measurable(evaluator: Evaluator, party: str, client: int) -> None:
    """Raise `InvalidInput` if rows are not real numbers, or if `party` holds a part of them or reads nothing."""
    data = evaluator.data
    check_client(evaluator.engine, client)
    if data.victims.discrete:
        raise InvalidInput(f"rows of {data.name} are whole numbers, such as token ids: no derivative is taken")
    if (secure := evaluator.engine.topologies[client].computation) is not None:
        raise InvalidInput(f"party {party!r} {secure.refusals['derivatives']}")
    if evaluator.grants.own_inputs(party, client, data.victims.x[:1]):
        raise InvalidInput(f"party {party!r} holds a part of the rows itself, and the rest may depend on it")


def _closed_forms(evaluator: Evaluator, view: View, asked: Observation) -> tuple[Interval | None, Interval | None]:
    """Return usable information and invertibility, computed from the floors; None if there are no floors."""
    floors, victims, seed = (
        evaluator.released.reconstruct_floors(asked, view),
        asked.victims,
        asked.seed,
    )
    if "linear_inverse" not in floors or len(victims) < 2:
        return None, None
    truth = victims.x
    blind = mse(truth, mean_image(evaluator.data.auxiliary.x).expand(truth.shape))
    if float(blind.mean()) == 0:
        return None, None
    errors = {name: mse(truth, floors[name]) for name in FLOORS if name in floors}
    best = min(errors.values(), key=lambda error: float(error.mean()))
    tiny = torch.finfo(torch.float64).tiny
    return (
        metric_interval(
            lambda error, mean: log(float(mean.mean()) / max(float(error.mean()), tiny)) / 2,
            *(errors["linear_inverse"], blind, generator(seed, "information", "usable")),
        ),
        metric_interval(
            lambda error, mean: 1 - float(error.mean()) / float(mean.mean()),
            *(best, blind, generator(seed, "information", "invertibility")),
        ),
    )


def _noise_of(evaluator: Evaluator, party: str, client: int, value: str, clean: Tensor) -> _Noise:
    """Return the noise added to `value` before it reaches `party`; raise `InvalidInput` if its density is unknown.

    `clean`: (n, ...) the mean of the release.
    """
    topology, role = evaluator.engine.topologies[client], evaluator.engine.parties[party].role
    defenses = [d for d in of_client(evaluator.engine.defenses, client) if isinstance(d, ReleaseDefense)]
    guarded = {
        edge: [d for d in defenses if edge in d.edges(topology)] for edge in (e.name for e in topology.crossings)
    }
    upstream = {s.name for s in topology.upstream(role)}
    for edge in topology.crossings:
        reader = topology.role_of(edge.target)
        if reader != role and edge.target in upstream and guarded[edge.name]:
            raise InvalidInput(f"{type(guarded[edge.name][0]).__name__} acts further up, on {edge.name!r}")
    edges = [e.name for e in topology.crossings if topology.role_of(e.target) == role and value in e.values]
    arrives = edges[0]
    if len(edges) > 1:
        raise InvalidInput(f"{value!r} arrives over {len(edges)} edges, each with draws of its own")
    if not (here := guarded[arrives]):
        raise InvalidInput(f"no noise is added on {arrives!r}: without any, nothing bounds what is reconstructed")
    if len(here) > 1:
        raise InvalidInput(f"{len(here)} defenses change what crosses {arrives!r}; the bound takes one that adds noise")
    for name, describe in NOISES.items():
        if isinstance(here[0], load("defenses", name)) and (found := describe(here[0], clean)).size > 0:
            return found
    raise InvalidInput(f"{type(here[0]).__name__} on {arrives!r} adds no noise of a density that is known")


def _plain_noise(defense: Any, clean: Tensor) -> _Noise:
    size = float(clean.double().std(correction=0)) if defense.relative else 1.0
    return _Noise(defense.kind, defense.scale * size, defense.scale if defense.relative else None)


NOISES: dict[str, Callable[[Any, Tensor], _Noise]] = {
    "noise": _plain_noise,
    "gaussian_release": lambda defense, clean: _Noise("gaussian", defense.multiplier * defense.sensitivity),
    "laplace_release": lambda defense, clean: _Noise("laplace", defense.scale),
}
"""Defense -> function from its instance and the mean of the release to the noise it adds."""


def _size_cotangents(noise: dict[str, _Noise], clean: Releases) -> Callable[[Tensor], Tensor]:
    """Return cotangents for the Fisher information in the size of noise that is scaled by the release's deviation.

    With s times the deviation of N released numbers as the noise's deviation s', the Fisher information has the term
    N/(2 s'^4) (grad s'²)² in addition to J'J/s'²; in units of the noise that is 2 s^4 / N times the square of J'(z -
    mean), for Laplace noise half of it.
    """

    def cotangents(z: Tensor) -> Tensor:
        parts, widths = [], [clean[name][0].numel() for name in noise]
        for part, one in zip(z.split(widths, 1), noise.values(), strict=True):
            times = 2.0 if one.kind == "gaussian" else 1.0
            weight = 0.0 if one.relative is None else one.relative**2 * sqrt(times / part.numel())
            parts.append(weight * (part - part.mean()))
        return torch.cat(parts, 1)

    return cotangents
