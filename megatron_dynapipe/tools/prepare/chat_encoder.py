"""Conversations of a block → samples; those that are too long lose their earliest turns."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_dynapipe.sampling.long_samples import LongSamples
from megatron_dynapipe.tools.mixture.messages import Conversation, RowError, TemplateError
from megatron_dynapipe.tools.mixture.row_reader import Refuse
from megatron_dynapipe.tools.mixture.spec import TaskSpec
from megatron_dynapipe.tools.mixture.templates import bounded
from megatron_dynapipe.tools.prepare.chat import ChatTemplate, Written
from megatron_dynapipe.tools.prepare.learned_tokens import Ends, Speech, Taught
from megatron_dynapipe.tools.prepare.settings import PrepareSettings
from megatron_dynapipe.tools.prepare.text_encoder import Encoded, TextEncoder

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
                    written: Sequence[Written | None] = self._template.write(conversation) or [None]
                except RowError as error:
                    refuse(number, error)
                else:
                    asked += [(number, name, sample) for sample in written]
        encoded = iter(self._encoder.rendered([sample.text for *_, sample in asked if sample is not None]))
        for number, name, sample in asked:
            try:
                yield number, name, None if sample is None else self._taught(sample, next(encoded))
            except RowError as error:
                refuse(number, error)

    def _taught(self, written: Written, encoded: Encoded) -> TaughtChat:
        whole = self._speech.taught(written, encoded, self._ends, always_ends=self._spec.ends)
        if self._settings.long_samples is LongSamples.TRUNCATE and not self._fits(whole):
            shorter = self._shorter(written.conversation)
            if shorter is not None:
                return written.text, replace(shorter, remarks=whole.remarks, not_written=whole.not_written), True
        return written.text, whole, False

    def _shorter(self, conversation: Conversation) -> Taught | None:
        """The sample without as few of the earliest turns as make it fit; None where nothing does."""
        for first in range(conversation.system_messages + 1, conversation.answers[-1] + 1):
            if conversation.messages[first]["role"] != "user":
                continue
            try:
                with bounded():
                    written = self._template.written(conversation.from_turn(first))
            except TemplateError:
                continue
            (encoded,) = self._encoder.rendered([written.text])
            taught = self._speech.taught(written, encoded, self._ends, always_ends=self._spec.ends)
            if self._fits(taught):
                return taught
        return None

    def _fits(self, taught: Taught) -> bool:
        return self._settings.allows(taught.limited)
