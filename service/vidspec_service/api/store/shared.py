"""SharedVideoStore: kept videos in a folder or a bucket that several servers share, and that outlives them."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from vidspec_service.api.schemas.fields import VideoFile
from vidspec_service.api.schemas.videos import Video
from vidspec_service.api.store.local import no_such_video
from vidspec_service.decoding.clip import FrameSequence
from vidspec_service.errors import CapacityError, ConfigError

_TIMEOUT_S = 15.0  # until the store answers, or sends the next part of an answer
# A large video comes in one answer, hence the long timeout. Plain http is used only if the operator's endpoint has it.
_CLIENT: Any = {"connect_timeout": "5s", "timeout": "300s", "allow_http": True}
_RETRY: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
_S3_HINT = "; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
_MAX_REASON = 500  # characters: an answer may be a page
_CHUNK_BYTES = 1024 * 1024
_RENEWED_AFTER = 0.1  # of `ttl_s`: a write for every question would cost more than it is worth
_DELETED_AFTER = 1.1  # of `ttl_s`: so no server deletes a video that another has just found
_CLOCK_ROUNDING = timedelta(seconds=2)  # what stores may round their times to
_VIDEO_ID = re.compile(r"video-[0-9a-f]{1,58}")  # cannot be a path
_OBJECT = re.compile(rf"([^/]+/{_VIDEO_ID.pattern})\.(json|video)")
_UNFINISHED = re.compile(rf"{_OBJECT.pattern}#\d+")  # in a folder, until an object is complete

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """All that is known of a kept video without its bytes."""

    facts: Video
    sequence: FrameSequence | None = None


_ENTRY = TypeAdapter(Entry)


class SharedVideoStore:
    """A video is two objects: `<caller>/<id>.video`, and `<caller>/<id>.json`, which is written last and deleted first.

    It expires `ttl_s` after its `.json` was written, by the store's clock; a use writes the `.json` again.
    Every method raises CapacityError where the store does not answer.
    """

    def __init__(self, url: str, ttl_s: float) -> None:
        """`url` is a folder, `file:///...`, or a bucket, `s3://bucket/prefix`, with AWS's own variables.

        Raises ConfigError where the library is not installed or does not know such an address.
        """
        if "?" in url or "#" in url:  # the library would leave out the rest
            raise ConfigError(f"video_store {url}: write ? as %3F and # as %23")
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import LocalStore, MemoryStore, S3Store, from_url
        except ImportError as error:
            raise ConfigError("a shared video store needs one more package: pip install 'vidspec[store]'") from error
        try:
            self._store = (
                from_url(url, mkdir=True, automatic_cleanup=True)
                if url[:5].lower() == "file:"
                else from_url(url, client_options=_CLIENT, retry_config=_RETRY)
            )
        except (BaseError, ValueError, OSError) as error:
            raise ConfigError(f"video_store {url}: {_reason(error)}") from error
        if isinstance(self._store, MemoryStore):
            raise ConfigError(f"video_store {url}: no other server would see it; name a folder or a bucket")
        self._folder = self._store.prefix if isinstance(self._store, LocalStore) else None
        self._is_s3 = isinstance(self._store, S3Store)
        self._api = obstore
        self._failures = (BaseError, OSError)
        self._ttl = timedelta(seconds=ttl_s)

    async def check(self) -> None:
        """Raises ConfigError unless the store can be listed, written and read, and its clock is right.

        Called before anybody relies on it.
        """
        began = datetime.now(UTC)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                name = f"check-{secrets.token_hex(8)}"  # others may start at the same time
                await self._api.put_async(self._store, name, b"vidspec")
                written = (await self._api.get_async(self._store, name)).meta["last_modified"]
                ended = datetime.now(UTC)
                await self._api.delete_async(self._store, name)
                await anext(aiter(self._api.list(self._store)), None)
        except Exception as error:  # for an endpoint that is no URL, the library panics
            hint = _S3_HINT if self._is_s3 else ""
            raise ConfigError(f"the video store does not work: {_reason(error)}{hint}") from error
        # A server whose clock is ahead would find, and delete for all servers, videos that have not expired.
        most = max(self._ttl * (_DELETED_AFTER - 1), _CLOCK_ROUNDING)
        if not began - most < written < ended + most:
            raise ConfigError(
                f"the clocks of the video store ({written}) and of this machine ({ended}) differ too much"
            )

    async def put(self, caller: str, file: VideoFile, facts: Video) -> None:
        """Copy a video to the store; if the store has it already, its lifetime starts again."""
        name = _name(caller, facts.id, "video")
        is_known = await self.use(caller, facts.id) is not None
        if is_known and await self._if_exists(self._api.head_async(self._store, name)) is not None:
            return
        with self._store_errors():
            await self._api.put_async(self._store, name, file.path)  # may take longer than _TIMEOUT_S
        await self._write(caller, Entry(facts=facts, sequence=file.sequence))

    async def use(self, caller: str, video_id: str) -> Entry | None:
        """What is known of a video, whose lifetime starts again; None if there is none or it has expired."""
        entry = await self.find(caller, video_id)
        if entry is None:
            return None
        left = datetime.fromtimestamp(entry.facts.expires_at, UTC) - datetime.now(UTC)
        if left < self._ttl * (1 - _RENEWED_AFTER):
            with suppress(CapacityError):  # it is logged; a store that is full, for one, still has the video
                await self._write(caller, entry)
        return entry

    async def find(self, caller: str, video_id: str) -> Entry | None:
        """What is known of a video, as in `use`, but this does not count as a use."""
        if _VIDEO_ID.fullmatch(video_id) is None:
            return None
        found = await self._if_exists(self._api.get_async(self._store, _name(caller, video_id, "json")))
        if found is None:
            return None
        text = bytes(await self._within_timeout(found.bytes_async()))
        try:
            entry = _ENTRY.validate_json(text)
        except ValidationError:  # written by another version
            _log.warning("a kept video's facts cannot be read", extra={"video_id": video_id})
            return None
        expires_at = found.meta["last_modified"] + self._ttl
        if expires_at < datetime.now(UTC):
            return None
        facts = entry.facts.model_copy(update={"expires_at": int(expires_at.timestamp())})
        return replace(entry, facts=facts)

    async def chunks(self, caller: str, video_id: str) -> AsyncIterator[bytes]:
        """The video's bytes; raises NotFound if somebody has deleted them but not the `.json`."""
        found = await self._if_exists(self._api.get_async(self._store, _name(caller, video_id, "video")))
        if found is None:
            raise no_such_video()
        async for chunk in self._each(found.stream(min_chunk_size=_CHUNK_BYTES)):
            yield bytes(chunk)

    async def ids(self, caller: str) -> list[str]:
        """A caller's videos, the most recently used first."""
        objects = [each async for each in self._objects(caller or "anyone")]
        since = datetime.now(UTC) - self._ttl
        used = {name: written for name, kind, written in objects if kind == "json" and written > since}
        return [name.rpartition("/")[2] for name in sorted(used, key=used.__getitem__, reverse=True)]

    async def delete(self, caller: str, video_id: str) -> None:
        """Delete a video, if it is there."""
        facts, video = (_name(caller, video_id, kind) for kind in ("json", "video"))
        await self._delete_objects(facts, video, facts)  # a use that found the facts before may have written them again

    async def sweep(self) -> None:
        """Delete expired videos of all servers, and bytes whose server was killed before it wrote the `.json`.

        Several servers may do so at once. Objects that are not named like a video of ours stay.
        """
        newest: dict[str, datetime] = {}
        async for name, _, written in self._objects(None):
            newest[name] = max(written, newest.get(name, written))
        until = datetime.now(UTC) - self._ttl * _DELETED_AFTER
        for name in [name for name, written in newest.items() if written < until]:
            # There may be many: since they were listed, somebody may have uploaded this one again.
            again = await self._if_exists(self._api.head_async(self._store, f"{name}.video"))
            if again is None or again["last_modified"] < until:
                with suppress(CapacityError):  # it is logged; one that may not be deleted must not keep all others
                    await self._delete_objects(f"{name}.json", f"{name}.video")
        if self._folder is not None:
            await self._within_timeout(asyncio.to_thread(_delete_unfinished, self._folder, until.timestamp()))

    async def _write(self, caller: str, entry: Entry) -> None:
        """Write the facts; they go again if somebody has deleted the video since it was found."""
        facts, video = (_name(caller, entry.facts.id, kind) for kind in ("json", "video"))
        await self._within_timeout(self._api.put_async(self._store, facts, _ENTRY.dump_json(entry)))
        if await self._if_exists(self._api.head_async(self._store, video)) is None:
            await self._delete_objects(facts)

    async def _delete_objects(self, *names: str) -> None:
        for name in names:
            # Another server may have deleted it already; object stores do not even report that.
            await self._if_exists(self._api.delete_async(self._store, name))

    async def _objects(self, folder: str | None) -> AsyncIterator[tuple[str, str, datetime]]:
        """Both objects of every video in `folder`: their common name, which of the two, and when it was written."""
        async for batch in self._each(self._api.list(self._store, folder)):
            for each in batch:
                if (found := _OBJECT.fullmatch(each["path"])) is not None:
                    yield found[1], found[2], each["last_modified"]

    async def _each(self, pieces: AsyncIterable[Any]) -> AsyncIterator[Any]:
        iterator = aiter(pieces)
        while (piece := await self._within_timeout(anext(iterator, None))) is not None:
            yield piece

    async def _if_exists(self, call: Awaitable[T]) -> T | None:
        """The store's answer; None if there is no such object."""

        async def said() -> T | None:
            try:
                return await call
            except FileNotFoundError:
                return None

        return await self._within_timeout(said())

    async def _within_timeout(self, call: Awaitable[T]) -> T:
        """The store's answer; raises CapacityError if there is none within _TIMEOUT_S."""
        with self._store_errors():
            async with asyncio.timeout(_TIMEOUT_S):
                return await call

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            _log.warning("the video store does not answer", extra={"reason": _reason(error)})
            raise CapacityError("The video store does not answer at the moment; try again.") from error


def _delete_unfinished(folder: Path, until: float) -> None:
    """Delete what servers that were killed were still writing. The library never lists such files."""
    for path in folder.glob("*/video-*#*"):
        with suppress(FileNotFoundError):  # another server has deleted it
            if _UNFINISHED.fullmatch(path.relative_to(folder).as_posix()) and path.stat().st_mtime < until:
                path.unlink()


def _name(caller: str, video_id: str, kind: str) -> str:
    return f"{caller or 'anyone'}/{video_id}.{kind}"


def _reason(error: BaseException) -> str:
    """In one line, what the library says for people; S3 tells the cause in XML."""
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S:g} s"
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
    return text[:_MAX_REASON] or type(error).__name__
