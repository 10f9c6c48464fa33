"""word2vec's continuous bag of words (Mikolov 2013): the mean of a word's neighbours predicts it. See word2vec.py."""

from pathlib import Path

from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.user_file import run_file

base = run_file(Path(__file__).with_name("word2vec.py"), "word2vec")


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """A bag of words with negative sampling. Superstep calls this."""
    return base.make_units(config, base.negative_table(), is_bag=True)
