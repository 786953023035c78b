"""The decoding loop: a round of drafting, verification, the walk and the commit, and how large a draft pays."""
