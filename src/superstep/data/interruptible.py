"""Makes a blocking call interruptible."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")


def run_aside(call: Callable[[], T]) -> T:
    """Run ``call`` in a thread of its own; its result or error.

    A signal's handler runs between two steps of the interpreter, of which a library's long call has none. Here it runs
    at once; if it raises, the thread is left behind, and ends with its call or with the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    is_done = Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller shall see it
            errors.append(error)
        finally:
            is_done.set()

    Thread(target=run, name="superstep-aside", daemon=True).start()
    is_done.wait()
    if errors:
        raise errors[0]
    return results[0]
