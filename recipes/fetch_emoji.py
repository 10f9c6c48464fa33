"""1,860 emoji as three makers drew them, out of npm packages, as idx files of pictures with transparency.

    npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0 emoji-datasource-facebook@16.0.0
    python recipes/fetch_emoji.py FOLDER_OF_PACKAGES runs/emoji

Each file has the same emoji in the same order, uint8 [1860, 4, 64, 64]: red, green, blue, opacity. ``categories.idx``
has the number of each one's category, uint8 [1860], in the order of their names: activities, animals, ...
"""

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from superstep.data.samples.idx import write_idx

PACKAGES = {
    "google": "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    "twitter": "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
    "facebook": "017038cf5a4e7fcf03dd9133cbed43d4c281c4b3ce7b927c7160261b92b8821e",
}
"""SHA-256 of each maker's package."""


def read_emoji(package: Path, maker: str) -> tuple[list[tuple[str, str]], torch.Tensor]:
    """The emoji that all makers drew, in order, by file and category, and one maker's pictures of them."""
    files: dict[str, bytes] = {}
    folder = f"package/img/{maker}/64/"
    with tarfile.open(package) as archive:
        for member in archive:
            if member.name == "package/emoji.json":
                table = json.load(archive.extractfile(member))
            elif member.name.startswith(folder):
                files[member.name.removeprefix(folder)] = archive.extractfile(member).read()
    table = [each for each in table if all(each[f"has_img_{name}"] for name in PACKAGES)]
    table.sort(key=lambda each: each["sort_order"])
    emoji = [(each["image"], each["category"]) for each in table]
    pictures = [np.array(Image.open(io.BytesIO(files[name])).convert("RGBA").resize((64, 64))) for name, _ in emoji]
    return emoji, torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def main(packages: Path, folder: Path) -> None:
    """Write a file for each maker, and the categories."""
    folder.mkdir(parents=True, exist_ok=True)
    orders = set()
    for maker, wanted in PACKAGES.items():
        package = packages / f"emoji-datasource-{maker}-16.0.0.tgz"
        found = hashlib.sha256(package.read_bytes()).hexdigest()
        if found != wanted:
            sys.exit(f"{package} has the SHA-256 {found}, not {wanted}: it is another file.")
        emoji, pictures = read_emoji(package, maker)
        orders.add(tuple(emoji))
        write_idx(folder / f"{maker}.idx", pictures)
        sys.stdout.write(f"{len(emoji):,} emoji in {folder}/{maker}.idx\n")
    if len(orders) > 1:
        sys.exit("the packages list other emoji: they are not of one version.")
    names = sorted({category for _, category in emoji})
    write_idx(folder / "categories.idx", torch.tensor([names.index(each) for _, each in emoji], dtype=torch.uint8))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python recipes/fetch_emoji.py FOLDER_OF_PACKAGES FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
