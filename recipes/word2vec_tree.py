"""word2vec's skip-gram with hierarchical softmax (Morin 2005): a word is a path in Huffman's tree. See word2vec.py."""

import heapq
from pathlib import Path

import torch
from torch import Tensor, nn

from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.user_file import run_file

base = run_file(Path(__file__).with_name("word2vec.py"), "word2vec")


def huffman_paths() -> Tensor:
    """For each word, the nodes on its way from the root of Huffman's tree, twice their number plus 1 for the left way:
    int32 [V, longest], filled with -1.
    """
    counts = base.read_text()[1]
    heap = [(int(count), number) for number, count in enumerate(counts)]
    heapq.heapify(heap)
    ways: dict[int, tuple[int, int]] = {}
    for node in range(len(counts) - 1):
        (one, left), (other, right) = heapq.heappop(heap), heapq.heappop(heap)
        ways[left], ways[right] = (node, 1), (node, 0)
        heapq.heappush(heap, (one + other, len(counts) + node))
    paths = []
    for number in range(len(counts)):
        path, at = [], number
        while at in ways:
            node, label = ways[at]
            path, at = [2 * node + label, *path], len(counts) + node
        paths.append(torch.tensor(path, dtype=torch.int32))
    return nn.utils.rnn.pad_sequence(paths, batch_first=True, padding_value=-1)


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """Skip-gram with hierarchical softmax. Superstep calls this."""
    return base.make_units(config, huffman_paths(), is_bag=False)
