"""The seed imports this last: it moves all objects so far out of the garbage collector's sight, also in forks.

None of them is garbage. A collection would stop a rank for a fifth of a second, and the seed's end takes a second.
"""

import gc

gc.freeze()
