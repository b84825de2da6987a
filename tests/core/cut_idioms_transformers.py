"""Ways in which people write transformers, each small; for `tests/core/test_cut_idioms_more.py`.

They take words (batch, 5) below 16 of which 0 pads, or series (batch, 6, 4), and return logits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class PositionalEncoding(nn.Module):
    """Sines of the position in a buffer that is cut to length, as in the tutorial."""

    def __init__(self, d_model: int = 8, max_len: int = 50) -> None:
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[:, : x.size(1)])


class PaddedTransformer(nn.Module):
    """TransformerEncoder with a mask of padding made of the words, and a masked mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(16, 8, padding_idx=0), PositionalEncoding()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 4)

    def forward(self, src: Tensor) -> Tensor:
        mask = src == 0
        x = self.pos(self.embed(src) * math.sqrt(8))
        x = self.encoder(x, src_key_padding_mask=mask)
        keep = (~mask).unsqueeze(-1).float()
        return self.fc((x * keep).sum(1) / keep.sum(1).clamp(min=1.0))


class CausalTransformer(nn.Module):
    """A causal mask by generate_square_subsequent_mask; the last position is read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(4, 8), nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        h = self.embed(x) + self.position(torch.arange(t, device=x.device))[None]
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=x.device)
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h))[:, -1]


class Perceiver(nn.Module):
    """Learnt latents of every row attend to the series, as queries of DETR do."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 8))
        self.embed, self.norm, self.fc = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        latents = self.latents.unsqueeze(0).repeat(len(x), 1, 1)
        latents = latents + self.cross(self.norm(latents), h, h, need_weights=False)[0]
        return self.fc(self.decoder(latents, memory=h)[:, 0])


class CausalSelfAttention(nn.Module):
    """Attention as nanoGPT writes it, by scaled_dot_product_attention, or by hand with a buffer of ones."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.n_head, self.dropout, self.flash = 2, 0.0, flash
        self.register_buffer("bias", torch.tril(torch.ones(12, 12)).view(1, 1, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(8, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        if self.flash:
            y = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = functional.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GPTBlock(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(8), CausalSelfAttention(flash), nn.LayerNorm(8)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 16), "act": nn.GELU("tanh"), "c_proj": nn.Linear(16, 8)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        h = self.ln_2(x)
        for layer in self.mlp.values():
            h = layer(h)
        return x + h


class ClosureBlock(GPTBlock):
    """minGPT's block, whose MLP is a lambda that holds the submodules."""

    def __init__(self, flash: bool) -> None:
        super().__init__(flash)
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT: `transformer.wte`, positions by arange, loss where targets are given, blocks in `transformer.h`."""

    def __init__(self, flash: bool = True, tie: bool = False, block: type[GPTBlock] = GPTBlock) -> None:
        super().__init__()
        self.block_size = 12
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(16, 8),
                "wpe": nn.Embedding(12, 8),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([block(flash) for _ in range(2)]),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, 16, bias=False)
        if tie:
            self.transformer.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.2)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        device = idx.device
        _, t = idx.size()
        assert t <= self.block_size, f"cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        return self.lm_head(x[:, [-1], :]).squeeze(1)


class RMSNorm(nn.Module):
    """Norm of Llama, computed in float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


def rotate(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotary positions by complex numbers: x (batch, time, heads, size)."""
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x_ * freqs_cis[None, :, None, :]).flatten(3).type_as(x)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(8), RMSNorm(8)
        self.wq, self.wk = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.wv, self.wo = nn.Linear(8, 4, bias=False), nn.Linear(8, 8, bias=False)
        self.w1, self.w2, self.w3 = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        h, (b, t, _) = self.attention_norm(x), x.shape
        xq, xk, xv = self.wq(h).view(b, t, 2, 4), self.wk(h).view(b, t, 1, 4), self.wv(h).view(b, t, 1, 4)
        xq, xk = rotate(xq, freqs_cis), rotate(xk, freqs_cis)
        keys, values = xk.repeat_interleave(2, dim=2), xv[:, :, :, None].expand(b, t, 1, 2, 4).reshape(b, t, 2, 4)
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(1, 2).transpose(2, 3)) / 2
        if mask is not None:
            scores = scores + mask
        scores = functional.softmax(scores.float(), dim=-1).type_as(xq)
        x = x + self.wo(torch.matmul(scores, values.transpose(1, 2)).transpose(1, 2).reshape(b, t, -1))
        h = self.ffn_norm(x)
        return x + self.w2(functional.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    """Rotary positions that are no buffer, a mask of -inf by triu, grouped keys, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(16, 8), nn.ModuleList([LlamaBlock(), LlamaBlock()])
        self.norm, self.output = RMSNorm(8), nn.Linear(8, 4, bias=False)
        freqs = 1.0 / (10000.0 ** (torch.arange(0, 4, 2).float() / 4))
        angles = torch.outer(torch.arange(24), freqs)
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor) -> Tensor:
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        self.freqs_cis = self.freqs_cis.to(h.device)
        freqs_cis = self.freqs_cis[:seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((1, 1, seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1).type_as(h)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return self.output(self.norm(h)[:, -1]).float()


class RotaryCache(Llama):
    """Rotary positions in a buffer that is not saved, without reassigning it."""

    def __init__(self) -> None:
        super().__init__()
        table = self.freqs_cis
        del self.freqs_cis
        self.register_buffer("freqs_cis", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[: h.shape[1]], None)
        return self.output(self.norm(h).mean(1))
