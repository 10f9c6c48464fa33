"""The forecast of a server, for display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from superstep.observe.number_format import bytes_text, count_text, seconds_text
from superstep.serve.drafting.speculation_forecast import DraftForecast
from superstep.serve.scheduling.capacity_forecast import ConcurrentRequests, FirstPrompt, PageCapacity


class ForecastNumbers(Protocol):
    """Fields of ``cli.plan.serve.ServeForecast``."""

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
    def rooms(self) -> tuple[PageCapacity, ...]: ...
    @property
    def firsts(self) -> tuple[FirstPrompt, ...]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def answer_tokens(self) -> int: ...
    @property
    def crowds(self) -> tuple[ConcurrentRequests, ...]: ...
    @property
    def speculate(self) -> str: ...
    @property
    def small_weight_bytes(self) -> float: ...
    @property
    def guesses(self) -> tuple[DraftForecast, ...]: ...


def serve_text(forecast: ForecastNumbers) -> str:
    """The page."""
    ranks = f"{forecast.tp} {'rank' if forecast.tp == 1 else 'ranks'}"
    ranks += f" x {forecast.dp} replicas" if forecast.dp > 1 else ""
    basis = (
        "published peak rates, an assumed host"
        if forecast.spread is None
        else f"a step is predicted within {forecast.spread:.0%} in the median"
    )
    lines = [
        f"{forecast.model} ({count_text(forecast.parameters)} parameters), {forecast.way}, on {forecast.where}, "
        f"{ranks}; {basis}",
        "",
        f"weights   {bytes_text(forecast.weight_bytes):>10} a rank",
        *_small(forecast),
        f"keys      {bytes_text(forecast.key_bytes):>10} a rank: {forecast.pages:,} pages of {forecast.page_tokens} "
        f"tokens, {bytes_text(forecast.page_bytes)} each",
    ]
    if forecast.beside_bytes:
        lines.append(
            f"beside    {bytes_text(forecast.beside_bytes):>10} a rank: the process, and temporary tensors of a step"
        )
    lines += ["", f"{'context':>8}{'streams':>9}   that run at once"]
    lines += [f"{room.context_tokens:>8,}{room.streams * forecast.dp:>9,}" for room in forecast.rooms]
    lines += ["", f"{'prompt':>8}{'first token':>13}   alone; limited by"]
    lines += [
        f"{one.prompt_tokens:>8,}{seconds_text(one.first_token_s):>13}   {_bounds(one.bounds)}"
        for one in forecast.firsts
    ]
    lines += [
        "",
        f"{'streams':>8}{'tokens/s':>10}{'first token':>13}{'each token':>12}   {forecast.prompt_tokens} tokens in, "
        f"{forecast.answer_tokens} out, all at once; limited by",
    ]
    for crowd in forecast.crowds:
        lost = f"; pages run out, {crowd.preemptions} preempted" if crowd.preemptions else ""
        lines.append(
            f"{crowd.streams:>8,}{count_text(crowd.tokens_per_s):>10}{seconds_text(crowd.first_token_s):>13}"
            f"{seconds_text(crowd.token_s):>12}   {_bounds(crowd.bounds)}{lost}"
        )
    if forecast.guesses:
        lines += _guesses(forecast)
    lines += ["", "These figures are for the engine; HTTP takes a few percent more."]
    return "\n".join(lines)


def _small(forecast: ForecastNumbers) -> list[str]:
    if not forecast.small_weight_bytes:
        return []
    small = bytes_text(forecast.small_weight_bytes)
    return [f"small     {small:>10} a rank: {forecast.speculate}, its keys lie in the same pages"]


def _guesses(forecast: ForecastNumbers) -> list[str]:
    """The cost of speculative decoding, and when it pays."""
    lines = [
        "",
        f"{'streams':>8}{'a step':>11}{'draft':>11}{'verify':>11}{'if all pass':>14}   tokens drafted by "
        f"{forecast.speculate}, not counted in the lines above; it gains time if",
    ]
    for one in forecast.guesses:
        pays = "never" if one.pays_from >= one.tokens else f"{one.pays_from:.1f} or more are accepted"
        lines.append(
            f"{one.streams:>8,}{seconds_text(one.plain_s):>11}{seconds_text(one.guess_s):>11}"
            f"{seconds_text(one.step_s):>11}{count_text(one.best_tokens_per_s):>10}/s"
            f"   drafting {one.tokens} of each: {pays}"
        )
    return lines


def _bounds(bounds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in list(bounds.items())[:2] if share >= 0.005)
