"""Chat templates: what models bring along, in the sandbox."""

import pytest

import kvedge
from kvedge.llama import ChatTemplate

pytest.importorskip("jinja2")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_messages_become_the_models_text():
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert ChatTemplate(CHATML).render(TALK, add_generation_prompt=False) == expected
    assert ChatTemplate(CHATML).render(TALK) == expected + "<|im_start|>assistant\n"


def test_templates_have_the_names_that_transformers_gives_them():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    text = ChatTemplate(source, "<s>", "</s>").render(TALK)
    assert text == '<s>{"role": "user", "content": "Hi"}4</s>'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% for %}",
        "{{ messages[0].content.missing.more }}",
    ],
)
def test_templates_that_misbehave_are_clear_errors(source):
    with pytest.raises(kvedge.InvalidArgumentError, match="chat template"):
        ChatTemplate(source).render(TALK)


def test_without_jinja2_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(kvedge.MissingExtraError, match=r"kvedge\[chat\]"):
        ChatTemplate(CHATML).render(TALK)


@pytest.mark.extras
def test_text_is_what_transformers_makes_of_it():
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    rendered, _ = render([TALK], chat_template=CHATML, add_generation_prompt=True)
    assert ChatTemplate(CHATML).render(TALK) == rendered[0]
