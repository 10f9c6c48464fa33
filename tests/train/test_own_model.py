"""A model that a user wrote: trained and proven from its file, refused in one line where it cannot be."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import runs
import small
from longer import first_few
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.observe.number_format import seconds_text
from superstep.plan.config import ModelConfig, PlanConfig
from superstep.train.proof.all_layouts import layouts
from superstep.train.proof.prove_tolerance import prove, write_reference
from superstep.train.weights.model import resolve_config, units_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "recipes" / "own_model.py"
RULES = (("attention", "tp"), ("hidden", "tp"), ("words", "tp"))


def config(source=SOURCE, *, compute="fp32", heads=4, vocab=small.VOCAB, rules=RULES, **plan):
    model = ModelConfig(source=str(source), layers=3, width=32, heads=heads, vocab=vocab)
    base = small.config(compute=compute, packed=False)
    return replace(base, model=model, plan=PlanConfig(rules=rules, **plan))


LAYOUTS = {
    2: [
        {"tp": 2, "rules": (("attention", "tp"), ("hidden", "none"), ("words", "none")), "recompute": "selective"},
        {"tp": 2, "rules": (("attention", "none"), ("hidden", "tp"), ("words", "tp")), "sequence_parallel": False},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"pp": 2, "microbatch": 2, "schedule": "zb-h1"},
        {"cp": 2},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": False, "recompute": "full"},
        {"pp": 2, "microbatch": 2},
        {"tp": 2, "compute": "bf16"},
    ],
    4: [
        {"tp": 2, "pp": 2, "microbatch": 2, "schedule": "zb-h1"},
        {"tp": 2, "cp": 2},
        {"tp": 2, "dp": 2, "zero": 3, "microbatch": 2},
        {"tp": 4, "microbatch": 4},
    ],
}


def _prove_all(rank, world, cases, folder):
    here, batches = World(rank, world, Device("cpu")), small.batches(packed=False)
    return [prove(here, run, batches, Path(folder), reruns=False) for run in cases]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run = resolve_config(config(dp=1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    write_reference(units_of(run), run.config.train, small.batches(packed=False), folder)
    torch.set_num_threads(threads)
    return str(folder)


@pytest.mark.multiproc
@pytest.mark.parametrize(("world", "part"), first_few(LAYOUTS, {2: 5}))
def test_every_layout_computes_what_the_units_in_a_row_do(pool, reference, world, part):
    cases = [resolve_config(config(**plan)) for plan in LAYOUTS[world][part]]
    verdicts = pool.run(world, _prove_all, cases, reference, timeout_s=120)[0]
    for run, verdict in zip(cases, verdicts, strict=True):
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())


@pytest.mark.multiproc
def test_a_cut_that_mixes_queries_and_keys_is_seen(pool, reference, tmp_path):
    """Queries, keys and values one after the other, as GPT-2 has them: a contiguous cut gives a rank the wrong rows.
    The shapes fit, so that it is the proof that sees it.
    """
    text = SOURCE.read_text(encoding="utf-8")
    wrong = text.replace("view(B, S, -1, 3, self.head_dim).unbind(3)", "view(B, S, 3, -1, self.head_dim).unbind(2)")
    assert wrong != text
    path = tmp_path / "mixed.py"
    path.write_text(wrong, encoding="utf-8")
    one, two = resolve_config(config(path, dp=1)), resolve_config(config(path, tp=2))
    write_reference(units_of(one), one.config.train, small.batches(packed=False), tmp_path)
    (verdict,) = pool.run(2, _prove_all, [two], str(tmp_path), timeout_s=60)[0]
    assert not verdict.is_proven


def test_a_model_of_ones_own_is_trained_resumed_viewed_and_sampled(tmp_path, monkeypatch, capsys):
    (tmp_path / "good.txt").write_text(runs.TEXT, encoding="utf-8")
    (tmp_path / "mine.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    toml = re.sub(
        r"\[model\].*?\n\n",
        '[model]\nsource = "mine.py"\nlayers = 2\nwidth = 32\nvocab = 300\n\n',
        runs.TOML.lstrip(),
        flags=re.S,
    )
    (tmp_path / "run.toml").write_text(toml, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml", "--train.steps", "3"]) == 0
    assert main(["train", "run.toml", "--state.existing", "resume"]) == 0
    steps = runs.events(Path("run"), "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    (started, *_) = runs.events(Path("run"), "started")
    assert started["predicted_step_s"] > 0
    assert started["predicted_memory_bytes"] > 0
    assert steps[-1]["mfu"] > 0
    specs = units_of(resolve_config(config("mine.py", vocab=300, dp=1)))
    assert len(specs) == 5
    checkpoint = sorted(Path("run/checkpoints").iterdir())[-1]
    assert not (checkpoint / "config.json").exists()
    capsys.readouterr()
    assert main(["view", "run"]) == 0
    out = capsys.readouterr().out
    assert "step 6 of run, as it ran" in out
    assert f"predicted {seconds_text(runs.events(Path('run'), 'started')[-1]['predicted_step_s'])}" in out
    assert main(["view", "run.toml", "--program"]) == 0
    assert main(["view", "run.toml"]) == 0
    assert "predicted for this machine" in capsys.readouterr().out
    assert main(["sample", "run", "the quick", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


HEAD = """
import torch
from torch import nn
from superstep.model.unit import ParamSpec, UnitSpec

def p(name, *axes):
    return ParamSpec(name=name, axes=axes, std=0.1)

def unit(name, build, **params):
    return UnitSpec(name=name, build=build, params={k.replace("__", "."): v for k, v in params.items()})

EMBED = unit("embed", lambda: nn.Embedding(64, 8), weight=p("e", "v", None))
HEAD = unit("head", lambda: nn.Linear(8, 64, bias=False), weight=p("h", "v", None))

def between(build, **params):
    return lambda config: [EMBED, unit("mid", build, **params), HEAD]
"""

# what the file has beyond these, the plan, what the message must say
FILES = [
    ("unit_list = 1", {}, ["no function 'units(config)'"]),
    ("units = lambda config: 3", {}, ["gives int; return a list of UnitSpec"]),
    ("units = lambda config: 1 / 0", {}, ["units(config) fails: ZeroDivisionError: division by zero."]),
    ("units = lambda config: []", {}, ["there are no units; list at least one"]),
    ("units = lambda config: [nn.ReLU()]", {}, ["ReLU() is no UnitSpec"]),
    ("units = lambda config: [EMBED, EMBED]", {}, ["two units have the name 'embed'"]),
    ("import nonsuch", {}, ["cannot be run: ModuleNotFoundError: No module named 'nonsuch'."]),
    ("def (", {}, ["cannot be run: SyntaxError"]),
    ("units = between(lambda: nn.Linear(8, 0 / 0))", {}, ["unit 'mid' cannot be built: division by zero."]),
    ("units = between(lambda: 3)", {}, ["unit 'mid' builds int, no torch.nn.Module"]),
    ("units = between(lambda: nn.Linear(8, 8))", {}, ["unit 'mid' has a parameter 'weight' that its table lacks"]),
    (
        "units = between(lambda: nn.Linear(8, 8, bias=False), weigth=p('a', None, None), weight=p('b', None, None))",
        {},
        ["table of unit 'mid' has 'weigth'", "no parameter of its module", "did you mean 'weight'?"],
    ),
    (
        "units = between(lambda: nn.Linear(8, 8, bias=False), weight=p('a', None))",
        {},
        ["unit 'mid', 'weight': 1 axes (None,) for 2 dims [8, 8]"],
    ),
    (
        "units = between(lambda: nn.Linear(8, 8, bias=False), weight='a')",
        {},
        ["unit 'mid', 'weight': 'a' is no ParamSpec"],
    ),
    (
        "units = between(lambda: nn.Linear(8, 8), weight=p('a', 'x', None), bias=p('b', 'y'))",
        {},
        ["'bias' has the axis 'y'", "its weight has 'x'", "name them alike"],
    ),
    (
        "units = between(lambda: nn.Linear(8, 8, bias=False), weight=p('e', 'v', None))",
        {},
        ["unit 'mid' has 'e' as [8, 8]", "another unit as [64, 8]", "give it one shape"],
    ),
    (
        "units = between(lambda: nn.BatchNorm1d(8), weight=p('a', None), bias=p('b', None))",
        {},
        ["unit 'mid' is a BatchNorm1d", "couple the samples of a microbatch", "or torch.nn.GroupNorm"],
    ),
    ("units = between(lambda: nn.Dropout(0.1, True))", {}, ["unit 'mid' drops in place; leave inplace out."]),
    (
        """
        class Mask(nn.Module):
            def __init__(self):
                super().__init__()
                self.mask = torch.ones(8)

            def forward(self, x):
                return x * self.mask

        units = between(Mask)
        """,
        {},
        ["unit 'mid' holds the tensor 'mask' as an attribute", "register_buffer('mask', ...)"],
    ),
    (
        """
        class Counter(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros((), dtype=torch.long))

            def forward(self, x):
                self.count += 1
                return x

        units = between(Counter)
        """,
        {},
        ["unit 'mid' changes its buffer 'count'", "keep no running state"],
    ),
    ("units = between(lambda: nn.ReLU(inplace=True))", {}, ["unit 'mid' changes its input in place"]),
    (
        """
        class Two(nn.Module):
            def forward(self, x):
                return x, x

        units = between(Two)
        """,
        {},
        ["unit 'mid' gives tuple; let it return one tensor"],
    ),
    (
        "units = between(lambda: nn.Linear(9, 8, bias=False), weight=p('a', None, None))",
        {},
        ["unit 'mid' does not run on an input [1, 16, 8]"],
    ),
    ("units = lambda config: [EMBED]", {}, ["gives 8 logits", "model.vocab = 64", "set model.vocab to 8"]),
    (
        "units = lambda config: [EMBED, unit('all', lambda: nn.Flatten())]",
        {},
        ["the last unit gives [1, 128]", "[1, 16, model.vocab]"],
    ),
    (
        "units = lambda config: [EMBED, HEAD]",
        {"tp": 2, "rules": ()},
        ["plan.tp = 2 needs something to cut"],
    ),
    (
        """
        class Flat(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

            def forward(self, x):
                B, S, D = x.shape
                return x + self.down(self.up(x).view(B, S, -1, 2).flatten(2))

        units = between(Flat, up__weight=p("a", "heads", None), down__weight=p("b", None, "heads"))
        """,
        {"tp": 2, "rules": (("heads", "tp"), ("v", "tp"))},
        ["unit 'mid'", "plan.sequence_parallel = true", "set plan.sequence_parallel to false", "a module of their own"],
    ),
    (
        """
        class Halves(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False)

            def forward(self, x):
                return x + self.down(self.up(x).view(*x.shape[:2], -1, 2).flatten(2))

        units = between(Halves, up__weight=p("a", "heads", None), down__weight=p("b", None, "heads"))
        """,
        {"tp": 2, "rules": (("heads", "tp"), ("v", "tp")), "sequence_parallel": False},
        ["unit 'mid' does not run", "plan.tp = 2", "set plan.tp to what its heads split over"],
    ),
    (
        """
        class Attends(nn.Module):
            def forward(self, x, attend=None):
                q = x.view(*x.shape[:2], 2, 4)
                return attend(q, q, q).flatten(2)

        units = lambda config: [EMBED, UnitSpec(name="mid", build=Attends, params={}, takes=("attend",)), HEAD]
        """,
        {"tp": 2, "rules": (("v", "tp"),)},
        ["the attention of unit 'mid' sees a part of the sequence", "set plan.sequence_parallel to false"],
    ),
    (
        """
        class Scaled(nn.Embedding):
            def forward(self, x):
                return super().forward(x) * 2.0

        first = unit("embed", lambda: Scaled(64, 8), weight=p("e", "v", None))
        units = lambda config: [first, HEAD]
        """,
        {"tp": 2, "rules": (("v", "tp"),)},
        ["e: plan.rules.v = 'tp'", "its embedding layer has a forward, hooks or options", "set plan.rules.v to 'none'"],
    ),
    (
        """
        def loss(out, targets):
            return out.sum()

        last = UnitSpec(name="head", build=HEAD.build, params=HEAD.params, loss=loss)
        units = lambda config: [EMBED, last]
        """,
        {"tp": 2, "rules": (("v", "tp"),)},
        ["unit 'head' has a loss of its own, of an output that plan.tp = 2", "plan.rules to 'none'"],
    ),
    (
        "units = lambda config: [EMBED, UnitSpec(name='mid', build=nn.ReLU, params={}, takes=('atend',)), HEAD]",
        {},
        ["unit 'mid' takes 'atend'", "did you mean 'attend'?"],
    ),
]


ATTENDS = """
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.zeros(16, 8))

    def forward(self, x, attend=None, positions=None):
        q = (x if positions is None else x + self.places[positions]{and_so}).view(*x.shape[:2], 2, 4)
        return (attend(q, q, q) if attend else q).flatten(2)

units = lambda config: [EMBED, UnitSpec(name="mid", build=Attends, params={{}}, takes={takes}), HEAD]
"""

MASKED = [
    ("('positions',)", "", ["data.document_mask = true needs units that take attention", "take 'attend', or set"]),
    (
        "('attend',)",
        "",
        ["needs units that take positions", "which begin at 0", "let those that use it take 'pos"],
    ),
    ("('attend', 'positions')", ".view(1, 16, 8)", ["unit 'mid' does not run", "positions [2, 16]"]),
]


@pytest.mark.parametrize(("takes", "and_so", "words"), MASKED, ids=lambda value: None)
def test_a_file_that_cannot_keep_documents_apart_is_refused(takes, and_so, words, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + ATTENDS.format(takes=takes, and_so=and_so), encoding="utf-8")
    wanted = config(path, rules=(), dp=1)
    wanted = replace(wanted, data=replace(wanted.data, packed=True))
    resolve_config(wanted)
    with pytest.raises(ConfigError) as caught:
        resolve_config(replace(wanted, data=replace(wanted.data, document_mask=True)))
    assert [word for word in [*words, str(path)] if word not in str(caught.value)] == []
    # Where no sequence has two documents there is nothing to keep apart.
    resolve_config(replace(wanted, data=replace(wanted.data, document_mask=True, packed=False)))


@pytest.mark.parametrize(("body", "plan", "words"), FILES, ids=lambda value: None)
def test_a_file_is_refused_in_one_line(body, plan, words, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve_config(config(path, **{"rules": (), "dp": 1} | plan))
    message = str(caught.value)
    assert [word for word in [*words, str(path)] if word not in message and word != str(path)] == []
    assert "\n" not in message


def test_a_shared_table_that_units_see_different_tokens_of_is_refused():
    rules = (("attention", "tp"), ("hidden", "tp"), ("places", "tp"))
    with pytest.raises(ConfigError, match=r"words\.weight is whole and shared.*set plan\.sequence_parallel to false"):
        resolve_config(config(tp=2, rules=rules))
    resolve_config(config(tp=2, rules=rules, sequence_parallel=False))


def test_the_sweep_keeps_the_rules_of_the_model():
    runs_of_two = list(layouts(config(dp=2), 2))
    assert {run.plan.mesh.tp for run in runs_of_two} == {1, 2}
    assert {run.config.plan.rules for run in runs_of_two} == {RULES}


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for name in (tmp_path / "none.py", tmp_path):
        with pytest.raises(ConfigError, match=r"model\.source = '.*' is not a Python file; name one"):
            resolve_config(config(name, dp=1))
