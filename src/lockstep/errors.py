"""Every error a user of lockstep can cause.

::

    LockstepError
    ├── DeviceError (RuntimeError)            a device that is unknown, missing, or not where it has to be
    ├── LayoutError (RuntimeError, ValueError) shapes, dtypes, sizes or chunk sums that do not fit together
    │   └── LengthError (AssertionError)      lists that must have one entry for each replica, and have not
    ├── StructureError (ValueError)           nested inputs or outputs that cannot be split or put together
    ├── NotReplicableError (RuntimeError, ValueError) a module that cannot have replicas, with the reason
    ├── ReplicaError (RuntimeError)           a replica failed, and its own exception could not be rebuilt
    └── GradientError (NotImplementedError)   a gradient was asked of something that has none

Each also derives from the built-in exception that PyTorch raises in the same place, so an ``except`` written for
PyTorch still catches it. Every message says what was wrong, where, what was expected, what was got, and what to do.
"""


class LockstepError(Exception):
    """Base of all errors that lockstep raises on purpose."""


class DeviceError(LockstepError, RuntimeError):
    """A device is unknown or missing, or a tensor is not on the device where it has to be."""


class LayoutError(LockstepError, RuntimeError, ValueError):
    """Shapes, dtypes, sizes or chunk sums do not fit together."""


class LengthError(LayoutError, AssertionError):
    """Lists that must have one entry for each replica differ in length."""


class StructureError(LockstepError, ValueError):
    """Nested inputs cannot be split, or nested outputs cannot be put together."""


class NotReplicableError(LockstepError, RuntimeError, ValueError):
    """A module cannot be replicated; the message gives the reason."""


class ReplicaError(LockstepError, RuntimeError):
    """A replica failed with an exception that could not be rebuilt; ``__cause__`` is that exception."""


class GradientError(LockstepError, NotImplementedError):
    """A gradient was asked of an operation that has none."""
