"""The core: a training step and what it is made of; it knows no algorithm."""
