"""The recipes of word2vec: they learn, their layouts have the same bits, and their files come out of packages."""

import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe_files import enter_folder, load_recipe
from superstep.cli.main import main
from words import write_words

SMALL = ["--train.steps", "6", "--train.decay-steps", "6", "--train.eval-every", "6", "--state.save-every", "6"]
EXACT = ["--numerics.exact", "true", "--train.batch-sequences", "8", "--plan.microbatch", "2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_words(tmp_path / "runs" / "gcide")
    return enter_folder(tmp_path, monkeypatch)


def _weights(run):
    return load_file(max((Path(run) / "checkpoints").glob("step-*")) / "model.safetensors")


@pytest.mark.multiproc
def test_skip_gram_tells_two_kinds_of_words_apart(here, capsys):
    many = ["--train.steps", "60", "--train.decay-steps", "60", "--train.eval-every", "60", "--state.save-every", "60"]
    small = ["--train.batch-sequences", "20", "--plan.microbatch", "10", "--train.lr", "0.5"]
    assert main(["train", "recipes/word2vec.toml", *many, *small, "--train.clip-row-norm", "1.5"]) == 0
    lines = [json.loads(line) for line in Path("runs/word2vec/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    assert losses[-1] < 0.9 * losses[0]
    capsys.readouterr()
    load_recipe("judge_words").main(Path("runs/word2vec"), Path("runs/gcide"))
    judged = capsys.readouterr().out.split()
    assert judged[-2:] == ["20", "pairs"]
    assert float(judged[1]) > 0.7, "the two kinds alone give 0.87"


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["word2vec", "word2vec_cbow", "word2vec_tree"])
def test_one_rank_and_two_have_the_same_bits(here, name):
    for dp, zero in ((1, 0), (2, 0), (2, 1)):
        plan = ["--plan.dp", str(dp), "--plan.zero", str(zero), "--state.dir", f"runs/{dp}-{zero}"]
        assert main(["train", f"recipes/{name}.toml", *SMALL, *EXACT, *plan]) == 0
    alone = _weights("runs/1-0")
    assert alone["0.outputs.weight"].any()
    for other in ("runs/2-0", "runs/2-1"):
        assert all(torch.equal(alone[key], value) for key, value in _weights(other).items()), other


@pytest.mark.multiproc
@pytest.mark.parametrize("how", [[], ["--exact"]], ids=["tolerance", "exact"])
def test_the_recipe_is_proven(here, capsys, how):
    assert main(["prove", "recipes/word2vec.toml", "--train.batch-sequences", "8", "--plan.microbatch", "2", *how]) == 0
    assert "PROVEN" in capsys.readouterr().out


def test_frequent_words_have_short_ways_in_the_tree(here):
    tree = load_recipe("word2vec_tree")
    counts, paths = tree.base.read_text()[1], tree.huffman_paths()
    lengths = (paths >= 0).sum(1)
    assert (lengths.diff() >= 0).all() or counts.std() < counts.mean()
    ways = [tuple(row[row >= 0].tolist()) for row in paths]
    assert len(set(ways)) == len(ways)
    assert sum(2.0 ** -len(way) for way in ways) == 1.0
    assert {way[0] // 2 for way in ways} == {len(ways) - 2}


def test_negative_words_are_as_frequent_as_counts_to_three_quarters(here):
    recipe = load_recipe("word2vec")
    shares = torch.from_numpy(recipe.read_text()[1] ** 0.75)
    drawn = torch.bincount(recipe.negative_table()) / recipe.HELD
    torch.testing.assert_close(drawn.double(), shares / shares.sum(), atol=2e-6, rtol=0)


def test_the_dictionary_comes_out_of_its_package(tmp_path, monkeypatch):
    fetch = load_recipe("fetch_gcide")
    zebra = 'Zebra \\Ze"bra\\, n.\n   An animal. [1913 Webster]'
    text = "\n\n".join(["  Front matter.", zebra, "   Of Africa.", "Zest \\Zest\\\n   Joy."]) + "\n"
    data, packed = io.BytesIO(), gzip.compress(text.encode())
    with tarfile.open(fileobj=data, mode="w:xz") as files:
        entry = tarfile.TarInfo("./usr/share/dictd/gcide.dict.dz")
        entry.size = len(packed)
        files.addfile(entry, io.BytesIO(packed))
    part = data.getvalue()
    header = f"{'data.tar.xz':<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}`\n".encode()
    deb = b"!<arch>\n" + header + part
    (tmp_path / "gcide.deb").write_bytes(deb)
    with zipfile.ZipFile(tmp_path / "gensim.whl", "w") as wheel:
        wheel.writestr("gensim/test/test_data/wordsim353.tsv", "tiger\tcat\t7.35\n")
    with pytest.raises(SystemExit, match="it is another version"):
        fetch.main(tmp_path / "gcide.deb", tmp_path / "gensim.whl", tmp_path / "out")
    hashes = {"dict-gcide": deb, "wordsim353.tsv": b"tiger\tcat\t7.35\n"}
    monkeypatch.setattr(fetch, "HASHES", {name: hashlib.sha256(raw).hexdigest() for name, raw in hashes.items()})
    fetch.main(tmp_path / "gcide.deb", tmp_path / "gensim.whl", tmp_path / "out")
    assert (tmp_path / "out" / "text.txt").read_text(encoding="utf-8").splitlines() == [
        "front matter", "zebra n an animal of africa", "zest joy",
    ]  # fmt: skip
