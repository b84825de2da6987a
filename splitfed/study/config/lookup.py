"""Looks up what the names in a study mean, registered ones and import paths, under one rule of trust."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splitfed.aggregation.lookup import aggregation_of
from splitfed.core.errors import InvalidInput, describe_error, unknown
from splitfed.models.import_paths import NOUNS, OWN, NameResolver
from splitfed.registry import SINGULAR, TABLES, is_foreign
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.values import parameters_of


@dataclass(frozen=True)
class StudyReader:
    """Reads the tables of one study: `mistakes` collects what is wrong, `code` resolves names and import paths."""

    mistakes: Mistakes
    code: NameResolver

    def find(self, where: str, kind: str, name: str) -> Callable[..., Any] | None:
        """Return what `name`, at `where` in the study, means among `kind`; None after a mistake."""
        if ":" not in name and name not in TABLES[kind]:
            known = [*TABLES[kind], *(["none"] if kind in ("defenses", "methods") else [])]
            hint = f"; {OWN}" if kind == "models" else ""
            self.mistakes.add(where, f"{unknown(SINGULAR[kind], name, known)}{hint}")
            return None
        with self.mistakes.at(where):
            found = self.code.load(kind, name)
            try:
                parameters_of(found)
            except (
                Exception
            ) as error:  # to read the hints of foreign code runs what they name, which may raise anything
                if not is_foreign(kind, name):
                    raise
                refusal = f"{NOUNS[kind]} {name!r} has no parameters to check ({describe_error(error)})"
                raise InvalidInput(refusal) from error
            return found
        return None

    def find_rules(self, given: Any) -> Any:
        """Return `given`, which says how to aggregate, with rules in place of the import paths that name them."""
        table = {"name": given} if isinstance(given, str) else given
        if isinstance(table, Mapping) and "rule" in table:
            return {**table, "rule": self.find_rules(table["rule"])}
        if isinstance(table, Mapping) and ":" in str(table.get("name")):
            return aggregation_of(table, self.code.load)
        return given

    def take_name(self, where: str, table: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """Take the name out of a table; None where it is missing or no text."""
        rest = dict(table)
        if (name := rest.pop("name", None)) is None:
            self.mistakes.add(f"{where}.name", "is missing; expected text")
        elif not isinstance(name, str):
            self.mistakes.add(f"{where}.name", f"{short_repr(name)} is not allowed; expected text")
        return (name if isinstance(name, str) else None), rest
