"""Random courses of conversations: what a cache holds is what its text alone gives, bit for bit.

A trace computes and generates, takes checkpoints, branches, goes back, saves, loads and is broken
off while it saves. The same text, computed by the same steps in a new cache, is the reference.
"""

import copy
import inspect
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, KvedgeCache, prompt, torch, transformers
from tiny_structures import STATES, STRUCTURES, model_of

from kvedge.errors import InvalidArgumentError
from kvedge.files import replacing

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="transformers 4 keeps states in caches of their own"
)
# Formats; whether any length gives the bits of a cache that never went further, not checkpoints
# and drafts alone.
FORMATS = [
    ({"dtype": "float16"}, True),
    ({"dtype": "int8"}, True),
    ({}, False),
    ({"dtype": "kivi4", "recent": 20, "sinks": 4}, False),
    ({"dtype": "int4", "recent": 9}, False),
]
DRAFT = 64  # tokens that formats with last tokens take back exactly

SHORT = ["llama", "gemma2", "Qwen3_5Text", "FalconH1", "Gemma4Text"]
LONG = [*FAMILIES, *STRUCTURES, *STATES]


class Talk:
    """A cache and what was computed with it: the ids, and how many each step had."""

    def __init__(self, model, options, exact, batch, padding):
        self.model, self.options, self.padding = model, options, padding
        self.always_exact = exact
        self.cache = KvedgeCache(model.config, checkpoints=3, **options)
        self.ids = torch.zeros(batch, 0, dtype=torch.long)
        self.steps = []

    @property
    def length(self):
        return sum(self.steps)

    @property
    def ends(self):
        """Lengths after each step."""
        return [sum(self.steps[: i + 1]) for i in range(len(self.steps))]

    def mask(self, tokens):
        mask = torch.ones(len(self.ids), tokens, dtype=torch.long)
        mask[0, : self.padding] = 0
        return mask

    def compute(self, cache, ids, before):
        mask = self.mask(before + ids.shape[1])
        more = {}
        if "position_ids" in inspect.signature(self.model.forward).parameters:  # as generate() does
            more["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, before:]
        with torch.no_grad():
            return self.model(ids, attention_mask=mask, past_key_values=cache, **more).logits[:, -1]

    def step(self, ids):
        if not self.steps:
            ids = ids.clone()
            ids[0, : self.padding] = 0
        self.compute(self.cache, ids, self.length)
        self.ids = torch.cat([self.ids, ids], 1)
        self.steps.append(ids.shape[1])

    def generate(self, ids, tokens):
        asked = torch.cat([self.ids, ids], 1)
        count = self.model.register_forward_pre_hook(
            lambda _, args, inputs: self.steps.append(inputs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        with count:
            out = self.model.generate(
                asked, attention_mask=self.mask(asked.shape[1]), past_key_values=self.cache,
                max_new_tokens=tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        self.ids = out[:, : self.length]
        self.cache.token_ids = out

    def went_back(self, length):
        self.ids = self.ids[:, :length]
        while self.length > length:
            self.steps.pop()
        assert self.length == length == self.cache.get_seq_length()

    def exact(self, length):
        """Whether going back there gives the bits of a cache that never went further."""
        is_draft = self.length - length <= DRAFT
        return length in self.cache.checkpoints or self.always_exact or is_draft

    def branch(self):
        other = copy.copy(self)
        other.cache, other.steps = copy.deepcopy(self.cache), list(self.steps)
        return other

    def save(self, folder):
        self.cache.save(folder, self.ids)

    def load(self, folder):
        other = copy.copy(self)
        other.cache = KvedgeCache.load(folder, self.model.config)
        assert torch.equal(other.cache.token_ids, self.ids)
        other.steps = list(self.steps)
        return other

    def check(self):
        """Going on gives the bits of a cache that has seen nothing but the text."""
        never, at = KvedgeCache(self.model.config, **self.options), 0
        for tokens in self.steps:
            self.compute(never, self.ids[:, at : at + tokens], at)
            at += tokens
        for ids in (prompt(len(self.ids), 3, seed=7)["input_ids"], self.ids[:, -1:]):
            one, other = (self.compute(each, ids, at) for each in (self.cache, never))
            assert torch.equal(one, other), (one - other).abs().max()
            at += ids.shape[1]


class _BrokenOffError(Exception):
    pass


def break_off(talk, folder, after):
    """Save, and be killed after so many writes; files are not cleaned up."""
    number = 0
    former = replacing.replacing

    def counting(*args, **kwargs):
        nonlocal number
        number += 1
        if number > after:
            raise _BrokenOffError
        return former(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("kvedge.transformers.session.replacing", "kvedge.files.session.replacing"):
            patch.setattr(module, counting)
        with suppress(_BrokenOffError):
            talk.save(folder)
            return True
    return False


def run(data, name, steps):
    """Let Hypothesis draw a course of conversations with a model."""
    model = model_of(name)
    options, exact = data.draw(st.sampled_from(FORMATS), label="format")
    batch = data.draw(st.integers(1, 3), label="batch")
    padding = data.draw(st.sampled_from([0, 0, 3]), label="padding") if batch > 1 else 0
    first = Talk(model, options, exact, batch, padding)
    first.step(prompt(batch, data.draw(st.sampled_from([5, 30, 90])))["input_ids"])
    talks = [first]
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder, saved = Path(name_of_folder), None
        for _ in range(data.draw(st.integers(1, steps), label="moves")):
            at = data.draw(st.integers(0, len(talks) - 1), label="talk")
            talk = talks[at]
            move = data.draw(st.sampled_from(MOVES), label="move")
            ids = prompt(batch, data.draw(st.sampled_from([1, 2, 11, 100])), seed=len(talk.steps))
            ids = ids["input_ids"]
            if move == "step":
                talk.step(ids)
            elif move == "generate":
                talk.generate(ids, data.draw(st.integers(1, 5)))
            elif move == "checkpoint":
                assert talk.cache.checkpoint() == talk.length
            elif move == "branch" and len(talks) < 3:
                talks.append(talk.branch())
            elif move == "crop" and len(talk.steps) > 1:
                to = data.draw(st.sampled_from(talk.ends[:-1]), label="to")
                if not talk.exact(to):
                    continue
                before = talk.cache.checkpoints
                try:
                    talk.cache.crop(to - talk.length)
                except InvalidArgumentError:
                    assert to not in before
                    assert talk.cache.get_seq_length() == talk.length
                else:
                    talk.went_back(to)
            elif move == "keep_prefix" and len(talk.steps) > 1:
                to = data.draw(st.sampled_from(talk.ends[:-1]), label="to")
                if not talk.exact(to):
                    continue
                talk.cache.token_ids = talk.ids
                asked = torch.cat([talk.ids[:, :to], 3 + 124 - talk.ids[:, to : to + 1]], 1)
                before = talk.cache.checkpoints
                try:
                    kept = talk.cache.keep_prefix(asked)
                except InvalidArgumentError:
                    assert not before or min(before) > to
                else:
                    assert kept == to or kept == max(one for one in before if one <= to)
                    talk.went_back(kept)
            elif move == "save":
                talk.save(folder)
                saved = talk.branch()
            elif move == "break off" and saved is not None:
                if break_off(talk, folder, data.draw(st.integers(0, 3))):
                    saved = talk.branch()
                saved.load(folder).check()
            elif move == "load" and saved is not None:
                talks[at] = saved.load(folder)
        for talk in talks:
            talk.check()


MOVES = ["step", "step", "generate", "checkpoint", "branch", "crop", "crop", "keep_prefix", "save",
         "break off", "load", "load"]  # fmt: skip


def test_steps_of_generate_are_those_of_the_model():
    """Of a model with states, generate() reads a prompt's last token in a step of its own."""
    talk = Talk(model_of("Qwen3_5Text"), {"dtype": "float16"}, True, 1, 0)
    talk.step(prompt(1, 5)["input_ids"])
    talk.generate(prompt(1, 2, seed=1)["input_ids"], 2)
    assert talk.steps == [5, 1, 1, 1]
    talk.check()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(SHORT))
def test_any_course_of_a_conversation_is_that_of_its_text(data, name):
    run(data, name, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_long_course_of_a_conversation_is_that_of_its_text(name, data):
    run(data, name, 20)
