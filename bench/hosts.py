"""Two hosts that lose a rank, a link or a host: how long until it is named, and until the run trains again.

    python -m bench.hosts                 as root, on Linux: hosts are network namespaces with a link between them

Each fault hurts a run of the demo's model on two ranks, one on each host, whose launchers are the real ones. *Named* is
when host 0 has seen it, *training* when the next step is done. What heals or comes back does so once it is waited for,
and its time counts from there: a host's launcher has to import torch again.

A run that is elastic then loses host 1 with its memory, goes on without it, and with it once it is back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import write_result
from bench.several import Several, told, why_not
from superstep.cli.flags.options import DEMO
from superstep.cli.prepare_progress import prepare_with_progress
from superstep.plan.config import PlanConfig, RunConfig, StateConfig
from superstep.plan.config_io import write_config
from superstep.train.weights.model import resolve_config, vocab_of

RESULT = Path(__file__).parent / "results" / "hosts.json"
STEPS = 100_000
APART = 8
"""Steps between two faults."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to host 1, and what mends it, where it does not mend itself."""

    hurt: Callable[[Several], None]
    mend: Callable[[Several], None] | None = None


FAULTS = {
    "rank killed": Fault(lambda hosts: os.kill(hosts.ranks(1)[0], signal.SIGKILL)),
    "rank stopped": Fault(lambda hosts: os.kill(hosts.ranks(1)[0], signal.SIGSTOP)),
    "link down": Fault(lambda hosts: hosts.cut(1), lambda hosts: hosts.heal(1)),
    "blackhole": Fault(lambda hosts: hosts.blackhole(1), lambda hosts: hosts.find_again(1)),
    "host lost with its memory": Fault(lambda hosts: hosts.kill(1), lambda hosts: _started(hosts)),
}


def _started(hosts: Several) -> None:
    hosts.start(1)


def config(folder: Path, *, is_elastic: bool = False) -> RunConfig:
    """The demo's model, one rank on each host, with copies."""
    data = replace(DEMO.data, cache=str(folder / "tokens"))
    train = replace(DEMO.train, steps=STEPS, eval_every=STEPS, elastic=is_elastic)
    state = StateConfig(dir=str(folder / "run"), existing="resume", snapshot_every=1, save_every=STEPS)
    plan = PlanConfig(dp=2, zero=1, microbatch=4)
    return replace(DEMO, data=data, train=train, plan=plan, state=state)


def measure(folder: Path, repeats: int) -> None:
    """Have each fault happen so many times; after each round the figures are written."""
    run = config(folder)
    prepare_with_progress(run.data, vocab_of(resolve_config(run)), folder / "tokens", sys.stdout)
    (folder / "run.toml").write_text(write_config(run), encoding="utf-8")
    found: dict[str, dict[str, list[float]]] = {name: {"named": [], "training": [], "steps": []} for name in FAULTS}
    with Several(folder, []) as hosts:
        hosts.start(1)
        hosts.start(0)
        for number in range(1, repeats + 1):
            for name, fault in FAULTS.items():
                for key, value in _times(hosts, folder / "run", fault).items():
                    found[name][key].append(value)
                print(
                    f"{name:28}" + "".join(f"{key} {each[-1]:8.2f}  " for key, each in found[name].items()), flush=True
                )
            faults = {name: _told(times) for name, times in found.items()}
            write_result(RESULT, **(_before() | {"repeats": number, "faults": faults}))


def measure_elastic(folder: Path, repeats: int) -> None:
    """Have host 1 lost and come back so many times, of a run that goes on meanwhile."""
    run = config(folder, is_elastic=True)
    prepare_with_progress(run.data, vocab_of(resolve_config(run)), folder / "tokens", sys.stdout)
    (folder / "run.toml").write_text(write_config(run), encoding="utf-8")
    found: dict[str, dict[str, list[float]]] = {"goes on without it": {}, "goes on with it": {}}
    with Several(folder, ["--without-after", "0"]) as hosts:
        hosts.start(1)
        hosts.start(0)
        for number in range(1, repeats + 1):
            for name, change in (("goes on without it", hosts.kill), ("goes on with it", hosts.start)):
                for key, value in _times(hosts, folder / "run", Fault(lambda _, change=change: change(1))).items():
                    found[name].setdefault(key, []).append(value)
                print(f"{name:28}" + "".join(f"{key} {each[-1]:8.2f}  " for key, each in found[name].items()))
            elastic = {name: _told(times) for name, times in found.items()}
            write_result(RESULT, **(_before() | {"elastic_repeats": number, "elastic": elastic}))


def _before() -> dict[str, Any]:
    """What the file has of other measurements."""
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    return {name: known[name] for name in ("repeats", "faults", "elastic_repeats", "elastic") if name in known}


def _told(times: dict[str, list[float]]) -> dict[str, Any]:
    return {key: {"median": median(each), "most": max(each), "all": each} for key, each in times.items()}


def _times(hosts: Several, run: Path, fault: Fault) -> dict[str, float]:
    def steps() -> int:
        return len(told(run, "step"))

    first, resumed = steps(), len(told(run, "resumed"))
    hosts.until(lambda: steps() >= first + APART)
    time.sleep(1.0)
    waits = hosts.said[1].read_text().count("Waiting for host 1")
    last, hurt_s = told(run, "step")[-1]["step"], time.time()
    fault.hurt(hosts)
    began_s = hurt_s
    if fault.mend is not None:
        hosts.until(lambda: hosts.said[1].read_text().count("Waiting for host 1") > waits or _is_back(run, resumed))
        began_s = time.time()
        fault.mend(hosts)
    hosts.until(lambda: _is_back(run, resumed))
    line = told(run, "resumed")[-1]
    hosts.until(lambda: told(run, "step")[-1]["step"] > line["step"])
    return {
        "named": line["lost_at_s"] - hurt_s,
        "training": time.time() - (line["lost_at_s"] if fault.mend is None else began_s),
        "steps": max(0.0, last - line["step"]),
    }


def _is_back(run: Path, before: int) -> bool:
    return len(told(run, "resumed")) > before


def main() -> None:
    """Measure, write, and say it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("faults", "elastic"))
    options = parser.parse_args()
    if why := why_not():
        raise SystemExit(f"bench.hosts: {why}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was made is unmade
    for what, of in (("faults", measure), ("elastic", measure_elastic)):
        if options.only in (None, what):
            with tempfile.TemporaryDirectory(prefix="hosts-") as name:
                of(Path(name), options.repeats)


if __name__ == "__main__":
    main()
