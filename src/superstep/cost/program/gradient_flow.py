"""GradientFlow: which linears of a block are trained, and how far gradients flow back in it.

Gradients flow through the whole block where a unit before it has a backward pass, else back to its first trained
parameter:

    place    parameters
    0        norm before attention
    1        queries, keys, values
    2        attention's output
    3        norms after attention and before the feed-forward
    4        gate, up
    5        down
    6        norm after the feed-forward

A linear has a weight gradient where it is trained, and an input gradient where gradients flow to a place before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.plan.model.outline import Parameter
from superstep.plan.model.style import NORM_NAMES
from superstep.plan.resolution.lora import ENDS
from superstep.plan.resolution.resolve import Resolved

_INTO_LINEAR = tuple(f"in_proj_{end}" for end in ("qkv", "z", "b", "a", "qkvz", "ba"))
PLACES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", *_INTO_LINEAR), 1),
    **dict.fromkeys(("o_proj", "out_proj"), 2),
    "gate_proj": 4,
    "up_proj": 4,
    "down_proj": 5,
}
"""The place of each linear."""
ATTENTION, OUTPUT, BETWEEN, GATE, DOWN, AFTER, NONE = 1, 2, 3, 4, 5, 6, 7


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Of one block.

    Attributes:
        layers: names of the layers with a trained parameter.
        linears: the linears among them with a trained weight or a trained factor.
        first: the place to which gradients flow back; ``NONE`` where nothing is computed backward.
    """

    layers: frozenset[str]
    linears: frozenset[str]
    first: int

    def reaches(self, place: int) -> bool:
        """Whether gradients flow back to a place."""
        return self.first <= place

    def reaches_heads(self, letter: str) -> bool:
        """Whether they flow to the norm of the heads of the queries, ``q``, or of the keys, ``k``."""
        return self.first == 0 or bool(self.layers & {f"{letter}_proj", f"{letter}_norm"})

    def has_weight_gradient(self, linear: str) -> bool:
        return linear in self.linears

    def has_input_gradient(self, linear: str) -> bool:
        return self.first < PLACES[linear]


def flow_of(run: Resolved, unit: int) -> GradientFlow:
    """The flow in a block of the decoder."""
    trained = [(_layer_of(p), p) for p in run.outline.units[unit].parameters if not p.is_frozen]
    layers = frozenset(layer for layer, _ in trained)
    linears = frozenset(layer for layer, p in trained if layer in PLACES and len(p.dims) > 1)
    is_behind = run.plan.has_backward[unit - 1]
    return GradientFlow(layers, linears, 0 if is_behind else min((_place(run, each) for each in layers), default=NONE))


def _layer_of(parameter: Parameter) -> str:
    """The name of the layer of a parameter; of a factor, the linear's."""
    name = (
        parameter.name if parameter.factor is None else parameter.name.removesuffix(ENDS[parameter.factor]) + ".weight"
    )
    return name.split(".")[-2]


def _place(run: Resolved, layer: str) -> int:
    before, after, before_inner, after_inner = NORM_NAMES[run.shape.style.norms]
    norms = ((before, 0), (after, BETWEEN), (before_inner, BETWEEN), (after_inner, AFTER))
    places = {
        **PLACES,
        **dict.fromkeys(("q_norm", "k_norm", "position_bias", "conv1d", "linear_attn", "norm"), ATTENTION),
        **{name: at for name, at in norms if name},
    }
    return places.get(layer, GATE)


def trains_table(run: Resolved, unit: int) -> bool:
    """Whether the matrix that the embedding or the head reads is trained: a tied head's is the embedding's."""
    return any(len(p.dims) > 1 and not p.is_frozen for p in run.outline.units[unit].parameters)
