"""Blocks of the pages on layouts: who shares what, and what was measured."""

from __future__ import annotations

import ast
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, RunConfig
from superstep.plan.mesh import MeshShape
from superstep.plan.resolution.resolve import resolve
from superstep.plan.sharding.sequence import blocks, positions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PACKAGE = ROOT / "src" / "superstep"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def fenced(text: str) -> str:
    """A block of plain text."""
    return f"```text\n{text.rstrip()}\n```"


def about(folder: str) -> str:
    """What a folder of the package says of itself in its first line.

    Args:
        folder: below the package: ``serve/text``.
    """
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("``", "`")


def order() -> list[str]:
    """The parts in the order of their imports, as ``tests/test_layers.py`` holds it, without ``errors``."""
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER"
    )
    return [part for part in ast.literal_eval(value) if part != "errors"]


def _parts() -> str:
    return table(("part", "what is inside"), [(f"`{part}`", about(part)) for part in order()])


def _rooms() -> str:
    folders = sorted(
        str(path.parent.relative_to(PACKAGE)) for part in order() for path in (PACKAGE / part).glob("*/**/__init__.py")
    )
    return table(("folder", "what is inside"), [(f"`{folder}`", about(folder)) for folder in folders])


def _replicas() -> str:
    mesh = MeshShape(dp=4, cp=2, replicas=2)
    ranks = range(mesh.world)
    place = {rank: mesh.at(rank) for rank in ranks}
    sharer = {rank: divmod(mesh.sharer("dense", at), mesh.shards("dense")) for rank, at in place.items()}
    rows = [
        ("dp, cp", *(f"{place[rank].dp}, {place[rank].cp}" for rank in ranks)),
        ("replica", *(str(sharer[rank][0]) for rank in ranks)),
        ("shard", *(str(sharer[rank][1]) for rank in ranks)),
        ("gathers and reduces with", *(_others(mesh.shard_groups("dense"), rank) for rank in ranks)),
        ("sums its shard with", *(_others(mesh.replica_groups("dense"), rank) for rank in ranks)),
    ]
    return table(("rank", *map(str, ranks)), rows)


def _others(groups: list[list[int]], rank: int) -> str:
    (mine,) = (group for group in groups if rank in group)
    return ", ".join(str(other) for other in mine if other != rank)


def _zig_zag() -> str:
    """At which turn of the ring which queries meet which keys, a chunk a row and a column."""
    cp = 4
    held = [positions(2 * cp, cp=cp, rank=rank) for rank in range(cp)]
    turns = {
        (query, key): turn
        for rank in range(cp)
        for turn, block in enumerate(blocks(rank, cp))
        for query in held[rank][block.queries(2)]
        for key in held[block.source][block.keys(2)]
        if key <= query
    }
    lines = [f"{'keys of chunk':>21}   {'  '.join(map(str, range(2 * cp)))}"]
    for rank, chunks in enumerate(held):
        for chunk in chunks:
            cells = (f"{turns.get((chunk, key), ' ')}{'◣' if key == chunk else ' '}" for key in range(2 * cp))
            lines.append(f" rank {rank}, queries of {chunk}   {' '.join(cells)}".rstrip())
    return fenced("\n".join(lines))


def _long_context() -> str:
    found = json.loads((RESULTS / "long_context.json").read_text(encoding="utf-8"))
    rows = []
    for row in found["rows"]:
        sizes = (row[f"{name}_bytes"] / 2**20 for name in ("predicted_saved", "saved", "peak"))
        rows.append((str(row["cp"]), *(f"{size:.1f}" for size in sizes), row["with_budget"]["outcome"]))
    budget = f"with {found['budget_bytes'] >> 20} MiB a rank"
    return table(("c", "kept, predicted, MiB", "kept, MiB", "peak of the process, MiB", budget), rows)


def _grain() -> str:
    rows = []
    for name, tokens in (("demo", 256), ("qwen3-0.6b", 4096), ("llama3-8b", 8192)):
        config = RunConfig(
            model=ModelConfig(name=name),
            data=DataConfig(sequence_tokens=tokens),
            numerics=NumericsConfig(exact=True),
        )
        grain = resolve(config).plan.grain
        assert grain is not None
        degrees = (str(grain.cells), str(max(1, grain.chunks // 2)))
        rows.append((f"`{name}`", str(tokens), str(grain.cells), str(grain.chunks), *degrees))
    return table(("model", "tokens of a sequence", "cells", "chunks", "largest tp", "largest cp"), rows)


def _exact_cost() -> str:
    """Exact mode's seconds over fast mode's, as they were measured."""
    files = sorted(RESULTS.glob("exact_cost*.json"))
    if not files:
        return "`make bench BENCH=exact_cost` measures it, axis by axis."
    layouts = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["layouts"]]
    found = {(row["layout"], row["dtype"]): row for row in layouts}
    dtypes = sorted({dtype for _, dtype in found}, reverse=True)
    head = ("layout", *(f"{dtype}, {what}" for dtype in dtypes for what in ("time", "processor time")))
    rows = []
    for layout in dict.fromkeys(row["layout"] for row in layouts):
        cells = (found.get((layout, dtype), {}).get(f"{kind}_ratios") for dtype in dtypes for kind in ("time", "cpu"))
        rows.append((layout, *(_spread(ratios) if ratios else "" for ratios in cells)))
    return table(head, rows)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def _peers() -> str:
    plain, amx = (
        {pair["pair"]: pair for pair in json.loads((RESULTS / name).read_text(encoding="utf-8"))["pairs"]}
        for name in ("train_vs_peers-4096.json", "train_vs_peers-4096-amx.json")
    )
    rows = []
    for name in {**amx, **plain}:
        here, there = amx.get(name), plain.get(name)
        ratios = (f"{side[key]:.2f}" if side else "" for side in (here, there) for key in ("speed_ratio", "cpu_ratio"))
        sides = (f"{(here or there)[f'{side}_training_bytes'] / 2**20:,.0f}" for side in ("superstep", "peer"))
        rows.append((name, *ratios, " / ".join(sides)))
    head = (f"{what}, {where} AMX" for where in ("with", "without") for what in ("speed", "processor time"))
    return table(("beside", *head, "memory, MiB a rank"), rows)


def _served() -> str:
    found = json.loads((RESULTS / "serve_vs_peers.json").read_text(encoding="utf-8"))["results"]
    rows = []
    for side in found["one stream"]:
        first_s = found["first token"][side]["seconds"]
        many = found["32 requests"].get(side)
        cells = f"{found['one stream'][side]['tokens_per_s']:.0f}", f"{first_s * 1e3:.0f}"
        rows.append((side, *cells, f"{many['tokens_per_s']:.0f}" if many else ""))
    return table(("", "one stream, tokens/s", "first token, ms", "32 requests, tokens/s"), rows)


def _collectives() -> str:
    found = json.loads((RESULTS / "collectives.json").read_text(encoding="utf-8"))["measured"]
    return _beside_gloo(found, [f"{each['world']} ranks" for each in found])


def _collectives_over_hosts() -> str:
    found = json.loads((RESULTS / "collectives-hosts.json").read_text(encoding="utf-8"))["measured"]
    return _beside_gloo(found, [f"{each['world']} ranks on {each['hosts']} hosts" for each in found])


def _beside_gloo(found: list[dict], names: list[str]) -> str:
    rows = []
    for row in found[0]["rows"]:
        cells = (
            next(r for r in each["rows"] if r["collective"] == row["collective"] and r["bytes"] == row["bytes"])
            for each in found
        )
        told = (f"{cell['shared_s'] * 1e6:,.0f} µs, {cell['ratio']:.1f}x" for cell in cells)
        rows.append((row["collective"], f"{row['bytes']:,} B", *told))
    return table(("collective", "of", *names), rows)


LAYOUT_BLOCKS: dict[str, Callable[[], str]] = {
    "parts": _parts,
    "rooms": _rooms,
    "peers": _peers,
    "served": _served,
    "collectives": _collectives,
    "collectives over hosts": _collectives_over_hosts,
    "replicas": _replicas,
    "zig-zag": _zig_zag,
    "long context": _long_context,
    "grain": _grain,
    "exact cost": _exact_cost,
}
