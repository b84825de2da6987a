"""The pages a person reads, README.md and docs/: `python -m tests.pages` writes their tables from the registries."""

from __future__ import annotations

import re
from pathlib import Path

from splitfed.registry import TABLES, load, read_head

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "contributing").glob("*.md")))
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
ADAPTATION = re.compile(r"(<!-- adaptation: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
OVERVIEW = re.compile(r"(<!-- overview -->\n).*?(<!-- end -->)", re.DOTALL)
TITLES = {"aggregation": "aggregation rules", "methods": "federated methods"}
"""What a kind of the registry is called on the pages, where that is not its own name."""
MARKS = {"adapted": "●", "not needed": "·", "not yet": "○"}
"""How the tables of adaptation say it."""


def table(kind: str) -> str:
    """Return the rows of `kind` as a Markdown table; the paper's column only where there is one."""
    heads = [read_head(kind, name) for name in TABLES[kind]]
    papers = any(h.paper for h in heads)
    lines = ["| name | what it is | paper |", "|---|---|---|"] if papers else ["| name | what it is |", "|---|---|"]
    for found in heads:
        cells = [f"`{found.name}`", found.summary, *([found.paper] if papers else [])]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def overview() -> str:
    """Return how many there are of every kind, and their names, with links to the pages that hold the tables."""
    page_of = {kind: page.name for page in PAGES for kind in re.findall(r"<!-- table: (\w+) -->", read(page))}
    lines = ["| what | how many | names |", "|---|---|---|"]
    for kind, rows in TABLES.items():
        title = TITLES.get(kind, kind).capitalize()
        names = ", ".join(f"`{name}`" for name in rows)
        lines.append(f"| [{title}](docs/{page_of[kind]}) | {len(rows)} | {names} |")
    return "\n".join(lines) + "\n"


def adaptation(group: str) -> str:
    """Return for every attack, at its usual budget, whether it adapts to the defenses of `group`, as a table.

    group: of "releases", of the "sender" in training, or of "training" otherwise.
    """
    # The defenses have parameters in a test, and their classes take torch along.
    from splitfed.attacks.base import DefenseEffect
    from splitfed.threats.adaptation import effects, mark
    from tests.defenses.test_every_defense import DEFENSES

    def group_of(found: frozenset[DefenseEffect]) -> str:
        if found & {DefenseEffect.PENALTY, DefenseEffect.LAYER_PENALTY}:
            return "sender"
        return "releases" if DefenseEffect.RELEASE in found else "training"

    columns = {f"`{name}`": effects(DEFENSES[name]) for name in TABLES["defenses"]}
    columns = {name: found for name, found in columns.items() if group_of(found) == group}
    if group == "releases":
        columns["on uploads"] = frozenset({DefenseEffect.UPLOAD})
    lines = ["| " + " | ".join(["attack", *columns]) + " |", "|---" + "|:-:" * len(columns) + "|"]
    for name in TABLES["attacks"]:
        attack = load("attacks", name).with_budget()
        lines.append("| " + " | ".join([f"`{name}`", *(MARKS[mark(attack, c)] for c in columns.values())]) + " |")
    return "\n".join(lines) + "\n"


def read(page: Path) -> str:
    """Return the text of `page`."""
    return page.read_text("utf-8")


def contributing() -> str:
    """Return the text of CONTRIBUTING.md and of the pages that it leads to."""
    return "\n".join(map(read, CONTRIBUTING))


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of `page` in `language`, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def current(text: str) -> str:
    """Return `text` with every marked table made anew."""
    text = TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], text)
    text = ADAPTATION.sub(lambda found: found[1] + adaptation(found[2]) + found[3], text)
    return OVERVIEW.sub(lambda found: found[1] + overview() + found[2], text)


def headings(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    anchors: set[str] = set()
    for line in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in anchors:
            number += 1
        anchors.add(anchor)
    return anchors


def prose(text: str) -> str:
    """Return `text` without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def broken_links(page: Path) -> list[str]:
    """Return the links of `page` whose file or heading is missing; addresses on the web are left alone."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(read(page))):
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", name):
            continue
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in headings(read(file))):
            broken.append(target)
    return broken


if __name__ == "__main__":
    for one in PAGES:
        one.write_text(current(read(one)), "utf-8")
