"""The draft's loop over real channels: the test plays the API and the target."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

from tests.unit.engine.counting_model import CELLS, CountingModel, Running, configure, submit
from tests.unit.engine.far_ends import Far, connect_peer, prompt_of
from tests.unit.engine.recording_model import RecordingModel
from tests.unit.engine.requests import request_of, target_request
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.errors import ConversationRefused
from vidspec_models.prompt import Prompt, grid_checksum
from vidspec_models.request import GenerationRequest, Include, Preservation, SpeculationMode, TowerOutput, Video
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.draft.loop import DraftLoop
from vidspec_service.engine.ipc.channel import Channel, wait_readable
from vidspec_service.engine.ipc.messages import Cancel, Declined, Follow, Heartbeat, Proposal, Relevance, Verdict
from vidspec_service.engine.ipc.payload import TowerMemory, write_scores
from vidspec_service.engine.target.draft_link import DraftLink
from vidspec_service.engine.types import DraftView

FOR_ONE = 64  # rows of cache, enough for one request; the draft sees a tenth of the video
LENGTH = 60


def request(name: str, **changes: Any) -> GenerationRequest:
    return replace(request_of(name, SpeculationMode.PARALLEL, max_tokens=LENGTH), **changes)


def text_of(name: str) -> list[int]:
    """The answer to `name`, by target and draft alike: the draft is always right."""
    return RecordingModel().answer(prompt_of(name), LENGTH)


class Draft:
    """A loop that runs in a thread, and the far ends of its channels."""

    def __init__(self, stack: ExitStack, *, is_full: bool = False, **config: Any) -> None:
        ours, theirs = Channel.pair()
        self.api, self.model = Far(ours), RecordingModel()
        self._stack, self._num_others = stack, 0
        stack.callback(theirs.close)
        config = {"preservation": Preservation.UNIFORM, **config}
        self.loop = DraftLoop(cast("VideoLM", self.model), theirs, configure("draft", **config))
        self.thread = stack.enter_context(Running(self.loop, ours))
        self.target = self.new_target(is_full=is_full)

    def new_target(self, *, is_full: bool = False) -> Far:
        far = connect_peer(self.api.channel, is_full=is_full)
        self._stack.callback(far.close)
        return far

    def follow(self, *names: str, max_lead: int = 0, **changes: Any) -> None:
        """Give the draft these requests as the API does, and ask for their proposals as the target does."""
        for name in names:
            submit(self.api.channel, request(name, **changes))
        for name in names:
            self.target.channel.send(Follow(request_id=name, max_lead=max_lead))

    def tell(self, name: str, start: int, ids: list[int], max_lead: int, min_draft_tokens: int = 0) -> None:
        said = Verdict(
            request_id=name, start=start, ids=tuple(ids), max_lead=max_lead, min_draft_tokens=min_draft_tokens
        )
        self.target.channel.send(said)

    def chain(self, name: str, num_tokens: int) -> list[Proposal]:
        """The next proposals for a request, until they have `num_tokens` tokens together."""
        found: list[Proposal] = []
        while sum(len(proposal.ids) for proposal in found) < num_tokens:
            found.append(self.target.next(Proposal, lambda proposal: proposal.request_id == name))
        return found

    def is_silent(self, name: str) -> bool:
        """Whether the draft proposes nothing more for a request, even while it proposes for a new one."""
        self._num_others += 1
        self.follow(other := f"other {self._num_others}")
        num_before = len(self.of(name))
        self.tell(other, 0, text_of(other)[:1], max_lead=2)
        self.chain(other, 2)
        self.api.channel.send(Cancel(request_id=other))
        return len(self.of(name)) == num_before

    def of(self, name: str) -> list[Proposal]:
        return [proposal for proposal in self.target.of(Proposal) if proposal.request_id == name]


def joined(proposals: list[Proposal]) -> list[int]:
    """The tokens of consecutive proposals of one epoch."""
    end = proposals[0].start
    for proposal in proposals:
        assert (proposal.epoch, proposal.start) == (proposals[0].epoch, end)
        end += len(proposal.ids)
    return [token for proposal in proposals for token in proposal.ids]


def test_it_runs_ahead_of_what_is_committed_as_far_as_there_is_room(stack: ExitStack) -> None:
    draft, text = Draft(stack), text_of("a")
    draft.follow("a")
    assert draft.is_silent("a"), "nothing is committed to build on"
    draft.tell("a", 0, text[:1], max_lead=7, min_draft_tokens=7)
    chain = draft.chain("a", 7)
    assert (chain[0].start, joined(chain)) == (1, text[1:8])
    assert max(len(proposal.ids) for proposal in chain) > 1
    assert {proposal.video_tokens for proposal in chain} == {16}
    assert draft.is_silent("a")
    draft.tell("a", 1, text[1:4], max_lead=7)
    chain += draft.chain("a", 3)
    assert joined(chain) == text[1:11]
    assert [proposal.prepare_s > 0 for proposal in chain] == [True] + [False] * (len(chain) - 1)
    draft.tell("a", 4, text[4:6], max_lead=3)
    assert draft.is_silent("a"), "it is farther ahead than it may be now"


def test_it_may_begin_while_the_target_still_prefills_the_prompt(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, text, prepare = Draft(stack), text_of("a"), RecordingModel.prepare

    def prepare_slowly(*given: Any) -> Prompt:
        wait_readable([], 0.05)
        return prepare(*given)

    monkeypatch.setattr(RecordingModel, "prepare", prepare_slowly)
    draft.follow("a", max_lead=5)
    chain = draft.chain("a", 5)
    assert (chain[0].start, joined(chain)) == (0, text[:5])
    assert chain[0].prepare_s > 0.04, "the prompt's preparation counts, too"
    assert draft.is_silent("a")
    draft.tell("a", 0, text[:1], max_lead=6)
    chain += draft.chain("a", 2)
    assert joined(chain) == text[:7]


def test_where_the_target_chooses_another_first_token_the_draft_goes_on_after_that(stack: ExitStack) -> None:
    draft, text = Draft(stack), text_of("a")
    draft.follow("a", max_lead=5)
    draft.chain("a", 5)
    other = (text[0] + 1) % RecordingModel().vocabulary
    draft.tell("a", 0, [other], max_lead=2)
    chain = draft.chain("a", 2)
    assert (chain[0].epoch, chain[0].start) == (1, 1)
    assert draft.is_silent("a")


def test_what_a_former_target_allowed_lets_no_draft_begin_for_the_next_one(stack: ExitStack) -> None:
    draft, text = Draft(stack), text_of("a")
    draft.model.gates["prefill"].shut()
    draft.follow("a", max_lead=5)
    draft.model.gates["prefill"].wait_reached()
    draft.target = draft.new_target()
    draft.model.gates["prefill"].open()
    assert draft.is_silent("a")
    draft.tell("a", 0, text[:1], max_lead=3)
    chain = draft.chain("a", 3)
    assert (chain[0].start, joined(chain)) == (1, text[1:4])


def test_it_sees_as_much_as_the_request_asks_and_chooses_again_by_the_targets_attention(stack: ExitStack) -> None:
    draft = Draft(stack)
    include = frozenset({Include.DRAFT_VIEW})
    draft.follow("a", preservation=Preservation.ATTENTION, prune_ratio=0.5, include=include)
    draft.api.next(DraftView)
    fd = write_scores(np.linspace(0, 1, CELLS, dtype=np.float16))
    draft.target.channel.send(Relevance(request_id="a", grid_checksum=grid_checksum(prompt_of("a"))), (fd,))
    os.close(fd)
    draft.api.next(DraftView)  # another one comes only for another choice
    draft.tell("a", 0, text_of("a")[:1], max_lead=2)
    assert {proposal.video_tokens for proposal in draft.chain("a", 2)} == {CELLS // 2}


@pytest.mark.parametrize(("max_tokens", "room"), [(6, 100), (None, 6), (100, 6)])
def test_it_proposes_nothing_beyond_the_answers_limit_or_its_own_context(
    stack: ExitStack, max_tokens: int | None, room: int
) -> None:
    draft, text = Draft(stack), text_of("other 0")
    draft.model.context_length = prompt_of("other 0").context_used + room
    draft.follow("other 0", max_tokens=max_tokens)
    draft.tell("other 0", 0, text[:1], max_lead=40)
    assert joined(draft.chain("other 0", 5)) == text[1:6]
    assert draft.is_silent("other 0")


def test_a_correction_opens_an_epoch_that_goes_on_after_what_is_committed(stack: ExitStack) -> None:
    draft, text = Draft(stack), text_of("a")
    draft.model.agreement = 5
    draft.follow("a")
    draft.tell("a", 0, text[:1], max_lead=12)
    before = draft.chain("a", 12)
    said = joined(before)
    place = next(place for place, token in enumerate(said, start=1) if token != text[place])
    draft.model.agreement = 10
    draft.tell("a", 1, text[1 : place + 1], max_lead=4)
    after = draft.chain("a", 4)
    assert after[0].epoch > before[0].epoch
    assert (after[0].start, joined(after)) == (place + 1, text[place + 1 : place + 5]), "it read what is not so"


def test_what_the_target_has_committed_beyond_the_chain_is_read_and_gone_on_from(stack: ExitStack) -> None:
    draft, text = Draft(stack), text_of("a")
    draft.follow("a")
    draft.tell("a", 0, text[:1], max_lead=2)
    before = draft.chain("a", 2)
    draft.tell("a", 1, text[1:9], max_lead=3)
    after = draft.chain("a", 3)
    assert (after[0].start, joined(after)) == (9, text[9:12])
    assert after[0].epoch > before[0].epoch


def test_a_token_that_only_the_target_has_costs_its_answer_the_draft_and_nobody_else(stack: ExitStack) -> None:
    """A target may have tokens that its tokenizer.json lacks, or the draft fewer rows than tokens."""
    draft = Draft(stack)
    draft.follow("aa", "bb")
    draft.tell("aa", 0, [RecordingModel.vocabulary_size], max_lead=4)
    assert draft.target.next(Declined).request_id == "aa"
    draft.tell("bb", 0, text_of("bb")[:1], max_lead=4)
    assert draft.chain("bb", 4)[0].ids[0] == text_of("bb")[1]


def test_a_request_that_cannot_be_prepared_is_declined(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target may be waiting for the first proposal."""

    def refused(*_: Any) -> Prompt:
        raise ConversationRefused("roles must alternate")

    draft = Draft(stack)
    monkeypatch.setattr(draft.model, "prepare", refused)
    draft.follow("a")
    assert draft.target.next(Declined).request_id == "a"


def test_where_the_device_is_broken_the_draft_ends_instead_of_declining_everything(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Prompt:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    draft = Draft(stack)
    monkeypatch.setattr(draft.model, "prepare", broken)
    monkeypatch.setattr("torch.ones", broken)
    draft.follow("a")
    draft.thread.wait()
    assert "illegal memory access" in str(draft.thread.error)


def test_a_prompt_that_leaves_no_room_in_the_context_is_declined(stack: ExitStack) -> None:
    draft = Draft(stack)
    draft.model.context_length = prompt_of("a").context_used + 1  # the first token is the target's
    draft.follow("a")
    assert draft.target.next(Declined).request_id == "a"


def test_what_a_new_target_asks_for_of_what_was_given_up_is_declined_and_nothing_else(stack: ExitStack) -> None:
    draft, text = Draft(stack, kv_cache_tokens=FOR_ONE), text_of("old")
    draft.follow("old", "young")
    for name in ("old", "young"):
        draft.tell(name, 0, text_of(name)[:1], max_lead=4)
    draft.chain("old", 4)
    for start in range(1, 31, 3):
        draft.tell("old", start, text[start : start + 3], max_lead=4)
        draft.chain("old", 3)
    assert [each.request_id for each in draft.target.of(Declined) or [draft.target.next(Declined)]] == ["young"]
    old, draft.target = draft.target, draft.new_target()
    old.wait_closed()
    for name in ("old", "young", "never offered"):
        draft.target.channel.send(Follow(request_id=name))
    draft.tell("old", 0, text[:1], max_lead=4)
    assert joined(draft.chain("old", 4)) == text[1:5]
    assert [each.request_id for each in draft.target.of(Declined)] == ["young", "never offered"]


def test_a_request_that_has_ended_is_forgotten_and_its_room_free(stack: ExitStack) -> None:
    draft = Draft(stack, kv_cache_tokens=FOR_ONE)
    draft.follow("a")
    text = text_of("a")
    draft.tell("a", 0, text[:1], max_lead=4)
    draft.chain("a", 4)
    draft.api.channel.send(Cancel(request_id="a"))
    draft.api.channel.send(Cancel(request_id="unknown"))
    draft.follow("b", max_tokens=30)
    draft.tell("a", 1, text[1:3], max_lead=4)
    draft.tell("b", 0, text_of("b")[:1], max_lead=40)
    assert joined(draft.chain("b", 29)) == text_of("b")[1:30]
    assert joined(draft.of("a")) == text[1:5]


def test_a_request_that_ends_while_it_is_prepared_is_no_trouble(stack: ExitStack) -> None:
    draft = Draft(stack)
    draft.model.gates["prepare"].shut()
    draft.follow("a")
    draft.model.gates["prepare"].wait_reached()
    draft.api.channel.send(Cancel(request_id="a"))
    draft.model.gates["prepare"].open()
    assert draft.is_silent("a")
    assert not draft.target.of(Declined)
    assert "a" not in draft.loop._active


def test_what_was_offered_and_never_followed_leaves_nothing(stack: ExitStack) -> None:
    draft = Draft(stack)
    assert draft.is_silent("a")
    num_before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        submit(draft.api.channel, request(f"offered {number}"))
        draft.api.channel.send(Cancel(request_id=f"offered {number}"))
    assert draft.is_silent("a")
    assert len(os.listdir("/proc/self/fd")) == num_before
    assert not [name for name in draft.loop._early if name.startswith("offered")]


def test_where_two_do_not_fit_the_younger_is_given_up_and_the_older_goes_on(stack: ExitStack) -> None:
    draft, text = Draft(stack, kv_cache_tokens=FOR_ONE), text_of("old")
    draft.follow("old", "young")
    draft.tell("old", 0, text[:1], max_lead=4)
    draft.tell("young", 0, text_of("young")[:1], max_lead=4)
    chain = draft.chain("old", 4)
    for start in range(1, 31, 3):
        draft.tell("old", start, text[start : start + 3], max_lead=4)
        chain += draft.chain("old", 3)
    assert joined(chain) == text[1:35]


def test_a_new_target_tells_everything_and_is_told_a_chain_of_its_own(stack: ExitStack) -> None:
    draft, text = Draft(stack), text_of("a")
    draft.follow("a")
    draft.tell("a", 0, text[:1], max_lead=6)
    draft.chain("a", 6)
    old, draft.target = draft.target, draft.new_target()
    old.wait_closed()
    draft.tell("a", 0, text[:3], max_lead=4)  # a new target may know fewer or more committed tokens
    assert joined(draft.chain("a", 4)) == text[3:7]
    assert draft.of("a")[0].start == 3
    assert draft.is_silent("a")


def test_what_a_former_target_said_before_the_prompt_was_there_is_void(stack: ExitStack) -> None:
    draft, text = Draft(stack), text_of("a")
    draft.model.gates["prepare"].shut()
    draft.follow("a")
    draft.tell("a", 0, text[:5], max_lead=4)
    draft.model.gates["prepare"].wait_reached()
    old, draft.target = draft.target, draft.new_target()
    old.wait_closed()
    draft.tell("a", 0, text[:2], max_lead=4)
    draft.model.gates["prepare"].open()
    assert draft.chain("a", 1)[0].start == 2


def test_what_a_former_target_said_that_was_not_read_yet_is_void(stack: ExitStack) -> None:
    draft, text = Draft(stack), text_of("a")
    draft.follow("a")
    draft.tell("a", 0, text[:1], max_lead=2)
    draft.chain("a", 2)
    draft.model.gates["prefill"].shut()
    draft.follow("b")
    draft.model.gates["prefill"].wait_reached()
    draft.tell("a", 1, text[1:3], max_lead=2)
    draft.target = draft.new_target()
    draft.tell("a", 0, text[:2], max_lead=4)
    draft.model.gates["prefill"].open()
    assert joined(draft.chain("a", 4)) == text[2:6]
    assert not draft.target.of(Declined)


@pytest.mark.parametrize("how", ["it ends", "it does not read"])
def test_a_target_that_is_lost_is_missed_and_the_next_one_is_served(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("vidspec_service.engine.worker.loop.HEARTBEAT_S", 0.1)
    draft, text = Draft(stack, is_full=how == "it does not read"), text_of("a")
    draft.follow("a")
    draft.tell("a", 0, text[:1], max_lead=4)
    if how == "it ends":
        draft.chain("a", 1)
        draft.target.close()
    else:
        draft.target.wait_closed()
    draft.api.next(Heartbeat, lambda heartbeat: not heartbeat.has_peer)
    draft.target = draft.new_target()
    draft.tell("a", 0, text[:2], max_lead=4)
    assert joined(draft.chain("a", 4)) == text[2:6]
    draft.api.next(Heartbeat, lambda heartbeat: any(num_rows <= 5 for *_, num_rows in heartbeat.forwards))
    assert draft.thread.error is None


def test_what_a_message_has_no_room_for_is_told_all_the_same() -> None:
    api, far_api = Channel.pair()
    target, far_target = Channel.pair()
    loop, link = DraftLoop(cast("VideoLM", CountingModel()), far_api, configure("draft")), DraftLink()
    loop._target.connect(far_target)
    link.connect(target)
    ids = [70_000 + number for number in range(60_000)]
    request = target_request(committed=ids, max_tokens=100_000)
    link.send_verdict(request)
    request.commit([5])
    link.send_verdict(request)
    loop._early["r"] = []
    loop._receive()
    assert loop._early["r"] == [
        Verdict(request_id="r", start=0, ids=tuple(ids), max_lead=0),
        Verdict(request_id="r", start=60_000, ids=(5,), max_lead=0),
    ]
    loop._target.disconnect()
    link.disconnect()
    api.close()
    far_api.close()


def test_several_requests_are_advanced_together_and_not_mixed_up(stack: ExitStack) -> None:
    draft, names = Draft(stack), ("a", "b", "c")
    draft.follow(*names)
    for name in names:
        draft.tell(name, 0, text_of(name)[:1], max_lead=12)
    waited_for = dict.fromkeys(names, 0)
    while min(waited_for.values()) < 12:
        proposal = draft.target.next(Proposal)
        waited_for[proposal.request_id] += len(proposal.ids)
    assert {name: joined(draft.of(name)) for name in names} == {name: text_of(name)[1:13] for name in names}


def test_of_several_answers_the_draft_reads_the_prompt_once(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, prefill, num_rows = Draft(stack), RecordingModel.prefill, list[int]()

    def counted(model: RecordingModel, prompt: Prompt, cache: KVCache, num: int, *rest: Any) -> Tensor | None:
        num_rows.append(num)
        return prefill(model, prompt, cache, num, *rest)

    monkeypatch.setattr(RecordingModel, "prefill", counted)
    asked = request("what", n=3)
    submit(draft.api.channel, asked)
    names = [asked.choice(index).request_id for index in range(3)]
    for name in names:
        draft.target.channel.send(Follow(request_id=name))
        draft.tell(name, 0, text_of("what")[:1], max_lead=4)
    while any(sum(len(proposal.ids) for proposal in draft.of(name)) < 4 for name in names):
        draft.target.next(Proposal)
    assert [joined(draft.of(name)) for name in names] == [text_of("what")[1:5]] * 3
    assert sum(num_rows) == draft.loop._active[names[0]].prompt.num_tokens
    told = [draft.of(name)[0].prepare_s > 0 for name in names]
    assert told == [True, False, False], "a copy takes no time, and the target would count on that"


def test_rows_of_the_targets_tower_come_with_the_videos_that_it_prepares(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, prepared, prepare = Draft(stack), list[Video](), RecordingModel.prepare

    def noted(model: RecordingModel, turns: Any, videos: Any, *rest: Any) -> Any:
        prepared.extend(videos)
        return prepare(model, turns, videos, *rest)

    monkeypatch.setattr(RecordingModel, "prepare", noted)
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    video = Video(frames=frames, source_indices=(0, 1), source_fps=1.0, source_num_frames=2, duration_s=2.0)
    rows = TowerOutput(placeholder_text="<video>", rows=np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    submit(draft.api.channel, request("a", videos=(video,)))
    memory = TowerMemory.of([rows])
    draft.target.channel.send(Follow(request_id="a"), (memory.descriptor,))
    draft.tell("a", 0, text_of("a")[:1], max_lead=2)
    draft.chain("a", 2)
    (seen,) = prepared
    assert seen.tower is not None
    assert (seen.tower.placeholder_text, seen.tower.rows.tolist()) == (rows.placeholder_text, rows.rows.tolist())


def test_a_loop_that_has_nothing_to_do_sleeps(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    class AsleepError(Exception):
        pass

    def sleep(*_: object) -> None:
        raise AsleepError

    _, theirs = map(stack.enter_context, map(closing, Channel.pair()))
    loop = DraftLoop(cast("VideoLM", RecordingModel()), theirs, configure("draft"))
    monkeypatch.setattr("vidspec_service.engine.worker.loop.wait_readable", sleep)
    monkeypatch.setattr(loop, "_beat", lambda: pytest.fail("it goes round and round"))
    with pytest.raises(AsleepError):
        loop.run()
