"""What the storage of a directory does, measured with the real Checkpointer (floor 3: imports checkpointer and below).

`place` is where a probe works and what it may take, `trials` what it measures, `timing` how, `survey` the whole.
"""

from pccheck.probing.survey import probe

__all__ = ["probe"]
