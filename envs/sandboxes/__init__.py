"""Boxes in which a policy's commands run, behind one contract."""
