"""The bundled target and draft: the rendered domain they know, its texts, and where their weights lie.

Its modules need numpy alone, this one nothing; how the pair is trained and measured is in `vidspec_models.training`.
"""

from pathlib import Path

BUNDLED_TARGET = Path(__file__).parent / "weights" / "target"
BUNDLED_DRAFT = Path(__file__).parent / "weights" / "draft"
