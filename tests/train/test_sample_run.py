"""Runs on samples of a user's own file: trained, resumed, proven, and refused by name where a setting is of text."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import runs
from pictures import PICTURES, write_pictures
from superstep.cli.main import main
from superstep.cli.prove.faults import hurt_config
from superstep.errors import ConfigError
from superstep.plan.config import DataConfig, ModelConfig, ProposedData, ProposedRun, RunConfig
from superstep.plan.config_io import read_config
from superstep.train.proof.all_layouts import layouts
from superstep.tune.recipe import run_with

UNEVEN = """

class Uneven(nn.Linear):
    def forward(self, x):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return super().forward(x) * (1 + rank * 2**-20)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_pictures(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_counts_samples_and_goes_on_with_the_same_bits(here, capfd):
    assert main(["train", "run.toml", "--state.dir", "whole"]) == 0
    out = capfd.readouterr().out
    assert "samples/s" in out
    assert "72 samples seen" in out
    assert "accuracy" in out
    runs.resume_killed()
    (started, *_), steps = runs.events(Path("run"), "started"), runs.events(Path("run"), "step")
    assert started["counts"] == "samples"
    assert started["predicted_step_s"] > 0
    assert [step["tokens"] for step in steps[-3:]] == [12] * 3
    evaluated = runs.events(Path("run"), "evaluated")
    assert [round(12 * event["accuracy"], 6) % 1 for event in evaluated] == [0, 0]
    assert evaluated[0]["bits_per_byte"] is None


def test_a_run_does_not_go_on_with_other_samples(here, capfd):
    assert main(["train", "run.toml", "--train.steps", "3"]) == 0
    (here / "pictures.py").write_text(PICTURES.replace("/ 2\n", "/ 3\n"), encoding="utf-8")
    assert main(["train", "run.toml", "--state.existing", "resume"]) == 2
    assert "there the samples of data.source = " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--plan.cp 2 --plan.dp 1", "plan.cp = 2 shares each sequence of tokens"),
        ("--plan.tp 2 --plan.dp 1", "plan.sequence_parallel = true splits sequences of tokens over plan.tp = 2"),
        ("--data.document-mask true", "data.document_mask = true masks documents of text"),
        ("--data.tokenizer x.json", "data.tokenizer = 'x.json' makes tokens of text"),
        ("--data.corpus a.txt", "data.corpus = ['a.txt'] names text"),
        ("--data.text-field body", "data.text_field = 'body' is of text"),
        ("--data.nulls refuse", "data.nulls = 'refuse' is of text"),
        ("--data.sequence-tokens 64", "data.sequence_tokens = 64 cuts text into sequences"),
        ("--data.packed false", "data.packed = false packs documents of text"),
        ("--data.cache x", "data.cache = 'x' keeps token files"),
        ("--data.validation-fraction 0.1", "data.validation_fraction = 0.1 holds out documents of text"),
        ("--observe.sample hello", "observe.sample = 'hello' is a prompt of text"),
        ("--numerics.exact-chunks 2", "numerics.exact_chunks = 2 are parts of a sequence of tokens"),
        ("--data.source nothing.py", "data.source = 'nothing.py' is not a Python file"),
    ],
)
def test_a_setting_of_text_is_refused_by_name(here, capfd, flags, says):
    assert main(["train", "run.toml", *flags.split()]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("int(noise.integers(-1, 2))", "int(torch.randint(99999, ()))"),
            "gives another 'pixels' when it is read again",
        ),
        (
            ("nn.Linear(20, 10)", "nn.Unflatten(1, (4, 5))"),
            "gives [1, 4, 5] for one sample, and its target is int64 []",
        ),
        (('"target": classes[index]', '"target": classes[index].float()'), "the samples' target is float32 []"),
        (('"pixels": pixels', '"image": pixels[index], "pixels": pixels'), "name it in the file, as INPUT = 'pixels'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_any_rank_starts(here, capfd, change, says):
    text = PICTURES.replace(*change)
    assert text != PICTURES
    write_pictures(here, text)
    assert main(["train", "run.toml"]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_text_is_not_continued_by_a_model_of_samples(here, capfd):
    assert main(["train", "run.toml", "--train.steps", "1", "--plan.dp", "1"]) == 0
    assert main(["sample", "run", "hello"]) == 2
    assert "was trained on the samples of pictures.py" in capfd.readouterr().err


@pytest.mark.parametrize("flags", ["", "--plan.pp 2 --plan.dp 1 --plan.zero 0", "--plan.zero 3 --plan.recompute full"])
def test_a_layout_is_proven(here, capfd, flags):
    assert main(["prove", "run.toml", *flags.split()]) == 0
    out = capfd.readouterr().out
    assert re.search(r"stream +the same as plain code", out)
    assert re.search(r"restart +the same bits", out)


@pytest.mark.parametrize("flags", ["--plan.zero 3", "--plan.pp 2 --plan.dp 1 --plan.zero 0 --plan.schedule zb-h1"])
def test_convolutions_have_the_same_bits_on_every_layout(here, capfd, flags):
    assert main(["prove", "run.toml", "--exact", *flags.split()]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def test_an_update_that_depends_on_the_layout_is_seen(here, capfd):
    """A sum over the microbatch's rows in another order on each rank, as if exact mode did not know the layer."""
    text = PICTURES.replace("nn.Linear(20, 10),", "Uneven(20, 10),") + UNEVEN
    write_pictures(here, text)
    assert main(["prove", "run.toml", "--exact"]) == 1
    assert "NOT PROVEN" in capfd.readouterr().out


@pytest.mark.parametrize("number", [0, 1])
def test_the_files_of_the_page_train(here, number):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "own-data.md").read_text(encoding="utf-8")
    texts = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    write_pictures(here, texts[number])
    assert main(["train", "run.toml", "--train.steps", "40", "--train.eval-every", "40", "--train.lr", "1e-2"]) == 0
    (evaluated,) = runs.events(Path("run"), "evaluated")
    assert evaluated["accuracy"] == 1.0


def test_all_layouts_of_a_run_on_samples_are_proven(here):
    """Every schedule that four units allow, and the ZeRO stages that go with them."""
    config = read_config(Path("run.toml"))
    found = list(layouts(replace(config, numerics=replace(config.numerics, exact=True)), 2))
    assert {run.plan.zero for run in found} == {0, 1, 3}
    assert {run.plan.schedule for run in found if run.plan.mesh.pp == 2} >= {"1f1b", "zb-h1", "gpipe"}
    assert {run.plan.mesh.tp * run.plan.mesh.cp for run in found} == {1}


def test_a_run_with_faults_reads_the_same_samples(tmp_path):
    """Of a run on samples no field is set that has no meaning there."""
    config = hurt_config(RunConfig(data=DataConfig(source="pictures.py")), Path("pictures.py"), tmp_path)
    assert config.data == DataConfig(source=str(Path("pictures.py").resolve()))


def test_the_decoder_reads_no_samples(here, capfd):
    toml = Path("run.toml").read_text(encoding="utf-8")
    Path("run.toml").write_text(toml.replace('[model]\nsource = "pictures.py"\n', ""), encoding="utf-8")
    assert main(["train", "run.toml"]) == 2
    assert "model.name = 'demo': the decoder reads tokens of text; set model.source" in capfd.readouterr().err


def test_conversations_are_not_read_by_a_file_of_samples():
    with pytest.raises(ConfigError, match="superstep tune reads conversations; name their records by"):
        run_with(ProposedRun(data=ProposedData(source="mine.py")), ModelConfig(), None, 512)
