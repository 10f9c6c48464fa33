"""JSON bodies of Tinker's SDK 0.38. Unknown fields are refused, not ignored."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from superstep.errors import ConfigError
from superstep.http.body_validation import StrictBody
from superstep.numerics.update_rules import OptimizerSettings


class Body(StrictBody):
    """An object; ``type`` repeats the path."""

    type: str = ""


class Open(StrictBody, extra="ignore"):
    """An object that may have fields without an effect here."""


class Lora(StrictBody):
    """The adapter of a new model."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(Open):
    """The optimizer; other kinds have fields of their own."""

    type: str = "adamw"


class CreateSession(Body):
    """POST /create_session."""

    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    """POST /session_heartbeat."""

    session_id: str


class CreateModel(Body):
    """POST /create_model."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class OfModel(Body):
    """POST /get_info."""

    model_id: str


class AdamParams(StrictBody):
    """The settings of one update, under Tinker's names."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @property
    def hyper(self) -> OptimizerSettings:
        """Settings of our optimizer: no clipping where the largest norm is 0.

        Raises:
            ConfigError: a number is out of range.
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
        return OptimizerSettings(
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            clip_norm=self.grad_clip_norm or float("inf"),
        )


class OptimStep(Body):
    """POST /optim_step."""

    model_id: str
    seq_id: int | None = None
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    """POST /save_weights."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Body):
    """POST /save_weights_for_sampler."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    """POST /load_weights: onto a model, or as a new one of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: str | None = None


class CreateSampling(Body):
    """POST /create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(Open):
    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list)


class Prompt(Open):
    chunks: list[PromptChunk]


class SamplingParams(StrictBody):
    """Sampling parameters."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Body):
    """POST /asample."""

    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class Retrieve(Body):
    """POST /retrieve_future."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(Body):
    """POST /weights_info."""

    tinker_path: str
