"""Ways in which people write models of tables and graphs, each small; for `tests/core/test_cut_idioms_more.py`.

They take tables (batch, 8) and return four logits, or what their docstring says.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class MCDropout(nn.Module):
    """Drops in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(functional.relu(self.fc1(x)), p=0.2, training=True)
        return self.out(functional.dropout(functional.relu(self.fc2(x)), p=0.2, training=True))


class StochasticDepth(nn.Module):
    """Leaves whole layers out, by a number that is drawn and read."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for i, layer in enumerate(self.layers):
            p = 1 - (i + 1) / len(self.layers) * 0.5
            if self.training:
                x = x + torch.bernoulli(torch.tensor(p)) * functional.relu(layer(x))
            else:
                x = x + p * functional.relu(layer(x))
        return self.out(x)


class LayerDrop(StochasticDepth):
    """Skips a layer where `torch.rand(1).item()` says so."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            if self.training and torch.rand(1).item() < 0.3:
                continue
            x = x + functional.relu(layer(x))
        return self.out(x)


class ListOfParameters(nn.Module):
    """Weights in a ParameterList and a ParameterDict, multiplied by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
        self.gains = nn.ParameterDict({"left": nn.Parameter(torch.ones(8)), "right": nn.Parameter(torch.ones(4))})

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x) * self.gains["left"]
        for w in self.weights:
            x = torch.tanh(x @ w.t())
        return self.out(x) * self.gains["right"].exp()


class MovingAverage(nn.Module):
    """A buffer follows the activations, in training alone, and centers them."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("steps", torch.tensor(0, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inp(x))
        if self.training:
            with torch.no_grad():
                self.ema.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
                self.steps += 1
        return self.out(torch.relu(self.mid(h - self.ema)))


class DenseExperts(nn.Module):
    """All experts, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        weights = functional.softmax(self.gate(x), dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return self.out(torch.einsum("be,bed->bd", weights, outputs))


class SparseExperts(nn.Module):
    """The best two experts of every row, each run on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(dim=-1), 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch_idx, nth = torch.where(chosen == i)
            if batch_idx.numel() == 0:
                continue
            results[batch_idx] += weights[batch_idx, nth, None] * expert(x[batch_idx])
        return results


class SparseNet(nn.Module):
    """A layer of sparse experts between others."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.moe, self.mid, self.out = nn.Linear(8, 8), SparseExperts(), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.inp(x))
        x = x + self.moe(x)
        return self.out(torch.relu(self.mid(x)))


class TopKMask(SparseNet):
    """Keeps the largest activations by topk and scatter."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        values, index = h.topk(4, dim=1)
        h = torch.zeros_like(h).scatter(1, index, values)
        return self.out(torch.relu(self.mid(h)))


class Capsules(nn.Module):
    """Routing by agreement in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.w = nn.Linear(8, 12), nn.Parameter(torch.randn(4, 3, 4, 4) / 2)
        self.last = nn.Linear(4, 4)

    @staticmethod
    def squash(s: Tensor, dim: int = -1) -> Tensor:
        n = s.pow(2).sum(dim, keepdim=True)
        return n / (1 + n) * s / torch.sqrt(n + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        u = self.squash(self.inp(x).view(x.size(0), 3, 4))
        u_hat = torch.einsum("oicd,bid->boic", self.w, u)
        b = torch.zeros(*u_hat.shape[:3], device=x.device)
        for r in range(3):
            c = functional.softmax(b, dim=1)
            v = self.squash((c.unsqueeze(-1) * u_hat).sum(2))
            if r < 2:
                b = b + (u_hat.detach() * v.unsqueeze(2).detach()).sum(-1)
        return self.last(v.norm(dim=-1))


class GraphConvolution(nn.Module):
    """The four pairs of a row are nodes of a graph, whose adjacency is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        adj = torch.eye(4) + torch.diag(torch.ones(3), 1) + torch.diag(torch.ones(3), -1)
        d = adj.sum(1).rsqrt()
        self.register_buffer("adj", d[:, None] * adj * d[None])
        self.gc1, self.gc2, self.fc = nn.Linear(2, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(torch.matmul(self.adj, self.gc1(x.view(-1, 4, 2))))
        h = functional.relu(torch.einsum("nm,bmf->bnf", self.adj, self.gc2(h)) + self.bias)
        return self.fc(h.max(dim=1).values)


class BatchGraph(nn.Module):
    """Edges between rows of the batch by their distance, in one dense step (a kernel of the batch)."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        near = torch.softmax(-torch.cdist(h, h).pow(2), dim=-1)
        return self.out(near @ torch.relu(self.mid(h)))


class LoRALinear(nn.Module):
    """A frozen layer and a learnt change of low rank."""

    def __init__(self, base: nn.Linear, r: int = 2, alpha: int = 4) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / r
        for p in self.base.parameters():
            p.requires_grad = False
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


class LoRA(nn.Module):
    """Layers exchanged for adapted ones by setattr."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        for name in ("inp", "mid"):
            setattr(self, name, LoRALinear(getattr(self, name)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.gelu(self.mid(functional.gelu(self.inp(x)))))


class GatedNet(nn.Module):
    """GLU, a highway with torch.where, and a sum that is clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.glu(self.inp(x), dim=-1)
        value, gate = self.mid(h).chunk(2, dim=-1)
        h = torch.where(gate > 0, value * gate.sigmoid(), 0.1 * h)
        return self.out(h.clamp(-3, 3))


class InPlace(nn.Module):
    """Writes into what it has: slices, masked_fill_, relu_, +=."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x).relu_()
        skip = h.clone()
        h = self.mid(h)
        h[:, 0] = skip[:, 1] * 2
        h.masked_fill_(skip > 1.5, 0.0)
        h += skip
        return self.out(h.mul_(0.5))


class Euler(nn.Module):
    """One block called at every step of a solver."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.f, self.out = nn.Linear(8, 8), nn.Sequential(nn.Linear(9, 8), nn.Tanh()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for t in torch.linspace(0, 1, 4):
            h = h + 0.25 * self.f(torch.cat([h, torch.ones_like(h[:, :1]) * t], dim=1))
        return self.out(h)


class VectorQuantizer(nn.Module):
    """VQ-VAE: the nearest code word, straight through; one logit vector is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.codebook, self.out = nn.Linear(8, 8), nn.Embedding(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inp(x)
        d = z.pow(2).sum(1, keepdim=True) + self.codebook.weight.pow(2).sum(1) - 2 * z @ self.codebook.weight.t()
        q = self.codebook(torch.argmin(d, dim=1))
        return self.out(z + (q - z).detach())


class RoundSTE(torch.autograd.Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class QuantizationAware(nn.Module):
    """Weights and activations rounded, with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def quantized(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return functional.linear(RoundSTE.apply(x, 16), RoundSTE.apply(layer.weight, 16), layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.quantized(self.inp, x))
        return self.quantized(self.out, torch.relu(self.quantized(self.mid, h)))


class WideAndDeep(nn.Module):
    """Columns of two kinds, categories looked up, crosses of a factorization machine."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(4, 3) for _ in range(2)])
        self.bottom, self.deep, self.wide = nn.Linear(6, 3), nn.Linear(9, 4), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        dense, categories = x[:, :6], x[:, 6:].abs().clamp(max=3).long()
        e = [emb(categories[:, i]) for i, emb in enumerate(self.embeddings)]
        fields = torch.stack([functional.relu(self.bottom(dense)), *e], dim=1)
        cross = 0.5 * (fields.sum(1).pow(2) - fields.pow(2).sum(1)).sum(1, keepdim=True)
        return self.deep(fields.flatten(1)) + self.wide(dense) + cross


class Cosine(nn.Module):
    """Logits are scaled cosines with a weight that is normalized; features are scored by a gate of their columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.film, self.weight = nn.Linear(8, 8), nn.Linear(2, 16), nn.Parameter(torch.randn(4, 8))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(5))

    def forward(self, x: Tensor) -> Tensor:
        gamma, beta = self.film(x[:, :2]).chunk(2, 1)
        h = (1 + gamma) * torch.relu(self.inp(x)) + beta
        h = functional.linear(functional.normalize(h), functional.normalize(self.weight))
        return self.logit_scale.exp() * h


class VAE(nn.Module):
    """Reparameterization, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mu, self.logvar, self.out = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 4)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        if not self.training:
            return mu
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.inp(x))
        mu, logvar = self.mu(h), self.logvar(h)
        return self.out(self.reparameterize(mu, logvar))


class VAEOutputs(VAE):
    """The same with mean and log variance returned."""

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.inp(x))
        mu, logvar = self.mu(h), self.logvar(h)
        return self.out(self.reparameterize(mu, logvar)), mu, logvar


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.neg() * ctx.alpha, None


class Domains(nn.Module):
    """A second head behind reversed gradients, as a dict of results (DANN)."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, alpha: float = 1.0) -> dict[str, Tensor]:
        f = torch.relu(self.features(x))
        return {"label": self.label(f), "domain": self.domain(Reverse.apply(f, alpha))}


class Recommender(nn.Module):
    """Embeddings renormalized on look-up, of pairs in columns (user, item), and a dot product among layers."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(8, 4, max_norm=0.5), nn.Embedding(8, 4)
        self.fc1, self.fc2 = nn.Linear(9, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        u, i = self.user(x[:, 0] % 8), self.item(x[:, 1] % 8)
        return self.fc2(functional.relu(self.fc1(torch.cat([u, i, (u * i).sum(-1, keepdim=True)], dim=-1))))


class ChecksForNaN(nn.Module):
    """Checks its values for NaN, and prints shapes when it is asked to."""

    debug = False

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_tensor(x):
            x = torch.as_tensor(x)
        if x.dim() != 2:
            raise ValueError(f"expected 2 dimensions, got {x.dim()}")
        h = torch.relu(self.inp(x))
        if self.debug:
            print(h.shape)
        h = torch.relu(self.mid(h))
        assert not torch.isnan(h).any(), "NaN"
        return self.out(h)


class Ensemble(nn.Module):
    """The mean of several whole nets, gathered by a comprehension, and weights of a simplex."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)])
        self.alpha = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([m(x) for m in self.members])
        return (outputs * self.alpha.softmax(0)[:, None, None]).sum(0)


class ByName(nn.Module):
    """A batch as ModelOutput of transformers has it: a dict whose values are attributes too."""

    class Output(OrderedDict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.pooler, self.classifier = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Output:
        h = self.encoder(x)
        return self.Output(last_hidden_state=h, pooler_output=torch.tanh(self.pooler(h)))

    def forward(self, x: Tensor, return_dict: bool = True) -> Output:
        outputs = self.encode(x)
        return self.Output(logits=self.classifier(outputs.pooler_output + outputs["last_hidden_state"]))
