"""The definitions of an English dictionary (GCIDE, GPL) out of Debian's package, and pairs of words that people judged.

    apt-get download dict-gcide
    pip download --no-deps gensim==4.4.0
    python recipes/fetch_gcide.py dict-gcide_0.48.5+nmu2_all.deb gensim-4.4.0-*.whl runs/gcide

Writes runs/gcide/text.txt, one entry a line, small letters alone; the same as numbers (numbers.npy) of words from
frequent to rare (words.tsv, with their counts); and wordsim353.tsv (Finkelstein 2002).
"""

import gzip
import hashlib
import io
import re
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np

from superstep.plan.user_file import run_file

read_archive = run_file(Path(__file__).with_name("fetch_prompts.py"), "fetch_prompts").read_archive

HASHES = {
    "dict-gcide": "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
    "wordsim353.tsv": "f92a022fc2537793a15bc3a8c162ebcd74990e033a228bb6388cb71e4c0b1e1d",
}
"""SHA-256 of the package, and of the file of pairs."""
LEAST_COUNT = 5
"""Rarer words are left out of the numbers."""
SOURCE = re.compile(r"\[[^\[\]]*(?:Webster|WordNet|PJC|Century|Obs)[^\[\]]*\]|\\[^\\\n]*\\")
"""Where an entry comes from, and how its word is pronounced."""


def require(name: str, raw: bytes) -> bytes:
    """Return the content of a file if it is the one that is known."""
    if (found := hashlib.sha256(raw).hexdigest()) != HASHES[name]:
        sys.exit(f"{name} has the SHA-256 {found}, not {HASHES[name]}: it is another version.")
    return raw


def list_entries(text: str) -> list[str]:
    """The words of each entry, on a line; an entry begins where a line does not begin with a space."""
    entries = re.split(r"\n\n(?=\S)", text)
    lines = (" ".join(re.findall(r"[a-z]+", SOURCE.sub(" ", entry).lower())) for entry in entries)
    return [line for line in lines if " " in line]


def write_text(folder: Path, lines: list[str]) -> None:
    """Write a text of one entry a line, and its numbers: -1 where an entry ends."""
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    entries = [line.split() for line in lines]
    counts = Counter(word for entry in entries for word in entry)
    known = [(word, count) for word, count in counts.most_common() if count >= LEAST_COUNT]
    (folder / "words.tsv").write_text("".join(f"{word}\t{count}\n" for word, count in known), encoding="utf-8")
    number = {word: n for n, (word, _) in enumerate(known)}
    numbers = [n for entry in entries for n in (*(number[word] for word in entry if word in number), -1)]
    np.save(folder / "numbers.npy", np.array(numbers, np.int32))


def main(package: Path, wheel: Path, folder: Path) -> None:
    """Write the two files."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(read_archive(require("dict-gcide", package.read_bytes())))) as files:
        packed = files.extractfile("./usr/share/dictd/gcide.dict.dz").read()
    lines = list_entries(gzip.decompress(packed).decode("utf-8", "replace"))
    write_text(folder, lines)
    with zipfile.ZipFile(wheel) as files:
        pairs = require("wordsim353.tsv", files.read("gensim/test/test_data/wordsim353.tsv"))
    (folder / "wordsim353.tsv").write_bytes(pairs)
    words = sum(line.count(" ") + 1 for line in lines)
    sys.stdout.write(f"{words:,} words of {len(lines):,} entries in {folder}/text.txt\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python recipes/fetch_gcide.py PACKAGE WHEEL FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
