"""Publish a running trainer's weights as a snapshot for servers, as post-training does after each update.

Every rank writes its own slices of the global tensors, as for a checkpoint, under Hugging Face names and in fp32. In
shared memory it is a copy without a disk. With adapters, the snapshot is the adapter, as a PEFT folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from superstep.engine.engine import Engine
from superstep.errors import Fault, disk_fault
from superstep.model.files.hf import open_weights
from superstep.serve.files.weights import KEEP, PublishedWeights, clean, give_name, open_unfinished
from superstep.state.all_or_none import Peers, together
from superstep.state.checkpoint import save
from superstep.state.manifest import Position, read_manifest
from superstep.state.tensor_file import ADAPTER_FILE


def publish(
    engine: Engine,
    root: Path,
    peers: Peers,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    position: Position,
    beside: Mapping[str, str | Path],
    keep: int = KEEP,
) -> PublishedWeights:
    """Write a snapshot, and remove older ones that are not in use. Every rank calls this together, between two steps.

    Args:
        engine: of this rank.
        root: the folder of snapshots; all ranks see it.
        peers: the ranks.
        shapes: of every global tensor.
        position: of training.
        beside: files to add, such as a config.json. Rank 0's count.
        keep: newest snapshots that always stay.

    Raises:
        Fault: it cannot be written: on every rank the same; a DiskFault for an error of the disk.
    """

    def unwritable(error: Exception) -> Fault:
        return disk_fault(error, root)

    with ExitStack() as stack:

        def begin() -> Path | None:
            return stack.enter_context(open_unfinished(root)).with_name("checkpoint") if peers.rank == 0 else None

        folder = together(peers, begin, unwritable, Path | None)[0]
        assert folder is not None
        save(folder, engine.pieces(("weight",)), position, peers, tensors={"weight": shapes}, beside=beside)

        def end() -> PublishedWeights | None:
            if peers.rank:
                return None
            digests = {name: stored.blake2b for name, stored in read_manifest(folder).tensors.items()}
            adapter = folder / ADAPTER_FILE
            done = give_name(root, folder, open_weights(adapter if adapter.exists() else folder), digests)
            clean(root, keep)
            return done

        published = together(peers, end, unwritable, PublishedWeights | None)[0]
    assert published is not None
    return published
