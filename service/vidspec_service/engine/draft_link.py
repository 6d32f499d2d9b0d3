"""DraftLink: the target's end of the channel to the draft. Losing the draft is normal: it costs speed only."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vidspec_service.engine.channels import Channel, ChannelClosed, ChannelFull
from vidspec_service.engine.messages import Follow, Proposal, Release, Relevance, Verdict
from vidspec_service.engine.running import Running

logger = logging.getLogger(__name__)


class DraftLink:
    """Sends verdicts and collects proposals; after a failure it is simply not connected."""

    def __init__(self) -> None:
        self.channel: Channel | None = None

    def connect(self, channel: Channel) -> None:
        """Talk to this draft from now on; it knows nothing of what the last one was told."""
        self.disconnect()
        self.channel = channel

    def disconnect(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def proposals(self) -> list[Proposal]:
        """All that have arrived."""
        found: list[Proposal] = []
        try:
            while self.channel is not None and (received := self.channel.receive()) is not None:
                if isinstance(received[0], Proposal):
                    found.append(received[0])
        except ChannelClosed:
            self._lose("closed")
        return found

    def tell(self, running: Running) -> None:
        """A verdict: every committed token that this draft has not heard of."""
        speculation, committed = running.speculation, running.sequence.committed
        verdict = Verdict(
            request_id=running.request_id,
            start=speculation.num_told,
            ids=tuple(committed[speculation.num_told :]),
            room=speculation.plan.room,
        )
        speculation.num_told = len(committed)
        self.send(verdict)

    def send(self, message: Follow | Verdict | Relevance | Release, fds: Sequence[int] = ()) -> None:
        """At once, or the draft is lost."""
        if self.channel is None:
            return
        try:
            self.channel.send(message, fds)
        except (ChannelClosed, ChannelFull) as error:
            self._lose(type(error).__name__)

    def _lose(self, why: str) -> None:
        logger.warning("the draft is gone (%s); going on without it", why)
        self.disconnect()
