"""What the commands do, from Python: values come back, nothing is printed, and mistakes are errors."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import reinforced
import superstep
import tuned
from superstep.cli.main import main
from superstep.errors import ConfigError, StateError, UserError
from superstep.plan.config import (
    DataConfig,
    ModelConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
)
from superstep.planner.ranking.plan_request import PlanRequest
from superstep.tune.config import read_recipe
from superstep.tune.rl.config import read_rl


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {number} of a text that repeats itself" for number in range(2000)))
    return RunConfig(
        model=ModelConfig(layers=2, width=32, heads=2, kv_heads=2, head_dim=16, ffn=64, vocab=300),
        data=DataConfig(corpus=(str(text),), sequence_tokens=32),
        train=TrainConfig(steps=3, batch_sequences=4, warmup_steps=1, eval_batches=1),
        plan=PlanConfig(dp=1, device="cpu"),
        state=StateConfig(dir=str(tmp_path / "run")),
    )


def test_train_returns_what_the_run_has_left_and_prints_nothing(config, capfd):
    result = superstep.train(config)
    assert (result.steps, result.is_complete) == (3, True)
    assert str(result.run_dir) == config.state.dir
    assert result.checkpoint is not None
    assert result.checkpoint.is_dir()
    assert 0 < result.last_loss < 10
    assert capfd.readouterr() == ("", "")
    again = superstep.train(replace(config, state=replace(config.state, existing="resume")))
    assert again == result, "it is complete"
    started = json.loads((result.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert main(["view", str(result.run_dir / "run.toml"), "--kernels"]) == 0
    rows = [re.split("  +", line) for line in capfd.readouterr().out.splitlines()[1:-1]]
    assert started["layers"].split(", ") == list(dict.fromkeys(row[-2] for row in rows))


def test_a_mistake_is_the_error_whose_line_the_command_prints(config, capsys):
    with pytest.raises(ConfigError) as caught:
        superstep.train(replace(config, plan=PlanConfig(dp=3, device="cpu")))
    assert main(["train", "--plan.dp", "3", "--train.batch-sequences", "4", "--data.corpus", *config.data.corpus]) == 2
    assert capsys.readouterr().err.strip() == f"superstep: {caught.value}"


def test_a_directory_that_holds_a_run_is_refused(config):
    superstep.train(config)
    with pytest.raises(StateError, match="already holds a run"):
        superstep.train(config)


def test_prove_returns_a_verdict(config, capfd):
    verdict = superstep.prove(config, steps=2)
    assert verdict.is_proven
    assert verdict.compared > 0
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="--steps = 0 must be at least 1"):
        superstep.prove(config, steps=0)


def test_importing_the_package_or_a_part_brings_no_torch_and_leaves_the_functions():
    code = (
        "import superstep, sys; assert 'torch' not in sys.modules\n"
        "import superstep.train, superstep.plan.config\n"
        "from superstep.planner.ranking.plan_request import PlanRequest\n"
        "assert callable(superstep.train)\n"
        "assert superstep.plan('demo', PlanRequest(cluster='2xH100', top=1)).plans\n"
        "assert superstep.plan.config.RunConfig\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plan_ranks_layouts_and_prints_nothing(capfd):
    request = PlanRequest(cluster="8xH100", tokens=1e9, global_batch=256, sequence=1024, top=3)
    ranking = superstep.plan("llama3.2-1b", request)
    assert 1 <= len(ranking.plans) <= 3
    assert len(ranking.figures) == len(ranking.plans)
    assert ranking.best.plan == ranking.plans[0].run.config.plan
    assert ranking.best.train.steps == -(-(10**9) // (256 * 1024))
    assert ranking.neighbours
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="--top = 0 must be at least 1"):
        superstep.plan("demo", replace(request, top=0))


def test_what_the_package_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = superstep.trian


def test_tune_sft_learns_conversations_and_prints_nothing(tmp_path, monkeypatch, capfd):
    made = tuned.make_files(tmp_path)
    (made / "recipe.toml").write_text(tuned.RECIPE, encoding="utf-8")
    monkeypatch.chdir(made)
    recipe = read_recipe(made / "recipe.toml")
    capfd.readouterr()
    result = superstep.tune_sft(recipe)
    assert result.is_complete
    assert result.steps > 0
    assert result.checkpoint is not None
    assert (result.run_dir / "recipe.toml").is_file()
    assert capfd.readouterr() == ("", "")
    with pytest.raises(UserError, match="start"):
        superstep.tune_dpo(replace(recipe, start=""))


def test_tune_rl_learns_from_rewards_and_prints_nothing(tmp_path, capfd):
    (tmp_path / "start").mkdir()
    start = reinforced.start(tmp_path / "start")
    (tmp_path / "rl.toml").write_text(reinforced.RECIPE.format(start=start, environment="tasks.py"))
    recipe = replace(
        read_rl(tmp_path / "rl.toml"),
        train=TrainConfig(steps=2, lr=3e-3, warmup_steps=0),
        plan=PlanConfig(dp=1, microbatch=2, device="cpu"),
        numerics=NumericsConfig(exact=True),
        state=StateConfig(dir=str(tmp_path / "run")),
    )
    result = superstep.tune_rl(recipe)
    assert (result.run_dir, result.steps, result.is_complete) == (tmp_path / "run", 2, True)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-000002"
    rewards = [json.loads(line).get("reward") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.last_reward == [each for each in rewards if each is not None][-1]
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match=r"rl\.group = 1"):
        superstep.tune_rl(replace(recipe, rl=replace(recipe.rl, group=1), state=StateConfig(dir=str(tmp_path / "x"))))
