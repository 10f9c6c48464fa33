"""Chips of AMD, Google, Intel and AWS: dense rates.

A TPU's cores are its matrix units, Gaudi's its matrix engines, Trainium's its NeuronCores. A TPU's link is the sum of
those to its four or six neighbours.
"""

from __future__ import annotations

from dataclasses import replace

from superstep.hardware.chip import Chip
from superstep.hardware.units import GB_PER_S, GBIT_PER_S, GIB, tera

_SURVEY = "stas00/ml-engineering 744d01e1, compute/accelerator and network"
_BOOK = "jax-ml/scaling-book 0819a7d8, tpus.md"
_PCIE5 = 64 * GB_PER_S

MI250X = Chip(
    name="MI250X",
    vendor="AMD",
    year=2021,
    flops_per_s=tera(fp32=95.7, fp16=383, bf16=383),
    memory_bytes=128 * GIB,
    memory_bytes_per_s=3280 * GB_PER_S,
    cores=220,
    link_bytes_per_s=50 * GB_PER_S,
    domain=4,
    host_bytes_per_s=72 * GB_PER_S,
    power_w=560.0,
    source=f"MI250X data sheet, 2021, fp32 by the matrix cores; {_SURVEY}; one link; node, host: Frontier user guide",
)
MI300X = Chip(
    name="MI300X",
    vendor="AMD",
    year=2023,
    flops_per_s=tera(fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9),
    measured_share=668.4 / 1307.4,
    memory_bytes=192 * GIB,
    memory_bytes_per_s=5300 * GB_PER_S,
    cores=304,
    link_bytes_per_s=448 * GB_PER_S,
    domain=8,
    host_bytes_per_s=_PCIE5,
    power_w=750.0,
    source=f"MI300X data sheet, 2023, fp32 by the matrix cores; {_SURVEY}; seven links of 64 GB/s (recalled)",
)
MI325X = replace(
    MI300X,
    name="MI325X",
    measured_share=784.9 / 1307.4,
    memory_bytes=256 * GIB,
    memory_bytes_per_s=6000 * GB_PER_S,
    power_w=1000.0,
    source=f"MI325X data sheet, 2024: MI300X's compute; {_SURVEY}; links recalled",
)
MI355X = Chip(
    name="MI355X",
    vendor="AMD",
    year=2025,
    flops_per_s=tera(fp32=157.3, fp16=2500, bf16=2500, fp8=5000, fp4=10_100),
    measured_share=1565 / 2500,
    memory_bytes=288 * GIB,
    memory_bytes_per_s=8000 * GB_PER_S,
    cores=256,
    link_bytes_per_s=537 * GB_PER_S,
    domain=8,
    host_bytes_per_s=_PCIE5,
    power_w=1400.0,
    source=f"MI355X data sheet, 2025; {_SURVEY}; links recalled",
)

TPU_V3 = Chip(
    name="TPUv3",
    vendor="Google",
    year=2018,
    flops_per_s=tera(bf16=123),
    memory_bytes=32 * GIB,
    memory_bytes_per_s=900 * GB_PER_S,
    cores=4,
    link_bytes_per_s=4 * 100 * GB_PER_S,
    domain=1024,
    host_bytes_per_s=15 * GB_PER_S,
    power_w=450.0,
    source=f"Patterson 2021, arXiv:2104.10350; {_BOOK}, which has 140 TFLOP/s",
)
TPU_V4 = Chip(
    name="TPUv4",
    vendor="Google",
    year=2021,
    flops_per_s=tera(bf16=275),
    memory_bytes=32 * GIB,
    memory_bytes_per_s=1200 * GB_PER_S,
    cores=8,
    link_bytes_per_s=6 * 45 * GB_PER_S,
    domain=4096,
    host_bytes_per_s=15 * GB_PER_S,
    power_w=192.0,
    source=f"{_BOOK}; {_SURVEY}; power: Jouppi 2023, arXiv:2304.01433 (recalled)",
)
TPU_V5E = Chip(
    name="TPUv5e",
    vendor="Google",
    year=2023,
    flops_per_s=tera(bf16=197),
    memory_bytes=16 * GIB,
    memory_bytes_per_s=810 * GB_PER_S,
    cores=4,
    link_bytes_per_s=4 * 45 * GB_PER_S,
    domain=256,
    host_bytes_per_s=15 * GB_PER_S,
    source=f"{_BOOK}; {_SURVEY}; other pages have 819 GB/s of memory and 50 GB/s a link",
)
TPU_V5P = Chip(
    name="TPUv5p",
    vendor="Google",
    year=2023,
    flops_per_s=tera(bf16=459),
    memory_bytes=95 * GIB,
    memory_bytes_per_s=2760 * GB_PER_S,
    cores=8,
    link_bytes_per_s=6 * 90 * GB_PER_S,
    domain=8960,
    host_bytes_per_s=15 * GB_PER_S,
    source=f"{_BOOK}; {_SURVEY}",
)
TPU_V6E = Chip(
    name="TPUv6e",
    vendor="Google",
    year=2024,
    flops_per_s=tera(bf16=918, fp8=918),
    memory_bytes=32 * GIB,
    memory_bytes_per_s=1600 * GB_PER_S,
    cores=2,
    link_bytes_per_s=4 * 90 * GB_PER_S,
    domain=256,
    host_bytes_per_s=32 * GB_PER_S,
    source=f"Cloud TPU documentation, v6e; {_BOOK}; {_SURVEY}",
)
TPU_V7X = Chip(
    name="TPUv7x",
    vendor="Google",
    year=2025,
    flops_per_s=tera(bf16=2307, fp8=4614),
    memory_bytes=192 * GIB,
    memory_bytes_per_s=7380 * GB_PER_S,
    cores=4,
    link_bytes_per_s=600 * GB_PER_S,
    domain=9216,
    host_bytes_per_s=32 * GB_PER_S,
    source=f"Cloud TPU documentation, TPU7x; {_SURVEY}; matrix units, two a TensorCore, and host as v6e's",
)

GAUDI3 = Chip(
    name="Gaudi3",
    vendor="Intel",
    year=2024,
    flops_per_s=tera(bf16=1677, fp8=1677),
    measured_share=1243 / 1677,
    memory_bytes=128 * GIB,
    memory_bytes_per_s=3700 * GB_PER_S,
    cores=8,
    # 21 of its 24 ports lead to the other seven of a node.
    link_bytes_per_s=21 * 200 * GBIT_PER_S,
    domain=8,
    host_bytes_per_s=_PCIE5,
    power_w=900.0,
    source=f"{_SURVEY}; the white paper has 1,835 TFLOP/s; ports: Gaudi 3 white paper, 2024 (recalled)",
)
TRAINIUM2 = Chip(
    name="Trainium2",
    vendor="AWS",
    year=2024,
    flops_per_s=tera(fp32=181, tf32=667, fp16=667, bf16=667, fp8=1299),
    memory_bytes=96 * GIB,
    memory_bytes_per_s=2900 * GB_PER_S,
    cores=8,
    # 1.28 TB/s, both directions together.
    link_bytes_per_s=640 * GB_PER_S,
    domain=16,
    host_bytes_per_s=_PCIE5,
    source=f"AWS Neuron documentation, Trainium2; {_SURVEY}; links, node and host recalled",
)

OTHERS: tuple[Chip, ...] = (
    MI250X,
    MI300X,
    MI325X,
    MI355X,
    TPU_V3,
    TPU_V4,
    TPU_V5E,
    TPU_V5P,
    TPU_V6E,
    TPU_V7X,
    GAUDI3,
    TRAINIUM2,
)
