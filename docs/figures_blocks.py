"""Where each measured figure comes from: its file, the command that makes it, the machine and the day."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from layout_blocks import RESULTS, table


@dataclass(frozen=True, slots=True)
class Figure:
    """A file of results.

    Attributes:
        what: it holds.
        command: that makes it anew, behind ``python -m``; where it ends in ``--json``, the file follows.
        date: on which it was taken.
    """

    what: str
    command: str
    date: str


FIGURES: dict[str, Figure] = {
    "train_vs_peers-4096-amx.json": Figure(
        "training compared with peers, AMX", "bench.train_vs_peers --json", "2026-11-24"
    ),
    "train_vs_peers-4096.json": Figure("training compared with peers", "bench.train_vs_peers --steps 3", "2026-11-23"),
    "train_vs_peers-32000-amx.json": Figure(
        "the same, vocabulary 32,000, AMX",
        "bench.train_vs_peers --vocab 32000 --pair 'DDP bf16 compiled' --json",
        "2026-11-24",
    ),
    "train_vs_peers-32000.json": Figure(
        "the same, vocabulary 32,000",
        "bench.train_vs_peers --vocab 32000 --steps 3 --pair 'DDP bf16 compiled'",
        "2026-11-23",
    ),
    "vision.json": Figure(
        "LeNet-5 on handwritten digits compared with plain PyTorch, three seeds",
        "bench.vision --steps 1500",
        "2026-11-27",
    ),
    "vision_engine.json": Figure(
        "LeNet-5 compared with DDP in turns, eager and compiled, on a machine with 14 tasks a core beside it",
        "bench.vision --steps 0 --turns 12 --compiled",
        "2026-11-28",
    ),
    "encoder_placement.json": Figure(
        "where an encoder of pictures runs, on two pipeline ranks: predicted and measured steps",
        "bench.encoder_placement --rounds 3",
        "2026-11-28",
    ),
    "activations.json": Figure(
        "ReLU beside tanh: epochs to a training error of 25%, three seeds", "bench.activations", "2026-11-28"
    ),
    "gan.json": Figure(
        "digits drawn by a GAN, as a trained LeNet-5 sees them, three seeds",
        "bench.gan runs/gan0 runs/gan1 runs/gan2 runs/lenet --out bench/results/gan.json",
        "2026-11-27",
    ),
    "language.json": Figure(
        "the language of held-out spoken prompts, five languages, three seeds",
        "bench.accuracy runs/lang0 runs/lang1 runs/lang2 --wanted 0.9 --out bench/results/language.json",
        "2026-11-28",
    ),
    "vision_language.json": Figure(
        "answers to questions on composed pictures, with pairs of kinds that no training has, three seeds",
        "bench.vision_language runs/seen0 runs/seen1 runs/seen2 --out bench/results/vision_language.json",
        "2026-11-28",
    ),
    "recaption.json": Figure(
        "things drawn as captions ask, by the texts of the training: alt texts, short and full captions, three seeds",
        "bench.recaption",
        "2026-11-28",
    ),
    "rematerialize.json": Figure(
        "dynamic tensor rematerialization: forwards of chains, and overheads on its authors' traces",
        "bench.rematerialize --json",
        "2026-11-28",
    ),
    "moments.json": Figure(
        "moments in 8 bits: bytes, and an update beside fp32's, bitsandbytes' and torchao's",
        "bench.moments --json",
        "2026-11-28",
    ),
    "resnet.json": Figure(
        "ResNet-18 on emoji of a maker that no training has, three seeds, on a busy machine",
        "bench.accuracy runs/resnet0 runs/resnet1 runs/resnet2 --wanted 0.55 --out bench/results/resnet.json",
        "2026-11-28",
    ),
    "transcripts.json": Figure(
        "transcripts of held-out prompts with their sounds and without, and letters that are wrong, three seeds",
        "bench.transcripts",
        "2026-11-28",
    ),
    "linear_attention.json": Figure(
        "linear attention over two ranks compared with one, 8,192 tokens",
        "bench.linear_attention --rounds 2",
        "2026-11-27",
    ),
    "word2vec.json": Figure(
        "word2vec compared with gensim: words a processor second, and the correlation with WordSim-353",
        "bench.word2vec --gensim PYTHON",
        "2026-11-27",
    ),
    "waterfall-amx.json": Figure("where a step's time goes, AMX", "bench.waterfall --json", "2026-11-24"),
    "waterfall.json": Figure("where a step's time goes", "bench.waterfall", "2026-11-23"),
    "kernels-amx.json": Figure(
        "attention, products and gradients compared with torch, AMX", "bench.kernels --json", "2026-11-24"
    ),
    "kernels-amd-epyc.json": Figure("attention and products compared with torch", "bench.kernels --json", "2026-11-23"),
    "kernels.json": Figure("attention and products compared with torch", "bench.kernels", "2026-11-23"),
    "kernels_fused.json": Figure(
        "norms, gates and loss compared with torch", "bench.kernels_fused --rounds 7", "2026-11-23"
    ),
    "gpu.json": Figure(
        "first figures of a GPU: tests, proofs, memory, a step of 1.02 billion parameters",
        "bench.gpu --json bench/results/gpu.json",
        "2026-11-27",
    ),
    "exact_cost-amx.json": Figure(
        "exact mode compared with fast mode, AMX", "bench.exact_cost --pairs 6 --json", "2026-11-24"
    ),
    "exact_cost.json": Figure("exact mode compared with fast mode", "bench.exact_cost --pairs 8", "2026-11-23"),
    "long_context.json": Figure("the longest sequence within a budget", "bench.long_context", "2026-11-23"),
    "long_context-8192.json": Figure(
        "8,192 tokens, one rank and two",
        "bench.long_context --tokens 8192 --cp 1 --cp 2 --no-budget --json",
        "2026-11-23",
    ),
    "long_context-32768.json": Figure(
        "32,768 tokens, one rank and two",
        "bench.long_context --tokens 32768 --steps 2 --cp 1 --cp 2 --no-budget --json",
        "2026-11-23",
    ),
    "moe.json": Figure("a mixture of experts compared with a dense model", "bench.moe", "2026-11-21"),
    "tolerance.json": Figure("distances between layouts", "bench.tolerance --dtypes fp32 bf16", "2026-11-21"),
    "tolerance-fp16.json": Figure("the same in fp16", "bench.tolerance --dtypes fp16 --json", "2026-11-27"),
    "moments-tolerance.json": Figure(
        "the same of moments in fewer bits", "bench.tolerance --moments 8bit bf16 --worlds 1 2 --json", "2026-11-28"
    ),
    "collectives.json": Figure("collectives in shared memory compared with Gloo", "bench.collectives", "2026-11-22"),
    "collectives-hosts.json": Figure(
        "collectives over hosts compared with Gloo",
        "bench.collectives --world 4 --hosts 2 --link 1gbit --rounds 5",
        "2026-11-23",
    ),
    "recorder.json": Figure("the cost of the flight recorder", "bench.recorder --pairs 200", "2026-11-23"),
    "serve_vs_peers.json": Figure(
        "serving compared with peers",
        "bench.serve_vs_peers --rounds 4 --llama-python LLAMA/bin/python --vllm-python VLLM/bin/python",
        "2026-11-22",
    ),
    "serve_http.json": Figure("the cost of HTTP", "bench.serve_http", "2026-11-22"),
    "serve_predicted.json": Figure("a server, predicted and measured", "bench.serve_predicted", "2026-11-22"),
    "serve_predicted-exact.json": Figure(
        "an exact server, predicted and measured", "bench.serve_predicted --ways 'bf16 exact' --json", "2026-11-22"
    ),
    "lora_base.json": Figure(
        "the loss of adapters beside a base in few bits", "bench.lora_base runs/wide", "2026-11-28"
    ),
    "serve_quantized.json": Figure(
        "perplexity of quantized weights", "bench.serve_quantized runs/demo --windows 128", "2026-11-22"
    ),
    "tune_vs_peers.json": Figure(
        "reinforcement learning compared with TRL",
        "bench.tune_vs_peers --trl-python TRL/bin/python --steps 24",
        "2026-11-22",
    ),
    "tune_memory.json": Figure("memory of tuning, predicted and measured", "bench.tune_memory", "2026-11-22"),
    "learns.json": Figure(
        "learning from true and shuffled rewards, three seeds",
        "bench.learns --kinds true && python -m bench.learns --kinds shuffled --seeds 2 --steps 1000 --out F",
        "2026-11-22",
    ),
    "grades.json": Figure("grades per second", "bench.grades --grades 30", "2026-11-22"),
    "faults.json": Figure("killed processes and flipped bits", "bench.faults", "2026-11-22"),
    "stopped.json": Figure("time until a stopped rank is named", "bench.stopped --rounds 2", "2026-11-22"),
    "snapshots.json": Figure("the cost of a snapshot", "bench.snapshots --repeats 5", "2026-11-23"),
    "soak.json": Figure("20 minutes with faults, 20 without", "bench.soak", "2026-11-23"),
    "hosts.json": Figure("lost hosts and links", "bench.hosts --repeats 1", "2026-11-23"),
    "step_page.json": Figure("the page of a large step", "bench.step_page", "2026-11-23"),
    "local_prediction.json": Figure("steps, predicted and measured", "bench.local_prediction", "2026-11-24"),
    "plan_search.json": Figure("the speed of the plan search", "bench.plan_search", "2026-11-22"),
    "plan_experts.json": Figure(
        "plans published by experts, compared with the planner's", "bench.plan_experts", "2026-11-23"
    ),
    "published.json": Figure(
        "published runs, predicted", "bench.published --ablate --calculon CALCULON.json --json", "2026-11-23"
    ),
    "published_blind.json": Figure(
        "predictions before any comparison",
        "bench.published_blind --runs tests/data/published/runs_2.csv --model 4fa4af0 --json",
        "2026-11-22",
    ),
    "published_unseen.json": Figure(
        "published runs that were not used for the fit", "bench.published_unseen --json", "2026-11-24"
    ),
}


PEERS: dict[str, str] = {
    "DDP": (
        "`gradient_as_bucket_view=True`, `no_sync` for all microbatches but the last; bf16 by autocast; fused AdamW"
    ),
    "FSDP2": (
        "`fully_shard` of each block and of the model; `MixedPrecisionPolicy(param_dtype, reduce_dtype=fp32)`; the "
        "head is not resharded; *weights kept* sets `reshard_after_forward=False`; fused AdamW"
    ),
    "compiled": "`block.compile()` of each block and of the head, warmed before the first timed step",
    "tensor parallelism": "`parallelize_module`, columns then rows, fp32",
    "pipelining": "`torch.distributed.pipelining`, `ScheduleGPipe` and `Schedule1F1B`, the same microbatches",
    "DeepSpeed, Accelerate": "the newest release; ZeRO-2 and 3 without offload; bf16 by its own engine",
    "transformers": "`generate` with a KV cache, greedy",
    "llama.cpp": "llama-cpp-python 0.3.36, `n_batch=512`, as many threads as Superstep, without flash attention",
    "vLLM": "0.32.0 for CPUs, bf16",
    "TRL": "1.16.0, GRPO, the same groups, lengths and rewards",
}
"""How each is set up: what a figure beside it depends on."""

TRAINERS = ("DDP", "FSDP2", "compiled", "tensor parallelism", "pipelining", "DeepSpeed, Accelerate")
SERVERS = ("transformers", "llama.cpp", "vLLM")
COMPUTED = "any: computed from published tables"


def _machine(path: Path) -> str:
    told = json.loads(path.read_text(encoding="utf-8"))
    if "cpu" not in told:
        return COMPUTED
    amx = ", AMX" if told.get("amx") else ""
    torch = f", torch {told['torch']}" if "torch" in told else ""
    gpus = f"{', '.join(told['gpus'])}, " if "gpus" in told else ""
    return f"{gpus}{told['cores']} cores of {told['cpu']}{amx}{torch}"


def command(name: str) -> str:
    """The whole command that makes a file of results."""
    told = FIGURES[name].command
    return f"python -m {told}" + (f" bench/results/{name}" if told.endswith("--json") else "")


def _figures() -> str:
    rows = []
    for name, each in FIGURES.items():
        link = f"[{name}](../../bench/results/{name})"
        rows.append((link, each.what, f"`{command(name)}`", _machine(RESULTS / name), each.date))
    return table(("file", "content", "command", "machine", "date"), rows)


def _settings() -> str:
    return table(("peer", "settings"), list(PEERS.items()))


def taken(*names: str, peers: tuple[str, ...] = ()) -> str:
    """Where figures of these files come from: day, machine and command, and the peers' settings."""
    lines = []
    for name in names:
        machine = _machine(RESULTS / name)
        where = "Computed from published tables" if machine == COMPUTED else f"Measured on {machine}"
        lines.append(f"- {where}, {FIGURES[name].date}: `{command(name)}`")
    if peers:
        lines.append(f"- Peers: {'. '.join(f'{name}: {PEERS[name]}' for name in peers)}.")
    return "\n".join(lines)


FIGURES_BLOCKS: dict[str, Callable[[], str]] = {
    "figures": _figures,
    "settings of peers": _settings,
    "peers taken": lambda: taken("train_vs_peers-4096-amx.json", "train_vs_peers-4096.json", peers=TRAINERS),
    "vocabulary taken": lambda: taken("train_vs_peers-32000-amx.json", "train_vs_peers-32000.json"),
    "served taken": lambda: taken("serve_vs_peers.json", peers=SERVERS),
    "planner taken": lambda: taken("published.json", "published_unseen.json", "plan_experts.json"),
}
