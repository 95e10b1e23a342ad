"""The ``lockstep`` command: starts runs, and inspects hosts and runs from outside."""
