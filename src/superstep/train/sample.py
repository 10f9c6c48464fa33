"""Text from a user's own model without a KV cache: a plain loop, one token at a time."""

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
    """Generate tokens, until the end of the text or ``tokens`` of them.

    Args:
        model: the trained model: tokens [1, S] to logits [1, S, V].
        prompt: at least one token.
        tokens: the most tokens.
        window_tokens: the model's context: the sequence length of its training.
        temperature: divides the logits before drawing; 0 takes the likeliest token.
        seed: of the draws.
        end_of_text: the token that ends it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens_so_far = list(prompt)
    for _ in range(tokens):
        logits_V = model(torch.tensor([tokens_so_far[-window_tokens:]]))[0, -1].float()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
        if token == end_of_text:
            return
        tokens_so_far.append(token)
        yield token
