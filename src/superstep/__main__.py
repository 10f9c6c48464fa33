"""python -m superstep, and so torchrun ... -m superstep train."""

from superstep.cli.main import entry

if __name__ == "__main__":
    entry()
