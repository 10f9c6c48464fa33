"""Routers: the experts of a token, their weights, and the losses that balance the experts.

    dropless     softmax, the best k, nobody is turned away        Jiang 2024; Yang 2025
    switch       softmax, the best one, limited room               Fedus 2021, sec. 2.1
    top2         softmax, the best two, the second by chance,      Lepikhin 2020, algorithm 1
                 limited room
    sigmoid      sigmoid of each logit, the best k by score    DeepSeek-AI 2024, "DeepSeek-V3", sec. 2.1.2
                 plus bias within the best groups; the bias
                 has no gradient and evens the load
    noisy-topk   the best k of noisy logits, softmax of those      Shazeer 2017, eq. 3 to 5

A router processes whole sequences, and each sequence is a group of its own: its capacity, the order in which tokens are
dropped, and its losses depend on its tokens alone. So no decision depends on how a batch is cut. The papers use a group
of many sequences, or a whole batch, with the same formulas.

    B  sequences      E  experts
    S  positions      k  experts of a token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.plan.model.shape import MoeShape

NOBODY = -1
"""In place of an expert: the token has none, as there was no capacity or no second choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The routing of whole sequences.

    Attributes:
        choice: [B, S, k], the chosen experts, the best first; NOBODY for a second choice that was not drawn.
        expert: [B, S, k], those with capacity for the token; else NOBODY.
        weight: [B, S, k], of each expert's output; zero for NOBODY.
        balance: [B], the balance loss of each sequence, not yet weighted.
        z: [B], the z-loss of each sequence, not yet weighted.
    """

    choice: Tensor
    expert: Tensor
    weight: Tensor
    balance: Tensor
    z: Tensor


def noise_width(moe: MoeShape) -> int:
    """Draws of noise that a router needs for each token in training."""
    return {"noisy-topk": moe.experts, "top2": 1}.get(moe.router, 0)


def route(moe: MoeShape, logits_BSE: Tensor, noise_BSE: Tensor | None, bias_E: Tensor | None = None) -> Routing:
    """Route whole sequences.

    Args:
        moe: the router and its numbers.
        logits_BSE: [B, S, moe.logits], fp32 or wider.
        noise_BSE: [B, S, noise_width] draws of normal(0, 1); None in evaluation, without noise.
        bias_E: of the choice, with sigmoid.
    """
    match moe.router:
        case "dropless" | "switch":
            return _best(moe, logits_BSE)
        case "sigmoid":
            assert bias_E is not None
            return _best_of_groups(moe, logits_BSE, bias_E)
        case "top2":
            return _top2(moe, logits_BSE, noise_BSE)
        case "noisy-topk":
            return _noisy_top_k(moe, logits_BSE, noise_BSE)


def _best(moe: MoeShape, logits_BSE: Tensor) -> Routing:
    probability_BSE = logits_BSE.softmax(-1)
    weight_BSk, choice_BSk = probability_BSE.topk(moe.experts_per_token)
    if moe.renormalise:
        weight_BSk = weight_BSk / weight_BSk.sum(-1, keepdim=True)
    balance_B = balance_loss(probability_BSE, choice_BSk)
    return _with_room(moe, choice_BSk, weight_BSk, balance_B, z_loss(logits_BSE))


def _best_of_groups(moe: MoeShape, logits_BSE: Tensor, bias_E: Tensor) -> Routing:
    # By exponential and division: the bits of an element do not depend on its place, as those of torch's sigmoid do.
    score_BSE = 1.0 / ((-logits_BSE).exp() + 1.0)
    ranked_BSE = score_BSE.detach() + bias_E.detach().to(score_BSE.dtype)
    if moe.groups > 1:
        each_BSGe = ranked_BSE.unflatten(-1, (moe.groups, -1))
        of_group_BSG = each_BSGe.topk(2, -1)[0].sum(-1)  # by its two best experts
        taken_BSg = of_group_BSG.topk(moe.groups_per_token, -1)[1]
        is_taken_BSG = torch.zeros_like(of_group_BSG, dtype=torch.bool).scatter(-1, taken_BSg, value=True)
        ranked_BSE = each_BSGe.masked_fill(~is_taken_BSG[..., None], float("-inf")).flatten(-2)
    choice_BSk = ranked_BSE.topk(moe.experts_per_token)[1]
    weight_BSk = score_BSE.gather(-1, choice_BSk)
    if moe.renormalise:
        weight_BSk = weight_BSk / (weight_BSk.sum(-1, keepdim=True) + 1e-20)
    share_BSE = score_BSE / score_BSE.sum(-1, keepdim=True)
    balance_B = balance_loss(share_BSE, choice_BSk)
    return _with_room(moe, choice_BSk, weight_BSk * moe.scale, balance_B, z_loss(logits_BSE))


def _top2(moe: MoeShape, logits_BSE: Tensor, noise_BS1: Tensor | None) -> Routing:
    probability_BSE = logits_BSE.softmax(-1)
    weight_BS2, choice_BS2 = probability_BSE.topk(2)
    weight_BS2 = weight_BS2 / weight_BS2.sum(-1, keepdim=True)
    balance_B = balance_loss(probability_BSE, choice_BS2[..., :1])
    if noise_BS1 is not None:
        # The second choice is used with probability min(1, 2 · weight). Φ makes the normal draw a uniform one. An
        # unused choice takes no capacity.
        is_taken_BS1 = 2 * weight_BS2[..., 1:] > torch.special.ndtr(noise_BS1)
        second_BS1 = choice_BS2[..., 1:].where(is_taken_BS1, NOBODY)
        choice_BS2 = torch.cat((choice_BS2[..., :1], second_BS1), -1)
    return _with_room(moe, choice_BS2, weight_BS2, balance_B, z_loss(logits_BSE))


def _noisy_top_k(moe: MoeShape, logits_BSE: Tensor, noise_BSE: Tensor | None) -> Routing:
    k = moe.experts_per_token
    clean_BSE, spread_BSE = logits_BSE.chunk(2, -1)
    # The floor of the spread is from the authors' code: without it a confident router would divide by zero.
    spread_BSE = F.softplus(spread_BSE) + 1e-2
    noisy_BSE = clean_BSE if noise_BSE is None else clean_BSE + noise_BSE * spread_BSE
    top_BSk, choice_BSk = noisy_BSE.topk(k + 1)
    weight_BSk, choice_BSk = top_BSk[..., :k].softmax(-1), choice_BSk[..., :k]
    importance_BE = torch.zeros_like(noisy_BSE).scatter(-1, choice_BSk, weight_BSk).sum(1)
    if noise_BSE is None:
        load_BE = choices(choice_BSk, moe.experts).to(importance_BE)
    else:
        load_BE = expect_load(clean_BSE, noisy_BSE, spread_BSE, top_BSk)
    balance_B = _variation(importance_BE) + _variation(load_BE)
    return _with_room(moe, choice_BSk, weight_BSk, balance_B, z_loss(clean_BSE))


def _with_room(moe: MoeShape, choice_BSk: Tensor, weight_BSk: Tensor, balance_B: Tensor, z_B: Tensor) -> Routing:
    expert_BSk = within_capacity(choice_BSk, moe.experts, moe.capacity(choice_BSk.shape[1]))
    return Routing(
        choice=choice_BSk,
        expert=expert_BSk,
        weight=weight_BSk.masked_fill(expert_BSk == NOBODY, 0.0),
        balance=balance_B,
        z=z_B,
    )


def within_capacity(choice_BSk: Tensor, experts: int, capacity: int | None) -> Tensor:
    """The choices within their expert's capacity, NOBODY for the others: [B, S, k].

    First choices come before second ones, and earlier positions before later ones.
    """
    if capacity is None:
        return choice_BSk
    B, S, k = choice_BSk.shape
    queue_BQ = choice_BSk.transpose(1, 2).flatten(1)
    is_for_BQE = _is_for(queue_BQ, experts)
    place_BQ = (is_for_BQE.cumsum(1) * is_for_BQE).sum(-1)
    return queue_BQ.masked_fill(place_BQ > capacity, NOBODY).view(B, k, S).transpose(1, 2)


def choices(choice_BSk: Tensor, experts: int) -> Tensor:
    """The number of tokens of each sequence that chose each expert: [B, E]."""
    return _is_for(choice_BSk.flatten(1), experts).sum(1)


def _is_for(choice: Tensor, experts: int) -> Tensor:
    return choice.unsqueeze(-1) == torch.arange(experts, device=choice.device)


def balance_loss(probability_BSE: Tensor, choice_BSk: Tensor) -> Tensor:
    """E · Σ_e f_e · P_e of each sequence (Fedus 2021, eq. 4 to 6): [B], and 1 where the load is even.

    f_e is expert e's share of the choices, P_e the mean of its probability. Lepikhin 2020 has 1/E in place of E, so
    that a weight there means 1/E² of ours. Hugging Face's Mixtral sums over the k choices where this takes their mean,
    and averages over layers where these are added: ``plan.model.shape.balance_weight_of``.
    """
    experts = probability_BSE.shape[-1]
    share_BE = choices(choice_BSk, experts) / choice_BSk[0].numel()
    return (share_BE * probability_BSE.mean(1)).sum(-1).mul(experts)


def z_loss(logits_BSE: Tensor) -> Tensor:
    """The mean of (log Σ_e exp logit_e)² over each sequence's tokens (Zoph 2022, eq. 5): [B]."""
    return logits_BSE.logsumexp(-1).square().mean(1)


def expect_load(clean_BSE: Tensor, noisy_BSE: Tensor, spread_BSE: Tensor, top_BSk: Tensor) -> Tensor:
    """The expected number of tokens of each expert if only its own noise were drawn again (Shazeer 2017, eq. 8 to 10):
    [B, E].

    A count has no gradient, this has. Φ((clean - threshold) / spread) is the chance that an expert stays above the k-th
    best of the others.

    Args:
        top_BSk: the best k + 1 of ``noisy_BSE``, the best first.
    """
    # For one of the best k the k-th best of the others is the (k+1)-th of all; for any other it is the k-th.
    kth_BS1, next_BS1 = top_BSk[..., -2:-1], top_BSk[..., -1:]
    threshold_BSE = torch.where(noisy_BSE > next_BS1, next_BS1, kth_BS1)
    chance_BSE: Tensor = torch.special.ndtr((clean_BSE - threshold_BSE) / spread_BSE)
    return chance_BSE.sum(1)


def _variation(total_BE: Tensor) -> Tensor:
    """The squared coefficient of variation over experts: [B], and 0 where they are even."""
    mean_B = total_BE.mean(-1)
    return (total_BE - mean_B[:, None]).square().mean(-1) / (mean_B.square() + 1e-10)
