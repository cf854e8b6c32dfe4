"""Site profiles, which contain the facts about one machine, and detection of the profile of this machine."""
