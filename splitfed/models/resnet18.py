"""ResNet-18, with a stem for small or for large images: two blocks in each of four stages.

Paper: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1.

Deviates: the stem for small images, which is the default, is one 3x3 convolution of stride 1 without max pooling, as is
usual for 32x32 images; the 7x7 stem of the paper, `stem="large"`, would leave 1x1 maps of them.
"""

from __future__ import annotations

from splitfed.models.residual import ResNet, resnet


def resnet18(shape: tuple[int, ...], outputs: int, *, stem: str = "small", seed: int | None = 0) -> ResNet:
    """Return ResNet-18 for images (channels, height, width) of 8x8 or more, with the stem "large" of 32x32 or more.

    Weights depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    return resnet("resnet18", shape, outputs, (2, 2, 2, 2), stem, seed)
