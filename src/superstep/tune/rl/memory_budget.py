"""Memory budget of a run of reinforcement learning, checked before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from superstep.cost.program.buffers import FP32
from superstep.cost.program.memory.communicators import communicator_bytes
from superstep.cost.program.memory.memory import weights_bytes
from superstep.cost.program.memory.memory_fit import memory_of
from superstep.cost.program.memory.temporaries import batch_bytes, exact_terms
from superstep.cost.serve import RankModelSize
from superstep.errors import ConfigError
from superstep.plan.resolution.resolve import Plan, Resolved
from superstep.program.compile import compile_step
from superstep.serve.config import ServeConfig, plan_named
from superstep.serve.load_rank import setting_model, usual_pages
from superstep.state.fsync import free_bytes
from superstep.tune.program.instructions import Iterations
from superstep.tune.program.memory import Sizes, Where, peaks, require_room
from superstep.tune.rl.config import RlConfig

STREAMS = 3
"""Streams of a batch: advantages, the log-probabilities at sampling time, the sampler's or the reference's."""

TOKEN_BYTES = 200
"""Bytes of an answer's token on the host: Python's id and log-probability, and their shares of lists."""


def pages_for(run: Resolved, serve: ServeConfig, free_bytes: int) -> int:
    """Pages of a sampler's KV cache: configured, or the default.

    Args:
        run: the trained run; a sampled context is a row of its batch.
        serve: settings of the sampler.
        free_bytes: of a rank.
    """
    least = -(-run.config.data.sequence_tokens // serve.page_tokens)
    page_bytes = serve.page_tokens * setting_model(sampler_plan(run, serve), serve).key_bytes
    return serve.pages or usual_pages(least, serve.requests, free_bytes, page_bytes)


def beside_communicators(free_bytes: int, *plans: Plan) -> int:
    """Free bytes of a GPU without the communicators of its plans: of the trainer's, of the sampler's."""
    return max(0, free_bytes - sum(max(communicator_bytes(plan)) for plan in plans))


def sizes_of(run: Resolved, serve: ServeConfig, rl: RlConfig, *, pages: int, gives_back: bool) -> Sizes:
    """Bytes on the fullest rank.

    Args:
        run: the trained run.
        serve: settings of the sampler.
        rl: with the number of answers of a group.
        pages: of the KV cache.
        gives_back: whether shared ranks free the trainer's memory while they sample.
    """
    served = setting_model(sampler_plan(run, serve), serve)
    ranks, reference_bytes = memory_of(run), weights_bytes(run, compile_step(run.plan))
    if not rl.kl_coef:
        reference_bytes = (0,) * len(ranks)
    fullest, reference = max(zip(ranks, reference_bytes, strict=True), key=lambda each: each[0].bytes + each[1])
    training = fullest.params + fullest.gradients + fullest.optimizer + reference
    return Sizes(
        weights=(served.linears + served.embedding + (run.trained_numel if run.config.lora else 0)) * served.bytes,
        keys=pages * serve.page_tokens * served.key_bytes,
        answering=_count_packed_bytes(served, serve, is_host=not gives_back) + _stepping(served, serve, run, rl),
        training=training,
        step=fullest.peak.bytes + fullest.batch + batch_bytes(run, streams=STREAMS),
        asleep=0 if gives_back else training,
        snapshot=FP32 * run.trained_numel,
        group=rl.group * run.config.data.sequence_tokens * TOKEN_BYTES,
    )


def _count_packed_bytes(served: RankModelSize, serve: ServeConfig, *, is_host: bool) -> int:
    """A copy of the weights in the layout of a CPU's products: in fast mode, and for a compiled exact step
    (``serve.compute.runner.choose_backend``).
    """
    is_compiled = serve.kernels is not None and serve.compute == "bf16" and serve.tp == 1
    return served.linears * served.bytes if is_host and (is_compiled or not serve.exact) else 0


def _stepping(served: RankModelSize, serve: ServeConfig, run: Resolved, rl: RlConfig) -> int:
    """Temporaries of a sampler's step: keys and values of all contexts, and in exact mode copies as fp32 and for whole
    heads; logits of every context and their totals; a chunk of prompts in a feed-forward, and in exact mode the terms
    of its product.
    """
    tokens = run.config.data.sequence_tokens
    contexts = min(serve.requests, -(-rl.group * rl.groups * (rl.lag + 1) // serve.dp))
    of_a_layer = contexts * tokens * served.key_bytes // served.layers
    logits = contexts * served.vocab * FP32
    rows = min(serve.step_tokens, contexts * tokens)
    inner = served.behind_keys // served.width * served.bytes
    grain = sampler_plan(run, serve).plan.grain
    terms = 0 if grain is None else exact_terms(grain.cells, serve.tp) * rows * served.width * FP32
    # The terms of the last product exist after the widest of the others are freed.
    return of_a_layer * (3 if serve.exact else 1) + 2 * logits + max(rows * inner, terms + rows * inner // 2)


def require_sizes(program: Iterations, sizes: Sizes, free_bytes: int) -> None:
    """Check memory of a rank; raises as ``require_room``."""
    room: Mapping[Where, int] = {"ranks": free_bytes}
    require_room(program, sizes, room)


def pages_apart(run: Resolved, serve: ServeConfig, rl: RlConfig, program: Iterations, free_bytes: int) -> int:
    """Pages of samplers with processes of their own on the trainer's host.

    Args:
        run: the trained run, which takes its memory first.
        serve: settings of the samplers.
        rl: with the number of answers of a group.
        program: of the run.
        free_bytes: of the host.

    Raises:
        ConfigError: an instruction does not fit.
    """
    trainers, samplers = run.plan.mesh.world, serve.tp * serve.dp
    sizes = sizes_of(run, serve, rl, pages=0, gives_back=False)
    require_room(program, sizes, {"trainer": free_bytes // trainers})
    left = (free_bytes - trainers * peaks(program, sizes)["trainer"].bytes) // samplers
    pages = pages_for(run, serve, left)
    require_room(program, sizes_of(run, serve, rl, pages=pages, gives_back=False), {"sampler": left})
    return pages


def require_snapshot_room(program: Iterations, run: Resolved, root: Path) -> None:
    """Check that snapshots fit into their folder.

    Args:
        program: of the run.
        run: the trained run.
        root: of the run directory.

    Raises:
        ConfigError: names the most snapshots that exist at once.
    """
    needed = peaks(program, Sizes(snapshot=4 * run.outline.numel)).get("host")
    free = free_bytes(root)
    if needed is not None and needed.bytes > free:
        raise ConfigError(
            f"state.dir = '{root}' has {free:,} bytes left, and the snapshots that samplers take need "
            f"{needed.bytes:,}; name a folder with more room, or set a smaller rl.lag."
        )


def sampler_plan(run: Resolved, serve: ServeConfig) -> Resolved:
    """The plan of a sampler's ranks."""
    return plan_named(run.config.model.name, serve)
