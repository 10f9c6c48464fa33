"""What a run leaves of the prediction of its step, without a run."""

from __future__ import annotations

from dataclasses import replace

from superstep.cost.program.time.op_prices import MeasuredMachine
from superstep.cost.program.time.prediction_file import PredictedFrom, write_predicted_from
from superstep.hardware.chip import CopyRate, ProductRate
from superstep.hardware.cluster_file import cluster
from superstep.train.run_folder.run_paths import RunFolder

_USUAL = cluster("2xH100")
_CHIP = replace(
    _USUAL.chip,
    cores=2,
    products=(ProductRate(rate="fp32", rows=64, width=64, inner=64, flops_per_s=3e10),),
    copies=(CopyRate(bytes=1 << 20, bytes_per_s=7e9),),
)
MEASURED = MeasuredMachine(cluster=replace(_USUAL, chip=_CHIP), rate="fp32", is_host=True)


def keep_predicted_from(folder, run, *, is_weighed=False):
    """The file that a run writes when it begins; what is in it."""
    given = PredictedFrom(is_weighed=is_weighed, plan=run.config.plan, machine=MEASURED)
    RunFolder(root=folder).prediction.write_text(write_predicted_from(given), encoding="utf-8")
    return given
