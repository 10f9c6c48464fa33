"""What is wrong with the flags of several hosts is told in a line."""

import os
import socket
from dataclasses import replace

import pytest

import runs
from superstep.cli.arguments.hosts import PORT
from superstep.cli.arguments.train import read
from superstep.cli.main import main
from superstep.cost.closed.memory import CONTEXT_BYTES, USABLE
from superstep.errors import UserError
from superstep.hardware.catalogue import CHIPS
from superstep.plan.config import PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.run.hosts import elastic

ELASTIC = ["--train.elastic", "true", "--state.snapshot-every", "1"]
TWO = ["--hosts", "2", "--host", "1", "--meet", "10.0.0.1:29400"]
SECRET = {"SUPERSTEP_SECRET": "sixteen bytes or more"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(*next(iter(SECRET.items())))
    return tmp_path


def test_they_say_which_host_this_is_and_where_host_0_is_asked(place):
    hosts = read(["run.toml", *TWO]).hosts
    assert (hosts.number, hosts.count, hosts.meet) == (1, 2, ("10.0.0.1", 29400))
    assert hosts.secret == SECRET["SUPERSTEP_SECRET"].encode()
    (place / "secret").write_text("another one of sixteen bytes\n")
    (place / "secret").chmod(0o600)
    assert read(["run.toml", *TWO, "--secret-file", "secret"]).hosts.secret == b"another one of sixteen bytes"
    assert read(["run.toml"]).hosts is None


def test_torchrun_may_say_so(place, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    hosts = read(["run.toml", "--hosts", "torchrun"]).hosts
    assert (hosts.number, hosts.count, hosts.meet) == (1, 4, ("node0", PORT))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process for each host"):
        read(["run.toml", "--hosts", "torchrun"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "1"], "--host = 1 needs --hosts"),
        (["--hosts", "2"], "--hosts = 2 needs --host"),
        (["--hosts", "2", "--host", "0"], "--hosts = 2 needs --meet"),
        (["--hosts", "two"], "--hosts = two is not a number"),
        (["--hosts", "torchrun"], "--hosts torchrun needs torchrun's environment"),
        ([*TWO, "--host", "2"], "--hosts = 2, --host = 2"),
        ([*TWO, "--meet", "10.0.0.1"], "--meet = 10.0.0.1 is not an address with a port"),
        ([*TWO, "--patience", "0"], "--patience = 0 must be above 0"),
        ([*TWO, "--secret-file", "nowhere"], "--secret-file = nowhere cannot be read"),
        ([*TWO, "--hosts", "3"], "--hosts = 3 does not divide the plan's 2 ranks; give one of [2]"),
        ([*TWO, "--without-after", "-1"], "--without-after = -1 must be at least 0"),
        ([*TWO, "--train.elastic", "true"], "needs states in memory; set state.snapshot_every = 1"),
        (ELASTIC, "train.elastic = true needs several hosts"),
        ([*TWO, "--state.peers", "1"], "state.peers = 1: one other host has copies of snapshots"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(flags, says, place, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "run.toml", "--plan.dp", "2", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606])
def test_a_secret_that_others_may_read_is_none(mode, place, capsys):
    (place / "a secret").write_text("another one of sixteen bytes\n")
    (place / "a secret").chmod(mode)
    assert main(["train", "run.toml", *TWO, "--secret-file", "a secret"]) == 2
    told = f"--secret-file = a secret may be read by other users (mode {mode:04o}); run chmod 600 'a secret'"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("secret", "says"), [(None, "several hosts need a common secret"), ("short", "has 5 bytes")])
def test_a_secret_must_be_one(secret, says, place, monkeypatch, capsys):
    monkeypatch.delenv("SUPERSTEP_SECRET")
    if secret is not None:
        monkeypatch.setenv("SUPERSTEP_SECRET", secret)
    assert main(["train", "run.toml", "--plan.dp", "2", *TWO]) == 2
    assert says in capsys.readouterr().err


def test_copies_on_another_host_need_one(place, capsys):
    assert main(["train", "run.toml", "--state.snapshot-every", "1", "--state.peers", "1"]) == 2
    assert "state.peers = 1 needs several hosts" in capsys.readouterr().err


def test_an_elastic_run_for_which_no_smaller_plan_has_room_is_refused(place, monkeypatch, capsys):
    monkeypatch.setattr(elastic.Device, "free_bytes", lambda self, ranks: 2**18)
    assert main(["train", "run.toml", "--plan.dp", "2", *TWO, *ELASTIC]) == 2
    assert "train.elastic = true: no plan fits fewer than 2 hosts of 1 ranks" in capsys.readouterr().err


def test_plans_for_fewer_hosts_are_those_that_pay(place):
    run = resolve(runs.config(plan={"dp": 4, "zero": 1}, train={"elastic": True}))
    run = replace(run, config=replace(run.config, state=replace(run.config.state, snapshot_every=1)))
    plans = elastic.plans_of(run, 4)
    assert plans[4] is run
    assert {count: plan.plan.mesh.world for count, plan in plans.items()} == {1: 1, 2: 2, 4: 4}, "3 do not cut it"


def test_a_host_that_comes_when_the_run_is_complete_is_told_so(place, monkeypatch, capsys):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # what is set is put back at the end
        monkeypatch.delenv(name)
    assert main(["train", "run.toml", "--train.steps", "1"]) == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    again = ["--train.steps", "1", "--plan.dp", "2", "--state.existing", "resume"]
    flags = ["--hosts", "2", "--host", "1", "--meet", f"127.0.0.1:{port}", "--patience", "1"]
    assert main(["train", "run.toml", *again, *flags]) == 0
    assert "The run in run is complete at step 1: host 0 has left." in capsys.readouterr().out
    assert main(["train", "run.toml", *again, *flags, "--train.steps", "2"]) == 1, "there is a step left"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_a_smaller_plan_on_gpus_has_room_for_its_communicators(monkeypatch):
    """Its ranks would refuse to begin, and the run end with the host that is lost."""
    run = resolve(RunConfig(train=TrainConfig(batch_sequences=16), plan=PlanConfig(dp=4, zero=1)))
    chip = CHIPS["H100-SXM"]
    monkeypatch.setattr(elastic, "choose", lambda asked, size: "cuda")
    monkeypatch.setattr(elastic, "local_gpu", lambda: chip.name)

    def smaller(gib):
        own_bytes = gib * 2**30 + CONTEXT_BYTES
        monkeypatch.setattr(elastic, "of_device", lambda name: replace(chip, memory_bytes=own_bytes / USABLE))
        return elastic.find_smaller_plan(run, 1, 2)

    assert smaller(1.0) is None, "any plan of two ranks has two groups of 544 MiB"
    found = smaller(3.0)
    assert found is not None
    assert found.run.plan.mesh.world == 2
