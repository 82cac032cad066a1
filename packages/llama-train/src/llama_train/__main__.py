"""`python -m llama_train` and `torchrun -m llama_train`."""

import sys

from .cli import main

sys.exit(main())
