"""Model errors, with messages that an operator or a caller can act on.

ModelError
├─ ModelLoadError      folder, architecture, dtype or device does not work
├─ Cancelled           the request was cancelled while its prompt was prepared
├─ ConversationRefused the checkpoint's chat template or its model cannot take the conversation
└─ ContextOverflow     a prompt and its answer do not fit the model's context
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of all model errors; the message can be shown to an operator."""


class ModelLoadError(ModelError):
    """The model cannot be loaded; the message names the remedy."""


class Cancelled(ModelError):
    """The request was cancelled while its prompt was prepared."""


class ConversationRefused(ModelError):
    """The checkpoint's chat template or its model cannot take the conversation; the message has the reason."""


class ContextOverflow(ModelError):
    """Prompt and completion together exceed the context."""
