"""Checkpoints: the whole model on disk in safetensors, snapshots in memory, object stores, fingerprints.

``checkpoint.py`` saves and loads, ``memory_snapshot.py`` keeps a copy in shared memory, ``background_checkpoint.py``
writes it to disk in the background, ``verify.py`` detects damage.
"""
