"""superstep view RUN --router: which experts the tokens of a run went to."""

from __future__ import annotations

from superstep.cli.view.step_text import DrawOptions
from superstep.errors import StateError, UserError
from superstep.observe.jsonl import read
from superstep.observe.router import ASCII, COLOURS, SHADES, draw_routers, reports
from superstep.plan.config_io import read_config
from superstep.train.run_folder.inspect_run import require_run
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import resolve_config


def draw_run_routers(folder: RunFolder, layer: int | None, picture: DrawOptions) -> str:
    """The picture of a run's routers, of one layer or of all.

    Raises:
        StateError: the run has no experts, or no report of them yet.
        UserError: it has no such layer.
    """
    require_run(folder)
    run = resolve_config(read_config(folder.config))
    if run.decoder is None or run.decoder.moe is None:
        raise StateError(
            f"'{folder.root}' has no experts and so no router; name a run with experts, such as one of superstep train "
            "recipes/moe.toml."
        )
    if layer is not None and not 0 <= layer < run.decoder.layers:
        raise UserError(
            f"--layer {layer}: the layers of '{folder.root}' are 0 to {run.decoder.layers - 1}; name one of them."
        )
    routed = reports(read(folder.metrics)) if folder.metrics.is_file() else []
    if not routed:
        raise StateError(
            f"'{folder.root}' has no report of its routers yet: the run writes one every "
            f"{run.config.observe.log_every} steps (observe.log_every). Try again after that."
        )
    ink = ASCII if picture.is_plain else COLOURS if picture.has_colour else SHADES
    title = f"where the tokens of {folder.root} went, in steps {routed[0].first} to {routed[-1].last}"
    layers = range(run.decoder.layers) if layer is None else [layer]
    return f"{title}\n\n{draw_routers(routed, layers, width=picture.width, ink=ink)}"
