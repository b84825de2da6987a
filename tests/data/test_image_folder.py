"""Pictures written here, one sub-folder a class."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from splitfed.data import image_folder
from tests.examples import refusal


def write(root: Path, name: str, color: tuple[int, int, int], size: tuple[int, int] = (4, 3)) -> Path:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "pets"
    folder.mkdir()
    write(folder, "dog/1.png", (0, 0, 255))
    write(folder, "cat/2.PNG", (0, 255, 0))
    write(folder, "cat/1.bmp", (255, 0, 0))
    (folder / "cat" / "notes.txt").write_text("no picture")
    (folder / ".hidden").mkdir()
    return folder


def test_classes_and_pictures_in_order(root: Path) -> None:
    data = image_folder(root)
    assert (data.name, data.shape, data.task.outputs, data.value_range) == ("pets", (3, 3, 4), 2, (0.0, 1.0))
    assert data.y.tolist() == [0, 0, 1]
    assert data.x[:, :, 0, 0].tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_size_and_grayscale(root: Path) -> None:
    write(root, "dog/2.png", (255, 255, 255), (9, 9))
    assert image_folder(root, size=2).shape == (3, 2, 2)
    data = image_folder(root, size=[5, 6], grayscale=True)  # type: ignore[arg-type]
    assert data.shape == (1, 5, 6)
    # Luminance of pure red: 0.299 x 255 = 76.2.
    assert float(data.x[0, 0, 0, 0]) == pytest.approx(76 / 255)
    assert float(data.x[3].min()) == 1.0


def test_refused(root: Path) -> None:
    assert refusal(image_folder, root, size=0) == "size=0 is not allowed; expected a whole number of at least 1"
    assert (
        refusal(image_folder, root, size=(1, 2, 3))
        == "size=(1, 2, 3) is not allowed; expected one side, or height and width"
    )
    odd = write(root, "dog/2.png", (0, 0, 0), (5, 5))
    assert refusal(image_folder, root) == f"{odd} is 5x5, the first picture 3x4; give a size to resize all"
    odd.write_bytes(b"no picture")
    assert refusal(image_folder, root).startswith(f"{odd} cannot be read as a picture: cannot identify image file")
    odd.write_bytes((root / "dog" / "1.png").read_bytes()[:-30])
    assert refusal(image_folder, root).startswith(f"{odd} cannot be read as a picture: ")
    Image.new("I;16", (4, 3)).save(odd)
    assert refusal(image_folder, root) == f"{odd} has pixels of type I;16; expected 8 bits a channel"
    odd.unlink()
    (root / "bird").mkdir()
    assert refusal(image_folder, root) == f"{root / 'bird'} has no pictures; expected files such as .png or .jpg"
    assert (
        refusal(image_folder, root / "bird") == f"{root / 'bird'} has 0 sub-folders; expected one a class, at least two"
    )
    assert refusal(image_folder, root / "fish") == f"{root / 'fish'} is missing; expected a folder"
