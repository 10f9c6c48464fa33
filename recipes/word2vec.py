"""word2vec (Mikolov 2013) on the definitions of recipes/fetch_gcide.py, in runs/gcide: skip-gram, negative sampling.

A sample is a piece of the text. Frequent words are left out by the sample's noise; the windows and the negative words
come from the noise of the forward. Both belong to a place in the training, so every layout draws the same. Four
words in a row share their negative words. Only the rows of the words that a step touches are reduced and updated.
"""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from superstep.kernels.rows.word_pairs import word_pairs
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import UnitSpec
from superstep.numerics.noise import Noise
from superstep.plan.config import RunConfig

FOLDER = Path("runs/gcide")
WIDTH, WINDOW, NEGATIVES, FREQUENT, SHARE = 100, 5, 5, 1e-3, 4
"""Of a vector; words on each side; negative words of each; share of the text from which on words are left out, all as
gensim's settings; words in a row with the same negative words."""
PIECE = 1000
"""Words of a sample, and ends of entries, which no window reaches over."""
HELD = 2**20
"""Places in the table of negative words: each word has as many as its count to the power of 3/4 says."""


@functools.cache
def read_text() -> tuple[list[str], np.ndarray, np.ndarray]:
    """The words from frequent to rare, their counts, and the text by their numbers; -1 where an entry ends."""
    lines = [line.split("\t") for line in (FOLDER / "words.tsv").read_text(encoding="utf-8").splitlines()]
    return [word for word, _ in lines], np.array([int(count) for _, count in lines]), np.load(FOLDER / "numbers.npy")


@functools.cache
def kept_shares() -> np.ndarray:
    """The probability that a word is kept, and after the last one that of an end, which -1 finds."""
    _, counts, _ = read_text()
    limit = FREQUENT * counts.sum()
    return np.append(np.minimum(1, (np.sqrt(counts / limit) + 1) * limit / counts), 1).astype(np.float32)


def length(split: str) -> int:
    """The number of samples; the loss alone is validated, on the first of them. Superstep calls this."""
    whole = len(read_text()[2]) // PIECE
    return whole if split == "train" else min(whole, 4)


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """A piece of the text: word numbers [1000]; the target is unused. Superstep calls this."""
    piece = read_text()[2][index * PIECE : (index + 1) * PIECE]
    kept = piece[noise.random(PIECE, np.float32) < kept_shares()[piece]]
    words = np.full(PIECE, -1, np.int32)
    words[: len(kept)] = kept
    return {"words": torch.from_numpy(words), "target": torch.zeros((), dtype=torch.int64)}


def negative_table() -> Tensor:
    """Word numbers, of which a uniform draw is a negative word: int32."""
    shares = read_text()[1] ** 0.75
    places = (np.arange(HELD) + 0.5) / HELD
    return torch.from_numpy(np.searchsorted(np.cumsum(shares) / shares.sum(), places).astype(np.int32))


class Pairs(nn.Module):
    """The two tables, and the loss of each sample, [B]. ``table``: negative words, or a path for each word."""

    def __init__(self, table: Tensor, *, is_bag: bool) -> None:
        super().__init__()
        self.is_bag, count = is_bag, len(read_text()[0])
        self.inputs, self.outputs = (nn.Embedding(count, WIDTH, sparse=True) for _ in range(2))
        nn.init.uniform_(self.inputs.weight, -0.5 / WIDTH, 0.5 / WIDTH)
        nn.init.zeros_(self.outputs.weight)
        self.register_buffer("table", table)

    def forward(self, words: Tensor, noise: Noise) -> Tensor:
        reach = (noise.uniform("reach", words) * WINDOW).int() + 1
        if self.table.dim() == 2:
            outputs = self.table[words]
        else:
            drawn = noise.uniform("negatives", words[:, ::SHARE, None].expand(-1, -1, NEGATIVES))
            negatives = self.table[(drawn * HELD).long()].repeat_interleave(SHARE, 1)
            own = words[..., None]
            outputs = torch.cat((2 * own + 1, torch.where(negatives == own, -1, 2 * negatives)), -1)
        return word_pairs(words, reach, outputs, self.inputs.weight, self.outputs.weight, is_bag=self.is_bag)


def make_units(config: RunConfig, table: Tensor, *, is_bag: bool) -> tuple[UnitSpec, ...]:
    """One unit."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    (unit,) = as_units([Pairs(table, is_bag=is_bag)], loss=lambda losses, targets: losses.sum())
    return (replace(unit, takes=("noise",)),)


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """Skip-gram with negative sampling. Superstep calls this."""
    return make_units(config, negative_table(), is_bag=False)
