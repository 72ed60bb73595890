"""Chat templates: what models bring along, in the sandbox."""

import tracemalloc

import pytest

import kvedge
from kvedge.llama import ChatTemplate

pytest.importorskip("jinja2")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Expressions of a few characters whose values would fill the memory.
HUGE = [
    *("'a'|center(3000000000)", "'a'.center(3000000000)", "'a'.ljust(10**10)", "'1'.zfill(10**10)"),
    *("'a' * 10**10", "10**10 * 'a'", "[1] * 10**10", "10**(10**10)", "(2**9999)|string * 9**9"),
    *("'%9999999999d' % 1", "'%*d' % (10**10, 1)", "'{:9999999999}'.format(1)"),
    *(
        "'{0:{1}}'.format(1, 10**10)",
        "'%9999999999d'|format(1)",
        "'{x:9999999999}'.format_map({'x': 1})",
    ),
    *("'\\t'.expandtabs(10**10)", "('a' * 9999).replace('', 'a' * 9999)", "'a\\na'|indent(10**10)"),
    *("[1]|batch(10**10, 'x')|list", "[1]|slice(10**10)|list", "(1).to_bytes(10**10, 'big')"),
    *("['a']|map('center', 10**10)|list", "{'a': [1]}|tojson(indent=10**10)", "lipsum(n=10**6)"),
    *(
        "(['a' * 9999] * 9999)|join",
        "'a'|replace('a', 'b' * 9**9)",
        "'a b'|wordwrap(1, wrapstring='x' * 9**9)",
    ),
    *("range(99999)|map('string')|map('center', 9999)|join('x')", "('a' * 9**7) ~ ('a' * 9**8)"),
]
PROGRAMS = [
    "{% set x = 'aaaa' %}" + "{% set x = x ~ x %}" * 40,
    "{% set x = 'aaaa' %}" + "{% set x = x + x %}" * 40,
    "{% set x = 'aaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "{% set x = [1] %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}",
    "{% set x = {} %}" + "{% set x = {1: x, 2: x} %}" * 40 + "{{ x|tojson }}",
    "{% set x = namespace() %}" + "{% set x = namespace(a=x, b=x) %}" * 40 + "{{ x }}",
    "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "f(" * 40 + "'a'" + ")" * 40 + " }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% set x = i %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set x = 'a' * 99999 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
]
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
        "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
        "{% break %}",
        "{{ 1" + "0" * 5000 + " }}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "-" * 5000 + "1 }}",
        "{% if x %}" * 500 + "{% endif %}" * 500,
        *(f"{{{{ {expression} }}}}" for expression in HUGE),
        *PROGRAMS,
    ],
)
def test_templates_that_misbehave_are_clear_errors(source):
    with pytest.raises(kvedge.InvalidArgumentError, match="chat template"):
        ChatTemplate(source).render(TALK)


@pytest.mark.parametrize(
    "expression",
    [
        *("'%*d' % (10**8, 1)", "'%99999999d'.encode() % 1", "'{:{}}'.format(1, '99999999')"),
        *("'{0[a]:{0[b]}}'.format({'a': 1, 'b': 10**8})", "'{0[0]:{0[1]}}'.format([1, 10**8])"),
        "[x" + ", x[1:]" * 99 + "]",
    ],
)
def test_a_template_is_stopped_before_it_takes_the_memory(expression):
    template = ChatTemplate("{% set x = 'a' * 10**6 %}{{ " + expression + " }}")
    tracemalloc.start()
    try:
        with pytest.raises(kvedge.InvalidArgumentError, match="chat template"):
            template.render(TALK)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_numbers_that_are_no_widths_are_not_taken_for_some():
    source = (
        "{{ messages[0].content | replace('a', 'b') | indent(2) | default('') }}"
        "{{ '%d' % 1700000000 }}{{ '{}'.format(1700000000) }}{{ '%d' | format(1700000000) }}"
    )
    talk = [{"role": "user", "content": "12345678901 + 1"}]
    assert ChatTemplate(source).render(talk) == "12345678901 + 1" + "1700000000" * 3


def test_without_jinja2_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(kvedge.MissingExtraError, match=r"kvedge\[chat\]"):
        ChatTemplate(CHATML).render(TALK)


# ruff: noqa: E501
# What the templates of small models do, in our words: a family's marks, its checks, its tricks.
FAMILIES = {
    "chatml": CHATML,
    "qwen2.5": "{%- if tools %}{{- '# Tools' }}{%- for t in tools %}{{ t | tojson }}{%- endfor %}"
    "{%- elif messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nQwen.<|im_end|>\\n' }}"
    "{%- endif %}{%- for message in messages %}{%- if (message.role == 'user') or (message.role == "
    "'assistant' and not message.tool_calls) or message.role == 'system' %}{{- '<|im_start|>' + "
    "message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}",
    "qwen3": "{%- set ns = namespace(multi=true, last=messages|length - 1) %}{%- for message in "
    "messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi and "
    "message.role == 'user' and message.content is string and not(message.content.startswith("
    "'<tool_response>')) %}{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}"
    "{%- endfor %}{%- for m in messages %}{%- set c = m.content %}{%- if '</think>' in c %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- m.role ~ c ~ ns.last }}"
    "{%- endfor %}{%- if enable_thinking is defined and enable_thinking is false %}no{%- endif %}",
    "llama3.2": "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}{%- if tools is not none"
    " %}Environment: ipython{%- endif %}{%- if not tools is defined %}{%- set tools = none %}"
    "{%- endif %}{{- 'Today: ' + date_string }}{%- for m in messages %}{%- if not (m.role == 'ipython'"
    " or 'tool_calls' in m) %}{{- '<|start_header_id|>' + m['role'] + m['content'] | trim }}"
    "{%- endif %}{%- endfor %}",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content']"
    " + '\\n\\n' %}{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}"
    "{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}{% if (m['role'] == "
    "'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + m.role + (first if loop.first else '') }}{% if m.content is string %}"
    "{{ m.content | trim }}{% elif m.content is iterable %}{% for i in m.content %}{{ i.text }}"
    "{% endfor %}{% endif %}{% endfor %}",
    "mistral": "{%- if messages[0].role == 'system' %}{%- set s = messages[0].content %}{%- set ms = "
    "messages[1:] %}{%- else %}{%- set ms = messages %}{%- endif %}{%- if not tools is defined %}"
    "{%- set tools = none %}{%- endif %}{%- set user_messages = ms | selectattr('role', 'equalto', "
    "'user') | list %}{%- for m in ms %}{%- if m.role == 'user' %}{%- if tools is not none and (m == "
    "user_messages[-1]) %}tools{%- endif %}{%- if loop.last and s is defined %}{{ '[INST]' + s + m."
    "content }}{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{%- endif %}{%- elif m.tool_calls is "
    "defined and m.tool_calls is not none %}x{%- elif m.role == 'assistant' %}{{ m.content + eos_token"
    " }}{%- endif %}{%- endfor %}",
    "smollm3": "{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{%- set c = messages[0].content.replace('/no_think', '')"
    ".rstrip() %}{%- endif %}{%- if xml_tools or python_tools or tools %}tools{%- endif %}"
    "{{ strftime_now('%B %Y') }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{% generation %}{{ m.content.lstrip('\\n') }}<|im_end|>{% endgeneration %}{%- else %}{{ m.content "
    "}}{%- endif %}{%- endfor %}",
    "phi3": "{% for m in messages %}{% if m['role'] in ['system', 'user'] and m['content'] %}"
    "{{ '<|' ~ m['role'] ~ '|>\\n' ~ m['content'] ~ '<|end|>\\n' }}{% elif m.role == 'assistant' %}"
    "{% generation %}\n{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
    "deepseek": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{% set ns = namespace(is_first=false, system_prompt='') %}{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{% set ns.system_prompt = m['content'] %}{%- endif %}{%- endfor %}"
    "{{bos_token}}{{ns.system_prompt}}{%- for m in messages %}{%- if m['role'] == 'assistant' and "
    "m['content'] is not none %}{% set c = m['content'] %}{% if '</think>' in c %}{% set c = "
    "c.split('</think>')[-1] %}{% endif %}{{'A' + c + eos_token}}{%- endif %}{%- endfor -%}",
    "granite": "{%- if documents %}{%- for d in documents %}{{ d.text }}{%- endfor %}{%- endif %}"
    "{%- if tools %}{{ tools | tojson(indent=4) }}{%- endif %}{%- for m in messages %}{{- {'r': m} | "
    "tojson(indent=2, sort_keys=true) + '<|end_of_text|>\\n' }}{%- if loop.last and "
    "add_generation_prompt %}{{- '<|start_of_role|>' + (controls | tojson if controls else 'x') }}"
    "{%- continue %}{%- endif %}{{ loop.index ~ loop.length ~ loop.cycle('a', 'b') }}{%- endfor %}",
}
LONG_TALK = [
    {"role": "system", "content": " Be <b>brief</b>. /no_think "},
    {"role": "user", "content": " Häß 'it'\n"},
    {"role": "assistant", "content": "<think>\nso</think>\n\n yes"},
    {"role": "user", "content": "why?"},
]


@pytest.mark.extras
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_is_what_transformers_makes_of_it(family, add_generation_prompt):
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    for talk in (LONG_TALK, LONG_TALK[1:], LONG_TALK[1:2]):
        rendered, _ = render(
            [talk],
            chat_template=FAMILIES[family],
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        made = ChatTemplate(FAMILIES[family], "<s>", "</s>")
        assert made.render(talk, add_generation_prompt=add_generation_prompt) == rendered[0]


def test_a_long_conversation_has_room():
    talk = [{"role": "user", "content": "a" * 5000}, {"role": "assistant", "content": "b" * 500}]
    for family, source in FAMILIES.items():
        talks = talk * 200 if family != "deepseek" else LONG_TALK[:1] + talk * 200
        assert "b" * 500 in ChatTemplate(source).render(talks), family
