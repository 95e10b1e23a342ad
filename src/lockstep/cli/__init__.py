"""The ``lockstep`` command: starts, measures and inspects runs."""
