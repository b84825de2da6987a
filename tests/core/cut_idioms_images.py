"""Ways in which people write models of images and maps, each small; for `tests/core/test_cut_idioms_more.py`.

They take images (batch, 3, 8, 8) and return four logits, or what their docstring says.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.core.cut_idioms_convolutions import Head, conv


class UNet(nn.Module):
    """Skips with a center crop and F.interpolate; the head pools the map."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = conv(3, 4), conv(4, 8), conv(8, 8)
        self.up2, self.up1 = conv(16, 4), nn.Conv2d(8, 4, 1)
        self.pool = nn.MaxPool2d(2)

    @staticmethod
    def center_crop(skip: Tensor, x: Tensor) -> Tensor:
        dy, dx = (skip.shape[2] - x.shape[2]) // 2, (skip.shape[3] - x.shape[3]) // 2
        return skip[:, :, dy : dy + x.shape[2], dx : dx + x.shape[3]]

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(self.pool(skip1))
        x = self.bottom(self.pool(skip2))
        x = functional.interpolate(x, size=skip2.shape[2:], mode="bilinear", align_corners=False)
        x = self.up2(torch.cat([skip2, x], 1))
        x = functional.interpolate(x, scale_factor=1.5, mode="nearest")
        return self.up1(torch.cat([self.center_crop(skip1, x), x], 1)).mean((2, 3))


class TransposedUNet(nn.Module):
    """A padded skip and a transposed convolution, kept in a list that is emptied by `pop`."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([conv(3, 4), conv(4, 8)])
        self.bottom = conv(8, 8)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.decs = nn.ModuleList([conv(16, 8), conv(8, 4)])
        self.out = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, dec in zip(self.ups, self.decs, strict=True):
            x, skip = up(x), skips.pop()
            if x.shape != skip.shape:
                x = functional.pad(x, [0, skip.size(3) - x.size(3), 0, skip.size(2) - x.size(2)])
            x = dec(torch.cat([x, skip], dim=1))
        return torch.amax(self.out(x), dim=(2, 3))


class FPN(nn.Module):
    """A dict of maps goes into the pyramid, whose levels are read in reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"c1": conv(3, 4), "c2": conv(4, 8), "c3": conv(8, 8)})
        self.lateral = nn.ModuleDict({k: nn.Conv2d(c, 4, 1) for k, c in {"c1": 4, "c2": 8, "c3": 8}.items()})
        self.smooth, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps: dict[str, Tensor] = OrderedDict()
        for name, stage in self.body.items():
            x = stage(x)
            maps[name] = x
            x = functional.max_pool2d(x, 2)
        last, out = None, {}
        for name in reversed(maps):
            level = self.lateral[name](maps[name])
            if last is not None:
                level = level + functional.interpolate(last, size=level.shape[-2:], mode="nearest")
            out[name] = last = level
        pooled = [self.smooth(out[name]).mean((2, 3)) for name in sorted(out)]
        return self.fc(torch.cat(pooled, 1))


class PerceptualTaps(nn.Module):
    """Runs `features._modules` and keeps what some of them return."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()
        )
        self.taps, self.fc = {"1", "3", "5"}, nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for name, layer in self.features._modules.items():
            x = layer(x)
            if name in self.taps:
                kept.append(x.mean((2, 3)))
        return self.fc(torch.cat(kept, 1))


class SequentialSlices(nn.Module):
    """Slices a Sequential in `forward`, which makes another module each time."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(conv(3, 4), conv(4, 8), conv(8, 8)), Head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[:2](x)
        return self.head(x + self.net[2:](x))


@dataclass
class ClassifierOutput:
    """Logits, and a loss where labels are given."""

    logits: Tensor
    loss: Tensor | None = None


class DataclassOutput(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = conv(3, 8), conv(8, 8), Head()

    def forward(self, x: Tensor) -> ClassifierOutput:
        return ClassifierOutput(self.head(self.block(self.stem(x))))


class Autoencoder(nn.Module):
    """Classifies the code, and returns it beside a reconstruction by transposed convolutions (as a tuple)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv(3, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 8))
        self.expand, self.unflatten = nn.Linear(8, 32), nn.Unflatten(1, (8, 2, 2))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, 2), nn.ReLU(), nn.Upsample(scale_factor=2))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        image = torch.sigmoid(self.decoder(self.unflatten(self.expand(z))))
        return self.out(image.flatten(2).mean(-1))


class InputNormNet(nn.Module):
    """Normalizes by buffers that are not saved, and takes all to the device and type of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.5, 0.6, 0.7]).view(1, 3, 1, 1), persistent=False)
        self.stem, self.block, self.head = conv(3, 8), conv(8, 8), Head()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        x = (x.to(self.head.fc.weight.dtype) - self.mean) / self.std
        x = self.block(self.stem(x).to(self.block[0].weight.device))
        gain = torch.linspace(0.5, 1.5, 8, device=self.device).view(1, -1, 1, 1)
        return self.head(x * gain)


class Coordinates(nn.Module):
    """CoordConv: a grid by meshgrid is concatenated; and an SPP of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.fc = conv(5, 8), conv(8, 4), nn.Linear(4 * (1 + 4), 4)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack((xs, ys)).to(x).unsqueeze(0).repeat(b, 1, 1, 1)
        x = self.block(self.stem(torch.cat((x, grid), 1)))
        return self.fc(torch.cat([functional.adaptive_max_pool2d(x, s).reshape(b, -1) for s in (1, 2)], 1))


class SpatialTransformer(nn.Module):
    """Grid and sample of what a small net says, begun at the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(conv(3, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc_loc = nn.Linear(4, 6)
        nn.init.normal_(self.fc_loc.weight, std=0.1)
        self.fc_loc.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.block, self.head = conv(3, 8), Head()

    def forward(self, x: Tensor) -> Tensor:
        theta = self.fc_loc(self.localization(x)).view(-1, 2, 3)
        grid = functional.affine_grid(theta, list(x.size()), align_corners=False)
        return self.head(self.block(functional.grid_sample(x, grid, align_corners=False)))


class HookedFeatures(nn.Module):
    """Reads features that forward hooks put into a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.stem, self.block, self.fc = conv(3, 8), conv(8, 8), nn.Linear(16, 4)
        for name in ("stem", "block"):
            getattr(self, name).register_forward_hook(partial(self.keep, name))

    def keep(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features[name] = output

    def forward(self, x: Tensor) -> Tensor:
        self.block(self.stem(x))
        return self.fc(torch.cat([self.features[n].mean((2, 3)) for n in ("stem", "block")], 1))


class SiameseNet(nn.Module):
    """One encoder for both halves of the image, one call each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.project, self.head = conv(3, 8), nn.Linear(8, 8), nn.Linear(16, 4)

    def once(self, x: Tensor) -> Tensor:
        return self.project(self.encoder(x).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.split(x, 4, dim=-1)
        f1, f2 = self.once(left), self.once(right)
        return self.head(torch.cat([(f1 - f2).abs(), functional.normalize(f1, dim=1) * f2], 1))


class MinibatchStd(nn.Module):
    """A number of the whole batch is a channel, as in a discriminator of StyleGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = conv(3, 7), conv(8, 8), Head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, _, h, w = x.shape
        std = torch.sqrt(x.var(0, unbiased=False) + 1e-8).mean().view(1, 1, 1, 1)
        return self.head(self.block(torch.cat([x, std.expand(b, 1, h, w)], 1)))


class FrozenBackbone(nn.Module):
    """A backbone in evaluation mode without gradients, features normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.adapter, self.head = conv(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.backbone.requires_grad_(False)

    @torch.no_grad()
    def extract(self, x: Tensor) -> Tensor:
        return functional.normalize(self.backbone(x).mean((2, 3)), dim=-1)

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.adapter(self.extract(x))))


class ViT(nn.Module):
    """Patches by reshape and permute, a class token, layer scale, attention weights kept for pictures."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.keeps, self.attention = keeps, None
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.patch, self.qkv, self.proj = nn.Linear(48, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 16 * c)
        x = torch.cat((self.cls_token.expand(b, -1, -1), self.patch(x)), dim=1) + self.pos_embed
        q, k, v = self.qkv(self.norm(x)).reshape(b, -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        attention = (q @ k.transpose(-2, -1) * 0.5).softmax(dim=-1)
        if self.keeps:
            self.attention = attention.detach()
        x = x + self.proj((attention @ v).transpose(1, 2).flatten(2))
        return self.head(x[:, 0])


class Swin(nn.Module):
    """Windows by view, shifted by roll, a bias of relative position looked up by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv, self.proj = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24), nn.Linear(8, 8)
        self.relative_position_bias_table = nn.Parameter(torch.randn(9, 2) * 0.1)
        coords = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("relative_position_index", relative[:, :, 0] * 3 + relative[:, :, 1])
        self.head = nn.Linear(8, 4)

    def attend(self, x: Tensor, shift: int) -> Tensor:
        b, h, w, c = x.shape
        if shift > 0:
            x = torch.roll(x, shifts=(-shift, -shift), dims=(1, 2))
        windows = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.qkv(windows).reshape(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(4, 4, -1)
        scores = (q @ k.transpose(-2, -1) + bias.permute(2, 0, 1).unsqueeze(0)).softmax(-1)
        windows = self.proj((scores @ v).transpose(1, 2).reshape(-1, 4, c))
        x = windows.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(x, shifts=(shift, shift), dims=(1, 2)) if shift > 0 else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for shift in (0, 1):
            x = x + self.attend(x, shift)
        return self.head(x.mean((1, 2)))
