"""What a client asks of a model and of an update, and the plan that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.engine.adamw import Hyper
from superstep.errors import ConfigError
from superstep.plan.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
)
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.tune.tinker.config import TinkerConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
EXACT_CHUNKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What a client asks of a new model.

    Attributes:
        rank: of its adapter.
        seed: of the first values; None draws one.
        train_mlp, train_attn, train_unembed: which linears get adapters.
    """

    rank: int
    seed: int | None
    train_mlp: bool
    train_attn: bool
    train_unembed: bool

    @property
    def targets(self) -> tuple[str, ...]:
        """Of the blocks; the head takes no adapter.

        Raises:
            ConfigError: nothing is left.
        """
        linears = (*(ATTENTION if self.train_attn else ()), *(FEED_FORWARD if self.train_mlp else ()))
        if not linears:
            raise ConfigError(
                "lora_config has train_attn = train_mlp = false: the head takes no adapter here; train one of the "
                "others."
            )
        return linears


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """The settings of one update, as Tinker names them."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @property
    def hyper(self) -> Hyper:
        """The same for our optimizer: no bound where the largest norm is 0.

        Raises:
            ConfigError: a number lies where it means nothing.
        """
        rules = {
            "learning_rate": (0 <= self.learning_rate < float("inf"), "at least 0 and finite"),
            "beta1": (0 <= self.beta1 < 1, "at least 0 and below 1"),
            "beta2": (0 <= self.beta2 < 1, "at least 0 and below 1"),
            "eps": (0 < self.eps < float("inf"), "above 0 and finite"),
            "weight_decay": (0 <= self.weight_decay < float("inf"), "at least 0 and finite"),
            "grad_clip_norm": (0 <= self.grad_clip_norm < float("inf"), "at least 0; 0 clips nothing"),
        }
        for name, (is_kept, rule) in rules.items():
            if not is_kept:
                raise ConfigError(f"adam_params.{name} = {getattr(self, name)} must be {rule}.")
        return Hyper(
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            clip_norm=self.grad_clip_norm or float("inf"),
        )


def run_of(config: TinkerConfig, wanted: ModelRequest) -> Resolved:
    """The plan by which a model is trained.

    Raises:
        ConfigError: it cannot be.
    """
    if not 1 <= wanted.rank <= config.most_rank:
        raise ConfigError(f"lora_config.rank = {wanted.rank} must be from 1 to {config.most_rank}.")
    model = ModelConfig(name=str(config.folder / "config.json"))
    tokens = config.context_tokens
    assert tokens is not None, "the service fills it in"
    assert wanted.seed is not None
    if not 0 <= wanted.seed < 2**31:
        raise ConfigError(f"lora_config.seed = {wanted.seed} must be from 0 to {2**31 - 1}.")
    if config.exact:
        tokens -= tokens % EXACT_CHUNKS
    return resolve(
        RunConfig(
            model=model,
            data=DataConfig(sequence_tokens=tokens),
            train=TrainConfig(batch_sequences=1, seed=wanted.seed),
            plan=PlanConfig(tp=1, dp=1, microbatch=1),
            numerics=NumericsConfig(
                compute=config.compute, exact=config.exact, exact_chunks=EXACT_CHUNKS if config.exact else None
            ),
            lora=LoraConfig(rank=wanted.rank, alpha=config.alpha, targets=wanted.targets),
        )
    )
