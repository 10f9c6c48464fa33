"""What the pages take from the code: reference/configuration.md, and every block of a page between these two lines.

    <!-- made: NAME -->
    <!-- /made -->

`python docs/make_reference.py` writes them anew; a test says when one is out of date. Drawings give each block the
same seconds and the embedding and the head none, so that they show the schedule and not a machine.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from figures_blocks import FIGURES_BLOCKS
from hardware_blocks import HARDWARE_BLOCKS
from layout_blocks import LAYOUT_BLOCKS, fenced, table
from planner_blocks import PLANNER_BLOCKS
from superstep.cli.flags.help import field_docs
from superstep.cost.program.flops import parameters
from superstep.cost.program.memory.memory import rank_bytes
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.numerics.tolerance import TOLERANCE, tolerance
from superstep.observe import events
from superstep.observe.drawing.timeline import draw_text
from superstep.observe.page.bubble import FORMULAS
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.config_io import section_of, table_entry
from superstep.plan.model.hf_families import ARCHITECTURES, HARMLESS, HARMLESS_IN, PRICED_TYPE, only
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.program.compile import compile_step
from superstep.program.instructions import Program
from superstep.program.peak_memory import forwards_in_flight
from superstep.program.text import describe, write_program
from superstep.program.timeline import Timeline
from superstep.serve.scheduling.request import SamplingOptions
from superstep.tune.config import USUAL, USUAL_TOKENS, TuneConfig
from superstep.tune.recipe import Recipe, Usual
from superstep.tune.rl import config as rl

DOCS = Path(__file__).parent
TOLERANCES = sorted((DOCS.parent / "bench" / "results").glob("tolerance*.json"))
CONFIGURATION = DOCS / "reference" / "configuration.md"
WIDTH = 100
"""Columns of a drawing."""

WORDS = {
    "started.parameters": "Parameters of the whole model; a tied matrix counts once.",
    "started.predicted_step_s": "The predicted seconds of a step.",
    "resumed.step": "Finished steps.",
    "step.step": "Finished steps, this one included.",
    "step.lr": "The learning rate of this step's update.",
    "step.tokens_per_s": "`tokens` over `step_s`.",
    "rolled.step": "Finished steps, this one included.",
    "evaluated.step": "Finished steps.",
    "evaluated.bits_per_byte": "The loss in bits, over the bytes of a token.",
    "evaluated.seconds": "Seconds of the validation.",
    "saved.step": "Finished steps.",
    "saved.path": "The path of the checkpoint.",
    "saved.seconds": "Seconds of the save.",
    "saved.bytes": "Bytes of tensors on disk.",
    "stopped.step": "Finished steps.",
    "stopped.elapsed_s": "Seconds since this process began to train.",
    "stopped.tokens_seen": "Valid tokens since step 0, resumed or not.",
    "finished.step": "Finished steps.",
    "finished.elapsed_s": "Seconds since this process began to train.",
    "finished.tokens_seen": "Valid tokens since step 0, resumed or not.",
}
"""For fields whose name says nearly all, so that they have no docstring of their own."""


@dataclass(frozen=True, slots=True)
class Described:
    """A field of a dataclass, and the docstring below it."""

    name: str
    hint: object
    default: object
    words: str


def described(cls: type[Any]) -> Iterator[Described]:
    """The fields of a dataclass in order."""
    words = {name: " ".join(text.split()) for name, text in field_docs(cls).items()}
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        yield Described(field.name, hints[field.name], field.default, words.get(field.name, ""))


def meaning(section: str, field: Described) -> str:
    """The docstring of a field, or what stands in for it."""
    name = f"{section}.{field.name}"
    assert not (field.words and name in WORDS), f"{name} has a docstring of its own; drop it from WORDS"
    return field.words.replace("``", "`") or WORDS[name]


def values(hint: object) -> str:
    """What a field may hold."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return ", ".join(values(option) for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple and ... in typing.get_args(typing.get_args(hint)[0]):
        return f"lists of {values(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is tuple and typing.get_origin(item := typing.get_args(hint)[0]) is Literal:
        return f"any of {values(item)}"
    if (entry := table_entry(hint)) is not None:
        return f"a table of {values(entry)}"
    if typing.get_origin(hint) is Mapping:
        return f"an object of {values(typing.get_args(hint)[1])}s"
    if typing.get_origin(hint) is tuple:
        return f"{values(typing.get_args(hint)[0])}s"
    return {int: "whole number", float: "number", str: "string", bool: "true or false"}[typing.cast(type, hint)]


def literal(value: object) -> str:
    """A default as TOML has it."""
    match value:
        case None:
            return "left out"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'`"{value}"`'
        case tuple():
            return f"`{json.dumps(list(value))}`"
        case _:
            return f"`{value}`"


def configuration() -> str:
    """The page of every field."""
    parts = [
        "# Configuration",
        "<!-- written by docs/make_reference.py from src/superstep/plan/config.py -->",
        "A run is one TOML file with the tables below; `superstep train run.toml` reads it. A key that the file leaves "
        "out has its default. Unknown keys and values of another type are errors that name the field.",
        "Every field is also a flag of `train`, `prove` and `view`, with hyphens instead of underscores: "
        "`train.batch_sequences` is `--train.batch-sequences`. An entry of a table is a flag too: "
        "`--plan.rules.ffn none`. A flag replaces the value of the file. `None` on the command line leaves a field "
        "out.",
        "*Left out* means automatic: the value is computed when the run starts and is written to the `run.toml` of the "
        "[run directory](run-directory.md).",
    ]
    for section in fields(RunConfig):
        cls = section_of(typing.get_type_hints(RunConfig)[section.name])
        assert cls is not None
        rows = []
        for field in described(cls):
            words = meaning(section.name, field)
            rows.append((f"`{field.name}`", values(field.hint), literal(field.default), words))
        parts += [f"## [{section.name}]", inspect.cleandoc(cls.__doc__ or "")]
        parts.append(table(("key", "values", "default", "meaning"), rows))
    parts += _recipes("Recipes", "superstep tune", TuneConfig, USUAL, USUAL_TOKENS)
    parts += _recipes("Recipes of reinforcement learning", "superstep tune rl", rl.RlRecipe, rl.USUAL, rl.USUAL_TOKENS)
    parts += [
        "## Named sizes",
        "These are values of `model.name`. For another size, name the nearest one and set the fields that differ.",
    ]
    parts.append(_sizes())
    parts += [
        "## A Hugging Face config.json",
        "`model.name` may be the path of a `config.json` of one of these types. A key that the file leaves out has "
        "the default of transformers. A file is refused if only some of its blocks have experts. `superstep plan` "
        f"prices files of the type `{PRICED_TYPE}`, but Superstep cannot train them yet. Models "
        "with layers of a state space, of recurrences or of convolutions alone can be neither "
        "priced nor trained; their files are refused by name.",
        table(("model_type", "models", "in addition to Llama"), _FAMILIES),
        "Superstep uses every key, or refuses it with a value that would work, or lists it below as a key without "
        "effect. `rope_theta` may stand alone or in `rope_parameters`; if both are given they must be equal. "
        "Wavelengths may be scaled as in `linear`, `llama3` and `yarn`. `initializer_range` is the standard deviation "
        "of the first values of matrices. `router_aux_loss_coef` becomes `model.balance_weight` "
        "([losses](../explanation/experts.md#losses)). A sliding window may differ by layer.",
        "Each of these keys may have only one value, the same for every type or one for each type: "
        + ", ".join(f"`{key}`" for key in sorted({key for kind in ARCHITECTURES for key in only(kind)}))
        + ". These keys change nothing:",
        table(("key", "why"), _harmless()),
        "`bos_token_id`, `eos_token_id` and `pad_token_id` do not change training either; checkpoints keep them. Any "
        "other key may change the model, so the file is refused until you remove it.",
    ]
    return "\n\n".join(parts) + "\n"


def _recipes(title: str, verb: str, cls: type[Recipe], usual: Usual, usual_tokens: int) -> Iterator[str]:
    """What a recipe says besides a run."""
    yield f"## {title}"
    others = [f"`{table}.{key}` is {literal(value)}" for table, keys in usual.items() for key, value in keys.items()]
    yield (
        f"`{verb}` reads one file with all of these tables and the following. Some defaults differ: "
        f"{', '.join(others)}. `data.sequence_tokens` is left out, which means {usual_tokens}, or the context "
        "of the model if that is less."
    )
    words = {field.name: field for field in described(cls)}
    yield table(
        ("key", "values", "default", "meaning"),
        [("`start`", values(words["start"].hint), literal(words["start"].default), words["start"].words)],
    )
    of_runs = {field.name for field in fields(RunConfig)}
    hints = typing.get_type_hints(cls)
    for name in (field.name for field in fields(cls) if field.name not in of_runs and field.name != "start"):
        rows = [(f"`{f.name}`", values(f.hint), literal(f.default), meaning(name, f)) for f in described(hints[name])]
        yield f"### [{name}]"
        yield inspect.cleandoc(hints[name].__doc__ or "")
        yield table(("key", "values", "default", "meaning"), rows)


_FAMILIES = [
    ("`llama`", "Llama", ""),
    ("`mistral`", "Mistral", "a sliding window"),
    ("`mixtral`", "Mixtral", "experts, dropless; a sliding window"),
    ("`qwen2`", "Qwen2, Qwen2.5", "biases on queries, keys and values; a sliding window"),
    ("`qwen3`", "Qwen3", "norms of queries and keys; a sliding window"),
    ("`qwen3_moe`", "Qwen3-MoE", "experts, dropless; norms of queries and keys; a sliding window"),
    ("`olmo2`", "OLMo 2", "norms after attention and feed-forward; norms over all heads of queries and of keys"),
    ("`olmo3`", "OLMo 3", "the same; a sliding window in most layers, without scaled rotary embedding there"),
    (
        "`gemma2`",
        "Gemma 2",
        "norms before and after, times 1 + weight; GELU; a scaled embedding; soft caps; a window in every other layer",
    ),
    (
        "`gemma3_text`",
        "Gemma 3",
        "the same without the cap of scores; norms of queries and keys; layers with a window have another rotary base",
    ),
    ("`granite`", "Granite 3", "factors for embedding, scores, residual stream and logits"),
    (
        "`deepseek_v3`",
        "DeepSeek-V3, Moonlight, and Kimi K2, whose file says `kimi_k2`",
        "latent attention; experts by sigmoid scores in groups, balanced by a bias; shared experts; dense first "
        "layers; FP8 is read",
    ),
    (
        "`gpt_oss`",
        "gpt-oss",
        "experts with biases and clamped gates; biases and sinks of attention; a window in every other layer; MXFP4 is "
        "read",
    ),
    (
        "`qwen3_5_text`",
        "Qwen3.5, its text model",
        "linear attention by the gated delta rule; in every fourth layer attention with a gated output, norms of "
        "queries and keys, a quarter of each head rotated; norms times 1 + weight; not served",
    ),
    ("`qwen3_next`", "Qwen3-Next", "the same with experts, dropless; a shared expert with a gate; not served"),
    ("`qwen2_audio`", "Qwen2-Audio", "a Qwen2 that reads sounds, with the samples of `data.source`; not served"),
    ("`qwen3_vl`", "Qwen3-VL", "a Qwen3 that reads pictures, with the samples of `data.source`; not served"),
    ("`superstep_moe`", "only Superstep", "experts with any router"),
    ("`superstep_bias`", "only Superstep", "position biases: `model.positions`"),
]


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _harmless() -> list[tuple[str, str]]:
    """Keys of one reason together."""
    found: dict[str, list[str]] = {}
    for keys, only_in in ((HARMLESS, ""), *((keys, f", in `{kind}`") for kind, keys in HARMLESS_IN.items())):
        for key, reason in keys.items():
            found.setdefault(reason + only_in, []).append(f"`{key}`")
    return [(", ".join(keys), reason) for reason, keys in found.items()]


def _sizes() -> str:
    head = ("name", "layers", "width", "heads / kv", "head_dim", "ffn", "vocab", "tied", "parameters")
    rows = [
        (
            f"`{name}`",
            str(s.layers),
            str(s.width),
            f"{s.heads} / {s.kv_heads}",
            str(s.head_dim),
            str(s.ffn),
            str(s.vocab),
            "yes" if s.tied else "no",
            f"{parameters(s):,}",
        )
        for name, s in SHAPES.items()
    ]
    return table(head, rows)


# Blocks of other pages.


def run_of(*, layers: int = 4, batch: int = 8, **plan: Any) -> Resolved:  # noqa: ANN401 - fields of PlanConfig
    """A run of the demo's model with another plan; one sequence a microbatch where nothing is said."""
    plan.setdefault("microbatch", 1)
    return resolve(
        RunConfig(
            model=ModelConfig(layers=layers, tied=False),
            train=TrainConfig(batch_sequences=batch),
            plan=PlanConfig(**plan),
        )
    )


def timeline(run: Resolved, *, block_s: float, moves_s: float = 0.0) -> Timeline:
    """The step where a block's forward takes ``block_s``, each half of its backward as long, and a fetch, a reduction
    or a transfer ``moves_s``.
    """
    program = compile_step(run.plan)
    block = UnitSeconds(
        forward_s=block_s,
        backward_s=2 * block_s,
        weight_s=block_s,
        recompute_s=block_s,
        fetch_s=moves_s,
        reduce_s=moves_s,
        transfer_s=moves_s,
    )
    end = UnitSeconds(forward_s=0.0, backward_s=0.0)
    return simulate(program, PerUnit(units=(end, *[block] * (len(program.units) - 2), end)))


def _drawn(run: Resolved, **seconds: float) -> str:
    return fenced(draw_text(timeline(run, **seconds), WIDTH, colour=False))


PIPELINES: dict[str, tuple[int, str, float]] = {
    "gpipe": (1, FORMULAS["gpipe"], 3 / 8),
    "1f1b": (1, FORMULAS["1f1b"], 3 / 8),
    "interleaved": (2, FORMULAS["interleaved"], 3 / 16),
    "breadth-first": (2, FORMULAS["breadth-first"], 3 / 16),
    "zb-h1": (1, FORMULAS["zb-h1"], 3 / 24),
    "zb-v": (2, FORMULAS["zb-v"], 3 / 48),
}
"""Chunks, the bubble over the compute, and what that is for p = 4, m = 8, F = B = W."""


def _pipeline(name: str) -> Resolved:
    """Eight blocks on four ranks, as many on each stage."""
    chunks = PIPELINES[name][0]
    blocks = 8 // (4 * chunks)
    stages = (blocks + 1, *[blocks] * (4 * chunks - 2), blocks + 1)
    return run_of(pp=4, layers=8, schedule=name, chunks=chunks, stages=stages)


def _bubbles() -> str:
    rows = []
    for name, (chunks, formula, bubble) in PIPELINES.items():
        found = timeline(_pipeline(name), block_s=1e-3)
        # A chunk of v is a v-th of a rank's blocks.
        held = ", ".join(f"{count / chunks:g}" for count in forwards_in_flight(found.program))
        rows.append((f"`{name}`", str(chunks), formula, f"{bubble:.2%}", f"{found.bubble():.2%}", held))
    head = ("schedule", "v", "bubble over compute", "p = 4, m = 8", "simulated", "microbatches kept, rank 0 to 3")
    return table(head, rows)


def _zero_programs() -> str:
    columns = []
    for zero in range(4):
        program = compile_step(run_of(layers=1, batch=2, dp=2, zero=zero).plan)
        columns.append([f"zero = {zero}", "", *(describe(i).replace(" keep=all", "") for i in program.ranks[0])])
    height = max(map(len, columns))
    rows = zip(*(column + [""] * (height - len(column)) for column in columns), strict=True)
    return fenced("\n".join("".join(f"{cell:<18}" for cell in row).rstrip() for row in rows))


def _zero_bytes() -> str:
    rows = []
    for zero in range(4):
        config = RunConfig(
            model=ModelConfig(name="llama3-8b"),
            data=DataConfig(sequence_tokens=8192),
            train=TrainConfig(batch_sequences=64),
            plan=PlanConfig(dp=64, zero=zero, recompute="full"),
            numerics=NumericsConfig(compute="bf16"),
        )
        run = resolve(config)
        (rank,) = rank_bytes(run, compile_step(run.plan))
        within = rank.peak.params_bytes + rank.peak.gradient_bytes
        sizes = (rank.params, rank.gradients, rank.optimizer, rank.params + rank.gradients + rank.optimizer, within)
        rows.append((str(zero), *(f"{size / 2**30:.2f}" for size in sizes)))
    return table(("zero", "parameters", "gradients", "optimizer", "between steps", "within the step, more"), rows)


def _tolerances() -> str:
    """What is allowed, and beside it what was measured: the sum of the two distances that it is made of."""
    found = [row for path in TOLERANCES for row in json.loads(path.read_text(encoding="utf-8"))["distances"]]
    measured = {(row["dtype"], row["model"], row["distance"]): row for row in found}
    kinds = ("loss", "gradient", "gradient_later", "update")
    rows = []
    for model in ("dense", "experts"):
        for dtype in TOLERANCE:
            allowed = tolerance(dtype, has_experts=model == "experts")
            parts = [measured[dtype, model, part] for part in (("prove",) if dtype == "fp16" else ("order", "dtype"))]
            distances = [" + ".join(f"{part[kind]:.1e}" for part in parts) for kind in kinds]
            cells = [f"{getattr(allowed, kind):g} ({each})" for kind, each in zip(kinds, distances, strict=True)]
            rows.append((f"{dtype}, {model}", *cells))
    return table(("compute", "loss", "gradient, first step", "gradient, later", "update"), rows)


def _metrics() -> str:
    parts = []
    for cls in typing.get_args(events.Event):
        words = inspect.cleandoc(cls.__doc__ or "").replace("``", "`")
        rows = [(f"`{f.name}`", values(f.hint), meaning(cls.name, f)) for f in described(cls)]
        parts.append(f"**`{cls.name}`**: {words}\n\n{table(('field', 'holds', 'meaning'), rows)}")
    return "\n\n".join(parts)


def _sampling_options() -> str:
    rows = [(f"`{f.name}`", literal(f.default), f.words) for f in described(SamplingOptions)]
    return table(("option", "default", "meaning"), rows)


def _small() -> Resolved:
    return run_of(layers=2, batch=2, pp=2, schedule="1f1b", stages=(2, 2))


def _program(run: Resolved) -> Program:
    return compile_step(run.plan)


def _graph_program() -> str:
    plan = replace(_small().plan, microbatches=1, inputs=((), (0,), (1,), (2, 0)))
    return write_program(compile_step(plan))


MADE: dict[str, Callable[[], str]] = {
    "program": lambda: fenced(write_program(_program(_small()))),
    "graph program": lambda: fenced(_graph_program()),
    "program drawn": lambda: _drawn(_small(), block_s=4e-3, moves_s=0.5e-3),
    "zero programs": _zero_programs,
    "zero bytes": _zero_bytes,
    "zero drawn": lambda: _drawn(run_of(batch=4, dp=2, zero=3), block_s=4e-3, moves_s=3e-3),
    "bubbles": _bubbles,
    **{name: lambda name=name: _drawn(_pipeline(name), block_s=1e-3) for name in PIPELINES},
    **LAYOUT_BLOCKS,
    **HARDWARE_BLOCKS,
    **FIGURES_BLOCKS,
    **PLANNER_BLOCKS,
    "tolerances": _tolerances,
    "metrics": _metrics,
    "sampling options": _sampling_options,
}
_BLOCK = re.compile(r"(<!-- made: ([\w -]+?) -->\n).*?(<!-- /made -->)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its made blocks as the code makes them now."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{MADE[block[2]]()}\n\n{block[3]}", page)


def main() -> None:
    """Write what is out of date."""
    CONFIGURATION.parent.mkdir(parents=True, exist_ok=True)
    CONFIGURATION.write_text(configuration(), encoding="utf-8")
    for path in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        page = path.read_text(encoding="utf-8")
        if (made := filled(page)) != page:
            path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
