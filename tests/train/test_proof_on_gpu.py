"""A proof on a GPU asks its kernels for one order of sums, which they do not keep by themselves."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import small
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof import prove_tolerance
from superstep.train.proof.compare import Difference
from superstep.train.proof.prove_tolerance import prove

KINDS = ("loss", "gradient", "norm", "update")


@pytest.fixture
def ran(monkeypatch):
    """Whether each run of a proof was in one order; every run gives bits of its own, as atomics do."""
    orders = []

    def run(world, resolved, specs, batches, yardsticks):
        is_ordered = torch.are_deterministic_algorithms_enabled()
        orders.append(is_ordered)
        found = [Difference(step=0, kind=kind, name="", relative=0.0, allowed=1.0) for kind in KINDS]
        return found, {(0, "loss"): "ordered" if is_ordered else f"atomics {len(orders)}"}

    monkeypatch.setattr(prove_tolerance, "_straight", run)
    return orders


def test_a_proof_on_a_gpu_is_run_in_one_order(ran, tmp_path):
    run = resolve(small.config())
    world = World(0, 1, Device("cuda", 0))
    assert prove(world, run, (), tmp_path, reruns=True).is_deterministic is True
    assert ran == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()
    # Units of anyone's own may have operations that know no order; nothing is held against them.
    verdict = prove(world, replace(run, decoder=None), (), tmp_path, reruns=True, specs=["own"])
    assert (verdict.is_deterministic, verdict.is_proven) == (None, True)
    assert ran == [True, True, False]


def test_the_order_ends_with_the_block():
    with suppress(KeyError), Device("cuda").deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    with Device("cpu").deterministic():
        assert not torch.are_deterministic_algorithms_enabled()


def test_exact_mode_keeps_the_order_for_the_rest_of_a_process():
    Device("cpu").keep_order()
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        Device("cuda").keep_order()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_convolutions_of_fp32_keep_their_digits_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    Device("cpu").make_current()
    assert torch.backends.cudnn.allow_tf32
    Device("cuda").make_current()
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("given", "kept"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_every_verb_sets_what_cublas_needs_for_one_order(given, kept, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert main(["--version"]) == 0
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == kept
