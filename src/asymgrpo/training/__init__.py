"""Thin adapters from the objective to trainers that people already run."""
