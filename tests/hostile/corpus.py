"""The hostile corpus: named files made from a few rendered clips, none stored; and unlimited mutations of the clips."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tests.hostile.bombs import bombs
from tests.hostile.boxes import Box, boxes
from tests.hostile.disguises import disguises
from tests.hostile.seeds import Seeds

_EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_HEAD = 1500  # bytes, in which containers keep their metadata


def corpus(seeds: Seeds, folder: Path) -> list[tuple[str, bytes]]:
    """All files with their names; `folder` is for rendering."""
    return list(chain(_truncations(seeds), bombs(seeds), disguises(seeds, folder)))


def _truncations(seeds: Seeds) -> Iterator[tuple[str, bytes]]:
    """A file cut after the header of each box, and one cut in the middle of the box."""
    for part in _kinds_of_boxes(seeds.mp4):
        yield f"cut: after the header of {part.path}", seeds.mp4[: part.payload]
    for kind, data in (("fast", seeds.fast_mp4), ("fragmented", seeds.fragmented_mp4)):
        for part in _kinds_of_boxes(data):
            yield f"cut: inside {kind} {part.path}", data[: part.start + part.length // 2]
    others = ("mkv", "webm", "ts", "avi", "gif", "flv")
    for name in others:
        data = getattr(seeds, name)
        yield f"cut: early in {name}", data[: len(data) // 10]
        yield f"cut: late in {name}", data[: len(data) * 9 // 10]


def _kinds_of_boxes(data: bytes) -> Iterator[Box]:
    """The first box of each path: audio and video tracks have the same paths."""
    seen = set[str]()
    for part in boxes(data):
        if part.path not in seen:
            seen.add(part.path)
            yield part


def mutations(seeds: Seeds, count: int, seed: int) -> Iterator[bytes]:
    """`count` damaged clips, the same for the same seed."""
    return mutated(seeds.all(), count, seed)


def mutated(clips: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """`count` damaged files made of these."""
    dice = random.Random(seed)
    for _ in range(count):
        data = bytearray(dice.choice(clips))
        for _ in range(dice.choice((1, 1, 2, 4, 16))):
            _mutate(data, dice, clips)
        yield bytes(data)


def _mutate(data: bytearray, dice: random.Random, clips: list[bytes]) -> None:
    limit = dice.choice((len(data), min(_HEAD, len(data))))
    place = dice.randrange(max(limit, 1))
    length = dice.choice((1, 4, 16, 200, 2000))
    match dice.randrange(7):
        case 0:  # flip bits
            for spot in range(place, min(place + length, len(data)), max(length // 4, 1)):
                data[spot] ^= 1 << dice.randrange(8)
        case 1:  # an extreme number
            width = dice.choice((1, 2, 4))
            data[place : place + width] = (dice.choice(_EXTREMES) % (1 << 8 * width)).to_bytes(width, "big")
        case 2:  # noise
            data[place : place + length] = dice.randbytes(length)
        case 3:  # delete
            del data[place : place + length]
        case 4:  # duplicate
            data[place:place] = data[place : place + length]
        case 5:  # copy from another clip
            other = dice.choice(clips)
            start = dice.randrange(len(other))
            data[place : place + length] = other[start : start + length]
        case 6 if place > 400:  # truncate
            del data[place:]
