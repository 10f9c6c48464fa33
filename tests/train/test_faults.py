"""Each planted fault is caught by ``prove`` as a user runs it, at its default settings, and told for what it is."""

import pytest
import torch

from corpus import write_corpus
from faults import FAULTS, Fault
from small import VOCAB
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.proof_inputs import Cases, prove_case

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def make_case(tmp_path_factory):
    """What ``superstep prove`` makes of a run, on random documents; the references of runs alike are made once."""
    root = tmp_path_factory.mktemp("faults")
    corpus = write_corpus(root / "corpus", vocab=VOCAB)
    made: dict[tuple[str, str, str], Cases] = {}

    def make(fault: Fault, *, reruns: bool):
        if fault.everywhere:
            with fault.plant():
                folder = root / f"planted {len(list(root.iterdir()))}"
                return Cases(folder, corpus, steps=2).case(resolve(fault.config), reruns=reruns)
        key = fault.compute, str(fault.model), str(fault.data)
        cases = made.setdefault(key, Cases(root / str(len(made)), corpus, steps=2))
        return cases.case(resolve(fault.config), reruns=reruns)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)


def _prove_each(rank, world, names, cases):
    found = []
    for name, case in zip(names, cases, strict=True):
        with FAULTS[name].plant():
            found.append(prove_case(World(rank, world, Device("cpu")), case))
    return found


BESIDE = ("stream", "validation", "sampler")
"""What is held against plain code, beside the steps."""

AGAIN = ("rerun", "restart", "loop", *BESIDE)
"""What only a second run can show, or is looked at where there is one."""


def _first(verdict):
    """What was named first, as ``Fault.first`` has it."""
    if verdict.stream:
        return "stream"
    if verdict.first is not None:
        return verdict.first.kind
    if verdict.again.is_rerun_same is False:
        return "rerun"
    if verdict.again.is_restart_same is False:
        return "restart" if verdict.again.first.startswith("after the restart") else "loop"
    if verdict.validation is not None and verdict.validation.is_wrong:
        return "validation"
    return "sampler" if verdict.sampler else "nothing"


def _told(verdict):
    first = [verdict.first.describe()] if verdict.first else []
    return [*verdict.wrong_beside, *first, *verdict.hints, verdict.again.first]


def _caught(pool, make_case, names):
    """Run faults that have as many ranks, one after the other in one job; what was wrong with which."""
    # What the first run shows already is shown again by the second, which takes as long.
    runs = {name: make_case(FAULTS[name], reruns=FAULTS[name].first in AGAIN) for name in names}
    wrong = []
    for world in sorted({case.run.plan.mesh.world for case in runs.values()}):
        here = [name for name in names if runs[name].run.plan.mesh.world == world]
        cases = [runs[name] for name in here]
        verdicts = pool.run(world, _prove_each, here, cases, timeout_s=60 + 20 * len(here))[0]
        for name, verdict in zip(here, verdicts, strict=True):
            told = " | ".join(_told(verdict))
            if verdict.is_proven or _first(verdict) != FAULTS[name].first or FAULTS[name].says not in told:
                wrong.append(f"{name}: {_first(verdict)}, not {FAULTS[name].first}: {told}")
    return wrong


REPRESENTATIVE = (
    "gradients not summed over dp",
    "each rank divides by its own tokens",
    "partial gradients not summed over tp",
    "a layer's weights of the start, ZeRO-3",
    "every gradient half",
    "one unit not reduced",
    "clipping by the own shard's norm",
    "gradients sent back doubled, gpipe",
    "gradients of keys do not go round the ring",
    "gradients do not travel to the experts",
    "a layer's weights of the start, ZeRO-3 in bf16",
    "sums into shards in bf16",
    "the cursor one sample on after a restart",
    "a sample skipped after each batch",
    "second moments not loaded",
    "another gradient each time",
    "gradients of linears 5% too large, in bf16 on any number of ranks",
    "the same with experts",
    "padding counted as tokens that have a loss",
    "validation without its last batch",
    "top-p that keeps one token too few",
)
"""One of each kind; all that there are take a few minutes."""

PARTS = 6


@pytest.mark.parametrize(
    "names", [REPRESENTATIVE[::3], pytest.param(REPRESENTATIVE, marks=pytest.mark.long)], ids=["a third", "all"]
)
def test_planted_faults_are_caught_and_named(pool, make_case, names):
    assert _caught(pool, make_case, names) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_planted_fault_is_caught_and_named(pool, make_case, part):
    assert _caught(pool, make_case, tuple(FAULTS)[part::PARTS]) == []


def test_the_table_has_every_kind_of_layout_and_dtype():
    plans = [resolve(fault.config).plan for fault in FAULTS.values()]
    assert {plan.zero for plan in plans if plan.mesh.data > 1} == {0, 1, 2, 3}
    assert {plan.schedule for plan in plans} >= {"gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v"}
    assert {plan.context for plan in plans if plan.mesh.cp > 1} == {"ring", "ulysses"}
    assert {plan.sequence_parallel for plan in plans if plan.mesh.tp > 1} == {True, False}
    for axis in ("pp", "dp", "cp", "tp", "ep", "replicas"):
        assert max(getattr(plan.mesh, axis) for plan in plans) > 1, axis
    assert {fault.compute for fault in FAULTS.values()} == {"fp32", "bf16"}
    assert {fault.first for fault in FAULTS.values()} >= {"moment", "norm", "update", *AGAIN}


@pytest.mark.long
@pytest.mark.parametrize("names", [REPRESENTATIVE, pytest.param(tuple(FAULTS), marks=pytest.mark.slow)], ids=len)
def test_the_same_layouts_without_a_fault_are_proven(pool, make_case, names):
    faults = [FAULTS[name] for name in names if not FAULTS[name].everywhere]
    for compute in ("fp32", "bf16"):
        plans = {str(fault.plan | fault.model | fault.data): fault for fault in faults if fault.compute == compute}
        cases = [make_case(fault, reruns=number % 4 == 0) for number, fault in enumerate(plans.values())]
        for world in (2, 4):
            here = [case for case in cases if case.run.plan.mesh.world == world]
            verdicts = pool.run(world, _prove_plain, here, timeout_s=60 + 20 * len(here))[0] if here else []
            for case, verdict in zip(here, verdicts, strict=True):
                assert verdict.is_proven, (case.run.config.plan, _told(verdict))


def _prove_plain(rank, world, cases):
    return [prove_case(World(rank, world, Device("cpu")), case) for case in cases]
