"""The memory of a program: activations, temporaries, communicators, snapshots, and whether it fits."""
