"""`intraop`: one replica on the threads of the framework."""
