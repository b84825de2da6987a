"""Ways in which people write models of words, series, tables and graphs, each small; for `test_cut_idioms_more.py`.

They take words (batch, 5) below 16 of which 0 pads, series (batch, 6, 4), or tables (batch, 8), and return four logits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class LastStep(nn.Module):
    """An LSTM of which the last step is read."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.lstm, self.fc = nn.Linear(4, 8), nn.LSTM(8, 8, num_layers=2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(2, x.size(0), 8).to(x.device)
        c0 = torch.zeros(2, x.size(0), 8).to(x.device)
        out, _ = self.lstm(self.proj(x), (h0, c0))
        return self.fc(out[:, -1, :])


class HiddenState(LastStep):
    """An LSTM of which the hidden state of the last layer is read."""

    def forward(self, x: Tensor) -> Tensor:
        _, (h_n, _) = self.lstm(self.proj(x))
        return self.fc(h_n[-1])


class Bidirectional(nn.Module):
    """A GRU of both directions, whose last hidden states are concatenated, from words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=0)
        self.gru, self.fc = nn.GRU(8, 4, bidirectional=True, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        _, hidden = self.gru(self.embedding(x))
        return self.fc(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1))


class AttentionPooling(nn.Module):
    """A recurrent net of both directions, time first, with attention over its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.score = nn.LSTM(4, 4, bidirectional=True), nn.Linear(8, 1, bias=False)
        self.drop, self.fc = nn.Dropout(0.0), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x.transpose(0, 1))
        h = h.permute(1, 0, 2)
        alpha = torch.softmax(self.score(torch.tanh(h)).squeeze(-1), dim=1)
        return self.fc(self.drop(torch.bmm(alpha.unsqueeze(1), h).squeeze(1)))


class TimeFirst(AttentionPooling):
    """Batch in the second dimension throughout."""

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x.transpose(0, 1))
        return self.fc(self.drop(h)[-1])


class Packed(nn.Module):
    """Packs words by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=0)
        self.lstm, self.fc = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.size(1))
        return self.fc(out.sum(1) / lengths.unsqueeze(1))


class Cells(nn.Module):
    """A loop over time with an LSTMCell, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.cell, self.fc = nn.Linear(4, 8), nn.LSTMCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(0), 8)
        c = torch.zeros_like(h)
        for t in range(x.size(1)):
            h, c = self.cell(functional.relu(self.proj(x[:, t])), (h, c))
        return self.fc(h)


class SequenceToSequence(nn.Module):
    """An encoder, and a decoder that attends to all its steps, over and over."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(4, 8, batch_first=True)
        self.start = nn.Parameter(torch.zeros(8))
        self.cell, self.out = nn.GRUCell(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        memory, _ = self.encoder(x)
        state, word, logits = memory[:, -1], self.start.expand(x.size(0), -1), []
        for _ in range(3):
            weights = functional.softmax(torch.einsum("bd,btd->bt", state, memory) / math.sqrt(8), dim=-1)
            context = (weights[..., None] * memory).sum(dim=1)
            state = self.cell(torch.cat([word, context], -1), state)
            word = state
            logits.append(self.out(state))
        return torch.stack(logits, dim=1)[:, -1]


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


class CausalSelfAttention(nn.Module):
    """Attention as nanoGPT writes it, by scaled_dot_product_attention, or by hand with a buffer of ones."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head, self.flash = nn.Linear(8, 24), nn.Linear(8, 8), 2, flash
        self.register_buffer("bias", torch.tril(torch.ones(12, 12)).view(1, 1, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(8, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        if self.flash:
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * 0 * self.training, is_causal=True)
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


class WaveNet(nn.Module):
    """Dilated convolutions padded to the left, gated, with the sum of skips."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(4, 8, 1)
        self.dilations = [2**i for i in range(3)]
        self.filters = nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=d) for d in self.dilations)
        self.gates = nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=d) for d in self.dilations)
        self.skips, self.end = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in self.dilations), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, skip = self.start(x.transpose(1, 2)), 0
        for i, d in enumerate(self.dilations):
            padded = functional.pad(x, (d, 0))
            z = torch.tanh(self.filters[i](padded)) * torch.sigmoid(self.gates[i](padded))
            skip = skip + self.skips[i](z)
            x = (x + z) * math.sqrt(0.5)
        return self.end(functional.relu(skip)[:, :, -1])


class TextCNN(nn.Module):
    """Convolutions of several widths, each pooled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.convs = nn.ModuleList([nn.Conv2d(1, 3, (k, 8)) for k in (2, 3, 4)])
        self.dropout, self.fc = nn.Dropout(0.0), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unsqueeze(1)
        maps = [functional.relu(conv(x)).squeeze(3) for conv in self.convs]
        pooled = [functional.max_pool1d(i, i.size(2)).squeeze(2) for i in maps]
        return self.fc(self.dropout(torch.cat(pooled, 1)))


class MaskedMean(nn.Module):
    """Mean of the embeddings of words that are no padding, as EmbeddingBag has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc1, self.fc2 = nn.Embedding(16, 8, padding_idx=0), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.ne(0).unsqueeze(-1).to(self.embed.weight.dtype)
        e = (self.embed(x) * mask).sum(1) / mask.sum(1).clamp_min(1.0)
        return self.fc2(torch.relu(self.fc1(e)))


class Bag(nn.Module):
    """EmbeddingBag itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc1, self.fc2 = nn.EmbeddingBag(16, 8, mode="mean"), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(self.embed(x))))


class FNet(nn.Module):
    """Mixes tokens by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.ff, self.fc = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.norms[0](x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        x = self.norms[1](x + functional.gelu(self.ff(x)))
        return self.fc(x.mean(1))


class GlobalFilter(nn.Module):
    """A learnt filter of complex numbers over time (GFNet, FNO)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.fc = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.complex_weight = nn.Parameter(torch.randn(4, 8, 2) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        f = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.complex_weight)
        x = x + torch.fft.irfft(f, n=x.size(1), dim=1, norm="ortho")
        return self.fc(functional.relu(self.mix(x)).mean(1))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Linear(4, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.tokens = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.channels, self.fc = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.fc(x.mean(dim=1))


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
