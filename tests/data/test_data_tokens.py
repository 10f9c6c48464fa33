"""Token files hold every token once, are made once, and are whole or absent."""

import json
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from superstep.data.preparation import prepare as module
from superstep.data.preparation.prepare import prepare
from superstep.data.split_documents import passages
from superstep.data.token_files import FILES, CorpusManifest, open_corpus
from superstep.data.tokenizer import load_tokenizer, train_tokenizer
from superstep.errors import ConfigError, DataError, DiskFault
from superstep.plan.config import DataConfig

DOCUMENTS = [f"document {i}: " + "the cat sat on the mat.\n" * (i % 7 + 1) for i in range(200)]


@pytest.fixture
def config(tmp_path) -> DataConfig:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return DataConfig(corpus=(str(path),), sequence_tokens=16, validation_fraction=0.1)


def texts_of(corpus, split) -> list[str]:
    tokenizer = corpus.tokenizer()
    pieces = [split.tokens[a:b].tolist() for a, b in zip(split.bounds, split.bounds[1:], strict=False)]
    assert all(piece[-1] == tokenizer.end_of_text for piece in pieces)
    return [tokenizer.decode(piece[:-1]) for piece in pieces]


def test_each_document_is_in_one_split_in_order(config, tmp_path):
    corpus = prepare(config, 300, tmp_path / "data")
    train, validation = texts_of(corpus, corpus.train), texts_of(corpus, corpus.validation)
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert train == [text for text in DOCUMENTS if text in train]
    assert validation == [text for text in DOCUMENTS if text in validation]
    # Spread: some of each half of the corpus is held out.
    assert 10 <= len(validation) <= 30
    assert {DOCUMENTS.index(text) < 100 for text in validation} == {True, False}
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted(FILES)


def test_the_split_stays_when_documents_are_added_and_when_blocks_change(config, tmp_path, monkeypatch):
    before = prepare(config, 300, tmp_path / "data")
    held_out = texts_of(before, before.validation)
    with Path(config.corpus[0]).open("a") as file:
        file.writelines(json.dumps({"text": f"another {i}"}) + "\n" for i in range(50))
    monkeypatch.setattr(module, "BLOCK_CHARS", 1)
    after = prepare(config, 300, tmp_path / "data")
    assert texts_of(after, after.validation)[: len(held_out)] == held_out
    assert after.manifest.train_documents + after.manifest.validation_documents == 250


def test_the_files_do_not_depend_on_how_much_is_encoded_at_once(config, tmp_path, monkeypatch):
    whole = prepare(config, 300, tmp_path / "whole")
    monkeypatch.setattr(module, "PASSAGE_CHARS", 10)
    monkeypatch.setattr(module, "BLOCK_CHARS", 25)
    monkeypatch.setattr(passages, "__defaults__", (60,))  # the slack
    prepare(config, 300, tmp_path / "parts")
    for name in FILES:
        assert (tmp_path / "parts" / name).read_bytes() == (whole.folder / name).read_bytes()


def test_the_manifest_states_what_the_files_hold(config, tmp_path):
    corpus = prepare(config, 300, tmp_path / "data")
    stated = corpus.manifest
    assert (stated.train_tokens, stated.validation_tokens) == (
        len(corpus.train.tokens),
        len(corpus.validation.tokens),
    )
    assert stated.text_bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert stated.bytes_per_token == stated.text_bytes / (stated.train_tokens + stated.validation_tokens)
    assert stated.vocab == corpus.tokenizer().vocab
    counts = [(corpus.train.tokens == token).sum() + 1 for token in range(stated.vocab)]
    nats = [-np.log(counts[token] / sum(counts)) for token in corpus.validation.tokens]
    assert stated.unigram_nats == pytest.approx(np.mean(nats), rel=1e-12)


def test_equal_inputs_are_read_once_and_changed_ones_again(config, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    first = prepare(config, 300, folder)
    with monkeypatch.context() as patch:
        patch.setattr(module, "CorpusReader", None)  # reading anything would be a TypeError
        assert prepare(replace(config, sequence_tokens=8, packed=False), 300, folder).manifest == first.manifest
        with pytest.raises(TypeError):
            prepare(config, 301, folder)
    made = [first.manifest.fingerprint]
    made.append(prepare(config, 280, folder).manifest.fingerprint)
    made.append(prepare(replace(config, validation_fraction=0.2), 280, folder).manifest.fingerprint)
    os.utime(config.corpus[0], ns=(1, 1))
    made.append(prepare(replace(config, validation_fraction=0.2), 280, folder).manifest.fingerprint)
    assert len(set(made)) == 4


OTHERS = {
    "another vocabulary": (lambda config: (config, 280), "model.vocab = 300"),
    "another split": (lambda config: (replace(config, validation_fraction=0.2), 300), "validation_fraction"),
    "a changed file": (lambda config: (os.utime(config.corpus[0], ns=(1, 1)), (config, 300))[1], "files"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_tokens_of_others_are_not_overwritten(config, tmp_path, name):
    folder = tmp_path / "shared"
    prepare(config, 300, folder, is_shared=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert prepare(config, 300, folder, is_shared=True).manifest.vocab == 300
    change, differs = OTHERS[name]
    with pytest.raises(DataError) as refusal:
        prepare(*change(config), folder, is_shared=True)
    assert f"data.cache = '{folder}' holds the tokens of other settings" in str(refusal.value)
    assert differs in str(refusal.value)
    assert "name another folder, or delete that one" in str(refusal.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_tokens_that_others_make_while_one_waits_are_not_overwritten(config, tmp_path, monkeypatch):
    @contextmanager
    def theirs_first(folder, tell):
        prepare(config, 300, tmp_path / "theirs")
        (tmp_path / "theirs").rename(folder)
        yield

    folder = tmp_path / "shared"
    turns = iter((theirs_first, module.take_turn))  # the first is ours, the second theirs
    monkeypatch.setattr(module, "take_turn", lambda *args: next(turns)(*args))
    with pytest.raises(DataError, match="holds the tokens of other settings"):
        prepare(config, 280, folder, is_shared=True)
    assert open_corpus(folder).manifest.vocab == 300


@pytest.mark.parametrize(
    ("name", "damage"),
    [*((name, "absent") for name in FILES), *((name, "cut") for name in FILES if name != "tokenizer.json")],
)
def test_a_half_written_folder_is_refused_and_made_again(config, tmp_path, name, damage):
    folder = tmp_path / "data"
    whole = prepare(config, 300, folder).manifest
    path = folder / name
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"data.cache: '.*' holds no whole corpus .* prepare it again"):
        open_corpus(folder)
    assert prepare(config, 300, folder).manifest == whole


def test_a_failure_leaves_the_corpus_that_was_there(config, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    whole = prepare(config, 300, folder).manifest
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8"):
        prepare(replace(config, corpus=(*config.corpus, str(tmp_path / "bad.txt"))), 300, folder)

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, 280, folder)
    assert open_corpus(folder).manifest == whole
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("renames", range(len(FILES)))
def test_no_manifest_stands_over_files_of_another_corpus(config, tmp_path, monkeypatch, renames):
    folder = tmp_path / "data"
    prepare(config, 300, folder)
    rename, done = Path.replace, []

    def rename_some(path: Path, target: Path) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(rename(path, target))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", rename_some)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, 280, folder)
    with pytest.raises(DataError, match="holds no whole corpus"):
        open_corpus(folder)
    assert prepare(config, 280, folder).manifest.vocab == 280


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_fault_that_names_path_and_bytes(config, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.tokens.partial").symlink_to("/dev/full")
    with pytest.raises(DiskFault) as caught:
        prepare(config, 300, folder)
    assert re.fullmatch(
        rf"{folder} cannot be written: No space left on device; make room on its disk\. "
        r"Or set data\.cache to a folder on a larger disk: the tokens take about \d+ bytes, and \d+ are free here\.",
        str(caught.value),
    )
    stated = int(str(caught.value).partition("about ")[2].split()[0])
    corpus = prepare(config, 300, folder)
    actual = sum((folder / f"{split}.tokens").stat().st_size for split in ("train", "validation"))
    assert actual <= stated <= 2 * actual  # JSON's quotes and escapes count as text until it is read
    assert corpus.manifest.dtype == "uint16"


def test_a_folder_that_cannot_be_written_is_a_fault(config, tmp_path):
    folder = Path(config.corpus[0]) / "data"
    with pytest.raises(DiskFault) as caught:
        prepare(config, 300, folder)
    said = f"{folder} cannot be written: Not a directory; see that the folder is there. Or set data.cache to another"
    assert str(caught.value) == f"{said} folder."


def test_one_long_document_holds_out_its_tail(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text(text := " ".join(map(str, range(3000))))
    corpus = prepare(
        DataConfig(corpus=(str(path),), sequence_tokens=16, validation_fraction=0.1), 300, tmp_path / "data"
    )
    stream = np.concatenate([corpus.train.tokens, corpus.validation.tokens])
    assert corpus.tokenizer().decode(stream.tolist()) == text + "<|endoftext|>"
    assert len(corpus.validation.tokens) == round(0.1 * len(stream))
    assert corpus.train.bounds.tolist() == [0, len(corpus.train.tokens)]
    assert corpus.validation.bounds.tolist() == [0, len(corpus.validation.tokens)]


@pytest.mark.parametrize("count", range(2, 12))
def test_few_documents_lose_no_token_to_the_split(tmp_path, count):
    texts = [f"{i} " * (10 + 37 * i % 50) for i in range(count)]
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = prepare(
        DataConfig(corpus=(str(path),), sequence_tokens=2, validation_fraction=0.3), 260, tmp_path / "data"
    )
    tokenizer = corpus.tokenizer()
    ends = [split.tokens[split.bounds[1:-1] - 1] for split in (corpus.train, corpus.validation)]
    assert (np.concatenate(ends) == tokenizer.end_of_text).all()
    both = np.concatenate([corpus.train.tokens, corpus.validation.tokens])
    assert sorted(tokenizer.decode(both.tolist())) == sorted("".join(text + "<|endoftext|>" for text in texts))
    for split in (corpus.train, corpus.validation):
        assert (np.diff(split.bounds) > 0).all()


def test_a_large_vocabulary_takes_four_bytes(config, tmp_path):
    tokenizer = train_tokenizer(DOCUMENTS, 300)
    tokenizer.core.add_tokens([f"<{i}>" for i in range(1 << 16)])
    tokenizer.core.save(str(tmp_path / "large.json"))
    large = replace(config, tokenizer=str(tmp_path / "large.json"))
    vocab = load_tokenizer(tmp_path / "large.json").vocab
    corpus = prepare(large, vocab, tmp_path / "data")
    assert corpus.manifest.dtype == "uint32"
    assert texts_of(corpus, corpus.train)[0] in DOCUMENTS
    with pytest.raises(DataError, match=rf"has {vocab} ids, more than model.vocab = 300; set model.vocab to {vocab}"):
        prepare(large, 300, tmp_path / "data")


def test_settings_and_texts_that_cannot_work_are_errors(config, tmp_path):
    folder = tmp_path / "data"
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match=r"data.validation_fraction = .* between 0 and 1"):
            prepare(replace(config, validation_fraction=fraction), 300, folder)
    with pytest.raises(ConfigError, match=r"data.sequence_tokens = 0"):
        prepare(replace(config, sequence_tokens=0), 300, folder)
    with pytest.raises(DataError, match=r"\d+ validation tokens, but data.sequence_tokens = 5000 needs 5001 .*raise"):
        prepare(replace(config, sequence_tokens=5000, validation_fraction=0.01), 300, folder)
    with pytest.raises(DataError, match=r"\d+ train tokens, but .*, add text, or lower data.validation_fraction = 0.9"):
        prepare(replace(config, sequence_tokens=5000, validation_fraction=0.9), 300, folder)
    assert prepare(replace(config, sequence_tokens=5000, packed=False), 300, folder)


def test_documents_cannot_be_kept_apart_where_there_is_one(config, tmp_path):
    masked = replace(config, document_mask=True)
    assert prepare(masked, 300, tmp_path / "many")
    path = tmp_path / "one.txt"
    path.write_text("".join(DOCUMENTS))
    one = replace(masked, corpus=(str(path),))
    with pytest.raises(DataError, match=r"data.document_mask = true .* is one document; give each its own file"):
        prepare(one, 300, tmp_path / "one")
    assert not (tmp_path / "one" / "corpus.json").exists()
    prepare(replace(one, document_mask=False), 300, tmp_path / "one")
    with pytest.raises(DataError, match=r"set data.document_mask = false"):
        prepare(one, 300, tmp_path / "one")
    prepare(replace(one, packed=False), 300, tmp_path / "one")


def test_a_manifest_of_another_format_is_refused(config, tmp_path):
    folder = tmp_path / "data"
    manifest = prepare(config, 300, folder).manifest
    assert isinstance(manifest, CorpusManifest)
    (folder / "corpus.json").write_text((folder / "corpus.json").read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(DataError, match="format 0, not 1"):
        open_corpus(folder)
