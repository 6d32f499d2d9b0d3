"""Several servers share a video store, in a folder or in an S3 bucket: each finds the videos of all others."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import NoReturn, Self

import obstore
import pytest

from tests.api.uploads import ALICE, BOB, VIDEOS, as_, other_clip, upload
from tests.api.world import CLIP_BYTES, World, until
from tests.fakes import FakeDecodePool
from vidspec_service.api.schemas.videos import Video
from vidspec_service.api.services import open_remotes
from vidspec_service.api.store import shared
from vidspec_service.api.store.local import MIN_VIDEO_BYTES
from vidspec_service.api.store.shared import SharedVideoStore
from vidspec_service.errors import CapacityError, ConfigError, VideoUnsupported
from vidspec_service.settings import Settings

pytestmark = [pytest.mark.api, pytest.mark.anyio]

TTL_S = 100.0
BUCKET = "clips"
FRAMES = "data:video/jpeg;base64,/9j/AAAA,/9j/AAAA"


class S3:
    """rclone's S3 server, which checks signatures; the folders in `buckets` are its buckets."""

    def __init__(self, buckets: Path) -> None:
        self.buckets = buckets
        self._at = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start the server; a restart uses the same address."""
        rclone = shutil.which("rclone", path=Path(sys.executable).parent)
        assert rclone is not None, "it comes with the extra `dev`"
        command = [rclone, "serve", "s3", str(self.buckets), f"--addr={self._at}", "--auth-key=some,body"]
        command.append("--config=")  # ignore the user's rclone settings
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        log = iter(self._process.stderr)
        self._at = next(found[1] for line in log if (found := re.search(r"\[http://(.*?)/?\]", line)))

    def kill(self) -> None:
        with self._process:
            self._process.kill()

    @property
    def address(self) -> str:
        return f"http://{self._at}"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    buckets = tmp_path_factory.mktemp("buckets")
    (buckets / BUCKET).mkdir()
    server = S3(buckets)
    yield server
    server.kill()


@pytest.fixture(params=["folder", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/shared"
    return str(request.getfixturevalue("bucket"))


@pytest.fixture
def bucket(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in the bucket for this test alone."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.address)
    for name, value in {"ACCESS_KEY_ID": "some", "SECRET_ACCESS_KEY": "body", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return f"s3://{BUCKET}/{tmp_path.name}"


class Servers:
    """Creates servers that share a store, each with its own folder."""

    def __init__(self, tmp_path: Path, url: str, ttl_s: float = TTL_S) -> None:
        self._root = tmp_path
        self._url = url
        self._ttl_s = ttl_s
        self._number = 0

    def another(self, **options: object) -> World:
        self._number += 1
        folder = self._root / f"server {self._number}"
        folder.mkdir()
        store = SharedVideoStore(self._url, self._ttl_s)
        return World(folder, store=store, video_ttl_s=self._ttl_s, **options)  # type: ignore[arg-type]


def facts_of(tmp_path: Path, video_id: str) -> Path:
    return tmp_path / "shared" / "anyone" / f"{video_id}.json"


def date_back(file: Path, seconds: float) -> float:
    """Returns the new time."""
    written = time.time() - seconds
    os.utime(file, (written, written))
    return written


def aged(tmp_path: Path, video_id: str, seconds: float) -> float:
    """Date the video's facts file back by `seconds`; returns the new time."""
    return date_back(facts_of(tmp_path, video_id), seconds)


async def test_any_server_answers_about_what_another_was_sent_and_after_that_is_gone(tmp_path: Path, url: str) -> None:
    servers = Servers(tmp_path, url)
    first, second = servers.another(), servers.another()
    kept = await upload(first)
    shutil.rmtree(first.upload_dir)  # the first server ends
    assert (await second.client.get(f"{VIDEOS}/{kept['id']}")).json() == kept
    assert second.leftovers == [], "only a question brings it"
    for _ in range(2):
        answer = await second.ask(video=None, video_id=kept["id"])
        assert (answer.status_code, answer.json()["video"]["id"]) == (200, kept["id"])
    (copy,) = second.leftovers
    assert copy.read_bytes() == CLIP_BYTES
    assert len(second.decoder.requests) == 1
    assert second.services.videos._shared is not None
    second.services.videos._shared.chunks = None  # type: ignore[method-assign,assignment]  # it comes once
    assert (await second.ask(video=None, video_id=kept["id"])).status_code == 200
    assert (second.admission.num_admitted, second.admission.num_bytes) == (0, 0)


async def test_the_list_is_the_same_everywhere_page_by_page(tmp_path: Path, url: str) -> None:
    servers = Servers(tmp_path, url)
    worlds = [servers.another(), servers.another()]
    ids = []
    for number in range(5):
        if number:
            await asyncio.sleep(1.1 if "s3:" in url else 0.01)  # S3 times are whole seconds
        ids.append((await upload(worlds[number % 2], other_clip(number)))["id"])
    for world in worlds:
        whole = (await world.client.get(VIDEOS)).json()
        assert [each["id"] for each in whole["data"]] == ids[::-1]
        page = (await world.client.get(VIDEOS, params={"limit": 2, "after": ids[3]})).json()
        assert [each["id"] for each in page["data"]] == [ids[2], ids[1]]
        assert page["has_more"]
    lost = await worlds[0].client.get(VIDEOS, params={"after": "video-0"})
    assert (lost.status_code, lost.json()["error"]["param"]) == (404, "after")


async def test_the_list_begins_with_what_was_used_last_not_with_what_was_uploaded_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = SharedVideoStore._objects

    async def as_s3_lists(store: SharedVideoStore, folder: str | None) -> AsyncIterator[tuple[str, str, datetime]]:
        for each in sorted([each async for each in objects(store, folder)]):
            yield each

    monkeypatch.setattr(SharedVideoStore, "_objects", as_s3_lists)
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    first, second = [(await upload(world, other_clip(number)))["id"] for number in range(2)]
    for video_id, used_s, uploaded_s in ((first, 10, 80), (second, 50, 40)):
        aged(tmp_path, video_id, used_s)
        date_back(facts_of(tmp_path, video_id).with_suffix(".video"), uploaded_s)
    assert [each["id"] for each in (await world.client.get(VIDEOS)).json()["data"]] == [first, second]


async def test_deleted_by_one_it_is_gone_for_all_with_its_frames(tmp_path: Path, url: str) -> None:
    servers = Servers(tmp_path, url)
    first, second, third = (servers.another() for _ in range(3))
    kept = await upload(first)
    await second.ask(video=None, video_id=kept["id"])
    gone = await third.client.delete(f"{VIDEOS}/{kept['id']}")
    assert gone.json() == {"id": kept["id"], "object": "video", "deleted": True}
    for world in (first, second, third):
        refused = await world.ask(video=None, video_id=kept["id"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "video_id")
        assert (await world.client.delete(f"{VIDEOS}/{kept['id']}")).status_code == 404
        assert (await world.client.get(VIDEOS)).json()["data"] == []
        assert world.leftovers == []
    again = await upload(first)
    assert again["id"] == kept["id"]
    assert len(first.decoder.requests) == 2
    await first.client.delete(f"{VIDEOS}/{kept['id']}")
    assert first.leftovers == []
    assert not facts_of(tmp_path, kept["id"]).parent.exists(), "an empty folder is no trace of a caller"


async def test_nobody_sees_uses_or_deletes_what_another_key_has_uploaded(tmp_path: Path, url: str) -> None:
    servers = Servers(tmp_path, url)
    first, second = servers.another(keys=[ALICE, BOB]), servers.another(keys=[ALICE, BOB])
    kept = await upload(first, headers=as_(ALICE))
    path = f"{VIDEOS}/{kept['id']}"
    asked = {"video_id": kept["id"], "prompt": "x"}
    for world in (first, second):
        assert (await world.client.get(VIDEOS, headers=as_(BOB))).json()["data"] == []
        assert (await world.client.get(VIDEOS, headers=as_(ALICE))).json()["data"] == [kept]
        assert (await world.client.get(path, headers=as_(BOB))).status_code == 404
        assert (await world.client.delete(path, headers=as_(BOB))).status_code == 404
        assert (await world.client.post("/v1/video-chat", json=asked, headers=as_(BOB))).status_code == 404
        assert (await world.client.post("/v1/video-chat", json=asked, headers=as_(ALICE))).status_code == 200


async def test_an_upload_of_what_is_kept_is_told_when_the_store_lets_it_expire(tmp_path: Path) -> None:
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    kept = await upload(servers.another())
    written = aged(tmp_path, kept["id"], 0.05 * TTL_S)
    assert (await upload(servers.another()))["expires_at"] == int(written + TTL_S)
    written = aged(tmp_path, kept["id"], 0.5 * TTL_S)
    assert (await upload(servers.another()))["expires_at"] > int(written + TTL_S), "it is a use"


async def test_what_the_store_has_lost_and_this_server_keeps_is_there_again_after_an_upload(tmp_path: Path) -> None:
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    first = servers.another()
    kept = await upload(first)
    shutil.rmtree(facts_of(tmp_path, kept["id"]).parent)
    await upload(first)
    assert (await servers.another().ask(video=None, video_id=kept["id"])).status_code == 200


async def test_an_upload_that_is_given_up_before_the_store_has_it_can_be_sent_again(tmp_path: Path) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    arrived = asyncio.Event()

    async def forever(*_: object) -> None:
        arrived.set()
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as waiting:
        waiting.setattr(SharedVideoStore, "put", forever)
        uploading = asyncio.create_task(world.client.post(VIDEOS, files=other_clip(1)))
        await arrived.wait()
        uploading.cancel()
        await asyncio.gather(uploading, return_exceptions=True)
    assert world.leftovers == []
    assert await upload(world, other_clip(1))


async def test_a_large_video_arrives_whole(tmp_path: Path, bucket: str) -> None:
    servers = Servers(tmp_path, bucket)
    large = CLIP_BYTES + os.urandom(12_000_000)  # more than fits one part of an S3 upload
    kept = await upload(servers.another(), {"video": ("x", large)})
    second = servers.another()
    assert (await second.ask(video=None, video_id=kept["id"])).status_code == 200
    (copy,) = second.leftovers
    assert copy.read_bytes() == large


@pytest.mark.parametrize("video_id", ["../check", "..%2F..%2Fetc", "video-0/../../x", "check", "video-", ".json"])
async def test_an_id_is_no_path(tmp_path: Path, video_id: str) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    (tmp_path / "shared" / "check").write_text("{}")
    refused = await world.ask(video=None, video_id=video_id)
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "video_id")


async def test_a_clients_own_frames_stay_what_they_are(tmp_path: Path, url: str) -> None:
    servers = Servers(tmp_path, url)
    first, second = servers.another(), servers.another()
    response = await first.client.post(VIDEOS, json={"video": FRAMES})
    assert response.status_code == 200, response.text
    assert (await second.ask(video=None, video_id=response.json()["id"])).status_code == 200
    asked_first, asked_second = first.decoder.requests[0], second.decoder.requests[0]
    assert asked_first.sequence is not None
    assert asked_second.sequence == asked_first.sequence


async def test_what_nobody_uses_expires_and_is_swept_a_use_begins_its_time_anew(tmp_path: Path) -> None:
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    first, second = servers.another(), servers.another()
    used = (await upload(first, other_clip(1)))["id"]
    unused = (await upload(first, other_clip(2)))["id"]
    for part in (0.3, 0.6, 0.9, 1.2):
        before = aged(tmp_path, used, 0.3 * TTL_S)
        aged(tmp_path, unused, part * TTL_S)
        assert (await second.ask(video=None, video_id=used)).status_code == 200
        assert facts_of(tmp_path, used).stat().st_mtime > before + 0.2 * TTL_S
    for video_id in (used, unused):
        date_back(facts_of(tmp_path, video_id).with_suffix(".video"), 1.2 * TTL_S)
    assert (await second.client.get(f"{VIDEOS}/{unused}")).status_code == 404
    assert (await second.ask(video=None, video_id=unused)).status_code == 404
    assert [each["id"] for each in (await first.client.get(VIDEOS)).json()["data"]] == [used]
    await second.services.videos.sweep()
    assert sorted(path.name for path in (tmp_path / "shared" / "anyone").iterdir()) == [f"{used}.json", f"{used}.video"]


@pytest.mark.parametrize(("age", "is_renewed"), [(0.05, False), (0.2, True)])
async def test_not_every_use_is_written_down_but_the_first_after_a_tenth_of_the_time(
    tmp_path: Path, age: float, is_renewed: bool
) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared", ttl_s=10_000).another()
    kept = await upload(world)
    before = aged(tmp_path, kept["id"], age * 10_000)
    assert (await world.ask(video=None, video_id=kept["id"])).status_code == 200
    assert (facts_of(tmp_path, kept["id"]).stat().st_mtime > before + 1) is is_renewed


async def test_after_the_last_that_has_not_expired_there_are_no_more(tmp_path: Path) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    kept, expired = await upload(world, other_clip(1)), await upload(world, other_clip(2))
    aged(tmp_path, expired["id"], TTL_S + 1)
    page = (await world.client.get(VIDEOS, params={"limit": 1})).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([kept["id"]], False)


async def test_no_page_is_empty_before_the_end(tmp_path: Path) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    kept, unreadable = await upload(world, other_clip(1)), await upload(world, other_clip(2))
    facts_of(tmp_path, unreadable["id"]).write_text("facts of another version")
    page = (await world.client.get(VIDEOS, params={"limit": 1})).json()
    assert ([each["id"] for each in page["data"]], page["last_id"]) == ([kept["id"]], kept["id"])


async def test_a_sweep_takes_bytes_without_facts_and_nothing_of_anybody_elses(tmp_path: Path) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    await upload(world)
    folder = tmp_path / "shared" / "anyone"
    for name in ("video-0a.video", "video-0b.video#1", "video-0c.json#2", "video-0f.json"):
        (folder / name).write_bytes(b"its server was killed")
    others = [tmp_path / "shared" / "settings.json", folder / "notes.json", folder / "video-1.txt#1"]
    for other in others:
        other.write_text("{}")
    for path in (tmp_path / "shared").rglob("*"):
        date_back(path, 1.2 * TTL_S)
    (folder / "video-01.video#1").symlink_to("what another server has just deleted")
    others.append(folder / "video-0d.video#1")
    others[-1].write_bytes(b"its server is still writing")
    others.append(folder / "video-0e.json")
    others[-1].write_bytes(b"another server may have found it at its end")
    date_back(others[-1], 1.05 * TTL_S)
    await world.services.videos.sweep()
    assert sorted(path for path in (tmp_path / "shared").rglob("*") if path.is_file()) == sorted(others)


async def test_a_video_that_is_uploaded_again_during_a_sweep_is_kept(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(tmp_path, url, ttl_s=2.0)
    sweeper, other = servers.another(), servers.another()
    clips = [other_clip(number) for number in range(2)]
    for clip in clips:
        await upload(sweeper, clip)
    await asyncio.sleep(2.5)
    delete, again = SharedVideoStore._delete_objects, set[str]()

    async def slowly(store: SharedVideoStore, *names: str) -> None:
        if not again:
            again.update([(await upload(other, clip))["id"] for clip in clips])
        await delete(store, *names)
        again.difference_update(name.rpartition("/")[2].removesuffix(".json") for name in names)  # now it is too late

    monkeypatch.setattr(SharedVideoStore, "_delete_objects", slowly)
    await sweeper.services.videos.sweep()
    [kept] = again
    assert (await other.ask(video=None, video_id=kept)).status_code == 200


async def test_a_video_that_is_deleted_by_one_while_another_uses_it_stays_deleted(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts that were written again after the bytes were gone were listed until they expired."""
    servers = Servers(tmp_path, url)
    user, other = servers.another(), servers.another()
    kept = await upload(user)
    write = SharedVideoStore._write

    async def too_late(store: SharedVideoStore, caller: str, entry: shared.Entry) -> None:
        assert (await other.client.delete(f"{VIDEOS}/{kept['id']}")).status_code == 200
        await write(store, caller, entry)

    monkeypatch.setattr(SharedVideoStore, "_write", too_late)
    monkeypatch.setattr(shared, "_RENEWED_AFTER", -1.0)  # every use is written down
    await user.ask(video=None, video_id=kept["id"])
    assert [(await world.client.get(VIDEOS)).json()["data"] for world in (user, other)] == [[], []]


async def test_facts_that_a_use_writes_during_a_deletion_are_deleted_too(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(tmp_path, url)
    user, other = servers.another(), servers.another()
    kept = await upload(user)
    delete, deleted = SharedVideoStore._delete_objects, list[str]()

    async def slowly(store: SharedVideoStore, *names: str) -> None:
        for name in names:
            await delete(store, name)
            if not deleted:  # the facts are gone, the bytes are not
                entry = shared.Entry(facts=Video.model_validate(kept))
                await store._write("", entry)
            deleted.append(name)

    monkeypatch.setattr(SharedVideoStore, "_delete_objects", slowly)
    assert (await other.client.delete(f"{VIDEOS}/{kept['id']}")).status_code == 200
    assert (await user.client.get(VIDEOS)).json()["data"] == []


class Clock(datetime):
    """`ahead_s` before the store's."""

    ahead_s = 0.0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + timedelta(seconds=cls.ahead_s)


@pytest.mark.parametrize("part", [0.2, -0.2])
async def test_a_server_whose_clock_is_far_from_the_stores_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    store = SharedVideoStore(f"file://{tmp_path}/shared", TTL_S)
    monkeypatch.setattr(shared, "datetime", Clock)
    for near in (0.0, part / 4):  # by far less than that, clocks often differ
        monkeypatch.setattr(Clock, "ahead_s", near * TTL_S)
        await store.check()
    monkeypatch.setattr(Clock, "ahead_s", part * TTL_S)
    with pytest.raises(ConfigError, match="clocks of the video store"):
        await store.check()


async def test_servers_may_start_at_the_same_time(tmp_path: Path) -> None:
    stores = [SharedVideoStore(f"file://{tmp_path}/shared", TTL_S) for _ in range(20)]
    await asyncio.gather(*(store.check() for store in stores))
    assert not [path for path in (tmp_path / "shared").iterdir() if path.is_file()]


async def test_an_upload_that_the_store_refuses_is_kept_nowhere_even_if_it_had_to_make_room(tmp_path: Path) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another(max_stored_bytes=MIN_VIDEO_BYTES)
    shared = world.services.videos._shared
    assert shared is not None
    put, arrived, go_on = shared.put, asyncio.Event(), asyncio.Event()

    async def fail_late(*_: object) -> None:
        shared.put = put  # type: ignore[method-assign]
        arrived.set()
        await go_on.wait()
        raise CapacityError("The video store does not answer at the moment; try again.")

    shared.put = fail_late  # type: ignore[method-assign,assignment]
    first = asyncio.create_task(world.client.post(VIDEOS, files=other_clip(1)))
    await arrived.wait()
    await upload(world, other_clip(2))  # evicts the first video
    go_on.set()
    assert (await first).status_code == 503
    assert len(world.leftovers) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(), "OSError"),
        (
            OSError("HTTP 403: <?xml?>\n<Code>AccessDenied</Code>\n\nDebug source:\nGeneric {}"),
            "HTTP 403: <?xml?> <Code>AccessDenied</Code>",
        ),
        (OSError("a page " * 1000), ("a page " * 1000)[:500]),
    ],
)
async def test_what_the_store_says_is_a_line_in_the_log_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError, reason: str
) -> None:
    async def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr("obstore.get_async", fail)
    with pytest.raises(CapacityError):
        await SharedVideoStore(f"file://{tmp_path}/shared", TTL_S).find("", "video-0")
    assert [vars(record)["reason"] for record in caplog.records] == [reason]


async def test_a_store_that_is_full_costs_a_503_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object) -> NoReturn:
        raise OSError("No space left on device")

    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    with monkeypatch.context() as full:
        full.setattr("obstore.put_async", refuse)
        assert (await world.client.post(VIDEOS, files=other_clip(1))).status_code == 503
    (warning,) = (record for record in caplog.records if record.message == "the video store does not answer")
    assert vars(warning)["reason"] == "No space left on device"
    assert world.leftovers == []
    assert await upload(world, other_clip(1))


async def test_facts_of_another_version_are_not_read_until_the_video_is_uploaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    kept = await upload(world)
    facts_of(tmp_path, kept["id"]).write_text('{"codec": "h264"}')
    lost = await world.ask(video=None, video_id=kept["id"])
    assert (lost.status_code, lost.json()["error"]["param"]) == (404, "video_id")
    (warning,) = (record for record in caplog.records if record.message == "a kept video's facts cannot be read")
    assert vars(warning)["video_id"] == kept["id"]
    assert (await upload(world))["id"] == kept["id"]
    assert (await world.ask(video=None, video_id=kept["id"])).status_code == 200


async def test_a_server_with_little_room_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    kept = await upload(servers.another())
    small = servers.another(max_stored_bytes=MIN_VIDEO_BYTES - 1)
    for response in (
        await small.ask(video=None, video_id=kept["id"]),
        await small.client.post(VIDEOS, files=other_clip(1)),
    ):
        assert response.status_code == 413, response.text
        assert "VIDSPEC_MAX_STORED_BYTES" in response.json()["error"]["message"]
    assert small.leftovers == []
    assert len(list((tmp_path / "shared" / "anyone").iterdir())) == 2


async def test_a_store_that_is_away_costs_a_503_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    world = servers.another()
    kept = await upload(world)
    (tmp_path / "shared").rename(tmp_path / "elsewhere")
    (tmp_path / "shared").write_text("no folder")
    asked = [
        await world.ask(video=None, video_id=kept["id"]),
        await world.client.get(VIDEOS),
        await world.client.delete(f"{VIDEOS}/{kept['id']}"),
        await world.client.post(VIDEOS, files=other_clip(1)),
    ]
    assert {response.status_code for response in asked} == {503}
    assert all("try again" in response.json()["error"]["message"] for response in asked)
    assert (await world.ask()).status_code == 200
    (tmp_path / "shared").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "shared")
    assert (await world.ask(video=None, video_id=kept["id"])).status_code == 200
    assert await upload(world, other_clip(1))  # what the store did not take before
    assert (world.admission.num_admitted, world.admission.num_bytes) == (0, 0)


async def test_an_s3_server_that_is_killed_costs_a_503_and_after_it_is_back_all_is_there(
    tmp_path: Path, bucket: str, s3: S3
) -> None:
    world = Servers(tmp_path, bucket).another()
    kept = await upload(world)
    s3.kill()
    try:
        refused = await world.ask(video=None, video_id=kept["id"])
        assert (refused.status_code, "try again" in refused.json()["error"]["message"]) == (503, True)
        await world.services.videos.sweep()  # logs the failure and raises nothing
    finally:
        s3.start()
    assert (await world.ask(video=None, video_id=kept["id"])).status_code == 200


async def test_an_s3_server_that_does_not_know_the_key_is_told_at_the_start(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nobody")
    with pytest.raises(ConfigError, match=r"does not work.*SignatureDoesNotMatch.*check AWS_ACCESS_KEY_ID"):
        await SharedVideoStore(bucket, TTL_S).check()


async def test_a_key_that_may_not_list_the_videos_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError("may not list")

    monkeypatch.setattr("obstore.list", refuse)
    with pytest.raises(ConfigError, match=r"the video store does not work: may not list\Z"):
        async with open_remotes(Settings(video_store=f"file://{tmp_path}/shared")):
            pass
    assert list((tmp_path / "shared").iterdir()) == [], "each of a restarted server's starts would leave something"


async def test_without_its_package_what_to_install_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'vidspec\[store\]'"):
        SharedVideoStore(f"s3://{BUCKET}", TTL_S)


async def test_bytes_that_somebody_deleted_are_a_404_until_they_are_uploaded_again(tmp_path: Path) -> None:
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    kept = await upload(servers.another())
    (tmp_path / "shared" / "anyone" / f"{kept['id']}.video").unlink()
    second = servers.another()
    lost = await second.ask(video=None, video_id=kept["id"])
    assert (lost.status_code, lost.json()["error"]["param"]) == (404, "video_id")
    await upload(second)
    assert (await servers.another().ask(video=None, video_id=kept["id"])).status_code == 200


@pytest.mark.parametrize("damaged", [b"", CLIP_BYTES[:-5], bytes(len(CLIP_BYTES))], ids=["empty", "cut", "zeros"])
async def test_bytes_that_are_damaged_in_the_store_are_a_404_until_they_are_uploaded_again(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """After a loss of power. An upload did not replace them, and renewed their lifetime."""
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    kept = await upload(servers.another())
    facts_of(tmp_path, kept["id"]).with_suffix(".video").write_bytes(damaged)
    second = servers.another()
    lost = await second.ask(video=None, video_id=kept["id"])
    assert (lost.status_code, lost.json()["error"]["param"]) == (404, "video_id")
    (warning,) = (record for record in caplog.records if "damaged" in record.message)
    assert vars(warning)["video_id"] == kept["id"]
    assert (await second.client.get(VIDEOS)).json()["data"] == []
    assert second.leftovers == []
    await upload(second)
    assert (await servers.another().ask(video=None, video_id=kept["id"])).status_code == 200


async def test_a_video_whose_format_only_another_version_knows_stays_for_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While servers are updated one after the other, an older one deleted it for all."""
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    newer, older = servers.another(), servers.another()
    kept = await upload(newer)

    def knows_nothing(head: bytes, *, is_still: bool) -> NoReturn:
        raise VideoUnsupported("The file is unknown.", param="video")

    with monkeypatch.context() as before:
        before.setattr("vidspec_service.api.uploads.upload.check_signature", knows_nothing)
        refused = await older.ask(video=None, video_id=kept["id"])
    assert (refused.status_code, refused.json()["error"]["message"]) == (415, "The file is unknown.")
    assert older.leftovers == []
    assert (await servers.another().ask(video=None, video_id=kept["id"])).status_code == 200


async def test_one_that_may_not_be_deleted_keeps_no_other_from_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = Servers(tmp_path, f"file://{tmp_path}/shared").another()
    kept = [(await upload(world, other_clip(number)))["id"] for number in range(3)]
    for path in (tmp_path / "shared" / "anyone").iterdir():
        date_back(path, 1.2 * TTL_S)
    delete = obstore.delete_async

    async def refuse_one(store: object, name: str) -> None:
        if kept[1] in name:
            raise PermissionError(f"{name} is locked")
        await delete(store, name)  # type: ignore[arg-type]

    monkeypatch.setattr("obstore.delete_async", refuse_one)
    await world.services.videos.sweep()
    assert {path.stem for path in (tmp_path / "shared" / "anyone").iterdir()} == {kept[1]}
    assert any(kept[1] in vars(record).get("reason", "") for record in caplog.records)


async def test_a_video_is_used_though_the_store_cannot_write_that_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk took all kept videos away."""

    async def refuse(*_: object) -> NoReturn:
        raise OSError("No space left on device")

    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    kept = await upload(servers.another())
    aged(tmp_path, kept["id"], 0.5 * TTL_S)
    monkeypatch.setattr("obstore.put_async", refuse)
    assert (await servers.another().ask(video=None, video_id=kept["id"])).status_code == 200
    assert "No space left on device" in {vars(record).get("reason") for record in caplog.records}


async def test_what_cannot_work_is_told_at_the_start_and_silence_soon(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await SharedVideoStore(bucket, 0.1).check()  # whose times are whole seconds
    for nowhere in ("gopher://x", "a/folder", "file:///dev/null/a", "memory:///"):
        with pytest.raises(ConfigError, match=rf"video_store {nowhere}: .+\Z"):  # one line
            SharedVideoStore(nowhere, TTL_S)
    with pytest.raises(ConfigError, match="does not work"):
        await SharedVideoStore("s3://no-such-bucket", TTL_S).check()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("vidspec_service.api.store.shared._TIMEOUT_S", 0.2)
        store = SharedVideoStore(bucket, TTL_S)
        with pytest.raises(ConfigError, match=r"does not work: no answer within 0.2 s; check AWS_ACCESS_KEY_ID"):
            await store.check()
        with pytest.raises(CapacityError, match="does not answer"):
            await store.find("", "video-0")


@pytest.mark.parametrize("mark", ["?", "#"])
def test_an_address_is_not_cut_off_where_a_url_would_have_a_query(tmp_path: Path, mark: str) -> None:
    """Two stores whose names differ after that were one."""
    with pytest.raises(ConfigError, match=f"as %{ord(mark):X}"):
        SharedVideoStore(f"file://{tmp_path}/shared{mark}1", TTL_S)
    SharedVideoStore(f"file://{tmp_path}/shared%{ord(mark):X}1", TTL_S)
    assert [path.name for path in tmp_path.iterdir()] == [f"shared{mark}1"]


async def test_the_scheme_of_a_folder_may_be_written_in_capitals(tmp_path: Path) -> None:
    await SharedVideoStore(f"FILE://{tmp_path}/shared", TTL_S).check()


async def test_an_endpoint_that_is_no_url_is_told_with_the_variables_to_check(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library panics."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    with pytest.raises(ConfigError, match=r"does not work.*AWS_ENDPOINT_URL"):
        await SharedVideoStore(bucket, TTL_S).check()


async def test_a_question_that_is_given_up_while_the_video_comes_leaves_nothing(tmp_path: Path) -> None:
    servers = Servers(tmp_path, f"file://{tmp_path}/shared")
    kept = await upload(servers.another())
    world = servers.another(decoder=FakeDecodePool())

    async def forever(caller: str, video_id: str) -> object:
        yield CLIP_BYTES.ljust(10_000)
        await asyncio.Event().wait()

    shared = world.services.videos._shared
    assert shared is not None
    shared.chunks = forever  # type: ignore[method-assign,assignment]
    asking = asyncio.create_task(world.ask(video=None, video_id=kept["id"]))
    await until(lambda: world.admission.num_bytes > 10_000)  # they count as if they had been sent
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert world.leftovers == []
    assert (world.admission.num_admitted, world.admission.num_bytes) == (0, 0)
