"""A file that a verb writes at its end: checked before its work, which may take minutes."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import ConfigError


def require_new_file(flag: str, path: Path) -> None:
    """Check that a file does not exist and can be written, by creating and removing it.

    Raises:
        ConfigError: it exists, or cannot be written.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} = '{path}': the folder {path.parent} is not there; make it first.")
    try:
        path.open("x").close()
        path.unlink()
    except FileExistsError:
        raise ConfigError(f"{flag} = '{path}' is there already, and is kept; name a new file.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{flag} = '{path}' cannot be written: {reason}; name another file.") from error


def write_new_file(path: Path, text: str) -> None:
    """Write it; a file that was created meanwhile is kept.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
