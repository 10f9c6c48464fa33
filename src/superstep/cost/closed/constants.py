"""Constants: every fitted number, in one table.

None depends on a source, a model, a framework or a cluster: each belongs to a generation of chips, a kind of attention
kernel or a property of software. Before the fit each had the value ``before``, which papers measured or a round guess
gave; ``python -m bench.published --fit`` fits it to the published runs within ``spread`` (of its logarithm), and prints
this table again. A constant on which no run depends is not changed.

    products, products8, products4   large products' share of the peak, in 16, 8 and 4 bits
    grouped                          of that, the share that products of many experts at once reach
    flash-n.forward, .backward       fused attention's share of the 16-bit peak, counting the causal half
    memory, link, network, send      shares of published rates; send: of a transfer between two ranks
    exchange                         of the links' rates, the share that an exchange of experts' tokens reaches
    ramp                             the inner dim at which a product reaches half its rate
    hop_s                            seconds of one step of a collective between domains
    power                            a chip with less power for its peak than usual runs at that share to this exponent
    launch_s                         seconds between two operations on the device
    eager                            bytes that unfused operations move, over what their definition says
    host_bytes_per_s                 one rank's optimizer on the host
    hidden                           share of traffic that runs beside compute: shards (ZeRO 3), data (gradients, where
                                     the software overlaps them) or bucket (where it does not), tensor, transfers;
                                     experts: their exchange, where the software does;
                                     input-gradients: reduced beside the weights' products
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """One number.

    Attributes:
        value: in use.
        before: its value before the fit.
        spread: how far the fit may move it: the standard deviation of its logarithm.
        error: of the estimate, likewise.
        rows: the number of published runs that depend on it.
        stacks: their leak groups: sources of one software or one cluster.
        is_alone: whether it rests on one of them; its spread was then halved.
    """

    value: float
    before: float
    spread: float
    error: float | None = None
    rows: int = 0
    stacks: tuple[str, ...] = ()
    is_alone: bool = False


CONSTANTS: dict[str, Constant] = {
    "products.pascal": Constant(0.7, 0.7, 0.1),
    "products.volta": Constant(0.7515, 0.65, 0.2, error=0.032, rows=40, stacks=("megatron_selene", "dlperf")),
    "products.ampere": Constant(
        0.7898,
        0.78,
        0.1,
        error=0.011,
        rows=691,
        stacks=("megatron_selene", "mtnlg", "aleph", "nemo_a100", "internevo", "zero_bubble", "llm_foundry"),
    ),
    "products.hopper": Constant(
        0.6702,
        0.7,
        0.1,
        error=0.022,
        rows=154,
        stacks=("llm_foundry", "megatron_bridge", "nemo2024", "torchtitan_h200", "prime_rl", "stas00"),
    ),
    "products.blackwell": Constant(
        0.6397, 0.7, 0.1, error=0.061, rows=47, stacks=("megatron_bridge", "prime_rl", "stas00")
    ),
    "products.blackwell-ultra": Constant(
        0.6994, 0.7, 0.1, error=0.05, rows=25, stacks=("megatron_bridge",), is_alone=True
    ),
    "products.tpu": Constant(0.8672, 0.85, 0.1, error=0.017, rows=46, stacks=("maxtext",), is_alone=True),
    "products.cdna": Constant(0.48, 0.48, 0.1),
    "products.other": Constant(0.7, 0.7, 0.1),
    "products8.hopper": Constant(
        0.521, 0.58, 0.1, error=0.02, rows=87, stacks=("llm_foundry", "megatron_bridge", "nemo2024", "torchtitan_h200")
    ),
    "products8.blackwell": Constant(
        0.5293, 0.55, 0.1, error=0.043, rows=52, stacks=("megatron_bridge",), is_alone=True
    ),
    "products8.blackwell-ultra": Constant(
        0.5634, 0.55, 0.1, error=0.046, rows=27, stacks=("megatron_bridge",), is_alone=True
    ),
    "products8.cdna": Constant(0.4, 0.4, 0.1),
    "products8.other": Constant(0.5, 0.5, 0.1),
    "products4.blackwell": Constant(0.348, 0.35, 0.15, error=0.071, rows=4, stacks=("megatron_bridge",), is_alone=True),
    "products4.blackwell-ultra": Constant(
        0.349, 0.35, 0.15, error=0.071, rows=4, stacks=("megatron_bridge",), is_alone=True
    ),
    "products4.other": Constant(0.35, 0.35, 0.15),
    "flash-1.forward.ampere": Constant(
        0.3223, 0.28, 0.15, error=0.066, rows=207, stacks=("aleph", "llm_foundry"), is_alone=True
    ),
    "flash-1.backward.ampere": Constant(
        0.3074, 0.25, 0.15, error=0.041, rows=231, stacks=("aleph", "llm_foundry"), is_alone=True
    ),
    "flash-1.forward.hopper": Constant(0.2291, 0.25, 0.2, error=0.09, rows=76, stacks=("llm_foundry",), is_alone=True),
    "flash-1.backward.hopper": Constant(
        0.1711, 0.22, 0.2, error=0.054, rows=77, stacks=("llm_foundry",), is_alone=True
    ),
    "flash-2.forward.ampere": Constant(
        0.5227, 0.55, 0.12, error=0.12, rows=91, stacks=("aleph", "internevo", "maxtext")
    ),
    "flash-2.backward.ampere": Constant(
        0.356, 0.45, 0.12, error=0.097, rows=313, stacks=("aleph", "nemo_a100", "internevo", "maxtext")
    ),
    "flash-2.forward.hopper": Constant(
        0.3689, 0.36, 0.12, error=0.11, rows=13, stacks=("torchtitan_h200", "prime_rl", "nemo2024")
    ),
    "flash-2.backward.hopper": Constant(
        0.3052, 0.32, 0.12, error=0.071, rows=13, stacks=("torchtitan_h200", "prime_rl", "nemo2024")
    ),
    "flash-2.forward.blackwell": Constant(0.1676, 0.2, 0.2, error=0.086, rows=2, stacks=("prime_rl",), is_alone=True),
    "flash-2.backward.blackwell": Constant(0.1375, 0.18, 0.2, error=0.064, rows=2, stacks=("prime_rl",), is_alone=True),
    "flash-3.forward.ampere": Constant(0.55, 0.55, 0.12),
    "flash-3.backward.ampere": Constant(0.45, 0.45, 0.12),
    "flash-3.forward.hopper": Constant(
        0.7157, 0.6, 0.12, error=0.1, rows=50, stacks=("megatron_bridge", "nemo2024", "prime_rl", "stas00")
    ),
    "flash-3.backward.hopper": Constant(
        0.6204, 0.5, 0.12, error=0.075, rows=76, stacks=("megatron_bridge", "nemo2024", "prime_rl", "stas00")
    ),
    "flash-3.forward.blackwell": Constant(
        0.6736, 0.62, 0.12, error=0.054, rows=90, stacks=("megatron_bridge", "stas00"), is_alone=True
    ),
    "flash-3.backward.blackwell": Constant(
        0.5619, 0.5, 0.12, error=0.046, rows=106, stacks=("megatron_bridge", "stas00"), is_alone=True
    ),
    "memory": Constant(
        0.9235,
        0.88,
        0.04,
        error=0.03,
        rows=998,
        stacks=(
            "megatron_selene",
            "mtnlg",
            "llm_foundry",
            "aleph",
            "megatron_bridge",
            "nemo2024",
            "nemo_a100",
            "torchtitan_h200",
            "internevo",
            "zero_bubble",
            "maxtext",
            "dlperf",
            "prime_rl",
            "stas00",
        ),
    ),
    "grouped": Constant(0.882, 0.9, 0.1, error=0.049, rows=72, stacks=("megatron_bridge", "prime_rl"), is_alone=True),
    "exchange": Constant(0.8058, 0.8, 0.2, error=0.085, rows=71, stacks=("megatron_bridge",), is_alone=True),
    "ramp": Constant(
        69.35,
        96,
        0.5,
        error=0.46,
        rows=984,
        stacks=(
            "megatron_selene",
            "mtnlg",
            "llm_foundry",
            "aleph",
            "megatron_bridge",
            "nemo2024",
            "nemo_a100",
            "torchtitan_h200",
            "internevo",
            "zero_bubble",
            "maxtext",
            "dlperf",
            "prime_rl",
            "stas00",
        ),
    ),
    "link": Constant(
        0.6059,
        0.75,
        0.08,
        error=0.056,
        rows=608,
        stacks=(
            "megatron_selene",
            "mtnlg",
            "llm_foundry",
            "aleph",
            "megatron_bridge",
            "nemo2024",
            "nemo_a100",
            "torchtitan_h200",
            "internevo",
            "maxtext",
            "dlperf",
            "prime_rl",
            "stas00",
        ),
    ),
    "network": Constant(
        0.7726,
        0.85,
        0.05,
        error=0.035,
        rows=152,
        stacks=(
            "megatron_selene",
            "megatron_bridge",
            "nemo2024",
            "nemo_a100",
            "internevo",
            "maxtext",
            "dlperf",
            "llm_foundry",
        ),
    ),
    "send": Constant(
        0.8659,
        0.5,
        0.25,
        error=0.17,
        rows=123,
        stacks=("megatron_selene", "aleph", "megatron_bridge", "nemo2024", "nemo_a100", "zero_bubble", "dlperf"),
    ),
    "hop_s": Constant(
        1.032e-05,
        1.2e-05,
        0.4,
        error=0.1,
        rows=288,
        stacks=(
            "megatron_selene",
            "llm_foundry",
            "aleph",
            "megatron_bridge",
            "nemo2024",
            "nemo_a100",
            "internevo",
            "maxtext",
            "dlperf",
        ),
        is_alone=True,
    ),
    "power": Constant(0.35, 0.35, 0.2),
    "launch_s": Constant(
        4.859e-06,
        4e-06,
        0.12,
        error=0.11,
        rows=329,
        stacks=("llm_foundry", "aleph", "megatron_bridge", "nemo2024", "zero_bubble", "prime_rl", "stas00"),
    ),
    "eager": Constant(2.2, 1.5, 0.25, error=0.043, rows=638, stacks=("llm_foundry", "aleph", "prime_rl", "stas00")),
    "host_bytes_per_s": Constant(1.735e10, 1.6e10, 0.2, error=0.039, rows=12, stacks=("stas00",), is_alone=True),
    "hidden.shards": Constant(
        0.7485,
        0.75,
        0.15,
        error=0.068,
        rows=209,
        stacks=(
            "megatron_selene",
            "llm_foundry",
            "megatron_bridge",
            "torchtitan_h200",
            "maxtext",
            "prime_rl",
            "stas00",
        ),
    ),
    "hidden.data": Constant(
        0.6541, 0.8, 0.2, error=0.13, rows=75, stacks=("llm_foundry", "megatron_bridge", "nemo2024", "dlperf", "stas00")
    ),
    "hidden.bucket": Constant(
        0.1571,
        0.2,
        0.4,
        error=0.19,
        rows=75,
        stacks=("megatron_selene", "aleph", "nemo_a100", "internevo", "dlperf"),
        is_alone=True,
    ),
    "hidden.tensor": Constant(0.8, 0.8, 0.15, error=0.099, rows=91, stacks=("megatron_bridge", "nemo2024", "maxtext")),
    "hidden.input-gradients": Constant(
        0.1394,
        0.25,
        0.4,
        error=0.31,
        rows=89,
        stacks=("megatron_selene", "mtnlg", "nemo_a100", "internevo", "dlperf", "megatron_bridge", "nemo2024"),
    ),
    "hidden.transfers": Constant(
        0.5642, 0.5, 0.3, error=0.14, rows=67, stacks=("megatron_bridge", "nemo2024"), is_alone=True
    ),
    "hidden.experts": Constant(0.75, 0.75, 0.15),
}
