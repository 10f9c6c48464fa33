"""Several hosts, as network namespaces with a launcher in each: what one is, the other survives, with the same bits."""

import os
import re
import signal
import time
from contextlib import contextmanager

import pytest

import runs
import small_launcher
from bench import several
from superstep.cli.main import main

WHY_NOT = several.why_not()
NEEDS_ROOT = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
pytestmark = [pytest.mark.multiproc, NEEDS_ROOT]

PLAN = ["--numerics.exact", "true", "--train.eval-every", "1000", "--state.save-every", "40",
        "--data.cache", "tokens"]  # fmt: skip
COPIED = [
    "--plan.zero",
    "1",
    "--state.dir",
    "two",
    "--state.existing",
    "resume",
    "--state.snapshot-every",
    "1",
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Run:
    """Two hosts that train, beside what one process has trained."""

    def __init__(self, place, steps, ranks=2):
        plan = [*PLAN, "--train.steps", str(steps), "--plan.microbatch", str(4 // ranks)]
        assert main(["train", "run.toml", *plan, "--plan.dp", "1", "--state.dir", "one"]) == 0
        self.one, self.two = several.losses(place / "one"), place / "two"
        self.hosts = several.Several(place, [*plan, *COPIED, "--plan.dp", str(ranks)], [small_launcher.__file__])

    @contextmanager
    def begun(self, *flags):
        """Both train."""
        with self.hosts:
            self.hosts.start(1, *flags)
            self.hosts.start(0, *flags)
            self.until_step(20)
            yield self.hosts

    def steps(self):
        return len(several.told(self.two, "step"))

    def until_step(self, step):
        self.hosts.until(lambda: self.steps() >= step)

    def trains(self):
        """Long enough for a copy to be with the other host."""
        here = self.steps()
        self.until_step(here + 10)
        time.sleep(1.5)

    def until_resumed(self, times):
        self.hosts.until(lambda: len(several.told(self.two, "resumed")) == times)

    def ends_as_one(self):
        assert self.hosts.wait() == [0, 0], self.hosts.output()
        assert several.losses(self.two) == self.one, self.hosts.output()
        return several.told(self.two, "resumed")


@pytest.mark.long
def test_two_ranks_on_each_host_sum_in_memory_first_and_have_the_bits_of_one(place):
    run = Run(place, steps=60, ranks=4)
    with run.begun() as hosts:
        assert run.ends_as_one() == []
        assert "4 ranks over shared memory and Gloo" in hosts.output()


@pytest.mark.long
def test_a_rank_and_a_whole_host_are_lost_and_the_run_has_the_bits_of_one_that_was_not(place):
    run = Run(place, steps=240)
    with run.begun() as hosts:
        (rank,) = hosts.ranks(1)
        os.kill(rank, signal.SIGKILL)
        run.until_resumed(1)
        run.trains()
        hosts.kill(1)
        hosts.start(1)
        run.until_resumed(2)
        rank, host = run.ends_as_one()
    assert re.match(r"rank 1, host 1 \(.*\), step \d+.*: the process was killed by SIGKILL", rank["lost"])
    assert host["lost"].startswith("host 1 (10.77.0.2): it is lost")
    for line in (rank, host):
        assert line["path"] == "", "from memory, not from a checkpoint"
        assert line["step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["link down", "blackhole"])
def test_a_partition_is_named_within_three_seconds_and_the_run_goes_on_when_it_heals(how, place):
    run = Run(place, steps=200)
    with run.begun() as hosts:
        cut_s = time.time()
        hosts.cut(1) if how == "link down" else hosts.blackhole(1)
        hosts.until(lambda: "Waiting for host 1" in hosts.said[1].read_text(), 10)
        here = run.steps()
        time.sleep(4.0)
        assert run.steps() == here
        assert all(not hosts.ranks(host) for host in range(2)), "ranks are ended on both sides"
        hosts.heal(1) if how == "link down" else hosts.find_again(1)
        run.until_resumed(1)
        (line,) = run.ends_as_one()
    assert line["lost"].startswith("host 1 (10.77.0.2): it is lost, it has said nothing for"), line
    assert line["lost_at_s"] - cut_s <= 3.0
    assert line["path"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "its launcher is stopped"])
def test_what_is_stopped_is_found_wherever_it_is(how, place):
    run = Run(place, steps=200)
    with run.begun() as hosts:
        if how == "stopped":
            os.kill(hosts.ranks(1)[0], signal.SIGSTOP)
        else:
            launcher = hosts.launchers[1].pid
            os.kill(launcher, signal.SIGSTOP)
            hosts.until(lambda: "Waiting for host 1" in hosts.said[1].read_text(), 10)
            os.kill(launcher, signal.SIGCONT)
        run.until_resumed(1)
        (line,) = run.ends_as_one()
    assert ("was stopped" if how == "stopped" else "it has said nothing for") in line["lost"]


@pytest.mark.slow
def test_the_lead_is_lost_with_its_memory_and_comes_back(place):
    run = Run(place, steps=200)
    with run.begun() as hosts:
        run.trains()
        hosts.kill(0)
        hosts.start(0)
        (line,) = (run.until_resumed(1), run.ends_as_one())[1]
        assert "host 0 at 10.77.0.1:29400 is lost" in hosts.said[0].read_text()
    assert line["lost"] == "host 0: its launcher was started again"
    assert line["path"] == ""
    assert line["step"] > 0


@pytest.mark.slow
def test_where_both_lose_their_memory_the_newest_checkpoint_is_gone_on_from(place):
    run = Run(place, steps=200)
    with run.begun() as hosts:
        run.until_step(60)
        hosts.kill(0)
        hosts.kill(1)
        hosts.start(1)
        hosts.start(0)
        (line,) = (run.until_resumed(1), run.ends_as_one())[1]
    assert line["path"].endswith("step-000040")


@pytest.mark.slow
def test_where_patience_ends_the_run_ends_with_the_host_s_name_and_nothing_is_left(place):
    run = Run(place, steps=400)
    with run.begun("--patience", "3") as hosts:
        hosts.kill(1)
        assert hosts.launchers[0].wait(30) == 1
        assert "superstep: fault: host 1 has not come within 3 s; it was lost: host 1 (10.77.0.2)" in hosts.output()
        hosts.launchers.clear()
        hosts.until(lambda: hosts.pids(0) == [], 5)


@pytest.mark.slow
def test_another_secret_is_refused_and_the_run_goes_on(place):
    run = Run(place, steps=60)
    with run.hosts as hosts:
        hosts.start(0)
        wrong = hosts.start(1, secret="not the one of the others")
        assert wrong.wait(60) == 2
        assert "has another secret than this host" in hosts.said[1].read_text()
        hosts.start(1)
        assert run.ends_as_one() == []


@pytest.mark.long
def test_a_run_goes_on_without_a_lost_host_and_with_it_once_it_is_back_and_has_the_bits_of_one_process(place):
    # A constant learning rate: how many steps are done while hosts come and go is not known before.
    plan = [*PLAN, "--plan.microbatch", "2", "--train.decay", "wsd", "--train.decay-steps", "1"]
    elastic = [
        "--train.steps",
        "100000",
        "--train.elastic",
        "true",
        "--without-after",
        "0",
        *COPIED,
        "--plan.dp",
        "2",
    ]
    two, run = several.Several(place, [*plan, *elastic], [small_launcher.__file__]), place / "two"

    def until(event, count):
        two.until(lambda: len(several.told(run, event)) >= count)

    with two:
        two.start(1)
        two.start(0)
        until("step", 20)
        time.sleep(1.0)
        two.cut(1)
        until("resumed", 1)
        until("step", len(several.told(run, "step")) + 5)
        two.heal(1)
        until("resumed", 2)
        until("step", len(several.told(run, "step")) + 5)
    lost, joined = several.told(run, "resumed")
    assert lost["lost"].startswith("host 1 (10.77.0.2): it is lost, it has said nothing for")
    assert lost["path"].endswith(f"step-{lost['step']:06d}"), "written from memory: the run itself has saved none"
    assert (joined["lost"], joined["joined"]) == ("", "host 1")
    assert [line["world"] for line in several.told(run, "started")] == [2, 1, 2]
    done = several.losses(run)
    again = ["--train.steps", str(len(done) + 1), "--plan.dp", "1", "--state.dir", "one"]
    assert main(["train", "run.toml", *plan, *again]) == 0
    assert several.losses(place / "one")[:-1] == done


@pytest.mark.slow
def test_who_is_asked_to_stop_stops_all_hosts_after_the_step_and_each_says_so_with_its_status(place):
    run = Run(place, steps=4000)
    with run.begun() as hosts:
        hosts.launchers[1].terminate()
        assert hosts.wait() == [143, 143], hosts.output()
        assert hosts.output().count("superstep: stopped by SIGTERM.") == 2
