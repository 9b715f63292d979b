"""The process groups of a rank: code that forms the groups, aborts them and forms them again."""
