"""`python -m hf_specdec`: the command line."""

import sys

from .cli import main

sys.exit(main())
