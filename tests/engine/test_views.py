"""The pages of ranks as another process finds them."""

import os

from superstep.comm.device import Device
from superstep.launch.stack_dump import own_heart
from superstep.monitor.rank_inspector import views_of
from superstep.monitor.status_page import read_beat
from superstep.program.instructions import Step

CPU = Device("cpu")


def test_of_two_pages_of_one_rank_the_one_that_beat_last_counts():
    """A process may have the page of an earlier run still, or have it at a higher descriptor."""

    def beat(heart, step):
        heart.begin((Step(),), step=step)
        heart.rests()
        return read_beat(views_of(os.getpid())[0]).step

    with own_heart(0, CPU) as first, own_heart(0, CPU) as second:
        assert beat(first, 6) == 6
        assert beat(second, 9) == 9
        assert beat(first, 7) == 7
