"""Chat templates in the public formats of model families, written anew and shortened, and tokenizers for them."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from train.conversations import Conversation

SPECIAL = tuple(
    """<|im_start|> <|im_end|> <|im_sep|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <bos>
    <start_of_turn> <end_of_turn> <eos> <s> </s> <|user|> <|assistant|> <|system|> <|end|> <|endoftext|> [INST]
    [/INST] <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>""".split()  # noqa: SIM905
)

_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    + _PROMPT
)
# SmolLM2's: ChatML with a system prompt of its own
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}" + _PROMPT
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
    "+ m.content | trim + '<|eot_id|>' %}{{ '<|begin_of_text|>' + content if loop.first else content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Llama-3.1's: a system block always, with a date; one tool call instead of a text; tool results by "ipython"
LLAMA31 = """<|begin_of_text|>
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + (date_string or '26 Jul 2024') + '\n\n' }}
{{- system_message + '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
_QWEN_TOOL_CALLS = """
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}"""
# Qwen2.5's: a system prompt of its own, tool calls in the answer, tool results merged into one user turn
QWEN25 = (
    """
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role in ('user', 'system') %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content or '' %}
        {{- '<|im_start|>assistant\n' + content }}"""
    + _QWEN_TOOL_CALLS
    + "\n"
    + _PROMPT
)
# Qwen3's: the thoughts of answers before the last question are taken out, an empty thought is put into the last answer
QWEN3 = (
    """
{%- set ns = namespace(last_query=messages | length - 1, searching=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.searching and m.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role in ('user', 'system') %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content or '' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}"""
    + _QWEN_TOOL_CALLS
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false }}
{%- endif %}
"""
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim "
    "+ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Mistral's first: no generation prompt at all, nothing between turns
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# Mistral's third: the system prompt moves to the last message if that is the user's, else it is left out
MISTRAL_V3 = """
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'user' and loop.last and system_message is defined %}
        {{- '[INST]' + system_message + '\n\n' + m.content + '[/INST]' }}
    {%- elif m.role == 'user' %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
# Phi-3's: one more token closes the whole conversation
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}<|endoftext|>{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
# Zephyr's relies on the line breaks between its blocks
ZEPHYR = """{% for m in messages %}
{{ '<|' + m.role + '|>\n' + m.content + '</s>' }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}" + _PROMPT
)
# DeepSeek-R1's: the prompt opens a thought that no earlier answer shows
DEEPSEEK = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% else %}"
    "{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)

# name -> template, the token that ends a turn
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "smollm2": (SMOLLM2, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "llama31": (LLAMA31, "<|eot_id|>"),
    "qwen25": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
    "mistral_v3": (MISTRAL_V3, "</s>"),
    "phi3": (PHI3, "<|end|>"),
    "phi4": (PHI4, "<|im_end|>"),
    "zephyr": (ZEPHYR, "</s>"),
    "marked": (MARKED, "<|im_end|>"),
    "deepseek": (DEEPSEEK, "<eos>"),
}


def _wrap(inner: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer(template: str | None, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token a byte, in the order of GPT-2's alphabet, then `SPECIAL`: text and ids correspond exactly."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrap(inner, template)


def bpe_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on a few sentences: words are tokens, and line breaks merge, as in Llama-3 and Qwen."""
    inner = Tokenizer(models.BPE())
    pattern = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
    words = pre_tokenizers.Split(pattern, "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = (
        "The model answers the user in a few words.\n\n\n  Hello there, how are you?\n\n\tGrüße 🙂🙂 an alle!  \n\n" * 4
    )
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, min_frequency=2, show_progress=False)
    inner.train_from_iterator([text], trainer)
    return _wrap(inner, template)


def expected_ids(text: str) -> list[int]:
    """The ids of `byte_tokenizer`, by hand: GPT-2's alphabet has printable bytes as they are, the rest from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    order = sorted([(byte, byte) for byte in shown] + [(256 + i, byte) for i, byte in enumerate(hidden)])
    rank = {byte: i for i, (_, byte) in enumerate(order)}
    ids: list[int] = []
    while text:
        token = next((token for token in SPECIAL if text.startswith(token)), None)
        if token is not None:
            ids.append(256 + SPECIAL.index(token))
        else:
            ids += [rank[byte] for byte in text[0].encode()]
        text = text[len(token or text[0]) :]
    return ids


def talk(*texts: str, system: str | None = None) -> Conversation:
    """User and assistant in turn, user first."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return Conversation("row", "test", tuple(([{"role": "system", "content": system}] if system else []) + turns))


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> set[int]:
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[token] for token in tokens}
