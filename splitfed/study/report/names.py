"""Short names for people: of a label's parameters, only those that tell it from its neighbours are shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from splitfed.study.report.data import NO_DEFENSE

_LABEL = re.compile(r"(\w+)\((.*)\)")


def short_names(labels: Sequence[str], *, alone: bool = False) -> dict[str, str]:
    """Return label -> short name, all different; `noise(scale=0.5, relative=true)` may become `noise(scale=0.5)`.

    A parameter that has the same value in all labels of the same name is dropped, and "none" is "undefended". The only
    label of its name keeps its parameters if `alone`.
    """
    groups: dict[str, list[str]] = {}
    for label in dict.fromkeys(labels):
        groups.setdefault(_LABEL.sub(r"\1", label), []).append(label)
    names: dict[str, str] = {}
    for name, members in groups.items():
        parameters = [(found[2].split(", ") if (found := _LABEL.fullmatch(label)) else []) for label in members]
        shared = set() if alone and len(members) == 1 else set(parameters[0]).intersection(*parameters[1:])
        for label, own in zip(members, parameters, strict=True):
            telling = ", ".join(p for p in own if p not in shared)
            names[label] = f"{name}({telling})" if telling else name
    if NO_DEFENSE in names:
        names[NO_DEFENSE] = "undefended"
    if len(set(names.values())) < len(names):
        return {label: label for label in names}
    return names
