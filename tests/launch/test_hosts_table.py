"""What the lead of several hosts decides: values alone, no network and no clock."""

import random
from dataclasses import replace

import pytest

from superstep.launch.hosts.coordinator_state import ECHO_S, CoordinatorState, Phase, after
from superstep.launch.hosts.copy_schedule import CopySchedule, HostProgress, steer
from superstep.launch.hosts.events import (
    AbortAll,
    Cause,
    FetchState,
    HostFailed,
    HostHolds,
    HostJoined,
    HostLeft,
    RanksDone,
    RunOver,
    StartRanks,
    Tick,
)
from superstep.launch.hosts.membership import CopyPlacement, HeldStates, largest, newest
from superstep.launch.retry import MOST_TRIES

LOST = Cause("rank 1 was killed", is_lost=True)
ECHO = Cause("a connection broke", order=3)
MISTAKE = Cause("a file is missing", is_mistake=True, order=0)


def _held(own=(), copies=()):
    return HeldStates(frozenset((step, 0) for step in own), frozenset((step, 0) for step in copies))


def _told(table, *events, at=0.0):
    """The table after some events, and all orders."""
    orders = []
    for event in events:
        found = after(table, event, at)
        table, orders = found.table, [*orders, *found.orders]
    return table, orders


def _running(hosts=2, *, state=None, can_recover=True):
    held = _held(() if state is None else (state,))
    arrived = [event for host in range(hosts) for event in (HostJoined(host), HostHolds(host, held))]
    table, (go,) = _told(CoordinatorState(seats=(None,) * hosts, can_recover=can_recover, patience_s=60), *arrived)
    assert isinstance(go, StartRanks)
    assert table.phase is Phase.RUNS
    return table


def test_ranks_start_once_all_hosts_are_there_and_end_when_all_are_done():
    table, orders = _told(
        CoordinatorState(seats=(None,) * 3, can_recover=True, patience_s=60), HostJoined(0), HostHolds(0, HeldStates())
    )
    table, more = _told(table, HostJoined(2), HostHolds(2, HeldStates()), HostJoined(1))
    assert orders == more == []
    table, orders = _told(table, HostHolds(1, HeldStates()))
    assert orders == [StartRanks(1, None, None)]
    table, orders = _told(table, RanksDone(0, 1), RanksDone(2, 1))
    assert orders == []
    assert _told(table, RanksDone(1, 1))[1] == [RunOver()]


def test_a_lost_rank_ends_all_ranks_and_all_go_on_from_the_newest_common_state():
    table, orders = _told(_running(), HostFailed(1, 1, LOST))
    assert orders == [AbortAll(1, LOST)]
    table, orders = _told(table, HostFailed(0, 1, ECHO), HostHolds(0, _held((7, 8))))
    assert orders == []
    table, orders = _told(table, HostHolds(1, _held((6, 7))))
    assert orders == [StartRanks(2, (7, 0), LOST)]


def test_what_a_host_says_of_an_epoch_that_is_over_changes_nothing():
    table, _ = _told(_running(), HostFailed(1, 1, LOST), HostHolds(0, _held((7,))), HostHolds(1, _held((7,))))
    assert table.epoch == 2
    assert _told(table, HostFailed(0, 1, MISTAKE), RanksDone(0, 1), RanksDone(1, 1)) == (table, [])


def test_a_host_that_comes_back_without_its_memory_fetches_the_copy_and_only_then_all_go_on():
    table, orders = _told(_running(), HostLeft(1, "host 1 is lost"))
    assert [type(order) for order in orders] == [AbortAll]
    table, orders = _told(table, HostFailed(0, 1, ECHO), HostHolds(0, _held((5, 8), copies=(5,))))
    assert orders == []
    assert table.phase is Phase.GATHERS
    table, orders = _told(table, HostJoined(1), HostHolds(1, HeldStates()))
    assert orders == [FetchState(1, 0, (5, 0))]
    table, orders = _told(table, HostHolds(1, _held((5,))))
    assert orders == [StartRanks(2, (5, 0), Cause("host 1 is lost", is_lost=True))]


def test_a_lead_that_has_lost_its_memory_learns_the_epoch_and_fetches_too():
    table = CoordinatorState(seats=(None, None), can_recover=True, patience_s=60)
    table, orders = _told(
        table, HostJoined(0), HostHolds(0, HeldStates()), HostJoined(1, 4), HostHolds(1, _held((9,), copies=(9,)))
    )
    assert orders == [FetchState(0, 1, (9, 0))]
    _, (go,) = _told(table, HostHolds(0, _held((9,))), at=7.0)
    assert (go.epoch, go.state) == (5, (9, 0))
    assert go.lost == Cause("host 0: its launcher was started again", is_lost=True, at_s=7.0)


def test_where_nobody_has_a_state_the_disk_has_it():
    _, orders = _told(
        _running(),
        HostLeft(1, "gone"),
        HostHolds(0, _held((8,), copies=(5,))),
        HostJoined(1),
        HostHolds(1, HeldStates()),
    )
    assert [order.state for order in orders if isinstance(order, StartRanks)] == [None]


def test_broken_connections_wait_for_what_broke_them():
    table, _ = _told(_running(), HostFailed(0, 1, ECHO), HostHolds(0, _held((3,))), HostHolds(1, _held((3,))))
    assert table.phase is Phase.ENDS
    silent, orders = _told(table, HostLeft(1, "host 1 is silent"), at=ECHO_S / 2)
    assert (silent.phase, orders) == (Phase.GATHERS, [])
    assert silent.lost.text == "host 1 is silent"
    assert _told(table, Tick(), at=ECHO_S / 2) == (table, [])
    assert _told(table, Tick(), at=ECHO_S)[1] == [RunOver(ECHO)], "nothing else was wrong"


@pytest.mark.parametrize("cause", [MISTAKE, Cause("loss nan", order=0)])
def test_what_a_restart_does_not_mend_ends_the_run_whoever_else_is_lost(cause):
    table, _ = _told(_running(), HostFailed(1, 1, LOST), HostFailed(0, 1, cause), HostHolds(0, HeldStates()))
    (over,) = _told(table, HostHolds(1, HeldStates()))[1]
    assert over.cause.text == cause.text


def test_without_copies_a_loss_ends_the_run():
    table, _ = _told(_running(can_recover=False), HostFailed(1, 1, LOST), HostHolds(0, HeldStates()))
    assert _told(table, HostHolds(1, HeldStates()))[1] == [RunOver(LOST)]


def test_a_run_that_loses_ranks_after_the_same_state_again_and_again_ends():
    table, orders = _running(), []
    for _ in range(MOST_TRIES + 1):
        table, orders = _told(
            table, HostFailed(1, table.epoch, LOST), HostHolds(0, _held((7,))), HostHolds(1, _held((7,)))
        )
    assert isinstance(orders[-1], RunOver)
    table = _running()
    for step in range(9):
        table, orders = _told(
            table, HostFailed(1, table.epoch, LOST), HostHolds(0, _held((step,))), HostHolds(1, _held((step,)))
        )
        assert isinstance(orders[-1], StartRanks), "it got further"


def test_patience_has_an_end_that_names_the_host_and_why_it_is_waited_for():
    table, _ = _told(
        _running(3), HostLeft(2, "host 2 is silent"), HostHolds(0, HeldStates()), HostHolds(1, HeldStates()), at=100.0
    )
    assert _told(table, Tick(), at=159.0)[1] == []
    (over,) = _told(table, Tick(), at=160.0)[1]
    assert over.cause.text.startswith("host 2 has not come within 60 s")
    assert "host 2 is silent" in over.cause.text


def _newest(*held):
    return newest(dict(enumerate(held)), range(len(held)))


def test_the_newest_state_is_one_that_every_host_can_have():
    assert _newest(_held((4, 5)), _held((5, 6))) == (5, 0)
    assert _newest(_held((9,), copies=(4, 8)), _held()) is None
    assert _newest(_held((4, 8, 9), copies=(4, 8)), _held()) == (8, 0)
    # In a ring: the copies of host 1 are with host 2, those of host 2 with host 0.
    assert _newest(_held((3,)), _held(), _held((3,), copies=(3,))) == (3, 0)
    assert _newest(_held((3,), copies=(3,)), _held(), _held((3,))) is None
    other_turn = HeldStates(frozenset({(5, 1)}))
    assert _newest(_held((5,)), other_turn) is None, "a run that has gone back since is another"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_all_ranks_start_from_a_state_that_all_have_and_epochs_rise(seed):
    luck = random.Random(seed)
    hosts = luck.choice((2, 3))
    table, epoch = CoordinatorState(seats=(None,) * hosts, can_recover=True, patience_s=1e9), 0
    held = [HeldStates()] * hosts
    for number in range(300):
        host = luck.randrange(hosts)
        held[host] = _held(luck.sample(range(6), 3), luck.sample(range(6), 2))
        event = luck.choice(
            (HostJoined(host, epoch), HostLeft(host, "gone"), HostHolds(host, held[host]),
             HostFailed(host, table.epoch, LOST),
             RanksDone(host, table.epoch), Tick())
        )  # fmt: skip
        before, found = table, after(table, event, number)
        table = found.table
        if table.phase is Phase.OVER:
            return
        for order in found.orders:
            match order:
                case StartRanks(new, state):
                    assert new > epoch
                    epoch = new
                    told = [seat.held for seat in before.seats]
                    told[host] = held[host] if isinstance(event, HostHolds) else told[host]
                    assert state is None or all(state in each.own for each in told)
                    assert not table.missing
                case AbortAll(old, _):
                    assert old == epoch
                case _:
                    pass


def test_all_copy_the_same_state_and_the_next_only_when_every_neighbour_has_it():
    course = steer(CopySchedule(), [HostProgress(newest=4), HostProgress(newest=5)], 1)
    assert course.next > 5
    asked = course.next
    one = HostProgress(newest=asked + 3, copied=asked, held=asked)
    other = HostProgress(newest=asked + 3, copied=0, held=asked)
    course = steer(course, [one, other], 1)
    assert (course.copied, course.next) == (0, asked), "one is not done"
    course = steer(course, [one, one], 1)
    assert course.copied == asked
    assert course.next > asked + 3


def test_a_step_that_ranks_had_passed_is_left_for_one_farther_ahead():
    course = steer(CopySchedule(), [HostProgress(newest=10)] * 2, 2)
    assert course.next % 2 == 0
    missed = course.next
    late = HostProgress(newest=missed + 4, held=0)
    again = steer(course, [late, HostProgress(newest=missed + 4, held=missed)], 2)
    assert again.next - late.newest > course.next - 10, "from farther ahead"
    assert again.copied == 0


def test_after_a_restart_the_state_that_all_have_is_copied_first():
    course = CopySchedule(copied=8, next=8, newest=8)
    assert steer(course, [HostProgress(newest=8, held=8)] * 2, 1).next == 8
    assert steer(course, [HostProgress(newest=9, copied=8, held=8)] * 2, 1).next > 9


def _elastic(hosts, sizes, *, without_s=5.0):
    """A run with plans for so many hosts that trains on all of them."""
    table = CoordinatorState(seats=(None,) * hosts, can_recover=True, patience_s=60, sizes=sizes, without_s=without_s)
    table, _ = _told(
        table, *(event for host in range(hosts) for event in (HostJoined(host), HostHolds(host, HeldStates())))
    )
    assert table.phase is Phase.RUNS
    return table


def _cut(own=(), copies=(), cut=None):
    held = _held(own, copies)
    return held if cut is None else HeldStates(held.own, held.copies, cut)


def test_a_lost_host_is_gone_on_without_and_those_left_write_down_what_they_have_of_it_first():
    table = _elastic(3, (1, 2, 3))
    table, orders = _told(table, HostLeft(1, "host 1 is lost"), at=100.0)
    assert [type(order) for order in orders] == [AbortAll]
    table, orders = _told(
        table, HostHolds(0, _held((7, 8), copies=(7,))), HostHolds(2, _held((7, 8), copies=(7,))), at=100.0
    )
    assert orders == []
    assert _told(table, Tick(), at=104.9)[1] == [], "it may come back"
    table, (write,) = _told(table, Tick(), at=105.0)
    assert (write.epoch, write.state, write.sources) == (2, (7, 0), (0, 2, 2)), "host 2 has the copy of host 1's"
    assert write.crew(3) == (0, 2)
    table, orders = _told(table, RanksDone(0, 2), at=106.0)
    assert orders == []
    table, (go,) = _told(table, RanksDone(2, 2), at=106.0)
    assert (go.epoch, go.state, go.cut, go.sources) == (3, None, CopyPlacement(3, (0, 2)), ())
    assert go.lost.text == "host 1 is lost"


def test_a_host_that_comes_back_in_time_is_waited_for():
    table, _ = _told(_elastic(2, (1, 2)), HostLeft(1, "gone"), HostHolds(0, _held((7,), copies=(7,))), at=100.0)
    _, orders = _told(table, HostJoined(1, 1), HostHolds(1, _held((7,))), at=104.0)
    assert [(order.state, order.cut) for order in orders] == [((7, 0), CopyPlacement())]


def _on_one(step=7):
    """A run on two hosts that goes on with host 0, which has come to a step."""
    table = _elastic(2, (1, 2), without_s=0.0)
    table, (_, write) = _told(table, HostLeft(1, "gone"), HostHolds(0, _held((step,), copies=(step,))))
    assert write.sources == (0, 0)
    table, (go,) = _told(table, RanksDone(0, 2))
    assert go.cut == CopyPlacement(3, (0,))
    return table


def test_it_grows_back_once_another_state_is_whole_and_what_the_host_had_before_means_nothing():
    table = _on_one()
    table, orders = _told(table, Tick(9), HostJoined(1, 1), HostHolds(1, _held((7, 8), copies=(7,))), Tick(9), Tick(9))
    assert orders == [], "the newest state is not thrown away"
    table, (abort,) = _told(table, Tick(10))
    assert abort.cause.is_gain
    assert "host 1" in abort.cause.text
    mine = HostHolds(0, _cut((9, 10), cut=CopyPlacement(3, (0,))))
    table, (write,) = _told(table, HostHolds(1, _held((7, 8), copies=(7,))), mine)
    assert (write.state, write.cut, write.sources) == ((10, 0), CopyPlacement(3, (0,)), (0,))
    table, (go,) = _told(table, RanksDone(0, 4))
    assert (go.epoch, go.state, go.cut) == (5, None, CopyPlacement(5, (0, 1)))
    table, orders = _told(table, RanksDone(0, 5), RanksDone(1, 5))
    assert orders == [RunOver()]


def test_a_host_that_waits_for_its_turn_may_go_and_the_run_ends_without_it():
    table = _on_one()
    table, orders = _told(
        table, HostJoined(1, 1), HostHolds(1, HeldStates()), HostLeft(1, "gone again"), Tick(9), Tick(10), Tick(11)
    )
    assert orders == []
    assert _told(table, RanksDone(0, 3))[1] == [RunOver()]


def test_a_rank_that_is_lost_on_fewer_hosts_waits_for_nobody():
    table = _on_one()
    cut = CopyPlacement(3, (0,))
    _, orders = _told(table, HostFailed(0, 3, LOST), HostHolds(0, _cut((8,), cut=cut)), at=50.0)
    assert orders[1:] == [StartRanks(4, (8, 0), Cause(LOST.text, is_lost=True, at_s=50.0), cut)]


def test_where_nobody_has_all_of_a_state_those_left_go_on_from_the_newest_checkpoint():
    table = _elastic(4, (2, 4), without_s=0.0)
    events = [
        HostLeft(1, "gone"),
        HostLeft(2, "gone"),
        HostHolds(0, _held((7,), copies=(7,))),
        HostHolds(3, _held((7,))),
    ]
    _, orders = _told(table, *events)
    assert [(go.state, go.cut) for go in orders if isinstance(go, StartRanks)] == [(None, CopyPlacement(2, (0, 3)))]


def test_where_no_plan_is_for_so_few_the_host_is_waited_for_until_patience_ends():
    table, _ = _told(_elastic(3, (2, 3)), HostLeft(1, "gone"), HostLeft(2, "gone"), HostHolds(0, _held((7,))), at=100.0)
    table, orders = _told(table, Tick(), at=130.0)
    assert (table.phase, orders) == (Phase.GATHERS, [])
    assert isinstance(_told(table, Tick(), at=160.0)[1][0], RunOver)


def test_who_is_lost_while_a_state_is_written_down_is_gone_on_without_too():
    table, _ = _told(_elastic(3, (1, 2, 3), without_s=0.0), HostLeft(1, "gone"), HostHolds(0, _held((7,), copies=(7,))))
    table, (write,) = _told(table, HostHolds(2, _held((7,), copies=(7,))))
    assert write.sources == (0, 2, 2)
    table, orders = _told(table, HostLeft(2, "gone too"), HostHolds(0, _held((7,), copies=(7,))))
    assert [type(order) for order in orders] == [AbortAll, StartRanks]
    assert (orders[-1].state, orders[-1].cut) == (None, CopyPlacement(3, (0,))), "host 1's part is lost with host 2"


def test_those_stay_that_trained_and_hosts_beyond_a_plan_wait():
    assert largest((0, 1, 2, 3), (1, 2, 4, 8), ()) == (0, 1, 2, 3)
    assert largest((0, 1, 3), (1, 2, 4), (0, 3)) == (0, 3)
    assert largest((0, 2), (3,), (0, 1, 2)) == ()


def test_whatever_happens_to_an_elastic_run_its_ranks_are_of_hosts_that_are_here_and_a_state_is_whole():
    seen = [go for seed in range(40) for go in _lives(random.Random(seed))]
    assert len([go for go in seen if go.sources]) > 20
    assert len({go.cut.hosts for go in seen}) > 5


def _lives(luck):
    """What is started in a run that anything happens to, each looked at."""
    hosts = luck.choice((2, 3, 4))
    sizes = tuple(sorted({hosts, *luck.sample(range(1, hosts), luck.randint(1, hosts - 1))}))
    table, epoch = replace(_elastic(hosts, sizes, without_s=2.0), patience_s=1e9), 1
    for number in range(400):
        host = luck.randrange(hosts)
        held = _cut(luck.sample(range(6), 3), luck.sample(range(6), 3), luck.choice((None, table.cut)))
        event = luck.choice(
            (HostJoined(host, epoch), HostLeft(host, "gone"), HostHolds(host, held),
             HostFailed(host, table.epoch, LOST),
             RanksDone(host, table.epoch), Tick(number))
        )  # fmt: skip
        before, found = table, after(table, event, number)
        table = found.table
        for go in (order for order in found.orders if isinstance(order, StartRanks)):
            assert go.epoch > epoch
            epoch = go.epoch
            told = {h: seat.held for h, seat in enumerate(before.seats) if seat is not None and seat.held is not None}
            told |= {event.host: event.held} if isinstance(event, HostHolds) else {}
            _check_start(go, table, {h: each for h, each in told.items() if each.cut == go.cut})
            yield go


def _check_start(go, table, told):
    hosts = len(table.seats)
    crew = go.crew(hosts)
    assert crew == table.crew
    assert set(crew) <= set(table.here)
    if not go.sources:
        assert len(crew) in table.sizes
        assert go.state is None or all(go.state in told[host].own for host in crew)
    for part, source in zip(go.cut.crew(hosts), go.sources, strict=bool(go.sources)):
        assert go.state in (told[source].own if source == part else told[source].copies)
