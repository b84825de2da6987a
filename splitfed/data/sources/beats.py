"""Beats: synthetic heartbeats of one lead in five classes, sums of Gaussian waves drawn from a seed; no recordings.

Paper: McSharry, Clifford, Tarassenko, Smith, "A dynamical model for generating synthetic electrocardiogram signals",
IEEE Transactions on Biomedical Engineering 2003, for the Gaussian events P, Q, R, S and T. The five classes are those
that Khan, Nguyen, Michalas, "Split Ways: privacy-preserving training of encrypted data using split learning", HeDAI at
EDBT/ICDT 2023, take from the MIT-BIH arrhythmia database (Moody, Mark, 2001).

Deviates: one beat at a time is the sum of its events itself, sum_i a_i exp(-(t - m_i)^2 / (2 s_i^2)), to which the
paper's third equation integrates without its relaxation, so that every number is known in closed form. Two events are
added: a second R, as in bundle branch blocks, and the T of the beat before, which a premature atrial beat overlaps.
Amplitudes, positions and widths of the classes are chosen here after textbook drawings of lead II; none is fitted to
recordings. **No figure on these rows, accuracy or leakage, is comparable with one on MIT-BIH.**
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_names, check_number
from splitfed.core.random import generator
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset

LENGTH, MILLISECONDS = 128, 1000 / 180
"""Samples of a beat, and the time between two of them: 180 a second, half of MIT-BIH's rate."""
PEAK = 51
"""Mean position of R: the sample with time 0."""

CLASSES = (
    "normal",
    "left bundle branch block",
    "right bundle branch block",
    "premature atrial",
    "premature ventricular",
)
EVENTS = ("P", "Q", "R", "second R", "S", "T", "T of the beat before")
# Mean of every event, a row a class, a column an event.
AMPLITUDES = (
    (0.15, -0.10, 1.00, 0.00, -0.20, 0.30, 0.00),
    (0.15, 0.00, 0.75, 0.50, -0.10, -0.20, 0.00),
    (0.15, -0.10, 0.90, 0.20, -0.45, 0.22, 0.00),
    (0.06, -0.10, 0.95, 0.00, -0.20, 0.28, 0.16),
    (0.00, -0.05, 1.10, 0.15, -0.40, -0.35, 0.00),
)
"""In mV; 0 is an event that the class lacks on average."""
TIMES = (
    (-170, -33, 0, 60, 33, 270, -230),
    (-185, -40, 0, 55, 100, 285, -230),
    (-170, -33, 0, 80, 52, 280, -230),
    (-135, -33, 0, 60, 33, 265, -215),
    (-170, -60, 5, 60, 95, 280, -230),
)
"""In ms after R."""
WIDTHS = (
    (24, 9, 11, 16, 10, 48, 45),
    (24, 9, 19, 19, 16, 50, 45),
    (24, 9, 12, 16, 24, 50, 45),
    (18, 9, 11, 16, 10, 48, 45),
    (24, 20, 34, 24, 32, 60, 45),
)
"""One standard deviation of the Gaussian, in ms."""

# Standard deviations between beats at a `spread` of 1.
AMPLITUDE, EXTRA, PLACE, WIDTH = 0.20, 0.03, 10.0, 0.15
"""For an event: relative amplitude, additive amplitude in mV, time in ms, logarithm of the width."""
GAIN, JITTER = 0.20, 8.0
"""For a beat: logarithm of its gain, and time shift in ms, from errors in the detection of R."""
WANDER = 0.10
"""Standard deviation of the amplitude of baseline wander in mV."""
SLOWEST, FASTEST = 0.15, 0.5
"""Frequencies of baseline wander in Hz: those of breath."""
PATIENT = 0.5
"""Share of the variance between beats of a class that is between patients, where there are patients."""

RHYTHMS = 3
"""Number of leading classes that are rhythms, of which a patient has one; premature beats occur with any of them."""
SHARES: dict[str, tuple[float, ...]] = {
    "balanced": (1.0, 1.0, 1.0, 1.0, 1.0),
    # Beats of these five classes in the whole database.
    "mit_bih": (75052.0, 8075.0, 7259.0, 2546.0, 7130.0),
}


def beats(
    rows: int = 2500,
    noise: float = 0.05,
    spread: float = 1.0,
    shares: Sequence[float] | Literal["balanced", "mit_bih"] = "balanced",
    patients: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Return x (rows, 1, 128) in mV without bounds, and the five `CLASSES`: synthetic, not recorded, heartbeats.

    No figure on them is comparable with one on MIT-BIH. `noise` >= 0: standard deviation in mV of white noise at every
    sample. `spread` >= 0: variation of beats within a class, 1 as tuned, 0 for noise alone; it multiplies the
    deviations of amplitudes, times and widths, of the gain, of the detected time of R, and of baseline wander. `shares`
    of the classes: "balanced" (the default, in which accuracy counts every class alike), "mit_bih" (three quarters are
    normal), or five numbers of at least 0. Classes alternate as evenly as their shares allow.

    `patients`, at least 3, assigns the rows to as many patients, which are the `groups`: half of the variance between
    beats is then between patients, and `clients` tests on other patients than it trains on. Each patient has one
    rhythm, normal or a block, in the proportions of the shares, and premature beats in addition. Without it every row
    is independent of all others.
    """
    check_count("rows", rows, low=2)
    check_number("noise", noise, low=0.0)
    check_number("spread", spread, low=0.0)
    weights = _weights(shares)
    y = _in_turn(weights, rows)
    patient = None
    if patients is not None:
        check_count("patients", patients, low=RHYTHMS)
        patient = _assign_patients(y, weights, patients, generator(seed, "beats", "patients"))
    clean = _draw(y, patient, patients or 0, spread, seed)
    white = torch.randn(rows, LENGTH, generator=generator(seed, "beats", "noise"), dtype=torch.float64)
    x = (clean + noise * white).float()[:, None]
    return Dataset("beats", x, y, classification(len(CLASSES)), groups=patient)


def mean_beats() -> Tensor:
    """Return the beat of mean amplitudes, times and widths for every class, in mV: (5, 128) float64."""
    return _sum_of_events(*_means())


def _means() -> tuple[Tensor, Tensor, Tensor]:
    """Return mean amplitudes, times and widths, each (classes, events) float64."""
    amplitude, time, width = (torch.tensor(table, dtype=torch.float64) for table in (AMPLITUDES, TIMES, WIDTHS))
    return amplitude, time, width


def _sum_of_events(amplitude: Tensor, place: Tensor, width: Tensor) -> Tensor:
    """Return beats (n, 128) in mV from amplitudes, times and widths (n, events) in mV, ms, ms; one event at a time."""
    time = _times()
    beat = torch.zeros(len(amplitude), LENGTH, dtype=torch.float64)
    for a, m, s in zip(amplitude.T, place.T, width.T, strict=True):
        beat += a[:, None] * torch.exp(-((time - m[:, None]) ** 2) / (2 * s[:, None] ** 2))
    return beat


def _times() -> Tensor:
    return (torch.arange(LENGTH, dtype=torch.float64) - PEAK) * MILLISECONDS


def _draw(y: Tensor, patient: Tensor | None, patients: int, spread: float, seed: int) -> Tensor:
    """Return noiseless beats (n, 128) in mV, of the classes y (n,) and, if given, of these patients."""
    events = len(EVENTS)
    random = generator(seed, "beats", "rows")
    # Of every event: share and offset of the amplitude, time, width; of the whole beat: gain and time.
    normal = torch.randn(len(y), 4 * events + 2, generator=random, dtype=torch.float64)
    if patient is not None:
        own = generator(seed, "beats", "patient parameters")
        shared = torch.randn(patients, 4 * events + 2, generator=own, dtype=torch.float64)
        normal = PATIENT**0.5 * shared[patient] + (1 - PATIENT) ** 0.5 * normal
    share, offset, shift, stretch = (spread * normal[:, : 4 * events]).view(-1, 4, events).unbind(1)
    gain, jitter = (spread * normal[:, 4 * events :]).unbind(1)
    amplitude, place, width = (mean[y] for mean in _means())
    amplitude = (amplitude * (1 + AMPLITUDE * share) + EXTRA * offset) * torch.exp(GAIN * gain)[:, None]
    place = place + PLACE * shift + JITTER * jitter[:, None]
    beat = _sum_of_events(amplitude, place, width * torch.exp(WIDTH * stretch))
    return beat + spread * _wander(len(y), random)


def _wander(rows: int, random: torch.Generator) -> Tensor:
    """Return baseline wander (rows, 128) in mV: a sine of random phase for each row."""
    height = WANDER * torch.randn(rows, 1, generator=random, dtype=torch.float64)
    drawn = torch.rand(rows, 2, generator=random, dtype=torch.float64)
    frequency, phase = SLOWEST + (FASTEST - SLOWEST) * drawn[:, :1], drawn[:, 1:]
    return height * torch.sin(2 * math.pi * (frequency * _times() / 1000 + phase))


def _weights(shares: Sequence[float] | str) -> tuple[float, ...]:
    """Return a checked share for every class; the shares need not sum to 1."""
    if isinstance(shares, str):
        check_names("shares", SHARES, shares)
        return SHARES[shares]
    if not isinstance(shares, (list, tuple)) or len(shares) != len(CLASSES):
        raise InvalidInput(f"shares={shares!r} is not allowed; expected {', '.join(SHARES)} or {len(CLASSES)} numbers")
    for share in shares:
        check_number("shares", share, low=0.0)
    if not sum(shares) > 0:
        raise InvalidInput(f"shares={list(shares)} is not allowed; expected one above 0")
    return tuple(float(share) for share in shares)


def _apportion(weights: Sequence[float], total: int, least: int = 0) -> list[int]:
    """Return whole numbers with sum `total` in proportion to `weights`, by largest remainder, each at least `least`."""
    exact = [weight / sum(weights) * (total - least * len(weights)) for weight in weights]
    counts = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - least * len(weights) - sum(counts)]:
        counts[i] += 1
    return [least + count for count in counts]


def _in_turn(weights: Sequence[float], rows: int) -> Tensor:
    """Return classes (rows,) int64 in these shares, each spread evenly over the rows."""
    counts = _apportion(weights, rows)
    places = torch.cat([(torch.arange(count, dtype=torch.float64) + 0.5) / count for count in counts])
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return labels[places.argsort(stable=True)]


def _assign_patients(y: Tensor, weights: Sequence[float], patients: int, random: torch.Generator) -> Tensor:
    """Return a patient (n,) int64 for every row: one with this rhythm, or for premature beats any."""
    rhythm_weights = weights[:RHYTHMS] if sum(weights[:RHYTHMS]) > 0 else (1.0,) * RHYTHMS
    ends = torch.tensor(_apportion(rhythm_weights, patients, least=1)).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
    rhythm = y < RHYTHMS
    first = torch.where(rhythm, starts[y.clamp(max=RHYTHMS - 1)], 0)
    last = torch.where(rhythm, ends[y.clamp(max=RHYTHMS - 1)], patients)
    drawn = torch.rand(len(y), generator=random, dtype=torch.float64)
    return first + ((last - first) * drawn).long()
