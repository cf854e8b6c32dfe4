"""A stand-in for LSF, based only on IBM's manual and public logs, and never compared with a real LSF.

If the manual does not specify a behaviour, a comment says that it is an assumption.
"""
