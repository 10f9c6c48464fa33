"""superstep view: predicted steps, recorded steps, and what it says where there is nothing to see."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

import told_runs
from plans import SCHEDULES, plan_of, plans
from predicted_runs import MEASURED, keep_predicted_from
from superstep.cli.main import main
from superstep.cli.view import plan_view, step_page
from superstep.cost.program.time.predict import MachineRates, predict
from superstep.cost.program.time.prediction_file import read_predicted_from
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.errors import StateError
from superstep.observe.number_format import seconds_text
from superstep.observe.page.bundle_html import unpack
from superstep.observe.trace import load_trace
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.instructions import Recv, Send
from superstep.program.text import read_program, write_program
from superstep.run.reports.prediction import foretold
from superstep.train.weights.model import operations

MACHINE = MachineRates(gemm_flops_per_s=1e11, memory_bytes_per_s=2e10, link_bytes_per_s=1e9, link_latency_s=1e-4)
"""What a measurement finds now."""
CONFIG = RunConfig(
    model=ModelConfig(name="tiny"), train=TrainConfig(batch_sequences=4), plan=PlanConfig(pp=2, microbatch=1)
)


@pytest.fixture(autouse=True)
def _machine(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_view, "measure", lambda run, device, operations: MACHINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(write_config(CONFIG), encoding="utf-8")
    return path


def traced(timeline, *, start_s=1000.0, slower=1.0):
    """A timeline as the file that a run writes."""
    ranks = [
        [[e.index, start_s + slower * e.start_s, start_s + slower * e.end_s] for e in timeline.of(rank)]
        for rank in range(timeline.program.pp)
    ]
    return json.dumps({"step": 20, "ranks": ranks})


def predicted_before(folder, *, is_weighed=False):
    """What the event of a run's start tells of the prediction; ``view`` is to find the same."""
    run = resolve(CONFIG)
    keep_predicted_from(folder, run, is_weighed=is_weighed)
    prediction = predict(run, MEASURED, operations(run), is_weighed=is_weighed)
    parts = foretold(run, operations(run), prediction)
    return {"predicted_step_s": prediction.step_s, "predicted_spent_s": dict(parts.spent_s)}


@pytest.fixture
def run_folder(tmp_path):
    """A run whose recorded step took twice the predicted seconds."""
    run = resolve(CONFIG)
    timeline = predict(run, MEASURED, operations(run)).timeline
    folder = tmp_path / "run"
    folder.mkdir()
    keep_predicted_from(folder, run)
    (folder / "run.toml").write_text(write_config(run.config), encoding="utf-8")
    (folder / "program.txt").write_text(write_program(timeline.program), encoding="utf-8")
    (folder / "trace.json").write_text(traced(timeline, slower=2.0), encoding="utf-8")
    return folder


def test_without_a_file_the_demo_is_drawn(capsys):
    assert main(["view"]) == 0
    out = capsys.readouterr().out
    assert "predicted for this machine: 100 GFLOP/s in products, 20 GB/s of memory, 1 GB/s between ranks" in out
    assert " rank 0 │" in out
    assert " rank 1 │" not in out
    assert "step " in out
    assert "\x1b" not in out


def test_a_file_is_resolved_compiled_and_simulated(toml, capsys):
    assert main(["view", str(toml), "--text", "--width", "90"]) == 0
    out = capsys.readouterr().out
    run = resolve(CONFIG)
    prediction = predict(run, MACHINE, operations(run))
    assert f"step {prediction.step_s * 1e3:.4g} ms" in out
    rows = [line for line in out.splitlines() if "│" in line]
    assert [row[:9] for row in rows] == [" rank 0 │", " rank 1 │"]
    assert max(len(row) for row in rows) == 90


def test_fields_are_flags(toml, capsys):
    assert main(["view", str(toml), "--plan.pp", "1", "--width", "60"]) == 0
    assert " rank 1 │" not in capsys.readouterr().out
    assert main(["view", "--plan.dp", "1", "--plan.pp=4"]) == 0
    assert " rank 3 │" in capsys.readouterr().out


def test_memory_is_drawn_on_demand(toml, run_folder, capsys):
    assert main(["view", str(toml), "--memory", "--width", "100"]) == 0
    out = capsys.readouterr().out
    assert "rank 1  parameters" in out
    assert "rank 1  kept activations" in out
    assert main(["view", str(run_folder), "--memory"]) == 2
    assert "run.toml --memory" in capsys.readouterr().err


def test_the_program_is_printed_on_demand(toml, run_folder, capsys):
    expected = compile_step(resolve(CONFIG).plan)
    for target in (toml, run_folder):
        assert main(["view", str(target), "--program"]) == 0
        assert read_program(capsys.readouterr().out) == expected


def test_a_run_shows_its_step_and_the_predicted_one_on_one_scale(run_folder, capsys):
    assert main(["view", str(run_folder), "--width", "120"]) == 0
    out = capsys.readouterr().out
    ran, predicted = out.split("predicted when the run began")
    assert f"step 20 of {run_folder}, as it ran" in ran
    run = resolve(CONFIG)
    step_ms = predict(run, MEASURED, operations(run)).step_s * 1e3
    assert f"step {2 * step_ms:.4g} ms" in ran
    assert f"step {step_ms:.4g} ms" in predicted
    widest = [max(len(line) for line in text.splitlines() if "│" in line) for text in (ran, predicted)]
    # Half of 111 columns, which the last bits of a time round up or down.
    assert widest in ([120, 9 + 55], [120, 9 + 56])


def data_of(path):
    """What the script of a page is given."""
    page = path.read_text(encoding="utf-8")
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def test_a_page_of_the_plan_and_of_those_beside_it_is_written(toml, tmp_path, capsys):
    assert main(["view", str(toml), "--plan.dp", "2", "--model.layers", "3"]) == 0
    assert capsys.readouterr().out.endswith("the step as a page that plays it: run.step.html\n")
    data = data_of(tmp_path / "run.step.html")
    options = {(one["schedule"], one["zero"]): one for one in data["options"]}
    assert list(options) == [(schedule, zero) for schedule in SCHEDULES for zero in range(4)]
    chosen = data["options"][data["chosen"]]
    assert (chosen["schedule"], chosen["zero"]) == ("1f1b", 0)
    run = resolve(replace(CONFIG, plan=replace(CONFIG.plan, dp=2), model=replace(CONFIG.model, layers=3)))
    step = unpack(chosen["program"])
    assert step["predicted"]["step_ns"] == round(predict(run, MACHINE, operations(run)).timeline.step_s * 1e9)
    for (schedule, zero), one in options.items():
        assert (one["program"] is None) == bool(one["why"])
        if one["program"]:
            step = unpack(one["program"])
            assert (step["schedule"], step["zero"], step["mesh"]["dp"]) == (schedule, zero, 2)
    assert options["zb-h1", 3]["program"]
    # Two stages a rank would be four of three blocks.
    assert "need at least as many blocks" in options["interleaved", 0]["why"]
    assert main(["view", str(toml), "--text"]) == 0
    assert "page" not in capsys.readouterr().out


def test_plans_beside_it_are_left_out_where_the_page_would_be_large(toml, tmp_path, monkeypatch):
    monkeypatch.setattr(step_page, "MOST_INSTRUCTIONS", 400)
    assert main(["view", str(toml), "--model.layers", "4", "--out", "some/where.html"]) == 0
    data = data_of(tmp_path / "some" / "where.html")
    left_out = [one["why"] for one in data["options"] if not one["program"]]
    assert left_out
    assert len(left_out) < len(data["options"]) - 1
    assert all("left out to keep the page small; --plan.schedule" in why for why in left_out)


def write_metrics(folder, predicted):
    started, *lines = told_runs.lines(steps=50)
    text = "\n".join(map(json.dumps, [started | predicted, *lines]))
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("is_weighed", [False, True])
def test_a_run_has_one_prediction_wherever_it_is_shown(run_folder, is_weighed, capsys):
    """The machine is faster now than when the run began; parts add up to the one figure."""
    predicted = predicted_before(run_folder, is_weighed=is_weighed)
    step_s, parts = predicted["predicted_step_s"], predicted["predicted_spent_s"]
    assert sum(parts.values()) == pytest.approx(step_s)
    assert ("log-probabilities" in parts) == is_weighed
    write_metrics(run_folder, predicted)
    assert main(["view", str(run_folder)]) == 0
    out = capsys.readouterr().out
    within_s = step_s - parts.get("log-probabilities", 0.0)
    assert f"predicted {seconds_text(within_s)}" in out
    assert f"step {within_s * 1e3:.4g} ms" in out.split("predicted when the run began")[1]
    if is_weighed:
        assert f"(and {seconds_text(parts['log-probabilities'])} for log-probabilities before it)" in out
    (told,) = unpack(data_of(run_folder / "report.html")["runs"])["runs"]
    assert told["spent"]["predicted"] == parts
    assert told["started"]["predicted_step_s"] == step_s
    rows = {what: (predicted, measured) for what, predicted, measured, unit in told["ledger"] if unit == "s"}
    assert rows["a step"][0] == rows["the recorded step"][0] == step_s
    for column in (0, 1):
        of_parts = [row[column] for what, row in rows.items() if what.startswith(" ")]
        assert sum(one for one in of_parts if one is not None) == pytest.approx(rows["the recorded step"][column])
    data = data_of(run_folder / "step.html")
    step = unpack(data["options"][data["chosen"]]["program"])
    assert step["predicted"]["step_ns"] == round(within_s * 1e9)


def test_a_run_without_a_prediction_shows_its_recorded_step_alone(run_folder, capsys):
    (run_folder / "prediction.toml").unlink()
    assert main(["view", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert f"step 20 of {run_folder}, as it ran" in out
    assert "predicted" not in out
    assert "has no prediction (prediction.toml)" in refused([run_folder, "--out", "a.html"], capsys)


def test_what_a_run_was_predicted_from_is_read_back_as_it_was(run_folder):
    given = keep_predicted_from(run_folder, resolve(CONFIG))
    assert read_predicted_from(run_folder / "prediction.toml") == given


def test_the_page_of_a_run_has_both_steps(run_folder, capsys):
    write_metrics(run_folder, predicted_before(run_folder))
    assert main(["view", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert f"the step as a page that plays it: {run_folder / 'step.html'}" in out
    assert f"the report of the run: {run_folder / 'report.html'}" in out
    (told,) = unpack(data_of(run_folder / "report.html")["runs"])["runs"]
    assert told["step"] == list(range(1, 51))
    assert sum(told["spent"]["ran"].values()) == pytest.approx(2 * sum(told["spent"]["predicted"].values()))
    data = data_of(run_folder / "step.html")
    step = unpack(data["options"][data["chosen"]]["program"])
    assert step["measured"]["step"] == 20
    assert step["measured"]["step_ns"] == pytest.approx(2 * step["predicted"]["step_ns"])
    assert step["measured"]["ranks"][1]["took"] != step["predicted"]["ranks"][1]["took"]


def test_the_end_of_a_name_says_what_is_written(run_folder, tmp_path, capsys):
    assert main(["view", str(run_folder), "--out", "step.svg"]) == 0
    assert "the step as a drawing: step.svg" in capsys.readouterr().out
    drawn = (tmp_path / "step.svg").read_text(encoding="utf-8")
    assert drawn.index("step 20 as it ran") < drawn.index("predicted: ")
    assert main(["view", str(run_folder), "--out", "step.json"]) == 0
    trace = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["traceEvents"]
    program = compile_step(resolve(CONFIG).plan)
    assert sum(one["ph"] == "X" for one in trace) == 2 * sum(map(len, program.ranks))
    assert any(one["ph"] == "C" for one in trace)
    assert not (run_folder / "step.html").exists()


def test_a_page_is_opened_on_demand(toml, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["view", str(toml), "--open"]) == 0
    assert opened == [(tmp_path / "run.step.html").as_uri()]


def test_where_no_page_can_be_written_the_text_is_all_there_is(toml, tmp_path, capsys):
    (tmp_path / "run.step.html").mkdir()
    assert main(["view", str(toml)]) == 0
    assert "no page: run.step.html cannot be written; --out names another file" in capsys.readouterr().out
    assert main(["view", str(toml), "--out", "run.step.html"]) == 1
    assert "run.step.html cannot be written: Is a directory" in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused(toml, capsys):
    assert "--out = 'step.gif' must end in one of .html, .svg, .json" in refused([toml, "--out", "step.gif"], capsys)
    assert "--program prints and writes no file" in refused([toml, "--program", "--out", "a.html"], capsys)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=str
)
def test_a_terminal_gets_colour_unless_it_asks_for_none(monkeypatch, toml, environment, is_coloured):
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["view", str(toml)]) == 0
    assert ("\x1b[" in screen.getvalue()) == is_coloured


def refused(argv, capsys):
    assert main(["view", *map(str, argv)]) == 2
    return capsys.readouterr().err


def test_what_is_not_there_is_named_with_the_mend(tmp_path, capsys):
    error = refused([tmp_path / "no"], capsys)
    assert "no' is not there; name a run.toml or the folder of a run" in error


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert "is not a run directory: it lacks run.toml or program.txt" in refused([tmp_path], capsys)


def test_a_run_without_a_trace_says_when_there_will_be_one(run_folder, capsys):
    (run_folder / "trace.json").unlink()
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, told_runs.lines(steps=50))), encoding="utf-8")
    error = refused([run_folder], capsys)
    assert "has no trace yet: the run writes one with each checkpoint" in error
    assert f"superstep trace {run_folder} while it trains" in error
    assert (run_folder / "report.html").is_file(), "its curves are there all the same"
    assert f"superstep view {run_folder / 'run.toml'} shows the predicted step" in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no trace"),
        ('{"step": 3}', "is no trace"),
        ('{"step": 3, "ranks": [[[0, 1]], []]}', "is no trace"),
        ('{"step": 3, "ranks": [[[0, 1.0, 2.0]], []]}', "is the trace of another program"),
    ],
)
def test_a_broken_trace_is_refused(run_folder, text, words, capsys):
    (run_folder / "trace.json").write_text(text, encoding="utf-8")
    assert words in refused([run_folder], capsys)


def test_a_damaged_program_is_refused(run_folder, capsys):
    (run_folder / "program.txt").write_text("rank 0\n", encoding="utf-8")
    assert "program.txt cannot be read" in refused([run_folder], capsys)


def test_a_runs_plan_cannot_be_changed_by_a_flag(run_folder, capsys):
    assert "--plan.pp: a run's step is shown as it ran" in refused([run_folder, "--plan.pp", "4"], capsys)


def test_a_wrong_flag_is_refused(toml, capsys):
    assert "unknown flag --wide" in refused([toml, "--wide"], capsys)
    assert "--width = 'broad' is not valid; it must be a whole number." in refused([toml, "--width", "broad"], capsys)


# Traces.


def timeline_of(plan, **seconds):
    program = compile_step(plan)
    unit = UnitSeconds(**{"forward_s": 1.0, "backward_s": 2.0} | seconds)
    return simulate(program, PerUnit(units=(unit,) * len(program.units), step_s=0.5, reduce_partial_s=0.25))


@settings(max_examples=25)
@given(plans())
def test_a_trace_without_waits_in_it_is_read_back_as_it_was(tmp_path_factory, plan):
    timeline = timeline_of(plan, recompute_s=1.0, fetch_s=0.5, reduce_s=0.25, transfer_s=0.125, tie_s=0.5)
    path = tmp_path_factory.getbasetemp() / "trace.json"
    path.write_text(traced(timeline, start_s=0.0), encoding="utf-8")
    assert load_trace(path, timeline.program).timeline == timeline


@settings(max_examples=25)
@given(plans(dp=1))
def test_waits_that_a_rank_records_as_compute_are_found(tmp_path_factory, plan):
    """A rank comes to its next instruction when the last is done, and notes that as the start."""
    timeline = timeline_of(plan)
    ranks = []
    for rank in range(plan.mesh.pp):
        clock_s, noted = 0.0, []
        for e in timeline.of(rank):
            if isinstance(e.instruction, Send | Recv):
                noted.append([e.index, clock_s, clock_s])
            else:
                noted.append([e.index, clock_s, e.end_s])
                clock_s = e.end_s
        ranks.append(noted)
    path = tmp_path_factory.getbasetemp() / "trace.json"
    path.write_text(json.dumps({"step": 1, "ranks": ranks}), encoding="utf-8")
    found = load_trace(path, timeline.program).timeline
    assert [s.busy_s for s in found.measure_uses()] == pytest.approx([s.busy_s for s in timeline.measure_uses()])
    assert found.bubble() == pytest.approx(timeline.bubble())


def test_a_missing_trace_is_a_state_error(tmp_path):
    with pytest.raises(StateError, match="cannot be read: No such file"):
        load_trace(tmp_path / "trace.json", compile_step(plan_of()))


def kernels(capsys, *flags):
    """Layer and implementations, from the table that is printed; of the blocks all alike."""
    assert main(["view", "--kernels", *flags]) == 0
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:]]
    return [(row[1], row[-2]) for row in rows if len(row) == 5]


def test_what_each_layer_computes_with_is_listed(capsys):
    found = kernels(capsys, "--plan.dp=1", "--plan.tp=2", "--plan.sequence-parallel=true", "--numerics.kernels=torch")
    assert ("embed_tokens", "looks up its own rows, output leaves tp") in found
    down = [name for layer, name in found if layer == "mlp.down_proj"]
    assert down == ["gradient straight into the buffer", "output leaves tp"]
    assert not any("norm in" in name for _, name in found)
    assert [name for layer, name in found if layer == "lm_head"] == ["product left to the loss", "input enters tp"]


def test_exact_mode_is_listed(capsys):
    found = kernels(capsys, "--numerics.exact=true", "--plan.dp=1", "--plan.tp=2")
    assert ("self_attn.q_proj", "exact sums") in found
    assert not any(name == "gradient straight into the buffer" for _, name in found)


def test_kernels_of_a_runs_folder_are_those_of_its_plan(run_folder, capsys):
    assert main(["view", str(run_folder), "--kernels"]) == 2
    assert "run.toml --kernels" in capsys.readouterr().err
