"""The server with OpenAI's own client: answers are those of `generate`, bad requests are told why, and it lives on."""

import concurrent.futures
import copy
import functools
import logging
import socket
import threading
import time

import pytest

WHY = "needs the extra `serve`: fastapi, uvicorn and openai"
pytest.importorskip("fastapi", reason=WHY)
pytest.importorskip("uvicorn", reason=WHY)
openai = pytest.importorskip("openai", reason=WHY)
pytest.importorskip("sklearn", reason="the sample's questions are drawn from scikit-learn's digits")

from served import serving  # noqa: E402

import mmqc  # noqa: E402
from mmqc.cli.serving import server as module  # noqa: E402
from mmqc.cli.serving.limits import Limits  # noqa: E402
from mmqc.cli.serving.server import Served, ServeError, listen  # noqa: E402
from mmqc.samples.chat import ChatProcessor, as_messages  # noqa: E402

GREEDY = {"model": "digits", "temperature": 0, "max_tokens": 80}
NOTHING = [{"role": "user", "content": "read image 1."}]


@pytest.fixture(scope="module")
def sample():
    return mmqc.samples.load("digits-vqa")


@pytest.fixture(scope="module")
def served(sample):
    return Served("digits", sample.model, ChatProcessor(sample.processor), compiled=False)


@pytest.fixture(scope="module")
def client(served):
    with serving(served) as client:
        yield client


@pytest.fixture(scope="module")
def asked(sample):
    """Questions, and what `generate` answers to each."""
    questions = sample.questions(10)
    prompts = [sample.processor(q.prompt, q.images) for q in questions]
    made = [sample.model.generate(**p, max_new_tokens=80, do_sample=False)[0, p["input_ids"].shape[1] :] for p in prompts]
    return [
        (as_messages(q.prompt, q.images), sample.processor.decode(ids), len(ids)) for q, ids in zip(questions, made, strict=True)
    ]


def test_chat__answers_are_those_of_generate(client, asked):
    for question, answer, tokens in asked:
        got = client.chat.completions.create(messages=question, **GREEDY)
        assert (got.choices[0].message.content, got.usage.completion_tokens) == (answer, tokens)
        assert got.choices[0].finish_reason == "stop"


def test_chat__streams_the_same(client, asked):
    for question, answer, tokens in asked[:5]:
        chunks = list(client.chat.completions.create(messages=question, stream=True, **GREEDY))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer
        assert (chunks[-1].choices[0].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", tokens)


def test_chat__in_parallel_the_same(client, asked):
    def ask(i):
        return client.chat.completions.create(messages=asked[i % len(asked)][0], **GREEDY).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(24))) == [asked[i % len(asked)][1] for i in range(24)]


def test_completions__text(client, sample):
    prompt = sample.processor("read image 1.")
    ids = sample.model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    want = sample.processor.decode(ids)
    asking = {**GREEDY, "max_tokens": 4, "prompt": "read image 1."}
    assert client.completions.create(**asking).choices[0].text == want
    assert "".join(c.choices[0].text for c in client.completions.create(stream=True, **asking)) == want


def test_models__there_is_one(client):
    assert [m.id for m in client.models.list()] == ["digits"]


def test_chat__stops_and_lengths(client, asked):
    long, answer, _ = next(a for a in asked if " " in a[1])
    cut = client.chat.completions.create(messages=long, **{**GREEDY, "max_tokens": 5}).choices[0]
    assert (cut.message.content, cut.finish_reason) == (answer[:5], "length")
    stopped = client.chat.completions.create(messages=long, stop=answer[4:6], **GREEDY).choices[0]
    assert stopped.message.content == answer[:6]
    assert stopped.finish_reason == "stop"


def test_chat__a_seed_is_that_of_its_request(client):
    hot = {"model": "digits", "messages": NOTHING, "temperature": 2, "max_tokens": 12}

    def ask(seed):
        return client.chat.completions.create(seed=seed, **hot).choices[0].message.content

    alone = [ask(seed) for seed in range(4)]
    assert len({*alone}) > 1
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, [0, 1, 2, 3] * 3)) == alone * 3


def test_chat__bias_of_a_token(client):
    seven = str(ChatProcessor(None).tokenizer.convert_tokens_to_ids("7"))
    asking = {**GREEDY, "max_tokens": 3, "messages": NOTHING}
    assert client.chat.completions.create(logit_bias={seven: 100}, **asking).choices[0].message.content == "777"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "other"}, "pinned to 'digits'"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": "é"}]}, "printable ASCII"),
        ({"n": 3}, "n = 3"),
        ({"max_tokens": 4096}, "more than the model's 1024"),
        ({"messages": [{"role": "user", "content": "7" * 2000}]}, "2001 tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
            "not read",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "no place for tools"),
        ({"extra_body": {"generation_config": "{}"}}, "generation_config"),
    ],
)
def test_chat__what_is_bad_is_told_why_and_the_server_lives_on(client, asked, changes, words):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=words) as info:
            client.chat.completions.create(**{**GREEDY, "messages": NOTHING, "stream": stream, **changes})
        assert info.value.status_code == 400
    assert client.chat.completions.create(messages=asked[0][0], **GREEDY).choices[0].message.content == asked[0][1]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"messages": [{"role": "user", "content": ""}], "a": NaN}']
)
def test_chat__bodies_that_are_no_request(client, body):
    answer = client.with_options(max_retries=0)._client.post(
        f"{client.base_url}chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_server__what_transformers_also_has_is_not_open(client):
    for path in ("load_model", "reset", "docs", "openapi.json", "v1/responses", "v1/audio/transcriptions"):
        assert client._client.post(str(client.base_url).removesuffix("v1/") + path, json={"model": "x"}).status_code == 404


def test_server__token_and_length(served):
    with serving(served, Limits(body=2000), token="right") as client:
        assert client.models.list().data
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.APIStatusError) as info:
            client.chat.completions.create(messages=[{"role": "user", "content": "7" * 2000}], **GREEDY)
        assert info.value.status_code == 413


def test_server__an_error_while_it_generates(served, monkeypatch):
    broken = copy.copy(served.model)

    def generate(**_):
        raise RuntimeError('a "fault"')

    monkeypatch.setattr(broken, "generate", generate)
    with serving(Served("digits", broken, served.processor, compiled=False)) as client:
        with pytest.raises(openai.InternalServerError, match='a "fault"'):
            client.chat.completions.create(messages=NOTHING, **GREEDY)
        stream = client.chat.completions.create(messages=NOTHING, stream=True, **GREEDY)
        with pytest.raises(openai.APIError):
            list(stream)


@pytest.mark.parametrize("stream", [True, False])
def test_server__who_leaves_is_not_answered(served, stream, caplog, monkeypatch):
    """The answer would have 900 tokens of 5 ms and more; the next one is there long before that."""
    endless = copy.copy(served.model.generation_config)
    endless.eos_token_id = None
    monkeypatch.setattr(served.model, "generation_config", endless)
    seen = threading.Event()
    forward = served.model.forward

    @functools.wraps(forward)
    def slow(*args, **kwargs):
        seen.set()
        time.sleep(0.005)
        return forward(*args, **kwargs)

    monkeypatch.setattr(served.model, "forward", slow)
    asking = {"messages": NOTHING, **GREEDY, "max_tokens": 900}
    with caplog.at_level(logging.INFO, "mmqc.serve"), serving(served) as client:
        if stream:
            with client.chat.completions.create(stream=True, **asking) as chunks:
                next(iter(chunks))  # says who speaks, perhaps before anything was computed
                assert seen.wait(30)
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=1).chat.completions.create(**asking)
        assert seen.is_set()
        start = time.perf_counter()
        client.chat.completions.create(**{**asking, "max_tokens": 2})
        assert time.perf_counter() - start < 3
    left = [line for line in caplog.messages if "the client left" in line]
    assert len(left) == 1
    assert int(left[0].split(" new")[0].rpartition(" ")[2]) < 500


def test_reads__what_the_model_takes(served):
    reads = served.reads()
    assert (reads.images, reads.tools, reads.vocabulary) == (True, False, 104)


def test_listen__says_that_a_port_is_in_use():
    with listen("127.0.0.1", 0) as taken, pytest.raises(ServeError, match="cannot be listened at"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_listen__an_answer_does_not_wait_for_an_acknowledgement():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_answers__a_template_of_its_own_stays():
    """A processor whose prompts open answers as its family does keeps transformers' template."""

    class Found:
        @staticmethod
        def response_template(processor, model):
            return {"start_anchor": "<|im_start|>assistant\n"}

    class Tokenizer:
        chat_template = "{{ '<|im_start|>assistant\\n' }}"

    tokenizer = Tokenizer()
    module._answers_as_it_writes(Found, Served("m", None, tokenizer))
    assert not hasattr(tokenizer, "response_template")
