"""`python -m pagoda` is the same as `pagoda`."""

import sys

from pagoda.cli import main

sys.exit(main())
