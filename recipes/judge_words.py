"""How word vectors agree with people: the rank correlation of their cosines with WordSim-353 (Finkelstein 2002).

    python recipes/judge_words.py runs/word2vec runs/gcide

The vectors are those of the newest checkpoint; pairs with an unknown word are left out.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from superstep.plan.user_file import run_file

base = run_file(Path(__file__).with_name("word2vec.py"), "word2vec")


def rank_of(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values have the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[group]


def judge(vectors: np.ndarray, words: list[str], pairs: Path) -> tuple[float, int]:
    """Spearman's correlation, and the number of pairs."""
    numbers = {word: number for number, word in enumerate(words)}
    lines = [line.split("\t") for line in pairs.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    known = [(numbers[one.lower()], numbers[other.lower()], float(score)) for one, other, score in lines
             if one.lower() in numbers and other.lower() in numbers]  # fmt: skip
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = np.array([unit[one] @ unit[other] for one, other, _ in known])
    scores = np.array([score for *_, score in known])
    return float(np.corrcoef(rank_of(cosines), rank_of(scores))[0, 1]), len(known)


def main(run: Path, folder: Path) -> None:
    """Print the correlation."""
    newest = max((run / "checkpoints").glob("step-*"))
    base.FOLDER = folder
    vectors = load_file(newest / "model.safetensors")["0.inputs.weight"]
    correlation, pairs = judge(vectors, base.read_text()[0], folder / "wordsim353.tsv")
    sys.stdout.write(f"{newest}: {correlation:.4f} over {pairs} pairs\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python recipes/judge_words.py RUN FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
