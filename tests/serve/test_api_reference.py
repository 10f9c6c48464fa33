"""The page about the HTTP interface tells of every path, field and metric, and of none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from plain_words import small_tokenizer
from scripted import Scripted
from superstep.http.drain import Drain
from superstep.serve.api import admin, generate_endpoint
from superstep.serve.api.admin import ADMIN_ROUTES
from superstep.serve.api.metrics import ServeMetrics
from superstep.serve.api.openai import chat_fields, completions
from superstep.serve.app import ROUTES
from superstep.serve.scheduling.engine_messages import EngineStatus
from superstep.serve.scheduling.request import ModelInfo

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.read_text(encoding="utf-8").split("\n## ")}
SPELT = {title: set(re.findall(r"`([^`\n]+)`", part)) for title, part in SECTIONS.items()}


def test_paths():
    told = {one for one in SPELT["# The HTTP interface"] if one.startswith(("GET ", "POST "))}
    assert told == {f"{method} {path.replace(':path', '')}" for method, path, _ in ROUTES}


def test_paths_under_admin():
    told = {one for one in SPELT["Paths under /admin"] if one.startswith(("GET ", "POST ", "DELETE "))}
    assert told == {f"{method} {path.replace(':path', '')}" for method, path, _ in ADMIN_ROUTES}
    fields = {*admin.ChangeFields.model_fields, *admin.WakeFields.model_fields, *EngineStatus.__struct_fields__}
    fields |= set(admin.AdapterFields.model_fields)
    assert fields <= SPELT["Paths under /admin"]


@pytest.mark.parametrize("form", [completions.CompletionFields, chat_fields.ChatFields])
def test_fields_of_openais_endpoints(form):
    assert set(form.model_fields) <= SPELT["Completions and chats"] | SPELT["Sampling options"]


def test_no_field_is_told_that_is_refused():
    known = set(completions.CompletionFields.model_fields) | set(chat_fields.ChatFields.model_fields)
    rows = re.findall(r"^\| (`.*?) \|", SECTIONS["Completions and chats"], flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} <= known


def test_fields_of_the_native_endpoint():
    known = SPELT["POST /generate"] | SPELT["Sampling options"]
    assert set(generate_endpoint.GenerateFields.model_fields) <= known
    assert set(generate_endpoint.SamplingFields.model_fields) <= known


def test_metrics():
    tokenizer = small_tokenizer()
    info = ModelInfo(name="m", vocab=300, context_tokens=9, version="", end_of_text=(tokenizer.end_of_text,))
    metrics = ServeMetrics(Scripted(info, lambda request: []), Drain())
    metrics.end("stop")
    metrics.refuse(400)
    told = set(re.findall(r"^# TYPE (\S+) ", generate_latest(metrics.registry).decode(), flags=re.MULTILINE))
    told = {name for name in told if not name.endswith("_created")}
    assert {name for name in SPELT["Metrics"] if ":" in name and not name.endswith(":")} == told
