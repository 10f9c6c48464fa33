"""What a rank knows to have been received, by the order in which a program's instructions can run."""

from hypothesis import given

from plans import examples, plan_of, plans
from superstep.program.compile import compile_step
from superstep.program.instructions import Send
from superstep.program.issue_order import issue_order
from superstep.program.needed_values import NeededValues
from superstep.program.received import find_received_values


def values(program, rank):
    """What a rank sends: the place of each send and its peer."""
    sends = ((place, i) for place, i in enumerate(program.ranks[rank]) if isinstance(i, Send))
    return {(i.wire, i.unit, i.microbatch): (place, i.peer) for place, i in sends}


@examples(40)
@given(plans())
def test_what_is_received_has_been_used_by_its_peer(plan):
    program = compile_step(plan)
    ran_at = {place: turn for turn, places in enumerate(issue_order(program)) for place in places}
    for rank in range(program.pp):
        sent = values(program, rank)
        for place, received in find_received_values(program, rank).items():
            for value in received:
                sent_at, peer = sent.pop(value)
                used_at = next(n for n, i in enumerate(program.ranks[peer]) if value in NeededValues(program)(i))
                assert sent_at < place
                assert ran_at[peer, used_at] < ran_at[rank, place]


def test_few_messages_of_a_pipeline_are_held_at_a_time():
    for schedule, most in (("1f1b", 2), ("zb-h1", 2)):
        program = compile_step(plan_of(pp=2, layers=2, microbatches=16, schedule=schedule))
        for rank in range(2):
            received, held, largest = find_received_values(program, rank), 0, 0
            for place, i in enumerate(program.ranks[rank]):
                held += isinstance(i, Send) - len(received.get(place, ()))
                largest = max(largest, held)
            assert largest == most
