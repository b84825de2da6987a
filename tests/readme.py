"""The tables of README.md, made from the registries: `python -m tests.readme` writes them into the file."""

from __future__ import annotations

import re
from pathlib import Path

from splitfed.registry import TABLES, read_head

README = Path(__file__).resolve().parent.parent / "README.md"
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(kind: str) -> str:
    """Return the rows of `kind` as a Markdown table; the paper's column only where there is one."""
    heads = [read_head(kind, name) for name in TABLES[kind]]
    if not heads:
        return "None yet.\n"
    papers = any(h.paper for h in heads)
    lines = ["| name | what it is | paper |", "|---|---|---|"] if papers else ["| name | what it is |", "|---|---|"]
    for found in heads:
        cells = [f"`{found.name}`", found.summary, *([found.paper] if papers else [])]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def current(text: str) -> str:
    """Return `text` with every marked table made anew."""
    return MARK.sub(lambda found: found[1] + table(found[2]) + found[3], text)


if __name__ == "__main__":
    README.write_text(current(README.read_text("utf-8")), "utf-8")
