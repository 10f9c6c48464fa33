"""Compares formulas with math-verify in a separate process: ``python -P maths_child.py``.

A short formula can keep sympy busy for days and fill any memory, so the system limits this process's time and address
space. Each line is JSON: in ``{"expected", "given", "number"}``, out ``{"same"}``, or ``{"error"}`` where the expected
formula cannot be read, with the number. The first line is ``{"seconds", "bytes"}``.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify


def read(formula: str) -> list[object]:
    parsed: list[object] = parse(f"${formula}$", [LatexExtractionConfig()], parsing_timeout=None)
    return parsed


def answer(request: dict[str, str], reply: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(reply | {"number": request["number"]}) + "\n")
    sys.stdout.flush()


def judge_formula(task: dict[str, str]) -> dict[str, object]:
    expected = read(task["expected"])
    if not expected:
        return {"error": "the expected formula cannot be read"}
    try:
        return {"same": bool(verify(expected, read(task["given"]), timeout_seconds=None))}
    except MemoryError:
        return {"memory": True}
    except Exception:  # noqa: BLE001 - what cannot be compared is not the same
        return {"same": False}


def main() -> None:
    logging.disable(logging.CRITICAL)
    task = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (task["bytes"], task["bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer(task, {})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # ends the process, whatever it is busy with
        request = json.loads(line)
        answer(request, judge_formula(request))
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
