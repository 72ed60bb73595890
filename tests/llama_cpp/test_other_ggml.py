"""Another library with a ggml of its own in the process, whisper.cpp: it goes on as before."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("llama_cpp.llama_cpp")
pytest.importorskip("_pywhispercpp")
from helpers.llama_cpp_models import ROOT
from helpers.whisper_model import write_whisper

PROGRAM = """
import json
import sys
sys.path.insert(0, {helpers!r})
import numpy as np
import _pywhispercpp as whisper
from pywhispercpp.model import Model
{before}
model = Model({path!r}, n_threads=1, redirect_whispercpp_logs_to=None)
audio = (np.random.default_rng(1).standard_normal(64000) * 0.1).astype(np.float32)
model.transcribe(
    audio, single_segment=True, temperature_inc=0.0, max_tokens=12, no_context=True,
    logprob_thold=-100.0, entropy_thold=0.0, no_speech_thold=1.0,
)
context = model._ctx
{after}
print(json.dumps([
    (of(context, i, j), probability(context, i, j))
    for of, probability in [(whisper.whisper_full_get_token_id, whisper.whisper_full_get_token_p)]
    for i in range(whisper.whisper_full_n_segments(context))
    for j in range(whisper.whisper_full_n_tokens(context, i))
]))
"""
BESIDE = """
from llama_cpp_models import Model as Llama
from kvedge.llama_cpp import enable, report
assert enable().enabled
"""
ALSO = """
llama = Llama({llama!r})
with llama.context() as made:
    made.decode([1] * 600)
assert report().taken
"""


@pytest.mark.subprocess
def test_whisper_beside_llama_cpp_hears_what_it_heard(tmp_path):
    gguf_files = pytest.importorskip("helpers.gguf_files")
    from kvedge.data import STORIES_MODEL
    from kvedge.llama import LlamaModel

    path = str(write_whisper(tmp_path / "whisper.bin"))
    llama = gguf_files.write_gguf(tmp_path / "m.gguf", LlamaModel.from_file(STORIES_MODEL))

    def heard(*before, beside="", also=""):
        program = PROGRAM.format(
            helpers=str(ROOT / "tests/helpers"), path=path, before=beside, after=also
        )
        done = subprocess.run(
            [sys.executable, *before, "-c", program],
            env={**os.environ, "KVEDGE_GGML_STATS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    alone, _ = heard()
    assert len(alone) > 5
    beside, _ = heard(beside=BESIDE, also=ALSO.format(llama=str(llama)))
    assert beside == alone  # enable() takes over llama.cpp's ggml, no other
    taken, told = heard("-m", "kvedge", "exec", sys.executable)  # any ggml
    assert re.search(r"[1-9]\d* attention nodes", told)
    assert [token for token, _ in taken] == [token for token, _ in alone]
    np.testing.assert_allclose([p for _, p in taken], [p for _, p in alone], rtol=0.1)
