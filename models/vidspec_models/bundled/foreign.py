"""Frames unlike the pair's own clips, drawn from a seed; the pair must learn to say that it does not know them.

They resemble real footage in statistics, not in content: noise of every scale, pictures of many overlapping things,
gradients, dark pictures with lit parts, writing; all still, panned, cut, flickering, fading or between black bars.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vidspec_models.bundled.render import Pixels
from vidspec_models.bundled.scene import BACKGROUNDS, FRAME_SIZE, choose

_SIDE = 2 * FRAME_SIZE  # canvas that the camera moves over
Canvas = NDArray[np.float32]  # [S, S, 3] in 0..1


def render_foreign(seed: int, num_frames: int) -> Pixels:
    """Frames [T, 128, 128, 3]; the same seed gives the same frames."""
    rng = np.random.default_rng([seed, 29])
    draw = choose(rng, _CANVASES)
    canvas = draw(rng)
    grain = rng.uniform(0.0, 0.08)
    if rng.random() < 0.5:
        canvas = canvas + rng.normal(0, grain, canvas.shape).astype(np.float32)
    start, end = rng.integers(0, FRAME_SIZE + 1, (2, 2))
    if rng.random() < 0.3:
        end = start
    fade = rng.uniform(0.3, 1.0, 2) if rng.random() < 0.3 else np.ones(2)
    cuts = float(rng.choice((0.0, 0.2, 1.0), p=(0.7, 0.15, 0.15)))  # probability that a frame starts another shot
    bar = int(rng.integers(8, 36)) if rng.random() < 0.15 else 0
    frames = np.zeros((num_frames, FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
    for number, share in enumerate(np.linspace(0, 1, num_frames)):
        y, x = (start + (end - start) * share).round().astype(int)
        if number and rng.random() < cuts:
            canvas = draw(rng)
        window = canvas[y + bar : y + FRAME_SIZE - bar, x : x + FRAME_SIZE]
        lit = (window * (fade[0] + (fade[1] - fade[0]) * share) * 255).clip(0, 255)
        frames[number, bar : FRAME_SIZE - bar] = lit.astype(np.uint8)
    return frames


def _flat(rng: np.random.Generator) -> Canvas:
    return np.broadcast_to(rng.random(3, np.float32) ** 2, (_SIDE, _SIDE, 3)).astype(np.float32)


def _white_noise(rng: np.random.Generator) -> Canvas:
    channels = int(rng.choice((1, 3)))
    return np.broadcast_to(rng.random((_SIDE, _SIDE, channels), np.float32), (_SIDE, _SIDE, 3))


def _cloudy_noise(rng: np.random.Generator) -> Canvas:
    """Noise whose strength falls with frequency, as in photographs."""
    waves = _cloudy(rng, rng.uniform(0.6, 1.8), 3)
    colour = rng.uniform(0.2, 0.8, 3) + rng.uniform(0.05, 0.3) * waves @ (np.eye(3) + rng.uniform(0, 1, (3, 3)))
    return np.asarray(colour, np.float32).clip(0, 1)


def _cloudy(rng: np.random.Generator, steepness: float, num_channels: int) -> NDArray[np.float64]:
    """Noise [S, S, C] whose strength falls with frequency, with mean 0 and standard deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(_SIDE)[:, None], np.fft.rfftfreq(_SIDE)[None]) + 1 / _SIDE
    spectrum = np.fft.rfft2(rng.normal(size=(num_channels, _SIDE, _SIDE))) / frequency**steepness
    waves = np.fft.irfft2(spectrum, s=(_SIDE, _SIDE)).transpose(1, 2, 0)
    return np.asarray((waves - waves.mean((0, 1))) / waves.std((0, 1)), np.float64)


def _leaves(rng: np.random.Generator) -> Canvas:
    """Many discs and boxes over each other, of all sizes and muted colours: edges as in real scenes."""
    canvas = _gradient(rng)
    y, x = np.mgrid[:_SIDE, :_SIDE]
    palette = rng.uniform(0, 1, (int(rng.integers(3, 12)), 3))
    for _ in range(int(rng.integers(25, 110))):
        cy, cx = rng.integers(0, _SIDE, 2)
        tall, wide = 4 / rng.uniform(0.03, 1.0, 2)
        dy, dx = (y - cy) / tall, (x - cx) / wide
        inside = dy**2 + dx**2 < 1 if rng.random() < 0.6 else np.maximum(abs(dy), abs(dx)) < 1
        shade = rng.uniform(0.6, 1.2) * palette[int(rng.integers(len(palette)))]
        canvas[inside] = shade + 0.1 * (dy[inside] * rng.normal())[:, None]
    return canvas.clip(0, 1)


def _gradient(rng: np.random.Generator) -> Canvas:
    corners = rng.uniform(0, 1, (2, 2, 3))
    v, u = np.mgrid[:_SIDE, :_SIDE][..., None] / _SIDE
    top = corners[0, 0] * (1 - u) + corners[0, 1] * u
    bottom = corners[1, 0] * (1 - u) + corners[1, 1] * u
    return np.asarray(top * (1 - v) + bottom * v, np.float32)


def _bars(rng: np.random.Generator) -> Canvas:
    """Test cards, blinds and boards."""
    step = int(rng.integers(3, 40))
    y, x = np.mgrid[:_SIDE, :_SIDE] // step
    number = (x, y, x + y, x * 7 + y * 3)[int(rng.integers(4))] % int(rng.integers(2, 9))
    return np.asarray(rng.uniform(0, 1, (9, 3))[number], np.float32)


def _soft_leaves(rng: np.random.Generator) -> Canvas:
    """`_leaves` out of focus."""
    canvas, side = _leaves(rng), int(rng.integers(2, 7))
    for axis in (0, 1):
        canvas = np.mean([np.roll(canvas, shift, axis) for shift in range(side)], axis=0)
    return np.asarray(canvas, np.float32)


def _leaves_in_haze(rng: np.random.Generator) -> Canvas:
    share = rng.uniform(0.3, 0.8)
    return np.asarray(share * _leaves(rng) + (1 - share) * _cloudy_noise(rng), np.float32)


def _lit_parts(rng: np.random.Generator) -> Canvas:
    """Parts of a picture, as a lamp, a cut-out or a screen shows them, on black or on one colour."""
    heights = _cloudy(rng, rng.uniform(1.4, 2.2), 1)
    edge = np.quantile(heights, rng.uniform(0.5, 0.95))
    shown = ((heights - edge) / rng.uniform(0.02, 0.8)).clip(0, 1)
    around = rng.choice(list(BACKGROUNDS.values())) / 255 if rng.random() < 0.4 else rng.uniform(0, 0.06, 3)
    picture = choose(rng, (_leaves, _soft_leaves, _cloudy_noise, _gradient, _leaves_in_haze))(rng)
    return np.asarray(picture * shown + around * (1 - shown), np.float32)


def _writing(rng: np.random.Generator) -> Canvas:
    """Lines of strokes as small as letters: title cards, clocks, subtitles."""
    canvas = np.array(_flat(rng) if rng.random() < 0.7 else _gradient(rng))
    scale, ink = int(rng.integers(1, 5)), rng.uniform(0, 1, 3) if rng.random() < 0.4 else np.ones(3)
    for top in range(int(rng.integers(0, 40)), _SIDE - 7 * scale, int(rng.integers(9, 60)) * scale):
        left, num_letters = int(rng.integers(0, FRAME_SIZE)), int(rng.integers(3, 24))
        strokes = rng.random((7, 6 * num_letters)) < 0.45
        strokes[:, 5::6] = False
        line = strokes.repeat(scale, 0).repeat(scale, 1)[:, : _SIDE - left]
        canvas[top : top + 7 * scale, left : left + line.shape[1]][line] = ink
    return canvas.astype(np.float32)


_CANVASES: tuple[Callable[[np.random.Generator], Canvas], ...] = (
    _flat, _white_noise, _cloudy_noise, _cloudy_noise, _leaves, _leaves, _soft_leaves, _soft_leaves, _leaves_in_haze,
    _leaves_in_haze, _gradient, _bars, _lit_parts, _lit_parts, _lit_parts, _writing,
)  # fmt: skip
