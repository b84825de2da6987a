"""What a browser would run, apply or load of a report, and the rules that every report keeps."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects what a browser would run, apply or load; text of figures is text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.inside: dict[str, list[str]] = {"style": [], "script": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in self.inside and self.cdata_elem is not None:
            self.inside[self.tags[-1][0]].append(data)

    @property
    def policy(self) -> dict[str, list[str]]:
        (text,) = (a["content"] for tag, a in self.tags if a.get("http-equiv") == "Content-Security-Policy")
        return {rule.split()[0]: rule.split()[1:] for rule in text.split(";")}


def check(text: str) -> Page:
    """Assert all that keeps a report harmless, in whatever it is made of."""
    page = Page(text)
    hashes = {
        kind: [f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts]
        for kind, parts in page.inside.items()
    }
    assert [len(parts) for parts in hashes.values()] == [1, 1]
    assert page.policy == {
        "default-src": ["'none'"],
        "style-src": hashes["style"],
        "script-src": hashes["script"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    # A policy holds for what stands below it.
    assert [tag for tag, _ in page.tags[:4]] == ["html", "head", "meta", "meta"]
    assert page.tags[3][1]["http-equiv"] == "Content-Security-Policy"
    for tag, attributes in page.tags:
        assert "style" not in attributes, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert tag not in ("iframe", "object", "embed", "link", "base", "form", "foreignobject", "animate", "set")
        uses = [attributes[name] for name in ("src", "href", "xlink:href", "action", "data") if name in attributes]
        assert all(use.startswith(("#", "data:image/png;base64,")) for use in uses), (tag, attributes)
        assert "javascript:" not in str(attributes)
    return page
