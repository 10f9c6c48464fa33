"""A small text in the place of a dictionary: words of two kinds, which stand beside words of their own kind."""

from pathlib import Path

import numpy as np

from recipe_files import load_recipe

LINES, WORDS = 900, 24


def write_words(folder: Path) -> None:
    """Lines of ten words, and pairs that the two kinds of words decide."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    kinds = [[f"{kind}{chr(97 + number)}" for number in range(WORDS)] for kind in ("sea", "hill")]
    lines = [" ".join(rng.choice(kinds[number % 2], 10)) for number in range(LINES)]
    load_recipe("fetch_gcide").write_text(folder, lines)
    pairs = ["# word, word, mean"]
    pairs += [f"{kinds[0][n].upper()}\t{kinds[n % 2][n + 1]}\t{9 - 7 * (n % 2) + n / 50:.2f}" for n in range(20)]
    (folder / "wordsim353.tsv").write_text("\n".join([*pairs, "seaa\tunknown\t5"]) + "\n", encoding="utf-8")
