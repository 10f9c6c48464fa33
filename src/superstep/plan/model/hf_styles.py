"""The table of Hugging Face's families with blocks unlike Llama's: one row each, with the keys of its numbers.

olmo2         norms after attention and feed-forward; queries and keys normalised over all heads
olmo3         the same; layers with a window, whose rotary embedding is not scaled
gemma2        norms around both, with 1 + weight; gelu; scaled embedding; soft caps; windows in every other layer
gemma3_text   norms likewise, and of queries and keys; another rotary base in layers with a window
granite       Llama's blocks with a factor for embedding, scores, residual stream and logits
qwen3_5_text  linear attention in three layers of four; attention's output has a gate, a quarter of a head is rotated
qwen3_next    the same with experts; shared ones have a gate
gpt_oss       experts with biases and clamped gates; attention with biases and sinks; windows in every other layer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from superstep.plan.model.hf_families import ModelType
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.rope import GPT_OSS_YARN, RopeScaling
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.style import GEMMA, GPT_OSS, LLAMA, OLMO, QWEN_NEXT, BlockStyle


@dataclass(frozen=True, slots=True)
class StyleKey:
    """A number of a file.

    Attributes:
        name: the key in the file.
        field: of ``BlockStyle``.
        read: from the file's number to the field's; ``write`` is its inverse.
        is_optional: whether the file may have null.
    """

    name: str
    field: str
    read: Callable[[float], float] = float
    write: Callable[[float], float] = float
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StyleRow:
    """A family.

    Attributes:
        style: what all models of the family have.
        keys: of the numbers in which they differ.
        qk_norm: whether queries and keys are normalised.
        full_every: n, if every n-th layer sees all tokens and the others have a window, in a file without
            ``layer_types``; None if no layer has a window.
        has_local_rope: whether layers with a window have a rotary embedding of their own.
        has_delta: whether the layers that ``layer_types`` does not give attention have linear attention.
        rope_scaling: that of a file that says nothing about it.
        qkv_bias: whether queries, keys and values have biases.
        gate_key: the key of the activation, and the value that it has.
    """

    style: BlockStyle
    keys: tuple[StyleKey, ...] = ()
    qk_norm: bool = False
    full_every: int | None = None
    has_local_rope: bool = False
    has_delta: bool = False
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    gate_key: tuple[str, str] = ("hidden_act", "silu")

    def read(self, keys: JsonKeys, head_dim: int, local_theta: float | None) -> BlockStyle:
        """The style of the models of a file.

        Args:
            keys: of the file.
            head_dim: the width of its heads.
            local_theta: the rotary base of its layers with a window; None if all layers have the same.
        """
        values: dict[str, Any] = {"local_theta": local_theta}
        for key in self.keys:
            is_absent = key.is_optional and keys.get(key.name) is None
            values[key.field] = None if is_absent else key.read(keys.positive(key.name))
        if values.get("query_scale") == head_dim**-0.5:
            values["query_scale"] = None
        return replace(self.style, **values)

    def write(self, shape: ModelShape) -> dict[str, Any]:
        """The keys of a ``config.json`` that this row reads, for a shape of its family."""
        written: dict[str, Any] = {self.gate_key[0]: self.gate_key[1]}
        for key in self.keys:
            value = getattr(shape.style, key.field)
            if key.field == "query_scale" and value is None:
                value = shape.head_dim**-0.5
            written[key.name] = None if value is None else key.write(value)
        if self.full_every is not None:
            windows = [shape.rule(layer).window for layer in range(shape.layers)]
            # Transformers needs a number, also if no layer has a window.
            written["sliding_window"] = shape.window or shape.max_tokens
            written["layer_types"] = [f"{'full' if each is None else 'sliding'}_attention" for each in windows]
        return written

    def has(self, shape: ModelShape) -> bool:
        """Whether a shape is one of the family."""
        free = {key.field: getattr(LLAMA, key.field) for key in self.keys} | {"local_theta": None, "rotary_share": 1.0}
        return (
            (shape.qk_norm, shape.qkv_bias) == (self.qk_norm, self.qkv_bias)
            and (shape.delta is not None) == self.has_delta
            and (shape.style.local_theta is not None) == self.has_local_rope
            and replace(shape.style, **free) == replace(self.style, **free)
        )


GELU = ("hidden_activation", "gelu_pytorch_tanh")
QUERY_KEY = StyleKey("query_pre_attn_scalar", "query_scale", lambda value: value**-0.5, lambda scale: round(scale**-2))
LOGIT_CAP = StyleKey("final_logit_softcapping", "logit_cap", is_optional=True)
SCORE_CAP = StyleKey("attn_logit_softcapping", "soft_cap", is_optional=True)

STYLES: dict[ModelType, StyleRow] = {
    "olmo2": StyleRow(style=OLMO, qk_norm=True),
    "olmo3": StyleRow(style=OLMO, qk_norm=True, full_every=4, has_local_rope=True),
    "gemma2": StyleRow(style=GEMMA, keys=(QUERY_KEY, SCORE_CAP, LOGIT_CAP), full_every=2, gate_key=GELU),
    "gemma3_text": StyleRow(
        style=GEMMA, keys=(QUERY_KEY, LOGIT_CAP), qk_norm=True, full_every=6, has_local_rope=True, gate_key=GELU
    ),
    "granite": StyleRow(
        style=LLAMA,
        keys=(
            StyleKey("embedding_multiplier", "embedding_scale"),
            StyleKey("attention_multiplier", "query_scale"),
            StyleKey("residual_multiplier", "residual_scale"),
            StyleKey("logits_scaling", "logit_divisor"),
        ),
    ),
    "qwen3_5_text": StyleRow(style=QWEN_NEXT, qk_norm=True, has_delta=True),
    "qwen3_next": StyleRow(style=replace(QWEN_NEXT, shared_gate=True), qk_norm=True, has_delta=True),
    "gpt_oss": StyleRow(
        style=GPT_OSS,
        keys=(StyleKey("swiglu_limit", "gate_limit"), StyleKey("swiglu_alpha", "gate_slope")),
        full_every=2,
        rope_scaling=GPT_OSS_YARN,
        qkv_bias=True,
    ),
}
