"""`python -m hf_specdec`: the command line."""

import sys

from .cli.app import main

sys.exit(main())
