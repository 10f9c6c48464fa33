"""The page to chat on, in a browser: what is sent, what is shown, and that nothing of an answer is ever a program."""

import asyncio
import json
import time
from contextlib import contextmanager

import pytest

import browser
from plain_words import PlainWords, small_tokenizer
from scripted import Scripted
from served import served
from superstep.serve.app import make_app
from superstep.serve.scheduling.request import ModelInfo

pytestmark = pytest.mark.skipif(browser.PATH is None, reason=f"none of {', '.join(browser.NAMES)} is installed")

TOKENIZER = small_tokenizer()
NAME = "<b>small</b>"
HOSTILE = "<img src=x onerror='hacked=1'><script>hacked=1</script><a href='javascript:hacked=1'>here</a>&lt;\n\n"


class Steps:
    """Lets an engine go on so many pieces at a time; in place of a gate."""

    def __init__(self):
        self.left = asyncio.Semaphore(0)
        self.loop = None

    async def wait(self):
        await self.left.acquire()

    def let(self, pieces=10_000):
        self.loop.call_soon_threadsafe(lambda: [self.left.release() for _ in range(pieces)])


class Talk:
    """A server and a page that shows it."""

    def __init__(self, page, backend, url):
        self.page, self.backend, self.url = page, backend, url

    def answer(self, text, pieces=10_000):
        self.backend.script = lambda request: TOKENIZER.encode(text)
        self.backend.gate = Steps()
        self.backend.gate.loop = self.loop
        self.backend.gate.let(pieces)

    def say(self, text):
        self.page.type(text)
        self.page.press_enter()

    def turns(self):
        return self.page.value("[...document.querySelectorAll('.turn')].map((t) => [t.classList[1], t.textContent])")

    def wait_until(self, *turns):
        """Until these are the turns that are shown, and nothing is under way."""
        shown = json.dumps([list(turn) for turn in turns])
        made = "JSON.stringify([...document.querySelectorAll('.turn')].map((t) => [t.classList[1], t.textContent]))"
        self.page.wait_for(f"{made} === JSON.stringify({shown}) && go.textContent === 'Send'")

    def asked(self):
        """The conversation that the engine was asked for last."""
        return TOKENIZER.decode(list(self.backend.asked[-1].prompt))


@pytest.fixture(scope="module")
def opened():
    with browser.browser() as page:
        yield page


@contextmanager
def talking(page):
    info = ModelInfo(
        name=NAME, vocab=TOKENIZER.vocab, context_tokens=4096, version="v", end_of_text=(TOKENIZER.end_of_text,)
    )
    backend = Scripted(info, lambda request: [])
    with served(make_app(backend, PlainWords(TOKENIZER))) as at:
        talk = Talk(page, backend, at.url)
        talk.loop = at.loop
        page.open(at.url)
        page.wait_for("document.querySelector('#model').textContent !== ''")
        yield talk


@pytest.fixture
def talk(opened):
    with talking(opened) as made:
        yield made


def test_a_message_is_sent_and_its_answer_streams_in(talk):
    page = talk.page
    assert page.value("document.querySelector('#model').textContent") == NAME
    talk.answer("naïve 😀 café", pieces=8)
    page.type("hello")
    page.press_enter(shift=True)  # breaks the line
    assert talk.turns() == []
    talk.say("there")
    begun = TOKENIZER.decode(TOKENIZER.encode("naïve 😀 café")[:8]).rstrip("\N{REPLACEMENT CHARACTER}")
    page.wait_for(f"document.querySelector('.assistant')?.textContent === {json.dumps(begun)}")
    assert page.value("[go.textContent, text.value]") == ["Stop", ""]
    talk.say("not yet")  # Enter waits for the end of the answer
    assert len(talk.backend.asked) == 1
    talk.backend.gate.let()
    talk.wait_until(["user", "hello\nthere"], ["assistant", "naïve 😀 café"])
    assert page.value("text.value") == "not yet"
    sampling = talk.backend.asked[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.8, 0.95, 512)
    page.value("tokens.value = 4")
    page.press_enter()
    talk.wait_until(
        ["user", "hello\nthere"],
        ["assistant", "naïve 😀 café"],
        ["user", "not yet"],
        ["assistant", TOKENIZER.decode(TOKENIZER.encode("naïve 😀 café")[:4])],
        ["note", "The answer reached its most tokens."],
    )
    asked = talk.asked()
    assert "hello\nthere" in asked
    assert asked.index("naïve 😀 café") < asked.index("not yet")
    page.click("#fresh")
    talk.wait_until()
    talk.say("again")
    page.wait_for("document.querySelector('.note') !== null")
    assert "hello" not in talk.asked()


BYTE_BY_BYTE = """window.fetch = async () => new Response(new ReadableStream({ start(stream) {
    for (const byte of new TextEncoder().encode(%s)) stream.enqueue(new Uint8Array([byte]));
    stream.close();
} }))"""


def test_an_answer_may_be_cut_anywhere_on_the_wire(talk):
    pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in ("naïve ", "😀\n\ndata: ", "café")]
    sent = "".join(f"data: {json.dumps(piece, ensure_ascii=False)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    talk.page.value(f"{BYTE_BY_BYTE % json.dumps(sent)}; 0")
    talk.say("hello")
    talk.wait_until(["user", "hello"], ["assistant", "naïve 😀\n\ndata: café"])


def test_stop_ends_an_answer_which_the_engine_hears(talk):
    talk.answer("the quick brown fox jumps over the lazy dog", pieces=3)
    talk.say("go")
    talk.page.wait_for("document.querySelector('.assistant')?.textContent.length > 0")
    begun = talk.page.value("document.querySelector('.assistant').textContent")
    talk.page.click("#go")
    talk.wait_until(["user", "go"], ["assistant", begun], ["note", "Stopped."])
    deadline = time.monotonic() + 10
    while talk.backend.live and time.monotonic() < deadline:
        time.sleep(0.02)
    assert talk.backend.ended == {0: "taken back"}
    talk.answer("yes")
    talk.page.click("#text")
    talk.say("and now")
    talk.wait_until(
        ["user", "go"], ["assistant", begun], ["note", "Stopped."], ["user", "and now"], ["assistant", "yes"]
    )


def test_what_goes_wrong_is_said_and_what_was_asked_can_be_sent_again(talk):
    page = talk.page
    page.value("temperature.value = 9999")
    talk.say("hello")
    talk.wait_until(["user", "hello"], ["note", "temperature = 9999.0 must be from 0 to 100."])
    assert page.value("text.value") == "hello"
    page.value("temperature.value = 1")
    talk.backend.is_full = True
    page.press_enter()
    page.wait_for(f"{LAST_NOTE}.includes('queue is full')")
    talk.backend.is_full = False
    # Lost in the middle: what came stays.
    talk.backend.fails_after = 4
    talk.answer("the quick brown fox")
    page.press_enter()
    page.wait_for(f"{LAST_NOTE}.includes('the engine was lost')")
    assert page.value("document.querySelector('.assistant').textContent") != ""
    assert page.value("go.textContent") == "Send"


LAST_NOTE = "([...document.querySelectorAll('.note')].at(-1)?.textContent ?? '')"


def test_markup_is_shown_and_never_run(talk):
    page = talk.page
    page.value("hacked = 0")
    talk.answer(HOSTILE)
    talk.say(HOSTILE.strip())
    talk.wait_until(["user", HOSTILE.strip()], ["assistant", HOSTILE])
    assert page.value("hacked") == 0
    assert page.value("document.querySelectorAll('main img, main script, main a, header b').length") == 0
    # Were a tag made of it all the same, the page's policy would load nothing for it.
    page.value(
        "said = []; document.addEventListener('securitypolicyviolation', (e) => said.push(e.effectiveDirective))"
    )
    page.value("new Image().src = '/image'; fetch('http://127.0.0.1:1/').catch(() => 0); 0")
    page.wait_for("said.includes('img-src') && said.includes('connect-src')")


def test_a_server_that_is_not_there_is_told_of(opened):
    with talking(opened) as talk:
        pass
    talk.say("anybody?")
    opened.wait_for("document.querySelector('.note') !== null && text.value === 'anybody?'")
