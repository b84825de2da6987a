"""The link of the local engine: messages are counted, seen and handed over, each in memory of its own.

A tensor that fills its storage is handed over as it is, since a copy costs as much as the rest of a cut; any other is
copied, so that nobody can read more of it than was sent. Who is no party (an adversary, a recorder) gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from splitfed.core.messages import Message, Recorder
from splitfed.core.payload import all_own
from splitfed.core.traffic import Traffic
from splitfed.engines.base import FED

Tap = Callable[[Message], Message]


class LocalLink:
    """Counts a message, lets its receiver's recorder see it, and hands it over."""

    def __init__(self, traffic: Traffic, recorders: Mapping[str, Recorder]) -> None:
        self.traffic = traffic
        self.recorders = dict(recorders)
        # Those that record for the length of a block.
        self.watched: dict[str, Recorder] = {}
        self.taps: dict[str, Tap] = {}
        self.listeners: dict[str, Callable[[Message], None]] = {}
        self.readers: dict[str, Tap] = {}

    def deliver(self, message: Message) -> Message:
        """Carry `message`; an adversary's tap may replace what its party sends, its reader what that party uses."""
        if not all_own(message.tensors.values()):
            message = message.in_own_memory()
        if not (self.taps or self.recorders or self.listeners or self.readers):
            self.traffic.count(message)
            return self.carry(message)
        tap = self.taps.get(message.sender)
        if tap is not None:
            # Nothing is known of what it returns, so that it is copied whatever it looks like.
            message = tap(message.copy()).copy().in_own_memory()
        self.traffic.count(message)
        message = self.carry(message)
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
