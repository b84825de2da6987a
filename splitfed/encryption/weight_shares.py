"""The protocol "weight_shares": the server's layer is the sum of a share that it holds and one that the client holds.

W = W_server + W_client. The server's share is the initial weights and never changes. The client's share is zero at
first and is trained. The server multiplies the ciphertexts by its own share; the client adds the product of the same
numbers, in plain, with its share. That sum, its gradients and every step of SGD, with momentum or without, equal those
of the undivided layer up to rounding and the precision of the ciphertexts.

Security. The server receives only a public context and fresh encryptions under it: of releases, and of gradients of its
results. It receives nothing decrypted, and its own weights do not depend on data or labels. Ciphertexts of CKKS reveal
nothing about their content (indistinguishable under chosen plaintexts, if ring learning with errors is hard, at 128
bits): to a server that follows the protocol, whatever else it computes, the messages are indistinguishable from
encryptions of zeros. It never holds a gradient of the logits nor two successive weight matrices.

Not covered: how many rows and features there are, when, and in which order (sizes, times, access pattern); declared
bounds, which are sent in the clear; a malicious server, which may return wrong results and see from the client's later
behaviour whether that mattered, as nothing proves what was computed; approximate decryptions that a client gives to
others, which reveal information on its key (Li, Micciancio, EUROCRYPT 2021: round them first); a client that shares its
keys and colludes with the server; a party that averages or forwards the clients' weights, which has the client's share
at successive times.

The server does not save the client the computation of weight gradients. Its role is to hold a part of the model without
which the clients cannot use theirs; they can reconstruct that part by as many queries as the layer has inputs, since
results are linear in them.

The division into a fixed and a trained share is this project's own design against the leaks of the protocols of Khan et
al., "Split Ways" and "Split Without a Leak" (2023); see `splitfed.encryption.settings.PROTOCOLS`.
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
    """The stages of a server segment with the server's share of the weights, which is not trained.

    `joins`: the stage to whose result the client's share of the first layer is added, None if that is the last one.
    `returns_inner`: the stage whose input is returned too, for the client's share of the second layer.
    """

    def __init__(self, stages: Sequence[nn.Module], joins: int | None, returns_inner: int | None) -> None:
        super().__init__()
        self.stages = nn.ModuleList(copy.deepcopy(list(stages)))
        self.requires_grad_(False)
        self.joins, self.returns_inner = joins, returns_inner

    def forward(self, x: Tensor, share: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the result, and also the input of the second layer if `returns_inner` is set."""
        inner = x
        for number, stage in enumerate(self.stages):
            if number == self.returns_inner:
                inner = x
            x = stage(x)
            if number == self.joins and share is not None:
                x = x + share
        return x if self.returns_inner is None else (x, inner)


class ClientShare(nn.Module):
    """The client's share of a layer: applies `layer` to its input and adds the server's `result` if there is one."""

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
        """Return the client's part for (input of the layer) or its sum with the result for (server's result, input)."""
        made: Tensor = self.layer(self.before(values[-1]))
        return values[0] + made if self.adds else made


def share_weights(topology: Topology, settings: Encryption) -> Topology:
    """Return `topology` with every segment that is evaluated on ciphertexts divided into shares.

    A server segment whose weights are all frozen is not divided. Raises `InvalidInput` for a segment that reads or
    returns several values, and for more layers than can be divided.
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

    `topology`: with shares, as a run has it. The result joins both parties' weights, which neither party has alone.
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
    """Return the role that trains the server's weights: the key holder, of several the one that has the labels."""
    return settings.holders[0] if len(settings.holders) == 1 else topology.heads[0].role


def _weightless(segment: Segment) -> Segment:
    """Return a segment that joins several values; raise `InvalidInput` if it has weights."""
    if any(True for _ in segment.module.parameters()):
        raise InvalidInput(
            f"segment {segment.name!r} reads {len(segment.inputs)} values ({', '.join(segment.inputs)}); a segment "
            "that joins values on ciphertexts may have no weights"
        )
    return replace(segment, original=None)


def _divide(segment: Segment, holder: str) -> list[Segment]:
    """Return the segments that replace `segment`: the server's share, and `holder`'s segments before and after it."""
    for what, values in (("reads", segment.inputs), ("returns", segment.outputs)):
        if len(values) != 1:
            raise InvalidInput(
                f"segment {segment.name!r} {what} {len(values)} values ({', '.join(values)}); one can be encrypted"
            )
    stages = read_stages(segment.name, segment.module)
    learning = [i for i, s in enumerate(stages) if any(p.requires_grad for p in s.parameters())]
    if len(learning) > 2:
        raise InvalidInput(
            f"segment {segment.name!r} has {len(learning)} trainable layers in sequence; two can be evaluated on "
            "ciphertexts under shared weights, put the others at the key holder"
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
                f"segment {segment.name!r} has a frozen layer before a trainable one; put it at the key holder"
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
