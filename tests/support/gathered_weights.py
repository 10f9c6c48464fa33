"""The weights of a run, whole, on every rank of a pool."""

from superstep.comm.objects import gather


def gather_weights(engine):
    """Of each tensor its values in a list: the owners' parts, in the order of ranks. All ranks call it."""
    weights = {piece.name: piece.values.tolist() for piece in engine.pieces(("weight",)) if piece.is_owner}
    whole = {}
    for part in gather(weights, dict[str, list[float]]):
        for name, values in part.items():
            whole[name] = whole.get(name, []) + values
    return whole
