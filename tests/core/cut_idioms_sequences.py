"""Ways in which people write models of words and series, each small; for `tests/core/test_cut_idioms_more.py`.

They take words (batch, 5) below 16 of which 0 pads, or series (batch, 6, 4), and return four logits.
"""

from __future__ import annotations

import math

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


class BidirectionalGRU(nn.Module):
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


class PackedWords(nn.Module):
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
