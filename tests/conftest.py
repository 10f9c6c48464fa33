"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from pool import Pool
from superstep.cost.program.time.operation import UnitOperations
from superstep.plan.resolution.resolve import Resolved

# Read where torch is imported, here and in what a test starts: as many workers run as there are cores, and threads that
# wait for each other's turn on one spin. Tests of threads ask for theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# However slow an example is: a busy machine is no fault of the program.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

SETTINGS = "_hypothesis_internal_use_settings"
"""Where hypothesis keeps those of a test."""


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks that live as long as the session."""
    ranks = Pool(8)
    yield ranks
    ranks.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket below it, as ``tmp_path`` does not in several processes."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of several ranks first: they take longest, and of two processes neither shall wait for the other's last.
    Where long tests are left out, properties are asked of a third of their examples.
    """
    items.sort(key=lambda item: item.get_closest_marker("multiproc") is None)
    if "not long" in config.option.markexpr:
        for test in {getattr(item, "obj", None) for item in items}:
            wanted = getattr(test, SETTINGS, None)
            if wanted is not None:
                fewer = hypothesis.settings(wanted, max_examples=-(-wanted.max_examples // 3))
                setattr(getattr(test, "__func__", test), SETTINGS, fewer)


def pytest_collection_finish() -> None:
    """Keep what is there by now, torch and every test, out of the sight of Python's collector of cycles: who opens an
    engine asks for it, and it took longer than all else there.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files take the time."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    terminalreporter.section("slowest files")
    terminalreporter.write_line(f"{seconds.total():7.1f} s  all {len(seconds)} files")
    for name, spent in seconds.most_common(10):
        terminalreporter.write_line(f"{spent:7.1f} s  {name}")


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the GPUs from every test that does not ask for them: four ranks are to run on any machine."""
    import torch

    if not any(map(request.node.get_closest_marker, ("gpu", "strict"))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that a test starts
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session", autouse=True)
def remembered_rehearsals() -> Iterator[None]:
    """What the units of a decoder do is found once for each of its shapes and plans: a few tenths of a second, of which
    many runs of one model here would each take theirs.
    """
    from superstep.train.weights import model

    known: dict[str, tuple[UnitOperations, ...]] = {}
    found = model.operations_of

    def remembered(run: Resolved, specs: Any) -> tuple[UnitOperations, ...]:
        if run.decoder is None:
            return found(run, specs)
        config = run.config
        key = repr((run.decoder, run.plan, config.model, config.data, config.numerics, config.lora))
        if key not in known:
            known[key] = found(run, specs)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "operations_of", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def little_is_measured() -> Iterator[None]:
    """The ranks of a run, here or launched, measure little before they begin."""
    import measured_little
    from superstep.run import launch_ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_ranks, "rank", measured_little.rank)
        yield


@pytest.fixture
def small_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets what a test measures itself be small."""
    from superstep.engine.measure import probe_kernels

    monkeypatch.setattr(probe_kernels, "KEPT_BYTES", probe_kernels.KEPT_BYTES | {"cpu": 2**18})
    monkeypatch.setattr(probe_kernels, "SIZES", probe_kernels.SIZES | {"cpu": (2**12, 2**15)})
