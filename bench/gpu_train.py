"""A training step beside transformers' model in plain PyTorch: for ``bench.gpu`` and ``bench.families``.

Both train the same decoder in bf16 with fp32 master weights, fused AdamW and clipping, on the same random tokens. The
peer runs under autocast, as its users run it: eager and by ``torch.compile``, with torch's fused attention where the
model has it. Sides run in turn, a step each; a ratio is of one round. The peak is the most that a side held in its own
steps, above what the others hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from superstep.comm.device import Device

Step = Callable[[], float]
"""One optimizer step over the whole batch: its loss."""

Figures = dict[str, object]

SIDES = (
    "superstep",
    "superstep triton",
    "superstep exact",
    "superstep compiled",
    "transformers",
    "transformers compiled",
)
"""All that can be measured, ours first."""


def llama_config(settings: dict[str, int], tokens: int) -> PreTrainedConfig:
    """The configuration of a Llama of these sizes."""
    return LlamaConfig(
        num_hidden_layers=settings["layers"],
        hidden_size=settings["width"],
        num_attention_heads=settings["heads"],
        num_key_value_heads=settings["kv_heads"],
        head_dim=settings["head_dim"],
        intermediate_size=settings["ffn"],
        vocab_size=settings["vocab"],
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )


class TransformersSide:
    """The peer: a step over microbatches with accumulated gradients."""

    def __init__(
        self,
        device: Device,
        config: PreTrainedConfig,
        text_BS: Tensor,
        microbatch: int,
        *,
        is_compiled: bool,
        attention: str | None = "sdpa",
    ) -> None:
        torch.manual_seed(0)
        with device.torch:
            self._model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention
            ).train()
        self._run = torch.compile(self._model) if is_compiled else self._model
        decays = [p for p in self._model.parameters() if p.ndim > 1]
        others = [p for p in self._model.parameters() if p.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-4,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._device = device
        self._microbatches = text_BS.to(device.torch).split(microbatch)

    def __call__(self) -> float:
        """One step."""
        total = torch.zeros((), device=self._device.torch)
        for text in self._microbatches:
            with torch.autocast(self._device.kind, torch.bfloat16):
                loss = self._run(input_ids=text, labels=text, use_cache=False).loss / len(self._microbatches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)


@dataclass
class Side:
    """One of those that are measured, and what each of its rounds took."""

    name: str
    step: Step
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    held_bytes: int = 0


def made(name: str, make: Callable[[], Step], device: Device) -> Side:
    """The side after two steps: kernels are compiled, the optimizer has its state."""
    before = device.count_from_here()
    step = make()
    step()
    step()
    device.synchronize()
    return Side(name, step, held_bytes=device.count_from_here() - before)


def measured(sides: Sequence[Side], device: Device, rounds: int, tokens: int, flops: float) -> list[Figures]:
    """Sides in turn, ours first: medians, and the ratio of each peer's time to ours within a round."""
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            device.synchronize()
            others = device.count_from_here() - side.held_bytes
            start_s = time.perf_counter()
            side.step()
            device.synchronize()
            side.seconds.append(time.perf_counter() - start_s)
            side.peak_bytes = max(side.peak_bytes, device.peak_bytes() - others)
    rows: list[Figures] = []
    for side in sides:
        median_s = statistics.median(side.seconds)
        ratios = [theirs / own for theirs, own in zip(side.seconds, sides[0].seconds, strict=True)]
        rows.append(
            {
                "side": side.name,
                "step_s": median_s,
                "tokens_per_s": tokens / median_s,
                "model_flops_per_s": flops / median_s,
                "peak_bytes": side.peak_bytes,
                f"{sides[0].name} is faster by": statistics.median(ratios),
                "all_step_s": side.seconds,
            }
        )
    return rows


def step_flops(settings: dict[str, int], tokens: int, sequence_tokens: int) -> float:
    """Model FLOPs of a step: 6 for each weight of a product and token, and causal attention, a half of the square."""
    D, H = settings["width"], settings["head_dim"]
    attention = D * H * (2 * settings["heads"] + 2 * settings["kv_heads"])
    weights = settings["layers"] * (attention + 3 * D * settings["ffn"]) + D * settings["vocab"]
    return 6.0 * tokens * (weights + settings["layers"] * settings["heads"] * H * sequence_tokens)


def kernels_of(step: Step, rows: int = 14) -> Figures:
    """Where a step's time goes: the kernels with the most seconds, and the seconds of host and GPU."""
    start_s = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    wall_s = time.perf_counter() - start_s
    kernels = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return {
        "wall_s_profiled": wall_s,
        "gpu_s": sum(event.self_device_time_total for event in kernels if event.device_type.name == "CUDA") / 1e6,
        "kernels": [
            {"name": event.key[:90], "ms": event.self_device_time_total / 1e3, "calls": event.count}
            for event in kernels[:rows]
        ],
    }
