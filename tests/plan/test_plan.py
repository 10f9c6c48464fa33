"""The plan: TOML there and back, the numbering of ranks, the split into stages, and what is filled in."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate, chain, combinations, pairwise, product
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import examples
from superstep.errors import ConfigError
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.config_io import read_config, table_entry, write_config
from superstep.plan.mesh import AXES, FAMILIES, MeshShape
from superstep.plan.model.hf_config import from_hf_config, to_hf_config
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.fill_plan import divisors
from superstep.plan.resolution.resolve import resolve
from superstep.plan.sharding.stages import even_split, place


def values_of(hint) -> st.SearchStrategy:
    """Anything a field of this type may hold."""
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{field.name: values_of(hints[field.name]) for field in fields(hint)})
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of(map(values_of, typing.get_args(hint)))
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(typing.get_args(hint))
    if (entry := table_entry(hint)) is not None:
        return st.dictionaries(st.text(max_size=4), values_of(entry), max_size=3).map(
            lambda d: tuple(sorted(d.items()))
        )
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0]), max_size=3).map(tuple)
    return {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        type(None): st.none(),
    }[hint]


@examples(60)
@given(config=values_of(RunConfig))
def test_a_config_survives_toml(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(write_config(config), encoding="utf-8", newline="")
    assert read_config(path) == config


def read(tmp_path, text: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return read_config(path)


def test_what_a_file_leaves_out_keeps_its_default(tmp_path):
    assert read(tmp_path, "") == RunConfig()
    assert read(tmp_path, "[plan]\npp = 2\n") == RunConfig(plan=PlanConfig(pp=2))


def test_a_whole_number_may_stand_for_a_number_and_a_string_for_a_list_of_one(tmp_path):
    config = read(tmp_path, '[train]\nlr = 1\n[data]\ncorpus = "a.txt"\n')
    assert config.train.lr == 1.0
    assert type(config.train.lr) is float
    assert config.data.corpus == ("a.txt",)


@examples(50)
@given(degrees=st.tuples(*[st.integers(1, 4)] * 4))
def test_every_rank_has_one_place_and_every_place_one_rank(degrees):
    mesh = MeshShape(**dict(zip(AXES, degrees, strict=True)))
    places = [mesh.at(rank) for rank in range(mesh.world)]
    assert len(set(places)) == mesh.world
    assert [mesh.rank(at) for at in places] == list(range(mesh.world))


def test_ranks_count_tp_fastest_and_pp_slowest():
    mesh = MeshShape(pp=2, dp=2, cp=1, tp=2)
    at = [(c.pp, c.dp, c.cp, c.tp) for c in map(mesh.at, range(8))]
    assert at == list(product(range(2), range(2), range(1), range(2)))
    assert mesh.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@examples(50)
@given(degrees=st.tuples(*[st.integers(1, 3)] * 4))
def test_the_groups_of_an_axis_share_out_the_ranks(degrees):
    mesh = MeshShape(**dict(zip(AXES, degrees, strict=True)))
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(chain.from_iterable(groups)) == list(range(mesh.world))
        for group in groups:
            places = [mesh.at(rank) for rank in group]
            assert [getattr(at, axis) for at in places] == list(range(mesh.degree(axis)))
            assert len({replace(at, **{axis: 0}) for at in places}) == 1


@st.composite
def meshes(draw):
    """Any small mesh, with experts and replicas that its ranks can have."""
    pp, dp, cp, tp = (draw(st.sampled_from(degrees)) for degrees in ([1, 2], [1, 2, 3, 4], [1, 2, 4], [1, 2, 3]))
    ep = draw(st.sampled_from(divisors(dp * cp * tp)))
    replicas = draw(st.sampled_from([n for n in divisors(dp * cp) if dp * cp * tp // ep % n == 0]))
    return MeshShape(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, replicas=replicas)


def held_by(mesh, family, rank):
    """Which parameters of a family a rank has, before they are sharded: its stage, and its part of each."""
    at = mesh.at(rank)
    return at.pp, at.tp if family != "experts" else mesh.expert_place(at)


@examples(100)
@given(meshes())
def test_groups_partition_the_ranks_ascending_and_are_as_large_as_the_mesh_says(mesh):
    sizes = [(mesh.expert_groups(), mesh.ep), (mesh.sequence_groups(), mesh.cp * mesh.tp)]
    for family in FAMILIES:
        sizes += [(mesh.shard_groups(family), mesh.shards(family)), (mesh.replica_groups(family), mesh.replicas)]
    for groups, size in sizes:
        assert sorted(chain.from_iterable(groups)) == list(range(mesh.world))
        assert {len(group) for group in groups} == {size}
        assert all(group == sorted(group) for group in groups)


@examples(100)
@given(meshes())
def test_each_copy_has_every_shard_once_and_replicas_have_the_same(mesh):
    for family in FAMILIES:
        shard = {rank: k for group in mesh.shard_groups(family) for k, rank in enumerate(group)}
        for group in mesh.shard_groups(family) + mesh.replica_groups(family):
            assert len({held_by(mesh, family, rank) for rank in group}) == 1
        for group in mesh.replica_groups(family):
            assert len({shard[rank] for rank in group}) == 1
        # A rank of each copy for every shard: the two kinds of groups cross in one rank.
        for copy, alike in product(mesh.shard_groups(family), mesh.replica_groups(family)):
            same = held_by(mesh, family, copy[0]) == held_by(mesh, family, alike[0])
            assert len(set(copy) & set(alike)) == same


@examples(100)
@given(meshes())
def test_a_group_of_experts_has_all_of_them_and_one_of_a_sequence_all_its_tokens(mesh):
    for group in mesh.expert_groups():
        assert [held_by(mesh, "experts", rank)[1] for rank in group] == list(range(mesh.ep))
        assert len({mesh.at(rank).pp for rank in group}) == 1
    for group in mesh.sequence_groups():
        places = [mesh.at(rank) for rank in group]
        assert [(at.cp, at.tp) for at in places] == list(product(range(mesh.cp), range(mesh.tp)))
        assert len({(at.pp, at.dp) for at in places}) == 1


def test_groups_are_those_of_the_drawings():
    mesh = MeshShape(dp=4, replicas=2)
    assert (mesh.shard_groups("dense"), mesh.replica_groups("dense")) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    mesh = MeshShape(dp=2, cp=2, tp=2, ep=4)
    assert mesh.expert_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.shard_groups("experts") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.shard_groups("dense") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh.sequence_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def loads(work, counts):
    """The work of each run."""
    ends = list(accumulate(counts))
    return [sum(work[end - count : end]) for count, end in zip(counts, ends, strict=True)]


@examples(150)
@given(work=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_no_split_has_a_smaller_largest_stage_or_is_more_even(work, data):
    """Against every other split there is."""
    stages = data.draw(st.integers(1, len(work)))
    cuts = combinations(range(1, len(work)), stages - 1)
    every = [tuple(b - a for a, b in pairwise((0, *cut, len(work)))) for cut in cuts]

    def rank(counts):
        found = loads(work, counts)
        return max(found), sum(load * load for load in found), counts

    assert even_split(work, stages) == min(every, key=rank)


def test_a_large_model_is_split_as_a_small_one():
    work = [0, *[10] * 126, 7]
    counts = even_split(work, 16)
    assert sum(counts) == 128
    assert max(loads(work, counts)) == 80


@examples(50)
@given(layers=st.integers(1, 40), stages=st.integers(1, 16))
def test_blocks_alone_are_shared_out_evenly(layers, stages):
    """With a head that is nearly free, no stage has two blocks more than another."""
    work = [0, *[100] * max(layers, stages), 1]
    blocks = [load // 100 for load in loads(work, even_split(work, stages))]
    assert min(blocks) >= 1
    assert max(blocks) - min(blocks) <= 1


def test_what_is_over_goes_behind_the_first_and_before_the_head():
    assert even_split([0, *[100] * 6, 1], 4) == (2, 2, 2, 2)
    assert even_split([0, *[100] * 7, 1], 4) == (3, 2, 2, 2)
    # A head as large as two blocks stands for two.
    assert even_split([0, *[100] * 6, 200], 4) == (3, 2, 2, 1)


def test_stages_go_around_the_ranks_or_down_and_up():
    assert place("1f1b", pp=3, chunks=1) == (0, 1, 2)
    assert place("interleaved", pp=3, chunks=2) == (0, 1, 2, 0, 1, 2)
    assert place("zb-v", pp=3, chunks=2) == (0, 1, 2, 2, 1, 0)


def resolved(*, batch: int = 16, layers: int = 4, world: int | None = None, **plan):
    config = RunConfig(
        model=ModelConfig(layers=layers), train=TrainConfig(batch_sequences=batch), plan=PlanConfig(**plan)
    )
    return resolve(config, world)


def test_stages_are_the_units_that_the_plan_says():
    assert resolved(pp=2, stages=(5, 1)).plan.stages == ((0, 1, 2, 3, 4), (5,))
    # The demo's head has the work of a block.
    assert [len(stage) for stage in resolved(pp=2).plan.stages] == [4, 2]
    assert resolved(pp=2).config.plan.stages is None


def test_resolve_fills_what_is_automatic():
    found = resolved(pp=2, world=4)
    assert (found.config.plan.dp, found.config.plan.schedule) == (2, "1f1b")
    assert found.config.plan.microbatch == 2
    assert found.plan.microbatches == 4
    assert resolved(pp=2, chunks=2).plan.schedule == "interleaved"
    assert resolved().plan.microbatch == 16


def test_resolving_again_changes_nothing():
    once = resolved(pp=2, chunks=2, world=4)
    assert resolve(once.config, 4) == once


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("1f1b", 1, 16),
        ("gpipe", 1, 16),
        ("interleaved", 2, 4),
        ("breadth-first", 2, 16),
        ("zb-h1", 1, 16),
        ("zb-v", 2, 16),
    ],
)
def test_the_group_is_automatic(schedule, chunks, expected):
    """The smallest that works for interleaving, also where pp does not divide the microbatches."""
    found = resolved(pp=3, layers=6, chunks=chunks, schedule=schedule, microbatch=1)
    assert found.plan.microbatch_group == expected


def test_microbatches_are_whole_and_give_every_pipeline_rank_work():
    for batch, pp, dp in product([8, 12, 16, 48], [1, 2, 4], [1, 2, 4]):
        plan = resolved(batch=batch, pp=pp, dp=dp).plan
        assert plan.microbatches * plan.microbatch * dp == batch
        assert plan.microbatches >= (2 * pp if pp > 1 else 1) or plan.microbatch == 1


def test_a_tied_head_reads_the_embedding():
    config = RunConfig(model=ModelConfig(layers=2, tied=True))
    assert resolve(config).plan.params == ((0,), (1,), (2,), (3, 0))
    assert resolve(RunConfig(model=ModelConfig(layers=2, tied=False))).plan.params == ((0,), (1,), (2,), (3,))


def test_recomputation_covers_the_blocks():
    assert resolved(layers=3).plan.recomputed == (False, True, True, True, False)


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_survives_hugging_face_json(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_hf_config(SHAPES[name])), encoding="utf-8")
    assert from_hf_config(path) == SHAPES[name]
    assert shape_of(ModelConfig(name=str(path))) == SHAPES[name]


ROUTED = [
    {"router": "switch", "capacity_factor": 1.5},
    {"router": "top2", "qk_norm": True},
    {"router": "noisy-topk", "experts_per_token": 4, "z_weight": 1e-3},
    {"router": "dropless", "shared_experts": 1},
    {"router": "dropless", "renormalise": False},
    {"router": "dropless", "renormalise": False, "qk_norm": True},
]


@pytest.mark.parametrize("fields", ROUTED, ids=str)
def test_a_mixture_survives_json_whatever_its_router(fields, tmp_path):
    shape = shape_of(ModelConfig(name="demo", experts=8, **fields))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_hf_config(shape)), encoding="utf-8")
    assert replace(from_hf_config(path), family="llama") == shape


def test_a_router_brings_its_own_number_of_experts_and_its_capacity():
    def moe(**fields):
        return shape_of(ModelConfig(name="demo-moe", **fields)).moe

    assert (moe().router, moe().experts, moe().experts_per_token, moe().capacity_factor) == ("dropless", 8, 2, None)
    switch = moe(router="switch", z_weight=1e-3)
    assert (switch.experts, switch.experts_per_token, switch.renormalise) == (8, 1, False)
    assert (switch.capacity_factor, switch.z_weight) == (1.25, 1e-3)
    # Fedus 2021, eq. 3: 64 / 8 tokens and a quarter more; a fraction of a place is a place.
    assert (switch.capacity(64), switch.capacity(66)) == (10, 11)
    assert moe(router="top2", capacity_factor=1.0).capacity(64) == 16
    assert moe(router="noisy-topk").capacity(64) is None


def test_a_changed_width_brings_its_head_dim_and_heads_their_kv_heads():
    shape = shape_of(ModelConfig(name="demo", width=192, heads=6))
    assert (shape.head_dim, shape.kv_heads) == (32, 2)
    assert shape_of(ModelConfig(name="demo", heads=1)).kv_heads == 1
    assert shape_of(ModelConfig(name="qwen3-0.6b", width=512)).head_dim == 128


@examples(50)
@given(st.integers(1, 200))
def test_divisors_divide(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_a_config_error_ends_a_run_with_status_2():
    assert ConfigError("x").exit_status == 2
