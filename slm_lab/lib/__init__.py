"""The leaf room: state protocol, files, errors, registries, random streams, schedules, logging, plots."""
