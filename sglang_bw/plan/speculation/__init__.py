"""Does speculation pay, and where: S = tau / R.

``accept`` knows tau, ``cost`` knows R, ``verdict`` decides.
"""
