"""`grade check`: attacks a grader before training does, and reports where it pays for a wrong answer.

Training exploits any attack that scores, even a little. An attack that breaks the grader is a weakness too: it earns
nothing, but the rollout is lost each time, and a policy can learn to cause that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from superstep.errors import ConfigError
from superstep.grade.attacks.answers import answers
from superstep.grade.attacks.frame import every_option_framed, find_frame, in_frame
from superstep.grade.attacks.programs import in_fence, programs
from superstep.grade.attacks.protocol import Attack
from superstep.grade.environment import Environment
from superstep.grade.sandbox.sandbox import MemoryBound
from superstep.grade.task import Task, answer_rollout
from superstep.grade.verdict import Verdict
from superstep.grade.workers.pool import Pool

Flaw = Literal["scores", "breaks", "refuses", "varies"]

CHANCE = 0.75
"""The largest share of tasks on which a guess may be right by chance: on yes or no it is half of them."""

SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Weakness:
    """A weakness of a grader, with one task that shows it.

    Attributes:
        flaw: an attack scores, it breaks the grader, or a right answer is refused or graded in two ways.
        index: a task that shows it.
        answer: the answer to that task, shortened.
        verdict: the verdict on that answer.
        tasks: the number of tasks that show it.
    """

    attack: str
    flaw: Flaw
    index: int
    answer: str
    verdict: Verdict
    tasks: int


@dataclass(frozen=True, slots=True)
class AttackReport:
    """The result of a check. ``memory_bound``: None where there is no sandbox, and the grader runs no program."""

    attacks: int
    tasks: int
    graded: int
    weaknesses: tuple[Weakness, ...]
    has_solutions: bool
    memory_bound: MemoryBound | None


def check(
    environment: Environment,
    pool: Pool,
    *,
    tasks: int,
    seed: int,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> AttackReport:
    """Attack a grader on some tasks.

    Args:
        tasks: the number of tasks, from index 0.
        tell: called with the number of finished grades and their total.

    Raises:
        ConfigError: a task cannot be made, or differs when it is made again.
    """
    made = [_make_task(environment, index, seed) for index in range(tasks)]
    attacks = [*_answers_and_programs(made), *_of_others(made)]
    verdicts: dict[str, list[tuple[int, str, Verdict]]] = {attack.name: [] for attack in attacks}
    graded = 0
    for index, task in enumerate(made):
        tried = [attack for attack in attacks if not _is_settled(attack, verdicts[attack.name])]
        pending = [(attack, answer) for attack in tried if (answer := attack.answer(task)) is not None]
        pending_verdicts = [pool.submit(index, seed, answer_rollout(answer)) for _, answer in pending]
        for (attack, answer), future in zip(pending, pending_verdicts, strict=True):
            verdicts[attack.name].append((index, answer, future.result()))
            graded += 1
        tell(index + 1, tasks)
    weak = [each for attack in attacks for each in _weaknesses(attack, verdicts[attack.name], tasks)]
    solved = list(_of_solutions(made, pool, seed))
    return AttackReport(
        attacks=len(attacks),
        tasks=tasks,
        graded=graded,
        weaknesses=(*weak, *solved),
        has_solutions=any(task.solution is not None for task in made),
        memory_bound=None if pool.sandbox_fault else pool.memory_bound,
    )


def _make_task(environment: Environment, index: int, seed: int) -> Task:
    task, again = environment.task(index, seed), environment.task(index, seed)
    if repr(task) != repr(again):
        raise ConfigError(
            f"{environment.path}: task({index}, {seed}) gives another task each time; make it of index and seed alone, "
            "random.Random(f'{seed} {index}') say."
        )
    return task


def _answers_and_programs(made: Sequence[Task]) -> Iterator[Attack]:
    attacks = [*answers(), *programs()]
    yield from attacks
    yield from map(in_fence, programs())
    if any(find_frame(task) for task in made):
        yield from map(in_frame, attacks)
        yield Attack("every option, each in the answer's place", every_option_framed)


def _of_others(made: Sequence[Task]) -> Iterator[Attack]:
    """The right answer to another task, as a guess."""
    solutions = [task.solution for task in made]
    for solution in dict.fromkeys(solutions):
        if solution is not None and len(set(solutions)) > 1:
            name = f"the answer of task {solutions.index(solution)}"
            yield Attack(name, lambda task, other=solution: other if task.solution != other else "", is_a_guess=True)  # type: ignore[misc]


def _is_settled(attack: Attack, verdicts: Sequence[tuple[int, str, Verdict]]) -> bool:
    """Whether the attack is already known to score or to break the grader: another try may take a minute."""
    return any(not verdict.is_decided or (verdict.score > 0 and not attack.is_a_guess) for _, _, verdict in verdicts)


def _weaknesses(attack: Attack, verdicts: Sequence[tuple[int, str, Verdict]], tasks: int) -> Iterator[Weakness]:
    broken = [(index, answer, verdict) for index, answer, verdict in verdicts if not verdict.is_decided]
    paid = [(index, answer, verdict) for index, answer, verdict in verdicts if verdict.score > 0]
    if broken:
        index, answer, verdict = broken[0]
        yield Weakness(attack.name, "breaks", index, shorten(answer), verdict, len(broken))
    earned = (
        sum(verdict.score for _, _, verdict in paid) / tasks
    )  # those with nothing to try too: on few, a guess is right by chance
    if paid and (earned > CHANCE or not attack.is_a_guess):
        index, answer, verdict = paid[0]
        yield Weakness(attack.name, "scores", index, shorten(answer), verdict, len(paid))


def _of_solutions(made: Sequence[Task], pool: Pool, seed: int) -> Iterator[Weakness]:
    pending: list[tuple[int, str, Future[Verdict], Future[Verdict]]] = []
    for index, task in enumerate(made):
        if task.solution is not None:
            rollout = answer_rollout(task.solution)
            pending.append((index, task.solution, pool.submit(index, seed, rollout), pool.submit(index, seed, rollout)))
    for index, solution, future, other in pending:
        verdict, again = future.result(), other.result()
        if verdict.score < 1.0:
            yield Weakness("the task's own solution", "refuses", index, shorten(solution), verdict, 1)
        elif again.score != verdict.score:
            yield Weakness("the task's own solution", "varies", index, shorten(solution), again, 1)


def shorten(answer: str) -> str:
    """An answer as one short line of ASCII."""
    text = ascii(answer)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(answer)} characters)"
