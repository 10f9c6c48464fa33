"""Planted faults: each breaks one rule of a valid program, and ``check`` must name it."""

# ruff: noqa: E501 - one fault a line

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import examples, plan_of, plans
from superstep.plan.config import LoraConfig
from superstep.program.check import InvalidProgram, check
from superstep.program.compile import compile_step
from superstep.program.instructions import Fetch, Free, Program, ReducePartial
from superstep.program.text import describe, read_instruction

PROGRAMS: dict[str, Program] = {
    name: compile_step(plan)
    for name, plan in {
        "pipeline": plan_of(pp=2, layers=2, microbatches=2),
        "replicated": plan_of(layers=1, microbatches=2, dp=2),
        "replicas": plan_of(pp=2, layers=2, microbatches=2, dp=4, replicas=2, zero=1, tied=True),
        "replicas 3": plan_of(layers=2, microbatches=2, dp=4, replicas=2, zero=3),
        "zero 1": plan_of(layers=1, microbatches=2, dp=2, zero=1),
        "zero 3": plan_of(layers=2, microbatches=2, dp=2, zero=3),
        "recompute": plan_of(layers=1, microbatches=2, recompute="full"),
        "tied": plan_of(pp=2, layers=2, microbatches=2, dp=2, zero=1, tied=True),
        "tied alone": plan_of(pp=2, layers=2, microbatches=2, tied=True),
        "zero bubble": plan_of(pp=2, layers=2, microbatches=2, dp=2, schedule="zb-h1"),
        "zero bubble 3": plan_of(layers=2, microbatches=2, dp=2, zero=3, schedule="zb-h1"),
        "snapshots": plan_of(pp=2, layers=2, microbatches=2, tied=True, snapshot_every=1),
        "tensor parallel": plan_of(pp=2, tp=2, layers=2, microbatches=2),
    }.items()
}

Edit = Callable[[list[str], int], None]


def drop(lines: list[str], at: int) -> None:
    del lines[at]


def twice(lines: list[str], at: int) -> None:
    lines.insert(at, lines[at])


def to(text: str) -> Edit:
    """Put another instruction in its place."""

    def edit(lines: list[str], at: int) -> None:
        lines[at] = text

    return edit


def swap_with(other: str) -> Edit:
    def edit(lines: list[str], at: int) -> None:
        there = lines.index(other)
        lines[at], lines[there] = lines[there], lines[at]

    return edit


def move_before(other: str) -> Edit:
    def edit(lines: list[str], at: int) -> None:
        line = lines.pop(at)
        lines.insert(lines.index(other), line)

    return edit


def move_behind(other: str) -> Edit:
    def edit(lines: list[str], at: int) -> None:
        line = lines.pop(at)
        lines.insert(lines.index(other) + 1, line)

    return edit


def mutate(program: Program, rank: int, text: str, edit: Edit) -> Program:
    """The program with one edit at the first instruction that reads ``text``."""
    lines = [describe(i) for i in program.ranks[rank]]
    edit(lines, lines.index(text))
    ranks = list(program.ranks)
    ranks[rank] = tuple(map(read_instruction, lines))
    return replace(program, ranks=tuple(ranks))


# what is wrong, program, rank, the instruction, what happens to it, the rule that check must name
FAULTS: list[tuple[str, str, int, str, Edit, str]] = [
    ("a forward is lost", "pipeline", 1, "forward u3 m1 keep=all", drop, "kept nothing to go back through"),
    ("a forward runs twice", "pipeline", 0, "forward u0 m1 keep=all", twice, "already seen this microbatch"),
    ("a backward is lost", "pipeline", 0, "backward u0 m1", drop, "u0 has no backward for m1"),
    ("backward before forward", "pipeline", 0, "forward u1 m0 keep=all", swap_with("backward u1 m0"), "kept nothing"),
    ("units in the wrong order", "pipeline", 1, "forward u2 m0 keep=all", swap_with("forward u3 m0 keep=all"), "input"),
    ("backward skips a unit", "pipeline", 1, "backward u3 m0", swap_with("backward u2 m0"), "gradient of the unit's output"),
    ("a unit of another rank", "pipeline", 0, "forward u1 m1 keep=all", to("forward u2 m1 keep=all"), "another rank"),
    ("a microbatch too many", "pipeline", 0, "forward u0 m1 keep=all", to("forward u0 m2 keep=all"), "has 2 microbatches"),
    ("nothing is kept", "pipeline", 0, "forward u1 m1 keep=all", to("forward u1 m1 keep=nothing"), "kept nothing"),
    ("a copy is lost", "snapshots", 0, "snapshot u1", drop, "the state of u1 is never copied"),
    ("a copy twice", "snapshots", 1, "snapshot u3", twice, "copied once"),
    ("a copy of another rank's", "snapshots", 0, "snapshot u1", to("snapshot u2"), "trains nothing of the unit"),
    ("a copy after the step", "snapshots", 1, "snapshot u2", move_behind("step"), "nothing may follow the step"),
    ("a send is lost", "pipeline", 0, "send act u2 m1 to 1", drop, "act u2 m1 is computed or received and never used"),
    ("a send twice", "pipeline", 0, "send act u2 m1 to 1", twice, "is sent once"),
    ("sent before it is computed", "pipeline", 0, "send act u2 m0 to 1", move_before("forward u0 m0 keep=all"), "must have been computed"),
    ("a send to the wrong peer", "pipeline", 0, "send act u2 m1 to 1", to("send act u2 m1 to 0"), "channel act from rank 0 to rank 0"),
    ("a receive from the wrong peer", "pipeline", 1, "recv act u2 m1 from 0", to("recv act u2 m1 from 1"), "channel act from rank 0 to rank 1: number 1 is sent as u2 m1 and received as nothing"),
    ("a receive is lost", "pipeline", 1, "recv act u2 m1 from 0", drop, "the unit's input is not there"),
    ("a receive twice", "pipeline", 1, "recv act u2 m1 from 0", twice, "received twice"),
    ("a receive nobody needs", "pipeline", 1, "recv act u2 m1 from 0", to("recv act u1 m1 from 0"), "no use for it"),
    ("receives in the other order", "pipeline", 1, "recv act u2 m0 from 0", swap_with("recv act u2 m1 from 0"), "input is not there"),
    ("a receive too late", "pipeline", 0, "recv grad u2 m0 from 1", move_before("step"), "gradient of the unit's output is not there"),
    ("fetched twice", "zero 3", 0, "fetch u1", twice, "already resident"),
    ("never fetched", "zero 1", 0, "fetch u2", drop, "not resident"),
    ("fetched after its use", "zero 3", 0, "fetch u0", swap_with("forward u0 m0 keep=all"), "not resident"),
    ("never freed", "zero 3", 0, "free u3", drop, "already resident"),
    ("freed before its use", "zero 3", 0, "free u0", move_before("forward u0 m0 keep=all"), "not resident"),
    ("freed twice", "zero 3", 0, "free u0", twice, "not resident"),
    ("a foreign unit is fetched", "tied", 0, "fetch u1", to("fetch u2"), "another rank"),
    ("never reduced", "zero 1", 0, "reduce u1", drop, "not being reduced"),
    ("neither reduced nor settled", "replicated", 0, "reduce u0", lambda lines, at: [lines.remove(x) for x in ("reduce u0", "settle u0")], "gradient of u0 is never reduced"),
    ("reduced twice", "zero 1", 0, "reduce u1", twice, "no gradient to reduce"),
    ("reduced too early", "zero 1", 0, "reduce u2", move_before("backward u2 m1"), "is being reduced"),
    ("reduced and settled too early", "replicated", 0, "backward u2 m1", lambda lines, at: lines.__setitem__(slice(at, at), ["reduce u2", "settle u2"]), "already summed over ranks"),
    ("never settled", "zero 1", 0, "settle u1", drop, "still being reduced"),
    ("settled twice", "zero 1", 0, "settle u1", twice, "not being reduced"),
    ("settled after the next backward", "zero 3", 0, "settle u0", move_behind("backward u0 m1"), "gradient of u0 is being reduced"),
    ("not computed again", "recompute", 0, "recompute u1 m0", drop, "kept nothing to go back through"),
    ("computed again twice", "recompute", 0, "recompute u1 m0", twice, "only a unit that kept its input"),
    ("computed again after its backward", "recompute", 0, "recompute u1 m0", swap_with("backward u1 m0"), "kept nothing"),
    ("not tied", "tied", 1, "tie u0", drop, "gradient of u0 is never tied"),
    ("tied twice", "tied", 1, "tie u0", twice, "tied once"),
    ("tied before it is settled", "tied", 1, "tie u0", swap_with("settle u0"), "must be settled first"),
    ("tied before its last backward", "tied alone", 0, "tie u0", move_before("backward u0 m1"), "already summed over ranks"),
    ("an unshared unit is tied", "tied", 0, "tie u0", to("tie u1"), "not shared between pipeline ranks"),
    ("the partial sums are lost on one rank", "tensor parallel", 1, "reduce-partial", drop, "reduce-partial must run equally often"),
    ("partial sums before the reduction ends", "tied", 0, "settle u0", lambda lines, at: lines.insert(at, "reduce-partial"), "still being reduced"),
    ("partial sums before the last backward", "tensor parallel", 0, "reduce-partial", move_before("backward u0 m1"), "already summed over ranks"),
    ("replicas are not summed", "replicas", 0, "reduce-replicas u1", drop, "gradient of u1 is never summed over replicas"),
    ("replicas are summed twice", "replicas", 0, "reduce-replicas u1", twice, "settled first, and is summed over replicas once"),
    ("replicas of another rank's unit", "replicas", 0, "reduce-replicas u1", to("reduce-replicas u2"), "another rank"),
    ("replicas before the unit is settled", "replicas", 0, "reduce-replicas u1", swap_with("settle u1"), "settled first"),
    ("replicas before the last backward", "replicas", 0, "reduce-replicas u1", move_before("backward u1 m1"), "settled first"),
    ("replicas between two settlings", "replicas 3", 0, "reduce-replicas u1", move_behind("settle u1"), "already summed over ranks"),
    ("replicas while they are reduced again", "replicas 3", 0, "reduce-replicas u0", move_before("settle u0"), "settled first"),
    ("replicas after the unit is tied", "replicas", 0, "reduce-replicas u0", move_behind("tie u0"), "tied must have been summed over replicas"),
    ("replicas after the norm", "replicas", 0, "reduce-replicas u1", move_behind("step"), "nothing may follow the step"),
    ("weights' gradients are lost", "zero bubble", 0, "backward-weight u1 m0", drop, "u1 has no backward-weight for m0"),
    ("weights' gradients twice", "zero bubble", 0, "backward-weight u1 m0", twice, "comes once, after its backward-input"),
    ("weights before inputs", "zero bubble", 0, "backward-weight u1 m0", swap_with("backward-input u1 m0"), "after its backward-input"),
    ("weights of the other microbatch", "zero bubble", 1, "backward-weight u2 m0", to("backward-weight u2 m1"), "after its backward-input"),
    ("weights of another rank", "zero bubble", 0, "backward-weight u1 m0", to("backward-weight u2 m0"), "another rank"),
    ("inputs are lost", "zero bubble", 1, "backward-input u3 m0", drop, "gradient of the unit's output is not there"),
    ("inputs twice", "zero bubble", 1, "backward-input u3 m0", twice, "kept nothing to go back through"),
    ("inputs skip a unit", "zero bubble", 1, "backward-input u3 m0", swap_with("backward-input u2 m0"), "gradient of the unit's output"),
    ("a whole backward after its half", "zero bubble", 1, "backward-weight u3 m0", to("backward u3 m0"), "kept nothing to go back through"),
    ("reduced before the last weights", "zero bubble", 0, "reduce u1", move_before("backward-weight u1 m1"), "is being reduced"),
    ("weights while they are reduced", "zero bubble 3", 0, "settle u2", move_behind("backward-weight u2 m1"), "gradient of u2 is being reduced"),
    ("inputs without parameters", "zero bubble 3", 0, "free u2", move_before("backward-input u2 m0"), "not resident"),
    ("no step", "pipeline", 0, "step", drop, "the step is missing"),
    ("something after the step", "pipeline", 0, "step", twice, "nothing may follow the step"),
]  # fmt: skip


def test_the_programs_are_valid_without_their_faults():
    for program in PROGRAMS.values():
        check(program)


@pytest.mark.parametrize(("name", "rank", "text", "edit", "rule"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_check_refuses(name, rank, text, edit, rule):
    with pytest.raises(InvalidProgram, match=rule):
        check(mutate(PROGRAMS[name], rank, text, edit))


def test_a_fault_is_told_with_rank_place_and_instruction():
    faulty = mutate(PROGRAMS["pipeline"], 0, "backward u0 m0", drop)
    with pytest.raises(InvalidProgram, match=r"^rank 0, at the end: u0 has no backward for m0$"):
        check(faulty)
    faulty = mutate(PROGRAMS["pipeline"], 1, "forward u2 m0 keep=all", twice)
    with pytest.raises(InvalidProgram, match=r"^rank 1, instruction \d+ \(forward u2 m0 keep=all\): the unit has"):
        check(faulty)


def test_crossed_waits_are_a_deadlock():
    """Each rank waits for what the other sends only afterwards."""
    program = PROGRAMS["pipeline"]
    faulty = mutate(program, 1, "forward u2 m1 keep=all", move_before("backward u3 m0"))
    faulty = mutate(faulty, 1, "forward u3 m1 keep=all", move_before("backward u3 m0"))
    check(faulty)  # one microbatch more in flight is slow, not wrong
    faulty = mutate(faulty, 0, "forward u0 m1 keep=all", move_before("step"))
    faulty = mutate(faulty, 0, "forward u1 m1 keep=all", move_before("step"))
    faulty = mutate(faulty, 0, "send act u2 m1 to 1", move_before("step"))
    faulty = mutate(faulty, 0, "backward u1 m1", move_before("step"))
    faulty = mutate(faulty, 0, "backward u0 m1", move_before("step"))
    with pytest.raises(
        InvalidProgram,
        match=r"deadlock: rank 0 waits for grad u2 m0 at .* \(backward u1 m0\); rank 1 waits for act u2 m1",
    ):
        check(faulty)


@examples(40)
@given(plans(), st.data())
def test_no_instruction_of_any_program_can_be_dropped(plan, data):
    program = compile_step(plan)
    rank = data.draw(st.integers(0, plan.mesh.pp - 1))
    at = data.draw(st.integers(0, len(program.ranks[rank]) - 1))
    instructions = program.ranks[rank]
    # With one pipeline rank nothing tells the program whether tp > 1.
    if isinstance(instructions[at], ReducePartial) and plan.mesh.pp == 1:
        return
    faulty = list(program.ranks)
    faulty[rank] = instructions[:at] + instructions[at + 1 :]
    with pytest.raises(InvalidProgram):
        check(replace(program, ranks=tuple(faulty)))


def test_the_only_fetch_of_a_program_can_not_be_dropped():
    """Adapters beside one block: nothing else is trained, and so nothing else is stale."""
    program = compile_step(plan_of(layers=1, microbatches=1, dp=2, zero=1, lora=LoraConfig()))
    (rank,) = program.ranks
    assert [type(i) for i in rank].count(Fetch) == 1
    faulty = tuple(i for i in rank if not isinstance(i, Fetch))
    with pytest.raises(InvalidProgram, match="not resident"):
        check(replace(program, ranks=(faulty,)))


@examples(40)
@given(plans(), st.data())
def test_no_instruction_of_any_program_can_run_twice(plan, data):
    program = compile_step(plan)
    rank = data.draw(st.integers(0, plan.mesh.pp - 1))
    at = data.draw(st.integers(0, len(program.ranks[rank]) - 1))
    instructions = program.ranks[rank]
    if isinstance(instructions[at], ReducePartial) and plan.mesh.pp == 1:
        return
    assert not isinstance(instructions[at], Free) or plan.zero == 3
    faulty = list(program.ranks)
    faulty[rank] = (*instructions[: at + 1], *instructions[at:])
    with pytest.raises(InvalidProgram):
        check(replace(program, ranks=tuple(faulty)))
