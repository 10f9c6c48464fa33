"""The proof that a layout computes what one device computes: each step is compared with the reference, tensor by
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.data.batch import Batch
from superstep.engine.engine import Engine, StepResult
from superstep.engine.values.microbatch import example_of, microbatches_of, rows
from superstep.launch.ranks import World
from superstep.model.unit import UnitSpec, global_specs
from superstep.plan.config import TrainConfig
from superstep.plan.model.shape import ModelShape
from superstep.plan.resolution.resolve import Resolved
from superstep.state.manifest import Position
from superstep.state.tensor_piece import TensorPiece
from superstep.train.lr_schedule import rate
from superstep.train.proof.compare import (
    Compare,
    Difference,
    Yardstick,
    decode_moments,
    reference_yardstick,
    scales,
    yardsticks_of,
)
from superstep.train.proof.reference import reference_steps, unit_steps
from superstep.train.proof.restart import (
    DATA,
    POSITION,
    Bits,
    RestartResult,
    data_bits,
    go_again,
    hash_tensor,
    piece_bits,
)
from superstep.train.proof.sampler import draw_fault
from superstep.train.proof.stream import encoder_fault, noise_fault, stream_fault
from superstep.train.proof.verdict import ProofVerdict, judge
from superstep.train.weights.model import units_of

TIMEOUT = timedelta(seconds=120)


def write_reference(
    model: ModelShape | Sequence[UnitSpec],
    train: TrainConfig,
    batches: Sequence[Batch],
    folder: Path,
    *,
    phases: Mapping[str, TrainConfig] | None = None,
    clips: bool = False,
) -> TrainConfig:
    """Run the reference, and write the results of each step to a file.

    Returns:
        The train section that was used: ``clips`` lowers ``clip_norm`` if it would have no effect.
    """
    steps = (
        reference_steps(model, train, batches, clips=clips)
        if isinstance(model, ModelShape)
        else unit_steps(model, train, batches, phases=phases, clips=clips)
    )
    clip_norm = train.clip_norm
    for step, result in enumerate(steps):
        tensors = {f"gradient/{name}": value for name, value in result.gradients.items()}
        tensors |= {f"weight/{name}": value for name, value in result.weights.items()}
        for kind, moments in result.moments.items():
            tensors |= {f"{kind}/{name}": value for name, value in moments.items()}
        write_step(folder, step, tensors, loss=result.loss, grad_norm=result.grad_norm)
        clip_norm = result.clip_norm
    return replace(train, clip_norm=clip_norm)


def write_step(folder: Path, step: int, tensors: dict[str, Tensor], *, loss: float, grad_norm: float) -> None:
    """The file of a step that ``Compare`` reads."""
    numbers = {"loss": loss, "grad_norm": grad_norm}
    single = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    # The format refuses tied or shared memory; every tensor is written whole.
    whole = {name: value.contiguous() for name, value in tensors.items()}
    save_file(whole | single, folder / f"{step}.safetensors")


def write_one_rank(world: World, run: Resolved, batches: Sequence[Batch], folder: Path) -> None:
    """Run the engine on one rank, and write the results of each step as ``write_reference`` does.

    With the same dtype and microbatch it rounds like any layout that splits no product; the reference in fp32 does not.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on every launched rank: products over more threads may sum in another order
    try:
        with world.device.deterministic() if _has_order(world, run) else nullcontext():
            _straight(world, run, units_of(run), batches, (), folder)
    finally:
        torch.set_num_threads(threads)


def prove(  # noqa: PLR0913
    world: World,
    run: Resolved,
    batches: Sequence[Batch],
    folder: Path,
    *,
    reruns: bool,
    specs: Sequence[UnitSpec] | None = None,
    one_rank: Path | None = None,
    corpus: Path | None = None,
    validation: float | None = None,
) -> ProofVerdict:
    """Run the plan on the launched ranks and compare each step with the reference in ``folder``.

    Every rank compares its own parts, replicas included; rank 0's verdict covers all ranks.

    Args:
        world: the launched ranks.
        run: the resolved run.
        batches: one for each step.
        folder: the folder of ``write_reference``.
        one_rank: but in fp32, the folder of ``write_one_rank``.
        reruns: run a second time, which must give the same bits.
        specs: the units of a model that the run's configuration does not name.
        corpus: the token files of the batches. With them the second run uses the training loop and its own stream, and
            it is stopped, saved and resumed on the way. Stream and sampler are compared with plain code too.
        validation: the reference's loss on the held-out text of that corpus, with the initial weights.
    """
    specs = specs or units_of(run)
    has_order = _has_order(world, run)
    yardsticks = list(yardsticks_of(run, folder, one_rank))
    with world.device.deterministic() if has_order else nullcontext():
        beside = _beside(world, run, corpus) if reruns and corpus is not None else (None, None)
        verdict = _judge_runs(world, run, specs, batches, yardsticks, reruns and has_order, corpus)
    stream, drawn = beside
    sampler = drawn if verdict.again.served is None else drawn or verdict.again.served
    return replace(
        verdict, stream=stream, sampler=sampler, validation=_check_validation(verdict.again, validation, yardsticks)
    )


def _beside(world: World, run: Resolved, corpus: Path) -> tuple[str, str]:
    """Differences of stream and sampler from plain code: the first of any rank."""
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=TIMEOUT)
    try:
        mine = stream_fault(run, mesh, corpus) or noise_fault(run, mesh) or encoder_fault(run, mesh, corpus)
    finally:
        mesh.destroy()
    return next(filter(None, gather(mine, str)), ""), gather(draw_fault() if world.rank == 0 else "", str)[0]


def _check_validation(again: RestartResult, wanted: float | None, yardsticks: Sequence[Yardstick]) -> Difference | None:
    """The validation loss against the reference's."""
    if again.validation is None or wanted is None:
        return None
    relative = abs(again.validation - wanted) / (abs(wanted) or 1e-30)
    allowed = yardsticks[0].allowed.of("loss", is_first=True)
    return Difference(step=0, kind="validation loss", name="", relative=relative, allowed=allowed)


def _has_order(world: World, run: Resolved) -> bool:
    """Whether a rerun must give equal bits: a user's own operations may have no deterministic kernel on a GPU."""
    return world.device.kind == "cpu" or run.decoder is not None


def _judge_runs(
    world: World,
    run: Resolved,
    specs: Sequence[UnitSpec],
    batches: Sequence[Batch],
    yardsticks: Sequence[Yardstick],
    reruns: bool,
    corpus: Path | None,
) -> ProofVerdict:
    compared, bits = _straight(world, run, specs, batches, yardsticks)

    def straight() -> Bits:
        return _straight(world, run, specs, batches, ())[1]

    everyone = [d for part in gather(compared, list[Difference]) for d in part]
    everyone += scales(everyone, yardsticks[0])
    # A wrong run is only repeated without the training loop, which refuses a loss that is not finite.
    corpus = None if any(d.is_wrong for d in everyone) else corpus
    again = go_again(world, run, len(batches), bits, straight, corpus) if reruns else RestartResult()
    return judge(everyone, again, run, specs)


def differences(world: World, run: Resolved, batches: Sequence[Batch], folder: Path) -> list[Difference]:
    """Every compared value of every rank, as ``prove`` judges them."""
    compared, _ = _straight(world, run, units_of(run), batches, (reference_yardstick(run, folder),))
    return [d for part in gather(compared, list[Difference]) for d in part]


def _straight(
    world: World,
    run: Resolved,
    specs: Sequence[UnitSpec],
    batches: Sequence[Batch],
    yardsticks: Sequence[Yardstick],
    keep: Path | None = None,
) -> tuple[list[Difference], Bits]:
    """The steps of one run: differences from the yardsticks, and hashes of all bits of this rank. A single rank writes
    them to files in ``keep``.
    """
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=TIMEOUT)
    compared: list[Difference] = []
    bits: Bits = {}
    try:
        engine = Engine(run, specs, mesh, example=example_of(batches[0]))
        position = Position()
        for step, batch in enumerate(batches):
            compare = Compare(global_specs(specs), run.config.train.seed, step, yardsticks)
            compared += _step(engine, batch, step, compare, bits, keep)
            position = Position(
                step=step + 1,
                samples=position.samples + len(batch.targets_BS),
                tokens=position.tokens + batch.valid_tokens,
                loss_scale=engine.loss_scale,
            )
            bits[step, POSITION] = repr(position)
    finally:
        mesh.destroy()
    return compared, bits


def plain_steps(world: World, run: Resolved, batches: Sequence[Batch]) -> Iterator[None]:
    """Train on the batches without checks; it yields after each step has been issued."""
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=TIMEOUT)
    try:
        engine = Engine(run, units_of(run), mesh, example=example_of(batches[0]))
        for step, batch in enumerate(batches):
            _train(engine, batch.rows(rows(run.plan, mesh)), step)
            yield
    finally:
        mesh.destroy()


def _train(engine: Engine, mine: Batch, step: int, inspect: Callable[[], None] | None = None) -> StepResult:
    """One step on this rank's rows of a batch."""
    return engine.train_step(
        microbatches_of(mine, engine.run.plan, engine.mesh),
        valid_tokens=mine.valid_tokens,
        divisor=mine.divisor,
        lr=rate(engine.run.config.train, step),
        inspect=inspect,
    )


def _step(engine: Engine, batch: Batch, step: int, compare: Compare, bits: Bits, keep: Path | None) -> list[Difference]:
    mine = batch.rows(rows(engine.run.plan, engine.mesh))
    compared: list[Difference] = []
    tensors: dict[str, Tensor] = {}

    def note_bits(pieces: Iterator[TensorPiece]) -> Iterator[TensorPiece]:
        for piece in pieces:
            values = piece.values.detach().cpu().contiguous()
            bits[step, piece_bits(piece)] = hash_tensor(values)
            yield replace(piece, values=values)

    def take(pieces: Iterator[TensorPiece]) -> None:
        for piece in decode_moments(note_bits(pieces)):
            compared.extend(compare.piece(piece))
            if keep is not None:
                tensors[f"{piece.kind}/{piece.name}"] = piece.values.view(piece.shape).clone()

    bits[step, DATA] = data_bits(mine)
    result = _train(engine, mine, step, inspect=lambda: take(engine.pieces(["gradient"])))
    bits[step, "loss"], bits[step, "norm"] = repr(result.loss), repr(result.grad_norm)
    compared += compare.step(result)
    take(engine.pieces())
    if keep is not None:
        write_step(keep, step, tensors, loss=result.loss, grad_norm=result.grad_norm)
    return compared
