"""One file per acceptance rule; the rule and its file share their name. A new rule is one file and its line below."""

from ..acceptance import register_rule
from . import coupled, rejection, typical

register_rule(coupled.RULE)
register_rule(rejection.RULE)
register_rule(typical.RULE)
