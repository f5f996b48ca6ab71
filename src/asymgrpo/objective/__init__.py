"""The mathematics: tensors in, tensors out. Imports torch and the standard library only.

Axes, used in every name and shape of this package:
P prompts, G rollouts a prompt, B = P * G rollouts, T token positions, V vocabulary size.
"""
