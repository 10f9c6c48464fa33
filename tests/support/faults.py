"""Planted faults: each breaks one thing that a layout must do, as a stranger might, and ``prove`` must see it.

``FAULTS`` is the table: what is wrong, on which layout and in which dtype, and what ``prove`` names first: the kind of
the first wrong value; *loop* where the training loop does something else than the proof's own steps, *restart* where it
does so only after a restart, or *rerun* where two runs of the same steps differ; *stream*, *validation* and *sampler*
where these are not what plain code makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import plant_data
import plant_reading
import plant_seams
import plant_sums
import small
from superstep.engine.flat import sync
from superstep.engine.parallel import tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the table.

    Attributes:
        plant: makes the block in which the fault is there.
        plan: the layout.
        first: what ``prove`` names first, or several of which any will do.
        compute: the dtype.
        model: fields of the model that differ.
        data: fields of the data that differ.
        says: what a hint holds.
        everywhere: whether it is there where batches are made, too, before any rank is launched.
    """

    plant: Callable[[], AbstractContextManager[object]]
    plan: dict[str, Any]
    first: str
    compute: str = "fp32"
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    everywhere: bool = False

    @property
    def config(self):
        """The run that it is planted in."""
        found = small.config(compute=self.compute, **self.plan)
        return replace(found, model=replace(found.model, **self.model), data=replace(found.data, **self.data))


MOE = {"experts": 4, "router": "dropless", "ffn": 24, "balance_weight": 0.1}
PIPES = {"microbatch": 1}

FAULTS: dict[str, Fault] = {
    "gradients not summed over dp": Fault(
        plant=lambda: mock.patch.object(sync, "all_reduce", plant_seams.no_reduction),
        plan={"dp": 2, "zero": 0},
        first="gradient",
    ),
    "gradients not summed into shards": Fault(
        plant=lambda: mock.patch.object(sync, "reduce_scatter", plant_seams.no_reduction),
        plan={"dp": 2, "zero": 2},
        first="gradient",
    ),
    "each rank divides by its own tokens": Fault(plant=plant_seams.own_divisor, plan={"dp": 2}, first="loss"),
    "two ranks read the same rows": Fault(plant=plant_seams.shifted_rows, plan={"dp": 2}, first="loss"),
    "parameters not gathered after the update": Fault(
        plant=plant_seams.stale_parameters, plan={"dp": 2, "zero": 1}, first="loss"
    ),
    "a tied head's gradient not summed": Fault(
        plant=plant_seams.untied, plan={"pp": 2, "microbatch": 1}, first="gradient"
    ),
    "partial gradients not summed over tp": Fault(plant=plant_seams.no_partial_sum, plan={"tp": 2}, first="gradient"),
    "each rank clips by its own norm": Fault(plant=plant_seams.own_norm, plan={"dp": 2, "zero": 1}, first="norm"),
    "no sum of gradients on entering tp": Fault(
        plant=plant_seams.no_gradient_sum_on_entering, plan={"tp": 2, "sequence_parallel": False}, first="gradient"
    ),
    "vocabulary looked up at the wrong offset": Fault(
        plant=plant_seams.wrong_vocabulary_offset, plan={"tp": 2}, first="loss"
    ),
    "one microbatch's gradient lost": Fault(
        plant=plant_seams.lost_microbatch, plan={"pp": 2, "microbatch": 1}, first="gradient"
    ),
    "each rank starts from its own seed": Fault(plant=plant_seams.own_seed, plan={"dp": 2}, first="loss"),
    "keys do not go round the ring": Fault(plant=plant_seams.same_keys_all_round, plan={"cp": 2}, first="loss"),
    "each rank turns by the first rank's positions": Fault(
        plant=plant_seams.positions_of_the_first_rank, plan={"cp": 2}, first="loss"
    ),
    "gradients of heads not brought back": Fault(
        plant=plant_seams.heads_not_brought_back, plan={"cp": 2, "context": "ulysses"}, first="gradient"
    ),
    "replicas keep their own gradients": Fault(
        plant=plant_seams.replicas_apart, plan={"dp": 4, "zero": 2, "replicas": 2}, first="gradient"
    ),
    "a put-off gradient lost": Fault(
        plant=plant_seams.lost_put_off_sum, plan={"pp": 2, "schedule": "zb-h1", "microbatch": 1}, first="gradient"
    ),
    # The layouts in turn.
    "a layer's weights of the start, ZeRO-3": Fault(
        plant=lambda: plant_sums.stale_layer("layers.1."), plan={"dp": 2, "zero": 3}, first="loss", says="fetch"
    ),
    "parts of parameters exchanged, ZeRO-1": Fault(
        plant=plant_sums.parts_exchanged, plan={"dp": 2, "zero": 1}, first="loss"
    ),
    "gradients of the step before kept, ZeRO-2": Fault(
        plant=plant_sums.gradient_of_the_step_before, plan={"dp": 2, "zero": 2}, first="gradient"
    ),
    "the last of several sums alone, breadth-first ZeRO-3": Fault(
        plant=plant_sums.last_sum_only,
        plan={"dp": 2, "zero": 3, "schedule": "breadth-first", "chunks": 2, "microbatch_group": 2, "microbatch": 1},
        first="gradient",
    ),
    "every gradient half": Fault(plant=plant_sums.half_the_scale, plan={"dp": 2}, first="gradient", says="ratio 0.500"),
    "one unit not reduced": Fault(
        plant=lambda: plant_sums.one_unit_not_reduced("reduce"),
        plan={"dp": 2, "zero": 1},
        first="gradient",
        says="reduce u2",
    ),
    "one unit's replicas apart": Fault(
        plant=lambda: plant_sums.one_unit_not_reduced("reduce_replicas"),
        plan={"dp": 4, "zero": 1, "replicas": 2},
        first="gradient",
        says="reduce-replicas u2",
    ),
    "no weight decay": Fault(plant=plant_sums.no_decay, plan={"dp": 2, "zero": 3}, first="update", says="step"),
    "one shard not updated": Fault(plant=plant_sums.one_shard_not_updated, plan={"dp": 2, "zero": 2}, first="update"),
    "clipping by the own shard's norm": Fault(
        plant=lambda: plant_sums.clip_by(plant_sums.norm_of_own_shard),
        plan={"dp": 2, "zero": 1},
        first="moment",
        says="step",
    ),
    "no clipping": Fault(
        plant=lambda: plant_sums.clip_by(lambda _, norm: 0.0), plan={"dp": 2, "zero": 2}, first="moment"
    ),
    "clipped twice over": Fault(
        plant=lambda: plant_sums.clip_by(lambda _, norm: norm * norm), plan={"tp": 2}, first="moment", says="ratio"
    ),
    "every copy counted in the norm": Fault(
        plant=plant_sums.every_copy_counted, plan={"dp": 2, "zero": 0}, first="norm"
    ),
    "partial products not summed on leaving tp": Fault(
        plant=plant_seams.leaves_unsummed, plan={"tp": 2, "sequence_parallel": False}, first="loss"
    ),
    "partial products not summed, sequence parallel": Fault(
        plant=lambda: plant_seams.own_part_unsummed(tensor.Scatter, "forward"), plan={"tp": 2}, first="loss"
    ),
    "gradients not summed on entering, sequence parallel": Fault(
        plant=lambda: plant_seams.own_part_unsummed(tensor.Gather, "backward"), plan={"tp": 2}, first="gradient"
    ),
    "targets at the wrong offset of a cut vocabulary": Fault(
        plant=plant_seams.wrong_column_offset, plan={"tp": 2}, first="loss"
    ),
    "the other rank's targets, vocabulary whole": Fault(
        plant=plant_seams.same_share_of_the_loss, plan={"tp": 2, "rules": (("vocab", "none"),)}, first="loss"
    ),
    "targets of another microbatch, interleaved": Fault(
        plant=plant_seams.other_targets, plan={"pp": 2, "chunks": 2, "schedule": "interleaved", **PIPES}, first="loss"
    ),
    "gradients sent back doubled, gpipe": Fault(
        plant=lambda: plant_seams.sent("grad", lambda x: 2 * x),
        plan={"pp": 2, "schedule": "gpipe", **PIPES},
        first="gradient",
        says="backward u",
    ),
    "activations sent on in bf16, 1f1b": Fault(
        plant=lambda: plant_seams.sent("act", lambda x: x.bfloat16().float()), plan={"pp": 2, **PIPES}, first="loss"
    ),
    "put-off sums done twice, zb-v": Fault(
        plant=plant_seams.put_off_sums_twice, plan={"pp": 2, "chunks": 2, "schedule": "zb-v", **PIPES}, first="gradient"
    ),
    "recomputed from other tokens": Fault(
        plant=plant_seams.recomputed_from_another, plan={"dp": 2, "zero": 3, "recompute": "full"}, first="gradient"
    ),
    "gradients of keys do not go round the ring": Fault(
        plant=plant_seams.ring_gradients_stay, plan={"cp": 2}, first="gradient"
    ),
    "blocks of the ring not merged": Fault(
        plant=plant_seams.blocks_not_merged, plan={"cp": 2, "zero": 1}, first="loss"
    ),
    "heads go to the next rank": Fault(
        plant=plant_seams.heads_to_the_next_rank, plan={"cp": 2, "context": "ulysses"}, first="loss"
    ),
    "targets cut straight, tokens in zig-zag": Fault(
        plant=plant_seams.targets_of_the_whole, plan={"cp": 2}, first="loss"
    ),
    "gradients not summed over cp": Fault(
        plant=lambda: mock.patch.object(sync, "reduce_scatter", plant_seams.no_reduction),
        plan={"cp": 2, "zero": 3},
        first="gradient",
    ),
    "experts' rows in another order": Fault(
        plant=plant_seams.rows_come_back_in_another_order, plan={"dp": 2, "ep": 2}, model=MOE, first="loss"
    ),
    "gradients do not travel to the experts": Fault(
        plant=plant_seams.gradients_do_not_travel, plan={"dp": 2, "ep": 2, "zero": 1}, model=MOE, first="gradient"
    ),
    "each rank routes by its own tokens": Fault(
        plant=plant_seams.routed_by_own_tokens, plan={"cp": 2, "ep": 2}, model=MOE, first="loss"
    ),
    # bf16, where rounding is large.
    "a layer's weights of the start, ZeRO-3 in bf16": Fault(
        plant=lambda: plant_sums.stale_layer("layers.1."), plan={"dp": 2, "zero": 3}, compute="bf16", first="loss"
    ),
    "sums into shards in bf16": Fault(
        plant=lambda: plant_sums.rounded("reduce_scatter"), plan={"dp": 2, "zero": 2}, compute="bf16", first="gradient"
    ),
    "sums over dp in bf16": Fault(
        plant=lambda: plant_sums.rounded("all_reduce"), plan={"dp": 2, "zero": 0}, compute="bf16", first="gradient"
    ),
    "master weights in bf16": Fault(
        plant=plant_sums.masters_in_bf16, plan={"dp": 2, "zero": 1}, compute="bf16", first="update"
    ),
    "one microbatch's gradient lost in bf16": Fault(
        plant=plant_seams.lost_microbatch, plan={"pp": 2, "microbatch": 1}, compute="bf16", first="gradient"
    ),
    "gradients of keys do not go round in bf16": Fault(
        plant=plant_seams.ring_gradients_stay, plan={"cp": 2}, compute="bf16", first="gradient"
    ),
    "partial products not summed in bf16": Fault(
        plant=plant_seams.leaves_unsummed, plan={"tp": 2, "sequence_parallel": False}, compute="bf16", first="loss"
    ),
    "clipping by the own shard's norm in bf16": Fault(
        plant=lambda: plant_sums.clip_by(plant_sums.norm_of_own_shard),
        plan={"dp": 2, "zero": 3},
        compute="bf16",
        first="moment",
    ),
    # Data and restart.
    "the cursor one sample on after a restart": Fault(
        plant=lambda: plant_data.loaded(lambda _, at: replace(at, samples=at.samples + 1)),
        plan={"dp": 2},
        first="restart",
    ),
    "the cursor at the start after a restart": Fault(
        plant=lambda: plant_data.loaded(lambda _, at: replace(at, samples=0)),
        plan={"pp": 2, **PIPES},
        first="restart",
    ),
    "the cursor one sample on with each step": Fault(
        plant=plant_data.cursor_of_each_step, plan={"dp": 2}, first="loop"
    ),
    "a sample skipped after each batch": Fault(
        plant=plant_data.prefetch_skips, plan={"dp": 2, "zero": 2}, first="loop"
    ),
    "the loop reads another rank's rows": Fault(plant=plant_data.loop_reads_other_rows, plan={"dp": 2}, first="loop"),
    "each rank shuffles by its own seed": Fault(
        plant=plant_data.own_order, plan={"dp": 2, "zero": 1}, first="stream", says="rank 1"
    ),
    "another order after a restart": Fault(plant=plant_data.new_order_after_a_restart, plan={"tp": 2}, first="restart"),
    "the next step's learning rate": Fault(
        plant=plant_data.rate_of_the_next_step, plan={"dp": 2, "zero": 3}, first="loop"
    ),
    "updates not counted on after a restart": Fault(
        plant=plant_data.updates_not_counted, plan={"cp": 2}, first="restart"
    ),
    "second moments not loaded": Fault(
        plant=lambda: plant_data.not_loaded("exp_avg_sq"), plan={"dp": 2, "zero": 2}, first="restart"
    ),
    "first moments not loaded": Fault(
        plant=lambda: plant_data.not_loaded("exp_avg"), plan={"dp": 2, "ep": 2}, model=MOE, first="restart"
    ),
    "weights saved in bf16": Fault(
        plant=plant_data.saved_in_bf16, plan={"dp": 2, "zero": 1}, compute="bf16", first="restart"
    ),
    "weights loaded but not used, bf16": Fault(
        plant=plant_data.parameters_not_refreshed, plan={"dp": 2, "zero": 0}, compute="bf16", first="restart"
    ),
    "gradients of linears 5% too large, in bf16 on any number of ranks": Fault(
        plant=plant_sums.linears_too_large,
        plan={"dp": 2, "zero": 1},
        compute="bf16",
        first="scale",
        says="gradients, ratio 1.0",
        everywhere=True,
    ),
    "the same with experts": Fault(
        plant=plant_sums.linears_too_large,
        plan={"dp": 2, "tp": 2},
        compute="bf16",
        model=MOE,
        first="scale",
        says="gradients, ratio 1.0",
        everywhere=True,
    ),
    "one token too many in the divisor": Fault(
        plant=plant_data.count_of_tokens,
        plan={"dp": 2},
        first="stream",
        says="valid tokens are counted",
        everywhere=True,
    ),
    # What all ranks, the proof's own steps among them, read alike; validation; the sampler.
    "padding counted as tokens that have a loss": Fault(
        plant=plant_reading.padding_counted, plan={"dp": 2}, first="stream", says="padded: the batch at sample 0"
    ),
    "the same where rows are padded": Fault(
        plant=plant_reading.padding_counted,
        plan={"dp": 2},
        data={"packed": False},
        first="stream",
        says="valid tokens are counted",
        everywhere=True,
    ),
    "ranks read each other's rows, all alike": Fault(
        plant=plant_reading.rotated_rows, plan={"dp": 2}, first="stream", says="row 0 of the batch: the token"
    ),
    "the target behind the next token": Fault(
        plant=plant_reading.shifted_target,
        plan={"dp": 2},
        first="stream",
        says="the target of place 0",
        everywhere=True,
    ),
    "documents that start one token late": Fault(
        plant=plant_reading.late_starts,
        plan={"dp": 2},
        data={"document_mask": True},
        first="stream",
        says="start of the document",
        everywhere=True,
    ),
    "an order of each rank's own from the second epoch on": Fault(
        plant=plant_reading.own_order_later, plan={"dp": 2}, first="stream", says="rank 1"
    ),
    "a padded piece that begins one token late": Fault(
        plant=plant_reading.late_pieces, plan={"tp": 2}, first="stream", says="padded", everywhere=True
    ),
    "validation without its last batch": Fault(
        plant=plant_reading.last_batch_skipped, plan={"dp": 2}, first="validation"
    ),
    "validation on the training text": Fault(
        plant=plant_reading.validated_on_training, plan={"tp": 2}, first="validation"
    ),
    "validation of one rank's rows": Fault(plant=plant_reading.own_rows_validated, plan={"dp": 2}, first="validation"),
    "a mean of the batches' means": Fault(
        plant=plant_reading.mean_of_means, plan={"dp": 2}, data={"packed": False}, first="validation"
    ),
    "top-p that keeps one token too few": Fault(
        plant=plant_reading.top_p_keeps_one_less, plan={"dp": 2}, first="sampler", says="number of tokens to draw from"
    ),
    "the temperature multiplied": Fault(
        plant=plant_reading.temperature_multiplied, plan={"dp": 2}, first="sampler", says="temperature 0.7"
    ),
    "the same noise at each position": Fault(
        plant=plant_reading.same_noise, plan={"dp": 2}, first="sampler", says="the token is"
    ),
    "a server that reads the logits of the row before": Fault(
        plant=plant_reading.row_before, plan={"dp": 2}, first="sampler", says="of the saved checkpoint"
    ),
    "another gradient each time": Fault(plant=plant_data.another_each_time, plan={"dp": 2, "zero": 1}, first="rerun"),
}
