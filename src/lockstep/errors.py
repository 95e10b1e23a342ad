"""Every error a user of lockstep can cause.

::

    LockstepError
    ├── DeviceError (RuntimeError)            a device that is unknown, missing, or not where it has to be
    ├── LayoutError (RuntimeError, ValueError) shapes, dtypes, sizes or chunk sums that do not fit together
    │   └── LengthError (AssertionError, IndexError) lists that must have one entry for each replica, and have not
    ├── StructureError (ValueError)           nested inputs or outputs that cannot be split or put together
    ├── NotReplicableError (RuntimeError, ValueError) a module that cannot have replicas, with the reason
    │   └── AlreadyManagedError (AssertionError)  a module that something replicates or shards already
    ├── ReplicaError (RuntimeError)           a replica failed, and its own exception could not be rebuilt
    ├── GradientError (NotImplementedError)   a gradient was asked of something that has none
    ├── OptionError (RuntimeError, ValueError) an option, or two together, that make no sense
    │   └── UnknownOptionError (TypeError)    an option that does not exist
    ├── HookError (RuntimeError, TypeError, ValueError) a communication hook that is none, or returns the wrong thing
    ├── AgreementError (RuntimeError, ValueError) ranks that differ in what must be the same on all
    │   └── OutOfSyncError                    parameters or buffers that have other values on other ranks
    ├── CheckpointError (RuntimeError)        a checkpoint that cannot be saved, or from which nothing can go on
    │   └── CrashLoopError                    ranks have failed at the same step each time that they were started
    ├── CommunicationError (RuntimeError)     a collective failed or timed out
    ├── PeerError (RuntimeError)              another rank failed; this one is told
    │   └── PeerFailure                       the same, with that rank, its step and phase, and its own traceback
    │       └── StalledError                  the others have given this rank up
    ├── InspectionError (RuntimeError)        another process of this host cannot be asked what it is doing
    ├── ShardingError (RuntimeError, ValueError) an optimizer that cannot be sharded, or a use that needs a whole one
    └── ShareError (RuntimeError)             shares of a step, or its end, out of their order
        └── AuditError                        a share that gives other bits when it is computed again

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
    """A checkpoint could not be written, or cannot be resumed from; raised on every rank, with rank and reason."""


class CrashLoopError(CheckpointError):
    """Ranks have failed at the same step each time that they were started; raised on every rank instead of a start.

    For programs: ``step``, and ``samples``, the samples of its batch, as the sampler numbers them (empty if unknown).
    """

    def __init__(self, message: str, *, step: int | None = None, samples: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.samples = samples


class CommunicationError(LockstepError, RuntimeError):
    """A collective failed or timed out; ``__cause__`` is the error of the process group."""


class PeerError(LockstepError, RuntimeError):
    """The backward of another rank failed, or belongs to another round; that rank's own error gives the reason."""


class PeerFailure(PeerError, CommunicationError):
    """Another rank failed, was killed, left, or makes no progress; raised on every rank except that one.

    The message contains everything. For programs: ``rank``, ``step`` (batches that rank had begun; None if unknown),
    ``phase``, ``reason`` (one line), ``traceback`` (of the exception that rank raised, as text; None if it raised none)
    and ``stacks`` (of its threads; None if unknown).
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
    """The others have given this rank up: it made no progress for too long, or its host could not be reached."""


class InspectionError(LockstepError, RuntimeError):
    """A process of this host cannot be asked for its progress or its stacks; the message says why."""


class ShardingError(LockstepError, RuntimeError, ValueError):
    """An optimizer cannot be sharded, or something of a sharded one was used that only a whole one has."""


class ShareError(LockstepError, RuntimeError):
    """Shares are out of order: a backward outside of any, or an optimizer's step before all of a step are reduced."""


class AuditError(ShareError):
    """A share gave different bits when it was computed again; names the ranks, the share and the first tensor."""
