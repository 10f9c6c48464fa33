"""A plugin of pytest: the session, and every rank that it launches, has the strict device's GPUs.

python -m pytest -p on_strict_device -m "strict or gpu" tests
"""

import importlib

from superstep.launch.fork_server import begin
from superstep.strict.load import load
from superstep.strict.settings import Settings

SETTINGS = Settings(devices=8, device_bytes=1 << 30)

load(SETTINGS)
for module in (
    "pytest",
    "superstep.train.proof.proof_inputs",
    "superstep.train.proof.prove_exact",
    "superstep.run.rank",
):
    importlib.import_module(module)
begin("superstep.train.proof.proof_inputs", is_unused=True)
