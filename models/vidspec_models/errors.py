"""What can go wrong with a model, in words an operator or a caller can act on.

ModelError
├─ ModelLoadError      folder, architecture, dtype or device does not work
└─ ContextOverflow     a prompt and its answer do not fit the model's context
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of all model errors; the message is fit for an operator's eyes."""


class ModelLoadError(ModelError):
    """The model cannot be loaded; the message names the remedy."""


class ContextOverflow(ModelError):
    """Prompt and completion together exceed the context."""
