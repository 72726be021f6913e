"""A conversation as its chat template writes it, and which characters of that the model will have to write.

    <|user|>Hi<|assistant|>Hello.<|end|>                  ( ): an answer, from the end of what the template
                          (            )                  writes before one to the end of its turn

`{% generation %}` marks of a template say what answers are; else the template is asked for the conversation up to each
answer, with its prompt for one and with the answer. What it writes of earlier turns then must be what it writes of them
in the whole; a template that rewrites them (as those do that drop earlier thoughts) gives a sample for each answer, its
history as it is written then. What of the row it does not write is counted, or of an answer an error.
"""

import re
from collections import Counter
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
from megatron_dynapipe.tools.prepare.forms import forms
from megatron_dynapipe.tools.prepare.rendering import Rendered, Rendering
from megatron_dynapipe.tools.prepare.tokenizer import Tokenizer
from megatron_dynapipe.tools.prepare.written import CALLS, Reading, with_marks

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
        lost: what the row has and the text has not.
    """

    conversation: Conversation
    text: str
    answers: Spans
    is_marked: bool
    lost: tuple[str, ...] = ()

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

    Attributes:
        remarks: what the user should know of what was written, counted.
        not_written: what rows have and the template does not write, counted.

    Raises:
        DataError: there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, spec: TaskSpec, control: re.Pattern[str] | None
    ) -> None:
        self.remarks: Counter[str] = Counter()
        self.not_written: Counter[str] = Counter()
        self._spec = spec
        self._render = Rendering(tokenizer, template, spec.date, spec.template_arguments)
        self._reading = Reading(control)
        self._control = control

    def write(self, conversation: Conversation) -> list[Written]:
        """The samples of a conversation, in order; none without an answer.

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
        before = self.remarks.copy()
        try:
            samples = self._samples(conversation, whole)
            lost = self._lost(conversation, whole[0], unwritten)
        except TemplateError:
            self.remarks = before
            raise
        self._remark(conversation)
        self.not_written.update(name for _, name in lost)
        self.not_written.update(f"rows with the column {name!r}" for name in self._unread_columns(conversation))
        return [
            replace(sample, lost=tuple(name for at, name in lost if at < len(sample.conversation.messages)))
            for sample in samples
        ]

    def written(self, conversation: Conversation, whole: Rendered | None = None) -> Written:
        """One sample of a conversation in its form; raises as `write`."""
        messages = conversation.messages
        text, marks = whole or self._render(conversation, messages, marked=True)
        wholes = []
        for at in conversation.answers:
            is_last = at == len(messages) - 1
            wholes.append(text if is_last else self._render(conversation, messages[: at + 1])[0])
            if not text.startswith(wholes[-1]):
                raise RewrittenError(at)
        answers: Spans = []
        for at, part in zip(conversation.answers, wholes, strict=True):
            before = answers[-1][1] if answers else 0
            if marks is not None:
                answers += self._marked(conversation, at, part, marks)
                continue
            first = self._prompt(conversation, at, part, before)
            if first < before:
                raise RewrittenError(at)
            self._check(at, messages[at], part[first:])
            answers.append((self._without_thought(text, first, len(part), messages[at]), len(part)))
        return Written(conversation, text, answers, marks is not None)

    def _marked(self, conversation: Conversation, at: int, whole: str, marks: Spans) -> Spans:
        """What is marked of an answer, whose conversation is written up to it."""
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
            before = self.remarks.copy()
            try:
                return [self.written(conversation, whole)]
            except RewrittenError:
                if turns is not None:
                    raise
                self.remarks = before + Counter({REWRITES: 1})
        return [self.written(conversation.until(answer)) for answer in conversation.answers]

    def _formed(self, conversation: Conversation) -> tuple[Conversation, Rendered, list[int]]:
        """The conversation in the form that its template writes most of, that text, and contents that it lacks."""
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
        """How much of it but contents is not written, or is written twice."""
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
        """Raise a TemplateError where a part of a text does not have all of an answer."""
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

    def _prompt(self, conversation: Conversation, at: int, whole: str, before: int) -> int:
        """The characters that are given to the model before an answer, whose conversation is written up to it."""
        messages = conversation.messages
        if at == 0:  # of no messages most templates write nothing
            other = self._render(conversation, [messages[0] | {CONTENT: _OTHER_ANSWER}])[0]
            return _common(other, whole)
        prompt = self._render(conversation, messages[:at], prompts=True)[0]
        if whole.startswith(prompt):
            return len(prompt)
        self.remarks[OTHER_PROMPT] += 1
        common = _common(prompt, whole)
        content = text_of(messages[at]).strip()
        first = whole.find(content, max(before, common - len(content) + 1))
        return first if content and 0 <= first < common else common

    def _without_thought(self, text: str, first: int, end: int, message: Message) -> int:
        """Where an answer begins after an empty thought that the row does not have."""
        content = text_of(message)
        if self._spec.empty_thoughts or "</think" in content or thought_of(message):
            return first
        thought = _EMPTY_THOUGHT.match(text, first, end)
        if thought is None or _EMPTY_THOUGHT.match(content):
            return first
        self.remarks[EMPTY_THOUGHTS] += 1
        return thought.end()

    def _lost(self, conversation: Conversation, text: str, unwritten: list[int]) -> list[Lost]:
        """What of a conversation's given messages its text does not have; raises as `write`."""
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

    def _remark(self, conversation: Conversation) -> None:
        if conversation.others:
            self.remarks[OTHERS] += conversation.others
        has_tools = conversation.tools is not None
        if self._render.asks_date(has_tools):
            date = self._render.date
            self.remarks[f"conversations with {date} as today's date, for which the chat template asks"] += 1
        if unset := self._render.unset(conversation):
            names = ", ".join(unset)
            self.remarks[f"conversations in which the chat template's own default stands for {names}"] += 1
        if self._control is not None:
            texts = map(text_of, conversation.messages)
            if count := sum(self._control.search(text) is not None for text in texts):
                self.remarks[CONTROL] += count


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
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
