"""The model that is sped up, or one that drafts: its forwards, its KV cache, and what it can take part in."""
