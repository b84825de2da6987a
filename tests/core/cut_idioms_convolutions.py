"""Ways in which people write convolutional nets, each small; for `tests/core/test_cut_idioms_more.py`.

They take images (batch, 3, 8, 8) and return four logits, or what their docstring says.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def conv(i: int, o: int, norm: Any = nn.BatchNorm2d, **rest: Any) -> nn.Sequential:
    """Return convolution, norm and activation."""
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False, **rest), norm(o), nn.ReLU(inplace=True))


class Head(nn.Module):
    """Global pooling and a linear layer."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(x), 1))


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(channels, 2), nn.ReLU(inplace=True), nn.Linear(2, channels), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = functional.adaptive_avg_pool2d(x, 1).view(b, c)
        return x * self.fc(y).view(b, c, 1, 1).expand_as(x)


class SENet(nn.Module):
    """Blocks with squeeze and excitation, residual in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.se, self.head = conv(3, 8), conv(8, 8), SqueezeExcitation(), Head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.se(self.body(x))
        out += x
        return self.head(functional.relu(out, inplace=True))


class DenseNet(nn.Module):
    """Concatenates a growing list of features, by the names of an OrderedDict."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(OrderedDict([("conv0", nn.Conv2d(3, 4, 3, padding=1))]))
        for i in range(3):
            self.features.add_module(f"layer{i}", conv(4 + 2 * i, 2))
        self.classifier = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features.conv0(x)
        features = [x]
        for name, layer in self.features.named_children():
            if not name.startswith("layer"):
                continue
            features.append(layer(torch.cat(features, 1)))
        out = functional.adaptive_avg_pool2d(functional.relu(torch.cat(features, dim=1)), (1, 1))
        return self.classifier(out.flatten(1))


class Inception(nn.Module):
    """Parallel branches, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.branch1 = nn.Conv2d(8, 2, 1)
        self.branch3 = nn.Sequential(nn.Conv2d(8, 2, 1), nn.Conv2d(2, 3, 3, padding=1))
        self.branch_pool = nn.Conv2d(8, 3, 1)
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        branch_pool = functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        outputs = [self.branch1(x), self.branch3(x), self.branch_pool(branch_pool)]
        return self.head(torch.cat(outputs, 1))


class BranchyNet(nn.Module):
    """Several exits, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([conv(3, 8), conv(8, 8), conv(8, 8)])
        self.exits = nn.ModuleList([Head() for _ in self.blocks])

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            outputs.append(leave(x))
        return outputs


class GoogLeNetOutputs(NamedTuple):
    """Logits, and those of the auxiliary classifier."""

    logits: Tensor
    aux: Tensor | None


class GoogLeNet(nn.Module):
    """Returns the auxiliary logits in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.aux, self.head = conv(3, 8), conv(8, 8), Head(), Head()

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        aux = self.aux(x) if self.training else None
        x = self.head(self.block(x))
        return GoogLeNetOutputs(x, aux) if self.training else x


class AuxiliaryTuple(GoogLeNet):
    """Returns a NamedTuple of two logits in both modes."""

    def forward(self, x: Tensor) -> GoogLeNetOutputs:
        x = self.stem(x)
        return GoogLeNetOutputs(aux=self.aux(x), logits=self.head(self.block(x)))


class BasicBlock(nn.Module):
    """ResNet's block as torchvision has it."""

    expansion = 1

    def __init__(self, i: int, o: int, stride: int = 1, downsample: nn.Module | None = None, norm: Any = None) -> None:
        super().__init__()
        norm = norm or nn.BatchNorm2d
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), norm(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), norm(o)
        self.relu, self.downsample = nn.ReLU(inplace=True), downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """`_forward_impl`, `_make_layer`, initialization by modules, layers by `getattr`."""

    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.inplanes, self.norm = 4, norm
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, 1, 1, bias=False), norm(4), nn.ReLU(inplace=True)
        self.layer1, self.layer2 = self._make_layer(4, 2), self._make_layer(8, 1, stride=2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 4)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        downsample = None
        if stride != 1 or self.inplanes != planes:
            downsample = nn.Sequential(nn.Conv2d(self.inplanes, planes, 1, stride, bias=False), self.norm(planes))
        layers = [BasicBlock(self.inplanes, planes, stride, downsample, self.norm)]
        self.inplanes = planes
        layers.extend(BasicBlock(planes, planes, norm=self.norm) for _ in range(1, blocks))
        return nn.Sequential(*layers)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        for i in (1, 2):
            x = getattr(self, f"layer{i}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class NewHead(ResNet):
    """A subclass that calls `super().forward`, with another head put in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Identity()  # type: ignore[assignment]
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(super().forward(x))


class InvertedResidual(nn.Module):
    """MobileNet's block, whose skip is chosen when it is made."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.use_res_connect = i == o
        self.conv = nn.Sequential(
            nn.Conv2d(i, 2 * i, 1, bias=False),
            nn.BatchNorm2d(2 * i),
            nn.ReLU6(inplace=True),
            nn.Conv2d(2 * i, 2 * i, 3, 1, 1, groups=2 * i, bias=False),
            nn.BatchNorm2d(2 * i),
            nn.Hardswish(inplace=True),
            nn.Conv2d(2 * i, o, 1, bias=False),
            nn.BatchNorm2d(o),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


def mobile_net() -> nn.Sequential:
    """Return a model that is one Sequential, weights drawn by `apply`."""

    def draw(m: nn.Module) -> None:
        if isinstance(m, nn.Conv2d):
            nn.init.xavier_uniform_(m.weight)

    net = nn.Sequential(OrderedDict(stem=conv(3, 4), one=InvertedResidual(4, 4), two=InvertedResidual(4, 8)))
    net.add_module("head", Head())
    return net.apply(draw)


class ShuffleNet(nn.Module):
    """Halves of the channels, shuffled by view and transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.right, self.second, self.head = conv(3, 8), conv(4, 4), conv(4, 4), Head()

    @staticmethod
    def channel_shuffle(x: Tensor, groups: int) -> Tensor:
        b, c, h, w = x.shape
        x = x.view(b, groups, c // groups, h, w).transpose(1, 2).contiguous()
        return x.view(b, -1, h, w)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in (self.right, self.second):
            x1, x2 = x.chunk(2, dim=1)
            x = self.channel_shuffle(torch.cat((x1, unit(x2)), dim=1), 2)
        return self.head(x)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over channels of (batch, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class DropPath(nn.Module):
    """Stochastic depth of every row, as timm has it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        random_tensor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep_prob)
        random_tensor.div_(keep_prob)
        return x * random_tensor


class ConvNeXtBlock(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.gamma = nn.Parameter(1e-1 * torch.ones(8))
        self.drop_path = DropPath(drop) if drop > 0.0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        return residual + self.drop_path(x.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    """Layer scale, channels last, drop path of a rate that rises with depth."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), LayerNorm2d(8))
        self.blocks = nn.ModuleList(ConvNeXtBlock(r.item()) for r in torch.linspace(0, drop, 3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.mean([-2, -1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


class WeightStandardizedConv(nn.Conv2d):
    """Normalizes its weight in `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return functional.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class GroupNormNet(nn.Module):
    """GroupNorm, InstanceNorm with running numbers, standardized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = conv(3, 8, partial(nn.GroupNorm, 4))
        self.two = conv(8, 8, partial(nn.InstanceNorm2d, affine=True, track_running_stats=True))
        self.three, self.head = WeightStandardizedConv(8, 8, 3, padding=1), Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.three(self.two(self.one(x))))


class ParametrizedNet(nn.Module):
    """Weight norm and spectral norm as parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
        self.two = parametrizations.spectral_norm(nn.Conv2d(8, 8, 3))
        self.three, self.head = parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.one(x), 0.1)
        x = functional.leaky_relu(self.two(x), 0.1)
        return self.head(self.three(x.mean((2, 3))))


class OldSpectralNorm(nn.Module):
    """Spectral norm by hooks, as before parametrizations, and attention over pixels with a learnt gain (SAGAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.spectral_norm(nn.Conv2d(3, 8, 3))
        self.query, self.key = nn.Conv2d(8, 2, 1), nn.utils.spectral_norm(nn.Conv2d(8, 2, 1))
        self.value, self.gamma, self.head = nn.Conv2d(8, 8, 1), nn.Parameter(torch.full((1,), 0.5)), Head()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.one(x))
        b, c, h, w = x.size()
        q = self.query(x).view(b, -1, h * w).permute(0, 2, 1)
        attention = torch.softmax(torch.bmm(q, self.key(x).view(b, -1, h * w)), dim=-1)
        out = torch.bmm(self.value(x).view(b, -1, h * w), attention.permute(0, 2, 1)).view(b, c, h, w)
        return self.head(self.gamma * out + x)


class CheckpointedBlocks(nn.Module):
    """Activations are made again in the backward pass, in training alone."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_checkpoint, self.use_reentrant = True, use_reentrant
        self.stem, self.blocks, self.head = conv(3, 8), nn.ModuleList([conv(8, 8), conv(8, 8)]), Head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.use_checkpoint and self.training:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return self.head(x)


class CheckpointedSequential(nn.Module):
    """`checkpoint_sequential` over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, partial(nn.GroupNorm, 2))
        self.blocks = nn.Sequential(*[conv(8, 8, partial(nn.GroupNorm, 2)) for _ in range(4)])
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        return self.head(x)


class HalfPrecisionBlock(nn.Module):
    """One block computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = conv(3, 8), nn.Conv2d(8, 8, 3).to(torch.bfloat16), Head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.block(x.bfloat16()).float())
