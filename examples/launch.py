"""torchrun for processes of this machine, with torchrun's own options: it ends as quietly as what it runs.

When its processes are stopped, torchrun shows its own traceback below what they have said, and when one fails a page
about it below theirs. Here the first costs no line and the second costs one.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TOLD = {2, 128 + signal.SIGINT, 128 + signal.SIGTERM}  # the program has said why: bad options, or stopped
HERE = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]


def main(arguments: Sequence[str]) -> int:
    """The exit status: that of the process that ended first with one, or 128 and the number of a signal."""
    logging.disable(logging.ERROR)  # of the launcher alone
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        run.main([*HERE, *arguments])
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        if status not in TOLD:
            how = "failed with" if failure.exitcode >= 0 else f"was ended by {signal.Signals(-failure.exitcode).name},"
            print(f"process {rank} {how} exit status {status}", file=sys.stderr)
        return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
