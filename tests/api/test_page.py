"""The page's files: served without a key, free of outside references, and never mixed from two versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.uploads import as_
from tests.api.world import World
from vidspec_service.api.routes.page import page_files

pytestmark = [pytest.mark.api, pytest.mark.anyio]

KEY = "the-key-0123456789abcdef"


async def test_every_file_is_served_without_a_key_and_together_they_are_small(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[KEY])
    total = 0
    for path, file in page_files().items():
        response = await world.client.get(path)
        assert response.status_code == 200, path
        assert (response.content, response.headers["content-type"]) == (file.content, file.media_type)
        total += len(response.content)
    assert total < 300_000


async def test_every_file_is_counted_by_its_path(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.client.head("/")
    await world.client.get("/page/app.js")
    assert world.metric("http_requests_total", method="HEAD", route="/", status="200") == 1
    assert world.metric("http_requests_total", method="GET", route="/page/app.js", status="200") == 1


async def test_the_policy_allows_nothing_from_elsewhere_and_no_script_inside(tmp_path: Path) -> None:
    response = await World(tmp_path).client.get("/")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert response.headers["permissions-policy"].startswith("camera=(self), "), "the page films clips"
    assert "unsafe" not in policy
    assert "//" not in policy
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on[a-z]+=", response.text)


def test_no_file_names_another_host_or_an_address_from_the_root() -> None:
    for path, file in page_files().items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert not re.search(r"""(src|href)=["']/""", text), path


async def test_a_file_that_did_not_change_is_not_sent_again(tmp_path: Path) -> None:
    client = World(tmp_path).client
    first = await client.get("/page/app.js")
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):  # a proxy that compresses weakens it
        again = await client.get("/page/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        for name in ("etag", "cache-control", "content-security-policy"):
            assert again.headers[name] == first.headers[name]
    assert first.headers["cache-control"] == "no-cache", "a file of an older version is no use with newer ones"
    assert (await client.get("/page/app.js", headers={"if-none-match": '"other"'})).status_code == 200


async def test_a_sample_clip_needs_a_key_and_a_seed_in_bounds(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[KEY])
    assert (await world.client.get("/page/samples/7")).status_code == 401
    for seed in ("-1", "10000", "x"):
        assert (await world.client.get(f"/page/samples/{seed}", headers=as_(KEY))).status_code == 400
    response = await world.client.get("/page/samples/7", headers=as_(KEY))
    assert response.headers["content-type"] == "video/mp4"
    assert response.content[4:8] == b"ftyp"
    assert response.headers["x-caption"].startswith("Everything happens on a dotted teal background.")
    assert world.admission.num_admitted == 0


async def test_files_that_are_no_part_of_the_page_are_not_served(tmp_path: Path) -> None:
    client = World(tmp_path).client
    for path in ("/page/../app.py", "/page/samples.py", "/page/", "/index.html"):
        assert (await client.get(path)).status_code == 404
