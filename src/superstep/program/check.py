"""check: the rules of every program, checked after each pass.

Each rank alone (``_Rank``): every unit's forward once for each microbatch, after its inputs; every backward once, after
its forward and its whole gradient, and where it has two halves, the weights' after the input's; none where nothing in
the unit and before it is trained; parameters resident where they are used; everything kept, received, fetched or
reduced is used by all who take it, and released once. A value's gradient is summed from its last reader to its first,
so that it has the same bits on every layout. All ranks together: sends and receives match on every channel in order, as
NCCL delivers them, and no rank waits forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from superstep.program import instructions as ins
from superstep.program.check_offload import check_offload
from superstep.program.instructions import Instruction, Keep, Program, Wire
from superstep.program.issue_order import Channel, InvalidProgram, issue_order
from superstep.program.needed_values import Value
from superstep.program.text import describe

LATER = -1
"""Stands for all readers on later pipeline ranks, whose summed gradient arrives by one receive."""


def check(program: Program) -> Program:
    """Return the program if it keeps every rule that its passes promise. Raises InvalidProgram: names the first rank
    and instruction that breaks a rule, and the rule.
    """
    _check_edges(program)
    kinds = {type(i) for instructions in program.ranks for i in instructions}
    for number, instructions in enumerate(program.ranks):
        state = _Rank(program, number, kinds)
        for at, instruction in enumerate(instructions):
            broken = state.run(instruction)
            if broken:
                raise InvalidProgram(f"rank {number}, instruction {at} ({describe(instruction)}): {broken}")
        broken = state.end()
        if broken:
            raise InvalidProgram(f"rank {number}, at the end: {broken}")
    check_offload(program)
    if "transfers" in program.passes:
        _check_channels(program)
        deque(issue_order(program), maxlen=0)
    if len({sum(isinstance(i, ins.ReducePartial) for i in r) for r in program.ranks}) > 1:
        raise InvalidProgram("reduce-partial must run equally often on every rank")
    return program


class _Rank:
    """One rank, run symbolically."""

    def __init__(self, program: Program, number: int, kinds: set[type[Instruction]]) -> None:
        self.program = program
        self.own = program.list_by_microbatch(lambda m: frozenset(program.list_units_at(number, m)))
        self.held = set(program.list_held_units(number))
        self.has_transfers = "transfers" in program.passes
        # Who reduces for ZeRO has shards, and must fetch: the only fetch may be the instruction that is missing.
        has_reductions = bool(kinds & {ins.Reduce, ins.ReduceRows})
        is_cut = program.shards_optimizer and has_reductions
        self.is_fetched = ins.Fetch in kinds or (is_cut and "fetch" in program.passes)
        self.is_reduced = has_reductions
        self.is_replicated = ins.ReduceReplicas in kinds
        self.is_training = bool(kinds & {ins.Backward, ins.BackwardInput})
        self.taken, self.gradient_values = program.taken, program.gradient_values
        self.uses = program.count_uses(number)
        has = self.has_transfers
        self.readers = program.list_by_microbatch(lambda m: _list_readers(program, number, m, has_transfers=has))
        self.left: dict[Value, int] = {}
        self.summed: dict[Value, list[int]] = {}
        self.forwarded: set[tuple[int, int]] = set()
        self.backwarded: set[tuple[int, int]] = set()
        self.kept: dict[tuple[int, int], Keep] = {}
        self.deferred: set[tuple[int, int]] = set()
        self.resident: set[int] = set()
        self.dirty: set[int] = set()
        self.reducing: set[int] = set()
        self.tied: set[int] = set()
        self.replicated: set[int] = set()
        self.final: set[int] = set()
        self.copied: set[int] = set()
        self.is_stepped = False

    def run(self, i: Instruction) -> str:  # noqa: C901 - one case for each instruction
        """Advance over one instruction; returns the broken rule, or nothing."""
        if self.is_stepped:
            return "nothing may follow the step"
        match i:
            case ins.Forward(unit, m, keep):
                return self._forward(unit, m, keep)
            case ins.Recompute(unit, m):
                return self._recompute(unit, m)
            case ins.Backward(unit, m) | ins.BackwardInput(unit, m):
                return self._backward(unit, m) or self._weights(unit, m, is_later=isinstance(i, ins.BackwardInput))
            case ins.BackwardWeight(unit, m):
                return self._backward_weight(unit, m)
            case ins.Send(wire, value, m, _):
                return self._send(wire, value, m)
            case ins.Recv(wire, value, m, _):
                return self._receive(wire, value, m)
            case ins.Fetch(unit) | ins.Free(unit):
                return self._residency(unit, is_fetch=isinstance(i, ins.Fetch))
            case ins.Reduce() | ins.Settle() | ins.ReduceReplicas() | ins.Tie():
                return self._sum(i)
            case ins.Snapshot(unit):
                return self._snapshot(unit)
            case ins.Offload() | ins.Reload():
                return ""  # see ``check_offload``
            case ins.ReducePartial() | ins.Step():
                self.final |= self.held
                self.is_stepped = isinstance(i, ins.Step)
                return "gradients are still being reduced" if self.reducing else ""

    def end(self) -> str:
        """The rule broken by what is left over, or nothing."""
        return next(self._list_left_over(), "")

    def _list_left_over(self) -> Iterator[str]:
        passes = self.program.passes
        needed = self.program.needed
        expected = {(u, m) for m, own in enumerate(self.own) for u in own if u in needed}
        yield from (f"u{u} has no forward for m{m}" for u, m in sorted(expected - self.forwarded))
        if self.is_training:
            backward = {(u, m) for u, m in expected if u + 1 in self.gradient_values}
            yield from (f"u{u} has no backward for m{m}" for u, m in sorted(backward - self.backwarded))
        yield from (f"what u{u} kept of m{m} is never freed" for u, m in sorted(self.kept))
        yield from (f"u{u} has no backward-weight for m{m}" for u, m in sorted(self.deferred))
        if self.has_transfers:
            unused = sorted([*self.left, *self.summed])
            yield from (f"{w} u{u} m{m} is computed or received and never used" for w, u, m in unused)
        if self.program.shards_parameters:
            yield from (f"u{u} is fetched and never freed" for u in sorted(self.resident))
        yield from (f"u{u} is reduced and never settled" for u in sorted(self.reducing))
        if "reductions" in passes and self.is_reduced:
            yield from (f"the gradient of u{u} is never reduced" for u in sorted(self.dirty))
        if "reductions" in passes and self.is_replicated:
            missing = sorted(self.held - self.replicated - set(self.program.frozen))
            yield from (f"the gradient of u{u} is never summed over replicas" for u in missing)
        if "reductions" in passes and self.is_training:
            held = self.held - set(self.program.frozen)
            shared = {u for u in held if len(self.program.holders(u)) > 1}
            yield from (f"the gradient of u{u} is never tied" for u in sorted(shared - self.tied))
        if "snapshot" in passes:
            missing = sorted(self.held - self.copied - set(self.program.fixed))
            yield from (f"the state of u{u} is never copied" for u in missing)
        if "step" in passes and not self.is_stepped:
            yield "the step is missing"

    def _use(self, value: Value) -> bool:
        """Count one use of an output that is here, and forget it after the last. False if it is not here."""
        if value not in self.left:
            return False
        self.left[value] -= 1
        if not self.left[value]:
            del self.left[value]
        return True

    def _send(self, wire: Wire, value: int, m: int) -> str:
        is_there = self._use((wire, value, m)) if wire == "act" else self._take_gradient(value, m)
        return "" if is_there else "what is sent must have been computed, and is sent once"

    def _add_gradient(self, value: int, m: int, reader: int) -> str:
        """Note that a reader has added its gradient of a value. Returns the broken rule, or nothing."""
        parts = self.summed.setdefault(("grad", value, m), [])
        parts.append(reader)
        is_next = parts == self.readers[m][value][: len(parts)]
        return "" if is_next else f"the gradient of value u{value} is summed from its last reader to its first"

    def _take_gradient(self, value: int, m: int) -> bool:
        """Forget a value's gradient, which is used once. False if a reader has not added to it."""
        return self.summed.pop(("grad", value, m), []) == self.readers[m].get(value, [])

    def _describe_pass(self, unit: int, m: int) -> str:
        if not 0 <= m < self.program.microbatches:
            return f"the step has {self.program.microbatches} microbatches"
        return "" if unit in self.own[m] else self._describe_other(unit, m)

    def _describe_other(self, unit: int, m: int) -> str:
        if not self.program.encoding or unit not in self.program.stages[0]:
            return "the unit lives on another rank"
        return f"rank {self.program.encoding[m]} encodes m{m}"

    def _unit(self, unit: int, m: int) -> str:
        if broken := self._describe_pass(unit, m):
            return broken
        fixed = () if self.program.shards_parameters else self.program.fixed
        read = set(self.program.params[unit]) - set(fixed)
        if self.is_fetched and not read <= self.resident:
            return "the unit's parameters are not resident"
        return ""

    def _forward(self, unit: int, m: int, keep: Keep) -> str:
        if broken := self._unit(unit, m):
            return broken
        if (unit, m) in self.forwarded:
            return "the unit has already seen this microbatch"
        needed = [value for value in self.taken[unit] if self.has_transfers or value - 1 in self.own[m]]
        is_there = [self._use(("act", value, m)) for value in needed]
        if not all(is_there):
            return "the unit's input is not there"
        self.forwarded.add((unit, m))
        if keep != "nothing":
            self.kept[unit, m] = keep
        if unit + 1 in self.uses[m]:
            self.left["act", unit + 1, m] = self.uses[m][unit + 1]
        return ""

    def _recompute(self, unit: int, m: int) -> str:
        if broken := self._unit(unit, m):
            return broken
        if self.kept.get((unit, m)) != "input":
            return "only a unit that kept its input alone is computed again"
        self.kept[unit, m] = "all"
        return ""

    def _backward(self, unit: int, m: int) -> str:
        if broken := self._unit(unit, m):
            return broken
        enough = ("all", "selective") if "recompute" in self.program.passes else ("all", "selective", "input")
        if self.kept.get((unit, m)) not in enough:
            return "the unit kept nothing to go back through"
        if unit + 1 not in self.gradient_values:
            return "nothing in the unit and before it is trained"
        if not self._take_gradient(unit + 1, m):
            return "the gradient of the unit's output is not there"
        del self.kept[unit, m]
        self.backwarded.add((unit, m))
        taken = [value for value in self.taken[unit] if value in self.gradient_values]
        return next(filter(None, [self._add_gradient(value, m, unit) for value in taken]), "")

    def _backward_weight(self, unit: int, m: int) -> str:
        if broken := self._describe_pass(unit, m):
            return broken
        if (unit, m) not in self.deferred:
            return "a backward-weight comes once, after its backward-input"
        self.deferred.discard((unit, m))
        return self._weights(unit, m, is_later=False)

    def _weights(self, unit: int, m: int, *, is_later: bool) -> str:
        """The parameters' gradients: deferred, or added to their buffers."""
        if is_later:
            self.deferred.add((unit, m))
            return ""
        params = set(self.program.list_trained(unit))
        if busy := self.reducing & params:
            return f"the gradient of u{min(busy)} is being reduced"
        if done := self.final & params:
            return f"the gradient of u{min(done)} was already summed over ranks, as only a final one may be"
        self.dirty |= params
        return ""

    def _receive(self, wire: Wire, value: int, m: int) -> str:
        if wire == "act":
            if (wire, value, m) in self.left:
                return "received twice"
            if value - 1 in self.own[m] or value not in self.uses[m]:
                return "the rank has no use for it"
            self.left[wire, value, m] = self.uses[m][value]
            return ""
        if LATER in self.summed.get((wire, value, m), []):
            return "received twice"
        if LATER not in self.readers[m].get(value, []):
            return "the rank has no use for it"
        return self._add_gradient(value, m, LATER)

    def _residency(self, unit: int, *, is_fetch: bool) -> str:
        if unit not in self.held:
            return "the unit lives on another rank"
        if is_fetch == (unit in self.resident):
            return "the unit is already resident" if is_fetch else "the unit is not resident"
        self.resident ^= {unit}
        return ""

    def _sum(self, i: ins.Reduce | ins.Settle | ins.ReduceReplicas | ins.Tie) -> str:
        match i:
            case ins.Reduce(unit) | ins.Settle(unit):
                if isinstance(i, ins.Reduce) and isinstance(i, ins.ReduceRows) != (unit in self.program.sparse):
                    return "the rows of sparse tables are reduced by reduce-rows, and nothing else is"
                return self._reduction(unit, is_start=isinstance(i, ins.Reduce))
            case ins.ReduceReplicas(unit):
                return self._replicas(unit)
            case ins.Tie(unit):
                return self._tie(unit)

    def _reduction(self, unit: int, *, is_start: bool) -> str:
        if is_start:
            if unit not in self.dirty:
                return "the unit has no gradient to reduce"
            self.dirty.discard(unit)
            self.reducing.add(unit)
            return ""
        if unit not in self.reducing:
            return "the unit is not being reduced"
        self.reducing.discard(unit)
        if not self.program.shards_gradients:
            self.final.add(unit)
        return ""

    def _replicas(self, unit: int) -> str:
        if unit not in self.held:
            return "the unit lives on another rank"
        if unit in self.reducing or unit in self.dirty or unit in self.replicated:
            return "the unit's gradient must be settled first, and is summed over replicas once"
        if unit in self.tied:
            return "what is tied must have been summed over replicas on every pipeline rank"
        self.replicated.add(unit)
        self.final.add(unit)
        return ""

    def _snapshot(self, unit: int) -> str:
        """Only the step changes what a copy reads, and nothing may follow the step: so a copy may overlap the rest."""
        if unit not in self.held or unit in self.program.fixed:
            return "the rank trains nothing of the unit"
        if unit in self.copied:
            return "the unit's state is copied once"
        self.copied.add(unit)
        return ""

    def _tie(self, unit: int) -> str:
        if len(self.program.holders(unit)) < 2 or unit not in self.held:
            return "the unit's parameters are not shared between pipeline ranks"
        if unit in self.reducing or unit in self.tied or (unit in self.dirty and self.is_reduced):
            return "the unit's gradient must be settled first, and is tied once"
        self.tied.add(unit)
        self.final.add(unit)
        return ""


def _check_edges(program: Program) -> None:
    """Units come after those whose outputs they take, and every output that is computed, but the last, is taken."""
    taken = program.taken
    if len(taken) != len(program.units):
        raise InvalidProgram(f"{len(taken)} units have inputs, and the program has {len(program.units)}")
    for unit, values in enumerate(taken):
        if any(not 0 < value <= unit for value in values) or len(set(values)) < len(values):
            raise InvalidProgram(f"u{unit} takes {list(program.inputs[unit])}: only units before it, each once")
    computed = {i.unit for instructions in program.ranks for i in instructions if isinstance(i, ins.Forward)}
    if unread := computed - program.needed:
        raise InvalidProgram(f"nothing that leads to the loss takes what u{min(unread)} returns")


def _list_readers(program: Program, rank: int, m: int, *, has_transfers: bool) -> dict[int, list[int]]:
    """For each value of a microbatch the parts of its gradient on a rank, in the order of the sum: what later ranks
    send, and the rank's own units that take it.
    """
    readers: dict[int, list[int]] = {}
    taken, returning, gradient_values = program.taken, program.returning, program.gradient_values
    for stage in reversed(program.stages_at(rank, m)):
        is_received = has_transfers and program.is_elsewhere(stage + 1, m, rank)
        for value in returning[stage + 1] if is_received else ():
            readers.setdefault(value, []).append(LATER)
        for unit in reversed(program.stages[stage]):
            for value in taken[unit]:
                if value in gradient_values:
                    readers.setdefault(value, []).append(unit)
    return readers


def _check_channels(program: Program) -> None:
    """A channel (from, to, wire) delivers in order, so both ends must list the same values in the same order."""
    sent: dict[Channel, list[ins.Send]] = {}
    received: dict[Channel, list[ins.Recv]] = {}
    for number, instructions in enumerate(program.ranks):
        for i in instructions:
            if isinstance(i, ins.Send):
                sent.setdefault((number, i.peer, i.wire), []).append(i)
            elif isinstance(i, ins.Recv):
                received.setdefault((i.peer, number, i.wire), []).append(i)
    for channel in sorted(sent.keys() | received.keys()):
        out = [(s.unit, s.microbatch) for s in sent.get(channel, [])]
        into = [(r.unit, r.microbatch) for r in received.get(channel, [])]
        if out != into:
            at = next(
                (k for k, (a, b) in enumerate(zip(out, into, strict=False)) if a != b),
                min(len(out), len(into)),
            )
            ends = ["nothing" if at >= len(end) else f"u{end[at][0]} m{end[at][1]}" for end in (out, into)]
            source, target, wire = channel
            raise InvalidProgram(
                f"channel {wire} from rank {source} to rank {target}: number {at} is sent as {ends[0]} and "
                f"received as {ends[1]}"
            )
