"""Federated methods: how clients learn from each other beside what the schedule does; one a file."""

from splitfed.federated.base import Learner, Method, Seat
from splitfed.federated.fedproto import FedProto

__all__ = ["FedProto", "Learner", "Method", "Seat"]
