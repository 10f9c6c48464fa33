"""A model served on an emulated GPU says what it says on a CPU: the same tokens."""

from pathlib import Path

import pytest

import low_rank
from strict_ranks import gpu_of
from superstep.runtime.device import Device
from superstep.serve.config import ServeConfig
from superstep.serve.load import open_engine
from superstep.serve.offline import generate
from superstep.serve.request import Sampling

pytestmark = pytest.mark.strict

PROMPTS = [[(7 * n + 3 * k) % low_rank.VOCAB for k in range(length)] for n, length in enumerate((1, 15, 16, 33))]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)


def config(*, exact):
    return ServeConfig(compute="fp32", exact=exact, context_tokens=64, pages=64)


def answers(folder, serve, device):
    engine = open_engine(Path(folder), serve, device=device)
    try:
        return [answer.ids for answer in generate(engine, PROMPTS, GREEDY)]
    finally:
        engine.end()


def serve_on_cpu(rank, world, folder):
    return answers(folder, config(exact=False), Device("cpu"))


def serve_on_gpu(rank, world, folder, exact):
    """What it says, and what the device saw."""
    with gpu_of(rank, world) as (gpu, look):
        return answers(folder, config(exact=exact), gpu), look()


@pytest.mark.parametrize("exact", [False, True])
def test_the_answers_are_those_of_a_cpu(pool, tmp_path, exact):
    folder = low_rank.write_model(tmp_path)
    (wanted,) = pool.run(1, serve_on_cpu, folder)
    ((found, seen),) = pool.run(1, serve_on_gpu, folder, exact, timeout_s=60)
    assert found == wanted
    assert seen.races == {}
    assert seen.contexts == {0}
