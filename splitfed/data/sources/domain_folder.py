"""Domain folder: a sub-folder for each domain (photo, sketch), in it one for each class of pictures, as in PACS.

Paper: Li, Yang, Song, Hospedales, "Deeper, broader and artier domain generalization", ICCV 2017, for PACS: photo, art
painting, cartoon and sketch, seven classes each.
"""

from __future__ import annotations

from pathlib import Path

from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Dataset
from splitfed.data.sources.files import existing_folder
from splitfed.data.sources.images import PIXELS, Pictures, folders


def domain_folder(
    path: str | Path, size: int | tuple[int, int] | None = None, grayscale: bool = False, pixels: int = PIXELS
) -> Dataset:
    """Return the pictures in `path`/DOMAIN/CLASS, x (n, 3 or 1, height, width) in [0, 1], with their domains.

    Domains and classes are numbered in the order of their names, and every domain has the same classes. `size`,
    `grayscale` and `pixels` as in `image_folder`. `.clients(n, by_domain=True)` makes a client of each. Raises
    `InvalidInput` that names the first folder or file that does not fit.
    """
    root = existing_folder(path)
    pictures = Pictures(size, grayscale, pixels)
    domain_numbers: list[int] = []
    domains = folders(root, "domain")
    classes = folders(root / domains[0], "class")
    for number, domain in enumerate(domains):
        if (others := folders(root / domain, "class")) != classes:
            odd = sorted(set(others) ^ set(classes))[0]
            where = domain if odd in others else domains[0]
            raise InvalidInput(f"{root} has class {odd!r} in domain {where!r}, not in all; expected the same in each")
        domain_numbers += [number] * sum(
            pictures.add(root / domain / name, label) for label, name in enumerate(classes)
        )
    return pictures.dataset(root, len(classes), domain_numbers)
