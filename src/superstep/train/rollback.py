"""Rollback to an earlier state after a rejected step.

    state of step  ... 300        400 401 ... 499 │ 500 rejected
                        │          └── back_steps ──┘
    there are           300, and 498 and 499 in memory
    goes on from        300; steps 301 to 399 as before, then skip_batches are left out

The rejected step changed nothing. States after the target are suspect as well: those in memory are dropped, and
checkpoints are moved aside, so that no run ever resumes from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import DamagedCheckpoint, Fault, disk_fault
from superstep.observe.events import Corrupted, Event, Fingerprinted, RolledBack
from superstep.state.all_or_none import together
from superstep.state.checkpoint_dirs import checkpoints, set_aside, step_of
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import DamagedSnapshot
from superstep.state.verify import checkpoints_of
from superstep.train.policy.corruption_check import Corruption, How, ranks_text
from superstep.train.policy.spike_detector import SkippedStep
from superstep.train.trainer import Trainer

MEMORY = "memory"


def go_back(
    trainer: Trainer, position: Position, refused: SkippedStep, report: Callable[[Event], None]
) -> tuple[Position, str]:
    """The position after the rollback, and what is left out from there on, in the form of ``train.skip``. Every rank
    calls this together.

    Args:
        trainer: with the state before the step, or with a corrupt state.
        position: of that state.
        refused: the rejected step.
        report: receives events.

    Raises:
        Fault: the limit of rollbacks is reached, or there is no earlier state.
    """
    if refused.corruption is not None:
        return _replay(trainer, position, refused, refused.corruption, report), ""
    rules = trainer.policy.spikes.rules
    assert rules is not None
    if trainer.policy.spikes.is_hopeless(refused):
        raise Fault(
            f"{refused.why}, and the run has rolled back {rules.repeats} times without progress: training has "
            "diverged. Lower train.lr or raise train.warmup_steps, and resume from the last checkpoint.",
            rank=trainer.peers.rank,
            step=refused.step,
        )
    source = RollbackPoint(position)
    if rules.back_steps:
        aim = refused.step - 1 - rules.back_steps
        old_enough, others = _states(trainer, position, aim)
        source = _take_first(trainer, old_enough or others[::-1])
        _void(trainer, (source.position or position).step)
    position_of_source = source.position or position
    skip = trainer.policy.spikes.go_back(position_of_source.step, refused)
    report(_event(position_of_source, refused, source, skip))
    return position_of_source, skip


def _replay(
    trainer: Trainer, position: Position, refused: SkippedStep, corruption: Corruption, report: Callable[[Event], None]
) -> Position:
    """Go back to before a corruption and repeat the steps."""
    integrity = trainer.policy.integrity
    if not integrity.note(corruption):
        raise Fault(
            f"{refused.why}; the state was corrupt for the fourth time. Take {ranks_text(corruption.ranks)} to "
            "another host, and resume.",
            rank=corruption.ranks[0],
            step=refused.step,
        )
    if corruption.how == "recomputed":  # without the update, the state is unchanged
        report(_event(position, refused, RollbackPoint(position), ""))
        tell(trainer, corruption, corruption.how, position.step, report)
        return position
    old_enough, _ = _states(trainer, position, integrity.aim)
    source = _take_first(trainer, old_enough)
    position_of_source = source.position
    if position_of_source is None:
        raise Fault(
            f"{refused.why}, and there is neither a snapshot nor a checkpoint of step {integrity.aim} or before to go "
            "back to. Set state.snapshot_every, and resume from the last checkpoint.",
            rank=corruption.ranks[0],
            step=refused.step,
        )
    _void(trainer, position_of_source.step)
    trainer.policy.spikes.forget_after(position_of_source.step)
    integrity.begin(position_of_source.step)
    report(_event(position_of_source, refused, source, ""))
    if corruption.how is not None:
        tell(trainer, corruption, corruption.how, position_of_source.step, report)
    return position_of_source


def check_state(
    trainer: Trainer, step: int, report: Callable[[Event], None], *, is_saved: bool, loss: float, grad_norm: float
) -> SkippedStep | None:
    """Check the state after a step, if due. Every rank calls this together.

    Args:
        trainer: after the step.
        step: its number.
        report: receives fingerprints, and the wrong ranks of earlier corruptions.
        is_saved: whether a checkpoint follows.
        loss: of the step.
        grad_norm: of the step.
    """
    integrity = trainer.policy.integrity
    if not integrity.is_due(step, is_saved=is_saved):
        return None
    if (earlier := integrity.decide(step)) is not None:
        tell(trainer, earlier, "replay", step, report)
    prints, wrong = integrity.check(step)
    if wrong is not None:
        who = "differs on" if wrong.how is None else "is wrong on"
        return SkippedStep(step, f"{wrong.what} {who} {ranks_text(wrong.ranks)}", loss, grad_norm, wrong)
    moments = {kind: text for kind, text in prints.items() if kind not in {"weight", "gradient"}}
    report(Fingerprinted(step=step, weights=prints["weight"], gradients=prints["gradient"], **moments))
    return None


def tell(trainer: Trainer, corruption: Corruption, how: How, step: int, report: Callable[[Event], None]) -> None:
    """Report the wrong ranks. Every rank calls this together."""
    report(
        Corrupted(
            step=step,
            found=corruption.step,
            ranks=corruption.ranks,
            hosts=trainer.policy.integrity.hosts(corruption.ranks),
            what=corruption.what,
            how=how,
        )
    )


def tell_refused(trainer: Trainer, step: int, report: Callable[[Event], None]) -> None:
    """Report the rank with a damaged snapshot, which was not written to disk. Every rank calls this together."""
    refused = trainer.peers.gather(trainer.copies.take_refused(), DamagedSnapshot | None)[0]
    if refused is not None:
        report(
            Corrupted(
                step=step,
                found=refused.step,
                ranks=(refused.rank,),
                hosts=trainer.policy.integrity.hosts((refused.rank,)),
                what="the copy in memory",
                how="checksum",
            )
        )


def _event(position: Position, refused: SkippedStep, source: RollbackPoint, skip: str) -> RolledBack:
    return RolledBack(
        step=position.step,
        refused=refused.step,
        why=refused.why,
        loss=refused.loss,
        grad_norm=refused.grad_norm,
        source=source.name,
        passed_over=source.passed_over,
        skip=skip,
    )


@dataclass(frozen=True, slots=True)
class RollbackPoint:
    """Target of a rollback.

    Attributes:
        position: of training; None without a state.
        name: the source: memory, or the path of a checkpoint.
        passed_over: damage of each state that was tried before.
    """

    position: Position | None
    name: str = MEMORY
    passed_over: tuple[str, ...] = ()


State = tuple[int, Path | None]
"""The step of a state, and its checkpoint; None: it is in memory."""


def _states(trainer: Trainer, position: Position, aim: int) -> tuple[list[State], list[State]]:
    """States up to step ``aim``, newest first, and later ones; the current state is not among them. Pending writes to
    disk finish first, so that none appears later.
    """
    trainer.copies.drain()
    peers = trainer.peers
    steps = peers.gather(trainer.copies.steps(), set[int])
    in_memory: list[State] = [(step, None) for step in set.intersection(*steps)]

    def unreadable(error: Exception) -> Fault:
        return disk_fault(error, trainer.folder.checkpoints, what="read")

    on_disk = checkpoints_of(trainer.folder.checkpoints, peers, unreadable)
    states = in_memory + [(step_of(path), path) for path in on_disk]
    # Of one step, memory comes first.
    states = sorted((s for s in states if s[0] < position.step), key=lambda s: (s[0], s[1] is None), reverse=True)
    return [s for s in states if s[0] <= aim], [s for s in states if s[0] > aim]


def _take_first(trainer: Trainer, states: list[State]) -> RollbackPoint:
    """Restore the first complete state."""
    passed_over: tuple[str, ...] = ()
    for step, path in states:
        try:
            position = trainer.restore(step) if path is None else trainer.load(path)
        except DamagedCheckpoint as error:
            passed_over += (error.why,)
        else:
            return RollbackPoint(position, MEMORY if path is None else str(path), passed_over)
    return RollbackPoint(None, passed_over=passed_over)


def _void(trainer: Trainer, step: int) -> None:
    """Make later states unusable."""
    trainer.copies.forget_after(step)

    def move() -> None:
        for path in checkpoints(trainer.folder.checkpoints):
            if step_of(path) > step:
                set_aside(path, "rolled-back")

    def unmovable(error: Exception) -> Fault:
        return disk_fault(error, trainer.folder.checkpoints, what="changed")

    together(trainer.peers, lambda: None if trainer.peers.rank else move(), unmovable)
