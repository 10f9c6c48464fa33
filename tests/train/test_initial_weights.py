"""A run that begins with given weights: cut straight into any layout, and refused by name where they do not fit."""

import json
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import runs
import small
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.engine.engine import Engine
from superstep.errors import StateError
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files import hf
from superstep.model.files.hf import FILE, INDEX, Weights, save_weights
from superstep.model.unit import global_tensors, initial, parameters
from superstep.plan.resolution.resolve import resolve
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.load_weights import fill
from superstep.train.weights.model import tensor_shapes

MINUTE = timedelta(minutes=1)
LAYOUTS = (
    {"tp": 4},
    {"dp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "dp": 2, "zero": 1},
    {"dp": 4, "zero": 3, "replicas": 2},
)


def folder_of(config, folder, *, dtype=torch.bfloat16, files=3):
    """A Hugging Face folder of the model, its tensors in several files under an index."""
    shape = resolve(config).shape
    decoder = Decoder(shape)
    with torch.no_grad():
        for number, (spec, param) in enumerate(parameters(decoder, units(shape)).values()):
            param.copy_(initial(spec, param.shape, 77) + 0.01 * number)
    tensors = {name: x.detach().to(dtype) for name, x in global_tensors(decoder, units(shape)).items()}
    save_weights(folder, tensors, shape)
    (folder / FILE).unlink()
    place = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in sorted(tensors)[number::files]}
        save_file(part, folder / file)
        place |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": place}), encoding="utf-8")
    return tensors


class Counted(Weights):
    """Weights that count the elements read out of them."""

    elements = 0

    def __getitem__(self, name):
        return CountedTensor(super().__getitem__(name))


class CountedTensor:
    def __init__(self, stored):
        self.stored = stored

    def get_shape(self):
        return self.stored.get_shape()

    def __getitem__(self, index):
        values = self.stored[index]
        Counted.elements += values.numel()
        return values


def filled(rank, world, folder):
    """Of each layout the global weights as the ranks hold them together, and what this rank held and read."""
    found = []
    with mock.patch.object(hf, "Weights", Counted):
        for plan in LAYOUTS:
            run = resolve(small.config(layers=2, **plan))
            mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=MINUTE)
            engine = Engine(run, units(run.shape), mesh)
            peers, shapes = RankPeers(rank, world), tensor_shapes(engine)
            Counted.elements = 0
            fill(Path(folder), engine.pieces(("weight",)), shapes, peers)
            held = sum(piece.values.numel() for piece in engine.pieces(("weight",)))
            parts = [(p.name, p.shape, p.index, p.low, p.values.clone()) for p in engine.pieces(("weight",))]
            every = [None] * world
            dist.all_gather_object(every, parts)
            every = [part for parts in every for part in parts]
            found.append((held, Counted.elements, every if rank == 0 else None))
            mesh.destroy()
        try:
            shapes = shapes | {"model.norm.weight": (33,), "model.more.weight": (2, 2)}
            fill(Path(folder), [], shapes, peers)
        except StateError as error:
            return found, str(error)
    return found, ""


@pytest.mark.multiproc
def test_weights_are_cut_straight_into_any_layout(pool, tmp_path):
    tensors = folder_of(small.config(layers=2), tmp_path)
    largest_row = 64
    answers = pool.run(4, filled, str(tmp_path))
    numel = sum(x.numel() for x in tensors.values())
    for number, plan in enumerate(LAYOUTS):
        every = answers[0][0][number][2]
        whole = {name: torch.full(shape, torch.nan) for name, shape, *_ in every}
        for name, shape, index, low, values in every:
            size = tuple(stop - start for start, stop, _ in (c.indices(n) for c, n in zip(index, shape, strict=True)))
            block = whole[name][index].flatten() if index else whole[name].flatten()
            block[low : low + len(values)] = values
            whole[name][index] = block.reshape(size)
        assert whole.keys() == tensors.keys(), plan
        for name, stored in tensors.items():
            assert torch.equal(whole[name], stored.float()), (plan, name)
        for rank, (found, _) in enumerate(answers):
            held, read, _ = found[number]
            # The ends of a shard cut two rows of a matrix; rank 0 reads nothing else to check names and shapes.
            assert held <= read <= held + 2 * largest_row * len(tensors), (plan, rank)
            if plan.get("dp", 1) * plan.get("tp", 1) == 4 and "replicas" not in plan:
                assert read < 0.5 * numel, (plan, rank)
    said = {error for _, error in answers}
    assert len(said) == 1, "all ranks say the same"
    assert "missing: model.more.weight; of another shape: model.norm.weight [32], not [33]" in said.pop()


@pytest.fixture
def place(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml"]) == 0
    return tmp_path


def _error(capsys):
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_a_run_begins_with_the_weights_of_another(place, capsys):
    newest = checkpoints(place / "run" / "checkpoints")[-1]
    flags = ["--data.tokenizer", str(newest / "tokenizer.json"), "--state.dir", "next", "--train.steps", "1"]
    named = ["--model.name", str(newest / "config.json")]
    assert main(["train", "run.toml", "--model.weights", "run", *flags, *named, "--train.lr", "1e-9"]) == 0
    before = load_file(newest / FILE)
    after = load_file(checkpoints(place / "next" / "checkpoints")[-1] / FILE)
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-7, rtol=0) for name in before)
    assert runs.events(place / "next", "step")[0]["loss"] < 0.9 * runs.events(place / "run", "step")[0]["loss"]
    # Resumed, it goes on from its own checkpoint and not from the first weights.
    assert main(["train", "--state.dir", "next", "--state.existing", "resume", "--train.steps", "2"]) == 0
    capsys.readouterr()

    assert main(["train", "run.toml", "--model.weights", "run", "--state.dir", "third"]) == 2
    assert "set data.tokenizer to the tokenizer.json beside them" in _error(capsys)
    assert main(["train", "run.toml", "--model.weights", "nowhere", *flags, "--state.dir", "third"]) == 2
    assert "'nowhere' is not there; name a run, a checkpoint or a Hugging Face folder" in _error(capsys)
    wide = ["--model.layers", "3", "--state.dir", "third"]
    assert main(["train", "run.toml", "--model.weights", "run", *flags, *wide]) == 2
    assert "missing: model.layers.2." in _error(capsys)
    assert not (place / "third").exists()


def test_a_tied_head_that_is_stored_again_must_be_the_embedding(tmp_path):
    config = small.config(layers=2)
    tensors = folder_of(config, tmp_path, files=1)
    shapes = {name: x.shape for name, x in tensors.items()}
    file = tmp_path / "model-00001-of-00001.safetensors"
    same = tensors["model.embed_tokens.weight"]
    with mock.patch.object(hf, "ROWS_AT_ONCE", 7):
        save_file(tensors | {"lm_head.weight": same.clone()}, file)
        hf.check_weights(hf.open_weights(tmp_path), shapes)
        other = same.clone()
        other[-1, -1] += 1
        save_file(tensors | {"lm_head.weight": other}, file)
        with pytest.raises(StateError, match="so they are not tied"):
            hf.check_weights(hf.open_weights(tmp_path), shapes)


def test_integers_are_no_weights(tmp_path):
    config = small.config(layers=2)
    tensors = folder_of(config, tmp_path, files=1)
    file = tmp_path / "model-00001-of-00001.safetensors"
    save_file(tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, file)
    with pytest.raises(StateError, match=r"model.norm.weight is stored as torch.int8"):
        _fill_alone(config, tmp_path, tensors)


class Alone:
    rank, size = 0, 1

    def gather(self, value, form):
        return [value]


def _fill_alone(config, folder, tensors):
    run = resolve(config)
    mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=MINUTE)
    engine = Engine(run, units(run.shape), mesh)
    fill(folder, engine.pieces(("weight",)), {name: x.shape for name, x in tensors.items()}, Alone())
