"""Python files of one folder as modules, run from source only, never from compiled files next to them.

The folder is not on Python's path: a file in it is used only if no other module has its name, so that no file of a
study can replace a module that other code imports later.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from splitfed.core import digests
from splitfed.core.errors import InvalidInput

_PACKAGES = {"site-packages", "dist-packages"}


class LocalModules:
    """The modules in `folder` (an absolute path); `files`: those that may be run, as for `NameResolver`.

    Python's import searches one such folder at a time: the one entered last. If `files` are given, they take precedence
    over modules of the same name that are no part of Python or of an installed package: those are the originals of
    which these are copies, and are restored when another folder is entered.
    """

    def __init__(self, folder: Path, files: Mapping[str, str] | None) -> None:
        self.folder = folder
        self._files = files
        self._run: dict[str, bytes] = {}
        self._aside: dict[str, ModuleType] = {}

    def has(self, module: str) -> bool:
        """Return whether the first name of `module` is that of a file or a package in the folder.

        False, if any file may be run, for a file that other code has imported already.
        """
        name = module.partition(".")[0]
        own = self._file(self.folder, name)
        if own is None:
            return False
        file = getattr(sys.modules.get(name), "__file__", None)
        same = file is not None and Path(file).resolve() == own.resolve() and not self._came_from_a_folder(name)
        return self._files is not None or not same

    def check(self, what: str, module: str) -> None:
        """Raise `InvalidInput` for a file with the name of a module elsewhere, which would be ambiguous."""
        name = module.partition(".")[0]
        loaded = name in sys.modules and not self._came_from_a_folder(name)
        if name in sys.stdlib_module_names or loaded or self._exists_elsewhere(name):
            raise InvalidInput(
                f"{what}: {name!r} in {str(self.folder)!r} has the name of a module of Python, of an installed "
                "package, or of one that is loaded; rename it"
            )

    def enter(self) -> None:
        """Make Python's import search this folder, and no folder that was entered before."""
        for finder in [f for f in sys.meta_path if isinstance(f, _Finder) and f.modules is not self]:
            sys.meta_path.remove(finder)
            for name in [n for n, m in list(sys.modules.items()) if finder.modules.loaded(m)]:
                del sys.modules[name]
            sys.modules.update(finder.modules.take_replaced())
        self._set_aside()
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(self))
        importlib.invalidate_caches()

    def take_replaced(self) -> dict[str, ModuleType]:
        """Return and release the modules, by name, that files of the folder had replaced."""
        aside, self._aside = self._aside, {}
        return aside

    def _set_aside(self) -> None:
        """Remove from `sys.modules` the modules of other code with the name of a known file, and keep them."""
        for top in {name.partition("/")[0].removesuffix(".py") for name in self._files or ()}:
            module = sys.modules.get(top)
            if module is None or self._came_from_a_folder(top) or top == "splitfed" or _installed(module.__spec__):
                continue
            for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
                self._aside[name] = sys.modules.pop(name)

    def defines(self, function: Any) -> bool:
        """Return whether `function` is defined in a file that was run from the folder."""
        code = getattr(function, "__code__", None)
        return code is not None and code.co_filename in {str(self.folder / name) for name in self._run}

    def sources(self) -> dict[str, bytes]:
        """Return what was run from the folder: relative path -> content as it was run."""
        return dict(self._run)

    def spec(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Return the import specification of `name` from the folder; None if it is no file there, or another module."""
        parent, _, last = name.rpartition(".")
        if parent:
            if parent not in sys.modules or not self.loaded(sys.modules[parent]):
                return None
            file = next((f for entry in path or () if (f := self._file(Path(entry), last))), None)
            if file is None and self._files is not None:
                # No other finder may search the folder, and run an unknown file.
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        else:
            file = self._file(self.folder, last)
            if file is None or last in sys.stdlib_module_names or self._exists_elsewhere(last):
                return None
        if file is None:
            return None
        place = file if file.suffix == "" else file.parent if file.name == "__init__.py" else None
        return spec_from_file_location(
            name, file, loader=_Source(name, file, self), submodule_search_locations=[str(place)] if place else None
        )

    def read(self, file: Path) -> bytes:
        """Return the source in `file` to be run; raise an error for a file whose digest is not the known one."""
        if file.suffix == "":
            return b""  # a folder without __init__.py
        name, content = file.relative_to(self.folder).as_posix(), file.read_bytes()
        if self._files is not None and digests.of(content) != self._files[name]:
            raise InvalidInput(f"{name} has changed")
        self._run[name] = content
        return content

    def _file(self, place: Path, name: str) -> Path | None:
        """Return the file of module `name` in `place`: for a package its __init__.py, or else its folder."""
        home = place / name
        for file in (home / "__init__.py", place / f"{name}.py"):
            if file.is_file() and (self._files is None or file.relative_to(self.folder).as_posix() in self._files):
                return file
        if self._files is not None:
            below = f"{home.relative_to(self.folder).as_posix()}/"
            return home if any(known.startswith(below) for known in self._files) else None
        return home if home.is_dir() and any(home.glob("*.py")) else None

    def _exists_elsewhere(self, name: str) -> bool:
        """Return whether Python finds a module `name` outside of the folder, which the folder must not replace."""
        own = self._file(self.folder, name)
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, None)
            if spec is not None:
                same = own is not None and own.resolve() in _places(spec)
                return not same and (self._files is None or _installed(spec))
        return False

    def _came_from_a_folder(self, name: str) -> bool:
        """Return whether the loaded module `name` came from a study's folder, this one or another."""
        return name in sys.modules and isinstance(_loader(sys.modules[name]), _Source)

    def loaded(self, module: ModuleType) -> bool:
        """Return whether `module` was loaded from the folder."""
        loader = _loader(module)
        return isinstance(loader, _Source) and loader.modules is self


class _Finder:
    """Python import finder for one folder."""

    def __init__(self, modules: LocalModules) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the specification to load `name`; None if it is no module of the folder."""
        return self.modules.spec(name, path)


class _Source(SourceFileLoader):
    """Loader that runs a module's checked source; a compiled file is neither read nor written."""

    def __init__(self, name: str, file: Path, modules: LocalModules) -> None:
        super().__init__(name, str(file))
        self.modules = modules

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source."""
        return self.source_to_code(self.modules.read(Path(self.path)), self.path)


def _places(spec: ModuleSpec) -> list[Path]:
    """Return the file of a module, or of a package without one its folders; empty for a built-in."""
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return [Path(place).resolve() for place in places if place]


def _installed(spec: ModuleSpec | None) -> bool:
    """Return whether a module is part of Python or of an installed package; also True without a location."""
    places = [] if spec is None else _places(spec)
    own = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    return not places or any(
        _PACKAGES & set(place.parts) or any(place.is_relative_to(folder) for folder in own) for place in places
    )


def _loader(module: ModuleType) -> Any:
    return getattr(getattr(module, "__spec__", None), "loader", None)
