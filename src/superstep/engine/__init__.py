"""The executor of a program and what it drives: forward, backward, the optimizer, collectives beside them.

``executor.py`` has one case for each instruction, ``engine.py`` puts the parts together, ``optimizer.py`` updates the
weights by a rule of ``numerics.update_rules``.
"""
