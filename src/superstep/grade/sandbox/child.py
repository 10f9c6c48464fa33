"""What runs in the sandbox: a candidate's program, and no code that judges it. It imports no module of this package.

It is passed to the interpreter with ``-c``, reads one job from its input, and writes a line of JSON for each answer.
Expected values stay outside, so whatever the candidate changes here, it can only give wrong answers.

    {"source", "limits", "calls": [{"name", "args", "kwargs"}]}    -> {"value"} or {"raised"} for each call
    {"source", "limits", "inputs": [text]}                         -> {"output", "status"} for each input
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # not here: it would be a sixth of the time that a small program takes
    from types import CodeType
    from typing import Any

READY = "ready"
"""The first line of output: errors after it are the candidate's."""

KINDS = {
    "cpu_s": resource.RLIMIT_CPU,
    "memory_bytes": resource.RLIMIT_AS,
    "file_bytes": resource.RLIMIT_FSIZE,
    "processes": resource.RLIMIT_NPROC,
    "files": resource.RLIMIT_NOFILE,
    "core_bytes": resource.RLIMIT_CORE,
    "locked_bytes": resource.RLIMIT_MEMLOCK,
    "queue_bytes": resource.RLIMIT_MSGQUEUE,
    "signals": resource.RLIMIT_SIGPENDING,
}


def limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        _, hard = resource.getrlimit(KINDS[name])
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(KINDS[name], (most, most))


def plain(value: object) -> Any:  # noqa: ANN401 - any data
    """Encode data as JSON: lists, tuples, sets and dicts carry their kind, as JSON has fewer kinds. Other types are
    errors.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [plain(each) for each in value]]  # type: ignore[attr-defined]
    if kind is dict:
        return ["dict", [[plain(key), plain(each)] for key, each in value.items()]]  # type: ignore[attr-defined]
    raise TypeError(f"a {kind.__name__} is no data; give numbers, texts, lists, tuples, sets and dicts")


def error_text(error: BaseException) -> str:
    """The error's kind and first line; only the kind where its text itself raises."""
    try:
        first = str(error).partition("\n")[0][:200]
    except BaseException:  # noqa: BLE001 - the candidate's own class
        first = ""
    return f"{type(error).__name__}: {first}"


def calls(job: dict[str, Any], out: int) -> None:
    """Run the source once, then each call in turn."""
    names: dict[str, Any] = {"__name__": "candidate", "__builtins__": __builtins__}
    try:
        exec(compile(job["source"], "candidate.py", "exec"), names)
        broken = None
    except BaseException as error:  # noqa: BLE001 - also SystemExit: to leave is no answer
        broken = error_text(error)
    for call in job["calls"]:
        try:
            if broken is not None:
                raise RuntimeError(broken)
            reply = {"value": plain(names[call["name"]](*call["args"], **call["kwargs"]))}
            text = json.dumps(reply)
        except BaseException as error:  # noqa: BLE001
            text = json.dumps({"raised": broken or error_text(error)})
        put(out, text)


def programs(job: dict[str, Any], out: int) -> None:
    """Run the source as a separate program for each input."""
    code = compile(job["source"], "candidate.py", "exec")
    for number, text in enumerate(job["inputs"]):
        given, taken = f"given-{number}", f"taken-{number}"
        with open(given, "w", encoding="utf-8") as file:
            file.write(text)
        child = os.fork()
        if child == 0:
            become(given, taken, code)
        _, status = os.waitpid(child, 0)
        if job["alone"]:
            stop_others()
        with open(taken, encoding="utf-8", errors="replace") as file:
            output = file.read(job["output_bytes"])
        for path in (given, taken):
            os.unlink(path)
        put(out, json.dumps({"output": output, "status": os.waitstatus_to_exitcode(status)}))


def become(given: str, taken: str, code: CodeType) -> None:
    """Turn this process into the program, and exit with it."""
    status = 1
    try:
        for path, flags, to in ((given, os.O_RDONLY, 0), (taken, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1)):
            opened = os.open(path, flags, 0o600)
            os.dup2(opened, to)
            os.close(opened)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        try:
            exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
            status = 0
        except SystemExit as error:
            status = error.code if type(error.code) is int else int(error.code is not None)
        except BaseException:  # noqa: BLE001
            import traceback

            traceback.print_exc(limit=-3)
        sys.stdout.flush()
    finally:
        os._exit(status & 0xFF)


def stop_others() -> None:
    """Kill the processes that a program left. Only the candidate's are in this namespace."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def put(out: int, text: str) -> None:
    data = text.encode("utf-8", "backslashreplace") + b"\n"
    while data:
        data = data[os.write(out, data) :]


def main() -> None:
    with open(0, "rb", closefd=False) as given:
        job = json.loads(given.read())
    limit(job["limits"])
    sys.path[:] = [path for path in sys.path if path] + job["packages"]
    out = os.dup(1)
    put(out, READY)
    # What the candidate prints is no answer.
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if "calls" in job:
        calls(job, out)
    else:
        try:
            programs(job, out)
        except SyntaxError as error:
            put(out, json.dumps({"raised": error_text(error)}))
    os._exit(0)


if __name__ == "__main__":
    main()
