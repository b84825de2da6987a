"""Small versions of published models of images, series, tables and sets; for `tests/core/test_fresh_models.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm


class Residual(nn.Module):
    """Adds what a module makes of its input to the input."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


def conv_mixer(dim: int = 8, depth: int = 2, kernel: int = 3, patch: int = 2, classes: int = 4) -> nn.Sequential:
    """ConvMixer: one `nn.Sequential` of patches, depthwise convolutions with a residual, and pointwise ones."""
    return nn.Sequential(
        *(nn.Conv2d(3, dim, patch, stride=patch), nn.GELU(), nn.BatchNorm2d(dim)),
        *(
            nn.Sequential(
                Residual(
                    nn.Sequential(
                        nn.Conv2d(dim, dim, kernel, groups=dim, padding="same"), nn.GELU(), nn.BatchNorm2d(dim)
                    )
                ),
                *(nn.Conv2d(dim, dim, 1), nn.GELU(), nn.BatchNorm2d(dim)),
            )
            for _ in range(depth)
        ),
        *(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(dim, classes)),
    )


def drop_connect(x: Tensor, rate: float, training: bool) -> Tensor:
    """Leave out whole rows in training, as EfficientNet's reference code does: by the floor of a uniform draw."""
    if not training:
        return x
    keep = 1 - rate
    kept = torch.floor(keep + torch.rand([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device))
    return x / keep * kept


class MBConv(nn.Module):
    """EfficientNet's block: expansion, depthwise convolution, squeeze and excitation, projection, skip."""

    def __init__(self, width: int, expand: int, rate: float) -> None:
        super().__init__()
        inner = width * expand
        self.rate, self.has_skip = rate, True
        if expand != 1:
            self._expand_conv = nn.Conv2d(width, inner, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(inner, momentum=0.01, eps=1e-3)
        self._depthwise_conv = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self._bn1 = nn.BatchNorm2d(inner, momentum=0.01, eps=1e-3)
        self._se_reduce, self._se_expand = nn.Conv2d(inner, 2, 1), nn.Conv2d(2, inner, 1)
        self._project_conv = nn.Conv2d(inner, width, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(width)
        self.expand = expand

    def forward(self, inputs: Tensor, rate: float | None = None) -> Tensor:
        x = inputs
        if self.expand != 1:
            x = functional.silu(self._bn0(self._expand_conv(x)))
        x = functional.silu(self._bn1(self._depthwise_conv(x)))
        squeezed = self._se_expand(functional.silu(self._se_reduce(functional.adaptive_avg_pool2d(x, 1))))
        x = self._bn2(self._project_conv(torch.sigmoid(squeezed) * x))
        if self.has_skip:
            if rate:
                x = drop_connect(x, rate, self.training)
            x = x + inputs
        return x


class EfficientNet(nn.Module):
    """A stem and two blocks, whose rate of dropping rises with the depth."""

    def __init__(self, rate: float = 0.4) -> None:
        super().__init__()
        self._stem, self._bn = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self._blocks = nn.ModuleList([MBConv(6, 1, rate), MBConv(6, 2, rate)])
        self._fc, self.rate = nn.Linear(6, 4), rate

    def forward(self, inputs: Tensor) -> Tensor:
        x = functional.silu(self._bn(self._stem(inputs)))
        for idx, block in enumerate(self._blocks):
            x = block(x, rate=self.rate * float(idx) / len(self._blocks))
        return self._fc(x.mean((2, 3)))


class UNetPlusPlus(nn.Module):
    """UNet++: a triangle of nodes by name, dense skips between them, and the mean of supervised heads."""

    def __init__(self) -> None:
        super().__init__()
        width = [4, 6, 8]
        nodes = {}
        for j in range(3):
            for i in range(3 - j):
                inputs = (3 if i == 0 else width[i - 1]) if j == 0 else width[i] * j + width[i + 1]
                nodes[f"x_{i}_{j}"] = nn.Sequential(
                    nn.Conv2d(inputs, width[i], 3, padding=1), nn.BatchNorm2d(width[i]), nn.ReLU(inplace=True)
                )
        self.nodes = nn.ModuleDict(nodes)
        self.pool = nn.MaxPool2d(2, 2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.finals = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made: dict[tuple[int, int], Tensor] = {}
        for j in range(3):
            for i in range(3 - j):
                if j == 0:
                    given = x if i == 0 else self.pool(made[i - 1, 0])
                else:
                    given = torch.cat([*(made[i, k] for k in range(j)), self.up(made[i + 1, j - 1])], 1)
                made[i, j] = self.nodes[f"x_{i}_{j}"](given)
        outs = [final(made[0, k + 1]).mean((2, 3)) for k, final in enumerate(self.finals)]
        return sum(outs) / len(outs)  # type: ignore[return-value]


class TNet(nn.Module):
    """PointNet's alignment: a matrix for every cloud, the identity plus what is learnt."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.conv, self.bn = k, nn.Conv1d(k, 8, 1), nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, k * k)

    def forward(self, x: Tensor) -> Tensor:
        batchsize = x.size()[0]
        x = functional.relu(self.bn(self.conv(x)))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 8)
        iden = torch.from_numpy(np.eye(self.k).flatten().astype(np.float32)).view(1, self.k**2).repeat(batchsize, 1)
        return (self.fc(x) + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    """Clouds of points (points, 3): aligned, transformed point by point, pooled; its second alignment is penalised."""

    def __init__(self) -> None:
        super().__init__()
        self.stn, self.conv1, self.bn1 = TNet(3), nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6)
        self.fstn, self.conv2, self.bn2 = TNet(6), nn.Conv1d(6, 8, 1), nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.transpose(2, 1)
        x = torch.bmm(x.transpose(2, 1), self.stn(x)).transpose(2, 1)
        x = functional.relu(self.bn1(self.conv1(x)))
        trans_feat = self.fstn(x)
        x = torch.bmm(x.transpose(2, 1), trans_feat).transpose(2, 1)
        x = torch.max(self.bn2(self.conv2(x)), 2)[0]
        eye = torch.eye(6)[None, :, :]
        penalty = torch.norm(torch.bmm(trans_feat, trans_feat.transpose(2, 1)) - eye, dim=(1, 2))
        return functional.log_softmax(self.fc(x), dim=1), penalty


class Chomp1d(nn.Module):
    """Cuts off the end that padding has added."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.chomp_size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    """Two causal convolutions with normed weights, and a skip that fits the width."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        pad = dilation
        self.conv1 = weight_norm(nn.Conv1d(inputs, outputs, 2, padding=pad, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outputs, outputs, 2, padding=pad, dilation=dilation))
        self.net = nn.Sequential(
            *(self.conv1, Chomp1d(pad), nn.ReLU(), nn.Dropout(0.0)),
            *(self.conv2, Chomp1d(pad), nn.ReLU(), nn.Dropout(0.0)),
        )
        self.downsample = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        res = x if self.downsample is None else self.downsample(x)
        return self.relu(out + res)


class TCN(nn.Module):
    """A temporal convolutional network of two blocks; its submodules stand under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(TemporalBlock(4, 6, 1), TemporalBlock(6, 6, 2))
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.network(x.transpose(1, 2))[:, :, -1])


class RevIN(nn.Module):
    """Reversible instance norm: what it took off a series it keeps on itself, and puts on again at the end."""

    def __init__(self, width: int, affine: bool) -> None:
        super().__init__()
        self.affine = affine
        if affine:
            self.affine_weight, self.affine_bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.mean = torch.mean(x, dim=1, keepdim=True).detach()
            self.stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
            x = (x - self.mean) / self.stdev
            return x * self.affine_weight + self.affine_bias if self.affine else x
        if self.affine:
            x = (x - self.affine_bias) / (self.affine_weight + 1e-10)
        return x * self.stdev + self.mean


class MovingMean(nn.Module):
    """Autoformer's trend: a mean over time, both ends repeated."""

    def forward(self, x: Tensor) -> Tensor:
        front, end = x[:, 0:1, :].repeat(1, 1, 1), x[:, -1:, :].repeat(1, 1, 1)
        padded = torch.cat([front, x, end], dim=1)
        return functional.avg_pool1d(padded.permute(0, 2, 1), 3, 1).permute(0, 2, 1)


class Forecaster(nn.Module):
    """Autoformer's decomposition into season and trend, between the two ends of a reversible norm."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.revin, self.decomp = RevIN(4, affine), MovingMean()
        self.embed, self.season, self.trend = nn.Linear(4, 4), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.revin(x, "norm"))
        trend = self.decomp(x)
        season = x - trend
        season = self.season(torch.tanh(season).permute(0, 2, 1))
        trend = self.trend(trend.permute(0, 2, 1))
        return self.revin((season + trend).permute(0, 2, 1), "denorm")[:, -1]


class NBeatsBlock(nn.Module):
    """A block that explains a part of the past and adds to the forecast."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.theta_b, self.theta_f = nn.Linear(12, 8, bias=False), nn.Linear(12, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(x)
        return self.theta_b(x), self.theta_f(x)


class NBeats(nn.Module):
    """N-BEATS: every block gets what the blocks before have left unexplained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NBeatsBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        residuals, forecast = x.flip(dims=(1,)), torch.zeros(x.size(0), 4)
        for block in self.blocks:
            backcast, block_forecast = block(residuals)
            residuals = residuals - backcast
            forecast = forecast + block_forecast
        return forecast


class Sparsemax(torch.autograd.Function):
    """The projection onto the simplex, with its own backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        x = x - x.max(dim=-1, keepdim=True)[0]
        ordered = torch.sort(x, descending=True, dim=-1)[0]
        counts = torch.arange(1, x.size(-1) + 1, dtype=x.dtype)
        support = counts * ordered > ordered.cumsum(-1) - 1
        size = support.sum(dim=-1, keepdim=True)
        tau = (ordered.cumsum(-1) - 1).gather(-1, size - 1) / size.to(x.dtype)
        output = torch.clamp(x - tau, min=0)
        ctx.save_for_backward(size, output)
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        size, output = ctx.saved_tensors
        grad = grad.masked_fill(output == 0, 0)
        mean = grad.sum(dim=-1, keepdim=True) / size.to(grad.dtype)
        return torch.where(output != 0, grad - mean, grad)


class GhostBatchNorm(nn.Module):
    """Batch norm over virtual batches of four rows: how many there are follows the number of rows."""

    def __init__(self, width: int, virtual: int = 4) -> None:
        super().__init__()
        self.virtual_batch_size, self.bn = virtual, nn.BatchNorm1d(width, momentum=0.02)

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(int(np.ceil(x.shape[0] / self.virtual_batch_size)), 0)
        return torch.cat([self.bn(part) for part in chunks], dim=0)


class TabNet(nn.Module):
    """TabNet: at every step a sparse choice of columns, which later steps may use less."""

    def __init__(self) -> None:
        super().__init__()
        self.initial_bn, self.initial = nn.BatchNorm1d(8, momentum=0.01), nn.Linear(8, 12, bias=False)
        self.feat = nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(2))
        self.feat_bn = nn.ModuleList(GhostBatchNorm(12) for _ in range(2))
        self.att = nn.ModuleList(nn.Linear(6, 8, bias=False) for _ in range(2))
        self.att_bn = nn.ModuleList(GhostBatchNorm(8) for _ in range(2))
        self.final_mapping = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.initial_bn(x)
        prior, steps = torch.ones(x.shape), []
        att = functional.glu(self.initial(x).repeat(1, 1))
        for step in range(2):
            mask = Sparsemax.apply(self.att_bn[step](self.att[step](att)) * prior)
            prior = torch.mul(1.3 - mask, prior)
            out = functional.glu(self.feat_bn[step](self.feat[step](torch.mul(mask, x))))
            steps.append(nn.ReLU()(out))
            att = out
        return self.final_mapping(torch.sum(torch.stack(steps, dim=0), dim=0))


class FTTransformer(nn.Module):
    """FT-Transformer: every column a token, a token for the class, attention, ReGLU."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(9, width) / 3), nn.Parameter(torch.randn(8, width) / 3)
        self.tokens = nn.Identity()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.MultiheadAttention(width, 2, batch_first=True),
                    "linear0": nn.Linear(width, 16),
                    "linear1": nn.Linear(8, width),
                    "norm1": nn.LayerNorm(width),
                    **({} if first else {"norm0": nn.LayerNorm(width)}),
                }
            )
            for first in (True, False)
        )
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x_num: Tensor) -> Tensor:
        x = torch.cat([torch.ones(len(x_num), 1), x_num], dim=1)
        x = self.weight[None] * x[:, :, None]
        x = self.tokens(x + torch.cat([torch.zeros(1, self.bias.shape[1]), self.bias])[None])
        for idx, layer in enumerate(self.layers):
            last = idx + 1 == len(self.layers)
            h = layer["norm0"](x) if "norm0" in layer else x
            query = h[:, :1] if last else h
            h, _ = layer["attention"](query, h, h)
            x = (x[:, :1] if last else x) + h
            h, gate = layer["linear0"](layer["norm1"](x)).chunk(2, dim=-1)
            x = x + layer["linear1"](h * functional.relu(gate))
        return self.head(functional.relu(self.last(x[:, 0])))


class DeepFM(nn.Module):
    """DeepFM: one embedding for a factorization machine and a network, and a linear part; offsets are NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = np.array((0, *np.cumsum([16] * 5)[:-1]), dtype=np.int64)
        self.embedding, self.fc, self.bias = nn.Embedding(80, 4), nn.Embedding(80, 4), nn.Parameter(torch.zeros(4))
        self.mlp = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        embed_x = self.embedding(x)
        linear = torch.sum(self.fc(x), dim=1) + self.bias
        fm = 0.5 * (torch.sum(embed_x, dim=1) ** 2 - torch.sum(embed_x**2, dim=1))
        return linear + fm + self.mlp(embed_x.view(-1, 20))


class DLRM(nn.Module):
    """DLRM: dense columns through a network, categories through tables, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bot_l = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU())
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(16, 4, mode="sum") for _ in range(2))
        self.top_l = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        dense, sparse = x[:, :4], (x[:, 4:6].abs() * 5).long().clamp(max=15)
        offsets = torch.arange(x.shape[0])
        d = self.bot_l(dense)
        ly = [table(sparse[:, k], offsets) for k, table in enumerate(self.emb_l)]
        batch, width = d.shape
        t = torch.cat([d, *ly], dim=1).view((batch, -1, width))
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        li = torch.tensor([i for i in range(3) for _ in range(i)])
        lj = torch.tensor([j for i in range(3) for j in range(i)])
        return self.top_l(torch.cat([d, z[:, li, lj]], dim=1))
