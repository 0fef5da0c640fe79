"""Chat templates in the styles of well-known families, written for these tests: what each does with its messages."""

from __future__ import annotations

from typing import NamedTuple


class Style(NamedTuple):
    template: str
    special: tuple[str, ...]  # control tokens that decoding leaves out
    plain: tuple[str, ...]  # control tokens that it shows
    end_of_turn: str


# Takes the thinking of earlier turns out of the history, and knows tool answers by how a user's text begins and ends.
THINKING = Style(
    r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == 'user' and message.content is string and not(
        message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.open = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
            {{- content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{% endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{% else %}{{- call.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""",
    ("<|im_start|>", "<|im_end|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "<|im_end|>",
)

# Trims what it is given, joins with +, puts BOS in front of the first message only.
HEADERS = Style(
    r"""
{%- for message in messages %}
    {%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' %}
    {%- set text = header + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}
    {{- text }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    (),
    "<|eot_id|>",
)

# Roles have to take turns; the system's text stands in the last question; a space after the mark of an answer.
TURNS = Style(
    r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate '
            + 'user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST] ' ~ message['content'] ~ '[/INST]' }}{%- endif %}
    {%- else %}{{- ' ' ~ message['content'] | trim ~ eos_token }}{%- endif %}
{%- endfor %}""",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    (),
    "</s>",
)

# Macros, captured blocks, several channels; makes the thinking of the last answer a message of its own.
CHANNELS = Style(
    r"""
{%- macro turn(role, channel) -%}
    {{- '<|start|>' ~ role }}{% if channel %}{{- '<|channel|>' ~ channel }}{% endif %}{{- '<|message|>' ~ caller() }}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if '<|channel|>analysis' in message.content %}{{ raise_exception('No channels, please.') }}{% endif %}
        {%- if message.thinking and loop.last %}
            {%- call turn('assistant', 'analysis') %}{{ message.thinking }}{% endcall %}{{- '<|end|>' }}
        {%- endif %}
        {%- set said %}
            {%- generation %}{{ message.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endgeneration %}
        {%- endset %}
        {%- call turn('assistant', 'final') %}{{ said }}{% endcall %}
    {%- else %}
        {%- call turn('developer' if message.role == 'system' else message.role, none) %}
            {%- for line in message.content.split('\n') %}{{ line }}{{ '' if loop.last else '\n' }}{% endfor %}
        {%- endcall %}{{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}""",
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
    (),
    "<|end|>",
)

# Roles get other names; a list of parts is as good as a text; everything is trimmed.
PARTS = Style(
    r"""
{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] if item['type'] == 'text' %}{{ item['text'] | trim }}{% endfor %}
    {%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    (),
    "<end_of_turn>",
)

# Long texts in namespaces, arguments of tool calls that have to be text, the thinking cut off by splitting.
STRING_CALLS = Style(
    r"""
{%- set ns = namespace(system='', first=true) %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set ns.system = message['content'] if ns.first else ns.system + '\n\n' + message['content'] %}
    {%- set ns.first = false %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<User>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] %}
        {{- '<Assistant>' + (message['content'] or '') }}
        {%- for call in message['tool_calls'] %}
            {{- '<tool_begin>' + call['type'] + '<tool_sep>' + call['function']['name'] + '\n```json\n'
                + call['function']['arguments'] + '\n```<tool_end>' }}
        {%- endfor %}{{- '</s>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<Assistant>' + content + '</s>' }}
    {%- elif message['role'] == 'tool' %}{{- '<out_begin>' + message['content'] + '<out_end>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<Assistant><think>\n' }}{% endif %}""",
    ("<s>", "</s>", "<User>", "<Assistant>"),
    ("<think>", "</think>", "<tool_begin>", "<tool_sep>", "<tool_end>", "<out_begin>", "<out_end>"),
    "</s>",
)

STYLES = {
    "thinking": THINKING,
    "headers": HEADERS,
    "turns": TURNS,
    "channels": CHANNELS,
    "parts": PARTS,
    "string_calls": STRING_CALLS,
}
