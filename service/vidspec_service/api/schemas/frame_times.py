"""What stands beside a client's own frames: how fast they follow each other, or when each is shown."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from vidspec_service.api.schemas.fields import FrameTimes, NotNegative, Strict
from vidspec_service.decoding.clip import MAX_FPS
from vidspec_service.errors import InvalidRequest

LEAST_STEP_S = 0.001
_MAX_TIMES = 20_000  # more than any server's max_frames


class WithFrameTimes(Strict):
    """Beside a `data:video/jpeg` URL; without either, one frame a second."""

    fps: Annotated[float, Field(gt=0, le=MAX_FPS, allow_inf_nan=False)] | None = Field(
        None, description="Of `data:video/jpeg` frames: how many are shown in a second."
    )
    timestamps_s: Annotated[list[NotNegative], Field(min_length=1, max_length=_MAX_TIMES)] | None = Field(
        None, description="Of `data:video/jpeg` frames: when each is shown, in seconds; increasing by 1 ms or more."
    )

    @model_validator(mode="after")
    def _times_agree(self) -> Self:
        if self.fps is not None and self.timestamps_s is not None:
            raise InvalidRequest("Give fps or timestamps_s of frames, not both.", param="timestamps_s")
        for earlier, later in pairwise(self.timestamps_s or ()):
            if later - earlier < LEAST_STEP_S - 1e-9:
                raise InvalidRequest("timestamps_s must increase by 0.001 or more.", param="timestamps_s")
        return self

    @property
    def times(self) -> FrameTimes | None:
        """What the client says of them, if anything."""
        if self.fps is None and self.timestamps_s is None:
            return None
        return FrameTimes(fps=self.fps, timestamps_s=None if self.timestamps_s is None else tuple(self.timestamps_s))
