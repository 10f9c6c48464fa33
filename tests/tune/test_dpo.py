"""`superstep tune dpo`: pairs stay together, the reference is the start's, and the better answer becomes likelier."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import runs
import tuned
from superstep.cli.main import main
from superstep.data.token_files import open_corpus
from superstep.data.token_stream import TokenStream
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import load_weights
from superstep.model.unit import global_tensors
from superstep.numerics.loss import IGNORE
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.state.checkpoint_dirs import checkpoints


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tuned.make_files(tmp_path_factory.mktemp("made"))
    tuned.write_records(folder / "pairs.jsonl", tuned.preferences(40))
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    for name in ("base", "pairs.jsonl"):
        (tmp_path / name).symlink_to(made / name)
    recipe = tuned.RECIPE.replace("chats.jsonl", "pairs.jsonl").replace("lr = 3e-3", "lr = 1e-3")
    (tmp_path / "recipe.toml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune(*flags):
    return main(["tune", "dpo", "recipe.toml", *flags])


def error(capsys):
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def measures(run):
    return [dict(zip(line["names"], line["values"], strict=True)) for line in runs.events(run, "measures")]


def stream_of(corpus, rows=4):
    return TokenStream(
        corpus, "train", sequence_tokens=96, packed=True, batch_sequences=rows, seed=0, document_mask=True
    )


def test_the_better_answer_becomes_likelier_and_the_reference_is_the_start(place):
    assert tune("--train.steps", "30", "--train.batch-sequences", "2", "--state.save-every", "30") == 0
    steps, told = runs.events(place / "tuned", "step"), measures(place / "tuned")
    # Before the first update the model is the reference, and nobody knows better than by tossing a coin.
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert told[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["loss"] < 0.55
    assert told[-1]["accuracy"] == 1.0
    assert told[-1]["chosen_reward"] > told[-1]["rejected_reward"]
    evaluated = runs.events(place / "tuned", "evaluated")
    assert evaluated[-1]["loss"] < evaluated[0]["loss"] < math.log(2)

    corpus = open_corpus(place / "tuned" / "data")
    assert corpus.manifest.kind == "pairs"
    stream = stream_of(corpus, rows=1)
    found = np.fromfile(place / "tuned" / "data" / "train.reference", np.float32).reshape(stream.sequences, 96)
    shape = shape_of(ModelConfig(name="base/config.json"))
    decoder = Decoder(shape)
    load_weights(Path("base"), global_tensors(decoder, units(shape)))
    for sample in range(stream.sequences):
        batch = stream.batch(sample, slice(0, 1))
        owners, conversations = stream.owners(sample)
        assert conversations % 2 == 0
        for start in batch.starts_BS.unique().tolist():
            own = batch.starts_BS[0] == start
            targets = batch.targets_BS[0][own]
            counts = targets != IGNORE
            if not counts.any():
                continue
            with torch.no_grad():
                logp = decoder(batch.tokens_BS[:, own])[0].log_softmax(-1)
            wanted = logp.gather(1, targets.clamp(min=0)[:, None])[:, 0].where(counts, 0)
            stored = torch.from_numpy(found[stream.numbers(sample)[0]])[own]
            assert torch.allclose(stored, wanted, atol=2e-5), sample
            assert len(owners[0][own][counts].unique()) == 1
        assert ((owners[0] >= 0) == (batch.targets_BS[0] != IGNORE)).all()


def test_pairs_stay_together_the_better_one_first(place):
    assert tune("--train.steps", "1") == 0
    corpus = open_corpus(place / "tuned" / "data")
    stream, decode = stream_of(corpus), corpus.tokenizer().decode
    seen = set()
    for sample in range(0, stream.sequences, 4):
        batch = stream.batch(sample, slice(0, 4))
        owners, conversations = stream.owners(sample)
        # What another rank numbers is numbered alike.
        for pair in range(conversations // 2):
            places = [(owners == 2 * pair + k).nonzero() for k in range(2)]
            assert len({int(row) for each in places for row in each[:, 0]}) == 1, "in one sequence"
            said = [decode(batch.targets_BS[tuple(each.T)].tolist()) for each in places]
            row, start = int(places[0][0, 0]), int(batch.starts_BS[tuple(places[0][0])])
            question = decode(batch.tokens_BS[row, start : int(places[0][0, 1]) + 1].tolist())
            better, other = question.removeprefix("User: ").removesuffix("\n\nAssistant:").split(", ")
            assert [text.removesuffix("<|endoftext|>").strip() for text in said] == [better, other]
            seen.add(question)
    assert len(seen) > 5


def test_a_run_goes_on_to_the_bit_and_keeps_its_reference(place, capsys):
    exact = ["--numerics.exact", "true"]
    assert tune(*exact, "--state.dir", "whole", "--train.steps", "4", "--state.save-every", "2") == 0
    assert tune(*exact, "--state.dir", "parts", "--train.steps", "2") == 0
    reference = place / "parts" / "data" / "train.reference"
    before = reference.stat().st_mtime_ns
    resume = [*exact, "--state.dir", "parts", "--state.existing", "resume"]
    assert tune(*resume, "--train.steps", "3") == 0
    assert reference.stat().st_mtime_ns == before
    reference.write_bytes(b"")
    (place / "parts" / "data" / "reference.json").unlink()
    assert tune(*resume, "--train.steps", "4") == 0, "it is computed again from the start"
    last = [checkpoints(place / name / "checkpoints")[-1] for name in ("whole", "parts")]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()
    assert measures(place / "whole") == measures(place / "parts")
    capsys.readouterr()
    for verb in (["train"], ["tune", "sft"]):
        assert main([*verb, "--state.dir", "parts", "--state.existing", "resume", "--train.steps", "9"]) == 2
        assert "are those of superstep tune dpo; resume the run with that command" in error(capsys)


@pytest.mark.multiproc
def test_the_layout_changes_no_bit(place):
    exact = ["--numerics.exact", "true", "--train.steps", "2"]
    assert tune(*exact, "--state.dir", "one") == 0
    assert tune(*exact, "--state.dir", "two", "--plan.dp", "2", "--plan.zero", "1") == 0
    last = [checkpoints(place / name / "checkpoints")[-1] for name in ("one", "two")]
    assert (last[0] / "model.safetensors").read_bytes() == (last[1] / "model.safetensors").read_bytes()
    assert measures(place / "one") == measures(place / "two")
    references = [(place / name / "data" / "train.reference").read_bytes() for name in ("one", "two")]
    assert references[0] == references[1]


def test_mistakes_end_with_one_line(place, capsys):
    ask = [{"role": "user", "content": "a"}]
    say = [{"role": "assistant", "content": "b"}]
    for said, record in {
        "has no rejected": {"prompt": "a", "chosen": "b"},
        "prefers an answer to itself": {"prompt": "a", "chosen": "b", "rejected": "b"},
        "has chosen messages that do not end with an answer": {"chosen": ask, "rejected": ask + say},
        "has a chosen answer and no prompt": {"chosen": "b", "rejected": "c"},
    }.items():
        tuned.write_records(place / "bad.jsonl", [record])
        assert tune("--data.corpus", "bad.jsonl") == 2
        assert f"'bad.jsonl:1' {said}" in error(capsys)
    for said, flags in {
        "dpo.beta = 0.0 must be above 0": ["--dpo.beta", "0"],
        "dpo.label_smoothing = 0.5 must be at least 0 and below 0.5": ["--dpo.label-smoothing", "0.5"],
        "would cut one answer of a preference": ["--sft.too-long", "truncate"],
        "the two of a preference share one": ["--data.packed", "false"],
        "has two answers of": ["--data.sequence-tokens", "20"],
    }.items():
        assert tune(*flags) == 2
        assert said in error(capsys)
    assert not (place / "tuned").exists()
