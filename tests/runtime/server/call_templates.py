"""Chat templates that write tool calls and reasoning, as published families do, reduced to these parts: name ->
(template, special tokens)."""
# ruff: noqa: E501

from __future__ import annotations

from .chat_templates import BOS_EOS, LLAMA_3_1, MISTRAL_V3, QWEN_2_5

QWEN_3 = r"""{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

QWEN_3_THINKING = QWEN_3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
    "{{- '<think>\\n' }}",
)

QWEN_3_CODER = r"""{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
<function>
<name>{{ tool.function.name }}</name>
</function>{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{- '\n' + m.content + '\n' }}{%- endif %}
        {%- for call in m.tool_calls %}
            {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

GLM_4 = r"""[gMASK]<sop>{% if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if m.reasoning_content is string %}{{ '\n<think>' + m.reasoning_content.strip() + '</think>' }}{% else %}{{ '\n<think></think>' }}{% endif %}
{%- if m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor -%}
</tool_call>
{%- endfor %}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

MISTRAL_V11 = r"""{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}
{%- for call in m.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}
{{- m.content + eos_token }}
{%- else %}{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}"""

MAGISTRAL = MISTRAL_V11.replace(
    "{{- m.content + eos_token }}",
    "{%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}{{- m.content + eos_token }}",
)

DEEPSEEK_R1 = r"""{{ bos_token }}{% if tools %}{% for tool in tools %}```json
{{ tool | tojson }}
```
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<｜Assistant｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments | tojson + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1] %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

DEEPSEEK_V3_1 = r"""{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- set ns = namespace(first=true) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜></think>' }}
{%- if m.tool_calls %}
{%- for call in m.tool_calls %}
{{- (m.content + '<｜tool▁calls▁begin｜>') if loop.first else '' }}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- else %}{{ m.content }}{% endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') }}{% endif %}"""

KIMI_K2 = r"""{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + m.content }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- else %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

GEMMA_4 = r"""{%- macro value(v) -%}
{%- if v is string -%}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}{ {%- for k, part in v | dictsort %}{% if not loop.first %},{% endif %}{{ k }}:{{ value(part) }}{% endfor -%} }
{%- elif v is sequence -%}[ {%- for part in v %}{% if not loop.first %},{% endif %}{{ value(part) }}{% endfor -%} ]
{%- else -%}{{ v }}
{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- if tools %}<|turn>system
{% for tool in tools %}<|tool>declaration:{{ tool.function.name }}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{%- if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + value(call.function.arguments) + '<tool_call|>' }}
{%- endfor %}
{{- m.content + '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"""

PYTHONIC = r"""{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- if m.tool_calls %}<|tool_call_start|>[
{%- for call in m.tool_calls %}
{{- ', ' if not loop.first }}{{ call.function.name }}(
{%- for k, v in call.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %})
{%- endfor %}]<|tool_call_end|>{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

HARMONY = r"""{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium') + '\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools or messages[0].role == 'developer' %}{{ '<|start|>developer<|message|>' }}
{%- for tool in tools or [] %}{{ 'type ' + tool.function.name + ' = (_: any) => any;\n' }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

CALL_TEMPLATES = {
    "qwen-2.5": (QWEN_2_5, {}),
    "qwen-3": (QWEN_3, {}),
    "qwen-3-thinking": (QWEN_3_THINKING, {}),
    "qwen-3-coder": (QWEN_3_CODER, {}),
    "llama-3.1": (LLAMA_3_1, {"bos_token": "<|begin_of_text|>"}),
    "mistral-v3": (MISTRAL_V3, BOS_EOS),
    "mistral-v11": (MISTRAL_V11, BOS_EOS),
    "magistral": (MAGISTRAL, BOS_EOS),
    "deepseek-r1": (DEEPSEEK_R1, BOS_EOS),
    "deepseek-v3.1": (DEEPSEEK_V3_1, BOS_EOS),
    "kimi-k2": (KIMI_K2, {}),
    "glm-4": (GLM_4, {}),
    "gemma-4": (GEMMA_4, BOS_EOS),
    "pythonic": (PYTHONIC, BOS_EOS),
    "harmony": (HARMONY, {}),
}
