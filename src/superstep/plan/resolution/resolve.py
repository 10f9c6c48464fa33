"""resolve: fills what is automatic, and refuses what cannot work, with the choices that can."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from superstep.errors import ConfigError
from superstep.plan.config import (
    Context,
    EncoderPlacement,
    Kept,
    Place,
    Recompute,
    RunConfig,
    Schedule,
    setting_text,
)
from superstep.plan.mesh import FAMILIES, Family, MeshShape
from superstep.plan.model.axes import outline_of
from superstep.plan.model.outline import Outline, Parameter
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.resolution.check_ranges import check_ranges
from superstep.plan.resolution.fill_plan import fill_plan, find_activations
from superstep.plan.resolution.reduction_grain import Grain, find_grain
from superstep.plan.resolution.skip_and_rollback import check_recompute
from superstep.plan.resolution.trained_parameters import choose_narrow, choose_trained, list_frozen_units
from superstep.plan.rules import Rules
from superstep.plan.sample_fields import Counts, SampleFields
from superstep.plan.saved_activations import PLAIN, SavedActivations
from superstep.plan.sharding.divisibility import check_context, check_experts, check_replicas, check_rules
from superstep.plan.sharding.edges import (
    list_backward_units,
    list_needed_units,
    list_taken_values,
    require_no_return,
    require_way_back,
    require_work,
)
from superstep.plan.sharding.parameters import check_blocks, check_decoder, check_split, padding_of, rules_of
from superstep.plan.sharding.stages import place, stages_of
from superstep.plan.zero import ZeroStage


@dataclass(frozen=True, slots=True)
class PlannedPhase:
    """One phase of a step.

    Attributes:
        trained: the units that it trains.
        inputs: for each unit, the units whose outputs it takes in this phase; () for a chain.
    """

    name: str
    trained: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ZeroStage):
    """A layout with nothing left open: the program is compiled from it.

    Attributes:
        stages: unit numbers of each stage, in model order.
        placement: the pipeline rank of each stage.
        microbatches: of one data-parallel rank in a step.
        microbatch: sequences in a microbatch.
        grain: exact mode's pieces; None in fast mode.
        families: of the model's parameters.
        params: for each unit, the units that own the parameters that it reads: itself, and the embedding for a tied
            head.
        frozen: units without trained parameters; of one phase, those that it does not train.
        resting: those of them that another phase trains.
        sparse: units with tables of which only touched rows have a gradient.
        phases: of a step; () for a step of one.
        inputs: for each unit, the units whose outputs it takes; () for a chain.
        shared_fields: fields of which each context-parallel rank has its tokens, and of others all; None for all.
        recomputed: whether the recompute policy covers the unit (blocks, not the embedding or the head).
        rules: which axes of parameters are cut.
        mtp_weight: of the loss of a second predicted token; None for one.
        snapshots: whether the step copies the state into memory that outlives the ranks.
        encoder: where an encoder runs: unless in front, its units are the first stage, which every pipeline rank has.
        work: multiplications of each unit's forward pass over a row of the batch; () where no pass needs them.
        activations: the place of each unit's kept activations between its passes; () for the device.
        kept: for each unit what it keeps of each microbatch; () where the policy decides. Of other numbers of
            microbatches a unit keeps as little as it can on the device.
        reload_ahead: passes of units before a backward pass at which they come back.
        narrow: names of parameters with moments in fewer bits than fp32.
        padding: for each axis with more rows on the ranks than in the model, the number over all ranks.
    """

    mesh: MeshShape
    zero: int
    context: Context
    schedule: Schedule
    chunks: int
    stages: tuple[tuple[int, ...], ...]
    placement: tuple[int, ...]
    microbatches: int
    microbatch: int
    microbatch_group: int
    recompute: Recompute
    sequence_parallel: bool
    prefetch: int
    rules: Rules
    padding: tuple[tuple[str, int], ...]
    grain: Grain | None
    families: tuple[Family, ...]
    units: tuple[str, ...]
    params: tuple[tuple[int, ...], ...]
    frozen: tuple[int, ...]
    recomputed: tuple[bool, ...]
    inputs: tuple[tuple[int, ...], ...] = ()
    shared_fields: tuple[str, ...] | None = None
    mtp_weight: float | None = None
    snapshots: bool = False
    resting: tuple[int, ...] = ()
    sparse: tuple[int, ...] = ()
    phases: tuple[PlannedPhase, ...] = ()
    encoder: EncoderPlacement = "front"
    work: tuple[int, ...] = ()
    activations: tuple[Place, ...] = ()
    kept: tuple[tuple[Kept, ...], ...] = ()
    reload_ahead: int = 1
    narrow: frozenset[str] = frozenset()

    def list_phases(self) -> tuple[Plan, ...]:
        """The plan of each phase of a step, in their order; only itself for a step of one."""
        every = {unit for phase in self.phases for unit in phase.trained}
        return tuple(
            replace(
                self,
                frozen=tuple(unit for unit in range(len(self.units)) if unit not in phase.trained),
                resting=tuple(sorted(every - set(phase.trained))),
                inputs=phase.inputs,
                snapshots=self.snapshots and number == 0,
                phases=(),
            )
            for number, phase in enumerate(self.phases)
        ) or (self,)

    @property
    def encoders(self) -> tuple[int, ...]:
        """The pipeline ranks that share an encoder."""
        return () if self.encoder == "front" else tuple(range(self.mesh.pp))

    def list_units_of(self, rank: int) -> tuple[int, ...]:
        """The units that a pipeline rank computes."""
        here = enumerate(zip(self.stages, self.placement, strict=True))
        return tuple(unit for s, (units, at) in here if at == rank or (s == 0 and self.encoders) for unit in units)

    def shares(self, field: str) -> bool:
        """Whether context-parallel ranks share a field's tokens."""
        return self.shared_fields is None or field in self.shared_fields

    @property
    def offloaded(self) -> frozenset[int]:
        """The units that move what they keep."""
        return frozenset(unit for unit, place in enumerate(self.activations) if place != "device")

    def find_choice(self, unit: int, m: int) -> Kept:
        """What a unit keeps of a microbatch for its backward pass, where it is chosen for each."""
        own = self.kept[unit]
        return own[m] if len(own) == self.microbatches else "input" if self.recomputed[unit] else "all"

    def moves(self, unit: int, m: int) -> bool:
        """Whether what a unit keeps of a microbatch lies elsewhere between its passes."""
        return self.find_choice(unit, m) in ("host", "disk") if self.kept else unit in self.offloaded

    def trains(self, family: Family) -> bool:
        """Whether a family's parameters are trained."""
        return family not in ("frozen", "packed")

    @property
    def needed(self) -> frozenset[int]:
        """The units that lead to the loss: in one phase not always all."""
        return list_needed_units(self.inputs) if self.inputs else frozenset(range(len(self.units)))

    @property
    def has_backward(self) -> tuple[bool, ...]:
        """Whether each unit has a backward pass: none in front of the first trained one has."""
        needed = self.needed
        trained = [unit in needed and not set(reads) <= set(self.frozen) for unit, reads in enumerate(self.params)]
        return list_backward_units(list_taken_values(len(self.units), self.inputs), trained)

    def pad_dims(self, parameter: Parameter) -> tuple[int, ...]:
        """A parameter's dims over all ranks together: the model's, with padding."""
        if not self.padding:
            return parameter.dims
        rows = dict(self.padding)
        return tuple(rows.get(axis or "", size) for axis, size in zip(parameter.axes, parameter.dims, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A run ready to compile.

    Attributes:
        config: with every automatic field filled.
        decoder: our own decoder's shape; None for a user's model.
        outline: the model's units.
        kept: what the run's kernels keep, for predictions of memory.
        samples: the fields of the samples of ``data.source``; None for tokens of text.
    """

    config: RunConfig
    decoder: ModelShape | None
    outline: Outline
    plan: Plan
    kept: SavedActivations = PLAIN
    samples: SampleFields | None = None

    def list_phases(self) -> tuple[Resolved, ...]:
        """The run of each phase of a step, in their order; only itself for a step of one."""
        return tuple(replace(self, plan=plan) for plan in self.plan.list_phases())

    @property
    def counts(self) -> Counts:
        """What the run's targets are, for its rates."""
        if self.samples is None:
            return "tokens"
        return "samples" if not self.samples.target.dims else "targets"

    @property
    def has_documents(self) -> bool:
        """Whether a row holds several documents, or several ragged samples, that attention keeps apart."""
        return self.config.data.is_masked if self.samples is None else bool(self.samples.capacities)

    @property
    def is_tied(self) -> bool:
        """Whether the head's matrix is the embedding's; of a user's model, whether any units share a parameter."""
        return self.outline.is_tied if self.decoder is None else self.decoder.tied

    @property
    def targets_of_row(self) -> int:
        """Targets of a row of a batch: the tokens of a sequence, or those of a sample."""
        return self.config.data.sequence_tokens if self.samples is None else self.samples.targets

    @property
    def shape(self) -> ModelShape:
        """The decoder's shape; raises ConfigError for a user's model."""
        if self.decoder is None:
            raise ConfigError(
                f"{self.config.model.label}: its steps are not predicted; view --program lists the instructions."
            )
        return self.decoder

    @property
    def trained_numel(self) -> int:
        """Elements of trained parameters."""
        return sum(math.prod(p.dims) for owned in self.outline.owned for p in owned if not p.is_frozen)


def resolve(
    config: RunConfig, world: int | None = None, outline: Outline | None = None, *, is_priced: bool = False
) -> Resolved:
    """Fill what is automatic and check everything together.

    Args:
        world: the number of ranks that are already launched; None where the plan decides.
        outline: of a user's model; None means the decoder of ``config.model``.
        is_priced: whether the plan is only priced, and not run.

    Raises:
        ConfigError: names the field, the value, the rule and the choices that work.
    """
    shape = shape_of(config.model, is_priced=is_priced) if outline is None else None
    outline = outline_of(shape) if shape is not None else outline
    assert outline is not None
    check_ranges(config)
    outline = choose_trained(config, shape, outline)
    _check_data(config, shape)
    config = replace(config, plan=fill_plan(config, outline, world, is_ours=shape is not None))
    return Resolved(config=config, decoder=shape, outline=outline, plan=_check_plan(config, shape, outline))


def _check_plan(config: RunConfig, shape: ModelShape | None, outline: Outline) -> Plan:
    """The plan of a run whose automatic fields are filled, checked against its model."""
    plan, rules = config.plan, rules_of(outline, config.plan)
    if shape is not None:
        check_decoder(config, shape, rules)
        check_rules(config, shape, plan)
    check_context(config, shape, plan, outline)
    check_experts(config, shape, plan)
    check_replicas(shape, plan)
    grain = find_grain(config, shape, plan, outline)
    padding = padding_of(shape, rules, grain.cells if grain else plan.tp)
    check_split(outline, rules, plan.tp, {axis for axis, _ in padding})
    check_blocks(outline, rules, plan.tp)
    assert plan.dp is not None
    assert plan.microbatch is not None
    assert plan.schedule is not None
    microbatches = config.train.batch_sequences // (plan.dp * plan.microbatch)
    if config.state.recompute_every is not None:
        check_recompute(config, dp=plan.dp, has_experts=shape is not None and shape.moe is not None)
    stages = stages_of(config, shape, outline)
    placement = place(plan.schedule, pp=plan.pp, chunks=plan.chunks, in_front=len(stages) - plan.pp * plan.chunks)
    taken = list_taken_values(len(outline.names), outline.inputs)
    require_no_return(outline.names, stages, placement, taken)
    kept, activations = find_activations(config, outline, microbatches)
    made = Plan(
        mesh=MeshShape(pp=plan.pp, dp=plan.dp, cp=plan.cp, tp=plan.tp, ep=plan.ep, replicas=plan.replicas),
        zero=plan.zero,
        context=plan.context,
        schedule=plan.schedule,
        chunks=plan.chunks,
        stages=stages,
        placement=placement,
        microbatches=microbatches,
        microbatch=plan.microbatch,
        microbatch_group=plan.microbatch_group or microbatches,
        recompute=plan.recompute,
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        prefetch=plan.prefetch,
        rules=rules,
        padding=padding,
        grain=grain,
        families=_families(config, shape, outline),
        units=outline.names,
        params=outline.reads,
        frozen=list_frozen_units(outline),
        sparse=outline.sparse,
        phases=_phases(outline),
        recomputed=outline.recomputed,
        inputs=outline.inputs,
        encoder=plan.encoder,
        shared_fields=outline.shared_fields,
        mtp_weight=None if shape is None else shape.mtp_weight,
        snapshots=config.state.snapshot_every is not None,
        activations=activations,
        kept=kept,
        reload_ahead=plan.reload_ahead or 1,
        narrow=choose_narrow(config, outline, rules),
    )
    require_way_back(made.units, stages, taken, made.has_backward)
    for phase, its_plan in zip(made.phases, made.list_phases(), strict=False):
        require_work(made.units, stages, its_plan.needed, phase.name)
    return made


def _phases(outline: Outline) -> tuple[PlannedPhase, ...]:
    return tuple(
        PlannedPhase(
            phase,
            tuple(number for number, unit in enumerate(outline.units) if unit.phase == phase),
            outline.inputs_in(phase),
        )
        for phase in outline.phases
    )


def _families(config: RunConfig, shape: ModelShape | None, outline: Outline) -> tuple[Family, ...]:
    has = {
        "dense": True,
        "experts": bool(shape and shape.moe),
        "adapters": config.lora is not None,
        "statistics": any(p.is_statistic and not p.is_frozen for unit in outline.units for p in unit.parameters),
        "sparse": bool(outline.sparse),
        "frozen": any(p.is_frozen for unit in outline.units for p in unit.parameters),
        "packed": any(p.block_format for unit in outline.units for p in unit.parameters),
    }
    return tuple(family for family in FAMILIES if has[family])


def _check_data(config: RunConfig, shape: ModelShape | None) -> None:
    if shape is not None and config.data.sequence_tokens > shape.max_tokens:
        raise ConfigError(
            f"{setting_text('data.sequence_tokens', config.data.sequence_tokens)} is longer than model.name = "
            f"'{config.model.name}' supports; set data.sequence_tokens to {shape.max_tokens} or less."
        )
    if config.model.weights is not None and config.data.tokenizer is None and config.data.source is None:
        raise ConfigError(
            f"model.weights = '{config.model.weights}' and no data.tokenizer: one that is trained on the corpus has "
            "ids that these weights do not know; set data.tokenizer to the tokenizer.json beside them."
        )
