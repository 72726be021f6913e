"""Writes a conversation by its chat template, and finds the characters that the model will have to write.

    <|user|>Hi<|assistant|>Hello.<|end|>                  ( ): an answer, from the end of what the template
                          (            )                  writes before one to the end of its turn

A template may mark its answers by `{% generation %}`. If it does not, it writes the conversation up to each answer,
once with its prompt for an answer and once with the answer. Earlier turns then have to be as they are in the whole. A
template that rewrites them (to drop earlier thoughts, say) gives a sample for each answer, with its history as it is
written then. Whatever the template does not write of a row is counted; if it belongs to an answer, that is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_dynapipe.tools.mixture.messages import (
    CONTENT,
    KNOWN,
    ROLE_OF_MODEL,
    ROLES,
    THOUGHTS,
    Conversation,
    Message,
    TemplateError,
    text_of,
    thought_of,
)
from megatron_dynapipe.tools.mixture.spec import TaskSpec, Turns
from megatron_dynapipe.tools.prepare.lost_text import CALLS, Reading, with_marks
from megatron_dynapipe.tools.prepare.message_forms import forms
from megatron_dynapipe.tools.prepare.rendering import Rendered, Rendering
from megatron_dynapipe.tools.prepare.tokenizer import Tokenizer

_EMPTY_THOUGHT = re.compile(r"\s*(?:<(?P<tag>[\w:|]*think\w*)>\s*</(?P=tag)>|</think>)\s*")
_CLOSES = "</think>"
_OTHER_ANSWER = "\0"
_ANY = -1
"""In place of a message, for what is of the whole row."""

OTHERS = "messages of other roles that are marked to be learned, which only the assistant's are"
REWRITES = "conversations with a sample for each answer (turns: each), since the chat template rewrites earlier turns"
OTHER_PROMPT = "answers before which the chat template writes something else than its prompt for one"
EMPTY_THOUGHTS = "answers with an empty thought that the chat template writes, which is not learned"
CONTROL = "messages whose text has control tokens of the tokenizer, which are encoded as such"

Spans = list[tuple[int, int]]
Lost = tuple[int, str]
"""A message, and what of it is not written, in words."""


class RewrittenError(TemplateError):
    """Says that a template changes what it wrote of earlier turns."""

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
        remarks: what the user should know of it, counted.
        lost: what the row has and the text has not.
        not_written: the same of the whole row, counted; the row's first sample has it.
    """

    conversation: Conversation
    text: str
    answers: Spans
    is_marked: bool
    remarks: list[str]
    lost: tuple[str, ...] = ()
    not_written: tuple[str, ...] = ()

    @property
    def has_empty_answer(self) -> bool:
        """Whether it would teach to answer with nothing."""
        answers = (self.conversation.messages[at] for at in self.conversation.answers)
        return not all(text_of(answer).strip() or answer.get(CALLS) or thought_of(answer) for answer in answers)


class ChatTemplate:
    """The chat template of a mixture's entry.

    Args:
        tokenizer: whose template it is.
        template: in place of the tokenizer's.
        spec: the entry.
        control: finds the tokenizer's control tokens in a text; None where it has none.

    Raises:
        DataError: there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, spec: TaskSpec, control: re.Pattern[str] | None
    ) -> None:
        self._spec = spec
        self._render = Rendering(tokenizer, template, spec.date, spec.template_arguments)
        self._reading = Reading(control)
        self._control = control

    def write(self, conversation: Conversation) -> list[Written]:
        """Write the samples of a conversation, in order; it has none without an answer.

        Raises:
            TemplateError: the template cannot write it or what is to be learned of it, or rewrites earlier turns
                although all are to be learned.
        """
        if not conversation.answers:
            return []
        if self._spec.turns is Turns.LAST:
            conversation = replace(conversation, answers=conversation.answers[-1:])
        if self._spec.strip_newlines:
            conversation = replace(conversation, messages=list(map(_without_newlines, conversation.messages)))
        conversation, whole, unwritten = self._formed(conversation)
        first, *others = self._samples(conversation, whole)
        lost = self._lost(conversation, whole[0], unwritten)
        columns = [f"rows with the column {name!r}" for name in self._unread_columns(conversation)]
        remarks = [*first.remarks, *self._remarks(conversation)]
        first = replace(first, remarks=remarks, not_written=(*(name for _, name in lost), *columns))
        return [
            replace(sample, lost=tuple(name for at, name in lost if at < len(sample.conversation.messages)))
            for sample in (first, *others)
        ]

    def written(self, conversation: Conversation, whole: Rendered | None = None) -> Written:
        """Write one sample of a conversation that has its form already; it raises what `write` raises."""
        messages = conversation.messages
        text, marks = whole or self._render(conversation, messages, marked=True)
        wholes = []
        for at in conversation.answers:
            is_last = at == len(messages) - 1
            wholes.append(text if is_last else self._render(conversation, messages[: at + 1])[0])
            if not text.startswith(wholes[-1]):
                raise RewrittenError(at)
        answers: Spans = []
        remarks: list[str] = []
        for at, part in zip(conversation.answers, wholes, strict=True):
            before = answers[-1][1] if answers else 0
            if marks is not None:
                answers += self._marked(conversation, at, part, marks)
                continue
            first, has_prompt = self._prompt(conversation, at, part, before)
            if first < before:
                raise RewrittenError(at)
            self._check(at, messages[at], part[first:])
            after = self._without_thought(text, first, len(part), messages[at])
            remarks += [OTHER_PROMPT] * (not has_prompt) + [EMPTY_THOUGHTS] * (after > first)
            answers.append((after, len(part)))
        return Written(conversation, text, answers, marks is not None, remarks)

    def _marked(self, conversation: Conversation, at: int, whole: str, marks: Spans) -> Spans:
        """Find what is marked of an answer; `whole` is the conversation up to it."""
        messages = conversation.messages
        before = _common(self._render(conversation, messages[:at])[0], whole) if at else 0
        marked: Spans = []
        for first, end in marks:
            if max(first, before) < end <= len(whole):
                touches = bool(marked) and marked[-1][1] == first
                marked.append((marked.pop()[0] if touches else first, end))
        self._check(at, messages[at], "".join(whole[first:end] for first, end in marked))
        return marked

    def _samples(self, conversation: Conversation, whole: Rendered) -> list[Written]:
        turns = self._spec.turns
        if turns is not Turns.EACH:
            try:
                return [self.written(conversation, whole)]
            except RewrittenError:
                if turns is not None:
                    raise
        samples = [self.written(conversation.until(answer)) for answer in conversation.answers]
        if turns is None:
            samples[0].remarks.append(REWRITES)
        return samples

    def _formed(self, conversation: Conversation) -> tuple[Conversation, Rendered, list[int]]:
        """Find the form that loses the least in the template; returns it, its text, and the contents that it loses."""
        has_tools = conversation.tools is not None
        reads_thoughts = self._render.reads(THOUGHTS[0], has_tools)
        has_tags = _CLOSES in self._render.source(has_tools)
        best: tuple[int, Conversation, Rendered, list[int]] | None = None
        refused: TemplateError | None = None
        for messages in forms(conversation.messages, reads_thoughts=reads_thoughts, has_tags=has_tags):
            formed = replace(conversation, messages=messages)
            try:
                whole = self._render(formed, messages, marked=True)
            except TemplateError as error:
                refused = refused or error
                continue
            unwritten = self._unwritten(formed, whole[0])
            misses = len(unwritten) + self._misses(formed, whole[0])
            if best is None or misses < best[0]:
                best = misses, formed, whole, unwritten
            if not misses:
                break
        if best is None:
            assert refused is not None
            raise refused
        return best[1:]

    def _misses(self, conversation: Conversation, text: str) -> int:
        """Count the keys other than contents that are not written, and thoughts that are written twice."""
        messages = conversation.messages
        plain = self._reading.plain(text)
        closed = sum(
            max(int(message["role"] == ROLE_OF_MODEL), text_of(message).count(_CLOSES)) for message in messages
        )
        lost = [
            key
            for at, message in enumerate(messages)
            for key in self._reading.lost(message, plain, kept=at in conversation.answers)
        ]
        return len(lost) - lost.count(CONTENT) + max(text.count(_CLOSES) - closed, 0)

    def _unwritten(self, conversation: Conversation, text: str) -> list[int]:
        def marked() -> str | None:
            try:
                return self._render(conversation, with_marks(conversation.messages))[0]
            except TemplateError:
                return None

        return self._reading.unwritten(conversation.messages, text, marked)

    def _check(self, at: int, message: Message, part: str) -> None:
        """Raise a TemplateError if a part of a text does not have the whole answer."""
        if lost := self._reading.lost(message, self._reading.plain(part)):
            raise TemplateError(
                f"message {at}: expected a chat template that writes the answer's {' and '.join(lost)}, which "
                f"{'is' if len(lost) == 1 else 'are'} to be learned, this one does not",
                hint="take another template, or take that out of the rows; --bad-rows skip leaves out such rows",
            )
        if part.count(_CLOSES) > max(1, text_of(message).count(_CLOSES)):
            raise TemplateError(
                f"message {at}: expected an answer with one thought, the chat template writes one of its own before it",
                hint="write the row's thought as `reasoning_content`",
            )

    def _prompt(self, conversation: Conversation, at: int, whole: str, before: int) -> tuple[int, bool]:
        """How many characters are given before an answer, and whether they are the template's prompt for one.

        The conversation is written up to the answer.
        """
        messages = conversation.messages
        if at == 0:  # of no messages most templates write nothing
            other = self._render(conversation, [messages[0] | {CONTENT: _OTHER_ANSWER}])[0]
            return _common(other, whole), True
        prompt = self._render(conversation, messages[:at], prompts=True)[0]
        if whole.startswith(prompt):
            return len(prompt), True
        common = _common(prompt, whole)
        content = text_of(messages[at]).strip()
        first = whole.find(content, max(before, common - len(content) + 1))
        return first if content and 0 <= first < common else common, False

    def _without_thought(self, text: str, first: int, end: int, message: Message) -> int:
        """Find where an answer begins after an empty thought that the template writes and the row does not have."""
        content = text_of(message)
        if self._spec.empty_thoughts or "</think" in content or thought_of(message):
            return first
        thought = _EMPTY_THOUGHT.match(text, first, end)
        return first if thought is None or _EMPTY_THOUGHT.match(content) else thought.end()

    def _lost(self, conversation: Conversation, text: str, unwritten: list[int]) -> list[Lost]:
        """Find what the text lacks of the messages that are given; it raises what `write` raises."""
        messages = conversation.messages
        plain = self._reading.plain(text)
        has_tools = conversation.tools is not None
        found: set[Lost] = set()
        for at in set(unwritten) - set(conversation.answers):
            if (role := messages[at]["role"]) not in ROLES:
                raise TemplateError(
                    f"message {at}: expected a role that the chat template writes, got {role!r}",
                    hint=f"`roles: {{{role}: user}}` in the mixture gives it another name",
                )
            found.add((at, f"messages of role {role!r}"))
        for at, message in enumerate(messages):
            unread = sorted(key for key in message.keys() - KNOWN if not self._render.reads(key, has_tools))
            if at not in conversation.answers:
                unread += [key for key in self._reading.lost(message, plain) if key != CONTENT]
            found |= {(at, f"messages with {key!r}") for key in unread}
        tools = [str(tool.get("function", tool).get("name", "")) for tool in conversation.tools or []]
        if has_tools and not (
            self._render.reads("tools", has_tools) and all(self._reading.plain(name) in plain for name in tools)
        ):
            found.add((_ANY, "conversations with 'tools'"))
        return sorted(found)

    def _unread_columns(self, conversation: Conversation) -> list[str]:
        return sorted(conversation.columns.keys() - self._render.columns(conversation).keys())

    def _remarks(self, conversation: Conversation) -> Iterator[str]:
        yield from [OTHERS] * conversation.others
        has_tools = conversation.tools is not None
        if self._render.asks_date(has_tools):
            yield f"conversations with {self._render.date} as today's date, for which the chat template asks"
        if unset := self._render.unset(conversation):
            yield f"conversations in which the chat template's own default stands for {', '.join(unset)}"
        if self._control is not None:
            yield from (CONTROL for message in conversation.messages if self._control.search(text_of(message)))


def _without_newlines(message: Message) -> Message:
    """A message whose content, if it is an answer's, does not begin with newlines."""
    content = message.get(CONTENT)
    if not content or message["role"] != ROLE_OF_MODEL:
        return message
    if isinstance(content, str):
        return message | {CONTENT: content.lstrip("\n")}
    first = content[0] | {"text": content[0]["text"].lstrip("\n")}
    return message | {CONTENT: [first, *content[1:]]}


def _common(first: str, second: str) -> int:
    """Count the characters that two texts have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
