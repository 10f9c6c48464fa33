"""Former names of modules, for users' files that still import them."""

from __future__ import annotations

RENAMED = {
    "superstep.runtime": "superstep.comm, superstep.launch, superstep.monitor or superstep.engine",
    "superstep.train.session": "superstep.train.corpus_trainer",
    "superstep.tune.rl.trainer": "superstep.tune.rl.policy_trainer",
    "superstep.model.any": "superstep.model.custom.units_from_modules",
    "superstep.model.inspect": "superstep.model.custom.inspect",
    "superstep.model.exchange": "superstep.model.mixture.expert_dispatch",
    "superstep.model.source": "superstep.model.custom.user_model",
    "superstep.hardware.text": "superstep.hardware.cluster_file",
    "superstep.program.memory": "superstep.program.peak_memory",
    "superstep.plan.split": "superstep.plan.sharding",
    "superstep.plan.resolve": "superstep.plan.resolution.resolve",
    "superstep.train.batches": "superstep.engine.values.microbatch",
    "superstep.numerics.sequence_policy": "superstep.numerics.sequence_losses",
    "superstep.serve.api.body_validation": "superstep.http.body_validation",
    "superstep.serve.api.drain": "superstep.http.drain",
    "superstep.serve.api.guard": "superstep.http.guard",
    "superstep.serve.api.http_errors": "superstep.http.request_error",
    "superstep.serve.api.server": "superstep.http.server",
    "superstep.serve.api.sse": "superstep.http.sse",
    "superstep.grade.graders.final": "superstep.grade.graders.final_answer",
    "superstep.grade.graders.judge": "superstep.grade.graders.llm_judge",
    "superstep.grade.graders.values": "superstep.grade.graders.literals",
}


def new_name(error: BaseException) -> str:
    """The present name of a module that an import did not find, as the end of a sentence; empty for others."""
    old = error.name if isinstance(error, ModuleNotFoundError) else None
    return f"; it is {RENAMED[old]} now" if old in RENAMED else ""
