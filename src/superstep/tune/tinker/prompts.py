"""A client's prompt, converted for the sampler."""

from __future__ import annotations

import secrets
from pathlib import Path

from superstep.errors import ConfigError
from superstep.serve.scheduling.request import Sampling
from superstep.tune.tinker import request_schema
from superstep.tune.tinker.sampler import SampleRequest


def sample_request(body: request_schema.SampleBody, adapter: Path | None, context_tokens: int) -> SampleRequest:
    """The sampler's request of a body.

    Raises:
        ConfigError: a field is not supported.
    """
    absent = {
        "target_prompt_logprobs": body.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": body.prompt_alt_tokens_k != 0,
        "record_stability_info": bool(body.record_stability_info),
    }
    for name, is_set in absent.items():
        if is_set:
            raise ConfigError(f"{name} is not here; leave it out.")
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise ConfigError(
                f"prompt has a chunk of type '{chunk.type}'; this model reads tokens alone (encoded_text)."
            )
    prompt = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    if body.prompt_logprobs_last_n is not None and not 1 <= body.prompt_logprobs_last_n < len(prompt):
        raise ConfigError(
            f"prompt_logprobs_last_n = {body.prompt_logprobs_last_n} must be from 1 to {len(prompt) - 1}, one less "
            "than the prompt's tokens."
        )
    if body.topk_prompt_logprobs and not body.prompt_logprobs:
        raise ConfigError("topk_prompt_logprobs goes with prompt_logprobs; ask for both.")
    return SampleRequest(
        prompt=prompt,
        samples=body.num_samples,
        sampling=_sampling(body, context_tokens),
        stops=_stop_texts(body.sampling_params.stop),
        top_sampled=body.topk_sample_logprobs,
        top_prompt=body.topk_prompt_logprobs,
        last=body.prompt_logprobs_last_n,
        adapter=adapter,
    )


def _sampling(body: request_schema.SampleBody, context_tokens: int) -> Sampling:
    params = body.sampling_params
    if params.top_k < -1:
        raise ConfigError(f"sampling_params.top_k = {params.top_k} must be -1, for all tokens, or more.")
    stops = params.stop if isinstance(params.stop, list) else []
    return Sampling(
        max_tokens=context_tokens if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        stop_tokens=tuple(token for token in stops if isinstance(token, int)),
        ignore_eos=params.stop == [],
        prompt_logprobs=bool(body.prompt_logprobs),
    )


def _stop_texts(stop: str | list[str | int] | None) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    return tuple(text for text in stop or [] if isinstance(text, str))
