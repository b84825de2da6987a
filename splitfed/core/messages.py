"""What crosses, what carries it and what is seen of it: messages, the link, the view of a party, and its recorder.

A tensor is a window on a storage, and whoever is handed the window can read the whole storage: the raw rows behind
`x[:, :3]`, every token behind `h[:, 0]`. A message therefore carries plain dense tensors, each in memory that holds its
numbers and nothing else. The same goes for what hangs on a tensor beside its numbers: the graph that made it, its
base, gradient, hooks and attributes. A tensor that fills its storage is handed over as it is, since a copy costs as
much as the rest of a cut; any other is copied. Who is no party (an adversary, a recorder) gets a copy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from splitfed.core import digests
from splitfed.core.errors import InvalidInput, check_count, check_kind, check_names
from splitfed.core.grouping import group_pairs
from splitfed.core.payload import Layout, copy_modules, extent, layout_of, not_dense

if TYPE_CHECKING:
    from splitfed.core.traffic import Traffic

WEIGHT_GRADIENT = "weight gradient"
"""The kind of message by which a client sends the gradient of its weights, where it takes no step itself."""


FED = "fed_server"
"""The party that averages the clients' segments, where a schedule has one."""


class Stamp(NamedTuple):
    """When: the phase, replica, epoch and step, and the part of the data.

    `phase`: "train", "consult" (rows that pass forward alone, within training), "evaluate", "predict", "query",
    "rehearse" (training steps that move nothing) or "match".
    `replica` tells one client's messages from another's; it is not the client's number where some party never hears
    from a client directly.
    """

    phase: str
    replica: int
    epoch: int
    step: int
    part: str = "train"


_LAID_OUT = ("activation", "gradient")
"""Kinds of messages with whose tensors a receiver computes as the uncut model does."""


class Message(NamedTuple):
    """Tensors on their way from one party to another; the only thing that ever crosses.

    `kind`: "activation", "gradient", "label", "weights", what a method sends, or a step of a secure sum. `edge` names
    the place (`source->target`, whichever way the message goes); `tensors` are detached. `packed`: the bytes they take
    where a defense sends them in a shorter form than the tensors themselves. `layouts`: how those tensors lay at the
    sender that had to be copied, for a receiver that must compute to the same bits. `dataless`: names of those that
    hold no data: constants, and what tells of lengths and masks alone.
    """

    sender: str
    receiver: str
    kind: str
    edge: str
    tensors: Mapping[str, Tensor]
    stamp: Stamp
    packed: int | None = None
    layouts: Mapping[str, Layout] | None = None
    dataless: frozenset[str] = frozenset()

    def in_own_memory(self) -> Message:
        """Return the message with plain tensors that fill a storage each; itself where they do so already.

        Raises `InvalidInput` for a tensor that is not dense.
        """
        if all_own(self.tensors.values()):
            return self
        tensors: dict[str, Tensor] = {}
        layouts = dict(self.layouts or {})
        addresses: set[int] = set()
        for name, original in self.tensors.items():
            tensor = _to_own_storage(name, original, f"{self.edge!r} from {self.sender!r}")
            address = tensor.untyped_storage().data_ptr()
            if address in addresses and tensor.numel():
                tensor = tensor.clone()
            elif tensor.numel() and address != original.untyped_storage().data_ptr() and self.kind in _LAID_OUT:
                layout = layout_of(original)
                if layout is not None:
                    layouts[name] = layout
            tensors[name] = tensor
            addresses.add(tensor.untyped_storage().data_ptr())
        return self._replace(tensors=tensors, layouts=layouts or None)

    def copy(self) -> Message:
        """Return the message with copies of its tensors, for somebody who may write into them."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return Message(self.sender, self.receiver, self.kind, self.edge, tensors, *self[5:])

    @property
    def nbytes(self) -> int:
        """Payload in bytes: elements times element size, summed, or as packed; no header is counted."""
        if self.packed is not None:
            return self.packed
        nbytes = 0
        for tensor in self.tensors.values():
            nbytes += tensor.nbytes
        return nbytes


def is_own(tensor: Tensor) -> bool:
    """Return whether `tensor` is plain, detached and dense, and fills its storage."""
    return all_own((tensor,))


def all_own(tensors: Collection[Tensor]) -> bool:
    """Return whether every tensor is plain, detached and dense, and fills a storage that no other of them has.

    A few attributes are read, no number is: this is asked of every message of every step, where a call more shows.
    What cannot hang on a detached result of an operation (a gradient, hooks) is not asked for.
    """
    try:
        for tensor in tensors:
            if not (
                type(tensor) is Tensor
                and not tensor.requires_grad
                and tensor._base is None
                and tensor.untyped_storage().nbytes() == tensor.nbytes
                and (tensor.is_contiguous() or extent(tensor.shape, tensor.stride()) == tensor.numel())
                and not (tensor.__dict__ or tensor.is_nested or tensor.is_quantized)
            ):
                return False
    except NotImplementedError:
        # Sparse tensors, and others that torch keeps elsewhere, have no storage.
        return False
    if len(tensors) == 1:
        return True
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    return len(set(addresses)) == len(addresses)


def _to_own_storage(name: str, tensor: Tensor, place: str) -> Tensor:
    """Return `tensor` detached and plain: as it is where it fills its storage, else copied.

    Raises `InvalidInput`, naming `name` and `place`, for what is not dense.
    """
    kind = not_dense(tensor)
    if kind is not None:
        raise InvalidInput(f"{name!r} on {place} is a {kind} tensor; a message carries dense ones: call .to_dense()")
    plain = tensor.as_subclass(Tensor).detach()
    # A subclass may keep its numbers elsewhere, and show an empty storage.
    if type(tensor) is not Tensor and plain.numel() and plain.data_ptr() == 0 and plain.device.type != "meta":
        raise InvalidInput(f"{name!r} on {place} is a {type(tensor).__name__} without a storage of its own numbers")
    return plain if is_own(plain) else plain.clone()


Tap = Callable[[Message], Message]


class LocalLink:
    """Carries messages within a process: counts each, lets its receiver's recorder see it, and hands it over."""

    def __init__(self, traffic: Traffic, recorders: Mapping[str, Recorder]) -> None:
        self.traffic = traffic
        self.recorders = dict(recorders)
        # Those that record for the length of a block.
        self.watched: dict[str, Recorder] = {}
        self.taps: dict[str, Tap] = {}
        self.listeners: dict[str, Callable[[Message], None]] = {}
        self.readers: dict[str, Tap] = {}

    def deliver(self, message: Message) -> Message:
        """Carry `message`; an adversary's tap may replace what its party sends, its reader what that party uses.

        What is consulted within training is counted as training.
        """
        if not all_own(message.tensors.values()):
            message = message.in_own_memory()
        tap = self.taps.get(message.sender)
        if tap is not None:
            # Nothing is known of what it returns, so that it is copied whatever it looks like.
            message = tap(message.copy()).copy().in_own_memory()
        phase = message.stamp.phase
        flow = ("train" if phase == "consult" else phase, message.kind, message.sender, message.receiver)
        counter = self.traffic.counters.setdefault(flow, [0, 0])
        counter[0] += 1
        counter[1] += message.nbytes
        message = self.carry(message)
        if not (self.recorders or self.listeners or self.readers):
            return message
        recorder = self.recorders.get(message.receiver)
        if recorder is not None:
            recorder.receive(message)
        listener = self.listeners.get(message.receiver)
        if listener is not None:
            listener(message.copy())
        if message.sender == FED and FED in self.recorders:
            # What came back says little without what it was made from.
            self.recorders[FED].receive(message)
        reader = self.readers.get(message.receiver)
        return message if reader is None else reader(message.copy()).copy().in_own_memory()

    def carry(self, message: Message) -> Message:
        """Return what arrives of a message that was sent; here every bit of it, in the same memory."""
        return message


@dataclass(frozen=True)
class View:
    """All that `party` received and was recorded, in order, with the segments it holds itself.

    An aggregation server's view holds the weights it sent out, too.
    """

    party: str
    messages: tuple[Message, ...]
    segments: Mapping[str, nn.Module] = field(default_factory=dict)

    def select(self, kind: str | None = None, phase: str | None = None, edge: str | None = None) -> View:
        """Return the part of the view with this `kind`, `phase` and `edge` (None: any)."""
        kept = (
            m
            for m in self.messages
            if (kind is None or m.kind == kind)
            and (phase is None or m.stamp.phase == phase)
            and (edge is None or m.edge == edge)
        )
        return View(self.party, tuple(kept), self.segments)

    def copy(self) -> View:
        """Return the view with copies of its tensors and segments, for somebody who may write into them."""
        return View(self.party, tuple(m.copy() for m in self.messages), copy_modules(self.segments))

    def tensors(self, device: torch.device | str = "cpu", dataless: bool = False) -> dict[str, Tensor]:
        """Join what was received over all messages, on `device`: value -> (rows, ...), in the order of arrival.

        What holds no data (constants, masks) is left out, unless `dataless`: there is nothing in it to attack.
        """
        joined = group_pairs(
            (name, t.to(device))
            for message in self.messages
            for name, t in message.tensors.items()
            if dataless or name not in message.dataless
        )
        return {name: torch.cat(parts) for name, parts in joined.items()}


@dataclass(frozen=True)
class Recording:
    """What to record: the `parties` by name, every `every`-th step, at most `budget` bytes in memory each.

    Past the budget messages go to the recorder's folder; a recorder without a folder refuses to go on.
    """

    parties: tuple[str, ...] = ()
    every: int = 1
    budget: int = 256 * 2**20

    def __post_init__(self) -> None:
        """Refuse what is no list of names, and a stride or a budget that is no positive whole number."""
        check_kind("recording parties", self.parties, (tuple, list, set, frozenset), "a list of names")
        check_count("recording every", self.every, low=1)
        check_count("recording budget", self.budget, low=1)

    def recorders(self, parties: tuple[str, ...], folder: Path | None) -> dict[str, Recorder]:
        """Make one recorder a named party, refusing a name that is none of `parties`."""
        check_names("party to record", parties, *self.parties)
        return {
            name: Recorder(name, self.every, self.budget, None if folder is None else folder / name)
            for name in self.parties
        }


class Recorder:
    """Keeps the messages one party receives: in memory up to a byte budget, then in files of its folder."""

    def __init__(self, party: str, every: int = 1, budget: int = 256 * 2**20, folder: Path | None = None) -> None:
        self.party = party
        self._every = every
        self._budget = budget
        self._folder = folder
        self._held: list[Message] = []
        self._held_bytes = 0
        self._digests: list[str | None] = []
        self._checked: set[int] = set()

    def receive(self, message: Message) -> None:
        """Keep `message` if its step is due; what crosses outside training is always kept."""
        if message.stamp.phase == "train" and message.stamp.step % self._every:
            return
        size = message.nbytes
        if self._held and self._held_bytes + size > self._budget:
            self.flush()
        # A copy: neither the parties, whose memory it may be, nor other recorders can change what was seen.
        self._held.append(message.copy())
        self._held_bytes += size

    def flush(self) -> None:
        """Write what is held in memory to the next file of the folder."""
        if not self._held:
            return
        if self._folder is None:
            raise InvalidInput(
                f"recording {self.party!r} needs more than its budget of {self._budget} bytes: "
                "give the run a folder to spill to, a larger budget, or record every n-th step"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{i}/{n}": t.contiguous() for i, m in enumerate(self._held) for n, t in m.tensors.items()}
        index = [
            [m.sender, m.receiver, m.kind, m.edge, list(m.tensors), list(m.stamp), sorted(m.dataless)]
            for m in self._held
        ]
        path = self._file(len(self._digests))
        save_file(_copy_shared_tensors(tensors), path, metadata={"messages": json.dumps(index)})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._digests.append(digests.of_file(path))
        self._held, self._held_bytes = [], 0

    def messages(self) -> Iterator[Message]:
        """Yield every recorded message, oldest first, one file in memory at a time; raise `Damaged` for a bad file."""
        for part, digest in enumerate(self._digests):
            if part not in self._checked:
                digests.check_file(self._file(part), digest, digests.RETRAIN)
                self._checked.add(part)
            with safe_open(self._file(part), framework="pt") as stored:
                index = json.loads(stored.metadata()["messages"])
                for i, (sender, receiver, kind, edge, names, stamp, *dataless) in enumerate(index):
                    tensors = {name: stored.get_tensor(f"{i}/{name}") for name in names}
                    yield Message(sender, receiver, kind, edge, tensors, Stamp(*stamp), dataless=frozenset(*dataless))
        yield from self._held

    def view(self, segments: Mapping[str, nn.Module] | None = None) -> View:
        """Return all that was kept as the party's view."""
        return View(self.party, tuple(self.messages()), dict(segments or {}))

    def state(self) -> dict[str, Any]:
        """Flush to the folder and return what a resumed run needs to go on from here."""
        if self._folder is not None:
            self.flush()
            return {"digests": list(self._digests)}
        messages = [
            {
                "sender": m.sender,
                "kind": m.kind,
                "edge": m.edge,
                "tensors": dict(m.tensors),
                "stamp": list(m.stamp),
                "dataless": sorted(m.dataless),
            }
            for m in self._held
        ]
        return {"digests": [], "messages": messages}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`, removing files written after it."""
        self._held = [
            Message(
                *(m["sender"], self.party, m["kind"], m["edge"], m["tensors"], Stamp(*m["stamp"])),
                dataless=frozenset(m.get("dataless", ())),
            )
            for m in state.get("messages", ())
        ]
        self._held_bytes = sum(m.nbytes for m in self._held)
        self._digests, self._checked = list(state["digests"]), set()
        if self._folder is not None and self._folder.is_dir():
            for file in self._folder.glob("part-*.safetensors"):
                if int(file.stem.partition("-")[2]) >= len(self._digests):
                    file.unlink()

    def _file(self, part: int) -> Path:
        assert self._folder is not None
        return self._folder / f"part-{part:05d}.safetensors"


def _copy_shared_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory, which the file format refuses to hold twice."""
    addresses: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    return result


def copy_shared_gradients(message: Message, crossed: Collection[int]) -> Message:
    """Return `message` with copies of what shares memory with a gradient that arrived, whose addresses are `crossed`.

    A segment may pass a gradient on as it is; the next one may then add to it in place.
    """
    if all(t.untyped_storage().data_ptr() not in crossed for t in message.tensors.values()):
        return message
    return message.copy()
