"""What a machine is: cores, control groups, processes, installed tools."""
