"""A target that takes over an almost finished request sends the end, and nothing twice."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import ask, scene_video
from vidspec_models.loading.load_model import load_model
from vidspec_models.request import SpeculationMode
from vidspec_service.engine.frontend.workers import configure_messages
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, wait_readable
from vidspec_service.engine.ipc.messages import Ended, Generate, Message, Tokens
from vidspec_service.engine.ipc.payload import close_fds, write_request
from vidspec_service.engine.speculation.probe import measure_costs
from vidspec_service.engine.target.loop import TargetLoop
from vidspec_service.engine.types import PromptReady

pytestmark = pytest.mark.component


def said(api: Channel, committed: tuple[int, ...], max_tokens: int) -> list[Message]:
    """All messages of the target about a request with `committed` tokens, up to its end."""
    off = SpeculationMode.OFF
    request = ask("taken over", "Describe the video.", [scene_video(3)], max_tokens=max_tokens, speculation=off)
    payload = write_request(replace(request, committed=committed))
    api.send(Generate(request_id=request.request_id), payload)
    close_fds(payload)
    found: list[Message] = []
    while not (found and isinstance(found[-1], Ended)):
        wait_readable([api], 60)
        received = api.receive()
        assert received is not None, "no end in time"
        if isinstance(received[0], PromptReady | Tokens | Ended):
            found.append(received[0])
    return found


def test_a_target_that_takes_over_after_the_last_token_only_says_the_end() -> None:
    config = next(each for each in configure_messages(replace(PAIR, kv_cache_tokens=65536)) if each.role == "target")
    model = load_model(config.spec)
    api, far = Channel.pair()
    loop = TargetLoop(model, far, config, measure_costs(model))

    def run() -> None:
        with suppress(ChannelClosed):
            loop.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        whole = [message for message in said(api, (), 6) if isinstance(message, Tokens)]
        ids = tuple(token for message in whole for token in message.ids)
        assert len(ids) == 6
        taken_over = said(api, ids, 6)
        assert [type(message) for message in taken_over] == [PromptReady, Ended]
        halfway = said(api, ids[:3], 6)
        assert tuple(token for message in halfway if isinstance(message, Tokens) for token in message.ids) == ids[3:]
    finally:
        api.close()
        thread.join(20)
        far.close()
