"""A run from its directory to its last step: the job of its ranks, recovery, several hosts, elastic plans, sinks.

``prepare_job.py`` prepares a run, ``launch_ranks.py`` launches its ranks, ``rank.py`` is the work of each of them,
``recover.py`` starts lost ones again, ``hosts/multi_host.py`` divides the ranks among hosts, ``console.py`` shows
progress and messages.
"""
