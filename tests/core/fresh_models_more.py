"""Small versions of published models of sequences and of training idioms; for `tests/core/test_fresh_models.py`."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class NeuMF(nn.Module):
    """Neural collaborative filtering: a generalised factorization beside a network, on users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(16, 4), nn.Embedding(16, 4)
        self.user_mlp, self.item_mlp = nn.Embedding(16, 4), nn.Embedding(16, 4)
        self.fc_layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])
        self.affine = nn.Linear(8, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        user, item = user.squeeze(-1), item.squeeze(-1)
        gmf = torch.mul(self.user_gmf(user), self.item_gmf(item))
        vector = torch.cat([self.user_mlp(user), self.item_mlp(item)], dim=-1)
        for idx, _ in enumerate(range(len(self.fc_layers))):
            vector = nn.ReLU()(self.fc_layers[idx](vector))
        return self.affine(torch.cat([vector, gmf], dim=-1))


class S4D(nn.Module):
    """A diagonal state space model: its kernel is complex, and applied by a Fourier transform."""

    def __init__(self, width: int = 6, states: int = 4) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, width), nn.Linear(width, 4)
        c = torch.randn(width, states // 2, dtype=torch.cfloat)
        self.C, self.log_dt = nn.Parameter(torch.view_as_real(c)), nn.Parameter(torch.rand(width) - 3)
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(width, states // 2)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(states // 2).repeat(width, 1).float())
        self.D, self.output_linear = nn.Parameter(torch.randn(width)), nn.Conv1d(width, 2 * width, 1)
        self.norm = nn.LayerNorm(width)

    def kernel(self, length: int) -> Tensor:
        dt, c = torch.exp(self.log_dt), torch.view_as_complex(self.C)
        a = -torch.exp(self.log_A_real) + 1j * self.A_imag
        dt_a = a * dt.unsqueeze(-1)
        k = dt_a.unsqueeze(-1) * torch.arange(length)
        c = c * (torch.exp(dt_a) - 1.0) / a
        return 2 * torch.einsum("hn,hnl->hl", c, torch.exp(k)).real

    def forward(self, x: Tensor) -> Tensor:
        u = self.encoder(x).transpose(-1, -2)
        length = u.size(-1)
        k_f = torch.fft.rfft(self.kernel(length), n=2 * length)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * k_f, n=2 * length)[..., :length]
        y = functional.glu(self.output_linear(functional.gelu(y + u * self.D.unsqueeze(-1))), dim=-2)
        return self.decoder(self.norm((y + u).transpose(-1, -2)).mean(dim=1))


class RWKVBlock(nn.Module):
    """RWKV's mixing over time as a recurrence with a running maximum, and its mixing of channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_mix, self.time_decay = nn.Parameter(torch.rand(3, 1, 1, width)), nn.Parameter(torch.rand(width))
        self.time_first, self.ln1 = nn.Parameter(torch.rand(width)), nn.LayerNorm(width)
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.receptance, self.output = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        x = self.ln1(h)
        shifted = self.time_shift(x)
        k, v, r = (
            layer(x * mix + shifted * (1 - mix))
            for layer, mix in zip((self.key, self.value, self.receptance), self.time_mix, strict=True)
        )
        num, den, top = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]) - 1e38
        outs, decay = [], -torch.exp(self.time_decay)
        for t in range(k.size(1)):
            best = torch.maximum(top, k[:, t] + self.time_first)
            e1, e2 = torch.exp(top - best), torch.exp(k[:, t] + self.time_first - best)
            outs.append((e1 * num + e2 * v[:, t]) / (e1 * den + e2))
            best = torch.maximum(top + decay, k[:, t])
            e1, e2 = torch.exp(top + decay - best), torch.exp(k[:, t] - best)
            num, den, top = e1 * num + e2 * v[:, t], e1 * den + e2, best
        return h + self.output(torch.sigmoid(r) * torch.stack(outs, dim=1))


class RWKV(nn.Module):
    """Two blocks of RWKV over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.ln0, self.blocks = nn.Embedding(16, 6), nn.LayerNorm(6), nn.Sequential(*map(RWKVBlock, (6, 6)))
        self.head = nn.Linear(6, 4, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        _, length = idx.size()
        assert length <= 8, "Cannot forward, because len(input) > model ctx_len."
        return self.head(self.blocks(self.ln0(self.emb(idx)))[:, -1])


class MAB(nn.Module):
    """Set Transformer's attention block: heads are folded into the batch."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.dim_V, self.num_heads = width, heads
        self.fc_q, self.fc_k, self.fc_v = (nn.Linear(width, width) for _ in range(3))
        self.ln0, self.fc_o = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q, k, v = self.fc_q(q), self.fc_k(k), self.fc_v(k)
        split = self.dim_V // self.num_heads
        q_, k_, v_ = (torch.cat(t.split(split, 2), 0) for t in (q, k, v))
        a = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(self.dim_V), 2)
        o = self.ln0(torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2))
        return o + functional.relu(self.fc_o(o))


class ISAB(nn.Module):
    """Attention by inducing points, which are repeated for every row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inducing = nn.Parameter(torch.empty(1, 3, width))
        nn.init.xavier_uniform_(self.inducing)
        self.mab0, self.mab1 = MAB(width), MAB(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mab1(x, self.mab0(self.inducing.repeat(x.size(0), 1, 1), x))


class SetTransformer(nn.Module):
    """Sets in, one answer a set; pooled by a seed that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.enc = nn.Linear(4, 6), nn.Sequential(ISAB(6), ISAB(6))
        self.seed, self.pma, self.dec = nn.Parameter(torch.randn(1, 1, 6)), MAB(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enc(self.inp(x))
        return self.dec(self.pma(self.seed.repeat(h.size(0), 1, 1), h)).squeeze(1)


class GraphAttention(nn.Module):
    """GAT over a dense adjacency, which is a plain tensor of the model that every head reads."""

    def __init__(self) -> None:
        super().__init__()
        ring = torch.eye(6)
        self.adj = ring + ring.roll(1, 0) + ring.roll(-1, 0)
        self.heads = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(2))
        self.att = nn.ParameterList(nn.Parameter(torch.randn(6, 1) / 2) for _ in range(2))
        self.out, self.out_att = nn.Linear(6, 4, bias=False), nn.Parameter(torch.randn(8, 1) / 2)

    def attend(self, wh: Tensor, a: Tensor) -> Tensor:
        width = wh.shape[-1]
        e = functional.leaky_relu(wh @ a[:width] + (wh @ a[width:]).transpose(1, 2), 0.2)
        attention = torch.where(self.adj > 0, e, -9e15 * torch.ones_like(e))
        return functional.softmax(attention, dim=-1) @ wh

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([functional.elu(self.attend(w(x), a)) for w, a in zip(self.heads, self.att, strict=True)], dim=-1)
        return functional.elu(self.attend(self.out(x), self.out_att)).mean(1)


class BYOL(nn.Module):
    """A teacher that follows the student in every training pass, written through `.data`, beside a predictor."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.target = copy.deepcopy(self.online)
        for parameter in self.target.parameters():
            parameter.requires_grad = False
        self.momentum, self.predictor, self.head = momentum, nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
                target.data = target.data * self.momentum + online.data * (1.0 - self.momentum)
        z = self.online(x)
        with torch.no_grad():
            t = functional.normalize(self.target(x), dim=-1)
        return self.head(torch.cat([functional.normalize(self.predictor(z), dim=-1), t], dim=-1))


class MoCo(nn.Module):
    """A queue of keys in a buffer, whose pointer is read as a number, as MoCo writes it; keys attend to the queue."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.encoder, self.project, self.head = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(12, 4)
        self.K = size
        self.register_buffer("queue", functional.normalize(torch.randn(6, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        ptr, batch_size = int(self.queue_ptr), keys.shape[0]
        self.queue[:, torch.arange(ptr, ptr + batch_size) % self.K] = keys.T
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    def forward(self, x: Tensor) -> Tensor:
        q = functional.normalize(self.project(torch.relu(self.encoder(x))), dim=1)
        near = torch.softmax(torch.einsum("nc,ck->nk", q, self.queue.clone().detach()) / 0.2, dim=1)
        out = self.head(torch.cat([q, near @ self.queue.clone().detach().t()], dim=1))
        if self.training:
            self._dequeue_and_enqueue(q.detach())
        return out


class ManifoldMixup(nn.Module):
    """Mixes hidden rows with others of the batch in training, by a share from torch's Beta distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(torch.relu(self.stem(x)), 0.1, self.training)
        h = torch.relu(self.block(h))
        if self.training:
            lam = torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample()
            h = lam * h + (1 - lam) * h[torch.randperm(h.size(0))]
        return self.head(h)


class SpecAugment(nn.Module):
    """Hides a span of time and one of channels in training, at places that NumPy draws."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        hidden = torch.ones_like(x)
        for row in range(x.shape[0]):
            start = np.random.randint(0, x.shape[1] - 1)  # noqa: NPY002
            hidden[row, start : start + 2] = 0
        return x * hidden


class SpeechNet(nn.Module):
    """A convolution, augmentation, a recurrent layer; mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.augment = nn.Conv1d(4, 6, 3, padding=1), SpecAugment()
        self.gru, self.fc = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.augment(torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))
        return self.fc(self.gru(h)[0].mean(1))


class CTCEncoder(nn.Module):
    """DeepSpeech's encoder: convolutions that halve the time, packed recurrent layers by the lengths, log-softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(4, 6, 3, stride=2, padding=1), nn.BatchNorm1d(6), nn.Hardtanh(0, 20))
        self.rnn, self.fc = nn.LSTM(6, 4, bidirectional=True, batch_first=True), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        sizes = (lengths[:, 0, 0].long() - 1) // 2 + 1
        h = self.conv(x.transpose(1, 2)).transpose(1, 2)
        packed = pack_padded_sequence(h, sizes.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=h.size(1))
        return functional.log_softmax(self.fc(h), dim=-1).sum(1) / sizes.unsqueeze(1)


class HyperNetwork(nn.Module):
    """The weights of the second layer are made by a network from an embedding of the layer, before any row is read."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.hyper = (
            nn.Parameter(torch.randn(1, 4)),
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 48)),
        )
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.hyper(self.z).view(6, 8)
        return self.head(torch.relu(functional.linear(torch.relu(self.stem(x)), weight)))


class PrefixEncoder(nn.Module):
    """P-tuning v2: keys and values of every layer from a table, frozen layers between."""

    def __init__(self, width: int = 8, layers: int = 2, length: int = 3) -> None:
        super().__init__()
        self.embeddings, self.stem = nn.Embedding(16, width), nn.Linear(width, width)
        self.prefix_tokens, self.prefix = torch.arange(length).long(), nn.Embedding(length, layers * 2 * width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({k: nn.Linear(width, width) for k in ("q", "k", "v", "o")}) for _ in range(layers)
        )
        for frozen in (self.embeddings, self.layers):
            frozen.requires_grad_(False)
        self.classifier, self.heads = nn.Linear(width, 4), 2

    def get_prompt(self, batch_size: int) -> tuple[Tensor, ...]:
        prefix = self.prefix(self.prefix_tokens.unsqueeze(0).expand(batch_size, -1))
        prefix = prefix.view(batch_size, -1, len(self.layers) * 2, self.heads, 4)
        return prefix.permute([2, 0, 3, 1, 4]).split(2)

    def forward(self, input_ids: Tensor) -> Tensor:
        batch_size = input_ids.shape[0]
        past = self.get_prompt(batch_size)
        h = self.stem(self.embeddings(input_ids))
        for layer, (keys, values) in zip(self.layers, past, strict=True):
            q, k, v = (layer[n](h).view(batch_size, -1, self.heads, 4).transpose(1, 2) for n in ("q", "k", "v"))
            a = functional.scaled_dot_product_attention(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))
            h = h + layer["o"](a.transpose(1, 2).reshape(batch_size, -1, 8))
        return self.classifier(h.mean(1))


class AdaIN(nn.Module):
    """Content in the style of another image: one encoder runs twice, and statistics of one go to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 6, 3), nn.ReLU())
        self.decoder, self.fc = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(6, 6, 3), nn.ReLU()), nn.Linear(6, 4)

    @staticmethod
    def calc_mean_std(feat: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        size = feat.size()
        assert len(size) == 4
        n, c = size[:2]
        std = (feat.view(n, c, -1).var(dim=2) + eps).sqrt().view(n, c, 1, 1)
        return feat.view(n, c, -1).mean(dim=2).view(n, c, 1, 1), std

    def forward(self, content: Tensor, style: Tensor, *, alpha: float = 0.8) -> Tensor:
        assert 0 <= alpha <= 1
        content_f, style_f = self.encoder(content), self.encoder(style)
        size = content_f.size()
        (style_mean, style_std), (mean, std) = self.calc_mean_std(style_f), self.calc_mean_std(content_f)
        normalized = (content_f - mean.expand(size)) / std.expand(size)
        t = normalized * style_std.expand(size) + style_mean.expand(size)
        return self.fc(self.decoder(t * alpha + (1 - alpha) * content_f).mean((2, 3)))


class Mixture(NamedTuple):
    """Shares, means and spreads of a density."""

    pi: Tensor
    mu: Tensor
    sigma: Tensor


class Density(NamedTuple):
    """What a mixture density network returns: scores, and a tuple within."""

    logits: Tensor
    mixture: Mixture


class MixtureDensity(nn.Module):
    """A mixture density network with scores beside it, in nested named tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.z_h, self.z_pi = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
        self.z_mu, self.z_sigma = nn.Linear(8, 3), nn.Linear(8, 3)
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Density:
        z_h = self.z_h(x)
        pi = nn.functional.softmax(self.z_pi(z_h), -1)
        mixture = Mixture(pi, self.z_mu(z_h), torch.exp(self.z_sigma(z_h)))
        return Density(self.head(torch.cat(mixture, -1)), mixture)


class BatchRenorm(nn.Module):
    """Batch renormalisation: limits that widen with a counted buffer, running statistics by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_std", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    @property
    def rmax(self) -> Tensor:
        return (0.2 * self.num_batches_tracked + 0.9).clamp_(1.0, 3.0)

    @property
    def dmax(self) -> Tensor:
        return (0.5 * self.num_batches_tracked - 1.0).clamp_(0.0, 5.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, std = x.mean(0), x.std(0, unbiased=False) + 1e-3
            r = (std.detach() / self.running_std.view_as(std)).clamp_(1 / self.rmax, self.rmax)
            d = (mean.detach() - self.running_mean.view_as(mean)) / self.running_std.view_as(std)
            x = (x - mean) / std * r + d.clamp_(-self.dmax, self.dmax)
            self.running_mean += 0.01 * (mean.detach() - self.running_mean)
            self.running_std += 0.01 * (std.detach() - self.running_std)
            self.num_batches_tracked += 1
        else:
            x = (x - self.running_mean) / self.running_std
        return self.weight * x + self.bias


class Renormed(nn.Module):
    """Two layers with batch renormalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.brn1, self.fc2, self.brn2 = nn.Linear(8, 8), BatchRenorm(8), nn.Linear(8, 8), BatchRenorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.brn2(self.fc2(torch.relu(self.brn1(self.fc1(x)))))))


class ActNorm(nn.Module):
    """Glow's norm: scale and place are set from the first batch of training, then learnt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, width)), nn.Parameter(torch.ones(1, width))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.data.copy_(-x.mean(0, keepdim=True))
                self.scale.data.copy_(1 / (x.std(0, keepdim=True) + 1e-6))
            self.initialized.fill_(1)
        return self.scale * (x + self.loc)


class Flow(nn.Module):
    """A norm and an affine coupling, twice, behind Glow's mixing of columns or without it; and a head."""

    def __init__(self, mixed: bool = True) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8, bias=False) if mixed else nn.Identity()
        self.norms = nn.ModuleList(ActNorm(8) for _ in range(2))
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        for norm, net in zip(self.norms, self.nets, strict=True):
            left, right = norm(x).chunk(2, 1)
            shift, scale = net(left).chunk(2, 1)
            x = torch.cat([right * torch.exp(torch.tanh(scale)) + shift, left], 1)
        return self.head(x)


class Prototypes(nn.Module):
    """SwAV's prototypes: the last layer's rows are put on the sphere in every step, as its training loop does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.projection = nn.Linear(8, 8), nn.Linear(8, 6)
        self.prototypes = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = functional.normalize(self.projection(torch.relu(self.trunk(x))), dim=1, p=2)
        if self.training:
            with torch.no_grad():
                w = self.prototypes.weight.data.clone()
                self.prototypes.weight.copy_(functional.normalize(w, dim=1, p=2))
        return self.prototypes(z) / 0.1
