"""The server says the log-probabilities of training, to the bit: on layouts of both, however it comes to a token."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import small
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.resolution.resolve import resolve
from superstep.serve.build_engine import open_engine
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.config import ServeConfig
from superstep.serve.drafting.speculate import Speculation
from superstep.serve.load_rank import load_rank
from superstep.train.proof.prove_exact import write_bits
from superstep.train.proof.prove_serving import (
    KnownTexts,
    answers,
    batch_of,
    compare,
    losses_in_training,
    serve_logprobs,
    ways,
)

pytestmark = pytest.mark.multiproc

TOKENS = 64
TEXTS = 8


def config(*, compute="fp32", experts=False, **plan):
    found = small.config(layers=2, compute=compute, **{"microbatch": 2, **plan})
    model = found.model
    if experts:
        model = replace(model, experts=4, experts_per_token=2, router="dropless", ffn=24, shared_experts=1)
    return replace(
        found,
        model=replace(model, kv_heads=4),
        train=replace(found.train, lr=0.5),
        data=replace(found.data, sequence_tokens=TOKENS),
        numerics=replace(found.numerics, exact=True, exact_chunks=8),
    )


def _write(rank, world, run, folder):
    batches = small.batches(tokens=TOKENS)
    return write_bits(World(rank, world, Device("cpu")), run, batches, Path(folder), stop=2)


KINDS = {
    "fp32": {},
    "bf16": {"compute": "bf16"},
    "experts": {"experts": True},
}


@pytest.fixture(scope="module")
def checkpoint(pool, tmp_path_factory):
    """The folder of a trained model of each kind, as a server opens it."""
    made = {}

    def folder(kind):
        if kind not in made:
            root = tmp_path_factory.mktemp("trained")
            run = resolve(config(**KINDS[kind]))
            made[kind] = Path(pool.run(1, _write, run, str(root))[0])
            (made[kind] / "config.json").write_text(json.dumps(to_hf_config(run.shape)))
        return made[kind]

    return folder


def prompts():
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 17, 33, 63, 48, 5, 31]
    return [torch.randint(0, small.VOCAB, (n,), generator=generator).tolist() for n in lengths]


def _serve(rank, world, folder, compute, names, texts, small=""):
    """What a server of this many tensor-parallel ranks says, each way: texts first, where there are none yet."""
    tp = dist.group.WORLD if world > 1 else None
    found, engines = [], []
    for way in [way for way in ways(TOKENS) if way.name in names]:
        serve = way.of(ServeConfig(compute=compute, exact=True, tp=world, context_tokens=TOKENS))
        serve = replace(serve, speculate=small or serve.speculate)
        if rank > 0:
            for _ in range(way.engines):
                loaded = load_rank(Path(folder), serve, rank, tp, Device("cpu"))
                follow(loaded.forward, tp, Device("cpu"), loaded.party, loaded.small)
            continue

        def opened(serve=serve, way=way):
            engines.append(open_engine(Path(folder), serve, tp=tp))
            if way.guesses == "known" and not small:
                engines[-1].speculation = Speculation(KnownTexts(texts), serve.draft_tokens)
            return engines[-1]

        if texts is None:
            drawn = answers(opened(), way, prompts(), TOKENS)
            found.append([[*p, *a.ids] for p, a in zip(prompts(), drawn, strict=True)])
        else:
            found.append(serve_logprobs(opened, way, texts, prompts()))
        engines[-1].pages.check([])
        engines[-1].end()
        if way.guesses:
            now = engines[-1].counters
            least = 0.9 if small else 0.3 if way.guesses == "known" else 0
            assert least * now.drafted_tokens <= now.accepted_tokens, now
            assert now.accepted_tokens < now.drafted_tokens or small
    return found


def _train(rank, world, run, folder, texts):
    batch = batch_of(texts)
    return losses_in_training(World(rank, world, Device("cpu")), run, Path(folder), [batch])[0]


ALL = tuple(way.name for way in ways(TOKENS))
LAYOUTS = {
    1: [{}],
    2: [{"dp": 2, "zero": 3}, {"tp": 2}, {"cp": 2}, {"pp": 2, "schedule": "zb-h1"}],
    4: [{"cp": 2, "tp": 2}],
}


SERVED = {
    "fp32": {1: ALL[1:2], 2: (ALL[1], ALL[8]), 4: ALL[9:10]},
    "bf16": {1: (*ALL[1:5], ALL[7]), 2: ALL[9:]},
    "experts": {1: ALL[2:5], 2: (ALL[7], *ALL[9:])},
}
"""Ways for each number of ranks. A step of several ranks takes long, so each way is tried on some; all of them in fp32
on one rank are in ``test_prove_served``."""


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_bits_of_training_however_it_is_served(pool, checkpoint, kind):
    layouts = LAYOUTS if kind == "fp32" else {1: LAYOUTS[1], 4: LAYOUTS[4]}
    assert_same_bits(pool, checkpoint, kind, SERVED[kind], layouts)


def test_a_token_has_the_bits_of_training_on_two_ranks_too(pool, checkpoint):
    assert_same_bits(pool, checkpoint, "bf16", {1: ALL[2:4], 2: ALL[9:10]}, {1: LAYOUTS[1], 2: LAYOUTS[2][1:2]})


def test_ranks_that_share_a_small_model_guess_what_they_say(pool, checkpoint):
    """A model as its own small one, on two ranks: the bits are those of one rank, and nearly every guess stands."""
    folder, name = str(checkpoint("fp32")), ALL[1:2]
    (texts,) = pool.run(1, _serve, folder, "fp32", name, None)[0]
    (plain,) = pool.run(1, _serve, folder, "fp32", name, texts)[0]
    (guessed,) = pool.run(2, _serve, folder, "fp32", ALL[6:7], texts, folder)[0]
    assert guessed == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_bits_of_training_in_every_way_on_every_server(pool, checkpoint, kind):
    assert_same_bits(pool, checkpoint, kind, {1: ALL, 2: ALL, 4: ALL}, LAYOUTS)


def assert_same_bits(pool, checkpoint, kind, servers, layouts):
    folder, compute = str(checkpoint(kind)), KINDS[kind].get("compute", "fp32")
    (texts,) = pool.run(1, _serve, folder, compute, ALL[1:2], None)[0]
    assert len({token for text in texts for token in text}) > 20
    losses = [
        pool.run(world, _train, resolve(config(**KINDS[kind], **plan)), folder, texts, timeout_s=100)[0]
        for world, plans in layouts.items()
        for plan in plans
    ]
    for other in losses[1:]:
        assert torch.equal(losses[0], other)
    for tp, names in servers.items():
        served = pool.run(tp, _serve, folder, compute, names, texts, timeout_s=200)[0]
        for name, told in zip(names, served, strict=True):
            found = compare(name, losses[0], told)
            assert found.differing == 0, (tp, found)
            assert found.compared >= sum(TOKENS - len(p) for p in prompts())
