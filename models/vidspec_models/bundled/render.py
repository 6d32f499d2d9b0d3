"""Pixels of a scene at any times, and the owner map: which thing each pixel shows (the source of all dense labels)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vidspec_models.bundled.scene import BACKGROUNDS, CELL_PX, COLOURS, FRAME_SIZE, NUM_SLOTS, RADIUS_PX, Scene

Pixels = NDArray[np.uint8]
OWNER_SIGN = 10  # owner map: 0 background, 1.. things, OWNER_SIGN.. signs
_STRIPE_PX = 8
_DOT_PX = 12
_PAD = 8
_GLYPHS = {  # 5x7, doubled when drawn
    "A": "01110 10001 10001 11111 10001 10001 10001",
    "C": "01111 10000 10000 10000 10000 10000 01111",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "F": "11111 10000 10000 11110 10000 10000 10000",
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "K": "10001 10010 10100 11000 10100 10010 10001",
    "L": "10000 10000 10000 10000 10000 10000 11111",
    "M": "10001 11011 10101 10101 10001 10001 10001",
    "P": "11110 10001 10001 11110 10000 10000 10000",
    "T": "11111 00100 00100 00100 00100 00100 00100",
    "U": "10001 10001 10001 10001 10001 10001 01110",
    "X": "10001 10001 01010 00100 01010 10001 10001",
}


def slot_times() -> NDArray[np.float64]:
    """The canonical sampling: the middle of each of the eight slots."""
    return (np.arange(NUM_SLOTS) + 0.5) / NUM_SLOTS


def render(scene: Scene, times: NDArray[np.float64], size: int = FRAME_SIZE) -> Pixels:
    """Frames [T, size, size, 3] at times in [0, 1); `size` must be a multiple of 128 (nearest scaling)."""
    frames, _ = render_with_owners(scene, times)
    factor, rest = divmod(size, FRAME_SIZE)
    if rest or factor < 1:
        raise ValueError(f"size must be a multiple of {FRAME_SIZE}, got {size}")
    return frames if factor == 1 else frames.repeat(factor, axis=1).repeat(factor, axis=2)


def render_with_owners(
    scene: Scene, times: NDArray[np.float64], *, empty: bool = False
) -> tuple[Pixels, NDArray[np.uint8]]:
    """Frames [T, 128, 128, 3] and owners [T, 128, 128]; `empty` leaves out all things and signs."""
    frames = np.empty((len(times), FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
    owners = np.zeros((len(times), FRAME_SIZE, FRAME_SIZE), np.uint8)
    canvas = _background(scene.background, scene.texture)
    for frame, owner, time in zip(frames, owners, times, strict=True):
        dx, dy = scene.shake_px[min(int(time * NUM_SLOTS), NUM_SLOTS - 1)]
        frame[:] = canvas[_PAD - dy : _PAD - dy + FRAME_SIZE, _PAD - dx : _PAD - dx + FRAME_SIZE]
        if not empty:
            _draw_things(scene, float(time), (dx, dy), frame, owner)
            _draw_signs(scene, float(time), frame, owner)
    return frames, owners


def _draw_things(scene: Scene, time: float, shift: tuple[int, int], frame: Pixels, owner: NDArray[np.uint8]) -> None:
    for index, thing in enumerate(scene.things):
        if not thing.is_visible(time):
            continue
        x, y = thing.centre_at(time)
        alpha = _shape_mask(thing.shape, thing.size)
        r = alpha.shape[0] // 2
        x0, y0 = x + shift[0] - r, y + shift[1] - r
        window = np.s_[max(y0, 0) : y0 + 2 * r, max(x0, 0) : x0 + 2 * r]
        patch = frame[window]
        part = alpha[max(-y0, 0) :, max(-x0, 0) :][: patch.shape[0], : patch.shape[1]]
        colour = np.asarray(COLOURS[thing.colour_at(time)], np.float32)
        patch[:] = (patch * (1 - part[..., None]) + colour * part[..., None] + 0.5).astype(np.uint8)
        owner[window][part > 0] = index + 1


def _draw_signs(scene: Scene, time: float, frame: Pixels, owner: NDArray[np.uint8]) -> None:
    for index, sign in enumerate(scene.signs):
        if not sign.is_visible(time):
            continue
        x0 = (sign.corner % 2) * (FRAME_SIZE - CELL_PX)
        y0 = (sign.corner // 2) * (FRAME_SIZE - CELL_PX)
        window = np.s_[y0 : y0 + CELL_PX, x0 : x0 + CELL_PX]
        frame[window] = _plate(sign.letter)[..., None]
        owner[window] = OWNER_SIGN + index


@lru_cache(maxsize=32)
def _background(colour: str, texture: str) -> Pixels:
    side = FRAME_SIZE + 2 * _PAD
    y, x = np.mgrid[:side, :side] - _PAD
    base = np.asarray(BACKGROUNDS[colour], np.int16)
    lighter = base + (-28 if base.sum() > 500 else 28)
    if texture == "striped":
        marked = (y // _STRIPE_PX) % 2 == 0
    elif texture == "dotted":
        marked = ((x % _DOT_PX - 6) ** 2 + (y % _DOT_PX - 6) ** 2) <= 9
    else:
        marked = np.zeros_like(x, bool)
    return np.where(marked[..., None], lighter, base).clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=16)
def _shape_mask(shape: str, size: str) -> NDArray[np.float32]:
    """Anti-aliased coverage in [0, 1] of a shape on its own square window (4x supersampled)."""
    radius = RADIUS_PX[size]
    half = radius + 1
    axis = (np.arange(half * 8) + 0.5) / 4 - half
    x, y = np.meshgrid(axis, axis)
    distance = np.hypot(x, y)
    inside = {
        "circle": distance <= radius,
        "square": np.maximum(abs(x), abs(y)) <= radius * 0.86,
        "triangle": (y <= radius * 0.8) & (abs(x) <= (y + radius) * 0.58),
        "diamond": abs(x) * 1.25 + abs(y) <= radius,
        "cross": (np.minimum(abs(x), abs(y)) <= radius * 0.3) & (np.maximum(abs(x), abs(y)) <= radius),
        "ring": (distance <= radius) & (distance >= radius * 0.55),
    }[shape]
    mask: NDArray[np.float32] = inside.reshape(half * 2, 4, half * 2, 4).mean(axis=(1, 3)).astype(np.float32)
    return mask


@lru_cache(maxsize=len(_GLYPHS))
def _plate(letter: str) -> NDArray[np.uint8]:
    """Gray values [16, 16] of one letter, black on white: exactly one visual token."""
    bits = np.array([[int(bit) for bit in row] for row in _GLYPHS[letter].split()], np.uint8)
    plate = np.full((CELL_PX, CELL_PX), 250, np.uint8)
    plate[1:15, 3:13] -= bits.repeat(2, axis=0).repeat(2, axis=1) * 240
    return plate
