"""superstep view of a run of tune rl: rollouts, grades and steps on one timeline, from what the run recorded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.cli.main import main
from superstep.grade.task import answer_rollout
from superstep.grade.verdict import Verdict
from superstep.observe.drawing.lanes import PAUSE_S, Clock, Lane, LaneItem, draw_lanes, length, merge
from superstep.observe.events import Retried, RolloutStats, Saved, StepDone
from superstep.observe.jsonl import JsonLines
from superstep.tune.recipe import write
from superstep.tune.rl import rollout_log as records
from superstep.tune.rl.config import RlConfig, RlRecipe
from superstep.tune.rl.history import read_history
from superstep.tune.rl.rollout import Strand, TaskAnswer
from superstep.tune.rl.rollout_log import NAME, RolloutLog
from superstep.tune.rl.sampling import TaskGroup

T = 1_789_000_000.0
"""When the run began."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Three steps of two groups, lag 1; an hour lies between the second and the third, in which nobody ran it."""
    monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda: T))
    root = tmp_path / "run"
    root.mkdir()
    recipe = RlRecipe(rl=RlConfig(environment="tasks.py", group=2, groups=2, lag=1))
    (root / "recipe.toml").write_text(write(recipe))
    record, metrics = RolloutLog(root / NAME), JsonLines(root / "metrics.jsonl")
    answer = TaskAnswer(
        strands=(Strand(tokens=(1, 2), spans=((1, 2),), logprobs=(-1.0,)),), rollout=answer_rollout("a")
    )

    def sampled(group, version, begin_s, end_s, graded_s):
        answers = (answer, answer)
        span = (T + begin_s, T + end_s)
        record.keep_answers(TaskGroup(number=group, version=version, answers=answers, drawn_s=span))
        took = (T + end_s, T + graded_s)
        record.record_grades(group, (Verdict("ok", 0.5, "", took), Verdict("wrong", 0.0, "", took)))

    def trained(step, at_s, seconds, lag, saved_s=0.0):
        numbers = {"lr": 0.1, "grad_norm": 1.0, "tokens": 4, "tokens_per_s": 1.0, "data_s": 0.0, "mfu": None}
        times = {"step_s": seconds, "memory_bytes": 1, "elapsed_s": at_s, "tokens_seen": 4}
        metrics.write(StepDone(step=step, loss=0.25 * step, **numbers, **times))
        lost = int(step == 2)
        seen = {"reward": 0.25, "answers": 4 - lost, "lost": lost, "cut": 0, "uniform": 0, "drawn_tokens": 4}
        metrics.write(RolloutStats(step=step, lag=lag, seconds=seconds, measures={}, at_s=T + at_s, **seen))
        if saved_s:
            metrics.write(Saved(step=step, path="", seconds=saved_s, bytes=1))

    record.publish(0, root / "w0")
    for group in range(4):
        sampled(group, 0, 0.0, 4.0 + group, 8.0)
    trained(1, 10.0, 10.0, 0)
    metrics.write(Retried(step=1, why="its process 7 was stopped (SIGSTOP) and did not go on: killed"))
    trained(2, 12.0, 2.0, 1, saved_s=2.0)
    for group in (4, 5):
        sampled(group, 2, 3614.0, 3616.0, 3618.0)
    trained(3, 3620.0, 6.0, 0)
    record.close()
    metrics.close()
    return root


PICTURE = """\
publish |^                                  :
sample  |v0::::::::::::::::                 v2::::
grade   |          ...........              :    ......
train   |                    1####2#####    :         3####
save    |                              ======
        +-----------------------------------+--------------
         0                                             20 s

20 s: sampling 45%, training 30%, saving 10%, grading 30%, 3 s of it while nothing else ran
1 graded again; the last reason: its process 7 was stopped (SIGSTOP) and did not go on: killed

step  version  lag  answers  reward    loss  sampled  graded  trained
   1       v0    0        4  0.2500  0.2500      5 s     4 s      2 s
   2       v0    1   3 of 4  0.2500  0.5000      7 s     2 s      2 s
   3       v2    0        4  0.2500  0.7500      2 s     2 s      2 s
"""


def test_three_steps_and_a_pause(run, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["view", str(run), "--width", "60", "--text"]) == 0
    plain = capsys.readouterr().out
    title, _, picture = plain.split("\n", 2)
    assert title == (
        f"{run}: 3 of {RlRecipe().train.steps} steps, each on 2 groups of 2 answers, lag 1, placement shared; "
        "6 groups drawn by 2 versions"
    )
    assert picture == PICTURE
    monkeypatch.delenv("NO_COLOR")
    with (run / NAME).open("ab") as file:
        file.write(b'{"group": 6, "ver')  # it is being written
    assert main(["view", str(run), "--width", "60", "--text"]) == 0
    signs = str.maketrans("▲▒░▓█┊│└─┴", "^:.#=:|+-+")
    assert capsys.readouterr().out.translate(signs) == plain
    assert (run / NAME).read_bytes().endswith(b'"ver'), "who looks changes nothing"
    assert not (run / "report.html").exists()
    (run / "run.toml").touch()
    assert main(["view", str(run)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\nthe report of the run: {run / 'report.html'}\n")


def test_a_run_that_has_no_picture_says_why_in_one_line(run, capsys):
    def refused(text):
        assert main(["view", str(run)]) == 2
        said = capsys.readouterr().err
        assert text in said
        assert said.count("\n") == 1

    whole, told = (run / NAME).read_text(), (run / "metrics.jsonl").read_text()
    (run / NAME).write_text(whole.replace('{"grades":1,', '{"grade":1,'))
    refused("rollouts.jsonl is damaged in line 5 (ValueError('neither a group, grades nor a snapshot')); view a copy")
    (run / NAME).write_text(whole.replace('"group":2', '"group":2 2'))
    refused("rollouts.jsonl is damaged in line 6 (JSONDecodeError")
    (run / NAME).write_text(whole)
    (run / "metrics.jsonl").write_text(told.replace('"lag": 1', '"lagging": 1'))
    refused("metrics.jsonl is damaged in line 5 (KeyError('lag'))")
    (run / "metrics.jsonl").unlink()
    (run / NAME).write_text(
        "".join(f"{json.dumps({**json.loads(line), 'took_s': 0})}\n" for line in whole.splitlines())
    )
    refused("has nothing on record that has a time; ask again once its first groups have answers.")
    (run / "recipe.toml").unlink()
    refused("lacks recipe.toml, which describes its groups; name a run of tune rl.")


def test_what_began_before_a_step_was_asked_for_is_none_of_its_time(run):
    """A step that a later process does again begins with that process, whenever its groups were graded."""
    found = read_history(run / NAME, run / "metrics.jsonl", 2)
    assert [each.span for each in found.trained] == [(T + 8, T + 10), (T + 10, T + 12), (T + 3618, T + 3620)]
    with (run / NAME).open("a") as file:
        file.write('{"exchanged":[1,4]}\n')
    assert [read_history(run / NAME, run / "metrics.jsonl", 2).tasks_of(step, 2) for step in (1, 2, 3)] == [
        [0, 4],
        [2, 3],
        [1, 5],
    ]
    assert read_history(run / NAME, run / "metrics.jsonl", 3).trained[-1].span[0] == T + 3614


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda s: (float(s[0]), float(sum(s)))))


@given(SPANS)
def test_a_clock_leaves_out_pauses_and_nothing_else(spans):
    covered = {tick for begin, end in spans for tick in range(int(begin), int(end))}
    assert length(spans) == len(covered)
    assert merge(merge(spans)) == merge(spans)
    clock = Clock(spans)
    seen = [clock.at(at) for at in sorted({at for span in spans for at in span})]
    assert seen == sorted(seen)
    assert all(0.0 <= at <= clock.seconds for at in seen)
    assert all(clock.at(end) - clock.at(begin) == end - begin for begin, end in merge(spans))
    gaps = [later - end for (_, end), (later, _) in zip(merge(spans), merge(spans)[1:], strict=False)]
    longest_s = max(PAUSE_S, 0.1 * len(covered))
    assert len(clock.cuts) == sum(gap > longest_s for gap in gaps)
    assert clock.seconds == len(covered) + sum(gap for gap in gaps if gap <= longest_s)
    assert draw_lanes([Lane("a", [LaneItem(span) for span in spans], ("#", "#"))], width=40, seconds=str)
