"""Adapters in one engine: each answer is its own adapter's alone, whoever is beside it and whatever comes and goes."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import low_rank
from superstep.comm.device import Device
from superstep.errors import ConfigError, UserError
from superstep.model.files.peft_adapter import Adapter, read_adapter, write_adapter
from superstep.model.files.peft_config import CONFIG
from superstep.serve.api.backend_errors import make_backend_refusal
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_both, open_engine
from superstep.serve.compute import lora as placing
from superstep.serve.compute import lora_kernels as computing
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.config import ServeConfig
from superstep.serve.load_rank import load_rank
from superstep.serve.scheduling import request_state
from superstep.serve.scheduling.lora_registry import check_names, folders_of
from superstep.serve.scheduling.request import Request, Sampling
from superstep.train.proof.prove_lora import beside_adapters, losses_of, write_adapters
from superstep.train.proof.prove_serving import compare

KINDS = {
    "low": low_rank.random_adapter(1),
    "high": low_rank.random_adapter(2, rank=24, alpha=9.0, stabilized=True),
    "queries": low_rank.random_adapter(3, rank=1, alpha=1.0, only="q_proj"),
}
EXACT = ServeConfig(compute="fp32", exact=True, context_tokens=96, requests=8, pages=48)
FAST = ServeConfig(compute="fp32", context_tokens=96, requests=8, pages=48)
DRAWN = Sampling(max_tokens=10, seed=4, ignore_eos=True, top_logprobs=2)
SCORED = Sampling(max_tokens=1, seed=4, ignore_eos=True, prompt_logprobs=True)
LENGTHS = (1, 40, 17, 5, 33, 2, 20, 8)
PROMPTS = [[(7 * n + 3 * k) % low_rank.VOCAB for k in range(length)] for n, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model, and adapters beside it."""
    folder = tmp_path_factory.mktemp("model")
    low_rank.write_model(folder / "base")
    for name, adapter in KINDS.items():
        write_adapter(folder / "adapters" / name, adapter)
    return folder


def opened(root, serve=EXACT, **loaded):
    """An engine with some adapters, each the folder of one kind."""
    engine = open_engine(root / "base", serve)
    for name, kind in loaded.items():
        engine.adapters.load(name, root / "adapters" / kind)
    return engine


def answered(engine, asked):
    """What is told of each (prompt, adapter), all of them asked at once."""
    for number, (prompt, adapter) in enumerate(asked):
        engine.add(Request(id=number, prompt=tuple(prompt), sampling=DRAWN, adapter=adapter))
    told = {number: [] for number in range(len(asked))}
    while not engine.is_idle:
        for news in engine.step():
            told[news.request] += news.tokens
    engine.pages.check([])
    return [told[number] for number in range(len(asked))]


def scores(engine, adapter=""):
    """Log-probabilities of every prompt's tokens."""
    answers = generate(engine, PROMPTS, SCORED, adapter=adapter)
    return torch.tensor([told.logprob for answer in answers for told in answer.prompt])


def largest(one, other):
    return float((one - other).abs().max())


@pytest.mark.parametrize("serve", [EXACT, FAST], ids=["exact", "fast"])
def test_an_adapter_says_what_the_merged_weights_say(root, tmp_path, serve):
    engine = opened(root, serve, low="low", high="high", queries="queries")
    plain = scores(engine)
    for name, adapter in KINDS.items():
        merged = open_engine(low_rank.write_model(tmp_path / name, adapter), serve)
        found = scores(engine, name)
        assert largest(found, scores(merged)) < 2e-3, name
        assert largest(found, plain) > 0.1, name
    assert largest(scores(engine), plain) < (1e-5 if serve is FAST else 1e-30)


def test_eight_in_a_batch_equal_each_alone(root):
    assert_eight_equal_each_alone(root)


def assert_eight_equal_each_alone(root):
    asked = list(zip(PROMPTS, ["", "low", "high", "queries", "low", "high", "", "low"], strict=True))
    alone = [answered(opened(root, low="low", high="high", queries="queries"), [one])[0] for one in asked]
    chunked = replace(EXACT, step_tokens=13, pages=8)
    for serve in (EXACT, chunked):
        engine = opened(root, serve, low="low", high="high", queries="queries")
        assert answered(engine, asked) == alone
        assert answered(engine, asked[::-1]) == alone[::-1]  # with their prompts in the cache
    assert len({told[-1].logprob for told in alone}) == 8
    versions = {told[0].version for told in alone}
    assert len(versions) == 4
    assert sum("+" in version for version in versions) == 3


@pytest.mark.parametrize("joined", [0, 256])
def test_in_fast_mode_eight_are_each_alone_but_for_rounding(root, joined):
    with mock.patch.object(computing, "MOST_JOINED", joined):
        assert far_from_alone(root) < 1e-3


def far_from_alone(root):
    """Of the first tokens, which follow the same ones."""
    asked = list(zip(PROMPTS, ["", "low", "high", "queries", "low", "high", "", "low"], strict=True))
    engine = opened(root, FAST, low="low", high="high", queries="queries")
    alone = [answered(engine, [one])[0][0] for one in asked]
    fresh = opened(root, FAST, low="low", high="high", queries="queries")
    pairs = [
        (dict(told[0].top)[token], value)
        for told, one in zip(answered(fresh, asked), alone, strict=True)
        for token, value in one.top
        if token in dict(told[0].top)
    ]
    assert len(pairs) >= 8
    return max(abs(one - other) for one, other in pairs)


def test_an_adapter_of_the_same_name_reads_no_keys_of_the_one_before(root):
    assert_no_stale_keys(root)


def assert_no_stale_keys(root):
    engine = opened(root, tone="low")
    prompt = PROMPTS[1]
    ((*_, before),) = answered(engine, [(prompt, "tone")])
    engine.adapters.load("tone", root / "adapters" / "high")
    (fresh,) = generate(engine, [prompt], DRAWN, adapter="tone")
    assert fresh.cached_tokens == 0
    assert list(fresh.tokens) == answered(opened(root, tone="high"), [(prompt, "tone")])[0]
    engine.adapters.load("tone", root / "adapters" / "low")  # the same content again: its keys are good
    (again,) = generate(engine, [prompt], DRAWN, adapter="tone")
    assert again.cached_tokens == 32
    assert again.tokens[-1] == before


@pytest.mark.long
def test_adapters_change_a_hundred_times_under_load(root):
    kinds = list(KINDS)
    expected = {kind: answered(opened(root, tone=kind), [(prompt, "tone") for prompt in PROMPTS]) for kind in kinds}
    engine = opened(root, tone=kinds[0])
    asked, told = {}, {}
    for turn in range(100):
        kind = kinds[(turn + 1) % 3]
        if turn % 10 == 9:
            engine.adapters.unload("tone")
            with pytest.raises(ConfigError, match="adapter = 'tone' is not loaded; none is"):
                engine.add(Request(id=999, prompt=(1,), adapter="tone"))
        engine.adapters.load("tone", root / "adapters" / kind)
        engine.add(Request(id=turn, prompt=tuple(PROMPTS[turn % 8]), sampling=DRAWN, adapter="tone"))
        asked[turn], told[turn] = kind, []
        for _ in range(2 if turn < 99 else 1000):
            for news in engine.step():
                told[news.request] += news.tokens
            if engine.is_idle:
                break
    assert engine.is_idle
    for turn, kind in asked.items():
        assert told[turn] == expected[kind][turn % 8], turn
    engine.pages.check([])
    assert len(engine.model._forward.adapters.numbers) == 1  # what nobody uses any more is gone


def differing(root, folder):
    """Log-probabilities with other bits among others than alone, with an adapter and without."""
    engine = open_engine(root / "base", EXACT)
    texts = [[(n + 5 * k) % low_rank.VOCAB for k in range(48)] for n in range(3)]
    write_adapters(folder, low_rank.shape())
    plain = generate(engine, [text[:-1] for text in texts], SCORED)
    trained = -torch.tensor([[told.logprob for told in answer.prompt] for answer in plain])
    found = beside_adapters(engine, texts, folder)
    with_adapter = compare("", losses_of(found.alone), found.adapted)
    without = compare("", trained, found.plain)
    assert with_adapter.compared == without.compared == 3 * 46
    assert largest(trained, losses_of(found.alone)) > 0.1
    return with_adapter.differing, without.differing


def test_the_proof_counts_what_differs_beside_others(root, tmp_path):
    assert differing(root, tmp_path) == (0, 0)
    with row_of_the_neighbour():
        assert min(differing(root, tmp_path)) > 0


@pytest.mark.parametrize("serve", [EXACT, FAST], ids=["exact", "fast"])
def test_adapters_stay_when_weights_change(root, tmp_path, serve):
    engine, steward = open_both(root / "base", serve)
    engine.adapters.load("low", root / "adapters" / "low")
    before = scores(engine, "low")
    steward.swap(low_rank.write_model(tmp_path, KINDS["high"]))
    fresh = open_engine(tmp_path, serve)
    fresh.adapters.load("low", root / "adapters" / "low")
    assert torch.equal(scores(engine, "low"), scores(fresh, "low"))
    assert largest(scores(engine, "low"), before) > 0.1


def scale_forgotten():
    return mock.patch.object(Adapter, "scale", return_value=1.0)


def row_of_the_neighbour():
    inner = computing.runs_of

    def runs_of(parts):
        shifted = [(run.slot, max(0, run.rows.start - 2), run.rows.stop - 2) for run in inner(parts)]
        return tuple(computing.AdapterRows(slot, slice(start, stop)) for slot, start, stop in shifted if stop > start)

    return mock.patch.object(computing, "runs_of", runs_of)


def keys_known_by_name():
    inner = request_state.root_key

    def root_key(version, adapter, salt):
        return inner(version, "tone" if adapter else "", salt)

    return mock.patch.object(request_state, "root_key", root_key)


def products_of_any_order():
    return mock.patch.object(computing, "product", lambda left, right, cells=1: left @ right)


def test_a_planted_stale_key_is_seen(root):
    with keys_known_by_name(), pytest.raises(AssertionError):
        assert_no_stale_keys(root)


@pytest.mark.parametrize("plant", [row_of_the_neighbour, products_of_any_order])
def test_a_planted_dependence_on_others_is_seen(root, plant):
    with plant(), pytest.raises(AssertionError):
        assert_eight_equal_each_alone(root)


def test_a_planted_addition_to_others_is_seen(root):
    with mock.patch.object(torch.Tensor, "masked_fill", lambda self, mask, value: self):
        try:
            far = far_from_alone(root)
        except AssertionError:  # no token in common
            far = 1.0
    assert far > 0.1


def test_a_planted_wrong_scale_is_seen(root, tmp_path):
    with scale_forgotten():
        found = scores(opened(root, low="low"), "low")
    merged = open_engine(low_rank.write_model(tmp_path, KINDS["low"]), EXACT)
    assert largest(found, scores(merged)) > 0.01


def test_weights_of_few_bits_keep_their_adapters(root):
    serve = ServeConfig(compute="bf16", quantize="int8", context_tokens=96, pages=48)
    plain = ServeConfig(compute="bf16", context_tokens=96, pages=48)
    assert largest(scores(opened(root, serve, low="low"), "low"), scores(opened(root, plain, low="low"), "low")) < 0.5
    assert largest(scores(opened(root, serve, low="low"), "low"), scores(opened(root, plain))) > 0.5


def test_what_cannot_be_loaded_changes_nothing(root, tmp_path):
    engine = opened(root, tone="low")
    before = engine.adapters.all
    write_adapter(tmp_path, KINDS["low"])
    (tmp_path / CONFIG).write_text((tmp_path / CONFIG).read_text().replace('"none"', '"all"'))
    for name in ("tone", "other"):
        with pytest.raises(ConfigError, match="bias"):
            engine.adapters.load(name, tmp_path)
    with pytest.raises(ConfigError, match="adapter = 'tune' is not loaded; did you mean 'tone'"):
        engine.adapters.unload("tune")
    with pytest.raises(ConfigError, match="did you mean 'tone'"):
        generate(engine, [[1]], DRAWN, adapter="ton")
    assert engine.adapters.all == before
    assert engine.is_idle
    engine.adapters.unload("tone")
    with pytest.raises(ConfigError) as told:  # as where it goes while a request comes
        engine.add(Request(id=1, prompt=(1,), adapter="tone"))
    refused = make_backend_refusal(told.value)
    assert (refused.status, refused.code) == (404, "model_not_found")


def test_folders_are_named(root, tmp_path):
    names = [name for name, _ in folders_of(str(root / "adapters"))]
    assert names == sorted(KINDS)
    low = root / "adapters" / "low"
    assert folders_of(f"{low}, mine={low}") == (("low", low), ("mine", low))
    for text, said in (
        (str(tmp_path), "holds no adapter_config.json"),
        (f"all={root / 'adapters'}", "holds no adapter_config.json"),
        (f"{low},{low}", "two adapters called 'low'"),
    ):
        with pytest.raises(ConfigError, match=said):
            folders_of(text)
    with pytest.raises(ConfigError, match="has the name of the model"):
        check_names("low", ["low"])


def _serve(rank, world, folder, cases):
    """On so many ranks, in each case, what every adapter's answers are; or what is told where one is refused."""
    return [_case(rank, world, Path(folder), *case) for case in cases]


def _case(rank, world, folder, exact, plant, kinds):
    tp = dist.group.WORLD if world > 1 else None
    serve = ServeConfig(compute="fp32", exact=exact, context_tokens=96, pages=48, tp=world)
    with PLANTED[plant]():
        if rank > 0:
            with _other_content() if plant == "other content" else nullcontext():
                follow(load_rank(folder / "base", serve, rank, tp, Device("cpu")).forward, tp, Device("cpu"))
            return None
        engine = open_engine(folder / "base", serve, tp=tp)
        try:
            for name in kinds:
                engine.adapters.load(name, folder / "adapters" / name)
            found = [scores(engine, name) for name in kinds]
            engine.adapters.unload(kinds[0])
            return found + [scores(engine, name) for name in kinds[1:]]
        except UserError as error:
            return str(error)
        finally:
            engine.end()


def _other_content():
    """A rank that finds other files than rank 0 did."""

    def read(folder, linears):
        found = read_adapter(folder, linears)
        return Adapter(parts=found.parts, is_stabilized=found.is_stabilized, version="f" * 16)

    return mock.patch.object(placing, "read_adapter", read)


def _cut(field):
    """A rank other than the first takes the first one's part of a factor."""
    inner = placing.sites_of

    def sites(served, tp):
        for name, site in inner(served, tp):
            part = getattr(site, field)
            first = slice(0, part.stop - part.start)
            yield name, replace(site, **{field: first})

    return lambda: mock.patch.object(placing, "sites_of", sites)


def _not_summed():
    return mock.patch.object(computing.Additions, "_over_ranks", lambda self, inner: inner)


PLANTED = {
    "nothing": nullcontext,
    "other content": nullcontext,
    "inputs of the first rank": _cut("inputs"),
    "outputs of the first rank": _cut("outputs"),
    "not summed": _not_summed,
}


@pytest.mark.multiproc
def test_ranks_that_share_a_model_share_its_adapters(pool, root):
    wrong = ("inputs of the first rank", "outputs of the first rank", "not summed")
    all_kinds = tuple(KINDS)
    cases = [(True, "nothing", all_kinds), (False, "nothing", all_kinds)]
    cases += [(True, plant, all_kinds[:1]) for plant in (*wrong, "other content")]
    (alone,) = _serve(0, 1, root, cases[:1])
    two, fast, *planted, refused = pool.run(2, _serve, str(root), cases)[0]
    assert len(alone) == 5
    for mine, same, near in zip(alone, two, fast, strict=True):
        assert torch.equal(mine, same)
        assert largest(mine, near) < 2e-3
    for plant, found in zip(wrong, planted, strict=True):
        assert largest(alone[0], found[0]) > 0.01, plant
    assert "is not the same on every rank" in refused
