"""Conversations of a block → samples; those that are too long lose their earliest turns."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_dynapipe.sampling.long_samples import LongSamples
from megatron_dynapipe.tools.mixture.fields import Refuse
from megatron_dynapipe.tools.mixture.messages import Conversation, RowError, TemplateError
from megatron_dynapipe.tools.mixture.spec import TaskSpec
from megatron_dynapipe.tools.mixture.templates import bounded
from megatron_dynapipe.tools.prepare.chat import ChatTemplate, Written
from megatron_dynapipe.tools.prepare.encoded import Encoded, TextEncoder
from megatron_dynapipe.tools.prepare.settings import PrepareSettings
from megatron_dynapipe.tools.prepare.teach import Ends, Speech, Taught

UNENDED = (
    "answers that end in no special token, since the chat template writes none after them: a model does not learn there"
    " when to stop (`eos: true` ends a conversation with the tokenizer's end token)"
)
CUT = (
    "answers whose first token also holds the end of what is given before them, so that a model learns to begin with a"
    " token that it cannot write there (`strip_newlines: true` takes leading newlines off answers)"
)


TaughtChat = tuple[str, Taught, bool]
"""A conversation as its template writes it, its sample, and whether that has lost earlier turns."""


class ChatEncoder:
    """Encodes the conversations of a mixture's entry."""

    def __init__(
        self,
        encoder: TextEncoder,
        ends: Ends,
        spec: TaskSpec,
        template: str | None,
        settings: PrepareSettings,
    ) -> None:
        self._encoder = encoder
        self._ends = ends
        self._spec = spec
        self._settings = settings
        self._template = ChatTemplate(encoder.tokenizer, template, spec, encoder.control)
        self._speech = Speech(encoder.special, encoder.is_blank)

    def __call__(self, rows: Iterable[tuple[int, Any]], refuse: Refuse) -> Iterator[tuple[int, str, TaughtChat | None]]:
        """(number, task, sample) of each sample; None of a conversation that has no answer."""
        asked: list[tuple[int, str, Written | None]] = []
        with bounded():
            for number, (name, conversation) in rows:
                try:
                    written = self._template.write(conversation)
                except RowError as error:
                    refuse(number, error)
                else:
                    samples: Sequence[Written | None] = written or [None]
                    asked += [(number, name, sample) for sample in samples]
        encoded = iter(self._encoder.rendered([sample.text for *_, sample in asked if sample is not None]))
        for number, name, sample in asked:
            if sample is None:
                yield number, name, None
                continue
            try:
                taught = self._taught(sample, next(encoded))
            except RowError as error:
                refuse(number, error)
            else:
                yield number, name, taught

    def taken_remarks(self) -> tuple[Counter[str], Counter[str]]:
        """What the user should know of the conversations since the last call, and what was not written, counted."""
        remarks = self._template.remarks + Counter({UNENDED: self._speech.unended, CUT: self._speech.cut})
        not_written = self._template.not_written
        self._template.remarks, self._template.not_written = Counter(), Counter()
        self._speech.unended = self._speech.cut = 0
        return remarks, not_written

    def _taught(self, written: Written, encoded: Encoded) -> TaughtChat:
        whole = self._speech.taught(written, encoded, self._ends, always_ends=self._spec.ends)
        if self._settings.long_samples is LongSamples.TRUNCATE and not self._fits(whole):
            shorter = self._shorter(written.conversation)
            if shorter is not None:
                return written.text, shorter, True
        return written.text, whole, False

    def _shorter(self, conversation: Conversation) -> Taught | None:
        """The sample without as few of the earliest turns as make it fit; None where nothing does."""
        last = conversation.answers[-1]
        remarks = self._template.remarks.copy()
        for first in range(conversation.system_messages + 1, last + 1):
            if conversation.messages[first]["role"] != "user":
                continue
            try:
                with bounded():
                    written = self._template.written(conversation.from_turn(first))
            except TemplateError:
                continue
            finally:
                self._template.remarks = remarks.copy()  # they were made of the whole
            (encoded,) = self._encoder.rendered([written.text])
            taught = self._speech.taught(written, encoded, self._ends, always_ends=self._spec.ends)
            if self._fits(taught):
                return taught
        return None

    def _fits(self, taught: Taught) -> bool:
        lengths = len(taught.input.tokens), len(taught.target.tokens) - taught.target.after
        return all(
            limit is None or length <= limit for length, limit in zip(lengths, self._settings.limits, strict=True)
        )
