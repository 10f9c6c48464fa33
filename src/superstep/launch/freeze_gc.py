"""Imported last by the seed: what it has imported by then is out of sight of Python's collector of cycles, in it and in
every fork of it.

None of that is garbage. To look through it stops a rank for a fifth of a second, while the others wait for it, and at
the end of the seed it takes a second.
"""

import gc

gc.freeze()
