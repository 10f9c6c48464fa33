"""What weights of few bits cost in perplexity: a trained model's validation text, under every format of the server.

    python -m bench.serve_quantized runs/demo

All formats read the same windows of the run's own validation text, each token's log-probability as the engine tells it
of a prompt. The perplexity of bf16 is what the others are compared with.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch

from bench.machine import write_result
from superstep.data.token_files import open_corpus
from superstep.data.tokenizer import load_tokenizer
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_engine
from superstep.serve.compute.linears.quantize import FORMATS
from superstep.serve.config import ServeConfig
from superstep.serve.scheduling.request import Sampling
from superstep.train.weights.weights_folder import newest_checkpoint

CALIBRATION = 1024
"""Tokens of a window of the calibration text."""
RESULT = Path(__file__).parent / "results" / "serve_quantized.json"


def windows(run: Path, count: int, tokens: int) -> list[list[int]]:
    """Neighbouring tokens from places spread evenly over the validation text."""
    text = open_corpus(run / "data").validation.tokens
    step = (len(text) - tokens) // max(count - 1, 1)
    return [[int(token) for token in text[at : at + tokens]] for at in range(0, step * count, step)]


def write_calibration(run: Path, file: Path) -> Path:
    """Write windows of the run's training text, for GPTQ."""
    text, decode = open_corpus(run / "data").train.tokens, load_tokenizer(run / "data" / "tokenizer.json").decode
    parts = [decode(list(map(int, text[at : at + CALIBRATION]))) for at in range(0, len(text), len(text) // 64)]
    file.write_text("\n".join(parts), encoding="utf-8")
    return file


def perplexity(folder: Path, prompts: list[list[int]], **settings: object) -> float:
    """exp of the mean loss of every token but each window's first."""
    engine = open_engine(folder, ServeConfig(**settings))  # type: ignore[arg-type]
    told = generate(engine, prompts, Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=True))
    losses = [-token.logprob for answer in told for token in answer.prompt]
    return math.exp(math.fsum(losses) / len(losses))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", type=Path, help="of a trained model")
    options.add_argument("--windows", type=int, default=256)
    options.add_argument("--tokens", type=int, default=512, help="of a window")
    options.add_argument("--out", type=Path, default=RESULT)
    asked = options.parse_args()
    folder, prompts = newest_checkpoint(asked.run), windows(asked.run, asked.windows, asked.tokens)
    kernels = Path(tempfile.gettempdir()) / "superstep-kernels"
    found = {"fp32": perplexity(folder, prompts, compute="fp32")}
    for name in ("", *(row.name for row in FORMATS)):
        found[name or "bf16"] = perplexity(folder, prompts, compute="bf16", quantize=name, kernels=kernels)
    with tempfile.TemporaryDirectory() as room:
        settings = {"quantize": "int4", "calibration": write_calibration(asked.run, Path(room) / "text.txt")}
        found["int4 by GPTQ"] = perplexity(folder, prompts, compute="bf16", kernels=kernels, **settings)
    rise = {name: value / found["bf16"] - 1 for name, value in found.items()}
    for name, value in found.items():
        print(f"{name:12} perplexity {value:.3f}  {rise[name]:+.3%} of bf16")
    write_result(
        asked.out,
        checkpoint=folder.name,
        tokens=asked.windows * (asked.tokens - 1),
        threads=torch.get_num_threads(),
        perplexity=found,
        rise_over_bf16=rise,
    )


if __name__ == "__main__":
    main()
