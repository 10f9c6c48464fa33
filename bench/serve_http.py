"""What HTTP costs: the same requests through streams of a server and by the engine in a process of its own, in turn.

    python -m bench.serve_http

Both have the same model and settings, and while one computes the other sleeps. A ratio is of one round: tokens/s of
all streams over tokens/s of the engine. Whoever asks runs on the same cores, so that to receive is counted as well;
what came is read when all is there. On a machine that others use, the processor seconds of the interface beside those
of the engine's rank say more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.machine import write_result
from bench.serve_vs_peers import ROOT, SCENARIOS, Job, Running, Side, save_model


class Server:
    """`superstep serve` on a free port."""

    def __init__(self, folder: Path) -> None:
        kernels = Path(tempfile.gettempdir()) / "superstep-kernels"
        command = [sys.executable, "-m", "superstep", "serve", str(folder), "--port", "0", "--numerics.compute", "bf16"]
        self._process = subprocess.Popen([*command, "--serve.kernels", str(kernels)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"(http://127\.0\.0\.1:\d+) ", line):
                self.url = found[1]
                return
        raise SystemExit("the server did not start; its words are above")

    def answer(self, job: Job, path: str) -> float:
        """Seconds until every stream has ended."""
        return asyncio.run(self._all(job, path))

    async def _all(self, job: Job, path: str) -> float:
        began = time.perf_counter()
        asked = zip(job.prompts, job.tokens, strict=True)
        came = await asyncio.gather(*[self._one(path, prompt, count) for prompt, count in asked])
        seconds = time.perf_counter() - began
        told = [tokens_of(path, answer.decode()) for answer in came]
        assert told == job.tokens, f"{told} tokens came, {job.tokens} were asked for"
        return seconds

    async def _one(self, path: str, prompt: list[int], count: int) -> bytes:
        way = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
        body = {"prompt": prompt, "stream": True}
        if path == "/generate":
            body |= {"sampling": way}
        else:
            body |= way | {"model": "model", "stream_options": {"include_usage": True}}
        sent = json.dumps(body).encode()
        port = int(self.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        return answer

    def processor_s(self) -> tuple[float, float]:
        """Of the interface's process, and of those below it: the engine's ranks, and what starts them."""
        own = psutil.Process(self._process.pid)
        took = [sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True))]
        return took[0], sum(took[1:])

    def end(self) -> None:
        """Let it go."""
        self._process.terminate()
        self._process.wait(20)


def tokens_of(path: str, answer: str) -> int:
    """How many tokens a stream brought."""
    lines = [line for line in answer.splitlines() if line]
    if path == "/generate":
        return sum(len(json.loads(line).get("tokens", ())) for line in lines if line.startswith("{"))
    return next(json.loads(line[5:])["usage"]["completion_tokens"] for line in lines if '"usage":{' in line)


def save_tokenizer(folder: Path) -> None:
    """Words for the ids of the random model: bytes, and numbers behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġn{k}" for k in range(32000 - len(alphabet) - 1)), "</s>"]
    vocab = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))


def main(argv: list[str]) -> None:
    """Rounds, and the figures as JSON."""
    options = argparse.ArgumentParser(prog="python -m bench.serve_http", description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "serve_http.json")
    asked = options.parse_args(argv)
    (scenario,) = [one for one in SCENARIOS if one.requests > 1]
    paths = ("/generate", "/v1/completions")
    rounds = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        save_model(folder)
        save_tokenizer(folder)
        engine = Running(Side("engine", "ours", sys.executable, {"serve": {}}), folder, 2, Path(scratch) / "log")
        server = Server(folder)
        try:
            for number in range(-1, asked.rounds):
                job = scenario.job(number)
                row = {"engine": sum(job.tokens) / engine.answer(job)["seconds"]}
                for salt, path in enumerate(paths, 1):
                    # Other prompts of the same lengths: those of the round before are cached.
                    other = Job([[3 + (t + salt) % 31000 for t in prompt] for prompt in job.prompts], job.tokens)
                    before = server.processor_s()
                    row[path] = sum(job.tokens) / server.answer(other, path)
                    own, ranks = (now - old for now, old in zip(server.processor_s(), before, strict=True))
                    row[f"{path}, interface over engine"] = own / ranks
                row["load_average"] = os.getloadavg()[0]
                if number >= 0:
                    rounds.append(row)
                    print(row, flush=True)
        finally:
            server.end()
            engine.end()
    shares = {path: round(statistics.median(row[path] / row["engine"] for row in rounds), 3) for path in paths}
    own = {path: round(statistics.median(row[f"{path}, interface over engine"] for row in rounds), 3) for path in paths}
    print(shares, own)
    write_result(
        asked.json,
        scenario=scenario.name,
        http_over_engine_tokens_per_s=shares,
        interface_over_engine_processor_s=own,
        rounds=rounds,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
