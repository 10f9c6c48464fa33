"""Checkpoints: the whole model on disk, independent of the layout that wrote it.

    checkpoints/step-000200/
        model.safetensors        global weights, fp32, under Hugging Face names; with adapters only those:
                                 adapter_model.safetensors, under PEFT's names
        optimizer.safetensors    the optimizer's moments: exp_avg.NAME, and exp_avg_sq.NAME of AdamW; of 8 bits the
                                 codes, and exp_avg.NAME.scale, and so on
        config.json              of the model, for other loaders
        tokenizer.json
        run.json                 the run's identity (train.identity)
        manifest.json            the position, and hashes of all the rest and of itself

Ranks write their own slices into the same files; with several page caches, no two of them write one page
(``state.file_shares``). Everything is written into a temporary folder, which is renamed once all of it is on disk: a
visible checkpoint is complete. Rank 0 alone makes, renames and deletes folders; after each step of a save all ranks
learn whether it succeeded on all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from superstep.errors import DiskFault, Fault, StateError, SuperstepError, disk_fault
from superstep.state import checkpoint_dirs
from superstep.state.all_or_none import Peers, together
from superstep.state.checkpoint_writer import remove_parcels, writing
from superstep.state.file_shares import Claim, FileShares, Range, granules, page_cache, share_out
from superstep.state.fsync import sync, write_text
from superstep.state.manifest import (
    MANIFEST,
    Manifest,
    Position,
    StoredFile,
    StoredTensor,
    read_manifest,
    write_manifest,
)
from superstep.state.piece_reader import fill_pieces, find_foreign
from superstep.state.tensor_file import (
    ELEMENT_BYTES,
    TensorFile,
    digest,
    digest_of,
    entry,
    file_of,
    tensor_files,
)
from superstep.state.tensor_piece import TensorPiece, Tensors, bytes_of, runs
from superstep.state.verify import verify

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


def save(
    folder: Path,
    pieces: Iterable[TensorPiece],
    position: Position,
    peers: Peers,
    *,
    tensors: Tensors,
    beside: Mapping[str, str | Path],
    confirm: Callable[[], None] = lambda: None,
) -> int:
    """Write a checkpoint. Every rank calls this together.

    Args:
        folder: its path; it must not exist.
        pieces: this rank's.
        position: of training.
        peers: the ranks.
        tensors: the shape of every global tensor of each kind.
        beside: files to put beside the tensors: a text, or the file to copy. Rank 0's count.
        confirm: called once the pieces have been written and before the checkpoint has its name; raises if they had
            changed.

    Returns:
        Bytes of tensors on disk.

    Raises:
        Fault: it cannot be written: on every rank the same, of the first rank that failed; a DiskFault for an error of
            the disk. Earlier checkpoints are not touched.
    """
    saving = RankSave(folder, peers)
    try:
        saving.together(lambda: saving.begin(pieces, tensors))
        shares = share_out(saving.gather(saving.claim, Claim))
        parcels = saving.gather(lambda: saving.write(shares), list[int])
        if any(parcels):
            saving.together(lambda: saving.unpack(shares, parcels))
        hashes = {
            name: file_digest
            for part in saving.gather(saving.hashes, dict[str, str])
            for name, file_digest in part.items()
        }
        saving.together(confirm)
        saving.together(lambda: saving.publish(position, hashes, beside))
    except SuperstepError:
        saving.discard()
        raise
    return sum(file.total for file in saving.files.values())


class RankSave:
    """One rank's part of a save, step by step."""

    def __init__(self, folder: Path, peers: Peers) -> None:
        self.folder = folder
        self.partial = checkpoint_dirs.partial_of(folder)
        self.peers = peers
        self.files: Mapping[str, TensorFile] = {}
        self._mine: list[tuple[TensorPiece, str, int]] = []

    def together(self, work: Callable[[], None]) -> None:
        """Do a step on every rank."""
        together(self.peers, work, self._unwritable)

    def gather(self, work: Callable[[], T], form: TypeForm[T]) -> list[T]:
        """Do a step on every rank; its results, of this type."""
        return together(self.peers, work, self._unwritable, form)

    def begin(self, pieces: Iterable[TensorPiece], tensors: Tensors) -> None:
        """Collect the pieces to write; rank 0 makes the folder and the files."""
        self.files = tensor_files(tensors)
        for piece in pieces:
            if piece.is_owner and piece.values.numel():
                file = file_of(piece.kind, piece.name)
                self._mine.append((piece, file, self.files[file].offsets[entry(piece.kind, piece.name)]))
        if self.peers.rank == 0:
            checkpoint_dirs.begin(self.folder)
            for name, layout in self.files.items():
                with (self.partial / name).open("wb") as opened:
                    # A memory map needs allocated space: a full disk would be a bus error there.
                    if sys.platform == "linux":
                        os.posix_fallocate(opened.fileno(), 0, layout.total)
                    else:
                        opened.truncate(layout.total)

    def claim(self) -> Claim:
        """The ranges that this rank will write, and its page cache."""
        ranges: dict[str, list[Range]] = {}
        if self.peers.rank == 0:
            ranges = {name: [(0, len(layout.header))] for name, layout in self.files.items()}
        for piece, file, offset in self._mine:
            # A block of columns has gaps, which other ranks fill: the claim covers the whole span.
            first, last = (
                next(runs(piece.shape, piece.index, at, 1)).offset
                for at in (piece.low, piece.low + piece.values.numel() - 1)
            )
            size = _element_bytes(piece)
            ranges.setdefault(file, []).append((offset + size * first, offset + size * (last + 1)))
        return Claim(page_cache(self.partial), {file: granules(runs_of_file) for file, runs_of_file in ranges.items()})

    def write(self, shares: FileShares) -> list[int]:
        """Write this rank's bytes; the ranks with a parcel from this one."""
        with writing(self.partial, list(self.files), self.peers.rank, shares) as writer:
            if self.peers.rank == 0:
                for name, layout in self.files.items():
                    writer.put(name, 0, memoryview(layout.header))
            for piece, file, offset in self._mine:
                values = piece.values.detach().cpu()
                values = (values if values.dtype == torch.uint8 else values.float()).contiguous()
                data = bytes_of(values)
                ranges = list(runs(piece.shape, piece.index, piece.low, piece.values.numel()))
                writer.put_runs(file, offset, data, ranges, _element_bytes(piece))
            return writer.sync()

    def unpack(self, shares: FileShares, parcels: Sequence[Sequence[int]]) -> None:
        """Write the parcels of other ranks."""
        with writing(self.partial, list(self.files), self.peers.rank, shares) as writer:
            for sender, owners in enumerate(parcels):
                if self.peers.rank in owners:
                    writer.unpack(sender)
            writer.sync()

    def hashes(self) -> dict[str, str]:
        """The hashes of this rank's share of the tensors, read from disk."""
        every = [(file, name) for file, layout in self.files.items() for name in layout.shapes]
        return {
            name: digest_of(self.partial / file, self.files[file].offsets[name], self.files[file].size(name))
            for file, name in every[self.peers.rank :: self.peers.size]
        }

    def publish(self, position: Position, hashes: Mapping[str, str], beside: Mapping[str, str | Path]) -> None:
        """On rank 0, write the files beside the tensors, the manifest last, and rename the folder."""
        if self.peers.rank:
            return
        remove_parcels(self.partial)
        texts = {n: t.read_text(encoding="utf-8") if isinstance(t, Path) else t for n, t in beside.items()}
        for name, text in texts.items():
            write_text(self.partial / name, text)
        for name in self.files:
            sync(self.partial / name)
        manifest = Manifest(
            position=position,
            files={
                name: StoredFile(layout.total, len(layout.header), digest(layout.header))
                for name, layout in self.files.items()
            },
            tensors={
                name: StoredTensor(file, layout.offsets[name], shape, hashes[name], layout.dtypes[name])
                for file, layout in self.files.items()
                for name, shape in layout.shapes.items()
            },
            beside={name: digest(text.encode()) for name, text in texts.items()},
        )
        write_text(self.partial / MANIFEST, write_manifest(manifest))
        checkpoint_dirs.publish(self.partial, self.folder)

    def discard(self) -> None:
        """On rank 0, delete the temporary folder. Every rank has closed its files by then."""
        if self.peers.rank == 0:
            with suppress(OSError):  # it is deleted before the next save
                checkpoint_dirs.discard(self.partial)

    def _unwritable(self, error: Exception) -> Fault:
        what = "the checkpoint cannot be written"
        with suppress(OSError):  # the disk itself may have failed
            what += ", and older ones are untouched" if checkpoint_dirs.checkpoints(self.folder.parent) else ""
        if isinstance(error, OSError):
            return DiskFault(f"{what}: {disk_fault(error, self.partial).message}")
        return Fault(f"{what}: {type(error).__name__}: {error}")


def load(folder: Path, pieces: Iterable[TensorPiece], peers: Peers, *, converts: bool = False) -> Position:
    """Fill this rank's pieces from a checkpoint of any layout. Every rank calls this together.

    Args:
        folder: the checkpoint.
        pieces: this rank's.
        peers: the ranks.
        converts: whether moments may have another format there.

    Raises:
        Damaged: the checkpoint is damaged: on every rank the same, before a piece is filled.
        StateError: it belongs to another model, has another format, or cannot be read.
    """

    def unreadable(error: Exception) -> StateError:
        return StateError(f"{folder} cannot be read ({error}); resume from another.")

    def read() -> Manifest | None:
        return read_manifest(folder) if peers.rank == 0 else None

    manifest = together(peers, read, unreadable, Manifest | None)[0]
    assert manifest is not None
    wanted = list(pieces)
    parts = together(peers, lambda: find_foreign(manifest, wanted, converts=converts), unreadable, list[str])
    foreign = [problem for part in parts for problem in part]
    if foreign:
        raise StateError(f"{folder} is of another model: {foreign[0]}; name the model that wrote it.")
    verify(folder, peers)
    together(peers, lambda: fill_pieces(folder, manifest, wanted), unreadable)
    return manifest.position


def read_position(folder: Path) -> Position:
    """The position in a checkpoint.

    Raises:
        StateError: it is no checkpoint.
    """
    return read_manifest(folder).position


def _element_bytes(piece: TensorPiece) -> int:
    """Bytes of an element on disk."""
    return ELEMENT_BYTES["U8" if piece.values.dtype == torch.uint8 else "F32"]
