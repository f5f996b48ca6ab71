"""The page, the figures and the terminal view, from the run store alone; no torch."""

from asymgrpo.report.page import build_report

__all__ = ["build_report"]
