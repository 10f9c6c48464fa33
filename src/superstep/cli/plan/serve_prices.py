"""Prices of a server's steps: measured here, taken from a cluster file, or derived from published peaks."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.cli.arguments.plan_serve import ForecastOptions
from superstep.comm.device import choose
from superstep.cost.serve import ComputeMode, rate_published
from superstep.errors import ConfigError
from superstep.hardware.cluster import Cluster
from superstep.hardware.serving_rate import ServingRate
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.benchmark_steps import calibrate
from superstep.serve.build_engine import way_name
from superstep.serve.compute.linears.quantize import format_named
from superstep.serve.compute.paged_attention import FAST_BLOCK
from superstep.serve.config import ServeConfig, fast
from superstep.serve.load_rank import setting_model
from superstep.serve.scheduling.capacity_forecast import (
    DraftSetup,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """Prices of steps.

    Attributes:
        rate: of the model.
        is_measured: whether it was measured.
        small: the draft model, with the rate of its steps.
    """

    rate: ServingRate
    is_measured: bool
    small: DraftSetup | None = None

    @property
    def small_bytes(self) -> float:
        """Weights of the draft model on a rank."""
        return 0.0 if self.small is None else self.small.weight_bytes


def price_steps(
    run: Resolved, small: Resolved | None, config: ServeConfig, cluster: Cluster | None, options: ForecastOptions
) -> StepPrices:
    """Prices of the model's steps, and of the draft model's.

    Raises:
        ConfigError: the cluster's servers were measured in other ways.
    """
    rate, is_measured = _rate(run, config, cluster, options)
    if small is None:
        return StepPrices(rate=rate, is_measured=is_measured)
    own, _ = _rate(small, fast(config), cluster, options) if config.exact else (rate, is_measured)
    guesser = DraftSetup(model=setting_model(small, config), rate=own)
    return StepPrices(rate=rate, is_measured=is_measured, small=guesser)


def _rate(
    run: Resolved, config: ServeConfig, cluster: Cluster | None, options: ForecastOptions
) -> tuple[ServingRate, bool]:
    """The rate of steps, and whether it was measured."""
    if cluster is None:
        return calibrate(run.shape, config, choose(options.plan.device, config.tp)), True
    name = way_name(config)
    known = [each for each in cluster.chip.serving if (each.way, each.tp) == (name, config.tp)]
    if known:
        return known[-1], True
    if cluster.chip.serving:
        there = ", ".join(f"{each.way} with tp = {each.tp}" for each in cluster.chip.serving)
        raise ConfigError(
            f"--cluster = '{options.cluster}' has servers measured as {there}, and none as {name} with tp = "
            f"{config.tp}; superstep measure --serve {name} --serve-tp {config.tp} measures it."
        )
    number_bytes = 4 if config.compute == "fp32" else 2
    held = float(number_bytes) if not config.quantize else format_named(config.quantize).bytes_per_weight
    way = ComputeMode(name=name, tp=config.tp, block_keys=FAST_BLOCK, is_paged=False)
    return rate_published(cluster, way, number_bytes=number_bytes, weight_bytes=held), False
