"""Bytes of a run of reinforcement learning, as they are predicted before it begins and as its ranks take them.

    python -m bench.tune_memory                  all cases
    python -m bench.tune_memory "tp=2 exact"     one of them

Counted is what torch's allocator hands out on each rank, from before the trainer is there to the end of the run: every
tensor, and what operations make within themselves. The process's own memory is not: libraries and pages that the system
keeps are several times a model that a laptop trains. What is compared is the fullest rank's peak.

torch's profiler counts in the thread that began it alone. A sampler's weights are read, and laid out, by another, which
the rank waits for as it wakes; while it is counted, the rank reads them itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from bench.machine import write_result
from superstep.comm.objects import gather
from superstep.data.tokenizer import train_tokenizer
from superstep.grade.config import GradeConfig
from superstep.launch.ranks import World, launch_apart
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import save_weights
from superstep.model.unit import global_tensors
from superstep.plan.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
)
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.resolution.resolve import resolve
from superstep.serve.files import reader
from superstep.train.run_folder.run_paths import RunFolder
from superstep.tune.program.memory import peaks
from superstep.tune.rl.colocated import reinforce
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.initial_policy import with_start
from superstep.tune.rl.job import RlJob, job_of, serve_of
from superstep.tune.rl.memory_budget import sizes_of

TASKS = """
from superstep.grade.task import Task


def task(index, seed):
    return Task(prompt="to be " + "or not " * (40 + index % 5))


def grade(task, rollout):
    return sum(c in "aeiou " for c in rollout.answer) / (len(rollout.answer) or 1)
"""
SHAPE = ModelConfig(name="tiny", layers=4, width=256, heads=8, kv_heads=4, ffn=768)
LAYOUTS: dict[str, dict] = {"dp=1": {}, "dp=2 zero=2": {"dp": 2, "zero": 2}, "tp=2": {"tp": 2}}
ALLOWED = 0.05


class InPlace:
    """What stands for a thread of a reader: it runs where it is started."""

    def __init__(self, *, target: Callable[[], None], **named: object) -> None:
        self.start = target


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """What is handed out within the block; told behind it is the most that was there at once."""
    with (
        mock.patch.object(reader, "Thread", InPlace),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen,
    ):
        yield lambda: _highest(seen)


def _highest(seen: profile) -> int:
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in changes:
        now += size
        most = max(most, now)
    return most


def taken(world: World, job: RlJob) -> int:
    """The peak of the fullest rank."""
    with counted() as peak:
        reinforce(world, job)
    return max(gather(peak(), int))


def predicted(job: RlJob) -> tuple[int, dict[str, int]]:
    """What the program says, and its parts."""
    pages = job.rollout.pages
    assert pages is not None
    serve = serve_of(job.run, job.rollout, job.kernels)
    sizes = sizes_of(job.run, serve, job.rl, pages=pages, gives_back=False)
    parts = {name: getattr(sizes, name) for name in ("weights", "keys", "answering", "training", "step")}
    return peaks(job.program, sizes)["ranks"].bytes, parts


def start(folder: Path, model: ModelConfig = SHAPE) -> Path:
    """A model of random weights, its tokenizer, and tasks."""
    tokenizer = train_tokenizer(["To be, or not to be: that is the question.\n"] * 20, 400)
    shape = shape_of(replace(model, vocab=tokenizer.vocab))
    decoder = Decoder(shape)
    with torch.no_grad():
        for param in decoder.parameters():
            param.normal_(0, 0.05)
    save_weights(folder, global_tensors(decoder, units(shape)), shape)
    tokenizer.save(folder / "tokenizer.json")
    (folder / "tasks.py").write_text(TASKS, encoding="utf-8")
    return folder


def job_for(
    root: Path,
    begin: Path,
    *,
    exact: bool,
    kl_coef: float = 0.0,
    groups: int = 4,
    lora: LoraConfig | None = None,
    layout: dict | None = None,
) -> RlJob:
    """What every rank is told."""
    layout = layout or {}
    rl = RlConfig(environment=str(begin / "tasks.py"), group=4, groups=groups, overlong="none", kl_coef=kl_coef)
    config, folder = with_start(
        RunConfig(
            data=DataConfig(sequence_tokens=128),
            train=TrainConfig(steps=1, warmup_steps=1),
            plan=PlanConfig(microbatch=2, **layout),
            numerics=NumericsConfig(exact=exact),
            state=StateConfig(dir=str(root)),
            lora=lora,
        ),
        rl,
        str(begin),
    )
    root.mkdir(parents=True, exist_ok=True)  # as the verb does before its run
    return job_of(
        resolve(config),
        rl,
        RolloutConfig(max_tokens=8, pages=128, requests=16, tp=layout.get("tp", 1)),
        GradeConfig(sandbox="none", workers=1),
        folder=RunFolder(root=root),
        start=folder,
        checkpoint=None,
    )


def cases() -> Iterator[tuple[str, dict]]:
    """What is measured, by name."""
    for exact in (False, True):
        for name, layout in LAYOUTS.items():
            yield f"{name}{' exact' if exact else ''}", {"exact": exact, "layout": layout}
    yield "dp=1 with a reference", {"exact": False, "kl_coef": 0.1}
    yield "tp=2 exact, adapters", {"exact": True, "lora": LoraConfig(), "layout": {"tp": 2}}


def main(wanted: Sequence[str]) -> int:
    """The cases that are named, or all; 1 where one is further off than is allowed. Others keep their rows."""
    path = Path(__file__).parent / "results" / "tune_memory.json"
    known = {row["case"]: row for row in json.loads(path.read_text())["rows"]} if wanted and path.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        begin = start(Path(scratch) / "start")
        for number, (name, settings) in enumerate(cases()):
            if wanted and name not in wanted:
                continue
            job = job_for(Path(scratch) / str(number), begin, **settings)
            foretold, parts = predicted(job)
            found = launch_apart("cpu", job.run.plan.mesh.world, taken, job)
            off = foretold / found - 1
            print(f"{name:28} predicted {foretold:,} took {found:,} ({off:+.1%})", flush=True)
            known[name] = {
                "case": name,
                "predicted_bytes": foretold,
                "measured_bytes": found,
                "off": round(off, 4),
                "parts": parts,
            }
            worst = max(abs(row["off"]) for row in known.values())
            rows = [known[each] for each, _ in cases() if each in known]
            write_result(path, rows=rows, worst=worst, allowed=ALLOWED)
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
