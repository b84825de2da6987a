"""The link of the local engine: messages are counted, seen and handed over without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from splitfed.engines.base import FED
from splitfed.traffic import Traffic
from splitfed.view import Message, Recorder

Tap = Callable[[Message], Message]


class LocalLink:
    """Counts a message, lets its receiver's recorder see it, and hands it over."""

    def __init__(self, traffic: Traffic, recorders: Mapping[str, Recorder]) -> None:
        self.traffic = traffic
        self.recorders = dict(recorders)
        self.taps: dict[str, Tap] = {}
        self.listeners: dict[str, Callable[[Message], None]] = {}
        self.readers: dict[str, Tap] = {}

    def deliver(self, message: Message) -> Message:
        """Carry `message`; an adversary's tap may replace what its party sends, its reader what that party uses."""
        if not (self.taps or self.recorders or self.listeners or self.readers):
            self.traffic.count(message)
            return message
        tap = self.taps.get(message.sender)
        if tap is not None:
            message = tap(message)
        self.traffic.count(message)
        recorder = self.recorders.get(message.receiver)
        if recorder is not None:
            recorder.receive(message)
        listener = self.listeners.get(message.receiver)
        if listener is not None:
            listener(message)
        if message.sender == FED and FED in self.recorders:
            # What came back says little without what it was made from.
            self.recorders[FED].receive(message)
        reader = self.readers.get(message.receiver)
        return message if reader is None else reader(message)
