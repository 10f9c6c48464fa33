"""What a server will do, as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from superstep.observe.number_format import bytes_text, count_text, seconds_text
from superstep.serve.capacity_forecast import Crowd, First, Room
from superstep.serve.drafting.speculation_forecast import Guess


class ForecastNumbers(Protocol):
    """What is told: ``cli.plan.serve.ServeForecast`` says what each is."""

    @property
    def model(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def where(self) -> str: ...
    @property
    def way(self) -> str: ...
    @property
    def tp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def spread(self) -> float | None: ...
    @property
    def weight_bytes(self) -> float: ...
    @property
    def key_bytes(self) -> float: ...
    @property
    def beside_bytes(self) -> float: ...
    @property
    def page_bytes(self) -> float: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def rooms(self) -> tuple[Room, ...]: ...
    @property
    def firsts(self) -> tuple[First, ...]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def answer_tokens(self) -> int: ...
    @property
    def crowds(self) -> tuple[Crowd, ...]: ...
    @property
    def speculate(self) -> str: ...
    @property
    def small_weight_bytes(self) -> float: ...
    @property
    def guesses(self) -> tuple[Guess, ...]: ...


def told(found: ForecastNumbers) -> str:
    """The page."""
    ranks = f"{found.tp} {'rank' if found.tp == 1 else 'ranks'}"
    ranks += f" x {found.dp} replicas" if found.dp > 1 else ""
    basis = (
        "published peaks, the host assumed"
        if found.spread is None
        else f"a step is predicted within {found.spread:.0%} in the median"
    )
    lines = [
        f"{found.model} ({count_text(found.parameters)} parameters), {found.way}, on {found.where}, {ranks}; {basis}",
        "",
        f"weights   {bytes_text(found.weight_bytes):>10} a rank",
        *_small(found),
        f"keys      {bytes_text(found.key_bytes):>10} a rank: {found.pages:,} pages of {found.page_tokens} tokens, "
        f"{bytes_text(found.page_bytes)} each",
    ]
    if found.beside_bytes:
        lines.append(
            f"beside    {bytes_text(found.beside_bytes):>10} a rank: the process, and what a step makes and drops"
        )
    lines += ["", f"{'context':>8}{'streams':>9}   that run at once"]
    lines += [f"{room.context_tokens:>8,}{room.streams * found.dp:>9,}" for room in found.rooms]
    lines += ["", f"{'prompt':>8}{'first token':>13}   alone; held back by"]
    lines += [
        f"{one.prompt_tokens:>8,}{seconds_text(one.first_token_s):>13}   {_bounds(one.bounds)}" for one in found.firsts
    ]
    lines += [
        "",
        f"{'streams':>8}{'tokens/s':>10}{'first token':>13}{'each token':>12}   "
        f"{found.prompt_tokens} tokens in, {found.answer_tokens} out, all at once; held back by",
    ]
    for crowd in found.crowds:
        lost = f"; pages run out, {crowd.preemptions} begin again" if crowd.preemptions else ""
        lines.append(
            f"{crowd.streams:>8,}{count_text(crowd.tokens_per_s):>10}{seconds_text(crowd.first_token_s):>13}"
            f"{seconds_text(crowd.token_s):>12}   {_bounds(crowd.bounds)}{lost}"
        )
    if found.guesses:
        lines += _guesses(found)
    lines += ["", "These are the engine's own; HTTP takes a few percent more."]
    return "\n".join(lines)


def _small(found: ForecastNumbers) -> list[str]:
    if not found.small_weight_bytes:
        return []
    small = bytes_text(found.small_weight_bytes)
    return [f"small     {small:>10} a rank: {found.speculate}, whose keys lie in the same pages"]


def _guesses(found: ForecastNumbers) -> list[str]:
    """What guessing takes, and when it pays."""
    lines = [
        "",
        f"{'streams':>8}{'a step':>11}{'guessing':>11}{'judging':>11}{'if all stand':>14}   tokens guessed by "
        f"{found.speculate}, which no line above counts; pays where",
    ]
    for one in found.guesses:
        pays = "never" if one.pays_from >= one.tokens else f"{one.pays_from:.1f} or more stand"
        lines.append(
            f"{one.streams:>8,}{seconds_text(one.plain_s):>11}{seconds_text(one.guess_s):>11}"
            f"{seconds_text(one.step_s):>11}{count_text(one.best_tokens_per_s):>10}/s"
            f"   guessing {one.tokens} of each: {pays}"
        )
    return lines


def _bounds(bounds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in list(bounds.items())[:2] if share >= 0.005)
