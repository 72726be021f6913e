"""A conversation as its chat template writes it, and which characters of that the model will have to write.

    <|user|>Hi<|assistant|>Hello.<|end|>                  ( ): an answer, from the end of what the template
                          (            )                  writes before one to the end of its turn

Everything is rendered by transformers, as `apply_chat_template` does it. `{% generation %}` marks of a template say
what answers are; else the template is asked for the conversation up to each answer, with its prompt for one and with
the answer. What it writes of earlier turns then must be what it writes of them in the whole; a template that rewrites
them (as those do that drop earlier thoughts) gives a sample for each answer, its history as it is written then.
"""

import datetime
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.mixture.fields import described
from megatron_dynapipe.tools.mixture.messages import KNOWN, Conversation, Message, TemplateError
from megatron_dynapipe.tools.mixture.spec import Turns
from megatron_dynapipe.tools.prepare.tokenizer import NO_CHAT_TEMPLATE, Tokenizer

DATE = datetime.date(2025, 1, 1)
"""Today, for templates that ask, unless a mixture says another."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EMPTY_THOUGHT = re.compile(r"\s*(?:<(?P<tag>[\w:|]*think\w*)>\s*</(?P=tag)>|</think>)\s*")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_DATE_FORMATS = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{%- if format in dynapipe_dates -%}{{ dynapipe_dates[format] }}{%- else -%}"
    "{{ raise_exception('expected a format of the date that is written in the template') }}{%- endif -%}"
    "{%- endmacro %}\n"
)
"""Before a template that asks for the date: transformers lets no function of ours in. It writes nothing."""
_OTHER_ANSWER = "\0"

OTHERS = "messages of other roles that are marked to be learned, which only the assistant's are"
REWRITES = "conversations with a sample for each answer (turns: each), since the chat template rewrites earlier turns"
OTHER_PROMPT = "answers before which the chat template writes something else than its prompt for one"
EMPTY_THOUGHTS = "answers with an empty thought that the chat template writes, which is not learned"


class RewrittenError(TemplateError):
    """A template changes what it wrote of earlier turns."""

    def __init__(self, turn: int) -> None:
        super().__init__(
            f"expected a chat template that keeps earlier turns as they were, turn {turn} changes them",
            hint="write `turns: each` into the mixture for a sample of each answer, or leave `turns` out",
        )


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as text.

    Attributes:
        conversation: which.
        text: as its template writes it.
        answers: (first, end) characters of each answer that is to be learned, in order.
        is_marked: whether the template marks them; then nothing else is learned.
    """

    conversation: Conversation
    text: str
    answers: list[tuple[int, int]]
    is_marked: bool


class ChatTemplate:
    """A tokenizer's chat template, or another.

    Attributes:
        remarks: what the user should know of what was written, counted.

    Raises:
        DataError: there is none.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, *, learns_empty_thoughts: bool = False) -> None:
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"{tokenizer.name_or_path}: expected a tokenizer with a chat template for conversations, it has none",
                hint=NO_CHAT_TEMPLATE,
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        self.remarks: Counter[str] = Counter()
        self._render_all = render_jinja_template
        self._tokenizer = tokenizer
        self._template = template
        self._special: dict[str, Any] = tokenizer.special_tokens_map
        self._learns_empty_thoughts = learns_empty_thoughts
        self._sources: dict[bool, str] = {}
        self._reads: dict[tuple[bool, str], bool] = {}

    def write(self, conversation: Conversation, turns: Turns | None, date: datetime.date | None) -> Iterator[Written]:
        """The samples of a conversation, in order; none without an answer.

        Raises:
            TemplateError: the template cannot write it, or rewrites earlier turns although all are to be learned.
        """
        self._remark_unread(conversation)
        if conversation.others:
            self.remarks[OTHERS] += conversation.others
        if not conversation.answers:
            return
        if turns is Turns.LAST:
            last = conversation.answers[-1:]
            yield self.written(Conversation(conversation.messages, conversation.tools, last), date)
            return
        if turns is not Turns.EACH:
            before = self.remarks.copy()
            try:
                whole = self.written(conversation, date)
            except RewrittenError:
                if turns is Turns.ALL:
                    raise
                self.remarks = before + Counter({REWRITES: 1})
            else:
                yield whole
                return
        for answer in conversation.answers:
            yield self.written(conversation.until(answer), date)

    def written(self, conversation: Conversation, date: datetime.date | None) -> Written:
        """One sample of a conversation; raises as `write`."""
        messages = conversation.messages
        tools = conversation.tools
        text, marks = self._render(messages, tools, date, marked=True)
        wholes = []
        for at in conversation.answers:
            is_last = at == len(messages) - 1
            wholes.append(text if is_last else self._render(messages[: at + 1], tools, date)[0])
            if not text.startswith(wholes[-1]):
                raise RewrittenError(at)
        if marks is not None:
            return Written(conversation, text, _chosen(marks, conversation), True)
        answers: list[tuple[int, int]] = []
        for at, whole in zip(conversation.answers, wholes, strict=True):
            prompt = self._prompt(messages[: at + 1], tools, date, whole)
            if prompt < (answers[-1][1] if answers else 0):
                raise RewrittenError(at)
            answers.append((self._without_thought(text, prompt, len(whole), messages[at]), len(whole)))
        return Written(conversation, text, answers, False)

    def _prompt(self, messages: Sequence[Message], tools: Any, date: datetime.date | None, whole: str) -> int:
        """The characters that are given to the model before the last of these messages."""
        if len(messages) == 1:  # of no messages most templates write nothing
            other = self._render([messages[0] | {"content": _OTHER_ANSWER}], tools, date)[0]
            return _common(other, whole)
        prompt = self._render(messages[:-1], tools, date, prompts=True)[0]
        if whole.startswith(prompt):
            return len(prompt)
        self.remarks[OTHER_PROMPT] += 1
        return _common(prompt, whole)

    def _without_thought(self, text: str, first: int, end: int, message: Message) -> int:
        """Where an answer begins after an empty thought that the row does not have."""
        content = message.get("content", "")
        if self._learns_empty_thoughts or "</think" in content or any(message.get(key) for key in _THOUGHTS):
            return first
        thought = _EMPTY_THOUGHT.match(text, first, end)
        if thought is None or _EMPTY_THOUGHT.match(content):
            return first
        self.remarks[EMPTY_THOUGHTS] += 1
        return thought.end()

    def _render(
        self,
        messages: Sequence[Message],
        tools: Any,
        date: datetime.date | None,
        *,
        prompts: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """What the template writes, and what it marks as the model's; None where it marks nothing."""
        try:
            source = self._source(tools is not None)
            has_marks = marked and _MARKS.search(source) is not None
            if "strftime_now" in source:
                today = date or DATE
                self.remarks[f"conversations with {today} as today's date, for which the chat template asks"] += marked
                formats = {form: today.strftime(form) for _, form in _DATE_FORMATS.findall(source)}
                source = _FIXED_DATE + source
                special = self._special | {"dynapipe_dates": formats}
            else:
                special = self._special
            (text,), marks = self._render_all(
                conversations=[list(messages)],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=prompts,
                **special,
            )
        except Exception as error:  # a template is a program
            raise TemplateError(f"the chat template refuses the conversation: {described(error)}") from error
        return text, marks[0] if has_marks else None

    def _source(self, has_tools: bool) -> str:
        if has_tools not in self._sources:
            named: dict[str, Any] = {"tools": [{}]} if has_tools else {}
            self._sources[has_tools] = self._tokenizer.get_chat_template(self._template, **named)
        return self._sources[has_tools]

    def _remark_unread(self, conversation: Conversation) -> None:
        has_tools = conversation.tools is not None
        for message in conversation.messages:
            for key in sorted(message.keys() - KNOWN):
                if not self._is_read(key, has_tools):
                    self.remarks[f"messages with {key!r}, which the chat template does not read"] += 1
        if has_tools and not self._is_read("tools", has_tools):
            self.remarks["conversations with 'tools', which the chat template does not read"] += 1

    def _is_read(self, key: str, has_tools: bool) -> bool:
        if (has_tools, key) not in self._reads:
            names = _THOUGHTS if key in _THOUGHTS else (key,)  # transformers copies a thought under all these names
            pattern = rf"\b({'|'.join(map(re.escape, names))})\b"
            self._reads[has_tools, key] = re.search(pattern, self._source(has_tools)) is not None
        return self._reads[has_tools, key]


def _common(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def _chosen(marks: list[tuple[int, int]], conversation: Conversation) -> list[tuple[int, int]]:
    """The marked parts that are to be learned: all, or those of the answers that are."""
    marks = [(first, end) for first, end in marks if first < end]
    turns = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if turns == conversation.answers:
        return marks
    if len(marks) != len(turns):
        raise TemplateError(
            f"expected a `generation` mark for each of {len(turns)} answers, and some answers are not to be learned, "
            f"the template has {len(marks)}"
        )
    return [mark for mark, at in zip(marks, turns, strict=True) if at in conversation.answers]
