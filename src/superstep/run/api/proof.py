"""``superstep.prove``: the proof of a layout, from Python."""

from __future__ import annotations

from functools import partial

from superstep.comm.device import choose
from superstep.data.preparation.prepare import prepare
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.run.prove_layout import proof_case, prove_layout
from superstep.run.tokens import proof_tokens
from superstep.train.proof.verdict import ProofVerdict
from superstep.train.weights.model import resolve_config, vocab_of


def prove(config: RunConfig, *, steps: int = 2) -> ProofVerdict:
    """Compare a layout with one process in fp32, tensor by tensor, as ``superstep prove`` does.

    On GPUs set CUBLAS_WORKSPACE_CONFIG=:4096:8 before, as the command does: it decides the order of cuBLAS's sums.

    Args:
        config: the run with the layout.
        steps: to compare.
    """
    if steps < 1:
        raise ConfigError(f"--steps = {steps} must be at least 1.")
    run = resolve_config(config)
    choose(config.plan.device, run.plan.mesh.world)  # fails before the reference has run for minutes
    make = partial(prepare, config.data, vocab_of(run))
    with proof_tokens(run, make) as corpus, proof_case(run, corpus, steps=steps) as case:
        return prove_layout(case)
