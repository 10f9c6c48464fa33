"""`superstep tune sft`: what is prepared and refused, what a run leaves, how it goes on, and that it learns."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import runs
import tuned
from superstep.cli.arguments.tune.tune import read_kind
from superstep.cli.main import main
from superstep.data.token_files import open_corpus
from superstep.data.token_stream import stream_of
from superstep.data.tokenizer import END_OF_TEXT, load_tokenizer
from superstep.errors import ConfigError
from superstep.numerics.loss import IGNORE
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import resolve
from superstep.run.console import Silent
from superstep.run.launch_rules import Launcher
from superstep.run.tune_job import prepare_tune_job, resolve_recipe
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import ends_of_text, open_engine
from superstep.serve.config import ServeConfig
from superstep.serve.scheduling.request import Sampling
from superstep.serve.text.chat_template import Chat, load_chat_template
from superstep.serve.text.chat_tokens import ChatEncoder
from superstep.serve.text.template_process import TemplateProcess
from superstep.state.checkpoint import read_position
from superstep.state.checkpoint_dirs import checkpoints
from superstep.tune.chat_template import PLAIN
from superstep.tune.config import read_recipe
from superstep.tune.initial_model import start_from
from superstep.tune.prepare_conversations import Conversations
from superstep.tune.recipe import write


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tuned.make_files(tmp_path_factory.mktemp("made"))


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A folder to work in, with a base, its conversations and a recipe."""
    for name in ("base", "chats.jsonl"):
        (tmp_path / name).symlink_to(made / name)
    (tmp_path / "recipe.toml").write_text(tuned.RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune(*flags):
    return main(["tune", "sft", "recipe.toml", *flags])


def error(capsys):
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("superstep: "), said
    return said


def wanted(*, data=None, sft=None):
    config = read_recipe(Path("recipe.toml"))
    config = replace(config, data=replace(config.data, **(data or {})), sft=replace(config.sft, **(sft or {})))
    run = start_from(config)
    return Conversations(run, config.sft, resolve(run).shape.vocab)


# What is prepared.


def test_conversations_are_prepared_once_for_equal_settings(place):
    folder = place / "data"
    corpus = wanted().prepare(folder)
    before = {name: (folder / name).stat().st_mtime_ns for name in ("train.tokens", "corpus.json")}
    assert wanted().is_prepared(folder)
    wanted().prepare(folder)
    assert before == {name: (folder / name).stat().st_mtime_ns for name in before}
    assert corpus.manifest.kind == "answers"
    assert corpus.manifest.train_documents + corpus.manifest.validation_documents == 60
    assert corpus.manifest.validation_documents > 0
    assert not list(folder.glob("*.partial"))
    assert not list(folder.glob("*.lock"))
    stream = stream_of(wanted().run, corpus, "train")
    for sample in range(0, stream.sequences, 4):
        batch = stream.batch(sample, slice(0, 4))
        assert batch.valid_tokens == int((batch.targets_BS != IGNORE).sum()), "the divisor, without a token read"
    for other in (
        wanted(data={"sequence_tokens": 50}),
        wanted(data={"packed": False}),
        wanted(sft={"history": "split"}),
        wanted(data={"validation_fraction": 0.2}),
    ):
        assert not other.is_prepared(folder)
    (place / "other.jinja").write_text(PLAIN + " ", encoding="utf-8")
    assert not wanted(sft={"template": "other.jinja"}).is_prepared(folder)
    # Nobody's tokens are replaced in a folder that is shared.
    with pytest.raises(Exception, match=r"^data.cache = '.*' holds the tokens of other settings"):
        wanted(data={"sequence_tokens": 50}).prepare(folder, is_shared=True)


def test_many_records_are_shown_at_one_turn_of_the_templates_process(place, monkeypatch):
    asked = []
    ask = TemplateProcess._ask
    monkeypatch.setattr(TemplateProcess, "_ask", lambda self, line: (asked.append(line), ask(self, line))[1])
    wanted().prepare(place / "data")
    assert len([line for line in asked if line.get("variables")]) == 1, "60 records"


def test_what_is_too_long_is_refused_dropped_or_cut_and_counted(place, capsys):
    records = [tuned.conversation(k) for k in range(20)]
    records[7] = {"messages": [records[7]["messages"][0], {"role": "assistant", "content": "be " * 150}]}
    records[9] = {"messages": [{"role": "user", "content": "be " * 150}, records[9]["messages"][1]]}
    tuned.write_records(place / "long.jsonl", records)
    flags = ["--data.corpus", "long.jsonl", "--train.steps", "1"]
    assert tune(*flags) == 2
    said = error(capsys)
    assert "'long.jsonl:8' has " in said
    assert "data.sequence_tokens = 96 has no room for them; set data.sequence_tokens to " in said
    assert not (place / "tuned").exists()
    assert tune(*flags, "--sft.too-long", "drop", "--state.dir", "dropped") == 0
    assert "18 conversations" in (told := capsys.readouterr().out)
    assert "; too long: 2 dropped\n" in told
    assert tune(*flags, "--sft.too-long", "truncate", "--state.dir", "cut") == 0
    assert "; too long: 1 dropped, 1 truncated\n" in capsys.readouterr().out
    corpus = open_corpus(place / "cut" / "data")
    assert (corpus.manifest.dropped, corpus.manifest.truncated) == (1, 1)
    sizes = [size for split in (corpus.train, corpus.validation) for size in (split.bounds[1:] - split.bounds[:-1])]
    assert max(sizes) == 97


def test_parquet_and_every_form_of_a_record(place):
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import Table

    table = [{**tuned.conversation(k), "tools": None} for k in range(6)]
    parquet.write_table(Table.from_pylist(table), place / "some.parquet")
    forms = [
        {"prompt": "to be", "completion": " or not"},
        {"prompt": tuned.conversation(0)["messages"][:1], "completion": tuned.conversation(0)["messages"][1:]},
    ]
    tuned.write_records(place / "forms.jsonl", forms)
    corpus = wanted(data={"corpus": ("some.parquet", "forms.jsonl")}).prepare(place / "data")
    assert corpus.manifest.train_documents + corpus.manifest.validation_documents == 8


def test_two_conversations_are_one_to_learn_and_one_to_hold_out(place):
    tuned.write_records(place / "two.jsonl", [tuned.conversation(0), tuned.conversation(1)])
    corpus = wanted(data={"corpus": ("two.jsonl",), "validation_fraction": 1e-9}).prepare(place / "data")
    assert (corpus.manifest.train_documents, corpus.manifest.validation_documents) == (1, 1)
    decode = corpus.tokenizer().decode
    assert decode(corpus.validation.tokens[:].tolist()) == f"User: be, be\n\nAssistant: be{END_OF_TEXT}\n\n"
    learnt = corpus.validation.tokens[corpus.validation.answers > 0].tolist()
    assert decode(learnt) == f" be{END_OF_TEXT}"


BAD = {
    "'bad.jsonl:2' has no assistant turn to learn": {"messages": [{"role": "user", "content": "a"}]},
    "'bad.jsonl:2' is a list, not an object": [1],
    "'bad.jsonl:2' has no messages, and no prompt with a completion (its fields: text)": {"text": "a"},
}


def test_mistakes_end_with_one_line_and_leave_nothing(place, capsys):
    before = sorted(path.name for path in place.iterdir())
    for said, record in BAD.items():
        tuned.write_records(place / "bad.jsonl", [tuned.conversation(0), record])
        assert tune("--data.corpus", "bad.jsonl") == 2
        assert said in error(capsys)
        (place / "bad.jsonl").unlink()
    for said, flags in {
        "start is left out; name a run": ["--start", ""],
        "'nowhere' is not there; name a run, a checkpoint or a Hugging Face folder.": ["--start", "nowhere"],
        "start = '.' has no config.json": ["--start", "."],
        "[model] is given beside start": ["--model.name", "tiny"],
        "data.corpus is empty": ["--data.corpus"],
        "is neither .jsonl nor .parquet": ["--data.corpus", "recipe.toml"],
        "data.document_mask = false would show": ["--data.document-mask", "false"],
        "sft.template = 'no.jinja' cannot be read": ["--sft.template", "no.jinja"],
        "unknown flag --sft.packed": ["--sft.packed", "true"],
        "data.sequence_tokens = 4096 is longer than": ["--data.sequence-tokens", "4096"],
    }.items():
        assert tune(*flags) == 2, flags
        assert said in error(capsys), flags
    assert main(["tune", "sfd"]) == 2
    assert "has no action 'sfd'; did you mean 'sft'?" in error(capsys)
    assert main(["tune"]) == 2
    assert "name one of sft" in error(capsys)
    assert main(["tune", "sft"]) == 2
    assert "start is left out" in error(capsys)
    assert sorted(path.name for path in place.iterdir()) == before


# What a run leaves, and how it goes on.


def test_a_run_says_how_it_was_made_and_its_checkpoints_how_they_are_talked_to(place):
    assert tune() == 0
    config = read_recipe(place / "tuned" / "recipe.toml")
    assert write(config) == (place / "tuned" / "recipe.toml").read_text(encoding="utf-8")
    asked = read_recipe(place / "recipe.toml")
    assert (config.start, config.sft, config.data) == (asked.start, asked.sft, asked.data)
    newest = checkpoints(place / "tuned" / "checkpoints")[-1]
    template = load_chat_template(newest)
    assert template.source() == PLAIN
    tokenizer = load_tokenizer(newest / "tokenizer.json")
    assert ends_of_text(newest) == (tokenizer.end_of_text,)
    assert [line["tokens"] > 0 for line in runs.events(place / "tuned", "step")] == [True] * 6
    # A tuned run is a start itself, and says what it was shown chats by.
    assert tune("--start", "tuned", "--state.dir", "again", "--train.steps", "1") == 0
    assert load_chat_template(checkpoints(place / "again" / "checkpoints")[-1]).source() == PLAIN


def test_a_template_of_the_start_and_its_end_of_turn_are_kept(place, capsys):
    (place / "base").unlink()
    tuned.make_files(place, template=tuned.CHATML)
    assert tune("--train.steps", "1") == 2, "nothing ends an answer: the tokenizer has no such token"
    assert "does not end with a token" in error(capsys)
    core = load_tokenizer(place / "base" / "tokenizer.json").core
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    core.save(str(place / "base" / "tokenizer.json"))
    assert tune("--train.steps", "1") == 2
    assert "ids, more than the model's vocabulary of" in error(capsys)
    config = json.loads((place / "base" / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == core.get_vocab_size() - 2
    core.add_special_tokens([END_OF_TEXT])
    vocab = json.loads(core.to_str())
    # Two tokens of the vocabulary that no text has make room.
    for number, token in enumerate(("<|im_start|>", "<|im_end|>")):
        added = next(each for each in vocab["added_tokens"] if each["content"] == token)
        added["id"] = config["vocab_size"] - 1 - number
        name = next(name for name, id_ in vocab["model"]["vocab"].items() if id_ == added["id"])
        del vocab["model"]["vocab"][name]
        vocab["model"]["merges"] = [pair for pair in vocab["model"]["merges"] if "".join(pair) != name]
        vocab["model"]["vocab"].pop(token, None)
    (place / "base" / "tokenizer.json").write_text(json.dumps(vocab), encoding="utf-8")
    assert tune("--train.steps", "1") == 0
    newest = checkpoints(place / "tuned" / "checkpoints")[-1]
    assert load_chat_template(newest).source() == tuned.CHATML
    tokenizer = load_tokenizer(newest / "tokenizer.json")
    assert tokenizer.core.token_to_id("<|im_end|>") in ends_of_text(newest)


def test_a_resumed_run_is_the_run_that_never_stopped(place, capsys):
    exact = ["--numerics.exact", "true"]
    assert tune(*exact, "--state.dir", "whole") == 0
    assert tune(*exact, "--state.dir", "parts", "--train.steps", "3") == 0
    # With other layouts too, and without the recipe: the run has its own.
    resume = ["--state.dir", "parts", "--state.existing", "resume"]
    assert main(["tune", "sft", *resume, "--train.steps", "4"]) == 0
    assert tune(*exact, *resume, "--train.steps", "6") == 0
    whole, parts = (runs.events(place / name, "step") for name in ("whole", "parts"))
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_seen")
    assert [[line[key] for key in kept] for line in parts] == [[line[key] for key in kept] for line in whole]
    last = [checkpoints(place / name / "checkpoints")[-1] for name in ("whole", "parts")]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()
    capsys.readouterr()
    assert tune(*exact, *resume, "--sft.too-long", "drop", "--train.steps", "7") == 2
    assert "it cannot change within a run" in error(capsys)
    assert main(["tune", "sft", *resume, "--train.steps", "7", "--start", "whole"]) == 2
    assert "start = 'whole', and the run in state.dir = 'parts' was started with 'base'" in error(capsys)


@pytest.mark.multiproc
def test_a_run_is_so_many_passes_over_its_sequences(place, capsys):
    recipe = place / "recipe.toml"
    assert tune("--sft.epochs", "1") == 2
    assert "sft.epochs = 1 and train.steps = 6 both set the length of the run; leave one of them out" in error(capsys)
    recipe.write_text(tuned.RECIPE.replace("steps = 6\n", ""), encoding="utf-8")
    assert tune("--sft.epochs", "0") == 2
    assert "sft.epochs = 0 must be above 0" in error(capsys)
    assert tune("--sft.epochs", "0.5") == 0
    saved = read_config(place / "tuned" / "run.toml")
    sequences = stream_of(saved, open_corpus(place / "tuned" / "data"), "train").sequences
    half = -(-sequences // 8)
    assert saved.train.steps == half > 1, "four sequences a step"
    assert tune("--sft.epochs", "0.5", "--state.existing", "resume") == 0
    assert "is complete at step" in capsys.readouterr().out
    assert tune("--sft.epochs", "1", "--state.existing", "resume") == 0
    last = checkpoints(place / "tuned" / "checkpoints")[-1]
    assert read_position(last).step == -(-sequences // 4)
    assert read_recipe(place / "tuned" / "recipe.toml").sft.epochs == 1.0


def test_a_run_goes_on_with_another_layout_to_the_bit(place):
    exact = ["--numerics.exact", "true"]
    assert tune(*exact, "--state.dir", "whole", "--train.steps", "4", "--state.save-every", "2") == 0
    resume = ["--state.dir", "parts", "--state.existing", "resume"]
    assert tune(*exact, "--state.dir", "parts", "--train.steps", "2", "--plan.dp", "2", "--plan.zero", "2") == 0
    assert tune(*exact, *resume, "--train.steps", "4", "--plan.tp", "2") == 0
    last = [checkpoints(place / name / "checkpoints")[-1] for name in ("whole", "parts")]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()


# That it learns.


def test_the_model_answers_and_stops(place):
    # It answers all of them after sixty steps. Microbatches of fewer would take longer, and are not what this is about.
    flags = ["--train.steps", "100", "--train.lr", "1e-2", "--train.batch-sequences", "8", "--plan.microbatch", "8"]
    assert tune(*flags, "--train.eval-every", "100", "--state.save-every", "100") == 0
    newest = checkpoints(place / "tuned" / "checkpoints")[-1]
    tokenizer = load_tokenizer(newest / "tokenizer.json")
    encoder = ChatEncoder(load_chat_template(newest), tokenizer)
    asked = [tuned.asked(number) for number in range(1000, 1007)]
    prompts = [encoder.tokens(Chat(messages=[{"role": "user", "content": question}])) for question, _ in asked]
    engine = open_engine(newest, ServeConfig(compute="fp32", requests=8))
    found = generate(engine, prompts, Sampling(max_tokens=8, temperature=0))
    texts = [tokenizer.decode([told.token for told in one.tokens]) for one in found]
    assert [text.removesuffix(END_OF_TEXT).strip() for text in texts] == [answer for _, answer in asked]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_ranks_of_another_launcher_write_no_samples(kind, place):
    _, recipe = read_kind([kind, "recipe.toml", "--observe.sample", "a"])
    refusal = "observe.sample = 'a' needs ranks that one launcher of superstep has, not those of torchrun and srun;"
    with (
        pytest.raises(ConfigError, match=refusal),
        prepare_tune_job(
            resolve_recipe(kind, recipe), kind, recipe, lambda *made: None, Silent(), launcher=Launcher(is_own=False)
        ),
    ):
        pass
