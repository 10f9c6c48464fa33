"""Weights change under load: no request is torn, each token is of the version it says, bad ones are refused whole."""

import fcntl
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longer import longer
from superstep.comm.device import Device
from superstep.errors import ConfigError, Fault, StateError
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import FILE, open_weights, save_weights
from superstep.model.unit import global_tensors, initial, parameters
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_both, open_engine
from superstep.serve.compute.compiled.compiled_decoder import CompiledDecoder
from superstep.serve.compute.flat_batch import RequestRows, Rows, to_numbers
from superstep.serve.compute.kv_cache import KvCache
from superstep.serve.compute.linears.fused_linears import Linears
from superstep.serve.compute.runner import model_runner
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.compute.runner.weight_update import RankMemory
from superstep.serve.config import ServeConfig
from superstep.serve.files import weights as weights_module
from superstep.serve.files.weights import MARK, hold, open_source, publish, snapshots, version_of, weights_in_memory
from superstep.serve.load_rank import KnownModel, load_rank
from superstep.serve.scheduling.engine_messages import ChangeWeights, Pause, Resume, Sleep, Wake
from superstep.serve.scheduling.kv_pages import root_key
from superstep.serve.scheduling.request import Request, Sampling
from superstep.serve.scheduling.request_state import LiveRequest

VOCAB = 64
EXACT = ServeConfig(compute="fp32", exact=True, context_tokens=64, page_tokens=4, step_tokens=24, requests=4, pages=60)


def tensors_of(seed, **changes):
    shape = shape_of(
        ModelConfig(
            name="tiny",
            **{"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 64, "vocab": VOCAB}
            | changes,
        )
    )
    decoder = Decoder(shape)
    with torch.no_grad():
        for spec, param in parameters(decoder, units(shape)).values():
            # Wide ones, so that attention and tokens differ from weights to weights.
            param.copy_(initial(spec, param.shape, seed) * (5 if param.dim() > 1 else 1))
    return {name: x.detach() for name, x in global_tensors(decoder, units(shape)).items()}, shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model that is served at first."""
    path = tmp_path_factory.mktemp("model")
    save_weights(path, *tensors_of(0))
    return path


@pytest.fixture(scope="module")
def published(folder, tmp_path_factory):
    """Snapshots of other weights of it, and its own."""
    root = tmp_path_factory.mktemp("snapshots")
    found = [publish(root, tensors_of(seed)[0], keep=9, beside=[folder / "config.json"]) for seed in range(1, 4)]
    return [*found, publish(root, tensors_of(0)[0], keep=9)]


@pytest.fixture(scope="module")
def said(folder, published):
    """What each version says of a text, from an engine that never knew another."""
    engines = {one.version: open_engine(folder, EXACT, known=KnownModel(weights=one.path)) for one in published}
    asked = Sampling(max_tokens=1, prompt_logprobs=True)

    def logprobs(version, text):
        (answer,) = generate(engines[version], [text], asked)
        return [told.logprob for told in answer.prompt]

    return logprobs


def guessing(folder, who):
    """How the model is served exactly where somebody guesses: nobody, its text, or itself as the small model."""
    return replace(EXACT, speculate={"nobody": "", "ngram": "ngram", "small": str(folder)}[who])


class Load:
    """Requests that come and go while weights change, and all that is told of them."""

    def __init__(self, engine, steward, **sampling):
        self.engine, self.steward = engine, steward
        self.sampling = sampling
        self.requests, self.told, self.finish = {}, {}, {}
        self.done = []

    def add(self):
        number = len(self.requests)
        begin = [7, 3, 9, 1, 5, 5, 2, 8, 6, 4][: 4 + number % 7]  # pages in common
        prompt = (*begin, *[(number * 5 + k) % VOCAB for k in range(number % 9)])
        sampling = Sampling(**{"max_tokens": 6 + number % 17, "ignore_eos": True, "seed": number} | self.sampling)
        self.requests[number] = Request(id=number, prompt=prompt, sampling=sampling)
        self.told[number] = []
        self.engine.add(self.requests[number])

    def step(self):
        self.done += self.steward.tick()
        for news in self.engine.step():
            self.told[news.request] += news.tokens
            if news.finish:
                assert news.request not in self.finish
                self.finish[news.request] = news.finish
        if self.engine.is_idle:
            self.steward.rest()

    @property
    def live(self):
        return len(self.requests) - len(self.finish)

    def run(self, changes, *, requests="recompute", published):
        """Some changes of weights, requests under way all the time; then all are answered."""
        for number in range(changes):
            self.steward.ask(number, ChangeWeights(str(published[number % len(published)].path), requests))
            while len(self.done) <= number:
                while self.live < 6:
                    self.add()
                self.step()
            assert not self.done[-1].why
            for _ in range(number % 3):
                self.step()
        while not self.engine.is_idle:
            self.step()

    def run_at_once(self, changes, *, requests="recompute", published):
        """The same without a thread, three steps between two changes."""
        for number in range(changes):
            while self.live < 6:
                self.add()
            for _ in range(3):
                self.step()
            self.steward.swap(published[number % len(published)].path, requests=requests)
        while not self.engine.is_idle:
            self.step()

    def differing(self, said):
        """Tokens that are not what the version that they name says after the tokens before them."""
        found = 0
        for number, request in self.requests.items():
            text = [*request.prompt, *[told.token for told in self.told[number]]]
            for version in {told.version for told in self.told[number]}:
                logprobs = said(version, text)[len(request.prompt) - 1 :]
                pairs = zip(self.told[number], logprobs, strict=True)
                found += sum(told.version == version and told.logprob != logprob for told, logprob in pairs)
        return found


@pytest.mark.long
@pytest.mark.parametrize("changes", [100])
def test_weights_change_a_hundred_times_under_load(folder, published, said, changes):
    load = Load(*open_both(folder, EXACT))
    load.run(changes, published=published)
    assert set(load.finish.values()) == {"length"}
    assert len(load.finish) == len(load.requests)
    assert all(len(load.told[number]) == request.sampling.max_tokens for number, request in load.requests.items())
    assert [done.standing.version for done in load.done] == [published[n % 4].version for n in range(changes)]
    assert load.steward.standing.changes == changes
    several = [number for number, told in load.told.items() if len({one.version for one in told}) > 1]
    assert len(several) > 10
    assert load.differing(said) == 0
    assert load.engine.counters.prefix_hit_tokens > 0
    load.engine.pages.check([])


@pytest.mark.parametrize("who", longer(["ngram", "small"], lambda who: who == "small"))
def test_weights_change_while_tokens_are_guessed(folder, published, said, who):
    load = Load(*open_both(folder, guessing(folder, who)), temperature=0.3)
    load.run_at_once(12, published=published)
    load.run_at_once(2, requests="abort", published=published)
    assert {"abort"} <= set(load.finish.values()) <= {"abort", "length"}
    assert load.differing(said) == 0
    assert load.engine.counters.accepted_tokens > 0
    load.engine.pages.check([])


def test_pages_of_other_weights_would_be_seen(folder, published, said, monkeypatch):
    monkeypatch.setattr(
        "superstep.serve.scheduling.request_state.root_key",
        lambda version, adapter, salt: root_key("one for all", adapter, salt),
    )
    load = Load(*open_both(folder, EXACT))
    load.run_at_once(8, published=published)
    assert load.differing(said) > 0


def mixed_answers(folder, published, serve=EXACT):
    """Requests keep their keys; then others with the same texts ask, twice: who finds pages of the new weights must
    have all that come before.
    """
    load, late = Load(*open_both(folder, serve), max_tokens=20), Load(None, None)
    load.run_at_once(2, requests="keep", published=published)
    late.engine, late.steward = load.engine, load.steward
    mixed = [number for number, told in load.told.items() if len({one.version for one in told}) > 1]
    for number in 2 * mixed:
        text = (*load.requests[number].prompt, *[told.token for told in load.told[number]])
        asked = Request(id=1000 + len(late.requests), prompt=text, sampling=Sampling(max_tokens=3, ignore_eos=True))
        late.requests[asked.id], late.told[asked.id] = asked, []
        load.engine.add(asked)
        while not load.engine.is_idle:
            late.step()
    return load, late


@pytest.mark.parametrize("who", ["nobody", "ngram", "small"])
def test_requests_may_keep_their_keys_and_nobody_else_finds_them(folder, published, said, who):
    load, late = mixed_answers(folder, published, guessing(folder, who))
    assert set(load.finish.values()) == {"length"}
    assert load.differing(said) > 0  # that is what keeping them means
    assert late.differing(said) == 0
    load.engine.pages.check([])


def test_mixed_pages_that_are_published_would_be_seen(folder, published, said, monkeypatch):
    monkeypatch.setattr(LiveRequest, "is_mixed", property(lambda self: False, lambda self, value: None), raising=False)
    _, late = mixed_answers(folder, published)
    assert late.differing(said) > 0


def test_requests_may_be_answered_first_or_taken_back(folder, published, said):
    load = Load(*open_both(folder, EXACT))
    load.run(6, requests="wait", published=published)
    assert set(load.finish.values()) == {"length"}
    assert all(len({one.version for one in told}) == 1 for told in load.told.values())
    assert load.differing(said) == 0
    load = Load(*open_both(folder, EXACT))
    load.run(3, requests="abort", published=published)
    assert {"abort"} <= set(load.finish.values()) <= {"abort", "length"}
    assert load.differing(said) == 0
    load.engine.pages.check([])


FAST = {
    "bf16": {},
    "int8": {"quantize": "int8"},
    "exact": {"exact": True, "compute": "fp32"},
    "compiled": {"kernels": True},
    "compiled w8a8": {"kernels": True, "quantize": "w8a8"},
}


FEW = ("exact", "compiled", "compiled w8a8")
PAIRS = [(tied, kind) for tied in ("tied", "untied") for kind in FAST]
"""In the short run each kind once, with its head the embedding or not."""


def first_words(engine):
    """What is told of some answers; one prompt fills a page, so that it is found the next time."""
    asked = Sampling(max_tokens=4, temperature=0, ignore_eos=True)
    return [answer.tokens for answer in generate(engine, [list(range(1, 21)), [9]], asked)]


@pytest.fixture
def pair(request, tmp_path):
    """A model as a folder, and other weights of it."""
    tied = request.param == "tied"
    save_weights(tmp_path / "model", *tensors_of(0, tied=tied))
    return tmp_path / "model", publish(tmp_path / "root", tensors_of(1, tied=tied)[0])


@pytest.mark.parametrize(
    ("pair", "kind"), longer(PAIRS, lambda one: (one[0] == "tied") != (one[1] in FEW)), indirect=["pair"]
)
def test_after_a_change_an_engine_is_as_one_that_was_opened_with_those_weights(pair, kind, compiled):
    folder, other = pair
    ways = FAST[kind] | ({"kernels": compiled} if "kernels" in FAST[kind] else {})
    serve = ServeConfig(context_tokens=64, **ways)
    fresh = first_words(open_engine(folder, serve, known=KnownModel(weights=other.path)))
    engine, steward = open_both(folder, serve)
    before = first_words(engine)
    assert before != fresh
    assert steward.swap(other.path) == other.version
    assert first_words(engine) == fresh
    assert ("kernels" in FAST[kind]) == isinstance(steward.model._forward, CompiledDecoder)
    steward.sleep()
    params = steward.model.party.memory._served.params.values()
    assert all(held.values.untyped_storage().size() == 0 for held in params)
    store = steward.model.party.memory._store
    taken = [torch.empty(store.keys.shape, dtype=store.keys.dtype) for _ in range(2)]  # the memory will be elsewhere
    assert steward.wake() == other.version
    assert taken[0].data_ptr() != store.keys.data_ptr()
    if "kernels" in FAST[kind]:
        assert (store.all.keys, store.all.values) == (store.keys.data_ptr(), store.values.data_ptr())
    assert first_words(engine) == fresh
    own = dict(load_file(folder / FILE))
    steward.sleep(keeps_weights=True)
    assert steward.wake(own) == version_of(weights_in_memory(own)) == version_of(open_weights(folder))
    assert first_words(engine) == before
    assert steward.swap(dict(load_file(other.path / FILE))) == other.version
    assert first_words(engine) == fresh


@pytest.mark.parametrize("pair", ["tied", "untied"], indirect=True)
@pytest.mark.parametrize("plant", ["all", "head"])
def test_products_of_old_weights_would_be_seen(pair, plant, monkeypatch):
    def stale(self, value_of):
        rows = self._rows[:0] if plant == "all" else self._rows[:-1]
        made = [(row.product, row.make_product(value_of)) for row in rows]
        return lambda: [shared.use(product) for shared, product in made]

    folder, other = pair
    monkeypatch.setattr(Linears, "beside", stale)
    serve = ServeConfig(context_tokens=64)
    engine, steward = open_both(folder, serve)
    steward.swap(other.path)
    assert first_words(engine) != first_words(open_engine(folder, serve, known=KnownModel(weights=other.path)))


def test_a_step_that_meets_other_weights_is_a_fault(folder, published):
    engine, steward = open_both(folder, EXACT)
    engine.add(Request(id=1, prompt=(1, 2, 3), sampling=Sampling(max_tokens=9)))
    engine.step()
    memory = steward.model.party.memory
    memory.switch(memory.read(open_weights(published[0].path)))
    with pytest.raises(Fault, match="for the weights after 0 changes, and those after 1 are in place"):
        engine.step()


def test_a_rank_that_switched_alone_stops_before_it_computes(folder, published, monkeypatch):
    """Rank 1 as it follows, told of two steps for the same weights, and switching by itself between them."""
    mine = load_rank(folder, EXACT, 0, None, Device("cpu"))
    rows = to_numbers(Rows(tokens=(1, 2), parts=(RequestRows(first=0, count=2, pages=(0,)),), wanted=(1,)))
    told = iter([[0, *rows], [0, *rows], []])
    computed = []

    def forward(rows):
        computed.append(rows)
        mine.party.memory.switch(mine.party.memory.read(open_weights(published[0].path)))

    monkeypatch.setattr(model_runner, "from_first", lambda numbers, group, device: next(told))
    with pytest.raises(Fault, match="for the weights after 0 changes, and those after 1 are in place"):
        follow(forward, None, Device("cpu"), mine.party)
    assert len(computed) == 1


def flipped(path):
    data = bytearray((path / FILE).read_bytes())
    data[-5] ^= 1
    (path / FILE).write_bytes(data)


def changed(path, name, make):
    tensors = load_file(path / FILE)
    made = make(tensors[name])
    tensors = {key: x for key, x in tensors.items() if key != name} | ({} if made is None else {name: made})
    save_file(tensors, path / FILE, {"format": "pt"})
    (path / MARK).unlink()


def untied(path):
    tensors = load_file(path / FILE)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path / FILE, {"format": "pt"})
    (path / MARK).unlink()


NAME = "model.layers.1.mlp.up_proj.weight"
BAD = {
    "other bits": (flipped, r"model\.norm\.weight has other bits than were written"),
    "cut short": (lambda path: (path / FILE).write_bytes((path / FILE).read_bytes()[:-9]), "damaged|cannot be read"),
    "no tensors": (lambda path: (path / FILE).unlink(), "no readable weights"),
    "no marks": (lambda path: (path / MARK).write_text("{"), f"{MARK} cannot be read"),
    "missing": (lambda path: changed(path, NAME, lambda x: None), f"missing: {NAME}"),
    "shape": (
        lambda path: changed(path, NAME, lambda x: x[:-1].clone()),
        rf"shape: {NAME} \[63, 32\], not \[64",
    ),
    "no number": (
        lambda path: changed(path, NAME, lambda x: x.index_fill(1, torch.tensor(3), float("nan"))),
        f"{NAME} holds values that are no finite numbers in float32",
    ),
    "untied": (
        untied,
        "lm_head.weight differs from",
    ),
    "other model": (
        lambda path: (path / "config.json").write_text(
            json.dumps(json.loads((path / "config.json").read_text()) | {"rms_norm_eps": 0.5})
        ),
        "the model that is served has",
    ),
}


@pytest.fixture(scope="module")
def serving(folder):
    return open_both(folder, EXACT)


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_served_is_refused_whole(serving, folder, tmp_path, kind):
    engine, steward = serving
    before = first_words(engine)
    bad = publish(tmp_path, tensors_of(2)[0], beside=[folder / "config.json"])
    spoil, rule = BAD[kind]
    spoil(bad.path)
    for act in (steward.swap, lambda path: (steward.sleep(keeps_weights=True), steward.wake(path))):
        with pytest.raises(StateError, match=rule):
            act(bad.path)
        if steward.standing.state == "asleep":
            steward.wake()
        assert steward.standing.version == engine.info.version == version_of(open_weights(folder))
        assert first_words(engine) == before
    engine.pages.check([])


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "other model"])  # which is sound by itself
def test_what_cannot_be_served_does_not_start(folder, tmp_path, kind):
    bad = publish(tmp_path, tensors_of(2)[0], beside=[folder / "config.json"])
    spoil, rule = BAD[kind]
    spoil(bad.path)
    with pytest.raises(StateError, match=rule):
        open_both(bad.path, EXACT)


@pytest.mark.parametrize("pair", ["tied"], indirect=True)
def test_values_that_the_dtype_cannot_hold_are_refused(pair):
    folder, _ = pair
    _, steward = open_both(folder, ServeConfig(context_tokens=64))
    tensors = {name: x.double() for name, x in load_file(folder / FILE).items()}
    tensors[NAME][0, 0] = 1e300
    with pytest.raises(StateError, match=f"what was given: {NAME} holds values that are no finite numbers in bfloat16"):
        steward.swap(tensors)
    assert steward.standing.changes == 0


def run(steward, engine, deeds):
    """What is said of some deeds, by number, once all are over."""
    for number, deed in enumerate(deeds):
        steward.ask(number, deed)
    said, give_up_s = {}, time.monotonic() + 120
    while len(said) < len(deeds):
        assert time.monotonic() < give_up_s, f"of {deeds} only {said} is said"
        said |= {done.number: done for done in steward.tick()}
        engine.step()
        steward.rest()
    return said


def test_pauses_hold_finish_or_take_back(folder):
    engine, steward = open_both(folder, EXACT)

    def ask(number):
        engine.add(Request(id=number, prompt=(1, 2, number), sampling=Sampling(max_tokens=8, ignore_eos=True)))

    def drain(steps=30):
        return {n.request: n.finish for _ in range(steps) for n in engine.step() if n.finish}

    ask(1)
    engine.step()
    assert run(steward, engine, [Pause("keep")])[0].standing.state == "paused"
    ask(2)
    assert engine.is_idle
    assert engine.is_held
    assert engine.counters.running == 1
    assert drain() == {}
    with pytest.raises(ConfigError, match="paused or asleep"):
        generate(engine, [[1]], Sampling())
    steward.ask(0, Resume())
    assert [done.standing.state for done in steward.tick()] == ["serving"]
    assert drain() == {1: "length", 2: "length"}

    ask(3)
    engine.step()
    steward.ask(5, Pause("wait"))
    ask(4)
    assert steward.tick() == []
    assert drain() == {3: "length"}
    assert [(done.number, done.standing.state) for done in steward.tick()] == [(5, "paused")]
    steward.ask(6, Pause("abort"))
    assert drain() == {4: "abort"}
    assert steward.standing.state == "closed"
    steward.ask(7, Resume())
    assert {done.number for done in steward.tick()} == {6, 7}
    ask(5)
    assert drain() == {5: "length"}
    assert not engine.is_held


@pytest.mark.parametrize("who", ["nobody", "ngram", "small"])
def test_sleep_takes_no_answer_away(folder, published, who):
    engine, steward = open_both(folder, guessing(folder, who))
    request = Request(id=1, prompt=(1, 2, 3, 4, 5), sampling=Sampling(max_tokens=20, ignore_eos=True, seed=3))
    alone = generate(open_engine(folder, EXACT), [request.prompt], request.sampling)[0].ids
    engine.add(request)
    tokens = [told.token for _ in range(5) for news in engine.step() for told in news.tokens]
    run(steward, engine, [Sleep()])
    said = run(steward, engine, [Pause(), Sleep(), Resume(), ChangeWeights(str(published[0].path)), Wake("nowhere")])
    assert (said[0].standing.state, said[0].why) == ("asleep", "")
    assert "asleep already" in said[1].why
    assert "wake it first" in said[2].why
    assert "sleeps without weights" in said[3].why
    assert "no readable weights" in said[4].why
    assert engine.pages.used == 0
    assert run(steward, engine, [Wake()])[0].standing.state == "paused"
    steward.ask(0, Resume())
    while not engine.is_idle:
        tokens += [told.token for news in engine.step() for told in news.tokens]
    assert tokens == alone
    assert "not asleep" in run(steward, engine, [Wake()])[0].why


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_a_small_models_keys_go_to_sleep_and_are_computed_again(folder, keeps_weights, monkeypatch):
    """The same model as the small one is always right, but where it lacks a key."""
    stores = []
    made = KvCache.__init__
    monkeypatch.setattr(KvCache, "__init__", lambda self, **room: (stores.append(self), made(self, **room))[1])
    engine, steward = open_both(folder, guessing(folder, "small"))
    for number in range(3):
        sampling = Sampling(max_tokens=30, ignore_eos=True, seed=number)
        engine.add(Request(id=number, prompt=tuple(range(1, 12 + number)), sampling=sampling))
    for _ in range(3):
        engine.step()
    steward.sleep(keeps_weights=keeps_weights)
    assert [store.keys.untyped_storage().nbytes() + store.values.untyped_storage().nbytes() for store in stores] == [
        0,
        0,
    ]
    steward.wake()
    while not engine.is_idle:
        engine.step()
    assert engine.counters.drafted_tokens == engine.counters.accepted_tokens > 40


def test_a_change_that_waits_for_what_is_held_is_refused(folder, published):
    engine, steward = open_both(folder, EXACT)
    said = run(steward, engine, [Pause("keep"), ChangeWeights(str(published[0].path), "wait")])
    assert "requests = 'wait' while the engine is paused" in said[1].why
    said = run(steward, engine, [ChangeWeights(str(published[0].path)), Resume()])
    assert said[0].standing.version == published[0].version


def test_equal_weights_are_no_change(folder, published):
    engine, steward = open_both(folder, EXACT)
    assert steward.swap(published[3].path) == engine.info.version
    assert steward.standing.changes == 0


def test_a_prompt_is_told_once_though_its_pages_are_taken_back(folder, published):
    engine, steward = open_both(folder, EXACT)
    prompt = tuple(range(1, 60))
    engine.add(Request(id=1, prompt=prompt, sampling=Sampling(max_tokens=1, prompt_logprobs=True)))
    told = list(engine.step()[0].prompt)
    steward.swap(published[0].path)
    while not engine.is_idle:
        told += [one for news in engine.step() for one in news.prompt]
    assert [one.token for one in told] == list(prompt[1:])
    assert {one.version for one in told} == {version_of(open_weights(folder)), published[0].version}


def test_a_snapshot_is_whole_named_by_content_and_kept_while_it_is_held(tmp_path):
    made = [publish(tmp_path, tensors_of(seed)[0], keep=1) for seed in (1, 2)]
    assert snapshots(tmp_path) == [made[1].path]
    held = hold(made[1].path)
    third, again = publish(tmp_path, tensors_of(3)[0], keep=1), publish(tmp_path, tensors_of(3)[0], keep=1)
    assert third == again
    assert snapshots(tmp_path) == [made[1].path, third.path]
    held.close()
    assert publish(tmp_path, tensors_of(1)[0], keep=1) == made[0]
    assert [path.name for path in tmp_path.iterdir()] == [made[0].path.name]
    source = open_source(made[0].path)
    assert source.version() == made[0].version == version_of(weights_in_memory(tensors_of(1)[0]))
    assert version_of(weights_in_memory({n: x.bfloat16() for n, x in tensors_of(1)[0].items()})) != made[0].version
    source.close()


def test_what_an_engine_was_opened_with_is_held_until_it_is_changed(tmp_path):
    own, shape = tensors_of(1)
    first = publish(tmp_path / "root", own, keep=1).path
    save_weights(tmp_path / "model", own, shape)
    _, steward = open_both(tmp_path / "model", EXACT, known=KnownModel(weights=first))
    second = publish(tmp_path / "root", tensors_of(2)[0], keep=1).path
    assert first.exists()
    steward.swap(second)
    third = publish(tmp_path / "root", tensors_of(3)[0], keep=1).path
    assert snapshots(tmp_path / "root") == [second, third]
    steward.sleep()
    assert steward.wake() == second.name.removeprefix("weights-")


def test_a_snapshot_that_is_being_cleaned_away_is_not_opened(tmp_path):
    path = publish(tmp_path, tensors_of(1)[0]).path
    with (path / MARK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StateError, match="being cleaned away"):
            open_source(path)


def test_what_dead_writers_left_is_removed_and_what_is_being_written_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module, "YOUNG_S", 0.0)
    left = tmp_path / ".unfinished-dead"
    left.mkdir()
    (left / "writer").touch()
    with weights_module.open_unfinished(tmp_path) as writing:
        publish(tmp_path, tensors_of(1)[0])
        assert not left.exists()
        assert writing.exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_memory_is_read_beside_and_not_in_place(folder, published):
    engine, steward = open_both(folder, EXACT)
    before = first_words(engine)
    memory = steward.model.party.memory
    assert isinstance(memory, RankMemory)
    memory.read(open_weights(published[1].path))
    assert first_words(engine) == before
    assert Path(steward.standing.path) == folder


def test_a_context_whose_keys_have_no_room_is_refused_with_one_that_has(folder, tmp_path):
    for file in (FILE, "config.json"):
        shutil.copy(folder / file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**62}))
    with pytest.raises(ConfigError, match=r"GiB are free; set serve\.context_tokens to [0-9]+ or less") as refused:
        open_both(tmp_path, ServeConfig())
    fitting = int(re.search(r"context_tokens to (\d+)", str(refused.value))[1])
    assert fitting >= 1024
