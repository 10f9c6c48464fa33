"""The demo of superstep train: on any machine, and with a proof and a sample at its end."""

from __future__ import annotations

from dataclasses import replace

from superstep.cli import sample
from superstep.cli.arguments.sample import SampleOptions
from superstep.cli.prove.within_tolerance import prove_one
from superstep.comm.device import gpus
from superstep.plan.resolution.resolve import Resolved
from superstep.run.job import TrainJob


def demo_on_few_gpus(run: Resolved) -> Resolved:
    """The demo shows its two ranks on any machine: on the CPU, if there are GPUs, but not enough."""
    ranks, plan = run.plan.mesh.world, run.config.plan
    if plan.device is not None or not 0 < gpus() < ranks:
        return run
    _say(f"{ranks} ranks and fewer GPUs: the demo computes on the CPU; with --plan.dp 1 it takes the GPU.")
    return replace(run, config=replace(run.config, plan=replace(plan, device="cpu")))


def after_demo(job: TrainJob) -> int:
    """Prove the demo's layout and show a sample; the exit status."""
    root = job.folder.root
    _say("\nDoes this layout compute what one device would?")
    status = prove_one(job.run, job.corpus, steps=2)
    _say('\nA sample, from "def ":\n')
    _say(sample.text(root, "def ", SampleOptions(tokens=120, temperature=0.7)))
    _say(
        f"\nResults: {root}\n"
        f"  metrics      {root}/metrics.jsonl, and tensorboard --logdir {root}/tensorboard\n"
        f"  checkpoints  {root}/checkpoints\n"
        f"  the step     superstep view {root} --text\n"
        f'  more text    superstep sample {root} "def "'
    )
    return status


def _say(text: str) -> None:
    print(text, flush=True)
