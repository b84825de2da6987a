"""Reports whose figures nobody looks at: everything is plotted, and the picture that is saved is empty.

To lay out and draw the figures of a report takes several times as long as all else that is in it. The marker `drawn`
says that a test, or a whole file, looks at the pictures; `make test-all` draws all of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BLANK = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>'


class Pictures:
    """Whether the figures of reports are drawn; a test's marker decides before it starts."""

    drawn = True

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw the figures of what a fixture prepares for several tests, whichever of them comes first."""
        before, self.drawn = self.drawn, True
        try:
            yield
        finally:
            self.drawn = before

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace what takes long between a finished plot and the SVG of it, where figures are not drawn."""
        from matplotlib.figure import Figure

        from splitfed.drawing import figure as style

        keep_room, plain_text, save = style.keep_room, style._disable_math_text, Figure.savefig

        def savefig(figure: Figure, file: Any, **options: Any) -> None:
            if self.drawn or not isinstance(file, io.StringIO):
                save(figure, file, **options)
            else:
                file.write(BLANK)

        patch.setattr(style, "keep_room", lambda figure: keep_room(figure) if self.drawn else None)
        patch.setattr(style, "_disable_math_text", lambda figure: plain_text(figure) if self.drawn else None)
        patch.setattr(Figure, "savefig", savefig)


PICTURES = Pictures()
