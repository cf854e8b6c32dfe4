"""IBM Spectrum LSF, written from IBM's manual and public scripts. Nothing here has been run on a real LSF."""
