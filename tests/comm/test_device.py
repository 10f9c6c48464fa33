"""Which device a rank takes, and what its memory is, on hosts whose GPUs are made up."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import runs
from superstep.cli.flags.options import DEMO
from superstep.cli.main import main
from superstep.cli.train import train as train_verb
from superstep.comm.device import Device, choose, pick
from superstep.comm.objects import barrier
from superstep.engine.measure import probe_machine
from superstep.errors import ConfigError
from superstep.launch import ranks as launching
from superstep.launch import torchrun
from superstep.launch.ranks import launch, launch_on
from superstep.launch.rendezvous import RankSlot
from superstep.launch.torchrun import ANSWERS, PREPARED, Rank0Value, StoredValue, join, one_world
from superstep.plan.resolution.resolve import resolve
from superstep.serve.compute.runner.rank_commands import WeightReading

GIB = 2**30


class Host:
    """A host with GPUs of ours: every call that would give a process a context is noted."""

    def __init__(self, monkeypatch, count):
        self.contexts = []
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        self._notes("set_device", None)
        self._notes("mem_get_info", (3 * GIB, 80 * GIB))
        self._notes("get_device_properties", SimpleNamespace(total_memory=80 * GIB))
        self._notes("get_device_name", "Test GPU")
        self._notes("memory_reserved", 2 * GIB)
        self._notes("memory_allocated", GIB)
        self._notes("max_memory_allocated", 7 * GIB)
        self._notes("reset_peak_memory_stats", None)
        self._notes("synchronize", None)

    def _notes(self, name, value):
        def call(*args):
            self.contexts.append((name, *args))
            return value

        self.monkeypatch.setattr(torch.cuda, name, call)


@pytest.fixture
def host(monkeypatch):
    return lambda count: Host(monkeypatch, count)


def test_a_rank_takes_the_gpu_of_its_number(host):
    found = host(4)
    assert [pick(rank).index for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert found.contexts[3] == ("set_device", torch.device("cuda", 3))
    assert pick(3, "cpu") == Device("cpu")
    host(0)
    assert pick(3) == Device("cpu")


def test_a_gpu_for_each_rank_or_one_line(host):
    found = host(2)
    assert (choose(None, 2), choose("cuda", 1), choose("cpu", 64)) == ("cuda", "cuda", "cpu")
    with pytest.raises(ConfigError, match=r"3 ranks on a host with 2 GPUs.* at most 2 .*plan\.device = 'cpu'\.$"):
        choose(None, 3)
    host(0)
    assert choose(None, 64) == "cpu"
    with pytest.raises(ConfigError, match="'cuda': torch finds no GPU"):
        choose("cuda")
    assert not found.contexts, "to count is no reason for a context"


def test_train_with_more_ranks_than_gpus_is_refused_in_a_line(host, tmp_path, monkeypatch, capsys):
    found = host(1)
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml", "--plan.dp", "2"]) == 2
    said = capsys.readouterr().err
    assert "2 ranks on a host with 1 GPU, and NCCL needs one for each rank" in said
    assert said.count("\n") == 1
    assert main(["prove", "run.toml", "--plan.dp", "2"]) == 2
    assert main(["measure", "--ranks", "2", "--model", "tiny"]) == 2
    assert not found.contexts
    assert not (tmp_path / "run").exists()


def _place(world, value):
    return world.device, value


def test_the_cpu_may_be_chosen_where_there_are_gpus(host):
    found = host(2)
    assert launch_on("cpu", 1, _place, "x") == (Device("cpu"), "x")
    assert not found.contexts


def test_the_launcher_of_ranks_on_gpus_has_no_context(host, tmp_path, monkeypatch):
    """Even of one rank, which on a CPU runs in the launcher."""
    found = host(2)
    started = []

    @contextlib.contextmanager
    def ranks(parties, kind, folder, first):
        started.append((sum(party.size for party in parties), kind))
        yield []

    monkeypatch.setattr(launching, "_ranks", ranks)
    launch(1, _place, 0)
    launch(2, _place, 0)
    # A run as well, from its arguments to the launch; what fits is for the ranks to say.
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_verb, "after_demo", lambda job: 0)
    assert main(["train", "run.toml", "--plan.dp", "2"]) == 0
    assert started == [(1, "cuda"), (2, "cuda"), (2, "cuda")]
    assert not found.contexts


def test_the_demo_runs_on_a_host_with_one_gpu(host):
    demo = resolve(DEMO)
    host(1)
    assert train_verb.demo_on_few_gpus(demo).config.plan.device == "cpu"
    host(2)
    assert train_verb.demo_on_few_gpus(demo) == demo


@pytest.mark.parametrize(("environment", "index"), [({}, 5 % 4), ({"LOCAL_RANK": "2"}, 2)], ids=["srun", "torchrun"])
def test_a_rank_that_joins_takes_the_gpu_of_its_number(host, monkeypatch, environment, index):
    found = host(4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    store.set(PREPARED, ANSWERS.encode(Rank0Value(b"made")))
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **kwargs: iter([(store, 5, 8)]))
    groups = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: groups.append((backend, settings)))
    monkeypatch.setattr(torchrun, "_own_address", lambda store: "127.0.0.1")
    joined = []
    join(
        lambda ranks: contextlib.nullcontext("made"),
        one_world(lambda world, value: joined.append((world.device, value))),
        StoredValue(str.encode, bytes.decode),
        lambda value: {"made": "cuda"}[value],
    )
    assert joined == [(Device("cuda", index), "made")]
    assert found.contexts == [("set_device", torch.device("cuda", index))]
    assert [(backend, told["device_id"]) for backend, told in groups] == [("nccl", torch.device("cuda", index))]


def test_groups_and_barriers_are_bound_to_a_ranks_own_gpu(host, monkeypatch, tmp_path):
    """NCCL takes the GPU of the rank's number otherwise, which on another host than the first is another's or none."""
    host(8)
    told = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **given: told.append(given["device_id"]))
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids: told.append(device_ids))
    for device in (Device("cuda", 5), Device("cpu")):
        RankSlot(rank=13, world=16, name="", file=tmp_path / "none", meeting=None, is_first=False).take(device)
        barrier(device)
    assert told == [torch.device("cuda", 5), [5], None, None]


def test_weights_that_are_read_beside_a_step_take_memory_on_the_ranks_gpu_alone(host):
    found = host(4)
    reading = WeightReading(SimpleNamespace(), Device("cuda", 2), {}, is_named=False)
    assert reading.reader.wait(60)
    assert found.contexts == [("set_device", torch.device("cuda", 2))]


def test_a_gpus_memory_is_its_own(host):
    """What it has left counts, and what this process keeps without a use for it."""
    host(1)
    gpu = Device("cuda")
    assert gpu.free_bytes(ranks=8) == 3 * GIB + (2 - 1) * GIB
    assert gpu.capacity_bytes() == 80 * GIB
    rates = probe_machine.measure_operations(
        (), "fp32", probe_machine.TimingOptions(device=Device("cpu"), budget_s=0.0)
    )[1]
    product = probe_machine.ProductRate(rate="fp32", rows=1, width=1, inner=1, flops_per_s=1.0)
    found = probe_machine.measure_cluster(gpu, 1, "fp32", 1e-6, ((product,), rates, ()))
    assert found.cluster.chip.memory_bytes == 80 * GIB
    assert found.cluster.chip.name == "Test GPU"


def test_the_peak_of_a_run_forgets_what_was_measured_before_it(host):
    found = host(1)
    assert Device("cuda").count_from_here() == GIB
    assert ("reset_peak_memory_stats", torch.device("cuda", 0)) in found.contexts
    assert Device("cpu").count_from_here() > 0


def test_processor_time_is_no_clock_for_a_gpu(host, monkeypatch):
    """It stands still while a GPU works; and where there are more GPUs than cores nobody takes turns.

    What is sent waits for others, and is on the wall's clock either way.
    """
    seen = {}

    def noted(what, gauge, found):
        seen[gauge.device.kind, what] = gauge.clock
        return found

    product = probe_machine.ProductRate(rate="fp32", rows=1, width=1, inner=1, flops_per_s=1.0)
    copies = probe_machine.measure_operations(
        (), "fp32", probe_machine.TimingOptions(device=Device("cpu"), budget_s=0.0)
    )[1]
    rates = ((product,), copies)
    monkeypatch.setattr(probe_machine, "measure_operations", lambda _, __, gauge: noted("operations", gauge, rates))
    monkeypatch.setattr(probe_machine, "launch_s", lambda gauge: noted("launch", gauge, 1e-6))
    monkeypatch.setattr(probe_machine, "measure_collectives", lambda _, __, gauge, ___: noted("collectives", gauge, ()))
    monkeypatch.setattr(probe_machine, "barrier", lambda device: None)
    monkeypatch.setattr(probe_machine, "cores", lambda: 2)
    from superstep.plan.config import RunConfig
    from superstep.plan.resolution.resolve import resolve

    host(1)
    for kind in ("cpu", "cuda"):
        probe_machine.measure_here(resolve(RunConfig()), (), launching.World(0, 16, Device(kind)))
    turn, wall = probe_machine.time.process_time, probe_machine.time.perf_counter
    assert seen == {
        ("cpu", "operations"): turn,
        ("cpu", "launch"): turn,
        ("cpu", "collectives"): wall,
        ("cuda", "operations"): wall,
        ("cuda", "launch"): wall,
        ("cuda", "collectives"): wall,
    }


def test_tests_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert torch.cuda.device_count() == 0
