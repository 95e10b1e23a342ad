"""Options of a session that have to be the same on all ranks, compared before the ranks make a group by them."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from lockstep.errors import AgreementError, CommunicationError
from lockstep.store import BoundedStore

OF_EACH_RANK = {"device", "time_limit"}
"""Options that may differ."""


def check_same_options(options: Mapping[str, Any], rank: int, store: Any) -> None:
    """Raise :class:`AgreementError` on a rank that was called with other options than rank 0.

    It is then this rank's failure, of which all others hear. Communicates one value through the store.
    """
    own = json.loads(json.dumps({k: v for k, v in options.items() if k not in OF_EACH_RANK}, default=repr))
    store, key, timeout = PrefixStore("options", store), "of rank 0", options["timeout"]
    with contextlib.closing(BoundedStore(store, timeout)) as bounded_store:
        if rank == 0:
            bounded_store.set(key, json.dumps(own))
            return
        if not bounded_store.wait([key], timeout):
            raise CommunicationError(
                f"rank {rank}: rank 0 has not told its options within {timeout:g} s; look at what it is doing"
            )
        of_rank_0 = json.loads(bounded_store.get(key))
    for name, theirs in of_rank_0.items():
        if own.get(name) != theirs:
            raise AgreementError(
                f"session(): ranks differ in {name}: {theirs} on rank 0, {own.get(name)} on rank {rank}; give "
                f"it the same on all ranks{_HINTS.get(name, '')}"
            )


_HINTS = {
    "seed": ". Random numbers differ by rank with one seed, too: run.generator, torch.rand()",
    "backend": ". Without one it follows from the device: cpu on some ranks only is another backend",
}
