"""Conversion of an SVG file into an element for a page whose policy forbids inline styles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
FONT = "system-ui, Helvetica, Arial, sans-serif"
_WRITTEN = """
clip-path clip-rule color display fill fill-opacity fill-rule font-family font-size font-stretch font-style font-variant
font-weight image-rendering letter-spacing opacity overflow paint-order shape-rendering stop-color stop-opacity stroke
stroke-dasharray stroke-dashoffset stroke-linecap stroke-linejoin stroke-miterlimit stroke-opacity stroke-width
text-anchor text-decoration text-rendering vector-effect visibility
"""
PRESENTATION = frozenset(_WRITTEN.split())
"""The properties of CSS that SVG also takes as attributes of an element."""

# Defaults that matplotlib writes into the style sheet of every figure.
_DEFAULTS = {"stroke-linejoin": "round", "stroke-linecap": "butt"}
_DROPPED = (f"{{{SVG}}}style", f"{{{SVG}}}metadata")


def inline_svg(text: str, name: str, alt: str = "") -> str:
    """Return the SVG file `text` as one element without styles; `name` is the prefix of its ids, to make them unique.

    `alt`: its alternative text. Styles become equivalent attributes; text gets the page's own font, which every machine
    has. Names are changed only as ids and references, never in the text of the picture.
    """
    root = ElementTree.fromstring(text)
    for parent in root.iter():
        for child in [c for c in parent if c.tag in _DROPPED]:
            parent.remove(child)
    for key, value in _DEFAULTS.items():
        root.attrib.setdefault(key, value)
    for element in root.iter():
        _styles_to_attributes(element)
        _prefix_ids(element, name)
    root.attrib |= {"role": "img", "aria-label": alt} if alt else {}
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _styles_to_attributes(element: ElementTree.Element) -> None:
    """Move the style of `element` into attributes."""
    for key, value in _parse_style(element.attrib.pop("style", "")):
        if key in PRESENTATION:
            element.set(key, FONT if key == "font-family" else value)


def _parse_style(style: str) -> Iterator[tuple[str, str]]:
    """Yield property and value of each declaration; the font shorthand is split into its parts."""
    for declaration in style.split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        shorthand = re.fullmatch(r"(.*?)([\d.]+px)\s+\S.*", value) if key == "font" else None
        if shorthand is None:
            yield key, value
        else:
            for word in shorthand[1].split():
                yield ("font-style" if word in ("italic", "oblique") else "font-weight"), word
            yield "font-size", shorthand[2]
            yield "font-family", FONT


def _prefix_ids(element: ElementTree.Element, name: str) -> None:
    """Add the prefix `name` to the element's id, and to the ids that it refers to."""
    for key, value in element.attrib.items():
        if key == "id":
            element.set(key, f"{name}-{value}")
        elif key in ("href", f"{{{XLINK}}}href") and value.startswith("#"):
            element.set(key, f"#{name}-{value[1:]}")
        elif value.startswith("url(#"):
            element.set(key, f"url(#{name}-{value[5:]}")
