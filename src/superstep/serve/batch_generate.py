"""Answers to a list of prompts, without a server: for evaluation, post-training and scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from superstep.errors import ConfigError
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.request import Finish, Request, Sampling, TokenOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """The answer to a prompt.

    Attributes:
        prompt: outputs for the prompt's tokens but the first, if requested.
        cached_tokens: prompt tokens that were cached.
    """

    tokens: tuple[TokenOutput, ...]
    prompt: tuple[TokenOutput, ...]
    finish: Finish
    cached_tokens: int

    @property
    def ids(self) -> list[int]:
        return [output.token for output in self.tokens]


def generate(
    engine: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    *,
    adapter: str = "",
    tell: Callable[[int, int], None] | None = None,
) -> list[PromptResult]:
    """Answer all prompts, in batches where possible.

    Args:
        engine: idle.
        sampling: for all, or one for each.
        adapter: empty for the model itself.
        tell: called after each step with the number of answered prompts, and of all.

    Raises:
        ConfigError: a prompt cannot be answered; then none was.
    """
    ways = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(ways) != len(prompts):
        raise ConfigError(f"sampling has {len(ways)} entries for {len(prompts)} prompts; give one for all, or as many.")
    if engine.is_held:
        raise ConfigError("the engine is paused or asleep; resume or wake it before it is asked.")
    if not engine.is_idle:
        raise ConfigError("the engine has requests of others; answer prompts with an engine of their own.")
    requests = [
        Request(id=n, prompt=tuple(p), sampling=s, adapter=adapter)
        for n, (p, s) in enumerate(zip(prompts, ways, strict=True))
    ]
    try:
        for request in requests:
            engine.add(request)
    except ConfigError:
        for request in requests:
            engine.abort(request.id)
        engine.step()
        raise
    results = [PromptResult(tokens=(), prompt=(), finish="abort", cached_tokens=0)] * len(requests)
    done = 0
    while not engine.is_idle:
        for news in engine.step():
            before = results[news.request]
            results[news.request] = replace(
                before,
                tokens=(*before.tokens, *news.tokens),
                prompt=(*before.prompt, *news.prompt),
                finish=news.finish or before.finish,
                cached_tokens=news.cached_tokens,
            )
            done += news.finish is not None
        if tell is not None:
            tell(done, len(requests))
    return results
