"""Runs each of several steps, even if one fails, since the other ranks run all of them as well."""

from types import TracebackType
from typing import NoReturn

from lockstep.errors import LockstepError


class RunAll:
    """A context for each step; :meth:`end` raises their errors after all have run.

    Example:
        >>> steps = RunAll()
        >>> for divisor in (0, 2):
        ...     with steps:
        ...         print(1 / divisor)
        0.5
        >>> steps.end()
        Traceback (most recent call last):
        ZeroDivisionError: division by zero
    """

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None:
            self._errors.append(error)
        return True

    @property
    def first(self) -> BaseException | None:
        """The first error, or None if there is none so far."""
        return self._errors[0] if self._errors else None

    @property
    def problem(self) -> str:
        """The text of the first error, for other ranks; empty if there is none so far."""
        error = self.first
        if error is None:
            return ""
        return str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Raise the first error, with those that say something else as notes."""
        if self._errors:
            raise_all(self._errors)


def raise_all(errors: list[BaseException]) -> NoReturn:
    """Raise the first of some errors, with those that say something else as notes; the list is empty then."""
    first, *others = errors
    errors.clear()
    texts = {str(first)}
    for later in others:
        if str(later) not in texts:
            first.add_note(f"After it, {type(later).__name__}: {later}")
        texts.add(str(later))
    raise first
