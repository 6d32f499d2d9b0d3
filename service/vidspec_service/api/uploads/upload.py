"""Upload: the fields and videos of one request's body, kept until the videos are decoded."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from vidspec_service.api.errors import UploadTimeout
from vidspec_service.api.limits.admission import Permit
from vidspec_service.api.limits.deadline import Deadline
from vidspec_service.api.schemas.fields import FrameTimes, Strict, VideoFile, VideoSource, about_video, content_id
from vidspec_service.api.store.video_store import VideoStore
from vidspec_service.api.uploads.data_urls import DataUrl, frame_sequence
from vidspec_service.api.uploads.fetching import Fetcher
from vidspec_service.api.uploads.form import read_form
from vidspec_service.api.uploads.json_body import read_json
from vidspec_service.decoding.clip import over_limit
from vidspec_service.decoding.signatures import HEAD_BYTES, check_signature
from vidspec_service.errors import CapacityError, DeadlineExceeded, InvalidRequest, VideoUnreadable
from vidspec_service.settings import Settings

_FORM = "multipart/form-data"
_JSON = "application/json"
_WRITE_BYTES = 1024 * 1024  # per call in a thread
MIN_RATE = 4096  # bytes per second: any connection is faster; a client that only occupies a place is slower
GRACE_S = 10.0  # how far a body may be behind MIN_RATE

F = TypeVar("F", bound=Strict)


class Upload:
    """Reads one body and its videos. Closing it deletes the stored files and releases the borrowed ones."""

    def __init__(self, request: Request, permit: Permit, folder: Path, settings: Settings) -> None:
        self.permit = permit
        self._settings = settings
        self._request = request
        self._folder = folder
        self._held = ExitStack()
        self._set_aside: dict[str, DataUrl] = {}  # by its mark, each string that was set aside
        self._num_stored = self._num_read = 0  # bytes: of the files; of the body and of what was fetched

    async def fields(self, *, json: type[F], form: type[F] | None = None) -> F:
        """The body's fields, by content type. A form's files have been stored; JSON still holds its data URLs.

        Raises the RequestError that says what is wrong with them, UploadTimeout if they take too long to arrive.
        """
        limit_s = self._settings.upload_timeout_s
        try:
            return await Deadline(limit_s, self.permit.closing).run(self._read(json, form))
        except DeadlineExceeded:
            raise UploadTimeout(
                f"The body took longer than {limit_s:g} s to arrive (VIDSPEC_UPLOAD_TIMEOUT_S)."
            ) from None

    async def _read(self, json: type[F], form: type[F] | None) -> F:
        content_type = self._request.headers.get("content-type", "")
        kind = content_type.partition(";")[0].strip().lower()
        model = {_FORM: form, _JSON: json}.get(kind)
        if model is None:
            raise HTTPException(415, f"Content-Type must be {_JSON if form is None else f'{_FORM} or {_JSON}'}.")
        if self._request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise HTTPException(415, "Send the body uncompressed, without Content-Encoding.")
        chunks = self._counted(_enforce_min_rate(self._request.stream()))
        if kind == _FORM:
            return await read_form(chunks, content_type, model, self._store_part)
        fields, self._set_aside = await read_json(chunks, model, self._settings.max_json_bytes)
        return fields

    async def videos(self, sources: Sequence[VideoSource], kept: VideoStore, fetcher: Fetcher) -> list[VideoFile]:
        """Get every video that a valid body names, one after the other; raises what `video` does, naming the video."""
        _check_num_videos(len(sources), self._settings)
        files = []
        for index, source in enumerate(sources):
            with about_video(index, len(sources)):
                files.append(await self.video(source, kept, fetcher))
        return files

    async def video(self, source: VideoSource, kept: VideoStore, fetcher: Fetcher) -> VideoFile:
        """Get the video that a valid body names; raises the RequestError that says what is wrong with it."""
        if source.file is not None:
            return source.file
        data_url = None if source.data_url is None else self._data_url(source.data_url)
        if data_url is not None and data_url.has_frames and not source.is_still:
            return await self._store_frames(data_url, source.times)
        if source.times is not None:
            raise InvalidRequest("fps and timestamps_s of frames need a data:video/jpeg;base64, URL.", param="video")
        if source.video_id is not None:
            return self._held.enter_context(await kept.reading(self.permit.caller, source.video_id, self._download))
        if data_url is not None:
            chunks = data_url.decoded(self._settings.max_upload_bytes, is_still=source.is_still)
            return await self._store(chunks, is_still=source.is_still)
        assert source.url is not None
        async with fetcher.opened(source.url) as chunks:
            return await self._store(self._counted(chunks), is_still=source.is_still)

    async def _store(self, chunks: AsyncIterator[bytes], *, is_still: bool = False) -> VideoFile:
        """Write a stream to a private file of this request; raises what `write_upload` does."""
        limit = self._settings.max_upload_bytes
        file = await write_upload(chunks, self._folder, limit, num_before=self._num_stored, is_still=is_still)
        self._held.callback(file.path.unlink, missing_ok=True)
        self._num_stored += file.num_bytes
        return file

    async def _store_part(self, chunks: AsyncIterator[bytes], num_before: int) -> VideoFile:
        _check_num_videos(num_before + 1, self._settings)
        with about_video(num_before, num_before + 1):  # whether more videos follow is not known yet
            return await self._store(chunks)

    async def _store_frames(self, url: DataUrl, times: FrameTimes | None) -> VideoFile:
        """A client's own frames become one file of JPEG images in a row."""
        images = await asyncio.to_thread(url.frames, self._settings)
        sequence = frame_sequence(tuple(map(len, images)), times, self._settings)

        async def each() -> AsyncIterator[bytes]:
            for image in images:
                yield image

        return replace(await self._store(each(), is_still=True), is_still=False, sequence=sequence)

    async def _download(self, chunks: AsyncIterator[bytes], is_still: bool) -> VideoFile:
        """Write a stream to a private file that the caller deletes; its bytes count for this request."""
        return await write_upload(
            self._counted(chunks), self._folder, self._settings.max_upload_bytes, is_still=is_still
        )

    def _data_url(self, url: str) -> DataUrl:
        """The data URL that a field of the body has; if the field has a mark, the string that was set aside for it."""
        for mark, whole in self._set_aside.items():
            if url == mark:
                return whole
            if url.endswith(mark):  # bare base64, to which we have added a head
                said = url.removesuffix(mark).encode() + whole.text[whole.begin : whole.end]
                return DataUrl(said, 0, len(said))
        return DataUrl.of(url)

    def hand_over(self) -> None:
        """From now on somebody else deletes the stored files."""
        self._held.pop_all()

    async def _counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The chunks as they arrive, counted against the budget of all uploads; declared bytes do not count."""
        async for chunk in chunks:
            self._num_read += len(chunk)
            self.permit.hold_bytes(self._num_read)
            yield chunk

    def close(self) -> None:
        """Delete the files and give back the borrowed ones. May be called again."""
        self._held.close()
        self._set_aside = {}
        self.permit.num_bytes = 0  # the body is gone; the request goes on


async def _enforce_min_rate(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks of a body; raises UploadTimeout as soon as it is more than GRACE_S behind MIN_RATE."""
    loop = asyncio.get_running_loop()
    due, pieces = loop.time() + GRACE_S, aiter(chunks)
    while True:
        try:
            async with asyncio.timeout_at(due):
                chunk = await anext(pieces, None)
        except TimeoutError:
            raise UploadTimeout(f"The body arrives more slowly than {MIN_RATE:,} bytes per second.") from None
        if chunk is None:
            return
        due += len(chunk) / MIN_RATE
        yield chunk


def _check_num_videos(number: int, settings: Settings) -> None:
    """Raises VideoTooLarge for more videos and images than a request may have."""
    if number > (most := settings.max_videos_per_request):
        raise over_limit(
            f"The request has {number} videos and images", str(most), "VIDSPEC_MAX_VIDEOS_PER_REQUEST", param="videos"
        )


async def write_upload(
    chunks: AsyncIterator[bytes], directory: Path, max_bytes: int, *, num_before: int = 0, is_still: bool = False
) -> VideoFile:
    """Store a stream in a new private file in `directory`, which the caller deletes.

    Raises VideoUnsupported as soon as the first bytes cannot be a video's (`is_still`: an image's), VideoTooLarge as
    soon as there are more than `max_bytes`, including the `num_before` bytes of the request's other files,
    VideoUnreadable if there are none. On any error or cancellation the file is deleted.
    """
    path = directory / f"upload-{secrets.token_hex(16)}"  # nobody can guess it; nothing in it comes from the client
    num_bytes, digest, pending, is_checked = 0, hashlib.sha256(), bytearray(), False
    with ExitStack() as undo, _create(path) as file:
        undo.callback(path.unlink, missing_ok=True)
        async for chunk in chunks:
            num_bytes += len(chunk)
            if num_before + num_bytes > max_bytes:
                fact = "All files together are too large" if num_before else "The file is too large"
                raise over_limit(fact, f"{max_bytes:,} bytes", "VIDSPEC_MAX_UPLOAD_BYTES")
            digest.update(chunk)
            pending += chunk
            if not is_checked and len(pending) >= HEAD_BYTES:
                check_signature(bytes(pending[:HEAD_BYTES]), is_still=is_still)
                is_checked = True
            if len(pending) >= _WRITE_BYTES:
                await _write_in_thread(file, bytes(pending))
                pending.clear()
        if num_bytes == 0:
            raise VideoUnreadable("The video is empty.", param="video")
        if not is_checked:
            check_signature(bytes(pending), is_still=is_still)
        await _write_in_thread(file, bytes(pending))
        undo.pop_all()
    return VideoFile(path, num_bytes, content_id(digest.hexdigest()), is_still)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Inside, what the disk refuses is a CapacityError, whose cause names folder and setting for the log."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}: {folder} (upload_dir)"
        raise CapacityError("The server cannot store the video at the moment; try again.") from OSError(
            error.errno, reason
        )


def _create(path: Path) -> FileIO:
    with _naming(path.parent):
        return open(path, "xb", buffering=0, opener=partial(os.open, mode=0o600))


async def _write_in_thread(file: FileIO, data: bytes) -> None:
    writing = asyncio.ensure_future(asyncio.to_thread(_write_through, file, data))
    try:
        await asyncio.shield(writing)
    finally:
        while not writing.done():  # the file must not be closed while the thread writes
            with suppress(asyncio.CancelledError):  # the time of a fetch is up, then its client leaves, for one
                await asyncio.wait({writing})


def _write_through(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    with _naming(Path(str(file.name)).parent):
        while view:
            view = view[file.write(view) :]
