"""Connectionist temporal classification (CTC, Graves 2006) on rows of ragged samples.

An encoder gives, at each place of a sound, the log-probability of each letter and of output 0, the blank. A way to read
letters takes one output for each place; equal letters in a row and blanks are then left out. What the functions below
return depends on the letters up to a place alone, and on the whole sound, so a decoder may read it.

    B  rows    S  places of a row of sounds    T  places of a row of letters    V  letters, with the blank

A sample's letters begin with one that stands for none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NEVER = -1e6
"""The log-probability of what cannot be."""


def prefixes_within(logp_BSV: Tensor, numbers_BS: Tensor, letters_BT: Tensor, letter_numbers_BT: Tensor) -> Tensor:
    """The log-probability that the places of a sample up to s are read as its letters up to t, [B, S, T] in fp32.

    Args:
        logp_BSV: of each output.
        numbers_BS: the number of each place's sample, -1 in the padding.
        letters_BT: class numbers.
        letter_numbers_BT: likewise of the letters.
    """
    logp_BSV = logp_BSV.float()
    is_own_BST = _is_own(numbers_BS, letter_numbers_BT)
    is_none_BT, is_first_BS = _is_first(letter_numbers_BT), _is_first(numbers_BS)
    is_repeated_BT = letters_BT == letters_BT.roll(-1, 1)  # by the letter behind it
    read_BST = logp_BSV.gather(2, letters_BT[:, None].expand(-1, logp_BSV.shape[1], -1))
    read_BST = read_BST.masked_fill(~is_own_BST | is_none_BT[:, None], NEVER)
    blank_BST = logp_BSV[..., :1].masked_fill(~is_own_BST, NEVER)
    ways: Tensor = _count_ways(read_BST, blank_BST, is_repeated_BT, is_none_BT, is_first_BS)
    return ways[2]


@torch.library.custom_op("superstep::ctc_ways", mutates_args=())
def _count_ways(
    read_BST: Tensor, blank_BST: Tensor, is_repeated_BT: Tensor, is_none_BT: Tensor, is_first_BS: Tensor
) -> Tensor:
    """Log-probabilities of the ways whose last output is the letter, is the blank, and of both: [3, B, S, T].

    Args:
        read_BST: of each letter at each place.
        blank_BST: likewise of the blank.
        is_repeated_BT: whether the letter behind is the same.
        is_none_BT: whether it stands for no letter.
        is_first_BS: whether a place is the first of its sample.
    """
    start_BT = torch.full_like(read_BST[:, 0], NEVER).masked_fill(is_none_BT, 0.0)
    never_BT = torch.full_like(start_BT, NEVER)
    letter_BT = silent_BT = both_BT = never_BT
    ways = read_BST.new_empty((3, *read_BST.shape))
    for place in range(read_BST.shape[1]):
        begins_B1 = is_first_BS[:, place : place + 1]
        letter_BT, silent_BT = torch.where(begins_B1, never_BT, letter_BT), torch.where(begins_B1, start_BT, silent_BT)
        both_BT = torch.where(begins_B1, start_BT, both_BT)
        before_BT = torch.where(is_repeated_BT, silent_BT, both_BT).roll(1, 1)
        letter_BT = (torch.logaddexp(letter_BT, before_BT) + read_BST[:, place]).clamp_(min=NEVER)
        silent_BT = (both_BT + blank_BST[:, place]).clamp_(min=NEVER)
        both_BT = torch.logaddexp(letter_BT, silent_BT)
        for way, each in zip(ways, (letter_BT, silent_BT, both_BT), strict=True):
            way[:, place] = each
    return ways


@torch.library.custom_op("superstep::ctc_ways_backward", mutates_args=())
def _count_ways_backward(
    grad_BST: Tensor, ways: Tensor, is_repeated_BT: Tensor, is_none_BT: Tensor, is_first_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``read_BST`` and ``blank_BST``, of that of both ways together."""
    letter_BST, silent_BST, both_BST = ways
    to_read_BST, to_blank_BST = torch.empty_like(grad_BST), torch.empty_like(grad_BST)
    to_letter_BT = to_silent_BT = to_both_BT = torch.zeros_like(grad_BST[:, 0])
    for place in reversed(range(grad_BST.shape[1])):
        both_BT, grad_BT = both_BST[:, place], grad_BST[:, place] + to_both_BT
        to_letter_BT = to_letter_BT + grad_BT * (letter_BST[:, place] - both_BT).exp()
        to_silent_BT = to_silent_BT + grad_BT * (silent_BST[:, place] - both_BT).exp()
        to_read_BST[:, place], to_blank_BST[:, place] = to_letter_BT, to_silent_BT
        goes_on_B1 = ~is_first_BS[:, place : place + 1]
        letter_BT, silent_BT, both_BT = ways[:, :, max(0, place - 1)]
        before_BT = torch.where(is_repeated_BT, silent_BT, both_BT).roll(1, 1)
        share_BT = (letter_BT - torch.logaddexp(letter_BT, before_BT)).exp()
        to_before_BT = (to_letter_BT * (1 - share_BT)).masked_fill(is_none_BT, 0.0).roll(-1, 1)
        to_both_BT = (to_silent_BT + to_before_BT.masked_fill(is_repeated_BT, 0.0)) * goes_on_B1
        to_silent_BT = to_before_BT.masked_fill(~is_repeated_BT, 0.0) * goes_on_B1
        to_letter_BT = to_letter_BT * share_BT * goes_on_B1
    return to_read_BST, to_blank_BST


@_count_ways.register_fake
def _(read_BST: Tensor, *_: Tensor) -> Tensor:
    return read_BST.new_empty((3, *read_BST.shape))


@_count_ways_backward.register_fake
def _(grad_BST: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad_BST), torch.empty_like(grad_BST)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ANN401
    ctx.save_for_backward(output, *inputs[2:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    """Of both ways together, which alone are used."""
    return *_count_ways_backward(grad[2].contiguous(), *ctx.saved_tensors), None, None, None


_count_ways.register_autograd(_backward, setup_context=_keep)


def next_places_within(
    prefix_BST: Tensor, blank_BS: Tensor, numbers_BS: Tensor, letter_numbers_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the letter behind each one begins, [B, T, S], and the probability that none is left, [B, T]. Both add up to
    1 over the places. There is no gradient.

    Args:
        prefix_BST: of ``prefixes_within``.
        blank_BS: log-probability of the blank.
        numbers_BS: the number of each place's sample, -1 in the padding.
        letter_numbers_BT: likewise of the letters.
    """
    with torch.no_grad():
        start_BT = torch.full_like(prefix_BST[:, 0], NEVER).masked_fill(_is_first(letter_numbers_BT), 0.0)
        before_BST = prefix_BST.roll(1, 1).where(~_is_first(numbers_BS).unsqueeze(-1), start_BT.unsqueeze(1))
        starts_BST = before_BST + (-blank_BS.float().expm1()).clamp(min=1e-6).log().unsqueeze(-1)
        is_own_BST = _is_own(numbers_BS, letter_numbers_BT)
        starts_BST = starts_BST.masked_fill(~is_own_BST, NEVER)
        ended_BT = _at_ends(prefix_BST, numbers_BS, is_own_BST)
        shares = torch.cat([starts_BST, ended_BT.unsqueeze(1)], 1).softmax(1)
        return shares[:, :-1].transpose(1, 2), shares[:, -1]


def ctc_within(prefix_BST: Tensor, numbers_BS: Tensor, letter_numbers_BT: Tensor) -> Tensor:
    """Minus the log-probability of each sample's letters, at the last of them, [B, T].

    It is zero elsewhere, and where a sound has too few places for its letters.
    """
    is_last_BT = _is_first(letter_numbers_BT.flip(1)).flip(1) & (letter_numbers_BT >= 0)
    whole_BT = _at_ends(prefix_BST, numbers_BS, _is_own(numbers_BS, letter_numbers_BT))
    return torch.where(is_last_BT & (whole_BT > NEVER / 2), -whole_BT, 0.0)


def _at_ends(prefix_BST: Tensor, numbers_BS: Tensor, is_own_BST: Tensor) -> Tensor:
    """The values of each letter at the last place of its sample, [B, T]; NEVER without one."""
    is_end_BST = _is_first(numbers_BS.flip(1)).flip(1).unsqueeze(-1) & is_own_BST
    return prefix_BST.masked_fill(~is_end_BST, NEVER).amax(1)


def _is_own(numbers_BS: Tensor, letter_numbers_BT: Tensor) -> Tensor:
    """Whether a place and a letter are of one sample, [B, S, T]."""
    return (numbers_BS[:, :, None] == letter_numbers_BT[:, None]) & (numbers_BS >= 0)[:, :, None]


def _is_first(numbers_BS: Tensor) -> Tensor:
    """Whether a place is the first one of its sample, [B, S]."""
    is_first_BS = numbers_BS != numbers_BS.roll(1, 1)
    return torch.cat([torch.ones_like(is_first_BS[:, :1]), is_first_BS[:, 1:]], 1)
