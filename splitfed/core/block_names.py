"""The blocks of a model that repeats them: elements of a list of modules of one class, and what stands beside the list.

A language model of twelve layers has hundreds of submodules, and twelve places that anybody would cut at. A list within
a block, of its heads or experts, say, is a part of that block.
"""

from __future__ import annotations

from torch import nn

from splitfed.core.errors import InvalidInput

_REPEATED = 2  # so many blocks in one list


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks of `model`, and of the submodules beside its lists of blocks, in their order.

    A list of blocks is an `nn.ModuleList` or `nn.Sequential` of modules of one class; of lists within each other the
    outermost counts. Beside it stands what has a parent in common with it and holds no such list: embeddings before, a
    pooler or a classifier behind it. Raises `InvalidInput` for a model no list of which has two blocks.
    """
    names, most = _names_below(model, "")
    if most < _REPEATED:
        raise InvalidInput(
            f"{type(model).__name__} has no list of repeated blocks (an nn.ModuleList or nn.Sequential of {_REPEATED} "
            "or more modules of one class); list its submodules to a depth instead, such as depth=2 (--depth 2)"
        )
    # A submodule that stands in several places, such as shared embeddings, is known by its first name.
    known = {name for name, _ in model.named_modules()}
    return tuple(name for name in names if name in known)


def _names_below(module: nn.Module, prefix: str) -> tuple[tuple[str, ...], int]:
    """Return the names in `module`, whose own name and a dot is `prefix`, and how long its longest list is, 0: none."""
    children = {f"{prefix}{name}": child for name, child in module.named_children()}
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(set(map(type, children.values()))) == 1:
        return tuple(children), len(children)
    below = {name: _names_below(child, f"{name}.") for name, child in children.items()}
    names = (one for name, (inner, longest) in below.items() for one in (inner if longest else (name,)))
    return tuple(names), max((longest for _, longest in below.values()), default=0)
