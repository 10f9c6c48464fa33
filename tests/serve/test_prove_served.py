"""superstep prove --serve: its table for a right engine, and that no planted fault passes it."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

import small
from longer import longer
from superstep.cli.arguments.prove import read
from superstep.cli.prove import served as verb
from superstep.errors import ConfigError
from superstep.launch.ranks import launch_on
from superstep.model.rope import Rope
from superstep.numerics.attention import invariant_attention
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.resolution.resolve import resolve
from superstep.serve.batch_generate import generate
from superstep.serve.compute.kv_cache import KvCache
from superstep.serve.config import ServeConfig
from superstep.serve.drafting.speculate import Speculation
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling import request_state as live
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request import Sampling
from superstep.train.proof import prove_serving
from superstep.train.proof.prove_exact import write_bits

TOKENS = 32
WAYS = {way.name: way for way in prove_serving.ways(TOKENS)}


def config():
    found = small.config(layers=2, microbatch=2)
    return replace(
        found,
        train=replace(found.train, lr=0.5),
        data=replace(found.data, sequence_tokens=TOKENS),
        numerics=replace(found.numerics, exact=True, exact_chunks=8),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on one rank, right here, and the folder of its checkpoint."""
    threads = torch.get_num_threads()
    found = resolve(config())
    folder = tmp_path_factory.mktemp("run")
    batches = small.batches(tokens=TOKENS)
    checkpoint = launch_on("cpu", 1, write_bits, found, batches, folder, stop=1)
    (checkpoint / "config.json").write_text(json.dumps(to_hf_config(found.shape)))
    yield found, checkpoint
    torch.set_num_threads(threads)


class Rows:
    """A source of some tokens."""

    batch_sequences = small.SEQUENCES

    def batch(self, sample, rows):
        (found,) = small.batches(steps=1, seed=sample, tokens=TOKENS)
        return found


def proven(run, monkeypatch, names, **asked):
    found, checkpoint = run
    monkeypatch.setattr(verb, "newest_checkpoint", lambda root: checkpoint)
    monkeypatch.setattr(verb, "ways", lambda tokens: tuple(WAYS[name] for name in names))
    return verb.prove_served(found, checkpoint.parent, Rows(), steps=1, tp=1, **asked)


@pytest.mark.long
def test_every_way_is_proven_and_told(run, monkeypatch, capsys):
    assert proven(run, monkeypatch, WAYS, logprobs=1700) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[2:62].strip() for line in lines[1 : 1 + len(WAYS)]] == list(WAYS)
    assert "PROVEN: " in lines[-1]
    compared = int(lines[-1].split()[1])
    assert compared >= 1700
    assert compared == sum(int(line[62:74].replace(",", "")) for line in lines[1:-2])
    drafted, accepted = (int(word.replace(",", "")) for word in re.findall(r"[\d,]+", lines[-2]))
    assert drafted > accepted > 50


def _page_of_another_text():
    """A text is given pages of others."""
    return mock.patch.object(Pages, "lookup", lambda self, keys: list(self._key_of)[: len(list(keys))])


def _page_of_other_weights():
    """A page is found though it was computed with weights that are no longer there."""
    return mock.patch.object(live, "root_key", return_value=b"")


def _rope_in_bf16():
    inner = Rope.tables
    return mock.patch.object(
        Rope, "tables", lambda self, at, dtype: tuple(x.to(dtype) for x in inner(self, at, torch.bfloat16))
    )


def _one_block():
    """All keys of a text in one sum, as a kernel that is not told of blocks has them."""

    def weights(rows, keys, hidden, *_):
        scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(rows.shape[-1] ** -0.5).masked_fill_(hidden, float("-inf"))
        return scores.softmax(-1), torch.ones(()), None, None

    return mock.patch.object(invariant_attention, "_weights", weights)


def _wrong_guess_stands():
    """A guess is taken though another token was drawn."""
    inner, draw = InferenceEngine.draw_rows, InferenceEngine._draw

    def drawn_of(self, live, rows):
        guesses = [*live.guessed, None]

        def taken(live, row):
            told, guess = draw(self, live, row), guesses.pop(0)
            return told if guess is None else replace(told, token=guess)

        with mock.patch.object(self, "_draw", taken):
            return inner(self, live, rows)

    return mock.patch.object(InferenceEngine, "draw_rows", drawn_of)


@contextmanager
def _refused_key_stays():
    """What was guessed where another token was drawn keeps its key, in a page that is known once it is full."""
    judge, write, kept = Speculation.judge, KvCache.write, set()

    def judging(self, live, drawn):
        if live.guessed and len(drawn) <= len(live.guessed) and drawn[-1] != live.guessed[len(drawn) - 1]:
            place, size = live.known - 1, ServeConfig().page_tokens
            kept.add(live.pages[place // size] * size + place % size)
        judge(self, live, drawn)

    def writing(self, layer, slots, keys, values):
        rows = [row for row, slot in enumerate(slots.tolist()) if slot not in kept]
        write(self, layer, slots[rows], keys[rows], values[rows])
        if layer == len(self.keys) - 1:
            kept.difference_update(slots.tolist())

    with mock.patch.object(Speculation, "judge", judging), mock.patch.object(KvCache, "write", writing):
        yield


PLANTED = {
    "page of another text": (_page_of_another_text, "from cached pages"),
    "page of other weights": (_page_of_other_weights, "all together"),
    "rope in bf16": (_rope_in_bf16, "all together"),
    "softmax of its own": (_one_block, "as prompts"),
    "wrong guess stands": (_wrong_guess_stands, "speculated"),
    "refused key stays": (_refused_key_stays, "speculated, guesses right and wrong"),
}


def _after_other_weights(opened, way, texts, prompts):
    """As ``serve_logprobs``, by an engine that has answered the same texts with other weights, which changed since."""

    def changed():
        engine = opened()
        params, info = [held.values for held in engine.model._forward._served.params.values()], engine.info
        before = [param.clone() for param in params]
        for param in params:
            param.mul_(1.5)
        engine.info = replace(info, version="other")
        generate(engine, [text[:-1] for text in texts], Sampling(max_tokens=1))
        for param, values in zip(params, before, strict=True):
            param.copy_(values)
        engine.info = info
        return engine

    return prove_serving.serve_logprobs(changed, way, texts, prompts)


def test_pages_of_other_weights_are_not_found(run, monkeypatch):
    monkeypatch.setattr(verb, "serve_logprobs", _after_other_weights)
    assert proven(run, monkeypatch, ["all together"]) == 0


FEW = ("page of another text", "rope in bf16", "wrong guess stands")
"""One of the pages, one of the numbers and one of the guesses."""


@pytest.mark.parametrize("plant", longer(PLANTED, lambda plant: plant not in FEW))
def test_a_planted_fault_is_seen(run, monkeypatch, capsys, plant):
    fault, way = PLANTED[plant]
    inner = _after_other_weights if plant == "page of other weights" else prove_serving.serve_logprobs

    def serve_logprobs(*args):
        with fault():
            return inner(*args)

    monkeypatch.setattr(verb, "serve_logprobs", serve_logprobs)
    assert proven(run, monkeypatch, [way]) == 1
    said = capsys.readouterr().out
    assert "NOT PROVEN" in said
    assert f"First: {way}, text " in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--serve-logprobs", "0"], "--serve-logprobs = 0 must be at least 1"),
        (["--serve-tp", "0"], "--serve-tp = 0 must be at least 1"),
    ],
)
def test_what_cannot_be_proven_is_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        read(["--serve", *flags])
