"""The host's private names: everything of transformers, PEFT, the Hub client and torch that is not public.

Nothing outside of this folder touches a name of theirs that begins with an underscore, or one that differs between the
supported versions. A new version of one of them is looked at here.
"""
