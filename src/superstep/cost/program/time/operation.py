"""Operations of a unit in one pass, as the framework issues them, one value for each kind of kernel and size.

    Product    [rows, inner] · [inner, width], of which ``batch`` at once      2 · batch · rows · inner · width FLOPs
    Attention  queries against keys, all heads                                 4 · B · N · Sq · Sk · H, backward twice
    Pass       everything else that reads or writes memory, views included     none counted
    Message    a collective in the midst of a unit                             none

Attention counts the full square, causal or not (the convention of ``cost.program.flops``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from superstep.hardware.cluster import Collective

Axis: TypeAlias = Literal["shards", "replicas", "cp", "tp", "ep", "sequence", "pp", "tie", "world"]
"""What a message goes over: a mesh axis, or a group of ranks (shards and replicas of parameters, the pipeline ranks of
a tied table, the cp and tp ranks of one sequence, all).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulOperation:
    """Matrix products of one shape.

    Attributes:
        kernel: product; or gradient, of a weight: the left factor is transposed, and the result is added; or batch, of
            many
        narrow ones.
    """

    rows: int
    width: int
    inner: int
    batch: int = 1
    kernel: Literal["product", "gradient", "batch"] = "product"
    count: int = 1

    @property
    def flops(self) -> int:
        """Of all of them."""
        return 2 * self.count * self.batch * self.rows * self.width * self.inner

    @property
    def numel(self) -> int:
        """Numbers that one of them reads and writes."""
        return self.batch * (self.rows * self.inner + self.inner * self.width + self.rows * self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOperation:
    """Fused attention, ``heads`` heads of all sequences of a microbatch; a causal kernel skips the masked half."""

    heads: int
    queries: int
    keys: int
    head_dim: int
    is_backward: bool = False
    is_causal: bool = True
    count: int = 1

    @property
    def flops(self) -> int:
        """Of the full square; the backward pass twice that."""
        square = 4 * self.count * self.heads * self.queries * self.keys * self.head_dim
        return 2 * square if self.is_backward else square


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOperation:
    """Reads and writes of whole tensors by one kernel.

    Attributes:
        kernel: its kind, which decides its rate; ``hardware.chip.CopyRate`` has the same words.
        bytes: read and written by one of them; 0 for a view, which costs only its launch.
        product_flops: of one of them, for a product so narrow that memory decides its time.
    """

    kernel: str
    bytes: int
    product_flops: int = 0
    count: int = 1

    @property
    def flops(self) -> int:
        return self.count * self.product_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOperation:
    """A collective, with the bytes of ``hardware.cluster.CollectiveRate``: those of the whole tensor on one rank."""

    collective: Collective
    axis: Axis
    bytes: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 0


Operation: TypeAlias = MatmulOperation | AttentionOperation | MemoryOperation | CollectiveOperation
Operations: TypeAlias = tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOperations:
    """One unit on one microbatch, on one rank.

    Attributes:
        forward: the forward pass, under the plan's recompute policy.
        backward: the whole backward pass, with selective recomputation.
        weight: the part of BackwardWeight.
        again: what selective recomputation computes again; () if not known.
        input_bytes: of the unit's inputs, without fields of samples.
        kept_bytes: kept for the backward pass, with the input; 0 if not traced.
        peak_bytes: the most that the forward holds of its results; 0 if not traced.
        between_bytes: kept between BackwardInput and BackwardWeight; 0 if not traced.
        backward_peak_bytes: how far the backward pass grows beyond what was kept and its input's gradient; 0 if not
            traced.
        output_bytes: of what it returns; None: as many as the next unit's inputs.
    """

    forward: Operations
    backward: Operations
    weight: Operations
    input_bytes: int
    again: Operations = ()
    kept_bytes: int = 0
    peak_bytes: int = 0
    between_bytes: int = 0
    backward_peak_bytes: int = 0
    output_bytes: int | None = None


def count_value_bytes(units: Sequence[UnitOperations], value: int) -> int:
    """Bytes of a value, which is the output of unit ``value - 1``; value 0 is the input of the first unit."""
    returned = units[value - 1].output_bytes if value else None
    return units[value].input_bytes if returned is None else returned


def collect(operations: Iterable[Operation]) -> Operations:
    """Equal operations as one with a count, in the order of their first."""
    counts: dict[Operation, int] = {}
    for operation in operations:
        one = replace(operation, count=1)
        counts[one] = counts.get(one, 0) + operation.count
    return tuple(replace(one, count=count) for one, count in counts.items())


def flops(operations: Operations) -> int:
    return sum(operation.flops for operation in operations)


def messages(operations: Operations) -> Iterator[CollectiveOperation]:
    return (operation for operation in operations if isinstance(operation, CollectiveOperation))
