"""Checks the grammars that answers must follow, before their requests cost anything."""
