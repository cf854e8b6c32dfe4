"""A stand-in for LSF, built from IBM's manual and public logs alone, and never compared with a real LSF.

What the manual does not state is marked as an assumption where it is done.
"""
