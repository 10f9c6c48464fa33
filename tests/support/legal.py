"""Answers drawn at random among the tokens that a matcher allows."""

import numpy as np

CLOSERS = ("}", "]", '"')
"""What is drawn first when an answer has become long: it ends soon then."""


def allowed(matcher):
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def draw(matcher, tokenizer, source, *, soon=40, most=600):
    """Random legal tokens up to the end of an answer."""
    drawn = []
    closers = [tokenizer.end_of_text, *(tokenizer.core.token_to_id(name) for name in CLOSERS)]
    while not matcher.is_done and len(drawn) < most:
        legal = allowed(matcher)
        assert legal, tokenizer.decode(drawn)
        first = [token for token in closers if token in legal] if len(drawn) > soon else []
        token = source.choice(first) if first and source.random() < 0.9 else source.choice(legal)
        assert matcher.advance(token)
        drawn.append(token)
        if token == tokenizer.end_of_text:
            break
    return [token for token in drawn if token != tokenizer.end_of_text]
