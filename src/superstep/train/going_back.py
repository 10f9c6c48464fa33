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
from pathlib import Path

from superstep.errors import Damaged, Fault
from superstep.observe.events import Event, RolledBack
from superstep.state.folders import checkpoint_at, checkpoints, set_aside, step_of
from superstep.state.manifest import Position
from superstep.state.together import together
from superstep.train.course import Refused
from superstep.train.session import Session

MEMORY = "memory"


def go_back(session: Session, position: Position, refused: Refused, told: Callable[[Event], None]) -> Position:
    """Where the run goes on from. Every rank calls this together, with its state as the step found it.

    Raises:
        Fault: it has gone back often enough.
    """
    rules = session.course.rules
    assert rules is not None
    if session.course.is_hopeless(refused):
        raise Fault(
            f"{refused.why}, and the run has gone back {rules.repeats} times without getting further: training has "
            "diverged. Lower train.lr or raise train.warmup_steps, and resume from the last checkpoint.",
            rank=session.peers.rank,
            step=refused.step,
        )
    aim = refused.step - 1 - rules.back_steps
    found, source = position, MEMORY
    if rules.back_steps:
        session.copies.drain()  # what is on its way to the disk shall not come to be seen later
        found, source = _oldest_needed(session, position, aim)
        _void(session, found.step)
    skip = session.course.go_back(found.step, refused)
    told(
        RolledBack(
            step=found.step,
            refused=refused.step,
            why=refused.why,
            loss=refused.loss,
            grad_norm=refused.grad_norm,
            source=source,
            skip=skip,
        )
    )
    return found


def _oldest_needed(session: Session, position: Position, aim: int) -> tuple[Position, str]:
    """The newest state that is no younger than ``aim``, else the oldest that there is: taken, and where it is from."""
    peers = session.peers
    in_memory = set.intersection(*peers.gather(session.copies.steps()))
    in_memory = {step for step in in_memory if step < position.step}

    def unreadable(error: Exception) -> Fault:
        return Fault(f"{session.folder.checkpoints} cannot be read ({error}); mend that, then resume.")

    # One rank looks: what another sees of a network file system may be older.
    on_disk = together(peers, lambda: [] if peers.rank else checkpoints(session.folder.checkpoints), unreadable)[0]
    places = {step: path for path in on_disk if (step := step_of(path)) <= position.step}
    steps = sorted(in_memory | set(places) | {position.step}, reverse=True)
    old_enough = [step for step in steps if step <= aim]
    for step in old_enough or steps[::-1]:
        if step == position.step:
            return position, MEMORY
        if step in in_memory:
            return session.restore(step), MEMORY
        try:
            return session.load(places[step]), str(places[step])
        except Damaged:
            continue
    return position, MEMORY


def _void(session: Session, step: int) -> None:
    """See that nothing goes on from a later state."""
    session.copies.forget_after(step)

    def move() -> None:
        for path in checkpoints(session.folder.checkpoints):
            if step_of(path) > step:
                set_aside(path, "rolled-back")

    def unmovable(error: Exception) -> Fault:
        root: Path = checkpoint_at(session.folder.checkpoints, step).parent
        return Fault(f"checkpoints in {root} cannot be moved ({error}); mend that, then resume.")

    together(session.peers, lambda: None if session.peers.rank else move(), unmovable)
