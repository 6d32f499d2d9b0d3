"""The bundled target and draft: the rendered domain they know, its texts, and the paths of their weights.

Modules of this package need only numpy, this one nothing. `vidspec_models.training` trains and measures the pair.
"""

from pathlib import Path

BUNDLED_TARGET = Path(__file__).parent / "weights" / "target"
BUNDLED_DRAFT = Path(__file__).parent / "weights" / "draft"
