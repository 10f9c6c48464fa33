"""A run from its directory to its last step: the job of its ranks, recovery, several hosts, elastic plans, sinks.

``job.py`` prepares a run and launches its ranks, ``rank.py`` is what each of them does, ``recover.py`` starts lost ones
again, ``multi_host.py`` shares the ranks out to hosts, ``console.py`` is where a run says what it does.
"""
