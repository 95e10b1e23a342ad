"""Every error a user of lockstep can cause.

::

    LockstepError
    ├── DeviceError (RuntimeError)            a device that is unknown, missing, or not where it has to be
    ├── LayoutError (RuntimeError, ValueError) shapes, dtypes, sizes or chunk sums that do not fit together
    │   └── LengthError (AssertionError, IndexError) lists that do not have one entry for each replica
    ├── StructureError (ValueError)           nested inputs or outputs that cannot be split or put together
    ├── NotReplicableError (RuntimeError, ValueError) a module that cannot have replicas; the message says why
    │   └── AlreadyManagedError (AssertionError)  a module that is replicated or sharded already
    ├── ReplicaError (RuntimeError)           a replica failed, and its own exception could not be rebuilt
    ├── GradientError (NotImplementedError)   the gradient of something that has no gradient
    ├── OptionError (RuntimeError, ValueError) an option that makes no sense, or two that contradict each other
    │   └── UnknownOptionError (TypeError)    an option that does not exist
    ├── HookError (RuntimeError, TypeError, ValueError) a hook that cannot be called, or returns the wrong type
    ├── AgreementError (RuntimeError, ValueError) ranks that differ in what must be the same on all
    │   └── OutOfSyncError                    parameters or buffers whose values differ between ranks
    ├── CheckpointError (RuntimeError)        a checkpoint that cannot be saved or loaded
    ├── CommunicationError (RuntimeError)     a collective failed or timed out
    ├── PeerError (RuntimeError)              the backward of another rank failed, or ranks ran different ones
    │   └── PeerFailure                       another rank failed, was killed, or left; with its step and traceback
    │       └── StalledError                  the other ranks no longer wait for this one
    ├── InspectionError (RuntimeError)        another process of this host cannot be inspected
    ├── CheckError (RuntimeError)             a case of lockstep.check that fails in one process
    ├── ShardingError (RuntimeError, ValueError) an optimizer that cannot be sharded, or a use that needs all of it
    │   └── UnknownOptimizerError         the program has to say how it may be divided; also an OptionError
    └── ShareError (RuntimeError)             a backward or an optimizer's step outside of the order of shares
        └── AuditError                        a share that has different bits when it is computed again

Each also derives from the built-in exception that PyTorch raises in the same place, so an ``except`` written for
PyTorch still catches it. Every message says what was wrong, where, what was expected, what was got, and what to do.
"""


class LockstepError(Exception):
    """Base of all errors that lockstep raises on purpose."""


class DeviceError(LockstepError, RuntimeError):
    """A device is unknown or missing, or a tensor is not on the required device."""


class LayoutError(LockstepError, RuntimeError, ValueError):
    """Shapes, dtypes, sizes or chunk sums do not fit together."""


class LengthError(LayoutError, AssertionError, IndexError):
    """Lists that must have one entry for each replica differ in length, or there is no replica."""


class StructureError(LockstepError, ValueError):
    """Nested inputs cannot be split, or nested outputs cannot be put together."""


class NotReplicableError(LockstepError, RuntimeError, ValueError):
    """A module cannot be replicated; the message gives the reason."""


class AlreadyManagedError(NotReplicableError, AssertionError):
    """``replicate`` or ``fully_shard`` has been applied to a module already."""


class ReplicaError(LockstepError, RuntimeError):
    """A replica failed with an exception that could not be rebuilt; ``__cause__`` is that exception."""


class GradientError(LockstepError, NotImplementedError):
    """A gradient was requested from an operation that has none."""


class OptionError(LockstepError, RuntimeError, ValueError):
    """An option has a value that makes no sense, alone or next to another."""


class UnknownOptionError(OptionError, TypeError):
    """An option does not exist; the message names the nearest option that does."""


class HookError(LockstepError, RuntimeError, TypeError, ValueError):
    """A communication hook is not callable, has wrong annotations, or returned something other than a gradient."""


class AgreementError(LockstepError, RuntimeError, ValueError):
    """Ranks differ where they must be equal; raised on every rank, with the rank, the name and both values."""


class OutOfSyncError(AgreementError):
    """A parameter or buffer has different values on another rank; raised on every rank, by name."""


class CheckpointError(LockstepError, RuntimeError):
    """A checkpoint could not be saved or loaded; raised on every rank, with the rank and the reason."""


class CommunicationError(LockstepError, RuntimeError):
    """A collective failed or timed out; ``__cause__`` is the error of the process group."""


class PeerError(LockstepError, RuntimeError):
    """The backward of another rank failed, or belongs to another round; that rank's own error gives the reason."""


class PeerFailure(PeerError, CommunicationError):
    """Another rank failed, was killed, left, or makes no progress; raised on every rank except that one.

    Ranks that wait for each other in different calls raise it all; ``rank`` is then the first of them.

    The message contains everything. For programs: ``rank``, ``step`` (of that rank, counted as
    :attr:`lockstep.Session.step`; None if unknown), ``phase``, ``reason`` (one line), ``traceback`` (of the exception
    that rank raised, as text; None if it raised none) and ``stacks`` (of its threads; None if unknown).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        step: int | None = 0,
        phase: str = "",
        reason: str = "",
        traceback: str | None = None,
        stacks: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.phase = phase
        self.reason = reason
        self.traceback = traceback
        self.stacks = stacks


class StalledError(PeerFailure):
    """The other ranks no longer wait for this one: it made no progress for too long, or its host was unreachable."""


class InspectionError(LockstepError, RuntimeError):
    """A process of this host cannot be asked for its progress or its stacks; the message says why."""


class CheckError(LockstepError, RuntimeError):
    """A case of ``lockstep.check`` fails in one process, so that there is nothing to compare the ranks with."""


class ShardingError(LockstepError, RuntimeError, ValueError):
    """An optimizer cannot be sharded, or the program used a part of it that only an unsharded optimizer has."""


class UnknownOptimizerError(OptionError, ShardingError):
    """An optimizer's step is not known, so the program has to say how its state may be divided: ``granularity=``."""


class ShareError(LockstepError, RuntimeError):
    """A backward ran outside of a share, or an optimizer's step before the gradients of all shares were reduced."""


class AuditError(ShareError):
    """A share gave different bits when it was computed again; names the ranks, the share and the first tensor."""
