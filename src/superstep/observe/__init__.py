"""What a run reports: events, metrics, goodput, traces, trackers and their files. Imports no torch.

``events.py`` has every event; ``jsonl.py`` writes metrics.jsonl; ``prometheus.py`` and ``tensorboard.py`` write theirs.
"""
