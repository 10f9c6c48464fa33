"""Losses of reinforcement learning, token by token: of a policy that tokens were sampled from.

A sampled token has the log-probability l now. Its streams have earlier values, in order of time:

    sampled     what the sampler gave it, with its own kernels           mu
    old         what the trainer gave it, with the weights of then       pi_old
    l           what the trainer gives it                                pi
    reference   what the model gives it that pi shall stay near          pi_ref
    advantages  how much better its answer was than others: A
    weights     its factor w in the loss; 0 leaves it out, absent is 1

The loss of a token and its derivative by l, with r = exp(l - old) and c for what the sampler did otherwise:

    L  = w · (c · P + kl_coef · K)                       dL = w · (c · dP + kl_coef · dK)

    surrogate   P                                        dP
    score       -A · l                                   -A                        Williams 1992
    ratio       -A · r                                   -A · r                    importance sampling
    clip        -min(A·r, A·clip(r, 1-low, 1+high))      -A · r, or 0 where        Schulman 2017, eq. 7; with high > low
                                                         the bound is the smaller  Yu 2025 (DAPO), eq. 10
    dual clip   as clip, and never above -A · dual       0 there                   Ye 2020, eq. 5
                where A < 0

    correction  c = exp(old - sampled) =: m, held fixed
    tis         min(m, cap)                                                        Yao 2025 (truncated)
    mis         m where floor <= m <= cap, else 0                                  Liu 2025 (masked)

    kl          K, of d = reference - l                  dK                        Schulman 2020
    k1          -d                                       -d
    k2          d^2 / 2                                  -d
    k3          exp(d) - d - 1                           1 - exp(d)

The derivative of k1 itself is 1 for every token, and its mean under the policy is 0: as a loss it would have no effect.
The effect of k1 as a part of the reward is the derivative -d of k2 (Tang 2025), so that is what it has here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from superstep.errors import ConfigError
from superstep.numerics.objective import Streams

Surrogate = Literal["score", "ratio", "clip"]
Correction = Literal["none", "tis", "mis"]
Kl = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """One of the losses above; an objective (``numerics.objective``).

    Attributes:
        surrogate: the loss of an advantage.
        clip_low: of ``clip``: how far the ratio of a bad token may fall below 1 before it has no gradient.
        clip_high: of ``clip``: how far the ratio of a good token may rise above 1.
        dual_clip: of ``clip``: a bound above 1 on the ratio of a bad token; None sets none.
        correction: for a sampler that is not the trainer.
        cap: the largest factor of the correction.
        floor: of ``mis``: the smallest.
        watches_sampler: report the sampler's log-probabilities even without a correction.
        kl: how the distance from the reference is estimated.
        kl_coef: its factor; 0 needs no reference.
        is_fresh: the weights have not changed since: `old` is the current l, held fixed, and no stream.

    Raises:
        ConfigError: a number is out of range.
    """

    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction: Correction = "none"
    cap: float = 2.0
    floor: float = 0.0
    watches_sampler: bool = False
    kl: Kl = "k3"
    kl_coef: float = 0.0
    is_fresh: bool = False

    def __post_init__(self) -> None:
        rules = {
            "clip_low": (0 <= self.clip_low <= 1, "in 0 to 1: a ratio is never below 0"),
            "clip_high": (self.clip_high >= 0, "at least 0"),
            "dual_clip": (self.dual_clip is None or self.dual_clip > 1, "above 1"),
            "cap": (self.cap > 0, "above 0: it is the largest factor of a token"),
            "floor": (0 <= self.floor < self.cap, "at least 0 and below cap"),
            "kl_coef": (self.kl_coef >= 0, "at least 0: it holds the policy near the reference"),
        }
        for name, (is_kept, rule) in rules.items():
            if not is_kept:
                default = next(field.default for field in fields(self) if field.name == name)
                raise ConfigError(f"{name} = {getattr(self, name)} must be {rule}; its default is {default}.")

    @property
    def reads(self) -> tuple[str, ...]:
        """The required streams."""
        sampled = ("sampled",) if self._sees_sampler else ()
        old = () if self.is_fresh else ("old",)
        return ("advantages", *old, *sampled, *(("reference",) if self.kl_coef else ()))

    @property
    def _sees_sampler(self) -> bool:
        return self.watches_sampler or self.correction != "none"

    @property
    def sums(self) -> tuple[str, ...]:
        """Names reported as means over the tokens that count.

        ratio                    r
        old_k1, old_k3           two estimates of the policy's distance from the old one
        entropy                  -l: the entropy of a policy that the tokens are sampled from
        clip_low, clip_high, ..  the share of tokens without gradient, by bound
        sampler_k1, sampler_k3   the distance of the trainer's policy from the sampler's
        correction, masked       c, and the share of tokens that it leaves out
        reference_kl             K
        """
        clip = {"score": (), "ratio": (), "clip": ("clip_low", "clip_high")}[self.surrogate]
        return (
            *("ratio", "old_k1", "old_k3", "entropy", *clip),
            *(("clip_dual",) if clip and self.dual_clip else ()),
            *(("sampler_k1", "sampler_k3") if self._sees_sampler else ()),
            *(("correction",) if self.correction != "none" else ()),
            *(("masked",) if self.correction == "mis" else ()),
            *(("reference_kl",) if self.kl_coef else ()),
        )

    @property
    def maxima(self) -> tuple[str, ...]:
        """Names reported as maxima: the change of log-probabilities from the old ones, and the sampler's difference."""
        return ("max_dlogp", *(("max_sampler_dlogp",) if self._sees_sampler else ()))

    def terms(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        streams = self._with_old(logp_T, streams)
        loss_T, slope_T = self._surrogate(logp_T, streams)
        if self.correction != "none":
            factor_T = self._factor(streams)
            loss_T, slope_T = loss_T * factor_T, slope_T * factor_T
        if self.kl_coef:
            distance_T, pull_T = kl_terms(self.kl, logp_T, streams["reference"])
            loss_T, slope_T = loss_T + self.kl_coef * distance_T, slope_T + self.kl_coef * pull_T
        if "weights" in streams:
            loss_T, slope_T = loss_T * streams["weights"], slope_T * streams["weights"]
        return loss_T, slope_T

    def _with_old(self, logp_T: Tensor, streams: Streams) -> Streams:
        return {**streams, "old": logp_T.detach()} if self.is_fresh else streams

    def _surrogate(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        gain_T = streams["advantages"]
        if self.surrogate == "score":
            return -gain_T * logp_T, -gain_T
        ratio_T = (logp_T - streams["old"]).exp()
        if self.surrogate == "ratio":
            return -gain_T * ratio_T, -gain_T * ratio_T
        bound_T, is_bound_T = ratio_T, torch.zeros_like(ratio_T, dtype=torch.bool)
        for limit, is_left_T in self._bounds(ratio_T, gain_T).values():
            bound_T, is_bound_T = bound_T.masked_fill(is_left_T, limit), is_bound_T | is_left_T
        return -gain_T * bound_T, (-gain_T * ratio_T).masked_fill(is_bound_T, 0.0)

    def _bounds(self, ratio_T: Tensor, gain_T: Tensor) -> Mapping[str, tuple[float, Tensor]]:
        """By name: the ratio that replaces a token's own, and the tokens where it does."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        bounds = {
            "clip_low": (low, (gain_T < 0) & (ratio_T < low)),
            "clip_high": (high, (gain_T > 0) & (ratio_T > high)),
        }
        if self.dual_clip is not None:
            bounds["clip_dual"] = (self.dual_clip, (gain_T < 0) & (ratio_T > self.dual_clip))
        return bounds

    def _factor(self, streams: Streams) -> Tensor:
        """The correction for the sampler's other probabilities."""
        factor_T = (streams["old"] - streams["sampled"]).exp()
        if self.correction == "tis":
            return factor_T.clamp(max=self.cap)
        return factor_T.where((factor_T >= self.floor) & (factor_T <= self.cap), 0.0)

    def watch(self, logp_T: Tensor, streams: Streams) -> Mapping[str, Tensor]:
        """The numbers of ``sums`` and ``maxima`` for each token."""
        streams = self._with_old(logp_T, streams)
        change_T = logp_T - streams["old"]
        ratio_T = change_T.exp()
        values = {
            "ratio": ratio_T,
            "old_k1": -change_T,
            "old_k3": ratio_T - 1 - change_T,
            "entropy": -logp_T,
            "max_dlogp": change_T.abs(),
        }
        if self.surrogate == "clip":
            bounds = self._bounds(ratio_T, streams["advantages"])
            values |= {name: is_left_T for name, (_, is_left_T) in bounds.items()}
        if self._sees_sampler:
            gap_T = streams["old"] - streams["sampled"]
            values |= {"sampler_k1": -gap_T, "sampler_k3": gap_T.exp() - 1 - gap_T, "max_sampler_dlogp": gap_T.abs()}
        if self.correction != "none":
            factor_T = self._factor(streams)
            values |= {"correction": factor_T, "masked": factor_T == 0}
        if self.kl_coef:
            values["reference_kl"] = kl_terms(self.kl, logp_T, streams["reference"])[0]
        return {name: values[name] for name in (*self.sums, *self.maxima)}


def kl_terms(kind: Kl, logp_T: Tensor, reference_T: Tensor) -> tuple[Tensor, Tensor]:
    """An estimate of each token's distance from the reference, and its derivative as a loss."""
    gap_T = reference_T - logp_T
    match kind:
        case "k1":
            return -gap_T, -gap_T
        case "k2":
            return gap_T.square() / 2, -gap_T
        case "k3":
            return gap_T.exp() - gap_T - 1, 1 - gap_T.exp()
