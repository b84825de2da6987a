"""ECG CNN: two convolutions over time and one linear layer for a server that computes on ciphertexts.

Paper: Khan, Nguyen, Michalas, "Split Ways: privacy-preserving training of encrypted data using split learning", HeDAI
at EDBT/ICDT 2023; after Abuadbba et al., "Can we use split learning on 1D CNN models for privacy preserving training?",
ASIACCS 2020.

Deviates: an identity after the linear layer, so that a model can be cut there, and `server_width`. The padding, 3 and
2, is that of the authors' code, which gives their 256 features for 128 samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from splitfed.core.errors import check_count
from splitfed.core.random import initialization
from splitfed.models.shapes import signal_shape


class EcgCnn(nn.Sequential):
    """The 1-D CNN; `cuts` depends on the layers after the server's, so each instance has its own."""

    cuts: tuple[str, ...] = ()


def ecg_cnn(shape: Sequence[int], outputs: int, server_width: int | None = None, *, seed: int | None = 0) -> EcgCnn:
    """Return the CNN for signals (channels, length), or (length,) of one channel, with length >= 4.

    `conv1` to `flatten` compute 8 * (length // 4) features, 256 for 128 samples, which the linear layer `fc1` reads.
    Cut U-shaped after ("flatten", "fc1"), the server holds only `fc1`. Without `server_width` `fc1` returns the logits,
    followed by an identity, `head`: the client adds softmax and loss. With it, >= 1, `fc1` has that many outputs, and a
    leaky ReLU, `relu3`, and the linear layer `fc2` compute the logits at the client.

    Weights depend on `seed` only, without a change of torch's global generator; None draws them from that generator.
    """
    channels, length = signal_shape("ecg_cnn", shape, outputs, smallest=4)
    if server_width is not None:
        check_count("server_width", server_width, low=1)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if len(shape) == 1:
        layers["unflatten"] = nn.Unflatten(1, (1, length))
    with initialization(seed):
        layers.update(
            conv1=nn.Conv1d(channels, 16, 7, padding=3),
            relu1=nn.LeakyReLU(),
            pool1=nn.MaxPool1d(2),
            conv2=nn.Conv1d(16, 8, 5, padding=2),
            relu2=nn.LeakyReLU(),
            pool2=nn.MaxPool1d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(8 * (length // 4), outputs if server_width is None else server_width),
        )
        if server_width is None:
            layers["head"] = nn.Identity()
        else:
            layers.update(relu3=nn.LeakyReLU(), fc2=nn.Linear(server_width, outputs))
        model = EcgCnn(layers)
    model.cuts = tuple(name for name in layers if name != "unflatten")[:-1]
    return model
