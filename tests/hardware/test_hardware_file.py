"""Clusters from a word and from a file: what is filled in, what is refused, and that what is written reads back."""

from __future__ import annotations

import ast
import re
import traceback
import typing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import examples
from superstep.errors import ConfigError
from superstep.hardware import catalogue, cluster_file, plausibility
from superstep.hardware.catalogue import CHIPS, chip
from superstep.hardware.chip import Chip, CopyRate, ProductRate, Rate
from superstep.hardware.cluster import Cluster, CollectiveRate
from superstep.hardware.cluster_file import cluster, read_cluster, write_cluster
from superstep.hardware.network import usual_cluster
from superstep.hardware.plausibility import LIMITS, check_cluster

OWN = """
chips = 16
network_bytes_per_s = 25e9

[chip]
name = "mine"
vendor = "me"
year = 2026
flops_per_s = {bf16 = 400e12, fp8 = 800e12}
memory_bytes = 64e9
memory_bytes_per_s = 2e12
cores = 100
link_bytes_per_s = 200e9
domain = 8
source = "measured"
"""


def read(tmp_path, content):
    path = tmp_path / "cluster.toml"
    path.write_text(content, encoding="utf-8", newline="")
    return read_cluster(path)


@pytest.mark.parametrize(
    ("word", "name", "domain", "network_gbit_per_s", "topology"),
    [
        ("128xH100", "H100-SXM", 8, 400, "switched"),
        ("4096xA100-80GB", "A100-80GB-SXM", 8, 200, "switched"),
        (" 16 x V100-16GB ", "V100-16GB-SXM", 8, 50, "cube"),
        ("4*h100-sxm", "H100-SXM", 8, 400, "switched"),
        ("72XGB200", "GB200", 72, 400, "switched"),
        ("144xGB200", "GB200", 72, 400, "switched"),
        ("256xGB200", "GB200", 64, 400, "switched"),
        ("512xv5e", "TPUv5e", 256, 25, "torus"),
        ("96xv5e", "TPUv5e", 256, 25, "torus"),
    ],
)
def test_a_word_stands_for_the_usual_system(word, name, domain, network_gbit_per_s, topology):
    found = cluster(word)
    assert found.chip == CHIPS[name]
    assert found.chips == int(re.match(r"\s*(\d+)", word)[1])
    assert (found.domain, found.topology) == (domain, topology)
    assert found.network_bytes_per_s == network_gbit_per_s * 1e9 / 8
    assert found.link_bytes_per_s == found.chip.link_bytes_per_s


WORDS = [
    ("H100", "cluster = 'H100' is neither a number of chips, '128xH100' say, nor the path of a .toml file."),
    ("-8xH100", "is neither a number of chips"),
    ("8.5xH100", "is neither a number of chips"),
    ("8x", "is neither a number of chips"),
    ("", "is neither a number of chips"),
    ("0xH100", "cluster = '0xH100': chips = 0 must be from 1 to 1e+07."),
    ("12xH100", "chips = 12 is more than one domain of 8 chips and no multiple of it; 8 or 16 would do"),
    ("75xGB200", "chips = 75 is more than one domain of 72 chips and no multiple of it; 72 or 144 would do"),
    ("8xH10O", "chip = 'H10O' is not in the catalogue; did you mean 'H100'?"),
]


@pytest.mark.parametrize(("word", "words"), WORDS)
def test_a_word_is_refused_with_what_would_work(word, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        cluster(word)


def test_a_file_names_a_chip_and_the_rest_is_as_usual(tmp_path):
    assert read(tmp_path, 'chip = "h100"\nchips = 128') == cluster("128xH100")
    slower = read(tmp_path, 'chip = "A100"\nchips = 384\ndomain = 4\nnetwork_bytes_per_s = 6.25e9')
    assert slower == replace(cluster("384xA100"), domain=4, network_bytes_per_s=6.25e9)


def test_a_chip_of_the_catalogue_is_changed_key_by_key(tmp_path):
    found = read(tmp_path, 'chips = 8\n[chip]\nbase = "H100"\nname = "capped"\npower_w = 500\ndomain = 4\n')
    assert found.chip == replace(chip("H100"), name="capped", power_w=500.0, domain=4)
    assert found == replace(usual_cluster(chip("H100"), 8), chip=found.chip, domain=4)
    quicker = read(tmp_path, 'chips = 8\n[chip]\nbase = "H100"\nflops_per_s = {bf16 = 800e12}\n')
    assert quicker.chip.flops_per_s == (("bf16", 800e12),)


def test_a_chip_of_ones_own_lends_its_links(tmp_path):
    found = read(tmp_path, OWN)
    assert (found.domain, found.link_bytes_per_s, found.topology) == (8, 200e9, "switched")
    assert found.chip.peak("fp8") == 800e12
    assert found.chip.peak("fp32") is None
    assert read(tmp_path, "domain = 16\nlink_bytes_per_s = 100e9" + OWN) == replace(
        found, domain=16, link_bytes_per_s=100e9
    )


def test_a_path_is_read(tmp_path):
    (tmp_path / "8xH100.toml").write_text(OWN, encoding="utf-8")
    assert cluster(str(tmp_path / "8xH100.toml")).chip.name == "mine"
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        cluster(str(tmp_path / "none.toml"))


def without(key):
    return "\n".join(line for line in OWN.splitlines() if not line.startswith(f"{key} "))


def with_(key, value):
    assert f"\n{key} = " in OWN
    return re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", OWN)


NAMED = 'chip = "H100"\nchips = 8\n'
FILES = [
    ("chips = [", "is not TOML"),
    ("chips = 8", 'chip is missing; name one of the catalogue, chip = "H100-SXM" say, or write a table [chip].'),
    ('chip = "H100"', "chips is missing; it must be a whole number."),
    ("chip = 100\nchips = 8", "chip = 100 is not valid; it must be the name of a chip."),
    ('chip = "H10O"\nchips = 8', "chip = 'H10O' is not in the catalogue; did you mean 'H100'?"),
    ('chips = 8\n[chip]\nbase = "H10O"', "chip.base = 'H10O' is not in the catalogue; did you mean 'H100'?"),
    ("chips = 8\n[chip]\nbase = 1", "chip.base = 1 is not valid; it must be the name of a chip."),
    ('chips = 8\n[chip]\nbase = "H100"\npower = 500', "unknown key 'chip.power'; did you mean 'power_w'?"),
    (without("chips"), "chips is missing; it must be a whole number."),
    (without("network_bytes_per_s"), "network_bytes_per_s is missing; it must be a number."),
    (without("cores"), "chip.cores is missing; it must be a whole number."),
    (without("domain"), "chip.domain is missing; it must be a whole number."),
    (without("flops_per_s"), "chip.flops_per_s is missing; it must be a table, each of its values a number."),
    (with_("cores", '"many"'), "chip.cores = 'many' is not valid; it must be a whole number."),
    (with_("cores", "12.5"), "chip.cores = 12.5 is not valid; it must be a whole number."),
    (with_("domain", "true"), "chip.domain = True is not valid; it must be a whole number."),
    (with_("chips", "1e3"), "chips = 1000.0 is not valid; it must be a whole number."),
    (with_("flops_per_s", "400e12"), "chip.flops_per_s = 400000000000000.0 is not valid; it must be a table"),
    (
        with_("flops_per_s", "{bf61 = 4e14}"),
        "a key of chip.flops_per_s = 'bf61' is not valid; it must be one of 'fp32'",
    ),
    (with_("flops_per_s", "{bf16 = true}"), "chip.flops_per_s.bf16 = True is not valid; it must be a number."),
    (with_("flops_per_s", "{}"), "chip.flops_per_s is empty; give the rate of at least one format"),
    (NAMED + "chps = 8", "unknown key 'chps'; did you mean 'chips'?"),
    (NAMED + 'topology = "star"', "topology = 'star' is not valid; it must be one of 'switched', 'torus', 'mesh'"),
    (NAMED + "collectives = 3", "collectives = 3 is not valid; it must be a list of tables."),
    (
        NAMED + 'collectives = [{name = "all-reduce", ranks = 8, latency_s = 1e-5}]',
        "collectives[0].bytes_per_s is missing; it must be a number.",
    ),
    (
        NAMED + 'collectives = [{name = "gather", ranks = 8, latency_s = 1e-5, bytes_per_s = 1e9}]',
        "collectives[0].name = 'gather' is not valid; it must be one of 'all-reduce', 'all-gather'",
    ),
    (
        NAMED + 'collectives = [{name = "send", ranks = 0, latency_s = 1e-5, bytes_per_s = 1e9}]',
        "collectives[0].ranks = 0 must be from 1 to 1e+07.",
    ),
    # The wrong unit.
    (NAMED + "network_bytes_per_s = 400", "network_bytes_per_s = 400 must be from 1e+06 to 1e+13 bytes a second"),
    (NAMED + "link_bytes_per_s = 450", "400 Gb/s are 50e9"),
    (NAMED + "link_latency_s = 2", "link_latency_s = 2 must be from 0 to 0.1 seconds (2 microseconds are 2e-6)."),
    (NAMED + "network_latency_s = -6e-6", "network_latency_s = -6e-06 must be from 0 to 0.1 seconds"),
    (NAMED + "oversubscription = 0.5", "oversubscription = 0.5 must be from 1 to 1000."),
    (NAMED + "price_per_chip_hour = -2", "price_per_chip_hour = -2 must be from 0 to 10000."),
    (NAMED + "network_bytes_per_s = nan", "network_bytes_per_s = nan must be from"),
    (NAMED + "link_bytes_per_s = inf", "link_bytes_per_s = inf must be from"),
    (with_("memory_bytes", "64"), "chip.memory_bytes = 64 must be from 1e+09 to 1e+13 bytes (80 GB are 80e9)."),
    (with_("flops_per_s", "{bf16 = 400}"), "chip.flops_per_s.bf16 = 400 must be from 1e+06 to 1e+17 FLOP/s"),
    (with_("cores", "0"), "chip.cores = 0 must be from 1 to 100000."),
    (with_("chips", "0"), "chips = 0 must be from 1 to 1e+07."),
    (with_("chips", "12"), "chips = 12 is more than one domain of 8 chips and no multiple of it; 8 or 16 would do"),
    # Wrong by a thousand, and still a number that some machine has.
    (with_("memory_bytes_per_s", "2e15"), "chip.memory_bytes_per_s = 2e+15 must be from 1e+09 to 1e+14"),
    (
        with_("memory_bytes_per_s", "2e9"),
        "chip.memory_bytes_per_s = 2e+09 is 4e+05 times below chip.flops_per_s = 8e+14; from 1 to 10000 times are "
        "possible: one of the two is in another unit.",
    ),
    (with_("flops_per_s", "{bf16 = 400e9}"), "chip.memory_bytes_per_s = 2e+12 is 0.2 times below chip.flops_per_s"),
    (with_("link_bytes_per_s", "2e8"), "chip.link_bytes_per_s = 2e+08 is 1e+04 times below chip.memory_bytes_per_s"),
    (NAMED + "link_bytes_per_s = 4.5e8", "link_bytes_per_s = 4.5e+08 is 7.44e+03 times below chip.memory_bytes_per_s"),
    (NAMED + "network_bytes_per_s = 50e6", "network_bytes_per_s = 5e+07 is 6.7e+04 times below"),
]


@pytest.mark.parametrize(("content", "words"), FILES)
def test_a_file_is_refused_with_the_key(content, words, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "cluster.toml"))
    assert "\n" not in message.removesuffix("\n") or "is not TOML" in message


@pytest.mark.parametrize("machine", ["16xH100", "16xA100", "16xMI300X", "512xv5e", "144xGB300", "16xV100-32GB-PCIe"])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize(
    "field", ["chip.memory_bytes", "chip.memory_bytes_per_s", "chip.link_bytes_per_s", "network_bytes_per_s"]
)
def test_a_figure_that_is_wrong_by_a_thousand_is_refused(machine, factor, field):
    found = cluster(machine)
    part, _, key = field.rpartition(".")
    whole = getattr(found, part) if part else found
    wrong = replace(whole, **{key: getattr(whole, key) * factor})
    with pytest.raises(ConfigError, match=re.escape(field)):
        check_cluster(replace(found, **{part: wrong}) if part else wrong)


def attempts(tmp_path):
    yield from (lambda word=word: cluster(word) for word, _ in WORDS)
    yield from (lambda content=content: read(tmp_path, content) for content, _ in FILES)


def test_no_refusal_is_without_a_test(tmp_path):
    """Every ``raise ConfigError`` of these modules is reached by a row of the tables above."""
    reached = set()
    for attempt in attempts(tmp_path):
        with pytest.raises(ConfigError) as caught:
            attempt()
        error = caught.value
        while error is not None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            reached.add((Path(last.filename).name, last.lineno))
            error = error.__cause__
    for module in (catalogue, plausibility, cluster_file):
        path = Path(module.__file__)
        raised = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Raise)]
        assert {(path.name, node.lineno) for node in raised} <= reached


def figure(name, hint):
    """A number that a field may have."""
    limit = LIMITS[name]
    if hint is int:
        return st.integers(int(limit.low), int(limit.high))
    return st.floats(limit.low, limit.high)


def values(cls, **given_):
    """Any dataclass within the limits, but for the fields that are given."""
    hints = typing.get_type_hints(cls)
    drawn = {}
    for field in fields(cls):
        hint = hints[field.name]
        options = typing.get_args(hint)
        if field.name in given_:
            drawn[field.name] = given_[field.name]
        elif hint is bool:
            drawn[field.name] = st.booleans()
        elif field.name == "term_s":  # a table, which is sorted when it is read
            entries = st.dictionaries(st.sampled_from(["step", "layer", "rows_1"]), figure(field.name, float))
            drawn[field.name] = entries.map(lambda held: tuple(sorted(held.items())))
        elif typing.get_origin(hint) is typing.Literal:
            drawn[field.name] = st.sampled_from(options)
        elif hint is str:
            drawn[field.name] = st.text(max_size=8)
        elif type(None) in options:
            drawn[field.name] = st.none() | figure(field.name, options[0])
        elif options and is_dataclass(options[0]):
            drawn[field.name] = st.lists(values(options[0]), max_size=3).map(tuple)
        else:
            drawn[field.name] = figure(field.name, hint)
    return st.builds(cls, **drawn)


@st.composite
def clusters(draw):
    """Within the limits, and with rates that are possible together."""
    memory = draw(st.floats(2e10, 1e12))
    formats = draw(st.lists(st.sampled_from(typing.get_args(Rate)), min_size=1, unique=True))
    rates = tuple((rate, memory * draw(st.floats(1, 9e3))) for rate in formats)
    chip = draw(
        values(
            Chip,
            flops_per_s=st.just(rates),
            memory_bytes_per_s=st.just(memory),
            link_bytes_per_s=st.floats(memory / 1500, memory),
        )
    )
    domain = draw(st.integers(1, 100))
    return draw(
        values(
            Cluster,
            chip=st.just(chip),
            domain=st.just(domain),
            chips=st.integers(1, domain) | st.integers(1, 1000).map(lambda count: count * domain),
            link_bytes_per_s=st.floats(memory / 1500, memory),
            network_bytes_per_s=st.floats(memory / 15_000, memory),
        )
    )


@examples(100)
@given(found=clusters())
def test_what_is_written_reads_back_equal(found, tmp_path_factory):
    assert read(tmp_path_factory.mktemp("cluster"), write_cluster(found)) == found


def test_every_chip_of_the_catalogue_is_written_and_read(tmp_path):
    for one in CHIPS.values():
        usual = usual_cluster(one, 2 * one.domain)
        assert read(tmp_path, write_cluster(usual)) == usual


def test_measured_rates_are_one_table_a_line(tmp_path):
    measured = replace(
        cluster("8xH100"),
        chip=replace(
            chip("H100"),
            products=(
                ProductRate(rate="bf16", rows=4096, width=8192, inner=1024, flops_per_s=6e14),
                ProductRate(rate="fp8", rows=16, width=16, inner=16, flops_per_s=1e9),
            ),
            copies=(CopyRate(bytes=2**20, bytes_per_s=5e12),),
        ),
        collectives=(CollectiveRate(name="all-gather", ranks=8, latency_s=1e-5, bytes_per_s=3e11),),
        disk_read_bytes_per_s=2e9,
    )
    written = write_cluster(measured)
    first = 'kernel = "product", rate = "bf16", rows = 4096, width = 8192, inner = 1024, flops_per_s = 6e+14'
    assert f"    {{{first}}},\n" in written
    assert read(tmp_path, written) == measured


def test_what_could_not_be_read_is_not_written():
    with pytest.raises(ConfigError, match="chips = 12 is more than one domain"):
        write_cluster(replace(cluster("8xH100"), chips=12))
