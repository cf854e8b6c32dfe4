"""A stand-in for LSF, built from IBM's manual and public logs alone, and never compared with a real LSF.

Comments mark behaviour that the manual does not specify as an assumption.
"""
