"""Peak rates from the catalogue: names as torch gives them."""

from __future__ import annotations

import pytest

from superstep.cost.mfu_peak import peak_flops
from superstep.hardware.catalogue import CHIPS, DEVICES, of_device


@pytest.mark.parametrize(
    ("name", "fp32", "bf16"),
    [
        ("Tesla V100-SXM2-32GB", 15.7e12, None),
        ("Tesla V100-PCIE-16GB", 14.0e12, None),
        ("Tesla V100S-PCIE-32GB", 16.4e12, None),
        ("NVIDIA A100-SXM4-80GB", 19.5e12, 312e12),
        ("NVIDIA A100-PCIE-40GB", 19.5e12, 312e12),
        ("NVIDIA A100 80GB PCIe", 19.5e12, 312e12),
        ("NVIDIA H100 80GB HBM3", 67e12, 989.5e12),
        ("NVIDIA H100 PCIe", 51e12, 756e12),
        ("NVIDIA H100 NVL", 60e12, 835.5e12),
        ("NVIDIA H200", 67e12, 989.5e12),
        ("NVIDIA H200 NVL", 60e12, 835.5e12),
        ("NVIDIA B200", 75e12, 2250e12),
        ("NVIDIA GB200", 80e12, 2500e12),
        ("AMD Instinct MI300X", 163.4e12, 1307.4e12),
    ],
)
def test_a_listed_device_has_its_rates(name, fp32, bf16):
    assert peak_flops(name, "fp32") == pytest.approx(fp32)
    assert peak_flops(name, "bf16") == (bf16 and pytest.approx(bf16))


@pytest.mark.parametrize(
    "name",
    [
        "CPU",
        "",
        "NVIDIA RTX A1000",
        "NVIDIA GeForce RTX 4090",
        "AMD Instinct MI250X",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_another_device_has_none(name):
    assert peak_flops(name, "bf16") is None


def test_the_most_specific_entry_of_a_name_comes_first():
    for number, (words, _) in enumerate(DEVICES):
        assert not any(earlier <= words for earlier, _ in DEVICES[:number])


@pytest.mark.parametrize(
    ("name", "chip", "gib"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM", 40),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM", 80),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe", 80),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM", 16),
        ("Tesla V100-SXM3-32GB", "V100-32GB-SXM3", 32),
        ("Tesla V100-PCIE-32GB", "V100-32GB-PCIe", 32),
        ("NVIDIA H200", "H200-SXM", 141),
    ],
)
def test_a_device_is_the_chip_with_its_memory(name, chip, gib):
    assert of_device(name) == CHIPS[chip]
    assert CHIPS[chip].memory_bytes == gib * 2**30


def test_every_entry_leads_to_a_chip_of_its_own_words():
    for words, name in DEVICES:
        assert of_device(" ".join(words)) == CHIPS[name]
