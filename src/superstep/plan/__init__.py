"""What a run is asked to do, as frozen values: ``RunConfig`` from run.toml and flags, ``resolve`` to a ``Plan``.

``config.py`` has every field of run.toml, ``resolve.py`` fills what is automatic and refuses what cannot work,
``mesh.py`` numbers the ranks by axis, ``rules.py`` maps the axes of parameters to axes of the mesh.
"""
