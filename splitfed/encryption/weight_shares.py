"""The protocol "weight_shares": the server's layer is the sum of a share that it holds and one that the client holds.

W = W_server + W_client. The server's share is what its weights were before training, and stays so. The client's share
is zero at first and takes every step. The server multiplies what it cannot read by its own share; the client adds what
its share makes of the same numbers in plain. That sum, its gradients and every step of SGD, with momentum or without,
are those of the undivided layer, up to rounding and the precision of the ciphertexts.

Security. All that the server gets is a public context and fresh encryptions under it: of releases, and of gradients of
what it returned. Nothing that was decrypted comes back to it in plain, and its own weights do not depend on data or
labels. Ciphertexts of CKKS tell nothing of what is in them (indistinguishable under chosen plaintexts, if ring learning
with errors is hard, at 128 bits): a server that follows the protocol, whatever it computes from what it sees, could as
well have been sent encryptions of zeros. It never holds a gradient of the logits nor two successive weight matrices.

Open: how many rows and features there are, when, and in which order (sizes, times, access pattern); declared bounds,
which cross in plain; a malicious server, which may return something else and see from the client's later behaviour
whether that mattered, as nothing proves what was computed; approximate decryptions that a client hands on to others,
which tell of its key (Li, Micciancio, EUROCRYPT 2021: round them first); a client that shares its keys and colludes
with the server; whoever averages or relays the clients' weights, which has the client's share at successive times.

The server saves the client no arithmetic of the gradients of weights, which the client computes itself. What it has is
a part of the model, without which its clients cannot use theirs; they can find it out by as many queries as the layer
has inputs, since results are linear in them.

The division into a share that stays and one that learns is this project's own answer to the leaks of the protocols
of Khan et al., "Split Ways" and "Split Without a Leak" (2023); see `splitfed.encryption.settings.PROTOCOLS`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Segment, Topology
from splitfed.encryption.settings import Encryption
from splitfed.encryption.stages import Square, read_stages

INPUT_SHARE, OUTPUT_SHARE, SERVER = "_input_share", "_output_share", "_server"


class ServerShare(nn.Module):
    """The stages of a server segment with the server's share of the weights, which does not learn.

    `joins`: the stage to whose result the client's share of the first layer is added, None if that is the last one.
    `returns_inner`: the stage whose input is returned too, for the client's share of the second layer.
    """

    def __init__(self, stages: Sequence[nn.Module], joins: int | None, returns_inner: int | None) -> None:
        super().__init__()
        self.stages = nn.ModuleList(copy.deepcopy(list(stages)))
        self.requires_grad_(False)
        self.joins, self.returns_inner = joins, returns_inner

    def forward(self, x: Tensor, share: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the result, and the input of the second layer where that is asked for."""
        inner = x
        for number, stage in enumerate(self.stages):
            if number == self.returns_inner:
                inner = x
            x = stage(x)
            if number == self.joins and share is not None:
                x = x + share
        return x if self.returns_inner is None else (x, inner)


class ClientShare(nn.Module):
    """What the client's share of a layer, `layer`, makes of its input; added to `result` where there is one."""

    def __init__(self, stages: Sequence[nn.Module], adds: bool) -> None:
        super().__init__()
        *before, layer = copy.deepcopy(list(stages))
        self.before = nn.Sequential(*before)
        self.layer = layer
        self.adds = adds
        with torch.no_grad():
            for weight in self.parameters():
                weight.zero_()

    def forward(self, *values: Tensor) -> Tensor:
        """Take the input of the layer alone, or the server's result before it."""
        made: Tensor = self.layer(self.before(values[-1]))
        return values[0] + made if self.adds else made


def share_weights(topology: Topology, settings: Encryption) -> Topology:
    """Return `topology` with every segment that is evaluated on ciphertexts divided into shares.

    A server segment whose weights are all frozen needs none. Raises `InvalidInput` for a segment that reads or returns
    several values, and for more layers than can be divided.
    """
    segments: list[Segment] = []
    for segment in topology.segments:
        if segment.role in settings.holders:
            segments.append(segment)
        elif len(segment.inputs) > 1:
            segments.append(_weightless(segment))
        else:
            segments += _divide(segment, _holder_of_shares(topology, settings))
    return replace(topology, segments=tuple(segments))


def merge_weight_shares(topology: Topology, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the state of the undivided model, by its own names, from `modules` (segment name -> module).

    `topology`: as a run has it, with shares. Both parties' weights are in it: what neither of them could read alone.
    """
    merged: dict[str, Tensor] = {}
    for segment in topology.segments:
        module = modules[segment.name]
        if isinstance(module, ClientShare):
            continue
        if not isinstance(module, ServerShare):
            merged |= {segment.full(name): value.clone() for name, value in module.state_dict().items()}
            continue
        shares = [m for n, m in modules.items() if n in (segment.name + INPUT_SHARE, segment.name + OUTPUT_SHARE)]
        added = {
            n: t for share in shares if isinstance(share, ClientShare) for n, t in share.layer.state_dict().items()
        }
        for name, value in module.state_dict().items():
            # stages.<number>.<name in the segment>
            own = name.split(".", 2)[2]
            merged[segment.full(own)] = value + added[own].to(value.device) if own in added else value.clone()
    return merged


def _holder_of_shares(topology: Topology, settings: Encryption) -> str:
    """Return the role that learns in the server's place: the key holder, of several the one that has the labels."""
    return settings.holders[0] if len(settings.holders) == 1 else topology.heads[0].role


def _weightless(segment: Segment) -> Segment:
    """Return a segment that joins several values; refuse one with weights of its own."""
    if any(True for _ in segment.module.parameters()):
        raise InvalidInput(
            f"segment {segment.name!r} reads {len(segment.inputs)} values ({', '.join(segment.inputs)}); what joins "
            "values on ciphertexts may have no weights"
        )
    return replace(segment, original=None)


def _divide(segment: Segment, holder: str) -> list[Segment]:
    """Return `segment` with the server's share, and those that `holder` needs before and behind it."""
    for what, values in (("reads", segment.inputs), ("returns", segment.outputs)):
        if len(values) != 1:
            raise InvalidInput(
                f"segment {segment.name!r} {what} {len(values)} values ({', '.join(values)}); one can be encrypted"
            )
    stages = read_stages(segment.name, segment.module)
    learning = [i for i, s in enumerate(stages) if any(p.requires_grad for p in s.parameters())]
    if len(learning) > 2:
        raise InvalidInput(
            f"segment {segment.name!r} has {len(learning)} layers that learn, one after another; two can be evaluated "
            "on ciphertexts under shared weights, put the others at the key holder"
        )
    last = len(stages) - 1
    if len(learning) == 2 and learning[1] != last:
        raise InvalidInput(
            f"segment {segment.name!r} squares what its second layer returns, which cannot be evaluated on ciphertexts "
            "under shared weights; put the square at the key holder"
        )
    for place in learning:
        if any(not isinstance(s, Square) for s in stages[learning[0] + 1 if place != learning[0] else 0 : place]):
            raise InvalidInput(
                f"segment {segment.name!r} has a frozen layer before one that learns; put it at the key holder"
            )
    (given,), (returned,) = segment.inputs, segment.outputs
    joins = learning[0] if learning and learning[0] != last else None
    inner = learning[1] if len(learning) == 2 else None
    server = ServerShare(stages, joins, inner)
    made = f"{returned}{SERVER}" if (learning and joins is None) or inner is not None else returned
    inputs: tuple[str, ...] = segment.inputs
    outputs: tuple[str, ...] = (made,)
    around = list[Segment]()
    if joins is not None:
        share = f"{segment.name}{INPUT_SHARE}"
        around.append(Segment(share, holder, ClientShare(stages[: joins + 1], False), (given,), (share,)))
        inputs = (given, share)
    behind: list[Segment] = []
    if inner is not None:
        between = f"{segment.name}_inner"
        outputs = (made, between)
        behind = [_output_share(segment, holder, stages[inner : inner + 1], (made, between))]
    elif learning and joins is None:
        behind = [_output_share(segment, holder, stages[: last + 1], (made, given))]
    # Names of weights stay those of the undivided segment, behind the number of their stage.
    shared = replace(segment, module=server, inputs=inputs, outputs=outputs, prefix=segment.full(""), original=None)
    return [*around, shared, *behind]


def _output_share(segment: Segment, holder: str, stages: Sequence[nn.Module], reads: tuple[str, ...]) -> Segment:
    name = f"{segment.name}{OUTPUT_SHARE}"
    return Segment(name, holder, ClientShare(stages, True), reads, segment.outputs)
