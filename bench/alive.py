"""What is alive of a step's tensors after each of its instructions, in the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from superstep.comm.collectives import PendingCollective
from superstep.engine.engine import Engine
from superstep.engine.instruction_timer import TimedInstruction
from superstep.engine.tracing.operation_trace import TracedOperations
from superstep.engine.values.microbatch import Microbatch
from superstep.program.instructions import Instruction


class Born(TorchDispatchMode):
    """Notes the memory that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = TracedOperations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.noted.born(out)
        return out


class Watch:
    """Takes the place of an executor's recorder: after each instruction it notes what is alive.

    Attributes:
        alive: bytes of tensors that the step made, without the engine's own buffers.
        transient: of those buffers, what comes and goes.
    """

    def __init__(self, noted: TracedOperations, engine: Engine, mine: Sequence[Microbatch]) -> None:
        self.noted, self.engine, self.mine = noted, engine, mine
        self.alive: list[int] = []
        self.transient: list[int] = []

    @property
    def issued(self) -> int:
        """Instructions so far."""
        return len(self.alive)

    def begin(self) -> None:
        """Nothing."""

    def end(self, instruction: Instruction, under_way: PendingCollective | None) -> None:
        """Note it."""
        every = [b for each in self.engine.buffers.values() for b in each]
        own = [t for b in every for t in (b.full, b.gradient, b.gradient_shard, b.reduced, *b.state)]
        own += [t for m in self.mine for t in (*m.fields.values(), m.targets)]
        self.alive.append(self.noted.alive_bytes(but=own))
        self.transient.append(self.engine.bytes().transient)

    def ran(self) -> list[TimedInstruction]:
        """Times are nobody's business here."""
        return []
