"""The party that computes on ciphertexts: it has every client's public context and its own weights, but no key.

Under "weight_shares" its weights are fixed and gradients are encrypted as well. Under the protocols that leak it trains
one linear layer with gradients that it receives in the clear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp
from splitfed.core.party import Party
from splitfed.core.party_state import PartyState
from splitfed.core.step_plan import SegmentPlan
from splitfed.encryption.arithmetic import add, add_plain
from splitfed.encryption.ciphertexts import EncryptedTensor, load_ciphertexts
from splitfed.encryption.key_holder_party import BIAS, CONTEXT, TRANSPOSED, WEIGHT
from splitfed.encryption.keys import PublicContext, load_public_context
from splitfed.encryption.linear import linear
from splitfed.encryption.server_program import CiphertextArithmetic, ForwardPass, JoinProgram, ServerProgram, program_of
from splitfed.encryption.settings import CONSTANT_MASK, MASKED_WEIGHTS, PLAIN_GRADIENT, Encryption

MASK = 1.0
"""Number that the protocol "constant_mask" adds to every weight, known to the server, as published."""


class EvaluatingParty(Party):
    """Party that evaluates its segments on ciphertexts; `shapes`: value -> shape of one row."""

    def __init__(self, state: PartyState, settings: Encryption, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(state)
        self._settings, self._shapes = settings, dict(shapes)
        self._contexts: dict[str, PublicContext] = {}
        # By segment, with the versions of its weights.
        self._programs: dict[str, tuple[tuple[int, ...], ServerProgram | JoinProgram]] = {}
        # For the current step of each replica: received and computed ciphertexts, by value; the forward pass of each
        # segment; and the gradients of values that pass between its own segments.
        self._values: dict[int, dict[str, EncryptedTensor]] = {}
        self._passes: dict[int, dict[str, ForwardPass[EncryptedTensor]]] = {}
        self._gradients: dict[int, dict[str, EncryptedTensor]] = {}
        # For the current step of each replica: the segment, and the message with its masked new weights.
        self._masked: dict[int, tuple[str, Message]] = {}

    def accept_context(self, message: Message, clients: Collection[str]) -> None:
        """Store the public context in `message`, under which the parties `clients` encrypt."""
        context = load_public_context(message.tensors[CONTEXT])
        self._contexts |= dict.fromkeys(clients, context)

    def forward(
        self,
        segment: str,
        received: Sequence[Message],
        stamp: Stamp,
        peers: Mapping[str, str],
        edges: Collection[str] | None = None,
    ) -> list[Message]:
        """Evaluate `segment` on the ciphertexts in `received`; return one message for each outgoing edge."""
        plan = self.state.segment_plans[segment]
        values = self._values.setdefault(stamp.replica, {})
        for message in received:
            values |= self._load(message)
        done = self._program(plan).forward(CiphertextArithmetic(), *(values[name] for name in plan.inputs))
        self._passes.setdefault(stamp.replica, {})[segment] = done
        made = {n: x for n, x in zip(plan.outputs, (done.result, done.inner), strict=False) if x is not None}
        values |= made
        return [
            Message(self.name, peers[port.role], "activation", port.edge, _to_tensors(made, port.values), stamp)
            for port in plan.ports_to_others
            if port.role is not None and (edges is None or port.edge in edges)
        ]

    def backpropagate(
        self, segment: str, received: Sequence[Message], stamp: Stamp, peers: Mapping[str, str]
    ) -> list[Message]:
        """Backpropagate the gradients in `received` through `segment`; return the gradients of its received inputs."""
        plan = self.state.segment_plans[segment]
        if self._settings.leaks:
            return self._backpropagate_plain(plan, received, stamp, peers)
        own = self._gradients.setdefault(stamp.replica, {})
        for message in received:
            _gather(own, self._load(message))
        if plan.outputs[0] not in own:
            return []
        gradients = self._program(plan).send_back(
            CiphertextArithmetic(),
            self._passes[stamp.replica][segment],
            *(own.pop(name) for name in plan.outputs if name in own),
        )
        made = {name: found for name, found in zip(plan.inputs, gradients, strict=False) if found is not None}
        for port in plan.arrivals:
            if port.role is None:
                _gather(own, {name: made[name] for name in port.returned})
        return [
            Message(self.name, peers[port.role], "gradient", port.edge, _to_tensors(made, port.returned), stamp)
            for port in plan.arrivals
            if port.role is not None and port.returned
        ]

    def forget(self, replica: int) -> None:
        """Delete the state of the current step of `replica`."""
        super().forget(replica)
        for kept in (self._values, self._passes, self._gradients, self._masked):
            kept.pop(replica, None)

    def ask(self, replica: int) -> Message | None:
        """Return the masked weights to be decrypted at the end of the step of `replica`; None if there are none."""
        return self._masked[replica][1] if replica in self._masked else None

    def hear(self, message: Message) -> None:
        """Receive the decrypted masked weights, and derive the weight gradient from their change."""
        segment, _ = self._masked[message.stamp.replica]
        weight, _ = _linear_weights(self.state.modules[segment])
        rate = self.state.rate
        assert rate is not None
        _accumulate(weight, (weight.detach() - (message.tensors[WEIGHT].to(weight) - MASK)) / rate)

    def _backpropagate_plain(
        self, plan: SegmentPlan, received: Sequence[Message], stamp: Stamp, peers: Mapping[str, str]
    ) -> list[Message]:
        """Backpropagate gradients in the clear, as the published protocols do."""
        tensors = {name: tensor for message in received for name, tensor in message.tensors.items()}
        weight, bias = _linear_weights(self.state.modules[plan.segment])
        slope = tensors[plan.outputs[0]].flatten(1).to(weight)
        if bias is not None:
            _accumulate(bias, slope.sum(0) if self._settings.protocol == CONSTANT_MASK else tensors[BIAS])
        if self._settings.protocol == PLAIN_GRADIENT:
            _accumulate(weight, tensors[WEIGHT])
        else:
            self._masked[stamp.replica] = plan.segment, self._mask(plan, slope, weight, stamp, peers)
        gradient = (slope @ weight.detach()).view(-1, *self._shapes[plan.inputs[0]])
        return [
            Message(self.name, peers[port.role], "gradient", port.edge, {plan.inputs[0]: gradient.clone()}, stamp)
            for port in plan.arrivals
            if port.role is not None and port.returned
        ]

    def _mask(
        self, plan: SegmentPlan, slope: Tensor, weight: Tensor, stamp: Stamp, peers: Mapping[str, str]
    ) -> Message:
        """Return the weights after a step of SGD without momentum, plus the mask, encrypted: (features, results)."""
        rate = self.state.rate
        assert rate is not None
        released = self._values[stamp.replica][f"{plan.inputs[0]} {TRANSPOSED}"]
        stepped = linear(released, -rate * slope.T.double())
        masked = add_plain(stepped, weight.detach().double().T + MASK)
        (port,) = (port for port in plan.ports_to_others if port.role is not None)
        assert port.role is not None
        content = {WEIGHT: masked.to_tensor()}
        return Message(self.name, peers[port.role], MASKED_WEIGHTS, port.edge, content, stamp)

    def _load(self, message: Message) -> dict[str, EncryptedTensor]:
        if message.sender not in self._contexts:
            raise InvalidInput(f"{self.name!r} has no public context of {message.sender!r}, which sends ciphertexts")
        context = self._contexts[message.sender]
        return {name: load_ciphertexts(content, context) for name, content in message.tensors.items()}

    def _program(self, plan: SegmentPlan) -> ServerProgram | JoinProgram:
        """Return the program of the segment, rebuilt only if its weights have changed."""
        segment, module = plan.segment, self.state.modules[plan.segment]
        versions = tuple(weight._version for weight in module.parameters())
        known = self._programs.get(segment)
        if known is None or known[0] != versions:
            known = self._programs[segment] = versions, program_of(segment, module, plan.inputs, self._shapes)
        return known[1]


def _gather(found: dict[str, EncryptedTensor], more: Mapping[str, EncryptedTensor]) -> None:
    """Add the gradients in `more` to those in `found`."""
    for name, gradient in more.items():
        found[name] = add(found[name], gradient) if name in found else gradient


def _to_tensors(made: Mapping[str, EncryptedTensor], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: made[name].to_tensor() for name in names}


def _linear_weights(module: torch.nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the only linear layer in `module`."""
    (layer,) = (m for m in module.modules() if isinstance(m, torch.nn.Linear))
    return layer.weight, layer.bias


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient
