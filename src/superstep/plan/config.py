"""RunConfig: all settings of a run, as frozen values.

A field that is ``None`` is automatic: ``resolve`` fills it into a new value, which is saved with the run. The presence
of a value turns a feature on; there are no ``enable`` flags and no special numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from superstep.plan.block_weights import BlockFormat
from superstep.plan.loss_scale import LossScaleConfig
from superstep.plan.observe import ObserveConfig
from superstep.plan.optimizers import MasterFormat, MomentFormat, OptimizerName
from superstep.plan.rollback import RollbackConfig
from superstep.plan.trained_parts import FreezeConfig, PhasesConfig

Schedule = Literal["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v"]
LOOPED: tuple[Schedule, ...] = ("interleaved", "breadth-first")
"""Schedules with several stages on a rank, which microbatches pass in groups. The others have one stage, zb-v two."""
ZERO_BUBBLE: tuple[Schedule, ...] = ("zb-h1", "zb-v")
"""Schedules with a backward pass in two halves."""
Recompute = Literal["none", "selective", "full", "auto"]
EncoderPlacement = Literal["front", "spread", "bubbles"]
Context = Literal["ring", "ulysses"]
Dtype = Literal["fp32", "bf16", "fp16"]
Place = Literal["device", "host", "disk"]
"""Where something lies: in the device's memory, in the host's, or in a file."""
Kept = Literal["all", "selective", "input", "host", "disk"]
"""What a unit keeps of a microbatch for its backward pass; host and disk: all of it, there."""
Router = Literal["noisy-topk", "top2", "switch", "dropless", "sigmoid"]
Positions = Literal["rope", "alibi", "t5", "relative"]
Decay = Literal["cosine", "wsd"]
Existing = Literal["refuse", "resume", "new"]
Nulls = Literal["skip", "refuse"]
Rule = Literal["tp", "ep", "none"]
DeviceKind = Literal["cpu", "cuda"]
Kernels = Literal["auto", "triton", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder. A field left out keeps the named size's value."""

    name: str = "demo"
    """A named size (demo, llama3-8b, qwen3-0.6b, ...) or the path of a Hugging Face config.json."""
    weights: str | None = None
    """Initial weights: a run, a checkpoint or a Hugging Face folder; none draws them, from `train.seed`."""
    source: str | None = None
    """A Python file of your own, instead of the named size: its function `units(config)` lists the units."""
    layers: int | None = None
    """Blocks."""
    width: int | None = None
    """Width of the residual stream (D)."""
    heads: int | None = None
    """Query heads (N)."""
    kv_heads: int | None = None
    """Key and value heads (K); divides the query heads."""
    head_dim: int | None = None
    """Width of one head (H), even."""
    ffn: int | None = None
    """Inner width of the gated feed-forward, of one expert in a mixture (F)."""
    vocab: int | None = None
    """Rows of the embedding (V); the tokenizer has at most as many ids."""
    tied: bool | None = None
    """Whether the head uses the embedding's matrix."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalised per head (Qwen3)."""
    positions: Positions | None = None
    """How attention knows positions: rope rotates queries and keys (Su 2021); alibi lowers a score with its distance
    (Press 2022); t5 adds a learnt bias by head and bucket of distances (Raffel 2020), in each layer its own; relative
    adds the query's product with a learnt vector by head and distance (Shaw 2018).
    """
    max_distance: int | None = None
    """t5 and relative: the distance from which on all have one bias; 128 where it is left out."""
    mtp_weight: float | None = None
    """Multi-token prediction (DeepSeek-V3): the weight of a second loss, of the token after the next one, which a block
    of its own predicts; none trains without it.
    """
    dropout: float = 0.0
    """In training, the share of the outputs of attention and feed-forward that is dropped in each block."""
    norm_group: int | None = None
    """Consecutive samples of the global batch that each batch norm of a model of your own normalises together; none
    takes the group of its file.
    """
    experts: int | None = None
    """Experts in each block (E), instead of its one feed-forward."""
    experts_per_token: int | None = None
    """Experts for each token (k)."""
    shared_experts: int | None = None
    """Experts that every token uses in addition."""
    router: Router | None = None
    """How a token's experts are chosen: dropless (the best k, as Mixtral), switch (the best one, Fedus 2021), top2
    (GShard: the second at random, Lepikhin 2020) or noisy-topk (Shazeer 2017)."""
    renormalise: bool | None = None
    """dropless: whether the weights of a token's experts sum to one."""
    capacity_factor: float | None = None
    """switch, top2: an expert's room in a sequence, as a multiple of its even share; tokens beyond it are dropped."""
    balance_weight: float | None = None
    """Weight of the loss that spreads tokens over the experts."""
    z_weight: float | None = None
    """Weight of the loss that keeps the router's logits small (Zoph 2022)."""

    @property
    def label(self) -> str:
        """The field that names the model, with its value, for errors."""
        return f"model.name = '{self.name}'" if self.source is None else f"model.source = '{self.source}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedData:
    """The text, and how it becomes sequences of tokens; their length may be left to the model."""

    source: str | None = None
    """A Python file of your own, instead of text: its functions `length(split)` and `sample(split, index, noise)` give
    named tensors, such as pixels and a class number. Or a folder of conversations that `superstep tune sft` prepared.
    """
    corpus: tuple[str, ...] = ()
    """Text files, folders, .jsonl or .parquet files; none means the text of Python's standard library."""
    tokenizer: str | None = None
    """A tokenizer.json; none trains a byte-level BPE of the model's vocabulary on the corpus."""
    text_field: str = "text"
    """The field of a JSONL object, or the column of a parquet file, that holds the text."""
    nulls: Nulls = "skip"
    """What to do with a record whose text is null: skip and count it, or refuse the corpus."""
    sequence_tokens: int | None = None
    """Tokens in a sequence; none takes 1024, 512 in reinforcement learning, or the model's own limit if it is less."""
    media_tokens: int | None = None
    """Tokens of a row that may stand for pictures or sounds of conversations; none means all of them."""
    packed: bool = True
    """True cuts one stream of documents into full sequences; false pads each document's own sequences."""
    document_mask: bool = False
    """Packed sequences: each document as if it were alone. Attention stays within it, its positions begin at 0, and its
    last token has no target.
    """
    validation_fraction: float = 0.02
    """The share of the documents that is held out for validation."""
    cache: str | None = None
    """Folder of token files; none means the folder `data` of the run directory."""
    prefetch_steps: int = 2
    """Batches read ahead in the background."""

    @property
    def is_masked(self) -> bool:
        """Whether there is something to mask: only packed sequences hold several documents."""
        return self.packed and self.document_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(ProposedData):
    """The text, and how it becomes sequences of tokens."""

    sequence_tokens: int = 256
    """Tokens in a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The optimisation: all that changes the result, on any layout."""

    steps: int = 600
    """Optimizer steps of the whole run."""
    batch_sequences: int = 16
    """Sequences in the global batch of one step."""
    optimizer: OptimizerName = "adamw"
    """adamw (Loshchilov 2019); lion (Chen 2023), which keeps one moment: with an `lr` that is 3 to 10 times smaller,
    and a `weight_decay` that is as many times larger; or sgd, which keeps none.
    """
    moments: MomentFormat = "fp32"
    """The format of the moments of matrices with 4,096 elements or more, embeddings aside; others are fp32. 8bit:
    dynamic maps with a scale for each block of 256 (Dettmers 2021); bf16: rounded stochastically.
    """
    lr: float = 3e-3
    """The highest learning rate, reached at the end of the warm-up."""
    warmup_steps: int = 30
    """Steps in which the learning rate rises."""
    decay: Decay = "cosine"
    """cosine, or wsd: warm up, stay, then fall linearly over the last `decay_steps`."""
    decay_steps: int | None = None
    """wsd only: steps of the final fall; none means a fifth of the steps."""
    min_lr_ratio: float = 0.1
    """The last learning rate as a share of `lr`."""
    weight_decay: float = 0.1
    """The decay of matrices; the weights of norms take none."""
    beta1: float = 0.9
    """AdamW's decay of the first moment; Lion's share of the moment in an update."""
    beta2: float = 0.95
    """AdamW's decay of the second moment; Lion's decay of its moment, which is 0.98 or 0.99 in its paper."""
    eps: float = 1e-8
    """AdamW's term added to the root of the second moment."""
    clip_norm: float = 1.0
    """The largest global gradient norm; larger gradients are scaled down to it."""
    clip_row_norm: float | None = None
    """The largest norm of a row's gradient in tables with sparse gradients; none leaves them as they are."""
    skip: tuple[str, ...] = ()
    """Batches to leave out, as `STEP:BATCHES`: after that step, that many batches are not trained on."""
    loss: str | None = None
    """A Python file with a function `loss(logp)`: each token's loss from the log-probability of its target; none is the
    cross entropy. Validation always reports the cross entropy.
    """
    seed: int = 0
    """Seed of the initial weights and the sample order."""
    eval_every: int = 100
    """Steps between validations; the last step is always followed by one."""
    eval_batches: int = 8
    """Global batches in one validation."""
    elastic: bool = False
    """Whether a run continues with fewer hosts where one is lost, under a plan chosen in advance, and with all of them
    when it returns; needs `state.snapshot_every`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The layout: how the work is split. It changes the cost of a step, never its result."""

    pp: int = 1
    """Pipeline ranks."""
    dp: int | None = None
    """Data-parallel ranks; none takes all remaining ranks."""
    cp: int = 1
    """Context-parallel ranks: they share each sequence."""
    context: Context = "ring"
    """How attention sees the whole sequence: keys go round a ring (Liu 2023), or heads and tokens are exchanged
    (Ulysses, Jacobs 2023).
    """
    tp: int = 1
    """Tensor-parallel ranks."""
    ep: int = 1
    """Expert-parallel ranks."""
    zero: int = 0
    """0 replicates over dp; 1 shards the optimizer, 2 gradients too, 3 parameters too (Rajbhandari 2020)."""
    replicas: int = 1
    """Hybrid sharding: copies of the parameters, each sharded over its own dp · cp / replicas ranks."""
    schedule: Schedule | None = None
    """The order of microbatches through the stages; none means 1f1b, or interleaved where chunks > 1."""
    chunks: int = 1
    """Stages on each pipeline rank (the v of Narayanan 2021); 2 for zb-v."""
    stages: tuple[int, ...] | None = None
    """Units of each stage, in model order: the embedding, each block and the head are one each; none takes the split
    whose largest stage has the least work, for each layout.
    """
    encoder: EncoderPlacement = "front"
    """front: an encoder's units are stages; spread: each pipeline rank encodes a share; bubbles: while it waits."""
    microbatch: int | None = None
    """Sequences that pass the model at once on a data-parallel rank; none takes the largest that gives each pipeline
    rank work.
    """
    microbatch_group: int | None = None
    """breadth-first and interleaved: microbatches that pass a stage before the next stage begins."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping: none of it, cheap operations, whole units, or with auto
    what takes least time within `plan.memory`, for each unit and microbatch.
    """
    memory: str | None = None
    """The most that the tensors of a rank may take, such as 6GiB or 800MiB; none sets no limit of its own."""
    kept: tuple[str, ...] | None = None
    """With recompute = auto: for each unit what it keeps of each microbatch, of all, selective, input, host and disk,
    or one of them for every microbatch; none decides it.
    """
    activations: tuple[Place, ...] | None = None
    """Where units keep what their backward passes need, until they do: device, host (a GPU's host's memory) or disk (an
    unnamed file in `state.dir`); one place, or a list with one for each unit; none means device. With recompute = auto,
    where they may.
    """
    reload_ahead: int | None = None
    """Passes of units before a backward pass at which what was moved comes back; none means 1."""
    sequence_parallel: bool = True
    """With tp > 1, split the work between tensor-parallel regions over the sequence (Korthikanti 2022)."""
    prefetch: int = 1
    """ZeRO-3: units fetched ahead of their use."""
    device: DeviceKind | None = None
    """Where ranks compute: cpu or cuda, each rank on its own GPU; none takes GPUs where the host has any."""
    rules: tuple[tuple[str, Rule], ...] = ()
    """Logical axes of parameters that differ from the default cut: a table of tp, ep or none for each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig:
    """Number formats."""

    compute: Dtype = "fp32"
    """The dtype of activations and of the weights that multiply them. fp16 has a `[loss_scale]`."""
    master: MasterFormat = "fp32"
    """The format of master weights, which updates change. bf16, with `compute` = bf16: they are the weights that
    multiply, and each update is rounded stochastically.
    """
    exact: bool = False
    """The same bits on every layout, for two to three times the time: sums in a fixed order or on a fixed grid."""
    exact_chunks: int | None = None
    """Exact mode: parts of a sequence, at least two for each context-parallel rank; none takes the most, up to 8, that
    leave 16 tokens each. Compared runs need the same value.
    """
    compile: bool = False
    """Compile each block with torch.compile (needs a C++ compiler on a CPU)."""
    kernels: Kernels = "auto"
    """Kernels outside of exact mode. auto: on a CPU our own kernels for attention, norms, rotary embedding, gates and
    the loss, compiled at first use, where a C++ compiler is; on a GPU torch's. triton: on a GPU our own for the same,
    where Triton is; their speed is not measured. torch: torch's everywhere.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of linears, trained instead of the model's own weights (LoRA, Hu 2021). The table turns it on,
    even if empty.
    """

    rank: int = 8
    """Rows of the first factor, columns of the second (PEFT's r)."""
    alpha: float = 16.0
    """The strength: the product of the factors is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linears by the ends of their names, as in PEFT (q_proj, v_proj, ...); all-linear means all of the blocks."""
    dropout: float = 0.0
    """In training, the share of an adapter's inputs that is dropped (PEFT's lora_dropout)."""
    base: BlockFormat | None = None
    """The format of the frozen linears of the blocks: nf4 (4.13 bits a weight, as QLoRA, Dettmers 2023) or int8 (8.13);
    none keeps them in `numerics.compute`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """The run directory, and what is kept of a run."""

    dir: str = "runs/demo"
    """The run directory."""
    existing: Existing = "refuse"
    """If the run directory holds a run: refuse, resume it, or start a new one beside it."""
    convert: bool = False
    """Whether a run may resume from a checkpoint with another `train.moments` or `numerics.master`: its moments and
    weights are rounded to the formats of this run.
    """
    save_every: int = 200
    """Steps between checkpoints; the last step is always followed by one."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted once a newer one is complete."""
    save_patience: int = 3
    """How many times `save_every` steps old the newest checkpoint may be before a failed save ends the run. Until then
    the run warns, trains on, and saves again about 30 seconds later. 0: the first failure ends it.
    """
    store: str | None = None
    """A second place for checkpoints, by any URL that fsspec knows: `s3://bucket/run`, for example. A resumed run
    without a checkpoint on disk continues from there.
    """
    snapshot_every: int | None = None
    """Steps between copies of the state in host memory, from which a killed rank is recovered and checkpoints are
    written while training continues; none makes no copies.
    """
    peers: int | None = None
    """Other hosts with a copy of each host's snapshots, 0 or 1, so that a run survives the loss of a host; none takes 1
    with several hosts and snapshots, else 0.
    """
    peer_bytes_per_s: float | None = None
    """The fastest that a host sends these copies; none has no limit, and training shares the link."""
    fingerprint_every: int | None = None
    """Steps between checks of the state and the gradients for silent corruption; saved states are checked too. 1 finds
    any change in memory between two steps; none makes no checks.
    """
    recompute_every: int | None = None
    """Exact mode with dp > 1: steps between those with a gradient that other ranks compute as well, to find faulty
    processors; none repeats no step.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedRun:
    """A whole run, but the length of its sequences may be left to the model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: ProposedData = field(default_factory=ProposedData)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    lora: LoraConfig | None = None
    freeze: FreezeConfig | None = None
    phases: PhasesConfig | None = None
    loss_scale: LossScaleConfig | None = None
    rollback: RollbackConfig | None = None
    state: StateConfig = field(default_factory=StateConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(ProposedRun):
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)


def setting_text(name: str, value: object) -> str:
    """``name = value`` for a message, which adds whether it is the default: then perhaps nobody has set it."""
    section, _, key = name.partition(".")
    default = getattr(getattr(RunConfig(), section), key)
    return f"{name} = {value} (the default)" if value == default else f"{name} = {value}"
