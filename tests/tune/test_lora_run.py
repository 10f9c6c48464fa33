"""A run that trains an adapter: what it leaves, how it goes on, and that others compute the same with it."""

import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import runs
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of
from superstep.launch.ranks import World
from superstep.model.files.hf import open_weights
from superstep.model.files.peft_adapter import FILE, linears_of, read_adapter
from superstep.model.files.peft_config import CONFIG
from superstep.plan.config import PlanConfig
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import resolve
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig
from superstep.serve.scheduling.request import Sampling
from superstep.state.checkpoint import load
from superstep.state.manifest import MANIFEST, read_manifest, write_manifest
from superstep.state.tensor_file import digest
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import PeakRate
from superstep.train.weights.base_file import BASE
from superstep.train.weights.lora_base import begin_base
from superstep.train.weights.model import units_of

ALONE = RankPeers(0, 1)
MODEL = Path("run/checkpoints/step-000006")
LORA = f"""
[model]
name = "{MODEL}/config.json"
weights = "run"

[data]
corpus = ["good.txt"]
tokenizer = "{MODEL}/tokenizer.json"
sequence_tokens = 32

[train]
steps = 6
batch_sequences = 4
warmup_steps = 1
eval_every = 6
eval_batches = 1
lr = 0.02

[lora]
rank = 3
targets = ["q_proj", "v_proj", "down_proj"]

[plan]
dp = 1

[state]
dir = "tuned"
save_every = 3

[observe]
peak_flops = 1e12
"""
TEXTS = [[(7 * row + 3 * at) % 300 for at in range(32)] for row in range(4)]


@contextmanager
def inside(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with a run, `run`, and one that trained an adapter of it, `tuned`, to be looked at only."""
    folder = tmp_path_factory.mktemp("tuned")
    runs.make_files(folder)
    (folder / "lora.toml").write_text(LORA, encoding="utf-8")
    with inside(folder):
        assert main(["train", "run.toml"]) == 0
        before = runs.files(folder / MODEL)
        assert main(["train", "lora.toml"]) == 0
        assert runs.files(folder / MODEL) == before, "the base is read, never written"
    return folder


@pytest.fixture
def place(tuned, tmp_path, monkeypatch):
    """The same, to be changed."""
    shutil.copytree(tuned, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for base in Path("tuned/checkpoints").glob(f"*/{BASE}"):
        assert json.loads(base.read_text())["weights"] == str(tuned / MODEL)
    return tmp_path / "here"


def said(capsys):
    """The one line on stderr."""
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    return told


def test_a_checkpoint_holds_the_adapter_alone(tuned):
    for checkpoint in (tuned / "tuned/checkpoints").iterdir():
        weights = load_file(checkpoint / FILE)
        assert len(weights) == 2 * 2 * 3
        assert all("lora_" in name for name in weights)
        moments = load_file(checkpoint / "optimizer.safetensors")
        assert {name.split(".", 1)[1] for name in moments} == set(weights)
        assert not (checkpoint / "model.safetensors").exists()
        assert not (checkpoint / "config.json").exists()
        assert (checkpoint / CONFIG).exists()
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)


def test_it_goes_on_to_the_same_bits(place):
    last = place / "tuned/checkpoints/step-000006"
    before = {name: (last / name).read_bytes() for name in (FILE, "optimizer.safetensors")}
    shutil.rmtree(last)
    assert main(["train", "lora.toml", "--state.existing", "resume"]) == 0
    assert {name: (last / name).read_bytes() for name in before} == before


def test_a_base_that_has_changed_is_refused(place, capsys):
    shutil.rmtree(place / "tuned/checkpoints/step-000006")
    file = place / MODEL / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, file, {"format": "pt"})
    (place / MODEL / MANIFEST).unlink()  # which knows that these are others: now it is a folder like any
    # The one that training began with is gone, and model.weights names the changed one.
    for base in (place / "tuned/checkpoints").glob(f"*/{BASE}"):
        seal(base.parent, {**json.loads(base.read_text()), "weights": str(place / "gone")})
    capsys.readouterr()
    assert main(["train", "lora.toml", "--state.existing", "resume"]) == 2
    assert "adds to weights of digest" in said(capsys)


def seal(checkpoint, told):
    """Another base.json, in a manifest that knows it."""
    manifest = read_manifest(checkpoint)
    text = json.dumps(told)
    (checkpoint / BASE).write_text(text)
    beside = {**manifest.beside, BASE: digest(text.encode())}
    (checkpoint / MANIFEST).write_text(write_manifest(replace(manifest, beside=beside)))


def trainer_logprobs(tuned, **numerics):
    """What the trainer computes with base and adapter: [B, S]."""
    config = read_config(tuned / "tuned/run.toml")
    config = replace(config, plan=PlanConfig(dp=1), numerics=replace(config.numerics, **numerics))
    with inside(tuned):
        run = resolve(config)
    mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units_of(run), mesh)
    begin_base(run, engine, ALONE, tuned / MODEL)
    load(tuned / "tuned/checkpoints/step-000006", engine.pieces(), ALONE)
    engine.note_loaded(6)
    tokens = torch.tensor(TEXTS)
    batch = Batch({"tokens": tokens}, tokens.roll(-1, 1), tokens.numel(), None)
    return engine.logprobs(microbatches_of(batch, run.plan, mesh))[:, :-1]


def logprobs_of(logits):
    """Of each next token: [B, S - 1]."""
    told = torch.log_softmax(logits.float(), -1)[:, :-1]
    return told.gather(-1, torch.tensor(TEXTS)[:, 1:, None])[..., 0]


def test_peft_computes_the_same_with_what_was_saved(tuned):
    base = AutoModelForCausalLM.from_pretrained(tuned / MODEL, dtype=torch.float32)
    with torch.no_grad():
        plain = logprobs_of(base(torch.tensor(TEXTS)).logits)
        model = peft.PeftModel.from_pretrained(base, tuned / "tuned/checkpoints/step-000006").eval()
        theirs = logprobs_of(model(torch.tensor(TEXTS)).logits)
    ours = trainer_logprobs(tuned)
    assert (theirs - plain).abs().max() > 0.01, "the adapter has learned something"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def served_logprobs(folder, adapter, **serve):
    """What a server says of the texts."""
    engine = open_engine(folder, ServeConfig(compute="fp32", adapters=(("tuned", adapter),), **serve))
    asked = Sampling(max_tokens=1, prompt_logprobs=True, ignore_eos=True, temperature=0.0)
    answers = generate(engine, [text[:-1] for text in TEXTS], asked, adapter="tuned")
    return torch.tensor([[told.logprob for told in answer.prompt] for answer in answers])


def test_a_server_computes_the_same_unmerged(tuned):
    adapter = tuned / "tuned/checkpoints/step-000006"
    ours = trainer_logprobs(tuned, exact=True)
    exact = served_logprobs(tuned / MODEL, adapter, exact=True)
    told = ours[:, : exact.shape[1]]
    assert exact.shape[1] >= 30
    assert torch.equal(told, exact), "in exact mode the bits of training"
    torch.testing.assert_close(told, served_logprobs(tuned / MODEL, adapter), rtol=0, atol=2e-5)


def test_merged_it_computes_the_same(tuned, tmp_path, capsys):
    out = tmp_path / "merged"
    before = runs.files(tuned / MODEL)
    assert main(["tune", "merge", str(tuned / "tuned"), "--out", str(out)]) == 0
    assert "6 linears changed" in capsys.readouterr().out
    assert runs.files(tuned / MODEL) == before
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        theirs = logprobs_of(model(torch.tensor(TEXTS)).logits)
    torch.testing.assert_close(trainer_logprobs(tuned), theirs, rtol=0, atol=2e-5)
    changed = [
        name
        for name, weight in load_file(out / "model.safetensors").items()
        if not torch.equal(weight, open_weights(tuned / MODEL)[name][:])
    ]
    assert len(changed) == 6
    assert not (out / BASE).exists()
    capsys.readouterr()
    assert main(["tune", "merge", str(tuned / "tuned"), "--out", str(out)]) == 2
    assert "is there already" in said(capsys)


def test_what_is_published_is_an_adapter_that_servers_load(tuned, tmp_path):
    with inside(tuned):
        run = resolve(read_config(tuned / "tuned/run.toml"))
        world = World(0, 1, Device("cpu"))
        session = CorpusTrainer(
            world, run, RunFolder(root=tmp_path), tuned / "tuned/data", PeakRate(flops_per_token=None, peak_flops=None)
        )
        position = session.load(tuned / "tuned/checkpoints/step-000006")
        published = session.publish(tmp_path / "root", position)
        session.close()
    saved = load_file(tuned / "tuned/checkpoints/step-000006" / FILE)
    told = load_file(published.path / FILE)
    assert saved.keys() == told.keys()
    assert all(torch.equal(saved[name], told[name]) for name in saved)
    assert len(read_adapter(published.path, linears_of(run.shape)).parts) == 6


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["sample", "tuned", "the"], "trained an adapter, which is not a complete model"),
        (["serve", "tuned"], "--serve.adapters tuned=tuned/checkpoints/step-000006"),
        (["tune", "merge", "run", "--out", "other"], "holds no adapter"),
        (["tune", "merge", "tuned"], "a run and a folder to create are needed"),
        (["train", "run.toml", "--lora.rank", "4", "--state.dir", "x"], "lora without model.weights"),
        (["train", "lora.toml", "--lora.rank", "0", "--state.dir", "x"], "lora.rank = 0 must be at least 1"),
        (["train", "lora.toml", "--lora.alpha", "0", "--state.dir", "x"], "lora.alpha = 0 must be above 0"),
        (
            ["train", "lora.toml", "--lora.dropout", "1", "--state.dir", "x"],
            "lora.dropout = 1 must be at least 0 and bel",
        ),
        (["train", "lora.toml", "--lora.targets", "q_prj", "--state.dir", "x"], "did you mean 'q_proj'?"),
        (["train", "lora.toml", "--lora.targets", "[]", "--state.dir", "x"], "lora.targets is empty"),
        (["train", "lora.toml", "--lora.alpha", "4", "--state.existing", "resume"], "lora.alpha = 4.0, and the run in"),
        (["train", "run.toml", "--lora.rank", "4", "--state.existing", "resume"], "[lora] is given, and the run in"),
        (["train", "run.toml", "--lora.rank", "4", "--model.experts", "4", "--state.dir", "x"], "model.experts = 4"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(tuned, monkeypatch, capsys, argv, told):
    monkeypatch.chdir(tuned)
    assert main(argv) == 2
    assert told in said(capsys)
    assert not (tuned / "x").exists()
