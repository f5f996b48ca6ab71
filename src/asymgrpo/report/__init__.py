"""The page, the figures and the terminal view, from the run store alone; no torch."""

from asymgrpo.report.page import build_report
from asymgrpo.report.terminal import COLUMNS as COLOURINGS
from asymgrpo.report.terminal import inspect_run

__all__ = ["COLOURINGS", "build_report", "inspect_run"]
