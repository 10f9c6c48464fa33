"""Chips of NVIDIA: dense rates; figures with structured sparsity are halved.

A card with an optional NVLink bridge has its PCIe link here, and eight of them share a host. Failures that are not
published for a chip are None, even if those of similar chips are known.
"""

from __future__ import annotations

from dataclasses import replace

from superstep.hardware.chip import Chip
from superstep.hardware.units import GB_PER_S, GIB, tera

_SURVEY = "stas00/ml-engineering 744d01e1, compute/accelerator and network"
"""Its table of achievable products ("MAMF") gives each measured share."""
_PCIE3, _PCIE4, _PCIE5 = 16 * GB_PER_S, 32 * GB_PER_S, 64 * GB_PER_S

P100_SXM = Chip(
    name="P100-SXM",
    vendor="NVIDIA",
    year=2016,
    flops_per_s=tera(fp32=10.6, fp16=21.2),
    memory_bytes=16 * GIB,
    memory_bytes_per_s=732 * GB_PER_S,
    cores=56,
    link_bytes_per_s=80 * GB_PER_S,
    domain=8,
    host_bytes_per_s=_PCIE3,
    power_w=300.0,
    source=f"P100 data sheet (recalled); NVLink: {_SURVEY}",
)
P100_PCIE = replace(
    P100_SXM,
    name="P100-PCIe",
    flops_per_s=tera(fp32=9.3, fp16=18.7),
    link_bytes_per_s=_PCIE3,
    power_w=250.0,
    source="P100 PCIe data sheet (recalled)",
)

# Volta's tensor cores know no bf16.
V100_16GB = Chip(
    name="V100-16GB-SXM",
    vendor="NVIDIA",
    year=2017,
    flops_per_s=tera(fp32=15.7, fp16=125),
    memory_bytes=16 * GIB,
    memory_bytes_per_s=900 * GB_PER_S,
    cores=80,
    link_bytes_per_s=150 * GB_PER_S,
    domain=8,
    host_bytes_per_s=_PCIE3,
    power_w=300.0,
    source=f"V100 data sheet, 2020; NVLink: {_SURVEY}",
)
V100_32GB = replace(V100_16GB, name="V100-32GB-SXM", memory_bytes=32 * GIB)
V100_32GB_SXM3 = replace(
    V100_32GB, name="V100-32GB-SXM3", domain=16, power_w=350.0, source=f"DGX-2 data sheet (recalled); {_SURVEY}"
)
V100_16GB_PCIE = replace(
    V100_16GB,
    name="V100-16GB-PCIe",
    flops_per_s=tera(fp32=14.0, fp16=112),
    link_bytes_per_s=_PCIE3,
    power_w=250.0,
    source="V100 data sheet, 2020",
)
V100_32GB_PCIE = replace(V100_16GB_PCIE, name="V100-32GB-PCIe", memory_bytes=32 * GIB)
V100S_PCIE = replace(
    V100_32GB_PCIE,
    name="V100S-PCIe",
    flops_per_s=tera(fp32=16.4, fp16=130),
    memory_bytes_per_s=1134 * GB_PER_S,
)

A100_80GB = Chip(
    name="A100-80GB-SXM",
    vendor="NVIDIA",
    year=2020,
    flops_per_s=tera(fp32=19.5, tf32=156, fp16=312, bf16=312),
    measured_share=271.2 / 312,
    memory_bytes=80 * GIB,
    memory_bytes_per_s=2039 * GB_PER_S,
    cores=108,
    link_bytes_per_s=300 * GB_PER_S,
    domain=8,
    host_bytes_per_s=_PCIE4,
    power_w=400.0,
    # 6.50 failures in a thousand days of a node of eight.
    failures_per_hour=6.50 / 1000 / 24 / 8,
    source=f"A100 data sheet, 2021; {_SURVEY}; failures: cluster RSC-1, Kokolis 2024, arXiv:2410.21680",
)
A100_40GB = replace(
    A100_80GB,
    name="A100-40GB-SXM",
    memory_bytes=40 * GIB,
    memory_bytes_per_s=1555 * GB_PER_S,
    failures_per_hour=None,
    source=f"A100 data sheet, 2021; {_SURVEY}",
)
A100_80GB_PCIE = replace(
    A100_80GB,
    name="A100-80GB-PCIe",
    measured_share=252.9 / 312,
    memory_bytes_per_s=1935 * GB_PER_S,
    link_bytes_per_s=_PCIE4,
    power_w=300.0,
    failures_per_hour=None,
    source=f"A100 data sheet, 2021; {_SURVEY}",
)
A100_40GB_PCIE = replace(
    A100_80GB_PCIE,
    name="A100-40GB-PCIe",
    measured_share=None,
    memory_bytes=40 * GIB,
    memory_bytes_per_s=1555 * GB_PER_S,
    power_w=250.0,
    source="A100 data sheet, 2021",
)
A800 = replace(
    A100_80GB,
    name="A800-80GB-SXM",
    measured_share=None,
    link_bytes_per_s=200 * GB_PER_S,
    failures_per_hour=None,
    source="A100 with 400 GB/s of NVLink, both directions together (recalled)",
)
L40S = Chip(
    name="L40S",
    vendor="NVIDIA",
    year=2022,
    flops_per_s=tera(fp32=91.6, tf32=183, fp16=362, bf16=362, fp8=733),
    memory_bytes=48 * GIB,
    memory_bytes_per_s=864 * GB_PER_S,
    cores=142,
    link_bytes_per_s=_PCIE4,
    domain=8,
    host_bytes_per_s=_PCIE4,
    power_w=350.0,
    source=f"L40S data sheet, 2023; {_SURVEY}",
)

H100_SXM = Chip(
    name="H100-SXM",
    vendor="NVIDIA",
    year=2022,
    flops_per_s=tera(fp32=67, tf32=494.7, fp16=989.5, bf16=989.5, fp8=1979),
    measured_share=794.5 / 989.5,
    memory_bytes=80 * GIB,
    memory_bytes_per_s=3350 * GB_PER_S,
    cores=132,
    link_bytes_per_s=450 * GB_PER_S,
    domain=8,
    host_bytes_per_s=_PCIE5,
    power_w=700.0,
    # 419 unexpected interruptions in 54 days of 16,384.
    failures_per_hour=419 / (54 * 24 * 16_384),
    source=f"H100 data sheet, 2024; {_SURVEY}; failures: Llama 3, table 5, arXiv:2407.21783",
)
H100_96GB = replace(
    H100_SXM,
    name="H100-96GB-SXM-500W",
    measured_share=None,
    memory_bytes=96 * GIB,
    memory_bytes_per_s=2400 * GB_PER_S,
    power_w=500.0,
    failures_per_hour=None,
    source="pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: HBM2e, capped, the true peak unknown",
)
H100_PCIE = Chip(
    name="H100-PCIe",
    vendor="NVIDIA",
    year=2022,
    flops_per_s=tera(fp32=51, tf32=378, fp16=756, bf16=756, fp8=1513),
    memory_bytes=80 * GIB,
    memory_bytes_per_s=2000 * GB_PER_S,
    cores=114,
    link_bytes_per_s=_PCIE5,
    domain=8,
    host_bytes_per_s=_PCIE5,
    power_w=350.0,
    source=f"H100 data sheet, 2022; {_SURVEY}",
)
H100_NVL = Chip(
    name="H100-NVL",
    vendor="NVIDIA",
    year=2022,
    flops_per_s=tera(fp32=60, tf32=417.7, fp16=835.5, bf16=835.5, fp8=1671),
    memory_bytes=94 * GIB,
    memory_bytes_per_s=3900 * GB_PER_S,
    cores=132,
    link_bytes_per_s=300 * GB_PER_S,
    domain=2,
    host_bytes_per_s=_PCIE5,
    power_w=400.0,
    source="H100 data sheet, 2024: two cards and their bridge",
)
H800 = replace(
    H100_SXM,
    name="H800-SXM",
    measured_share=None,
    link_bytes_per_s=200 * GB_PER_S,
    failures_per_hour=None,
    source="H100 with 400 GB/s of NVLink, both directions together (recalled)",
)
H200 = replace(
    H100_SXM,
    name="H200-SXM",
    memory_bytes=141 * GIB,
    memory_bytes_per_s=4800 * GB_PER_S,
    failures_per_hour=None,
    source=f"H200 data sheet, 2024; {_SURVEY}, products of H100 and H200 together",
)
H200_NVL = replace(
    H100_NVL,
    name="H200-NVL",
    memory_bytes=141 * GIB,
    memory_bytes_per_s=4800 * GB_PER_S,
    link_bytes_per_s=450 * GB_PER_S,
    domain=4,
    power_w=600.0,
    source="H200 data sheet, 2024: four cards and their bridge",
)
GH200 = replace(
    H200,
    name="GH200",
    measured_share=828.6 / 989.5,
    domain=4,
    host_bytes_per_s=450 * GB_PER_S,
    power_w=900.0,
    source=f"{_SURVEY}; four superchips in a node, each with 150 GB/s to each other (recalled)",
)

B200 = Chip(
    name="B200",
    vendor="NVIDIA",
    year=2024,
    flops_per_s=tera(fp32=75, tf32=1125, fp16=2250, bf16=2250, fp8=4500, fp4=9000),
    measured_share=1745 / 2250,
    memory_bytes=180 * GIB,
    memory_bytes_per_s=8000 * GB_PER_S,
    cores=148,
    link_bytes_per_s=900 * GB_PER_S,
    domain=8,
    host_bytes_per_s=_PCIE5,
    power_w=1000.0,
    source=f"HGX B200 data sheet, 2024; {_SURVEY}; cores recalled",
)
GB200 = replace(
    B200,
    name="GB200",
    flops_per_s=tera(fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000, fp4=10_000),
    measured_share=1822 / 2500,
    memory_bytes=186 * GIB,
    domain=72,
    host_bytes_per_s=225 * GB_PER_S,
    power_w=1200.0,
    source=f"GB200 NVL72 data sheet, 2024; {_SURVEY}; two chips share 450 GB/s to their host; power recalled",
)
B300 = replace(
    B200,
    name="B300",
    year=2025,
    flops_per_s=tera(fp32=75, tf32=1125, fp16=2250, bf16=2250, fp8=4500, fp4=12_600),
    measured_share=1769 / 2250,
    memory_bytes=288 * GIB,
    host_bytes_per_s=128 * GB_PER_S,
    power_w=1300.0,
    source=f"HGX B300 data sheet, 2025; {_SURVEY}; cores as B200's",
)
GB300 = replace(
    GB200,
    name="GB300",
    year=2025,
    flops_per_s=tera(fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000, fp4=15_000),
    measured_share=None,
    memory_bytes=288 * GIB,
    power_w=1400.0,
    source=f"GB300 NVL72 data sheet, 2025; {_SURVEY}; cores as B200's; power recalled",
)

NVIDIA: tuple[Chip, ...] = (
    P100_SXM,
    P100_PCIE,
    V100_16GB,
    V100_32GB,
    V100_32GB_SXM3,
    V100_16GB_PCIE,
    V100_32GB_PCIE,
    V100S_PCIE,
    A100_40GB,
    A100_80GB,
    A100_40GB_PCIE,
    A100_80GB_PCIE,
    A800,
    L40S,
    H100_SXM,
    H100_96GB,
    H100_PCIE,
    H100_NVL,
    H800,
    H200,
    H200_NVL,
    GH200,
    B200,
    GB200,
    B300,
    GB300,
)
