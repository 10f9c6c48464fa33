"""The server says the log-probabilities of training, to the bit: on layouts of both, however it comes to a token."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import small
from superstep.numerics import invariant_attention
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.resolve import resolve
from superstep.runtime.device import Device
from superstep.runtime.launch import World
from superstep.serve import engine as engine_module
from superstep.serve.compute.ranks import follow
from superstep.serve.load import ServeConfig, load_rank, open_engine
from superstep.train.proof.exact import write_bits
from superstep.train.proof.served import answers, batch_of, compare, told_of, trained_losses, ways

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


def _serve(rank, world, folder, compute, names, texts, plant):
    """What a server of this many tensor-parallel ranks says, each way: texts first, where there are none yet."""
    tp = dist.group.WORLD if world > 1 else None
    found = []
    with PLANTED[plant]():
        for way in [way for way in ways(TOKENS) if way.name in names]:
            serve = way.of(ServeConfig(compute=compute, exact=True, tp=world, context_tokens=TOKENS))
            if rank > 0:
                follow(load_rank(Path(folder), serve, rank, tp, Device("cpu")).forward, tp, Device("cpu"))
                continue
            engine = open_engine(Path(folder), serve, tp=tp)
            if texts is None:
                drawn = answers(engine, way, prompts(), TOKENS)
                found.append([[*p, *a.ids] for p, a in zip(prompts(), drawn, strict=True)])
            else:
                found.append(told_of(engine, way, texts, prompts()))
            engine.pages.check([])
            engine.end()
    return found


def _train(rank, world, run, folder, texts):
    batch = batch_of(texts)
    return trained_losses(World(rank, world, Device("cpu")), run, Path(folder), [batch])[0]


ALL = tuple(way.name for way in ways(TOKENS))
LAYOUTS = {
    1: [{}],
    2: [{"dp": 2, "zero": 3}, {"tp": 2}, {"cp": 2}, {"pp": 2, "schedule": "zb-h1"}],
    4: [{"cp": 2, "tp": 2}],
}


SERVED = {
    "fp32": {1: ALL, 2: (ALL[1], ALL[5]), 4: ALL[5:6]},
    "bf16": {1: ALL[1:5], 2: ALL[5:]},
    "experts": {1: ALL[1:5], 2: ALL[5:]},
}
"""Ways for each number of ranks. A step of several ranks takes long, so each way is tried on some."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_bits_of_training_however_it_is_served(pool, checkpoint, kind):
    assert_same_bits(pool, checkpoint, kind, SERVED[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_bits_of_training_in_every_way_on_every_server(pool, checkpoint, kind):
    assert_same_bits(pool, checkpoint, kind, {1: ALL, 2: ALL, 4: ALL})


def assert_same_bits(pool, checkpoint, kind, servers):
    folder, compute = str(checkpoint(kind)), KINDS[kind].get("compute", "fp32")
    (texts,) = pool.run(1, _serve, folder, compute, ALL[1:2], None, "nothing")[0]
    assert len({token for text in texts for token in text}) > 20
    losses = [
        pool.run(world, _train, resolve(config(**KINDS[kind], **plan)), folder, texts, timeout_s=100)[0]
        for world, plans in LAYOUTS.items()
        for plan in plans
    ]
    for other in losses[1:]:
        assert torch.equal(losses[0], other)
    for tp, names in servers.items():
        served = pool.run(tp, _serve, folder, compute, names, texts, "nothing", timeout_s=200)[0]
        for name, told in zip(names, served, strict=True):
            found = compare(name, losses[0], told)
            assert found.differing == 0, (tp, found)
            assert found.compared >= sum(TOKENS - len(p) for p in prompts())


def _stale_page():
    """A page is known by the wrong key: what a text is given of another."""
    inner = engine_module.schedule

    def schedule(running, waiting, pages, budget, *, version):
        for page in range(pages.count):
            pages.publish(page, b"")
        with mock.patch.object(type(pages), "found", lambda self, keys: [0, 1][: len(list(keys))]):
            return inner(running, waiting, pages, budget, version=version)

    return mock.patch.object(engine_module, "schedule", schedule)


def _rope_in_bf16():
    from superstep.model.rope import Rope

    inner = Rope.tables
    return mock.patch.object(
        Rope, "tables", lambda self, at, dtype: tuple(x.to(dtype) for x in inner(self, at, torch.bfloat16))
    )


def _one_block():
    """All keys of a text in one sum, as a kernel that is not told of blocks has them."""

    def weights(rows, keys, hidden):
        scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(rows.shape[-1] ** -0.5).masked_fill_(hidden, float("-inf"))
        return scores.softmax(-1), torch.ones(())

    return mock.patch.object(invariant_attention, "_weights", weights)


PLANTED = {
    "nothing": mock.MagicMock,
    "a stale page": _stale_page,
    "rope in bf16": _rope_in_bf16,
    "a softmax of its own": _one_block,
}


@pytest.mark.parametrize("plant", [name for name in PLANTED if name != "nothing"])
def test_a_planted_fault_is_seen(pool, checkpoint, plant):
    folder = str(checkpoint("fp32"))
    (texts,) = pool.run(1, _serve, folder, "fp32", ALL[1:2], None, "nothing")[0]
    losses = pool.run(1, _train, resolve(config()), folder, texts)[0]
    names = ("from cached pages",)
    (told,) = pool.run(1, _serve, folder, "fp32", names, texts, plant)[0]
    found = compare(names[0], losses, told)
    assert found.differing > 0, found
    assert found.first is not None
