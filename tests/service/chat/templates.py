"""Chat templates of the kinds that models come with, and conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Message = Mapping[str, str]
TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM: Final[Message] = {"role": "system", "content": 'Be <brief> & "kind".'}
USER: Final[Message] = {"role": "user", "content": "  What is é?\n"}
ANSWER: Final[Message] = {"role": "assistant", "content": "A letter.\n\n"}
AGAIN: Final[Message] = {"role": "user", "content": "{{ 7 * 7 }} {% raise %}"}

CHATML: Final = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""
LLAMA_3: Final = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") if strftime_now is defined else "2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL: Final = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}"""
TOOLS: Final = """{%- macro describe(message, depth=1) %}{{ message | tojson(indent=2) }}#{{ depth }}{% endmacro %}
{%- if tools %}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- else %}no tools{{ tools is none }}{{ documents is none }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | tojson }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- describe(message, loop.index) }}{{ dict(a=1).items() | list }}{{ unk_token }}
    {%- endif %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}"""
TEMPLATES: Final = {"chatml": CHATML, "llama-3": LLAMA_3, "mistral": MISTRAL, "tools": TOOLS}
CONVERSATIONS: Final = {"one": [USER], "several": [USER, ANSWER, AGAIN], "system": [SYSTEM, USER, ANSWER, AGAIN]}
