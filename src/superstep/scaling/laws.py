"""Loss as a function of a model's size and of its training tokens, and the best size for a budget.

    N  parameters     D  training tokens     C = 6·N·D  FLOPs of training (Kaplan 2020, section 2.1)

    Hoffmann 2022, eq. 2    L = E + A / N^alpha + B / D^beta
    Kaplan 2020, eq. 1.5    L = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D
    Kaplan 2020, eq. 1.1    L = (N_c / N)^alpha_N        where data does not limit
    Kaplan 2020, eq. 1.2    L = (D_c / D)^alpha_D        where size does not limit

Losses are in nats per token. N is the runs' own count: Kaplan leaves embeddings out, Hoffmann keeps them in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Two for the forward pass, four for the backward one; attention's own products are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best size and tokens for a budget of FLOPs."""

    params: float
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hoffmann:
    """The parametric law of Hoffmann 2022, eq. 2: the loss of the text itself, plus what size and data lack."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    @property
    def a(self) -> float:
        """Eq. 4."""
        return self.beta / (self.alpha + self.beta)

    @property
    def b(self) -> float:
        """Eq. 4."""
        return self.alpha / (self.alpha + self.beta)

    def constants(self) -> Mapping[str, float]:
        return {"E": self.E, "A": self.A, "B": self.B, "alpha": self.alpha, "beta": self.beta}

    def loss(self, params: float, tokens: float) -> float:
        """Nats per token."""
        return self.E + self.A * math.pow(params, -self.alpha) + self.B * math.pow(tokens, -self.beta)

    def optimum(self, flops: float) -> Optimum:
        """Eq. 4."""
        return _least(math.log(self.A), self.alpha, math.log(self.B), self.beta, flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kaplan:
    """The joint law of Kaplan 2020, eq. 1.5: a power of a sum, which falls to nothing with size and data."""

    alpha_n: float
    alpha_d: float
    n_c: float
    d_c: float

    @property
    def a(self) -> float:
        """The exponent of the best size by eq. 1.5 for C = 6·N·D; Kaplan's 0.73 is that of eq. 1.6, over steps."""
        return self.alpha_d / (self.alpha_n + self.alpha_d)

    @property
    def b(self) -> float:
        """1 - a."""
        return self.alpha_n / (self.alpha_n + self.alpha_d)

    def constants(self) -> Mapping[str, float]:
        return {"alpha_N": self.alpha_n, "alpha_D": self.alpha_d, "N_c": self.n_c, "D_c": self.d_c}

    def loss(self, params: float, tokens: float) -> float:
        """Nats per token."""
        of_size = self.alpha_n / self.alpha_d * math.log(self.n_c / params)
        of_data = math.log(self.d_c / tokens)
        # The two may lie too many powers of ten apart for their sum.
        log_sum = max(of_size, of_data) + math.log1p(math.exp(-abs(of_size - of_data)))
        return math.exp(self.alpha_d * log_sum)

    def optimum(self, flops: float) -> Optimum:
        """The minimum of the sum in eq. 1.5, which has the form of Hoffmann's with beta = 1."""
        ratio = self.alpha_n / self.alpha_d
        return _least(ratio * math.log(self.n_c), ratio, math.log(self.d_c), 1.0, flops)


def _least(log_a: float, alpha: float, log_b: float, beta: float, flops: float) -> Optimum:
    """The minimum of A / N^alpha + B / D^beta for 6·N·D = ``flops`` (Hoffmann 2022, eq. 4).

    N = G·(C/6)^a and D = (C/6)^b / G, with G = (alpha·A / (beta·B))^(1 / (alpha + beta)).
    """
    log_g = (math.log(alpha / beta) + log_a - log_b) / (alpha + beta)
    log_nd = math.log(flops / FLOPS_PER_PARAMETER_AND_TOKEN)
    return Optimum(
        params=math.exp(log_g + beta / (alpha + beta) * log_nd),
        tokens=math.exp(-log_g + alpha / (alpha + beta) * log_nd),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerFrontier:
    """N_opt = params_at·(C / flops_at)^a and D_opt likewise, from approaches 1 and 2 of Hoffmann 2022.

    Attributes:
        flops_at: the middle of the fitted budgets, where the two constants hardly depend on the exponents.
        params_at, tokens_at: best for that budget.
    """

    a: float
    b: float
    flops_at: float
    params_at: float
    tokens_at: float

    def constants(self) -> Mapping[str, float]:
        return {"a": self.a, "b": self.b}

    def optimum(self, flops: float) -> Optimum:
        """By the two power laws; 6·N·D is ``flops`` as far as it was for the runs."""
        return Optimum(
            params=self.params_at * (flops / self.flops_at) ** self.a,
            tokens=self.tokens_at * (flops / self.flops_at) ** self.b,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLaw:
    """L = (scale / x)^alpha, of the size alone or of the tokens alone (Kaplan 2020, eq. 1.1 and 1.2).

    Attributes:
        of: N or D, the letter of x.
        scale: the size or the tokens with a loss of 1 nat.
    """

    of: str
    alpha: float
    scale: float

    def constants(self) -> Mapping[str, float]:
        """The exponent and the scale, under Kaplan's names."""
        return {f"alpha_{self.of}": self.alpha, f"{self.of}_c": self.scale}

    def loss(self, of: float) -> float:
        """Nats per token at a size, or after this many tokens."""
        return math.pow(self.scale / of, self.alpha)


Law = Hoffmann | Kaplan
"""A law gives the loss of a size after some tokens."""
Frontier = Law | PowerFrontier
"""A frontier divides a budget: N_opt ~ C^a and D_opt ~ C^b."""
