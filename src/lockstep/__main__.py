"""``python -m lockstep`` is the ``lockstep`` command."""

import sys

from lockstep_command import main

sys.exit(main())
