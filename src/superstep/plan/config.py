"""RunConfig: everything a run is told, as frozen values.

A field that is ``None`` is automatic: ``resolve`` fills it into a new value, which is saved with the run. The
presence of a value turns a feature on; there are no ``enable`` flags and no special numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v"]
LOOPED: tuple[Schedule, ...] = ("interleaved", "breadth-first")
"""Schedules with several stages on a rank, which microbatches pass in groups. The others have one stage, zb-v two."""
ZERO_BUBBLE: tuple[Schedule, ...] = ("zb-h1", "zb-v")
"""Schedules whose backward pass comes in two halves."""
Recompute = Literal["none", "selective", "full"]
Context = Literal["ring", "ulysses"]
Dtype = Literal["fp32", "bf16"]
Router = Literal["noisy-topk", "top2", "switch", "dropless"]
Decay = Literal["cosine", "wsd"]
Existing = Literal["refuse", "resume", "new"]
Nulls = Literal["skip", "refuse"]
Rule = Literal["tp", "ep", "none"]
DeviceKind = Literal["cpu", "cuda"]
Tracker = Literal["wandb", "mlflow", "trackio"]
Kernels = Literal["auto", "triton", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which decoder. A field left out keeps what the named size says."""

    name: str = "demo"
    """A named size (demo, llama3-8b, qwen3-0.6b, ...) or the path of a Hugging Face config.json."""
    weights: str | None = None
    """Weights to begin with: a run, a checkpoint or a Hugging Face folder; none draws them, from `train.seed`."""
    source: str | None = None
    """A Python file of your own, in the place of the named size: its function `units(config)` lists the units."""
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
    experts: int | None = None
    """Experts in each block (E), in the place of its one feed-forward."""
    experts_per_token: int | None = None
    """Experts that a token is sent to (k)."""
    shared_experts: int | None = None
    """Experts that every token visits besides."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedData:
    """Which text, and how it becomes sequences of tokens, whose length may be left to the model."""

    corpus: tuple[str, ...] = ()
    """Text files, folders, .jsonl or .parquet files; none means the text of Python's standard library."""
    tokenizer: str | None = None
    """A tokenizer.json; none trains a byte-level BPE of the model's vocabulary on the corpus."""
    text_field: str = "text"
    """The field of a JSONL object, or the column of a parquet file, that holds the text."""
    nulls: Nulls = "skip"
    """What to do with a record whose text is null: skip and count it, or refuse the corpus."""
    sequence_tokens: int | None = None
    """Tokens in a sequence; none takes 1024, 512 in reinforcement learning, or what the model was made for where that
    is less."""
    packed: bool = True
    """True cuts one stream of documents into full sequences; false pads each document's own sequences."""
    document_mask: bool = False
    """Packed sequences: each document as if it stood alone. Attention stays within it, its positions begin at 0, and
    its last token has no target."""
    validation_fraction: float = 0.02
    """The share of the documents that is held out."""
    cache: str | None = None
    """Where token files are kept; none means the folder `data` of the run directory."""
    prefetch_steps: int = 2
    """Batches read ahead in the background."""

    @property
    def is_masked(self) -> bool:
        """Whether there is something to mask: only packed sequences hold several documents."""
        return self.packed and self.document_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(ProposedData):
    """Which text, and how it becomes sequences of tokens."""

    sequence_tokens: int = 256
    """Tokens in a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The optimisation: what changes the result, whatever the layout."""

    steps: int = 600
    """Optimizer steps of the whole run."""
    batch_sequences: int = 16
    """Sequences in the global batch of one step."""
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
    """AdamW's decay of matrices; the weights of norms take none."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    eps: float = 1e-8
    """AdamW's term beside the root of the second moment."""
    clip_norm: float = 1.0
    """The largest global gradient norm; larger gradients are scaled down to it."""
    skip: tuple[str, ...] = ()
    """Batches to leave out, as `STEP:BATCHES`: after so many steps, so many batches are not trained on."""
    loss: str | None = None
    """A Python file with a function `loss(logp)`: each token's loss from the log-probability of its target; none is the
    cross entropy. Validation tells the cross entropy either way."""
    seed: int = 0
    """Of the first values and of the sample order."""
    eval_every: int = 100
    """Steps between validations; the last step is always followed by one."""
    eval_batches: int = 8
    """Global batches in one validation."""
    elastic: bool = False
    """Whether a run goes on with fewer hosts where one is lost, under a plan that is chosen beforehand, and with all of
    them once it is back; needs `state.snapshot_every`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The layout: how the work is split. It changes the cost of a step, never its result."""

    pp: int = 1
    """Pipeline ranks."""
    dp: int | None = None
    """Data-parallel ranks; none takes what the launched ranks leave."""
    cp: int = 1
    """Context-parallel ranks: they share each sequence."""
    context: Context = "ring"
    """How attention sees the whole sequence: keys go round a ring (Liu 2023), or heads and tokens are exchanged
    (Ulysses, Jacobs 2023)."""
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
    """How many units each stage has, in model order: the embedding, each block and the head are one each; none means
    the split whose largest stage has the least work, found anew for each layout."""
    microbatch: int | None = None
    """Sequences that go through the model at once on one data-parallel rank; none takes the largest that
    gives each pipeline rank work."""
    microbatch_group: int | None = None
    """breadth-first and interleaved: microbatches that pass a stage before the next stage's turn."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping."""
    sequence_parallel: bool = True
    """With tp > 1, split what lies between tensor-parallel regions over the sequence (Korthikanti 2022)."""
    prefetch: int = 1
    """ZeRO-3: units fetched ahead of their use."""
    device: DeviceKind | None = None
    """Where ranks compute: cpu or cuda, each rank on a GPU of its own; none takes GPUs where the host has any."""
    rules: tuple[tuple[str, Rule], ...] = ()
    """Logical axes of parameters that are cut otherwise than by default: a table of tp, ep or none for each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig:
    """Number formats."""

    compute: Dtype = "fp32"
    """The dtype of activations and of the weights that multiply them; master weights are fp32 either way."""
    exact: bool = False
    """The same bits on every layout, for two to three times the time: sums in a fixed order or on a fixed grid."""
    exact_chunks: int | None = None
    """Exact mode: parts of a sequence, at least two for each context-parallel rank; none takes the most, up to 8, that
    leave 16 tokens each. Runs that are compared need the same."""
    compile: bool = False
    """Compile each block with torch.compile (needs a C++ compiler on a CPU)."""
    kernels: Kernels = "auto"
    """What computes outside of exact mode. auto: on a CPU our own kernels for attention, norms, rotary embedding, gates
    and the loss, compiled when they are first needed, where a C++ compiler is; on a GPU torch's. triton: on a GPU our
    own for attention, norms, rotary embedding and gates, where Triton is, which no GPU has measured yet. torch: torch's
    everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank additions to linears, which are trained in the place of the model's own weights (LoRA, Hu 2021). The
    table turns it on, be it empty."""

    rank: int = 8
    """Rows of the first factor, columns of the second (PEFT's r)."""
    alpha: float = 16.0
    """The strength: the product of the factors is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Which linears, by the ends of their names, as PEFT has them (q_proj, v_proj, ...); all-linear means every one of
    the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackConfig:
    """What becomes of a step whose loss or gradient norm is no number, or far above those before it: it is not taken,
    and the run goes back. The table turns it on, be it empty; without it a loss that is no number ends the run."""

    loss_sigmas: float = 6.0
    """How many standard deviations above the mean of the steps before a loss may be (6 in OLMo-core's
    `SkipStepOptimizer`)."""
    norm_sigmas: float = 6.0
    """The same of the gradient norm, before it is clipped."""
    window_steps: int = 128
    """Steps that the mean is taken over (128 there); with fewer than half of them, only what is no number counts."""
    back_steps: int = 100
    """How far before the step the data is left out, and the oldest state to go back to (about 100 in PaLM, Chowdhery
    2022, 5.1); 0 goes on from the state that the step began with."""
    skip_batches: int = 200
    """Batches that are left out from there (200 to 500 in PaLM); 0 trains on the same again, as after a fault of the
    hardware."""
    repeats: int = 3
    """How often a run goes back without getting `window_steps` steps beyond where it last had to; then it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """Where the run lives, and what is kept of it."""

    dir: str = "runs/demo"
    """The run directory."""
    existing: Existing = "refuse"
    """What to do where the run directory holds a run: refuse, resume it, or start a new one beside it."""
    save_every: int = 200
    """Steps between checkpoints; the last step is always followed by one."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted once a newer one is whole."""
    save_patience: int = 3
    """How many times `save_every` steps the newest checkpoint may be old before one that cannot be written ends the
    run. Until then that is told, and the run trains on and saves again about 30 seconds later. 0: the first ends it."""
    store: str | None = None
    """Where checkpoints are copied to as well, by any URL that fsspec knows: `s3://bucket/run`, say. A run that is
    resumed where the disk has none goes on from there."""
    snapshot_every: int | None = None
    """Steps between copies of the state in the host's memory, which a killed rank is recovered from, and from which
    checkpoints are written while training goes on; none makes no copies."""
    peers: int | None = None
    """Other hosts that have a copy of each host's snapshots, 0 or 1, so that a run survives a whole host; none takes 1
    where there are several hosts and snapshots, else 0."""
    peer_bytes_per_s: float | None = None
    """The most that a host sends of these copies; none sends as fast as the link goes, and training shares it."""
    fingerprint_every: int | None = None
    """Steps between checks of the state and the gradients for silent corruption; what is saved is checked too. 1 sees
    what changes in memory between any two steps; none makes no checks."""
    recompute_every: int | None = None
    """Exact mode with dp > 1: steps between those whose gradient other ranks compute as well, to find processors that
    compute wrongly; none has no step computed twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What is reported."""

    tensorboard: bool = True
    """Whether the run directory gets TensorBoard's event files."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers that the curves are sent to as well, each through its own client, which is to be installed: wandb
    (Weights & Biases), mlflow, trackio. Where they send to, and as whom, is their own settings' business."""
    project: str = "superstep"
    """The project that the run is of there; MLflow calls it an experiment."""
    log_every: int = 10
    """Steps between lines where the output is no terminal, and between reports of the routers."""
    peak_flops: float | None = None
    """FLOP/s of one rank's device that MFU is measured against; none looks it up, or measures it on a CPU."""
    sample: str | None = None
    """What the model is to go on from after each checkpoint, by a process beside the run: the report has what it
    writes."""
    profile: tuple[int, ...] = ()
    """Steps that torch's profiler watches: of each, every rank writes a trace into the run directory's profiles, which
    Perfetto opens. superstep train takes them as --profile too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedRun:
    """One run, whole, but for the length of its sequences, which may be left to the model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: ProposedData = field(default_factory=ProposedData)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    lora: LoraConfig | None = None
    rollback: RollbackConfig | None = None
    state: StateConfig = field(default_factory=StateConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(ProposedRun):
    """One run, whole."""

    data: DataConfig = field(default_factory=DataConfig)


def setting_text(name: str, value: object) -> str:
    """``name = value`` for a message, which adds that it is the default: then perhaps nobody has set it."""
    section, _, key = name.partition(".")
    default = getattr(getattr(RunConfig(), section), key)
    return f"{name} = {value} (the default)" if value == default else f"{name} = {value}"
