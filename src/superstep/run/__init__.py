"""A run from its directory to its last step: the job of its ranks, recovery, several hosts, elastic plans, sinks.

``job.py`` prepares a run and launches its ranks, ``rank.py`` is the work of each rank, ``recover.py`` starts lost ones
again, ``multi_host.py`` divides the ranks among hosts, ``console.py`` shows progress and messages.
"""
