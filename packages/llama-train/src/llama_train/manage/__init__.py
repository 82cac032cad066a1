"""Looking after runs: settings, states, curves, tables, jobs, sweeps. What tells of runs that exist needs no torch."""
