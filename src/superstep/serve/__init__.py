"""The inference engine: requests in, tokens out, over one or several ranks; weight updates while it serves.

``engine.py`` runs a step, ``worker.py`` is the process of a rank, ``engine_client.py`` speaks to it from the server,
``load_balancer.py`` spreads requests over replicas, ``weights.py`` holds published weights.
"""
