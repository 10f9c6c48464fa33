"""The catalogue of chips: figures possible together and as they were published, names that are found."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from superstep.errors import ConfigError
from superstep.hardware.catalogue import ALIASES, CHIPS, chip, key_of
from superstep.hardware.network import NETWORKS, usual_cluster
from superstep.hardware.plausibility import check_cluster

PUBLISHED = Path(__file__).parents[1] / "data" / "published"
FORMATS = (("fp32",), ("tf32",), ("fp16", "bf16"), ("fp8",), ("fp4",))
"""From wide to narrow."""


def rows(name):
    with (PUBLISHED / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(params=CHIPS.values(), ids=CHIPS)
def listed(request):
    return request.param


def test_a_narrower_format_is_never_slower(listed):
    peaks = [max(found) for group in FORMATS if (found := [listed.peak(rate) or 0.0 for rate in group]) != [0.0]]
    peaks = [peak for peak in peaks if peak]
    assert peaks
    assert peaks == sorted(peaks)


def test_half_the_bits_are_twice_as_fast_on_a_gpu(listed):
    if listed.vendor in ("NVIDIA", "AMD") and listed.peak("fp8"):
        assert listed.peak("fp8") == pytest.approx(2 * listed.peak("bf16"), rel=0.02)
    if listed.peak("fp4"):
        assert listed.peak("fp4") >= 2 * listed.peak("fp8")
    if listed.peak("bf16") and listed.peak("fp16"):
        assert listed.peak("bf16") == listed.peak("fp16")


def test_the_figures_of_a_chip_are_possible_together(listed):
    usual = usual_cluster(listed, listed.domain)
    assert check_cluster(usual) == usual
    # What leaves a domain goes through the chip's own port, which is no faster than its fast links.
    assert usual.network_bytes_per_s <= usual.link_bytes_per_s <= listed.memory_bytes_per_s
    assert listed.source


def test_the_figures_are_those_that_were_published():
    wrong = []
    for row in rows("devices.csv"):
        found = chip(row["device"].partition(" (")[0])
        peaks = {rate: found.peak(rate) for rate in ("bf16", "fp16", "fp8", "fp4")}
        pairs = [(row[f"{rate}_dense_tflops"], peak, 1e12) for rate, peak in peaks.items()]
        pairs += [(row["mem_gb"], found.memory_bytes, 2**30), (row["mem_bw_GBps"], found.memory_bytes_per_s, 1e9)]
        pairs += [(row["tdp_w"], found.power_w, 1.0), (row["sms_or_units"], found.cores, 1.0)]
        if row["mamf_bf16_tflops"]:
            pairs.append((row["mamf_bf16_tflops"], found.measured_share * found.peak("bf16"), 1e12))
        # Data sheets print more digits than the table has; links of a TPU are counted one by one there.
        wrong += [
            (row["device"], told, had)
            for told, had, unit in pairs
            if told and (had is None or had / unit != pytest.approx(float(told), rel=0.025))
        ]
        if told := row["scaleup_GBps_per_dir"]:
            links = found.link_bytes_per_s / 1e9 / float(told)
            wrong += (
                [(row["device"], told, links)]
                if links not in ((1, 4, 6) if row["vendor"] == "Google" else (1,))
                else []
            )
    assert wrong == []


def test_every_published_run_names_a_chip_of_its_memory():
    found = {(row["gpu"], row["gpu_mem_gb"]) for row in rows("runs.csv")}
    assert len(found) > 10
    assert {(name, gb) for name, gb in found if chip(name).memory_bytes != float(gb) * 2**30} == set()


def test_failures_are_those_of_the_runs_that_told_them():
    assert chip("H100").failures_per_hour * 16_384 * 54 * 24 == pytest.approx(419)
    # Kokolis 2024: a job on 16,384 of RSC-1 lasts 1.8 hours.
    assert 1 / (chip("A100").failures_per_hour * 16_384) == pytest.approx(1.8, rel=0.01)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", "H100-SXM"),
        ("h100-sxm", "H100-SXM"),
        ("A100-80GB-SXM", "A100-80GB-SXM"),
        ("a100 80gb", "A100-80GB-SXM"),
        ("A100_SXM4_40GB", "A100-40GB-SXM"),
        ("TPU v5e", "TPUv5e"),
        ("v5e", "TPUv5e"),
        ("V100-16GB", "V100-16GB-SXM"),
        ("H100 SXM 500W 96GB HBM2e", "H100-96GB-SXM-500W"),
        ("gb200", "GB200"),
    ],
)
def test_a_chip_is_found_as_people_write_it(name, found):
    assert chip(name).name == found


def test_no_name_stands_for_two_chips():
    assert ALIASES.keys() == CHIPS.keys() == NETWORKS.keys()
    keys = [key_of(name) for chip, names in ALIASES.items() for name in (chip, *names)]
    assert [key for key in set(keys) if keys.count(key) > 1] == []
    assert [name for name, found in CHIPS.items() if found.name != name] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("H10O", "chip = 'H10O' is not in the catalogue; did you mean 'H100'?"),
        ("A100-SXM-8GB", "did you mean 'A100-SXM-80GB'?"),
        ("tpu v5ee", "did you mean 'TPUv5e'?"),
        ("abacus", "choose one of P100-SXM, "),
        ("", "choose one of P100-SXM, "),
    ],
)
def test_an_unknown_chip_is_refused_with_the_nearest(name, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        chip(name)
