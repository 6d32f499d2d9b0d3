"""`bench first-token`: where the time to the first token goes, stage by stage, over HTTP."""
