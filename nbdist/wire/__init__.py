"""Messages between the processes of nbdist, their form as bytes, and the copying of segments."""
