"""The simulator and the replay log: the same steps as the engine's, and a log that is held against the rules."""

import json
from dataclasses import replace

import pytest
from test_engine import Counting, V

from superstep.cli.main import main
from superstep.cost.serve import ComputeMode, model_of_rank
from superstep.errors import StateError
from superstep.hardware.serving_rate import ServingRate
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.capacity_forecast import ServerSetup, crowds, firsts, rooms
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request import ModelInfo, Request, Sampling
from superstep.serve.scheduling.simulate import Arrival, simulate
from superstep.serve.scheduling.step import Budget
from superstep.serve.scheduling.step_log import LogFile, LogSettings, StepRecorder, read_log, samples, work_of

WAY = ComputeMode(name="fp32", tp=1, block_keys=8, is_paged=True)
MODEL = model_of_rank(shape_of(ModelConfig(name="tiny")), tp=1, number_bytes=4)


def setting(pages, budget):
    return LogSettings(model=MODEL, page_tokens=4, pages=pages, budget=budget, way=WAY)


def engine(pages, budget, watch):
    info = ModelInfo(name="counting", vocab=V, context_tokens=64, end_of_text=(), version="v")
    return InferenceEngine(Counting(), info, Pages(pages, 4), budget, watch=watch)


ARRIVALS = [
    Arrival(prompt_tokens=3 + 7 * n % 40, answer_tokens=1 + 5 * n % 20, is_greedy=bool(n % 3), same=0)
    for n in range(20)
]


def requests():
    return [
        Request(
            id=n,
            prompt=((n + 1) % V,) * one.prompt_tokens,
            salt=str(n),
            sampling=Sampling(temperature=0.0 if one.is_greedy else 1.0, max_tokens=one.answer_tokens, ignore_eos=True),
        )
        for n, one in enumerate(ARRIVALS)
    ]


@pytest.mark.parametrize("pages", [200, 24])  # with few, requests lose theirs to others
def test_the_simulator_makes_the_engines_own_steps(pages):
    budget = Budget(tokens=24, requests=6)
    entries = []
    real = engine(pages, budget, StepRecorder(entries.append))
    for request in requests():
        real.add(request)
    while not real.is_idle:
        real.step()
    told = simulate(ARRIVALS, lambda work: 0.5, pages=Pages(pages, 4), budget=budget, way=WAY, context_tokens=64)
    assert [replace(entry.step, version="") for entry in told.entries] == [
        replace(entry.step, version="") for entry in entries
    ]
    assert [entry.facts for entry in told.entries] == [entry.facts for entry in entries]
    assert [work_of(entry, WAY) for entry in entries] == list(told.works)
    assert [one.tokens for one in told.served] == [one.answer_tokens for one in ARRIVALS]
    assert told.preemptions == real.counters.preemptions
    assert (told.preemptions > 0) == (pages == 24)
    assert told.seconds == 0.5 * len(entries)


def test_who_comes_later_is_begun_later():
    late = [Arrival(at_s=9.0 * n, prompt_tokens=5, answer_tokens=3) for n in range(3)]
    told = simulate(
        late, lambda work: 1.0, pages=Pages(40, 4), budget=Budget(tokens=9, requests=2), way=WAY, context_tokens=64
    )
    assert [one.first_token_s for one in told.served] == [1.0] * 3
    assert [one.last_s for one in told.served] == [3.0, 12.0, 21.0]
    many = [Arrival(prompt_tokens=5, answer_tokens=3)] * 3
    told = simulate(
        many, lambda work: 1.0, pages=Pages(40, 4), budget=Budget(tokens=9, requests=2), way=WAY, context_tokens=64
    )
    assert [one.wait_s for one in told.served] == [0.0, 0.0, 3.0]


def test_a_log_is_read_as_it_was_written_and_a_broken_step_is_found(tmp_path, capsys):
    budget = Budget(tokens=24, requests=6)
    path = tmp_path / "steps.jsonl"
    entries = []
    file = LogFile(path, setting(24, budget))
    recorder = StepRecorder(entries.append)

    class Both:
        def start(self):
            file.start(), recorder.start()

        def begin(self, step, live):
            file.begin(step, live), recorder.begin(step, live)

        def end(self):
            file.end(), recorder.end()

    real = engine(24, budget, Both())
    for request in requests():
        real.add(request)
    for number in range(3):
        real.step()
        real.abort(number)
    while not real.is_idle:
        real.step()
    replay = read_log(path)
    assert replay.setting == setting(24, budget)
    assert [entry.step for entry in replay.entries] == [entry.step for entry in entries]
    assert [entry.left for entry in replay.entries] == [entry.left for entry in entries]
    assert max(replay.used_pages) <= 24
    assert [sample.work for sample in samples(replay.setting, replay.entries)] == [work_of(e, WAY) for e in entries]
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines, lines[-1][:20]]), encoding="utf-8")  # the server is writing
    assert len(read_log(path).entries) == len(entries)
    assert main(["view", str(path), "--width", "80"]) == 0
    said = capsys.readouterr().out
    assert f"{len(entries)} steps of 20 requests" in said
    assert f"{sum(work_of(e, WAY).drawn for e in entries)} tokens drawn" in said
    assert max(map(len, said.splitlines()[3:8])) <= 80
    wrong = json.loads(lines[1])
    wrong["chunks"][1][6][0] = wrong["chunks"][0][6][0]  # two requests write to one page
    path.write_text("\n".join([lines[0], json.dumps(wrong), *lines[2:]]), encoding="utf-8")
    assert main(["view", str(path)]) == 2
    with pytest.raises(StateError, match=r"line 2: request \d+: writes to page \d+, which another one reads"):
        read_log(path)
    assert LogFile(path, setting(24, budget)).path.name == "steps.jsonl.1"


def test_what_is_foreseen_of_a_server():
    """Of a machine on which a step takes a second and a row a tenth: small numbers, which can be checked by hand."""
    rate = ServingRate(
        way="fp32",
        tp=1,
        block_keys=8,
        is_paged=True,
        term_s=(("step", 1.0), ("row", 0.1)),
        held_bytes=4.0,
        beside_bytes=0.0,
        spread=0.0,
    )
    server = ServerSetup(
        model=MODEL, rate=rate, pages=32, page_tokens=16, budget=Budget(tokens=64, requests=8), context_tokens=256
    )
    assert [(room.context_tokens, room.streams) for room in rooms(server)] == [(256, 2)]
    alone = {one.prompt_tokens: one.first_token_s for one in firsts(server)}
    assert alone == pytest.approx({32: 1 + 3.2, 128: 2 * (1 + 6.4)})
    one, two, *_ = crowds(server, prompt_tokens=10, answer_tokens=5)
    assert one.tokens_per_s == pytest.approx(5 / (2.0 + 4 * 1.1))
    assert two.token_s == pytest.approx(1.2)
    (both,) = [each for each in crowds(server, prompt_tokens=10, answer_tokens=5, replicas=2) if each.streams == 2]
    assert both.tokens_per_s == pytest.approx(2 * one.tokens_per_s)
    assert server.key_bytes == 32 * 16 * MODEL.key_bytes
    assert server.weight_bytes == 4 * (MODEL.linears + MODEL.embedding)
