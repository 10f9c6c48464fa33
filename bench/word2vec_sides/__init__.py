"""The other side of ``bench.word2vec``, run by an interpreter of its own."""
