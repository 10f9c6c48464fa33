"""The disk of activations, refused before a run begins: in one line, with status 2."""

from __future__ import annotations

import pytest

from runs import make_files
from superstep.cli.main import main
from superstep.engine.measure.disk import direct_rates
from superstep.run import disk_check
from superstep.state import fsync

DISK = ["train", "run.toml", "--plan.activations", "disk"]


@pytest.fixture
def errors(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with a run's files; returns what it wrote for errors. Its status must be 2."""
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        assert main(list(words)) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert not (tmp_path / "run").exists(), "nothing was written"
        return line

    return run


def test_a_folder_in_memory(errors):
    assert fsync.file_system(fsync.Path("/dev/shm/nowhere/yet")) == "tmpfs"
    line = errors(*DISK, "--state.dir", "/dev/shm/nowhere/run")
    assert "'/dev/shm/nowhere/run' lies in memory (tmpfs); set state.dir to a folder on a disk" in line


def test_a_disk_that_is_too_small(errors, monkeypatch):
    monkeypatch.setattr(disk_check, "file_system", lambda _: "ext4")
    monkeypatch.setattr(disk_check, "free_bytes", lambda _: 1000)
    line = errors(*DISK)
    assert "its disk has 1000 B left; name a state.dir with more room" in line


def test_a_disk_that_is_too_slow(errors, monkeypatch):
    monkeypatch.setattr(disk_check, "file_system", lambda _: "ext4")
    monkeypatch.setattr(disk_check, "direct_rates", lambda _: (1e9, 1000.0))
    line = errors(*DISK)
    assert "on a faster disk, or set plan.recompute to 'full'" in line


def test_the_host_on_cpu_ranks(errors):
    line = errors("train", "run.toml", "--plan.activations", "host", "--plan.device", "cpu")
    assert "'host' on CPU ranks: the host's memory is where they compute; set plan.activations to 'disk'" in line


def test_the_host_where_no_gpu_is(errors):
    assert "'host' on CPU ranks" in errors("train", "run.toml", "--plan.activations", "host")


def test_rates_past_the_cache(tmp_path):
    read, write = direct_rates(tmp_path / "not" / "there")
    assert min(read, write) > 1e6
    assert not list(tmp_path.iterdir())
