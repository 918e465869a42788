"""What compiled code did that no device would have to forgive, or that an executor does not know."""

from __future__ import annotations


class ExecutionError(Exception):
    """Base of every error of an executor."""


class OutsideAllocation(ExecutionError):
    """An access that is not wholly inside one allocation."""


class Misaligned(ExecutionError):
    """An access at an address that is no multiple of its alignment."""


class ConflictingStores(ExecutionError):
    """Two threads stored different values to one address in one instruction."""


class MissingLanes(ExecutionError):
    """A warp operation that some of its lanes did not take part in."""


class UnknownInstruction(ExecutionError):
    """An opcode, a modifier, an operand or a directive that the executor does not implement; the message names it."""
