"""What `superstep plan --serve` foresees beside what the engine does: tokens/s, the first token, bytes.

    python -m bench.serve_predicted --clock cpu

Steps are calibrated on models of random weights that are narrower, less deep and of fewer tokens than the one that is
foreseen, with other texts. Each round calibrates and then measures, so that both see the machine in one state; figures
are ratios of a round, predicted over measured, and their medians. With `--clock cpu` seconds are the processor's, on
one thread: on a machine that others use, the time of day says how much they use it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from bench.machine import write_result
from bench.serve_vs_peers import ROOT, SCENARIOS, Job, save_model
from superstep.comm.mesh import build_mesh
from superstep.cost.serve import seconds, way_of
from superstep.launch.ranks import World, launch_apart
from superstep.serve.benchmark_steps import Timing, calibrate
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig, plan_of
from superstep.serve.load_rank import give_back, setting_model, share_cores
from superstep.serve.scheduling.capacity_forecast import weight_bytes
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request import Request, Sampling
from superstep.serve.scheduling.simulate import Arrival, simulate
from superstep.serve.scheduling.step import Budget

WAYS = {
    "bf16": {},
    "w8a8": {"quantize": "w8a8"},
    "bf16 exact": {"exact": True},
}
CONTEXT = 1024
TIMES = 3
"""That each job is done: a first token takes so short that whatever else the machine does shows in it."""


def measured(world: World, folder: Path, serve: ServeConfig, timing: Timing, jobs: dict[str, Job]) -> dict:
    """What the engine does with each job, and its memory."""
    share_cores(world, serve)
    if timing.threads is not None:
        torch.set_num_threads(timing.threads)
    mesh = build_mesh(plan_of(folder, serve).plan, world.rank, world.device, timeout=timedelta(minutes=5))
    try:
        engine = open_engine(folder, serve, device=world.device)
        found = {}
        warm = {"a long one": Job([[5] * 600], [4]), "a short one": Job([[7] * 16], [4])}  # what is new takes longer
        for number, (name, job) in enumerate((warm | jobs).items()):
            times = [answered(engine, job, timing.clock, salt=f"{number} {time}") for time in range(TIMES)]
            found[name] = {key: statistics.median(one[key] for one in times) for key in times[0]}
        give_back()
        told = psutil.Process().memory_info()
        return {"jobs": found, "bytes": told.rss - told.shared, "pages": engine.pages.count}
    finally:
        mesh.destroy()


def answered(engine, job: Job, clock, *, salt: str) -> dict:
    """Seconds until all is answered, and until the median of first tokens."""
    for number, (prompt, count) in enumerate(zip(job.prompts, job.tokens, strict=True)):
        way = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.add(Request(id=number, prompt=tuple(prompt), sampling=way, salt=salt))
    began, first = clock(), {}
    while not engine.is_idle:
        for news in engine.step():
            if news.tokens:
                first.setdefault(news.request, clock() - began)
    return {"seconds": clock() - began, "first_s": statistics.median(first.values())}


def foreseen(rate, model, serve: ServeConfig, job: Job) -> dict:
    """The same, of the simulator."""
    pages = Pages(serve.pages, serve.page_tokens)
    arrivals = [
        Arrival(prompt_tokens=len(prompt), answer_tokens=count)
        for prompt, count in zip(job.prompts, job.tokens, strict=True)
    ]
    told = simulate(
        arrivals,
        lambda work: seconds(rate, model, work),
        pages=pages,
        budget=Budget(tokens=serve.step_tokens, requests=serve.requests),
        way=way_of(rate),
        context_tokens=CONTEXT,
    )
    return {"seconds": told.seconds, "first_s": statistics.median(one.first_token_s for one in told.served)}


def one_round(folder: Path, serve: ServeConfig, timing: Timing, number: int) -> dict:
    """Calibrate, foresee, measure."""
    run = plan_of(folder, serve)
    model = setting_model(run, serve)
    jobs = {scenario.name: scenario.job(1000 + number) for scenario in SCENARIOS}
    rate = calibrate(run.shape, serve, "cpu", timing)
    ahead = {name: foreseen(rate, model, serve, job) for name, job in jobs.items()}
    told = launch_apart("cpu", 1, measured, folder, serve, timing, jobs)
    keys = serve.pages * serve.page_tokens * model.key_bytes
    whole = weight_bytes(model, rate) + keys + rate.beside_bytes
    rows = {"spread": rate.spread, "bytes": {"predicted": whole, "measured": told["bytes"]}}
    for name, job in jobs.items():
        real, tokens = told["jobs"][name], sum(job.tokens)
        rows[name] = {
            "tokens_per_s": {"predicted": tokens / ahead[name]["seconds"], "measured": tokens / real["seconds"]},
            "first_token_s": {"predicted": ahead[name]["first_s"], "measured": real["first_s"]},
        }
    return rows


def ratios(rounds: list[dict]) -> dict:
    """Predicted over measured, the median over rounds."""
    found = {"bytes": _ratio([one["bytes"] for one in rounds])}
    for scenario in SCENARIOS:
        for figure in ("tokens_per_s", "first_token_s"):
            found[f"{scenario.name}, {figure}"] = _ratio([one[scenario.name][figure] for one in rounds])
    return found


def _ratio(pairs: list[dict]) -> float:
    return round(statistics.median(pair["predicted"] / pair["measured"] for pair in pairs), 3)


def main(argv: list[str]) -> None:
    """Rounds of every way, and the figures as JSON."""
    options = argparse.ArgumentParser(prog="python -m bench.serve_predicted", description=__doc__.splitlines()[0])
    options.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "serve_predicted.json")
    asked = options.parse_args(argv)
    timing = Timing() if asked.clock == "wall" else Timing(clock=time.process_time, threads=1)
    results, load = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        save_model(folder)
        for way in asked.ways:
            kernels = Path(tempfile.gettempdir()) / "superstep-kernels"
            serve = ServeConfig(kernels=kernels, context_tokens=CONTEXT, pages=32 * CONTEXT // 16, **WAYS[way])
            rounds = []
            for number in range(asked.rounds):
                rounds.append(one_round(folder, serve, timing, number))
                load.append(os.getloadavg()[0])
            results[way] = {"predicted_over_measured": ratios(rounds), "rounds": rounds}
            print(way, results[way]["predicted_over_measured"], flush=True)
            write_result(asked.json, clock=asked.clock, threads=timing.threads, load_average=max(load), results=results)


if __name__ == "__main__":
    main(sys.argv[1:])
