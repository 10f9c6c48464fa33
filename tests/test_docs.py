"""The pages say what is so: commands are accepted, drawings and tables are current, links and paths lead somewhere."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from digits import write_digits
from emoji import write_emoji
from longer import longer
from predicted_runs import keep_predicted_from
from prompts import write_prompts
from saved import write as write_checkpoint
from superstep.cli import checkpoint, compare, sample, trace
from superstep.cli.before_torch import preload_torch as cli_begin
from superstep.cli.chat import chat
from superstep.cli.doctor import doctor
from superstep.cli.flags.options import DEMO
from superstep.cli.grade import grade
from superstep.cli.main import VERBS, main
from superstep.cli.measure import measure
from superstep.cli.plan import serve as plan_serve
from superstep.cli.plan import serve_prices
from superstep.cli.prove import prove
from superstep.cli.scaling import scaling
from superstep.cli.serve import serve
from superstep.cli.train import train
from superstep.cli.tune import merge as tune_merge
from superstep.cli.tune import rl
from superstep.cli.tune import serve as tune_serve
from superstep.cli.tune import sft_dpo as tune
from superstep.cli.view import plan_view, step_page
from superstep.cost.program.flops import parameters
from superstep.cost.program.time.predict import MachineRates, predict
from superstep.data.preparation.prepare_lock import LOCK
from superstep.data.token_files import ANSWER_FILES
from superstep.data.token_files import FILES as TOKEN_FILES
from superstep.hardware.cluster_file import cluster, read_cluster
from superstep.plan.config import ModelConfig
from superstep.plan.config_io import read_config, write_config
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.resolution.resolve import resolve
from superstep.planner import simulate_best
from superstep.planner.calibration.calibrate_observation import guide
from superstep.planner.calibration.published_row import after_published, is_published
from superstep.planner.ranking import rank_layouts
from superstep.program.instructions import Instruction
from superstep.program.text import read_instruction, read_program, write_program
from superstep.run import tokens
from superstep.state.checkpoint_dirs import MARK
from superstep.state.manifest import MANIFEST
from superstep.state.tensor_file import FILES
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import resolve_config
from superstep.tune.config import read_recipe
from superstep.tune.recipe import RECIPE
from words import write_words

ROOT = Path(__file__).parents[1]
CLUSTER = cluster("64xH100")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MACHINE = MachineRates(gemm_flops_per_s=1e11, memory_bytes_per_s=2e10, link_bytes_per_s=1e9, link_latency_s=1e-4)
LLAMA = parameters(shape_of(ModelConfig(name="llama3-8b")))
MADE_BY_RUNS = {"bench/results"}
"""Paths that pages name and that are not in the repository."""


def maker():
    sys.path.insert(0, str(ROOT / "docs"))  # as for a script of that folder
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks its annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made():
    return maker()


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language) -> Iterator[tuple[str, str]]:
    """Each fenced block of a language, and the page's text above it."""
    text = text_of(page)
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield found[1], text[: found.start()]


@dataclass(frozen=True)
class Command:
    """One line of a shell block.

    Attributes:
        words: as the shell splits them, comments dropped.
        toml: the last TOML block above it on its page, for a file that the reader is to write.
    """

    page: Path
    words: tuple[str, ...]
    toml: str | None

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.words)}"

    @property
    def argv(self):
        """What superstep is given, its verb first; nothing where the line runs something else."""
        return list(self.words[self.words.index("superstep") + 1 :]) if "superstep" in self.words else []

    @property
    def world(self):
        """The ranks that torchrun launches; None where superstep does."""
        if self.words[0] != "torchrun" or "--hosts" in self.words:
            return None
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--nproc-per-node", type=int, required=True)
        options, _ = parser.parse_known_args(self.words[1 : self.words.index("superstep")])
        return options.nnodes * options.nproc_per_node


def commands() -> Iterator[Command]:
    for page in PAGES:
        for block, above in blocks(page, "sh"):
            tomls = re.findall(r"^```toml\n(.*?)^```$", above, re.DOTALL | re.MULTILINE)
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield Command(page, tuple(words), tomls[-1] if tomls else None)


COMMANDS = list(commands())
OURS = [command for command in COMMANDS if command.argv]


def few(commands: list[Command]) -> list[Command]:
    """So many that each verb meets each of its flags, and each page's first command is among them."""
    found, seen = [], set[tuple[str, ...]]()
    for command in commands:
        verb, *rest = command.argv
        new = {(verb, word) for word in rest if word.startswith("--")} | {(verb,), (command.page.name,)}
        if not new <= seen:
            found.append(command)
        seen |= new
    return found


FEW = few(OURS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint with the shape of the demo's model, and few tensors; as a folder it is an adapter besides."""
    shape = json.dumps(to_hf_config(resolve(DEMO).shape))
    beside = {"config.json": shape, "tokenizer.json": "{}", "adapter_config.json": "{}"}
    return write_checkpoint(tmp_path_factory.mktemp("saved"), 300, beside=beside)


@pytest.fixture
def place(tmp_path, saved, monkeypatch):
    """A folder where the pages' commands can run: the repository's files, and runs that have been trained."""
    for name in ("recipes", "src", "tests", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_digits(tmp_path / "runs" / "digits")
    write_emoji(tmp_path / "runs" / "emoji")
    write_prompts(tmp_path / "runs" / "prompts")
    write_words(tmp_path / "runs" / "gcide")
    run = resolve(DEMO)
    timeline = predict(run, MACHINE).timeline
    (trace,) = ([[e.index, e.start_s, e.end_s] for e in timeline.of(rank)] for rank in range(1))
    moe = resolve(read_config(ROOT / "recipes" / "moe.toml"))
    trained = ("demo", "first", "toy", "tuned", "preferred", "adapted", "gpt2")
    for name, config in (*((name, run.config) for name in trained), ("moe", moe.config)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(write_config(config), encoding="utf-8")
        (folder / "program.txt").write_text(write_program(timeline.program), encoding="utf-8")
        keep_predicted_from(folder, run)
        (folder / "trace.json").write_text(f'{{"step": 60, "ranks": [{trace}]}}', encoding="utf-8")
        if name in trained:
            (folder / "checkpoints").mkdir()
            (folder / "checkpoints" / saved.name).symlink_to(saved)
    counts = [[1] * moe.shape.moe.experts] * moe.shape.layers
    report = {"event": "router", "step": 10, "steps": 10, "chosen": counts, "dropped": counts}
    (tmp_path / "runs" / "moe" / "metrics.jsonl").write_text(json.dumps(report) + "\n", encoding="utf-8")
    (tmp_path / "runs" / "rl").mkdir()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "tuned").symlink_to(saved)
    secret = tmp_path / "runs" / "secret"
    secret.write_text("that of the hosts of a run", encoding="utf-8")
    secret.chmod(0o600)
    (tmp_path / "runs" / "rl" / "recipe.toml").touch()
    drawn = {"group": 0, "version": 0, "answers": [], "took_s": [1.0, 2.0]}
    (tmp_path / "runs" / "rl" / "rollouts.jsonl").write_text(json.dumps(drawn) + "\n", encoding="utf-8")
    page = text_of(ROOT / "docs" / "howto" / "plan-a-run.md")
    row = re.search(r"```toml\n(\[published\].*?)```", page, re.DOTALL)
    assert row is not None
    (tmp_path / "row.toml").write_text(row[1], encoding="utf-8")
    measured = '[chip]\nbase = "H100"\ncopies = [{bytes = 1000000000, bytes_per_s = 3e12}]\n'
    (tmp_path / "machine.toml").write_text("chips = 8\n" + measured, encoding="utf-8")
    monkeypatch.setattr(plan_view, "measure", lambda run, device, operations: MACHINE)
    # A page has its own plan; those beside it, which no argument changes, are not simulated.
    monkeypatch.setattr(step_page, "MOST_INSTRUCTIONS", 0)
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Accepted(BaseException):
    """Raised where a verb has read its arguments and would begin to work."""

    def __init__(self, run=None):
        super().__init__()
        self.run = run


@pytest.fixture
def call(place, monkeypatch):
    """Runs a command line as far as its arguments go: (exit status, the resolved run where it would train)."""

    def begin(run=None, *args, **kwargs):
        raise Accepted(run)

    monkeypatch.setattr(run_directory, "choose", begin)
    monkeypatch.setattr(cli_begin, "load", lambda settings: None)  # emulated GPUs come before torch, which is here
    monkeypatch.setattr(prove, "choose", lambda asked, ranks: "cpu")
    monkeypatch.setattr(tokens, "prepare", begin)
    monkeypatch.setattr(tokens, "prepare_samples", begin)
    monkeypatch.setattr(prove, "prepare_with_progress", begin)
    monkeypatch.setattr(sample, "text", begin)
    monkeypatch.setattr(serve, "find_model", begin)
    monkeypatch.setattr(checkpoint, "checkpoints", begin)
    monkeypatch.setattr(compare, "load_reported_run", begin)
    monkeypatch.setattr(doctor, "examine", begin)
    monkeypatch.setattr(trace, "observe_run", begin)
    monkeypatch.setattr(tune_merge, "weights_of", begin)
    monkeypatch.setattr(tune_serve, "find_model", begin)
    monkeypatch.setattr(measure, "launch_on", begin)
    monkeypatch.setattr(serve_prices, "calibrate", begin)
    monkeypatch.setattr(plan_serve, "_model", lambda name: ("demo" if name.startswith("runs") else name, None))
    monkeypatch.setattr(grade, "Pool", begin)
    monkeypatch.setattr(rl, "run", begin)
    monkeypatch.setattr(chat, "LocalModel", begin)
    monkeypatch.setattr(chat, "RemoteModel", begin)
    monkeypatch.setattr(scaling, "read_runs", begin)
    monkeypatch.setattr(tune, "prepare_tune_job", begin)
    monkeypatch.setattr(train, "_on_hosts", begin)
    # A plan is searched. The programs of large models, which take a minute, keep their closed form here, and what lies
    # beside the best plan, which no argument changes and most of the seconds went into, is not searched again.
    monkeypatch.setattr(simulate_best, "MOST_INSTRUCTIONS", 1_000)
    monkeypatch.setattr(rank_layouts, "improve", lambda best, plans, **_: (best, ()))

    def called(argv):
        try:
            return main(argv), None
        except Accepted as accepted:
            return 0, accepted.run
        except SystemExit as ended:
            return ended.code, None

    return called


@pytest.mark.parametrize("command", longer(OURS, lambda command: command not in FEW), ids=str)
def test_a_command_of_a_page_is_accepted(command, call, capsys, monkeypatch):
    verb, *argv = command.argv
    argv = argv[1:] if verb == "tune" else argv
    toml = Path(argv[0]) if argv and argv[0].endswith(".toml") else None
    if toml and not toml.exists():
        assert command.toml is not None, f"{toml} is neither in the repository nor on the page"
        toml.write_text(command.toml, encoding="utf-8")
    if "torchrun" in argv:  # as the value of --hosts: its environment says the rest
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "host0")):
            monkeypatch.setenv(name, value)
    status, run = call(command.argv)
    assert status == 0, capsys.readouterr().err
    if verb != "train":
        return
    if run.config.state.existing == "resume" and toml is None:
        assert (Path(run.config.state.dir) / "run.toml").is_file(), "no page trains the run that is resumed"
    if command.world is not None:
        asked = read_config(toml).plan
        plan = replace(run.config.plan, dp=asked.dp, microbatch=asked.microbatch)
        assert resolve(replace(run.config, plan=plan), command.world).plan.mesh.world == command.world


@pytest.mark.parametrize(
    "line",
    [
        "train --train.step 60",
        "train recipes/none.toml",
        "train --plan.dp 3",
        "prove --every",
        "view --plan.zero 4",
        "sample runs/demo",
        "scaling runs/demo --budget 10000xH100-weeks",
        "shear",
    ],
)
def test_a_command_that_is_wrong_is_not_accepted(line, call, capsys):
    status, _ = call(shlex.split(line))
    assert status == 2


def test_every_verb_is_shown():
    assert {command.argv[0] for command in OURS if command.page.name == "README.md"} == set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_verbs_and_targets_named_in_passing_exist(page):
    text = text_of(page)
    assert set(re.findall(r"`superstep (\w+)", text)) - {"VERB"} <= set(VERBS)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)", text)) <= targets
    assert {c.words[1] for c in COMMANDS if c.page == page and c.words[0] == "make"} <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_toml_on_a_page_resolves(page, tmp_path, monkeypatch):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    write_digits(tmp_path / "runs" / "digits")
    write_emoji(tmp_path / "runs" / "emoji")
    write_prompts(tmp_path / "runs" / "prompts")
    write_words(tmp_path / "runs" / "gcide")
    monkeypatch.chdir(tmp_path)
    for number, (block, _) in enumerate(blocks(page, "toml")):
        path = tmp_path / f"{number}.toml"
        path.write_text(block, encoding="utf-8")
        # A cluster file says how many chips there are; a run does not.
        read = (
            read_cluster
            if re.search("^chips = ", block, re.MULTILINE)
            else lambda run: resolve_config(read_config(run))
        )
        read = read_recipe if re.search("^start = ", block, re.MULTILINE) else read
        # A published step is a run with what it took.
        read = (lambda row: after_published(row, CLUSTER, guide())) if is_published(path) else read
        read(path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_on_a_page_runs(page):
    names: dict[str, object] = {}
    for block, above in blocks(page, "python"):
        first = above.count("\n") + 2
        exec(compile("\n" * (first - 1) + block, str(page), "exec"), names)


def slug(heading):
    """The anchor that a heading gets on the common forges."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page):
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)\s#]*)#?([^)\s]*)\)", text_of(page)):
        if target.startswith(("https://", "http://")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{target} is not there"
        assert path.is_relative_to(ROOT)
        if anchor:
            assert anchor in anchors(path), f"{target} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_that_are_named_exist(page):
    text = text_of(page)
    whole = re.findall(r"(?<![\w/.-])((?:src|recipes|docs|tests|bench|\.ci)/[\w./-]*\w)", text)
    missing = [path for path in whole if path not in MADE_BY_RUNS and not (ROOT / path).exists()]
    modules = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text)
    missing += [path for path in modules if not any((base / path).is_file() for base in bases())]
    assert missing == []


def bases():
    return ROOT, ROOT / "src" / "superstep"


def test_every_page_can_be_found_from_the_front():
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)\s#]+)", text_of(ROOT / "README.md"))}
    assert [name_of(page) for page in PAGES[1:] if page.resolve() not in linked] == []


def test_every_recipe_is_shown_at_the_front():
    text = text_of(ROOT / "README.md")
    assert [path.name for path in (ROOT / "recipes").glob("*.toml") if f"(recipes/{path.name})" not in text] == []


def test_the_reference_of_the_configuration_is_current(made):
    assert text_of(made.CONFIGURATION) == made.configuration(), "run python docs/make_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_drawings_and_tables_are_current(page, made):
    assert text_of(page) == made.filled(text_of(page)), "run python docs/make_reference.py"


def published():
    rows = []
    for name in ("runs.csv", "runs_2.csv"):
        with (ROOT / "tests" / "data" / "published" / name).open(encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return rows


def published_error(line, what):
    told = json.loads((ROOT / "bench" / "results" / "published.json").read_text(encoding="utf-8"))
    return f"{told['summary'][line][what]:.1%}"


FIGURES = {
    "README.md": (
        (r"against ([\d,]+) rows", lambda: f"{len(published()):,}"),
        (r"of (\d+) sources", lambda: str(len({row["source"] for row in published()}))),
        (r"step times err by ([\d.]+%) in the median", lambda: published_error("each stack left out", "median")),
        (r"\(90th\s+percentile ([\d.]+%)\), a\s+constant", lambda: published_error("each stack left out", "p90")),
        (
            r"fraction of the peak by ([\d.]+%)",
            lambda: published_error("constant fraction, learned from other stacks", "median"),
        ),
    ),
    "docs/explanation/zero.md": (
        (r"\(([\d,]+) parameters\)", lambda: f"{LLAMA:,}"),
        (r"= 4 bytes a parameter, ([\d.]+) GiB", lambda: f"{4 * LLAMA / 2**30:.1f}"),
        (r"16/8 = 2 bytes, ([\d.]+) GiB", lambda: f"{2 * LLAMA / 2**30:.1f}"),
    ),
    "docs/tutorial/first-run.md": ((r"ln 2048 = ([\d.]+)", lambda: f"{math.log(2048):.2f}"),),
}


@pytest.mark.parametrize(("page", "pattern", "wanted"), [(p, *f) for p, found in FIGURES.items() for f in found])
def test_a_figure_in_a_sentence_is_what_the_code_says(page, pattern, wanted):
    assert re.findall(pattern, text_of(ROOT / page)) == [wanted()]


def test_every_made_block_is_on_a_page(made):
    assert {name for page in PAGES for name in re.findall("<!-- made: (.+?) -->", text_of(page))} == made.MADE.keys()


def test_a_page_that_is_out_of_date_is_seen(made):
    page = text_of(ROOT / "docs" / "explanation" / "program.md")
    assert page.count("<!-- made: ") == 3
    assert made.filled(page.replace("send act u2 m1 to 1", "send act u2 m1 to 2")) == page
    assert made.configuration().count("| `zero` |") == 1


def test_program_text_has_every_instruction():
    page = text_of(ROOT / "docs" / "reference" / "program-text.md")
    lines = re.findall(r"^\| `([a-z][^`]*)` \| (\w+) \|", page, re.MULTILINE)
    shown = {type(read_instruction(line)) for line, lane in lines}
    assert shown == set(Instruction.__args__)
    head = re.search(r"```text\n(program .*?)```", page, re.DOTALL)
    assert read_program(head[1]).units == ("embed", "block.0", "head")


def test_every_file_of_a_run_is_described():
    page = text_of(ROOT / "docs" / "reference" / "run-directory.md")
    folder = RunFolder(root=Path("runs/demo"))
    parts = [getattr(folder, name) for name, of in vars(RunFolder).items() if isinstance(of, property)]
    names = [path.name for path in parts] + [
        *set(FILES.values()),
        MANIFEST,
        MARK,
        *TOKEN_FILES,
        *ANSWER_FILES,
        LOCK,
        RECIPE,
    ]
    assert len(names) > 10
    assert [name for name in names if name not in page] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "explanation").glob("*.md")), ids=name_of)
def test_an_explanation_ends_with_an_exercise_and_its_answer(page):
    text = text_of(page)
    assert text.rstrip().endswith("</details>")
    assert text.count("## Exercise") == text.count("<summary>Answer</summary>") == 1
