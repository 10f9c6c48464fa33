"""First uses of channels: nothing hangs where they are made ahead, and what would hang where they are not is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from longer import longer
from plans import SCHEDULES, plan_of
from superstep.errors import ConfigError
from superstep.plan.resolution.resolve import Plan
from superstep.program.check import InvalidProgram
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import Program
from superstep.program.issue_order import issue_order
from superstep.program.p2p_setup import check_first_uses, routes, uses


def pipelines(schedule: str, most_stages: int) -> Iterator[Plan]:
    """Every plan of a schedule from (pp, m) = (2, 1) to (8, 12), with every number of chunks that it allows."""
    for pp in range(2, 9):
        for chunks in range(1, most_stages // pp + 1):
            for m in range(1, 13):
                for group in {None, pp} if m % pp == 0 and m > pp else {None}:
                    try:
                        yield plan_of(
                            layers=pp * chunks,
                            pp=pp,
                            microbatches=m,
                            schedule=schedule,
                            chunks=chunks,
                            microbatch_group=group,
                        )
                    except ConfigError:  # one that the schedule cannot have
                        continue


def hangs(program: Program) -> bool:
    """Whether first uses cross where channels are made by them."""
    try:
        check_first_uses(program, ())
    except InvalidProgram:
        return True
    return False


# Programs that would hang if channels were made at their first use, of all of so many stages at most: steps, then
# evaluations.
CROSSING = [
    ("gpipe", 16, (84, 0, 84)),
    ("1f1b", 16, (28, 0, 84)),
    ("interleaved", 12, (88, 0, 254)),
    ("breadth-first", 12, (254, 0, 254)),
    ("zb-h1", 16, (28, 0, 84)),
    ("zb-v", 16, (48, 84, 84)),
]
# Of the two that have most plans, those of more stages take as long as all others together.
MANY = [("interleaved", 16, (115, 0, 330)), ("breadth-first", 16, (330, 0, 330))]


def test_every_schedule_is_asked():
    assert [schedule for schedule, *_ in CROSSING] == list(SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "most_stages", "wanted"),
    [
        *longer(CROSSING, lambda case: case[0] in ("interleaved", "breadth-first")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in MANY),
    ],
)
def test_no_first_use_crosses_where_channels_are_made_ahead(schedule, most_stages, wanted):
    found: Counter[str] = Counter()
    for plan in pipelines(schedule, most_stages):
        step = compile_step(plan, is_each_pass_checked=False)
        evaluation = compile_evaluation(plan)
        ahead = routes(plan.placement)
        assert uses(step) == set(ahead) >= uses(evaluation)
        for kind, program in (("step", step), ("evaluation", evaluation)):
            check_first_uses(program, ahead)
            assert list(issue_order(program, made=ahead)) == list(issue_order(program))
            found[kind] += hangs(program)
        found["all"] += 1
    assert (found["step"], found["evaluation"], found["all"]) == wanted


def test_a_crossing_is_told_with_both_ends():
    program = compile_step(plan_of(pp=2, layers=2, microbatches=2, schedule="gpipe"))
    with pytest.raises(
        InvalidProgram,
        match=r"^deadlock: rank 0 waits for rank 1 at the first use of channel grad from rank 1 to rank 0, at "
        r"instruction 3 \(recv grad u2 m0 from 1\); rank 1 waits for act u2 m1 at instruction 4 ",
    ):
        check_first_uses(program, ())
    # The one that crosses is the one that has to be there.
    check_first_uses(program, [(1, 0, "grad")])
    with pytest.raises(InvalidProgram):
        check_first_uses(program, [(0, 1, "act")])


def test_first_uses_that_do_not_cross_are_let_through_in_turn():
    program = compile_step(plan_of(pp=2, layers=2, microbatches=2, schedule="1f1b"))
    check_first_uses(program, ())
    met = [places for places in issue_order(program, made=()) if len(places) == 2]
    firsts = [{rank: program.ranks[rank][at] for rank, at in places} for places in met]
    assert [sorted(type(i).__name__ for i in ends.values()) for ends in firsts] == [
        ["Recv", "Send"],
        ["Recv", "Send"],
        ["Step", "Step"],
    ]
