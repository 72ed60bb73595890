"""``kvedge exec python -m llama_cpp.server`` under the openai client: the server's own texts.

Several clients at once, streams that break off, a server that is killed and comes back.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("llama_cpp.llama_cpp")
gguf_files = pytest.importorskip("helpers.gguf_files")
openai = pytest.importorskip("openai")
for package in ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings"):
    pytest.importorskip(package)

from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER  # noqa: E402
from kvedge.llama import LlamaModel  # noqa: E402

PROMPTS = [
    "Once upon a time, there was a little girl named Lily.",
    "Tim had a big red ball.",
    "The dog ran to the park and",
    "One day, a bird saw",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    at = tmp_path_factory.mktemp("server") / "stories.gguf"
    return gguf_files.write_gguf(at, LlamaModel.from_file(STORIES_MODEL, STORIES_TOKENIZER))


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server:
    """A server and its client."""

    def __init__(self, path, port, *before, server=("llama_cpp.server",)):
        self.process = subprocess.Popen(
            [
                *(sys.executable, *before, "-m", *map(str, server), "--model", str(path)),
                *("--host", "127.0.0.1", "--port", str(port), "--n_ctx", "512", "--n_threads", "1"),
                *("--flash_attn", "true", "--interrupt_requests", "false", "--verbose", "false"),
            ],
            env={**os.environ, "KVEDGE_GGML_STATS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60, max_retries=0
        )
        for _ in range(1200):  # a tenth of a second each
            try:
                self.client.models.list()
                return
            except openai.APIConnectionError:
                assert self.process.poll() is None, self.process.stderr.read()
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def text(self, prompt, tokens=40):
        done = self.client.completions.create(
            model="stories", prompt=prompt, max_tokens=tokens, temperature=0
        )
        return done.choices[0].text

    def texts(self):
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            return list(threads.map(self.text, PROMPTS))

    def break_off(self):
        """Begin a stream, and leave it after a few pieces."""
        stream = self.client.completions.create(
            model="stories", prompt=PROMPTS[0], max_tokens=300, temperature=0, stream=True
        )
        for _ in zip(range(3), stream, strict=False):
            pass
        stream.close()

    def stop(self, how=signal.SIGINT):
        self.process.send_signal(how)
        return self.process.communicate(timeout=60)[1]


@contextmanager
def served(path, port, *before, **options):
    server = Server(path, port, *before, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.subprocess
def test_a_server_writes_the_same_texts_with_kvedge(path):
    with served(path, free_port()) as alone:
        expected = alone.texts()
    assert all(expected)
    port = free_port()
    with served(path, port, "-m", "kvedge", "exec", sys.executable) as server:
        assert server.texts() == expected
        with ThreadPoolExecutor(2) as threads:
            for broken in [threads.submit(server.break_off) for _ in range(4)]:
                broken.result()
        assert server.texts() == expected
        server.stop(signal.SIGKILL)
        with served(path, port, "-m", "kvedge", "exec", sys.executable) as again:
            assert again.texts() == expected
            assert re.search(r"[1-9]\d* attention nodes", again.stop())


@pytest.mark.subprocess
def test_a_server_finds_prompts_again_after_a_restart(path, tmp_path):
    prompts = [(PROMPTS[0] + " ") * 12 + end for end in ("The dog", "A cat sat")]
    with served(path, free_port()) as alone:
        expected = [alone.text(prompt, 8) for prompt in prompts]
    told = []
    for _ in range(2):
        command = ("kvedge.llama_cpp_server", "--prompt-store", tmp_path)
        with served(path, free_port(), server=command) as server:
            assert [server.text(prompt, 8) for prompt in prompts] == expected
            told.append(re.findall(r"of (\d+) tokens, (\d+) of them", server.stop()))
    cold, warm = ([tuple(map(int, pair)) for pair in pairs] for pairs in told)
    assert [reused for _, reused in cold] == [0, 0]  # the second begins as the context does
    assert warm[0][0] == cold[0][0] and [total - reused for total, reused in warm] == [1, 1]
