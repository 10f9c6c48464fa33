"""Text from a model of one's own, of which the engine knows no keys to keep: a plain loop, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]


@torch.no_grad()
def generate(
    model: Model,
    prompt: list[int],
    *,
    tokens: int,
    window_tokens: int,
    temperature: float,
    seed: int,
    end_of_text: int,
) -> Iterator[int]:
    """Token after token, until the end of the text or ``tokens`` of them.

    Args:
        model: the trained model: tokens [1, S] to logits [1, S, V].
        prompt: at least one token.
        tokens: the most tokens to give.
        window_tokens: how far the model looks back: the sequence length it was trained on.
        temperature: divides the logits before drawing; 0 takes the likeliest token.
        seed: of the draws.
        end_of_text: the token that ends it.
    """
    generator = torch.Generator().manual_seed(seed)
    seen = list(prompt)
    for _ in range(tokens):
        logits_V = model(torch.tensor([seen[-window_tokens:]]))[0, -1].float()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
        if token == end_of_text:
            return
        seen.append(token)
        yield token
