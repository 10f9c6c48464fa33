"""Superstep's serving beside its peers, in one sitting: one stream, the first token of a long prompt, many requests.

    python -m bench.serve_vs_peers --llama-python LLAMA/bin/python --vllm-python VLLM/bin/python

Every side is a program that runs all the time; they are asked in turn, round after round, each time with new prompts,
and while one computes the others sleep. Figures are medians over rounds, and ratios are medians of the ratios within a
round. A peer that has no environment here is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from bench.machine import write_result

ROOT = Path(__file__).resolve().parent.parent

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


OURS = {"bf16": {}, "w8a8": {"quantize": "w8a8"}, "exact": {"exact": True}}
"""Ways to serve, each a side; ratios are those of the first."""


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts, and how many tokens are asked for each."""

    prompts: list[list[int]]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of work, drawn anew for each round.

    Attributes:
        name: of the work.
        requests: at once.
        prompt_tokens: the least and the most of a prompt.
        answer_tokens: the same of an answer.
    """

    name: str
    requests: int
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]

    def job(self, seed: int) -> Job:
        """The work of one round, the same for every side."""
        draw = Random(f"{self.name} {seed}")
        prompts = [
            [draw.randrange(3, CONFIG["vocab_size"]) for _ in range(draw.randint(*self.prompt_tokens))]
            for _ in range(self.requests)
        ]
        return Job(prompts, [draw.randint(*self.answer_tokens) for _ in prompts])


SCENARIOS = (
    Scenario("one stream", 1, (16, 16), (128, 128)),
    Scenario("first token", 1, (512, 512), (1, 1)),
    Scenario("32 requests", 32, (64, 512), (64, 128)),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One of those that are measured.

    Attributes:
        name: in the figures.
        module: its program.
        python: that runs it.
        settings: given to it.
        leaves: names of scenarios that it cannot do.
    """

    name: str
    module: str
    python: str
    settings: Mapping[str, object] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()


class Running:
    """A side's program.

    Raises:
        SystemExit: it ended; its own words are in the log.
    """

    def __init__(self, side: Side, folder: Path, threads: int, log: Path) -> None:
        self.side = side
        self.log = log
        most = max(scenario.answer_tokens[1] for scenario in SCENARIOS)
        with log.open("w", encoding="utf-8") as stream:
            self._process = subprocess.Popen(
                [side.python, "-m", f"bench.serve_sides.{side.module}"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        self.versions = self._ask({"folder": str(folder), "threads": threads, "most": most, **side.settings})[
            "versions"
        ]

    def answer(self, job: Job) -> dict:
        """Seconds, and the tokens."""
        return self._ask(asdict(job))

    def _ask(self, asked: dict) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            said = self.log.read_text(encoding="utf-8").strip().splitlines()[-1:]
            raise SystemExit(f"{self.side.name}: ended; its last words: {said}; all of them are in {self.log}")
        return json.loads(line)

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def save_model(folder: Path) -> None:
    """Random weights as Hugging Face keeps them."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    D, F, V, H = (CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    queries, keys = (H * CONFIG[name] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
            "self_attn.q_proj": (queries, D),
            "self_attn.k_proj": (keys, D),
            "self_attn.v_proj": (keys, D),
            "self_attn.o_proj": (D, queries),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
        }
        sizes |= {f"model.layers.{layer}.{name}.weight": size for name, size in of_layer.items()}
    sizes["lm_head.weight"] = (V, D)
    # Of such a size that attention and feed-forward change the stream: then a wrong key shows in the tokens.
    weights = {
        name: (torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.04).bfloat16()
        for name, size in sizes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")


def line_up(asked: argparse.Namespace) -> list[Side]:
    """The sides that have an environment here."""
    here = sys.executable
    sides = [Side(f"superstep {kind}", "ours", here, {"serve": settings}) for kind, settings in asked.ours.items()]
    sides += [
        Side("transformers generate", "hf", here, {"batching": "static"}),
        Side("transformers continuous", "hf", here, {"batching": "continuous"}),
    ]
    if asked.llama_python:
        sides += [
            Side(f"llama.cpp {kind}", "llama", asked.llama_python, {"kind": kind}, leaves=("32 requests",))
            for kind in ("bf16", "q8_0")
        ]
    else:
        print("llama.cpp is left out: --llama-python names no environment with llama-cpp-python and gguf.")
    if asked.vllm_python:
        sides.append(Side("vllm bf16", "vllm", asked.vllm_python))
    else:
        print("vLLM is left out: --vllm-python names no environment with its CPU wheel.")
    return [side for side in sides if not asked.only or any(name in side.name for name in asked.only)]


def measure(sides: Sequence[Running], scenario: Scenario, rounds: int) -> dict[str, list[dict]]:
    """What each side answered in each round. The first round is no figure: it warms up."""
    found: dict[str, list[dict]] = {running.side.name: [] for running in sides}
    for number in range(-1, rounds):
        job = scenario.job(number)
        order = sides[number % len(sides) :] + sides[: number % len(sides)]  # nobody is always behind the same one
        for running in order:
            answer = running.answer(job)
            if number >= 0:
                found[running.side.name].append({"seconds": answer["seconds"], "first": answer["tokens"][0][0]})
                found[running.side.name][-1]["tokens_per_s"] = sum(job.tokens) / answer["seconds"]
    return found


def told(scenario: Scenario, found: dict[str, list[dict]], ours: str) -> dict[str, dict]:
    """Medians of each side, and of ours against it."""
    rows = {}
    for name, rounds in found.items():
        ratios = [theirs["seconds"] / own["seconds"] for theirs, own in zip(rounds, found.get(ours, []), strict=False)]
        rows[name] = {
            "seconds": statistics.median(r["seconds"] for r in rounds),
            "tokens_per_s": statistics.median(r["tokens_per_s"] for r in rounds),
            "ours_is_faster_by": statistics.median(ratios) if ratios else None,
            "all_seconds": [r["seconds"] for r in rounds],
            "first_tokens": [r["first"] for r in rounds],
        }
        faster = f"{rows[name]['ours_is_faster_by']:6.2f}x" if ratios else ""
        print(
            f"{scenario.name:12s} {name:28s} {rows[name]['seconds'] * 1e3:9.1f} ms "
            f"{rows[name]['tokens_per_s']:9.1f} tokens/s {faster}",
            flush=True,
        )
    return rows


def main(argv: list[str]) -> None:
    """Measures the sides that are here, and writes the figures."""
    options = argparse.ArgumentParser(prog="python -m bench.serve_vs_peers", description=__doc__.splitlines()[0])
    options.add_argument("--llama-python", help="Python of an environment with llama-cpp-python and gguf")
    options.add_argument("--vllm-python", help="Python of an environment with vLLM's CPU wheel")
    options.add_argument("--ours", type=json.loads, default=OURS, help="names to settings of [serve], as JSON")
    options.add_argument("--only", nargs="*", help="parts of the names of sides")
    options.add_argument("--scenarios", nargs="*", default=[s.name for s in SCENARIOS])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "serve_vs_peers.json")
    asked = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        save_model(folder)
        running = _start(line_up(asked), folder, asked.threads)
        versions = {one.side.name: one.versions for one in running}
        try:
            results = {}
            for scenario in (s for s in SCENARIOS if s.name in asked.scenarios):
                able = [one for one in running if scenario.name not in one.side.leaves]
                ours = next((one.side.name for one in able if one.side.module == "ours"), "")
                results[scenario.name] = told(scenario, measure(able, scenario, asked.rounds), ours)
                # After each: what was measured is not lost with what takes too long.
                write_result(asked.json, threads=asked.threads, rounds=asked.rounds, versions=versions, results=results)
        finally:
            for one in running:
                one.end()


def _start(sides: Sequence[Side], folder: Path, threads: int) -> list[Running]:
    """The sides that start; of one that does not, its last words."""
    running = []
    for number, side in enumerate(sides):
        try:
            running.append(Running(side, folder, threads, Path(tempfile.gettempdir()) / f"serve_side_{number}.log"))
        except SystemExit as left_out:
            print(f"left out: {left_out}")
    return running


if __name__ == "__main__":
    main(sys.argv[1:])
