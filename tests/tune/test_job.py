"""A run of reinforcement learning: the same bits on every layout and wherever it was cut."""

from __future__ import annotations

import re
import time

import pytest
import torch

import reinforced
from pool import RankError
from superstep.errors import ConfigError, StateError
from superstep.model.files.hf import open_weights
from superstep.plan.config import LoraConfig
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.run_folder.run_paths import RunFolder

pytestmark = pytest.mark.multiproc

HANGS_S = 30.0


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return reinforced.start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def undisturbed(pool, start, tmp_path_factory):
    """Steps and last weights of a run on one rank that nothing happened to."""
    root = tmp_path_factory.mktemp("run")
    told = pool.run(1, reinforced.run, reinforced.job(root, start))[0]
    return told, reinforced.weights(root)


def test_a_run_learns_something_and_its_sampler_has_the_trainers_bits(undisturbed, start):
    told, tensors = undisturbed
    assert [each["step"] for each in told] == [1, 2, 3]
    assert [each["lag"] for each in told] == [0, 1, 0]
    # What was sampled with these weights has the trainer's log-probabilities; one step later it has others.
    assert [each["max_dlogp"] == 0 for each in told] == [True, False, True]
    assert all(each["norm"] > 0 for each in told)
    begun = open_weights(start)
    assert any(not torch.equal(tensors[name], begun[name][:]) for name in tensors)


@pytest.mark.parametrize(
    ("ranks", "rollout", "plan"),
    [
        pytest.param(2, {}, {"dp": 2}, marks=pytest.mark.long),
        (2, {}, {"dp": 2, "zero": 1}),
        (2, {"tp": 2}, {"tp": 2}),
        (2, {}, {"pp": 2}),
        pytest.param(4, {"tp": 2}, {"dp": 2, "tp": 2, "zero": 2}, marks=pytest.mark.long),
    ],
    ids=["dp", "zero", "tp", "pp", "dp and tp"],
)
def test_a_run_has_the_same_bits_on_every_layout_of_trainer_and_sampler(
    pool, start, undisturbed, tmp_path, ranks, rollout, plan
):
    job = reinforced.job(tmp_path / "run", start, rollout=rollout, **plan)
    reinforced.require_same(pool.run(ranks, reinforced.run, job)[0], tmp_path / "run", undisturbed)
    # Ranks that have the model whole hand it to their samplers without a file.
    assert (tmp_path / "run" / "weights").exists() == (plan != {"dp": 2})


@pytest.mark.long
def test_adapters_learn_beside_weights_that_stay_with_the_same_bits_on_every_layout(pool, start, tmp_path):
    """Their sampler has base and adapters unmerged; a version is these alone. One run is cut half-way."""
    lora = LoraConfig(rank=4, alpha=8.0)
    told, roots = [], []
    for name, ranks, rollout, plan, rl in (
        ("one", 1, {}, {}, {}),
        ("tp", 2, {"tp": 2}, {"tp": 2}, {}),
        ("zero", 2, {}, {"dp": 2, "zero": 3}, {}),
        ("kl", 1, {}, {}, {"kl_coef": 0.1}),
    ):
        roots.append(tmp_path / name)
        job = reinforced.job(roots[-1], start, steps=2, lora=lora, rollout=rollout, rl=rl, **plan)
        if name == "tp":
            pool.run(ranks, reinforced.run, job, 4)
            job = reinforced.job(roots[-1], start, steps=2, lora=lora, rollout=rollout, rl=rl, **plan)
        told.append(pool.run(ranks, reinforced.run, job)[0])
    assert [each["max_dlogp"] == 0 for each in told[0]] == [True, False]
    for found, root in zip(told[1:3], roots[1:3], strict=True):
        reinforced.require_same(found, root, (told[0], reinforced.weights(roots[0])))
    # The reference is the model alone: at first no token is any farther from it, and then all are.
    first, second = (each["measures"]["reference_kl"] for each in told[3])
    assert first == 0.0 < second
    names = {name.rsplit(".", 2)[-2] for name in reinforced.weights(roots[0])}
    assert names == {"lora_A", "lora_B"}
    folder = checkpoints(RunFolder(root=roots[0]).checkpoints)[-1]
    assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors", "base.json"}
    assert not (folder / "config.json").exists()


@pytest.mark.long
def test_a_run_that_is_cut_goes_on_to_the_same_bits_on_another_layout(pool, start, undisturbed, tmp_path):
    """After each line of the record once: between samples, behind a snapshot, before it is gone."""
    root = tmp_path / "run"
    lines = 2 + 6 + 2  # of two versions: published and retired; six groups
    layouts = [(2, {"dp": 2}, {}), (1, {}, {}), (2, {"tp": 2}, {"tp": 2})]
    steps = {}
    for cut in range(1, lines + 1):
        ranks, plan, rollout = layouts[cut % len(layouts)]
        job = reinforced.job(root, start, rollout=rollout, **plan)
        for told in pool.run(ranks, reinforced.run, job, 1)[0]:
            steps[told["step"]] = told
    found = pool.run(1, reinforced.run, reinforced.job(root, start))[0]
    steps |= {told["step"]: told for told in found}
    reinforced.require_same([steps[step] for step in sorted(steps)], root, undisturbed)


def test_one_differing_bit_ends_the_run_and_names_its_token(pool, start, tmp_path, undisturbed):
    job = reinforced.job(tmp_path / "run", start, dp=2)
    with pytest.raises(RankError) as raised:
        pool.run(2, reinforced.planted, job, 1, 2, 3)
    found = re.search(
        r"version 0, task 1, answer 2: token (\d+) \(id \d+\) has log-probability (\S+) in training, and the sampler "
        r"drew it with (\S+)\. In exact mode",
        str(raised.value),
    )
    assert found, raised.value
    assert found[2] != found[3]
    assert abs(float(found[2]) - float(found[3])) < 1e-6
    # Nothing was learnt from it.
    assert checkpoints(RunFolder(root=tmp_path / "run").checkpoints) == []


ALIKE = "def grade(task, rollout):\n    return 0.0\n"
LATE = "import time\n\ndef grade(task, rollout):\n    time.sleep(60)\n"
FAILS = "def grade(task, rollout):\n    return rollout.nothing\n"
HANGS = "import time\n\ndef task(index, seed):\n    time.sleep(60 * index)\n    return Task(prompt='to be')\n"
RAISES = "def task(index, seed):\n    return [Task(prompt='to be')][index]\n"


def test_what_cannot_be_learnt_from_ends_the_run_with_one_line(pool, start, tmp_path):
    texts = {"alike": ALIKE, "late": LATE, "fails": FAILS, "hangs": HANGS, "raises": RAISES}
    for name, text in texts.items():
        (start / f"{name}.py").write_text(reinforced.ENVIRONMENT + text)

    def error(environment, **more):
        job = reinforced.job(tmp_path / environment, start, environment=f"{environment}.py", **more)
        with pytest.raises(RankError) as raised:
            pool.run(1, reinforced.run, job)
        return str(raised.value)

    rl = {"group": 2, "groups": 1}
    alike = "all rewards of the last 8 steps are 0, and nothing is learnt from answers that are all alike: give easier"
    assert alike in error("alike", steps=9, rl=rl, lag=0)
    late = {"timeout_s": 0.5, "grader_timeout_s": 0.6, "retries": 50}
    assert "the grader has no grades of task 0 after 1 s" in error(
        "late", rl=rl, rollout={"timeout_s": 1.0}, grade=late
    )
    assert "no answer has a grade: every grader failed" in error("fails", rl=rl)
    hangs = r"hangs.py: task\(1, 0\): no answer within 1 s: killed; make it faster, or set rollout.reply_timeout_s"
    assert re.search(hangs, error("hangs", rl=rl, rollout={"reply_timeout_s": 1.0}))
    assert re.search(r"raises.py: task\(1, 0\) fails: IndexError: list index out of range; it must", error("raises"))


def test_a_run_whose_answers_are_all_cut_off_ends_and_says_so(pool, start, tmp_path):
    for exact in (True, False):
        how = {"rl": {"overlong": "mask"}, "rollout": {"turns": 1, "max_tokens": 2}, "steps": 2, "lag": 0}
        job = reinforced.job(tmp_path / f"exact={exact}", start, exact=exact, **how)
        with pytest.raises(RankError) as raised:
            pool.run(1, reinforced.run, job)
        assert (
            "all answers of the last 2 steps were cut off (rollout.max_tokens = 2, data.sequence_tokens = 96), and "
            "rl.overlong = 'mask' leaves them out of the loss: nothing was learnt. Set rollout.max_tokens higher"
        ) in str(raised.value)


IMPURE = (
    "import itertools\nn = itertools.count()\n\ndef task(index, seed):\n    return Task(prompt=f'to be {next(n)}')\n"
)


def test_what_cannot_begin_is_refused(start, tmp_path):
    (start / "impure.py").write_text(reinforced.ENVIRONMENT + IMPURE)

    def refused(text, error=ConfigError, **more):
        with pytest.raises(error, match=text):
            reinforced.job(tmp_path / "run", start, **more)

    refused("rl.group = 1: the answers of a group are compared with each other", rl={"group": 1})
    refused("rl.lag = -1 must be at least 0", lag=-1)
    refused("rollout.ranks = 2 with rollout.placement = 'shared': the ranks that train sample", rollout={"ranks": 2})
    apart = {"placement": "apart", "tp": 2}
    refused("rollout.tp = 2 does not divide rollout.ranks = 3; set", rollout=apart | {"ranks": 3})
    window = {"window": 1}
    refused("rl.window = 1 with numerics.exact = true", rl=window, rollout={"placement": "apart"})
    refused("rl.window = 1 is more than rl.lag = 0", rl=window, lag=0, exact=False, rollout={"placement": "apart"})
    refused("rl.window = 1 with rollout.placement = 'shared'", rl=window, exact=False)
    refused("rollout.ranks = 0 must be at least 1", rollout=apart | {"ranks": 0})
    refused("rl.rows = 0 must be at least 1", rl={"rows": 0})
    refused(r"impure.py: task\(0, 0\) gives another task when it is asked again", environment="impure.py")
    refused("not a Python file; name one that has task", environment="nothing.py")
    (start / "empty.py").write_text("")
    refused(r"empty.py has no function 'task\(index, seed\)'", environment="empty.py")
    with pytest.raises(StateError, match=r"has no config.json; name a run, a checkpoint"):
        reinforced.job(tmp_path / "run", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "plan"),
    [({}, {"dp": 2}), ({"tp": 2}, {"tp": 2}), ({}, {"pp": 2}), ({"tp": 2}, {"pp": 2})],
    ids=["dp, tp 1", "tp, tp 2", "pp, tp 1", "pp, tp 2"],
)
def test_a_hundred_thousand_tokens_have_no_differing_bit(pool, start, tmp_path, rollout, plan):
    """The sampler's log-probabilities against those of the step that trains on them."""
    how = {"max_tokens": 100, "turns": 2, "pages": 1024} | rollout
    job = reinforced.job(
        tmp_path / "run", start, steps=1, lag=0, tokens=256, rl={"group": 16, "groups": 16}, rollout=how, **plan
    )
    (told,) = pool.run(2, reinforced.run, job, timeout_s=480.0)[0]
    assert told["max_dlogp"] == 0.0
    assert told["drawn_tokens"] > 100_000 / 4  # four layouts


@pytest.mark.parametrize(
    ("rl", "exact"),
    [
        ({"estimator": "rloo", "kl_coef": 0.1, "drop_uniform": True}, True),
        pytest.param({"ratio": "sequence", "estimator": "dr-grpo"}, True, marks=pytest.mark.long),
        pytest.param({"correction": "tis", "overlong": "penalty"}, False, marks=pytest.mark.long),
        ({"ratio": "sequence", "correction": "mis"}, False),
    ],
    ids=["rloo and kl", "gspo", "tis", "gspo and mis"],
)
def test_every_way_of_learning_runs_and_tells_how_far_the_sampler_is(pool, start, tmp_path, rl, exact):
    job = reinforced.job(tmp_path / "run", start, steps=2, exact=exact, rl=rl)
    told = pool.run(1, reinforced.run, job)[0]
    assert [each["step"] for each in told] == [1, 2]
    assert all(0 < each["norm"] < 1e3 for each in told)
    if rl.get("kl_coef"):
        # The weights that it began with, at the first step; others at the second.
        assert told[0]["measures"]["reference_kl"] == 0.0
        assert told[1]["measures"]["reference_kl"] > 0.0
    if not exact and rl.get("ratio") != "sequence":
        assert 0 < told[0]["measures"]["max_sampler_dlogp"] < 1e-4
        assert told[0]["max_dlogp"] < 1e-4


@pytest.mark.parametrize(
    ("ranks", "tp"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.long)], ids=["alone", "sharing a model"]
)
def test_a_slow_replica_is_waited_for_beyond_the_limit_of_a_collective(pool, start, tmp_path, ranks, tp):
    job = reinforced.job(tmp_path, start, steps=1, rollout={"tp": tp}, dp=2, tp=tp)
    told, *_ = pool.run(ranks, reinforced.uneven, job, 3.0, 1.0)
    assert [each["step"] for each in told] == [1]


def test_a_replica_that_does_not_go_on_ends_the_run_at_the_limit_of_a_collective(pool, start, tmp_path):
    job = reinforced.job(tmp_path, start, steps=1, dp=2)
    began_s = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0.*\n[^$]*Timed out"):
        pool.run(2, reinforced.uneven, job, 1.0, HANGS_S)
    assert time.monotonic() - began_s < HANGS_S
