"""Back to an earlier state after a step that was not taken.

    state of step  ... 300        400 401 ... 499 │ 500 refused
                        │          └── back_steps ──┘
    there are           300, and 498 and 499 in memory
    goes on from        300; steps 301 to 399 as before, then skip_batches are left out

The step changed nothing. States after the one that the run goes back to are suspected with it: those in memory are
void, and checkpoints are moved aside, so that nothing ever goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import Damaged, Fault, disk_fault
from superstep.observe.events import Corrupted, Event, RolledBack
from superstep.state.all_or_none import together
from superstep.state.checkpoint_dirs import checkpoints, set_aside, step_of
from superstep.state.manifest import Position
from superstep.train.policy.corruption_check import Corruption, How, ranks_text
from superstep.train.policy.spike_detector import SkippedStep
from superstep.train.session import Session

MEMORY = "memory"


def go_back(session: Session, position: Position, refused: SkippedStep, told: Callable[[Event], None]) -> Position:
    """Where the run goes on from. Every rank calls this together.

    Args:
        session: with its state as the step found it, or as it was found corrupt.
        position: where training stands by that state.
        refused: the step that does not stand.
        told: of what is done.

    Raises:
        Fault: it has gone back often enough, or there is no state to go back to.
    """
    if refused.corruption is not None:
        return _replay(session, position, refused, refused.corruption, told)
    rules = session.course.rules
    assert rules is not None
    if session.course.is_hopeless(refused):
        raise Fault(
            f"{refused.why}, and the run has gone back {rules.repeats} times without getting further: training has "
            "diverged. Lower train.lr or raise train.warmup_steps, and resume from the last checkpoint.",
            rank=session.peers.rank,
            step=refused.step,
        )
    source = RollbackPoint(position)
    if rules.back_steps:
        aim = refused.step - 1 - rules.back_steps
        old_enough, others = _states(session, position, aim)
        source = _taken(session, old_enough or others[::-1])
        _void(session, (source.position or position).step)
    found = source.position or position
    skip = session.course.go_back(found.step, refused)
    told(_event(found, refused, source, skip))
    return found


def _replay(
    session: Session, position: Position, refused: SkippedStep, corruption: Corruption, told: Callable[[Event], None]
) -> Position:
    """Back to before something was found corrupt: from there the steps are done again."""
    integrity = session.integrity
    if not integrity.note(corruption):
        raise Fault(
            f"{refused.why}; that is the fourth time that state is found corrupt. Take "
            f"{ranks_text(corruption.ranks)} to another host, and resume.",
            rank=corruption.ranks[0],
            step=refused.step,
        )
    if corruption.how == "recomputed":  # the update was not made, and the state is what it was
        told(_event(position, refused, RollbackPoint(position), ""))
        tell(session, corruption, corruption.how, position.step, told)
        return position
    old_enough, _ = _states(session, position, integrity.aim)
    source = _taken(session, old_enough)
    found = source.position
    if found is None:
        raise Fault(
            f"{refused.why}, and there is neither a snapshot nor a checkpoint of step {integrity.aim} or before to go "
            "back to. Set state.snapshot_every, and resume from the last checkpoint.",
            rank=corruption.ranks[0],
            step=refused.step,
        )
    _void(session, found.step)
    session.course.forget_after(found.step)
    integrity.begin(found.step)
    told(_event(found, refused, source, ""))
    if corruption.how is not None:
        tell(session, corruption, corruption.how, found.step, told)
    return found


def tell(session: Session, corruption: Corruption, how: How, step: int, told: Callable[[Event], None]) -> None:
    """Say which ranks were wrong. Every rank calls this together."""
    told(
        Corrupted(
            step=step,
            found=corruption.step,
            ranks=corruption.ranks,
            hosts=session.integrity.hosts(corruption.ranks),
            what=corruption.what,
            how=how,
        )
    )


def tell_refused(session: Session, step: int, told: Callable[[Event], None]) -> None:
    """Say which rank's snapshot was damaged, so that the disk did not get it. Every rank calls this together."""
    refused = session.peers.gather(session.copies.take_refused())[0]
    if refused is not None:
        told(
            Corrupted(
                step=step,
                found=refused.step,
                ranks=(refused.rank,),
                hosts=session.integrity.hosts((refused.rank,)),
                what="the copy in memory",
                how="checksum",
            )
        )


def _event(found: Position, refused: SkippedStep, source: RollbackPoint, skip: str) -> RolledBack:
    return RolledBack(
        step=found.step,
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
    """What a run goes back to.

    Attributes:
        position: where training stood; None where there is no such state.
        name: where that is from: memory, or the path of a checkpoint.
        passed_over: what is wrong with each state that was looked at before it.
    """

    position: Position | None
    name: str = MEMORY
    passed_over: tuple[str, ...] = ()


State = tuple[int, Path | None]
"""The step of a state, and the checkpoint that it is in; None: it is in memory."""


def _states(session: Session, position: Position, aim: int) -> tuple[list[State], list[State]]:
    """The states that are no younger than step ``aim``, newest first, and the others; the one in place not among them.
    What is on its way to the disk is there before, so that it cannot come to be seen later.
    """
    session.copies.drain()
    peers = session.peers
    in_memory: list[State] = [(step, None) for step in set.intersection(*peers.gather(session.copies.steps()))]

    def unreadable(error: Exception) -> Fault:
        return disk_fault(error, session.folder.checkpoints, what="read")

    # One rank looks: what another sees of a network file system may be older.
    on_disk = together(peers, lambda: [] if peers.rank else checkpoints(session.folder.checkpoints), unreadable)[0]
    found = in_memory + [(step_of(path), path) for path in on_disk]
    # Of one step, memory comes first.
    found = sorted((s for s in found if s[0] < position.step), key=lambda s: (s[0], s[1] is None), reverse=True)
    return [s for s in found if s[0] <= aim], [s for s in found if s[0] > aim]


def _taken(session: Session, states: list[State]) -> RollbackPoint:
    """The first of them that is whole."""
    passed_over: tuple[str, ...] = ()
    for step, path in states:
        try:
            position = session.restore(step) if path is None else session.load(path)
        except Damaged as error:
            passed_over += (error.why,)
        else:
            return RollbackPoint(position, MEMORY if path is None else str(path), passed_over)
    return RollbackPoint(None, passed_over=passed_over)


def _void(session: Session, step: int) -> None:
    """See that nothing goes on from a later state."""
    session.copies.forget_after(step)

    def move() -> None:
        for path in checkpoints(session.folder.checkpoints):
            if step_of(path) > step:
                set_aside(path, "rolled-back")

    def unmovable(error: Exception) -> Fault:
        return disk_fault(error, session.folder.checkpoints, what="changed")

    together(session.peers, lambda: None if session.peers.rank else move(), unmovable)
