"""Do N ranks compute what one process does? Checks any training program, whatever wraps its model."""

from lockstep.check.case import Case as Case
from lockstep.check.checking import assert_equal_to_one_process as assert_equal_to_one_process
from lockstep.check.checking import compare_with_one_process as compare_with_one_process
from lockstep.check.diagnosis import Finding as Finding
from lockstep.check.report import Report as Report

__all__ = ["Case", "Finding", "Report", "assert_equal_to_one_process", "compare_with_one_process"]
