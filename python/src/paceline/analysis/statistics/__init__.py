"""Statistics of speeds: intervals, differences, and which configurations are the fastest."""
