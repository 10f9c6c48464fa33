"""Groups are answered by the engine, the same wherever a run is cut, and kept line by line."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import model_folder
from superstep.errors import ConfigError, StateError
from superstep.grade.environment import load_environment
from superstep.grade.task import Message, Task
from superstep.grade.verdict import grader_error, ok, wrong
from superstep.numerics.policy import PolicyLoss
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig
from superstep.serve.scheduling.request import TokenOutput
from superstep.tune.program.instructions import Cursor, RlSchedule
from superstep.tune.rl.config import RlConfig, RolloutConfig, check_rl
from superstep.tune.rl.rl_step import policy_loss
from superstep.tune.rl.rollout import Episode
from superstep.tune.rl.rollout_log import NAME, RolloutLog
from superstep.tune.rl.sampling import Part, RolloutSampler, require_vocab, seed_of, words_of

TALKS = """
from superstep.grade.task import Done, Message, Observation, Task

def task(index, seed):
    return Task(prompt=f"task {index} of {seed}", answer=index)

def reply(task, turns):
    if task.answer == 2:
        return Done(violation="it ends the process")
    return Observation((Message("user", f"turn {len(turns)}"),)) if task.answer % 2 else Done()

def grade(task, rollout):
    return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder.write_folder(tmp_path_factory.mktemp("model"), layers=2, width=32, heads=4, kv_heads=2, ffn=64)


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "talks.py").write_text(TALKS)
    return load_environment(tmp_path / "talks.py")


@pytest.fixture(scope="module")
def words(folder):
    found = words_of(folder)
    yield found
    found.template.close()


@pytest.fixture
def sampler(folder, environment, words):
    threads = torch.get_num_threads()
    engine = open_engine(folder, ServeConfig(context_tokens=160, compute="fp32", exact=True, pages=24))
    how = RolloutConfig(max_tokens=6, turns=3)
    yield RolloutSampler(engine, words, environment, how, group=3, seed=5)
    engine.end()
    torch.set_num_threads(threads)


def sampled(sampler, environment, numbers):
    tasks = [(number, environment.task(number, 5)) for number in numbers]
    return {group.number: group for group in sampler.sample(tasks, version=0)}


def test_a_group_is_the_same_whatever_it_is_sampled_beside(sampler, environment, tmp_path):
    together = sampled(sampler, environment, [0, 1, 2, 3])
    assert sorted(together) == [0, 1, 2, 3]
    # Exact mode: cached pages, other requests, fewer pages; no bit of an answer changes.
    assert sampled(sampler, environment, [1]) == {1: together[1]}
    assert sampled(sampler, environment, [3, 0]) == {3: together[3], 0: together[0]}
    one = together[1]
    assert len(one.answers) == 3
    assert len({answer.strands[0].tokens for answer in one.answers}) == 3
    turns = {len([turn for turn in answer.rollout.turns if turn.role == "assistant"]) for answer in one.answers}
    assert turns <= {1, 2, 3}
    assert all(len(answer.rollout.turns) == 1 for answer in together[0].answers)
    for answer in one.answers:
        for strand in answer.strands:
            assert len(strand.drawn) == len(strand.logprobs)
            assert all(logprob <= 0 for logprob in strand.logprobs)

    violating = replace(one.answers[0], rollout=replace(one.answers[0].rollout, violation="it ends the process"))
    together[1] = replace(one, answers=(violating, *one.answers[1:]))
    record = RolloutLog(tmp_path / NAME)
    for group in together.values():
        record.keep_answers(group)
    record.record_grades(0, (ok(0.5), wrong("no"), grader_error("?")))
    for name in ("weights-0", "weights-unnoted", ".unfinished-x"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    record.publish(0, tmp_path / "weights" / "weights-0")
    record.publish(1, tmp_path / "weights" / "weights-gone")
    record.tidy()
    record.close()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["weights-0"]
    again = RolloutLog(tmp_path / NAME, is_kept=False)
    # The floats are those that were told, to the bit.
    assert (again.groups, again.verdicts) == (together, {0: (ok(0.5), wrong("no"), grader_error("?"))})
    asked = RlSchedule(steps=3, groups=2)
    assert again.cursor(asked, 1) == Cursor(step=1, recorded=frozenset({2, 3}), published=frozenset({0}))
    again.retire(0)
    again.forget(range(2, 4))
    assert again.cursor(asked, 1) == Cursor(step=1)


def test_turns_that_are_a_violation_are_the_last(sampler, environment, words):
    """What ``reply`` finds of them goes into the rollout, which graders are given."""
    messages = (Message("user", "task"),)
    talk = Episode(messages, words.encoder, words.decoder, ())
    talk.answer([TokenOutput(token=5, drawn_logprob=-1.0, logprob=-1.0)], "stop")
    assert not sampler._goes_on(Part(0, 0, environment.task(2, 5)), talk, "stop")
    assert talk.with_answer().rollout.violation == "it ends the process"


def test_a_record_whose_last_line_is_torn_has_the_others(tmp_path):
    path = tmp_path / NAME
    record = RolloutLog(path)
    record.record_grades(0, (ok(),))
    record.record_grades(1, (wrong(),))
    record.close()
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        record = RolloutLog(path)
        assert len(record.verdicts) == whole[:end].count(b"\n")
        record.record_grades(2, (ok(),))
        record.close()
        assert 2 in RolloutLog(path, is_kept=False).verdicts
    path.write_bytes(whole + b'{"group": 2}\n' + whole)
    with pytest.raises(StateError, match=r"rollouts.jsonl is damaged in line 3"):
        RolloutLog(path)


def test_seeds_differ_by_group_answer_and_turn():
    seeds = [seed_of(0, group, member, turn) for group in range(5) for member in range(5) for turn in range(3)]
    assert len({*seeds, seed_of(1, 0, 0, 0)}) == len(seeds) + 1


def test_what_cannot_be_asked_is_named(sampler, environment, words, folder):
    long = Task(prompt="word " * 200)
    with pytest.raises(ConfigError, match=r"talks.py: task 7: prompt has \d+ tokens, and the context has room for 160"):
        list(sampler.sample([(7, long)], version=0))
    # Nobody is left in the engine, which answers others.
    assert sorted(sampled(sampler, environment, [2])) == [2]
    with pytest.raises(ConfigError, match=r"the tokenizer has \d+ ids and the model 100; start from a folder whose"):
        require_vocab(words, 100, folder)


@pytest.mark.parametrize(
    ("rl", "rollout", "error"),
    [
        ({"environment": ""}, {}, "rl.environment is empty; name a Python file"),
        ({"group": 1}, {}, "rl.group = 1: the answers of a group are compared with each other; set it to 2 or more"),
        ({"lag": -1}, {}, "rl.lag = -1 must be at least 0"),
        ({"groups": 0}, {}, "rl.groups = 0 must be at least 1"),
        ({"surrogate": "score", "ratio": "sequence"}, {}, "rl.surrogate = 'score' with rl.ratio = 'sequence'"),
        ({"clip_low": 0.0}, {}, "rl.clip_low = 0.0 must be above 0 and at most 1"),
        ({"clip_high": float("nan")}, {}, "rl.clip_high = nan must be above 0"),
        ({"kl_coef": -1.0}, {}, "rl.kl_coef = -1.0 must be 0 or more"),
        ({}, {"temperature": 0.0}, "rollout.temperature = 0.0 must be above 0"),
        ({}, {"turns": 0}, "rollout.turns = 0 must be at least 1"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(rl, rollout, error):
    check_rl(RlConfig(environment="tasks.py"), RolloutConfig())
    with pytest.raises(ConfigError, match=re.escape(error)):
        check_rl(RlConfig(**({"environment": "tasks.py"} | rl)), RolloutConfig(**rollout))


def test_the_loss_of_a_recipe_is_that_of_its_fields():
    rl = RlConfig(surrogate="ratio", clip_low=0.1, clip_high=0.3, correction="tis", kl_coef=0.5)
    assert policy_loss(rl, is_exact=False, is_fresh=True) == PolicyLoss(
        surrogate="ratio",
        clip_low=0.1,
        clip_high=0.3,
        correction="tis",
        watches_sampler=True,
        kl_coef=0.5,
        is_fresh=True,
    )
    assert policy_loss(RlConfig(), is_exact=True, is_fresh=True) == PolicyLoss()
