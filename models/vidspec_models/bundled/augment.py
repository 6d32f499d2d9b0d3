"""Pixel preparation for training: mild noise, blur and brightness, so that H.264 and resizing do no harm."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def normalise(frames: torch.Tensor) -> torch.Tensor:
    """uint8 frames [N, H, W, 3] to the tower's input [N, 3, H, W] in [-1, 1]."""
    return frames.permute(0, 3, 1, 2).float() / 127.5 - 1.0


class NoiseBank:
    """Normal noise drawn once and reused at random offsets: drawing it anew is a tenth of a training step on a CPU."""

    def __init__(self, device: str, size: int = 1 << 24) -> None:
        self._values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)

    def like(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Noise of a tensor's shape; clips of the bank's size repeat it."""
        count = tensor.numel()
        if count > len(self._values) // 2:
            self._values = self._values.repeat(2 * count // len(self._values) + 1)
        start = int(torch.randint(len(self._values) - count, (1,), generator=generator))
        return self._values[start : start + count].view(tensor.shape)


def augment(frames: torch.Tensor, generator: torch.Generator, bank: NoiseBank) -> torch.Tensor:
    """Normalised pixels with a random mix of camera and codec flaws, drawn per frame."""
    pixels = normalise(frames)
    count, device = len(pixels), pixels.device

    def draw(low: float, high: float) -> torch.Tensor:
        values = torch.rand(count, 1, 1, 1, generator=generator) * (high - low) + low
        return values.to(device)

    blurred = torch.rand(count, generator=generator).to(device) < 0.4
    pixels[blurred] = pixels[blurred].lerp(_soften(pixels[blurred]), float(torch.rand(1, generator=generator)) * 0.5)
    noisy = (pixels * draw(0.94, 1.06) + draw(-0.05, 0.05)).addcmul_(bank.like(pixels, generator), draw(0.0, 0.04))
    return noisy.clamp_(-1.0, 1.0)


def _soften(pixels: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
