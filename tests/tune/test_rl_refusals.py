"""What reinforcement learning does not do is refused, with the field and what would work."""

from __future__ import annotations

import pytest

from superstep.errors import ConfigError
from superstep.plan.config import DataConfig, LoraConfig, RunConfig, StateConfig, TrainConfig
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.initial_policy import check_run


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": TrainConfig(elastic=True)}, r"train\.elastic = true .*set it to false"),
        ({"lora": LoraConfig(base="nf4")}, r"lora\.base = 'nf4': .*leave lora\.base out"),
        ({"state": StateConfig(store="s3://bucket/run")}, r"state\.store with rl\.window = 1: .*set rl\.window = 0"),
    ],
)
def test_what_rl_does_not_do_is_refused(sections, words):
    rl, rollout = RlConfig(environment="tasks.py", lag=1, window=1), RolloutConfig(placement="apart")
    check_run(RunConfig(data=DataConfig(sequence_tokens=512)), rl, rollout)
    with pytest.raises(ConfigError, match=words):
        check_run(RunConfig(data=DataConfig(sequence_tokens=512), **sections), rl, rollout)
