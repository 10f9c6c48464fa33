"""A model that a limit of the data segment refuses trains under it with its activations on a disk."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("place", "status"), [("device", 3), ("disk", 0)])
def test_a_limit_that_refuses_the_device_lets_the_disk_train(place, status):
    command = [sys.executable, "-m", "bench.memory", f"--under={place}", "--room=252", "--layers=12", "--rows=8"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
