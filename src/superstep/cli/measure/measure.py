"""superstep measure: this machine's rates: a cluster file, a table, and a roofline with a model on it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from superstep.cli.arguments.measure import MeasureOptions, run_of
from superstep.cli.arguments.measure import read as read_arguments
from superstep.cli.flags.new_file import write_new_file
from superstep.cli.measure.measure_rank import measure_rank, operations_of
from superstep.cli.measure.measure_text import model_points, rate_lines, roof_of
from superstep.cli.measure.roofline import draw_svg, draw_text
from superstep.cli.serve.serve_settings import kernels_folder
from superstep.comm.device import choose, gpus
from superstep.engine.measure.disk import SIZE, disk_rates
from superstep.engine.measure.probe_machine import distinct
from superstep.errors import ConfigError
from superstep.hardware.cluster_file import write_cluster
from superstep.hardware.host import cores
from superstep.hardware.serving_rate import ServingRate
from superstep.launch.ranks import launch_on
from superstep.observe.number_format import bytes_text, seconds_text
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.benchmark_steps import USUAL, calibrate
from superstep.serve.config import ServeConfig
from superstep.state.fsync import free_bytes
from superstep.train.weights.model import operations


def main(argv: Sequence[str]) -> int:
    """Measure, print and write."""
    options = read_arguments(argv)
    place = Path(options.out).parent if options.out else Path(tempfile.gettempdir())
    _require_room(place)
    most = max(2, cores()) if choose(options.device) == "cpu" else gpus()
    ranks = most if options.ranks is None else options.ranks
    run = run_of(options.model, options.dtype)
    units = operations(run)
    assert units is not None, "our own decoder always can be seen"
    grid = operations_of(choose(options.device), is_quick=options.quick)
    start_s = time.perf_counter()
    measurement = launch_on(
        options.device, ranks, measure_rank, run, (*distinct(units), *grid), 0.005 if options.quick else 0.02
    )
    with tempfile.TemporaryDirectory(dir=place) as folder:
        read, write = disk_rates(Path(folder))
    cluster = replace(measurement.cluster, disk_read_bytes_per_s=read, disk_write_bytes_per_s=write)
    ways = [serving_rate(run, way, options) for way in options.serve]
    cluster = replace(cluster, chip=replace(cluster.chip, serving=tuple(ways)))
    measurement = replace(measurement, cluster=cluster)
    points, roof = list(model_points(run, units, measurement)), roof_of(measurement)
    _say("\n".join([*rate_lines(measurement), "", *draw_text(roof, points)]))
    _say(f"\nmeasured in {seconds_text(time.perf_counter() - start_s)}, on {ranks} ranks at once")
    if options.plot:
        write_new_file(Path(options.plot), draw_svg(roof, points))
        _say(f"picture in {options.plot}")
    if options.out:
        write_new_file(Path(options.out), write_cluster(cluster))
        _say(f"cluster file in {options.out}")
    return 0


def _require_room(folder: Path) -> None:
    """Check that the test file of the disk's measurement fits, before anything is measured.

    Raises:
        ConfigError: it does not.
    """
    free = free_bytes(folder)
    if free < SIZE:
        raise ConfigError(
            f"the disk is measured with a file of {bytes_text(SIZE)} in '{folder}', which has {bytes_text(free)} left; "
            f"make room, or name a file of a disk with more room by --out."
        )


def serving_rate(run: Resolved, way: str, options: MeasureOptions) -> ServingRate:
    """The rate of a server's steps here, in one format."""
    if run.decoder is None:
        raise ConfigError("--serve measures servers of the decoder; leave --model to a named size.")
    dtype, _, special = way.partition("-")
    serve = ServeConfig(
        compute="bf16" if dtype == "bf16" else "fp32",
        exact=special == "exact",
        quantize="" if special == "exact" else special,
        tp=options.serve_tp,
        kernels=kernels_folder(None),
    )
    # The demo's weights stay in a cache; the stored rates of other models are measured on larger ones.
    return calibrate(USUAL if options.model == "demo" else run.decoder, serve, choose(options.device, options.serve_tp))


def _say(text: str) -> None:
    print(text, flush=True, file=sys.stdout)
