"""Programs of graphs: units that take the outputs of several units, on every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plans import compile_and_check, examples, plan_of, plans
from superstep.errors import ConfigError
from superstep.plan.sharding.edges import (
    list_passing_values,
    list_taken_values,
    require_no_return,
    require_way_back,
)
from superstep.program.check import InvalidProgram, check
from superstep.program.compile import compile_step
from superstep.program.instructions import Backward, Forward, Send, Step
from superstep.program.issue_order import issue_order
from superstep.program.needed_values import NeededValues
from superstep.program.peak_memory import UnitBytes, high_water, list_held_bytes
from superstep.program.received import find_received_values
from superstep.program.text import describe, read_instruction, write_program

SKIP = ((), (0,), (1,), (2, 0), (3,), (4, 0, 2))
"""Six units: the fourth and the last take the first's output too, the last the third's."""

UNIT = UnitBytes(
    params=1000, gradient=4000, kept_all=80, kept_selective=50, kept_input=10, boundary=10,
    product_inputs=30, product_gradients=40,
)  # fmt: skip


def graph_of(**layout):
    return replace(plan_of(layers=4, **layout), inputs=SKIP)


@st.composite
def graphs(draw: st.DrawFn):
    """A plan with one stage on a rank, any graph of its units, and any of these frozen, but for the last."""
    plan = draw(plans(chunks=1, schedule=draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))))
    last = len(plan.units) - 1
    inputs = [draw(st.sets(st.integers(0, unit - 1), max_size=3)) for unit in range(1, last + 1)]
    inputs[-1] |= set(range(last)) - set().union(*inputs)
    frozen = draw(st.just(plan.frozen) | st.sets(st.integers(0, last - 1)).map(sorted).map(tuple))
    graph = replace(plan, frozen=frozen, inputs=((), *(tuple(sorted(units, reverse=True)) for units in inputs)))
    taken = list_taken_values(last + 1, graph.inputs)
    try:
        require_way_back(graph.units, graph.stages, taken, graph.has_backward)
    except ConfigError:
        assume(False)
    return graph


@examples(60)
@given(graphs())
def test_every_graph_compiles_and_keeps_the_rules(plan):
    compile_and_check(plan)


@examples(40)
@given(graphs())
def test_memory_of_a_graph_is_released_at_the_end_of_the_step_but_for_what_nobody_answers(plan):
    program = compile_step(plan)
    sizes = [replace(UNIT, kept_input=10 * len(values)) for values in program.taken]
    for rank in range(program.pp):
        after = list_held_bytes(program, rank, sizes)[-1]
        sent = {(i.wire, i.unit, i.microbatch) for i in program.ranks[rank] if isinstance(i, Send)}
        unanswered = sent.difference(*find_received_values(program, rank).values())
        assert after["kept"] == 0
        assert after["boundary"] == sum(sizes[value].boundary for _, value, _ in unanswered)
    assert all(peak.bytes > 0 for peak in high_water(program, sizes))


@examples(40)
@given(graphs())
def test_what_is_received_has_been_used_by_its_peer(plan):
    program = compile_step(plan)
    ran_at = {place: turn for turn, places in enumerate(issue_order(program)) for place in places}
    needed = NeededValues(program)
    for rank in range(program.pp):
        for place, received in find_received_values(program, rank).items():
            for value in received:
                (peer,) = {
                    i.peer
                    for i in program.ranks[rank]
                    if isinstance(i, Send) and (i.wire, i.unit, i.microbatch) == value
                }
                used_at = next(n for n, i in enumerate(program.ranks[peer]) if value in needed(i))
                assert ran_at[peer, used_at] < ran_at[rank, place]


def test_a_chain_that_is_listed_has_the_text_of_one_that_is_not():
    chain = plan_of(pp=2, layers=4)
    assert "takes" not in write_program(compile_step(chain))
    listed = replace(chain, inputs=((), (0,), (1,), (2,), (3,), (4,)))
    assert compile_step(listed).ranks == compile_step(chain).ranks


def test_a_value_that_a_later_stage_takes_goes_through_the_stages_between():
    """Unit 0's output is taken on ranks 1 and 2: rank 1 takes it once and passes it on; its gradient comes back so."""
    program = compile_step(graph_of(pp=3, stages=(2, 2, 2), microbatches=1))
    sends = [[describe(i) for i in rank if isinstance(i, Send)] for rank in program.ranks]
    assert sends == [
        ["send act u2 m0 to 1", "send act u1 m0 to 1"],
        [
            "send act u4 m0 to 2",
            "send act u3 m0 to 2",
            "send act u1 m0 to 2",
            "send grad u2 m0 to 0",
            "send grad u1 m0 to 0",
        ],
        ["send grad u4 m0 to 1", "send grad u3 m0 to 1", "send grad u1 m0 to 1"],
    ]


def test_a_shared_output_is_held_until_its_last_reader_and_counts_once():
    program = compile_step(graph_of(microbatches=1, recompute="none"))
    only = UnitBytes(
        params=0,
        gradient=0,
        kept_all=0,
        kept_selective=0,
        kept_input=0,
        boundary=0,
        product_inputs=0,
        product_gradients=0,
    )
    sizes = [
        replace(only, boundary=10 if unit == 1 else 0, kept_all=10 if unit in (1, 3, 5) else 0) for unit in range(6)
    ]
    held = list_held_bytes(program, 0, sizes)
    forwards = [at for at, i in enumerate(program.ranks[0]) if isinstance(i, Forward)]
    assert [held[at]["kept"] + held[at]["boundary"] for at in forwards] == [10] * 6


@pytest.mark.parametrize(
    ("rank", "text", "other", "rule"),
    [
        (1, "send act u1 m0 to 2", None, "act u1 m0 is computed or received and never used"),
        (1, "send grad u1 m0 to 0", "backward u3 m0", "must have been computed"),
        (1, "recv grad u1 m0 from 2", None, "summed from its last reader to its first"),
        (1, "recv grad u1 m0 from 2", "send grad u1 m0 to 0", "summed from its last reader to its first"),
        (2, "recv act u1 m0 from 1", None, "the unit's input is not there"),
        (2, "recv act u1 m0 from 1", "recv act u5 m0 from 1", "no use for it"),
    ],
)
def test_check_refuses_a_lost_or_moved_part(rank, text, other, rule):
    """Without ``other`` the instruction is lost; else it moves in front of it, or becomes it."""
    program = compile_step(graph_of(pp=3, stages=(2, 2, 2), microbatches=1))
    lines = [describe(i) for i in program.ranks[rank]]
    at = lines.index(text)
    del lines[at]
    if other in lines:
        lines.insert(lines.index(other), text)
    elif other:
        lines.insert(at, other)
    ranks = list(program.ranks)
    ranks[rank] = tuple(map(read_instruction, lines))
    with pytest.raises(InvalidProgram, match=rule):
        check(replace(program, ranks=tuple(ranks)))


@pytest.mark.parametrize(
    ("inputs", "rule"),
    [
        (((), (0,), (3,), (2,), (3,), (4,)), r"u2 takes \[3\]: only units before it"),
        (((), (0,), (1, 1), (2,), (3,), (4,)), r"u2 takes \[1, 1\]: only units before it, each once"),
        (((), (0,), (1,), (1,), (3,), (4,)), "nothing that leads to the loss takes what u2 returns"),
        (((), (0,)), "2 units have inputs, and the program has 6"),
    ],
)
def test_check_refuses_edges_that_are_no_graph(inputs, rule):
    program = compile_step(plan_of(layers=4))
    with pytest.raises(InvalidProgram, match=rule):
        check(replace(program, inputs=inputs))


def test_nothing_goes_back_through_what_no_trained_unit_feeds():
    """A frozen unit has a backward pass for the trained ones in front of it, and only for them."""
    plan = replace(graph_of(pp=2, microbatches=1, stages=(2, 4)), frozen=(1, 2))
    assert plan.has_backward == (True, True, True, True, True, True)
    plan = replace(plan, frozen=(0, 2))
    program = compile_step(plan)
    assert program.has_backward == (False, True, True, True, True, True)
    assert [describe(i) for i in program.ranks[0]] == [
        "recv grad u2 m0 from 1", "forward u0 m0 keep=nothing", "forward u1 m0 keep=all", "send act u2 m0 to 1",
        "send act u1 m0 to 1", "backward u1 m0", "step",
    ]  # fmt: skip
    faulty = replace(program, ranks=(tuple(i for i in program.ranks[0] if i != Backward(1, 0)), program.ranks[1]))
    with pytest.raises(InvalidProgram, match=r"u1 has no backward for m0|never used|kept of m0"):
        check(faulty)
    more = replace(program, ranks=((*program.ranks[0][:-1], Backward(0, 0), Step()), program.ranks[1]))
    with pytest.raises(InvalidProgram, match="kept nothing to go back through"):
        check(more)


def test_a_gradient_may_not_pass_a_stage_in_which_nothing_goes_back():
    inputs = ((), (), (1,), (2,), (3, 0))
    taken = list_taken_values(5, inputs)
    require_way_back("abcde", ((0, 1), (2, 3), (4,)), taken, (True, True, True, True, True))
    require_way_back("abcde", ((0, 1), (2, 3, 4)), taken, (True, False, False, False, True))
    with pytest.raises(ConfigError, match=r"the gradient of unit 'a' would pass the stage of unit 'c', .* plan.stages"):
        require_way_back("abcde", ((0, 1), (2, 3), (4,)), taken, (True, False, False, False, True))


def test_a_value_may_not_come_to_a_rank_twice():
    names, taken = ("a", "b", "c", "d"), list_taken_values(4, ((), (0,), (1,), (2, 0)))
    stages = ((0,), (1,), (2,), (3,))
    require_no_return(names, stages, (0, 1, 2, 3), taken)
    require_no_return(names, stages, (0, 0, 1, 1), taken)
    require_no_return(names, stages, (0, 1, 0, 1), list_taken_values(4, ()))
    with pytest.raises(ConfigError, match="what unit 'a' returns would come to pipeline rank 0 twice"):
        require_no_return(names, stages, (0, 1, 0, 1), taken)


def test_passing_values_are_those_that_later_stages_take():
    assert list_passing_values(
        ((0, 1, 2), (3, 4), (5,)), list_taken_values(6, ((), (0,), (1,), (2,), (3,), (4, 0)))
    ) == (
        (),
        (3, 1),
        (5, 1),
        (),
    )
