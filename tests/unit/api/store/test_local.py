"""Kept videos against a simple model: what counts as a use, what is evicted first, when files are deleted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vidspec_service.api.schemas.fields import VideoFile
from vidspec_service.api.schemas.videos import Video
from vidspec_service.api.store.local import MIN_VIDEO_BYTES, LocalVideoStore
from vidspec_service.errors import NotFound, VideoTooLarge

BUDGET, TTL = 10 * MIN_VIDEO_BYTES, 10.0
CALLER = "alice"
IDS = st.sampled_from("abcdef")


class StoredFile:
    """A fake path that is not on disk."""

    is_there = True

    def exists(self) -> bool:
        return self.is_there

    def unlink(self, missing_ok: bool = False) -> None:
        self.is_there = False


@dataclass
class Entry:
    """The model's record of a kept video."""

    video_id: str
    num_bytes: int
    path: StoredFile
    expires_at: float


def facts_of(video_id: str) -> Video:
    return Video.model_construct(id=video_id, expires_at=0)


class VideosMachine(RuleBasedStateMachine):
    """The model is a list in order of use; a file exists exactly as long as its entry exists or is being read."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.model: list[Entry] = []
        self.paths: list[StoredFile] = []
        self.forgotten: list[tuple[str, str]] = []
        self.videos = LocalVideoStore(BUDGET, TTL, lambda *key: self.forgotten.append(key), lambda: self.now)

    def kept(self, video_id: str) -> Entry | None:
        """The model's entry; drops expired entries."""
        self.model = [entry for entry in self.model if entry.expires_at > self.now]
        return next((entry for entry in self.model if entry.video_id == video_id), None)

    def used(self, entry: Entry) -> None:
        entry.expires_at = self.now + TTL
        self.model.remove(entry)
        self.model.append(entry)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(video_id=IDS, size=st.integers(0, 12))
    def keep(self, video_id: str, size: int) -> None:
        path, num_bytes = StoredFile(), max(1, size) * MIN_VIDEO_BYTES
        self.paths.append(path)
        file = VideoFile(cast(Any, path), size * MIN_VIDEO_BYTES, video_id)
        entry = self.kept(video_id)
        if entry is None and num_bytes > BUDGET:
            with pytest.raises(VideoTooLarge):
                self.videos.keep(CALLER, file, facts_of(video_id))
            assert path.is_there  # still owned by the caller
            path.unlink()
            return
        told = self.videos.keep(CALLER, file, facts_of(video_id))
        assert told.expires_at == int(self.now + TTL)
        if entry is not None:
            self.used(entry)
            return
        while sum(each.num_bytes for each in self.model) + num_bytes > BUDGET:
            del self.model[0]
        self.model.append(Entry(video_id, num_bytes, path, self.now + TTL))

    @rule(video_id=IDS)
    def read(self, video_id: str) -> None:
        entry = self.kept(video_id)
        if entry is None:
            with pytest.raises(NotFound), self.videos.reading(CALLER, video_id):
                pass
            return
        with self.videos.reading(CALLER, video_id) as file:
            self.used(entry)
            assert file.path is cast(Any, entry.path)

    @rule(video_id=IDS)
    def look(self, video_id: str) -> None:
        """A look does not count as a use, so the model is unchanged."""
        entry = self.kept(video_id)
        found = self.videos.find(CALLER, video_id)
        assert (found and found.expires_at) == (entry and int(entry.expires_at))

    @rule(video_id=IDS)
    def drop(self, video_id: str) -> None:
        entry = self.kept(video_id)
        if entry is None:
            with pytest.raises(NotFound):
                self.videos.delete(CALLER, video_id)
        else:
            self.videos.delete(CALLER, video_id)
            self.model.remove(entry)
        assert self.forgotten[-1] == (CALLER, video_id)

    @rule(video_id=IDS)
    def drop_while_it_is_read(self, video_id: str) -> None:
        entry = self.kept(video_id)
        if entry is None:
            return
        with self.videos.reading(CALLER, video_id):
            self.videos.delete(CALLER, video_id)
            assert entry.path.is_there
            self.forgotten.clear()
        assert self.forgotten == [(CALLER, video_id)]  # frames decoded meanwhile are forgotten, too
        self.model.remove(entry)

    @invariant()
    def is_as_the_model(self) -> None:
        self.kept("")
        self.videos.expire()
        assert self.videos.ids(CALLER) == [entry.video_id for entry in self.model[::-1]]
        assert self.videos.usage == (len(self.model), sum(entry.num_bytes for entry in self.model))
        there = [path for path in self.paths if path.is_there]
        assert sorted(map(id, there)) == sorted(id(entry.path) for entry in self.model)
        assert self.videos.ids("bob") == []


TestVideos = VideosMachine.TestCase


def test_looking_at_a_video_does_not_save_it_from_being_the_next_to_go() -> None:
    videos = LocalVideoStore(2 * MIN_VIDEO_BYTES, TTL, lambda *_: None, lambda: 0.0)
    for video_id in "ab":
        videos.keep(CALLER, VideoFile(cast(Any, StoredFile()), 1, video_id), facts_of(video_id))
    assert videos.find(CALLER, "a") == facts_of("a").model_copy(update={"expires_at": int(TTL)})
    videos.keep(CALLER, VideoFile(cast(Any, StoredFile()), 1, "c"), facts_of("c"))
    assert videos.ids(CALLER) == ["c", "b"]


def test_who_has_the_most_makes_room_whoever_uploads() -> None:
    """One key that kept on uploading had all videos of the others deleted."""
    videos = LocalVideoStore(4 * MIN_VIDEO_BYTES, TTL, lambda *_: None, lambda: 0.0)

    def keep(caller: str, video_ids: str, size: int = 1) -> list[list[str]]:
        for video_id in video_ids:
            file = VideoFile(cast(Any, StoredFile()), size * MIN_VIDEO_BYTES, video_id)
            videos.keep(caller, file, facts_of(video_id))
        return [videos.ids(each) for each in ("alice", "bob")]

    assert keep("alice", "a") == [["a"], []]
    assert keep("bob", "abcdef") == [["a"], ["f", "e", "d"]]
    assert keep("alice", "b") == [["b", "a"], ["f", "e"]]
    assert keep("alice", "c") == [["c", "b"], ["f", "e"]], "with this one alice would have the most"
    assert keep("alice", "d", size=4) == [["d"], []]
    assert videos.usage == (1, 4 * MIN_VIDEO_BYTES)


def kept_until_now() -> LocalVideoStore:
    """Its only video expires at this moment."""
    now = [0.0]
    videos = LocalVideoStore(BUDGET, TTL, lambda *_: None, lambda: now[0])
    videos.keep(CALLER, VideoFile(cast(Any, StoredFile()), 1, "a"), facts_of("a"))
    now[0] = TTL
    return videos


def test_a_video_is_gone_at_the_moment_it_expires_whoever_looks_first() -> None:
    assert kept_until_now().find(CALLER, "a") is None
    assert kept_until_now().ids(CALLER) == []
    with pytest.raises(NotFound):
        kept_until_now().delete(CALLER, "a")
    with pytest.raises(NotFound), kept_until_now().reading(CALLER, "a"):
        pass


def test_a_video_whose_file_somebody_has_cleared_away_is_there_again_after_an_upload(tmp_path: Path) -> None:
    """Questions about it got a 422, and an upload of the same bytes was taken for another use of the lost ones."""
    videos = LocalVideoStore(BUDGET, TTL, lambda *_: None)
    for name in ("first", "again"):
        (tmp_path / name).touch()
        videos.keep(CALLER, VideoFile(tmp_path / name, 1, "a"), facts_of("a"))
        with videos.reading(CALLER, "a") as file:
            assert file.path.exists()
        (tmp_path / name).unlink()
    assert videos.find(CALLER, "a") is None
    with pytest.raises(NotFound), videos.reading(CALLER, "a"):
        pass
    assert videos.usage == (0, 0)


def test_a_video_whose_file_somebody_has_cleared_away_can_still_be_deleted(tmp_path: Path) -> None:
    videos = LocalVideoStore(BUDGET, TTL, lambda *_: None)
    videos.keep(CALLER, VideoFile(tmp_path / "gone", 1, "a"), facts_of("a"))
    videos.delete(CALLER, "a")
    assert videos.usage == (0, 0)
