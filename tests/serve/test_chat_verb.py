"""superstep chat through a pipe: with a server that is scripted, with a model that is loaded here, and with nobody."""

import io
import re
import sys

import pytest

import model_folder
from superstep.cli.main import main


def talk(monkeypatch, lines, *argv):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *map(str, argv)])


def asked(setting):
    """What the engine was asked, as text."""
    return [setting.words.decode(list(request.prompt)) for request in setting.backend.asked]


def test_a_conversation_with_a_server_goes_on_until_it_is_reset(setting, monkeypatch, capsys):
    setting.say("naïve 😀 café")
    lines = ["hello", "", "and more", "/reset", "again", "/system be short", "last", "/what", "/help"]
    assert talk(monkeypatch, lines, setting.url, "--temperature", "0", "--max-tokens", "99", "--seed", "4") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["naïve 😀 café"] * 4
    first, second, third, fourth = asked(setting)
    assert "hello" in first
    assert re.search("hello.*naïve 😀 café.*and more", second, re.DOTALL)
    assert "again" in third
    assert "hello" not in third
    assert "be short" in fourth
    sampling = setting.last.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.0, 99, 4)
    assert "small at http" in err
    assert "/what is not a command" in err
    assert "/reset" in err


def test_what_a_server_refuses_and_one_that_is_lost_are_told(setting, monkeypatch, capsys):
    assert talk(monkeypatch, ["hello"], f"{setting.url}/v1", "--model", "big") == 2
    assert re.search(r"http://\S+ says 404: .*big", capsys.readouterr().err)
    setting.backend.fails_after = 2
    try:
        assert talk(monkeypatch, ["hello"], setting.url) == 2
    finally:
        setting.backend.fails_after = None
    assert "the engine was lost; ask again." in capsys.readouterr().err


def test_an_answer_is_stopped_by_ctrl_c_and_the_conversation_goes_on(monkeypatch, capsys):
    from superstep.cli.chat.chat import ChatHistory

    class Endless:
        def __init__(self):
            self.closed, self.asked = 0, []

        def answer(self, messages):
            self.asked.append([one["content"] for one in messages])
            try:
                yield "one "
                yield "two"
                if len(self.asked) == 1:
                    raise KeyboardInterrupt
            finally:
                self.closed += 1

    lines = iter(["count", "on"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    talker = Endless()
    assert ChatHistory(talker, None, prompt="> ").run() == 0
    assert talker.closed == 2
    assert talker.asked[1] == ["count", "one two", "on"]
    assert capsys.readouterr().out.startswith("one two (stopped)\n")


def test_a_model_is_loaded_and_answers_the_same_to_the_same_seed(tmp_path, monkeypatch, capsys):
    folder = model_folder.write_folder(tmp_path / "model", width=32, heads=4, kv_heads=2, ffn=64)
    flags = ("--seed", "3", "--max-tokens", "12", "--serve.kernels", "off", "--serve.context-tokens", "256")
    assert talk(monkeypatch, ["To be?", "/reset", "To be?"], folder, *flags) == 0
    out, err = capsys.readouterr()
    half = len(out) // 2
    assert out[:half] == out[half:]
    assert len(out) > 10
    assert "no chat template" in err
    assert talk(monkeypatch, ["To be? " * 60], folder, *flags) == 2
    assert "begin a new one with /reset" in capsys.readouterr().err


CUT = re.compile(r"max-?_?tokens = 500 is more than the context has room for; an answer has at most \d+\.")


def test_more_tokens_than_the_context_has_room_for_are_told_by_a_server_and_by_a_model(
    setting, tmp_path, monkeypatch, capsys
):
    folder = model_folder.write_folder(tmp_path / "model", width=32, heads=4, kv_heads=2, ffn=64)
    flags = ("--seed", "3", "--serve.kernels", "off", "--serve.context-tokens", "64")
    for where, more in ((setting.url, ()), (folder, flags)):
        assert talk(monkeypatch, ["To be?"], where, *more, "--max-tokens", "500") == 0
        assert len(CUT.findall(capsys.readouterr().err)) == 1
        assert talk(monkeypatch, ["To be?"], where, *more, "--max-tokens", "5") == 0
        assert talk(monkeypatch, ["To be?"], where, *more) == 0
        assert "has room for" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "name a model or the URL of a server"),
        (("http://127.0.0.1:9",), "no server answers at http://127.0.0.1:9"),
        (("http://",), "is not the URL of a server"),
        (("nothing",), "'nothing' is not there"),
        (("nothing", "--plan.tp", "2"), "chat with its URL"),
        (("nothing", "--key", "x"), "are for the URL of a server"),
        (("nothing", "--temperature", "-1"), "--temperature = -1.0 must be"),
    ],
)
def test_a_mistake_is_one_line(argv, said, monkeypatch, capsys):
    assert talk(monkeypatch, ["hello"], *argv) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
