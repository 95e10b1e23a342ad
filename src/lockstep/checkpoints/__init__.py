"""Checkpoints: a run continues from the newest complete checkpoint, with the same bits."""

from lockstep.checkpoints.resuming import Resumed as Resumed
from lockstep.checkpoints.resuming import resume as resume
from lockstep.checkpoints.sampler import ResumableSampler as ResumableSampler
from lockstep.checkpoints.saving import save as save
from lockstep.checkpoints.state import PerRank as PerRank
from lockstep.checkpoints.state import per_rank as per_rank
