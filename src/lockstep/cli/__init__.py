"""The ``lockstep`` command: what can be asked of a run from outside."""
