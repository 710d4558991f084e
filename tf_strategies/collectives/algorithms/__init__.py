"""All-reduce algorithms, one file each: functions that return a `Schedule`."""
