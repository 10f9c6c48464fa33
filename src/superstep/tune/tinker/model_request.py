"""A client's request for a model, and its plan."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A client's request for a new model.

    Attributes:
        rank: of its adapter.
        seed: of the initial values; None draws one.
        train_mlp, train_attn, train_unembed: which linears get adapters.
    """

    rank: int
    seed: int | None
    train_mlp: bool
    train_attn: bool
    train_unembed: bool

    @property
    def targets(self) -> tuple[str, ...]:
        """The linears of the blocks with adapters; the head has none.

        Raises:
            ConfigError: none is left.
        """
        linears = (*(ATTENTION if self.train_attn else ()), *(FEED_FORWARD if self.train_mlp else ()))
        if not linears:
            raise ConfigError(
                "lora_config has train_attn = train_mlp = false: the head takes no adapter here; train one of the "
                "others."
            )
        return linears


def run_of(config: TinkerConfig, wanted: ModelRequest) -> Resolved:
    """The training plan of a model.

    Raises:
        ConfigError: the request is invalid.
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
