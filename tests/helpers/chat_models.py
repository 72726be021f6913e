"""Tokenizers and chat templates of the structures that models come with, small and of no model's own words."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|a|>", "<|b|>", "<|c|>", "<|end|>", "<|tool|>"]
TEXT = ["the quick brown fox jumps over the lazy dog ! ? . , : Yes No 0 1 2 3", "user assistant system tool\n\n think"]

PRE = {
    "byte": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "byte with a space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace everywhere": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "prepended": None,
}
"""How text is divided before it is merged; "prepended" is a normaliser that writes a mark before the text."""
AROUND = {
    "none": None,
    "start": ("<s> $A", ["<s>"]),
    "end": ("$A </s>", ["</s>"]),
    "both": ("<s> $A </s>", ["<s>", "</s>"]),
}
"""What post-processors write around a text."""


def chat_tokenizer(kind: str = "byte", around: str = "none", *, pad: bool = True) -> Any:
    """A tokenizer of a kind in `PRE`, with a post-processor in `AROUND`."""
    bpe = Tokenizer(models.BPE(byte_fallback=not kind.startswith("byte"), unk_token=None))
    if PRE[kind] is not None:
        bpe.pre_tokenizer = PRE[kind]
    if kind == "prepended":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    is_byte = kind.startswith("byte")
    bpe.decoder = decoders.ByteLevel() if is_byte else decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    letters = pre_tokenizers.ByteLevel.alphabet() if is_byte else ["▁", *map(chr, range(32, 127)), "\n", "é", "☃"]
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + len(letters) + 40,
        special_tokens=SPECIAL,
        initial_alphabet=letters,
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT * 3, trainer)
    if AROUND[around] is not None:
        form, names = AROUND[around]
        ids = [(name, bpe.token_to_id(name)) for name in names]
        bpe.post_processor = processors.TemplateProcessing(single=form, special_tokens=ids)
    named = {"bos_token": "<s>", "eos_token": "</s>"} | ({"pad_token": "<pad>"} if pad else {})
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **named)


def saved(folder: Path, tokenizer: Any, template: str | None = None) -> Path:
    """The folder, with the tokenizer in it and, if given, its chat template."""
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


TOOLS = "{% if tools %}<|tool|>{{ tools | tojson }}\n{% endif %}"
CALLS = "{% for c in (m.tool_calls or []) %}<|tool|>{{ c.function | tojson }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|b|>assistant\n{% endif %}"

TEMPLATES = {
    "end after each turn": "{{ bos_token }}"
    + TOOLS
    + "{% for m in messages %}<|b|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "<|end|>\n{% endfor %}"
    + PROMPT,
    "header by role": "{% for m in messages %}{% if m.role == 'assistant' %}<|a|>\n{{ m.content }}</s>"
    "{% else %}<|c|>{{ m.content | trim }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>\n{% endif %}",
    "stop of the next role": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|a|>\n"
    "{{ m.content }}{% else %}<|c|>{{ m.role }} {{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>\n{% endif %}",
    "words alone": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "alternating": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}{% if m.role == 'user' %}<|a|> {{ m.content }} <|b|>"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "rewritten": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|b|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|end|>\n{% endfor %}" + PROMPT,
    "dated": "{{ bos_token }}Today: {{ strftime_now('%d %b %Y') }}\n{% for m in messages %}<|b|>{{ m.role }}\n"
    "{{ m.content }}<|end|>{% endfor %}" + PROMPT,
    "marked": "{{ bos_token }}{% for m in messages %}<|b|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n"
    "{% endfor %}" + PROMPT,
}
