"""Kernels of tables with sparse gradients: the pairs of word2vec, and rows added and updated."""
