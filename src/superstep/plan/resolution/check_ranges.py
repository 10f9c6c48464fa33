"""check_ranges: refuses a number of a run that is out of its range, or has no meaning for its data, whatever the
model.
"""

from __future__ import annotations

from operator import attrgetter

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.resolution.check_fp16 import check_fp16
from superstep.plan.resolution.sample_rules import check_samples
from superstep.plan.resolution.skip_and_rollback import batches_left_out, check_rollback

AT_LEAST = {
    "model.norm_group": 1,
    "data.sequence_tokens": 2,
    "data.prefetch_steps": 1,
    "train.steps": 1,
    "train.batch_sequences": 1,
    "train.warmup_steps": 0,
    "train.eval_every": 1,
    "train.eval_batches": 1,
    "train.weight_decay": 0,
    "train.seed": 0,
    "state.save_every": 1,
    "state.keep": 1,
    "state.save_patience": 0,
    "state.snapshot_every": 1,
    "state.peers": 0,
    "state.peer_bytes_per_s": 1,
    "state.fingerprint_every": 1,
    "state.recompute_every": 1,
    "observe.log_every": 1,
    "plan.chunks": 1,
    "plan.prefetch": 0,
    "plan.reload_ahead": 1,
    "plan.pp": 1,
    "plan.tp": 1,
    "plan.cp": 1,
    "plan.ep": 1,
    "plan.replicas": 1,
    "plan.dp": 1,
    "plan.microbatch": 1,
    "plan.microbatch_group": 1,
    "numerics.exact_chunks": 1,
    "train.decay_steps": 1,
}
"""The least value of each field."""

ABOVE_ZERO = ("train.lr", "train.clip_norm", "train.eps", "train.clip_row_norm", "observe.peak_flops")
"""Fields above zero, and finite."""

SHARES = ("model.dropout", "train.beta1", "train.beta2", "data.validation_fraction")
"""Fields from zero to below one."""


def check_ranges(config: RunConfig) -> None:
    """Check the range of every number of a run; fields that are None are left open. If the run reads samples, also
    check that no field for text is set.

    Raises:
        ConfigError: names the field and its bounds.
    """
    check_samples(config)
    for name, least in AT_LEAST.items():
        value = attrgetter(name)(config)
        if value is not None and not value >= least:
            raise ConfigError(f"{name} = {value} must be at least {least}.")
    for name in ABOVE_ZERO:
        value = attrgetter(name)(config)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} = {value} must be above 0{' and finite' if value > 0 else ''}.")
    for name in SHARES:
        value = attrgetter(name)(config)
        if not 0 <= value < 1:
            raise ConfigError(f"{name} = {value} must be at least 0 and below 1.")
    if not 0 <= config.train.min_lr_ratio <= 1:
        raise ConfigError(f"train.min_lr_ratio = {config.train.min_lr_ratio} must lie between 0 and 1.")
    batches_left_out(config.train.skip)
    for step in config.observe.profile:
        if not 1 <= step <= config.train.steps:
            raise ConfigError(
                f"observe.profile = {step} is not a step of the run; choose steps from 1 to train.steps = "
                f"{config.train.steps}, not the first one, which warms up."
            )
    _check_sample(config)
    _check_mtp(config)
    check_fp16(config)
    if config.rollback is not None:
        check_rollback(config.rollback)
    if config.plan.zero not in (0, 1, 2, 3):
        raise ConfigError(f"plan.zero = {config.plan.zero} is not a ZeRO stage; set plan.zero to one of [0, 1, 2, 3].")


def _check_sample(config: RunConfig) -> None:
    sample = config.observe.sample
    if sample == "":
        raise ConfigError("observe.sample = '' is an empty prompt; give at least one character, or leave it out.")
    if sample is not None and config.lora is not None:
        raise ConfigError(
            f"observe.sample = '{sample}' needs checkpoints of whole models, but [lora] has checkpoints of adapters; "
            "leave observe.sample out."
        )


def _check_mtp(config: RunConfig) -> None:
    if config.model.mtp_weight is None:
        return
    others = {
        "model.source": config.model.source,
        "train.loss": config.train.loss,
        "lora": config.lora and f"rank {config.lora.rank}",
        "freeze.params": config.freeze and list(config.freeze.params),
    }
    for name, value in others.items():
        if value:
            raise ConfigError(
                f"{name} = '{value}' with model.mtp_weight = {config.model.mtp_weight}: the second token is predicted "
                "by a built-in decoder, all of it trained, with the cross entropy; leave one of them out."
            )
